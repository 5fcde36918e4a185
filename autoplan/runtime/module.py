"""`ParallelModule`: the model as the user keeps using it, with this rank's pieces inside."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autoplan.codegen.partition import Partitioned
from autoplan.codegen.program import LocalProgram
from autoplan.errors import OptionError
from autoplan.ir import Placement, local_shape
from autoplan.runtime import compat
from autoplan.runtime.compat import pytree
from autoplan.runtime.guard import abort_on_error, gather_words, synchronise_generators
from autoplan.runtime.layout import shard_tensor, wrap
from autoplan.runtime.mesh import RuntimeMesh
from autoplan.runtime.signature import InputSignature, batch_hash
from autoplan.runtime.step import Runner

Retrace = Callable[[bool], tuple[Partitioned, LocalProgram]]
Inputs = Literal["global", "sharded"]


class ParallelModule(nn.Module):
    """Drop-in replacement of a model that runs a plan.

    Parameters and buffers are DTensors under the original names (plain parameters where torch.distributed is not
    initialised). The batch is the same global batch on every rank, unless ``inputs="sharded"``. The loss comes as a
    plain tensor, other results as detached DTensors.

    Args:
        model: The wrapped model. Weights that are cut or moved are replaced by meta tensors there, so that their
            memory is freed.
        partitioned: Emitted programs for the mode that the model is in (training or evaluation).
        program: What they come from.
        signature: The example's arguments.
        out_spec: Pytree of the model's result.
        at: Mesh of this process; made from the program's mesh by default.
        inputs: ``global``: every rank passes the whole batch; ``sharded``: its own piece.
        retrace: Called with ``training`` when the other mode is first used; without it that mode is an error.
    """

    def __init__(
        self,
        model: nn.Module,
        partitioned: Partitioned,
        program: LocalProgram,
        signature: InputSignature,
        out_spec: pytree.TreeSpec,
        *,
        at: RuntimeMesh | None = None,
        inputs: Inputs = "global",
        retrace: Retrace | None = None,
    ) -> None:
        super().__init__()
        at = at or RuntimeMesh.create(program.mesh)
        _check_outputs(out_spec, program)
        self._at = at
        self._signature = signature
        self._out_spec = out_spec
        self._inputs = inputs
        self._retrace = retrace
        self._runners = {model.training: Runner(partitioned, program, at)}
        self._agreed = False
        self._holders: dict[str, tuple[dict[str, Any], str]] = {}
        self.training = model.training
        self._layout = _placements(program)
        _Builder(at, self._layout).fill(self, model, "")
        object.__setattr__(self, "_original", model)  # only now: `__getattr__` looks there, and registering looks here
        self._extra = _unregistered(self, model, program, at)
        self.forward = _with_signature(self._run, model)

    @property
    def layout(self) -> tuple[Mapping[str, Placement], RuntimeMesh]:
        """Placement of parameters and buffers by name, and the mesh that it refers to."""
        return self._layout, self._at

    def train(self, mode: bool = True) -> ParallelModule:
        """Sets the mode of the whole model; the other mode's program is emitted when it is first run."""
        for part in self.modules():
            part.training = mode
        return self

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As the model's own, with DTensors or whole tensors; of those every rank takes its pieces."""
        own = self.state_dict(keep_vars=True)
        pieces = {name: self._piece_like(x, own.get(name), name) for name, x in state_dict.items()}
        return super().load_state_dict(pieces, strict, assign)

    def _piece_like(self, x: Any, own: Any, name: str) -> Any:
        if not isinstance(own, DTensor) or not isinstance(x, Tensor) or isinstance(x, DTensor) or x.shape != own.shape:
            return x  # whatever does not fit is for torch to report
        placement = self._layout.get(name, Placement.replicated(self._at.mesh.rank))
        return wrap(piece(x.detach(), placement, self._at), x.shape, placement, self._at)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ParallelModule:
        for x in map(compat.local_tensor, (*self.parameters(), *self.buffers())):
            made = fn(x.new_empty(0))
            if made.dtype != x.dtype or made.device != x.device:
                raise OptionError(
                    "the type and the device of parameters are part of the plan: convert the model before wrapping it, "
                    'or plan with precision="bf16"'
                )
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Neither copies nor pickles: pieces without their ranks are of no use."""
        raise OptionError(
            "a parallel module can be neither copied nor pickled, since it holds pieces and process groups: copy the "
            "model before wrapping it, or save autoplan.full_state_dict(model)"
        )

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scales gradients so that their norm over the whole model is at most `max_norm`; returns the norm before."""
        from autoplan.runtime.state import clip_grad_norm_

        return clip_grad_norm_(self, max_norm, norm_type)

    def __getattr__(self, name: str) -> Any:
        """What the wrapped model has besides parameters and modules: ``config`` and the like, but not its methods."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            original = self.__dict__.get("_original")
            value = getattr(original, name, None) if original is not None and not name.startswith("__") else None
            if value is None or inspect.ismethod(value) or isinstance(value, nn.Module):
                raise
            return value

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        with abort_on_error("forward"):
            return self._forward(args, kwargs)

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.is_autocast_enabled(self._at.device.type):
            raise OptionError('autocast is on, but precision is part of the plan: plan with precision="bf16" instead')
        runner = self._runner()
        program = runner.program
        shapes = _piece_shapes(program) if self._inputs == "sharded" else None
        batch = self._signature.bind(args, kwargs, shapes)
        if not self._at.member:
            return self._idle(program)
        self._agree(batch, runner)
        outputs = runner.run([self._value(i.kind, i.path, batch, p) for i, p in _entries(program)])
        return pytree.tree_unflatten(self._present(outputs, program), self._out_spec)

    def _runner(self) -> Runner:
        runner = self._runners.get(self.training)
        if runner is None:
            if self._retrace is None:
                mode = "training" if self.training else "evaluation"
                raise OptionError(f"the plan was made for the other mode; this model cannot run in {mode} mode")
            runner = Runner(*self._retrace(self.training), self._at)
            self._runners[self.training] = runner
        return runner

    def _value(self, kind: str, path: str, batch: Mapping[str, Tensor], placement: Placement) -> Tensor:
        if kind != "input":
            return self._extra[path] if path in self._extra else self._holder(path)
        x = batch[path]
        if self._inputs == "global":
            x = shard_tensor(x, placement, self._at.mesh, self._at.coordinate)
        return x.detach().to(self._at.device).contiguous()

    def _holder(self, path: str) -> Tensor:
        """Parameter or buffer as the module holds it now; the way to it is walked once."""
        if path not in self._holders:
            module, _, name = path.rpartition(".")
            holder = self.get_submodule(module)
            parameters = compat.own_parameters(holder)
            self._holders[path] = (parameters if name in parameters else compat.own_buffers(holder), name)
        tensors, name = self._holders[path]
        value: Tensor = tensors[name]
        return value

    def _agree(self, batch: Mapping[str, Tensor], runner: Runner) -> None:
        """On the first call: do all ranks pass the same batch, and draw the same random numbers?"""
        if self._agreed or self._at.group is None or self._at.mesh.size == 1:
            return
        if runner.is_random and synchronise_generators(self._at):
            warnings.warn(
                "random number generators differed between ranks and were set to rank 0's: call torch.manual_seed "
                "with one seed on every rank",
                stacklevel=5,
            )
        self._agreed = True
        if self._inputs == "sharded":
            return
        seen = gather_words(batch_hash(batch), self._at.group)
        if len(set(seen)) > 1:
            self._agreed = False
            others = [r for r, word in enumerate(seen) if word != seen[0]]
            raise OptionError(
                f"ranks {others} pass another batch than rank 0 ({', '.join(sorted(batch))}): pass the same global "
                'batch on every rank, or wrap the model with inputs="sharded" where each rank loads its own piece'
            )

    def _present(self, outputs: list[Tensor], program: LocalProgram) -> list[Tensor]:
        made = []
        training = program.loss is not None and outputs[program.loss].requires_grad
        tracked = program.tracked if training and program.tracked else (False,) * len(outputs)
        for i, x in enumerate(outputs):
            if i != program.loss:
                x = _only_the_loss(x.detach()) if tracked[i] else x.detach()
                x = wrap(x, program.output_shapes[i], program.outputs[i], self._at)
            made.append(x)
        return made

    def _idle(self, program: LocalProgram) -> Any:
        """A rank beyond the plan takes part in nothing: it gets nan as loss, which no parameter depends on."""
        nothing: list[Any] = [None] * len(program.outputs)
        if program.loss is not None:
            nothing[program.loss] = torch.full((), float("nan"), requires_grad=torch.is_grad_enabled())
        return pytree.tree_unflatten(nothing, self._out_spec)


class _OnlyTheLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        raise OptionError(
            "gradients flow back through the loss only, which the plan was made for, not through other results: put "
            "what is added to the loss into the model's forward or into loss_fn, or detach the result"
        )


def _only_the_loss(x: Tensor) -> Tensor:
    """A result whose gradient is an error rather than silently left out."""
    result: Tensor = _OnlyTheLoss.apply(x, torch.empty(0, requires_grad=True))  # type: ignore[no-untyped-call]
    return result


class _Part(nn.Module):
    """Holds the parameters of a submodule. It is never called: the program of the whole model runs in its place."""

    def __init__(self, training: bool) -> None:
        super().__init__()
        self.training = training

    def train(self, mode: bool = True) -> _Part:
        """Refuses a mode of its own; `ParallelModule.train` sets all modes."""
        if mode != self.training:
            raise OptionError(
                "the mode of a submodule is part of the plan: set it before wrapping, or change that of the whole model"
            )
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Refuses to run."""
        raise OptionError("a submodule of a parallel module cannot be called by itself: call the whole model")

    def _no_hooks(self, *args: Any, **kwargs: Any) -> Any:
        raise OptionError(
            "hooks of submodules never run, since the program of the whole model runs in their place: register them on "
            "the parallel module, or before wrapping"
        )

    register_forward_hook = register_forward_pre_hook = _no_hooks
    register_full_backward_hook = register_full_backward_pre_hook = _no_hooks


