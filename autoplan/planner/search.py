"""Search: meshes, frontiers, and the next plan to try under a memory cap.

For one mesh the frontier is found by a sweep of the multiplier λ of memory over the folded problem: each λ gives an
integral point on the lower convex hull of (memory, time), in which all blocks of a run are alike. Between two
neighbours A and B lie the mixes in which the first k blocks follow B and the rest A; they are priced exactly on the
unfolded network. The Lagrangian values of the sweep bound every plan from below:

    time(M) >= max over λ of [ min (time + λ·memory) − λ·M ]                                              (1)

(for folded networks: every plan whose blocks share their boundary placement). The memory of a frontier point leaves
out what is transient; the caller measures emitted code and reports the difference, which `Search.next` adds.
"""

from __future__ import annotations

import fnmatch
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from autoplan.errors import AutoplanError, InfeasibleError, OptionError
from autoplan.hardware import ClusterSpec
from autoplan.ir import Mesh, OpGraph, Placement, PlanOptions, local_shape
from autoplan.planner.cells import make_cells
from autoplan.planner.formulate import (
    MEMORY,
    Assignment,
    Evaluation,
    Formulation,
    decode,
    evaluate,
    formulate,
    node_options,
)
from autoplan.planner.network import Network, build_network
from autoplan.planner.pricing import Prices
from autoplan.rules import FactorTable, analyse
from autoplan.rules.redistribute import Codes, encode
from autoplan_solver import LagrangianPoint, NoSolutionError, dual_bound, solve_integer, sweep

EXACT_VARIABLES = 12_000
"""Unfolded problems up to this size are also solved exactly under the cap."""
POINTS = 10
MIXES = 6


@dataclass(frozen=True)
class Candidate:
    """A plan as the search sees it.

    Attributes:
        mesh: Devices.
        assignment: Option per node.
        value: What it costs.
    """

    mesh: Mesh
    assignment: Assignment
    value: Evaluation

    @property
    def key(self) -> tuple[object, ...]:
        """Identity, also a deterministic order among equals."""
        return self.mesh.shape, tuple(self.assignment[n] for n in sorted(self.assignment))


@dataclass
class MeshProblem:
    """The joint problem on one mesh with its frontier.

    Attributes:
        prices: Pricing on this mesh.
        network: Folded network.
        options: Options per standing node.
        form: Folded formulation.
        points: Points of the sweep, cheapest first.
        candidates: Frontier points and mixes.
    """

    prices: Prices
    network: Network
    options: Mapping[int, Sequence[object]]
    form: Formulation
    points: list[LagrangianPoint] = field(default_factory=list)
    candidates: list[Candidate] = field(default_factory=list)

    @property
    def mesh(self) -> Mesh:
        """Devices."""
        return self.prices.mesh

    def bound(self, cap_bytes: float) -> float:
        """Equation (1)."""
        return max(0.0, dual_bound(self.points, {MEMORY: cap_bytes})) if self.points else 0.0


def mesh_shapes(devices: int, axes: int = 3) -> list[tuple[int, ...]]:
    """Meshes of a device count, of one to `axes` axes, fewest axes first."""
    if devices == 1:
        return [(1,)]
    out: list[tuple[int, ...]] = []
    for rank in range(1, axes + 1):
        divisors = [d for d in range(2, devices + 1) if devices % d == 0]
        out += [s for s in itertools.product(divisors, repeat=rank) if math.prod(s) == devices]
    return out


