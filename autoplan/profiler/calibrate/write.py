"""`calibrate`: measures everything and states it as the text of a profile file."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from autoplan.errors import OptionError
from autoplan.profiler.calibrate.device import bare, copies, launch, new_tensors, products, updates, view
from autoplan.profiler.calibrate.links import links
from autoplan.profiler.calibrate.machine import Machine, Points, Sample, rising
from autoplan.profiler.calibrate.rates import own_rates

PHASES = 7


def calibrate(
    *,
    name: str = "calibrated",
    ranks: int = 2,
    threads: int = 1,
    quick: bool = False,
    progress: Callable[[str], None] = lambda phase: None,
) -> str:
    """Measures this machine.

    Args:
        name: Name of the profile.
        ranks: Most processes between which collectives are measured, at least 2.
        threads: Threads of one process on a CPU.
        quick: Fewer sizes and repeats.
        progress: Told of each phase and how many there are.

    Returns:
        The text of a profile file.

    Raises:
        OptionError: Too few ranks or threads, or collectives that fail or hang.
    """
    if ranks < 2 or threads < 1:
        raise OptionError(f"calibrate needs at least 2 ranks and 1 thread, not {ranks} and {threads}")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        cuda = torch.cuda.is_available()
        device = torch.device("cuda" if cuda else "cpu")
        machine = Machine(device, not cuda and threads == 1, 5 if quick else 9, 0.01 if quick else 0.03)
        return measure(machine, name, ranks, threads, quick, progress)
    finally:
        torch.set_num_threads(before)


def measure(m: Machine, name: str, ranks: int, threads: int, quick: bool, progress: Callable[[str], None]) -> str:
    """`calibrate` on a given clock."""
    how = f"measured by autoplan calibrate, torch {torch.__version__}, {_what(m.device)}"
    how += "" if m.device.type == "cuda" else f", {threads} {'threads' if threads > 1 else 'thread'}"

    def source(what: str, samples: Sequence[Sample]) -> str:
        return f"{how}; {what}; spread up to {max(s.spread for s in samples):.0%}"

    phases = iter(range(1, PHASES + 1))

    def phase(what: str) -> None:
        progress(f"{what} ({next(phases)} of {PHASES})")

    phase("new memory")  # first: what was freed before decides what the allocator of the C library keeps
    new = new_tensors(m, quick) if m.device.type == "cpu" else []
    phase("overhead of an op")
    (start, hot), look = launch(m), view(m)
    phase("optimizer")
    update = updates(m)
    phase("matrix products")
    call = bare(m)
    multiplied, rates = products(m, call, quick)
    phase("memory")
    copied = copies(m, call, quick)
    peak, product_curve = _efficiency([(size, s.seconds) for size, s in multiplied])
    copy_peak, copy_curve = _efficiency([(size, s.seconds) for size, s in copied])
    phase("ops of other rates")
    allocation = rising([(size, s.seconds) for size, s in new])
    own = own_rates(m, hot.seconds)  # probes run in hot loops as well
    phase("collectives")
    level, spreads, backend = links(ranks, quick, m.device)
    memory, reserved = _memory(m.device, ranks)

    sources = {
        "memory_bytes": f"{how}; all of the memory"
        + ("" if m.device.type == "cuda" else f", shared by {ranks} processes"),
        "memory_bytes_per_s": source("best copy, read plus written", [s for _, s in copied]),
        "kernel_launch_s": source("an op in a chain of tiny modules, forward and backward, other work before", [start]),
        "reserved_bytes": "assumed: driver context and communication buffers" if reserved else "assumed: none",
        "allocator_granularity_bytes": "PyTorch: c10/cuda/CUDACachingAllocator or c10/core/alignment.h",
        "matmul_efficiency": source("square products in float32", [s for _, s in multiplied]),
        "memory_efficiency": source("copies", [s for _, s in copied]),
        "view_s": source(
            "a chain of views, forward and backward, other work before; 0 on a device that runs behind", [look]
        ),
        "update_s": source("AdamW of torch.optim, other work before", [s for _, s in update]),
        "op_flops_per_s": source("modules of usual sizes", [s for _, _, s in own]),
        "flops_per_s": source("the largest product of each dtype; float32: the best size", [s for _, _, s in rates]),
    }
    device: dict[str, Any] = {
        "name": _what(m.device),
        "memory_bytes": memory,
        "memory_bytes_per_s": copy_peak,
        "kernel_launch_s": start.seconds,
        "reserved_bytes": reserved,
        "allocator_granularity_bytes": 512 if m.device.type == "cuda" else 64,
        "matmul_efficiency": product_curve,
        "memory_efficiency": copy_curve,
        "view_s": look.seconds if m.device.type == "cpu" else 0.0,
        "update_s": rising([(size, s.seconds) for size, s in update]),
    }
    if allocation:
        device["allocation_s"] = allocation
        sources["allocation_s"] = source("new tensors, less the same work in existing ones", [s for _, s in new])
    flops = {"float32": peak, **{dtype: rate for dtype, rate, _ in rates if dtype != "float32"}}

    def where(key: str) -> str:
        of = {"bytes_per_s": "largest all-reduce of 2; ", "latency_s": "smallest all-reduce of 2; "}.get(key, "")
        sizes = "2" if ranks == 2 else f"2 and {ranks}"
        return f"{how}; {backend}, {sizes} processes; {of}spread up to {spreads[key]:.0%}"

    return "\n".join([
        f"# {how}; {time.strftime('%Y-%m-%d')}.", "",
        "[cluster]", f"name = {json.dumps(name)}", f"description = {json.dumps('measured by autoplan calibrate on this machine')}",  # noqa: E501
        "nodes = 1", f"devices_per_node = {ranks}", "",
        "[device]", *_lines(device), "", "[device.flops_per_s]", *_lines(flops), "",
        "[device.op_flops_per_s]", *_lines({json.dumps(op): list(pair) for op, pair, _ in own}), "",
        "[device.source]", *_lines(sources), "",
        "[[level]]", f'name = "{backend}"', *_lines(level), "",
        "[level.source]", *_lines({key: where(key) for key in level}), "",
    ])  # fmt: skip


def _lines(table: dict[str, Any]) -> list[str]:
    def shown(value: Any) -> str:
        if isinstance(value, list | tuple):
            return "[" + ", ".join(map(shown, value)) + "]"
        return f"{value:.4g}" if isinstance(value, float) else json.dumps(value)

    return [f"{key} = {shown(value)}" for key, value in table.items()]


def _what(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name()
    return f"CPU with {torch.backends.cpu.get_cpu_capability()}"


def _memory(device: torch.device, ranks: int) -> tuple[int, int]:
    """Bytes that one process can address, and those of them that no tensor can use."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory, 1 << 30
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // ranks, 0


def _efficiency(rows: Points) -> tuple[float, Points]:
    """The best rate, and the fraction of it at each size; times are made to rise with size."""
    rows = rising(rows)
    peak = max(size / seconds for size, seconds in rows)
    return peak, [(size, float(f"{min(1.0, size / seconds / peak):.4g}")) for size, seconds in rows]
