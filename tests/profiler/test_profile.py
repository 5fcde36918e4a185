"""`CostTable` and `Profile`: sums, attribution, round trips."""

from __future__ import annotations

import csv
import dataclasses
import io
import json

import pytest
import torch

from autoplan.errors import AutoplanError
from autoplan.hardware import load_cluster
from autoplan.ir import OpGraph, StepEvents
from autoplan.profiler import CostTable, Moment, Profile, UnknownOp, cost_table, make_profile
from autoplan.rules import analyse
from autoplan.trace import replay, trace
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
    profile = make_profile(graph, CLUSTER, replay(graph), notes=("traced as it is",))
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
    data = make_profile(graph, CLUSTER, StepEvents()).to_json()
    with pytest.raises(AutoplanError, match="format"):
        Profile.from_json({**data, "format": 0})
    del data["nodes"]
    with pytest.raises(AutoplanError, match="nodes"):
        Profile.from_json(data)


def test_unknown_ops_reach_the_profile() -> None:
    profile = make_profile(one_op("mylib.magic.default", [(8, 4)], (8, 4), grad="a"), CLUSTER, StepEvents())
    assert profile.unknown_ops == {"mylib.magic.default": UnknownOp(1, 1.0, 1.0)}
    assert Profile.from_json(json.loads(json.dumps(profile.to_json()))) == profile
    assert profile.step_time_s > 0


def test_csv_has_a_line_per_op(graph: OpGraph) -> None:
    profile = make_profile(graph, CLUSTER, StepEvents())
    rows = list(csv.DictReader(io.StringIO(profile.to_csv())))
    assert [r["key"] for r in rows] == [n.key for n in profile.nodes]
    assert sum(int(r["forward_flops"]) for r in rows) == profile.forward_flops


def test_trace_events_are_what_perfetto_reads(graph: OpGraph) -> None:
    timeline = (Moment("forward", graph.ops[0].key, 9, 0, 0, 0, 1, 2), Moment("step", "wte.weight", 9, 9, 0, 0, 0, 0))
    profile = dataclasses.replace(make_profile(graph, CLUSTER, StepEvents()), timeline=timeline)
    events = json.loads(json.dumps(profile.to_chrome_trace()))["traceEvents"]
    assert {e["ph"] for e in events} == {"M", "X", "C"}
    assert [e["args"]["name"] for e in events if e["name"] == "thread_name"] == ["forward", "backward", "optimizer"]
    slices = [e for e in events if e["ph"] == "X"]
    assert sum(e["dur"] for e in slices) == pytest.approx(profile.step_time_s * 1e6)
    assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-6 for a, b in zip(slices, slices[1:], strict=False))
    samples = [e for e in events if e["ph"] == "C"]
    assert [sum(e["args"].values()) for e in samples] == [m.total for m in timeline]


def test_an_expanded_operand_is_read_once() -> None:
    class Wide(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return y * x[:, :1].expand(8, 16)

    node = cost_table(trace(Wide(), (torch.ones(8, 4), torch.ones(8, 16))).graph, CLUSTER).nodes[-1]
    assert (node.forward_read_bytes, node.forward_written_bytes) == (8 * 4 + 8 * 16 * 4, 8 * 16 * 4)


def test_phases_and_modules_add_up(graph: OpGraph) -> None:
    profile = make_profile(graph, CLUSTER, replay(graph))
    forward, backward, update = profile.by_phase()
    assert (forward.flops, backward.flops, update.flops) == (profile.forward_flops, profile.backward_flops, 0)
    assert forward.seconds + backward.seconds + update.seconds == pytest.approx(profile.step_time_s)
    assert (forward.peak_bytes, backward.peak_bytes) == (profile.peak_bytes["forward"], profile.peak_bytes["backward"])
    assert max(p.peak_bytes for p in profile.by_phase()) == profile.peak_bytes["step"]
    assert update.read_bytes == 2 * profile.gradient_bytes + profile.optimizer_bytes
    assert update.written_bytes == profile.gradient_bytes + profile.optimizer_bytes
    assert sum(g.forward_bytes for g in profile.by_module()) == forward.read_bytes + forward.written_bytes
    assert sum(g.backward_bytes for g in profile.by_op()) == backward.read_bytes + backward.written_bytes


def test_convolutions_are_named_whose_scratch_no_peak_counts() -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.ConvTranspose2d(8, 4, 3))
    graph = trace(model, (torch.randn(2, 3, 12, 12),)).graph
    profile = make_profile(graph, CLUSTER, replay(graph))
    assert profile.uncounted_scratch == {"conv2d": 1, "conv_transpose2d": 1}
    assert Profile.from_json(json.loads(json.dumps(profile.to_json()))) == profile
