"""One step as autograd sees it: a single function from parameters to the loss."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autoplan.codegen import rng
from autoplan.codegen.collectives import active
from autoplan.codegen.partition import Partitioned
from autoplan.codegen.program import LocalProgram
from autoplan.errors import OptionError
from autoplan.runtime import compat
from autoplan.runtime.guard import abort_on_error
from autoplan.runtime.load import load
from autoplan.runtime.mesh import RuntimeMesh


class Runner:
    """Emitted programs of one mode (training or evaluation), ready to run in this process."""

    def __init__(self, partitioned: Partitioned, program: LocalProgram, at: RuntimeMesh) -> None:
        self.partitioned = partitioned
        self.program = program
        self.at = at
        self._traced = [v.requires_grad for v in program.values]
        self._forward = load(partitioned.forward, at.context, at.device)
        self._inference = load(partitioned.inference, at.context, at.device)
        backward = partitioned.backward
        self._backward = None if backward is None else load(backward, at.context, at.device)

    @property
    def is_random(self) -> bool:
        """Whether forward draws random numbers."""
        return any(n.target in (rng.run, rng.save) for n in self.partitioned.forward.graph.nodes)

    def run(self, inputs: list[Tensor]) -> list[Tensor]:
        """Runs forward; the loss among the results carries autograd where that is on.

        Args:
            inputs: Parameters and buffers as the module holds them, and this rank's pieces of the batch.
        """
        self._check_trainable(inputs)
        loss = self.partitioned.loss
        trainable = [inputs[i] for i in self.partitioned.gradients]
        if self._backward is None or loss is None or not torch.is_grad_enabled() or not _any_grad(trainable):
            with torch.no_grad():
                return self._split(self._call(self._inference, inputs), inputs)[0]
        call = _Call(self, inputs)
        result: Tensor = _Step.apply(call, *trainable)  # type: ignore[no-untyped-call]
        outputs = call.outputs
        outputs[loss] = result
        return outputs

    def _check_trainable(self, inputs: list[Tensor]) -> None:
        for x, traced, entry in zip(inputs, self._traced, self.program.inputs, strict=True):
            if x.requires_grad and not traced and entry.kind == "parameter":
                raise OptionError(f"{entry.path} requires grad, but did not when the plan was made: plan again")

    def forward(self, inputs: list[Tensor]) -> tuple[list[Tensor], list[Any]]:
        """Results, and what backward needs in the order of its arguments."""
        outputs, values = self._split(self._call(self._forward, inputs), inputs)
        computed = iter(values)
        held = [
            next(computed) if s.input is None else compat.local_tensor(inputs[s.input]) for s in self.partitioned.saved
        ]
        return outputs, held

    def backward(self, arguments: list[Any]) -> tuple[Tensor, ...]:
        """Gradients of the inputs listed in `Partitioned.gradients`; empties its argument."""
        assert self._backward is not None
        with active(self.at.context), abort_on_error("backward"):
            gradients: tuple[Tensor, ...] = self._backward(arguments)
            return gradients

    def _call(self, gm: torch.fx.GraphModule, inputs: list[Tensor]) -> tuple[Any, ...]:
        with active(self.at.context):
            results: tuple[Any, ...] = gm(*[compat.local_tensor(x) for x in inputs])
            return results

    def _split(self, results: tuple[Any, ...], inputs: list[Tensor]) -> tuple[list[Tensor], list[Any]]:
        """Writes updated buffers back; returns what the user sees, and the rest."""
        n = self.partitioned.n_outputs
        for i, value in zip(self.partitioned.mutations, results[n:], strict=False):
            compat.local_tensor(inputs[i]).copy_(value)
        return list(results[:n]), list(results[n + len(self.partitioned.mutations) :])


@dataclass
class _Call:
    """One forward on its way through autograd."""

    runner: Runner
    inputs: list[Tensor]
    outputs: list[Tensor] = field(default_factory=list)


class _Step(torch.autograd.Function):
    """Parameters -> loss. Saved values are held by the context as a list that backward empties as it reads it."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *trainable: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        runner = call.runner
        call.outputs, ctx.held = runner.forward(call.inputs)
        ctx.runner = runner
        ctx.like = [_Like(x) for x in trainable]
        ctx.versions = _versions(runner, ctx.held)
        loss = runner.partitioned.loss
        assert loss is not None
        return call.outputs[loss].detach()  # a function must not return what it was given or saved

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Any, ...]:
        held, ctx.held = ctx.held, None
        if held is None:
            raise OptionError(
                "backward ran twice through one forward; its saved values are freed as they are read, also under "
                "retain_graph=True: call the model again"
            )
        if gradient is None:
            return (None, *(None for _ in ctx.like))
        if ctx.versions != _versions(ctx.runner, held):
            raise OptionError("a parameter was changed in place between forward and backward: run backward first")
        arguments = [gradient, *held]
        held.clear()
        gradients = ctx.runner.backward(arguments)
        return (None, *(like.wrap(g) for like, g in zip(ctx.like, gradients, strict=True)))


class _Like:
    """How a parameter's gradient is wrapped, without holding the parameter."""

    def __init__(self, x: Tensor) -> None:
        self.spec = (x.device_mesh, x.placements, x.shape, x.stride()) if isinstance(x, DTensor) else None

    def wrap(self, gradient: Tensor) -> Tensor:
        if self.spec is None:
            return gradient
        mesh, placements, shape, stride = self.spec
        return DTensor.from_local(gradient, mesh, placements, run_check=False, shape=shape, stride=stride)


def _versions(runner: Runner, held: list[Any]) -> list[int]:
    kinds = [runner.program.inputs[s.input].kind if s.input is not None else "" for s in runner.partitioned.saved]
    return [compat.version(x) for x, kind in zip(held, kinds, strict=True) if kind == "parameter"]


def _any_grad(tensors: list[Tensor]) -> bool:
    return any(x.requires_grad for x in tensors)
