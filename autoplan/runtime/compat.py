"""Every use that the runtime makes of torch interfaces which are not public, each with its reason.

Verified against torch 2.13.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

# Outputs are put together with the spec that torch.export returned, which only this module understands.
import torch.utils._pytree as pytree
from torch.distributed.tensor.placement_types import Placement as DTensorPlacement
from torch.distributed.tensor.placement_types import _StridedShard

# The only hook that sees the tensors every op returns, below autograd; documented, but without a public name.
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "StorageWatch",
    "TorchDispatchMode",
    "default_store",
    "device_type",
    "is_communication_error",
    "is_persistent",
    "local_tensor",
    "own_buffers",
    "own_modules",
    "own_parameters",
    "pytree",
    "storage_key",
    "strided_shard",
    "version",
]


def strided_shard(dim: int, split_factor: int) -> DTensorPlacement:
    """DTensor's placement for an inner factor of a dim; it has no public name."""
    return _StridedShard(dim, split_factor=split_factor)


def default_store() -> Any:
    """Store behind the default process group; there is no public way to it after ``init_process_group``."""
    return dist.distributed_c10d._get_default_store()


def device_type() -> str:
    """Device type that the default process group communicates on."""
    return "cuda" if "nccl" in dist.get_backend() else "cpu"


def is_communication_error(e: BaseException) -> bool:
    """Whether an error says that ranks could not talk: gloo raises plain RuntimeErrors, told apart by their text."""
    return isinstance(e, dist.DistError) or (isinstance(e, RuntimeError) and "gloo" in str(e).lower())


def local_tensor(x: Any) -> torch.Tensor:
    """The plain tensor inside a DTensor without an autograd node; ``to_local`` makes a view where grad is enabled."""
    inner: torch.Tensor = getattr(x, "_local_tensor", x)
    return inner


def own_parameters(module: torch.nn.Module) -> dict[str, torch.nn.Parameter | None]:
    """A module's own parameters, to change; public iterators leave out entries that are None."""
    return module._parameters


def own_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """A module's own buffers, likewise."""
    return module._buffers


def own_modules(module: torch.nn.Module) -> dict[str, torch.nn.Module | None]:
    """A module's children, likewise, and with those that stand there twice."""
    return module._modules


def is_persistent(module: torch.nn.Module, buffer: str) -> bool:
    """Whether a buffer is part of the state dict, which nothing public says."""
    return buffer not in module._non_persistent_buffers_set


def version(x: torch.Tensor) -> int:
    """How often a tensor was changed in place; autograd checks the same number, which has no public name."""
    return int(x._version)


def storage_key(x: torch.Tensor) -> int:
    """Identity of a storage: only its C++ address is stable."""
    return int(x.untyped_storage()._cdata)


class StorageWatch:
    """Weak reference to a storage that knows when its memory is freed."""

    def __init__(self, x: torch.Tensor) -> None:
        storage = x.untyped_storage()
        self.nbytes = storage.nbytes()
        self._reference = storage._weak_ref()

    @property
    def freed(self) -> bool:
        """Whether nothing holds the storage any more."""
        return bool(torch.UntypedStorage._expired(self._reference))

    def close(self) -> None:
        """Gives the weak reference back."""
        torch.UntypedStorage._free_weak_ref(self._reference)  # type: ignore[no-untyped-call]
