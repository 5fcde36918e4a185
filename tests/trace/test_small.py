"""Plain modules: the batch, the loss, in-place ops, no_grad, constants, and the errors of what cannot be traced."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoplan.errors import OptionError, TraceError, UnsupportedOpError
from autoplan.trace import TracedModel, trace
from tests.trace.interpret import run
from tests.trace.models import Lambda, tensors


def x() -> Tensor:
    return torch.arange(8.0).reshape(2, 4) / 8


def names(traced: TracedModel) -> list[str]:
    return [op.name for op in traced.graph.ops]


def check(model: nn.Module, *args: Any) -> TracedModel:
    """Traces, runs the graph, and compares results and gradients with the module's."""
    traced = trace(model, args)
    mine = run(traced.graph, tensors(traced))[0].sum()
    mine.backward()
    gradients = [p.grad for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    expected = model(*(a.clone() if isinstance(a, Tensor) else a for a in args)).sum()
    expected.backward()
    torch.testing.assert_close(mine, expected)
    for mine_, p in zip(gradients, model.parameters(), strict=True):
        torch.testing.assert_close(mine_, p.grad)
    return traced


def test_sequential_with_a_tuple() -> None:
    traced = check(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), x())
    assert [op.key for op in traced.graph.ops] == ["0:aten.linear#0", "1:aten.relu#0", "2:aten.linear#0"]
    assert traced.paths == ("args.0",)
    assert traced.graph.loss is None


def test_a_tensor_is_a_batch() -> None:
    assert trace(nn.Linear(4, 2), x()).graph == trace(nn.Linear(4, 2), (x(),)).graph


def test_other_arguments_are_part_of_the_program() -> None:
    traced = check(Lambda(lambda s, a, n, m=None: s.lin(a) * n), x(), 3, None)
    assert traced.paths == ("args.0", None, None)
    assert traced.graph.ops[-1].args[1] == 3


def test_an_input_that_nothing_reads_has_no_path() -> None:
    assert trace(Lambda(lambda s, a, b: s.lin(a)), (x(), x())).paths == ("args.0", None)


def test_nested_inputs_are_named_by_where_they_are() -> None:
    traced = trace(Lambda(lambda s, batch: s.lin(batch["a"][1])), {"batch": {"a": [x(), x()]}})
    assert traced.paths == (None, "batch.a.1")


def test_parameters_that_nothing_reads_are_left_out() -> None:
    model = Lambda(lambda s, a: (s.lin(a), s.spare.weight)[0])
    model.spare = nn.Linear(2, 2)
    assert [i.path for i in trace(model, x()).graph.inputs] == ["args.0", "lin.weight", "lin.bias"]


def test_frozen_parameters_get_no_gradient() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    graph = trace(model, x()).graph
    assert [graph.values[op.outputs[0]].requires_grad for op in graph.ops] == [False, True]


@pytest.mark.parametrize("named", [False, True])
def test_loss_fn(named: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 3))
    inputs: Any = {"input": x()} if named else (x(),)

    def loss(outputs: Tensor, batch: Any) -> Tensor:
        return (outputs.sum(-1) - (batch["input"] if named else batch[0]).sum(-1)).pow(2).mean()

    traced = trace(model, inputs, loss_fn=loss)
    assert traced.graph.loss == 0
    assert [i.path for i in traced.graph.inputs if i.kind == "parameter"] == ["0.weight", "0.bias"]
    assert traced.graph.ops[0].key == "0:aten.linear#0"
    assert {op.module for op in traced.graph.ops[1:]} == {""}
    result = run(traced.graph, tensors(traced))
    torch.testing.assert_close(result[0], loss(model(x()), inputs))
    torch.testing.assert_close(result[1], model(x()))


def test_dropout_that_drops_nothing_is_left_out() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1))
    assert names(trace(model.train(), x())) == ["linear", "dropout"]
    assert names(trace(model.eval(), x())) == ["linear"]
    assert names(trace(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0)).train(), x())) == ["linear"]


