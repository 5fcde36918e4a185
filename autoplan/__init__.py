"""Plans how PyTorch models are trained: sharding and recomputation, chosen together, on the hardware you have.

The public names load on first use, so that importing autoplan imports neither torch nor anything else heavy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autoplan.api import PlanOptions, full_state_dict, parallelize, plan, profile
    from autoplan.errors import (
        AutoplanError,
        InfeasibleError,
        OptionError,
        PlanMismatchError,
        ProfileError,
        TraceError,
        UnsupportedOpError,
        WorkerError,
    )
    from autoplan.hardware import ClusterSpec, load_cluster
    from autoplan.ir import Mesh, Placement
    from autoplan.ir.plan import Plan
    from autoplan.profiler import Profile, register_flops

    __version__: str

__all__ = [
    "AutoplanError",
    "ClusterSpec",
    "InfeasibleError",
    "Mesh",
    "OptionError",
    "Placement",
    "Plan",
    "PlanMismatchError",
    "PlanOptions",
    "Profile",
    "ProfileError",
    "TraceError",
    "UnsupportedOpError",
    "WorkerError",
    "__version__",
    "full_state_dict",
    "load_cluster",
    "parallelize",
    "plan",
    "profile",
    "register_flops",
]

_FALLBACK_VERSION = "0.1.0"  # a source tree that was never installed

_HOMES = {
    "plan": "autoplan.api",
    "profile": "autoplan.api",
    "parallelize": "autoplan.api",
    "full_state_dict": "autoplan.api",
    "PlanOptions": "autoplan.api",
    "Plan": "autoplan.ir.plan",
    "Mesh": "autoplan.ir",
    "Placement": "autoplan.ir",
    "Profile": "autoplan.profiler",
    "register_flops": "autoplan.profiler",
    "ClusterSpec": "autoplan.hardware",
    "load_cluster": "autoplan.hardware",
    "AutoplanError": "autoplan.errors",
    "InfeasibleError": "autoplan.errors",
    "OptionError": "autoplan.errors",
    "PlanMismatchError": "autoplan.errors",
    "ProfileError": "autoplan.errors",
    "TraceError": "autoplan.errors",
    "UnsupportedOpError": "autoplan.errors",
    "WorkerError": "autoplan.errors",
}


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("torch-autoplan")
    except metadata.PackageNotFoundError:
        return _FALLBACK_VERSION


def __getattr__(name: str) -> object:
    """Imports a public name from its home module the first time it is asked for."""
    if name == "__version__":
        value: object = _version()
    elif name in _HOMES:
        from importlib import import_module

        value = getattr(import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module 'autoplan' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Lists the public names, loaded or not."""
    return sorted({*globals(), *__all__})
