from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from autoplan_solver import Problem, ProblemBuilder, SolverInputError


def _fields(**changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "cost": [1.0, 2.0, 0.5],
        "resources": {"memory": [8.0, 3.0, 0.0]},
        "caps": {"memory": 10.0},
        "row_start": [0, 2, 4],
        "row_index": [0, 1, 2, 0],
        "row_value": [1.0, 1.0, 1.0, -1.0],
        "rhs": [1.0, 0.0],
        "integer": [True, True, False],
    }
    return fields | changes


def test_values_follow_the_equations() -> None:
    problem = Problem(**_fields(offset=10.0, resource_offset={"memory": 100.0}))
    x = np.array([1.0, 0.0, 1.0])
    assert problem.objective(x) == 11.5
    assert problem.row_values(x).tolist() == [1.0, 0.0]
    assert problem.resource_values(x) == {"memory": 108.0}
    assert (problem.n_variables, problem.n_rows) == (3, 2)
    assert problem.upper_bounds.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("cost", {"cost": [[1.0], [2.0], [3.0]]}),
        ("cost", {"cost": [1.0, math.nan, 0.0]}),
        ("cost", {"cost": ["a", "b", "c"]}),
        ("resources['memory']", {"resources": {"memory": [1.0]}}),
        ("caps", {"caps": {"time": 1.0}}),
        ("caps['memory']", {"caps": {"memory": math.nan}}),
        ("row_start", {"row_start": [0, 2]}),
        ("row_start", {"row_start": [0, 4, 2]}),
        ("row_index", {"row_index": [0, 1, 2]}),
        ("row_index", {"row_index": [0, 1, 2, 3]}),
        ("row_index", {"row_index": [0.0, 1.0, 2.0, 0.5]}),
        ("row_value", {"row_value": [1.0]}),
        ("rhs", {"rhs": [1.0, math.inf]}),
        ("integer", {"integer": [True]}),
        ("integer", {"integer": [1, 1, 0]}),
        ("offset", {"offset": math.inf}),
        ("resource_offset", {"resource_offset": {"time": 1.0}}),
        ("names", {"names": ["a"]}),
        ("upper", {"upper": [1.0, 1.0]}),
        ("upper", {"upper": [1.0, 2.0, 1.0]}),
        ("upper", {"upper": [1.0, 1.0, -1.0]}),
    ],
)
def test_a_bad_field_is_named(field: str, changes: dict[str, Any]) -> None:
    with pytest.raises(SolverInputError) as caught:
        Problem(**_fields(**changes))
    assert field in str(caught.value)


def test_arrays_cannot_be_changed_under_a_problem() -> None:
    problem = Problem(**_fields())
    with pytest.raises(ValueError, match="read-only"):
        problem.cost[0] = 5.0
    with pytest.raises(TypeError):
        problem.caps["memory"] = 1.0  # type: ignore[index]
    with pytest.raises(dataclasses.FrozenInstanceError):
        problem.offset = 1.0  # type: ignore[misc]


def test_with_caps_replaces_and_keeps() -> None:
    problem = Problem(**_fields(resources={"memory": [1.0] * 3, "time": [1.0] * 3}))
    assert problem.with_caps(time=2.0).finite_caps == {"memory": 10.0, "time": 2.0}
    assert problem.with_caps(memory=math.inf).finite_caps == {}
    with pytest.raises(SolverInputError, match="caps"):
        problem.with_caps(disk=1.0)


def test_names_come_from_a_list_a_function_or_the_index() -> None:
    assert Problem(**_fields()).name(1) == "x1"
    assert Problem(**_fields(names=["a", "b", "c"])).name(1) == "b"
    assert Problem(**_fields(names=lambda j: f"f{j}")).name(1) == "f1"
    text = Problem(**_fields(names=["a", "b", "c"])).row_text(1)
    assert text == "row 1: +1·c -1·a = 0"


def test_bulk_and_single_forms_build_the_same_problem() -> None:
    one, bulk = ProblemBuilder(), ProblemBuilder()
    for cost, memory in ((1.0, 8.0), (2.0, 3.0)):
        one.var(cost=cost, integer=True, memory=memory)
    one.var(cost=0.5, upper=4.0)
    one.eq([(0, 1.0), (1, 1.0)], 1.0)
    one.eq(((2, 1.0), (0, -1.0)), 0.0)
    assert bulk.add_vars([1.0, 2.0], True, {"memory": np.array([8.0, 3.0])}) == range(2)
    assert bulk.add_vars(np.array([0.5]), False, upper=4.0) == range(2, 3)
    bulk.add_rows([0, 2, 4], [0, 1, 2, 0], [1.0, 1.0, 1.0, -1.0], [1.0, 0.0])
    a, b = (builder.build({"memory": 5.0}) for builder in (one, bulk))
    for field in ("cost", "row_start", "row_index", "row_value", "rhs", "integer", "upper"):
        assert np.array_equal(getattr(a, field), getattr(b, field)), field
    assert np.array_equal(a.resources["memory"], b.resources["memory"])
    assert a.upper_bounds.tolist() == [1.0, 1.0, 4.0]
    assert str(a) == "Problem(3 variables, 2 of them integer, 2 rows, 4 terms, memory <= 5)"


def test_builder_fills_in_resources_named_only_by_a_cap() -> None:
    builder = ProblemBuilder()
    builder.var(cost=1.0)
    problem = builder.build({"memory": 5.0}, resource_offset={"disk": 1.0})
    assert {r: v.tolist() for r, v in problem.resources.items()} == {"memory": [0.0], "disk": [0.0]}


def test_builder_names_a_bad_array() -> None:
    builder = ProblemBuilder()
    with pytest.raises(SolverInputError, match=r"resources\['memory'\]"):
        builder.add_vars([1.0, 2.0], True, {"memory": [1.0]})
    with pytest.raises(SolverInputError, match="start"):
        builder.add_rows([1, 2], [0, 0], [1.0, 1.0], [1.0])
    with pytest.raises(SolverInputError, match="value"):
        builder.add_rows([0, 2], [0, 0], [1.0], [1.0])


def test_an_empty_builder_builds_an_empty_problem() -> None:
    problem = ProblemBuilder().build()
    assert (problem.n_variables, problem.n_rows) == (0, 0)
