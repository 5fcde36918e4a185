"""`cost_table`: per op flops, bytes, seconds on one device, and what its results keep alive for backward.

Bytes are those an op of its own moves: every distinct operand read and every result written. Backward reads the
gradients of the results and what was saved and writes the gradients of the operands; a value that several ops read has
its gradients summed, which is charged to all of these ops but one. Views move nothing forward; backward, those that cut
or repeat (split, slice, expand) write the whole gradient.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autoplan.errors import AutoplanError
from autoplan.hardware import ClusterSpec, Device
from autoplan.ir import Op, OpGraph, TensorSpec
from autoplan.profiler.flops import Causal, Work, dtype_of, needs_backward, work
from autoplan.profiler.layout import Layout, layouts
from autoplan.profiler.seconds import kernel_s, rate_key
from autoplan.rules import FactorTable, OpRule, rule_of

FORMAT = 2
_GATHERS = frozenset({"embedding", "gather", "index", "index_select"})
PASSES_GRADIENT = frozenset({"add", "contiguous", "clone", "detach", "alias"})
"""Ops whose gradient is that of their full-size operands as it is."""
CUTS = frozenset({"split", "split_with_sizes", "chunk", "unbind", "slice", "narrow", "select", "expand"})
"""Views whose backward writes a new tensor."""


@dataclass(frozen=True)
class OpCost:
    """What one op costs.

    Attributes:
        key: `Op.key`.
        op: Name of the op.
        module: Path of its module.
        forward_flops: Flops of tensor products forward, a multiply-add counting 2.
        backward_flops: Likewise backward.
        forward_elementwise: All other operations forward.
        backward_elementwise: Likewise backward.
        forward_read_bytes: Bytes read forward; an expanded operand is read once.
        forward_written_bytes: Bytes written forward.
        backward_read_bytes: Bytes read backward.
        backward_written_bytes: Bytes written backward.
        forward_s: Seconds forward.
        backward_s: Seconds backward.
        saved_bytes: Bytes that this op allocated and backward needs, each storage once, whoever saves it.
        is_view: Whether it shares memory with its operand.
    """

    key: str
    op: str
    module: str
    forward_flops: int
    backward_flops: int
    forward_elementwise: int
    backward_elementwise: int
    forward_read_bytes: int
    forward_written_bytes: int
    backward_read_bytes: int
    backward_written_bytes: int
    forward_s: float
    backward_s: float
    saved_bytes: int
    is_view: bool

    @property
    def forward_bytes(self) -> int:
        """Bytes moved forward."""
        return self.forward_read_bytes + self.forward_written_bytes

    @property
    def backward_bytes(self) -> int:
        """Bytes moved backward."""
        return self.backward_read_bytes + self.backward_written_bytes

    @property
    def seconds(self) -> float:
        """Forward and backward."""
        return self.forward_s + self.backward_s

    @property
    def intensity(self) -> float:
        """Arithmetic intensity: operations of both passes per byte moved."""
        done = self.forward_flops + self.backward_flops + self.forward_elementwise + self.backward_elementwise
        moved = self.forward_bytes + self.backward_bytes
        return done / moved if moved else 0.0

    def to_json(self) -> list[Any]:
        """Fields in order."""
        return list(dataclasses.astuple(self))

    @classmethod
    def from_json(cls, data: list[Any]) -> OpCost:
        """Inverse of `to_json`."""
        return cls(*data)


@dataclass(frozen=True)
class UnknownOp:
    """Ops of one target whose flops no table knows.

    Attributes:
        count: How many there are.
        bytes_share: Their part of all bytes moved.
        time_share: Their part of the seconds of all ops; these count their bytes only.
    """

    count: int
    bytes_share: float
    time_share: float


@dataclass(frozen=True)
class CostTable:
    """Costs of all ops of a graph on one device, in program order.

    Attributes:
        device: Name of the device.
        nodes: One entry per op.
        unknown_ops: Ops whose flops no table knows (counted as 0), by target.
    """

    device: str
    nodes: tuple[OpCost, ...]
    unknown_ops: Mapping[str, UnknownOp] = field(default_factory=dict)

    @property
    def forward_flops(self) -> int:
        """Sum over all ops."""
        return sum(n.forward_flops for n in self.nodes)

    @property
    def backward_flops(self) -> int:
        """Sum over all ops."""
        return sum(n.backward_flops for n in self.nodes)

    @property
    def forward_s(self) -> float:
        """Seconds forward, op after op."""
        return sum(n.forward_s for n in self.nodes)

    @property
    def backward_s(self) -> float:
        """Seconds backward, op after op."""
        return sum(n.backward_s for n in self.nodes)

    @property
    def saved_bytes(self) -> int:
        """Bytes kept from forward to backward."""
        return sum(n.saved_bytes for n in self.nodes)

    def to_json(self) -> dict[str, Any]:
        """Versioned JSON; one list per op, its columns named once."""
        columns = [f.name for f in dataclasses.fields(OpCost)]
        nodes = [n.to_json() for n in self.nodes]
        return {
            "format": FORMAT,
            "device": self.device,
            "unknown_ops": {k: dataclasses.astuple(u) for k, u in self.unknown_ops.items()},
            "columns": columns,
            "nodes": nodes,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CostTable:
        """Inverse of `to_json`.

        Raises:
            AutoplanError: Another format version.
        """
        if data.get("format") != FORMAT:
            raise AutoplanError(f"cost table format {data.get('format')!r} is not {FORMAT}")
        unknown = {k: UnknownOp(*u) for k, u in data["unknown_ops"].items()}
        return cls(data["device"], tuple(map(OpCost.from_json, data["nodes"])), unknown)

    def __str__(self) -> str:
        lines = [f"costs on {self.device}: forward GFLOP, backward GFLOP, forward us, backward us, saved MB"]
        lines += [
            f"{n.forward_flops / 1e9:10.4f} {n.backward_flops / 1e9:10.4f} {n.forward_s * 1e6:9.1f} "
            f"{n.backward_s * 1e6:9.1f} {n.saved_bytes / 1e6:9.3f}  {n.key}"
            for n in self.nodes
        ]
        return "\n".join(lines)


def cost_table(
    graph: OpGraph, where: ClusterSpec | Device, *, rules: FactorTable | None = None, causal: Causal = "full"
) -> CostTable:
    """Prices every op of a graph, whole, on one device.

    Args:
        graph: Forward graph.
        where: A device, or the cluster it belongs to.
        rules: Analysed factors, where they are at hand, so that rules need not be applied again.
        causal: Whether causal attention counts in full or by half.

    Raises:
        ProfileError: The device does not list a dtype that the graph computes in.
    """
    device = where.device if isinstance(where, ClusterSpec) else where
    applied = dict(rules.rules) if rules is not None else {op.key: rule_of(op, graph) for op in graph.ops}
    lie = layouts(graph, applied)
    saved = saved_by_storage(graph, applied, lie)
    last = _last_readers(graph)
    counted = {op.key: work(op, graph, causal=causal) for op in graph.ops}
    nodes = tuple(_cost(op, graph, device, applied[op.key], lie, saved, last, counted[op.key]) for op in graph.ops)
    lost = [(op.target, n) for op, n in zip(graph.ops, nodes, strict=True) if counted[op.key] is None]
    return CostTable(device.name, nodes, _shares(lost, nodes))


def _shares(lost: Sequence[tuple[str, OpCost]], nodes: Sequence[OpCost]) -> Mapping[str, UnknownOp]:
    moved = sum(n.forward_bytes + n.backward_bytes for n in nodes) or 1
    seconds = sum(n.seconds for n in nodes) or 1.0
    groups: dict[str, list[OpCost]] = {}
    for target, n in lost:
        groups.setdefault(target, []).append(n)
    return {
        target: UnknownOp(
            len(ns),
            sum(n.forward_bytes + n.backward_bytes for n in ns) / moved,
            sum(n.seconds for n in ns) / seconds,
        )
        for target, ns in groups.items()
    }


def saved_by_storage(
    graph: OpGraph, rules: Mapping[str, OpRule], lie: Mapping[str, Layout]
) -> Mapping[str, tuple[str, ...]]:
    """Storages that backward needs: value that owns it -> keys of the ops whose backward reads it.

    What the graph is given (parameters, buffers, the batch) is not listed: it lives anyhow.
    """
    out: dict[str, list[str]] = {}
    for op in graph.ops:
        if not needs_backward(op, graph):
            continue
        for value in saved_values(op, rules[op.key]):
            storage = lie[value].storage
            if storage not in graph.input_of and op.key not in (keys := out.setdefault(storage, [])):
                keys.append(op.key)
    return {s: tuple(keys) for s, keys in out.items()}


def saved_values(op: Op, rule: OpRule) -> tuple[str, ...]:
    """Values that the backward of one op reads."""
    operands = [op.inputs[i] for i in rule.saved_operands if i < len(op.inputs)]
    results = [op.outputs[i] for i in rule.saved_results if i < len(op.outputs)]
    return tuple(dict.fromkeys((*operands, *results)))


def _last_readers(graph: OpGraph) -> Mapping[str, str]:
    """Value -> key of its last reader that sends it a gradient; that one's gradient needs no addition."""
    return {
        v: op.key for op in graph.ops if needs_backward(op, graph) for v in op.inputs if graph.values[v].requires_grad
    }


