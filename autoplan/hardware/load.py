"""From a profile file to a `ClusterSpec`. The format is described in profiles/README.md."""

from __future__ import annotations

import tomllib
from importlib import resources
from importlib.resources.abc import Traversable
from itertools import pairwise
from pathlib import Path

from autoplan.errors import ProfileError
from autoplan.hardware.curve import Curve
from autoplan.hardware.spec import COLLECTIVES, ClusterSpec, Device, Level, MeasuredCurve
from autoplan.hardware.table import Table, closest


def load_cluster(
    cluster: str | Path | ClusterSpec, *, nodes: int | None = None, devices: int | None = None
) -> ClusterSpec:
    """Loads a cluster by name or from a profile file.

    Args:
        cluster: A name from `known_clusters()`, the path of a TOML file, or a spec, which is only resized.
        nodes: Full nodes to use instead of the profile's default.
        devices: Devices to use instead of the profile's default.

    Raises:
        ProfileError: No such cluster, or a malformed file.
        OptionError: A size that this hardware does not come in.
    """
    spec = cluster if isinstance(cluster, ClusterSpec) else _read(cluster)
    return spec.with_size(nodes=nodes, devices=devices)


def known_clusters() -> tuple[str, ...]:
    """Names of the profiles that come with autoplan, sorted."""
    return tuple(sorted(f.name.removesuffix(".toml") for f in _folder().iterdir() if f.name.endswith(".toml")))


def _folder() -> Traversable:
    package = resources.files("autoplan")
    inside = package / "profiles"  # in a wheel
    if inside.is_dir():
        return inside
    beside = Path(str(package)).parent / "profiles"  # in a checkout
    if beside.is_dir():
        return beside
    raise ProfileError(
        f"the hardware profiles are missing from this installation: neither {inside} nor {beside} exists"
    )


def _read(name_or_path: str | Path) -> ClusterSpec:
    name = str(name_or_path)
    if isinstance(name_or_path, Path) or name.endswith(".toml") or "/" in name or "\\" in name:
        path: Traversable = Path(name_or_path)
        if not path.is_file():
            raise ProfileError(f"profile file {name} does not exist")
        return _parse(path, name)
    known = known_clusters()
    if name not in known:
        raise ProfileError(
            f"unknown cluster {name!r}{closest(name, known) or '.'} Known clusters: {', '.join(known)}. "
            "For other hardware give the path of a profile file (.toml)."
        )
    path = _folder() / f"{name}.toml"
    return _parse(path, path.name)


