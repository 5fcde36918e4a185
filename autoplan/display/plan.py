"""Plans as tables: for terminals (`plan_tables`), for notebooks (`plan_html`), and two side by side."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rich.console import RenderableType

from autoplan.display.fold import fold
from autoplan.display.grid import Grid, html_page, html_table, rich_table
from autoplan.display.svg import memory_svg
from autoplan.ir.plan import OpPlan, Plan
from autoplan.ir.units import format_bytes, format_percent, format_seconds


def plan_tables(plan: Plan, *, ops: bool = True) -> list[RenderableType]:
    """Summary, memory and time, placements, ops, what is recomputed, what is replicated for want of a rule.

    Args:
        plan: The plan.
        ops: Whether to list every op's placements as well.
    """
    return [rich_table(grid) for grid in plan_grids(plan) if ops or not grid.folded]


def plan_html(plan: Plan) -> str:
    """A self-contained fragment: the tables and a bar of memory against the cap."""
    summary, *rest = plan_grids(plan)
    peak = max(plan.peak_bytes, default=0)
    parts = memory_parts(plan) or {"peak": float(peak)}
    return html_page([html_table(summary), memory_svg(parts, plan.cap_bytes), *map(html_table, rest)])


def compare_tables(a: Plan, b: Plan, *, names: tuple[str, str] = ("before", "after")) -> list[RenderableType]:
    """What changes from one plan to another."""
    return [rich_table(grid) for grid in compare_grids(a, b, names=names)]


def compare_html(a: Plan, b: Plan, *, names: tuple[str, str] = ("before", "after")) -> str:
    """The same for a notebook."""
    return html_page([html_table(grid) for grid in compare_grids(a, b, names=names)])


def plan_grids(plan: Plan) -> list[Grid]:
    """The tables of a plan; those that would be empty are left out."""
    axes = ", ".join(plan.mesh.axes)
    legend = f"one placement per mesh axis ({axes}): R whole, S(dim) or S(dim:outer) cut, P summand"
    inputs = fold((path, str(p)) for path, p in plan.inputs.items())
    replicated = tuple((target, str(n)) for target, n in sorted(plan.replicated.items()))
    grids = [
        Grid(f"Plan for {plan.model}", ("", ""), tuple(_summary(plan))),
        Grid(
            "Predicted step on one device",
            ("", ">", ">"),
            tuple(_breakdown(plan)),
            note="time as a share of the step; memory held at the moment of the peak, as a share of the cap",
        ),
        Grid(
            "Parameters, buffers and inputs",
            ("path", "placement", ">count"),
            tuple((f.pattern, f.content, str(f.count)) for f in inputs),
            note=legend,
        ),
        Grid("Recomputed in backward", ("module", "ops", ">count"), tuple(_recomputed(plan))),
        Grid(
            "Ops without a sharding rule (replicated)",
            ("op", ">count"),
            replicated,
            note="every device does their work in full",
        ),
        Grid("Ops", ("op", "reads", "leaves", "backward", ">count"), tuple(_ops(plan)), note=legend, folded=True),
    ]
    return [grid for grid in grids if grid.rows]


def memory_parts(plan: Plan) -> Mapping[str, float]:
    """Bytes at the peak by kind, as far as the plan's breakdown gives them."""
    return {k.removesuffix("_bytes"): v for k, v in plan.breakdown.items() if k.endswith("_bytes") and v > 0}


def compare_grids(a: Plan, b: Plan, *, names: tuple[str, str]) -> list[Grid]:
    """Summary side by side; then what is placed, recomputed or run differently."""
    left, right = dict(_summary(a)), dict(_summary(b))
    rows = [
        (key, left.get(key, ""), right.get(key, ""))
        for key in dict.fromkeys((*left, *right))
        if left.get(key) != right.get(key)
    ]
    seconds = dict.fromkeys(k for k in (*a.breakdown, *b.breakdown) if k.endswith(("_s", "_bytes")))
    rows += [
        (_label(k), _amount(k, a.breakdown.get(k, 0.0)), _amount(k, b.breakdown.get(k, 0.0)))
        for k in seconds
        if a.breakdown.get(k) != b.breakdown.get(k)
    ]
    placed = {k: str(p) for k, p in a.inputs.items()}, {k: str(p) for k, p in b.inputs.items()}
    remat = {k: o.remat for k, o in a.ops.items()}, {k: o.remat for k, o in b.ops.items()}
    where = {k: _placements(o) for k, o in a.ops.items()}, {k: _placements(o) for k, o in b.ops.items()}
    columns = (*names, ">count")
    grids = [
        Grid("What changes", ("", *names), tuple(rows), note="" if rows else "the summaries are equal"),
        Grid("Placements that change", ("path", *columns), _changes(*placed)),
        Grid("Recomputation that changes", ("op", *columns), _changes(*remat)),
        Grid("Ops that run otherwise", ("op", *columns), _changes(*where), folded=True),
    ]
    return [grids[0], *(grid for grid in grids[1:] if grid.rows)]