def _cost(
    op: Op,
    graph: OpGraph,
    device: Device,
    rule: OpRule,
    lie: Mapping[str, Layout],
    saved: Mapping[str, tuple[str, ...]],
    last: Mapping[str, str],
    counted: Work | None,
) -> OpCost:
    is_view = all(lie[o].storage != o for o in op.outputs)
    done = counted or Work()
    keeps = rule.hidden_bytes if needs_backward(op, graph) else 0
    ahead = (0, 0) if is_view else _forward_bytes(op, graph, lie, keeps)
    back, launches = _backward_bytes(op, graph, rule, is_view, last)
    dtype = dtype_of(op, graph)
    rates = dict(device.op_flops_per_s).get(rate_key(op, graph), (None, None))
    made = () if is_view else [keeps, *(graph.values[o].nbytes for o in op.outputs)]
    gradients = (
        [keeps, *(graph.values[v].nbytes for v in op.inputs if graph.values[v].requires_grad)] if launches else ()
    )
    return OpCost(
        key=op.key,
        op=op.name,
        module=op.module,
        forward_flops=done.forward_flops,
        backward_flops=done.backward_flops,
        forward_elementwise=done.forward_elementwise,
        backward_elementwise=done.backward_elementwise,
        forward_read_bytes=ahead[0],
        forward_written_bytes=ahead[1],
        backward_read_bytes=back[0],
        backward_written_bytes=back[1],
        forward_s=kernel_s(
            device,
            flops=done.forward_flops + done.forward_elementwise,
            bytes_=sum(ahead),
            dtype=dtype,
            launches=int(not is_view),
            views=int(is_view),
            rate=rates[0],
            new_bytes=made,
        ),
        backward_s=kernel_s(
            device,
            flops=done.backward_flops + done.backward_elementwise,
            bytes_=sum(back),
            dtype=dtype,
            launches=launches,
            views=int(is_view and needs_backward(op, graph)),
            rate=rates[1],
            new_bytes=gradients,
        ),
        saved_bytes=keeps + sum(graph.values[o].nbytes for o in op.outputs if o in saved),
        is_view=is_view,
    )


