"""Errors that concern all ranks: none may wait for another that has failed.

A rank that fails leaves a note in the store of the process group and raises. The others notice when its connections
close, find the note, and say who failed and why instead of reporting a broken connection. A rank that ends by an error
of the script itself, outside of the model, leaves one too (`note_uncaught`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autoplan import errors
from autoplan.codegen import rng
from autoplan.errors import AutoplanError, OptionError, WorkerError
from autoplan.runtime import compat
from autoplan.runtime.mesh import RuntimeMesh
from autoplan.runtime.signature import batch_hash

_NOTE = "autoplan/failed"
_noted: weakref.WeakSet[BaseException] = weakref.WeakSet()
"""Exceptions that the other ranks know of."""


@contextlib.contextmanager
def abort_on_error(what: str) -> Iterator[None]:
    """Leaves a note for the other ranks when the body fails; reads theirs when its communication breaks.

    Args:
        what: What was being done, for messages.

    Raises:
        WorkerError: Another rank failed first.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        yield
        return
    try:
        yield
    except Exception as e:
        broken = compat.is_communication_error(e)
        other = _read_note() if broken else None
        if other is not None:
            raise WorkerError(f"rank {other[0]} failed in {other[1]}") from e
        if broken:
            raise WorkerError(
                f"communication between ranks broke in {what}: another rank ended, was killed, or did not come within "
                f"the time-out of the process group; its own output tells more. torch says: {_first_line(e)}"
            ) from e
        _leave_note(f"{what}: {type(e).__name__}: {e}")
        _noted.add(e)
        raise


def note_uncaught() -> None:
    """Makes an exception that ends this process leave a note for the other ranks first."""
    if dist.is_initialized() and dist.get_world_size() > 1 and not isinstance(sys.excepthook, _NotingHook):
        sys.excepthook = _NotingHook(sys.excepthook)


class _NotingHook:
    """An exception hook that leaves a note and passes on to the one before."""

    def __init__(self, before: Callable[..., Any]) -> None:
        self.before = before

    def __call__(self, kind: type[BaseException], e: BaseException, trace: Any) -> None:
        known = e in _noted or isinstance(e, WorkerError) or compat.is_communication_error(e)  # or not the cause
        if dist.is_initialized() and not known:
            line = traceback.extract_tb(trace)[-1] if trace is not None else None
            where = "" if line is None else f" ({line.filename}:{line.lineno})"
            _leave_note(f"its script: {kind.__name__}: {e}{where}")
        self.before(kind, e, trace)


def _first_line(e: BaseException) -> str:
    return next(iter(str(e).splitlines()), type(e).__name__)


def _leave_note(message: str) -> None:
    with contextlib.suppress(RuntimeError):  # the store may be gone with the rank that hosted it
        compat.default_store().set(_NOTE, json.dumps([dist.get_rank(), message[:2000]]))


def _read_note() -> tuple[int, str] | None:
    with contextlib.suppress(RuntimeError):
        store = compat.default_store()
        timeout = store.timeout
        store.set_timeout(timedelta(seconds=2))
        try:
            if store.check([_NOTE]):
                rank, message = json.loads(store.get(_NOTE))
                return None if rank == dist.get_rank() else (rank, message)
        finally:
            store.set_timeout(timeout)
    return None


