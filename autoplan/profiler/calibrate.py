"""Measures the machine that it runs on and writes a profile file. The only file of this room that imports torch.

Every figure is the median of repeats; the spread that a source quotes is the distance between the quartiles relative
to the median. What runs on one thread of a CPU is timed in CPU seconds, which other processes hardly disturb; threads,
GPUs and collectives are timed by the clock. Measured are, in this order:

- the overhead of an op in eager autograd, from a chain of tiny modules; AdamW's update of one parameter over sizes,
- matrix products over sizes and dtypes, copies over sizes, and on a CPU new tensors over sizes, less the same work in
  memory that exists,
- ops that run far from the rate of a matrix product (`_Probe`), in the flops that the profiler counts for them,
- collectives over payloads and numbers of processes, with NCCL where there are as many GPUs, else with gloo.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional as F

from autoplan.errors import OptionError
from autoplan.profiler.flops import operations
from autoplan.profiler.seconds import rate_key
from autoplan.trace import trace

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv", "broadcast")
Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Sample:
    """Seconds of something: the median of repeats, and their spread relative to it."""

    seconds: float
    spread: float


@dataclass(frozen=True)
class _Machine:
    """How to measure here: the device, whether CPU seconds count, and how long."""

    device: torch.device
    cpu_seconds: bool
    repeats: int
    slice_s: float

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.process_time() if self.cpu_seconds else time.perf_counter()

    def sample(self, run: Callable[[], object], per: int = 1) -> Sample:
        """Seconds of ``run()`` divided by `per`, calls repeated until a repeat lasts `slice_s`."""
        run()
        begun = self.now()
        run()
        calls = max(1, int(self.slice_s / max(self.now() - begun, 1e-7)))
        times = []
        for _ in range(self.repeats):
            begun = self.now()
            for _ in range(calls):
                run()
            times.append((self.now() - begun) / calls / per)
        return _summary(times)

    def cold(self, run: Callable[[], object], per: int) -> Sample:
        """Seconds of one ``run()`` divided by `per`, after other work has filled the caches."""
        other = torch.empty(1 << 23, device=self.device)
        run()
        times = []
        for _ in range(self.repeats):
            other.fill_(1.0)
            begun = self.now()
            run()
            times.append((self.now() - begun) / per)
        return _summary(times)


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
        progress: Told of each phase.

    Returns:
        The text of a profile file.

    Raises:
        OptionError: Too few ranks or threads, or more ranks than the machine can hold.
    """
    if ranks < 2 or threads < 1:
        raise OptionError(f"calibrate needs at least 2 ranks and 1 thread, not {ranks} and {threads}")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        cuda = torch.cuda.is_available()
        device = torch.device("cuda" if cuda else "cpu")
        machine = _Machine(device, not cuda and threads == 1, 5 if quick else 9, 0.01 if quick else 0.03)
        return _measure(machine, name, ranks, threads, quick, progress)
    finally:
        torch.set_num_threads(before)


