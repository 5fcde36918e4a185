"""Runs emitted programs on torch.distributed: process groups, parameters as DTensors, one training step.

Files in reading order: `mesh` (process groups), `layout` (pieces of tensors), `load` (programs made to run here),
`signature` (what a call must look like), `step` (forward and backward as autograd sees them), `module`
(`ParallelModule`), `state` (whole state dicts and gradient norms), `guard` (errors that concern all ranks), `measure`
(true peak memory). `compat` holds every use of torch interfaces that are not public.
"""

from autoplan.runtime.guard import abort_on_error, broadcast_or_raise
from autoplan.runtime.layout import shard_tensor, to_dtensor_placements
from autoplan.runtime.measure import measure_peak
from autoplan.runtime.mesh import RuntimeMesh
from autoplan.runtime.module import ParallelModule
from autoplan.runtime.signature import InputSignature
from autoplan.runtime.state import clip_grad_norm_, full_state_dict

__all__ = [
    "InputSignature",
    "ParallelModule",
    "RuntimeMesh",
    "abort_on_error",
    "broadcast_or_raise",
    "clip_grad_norm_",
    "full_state_dict",
    "measure_peak",
    "shard_tensor",
    "to_dtensor_placements",
]
