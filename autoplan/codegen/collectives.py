"""Differentiable data movement along mesh axes, by name.

`reshard` is what sharding emits. It is a sequence of steps forward and another one for the gradient, each a plain
tuple so that code prints well:

====================================================================  ==================================================
``("all_reduce", axis, n)`` or ``("all_reduce", axis, n, "max")``      sum (or another reduction) over the axis
``("all_gather", axis, n, dim, outer)``                                pieces -> whole
``("reduce_scatter", axis, n, dim, outer)``                            summands -> piece of their sum
``("slice", axis, n, dim, outer)``                                     whole -> piece
``("all_to_all", axis, n, gather_dim, gather_outer, dim, outer)``      piece along one dim -> piece along another
``("mask", axis, n)``                                                  whole -> summands (all but one are zero)
====================================================================  ==================================================

A dim that is cut is viewed as (outer, n, rest), and a device owns one index of the middle. Communication is raw
``_c10d_functional`` ops that carry the axis *name* where they will need a process group, so that programs can be traced
without any process group and read the same on every rank; `autoplan.runtime.load` puts the real names in. A device's
place on an axis is known only at run time and hides behind the opaque ops ``autoplan::shard_slice``,
``autoplan::mask`` and ``autoplan::axis_index``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from autoplan.codegen import compat
from autoplan.errors import AutoplanError, OptionError

Step = tuple[Any, ...]
Steps = tuple[Step, ...]
_c10d = compat.functional


@dataclass(frozen=True)
class MeshContext:
    """Where this process stands on the mesh.

    Attributes:
        coordinates: Axis name -> index along it.
        groups: Axis name -> name of the process group along it; empty without torch.distributed.
    """

    coordinates: Mapping[str, int] = field(default_factory=dict)
    groups: Mapping[str, str] = field(default_factory=dict)


_contexts: list[MeshContext] = []  # a global, since autograd calls backward from threads of its own


@contextlib.contextmanager
def active(context: MeshContext) -> Iterator[None]:
    """Makes `context` the one that emitted code sees."""
    _contexts.append(context)
    try:
        yield
    finally:
        _contexts.pop()


def coordinate(axis: str) -> int:
    """This process's index along an axis.

    Raises:
        AutoplanError: No context is active, or it has no such axis.
    """
    if not _contexts or axis not in _contexts[-1].coordinates:
        raise AutoplanError(f"code that depends on this rank's place on axis {axis!r} runs outside of a mesh")
    return _contexts[-1].coordinates[axis]


def group_name(axis: str) -> str:
    """Name of the process group along an axis, or the axis itself where none is known (while tracing)."""
    return _contexts[-1].groups.get(axis, axis) if _contexts else axis


def shard_slice_of(x: Tensor, dim: int, outer: int, n: int, index: int) -> Tensor:
    """Piece `index` of `n` of a tensor, as a view where that is possible."""
    _check_divides(x, dim, outer * n)
    return _split_dim(x, dim, outer, n).select(dim + 1, index).flatten(dim, dim + 1)


@torch.library.custom_op("autoplan::shard_slice", mutates_args=())
def shard_slice(x: Tensor, dim: int, outer: int, n: int, axis: str) -> Tensor:
    """This rank's piece, as a copy."""
    return shard_slice_of(x, dim, outer, n, coordinate(axis)).clone(memory_format=torch.contiguous_format)


