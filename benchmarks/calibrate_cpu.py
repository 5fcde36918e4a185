"""Measure one CPU machine and print the numbers of a `cpu-gloo` profile file.

    OMP_NUM_THREADS=1 python benchmarks/calibrate_cpu.py

Every process gets one thread, because that is how the runs of autoplan on CPU are meant to be started. Each figure is
the fastest of several repeats: on a shared machine the fastest repeat is the least disturbed one. The output is TOML
that can be pasted into a file like `profiles/cpu-gloo.toml`. It takes about a minute.

Quantities: matmul rate (FLOP/s, 2 per multiply-add), copy rate (bytes/s, read plus written), overhead of one small op
(seconds), and for 2 and 4 processes on the loopback device the seconds of a collective by payload (bytes of the whole
tensor: gathered for all-gather, unreduced for reduce-scatter).
"""

from __future__ import annotations

import argparse
import socket
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

MATMUL_SIZES = (64, 128, 256, 512, 1024)
COPY_BYTES = (1 << 20, 1 << 23, 1 << 26, 1 << 28)
PAYLOADS = (1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 22, 1 << 24)
GROUP_SIZES = (2, 4)
REPEATS = 15


def fastest_s(run: Callable[[], object], *, seconds: float = 0.05) -> float:
    """Returns the seconds per call of `run` in the fastest of several repeats."""
    run()
    start = time.perf_counter()
    run()
    once = max(time.perf_counter() - start, 1e-7)
    calls = max(1, int(seconds / REPEATS / once))
    best = float("inf")
    for _ in range(REPEATS):
        start = time.perf_counter()
        for _ in range(calls):
            run()
        best = min(best, (time.perf_counter() - start) / calls)
    return best


def launch_s() -> float:
    """Returns the seconds that one tiny op costs, whatever its size."""
    a = torch.ones(1)
    return fastest_s(lambda: torch.add(a, a))


def matmul_times(dtype: torch.dtype, sizes: Sequence[int]) -> list[tuple[float, float]]:
    """Returns (flops, seconds) of square matrix products."""
    rows = []
    for n in sizes:
        a = torch.randn(n, n).to(dtype)
        out = torch.empty(n, n, dtype=dtype)
        rows.append((2.0 * n**3, fastest_s(lambda a=a, out=out: torch.mm(a, a, out=out), seconds=0.4)))  # type: ignore[misc]
    return rows


def copy_times() -> list[tuple[float, float]]:
    """Returns (bytes read plus written, seconds) of tensor copies."""
    rows = []
    for size in COPY_BYTES:
        a = torch.ones(size // 8)
        b = torch.empty_like(a)
        rows.append((2.0 * a.nbytes, fastest_s(lambda a=a, b=b: b.copy_(a), seconds=0.3)))  # type: ignore[misc]
    return rows


def efficiency(rows: Sequence[tuple[float, float]], launch: float) -> tuple[float, list[tuple[float, float]]]:
    """Returns the best rate and the fraction of it at each size, with the launch taken off and times made monotone."""
    net, longest = [], 0.0
    for size, seconds in rows:
        longest = max(longest, seconds - launch, 0.05 * seconds)
        net.append((size, longest))
    peak = max(size / seconds for size, seconds in net)
    return peak, [(size, size / seconds / peak) for size, seconds in net]


def _run_collective(kind: str, full: torch.Tensor, part: torch.Tensor) -> None:
    if kind == "all_reduce":
        dist.all_reduce(full)
    elif kind == "all_gather":  # torch 2.13 deprecates the older name
        getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(full, part)
    else:
        getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)(part, full)


def _worker(rank: int, size: int, port: int, results: mp.SimpleQueue) -> None:  # type: ignore[type-arg]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    rows = []
    for kind in ("all_reduce", "all_gather", "reduce_scatter"):
        for payload in PAYLOADS:
            full = torch.zeros(payload // 4)
            part = torch.zeros(payload // 4 // size)
            calls = max(2, min(100, (1 << 21) // payload))
            best = float("inf")
            for _ in range(REPEATS):
                dist.barrier()
                start = time.perf_counter()
                for _ in range(calls):
                    _run_collective(kind, full, part)
                best = min(best, (time.perf_counter() - start) / calls)
            rows.append((kind, payload, best, size))
    dist.barrier()
    if rank == 0:
        results.put(rows)
    dist.destroy_process_group()


def collective_times(size: int) -> list[tuple[str, int, float, int]]:
    """Returns (kind, payload bytes, seconds, group size) for `size` gloo processes on the loopback device."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    processes = [context.Process(target=_worker, args=(rank, size, port, results)) for rank in range(size)]
    for process in processes:
        process.start()
    rows: list[tuple[str, int, float, int]] = results.get()
    for process in processes:
        process.join()
    return rows


def monotone(rows: Sequence[tuple[int, float, int]]) -> list[tuple[int, float, int]]:
    """Returns the rows with seconds raised to the largest of the smaller payloads of the same group size."""
    longest: dict[int, float] = {}
    out = []
    for payload, seconds, size in rows:
        longest[size] = max(longest.get(size, 0.0), seconds)
        out.append((payload, longest[size], size))
    return out


def main() -> None:
    """Measures and prints the TOML fragments."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None).parse_args()
    torch.set_num_threads(1)
    launch = launch_s()
    print(f"# torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}")
    print("[device]")
    print(f"kernel_launch_s = {launch:.2g}")
    peak, curve = efficiency(matmul_times(torch.float32, MATMUL_SIZES), launch)
    print(f"# float32 = {peak:.3g}")
    print("matmul_efficiency = [" + ", ".join(f"[{s:.0f}, {f:.3f}]" for s, f in curve) + "]")
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        ((flops, seconds),) = matmul_times(dtype, (512,))
        print(f"# {str(dtype).removeprefix('torch.')} = {flops / (seconds - launch):.3g}")
    peak, curve = efficiency(copy_times(), launch)
    print(f"memory_bytes_per_s = {peak:.3g}")
    print("memory_efficiency = [" + ", ".join(f"[{s:.0f}, {f:.3f}]" for s, f in curve) + "]")
    print("[[level]]")
    measured = [row for size in GROUP_SIZES for row in collective_times(size)]
    for kind in ("all_reduce", "all_gather", "reduce_scatter"):
        print(f"{kind} = [")
        for payload, seconds, size in monotone([(p, s, n) for k, p, s, n in measured if k == kind]):
            print(f"    [{payload}, {seconds:.2e}, {size}],")
        print("]")


if __name__ == "__main__":
    main()
