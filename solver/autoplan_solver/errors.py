"""Named errors of the solver package.

Every message says what was wrong, where (field, row or variable) and what to do next.
"""

from __future__ import annotations

__all__ = ["BackendUnavailableError", "NoSolutionError", "SolverError", "SolverInputError", "ValidationError"]


class SolverError(Exception):
    """Base of every error raised by ``autoplan_solver``."""


class SolverInputError(SolverError, ValueError):
    """A problem or an argument is malformed; the message names the field."""


class BackendUnavailableError(SolverError, RuntimeError):
    """The asked-for back end is known but cannot run on this machine."""


class NoSolutionError(SolverError, RuntimeError):
    """A search that needs a solution met a problem without one (infeasible, unbounded, or out of work)."""


class ValidationError(SolverError, AssertionError):
    """A solution does not satisfy its problem; lists the worst violations by row and variable name.

    Attributes:
        violations: one line for each violation, worst first within each kind.
    """

    def __init__(self, violations: tuple[str, ...]) -> None:
        self.violations = violations
        super().__init__("the solution does not satisfy its problem:\n  " + "\n  ".join(violations))
