"""Forward program -> joint graph of forward and backward, by torch's own autograd."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from autoplan.codegen import compat
from autoplan.codegen.program import LocalProgram
from autoplan.errors import AutoplanError


@dataclass(frozen=True)
class Joint:
    """Functional graph over aten ops that computes results and gradients.

    Attributes:
        gm: The graph; nodes carry the notes of the ops they stem from, sums of gradients carry none.
        inputs: Placeholder of each input of the program.
        tangent: Placeholder of the loss's incoming gradient, None where nothing requires grad.
        outputs: Node of each output.
        gradients: Node of each input's gradient, None where there is none.
        mutations: Input index -> node of its new value, for buffers that the program updates.
    """

    gm: fx.GraphModule
    inputs: tuple[fx.Node, ...]
    tangent: fx.Node | None
    outputs: tuple[fx.Node, ...]
    gradients: tuple[fx.Node | None, ...]
    mutations: dict[int, fx.Node]


def differentiate(program: LocalProgram) -> Joint:
    """Traces forward and backward of a program; no process group and no memory is needed.

    Raises:
        AutoplanError: An output other than the loss requires grad.
    """
    values = program.values
    with compat.fake_mode_of(values):
        args = [_leaf(v) for v in values]
        slots = compat.export_joint(program.gm, args)
    stray = sorted(set(slots.tangents) - {program.loss})
    if stray:
        raise AutoplanError(f"outputs {stray} of the local program require grad besides the loss ({program.loss})")
    n = len(program.outputs)
    if set(slots.outputs) != set(range(n)):
        raise AutoplanError(f"the joint graph returns outputs {sorted(slots.outputs)}, the program has {n}")
    return Joint(
        gm=slots.gm,
        inputs=slots.inputs,
        tangent=slots.tangents.get(-1 if program.loss is None else program.loss),
        outputs=tuple(slots.outputs[i] for i in range(n)),
        gradients=tuple(slots.gradients.get(i) for i in range(len(program.inputs))),
        mutations=slots.mutations,
    )


def _leaf(value: torch.Tensor) -> torch.Tensor:
    """A tensor of its own, so that neither aliasing nor an earlier trace shows."""
    fresh = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return fresh.requires_grad_(value.requires_grad)
