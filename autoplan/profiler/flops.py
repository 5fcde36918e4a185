"""Floating-point operations of ops, forward and backward, from shapes alone. Free of torch.

A multiply-add counts 2. With M = elements of the result / N::

(1)  linear, addmm, matmul, bmm, einsum    forward 2·M·N·K; backward 2·M·N·K per operand that needs a gradient
(2)  a bias                                forward M·N; backward M·N where it needs a gradient
(3)  convolution                           forward 2 · (weight elements per output channel) per result element;
                                           backward the same per operand that needs a gradient
(4)  attention, P = batch·heads·Sq·Sk      forward 2·P·(Dk + Dv): two products
                                           backward 2·P·(3·Dk + 2·Dv): five products, since the fused kernels compute
                                           the scores again; 2·P·(2·Dk + 2·Dv) with dropout, where scores are kept

Causal attention is counted in full, as torch's ``FlopCounterMode`` does; ``causal="half"`` counts the half of (4) that
kernels which skip masked blocks execute. Everything else costs a small number of operations per element (`_PER_ELEMENT`
and `_PER_INPUT`); such ops are bound by memory, so that the numbers only need the right order. Views and copies cost
nothing. An op that no table lists counts 0 and is named by `unknown_ops`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Literal

from autoplan.ir import Op, OpGraph
from autoplan.rules import OpView, rule_of

Causal = Literal["full", "half"]
Work = tuple[int, int]
"""Flops of (forward, backward)."""


def forward_flops(op: Op, graph: OpGraph, *, causal: Causal = "full") -> int:
    """Floating-point operations of one op; 0 where no table lists it (see `unknown_ops`)."""
    work = _work(op, graph, causal)
    return 0 if work is None else work[0]


def backward_flops(op: Op, graph: OpGraph, *, causal: Causal = "full") -> int:
    """Operations of the op's own backward; 0 where no gradient flows through it."""
    if not needs_backward(op, graph):
        return 0
    work = _work(op, graph, causal)
    return 0 if work is None else work[1]


def unknown_ops(graph: OpGraph) -> Mapping[str, int]:
    """Targets of the ops whose flops no table knows, with how many there are of each."""
    return dict(Counter(op.target for op in graph.ops if _work(op, graph, "full") is None))


def needs_backward(op: Op, graph: OpGraph) -> bool:
    """Whether gradients flow back through an op."""
    return any(graph.values[o].requires_grad for o in op.outputs)


def is_free(op: Op, graph: OpGraph) -> bool:
    """Whether an op starts no kernel: a view of its operand."""
    return op.name in _ALIASES or rule_of(op, graph).view


def dtype_of(op: Op, graph: OpGraph) -> str:
    """Dtype an op computes in: that of its result, or of its floating operands where the result is no float."""
    specs = [graph.values[v] for v in (*op.outputs, *op.inputs)]
    dtype = next((s.dtype for s in specs if s.is_float), specs[0].dtype if specs else "float32")
    return {"complex64": "float32", "complex128": "float64"}.get(dtype, dtype)


def _work(op: Op, graph: OpGraph, causal: Causal) -> Work | None:
    if is_free(op, graph):
        return 0, 0
    v = OpView.of(op, graph)
    if op.name in _ATTENTION:
        return _attention(v, causal)
    if op.name in _PRODUCTS:
        return _PRODUCTS[op.name](v)
    if op.name in _PER_ELEMENT:
        forward, backward = _PER_ELEMENT[op.name]
        n = max((s.numel for s in v.outs), default=0)
        return forward * n, backward * n
    if op.name in _PER_INPUT:
        forward, backward = _PER_INPUT[op.name]
        n = v.ins[0].numel if v.ins else 0
        return forward * n, backward * n
    return None


def _grads(v: OpView, *operands: int | None) -> int:
    """How many of these operands need a gradient."""
    return sum(v.ins[i].requires_grad for i in operands if i is not None)


def _linear(v: OpView) -> Work:
    """Equations (1) and (2)."""
    x, w, b = v.index(0, "input") or 0, v.index(1, "weight") or 0, v.index(2, "bias")
    elements = v.outs[0].numel
    product = 2 * elements * v.ins[x].shape[-1]
    bias = 0 if b is None else elements
    return product + bias, product * _grads(v, x, w) + elements * _grads(v, b)


def _addmm(v: OpView) -> Work:
    """``c + a @ b`` and its batched kin."""
    c, a, b = v.index(0) or 0, v.index(1) or 0, v.index(2) or 0
    elements = v.outs[0].numel
    product = 2 * elements * v.ins[a].shape[-1]
    return product + elements, product * _grads(v, a, b) + elements * _grads(v, c)


def _matmul(v: OpView) -> Work:
    """Equation (1) for any ranks; one operand used twice gets a gradient from both uses."""
    a, b = v.index(0) or 0, v.index(1) or 0
    product = 2 * v.outs[0].numel * (v.ins[a].shape[-1] if v.ins[a].rank else 1)
    return product, product * _grads(v, a, b)


def _einsum(v: OpView) -> Work:
    """Equation (1) for the first two operands with all their labels; further operands join the result."""
    equation = str(v.op.args[0]).replace(" ", "").replace("...", ".")
    sizes: dict[str, int] = {}
    for labels, spec in zip(equation.split("->")[0].split(","), v.ins, strict=False):
        named = labels.replace(".", "")
        front, back = labels.partition(".")[0], labels.partition(".")[2]
        dims = [*range(len(front)), *range(spec.rank - len(back), spec.rank)]
        sizes.update((label, spec.shape[d]) for label, d in zip(named, dims, strict=False))
        if "." in labels:
            inner = math.prod(spec.shape[len(front) : spec.rank - len(back)])
            sizes["."] = max(sizes.get(".", 1), inner)
    product = 2 * math.prod(sizes.values()) * max(1, len(v.ins) - 1)
    return product, product * _grads(v, *range(len(v.ins)))


