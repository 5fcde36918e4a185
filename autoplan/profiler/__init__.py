"""What a model costs before any plan: flops, bytes, seconds and saved activations per op. Free of torch."""

from autoplan.profiler.cost import CostTable, OpCost, UnknownOp, cost_table
from autoplan.profiler.flops import (
    Work,
    backward_flops,
    dtype_of,
    forward_flops,
    is_free,
    needs_backward,
    operations,
    register_flops,
    unknown_ops,
    work,
)
from autoplan.profiler.layout import Layout, layouts
from autoplan.profiler.memory import Memory, Moment, memory
from autoplan.profiler.profile import Group, Phase, Profile, make_profile, update_s

__all__ = [
    "CostTable",
    "Group",
    "Layout",
    "Memory",
    "Moment",
    "OpCost",
    "Phase",
    "Profile",
    "UnknownOp",
    "Work",
    "backward_flops",
    "cost_table",
    "dtype_of",
    "forward_flops",
    "is_free",
    "layouts",
    "make_profile",
    "memory",
    "needs_backward",
    "operations",
    "register_flops",
    "unknown_ops",
    "update_s",
    "work",
]