def test_bf16_inputs_that_were_bf16_already_are_not_cast() -> None:
    model = Lambda(lambda s, a, b: s.lin(a) + b)
    graph = trace(model, (x(), x().bfloat16()), precision="bf16").graph
    assert [str(graph.values[i.value].dtype) for i in graph.inputs[:2]] == ["float32", "bfloat16"]


def test_a_bf16_loss_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="loss is computed in bfloat16"):
        trace(Lambda(lambda s, a: s.lin(a).mean()), x(), precision="bf16")


def test_grad_mode_of_the_caller_does_not_matter() -> None:
    model = Lambda(lambda s, a: s.lin(a).sum())
    with torch.no_grad():
        inside = trace(model, x()).graph
    assert inside == trace(model, x()).graph


# in place


def test_in_place_activation() -> None:
    traced = check(nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 2)), x())
    assert names(traced) == ["linear", "relu", "linear"]


def test_in_place_result_is_read_under_the_old_name() -> None:
    def forward(s: Any, a: Tensor) -> Tensor:
        y = s.lin(a)
        y.mul_(2)
        F.relu_(y)
        z = y.view(8)
        return z + y.reshape(8)

    assert names(check(Lambda(forward), x()))[:3] == ["linear", "mul", "relu"]


def test_augmented_assignment_keeps_the_dtype() -> None:
    def forward(s: Any, a: Tensor) -> Tensor:
        y = s.lin(a).bfloat16()
        y += a
        return y

    traced = check(Lambda(forward), x())
    assert str(traced.graph.values[traced.graph.outputs[0]].dtype) == "bfloat16"


def test_a_view_may_be_written_where_only_it_is_read() -> None:
    check(Lambda(lambda s, a: F.relu(s.lin(a).view(8), inplace=True)), x())


def test_the_value_before_may_have_been_read_before() -> None:
    def forward(s: Any, a: Tensor) -> Tensor:
        y = s.lin(a)
        total = y.sum()
        y += 1
        return y * total

    check(Lambda(forward), x())


def test_a_write_to_a_view_reaches_its_base() -> None:
    def forward(s: Any, a: Tensor) -> Tensor:
        y = s.lin(a)
        y.view(8).mul_(2)
        y[:, 1:][0].add_(a[0, 1:])
        return y

    check(Lambda(forward), x())


def test_a_write_seen_through_a_transpose_is_an_error() -> None:
    def forward(s: Any, a: Tensor) -> Tensor:
        y = s.lin(a)
        y.t().mul_(2)
        return y

    with pytest.raises(UnsupportedOpError, match=r"aten\.mul_\.Tensor.*read afterwards through another view"):
        trace(Lambda(forward), x())


def test_a_view_taken_before_a_write_and_read_after_is_an_error() -> None:
    def forward(s: Any, a: Tensor) -> Tensor:
        y = s.lin(a)
        z = y[0]
        y += 1
        return y + z

    with pytest.raises(UnsupportedOpError, match="another view"):
        trace(Lambda(forward), x())


def test_assignment_to_a_part() -> None:
    def forward(s: Any, a: Tensor) -> Tensor:
        y = s.lin(a)
        y[:, 0] = 0
        return y

    check(Lambda(forward), x())


def test_writing_to_an_input_names_it() -> None:
    with pytest.raises(UnsupportedOpError, match="changes the input 'args_0'"):
        trace(Lambda(lambda s, a: s.lin(a.add_(1))), x())


def test_writing_to_a_buffer_names_it() -> None:
    def forward(s: Any, a: Tensor) -> Tensor:
        s.count += 1
        return s.lin(a) * s.count

    with pytest.raises(UnsupportedOpError, match="changes the buffer 'count'"):
        trace(Lambda(forward, count=torch.zeros(())), x())


def test_batch_norm_in_training_names_its_module() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with pytest.raises(UnsupportedOpError, match=r"'1\.num_batches_tracked'.*module '1'.*eval mode"):
        trace(model.train(), x())
    traced = trace(model.train(), x(), as_is=True)
    assert "batch_norm" in names(traced)
    check(model.eval(), x())


