"""Search: meshes, frontiers, and the next plan to try under a memory cap.

For one mesh the frontier is found by a sweep of the multiplier λ of memory over the folded problem: each λ gives an
integral point on the lower convex hull of (memory, time), in which all blocks of a run are alike. Between two
neighbours A and B lie the mixes in which the first k blocks follow B and the rest A; they are priced exactly on the
unfolded network. Under a given cap the frontier is refined and an integer program solved (`autoplan.planner.capped`).
The Lagrangian values of the sweep bound every plan from below:

    time(M) >= max over λ of [ min (time + λ·memory) − λ·M ]                                              (1)

(for folded networks: every plan whose blocks share their boundary placement). The memory of a frontier point leaves
out what is transient; the caller measures emitted code and reports the difference, which `Search.next` adds.
"""

from __future__ import annotations

import copy
import dataclasses
import fnmatch
import itertools
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from autoplan.errors import AutoplanError, InfeasibleError, OptionError
from autoplan.hardware import ClusterSpec
from autoplan.ir import Mesh, OpGraph, Placement, PlanOptions, local_shape
from autoplan.planner.capped import near, refine, solve_capped
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
from autoplan.planner.options import Option
from autoplan.planner.pricing import Prices
from autoplan.rules import FactorTable, analyse
from autoplan.rules.redistribute import Codes, encode
from autoplan_solver import LagrangianPoint, LagrangianSolver, NoSolutionError, dual_bound, sweep

EXACT_VARIABLES = 12_000
"""Unfolded problems up to this size are solved with all their options under the cap."""
UNFOLDED_OPTIONS = 2_000
"""Up to so many options near the frontier, blocks may differ under the cap; above, the integer program is folded."""
GAP = 1e-4
"""Relative distance from the bound at which a plan is good enough."""
AXES = 2
"""Mesh axes of the meshes that are tried; three take minutes, so that they are tried only where the user fixes them."""
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
        copies = tuple(sorted(e for e, kept in self.value.kept.items() if kept))
        return self.mesh.shape, tuple(self.assignment[n] for n in sorted(self.assignment)), copies


@dataclass
class MeshProblem:
    """The joint problem on one mesh with its frontier.

    Attributes:
        prices: Pricing on this mesh.
        network: Folded network.
        options: Options per standing node.
        form: Folded formulation.
        points: Points of the sweep, cheapest first.
        candidates: Frontier points and mixes, and what was found under caps.
        solver: Of the folded formulation, warm.
        rooms: Memory for which this has been refined.
        swept: Points and candidates of the sweep alone.
    """

    prices: Prices
    network: Network
    options: Mapping[int, Sequence[Option]]
    form: Formulation
    solver: LagrangianSolver
    points: list[LagrangianPoint] = field(default_factory=list)
    candidates: list[Candidate] = field(default_factory=list)
    rooms: set[float] = field(default_factory=set)
    swept: tuple[tuple[LagrangianPoint, ...], tuple[Candidate, ...]] = ((), ())

    @property
    def mesh(self) -> Mesh:
        """Devices."""
        return self.prices.mesh

    def afresh(self) -> MeshProblem:
        """As it was after the sweep."""
        return dataclasses.replace(
            self,
            solver=LagrangianSolver(self.form.problem),
            points=list(self.swept[0]),
            candidates=list(self.swept[1]),
            rooms=set(),
        )

    def bound(self, cap_bytes: float) -> float:
        """Equation (1)."""
        return max(0.0, dual_bound(self.points, {MEMORY: cap_bytes})) if self.points else 0.0

    def best(self, room: float) -> Candidate | None:
        """The fastest candidate known that needs no more than `room` bytes."""
        return next((c for c in self.candidates if c.value.bytes <= room), None)

    def improve(self, room: float) -> None:
        """Looks for faster candidates under a cap of `room` bytes, once."""
        if room in self.rooms or self._done(room):
            return
        self.rooms.add(room)
        self.points += refine(self.points, self.solver, room)
        self._add([_candidate(self, decode(self.form, p.x), _price(p)) for p in self.points if p.x is not None])
        self._add(_fitting_mixes(self, room))
        if not self._done(room):
            self._add([self._integer(room)])

    def _done(self, room: float) -> bool:
        best = self.best(room)
        return best is None or best.value.cost_s <= self.bound(room) * (1 + GAP)

    def _add(self, found: Sequence[Candidate | None]) -> None:
        self.candidates = _pareto([*self.candidates, *(c for c in found if c is not None)])

    def _integer(self, room: float) -> Candidate | None:
        """The optimum under the cap: over all options where the unfolded problem is small, else near the frontier."""
        net, flat = self.network, self.network.unfolded()
        if self.form.problem.n_variables * len(flat.nodes) <= EXACT_VARIABLES * len(self.options):
            allowed = {k: list(range(len(mine))) for k, mine in self.options.items()}
            net, gap = flat, 1e-6
        else:
            allowed, gap = near(self.form, self.points), GAP
            if sum(len(allowed[k]) for k in net.cls) <= UNFOLDED_OPTIONS:
                net = flat
        standing = {n: self.network.cls[n] for n in sorted(set(net.cls))}
        own = {n: self.options[k] for n, k in standing.items()}
        found = solve_capped(net, self.prices, own, {n: allowed[k] for n, k in standing.items()}, room, gap)
        return None if found is None else _candidate(self, found[0], copies=found[1])


