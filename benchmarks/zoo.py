"""Models of many families with random weights, small enough to run on a CPU: what the profiler is measured on.

`ZOO` maps a name to a function that builds a model in training mode and the inputs of one step, a dict of keyword
arguments or a tuple. Every model returns its loss: as ``.loss``, as the first of its results, or as its only one;
`loss_of` picks it. The transformers models are unmodified, built from small configs. `HELD_OUT` has more of the same,
which no rule of the profiler was looked at on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional as F

transformers.logging.set_verbosity_error()
Made = tuple[nn.Module, dict[str, Any] | tuple[Any, ...]]
VOCABULARY, BATCH, LENGTH = 2000, 4, 128


def loss_of(outputs: Any) -> torch.Tensor:
    """The loss among what a model of the zoo returns."""
    if isinstance(outputs, torch.Tensor):
        return outputs
    loss = getattr(outputs, "loss", None)
    found: torch.Tensor = outputs[0] if loss is None else loss
    return found


def run(model: nn.Module, inputs: Mapping[str, Any] | tuple[Any, ...]) -> torch.Tensor:
    """The loss of one step."""
    return loss_of(model(**inputs) if isinstance(inputs, Mapping) else model(*inputs))


def _ids(length: int = LENGTH, batch: int = BATCH) -> torch.Tensor:
    return torch.randint(2, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(1))


def _text(length: int = LENGTH) -> dict[str, torch.Tensor]:
    return {"input_ids": _ids(length), "labels": _ids(length)}


def _images(size: int = 64, batch: int = BATCH, classes: int = 10) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    return {
        "pixel_values": torch.randn(batch, 3, size, size, generator=random),
        "labels": torch.randint(classes, (batch,), generator=random),
    }


def _decoder(**changes: Any) -> dict[str, Any]:
    """Arguments that Llama-like configs share: grouped attention, four query heads to two of keys."""
    return {
        "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": LENGTH, "use_cache": False,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1, **changes,
    }  # fmt: skip


def gpt2() -> Made:
    config = transformers.GPT2Config(
        n_layer=3, n_embd=128, n_head=4, vocab_size=VOCABULARY, n_positions=LENGTH, bos_token_id=1, eos_token_id=1,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).train(), _text()


def gpt2_dropout() -> Made:
    config = transformers.GPT2Config(
        n_layer=3, n_embd=128, n_head=4, vocab_size=VOCABULARY, n_positions=LENGTH, bos_token_id=1, eos_token_id=1,
        use_cache=False,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).train(), _text()


def llama() -> Made:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_decoder())).train(), _text()


def qwen2() -> Made:
    config = transformers.Qwen2Config(**_decoder(tie_word_embeddings=True))
    return transformers.Qwen2ForCausalLM(config).train(), _text()


def mistral() -> Made:
    config = transformers.MistralConfig(**_decoder(sliding_window=64))
    return transformers.MistralForCausalLM(config).train(), _text()


def gemma() -> Made:
    config = transformers.GemmaConfig(**_decoder(head_dim=32, num_key_value_heads=1))
    return transformers.GemmaForCausalLM(config).train(), _text()


def mixtral() -> Made:
    config = transformers.MixtralConfig(**_decoder(num_local_experts=4, num_experts_per_tok=2, num_hidden_layers=2))
    return transformers.MixtralForCausalLM(config).train(), _text()


def opt() -> Made:
    config = transformers.OPTConfig(
        hidden_size=128, ffn_dim=256, num_hidden_layers=3, num_attention_heads=4, vocab_size=VOCABULARY,
        max_position_embeddings=LENGTH, word_embed_proj_dim=128, dropout=0.0, use_cache=False,
    )  # fmt: skip
    return transformers.OPTForCausalLM(config).train(), _text()


def _encoder() -> dict[str, Any]:
    return {
        "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4,
        "vocab_size": VOCABULARY, "max_position_embeddings": LENGTH + 2,
    }  # fmt: skip


def bert() -> Made:
    return transformers.BertForMaskedLM(transformers.BertConfig(**_encoder())).train(), _text()


def roberta() -> Made:
    config = transformers.RobertaConfig(
        **_encoder(), hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, pad_token_id=1
    )
    return transformers.RobertaForMaskedLM(config).train(), _text()


def t5() -> Made:
    config = transformers.T5Config(
        d_model=128, d_kv=32, d_ff=256, num_layers=2, num_heads=4, vocab_size=VOCABULARY, dropout_rate=0.0,
        use_cache=False, decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config).train(), _text()


def whisper() -> Made:
    config = transformers.WhisperConfig(
        d_model=128, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=256, decoder_ffn_dim=256, vocab_size=VOCABULARY, max_source_positions=100,
        max_target_positions=LENGTH, num_mel_bins=40, dropout=0.0, use_cache=False, decoder_start_token_id=2,
        pad_token_id=0, bos_token_id=1, eos_token_id=1, suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    features = torch.randn(BATCH, 40, 200, generator=torch.Generator().manual_seed(1))
    return transformers.WhisperForConditionalGeneration(config).train(), {
        "input_features": features,
        "labels": _ids(LENGTH // 2),
    }


def mamba() -> Made:
    config = transformers.MambaConfig(
        hidden_size=64, state_size=8, num_hidden_layers=2, vocab_size=VOCABULARY, use_cache=False
    )
    return transformers.MambaForCausalLM(config).train(), _text(32)


def vit() -> Made:
    config = transformers.ViTConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4, image_size=64,
        patch_size=8, num_labels=10,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config).train(), _images()


def resnet() -> Made:
    config = transformers.ResNetConfig(
        embedding_size=32, hidden_sizes=[64, 128, 256], depths=[2, 2, 2], num_labels=10, layer_type="bottleneck"
    )
    return transformers.ResNetForImageClassification(config).train(), _images()


def convnext() -> Made:
    config = transformers.ConvNextConfig(hidden_sizes=[32, 64, 128], depths=[2, 2, 2], num_stages=3, num_labels=10)
    return transformers.ConvNextForImageClassification(config).train(), _images()


def swin() -> Made:
    config = transformers.SwinConfig(
        embed_dim=48, depths=[2, 2], num_heads=[3, 6], window_size=4, image_size=64, patch_size=4, num_labels=10
    )
    return transformers.SwinForImageClassification(config).train(), _images()


class UNet(nn.Module):
    """Two levels down and up with skips, batch norm and in-place ReLU."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.down = nn.ModuleList([self._block(3, width), self._block(width, 2 * width)])
        self.middle = self._block(2 * width, 4 * width)
        self.rise = nn.ModuleList(
            [nn.ConvTranspose2d(4 * width, 2 * width, 2, 2), nn.ConvTranspose2d(2 * width, width, 2, 2)]
        )
        self.up = nn.ModuleList([self._block(4 * width, 2 * width), self._block(2 * width, width)])
        self.head = nn.Conv2d(width, 2, 1)

    @staticmethod
    def _block(before: int, after: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(inplace=True),
            nn.Conv2d(after, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(inplace=True),
        )  # fmt: skip

    def forward(self, image: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        skips = []
        x = image
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for rise, block in zip(self.rise, self.up, strict=True):
            x = block(torch.cat([rise(x), skips.pop()], dim=1))
        return F.cross_entropy(self.head(x), mask)


def unet() -> Made:
    random = torch.Generator().manual_seed(1)
    image = torch.randn(2, 3, 64, 64, generator=random)
    return UNet().train(), (image, torch.randint(2, (2, 64, 64), generator=random))


class Encoder(nn.Module):
    """`nn.TransformerEncoder` as it comes, dropout included, with a classifier."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.encoder(self.embed(ids)).mean(dim=1)), labels)


def transformer_encoder() -> Made:
    return Encoder().train(), (_ids(), torch.arange(BATCH) % 10)


class LSTM(nn.Module):
    """A two-layer LSTM language model."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.lstm(self.embed(ids))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


def lstm() -> Made:
    return LSTM().train(), (_ids(64), _ids(64))


class DLRM(nn.Module):
    """Embedding bags, a bottom and a top MLP and pairwise products between them (arXiv:1906.00091)."""

    def __init__(self, tables: int = 6, rows: int = 3000, width: int = 32, dense: int = 13) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables)])
        self.bottom = nn.Sequential(nn.Linear(dense, 128), nn.ReLU(), nn.Linear(128, width), nn.ReLU())
        self.register_buffer("pairs", torch.tril_indices(tables + 1, tables + 1, -1), persistent=False)
        self.top = nn.Sequential(nn.Linear(width + tables * (tables + 1) // 2, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor, clicked: torch.Tensor) -> torch.Tensor:
        x = self.bottom(dense)
        features = torch.stack([x, *(table(sparse[:, i]) for i, table in enumerate(self.tables))], dim=1)
        products = torch.bmm(features, features.transpose(1, 2))
        top = self.top(torch.cat([x, products[:, self.pairs[0], self.pairs[1]]], dim=1))
        return F.binary_cross_entropy_with_logits(top.squeeze(1), clicked)


def dlrm() -> Made:
    random = torch.Generator().manual_seed(1)
    dense = torch.randn(512, 13, generator=random)
    sparse = torch.randint(3000, (512, 6, 4), generator=random)
    return DLRM().train(), (dense, sparse, torch.randint(2, (512,), generator=random).float())


class MLP(nn.Module):
    """Three layers with GELU."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.LayerNorm(width),
            nn.Linear(width, 10),
        )  # fmt: skip

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.layers(x), labels)


def mlp() -> Made:
    random = torch.Generator().manual_seed(1)
    return MLP().train(), (torch.randn(1024, 256, generator=random), torch.randint(10, (1024,), generator=random))


ZOO: dict[str, Callable[[], Made]] = {
    "gpt2": gpt2, "gpt2-dropout": gpt2_dropout, "llama": llama, "qwen2": qwen2, "mistral": mistral, "gemma": gemma,
    "mixtral": mixtral, "opt": opt, "bert": bert, "roberta": roberta, "t5": t5, "whisper": whisper, "mamba": mamba,
    "vit": vit, "resnet": resnet, "convnext": convnext, "swin": swin, "unet": unet,
    "transformer-encoder": transformer_encoder, "lstm": lstm, "dlrm": dlrm, "mlp": mlp,
}  # fmt: skip


def distilbert() -> Made:
    config = transformers.DistilBertConfig(
        dim=128, hidden_dim=256, n_layers=3, n_heads=4, vocab_size=VOCABULARY, max_position_embeddings=LENGTH
    )
    return transformers.DistilBertForMaskedLM(config).train(), _text()


def albert() -> Made:
    """One layer's weights, used three times."""
    return transformers.AlbertForMaskedLM(transformers.AlbertConfig(**_encoder(), embedding_size=64)).train(), _text()


def mobilenet() -> Made:
    config = transformers.MobileNetV2Config(num_labels=10, image_size=64, depth_multiplier=0.35)
    return transformers.MobileNetV2ForImageClassification(config).train(), _images()


def clip() -> Made:
    text = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    vision = {**text, "image_size": 64, "patch_size": 8}
    config = transformers.CLIPConfig(
        text_config={**text, "vocab_size": VOCABULARY, "eos_token_id": 1}, vision_config=vision, projection_dim=64
    )
    inputs = {"input_ids": _ids(64), "pixel_values": _images()["pixel_values"], "return_loss": True}
    return transformers.CLIPModel(config).train(), inputs


class Recurrent(nn.Module):
    """Two bidirectional layers over embedded tokens, classified by their mean."""

    def __init__(self, kind: type[nn.GRU | nn.LSTM], width: int = 96) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = kind(width, width, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(2 * width, 10)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.layers(self.embed(ids))
        return F.cross_entropy(self.head(hidden.mean(dim=1)), labels)


def gru() -> Made:
    return Recurrent(nn.GRU).train(), (_ids(32, 16), torch.arange(16) % 10)


def lstm_both() -> Made:
    return Recurrent(nn.LSTM).train(), (_ids(32, 16), torch.arange(16) % 10)


class Mixer(nn.Module):
    """MLP over patches, then over channels (arXiv:2105.01601)."""

    def __init__(self, patches: int = 64, width: int = 128, blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, width, 8, stride=8)
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(2 * blocks)])
        sizes = [patches, width] * blocks
        self.mlps = nn.ModuleList(
            [nn.Sequential(nn.Linear(n, 2 * n), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * n, n)) for n in sizes]
        )
        self.head = nn.Linear(width, 10)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(pixel_values).flatten(2).transpose(1, 2)
        for i, (norm, mlp) in enumerate(zip(self.norms, self.mlps, strict=True)):
            y = norm(x)
            x = x + (mlp(y) if i % 2 else mlp(y.transpose(1, 2)).transpose(1, 2))
        return F.cross_entropy(self.head(x.mean(dim=1)), labels)


def mixer() -> Made:
    return Mixer().train(), _images()


HELD_OUT: dict[str, Callable[[], Made]] = {
    "distilbert": distilbert, "albert": albert, "mobilenet": mobilenet, "clip": clip, "gru": gru,
    "lstm-both-ways": lstm_both, "mixer": mixer,
}  # fmt: skip