def test_batch_statistics_that_are_updated_are_an_error() -> None:
    def forward(s: Any, a: Tensor) -> Tensor:
        return F.batch_norm(s.lin(a), s.mean, s.var, training=True)

    model = Lambda(forward, mean=torch.zeros(4), var=torch.ones(4))
    with pytest.raises(UnsupportedOpError, match="updates running statistics"):
        trace(model, x())


# regions and constants


def test_no_grad_cuts_gradients() -> None:
    def forward(s: Any, a: Tensor) -> Tensor:
        with torch.no_grad():
            y = s.lin(a).abs()
            scale = y.mean()
        return s.lin(a) / scale + y

    traced = check(Lambda(forward), x())
    graph = traced.graph
    first = next(op for op in graph.ops if op.name == "linear")
    assert first.key == "lin:aten.linear#0"
    assert not graph.values[first.outputs[0]].requires_grad
    assert graph.values[graph.outputs[0]].requires_grad


def test_no_grad_around_what_has_no_gradient_leaves_no_trace() -> None:
    def forward(s: Any, a: Tensor) -> Tensor:
        with torch.no_grad():
            y = a * 2
        return s.lin(y)

    assert names(check(Lambda(forward), x())) == ["mul", "linear"]


def test_enable_grad_within_no_grad() -> None:
    def forward(s: Any, a: Tensor) -> Tensor:
        with torch.no_grad():
            y = a * 2
            with torch.enable_grad():
                z = s.lin(y)
            w = y + 1
        return z + w

    check(Lambda(forward), x())


def test_switched_off_autocast_is_transparent() -> None:
    def forward(s: Any, a: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            y = s.lin(a)
        return y * 2

    assert names(check(Lambda(forward), x())) == ["linear", "mul"]


def test_autocast_points_at_precision() -> None:
    def forward(s: Any, a: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = s.lin(a)
        return y.float()

    with pytest.raises(UnsupportedOpError, match=r"autocast.*'lin'.*precision='bf16'"):
        trace(Lambda(forward), x())
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(OptionError, match="autocast"):
        trace(nn.Linear(4, 4), x())


def test_numbers_made_in_the_model() -> None:
    traced = check(Lambda(lambda s, a: s.lin(a) * torch.tensor(2.0) + torch.tensor([3])), x())
    assert names(traced) == ["full", "full", "linear", "mul", "add"]
    assert [op.args[1] for op in traced.graph.ops[:2]] == [2.0, 3]


def test_other_constants_have_to_be_buffers() -> None:
    with pytest.raises(UnsupportedOpError, match=r"shape \(4,\).*neither parameter nor buffer.*register_buffer"):
        trace(Lambda(lambda s, a: s.lin(a) * torch.tensor([1.0, 2.0, 3.0, 4.0])), x())
    check(Lambda(lambda s, a: s.lin(a) * s.scale, scale=torch.arange(4.0)), x())


# errors


class Branch(nn.Module):
    def forward(self, a: Tensor) -> Tensor:
        if a.sum() > 0:
            return a
        return -a


def test_control_flow_on_values_names_module_and_line(capfd: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), Branch()))
    with pytest.raises(TraceError, match=r"module '1\.1', test_small\.py:\d+ `if a\.sum\(\) > 0:`") as e:
        trace(model, x())
    assert "torch.where" in str(e.value)
    assert capfd.readouterr() == ("", "")


def test_item_names_the_line() -> None:
    with pytest.raises((TraceError, UnsupportedOpError), match="item"):
        trace(Lambda(lambda s, a: s.lin(a) * a.max().item()), x())


def test_wrong_keyword() -> None:
    with pytest.raises(TraceError, match="model's top level: missing a required argument: 'input'"):
        trace(nn.Linear(4, 4), {"y": x()})


def test_wrong_shape_names_the_module() -> None:
    with pytest.raises(TraceError, match=r"module '1'.*\[2, 8\] X \[4, 4\]"):
        trace(nn.Sequential(nn.Linear(4, 8), nn.Linear(4, 4)), x())