class _Builder:
    """Makes the tree of modules with this rank's pieces; what is one object in the model is one object here."""

    def __init__(self, at: RuntimeMesh, placements: Mapping[str, Placement]) -> None:
        self.at = at
        self.placements = placements
        self.modules: dict[int, nn.Module] = {}
        self.tensors: dict[int, Tensor] = {}
        self.originals: list[Tensor] = []  # an id stands for an object only while that lives

    def fill(self, target: nn.Module, source: nn.Module, prefix: str) -> None:
        """Registers parameters, buffers and children of `source`, in its order."""
        self.modules[id(source)] = target
        for name, p in list(compat.own_parameters(source).items()):
            made = None if p is None else self._make(p, prefix + name)
            target.register_parameter(name, made)  # type: ignore[arg-type]
            if p is not None and made is not None:
                compat.own_parameters(source)[name] = _released(p, made)
        for name, b in list(compat.own_buffers(source).items()):
            made = None if b is None else self._make(b, prefix + name)
            target.register_buffer(name, made, persistent=compat.is_persistent(source, name))
        for name, child in compat.own_modules(source).items():
            if child is None:
                target.add_module(name, None)
                continue
            known = self.modules.get(id(child))
            if known is None:
                known = _Part(child.training)
                self.fill(known, child, f"{prefix}{name}.")
            target.add_module(name, known)

    def _make(self, whole: Tensor, path: str) -> Tensor:
        if id(whole) in self.tensors:
            return self.tensors[id(whole)]
        if whole.is_meta:
            raise OptionError(f"{path} has no values (it is on the meta device): load the weights before wrapping")
        placement = self.placements.get(path, Placement.replicated(self.at.mesh.rank))
        local = piece(whole.detach(), placement, self.at)
        made = wrap(local, whole.shape, placement, self.at)
        if isinstance(whole, nn.Parameter):
            made = nn.Parameter(made, requires_grad=whole.requires_grad)
        self.tensors[id(whole)] = made
        self.originals.append(whole)
        return made


