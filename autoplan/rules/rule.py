"""What a sharding rule is, and the table of rules.

A rule says which dims of an op's operands and results are the same factor. It is a list of `Link`s; each link joins
`Span`s, one per tensor that has the factor. A span views the flattened `dims` of a tensor as ``outer x n x inner``
and means the middle part, so that

* a plain shared dim is ``Span(t, (d,))``,
* a view joins whole groups of dims, ``Span(t, (0, 1))`` with ``Span(u, (0,))``,
* the piece that ``split`` returns is ``Span(t, (d,), outer=3)`` with ``Span(u, (d,))``,
* the KV heads inside the query heads of grouped attention are ``Span(q, (1,), inner=group)``.

A link without results is contracted: sharding it leaves a sum over the devices (``P``), and operands listed as
`additive` (a bias) must then be summands as well. Dims that no link names stay whole. From the links every strategy
on every mesh follows (`autoplan.rules.factors`); the backward needs no rules of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autoplan.errors import AutoplanError
from autoplan.ir import Op, OpGraph, TensorSpec


@dataclass(frozen=True)
class Span:
    """A factor's place in one tensor; see the module docstring.

    Attributes:
        tensor: Index among the op's distinct inputs, or among its results.
        dims: Consecutive dims, flattened row-major.
        outer: Size before the factor within the flattened dims.
        inner: Size after it.
    """

    tensor: int
    dims: tuple[int, ...]
    outer: int = 1
    inner: int = 1


@dataclass(frozen=True)
class Link:
    """Places that hold one and the same factor."""

    operands: tuple[Span, ...]
    results: tuple[Span, ...]
    additive: tuple[int, ...] = ()

    @property
    def contracted(self) -> bool:
        """Whether sharding it makes the results partial sums."""
        return not self.results


@dataclass(frozen=True)
class OpRule:
    """A rule applied to one op.

    Attributes:
        links: Which factors may be sharded.
        linear: Whether partial sums pass through when every tensor operand is one.
        saved_operands: Operands (indices) that the op's own backward reads.
        saved_results: Results that it reads.
        view: Whether the result shares its operand's memory.
        pointwise: Cheap elementwise work that joins its neighbours in a cell.
        reduction: A cheap reduction that may stand inside a pointwise cell (the mean of a norm).
        random: Draws random numbers.
        hidden_bytes: Bytes that its backward keeps besides operands and results (statistics, masks).
        known: False for ops without a rule: replicated, and reported.
    """

    links: tuple[Link, ...] = ()
    linear: bool = False
    saved_operands: tuple[int, ...] = ()
    saved_results: tuple[int, ...] = ()
    view: bool = False
    pointwise: bool = False
    reduction: bool = False
    random: bool = False
    hidden_bytes: int = 0
    known: bool = True


@dataclass(frozen=True)
class OpView:
    """An op together with the specs of what it reads and writes; what rule functions are given."""

    op: Op
    ins: tuple[TensorSpec, ...]
    outs: tuple[TensorSpec, ...]

    @classmethod
    def of(cls, op: Op, graph: OpGraph) -> OpView:
        """Looks the specs up in `graph`."""
        return cls(op, tuple(graph.values[v] for v in op.inputs), tuple(graph.values[v] for v in op.outputs))

    def index(self, position: int, keyword: str = "") -> int | None:
        """Index among the distinct inputs of the tensor argument at `position`, or None where it is no tensor."""
        arg = self.op.arg(position, keyword)
        value = getattr(arg, "value", None)
        return self.op.inputs.index(value) if value is not None else None

    def dim(self, arg: object, of: TensorSpec | None = None) -> int:
        """A dim argument as a non-negative index into `of` (default: the first operand)."""
        rank = (of or self.ins[0]).rank
        return int(arg) % rank if isinstance(arg, int) and rank else 0


RuleFn = Callable[[OpView], OpRule]
_RULES: dict[str, RuleFn] = {}


def register_rule(*names: str) -> Callable[[RuleFn], RuleFn]:
    """Registers a rule function for ops by name (``linear``; for custom ops ``library::name``).

    Raises:
        AutoplanError: A name has a rule already.
    """

    def add(fn: RuleFn) -> RuleFn:
        for name in names:
            if name in _RULES:
                raise AutoplanError(f"op {name!r} has a sharding rule already ({_RULES[name].__module__})")
            _RULES[name] = fn
        return fn

    return add


def rule_of(op: Op, graph: OpGraph) -> OpRule:
    """The rule of one op in its graph; ops without one get ``OpRule(known=False)``."""
    fn = _RULES.get(rule_name(op))
    if fn is None:
        n = len(op.inputs)
        return OpRule(known=False, saved_operands=tuple(range(n)), saved_results=tuple(range(len(op.outputs))))
    return fn(OpView.of(op, graph))


def rule_name(op: Op) -> str:
    """Name under which an op's rule is registered: ``linear``, and for custom ops ``library::name``."""
    library = op.target.split(".")[0]
    return op.name if library in ("aten", "prims") else f"{library}::{op.name}"


def known_ops() -> tuple[str, ...]:
    """Names of the ops that have a rule."""
    return tuple(sorted(_RULES))


def same(*operands: tuple[int, int], to: Sequence[tuple[int, int]] = (), additive: tuple[int, ...] = ()) -> Link:
    """Link of whole dims: ``(tensor, dim)`` of operands, and of results after ``to=``."""
    return Link(tuple(Span(t, (d,)) for t, d in operands), tuple(Span(t, (d,)) for t, d in to), additive)


def group_dims(before: Sequence[int], after: Sequence[int]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Splits a reshape into the smallest groups of dims with equal products; dims of size 1 belong to none."""
    i = j = 0
    groups: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    a = [d for d, n in enumerate(before) if n != 1]
    b = [d for d, n in enumerate(after) if n != 1]
    while i < len(a) and j < len(b):
        p, q, left, right = before[a[i]], after[b[j]], [a[i]], [b[j]]
        while p != q:
            if p < q:
                i += 1
                left.append(a[i])
                p *= before[a[i]]
            else:
                j += 1
                right.append(b[j])
                q *= after[b[j]]
        groups.append((tuple(left), tuple(right)))
        i, j = i + 1, j + 1
    return groups


def numel(shape: Sequence[int]) -> int:
    """Product of sizes."""
    return math.prod(shape)
