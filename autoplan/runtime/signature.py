"""What a call of the parallel module must look like: the batch that the plan was made for."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autoplan.errors import OptionError
from autoplan.runtime.compat import pytree


@dataclass(frozen=True)
class Leaf:
    """One flattened argument of the example.

    Attributes:
        name: ``input_ids``, or ``batch.mask`` where it is nested.
        path: `GraphInput.path` that it feeds; None where the program does not read it.
        shape: Of a tensor; None for anything else.
        dtype: Of a tensor.
        constant: Value of anything else, which is part of the program.
    """

    name: str
    path: str | None
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    constant: Any = None


@dataclass(frozen=True)
class InputSignature:
    """All flattened arguments of the example; names are those of the model's ``forward``."""

    leaves: tuple[Leaf, ...]
    parameters: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        paths: Sequence[str | None],
        forward: Callable[..., Any] | None = None,
    ) -> InputSignature:
        """Signature of an example call.

        Args:
            args: Positional arguments of the example.
            kwargs: Keyword arguments of the example.
            paths: Per flattened leaf of ``(args, kwargs)``, the graph input that it feeds, or None.
            forward: The model's ``forward``, so that positional arguments have names.
        """
        names = _positional(forward)
        flat = _flatten(tuple(args), dict(kwargs), names)
        leaves = []
        for (name, x), path in zip(flat.items(), paths, strict=True):
            if isinstance(x, Tensor):
                leaves.append(Leaf(name, path, tuple(x.shape), x.dtype))
            else:
                leaves.append(Leaf(name, path, constant=x))
        return cls(tuple(leaves), names)

    def bind(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]] | None = None
    ) -> dict[str, Tensor]:
        """Tensors of a call by graph input path.

        Args:
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.
            shapes: Shapes by path to expect instead of the example's.

        Raises:
            OptionError: The call differs from the example; says in what.
        """
        given = _flatten(args, dict(kwargs), self.parameters)
        out: dict[str, Tensor] = {}
        for leaf in self.leaves:
            x = given.pop(leaf.name, None)
            if leaf.shape is None:
                if x is not leaf.constant and not _same(x, leaf.constant):
                    raise OptionError(f"{leaf.name} is {x!r}, the plan was made for {leaf.constant!r}")
                continue
            if not isinstance(x, Tensor):
                got = f"{leaf.name} is missing" if x is None else f"{leaf.name} is {type(x).__name__}"
                raise OptionError(f"{got}, the plan was made for a tensor of shape {leaf.shape}")
            shape = leaf.shape if shapes is None or leaf.path is None else shapes.get(leaf.path, leaf.shape)
            if tuple(x.shape) != shape:
                raise OptionError(f"{leaf.name} has shape {tuple(x.shape)}, the plan was made for {shape}")
            if x.dtype != leaf.dtype:
                raise OptionError(f"{leaf.name} has dtype {x.dtype}, the plan was made for {leaf.dtype}")
            if leaf.path is not None:
                out[leaf.path] = x
        extra = [name for name, x in given.items() if x is not None]
        if extra:
            known = ", ".join(leaf.name for leaf in self.leaves)
            raise OptionError(f"{', '.join(extra)} was not given when the plan was made (given then: {known})")
        return out


def _positional(forward: Callable[..., Any] | None) -> tuple[str, ...]:
    if forward is None:
        return ()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in inspect.signature(forward).parameters.values() if p.kind in kinds)


def _flatten(args: tuple[Any, ...], kwargs: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Name -> leaf; a positional argument has the name of its parameter."""
    flat, _ = pytree.tree_flatten_with_path((args, kwargs))
    out: dict[str, Any] = {}
    for (part, first, *rest), x in flat:
        key = _text(first)
        if _text(part) == "0":
            index = int(key)
            key = names[index] if index < len(names) else f"args.{index}"
        name = ".".join([key, *map(_text, rest)])
        if name in out:
            raise OptionError(f"{name} was given twice")
        out[name] = x
    return out


def _text(key: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def _same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and bool(a == b)


def batch_hash(tensors: Mapping[str, Tensor]) -> int:
    """63-bit number that differs when any element of the batch does."""
    digest = hashlib.blake2b(digest_size=8)
    for name, x in sorted(tensors.items()):
        digest.update(name.encode())
        digest.update(x.detach().contiguous().cpu().flatten().view(torch.uint8).numpy().tobytes())
    return int.from_bytes(digest.digest(), "little") >> 1
