"""Which values share memory, and where a reshape has to copy: strides of every value, followed through the graph.

A view keeps the storage of its base. A reshape is a view where strides allow it, else a copy. New tensors are dense:
elementwise results lie as their first full-size operand does, attention lies as (batch, sequence, head, channel), as
the fused kernels leave it, everything else is contiguous.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autoplan.ir import Op, OpGraph, Ref
from autoplan.rules import OpRule, OpView, rule_of

Strides = tuple[int, ...]
_RESHAPES = frozenset({"view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze"})
_BY_LINKS = frozenset({"transpose", "t", "permute", "swapaxes", "movedim", "expand"})
_DROPS_DIM = frozenset({"select", "unbind"})
_ALIASES = frozenset({"detach", "alias", "lift_fresh_copy"})


@dataclass(frozen=True)
class Layout:
    """Where a value lies.

    Attributes:
        storage: The value whose op (or graph input) allocated the memory; the value's own name where it is no view.
        strides: Elements between neighbours, per dim.
    """

    storage: str
    strides: Strides


def layouts(graph: OpGraph, rules: Mapping[str, OpRule] | None = None) -> Mapping[str, Layout]:
    """The layout of every value of a graph.

    Args:
        graph: Forward graph.
        rules: Rules by op key, where they are known already.
    """
    out = {i.value: Layout(i.value, contiguous(graph.values[i.value].shape)) for i in graph.inputs}
    for op in graph.ops:
        rule = rules[op.key] if rules is not None else rule_of(op, graph)
        view = OpView.of(op, graph)
        if op.name == "broadcast_tensors":  # each result is its operand, expanded
            operands = op.args[0] if isinstance(op.args[0], tuple) else ()
            for value, arg in zip(op.outputs, operands, strict=True):
                assert isinstance(arg, Ref)
                out[value] = _expanded(out[arg.value], graph, arg.value, value)
            continue
        base = out[op.inputs[0]] if op.inputs else None
        shares = base is not None and (rule.view or op.name in _ALIASES)
        for i, value in enumerate(op.outputs):
            strides = _viewed(view, rule, base.strides, i) if shares and base is not None else None
            if strides is not None and base is not None:
                out[value] = Layout(base.storage, strides)
            else:
                out[value] = Layout(value, _dense(view, rule, op, out, i))
    return out


def _expanded(base: Layout, graph: OpGraph, before: str, after: str) -> Layout:
    old, new = graph.values[before].shape, graph.values[after].shape
    strides = (0,) * (len(new) - len(old)) + base.strides
    old = (1,) * (len(new) - len(old)) + old
    return Layout(base.storage, tuple(s if a == b else 0 for s, a, b in zip(strides, old, new, strict=True)))


def contiguous(shape: Sequence[int]) -> Strides:
    """Row-major strides."""
    return _ordered(shape, range(len(shape)))


def _ordered(shape: Sequence[int], order: Sequence[int]) -> Strides:
    """Dense strides with the dims in memory order, outermost first."""
    out, below = [0] * len(shape), 1
    for d in reversed(order):
        out[d] = below
        below *= max(1, shape[d])
    return tuple(out)


def _viewed(v: OpView, rule: OpRule, strides: Strides, result: int) -> Strides | None:
    """Strides of one result of a view, or None where it has to be copied."""
    name, x, out = v.op.name, v.ins[0], v.outs[result]
    if name in _ALIASES:
        return strides
    if name in _RESHAPES:
        found = view_strides(x.shape, strides, out.shape)
        return found if found is not None or name in ("reshape", "flatten") else contiguous(out.shape)
    if name in _BY_LINKS:
        moved = [0] * out.rank
        for link in rule.links:
            for a, b in zip(link.operands, link.results, strict=False):
                moved[b.dims[0]] = strides[a.dims[0]]
        return tuple(moved)
    if name in _DROPS_DIM:
        dim = v.dim(v.op.arg(1, "dim", 0))
        return strides[:dim] + strides[dim + 1 :]
    if name == "slice":
        dim, step = v.dim(v.op.arg(1, "dim", 0)), v.op.arg(4, "step", 1)
        return tuple(s * (step if d == dim and isinstance(step, int) else 1) for d, s in enumerate(strides))
    return strides if len(strides) == out.rank else contiguous(out.shape)


def _dense(v: OpView, rule: OpRule, op: Op, known: Mapping[str, Layout], result: int) -> Strides:
    """Strides of a new tensor."""
    shape = v.outs[result].shape
    if op.name in ("scaled_dot_product_attention", "attention") and len(shape) == 4 and result == 0:
        return _ordered(shape, (0, 2, 1, 3))
    contiguous_copy = op.name == "contiguous" or op.kwargs.get("memory_format") == "torch.contiguous_format"
    if rule.pointwise and not contiguous_copy:
        for value, spec in zip(op.inputs, v.ins, strict=True):
            strides = known[value].strides
            if spec.shape == shape and all(s or n == 1 for s, n in zip(strides, shape, strict=True)):
                return _ordered(shape, sorted(range(len(shape)), key=lambda d: -strides[d]))
    return contiguous(shape)


def view_strides(shape: Sequence[int], strides: Strides, new: Sequence[int]) -> Strides | None:
    """Strides of a reshape without a copy, or None where there are none.

    Each run of dims that lies densely in memory must be the product of consecutive new dims.
    """
    if not shape or 0 in shape:
        return contiguous(new)
    out, j = [0] * len(new), len(new) - 1
    unit, run, filled = strides[-1], 1, 1
    for d in reversed(range(len(shape))):
        run *= shape[d]
        if d and (shape[d - 1] == 1 or strides[d - 1] == run * unit):
            continue
        while j >= 0 and (filled < run or new[j] == 1):
            out[j] = filled * unit
            filled *= new[j]
            j -= 1
        if filled != run:
            return None
        if d:
            unit, run, filled = strides[d - 1], 1, 1
    return tuple(out) if j == -1 else None
