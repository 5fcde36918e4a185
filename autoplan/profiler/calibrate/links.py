"""Collectives over payloads and numbers of processes. A process that fails or hangs ends the measurement, not the wait.

Payloads are what `autoplan.hardware.collective_s` takes: bytes of the full tensor per process.
"""

from __future__ import annotations

import datetime
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from autoplan.errors import OptionError
from autoplan.profiler.calibrate.machine import Sample, rising, summary

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv", "broadcast")
LIMIT_S = 60.0
"""Seconds that the processes of one group size may take."""
SLICE_S = 0.35
"""Seconds spent on one kind and payload, once it has run a first time."""


def links(size: int, quick: bool, device: torch.device) -> tuple[dict[str, Any], dict[str, float], str]:
    """Measures among 2 and among `size` processes.

    Args:
        size: Most processes.
        quick: Fewer payloads, less time for each.
        device: Where this process measures.

    Returns:
        Keys of a level of links, the largest spread of each kind, and the name of the back end.
    """
    backend = "nccl" if device.type == "cuda" and torch.cuda.device_count() >= size else "gloo"
    found = {n: measure(n, backend, quick) for n in sorted({2, size})}
    pairs = found[2]["all_reduce"]
    (_, first), (large, last) = pairs[0], pairs[-1]
    level: dict[str, Any] = {"bytes_per_s": large / last.seconds, "latency_s": first.seconds / 2}
    spreads = {}
    for kind in KINDS:
        level[kind] = [
            [b, s, n] for n, rows in found.items() for b, s in rising([(b, x.seconds) for b, x in rows[kind]])
        ]
        spreads[kind] = max(x.spread for rows in found.values() for _, x in rows[kind])
    return level, {**spreads, "bytes_per_s": last.spread, "latency_s": first.spread}, backend


def measure(size: int, backend: str, quick: bool, limit_s: float = LIMIT_S) -> dict[str, list[tuple[float, Sample]]]:
    """Kind -> (payload bytes, sample), measured among `size` processes.

    Raises:
        OptionError: A process failed, or they took longer than `limit_s` together.
    """
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        workers = [
            context.Process(target=_rank, args=(rank, size, backend, quick, folder, limit_s), daemon=True)
            for rank in range(size)
        ]
        for worker in workers:
            worker.start()
        why = _wait(workers, limit_s)
        reasons = sorted(Path(folder).glob("failed*"))
        results = Path(folder, "results")
        if why or not results.exists():
            said = f" ({reasons[0].read_text()})" if reasons else ""
            raise OptionError(f"{backend} could not be measured among {size} processes: {why}{said}; try fewer --ranks")
        rows = json.loads(results.read_text())
    return {kind: [(b, Sample(s, spread)) for b, s, spread in points] for kind, points in rows.items()}


def _wait(workers: list[Any], limit_s: float) -> str:
    """Waits for all; why they did not end well, or an empty text. None is left running."""
    end = time.monotonic() + limit_s
    why = ""
    while not why and any(w.is_alive() for w in workers):
        time.sleep(0.02)
        if any(w.exitcode for w in workers):
            why = "a process failed"
        elif time.monotonic() > end:
            why = f"no result after {limit_s:.0f} s"
    for worker in workers:
        if worker.is_alive():
            worker.kill()
        worker.join()
    return why or ("a process failed" if any(w.exitcode for w in workers) else "")


def _rank(rank: int, size: int, backend: str, quick: bool, folder: str, limit_s: float) -> None:
    try:
        torch.set_num_threads(1)
        device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
        if backend == "nccl":
            torch.cuda.set_device(device)
        limit = datetime.timedelta(seconds=limit_s)
        store = f"file://{folder}/store"
        dist.init_process_group(backend, init_method=store, rank=rank, world_size=size, timeout=limit)
        largest = 28 if backend == "nccl" else 22 if quick else 24
        powers = range(10, largest + 1, 4 if quick else 2)
        rows = {
            kind: [(float(1 << p), *_timed(kind, rank, size, 1 << p, device, quick)) for p in powers] for kind in KINDS
        }
        if rank == 0:
            Path(folder, "results").write_text(json.dumps(rows))
        dist.barrier()
        dist.destroy_process_group()
    except Exception as e:
        Path(folder, f"failed{rank}").write_text(f"{type(e).__name__}: {' '.join(str(e).split())[:200]}")
        raise SystemExit(1) from None


def _timed(kind: str, rank: int, size: int, payload: int, device: torch.device, quick: bool) -> tuple[float, float]:
    """Median seconds of one collective and their spread; all processes start together, the first of them counts."""
    full = torch.zeros(max(payload // 4 // size, 1) * size, device=device)
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

    def several(calls: int) -> float:
        dist.barrier()
        begun = time.perf_counter()
        for _ in range(calls):
            run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if kind in ("send_recv", "broadcast"):  # a sender is done before its receivers are
            dist.barrier()
        return (time.perf_counter() - begun) / calls

    several(1)
    took = torch.tensor([several(1)], dtype=torch.float64, device=device)
    dist.all_reduce(took, dist.ReduceOp.MAX)  # all have to agree on the number of calls
    repeats = 5 if quick else 9
    calls = int(min(20, max(1, (SLICE_S / 3 if quick else SLICE_S) / repeats / took.item())))
    found = summary([several(calls) for _ in range(repeats)])
    return found.seconds, found.spread
