"""`cost_table`: per op flops, bytes, seconds on one device, and what its results keep alive for backward.

Bytes are those an op of its own moves: every distinct operand read and every result written. Backward reads the
gradients of the results and what was saved and writes the gradients of the operands; a value that several ops read has
its gradients summed, which is charged to all of these ops but one. Views move nothing forward; backward, those that cut
or repeat (split, slice, expand) write the whole gradient.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autoplan.errors import AutoplanError
from autoplan.hardware import ClusterSpec, Device
from autoplan.ir import Op, OpGraph
from autoplan.profiler.flops import backward_flops, dtype_of, forward_flops, needs_backward, unknown_ops
from autoplan.profiler.layout import Layout, layouts
from autoplan.profiler.seconds import kernel_s, rate_key
from autoplan.rules import FactorTable, OpRule, rule_of

FORMAT = 1
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
        forward_flops: Operations forward.
        backward_flops: Operations backward.
        forward_bytes: Bytes read and written forward.
        backward_bytes: Likewise backward.
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
    forward_bytes: int
    backward_bytes: int
    forward_s: float
    backward_s: float
    saved_bytes: int
    is_view: bool

    def to_json(self) -> list[Any]:
        """Fields in order."""
        return list(dataclasses.astuple(self))

    @classmethod
    def from_json(cls, data: list[Any]) -> OpCost:
        """Inverse of `to_json`."""
        return cls(*data)


@dataclass(frozen=True)
class CostTable:
    """Costs of all ops of a graph on one device, in program order.

    Attributes:
        device: Name of the device.
        nodes: One entry per op.
        unknown_ops: Ops whose flops no table knows (counted as 0): target -> count.
    """

    device: str
    nodes: tuple[OpCost, ...]
    unknown_ops: Mapping[str, int] = field(default_factory=dict)

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
            "unknown_ops": dict(self.unknown_ops),
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
        return cls(data["device"], tuple(map(OpCost.from_json, data["nodes"])), dict(data["unknown_ops"]))

    def __str__(self) -> str:
        lines = [f"costs on {self.device}: forward GFLOP, backward GFLOP, forward us, backward us, saved MB"]
        lines += [
            f"{n.forward_flops / 1e9:10.4f} {n.backward_flops / 1e9:10.4f} {n.forward_s * 1e6:9.1f} "
            f"{n.backward_s * 1e6:9.1f} {n.saved_bytes / 1e6:9.3f}  {n.key}"
            for n in self.nodes
        ]
        return "\n".join(lines)


def cost_table(graph: OpGraph, where: ClusterSpec | Device, *, rules: FactorTable | None = None) -> CostTable:
    """Prices every op of a graph, whole, on one device.

    Args:
        graph: Forward graph.
        where: A device, or the cluster it belongs to.
        rules: Analysed factors, where they are at hand, so that rules need not be applied again.

    Raises:
        ProfileError: The device does not list a dtype that the graph computes in.
    """
    device = where.device if isinstance(where, ClusterSpec) else where
    applied = dict(rules.rules) if rules is not None else {op.key: rule_of(op, graph) for op in graph.ops}
    lie = layouts(graph, applied)
    saved = saved_by_storage(graph, applied, lie)
    last = _last_readers(graph)
    nodes = tuple(_cost(op, graph, device, applied[op.key], lie, saved, last) for op in graph.ops)
    return CostTable(device.name, nodes, unknown_ops(graph))


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
) -> OpCost:
    is_view = all(lie[o].storage != o for o in op.outputs)
    forward, backward = forward_flops(op, graph), backward_flops(op, graph)
    forward_bytes = 0 if is_view else _forward_bytes(op, graph)
    backward_bytes, launches = _backward_bytes(op, graph, rule, is_view, last)
    dtype = dtype_of(op, graph)
    keeps = rule.hidden_bytes if needs_backward(op, graph) else 0
    rates = dict(device.op_flops_per_s).get(rate_key(op, graph), (None, None))
    made = () if is_view else [keeps, *(graph.values[o].nbytes for o in op.outputs)]
    gradients = (
        [keeps, *(graph.values[v].nbytes for v in op.inputs if graph.values[v].requires_grad)] if launches else ()
    )
    return OpCost(
        key=op.key,
        op=op.name,
        module=op.module,
        forward_flops=forward,
        backward_flops=backward,
        forward_bytes=forward_bytes,
        backward_bytes=backward_bytes,
        forward_s=kernel_s(
            device,
            flops=forward,
            bytes_=forward_bytes,
            dtype=dtype,
            launches=int(not is_view),
            views=int(is_view),
            rate=rates[0],
            new_bytes=made,
        ),
        backward_s=kernel_s(
            device,
            flops=backward,
            bytes_=backward_bytes,
            dtype=dtype,
            launches=launches,
            views=int(is_view and needs_backward(op, graph)),
            rate=rates[1],
            new_bytes=gradients,
        ),
        saved_bytes=keeps + sum(graph.values[o].nbytes for o in op.outputs if o in saved),
        is_view=is_view,
    )


def _forward_bytes(op: Op, graph: OpGraph) -> int:
    written = sum(graph.values[o].nbytes for o in op.outputs)
    if op.name in _GATHERS:  # reads the rows it copies, not the whole table
        return 2 * written + sum(graph.values[v].nbytes for v in op.inputs if not graph.values[v].is_float)
    return written + sum(graph.values[v].nbytes for v in op.inputs)


def _backward_bytes(op: Op, graph: OpGraph, rule: OpRule, is_view: bool, last: Mapping[str, str]) -> tuple[int, int]:
    """Bytes moved backward, and kernels started."""
    if not needs_backward(op, graph):
        return 0, 0
    specs = graph.values
    to = [v for v in op.inputs if specs[v].requires_grad]
    sums = [v for v in to if last[v] != op.key]
    extra = 3 * sum(specs[v].nbytes for v in sums)
    given = sum(specs[o].nbytes for o in op.outputs if specs[o].requires_grad)
    if is_view and op.name not in CUTS:
        return extra, len(sums)
    if op.name in PASSES_GRADIENT:  # only a broadcast operand has something to do: sum its gradient
        full = max(specs[o].numel for o in op.outputs)
        broadcast = [v for v in to if specs[v].numel < full]
        return extra + len(broadcast) * given + sum(specs[v].nbytes for v in broadcast), len(sums) + len(broadcast)
    read = given + rule.hidden_bytes + sum(specs[v].nbytes for v in saved_values(op, rule))
    write = sum(specs[v].nbytes for v in to)
    products = max(1, len(to)) if op.name in ("linear", "addmm", "matmul", "bmm", "mm", "einsum") else 1
    return extra + read + write, len(sums) + products
