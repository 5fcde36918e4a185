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
    """Name under which a device lists the rate of an op. Kinds of one op that run in other kernels have their own.

    Attention with dropout (``.dropout``), a mask (``.mask``) or a mask that is trained (``.bias``); convolutions in
    groups (``.grouped``) and of one point (``.pointwise``).
    """
    v = OpView.of(op, graph)
    if op.name == "scaled_dot_product_attention":
        mask = v.index(3, "attn_mask")
        kind = "" if mask is None else ".bias" if v.ins[mask].requires_grad else ".mask"
        return op.name + (".dropout" if op.arg(4, "dropout_p", 0.0) else kind)
    if not op.name.startswith("conv") or "transpose" in op.name:
        return op.name
    x, w = v.ins[v.index(0, "input") or 0], v.ins[v.index(1, "weight") or 0]
    if x.rank == w.rank and x.shape[1] != w.shape[1]:
        return f"{op.name}.grouped"
    return f"{op.name}.pointwise" if all(n == 1 for n in w.shape[2:]) else op.name


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
