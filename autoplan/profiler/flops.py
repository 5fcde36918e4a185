"""Floating-point operations of ops, forward and backward, from shapes alone. Free of torch.

*Flops* are those of tensor products: matrix products, convolutions, attention. A multiply-add counts 2. Everything
else (biases, activations, norms, sums, losses) is counted apart, as *elementwise operations*, by `elements`: these are
bound by memory, and mixing them in would blur numbers that people compare. ``torch.utils.flop_counter`` draws the
line at the same place.

With M = elements of the result / N::

(1)  linear, addmm, matmul, bmm, einsum   forward 2·M·N·K; backward 2·M·N·K per operand that needs a gradient
(2)  convolution                          forward 2 · (weight elements per output channel) per result element;
                                          backward the same per operand that needs a gradient
(3)  attention, P = batch·heads·Sq·Sk     forward 2·P·(Dk + Dv): two products
                                          backward 2·P·(3·Dk + 2·Dv): five products, since the fused kernels compute
                                          the scores again; 2·P·(2·Dk + 2·Dv) with dropout or a bias that is
                                          trained, where scores are kept
(4)  experts (grouped matmul)             2·rows·N·K over the rows of all groups together, however they are divided
(5)  LSTM, GRU, RNN                       every weight matrix once per step and sequence: 2·T·B·(its elements)

Causal attention is counted in full, as torch's ``FlopCounterMode`` does; ``causal="half"`` counts the half of (3) that
kernels which skip masked blocks execute. Views and copies cost nothing. An op that no table lists counts 0 and is named
by `unknown_ops`; `register_flops` adds one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from autoplan.errors import AutoplanError, OptionError
from autoplan.ir import Arg, Op, OpGraph, Ref
from autoplan.profiler.elements import elementwise
from autoplan.rules import OpView, rule_of
from autoplan.rules.rule import rule_name

Causal = Literal["full", "half"]
Flops = tuple[int, int]
"""Of (forward, backward)."""


@dataclass(frozen=True)
class Work:
    """What an op computes.

    Attributes:
        forward_flops: Flops forward.
        backward_flops: Flops of its own backward; 0 where no gradient flows through it.
        forward_elementwise: Elementwise operations forward.
        backward_elementwise: Elementwise operations backward.
    """

    forward_flops: int = 0
    backward_flops: int = 0
    forward_elementwise: int = 0
    backward_elementwise: int = 0


def work(op: Op, graph: OpGraph, *, causal: Causal = "full") -> Work | None:
    """Counts one op; None where no table lists it.

    Args:
        op: Of `graph`.
        graph: Forward graph.
        causal: Whether causal attention counts in full or by half.

    Raises:
        OptionError: `causal` is neither.
    """
    if causal not in get_args(Causal):
        raise OptionError(f"causal flops are counted 'full' or 'half', not {causal!r}")
    if is_free(op, graph):
        return Work()
    v, name = OpView.of(op, graph), rule_name(op)
    if name in _REGISTERED:
        found = _REGISTERED[name](v)
        return found if needs_backward(op, graph) else Work(found.forward_flops, 0, found.forward_elementwise, 0)
    flops = _attention(v, causal) if name in _CAUSAL_ARGUMENT else None
    if flops is None and (fn := _products(name)) is not None:
        flops = fn(v)
    others = elementwise(v, name)
    if flops is None and others is None:
        return None
    forward, backward = flops or (0, 0)
    ahead, back = others or (0, 0)
    return Work(forward, backward, ahead, back) if needs_backward(op, graph) else Work(forward, 0, ahead, 0)


def forward_flops(op: Op, graph: OpGraph, *, causal: Causal = "full") -> int:
    """Flops of one op; 0 where no table lists it (see `unknown_ops`)."""
    return (work(op, graph, causal=causal) or Work()).forward_flops


def backward_flops(op: Op, graph: OpGraph, *, causal: Causal = "full") -> int:
    """Flops of the op's own backward; 0 where no gradient flows through it."""
    return (work(op, graph, causal=causal) or Work()).backward_flops


def operations(op: Op, graph: OpGraph, *, causal: Causal = "full") -> tuple[int, int]:
    """Flops and elementwise operations together, forward and backward: what an op's kernels execute."""
    w = work(op, graph, causal=causal) or Work()
    return w.forward_flops + w.forward_elementwise, w.backward_flops + w.backward_elementwise


def unknown_ops(graph: OpGraph) -> Mapping[str, int]:
    """Targets of the ops whose flops no table knows, with how many there are of each."""
    return dict(Counter(op.target for op in graph.ops if work(op, graph) is None))


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


FlopsFn = Callable[[OpView], int | Flops | Work]
_REGISTERED: dict[str, Callable[[OpView], Work]] = {}


