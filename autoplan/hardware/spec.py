"""A cluster as data: one kind of device, how many of them, and the links between them from the inside out.

Devices are numbered so that the devices of a node are consecutive. A *level* is one kind of link: it joins all devices
whose numbers agree in `number // devices` (all devices of the cluster on the outermost level).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autoplan.errors import OptionError, ProfileError
from autoplan.hardware.curve import Curve

FORMAT = 2
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv", "broadcast")

Sources = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Device:
    """One device.

    Attributes:
        name: What the vendor calls it.
        memory_bytes: Memory of the device, or what one process may use.
        memory_bytes_per_s: Best rate of reading plus writing memory.
        kernel_launch_s: Time that one op costs whatever its size.
        reserved_bytes: Part of `memory_bytes` that no tensor can use (driver context, communication buffers).
        allocator_granularity_bytes: The allocator rounds every tensor up to a multiple of this.
        flops_per_s: Best rate of a matrix product per dtype, 2 per multiply-add, as (dtype, rate).
        matmul_efficiency: Fraction of `flops_per_s` reached by an op of so many flops.
        memory_efficiency: Fraction of `memory_bytes_per_s` reached by an op that moves so many bytes.
        view_s: Seconds of an op that only makes a view, 0 where the host runs ahead of the device.
        allocation_s: Seconds to obtain and first touch a new tensor of so many bytes, where the operating system makes
            pages on demand; None where the allocator keeps memory.
        op_flops_per_s: Rates of ops that are far from those of a matrix product, flops as the profiler counts them, as
            (op, (forward, backward)).
        update_s: Seconds of AdamW's update of one parameter of so many bytes; None: reading and writing memory says it.
        sources: Where each number comes from, as (key, text); not part of the identity.
    """

    name: str
    memory_bytes: int
    memory_bytes_per_s: float
    kernel_launch_s: float
    reserved_bytes: int
    allocator_granularity_bytes: int
    flops_per_s: tuple[tuple[str, float], ...]
    matmul_efficiency: Curve
    memory_efficiency: Curve
    view_s: float = 0.0
    allocation_s: Curve | None = None
    op_flops_per_s: tuple[tuple[str, tuple[float, float]], ...] = ()
    update_s: Curve | None = None
    sources: Sources = field(default=(), compare=False, repr=False)

    @property
    def usable_bytes(self) -> int:
        """Bytes that tensors can use."""
        return self.memory_bytes - self.reserved_bytes

    def peak_flops_per_s(self, dtype: str) -> float:
        """Best matrix-product rate in flops/s for a dtype.

        Integers and booleans, whose ops are pointwise, run at the rate of float32.

        Raises:
            ProfileError: A floating-point dtype that the profile does not list.
        """
        for name, rate in self.flops_per_s:
            if name == dtype:
                return rate
        if dtype.startswith(("int", "uint", "bool")):
            return self.peak_flops_per_s("float32")
        known = ", ".join(name for name, _ in self.flops_per_s)
        raise ProfileError(f"device {self.name} lists no flops_per_s for dtype {dtype!r}; it lists {known}")


@dataclass(frozen=True)
class MeasuredCurve:
    """Measured seconds of one collective by payload bytes, among `group_size` devices of a level."""

    kind: str
    group_size: int
    seconds: Curve


@dataclass(frozen=True)
class Level:
    """One kind of link.

    Attributes:
        name: What the link is called.
        devices: How many consecutive devices one group of this level spans; None on the outermost level: all of them.
        bytes_per_s: Nominal rate per device and direction.
        latency_s: Time of one step of a ring, whatever its size.
        efficiency: Fraction of `bytes_per_s` that large transfers reach.
        peer_bytes_per_s: Nominal rate between two devices where there is no switch: n devices that talk to each other
            use n − 1 such links, at most `bytes_per_s`. None where a single pair reaches `bytes_per_s`.
        reduce_scatter_factor: Bytes that a reduce-scatter moves, relative to a ring's.
        measured: Measured curves, used instead of the ring model.
        sources: Where each number comes from, as (key, text); not part of the identity.
    """

    name: str
    devices: int | None
    bytes_per_s: float
    latency_s: float
    efficiency: float = 1.0
    peer_bytes_per_s: float | None = None
    reduce_scatter_factor: float = 1.0
    measured: tuple[MeasuredCurve, ...] = ()
    sources: Sources = field(default=(), compare=False, repr=False)

    def effective_bytes_per_s(self, members: int) -> float:
        """Rate per device and direction that large transfers among so many members reach."""
        if self.peer_bytes_per_s is None:
            return self.bytes_per_s * self.efficiency
        return min(self.bytes_per_s, (members - 1) * self.peer_bytes_per_s) * self.efficiency


@dataclass(frozen=True)
class ClusterSpec:
    """A number of equal devices and the links between them.

    Attributes:
        name: Name of the profile.
        description: One line for people; not part of the identity.
        n_devices: Devices in use.
        devices_per_node: Devices of a full node. On a cluster of one level this is the number of devices.
        device: The device.
        levels: Links, from inner to outer.
    """

    name: str
    description: str = field(compare=False)
    n_devices: int
    devices_per_node: int
    device: Device
    levels: tuple[Level, ...]

    @property
    def nodes(self) -> int:
        """Nodes in use; a single one may be used in part."""
        return -(-self.n_devices // self.devices_per_node)

    @property
    def fingerprint(self) -> str:
        """16 hex digits that change with anything costs depend on; not with descriptions and sources."""
        data = self.to_json()
        del data["description"]
        text = json.dumps(data, sort_keys=True, separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def with_size(self, *, nodes: int | None = None, devices: int | None = None) -> ClusterSpec:
        """The same hardware in another size.

        Args:
            nodes: Full nodes to use.
            devices: Devices to use: any number up to a full node, above that a multiple of a node.

        Raises:
            OptionError: A size that this hardware does not come in.
        """
        for option, value in (("nodes", nodes), ("devices", devices)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise OptionError(f"{option} must be a whole number above zero, not {value!r}")
        if nodes is None and devices is None:
            return self
        if len(self.levels) == 1:
            return self._one_node(nodes, devices)
        per_node = self.devices_per_node
        n = devices if devices is not None else (nodes or 1) * per_node
        if n > per_node and n % per_node:
            low = n // per_node * per_node
            raise OptionError(
                f"cluster {self.name} has {per_node} devices in a node, so {n} devices do not fill its nodes; "
                f"use up to {per_node}, or a multiple: {low} or {low + per_node} are nearest"
            )
        if nodes is not None and -(-n // per_node) != nodes:
            raise OptionError(
                f"{n} devices of cluster {self.name} are {-(-n // per_node)} nodes of {per_node}, not {nodes}; "
                "give only one of nodes and devices"
            )
        return dataclasses.replace(self, n_devices=n)

    def _one_node(self, nodes: int | None, devices: int | None) -> ClusterSpec:
        if nodes not in (None, 1):
            raise OptionError(
                f"cluster {self.name} describes a single machine of any size, so {nodes} nodes are not possible; "
                "give a number of devices, or a profile file with a second [[level]]"
            )
        n = self.n_devices if devices is None else devices
        return dataclasses.replace(self, n_devices=n, devices_per_node=n)

    def to_json(self) -> dict[str, Any]:
        """Versioned JSON of everything but the sources."""
        return {
            "format": FORMAT,
            "name": self.name,
            "description": self.description,
            "n_devices": self.n_devices,
            "devices_per_node": self.devices_per_node,
            "device": _device_json(self.device),
            "levels": [_level_json(level) for level in self.levels],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ClusterSpec:
        """Inverse of `to_json`; sources are not kept.

        Raises:
            ProfileError: Another format, or fields that are missing or malformed.
        """
        if data.get("format") != FORMAT:
            raise ProfileError(f"cluster JSON has format {data.get('format')!r}; this version reads format {FORMAT}")
        try:
            return cls(
                name=data["name"],
                description=data["description"],
                n_devices=data["n_devices"],
                devices_per_node=data["devices_per_node"],
                device=_device_from(data["device"]),
                levels=tuple(_level_from(level) for level in data["levels"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ProfileError(f"cluster JSON is malformed: {type(error).__name__}: {error}") from error

    def __str__(self) -> str:
        node = f"{self.nodes} x {self.devices_per_node}" if self.nodes > 1 else f"{self.n_devices}"
        links = ", ".join(f"{lv.name} {lv.bytes_per_s / 1e9:g} GB/s" for lv in self.levels)
        return f"{self.name}: {node} {self.device.name}, {self.device.memory_bytes / 1e9:g} GB each; {links}"


def _device_json(device: Device) -> dict[str, Any]:
    return {
        "name": device.name,
        "memory_bytes": device.memory_bytes,
        "memory_bytes_per_s": device.memory_bytes_per_s,
        "kernel_launch_s": device.kernel_launch_s,
        "reserved_bytes": device.reserved_bytes,
        "allocator_granularity_bytes": device.allocator_granularity_bytes,
        "flops_per_s": dict(device.flops_per_s),
        "matmul_efficiency": device.matmul_efficiency.to_json(),
        "memory_efficiency": device.memory_efficiency.to_json(),
        "view_s": device.view_s,
        "allocation_s": None if device.allocation_s is None else device.allocation_s.to_json(),
        "op_flops_per_s": {op: list(rates) for op, rates in device.op_flops_per_s},
        "update_s": None if device.update_s is None else device.update_s.to_json(),
    }


def _device_from(data: Mapping[str, Any]) -> Device:
    return Device(
        name=data["name"],
        memory_bytes=data["memory_bytes"],
        memory_bytes_per_s=data["memory_bytes_per_s"],
        kernel_launch_s=data["kernel_launch_s"],
        reserved_bytes=data["reserved_bytes"],
        allocator_granularity_bytes=data["allocator_granularity_bytes"],
        flops_per_s=tuple(data["flops_per_s"].items()),
        matmul_efficiency=Curve.from_json(data["matmul_efficiency"]),
        memory_efficiency=Curve.from_json(data["memory_efficiency"]),
        view_s=data["view_s"],
        allocation_s=None if data["allocation_s"] is None else Curve.from_json(data["allocation_s"]),
        op_flops_per_s=tuple((op, (forward, backward)) for op, (forward, backward) in data["op_flops_per_s"].items()),
        update_s=None if data["update_s"] is None else Curve.from_json(data["update_s"]),
    )


def _level_json(level: Level) -> dict[str, Any]:
    return {
        "name": level.name,
        "devices": level.devices,
        "bytes_per_s": level.bytes_per_s,
        "latency_s": level.latency_s,
        "efficiency": level.efficiency,
        "peer_bytes_per_s": level.peer_bytes_per_s,
        "reduce_scatter_factor": level.reduce_scatter_factor,
        "measured": [[m.kind, m.group_size, m.seconds.to_json()] for m in level.measured],
    }


def _level_from(data: Mapping[str, Any]) -> Level:
    return Level(
        name=data["name"],
        devices=data["devices"],
        bytes_per_s=data["bytes_per_s"],
        latency_s=data["latency_s"],
        efficiency=data["efficiency"],
        peer_bytes_per_s=data["peer_bytes_per_s"],
        reduce_scatter_factor=data["reduce_scatter_factor"],
        measured=tuple(MeasuredCurve(kind, size, Curve.from_json(points)) for kind, size, points in data["measured"]),
    )