def test_what_is_no_batch() -> None:
    for bad in (3, None, "text"):
        with pytest.raises(OptionError, match="dict of keyword arguments, a tuple or a tensor"):
            trace(nn.Linear(4, 4), bad)


def test_inputs_on_two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    from autoplan.trace import capture

    class Elsewhere(torch.Tensor):
        @property
        def device(self) -> torch.device:  # type: ignore[override]
            return torch.device("cuda", 1)

    with pytest.raises(OptionError, match=r"several devices \(cpu, cuda:1\)"):
        capture.trace(nn.Linear(4, 4), (x(), x().as_subclass(Elsewhere)))
    trace(Lambda(lambda s, a, b: s.lin(a) + b), (x(), x().to("meta")))


def test_an_empty_batch() -> None:
    with pytest.raises(OptionError, match=r"without elements, of shape \(0, 4\)"):
        trace(nn.Linear(4, 4), (torch.zeros(0, 4),))


def test_results_that_are_no_tensors() -> None:
    with pytest.raises(UnsupportedOpError, match="returns None beside tensors"):
        trace(Lambda(lambda s, a: (s.lin(a), None)), x())


def test_higher_order_ops_are_named() -> None:
    def forward(s: Any, a: Tensor) -> Tensor:
        return torch.cond(a.sum() > 0, lambda b: b + 1, lambda b: b - 1, (s.lin(a),))

    with pytest.raises(UnsupportedOpError, match="cond cannot be represented"):
        trace(Lambda(forward), x())


def test_views_as_another_dtype_are_named() -> None:
    with pytest.raises(UnsupportedOpError, match="view as another dtype"):
        trace(Lambda(lambda s, a: s.lin(a).view(torch.int32)), x())


def test_a_model_that_cannot_be_copied() -> None:
    model = nn.Linear(4, 4)
    model.extra = model.weight * 2  # not a leaf: deepcopy refuses it
    with pytest.raises(TraceError, match="cannot be copied"):
        trace(model, x())


# front ends and batches


class OnlyDynamo(nn.Linear):
    """Export without dynamo cannot run it."""

    def forward(self, a: Tensor) -> Tensor:
        if torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling():
            raise RuntimeError("not here")
        return super().forward(a)


class OnlySymbolic(nn.Module):
    """Only symbolic tracing can run it."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, a: Any) -> Any:
        if not isinstance(a, torch.fx.Proxy):
            raise RuntimeError("not here")
        return self.lin(a)


@pytest.mark.parametrize(
    ("model", "by"), [(OnlyDynamo(4, 4), "dynamo"), (OnlySymbolic(), "torch.fx.symbolic_trace")], ids=["dynamo", "fx"]
)
def test_front_ends_that_export_falls_back_to(model: nn.Module, by: str) -> None:
    traced = trace(model, (x(),))
    assert traced.notes == (f"traced by {by}, because torch.export failed: not here",)
    assert names(traced) == ["linear"]
    assert {i.path.rpartition(".")[2] for i in traced.graph.inputs} == {"weight", "bias", "0"}


def test_a_graph_module_is_a_model() -> None:
    model = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    traced = check(model, x())
    assert [op.key for op in traced.graph.ops] == ["0:aten.linear#0", "1:aten.relu#0"]


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((3,), "holds no tensor, but int"),
        ((), "holds no tensor, but nothing"),
        ((torch.zeros(0, 4),), r"without elements, of shape \(0, 4\): a step needs at least one sample"),
        ((torch.zeros(2, 4), float("nan")), "holds the number nan"),
    ],
)
def test_batches_that_are_none(batch: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        trace(nn.Linear(4, 4), batch)


def test_integers_where_a_product_needs_floats() -> None:
    with pytest.raises(TraceError, match=r"linear is given operands of several dtypes, int64, float32"):
        trace(nn.Linear(4, 4), (torch.zeros(2, 4, dtype=torch.int64),))
