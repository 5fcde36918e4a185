"""Pieces of tensors: cutting, putting together, and how DTensor writes the same placement."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Partial as DTensorPartial
from torch.distributed.tensor import Replicate as DTensorReplicate
from torch.distributed.tensor import Shard as DTensorShard
from torch.distributed.tensor.placement_types import Placement as DTensorPlacement

from autoplan.codegen.collectives import Steps, active, apply_steps, shard_slice_of
from autoplan.errors import OptionError
from autoplan.ir import Mesh, Placement, Replicate, Shard
from autoplan.runtime import compat
from autoplan.runtime.mesh import RuntimeMesh


def shard_tensor(x: Tensor, placement: Placement, mesh: Mesh, coordinate: Mapping[str, int]) -> Tensor:
    """Piece of a whole tensor at a coordinate, a view where one exists.

    Earlier axes are more significant, so the piece is cut axis by axis in mesh order.

    Raises:
        OptionError: The placement does not divide the tensor, or is a partial sum.
    """
    for axis, n, p in zip(mesh.axes, mesh.shape, placement, strict=True):
        if isinstance(p, Replicate):
            continue
        if not isinstance(p, Shard):
            raise OptionError(f"a tensor cannot be cut as {placement}: {p} over {axis!r} is a sum, not a piece")
        x = shard_slice_of(x, p.dim, p.outer, n, coordinate[axis])
    return x


def gather_steps(placement: Placement, mesh: Mesh) -> Steps:
    """Steps of `apply_steps` that make a tensor whole: the inverse of `shard_tensor`, last axis first."""
    steps: list[tuple[object, ...]] = []
    for axis, n, p in reversed(list(zip(mesh.axes, mesh.shape, placement, strict=True))):
        if isinstance(p, Shard) and n > 1:
            steps.append(("all_gather", axis, n, p.dim, p.outer))
        elif not isinstance(p, Replicate) and n > 1:
            steps.append(("all_reduce", axis, n))
    return tuple(steps)


def gather_tensor(local: Tensor, placement: Placement, at: RuntimeMesh) -> Tensor:
    """Whole tensor on every rank of the mesh, never sharing storage with `local`.

    ``DTensor.full_tensor`` is not used: it is wrong for some layouts of inner factors and may alias.
    """
    steps = gather_steps(placement, at.mesh)
    with active(at.context):
        return apply_steps(local, steps) if steps else local.clone()


def to_dtensor_placements(placement: Placement, mesh: Mesh) -> tuple[DTensorPlacement, ...]:
    """The same placement in DTensor's words.

    An inner factor is a strided shard whose split factor counts the blocks of the *whole* tensor: where several axes
    cut one factor, a later axis multiplies it by the earlier ones. Verified against ``full_tensor``.

    Raises:
        OptionError: DTensor cannot express it: an axis cuts a dim from outside after another cut an inner factor.
    """
    out: list[DTensorPlacement] = []
    inner: dict[int, int] = {}  # dim -> blocks that earlier axes left of an inner factor
    outers: dict[int, int] = {}
    for n, p in zip(mesh.shape, placement, strict=True):
        if isinstance(p, Replicate):
            out.append(DTensorReplicate())
        elif not isinstance(p, Shard):
            out.append(DTensorPartial())
        elif p.dim in inner and n > 1 and p.outer != outers[p.dim]:
            raise OptionError(f"DTensor cannot express {placement}: two axes cut dim {p.dim} at different places")
        elif p.outer == 1:
            out.append(DTensorShard(p.dim))
        else:
            blocks = inner.get(p.dim, p.outer)
            out.append(compat.strided_shard(p.dim, blocks))
            if n > 1:
                inner[p.dim], outers[p.dim] = blocks * n, p.outer
    return tuple(out)


def wrap(local: Tensor, shape: Sequence[int], placement: Placement, at: RuntimeMesh) -> Tensor:
    """A local piece as a DTensor; itself without torch.distributed."""
    if at.device_mesh is None:
        return local
    return DTensor.from_local(
        local,
        at.device_mesh,
        to_dtensor_placements(placement, at.mesh),
        run_check=False,
        shape=torch.Size(shape),
        stride=contiguous_stride(shape),
    )


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))
