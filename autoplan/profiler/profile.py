"""`make_profile`: what one training step of a model costs on one device of a cluster, before any plan."""

from __future__ import annotations

import csv
import dataclasses
import io
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from autoplan.errors import AutoplanError
from autoplan.hardware import ClusterSpec, Device, op_s
from autoplan.ir import OpGraph, StepEvents
from autoplan.ir.plan import OPTIMIZERS
from autoplan.profiler.cost import OpCost, UnknownOp, cost_table
from autoplan.profiler.events import chrome_trace
from autoplan.profiler.flops import Causal
from autoplan.profiler.memory import TIMELINE_PHASES, Moment, memory
from autoplan.rules import FactorTable

FORMAT = 4
CACHING_BLOCK_BYTES = 512
"""Block of torch's caching allocator on accelerators; where that allocates, torch's optimizers default to foreach."""
_CONVOLUTIONS = (*(f"conv{t}{d}d" for t in ("", "_transpose") for d in (1, 2, 3)), "convolution", "_convolution")
_OWN_SCRATCH = frozenset({*_CONVOLUTIONS, "lstm"})
"""Ops whose kernels take scratch memory in sizes that only the kernel library knows: oneDNN and cuDNN choose a layout
and an algorithm by shape and processor, and lay operands and results out anew for it."""
_TABLES: dict[str, type[OpCost] | type[Moment]] = {"nodes": OpCost, "timeline": Moment}
"""Fields that are lists of records: in JSON, their columns are named once."""


@dataclass(frozen=True)
class Group:
    """Sum over some ops.

    Attributes:
        name: Module path or op name.
        count: Ops in it.
        forward_flops: Flops of tensor products forward (a multiply-add counts 2).
        backward_flops: Likewise backward.
        forward_s: Seconds forward.
        backward_s: Seconds backward.
        saved_bytes: Bytes kept for backward.
        forward_bytes: Bytes read and written forward.
        backward_bytes: Likewise backward.
    """

    name: str
    count: int
    forward_flops: int
    backward_flops: int
    forward_s: float
    backward_s: float
    saved_bytes: int
    forward_bytes: int
    backward_bytes: int


@dataclass(frozen=True)
class Phase:
    """One of the three phases of a step.

    Attributes:
        name: ``forward``, ``backward`` or ``optimizer``.
        flops: Flops of tensor products.
        read_bytes: Bytes read.
        written_bytes: Bytes written.
        seconds: Seconds.
        peak_bytes: Most memory while it runs, 0 where it does nothing.
    """

    name: str
    flops: int
    read_bytes: int
    written_bytes: int
    seconds: float
    peak_bytes: int


