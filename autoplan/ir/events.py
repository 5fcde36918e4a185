"""`StepEvents`: when each piece of memory of a training step is made, saved for backward, let go and freed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class StorageEvent:
    """One event.

    Attributes:
        kind: ``alloc`` and ``free``; ``save`` and ``release`` where autograd starts and stops holding a storage for
            backward.
        storage: Number of the storage.
        nbytes: Size.
        phase: ``forward`` or ``backward``.
        op: `Op.key` of the op of the graph that causes it, or empty.
    """

    kind: Literal["alloc", "free", "save", "release"]
    storage: int
    nbytes: int
    phase: str
    op: str


@dataclass(frozen=True)
class StepEvents:
    """Forward and backward of one step, eager, in order; what the step is given is not listed.

    Attributes:
        events: In order of execution.
        gradients: Storages that end as gradients of parameters.
        trained: Names of the parameters (`GraphInput.value`) that get one.
    """

    events: tuple[StorageEvent, ...] = ()
    gradients: frozenset[int] = frozenset()
    trained: tuple[str, ...] = ()
