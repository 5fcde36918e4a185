"""Flops: by hand per op, and against torch's own counter on whole models."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from autoplan.ir import OpGraph
from autoplan.profiler import backward_flops, dtype_of, forward_flops, unknown_ops
from autoplan.trace import trace
from tests.profiler.models import MODELS, one_op

PRODUCTS = ("linear", "addmm", "matmul", "scaled_dot_product_attention")


def work(graph: OpGraph) -> tuple[int, int]:
    return forward_flops(graph.ops[0], graph), backward_flops(graph.ops[0], graph)


@pytest.mark.parametrize(
    ("graph", "expected"),
    [
        (one_op("aten.linear.default", [(8, 4), (16, 4)], (8, 16), grad="ab"), (1024, 2048)),
        (one_op("aten.linear.default", [(8, 4), (16, 4)], (8, 16), grad="b"), (1024, 1024)),
        (one_op("aten.linear.default", [(8, 4), (16, 4), (16,)], (8, 16), grad="abc"), (1152, 2176)),
        (one_op("aten.linear.default", [(8, 4), (16, 4)], (8, 16)), (1024, 0)),
        (one_op("aten.addmm.default", [(16,), (8, 4), (4, 16)], (8, 16), grad="bc"), (1152, 2048)),
        (one_op("aten.matmul.default", [(3, 8, 4), (3, 4, 16)], (3, 8, 16), grad="ab"), (3072, 6144)),
        (one_op("aten.matmul.default", [(8, 4), (4,)], (8,), grad="a"), (64, 64)),
        (one_op("aten.dot.default", [(4,), (4,)], (), grad="ab"), (8, 16)),
        (one_op("aten.conv2d.default", [(2, 3, 8, 8), (4, 3, 3, 3)], (2, 4, 6, 6), grad="b"), (15552, 15552)),
        (one_op("aten.add.Tensor", [(8, 4), (4,)], (8, 4), grad="ab"), (32, 32)),
        (one_op("aten.mul.Tensor", [(8, 4), (8, 4)], (8, 4), grad="ab"), (32, 64)),
        (one_op("aten.view.default", [(8, 4)], (32,), (32,), grad="a"), (0, 0)),
        (one_op("aten.cross_entropy_loss.default", [(8, 10)], (), grad="a"), (400, 240)),
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


@pytest.mark.parametrize("name", MODELS)
def test_products_are_those_that_torch_counts(name: str) -> None:
    """Exact, with attention written out (torch does not see the CPU's fused kernel), biases left out."""
    model, batch = MODELS[name]()
    graph = trace(model, batch).graph
    assert unknown_ops(graph) == {}
    with sdpa_kernel(SDPBackend.MATH):
        with FlopCounterMode(display=False) as counted_forward:
            loss = model(**batch).loss
        with FlopCounterMode(display=False) as counted_backward:
            loss.backward()
    ops = [op for op in graph.ops if op.name in PRODUCTS]
    biases = sum(graph.values[op.outputs[0]].numel for op in ops if op.name == "addmm")
    attention = sum(forward_flops(op, graph) for op in ops if op.name == "scaled_dot_product_attention")
    assert sum(forward_flops(op, graph) for op in ops) - biases == counted_forward.get_total_flops()
    # fused attention computes its scores again: five products backward, of which torch counts four here
    again = attention // 2
    assert sum(backward_flops(op, graph) for op in ops) - biases - again == counted_backward.get_total_flops()


@pytest.mark.parametrize("name", MODELS)
def test_elementwise_work_is_small_beside_products(name: str) -> None:
    model, batch = MODELS[name]()
    graph = trace(model, batch).graph
    total = sum(forward_flops(op, graph) for op in graph.ops)
    products = sum(forward_flops(op, graph) for op in graph.ops if op.name in PRODUCTS)
    assert 0.9 < products / total < 1


def test_convolution_agrees_with_torch() -> None:
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.ConvTranspose2d(8, 4, 3), torch.nn.Conv2d(4, 4, 3, groups=2)
    )
    x = torch.randn(2, 3, 12, 12)
    graph = trace(model, (x,)).graph
    with FlopCounterMode(display=False) as counted:
        model(x)
    ops = [op for op in graph.ops if "conv" in op.name]
    biases = sum(graph.values[op.outputs[0]].numel for op in ops)
    assert sum(forward_flops(op, graph) for op in ops) - biases == counted.get_total_flops()
