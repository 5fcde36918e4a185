"""What tables say of plans, profiles and clusters, on terminals and in notebooks."""

from __future__ import annotations

import dataclasses
import io
import re
from collections.abc import Iterable
from html.parser import HTMLParser
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console, RenderableType

from autoplan.display import (
    cluster_tables,
    clusters_table,
    compare_html,
    compare_tables,
    demo_tables,
    memory_svg,
    plan_html,
    plan_tables,
    profile_html,
    profile_tables,
)
from autoplan.hardware import Curve, known_clusters, load_cluster
from autoplan.profiler import Moment, OpCost, Profile, UnknownOp
from tests.display.plans import make_plan


def text(tables: Iterable[RenderableType], width: int = 160) -> str:
    console = Console(file=io.StringIO(), width=width)
    for table in tables:
        console.print(table)
    out = console.file.getvalue()  # type: ignore[attr-defined]
    return re.sub(r" +", " ", out)


def make_profile() -> Profile:
    nodes = tuple(
        OpCost(
            f"h.{i}.mlp:aten.linear#0",
            "linear",
            f"h.{i}.mlp",
            10**9,
            2 * 10**9,
            7,
            9,
            60,
            40,
            120,
            80,
            1e-3,
            2e-3,
            4096,
            False,
        )
        for i in range(3)
    )
    return Profile(
        model="Tiny<b>",
        cluster="a100-8x",
        device="A100",
        forward_flops=3 * 10**9,
        backward_flops=6 * 10**9,
        parameter_bytes=10**6,
        gradient_bytes=10**6,
        optimizer_bytes=2 * 10**6,
        input_bytes=10,
        saved_activation_bytes=3 * 4096,
        peak_bytes={"forward": 3 * 10**6, "backward": 4 * 10**6, "step": 5 * 10**6},
        step_time_s=0.01,
        optimizer_s=0.001,
        memory_bytes=80 * 10**9,
        nodes=nodes,
        unknown_ops={"mylib.magic.default": UnknownOp(2, 0.25, 0.5)},
        uncounted_scratch={"conv2d": 2},
        notes=("attention was traced with an explicit mask",),
        timeline=(
            Moment("forward", "h.0.mlp:aten.linear#0", 10**6, 0, 2 * 10**6, 10, 4096, 100),
            Moment("backward", "h.0.mlp:aten.linear#0", 10**6, 10**6, 2 * 10**6, 10, 4096, 10**6),
            Moment("step", "h.0.mlp.weight", 10**6, 10**6, 2 * 10**6, 10, 0, 0),
        ),
    )


def make_demo(failures: tuple[str, ...] = ()) -> Any:
    """Has the attributes of `autoplan.api.DemoResult`, whose module imports torch."""
    return SimpleNamespace(
        plan=make_plan(),
        free_bytes=50_000_000_000,
        peak_bytes=(31_400_000_000, 31_600_000_000),
        losses=(10.8, 10.5),
        norms=(1.5, 1.25),
        single_losses=(10.8, 10.500001),
        single_norms=(1.5, 1.25),
        seconds={"plan": 5.2, "one process": 31.0},
        worst_loss=1e-7,
        worst_norm=2e-7,
        failures=failures,
    )


