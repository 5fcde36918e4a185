"""Seconds and bytes of what a cell or an edge does on one device of a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from autoplan.hardware import AxisGroup, ClusterSpec, axis_groups, collective_s, memory_s, op_s
from autoplan.ir import Mesh, Op, OpGraph
from autoplan.ir.plan import OPTIMIZERS
from autoplan.ir.tensor import DTYPE_BYTES
from autoplan.profiler.flops import dtype_of, operations
from autoplan.rules import FactorTable
from autoplan.rules.redistribute import Codes, direct_steps, local_numel

_FREE = {"slice", "mask"}


@dataclass
class Prices:
    """Prices of one graph on one mesh of one cluster; remembers what it has priced.

    Attributes:
        graph: The forward graph.
        table: Its factors and rules.
        cluster: Hardware.
        mesh: Device grid.
        optimizer: Name in `OPTIMIZERS`.
    """

    graph: OpGraph
    table: FactorTable
    cluster: ClusterSpec
    mesh: Mesh
    optimizer: str
    _groups: tuple[AxisGroup, ...] = field(init=False)
    _flops: dict[str, tuple[int, int]] = field(default_factory=dict)
    _ops: dict[tuple[int, int, str], float] = field(default_factory=dict)
    _collectives: dict[tuple[str, int, int], float] = field(default_factory=dict)
    _moves: dict[tuple[int, int, Codes, Codes], float | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._groups = axis_groups(self.mesh.shape)

    def local_bytes(self, value: str, codes: Codes) -> int:
        """Bytes of one device's piece."""
        spec = self.graph.values[value]
        return local_numel(spec.numel, codes, self.mesh.shape) * DTYPE_BYTES[spec.dtype]

    def state_bytes(self, value: str, codes: Codes) -> int:
        """Bytes of a parameter piece with its gradient and optimizer state."""
        spec = self.graph.values[value]
        copies = 2 + OPTIMIZERS[self.optimizer] if spec.requires_grad else 1
        return copies * self.local_bytes(value, codes)

    def update_time(self, value: str, codes: Codes) -> float:
        """Seconds of the optimizer's update of a parameter piece: read all, write all but the gradient."""
        if not self.graph.values[value].requires_grad or self.optimizer == "none":
            return 0.0
        passes = 3 + 2 * OPTIMIZERS[self.optimizer]
        return memory_s(self.cluster.device, passes * self.local_bytes(value, codes))

    def op_time(
        self, op: Op, ins: Sequence[Codes], outs: Sequence[Codes], sharded: Sequence[bool]
    ) -> tuple[float, float]:
        """Forward and backward seconds of an op whose work is divided along the `sharded` axes."""
        if self.table.rules[op.key].view:
            return 0.0, 0.0
        if op.key not in self._flops:
            self._flops[op.key] = operations(op, self.graph)
        forward, backward = self._flops[op.key]
        share = 1
        for n, s in zip(self.mesh.shape, sharded, strict=True):
            share *= n if s else 1
        moved = sum(self.local_bytes(v, c) for v, c in zip(op.inputs, ins, strict=True))
        moved += sum(self.local_bytes(v, c) for v, c in zip(op.outputs, outs, strict=True))
        dtype = dtype_of(op, self.graph)
        grad = any(self.graph.values[o].requires_grad for o in op.outputs)
        return (
            self._seconds(forward // share, moved, dtype),
            self._seconds(backward // share, 2 * moved, dtype) if grad else 0.0,
        )

    def _seconds(self, flops: int, moved: int, dtype: str) -> float:
        key = (flops, moved, dtype)
        if key not in self._ops:
            self._ops[key] = op_s(self.cluster.device, flops=flops, bytes_=moved, dtype=dtype)
        return self._ops[key]

    def move(self, value: str, have: Codes, want: Codes) -> float | None:
        """Seconds to redistribute a value, or None where no redistribution is known."""
        if have == want:
            return 0.0
        spec = self.graph.values[value]
        itemsize = DTYPE_BYTES[spec.dtype]
        key = (spec.numel, itemsize, have, want)
        if key not in self._moves:
            steps = direct_steps(spec.numel, have, want, self.mesh.shape, self.mesh.axes)
            self._moves[key] = (
                None
                if steps is None
                else sum(self._step(str(s[0]), axis, n * itemsize) for s, axis, n in steps if s[0] not in _FREE)
            )
        return self._moves[key]

    def _step(self, kind: str, axis: int, payload: int) -> float:
        key = (kind, axis, payload)
        if key not in self._collectives:
            self._collectives[key] = collective_s(self.cluster, kind, payload, self._groups[axis])
        return self._collectives[key]
