"""Clusters as data, and what ops and collectives cost on them. Free of torch.

`load_cluster` reads a TOML profile into a `ClusterSpec`; `op_s` and `collective_s` price work on it in seconds.
"""

from autoplan.hardware.cost import AxisGroup, axis_groups, collective_s, level_sizes, matmul_s, memory_s, op_s
from autoplan.hardware.curve import Curve
from autoplan.hardware.load import known_clusters, load_cluster, parse_cluster
from autoplan.hardware.spec import COLLECTIVES, ClusterSpec, Device, Level, MeasuredCurve

__all__ = [
    "COLLECTIVES",
    "AxisGroup",
    "ClusterSpec",
    "Curve",
    "Device",
    "Level",
    "MeasuredCurve",
    "axis_groups",
    "collective_s",
    "known_clusters",
    "level_sizes",
    "load_cluster",
    "matmul_s",
    "memory_s",
    "op_s",
    "parse_cluster",
]
