"""The grammar of meshes and placements."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoplan.errors import OptionError
from autoplan.ir import PARTIAL, REPLICATE, Mesh, Placement, Shard, TensorSpec, local_shape

AXES = ("dp", "tp", "cp")
meshes = st.lists(st.integers(1, 8), min_size=1, max_size=3).map(lambda s: Mesh(tuple(s), AXES[: len(s)]))
shards = st.builds(Shard, st.integers(0, 9), st.integers(1, 99))
entries = st.one_of(st.just(REPLICATE), st.just(PARTIAL), shards)


def placements(mesh: Mesh) -> st.SearchStrategy[Placement]:
    return st.lists(entries, min_size=mesh.rank, max_size=mesh.rank).map(lambda e: Placement(tuple(e)))


@given(st.data())
def test_a_placement_is_read_as_it_is_written(data: st.DataObject) -> None:
    mesh = data.draw(meshes)
    placement = data.draw(placements(mesh))
    assert Placement.parse(str(placement), mesh) == placement
    assert len(placement) == mesh.rank
    assert tuple(placement) == placement.per_axis


@given(st.data())
def test_named_axes_in_any_order(data: st.DataObject) -> None:
    mesh = data.draw(meshes)
    placement = data.draw(placements(mesh))
    named = [f"{p}@{a}" for p, a in zip(placement, mesh.axes, strict=True)]
    assert Placement.parse(",".join(data.draw(st.permutations(named))), mesh) == placement
    left = [n for n, p in zip(named, placement, strict=True) if p != REPLICATE]
    if left:
        assert Placement.parse(", ".join(left), mesh) == placement


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("R,S(1:3)", (REPLICATE, Shard(1, 3))),
        (" R , S( 1 : 3 ) ", (REPLICATE, Shard(1, 3))),
        ("S(0:1),P", (Shard(0), PARTIAL)),
        ("S(1:3)@tp", (REPLICATE, Shard(1, 3))),
        ("P@tp, S(0)@dp", (Shard(0), PARTIAL)),
    ],
)
def test_examples(text: str, expected: tuple[object, ...]) -> None:
    assert Placement.parse(text, Mesh((2, 4), ("dp", "tp"))).per_axis == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected per mesh axis one of R, P, S"),
        ("R,", "expected per mesh axis"),
        ("X,R", "expected per mesh axis"),
        ("S,R", "expected per mesh axis"),
        ("S(-1),R", "expected per mesh axis"),
        ("S(0:),R", "expected per mesh axis"),
        ("S(0,1),R", "expected per mesh axis"),
        ("r,R", "expected per mesh axis"),
        ("R", r"has 1 entries, the mesh \(dp=2 x tp=4\) has 2 axes"),
        ("R,R,R", "has 3 entries"),
        ("R,S(0)@tp", "names some axes and not others"),
        ("S(0)@pp", "axis 'pp' is not one of dp, tp"),
        ("S(0)@tp,R@tp", "axis 'tp' is repeated"),
        ("S(0:0),R", "outer factor must be at least 1"),
    ],
)
def test_what_a_placement_is_not(text: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Placement.parse(text, Mesh((2, 4), ("dp", "tp")))


def test_kinds_of_placement() -> None:
    assert Placement.replicated(2).is_replicated
    assert not Placement((REPLICATE, PARTIAL)).is_replicated
    assert Placement((REPLICATE, PARTIAL)).has_partial
    assert not Placement((REPLICATE, Shard(0))).has_partial
    assert str(Placement((REPLICATE, Shard(0), Shard(1, 3), PARTIAL))) == "R,S(0),S(1:3),P"


@pytest.mark.parametrize("text", ["2x4", "2,4", "2×4", " 2 x 4 ", (2, 4), [2, 4], Mesh((2, 4))])
def test_meshes_without_names(text: object) -> None:
    assert Mesh.parse(text) == Mesh((2, 4), ("d0", "d1"))  # type: ignore[arg-type]


def test_meshes_with_names() -> None:
    assert Mesh.parse("dp=2, tp=4") == Mesh((2, 4), ("dp", "tp"))
    assert Mesh.parse("ax=3") == Mesh((3,), ("ax",))
    assert Mesh.parse("8") == Mesh((8,))


@given(meshes)
def test_a_mesh_is_read_as_it_is_written(mesh: Mesh) -> None:
    assert Mesh.parse(",".join(f"{a}={n}" for a, n in zip(mesh.axes, mesh.shape, strict=True))) == mesh
    assert Mesh.parse("x".join(map(str, mesh.shape))).shape == mesh.shape
    assert str(mesh) == " x ".join(f"{a}={n}" for a, n in zip(mesh.axes, mesh.shape, strict=True))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not of the form 2x4 or dp=2,tp=4"),
        ("2x", "is not of the form"),
        ("axb", "is not of the form"),
        ("-2", "is not of the form"),
        ("2.5", "is not of the form"),
        ("dp=2,4", "names some axes and not others"),
        ("dp=2,dp=4", "different axis names"),
        ("0x4", "at least one device"),
        ((), "at least one device"),
        ((2, -1), "at least one device"),
        (7, "is not a sequence of sizes"),
        (("a", "b"), "is not a sequence of sizes"),
        (None, "is not a sequence of sizes"),
    ],
)
def test_what_a_mesh_is_not(text: object, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Mesh.parse(text)  # type: ignore[arg-type]


def test_axis_names_must_fit() -> None:
    with pytest.raises(OptionError, match="needs 2 different axis names"):
        Mesh((2, 4), ("dp",))


@given(meshes)
def test_coordinates_count_like_ranks(mesh: Mesh) -> None:
    coordinates = [mesh.coordinate(d) for d in range(mesh.size)]
    assert coordinates == sorted(set(coordinates))
    assert len(coordinates) == mesh.size == math.prod(mesh.shape)


def test_the_last_axis_is_contiguous() -> None:
    assert [Mesh((2, 2)).coordinate(d) for d in range(4)] == [(0, 0), (0, 1), (1, 0), (1, 1)]


@pytest.mark.parametrize(
    ("placement", "expected"),
    [
        ("R,R", (8, 24)),
        ("S(0),R", (4, 24)),
        ("S(0),S(0)", (1, 24)),
        ("S(0),S(1)", (4, 6)),
        ("R,S(1:3)", (8, 6)),
        ("S(1),S(1:2)", (8, 3)),
        ("P,S(1)", (8, 6)),
    ],
)
def test_local_shapes(placement: str, expected: tuple[int, ...]) -> None:
    mesh = Mesh((2, 4))
    assert local_shape((8, 24), Placement.parse(placement, mesh), mesh) == expected


@pytest.mark.parametrize("placement", ["S(2),R", "R,S(1:5)", "R,S(1:24)", "S(0:8),R", "S(0:2),S(0:2)", "S(1:3),S(1)"])
def test_shapes_that_do_not_divide(placement: str) -> None:
    mesh = Mesh((2, 4))
    with pytest.raises(OptionError, match=r"does not divide a tensor of shape \(8, 24\) evenly"):
        local_shape((8, 24), Placement.parse(placement, mesh), mesh)


@given(
    st.lists(st.integers(1, 6), max_size=4), st.sampled_from(["float32", "bfloat16", "int64", "bool"]), st.booleans()
)
def test_tensor_specs(shape: list[int], dtype: str, grad: bool) -> None:
    spec = TensorSpec(tuple(shape), dtype, grad)
    assert TensorSpec.from_json(spec.to_json()) == spec
    assert spec.rank == len(shape)
    assert spec.numel == math.prod(shape)
    assert spec.nbytes == spec.numel * {"float32": 4, "bfloat16": 2, "int64": 8, "bool": 1}[dtype]
    assert spec.is_float == dtype.startswith(("float", "bfloat"))
    assert str(spec) == f"{dtype}[{', '.join(map(str, shape))}]"


def test_unknown_dtypes() -> None:
    from autoplan.errors import AutoplanError

    with pytest.raises(AutoplanError, match="dtype 'float7' is not one of"):
        TensorSpec((1,), "float7")
