"""Norms, softmax and reductions. A dim that is reduced stays whole, but for sums and means, which leave a sum."""

from __future__ import annotations

from autoplan.rules.rule import Link, OpRule, OpView, Span, register_rule, same


@register_rule("layer_norm", "rms_norm")
def _layer_norm(v: OpView) -> OpRule:
    shape = v.op.args[1]
    whole = len(shape) if isinstance(shape, tuple) else 1
    lead = v.ins[0].rank - whole
    statistics = 8 * v.outs[0].numel // max(1, v.outs[0].shape[-1])
    links = tuple(same((0, d), to=[(0, d)]) for d in range(lead))
    return OpRule(links, saved_operands=tuple(range(len(v.ins))), hidden_bytes=statistics)


@register_rule("softmax", "log_softmax", "_softmax", "_log_softmax")
def _softmax(v: OpView) -> OpRule:
    dim = v.dim(v.op.args[1])
    links = tuple(same((0, d), to=[(0, d)]) for d in range(v.ins[0].rank) if d != dim)
    return OpRule(links, saved_results=(0,))


@register_rule("sum", "mean")
def _reduce(v: OpView) -> OpRule:
    x, out = v.ins[0], v.outs[0]
    dims = v.op.arg(1, "dim") if v.op.target.endswith("dim_IntList") or v.op.target.endswith(".dim") else None
    reduced = {v.dim(d) for d in dims} if isinstance(dims, tuple) and dims else set(range(x.rank))
    kept = out.rank == x.rank
    links: list[Link] = []
    position = 0
    for d in range(x.rank):
        if d in reduced:
            links.append(same((0, d)))
            position += kept
        else:
            links.append(Link((Span(0, (d,)),), (Span(0, (position,)),)))
            position += 1
    return OpRule(tuple(links), linear=True, reduction=True)
