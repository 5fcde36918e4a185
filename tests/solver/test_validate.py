from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from autoplan_solver import Problem, ProblemBuilder, Solution, ValidationError, solve_integer, validate
from autoplan_solver.solution import solution_at
from autoplan_solver.testing import CANONICAL, chain_problem


@pytest.fixture(scope="module")
def problem() -> Problem:
    return chain_problem([[1.0, 3.0]] * 3, [[4.0, 1.0]] * 3, lambda e, a, b: float(a != b), cap=9.0)


@pytest.fixture(scope="module")
def solution(problem: Problem) -> Solution:
    return solve_integer(problem)


def _at(problem: Problem, x: np.ndarray[Any, np.dtype[np.float64]]) -> Solution:
    """A solution that reports ``x`` truly, so that only ``x`` can be wrong."""
    return solution_at(problem, x, status="feasible", bound=-math.inf, solve_s=0.0, backend="test")


def test_a_true_solution_passes(problem: Problem, solution: Solution) -> None:
    validate(problem, solution)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"objective": 5.0}, "objective is reported as 5"),
        ({"objective": math.nan}, "objective is reported as nan"),
        ({"bound": 7.0}, "bound 7 exceeds the objective 6"),
        ({"gap": 0.5}, "gap is reported as 0.5"),
        ({"resources": {"memory": 8.0}}, "memory is reported as 8, but is 9"),
        ({"resources": {}}, "resources reported are []"),
        ({"status": "infeasible"}, "yet there is a point"),
        ({"x": None}, "no point, yet"),
        ({"x": np.zeros(3)}, "x has shape (3,)"),
        ({"x": np.full(14, np.nan)}, "x[0,0] is not a finite number"),
    ],
)
def test_a_wrong_report_is_caught(problem: Problem, solution: Solution, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        validate(problem, dataclasses.replace(solution, **changes))
    assert message in str(caught.value)


def test_a_broken_row_is_named(problem: Problem, solution: Solution) -> None:
    assert solution.x is not None
    x = solution.x.copy()
    x[int(np.flatnonzero(~problem.integer & (x > 0.5))[0])] = 0.0
    with pytest.raises(ValidationError, match=r"row \d+: .*z\[0,.* but its left side is"):
        validate(problem, _at(problem, x))


def test_a_fractional_integer_is_named(problem: Problem) -> None:
    x = np.where(problem.integer, 0.5, 0.25)
    with pytest.raises(ValidationError, match=r"integer variable x\[0,0\] = 0.5 is fractional"):
        validate(problem, _at(problem, x))


def test_a_cap_violated_is_named(problem: Problem, solution: Solution) -> None:
    assert solution.x is not None
    with pytest.raises(ValidationError, match=r"cap on memory: 9 used, 8 allowed \(over by 1\)"):
        validate(problem.with_caps(memory=8.0), solution)


def test_a_bound_violated_is_named() -> None:
    builder = ProblemBuilder()
    builder.var(cost=1.0, upper=2.0)
    free = builder.build(names=["y"])
    with pytest.raises(ValidationError, match=r"variable y = 3 lies outside 0..2"):
        validate(free, _at(free, np.array([3.0])))
    with pytest.raises(ValidationError, match=r"variable y = -1 lies outside 0..2"):
        validate(free, _at(free, np.array([-1.0])))


def test_every_violation_is_listed(problem: Problem, solution: Solution) -> None:
    assert solution.x is not None
    with pytest.raises(ValidationError) as caught:
        validate(problem.with_caps(memory=1.0), dataclasses.replace(solution, objective=7.0, bound=8.0))
    assert len(caught.value.violations) >= 3


@pytest.mark.parametrize("scale", [1e-9, 1e9])
def test_the_objective_is_compared_on_its_own_scale(scale: float) -> None:
    builder = ProblemBuilder()
    builder.eq([(builder.var(cost=scale, integer=True), 1.0)], 1.0)
    problem = builder.build()
    true = solve_integer(problem)
    validate(problem, true)
    with pytest.raises(ValidationError, match="objective"):
        validate(problem, dataclasses.replace(true, objective=scale * 1.001, bound=scale, gap=0.001 / 1.001))


def test_an_infeasible_answer_passes() -> None:
    case = next(c for c in CANONICAL if c.optimum is None)
    answer = solve_integer(case.problem)
    validate(case.problem, answer)
    assert "no point" in str(answer)
