"""Joint graph -> forward, backward and inference graphs, as the plan's keep set says.

A forward value that backward reads is *saved* where its note says keep, and otherwise computed again from its inputs,
in turn saved or recomputed, just before its first use. Inputs of the program are there anyway. Views are never saved
but taken again from their base, so that one storage is saved once. Random ops that are recomputed replay the numbers
they drew; a dropout whose mask alone is asked for replays the mask without its input.

Signatures of the emitted graphs::

    forward(*inputs)                            -> (*outputs, *mutated buffers, *saved values)
    backward([gradient of the loss, *saved])    -> (gradient of each input listed in `Partitioned.gradients`)
    inference(*inputs)                          -> (*outputs, *mutated buffers)

Backward empties its argument list, and names die at their last use, so that values are freed as early as possible.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import fx

from autoplan.codegen import compat
from autoplan.codegen.differentiate import Joint
from autoplan.codegen.program import LocalProgram, Note, value_of
from autoplan.codegen.write import Writer

_DROPOUT = torch.ops.aten.native_dropout.default


@dataclass(frozen=True)
class Saved:
    """One argument of backward besides the gradient.

    Attributes:
        name: Of the value in the forward graph.
        kind: ``input`` of the program, ``value`` computed in forward, or ``state`` of a random op.
        input: Index of the input, for that kind.
        nbytes: Bytes that saving it holds; nothing for an input.
        op: Key of the op that computes it.
    """

    name: str
    kind: Literal["input", "value", "state"]
    input: int | None = None
    nbytes: int = 0
    op: str = ""


@dataclass(frozen=True)
class Partitioned:
    """The emitted graphs of one rank; see the module for their signatures.

    Attributes:
        forward: Forward that also returns what backward needs.
        backward: Backward, or None where no output requires grad.
        inference: Forward alone.
        saved: Arguments of backward in order.
        gradients: Input index of each result of backward.
        mutations: Input index of each updated buffer.
        n_outputs: Number of results that the user sees.
        loss: Index of the loss among them.
        recomputed: Names of the nodes that backward computes again, views left out.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule | None
    inference: fx.GraphModule
    saved: tuple[Saved, ...]
    gradients: tuple[int, ...]
    mutations: tuple[int, ...]
    n_outputs: int
    loss: int | None
    recomputed: tuple[str, ...] = ()

    @property
    def saved_bytes(self) -> int:
        """Bytes that live from forward to backward on account of saving."""
        return sum(s.nbytes for s in self.saved)


def partition(joint: Joint, program: LocalProgram) -> Partitioned:
    """Cuts the joint graph."""
    plan = _Plan(joint)
    gradients = tuple(i for i, g in enumerate(joint.gradients) if g is not None)
    for i in gradients:
        plan.demand(joint.gradients[i])
    plan.order_backward()
    saved = plan.saved(program)
    names = [i.value for i in program.inputs]
    results = [*joint.outputs, *joint.mutations.values()]
    forward = Writer(joint.gm)
    forward.inputs(joint.inputs, names)
    for node in plan.forward:
        forward.forward_op(node, plan.states)
    kept = [forward.states[n] if kind == "state" else forward.env[n] for n, kind in plan.crossing if kind != "input"]
    return Partitioned(
        forward=forward.finish([forward.env[n] for n in results] + kept),
        backward=_backward(joint, plan, names, gradients) if gradients else None,
        inference=_inference(joint, plan, names, results),
        saved=saved,
        gradients=gradients,
        mutations=tuple(joint.mutations),
        n_outputs=len(joint.outputs),
        loss=program.loss,
        recomputed=tuple(n.name for kind, n in plan.body if kind in ("again", "mask") and not _is_alias(n)),
    )


def keeps(node: fx.Node) -> bool:
    """Whether a forward node's value may be saved for backward."""
    note = Note.read(node)
    return note is None or note.keep


def _is_alias(node: fx.Node) -> bool:
    """Whether a node's value lies in another value's storage, and so is never saved itself."""
    if node.target is operator.getitem:
        return _is_alias(node.args[0])  # type: ignore[arg-type]
    return compat.is_view(node.target)


def _is_tuple(node: fx.Node) -> bool:
    return isinstance(value_of(node), (tuple, list))


