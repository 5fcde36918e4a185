"""The public functions: `plan`, `profile`, `parallelize` and what the command line needs beside them.

This room drives the others. Only here do deciding (planner, free of torch) and doing (codegen) meet: `planning.accept`
lets the planner propose, emits the proposal, and accepts it when the emitted code fits.
"""

from autoplan.api.demo import DemoResult, run_demo
from autoplan.api.emitting import Emitted, emit, emit_code
from autoplan.api.models import load_model
from autoplan.api.parallel import parallelize
from autoplan.api.planning import plan, profile
from autoplan.ir import PlanOptions
from autoplan.runtime import full_state_dict

__all__ = [
    "DemoResult",
    "Emitted",
    "PlanOptions",
    "emit",
    "emit_code",
    "full_state_dict",
    "load_model",
    "parallelize",
    "plan",
    "profile",
    "run_demo",
]
