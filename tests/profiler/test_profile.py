"""`CostTable` and `Profile`: sums, attribution, round trips."""

from __future__ import annotations

import json

import pytest

from autoplan.errors import AutoplanError
from autoplan.hardware import load_cluster
from autoplan.ir import OpGraph
from autoplan.profiler import CostTable, Profile, cost_table, make_profile
from autoplan.rules import analyse
from autoplan.trace import trace
from tests.profiler.models import gpt2, llama, one_op

CLUSTER = load_cluster("a100-8x", nodes=2)


@pytest.fixture(scope="module")
def graph() -> OpGraph:
    return trace(*gpt2()).graph


def test_table_has_every_op_once_and_views_cost_nothing_forward(graph: OpGraph) -> None:
    table = cost_table(graph, CLUSTER)
    assert [n.key for n in table.nodes] == [op.key for op in graph.ops]
    views = [n for n in table.nodes if n.is_view]
    assert {"view", "transpose", "split"} <= {n.op for n in views}
    assert all(n.forward_flops == n.forward_bytes == n.forward_s == n.saved_bytes == 0 for n in views)
    assert all(n.forward_s > 0 for n in table.nodes if not n.is_view)
    assert cost_table(graph, CLUSTER.device, rules=analyse(graph)) == table


def test_what_two_ops_save_counts_once_with_its_producer() -> None:
    graph = trace(*llama()).graph
    saved = {n.key: n.saved_bytes for n in cost_table(graph, CLUSTER).nodes}
    silu = next(op for op in graph.ops if op.name == "silu")
    gate = graph.producer[silu.inputs[0]]
    assert saved[gate.key] == graph.values[gate.outputs[0]].nbytes  # by silu alone
    assert saved[silu.key] == graph.values[silu.outputs[0]].nbytes  # by the product
    residual = next(op for op in graph.ops if op.name == "add" and op.module == "model.layers.0")
    assert saved[residual.key] == graph.values[residual.outputs[0]].nbytes  # by pow and by mul


def test_gradient_sums_are_charged_to_all_readers_but_the_last() -> None:
    graph = trace(*gpt2()).graph
    cost = {n.key: n for n in cost_table(graph, CLUSTER).nodes}
    adds = [op for op in graph.ops if op.name == "add" and op.module == "transformer.h.0"]
    assert [cost[op.key].backward_bytes for op in adds[1:]] == [0] * (len(adds) - 1)
    norm = next(op for op in graph.ops if op.key.startswith("transformer.h.0.ln_1"))
    n = graph.values[norm.outputs[0]].nbytes
    assert cost[norm.key].backward_bytes > 3 * n + 3 * n


def test_table_round_trips_and_prints(graph: OpGraph) -> None:
    table = cost_table(graph, CLUSTER)
    assert CostTable.from_json(json.loads(json.dumps(table.to_json()))) == table
    assert str(table).count("\n") == len(graph.ops)
    with pytest.raises(AutoplanError, match="format 7"):
        CostTable.from_json({"format": 7})


def test_profile_adds_up_and_round_trips(graph: OpGraph) -> None:
    profile = make_profile(graph, CLUSTER, notes=("traced as it is",))
    assert Profile.from_json(json.loads(json.dumps(profile.to_json()))) == profile
    assert profile.forward_flops == sum(g.forward_flops for g in profile.by_op())
    assert profile.saved_activation_bytes == sum(g.saved_bytes for g in profile.by_module())
    assert profile.step_time_s == pytest.approx(
        profile.optimizer_s + sum(g.forward_s + g.backward_s for g in profile.by_module(2))
    )
    assert profile.peak_bytes["step"] == max(profile.peak_bytes.values())
    names = [g.name for g in profile.by_module(3)]
    assert "transformer.h.0" in names
    assert "transformer.h.1" in names
    assert str(profile).startswith("Profile of GPT2LMHeadModel on one")
    seconds = [g.forward_s + g.backward_s for g in profile.by_op()]
    assert seconds == sorted(seconds, reverse=True)


def test_malformed_profiles_are_refused(graph: OpGraph) -> None:
    data = make_profile(graph, CLUSTER).to_json()
    with pytest.raises(AutoplanError, match="format"):
        Profile.from_json({**data, "format": 0})
    del data["nodes"]
    with pytest.raises(AutoplanError, match="nodes"):
        Profile.from_json(data)


def test_unknown_ops_reach_the_profile() -> None:
    profile = make_profile(one_op("mylib.magic.default", [(8, 4)], (8, 4), grad="a"), CLUSTER)
    assert profile.unknown_ops == {"mylib.magic.default": 1}
    assert profile.step_time_s > 0
