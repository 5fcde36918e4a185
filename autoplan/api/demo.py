"""The demo: a GPT-2 planned under a tight memory cap, trained on four local processes, compared with one process.

`run_demo` plans, starts the ranks (this module as a script, one process each), trains the same model in one process,
and returns both as a `DemoResult`. Text comes from the standard library's help topics; bytes are hashed in pairs, so
that ids spread over the whole vocabulary.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autoplan.api import planning
from autoplan.api.parallel import parallelize
from autoplan.errors import AutoplanError, OptionError, WorkerError
from autoplan.ir import Plan
from autoplan.runtime import ParallelModule, measure_peak

VOCABULARY = 50_257
LAYERS, WIDTH, HEADS, SEQUENCE, BATCH = 4, 256, 8, 128, 8
MESH = (2, 2)
RANKS = 4
TOLERANCE = 1e-5
LEARNING_RATE = 1e-4
"""Small enough that twenty steps do not amplify the noise of single precision beyond `TOLERANCE`."""
CAP_FRACTIONS = (0.8, 0.7, 0.6, 0.5)
"""Of what the unconstrained plan needs; the first that makes the planner recompute something."""
MEASURED_STEP = 2


@dataclass(frozen=True)
class DemoResult:
    """What the demo did.

    Attributes:
        plan: The plan that ran.
        free_bytes: Peak per device of the plan without a cap.
        peak_bytes: Measured peak of each rank.
        losses: Loss of each step on four processes.
        norms: Gradient norm of each step on four processes.
        single_losses: Loss of each step in one process.
        single_norms: Gradient norm of each step in one process.
        seconds: Wall time of each phase.
    """

    plan: Plan
    free_bytes: int
    peak_bytes: tuple[int, ...]
    losses: tuple[float, ...]
    norms: tuple[float, ...]
    single_losses: tuple[float, ...]
    single_norms: tuple[float, ...]
    seconds: dict[str, float]

    @property
    def worst_loss(self) -> float:
        """Largest relative difference of a loss."""
        return _worst(self.losses, self.single_losses)

    @property
    def worst_norm(self) -> float:
        """Largest relative difference of a gradient norm."""
        return _worst(self.norms, self.single_norms)

    @property
    def failures(self) -> tuple[str, ...]:
        """What went wrong, in words; empty when all is well."""
        out = []
        if not self.worst_loss <= TOLERANCE:
            out.append(f"losses differ by {self.worst_loss:.1e}, more than {TOLERANCE:.0e}")
        if not self.worst_norm <= TOLERANCE:
            out.append(f"gradient norms differ by {self.worst_norm:.1e}, more than {TOLERANCE:.0e}")
        if max(self.peak_bytes) > self.plan.cap_bytes:
            out.append(f"a rank used {max(self.peak_bytes):,} bytes, the cap is {self.plan.cap_bytes:,}")
        return tuple(out)


def _worst(a: Sequence[float], b: Sequence[float]) -> float:
    differences = [abs(x - y) / abs(y) for x, y in zip(a, b, strict=True)]
    return math.nan if any(map(math.isnan, differences)) else max(differences)


def demo_model() -> nn.Module:
    """An unmodified `GPT2LMHeadModel` with a tied head, without dropout so that losses can be compared."""
    try:
        import transformers
    except ImportError as e:
        raise OptionError('the demo needs transformers: pip install "torch-autoplan[demo]"') from e
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=LAYERS,
        n_embd=WIDTH,
        n_head=HEADS,
        n_positions=SEQUENCE,
        vocab_size=VOCABULARY,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    return model.train()


def demo_batches(steps: int) -> Iterator[dict[str, torch.Tensor]]:
    """Batches of English text: neighbouring bytes, hashed to the vocabulary; made one at a time, so one is held."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[k] for k in sorted(topics)).encode()
    size = BATCH * SEQUENCE
    for step in range(steps):
        start = step * size
        pairs = [(text[i % len(text)], text[(i + 1) % len(text)]) for i in range(start, start + size)]
        ids = torch.tensor([(a * 40_503 + b * 9_973) % VOCABULARY for a, b in pairs]).view(BATCH, SEQUENCE)
        yield {"input_ids": ids, "labels": ids}


