"""Whole models, unmodified: what is in the graph, and that it computes what the model computes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from autoplan.ir import OpGraph
from autoplan.trace import trace
from tests.trace.interpret import run
from tests.trace.models import LANGUAGE_MODELS, VOCABULARY, batch, gpt2, llama, tensors


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def attention_ops(graph: OpGraph) -> list[Any]:
    return [op for op in graph.ops if op.name == "scaled_dot_product_attention"]


@pytest.mark.parametrize("family", LANGUAGE_MODELS)
def test_graph_computes_what_the_model_computes(family: str) -> None:
    model, inputs = LANGUAGE_MODELS[family](), batch()
    traced = trace(model, inputs)
    assert traced.graph.loss == 0
    loss, logits, *_ = run(traced.graph, tensors(traced))
    expected = model(**inputs)
    torch.testing.assert_close(loss, expected.loss)
    torch.testing.assert_close(logits, expected.logits)
    loss.backward()
    mine = {n: p.grad for n, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    expected.loss.backward()
    for name, p in model.named_parameters():
        if p.grad is None:
            assert mine[name] is None
        else:
            torch.testing.assert_close(mine[name], p.grad)


@pytest.mark.parametrize("make", [gpt2, llama])
def test_meta_and_real_weights_give_the_same_graph(make: Callable[[], nn.Module]) -> None:
    real = make()
    with torch.device("meta"):
        meta = make()
    a, b = trace(real, batch()).graph, trace(meta, batch()).graph
    assert a == b
    assert a.fingerprint == b.fingerprint
    assert {p.device.type for p in meta.parameters()} == {"meta"}


def test_nothing_is_allocated() -> None:
    with torch.device("meta"):
        model = llama(hidden_size=65536, intermediate_size=4 * 65536, num_attention_heads=512, num_key_value_heads=64)
    ids = torch.zeros(512, 4096, dtype=torch.int64, device="meta")
    traced = trace(model, {"input_ids": ids, "labels": ids})
    weights = sum(traced.graph.values[i.value].nbytes for i in traced.graph.inputs if i.kind == "parameter")
    activations = sum(spec.nbytes for spec in traced.graph.values.values())
    assert weights > 400e9
    assert activations > 10e12
    assert all(p.is_meta for p in model.parameters())


def test_ties_are_one_input() -> None:
    graph = trace(gpt2(), batch()).graph
    inputs = {i.path: i for i in graph.inputs}
    assert inputs["transformer.wte.weight"].aliases == ("lm_head.weight",)
    assert "lm_head.weight" not in inputs
    readers = [op.name for op in graph.consumers[inputs["transformer.wte.weight"].value]]
    assert readers == ["embedding", "linear"]


def test_inputs_in_order_under_the_models_names() -> None:
    model = llama()
    graph = trace(model, batch()).graph
    assert [i.path for i in graph.inputs if i.kind == "input"] == ["input_ids", "labels"]
    assert [i.path for i in graph.inputs if i.kind == "parameter"] == [n for n, _ in model.named_parameters()]
    assert [i.path for i in graph.inputs if i.kind == "buffer"] == ["model.rotary_emb.inv_freq"]
    for i in graph.inputs:
        spec = graph.values[i.value]
        assert spec.requires_grad == (i.kind == "parameter")
        if i.kind != "input":
            assert spec.shape == tuple(model.get_parameter(i.path).shape if i.kind == "parameter" else (4,))


def test_ops_are_keyed_by_module() -> None:
    keys = [op.key for op in trace(llama(), batch()).graph.ops]
    assert "model.layers.1.self_attn.q_proj:aten.linear#0" in keys
    assert "model.layers.0.input_layernorm:aten.mul#1" in keys
    assert "lm_head:aten.linear#0" in keys
    assert len(set(keys)) == len(keys)


def test_ops_quote_their_source() -> None:
    graph = trace(llama(), batch()).graph
    op = next(op for op in graph.ops if op.key == "model.layers.0.mlp:aten.mul#0")
    assert op.source.startswith("modeling_llama.py:")
    assert "in forward: " in op.source


def test_attention_stays_causal_without_a_mask() -> None:
    graph = trace(gpt2(), batch(columns=11)).graph
    for op in attention_ops(graph):
        assert op.arg(3, "attn_mask") is None
        assert op.arg(5, "is_causal") is True
    assert not [v for v, s in graph.values.items() if s.shape[-2:] == (11, 11)]


def test_grouped_attention_stays_grouped() -> None:
    graph = trace(llama(), batch(columns=11)).graph
    assert len(attention_ops(graph)) == 2
    for op in attention_ops(graph):
        q, k = (graph.values[v].shape for v in op.inputs[:2])
        assert (q[1], k[1]) == (4, 2)
        assert op.kwargs["enable_gqa"] is True
        assert op.arg(5, "is_causal") is True
    assert not [v for v, s in graph.values.items() if s.shape[-2:] == (11, 11)]


def test_sliding_window_shorter_than_the_sequence_keeps_its_mask() -> None:
    graph = trace(LANGUAGE_MODELS["mistral"](), batch(columns=11)).graph
    assert all(op.arg(3, "attn_mask") is not None for op in attention_ops(graph))
    graph = trace(LANGUAGE_MODELS["mistral"](), batch(columns=4)).graph
    assert all(op.arg(3, "attn_mask") is None for op in attention_ops(graph))


@pytest.mark.parametrize("make", [gpt2, llama])
def test_an_attention_mask_is_traced_and_noted(make: Callable[[], nn.Module]) -> None:
    model, inputs = make(), batch()
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    inputs["attention_mask"][0, -2:] = 0
    traced = trace(model, inputs)
    assert traced.notes == ("attention was traced with an explicit mask, because the batch has attention_mask",)
    assert all(op.arg(3, "attn_mask") is not None for op in attention_ops(traced.graph))
    torch.testing.assert_close(run(traced.graph, tensors(traced))[0], model(**inputs).loss)
    assert trace(model, batch()).notes == ()


def test_the_cache_is_left_out() -> None:
    model = gpt2(use_cache=True)
    graph = trace(model, batch()).graph
    assert len(graph.outputs) == 2
    assert model.config.use_cache is True


@pytest.mark.parametrize("make", [gpt2, llama])
def test_the_model_is_not_changed(make: Callable[[], nn.Module]) -> None:
    model = make()
    seen: list[str] = []
    model.register_forward_hook(lambda m, a, o: seen.append("user"))

    def state() -> Any:
        modules = list(model.modules())
        return (
            [(n, id(p), p.requires_grad, p.device, p._version) for n, p in model.named_parameters()],
            [(n, id(b)) for n, b in model.named_buffers()],
            [(id(m), m.training, sorted(m._forward_hooks), sorted(m._forward_pre_hooks)) for m in modules],
            {m.config._attn_implementation for m in modules if hasattr(m, "config")},
            model.config.to_dict(),
        )

    before = state()
    trace(model, batch())
    trace(model, batch(), precision="bf16")
    with pytest.raises(Exception, match="cannot be traced"):
        trace(model, {"no_such_argument": torch.zeros(1)})
    assert state() == before


def test_two_names_for_one_tensor_are_two_inputs() -> None:
    ids = batch()["input_ids"]
    graph = trace(gpt2(), {"input_ids": ids, "labels": ids}).graph
    assert [i.path for i in graph.inputs if i.kind == "input"] == ["input_ids", "labels"]


def test_train_and_eval_are_baked_in() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=1, n_embd=32, n_head=4, vocab_size=VOCABULARY, bos_token_id=1, eos_token_id=1)
    training = trace(GPT2LMHeadModel(config).train(), batch())
    evaluation = trace(GPT2LMHeadModel(config).eval(), batch())
    assert training.training and not evaluation.training
    assert [op.name for op in training.graph.ops].count("dropout") == 3
    assert attention_ops(training.graph)[0].arg(4, "dropout_p") == 0.1
    assert "dropout" not in [op.name for op in evaluation.graph.ops]
    assert attention_ops(evaluation.graph)[0].arg(4, "dropout_p", 0.0) == 0.0


def test_bf16_casts_parameters_where_they_are_used() -> None:
    model = llama()
    graph = trace(model, batch(), precision="bf16").graph
    for i in graph.inputs:
        if i.kind == "parameter":
            assert graph.values[i.value].dtype == "float32"
            (cast,) = graph.consumers[i.value]
            assert cast.target == "aten.to.dtype"
            assert cast.key == f"{i.path}:cast"
            assert graph.values[cast.outputs[0]].dtype == "bfloat16"
    linear = next(op for op in graph.ops if op.name == "linear")
    assert graph.values[linear.outputs[0]].dtype == "bfloat16"
    assert graph.loss is not None
    assert graph.values[graph.outputs[graph.loss]].dtype == "float32"
    assert {str(p.dtype) for p in model.parameters()} == {"torch.float32"}


_PRINT = """
import torch
from autoplan.trace import trace
from tests.trace.models import {name}, batch
print(trace({name}(), batch()).graph.fingerprint)
"""


@pytest.mark.parametrize("make", [gpt2, llama])
def test_tracing_is_deterministic(make: Callable[[], nn.Module]) -> None:
    first, second = trace(make(), batch()).graph, trace(make(), batch()).graph
    assert first == second
    paths = [p for p in sys.path if p]
    script = f"import sys; sys.path[:0] = {paths!r}\n" + _PRINT.format(name=make.__name__)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "77"}
    )
    assert done.stdout.split() == [first.fingerprint]


def test_gradient_checkpointing_is_noted() -> None:
    import transformers

    config = transformers.GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=64, use_cache=False)
    model = transformers.GPT2LMHeadModel(config).train()
    ids = torch.zeros(2, 8, dtype=torch.int64)
    batch = {"input_ids": ids, "labels": ids}
    assert not any("checkpointing" in n for n in trace(model, batch).notes)
    model.activation_checkpointing_enable()
    assert any("checkpointing is not seen" in n for n in trace(model, batch).notes)
