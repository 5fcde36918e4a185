"""The spinner: silent without a terminal, late on one, and gone at the end."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from autoplan.display import Progress, progress


def test_nothing_is_written_where_stderr_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("tracing") as p:
        p.phase("solving")
    assert [name for name, _ in p.phases] == ["tracing", "solving"]
    out = capsys.readouterr()
    assert out.out == out.err == ""


def test_phase_and_seconds_are_shown_on_a_terminal() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=80)
    with Progress("tracing", console=console, delay_s=0.0) as p:
        p.phase("solving")
        assert p._live is not None
        p._live.refresh()
    assert "solving" in screen.getvalue()
    assert " 0 s" in screen.getvalue()
    assert p._live is None


def test_short_work_shows_nothing() -> None:
    screen = io.StringIO()
    with Progress("tracing", console=Console(file=screen, force_terminal=True, width=80)):
        pass
    assert "tracing" not in screen.getvalue()


def test_an_error_stops_the_spinner() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    p = Progress("tracing", console=console)
    with pytest.raises(ValueError, match="no"), p:
        raise ValueError("no")
    assert p._live is None
