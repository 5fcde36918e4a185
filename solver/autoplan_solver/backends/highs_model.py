"""Problems as HiGHS models, passed as whole arrays.

HiGHS compares reduced costs and gaps with absolute tolerances (1e-7, 1e-6), while plans cost between 1e-6 and 1e3
seconds, so objectives are multiplied by a power of two, exactly,

    scale(w) = 2^(9 - floor(log2(max |w|)))                                        (1)  `power_of_two_scale`

and results divided by it. All models run on a fixed seed; equal input gives equal output.
"""

from __future__ import annotations

import math

import highspy
import numpy as np

from autoplan_solver.errors import SolverError, SolverInputError
from autoplan_solver.problem import FloatArray, Problem

__all__ = [
    "INTEGRALITY_TOLERANCE",
    "add_cap_rows",
    "clean",
    "empty_model",
    "fractional",
    "new_model",
    "power_of_two_scale",
    "run_model",
]

INTEGRALITY_TOLERANCE = 1e-6
"""How far a 0/1 value may be from an integer and still count as one."""

_SCALED_EXPONENT = 9


def power_of_two_scale(weights: FloatArray) -> float:
    """Equation (1): the factor that brings the largest absolute weight into [512, 1024); 1 where all are zero."""
    largest = float(np.abs(weights).max(initial=0.0))
    if largest == 0.0:
        return 1.0
    return math.ldexp(1.0, _SCALED_EXPONENT + 1 - math.frexp(largest)[1])


class _SilentHighs(highspy.Highs):
    """highspy prints a banner while it constructs an instance, before anyone can turn output off; this does first."""

    def enableCallbacks(self) -> None:
        self.setOptionValue("output_flag", False)
        super().enableCallbacks()  # type: ignore[no-untyped-call]


def empty_model(*, threads: int) -> highspy.Highs:
    """A silent model without variables, on the package's fixed random seed."""
    model = _SilentHighs()  # type: ignore[no-untyped-call]
    model.setOptionValue("threads", threads)
    model.setOptionValue("random_seed", 0)
    return model


def new_model(problem: Problem, weights: FloatArray, *, integer: bool, threads: int) -> highspy.Highs:
    """A silent model with the problem's rows and bounds and ``weights`` as objective; caps and offsets left out.

    Args:
        problem: rows (2) and bounds (4) of `autoplan_solver.problem`.
        weights: objective, shape (n,), already scaled.
        integer: keep the integer marks; False gives the linear relaxation.
        threads: threads HiGHS may use.

    Raises:
        SolverInputError: a row names a variable twice.
    """
    model = empty_model(threads=threads)
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = problem.n_variables, problem.n_rows
    lp.col_cost_ = weights
    lp.col_lower_ = np.zeros(problem.n_variables)
    lp.col_upper_ = problem.upper_bounds
    lp.row_lower_ = lp.row_upper_ = problem.rhs
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_ = problem.row_start
    lp.a_matrix_.index_ = problem.row_index
    lp.a_matrix_.value_ = problem.row_value
    if integer:
        kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
        lp.integrality_ = [kinds[int(i)] for i in problem.integer]
    if model.passModel(lp) == highspy.HighsStatus.kError:
        raise _refused(problem)
    return model


def _refused(problem: Problem) -> SolverError:
    """Why HiGHS refuses a problem that `Problem` accepted: to look for repeated terms every time would cost more."""
    terms = problem.term_row * problem.n_variables + problem.row_index
    repeated = np.flatnonzero(np.diff(np.sort(terms)) == 0)
    if len(repeated) == 0:
        return SolverError("HiGHS refuses the model; please report this problem")
    row, variable = divmod(int(np.sort(terms)[repeated[0]]), problem.n_variables)
    return SolverInputError(f"{problem.name(variable)} stands twice in {problem.row_text(row)}; add its terms up")


def add_cap_rows(model: highspy.Highs, problem: Problem) -> None:
    """Adds the finite caps of ``problem`` as rows, each scaled by the power of two of equation (1)."""
    for resource, cap in problem.finite_caps.items():
        use = problem.resources[resource]
        factor = power_of_two_scale(use)
        used = np.flatnonzero(use).astype(np.int32)
        left = (cap - problem.resource_offset.get(resource, 0.0)) * factor
        model.addRow(-highspy.kHighsInf, left, len(used), used, use[used] * factor)


def run_model(model: highspy.Highs) -> highspy.HighsModelStatus:
    """Runs the model and returns its status.

    HiGHS keeps one thread pool per process and refuses to run with another thread count than the pool's; the pool
    is then replaced and the run repeated.
    """
    if model.run() == highspy.HighsStatus.kError:
        highspy.Highs.resetGlobalScheduler(True)
        model.run()
    return model.getModelStatus()


def fractional(problem: Problem, x: FloatArray) -> int:
    """How many integer variables are further from an integer than `INTEGRALITY_TOLERANCE`."""
    values = x[problem.integer]
    return int((np.abs(values - np.rint(values)) > INTEGRALITY_TOLERANCE).sum())


def clean(problem: Problem, x: FloatArray) -> FloatArray:
    """``x`` with values next to an integer rounded and all values within bounds; unrounded if rows would get worse."""
    nearest = np.rint(x)
    rounded = np.clip(np.where(np.abs(x - nearest) <= INTEGRALITY_TOLERANCE, nearest, x), 0.0, problem.upper_bounds)
    if problem.n_rows == 0:
        return rounded

    def residual(point: FloatArray) -> float:
        return float(np.abs(problem.row_values(point) - problem.rhs).max())

    # Rounding a solver's 1e-9 noise away repairs rows; it may also break a row of large coefficients.
    return rounded if residual(rounded) <= max(residual(x), 1e-9) else x
