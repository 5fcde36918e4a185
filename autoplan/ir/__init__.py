"""Artifacts that the rooms pass to each other: graphs, tensors, meshes, placements, plans. Free of torch."""

from autoplan.ir.events import StepEvents, StorageEvent
from autoplan.ir.graph import Arg, GraphInput, Op, OpGraph, Ref
from autoplan.ir.placement import (
    PARTIAL,
    REPLICATE,
    AxisPlacement,
    Mesh,
    Partial,
    Placement,
    Replicate,
    Shard,
    local_shape,
)
from autoplan.ir.plan import OpPlan, Plan, PlanOptions, Schedule, StagePlan
from autoplan.ir.tensor import TensorSpec

__all__ = [
    "PARTIAL",
    "REPLICATE",
    "Arg",
    "AxisPlacement",
    "GraphInput",
    "Mesh",
    "Op",
    "OpGraph",
    "OpPlan",
    "Partial",
    "Placement",
    "Plan",
    "PlanOptions",
    "Ref",
    "Replicate",
    "Schedule",
    "Shard",
    "StagePlan",
    "StepEvents",
    "StorageEvent",
    "TensorSpec",
    "local_shape",
]