def _parse(path: Traversable, file: str) -> ClusterSpec:
    try:
        data = tomllib.loads(path.read_bytes().decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise ProfileError(f"{file}: not readable as TOML: {error}") from error
    return parse_cluster(data, file=file)


def parse_cluster(data: object, *, file: str) -> ClusterSpec:
    """Checks the contents of a profile file and makes a spec of them.

    Args:
        data: What a TOML parser returned.
        file: What to call the file in errors.

    Raises:
        ProfileError: Anything missing, malformed or unknown.
    """
    top = Table(data, file=file, where="top level")
    cluster = Table(top.get("cluster", "a table [cluster]"), file=file, where="[cluster]")
    device = _device(Table(top.get("device", "a table [device]"), file=file, where="[device]"))
    levels = _levels(top, file)
    name, description = cluster.text("name"), cluster.text("description")
    nodes, devices_per_node = cluster.count("nodes"), cluster.count("devices_per_node")
    cluster.finish()
    top.finish()
    _check_nodes(cluster, levels, nodes, devices_per_node)
    return ClusterSpec(name, description, nodes * devices_per_node, devices_per_node, device, levels)


def _device(table: Table) -> Device:
    memory_bytes = table.count("memory_bytes")
    reserved = table.amount("reserved_bytes")
    if reserved != int(reserved) or reserved >= memory_bytes:
        raise table.error("reserved_bytes", f"a whole number below memory_bytes = {memory_bytes}", reserved)
    device = Device(
        name=table.text("name"),
        memory_bytes=memory_bytes,
        memory_bytes_per_s=table.number("memory_bytes_per_s"),
        kernel_launch_s=table.amount("kernel_launch_s"),
        reserved_bytes=int(reserved),
        allocator_granularity_bytes=table.count("allocator_granularity_bytes"),
        flops_per_s=table.rates("flops_per_s"),
        matmul_efficiency=table.curve("matmul_efficiency", check=Curve.check_efficiency),
        memory_efficiency=table.curve("memory_efficiency", check=Curve.check_efficiency),
        view_s=table.amount("view_s") if table.has("view_s") else 0.0,
        allocation_s=table.curve("allocation_s", check=Curve.check_time) if table.has("allocation_s") else None,
        op_flops_per_s=table.pairs("op_flops_per_s") if table.has("op_flops_per_s") else (),
        update_s=table.curve("update_s", check=Curve.check_time) if table.has("update_s") else None,
        sources=table.sources(),
    )
    if "float32" not in dict(device.flops_per_s):
        raise table.error("flops_per_s", "an entry float32, which integers use as well", dict(device.flops_per_s))
    return device


def _levels(top: Table, file: str) -> tuple[Level, ...]:
    expected = "at least one table [[level]]"
    raw = top.get("level", expected)
    if not isinstance(raw, list) or not raw:
        raise top.error("level", expected, raw)
    tables = [Table(entry, file=file, where=f"[[level]] {i + 1}") for i, entry in enumerate(raw)]
    levels = tuple(_level(table, outermost=table is tables[-1]) for table in tables)
    for table, (inner, outer) in zip(tables[1:], pairwise(levels), strict=True):
        if outer.devices is not None and (
            outer.devices <= (inner.devices or 0) or outer.devices % (inner.devices or 1)
        ):
            raise table.error("devices", f"a multiple of the {inner.devices} of the level inside it", outer.devices)
    return levels


def _level(table: Table, *, outermost: bool) -> Level:
    if outermost and table.has("devices"):
        raise table.error("devices", "no such key on the last level, which joins all devices", table.get("devices", ""))
    return Level(
        name=table.text("name"),
        devices=None if outermost else table.count("devices"),
        bytes_per_s=table.number("bytes_per_s"),
        latency_s=table.amount("latency_s"),
        efficiency=table.number("efficiency", default=1.0, at_most=1.0),
        peer_bytes_per_s=table.number("peer_bytes_per_s") if table.has("peer_bytes_per_s") else None,
        reduce_scatter_factor=table.number("reduce_scatter_factor", default=1.0),
        measured=tuple(curve for kind in COLLECTIVES if table.has(kind) for curve in _measured(table, kind)),
        sources=table.sources(),
    )


def _measured(table: Table, kind: str) -> list[MeasuredCurve]:
    expected = "rows [payload_bytes, seconds, group_size], a group of at least 2"
    by_size: dict[int, list[tuple[float, float]]] = {}
    for row in table.rows(kind, width=3, expected=expected):
        payload, seconds, size = row
        if size != int(size) or size < 2:
            raise table.error(kind, expected, row)
        by_size.setdefault(int(size), []).append((payload, seconds))
    return [
        MeasuredCurve(kind, size, table.checked(kind, points, Curve.check_time)) for size, points in by_size.items()
    ]


def _check_nodes(cluster: Table, levels: tuple[Level, ...], nodes: int, devices_per_node: int) -> None:
    spans = [level.devices for level in levels[:-1]]
    if not spans and nodes != 1:
        raise cluster.error("nodes", "1, as there is one [[level]] only", nodes)
    if spans and devices_per_node not in spans:
        raise cluster.error("devices_per_node", f"the devices of an inner [[level]], one of {spans}", devices_per_node)
