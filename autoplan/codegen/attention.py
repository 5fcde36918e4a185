"""Attention as one opaque op with declared strides and saved values, alike on every device.

``scaled_dot_product_attention`` takes another path per device and per input, and its strides and decomposition would
leak into traced graphs. `attention` is instead the pair ``autoplan::attention`` -> (out, logsumexp) and
``autoplan::attention_backward``, which choose a kernel when they run. Results lie in memory as (batch, sequence, head,
channel), so that the transposition and view which follow in every model are free. There is no dropout here.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """Softmax(q kᵀ · scale + mask) v for (batch, head, sequence, channel), or with any other leading dims.

    Args:
        q: Queries.
        k: Keys; fewer heads than queries where `enable_gqa`.
        v: Values.
        mask: Added to the scores, or boolean with False where a score does not count; broadcast.
        is_causal: Whether a query sees only keys up to its own position.
        scale: Factor of the scores, by default 1/√channels.
        enable_gqa: Whether heads of keys and values are shared by groups of query heads.
    """
    if mask is not None and mask.requires_grad:  # learned biases: written out, so that autograd reaches the mask
        if enable_gqa and q.shape[-3] != k.shape[-3]:
            k, v = _repeat_heads(k, q.shape[-3]), _repeat_heads(v, q.shape[-3])
        return torch.matmul(torch.softmax(_scores(q, k, mask, is_causal, _scale(q, scale)), -1), v)
    lead = q.shape[:-2]
    q4, k4, v4 = (_to_four(x) for x in (q, k, v))
    mask4 = None if mask is None else _mask_to_four(mask, lead)
    out: Tensor = torch.ops.autoplan.attention(q4, k4, v4, mask4, is_causal, _scale(q, scale))[0]
    return out if len(lead) == 2 else out.reshape(*lead, *out.shape[-2:])


@torch.library.custom_op("autoplan::attention", mutates_args=())
def _attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    out, logsumexp = (_cuda_forward if q.is_cuda else _cpu_forward)(q, k, v, _additive(mask, q), is_causal, scale)
    return _heads_inner(out), logsumexp.contiguous()


@_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    return _empty_heads_inner(q, v.shape[-1]), q.new_empty(q.shape[:-1], dtype=_accumulation(q.dtype))


@torch.library.custom_op("autoplan::attention_backward", mutates_args=())
def _attention_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    run = _cuda_backward if q.is_cuda else _cpu_backward
    grads = run(gradient, q, k, v, _additive(mask, q), out, logsumexp, is_causal, scale)
    return _heads_inner(grads[0]), _heads_inner(grads[1]), _heads_inner(grads[2])


@_attention_backward.register_fake
def _(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_heads_inner(q), _empty_heads_inner(k), _empty_heads_inner(v)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, mask, ctx.is_causal, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, mask, *output)


def _differentiate(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    grads = torch.ops.autoplan.attention_backward(gradient, *saved, ctx.is_causal, ctx.scale)
    return (*grads, None, None, None)


_attention.register_autograd(_differentiate, setup_context=_setup)


def _cpu_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    k, v = _repeat_heads(k, q.shape[1]), _repeat_heads(v, q.shape[1])
    if flash_fits(q, v):
        out, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale
        )
        return out, logsumexp
    return _math_forward(q, k, v, mask, is_causal, scale)


def _cpu_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    heads = k.shape[1]
    k, v = _repeat_heads(k, q.shape[1]), _repeat_heads(v, q.shape[1])
    if flash_fits(q, v):
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, q, k, v, out, logsumexp, 0.0, is_causal, attn_mask=mask, scale=scale
        )
    else:
        grads = _math_backward(gradient, q, k, v, mask, out, logsumexp, is_causal, scale)
    return grads[0], _sum_heads(grads[1], heads), _sum_heads(grads[2], heads)


def flash_fits(q: Tensor, v: Tensor) -> bool:
    """Whether the CPU flash kernel takes these shapes (it wants one head size and something to do)."""
    return q.shape[-1] == v.shape[-1] and q.numel() > 0 and v.numel() > 0


# On CUDA: the flash kernel for half precision without a mask, the memory-efficient one otherwise. Written after their
# schemas and not yet run on a GPU.


def _cuda_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    k, v = _repeat_heads(k, q.shape[1]), _repeat_heads(v, q.shape[1])
    if _cuda_flash_fits(q, v, mask):
        out = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, False, scale=scale)
        return out[0], out[1]
    if q.dtype == torch.float64:
        return _math_forward(q, k, v, mask, is_causal, scale)
    out = aten._scaled_dot_product_efficient_attention(q, k, v, _expand(mask, q, k), True, 0.0, is_causal, scale=scale)
    return out[0], out[1][..., : q.shape[2]]  # the kernel pads rows to a multiple of 32


def _cuda_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    heads, (rows, columns) = k.shape[1], (q.shape[2], k.shape[2])
    k, v = _repeat_heads(k, q.shape[1]), _repeat_heads(v, q.shape[1])
    seed = torch.zeros((), dtype=torch.int64, device=q.device)  # of a dropout that does not take place
    if _cuda_flash_fits(q, v, mask):
        grads = aten._scaled_dot_product_flash_attention_backward(
            gradient, q, k, v, out, logsumexp, None, None, rows, columns, 0.0, is_causal, seed, seed, scale=scale
        )
    elif q.dtype == torch.float64:
        grads = _math_backward(gradient, q, k, v, mask, out, logsumexp, is_causal, scale)
    else:
        padded = torch.nn.functional.pad(logsumexp, (0, -rows % 32))
        grads = aten._scaled_dot_product_efficient_attention_backward(
            gradient,
            q,
            k,
            v,
            _expand(mask, q, k),
            out,
            padded,
            seed,
            seed,
            0.0,
            [True, True, True, False],
            is_causal,
            scale=scale,
        )
    return grads[0], _sum_heads(grads[1], heads), _sum_heads(grads[2], heads)


def _cuda_flash_fits(q: Tensor, v: Tensor, mask: Tensor | None) -> bool:
    half = q.dtype in (torch.float16, torch.bfloat16)
    return half and mask is None and q.shape[-1] == v.shape[-1] <= 256 and q.shape[-1] % 8 == 0


def _math_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, mask, is_causal, scale)
    logsumexp = torch.logsumexp(scores.to(_accumulation(q.dtype)), -1)
    return torch.matmul(_probabilities(scores, logsumexp).to(v.dtype), v), logsumexp


def _math_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    p = _probabilities(_scores(q, k, mask, is_causal, scale), logsumexp).to(q.dtype)
    along = (gradient * out).sum(-1, keepdim=True)
    inner = p * (torch.matmul(gradient, v.transpose(-1, -2)) - along) * scale
    return torch.matmul(inner, k), torch.matmul(inner.transpose(-1, -2), q), torch.matmul(p.transpose(-1, -2), gradient)


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    scores = torch.matmul(q, k.transpose(-1, -2)) * scale
    if is_causal:
        rows, columns = scores.shape[-2:]
        seen = torch.ones(rows, columns, dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(seen.logical_not(), -math.inf)
    if mask is None:
        return scores
    return scores.masked_fill(mask.logical_not(), -math.inf) if mask.dtype == torch.bool else scores + mask


def _probabilities(scores: Tensor, logsumexp: Tensor) -> Tensor:
    p = (scores - logsumexp.unsqueeze(-1)).exp()
    return torch.where(logsumexp.isneginf().unsqueeze(-1), 0.0, p)  # a query that sees nothing yields zeros


def _additive(mask: Tensor | None, q: Tensor) -> Tensor | None:
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(mask.logical_not(), -math.inf)
    return mask.to(q.dtype)


def _expand(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    return None if mask is None else mask.expand(*q.shape[:-1], k.shape[-2])


def _repeat_heads(x: Tensor, heads: int) -> Tensor:
    return x if x.shape[-3] == heads else x.repeat_interleave(heads // x.shape[-3], dim=-3)


def _sum_heads(x: Tensor, heads: int) -> Tensor:
    if x.shape[1] == heads:
        return x
    return x.reshape(x.shape[0], heads, x.shape[1] // heads, *x.shape[2:]).sum(2)


def _scale(q: Tensor, scale: float | None) -> float:
    return 1 / math.sqrt(q.shape[-1]) if scale is None else float(scale)


def _accumulation(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _to_four(x: Tensor) -> Tensor:
    if x.dim() == 4:
        return x
    return x[None, None] if x.dim() == 2 else x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:])


def _mask_to_four(mask: Tensor, lead: torch.Size) -> Tensor:
    while mask.dim() < len(lead) + 2:
        mask = mask.unsqueeze(0)
    return mask if mask.dim() == 4 else _to_four(mask.expand(*lead, *mask.shape[-2:]))


def _heads_inner(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _empty_heads_inner(like: Tensor, channels: int | None = None) -> Tensor:
    batch, heads, rows, width = like.shape
    return like.new_empty(batch, rows, heads, channels or width).transpose(1, 2)
