"""Sharding: forward graph + plan -> the program that one device runs.

Every value lies where its producer's plan leaves it. Where an op wants an operand elsewhere, or leaves the operand's
gradient where the producer does not accept it, one `reshard` stands on the edge; equal edges share it, so that
gradients are added before they are reduced. Nothing here depends on the rank: coordinates are looked up at run time,
so the code is the same on every device.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from autoplan.codegen import composite
from autoplan.codegen.collectives import reshard
from autoplan.codegen.compat import FakeTensorMode
from autoplan.codegen.program import LocalProgram, Note
from autoplan.errors import PlanMismatchError, UnsupportedOpError
from autoplan.ir import Arg, Op, OpGraph, OpPlan, Placement, Plan, Ref, local_shape
from autoplan.rules.redistribute import (
    Codes,
    consumer_gradient,
    decode,
    encode,
    producer_gradient,
    redistribute,
)

aten = torch.ops.aten
_RESIZED = {"view", "reshape", "_unsafe_view", "expand", "flatten", "unflatten", "squeeze"}
_LOCALISED = {"split", "split_with_sizes", "scaled_dot_product_attention", "cross_entropy_loss", "mse_loss", "mean"}


def shard(graph: OpGraph, plan: Plan, *, device: str = "cpu") -> LocalProgram:
    """Emits one device's forward program.

    Args:
        graph: The forward graph that the plan was made for.
        plan: Placements of inputs, operands and results, by path and op key.
        device: Device type on which the program will run.

    Raises:
        PlanMismatchError: The plan was made for another graph, or lacks an op or input of it.
        UnsupportedOpError: An op cannot be emitted.
    """
    if plan.graph_fingerprint != graph.fingerprint:
        raise PlanMismatchError(
            f"the plan was made for a graph with fingerprint {plan.graph_fingerprint} ({plan.model}), this one has "
            f"{graph.fingerprint} ({graph.name}): the model, its batch shape, its mode or its precision differs"
        )
    emitter = Emitter(graph, plan, device)
    for op in graph.ops:
        emitter.add(op)
    return emitter.finish()


def returned_placement(codes: Codes, is_loss: bool) -> Codes:
    """Placement in which a value that the model returns leaves: sums are completed, the loss is whole everywhere."""
    return tuple("R" if is_loss or c == "P" else c for c in codes)


class Emitter:
    """State of one emission.

    Attributes:
        graph: The forward graph.
        mesh: Devices.
        nodes: Per value, the node that holds one device's piece of it.
        placed: Per value, its placement.
    """

    def __init__(self, graph: OpGraph, plan: Plan, device: str) -> None:
        self.graph, self.plan, self.mesh, self.device = graph, plan, plan.mesh, device
        self.out = fx.Graph()
        self.nodes: dict[str, fx.Node] = {}
        self.placed: dict[str, Codes] = {}
        self.moved: dict[tuple[str, Codes, Codes], fx.Node] = {}
        self.ops = plan.ops
        self.current = Note()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        for i in graph.inputs:
            if i.path not in plan.inputs:
                raise PlanMismatchError(f"the plan has no placement for {i.kind} {i.path!r}")
            self._placeholder(i.value, plan.inputs[i.path])

    def _placeholder(self, value: str, placement: Placement) -> None:
        spec = self.graph.values[value]
        node = self.out.placeholder(value)
        with self.fake:
            shape = local_shape(spec.shape, placement, self.mesh)
            local = torch.empty(shape, dtype=getattr(torch, spec.dtype), device=self.device)
        node.meta["val"] = local.requires_grad_(spec.requires_grad)
        self.nodes[value], self.placed[value] = node, encode(placement)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Emits a call that belongs to the current op."""
        node = self.out.call_function(target, args, kwargs)
        self.current.write(node)
        return node

    def local(self, value: str) -> tuple[int, ...]:
        """Local shape of a value where its producer leaves it."""
        return local_shape(self.graph.values[value].shape, decode(self.placed[value]), self.mesh)

    def steps(self, value: str, have: Codes, want: Codes) -> tuple[tuple[str | int, ...], ...]:
        """Redistribution steps of a value or of its gradient."""
        found = redistribute(self.graph.values[value].numel, have, want, self.mesh.shape, self.mesh.axes)
        if found is None:
            raise PlanMismatchError(
                f"the plan moves %{value} from {decode(have)} to {decode(want)}, for which there is no redistribution"
            )
        return tuple(step for step, _, _ in found)

    def operand(self, value: str, plan: OpPlan, index: int) -> fx.Node:
        """The value as an op wants it, with its gradient brought home."""
        want = encode(plan.operands[index])
        shards = [plan.shards(a) for a in range(self.mesh.rank)]
        gradient = consumer_gradient(want, shards)
        have = self.placed[value]
        home = producer_gradient(have)
        tracked = self.graph.values[value].requires_grad
        if have == want and (gradient == home or not tracked):
            return self.nodes[value]
        key = (value, want, gradient if tracked else home)
        keep = plan.keep_gathered[index] if index < len(plan.keep_gathered) else False
        node = self.moved.get(key)
        if node is None:
            backward = self.steps(value, gradient, home) if tracked else ()
            forward = self.steps(value, have, want)
            if not forward and not backward:
                return self.nodes[value]
            node = self.out.call_function(reshard, (self.nodes[value], forward, backward))
            self.moved[key] = node
        elif keep:
            self.note("reshard", keep=True).write(node)
        if node.meta.get("custom") is None:
            self.note("reshard", keep=keep).write(node)
        return node

    def note(self, role: Any, keep: bool) -> Note:
        """Note of a node that serves the current op."""
        return Note(self.current.op, self.current.module, role, keep, "")

    def add(self, op: Op) -> None:
        """Emits one op."""
        plan = self.ops.get(op.key)
        if plan is None or len(plan.operands) != len(op.inputs) or len(plan.results) != len(op.outputs):
            raise PlanMismatchError(f"the plan has no fitting entry for op {op.key}")
        axes = [a for i, a in enumerate(self.mesh.axes) if plan.shards(i) and self.mesh.shape[i] > 1]
        self.current = Note(op.key, op.module, "op", plan.remat == "keep", ",".join(axes))
        operands = {v: self.operand(v, plan, i) for i, v in enumerate(op.inputs)}
        for v, p in zip(op.outputs, plan.results, strict=True):
            self.placed[v] = encode(p)
        node = self._emit(op, plan, operands)
        if len(op.outputs) == 1 and not _returns_list(op):
            self.nodes[op.outputs[0]] = node
            return
        for i, v in enumerate(op.outputs):
            self.nodes[v] = self.call(operator.getitem, node, i)

    def _emit(self, op: Op, plan: OpPlan, operands: Mapping[str, fx.Node]) -> fx.Node:
        args = [self.argument(a, operands) for a in op.args]
        kwargs = {k: self.argument(v, operands) for k, v in op.kwargs.items()}
        name = op.name
        if name in _RESIZED:
            target = aten.expand.default if name == "expand" else aten.reshape.default
            return self.call(target, args[0], list(self.local(op.outputs[0])))
        if name in _LOCALISED:
            return composite.emit(self, op, plan, args, kwargs)
        return self.call(target_of(op), *args, **kwargs)

    def argument(self, arg: Arg, operands: Mapping[str, fx.Node]) -> Any:
        """An IR argument as emitted code takes it."""
        if isinstance(arg, Ref):
            return operands[arg.value]
        if isinstance(arg, tuple):
            return [self.argument(a, operands) for a in arg]
        if isinstance(arg, str) and arg.startswith("torch."):
            return getattr(torch, arg[6:])
        if isinstance(arg, str) and arg.startswith("device:"):
            return torch.device(self.device)
        return arg

    def contracted(self, plan: OpPlan) -> tuple[int, ...]:
        """Mesh axes along which an op turns a sharded operand into partial sums."""
        return tuple(
            a
            for a in range(self.mesh.rank)
            if self.mesh.shape[a] > 1 and plan.shards(a) and str(plan.results[0][a]) == "P"
        )

    def finish(self) -> LocalProgram:
        """Returns the program with the model's outputs in place."""
        graph = self.graph
        returned: list[fx.Node] = []
        placements: list[Placement] = []
        for i, v in enumerate(graph.outputs):
            is_loss = i == graph.loss
            op = graph.producer.get(v)
            self.current = Note(op.key if op else "", op.module if op else "", "output", True, "")
            have, node = self.placed[v], self.nodes[v]
            want = returned_placement(have, is_loss)
            if not is_loss and graph.values[v].requires_grad:
                node = self.call(aten.detach.default, node)
            steps = self.steps(v, have, want)
            if steps:
                node = self.call(reshard, node, steps, ())
            returned.append(node)
            placements.append(decode(want))
        self.out.output(tuple(returned))
        self.out.eliminate_dead_code()
        gm = fx.GraphModule({}, self.out)
        shapes = tuple(graph.values[v].shape for v in graph.outputs)
        stored = tuple(self.plan.inputs[i.path] for i in graph.inputs)
        tracked = tuple(graph.values[v].requires_grad for v in graph.outputs)
        return LocalProgram(gm, graph.inputs, stored, tuple(placements), shapes, graph.loss, self.mesh, tracked)


def _returns_list(op: Op) -> bool:
    return op.name in ("split", "split_with_sizes", "chunk", "unbind", "tensor_split")


def target_of(op: Op) -> Any:
    """The torch operator behind a target such as ``aten.linear.default``.

    Raises:
        UnsupportedOpError: This torch has no such operator.
    """
    found: Any = torch.ops
    for part in op.target.split("."):
        found = getattr(found, part, None)
        if found is None:
            raise UnsupportedOpError(f"this version of torch has no op {op.target} ({op.key})")
    return found
