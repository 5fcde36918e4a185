"""What `Search` proposes under a cap: against exhaustive search, deciding in turn, and its own bound."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoplan.hardware import load_cluster
from autoplan.ir import Mesh, OpGraph, PlanOptions
from autoplan.planner import Search
from autoplan.planner.formulate import MEMORY, evaluate, formulate
from autoplan_solver import relative_gap, solve_integer, validate
from autoplan_solver.solution import Solution
from tests.planner.cases import brute_force, mlp_graph, setting, transformer_graph
from tests.planner.test_joint import sequential

Setting = tuple[OpGraph, tuple[int, ...], str]


def caps(search: Search, fractions: tuple[float, ...]) -> list[int]:
    """Caps between the least and the most memory of a frontier."""
    (problem,) = search.problems.values()
    uses = [p.resources[MEMORY] for p in problem.points]
    return [math.ceil(min(uses) + f * (max(uses) - min(uses))) for f in fractions]


def on(graph: OpGraph, mesh: tuple[int, ...], cluster: str) -> Search:
    return Search(graph, load_cluster(cluster, devices=math.prod(mesh)), PlanOptions(mesh=Mesh(mesh)))


@settings(max_examples=8)
@given(
    batch=st.sampled_from([2, 16, 64, 256]),
    width=st.sampled_from([8, 64, 256]),
    hidden=st.sampled_from([16, 128, 512]),
    fraction=st.floats(0.0, 1.0),
    cluster=st.sampled_from(["cpu-gloo", "a100-8x"]),
)
def test_proposal_equals_exhaustive_search(batch: int, width: int, hidden: int, fraction: float, cluster: str) -> None:
    graph = mlp_graph(batch, width, hidden)
    net, prices, options = setting(graph, (2,), cluster)
    assert sum(n.cell is not None for n in net.nodes) <= 6
    search = on(graph, (2,), cluster)
    (cap,) = caps(search, (fraction,))
    expected = brute_force(net.unfolded(), prices, {n: options[k] for n, k in enumerate(net.cls)}, cap)
    found = search.next(cap)
    assert expected is not None and found is not None
    assert found.value.bytes <= cap
    assert found.value.cost_s == pytest.approx(expected[0], rel=1e-6)  # the integer program's gap
    assert search.bound(cap) <= expected[0] * (1 + 1e-9)


CASES: dict[str, tuple[str, int, tuple[int, ...], str]] = {
    "gpt2 block of width 2048 on 2x4": ("gpt2", 1, (2, 4), "a100-8x"),
    "llama layer of width 2048 on 2x4": ("llama", 1, (2, 4), "a100-8x"),
    "three gpt2 blocks on 4": ("gpt2", 3, (4,), "a100-8x"),
    "small gpt2 block on 2x2": ("small", 1, (2, 2), "cpu-gloo"),
}


@pytest.mark.parametrize("case", list(CASES))
def test_proposal_is_never_worse_than_sharding_first_and_recomputing_after(case: str) -> None:
    """And better by more than one percent on the small GPT-2 block, at 0.6 of the way from least to most memory."""
    kind, layers, mesh, cluster = CASES[case]
    small = kind == "small"
    graph = transformer_graph("gpt2", 1, width=256, sequence=64) if small else transformer_graph(kind, layers)
    net, prices, options = setting(graph, mesh, cluster)
    search = on(graph, mesh, cluster)
    gains = []
    for cap in caps(search, (0.1, 0.3, 0.6, 0.9)):
        found, after = search.next(cap), sequential(graph, net, prices, options, cap)
        assert found is not None and found.value.bytes <= cap
        assert search.bound(cap) <= found.value.cost_s * (1 + 1e-9)
        assert relative_gap(found.value.cost_s, search.bound(cap)) < 0.02
        if after is not None:
            gains.append(after / found.value.cost_s)
    assert all(g >= 1 - 1e-4 for g in gains)  # the gap at which the search is content
    assert not small or max(gains) > 1.01


@pytest.mark.parametrize("fraction", [0.2, 0.5, 0.8])
def test_copies_are_kept_as_the_integer_program_says(fraction: float) -> None:
    """Some gathered copies fit and some do not: no single price of memory describes that."""
    graph = transformer_graph("gpt2", 1, width=256, sequence=64)
    search = on(graph, (2,), "a100-8x")
    (cap,) = caps(search, (fraction,))
    found = search.next(cap)
    assert found is not None
    (problem,) = search.problems.values()
    kept = {e for e, k in found.value.kept.items() if k}
    again = evaluate(problem.network, problem.prices, problem.form.options, found.assignment, copies=kept)
    assert again is not None
    assert (again.cost_s, again.bytes) == (found.value.cost_s, found.value.bytes)


def test_points_of_the_frontier_are_valid_solutions() -> None:
    graph = transformer_graph("llama", 2)
    search = on(graph, (2, 2), "a100-8x")
    (problem,) = search.problems.values()
    (cap,) = caps(search, (0.5,))
    search.next(cap)  # adds points around the cap
    for p in problem.points:
        assert p.x is not None
        gap = relative_gap(p.cost, problem.bound(p.resources[MEMORY]))
        bound = min(p.cost, problem.bound(p.resources[MEMORY]))
        validate(problem.form.problem, Solution("feasible", p.x, p.cost, bound, gap, p.resources, p.solve_s, "sweep"))


@pytest.mark.parametrize("backend", ["highs", "cbc"])
def test_back_ends_agree_with_the_proposal(backend: str) -> None:
    graph = mlp_graph(64, 256, 512)
    net, prices, options = setting(graph, (2,), "cpu-gloo")
    search = on(graph, (2,), "cpu-gloo")
    for cap in caps(search, (0.25, 0.75)):
        form = formulate(net.unfolded(), prices, {n: options[k] for n, k in enumerate(net.cls)}, cap_bytes=cap)
        solution = solve_integer(form.problem, backend=backend, gap=1e-9)
        validate(form.problem, solution)
        found = search.next(cap)
        assert found is not None and found.value.cost_s == pytest.approx(solution.objective, rel=1e-6)


def test_meshes_that_cannot_win_are_not_refined() -> None:
    graph = transformer_graph("gpt2", 2, width=256, sequence=64)
    search = Search(graph, load_cluster("cpu-gloo", devices=4), PlanOptions())
    cap = 2 * min(c.value.bytes for p in search.problems.values() for c in p.candidates)
    found = search.next(cap)
    assert found is not None
    for shape, problem in search.problems.items():
        if shape != found.mesh.shape:
            best = problem.best(cap)
            assert best is None or best.value.cost_s >= found.value.cost_s
        if not problem.rooms:
            assert problem.bound(cap) >= found.value.cost_s * (1 - 1e-4) or problem.best(cap) is None


def test_the_same_question_twice_gets_the_same_answer_at_once() -> None:
    search = on(transformer_graph("gpt2", 2, width=256, sequence=64), (2, 2), "cpu-gloo")
    (cap,) = caps(search, (0.5,))
    first = search.next(cap)
    (problem,) = search.problems.values()
    points = len(problem.points)
    second = search.next(cap)
    assert first is not None and second is not None and first.key == second.key
    assert len(problem.points) == points
