"""Dimension factors of whole models, and the table of rules."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from autoplan.errors import AutoplanError
from autoplan.ir import GraphInput, Op, OpGraph, Ref, TensorSpec
from autoplan.rules import FactorTable, OpRule, analyse, known_ops, register_rule, rule_of
from autoplan.rules.rule import group_dims
from autoplan.trace import trace
from tests.trace.models import batch, gpt2, llama


@pytest.fixture(scope="module")
def gpt2_graph() -> OpGraph:
    return trace(gpt2(), batch(rows=4, columns=10)).graph


@pytest.fixture(scope="module")
def llama_graph() -> OpGraph:
    return trace(llama(), batch(rows=4, columns=10)).graph


def factors(graph: OpGraph, table: FactorTable, path: str) -> str:
    value = next(i.value for i in graph.inputs if i.path == path)
    return table.text(value, graph.values[value].rank)


def listing(graph: OpGraph) -> str:
    table = analyse(graph)
    lines = [f"{i.path}: {table.text(i.value, graph.values[i.value].rank)}" for i in graph.inputs]
    for op in graph.ops:
        lines.append(f"{op.key}")
        for c in table.choices[op.key]:
            kind = " P" if c.contracted else ""
            lines.append(
                f"    {c.size}: {', '.join(map(place, c.operands))} -> {', '.join(map(place, c.results))}{kind}"
            )
    return "\n".join(lines)


def place(position: tuple[int, int] | None) -> str:
    return "-" if position is None else f"{position[0]}:{position[1]}"


def test_fused_qkv_of_gpt2_is_three_times_heads_times_channels(gpt2_graph: OpGraph) -> None:
    table = analyse(gpt2_graph)
    for layer in range(2):
        attn = f"transformer.h.{layer}.attn"
        assert factors(gpt2_graph, table, f"{attn}.c_attn.weight") == "(32) x (3*4*8)"
        assert factors(gpt2_graph, table, f"{attn}.c_attn.bias") == "(3*4*8)"
        assert factors(gpt2_graph, table, f"{attn}.c_proj.weight") == "(4*8) x (32)"
    assert factors(gpt2_graph, table, "transformer.h.0.mlp.c_fc.weight") == "(32) x (128)"
    assert factors(gpt2_graph, table, "transformer.wte.weight") == "(61) x (32)"
    assert factors(gpt2_graph, table, "input_ids") == "(4) x (10)"


def test_heads_of_gpt2_are_one_choice_from_the_projection_to_the_output(gpt2_graph: OpGraph) -> None:
    table = analyse(gpt2_graph)
    attn = "transformer.h.0.attn"
    choices = {c.operands: c for c in table.choices[f"{attn}.c_attn:aten.addmm#0"]}
    heads = choices[(0, 3), None, (1, 3)]  # bias, input, weight: the 4 heads within each of q, k and v
    assert (heads.size, heads.results) == (4, ((1, 3),))
    (attention,) = (c for c in table.choices[f"{attn}:aten.scaled_dot_product_attention#0"] if c.size == 4 and
                    c.operands[0] == (1, 1))  # fmt: skip
    assert attention.operands == ((1, 1), (1, 1), (1, 1))
    contracted = [c for c in table.choices[f"{attn}.c_proj:aten.addmm#0"] if c.contracted]
    assert [(c.size, c.operands, c.additive) for c in contracted] == [
        (4, (None, (1, 1), (0, 1)), (0,)),
        (8, (None, (1, 4), (0, 4)), (0,)),
    ]


def test_grouped_heads_of_llama_share_the_factor_of_the_kv_heads(llama_graph: OpGraph) -> None:
    table = analyse(llama_graph)
    attn = "model.layers.1.self_attn"
    assert (
        factors(llama_graph, table, f"{attn}.q_proj.weight") == "(2*2*2*4) x (32)"
    )  # kv heads, heads of each, halves, rest
    assert factors(llama_graph, table, f"{attn}.k_proj.weight") == "(2*2*4) x (32)"
    assert factors(llama_graph, table, f"{attn}.v_proj.weight") == "(2*8) x (32)"
    assert factors(llama_graph, table, f"{attn}.o_proj.weight") == "(32) x (2*2*8)"
    choices = table.choices[f"{attn}:aten.scaled_dot_product_attention#0"]
    assert [(c.size, c.operands) for c in choices] == [
        (4, ((0, 1), (0, 1), (0, 1))),
        (2, ((1, 1), (1, 1), (1, 1))),
    ]


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_choices_of_every_op(name: str, golden: Callable[[str, str], None], request: pytest.FixtureRequest) -> None:
    golden(listing(request.getfixturevalue(f"{name}_graph")), f"factors_{name}.txt")


def test_twelve_layers_have_the_same_factors_layer_by_layer() -> None:
    graph = trace(llama(num_hidden_layers=12), batch(rows=4, columns=10)).graph
    table = analyse(graph)
    layers = [{i.path.split(".", 3)[3]: factors(graph, table, i.path) for i in graph.inputs
               if i.path.startswith(f"model.layers.{n}.")} for n in range(12)]  # fmt: skip
    assert all(layer == layers[0] for layer in layers)
    assert len(layers[0]) == 9


def test_the_analysis_does_not_depend_on_dict_order(llama_graph: OpGraph) -> None:
    table = analyse(llama_graph)
    shuffled = dataclasses.replace(llama_graph, values=dict(reversed(llama_graph.values.items())))
    again = analyse(shuffled)
    assert {v: dict(s) for v, s in again.sizes.items()} == {v: dict(s) for v, s in table.sizes.items()}
    assert again.choices == table.choices
    assert analyse(llama_graph) == table


def single(target: str, *shapes: tuple[int, ...], out: tuple[int, ...], args: tuple[object, ...] = ()) -> OpGraph:
    names = [f"x{i}" for i in range(len(shapes))]
    values = {n: TensorSpec(s, "float32") for n, s in zip(names, shapes, strict=True)}
    op = Op("op", target, (*map(Ref, names), *args), {}, ("y",))  # type: ignore[arg-type]
    inputs = tuple(GraphInput(n, "input", n) for n in names)
    return OpGraph(inputs, (op,), {**values, "y": TensorSpec(out, "float32")}, ("y",))


def test_factors_that_do_not_fit_are_left_out() -> None:
    graph = single("aten.view.default", (4, 6), out=(3, 8), args=((3, 8),))
    table = analyse(graph)
    assert table.text("x0", 2) == "(4) x (6)"  # cuts 8 and 6 form no chain of divisors
    assert table.choices["op"] == ()


def test_an_op_without_a_rule_is_unknown_and_has_no_choices() -> None:
    graph = single("aten.cumsum.default", (4, 6), out=(4, 6), args=(1,))
    rule = rule_of(graph.ops[0], graph)
    assert not rule.known
    assert rule.links == ()
    assert (rule.saved_operands, rule.saved_results) == ((0,), (0,))
    assert analyse(graph).choices["op"] == ()


def test_a_custom_op_does_not_get_the_rule_of_an_op_of_the_same_name() -> None:
    assert rule_of(
        single("aten.relu.default", (4,), out=(4,)).ops[0], single("aten.relu.default", (4,), out=(4,))
    ).known
    graph = single("mylibrary.relu.default", (4,), out=(4,))
    assert not rule_of(graph.ops[0], graph).known


def test_a_rule_for_a_custom_op(monkeypatch: pytest.MonkeyPatch) -> None:
    from autoplan.rules import rule

    monkeypatch.setattr(rule, "_RULES", dict(rule._RULES))
    register_rule("mylibrary::relu")(lambda v: OpRule(pointwise=True))
    graph = single("mylibrary.relu.default", (4,), out=(4,))
    assert rule_of(graph.ops[0], graph) == OpRule(pointwise=True)


def test_a_second_rule_for_an_op_is_an_error() -> None:
    with pytest.raises(AutoplanError, match=r"op 'linear' has a sharding rule already \(autoplan\.rules\.matmul\)"):
        register_rule("linear")(lambda v: OpRule())
    assert "linear" in known_ops()


def test_view_of_another_dtype_is_not_a_reshape() -> None:
    graph = single("aten.view.dtype", (4,), out=(4,), args=("torch.int32",))
    assert not rule_of(graph.ops[0], graph).known


@pytest.mark.parametrize(
    ("before", "after", "groups"),
    [
        ((4, 6), (24,), [((0, 1), (0,))]),
        ((24,), (2, 3, 4), [((0,), (0, 1, 2))]),
        ((4, 6), (4, 2, 3), [((0,), (0,)), ((1,), (1, 2))]),
        ((1, 4, 1), (4,), [((1,), (0,))]),
        ((4, 6), (3, 8), [((0, 1), (0, 1))]),
        ((), (1,), []),
    ],
)
def test_reshapes_in_smallest_groups(
    before: tuple[int, ...], after: tuple[int, ...], groups: list[tuple[tuple[int, ...], tuple[int, ...]]]
) -> None:
    assert group_dims(before, after) == groups