def broadcast_or_raise(fn: Callable[[], str], src: int = 0) -> str:
    """Runs `fn` on one rank and gives its result, or its error, to all.

    Args:
        fn: Returns text, such as JSON.
        src: The rank that runs it.

    Raises:
        AutoplanError: Of the class and with the message that `fn` raised on `src`; there the original is raised. Any
            other exception becomes a `WorkerError` elsewhere.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return fn()
    failure: Exception | None = None
    message: list[str] = []
    if dist.get_rank() == src:
        try:
            message = ["ok", fn()]
        except Exception as e:  # whatever it is, the others wait for it
            failure = e
            message = [type(e).__name__ if isinstance(e, AutoplanError) else "", str(e) or type(e).__name__]
    kind, text = json.loads(_broadcast_text(json.dumps(message), src))
    if failure is not None:
        raise failure
    if kind == "ok":
        return str(text)
    raise _rebuild(kind, text, src)


def _rebuild(kind: str, text: str, src: int) -> AutoplanError:
    cls = getattr(errors, kind, None) if kind else None
    if isinstance(cls, type) and issubclass(cls, AutoplanError):
        return cls(text)
    return WorkerError(f"rank {src} failed: {text}")


def _broadcast_text(text: str, src: int) -> str:
    device = torch.device(compat.device_type())
    data = torch.tensor(list(text.encode()), dtype=torch.uint8, device=device)
    size = torch.tensor([data.numel()], device=device)
    dist.broadcast(size, src)
    if dist.get_rank() != src:
        data = torch.empty(int(size), dtype=torch.uint8, device=device)
    dist.broadcast(data, src)
    return bytes(data.tolist()).decode()


def unlike_ranks(text: str) -> list[int]:
    """Ranks whose text is not rank 0's; empty without other ranks. Collective over all ranks."""
    if not dist.is_initialized() or dist.group.WORLD is None:
        return []
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    seen = gather_words(int.from_bytes(digest, "little") >> 1, dist.group.WORLD)
    return [r for r, word in enumerate(seen) if word != seen[0]]


def gather_words(word: int, group: dist.ProcessGroup) -> list[int]:
    """One 63-bit number of every rank of a group."""
    device = torch.device(compat.device_type())
    mine = torch.tensor([word], device=device)
    words = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(words, mine, group=group)
    return [int(w) for w in words]


def synchronise_generators(at: RuntimeMesh) -> bool:
    """Gives every rank of a mesh rank 0's default generators; says whether they differed. Collective.

    torch seeds the default CPU generator of an unseeded process at random, so that ranks would drop different units.
    """
    assert at.group is not None
    on_wire = torch.device(compat.device_type())
    differed = False
    for generator in {id(g): g for g in (rng.generator_of(torch.device("cpu")), rng.generator_of(at.device))}.values():
        state = generator.get_state()
        digest = hashlib.blake2b(state.numpy().tobytes(), digest_size=8).digest()
        if len(set(gather_words(int.from_bytes(digest, "little") >> 1, at.group))) == 1:
            continue
        differed = True
        common = state.to(on_wire)
        dist.broadcast(common, 0, group=at.group)
        generator.set_state(common.cpu())
    return differed


def synchronise_weights(model: nn.Module, at: RuntimeMesh) -> bool:
    """Gives every rank of a mesh rank 0's parameters and buffers, in place; says whether they differed. Collective.

    A script that builds its model without a seed has other weights on every rank. Where weights are on the meta device
    on any rank nothing is done.

    Raises:
        OptionError: Names, shapes or types differ between ranks.
    """
    if at.group is None or at.mesh.size == 1:
        return False
    held = dict([*model.named_parameters(), *model.named_buffers()])
    kinds = hashlib.blake2b(repr([(n, x.shape, x.dtype) for n, x in held.items()]).encode(), digest_size=8).digest()
    if len(set(gather_words(int.from_bytes(kinds, "little") >> 1, at.group))) > 1:
        raise OptionError("ranks have other parameters or buffers than rank 0: build the same model on every rank")
    words = gather_words(-1 if any(x.is_meta for x in held.values()) else batch_hash(held), at.group)
    if -1 in words or len(set(words)) == 1:
        return False
    on_wire = torch.device(compat.device_type())
    with torch.no_grad():
        for x in held.values():
            common = x.detach().to(on_wire, memory_format=torch.contiguous_format, copy=True)
            dist.broadcast(common, 0, group=at.group)
            x.copy_(common)
    return True
