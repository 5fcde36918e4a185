"""Predicted against measured seconds of a training step on this CPU.

    OMP_NUM_THREADS=1 python benchmarks/profiler_time.py [--calibrations 3] [--cluster my.toml]

The models are those of the zoo, and apart from them five that were held out: written after calibration had its probes,
which were chosen while looking at errors on the zoo. One change came after their errors had been seen: overheads are
timed with cold caches. Without a file the machine is calibrated first, as often as asked for, each time in a new
process; models are measured anew after each calibration. The report quotes all runs, and its table shows the run whose
error is the median.

Measured are CPU seconds of forward, backward and AdamW on one thread: the models take turns for several rounds, and the
median of the rounds counts, its spread being the distance of the quartiles relative to it. Models that cannot be
profiled are listed with their error and leave the averages. *Drift* says how much longer a product of two matrices of
512 x 512 took between the models than the file says: the machine's speed is not the same at all times.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional as F

from autoplan import api
from autoplan.errors import AutoplanError
from autoplan.hardware import load_cluster, matmul_s
from benchmarks.zoo import BATCH, VOCABULARY, ZOO, Made, run

RESULTS = Path(__file__).parent / "results"
ROUNDS = 7


class GRU(nn.Module):
    """A GRU over tokens with a class for each sequence."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.gru = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, 20)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.gru(self.embed(ids))[0].mean(1)), labels)


class Depthwise(nn.Module):
    """Inverted bottlenecks as in MobileNet (arXiv:1801.04381)."""

    def __init__(self, width: int = 24, depth: int = 4) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU6())
        self.blocks = nn.ModuleList([self._block(width) for _ in range(depth)])
        self.head = nn.Linear(width, 10)

    @staticmethod
    def _block(width: int) -> nn.Sequential:
        wide = 4 * width
        return nn.Sequential(
            nn.Conv2d(width, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU6(),
            nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False), nn.BatchNorm2d(wide), nn.ReLU6(),
            nn.Conv2d(wide, width, 1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip

    def forward(self, image: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.stem(image)
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


class Mixer(nn.Module):
    """An MLP-Mixer (arXiv:2105.01601): two MLPs in turn, over patches and over channels."""

    def __init__(self, patches: int = 64, width: int = 128, depth: int = 4) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 8, 8)
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(2 * depth)])
        self.mlps = nn.ModuleList([self._mlp(n) for _ in range(depth) for n in (patches, width)])
        self.head = nn.Linear(width, 10)

    @staticmethod
    def _mlp(width: int) -> nn.Sequential:
        return nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, image: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.patch(image).flatten(2).transpose(1, 2)
        for i, (norm, mlp) in enumerate(zip(self.norms, self.mlps, strict=True)):
            y = norm(x)
            x = x + (mlp(y) if i % 2 else mlp(y.transpose(1, 2)).transpose(1, 2))
        return F.cross_entropy(self.head(x.mean(1)), labels)


