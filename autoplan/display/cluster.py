"""Clusters as tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rich.console import RenderableType

from autoplan.display.grid import Grid, rich_table
from autoplan.hardware import ClusterSpec, Device, Level
from autoplan.ir.units import format_bytes, format_rate, format_seconds

_GRANULE = "allocator_granularity_bytes"


def clusters_table(clusters: Iterable[ClusterSpec]) -> RenderableType:
    """One line per cluster."""
    return rich_table(clusters_grid(clusters))


def cluster_tables(cluster: ClusterSpec) -> list[RenderableType]:
    """One cluster with all its numbers and where each comes from."""
    return [rich_table(grid) for grid in cluster_grids(cluster)]


def clusters_grid(clusters: Iterable[ClusterSpec]) -> Grid:
    """The list of clusters."""
    rows = tuple(
        (
            c.name,
            f"{c.nodes} x {c.devices_per_node}" if len(c.levels) > 1 else str(c.n_devices),
            c.device.name,
            format_bytes(c.device.memory_bytes),
            c.description,
        )
        for c in clusters
    )
    note = (
        "default sizes; --nodes N or --devices N sets another. A path of a TOML file works as well as a name. "
        "autoplan clusters NAME shows all numbers of one."
    )
    return Grid("Clusters", ("name", ">devices", "device", ">memory", ""), rows, note=note)


def cluster_grids(cluster: ClusterSpec) -> list[Grid]:
    """Device, rates per dtype, links; each with its source."""
    d = cluster.device
    source = dict(d.sources)
    size = f"{cluster.nodes} x {cluster.devices_per_node}" if len(cluster.levels) > 1 else f"{cluster.n_devices}"
    device = (
        ("memory", format_bytes(d.memory_bytes), source.get("memory_bytes", "")),
        ("reserved", format_bytes(d.reserved_bytes), source.get("reserved_bytes", "")),
        ("allocations round to", format_bytes(d.allocator_granularity_bytes), source.get(_GRANULE, "")),
        ("memory rate", format_rate(d.memory_bytes_per_s, "B/s"), source.get("memory_bytes_per_s", "")),
        ("launch of a kernel", format_seconds(d.kernel_launch_s), source.get("kernel_launch_s", "")),
        ("matmul efficiency", _range(d.matmul_efficiency.points), source.get("matmul_efficiency", "")),
        ("memory efficiency", _range(d.memory_efficiency.points), source.get("memory_efficiency", "")),
        *_optional(d),
        *(
            (name, format_rate(rate, "flop/s"), source.get(name, source.get("flops_per_s", "")))
            for name, rate in d.flops_per_s
        ),
    )
    rates = [
        (op, format_rate(ahead, "flop/s"), format_rate(behind, "flop/s")) for op, (ahead, behind) in d.op_flops_per_s
    ]
    columns = ("op", ">forward", ">backward")
    return [
        Grid(f"{cluster.name}: {cluster.description}", ("", ""), (("devices", size), ("device", d.name))),
        Grid("Device", ("", ">", "source"), device),
        *([Grid("Ops of other rates", columns, tuple(rates), note=source.get("op_flops_per_s", ""))] if rates else []),
        *(_level(level) for level in cluster.levels),
    ]


def _optional(d: Device) -> list[tuple[str, str, str]]:
    """Rows of what only measured devices say."""
    source = dict(d.sources)
    rows = [("a view", format_seconds(d.view_s), source.get("view_s", ""))] if d.view_s else []
    curves = (("a new tensor", d.allocation_s, "allocation_s"), ("AdamW of a parameter", d.update_s, "update_s"))
    for label, curve, key in curves:
        if curve is not None:
            low, high = curve.points[0][1], curve.points[-1][1]
            rows.append((label, f"{format_seconds(low)} to {format_seconds(high)}", source.get(key, "")))
    return rows


def _level(level: Level) -> Grid:
    source = dict(level.sources)
    rows = [
        ("joins", "all" if level.devices is None else f"{level.devices} devices", source.get("devices", "")),
        ("rate per direction", format_rate(level.bytes_per_s, "B/s"), source.get("bytes_per_s", "")),
        *_peer(level, source),
        ("latency", format_seconds(level.latency_s), source.get("latency_s", "")),
        ("efficiency", f"{level.efficiency:g}", source.get("efficiency", "")),
        ("reduce-scatter moves", f"{level.reduce_scatter_factor:g} x", source.get("reduce_scatter_factor", "default")),
    ]
    rows += [
        (f"{m.kind} of {m.group_size}", f"{len(m.seconds.points)} points", source.get(m.kind, ""))
        for m in level.measured
    ]
    return Grid(f"Links: {level.name}", ("", ">", "source"), tuple(rows))


def _peer(level: Level, source: Mapping[str, str]) -> list[tuple[str, str, str]]:
    if level.peer_bytes_per_s is None:
        return []
    return [("rate between two", format_rate(level.peer_bytes_per_s, "B/s"), source.get("peer_bytes_per_s", ""))]


def _range(points: tuple[tuple[float, float], ...]) -> str:
    values = [y for _, y in points]
    return f"{min(values):g} to {max(values):g}"
