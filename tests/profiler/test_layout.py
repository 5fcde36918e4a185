"""Views, copies and strides, compared with what torch does."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from autoplan.profiler import layouts
from autoplan.profiler.layout import view_strides
from autoplan.trace import trace
from tests.profiler.models import gpt2

sizes = st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=4)


@given(sizes, st.booleans(), st.data())
def test_view_strides_are_those_of_torch(shape: list[int], expand: bool, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(shape))))
    x = torch.empty(shape).permute(order)
    if expand:
        x = x.unsqueeze(0).expand(3, *x.shape)
    new = data.draw(st.permutations(_factors(x.numel())))
    found = view_strides(tuple(x.shape), x.stride(), new)
    try:
        expected = x.view(new).stride()
    except RuntimeError:
        assert found is None
        return
    assert found is not None
    real = [(s, n) for s, n in zip(found, new, strict=True) if n > 1]  # strides of dims of size 1 mean nothing
    assert real == [(s, n) for s, n in zip(expected, new, strict=True) if n > 1]


def _factors(n: int) -> list[int]:
    out = []
    for p in (2, 3):
        while n % p == 0:
            out.append(p)
            n //= p
    return out or [1]


class Moves(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        t = x.transpose(1, 2)
        merged = t.reshape(2, -1)  # has to copy
        split = x.split(2, dim=-1)[1]
        head = split.unflatten(1, (2, 2)).select(0, 1)
        wide = x[:, :1].expand(2, 3, 4)
        bent = t.neg()  # lies as t does
        return merged, split, head, wide, bent, bent.transpose(1, 2).reshape(2, -1)


def test_storages_follow_views_and_copies() -> None:
    graph = trace(Moves(), (torch.randn(2, 4, 4),)).graph
    lie = layouts(graph)
    names = ("merged", "split", "head", "wide", "bent", "back")
    found = {name: lie[value] for name, value in zip(names, graph.outputs, strict=True)}
    given_value = graph.inputs[0].value
    assert found["merged"].storage == graph.outputs[0]
    assert {found[n].storage for n in ("split", "head", "wide")} == {given_value}
    assert found["back"].storage == found["bent"].storage == graph.outputs[4]
    real = Moves()(torch.randn(2, 4, 4))
    for tensor, layout in zip(real, found.values(), strict=True):
        pairs = zip(tensor.stride(), layout.strides, tensor.shape, strict=True)
        assert all(a == b for a, b, n in pairs if n > 1)


def test_attention_lies_so_that_joining_the_heads_is_free() -> None:
    graph = trace(*gpt2()).graph
    lie = layouts(graph)
    joined = [op for op in graph.ops if op.name == "reshape" and op.module.endswith("attn")]
    assert joined
    assert all(graph.producer[lie[op.outputs[0]].storage].name == "scaled_dot_product_attention" for op in joined)
