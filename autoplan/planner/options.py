"""Options: every way in which a node of the problem may be done on a mesh.

A *node* is a graph input (a parameter, buffer or step input), a cell, or a *fan*: the shared copy of a value that
several matrix products read, so that it is gathered once and its gradient summed before it is reduced once.

An option fixes, per mesh axis, what each tensor of the node looks like; what backward finds of it (the states below);
its compute seconds; and its bytes. Towards its neighbours only two views of an option matter, and the problem's edge
variables are indexed by them: what a producer shows of a value (`Out`) and what a consumer wants of it (`In`).

States of a cell: ``K`` keeps its exports and what its own backward reads; ``L`` keeps the exports and recomputes the
rest; ``R`` recomputes everything from what it reads; ``F`` keeps what its own backward reads, and frees the exports,
which nobody may then need.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autoplan.ir import Op
from autoplan.planner.cells import Cell
from autoplan.planner.pricing import Prices
from autoplan.rules.redistribute import Code, Codes, consumer_gradient, divides, producer_gradient


class Out(NamedTuple):
    """What a producer shows of a value: placement, whether backward finds it, gradient placement it accepts."""

    codes: Codes
    available: bool
    gradient: Codes


class In(NamedTuple):
    """What a consumer wants of a value: placement, gradient placement it leaves, whether backward reads it."""

    codes: Codes
    gradient: Codes
    needed: bool


class OpChoice(NamedTuple):
    """Placements of one op's operands and results."""

    operands: tuple[Codes, ...]
    results: tuple[Codes, ...]


@dataclass(frozen=True)
class Option:
    """One way to do a node.

    Attributes:
        outs: Per export of the node.
        ins: Per value it reads.
        cost_s: Compute seconds of a step, recomputation included.
        bytes: Bytes held through the step.
        state: ``K``, ``L``, ``R`` or ``F``; ``K`` for inputs, ``""`` for fans.
        ops: Placements per op of a cell.
        recompute_s: Part of `cost_s` that is recomputation.
    """

    outs: tuple[Out, ...]
    ins: tuple[In, ...]
    cost_s: float
    bytes: int
    state: str = "K"
    ops: tuple[OpChoice, ...] = ()
    recompute_s: float = 0.0


class _AxisOption(NamedTuple):
    values: dict[str, Code]
    graded: dict[str, bool]
    sharded: tuple[bool, ...]


def input_options(value: str, kind: str, prices: Prices, pinned: Codes | None) -> list[Option]:
    """Options of a graph input: its stored placements."""
    mesh = prices.mesh.shape
    sizes = dict(prices.table.sizes[value])
    if pinned is not None:
        candidates: Iterator[Codes] = iter([pinned])
    elif kind == "buffer":
        candidates = iter([("R",) * len(mesh)])
    else:
        per_axis: list[list[Code]] = [
            ["R", *(p for p, n in sizes.items() if n % k == 0 and k > 1 and (kind == "parameter" or p[1] == 1))]
            for k in mesh
        ]
        candidates = iter(itertools.product(*per_axis))
    out = []
    for codes in candidates:
        if pinned is not None or (divides(codes, sizes, mesh) and _storable(codes)):
            size = prices.state_bytes(value, codes) if kind == "parameter" else prices.local_bytes(value, codes)
            update = prices.update_time(value, codes) if kind == "parameter" else 0.0
            out.append(Option((Out(codes, True, codes),), (), update, size))
    return out


def _storable(codes: Codes) -> bool:
    """Whether DTensor can hold it: axes that share a dim all cut its leading factor."""
    by_dim: dict[int, list[int]] = {}
    for c in codes:
        if isinstance(c, tuple):
            by_dim.setdefault(c[0], []).append(c[1])
    return all(len(outers) == 1 or set(outers) == {1} for outers in by_dim.values())