@dataclass(frozen=True)
class Profile:
    """One step of a whole model on one device, op after op as eager execution runs it; an estimate.

    Attributes:
        model: Name of the model.
        cluster: Name of the cluster.
        device: Name of its device.
        forward_flops: Flops of tensor products forward (a multiply-add counts 2).
        backward_flops: Likewise backward.
        parameter_bytes: Parameters, ties once, frozen ones and those that no op reads included.
        gradient_bytes: Gradients.
        optimizer_bytes: Optimizer state.
        input_bytes: Buffers and the batch.
        saved_activation_bytes: What forward leaves for backward, each storage once.
        peak_bytes: ``forward``, ``backward`` and ``step`` (which includes the optimizer's update) -> peak.
        step_time_s: Forward, backward and the optimizer's update.
        optimizer_s: The update alone.
        memory_bytes: What tensors can use on the device.
        nodes: Cost of every op.
        unknown_ops: Ops whose flops are not known, counted as 0, by target, with count and shares.
        uncounted_scratch: Ops whose kernels take scratch memory that the peaks leave out, since it depends on the
            kernel library: name -> count.
        notes: What a reader should know.
        timeline: What is alive, moment after moment; its maxima per phase are `peak_bytes`.
        allocator_bytes: What the device's allocator adds to the peak of the step by rounding sizes up.
        reserved_bytes: What the device keeps beside tensors (context, fragmentation), not part of `memory_bytes`.
        causal_flops: Whether causal attention counts in full or by half.
    """

    model: str
    cluster: str
    device: str
    forward_flops: int
    backward_flops: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    input_bytes: int
    saved_activation_bytes: int
    peak_bytes: Mapping[str, int]
    step_time_s: float
    optimizer_s: float
    memory_bytes: int
    nodes: tuple[OpCost, ...]
    unknown_ops: Mapping[str, UnknownOp] = field(default_factory=dict)
    uncounted_scratch: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    timeline: tuple[Moment, ...] = ()
    allocator_bytes: int = 0
    reserved_bytes: int = 0
    causal_flops: Causal = "full"

    def by_module(self, depth: int | None = None) -> tuple[Group, ...]:
        """Sums per module, in order of first use.

        Args:
            depth: Leading parts of module paths to keep; None keeps them whole.
        """
        return _groups(self.nodes, lambda n: ".".join(n.module.split(".")[:depth]) if n.module else "")

    def by_op(self) -> tuple[Group, ...]:
        """Sums per op name, slowest first."""
        return tuple(sorted(_groups(self.nodes, lambda n: n.op), key=lambda g: -(g.forward_s + g.backward_s)))

    def by_phase(self) -> tuple[Phase, ...]:
        """Forward, backward and the optimizer's update, which reads and writes what is trained and its state."""
        peaks = {p: max((m.total for m in self.timeline if m.phase == p), default=0) for p in TIMELINE_PHASES}
        kept = self.gradient_bytes + self.optimizer_bytes if self.optimizer_s else 0
        read = kept + self.gradient_bytes if self.optimizer_s else 0
        return (
            Phase(
                "forward",
                self.forward_flops,
                sum(n.forward_read_bytes for n in self.nodes),
                sum(n.forward_written_bytes for n in self.nodes),
                sum(n.forward_s for n in self.nodes),
                peaks["forward"],
            ),
            Phase(
                "backward",
                self.backward_flops,
                sum(n.backward_read_bytes for n in self.nodes),
                sum(n.backward_written_bytes for n in self.nodes),
                sum(n.backward_s for n in self.nodes),
                peaks["backward"],
            ),
            Phase("optimizer", 0, read, kept, self.optimizer_s, peaks["step"]),
        )

    def to_csv(self) -> str:
        """All nodes as CSV: a header, then one line per op in program order."""
        names = [f.name for f in dataclasses.fields(OpCost)]
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow([*names, "flops_per_byte"])
        writer.writerows([*(getattr(n, name) for name in names), n.intensity] for n in self.nodes)
        return out.getvalue()

    def to_chrome_trace(self) -> dict[str, Any]:
        """The step as trace events, which Perfetto and chrome://tracing open; see `autoplan.profiler.events`."""
        return chrome_trace(self.model, self.nodes, self.timeline, self.optimizer_s)

    def to_json(self) -> dict[str, Any]:
        """Versioned JSON."""
        out: dict[str, Any] = {"format": FORMAT}
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if f.name in _TABLES:
                columns = [c.name for c in dataclasses.fields(_TABLES[f.name])]
                value = {"columns": columns, "rows": [row.to_json() for row in value]}
            if f.name == "unknown_ops":
                value = {target: dataclasses.asdict(u) for target, u in value.items()}
            out[f.name] = dict(value) if isinstance(value, Mapping) else list(value) if f.name == "notes" else value
        return out

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Profile:
        """Inverse of `to_json`.

        Raises:
            AutoplanError: Another format version, or fields that are missing.
        """
        if data.get("format") != FORMAT:
            raise AutoplanError(f"profile format {data.get('format')!r} is not {FORMAT}")
        try:
            given = {f.name: data[f.name] for f in dataclasses.fields(cls)}
        except KeyError as e:
            raise AutoplanError(f"malformed profile: {e} is missing") from e
        tables = {name: tuple(map(row.from_json, given[name]["rows"])) for name, row in _TABLES.items()}
        unknown = {target: UnknownOp(**u) for target, u in given["unknown_ops"].items()}
        return cls(**{**given, **tables, "notes": tuple(given["notes"]), "unknown_ops": unknown})

    def _repr_html_(self) -> str:
        from autoplan.display import profile_html  # display stands above this room; only for notebooks

        return profile_html(self)

    def __str__(self) -> str:
        mb = {
            k: f"{v / 1e6:,.2f}"
            for k, v in (
                ("parameters", self.parameter_bytes),
                ("saved", self.saved_activation_bytes),
                ("peak", self.peak_bytes["step"]),
                ("memory", self.memory_bytes),
            )
        }
        flops = f"{self.forward_flops / 1e9:,.3f} GFLOP forward, {self.backward_flops / 1e9:,.3f} backward"
        return (
            f"Profile of {self.model} on one {self.device} of {self.cluster}: {flops}, "
            f"{self.step_time_s * 1e3:,.2f} ms per step; parameters {mb['parameters']} MB, saved activations "
            f"{mb['saved']} MB, peak {mb['peak']} of {mb['memory']} MB"
        )