def resolve_pins(graph: OpGraph, pins: Mapping[str, str], mesh: Mesh) -> dict[str, Codes]:
    """Placements of graph inputs by path; later globs win.

    Raises:
        OptionError: A glob that matches nothing, a malformed placement, one that does not divide, or a partial one.
    """
    names = {n: i for i in graph.inputs for n in (i.path, *i.aliases)}
    out: dict[str, Codes] = {}
    for glob, text in pins.items():
        matches = [n for n in names if fnmatch.fnmatchcase(n, glob)]
        if not matches:
            raise OptionError(
                f"pin {glob!r} matches no parameter or input; there are {', '.join(list(names)[:6])}, ..."
            )
        placement = Placement.parse(text, mesh)
        if placement.has_partial:
            raise OptionError(f"pin {glob}={text}: a stored tensor cannot be partial")
        for name in matches:
            given = names[name]
            try:
                local_shape(graph.values[given.value].shape, placement, mesh)
            except OptionError as e:
                raise OptionError(f"pin {glob}={text} on {name}: {e}") from e
            out[given.path] = encode(placement)
    return out


def solve_mesh(
    graph: OpGraph, table: FactorTable, cluster: ClusterSpec, mesh: Mesh, options: PlanOptions
) -> MeshProblem:
    """Formulates and sweeps one mesh.

    Raises:
        InfeasibleError: Nothing satisfies the pins.
    """
    prices = Prices(graph, table, cluster, mesh, options.optimizer)
    network = build_network(graph, table, make_cells(graph, table.rules))
    pins = resolve_pins(graph, options.pins, mesh)
    choices = node_options(network, prices, pins, remat=options.remat)
    empty = [network.nodes[k].name for k, mine in choices.items() if not mine]
    if empty:
        raise InfeasibleError(f"nothing can be done for {empty[0]} on mesh {mesh}")
    form = formulate(network, prices, choices)
    problem = MeshProblem(prices, network, choices, form)
    try:
        problem.points = [p for p in sweep(form.problem, MEMORY, n_points=POINTS) if p.x is not None]
    except NoSolutionError as e:
        raise InfeasibleError(f"no placement of the rest fits the pins {dict(options.pins)} on mesh {mesh}") from e
    problem.candidates = _candidates(problem)
    return problem


def _candidates(problem: MeshProblem) -> list[Candidate]:
    pure: list[tuple[Assignment, float]] = []
    for p in problem.points:
        assert p.x is not None
        pure.append((decode(problem.form, p.x), float(p.multipliers.get(MEMORY, 0.0))))
    found = [_candidate(problem, a, m) for a, m in pure]
    length = max(problem.network.runs, default=1)
    ks = sorted({max(1, min(length - 1, round(length * i / (MIXES + 1)))) for i in range(1, MIXES + 1)})
    for (fast, _), (small, m) in itertools.pairwise(pure):
        for k in ks if length > 1 else []:
            for rest in (fast, small):
                found.append(_candidate(problem, _mix(problem.network, fast, small, rest, k), m))
    unique = {c.key: c for c in found if c is not None}
    return _pareto(list(unique.values()))


def _mix(net: Network, fast: Assignment, small: Assignment, rest: Assignment, k: int) -> Assignment:
    """The first k blocks follow `small`, the later ones `fast`, what is in no block `rest`."""
    out = Assignment()
    for n, block in enumerate(net.block):
        out[n] = (rest if block < 0 else small if block < k else fast)[n]
    return out


def _candidate(problem: MeshProblem, assignment: Assignment, multiplier: float) -> Candidate | None:
    value = evaluate(problem.network, problem.prices, problem.form.options, assignment, multiplier)
    return None if value is None else Candidate(problem.mesh, assignment, value)


def _pareto(candidates: list[Candidate]) -> list[Candidate]:
    """Those that no other beats in both time and memory, fastest first."""
    out: list[Candidate] = []
    for c in sorted(candidates, key=lambda c: (c.value.cost_s, c.value.bytes, c.key)):
        if not out or c.value.bytes < out[-1].value.bytes:
            out.append(c)
    return out