class Waves(nn.Module):
    """A stack of dilated convolutions over a signal that predicts its next value."""

    def __init__(self, width: int = 48, depth: int = 5) -> None:
        super().__init__()
        self.entry = nn.Conv1d(1, width, 1)
        self.layers = nn.ModuleList([nn.Conv1d(width, 2 * width, 3, padding=2**i, dilation=2**i) for i in range(depth)])
        self.exit = nn.Conv1d(width, 1, 1)

    def forward(self, signal: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        x = self.entry(signal)
        for layer in self.layers:
            up, gate = layer(x).chunk(2, 1)
            x = x + torch.tanh(up) * torch.sigmoid(gate)
        return F.mse_loss(self.exit(x), target)


def _distilbert() -> Made:
    config = transformers.DistilBertConfig(
        vocab_size=VOCABULARY, max_position_embeddings=96, dim=160, hidden_dim=320, n_heads=5, n_layers=4
    )
    ids = torch.randint(2, VOCABULARY, (BATCH, 96), generator=torch.Generator().manual_seed(1))
    return transformers.DistilBertForMaskedLM(config).train(), {"input_ids": ids, "labels": ids}


def _with(model: nn.Module, *shape: int, target: tuple[int, ...] | None = None) -> Made:
    """A model with random inputs of a shape, integers for one of two dims, and targets or ten classes."""
    random = torch.Generator().manual_seed(1)
    tokens = len(shape) == 2
    x = torch.randint(VOCABULARY, shape, generator=random) if tokens else torch.randn(*shape, generator=random)
    labels = (
        torch.randint(10, shape[:1], generator=random) if target is None else torch.randn(*target, generator=random)
    )
    return model.train(), (x, labels)


HELD_OUT: dict[str, Callable[[], Made]] = {
    "gru": lambda: _with(GRU(), 8, 96),
    "depthwise": lambda: _with(Depthwise(), 8, 3, 64, 64),
    "mixer": lambda: _with(Mixer(), 8, 3, 64, 64),
    "distilbert": _distilbert,
    "waves": lambda: _with(Waves(), 8, 1, 400, target=(8, 1, 400)),
}
ALL = {**ZOO, **HELD_OUT}


def stepper(name: str) -> Callable[[], float]:
    """A function that runs one training step and returns its CPU seconds; warmed up."""
    torch.manual_seed(0)
    model, inputs = ALL[name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> float:
        begun = time.process_time()
        torch.autograd.backward(run(model, inputs))
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
    for name, make in ALL.items():
        try:
            predicted[name] = api.profile(*make(), cluster=str(cluster)).step_time_s
        except AutoplanError as e:
            failed[name] = " ".join(str(e).split())[:160]
    device, flops = load_cluster(cluster).device, 2 * 512**3
    matrix, product_s = torch.randn(512, 512), list[float]()
    steps = {name: stepper(name) for name in predicted}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            step()  # caches hold what the model before has left
            times[name].append(step())
            torch.mm(matrix, matrix)
            begun = time.process_time()
            for _ in range(3):
                torch.mm(matrix, matrix)
            product_s.append((time.process_time() - begun) / 3)
    rows = []
    for name, found in times.items():
        low, median, high = statistics.quantiles(found, n=4)
        rows.append({"model": name, "held_out": name in HELD_OUT, "measured_ms": median * 1e3,
                     "spread": (high - low) / median, "predicted_ms": predicted[name] * 1e3,
                     "error": predicted[name] / median - 1})  # fmt: skip
    zoo, held = [r for r in rows if not r["held_out"]], [r for r in rows if r["held_out"]]
    return {
        "models": len(zoo), **_figures(zoo, ""), "held_out_models": len(held), **_figures(held, "held_out_"),
        "drift": statistics.median(product_s) / matmul_s(device, flops, "float32") - 1,
        "rows": rows, "not_profiled": failed,
    }  # fmt: skip


def _figures(rows: list[dict[str, Any]], prefix: str) -> dict[str, float]:
    return {
        f"{prefix}mean_absolute_error": sum(abs(r["error"]) for r in rows) / len(rows),
        f"{prefix}rank_correlation": rank_correlation(
            [r["measured_ms"] for r in rows], [r["predicted_ms"] for r in rows]
        ),
    }


def report(runs: list[dict[str, Any]], command: str) -> str:
    """The results as Markdown."""
    shown = sorted(runs, key=lambda r: r["mean_absolute_error"])[len(runs) // 2]

    def each(key: str, form: str) -> str:
        return ", ".join(format(r[key], form) for r in runs)

    lines = [
        "# Predicted step times on a CPU", "",
        f"`{command}`, torch {torch.__version__}; CPU seconds on one thread. One figure per run, each with a"
        " calibration of its own:", "",
        "| models | mean absolute error | rank correlation |", "|---|---|---|",
        f"| {shown['models']} of the zoo | {each('mean_absolute_error', '.1%')} | {each('rank_correlation', '.3f')} |",
        f"| {shown['held_out_models']} held out | {each('held_out_mean_absolute_error', '.1%')} | "
        f"{each('held_out_rank_correlation', '.3f')} |", "",
        f"Drift of the machine between calibration and measurement: {each('drift', '+.0%')}.", "",
        "The run of the median error; models held out are marked with *.", "",
        "| model | measured ms | spread | predicted ms | error |", "|---|---|---|---|---|",
        *(f"| {r['model']}{' *' if r['held_out'] else ''} | {r['measured_ms']:.1f} | {r['spread']:.0%} | "
          f"{r['predicted_ms']:.1f} | {r['error']:+.0%} |" for r in shown["rows"]),
    ]  # fmt: skip
    if shown["not_profiled"]:
        lines += ["", "Not profiled:", "", *(f"- {name}: {why}" for name, why in shown["not_profiled"].items())]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", type=Path, help="a file that autoplan calibrate has written on this machine")
    parser.add_argument("--calibrations", type=int, default=1, help="how often to calibrate and measure")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        for i in range(1 if asked.cluster else asked.calibrations):
            cluster = asked.cluster
            if cluster is None:
                cluster = Path(folder) / f"run{i}.toml"
                subprocess.run([sys.executable, "-m", "autoplan.cli", "calibrate", "-o", str(cluster)], check=True)
            runs.append(measure(cluster))
            print(report(runs, ""), flush=True)
    command = "OMP_NUM_THREADS=1 python benchmarks/profiler_time.py"
    command += "" if asked.cluster else f" --calibrations {asked.calibrations}"
    found = {"torch": torch.__version__, "command": command, "runs": runs}
    (RESULTS / "profiler_time.json").write_text(json.dumps(found, indent=1) + "\n")
    (RESULTS / "profiler_time.md").write_text(report(runs, command))


if __name__ == "__main__":
    main()
