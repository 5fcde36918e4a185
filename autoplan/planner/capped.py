"""The best plan under a cap, near the frontier.

The frontier holds points whose cap happens to be their own memory; between two of them there are plans that no
multiplier finds. Two steps reach most of them:

* `refine` sharpens the frontier at the cap: the chord of the two points around it gives the next multiplier, until
  that chord is an edge of the hull. The bound (1) of `autoplan.planner.search` is then the best that any multiplier
  gives.
* `solve_capped` solves the integer program under the cap over the options whose sharding some point of the frontier
  uses, in every state. A few hundred variables are left, which takes hundredths of a second. The fastest point's
  sharding is among them, so (on an unfolded network, within the gap) the result is not slower than the best
  recomputation for that sharding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from autoplan.planner.formulate import MEMORY, Assignment, Formulation, decode, decode_kept, formulate
from autoplan.planner.network import Network
from autoplan.planner.options import Option
from autoplan.planner.pricing import Prices
from autoplan_solver import LagrangianPoint, LagrangianSolver, solve_integer

REFINEMENTS = 8
TIME_LIMIT_S = 20.0
"""A guard only: a run that it cuts short is not repeatable."""


def refine(points: Sequence[LagrangianPoint], solver: LagrangianSolver, room: float) -> list[LagrangianPoint]:
    """New points of the frontier around `room` bytes, where there are any."""
    known = [p for p in points if p.x is not None]
    found: list[LagrangianPoint] = []
    for _ in range(REFINEMENTS):
        above = [p for p in (*known, *found) if p.resources[MEMORY] > room]
        below = [p for p in (*known, *found) if p.resources[MEMORY] <= room]
        if not above or not below:
            break
        a = min(above, key=lambda p: (-p.cost, p.resources[MEMORY]))
        b = min(below, key=lambda p: (p.cost, p.resources[MEMORY]))
        if b.cost <= a.cost:
            break
        price = (b.cost - a.cost) / (a.resources[MEMORY] - b.resources[MEMORY])
        point = solver.solve({MEMORY: price})
        if point.x is None:
            break
        found.append(point)
        if point.lagrangian >= (a.cost + price * a.resources[MEMORY]) * (1 - 1e-9):
            break
    return found


def near(form: Formulation, points: Sequence[LagrangianPoint]) -> dict[int, list[int]]:
    """Per node the indices of the options that are sharded as in one of the points."""
    out: dict[int, list[int]] = {}
    for k, mine in form.options.items():
        used = set()
        for p in points:
            if p.x is not None:
                used.add(_sharding(mine[int(np.argmax(p.x[form.x[k] : form.x[k] + len(mine)]))]))
        out[k] = [i for i, o in enumerate(mine) if _sharding(o) in used]
    return out


def solve_capped(
    net: Network,
    prices: Prices,
    options: Mapping[int, Sequence[Option]],
    allowed: Mapping[int, Sequence[int]],
    room: float,
    gap: float = 1e-6,
) -> tuple[Assignment, frozenset[tuple[int, int]]] | None:
    """The fastest assignment under `room` bytes and the copies it keeps, or None.

    Args:
        net: Folded or not.
        prices: Prices on its mesh.
        options: Per node that stands for itself.
        allowed: Per such node the indices of the options to choose from.
        room: Cap in bytes.
        gap: Relative gap to stop at.
    """
    form = formulate(net, prices, {k: [mine[i] for i in allowed[k]] for k, mine in options.items()}, cap_bytes=room)
    solution = solve_integer(form.problem, backend="highs", gap=gap, time_limit_s=TIME_LIMIT_S)
    if solution.x is None:
        return None
    picked = decode(form, solution.x)
    return Assignment({n: allowed[net.cls[n]][i] for n, i in picked.items()}), decode_kept(form, solution.x)


def _sharding(option: Option) -> tuple[object, ...]:
    """What remains of an option without its state."""
    return (
        option.ops,
        tuple((o.codes, o.gradient) for o in option.outs),
        tuple((i.codes, i.gradient) for i in option.ins),
    )
