"""Specs: sizes, identity, JSON."""

from __future__ import annotations

import dataclasses
import json

import pytest

from autoplan.errors import OptionError, ProfileError
from autoplan.hardware import ClusterSpec, known_clusters, load_cluster


@pytest.mark.parametrize("name", known_clusters())
def test_json_round_trip(name: str) -> None:
    spec = load_cluster(name)
    again = ClusterSpec.from_json(json.loads(json.dumps(spec.to_json())))
    assert again == spec
    assert again.fingerprint == spec.fingerprint
    assert hash(again) == hash(spec)


def test_fingerprint_follows_numbers_and_not_words() -> None:
    spec = load_cluster("h100-8x")
    assert len(spec.fingerprint) == 16
    assert spec.fingerprint == dataclasses.replace(spec, description="other words").fingerprint
    assert spec.fingerprint != spec.with_size(nodes=2).fingerprint
    faster = dataclasses.replace(spec.device, kernel_launch_s=1e-6)
    assert spec.fingerprint != dataclasses.replace(spec, device=faster).fingerprint


def test_sizes_of_a_cluster_of_nodes() -> None:
    spec = load_cluster("a100-8x")
    assert (spec.n_devices, spec.nodes) == (8, 1)
    assert spec.with_size() is spec
    assert spec.with_size(nodes=4).n_devices == 32
    assert spec.with_size(devices=3).nodes == 1
    assert spec.with_size(devices=3).with_size(devices=24).nodes == 3
    assert spec.with_size(nodes=2, devices=16).n_devices == 16
    with pytest.raises(OptionError, match="8 devices in a node.*8 or 16 are nearest"):
        spec.with_size(devices=12)
    with pytest.raises(OptionError, match="give only one"):
        spec.with_size(nodes=3, devices=16)
    with pytest.raises(OptionError, match="devices must be a whole number above zero, not 0"):
        spec.with_size(devices=0)


def test_a_single_machine_has_any_size() -> None:
    spec = load_cluster("cpu-gloo", devices=7)
    assert (spec.n_devices, spec.devices_per_node, spec.nodes) == (7, 7, 1)
    assert load_cluster("cpu-gloo", nodes=1).n_devices == 4
    with pytest.raises(OptionError, match="single machine of any size"):
        spec.with_size(nodes=2)


def test_str_names_what_matters() -> None:
    text = str(load_cluster("h100-8x", nodes=4))
    assert text == "h100-8x: 4 x 8 H100-SXM5-80GB, 84.9 GB each; NVLink 4 450 GB/s, NDR InfiniBand 50 GB/s"


def test_malformed_json() -> None:
    good = load_cluster("cpu-gloo").to_json()
    with pytest.raises(ProfileError, match="format 99; this version reads format 2"):
        ClusterSpec.from_json({**good, "format": 99})
    with pytest.raises(ProfileError, match="KeyError: 'name'"):
        ClusterSpec.from_json({k: v for k, v in good.items() if k != "name"})


def test_peak_rates_by_dtype() -> None:
    device = load_cluster("a100-8x").device
    assert device.peak_flops_per_s("bfloat16") == 312e12
    assert device.peak_flops_per_s("int64") == device.peak_flops_per_s("float32")
    assert device.usable_bytes == device.memory_bytes - device.reserved_bytes
    with pytest.raises(ProfileError, match="no flops_per_s for dtype 'float8_e4m3fn'; it lists bfloat16"):
        device.peak_flops_per_s("float8_e4m3fn")
