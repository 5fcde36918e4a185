"""Tiny models as they come, and graphs written by hand."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from autoplan.ir import GraphInput, Op, OpGraph, Ref, TensorSpec

Batch = dict[str, torch.Tensor]


def gpt2(
    *, layers: int = 2, width: int = 128, heads: int = 4, vocabulary: int = 500, batch: int = 4, length: int = 64
) -> tuple[torch.nn.Module, Batch]:
    config = GPT2Config(
        n_layer=layers, n_embd=width, n_head=heads, vocab_size=vocabulary, n_positions=length, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM",
    )  # fmt: skip
    torch.manual_seed(0)
    return GPT2LMHeadModel(config), ids(vocabulary, batch, length)


def llama(
    *, layers: int = 2, width: int = 128, heads: int = 4, vocabulary: int = 500, batch: int = 4, length: int = 64
) -> tuple[torch.nn.Module, Batch]:
    config = LlamaConfig(
        num_hidden_layers=layers, hidden_size=width, intermediate_size=2 * width, num_attention_heads=heads,
        num_key_value_heads=heads // 2, vocab_size=vocabulary, max_position_embeddings=length, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config), ids(vocabulary, batch, length)


def ids(vocabulary: int, batch: int, length: int) -> Batch:
    torch.manual_seed(1)
    tokens = torch.randint(vocabulary, (batch, length))
    return {"input_ids": tokens, "labels": tokens.clone()}


MODELS = {"gpt2": gpt2, "llama": llama}


def one_op(
    target: str, shapes: list[tuple[int, ...]], out: tuple[int, ...], *rest: Any, grad: str = "", **kw: Any
) -> OpGraph:
    """A graph of one op over float32 inputs a, b, c; those named in `grad` need a gradient."""
    names = "abcd"[: len(shapes)]
    values = {n: TensorSpec(s, "float32", n in grad) for n, s in zip(names, shapes, strict=True)}
    values["y"] = TensorSpec(out, "float32", bool(grad))
    inputs = tuple(GraphInput(n, "input", n) for n in names)
    op = Op(f":{target}#0", target, (*map(Ref, names), *rest), kw, ("y",))
    return OpGraph(inputs, (op,), values, ("y",)).verify()