def run_demo(*, steps: int = 20, progress: Callable[[str], None] = lambda phase: None) -> DemoResult:
    """Plans, trains on four processes and on one.

    Raises:
        WorkerError: A rank failed; quotes the end of what it printed.
    """
    seconds: dict[str, float] = {}
    start = time.perf_counter()
    progress("planning without a memory cap")
    model, batch = demo_model(), next(demo_batches(1))
    free = planning.plan(model, batch, mesh=MESH)
    made = _tight(model, batch, max(free.peak_bytes), progress)
    seconds["plan"] = time.perf_counter() - start

    start = time.perf_counter()
    progress(f"training {steps} steps on {RANKS} processes")
    ranks = _run_ranks(made, steps)
    seconds["four processes"] = time.perf_counter() - start

    start = time.perf_counter()
    progress(f"training {steps} steps in one process")
    losses, norms, _ = train(model, demo_batches(steps))
    seconds["one process"] = time.perf_counter() - start
    return DemoResult(
        plan=made,
        free_bytes=max(free.peak_bytes),
        peak_bytes=tuple(int(r["peak"]) for r in ranks),
        losses=tuple(ranks[0]["losses"]),
        norms=tuple(ranks[0]["norms"]),
        single_losses=losses,
        single_norms=norms,
        seconds=seconds,
    )


def _tight(model: nn.Module, batch: Any, free_bytes: int, progress: Callable[[str], None]) -> Plan:
    """The plan under the loosest of the caps that needs recomputation."""
    made: Plan | None = None
    for fraction in CAP_FRACTIONS:
        cap = int(fraction * free_bytes)
        progress(f"planning under a cap of {cap / 1e6:,.0f} MB")
        made = planning.plan(model, batch, mesh=MESH, memory=cap)
        if any(o.remat == "recompute" for o in made.ops.values()):
            return made
    assert made is not None
    return made


def train(
    model: nn.Module, batches: Iterable[dict[str, torch.Tensor]]
) -> tuple[tuple[float, ...], tuple[float, ...], int]:
    """Trains with AdamW; returns losses, gradient norms before the update, and the peak bytes of one step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses, norms, peak = [], [], 0

    def step(batch: dict[str, torch.Tensor]) -> None:
        loss = model(**batch).loss
        loss.backward()
        losses.append(loss.item())
        norms.append(_norm(model))
        optimizer.step()
        optimizer.zero_grad()

    for i, batch in enumerate(batches):
        if i == MEASURED_STEP and isinstance(model, ParallelModule):
            peak = measure_peak(lambda batch=batch: step(batch))  # type: ignore[misc]
        else:
            step(batch)
    return tuple(losses), tuple(norms), peak


def _norm(model: nn.Module) -> float:
    """Norm of all gradients, added up in double precision: torch's own is off by 8e-4 on tensors of this size."""
    if isinstance(model, ParallelModule):
        return float(model.clip_grad_norm_(float("inf")))
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return math.sqrt(sum(float(torch.linalg.vector_norm(g, dtype=torch.float64)) ** 2 for g in grads))


def _run_ranks(plan: Plan, steps: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        plan.save(Path(folder) / "plan.json")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(RANKS)}
        command = [sys.executable, "-m", "autoplan.api.demo", folder, str(steps)]
        logs = [open(Path(folder) / f"log{r}", "w+b") for r in range(RANKS)]  # noqa: SIM115
        ranks = [
            subprocess.Popen(command, env={**environment, "RANK": str(r)}, stdout=logs[r], stderr=subprocess.STDOUT)
            for r in range(RANKS)
        ]
        try:
            _wait(ranks, logs)
            return [json.loads((Path(folder) / f"rank{r}.json").read_text()) for r in range(RANKS)]
        finally:
            for rank in ranks:
                if rank.poll() is None:
                    rank.kill()
                rank.wait()
            for log in logs:
                log.close()


def _wait(ranks: Sequence[subprocess.Popen[bytes]], logs: Sequence[Any], limit_s: float = 600.0) -> None:
    """Waits for all ranks; the first that fails ends the others."""
    deadline = time.monotonic() + limit_s
    while any(p.poll() is None for p in ranks):
        failed = [r for r, p in enumerate(ranks) if p.poll() not in (None, 0)]
        if failed or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    for r, p in enumerate(ranks):
        if p.poll() != 0:
            logs[r].seek(0)
            said = logs[r].read().decode(errors="replace").strip().splitlines()[-12:]
            state = "did not finish in time" if p.poll() is None else f"ended with code {p.poll()}"
            raise WorkerError(f"rank {r} of the demo {state}; it said:\n" + "\n".join(said))


def _rank(folder: Path, steps: int) -> None:
    """One of the four processes."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS, timeout=timedelta(seconds=120)
    )
    model = parallelize(demo_model(), next(demo_batches(1)), plan=folder / "plan.json")
    losses, norms, peak = train(model, demo_batches(steps))
    made = folder / f"rank{rank}.json.tmp"
    made.write_text(json.dumps({"losses": losses, "norms": norms, "peak": peak}))
    made.replace(folder / f"rank{rank}.json")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        _rank(Path(sys.argv[1]), int(sys.argv[2]))
    except AutoplanError as error:
        sys.exit(f"error: {error}")
