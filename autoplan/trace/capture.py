"""`trace`: exports a model on fake tensors and turns the exported program into an `OpGraph`."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import io
import logging
import math
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from autoplan.errors import OptionError, TraceError
from autoplan.ir import OpGraph
from autoplan.trace.attention import opaque_attention
from autoplan.trace.build import build_graph
from autoplan.trace.compat import FakeTensor, FakeTensorMode, pytree

LossFn = Callable[[Any, Any], torch.Tensor]


@dataclass(frozen=True)
class TracedModel:
    """A model's forward step as a graph, and what is needed to call it as the model is called.

    Attributes:
        graph: The forward graph.
        model: The user's module (untouched; its weights may be on ``meta``).
        args: Example positional inputs, as the user gave them.
        kwargs: Example keyword inputs.
        paths: Per flattened leaf of ``(args, kwargs)``, the graph input's path, or None where the graph does not
            read that leaf.
        in_spec: Pytree of ``(args, kwargs)``.
        out_spec: Pytree of what the model returns.
        training: Whether the model was in training mode.
        notes: What a reader should know of how it was traced.
        in_place: Keys of the ops that the model executes in place; in the graph they make new values.
        idle_bytes: Sizes of the parameters, buffers and inputs that the graph does not read, by
            `GraphInput.kind`: they occupy memory all the same.
    """

    graph: OpGraph
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    paths: tuple[str | None, ...]
    in_spec: Any
    out_spec: Any
    training: bool
    notes: tuple[str, ...] = ()
    in_place: frozenset[str] = frozenset()
    idle_bytes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def parameter(self, path: str) -> torch.Tensor:
        """The user's parameter or buffer behind a graph input."""
        module, _, name = path.rpartition(".")
        tensor: torch.Tensor = getattr(self.model.get_submodule(module), name)
        return tensor


