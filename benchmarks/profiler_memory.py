"""Predicted memory of a training step against the allocator of the same step on this CPU, over the models of the zoo.

    OMP_NUM_THREADS=1 python benchmarks/profiler_memory.py                # all; writes results/profiler_memory.*
    python benchmarks/profiler_memory.py --models gpt2,mlp                # some, prints only
    python benchmarks/profiler_memory.py --optimizer sgd-momentum         # another optimizer, prints only

Measured: bytes of the live tensors before the step (parameters, buffers, batch, optimizer state), plus the running sum
of the allocator's own ``[memory]`` events (`torch.profiler`, ``profile_memory=True``) over one step that follows a
warm-up step, gradients set to None and garbage collected. Saved: unique storages that `saved_tensors_hooks` sees on
real tensors, without those of parameters, buffers and the batch.
Scratch: what oneDNN's convolutions allocate and free within one call (layout changes, accumulators; they depend on the
instruction set) is left out of the peaks and shown apart, as far as it would have raised them. It is not predicted.

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
from zoo import ZOO, run

RESULTS = Path(__file__).parent / "results"
CONVOLUTIONS = {"aten::convolution", "aten::convolution_backward"}
COLUMNS = ("forward", "backward", "step", "saved")
SMALL = ("gpt2", "llama", "bert", "transformer-encoder", "mlp")
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
    """Bytes above the start: peak, what convolutions add to it within one call, and the end; what was returned."""

    most: int
    scratch: int
    left: int
    result: Any


def peak(action: Callable[[], Any]) -> Peak:
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as p:
        result = action()
    events = p.profiler.kineto_results.events()
    inside = [(e.start_ns(), e.start_ns() + e.duration_ns()) for e in events if e.name() in CONVOLUTIONS]
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    total = most = scratch = 0
    for (t, n), (later, _) in zip(changes, [*changes[1:], (float("inf"), 0)], strict=True):
        total += n
        if any(start <= t and later <= end for start, end in inside):
            scratch = max(scratch, total)  # more comes or goes before the convolution returns
        else:
            most = max(most, total)
    return Peak(most, max(0, scratch - most), total, result)


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
    forward, base = base + first.most, base + first.left
    second = peak(first.result.backward)
    backward, base = base + second.most, base + second.left
    step = max(forward, backward, base + peak(update.step).most if update is not None else 0)
    scratch = max(first.scratch, second.scratch)
    return {"forward": forward, "backward": backward, "step": step, "saved": saved, "scratch": scratch}


def measure_row(name: str, optimizer: str = "adamw") -> Row:
    torch.manual_seed(0)
    model, inputs = ZOO[name]()
    predicted = predict(model, inputs, optimizer)
    return Row(name, predicted, measure(model, inputs, optimizer))


def predict(model: nn.Module, inputs: Any, optimizer: str) -> dict[str, int]:
    found = autoplan.profile(model, inputs, optimizer=optimizer)
    return {**found.peak_bytes, "saved": found.saved_activation_bytes}


def table(rows: Sequence[Row]) -> str:
    """Markdown: MB measured and the error of the prediction, and a summary."""
    lines = [
        "| model | " + " | ".join(f"{c} MB | error" for c in COLUMNS) + " | scratch MB |",
        "|---|" + "---:|---:|" * len(COLUMNS) + "---:|",
    ]
    for r in rows:
        cells = [f"{r.measured[c] / 1e6:.2f} | {r.error(c):+.2%}" for c in COLUMNS]
        lines.append(f"| {r.model} | " + " | ".join(cells) + f" | {r.measured['scratch'] / 1e6:.2f} |")
    for name, pick in (("median error", statistics.median), ("worst error", max)):
        cells = [f" | {pick([abs(r.error(c)) for r in rows]):.2%}" for c in COLUMNS]
        lines.append(f"| {name} | " + " | ".join(cells) + " | |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="", help="comma-separated names")
    parser.add_argument("--optimizer", default="adamw", choices=OPTIMIZERS)
    args = parser.parse_args()
    names = args.models.split(",") if args.models else list(ZOO)
    rows = [measure_row(name, args.optimizer) for name in names]
    text = table(rows)
    print(text)
    if args.models or args.optimizer != "adamw":
        return
    RESULTS.mkdir(exist_ok=True)
    machine = f"{platform.machine()}, torch {torch.__version__}, {torch.get_num_threads()} thread"
    data = {"command": "OMP_NUM_THREADS=1 python benchmarks/profiler_memory.py", "machine": machine}
    (RESULTS / "profiler_memory.json").write_text(
        json.dumps({**data, "rows": [asdict(r) for r in rows]}, indent=1) + "\n"
    )
    head = f"# Memory of a training step, predicted and measured\n\n`{data['command']}` ({machine}).\n"
    head += (
        "Measured MB, and the error of the prediction; scratch is what oneDNN's convolutions would add to the peaks\n"
    )
    head += "within one call, which is not predicted.\n\n"
    (RESULTS / "profiler_memory.md").write_text(head + text + "\n")


if __name__ == "__main__":
    main()
