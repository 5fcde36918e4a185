"""Everything that is shown to people: tables, HTML fragments, SVG, progress, units. Free of torch."""

from autoplan.display.cluster import cluster_tables, clusters_table
from autoplan.display.demo import demo_tables
from autoplan.display.plan import compare_html, compare_tables, plan_html, plan_tables
from autoplan.display.profile import profile_html, profile_tables
from autoplan.display.progress import Progress, progress
from autoplan.display.svg import memory_svg
from autoplan.ir.units import format_bytes, format_flops, format_percent, format_seconds, parse_bytes

__all__ = [
    "Progress",
    "cluster_tables",
    "clusters_table",
    "compare_html",
    "compare_tables",
    "demo_tables",
    "format_bytes",
    "format_flops",
    "format_percent",
    "format_seconds",
    "memory_svg",
    "parse_bytes",
    "plan_html",
    "plan_tables",
    "profile_html",
    "profile_tables",
    "progress",
]
