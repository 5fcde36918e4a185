"""Emission: what a plan says stands in the code; errors; the same code everywhere."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from autoplan.api import plan
from autoplan.api.emitting import adapt, emit
from autoplan.codegen.emit import readable
from autoplan.codegen.program import Note
from autoplan.codegen.shard import shard
from autoplan.errors import PlanMismatchError
from autoplan.ir import OpGraph, OpPlan, Plan, StagePlan
from autoplan.trace import trace


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 32)
        self.down = nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.nn.functional.gelu(self.up(x))).square().mean()


def planned(mesh: tuple[int, ...] = (2,)) -> tuple[OpGraph, Plan]:
    with torch.device("meta"):
        model, x = Mlp(), torch.empty(4, 8)
    rest = ",R" * (len(mesh) - 1)
    pins = {
        "up.weight": "S(0)" + rest,
        "up.bias": "S(0)" + rest,
        "down.weight": "S(1)" + rest,
        "args.0": "R" + rest,
    }
    made = plan(model, (x,), mesh=mesh, pins=pins)
    return trace(model, (x,)).graph, made


def columns_then_rows(made: Plan, graph: OpGraph) -> Plan:
    """The plan with the hidden dim sharded: columns of `up`, rows of `down`."""
    cut = {"up": ("R", "S(0)", "S(0)", "S(1)"), "down": ("S(1)", "S(1)", "P", "P"), "gelu": ("S(1)", "S(1)")}
    from autoplan.ir import Placement

    ops = dict(made.ops)
    for op in graph.ops:
        for name, texts in cut.items():
            if op.key.startswith(name + ":") or (name == "gelu" and op.name == "gelu"):
                *ins, out = [Placement.parse(t, made.mesh) for t in texts]
                ops[op.key] = OpPlan(tuple(ins), (out,))
            elif op.name in ("square", "pow", "mean", "mul"):
                whole = Placement.parse("R", made.mesh)
                ops[op.key] = OpPlan((whole,) * len(op.inputs), (whole,))
    return made.replace(stages=(StagePlan(ops),))


def test_golden_code(golden: Callable[[str, str], None]) -> None:
    graph, made = planned()
    emitted = emit(graph, columns_then_rows(made, graph))
    assert emitted.graphs.backward is not None
    code = readable(emitted.graphs.forward, "forward") + "\n" + readable(emitted.graphs.backward, "backward")
    assert "all_reduce" in code and "shard" not in code.split("def ")[0]
    golden(code, "emitted_mlp.py.txt")


def test_local_shapes_and_notes() -> None:
    graph, made = planned()
    program = shard(graph, columns_then_rows(made, graph))
    shapes = {i.path: tuple(v.shape) for i, v in zip(program.inputs, program.values, strict=True)}
    assert shapes["up.weight"] == (16, 8) and shapes["down.weight"] == (8, 16)
    notes = [Note.read(n) for n in program.gm.graph.nodes if n.op == "call_function"]
    assert all(n is not None and n.op for n in notes)
    assert {n.role for n in notes if n} == {"op", "reshard"}


def test_another_graph_is_refused() -> None:
    graph, made = planned()
    with pytest.raises(PlanMismatchError, match=graph.fingerprint):
        shard(graph, made.replace(graph_fingerprint="0" * 16))


def test_missing_entries_are_named() -> None:
    graph, made = planned()
    ops = dict(made.ops)
    key = next(iter(ops))
    del ops[key]
    with pytest.raises(PlanMismatchError, match="no fitting entry for op"):
        shard(graph, made.replace(stages=(StagePlan(ops),)))
    inputs = {k: v for k, v in made.inputs.items() if k != "up.weight"}
    with pytest.raises(PlanMismatchError, match="up.weight"):
        shard(graph, made.replace(inputs=inputs))


def test_adapt_replicates_what_the_plan_does_not_know() -> None:
    graph, made = planned()
    shorter = made.replace(stages=(StagePlan({}),), graph_fingerprint="0" * 16)
    adapted = adapt(shorter, graph)
    assert all(p.is_replicated for o in adapted.ops.values() for p in (*o.operands, *o.results))
    shard(graph, adapted)


def test_the_same_code_in_every_process() -> None:
    script = (
        "from tests.codegen.test_shard import planned; from autoplan.api.emitting import emit;"
        "from autoplan.codegen.emit import readable; g, p = planned((2, 2)); e = emit(g, p);"
        "import hashlib; print(hashlib.sha256((p.hash + readable(e.graphs.forward) +"
        " readable(e.graphs.backward)).encode()).hexdigest())"
    )
    root = Path(__file__).parents[2]
    digests = set()
    for seed in ("1", "2"):
        run = subprocess.run(
            [sys.executable, "-c", script],
            cwd=root,
            env={"PYTHONHASHSEED": seed, "PATH": "", "PYTHONPATH": f"{root}:{root / 'solver'}", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=True,
        )
        digests.add(run.stdout.strip())
    assert len(digests) == 1
