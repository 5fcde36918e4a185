"""Predicted memory of a training step against the allocator of the same step on this CPU, over the models of the zoo.

    OMP_NUM_THREADS=1 python benchmarks/profiler_memory.py                # all; writes results/profiler_memory.*
    python benchmarks/profiler_memory.py --models gpt2,mlp                # some, prints only
    python benchmarks/profiler_memory.py --models mlp --optimizer none    # another optimizer

Measured: bytes of the live tensors before the step (parameters, buffers, batch, optimizer state), plus the running sum
of the allocator's own ``[memory]`` events (`torch.profiler`, ``profile_memory=True``) over one step that follows a
warm-up step, gradients set to None and garbage collected. Saved: unique storages that `saved_tensors_hooks` sees on
real tensors, without those of parameters, buffers and the batch.
Scratch: what oneDNN's convolutions and LSTM allocate and free within one call (layout changes, accumulators; they
depend on the instruction set) is not predicted. Peaks are compared without it, and the step once more with it.

Predicted: `autoplan.profile` on the same model on the meta device. Nothing is fitted to any model.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves

import autoplan

sys.path.insert(0, str(Path(__file__).parent))
from zoo import HELD_OUT, ZOO, run

RESULTS = Path(__file__).parent / "results"
ONEDNN = {"aten::convolution", "aten::convolution_backward"}
ONEDNN |= {"aten::mkldnn_rnn_layer", "aten::mkldnn_rnn_layer_backward"}
COLUMNS = ("forward", "backward", "step", "saved")
SHOWN = {**{c: c for c in COLUMNS}, "whole": "step with scratch"}
OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None] = {
    "adamw": torch.optim.AdamW,
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9),
    "none": None,
}


@dataclass(frozen=True)
class Row:
    """One model: bytes predicted and measured, by column."""

    model: str
    predicted: Mapping[str, int]
    measured: Mapping[str, int]

    def error(self, column: str) -> float:
        """Relative error of the prediction."""
        return self.predicted[column] / self.measured[column] - 1


def storages(tensors: Iterable[Any]) -> dict[int, int]:
    found = [t.untyped_storage() for t in tensors if isinstance(t, torch.Tensor)]
    return {s._cdata: s.nbytes() for s in found}


def saved_bytes(model: nn.Module, inputs: Any) -> int:
    own = storages([*model.parameters(), *model.buffers(), *tree_leaves(inputs)])
    held: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        held.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = run(model, inputs)
    found = storages(held)
    del loss
    return sum(n for s, n in found.items() if s not in own)


class Peak(NamedTuple):
    """Bytes above the start: peak, without and with what is there within a call of oneDNN only; the end; the result."""

    most: int
    whole: int
    left: int
    result: Any


def peak(action: Callable[[], Any]) -> Peak:
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as p:
        result = action()
    events = p.profiler.kineto_results.events()
    inside = [(e.start_ns(), e.start_ns() + e.duration_ns()) for e in events if e.name() in ONEDNN]
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    total = most = scratch = 0
    for (t, n), (later, _) in zip(changes, [*changes[1:], (float("inf"), 0)], strict=True):
        total += n
        if any(start <= t and later <= end for start, end in inside):
            scratch = max(scratch, total)  # more comes or goes before the kernel returns
        else:
            most = max(most, total)
    return Peak(most, max(most, scratch), total, result)


def measure(model: nn.Module, inputs: Any, optimizer: str) -> dict[str, int]:
    saved = saved_bytes(model, inputs)
    make = OPTIMIZERS[optimizer]
    update = make(model.parameters()) if make else None
    run(model, inputs).backward()
    if update is not None:
        update.step()
    model.zero_grad(set_to_none=True)
    gc.collect()
    state = [] if update is None else [t for s in update.state.values() for t in s.values()]
    base = sum(storages([*model.parameters(), *model.buffers(), *tree_leaves(inputs), *state]).values())
    first = peak(lambda: run(model, inputs))
    forward, ahead, base = base + first.most, base + first.whole, base + first.left
    second = peak(first.result.backward)
    backward, back, base = base + second.most, base + second.whole, base + second.left
    last = base + peak(update.step).most if update is not None else 0
    step, whole = max(forward, backward, last), max(ahead, back, last)
    return {"forward": forward, "backward": backward, "step": step, "saved": saved, "whole": whole}


def measure_row(name: str, optimizer: str = "adamw") -> Row:
    torch.manual_seed(0)
    model, inputs = (ZOO | HELD_OUT)[name]()
    predicted = predict(model, inputs, optimizer)
    return Row(name, predicted, measure(model, inputs, optimizer))


def predict(model: nn.Module, inputs: Any, optimizer: str) -> dict[str, int]:
    found = autoplan.profile(model, inputs, optimizer=optimizer)
    return {**found.peak_bytes, "saved": found.saved_activation_bytes, "whole": found.peak_bytes["step"]}


def table(rows: Sequence[Row]) -> str:
    """Markdown: MB measured and the error of the prediction, and a summary."""
    lines = [
        "| model | " + " | ".join(f"{c} MB | error" for c in SHOWN.values()) + " |",
        "|---|" + "---:|---:|" * len(SHOWN),
    ]
    for r in rows:
        cells = [f"{r.measured[c] / 1e6:.2f} | {r.error(c):+.2%}" for c in SHOWN]
        lines.append(f"| {r.model} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, *summary(rows)])


def summary(rows: Sequence[Row]) -> list[str]:
    """Median and worst error, as rows of the table."""
    picks: dict[str, Callable[[list[float]], float]] = {"median error": statistics.median, "worst error": max}
    return [
        f"| {name} | " + " | ".join(f" | {pick([abs(r.error(c)) for r in rows]):.2%}" for c in SHOWN) + " |"
        for name, pick in picks.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="", help="comma-separated names")
    parser.add_argument("--optimizer", default="adamw", choices=OPTIMIZERS)
    args = parser.parse_args()
    if args.models:
        print(table([measure_row(name, args.optimizer) for name in args.models.split(",")]))
        return
    parts = {f"The zoo, {optimizer}": [measure_row(name, optimizer) for name in ZOO] for optimizer in OPTIMIZERS}
    parts["Models that nothing was tried on before, adamw"] = [measure_row(name) for name in HELD_OUT]
    machine = f"{platform.machine()}, torch {torch.__version__}, {torch.get_num_threads()} thread"
    command = "OMP_NUM_THREADS=1 python benchmarks/profiler_memory.py"
    data = {"command": command, "machine": machine, **{k: [asdict(r) for r in rows] for k, rows in parts.items()}}
    text = f"""# Memory of a training step, predicted and measured

`{command}` ({machine}).
Measured MB, and the error of the prediction. Scratch is what oneDNN's convolutions and LSTM take and give back within
one call; it is not predicted, so that the last column is the error where it counts.
"""
    text += "".join(f"\n## {title}\n\n{table(rows)}\n" for title, rows in parts.items())
    print(text)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "profiler_memory.json").write_text(json.dumps(data, indent=1) + "\n")
    (RESULTS / "profiler_memory.md").write_text(text)


if __name__ == "__main__":
    main()
