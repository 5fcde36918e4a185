"""Writes one emitted graph: random ops on their streams, no dead code, waits just before their first use."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from autoplan.codegen import compat, rng
from autoplan.codegen.program import Note, value_of

WAIT = compat.functional.wait_tensor.default


class Writer:
    """Builds one emitted graph."""

    def __init__(self, root: fx.GraphModule) -> None:
        self.root = root
        self.graph = fx.Graph()
        self.env: dict[fx.Node, fx.Node] = {}
        self.states: dict[fx.Node, fx.Node] = {}

    def inputs(self, placeholders: tuple[fx.Node, ...], names: list[str]) -> None:
        """Placeholders under the names of the program's inputs."""
        for node, name in zip(placeholders, names, strict=True):
            self.placeholder(node, name)

    def placeholder(self, node: fx.Node, name: str) -> None:
        """One placeholder that stands for a node of the joint graph."""
        new = self.graph.placeholder(name)
        new.meta = {"val": value_of(node), "custom": node.meta.get("custom", {})}
        self.env[node] = new

    def copy(self, node: fx.Node) -> None:
        """A node as it is; emitted code runs without autograd, so that detaching does nothing."""
        if node.target is torch.ops.aten.detach.default:
            self.env[node] = self.env[node.all_input_nodes[0]]
            return
        new = self.graph.node_copy(node, lambda m: self.env[m])
        new.meta = {k: node.meta[k] for k in ("val", "custom") if k in node.meta}
        self.env[node] = new

    def forward_op(self, node: fx.Node, states: set[fx.Node]) -> None:
        """A node of forward; random ops go through their stream."""
        if not compat.is_random(node):
            self.copy(node)
            return
        stream = (Note.read(node) or Note()).stream
        if node not in states:
            self.env[node] = self._call(rng.run, (stream, node.target), node, value_of(node))
            return
        both = self._call(rng.save, (stream, node.target), node, (None, value_of(node)))
        self.states[node] = self._item(both, 0, f"{node.name}_state", node, None)
        self.env[node] = self._item(both, 1, node.name, node, value_of(node))

    def again(self, node: fx.Node) -> None:
        """A forward node computed once more in backward."""
        if compat.is_random(node):
            self.env[node] = self._call(rng.replay, (self.states[node], node.target), node, value_of(node))
        else:
            self.copy(node)

    def mask(self, node: fx.Node) -> None:
        """Mask of a dropout from its layout alone."""
        source, p = node.args[0], node.args[1]
        assert isinstance(source, fx.Node)
        x, drawn = value_of(source), value_of(node)[1]
        new = self.graph.call_function(
            rng.replay_mask, (self.states[node], list(x.shape), list(drawn.stride()), x.dtype, p, x.device)
        )
        new.meta = {"val": drawn, "custom": node.meta.get("custom", {})}
        for user in node.users:
            if user.args[1] == 1:
                self.env[user] = new

    def _call(self, function: Callable[..., Any], head: tuple[Any, ...], node: fx.Node, value: object) -> fx.Node:
        args = fx.map_arg(node.args, lambda m: self.env[m])
        kwargs = fx.map_arg(node.kwargs, lambda m: self.env[m])
        new = self.graph.create_node("call_function", function, (*head, *args), kwargs, node.name)
        new.meta = {"val": value, "custom": node.meta.get("custom", {})}
        return new

    def _item(self, source: fx.Node, index: int, name: str, node: fx.Node, value: object) -> fx.Node:
        new = self.graph.create_node("call_function", operator.getitem, (source, index), name=name)
        new.meta = {"val": value, "custom": node.meta.get("custom", {})}
        return new

    def finish(self, results: list[fx.Node], *, boxed: bool = False) -> fx.GraphModule:
        """Closes the graph: no dead code, waits just before their first use."""
        self.graph.output(tuple(results))
        self.graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output") or _draws(n))
        _sink_waits(self.graph)
        if boxed:
            self.graph.set_codegen(compat.BoxedCodeGen())
        self.graph.lint()
        return fx.GraphModule(self.root, self.graph)


def _draws(node: fx.Node) -> bool:
    """Whether removing a node would shift the random numbers of those after it."""
    return node.target in (rng.run, rng.save)


def _sink_waits(graph: fx.Graph) -> None:
    """Moves each wait, and the views behind it, to just before the first node that computes with the result.

    A wait for a collective that reads its input until it ends stands at the latest before the next such collective
    starts: reductions of gradients would otherwise hold all their inputs to the end of backward.
    """
    order: list[fx.Node] = []
    pending: dict[fx.Node, None] = {}

    def emit(node: fx.Node) -> None:
        for source in node.all_input_nodes:
            if source in pending:
                emit(source)
        pending.pop(node, None)
        order.append(node)

    for node in list(graph.nodes):
        if node.target is WAIT or (compat.is_view(node.target) and any(m in pending for m in node.all_input_nodes)):
            pending[node] = None
            continue
        if holds_input(node):
            for waiting in [w for w in pending if w.target is WAIT and holds_input(w.all_input_nodes[0])]:
                emit(waiting)
        emit(node)
    first = order[0]
    for node in order[1:]:
        first.append(node)
        first = node


def holds_input(node: fx.Node) -> bool:
    """Whether a node starts a collective that reads its input until it is waited for."""
    target = node.target
    return compat.is_collective(target) and target not in (WAIT, compat.functional.all_reduce.default)
