"""Integer programs stated in PuLP, solved by HiGHS or CBC. The only file that imports pulp.

    minimise  s · cost · x      s = the power of two of `power_of_two_scale`        (1)  `_state`
    s.t.      A x = b
              t_r · resource_r · x <= t_r (cap_r - resource_offset_r)               (2)  `_state`

Scaling by powers of two is exact and keeps seconds and bytes clear of the solvers' absolute tolerances. The bound
reported is the solver's own where it proves one (HiGHS: its dual bound; CBC: the lower bound of its log, or the
objective once it says optimal), and at least the linear relaxation's.
"""

from __future__ import annotations

import math
import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import highspy
import numpy as np
import pulp  # type: ignore[import-untyped, unused-ignore]

from autoplan_solver.backends.highs_model import (
    add_cap_rows,
    clean,
    empty_model,
    fractional,
    new_model,
    power_of_two_scale,
    run_model,
)
from autoplan_solver.errors import BackendUnavailableError, SolverError, SolverInputError
from autoplan_solver.problem import FloatArray, Problem
from autoplan_solver.solution import Solution, Status, no_solution, solution_at

__all__ = ["cbc_available", "solve_integer", "to_pulp"]


@dataclass(frozen=True)
class _Request:
    """What a solver is asked beyond the model; ``gap`` is relative."""

    time_limit_s: float | None
    gap: float
    warm_start: FloatArray | None
    threads: int


@dataclass(frozen=True, eq=False)
class _Answer:
    """What a solver says, in scaled units: bound is -inf where it proved none."""

    status: Status
    x: FloatArray | None
    bound: float


@dataclass(frozen=True, eq=False)
class _Stated:
    """A problem in PuLP: the model, its variables in the problem's order, and equation (1)'s scale."""

    model: Any
    variables: list[Any]
    scale: float


def solve_integer(
    problem: Problem,
    *,
    backend: str = "highs",
    time_limit_s: float | None = None,
    gap: float = 1e-4,
    warm_start: FloatArray | None = None,
    threads: int = 1,
) -> Solution:
    """Solves the capped 0/1 problem to proven optimality within ``gap``, or as far as the time limit allows.

    Prints nothing. Deterministic unless a time limit cuts it short.

    Args:
        problem: the problem; finite caps become rows.
        backend: "highs" or "cbc".
        time_limit_s: wall-clock seconds for the search, or None; stating the model, and one linear relaxation
            where the search was cut short, come on top.
        gap: relative gap at which to stop.
        warm_start: a point to start from, shape (n,); it may be infeasible, and is then of no help.
        threads: threads the solver may use.

    Raises:
        SolverInputError: unknown back end, or a malformed argument.
        BackendUnavailableError: the back end cannot run here.
        SolverError: the back end broke down.
    """
    if backend not in _SOLVERS:
        raise SolverInputError(f"unknown backend {backend!r}; known integer back ends: {sorted(_SOLVERS)}")
    if gap < 0 or threads < 1 or (time_limit_s is not None and time_limit_s <= 0):
        raise SolverInputError("gap must be >= 0, threads >= 1 and time_limit_s > 0")
    if warm_start is not None and np.shape(warm_start) != (problem.n_variables,):
        raise SolverInputError(f"warm_start must have shape ({problem.n_variables},), got {np.shape(warm_start)}")
    began = time.perf_counter()
    if problem.n_variables == 0:
        return _without_variables(problem, backend)
    stated = _state(problem)
    answer = _SOLVERS[backend](stated, problem, _Request(time_limit_s, gap, warm_start, threads))
    x = None if answer.x is None else clean(problem, answer.x)
    if x is not None and fractional(problem, x):
        x = None  # CBC hands out its linear relaxation when it ran out of time before the first integer point
    bound = answer.bound / stated.scale + problem.offset
    if answer.status in ("feasible", "limit"):  # cut off before its root relaxation, a solver knows little
        bound = max(bound, _relaxation_bound(problem, threads))
    solve_s = time.perf_counter() - began
    if x is None:
        status: Status = "limit" if answer.status in ("optimal", "feasible") else answer.status
        return no_solution(status, bound=bound, solve_s=solve_s, backend=backend)
    return solution_at(problem, x, status=answer.status, bound=bound, solve_s=solve_s, backend=backend)


