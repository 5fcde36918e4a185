from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoplan_solver import (
    BACKENDS,
    BackendUnavailableError,
    Problem,
    ProblemBuilder,
    SolverInputError,
    available,
    exhaustive,
    solve_integer,
    to_pulp,
    validate,
)
from autoplan_solver.backends import pulp_backend
from autoplan_solver.testing import CANONICAL, CanonicalProblem, chain_problem, check_backend
from tests.solver.chains import chains

INTEGER = [name for name in available() if BACKENDS[name].integer]
needs_cbc = pytest.mark.skipif("cbc" not in available(), reason="PuLP brings no CBC for this machine")


@pytest.mark.parametrize("name", available())
def test_every_backend_passes_the_kit(name: str) -> None:
    check_backend(name)


@pytest.mark.parametrize("case", CANONICAL, ids=lambda c: c.name)
def test_exhaustive_agrees_with_the_known_optima(case: CanonicalProblem) -> None:
    found = exhaustive(case.problem)
    validate(case.problem, found)
    assert found.objective == pytest.approx(math.inf if case.optimum is None else case.optimum, rel=1e-9)


@needs_cbc
@settings(max_examples=40, deadline=None)
@given(chains(triangle=False) | chains(triangle=True))
def test_highs_cbc_and_exhaustive_agree(problem: Problem) -> None:
    truth = exhaustive(problem)
    validate(problem, truth)
    for backend in ("highs", "cbc"):
        answer = solve_integer(problem, backend=backend, gap=0.0)
        validate(problem, answer)
        assert answer.status == truth.status
        assert answer.objective == pytest.approx(truth.objective, rel=1e-6, abs=1e-6)


@settings(max_examples=30, deadline=None)
@given(chains(), st.integers(0, 5))
def test_a_larger_cap_is_never_worse(problem: Problem, more: int) -> None:
    tight = solve_integer(problem, gap=0.0)
    loose = solve_integer(problem.with_caps(memory=problem.caps["memory"] + more), gap=0.0)
    assert loose.objective <= tight.objective + 1e-6


@pytest.mark.parametrize("backend", INTEGER)
def test_nothing_is_printed(backend: str, capfd: pytest.CaptureFixture[str]) -> None:
    for case in CANONICAL:
        solve_integer(case.problem, backend=backend)
        exhaustive(case.problem)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("backend", INTEGER)
def test_a_gap_is_honest_when_the_search_stops_early(backend: str) -> None:
    rng = np.random.default_rng(0)
    builder = ProblemBuilder()
    for _ in range(40):
        x = builder.add_vars(rng.uniform(1, 2, 4), True, {"a": rng.uniform(1, 2, 4), "b": rng.uniform(1, 2, 4)})
        builder.eq([(j, 1.0) for j in x], 1.0)
    problem = builder.build({"a": 54.0, "b": 54.0}, offset=1.0)
    loose = solve_integer(problem, backend=backend, gap=0.05)
    tight = solve_integer(problem, backend=backend, gap=1e-3)
    for answer, gap in ((loose, 0.05), (tight, 1e-3)):
        validate(problem, answer)
        assert answer.status == "optimal" and answer.gap <= gap
    assert loose.bound <= tight.objective and tight.bound <= loose.objective


@pytest.mark.parametrize("limit_s", [1e-3, 5e-3, 0.02])
@pytest.mark.parametrize("backend", INTEGER)
def test_a_time_limit_gives_a_named_status_and_a_true_bound(backend: str, limit_s: float) -> None:
    rng = np.random.default_rng(1)
    builder = ProblemBuilder()
    for _ in range(60):
        uses = {r: rng.uniform(1, 2, 5) for r in "abcd"}
        builder.eq([(j, 1.0) for j in builder.add_vars(rng.uniform(1, 2, 5), True, uses)], 1.0)
    problem = builder.build(dict.fromkeys("abcd", 86.0))
    answer = solve_integer(problem, backend=backend, gap=0.0, time_limit_s=limit_s)
    validate(problem, answer)
    assert answer.status in ("optimal", "feasible", "limit")  # CBC alone would say "infeasible" now and then
    assert 71.0 <= answer.bound <= 72.07  # the optimum is 72.0619


@pytest.mark.parametrize("backend", INTEGER)
def test_a_warm_start_may_be_infeasible(backend: str) -> None:
    problem = chain_problem([[1.0, 3.0]] * 3, [[4.0, 1.0]] * 3, lambda e, a, b: float(a != b), cap=9.0)
    answer = solve_integer(problem, backend=backend, warm_start=np.ones(problem.n_variables))
    validate(problem, answer)
    assert answer.objective == pytest.approx(6.0)


@pytest.mark.parametrize("backend", INTEGER)
def test_unbounded_and_free_variables(backend: str) -> None:
    builder = ProblemBuilder()
    builder.add_vars([-1.0], False, upper=math.inf)
    assert solve_integer(builder.build(), backend=backend).status == "unbounded"
    builder = ProblemBuilder()
    builder.add_vars([-1.0, 0.0, 2.0], True)
    answer = solve_integer(builder.build(), backend=backend)
    assert answer.objective == -1.0
    empty = ProblemBuilder().build(offset=2.0)
    assert solve_integer(empty, backend=backend).objective == 2.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"backend": "simplex"}, "unknown backend 'simplex'; known integer back ends: ['cbc', 'highs']"),
        ({"gap": -1.0}, "gap"),
        ({"threads": 0}, "threads"),
        ({"time_limit_s": 0.0}, "time_limit_s"),
        ({"warm_start": np.zeros(3)}, "warm_start must have shape (4,)"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    builder = ProblemBuilder()
    builder.add_vars(np.ones(4), True)
    with pytest.raises(SolverInputError) as caught:
        solve_integer(builder.build(), **arguments)
    assert message in str(caught.value)
    with pytest.raises(SolverInputError, match="unknown backend"):
        check_backend("simplex")


def test_an_absent_cbc_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    class Absent:
        def available(self) -> bool:
            return False

    monkeypatch.setattr(pulp_backend, "_new_cbc", lambda **options: Absent())
    builder = ProblemBuilder()
    builder.var(cost=1.0, integer=True)
    with pytest.raises(BackendUnavailableError, match="install it"):
        solve_integer(builder.build(), backend="cbc")
    assert "cbc" not in available()


def test_other_thread_counts_work_in_one_process() -> None:
    problem = CANONICAL[0].problem
    assert [solve_integer(problem, threads=t).objective for t in (1, 2, 1)] == pytest.approx([-14.0] * 3)


def test_the_model_reads_well() -> None:
    problem = chain_problem([[1.0, 3.0]] * 2, [[4.0, 1.0]] * 2, lambda e, a, b: float(a != b), cap=5.0)
    text = str(to_pulp(problem))
    assert "v0_x_0_0_ + v1_x_0_1_ = 1" in text
    assert "cap_memory" in text


def test_exhaustive_refuses_large_problems() -> None:
    builder = ProblemBuilder()
    builder.add_vars(np.ones(30), True)
    with pytest.raises(SolverInputError, match="limit=100"):
        exhaustive(builder.build(), limit=100)
