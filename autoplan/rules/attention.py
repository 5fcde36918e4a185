"""Scaled dot-product attention: batch and heads (KV heads where they are grouped); queries where nothing is causal."""

from __future__ import annotations

from autoplan.rules.rule import Link, OpRule, OpView, Span, register_rule


@register_rule("scaled_dot_product_attention")
def _attention(v: OpView) -> OpRule:
    q, k, value = v.index(0, "query") or 0, v.index(1, "key") or 0, v.index(2, "value") or 0
    mask = v.index(3, "attn_mask")
    dropout, causal = v.op.arg(4, "dropout_p", 0.0), v.op.arg(5, "is_causal", False)
    specs, out = v.ins, v.outs[0]
    if specs[q].rank != 4 or len({q, k, value}) != 3:
        return OpRule(known=False, saved_operands=tuple(range(len(v.ins))), saved_results=(0,))
    heads, groups = specs[q].shape[1], specs[k].shape[1]
    inner = heads // groups

    def masked(dim: int, size: int, inner: int = 1) -> tuple[Span, ...]:
        if mask is None:
            return ()
        e = dim - 4 + specs[mask].rank
        return (Span(mask, (e,), inner=inner),) if e >= 0 and specs[mask].shape[e] == size != 1 else ()

    links = [
        Link((Span(q, (0,)), Span(k, (0,)), Span(value, (0,)), *masked(0, out.shape[0])), (Span(0, (0,)),)),
        Link(
            (Span(q, (1,), inner=inner), Span(k, (1,)), Span(value, (1,)), *masked(1, heads, inner)),
            (Span(0, (1,), inner=inner),),
        ),
    ]
    if not causal and not dropout:
        links.append(Link((Span(q, (2,)), *masked(2, out.shape[2])), (Span(0, (2,)),)))
    statistics = 4 * out.shape[0] * heads * out.shape[2]
    scores = out.shape[0] * heads * out.shape[2] * specs[k].shape[2]
    return OpRule(
        tuple(links),
        saved_operands=(q, k, value),
        saved_results=(0,),
        random=bool(dropout),
        # with dropout attention is written out: the scores after softmax and the mask are kept
        hidden_bytes=scores * 9 if dropout else statistics,
    )
