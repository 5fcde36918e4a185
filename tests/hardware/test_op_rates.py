"""Optional keys of a device: rates of single ops, new memory, views, AdamW."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from autoplan.errors import ProfileError
from autoplan.hardware import ClusterSpec, parse_cluster

FILE = Path(__file__).parents[2] / "profiles" / "cpu-gloo.toml"
KEYS = {"op_flops_per_s": {"tanh": [1e9, 2e9]}, "allocation_s": [[1e3, 1e-6], [1e6, 1e-4]], "view_s": 1e-6,
        "update_s": [[64, 1e-5], [1e6, 1e-3]]}  # fmt: skip


def test_optional_keys_round_trip() -> None:
    data = tomllib.loads(FILE.read_text())
    data["device"].update(KEYS)
    data["device"]["source"].update(dict.fromkeys(KEYS, "a test"))
    spec = parse_cluster(data, file="x.toml")
    assert dict(spec.device.op_flops_per_s) == {"tanh": (1e9, 2e9)}
    assert ClusterSpec.from_json(spec.to_json()) == spec


@pytest.mark.parametrize("pair", [[1e9], [1e9, -1.0], [1e9, float("nan")], "fast"])
def test_bad_rates_are_named(pair: object) -> None:
    data = tomllib.loads(FILE.read_text())
    data["device"]["op_flops_per_s"] = {"tanh": pair}
    with pytest.raises(ProfileError, match=r"x.toml: \[device\] op_flops_per_s.tanh: expected two finite numbers"):
        parse_cluster(data, file="x.toml")
