"""Memory of eager steps, hand-made and real: the followed events against sums by hand and against the allocator."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autoplan.hardware import load_cluster
from autoplan.ir import OpGraph, StepEvents
from autoplan.profiler import Memory, make_profile, memory
from autoplan.trace import replay, trace
from tests.profiler.models import gpt2
from tests.trace.models import Lambda

BENCHMARK = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "profiler_memory.py"))


def follow(model: nn.Module, inputs: Any, **options: Any) -> Memory:
    traced = trace(model, inputs, as_is=True)
    events = replay(traced.graph, in_place=traced.in_place)
    return memory(traced.graph, events, idle_bytes=traced.idle_bytes, **options)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd-momentum", "none"])
@pytest.mark.parametrize("name", ["gpt2", "mlp"])
def test_peaks_are_those_of_the_allocator(name: str, optimizer: str) -> None:
    row = BENCHMARK["measure_row"](name, optimizer)
    for column in BENCHMARK["COLUMNS"]:
        assert abs(row.error(column)) < 0.01, (column, row)


@pytest.mark.parametrize("name", ["llama", "mistral", "t5", "resnet", "unet", "lstm", "dlrm", "transformer-encoder"])
def test_small_form_of_the_benchmark(name: str) -> None:
    row = BENCHMARK["measure_row"](name)
    for column in BENCHMARK["COLUMNS"]:
        assert abs(row.error(column)) < 0.02, (column, row)
    assert row.error("saved") == pytest.approx(0, abs=0.005)
    assert name in BENCHMARK["table"]([row])


def chain() -> tuple[nn.Module, tuple[torch.Tensor]]:
    """One linear layer on 64 rows, tanh, sum: 1024 B per activation."""
    return Lambda(lambda s, a: s.lin(a).tanh().sum()), (torch.zeros(64, 4),)


def test_by_hand() -> None:
    use = follow(*chain())
    given, parameters, state = 64 * 4 * 4, 20 * 4, 2 * 20 * 4 + 2 * 4
    static = given + parameters + state
    assert (use.parameter_bytes, use.gradient_bytes, use.optimizer_bytes) == (parameters, parameters, state)
    assert (use.input_bytes, use.saved_bytes) == (given, 1024)  # the result of tanh
    assert use.peak("forward") == static + 2 * 1024  # linear's and tanh's
    # the loss and its gradient; the gradient that sum expands is a view; tanh's result and its gradient
    assert use.peak("backward") == static + 2 * 1024 + 8
    assert use.peak("step") == static + parameters + 2 * 16 * 4
    assert use.peak_bytes == max(use.peak(p) for p in ("forward", "backward", "step"))


def test_the_split_adds_up_and_phases_are_in_order() -> None:
    use = follow(*gpt2())
    for m in use.timeline:
        assert m.total == m.parameters + m.gradients + m.optimizer + m.inputs + m.saved + m.temporaries
        assert min(m.parameters, m.gradients, m.optimizer, m.inputs, m.saved, m.temporaries) >= 0
    phases = [m.phase for m in use.timeline]
    assert phases == sorted(phases, key=("forward", "backward", "step").index)
    assert use.timeline[-1].gradients == use.gradient_bytes
    assert max(m.saved for m in use.timeline) >= use.saved_bytes
    assert sum(use.saved_by_op.values()) == use.saved_bytes


def test_every_moment_names_its_op() -> None:
    traced = trace(*gpt2())
    use = memory(traced.graph, replay(traced.graph))
    keys = {op.key for op in traced.graph.ops}
    assert {m.op for m in use.timeline if m.phase != "step"} <= {"", *keys}
    trained = {m.op for m in use.timeline if m.phase == "step"}
    assert trained == {i.path for i in traced.graph.inputs if i.kind == "parameter"}


def test_optimizer_state_and_ties_count_once() -> None:
    model, batch = gpt2()
    parameters = 4 * sum(p.numel() for p in model.parameters())
    count = len(list(model.parameters()))
    adamw, sgd = follow(model, batch), follow(model, batch, optimizer="sgd")
    assert adamw.parameter_bytes == adamw.gradient_bytes == parameters
    assert (adamw.optimizer_bytes, sgd.optimizer_bytes) == (2 * parameters + 4 * count, 0)
    assert adamw.peak("backward") - sgd.peak("backward") == adamw.optimizer_bytes


def test_foreach_holds_all_denominators_at_once() -> None:
    one, many = follow(*chain()), follow(*chain(), foreach=True)
    assert many.peak("step") - one.peak("step") == 20 * 4 - 2 * 16 * 4


def test_an_update_begins_while_the_denominator_before_is_held() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.zeros(1000)), nn.Parameter(torch.zeros(1000))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.a * self.b).sum()

    use = follow(Two(), (torch.zeros(1000),))
    updates = [m.temporaries for m in use.timeline if m.phase == "step"]
    assert updates == [2 * 4000, 3 * 4000]


def test_rounding_is_stated_apart() -> None:
    exact, rounded = follow(*gpt2()), follow(*gpt2(), granularity_bytes=512)
    assert exact.timeline == rounded.timeline
    assert exact.rounding_bytes == 0 < rounded.rounding_bytes < 0.1 * rounded.peak_bytes


def test_arguments_of_a_module_live_until_it_returns() -> None:
    class Grow(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([x.neg(), x.neg(), x.neg()])

    class Outer(nn.Module):
        def __init__(self, inside: bool) -> None:
            super().__init__()
            self.grow, self.inside = Grow(), inside

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x + 1
            return (self.grow(y) if self.inside else self.grow.forward(y)).sum()

    one = 4000
    x = torch.zeros(1000)
    inside, plain = (follow(Outer(k), (x,)).peak("forward") for k in (True, False))
    assert inside == one + one + 3 * one + 3 * one  # x; y, which the caller holds; the parts; the whole
    assert inside - plain == one


def test_in_place_ops_share_memory() -> None:
    def forward(s: Any, a: torch.Tensor, in_place: bool) -> torch.Tensor:
        y = s.lin(a)
        return (y.relu_() if in_place else y.relu()).sum()

    x = torch.zeros(64, 4)
    peaks = [follow(Lambda(lambda s, a, k=k: forward(s, a, k)), (x,)).peak("forward") for k in (True, False)]
    assert peaks[1] - peaks[0] == 1024 - 4  # in place, the peak is where the loss is made


def test_bf16_computes_on_casts_of_fp32_masters() -> None:
    model = Lambda(lambda s, a: s.lin(a).tanh().float().sum())
    traced = trace(model, (torch.zeros(64, 4),), precision="bf16")
    use = memory(traced.graph, replay(traced.graph))
    assert (use.parameter_bytes, use.gradient_bytes) == (80, 80)
    assert use.saved_bytes == 2 * 64 * 4 + 2 * 64 * 4  # tanh's result and the cast batch


def test_a_model_without_gradients_saves_nothing() -> None:
    model, batch = gpt2()
    use = follow(model.requires_grad_(False), batch)
    assert use.saved_bytes == use.gradient_bytes == 0
    assert use.peak("backward") <= use.peak("forward")


def test_what_no_op_reads_occupies_memory_all_the_same() -> None:
    model, batch = chain()
    plain = follow(model, batch)
    model.register_parameter("unused", nn.Parameter(torch.zeros(100)))
    model.register_parameter("tied", model.unused)
    model.register_buffer("table", torch.zeros(50))
    more = follow(model, batch)
    assert more.parameter_bytes - plain.parameter_bytes == 400
    assert more.input_bytes - plain.input_bytes == 200
    assert (more.gradient_bytes, more.optimizer_bytes) == (plain.gradient_bytes, plain.optimizer_bytes)
    assert more.peak_bytes - plain.peak_bytes == 600


def test_frozen_parameters_have_no_gradient_and_no_state() -> None:
    model, batch = chain()
    model.lin.bias.requires_grad_(False)
    use = follow(model.eval(), batch)
    assert (use.parameter_bytes, use.gradient_bytes, use.optimizer_bytes) == (80, 64, 2 * 64 + 4)


def test_an_input_that_no_op_reads_counts() -> None:
    model = Lambda(lambda s, a, b: s.lin(a).sum())
    use = follow(model, (torch.zeros(64, 4), torch.zeros(10)))
    assert use.input_bytes == 64 * 4 * 4 + 40


def test_without_events_only_what_is_static_counts() -> None:
    graph: OpGraph = trace(*chain()).graph
    assert memory(graph, StepEvents()).peak_bytes == 1024 + 80
    profile = make_profile(graph, load_cluster("cpu-gloo"), replay(graph))
    assert profile.timeline and profile.peak_bytes["step"] == max(m.total for m in profile.timeline)
