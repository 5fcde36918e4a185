"""The joint problem as rows and columns (DESIGN: sharding and recomputation in one program).

Variables: ``x[n,o]`` (integer) one-hot over the options of each node; for every edge ``e = (u -> v)`` marginals
``z[e,a,b]`` over ``a``, what u's option shows of the value (`Out`), and ``b``, what v's option wants of it (`In`);
where a redistributed copy is needed in backward, ``z`` comes in two copies: made again, or kept.

    (1)  Σ_o x[n,o] = 1                         one option per node
    (2)  Σ_b z[e,a,b] = Σ_{o shows a} x[u,o]    for every edge and a
    (3)  Σ_a z[e,a,b] = Σ_{o wants b} x[v,o]    for every edge and b
    (4)  min Σ (compute of o)·x + Σ (redistribution)·z,  memory: Σ (bytes of o)·x + Σ (bytes of kept copies)·z

Pairs that cannot be (a freed value that backward needs, placements without a redistribution) get no variable. In a
folded network a node or an edge counts as often as it stands for one. `formulate` builds (1)-(4); `decode` reads a
solution back; `evaluate` prices any assignment of the unfolded network by the same rules.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from autoplan.ir import OpGraph
from autoplan.planner.network import Edge, Network
from autoplan.planner.options import In, Option, Out, cell_options, fan_options, input_options
from autoplan.planner.pricing import Prices
from autoplan.rules.redistribute import Codes
from autoplan_solver import Problem, ProblemBuilder

MEMORY = "memory"


@dataclass(frozen=True)
class Crossing:
    """One way over an edge.

    Attributes:
        cost_s: Redistribution forward, of the gradient backward, and again for backward where it is made again.
        bytes: Bytes of a copy that is kept.
        kept: Whether a redistributed copy is kept.
    """

    cost_s: float
    bytes: int
    kept: bool


@dataclass(frozen=True)
class Formulation:
    """A problem and what its variables mean.

    Attributes:
        problem: Rows, columns, resources.
        network: The network, folded or not.
        options: Per node (those that stand for themselves) its options.
        x: Per such node the index of its first variable.
        kept: Per z variable that keeps a redistributed copy, its edges.
    """

    problem: Problem
    network: Network
    options: Mapping[int, Sequence[Option]]
    x: Mapping[int, int]
    kept: Mapping[int, tuple[Edge, ...]] = field(default_factory=dict)


class Assignment(dict[int, int]):
    """Option index per node of the unfolded network."""


@dataclass(frozen=True)
class Evaluation:
    """What an assignment costs.

    Attributes:
        cost_s: Objective (4).
        bytes: Memory (4).
        compute_s: Compute without recomputation.
        recompute_s: Recomputation.
        communication_s: Redistribution.
        state_bytes: Parameters, gradients, optimizer state and inputs.
        kept: Per edge, whether a redistributed copy is kept.
    """

    cost_s: float
    bytes: int
    compute_s: float
    recompute_s: float
    communication_s: float
    state_bytes: int
    kept: Mapping[tuple[int, int], bool]


def node_options(net: Network, prices: Prices, pins: Mapping[str, Codes], *, remat: bool) -> dict[int, list[Option]]:
    """Options of every node that stands for itself; the loss is brought home whole, other outputs as they lie."""
    graph = prices.graph
    out: dict[int, list[Option]] = {}
    for k in sorted(set(net.cls)):
        node = net.nodes[k]
        if node.cell is not None:
            out[k] = _returned(cell_options(node.cell, prices, remat=remat), node.exports, prices)
        elif node.fan:
            out[k] = fan_options(node.value, prices)
        else:
            out[k] = input_options(node.value, graph.input_of[node.value].kind, prices, pins.get(node.name))
    return out


def returned_placement(codes: Codes, is_loss: bool) -> Codes:
    """Placement in which a value that the model returns leaves: sums are completed, the loss is whole everywhere."""
    return tuple("R" if is_loss or c == "P" else c for c in codes)


def _returned(options: list[Option], exports: Sequence[str], prices: Prices) -> list[Option]:
    graph = prices.graph
    loss = graph.outputs[graph.loss] if graph.loss is not None else None
    returned = [(i, v) for i, v in enumerate(exports) if v in graph.outputs]
    if not returned:
        return options
    out = []
    for o in options:
        extra: float | None = 0.0
        for i, v in returned:
            codes = o.outs[i].codes
            move = prices.move(v, codes, returned_placement(codes, v == loss))
            extra = None if move is None or extra is None else extra + move
        if extra is not None:
            out.append(Option(o.outs, o.ins, o.cost_s + extra, o.bytes, o.state, o.ops, o.recompute_s))
    return out


def crossings(value: str, a: Out, b: In, prices: Prices, graph: OpGraph) -> list[Crossing]:
    """Ways from what a producer shows to what a consumer wants; empty where there is none."""
    forward = prices.move(value, a.codes, b.codes)
    if forward is None:
        return []
    backward = prices.move(value, b.gradient, a.gradient) if graph.values[value].requires_grad else 0.0
    if backward is None:
        return []
    if a.codes == b.codes:
        return [] if b.needed and not a.available else [Crossing(backward, 0, False)]
    if not b.needed:
        return [Crossing(forward + backward, 0, False)]
    keep = Crossing(forward + backward, prices.local_bytes(value, b.codes), True)
    if not a.available:
        return [keep]
    again = Crossing(2 * forward + backward, 0, False)
    return [again] if forward == 0.0 else [again, keep]


def edge_classes(net: Network) -> dict[tuple[int, int, int, int], list[Edge]]:
    """Edges between the same pair of standing nodes, together."""
    out: dict[tuple[int, int, int, int], list[Edge]] = {}
    for e in net.edges:
        out.setdefault((net.cls[e.source], e.port, net.cls[e.target], e.slot), []).append(e)
    return out


def formulate(
    net: Network, prices: Prices, options: Mapping[int, Sequence[Option]], *, cap_bytes: float | None = None
) -> Formulation:
    """Builds equations (1)-(4)."""
    builder = ProblemBuilder()
    count: dict[int, int] = {}
    for k in net.cls:
        count[k] = count.get(k, 0) + 1
    x: dict[int, int] = {}
    for k, mine in options.items():
        costs = np.array([o.cost_s for o in mine]) * count[k]
        sizes = np.array([o.bytes for o in mine], dtype=float) * count[k]
        span = builder.add_vars(costs, True, {MEMORY: sizes})
        x[k] = span.start
        builder.add_rows([0, len(span)], list(span), [1.0] * len(span), [1.0])
    kept: dict[int, tuple[Edge, ...]] = {}
    for (u, port, v, slot), members in edge_classes(net).items():
        copies = _edge_rows(builder, prices, options, x, (u, port, v, slot), members, cap_bytes is not None)
        kept.update(dict.fromkeys(copies, tuple(members)))
    problem = builder.build(caps={} if cap_bytes is None else {MEMORY: float(cap_bytes)})
    return Formulation(problem, net, options, x, kept)


def _edge_rows(
    builder: ProblemBuilder,
    prices: Prices,
    options: Mapping[int, Sequence[Option]],
    x: Mapping[int, int],
    edge: tuple[int, int, int, int],
    members: Sequence[Edge],
    capped: bool,
) -> list[int]:
    """Equations (2) and (3) of an edge; returns the variables that keep a copy."""
    u, port, v, slot = edge
    value = members[0].value
    shows: dict[Out, list[int]] = {}
    for i, o in enumerate(options[u]):
        shows.setdefault(o.outs[port], []).append(x[u] + i)
    wants: dict[In, list[int]] = {}
    for i, o in enumerate(options[v]):
        wants.setdefault(o.ins[slot], []).append(x[v] + i)
    ways: list[Crossing] = []
    out_of: list[list[int]] = [[] for _ in shows]
    into: list[list[int]] = [[] for _ in wants]
    for i, a in enumerate(shows):
        for j, b in enumerate(wants):
            for way in crossings(value, a, b, prices, prices.graph):
                out_of[i].append(len(ways))
                into[j].append(len(ways))
                ways.append(way)
    n = len(members)
    # under a cap a copy could be kept by halves; without one the marginals follow from x
    whole = capped and any(w.kept for w in ways)
    span = builder.add_vars(
        np.array([w.cost_s for w in ways]) * n, whole, {MEMORY: np.array([w.bytes for w in ways], dtype=float) * n}
    )
    start, index, coefficient = [0], [], []
    for groups, variables in ((out_of, shows.values()), (into, wants.values())):
        for mine, xs in zip(groups, variables, strict=True):
            index += [span.start + k for k in mine] + list(xs)
            coefficient += [1.0] * len(mine) + [-1.0] * len(xs)
            start.append(len(index))
    builder.add_rows(start, index, coefficient, [0.0] * (len(start) - 1))
    return [span.start + k for k, w in enumerate(ways) if w.kept]


def decode(form: Formulation, solution: np.ndarray) -> Assignment:
    """Option per node of the unfolded network: what its standing node chose."""
    chosen = {k: int(np.argmax(solution[form.x[k] : form.x[k] + len(mine)])) for k, mine in form.options.items()}
    return Assignment({n: chosen[k] for n, k in enumerate(form.network.cls)})


def decode_kept(form: Formulation, solution: np.ndarray) -> frozenset[tuple[int, int]]:
    """Target and slot of the edges on which a solution keeps a redistributed copy."""
    return frozenset((e.target, e.slot) for z, edges in form.kept.items() if solution[z] > 0.5 for e in edges)


def evaluate(
    net: Network,
    prices: Prices,
    options: Mapping[int, Sequence[Option]],
    assignment: Mapping[int, int],
    multiplier: float = 0.0,
    copies: Collection[tuple[int, int]] | None = None,
) -> Evaluation | None:
    """Prices an assignment edge by edge; a copy is kept where ``cost + multiplier·bytes`` is less.

    Args:
        net: The network.
        prices: Prices on its mesh.
        options: Per standing node.
        assignment: Option per node.
        multiplier: Seconds per byte.
        copies: Target and slot of the edges that keep a copy, where that is decided already.

    Returns:
        None where some edge cannot connect what its ends chose.
    """
    compute = again = moved = 0.0
    size = state = 0
    kept: dict[tuple[int, int], bool] = {}
    for n, k in enumerate(net.cls):
        o = options[k][assignment[n]]
        compute += o.cost_s - o.recompute_s
        again += o.recompute_s
        size += o.bytes
        if net.nodes[n].cell is None and not net.nodes[n].fan:
            state += o.bytes
    for e in net.edges:
        a = options[net.cls[e.source]][assignment[e.source]].outs[e.port]
        b = options[net.cls[e.target]][assignment[e.target]].ins[e.slot]
        ways = crossings(e.value, a, b, prices, prices.graph)
        if not ways:
            return None
        if copies is not None:
            ways = [w for w in ways if w.kept == ((e.target, e.slot) in copies)] or ways
        way = min(ways, key=lambda w: (w.cost_s + multiplier * w.bytes, w.bytes))
        moved += way.cost_s
        size += way.bytes
        kept[e.target, e.slot] = way.kept
    return Evaluation(compute + again + moved, size, compute, again, moved, state, kept)