def make_profile(
    graph: OpGraph,
    cluster: ClusterSpec,
    events: StepEvents,
    *,
    idle_bytes: Mapping[str, Sequence[int]] = MappingProxyType({}),
    optimizer: str = "adamw",
    notes: Iterable[str] = (),
    rules: FactorTable | None = None,
    causal_flops: Causal = "full",
) -> Profile:
    """Profiles a traced model on one device of a cluster.

    Args:
        graph: Forward graph.
        cluster: Hardware.
        events: Forward and backward of the step in memory.
        idle_bytes: Sizes of parameters, buffers and inputs that the graph does not read, by `GraphInput.kind`.
        optimizer: Name in `autoplan.ir.plan.OPTIMIZERS`.
        notes: Passed on to the reader.
        rules: Analysed factors, where they are at hand.
        causal_flops: Whether causal attention counts in full or by half.
    """
    table = cost_table(graph, cluster, rules=rules, causal=causal_flops)
    device = cluster.device
    use = memory(
        graph, events, idle_bytes=idle_bytes, optimizer=optimizer, granularity_bytes=device.allocator_granularity_bytes,
        foreach=device.allocator_granularity_bytes >= CACHING_BLOCK_BYTES,
    )  # fmt: skip
    optimizer_s = update_s(graph, cluster.device, optimizer)
    nodes = tuple(dataclasses.replace(n, saved_bytes=use.saved_by_op.get(n.key, 0)) for n in table.nodes)
    return Profile(
        model=graph.name,
        cluster=cluster.name,
        device=cluster.device.name,
        forward_flops=table.forward_flops,
        backward_flops=table.backward_flops,
        parameter_bytes=use.parameter_bytes,
        gradient_bytes=use.gradient_bytes,
        optimizer_bytes=use.optimizer_bytes,
        input_bytes=use.input_bytes,
        saved_activation_bytes=use.saved_bytes,
        peak_bytes={"forward": use.peak("forward"), "backward": use.peak("backward"), "step": use.peak()},
        step_time_s=table.forward_s + table.backward_s + optimizer_s,
        optimizer_s=optimizer_s,
        memory_bytes=cluster.device.usable_bytes,
        nodes=nodes,
        unknown_ops=table.unknown_ops,
        uncounted_scratch=dict(Counter(op.name for op in graph.ops if op.name in _OWN_SCRATCH)),
        notes=tuple(notes),
        timeline=use.timeline,
        allocator_bytes=use.rounding_bytes,
        reserved_bytes=device.reserved_bytes,
        causal_flops=causal_flops,
    )


def update_s(graph: OpGraph, device: Device, optimizer: str) -> float:
    """Seconds of the optimizer's update: it reads parameter, gradient and state, and writes parameter and state."""
    if optimizer == "none":
        return 0.0
    moved = 3 + 2 * OPTIMIZERS[optimizer]
    given = [graph.values[i.value] for i in graph.inputs if i.kind == "parameter"]
    specs = [s for s in given if s.requires_grad]
    if device.update_s is None:
        return sum(op_s(device, flops=0, bytes_=moved * s.nbytes, dtype=s.dtype) for s in specs)
    share = moved / (3 + 2 * OPTIMIZERS["adamw"])  # other optimizers do that part of AdamW's work
    return share * sum(device.update_s.time_at(s.nbytes) for s in specs)


def _groups(nodes: Iterable[OpCost], name: Callable[[OpCost], str]) -> tuple[Group, ...]:
    found: dict[str, list[OpCost]] = {}
    for n in nodes:
        found.setdefault(name(n), []).append(n)
    return tuple(
        Group(
            key,
            len(ns),
            sum(n.forward_flops for n in ns),
            sum(n.backward_flops for n in ns),
            sum(n.forward_s for n in ns),
            sum(n.backward_s for n in ns),
            sum(n.saved_bytes for n in ns),
            sum(n.forward_bytes for n in ns),
            sum(n.backward_bytes for n in ns),
        )
        for key, ns in found.items()
    )
