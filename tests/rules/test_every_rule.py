"""Every rule is true of its op: sharding it along any of its factors computes what the whole op computes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from autoplan.rules import analyse, known_ops
from tests.rules.cases import CASES
from tests.rules.simulate import cut, graph_of, join, operand_pieces, run_sharded, with_cuts
from tests.trace.interpret import run_op

NOT_IN_ATEN = {"logsigmoid", "softsign"}  # python functions that reach the graph as other ops
TOLERANCE = {"rtol": 1e-10, "atol": 1e-10}


def test_every_rule_has_a_case() -> None:
    assert set(known_ops()) - set(CASES) == NOT_IN_ATEN
    assert set(CASES) <= set(known_ops())


def factors(n: int) -> st.SearchStrategy[list[int]]:
    options = {1: [[1]], 2: [[2]], 3: [[3]], 4: [[2, 2], [4]], 5: [[5]], 6: [[2, 3], [3, 2], [6]]}
    return st.sampled_from(options.get(n, [[n]]))


def close(mine: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE if expected.dtype == torch.float64 else {"rtol": 1e-6, "atol": 1e-6}
    torch.testing.assert_close(mine, expected, **tolerance)


@pytest.mark.parametrize("name", sorted(CASES))
@settings(max_examples=30)
@given(data=st.data())
def test_sharded_along_any_factor(name: str, data: st.DataObject) -> None:
    target, args, kwargs = data.draw(st.sampled_from(CASES[name]))(data.draw)
    plain, env = graph_of(target, args, kwargs)
    cuts = {v: [f for d in plain.values[v].shape for f in data.draw(factors(d))] for v in env}
    graph = with_cuts(plain, cuts)
    op = graph.ops[0]
    table = analyse(graph)
    whole = run_op(op, env)
    rule = table.rules[op.key]
    if rule.linear:
        check_linear(op, env, whole)
    for choice in table.choices[op.key]:
        for n in {d for d in range(2, choice.size + 1) if choice.size % d == 0}:
            check_choice(op, graph, choice, env, whole, n)


def check_linear(op: Any, env: dict[str, Tensor], whole: list[Tensor]) -> None:
    """Summands of the operands give summands of the results."""
    first = {k: x.detach() * torch.rand((), dtype=torch.float64) for k, x in env.items()}
    second = {k: x.detach() - first[k] for k, x in env.items()}
    if any(not x.is_floating_point() for x in env.values()):
        return
    for a, b, w in zip(run_op(op, first), run_op(op, second), whole, strict=True):
        torch.testing.assert_close(a + b, w.detach(), rtol=1e-6, atol=1e-6)


def check_choice(op: Any, graph: Any, choice: Any, env: dict[str, Tensor], whole: list[Tensor], n: int) -> None:
    leaves = [{k: x.detach().requires_grad_(x.requires_grad) for k, x in d.items()}
              for d in operand_pieces(op, choice, env, n)]  # fmt: skip
    local = run_sharded(op, graph, choice, leaves)
    for i, (position, expected) in enumerate(zip(choice.results, whole, strict=True)):
        parts = [results[i] for results in local]
        close(join(parts, position) if position is not None else sum(parts[1:], parts[0]), expected)
    check_gradients(op, choice, env, whole, leaves, local)


def check_gradients(
    op: Any, choice: Any, env: dict[str, Tensor], whole: list[Tensor], leaves: list[dict[str, Tensor]],
    local: list[list[Tensor]],
) -> None:  # fmt: skip
    """Sharded operands get their piece of the gradient, replicated ones a summand, summands the whole."""
    n = len(leaves)
    names = [v for v in op.inputs if env[v].requires_grad]
    used = [i for i, w in enumerate(whole) if w.requires_grad]
    if not names or not used:
        return
    g = [torch.rand_like(w) for w in whole]
    expected = torch.autograd.grad([whole[i] for i in used], [env[v] for v in names], [g[i] for i in used],
                                   allow_unused=True, retain_graph=True)  # fmt: skip
    pieces = [cut(x, p, n) if p is not None else [x] * n for x, p in zip(g, choice.results, strict=True)]
    mine = [
        torch.autograd.grad([local[r][i] for i in used], [leaves[r][v] for v in names], [pieces[i][r] for i in used],
                            allow_unused=True)
        for r in range(n)
    ]  # fmt: skip
    for j, name in enumerate(names):
        if expected[j] is None:
            assert all(m[j] is None for m in mine)
            continue
        index = op.inputs.index(name)
        position = choice.operands[index]
        parts = [m[j] for m in mine]
        if index in choice.additive:
            for part in parts:
                close(part, expected[j])
        elif position is None:
            close(sum(parts[1:], parts[0]), expected[j])
        else:
            close(join(parts, position), expected[j])


def memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


@pytest.mark.parametrize("name", sorted(set(CASES) - {"scaled_dot_product_attention"}))
@settings(max_examples=10)
@given(data=st.data())
def test_backward_reads_no_more_than_the_rule_says(name: str, data: st.DataObject) -> None:
    """Attention is left out: its rule speaks of the fused kernel, whatever kernel this machine takes."""
    graph, env = graph_of(*data.draw(st.sampled_from(CASES[name]))(data.draw))
    op = graph.ops[0]
    saved: set[int] = set()

    def pack(x: Tensor) -> Tensor:
        saved.add(memory(x))
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        results = run_op(op, env)
    if not any(r.requires_grad for r in results):
        return
    rule = analyse(graph).rules[op.key]
    operands = {i for i, v in enumerate(op.inputs) if memory(env[v]) in saved}
    given_ = {memory(x) for x in env.values()}
    made = {i for i, r in enumerate(results) if memory(r) in saved and memory(r) not in given_}
    assert operands <= set(rule.saved_operands)
    assert made <= set(rule.saved_results)


def test_sizes_of_choices_are_sizes_of_factors() -> None:
    graph, _ = graph_of("linear.default", (torch.zeros(4, 6), torch.zeros(8, 6)), {})
    choices = analyse(graph).choices["op"]
    assert [(c.size, c.operands, c.results, c.contracted) for c in choices] == [
        (4, ((0, 1), None), ((0, 1),), False),
        (8, (None, (0, 1)), ((1, 1),), False),
        (6, ((1, 1), (1, 1)), (None,), True),
    ]
    assert math.prod(c.size for c in choices) == 192
