"""Memory of an eager training step over time, on one device.

With S(t) the storages alive at event t of the step::

    live(t) = static + Σ_{s ∈ S(t)} bytes(s),      peak = max over t of live(t)                                (1)

`static` is parameters, buffers, the batch and the optimizer's state. Forward and backward come as `StepEvents`, which
the trace room records under torch's own autograd; the optimizer's update, which runs parameter after parameter, is
added here (`_update`). `memory` evaluates (1) and keeps one `Moment` per op and phase, the one with the most bytes.

A device's allocator rounds every storage up; the difference at the peak is stated apart (`Memory.rounding_bytes`).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from autoplan.ir import OpGraph, StepEvents, StorageEvent
from autoplan.ir.plan import OPTIMIZERS


@dataclass(frozen=True)
class Moment:
    """What is alive while one op runs, when the most is; the bytes add up to `total`.

    Attributes:
        phase: ``forward``, ``backward`` or ``step`` (the optimizer's update).
        op: `Op.key`; in the update, the path of the parameter; empty where the cause is no op of the graph.
        parameters: Bytes of parameters.
        gradients: Bytes of gradients of parameters.
        optimizer: Bytes of optimizer state.
        inputs: Bytes of buffers and the batch.
        saved: Bytes that autograd holds for backward.
        temporaries: All other bytes: results not yet used up, gradients of activations, workspaces of kernels.
    """

    phase: str
    op: str
    parameters: int
    gradients: int
    optimizer: int
    inputs: int
    saved: int
    temporaries: int

    @property
    def total(self) -> int:
        """Sum of the parts."""
        return self.parameters + self.gradients + self.optimizer + self.inputs + self.saved + self.temporaries

    def to_json(self) -> list[Any]:
        """Fields in order."""
        return list(dataclasses.astuple(self))

    @classmethod
    def from_json(cls, data: list[Any]) -> Moment:
        """Inverse of `to_json`."""
        return cls(*data)


@dataclass(frozen=True)
class Memory:
    """Memory of a step.

    Attributes:
        parameter_bytes: Parameters, ties counted once, frozen ones and those that no op reads included.
        gradient_bytes: Gradients of those that are trained.
        optimizer_bytes: Optimizer state.
        input_bytes: Buffers and the batch.
        saved_bytes: What forward leaves for backward, each storage once.
        saved_by_op: The same by the op that made it: `Op.key` -> bytes.
        timeline: One moment per op and phase.
        rounding_bytes: What the allocator's rounding adds at the peak, beyond the timeline.
    """

    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    input_bytes: int
    saved_bytes: int
    saved_by_op: Mapping[str, int]
    timeline: tuple[Moment, ...]
    rounding_bytes: int

    def peak(self, *phases: str) -> int:
        """Most bytes in some phases, all by default."""
        return max((m.total for m in self.timeline if not phases or m.phase in phases), default=0)

    @property
    def peak_bytes(self) -> int:
        """Peak of the whole step."""
        return self.peak()


def memory(
    graph: OpGraph,
    events: StepEvents,
    *,
    idle_bytes: Mapping[str, Sequence[int]] = MappingProxyType({}),
    optimizer: str = "adamw",
    granularity_bytes: int = 1,
    foreach: bool = False,
) -> Memory:
    """Follows the memory of a step, equation (1).

    Args:
        graph: Forward graph.
        events: Forward and backward of it.
        idle_bytes: Sizes of parameters, buffers and inputs that the graph does not read, by `GraphInput.kind`. They
            get no gradient, and so no optimizer state.
        optimizer: Name in `autoplan.ir.plan.OPTIMIZERS`.
        granularity_bytes: The allocator rounds storages up to multiples of this.
        foreach: Whether the optimizer updates all parameters at once, as torch does on CUDA, or one after the other,
            as it does on CPUs.
    """
    given = {kind: [*idle_bytes.get(kind, ())] for kind in _KINDS}
    for i in graph.inputs:
        given[i.kind].append(graph.values[i.value].nbytes)
    trained = {graph.input_of[v].path: graph.values[v].nbytes for v in events.trained}
    states = OPTIMIZERS[optimizer]
    steps = _STEP_BYTES * len(trained) if optimizer == "adamw" else 0
    parameters, state = sum(given["parameter"]), states * sum(trained.values()) + steps
    inputs = sum(given["buffer"]) + sum(given["input"])
    start = Moment("forward", "", parameters, 0, state, inputs, 0, 0)
    live = _Live(start, events.gradients, granularity_bytes)
    lasting = [n for sizes in (*given.values(), *[list(trained.values())] * states) for n in sizes]
    live.padding = sum(live.round(n) - n for n in lasting)
    for event in events.events:
        if event.phase == "backward" and live.phase == "forward":
            live.end_forward()
        live.take(event)
    live.end_forward()
    for path, extra in _update(trained, optimizer, foreach):
        live.note("step", path, extra)
    return Memory(
        parameters, sum(trained.values()), state, inputs, sum(live.kept.values()), live.kept, live.timeline(),
        live.padding_at_peak,
    )  # fmt: skip


TIMELINE_PHASES = ("forward", "backward", "step")
_KINDS = ("parameter", "buffer", "input")
_STEP_BYTES = 4
"""AdamW counts its steps in one float32 number per parameter."""


def _update(trained: Mapping[str, int], optimizer: str, foreach: bool) -> Iterator[tuple[str, int]]:
    """Path of each parameter and the temporaries of its update.

    AdamW (torch/optim/adam.py, `_single_tensor_adam`) makes a denominator, ``sqrt()`` and then its quotient: two
    tensors of the parameter's size, while the denominator of the parameter before is still in its variable. With
    foreach the square roots of all parameters are there at once, and worked on in place. SGD works in place.
    """
    if optimizer == "none":
        return
    before = 0
    for path, nbytes in trained.items():
        if optimizer == "adamw":
            yield path, sum(trained.values()) if foreach else before + 2 * nbytes
        else:
            yield path, 0
        before = nbytes


class _Live:
    """Storages alive now, split, and the largest moment of each op."""

    def __init__(self, start: Moment, gradients: frozenset[int], granularity_bytes: int) -> None:
        self.start, self.gradient_ids, self.granularity = start, gradients, granularity_bytes
        self.phase = "forward"
        self.sizes: dict[int, int] = {}
        self.makers: dict[int, str] = {}
        self.held: Counter[int] = Counter()  # how often autograd holds a storage
        self.gradients = self.saved = self.other = 0
        self.padding = self.padding_at_peak = self.peak = 0
        self.kept: dict[str, int] = {}
        self.largest: dict[tuple[str, str], Moment] = {}
        self.note("forward", "", 0)

    def round(self, nbytes: int) -> int:
        return -(-nbytes // self.granularity) * self.granularity

    def take(self, event: StorageEvent) -> None:
        """Follows one event."""
        s, n = event.storage, event.nbytes
        match event.kind:
            case "alloc":
                self.sizes[s], self.makers[s] = n, event.op
                self._count(s, n)
                self.padding += self.round(n) - n
                self.note(event.phase, event.op, 0)
            case "free":
                self._count(s, -n)
                self.padding -= self.round(n) - n
                del self.sizes[s]
            case "save" | "release" if s in self.sizes:
                self._count(s, -self.sizes[s])
                self.held[s] += 1 if event.kind == "save" else -1
                self._count(s, self.sizes[s])

    def _count(self, storage: int, nbytes: int) -> None:
        if storage in self.gradient_ids:
            self.gradients += nbytes
        elif self.held[storage]:
            self.saved += nbytes
        else:
            self.other += nbytes

    def end_forward(self) -> None:
        """What autograd holds now is what forward leaves."""
        if self.phase == "forward":
            self.phase = "backward"
            for s, n in self.sizes.items():
                if self.held[s]:
                    self.kept[self.makers[s]] = self.kept.get(self.makers[s], 0) + n

    def note(self, phase: str, op: str, extra: int) -> None:
        """Keeps a moment if it is the largest of its op so far."""
        total = self.start.total + self.gradients + self.saved + self.other + extra
        if total + self.padding > self.peak:
            self.peak, self.padding_at_peak = total + self.padding, self.padding
        known = self.largest.get((phase, op))
        if known is None or total > known.total:
            self.largest[phase, op] = dataclasses.replace(
                self.start, phase=phase, op=op, gradients=self.gradients, saved=self.saved,
                temporaries=self.other + extra,
            )  # fmt: skip

    def timeline(self) -> tuple[Moment, ...]:
        return tuple(self.largest.values())
