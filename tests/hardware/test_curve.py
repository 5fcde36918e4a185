"""Curves: interpolation, order, and points that are refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoplan.hardware import Curve

SLACK = 1 + 1e-9
sizes = st.floats(1e-3, 1e15)


@st.composite
def efficiencies(draw: st.DrawFn) -> Curve:
    """Curves that `check_efficiency` accepts."""
    x = draw(st.floats(1.0, 1e6))
    y = draw(st.floats(1e-3, 1.0))
    points = [(x, y)]
    for _ in range(draw(st.integers(0, 4))):
        grow = draw(st.floats(1.01, 1e3))
        x, y = x * grow, min(1.0, y * grow ** draw(st.floats(-1.0, 0.999)))
        points.append((x, y))
    return Curve(tuple(points))


def test_values_at_and_between_points() -> None:
    curve = Curve(((1.0, 1.0), (100.0, 10.0)))
    assert curve.at(1) == 1
    assert curve.at(10) == pytest.approx(10**0.5)
    assert curve.at(100) == curve.at(1e9) == 10
    assert curve.at(0.5) == 1
    assert curve.time_at(200) == 20


@given(efficiencies(), sizes, sizes)
def test_larger_never_takes_less_time(curve: Curve, a: float, b: float) -> None:
    curve.check_efficiency()
    small, large = sorted((a, b))
    assert small / curve.at(small) <= large / curve.at(large) * SLACK


@given(st.lists(st.tuples(st.floats(1, 1e9), st.floats(1e-9, 10)), min_size=1, max_size=6), sizes, sizes)
def test_time_curves_never_fall(pairs: list[tuple[float, float]], a: float, b: float) -> None:
    xs = sorted({x for x, _ in pairs})
    ys = sorted(y for _, y in pairs)
    curve = Curve(tuple(zip(xs, ys[: len(xs)], strict=True)))
    curve.check_time()
    small, large = sorted((a, b))
    assert curve.time_at(small) <= curve.time_at(large) * SLACK


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ((), "at least one point"),
        (((1.0, 0.0),), "above zero"),
        (((1.0, float("nan")),), "finite"),
        (((2.0, 0.5), (1.0, 0.5)), "must rise, but 1 follows 2"),
    ],
)
def test_refused_points(points: tuple[tuple[float, float], ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Curve(points)


def test_refused_efficiencies_and_times() -> None:
    with pytest.raises(ValueError, match="at most 1"):
        Curve(((1.0, 1.5),)).check_efficiency()
    with pytest.raises(ValueError, match="larger would be faster"):
        Curve(((1.0, 0.1), (2.0, 0.9))).check_efficiency()
    with pytest.raises(ValueError, match="must not fall"):
        Curve(((1.0, 2.0), (2.0, 1.0))).check_time()


def test_json_round_trip() -> None:
    curve = Curve(((1.0, 0.5), (2.0, 0.75)))
    assert Curve.from_json(curve.to_json()) == curve