def mesh_shapes(devices: int, axes: int) -> list[tuple[int, ...]]:
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
    pins = resolve_pins(graph, options.pins, mesh)
    network = build_network(graph, table, make_cells(graph, table.rules), pins=pins)
    choices = node_options(network, prices, pins, remat=options.remat)
    empty = [network.nodes[k].name for k, mine in choices.items() if not mine]
    if empty:
        raise InfeasibleError(f"nothing can be done for {empty[0]} on mesh {mesh}")
    form = formulate(network, prices, choices)
    problem = MeshProblem(prices, network, choices, form, LagrangianSolver(form.problem))
    try:
        points = sweep(form.problem, MEMORY, n_points=POINTS, solver=problem.solver)
        problem.points = [p for p in points if p.x is not None]
    except NoSolutionError as e:
        raise InfeasibleError(f"no placement of the rest fits the pins {dict(options.pins)} on mesh {mesh}") from e
    problem.candidates = _candidates(problem)
    problem.swept = tuple(problem.points), tuple(problem.candidates)
    return problem


def _price(point: LagrangianPoint) -> float:
    return float(point.multipliers.get(MEMORY, 0.0))


def _candidates(problem: MeshProblem) -> list[Candidate]:
    pure: list[tuple[Assignment, float]] = []
    for p in problem.points:
        assert p.x is not None
        pure.append((decode(problem.form, p.x), _price(p)))
    found = [_candidate(problem, a, m) for a, m in pure]
    length = max(problem.network.runs, default=1)
    ks = sorted({max(1, min(length - 1, round(length * i / (MIXES + 1)))) for i in range(1, MIXES + 1)})
    for (fast, _), (small, m) in itertools.pairwise(pure):
        for k in ks if length > 1 else []:
            for rest in (fast, small):
                found.append(_candidate(problem, _mix(problem.network, fast, small, rest, k), m))
    return _pareto([c for c in found if c is not None])


def _fitting_mixes(problem: MeshProblem, room: float) -> list[Candidate | None]:
    """Mixes of the two points around `room` with as few blocks of the smaller one as fit, by bisection."""
    above = [p for p in problem.points if p.resources[MEMORY] > room and p.x is not None]
    below = [p for p in problem.points if p.resources[MEMORY] <= room and p.x is not None]
    length = max(problem.network.runs, default=1)
    if not above or not below or length == 1:
        return []
    a, b = max(above, key=lambda p: p.cost), min(below, key=lambda p: p.cost)
    assert a.x is not None and b.x is not None
    fast, small = decode(problem.form, a.x), decode(problem.form, b.x)
    found: list[Candidate | None] = []
    for rest in (fast, small):
        low, high = 0, length
        while high - low > 1:
            k = (low + high) // 2
            mixed = _candidate(problem, _mix(problem.network, fast, small, rest, k), _price(b))
            found.append(mixed)
            low, high = (low, k) if mixed is not None and mixed.value.bytes <= room else (k, high)
    return found


