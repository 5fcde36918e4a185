"""The lower convex hull of what a problem can do in (resource, cost), by the chord rule.

A point that minimises cost + λ·resource is a vertex of the lower hull. Two neighbours (m1, c1), (m2, c2), m1 > m2,
are joined by an edge of the hull unless some point lies below their chord, and the multiplier that finds it is

    λ = (c2 - c1) / (m1 - m2)                                                       (1)  `_chord`

Each known vertex with its multiplier also gives a supporting line c = L - λ m that no point lies below. The lines of
two neighbours meet at m* = (L2 - L1) / (λ2 - λ1); between them no hull can be further below the chord than

    gap = c1 + λ (m1 - m*) - (L1 - λ1 m*)                                           (2)  `_room`

so the chord with the largest gap is refined first, and one without a gap never.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from autoplan_solver.backends.highs_lp import (
    Direction,
    LagrangianPoint,
    LagrangianSolver,
    direction_weights,
)
from autoplan_solver.errors import NoSolutionError, SolverInputError
from autoplan_solver.problem import Problem

__all__ = ["lower_hull", "lower_hull_indices", "sweep"]

_RELATIVE_TOLERANCE = 1e-7
_GROWTH = 32.0  # of the multiplier in the search for the least-resource end
_MAX_GROWTHS = 12


def lower_hull_indices(resource: ArrayLike, cost: ArrayLike) -> list[int]:
    """Indices of the vertices of the lower-left convex hull, from the cheapest point to the one of least resource.

    Points that cost no less and use no less than another are left out; so are points on or above a chord.

    >>> lower_hull_indices([10.0, 6.0, 5.0, 2.0], [1.0, 2.0, 4.0, 5.0])
    [0, 1, 3]
    """
    m, c = np.asarray(resource, dtype=np.float64), np.asarray(cost, dtype=np.float64)
    hull: list[int] = []
    for i in (int(i) for i in np.lexsort((m, c))):
        if hull and m[i] >= m[hull[-1]]:
            continue  # dominated: an earlier point costs no more and uses no more
        while len(hull) >= 2:
            a, b = hull[-2], hull[-1]
            if (c[b] - c[a]) * (m[b] - m[i]) < (c[i] - c[b]) * (m[a] - m[b]):
                break  # b lies strictly below the chord from a to i
            hull.pop()
        hull.append(i)
    return hull


def lower_hull(points: Sequence[LagrangianPoint], direction: Direction) -> list[LagrangianPoint]:
    """The points on the lower-left convex hull in (``direction``, cost), cheapest first; points without x left out.

    Raises:
        SolverInputError: a point does not have such a resource.
    """
    weights = direction_weights(direction)
    kept = [p for p in points if p.x is not None]
    missing = sorted({r for p in kept for r in weights if r not in p.resources})
    if missing:
        raise SolverInputError(f"unknown resources {missing}; a point has {sorted(kept[0].resources)}")
    hull = lower_hull_indices([_weighted(weights, p) for p in kept], [p.cost for p in kept])
    return [kept[i] for i in hull]


def sweep(
    problem: Problem,
    direction: Direction,
    *,
    n_points: int = 8,
    fixed: Mapping[str, float] | None = None,
    solver: LagrangianSolver | None = None,
) -> list[LagrangianPoint]:
    """Up to ``n_points`` vertices of the lower hull in (``direction``, cost), cheapest first.

    The first is the cheapest point (among equals, of least resource), the last the one of least resource (among
    equals, the cheapest); between them the chords with the largest possible gap are refined. Deterministic.

    Args:
        problem: its caps are not imposed.
        direction: what to trade against cost: a resource, or a weighted sum such as static + 4 · kept.
        n_points: most vertices to return, at least 1; 1 is the cheapest point alone.
        fixed: multipliers of other resources, held; the cost axis is then cost plus their price.
        solver: a solver of this problem to go on with, warm; a new one where absent.

    Raises:
        SolverInputError: unknown resource, or a bad argument.
        NoSolutionError: the problem has no solution even without caps.
        SolverError: HiGHS broke down.
    """
    weights, fixed = direction_weights(direction), dict(fixed or {})
    if n_points < 1 or set(fixed) & set(weights):
        raise SolverInputError(f"n_points must be >= 1 and fixed must not name {sorted(weights)}")
    return _Sweep(solver or LagrangianSolver(problem), weights, fixed).run(n_points)


def _weighted(weights: Mapping[str, float], point: LagrangianPoint) -> float:
    return sum(w * point.resources[r] for r, w in weights.items())


@dataclass(frozen=True, eq=False)
class _Vertex:
    """A point on the axes of a sweep: use of the direction, cost with fixed prices, and λ along the direction."""

    point: LagrangianPoint
    use: float
    cost: float
    multiplier: float

    @property
    def line(self) -> float:
        """L of the supporting line c = L - λ m."""
        return self.point.lagrangian


class _Sweep:
    """One sweep: a solver and the two axes."""

    def __init__(self, solver: LagrangianSolver, weights: dict[str, float], fixed: dict[str, float]) -> None:
        self.solver, self.weights, self.fixed = solver, weights, fixed

    def run(self, n_points: int) -> list[LagrangianPoint]:
        """The vertices found, cheapest first."""
        start = self.solver.solve(self._multipliers(0.0), prefer=self.weights)
        first = self._vertex(start, 0.0)
        if first is None:
            raise NoSolutionError(f"no point to start a sweep from: the problem without caps is {start.status}")
        last = self._least_end(first) if n_points > 1 else None
        chain = [first] if last is None else [first, last]
        edges: set[tuple[float, float]] = set()  # by their ends' uses: chords already known to be edges of the hull
        while len(chain) < n_points:
            rooms = [0.0 if (a.use, b.use) in edges else _room(a, b) for a, b in itertools.pairwise(chain)]
            if max(rooms, default=0.0) <= 0.0:
                break
            at = rooms.index(max(rooms))
            below = self._below(chain[at], chain[at + 1])
            if below is None:
                edges.add((chain[at].use, chain[at + 1].use))
            else:
                chain.insert(at + 1, below)
        return [chain[i].point for i in lower_hull_indices([v.use for v in chain], [v.cost for v in chain])]

    def _multipliers(self, multiplier: float) -> dict[str, float]:
        return {**self.fixed, **{r: multiplier * w for r, w in self.weights.items()}}

    def _vertex(self, point: LagrangianPoint, multiplier: float) -> _Vertex | None:
        if point.x is None:
            return None
        cost = point.cost + _weighted(self.fixed, point)
        return _Vertex(point, _weighted(self.weights, point), cost, multiplier)

    def _solve(self, multiplier: float) -> _Vertex | None:
        return self._vertex(self.solver.solve(self._multipliers(multiplier)), multiplier)

    def _least_end(self, first: _Vertex) -> _Vertex | None:
        """The cheapest point of least use, found by letting the multiplier grow until the least is reached."""
        least = self._vertex(self.solver.least(self.weights), math.inf)
        if least is None:
            return None
        tolerance = _RELATIVE_TOLERANCE * max(abs(first.use), abs(least.use))
        if first.use - least.use <= tolerance or least.cost <= first.cost:
            return None
        multiplier, found = _chord(first, least), None
        for _ in range(_MAX_GROWTHS):
            found = self._solve(multiplier) or found
            if found is not None and found.use <= least.use + tolerance:
                break
            multiplier *= _GROWTH
        return found

    def _below(self, a: _Vertex, b: _Vertex) -> _Vertex | None:
        """The vertex furthest below the chord from ``a`` to ``b``, or None where the chord is an edge."""
        chord = _chord(a, b)
        vertex = self._solve(chord)
        if vertex is None or not b.use < vertex.use < a.use:
            return None
        depth = a.cost + chord * (a.use - vertex.use) - vertex.cost
        return vertex if depth > _tolerance(a, b) else None


def _chord(a: _Vertex, b: _Vertex) -> float:
    """Equation (1)."""
    return (b.cost - a.cost) / (a.use - b.use)


def _room(a: _Vertex, b: _Vertex) -> float:
    """Equation (2), 0 where it is within tolerance."""
    if a.use <= b.use or not a.multiplier < _chord(a, b) < b.multiplier:
        return 0.0
    meet = (b.line - a.line) / (b.multiplier - a.multiplier)
    gap = a.cost + _chord(a, b) * (a.use - meet) - (a.line - a.multiplier * meet)
    return gap if gap > _tolerance(a, b) else 0.0


def _tolerance(a: _Vertex, b: _Vertex) -> float:
    """Cost differences below this are rounding."""
    return _RELATIVE_TOLERANCE * max(abs(a.cost), abs(b.cost), abs(_chord(a, b) * a.use))
