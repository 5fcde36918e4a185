"""Memory that CPU kernels take for themselves while they run, which no graph and no dispatcher shows."""

from __future__ import annotations

from typing import Any


def workspace_bytes(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Bytes of a kernel's own temporaries."""
    return 0