class Checker(HTMLParser):
    """Well-formed: everything that opens closes."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.seen.add(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def check(html: str) -> set[str]:
    parser = Checker()
    parser.feed(html)
    assert parser.open == []
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", html)  # needs nothing else
    return parser.seen


def test_plan_tables_say_what_was_decided() -> None:
    out = text(plan_tables(make_plan(recomputed=8)))
    for part in (
        "Plan for GPT2LMHeadModel", "a100-8x, 8 devices", "d0=2 x d1=4", "12.3 ms", "31.5 GB of 40 GB (78.8 %)",
        "24 of 60 ops", "0.05 %", "*.c_fc.weight = R,S(1)", "transformer.h.*.mlp.c_fc.weight R,S(1) 12",
        "transformer.h.{0-7}.mlp.act 2 mul, tanh 8", "mylib.<magic>.default 2", "input_ids S(0),R 1",
        "transformer.h.*.mlp.c_fc addmm R,S(0) S(0),R R,S(1) S(0),S(1) keeps gathered 12",
        "transformer.h.{8-11}.mlp.act tanh", "time: recompute 1 ms 8.13 %", "train.py:build batch=8 seq=512",
    ):  # fmt: skip
        assert part in out, part


def test_ops_can_be_left_out() -> None:
    out = text(plan_tables(make_plan(), ops=False))
    assert "addmm" not in out
    assert "Recomputed in backward" in out


def test_an_empty_plan_prints() -> None:
    plan = make_plan(layers=0).replace(peak_bytes=(), breakdown={}, replicated={}, cap_bytes=0, inputs={}, source={})
    assert "Plan for" in text(plan_tables(plan))
    check(plan_html(plan))


def test_long_lines_fold_and_nothing_is_cut() -> None:
    out = text(plan_tables(make_plan()), width=60)
    assert "…" not in out


def test_plan_html_is_self_contained_and_escaped() -> None:
    html = plan_html(make_plan())
    assert {"table", "svg", "details"} <= check(html)
    assert "<magic>" not in html
    assert "&lt;magic&gt;" in html
    assert make_plan()._repr_html_() == html


def test_compare_shows_what_changes_and_nothing_else() -> None:
    before, after = make_plan(recomputed=0), make_plan(recomputed=8, cap=20_000_000_000, time_s=0.015)
    out = text(compare_tables(before, after, names=("40 GB", "20 GB")))
    assert "step time 12.3 ms 15 ms" in out
    assert "transformer.h.{0-7}.mlp.act:aten.mul#0 keep recompute 8" in out
    assert "Placements" not in out
    assert "cluster" not in out
    check(compare_html(before, after))
    assert "the summaries are equal" in text(compare_tables(before, before))


def test_profile_tables_collapse_equal_layers() -> None:
    out = text(profile_tables(make_profile()))
    assert "└─ {0-2} 1 1 GFLOP 2 GFLOP 300 B 3 ms 30.0 % 4.1 kB 3" in out
    assert "└─ mlp 1 1 GFLOP 2 GFLOP 300 B 3 ms 30.0 % 4.1 kB 3" in out
    assert "mylib.magic.default 2 25.0 % 50.0 %" in out
    assert "Memory over the step, peak 5 MB" in out and "█" in out
    assert "explicit mask" in out
    assert "scratch memory that these kernels take: 2 conv2d" in out
    assert "backward 6 GFLOP 360 B 240 B 6 ms 60.0 % 5 MB" in out
    assert "mlp" not in text(profile_tables(make_profile(), depth=1, top=0))
    assert "Slowest 2 of 3 ops" in text(profile_tables(make_profile(), top=2))
    html = make_profile()._repr_html_()
    assert html == profile_html(make_profile())
    assert {"table", "svg"} <= check(html)
    assert "Tiny<b>" not in html


@pytest.mark.parametrize("name", known_clusters())
def test_every_number_of_a_cluster_has_its_source(name: str) -> None:
    spec = load_cluster(name)
    assert name in text([clusters_table([spec])])
    out = " ".join(text(cluster_tables(spec), width=1000).split())
    for _, source in (*spec.device.sources, *(s for level in spec.levels for s in level.sources)):
        assert " ".join(source.split()) in out


def test_optional_keys_of_a_device_are_shown() -> None:
    spec = load_cluster("cpu-gloo")
    curve = Curve(((64.0, 1e-5), (1e6, 1e-3)))
    keys: dict[str, Any] = {"allocation_s": curve, "update_s": curve, "view_s": 2e-6}
    device = dataclasses.replace(spec.device, op_flops_per_s=(("tanh", (1e9, 2e9)),), **keys)
    out = text(cluster_tables(dataclasses.replace(spec, device=device)), width=200)
    assert "a new tensor" in out and "AdamW of a parameter" in out and "a view" in out
    assert re.search(r"tanh +1 Gflop/s +2 Gflop/s", out)


def test_memory_svg_marks_the_cap() -> None:
    fits = ElementTree.fromstring(memory_svg({"weights": 4e9, "saved": 2e9, "none": 0.0}, 10e9))
    words = "".join(fits.itertext())
    assert "60.0 % of the cap" in words
    assert "cap 10 GB" in words
    assert "none" not in words
    rects = [r for r in fits.iter("{http://www.w3.org/2000/svg}rect") if len(r)]
    assert float(rects[0].attrib["width"]) == pytest.approx(2 * float(rects[1].attrib["width"]), rel=1e-2)
    over = memory_svg({"weights": 12e9}, 10e9)
    assert "#d62728" in over
    assert float(re.findall(r'width="([\d.]+)" height="26"', over)[0]) < 710
    ElementTree.fromstring(memory_svg({}, 0))
    ElementTree.fromstring(memory_svg({f"a <{i}>": 1e9 for i in range(20)}))


def test_demo_tables_put_both_runs_side_by_side() -> None:
    out = text(demo_tables(make_demo()))
    assert "Plan for GPT2LMHeadModel" in out
    assert "rank 1 31.5 GB 31.6 GB 0.32 % 40 GB" in out
    assert "without a cap the plan needs 50 GB" in out
    assert "1 10.500000 10.500001 9.5e-08 1.250000 1.250000 0.0e+00" in out
    assert "plan 5.2 s, one process 31 s" in out
    assert out.rstrip().endswith("under the cap of 40 GB.")
    assert "losses differ" in text(demo_tables(make_demo(failures=("losses differ",))))
