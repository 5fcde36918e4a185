"""All devices of a mesh axis in one process: cut operands, run the op on the pieces, put the results together."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autoplan.ir import Arg, GraphInput, Op, OpGraph, Ref, TensorSpec
from autoplan.rules import Choice, Position
from tests.trace.interpret import run_op

MEANS = {"mean": None, "mse_loss": 2, "cross_entropy_loss": 3}
"""Ops that may average over a sharded dim -> position of their ``reduction``."""


def spec_of(x: Tensor) -> TensorSpec:
    return TensorSpec(tuple(x.shape), str(x.dtype)[6:], x.requires_grad)


def graph_of(target: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[OpGraph, dict[str, Tensor]]:
    """A graph of one op, and the tensors of its inputs."""
    env: dict[str, Tensor] = {}
    names: dict[int, str] = {}

    def arg(a: Any) -> Arg:
        if isinstance(a, Tensor):
            name = names.setdefault(id(a), f"in{len(names)}")
            env[name] = a
            return Ref(name)
        if isinstance(a, list | tuple):
            return tuple(arg(x) for x in a)
        return str(a) if isinstance(a, torch.dtype) else a

    op = Op("op", f"aten.{target}", tuple(map(arg, args)), {k: arg(v) for k, v in kwargs.items()}, ())
    results = run_op(op, env)
    op = dataclasses.replace(op, outputs=tuple(f"out{i}" for i in range(len(results))))
    values = {n: spec_of(x) for n, x in (*env.items(), *zip(op.outputs, results, strict=True))}
    inputs = tuple(GraphInput(n, "input", n) for n in env)
    return OpGraph(inputs, (op,), values, op.outputs).verify(), env


def with_cuts(graph: OpGraph, factors: Mapping[str, Sequence[int]]) -> OpGraph:
    """The graph with views of its inputs added, so that their dims have inner factors."""
    ops, values = list(graph.ops), dict(graph.values)
    for name, shape in factors.items():
        values[f"{name}_cut"] = TensorSpec(tuple(shape), values[name].dtype)
        ops.append(Op(f"cut {name}", "aten.view.default", (Ref(name), tuple(shape)), {}, (f"{name}_cut",)))
    return dataclasses.replace(graph, ops=tuple(ops), values=values).verify()


def cut(x: Tensor, position: Position, n: int) -> list[Tensor]:
    """The pieces of a tensor: dim viewed as outer x n x rest."""
    dim, outer = position
    shape = list(x.shape)
    split = x.reshape(*shape[:dim], outer, n, shape[dim] // (outer * n), *shape[dim + 1 :])
    shape[dim] //= n
    return [split.select(dim + 1, i).reshape(shape) for i in range(n)]


def join(pieces: Sequence[Tensor], position: Position) -> Tensor:
    """Inverse of `cut`."""
    dim, outer = position
    shape = list(pieces[0].shape)
    blocks = [p.reshape(*shape[:dim], outer, shape[dim] // outer, *shape[dim + 1 :]) for p in pieces]
    shape[dim] *= len(pieces)
    return torch.stack(blocks, dim + 1).reshape(shape)


def localised(op: Op, graph: OpGraph, choice: Choice, n: int) -> Op:
    """The op with its sizes those of one device's part."""
    shapes = []
    for value, position in zip(op.outputs, choice.results, strict=True):
        shape = list(graph.values[value].shape)
        if position is not None:
            shape[position[0]] //= n
        shapes.append(tuple(shape))
    if op.name in ("view", "reshape", "_unsafe_view", "expand", "flatten", "unflatten", "squeeze", "unsqueeze"):
        target = "aten.expand.default" if op.name == "expand" else "aten.reshape.default"
        return dataclasses.replace(op, target=target, args=(op.args[0], shapes[0]), kwargs={})
    if op.name in ("split", "split_with_sizes", "chunk"):
        dim = int(op.arg(2, "dim", 0)) % len(shapes[0])  # type: ignore[arg-type]
        sizes = tuple(s[dim] for s in shapes)
        return dataclasses.replace(op, target="aten.split_with_sizes.default", args=(op.args[0], sizes, dim), kwargs={})
    return op


def operand_pieces(op: Op, choice: Choice, env: Mapping[str, Tensor], n: int) -> list[dict[str, Tensor]]:
    """Per device, its piece of every operand."""
    out: list[dict[str, Tensor]] = [{} for _ in range(n)]
    for i, (name, position) in enumerate(zip(op.inputs, choice.operands, strict=True)):
        x = env[name]
        pieces = [x] * n if position is None else cut(x, position, n)
        if i in choice.additive:
            pieces = [x, *[x * 0] * (n - 1)]
        for device, piece in zip(out, pieces, strict=True):
            device[name] = piece
    return out


def averages(op: Op) -> bool:
    position = MEANS.get(op.name, -1)
    return position is None or (position > 0 and op.arg(position, "reduction", 1) == 1)


def run_sharded(op: Op, graph: OpGraph, choice: Choice, pieces: Sequence[Mapping[str, Tensor]]) -> list[list[Tensor]]:
    """Per device, the results of the op on its pieces, as a compiler would emit it."""
    n = len(pieces)
    local = localised(op, graph, choice, n)
    if op.name == "cross_entropy_loss" and choice.contracted and averages(op):  # sum over the global count
        local = dataclasses.replace(op, args=(*op.args[:3], 2, *op.args[4:]))
        count = sum(int((env[op.inputs[1]] != -100).sum()) for env in pieces)
        return [[r / count for r in run_op(local, env)] for env in pieces]
    scale = n if choice.contracted and averages(op) else 1
    return [[r / scale for r in run_op(local, env)] if scale > 1 else run_op(local, env) for env in pieces]
