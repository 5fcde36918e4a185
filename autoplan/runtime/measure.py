"""True peak memory of a step, by watching every tensor that ops return."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch

from autoplan.runtime import compat
from autoplan.runtime.compat import TorchDispatchMode, pytree


def measure_peak(step: Callable[[], Any]) -> int:
    """Largest number of bytes in live tensors while `step` runs, on this rank, those alive before included.

    Every op's results are watched until their storage is freed; what kernels allocate inside is not seen. Unlike the
    allocator's own trace it holds with collectives, whose buffers are freed on other threads. Run one step before, so
    that optimizer state exists, and set gradients to None.

    Args:
        step: Runs forward, backward and the optimizer once.
    """
    gc.collect()
    watch = _Watch()
    for x in gc.get_objects():
        if issubclass(type(x), torch.Tensor):
            watch.add(x)
    try:
        with watch:
            step()
        return watch.peak
    finally:
        watch.close()


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live: dict[int, compat.StorageWatch] = {}
        self.peak = 0

    def add(self, x: torch.Tensor) -> None:
        """Watches the storage of a tensor, if it is one that takes memory."""
        x = compat.local_tensor(x)
        if x.is_meta or type(x) not in (torch.Tensor, torch.nn.Parameter):
            return
        key = compat.storage_key(x)
        known = self.live.get(key)
        if known is not None and known.freed:
            known.close()
            known = None
        if known is None:
            self.live[key] = compat.StorageWatch(x)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in pytree.tree_leaves(result):
            if isinstance(x, torch.Tensor):
                self.add(x)
        for key in [k for k, w in self.live.items() if w.freed]:
            self.live.pop(key).close()
        self.peak = max(self.peak, sum(w.nbytes for w in self.live.values()))
        return result

    def close(self) -> None:
        for w in self.live.values():
            w.close()
        self.live.clear()