def _convolution(v: OpView) -> Work:
    """Equation (3); a transposed convolution is the backward of a plain one, so it counts input elements."""
    x, w, b = v.index(0, "input") or 0, v.index(1, "weight") or 0, v.index(2, "bias")
    transposed = v.op.name.startswith("conv_transpose") or (v.op.name == "convolution" and v.op.arg(6, "transposed"))
    sites = v.ins[x].numel if transposed else v.outs[0].numel
    product = 2 * sites * math.prod(v.ins[w].shape[1:])
    elements = v.outs[0].numel
    return product + (0 if b is None else elements), product * _grads(v, x, w) + elements * _grads(v, b)


def _attention(v: OpView, causal: Causal) -> Work:
    """Equation (4)."""
    q, k, value = v.index(0, "query") or 0, v.index(1, "key") or 0, v.index(2, "value") or 0
    queries, keys, values = v.ins[q], v.ins[k], v.ins[value]
    position = 4 if v.op.name == "attention" else 5
    dropout = position == 5 and v.op.arg(4, "dropout_p", 0.0)
    pairs = math.prod(queries.shape[:-1]) * keys.shape[-2]
    if causal == "half" and v.op.arg(position, "is_causal", False):
        pairs //= 2
    d_k, d_v = queries.shape[-1], values.shape[-1]
    return 2 * pairs * (d_k + d_v), 2 * pairs * ((2 if dropout else 3) * d_k + 2 * d_v)


def _embedding(v: OpView) -> Work:
    """Rows are copied forward and added up backward."""
    return 0, v.outs[0].numel


def _add(v: OpView) -> Work:
    """One addition; broadcast operands sum their gradients, which costs one addition per element."""
    elements = v.outs[0].numel
    return elements, sum(elements for s in v.ins if s.requires_grad and s.numel < elements)


def _mul(v: OpView) -> Work:
    """One operation, and one (two where it is broadcast) per operand that needs a gradient."""
    elements = v.outs[0].numel
    return elements, sum(elements * (1 + (s.numel < elements)) for s in v.ins if s.requires_grad)


_ATTENTION = frozenset({"scaled_dot_product_attention", "attention"})
_ALIASES = frozenset({"detach", "alias", "lift_fresh_copy", "broadcast_tensors"})

_PRODUCTS: dict[str, Callable[[OpView], Work]] = {
    "linear": _linear,
    **dict.fromkeys(("addmm", "baddbmm", "addmv"), _addmm),
    **dict.fromkeys(("matmul", "mm", "bmm", "mv", "dot"), _matmul),
    "einsum": _einsum,
    **dict.fromkeys(("conv1d", "conv2d", "conv3d", "convolution"), _convolution),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), _convolution),
    "embedding": _embedding,
    **dict.fromkeys(("add", "sub", "rsub"), _add),
    **dict.fromkeys(("mul", "div"), _mul),
}


def _table(*rows: tuple[tuple[int, int], str]) -> dict[str, Work]:
    return {name: work for work, names in rows for name in names.split()}


_PER_ELEMENT: dict[str, Work] = _table(
    ((0, 0), "arange zeros ones full empty scalar_tensor eye linspace tril triu zeros_like ones_like full_like"),
    ((0, 0), "empty_like contiguous clone to _to_copy type_as cat stack pad constant_pad_nd roll flip one_hot"),
    ((0, 0), "repeat tile repeat_interleave copy argmax argmin new_zeros new_ones new_full new_empty meshgrid"),
    ((0, 1), "gather index index_select take_along_dim scatter index_put masked_select"),
    ((1, 0), "eq ne lt le gt ge logical_and logical_or logical_not logical_xor bitwise_and bitwise_or bitwise_not"),
    ((1, 0), "__and__ __or__ isnan isinf isfinite sign floor ceil round trunc remainder floor_divide"),
    ((1, 1), "neg abs relu relu6 hardtanh leaky_relu clamp clamp_min clamp_max where masked_fill maximum minimum"),
    ((1, 1), "reciprocal sqrt rsqrt exp log index_add scatter_add cumsum logsumexp threshold"),
    ((1, 2), "pow square sigmoid tanh sin cos erf log1p expm1 lerp addcmul addcdiv atan2"),
    ((2, 1), "dropout feature_dropout alpha_dropout native_dropout bernoulli rand_like randn_like"),
    ((5, 7), "silu elu selu celu softplus softsign hardswish hardsigmoid logsigmoid log_sigmoid mish glu"),
    ((8, 12), "gelu"),
    ((5, 4), "softmax log_softmax _softmax _log_softmax"),
    ((6, 10), "rms_norm"),
    ((8, 14), "layer_norm group_norm batch_norm instance_norm native_layer_norm"),
)
"""Operations per element of the largest result: (forward, backward)."""

_PER_INPUT: dict[str, Work] = _table(
    ((1, 1), "sum mean amax amin max min prod any all avg_pool1d avg_pool2d adaptive_avg_pool1d adaptive_avg_pool2d"),
    ((1, 1), "max_pool1d max_pool2d sort topk"),
    ((3, 3), "var std norm linalg_vector_norm mse_loss l1_loss smooth_l1_loss huber_loss var_mean"),
    ((5, 3), "cross_entropy_loss nll_loss nll_loss_nd binary_cross_entropy binary_cross_entropy_with_logits kl_div"),
)
"""Operations per element of the first operand: (forward, backward)."""
