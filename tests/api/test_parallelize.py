"""The main job on several gloo processes: losses and gradients of one process, the cap kept, errors on every rank."""

from __future__ import annotations

import copy
import math
import os
import sys
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

from autoplan.api import parallelize, plan
from autoplan.api.emitting import emit
from autoplan.codegen import liveness
from autoplan.errors import AutoplanError, InfeasibleError, OptionError, PlanMismatchError
from autoplan.ir import Plan, StagePlan
from autoplan.runtime import full_state_dict, measure_peak
from autoplan.trace import trace
from tests.api.cases import batches, make, random_plan, relative, shared_plan, whole_gradients
from tests.multiprocess import RankError, run_ranks

STEPS = 20
TOLERANCE = 1e-5


def pins(kind: str, style: str, axes: int) -> dict[str, str]:
    """Pins that force a style along the first axis; what they leave open the planner chooses."""
    rest = ",R" * (axes - 1)
    if style == "data":
        return {"input_ids": "S(0)" + rest, "labels": "S(0)" + rest, "*.weight": "R" + rest}
    if style == "sharded":
        return {"input_ids": "S(0)" + rest, "labels": "S(0)" + rest, "*.weight": "S(0)" + rest}
    if kind == "gpt2":
        return {
            "*.c_attn.weight": "S(1:3)" + rest,
            "*.c_attn.bias": "S(0:3)" + rest,
            "*.c_fc.weight": "S(1)" + rest,
            "*.c_proj.weight": "S(0)" + rest,
        }
    columns = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    return {**{f"*.{n}.weight": "S(0)" + rest for n in columns}, "*.o_proj.weight": "S(1)" + rest}