def _changes(a: Mapping[str, str], b: Mapping[str, str]) -> tuple[tuple[str, ...], ...]:
    # unchanged ones take part, so that a pattern with * means all layers
    pairs = [(k, (a.get(k, "-"), b.get(k, "-"))) for k in dict.fromkeys((*a, *b))]
    return tuple((f.pattern, *f.content, str(f.count)) for f in fold(pairs) if f.content[0] != f.content[1])


def _summary(plan: Plan) -> Iterable[tuple[str, str]]:
    options = plan.options
    yield "cluster", f"{plan.cluster}, {plan.mesh.size} devices"
    yield "mesh", str(plan.mesh)
    if plan.schedule.kind != "none":
        yield "schedule", f"{plan.schedule.kind}, {plan.schedule.microbatches} microbatches, {len(plan.stages)} stages"
    yield "precision, optimizer", f"{options.precision}, {options.optimizer}"
    if options.pins:
        yield "pinned", "\n".join(f"{k} = {v}" for k, v in options.pins.items())
    if not options.remat:
        yield "recomputation", "switched off"
    yield "step time", format_seconds(plan.step_time_s)
    for i, peak in enumerate(plan.peak_bytes):
        stage = f" of stage {i}" if len(plan.peak_bytes) > 1 else ""
        share = f" ({format_percent(peak / plan.cap_bytes)})" if plan.cap_bytes else ""
        yield f"peak memory{stage}", f"{format_bytes(peak)} of {format_bytes(plan.cap_bytes)}{share}"
    recomputed = sum(o.remat == "recompute" for o in plan.ops.values())
    yield "recomputed", f"{recomputed} of {len(plan.ops)} ops"
    yield "objective, bound", f"{format_seconds(plan.objective_s)}, {format_seconds(plan.bound_s)}"
    yield "gap", format_percent(plan.gap)
    yield "solved in", format_seconds(plan.solve_s)
    if plan.source.get("model"):
        yield "model from", " ".join(f"{v}" if k == "model" else f"{k}={v}" for k, v in plan.source.items() if v)


def _breakdown(plan: Plan) -> Iterable[tuple[str, str, str]]:
    """Seconds with their share of the step, bytes with their share of the cap."""
    for suffix, whole in (("_s", plan.step_time_s), ("_bytes", float(plan.cap_bytes))):
        for key, value in plan.breakdown.items():
            if key.endswith(suffix) and value:
                yield _label(key), _amount(key, value), format_percent(value / whole) if whole else ""
    for key, value in plan.breakdown.items():
        if not key.endswith(("_s", "_bytes")):
            yield _label(key), f"{value:g}", ""


def _label(key: str) -> str:
    """``forward_compute_s`` -> ``time: forward compute``; ``parameters_bytes`` -> ``memory: parameters``."""
    for suffix, kind in (("_s", "time: "), ("_bytes", "memory: ")):
        if key.endswith(suffix):
            return kind + key.removesuffix(suffix).replace("_", " ")
    return key.replace("_", " ")


def _amount(key: str, value: float) -> str:
    return format_bytes(value) if key.endswith("_bytes") else format_seconds(value)


_MOVES = frozenset(
    ["view", "reshape", "_unsafe_view", "transpose", "permute", "t", "expand", "unsqueeze", "squeeze", "slice",
     "select", "split"]
)  # fmt: skip


def _recomputed(plan: Plan) -> Iterable[tuple[str, str, str]]:
    """Per module with equal recomputed ops: their names, views left out, since they cost nothing."""
    per_module: dict[str, list[str]] = {}
    for key, op in plan.ops.items():
        if op.remat == "recompute":
            module, _, name = key.partition(":")
            if _short(name).partition("#")[0] not in _MOVES:
                per_module.setdefault(module, []).append(_short(name))
    kept = {key.partition(":")[0] for key in plan.ops} - set(per_module)
    items = [(m, ", ".join(_counted(names))) for m, names in per_module.items()] + [(m, "") for m in sorted(kept)]
    for f in fold(items):
        if f.content:
            yield f.pattern or "(model)", f.content, str(f.count)


def _counted(names: list[str]) -> list[str]:
    stems = [n.partition("#")[0] for n in names]
    return [stem if stems.count(stem) == 1 else f"{stems.count(stem)} {stem}" for stem in dict.fromkeys(stems)]


def _ops(plan: Plan) -> Iterable[tuple[str, ...]]:
    """Every op, layers collapsed, in program order of the first layer."""
    items = []
    for key, op in plan.ops.items():
        back = "recompute" if op.remat == "recompute" else ""
        gathered = "keeps gathered" if any(op.keep_gathered) else ""
        reads, leaves = ("  ".join(map(str, side)) for side in (op.operands, op.results))
        items.append((key, (reads, leaves, ", ".join(filter(None, (back, gathered))))))
    for f in fold(items):
        module, _, name = f.pattern.partition(":")
        yield f"{module} {_short(name)}".strip(), *f.content, str(f.count)


def _placements(op: OpPlan) -> str:
    reads, leaves = ("  ".join(map(str, side)) for side in (op.operands, op.results))
    return f"{reads} -> {leaves}"


def _short(name: str) -> str:
    """``aten.linear#0`` -> ``linear``; later ones of a module keep their ordinal."""
    return name.removeprefix("aten.").removesuffix("#0")
