"""Ops whose sharded form is more than the op on smaller tensors.

Each function emits the local nodes of one op family; sizes are localised, means over a sharded dim become sums divided
by global counts, and attention becomes our opaque op (written out where it has dropout, so that its random draw is a
node of its own).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from autoplan.codegen.attention import attention
from autoplan.codegen.collectives import reshard
from autoplan.ir import Op, OpPlan, Ref
from autoplan.rules.embedding import MEAN, SUM

if TYPE_CHECKING:
    from autoplan.codegen.shard import Emitter

aten = torch.ops.aten
Args = Sequence[Any]
Kwargs = Mapping[str, Any]
IGNORE = -100


def emit(e: Emitter, op: Op, plan: OpPlan, args: Args, kwargs: Kwargs) -> fx.Node:
    """Emits one of the ops of this file."""
    return _EMITTERS[op.name](e, op, plan, args, kwargs)


def _argument(args: Args, kwargs: Kwargs, position: int, keyword: str, default: Any = None) -> Any:
    return args[position] if position < len(args) else kwargs.get(keyword, default)


def _split(e: Emitter, op: Op, plan: OpPlan, args: Args, kwargs: Kwargs) -> fx.Node:
    spec = e.graph.values[op.outputs[0]]
    dim = int(_argument(args, kwargs, 2, "dim", 0)) % spec.rank
    sizes = [e.local(o)[dim] for o in op.outputs]
    return e.call(aten.split_with_sizes.default, args[0], sizes, dim)


def _mean(e: Emitter, op: Op, plan: OpPlan, args: Args, kwargs: Kwargs) -> fx.Node:
    target = aten.mean.dim if op.target.endswith(".dim") else aten.mean.default
    return _averaged(e, plan, e.call(target, *args, **kwargs))


def _averaged(e: Emitter, plan: OpPlan, node: fx.Node) -> fx.Node:
    """A mean over a device's part, as a summand of the mean over all."""
    parts = math.prod(e.mesh.shape[a] for a in e.contracted(plan))
    return node if parts == 1 else e.call(aten.div.Tensor, node, parts)


def _mse(e: Emitter, op: Op, plan: OpPlan, args: Args, kwargs: Kwargs) -> fx.Node:
    node = e.call(aten.mse_loss.default, *args, **kwargs)
    return _averaged(e, plan, node) if _argument(args, kwargs, 2, "reduction", MEAN) == MEAN else node


def _cross_entropy(e: Emitter, op: Op, plan: OpPlan, args: Args, kwargs: Kwargs) -> fx.Node:
    """Mean over a sharded batch: local sum over the number of targets that count, on all devices together."""
    axes = e.contracted(plan)
    if not axes or _argument(args, kwargs, 3, "reduction", MEAN) != MEAN:
        return e.call(aten.cross_entropy_loss.default, *args, **kwargs)
    logits, target = args[0], args[1]
    ignore = _argument(args, kwargs, 4, "ignore_index", IGNORE)
    total = e.call(aten.cross_entropy_loss.default, logits, target, None, SUM, ignore)
    count = e.call(aten.sum.default, e.call(aten.ne.Scalar, target, ignore))
    steps = tuple(("all_reduce", e.mesh.axes[a], e.mesh.shape[a]) for a in axes)
    return e.call(aten.div.Tensor, total, e.call(reshard, count, steps, ()))


def _attention(e: Emitter, op: Op, plan: OpPlan, args: Args, kwargs: Kwargs) -> fx.Node:
    q, k, v = args[:3]
    mask = _argument(args, kwargs, 3, "attn_mask")
    dropout = float(_argument(args, kwargs, 4, "dropout_p", 0.0))
    causal = bool(_argument(args, kwargs, 5, "is_causal", False))
    scale, gqa = kwargs.get("scale"), bool(kwargs.get("enable_gqa", False))
    if not dropout:
        return e.call(attention, q, k, v, mask, causal, scale, gqa)
    specs = [e.graph.values[x] for x in op.inputs[:3]]
    group = specs[0].shape[-3] // specs[1].shape[-3] if gqa else 1
    if group > 1:
        k = e.call(aten.repeat_interleave.self_int, k, group, -3)
        v = e.call(aten.repeat_interleave.self_int, v, group, -3)
    factor = 1 / math.sqrt(specs[0].shape[-1]) if scale is None else scale
    scores = e.call(aten.matmul.default, e.call(aten.mul.Tensor, q, factor), e.call(aten.transpose.int, k, -2, -1))
    rows, columns = specs[0].shape[-2], specs[1].shape[-2]
    if causal:
        device = torch.device(e.device)
        seen = e.call(aten.ones.default, [rows, columns], dtype=torch.bool, device=device)
        hidden = e.call(aten.logical_not.default, e.call(aten.tril.default, seen))
        scores = e.call(aten.masked_fill.Scalar, scores, hidden, -math.inf)
    if mask is not None:
        given = op.arg(3, "attn_mask")
        if isinstance(given, Ref) and e.graph.values[given.value].dtype == "bool":
            scores = e.call(aten.masked_fill.Scalar, scores, e.call(aten.logical_not.default, mask), -math.inf)
        else:
            scores = e.call(aten.add.Tensor, scores, mask)
    weights = e.call(aten.dropout.default, e.call(aten.softmax.int, scores, -1), dropout, True)
    return e.call(aten.matmul.default, weights, v)


_EMITTERS: dict[str, Callable[[Emitter, Op, OpPlan, Args, Kwargs], fx.Node]] = {
    "split": _split,
    "split_with_sizes": _split,
    "mean": _mean,
    "mse_loss": _mse,
    "cross_entropy_loss": _cross_entropy,
    "scaled_dot_product_attention": _attention,
}
