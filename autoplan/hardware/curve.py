"""Positive functions of a size, given by points and joined by straight lines between the logarithms of both.

Between neighbouring points (x₀, y₀), (x₁, y₁):

(1)  y(x) = y₀ · (x / x₀)^p,  p = ln(y₁/y₀) / ln(x₁/x₀)        `Curve.at`

An efficiency is constant outside its points. A time of x ≥ x_last grows in proportion to x; of x ≤ x_first it stays the
same. Power laws keep order: a time curve whose points do not fall never falls, and the time x / y(x) of an efficiency
never falls where that of its points does not, since then p ≤ 1 in (1).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

Points = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Curve:
    """Points (x, y), x rising, all positive."""

    points: Points

    def __post_init__(self) -> None:
        if not self.points:
            raise ValueError("a curve needs at least one point")
        if any(not (math.isfinite(v) and v > 0) for point in self.points for v in point):
            raise ValueError("the points of a curve must be finite and above zero")
        for (a, _), (b, _) in pairwise(self.points):
            if a >= b:
                raise ValueError(f"the sizes of a curve must rise, but {b:g} follows {a:g}")

    def at(self, x: float) -> float:
        """The value at x > 0, constant outside the points."""
        points = self.points
        if x <= points[0][0]:
            return points[0][1]
        if x >= points[-1][0]:
            return points[-1][1]
        i = bisect_right(points, x, key=_size)
        (x0, y0), (x1, y1) = points[i - 1], points[i]
        return y0 * math.pow(x / x0, math.log(y1 / y0) / math.log(x1 / x0))

    def time_at(self, x: float) -> float:
        """The value at x > 0, growing in proportion to x beyond the last point."""
        last, seconds = self.points[-1]
        return seconds * (x / last) if x > last else self.at(x)

    def check_time(self) -> None:
        """Checks that a curve of seconds never falls.

        Raises:
            ValueError: It falls between two points.
        """
        for (a, s), (b, t) in pairwise(self.points):
            if t < s:
                raise ValueError(f"seconds must not fall with size, but {t:g} at {b:g} follows {s:g} at {a:g}")

    def check_efficiency(self) -> None:
        """Checks that fractions are at most 1 and that size / fraction, a time, never falls.

        Raises:
            ValueError: It is no efficiency, or a larger op would take less time.
        """
        for x, y in self.points:
            if y > 1:
                raise ValueError(f"an efficiency is at most 1, but is {y:g} at {x:g}")
        for (a, s), (b, t) in pairwise(self.points):
            if b / t < a / s:
                raise ValueError(
                    f"efficiency rises from {s:g} to {t:g} between {a:g} and {b:g}: larger would be faster"
                )

    def to_json(self) -> list[list[float]]:
        """The points as lists."""
        return [list(point) for point in self.points]

    @classmethod
    def from_json(cls, data: Sequence[Sequence[float]]) -> Curve:
        """Inverse of `to_json`."""
        return cls(tuple((x, y) for x, y in data))


def _size(point: tuple[float, float]) -> float:
    return point[0]
