"""Small exact solvers for 0/1 problems with one-hot rows, edge marginals and priced resources.

Pure: numpy, highspy and PuLP; it knows nothing of tensors, models or devices.

>>> from autoplan_solver import ProblemBuilder, solve_integer, validate
>>> b = ProblemBuilder()
>>> fast, small = b.var(cost=1.0, integer=True, memory=8.0), b.var(cost=2.0, integer=True, memory=3.0)
>>> b.eq([(fast, 1.0), (small, 1.0)], rhs=1.0)
>>> problem = b.build(caps={"memory": 5.0})
>>> solution = solve_integer(problem)
>>> validate(problem, solution)
>>> solution.objective, dict(solution.resources)
(2.0, {'memory': 3.0})
"""

from __future__ import annotations

from autoplan_solver.backends import BACKENDS, Backend, available
from autoplan_solver.backends.highs_lp import (
    Direction,
    LagrangianPoint,
    LagrangianSolver,
    LagrangianStatus,
    dual_bound,
)
from autoplan_solver.backends.pulp_backend import solve_integer, to_pulp
from autoplan_solver.errors import (
    BackendUnavailableError,
    NoSolutionError,
    SolverError,
    SolverInputError,
    ValidationError,
)
from autoplan_solver.exhaustive import exhaustive
from autoplan_solver.hull import lower_hull, lower_hull_indices, sweep
from autoplan_solver.problem import Problem, ProblemBuilder
from autoplan_solver.solution import Solution, Status, relative_gap
from autoplan_solver.validate import validate

__all__ = [
    "BACKENDS",
    "Backend",
    "BackendUnavailableError",
    "Direction",
    "LagrangianPoint",
    "LagrangianSolver",
    "LagrangianStatus",
    "NoSolutionError",
    "Problem",
    "ProblemBuilder",
    "Solution",
    "SolverError",
    "SolverInputError",
    "Status",
    "ValidationError",
    "available",
    "dual_bound",
    "exhaustive",
    "lower_hull",
    "lower_hull_indices",
    "relative_gap",
    "solve_integer",
    "sweep",
    "to_pulp",
    "validate",
]
