"""Peak memory of an eager training step on one device, estimated from the forward graph.

Storages are counted, L(i) those alive while op i runs and w(i) what its kernel holds meanwhile::

    peak = static + max over i of ( Σ_{s ∈ L(i)} bytes(s) + w(i) )                                             (1)

over the ops in program order, then their backward in reverse order, then the optimizer's update. `static` is
parameters, buffers, the batch and the optimizer's state. A value dies at its last use unless backward needs it or it
is an output of the model; outputs other than the loss die when forward returns. Backward frees what an op saved once
that op is done, passes gradients through views and sums without a copy, adds in place where nobody else holds the
gradient, and keeps gradients of parameters, which are None at first. `_Step` evaluates (1).

What emitted programs need is simulated exactly by codegen on the emitted graphs; this estimate is for models as they
are, before any plan.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autoplan.ir import Op, OpGraph
from autoplan.ir.plan import OPTIMIZERS
from autoplan.profiler.cost import CUTS, PASSES_GRADIENT, saved_by_storage, saved_values
from autoplan.profiler.flops import needs_backward
from autoplan.profiler.layout import layouts
from autoplan.rules import OpRule, rule_of

_WORKSPACE = {"cross_entropy_loss": 1, "pow": 2, "logsumexp": 2, "div": 1}
"""Temporaries of backward in tensors of the first operand's size."""


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
        parameter_bytes: Parameters, ties counted once.
        gradient_bytes: Gradients of those that are trained.
        optimizer_bytes: Optimizer state.
        input_bytes: Buffers and the batch.
        saved_bytes: What forward leaves for backward.
        forward_peak_bytes: Peak of the forward pass.
        backward_peak_bytes: Peak of the backward pass.
        update_peak_bytes: Peak of the optimizer's update.
    """

    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    input_bytes: int
    saved_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    update_peak_bytes: int

    @property
    def peak_bytes(self) -> int:
        """Peak of the whole step."""
        return max(self.forward_peak_bytes, self.backward_peak_bytes, self.update_peak_bytes)


def memory(graph: OpGraph, *, optimizer: str = "adamw") -> Memory:
    """Estimates the memory of an eager step, equation (1).

    Args:
        graph: Forward graph.
        optimizer: Name in `autoplan.ir.plan.OPTIMIZERS`.
    """
    given = {kind: [graph.values[i.value] for i in graph.inputs if i.kind == kind] for kind in _KINDS}
    trained = [s.nbytes for s in given["parameter"] if s.requires_grad]
    states = OPTIMIZERS[optimizer]
    parameters = sum(s.nbytes for s in given["parameter"])
    inputs = sum(s.nbytes for kind in ("buffer", "input") for s in given[kind])
    static = parameters + inputs + states * sum(trained)
    step = _Step(graph, static)
    step.forward()
    saved = step.total - static - step.output_bytes()
    forward_peak, step.peak = step.peak, 0
    step.leave_forward()
    step.backward()
    # the update runs parameter after parameter; AdamW holds a denominator in two versions meanwhile
    update = static + sum(trained) + (2 * max(trained, default=0) if states > 1 else 0)
    return Memory(parameters, sum(trained), states * sum(trained), inputs, saved, forward_peak, step.peak, update)


_KINDS = ("parameter", "buffer", "input")


class _Step:
    """Live storages; each name or saved reference that holds one counts."""

    def __init__(self, graph: OpGraph, static: int) -> None:
        self.graph = graph
        self.rules: dict[str, OpRule] = {op.key: rule_of(op, graph) for op in graph.ops}
        self.lie = layouts(graph, self.rules)
        self.saved = saved_by_storage(graph, self.rules, self.lie)
        self.sizes: dict[int | str, int] = {i.value: 0 for i in graph.inputs}  # in `static` already
        self.held: Counter[int | str] = Counter()
        self.total = self.peak = static
        self.fresh = 0
        self.grads: dict[str, int | str] = {}
        self.hidden: dict[str, int | str] = {}

    def new(self, nbytes: int) -> int:
        """A storage that one name holds."""
        self.fresh += 1
        self.sizes[self.fresh] = nbytes
        self.hold(self.fresh)
        return self.fresh

    def hold(self, storage: int | str) -> None:
        self.held[storage] += 1
        if self.held[storage] == 1:
            self.total += self.sizes[storage]

    def drop(self, storage: int | str) -> None:
        self.held[storage] -= 1
        if not self.held[storage]:
            self.total -= self.sizes[storage]

    def mark(self, extra: int = 0) -> None:
        self.peak = max(self.peak, self.total + extra)

    def forward(self) -> None:
        """Runs all ops; what is saved and what is returned stays."""
        dies = self._last_uses()
        for op in self.graph.ops:
            for o in op.outputs:
                storage = self.lie[o].storage
                self.sizes.setdefault(storage, self.graph.values[storage].nbytes)
                self.hold(storage)
            if needs_backward(op, self.graph) and (n := self.rules[op.key].hidden_bytes):
                self.hidden[op.key] = self.new(n)
            for storage in self._saves(op):
                self.hold(storage)
            self.mark()
            for v in dies.get(op.key, ()):
                self.drop(self.lie[v].storage)

    def _last_uses(self) -> Mapping[str, list[str]]:
        """Op -> values whose last use it is; outputs of the model stay."""
        last: dict[str, str] = {}
        for op in self.graph.ops:
            last.update({v: op.key for v in (*op.outputs, *op.inputs) if v not in self.graph.input_of})
        out: dict[str, list[str]] = {}
        for v, key in last.items():
            if v not in self.graph.outputs:
                out.setdefault(key, []).append(v)
        return out

    def _saves(self, op: Op) -> list[str]:
        """Storages that the backward of an op holds."""
        if not needs_backward(op, self.graph):
            return []
        return list(dict.fromkeys(self.lie[v].storage for v in saved_values(op, self.rules[op.key])))

    def output_bytes(self) -> int:
        """Bytes that only the model's outputs hold after forward."""
        names = Counter(self.lie[o].storage for o in dict.fromkeys(self.graph.outputs) if o not in self.graph.input_of)
        return sum(self.sizes[s] for s, n in names.items() if self.held[s] == n)

    def leave_forward(self) -> None:
        """The caller keeps the loss alone."""
        loss = None if self.graph.loss is None else self.graph.outputs[self.graph.loss]
        for o in dict.fromkeys(self.graph.outputs):
            if o != loss and o not in self.graph.input_of:
                self.drop(self.lie[o].storage)

    def backward(self) -> None:
        """Runs the backward of all ops in reverse order."""
        tracked = [o for o in self.graph.outputs if self.graph.values[o].requires_grad]
        start = tracked if self.graph.loss is None else [self.graph.outputs[self.graph.loss]]
        for o in start:
            if o not in self.grads:
                self.grads[o] = self.new(self.graph.values[o].nbytes)
        for op in reversed(self.graph.ops):
            given = [o for o in op.outputs if o in self.grads]
            if given:
                self._differentiate(op, given)
                for o in given:
                    self.drop(self.grads.pop(o))
            for storage in self._saves(op):
                self.drop(storage)
            if op.key in self.hidden:
                self.drop(self.hidden.pop(op.key))

    def _differentiate(self, op: Op, given: list[str]) -> None:
        """Gradients of the operands of one op."""
        values = self.graph.values
        through = self.grads[given[0]]
        passes = op.name in PASSES_GRADIENT or (self._is_view(op) and op.name not in CUTS)
        full = max(values[o].numel for o in op.outputs)
        workspace = _WORKSPACE.get(op.name, 0) * values[op.inputs[0]].nbytes if op.inputs else 0
        pointwise = self.rules[op.key].pointwise
        made: list[tuple[str, int | str]] = []
        for v in op.inputs:
            spec = values[v]
            if not spec.requires_grad:
                continue
            same = spec.numel == full and spec.dtype == values[op.outputs[0]].dtype
            if passes and same and v not in self.graph.input_of:
                self.hold(through)
                made.append((v, through))
            else:
                made.append((v, self.new(spec.nbytes)))
                if pointwise and spec.numel < full:  # the product with the gradient, before it is summed
                    workspace = max(workspace, values[op.outputs[0]].nbytes)
        self.mark(workspace)
        for v, storage in made:
            self._accumulate(v, storage)

    def _is_view(self, op: Op) -> bool:
        return all(self.lie[o].storage != o for o in op.outputs)

    def _accumulate(self, value: str, storage: int | str) -> None:
        """Adds a gradient to what is there: in place where nobody else holds that, else into a new tensor."""
        before = self.grads.get(value)
        if before is None:
            self.grads[value] = storage
            return
        self.mark()
        if self.held[before] > 1:
            self.grads[value] = self.new(self.graph.values[value].nbytes)
            self.mark()
            self.drop(before)
        self.drop(storage)