def to_pulp(problem: Problem) -> Any:
    """The problem as a ``pulp.LpProblem`` to read, extend or export, scaled as equations (1) and (2)."""
    return _state(problem).model


def cbc_available() -> bool:
    """Whether the CBC that PuLP bundles, or one on the path, can run here."""
    return bool(_new_cbc().available())


def _state(problem: Problem) -> _Stated:
    """Equations (1) and (2); names are ``v<index>_<name>`` so that they are unique and sort in the problem's order."""
    model = pulp.LpProblem("autoplan", pulp.LpMinimize)
    width = len(str(problem.n_variables))
    variables = []
    for j in range(problem.n_variables):
        upper = float(problem.upper_bounds[j])
        kind = pulp.LpInteger if problem.integer[j] else pulp.LpContinuous
        label = re.sub(r"\W+", "_", problem.name(j), flags=re.ASCII)
        variables.append(model.add_variable(f"v{j:0{width}d}_{label}", 0, upper if upper < math.inf else None, kind))
    scale = power_of_two_scale(problem.cost)
    model.setObjective(_expression(variables, range(problem.n_variables), problem.cost * scale))
    start = problem.row_start.tolist()
    for i, rhs in enumerate(problem.rhs.tolist()):
        span = slice(start[i], start[i + 1])
        row = _expression(variables, problem.row_index[span].tolist(), problem.row_value[span])
        model.addConstraint(pulp.LpConstraint(row, pulp.LpConstraintEQ, f"row{i}", rhs))
    for resource, cap in problem.finite_caps.items():
        use = problem.resources[resource]
        used = np.flatnonzero(use).tolist()
        left = cap - problem.resource_offset.get(resource, 0.0)
        factor = power_of_two_scale(use)
        row = _expression(variables, used, use[used] * factor)
        name = "cap_" + re.sub(r"\W+", "_", resource, flags=re.ASCII)
        model.addConstraint(pulp.LpConstraint(row, pulp.LpConstraintLE, name, left * factor))
    return _Stated(model, variables, scale)


def _expression(variables: list[Any], indices: Any, values: FloatArray) -> Any:
    total: dict[Any, float] = {}
    for j, value in zip(indices, values.tolist(), strict=True):
        total[variables[j]] = total.get(variables[j], 0.0) + value
    return pulp.LpAffineExpression(total)


def _without_variables(problem: Problem, backend: str) -> Solution:
    x = np.zeros(0)
    met = not problem.rhs.any() and all(problem.resource_values(x)[r] <= c for r, c in problem.finite_caps.items())
    if not met:
        return no_solution("infeasible", bound=math.inf, solve_s=0.0, backend=backend)
    return solution_at(problem, x, status="optimal", bound=problem.offset, solve_s=0.0, backend=backend)


def _relaxation_bound(problem: Problem, threads: int) -> float:
    """The linear relaxation's optimum, -inf where it has none."""
    scale = power_of_two_scale(problem.cost)
    model = new_model(problem, problem.cost * scale, integer=False, threads=threads)
    add_cap_rows(model, problem)
    if run_model(model) != highspy.HighsModelStatus.kOptimal:
        return -math.inf
    return model.getInfo().objective_function_value / scale + problem.offset


class _Highs(pulp.HiGHS):  # type: ignore[misc, unused-ignore]
    """PuLP's HiGHS on a silent model of ours, with a warm start."""

    def __init__(self, request: _Request) -> None:
        super().__init__(msg=False)
        self._request = request

    def createAndConfigureSolver(self, lp: Any) -> None:
        lp.solverModel = empty_model(threads=self._request.threads)
        lp.solverModel.setOptionValue("mip_rel_gap", self._request.gap)
        if self._request.time_limit_s is not None:
            lp.solverModel.setOptionValue("time_limit", float(self._request.time_limit_s))

    def callSolver(self, lp: Any) -> None:
        if self._request.warm_start is not None:
            point = highspy.HighsSolution()
            point.col_value = np.asarray(self._request.warm_start, dtype=np.float64)
            lp.solverModel.setSolution(point)
        run_model(lp.solverModel)


