"""Random ops of emitted code: drawn once in forward, drawn again alike where backward recomputes them.

A *stream* names the mesh axes along which an op is sharded. On the replicated stream ``""`` numbers come from torch's
default generator, which every rank has seeded alike, so that with one device a program draws exactly what the eager
model draws. On any other stream, one number drawn from the default CPU generator is mixed with this rank's coordinates
along the stream's axes and seeds the op. Nothing else is state: ``torch.manual_seed`` determines everything, and a
saved default generator restores it.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from autoplan.codegen.collectives import coordinate

State = int | Tensor
"""What `replay` needs: a seed, or the state of a generator."""


def run(stream: str, op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Runs a random op on a stream."""
    if not stream:
        return op(*args, **kwargs)
    with _state_of(_device(args, kwargs), _draw_seed(stream)):
        return op(*args, **kwargs)


def save(stream: str, op: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[State, Any]:
    """Runs a random op; returns what it takes to run it again alike, and its result."""
    device = _device(args, kwargs)
    if not stream:
        return generator_of(device).get_state(), op(*args, **kwargs)
    seed = _draw_seed(stream)
    with _state_of(device, seed):
        return seed, op(*args, **kwargs)


def replay(state: State, op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Runs a random op as it ran when `state` was saved."""
    with _state_of(_device(args, kwargs), state):
        return op(*args, **kwargs)


def replay_mask(
    state: State, shape: list[int], stride: list[int], dtype: torch.dtype, p: float, device: torch.device
) -> Tensor:
    """Mask that ``native_dropout`` drew for an input of this layout, without that input."""
    with _state_of(device, state):
        if device.type == "cpu":  # there the kernel draws just this
            return torch.empty_strided(shape, stride, dtype=torch.bool).bernoulli_(1 - p)
        x = torch.empty_strided(shape, stride, dtype=dtype, device=device)
        mask: Tensor = torch.ops.aten.native_dropout.default(x, p, True)[1]
        return mask


def _draw_seed(stream: str) -> int:
    base = int(torch.randint(2**62, ()))
    place = ",".join(f"{axis}={coordinate(axis)}" for axis in stream.split(","))
    digest = hashlib.blake2b(f"{base}:{place}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@contextlib.contextmanager
def _state_of(device: torch.device, state: State) -> Iterator[None]:
    generator = generator_of(device)
    before = generator.get_state()
    if isinstance(state, int):
        generator.manual_seed(state)
    else:
        generator.set_state(state)
    try:
        yield
    finally:
        generator.set_state(before)


def generator_of(device: torch.device) -> torch.Generator:
    """Default generator of a device."""
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    index = module.current_device() if device.index is None else device.index
    generator: torch.Generator = module.default_generators[index]
    return generator


def _device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    for x in (*args, *kwargs.values()):
        if isinstance(x, Tensor):
            return x.device
    return torch.device(kwargs.get("device") or "cpu")