def register_flops(*names: str) -> Callable[[FlopsFn], FlopsFn]:
    """Says what a custom op computes: decorates a function of an `OpView` (the specs of what an op reads and writes).

    The function returns the flops forward, whose double is then taken for backward, or a pair (forward, backward), or
    a `Work`, which has elementwise operations too.

    Args:
        names: ``library::name`` each, as in ``torch.library.custom_op``.

    Raises:
        AutoplanError: A name is counted already.

    Example:
        >>> @register_flops("mylib::pairwise")
        ... def _pairwise(v):
        ...     rows, width = v.ins[0].shape
        ...     return 2 * rows * rows * width
    """

    def add(fn: FlopsFn) -> FlopsFn:
        for name in names:
            if name in _REGISTERED or _products(name) is not None:
                raise AutoplanError(f"the flops of {name!r} are counted already")

            def whole(v: OpView, fn: FlopsFn = fn) -> Work:
                found = fn(v)
                if isinstance(found, Work):
                    return found
                return Work(*found) if isinstance(found, tuple) else Work(found, 2 * found)

            _REGISTERED[name] = whole
        return fn

    return add


def _products(name: str) -> Callable[[OpView], Flops] | None:
    return _PRODUCTS.get(name) or _PRODUCTS.get(name.removesuffix("_"))


def _grads(v: OpView, *operands: int | None) -> int:
    """How many of these operands need a gradient."""
    return sum(v.ins[i].requires_grad for i in operands if i is not None)


def _linear(v: OpView) -> Flops:
    """Equation (1)."""
    x, w = v.index(0, "input") or 0, v.index(1, "weight") or 0
    product = 2 * v.outs[0].numel * v.ins[x].shape[-1]
    return product, product * _grads(v, x, w)


def _matmul(v: OpView) -> Flops:
    """Equation (1) for any ranks; one operand used twice gets a gradient from both uses."""
    a, b = v.index(0) or 0, v.index(1) or 0
    product = 2 * v.outs[0].numel * (v.ins[a].shape[-1] if v.ins[a].rank else 1)
    return product, product * _grads(v, a, b)


def _addmm(v: OpView) -> Flops:
    """``c + a @ b`` and its batched kin, also those that sum over the batch."""
    a, b = v.index(1) or 0, v.index(2) or 0
    summed = v.ins[a].shape[0] if v.op.name == "addbmm" else 1
    product = 2 * v.outs[0].numel * v.ins[a].shape[-1] * summed
    return product, product * _grads(v, a, b)


def _outer(v: OpView) -> Flops:
    """Every element is one product."""
    return 2 * v.outs[0].numel, 2 * v.outs[0].numel * _grads(v, v.index(0), v.index(1))


def _grouped_mm(v: OpView) -> Flops:
    """Equation (4). A rank of 3 means a matrix per group, of 2 that the rows (or the inner dim) hold all groups."""
    a, b = v.index(0, "input") or 0, v.index(1, "weight") or 0
    left, right = v.ins[a], v.ins[b]
    columns = right.shape[-1]
    if left.rank == 3 and right.rank == 2:  # the columns hold all groups
        product = 2 * left.shape[1] * left.shape[2] * columns
    else:
        product = 2 * left.numel * columns
    return product, product * _grads(v, a, b)


def _tensordot(v: OpView) -> Flops:
    """Equation (1); the dims that are summed over are named per operand."""
    a, b = v.index(0) or 0, v.index(1) or 0
    dims = v.op.arg(2, "dims_self", ())
    inner = math.prod(v.ins[a].shape[d] for d in dims if isinstance(d, int)) if isinstance(dims, tuple) else 1
    product = 2 * v.outs[0].numel * inner
    return product, product * _grads(v, a, b)


def _einsum(v: OpView) -> Flops:
    """Equation (1), two operands at a time from the left; a label of one operand alone is summed beforehand."""
    equation = str(v.op.args[0]).replace(" ", "").replace("...", ".")
    left, _, right = equation.partition("->")
    specs = [v.ins[v.op.inputs.index(a.value)] for a in _refs(v.op.args[1])]
    sizes: dict[str, int] = {}
    for labels, spec in zip(left.split(","), specs, strict=True):
        front, dots, back = labels.partition(".")
        dims = [*range(len(front)), *range(spec.rank - len(back), spec.rank)]
        sizes.update((label, spec.shape[d]) for label, d in zip(front + back, dims, strict=True))
        if dots:
            inner = math.prod(spec.shape[len(front) : spec.rank - len(back)])
            sizes["."] = max(sizes.get(".", 1), inner)
    terms = [set(t) for t in left.split(",")]
    kept = set(right) if "->" in equation else {x for x in sizes if x == "." or left.count(x) == 1}
    forward = backward = 0
    done = terms[0]
    for i, term in enumerate(terms[1:], 1):
        later = kept.union(*terms[i + 1 :])
        product = 2 * math.prod(sizes[x] for x in (done | term) if x in later or (x in done and x in term))
        forward += product
        backward += product * (specs[i].requires_grad + any(s.requires_grad for s in specs[:i]))
        done = (done | term) & later
    return forward, backward


def _convolution(v: OpView) -> Flops:
    """Equation (2); a transposed convolution is the backward of a plain one, so it counts input elements."""
    x, w = v.index(0, "input") or 0, v.index(1, "weight") or 0
    named = v.op.name in ("convolution", "_convolution")
    transposed = v.op.name.startswith("conv_transpose") or (named and v.op.arg(6, "transposed"))
    sites = v.ins[x].numel if transposed else v.outs[0].numel
    product = 2 * sites * math.prod(v.ins[w].shape[1:])
    return product, product * _grads(v, x, w)


