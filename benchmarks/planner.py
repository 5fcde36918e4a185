"""How long the joint problem takes: options, rows, the first multiplier, a sweep; and whole models.

    OMP_NUM_THREADS=1 python benchmarks/planner.py            # all cases, writes benchmarks/results/planner.{json,md}
    python benchmarks/planner.py --small                      # one tiny case, prints only

Seconds are medians of three runs in one process, on one thread. `fractional` counts the points of the sweep whose
linear program was not integral; `gap` is that of the proposal at a cap half way between least and most memory, and
`next` the seconds that proposal takes once the mesh is solved (refining at the cap, integer program).
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from autoplan.hardware import load_cluster
from autoplan.ir import Mesh, OpGraph, PlanOptions
from autoplan.planner import Search
from autoplan.planner.cells import make_cells
from autoplan.planner.formulate import MEMORY, formulate, node_options
from autoplan.planner.network import build_network
from autoplan.planner.pricing import Prices
from autoplan.rules import analyse
from autoplan.trace import trace
from autoplan_solver import LagrangianSolver, sweep

RESULTS = Path(__file__).parent / "results"
POINTS = 8
LAPS = ("analyse", "options", "formulate", "first", "sweep", "search", "next")


@dataclass(frozen=True)
class Case:
    """A model on a mesh of A100 nodes."""

    name: str
    kind: str
    layers: int
    width: int
    mesh: tuple[int, ...]
    vocabulary: int = 512
    batch: int = 8
    sequence: int = 1024


CASES = (
    Case("GPT-2 block, width 2048", "gpt2", 1, 2048, (2, 4)),
    Case("GPT-2 block, width 2048", "gpt2", 1, 2048, (8, 8), batch=64),
    Case("GPT-2 block, width 2048", "gpt2", 1, 2048, (2, 2, 4)),
    Case("Llama-3-8B layer", "llama", 1, 4096, (2, 4)),
    Case("Llama-3-8B layer", "llama", 1, 4096, (8, 8), batch=64),
    Case("GPT-2 XL, 48 layers", "gpt2", 48, 1600, (2, 8), vocabulary=50257, batch=64),
    Case("Llama-3-8B, 32 layers", "llama", 32, 4096, (2, 8), vocabulary=128256, batch=16),
)
SMALL = Case("GPT-2 block, width 64", "gpt2", 1, 64, (2, 2), batch=4, sequence=16)


@dataclass(frozen=True)
class Row:
    """One line of the table; times in seconds."""

    case: str
    mesh: str
    options: int
    variables: int
    rows: int
    analyse_s: float
    options_s: float
    formulate_s: float
    first_s: float
    sweep_s: float
    points: int
    fractional: int
    gap: float
    search_s: float
    next_s: float

    def cells(self) -> Sequence[str]:
        """For the markdown table."""
        seconds = (self.analyse_s, self.options_s, self.formulate_s, self.first_s, self.sweep_s, self.search_s)
        seconds += (self.next_s,)
        return (
            self.case, self.mesh, f"{self.options:,}", f"{self.variables:,}", f"{self.rows:,}",
            *(f"{s:.2f}" for s in seconds), f"{self.fractional}/{self.points}", f"{self.gap:.2%}",
        )  # fmt: skip


def graph_of(case: Case) -> OpGraph:
    """The whole model's forward graph, traced on meta tensors."""
    import transformers

    transformers.logging.set_verbosity_error()
    common = {"vocab_size": case.vocabulary, "use_cache": False, "bos_token_id": 0, "eos_token_id": 0}
    with torch.device("meta"):
        if case.kind == "gpt2":
            heads = 16 if case.width % 16 == 0 and case.width != 1600 else (4 if case.width < 512 else 25)
            model = transformers.GPT2LMHeadModel(
                transformers.GPT2Config(
                    n_layer=case.layers, n_embd=case.width, n_head=heads, n_positions=case.sequence,
                    resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **common,
                )
            )  # fmt: skip
        else:
            model = transformers.LlamaForCausalLM(
                transformers.LlamaConfig(
                    hidden_size=case.width, num_attention_heads=32, num_key_value_heads=8, intermediate_size=14336,
                    num_hidden_layers=case.layers, max_position_embeddings=case.sequence, **common,
                )
            )  # fmt: skip
        ids = torch.zeros(case.batch, case.sequence, dtype=torch.int64)
    return trace(model.train(), {"input_ids": ids, "labels": ids}).graph


