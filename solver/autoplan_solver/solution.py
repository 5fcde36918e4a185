"""What a back end found: a point, its cost, and how far from optimal it can be.

    gap = (objective - bound) / max(|objective|, 1e-12)          (1)  `relative_gap`

where ``bound`` is a proven lower bound of the minimum. The gap is inf when there is no point.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from autoplan_solver.problem import FloatArray, Problem

__all__ = ["Solution", "Status", "relative_gap"]

Status = Literal["optimal", "feasible", "infeasible", "unbounded", "limit"]


@dataclass(frozen=True, eq=False)
class Solution:
    """The answer of a back end.

    Args:
        status: "optimal" (proven within the asked gap), "feasible" (a point, not proven), "infeasible",
            "unbounded", or "limit" (stopped before any point was found).
        x: the point, shape (n,), or None.
        objective: cost of ``x`` in seconds, offset included; inf without a point.
        bound: proven lower bound of the minimum in seconds; inf when infeasible.
        gap: equation (1), relative.
        resources: resource name -> use of ``x``, offset included; empty without a point.
        solve_s: wall-clock seconds spent.
        backend: name of the back end.
    """

    status: Status
    x: FloatArray | None
    objective: float
    bound: float
    gap: float
    resources: Mapping[str, float]
    solve_s: float
    backend: str

    def __str__(self) -> str:
        head = f"{self.status} by {self.backend} in {self.solve_s:.3f} s"
        if self.x is None:
            return f"{head}: no point, bound {self.bound:.6g} s"
        uses = "".join(f", {r} {v:.6g}" for r, v in self.resources.items())
        return f"{head}: {self.objective:.6g} s (bound {self.bound:.6g} s, gap {self.gap:.2%}){uses}"


def relative_gap(objective: float, bound: float) -> float:
    """Equation (1): the relative gap between an objective and its lower bound."""
    if not math.isfinite(objective):
        return math.inf
    return max(objective - bound, 0.0) / max(abs(objective), 1e-12)


def solution_at(
    problem: Problem, x: FloatArray, *, status: Status, bound: float, solve_s: float, backend: str
) -> Solution:
    """The `Solution` at ``x``: objective and resources are recomputed from the problem, bound is at most objective."""
    objective = problem.objective(x)
    bound = min(bound, objective)
    gap = relative_gap(objective, bound)
    return Solution(status, x, objective, bound, gap, problem.resource_values(x), solve_s, backend)


def no_solution(status: Status, *, bound: float, solve_s: float, backend: str) -> Solution:
    """A `Solution` without a point; an infeasible problem's bound is inf."""
    bound = math.inf if status == "infeasible" else bound
    return Solution(status, None, math.inf, bound, math.inf, {}, solve_s, backend)
