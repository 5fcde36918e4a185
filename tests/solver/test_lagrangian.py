from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autoplan_solver import (
    LagrangianSolver,
    NoSolutionError,
    Problem,
    ProblemBuilder,
    SolverInputError,
    dual_bound,
    exhaustive,
    lower_hull,
    lower_hull_indices,
    solve_integer,
    sweep,
)
from autoplan_solver.backends import highs_lp
from autoplan_solver.testing import CANONICAL, chain_problem
from tests.solver.chains import chains

TRIANGLE = next(c.problem for c in CANONICAL if c.name.startswith("triangle"))


def _chain(cells: int = 12, options: int = 6, seed: int = 0) -> Problem:
    rng = np.random.default_rng(seed)
    costs, memory = rng.uniform(1e-4, 1e-3, (cells, options)), rng.uniform(1e6, 1e9, (cells, options))
    switch = rng.uniform(0, 1e-3, (cells, options, options))
    kept = rng.uniform(0, 1e8, (cells, options, options))
    return chain_problem(
        costs.tolist(), memory.tolist(), lambda e, a, b: switch[e, a, b], kept=lambda e, a, b: kept[e, a, b]
    )


@settings(max_examples=40, deadline=None)
@given(chains(triangle=False) | chains(triangle=True), st.floats(0, 10))
def test_a_point_is_the_lagrangian_minimum_of_the_integer_problem(problem: Problem, price: float) -> None:
    free = problem.with_caps(memory=math.inf)
    point = LagrangianSolver(free).solve({"memory": price})
    truth = exhaustive(dataclasses.replace(free, cost=free.cost + price * free.resources["memory"]))
    assert point.lagrangian <= truth.objective + 1e-6
    assert point.priced == pytest.approx(truth.objective, rel=2e-4, abs=1e-6)
    if point.integral:
        assert point.priced == pytest.approx(point.lagrangian, rel=1e-9, abs=1e-9)


@settings(max_examples=40, deadline=None)
@given(chains(), st.lists(st.floats(0, 10), min_size=1, max_size=4))
def test_dual_bounds_never_exceed_the_capped_optimum(problem: Problem, prices: list[float]) -> None:
    solver = LagrangianSolver(problem)
    points = [solver.solve({"memory": price}) for price in prices]
    assert dual_bound(points, problem.caps) <= exhaustive(problem).objective + 1e-6


def test_a_price_without_a_cap_bounds_nothing() -> None:
    solver = LagrangianSolver(_chain(3))
    priced, free = solver.solve({"memory": 1e-12}), solver.solve({"memory": 0.0})
    assert dual_bound([priced], {}) == -math.inf
    assert dual_bound([priced, free], {"memory": math.inf}) == free.lagrangian
    assert dual_bound([], {"memory": 1.0}) == -math.inf


@settings(max_examples=40, deadline=None)
@given(chains(max_cells=5))
def test_hull_points_are_optimal_integral_and_convex(problem: Problem) -> None:
    hull = sweep(problem, "memory", n_points=20)
    for point in hull:
        assert point.integral and point.x is not None
        assert np.array_equal(point.x, np.rint(point.x))
        assert point.priced == pytest.approx(point.lagrangian, rel=1e-9, abs=1e-9)
    assert lower_hull(hull, "memory") == hull
    cheapest = exhaustive(problem.with_caps(memory=math.inf)).objective
    assert hull[0].cost == pytest.approx(cheapest)
    ends = [exhaustive(problem.with_caps(memory=p.resources["memory"])).objective for p in (hull[0], hull[-1])]
    assert [hull[0].cost, hull[-1].cost] == pytest.approx(ends)
    below = problem.with_caps(memory=hull[-1].resources["memory"] - 1e-3)
    assert exhaustive(below).status == "infeasible"


@settings(max_examples=25, deadline=None)
@given(chains(max_cells=3))
def test_with_enough_points_the_sweep_finds_the_whole_hull(problem: Problem) -> None:
    caps = range(60)
    best = [exhaustive(problem.with_caps(memory=cap)) for cap in caps]
    found = [s for s in best if s.x is not None]
    true_hull = lower_hull_indices([s.resources["memory"] for s in found], [s.objective for s in found])
    expected = [(found[i].resources["memory"], found[i].objective) for i in true_hull]
    hull = [(p.resources["memory"], p.cost) for p in sweep(problem, "memory", n_points=50)]
    assert hull == [pytest.approx(point) for point in expected]


