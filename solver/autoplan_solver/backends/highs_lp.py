"""The Lagrangian relaxation of a problem, solved as one warm-started linear program.

Caps are priced by multipliers λ_r >= 0 (seconds per unit of resource) instead of imposed:

    L(λ) = min  cost · x + offset + Σ_r λ_r (resource_r · x + resource_offset_r)    (1)  `LagrangianSolver.solve`
           s.t. A x = b,  0 <= x <= upper                     (linear relaxation)

    min of the capped integer problem  >=  max_λ  L(λ) - Σ_r λ_r cap_r              (2)  `dual_bound`

The reported L(λ) is the dual objective of the row duals y, a valid bound whatever the solver's tolerances,

    L(λ) >= b · y + Σ_j min(0, w_j - (A'y)_j) upper_j,   w = cost + Σ_r λ_r resource_r   (3)  `_safe_bound`

The edge-marginal problems of the planner nearly always have integral optima. Where one is fractional, the weights are
perturbed by parts in 1e7 and 1e5 to leave the tie, and failing that the same rows are branched on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import highspy
import numpy as np

from autoplan_solver.backends.highs_model import clean, fractional, new_model, power_of_two_scale, run_model
from autoplan_solver.errors import SolverError, SolverInputError
from autoplan_solver.problem import FloatArray, Problem

__all__ = ["Direction", "LagrangianPoint", "LagrangianSolver", "LagrangianStatus", "direction_weights", "dual_bound"]

Direction = str | Mapping[str, float]
"""One resource, or a weighted sum of several, e.g. ``{"static": 1.0, "kept": 4.0}`` with 4 microbatches in flight."""

LagrangianStatus = Literal["integral", "perturbed", "branched", "limit", "infeasible", "unbounded"]

_PERTURBATIONS = (1e-7, 1e-5)
_MIP_GAP = 1e-4
_DUAL_TOLERANCE = 1e-7  # of reduced costs, in scaled units: HiGHS's own
_TIE_TOLERANCE = 1e-9  # relative: how much a tie break may cost


@dataclass(frozen=True, eq=False)
class LagrangianPoint:
    """One solution of equation (1).

    Args:
        multipliers: resource name -> λ_r, in seconds per unit.
        status: "integral" (the linear optimum was), "perturbed" (a tie had to be broken), "branched" (within 1e-4
            of the optimum), "limit" (nodes ran out; ``x`` is the best found or None), "infeasible", "unbounded".
        x: an integral point, shape (n,), or None.
        cost: its true cost in seconds, offset included, multipliers left out; inf without a point.
        resources: resource name -> its use, offset included; empty without a point.
        lagrangian: L(λ) in seconds, the bound of equation (3).
        integral: whether the first linear optimum was integral.
        n_fractional: how many of its integer variables were not.
        solve_s: wall-clock seconds spent.
    """

    multipliers: Mapping[str, float]
    status: LagrangianStatus
    x: FloatArray | None = field(repr=False)
    cost: float
    resources: Mapping[str, float]
    lagrangian: float
    integral: bool
    n_fractional: int
    solve_s: float

    @property
    def priced(self) -> float:
        """Cost plus priced resources of ``x`` in seconds: equals ``lagrangian`` where the relaxation is tight."""
        return self.cost + sum(m * self.resources.get(r, 0.0) for r, m in self.multipliers.items())

    def __str__(self) -> str:
        prices = ", ".join(f"λ_{r}={m:.4g}" for r, m in self.multipliers.items()) or "λ=0"
        uses = "".join(f", {r} {v:.6g}" for r, v in self.resources.items())
        return f"{prices}: {self.cost:.6g} s{uses} ({self.status}, {self.n_fractional} fractional)"


class LagrangianSolver:
    """Solves equation (1) again and again for one problem, each time from the last basis.

    Args:
        problem: its rows, bounds, costs and resources; its caps are not imposed.
        threads: threads HiGHS may use; 1 is deterministic and rarely slower.
        max_nodes: nodes to branch on before giving up where the relaxation stays fractional (a count, not a time,
            so that equal input gives equal output).
    """

    def __init__(self, problem: Problem, *, threads: int = 1, max_nodes: int = 10_000) -> None:
        self.problem = problem
        self._threads = threads
        self._max_nodes = max_nodes
        self._columns = np.arange(problem.n_variables, dtype=np.int32)
        self._model = new_model(problem, problem.cost, integer=False, threads=threads)
        self._model.setOptionValue("solver", "simplex")  # only vertices are integral, and only bases are warm

    def solve(self, multipliers: Mapping[str, float], *, prefer: Direction | None = None) -> LagrangianPoint:
        """Equation (1) at ``multipliers``; resources not named are free.

        Args:
            multipliers: resource name -> λ_r >= 0, in seconds per unit.
            prefer: among equally good points take one that uses least of this.

        Raises:
            SolverInputError: an unknown resource, or a multiplier that is negative or not finite.
            SolverError: HiGHS broke down.
        """
        priced, constant = self._priced("multipliers", multipliers)
        second = None if prefer is None else self._priced("prefer", direction_weights(prefer))[0]
        return self._solve(self.problem.cost + priced, multipliers, self.problem.offset + constant, second)

    def least(self, direction: Direction) -> LagrangianPoint:
        """The cheapest of the points that use least of ``direction``; ``lagrangian`` is then that use, in its unit.

        Raises:
            SolverInputError: an unknown resource.
            SolverError: HiGHS broke down.
        """
        weights, constant = self._priced("direction", direction_weights(direction))
        return self._solve(weights, {}, constant, self.problem.cost)

    def _priced(self, what: str, prices: Mapping[str, float]) -> tuple[FloatArray, float]:
        """Σ price_r · resource_r, per variable and for the offsets."""
        weights, constant = np.zeros(self.problem.n_variables), 0.0
        for r, price in prices.items():
            if r not in self.problem.resources:
                raise SolverInputError(f"unknown resource {r!r}; this problem has {sorted(self.problem.resources)}")
            if not 0.0 <= price < math.inf:
                raise SolverInputError(f"{what}[{r!r}] is {price}; it must be finite and >= 0")
            if price:
                weights += price * self.problem.resources[r]
                constant += price * self.problem.resource_offset.get(r, 0.0)
        return weights, constant

    def _solve(
        self, weights: FloatArray, multipliers: Mapping[str, float], constant: float, second: FloatArray | None
    ) -> LagrangianPoint:
        began = time.perf_counter()
        verdict, x, duals = self._linear(weights)
        if x is None:
            bound = math.inf if verdict == "infeasible" else -math.inf
            return self._point(multipliers, verdict, None, bound, 0, began)
        bound = self._safe_bound(weights, duals) + constant
        n_fractional = fractional(self.problem, x)
        if second is not None:
            x = self._break_ties(weights, x, duals, second)
        status: LagrangianStatus = "integral"
        point: FloatArray | None = x
        if fractional(self.problem, x):
            status, point = self._make_integral(weights, bound - constant)
        return self._point(multipliers, status, point, bound, n_fractional, began)

    def _point(
        self,
        multipliers: Mapping[str, float],
        status: LagrangianStatus,
        x: FloatArray | None,
        bound: float,
        n_fractional: int,
        began: float,
    ) -> LagrangianPoint:
        cost, resources = math.inf, dict[str, float]()
        if x is not None:
            x = clean(self.problem, x)
            cost, resources = self.problem.objective(x), self.problem.resource_values(x)
        return LagrangianPoint(
            multipliers=dict(multipliers),
            status=status,
            x=x,
            cost=cost,
            resources=resources,
            lagrangian=bound,
            integral=n_fractional == 0 and x is not None,
            n_fractional=n_fractional,
            solve_s=time.perf_counter() - began,
        )

    def _linear(self, weights: FloatArray) -> tuple[LagrangianStatus, FloatArray | None, FloatArray]:
        """The linear optimum: (status, x, row duals in the unit of ``weights``)."""
        scale, kinds = power_of_two_scale(weights), highspy.HighsModelStatus
        self._model.changeColsCost(len(self._columns), self._columns, weights * scale)
        status = run_model(self._model)
        if status not in (kinds.kOptimal, kinds.kInfeasible, kinds.kUnbounded, kinds.kModelEmpty):
            self._model.clearSolver()  # the last basis may have led it astray: once more from scratch
            status = run_model(self._model)
        if status == kinds.kInfeasible:
            return "infeasible", None, np.zeros(0)
        if status == kinds.kUnbounded:
            return "unbounded", None, np.zeros(0)
        if status not in (kinds.kOptimal, kinds.kModelEmpty):
            raise SolverError(f"HiGHS broke down: {self._model.modelStatusToString(status)}, on {self.problem}")
        solution = self._model.getSolution()
        return "integral", np.array(solution.col_value), np.array(solution.row_dual) / scale

    def _reduced_costs(self, weights: FloatArray, duals: FloatArray) -> FloatArray:
        problem = self.problem
        terms = problem.row_value * duals[problem.term_row]
        reduced: FloatArray = weights - np.bincount(problem.row_index, weights=terms, minlength=problem.n_variables)
        return reduced

    def _safe_bound(self, weights: FloatArray, duals: FloatArray) -> float:
        """Equation (3), without constants; a variable without upper bound counts as dual feasible."""
        reduced = np.minimum(self._reduced_costs(weights, duals), 0.0)
        finite = np.isfinite(self.problem.upper_bounds)
        return float(self.problem.rhs @ duals + reduced[finite] @ self.problem.upper_bounds[finite])

    def _break_ties(self, weights: FloatArray, x: FloatArray, duals: FloatArray, second: FloatArray) -> FloatArray:
        """Minimises ``second`` over the optimal face: variables with a reduced cost stay at their bound."""
        reduced = self._reduced_costs(weights, duals) * power_of_two_scale(weights)
        upper = self.problem.upper_bounds
        lower = np.where(reduced < -_DUAL_TOLERANCE, upper, 0.0)
        face = np.where(reduced > _DUAL_TOLERANCE, 0.0, upper)
        count = len(self._columns)
        self._model.changeColsBounds(count, self._columns, lower, face)
        _, tied, _ = self._linear(second)
        self._model.changeColsBounds(count, self._columns, np.zeros(count), upper)
        allowed = _TIE_TOLERANCE * float(np.abs(weights) @ x)
        if tied is None or fractional(self.problem, tied) or weights @ tied > weights @ x + allowed:
            return x
        return tied

    def _make_integral(self, weights: FloatArray, optimum: float) -> tuple[LagrangianStatus, FloatArray | None]:
        """An integral point for ``weights`` whose linear optimum is fractional: perturb, else branch."""
        magnitude = np.abs(weights)
        noise = np.random.default_rng(0).random(len(weights)) * (magnitude + magnitude.mean())
        for size in _PERTURBATIONS:
            _, x, _ = self._linear(weights + size * noise)
            near = x is not None and weights @ x - optimum <= _MIP_GAP * float(magnitude @ x)
            if x is not None and near and not fractional(self.problem, x):
                return "perturbed", x
        return self._branch(weights)

    def _branch(self, weights: FloatArray) -> tuple[LagrangianStatus, FloatArray | None]:
        scaled = weights * power_of_two_scale(weights)
        model = new_model(self.problem, scaled, integer=True, threads=self._threads)
        model.setOptionValue("mip_rel_gap", _MIP_GAP)
        model.setOptionValue("mip_max_nodes", self._max_nodes)
        status = run_model(model)
        if status == highspy.HighsModelStatus.kInfeasible:
            return "infeasible", None
        x = np.array(model.getSolution().col_value)
        found = math.isfinite(model.getInfo().mip_gap) and len(x) == len(weights)
        if not found or fractional(self.problem, x):
            return "limit", None
        return ("branched" if status == highspy.HighsModelStatus.kOptimal else "limit"), x


def direction_weights(direction: Direction) -> dict[str, float]:
    """A `Direction` as weights by resource name.

    Raises:
        SolverInputError: it names no resource, or a weight is not positive and finite.
    """
    weights = {direction: 1.0} if isinstance(direction, str) else dict(direction)
    if not weights or not all(0.0 < w < math.inf for w in weights.values()):
        raise SolverInputError(f"a direction needs resources with positive finite weights, got {weights}")
    return weights


def dual_bound(points: Iterable[LagrangianPoint], caps: Mapping[str, float]) -> float:
    """Equation (2): the best lower bound, in seconds, that ``points`` give under ``caps``; -inf where none does.

    A point that prices a resource without a finite cap gives no bound.
    """
    best = -math.inf
    for point in points:
        charge = sum(m * caps.get(r, math.inf) for r, m in point.multipliers.items() if m > 0)
        if math.isfinite(charge):
            best = max(best, point.lagrangian - charge)
    return best
