"""Profiles of models as tables: for terminals (`profile_tables`) and notebooks (`profile_html`)."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import RenderableType

from autoplan.display.fold import fold
from autoplan.display.grid import Grid, html_page, html_table, rich_table
from autoplan.display.svg import memory_svg
from autoplan.ir.units import format_bytes, format_flops, format_percent, format_seconds
from autoplan.profiler import Group, Profile

_COLUMNS = (">ops", ">forward", ">backward", ">time", ">of step", ">saved", ">count")


def profile_tables(profile: Profile, *, depth: int | None = None) -> list[RenderableType]:
    """Summary, costs per module (equal layers collapsed) and per op.

    Args:
        profile: The profile.
        depth: Leading parts of module paths to keep; by default as many as show one level below the layers.
    """
    return [rich_table(grid) for grid in profile_grids(profile, depth=depth)]


def profile_html(profile: Profile) -> str:
    """A self-contained fragment with a bar of memory at the peak."""
    summary, *rest = profile_grids(profile)
    return html_page([html_table(summary), memory_svg(_parts(profile), profile.memory_bytes), *map(html_table, rest)])


def profile_grids(profile: Profile, *, depth: int | None = None) -> list[Grid]:
    """The tables of a profile."""
    deep = _depth(profile) if depth is None else depth
    modules = fold((g.name, _row(g, profile)) for g in profile.by_module(deep))
    ops = [(g.name, *_row(g, profile), "") for g in profile.by_op()]
    grids = [
        Grid(f"Profile of {profile.model}", ("", ""), tuple(_summary(profile)), note="\n".join(profile.notes)),
        Grid(
            "Modules",
            ("module", *_COLUMNS),
            tuple((f.pattern or "(model)", *f.content, str(f.count)) for f in modules),
            note="forward and backward in floating-point operations; time is forward and backward of one of them",
        ),
        Grid("Ops", ("op", *_COLUMNS[:-1]), tuple(row[:-1] for row in ops)),
        Grid(
            "Ops whose flops are not known (counted as 0)",
            ("op", ">count"),
            tuple((target, str(n)) for target, n in sorted(profile.unknown_ops.items())),
        ),
    ]
    return [grid for grid in grids if grid.rows]


def _depth(profile: Profile) -> int:
    """Parts of a path up to one below the first number: ``transformer.h.0.mlp``."""
    paths = [n.module.split(".") for n in profile.nodes]
    found = [next((i for i, part in enumerate(p) if part.isdigit()), None) for p in paths]
    return max((i + 2 for i in found if i is not None), default=2)


def _row(g: Group, profile: Profile) -> tuple[str, ...]:
    seconds = g.forward_s + g.backward_s
    share = seconds / profile.step_time_s if profile.step_time_s else 0.0
    return (
        str(g.count),
        format_flops(g.forward_flops),
        format_flops(g.backward_flops),
        format_seconds(seconds),
        format_percent(share),
        format_bytes(g.saved_bytes),
    )


def _summary(profile: Profile) -> Iterable[tuple[str, str]]:
    flops = profile.forward_flops + profile.backward_flops
    seconds = profile.step_time_s
    yield "on", f"one {profile.device} of {profile.cluster}"
    yield "forward, backward", f"{format_flops(profile.forward_flops)}, {format_flops(profile.backward_flops)}"
    rate = f", {format_flops(flops / seconds)}/s" if seconds else ""
    yield "step, op after op", f"{format_seconds(seconds)} (update {format_seconds(profile.optimizer_s)}){rate}"
    yield "parameters", format_bytes(profile.parameter_bytes)
    yield "gradients", format_bytes(profile.gradient_bytes)
    yield "optimizer state", format_bytes(profile.optimizer_bytes)
    yield "saved activations", format_bytes(profile.saved_activation_bytes)
    peaks = [f"{name} {format_bytes(n)}" for name, n in profile.peak_bytes.items()]
    yield "peak memory", ", ".join(peaks) + f"; the device has {format_bytes(profile.memory_bytes)}"


def _parts(profile: Profile) -> dict[str, float]:
    """What makes up the peak of the step; what is neither state nor saved is called temporary."""
    static = {
        "parameters": profile.parameter_bytes,
        "optimizer": profile.optimizer_bytes,
        "inputs": profile.input_bytes,
        "saved activations": profile.saved_activation_bytes,
    }
    rest = profile.peak_bytes["step"] - sum(static.values())
    return {**{k: float(v) for k, v in static.items()}, "gradients and temporaries": float(max(0, rest))}
