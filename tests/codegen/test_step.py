"""Whole models on one device: results, gradients, recomputation, random numbers, predicted memory."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import fx, nn
from torch.profiler import ProfilerActivity, profile

from autoplan.codegen.differentiate import differentiate
from autoplan.codegen.emit import readable
from autoplan.codegen.liveness import simulate
from autoplan.codegen.partition import Partitioned, partition
from autoplan.codegen.program import LocalProgram
from autoplan.errors import OptionError
from autoplan.runtime import ParallelModule, measure_peak
from autoplan.runtime.signature import InputSignature
from tests.codegen.local import batch, gpt2, llama, unsharded

MODELS: dict[str, Callable[..., nn.Module]] = {"gpt2": gpt2, "llama": llama}


def matmuls(node: fx.Node) -> bool:
    return str(node.target).split(".")[1:2] in (["linear"], ["addmm"])


KEEP: dict[str, Callable[[fx.Node], bool]] = {"all": lambda n: True, "matmuls": matmuls, "none": lambda n: False}


def emit(model: nn.Module, inputs: dict[str, torch.Tensor], keep: str) -> tuple[Partitioned, LocalProgram]:
    program = unsharded(model, inputs, KEEP[keep])
    return partition(differentiate(program), program), program


def parallel(
    model: nn.Module, inputs: dict[str, torch.Tensor], keep: str = "all", **options: Any
) -> tuple[ParallelModule, Partitioned, LocalProgram]:
    emitted, program = emit(model, inputs, keep)
    signature = InputSignature.of((), inputs, list(inputs), model.forward)
    with torch.no_grad():
        _, spec = pytree.tree_flatten(model(**inputs))
    return ParallelModule(copy.deepcopy(model), emitted, program, signature, spec, **options), emitted, program


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    out = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    return out


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("keep", list(KEEP))
def test_equals_eager(name: str, keep: str) -> None:
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-10)):
        model, inputs = MODELS[name](dtype=dtype), batch()
        module, _, _ = parallel(model, inputs, keep)
        expected, got = model(**inputs), module(**inputs)
        assert type(got) is type(expected)
        torch.testing.assert_close(got.loss, expected.loss, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(got.logits, expected.logits.detach(), rtol=tolerance, atol=tolerance)
        assert not got.logits.requires_grad
        expected.loss.backward()
        got.loss.backward()
        theirs, ours = gradients(model), gradients(module)
        assert list(ours) == list(theirs)
        for n, g in theirs.items():
            assert (ours[n] - g).norm() <= tolerance * g.norm(), n


def test_recomputation_changes_no_bit_with_dropout() -> None:
    model, inputs = gpt2(dropout=0.1), batch()
    seen = []
    for keep in KEEP:
        module, emitted, _ = parallel(model, inputs, keep)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
        torch.manual_seed(7)
        losses = []
        for _ in range(3):
            loss = module(**inputs).loss
            loss.backward()
            losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
        seen.append([*losses, *module.state_dict().values(), torch.get_rng_state()])
        assert bool(emitted.recomputed) == (keep != "all")
    for other in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(seen[0], other, strict=True))
    torch.manual_seed(7)
    assert torch.equal(model(**inputs).loss, seen[0][0])  # and the eager model draws the same numbers


def test_a_dropout_mask_alone_is_replayed_from_its_shape() -> None:
    model, inputs = gpt2(dropout=0.1), batch()
    program = unsharded(model, inputs, lambda n: "dropout" not in str(n.target))
    emitted = partition(differentiate(program), program)
    assert emitted.backward is not None
    code = emitted.backward.code
    assert code.count("rng_replay_mask") == 4  # the fifth one's result is read by a norm, so it runs whole
    assert code.count("native_dropout.default") == 1
    assert sum(s.kind == "state" for s in emitted.saved) == 5


def allocator_peak(step: Callable[[], None]) -> int:
    """The allocator's own trace, on top of what lives before."""
    gc.collect()
    before = {
        x.untyped_storage()._cdata: x.untyped_storage().nbytes()
        for x in gc.get_objects()
        if type(x) in (torch.Tensor, nn.Parameter)
    }
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        step()
    total = peak = 0
    events = [e for e in trace.profiler.kineto_results.events() if e.name() == "[memory]"]
    for e in sorted(events, key=lambda e: e.start_ns()):
        total += e.nbytes()
        peak = max(peak, total)
    return sum(before.values()) + peak


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("keep", ["all", "matmuls"])
@pytest.mark.filterwarnings("ignore")  # the profiler warns about itself on machines without a GPU
def test_predicted_peak_is_the_measured_one(name: str, keep: str) -> None:
    gc.collect()
    inputs = batch(8, 64)
    module, emitted, program = parallel(MODELS[name](), inputs, keep)
    optimizer = torch.optim.AdamW(module.parameters())
    predicted = simulate(emitted, program, optimizer_states=2)

    def step() -> None:
        loss = module(**inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    own = sum(predicted.parts[k] for k in ("parameters", "optimizer", "inputs"))
    foreign = measure_peak(lambda: torch.empty(0)) - own  # what other tests left behind
    assert predicted.peak_bytes == pytest.approx(measure_peak(step) - foreign, rel=0.01)
    assert predicted.peak_bytes == pytest.approx(allocator_peak(step) - foreign, rel=0.01)
    assert sum(predicted.parts.values()) == predicted.peak_bytes == max(n for _, n in predicted.timeline)


def test_predicted_peak_of_accumulation() -> None:
    gc.collect()
    inputs = batch(8, 64)
    module, emitted, program = parallel(gpt2(), inputs, "matmuls")
    predicted = simulate(emitted, program, optimizer_states=0, accumulating=True)
    module(**inputs).loss.backward()
    own = sum(predicted.parts[k] for k in ("parameters", "inputs")) + module_bytes(module)
    foreign = measure_peak(lambda: torch.empty(0)) - own
    assert predicted.peak_bytes == pytest.approx(
        measure_peak(lambda: module(**inputs).loss.backward()) - foreign, rel=0.01
    )


def module_bytes(module: nn.Module) -> int:
    return sum(p.nbytes for p in module.parameters())


def test_recomputing_takes_less_memory() -> None:
    model, inputs = gpt2(), batch(8, 64)
    peaks = [simulate(*emit(model, inputs, keep)).peak_bytes for keep in ("all", "matmuls")]
    assert peaks[1] < 0.75 * peaks[0]


def test_same_program_gives_the_same_readable_code() -> None:
    model, inputs = gpt2(dropout=0.1), batch()
    texts = []
    for _ in range(2):
        emitted, _ = emit(model, inputs, "matmuls")
        assert emitted.backward is not None
        texts.append([readable(gm, "title") for gm in (emitted.forward, emitted.backward, emitted.inference)])
    assert texts[0] == texts[1]
    for text in texts[0]:
        space: dict[str, Any] = {}
        exec(compile(text, "emitted", "exec"), space)
        assert callable(space["forward"])
        assert "0x" not in text and "/" not in text.replace("//", "")
        assert text.startswith("# title\nimport torch\n") and "# transformer.h.0.mlp" in text
    assert "arguments.clear()" in texts[0][1]


def test_use_as_a_module() -> None:
    model, inputs = gpt2(), batch()
    module, _, _ = parallel(model, inputs)
    assert module.config is model.config or module.config.n_embd == 64
    assert list(module.state_dict()) == list(model.state_dict())
    assert module.get_parameter("lm_head.weight") is module.get_parameter("transformer.wte.weight")
    with pytest.raises(AttributeError):
        module.generate  # noqa: B018
    with torch.no_grad():
        assert not module(**inputs).loss.requires_grad
    loss = module(**inputs).loss
    loss.backward(retain_graph=True)
    once = gradients(module)
    with pytest.raises(OptionError, match="backward ran twice"):
        loss.backward()
    for _ in range(2):
        (module(inputs["input_ids"], labels=inputs["labels"]).loss * 0.5).backward()
    for n, g in gradients(module).items():
        torch.testing.assert_close(g, once[n])
    loss = module(**inputs).loss
    with torch.no_grad():
        module.get_parameter("transformer.wte.weight").add_(1.0)
    with pytest.raises(OptionError, match="changed in place"):
        loss.backward()


def test_calls_that_differ_from_the_example() -> None:
    inputs = batch()
    module, _, _ = parallel(gpt2(), inputs)
    short = {k: v[:2] for k, v in inputs.items()}
    for wrong, message in (
        (short, r"input_ids has shape \(2, 32\), the plan was made for \(4, 32\)"),
        ({"input_ids": inputs["input_ids"]}, "labels is missing"),
        ({**inputs, "attention_mask": inputs["labels"]}, "attention_mask was not given when the plan was made"),
        ({**inputs, "labels": inputs["labels"].int()}, "labels has dtype torch.int32, the plan"),
    ):
        with pytest.raises(OptionError, match=message):
            module(**wrong)
    assert module(**inputs, attention_mask=None).loss.requires_grad


def test_evaluation_traces_again() -> None:
    model, inputs = gpt2(dropout=0.5), batch()
    asked = []

    def retrace(training: bool) -> tuple[Partitioned, LocalProgram]:
        asked.append(training)
        return emit(model.train(training), inputs, "all")

    module, _, _ = parallel(model, inputs, retrace=retrace)
    model.eval()
    for _ in range(2):
        module.eval()
        with torch.no_grad():
            torch.testing.assert_close(module(**inputs).loss, model(**inputs).loss)
        module.train()
        module(**inputs).loss.backward()
    assert asked == [False]
    fixed, _, _ = parallel(gpt2(), inputs)
    with pytest.raises(OptionError, match="evaluation mode"):
        fixed.eval()(**inputs)


def test_frozen_parameters_have_no_gradient() -> None:
    model, inputs = gpt2(), batch()
    for p in model.transformer.wte.parameters():
        p.requires_grad_(False)
    module, emitted, _ = parallel(model, inputs)
    module(**inputs).loss.backward()
    model(**inputs).loss.backward()
    for (n, p), (_, q) in zip(module.named_parameters(), model.named_parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None) == ("wte" in n)
        assert p.grad is None or torch.allclose(p.grad, q.grad, atol=1e-6)
    for p in model.parameters():
        p.requires_grad_(False)
    module, emitted, _ = parallel(model, inputs)
    assert emitted.backward is None and not module(**inputs).loss.requires_grad


def test_changes_after_planning_are_errors() -> None:
    model, inputs = gpt2(), batch()
    model.transformer.wpe.weight.requires_grad_(False)
    module, _, _ = parallel(model, inputs)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(OptionError, match="autocast"):
        module(**inputs)
    module.get_parameter("transformer.wpe.weight").requires_grad_(True)
    with pytest.raises(OptionError, match="transformer.wpe.weight requires grad"):
        module(**inputs)
