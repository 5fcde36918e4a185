"""Elementwise ops with broadcasting, casts, dropout."""

from __future__ import annotations

from autoplan.rules.rule import Link, OpRule, OpView, Span, register_rule


def broadcast_links(v: OpView) -> tuple[Link, ...]:
    """One link per result dim, with every operand that has the dim in full (not broadcast)."""
    out = v.outs[0]
    links = []
    for d, size in enumerate(out.shape):
        if size == 1:
            continue
        spans = []
        for i, spec in enumerate(v.ins):
            e = d - out.rank + spec.rank
            if e >= 0 and spec.shape[e] == size:
                spans.append(Span(i, (e,)))
        if spans or not v.ins:
            links.append(Link(tuple(spans), (Span(0, (d,)),)))
    return tuple(links)


def pointwise(
    v: OpView, *, linear: bool = False, operands: tuple[int, ...] = (), results: tuple[int, ...] = ()
) -> OpRule:
    """Rule of an elementwise op; `operands` and `results` are what its backward reads."""
    return OpRule(broadcast_links(v), linear=linear, saved_operands=operands, saved_results=results, pointwise=True)


@register_rule("add", "sub", "rsub")
def _add(v: OpView) -> OpRule:
    tensors = sum(hasattr(a, "value") for a in v.op.args[:2])
    return pointwise(v, linear=tensors == 2 or len(v.ins) == 2)


@register_rule("neg", "contiguous", "clone", "to", "_to_copy", "type_as", "alias", "detach")
def _linear_unary(v: OpView) -> OpRule:
    return pointwise(v, linear=v.outs[0].is_float and v.ins[0].is_float)


@register_rule("mul")
def _mul(v: OpView) -> OpRule:
    if len(v.ins) == 1:
        squared = sum(hasattr(a, "value") for a in v.op.args[:2]) == 2
        return pointwise(v, linear=not squared, operands=(0,) if squared else ())
    return pointwise(v, operands=tuple(i for i in (0, 1) if v.ins[1 - i].requires_grad))


@register_rule("div")
def _div(v: OpView) -> OpRule:
    if len(v.ins) == 1:
        scaled = hasattr(v.op.args[0], "value") and not hasattr(v.op.args[1], "value")
        scaled &= v.op.arg(2, "rounding_mode") is None
        rounded = v.op.arg(2, "rounding_mode") is not None
        return pointwise(v, linear=scaled, operands=() if scaled or rounded else (0,))
    return pointwise(v, operands=(0, 1) if v.ins[1].requires_grad else (1,))


@register_rule("tanh", "sigmoid", "exp", "rsqrt", "sqrt", "reciprocal", "relu", "expm1")
def _by_result(v: OpView) -> OpRule:
    return pointwise(v, results=(0,))


@register_rule(
    "gelu",
    "silu",
    "mish",
    "elu",
    "selu",
    "leaky_relu",
    "hardtanh",
    "hardswish",
    "hardsigmoid",
    "softplus",
    "sin",
    "cos",
    "log",
    "log1p",
    "erf",
    "abs",
    "square",
    "clamp",
    "clamp_min",
    "clamp_max",
    "atan2",
    "logsigmoid",
    "log_sigmoid",
    "relu6",
    "celu",
    "softsign",
)
def _by_operand(v: OpView) -> OpRule:
    return pointwise(v, operands=tuple(range(len(v.ins))))


@register_rule("pow")
def _pow(v: OpView) -> OpRule:
    by_tensor = v.index(1, "exponent") is not None
    return pointwise(v, operands=tuple(range(len(v.ins))), results=(0,) if by_tensor else ())


@register_rule("maximum", "minimum", "lerp")
def _select(v: OpView) -> OpRule:
    return pointwise(v, operands=tuple(range(len(v.ins))))


@register_rule("where", "masked_fill")
def _masked(v: OpView) -> OpRule:
    mask = v.index(0, "condition") if v.op.name == "where" else v.index(1, "mask")
    return pointwise(v, operands=() if mask is None else (mask,))


@register_rule("addcmul", "addcdiv")
def _product_added(v: OpView) -> OpRule:
    factors = (v.index(1, "tensor1"), v.index(2, "tensor2"))
    return pointwise(v, operands=tuple({i: None for i in factors if i is not None}))


@register_rule(
    "eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not", "logical_xor", "bitwise_and",
    "bitwise_or", "bitwise_not", "__and__", "__or__", "isnan", "isinf", "isfinite", "sign", "floor", "ceil", "round",
    "trunc", "remainder", "floor_divide", "zeros_like", "ones_like", "full_like", "empty_like",
)  # fmt: skip
def _no_gradient(v: OpView) -> OpRule:
    return pointwise(v)


@register_rule("dropout")
def _dropout(v: OpView) -> OpRule:
    rule = pointwise(v)
    return OpRule(rule.links, pointwise=True, random=True, hidden_bytes=v.outs[0].numel)
