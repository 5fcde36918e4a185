"""Seconds of ops and collectives on a cluster. Pure functions; all of them never fall as bytes or flops grow.

Ops (roofline with size-dependent efficiency e, per-op overhead `launches · kernel_launch_s`):

(1)  t = max( flops / (peak · e_f(flops)),  bytes / (rate · e_b(bytes)) ) + launches · launch      `op_s`

Collectives. A group is split over the levels of links (`level_sizes`): n = Πₗ nₗ, members of one group of level l are
nₗ groups of level l−1. With Nₗ = Πⱼ≤ₗ nⱼ, payload b, and β the effective bytes/s, α the latency of a level (links that
are not switched, `peer_bytes_per_s`, give (nₗ−1) links to a group of nₗ, and one to a chain or a pair):

(2)  ring, all-gather or reduce-scatter (all-reduce: twice)
     t = Σₗ [ (b / Nₗ₋₁) · (nₗ−1)/nₗ / βₗ + (nₗ−1) · αₗ ]                                          `_ring_s`
(3)  all-to-all, directly between members: (Nₗ − Nₗ₋₁) peers across level l, b/n bytes for each
     t = Σₗ [ b · (Nₗ − Nₗ₋₁)/n / βₗ + (Nₗ − Nₗ₋₁) · αₗ ]                                          `_all_to_all_s`
(4)  broadcast, a pipelined chain per level:  t = Σₗ [ b / βₗ + (nₗ−1) · αₗ ]                       `_broadcast_s`
(5)  send and receive between neighbours of the group, over the outermost link that any pair of them crosses:
     t = b / β + α                                                                                   `_send_recv_s`

Where a level has a measured curve for the kind, its term is read from the curve. A curve measured among k devices
serves a group of nₗ at the payload that makes each device move as many bytes:

(6)  t = curve_k( b · traffic(nₗ) / traffic(k) ) + (steps(nₗ) − steps(k)) · αₗ   for nₗ ≥ k          `_measured_s`
     t = min( curve_k( b · traffic(nₗ) / traffic(k) ), model )                    for nₗ < k

since what k devices take bounds what fewer of them take from above.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autoplan.errors import OptionError
from autoplan.hardware.spec import COLLECTIVES, ClusterSpec, Device, Level, MeasuredCurve


@dataclass(frozen=True)
class AxisGroup:
    """The devices along one mesh axis: `size` of them, `stride` apart in the numbering of devices."""

    size: int
    stride: int

    def __post_init__(self) -> None:
        if self.size < 1 or self.stride < 1:
            raise OptionError(f"a group needs a size and a stride of at least 1, not {self.size} and {self.stride}")


def axis_groups(mesh_shape: Sequence[int]) -> tuple[AxisGroup, ...]:
    """The group of each mesh axis; the last axis is contiguous, so give it to the fastest links."""
    return tuple(AxisGroup(size, math.prod(mesh_shape[i + 1 :])) for i, size in enumerate(mesh_shape))


def matmul_s(device: Device, flops: float, dtype: str) -> float:
    """Seconds of `flops` floating-point operations in one matrix product, launch not counted."""
    _check_amount("flops", flops)
    if flops == 0:
        return 0.0
    return flops / (device.peak_flops_per_s(dtype) * device.matmul_efficiency.at(flops))


def memory_s(device: Device, bytes_: float) -> float:
    """Seconds to move `bytes_` (read plus written) in one op, launch not counted."""
    _check_amount("bytes", bytes_)
    if bytes_ == 0:
        return 0.0
    return bytes_ / (device.memory_bytes_per_s * device.memory_efficiency.at(bytes_))


def op_s(device: Device, *, flops: float, bytes_: float, dtype: str, launches: int = 1) -> float:
    """Seconds of one op, equation (1).

    Args:
        device: Where it runs.
        flops: Floating-point operations, 2 per multiply-add.
        bytes_: Bytes read plus bytes written.
        dtype: Type it computes in.
        launches: Kernels it takes.
    """
    _check_amount("launches", launches)
    return max(matmul_s(device, flops, dtype), memory_s(device, bytes_)) + launches * device.kernel_launch_s


def collective_s(cluster: ClusterSpec, kind: str, bytes_: float, group: AxisGroup) -> float:
    """Seconds of one collective; zero for zero bytes and for a group of one.

    Args:
        cluster: The hardware.
        kind: One of `COLLECTIVES`.
        bytes_: Payload per device, of the *full* tensor: the reduced tensor (all_reduce), the gathered output
            (all_gather), the unreduced input (reduce_scatter), the local tensor (all_to_all, broadcast, send_recv).
        group: The devices that take part.

    Raises:
        OptionError: An unknown kind, a negative payload, or a group larger than the cluster.
    """
    if kind not in COLLECTIVES:
        raise OptionError(f"collective {kind!r} is not one of {', '.join(COLLECTIVES)}")
    _check_amount("bytes", bytes_)
    if group.size == 1 or bytes_ == 0:
        return 0.0
    sizes = level_sizes(cluster, group)
    if kind == "send_recv":
        return _send_recv_s(cluster, bytes_, group)
    if kind == "all_to_all":
        return _all_to_all_s(cluster.levels, sizes, bytes_)
    if kind == "broadcast":
        return _broadcast_s(cluster.levels, sizes, bytes_)
    return _ring_s(cluster.levels, sizes, kind, bytes_)


def level_sizes(cluster: ClusterSpec, group: AxisGroup) -> tuple[int, ...]:
    """How many members meet on each level, inner to outer; the product is the size of the group.

    A group that straddles the border of a level unevenly is taken to have no two members inside that level, which is
    never cheaper than the truth.

    Raises:
        OptionError: The group does not fit on the cluster.
    """
    if group.size * group.stride > cluster.n_devices:
        raise OptionError(
            f"a group of {group.size} devices, {group.stride} apart, does not fit on the {cluster.n_devices} devices "
            f"of cluster {cluster.name}"
        )
    sizes, inside = [], 1
    for level in cluster.levels:
        together = _members_inside(cluster.n_devices, level.devices, group, inside)
        sizes.append(together // inside)
        inside = together
    return tuple(sizes)


def _members_inside(n_devices: int, span: int | None, group: AxisGroup, below: int) -> int:
    """Members of every group that share one group of a level spanning `span` devices."""
    extent = group.size * group.stride
    if span is None or n_devices <= span or span % extent == 0:
        return group.size
    if group.stride < span and span % group.stride == 0 and extent % span == 0:
        return max(below, span // group.stride)
    return below


def _ring_s(levels: Sequence[Level], sizes: Sequence[int], kind: str, bytes_: float) -> float:
    """Equation (2)."""
    rounds = 2 if kind == "all_reduce" else 1
    total, payload = 0.0, bytes_
    for level, n in zip(levels, sizes, strict=True):
        if n > 1:
            factor = level.reduce_scatter_factor if kind == "reduce_scatter" else 1.0
            moved = rounds * factor * payload * (n - 1) / n
            model = moved / level.effective_bytes_per_s(n) + rounds * (n - 1) * level.latency_s
            total += _measured_s(level, kind, payload, n, model)
            payload /= n
    return total


def _all_to_all_s(levels: Sequence[Level], sizes: Sequence[int], bytes_: float) -> float:
    """Equation (3)."""
    size, total, inside = math.prod(sizes), 0.0, 1
    for level, n in zip(levels, sizes, strict=True):
        if n > 1:
            peers = inside * (n - 1)
            inside *= n
            rate = level.effective_bytes_per_s(n)
            model = bytes_ * peers / size / rate + peers * level.latency_s
            total += _measured_s(level, "all_to_all", bytes_ * inside / size, n, model)
    return total


def _broadcast_s(levels: Sequence[Level], sizes: Sequence[int], bytes_: float) -> float:
    """Equation (4)."""
    total = 0.0
    for level, n in zip(levels, sizes, strict=True):
        if n > 1:
            model = bytes_ / level.effective_bytes_per_s(2) + (n - 1) * level.latency_s
            total += _measured_s(level, "broadcast", bytes_, n, model)
    return total


def _send_recv_s(cluster: ClusterSpec, bytes_: float, group: AxisGroup) -> float:
    """Equation (5)."""
    extent = group.size * group.stride
    level = next(
        level
        for level in cluster.levels
        if level.devices is None or cluster.n_devices <= level.devices or level.devices % extent == 0
    )
    model = bytes_ / level.effective_bytes_per_s(2) + level.latency_s
    return _measured_s(level, "send_recv", bytes_, 2, model)


def _measured_s(level: Level, kind: str, payload: float, n: int, model: float) -> float:
    """Equation (6), or the modelled seconds where the level has no curve for this kind."""
    curves = [m for m in level.measured if m.kind == kind]
    if not curves:
        return model
    nearest = min(curves, key=lambda m: _distance(m, n))
    k = nearest.group_size
    seconds = nearest.seconds.time_at(payload * _traffic(kind, n) / _traffic(kind, k))
    if n < k:
        return min(seconds, model)
    return seconds + (n - k) * (2 if kind == "all_reduce" else 1) * level.latency_s


def _distance(curve: MeasuredCurve, n: int) -> tuple[float, int]:
    return abs(math.log(curve.group_size / n)), -curve.group_size


def _traffic(kind: str, n: int) -> float:
    """Bytes that a device moves per byte of payload, up to a constant."""
    return 1.0 if kind in ("broadcast", "send_recv") else (n - 1) / n


def _check_amount(what: str, amount: float) -> None:
    if not (math.isfinite(amount) and amount >= 0):
        raise OptionError(f"{what} must be finite and not negative, not {amount!r}")
