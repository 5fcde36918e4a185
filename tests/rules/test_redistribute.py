"""Redistribution on simulated meshes: every plan that is offered moves the data where it says."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoplan.ir import Mesh, Placement
from autoplan.rules.redistribute import (
    Code,
    Codes,
    collective_count,
    consumer_gradient,
    decode,
    direct_steps,
    divides,
    encode,
    local_numel,
    producer_gradient,
    redistribute,
)
from tests.rules.machine import Array, devices, execute, holds, pair, piece, place

MESHES = [(2,), (4,), (2, 2), (2, 3), (3, 2), (1, 2), (2, 2, 2)]
COLLECTIVES = {"all_gather", "reduce_scatter", "all_reduce", "all_to_all"}


def names(mesh: tuple[int, ...]) -> tuple[str, ...]:
    return tuple(f"x{i}" for i in range(len(mesh)))


def placements(mesh: tuple[int, ...], factor: int) -> tuple[list[Codes], tuple[int, int]]:
    """All placements of a (factor · factor) x (factor) tensor whose axes divide its factors together."""
    sizes = {(0, 1): factor, (0, factor): factor, (1, 1): factor}
    per_axis: list[Code] = ["R", "P", *sizes]
    found = [c for c in itertools.product(per_axis, repeat=len(mesh)) if divides(c, sizes, mesh)]
    return found, (factor * factor, factor)


def tensor(shape: tuple[int, ...], seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape)


def cases(mesh: tuple[int, ...], factor: int) -> list[tuple[Codes, Codes]]:
    found, _ = placements(mesh, factor)
    pairs = list(itertools.product(found, found))
    if len(pairs) > 1000:
        pairs = [pairs[i] for i in np.random.default_rng(1).choice(len(pairs), 1000, replace=False)]
    return pairs


def factors_of(mesh: tuple[int, ...]) -> list[int]:
    """A factor that all axes fit into together, and one into which only single axes fit."""
    return sorted({math.prod(mesh), math.lcm(*mesh)})


ALL = [(mesh, factor) for mesh in MESHES for factor in factors_of(mesh)]


@pytest.mark.parametrize(("mesh", "factor"), ALL)
def test_data_arrives_where_it_is_wanted(mesh: tuple[int, ...], factor: int) -> None:
    x, random = tensor((factor * factor, factor)), np.random.default_rng(0)
    offered = 0
    for have, want in cases(mesh, factor):
        steps = redistribute(x.size, have, want, mesh, names(mesh))
        assert steps is not None, (have, want)
        direct = direct_steps(x.size, have, want, mesh, names(mesh))
        assert direct in (None, steps)
        offered += direct is not None
        state = place(x, have, mesh, random)
        assert holds(state, x, have, mesh)
        for step, axis, payload in steps:
            assert step[1] == names(mesh)[axis]
            before = max(local.size for local in state.values())
            state = execute(state, step, mesh, names(mesh))
            after = max(local.size for local in state.values())
            assert payload == (max(before, after) if step[0] in COLLECTIVES else 0), (have, want, steps)
        assert holds(state, x, want, mesh), (have, want, steps)
        assert {local.size for local in state.values()} == {local_numel(x.size, want, mesh)}
    assert offered > 0


@pytest.mark.parametrize(("mesh", "factor"), ALL)
def test_gradients_are_the_adjoint(mesh: tuple[int, ...], factor: int) -> None:
    """<forward(x), g> = <x, backward(g)> for every gradient placement that a consumer can leave."""
    shape = (factor * factor, factor)
    x, g, random = tensor(shape), tensor(shape, 1), np.random.default_rng(2)
    exact = float(np.sum(x * g))
    for have, want in cases(mesh, factor)[::2]:
        shards = [isinstance(c, tuple) or bool(random.integers(2)) for c in want]
        grad = consumer_gradient(want, shards)
        forward = redistribute(x.size, have, want, mesh, names(mesh))
        backward = redistribute(x.size, grad, producer_gradient(have), mesh, names(mesh))
        assert forward is not None and backward is not None
        value = start = place(x, have, mesh, random)
        for step, _, _ in forward:
            value = execute(value, step, mesh, names(mesh))
        gradient = place(g, grad, mesh, random)
        assert pair(value, want, gradient, grad, mesh) == pytest.approx(exact)
        for step, _, _ in backward:
            gradient = execute(gradient, step, mesh, names(mesh))
        home = producer_gradient(have)
        assert holds(gradient, g, home, mesh)
        assert pair(start, have, gradient, home, mesh) == pytest.approx(exact)


@pytest.mark.parametrize(("mesh", "factor"), ALL)
def test_there_and_back_is_identity(mesh: tuple[int, ...], factor: int) -> None:
    x, random = tensor((factor * factor, factor)), np.random.default_rng(3)
    for have, want in cases(mesh, factor):
        if "P" in have or "P" in want:
            continue
        there = redistribute(x.size, have, want, mesh, names(mesh))
        back = redistribute(x.size, want, have, mesh, names(mesh))
        assert there is not None and back is not None
        state = start = place(x, have, mesh, random)
        for step, _, _ in (*there, *back):
            state = execute(state, step, mesh, names(mesh))
        assert all(np.array_equal(state[at], start[at]) for at in devices(mesh))


@pytest.mark.parametrize(("mesh", "factor"), ALL)
def test_one_axis_at_a_time_is_always_possible(mesh: tuple[int, ...], factor: int) -> None:
    """Gathering the last axis, or sharding it, is never refused: the planner can always go by way of it."""
    found, shape = placements(mesh, factor)
    for have in found:
        whole = (*have[:-1], "R")
        assert direct_steps(math.prod(shape), have, whole, mesh, names(mesh)) is not None
        assert direct_steps(math.prod(shape), whole, have, mesh, names(mesh)) is not None


def test_replicated_to_anything_and_anything_to_replicated() -> None:
    for mesh, factor in ALL:
        found, shape = placements(mesh, factor)
        whole: Codes = ("R",) * len(mesh)
        for codes in found:
            assert direct_steps(math.prod(shape), whole, codes, mesh, names(mesh)) is not None
            assert direct_steps(math.prod(shape), codes, whole, mesh, names(mesh)) is not None


def test_the_earlier_axis_is_more_significant() -> None:
    x = np.arange(8.0)
    mesh = (2, 2)
    pieces = {at: piece(x, ((0, 1), (0, 1)), mesh, at).tolist() for at in devices(mesh)}
    assert pieces == {(0, 0): [0, 1], (0, 1): [2, 3], (1, 0): [4, 5], (1, 1): [6, 7]}


def test_axes_that_swap_a_factor_go_by_way_of_replication() -> None:
    have, want = ((0, 1), "R"), ("R", (0, 1))
    assert direct_steps(16, have, want, (2, 2), ("a", "b")) is None
    steps = redistribute(16, have, want, (2, 2), ("a", "b"))
    assert steps is not None
    assert [s[0][:2] for s in steps] == [("all_gather", "a"), ("slice", "b")]


def test_an_inner_factor_is_cut_within_each_block() -> None:
    x = np.arange(12.0)
    pieces = [piece(x, ((0, 3),), (2,), (i,)).tolist() for i in range(2)]
    assert pieces == [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 10, 11]]


@pytest.mark.parametrize(
    ("have", "want", "kinds"),
    [
        ("R", "R", []),
        ("R", "S(0)", ["slice"]),
        ("R", "P", ["mask"]),
        ("P", "S(1)", ["reduce_scatter"]),
        ("P", "R", ["all_reduce"]),
        ("S(0)", "R", ["all_gather"]),
        ("S(0)", "S(1)", ["all_to_all"]),
        ("S(0)", "S(0:2)", ["all_gather", "slice"]),
        ("P", "P", []),
    ],
)
def test_steps_on_one_axis(have: str, want: str, kinds: list[str]) -> None:
    mesh = Mesh((2,))
    codes = [encode(Placement.parse(p, mesh)) for p in (have, want)]
    steps = redistribute(64, codes[0], codes[1], mesh.shape, mesh.axes)
    assert steps is not None
    assert [s[0][0] for s in steps] == kinds
    assert collective_count(steps) == sum(k not in ("slice", "mask") for k in kinds)


def test_axes_of_one_device_take_no_steps() -> None:
    assert redistribute(64, ("P", (0, 1)), ("R", "R"), (1, 1), ("a", "b")) == ()


def test_what_shrinks_comes_before_what_grows() -> None:
    steps = redistribute(64, ((0, 1), "R", "P"), ("R", (1, 1), (0, 2)), (2, 2, 2), ("a", "b", "c"))
    assert steps is not None
    assert [s[0][0] for s in steps] == ["slice", "reduce_scatter", "all_gather"]


def test_a_shard_becomes_a_summand_only_by_way_of_the_whole() -> None:
    assert direct_steps(64, ((0, 1),), ("P",), (2,), ("a",)) is None
    steps = redistribute(64, ((0, 1),), ("P",), (2,), ("a",))
    assert steps is not None
    assert [s[0][0] for s in steps] == ["all_gather", "mask"]


codes = st.one_of(st.sampled_from(["R", "P"]), st.tuples(st.integers(0, 3), st.integers(1, 12)))


@given(st.lists(codes, min_size=1, max_size=4).map(tuple))
def test_codes_and_placements(placement: Codes) -> None:
    assert encode(decode(placement)) == placement


def test_gradient_placements() -> None:
    assert producer_gradient(("P", "R", (0, 1))) == ("R", "R", (0, 1))
    assert consumer_gradient(("R", "R", "P", (0, 1)), [True, False, False, True]) == ("P", "R", "R", (0, 1))