def _mix(net: Network, fast: Assignment, small: Assignment, rest: Assignment, k: int) -> Assignment:
    """The first k blocks follow `small`, the later ones `fast`, what is in no block `rest`."""
    out = Assignment()
    for n, block in enumerate(net.block):
        out[n] = (rest if block < 0 else small if block < k else fast)[n]
    return out


def _candidate(
    problem: MeshProblem,
    assignment: Assignment,
    multiplier: float = 0.0,
    copies: Collection[tuple[int, int]] | None = None,
) -> Candidate | None:
    value = evaluate(problem.network, problem.prices, problem.form.options, assignment, multiplier, copies)
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
        meshes = [options.mesh] if options.mesh else [Mesh(s) for s in mesh_shapes(cluster.n_devices, AXES)]
        failures: list[AutoplanError] = []
        for i, mesh in enumerate(meshes):
            progress(f"solving mesh {mesh} ({i + 1} of {len(meshes)})")
            try:
                self.problems[mesh.shape] = solve_mesh(graph, self.table, cluster, mesh, options)
            except (InfeasibleError, OptionError) as e:  # pins may fit some meshes only
                failures.append(e)
        if not self.problems:
            raise failures[0]
        self.excess: dict[tuple[int, ...], list[float]] = {}
        self.tried: dict[tuple[object, ...], float] = {}
        self.solve_s = time.perf_counter() - start

    def learn(self, candidate: Candidate, peak_bytes: int) -> None:
        """Takes note of the peak of a candidate's emitted code."""
        self.tried[candidate.key] = peak_bytes
        self.excess.setdefault(candidate.mesh.shape, []).append(peak_bytes - candidate.value.bytes)

    def next(self, cap_bytes: int, faster_than: float = math.inf, *, hopeful: bool = False) -> Candidate | None:
        """The fastest candidate not tried yet that is expected to fit.

        What is transient is expected to be as in the last try on that mesh, or, if `hopeful`, as in the best one.
        """
        start = time.perf_counter()
        rooms = {shape: cap_bytes - self._excess(shape, hopeful) for shape in self.problems}
        best = self._best(rooms, faster_than)
        for shape, problem in sorted(self.problems.items(), key=lambda item: (item[1].bound(rooms[item[0]]), item[0])):
            limit = faster_than if best is None else best.value.cost_s
            if problem.bound(rooms[shape]) < limit:  # else nothing on this mesh can win
                problem.improve(rooms[shape])
                best = self._best(rooms, faster_than)
        self.solve_s += time.perf_counter() - start
        return best

    def _best(self, rooms: Mapping[tuple[int, ...], float], faster_than: float) -> Candidate | None:
        found = [
            c
            for shape, problem in self.problems.items()
            for c in problem.candidates
            if c.key not in self.tried and c.value.bytes <= rooms[shape] and c.value.cost_s < faster_than * (1 - 1e-9)
        ]
        return min(found, key=lambda c: (c.value.cost_s, c.key), default=None)

    def afresh(self) -> Search:
        """The same search as it was before any question was asked of it."""
        new = copy.copy(self)
        new.excess, new.tried = {}, {}
        new.problems = {shape: p.afresh() for shape, p in self.problems.items()}
        return new

    def spread(self, n: int) -> list[Candidate]:
        """Up to `n` candidates not tried yet, from the least memory to the fastest of every mesh.

        What is least without transients need not be so with them.
        """
        each = max(2, n // len(self.problems))
        found: list[Candidate] = []
        for _, problem in sorted(self.problems.items()):
            mine = sorted(problem.candidates, key=lambda c: (c.value.bytes, c.key))
            found += [mine[round(i * (len(mine) - 1) / (each - 1))] for i in range(each)]
        fresh = {c.key: c for c in found if c.key not in self.tried}
        return sorted(fresh.values(), key=lambda c: (c.value.bytes, c.key))[:n]

    def bound(self, cap_bytes: int) -> float:
        """Lower bound of the objective over all meshes under a cap, within the model."""
        return min(p.bound(cap_bytes - self._excess(s)) for s, p in self.problems.items())

    def _excess(self, shape: tuple[int, ...], hopeful: bool = False) -> float:
        known = self.excess.get(shape, [0.0])
        return min(known) if hopeful else known[-1]
