"""Candidate -> `Plan`."""

from __future__ import annotations

from autoplan.ir import OpPlan, Plan, Schedule, StagePlan
from autoplan.planner.formulate import Evaluation
from autoplan.planner.options import Option
from autoplan.planner.search import Candidate, Search
from autoplan.rules.redistribute import decode


def assemble(search: Search, candidate: Candidate, *, cap_bytes: int) -> Plan:
    """Writes a candidate as a plan, without peak memory, which only emitted code tells."""
    problem = search.problems[candidate.mesh.shape]
    net, options = problem.network, problem.form.options
    chosen: list[Option] = [options[k][candidate.assignment[n]] for n, k in enumerate(net.cls)]
    kept = _kept(search, candidate)
    inputs, ops = {}, {}
    for n, node in enumerate(net.nodes):
        if node.cell is None:
            if not node.fan:
                inputs[node.name] = decode(chosen[n].outs[0].codes)
            continue
        slots = {v: kept.get((n, slot), False) for slot, v in enumerate(node.cell.ext)}
        exported = {_root(search, v) for v in node.cell.exports}
        for op, choice in zip(node.cell.ops, chosen[n].ops, strict=True):
            again = chosen[n].state == "R" or (chosen[n].state == "L" and not exported & set(op.outputs))
            ops[op.key] = OpPlan(
                tuple(decode(c) for c in choice.operands),
                tuple(decode(c) for c in choice.results),
                "recompute" if again else "keep",
                tuple(slots.get(v, False) for v in op.inputs),
            )
    value = candidate.value
    bound = min(search.bound(cap_bytes), value.cost_s)
    return Plan(
        model=search.graph.name,
        graph_fingerprint=search.graph.fingerprint,
        cluster=search.cluster.name,
        cluster_fingerprint=search.cluster.fingerprint,
        mesh=candidate.mesh,
        inputs=inputs,
        stages=(StagePlan(ops),),
        schedule=Schedule(),
        options=search.options,
        step_time_s=value.cost_s,
        cap_bytes=cap_bytes,
        objective_s=value.cost_s,
        bound_s=bound,
        gap=max(0.0, (value.cost_s - bound) / value.cost_s) if value.cost_s else 0.0,
        solve_s=round(search.solve_s, 3),
        breakdown=_breakdown(value),
        replicated=_unknown(search),
    )


def _kept(search: Search, candidate: Candidate) -> dict[tuple[int, int], bool]:
    """Per (cell node, slot), whether a redistributed copy is kept on its edge or on that of the fan before it."""
    net = search.problems[candidate.mesh.shape].network
    out: dict[tuple[int, int], bool] = {}
    for e in net.edges:
        through = net.nodes[e.source].fan and candidate.value.kept.get((e.source, 0), False)
        out[e.target, e.slot] = candidate.value.kept.get((e.target, e.slot), False) or through
    return out


def _root(search: Search, value: str) -> str:
    """The value whose memory a view shares."""
    op = search.graph.producer.get(value)
    while op is not None and search.table.rules[op.key].view and op.inputs:
        value = op.inputs[0]
        op = search.graph.producer.get(value)
    return value


def _breakdown(value: Evaluation) -> dict[str, float]:
    return {
        "compute_s": value.compute_s,
        "recompute_s": value.recompute_s,
        "communication_s": value.communication_s,
    }


def _unknown(search: Search) -> dict[str, int]:
    out: dict[str, int] = {}
    for op in search.graph.ops:
        if not search.table.rules[op.key].known:
            out[op.target] = out.get(op.target, 0) + 1
    return out