def fan_options(value: str, prices: Prices) -> list[Option]:
    """Options of a fan: the placement its readers share, with gradients summed over an axis or not."""
    sizes = dict(prices.table.sizes[value])
    mesh = prices.mesh.shape
    per_axis: list[list[tuple[Code, Code]]] = [
        [("R", "R"), ("R", "P"), *((p, p) for p, n in sizes.items() if n % k == 0)] if k > 1 else [("R", "R")]
        for k in mesh
    ]
    out = []
    for combination in itertools.product(*per_axis):
        codes = tuple(c for c, _ in combination)
        gradient = tuple(g for _, g in combination)
        if divides(codes, sizes, mesh):
            for needed in (False, True):
                out.append(Option((Out(codes, needed, gradient),), (In(codes, gradient, needed),), 0.0, 0, ""))
    return out


def cell_options(cell: Cell, prices: Prices, *, remat: bool) -> list[Option]:
    """Options of a cell: every consistent choice of factors per axis, times the states."""
    mesh = prices.mesh.shape
    per_axis = [_axis_options(cell, prices, n) for n in mesh]
    needs = _Needs(cell, prices)
    out: list[Option] = []
    for combination in itertools.product(*per_axis):
        codes = {v: tuple(o.values[v] for o in combination) for v in combination[0].values}
        if all(divides(c, dict(prices.table.sizes[v]), mesh) for v, c in codes.items()):
            graded = {v: tuple(o.graded.get(v, False) for o in combination) for v in cell.ext}
            sharded = [tuple(o.sharded[i] for o in combination) for i in range(len(cell.ops))]
            out.extend(_with_states(cell, prices, needs, codes, graded, sharded, remat))
    return out


def _op_axis_options(op: Op, prices: Prices, n: int) -> list[tuple[tuple[Code, ...], tuple[Code, ...], bool]]:
    """``(operands, results, sharded)`` along one axis of `n` devices."""
    whole: tuple[tuple[Code, ...], tuple[Code, ...], bool] = (
        ("R",) * len(op.inputs),
        ("R",) * len(op.outputs),
        False,
    )
    out = [whole]
    if n == 1:
        return out
    for c in prices.table.choices[op.key]:
        if c.size % n:
            continue
        if not c.contracted and any(r is None for r in c.results):
            continue
        operands: list[Code] = ["R" if p is None else p for p in c.operands]
        if c.contracted:
            for i in c.additive:
                operands[i] = "P"
        results: list[Code] = ["P" if p is None else p for p in c.results]
        out.append((tuple(operands), tuple(results), True))
    values = prices.graph.values
    if prices.table.rules[op.key].linear and all(values[v].is_float for v in (*op.inputs, *op.outputs)):
        out.append((("P",) * len(op.inputs), ("P",) * len(op.outputs), False))
    return out


def _axis_options(cell: Cell, prices: Prices, n: int) -> list[_AxisOption]:
    values = prices.graph.values
    if cell.constant:
        names = [*cell.ext, *(o for op in cell.ops for o in op.outputs)]
        return [_AxisOption(dict.fromkeys(names, "R"), {}, (False,) * len(cell.ops))]
    internal = {o for op in cell.ops for o in op.outputs}
    frontier = [_AxisOption({}, {}, ())]
    for op in cell.ops:
        grown: list[_AxisOption] = []
        options = _op_axis_options(op, prices, n)
        for state in frontier:
            for operands, results, sharded in options:
                if any(state.values.get(v, c) != c for v, c in zip(op.inputs, operands, strict=True)):
                    continue
                graded = dict(state.graded)
                mixed = False
                for v, c in zip(op.inputs, operands, strict=True):
                    if c == "R" and values[v].requires_grad:
                        # a summand of the gradient may neither meet a whole one nor arise inside the cell
                        mixed |= (v in internal and sharded) or graded.get(v, sharded) != sharded
                        graded[v] = sharded
                if mixed:
                    continue
                merged = {**state.values, **dict(zip(op.inputs, operands, strict=True))}
                merged.update(zip(op.outputs, results, strict=True))
                grown.append(_AxisOption(merged, graded, (*state.sharded, sharded)))
        frontier = grown
    best: dict[tuple[object, ...], _AxisOption] = {}
    for o in frontier:
        key = (
            tuple(o.values[v] for v in (*cell.ext, *cell.exports)),
            tuple(o.graded.get(v, False) for v in cell.ext),
        )
        if key not in best or sum(o.sharded) > sum(best[key].sharded):
            best[key] = o
    return list(best.values())


