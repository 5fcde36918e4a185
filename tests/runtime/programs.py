"""Local programs written by hand, for tests of code generation and the runtime on several ranks."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses import FakeTensorMode

from autoplan.codegen.collectives import reshard
from autoplan.codegen.differentiate import differentiate
from autoplan.codegen.partition import Partitioned, partition
from autoplan.codegen.program import LocalProgram, Note
from autoplan.ir import GraphInput, Mesh, Placement, local_shape

aten = torch.ops.aten


class Builder:
    """Appends noted nodes to a local program and computes their fake values."""

    def __init__(self, mesh: Mesh, dtype: torch.dtype = torch.float64) -> None:
        self.mesh, self.dtype = mesh, dtype
        self.graph, self.fake = fx.Graph(), FakeTensorMode(allow_non_fake_inputs=True)
        self.inputs: list[GraphInput] = []
        self.placements: list[Placement] = []

    def input(self, kind: Any, path: str, shape: Sequence[int], placement: str, dtype: Any = None) -> fx.Node:
        at = Placement.parse(placement, self.mesh)
        node = self.graph.placeholder(path.replace(".", "_"))
        with self.fake:
            value = torch.empty(local_shape(shape, at, self.mesh), dtype=dtype or self.dtype)
        node.meta["val"] = value.requires_grad_(kind == "parameter")
        self.inputs.append(GraphInput(node.name, kind, path))
        self.placements.append(at)
        return node

    def op(
        self, target: Callable[..., Any], *args: Any, keep: bool = True, stream: str = "", role: Any = "op"
    ) -> fx.Node:
        node = self.graph.call_function(target, args)
        Note(getattr(target, "__name__", "op"), "", role, keep, stream).write(node)
        return node

    def move(self, x: fx.Node, forward: Any, backward: Any, keep: bool = True) -> fx.Node:
        return self.op(reshard, x, forward, backward, keep=keep, role="reshard")

    def finish(self, outputs: Sequence[tuple[fx.Node, str, Sequence[int]]]) -> LocalProgram:
        self.graph.output(tuple(n for n, _, _ in outputs))
        gm = fx.GraphModule({}, self.graph)
        at = tuple(Placement.parse(p, self.mesh) for _, p, _ in outputs)
        shapes = tuple(tuple(s) for _, _, s in outputs)
        return LocalProgram(gm, tuple(self.inputs), tuple(self.placements), at, shapes, 0, self.mesh)


def emit(program: LocalProgram) -> Partitioned:
    return partition(differentiate(program), program)


class Mlp(torch.nn.Module):
    """Reference: two linear layers, a fused first one of three blocks, and a mean of squares."""

    def __init__(self, width: int = 8, hidden: int = 12, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.config = {"width": width}
        self.up = torch.nn.Linear(width, hidden, dtype=dtype)
        self.down = torch.nn.Linear(hidden, width, bias=False, dtype=dtype)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        a, b, c = self.up(x).chunk(3, -1)
        h = torch.cat([torch.tanh(a) * b, torch.tanh(b) * c, torch.tanh(c) * a], -1)
        y = self.down(h)
        return {"loss": y.square().mean(), "y": y}


def _middle(b: Builder, x: fx.Node, keep: bool) -> fx.Node:
    parts = [b.op(aten.split.Tensor, x, x.meta["width"] // 3, -1)]
    p, q, r = (b.op(operator.getitem, parts[0], i) for i in range(3))
    pairs = [(p, q), (q, r), (r, p)]
    return b.op(
        aten.cat.default,
        [b.op(aten.mul.Tensor, b.op(aten.tanh.default, u, keep=keep), v, keep=keep) for u, v in pairs],
        -1,
        keep=keep,
    )


def tensor_parallel(n: int, rows: int = 4, width: int = 8, hidden: int = 12, keep: bool = True) -> LocalProgram:
    """Column, then row parallel: the fused dim is cut inside its three blocks."""
    b = Builder(Mesh((n,), ("tp",)))
    w1 = b.input("parameter", "up.weight", (hidden, width), "S(0:3)")
    b1 = b.input("parameter", "up.bias", (hidden,), "S(0:3)")
    w2 = b.input("parameter", "down.weight", (width, hidden), "S(1:3)")
    x = b.input("input", "x", (rows, width), "R")
    up = b.op(aten.linear.default, b.move(x, (), (("all_reduce", "tp", n),)), w1, b1, keep=keep)
    up.meta["width"] = hidden // n
    down = b.op(aten.linear.default, _middle(b, up, keep), w2, keep=keep)
    y = b.move(down, (("all_reduce", "tp", n),), ())
    loss = b.op(aten.mean.default, b.op(aten.pow.Tensor_Scalar, y, 2))
    return b.finish([(loss, "R", ()), (b.op(aten.detach.default, y, role="output"), "R", (rows, width))])


def fully_sharded(n: int, rows: int = 4, width: int = 8, hidden: int = 12, keep: bool = True) -> LocalProgram:
    """Batch and parameters cut along one axis: gather forward, reduce-scatter backward."""
    b = Builder(Mesh((n,), ("dp",)))
    names = (
        ("up.weight", (hidden, width), "S(0:3)", 0, 3),
        ("up.bias", (hidden,), "R", 0, 1),
        ("down.weight", (width, hidden), "S(1)", 1, 1),
    )
    whole = []
    for path, shape, at, dim, outer in names:
        p = b.input("parameter", path, shape, at)
        gather, scatter = ("all_gather", "dp", n, dim, outer), ("reduce_scatter", "dp", n, dim, outer)
        steps = ((), (("all_reduce", "dp", n),)) if at == "R" else ((gather,), (scatter,))
        whole.append(b.move(p, *steps, keep=keep))
    x = b.input("input", "x", (rows, width), "S(0)")
    up = b.op(aten.linear.default, x, whole[0], whole[1], keep=keep)
    up.meta["width"] = hidden
    y = b.op(aten.linear.default, _middle(b, up, keep), whole[2])
    total = b.op(aten.sum.default, b.op(aten.pow.Tensor_Scalar, y, 2))
    part = b.op(aten.div.Tensor, total, float(rows * width))
    loss = b.move(part, (("all_reduce", "dp", n),), ())
    return b.finish([(loss, "R", ()), (b.op(aten.detach.default, y, role="output"), "S(0)", (rows, width))])
