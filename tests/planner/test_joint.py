"""The joint problem against exhaustive search, against deciding one thing after the other, and against itself."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoplan.hardware import load_cluster
from autoplan.ir import Mesh, OpGraph, PlanOptions, Shard
from autoplan.planner import Search, assemble, mesh_shapes
from autoplan.planner.formulate import MEMORY, decode, evaluate, formulate
from autoplan.planner.network import Network
from autoplan.planner.options import Option
from autoplan.planner.pricing import Prices
from autoplan_solver import LagrangianSolver, dual_bound, solve_integer, sweep, validate
from tests.planner.cases import brute_force, mlp_graph, setting, transformer_graph

CLUSTER = "cpu-gloo"


def optimum(
    net: Network, prices: Prices, options: dict[int, list[Option]], cap: float, backend: str = "highs"
) -> float | None:
    """Least time under a cap by integer programming, or None."""
    flat = net.unfolded()
    own = {n: options[k] for n, k in enumerate(net.cls)}
    form = formulate(flat, prices, own, cap_bytes=cap)
    solution = solve_integer(form.problem, backend=backend, gap=1e-9, time_limit_s=60)
    if solution.x is None:
        return None
    validate(form.problem, solution)
    return solution.objective


@settings(max_examples=6)
@given(
    batch=st.sampled_from([2, 4, 64]),
    width=st.sampled_from([8, 256]),
    hidden=st.sampled_from([16, 512]),
    fraction=st.sampled_from([0.0, 0.15, 0.5, 1.0]),
)
@pytest.mark.parametrize("backend", ["highs", "cbc"])
def test_equals_exhaustive_search(backend: str, batch: int, width: int, hidden: int, fraction: float) -> None:
    graph = mlp_graph(batch, width, hidden)
    net, prices, options = setting(graph, (2,), CLUSTER)
    assert sum(n.cell is not None for n in net.nodes) <= 6
    flat = net.unfolded()
    points = sweep(formulate(net, prices, options).problem, MEMORY)
    least, most = points[-1].resources[MEMORY], points[0].resources[MEMORY]
    cap = math.ceil(least + fraction * (most - least))
    expected = brute_force(flat, prices, {n: options[k] for n, k in enumerate(net.cls)}, cap)
    assert expected is not None
    assert optimum(net, prices, options, cap, backend) == pytest.approx(expected[0], rel=1e-7)


@pytest.mark.parametrize(("kind", "mesh"), [("gpt2", (2, 4)), ("llama", (4,)), ("gpt2", (2, 2))])
def test_points_are_integral_and_exact_on_the_unfolded_network(kind: str, mesh: tuple[int, ...]) -> None:
    graph = transformer_graph(kind, 3)
    net, prices, options = setting(graph, mesh)
    form = formulate(net, prices, options)
    points = sweep(form.problem, MEMORY, n_points=6)
    assert all(p.integral for p in points)
    for p in points:
        assert p.x is not None
        value = evaluate(net, prices, options, decode(form, p.x), p.multipliers.get(MEMORY, 0.0))
        assert value is not None
        price = p.multipliers.get(MEMORY, 0.0)
        assert value.cost_s + price * value.bytes == pytest.approx(p.cost + price * p.resources[MEMORY], rel=1e-7)
        assert dual_bound(points, {MEMORY: value.bytes}) <= value.cost_s * (1 + 1e-9)


def test_folding_loses_nothing_here() -> None:
    """Lagrangian minima of the folded and the unfolded problem of three blocks."""
    graph = transformer_graph("gpt2", 3, width=256, batch=4, sequence=64)
    net, prices, options = setting(graph, (2, 2), CLUSTER)
    flat = net.unfolded()
    own = {n: options[k] for n, k in enumerate(net.cls)}
    folded, unfolded = (LagrangianSolver(formulate(*a).problem) for a in ((net, prices, options), (flat, prices, own)))
    for price in (0.0, 1e-11, 1e-9):
        a, b = folded.solve({MEMORY: price}), unfolded.solve({MEMORY: price})
        assert b.lagrangian <= a.lagrangian * (1 + 1e-9)
        assert b.lagrangian == pytest.approx(a.lagrangian, rel=1e-4)


def sequential(
    graph: OpGraph, net: Network, prices: Prices, options: dict[int, list[Option]], cap: float
) -> float | None:
    """Sharding first, at least time without recomputation; then, for that sharding, recomputation under the cap."""
    kept = {k: [o for o in mine if o.state not in ("R", "L") or o.recompute_s == 0.0] for k, mine in options.items()}
    form = formulate(net, prices, kept)
    point = LagrangianSolver(form.problem).solve({MEMORY: 0.0})
    assert point.x is not None
    chosen = decode(form, point.x)
    fixed = {}
    for k, mine in options.items():
        like = kept[k][chosen[k]]
        same = [
            o
            for o in mine
            if o.ops == like.ops and [x.codes for x in o.outs] == [x.codes for x in like.outs]
            and [x.codes for x in o.ins] == [x.codes for x in like.ins]
            and [x.gradient for x in o.ins] == [x.gradient for x in like.ins]
        ]  # fmt: skip
        fixed[k] = same
    return optimum(net, prices, fixed, cap)


CASES = {
    "gpt2 on 2x2": ("gpt2", (2, 2), "cpu-gloo"),
    "llama on 4": ("llama", (4,), "cpu-gloo"),
    "mlp on 2": ("mlp", (2,), "cpu-gloo"),
}


def gains(case: str, fractions: Sequence[float] = (0.9, 0.6, 0.3)) -> list[float]:
    """Sequential time over joint time under a row of caps where both are feasible; 1 means equal."""
    kind, mesh, cluster = CASES[case]
    graph = mlp_graph(64, 256, 512) if kind == "mlp" else transformer_graph(kind, 1, width=256, batch=8, sequence=64)
    net, prices, options = setting(graph, mesh, cluster)
    points = sweep(formulate(net, prices, options).problem, MEMORY)
    least, most = points[-1].resources[MEMORY], points[0].resources[MEMORY]
    out = []
    for fraction in fractions:
        cap = math.ceil(least + fraction * (most - least))
        joint, after = optimum(net, prices, options, cap), sequential(graph, net, prices, options, cap)
        assert joint is not None
        if after is None:
            continue  # sharding chosen first left no way to fit
        assert joint <= after * (1 + 1e-7)
        out.append(after / joint)
    return out


@pytest.mark.parametrize("case", ["llama on 4", "mlp on 2"])
def test_joint_is_never_worse_than_sequential(case: str) -> None:
    assert all(g >= 1 - 1e-7 for g in gains(case))


def test_joint_is_strictly_better_on_gpt2_2x2() -> None:
    """GPT-2, one block of width 256, 2 x 2 devices: with sharding fixed first, recomputation costs more time.

    (That joint is never worse is checked inside `gains`; what `Search` proposes, in test_capped.py.)
    """
    assert max(gains("gpt2 on 2x2", (0.6,))) > 1.001


def search(graph: OpGraph, devices: int = 4, **options: object) -> Search:
    spec = load_cluster(CLUSTER, devices=devices)
    return Search(graph, spec, PlanOptions(**options))  # type: ignore[arg-type]


def test_more_memory_is_never_slower() -> None:
    found = search(transformer_graph("gpt2", 2, width=256, batch=8, sequence=64), mesh=Mesh((2, 2)))
    sizes = sorted(c.value.bytes for p in found.problems.values() for c in p.candidates)
    caps = np.linspace(sizes[0], sizes[-1], 9)
    times = []
    for cap in caps:
        best = found.next(int(cap))
        assert best is not None and best.value.bytes <= cap
        assert found.bound(int(cap)) <= best.value.cost_s * (1 + 1e-9)
        times.append(best.value.cost_s)
    assert times == sorted(times, reverse=True)
    bounds = [found.bound(int(c)) for c in caps]
    assert bounds == sorted(bounds, reverse=True)


def test_learning_the_true_peak_moves_the_limit() -> None:
    found = search(transformer_graph("gpt2", 2, width=256, batch=8, sequence=64), mesh=Mesh((2, 2)))
    first = found.next(10**12)
    assert first is not None
    found.learn(first, first.value.bytes + 10**9)
    second = found.next(first.value.bytes + 10**9 - 1)
    assert second is not None and second.key != first.key and second.value.bytes < first.value.bytes


def test_heads_of_a_fused_projection_are_sharded() -> None:
    """Pinning the fused QKV weight by heads makes attention run on a part of the heads; nothing names the strategy."""
    graph = transformer_graph("gpt2", 1, batch=1)  # one sample: there is no batch to divide
    spec = load_cluster("a100-8x", devices=4)
    pins = {"*.c_attn.weight": "S(1:3)", "*.c_attn.bias": "S(0:3)"}
    found = Search(graph, spec, PlanOptions(mesh=Mesh((4,)), pins=pins))
    best = found.next(10**15)
    assert best is not None
    made = assemble(found, best, cap_bytes=10**15)
    (attention,) = (o for k, o in made.ops.items() if "scaled_dot_product" in k)
    assert all(p[0] == Shard(1) for p in attention.operands)


def test_tight_memory_shards_parameters_and_gathers_them_where_used() -> None:
    graph = transformer_graph("gpt2", 2)
    found = Search(graph, load_cluster("a100-8x", devices=4), PlanOptions(mesh=Mesh((4,))))
    least = found.spread(2)[0]
    made = assemble(found, least, cap_bytes=10**15)
    stored = {k: p for k, p in made.inputs.items() if k.endswith("weight")}
    assert all(isinstance(p[0], Shard) for p in stored.values())
    gathered = 0
    for op in graph.ops:
        for v, want in zip(op.inputs, made.ops[op.key].operands, strict=True):
            given = graph.input_of.get(v)
            if given is not None and given.kind == "parameter":
                gathered += not isinstance(want[0], Shard)
    assert gathered > 0


def test_norms_run_on_a_part_of_the_sequence_somewhere() -> None:
    found = search(transformer_graph("gpt2", 1, batch=2), mesh=Mesh((4,)))
    plans = [assemble(found, c, cap_bytes=10**15) for p in found.problems.values() for c in p.candidates]
    assert any(o.operands[0][0] == Shard(1) for p in plans for k, o in p.ops.items() if "layer_norm" in k)


def test_the_same_input_gives_the_same_plan() -> None:
    hashes = set()
    for _ in range(2):
        found = search(transformer_graph("llama", 2, width=256, batch=4, sequence=32), mesh=Mesh((2, 2)))
        best = found.next(10**15)
        assert best is not None
        hashes.add(assemble(found, best, cap_bytes=10**15).hash)
    assert len(hashes) == 1


def test_meshes_of_a_device_count() -> None:
    assert mesh_shapes(1, 3) == [(1,)]
    assert mesh_shapes(7, 3) == [(7,)]
    assert mesh_shapes(8, 2) == [(8,), (2, 4), (4, 2)]
    assert (2, 2, 2) in mesh_shapes(8, 3)


def test_evaluation_says_what_cannot_be() -> None:
    graph = mlp_graph()
    net, prices, options = setting(graph, (2,), CLUSTER)
    freed = {n: next((i for i, o in enumerate(options[n]) if o.state == "F"), 0) for n in range(len(net.nodes))}
    freed = {n: freed[n] for n in sorted(freed)}
    value = evaluate(net, prices, options, freed)
    kept = {n: next((i for i, o in enumerate(options[n]) if o.state in ("K", "")), 0) for n in freed}
    assert evaluate(net, prices, options, kept) is not None
    assert value is None  # the loss's backward reads what was freed
