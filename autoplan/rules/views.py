"""Ops that move data without changing it: views, splits, joins, shifts."""

from __future__ import annotations

from autoplan.rules.rule import Link, OpRule, OpView, Span, group_dims, register_rule, same


def _moved(links: list[Link], *, view: bool = True) -> OpRule:
    return OpRule(tuple(links), linear=True, view=view)


@register_rule("view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze")
def _reshape(v: OpView) -> OpRule:
    if v.op.target == "aten.view.dtype":  # the same bits as other numbers
        return OpRule(known=False, view=True)
    groups = group_dims(v.ins[0].shape, v.outs[0].shape)
    return _moved([Link((Span(0, a),), (Span(0, b),)) for a, b in groups])


@register_rule("transpose", "t", "permute", "swapaxes", "movedim")
def _permute(v: OpView) -> OpRule:
    rank = v.ins[0].rank
    order = list(range(rank))
    if v.op.name == "permute":
        dims = v.op.args[1]
        order = [v.dim(d) for d in dims] if isinstance(dims, tuple) else order
    elif v.op.name == "t":
        order.reverse()
    elif v.op.name == "movedim":
        sources, targets = (a if isinstance(a, tuple) else (a,) for a in v.op.args[1:3])
        moved = {v.dim(t): v.dim(s) for s, t in zip(sources, targets, strict=True)}
        left = iter(d for d in order if d not in moved.values())
        order = [moved[d] if d in moved else next(left) for d in order]
    else:
        a, b = v.dim(v.op.args[1]), v.dim(v.op.args[2])
        order[a], order[b] = b, a
    return _moved([same((0, d), to=[(0, i)]) for i, d in enumerate(order)])


@register_rule("expand")
def _expand(v: OpView) -> OpRule:
    x, out = v.ins[0], v.outs[0]
    shift = out.rank - x.rank
    links = []
    for d in range(out.rank):
        e = d - shift
        if e >= 0 and x.shape[e] == out.shape[d]:
            links.append(same((0, e), to=[(0, d)]))
        else:
            links.append(Link((), (Span(0, (d,)),)))
    return _moved(links)


@register_rule("slice", "narrow", "select", "pad", "constant_pad_nd", "roll", "flip")
def _whole_dim(v: OpView) -> OpRule:
    """The dims that are cut, padded or shifted stay whole; every other dim maps."""
    x, out, name = v.ins[0], v.outs[0], v.op.name
    if name == "select":
        dim = v.dim(v.op.arg(1, "dim", 0))
        pairs = [(d, d - (d > dim)) for d in range(x.rank) if d != dim]
    elif name in ("roll", "flip"):
        dims = v.op.arg(2, "dims") if name == "roll" else v.op.arg(1, "dims")
        touched = {v.dim(d) for d in dims} if isinstance(dims, tuple) and dims else set(range(x.rank))
        pairs = [(d, d) for d in range(x.rank) if d not in touched]
    elif name in ("pad", "constant_pad_nd"):
        pads = v.op.args[1] if isinstance(v.op.args[1], tuple) else ()
        touched = {x.rank - 1 - i // 2 for i, n in enumerate(pads) if n}  # the last dim comes first
        pairs = [(d, d) for d in range(x.rank) if d not in touched]
    elif name == "narrow":
        pairs = [(d, d) for d in range(x.rank) if d != v.dim(v.op.arg(1, "dim"))]
    else:  # a slice that takes the whole dim
        pairs = [(d, d) for d in range(x.rank) if x.shape[d] == out.shape[d]]
    rule = _moved([same((0, a), to=[(0, b)]) for a, b in pairs], view=name in ("slice", "narrow", "select"))
    constant = name in ("pad", "constant_pad_nd") and v.op.args[-1] not in (0, 0.0, None)
    return OpRule(rule.links, linear=not constant, view=rule.view)


@register_rule("split", "split_with_sizes", "chunk", "unbind")
def _split(v: OpView) -> OpRule:
    x = v.ins[0]
    keyword = 1 if v.op.name == "unbind" else 2
    dim = v.dim(v.op.arg(keyword, "dim", 0))
    n = len(v.outs)
    links = []
    for d in range(x.rank):
        if d != dim:
            links.append(same((0, d), to=[(i, d - (v.op.name == "unbind" and d > dim)) for i in range(n)]))
    if v.op.name != "unbind" and len({o.shape[dim] for o in v.outs}) == 1:
        links.append(Link((Span(0, (dim,), outer=n),), tuple(Span(i, (dim,)) for i in range(n))))
    return _moved(links)


@register_rule("cat")
def _cat(v: OpView) -> OpRule:
    dim = v.dim(v.op.arg(1, "dim", 0))
    links = [same(*((i, d) for i in range(len(v.ins))), to=[(0, d)]) for d in range(v.outs[0].rank) if d != dim]
    parts = v.op.args[0]
    count = len(parts) if isinstance(parts, tuple) else 0
    if count and all(s.shape[dim] * count == v.outs[0].shape[dim] for s in v.ins):
        spans = tuple(Span(i, (dim,)) for i in range(len(v.ins)))
        links.append(Link(spans, (Span(0, (dim,), outer=count),)))
    return _moved(links, view=False)


@register_rule("stack")
def _stack(v: OpView) -> OpRule:
    dim = v.dim(v.op.arg(1, "dim", 0), v.outs[0])
    pairs = [(d, d + (d >= dim)) for d in range(v.ins[0].rank)]
    return _moved([same(*((i, a) for i in range(len(v.ins))), to=[(0, b)]) for a, b in pairs], view=False)
