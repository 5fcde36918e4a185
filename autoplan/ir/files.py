"""Writing files so that they appear whole or not at all."""

from __future__ import annotations

import contextlib
from pathlib import Path

from autoplan.errors import OptionError


def write_whole(path: str | Path, text: str, what: str) -> None:
    """Writes a text file; what stood there before is replaced in one step.

    Args:
        path: Where to.
        text: All of it.
        what: Its name in an error message: "the plan".

    Raises:
        OptionError: It cannot be written; nothing is left behind.
    """
    target = Path(path)
    temporary = target.with_name(target.name + ".tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(target)
    except BaseException as e:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(e, OSError):
            raise OptionError(f"cannot write {what} to {target}: {e.strerror or e}") from e
        raise
