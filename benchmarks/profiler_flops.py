"""Flops of real models, counted symbolically and by torch's own tools on the very same step.

    python benchmarks/profiler_flops.py            # the whole zoo; writes benchmarks/results/profiler_flops.{json,md}
    python benchmarks/profiler_flops.py gpt2 vit   # some of it; writes nothing

Three figures per model, forward and backward: autoplan's (nothing is run), ``FlopCounterMode``'s as it comes, and the
same counter taught the ops that it misses on a CPU (fused attention, grouped matmul), which is the reference where it
counts correctly: not for LSTM, which it misses, nor for the backward of grouped convolutions (ConvNeXt, Mamba), which
it counts as if they were not grouped. torchinfo, where installed, counts multiply-adds of the forward alone; they are
doubled. Seconds are CPU seconds.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

import autoplan

sys.path.insert(0, str(Path(__file__).parents[1]))
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
    }


def table(rows: list[dict[str, Any]]) -> str:
    """A Markdown table."""
    head = (
        "| model | autoplan GFLOP fwd + bwd | unknown ops | taught counter, fwd / bwd | plain counter, fwd + bwd "
        "| torchinfo, fwd | CPU s autoplan / counter |\n|---|---|---|---|---|---|---|\n"
    )
    lines = []
    for r in rows:
        own = r["forward"] + r["backward"]
        info = "-" if r["torchinfo_forward"] is None else _off(r["torchinfo_forward"], r["forward"])
        lines.append(
            f"| {r['model']} | {r['forward'] / 1e9:.3f} + {r['backward'] / 1e9:.3f} | {sum(r['unknown'].values())} "
            f"| {_off(r['taught'][0], r['forward'])} / {_off(r['taught'][1], r['backward'])} "
            f"| {_off(r['counter'][0] + r['counter'][1], own)} | {info} "
            f"| {r['profile_s']:.2f} / {r['counter'][2]:.2f} |"
        )
    return head + "\n".join(lines)


def _off(other: float, own: float) -> str:
    """What another tool says, relative to autoplan."""
    return "equal" if other == own else f"{(other / own - 1) * 100:+.3f} %" if own else "-"


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
            "# Flops of the zoo\n\n`python benchmarks/profiler_flops.py`; other tools relative to autoplan. Torch "
            "misses LSTM, and counts\nthe backward of grouped convolutions (ConvNeXt, Mamba) as if they were not "
            "grouped.\n\n"
        )
        (RESULTS / "profiler_flops.json").write_text(json.dumps(rows, indent=1) + "\n")
        (RESULTS / "profiler_flops.md").write_text(text + table(rows) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
