"""Predicted against measured seconds of a training step on this CPU, for every model of the zoo.

    OMP_NUM_THREADS=1 python benchmarks/profiler_time.py [--cluster my.toml]

Without a file the machine is calibrated first. Measured are CPU seconds of forward, backward and AdamW on one thread:
the models take turns for several rounds, and the median of the rounds counts, its spread being the distance of the
quartiles relative to it. Models that cannot be profiled are listed with their error and leave the averages.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from autoplan import api
from autoplan.errors import AutoplanError
from autoplan.profiler.calibrate import calibrate, write_profile
from benchmarks.zoo import ZOO, run

RESULTS = Path(__file__).parent / "results"
ROUNDS = 7


def stepper(name: str) -> Callable[[], float]:
    """A function that runs one training step and returns its CPU seconds; warmed up."""
    torch.manual_seed(0)
    model, inputs = ZOO[name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> float:
        begun = time.process_time()
        run(model, inputs).backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.process_time() - begun

    step()
    step()
    return step


def ranks(values: list[float]) -> list[int]:
    """The place of each value in rising order."""
    order = sorted(range(len(values)), key=values.__getitem__)
    return [order.index(i) for i in range(len(values))]


def rank_correlation(a: list[float], b: list[float]) -> float:
    """Spearman's ρ."""
    x, y = ranks(a), ranks(b)
    mean = (len(x) - 1) / 2
    over = sum((p - mean) * (q - mean) for p, q in zip(x, y, strict=True))
    return over / math.sqrt(sum((p - mean) ** 2 for p in x) * sum((q - mean) ** 2 for q in y))


def measure(cluster: Path) -> dict[str, Any]:
    """Predicts and measures all models."""
    predicted: dict[str, float] = {}
    failed: dict[str, str] = {}
    for name, make in ZOO.items():
        try:
            predicted[name] = api.profile(*make(), cluster=str(cluster)).step_time_s
        except AutoplanError as e:
            failed[name] = " ".join(str(e).split())[:160]
    steps = {name: stepper(name) for name in predicted}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            step()  # caches hold what the model before has left
            times[name].append(step())
    rows = []
    for name, found in times.items():
        low, median, high = statistics.quantiles(found, n=4)
        rows.append({"model": name, "measured_ms": median * 1e3, "spread": (high - low) / median,
                     "predicted_ms": predicted[name] * 1e3, "error": predicted[name] / median - 1})  # fmt: skip
    return {
        "models": len(rows), "mean_absolute_error": sum(abs(r["error"]) for r in rows) / len(rows),
        "rank_correlation": rank_correlation([r["measured_ms"] for r in rows], [r["predicted_ms"] for r in rows]),
        "torch": torch.__version__, "rows": rows, "not_profiled": failed,
    }  # fmt: skip


def report(found: dict[str, Any]) -> str:
    """The results as Markdown."""
    lines = [
        "# Predicted step times on a CPU", "",
        "`OMP_NUM_THREADS=1 python benchmarks/profiler_time.py`; CPU seconds on one thread, after `autoplan calibrate`.",  # noqa: E501
        f"{found['models']} models, mean absolute error {found['mean_absolute_error']:.1%}, rank correlation "
        f"{found['rank_correlation']:.3f}, torch {found['torch']}.", "",
        "| model | measured ms | spread | predicted ms | error |", "|---|---|---|---|---|",
        *(f"| {r['model']} | {r['measured_ms']:.1f} | {r['spread']:.0%} | {r['predicted_ms']:.1f} | {r['error']:+.0%} |"
          for r in found["rows"]),
    ]  # fmt: skip
    if found["not_profiled"]:
        lines += ["", "Not profiled:", "", *(f"- {name}: {why}" for name, why in found["not_profiled"].items())]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", type=Path, help="a file that autoplan calibrate has written on this machine")
    cluster = parser.parse_args().cluster
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        if cluster is None:
            cluster = Path(folder) / "here.toml"
            write_profile(calibrate(name="here", progress=print), cluster)
        found = measure(cluster)
    (RESULTS / "profiler_time.json").write_text(json.dumps(found, indent=1) + "\n")
    (RESULTS / "profiler_time.md").write_text(report(found))
    print(report(found))


if __name__ == "__main__":
    main()