def _forward_bytes(op: Op, graph: OpGraph, lie: Mapping[str, Layout], keeps: int) -> tuple[int, int]:
    """Bytes read and written; `keeps` are statistics or masks that are written for backward."""
    written = sum(graph.values[o].nbytes for o in op.outputs)
    if op.name in _GATHERS:  # reads the rows it copies, not the whole table
        return written + sum(graph.values[v].nbytes for v in op.inputs if not graph.values[v].is_float), written
    return sum(_distinct_bytes(graph.values[v], lie[v]) for v in op.inputs), written + keeps


def _distinct_bytes(spec: TensorSpec, layout: Layout) -> int:
    """Bytes of a value, dims that are only repeated (stride 0) counted once."""
    repeated = math.prod(n for n, s in zip(spec.shape, layout.strides, strict=True) if s == 0 and n > 0)
    return spec.nbytes // repeated


def _backward_bytes(
    op: Op, graph: OpGraph, rule: OpRule, is_view: bool, last: Mapping[str, str]
) -> tuple[tuple[int, int], int]:
    """Bytes read and written backward, and kernels started."""
    if not needs_backward(op, graph):
        return (0, 0), 0
    specs = graph.values
    to = [v for v in op.inputs if specs[v].requires_grad]
    sums = [v for v in to if last[v] != op.key]
    more = sum(specs[v].nbytes for v in sums)  # a sum reads two gradients and writes one
    given = sum(specs[o].nbytes for o in op.outputs if specs[o].requires_grad)
    if is_view and op.name not in CUTS:
        return (2 * more, more), len(sums)
    if op.name in PASSES_GRADIENT:  # only a broadcast operand has something to do: sum its gradient
        full = max(specs[o].numel for o in op.outputs)
        broadcast = [v for v in to if specs[v].numel < full]
        written = sum(specs[v].nbytes for v in broadcast)
        return (2 * more + len(broadcast) * given, more + written), len(sums) + len(broadcast)
    read = given + rule.hidden_bytes + sum(specs[v].nbytes for v in saved_values(op, rule))
    write = sum(specs[v].nbytes for v in to)
    products = max(1, len(to)) if op.name in ("linear", "addmm", "matmul", "bmm", "mm", "einsum") else 1
    return (2 * more + read, more + write), len(sums) + products
