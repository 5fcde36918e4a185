"""Checks a solution against its problem, and finds the optimum of tiny problems by trying everything.

`validate` recomputes equations (1)-(4) of `autoplan_solver.problem` in numpy and believes nothing a back end said.
With tolerance ε it demands

    |(A x - b)_i| <= ε max(1, |b_i|, max_j |A_ij|)                                  (1)  `_row_violations`
    resource_r(x) <= cap_r + ε max(1, |cap_r|)                                      (2)  `_cap_violations`
    -ε <= x <= upper + ε,   |x_j - round(x_j)| <= ε where integer_j                 (3)  `_bound_violations`
    |objective - cost · x - offset| <= ε Σ|cost_j x_j| and so for each resource;
    bound <= objective; gap as defined                                              (4)  `_report_violations`
"""

from __future__ import annotations

import math

import numpy as np

from autoplan_solver.errors import ValidationError
from autoplan_solver.problem import FloatArray, Problem
from autoplan_solver.solution import Solution, relative_gap

__all__ = ["validate"]

_WORST = 5


def validate(problem: Problem, solution: Solution, *, tolerance: float = 1e-6) -> None:
    """Checks that a solution satisfies its problem and reports itself truly, whatever back end it came from.

    Args:
        problem: the problem that was solved.
        solution: the answer; one without a point must not claim to have one.
        tolerance: ε of the module's equations, relative where a scale is known.

    Raises:
        ValidationError: lists the worst violations by row and variable name.
    """
    x = solution.x
    if x is None:
        claims = solution.status in ("optimal", "feasible") or math.isfinite(solution.objective)
        violations = ["no point, yet status or objective claims one"] if claims else []
    elif x.shape != (problem.n_variables,):
        violations = [f"x has shape {x.shape}, the problem has {problem.n_variables} variables"]
    elif not np.isfinite(x).all():
        violations = [f"variable {problem.name(int(np.argmin(np.isfinite(x))))} is not a finite number"]
    else:
        violations = [
            *_row_violations(problem, x, tolerance),
            *_cap_violations(problem, x, tolerance),
            *_bound_violations(problem, x, tolerance),
            *_report_violations(problem, solution, x, tolerance),
        ]
    if violations:
        raise ValidationError(tuple(violations))


def _worst(amount: FloatArray) -> list[int]:
    """Indices of the largest positive amounts, largest first."""
    return [int(i) for i in np.argsort(-amount, kind="stable")[:_WORST] if amount[i] > 0]


def _row_violations(problem: Problem, x: FloatArray, tolerance: float) -> list[str]:
    scale = np.maximum(1.0, np.abs(problem.rhs))
    np.maximum.at(scale, problem.term_row, np.abs(problem.row_value))
    values = problem.row_values(x)
    off = np.abs(values - problem.rhs)
    excess = np.where(off > tolerance * scale, off, 0.0)
    found = _worst(excess)
    return [f"{problem.row_text(i)}, but its left side is {values[i]:.9g} (off by {off[i]:.3g})" for i in found]


def _cap_violations(problem: Problem, x: FloatArray, tolerance: float) -> list[str]:
    uses = problem.resource_values(x)
    return [
        f"cap on {r}: {uses[r]:.9g} used, {cap:.9g} allowed (over by {uses[r] - cap:.3g})"
        for r, cap in problem.finite_caps.items()
        if uses[r] > cap + tolerance * max(1.0, abs(cap))
    ]


def _bound_violations(problem: Problem, x: FloatArray, tolerance: float) -> list[str]:
    outside = np.maximum(-x, x - problem.upper_bounds)
    found = [
        f"variable {problem.name(j)} = {x[j]:.9g} lies outside 0..{problem.upper_bounds[j]:g}"
        for j in _worst(np.where(outside > tolerance, outside, 0.0))
    ]
    off = np.where(problem.integer, np.abs(x - np.rint(x)), 0.0)
    fractions = _worst(np.where(off > tolerance, off, 0.0))
    return found + [f"integer variable {problem.name(j)} = {x[j]:.9g} is fractional" for j in fractions]


def _report_violations(problem: Problem, solution: Solution, x: FloatArray, tolerance: float) -> list[str]:
    found = []
    objective, slack = problem.objective(x), tolerance * _size(problem.cost, x, problem.offset)
    if not abs(solution.objective - objective) <= slack:
        found.append(f"objective is reported as {solution.objective:.9g}, but is {objective:.9g}")
    if set(solution.resources) != set(problem.resources):
        found.append(f"resources reported are {sorted(solution.resources)}, not {sorted(problem.resources)}")
    for r, use in problem.resource_values(x).items():
        size = _size(problem.resources[r], x, problem.resource_offset.get(r, 0.0))
        if r in solution.resources and not abs(solution.resources[r] - use) <= tolerance * size:
            found.append(f"{r} is reported as {solution.resources[r]:.9g}, but is {use:.9g}")
    if not solution.bound <= solution.objective + slack:
        found.append(f"bound {solution.bound:.9g} exceeds the objective {solution.objective:.9g}")
    gap = relative_gap(solution.objective, solution.bound)
    if not (math.isclose(solution.gap, gap, rel_tol=1e-6, abs_tol=1e-9)):
        found.append(f"gap is reported as {solution.gap:.6g}, but is {gap:.6g}")
    if solution.status not in ("optimal", "feasible"):
        found.append(f"status is {solution.status!r}, yet there is a point")
    return found


def _size(weights: FloatArray, x: FloatArray, offset: float) -> float:
    """The scale of Σ weights x + offset for relative comparisons, never 0."""
    return float(np.abs(weights) @ np.abs(x)) + abs(offset) or 1.0
