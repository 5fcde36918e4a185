"""A table of costs on the shipped profiles: a change of numbers or formulas shows as a difference of text."""

from __future__ import annotations

from collections.abc import Callable

from autoplan.hardware import COLLECTIVES, ClusterSpec, axis_groups, collective_s, known_clusters, load_cluster, op_s

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def _table(spec: ClusterSpec) -> list[str]:
    lines = [str(spec)]
    for dtype, size in (("float32", 4), ("float16", 2)):  # bfloat16 is not on every device
        for n in (64, 512, 4096, 16384):
            t = op_s(spec.device, flops=2 * n**3, bytes_=3 * n * n * size, dtype=dtype)
            lines.append(f"  matmul {n} {dtype}: {t:.3e} s")
    for group in axis_groups((4, 8)):
        for kind in COLLECTIVES:
            times = ", ".join(f"{collective_s(spec, kind, b, group):.3e}" for b in (KIB, MIB, GIB))
            lines.append(f"  {kind} of 1 KiB, 1 MiB, 1 GiB among {group.size}, {group.stride} apart: {times} s")
    return lines


def test_costs(golden: Callable[[str, str], None]) -> None:
    lines = [line for name in known_clusters() for line in _table(load_cluster(name, devices=32))]
    golden("\n".join(lines), "hardware_costs.txt")
