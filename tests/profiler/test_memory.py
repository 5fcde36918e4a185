"""Memory of eager steps: the estimate against the allocator and against what autograd really saves."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from autoplan.hardware import load_cluster
from autoplan.profiler import cost_table, memory
from autoplan.trace import trace
from tests.profiler.models import MODELS, Batch, gpt2

Model = torch.nn.Module


def storages(tensors: Any) -> dict[int, int]:
    found = [t.untyped_storage() for t in tensors if isinstance(t, torch.Tensor)]
    return {s._cdata: s.nbytes() for s in found}


def saved_bytes(model: Model, batch: Batch) -> int:
    """Unique storages that autograd saves; parameters, buffers and the batch left out."""
    own = storages([*model.parameters(), *model.buffers(), *batch.values()])
    held = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        held.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = model(**batch).loss
    found = storages(held)
    del loss
    return sum(n for s, n in found.items() if s not in own)


def traced_peak(run: Callable[[], Any]) -> tuple[int, int, Any]:
    """Peak and final bytes above the start, from the allocator's own events, and what `run` returned."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as p:
        result = run()
    events = [(e.start_ns(), e.nbytes()) for e in p.profiler.kineto_results.events() if e.name() == "[memory]"]
    total = peak = 0
    for _, n in sorted(events):
        total += n
        peak = max(peak, total)
    return peak, total, result


def measured(model: Model, batch: Batch) -> dict[str, int]:
    """Peaks of one warm AdamW step."""
    optimizer = torch.optim.AdamW(model.parameters())
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    state = [t for s in optimizer.state.values() for t in s.values()]
    base = sum(storages([*model.parameters(), *model.buffers(), *batch.values(), *state]).values())
    peak, left, loss = traced_peak(lambda: model(**batch).loss)
    out = {"static": base, "forward": base + peak}
    base += left
    peak, left, _ = traced_peak(loss.backward)
    out["backward"] = base + peak
    del loss
    base += left
    out["update"] = base + traced_peak(optimizer.step)[0]
    return out


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("vocabulary", [500, 4000])
def test_saved_activations_are_what_autograd_saves(name: str, vocabulary: int) -> None:
    """To 0.1 %: what is missing is the scalar that the loss keeps."""
    model, batch = MODELS[name](vocabulary=vocabulary)
    graph = trace(model, batch).graph
    assert cost_table(graph, load_cluster("cpu-gloo")).saved_bytes == pytest.approx(saved_bytes(model, batch), rel=1e-3)
    assert memory(graph).saved_bytes == pytest.approx(saved_bytes(model, batch), rel=1e-3)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("vocabulary", [500, 4000])
def test_peaks_are_those_of_the_allocator(name: str, vocabulary: int) -> None:
    """To 1 % on models whose ops are all in the tables."""
    model, batch = MODELS[name](vocabulary=vocabulary)
    use = memory(trace(model, batch).graph)
    real = measured(model, batch)
    static = use.parameter_bytes + use.optimizer_bytes + use.input_bytes
    assert static == pytest.approx(real["static"], rel=1e-3)
    assert use.forward_peak_bytes == pytest.approx(real["forward"], rel=0.01)
    assert use.backward_peak_bytes == pytest.approx(real["backward"], rel=0.01)
    assert use.update_peak_bytes == pytest.approx(real["update"], rel=0.01)


def test_optimizer_state_and_ties_count_once() -> None:
    model, batch = gpt2()
    graph = trace(model, batch).graph
    parameters = 4 * sum(p.numel() for p in model.parameters())
    adamw, sgd = memory(graph), memory(graph, optimizer="sgd")
    assert adamw.parameter_bytes == adamw.gradient_bytes == parameters
    assert (adamw.optimizer_bytes, sgd.optimizer_bytes) == (2 * parameters, 0)
    assert adamw.backward_peak_bytes - sgd.backward_peak_bytes == 2 * parameters


def test_a_model_without_gradients_saves_nothing() -> None:
    model, batch = gpt2()
    graph = trace(model.requires_grad_(False), batch).graph
    use = memory(graph)
    assert use.saved_bytes == use.gradient_bytes == 0
    assert use.backward_peak_bytes <= use.forward_peak_bytes
