"""The one redistribution planner: which collectives turn one placement into another. Prices and code both follow it.

A step is a plain tuple, as it stands in emitted code (axis sizes of 1 give no step)::

    ("slice", axis, n, dim, outer)              R -> S    no communication
    ("mask", axis, n)                           R -> P    no communication; coordinate 0 keeps the value
    ("reduce_scatter", axis, n, dim, outer)     P -> S
    ("all_to_all", axis, n, gather_dim, gather_outer, shard_dim, shard_outer)   S -> S of another dim
    ("all_reduce", axis, n)                     P -> R
    ("all_gather", axis, n, dim, outer)         S -> R

Between two factors of one dim an axis gathers and slices.
`outer` here counts blocks of the *local* tensor (what the other axes have cut before the factor is divided out).
Steps run in the order of the list above, which keeps tensors small: what costs nothing and shrinks comes first, what
grows comes last. Where several axes cut one factor the earlier axis is the more significant, so an axis can be sliced
last and gathered first only; a pair of placements that this order cannot connect goes by way of replication along the
axes concerned.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

from autoplan.ir import PARTIAL, REPLICATE, AxisPlacement, Placement, Shard
from autoplan.rules.factors import Position

Code = Position | str
"""A placement along one axis in compact form: ``"R"``, ``"P"`` or a position ``(dim, outer)``."""
Codes = tuple[Code, ...]
Step = tuple[str | int, ...]
SizedStep = tuple[Step, int, int]
"""A step, the mesh axis index it runs on, and its payload in elements (the full tensor of the collective)."""


def encode(placement: Placement) -> Codes:
    """Compact form of a placement."""
    return tuple((p.dim, p.outer) if isinstance(p, Shard) else str(p) for p in placement)


def decode(codes: Codes) -> Placement:
    """Inverse of `encode`."""
    out: list[AxisPlacement] = []
    for c in codes:
        out.append(Shard(*c) if isinstance(c, tuple) else REPLICATE if c == "R" else PARTIAL)
    return Placement(tuple(out))


def local_numel(numel: int, codes: Codes, mesh: Sequence[int]) -> int:
    """Elements on one device."""
    for c, n in zip(codes, mesh, strict=True):
        if isinstance(c, tuple):
            numel //= n
    return numel


def _local_outer(state: Sequence[Code], axis: int, position: Position, mesh: Sequence[int]) -> int:
    """Blocks before the factor in the local tensor."""
    dim, outer = position
    for b, c in enumerate(state):
        if b != axis and isinstance(c, tuple) and c[0] == dim and c[1] < outer:
            outer //= mesh[b]
    return outer


def _is_minor(state: Sequence[Code], axis: int, position: Position) -> bool:
    """No less significant axis cuts the same factor."""
    return all(state[b] != position for b in range(axis + 1, len(state)))


@lru_cache(maxsize=1_000_000)
def redistribute(
    numel: int, have: Codes, want: Codes, mesh: tuple[int, ...], axes: tuple[str, ...]
) -> tuple[SizedStep, ...] | None:
    """Steps from `have` to `want` for a tensor of `numel` elements, or None where neither way of this module serves.

    Args:
        numel: Elements of the whole tensor.
        have: Placement now.
        want: Placement wanted; ``P`` only where `have` is ``P`` or ``R``.
        mesh: Axis sizes.
        axes: Axis names, for the steps.
    """
    one_way = direct_steps(numel, have, want, mesh, axes)
    if one_way is not None:
        return one_way
    middle = _middle(have, want)
    first = direct_steps(numel, have, middle, mesh, axes)
    second = direct_steps(numel, middle, want, mesh, axes)
    return None if first is None or second is None else first + second


def _middle(have: Codes, want: Codes) -> Codes:
    """Replicated along every axis that moves, and along every axis that shares a factor with one that does."""
    touched = {c for h, w in zip(have, want, strict=True) if h != w for c in (h, w)}
    return tuple(
        h if h == w and not (isinstance(h, tuple) and h in touched) else "R" for h, w in zip(have, want, strict=True)
    )


@lru_cache(maxsize=1_000_000)
def direct_steps(
    numel: int, have: Codes, want: Codes, mesh: tuple[int, ...], axes: tuple[str, ...]
) -> tuple[SizedStep, ...] | None:
    """Steps in the one order of this module, or None where that order cannot connect the two.

    The planner offers only these: going by way of replication is open to it as two edges, and a third of the pairs
    less keeps the problem small.
    """
    if have == want:
        return ()
    state = list(have)
    size = local_numel(numel, have, mesh)
    steps: list[SizedStep] = []
    todo = [a for a in range(len(mesh)) if have[a] != want[a]]

    def emit(axis: int, kind: str, payload: int, *rest: int) -> None:
        if mesh[axis] > 1:
            steps.append(((kind, axes[axis], mesh[axis], *rest), axis, payload))
        state[axis] = want[axis]

    for a in todo:  # slices, the most significant axis first
        w = want[a]
        if have[a] == "R" and isinstance(w, tuple):
            if not _is_minor(state, a, w):
                return None
            size //= mesh[a]
            emit(a, "slice", 0, w[0], _local_outer(state, a, w, mesh))
    for a in todo:
        w = want[a]
        if have[a] == "P" and isinstance(w, tuple):
            if not _is_minor(state, a, w):
                return None
            emit(a, "reduce_scatter", size, w[0], _local_outer(state, a, w, mesh))
            size //= mesh[a]
    for a in todo:
        h, w = have[a], want[a]
        if isinstance(h, tuple) and isinstance(w, tuple):
            if not (_is_minor(state, a, h) and _is_minor(state, a, w)):
                return None
            before = _local_outer(state, a, h, mesh)
            state[a] = "R"
            after = _local_outer(state, a, w, mesh)
            if h[0] == w[0]:  # another factor of the same dim: pieces would have to be exchanged within blocks
                emit(a, "all_gather", size * mesh[a], h[0], before)
                emit(a, "slice", 0, w[0], after)
            else:
                emit(a, "all_to_all", size, h[0], before, w[0], after)
    for a in todo:
        if have[a] == "P" and want[a] == "R":
            emit(a, "all_reduce", size)
    for a in reversed(todo):  # gathers, the least significant axis first
        h = have[a]
        if isinstance(h, tuple) and want[a] == "R":
            if not _is_minor(state, a, h):
                return None
            size *= mesh[a]
            emit(a, "all_gather", size, h[0], _local_outer(state, a, h, mesh))
    for a in todo:
        if have[a] == "R" and want[a] == "P":
            emit(a, "mask", 0)
    return tuple(steps) if tuple(state) == want else None


def producer_gradient(have: Codes) -> Codes:
    """Placement in which a value's gradient must arrive: a summand's gradient is the sum's."""
    return tuple("R" if c == "P" else c for c in have)


def consumer_gradient(want: Codes, shards: Sequence[bool]) -> Codes:
    """Placement in which an op leaves an operand's gradient.

    A replicated operand of an op that is sharded along an axis gets one summand per device; the gradient of a summand
    is already whole.
    """
    return tuple("P" if c == "R" and s else "R" if c == "P" else c for c, s in zip(want, shards, strict=True))


def divides(positions: Codes, sizes: dict[Position, int], mesh: Sequence[int]) -> bool:
    """Whether the axes that cut each factor divide it together."""
    by_factor: dict[Position, int] = {}
    for c, n in zip(positions, mesh, strict=True):
        if isinstance(c, tuple):
            by_factor[c] = by_factor.get(c, 1) * n
    return all(sizes.get(p, 1) % n == 0 for p, n in by_factor.items())


def collective_count(steps: Sequence[SizedStep]) -> int:
    """Steps that communicate."""
    return sum(s[0][0] not in ("slice", "mask") for s in steps)


def elements(shape: Sequence[int]) -> int:
    """Product of sizes."""
    return math.prod(shape)