def test_the_first_point_breaks_ties_for_less_memory() -> None:
    equal = chain_problem([[1.0, 1.0, 1.0]] * 3, [[5.0, 2.0, 9.0]] * 3, lambda e, a, b: 0.0)
    hull = sweep(equal, "memory")
    assert [(p.cost, p.resources["memory"]) for p in hull] == [(3.0, 6.0)]


def test_the_last_point_breaks_ties_for_less_cost() -> None:
    equal = chain_problem([[1.0, 4.0, 2.0]] * 2, [[5.0, 2.0, 2.0]] * 2, lambda e, a, b: 0.0)
    hull = sweep(equal, "memory")
    assert [(p.cost, p.resources["memory"]) for p in hull] == [(2.0, 10.0), (4.0, 4.0)]


def test_few_points_keep_both_ends_and_more_points_never_lose() -> None:
    problem = _chain()
    full = sweep(problem, "memory", n_points=60)
    assert len(full) > 10
    vertices = {(p.cost, p.resources["memory"]) for p in full}
    for n in (1, 2, 3, 8):
        hull = sweep(problem, "memory", n_points=n)
        assert len(hull) == n
        assert {(p.cost, p.resources["memory"]) for p in hull} <= vertices
        assert hull[0].cost == full[0].cost
        assert n == 1 or hull[-1].resources == full[-1].resources


def test_a_sweep_is_deterministic_and_may_go_on_warm() -> None:
    problem = _chain()
    first, second = sweep(problem, "memory"), sweep(problem, "memory")
    for a, b in zip(first, second, strict=True):
        assert a.x is not None and b.x is not None
        assert a.multipliers == b.multipliers and np.array_equal(a.x, b.x)
    solver = LagrangianSolver(problem)
    solver.solve({"memory": 1e-10})
    warm = sweep(problem, "memory", solver=solver)
    assert [p.cost for p in warm] == pytest.approx([p.cost for p in first])


def test_a_fixed_price_moves_the_cost_axis() -> None:
    builder = ProblemBuilder()
    x = builder.add_vars([1.0, 2.0, 3.0], True, {"memory": [9.0, 4.0, 1.0], "static": [0.0, 5.0, 0.0]})
    builder.eq([(j, 1.0) for j in x], 1.0)
    problem = builder.build()
    assert [p.cost for p in sweep(problem, "memory")] == [1.0, 2.0, 3.0]
    assert [p.cost for p in sweep(problem, "memory", fixed={"static": 1.0})] == [1.0, 3.0]
    with pytest.raises(SolverInputError, match="fixed"):
        sweep(problem, "memory", fixed={"memory": 1.0})


@pytest.mark.parametrize("weight", [0.5, 4.0])
def test_a_weighted_direction_is_a_resource_of_its_own(weight: float) -> None:
    rng = np.random.default_rng(3)
    builder = ProblemBuilder()
    for _ in range(8):
        static, kept = rng.uniform(1, 9, 5), rng.uniform(1, 9, 5)
        uses = {"static": static, "kept": kept, "both": static + weight * kept}
        builder.eq([(j, 1.0) for j in builder.add_vars(rng.uniform(1, 9, 5), True, uses)], 1.0)
    problem = builder.build(resource_offset={"static": 2.0, "both": 2.0})
    direction = {"static": 1.0, "kept": weight}
    hull, same = sweep(problem, direction, n_points=12), sweep(problem, "both", n_points=12)
    assert len(hull) > 4
    assert [p.cost for p in hull] == pytest.approx([p.cost for p in same])
    assert lower_hull(hull, direction) == hull
    for point in hull:
        assert point.multipliers["kept"] == pytest.approx(weight * point.multipliers["static"])
    caps = {"static": 30.0, "kept": 25.0}
    assert dual_bound(hull, caps) <= solve_integer(problem.with_caps(**caps)).objective + 1e-9
    for bad in ({}, {"static": 0.0}, {"static": -1.0}):
        with pytest.raises(SolverInputError, match="direction"):
            sweep(problem, bad)


def test_offsets_are_in_costs_resources_and_bounds() -> None:
    builder = ProblemBuilder()
    x = builder.add_vars([1.0, 3.0], True, {"memory": [4.0, 1.0]})
    builder.eq([(j, 1.0) for j in x], 1.0)
    problem = builder.build(offset=100.0, resource_offset={"memory": 10.0})
    point = LagrangianSolver(problem).solve({"memory": 0.5})
    assert (point.cost, point.resources["memory"]) == (101.0, 14.0)
    assert point.lagrangian == pytest.approx(108.0) and point.priced == pytest.approx(108.0)
    assert dual_bound([point], {"memory": 14.0}) == pytest.approx(101.0)


