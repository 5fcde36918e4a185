"""Cells and the network: every op once, only backwards, blocks folded by structure."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from autoplan.ir import GraphInput, Op, OpGraph
from autoplan.planner.cells import make_cells
from autoplan.planner.formulate import MEMORY, decode, evaluate, formulate
from autoplan.planner.network import Network, build_network
from autoplan.rules import analyse
from autoplan.trace import trace
from autoplan_solver import sweep
from tests.planner.cases import mlp_graph, setting, transformer_graph


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


def test_what_does_not_repeat_is_not_folded() -> None:
    graph = mlp_graph()
    table = analyse(graph)
    net = build_network(graph, table, make_cells(graph, table.rules))
    assert net.runs == () and net.cls == tuple(range(len(net.nodes)))
    assert dataclasses.replace(net).unfolded().cls == net.cls


class Residual(nn.Module):
    """Blocks ``x + down(tanh(up(x)))`` of the given hidden widths; with `skips` every block's input reaches the end."""

    def __init__(self, hidden: tuple[int, ...], skips: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.up = nn.ModuleList(nn.Linear(8, h) for h in hidden)
        self.down = nn.ModuleList(nn.Linear(h, 8) for h in hidden)
        if tied:
            for layer in self.down:
                layer.bias = self.down[0].bias
        self.skips = skips

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        seen = [x]
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(torch.tanh(up(x)))
            seen.append(x)
        return self.last(torch.cat(seen) if self.skips else x).mean()


def residual(hidden: tuple[int, ...], **kwargs: bool) -> tuple[OpGraph, Network]:
    with torch.device("meta"):
        graph = trace(Residual(hidden, **kwargs), (torch.empty(4, 8),)).graph
    table = analyse(graph)
    return graph, build_network(graph, table, make_cells(graph, table.rules))


@pytest.mark.parametrize(
    ("hidden", "runs"),
    [((16, 16, 16), (3,)), ((16, 24, 16), ()), ((16, 16, 24, 32, 32, 32), (2, 3)), ((16, 32, 16, 32), (2,))],
)
def test_blocks_of_other_widths_are_no_repetition(hidden: tuple[int, ...], runs: tuple[int, ...]) -> None:
    graph, net = residual(hidden)
    assert net.runs == runs
    for n, k in enumerate(net.cls):  # what stands for another looks like it
        mine, other = net.nodes[n], net.nodes[k]
        for v, w in zip(mine.exports, other.exports, strict=True):
            assert (graph.values[v].shape, graph.values[v].dtype) == (graph.values[w].shape, graph.values[w].dtype)


@pytest.mark.parametrize("kwargs", [{"skips": True}, {"tied": True}])
@pytest.mark.parametrize("mesh", [(2,), (2, 2)])
def test_folding_is_exact_where_blocks_are_wired_unusually(kwargs: dict[str, bool], mesh: tuple[int, ...]) -> None:
    """Skips to the end and a bias that all blocks share: whatever is folded costs what it costs unfolded."""
    graph, _ = residual((16, 16, 16, 16), **kwargs)
    net, prices, options = setting(graph, mesh, "cpu-gloo")
    form = formulate(net, prices, options)
    for p in sweep(form.problem, MEMORY, n_points=5):
        assert p.x is not None
        price = p.multipliers.get(MEMORY, 0.0)
        value = evaluate(net, prices, options, decode(form, p.x), price)
        assert value is not None
        assert value.cost_s + price * value.bytes == pytest.approx(p.priced, rel=1e-9)