class _Plan:
    """Which joint nodes run in forward, what backward does in which order, and what crosses.

    ``body`` is backward as (kind, node): ``backward`` a node of its own, ``again`` a forward node computed once more,
    ``mask`` a dropout of which the mask alone is replayed.
    """

    def __init__(self, joint: Joint) -> None:
        graph = joint.gm.graph
        late: set[fx.Node] = set() if joint.tangent is None else {joint.tangent}
        for node in graph.nodes:
            if node.op not in ("placeholder", "output") and (
                node.meta.get("partitioner_tag") == "is_backward" or any(m in late for m in node.all_input_nodes)
            ):
                late.add(node)
        self.joint = joint
        self.late = late
        self.tail = _tail(graph, late)
        self.order = {n: i for i, n in enumerate(graph.nodes)}
        self.forward = [n for n in graph.nodes if n.op not in ("placeholder", "output") and n not in late]
        self.needed: set[fx.Node] = set()
        self.body: list[tuple[str, fx.Node]] = []
        self.crossing: list[tuple[fx.Node, Literal["input", "value", "state"]]] = []
        self.states: set[fx.Node] = set()
        self.masks: set[fx.Node] = set()

    def demand(self, node: fx.Node | None) -> None:
        """Marks what must be at hand in backward for `node` to be there."""
        stack = [node]
        while stack:
            n = stack.pop()
            if n is None or n in self.needed:
                continue
            self.needed.add(n)
            if n.op == "placeholder" or self._is_saved(n) or self._is_mask_of_replay(n):
                continue
            stack.extend(n.all_input_nodes)

    def _is_saved(self, node: fx.Node) -> bool:
        return node not in self.late and not _is_alias(node) and not _is_tuple(node) and keeps(node)

    def _is_mask_of_replay(self, node: fx.Node) -> bool:
        if node in self.late or node.target is not operator.getitem or node.args[1] != 1:
            return False
        source = node.args[0]
        return isinstance(source, fx.Node) and source.target is _DROPOUT and compat.is_random(source)

    def order_backward(self) -> None:
        """Fills `body`: backward nodes in their order, each recomputation just before its first use.

        What follows a finished gradient (its layout, its reduction) comes at once: torch runs it late where the
        parameter was touched early in forward, and unreduced gradients would pile up.
        """
        done: set[fx.Node] = set()
        replayed = {n.args[0] for n in self.needed if not self._is_mask_of_replay(n) and n.target is operator.getitem}
        self.masks = {
            n.args[0]  # type: ignore[misc]
            for n in self.needed
            if self._is_mask_of_replay(n) and not self._is_saved(n) and n.args[0] not in replayed
        }
        for node in self.joint.gm.graph.nodes:
            if node in self.late and node in self.needed and node is not self.joint.tangent:
                self._visit(node, done)
        for gradient in self.joint.gradients:  # those that do not depend on the incoming gradient
            if gradient is not None:
                self._visit(gradient, done)
        self.crossing.sort(key=lambda c: ({"input": 0, "value": 1, "state": 2}[c[1]], self.order[c[0]]))

    def _visit(self, root: fx.Node, done: set[fx.Node]) -> None:
        stack: list[tuple[fx.Node, bool]] = [(root, False)]
        while stack:
            node, ready = stack.pop()
            if ready:
                self.body.append((self._kind(node), node))
                stack.extend((u, False) for u in node.users if u in self.tail and u in self.needed)
            elif node not in done and node is not self.joint.tangent:
                done.add(node)
                if self._arrives(node):
                    continue
                stack.append((node, True))
                if node not in self.masks:
                    stack.extend((m, False) for m in reversed(node.all_input_nodes))

    def _kind(self, node: fx.Node) -> str:
        if node in self.late:
            return "backward"
        return "mask" if node in self.masks else "again"

    def _arrives(self, node: fx.Node) -> bool:
        """Whether a value comes from forward; records that it crosses."""
        if node.op == "placeholder":
            self.crossing.append((node, "input"))
            return True
        if self._is_saved(node):
            self.crossing.append((node, "value"))
            return True
        if node not in self.late and compat.is_random(node):
            self.crossing.append((node, "state"))
            self.states.add(node)
        return False

    def saved(self, program: LocalProgram) -> tuple[Saved, ...]:
        """Describes what crosses."""
        index = {n: i for i, n in enumerate(self.joint.inputs)}
        out = []
        for node, kind in self.crossing:
            note = Note.read(node) or Note()
            if kind == "input":
                out.append(Saved(program.inputs[index[node]].value, kind, index[node]))
            elif kind == "value":
                out.append(Saved(node.name, kind, None, value_of(node).untyped_storage().nbytes(), note.op))
            else:
                out.append(Saved(f"{node.name}_state", kind, None, state_bytes(note.stream), note.op))
        return tuple(out)


def _tail(graph: fx.Graph, late: set[fx.Node]) -> set[fx.Node]:
    """Backward nodes that only bring one finished gradient into its final form."""
    tail: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        ends = all(u in tail or u.op == "output" for u in node.users)
        if node in late and node.op == "call_function" and len(node.all_input_nodes) == 1 and ends:
            tail.add(node)
    return tail


def state_bytes(stream: str) -> int:
    """Bytes that the saved state of a random op takes."""
    return 0 if stream else int(torch.default_generator.get_state().nbytes)


def _inference(joint: Joint, plan: _Plan, names: list[str], results: list[fx.Node]) -> fx.GraphModule:
    writer = Writer(joint.gm)
    writer.inputs(joint.inputs, names)
    for node in plan.forward:
        writer.forward_op(node, set())
    return writer.finish([writer.env[n] for n in results])


def _backward(joint: Joint, plan: _Plan, names: list[str], gradients: tuple[int, ...]) -> fx.GraphModule:
    writer = Writer(joint.gm)
    assert joint.tangent is not None
    writer.placeholder(joint.tangent, "gradient")
    index = {n: i for i, n in enumerate(joint.inputs)}
    for node, kind in plan.crossing:
        if kind == "state":
            writer.states[node] = writer.graph.placeholder(f"{node.name}_state")
        else:
            writer.placeholder(node, names[index[node]] if kind == "input" else node.name)
    for what, node in plan.body:
        if what == "backward":
            writer.copy(node)
        elif what == "mask":
            writer.mask(node)
        elif node not in writer.env:
            writer.again(node)
    results = []
    for i in gradients:
        gradient = joint.gradients[i]
        assert gradient is not None
        results.append(_as_laid_out(writer, writer.env[gradient], value_of(joint.inputs[i])))
    return writer.finish(results, boxed=True)


def _as_laid_out(writer: Writer, gradient: fx.Node, like: torch.Tensor) -> fx.Node:
    """Gradient with the strides of its parameter: autograd would copy it otherwise."""
    value = value_of(gradient)
    if value.stride() == like.stride() or not like.is_contiguous():
        return gradient
    new = writer.graph.call_function(
        torch.ops.aten.clone.default, (gradient,), {"memory_format": torch.contiguous_format}
    )
    new.meta = {"val": value.clone(memory_format=torch.contiguous_format), "custom": gradient.meta.get("custom", {})}
    return new
