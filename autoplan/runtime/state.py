"""Whole state dicts, and the gradient norm over all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from autoplan.codegen.collectives import active, apply_steps
from autoplan.errors import OptionError
from autoplan.ir import Mesh, Placement, Shard
from autoplan.runtime import compat
from autoplan.runtime.layout import gather_tensor
from autoplan.runtime.mesh import RuntimeMesh
from autoplan.runtime.module import ParallelModule


def full_state_dict(module: nn.Module) -> dict[str, Tensor]:
    """Whole parameters and buffers on every rank of the mesh, under the original names; collective.

    Tensors share no storage with the module; tied names share one tensor. Ranks beyond the plan get an empty dict.
    """
    placements, at = _layout(module)
    if not at.member:
        return {}
    made: dict[int, Tensor] = {}
    out: dict[str, Tensor] = {}
    for name, x in module.state_dict(keep_vars=True).items():
        if id(x) not in made:
            placement = placements.get(name, Placement.replicated(at.mesh.rank))
            made[id(x)] = gather_tensor(compat.local_tensor(x.detach()), placement, at)
        out[name] = made[id(x)]
    return out


def clip_grad_norm_(module: nn.Module, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scales gradients so that their norm over the whole model is at most `max_norm`.

    Every element counts once, however it is cut or replicated, and a tied parameter counts once. Collective.

    Args:
        module: A `ParallelModule`.
        max_norm: Largest norm allowed.
        norm_type: p of the norm, or infinity.

    Returns:
        The norm before scaling, the same on every rank.
    """
    placements, at = _layout(module)
    if not at.member:
        return torch.full((), math.nan)
    named = [(n, p.grad) for n, p in module.named_parameters() if p.grad is not None]
    total = _norm([(compat.local_tensor(g), _cut_along(placements.get(n), at.mesh)) for n, g in named], at, norm_type)
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for _, g in named:
        compat.local_tensor(g).mul_(scale.to(g.dtype))
    return total


def _norm(gradients: list[tuple[Tensor, tuple[str, ...]]], at: RuntimeMesh, p: float) -> Tensor:
    """Norm over gradients that are each cut along some axes: one reduction per set of axes."""
    reduction = "max" if math.isinf(p) else "sum"
    parts = []
    for axes in sorted({(), *(axes for _, axes in gradients)}):
        part = _local_part([g for g, along in gradients if along == axes], at.device, p)
        steps = tuple(("all_reduce", a, at.mesh.shape[at.mesh.axes.index(a)], reduction) for a in axes)
        with active(at.context):
            parts.append(apply_steps(part, steps))
    whole = torch.stack(parts)
    return whole.max() if math.isinf(p) else whole.sum() ** (1 / p)


def _local_part(gradients: Iterable[Tensor], device: torch.device, p: float) -> Tensor:
    total = torch.zeros((), dtype=torch.float64 if device.type == "cpu" else torch.float32, device=device)
    for g in gradients:
        if not g.numel():
            continue
        if math.isinf(p):
            total = torch.maximum(total, g.abs().max().to(total.dtype))
        else:
            total = total + torch.linalg.vector_norm(g, p, dtype=_at_least_float(g)).to(total.dtype) ** p
    return total


def _at_least_float(g: Tensor) -> torch.dtype:
    """Double on CPU, where single precision adds up naively and loses 8e-4 of the norm of 13 million numbers."""
    return torch.float64 if g.device.type == "cpu" or g.dtype == torch.float64 else torch.float32


def _cut_along(placement: Placement | None, mesh: Mesh) -> tuple[str, ...]:
    if placement is None:
        return ()
    return tuple(a for a, n, p in zip(mesh.axes, mesh.shape, placement, strict=True) if isinstance(p, Shard) and n > 1)


def _layout(module: nn.Module) -> tuple[Mapping[str, Placement], RuntimeMesh]:
    if not isinstance(module, ParallelModule):
        raise OptionError(f"{type(module).__name__} is no parallel module")
    return module.layout