def trained(
    model: torch.nn.Module, steps: int = STEPS, same: dict[str, torch.Tensor] | None = None
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of some AdamW steps, and all gradients of the first."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, first = [], {}
    for i, batch in enumerate(batches(steps) if same is None else [same] * steps):
        loss = model(**batch)["loss"]
        loss.backward()
        if i == 0:
            first = whole_gradients(model)
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, first


def compare(rank: int, kind: str, cases: list[tuple[tuple[int, ...], str]]) -> list[str]:
    """Trains the model under each case; returns what differs from one process."""
    losses, gradients = trained(make(kind))
    wrong = []
    for mesh, style in cases:
        forced = pins(kind, style, len(mesh)) if style != "free" else None
        module = parallelize(make(kind), batches()[0], mesh=mesh, pins=forced)
        got, first = trained(module)
        worst_loss = max(abs(a - b) / abs(b) for a, b in zip(got, losses, strict=True))
        worst, name = max((relative(first[n], g), n) for n, g in gradients.items())
        assert set(first) == set(gradients)
        if not (worst_loss <= TOLERANCE and worst <= TOLERANCE):
            wrong.append(f"{kind} {mesh} {style}: loss {worst_loss:.1e}, gradient of {name} {worst:.1e}")
        state = full_state_dict(module)
        assert list(state) == list(make(kind).state_dict())
    return wrong


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_losses_and_gradients_on_four_ranks(kind: str) -> None:
    cases = [((2, 2), "data"), ((4,), "tensor"), ((4,), "sharded"), ((2, 2), "tensor"), ((2, 2), "free")]
    assert run_ranks(4, compare, kind, cases, timeout_s=300) == [[]] * 4


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_losses_and_gradients_on_two_ranks(kind: str) -> None:
    assert run_ranks(2, compare, kind, [((2,), "tensor"), ((2,), "sharded")], timeout_s=200) == [[]] * 2


def random_plans(rank: int, kind: str, mesh: tuple[int, ...], seeds: list[int]) -> list[str]:
    """First-step gradients under plans drawn at random from all that the planner may choose."""
    model, batch = make(kind), batches()[0]
    model(**batch).loss.backward()
    gradients = whole_gradients(model)
    graph = trace(make(kind), batch).graph
    wrong = []
    for seed in seeds:
        chosen = shared_plan(lambda seed=seed: random_plan(graph, mesh, seed))
        module = parallelize(make(kind), batch, plan=chosen)
        module(**batch).loss.backward()
        got = whole_gradients(module)
        worst, name = max((relative(got[n], g), n) for n, g in gradients.items())
        if not worst <= TOLERANCE:
            wrong.append(f"{kind} {mesh} seed {seed}: {name} {worst:.1e}")
    return wrong


@pytest.mark.parametrize(("kind", "mesh"), [("gpt2", (2, 2)), ("llama", (4,))])
def test_every_plan_computes_the_same(kind: str, mesh: tuple[int, ...]) -> None:
    assert run_ranks(4, random_plans, kind, mesh, [0, 1, 2], timeout_s=300) == [[]] * 4


def dropout_bitwise(rank: int) -> bool:
    """A plan that recomputes, and the same plan keeping everything, draw and compute the same bits."""
    batch = batches()[0]
    graph = trace(make("gpt2", 0.1), batch).graph
    chosen = shared_plan(lambda: random_plan(graph, (2,), 5))
    assert any(o.remat == "recompute" for o in chosen.ops.values())
    kept = {k: type(o)(o.operands, o.results, "keep", (True,) * len(o.operands)) for k, o in chosen.ops.items()}
    results = []
    for p in (chosen, chosen.replace(stages=(StagePlan(kept),))):
        module = parallelize(make("gpt2", 0.1), batch, plan=p)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
        torch.manual_seed(7)
        values: list[Any] = []
        for _ in range(3):
            loss = module(**batch).loss
            loss.backward()
            values += [loss.detach(), *whole_gradients(module).values()]
            optimizer.step()
            optimizer.zero_grad()
        results.append(values)
    return all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_dropout_is_replayed_bit_for_bit() -> None:
    assert run_ranks(2, dropout_bitwise, timeout_s=200) == [True, True]


def capped(rank: int, kind: str, mesh: tuple[int, ...], cap: int) -> tuple[int, int, int, int]:
    """(measured, predicted, predicted without what kernels hide, recomputed ops) of the plan under a cap."""
    batch = batches()[0]
    module = parallelize(make(kind), batch, mesh=mesh, memory=cap)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)

    def step() -> None:
        module(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    measured = min(measure_peak(step) for _ in range(3))  # gloo's threads free late at times
    recomputed = sum(o.remat == "recompute" for o in module.plan.ops.values())
    with pytest.MonkeyPatch.context() as patch:  # memory inside of kernels does not pass the dispatch mode
        patch.setattr(liveness, "workspace_bytes", lambda node: 0)
        traced = trace(make(kind), batch)
        idle = sum(n for sizes in traced.idle_bytes.values() for n in sizes)
        visible = emit(traced.graph, module.plan).memory("adamw", idle).peak_bytes
    return measured, module.plan.peak_bytes[0], visible, recomputed


@pytest.mark.parametrize(
    ("kind", "mesh", "fraction"), [("gpt2", (2, 2), 1.0), ("gpt2", (2, 2), 0.7), ("llama", (4,), 0.7)]
)
def test_peak_is_predicted_and_below_the_cap(kind: str, mesh: tuple[int, ...], fraction: float) -> None:
    cap = int(fraction * plan(make(kind), batches()[0], mesh=mesh).peak_bytes[0])
    for measured, predicted, visible, recomputed in run_ranks(math.prod(mesh), capped, kind, mesh, cap, timeout_s=200):
        assert 0.99 * visible <= measured <= visible <= predicted <= cap
        assert recomputed > 0 or fraction == 1.0


def test_one_process_without_torch_distributed() -> None:
    assert not dist.is_initialized()
    losses, gradients = trained(make("gpt2"), 3)
    module = parallelize(make("gpt2"), batches()[0])
    got, first = trained(module, 3)
    assert got == pytest.approx(losses, rel=1e-6)
    assert max(relative(first[n], g) for n, g in gradients.items()) <= 1e-6
    assert module.plan.mesh.size == 1
    assert module.config.n_layer == 2


def test_dropout_in_one_process_draws_what_eager_draws() -> None:
    model, batch = make("gpt2", 0.1), batches()[0]
    module = parallelize(make("gpt2", 0.1), batch)
    torch.manual_seed(3)
    expected = model(**batch).loss.item()
    torch.manual_seed(3)
    assert module(**batch).loss.item() == pytest.approx(expected, rel=1e-6)


def test_evaluation_mode_drops_nothing() -> None:
    model, batch = make("gpt2", 0.1), batches()[0]
    module = parallelize(make("gpt2", 0.1), batch)
    model.eval()
    module.eval()
    with torch.no_grad():
        expected, got = model(**batch), module(**batch)
    assert float(got.loss) == pytest.approx(float(expected.loss), rel=1e-6)
    torch.testing.assert_close(got.logits, expected.logits, rtol=1e-5, atol=1e-6)
    module.train()
    assert module(**batch).loss.requires_grad


def test_loss_fn_and_tuple_inputs() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    x, y = torch.randn(6, 8), torch.randn(6, 4)
    expected = torch.nn.functional.mse_loss(model(x), y)
    module = parallelize(model, (x,), loss_fn=lambda out, inputs: (out**2).mean())
    loss, out = module(x)
    assert loss.item() == pytest.approx(float((model_out(module, x) ** 2).mean()), rel=1e-6)
    assert out.shape == (6, 4) and expected.item() > 0


def model_out(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    state = full_state_dict(module)
    hidden = torch.relu(x @ state["0.weight"].T + state["0.bias"])
    return hidden @ state["2.weight"].T + state["2.bias"]


def failing(rank: int) -> list[str]:
    """Every error arrives on every rank."""
    seen = []
    batch = batches()[0]

    def expect(kind: type[AutoplanError], call: Any) -> None:
        try:
            call()
        except kind as e:
            seen.append(f"{kind.__name__}: {e}")

    expect(InfeasibleError, lambda: parallelize(make("gpt2"), batch, memory=10_000))
    expect(OptionError, lambda: parallelize(make("gpt2"), batch, mesh=(4,)))
    expect(OptionError, lambda: parallelize(make("gpt2"), batch, pins={"nothing": "R"}))
    other = plan(make("llama"), batch, mesh=(2,))
    expect(PlanMismatchError, lambda: parallelize(make("gpt2"), batch, plan=other))
    module = parallelize(make("gpt2"), batch, mesh=(2,), pins={"input_ids": "S(0)"})
    mine = {k: v + (rank if k == "input_ids" else 0) for k, v in batch.items()}
    expect(OptionError, lambda: module(**mine))
    expect(OptionError, lambda: module(input_ids=batch["input_ids"][:4], labels=batch["labels"][:4]))
    return seen


def test_errors_reach_every_rank() -> None:
    for seen in run_ranks(2, failing, timeout_s=200):
        assert [s.split(":")[0] for s in seen] == [
            "InfeasibleError", "OptionError", "OptionError", "PlanMismatchError", "OptionError", "OptionError",
        ], seen  # fmt: skip
        assert "works" in seen[0] and "torchrun" in seen[1] and "nothing" in seen[2] and "sharded" in seen[4]


def idle(rank: int) -> bool:
    """Three ranks run a plan for two: the third has nothing to do."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module = parallelize(make("gpt2"), batches()[0], mesh=(2,), pins={"input_ids": "S(0)"})
        loss = module(**batches()[0]).loss
        loss.backward()
    said = any("idle" in str(w.message) for w in caught)
    return (said or rank > 0) and (rank == 2 or bool(torch.isfinite(loss)))


def test_more_ranks_than_the_plan_needs() -> None:
    assert run_ranks(3, idle, timeout_s=120) == [True] * 3


def test_plan_of_another_batch_is_refused() -> None:
    made = plan(make("gpt2"), batches()[0], mesh=(1,))
    smaller = {k: v[:4] for k, v in batches()[0].items()}
    with pytest.raises(PlanMismatchError, match=made.graph_fingerprint):
        parallelize(make("gpt2"), smaller, plan=made)


def test_plan_for_more_processes_is_refused() -> None:
    made = plan(make("gpt2"), batches()[0], mesh=(2,))
    with pytest.raises(PlanMismatchError, match="needs 2 processes"):
        parallelize(make("gpt2"), batches()[0], plan=made)


def test_plan_for_another_cluster_is_refused(tmp_path: Any) -> None:
    made = plan(make("gpt2"), batches()[0], mesh=(1,))
    made.save(tmp_path / "plan.json")
    with pytest.raises(PlanMismatchError, match="cluster"):
        parallelize(make("gpt2"), batches()[0], plan=tmp_path / "plan.json", cluster="a100-8x")
    assert Plan.load(tmp_path / "plan.json").hash == made.hash


def unlike_weights(rank: int) -> None:
    """A model built without a seed trains rank 0's weights, and says so."""
    expected = trained(make("gpt2"), 2)[0]
    model = make("gpt2")
    if rank:
        with torch.no_grad():
            for x in [*model.parameters(), *model.buffers()]:
                if x.is_floating_point():
                    x.add_(0.1)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        module = parallelize(model, batches()[0])
    assert any("weights differed between ranks" in str(w.message) for w in seen), seen
    assert trained(module, 2)[0] == pytest.approx(expected, rel=TOLERANCE)


def test_unlike_weights() -> None:
    run_ranks(2, unlike_weights)


def another_plan_on_one_rank(rank: int) -> str:
    read = Plan.from_json
    if rank == 1:
        Plan.from_json = classmethod(lambda cls, data: read(data).replace(model="another"))  # type: ignore[assignment]
    try:
        parallelize(make("gpt2"), batches()[0], mesh=(2,))
    except PlanMismatchError as e:
        return str(e)
    return ""


def test_ranks_with_another_plan_are_found_out_on_every_rank() -> None:
    assert all("ranks [1] hold another plan" in said for said in run_ranks(2, another_plan_on_one_rank, timeout_s=120))


def options_on_one_rank(rank: int) -> str:
    try:
        parallelize(make("gpt2"), batches()[0], memory="1GB" if rank else None)
    except OptionError as e:
        return str(e)
    return ""


def test_options_that_differ_between_ranks_are_refused_on_every_rank() -> None:
    assert all("ranks [1] call" in said for said in run_ranks(2, options_on_one_rank, timeout_s=120))


def fails_in_training(rank: int) -> None:
    """Rank 1 breaks in its own code between two steps; the other waits for it in communication."""
    module = parallelize(make("gpt2"), batches()[0], mesh=(2,), pins={"input_ids": "S(0)"})
    module(**batches()[0]).loss.backward()
    if rank == 1:
        try:
            raise KeyError("no such sample")
        except KeyError as e:
            sys.excepthook(KeyError, e, e.__traceback__)  # as the interpreter does when nothing catches it
            raise
    module(**batches()[0]).loss.backward()


def test_a_rank_that_breaks_in_training_is_named() -> None:
    with pytest.raises(RankError, match="rank 1 failed in its script: KeyError: 'no such sample'"):
        run_ranks(2, fails_in_training, timeout_s=120)


def refused_in_training(rank: int) -> None:
    """An error of autoplan's own outside of forward and backward of the plan is passed on as well."""
    module = parallelize(make("gpt2"), batches()[0], mesh=(2,), pins={"input_ids": "S(0)"})
    if rank == 1:
        try:
            module.half()
        except OptionError as e:
            sys.excepthook(OptionError, e, e.__traceback__)
            raise
    module(**batches()[0]).loss.backward()


def test_an_error_of_ours_in_training_is_named() -> None:
    with pytest.raises(RankError, match="rank 1 failed in its script: OptionError: the type and the device"):
        run_ranks(2, refused_in_training, timeout_s=120)


def leaves_early(rank: int) -> None:
    module = parallelize(make("gpt2"), batches()[0], mesh=(2,), pins={"input_ids": "S(0)"})
    if rank == 1:
        os._exit(1)
    module(**batches()[0]).loss.backward()


def test_a_rank_that_dies_is_noticed() -> None:
    with pytest.raises(RankError, match="WorkerError: communication between ranks broke in"):
        run_ranks(2, leaves_early, timeout_s=120)


def whole_states(rank: int) -> bool:
    """Whole tensors load into pieces, and give the losses they came with."""
    model, other = make("gpt2"), make("gpt2")
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.1)
    batch = batches()[0]
    module = parallelize(model, batch, mesh=(2,), pins={"*.c_fc.weight": "S(1)", "input_ids": "S(0)"})
    answer = module.load_state_dict(other.state_dict())
    assert not answer.missing_keys and not answer.unexpected_keys
    assert module(**batch).loss.item() == pytest.approx(other(**batch).loss.item(), rel=TOLERANCE)
    with pytest.raises(RuntimeError, match="size mismatch"):
        module.load_state_dict({**other.state_dict(), "transformer.wpe.weight": torch.zeros(3, 3)})
    for call, said in (
        (lambda: copy.deepcopy(module), "copied"),
        (lambda: module.half(), "precision"),
        (lambda: module.to("meta"), "device"),
        (lambda: parallelize(module, batch), "parallel already"),
    ):
        with pytest.raises(OptionError, match=said):
            call()
    return module.to("cpu") is module and module.float() is module


def test_whole_state_dicts_copies_and_casts() -> None:
    assert run_ranks(2, whole_states, timeout_s=120) == [True, True]


class Rooted(torch.nn.Module):
    """Parameter and buffer on the model itself, an LSTM, and a result beside the loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.position = torch.nn.Parameter(torch.randn(6, 8))
        self.register_buffer("scale", torch.full((8,), 2.0))
        self.lstm = torch.nn.LSTM(8, 8, batch_first=True)
        self.drop = torch.nn.Dropout(0.0)
        self.head = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.head(self.drop(self.lstm((x + self.position) * self.scale)[0]))
        return {"loss": y.square().mean(), "y": y}


def rooted(rank: int) -> None:
    x = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(2))
    expected, first = trained(Rooted(), 3, {"x": x})
    module = parallelize(Rooted(), {"x": x}, pins={"x": "S(0)"})
    got, mine = trained(module, 3, {"x": x})
    assert got == pytest.approx(expected, rel=TOLERANCE)
    assert max(relative(mine[n], g) for n, g in first.items()) <= TOLERANCE
    out = module(x=x)
    with pytest.raises(OptionError, match="through the loss only"):
        (out["loss"] + out["y"].to_local().mean()).backward()
    with torch.no_grad():
        assert not module(x=x)["y"].requires_grad
    for call, said in (
        (lambda: module.drop.eval(), "mode of a submodule"),
        (lambda: module.head(x), "by itself"),
        (lambda: module.head.register_forward_hook(print), "hooks of submodules"),
    ):
        with pytest.raises(OptionError, match=said):
            call()
    assert not module.eval().drop.training and module.train().drop.training


def test_parameters_of_the_model_itself_and_what_is_refused() -> None:
    run_ranks(2, rooted, timeout_s=120)