def split_inputs(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A batch as positional and keyword arguments: a mapping is keywords, a tuple or list positional.

    Raises:
        OptionError: Neither of these nor a tensor.
    """
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, tuple | list):
        return tuple(inputs), {}
    if isinstance(inputs, torch.Tensor):
        return (inputs,), {}
    raise OptionError(f"inputs must be a dict of keyword arguments, a tuple or a tensor, not {type(inputs).__name__}")


def trace(
    model: nn.Module,
    inputs: Any,
    *,
    precision: str = "fp32",
    loss_fn: LossFn | None = None,
    as_is: bool = False,
) -> TracedModel:
    """Traces one forward step on fake CPU tensors; nothing is allocated and `model` is not changed.

    Args:
        model: Any module; parameters may be real or on ``meta``. Its train/eval mode is baked into the graph.
        inputs: Example batch: dict of keyword arguments, tuple, or tensor.
        precision: ``fp32`` traces the model as it is; ``bf16`` casts floating parameters and inputs to bfloat16 where
            they are used.
        loss_fn: ``loss_fn(outputs, inputs)``, for models that do not return their loss.
        as_is: Traces for a profile what eager execution does: attention as the model has it, and also models that
            change buffers (batch norm in training). The graph leaves the new values of the buffers out, so that it
            cannot be run in place of the model.

    Raises:
        TraceError: The model cannot be exported; names the module and the source line.
        OptionError: `inputs` is no batch.
    """
    if not isinstance(model, nn.Module) or isinstance(model, torch.jit.ScriptModule):
        raise OptionError(f"the model must be an ordinary nn.Module, not {type(model).__name__}")
    args, kwargs = split_inputs(inputs)
    leaves, in_spec = pytree.tree_flatten((args, kwargs))
    _check_batch(leaves)
    mode = FakeTensorMode()
    low = torch.bfloat16 if precision == "bf16" else None
    fake = _fake_copy(model, mode, low)
    step: nn.Module = fake if loss_fn is None else _WithLoss(fake, loss_fn, isinstance(inputs, Mapping))
    fake_leaves = [_fake_input(x, mode, low) for x in leaves]
    fake_args, fake_kwargs = pytree.tree_unflatten(fake_leaves, in_spec)
    with opaque_attention(fake, kwargs, as_is=as_is) as note:
        exported, fallen_back = _export(step, fake, fake_args, fake_kwargs, mode)
    graph, paths, out_spec, in_place = build_graph(
        exported, model, args, kwargs, prefix="model." if loss_fn else "", low=low, updates_buffers=as_is
    )
    if graph.loss is not None and low is not None and graph.values[graph.outputs[graph.loss]].dtype == "bfloat16":
        warnings.warn("the loss is computed in bfloat16; compute it in float32 in the model", stacklevel=2)
    checkpointed = (
        "the model's own gradient checkpointing is not seen: activations count as kept unless a plan recomputes them"
        if _checkpoints(model)
        else None
    )
    notes = tuple(n for n in (note, fallen_back, checkpointed) if n)
    unread = [x for x, path in zip(leaves, paths, strict=True) if path is None and isinstance(x, torch.Tensor)]
    return TracedModel(
        graph, model, args, kwargs, paths, in_spec, out_spec, model.training, notes, in_place,
        _idle_bytes(graph, model, unread),
    )  # fmt: skip


def _checkpoints(model: nn.Module) -> bool:
    """Whether a Hugging Face model has its activation checkpointing switched on; the name changed in transformers 5."""
    new = "is_activation_checkpointing"
    return bool(getattr(model, new if hasattr(type(model), new) else "is_gradient_checkpointing", False))


def _idle_bytes(graph: OpGraph, model: nn.Module, unread: list[torch.Tensor]) -> Mapping[str, tuple[int, ...]]:
    read = {path for i in graph.inputs if i.kind != "input" for path in (i.path, *i.aliases)}
    parameters = [p for name, p in model.named_parameters() if name not in read]
    buffers = [b for name, b in model.named_buffers() if name not in read]
    kinds: dict[str, list[torch.Tensor]] = {"parameter": [*parameters], "buffer": buffers, "input": unread}
    return {kind: tuple(t.numel() * t.element_size() for t in tensors) for kind, tensors in kinds.items() if tensors}


class _WithLoss(nn.Module):
    def __init__(self, model: nn.Module, loss_fn: LossFn, named: bool) -> None:
        super().__init__()
        self.model = model
        self._loss_fn = loss_fn
        self._named = named

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        outputs = self.model(*args, **kwargs)
        loss = self._loss_fn(outputs, kwargs if self._named else args)
        return loss, outputs


def _check_batch(leaves: list[Any]) -> None:
    tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
    devices = {str(x.device) for x in tensors if x.device.type != "meta"}
    if len(devices) > 1:
        raise OptionError(f"the batch lies on several devices ({', '.join(sorted(devices))}): move it to one")
    numbers = [x for x in leaves if isinstance(x, float) and not math.isfinite(x)]
    if numbers:
        raise OptionError(f"the batch holds the number {numbers[0]}: sizes and options of a step are finite")
    if not tensors:
        given = ", ".join(sorted({type(x).__name__ for x in leaves})) or "nothing"
        raise OptionError(f"the batch holds no tensor, but {given}: give the tensors that the model is called with")
    empty = next((x for x in tensors if x.numel() == 0), None)
    if empty is not None:
        raise OptionError(
            f"the batch holds a tensor without elements, of shape {tuple(empty.shape)}: a step needs at least "
            "one sample"
        )
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        raise OptionError("tracing inside an autocast block is not supported: leave it and ask for precision='bf16'")


def _fake_copy(model: nn.Module, mode: FakeTensorMode, low: torch.dtype | None) -> nn.Module:
    """The module tree with fake parameters and buffers in place of the real ones; ties are kept."""
    memo: dict[int, Any] = {}
    with mode:
        for p in model.parameters():
            dtype = low if low is not None and p.dtype == torch.float32 else p.dtype
            fake = torch.empty_strided(p.shape, p.stride(), dtype=dtype)
            memo[id(p)] = nn.Parameter(fake, requires_grad=p.requires_grad)
        for b in model.buffers():
            memo.setdefault(id(b), torch.empty_strided(b.shape, b.stride(), dtype=b.dtype))
    try:
        return copy.deepcopy(model, memo)
    except (RuntimeError, TypeError) as e:
        raise TraceError(f"{type(model).__name__} cannot be copied for tracing: {e}") from e


def _fake_input(leaf: Any, mode: FakeTensorMode, low: torch.dtype | None) -> Any:
    """A fresh fake tensor per leaf, so that one tensor passed under two names stays two inputs."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    dtype = low if low is not None and leaf.dtype == torch.float32 else leaf.dtype
    with mode:
        return torch.empty(leaf.shape, dtype=dtype)


def _by_symbolic_trace(step: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.export.ExportedProgram:
    return torch.export.export(torch.fx.symbolic_trace(step), args, kwargs, strict=False)


_FALL_BACKS: dict[str, Callable[..., torch.export.ExportedProgram]] = {
    "dynamo": functools.partial(torch.export.export, strict=True),
    "torch.fx.symbolic_trace": _by_symbolic_trace,
}
"""Front ends that are tried in order where `torch.export` cannot run the module; a `GraphModule` needs none of them."""


def _first(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:400]


def _export(
    step: nn.Module, fake: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], mode: FakeTensorMode
) -> tuple[torch.export.ExportedProgram, str | None]:
    """The exported step, and what a reader should know where a fall-back made it."""
    stack: list[str] = []
    with contextlib.ExitStack() as hooks, mode, warnings.catch_warnings(), torch.enable_grad():
        warnings.simplefilter("ignore")
        hooks.enter_context(_module_stack(fake, stack))
        try:
            with _quiet():
                return torch.export.export(step, args, kwargs, strict=False), None
        except Exception as e:  # export raises whatever the model's own code raises
            where = _user_line(e)
            for name, front_end in _FALL_BACKS.items():
                with contextlib.suppress(Exception), _quiet():
                    return front_end(step, args, kwargs), f"traced by {name}, because torch.export failed: {_first(e)}"
            module = f"module {stack[-1]!r}" if stack and stack[-1] else "the model's top level"
            raise TraceError(
                f"{type(fake).__name__} cannot be traced: {type(e).__name__} in {module}{where}: {_first(e)}\n"
                "Code that branches on tensor values, or calls .item() or .numpy(), has to be rewritten with tensor "
                "operations (torch.where, torch.cond); a wrong argument or shape shows the same message as in eager."
            ) from e


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps torch from logging and printing graphs and stacks of what becomes an error message here."""
    names = [n for n in logging.root.manager.loggerDict if n == "torch" or n.startswith("torch.")]
    enabled = [x for x in map(logging.getLogger, names) if not x.disabled]
    for logger in enabled:
        logger.disabled = True
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            yield
        sys.stderr.write(printed.getvalue())
    finally:
        for logger in enabled:
            logger.disabled = False


@contextlib.contextmanager
def _module_stack(model: nn.Module, stack: list[str]) -> Iterator[None]:
    """Keeps the path of the module that runs; on an exception it stays where it happened."""
    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(lambda m, a, name=name: stack.append(name)))
        handles.append(module.register_forward_hook(lambda m, a, o: (stack.pop(), None)[1]))
    try:
        yield
    finally:
        for h in handles:
            h.remove()


_NOT_THE_USERS = ("/torch/", "/autoplan/trace/", inspect.__file__)


def _user_line(error: BaseException) -> str:
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not any(part in frame.filename for part in _NOT_THE_USERS) and frame.line:
            return f", {frame.filename.rsplit('/', 1)[-1]}:{frame.lineno} `{frame.line.strip()}`"
    return ""


__all__ = ["FakeTensor", "TracedModel", "split_inputs", "trace"]
