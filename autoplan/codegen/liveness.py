"""Peak memory of a training step, from the emitted graphs.

Storages, not tensors, are counted: a view keeps its whole base, a tuple all its members, a collective its input until
it is waited for. Emitted code runs in program order and drops every name at its last use, so with L(i) the storages
that live names hold while node i runs, and w(i) what its kernel allocates meanwhile::

    peak = static + max over i of ( Σ_{s ∈ L(i)} bytes(s) + w(i) )                                             (1)

over the nodes of forward, then backward, then the optimizer's update, where static is parameters, buffers, the batch
and the optimizer's state (`_static`); `_run` evaluates (1) for one graph. The step is one in steady state: optimizer
state exists, gradients are None before, and after forward the user holds nothing but the loss.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoplan.codegen import compat, rng
from autoplan.codegen.partition import Partitioned, state_bytes
from autoplan.codegen.program import LocalProgram, value_of
from autoplan.codegen.workspace import workspace_bytes
from autoplan.codegen.write import WAIT, holds_input
from autoplan.ir import Mesh, Placement, Shard

_SAME_STORAGE = {WAIT, compat.functional.all_reduce_.default}


@dataclass(frozen=True)
class Liveness:
    """Memory over one training step.

    Attributes:
        peak_bytes: Largest sum of live storages.
        phase: ``forward``, ``backward`` or ``optimizer``: where the peak is.
        label: Node at the peak.
        parts: What lives at the peak: ``parameters``, ``gradients``, ``optimizer``, ``inputs``, ``saved``,
            ``temporaries``.
        timeline: (phase:node, live bytes while it runs) in program order.
    """

    peak_bytes: int
    phase: str
    label: str
    parts: Mapping[str, int]
    timeline: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        parts = ", ".join(f"{k} {v / 1e6:.2f}" for k, v in self.parts.items() if v)
        return f"peak {self.peak_bytes / 1e6:.2f} MB in {self.phase} at {self.label} (MB: {parts})"


def simulate(
    partitioned: Partitioned,
    program: LocalProgram,
    *,
    optimizer_states: int = 2,
    accumulating: bool = False,
    idle_bytes: int = 0,
) -> Liveness:
    """Peak memory of one step on one device.

    Args:
        partitioned: Emitted graphs.
        program: The program they come from.
        optimizer_states: Full-size state tensors per trainable parameter: 2 for AdamW, 1 for SGD with momentum.
        accumulating: Whether gradients of an earlier backward are there, to which this one's are added.
        idle_bytes: Parameters, buffers and inputs that the program does not read.
    """
    step = _Step(program, optimizer_states)
    step.hold(step.new(idle_bytes, "parameters"))
    if accumulating:
        values = program.values
        step.hold([step.new(values[i].untyped_storage().nbytes(), "gradients") for i in partitioned.gradients])
    held = step.forward(partitioned)
    if partitioned.backward is not None:
        step.backward(partitioned, held)
        if not accumulating:
            step.optimizer(partitioned, optimizer_states)
    return step.result()


Slots = Any  # int (a storage), None (no tensor), or a tuple of Slots


class _Step:
    """Live storages while the phases run one after the other."""

    def __init__(self, program: LocalProgram, optimizer_states: int) -> None:
        self.sizes: list[int] = []
        self.kinds: list[str] = []
        self.live: Counter[int] = Counter()
        self.total = 0
        self.timeline: list[tuple[str, int]] = []
        self.best: tuple[int, str, str, tuple[int, ...]] = (-1, "", "", ())
        self.program = program
        self.values = program.values
        entries = zip(self.values, program.placements, program.inputs, strict=True)
        self.inputs = [
            self.new(0 if i.kind == "input" and _is_leading(p) else _bytes(v), _KIND[i.kind]) for v, p, i in entries
        ]
        self.cut = [s for s, n in zip(self.inputs, self._whole_batch(), strict=True) if n]
        for slot in self.inputs:
            self.hold(slot)
        for n in self._elsewhere(optimizer_states):
            self.hold(self.new(*n))

    def _elsewhere(self, optimizer_states: int) -> Iterable[tuple[int, str]]:
        """What lives for the whole step besides the program's inputs."""
        trainable = [v for v in self.values if v.requires_grad]
        counters = 4 * len(trainable) if optimizer_states > 1 else 0  # AdamW counts steps in a scalar per parameter
        yield optimizer_states * sum(map(_bytes, trainable)) + counters, "optimizer"
        yield sum(self._whole_batch()), "inputs"
        if self.program.mesh.size > 1:
            yield 4 * self.program.mesh.size, "inputs"  # the DeviceMesh keeps its ranks as an int32 tensor

    def _whole_batch(self) -> list[int]:
        """Per input, the bytes of the whole tensor that the user holds, where this rank's piece is less."""
        program = self.program
        entries = zip(self.values, program.placements, program.inputs, strict=True)
        return [_global_bytes(v, p, program.mesh) if i.kind == "input" else 0 for v, p, i in entries]

    def new(self, nbytes: int, kind: str = "temporaries") -> int:
        """A storage that nothing holds yet."""
        self.sizes.append(nbytes)
        self.kinds.append(kind)
        return len(self.sizes) - 1

    def hold(self, slots: Slots) -> None:
        """One more name for the storages."""
        for s in _flat(slots):
            self.live[s] += 1
            if self.live[s] == 1:
                self.total += self.sizes[s]

    def drop(self, slots: Slots) -> None:
        """One name less."""
        for s in _flat(slots):
            self.live[s] -= 1
            if not self.live[s]:
                del self.live[s]
                self.total -= self.sizes[s]

    def mark(self, phase: str, label: str, extra: int = 0) -> None:
        """Notes the bytes live now."""
        self.timeline.append((f"{phase}:{label}", self.total + extra))
        if self.total + extra > self.best[0]:
            self.best = (self.total + extra, phase, label, tuple(self.live))

    def forward(self, partitioned: Partitioned) -> list[Slots]:
        """Runs forward; returns what backward is given besides the gradient."""
        results = self.run("forward", partitioned.forward.graph, self.inputs)
        seen = partitioned.n_outputs + len(partitioned.mutations)
        saved = iter(results[seen:])
        held = [next(saved) if s.input is None else self.inputs[s.input] for s in partitioned.saved]
        self.hold(held)
        for slot in _flat([h for h, s in zip(held, partitioned.saved, strict=True) if s.input is None]):
            self.kinds[slot] = "saved"
        if partitioned.loss is not None:
            self.hold(results[partitioned.loss])
        self.drop(results)
        self.drop(self.cut)  # pieces of the batch die with the call of forward
        return held

    def backward(self, partitioned: Partitioned, held: list[Slots]) -> None:
        """Runs backward, which takes what `held` names hold."""
        assert partitioned.backward is not None
        tangent = self.new(_bytes(value_of(partitioned.backward.graph.find_nodes(op="placeholder")[0])))
        self.hold(tangent)
        self.hold(tangent)  # once more: autograd holds the gradient it was started with until it is done
        arguments = [tangent, *held]  # run() takes over these names
        results = self.run("backward", partitioned.backward.graph, arguments, boxed=True)
        self.drop(tangent)
        for slot in _flat(results):
            self.kinds[slot] = "gradients"

    def optimizer(self, partitioned: Partitioned, optimizer_states: int) -> None:
        """The update, one parameter after the other.

        Single-tensor AdamW holds a denominator in two versions, and the parameter before's until it has its own.
        """
        before = worst = 0
        for size in (_bytes(self.values[i]) for i in partitioned.gradients) if optimizer_states > 1 else ():
            worst = max(worst, before + 2 * size)
            before = size
        self.mark("optimizer", "update", worst)

    def run(self, phase: str, graph: fx.Graph, arguments: list[Slots], *, boxed: bool = False) -> list[Slots]:
        """Equation (1) for one graph; results are held on return, boxed arguments no longer."""
        env: dict[fx.Node, Slots] = {}
        given = iter(arguments)
        last = _last_uses(graph)
        in_flight: dict[fx.Node, Slots] = {}
        for node in graph.nodes:
            if node.op == "placeholder":
                env[node] = next(given)
                if not boxed:
                    self.hold(env[node])
                if not node.users and boxed:
                    self.drop(env.pop(node))
                continue
            if node.op == "output":
                return [env[n] for n in node.args[0]]
            env[node] = self.result_of(node, env)
            self.hold(env[node])
            if holds_input(node):
                in_flight[node] = [env[m] for m in node.all_input_nodes]
                self.hold(in_flight[node])
            self.mark(phase, node.name, workspace_bytes(node))
            if node.target is WAIT:
                self.drop(in_flight.pop(node.all_input_nodes[0], None))
            for dead in last.get(node, ()):
                self.drop(env.pop(dead))
        return []

    def result_of(self, node: fx.Node, env: dict[fx.Node, Slots]) -> Slots:
        """Storages of a node's result."""
        target = node.target
        if target is operator.getitem:
            return env[node.args[0]][node.args[1]]  # type: ignore[index]
        if node.op == "get_attr":
            return self.new(_bytes(getattr(node.graph.owning_module, str(target))))
        if compat.is_view(target) or target in _SAME_STORAGE:
            base = env[node.all_input_nodes[0]]
            value = value_of(node)
            return tuple(base for _ in value) if isinstance(value, (tuple, list)) else base
        if target is rng.save:
            stream = node.args[0]
            return (self.new(state_bytes(str(stream))), self.allocate(value_of(node)[1]))
        return self.allocate(value_of(node))

    def allocate(self, value: Any) -> Slots:
        """New storages for a value."""
        if isinstance(value, (tuple, list)):
            return tuple(self.allocate(v) for v in value)
        return self.new(_bytes(value)) if isinstance(value, torch.Tensor) else None

    def result(self) -> Liveness:
        """What was seen."""
        peak, phase, label, live = self.best
        parts: Counter[str] = Counter(temporaries=peak - sum(self.sizes[s] for s in live))
        for s in live:
            parts[self.kinds[s]] += self.sizes[s]
        order = ("parameters", "gradients", "optimizer", "inputs", "saved", "temporaries")
        return Liveness(peak, phase, label, {k: parts[k] for k in order}, tuple(self.timeline))


