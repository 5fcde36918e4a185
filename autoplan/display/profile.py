"""Profiles of models: for terminals (`profile_tables`) and notebooks (`profile_html`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from rich.console import RenderableType
from rich.text import Text

from autoplan.display.grid import Grid, html_page, html_table, rich_table
from autoplan.display.modules import Branch, module_rows, module_tree
from autoplan.display.svg import memory_svg
from autoplan.display.timeline import sparkline, timeline_svg
from autoplan.ir.units import format_bytes, format_flops, format_percent, format_seconds
from autoplan.profiler import Group, Profile

_COLUMNS = (">ops", ">forward", ">backward", ">bytes", ">time", ">of step", ">saved", ">count")


def profile_tables(profile: Profile, *, depth: int | None = None, top: int = 10) -> list[RenderableType]:
    """Summary, memory over time, costs per module (equal layers collapsed), per op, and the slowest ops.

    Args:
        profile: The profile.
        depth: Levels of the module tree; by default as many as show one level below the layers.
        top: How many of the slowest ops to list.
    """
    summary, *rest = (rich_table(grid) for grid in profile_grids(profile, depth=depth, top=top))
    memory = [Text(sparkline(profile.timeline)), Text("")] if profile.timeline else []
    return [summary, *memory, *rest]


def profile_html(profile: Profile) -> str:
    """A self-contained fragment with a picture of memory over time, or of the peak where no time line is known."""
    summary, *rest = profile_grids(profile)
    cap = profile.memory_bytes
    picture = timeline_svg(profile.timeline, cap) if profile.timeline else memory_svg(_parts(profile), cap)
    return html_page([html_table(summary), picture, *map(html_table, rest)])


def profile_grids(profile: Profile, *, depth: int | None = None, top: int = 10) -> list[Grid]:
    """The tables of a profile."""
    tree = module_tree(profile.nodes)
    rows = module_rows(tree, _depth(profile) if depth is None else depth, lambda b: _branch_row(b, profile))
    ops = [(g.name, *_row(g, profile)) for g in profile.by_op()]
    slow = sorted(profile.nodes, key=lambda n: -n.seconds)[:top]
    share = profile.step_time_s or 1.0
    grids = [
        Grid(f"Profile of {profile.model}", ("", ""), tuple(_summary(profile)), note="\n".join(_notes(profile))),
        Grid(
            "Phases",
            ("phase", ">flops", ">read", ">written", ">time", ">of step", ">peak memory"),
            tuple(
                (
                    p.name,
                    format_flops(p.flops),
                    format_bytes(p.read_bytes),
                    format_bytes(p.written_bytes),
                    format_seconds(p.seconds),
                    format_percent(p.seconds / share),
                    format_bytes(p.peak_bytes),
                )
                for p in profile.by_phase()
            ),
        ),
        Grid(
            "Modules",
            ("module", *_COLUMNS),
            tuple(rows),
            note="with all that is inside them; forward and backward in flops of tensor products, a multiply-add "
            "counting 2; time is forward and backward of one of them",
        ),
        Grid("Ops", ("op", *_COLUMNS[:-1]), tuple(ops)),
        Grid(
            f"Slowest {len(slow)} of {len(profile.nodes)} ops",
            ("op", ">forward", ">backward", ">bytes", ">op/byte", ">time", ">of step"),
            tuple(
                (
                    n.key,
                    format_flops(n.forward_flops),
                    format_flops(n.backward_flops),
                    format_bytes(n.forward_bytes + n.backward_bytes),
                    f"{n.intensity:.1f}",
                    format_seconds(n.seconds),
                    format_percent(n.seconds / share),
                )
                for n in slow
            ),
        ),
        Grid(
            "Ops whose flops are not known (counted as 0)",
            ("op", ">count", ">of bytes", ">of time"),
            tuple(
                (target, str(u.count), format_percent(u.bytes_share), format_percent(u.time_share))
                for target, u in sorted(profile.unknown_ops.items())
            ),
        ),
    ]
    return [grid for grid in grids if grid.rows]


def _depth(profile: Profile) -> int:
    """Parts of a path up to one below the first number: ``transformer.h.0.mlp``."""
    paths = [n.module.split(".") for n in profile.nodes]
    found = [next((i for i, part in enumerate(p) if part.isdigit()), None) for p in paths]
    return max((i + 2 for i in found if i is not None), default=2)


def _branch_row(b: Branch, profile: Profile) -> tuple[str, ...]:
    return _row(Group(b.name, **{f.name: getattr(b, f.name) for f in dataclasses.fields(Group)[1:]}), profile)


def _row(g: Group, profile: Profile) -> tuple[str, ...]:
    seconds = g.forward_s + g.backward_s
    share = seconds / profile.step_time_s if profile.step_time_s else 0.0
    return (
        str(g.count),
        format_flops(g.forward_flops),
        format_flops(g.backward_flops),
        format_bytes(g.forward_bytes + g.backward_bytes),
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


def _notes(profile: Profile) -> Iterator[str]:
    yield from profile.notes
    if profile.uncounted_scratch:
        found = ", ".join(f"{n} {name}" for name, n in profile.uncounted_scratch.items())
        yield f"peak memory leaves out the scratch memory that these kernels take: {found}"


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
