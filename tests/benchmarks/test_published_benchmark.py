"""The small form of benchmarks/published.py: activation memory always, step times where the published rows are."""

from __future__ import annotations

import os
import runpy
from pathlib import Path

import pytest

from autoplan.hardware import load_cluster

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "published.py"
VARIABLE = "AUTOPLAN_PUBLISHED_DATA"


def test_activation_memory() -> None:
    rows = runpy.run_path(str(SCRIPT))["activation_rows"](load_cluster("a100-8x"))
    assert len(rows) == 8
    assert max(abs(row["error"]) for row in rows) < 0.03


@pytest.mark.parametrize(("runs", "cluster", "count"), [("a100_runs", "a100-8x", 10), ("h100_runs", "h100-8x", 9)])
def test_step_times(runs: str, cluster: str, count: int) -> None:
    folder = os.environ.get(VARIABLE)
    if folder is None or not Path(folder).is_dir():
        pytest.skip(f"the published step times are not part of the project; set {VARIABLE} to a folder with them")
    names = runpy.run_path(str(SCRIPT))
    found = names["fitted"](names[runs](Path(folder)), load_cluster(cluster))
    assert len(found["rows"]) == count
    assert found["mean_error"] <= 0.04
    assert found["mean_error"] < found["mean_error_constant_rate"]
