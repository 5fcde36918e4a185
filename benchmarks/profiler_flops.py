"""Flops and peak memory of real models, found symbolically and by torch's own tools on the very same step.

    python benchmarks/profiler_flops.py            # the whole zoo; writes benchmarks/results/profiler_flops.{json,md}
    python benchmarks/profiler_flops.py gpt2 vit   # some of it; writes nothing

Three figures per model, forward and backward: autoplan's (nothing is run), ``FlopCounterMode``'s as it comes, and the
same counter taught the ops that it misses on a CPU (fused attention, grouped matmul), which is the reference where it
counts correctly: not for LSTM, which it misses, nor for the backward of grouped convolutions (ConvNeXt, Mamba), which
it counts as if they were not grouped. torchinfo, where installed, counts multiply-adds of the forward alone; they are
doubled. Seconds are CPU seconds.

Memory is the peak of a whole step with AdamW: autoplan's and that of torch's ``MemTracker`` on fake tensors (after a
step that makes the optimizer's state, as in ``profiler_memory.py``), each against the allocator of a real step.
"""

from __future__ import annotations

import copy
import json
import math
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

import autoplan

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.profiler_memory import measure as peaks
from benchmarks.zoo import ZOO, run

RESULTS = Path(__file__).parent / "results"


def _forward(q: Any, k: Any, v: Any, *rest: Any, out_shape: Any = None, **kw: Any) -> int:
    return int(2 * math.prod(q[:-1]) * k[-2] * (q[-1] + v[-1]))


def _backward(grad: Any, q: Any, k: Any, v: Any, *rest: Any, out_shape: Any = None, **kw: Any) -> int:
    return int(2 * math.prod(q[:-1]) * k[-2] * (3 * q[-1] + 2 * v[-1]))


def _experts(a: Any, b: Any, *rest: Any, out_shape: Any = None, **kw: Any) -> int:
    rows = a[1:] if len(a) > len(b) else a  # groups of columns share the rows
    return int(2 * math.prod(rows) * b[-1])


TAUGHT = {
    torch.ops.aten._grouped_mm: _experts,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _forward,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _backward,
}


def counted(make: Callable[[], Any], mapping: Mapping[Any, Any]) -> tuple[int, int, float]:
    """Flops forward and backward of a real step under torch's counter, and CPU seconds."""
    torch.manual_seed(0)
    model, inputs = make()
    begun = time.process_time()
    with FlopCounterMode(display=False, custom_mapping=dict(mapping)) as forward:
        loss = run(model, inputs)
    with FlopCounterMode(display=False, custom_mapping=dict(mapping)) as backward:
        loss.backward()
    return forward.get_total_flops(), backward.get_total_flops(), time.process_time() - begun


def torchinfo_forward(make: Callable[[], Any]) -> int | None:
    """Twice the multiply-adds that torchinfo counts, or None where it is not installed or fails."""
    try:
        from torchinfo import summary
    except ImportError:
        return None
    model, inputs = make()
    given = {"input_data": inputs} if isinstance(inputs, Mapping) else {"input_data": list(inputs)}
    try:
        return 2 * int(summary(model, **given, verbose=0).total_mult_adds)
    except Exception:
        return None


def mem_tracker(make: Callable[[], Any]) -> tuple[int, float] | None:
    """Peak of a step under torch's ``MemTracker`` on fake tensors, and CPU seconds; None where the step fails."""
    real, given = make()
    begun = time.process_time()
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    inputs = tree_map_only(torch.Tensor, fake.from_tensor, given)
    memo: dict[int, Any] = {id(b): fake.from_tensor(b) for b in real.buffers()}
    memo |= {id(p): torch.nn.Parameter(fake.from_tensor(p.detach()), p.requires_grad) for p in real.parameters()}
    model = copy.deepcopy(real, memo)
    try:
        with fake:
            optimizer = torch.optim.AdamW(model.parameters())
            run(model, inputs).backward()
            optimizer.step()
            optimizer.zero_grad()
            tracker = MemTracker()
            tracker.track_external(model, optimizer, *tree_leaves(inputs))
            with tracker:
                run(model, inputs).backward()
                optimizer.step()
    except Exception as e:  # whatever the model's code and torch's tools raise
        print(f"MemTracker: {type(e).__name__}: {str(e).splitlines()[0][:150]}", file=sys.stderr)
        return None
    peak = sum(parts["Total"] for parts in tracker.get_tracker_snapshot("peak").values())
    return peak, time.process_time() - begun


