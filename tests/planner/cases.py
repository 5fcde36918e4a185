"""Graphs to plan: transformer blocks at real widths on meta tensors, and networks small enough for brute force."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from autoplan.hardware import ClusterSpec, load_cluster
from autoplan.ir import Mesh, OpGraph
from autoplan.planner.cells import make_cells
from autoplan.planner.formulate import crossings, node_options
from autoplan.planner.network import Network, build_network
from autoplan.planner.options import Option
from autoplan.planner.pricing import Prices
from autoplan.rules import analyse
from autoplan.trace import trace


class Mlp(nn.Module):
    """A few cells: product, activation, product, loss."""

    def __init__(self, width: int = 8, hidden: int = 16) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x))).mean()


def mlp_graph(batch: int = 4, width: int = 8, hidden: int = 16) -> OpGraph:
    with torch.device("meta"):
        return trace(Mlp(width, hidden), (torch.empty(batch, width),)).graph


def transformer_graph(kind: str, layers: int, *, width: int = 2048, batch: int = 8, sequence: int = 1024) -> OpGraph:
    """GPT-2 or Llama (grouped KV heads), whole, with its loss."""
    import transformers

    transformers.logging.set_verbosity_error()
    common: dict[str, Any] = {"vocab_size": 8192, "use_cache": False, "bos_token_id": 0, "eos_token_id": 0}
    with torch.device("meta"):
        model: nn.Module
        if kind == "gpt2":
            config = transformers.GPT2Config(
                n_layer=layers, n_embd=width, n_head=16, n_positions=sequence,
                resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **common,
            )  # fmt: skip
            model = transformers.GPT2LMHeadModel(config)
        else:
            llama = transformers.LlamaConfig(
                hidden_size=width, num_attention_heads=16, num_key_value_heads=8, intermediate_size=4 * width,
                num_hidden_layers=layers, max_position_embeddings=sequence, **common,
            )  # fmt: skip
            model = transformers.LlamaForCausalLM(llama)
        ids = torch.zeros(batch, sequence, dtype=torch.int64)
    return trace(model.train(), {"input_ids": ids, "labels": ids}).graph


def setting(
    graph: OpGraph,
    mesh: tuple[int, ...],
    cluster: str | ClusterSpec = "a100-8x",
    *,
    remat: bool = True,
    fold: bool = True,
) -> tuple[Network, Prices, dict[int, list[Option]]]:
    """Network, prices and options of a graph on a mesh."""
    table = analyse(graph)
    size = Mesh(mesh).size
    prices = Prices(graph, table, load_cluster(cluster, devices=size), Mesh(mesh), "adamw")
    network = build_network(graph, table, make_cells(graph, table.rules), fold=fold)
    return network, prices, node_options(network, prices, {}, remat=remat)


def brute_force(
    net: Network, prices: Prices, options: Mapping[int, Sequence[Option]], cap: float
) -> tuple[float, float] | None:
    """Least time (and its bytes) over every combination of options and of kept copies; independent of the rows.

    Options are fixed node by node; the ways over an edge are added as soon as both ends are known. Partial sums are
    bounded by the best found.
    """
    order = range(len(net.nodes))
    into = {n: [e for e in net.edges if e.target == n] for n in order}
    best: list[tuple[float, float] | None] = [None]

    def go(n: int, chosen: list[int], time: float, size: float) -> None:
        if size > cap or (best[0] is not None and time >= best[0][0] - 1e-15):
            return
        if n == len(net.nodes):
            best[0] = (time, size)
            return
        for i, o in enumerate(options[n]):
            ways = []
            for e in into[n]:
                a = options[e.source][chosen[e.source]].outs[e.port]
                ways.append(crossings(e.value, a, o.ins[e.slot], prices, prices.graph))
            for combination in itertools.product(*ways):
                go(
                    n + 1,
                    [*chosen, i],
                    time + o.cost_s + sum(w.cost_s for w in combination),
                    size + o.bytes + sum(w.bytes for w in combination),
                )

    go(0, [], 0.0, 0.0)
    return best[0]
