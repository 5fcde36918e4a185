"""Repeated layers collapse to one line, and only where they are alike."""

from __future__ import annotations

from fnmatch import fnmatchcase

from hypothesis import given
from hypothesis import strategies as st

from autoplan.display.fold import fold, ranges


def test_all_layers_become_a_star() -> None:
    found = fold((f"h.{i}.mlp.c_fc.weight", "R") for i in range(12))
    assert [(f.pattern, f.count) for f in found] == [("h.*.mlp.c_fc.weight", 12)]


def test_layers_that_differ_are_listed_by_range() -> None:
    found = fold((f"h.{i}.mlp", "keep" if i < 4 or i == 7 else "recompute") for i in range(12))
    assert [(f.pattern, f.content, f.count) for f in found] == [
        ("h.{0-3,7}.mlp", "keep", 5),
        ("h.{4-6,8-11}.mlp", "recompute", 7),
    ]


def test_only_layer_numbers_are_collapsed() -> None:
    found = fold([("h.0.ln_1:aten.add#0", "a"), ("h.0.ln_1:aten.add#1", "a"), ("h.0.ln_2:aten.add#0", "a")])
    assert [f.pattern for f in found] == ["h.0.ln_1:aten.add#0", "h.0.ln_1:aten.add#1", "h.0.ln_2:aten.add#0"]


def test_two_numbers_collapse_independently() -> None:
    found = fold((f"a.{i}.b.{j}", "x") for i in (3,) for j in range(2))
    assert [(f.pattern, f.count) for f in found] == [("a.3.b.*", 2)]


paths = st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["mlp", "attn"]), st.sampled_from("xyz")), max_size=20)


@given(paths)
def test_every_path_is_in_exactly_one_line(items: list[tuple[int, str, str]]) -> None:
    unique = {f"h.{i}.{name}": content for i, name, content in items}
    found = fold(unique.items())
    assert sum(f.count for f in found) == len(unique)
    for f in found:
        if "*" in f.pattern:
            same = [p for p in unique if fnmatchcase(p, f.pattern)]
            assert len(same) == f.count
            assert {unique[p] for p in same} == {f.content}


def test_ranges() -> None:
    assert ranges([7, 0, 1, 2, 3, 3]) == "0-3,7"
