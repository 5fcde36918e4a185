"""Pins that cannot be, and what `assemble` writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping

import pytest

from autoplan.errors import InfeasibleError, OptionError
from autoplan.hardware import load_cluster
from autoplan.ir import Mesh, OpGraph, Plan, PlanOptions
from autoplan.planner import Search, assemble
from tests.planner.cases import mlp_graph, transformer_graph


@pytest.fixture(scope="module")
def graph() -> OpGraph:
    return transformer_graph("gpt2", 2, width=64, batch=4, sequence=16)


def search(graph: OpGraph, mesh: tuple[int, ...] | None, pins: Mapping[str, str], devices: int = 4) -> Search:
    options = PlanOptions(mesh=None if mesh is None else Mesh(mesh), pins=dict(pins))
    return Search(graph, load_cluster("cpu-gloo", devices=devices), options)


@pytest.mark.parametrize(
    ("mesh", "pins", "says"),
    [
        ((4,), {"*.c_fcc.weight": "R"}, r"'\*\.c_fcc\.weight' matches no parameter or input.*input_ids"),
        ((4,), {"*.c_fc.weight": "S[1]"}, r"S\[1\]"),
        ((4,), {"*.c_fc.weight": "P"}, r"c_fc\.weight=P: a stored tensor cannot be partial"),
        ((4,), {"*.c_fc.weight": "S(5)"}, r"c_fc\.weight=S\(5\) on transformer\.h\.0\.mlp\.c_fc\.weight"),
        ((2, 2), {"*.c_fc.weight": "S(1)"}, r"S\(1\)"),
        ((2, 2), {"*.c_fc.weight": "S(1)@tp"}, "tp"),
        ((3,), {"*.ln_1.weight": "S(0)"}, r"ln_1\.weight=S\(0\) on transformer\.h\.0\.ln_1\.weight"),
        (None, {"*.ln_1.weight": "S(1)"}, r"ln_1\.weight"),
    ],
    ids=[
        "no match",
        "malformed",
        "partial",
        "no such dim",
        "too few axes",
        "unknown axis",
        "does not divide",
        "any mesh",
    ],
)
def test_a_pin_that_cannot_be_is_named(
    graph: OpGraph, mesh: tuple[int, ...] | None, pins: dict[str, str], says: str
) -> None:
    with pytest.raises(OptionError, match=says):
        search(graph, mesh, pins)


def test_pins_hold_on_every_match_and_the_later_wins(graph: OpGraph) -> None:
    found = search(graph, (2, 2), {"*.c_fc.weight": "R,S(1)", "*.h.1.*.c_fc.weight": "S(0),R", "lm_head.weight": "R,R"})
    best = found.next(10**15)
    assert best is not None
    made = assemble(found, best, cap_bytes=10**15)
    assert str(made.inputs["transformer.h.0.mlp.c_fc.weight"]) == "R,S(1)"
    assert str(made.inputs["transformer.h.1.mlp.c_fc.weight"]) == "S(0),R"
    assert str(made.inputs["transformer.wte.weight"]) == "R,R"  # pinned by the other name of the tied weight


def test_different_pins_in_equal_blocks_keep_them_apart(graph: OpGraph) -> None:
    """Folding must not hand one block's pin to the other, nor forget a pin on a later block."""
    later = search(graph, (4,), {"*.h.1.attn.c_proj.weight": "R"})
    only = later.next(10**15)
    assert only is not None
    assert str(assemble(later, only, cap_bytes=10**15).inputs["transformer.h.1.attn.c_proj.weight"]) == "R"
    found = search(graph, (4,), {"*.h.1.attn.c_proj.weight": "S(1)", "*.h.0.attn.c_proj.weight": "S(0)"})
    best = found.next(10**15)
    assert best is not None
    made = assemble(found, best, cap_bytes=10**15)
    assert str(made.inputs["transformer.h.0.attn.c_proj.weight"]) == "S(0)"
    assert str(made.inputs["transformer.h.1.attn.c_proj.weight"]) == "S(1)"


def test_a_mesh_that_does_not_fit_names_both() -> None:
    with pytest.raises(OptionError, match="does not fit on the 4 devices"):
        search(mlp_graph(), (8,), {})


def test_a_plan_speaks_of_every_op_and_input(graph: OpGraph) -> None:
    found = search(graph, (2, 2), {})
    (problem,) = found.problems.values()
    for candidate in problem.candidates:
        made = assemble(found, candidate, cap_bytes=10**15)
        assert set(made.inputs) == {i.path for i in graph.inputs}
        assert set(made.ops) == {op.key for op in graph.ops}
        for op in graph.ops:
            entry = made.ops[op.key]
            assert (len(entry.operands), len(entry.results)) == (len(op.inputs), len(op.outputs))
            assert len(entry.keep_gathered) == len(op.inputs)
        again = Plan.from_json(json.loads(json.dumps(made.to_json())))
        assert again == made and again.hash == made.hash
        assert made.bound_s <= made.objective_s and made.gap >= 0.0
        assert sum(made.breakdown.values()) == pytest.approx(made.step_time_s, rel=1e-9)


def test_what_an_op_reads_lies_as_its_producer_left_it_or_is_moved(graph: OpGraph) -> None:
    """Within a cell nothing is redistributed: views agree with what they view."""
    found = search(graph, (2, 2), {})
    best = found.next(10**15)
    assert best is not None
    made = assemble(found, best, cap_bytes=10**15)
    (problem,) = found.problems.values()
    for node in problem.network.nodes:
        if node.cell is None:
            continue
        lies: dict[str, object] = {}
        for op in node.cell.ops:
            entry = made.ops[op.key]
            for v, placement in zip(op.inputs, entry.operands, strict=True):
                assert lies.setdefault(v, placement) == placement, (op.key, v)
            lies.update(zip(op.outputs, entry.results, strict=True))


SCRIPT = """
import json, sys
from autoplan.hardware import load_cluster
from autoplan.ir import OpGraph, PlanOptions
from autoplan.planner import Search, assemble
from autoplan.planner.formulate import MEMORY
graph = OpGraph.from_json(json.load(sys.stdin))
found = Search(graph, load_cluster("cpu-gloo", devices=4), PlanOptions(pins={"*.q_proj.weight": "S(0)@d0"}))
uses = [p.resources[MEMORY] for m in found.problems.values() for p in m.points]
for cap in (10**15, int(sum(uses) / len(uses))):
    print(assemble(found, found.next(cap), cap_bytes=cap).hash)
assert "torch" not in sys.modules
"""


def test_the_plan_does_not_depend_on_the_hash_seed() -> None:
    graph = json.dumps(transformer_graph("llama", 2, width=64, batch=4, sequence=16).to_json())
    out = set()
    for seed in ("0", "77"):
        paths = os.pathsep.join(p for p in sys.path if p)
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        run = [sys.executable, "-c", SCRIPT]
        out.add(subprocess.run(run, env=env, input=graph, text=True, check=True, stdout=subprocess.PIPE).stdout)
    assert len(out) == 1 and len(set(out.pop().split())) == 2


def test_pins_that_exclude_each_other_are_infeasible(graph: OpGraph) -> None:
    """An inner factor of a sample's positions that no op can compute with, on every mesh axis."""
    with pytest.raises((InfeasibleError, OptionError), match=r"pins|S\(1:5\)"):
        search(graph, (2,), {"transformer.wpe.weight": "S(1:5)"})
