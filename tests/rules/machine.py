"""Every device of a mesh in one process, in numpy: what a placement means, and what a redistribution step does.

The meaning of a placement is defined here once more and otherwise than in the package: by which global indices of each
dim a device owns.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoplan.rules.redistribute import Codes, Step

Array = NDArray[np.float64]
Coordinate = tuple[int, ...]
Locals = Mapping[Coordinate, Array]


def devices(mesh: Sequence[int]) -> list[Coordinate]:
    return list(itertools.product(*map(range, mesh)))


def owned(size: int, dim: int, codes: Codes, mesh: Sequence[int], at: Coordinate) -> list[int]:
    """Global indices of a dim that a device holds, in order."""
    out = []
    for i in range(size):
        for outer in {c[1] for c in codes if isinstance(c, tuple) and c[0] == dim}:
            axes = [a for a, c in enumerate(codes) if c == (dim, outer)]
            rest, parts = size // outer, math.prod(mesh[a] for a in axes)
            piece = i % rest // (rest // parts)
            mine = 0
            for a in axes:  # the earlier axis is the more significant
                mine = mine * mesh[a] + at[a]
            if piece != mine:
                break
        else:
            out.append(i)
    return out


def piece(x: Array, codes: Codes, mesh: Sequence[int], at: Coordinate) -> Array:
    return x[np.ix_(*(owned(n, d, codes, mesh, at) for d, n in enumerate(x.shape)))]


def place(x: Array, codes: Codes, mesh: Sequence[int], random: np.random.Generator) -> dict[Coordinate, Array]:
    """Local tensors of every device; random summands along axes with ``P``."""
    partial = [a for a, c in enumerate(codes) if c == "P"]
    spread = devices([mesh[a] for a in partial])
    summands = {s: random.standard_normal(x.shape) for s in spread[1:]}
    summands[spread[0]] = x - sum(summands.values(), np.zeros_like(x))
    return {at: piece(summands[tuple(at[a] for a in partial)], codes, mesh, at) for at in devices(mesh)}


def holds(locals_: Locals, x: Array, codes: Codes, mesh: Sequence[int]) -> bool:
    """Whether local tensors are those of `x` in this placement, whatever the summands."""
    partial = [a for a, c in enumerate(codes) if c == "P"]
    for at in devices(mesh):
        group = [g for g in devices(mesh) if all(a in partial or g[a] == at[a] for a in range(len(mesh)))]
        expected = piece(x, codes, mesh, at)
        if any(locals_[g].shape != expected.shape for g in group):
            return False
        if not np.allclose(sum(locals_[g] for g in group), expected, rtol=0, atol=1e-12):
            return False
    return True


def _split(x: Array, dim: int, outer: int, n: int) -> list[Array]:
    assert x.shape[dim] % (outer * n) == 0, f"dim {dim} of {x.shape} does not divide into {outer} x {n}"
    view = x.reshape(*x.shape[:dim], outer, n, -1, *x.shape[dim + 1 :])
    shape = [*x.shape[:dim], x.shape[dim] // n, *x.shape[dim + 1 :]]
    return [view[(slice(None),) * (dim + 1) + (i,)].reshape(shape) for i in range(n)]


def _join(pieces: Sequence[Array], dim: int, outer: int) -> Array:
    assert pieces[0].shape[dim] % outer == 0
    blocks = [p.reshape(*p.shape[:dim], outer, -1, *p.shape[dim + 1 :]) for p in pieces]
    shape = [*pieces[0].shape[:dim], pieces[0].shape[dim] * len(pieces), *pieces[0].shape[dim + 1 :]]
    return np.stack(blocks, dim + 1).reshape(shape)


def execute(locals_: Locals, step: Step, mesh: Sequence[int], axes: Sequence[str]) -> dict[Coordinate, Array]:
    """All devices take one step together."""
    kind, name, n, *rest = step
    axis = list(axes).index(str(name))
    assert n == mesh[axis]
    out = {}
    numbers: list[Any] = list(rest)
    for at in devices(mesh):
        group = [locals_[(*at[:axis], i, *at[axis + 1 :])] for i in range(mesh[axis])]
        mine, x = at[axis], locals_[at]
        if kind == "slice":
            out[at] = _split(x, *numbers, mesh[axis])[mine]
        elif kind == "mask":
            out[at] = x if mine == 0 else np.zeros_like(x)
        elif kind == "all_reduce":
            out[at] = sum(group[1:], group[0])
        elif kind == "reduce_scatter":
            out[at] = _split(sum(group[1:], group[0]), *numbers, mesh[axis])[mine]
        elif kind == "all_gather":
            out[at] = _join(group, *numbers)
        else:
            assert kind == "all_to_all", kind
            gather, gather_outer, dim, outer = numbers
            assert gather != dim, "the runtime does not exchange a dim with itself"
            out[at] = _join([_split(g, dim, outer, mesh[axis])[mine] for g in group], gather, gather_outer)
    return out


def pair(value: Locals, codes: Codes, gradient: Locals, grad_codes: Codes, mesh: Sequence[int]) -> float:
    """<value, gradient>, where what every device along an axis holds alike counts once."""
    total = 0.0
    for at in devices(mesh):
        if all(c != "R" or g != "R" or i == 0 for c, g, i in zip(codes, grad_codes, at, strict=True)):
            total += float(np.sum(value[at] * gradient[at]))
    return total
