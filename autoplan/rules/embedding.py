"""Embedding and losses. The vocabulary stays whole in this version."""

from __future__ import annotations

from autoplan.rules.rule import OpRule, OpView, register_rule, same

MEAN, SUM = 1, 2
"""Values of the ``reduction`` argument of ATen losses."""


@register_rule("embedding")
def _embedding(v: OpView) -> OpRule:
    if v.op.arg(3, "scale_grad_by_freq", False) or v.op.arg(4, "sparse", False):
        return OpRule(known=False, saved_operands=(1,))
    w, ids = v.index(0, "weight") or 0, v.index(1, "indices") or 0
    rank = v.ins[ids].rank
    links = [same((ids, d), to=[(0, d)]) for d in range(rank)]
    return OpRule((*links, same((w, 1), to=[(0, rank)])), saved_operands=(ids,))


@register_rule("cross_entropy_loss")
def _cross_entropy(v: OpView) -> OpRule:
    logits, target = v.index(0) or 0, v.index(1, "target") or 0
    weight, reduction = v.index(2, "weight"), v.op.arg(3, "reduction", MEAN)
    smoothing = v.op.arg(5, "label_smoothing", 0.0)
    if weight is not None or smoothing or v.ins[target].is_float or v.ins[logits].rank != 2:
        return OpRule(known=False, saved_operands=tuple(range(len(v.ins))))
    to = [(0, 0)] if reduction not in (MEAN, SUM) else []
    return OpRule(
        (same((logits, 0), (target, 0), to=to),),
        saved_operands=(target,),
        hidden_bytes=v.ins[logits].nbytes,
    )


@register_rule("mse_loss")
def _mse(v: OpView) -> OpRule:
    reduction = v.op.arg(2, "reduction", MEAN)
    if v.ins[0].shape != v.ins[-1].shape:
        return OpRule(known=False, saved_operands=tuple(range(len(v.ins))))
    operands = range(len(v.ins))
    links = tuple(
        same(*((i, d) for i in operands), to=[] if reduction in (MEAN, SUM) else [(0, d)]) for d in range(v.ins[0].rank)
    )
    return OpRule(links, saved_operands=tuple(operands))
