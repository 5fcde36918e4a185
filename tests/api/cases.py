"""Tiny unmodified Hugging Face models, batches, and plans drawn at random from everything the planner may choose."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import numpy as np
import torch
from torch import nn

from autoplan.hardware import load_cluster
from autoplan.ir import Mesh, OpGraph, Plan, PlanOptions
from autoplan.planner import Candidate, Search, assemble
from autoplan.planner.formulate import MEMORY, decode, evaluate, formulate
from autoplan.runtime import ParallelModule
from autoplan.runtime.layout import gather_tensor
from autoplan_solver import LagrangianSolver

VOCABULARY = 96


def make(kind: str, dropout: float = 0.0) -> nn.Module:
    """GPT-2 (tied head, fused QKV) or Llama (grouped KV heads), two layers, weights alike in every process."""
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    if kind == "gpt2":
        model: nn.Module = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                n_layer=2, n_embd=64, n_head=4, vocab_size=VOCABULARY, n_positions=32, bos_token_id=0, eos_token_id=0,
                resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, use_cache=False,
            )
        )  # fmt: skip
    else:
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=8,
                num_key_value_heads=4, vocab_size=VOCABULARY, max_position_embeddings=32, use_cache=False,
            )
        )  # fmt: skip
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.02)  # biases and norms away from their special values
    return model.train()


def batches(n: int = 1) -> list[dict[str, torch.Tensor]]:
    """Batches with a different number of labels per sample."""
    generator = torch.Generator().manual_seed(1)
    out = []
    for _ in range(n):
        ids = torch.randint(0, VOCABULARY, (8, 16), generator=generator)
        labels = ids.clone()
        labels[0, :11] = -100
        labels[3, :5] = -100
        out.append({"input_ids": ids, "labels": labels})
    return out


def whole_gradients(module: nn.Module) -> dict[str, torch.Tensor]:
    """Gradients by name, gathered where they are cut."""
    if not isinstance(module, ParallelModule):
        return {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    placements, at = module.layout
    out = {}
    for n, p in module.named_parameters():
        assert p.grad is not None, n
        local = p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad
        out[n] = gather_tensor(local, placements[n], at)
    return out


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Norm of the difference over the norm."""
    return float((a.double() - b.double()).norm() / b.double().norm())


def random_plan(graph: OpGraph, mesh: tuple[int, ...], seed: int) -> Plan:
    """The optimum of the joint problem, unfolded, for costs drawn at random: any plan may come out."""
    spec = load_cluster("cpu-gloo", devices=math.prod(mesh))
    search = Search(graph, spec, PlanOptions(mesh=Mesh(mesh)))
    problem = search.problems[mesh]
    flat = problem.network.unfolded()
    options = {n: problem.form.options[k] for n, k in enumerate(problem.network.cls)}
    form = formulate(flat, problem.prices, options)
    draw = np.random.default_rng(seed).random(form.problem.n_variables)
    cost = np.where(form.problem.integer, 10 * draw, draw)
    point = LagrangianSolver(dataclasses.replace(form.problem, cost=cost)).solve({MEMORY: 0.0})
    assert point.x is not None
    assignment = decode(form, point.x)
    value = evaluate(flat, problem.prices, options, assignment)
    assert value is not None
    problem.network, problem.form = flat, form
    return assemble(search, Candidate(Mesh(mesh), assignment, value), cap_bytes=1 << 40)


def shared_plan(make_plan: Any) -> Plan:
    """A plan made on rank 0 and given to all ranks."""
    from autoplan.runtime import broadcast_or_raise

    return Plan.from_json(json.loads(broadcast_or_raise(lambda: json.dumps(make_plan().to_json()))))
