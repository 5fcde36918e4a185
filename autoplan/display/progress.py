"""A spinner with the phase and the elapsed time, on stderr, for what takes more than a second."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

DELAY_S = 1.0


class Progress:
    """Shows the current phase while a ``with`` block runs; silent where stderr is no terminal.

    Attributes:
        phases: (name, seconds) of the phases that have ended.
    """

    def __init__(self, phase: str, *, console: Console | None = None, delay_s: float = DELAY_S) -> None:
        self.phases: list[tuple[str, float]] = []
        self._console = console or Console(stderr=True)
        self._delay_s = delay_s
        self._phase = phase
        self._begun = self._since = time.monotonic()
        self._spinner = Spinner("line")
        self._live: Live | None = None

    def phase(self, name: str) -> None:
        """Enters the next phase."""
        now = time.monotonic()
        self.phases.append((self._phase, now - self._since))
        self._phase, self._since = name, now

    def __rich__(self) -> Text | Spinner:
        elapsed = time.monotonic() - self._begun
        if elapsed < self._delay_s:
            return Text("")
        self._spinner.update(text=Text(f"{self._phase}  {elapsed:.0f} s"))
        return self._spinner

    def __enter__(self) -> Progress:
        self._begun = self._since = time.monotonic()
        if self._console.is_terminal:
            self._live = Live(self, console=self._console, transient=True, refresh_per_second=8, redirect_stdout=False)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.phase("")
        if self._live is not None:
            self._live.stop()
            self._live = None


def progress(phase: str, *, console: Console | None = None) -> Progress:
    """A spinner for a ``with`` block, which tells it of further phases through its method `phase`."""
    return Progress(phase, console=console)
