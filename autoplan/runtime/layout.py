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
from autoplan.ir import REPLICATE, Mesh, Partial, Placement
from autoplan.rules.redistribute import encode, redistribute
from autoplan.runtime import compat
from autoplan.runtime.mesh import RuntimeMesh


def cut_steps(placement: Placement, mesh: Mesh) -> Steps:
    """Slices that cut a whole tensor, in the order in which they are taken.

    They come from the redistribution planner, so that a stored piece is the piece that emitted code expects.

    Raises:
        OptionError: The placement is a partial sum.
    """
    if placement.has_partial:
        raise OptionError(f"a tensor cannot be cut as {placement}: P is a sum, not a piece")
    return _steps(Placement.replicated(mesh.rank), placement, mesh)


def gather_steps(placement: Placement, mesh: Mesh) -> Steps:
    """Steps that make a tensor whole on every device."""
    return _steps(placement, Placement.replicated(mesh.rank), mesh)


def _steps(have: Placement, want: Placement, mesh: Mesh) -> Steps:
    found = redistribute(1, encode(have), encode(want), mesh.shape, mesh.axes)
    if found is None:
        raise OptionError(f"there is no way from placement {have} to {want} on {mesh}")
    return tuple(step for step, _, _ in found)


def shard_tensor(x: Tensor, placement: Placement, mesh: Mesh, coordinate: Mapping[str, int]) -> Tensor:
    """Piece of a whole tensor at a coordinate, a view where one exists.

    Raises:
        OptionError: The placement does not divide the tensor, or is a partial sum.
    """
    for _, axis, n, dim, outer in cut_steps(placement, mesh):
        x = shard_slice_of(x, dim, outer, n, coordinate[axis])
    return x


def gather_tensor(local: Tensor, placement: Placement, at: RuntimeMesh) -> Tensor:
    """Whole tensor on every rank of the mesh, never sharing storage with `local`.

    ``DTensor.full_tensor`` is not used: it is wrong for some layouts of inner factors and may alias.
    """
    steps = gather_steps(placement, at.mesh)
    with active(at.context):
        return apply_steps(local, steps) if steps else local.clone()


def to_dtensor_placements(placement: Placement, mesh: Mesh) -> tuple[DTensorPlacement, ...]:
    """The same placement in DTensor's words.

    An inner factor is a strided shard. Its split factor counts blocks of the piece that earlier axes left, times the
    sizes of those earlier axes that are strided on the same dim; this was found by comparing ``full_tensor`` with the
    truth over all pairs of positions of a dim of 24 on a 2 x 2 mesh.
    """
    out: list[DTensorPlacement] = [
        DTensorPartial() if isinstance(p, Partial) else DTensorReplicate() for p in placement
    ]
    cuts = Placement(tuple(REPLICATE if isinstance(p, Partial) else p for p in placement))
    strided: dict[int, int] = {}
    for _, axis, n, dim, outer in cut_steps(cuts, mesh):
        factor = outer * strided.get(dim, 1)
        if factor > 1:
            strided[dim] = strided.get(dim, 1) * n
        out[mesh.axes.index(axis)] = DTensorShard(dim) if factor == 1 else compat.strided_shard(dim, factor)
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
