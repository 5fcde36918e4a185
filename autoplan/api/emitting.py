"""Plan + traced model -> emitted graphs and their true memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autoplan.api.models import load_model
from autoplan.codegen.differentiate import differentiate
from autoplan.codegen.emit import readable
from autoplan.codegen.liveness import Liveness, simulate
from autoplan.codegen.partition import Partitioned, partition
from autoplan.codegen.program import LocalProgram
from autoplan.codegen.shard import shard
from autoplan.errors import OptionError
from autoplan.ir import OpGraph, OpPlan, Placement, Plan, StagePlan
from autoplan.ir.plan import OPTIMIZERS
from autoplan.trace import trace


@dataclass(frozen=True)
class Emitted:
    """One device's graphs.

    Attributes:
        program: Sharded forward.
        graphs: Forward, backward, inference.
    """

    program: LocalProgram
    graphs: Partitioned

    def memory(self, optimizer: str, idle_bytes: int = 0) -> Liveness:
        """Memory of a training step of these graphs, beside `idle_bytes` of the model that they do not read."""
        states = OPTIMIZERS[optimizer]
        return simulate(self.graphs, self.program, optimizer_states=states, idle_bytes=idle_bytes)


def emit(graph: OpGraph, plan: Plan, *, device: str = "cpu") -> Emitted:
    """Shards, differentiates and partitions a graph as a plan says.

    Raises:
        PlanMismatchError: The plan is for another graph.
    """
    program = shard(graph, plan, device=device)
    joint = differentiate(program)
    return Emitted(program, partition(joint, program))


def adapt(plan: Plan, graph: OpGraph) -> Plan:
    """The plan for the same model in the other mode (train, eval): by op key, new ops replicated."""
    ops: dict[str, OpPlan] = {}
    known: Mapping[str, OpPlan] = plan.ops
    whole = Placement.replicated(plan.mesh.rank)
    for op in graph.ops:
        entry = known.get(op.key)
        if entry is None or len(entry.operands) != len(op.inputs) or len(entry.results) != len(op.outputs):
            entry = OpPlan((whole,) * len(op.inputs), (whole,) * len(op.outputs))
        ops[op.key] = entry
    inputs = {i.path: plan.inputs.get(i.path, whole) for i in graph.inputs}
    return plan.replace(graph_fingerprint=graph.fingerprint, stages=(StagePlan(ops),), inputs=inputs)


def emit_code(plan: Plan, model: str | None = None) -> str:
    """The code that a plan stands for, as text.

    Args:
        plan: The plan.
        model: ``MODEL`` as on the command line; by default what the plan was made from.

    Raises:
        OptionError: The plan does not say how to load its model and `model` is not given.
        PlanMismatchError: The model is not the one that was planned.
    """
    source = dict(plan.source)
    spec = model or source.get("model")
    if not spec:
        raise OptionError(
            "this plan was made from Python and does not say where its model comes from: name it with --model "
            "file.py:function, or the path of a config.json"
        )
    loaded, inputs = load_model(str(spec), batch=source.get("batch"), seq=source.get("seq"))
    graph = trace(loaded, inputs, precision=plan.options.precision).graph
    emitted = emit(graph, plan)
    parts = [readable(emitted.graphs.forward, "forward")]
    if emitted.graphs.backward is not None:
        parts.append(readable(emitted.graphs.backward, "backward"))
    return "\n\n".join(parts)
