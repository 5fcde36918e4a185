"""Random small chains with edge marginals, for hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st

from autoplan_solver import Problem
from autoplan_solver.testing import chain_problem

_SMALL = st.integers(0, 9).map(float)


@st.composite
def chains(draw: st.DrawFn, *, max_cells: int = 4, max_options: int = 3, triangle: bool = False) -> Problem:
    """A chain (or a chain with one extra edge that closes a cycle) of cells with 1 to ``max_options`` options."""
    sizes = draw(st.lists(st.integers(1, max_options), min_size=3 if triangle else 1, max_size=max_cells))
    costs = [draw(st.lists(_SMALL, min_size=k, max_size=k)) for k in sizes]
    memory = [draw(st.lists(_SMALL, min_size=k, max_size=k)) for k in sizes]
    edges = [(c, c + 1) for c in range(len(sizes) - 1)] + ([(0, len(sizes) - 1)] if triangle else [])
    switch = [[[draw(_SMALL) for _ in range(sizes[v])] for _ in range(sizes[u])] for u, v in edges]
    problem = chain_problem(costs, memory, lambda e, a, b: switch[e][a][b], edges=edges)
    low, high = sum(map(min, memory)), sum(map(max, memory))
    return problem.with_caps(memory=draw(st.integers(int(low) - 1, int(high) + 1)))
