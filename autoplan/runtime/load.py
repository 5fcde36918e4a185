"""Emitted programs made to run in this process: axis names become process groups, CPU becomes the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autoplan.codegen.collectives import MeshContext
from autoplan.codegen.compat import copy_style, is_collective
from autoplan.runtime.compat import pytree


def load(gm: fx.GraphModule, context: MeshContext, device: torch.device) -> fx.GraphModule:
    """Copy of an emitted graph module in which every constant that depends on the process is filled in.

    Args:
        gm: As emitted: collectives carry axis names, factories the CPU they were traced on.
        context: Group of each axis.
        device: Where this process computes.
    """
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    result = graph.graph_copy(gm.graph, env)
    graph.output(result)
    copy_style(gm.graph, graph)
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if is_collective(node.target):
            node.args = tuple(context.groups.get(a, a) if isinstance(a, str) else a for a in node.args)
        node.args, node.kwargs = _on_device((node.args, dict(node.kwargs)), device)
    return fx.GraphModule(gm, graph)


def _on_device(arguments: Any, device: torch.device) -> Any:
    def place(x: Any) -> Any:
        return device if isinstance(x, torch.device) and x.type == "cpu" else x

    return arguments if device.type == "cpu" else pytree.tree_map(place, arguments)