def run(case: Case, repeats: int = 3) -> Row:
    """Measures one case."""
    graph = graph_of(case)
    mesh = Mesh(case.mesh)
    cluster = load_cluster("a100-8x", devices=mesh.size)
    laps: dict[str, list[float]] = {k: [] for k in LAPS}
    for _ in range(repeats):
        clock = _Clock(laps)
        table = analyse(graph)
        clock.lap("analyse")
        prices = Prices(graph, table, cluster, mesh, "adamw")
        network = build_network(graph, table, make_cells(graph, table.rules))
        options = node_options(network, prices, {}, remat=True)
        clock.lap("options")
        form = formulate(network, prices, options)
        clock.lap("formulate")
        LagrangianSolver(form.problem).solve({MEMORY: 0.0})
        clock.lap("first")
        points = sweep(form.problem, MEMORY, n_points=POINTS)
        clock.lap("sweep")
        search = Search(graph, cluster, PlanOptions(mesh=mesh))
        clock.lap("search")
        least, most = points[-1].resources[MEMORY], points[0].resources[MEMORY]
        cap = int(least + (most - least) / 2)
        best = search.next(cap)
        clock.lap("next")
    gap = (best.value.cost_s - search.bound(cap)) / best.value.cost_s if best else float("nan")
    medians = {k: statistics.median(v) for k, v in laps.items()}
    return Row(
        case=case.name,
        mesh="x".join(map(str, case.mesh)),
        options=sum(map(len, options.values())),
        variables=form.problem.n_variables,
        rows=form.problem.n_rows,
        analyse_s=medians["analyse"],
        options_s=medians["options"],
        formulate_s=medians["formulate"],
        first_s=medians["first"],
        sweep_s=medians["sweep"],
        points=len(points),
        fractional=sum(p.n_fractional > 0 for p in points),
        gap=max(0.0, gap),
        search_s=medians["search"],
        next_s=medians["next"],
    )


class _Clock:
    def __init__(self, laps: dict[str, list[float]]) -> None:
        self.laps, self.last = laps, time.perf_counter()

    def lap(self, name: str) -> None:
        """Adds the seconds since the last lap to `name`."""
        now = time.perf_counter()
        self.laps[name].append(now - self.last)
        self.last = now


def table(rows: Sequence[Row]) -> str:
    """Markdown."""
    head = (
        "case", "mesh", "options", "variables", "rows", "factors s", "options s", "formulate s", "first λ s",
        f"sweep of {POINTS} s", "whole search s", "next s", "fractional", "gap",
    )  # fmt: skip
    lines = [head, ["---"] * len(head), *(r.cells() for r in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    """Runs the cases and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--small", action="store_true", help="one tiny case, nothing written")
    small = parser.parse_args().small
    rows = []
    for case in (SMALL,) if small else CASES:
        rows.append(run(case, 1 if small else 3))
        print(table(rows[-1:]).splitlines()[-1], flush=True)
    if small:
        return
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    machine = f"{platform.machine()}, 2 cores, torch {torch.__version__}, peak resident {peak:.0f} MiB"
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "planner.json").write_text(
        json.dumps({"machine": machine, "rows": [asdict(r) for r in rows]}, indent=1) + "\n"
    )
    command = "`OMP_NUM_THREADS=1 python benchmarks/planner.py`"
    (RESULTS / "planner.md").write_text(f"# Planner\n\n{command} on {machine}.\n\n{table(rows)}\n")


if __name__ == "__main__":
    main()
