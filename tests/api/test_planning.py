"""`plan`, `profile`, `load_model` and `emit_code`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from autoplan.api import emit_code, load_model, parallelize, plan, profile
from autoplan.api.planning import make_options
from autoplan.errors import InfeasibleError, OptionError, ProfileError, TraceError
from autoplan.ir import Mesh, Plan
from tests.api.cases import batches, make, relative, whole_gradients

GPT2 = {
    "model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 128, "n_positions": 64,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GPT2))
    return str(path)


def test_plan_has_what_it_promises() -> None:
    made = plan(make("gpt2"), batches()[0], cluster="a100-8x", devices=4)
    assert made.mesh.size == 4 and made.cluster == "a100-8x"
    assert 0 < made.bound_s <= made.objective_s and 0 <= made.gap < 0.05
    assert made.peak_bytes[0] <= made.cap_bytes and made.step_time_s > 0 and made.solve_s > 0
    assert Plan.from_json(json.loads(json.dumps(made.to_json()))).hash == made.hash


def test_a_smaller_cap_is_kept_and_not_faster() -> None:
    model, batch = make("gpt2"), batches()[0]
    free = plan(model, batch, mesh=(2, 2))
    time, peak = free.objective_s, free.peak_bytes[0]
    for fraction in (0.8, 0.6):
        cap = int(free.peak_bytes[0] * fraction)
        made = plan(model, batch, mesh=(2, 2), memory=cap)
        assert made.peak_bytes[0] <= cap == made.cap_bytes
        assert made.objective_s >= time * (1 - 1e-9) and made.peak_bytes[0] < peak
        time, peak = made.objective_s, made.peak_bytes[0]


def test_a_cap_nothing_meets_names_one_that_works() -> None:
    model, batch = make("gpt2"), batches()[0]
    with pytest.raises(InfeasibleError, match="the smallest found peaks at") as caught:
        plan(model, batch, mesh=(2,), memory="100KB")
    least = caught.value.minimum_bytes
    assert least is not None and least > 100_000
    assert plan(model, batch, mesh=(2,), memory=least).peak_bytes[0] <= least


def test_no_remat_recomputes_nothing() -> None:
    made = plan(make("gpt2"), batches()[0], mesh=(2, 2), remat=False)
    assert all(o.remat == "keep" for o in made.ops.values())


def test_bf16_keeps_parameters_in_fp32() -> None:
    made = plan(make("gpt2"), batches()[0], mesh=(2,), precision="bf16", cluster="a100-8x")
    assert made.options.precision == "bf16" and any(k.endswith(":cast") for k in made.ops)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"cluster": "h100-9x"}, ProfileError, "h100-8x"),
        ({"mesh": (2, 2), "devices": 2}, OptionError, "needs 4 devices"),
        ({"mesh": "2y2"}, OptionError, "2x4"),
        ({"memory": "lots"}, OptionError, "lots"),
        ({"precision": "fp8"}, OptionError, "bf16"),
        ({"optimizer": "lion"}, OptionError, "adamw"),
        ({"nodes": 2, "devices": 2}, OptionError, "not both"),
        ({"pins": {"*.c_fc.weight": "S(7)"}, "mesh": (2,)}, OptionError, "c_fc"),
    ],
)
def test_bad_options(options: dict[str, object], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        plan(make("gpt2"), batches()[0], **options)  # type: ignore[arg-type]


def test_a_model_without_a_loss() -> None:
    with pytest.raises(OptionError, match="loss_fn"):
        plan(torch.nn.Linear(4, 4), (torch.randn(2, 4),))


def test_a_model_that_branches_on_values() -> None:
    class Branches(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(TraceError, match="test_planning"):
        plan(Branches(), (torch.randn(2, 4),))


def test_profile_of_a_config(config: str) -> None:
    model, inputs = load_model(config, batch=4, seq=16)
    assert next(model.parameters()).is_meta
    p = profile(model, inputs, cluster="a100-8x")
    assert p.forward_flops > 0 and p.parameter_bytes > 0 and not p.unknown_ops


def test_code_of_a_saved_plan(config: str) -> None:
    model, inputs = load_model(config, batch=4, seq=16)
    source = {"model": config, "batch": 4, "seq": 16}
    made = plan(model, inputs, mesh=(2,), pins={"input_ids": "S(0)"}, source=source)
    code = emit_code(Plan.from_json(made.to_json()))
    assert "transformer.h.0" in code and "forward" in code and "backward" in code
    compile(code, "emitted", "exec")
    with pytest.raises(OptionError, match="--model"):
        emit_code(made.replace(source={}))


def test_loading_models(tmp_path: Path, config: str) -> None:
    good = tmp_path / "good.py"
    good.write_text(
        "import torch\ndef f():\n    return torch.nn.Linear(2, 2), (torch.zeros(1, 2),)\ndef g():\n    return 3\n"
    )
    model, inputs = load_model(f"{good}:f")
    assert isinstance(model, torch.nn.Linear) and inputs[0].shape == (1, 2)
    for spec, says in {
        f"{good}:g": "must return",
        f"{good}:h": "no function",
        str(tmp_path / "no.py") + ":f": "no file",
        "nothing": "is no model",
        "no_such_package:f": "cannot import",
    }.items():
        with pytest.raises(OptionError, match=says):
            load_model(spec)
    (tmp_path / "bad.py").write_text("def f():\n    raise ValueError('oops')\n")
    with pytest.raises(OptionError, match=r"oops .*bad.py:2"):
        load_model(f"{tmp_path / 'bad.py'}:f")
    with pytest.raises(OptionError, match="--batch and --seq"):
        load_model(config)
    with pytest.raises(OptionError, match="longer than"):
        load_model(config, batch=1, seq=1000)
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(OptionError, match="model_type"):
        load_model(str(tmp_path / "other.json"), batch=1, seq=1)


def test_options_round_trip() -> None:
    options = make_options(cluster="a100-8x", nodes=2, memory="40GB", mesh="2x8", pins={"a": "R,R"})
    assert options.memory_bytes == 40_000_000_000 and options.mesh == Mesh((2, 8))
    assert type(options).from_json(options.to_json()) == options


def test_bf16_trains_every_parameter() -> None:
    model, batch = make("llama"), batches()[0]
    model(**batch).loss.backward()
    expected = whole_gradients(model)
    module = parallelize(make("llama"), batch, precision="bf16")
    module(**batch).loss.backward()
    got = whole_gradients(module)
    assert set(got) == set(expected)
    assert all(g.dtype == torch.float32 for g in got.values())
    assert max(relative(got[n], expected[n]) for n in got) < 0.03  # bf16 has 8 bits of mantissa
