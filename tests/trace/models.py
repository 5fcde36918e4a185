"""Tiny models of several families, unmodified."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

from autoplan.trace import TracedModel

transformers.logging.set_verbosity_error()
VOCABULARY = 61


def gpt2(**changes: Any) -> nn.Module:
    config = transformers.GPT2Config(
        n_layer=2, n_embd=32, n_head=4, vocab_size=VOCABULARY, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=1, eos_token_id=1, **changes,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).train()


def llama(**changes: Any) -> nn.Module:
    sizes = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 64,
    }  # fmt: skip
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**sizes, **changes})).train()


def mistral() -> nn.Module:
    config = transformers.MistralConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=VOCABULARY, max_position_embeddings=64, sliding_window=4,
    )  # fmt: skip
    return transformers.MistralForCausalLM(config).train()


def qwen2() -> nn.Module:
    config = transformers.Qwen2Config(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=VOCABULARY, max_position_embeddings=64, tie_word_embeddings=True,
    )  # fmt: skip
    return transformers.Qwen2ForCausalLM(config).train()


def neox() -> nn.Module:
    config = transformers.GPTNeoXConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=VOCABULARY,
        max_position_embeddings=64,
    )  # fmt: skip
    return transformers.GPTNeoXForCausalLM(config).train()


def opt() -> nn.Module:
    config = transformers.OPTConfig(
        hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=VOCABULARY, dropout=0.0,
        max_position_embeddings=64, word_embed_proj_dim=32,
    )  # fmt: skip
    return transformers.OPTForCausalLM(config).train()


def bert() -> nn.Module:
    config = transformers.BertConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=VOCABULARY,
        max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config).train()


def t5() -> nn.Module:
    config = transformers.T5Config(
        d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=VOCABULARY, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config).train()


LANGUAGE_MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": gpt2, "llama": llama, "mistral": mistral, "qwen2": qwen2, "neox": neox, "opt": opt, "bert": bert,
    "t5": t5,
}  # fmt: skip


def batch(rows: int = 2, columns: int = 8) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, VOCABULARY, (rows, columns), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :3] = -100
    return {"input_ids": ids, "labels": labels}


def tensors(traced: TracedModel) -> dict[str, torch.Tensor]:
    """What a graph is given, by path: the model's own tensors and the example batch."""
    found: dict[str, torch.Tensor] = {}
    for i in traced.graph.inputs:
        if i.kind != "input":
            found[i.path] = traced.parameter(i.path)
        elif i.path.startswith("args."):
            found[i.path] = traced.args[int(i.path[5:])]
        else:
            found[i.path] = traced.kwargs[i.path]
    return found


class Lambda(nn.Module):
    """A module with one linear layer whose forward is a given function."""

    def __init__(self, forward: Callable[..., Any], **buffers: torch.Tensor) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self._function = forward
        for name, tensor in buffers.items():
            self.register_buffer(name, tensor)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(self, *args, **kwargs)