def write_profile(text: str, path: Path) -> None:
    """Writes a file in one step: whoever reads it sees all of it or what was there before."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _measure(m: _Machine, name: str, ranks: int, threads: int, quick: bool, progress: Callable[[str], None]) -> str:
    how = f"measured by autoplan calibrate, torch {torch.__version__}, {_what(m.device)}"
    how += "" if m.device.type == "cuda" else f", {threads} {'threads' if threads > 1 else 'thread'}"

    def source(what: str, samples: Sequence[Sample]) -> str:
        return f"{how}; {what}; spread up to {max(s.spread for s in samples):.0%}"

    progress("new memory")  # first: what was freed before decides what the allocator of the C library keeps
    new = _new_tensors(m, quick) if m.device.type == "cpu" else []
    progress("overhead of an op")
    launch = _launch(m)
    update, view = _updates(m), _view(m)
    progress("matrix products")
    bare = _bare(m)
    products, rates = _products(m, bare, quick)
    progress("memory")
    copies = _copies(m, bare, quick)
    peak, product_curve = _efficiency([(size, s.seconds) for size, s in products])
    copy_peak, copy_curve = _efficiency([(size, s.seconds) for size, s in copies])
    progress("ops of other rates")
    allocation = _rising([(size, s.seconds) for size, s in new])
    own = _own_rates(m, launch.seconds)
    progress("collectives")
    level, backend = _links(ranks, quick, m.device)
    memory, reserved = _memory(m.device, ranks)

    sources = {
        "memory_bytes": f"{how}; all of the memory"
        + ("" if m.device.type == "cuda" else f", shared by {ranks} processes"),
        "memory_bytes_per_s": source("best copy, read plus written", [s for _, s in copies]),
        "kernel_launch_s": source("an op in a chain of tiny modules, forward and backward", [launch]),
        "reserved_bytes": "assumed: driver context and communication buffers" if reserved else "assumed: none",
        "allocator_granularity_bytes": "PyTorch: c10/cuda/CUDACachingAllocator or c10/core/alignment.h",
        "matmul_efficiency": source("square products in float32", [s for _, s in products]),
        "memory_efficiency": source("copies", [s for _, s in copies]),
        "view_s": source("a chain of views, forward and backward; 0 on a device that runs behind", [view]),
        "update_s": source("AdamW of torch.optim, other work before", [s for _, s in update]),
        "op_flops_per_s": source("modules of usual sizes", [s for _, _, s in own]),
        "flops_per_s": source("the largest product of each dtype; float32: the best size", [s for _, _, s in rates]),
    }
    device: dict[str, Any] = {
        "name": _what(m.device),
        "memory_bytes": memory,
        "memory_bytes_per_s": copy_peak,
        "kernel_launch_s": launch.seconds,
        "reserved_bytes": reserved,
        "allocator_granularity_bytes": 512 if m.device.type == "cuda" else 64,
        "matmul_efficiency": product_curve,
        "memory_efficiency": copy_curve,
        "view_s": view.seconds if m.device.type == "cpu" else 0.0,
        "update_s": _rising([(size, s.seconds) for size, s in update]),
    }
    if allocation:
        device["allocation_s"] = allocation
        sources["allocation_s"] = source("new tensors, less the same work in existing ones", [s for _, s in new])
    flops = {"float32": peak, **{dtype: rate for dtype, rate, _ in rates if dtype != "float32"}}
    where = f"{how}; {backend}, {'2' if ranks == 2 else f'2 and {ranks}'} processes"
    return "\n".join([
        f"# {how}; {time.strftime('%Y-%m-%d')}.", "",
        "[cluster]", f"name = {json.dumps(name)}", f"description = {json.dumps('measured by autoplan calibrate on this machine')}",  # noqa: E501
        "nodes = 1", f"devices_per_node = {ranks}", "",
        "[device]", *_lines(device), "", "[device.flops_per_s]", *_lines(flops), "",
        "[device.op_flops_per_s]", *_lines({json.dumps(op): list(pair) for op, pair, _ in own}), "",
        "[device.source]", *_lines(sources), "",
        "[[level]]", f'name = "{backend}"', *_lines(level), "",
        "[level.source]", *_lines(dict.fromkeys(level, where) | {"bytes_per_s": f"{where}; largest all-reduce", "latency_s": f"{where}; smallest all-reduce"}), "",  # noqa: E501
    ])  # fmt: skip


def _lines(table: dict[str, Any]) -> list[str]:
    def shown(value: Any) -> str:
        if isinstance(value, list | tuple):
            return "[" + ", ".join(map(shown, value)) + "]"
        return f"{value:.4g}" if isinstance(value, float) else json.dumps(value)

    return [f"{key} = {shown(value)}" for key, value in table.items()]


def _summary(times: Sequence[float]) -> Sample:
    median = statistics.median(times)
    low, _, high = statistics.quantiles(times, n=4)
    return Sample(median, (high - low) / median if median else 0.0)


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
    rows = _rising(rows)
    peak = max(size / seconds for size, seconds in rows)
    return peak, [(size, float(f"{min(1.0, size / seconds / peak):.4g}")) for size, seconds in rows]


def _rising(rows: Points) -> Points:
    """Rows by size whose seconds are at least those of the size before; rounding cannot break the efficiency."""
    out: Points = []
    for size, seconds in rows:
        out.append((size, max(seconds, 1.002 * out[-1][1]) if out else seconds))
    return out


def _net(sample: Sample, overhead: float) -> Sample:
    """Seconds without the overhead of a launch; a twentieth stays, as neither figure is exact."""
    return Sample(max(sample.seconds - overhead, 0.05 * sample.seconds), sample.spread)


def _launch(m: _Machine) -> Sample:
    """Seconds of one kernel where nothing but overhead counts.

    A block of linear, GELU and layer norm starts 3 kernels forward and 3 + 1 + 1 backward, as the profiler counts them.
    """
    blocks = [layer for _ in range(16) for layer in (nn.Linear(4, 4), nn.GELU(), nn.LayerNorm(4))]
    model = nn.Sequential(*blocks).to(m.device)
    x = torch.ones(2, 4, device=m.device, requires_grad=True)

    def step() -> None:
        model(x).sum().backward()
        model.zero_grad()

    return m.sample(step, per=16 * 8)


def _view(m: _Machine) -> Sample:
    """Seconds of a view in eager autograd, forward or backward."""
    x = torch.ones(2, 2, device=m.device, requires_grad=True)

    def step() -> None:
        y = x
        for _ in range(32):
            y = y.transpose(0, 1).view_as(y)
        y.sum().backward()  # type: ignore[no-untyped-call]

    return m.sample(step, per=4 * 32)


def _bare(m: _Machine) -> float:
    """Seconds of a call into PyTorch, without modules and autograd."""
    a, b = torch.zeros(1, device=m.device), torch.ones(1, device=m.device)
    return m.sample(lambda: b.copy_(a)).seconds


def _updates(m: _Machine) -> list[tuple[float, Sample]]:
    """Seconds of AdamW, as `torch.optim` runs it by itself, for one parameter of so many bytes."""
    rows = []
    for n, count in ((1 << 4, 24), (1 << 12, 24), (1 << 16, 8), (1 << 20, 2)):
        parameters = [nn.Parameter(torch.zeros(n, device=m.device)) for _ in range(count)]
        for p in parameters:
            p.grad = torch.ones_like(p)
        rows.append((4.0 * n, m.cold(torch.optim.AdamW(parameters).step, per=count)))
    return rows


def _products(
    m: _Machine, launch: float, quick: bool
) -> tuple[list[tuple[float, Sample]], list[tuple[str, float, Sample]]]:
    cuda = m.device.type == "cuda"
    sizes = (
        (256, 512, 1024, 2048, 4096, 8192)
        if cuda
        else (32, 64, 128, 256, 512)
        if quick
        else (32, 64, 128, 256, 512, 1024)
    )

    def product(n: int, dtype: torch.dtype) -> tuple[float, Sample]:
        a = torch.randn(n, n, device=m.device).to(dtype)
        out = torch.empty_like(a)
        return 2.0 * n**3, _net(m.sample(lambda: torch.mm(a, a, out=out)), launch)

    rows = [product(n, torch.float32) for n in sizes]
    rates = []
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        flops, s = product(sizes[-1] if cuda else 256, dtype)
        rates.append((str(dtype).removeprefix("torch."), flops / s.seconds, s))
    return rows, rates


def _copies(m: _Machine, launch: float, quick: bool) -> list[tuple[float, Sample]]:
    largest = 28 if m.device.type == "cuda" else 24 if quick else 26
    rows = []
    for power in range(14, largest + 1, 2):
        a = torch.ones(1 << power >> 2, device=m.device)
        b = torch.empty_like(a)
        rows.append((2.0 * a.nbytes, _net(m.sample(lambda a=a, b=b: b.copy_(a)), launch)))  # type: ignore[misc]
    return rows


def _new_tensors(m: _Machine, quick: bool) -> list[tuple[float, Sample]]:
    """Seconds that a new tensor costs beyond one that exists; 64 MiB are held and freed in reverse, as in training.

    With that much held the figures hardly depend on what the process allocated before; with less the C library keeps or
    returns all of it, by history.
    """
    torch.empty(1 << 20).fill_(1.0)
    rows = []
    for power in range(14, 25 if quick else 27, 2):
        n, count = 1 << power >> 2, max(2, 1 << 26 >> power)
        kept = [torch.zeros(n) for _ in range(4)]

        def made(n: int = n, count: int = count) -> None:
            held = [torch.empty(n).fill_(1.0) for _ in range(count)]
            while held:
                held.pop()

        exists = m.sample(lambda k=kept: [t.fill_(1.0) for t in k], per=4)  # type: ignore[misc]
        new = m.sample(made, per=count)
        rows.append((4.0 * n, Sample(max(new.seconds - exists.seconds, 1e-7), new.spread)))
    return rows


class _Probe(nn.Module):
    """One op of a usual size, so that tracing finds it and the clock sees little else."""

    def __init__(self, run: Callable[..., torch.Tensor], *operands: tuple[int, ...]) -> None:
        super().__init__()
        self.run = run
        self.operands = nn.ParameterList(nn.Parameter(torch.rand(*shape)) for shape in operands)

    def forward(self, unused: torch.Tensor) -> torch.Tensor:
        return self.run(*self.operands)


def _probes() -> list[_Probe]:
    rows, image = (512, 256), (4, 32, 32, 32)
    pointwise: list[Callable[..., torch.Tensor]] = [
        torch.tanh, torch.exp, torch.sigmoid, torch.erf, torch.cos, torch.sin, torch.rsqrt, F.gelu, F.silu, F.softplus,
        F.relu, lambda x: x.pow(2), lambda x: x.pow(3.0), lambda x: F.softmax(x, -1), lambda x: F.log_softmax(x, -1),
        lambda x: F.dropout(x, 0.1), lambda x: F.layer_norm(x, (256,)),
    ]  # fmt: skip

    def attention(x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(x, torch.zeros(512, dtype=torch.int64, device=x.device))

    return [
        *(_Probe(run, rows) for run in pointwise),
        _Probe(attention, (4, 4, 128, 32)),
        _Probe(lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.1), (4, 4, 128, 32)),
        _Probe(loss, (512, 1024)),
        _Probe(lambda x, w: F.conv1d(x, w, padding=1), (4, 64, 128), (64, 64, 3)),
        _Probe(lambda x, w: F.conv1d(x, w, padding=1, groups=64), (4, 64, 128), (64, 1, 3)),
        _Probe(lambda x, w: F.conv2d(x, w, padding=1), image, (32, 32, 3, 3)),
        _Probe(lambda x, w: F.conv2d(x, w, padding=3, groups=32), image, (32, 1, 7, 7)),
        _Probe(lambda x: F.group_norm(x, 4), image),
        _Probe(lambda x: F.max_pool2d(x, 2), image),
        _Probe(lambda x: F.avg_pool2d(x, 2), image),
    ]


def _own_rates(m: _Machine, launch: float) -> list[tuple[str, tuple[float, float], Sample]]:
    """(op, (forward, backward) flops per second, sample); its result is freed each time, so that no memory is new."""
    found: dict[str, tuple[tuple[float, float], Sample]] = {}
    nothing = torch.zeros(1, device=m.device)
    for probe in _probes():
        graph = trace(probe, (nothing.cpu(),)).graph
        op = max(graph.ops, key=lambda op: operations(op, graph)[0])
        ahead, behind = operations(op, graph)
        model = probe.to(m.device)
        gradient = torch.ones_like(model(nothing))

        def forward(model: nn.Module = model) -> torch.Tensor:
            out: torch.Tensor = model(nothing)
            return out

        def both(run: Callable[[], torch.Tensor] = forward, g: torch.Tensor = gradient) -> None:
            run().backward(g)  # type: ignore[no-untyped-call]

        one, two = m.sample(forward), m.sample(both)
        back = Sample(max(two.seconds - one.seconds, 0.1 * two.seconds), two.spread)
        first, second = _net(one, launch).seconds, _net(back, launch).seconds
        rates = (ahead / first, max(behind, 1) / second)
        key = rate_key(op, graph)
        if key not in found or rates[0] < found[key][0][0]:  # the slowest variant of an op
            found[key] = rates, Sample(one.seconds, max(one.spread, two.spread))
    return [(key, rates, sample) for key, (rates, sample) in found.items()]


def _links(ranks: int, quick: bool, device: torch.device) -> tuple[dict[str, Any], str]:
    """Keys of the level of links, and the name of the back end."""
    backend = "nccl" if device.type == "cuda" and torch.cuda.device_count() >= ranks else "gloo"
    rows = [row for size in sorted({2, ranks}) for row in _collectives(size, backend, quick)]
    out: dict[str, Any] = {}
    reduce = [(b, s) for kind, size, b, s in rows if kind == "all_reduce" and size == 2]
    out["bytes_per_s"] = reduce[-1][0] / reduce[-1][1]
    out["latency_s"] = reduce[0][1] / 2
    for kind in KINDS:
        table: list[list[float]] = []
        for size in sorted({2, ranks}):
            points = _rising([(b, s) for k, n, b, s in rows if k == kind and n == size])
            table += [[b, s, size] for b, s in points]
        if table:
            out[kind] = table
    return out, backend


def _collectives(size: int, backend: str, quick: bool) -> list[tuple[str, int, float, float]]:
    """(kind, group size, payload bytes, seconds), measured among `size` processes."""
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (size, backend, quick, os.path.join(folder, "store"), results)
        workers = [context.Process(target=_rank, args=(rank, *arguments)) for rank in range(size)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if any(worker.exitcode for worker in workers):
            raise OptionError(f"{backend} could not be measured among {size} processes; try fewer --ranks")
    rows: list[tuple[str, int, float, float]] = results.get()
    return rows


def _rank(rank: int, size: int, backend: str, quick: bool, store: str, results: Any) -> None:
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size)
    rows = []
    largest = 28 if backend == "nccl" else 22 if quick else 24
    for kind in KINDS:
        for power in range(10, largest + 1, 4 if quick else 2):
            rows.append((kind, size, float(1 << power), _collective_s(kind, rank, size, 1 << power, device, quick)))
    dist.barrier()
    if rank == 0:
        results.put(rows)
    dist.destroy_process_group()


def _collective_s(kind: str, rank: int, size: int, payload: int, device: torch.device, quick: bool) -> float:
    """Median seconds of one collective; all processes start together."""
    full = torch.zeros(payload // 4 // size * size, device=device)
    part = torch.zeros(full.numel() // size, device=device)
    other = torch.empty_like(full)

    def run() -> None:
        if kind == "all_reduce":
            dist.all_reduce(full)
        elif kind == "all_gather":
            getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(full, part)
        elif kind == "reduce_scatter":
            getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)(part, full)
        elif kind == "all_to_all":
            dist.all_to_all_single(other, full)
        elif kind == "broadcast":
            dist.broadcast(full, 0)
        elif rank == 0:
            dist.send(full, 1)
        elif rank == 1:
            dist.recv(full, 0)

    calls = max(1, min(20, (1 << 22) // payload))
    times = []
    for _ in range(6 if quick else 10):
        dist.barrier()
        begun = time.perf_counter()
        for _ in range(calls):
            run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier() if kind in ("send_recv", "broadcast") else None
        times.append((time.perf_counter() - begun) / calls)
    return statistics.median(times[1:])
