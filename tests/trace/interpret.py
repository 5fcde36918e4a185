"""Runs an `OpGraph` on real tensors, so that a traced graph can be compared with the model it came from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from autoplan.ir import Arg, Op, OpGraph, Ref

SYMBOLS = {"torch.strided": torch.strided, "torch.contiguous_format": torch.contiguous_format,
           "torch.preserve_format": torch.preserve_format}  # fmt: skip


def function(op: Op) -> Any:
    """The torch function of an op."""
    found: Any = torch.ops
    for part in op.target.split("."):
        found = getattr(found, part)
    return found


def argument(arg: Arg, env: Mapping[str, Tensor]) -> Any:
    """An argument as torch takes it."""
    if isinstance(arg, Ref):
        return env[arg.value]
    if isinstance(arg, tuple):
        return [argument(a, env) for a in arg]
    if isinstance(arg, str) and arg.startswith("device:"):
        return torch.device(arg[7:])
    if isinstance(arg, str) and arg.startswith("torch."):
        return SYMBOLS.get(arg, getattr(torch, arg[6:], None))
    return arg


def run_op(op: Op, env: Mapping[str, Tensor]) -> list[Tensor]:
    """The op's results, one per entry of ``op.outputs``."""
    args = [argument(a, env) for a in op.args]
    out = function(op)(*args, **{k: argument(a, env) for k, a in op.kwargs.items()})
    return [out] if isinstance(out, Tensor) else list(out)


def run(graph: OpGraph, given: Mapping[str, Tensor]) -> list[Tensor]:
    """Results of a graph, given the tensors of its inputs by path."""
    env = {i.value: given[i.path] for i in graph.inputs}
    for op in graph.ops:
        env.update(zip(op.outputs, run_op(op, env), strict=True))
        for name in op.outputs:
            spec = graph.values[name]
            assert (tuple(env[name].shape), str(env[name].dtype)[6:]) == (spec.shape, spec.dtype), op
            assert env[name].requires_grad == spec.requires_grad or not spec.is_float, op
    return [env[o] for o in graph.outputs]