def piece(whole: Tensor, placement: Placement, at: RuntimeMesh) -> Tensor:
    """This rank's piece in storage of its own; the tensor itself where nothing is cut."""
    if not at.member:
        return whole.new_empty(0)
    cut = shard_tensor(whole, placement, at.mesh, at.coordinate)
    if cut.shape == whole.shape:
        return whole.to(at.device).contiguous()
    return cut.to(at.device).clone(memory_format=torch.contiguous_format)


def _released(whole: nn.Parameter, made: Tensor) -> nn.Parameter:
    """What the wrapped model keeps of a parameter: itself where storage is shared, else no memory."""
    if compat.storage_key(compat.local_tensor(made)) == compat.storage_key(whole):
        return whole
    return nn.Parameter(torch.empty_like(whole, device="meta"), requires_grad=whole.requires_grad)


def _placements(program: LocalProgram) -> dict[str, Placement]:
    return {path: p for i, p in _entries(program) for path in (i.path, *i.aliases) if i.kind != "input"}


def _entries(program: LocalProgram) -> list[tuple[Any, Placement]]:
    return list(zip(program.inputs, program.placements, strict=True))


def _piece_shapes(program: LocalProgram) -> dict[str, tuple[int, ...]]:
    values = zip(program.inputs, program.values, strict=True)
    return {i.path: tuple(v.shape) for i, v in values if i.kind == "input"}


def _unregistered(module: nn.Module, model: nn.Module, program: LocalProgram, at: RuntimeMesh) -> dict[str, Tensor]:
    """Tensors that the program reads but the model holds as plain attributes."""
    out: dict[str, Tensor] = {}
    for entry, placement in _entries(program):
        if entry.kind != "input" and not isinstance(_attribute(module, entry.path), Tensor):
            whole = _attribute(model, entry.path)
            if not isinstance(whole, Tensor):
                raise OptionError(f"the program reads {entry.path}, which the model does not have")
            out[entry.path] = piece(whole.detach(), placement, at)
    return out


def _attribute(module: nn.Module, path: str) -> Any:
    value: Any = module
    for part in path.split("."):
        value = getattr(value, part, None)
    return value


def _check_outputs(out_spec: pytree.TreeSpec, program: LocalProgram) -> None:
    if out_spec.num_leaves != len(program.outputs):
        raise OptionError(f"the model returns {out_spec.num_leaves} values, the program {len(program.outputs)}")
    for shape, placement in zip(program.output_shapes, program.outputs, strict=True):
        if not placement.has_partial:
            local_shape(shape, placement, program.mesh)


def _with_signature(run: Callable[..., Any], model: nn.Module) -> Callable[..., Any]:
    """`run` with the signature of the model's ``forward``, which Hugging Face's Trainer looks at."""

    @functools.wraps(run)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return run(*args, **kwargs)

    forward.__signature__ = inspect.signature(model.forward)  # type: ignore[attr-defined]
    forward.__name__ = "forward"
    forward.__doc__ = model.forward.__doc__
    return forward
