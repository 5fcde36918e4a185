"""Linear layers and matrix products: every free dim maps, the inner dim is contracted."""

from __future__ import annotations

from autoplan.rules.rule import Link, OpRule, OpView, Span, register_rule, same


def _products(v: OpView, *operands: int | None) -> tuple[int, ...]:
    """Operands that backward reads: each factor of the product, where the other needs a gradient."""
    a, b = operands
    if a is None or b is None:
        return ()
    out = []
    if v.ins[b].requires_grad:
        out.append(a)
    if v.ins[a].requires_grad:
        out.append(b)
    return tuple(dict.fromkeys(out))


@register_rule("linear")
def _linear(v: OpView) -> OpRule:
    x, w, b = v.index(0, "input") or 0, v.index(1, "weight") or 0, v.index(2, "bias")
    last = v.outs[0].rank - 1
    bias = [] if b is None else [(b, 0)]
    links = [same((x, d), to=[(0, d)]) for d in range(last)]
    links.append(same((w, 0), *bias, to=[(0, last)]))
    links.append(same((x, v.ins[x].rank - 1), (w, 1), additive=() if b is None else (b,)))
    return OpRule(tuple(links), saved_operands=_products(v, x, w))


@register_rule("addmm")
def _addmm(v: OpView) -> OpRule:
    if v.op.arg(3, "beta", 1) != 1 or v.op.arg(4, "alpha", 1) != 1:
        return OpRule(known=False, saved_operands=tuple(range(len(v.ins))))
    c, a, b = v.index(0) or 0, v.index(1) or 0, v.index(2) or 0
    bias = v.ins[c]
    columns = [(c, bias.rank - 1)] if bias.shape[-1:] == v.outs[0].shape[-1:] else []
    rows = [(c, 0)] if bias.rank == 2 and bias.shape[0] == v.outs[0].shape[0] else []
    links = (
        same((a, 0), *rows, to=[(0, 0)]),
        same((b, 1), *columns, to=[(0, 1)]),
        same((a, 1), (b, 0), additive=(c,)),
    )
    return OpRule(links, saved_operands=_products(v, a, b))


@register_rule("matmul", "mm", "bmm")
def _matmul(v: OpView) -> OpRule:
    if len(v.ins) == 1:
        return OpRule(known=False, saved_operands=(0,))
    a, b, out = v.ins[0], v.ins[1], v.outs[0]
    if a.rank < 2 or b.rank < 2:
        return OpRule(known=False, saved_operands=(0, 1))
    links = [
        same((0, a.rank - 2), to=[(0, out.rank - 2)]),
        same((1, b.rank - 1), to=[(0, out.rank - 1)]),
        same((0, a.rank - 1), (1, b.rank - 2)),
    ]
    for d in range(out.rank - 2):
        spans = []
        for i, spec in enumerate(v.ins):
            e = d - out.rank + spec.rank
            if e >= 0 and spec.shape[e] == out.shape[d] != 1:
                spans.append(Span(i, (e,)))
        if spans:
            links.append(Link(tuple(spans), (Span(0, (d,)),)))
    return OpRule(tuple(links), saved_operands=_products(v, 0, 1))
