"""The back ends: what each can do and whether it can run here.

A new back end is one file with a function ``solve_integer`` understands, one entry in `BACKENDS`, and a passing
`autoplan_solver.testing.check_backend`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

__all__ = ["BACKENDS", "Backend", "available"]


@dataclass(frozen=True)
class Backend:
    """What a back end can do.

    Args:
        name: the name to ask for.
        description: one line for people.
        integer: solves the capped 0/1 problem (`solve_integer`).
        warm_start: makes use of an earlier point or basis.
        duals: gives multipliers and Lagrangian bounds (`LagrangianSolver`).
        usable: whether it can run on this machine.
    """

    name: str
    description: str
    integer: bool
    warm_start: bool
    duals: bool
    usable: Callable[[], bool]


def _always() -> bool:
    return True


def _cbc_usable() -> bool:
    from autoplan_solver.backends.pulp_backend import cbc_available  # keeps this table free of PuLP

    return cbc_available()


_ALL = (
    Backend("highs", "HiGHS, stated through PuLP", integer=True, warm_start=True, duals=False, usable=_always),
    Backend("cbc", "COIN-OR CBC, stated through PuLP", integer=True, warm_start=True, duals=False, usable=_cbc_usable),
    Backend("highs_lp", "HiGHS, relaxation as arrays", integer=False, warm_start=True, duals=True, usable=_always),
)

BACKENDS: Mapping[str, Backend] = MappingProxyType({b.name: b for b in _ALL})
"""Every known back end by name."""


def available() -> tuple[str, ...]:
    """Names of the back ends that can run on this machine."""
    return tuple(name for name, backend in BACKENDS.items() if backend.usable())
