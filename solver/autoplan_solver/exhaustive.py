"""The optimum of a tiny problem by trying every integer assignment: the oracle of the tests.

A row is *one-hot* when all its terms are integer variables with coefficient 1 and its right-hand side is 1. Depth
first, one variable of each one-hot row in turn is set to 1 and its companions to 0; integer variables in no such row
are tried at 0 and 1. For each full assignment the best continuous rest is one small linear program,

    min  cost_z · z   s.t.  A_z z = b - A_x x,  0 <= z <= upper,
                            resource_r · z <= cap_r - offset_r - resource_r · x             (1)  `_Rest`

A branch is left early only where a row of integer variables alone is already broken, never by cost.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

import highspy
import numpy as np

from autoplan_solver.backends.highs_model import add_cap_rows, new_model, power_of_two_scale, run_model
from autoplan_solver.errors import SolverInputError
from autoplan_solver.problem import FloatArray, IntArray, Problem
from autoplan_solver.solution import Solution, no_solution, solution_at

__all__ = ["exhaustive"]

_TOLERANCE = 1e-7


def exhaustive(problem: Problem, *, limit: int = 200_000) -> Solution:
    """The exact optimum of a tiny problem.

    Args:
        problem: a problem with few integer assignments.
        limit: most assignments to try.

    Raises:
        SolverInputError: there are more assignments than ``limit``.
    """
    began = time.perf_counter()
    rest = _Rest(problem)
    best, best_cost = None, math.inf
    for tried, x in enumerate(_assignments(problem), start=1):
        if tried > limit:
            raise SolverInputError(f"exhaustive search met more than limit={limit} assignments; use a solver")
        completed = rest.complete(x)
        if completed is not None and problem.objective(completed) < best_cost:
            best, best_cost = completed, problem.objective(completed)
    solve_s = time.perf_counter() - began
    if best is None:
        return no_solution("infeasible", bound=math.inf, solve_s=solve_s, backend="exhaustive")
    return solution_at(problem, best, status="optimal", bound=best_cost, solve_s=solve_s, backend="exhaustive")


def _row_terms(problem: Problem, row: int) -> tuple[IntArray, FloatArray]:
    span = slice(int(problem.row_start[row]), int(problem.row_start[row + 1]))
    return problem.row_index[span], problem.row_value[span]


def _assignments(problem: Problem) -> Iterator[FloatArray]:
    """Every assignment of the integer variables that meets the rows of integer variables alone; others are 0."""
    groups: list[IntArray] = []
    pure: list[int] = []
    for row in range(problem.n_rows):
        index, value = _row_terms(problem, row)
        if not problem.integer[index].all():
            continue
        pure.append(row)
        distinct = len(np.unique(index)) == len(index)
        if len(index) and distinct and problem.rhs[row] == 1.0 and bool((value == 1.0).all()):
            groups.append(index)
    grouped = np.concatenate(groups) if groups else np.zeros(0, dtype=np.int64)
    free = [int(j) for j in np.setdiff1d(np.flatnonzero(problem.integer), grouped)]
    x = np.full(problem.n_variables, np.nan)  # nan: not decided yet
    x[~problem.integer] = 0.0

    def descend(level: int) -> Iterator[FloatArray]:
        if level < len(groups):
            yield from choose(groups[level], level)
        elif level < len(groups) + len(free):
            j = free[level - len(groups)]
            for value in (0.0, 1.0):
                if value <= problem.upper_bounds[j]:
                    x[j] = value
                    yield from descend(level + 1)
            x[j] = np.nan
        elif all(abs(v @ x[i] - problem.rhs[r]) <= _TOLERANCE for r in pure for i, v in [_row_terms(problem, r)]):
            yield x.copy()

    def choose(group: IntArray, level: int) -> Iterator[FloatArray]:
        before = x[group].copy()
        for position, j in enumerate(group):
            others = np.delete(before, position)
            if before[position] == 0.0 or bool((others == 1.0).any()) or problem.upper_bounds[j] < 1.0:
                continue
            x[group] = 0.0
            x[j] = 1.0
            yield from descend(level + 1)
        x[group] = before

    yield from descend(0)


class _Rest:
    """Equation (1): completes integer assignments; one model, its integer columns fixed anew each time."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._fixed = np.flatnonzero(problem.integer).astype(np.int32)
        self._continuous = len(self._fixed) < problem.n_variables
        if not self._continuous:
            return
        scale = power_of_two_scale(problem.cost)
        self._model = new_model(problem, problem.cost * scale, integer=False, threads=1)
        add_cap_rows(self._model, problem)

    def complete(self, x: FloatArray) -> FloatArray | None:
        """``x`` with the cheapest continuous values, or None where there are none."""
        if not self._continuous:
            rows = np.abs(self._problem.row_values(x) - self._problem.rhs) <= _TOLERANCE
            uses = self._problem.resource_values(x)
            within = all(uses[r] <= c * (1 + math.copysign(1e-9, c)) for r, c in self._problem.finite_caps.items())
            return x if within and bool(rows.all()) else None
        values = x[self._fixed]
        self._model.changeColsBounds(len(self._fixed), self._fixed, values, values)
        if run_model(self._model) != highspy.HighsModelStatus.kOptimal:
            return None
        completed = np.array(self._model.getSolution().col_value)
        completed[self._fixed] = values
        within_bounds: FloatArray = np.clip(completed, 0.0, self._problem.upper_bounds)
        return within_bounds
