"""`OpGraph`: JSON, what it checks, and its fingerprint."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoplan.errors import AutoplanError
from autoplan.ir import Arg, GraphInput, Op, OpGraph, Ref, TensorSpec

F = TensorSpec((2, 3), "float32", True)


def graph() -> OpGraph:
    return OpGraph(
        inputs=(GraphInput("w", "parameter", "lin.weight", ("tied.weight",)), GraphInput("x", "input", "x")),
        ops=(
            Op(
                "lin:aten.mul#0", "aten.mul.Tensor", (Ref("x"), Ref("w")), {}, ("a",), "lin", "m.py:3 in forward: x * w"
            ),
            Op(":aten.cat#0", "aten.cat.default", ((Ref("a"), Ref("x"), Ref("a")), -1), {}, ("b",)),
            Op(":aten.split#0", "aten.split.Tensor", (Ref("b"), 3, 1), {}, ("c", "d", "e")),
            Op(":aten.f#0", "aten.f.default", (Ref("c"),), {"other": Ref("w"), "mode": "sum", "eps": None}, ("f",)),
        ),
        values={n: F for n in "wxacdef"} | {"b": TensorSpec((2, 9), "float32", True)},
        outputs=("f", "d"),
        loss=0,
        name="Small",
    )


def test_round_trip() -> None:
    g = graph().verify()
    text = json.dumps(g.to_json())
    assert OpGraph.from_json(json.loads(text)) == g
    assert OpGraph.from_json(json.loads(text)).fingerprint == g.fingerprint


args: st.SearchStrategy[Arg] = st.recursive(
    st.one_of(
        st.just(Ref("x")), st.integers(-(2**63), 2**63 - 1), st.booleans(), st.none(), st.text(max_size=9),
        st.floats(allow_nan=False),
    ),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=6,
)  # fmt: skip


@given(st.lists(args, max_size=4).map(tuple), st.dictionaries(st.text(max_size=4), args, max_size=2))
def test_any_argument_survives_json(positional: tuple[Arg, ...], named: dict[str, Arg]) -> None:
    op = Op("k", "aten.f.default", positional, named, ("y",))
    g = OpGraph((GraphInput("x", "input", "x"),), (op,), {"x": F, "y": F}, ("y",))
    again = OpGraph.from_json(json.loads(json.dumps(g.to_json(), allow_nan=False)))
    assert again == g
    assert str(again) == str(g)


def test_nan_survives_json() -> None:
    op = Op("k", "aten.f.default", (math.nan, math.inf, -math.inf), {}, ("y",))
    g = OpGraph((), (op,), {"y": F}, ("y",))
    back = OpGraph.from_json(json.loads(json.dumps(g.to_json(), allow_nan=False))).ops[0].args
    assert math.isnan(back[0])  # type: ignore[arg-type]
    assert back[1:] == (math.inf, -math.inf)


def test_integers_and_booleans_stay_what_they_are() -> None:
    op = Op("k", "aten.f.default", (1, True, 1.0), {}, ("y",))
    g = OpGraph((), (op,), {"y": F}, ("y",))
    assert [type(a) for a in OpGraph.from_json(json.loads(json.dumps(g.to_json()))).ops[0].args] == [int, bool, float]


def test_lookups() -> None:
    g = graph()
    assert [op.inputs for op in g.ops] == [("x", "w"), ("a", "x"), ("b",), ("c", "w")]
    assert [op.name for op in g.ops] == ["mul", "cat", "split", "f"]
    assert g.producer["d"] is g.ops[2]
    assert "x" not in g.producer
    assert [op.key for op in g.consumers["w"]] == ["lin:aten.mul#0", ":aten.f#0"]
    assert g.consumers["f"] == ()
    assert g.input_of["w"].path == "lin.weight"
    assert g.ops[3].arg(1, "other") == Ref("w")
    assert g.ops[3].arg(7, "missing", 5) == 5
    assert g.ops[2].arg(1, "size") == 3


def test_text() -> None:
    assert str(graph().ops[1]) == "%b = aten.cat.default([%a, %x, %a], -1)"
    assert str(graph()).splitlines()[0] == "parameter %w: float32[2, 3]  # lin.weight"
    assert str(graph()).splitlines()[-1] == "return %f, %d"


def changed(index: int, **changes: object) -> OpGraph:
    g = graph()
    ops = list(g.ops)
    ops[index] = dataclasses.replace(ops[index], **changes)
    return dataclasses.replace(g, ops=tuple(ops))


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (changed(0, args=(Ref("x"), Ref("nowhere"))), r"graph Small: op lin:aten.mul#0 .* uses \['nowhere'\]"),
        (changed(0, args=(Ref("f"),)), r"uses \['f'\]"),
        (changed(1, key="lin:aten.mul#0"), "a repeated name"),
        (changed(1, outputs=("a",)), "a repeated name"),
        (changed(1, outputs=("x",)), "a repeated name"),
        (dataclasses.replace(graph(), outputs=("nowhere",)), r"no spec or no producer for \['nowhere'\]"),
        (dataclasses.replace(graph(), values={n: F for n in "wxacdf"} | {"b": F}), r"no spec .* \['e'\]"),
    ],
)
def test_broken_graphs(broken: OpGraph, message: str) -> None:
    with pytest.raises(AutoplanError, match=message):
        broken.verify()
    with pytest.raises(AutoplanError, match=message):
        OpGraph.from_json(broken.to_json())


def test_another_format() -> None:
    with pytest.raises(AutoplanError, match="graph format 99 is not 1"):
        OpGraph.from_json({**graph().to_json(), "format": 99})


def test_the_fingerprint_is_stable() -> None:
    assert graph().fingerprint == "cfa69b783199e810"  # a change makes every plan that was saved unusable


def test_the_fingerprint_ignores_names_for_people() -> None:
    assert dataclasses.replace(graph(), name="Other").fingerprint == graph().fingerprint
    assert changed(0, source="m.py:4 in forward: x*w").fingerprint == graph().fingerprint
    values = dict(reversed(graph().values.items()))
    assert dataclasses.replace(graph(), values=values).fingerprint == graph().fingerprint


def test_the_fingerprint_sees_everything_else() -> None:
    others = [
        changed(2, args=(Ref("b"), 3, -1)),
        changed(0, key="other"),
        changed(0, module="other"),
        dataclasses.replace(graph(), loss=None),
        dataclasses.replace(graph(), outputs=("f",)),
        dataclasses.replace(graph(), values={**graph().values, "f": TensorSpec((2, 3), "float64", True)}),
        dataclasses.replace(graph(), values={**graph().values, "f": TensorSpec((2, 3), "float32")}),
        dataclasses.replace(graph(), inputs=tuple(reversed(graph().inputs))),
    ]
    assert len({g.fingerprint for g in [graph(), *others]}) == len(others) + 1
