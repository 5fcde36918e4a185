"""Loading models by name: ``file.py:function``, ``package.module:function``, or a Hugging Face ``config.json``."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autoplan.errors import AutoplanError, OptionError


def load_model(spec: str, *, batch: int | None = None, seq: int | None = None) -> tuple[nn.Module, Any]:
    """Loads ``(model, example inputs)``.

    Args:
        spec: ``file.py:function`` or ``package.module:function``, a callable that returns both; or the path of a
            Hugging Face ``config.json``, built without weights on the meta device.
        batch: Sequences per step, for a ``config.json``.
        seq: Tokens per sequence, for a ``config.json``.

    Raises:
        OptionError: No such file, module or function, or it returns something else.
    """
    if spec.endswith(".json") or (Path(spec).is_dir() and (Path(spec) / "config.json").exists()):
        path = Path(spec)
        return _from_config(path / "config.json" if path.is_dir() else path, batch, seq)
    where, colon, name = spec.rpartition(":")
    if not colon or not name.isidentifier():
        raise OptionError(
            f"{spec!r} is no model: give file.py:function, package.module:function or the path of a config.json"
        )
    module = _module(where)
    fn = getattr(module, name, None)
    if not callable(fn):
        raise OptionError(f"{where} has no function {name!r}")
    try:
        made = fn()
    except AutoplanError:
        raise
    except (Exception, SystemExit) as e:  # the user's own code may raise anything, or leave
        frame = traceback.extract_tb(e.__traceback__)[-1]
        place = f"{Path(frame.filename).name}:{frame.lineno}"
        raise OptionError(f"{spec} raised {type(e).__name__}: {e} ({place} `{frame.line}`)") from e
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        kinds = ", ".join(type(x).__name__ for x in made) if isinstance(made, tuple) else type(made).__name__
        got = f"({kinds})" if isinstance(made, tuple) else kinds
        raise OptionError(f"{spec} must return (model, example_inputs), a module and its batch, but returned {got}")
    return made[0], made[1]


def _module(where: str) -> Any:
    if not where.endswith(".py"):
        try:
            return importlib.import_module(where)
        except ImportError as e:
            raise OptionError(f"cannot import {where!r}: {e}") from e
    path = Path(where)
    if not path.is_file():
        raise OptionError(f"there is no file {where}")
    spec = importlib.util.spec_from_file_location(f"autoplan_user_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise OptionError(f"{where} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as e:  # the user's own code may raise anything, or leave
        raise OptionError(f"cannot load {where}: {type(e).__name__}: {e}") from e
    return module


def _from_config(path: Path, batch: int | None, seq: int | None) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    if batch is None:
        raise OptionError(f"{path}: a config.json needs --batch and --seq, the sizes of a training step")
    if batch < 1 or (seq is not None and seq < 1):
        raise OptionError(f"--batch {batch} --seq {seq}: both must be at least 1")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise OptionError(f"cannot read {path}: {e.strerror or e}") from e
    except (json.JSONDecodeError, UnicodeDecodeError) as e:
        raise OptionError(f"{path} is not JSON: {e}") from e
    if not isinstance(data, dict) or "model_type" not in data:
        raise OptionError(f"{path} is not a Hugging Face config: it has no 'model_type'")
    try:
        import transformers
    except ImportError as e:
        raise OptionError("a config.json needs the package transformers: pip install transformers") from e
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    kind = data.pop("model_type")
    try:
        config = transformers.AutoConfig.for_model(kind, **data)
        if hasattr(config, "use_cache"):
            config.use_cache = False
        if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
            config.decoder_start_token_id = 0  # which token it is changes no size
        with torch.device("meta"):
            model = _build(config, transformers)
    except (ValueError, KeyError, TypeError, AttributeError, ImportError) as e:
        raise OptionError(f"{path}: no model can be built for model type {kind!r}: {_first_line(e)}") from e
    if model is None:
        raise OptionError(
            f"{path}: transformers has no model with a loss for model type {kind!r} and architectures "
            f"{config.architectures}: give a function instead, file.py:function that returns (model, example_inputs)"
        )
    return model.train(), _batch_of(model, config, path, batch, seq)


_HEADS = (
    "CAUSAL_LM",
    "SPEECH_SEQ_2_SEQ",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "MASKED_LM",
    "IMAGE_CLASSIFICATION",
)


def _build(config: Any, transformers: Any) -> nn.Module | None:
    """The class that the config names; where it names none with a head, the first kind that fits its type."""
    for name in config.architectures or ():
        cls = getattr(transformers, name, None)
        if cls is not None and ("For" in name or name.endswith("LMHeadModel")):
            model: nn.Module = cls(config)
            return model
    for kind in _HEADS[config.is_encoder_decoder :]:  # the decoder of a pair is also known as a causal model
        classes = getattr(transformers, f"MODEL_FOR_{kind}_MAPPING")
        if type(config) in classes:
            made: nn.Module = classes[type(config)](config)
            return made
    return None


def _batch_of(model: nn.Module, config: Any, path: Path, batch: int, seq: int | None) -> dict[str, torch.Tensor]:
    """A batch of the model's main input with labels, on the meta device."""
    main = getattr(model, "main_input_name", "input_ids")
    kind = type(model).__name__

    def empty(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype, device="meta")

    if main == "pixel_values" and kind.endswith("ForImageClassification"):
        size = getattr(config, "image_size", 224)
        height, width = (size, size) if isinstance(size, int) else size
        images = empty(batch, getattr(config, "num_channels", 3), height, width, dtype=torch.float32)
        return {"pixel_values": images, "labels": empty(batch)}
    if seq is None:
        raise OptionError(f"{path}: {kind} reads tokens and needs --seq as well")
    limits = (
        getattr(config, name, None) for name in ("max_position_embeddings", "n_positions", "max_target_positions")
    )
    limit = next((n for n in limits if isinstance(n, int) and n > 0), None)
    if limit is not None and seq > limit and getattr(config, "relative_attention_num_buckets", None) is None:
        raise OptionError(f"--seq {seq} is longer than the {limit} positions of {path}")
    if main == "input_features" and hasattr(config, "num_mel_bins"):
        frames = 2 * config.max_source_positions
        sound = empty(batch, config.num_mel_bins, frames, dtype=torch.float32)
        return {"input_features": sound, "labels": empty(batch, seq)}
    if main == "input_ids" and (kind.endswith(("LM", "LMHeadModel", "Generation")) or "LM" in kind):
        ids = empty(batch, seq)
        return {"input_ids": ids, "labels": ids}
    if main == "input_ids" and kind.endswith("ForSequenceClassification"):
        return {"input_ids": empty(batch, seq), "labels": empty(batch)}
    raise OptionError(
        f"{path}: what a training batch of {kind} looks like is not known: give a function instead, file.py:function "
        "that returns (model, example_inputs)"
    )


def _first_line(e: Exception) -> str:
    line = (str(e).splitlines() or [type(e).__name__])[0]
    return line if len(line) <= 200 else line[:200] + " ..."