def _conv_tbc(v: OpView) -> Flops:
    """Equation (2) for a weight of (width, channels in, channels out)."""
    x, w = v.index(0) or 0, v.index(1) or 0
    product = 2 * v.outs[0].numel * math.prod(v.ins[w].shape[:2])
    return product, product * _grads(v, x, w)


def _bilinear(v: OpView) -> Flops:
    """``x1 · W · x2``: the first product, then one for each result element."""
    a, b, w = v.index(0) or 0, v.index(1) or 0, v.index(2) or 0
    rows = v.ins[a].numel // max(1, v.ins[a].shape[-1])
    product = 2 * rows * v.ins[w].numel + 2 * v.outs[0].numel * v.ins[b].shape[-1]
    return product, product * _grads(v, a, b, w)


def _recurrent(v: OpView) -> Flops:
    """Equation (5). Gradients of states are computed at every step, those of the input only where it needs one."""
    shift = v.op.target.endswith(".data")  # packed sequences: one argument more
    weights, layers, both = (v.op.args[i + shift] for i in (2, 4, 7))
    matrices = [s for a in _refs(weights) if (s := v.ins[v.op.inputs.index(a.value)]).rank == 2]
    x, directions = v.ins[0], 2 if both else 1
    rows = x.numel // max(1, x.shape[-1])
    per_cell = len(matrices) // (directions * (layers if isinstance(layers, int) else 1))
    reads_input = {d * per_cell for d in range(directions)}
    forward = backward = 0
    for i, w in enumerate(matrices):
        product = 2 * rows * w.numel
        forward += product
        backward += product * (w.requires_grad + (i not in reads_input or x.requires_grad))
    return forward, backward


def _refs(arg: Arg) -> list[Ref]:
    return [a for a in arg if isinstance(a, Ref)] if isinstance(arg, tuple) else []


def _attention(v: OpView, causal: Causal) -> Flops:
    """Equation (3)."""
    q, k, value = v.index(0, "query") or 0, v.index(1, "key") or 0, v.index(2, "value") or 0
    queries, keys, values = v.ins[q], v.ins[k], v.ins[value]
    position, drops = _CAUSAL_ARGUMENT[rule_name(v.op)]
    mask = v.index(3, "attn_mask") if drops is not None else None
    kept = drops is not None and (v.op.arg(drops, "dropout_p", 0.0) or _grads(v, mask))
    pairs = math.prod(queries.shape[:-1]) * keys.shape[-2]
    if causal == "half" and v.op.arg(position, "is_causal", False):
        pairs //= 2
    d_k, d_v = queries.shape[-1], values.shape[-1]
    return 2 * pairs * (d_k + d_v), 2 * pairs * ((2 if kept else 3) * d_k + 2 * d_v)


_CAUSAL_ARGUMENT: dict[str, tuple[int, int | None]] = {
    "scaled_dot_product_attention": (5, 4),
    "autoplan::attention": (4, None),  # the fused kernel of emitted programs
    "_scaled_dot_product_attention_math": (5, 4),
    "_scaled_dot_product_flash_attention": (4, None),
    "_scaled_dot_product_flash_attention_for_cpu": (4, None),
    "_scaled_dot_product_efficient_attention": (6, None),
    "_scaled_dot_product_cudnn_attention": (6, None),
    "_scaled_dot_product_fused_attention_overrideable": (5, None),
}
"""Attention in every form that graphs hold: where ``is_causal`` stands among its arguments, and ``dropout_p`` where
dropout (or a mask that needs a gradient) means that scores are kept."""

_ALIASES = frozenset({"detach", "alias", "lift_fresh_copy", "broadcast_tensors"})


def _names(fn: Callable[[OpView], Flops], names: str) -> dict[str, Callable[[OpView], Flops]]:
    return dict.fromkeys(names.split(), fn)


_PRODUCTS: dict[str, Callable[[OpView], Flops]] = {
    "linear": _linear,
    **_names(_matmul, "matmul mm bmm mv dot vdot inner linalg_vecdot _scaled_mm _int_mm"),
    **_names(_addmm, "addmm baddbmm addmv addbmm _addmm_activation"),
    **_names(_outer, "outer ger"),
    **_names(_grouped_mm, "_grouped_mm _scaled_grouped_mm transformers::grouped_mm_fallback"),
    "tensordot": _tensordot,
    "einsum": _einsum,
    **_names(_convolution, "conv1d conv2d conv3d convolution _convolution convolution_overrideable"),
    **_names(_convolution, "conv_transpose1d conv_transpose2d conv_transpose3d mkldnn_convolution"),
    **_names(_convolution, "thnn_conv2d _slow_conv2d_forward _conv_depthwise2d conv_depthwise3d slow_conv3d"),
    "conv_tbc": _conv_tbc,
    "bilinear": _bilinear,
    **_names(_recurrent, "lstm gru rnn_tanh rnn_relu"),
}