class Search:
    """Proposes plans, fastest first, under what is known of their true memory.

    Attributes:
        graph: The forward graph.
        table: Its factors.
        problems: Per mesh shape.
        solve_s: Seconds spent so far.
    """

    def __init__(
        self,
        graph: OpGraph,
        cluster: ClusterSpec,
        options: PlanOptions,
        *,
        progress: Callable[[str], None] = lambda phase: None,
    ) -> None:
        start = time.perf_counter()
        self.graph, self.cluster, self.options = graph, cluster, options
        progress("analysing factors")
        self.table = analyse(graph)
        self.problems: dict[tuple[int, ...], MeshProblem] = {}
        meshes = [options.mesh] if options.mesh else [Mesh(s) for s in _shapes(cluster.n_devices, graph)]
        failures: list[AutoplanError] = []
        for i, mesh in enumerate(meshes):
            progress(f"solving mesh {mesh} ({i + 1} of {len(meshes)})")
            try:
                self.problems[mesh.shape] = solve_mesh(graph, self.table, cluster, mesh, options)
            except (InfeasibleError, OptionError) as e:  # pins may fit some meshes only
                failures.append(e)
        if not self.problems:
            raise failures[0]
        self.excess: dict[tuple[int, ...], float] = {}
        self.tried: dict[tuple[object, ...], float] = {}
        self.solve_s = time.perf_counter() - start

    def learn(self, candidate: Candidate, peak_bytes: int) -> None:
        """Takes note of the peak of a candidate's emitted code."""
        self.tried[candidate.key] = peak_bytes
        self.excess[candidate.mesh.shape] = peak_bytes - candidate.value.bytes

    def next(self, cap_bytes: int, faster_than: float = math.inf) -> Candidate | None:
        """The fastest candidate not tried yet that is expected to fit."""
        start = time.perf_counter()
        best: Candidate | None = None
        for shape, problem in self.problems.items():
            room = cap_bytes - self.excess.get(shape, 0.0)
            for c in (*self._exact(problem, room), *problem.candidates):
                if c.key in self.tried or c.value.bytes > room or c.value.cost_s >= faster_than * (1 - 1e-9):
                    continue
                if best is None or (c.value.cost_s, c.key) < (best.value.cost_s, best.key):
                    best = c
        self.solve_s += time.perf_counter() - start
        return best

    def smallest(self) -> list[Candidate]:
        """Per mesh the candidate of least memory, least of all first."""
        return sorted(
            (min(p.candidates, key=lambda c: c.value.bytes) for p in self.problems.values()),
            key=lambda c: (c.value.bytes, c.key),
        )

    def bound(self, cap_bytes: int) -> float:
        """Lower bound of the objective over all meshes under a cap, within the model."""
        return min(p.bound(cap_bytes - self.excess.get(s, 0.0)) for s, p in self.problems.items())

    def _exact(self, problem: MeshProblem, room: float) -> list[Candidate]:
        """The optimum under the cap, where the unfolded problem is small and (1) leaves a gap."""
        fitting = [c for c in problem.candidates if c.value.bytes <= room]
        if not fitting or fitting[0].value.cost_s <= problem.bound(room) * (1 + 1e-4):
            return []
        flat = problem.network.unfolded()
        if problem.form.problem.n_variables * max(1, len(flat.nodes)) > EXACT_VARIABLES * len(problem.options):
            return []
        options = {n: problem.form.options[k] for n, k in enumerate(problem.network.cls)}
        form = formulate(flat, problem.prices, options, cap_bytes=room)
        solution = solve_integer(form.problem, backend="highs", gap=1e-6, time_limit_s=20.0)
        if solution.x is None:
            return []
        found = _candidate(problem, decode(form, solution.x), self._price_of_memory(problem, room))
        return [found] if found is not None and found.value.bytes <= room else []

    @staticmethod
    def _price_of_memory(problem: MeshProblem, room: float) -> float:
        fitting = [p for p in problem.points if p.resources[MEMORY] <= room]
        return float(fitting[0].multipliers.get(MEMORY, 0.0)) if fitting else 0.0


def _shapes(devices: int, graph: OpGraph) -> list[tuple[int, ...]]:
    """Meshes to try: up to two axes, three from 16 devices on where that is cheap enough."""
    shapes = mesh_shapes(devices, 2)
    return shapes
