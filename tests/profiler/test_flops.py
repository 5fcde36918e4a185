"""Flops: by hand per op, and against torch's own counter on whole models."""

from __future__ import annotations

import math
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from autoplan import profiler
from autoplan.errors import AutoplanError, OptionError
from autoplan.ir import OpGraph
from autoplan.profiler import Work, backward_flops, dtype_of, forward_flops, operations, register_flops, unknown_ops
from autoplan.rules import OpView
from autoplan.trace import trace
from tests.profiler.models import MODELS, one_op

BENCHMARK = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "profiler_flops.py"))


def work(graph: OpGraph) -> tuple[int, int]:
    return forward_flops(graph.ops[0], graph), backward_flops(graph.ops[0], graph)


def counted(graph: OpGraph) -> Work | None:
    return profiler.work(graph.ops[0], graph)


@pytest.mark.parametrize(
    ("graph", "expected"),
    [
        (one_op("aten.linear.default", [(8, 4), (16, 4)], (8, 16), grad="ab"), (1024, 2048)),
        (one_op("aten.linear.default", [(8, 4), (16, 4)], (8, 16), grad="b"), (1024, 1024)),
        (one_op("aten.linear.default", [(8, 4), (16, 4), (16,)], (8, 16), grad="abc"), (1024, 2048)),
        (one_op("aten.linear.default", [(8, 4), (16, 4)], (8, 16)), (1024, 0)),
        (one_op("aten.addmm.default", [(16,), (8, 4), (4, 16)], (8, 16), grad="bc"), (1024, 2048)),
        (one_op("aten.matmul.default", [(3, 8, 4), (3, 4, 16)], (3, 8, 16), grad="ab"), (3072, 6144)),
        (one_op("aten.matmul.default", [(8, 4), (4,)], (8,), grad="a"), (64, 64)),
        (one_op("aten.dot.default", [(4,), (4,)], (), grad="ab"), (8, 16)),
        (one_op("aten.conv2d.default", [(2, 3, 8, 8), (4, 3, 3, 3)], (2, 4, 6, 6), grad="b"), (15552, 15552)),
        (one_op("aten.add.Tensor", [(8, 4), (4,)], (8, 4), grad="ab"), (0, 0)),
        (one_op("aten.mul.Tensor", [(8, 4), (8, 4)], (8, 4), grad="ab"), (0, 0)),
        (one_op("aten.view.default", [(8, 4)], (32,), (32,), grad="a"), (0, 0)),
        (one_op("aten.cross_entropy_loss.default", [(8, 10)], (), grad="a"), (0, 0)),
    ],
)
def test_by_hand(graph: OpGraph, expected: tuple[int, int]) -> None:
    assert work(graph) == expected