def _solve_highs(stated: _Stated, problem: Problem, request: _Request) -> _Answer:
    solver = _Highs(request)
    stated.model.solve(solver)
    highs: highspy.Highs = stated.model.solverModel
    status, info = highs.getModelStatus(), highs.getInfo()
    kinds = highspy.HighsModelStatus
    if status in (kinds.kInfeasible, kinds.kUnboundedOrInfeasible):
        return _Answer("infeasible", None, math.inf)
    if status == kinds.kUnbounded:
        return _Answer("unbounded", None, -math.inf)
    if status in (kinds.kLoadError, kinds.kModelError, kinds.kPresolveError, kinds.kSolveError, kinds.kPostsolveError):
        raise SolverError(f"HiGHS broke down: {highs.modelStatusToString(status)}, on {problem}")
    optimal = status in (kinds.kOptimal, kinds.kModelEmpty)
    has_point = optimal or info.primal_solution_status == int(highspy.SolutionStatus.kSolutionStatusFeasible)
    bound = info.mip_dual_bound if problem.integer.any() else (info.objective_function_value if optimal else -math.inf)
    x = np.array([v.varValue for v in stated.variables], dtype=np.float64) if has_point else None
    return _Answer("optimal" if optimal else "feasible" if has_point else "limit", x, bound)


def _new_cbc(**options: Any) -> Any:
    """The CBC bundled with PuLP 3, else one on the path (PuLP 4 bundles none)."""
    if hasattr(pulp, "PULP_CBC_CMD"):
        return pulp.PULP_CBC_CMD(msg=False, _skip_v4_deprecation=True, **options)
    return pulp.COIN_CMD(msg=False, **options)


def _solve_cbc(stated: _Stated, problem: Problem, request: _Request) -> _Answer:
    with tempfile.TemporaryDirectory(prefix="autoplan-cbc-") as folder:
        log = Path(folder) / "cbc.log"
        solver = _new_cbc(
            gapRel=request.gap,
            timeLimit=request.time_limit_s,
            threads=request.threads if request.threads > 1 else None,
            warmStart=request.warm_start is not None,
            logPath=str(log),
        )
        if not solver.available():
            raise BackendUnavailableError("CBC cannot run here: install it (pip install 'pulp[cbc]') or use 'highs'")
        solver.tmpDir = folder
        if request.warm_start is not None:
            for variable, value in zip(stated.variables, request.warm_start.tolist(), strict=True):
                variable.setInitialValue(value, check=False)
        began = time.perf_counter()
        try:
            stated.model.solve(solver)
        except pulp.PulpSolverError as error:
            raise SolverError(f"CBC broke down: {error}; its log ends with: {_tail(log)}") from error
        answer = _read_cbc(stated, log.read_text())
    out_of_time = request.time_limit_s is not None and time.perf_counter() - began >= request.time_limit_s
    if answer.status == "infeasible" and out_of_time:
        # Cut off in its preprocessing, CBC 2.10 calls feasible problems infeasible.
        return _Answer("limit", None, -math.inf)
    return answer


def _tail(log: Path) -> str:
    return log.read_text()[-500:] if log.exists() else "(no log)"


def _read_cbc(stated: _Stated, log: str) -> _Answer:
    """CBC's answer; its bound is the log's "Lower bound", or the objective where it found no need to print one."""
    status, found = stated.model.status, stated.model.sol_status
    if status == pulp.LpStatusInfeasible:
        return _Answer("infeasible", None, math.inf)
    if status == pulp.LpStatusUnbounded:
        return _Answer("unbounded", None, -math.inf)
    printed = re.search(r"^Lower bound:\s+(\S+)", log, flags=re.MULTILINE)
    bound = float(printed.group(1)) if printed else -math.inf
    if status != pulp.LpStatusOptimal:
        return _Answer("limit", None, bound)
    x = np.array([v.varValue or 0.0 for v in stated.variables], dtype=np.float64)
    optimal = found == pulp.LpSolutionOptimal
    if optimal and not printed:
        bound = math.inf  # proven; `solution_at` lowers it to the objective
    return _Answer("optimal" if optimal else "feasible", x, bound)


_SOLVERS: dict[str, Callable[[_Stated, Problem, _Request], _Answer]] = {"highs": _solve_highs, "cbc": _solve_cbc}
