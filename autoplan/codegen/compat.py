"""Every use that code generation makes of torch interfaces which are not public, each with its reason.

Verified against torch 2.13.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._functorch._aot_autograd import descriptors
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode

from autoplan.errors import AutoplanError

functional = torch.ops._c10d_functional
"""Collectives as ops of a graph; the functions around them that torch exports need process groups while tracing."""


def is_collective(target: Any) -> bool:
    """Whether a node's target is an op of `functional`; the class of an op with its overload has no public name."""
    return isinstance(target, torch._ops.OpOverload) and target.namespace == "_c10d_functional"


def copy_style(source: fx.Graph, target: fx.Graph) -> None:
    """Gives a graph the other's way of writing code, which `Graph.set_codegen` sets and nothing public reads."""
    target.set_codegen(source._codegen)


@dataclass(frozen=True)
class JointSlots:
    """A joint graph whose inputs and outputs are identified by descriptors, never by name.

    Attributes:
        gm: Functional graph over aten ops, forward and backward in one.
        inputs: Placeholder of each argument.
        tangents: Output index -> placeholder of its incoming gradient.
        outputs: Output index -> node.
        gradients: Argument index -> node of its gradient.
        mutations: Argument index -> node of its new value.
    """

    gm: fx.GraphModule
    inputs: tuple[fx.Node, ...]
    tangents: dict[int, fx.Node]
    outputs: dict[int, fx.Node]
    gradients: dict[int, fx.Node]
    mutations: dict[int, fx.Node]


def export_joint(gm: fx.GraphModule, args: Sequence[torch.Tensor]) -> JointSlots:
    """Traces forward and backward of `gm` together.

    Private because torch has no public way to obtain a joint graph: ``torch.export`` gives forward only, and
    ``aot_function`` hands the graph to a partitioner. Where no result requires grad the graph holds the forward only.
    """
    with contextlib.ExitStack() as stack, _without_onednn():
        joint = aot_export_joint_with_descriptors(stack, gm, tuple(args), {})
        traced = joint.graph_module
    inputs: dict[int, fx.Node] = {}
    tangents: dict[int, fx.Node] = {}
    for node in traced.graph.find_nodes(op="placeholder"):
        match node.meta["desc"]:
            case descriptors.PlainAOTInput(idx=i):
                inputs[i] = node
            case descriptors.TangentAOTInput(output=descriptors.PlainAOTOutput(idx=i)):
                tangents[i] = node
            case other:
                raise AutoplanError(f"the joint graph has an input of unknown kind: {other}")
    return JointSlots(traced, tuple(inputs[i] for i in sorted(inputs)), tangents, *_output_slots(traced.graph))


@contextlib.contextmanager
def _without_onednn() -> Iterator[None]:
    """Tracing that takes no oneDNN kernels: the backward of its LSTM only runs behind its own forward.

    ``torch.backends.mkldnn.flags`` would do, but warns of TF32 where there is no Intel GPU.
    """
    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = before


def _output_slots(graph: fx.Graph) -> tuple[dict[int, fx.Node], dict[int, fx.Node], dict[int, fx.Node]]:
    output = graph.output_node()
    outputs: dict[int, fx.Node] = {}
    gradients: dict[int, fx.Node] = {}
    mutations: dict[int, fx.Node] = {}
    for node, desc in zip(_flat(output.args[0]), output.meta["desc"], strict=True):
        if node is None:  # gradient of an input that needs none
            continue
        match desc:
            case descriptors.PlainAOTOutput(idx=i):
                outputs[i] = node
            case descriptors.GradAOTOutput(grad_of=descriptors.PlainAOTInput(idx=i)):
                gradients[i] = node
            case descriptors.InputMutationAOTOutput(mutated_input=descriptors.PlainAOTInput(idx=i)):
                mutations[i] = node
            case descriptors.IntermediateBaseAOTOutput():
                continue  # a view among the outputs; the view itself is returned as well
            case other:
                raise AutoplanError(f"the joint graph has an output of unknown kind: {other}")
    return outputs, gradients, mutations


def _flat(outputs: Any) -> list[Any]:
    return list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]


@contextlib.contextmanager
def fake_mode_of(values: Sequence[torch.Tensor]) -> Iterator[None]:
    """Enters the fake mode that the tensors belong to; no mode for real tensors.

    Private because ``FakeTensorMode`` is public only as a thing to create, not to find.
    """
    mode = detect_fake_mode(list(values))
    with mode if mode is not None else contextlib.nullcontext():
        yield


class BoxedCodeGen(fx.graph.CodeGen):
    """Code that takes one list and empties it, so that arguments die at their last use.

    Overrides the one hook of ``fx.graph.CodeGen`` that is documented for this purpose.
    """

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, *, expanded_def: bool = False) -> str:
        """Function head that unpacks the list."""
        names = [v.split(":")[0].split("=")[0].strip() for v in free_vars if v != "self"]
        head = f"def {self._func_name}(self, arguments){maybe_return_annotation}:"
        if not names:
            return head
        return f"{head}\n    {', '.join(names)}{',' if len(names) == 1 else ''} = arguments\n    arguments.clear()"


def is_view(target: Any) -> bool:
    """Whether a node's result shares the storage of its first argument.

    ``OpOverload.is_view`` is not documented; ``_unsafe_view`` aliases although its schema does not say so.
    """
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return bool(target.is_view) or target in _ALIASES


__all__ = ["BoxedCodeGen", "FakeTensorMode", "JointSlots", "export_joint", "fake_mode_of", "is_random", "is_view"]

_ALIASES = {
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten.detach.default,
    torch.ops.aten.alias.default,
    torch.ops.aten.lift_fresh.default,
    torch.ops.aten._reshape_alias.default,
}


def is_random(node: fx.Node) -> bool:
    """Whether a node draws random numbers; the tag is how torch itself asks."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    if target is torch.ops.aten.native_dropout.default:
        return node.args[2] is not False and node.args[1] not in (0, 0.0)
    return True