def test_causal_attention_is_counted_in_full_unless_asked() -> None:
    shape = (2, 4, 32, 16)
    graph = one_op("aten.scaled_dot_product_attention.default", [shape] * 3, shape, None, 0.0, True, grad="abc")
    full = 4 * 2 * 4 * 32 * 32 * 16
    assert work(graph) == (full, full * 5 // 2)
    assert forward_flops(graph.ops[0], graph, causal="half") == full // 2
    assert backward_flops(graph.ops[0], graph, causal="half") == full * 5 // 4


def test_einsum_multiplies_the_sizes_of_its_labels() -> None:
    graph = one_op("aten.einsum.default", [(2, 3, 4), (2, 4, 5)], (2, 3, 5), grad="ab")
    op = graph.ops[0]
    object.__setattr__(op, "args", ("bij,bjk->bik", op.args))
    assert work(graph) == (2 * 2 * 3 * 4 * 5, 2 * 2 * 2 * 3 * 4 * 5)
    object.__setattr__(op, "args", ("...ij, ...jk -> ...ik", op.args[1]))
    assert work(graph) == (2 * 2 * 3 * 4 * 5, 2 * 2 * 2 * 3 * 4 * 5)


def test_unknown_ops_are_named_and_count_nothing() -> None:
    graph = one_op("mylib.magic.default", [(8, 4)], (8, 4), grad="a")
    assert work(graph) == (0, 0)
    assert unknown_ops(graph) == {"mylib.magic.default": 1}


def test_dtype_is_that_of_the_result_or_of_what_is_compared() -> None:
    graph = one_op("aten.add.Tensor", [(8,)], (8,), 1)
    assert dtype_of(graph.ops[0], graph) == "float32"


def test_what_is_no_product_is_counted_apart() -> None:
    linear = one_op("aten.linear.default", [(8, 4), (16, 4), (16,)], (8, 16), grad="abc")
    assert counted(linear) == Work(1024, 2048, 128, 128)  # the bias
    assert counted(one_op("aten.add.Tensor", [(8, 4), (4,)], (8, 4), grad="ab")) == Work(0, 0, 32, 32)
    assert counted(one_op("aten.mul.Tensor", [(8, 4), (8, 4)], (8, 4), grad="ab")) == Work(0, 0, 32, 64)
    assert counted(one_op("aten.cross_entropy_loss.default", [(8, 10)], (), grad="a")) == Work(0, 0, 400, 240)
    assert operations(linear.ops[0], linear) == (1152, 2176)


@pytest.mark.parametrize(
    "target",
    ["_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu"],
)
def test_attention_counts_alike_in_every_form(target: str) -> None:
    q, k, v, out = (2, 4, 32, 16), (2, 2, 64, 16), (2, 2, 64, 8), (2, 4, 32, 8)
    pairs = 2 * 4 * 32 * 64
    expected = (2 * pairs * (16 + 8), 2 * pairs * (3 * 16 + 2 * 8))
    assert work(one_op("aten.scaled_dot_product_attention.default", [q, k, v], out, grad="abc")) == expected
    graph = one_op(f"aten.{target}.default", [q, k, v], out, 0.0, True, grad="abc")
    assert work(graph) == expected
    assert forward_flops(graph.ops[0], graph, causal="half") == expected[0] // 2


@pytest.mark.parametrize(
    ("left", "right", "out"),
    [((64, 8), (4, 8, 16), (64, 16)), ((4, 16, 8), (4, 8, 16), (4, 16, 16)), ((64, 8), (8, 16), (4, 64, 16))],
)
def test_experts_count_their_rows_once(left: tuple[int, ...], right: tuple[int, ...], out: tuple[int, ...]) -> None:
    assert work(one_op("aten._grouped_mm.default", [left, right], out, grad="ab")) == (2 * 64 * 8 * 16, 4 * 64 * 8 * 16)
    custom = one_op("transformers.grouped_mm_fallback.default", [left, right], out, grad="ab")
    assert work(custom) == (2 * 64 * 8 * 16, 4 * 64 * 8 * 16)


@pytest.mark.parametrize(("kind", "gates"), [(torch.nn.LSTM, 4), (torch.nn.GRU, 3), (torch.nn.RNN, 1)])
def test_recurrent_nets_count_their_matrices(kind: type[torch.nn.RNNBase], gates: int) -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = kind(8, 16, 2, bidirectional=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)[0].sum()

    graph = trace(Net(), (torch.randn(5, 3, 8),)).graph
    op = next(op for op in graph.ops if op.name.startswith(("lstm", "gru", "rnn")))
    first, second, states = 2 * gates * 16 * 8, 2 * gates * 16 * 32, 2 * 2 * gates * 16 * 16
    rows = 2 * 5 * 3
    assert forward_flops(op, graph) == rows * (first + second + states)
    assert backward_flops(op, graph) == rows * (first + 2 * second + 2 * states)  # no gradient of the batch
    assert unknown_ops(graph) == {}


def test_a_custom_op_is_counted_once_it_is_registered() -> None:
    graph = one_op("tests_flops.pairs.default", [(8, 4)], (8, 8), grad="a")
    assert unknown_ops(graph) == {"tests_flops.pairs.default": 1}

    @register_flops("tests_flops::pairs")
    def _pairs(v: OpView) -> int:
        rows, width = v.ins[0].shape
        return 2 * rows * rows * width

    assert work(graph) == (512, 1024)
    with_exponentials = one_op("tests_flops.gaussian.default", [(8, 4)], (8, 8), grad="a")
    register_flops("tests_flops::gaussian")(lambda v: Work(512, 1024, 64, 128))
    assert counted(with_exponentials) == Work(512, 1024, 64, 128)
    assert counted(one_op("tests_flops.gaussian.default", [(8, 4)], (8, 8))) == Work(512, 0, 64, 0)
    with pytest.raises(AutoplanError, match="already"):
        register_flops("tests_flops::pairs")(_pairs)
    with pytest.raises(OptionError, match="third"):
        forward_flops(graph.ops[0], graph, causal="third")  # type: ignore[arg-type]


def sdpa_backward(grad: Any, q: Any, k: Any, v: Any, *rest: Any, out_shape: Any = None, **kw: Any) -> int:
    pairs = math.prod(q[:-1]) * k[-2]
    return int(2 * pairs * (3 * q[-1] + 2 * v[-1]))


def sdpa_forward(q: Any, k: Any, v: Any, *rest: Any, out_shape: Any = None, **kw: Any) -> int:
    return int(2 * math.prod(q[:-1]) * k[-2] * (q[-1] + v[-1]))


CPU_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: sdpa_forward,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: sdpa_backward,
}
"""What torch's counter does not know of the CPU, so that it counts whole models."""


@pytest.mark.parametrize("name", MODELS)
def test_products_are_those_that_torch_counts(name: str) -> None:
    model, batch = MODELS[name]()
    graph = trace(model, batch).graph
    assert unknown_ops(graph) == {}
    with FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION) as counted_forward:
        loss = model(**batch).loss
    with FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION) as counted_backward:
        loss.backward()
    assert sum(forward_flops(op, graph) for op in graph.ops) == counted_forward.get_total_flops()
    assert sum(backward_flops(op, graph) for op in graph.ops) == counted_backward.get_total_flops()


@pytest.mark.parametrize("name", ["bert", "mixtral", "vit", "resnet", "whisper"])
def test_models_of_the_zoo_count_what_torch_counts(name: str) -> None:
    model, inputs = BENCHMARK["ZOO"][name]()
    graph = trace(model, inputs, as_is=True).graph
    forward, backward, _ = BENCHMARK["counted"](BENCHMARK["ZOO"][name], BENCHMARK["TAUGHT"])
    assert sum(forward_flops(op, graph) for op in graph.ops) == forward
    assert sum(backward_flops(op, graph) for op in graph.ops) == backward
    assert unknown_ops(graph) == {}


def test_convolution_agrees_with_torch_and_by_hand() -> None:
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.ConvTranspose2d(8, 4, 3), torch.nn.Conv2d(4, 4, 3, groups=4)
    )
    x = torch.randn(2, 3, 12, 12)
    graph = trace(model, (x,)).graph
    with FlopCounterMode(display=False) as counter:
        model(x)
    assert sum(forward_flops(op, graph) for op in graph.ops) == counter.get_total_flops()
    first, second, third = 2 * 2 * 8 * 100 * 27, 2 * 2 * 8 * 100 * 36, 2 * 2 * 4 * 100 * 9
    backward = [backward_flops(op, graph) for op in graph.ops if "conv" in op.name]
    assert backward == [first, 2 * second, 2 * third]  # depthwise counts its own channel alone