_KIND = {"parameter": "parameters", "buffer": "parameters", "input": "inputs"}


def _flat(slots: Slots) -> list[int]:
    if slots is None:
        return []
    if isinstance(slots, int):
        return [slots]
    return [s for item in slots for s in _flat(item)]


def _last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Node -> names whose last use it is; a node that nothing uses dies at once."""
    last: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        last[node] = node
        for m in node.all_input_nodes:
            last[m] = node
    out: dict[fx.Node, list[fx.Node]] = {}
    for node, at in last.items():
        out.setdefault(at, []).append(node)
    return out


def _bytes(value: torch.Tensor) -> int:
    return int(value.untyped_storage().nbytes())


def _global_bytes(value: torch.Tensor, placement: Placement, mesh: Mesh) -> int:
    """Bytes of a whole input of which this rank has a piece; 0 where the piece is the whole."""
    pieces = math.prod(n for n, p in zip(mesh.shape, placement, strict=True) if isinstance(p, Shard))
    return _bytes(value) * pieces if pieces > 1 or _is_leading(placement) else 0


def _is_leading(placement: Placement) -> bool:
    """Whether a piece is consecutive in memory, and so a view of the whole."""
    cuts = [p for p in placement if isinstance(p, Shard)]
    return bool(cuts) and all(p.dim == 0 and p.outer == 1 for p in cuts)
