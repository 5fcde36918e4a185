"""How long the kernels of one op take on a device: equation (1) of `autoplan.hardware.cost` and what eager adds to it.

    t = max( flops/rate,  bytes / memory rate ) + launches · launch
        + views · view
        + Σ allocation(bytes of each new tensor)                                                      (1)

The rate is that of a matrix product of this size, or the op's own where the device lists one (`op_flops_per_s`): on a
CPU a tanh runs at the speed of the vector units, an attention kernel at a fraction of a matrix product's.
"""

from __future__ import annotations

from collections.abc import Iterable

from autoplan.hardware import Device, memory_s, op_s
from autoplan.ir import Op, OpGraph
from autoplan.rules import OpView


def rate_key(op: Op, graph: OpGraph) -> str:
    """Name under which a device lists the rate of an op: attention with dropout and grouped convolutions differ."""
    if op.name == "scaled_dot_product_attention" and op.arg(4, "dropout_p", 0.0):
        return f"{op.name}.dropout"
    if not op.name.startswith("conv"):
        return op.name
    v = OpView.of(op, graph)
    x, w = v.index(0, "input") or 0, v.index(1, "weight") or 0
    grouped = v.ins[x].rank == v.ins[w].rank and v.ins[x].shape[1] != v.ins[w].shape[1]
    return f"{op.name}.grouped" if grouped and "transpose" not in op.name else op.name


def kernel_s(
    device: Device,
    *,
    flops: float,
    bytes_: float,
    dtype: str,
    launches: int,
    views: int = 0,
    rate: float | None = None,
    new_bytes: Iterable[int] = (),
) -> float:
    """Equation (1).

    Args:
        device: Where it runs.
        flops: Floating-point operations.
        bytes_: Bytes read plus bytes written.
        dtype: Type it computes in.
        launches: Kernels it takes.
        views: Views that it makes.
        rate: Flops per second of this op, where they differ from a matrix product's.
        new_bytes: Sizes of the tensors that it allocates.
    """
    if rate is None:
        seconds = op_s(device, flops=flops, bytes_=bytes_, dtype=dtype, launches=launches)
    else:
        seconds = max(flops / rate, memory_s(device, bytes_)) + launches * device.kernel_launch_s
    seconds += views * device.view_s
    if device.allocation_s is not None:
        seconds += sum(device.allocation_s.time_at(n) for n in new_bytes if n)
    return seconds
