"""Hand-written parallel programs on gloo ranks against the single process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch.distributed.tensor import DTensor

from autoplan.errors import InfeasibleError, OptionError, WorkerError
from autoplan.ir import Mesh, Placement
from autoplan.runtime import ParallelModule, RuntimeMesh, broadcast_or_raise, full_state_dict
from autoplan.runtime.guard import abort_on_error
from autoplan.runtime.layout import gather_tensor, shard_tensor, wrap
from autoplan.runtime.signature import InputSignature
from tests.multiprocess import RankError, run_ranks
from tests.runtime.programs import Mlp, emit, fully_sharded, tensor_parallel

PROGRAMS = {"tensor parallel": tensor_parallel, "fully sharded": fully_sharded}


def reference() -> tuple[Mlp, torch.Tensor]:
    torch.manual_seed(0)
    return Mlp(), torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def parallel(kind: str, keep: bool = True, **options: Any) -> ParallelModule:
    model, x = reference()
    program = PROGRAMS[kind](dist.get_world_size() if dist.is_initialized() else 1, keep=keep)
    signature = InputSignature.of((), {"x": x}, ["x"], model.forward)
    _, spec = pytree.tree_flatten(model(x))
    return ParallelModule(model, emit(program), program, signature, spec, **options)


def whole(p: torch.Tensor, module: ParallelModule, name: str) -> torch.Tensor:
    placements, at = module.layout
    return gather_tensor(p.to_local(), placements[name], at)


def equal_to_reference(rank: int, kind: str, keep: bool) -> list[str]:
    model, x = reference()
    module = parallel(kind, keep)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, module)]
    assert list(module.state_dict()) == list(model.state_dict())
    assert module.config is not None and module.config["width"] == 8
    for step in range(3):
        expected = model(x)
        (expected["loss"] * 0.5).backward()
        expected["loss"].detach()
        got = module(x=x)
        assert not isinstance(got["loss"], DTensor) and isinstance(got["y"], DTensor)
        torch.testing.assert_close(got["loss"], expected["loss"], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(got["y"].full_tensor(), expected["y"].detach(), rtol=1e-12, atol=1e-12)
        (got["loss"] * 0.5).backward()
        if step == 1:  # accumulation
            model(x)["loss"].backward()
            module(x)["loss"].backward()
        named = dict(module.named_parameters())
        for name, p in model.named_parameters():
            torch.testing.assert_close(whole(named[name].grad, module, name), p.grad, rtol=1e-11, atol=1e-12)
        stock = copy.deepcopy([p.grad for p in named.values()])
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        ours = module.clip_grad_norm_(0.1)
        torch.testing.assert_close(ours, norm, rtol=1e-12, atol=0)
        clipped = [p.grad.to_local().clone() for p in named.values()]
        for p, g in zip(named.values(), stock, strict=True):
            p.grad = g
        theirs = torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1)
        torch.testing.assert_close(theirs.full_tensor(), norm, rtol=1e-12, atol=0)
        for p, c in zip(named.values(), clipped, strict=True):
            torch.testing.assert_close(p.grad.to_local(), c)
        for o in optimizers:
            o.step()
            o.zero_grad()
    state = full_state_dict(module)
    for name, p in model.state_dict().items():
        torch.testing.assert_close(state[name], p, rtol=1e-10, atol=1e-12)
    module.load_state_dict({k: torch.zeros_like(v) for k, v in state.items()})
    assert all(not v.any() for v in full_state_dict(module).values())
    with torch.no_grad():
        assert not module(x=x)["loss"].requires_grad
    return [type(p).__name__ for p in module.parameters()]


@pytest.mark.parametrize("kind", list(PROGRAMS))
@pytest.mark.parametrize("keep", [True, False])
def test_parallel_equals_single_process(kind: str, keep: bool) -> None:
    run_ranks(2, equal_to_reference, kind, keep)


def differing_batches(rank: int) -> str:
    module = parallel("tensor parallel")
    try:
        module(x=torch.full((4, 8), float(rank), dtype=torch.float64))
    except OptionError as e:
        return str(e)
    return "no error"


def own_pieces(rank: int) -> float:
    _, x = reference()
    module = parallel("fully sharded", inputs="sharded")
    return module(x=x[rank * 2 : rank * 2 + 2])["loss"].item()


def test_batch_on_every_rank() -> None:
    for message in run_ranks(2, differing_batches):
        assert 'inputs="sharded"' in message and "(x)" in message
    model, x = reference()
    assert run_ranks(2, own_pieces) == pytest.approx([model(x)["loss"].item()] * 2)


def layouts(rank: int) -> list[str]:
    mesh = Mesh((2, 2), ("a", "b"))
    at = RuntimeMesh.create(mesh)
    x = torch.arange(48.0).view(24, 2)
    cuts = [f"S(0:{a}),S(0:{b})" for a in (1, 2, 3, 6) for b in (1, 2, 3, 6, 12)]
    out = []
    for text in (*cuts, "S(0:3),R", "R,S(1)", "S(1),S(0:2)", "S(0),S(1)"):
        placement = Placement.parse(text, mesh)
        local = shard_tensor(x, placement, mesh, at.coordinate).contiguous()
        assert torch.equal(gather_tensor(local, placement, at), x), text
        wrapped = wrap(local, x.shape, placement, at)
        assert torch.equal(wrapped.full_tensor(), x), (text, wrapped.placements)
        out.append(local[0].tolist())
    return out


def test_layouts_agree_with_dtensor() -> None:
    run_ranks(4, layouts)


def guarded(rank: int) -> list[str]:
    out = [broadcast_or_raise(lambda: f"from {rank}")]

    def fails() -> str:
        raise InfeasibleError("does not fit: 3 GB")

    try:
        broadcast_or_raise(fails, src=1)
    except InfeasibleError as e:
        out.append(str(e))
    try:
        broadcast_or_raise(lambda: str({}["key"]))  # type: ignore[index]
    except (KeyError, WorkerError) as e:
        out.append(type(e).__name__)
    return out


def breaks(rank: int) -> None:
    with abort_on_error("forward"):
        if rank == 1:
            raise OptionError("this rank is broken")
        dist.all_reduce(torch.ones(3))


def test_errors_reach_every_rank() -> None:
    assert run_ranks(2, guarded) == [
        ["from 0", "does not fit: 3 GB", "KeyError"],
        ["from 0", "does not fit: 3 GB", "WorkerError"],
    ]
    with pytest.raises(RankError, match="WorkerError: rank 1 failed in forward: OptionError: this rank is broken"):
        run_ranks(2, breaks)


def idle(rank: int) -> bool:
    model, x = reference()
    program = tensor_parallel(2)
    signature = InputSignature.of((), {"x": x}, ["x"], model.forward)
    _, spec = pytree.tree_flatten(model(x))
    module = ParallelModule(model, emit(program), program, signature, spec)
    optimizer = torch.optim.AdamW(module.parameters())
    loss = module(x)["loss"]
    loss.backward()
    optimizer.step()
    return bool(loss.isnan())


def test_ranks_beyond_the_plan_are_idle() -> None:
    assert run_ranks(3, idle) == [False, False, True]
