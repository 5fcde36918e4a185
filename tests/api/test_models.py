"""Hugging Face configurations become the model that they name, with a batch that it trains on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autoplan.api import load_model
from autoplan.errors import OptionError
from autoplan.trace import trace

_TEXT = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
_GPT = {"vocab_size": 100, "n_embd": 32, "n_layer": 1, "n_head": 2}
_PAIR = {
    "vocab_size": 100, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
_SOUND = {**_PAIR, "max_source_positions": 20}


@pytest.mark.parametrize(
    ("kind", "sizes", "architecture", "expected", "batch"),
    [
        ("gpt2", _GPT, None, "GPT2LMHeadModel", "input_ids"),
        ("gpt2", _GPT, "GPT2Model", "GPT2LMHeadModel", "input_ids"),
        ("bert", _TEXT, "BertForMaskedLM", "BertForMaskedLM", "input_ids"),
        ("bert", _TEXT, "BertForSequenceClassification", "BertForSequenceClassification", "input_ids"),
        ("bart", _PAIR, None, "BartForConditionalGeneration", "input_ids"),
        ("t5", {"vocab_size": 100, "d_model": 32, "d_ff": 32, "num_layers": 1, "num_heads": 2, "d_kv": 8}, None,
         "T5ForConditionalGeneration", "input_ids"),
        ("whisper", _SOUND, None, "WhisperForConditionalGeneration", "input_features"),
        ("vit", {**_TEXT, "image_size": 32, "patch_size": 8}, None, "ViTForImageClassification", "pixel_values"),
    ],
)  # fmt: skip
def test_a_config_gives_its_model(
    tmp_path: Path, kind: str, sizes: dict[str, Any], architecture: str | None, expected: str, batch: str
) -> None:
    data = {"model_type": kind, **sizes, **({"architectures": [architecture]} if architecture else {})}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(data))
    model, inputs = load_model(str(path), batch=2, seq=8)
    assert type(model).__name__ == expected and all(p.is_meta for p in model.parameters())
    assert set(inputs) == {batch, "labels"} and inputs[batch].shape[0] == inputs["labels"].shape[0] == 2
    assert trace(model, inputs, as_is=True).graph.loss is not None


def test_models_whose_batch_is_not_known_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "bert", **_TEXT, "architectures": ["BertForQuestionAnswering"]}))
    with pytest.raises(OptionError, match="BertForQuestionAnswering looks like is not known"):
        load_model(str(path), batch=2, seq=8)
    with pytest.raises(OptionError, match="needs --seq"):
        load_model(str(path), batch=2, seq=None)
