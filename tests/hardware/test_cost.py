"""Costs: values worked out by hand, and order in every quantity."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoplan.errors import OptionError, ProfileError
from autoplan.hardware import (
    COLLECTIVES,
    AxisGroup,
    ClusterSpec,
    Curve,
    Level,
    MeasuredCurve,
    axis_groups,
    collective_s,
    known_clusters,
    level_sizes,
    load_cluster,
    matmul_s,
    memory_s,
    op_s,
)

SLACK = 1 + 1e-9
CLUSTERS = {name: load_cluster(name, devices=64) for name in known_clusters()}
clusters = st.sampled_from(list(CLUSTERS.values()))
amounts = st.one_of(st.just(0.0), st.floats(1.0, 1e14))
payloads = st.one_of(st.just(0.0), st.floats(1.0, 1e12))
groups = st.builds(AxisGroup, st.sampled_from([1, 2, 3, 4, 8]), st.sampled_from([1, 2, 3, 4, 8]))


@pytest.fixture
def plain() -> ClusterSpec:
    """Four nodes of four devices, unit rates: 10 B/s and 1 s inside, 1 B/s and 5 s outside."""
    return dataclasses.replace(
        CLUSTERS["a100-8x"],
        n_devices=16,
        devices_per_node=4,
        levels=(Level("in", 4, 10.0, 1.0), Level("out", None, 1.0, 5.0)),
    )


def test_axis_groups_put_the_last_axis_innermost() -> None:
    assert axis_groups((2, 3, 4)) == (AxisGroup(2, 12), AxisGroup(3, 4), AxisGroup(4, 1))
    assert axis_groups(()) == ()


@pytest.mark.parametrize(
    ("group", "sizes"),
    [
        (AxisGroup(4, 1), (4, 1)),
        (AxisGroup(2, 2), (2, 1)),
        (AxisGroup(4, 4), (1, 4)),
        (AxisGroup(2, 8), (1, 2)),
        (AxisGroup(16, 1), (4, 4)),
        (AxisGroup(4, 2), (2, 2)),
        (AxisGroup(3, 1), (1, 3)),  # the second such group straddles two nodes
        (AxisGroup(2, 3), (1, 2)),
        (AxisGroup(1, 1), (1, 1)),
    ],
)
def test_level_sizes(plain: ClusterSpec, group: AxisGroup, sizes: tuple[int, int]) -> None:
    assert level_sizes(plain, group) == sizes


def test_a_part_of_one_node_stays_inside(plain: ClusterSpec) -> None:
    assert level_sizes(plain.with_size(devices=3), AxisGroup(3, 1)) == (3, 1)


def test_three_levels() -> None:
    levels = (Level("pair", 2, 10.0, 1.0), Level("node", 8, 5.0, 1.0), Level("net", None, 1.0, 1.0))
    spec = dataclasses.replace(CLUSTERS["a100-8x"], n_devices=32, levels=levels)
    assert level_sizes(spec, AxisGroup(32, 1)) == (2, 4, 4)
    assert level_sizes(spec, AxisGroup(4, 2)) == (1, 4, 1)
    assert level_sizes(spec, AxisGroup(8, 4)) == (1, 2, 4)
    assert level_sizes(spec, AxisGroup(4, 1)) == (2, 2, 1)


def test_a_group_must_fit(plain: ClusterSpec) -> None:
    with pytest.raises(OptionError, match="5 devices, 4 apart, does not fit on the 16 devices"):
        level_sizes(plain, AxisGroup(5, 4))
    with pytest.raises(OptionError, match="at least 1"):
        AxisGroup(0, 1)


def test_values_worked_out_by_hand(plain: ClusterSpec) -> None:
    inside, outside, both = AxisGroup(4, 1), AxisGroup(4, 4), AxisGroup(16, 1)
    # all-gather of 160 B: inside 160·3/4/10 + 3·1, outside 160·3/4/1 + 3·5; both: 12 + 3 + (160/4)·3/4 + 15
    assert collective_s(plain, "all_gather", 160, inside) == pytest.approx(15)
    assert collective_s(plain, "all_gather", 160, outside) == pytest.approx(135)
    assert collective_s(plain, "all_gather", 160, both) == pytest.approx(60)
    assert collective_s(plain, "reduce_scatter", 160, both) == pytest.approx(60)
    assert collective_s(plain, "all_reduce", 160, both) == pytest.approx(120)
    # all-to-all: 3 peers inside, 12 outside, 10 B each
    assert collective_s(plain, "all_to_all", 160, both) == pytest.approx(30 / 10 + 3 + 120 / 1 + 60)
    assert collective_s(plain, "broadcast", 160, both) == pytest.approx(160 / 10 + 3 + 160 + 15)
    assert collective_s(plain, "send_recv", 160, inside) == pytest.approx(17)
    assert collective_s(plain, "send_recv", 160, both) == pytest.approx(165)


def test_reduce_scatter_factor_and_efficiency(plain: ClusterSpec) -> None:
    level = Level("in", None, 10.0, 1.0, efficiency=0.5, reduce_scatter_factor=2.0)
    spec = dataclasses.replace(plain, levels=(level,))
    assert collective_s(spec, "all_gather", 160, AxisGroup(4, 1)) == pytest.approx(120 / 5 + 3)
    assert collective_s(spec, "reduce_scatter", 160, AxisGroup(4, 1)) == pytest.approx(2 * 120 / 5 + 3)


def test_measured_curves_replace_the_model(plain: ClusterSpec) -> None:
    curves = tuple(
        MeasuredCurve("all_reduce", size, Curve(((100.0, 7.0 * size), (200.0, 9.0 * size)))) for size in (2, 4)
    )
    level = Level("in", None, 10.0, 1.0, measured=curves)
    spec = dataclasses.replace(plain, levels=(level,))
    assert collective_s(spec, "all_reduce", 100, AxisGroup(2, 1)) == pytest.approx(14)
    assert collective_s(spec, "all_reduce", 50, AxisGroup(4, 1)) == pytest.approx(28)
    assert collective_s(spec, "all_reduce", 400, AxisGroup(4, 1)) == pytest.approx(72)
    # 8 devices: the curve of 4 at 160·(7/8)/(3/4) bytes, and 2·(8−4) more steps
    assert collective_s(spec, "all_reduce", 160, AxisGroup(8, 1)) == pytest.approx(
        curves[1].seconds.at(160 * (7 / 8) / (3 / 4)) + 8
    )
    assert collective_s(spec, "all_gather", 160, AxisGroup(4, 1)) == pytest.approx(15)


def test_measured_figures_come_back() -> None:
    assert collective_s(CLUSTERS["h100-8x"], "all_reduce", 16 << 20, AxisGroup(8, 1)) == pytest.approx(133e-6)
    assert collective_s(CLUSTERS["cpu-gloo"], "all_reduce", 1 << 20, AxisGroup(2, 1)) == pytest.approx(4.9e-4)


@given(clusters, st.sampled_from(COLLECTIVES), payloads, payloads, groups)
def test_more_bytes_never_take_less_time(spec: ClusterSpec, kind: str, a: float, b: float, group: AxisGroup) -> None:
    small, large = sorted((a, b))
    assert 0 <= collective_s(spec, kind, small, group) <= collective_s(spec, kind, large, group) * SLACK


@given(clusters, st.sampled_from(COLLECTIVES), payloads, groups)
def test_nothing_to_do_costs_nothing(spec: ClusterSpec, kind: str, bytes_: float, group: AxisGroup) -> None:
    assert collective_s(spec, kind, 0, group) == 0
    assert collective_s(spec, kind, bytes_, AxisGroup(1, group.stride)) == 0
    if group.size > 1 and bytes_:
        assert collective_s(spec, kind, bytes_, group) > 0


@given(clusters, st.floats(1.0, 1e12), st.sampled_from([2, 4, 8]))
def test_inner_links_are_never_slower(spec: ClusterSpec, bytes_: float, size: int) -> None:
    for kind in COLLECTIVES:
        inner = collective_s(spec, kind, bytes_, AxisGroup(size, 1))
        assert inner <= collective_s(spec, kind, bytes_, AxisGroup(size, 8)) * SLACK


@given(clusters, amounts, amounts, amounts, amounts)
def test_larger_ops_never_take_less_time(spec: ClusterSpec, f0: float, f1: float, b0: float, b1: float) -> None:
    (f0, f1), (b0, b1) = sorted((f0, f1)), sorted((b0, b1))
    small = op_s(spec.device, flops=f0, bytes_=b0, dtype="float16")
    large = op_s(spec.device, flops=f1, bytes_=b1, dtype="float16")
    assert 0 < small <= large * SLACK


def test_links_without_a_switch_add_up(plain: ClusterSpec) -> None:
    mesh = dataclasses.replace(plain.levels[0], peer_bytes_per_s=4.0, latency_s=0.0)
    spec = dataclasses.replace(plain, levels=(mesh, plain.levels[1]))
    assert [mesh.effective_bytes_per_s(n) for n in (2, 3, 4)] == [4.0, 8.0, 10.0]
    assert collective_s(spec, "all_gather", 80.0, AxisGroup(2, 1)) == pytest.approx(80 / 2 / 4)
    assert collective_s(spec, "all_gather", 80.0, AxisGroup(4, 1)) == pytest.approx(80 * 3 / 4 / 10)
    assert collective_s(spec, "all_to_all", 80.0, AxisGroup(4, 1)) == pytest.approx(80 * 3 / 4 / 10)
    assert collective_s(spec, "send_recv", 80.0, AxisGroup(4, 1)) == pytest.approx(80 / 4)


def test_op_is_the_slower_of_both_plus_launches() -> None:
    device = CLUSTERS["a100-8x"].device
    t = op_s(device, flops=1e12, bytes_=1e6, dtype="bfloat16", launches=2)
    assert t == pytest.approx(1e12 / (312e12 * 0.825) + 8e-6)
    assert op_s(device, flops=1, bytes_=1e9, dtype="float32") == pytest.approx(1e9 / (2e12 * 0.9) + 4e-6)
    assert op_s(device, flops=0, bytes_=0, dtype="no such type", launches=0) == 0
    assert matmul_s(device, 0, "float32") == memory_s(device, 0) == 0


@pytest.mark.parametrize("amount", [-1.0, math.nan, math.inf])
def test_refused_amounts(amount: float) -> None:
    spec = CLUSTERS["a100-8x"]
    with pytest.raises(OptionError, match="finite and not negative"):
        op_s(spec.device, flops=amount, bytes_=0, dtype="float32")
    with pytest.raises(OptionError, match="finite and not negative"):
        collective_s(spec, "all_reduce", amount, AxisGroup(2, 1))


def test_refused_names() -> None:
    spec = CLUSTERS["a100-8x"]
    with pytest.raises(OptionError, match="'gossip' is not one of all_reduce"):
        collective_s(spec, "gossip", 1, AxisGroup(2, 1))
    with pytest.raises(ProfileError, match="dtype 'complex64'"):
        op_s(spec.device, flops=1, bytes_=1, dtype="complex64")