class _Needs:
    """What a cell's backward reads: of outside values, of its own, and hidden bytes."""

    def __init__(self, cell: Cell, prices: Prices) -> None:
        graph, rules = prices.graph, prices.table.rules
        made = {o for op in cell.ops for o in op.outputs}
        self.root: dict[str, str] = {}
        for op in cell.ops:
            if rules[op.key].view and op.inputs:
                for o in op.outputs:
                    self.root[o] = self.root.get(op.inputs[0], op.inputs[0])
        self.outside: set[str] = set()
        self.inside: set[str] = set()
        self.hidden: list[tuple[int, int]] = []  # (op index, bytes)
        for i, op in enumerate(cell.ops):
            rule = rules[op.key]
            if not any(graph.values[o].requires_grad for o in op.outputs):
                continue
            read = [op.inputs[j] for j in rule.saved_operands] + [op.outputs[j] for j in rule.saved_results]
            for v in read:
                r = self.root.get(v, v)
                (self.inside if r in made else self.outside).add(r)
            if rule.hidden_bytes:
                self.hidden.append((i, rule.hidden_bytes))
        self.export_roots = tuple(dict.fromkeys(self.root.get(v, v) for v in cell.exports))
        self.only_views = all(rules[op.key].view for op in cell.ops) and not cell.constant
        self.made = made


def _with_states(
    cell: Cell,
    prices: Prices,
    needs: _Needs,
    codes: Mapping[str, Codes],
    graded: Mapping[str, tuple[bool, ...]],
    sharded: Sequence[tuple[bool, ...]],
    remat: bool,
) -> Iterator[Option]:
    choices = tuple(
        OpChoice(tuple(codes[v] for v in op.inputs), tuple(codes[o] for o in op.outputs)) for op in cell.ops
    )
    forward = backward = 0.0
    for op, choice, divided in zip(cell.ops, choices, sharded, strict=True):
        f, b = prices.op_time(op, choice.operands, choice.results, divided)
        forward, backward = forward + f, backward + b
    hidden = 0
    for i, size in needs.hidden:
        hidden += size // math.prod(n for n, s in zip(prices.mesh.shape, sharded[i], strict=True) if s)
    exported = {r for r in needs.export_roots if r in needs.made}
    export_bytes = sum(prices.local_bytes(r, codes[r]) for r in exported)
    own = sum(prices.local_bytes(r, codes[r]) for r in needs.inside)
    beside = sum(prices.local_bytes(r, codes[r]) for r in needs.inside - exported)
    passed = {r for r in needs.export_roots if r not in needs.made}

    def option(state: str, available: bool, size: int, read: set[str] | None, again: float) -> Option:
        outs = tuple(Out(codes[v], available, producer_gradient(codes[v])) for v in cell.exports)
        ins = tuple(In(codes[v], consumer_gradient(codes[v], graded[v]), read is None or v in read) for v in cell.ext)
        return Option(outs, ins, forward + backward + again, size, state, choices, again)

    if needs.only_views:
        yield option("R", True, 0, None, 0.0)
        yield option("F", False, 0, needs.outside, 0.0)
        return
    yield option("K", True, export_bytes + beside + hidden, needs.outside | passed, 0.0)
    yield option("F", False, own + hidden, needs.outside, 0.0)
    if remat:
        yield option("R", True, 0, None, forward)
        if beside + hidden > 0:
            yield option("L", True, export_bytes, None, forward)
