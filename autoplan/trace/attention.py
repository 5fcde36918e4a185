"""Keeps Hugging Face attention causal and grouped while a model is traced.

Traced as it is, a Hugging Face model builds an explicit S x S mask (its shortcut is off under tracing) and repeats the
KV heads. While `opaque_attention` is active, models whose batch has neither padding mask nor position ids use an
attention that passes ``is_causal`` and ``enable_gqa`` through to `scaled_dot_product_attention`; every other model is
traced as it is. Registering an attention implementation is transformers' public extension point
(huggingface.co/docs/transformers/attention_interface).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

NAME = "autoplan"
_NEEDS_MASK = ("attention_mask", "position_ids", "cache_position", "past_key_values", "decoder_attention_mask")


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    if others.get("s_aux") is not None:
        raise ValueError("attention sinks are part of the scores: they cannot be traced as one attention op")
    if others.get("position_bias") is not None or others.get("softcap") is not None:
        # part of the scores: transformers makes a mask of the bias, and refuses a cap
        return _transformers(module, query, key, value, attention_mask, dropout, scaling, is_causal, **others)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    out = torch.nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        dropout_p=dropout,
        scale=scaling,
        is_causal=attention_mask is None and bool(causal) and query.shape[2] > 1,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out.transpose(1, 2).contiguous(), None


def _attention_as_is(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Repeats KV heads where there is a mask, as transformers does."""
    if attention_mask is None:
        return _attention(module, query, key, value, None, **kwargs)
    return _transformers(module, query, key, value, attention_mask, **kwargs)


def _transformers(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    out: tuple[torch.Tensor, None] = sdpa_attention_forward(*args, **kwargs)
    return out


_PLAIN_MASKS = {
    "causal_mask_function",
    "bidirectional_mask_function",
    "and_masks",
    "packed_sequence_mask_function",  # always there under tracing; a batch with position ids is not traced this way
    "remap_positions_for_packed_sequence",
    "sliding_window_overlay",  # of no effect where the window is longer than the sequence
    "sliding_window_bidirectional_overlay",
    "chunked_overlay",
}
"""Functions of `transformers.masking_utils` that ``is_causal`` of the attention module says as well."""


def _mask_parts(function: Any) -> Iterator[str]:
    """Names of the functions that a mask function is put together from."""
    if function is None:
        return
    known = getattr(function, "__module__", "") == "transformers.masking_utils"
    yield function.__qualname__.split(".")[0] if known else "?"
    for cell in function.__closure__ or ():
        inside = cell.cell_contents if isinstance(cell.cell_contents, tuple) else (cell.cell_contents,)
        for part in inside:
            if callable(part) and not isinstance(part, torch.Tensor):
                yield from _mask_parts(part)


def _mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    from transformers.masking_utils import sdpa_mask

    config, length = kwargs.get("config"), kwargs.get("kv_length", 0)
    window = [getattr(config, k, None) for k in ("sliding_window", "attention_chunk_size")]
    plain = all(name in _PLAIN_MASKS for name in _mask_parts(kwargs.get("mask_function")))
    if plain and kwargs.get("attention_mask") is None and not any(w is not None and w < length for w in window):
        return None
    mask: torch.Tensor | None = sdpa_mask(*args, **kwargs)
    return mask


@contextlib.contextmanager
def opaque_attention(model: nn.Module, kwargs: Mapping[str, Any], *, as_is: bool = False) -> Iterator[str | None]:
    """Switches a Hugging Face `model` (a copy that is ours) to the attention above, and its cache off.

    Args:
        model: Changed while the block runs.
        kwargs: The batch.
        as_is: Leaves eager attention eager, and repeats KV heads where the model would.

    Yields:
        None, or what a reader of the profile should know of the attention that was traced.
    """
    configured = [c for m in model.modules() if (c := getattr(m, "config", None)) is not None]
    for c in configured:
        if getattr(c, "use_cache", False) is True:
            c.use_cache = False  # a cache among the results is of no use to training, and cannot be exported
    implementations = {getattr(c, "_attn_implementation", None) for c in configured}
    if "transformers" not in sys.modules or not implementations & {"sdpa", "eager", "flash_attention_2"}:
        yield None
        return
    if as_is and "eager" in implementations:
        yield "attention was traced as the model writes it out (its implementation is 'eager')"
        return
    given = [name for name in _NEEDS_MASK if kwargs.get(name) is not None]
    if given:
        yield f"attention was traced with an explicit mask, because the batch has {', '.join(given)}"
        return
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, _attention_as_is if as_is else _attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, _mask)
    before = [(c, c._attn_implementation) for c in configured if hasattr(c, "_attn_implementation")]
    for c, _ in before:
        c._attn_implementation = NAME
    try:
        yield None
    finally:
        for c, implementation in before:
            c._attn_implementation = implementation
