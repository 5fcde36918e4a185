"""The small form of benchmarks/planner.py."""

from __future__ import annotations

import runpy
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "planner.py"


def test_small_form() -> None:
    names = runpy.run_path(str(SCRIPT))
    row = names["run"](names["SMALL"], 1)
    assert row.variables > 1000 and row.rows > 100 and row.options > 100
    assert row.fractional == 0 and row.points >= 3
    assert 0 <= row.gap < 0.1
    assert row.case in names["table"]([row])
