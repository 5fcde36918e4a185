"""Every error autoplan raises on purpose: what is wrong, where, and what to do next.

The command line turns an `AutoplanError` into one readable message and the exit code of its class; anything else is a
bug in autoplan and shows its traceback.
"""

from __future__ import annotations


class AutoplanError(Exception):
    """Base of all deliberate errors.

    Attributes:
        exit_code: Process exit status the command line uses for this class (2 bad input, 3 infeasible).
    """

    exit_code: int = 2


class TraceError(AutoplanError):
    """The model could not be captured; names the module and the source line."""


class UnsupportedOpError(AutoplanError):
    """An op cannot be handled at all (one that merely has no sharding rule is replicated and reported)."""


class InfeasibleError(AutoplanError):
    """Nothing satisfies the constraints.

    Attributes:
        minimum_bytes: Smallest memory cap per device that works, where memory is what binds; else None.
    """

    exit_code = 3

    def __init__(self, message: str, *, minimum_bytes: int | None = None) -> None:
        super().__init__(message)
        self.minimum_bytes = minimum_bytes


class PlanMismatchError(AutoplanError):
    """A plan is used with another model, mesh or format version than it was made for."""


class ProfileError(AutoplanError):
    """A profile file is malformed, or a cluster is unknown."""


class OptionError(AutoplanError):
    """An option, placement or input given by the user is malformed or contradicts another."""


class WorkerError(AutoplanError):
    """Another rank failed, so that this one stops as well."""