@shard_slice.register_fake
def _(x: Tensor, dim: int, outer: int, n: int, axis: str) -> Tensor:
    _check_divides(x, dim, outer * n)
    return x.new_empty([s // n if d == dim else s for d, s in enumerate(x.shape)])


@torch.library.custom_op("autoplan::mask", mutates_args=())
def mask(x: Tensor, axis: str) -> Tensor:
    """`x` on the first rank of an axis, zeros elsewhere: summands of `x`."""
    return x.clone(memory_format=torch.contiguous_format) if coordinate(axis) == 0 else x.new_zeros(x.shape)


@mask.register_fake
def _(x: Tensor, axis: str) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("autoplan::axis_index", mutates_args=())
def axis_index(axis: str, like: Tensor) -> Tensor:
    """This rank's index along an axis as an int64 scalar on the device of `like`."""
    return torch.full((), coordinate(axis), dtype=torch.int64, device=like.device)


@axis_index.register_fake
def _(axis: str, like: Tensor) -> Tensor:
    return torch.empty((), dtype=torch.int64, device=like.device)


class _Reshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Steps, backward: Steps) -> Tensor:
        ctx.steps = backward
        return apply_steps(x, forward) if forward else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return apply_steps(gradient, ctx.steps), None, None


def reshard(x: Tensor, forward: Steps, backward: Steps) -> Tensor:
    """Moves `x` by the steps of `forward`; its gradient moves by the steps of `backward`."""
    result: Tensor = _Reshard.apply(x, forward, backward)  # type: ignore[no-untyped-call]
    return result


def apply_steps(x: Tensor, steps: Steps) -> Tensor:
    """Runs steps one after the other.

    Raises:
        OptionError: A step is unknown or cuts a dim that does not divide.
    """
    for step in steps:
        kind, *rest = step
        if kind not in _STEPS:
            raise OptionError(f"resharding step {step} is not one of {', '.join(_STEPS)}")
        x = _STEPS[kind](x, *rest)
    return x


def _all_reduce(x: Tensor, axis: str, n: int, reduction: str = "sum") -> Tensor:
    return _wait(_c10d.all_reduce(x.contiguous(), reduction, group_name(axis)))


def _all_gather(x: Tensor, axis: str, n: int, dim: int, outer: int) -> Tensor:
    _check_divides(x, dim, outer)
    gathered = _wait(_c10d.all_gather_into_tensor(_as_bytes(x.contiguous()), n, group_name(axis)))
    return _place(_as_type(gathered, x).view(n, *x.shape), dim, outer)


def _reduce_scatter(x: Tensor, axis: str, n: int, dim: int, outer: int) -> Tensor:
    pieces = _pieces_first(x, dim, outer, n)
    mine = _wait(_c10d.reduce_scatter_tensor(pieces, "sum", n, group_name(axis)))
    return mine.view([s // n if d == dim else s for d, s in enumerate(x.shape)])


def _all_to_all(x: Tensor, axis: str, n: int, gather_dim: int, gather_outer: int, dim: int, outer: int) -> Tensor:
    if gather_dim == dim:  # another factor of the same dim: pieces of pieces would not be consecutive
        return _slice(_all_gather(x, axis, n, gather_dim, gather_outer), axis, n, dim, outer)
    pieces = _pieces_first(x, dim, outer, n)
    local = [s // n if d == dim else s for d, s in enumerate(x.shape)]
    split = [local[0]] * n
    received = _wait(_c10d.all_to_all_single(_as_bytes(pieces), split, split, group_name(axis)))
    return _place(_as_type(received, x).view(n, *local), gather_dim, gather_outer)


def _slice(x: Tensor, axis: str, n: int, dim: int, outer: int) -> Tensor:
    result: Tensor = torch.ops.autoplan.shard_slice(x, dim, outer, n, axis)
    return result


def _mask(x: Tensor, axis: str, n: int) -> Tensor:
    result: Tensor = torch.ops.autoplan.mask(x, axis)
    return result


_STEPS: dict[str, Any] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "slice": _slice,
    "all_to_all": _all_to_all,
    "mask": _mask,
}


def _wait(x: Tensor) -> Tensor:
    result: Tensor = _c10d.wait_tensor(x)
    return result


def _as_bytes(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.dtype == torch.bool else x  # gloo does not move bool


def _as_type(x: Tensor, like: Tensor) -> Tensor:
    return x.view(torch.bool) if like.dtype == torch.bool else x


def _check_divides(x: Tensor, dim: int, parts: int) -> None:
    if dim >= x.dim() or x.shape[dim] % parts:
        raise OptionError(f"dim {dim} of shape {tuple(x.shape)} does not divide into {parts} parts")


def _split_dim(x: Tensor, dim: int, outer: int, n: int) -> Tensor:
    rest = x.shape[dim] // (outer * n)
    return x.reshape(*x.shape[:dim], outer, n, rest, *x.shape[dim + 1 :])


def _pieces_first(x: Tensor, dim: int, outer: int, n: int) -> Tensor:
    """Contiguous tensor with the pieces one after the other along dim 0."""
    _check_divides(x, dim, outer * n)
    if dim == 0 and outer == 1:
        return x.contiguous()
    local = [s // n if d == dim else s for d, s in enumerate(x.shape)]
    return _split_dim(x, dim, outer, n).movedim(dim + 1, 0).contiguous().view(n * local[0], *local[1:])


def _place(blocks: Tensor, dim: int, outer: int) -> Tensor:
    """(n, *local) -> the pieces put together along `dim`."""
    n, local = blocks.shape[0], list(blocks.shape[1:])
    whole = [s * n if d == dim else s for d, s in enumerate(local)]
    if dim == 0 and outer == 1:
        return blocks.reshape(whole)
    split = blocks.reshape(n, *local[:dim], outer, local[dim] // outer, *local[dim + 1 :])
    return split.movedim(0, dim + 1).reshape(whole)
