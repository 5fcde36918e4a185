"""Profile files: the shipped ones are sound, and every mistake is named with its file and key."""

from __future__ import annotations

import copy
import math
import tomllib
from pathlib import Path
from typing import Any

import pytest

from autoplan.errors import ProfileError
from autoplan.hardware import Device, Level, known_clusters, load_cluster, parse_cluster

PROFILES = Path(__file__).parents[2] / "profiles"


@pytest.fixture
def data() -> dict[str, Any]:
    """A fresh copy of a shipped profile, to break."""
    return copy.deepcopy(tomllib.loads((PROFILES / "a100-8x.toml").read_text()))


def test_the_shipped_profiles() -> None:
    wanted = {"a100-8x", "h100-8x", "h200-8x", "b200-8x", "v100-8x", "mi300x-8x", "cpu-gloo"}
    assert wanted <= set(known_clusters())
    for name in known_clusters():
        assert load_cluster(name).name == name


@pytest.mark.parametrize("name", known_clusters())
def test_every_number_has_a_source(name: str) -> None:
    spec = load_cluster(name)
    parts: list[Device | Level] = [spec.device, *spec.levels]
    assert all(part.sources and all(text for _, text in part.sources) for part in parts)
    rates = dict(spec.device.flops_per_s)
    assert rates["float64"] <= rates["float32"] <= rates.get("tf32", math.inf) and rates["float16"] > 0


@pytest.mark.parametrize("name", [n for n in known_clusters() if n.endswith("-8x")])
def test_nodes(name: str) -> None:
    spec = load_cluster(name, nodes=4)
    assert spec.n_devices == 32 and spec.devices_per_node == 8 and len(spec.levels) == 2


def test_by_path_and_by_spec(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text((PROFILES / "h100-8x.toml").read_text())
    spec = load_cluster(path)
    assert spec == load_cluster(str(path)) == load_cluster("h100-8x") == load_cluster(spec)
    assert load_cluster(spec, nodes=2).n_devices == 16


def test_unknown_names_and_paths(tmp_path: Path) -> None:
    with pytest.raises(
        ProfileError, match=r"'h100x8'; did you mean 'h100-8x'\? Known clusters: a100-40gb-8x, a100-8x, .*h100-8x"
    ):
        load_cluster("h100x8")
    with pytest.raises(ProfileError, match="unknown cluster 'zzz'. Known"):
        load_cluster("zzz")
    with pytest.raises(ProfileError, match="none.toml does not exist"):
        load_cluster(tmp_path / "none.toml")


def test_malformed_toml_names_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text("[cluster]\nname = \n")
    with pytest.raises(ProfileError, match=r"bad\.toml: not readable as TOML: .*line 2"):
        load_cluster(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ProfileError, match=r"bad\.toml: not readable"):
        load_cluster(path)


NUMBER = "expected a finite number above zero"


@pytest.mark.parametrize(
    ("section", "key", "value", "message"),
    [
        ("device", "memory_bytes", None, r"\[device\] memory_bytes: expected a whole number above zero, found nothing"),
        ("device", "memory_bytes", 1.5, "expected a whole number above zero, found 1.5"),
        ("device", "memory_bytes", "80GB", "expected a whole number above zero, found '80GB'"),
        ("device", "memory_bytes", True, "expected a whole number above zero, found True"),
        ("device", "memory_bytes_per_s", -1, NUMBER + ", found -1"),
        ("device", "memory_bytes_per_s", float("nan"), NUMBER + ", found nan"),
        ("device", "kernel_launch_s", float("inf"), "expected a finite number, zero or more, found inf"),
        ("device", "reserved_bytes", 9e12, "below memory_bytes"),
        ("device", "name", 3, "expected a text, found 3"),
        ("device", "flops_per_s", {}, "expected at least one entry"),
        ("device", "flops_per_s", {"float32": 0}, r"\[device\].flops_per_s float32: expected"),
        ("device", "flops_per_s", {"bfloat16": 1e12}, "an entry float32"),
        ("device", "flops_per_s", 1e12, "expected a table"),
        ("device", "matmul_efficiency", [[1, 2, 3]], r"points, sizes rising, found \[1, 2, 3\]"),
        ("device", "matmul_efficiency", [], r"found \[\]"),
        ("device", "matmul_efficiency", [[1, 0.1], [2, 0.9]], "larger would be faster"),
        ("device", "memory_efficiency", [[1, 1.1]], "at most 1"),
        ("device", "memory_byte", 1, r"\[device\] memory_byte: unknown key; did you mean 'memory_bytes'"),
        ("device", "source", None, "expected a table of texts"),
        ("cluster", "nodes", 0, r"\[cluster\] nodes: expected"),
        ("cluster", "devices_per_node", 4, r"one of \[8\], found 4"),
        ("cluster", "colour", "red", "unknown key; known keys: description, devices_per_node, name, nodes"),
        ("level", "latency_s", None, r"\[\[level\]\] 1 latency_s: expected"),
        ("level", "efficiency", 1.5, "above zero, at most 1, found 1.5"),
        ("level", "peer_bytes_per_s", 0, "peer_bytes_per_s: " + NUMBER + ", found 0"),
        ("level", "bytes_per_s", float("nan"), NUMBER + ", found nan"),
        ("level", "bytes_per_s", "300 GB/s", NUMBER + ", found '300 GB/s'"),
        ("level", "bandwidth_GBps", 300, "bandwidth_GBps: unknown key"),
        ("level", "latency_us", 3.4, "latency_us: unknown key; did you mean 'latency_s'"),
        ("level", "latency_s", -1e-6, "expected a finite number, zero or more, found -1e-06"),
        ("level", "all_gather", [[1024, float("nan"), 8]], "a group of at least 2"),
        ("level", "devices", None, r"\[\[level\]\] 1 devices: expected"),
        ("level", "all_reduce", [[1, 1, 1]], "a group of at least 2"),
        ("level", "all_reduce", [[1, 2, 8], [2, 1, 8]], "must not fall"),
    ],
)
def test_mistakes(data: dict[str, Any], section: str, key: str, value: object, message: str) -> None:
    table = data[section][0] if section == "level" else data[section]
    if value is None:
        del table[key]
    else:
        table[key] = value
        if section != "cluster" and not isinstance(value, str):
            table["source"].setdefault(key, "a test")
    with pytest.raises(ProfileError, match=message) as caught:
        parse_cluster(data, file="x.toml")
    assert str(caught.value).startswith("x.toml: ")


def test_mistakes_of_structure(data: dict[str, Any]) -> None:
    def broken(**changes: object) -> str:
        with pytest.raises(ProfileError) as caught:
            parse_cluster({**data, **changes}, file="x.toml")
        return str(caught.value)

    inner, outer = data["level"]
    assert "top level levels: unknown key; did you mean 'level'" in broken(levels=[])
    assert "expected at least one table [[level]], found []" in broken(level=[])
    assert "expected a table, found 3" in broken(level=[3])
    assert "[[level]] 2 devices: expected no such key on the last level" in broken(
        level=[inner, {**outer, "devices": 9}]
    )
    assert "a multiple of the 8 of the level inside it, found 12" in broken(
        level=[inner, {**inner, "devices": 12}, outer]
    )
    assert "1, as there is one [[level]] only" in broken(level=[outer], cluster={**data["cluster"], "nodes": 2})
    del data["device"]["source"]["memory_bytes"]
    assert "[device].source memory_bytes: expected a text, found nothing" in broken()
    data["device"]["source"]["memory_bytes"] = "here"
    data["device"]["source"]["weight_kg"] = "there"
    assert "[device].source weight_kg: unknown key" in broken()