def test_a_fractional_relaxation_is_branched_and_keeps_its_bound() -> None:
    point = LagrangianSolver(TRIANGLE).solve({})
    assert point.status == "branched" and not point.integral and point.n_fractional == 6
    assert point.cost == pytest.approx(1.0) and point.lagrangian == pytest.approx(0.0)
    assert "6 fractional" in str(point)


def test_a_tie_with_a_fractional_vertex_is_perturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    solver = LagrangianSolver(_chain(3))
    true = solver._linear
    calls = []

    def fractional_first(weights: np.ndarray[tuple[int], np.dtype[np.float64]]) -> tuple[object, ...]:
        status, x, duals = true(weights)
        calls.append(1)
        return (status, x * 0.5 if x is not None and len(calls) == 1 else x, duals)

    monkeypatch.setattr(solver, "_linear", fractional_first)
    point = solver.solve({})
    assert point.status == "perturbed" and point.n_fractional == 3
    assert point.priced == pytest.approx(point.lagrangian, rel=1e-4)


def test_running_out_of_nodes_is_a_named_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(highs_lp, "fractional", lambda problem, x: 1)
    point = LagrangianSolver(TRIANGLE).solve({})
    assert point.status == "limit" and point.x is None and point.cost == math.inf
    assert lower_hull([point], "memory") == []


def test_infeasible_and_unbounded_problems_are_named() -> None:
    only_fractions = next(c.problem for c in CANONICAL if c.name == "infeasible rows")
    builder = ProblemBuilder()
    builder.eq([(builder.var(integer=True, memory=1.0), 1.0)], 2.0)
    nothing = builder.build()
    for problem in (only_fractions, nothing):
        point = LagrangianSolver(problem).solve({})
        assert point.status == "infeasible" and point.x is None and not point.resources
    with pytest.raises(NoSolutionError, match="infeasible"):
        sweep(nothing, "memory")
    builder = ProblemBuilder()
    builder.add_vars([-1.0], False, {"memory": [1.0]}, upper=math.inf)
    assert LagrangianSolver(builder.build()).solve({}).status == "unbounded"


def test_a_variable_twice_in_a_row_is_named() -> None:
    builder = ProblemBuilder()
    builder.add_vars([1.0, 2.0], True)
    builder.eq([(0, 1.0)], 1.0)
    builder.eq([(1, 1.0), (0, 1.0), (1, 1.0)], 1.0)
    with pytest.raises(SolverInputError, match="b stands twice in row 1"):
        LagrangianSolver(builder.build(names=["a", "b"]))


@pytest.mark.parametrize("price", [-1.0, math.nan, math.inf])
def test_a_bad_multiplier_is_named(price: float) -> None:
    solver = LagrangianSolver(_chain(2))
    with pytest.raises(SolverInputError, match=r"multipliers\['memory'\]"):
        solver.solve({"memory": price})


def test_an_unknown_resource_is_named() -> None:
    solver = LagrangianSolver(_chain(2))
    with pytest.raises(SolverInputError, match="unknown resource 'disk'"):
        solver.solve({"disk": 1.0})
    with pytest.raises(SolverInputError, match="unknown resource 'disk'"):
        solver.solve({}, prefer="disk")
    with pytest.raises(SolverInputError, match="disk"):
        sweep(_chain(2), "disk")
    with pytest.raises(SolverInputError, match="n_points"):
        sweep(_chain(2), "memory", n_points=0)
    with pytest.raises(SolverInputError, match="disk"):
        lower_hull([solver.solve({})], "disk")


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=12))
def test_no_point_lies_below_the_hull(points: list[tuple[int, int]]) -> None:
    assume(points)
    m, c = np.array(points, dtype=np.float64).T
    hull = lower_hull_indices(m, c)
    assert c[hull[0]] == c.min() and m[hull[-1]] == m.min()
    for a, b in itertools.pairwise(hull):
        assert m[a] > m[b] and c[a] < c[b]
        assert all((c[b] - c[a]) * (m[a] - mi) <= (ci - c[a]) * (m[a] - m[b]) + 1e-9 for mi, ci in points)
