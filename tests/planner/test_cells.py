"""Cells and the network: every op once, only backwards, blocks folded by structure."""

from __future__ import annotations

import dataclasses

import pytest

from autoplan.ir import GraphInput, Op, OpGraph
from autoplan.planner.cells import make_cells
from autoplan.planner.network import build_network
from autoplan.rules import analyse
from tests.planner.cases import mlp_graph, transformer_graph


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_every_op_in_one_cell_that_reads_only_earlier_ones(kind: str) -> None:
    graph = transformer_graph(kind, 2, width=64, batch=2, sequence=16)
    cells = make_cells(graph, analyse(graph).rules)
    assert sorted(op.key for c in cells for op in c.ops) == sorted(op.key for op in graph.ops)
    known = {i.value for i in graph.inputs}
    for cell in cells:
        assert set(cell.ext) <= known, cell.name
        known.update(o for op in cell.ops for o in op.outputs)


def test_cells_of_a_gpt2_block() -> None:
    graph = transformer_graph("gpt2", 1, width=64, batch=2, sequence=16)
    cells = make_cells(graph, analyse(graph).rules)
    block = [c for c in cells if c.ops[0].module.startswith("transformer.h.0")]
    assert [c.ops[0].name for c in block] == [
        "layer_norm", "addmm", "scaled_dot_product_attention", "addmm", "add",
        "layer_norm", "addmm", "mul", "addmm", "add",
    ]  # fmt: skip
    activation = block[7]
    assert [op.name for op in activation.ops if op.name != "view"] == [
        "mul",
        "pow",
        "mul",
        "add",
        "mul",
        "tanh",
        "add",
        "mul",
    ]


def test_a_written_out_norm_is_one_cell() -> None:
    graph = transformer_graph("llama", 1, width=64, batch=2, sequence=16)
    cells = make_cells(graph, analyse(graph).rules)
    norm = [c for c in cells if c.ops[0].module.endswith("input_layernorm")]
    assert [[op.name for op in c.ops] for c in norm] == [["pow", "mean", "add", "rsqrt", "mul", "mul"]]


@pytest.mark.parametrize(("kind", "layers"), [("gpt2", 4), ("llama", 3)])
def test_identical_blocks_are_folded(kind: str, layers: int) -> None:
    graph = transformer_graph(kind, layers, width=64, batch=2, sequence=16)
    table = analyse(graph)
    net = build_network(graph, table, make_cells(graph, table.rules))
    assert net.runs == (layers,)
    one = transformer_graph(kind, 1, width=64, batch=2, sequence=16)
    small = build_network(one, analyse(one), make_cells(one, analyse(one).rules))
    assert len(set(net.cls)) <= len(small.nodes) + 2  # a fan at the end of the last block may stand for itself


def test_folding_does_not_look_at_names() -> None:
    graph = transformer_graph("gpt2", 3, width=64, batch=2, sequence=16)
    renamed = OpGraph(
        tuple(GraphInput(i.value, i.kind, f"t{k}") for k, i in enumerate(graph.inputs)),
        tuple(Op(f"op{k}", o.target, o.args, o.kwargs, o.outputs) for k, o in enumerate(graph.ops)),
        graph.values,
        graph.outputs,
        graph.loss,
    )
    table = analyse(renamed)
    assert build_network(renamed, table, make_cells(renamed, table.rules)).runs == (3,)


def test_unequal_blocks_are_not_folded() -> None:
    graph = mlp_graph()
    table = analyse(graph)
    net = build_network(graph, table, make_cells(graph, table.rules))
    assert net.runs == () and net.cls == tuple(range(len(net.nodes)))
    assert dataclasses.replace(net).unfolded().cls == net.cls
