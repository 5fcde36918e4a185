"""A conformance kit: small problems with known optima that every back end must solve, report and bound correctly.

>>> check_backend("highs")
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from autoplan_solver.backends import BACKENDS
from autoplan_solver.backends.highs_lp import LagrangianSolver, dual_bound
from autoplan_solver.backends.pulp_backend import solve_integer
from autoplan_solver.errors import SolverInputError
from autoplan_solver.problem import Problem, ProblemBuilder
from autoplan_solver.validate import validate

__all__ = ["CANONICAL", "CanonicalProblem", "chain_problem", "check_backend"]


@dataclass(frozen=True, eq=False)
class CanonicalProblem:
    """A problem with its known optimum in seconds, None where it is infeasible."""

    name: str
    problem: Problem
    optimum: float | None

    def __str__(self) -> str:
        return f"{self.name}: {self.problem}, optimum {self.optimum}"


def chain_problem(
    costs: Sequence[Sequence[float]],
    memory: Sequence[Sequence[float]],
    switch: Callable[[int, int, int], float],
    *,
    cap: float = math.inf,
    edges: Sequence[tuple[int, int]] | None = None,
    kept: Callable[[int, int, int], float] | None = None,
) -> Problem:
    """Cells with one-hot options, joined by edge marginals: the planner's problem in small.

    Args:
        costs: costs[c][o], the seconds of option o of cell c.
        memory: memory[c][o], its bytes.
        switch: seconds on edge e between option a of its first and option b of its second cell.
        cap: bytes allowed in all.
        edges: pairs of cells; a chain where absent.
        kept: bytes kept on edge e between options a and b; none where absent.
    """
    builder = ProblemBuilder()
    options, names = [], []
    for c, (seconds, uses) in enumerate(zip(costs, memory, strict=True)):
        x = builder.add_vars(seconds, True, {"memory": uses})
        builder.eq([(j, 1.0) for j in x], 1.0)
        options.append(x)
        names += [f"x[{c},{o}]" for o in range(len(x))]
    for e, (u, v) in enumerate(edges if edges is not None else [(c, c + 1) for c in range(len(costs) - 1)]):
        pairs = [(a, b) for a in range(len(options[u])) for b in range(len(options[v]))]
        use = [kept(e, a, b) if kept else 0.0 for a, b in pairs]
        z = builder.add_vars([switch(e, a, b) for a, b in pairs], False, {"memory": use})
        names += [f"z[{e},{a},{b}]" for a, b in pairs]
        for side, cell in ((0, u), (1, v)):
            for o, x_o in enumerate(options[cell]):
                seen = [(z[k], 1.0) for k, pair in enumerate(pairs) if pair[side] == o]
                builder.eq([*seen, (x_o, -1.0)], 0.0)
    return builder.build({"memory": cap}, names=names)


def _two_sizes(cells: int, cap: float, *, second: float = 1.0, byte: float = 1.0) -> Problem:
    """Each cell is fast (1 s, 4 B) or small (3 s, 1 B); a change of mind along the chain costs 1 s."""
    costs, memory = [[second, 3 * second]] * cells, [[4 * byte, byte]] * cells
    return chain_problem(costs, memory, lambda e, a, b: second * (a != b), cap=cap)


def _knapsack() -> Problem:
    builder = ProblemBuilder()
    for weight, value in ((3.0, 4.0), (4.0, 5.0), (5.0, 6.0), (6.0, 9.0)):
        taken, left = builder.var(cost=-value, integer=True, weight=weight), builder.var(integer=True)
        builder.eq([(taken, 1.0), (left, 1.0)], 1.0)
    return builder.build({"weight": 10.0})


def _assignment() -> Problem:
    costs = np.array([[4.0, 1.0, 3.0], [2.0, 0.0, 5.0], [3.0, 2.0, 2.0]])
    builder = ProblemBuilder()
    x = np.array(builder.add_vars(costs.ravel(), True)).reshape(3, 3)
    for line in (*x, *x.T):
        builder.eq([(int(j), 1.0) for j in line], 1.0)
    return builder.build()


def _triangle() -> Problem:
    """Three cells that all want to differ, with two options: the relaxation costs 0, every assignment at least 1."""
    two = [[0.0, 0.0]] * 3
    return chain_problem(two, two, lambda e, a, b: float(a == b), edges=[(0, 1), (1, 2), (0, 2)])


def _contradiction() -> Problem:
    builder = ProblemBuilder()
    x, y = builder.var(integer=True), builder.var(integer=True)
    builder.eq([(x, 1.0), (y, 1.0)], 1.0)
    builder.eq([(x, 1.0), (y, -1.0)], 0.0)
    return builder.build(names=["x", "y"])


def _offsets() -> Problem:
    builder = ProblemBuilder()
    fast, small = builder.var(cost=1.0, integer=True, memory=4.0), builder.var(cost=3.0, integer=True, memory=1.0)
    builder.eq([(fast, 1.0), (small, 1.0)], 1.0)
    return builder.build({"memory": 13.0}, offset=100.0, resource_offset={"memory": 10.0})


def _transport() -> Problem:
    """No integers: ship 1 from two sources of 0.5 to two sinks of 0.25 and 0.75."""
    builder = ProblemBuilder()
    z = builder.add_vars([0.0, 2.0, 1.0, 1.0], False)
    for (i, j), rhs in (((0, 1), 0.5), ((2, 3), 0.5), ((0, 2), 0.25), ((1, 3), 0.75)):
        builder.eq([(z[i], 1.0), (z[j], 1.0)], rhs)
    return builder.build()


CANONICAL: tuple[CanonicalProblem, ...] = (
    CanonicalProblem("knapsack", _knapsack(), -14.0),
    CanonicalProblem("assignment", _assignment(), 5.0),
    CanonicalProblem("chain, no cap", _two_sizes(3, math.inf), 3.0),
    CanonicalProblem("chain, one cell small (off the hull)", _two_sizes(3, 9.0), 6.0),
    CanonicalProblem("chain, two cells small", _two_sizes(3, 6.0), 8.0),
    CanonicalProblem("chain, all cells small", _two_sizes(3, 3.0), 9.0),
    CanonicalProblem("chain in microseconds and gigabytes", _two_sizes(3, 9e9, second=1e-6, byte=1e9), 6e-6),
    CanonicalProblem("chain in nanoseconds and bytes", _two_sizes(3, 6.0, second=1e-9), 8e-9),
    CanonicalProblem("triangle with a fractional relaxation", _triangle(), 1.0),
    CanonicalProblem("offsets", _offsets(), 103.0),
    CanonicalProblem("transport", _transport(), 1.0),
    CanonicalProblem("infeasible rows", _contradiction(), None),
    CanonicalProblem("infeasible cap", _two_sizes(3, 2.0), None),
)
"""The problems of the kit."""


def check_backend(name: str) -> None:
    """Runs the kit on one back end: integer ones must find every optimum, the others must bound it.

    Raises:
        SolverInputError: the back end is unknown.
        BackendUnavailableError: it cannot run here.
        AssertionError: it fails; the message names the problem.
    """
    if name not in BACKENDS:
        raise SolverInputError(f"unknown backend {name!r}; known: {sorted(BACKENDS)}")
    for case in CANONICAL:
        if BACKENDS[name].integer:
            _check_integer(name, case)
        else:
            _check_bound(case)


def _demand(condition: bool, case: CanonicalProblem, message: str) -> None:
    if not condition:
        raise AssertionError(f"{case.name}: {message}")


def _check_integer(name: str, case: CanonicalProblem) -> None:
    solution = solve_integer(case.problem, backend=name, gap=1e-6)
    validate(case.problem, solution)
    if case.optimum is None:
        _demand(solution.status == "infeasible", case, f"is infeasible, but {name} says: {solution}")
        return
    right = solution.status == "optimal" and math.isclose(solution.objective, case.optimum, rel_tol=1e-6)
    _demand(right, case, f"the optimum is {case.optimum}, but {name} says: {solution}")
    _demand(solution.gap <= 1e-6, case, f"solved to optimality, but the gap reported is {solution.gap}")
    again = solve_integer(case.problem, backend=name, gap=1e-6, warm_start=solution.x)
    validate(case.problem, again)
    same = math.isclose(again.objective, solution.objective, rel_tol=1e-6)
    _demand(same, case, f"a warm start from the optimum gives another: {again}")


def _check_bound(case: CanonicalProblem) -> None:
    solver = LagrangianSolver(case.problem)
    scale = float(np.abs(case.problem.cost).max())
    points = []
    for factor in (0.0, 0.1, 0.3, 1.0, 0.5):
        prices = {r: factor * scale / float(np.abs(use).max() or 1.0) for r, use in case.problem.resources.items()}
        point = solver.solve(prices)
        points.append(point)
        if point.x is not None:
            slack = 1e-9 * (abs(point.lagrangian) + abs(point.priced) + scale)
            _demand(point.lagrangian <= point.priced + slack, case, f"the bound exceeds its own point: {point}")
            tight = abs(point.priced - point.lagrangian) <= slack
            _demand(tight or not point.integral, case, f"integral, yet not at its bound: {point}")
    bound = dual_bound(points, {r: case.problem.caps.get(r, math.inf) for r in case.problem.resources})
    if case.optimum is not None:
        _demand(bound <= case.optimum + 1e-9 * scale, case, f"the bound {bound} exceeds the optimum {case.optimum}")
        _demand(bound > -math.inf, case, "there is no bound")
