"""`replay`: follows the memory of an eager training step of a graph on fake tensors; nothing is computed or allocated.

The graph is executed op after op under torch's own autograd, forward and then backward, with tensors that have a shape,
a dtype and a storage, but no memory. So what an op saves, which gradients are new tensors and which are the incoming
one under another name, and when each storage is let go, are torch's own rules, for every op that torch knows. Scratch
memory that kernels take for themselves does not pass the dispatcher and is not counted, but for `workspace`.

Values die at their last use, as names in eager code do when they are assigned again, but arguments of a module not
before it returns: Python's frames hold them. Results of the model other than the loss die when forward returns.
"""

from __future__ import annotations

import bisect
import contextlib
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from autoplan.errors import AutoplanError, UnsupportedOpError
from autoplan.ir import Arg, Op, OpGraph, Ref, StepEvents, StorageEvent
from autoplan.trace.compat import (
    FakeTensorMode,
    TorchDispatchMode,
    accumulates_in_place,
    autograd_sequence,
    node_sequence,
    pytree,
    storage_key,
)
from autoplan.trace.workspace import hidden_bytes

_SYMBOLS = {
    name: getattr(torch, name[6:])
    for name in ("torch.strided", "torch.contiguous_format", "torch.preserve_format", "torch.channels_last")
}
_DEVICE = torch.ops.prim.device.default


def replay(graph: OpGraph, *, in_place: Collection[str] = ()) -> StepEvents:
    """Follows forward and backward of one step.

    Args:
        graph: Forward graph.
        in_place: Keys of the ops that the model executes in place.
    """
    fake = FakeTensorMode()
    with fake, torch.enable_grad():
        env = {i.value: _given(graph, i.value) for i in graph.inputs}
    recorder = _Recorder(env.values())
    hooks = torch.autograd.graph.saved_tensors_hooks(recorder.save, recorder.saved)
    with _named(graph, recorder), fake, recorder, torch.enable_grad(), hooks:
        _forward(graph, env, recorder, in_place)
        loss = None if graph.loss is None else graph.outputs[graph.loss]
        start = [v for v in dict.fromkeys(graph.outputs) if env[v].requires_grad] if loss is None else [loss]
        roots = [env[v] for v in start if env[v].grad_fn is not None]
        leaves = {i.value: env[i.value] for i in graph.inputs if i.kind == "parameter"}
        env.clear()
        recorder.start_backward()
        if roots:
            torch.autograd.backward(roots, [torch.ones_like(r) for r in roots])
        roots.clear()
        trained = tuple(v for v, p in leaves.items() if p.grad is not None)
        gradients = frozenset(recorder.number(leaves[v].grad) for v in trained)
    return StepEvents(tuple(recorder.events), gradients, trained)


@contextlib.contextmanager
def _named(graph: OpGraph, recorder: _Recorder) -> Iterator[None]:
    """Errors say at which op they happened."""
    try:
        yield
    except AutoplanError:
        raise
    except Exception as e:  # torch raises whatever it likes where an op has no fake or no backward
        op = next((op for op in graph.ops if op.key == recorder.op), None)
        what = "a step" if op is None else f"{op.name} in module {op.module!r}" if op.module else op.name
        raise UnsupportedOpError(
            f"the {recorder.phase} of {what} cannot be followed on fake tensors: {type(e).__name__}: "
            f"{str(e).splitlines()[0] if str(e) else ''}"
        ) from e


def _given(graph: OpGraph, value: str) -> torch.Tensor:
    spec = graph.values[value]
    return torch.empty(spec.shape, dtype=getattr(torch, spec.dtype)).requires_grad_(spec.requires_grad)


def _forward(graph: OpGraph, env: dict[str, torch.Tensor], recorder: _Recorder, in_place: Collection[str]) -> None:
    dies = _last_uses(graph)
    for op in graph.ops:
        recorder.enter(op.key)
        results = _run(op, env, op.key in in_place)
        env.update(zip(op.outputs, results, strict=True))
        del results
        for value in dies.get(op.key, ()):
            del env[value]
    recorder.enter("")


def _last_uses(graph: OpGraph) -> Mapping[str, list[str]]:
    """Op -> values that die after it; what is given and what is returned stays."""
    makers: dict[str, int] = {}
    last: dict[str, int] = {}
    for i, op in enumerate(graph.ops):
        makers.update(dict.fromkeys(op.outputs, i))
        last.update(dict.fromkeys((v for v in (*op.outputs, *op.inputs) if v not in graph.input_of), i))
    paths = [op.module.split(".") if op.module else [] for op in graph.ops]
    ends = _call_ends(paths)
    out: dict[str, list[str]] = {}
    for value, i in last.items():
        if value not in graph.outputs:
            shared = _common(paths[makers[value]], paths[i])
            held = ends[i][shared] if shared < len(paths[i]) else i  # an argument of the module one level down
            out.setdefault(graph.ops[held].key, []).append(value)
    return out


