"""Cells: an anchor op and what follows it. The planner decides per cell, not per op.

Contraction rules, in program order:

* ops that depend on nothing but constants form one cell of their own, which is replicated;
* a view, or a cast or copy of a value nobody else reads, joins the cell that made the value, so that a cell ends in
  the placement that its consumers see;
* a pointwise op or cheap reduction joins a pointwise cell if its other operands come from cells before that cell: a
  norm written out as pow/mean/rsqrt/mul is one cell. A residual sum closes its cell, so that the stream and the norm
  that reads it can be kept or recomputed separately;
* every other op opens a cell.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autoplan.ir import Op, OpGraph
from autoplan.rules import OpRule

_COPIES = {"to", "_to_copy", "contiguous", "clone", "type_as"}


@dataclass(frozen=True)
class Cell:
    """Ops decided together.

    Attributes:
        ops: In program order.
        ext: Values read from outside, in order of first use.
        exports: Values that others read or that the graph returns.
        constant: Whether it depends on no parameter and no input.
    """

    ops: tuple[Op, ...]
    ext: tuple[str, ...]
    exports: tuple[str, ...]
    constant: bool = False

    @property
    def name(self) -> str:
        """Key of its first op."""
        return self.ops[0].key if self.ops else "constants"


class _Group:
    def __init__(self, op: Op, pointwise: bool) -> None:
        self.ops = [op]
        self.pointwise = pointwise
        self.closed = False
        self.reads: set[int] = set()  # groups it reads from


def make_cells(graph: OpGraph, rules: Mapping[str, OpRule]) -> tuple[Cell, ...]:
    """Contracts a graph; cells come in an order in which each reads only earlier ones."""
    constant = {i.value for i in graph.inputs if i.kind == "buffer"}
    constants: list[Op] = []
    groups: list[_Group] = []
    home: dict[str, int] = {}
    for op in graph.ops:
        if all(v in constant for v in op.inputs) and not rules[op.key].random:
            constant.update(op.outputs)
            constants.append(op)
            continue
        index = _home(op, graph, rules[op.key], groups, home, constant)
        if index is None:
            rule = rules[op.key]
            index = len(groups)
            groups.append(_Group(op, rule.pointwise or rule.reduction or (rule.linear and not rule.view)))
        else:
            groups[index].ops.append(op)
        groups[index].reads.update(home[v] for v in op.inputs if v in home and home[v] != index)
        _close(op, graph, groups[index], home, index)
        home.update(dict.fromkeys(op.outputs, index))
    cells = [_cell(graph, constants, constant=True)] if constants else []
    return (*cells, *(_cell(graph, g.ops) for g in groups))


def _home(
    op: Op, graph: OpGraph, rule: OpRule, groups: list[_Group], home: Mapping[str, int], constant: set[str]
) -> int | None:
    """Cell that the op joins, or None."""
    produced = {home[v] for v in op.inputs if v in home}
    outside = [v for v in op.inputs if v not in home and v not in constant]
    if not produced or any(graph.input_of[v].kind != "parameter" for v in outside):
        return None
    last = max(produced)
    if rule.linear and not outside and len(produced) == 1 and not groups[last].closed:
        alone = all(len(graph.consumers[v]) == 1 for v in op.inputs)
        if rule.view or groups[last].pointwise or (alone and op.name in _COPIES):
            return last
    if not (rule.pointwise or rule.reduction or rule.linear):
        return None
    later = (i for i in range(len(groups) - 1, last, -1) if groups[i].pointwise and groups[i].reads & produced)
    index = last if groups[last].pointwise else next(later, None)
    return None if index is None or groups[index].closed else index


def _close(op: Op, graph: OpGraph, group: _Group, home: Mapping[str, int], index: int) -> None:
    """A sum of two streams that several ops read ends its cell."""
    sources = {home[v] for v in op.inputs if v in home and home[v] != index}
    inner = any(home.get(v) == index for v in op.inputs)
    if group.pointwise and len(sources) + inner >= 2 and sources and len(graph.consumers[op.outputs[0]]) >= 2:
        group.closed = True


def _cell(graph: OpGraph, ops: list[Op], constant: bool = False) -> Cell:
    keys = {op.key for op in ops}
    made = {o for op in ops for o in op.outputs}
    ext = tuple(dict.fromkeys(v for op in ops for v in op.inputs if v not in made))
    exports = tuple(
        o for op in ops for o in op.outputs if o in graph.outputs or any(c.key not in keys for c in graph.consumers[o])
    )
    return Cell(tuple(ops), ext, exports, constant)
