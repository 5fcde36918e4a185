"""`autoplan demo` (written below)."""

from __future__ import annotations

from collections.abc import Callable


def demo(report: Callable[[object], None]) -> int:
    raise NotImplementedError