def measure(name: str) -> dict[str, Any]:
    """All figures of one model."""
    make = ZOO[name]
    torch.manual_seed(0)
    model, inputs = make()
    begun = time.process_time()
    profile = autoplan.profile(model, inputs)
    seconds = time.process_time() - begun
    plain = counted(make, {})
    taught = counted(make, TAUGHT)
    return {
        "model": name,
        "forward": profile.forward_flops,
        "backward": profile.backward_flops,
        "unknown": {k: u.count for k, u in profile.unknown_ops.items()},
        "profile_s": seconds,
        "counter": plain,
        "taught": taught,
        "torchinfo_forward": torchinfo_forward(make),
        "peak_bytes": profile.peak_bytes["step"],
        "mem_tracker": mem_tracker(make),
        "measured_peak_bytes": peaks(*make(), "adamw")["step"],
    }


def table(rows: list[dict[str, Any]]) -> str:
    """A Markdown table."""
    head = (
        "| model | autoplan GFLOP fwd + bwd | unknown ops | taught counter, fwd / bwd | plain counter, fwd + bwd "
        "| torchinfo, fwd | peak MB | autoplan's / MemTracker's | CPU s autoplan / counter / MemTracker |\n"
        "|---|---|---|---|---|---|---|---|---|\n"
    )
    lines = []
    for r in rows:
        own = r["forward"] + r["backward"]
        info = "-" if r["torchinfo_forward"] is None else _off(r["torchinfo_forward"], r["forward"])
        peak, seconds = (None, "-") if r["mem_tracker"] is None else (r["mem_tracker"][0], f"{r['mem_tracker'][1]:.2f}")
        lines.append(
            f"| {r['model']} | {r['forward'] / 1e9:.3f} + {r['backward'] / 1e9:.3f} | {sum(r['unknown'].values())} "
            f"| {_off(r['taught'][0], r['forward'])} / {_off(r['taught'][1], r['backward'])} "
            f"| {_off(r['counter'][0] + r['counter'][1], own)} | {info} "
            f"| {r['measured_peak_bytes'] / 1e6:.2f} | {_error(r, r['peak_bytes'])} / {_error(r, peak)} "
            f"| {r['profile_s']:.2f} / {r['counter'][2]:.2f} / {seconds} |"
        )
    return head + "\n".join(lines)


def _off(other: float, own: float) -> str:
    """What another tool says, relative to autoplan."""
    return "equal" if other == own else f"{(other / own - 1) * 100:+.3f} %" if own else "-"


def _error(row: Mapping[str, Any], peak: int | None) -> str:
    return "fails" if peak is None else f"{peak / row['measured_peak_bytes'] - 1:+.2%}"


def main(names: list[str]) -> None:
    rows = []
    for name in names or list(ZOO):
        try:
            rows.append(measure(name))
        except autoplan.AutoplanError as e:
            print(f"{name}: {str(e).splitlines()[0][:200]}", file=sys.stderr)
    print(table(rows))
    if not names:
        text = (
            "# Flops and peaks of the zoo\n\n`python benchmarks/profiler_flops.py`; flops of other tools relative to "
            "autoplan. Torch misses LSTM, and counts\nthe backward of grouped convolutions (ConvNeXt, Mamba) as if "
            "they were not grouped. Peaks of a step with AdamW, without\noneDNN's scratch, and their errors. "
            "MemTracker fails on frozen parameters (Whisper) and\non experts in fp32 (Mixtral), and does not see the "
            "workspace of LSTM. The counter runs the step itself; autoplan\nand MemTracker compute nothing.\n\n"
        )
        (RESULTS / "profiler_flops.json").write_text(json.dumps(rows, indent=1) + "\n")
        (RESULTS / "profiler_flops.md").write_text(text + table(rows) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
