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

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike

from autoplan_solver.backends.highs_lp import LagrangianPoint, LagrangianSolver
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


def lower_hull(points: Sequence[LagrangianPoint], resource: str) -> list[LagrangianPoint]:
    """The points on the lower-left convex hull in (``resource``, cost), cheapest first; points without x left out.

    Raises:
        SolverInputError: a point does not have this resource.
    """
    kept = [p for p in points if p.x is not None]
    if any(resource not in p.resources for p in kept):
        raise SolverInputError(f"unknown resource {resource!r}; a point has {sorted(kept[0].resources)}")
    hull = lower_hull_indices([p.resources[resource] for p in kept], [p.cost for p in kept])
    return [kept[i] for i in hull]


def sweep(
    problem: Problem,
    resource: str,
    *,
    n_points: int = 8,
    fixed: Mapping[str, float] | None = None,
    solver: LagrangianSolver | None = None,
) -> list[LagrangianPoint]:
    """Up to ``n_points`` vertices of the lower hull in (``resource``, cost), cheapest first.

    The first is the cheapest point (among equals, of least resource), the last the one of least resource (among
    equals, the cheapest); between them the chords with the largest possible gap are refined. Deterministic.

    Args:
        problem: its caps are not imposed.
        resource: the resource to trade against cost.
        n_points: most vertices to return, at least 1; 1 is the cheapest point alone.
        fixed: multipliers of other resources, held; the cost axis is then cost plus their price.
        solver: a solver of this problem to go on with, warm; a new one where absent.

    Raises:
        SolverInputError: unknown resource, or a bad argument.
        NoSolutionError: the problem has no solution even without caps.
    """
    if n_points < 1 or (fixed and resource in fixed):
        raise SolverInputError(f"n_points must be >= 1 and fixed must not name {resource!r}")
    search = _Sweep(solver or LagrangianSolver(problem), resource, dict(fixed or {}))
    return search.run(n_points)


class _Sweep:
    """The state of one sweep: a solver and the axes."""

    def __init__(self, solver: LagrangianSolver, resource: str, fixed: dict[str, float]) -> None:
        self.solver, self.resource, self.fixed = solver, resource, fixed

    def run(self, n_points: int) -> list[LagrangianPoint]:
        first = self.solver.solve({**self.fixed, self.resource: 0.0}, prefer=self.resource)
        if first.x is None:
            raise NoSolutionError(f"no point to start a sweep from: the problem without caps is {first.status}")
        if n_points == 1:
            return [first]
        chain = [first]
        last = self._least_end(first)
        if last is not None:
            chain.append(last)
        closed: set[tuple[int, int]] = set()
        while len(chain) < n_points:
            chords = [(i, i + 1) for i in range(len(chain) - 1) if (id(chain[i]), id(chain[i + 1])) not in closed]
            rooms = [self._room(chain[i], chain[j]) for i, j in chords]
            best = max(range(len(chords)), key=rooms.__getitem__, default=None)
            if best is None or rooms[best] <= 0.0:
                break
            i, j = chords[best]
            new = self._below(chain[i], chain[j])
            if new is None:
                closed.add((id(chain[i]), id(chain[j])))
            else:
                chain.insert(j, new)
        return self._hull(chain)

    def _cost(self, point: LagrangianPoint) -> float:
        return point.cost + sum(m * point.resources[r] for r, m in self.fixed.items())

    def _solve(self, multiplier: float) -> LagrangianPoint:
        return self.solver.solve({**self.fixed, self.resource: multiplier})

    def _hull(self, chain: Sequence[LagrangianPoint]) -> list[LagrangianPoint]:
        hull = lower_hull_indices([p.resources[self.resource] for p in chain], [self._cost(p) for p in chain])
        return [chain[i] for i in hull]

    def _least_end(self, first: LagrangianPoint) -> LagrangianPoint | None:
        """The cheapest point of least resource, found by letting the multiplier grow until the least is reached."""
        least = self.solver.least(self.resource)
        most, target = first.resources[self.resource], least.resources.get(self.resource, least.lagrangian)
        tolerance = _RELATIVE_TOLERANCE * max(abs(most), abs(target))
        if least.x is None or most - target <= tolerance:
            return None
        multiplier = self._chord(first, least)
        if multiplier <= 0.0:
            return None
        found = None
        for _ in range(_MAX_GROWTHS):
            point = self._solve(multiplier)
            if point.x is not None:
                found = point
                if point.resources[self.resource] <= target + tolerance:
                    break
            multiplier *= _GROWTH
        return found

    def _chord(self, a: LagrangianPoint, b: LagrangianPoint) -> float:
        """Equation (1)."""
        return (self._cost(b) - self._cost(a)) / (a.resources[self.resource] - b.resources[self.resource])

    def _room(self, a: LagrangianPoint, b: LagrangianPoint) -> float:
        """Equation (2), 0 where it is within tolerance."""
        if a.resources[self.resource] <= b.resources[self.resource] or self._cost(b) <= self._cost(a):
            return 0.0
        (la, lb), chord = (p.multipliers[self.resource] for p in (a, b)), self._chord(a, b)
        if not la < chord < lb:
            return 0.0
        meet = (b.lagrangian - a.lagrangian) / (lb - la)
        gap = self._cost(a) + chord * (a.resources[self.resource] - meet) - (a.lagrangian - la * meet)
        return gap if gap > self._tolerance(a, b) else 0.0

    def _tolerance(self, a: LagrangianPoint, b: LagrangianPoint) -> float:
        priced = abs(self._chord(a, b) * a.resources[self.resource])
        return _RELATIVE_TOLERANCE * max(abs(self._cost(a)), abs(self._cost(b)), priced)

    def _below(self, a: LagrangianPoint, b: LagrangianPoint) -> LagrangianPoint | None:
        """The vertex furthest below the chord from ``a`` to ``b``, or None where the chord is an edge."""
        chord = self._chord(a, b)
        point = self._solve(chord)
        if point.x is None or not math.isfinite(point.cost):
            return None
        use = point.resources[self.resource]
        if not b.resources[self.resource] < use < a.resources[self.resource]:
            return None
        depth = self._cost(a) + chord * (a.resources[self.resource] - use) - self._cost(point)
        return point if depth > self._tolerance(a, b) else None
