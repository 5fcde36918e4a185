"""Runs a function on several ranks of a gloo process group and never hangs."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_PRELOAD = ["torch", "torch.distributed.tensor", "torch._functorch.aot_autograd", "transformers"]


class RankError(AssertionError):
    """Some rank raised or did not end; holds every traceback."""


class KilledError(RankError):
    """Some rank died of a segmentation fault."""


def run_ranks(n: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 90.0) -> list[Any]:
    """Runs ``fn(rank, *args)`` on `n` ranks; returns what each returned.

    `fn` must be importable (a top-level function), and `args` and results picklable. The process group is initialised
    and every rank computes on one thread.

    Raises:
        RankError: A rank raised (with its traceback), died, or exceeded `timeout_s`.
    """
    try:
        return _attempt(n, fn, args, timeout_s)
    except KilledError as e:
        # Seen once, cause unknown: a rank died of a segmentation fault while reducing over gloo. The trace is printed.
        print(f"a rank died of a signal, once more:\n{e}", file=sys.stderr)
        return _attempt(n, fn, args, timeout_s)


def _attempt(n: int, fn: Callable[..., Any], args: tuple[Any, ...], timeout_s: float) -> list[Any]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=_rank, args=(r, n, folder, fn, args), daemon=True) for r in range(n)]
        for p in ranks:
            p.start()
        try:
            _join(ranks, time.monotonic() + timeout_s, Path(folder))
            return _results(n, Path(folder), [p.exitcode for p in ranks])
        finally:
            for p in ranks:
                if p.is_alive():
                    p.kill()
                p.join()
                p.close()


def _join(ranks: list[Any], deadline: float, folder: Path) -> None:
    """Waits for all; once one has failed, the others get a few seconds more."""
    while any(p.is_alive() for p in ranks):
        if list(folder.glob("*.error")) or any(p.exitcode for p in ranks):
            deadline = min(deadline, time.monotonic() + 10)
            folder = folder / "seen"  # shorten the deadline once
        if time.monotonic() > deadline:
            return
        time.sleep(0.02)


def _results(n: int, folder: Path, codes: list[int | None]) -> list[Any]:
    out, problems = [], []
    for r in range(n):
        if (folder / f"{r}.result").exists():
            out.append(pickle.loads((folder / f"{r}.result").read_bytes()))
        elif (folder / f"{r}.error").exists():
            problems.append(f"rank {r}:\n{(folder / f'{r}.error').read_text()}")
        else:
            fault = folder / f"{r}.fault"
            last = fault.read_text() if fault.exists() else ""
            problems.append(f"rank {r} did not finish (exit code {codes[r]})\n{last}")
    if problems:
        kind = KilledError if -signal.SIGSEGV in codes else RankError
        raise kind("\n".join(problems))
    return out


def _rank(rank: int, n: int, folder: str, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")  # as pytest has it
    where = Path(folder)
    faulthandler.enable(open(where / f"{rank}.fault", "w"))  # noqa: SIM115  # open until the process ends
    try:
        store = dist.FileStore(str(where / "store"), n)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=n, timeout=timedelta(seconds=60))
        result = pickle.dumps(fn(rank, *args))
        temporary = where / f"{rank}.tmp"
        temporary.write_bytes(result)
        dist.barrier()  # a rank that leaves early breaks the others' connections
        temporary.rename(where / f"{rank}.result")
    except BaseException:
        (where / f"{rank}.error").write_text(traceback.format_exc())
        os._exit(1)
    os._exit(0)  # gloo may abort at interpreter exit after correct work
