"""`LocalProgram`: one rank's forward program, between sharding and differentiation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx

from autoplan.ir import GraphInput, Mesh, Placement

Role = Literal["op", "reshard", "output"]
TAG = "autoplan"


@dataclass(frozen=True)
class Note:
    """What sharding tells the later steps about a node; stored as ``node.meta["custom"]["autoplan"]``.

    That key is the one that torch carries from a forward graph through the joint trace.

    Attributes:
        op: Key of the op in the `OpGraph` that the node stems from.
        module: Path of the module it ran in.
        role: ``op``, ``reshard`` (moves data between placements) or ``output`` (prepares a returned value).
        keep: Whether its results are kept for backward; else backward computes them again.
        stream: Comma-joined names of the mesh axes along which the op is sharded, ``""`` where it is replicated.
    """

    op: str = ""
    module: str = ""
    role: Role = "op"
    keep: bool = True
    stream: str = ""

    def write(self, node: fx.Node) -> None:
        """Attaches the note to a node."""
        fields = {"op": self.op, "module": self.module, "role": self.role, "keep": self.keep, "stream": self.stream}
        node.meta["custom"] = {**node.meta.get("custom", {}), TAG: fields}

    @classmethod
    def read(cls, node: fx.Node) -> Note | None:
        """Note of a node, None where it has none (sums of gradients)."""
        fields = (node.meta.get("custom") or {}).get(TAG)
        return None if fields is None else cls(**fields)


@dataclass(frozen=True)
class LocalProgram:
    """One rank's forward program, before differentiation.

    Attributes:
        gm: Placeholders only, one per entry of `inputs`, in order; ``meta["val"]`` is the fake local tensor and
            requires grad where it is a trainable parameter. Every ``call_function`` carries a `Note`.
        inputs: Parameters, buffers and step inputs.
        placements: Of each input.
        outputs: Placement of each returned value; the graph returns a flat tuple.
        output_shapes: Global shape of each returned value.
        loss: Index of the scalar loss among the outputs, or None; every other output is detached by the graph.
        mesh: Devices.
        tracked: Per output, whether it required grad before it was detached; none did where this is empty.
    """

    gm: fx.GraphModule
    inputs: tuple[GraphInput, ...]
    placements: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    output_shapes: tuple[tuple[int, ...], ...]
    loss: int | None
    mesh: Mesh
    tracked: tuple[bool, ...] = ()

    @property
    def values(self) -> tuple[torch.Tensor, ...]:
        """Fake local tensor of each input."""
        return tuple(n.meta["val"] for n in self.gm.graph.nodes if n.op == "placeholder")


def value_of(node: fx.Node) -> Any:
    """Fake value that a node computes: a tensor, or a tuple of them."""
    return node.meta.get("val")