def _call_ends(paths: Sequence[Sequence[str]]) -> list[list[int]]:
    """Per op and part of its module's path, the last op of the run of ops inside that module."""
    ends: list[list[int]] = []
    for i in reversed(range(len(paths))):
        same = _common(paths[i], paths[i + 1]) if ends else 0
        ends.append([ends[-1][d] if d < same else i for d in range(len(paths[i]))])
    return ends[::-1]


def _common(a: Sequence[str], b: Sequence[str]) -> int:
    """How many leading parts two paths share."""
    return next((d for d, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _run(op: Op, env: Mapping[str, torch.Tensor], in_place: bool) -> list[torch.Tensor]:
    namespace, name, overload = (*op.target.split("."), "default")[:3]
    function = getattr(getattr(getattr(torch.ops, namespace), name + "_" * in_place), overload)
    out = function(*(_argument(a, env) for a in op.args), **{k: _argument(a, env) for k, a in op.kwargs.items()})
    return [out] if isinstance(out, torch.Tensor) else list(out)


def _argument(arg: Arg, env: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(arg, Ref):
        return env[arg.value]
    if isinstance(arg, tuple):
        return [_argument(a, env) for a in arg]
    if isinstance(arg, str) and arg.startswith("device:"):
        return torch.device(arg[7:])
    if isinstance(arg, str) and arg.startswith("torch."):
        return _SYMBOLS[arg] if arg in _SYMBOLS else getattr(torch, arg[6:])
    return arg


class _Saved:
    """What autograd holds instead of a saved tensor; it goes when autograd lets go."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches storages come and go; `events` is the record."""

    def __init__(self, given: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[StorageEvent] = []
        self.phase, self.op = "forward", ""
        self.count = 0
        self.live: dict[int, int] = {storage_key(t): -1 for t in given}
        self.given = list(given)  # keeps their storages, and with them the keys of `live`
        self.starts: list[int] = []  # number of the first autograd node of each op
        self.keys: list[str] = []

    def enter(self, key: str) -> None:
        """An op of the graph starts."""
        self.op = key
        self.starts.append(node_sequence())
        self.keys.append(key)

    def start_backward(self) -> None:
        self.phase, self.op = "backward", ""

    def number(self, tensor: torch.Tensor | None) -> int:
        assert tensor is not None
        return self.live[storage_key(tensor)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE:  # asked for about as often as all ops together
            return args[0].device
        kwargs = kwargs or {}
        if self.phase == "backward":
            if func is torch.ops.aten.add.Tensor and accumulates_in_place(args[0]):
                return torch.ops.aten.add_.Tensor(args[0], args[1])  # the engine sums two gradients
            if (sequence := autograd_sequence()) is not None:
                self.op = self.keys[bisect.bisect_right(self.starts, sequence) - 1]
        out = func(*args, **kwargs)
        hidden = hidden_bytes(func, args)
        for i, leaf in enumerate(pytree.tree_leaves(out)):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf, hidden.get(i))
        return out

    def _see(self, tensor: torch.Tensor, hidden: int | None) -> None:
        storage = tensor.untyped_storage()
        key, nbytes = storage_key(tensor), storage.nbytes() if hidden is None else hidden
        if key in self.live or not nbytes:
            return
        self.live[key] = self.count
        weakref.finalize(storage, self._freed, key, nbytes)
        self._add("alloc", self.count, nbytes)
        self.count += 1

    def _freed(self, key: int, nbytes: int) -> None:
        self._add("free", self.live.pop(key), nbytes)

    def _add(self, kind: Any, storage: int, nbytes: int) -> None:
        self.events.append(StorageEvent(kind, storage, nbytes, self.phase, self.op))

    def save(self, tensor: torch.Tensor) -> _Saved:
        """Autograd saves a tensor."""
        saved = _Saved(tensor)
        number = self.live.get(storage_key(tensor), -1)
        if number >= 0:
            self._add("save", number, 0)
            weakref.finalize(saved, self._add, "release", number, 0)
        return saved

    @staticmethod
    def saved(saved: _Saved) -> torch.Tensor:
        """Autograd reads what it saved."""
        return saved.tensor
