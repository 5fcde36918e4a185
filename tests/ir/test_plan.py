"""`Plan` and `PlanOptions`: JSON, files, and the errors of files that are no plans."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoplan.errors import OptionError, PlanMismatchError
from autoplan.ir import Mesh, OpPlan, Placement, Plan, PlanOptions, Schedule, StagePlan
from autoplan.ir.plan import OPTIMIZERS

MESH = Mesh((2, 4), ("dp", "tp"))


def at(text: str) -> Placement:
    return Placement.parse(text, MESH)


def plan() -> Plan:
    return Plan(
        model="Small",
        graph_fingerprint="0123456789abcdef",
        cluster="cpu",
        cluster_fingerprint="fedcba9876543210",
        mesh=MESH,
        inputs={"x": at("S(0),R"), "lin.weight": at("R,S(1:3)")},
        stages=(
            StagePlan(
                {
                    "lin:aten.mul#0": OpPlan(
                        (at("S(0),R"), at("R,S(1:3)")), (at("S(0),P"),), "recompute", (True, False)
                    ),
                    ":aten.sum#0": OpPlan((at("S(0),R"),), (at("P,R"),), keep_gathered=(False,)),
                }
            ),
        ),
        schedule=Schedule(microbatches=2),
        options=PlanOptions(cluster="cpu", devices=8, mesh=MESH, pins={"lin.*": "S(0)@tp"}, precision="bf16"),
        step_time_s=0.25,
        peak_bytes=(1000,),
        cap_bytes=2000,
        objective_s=0.5,
        bound_s=0.4,
        gap=0.2,
        solve_s=1.5,
        breakdown={"compute_s": 0.2},
        replicated={"aten.cumsum.default": 2},
        source={"model": "config.json", "batch": 8},
    )


def edited(**changes: Any) -> dict[str, Any]:
    return {**plan().to_json(), **changes}


def test_round_trip() -> None:
    assert Plan.from_json(json.loads(json.dumps(plan().to_json()))) == plan()


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan().save(path)
    assert Plan.load(path) == plan()
    assert Plan.load(str(path)) == plan()
    assert path.read_text().endswith("}\n")
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_placements_in_the_file_are_in_the_grammar() -> None:
    data = plan().to_json()
    assert data["inputs"] == {"x": "S(0),R", "lin.weight": "R,S(1:3)"}
    assert data["mesh"] == {"dp": 2, "tp": 4}
    assert data["stages"][0]["ops"]["lin:aten.mul#0"] == {
        "in": ["S(0),R", "R,S(1:3)"],
        "out": ["S(0),P"],
        "remat": "recompute",
        "keep_gathered": [1, 0],
    }
    assert set(data["stages"][0]["ops"][":aten.sum#0"]) == {"in", "out"}


def test_a_person_may_name_axes() -> None:
    assert Plan.from_json(edited(inputs={"x": "S(0)@dp", "lin.weight": "S(1:3)@tp"})).inputs == plan().inputs


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    plan().save(path)

    def full(self: Path, text: str, **_: object) -> int:
        with open(self, "w") as f:
            f.write(text[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OptionError, match=r"cannot write the plan to .*plan\.json: No space left"):
        plan().replace(model="Other").save(path)
    monkeypatch.undo()
    assert Plan.load(path) == plan()
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="cannot write the plan"):
        plan().save(tmp_path / "no such folder" / "plan.json")


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (b"not json", PlanMismatchError, r"plan\.json: not a plan file \(JSON line 1"),
        (b"", PlanMismatchError, "not a plan file"),
        (b"[1, 2]", PlanMismatchError, r"plan\.json: this is no plan file"),
        (b'"text"', PlanMismatchError, "this is no plan file"),
        (b'{"format": 1}', PlanMismatchError, "'format' and 'graph_fingerprint' are missing"),
        (b"\xff\xfe\x00", OptionError, "cannot read the plan"),
    ],
)
def test_files_that_are_no_plans(tmp_path: Path, content: bytes, error: type[Exception], message: str) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(error, match=message):
        Plan.load(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"cannot read the plan .*nothing\.json"):
        Plan.load(tmp_path / "nothing.json")
    with pytest.raises(OptionError, match="cannot read the plan"):
        Plan.load(tmp_path)


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (edited(format=2), PlanMismatchError, "plan format 2, but this version of autoplan reads 1: plan again"),
        (edited(inputs={"x": "Q"}), OptionError, "placement 'Q'"),
        (edited(inputs={"x": "R"}), OptionError, "has 1 entries"),
        (edited(inputs={"x": 3}), PlanMismatchError, "malformed plan file"),
        (edited(inputs=[1]), PlanMismatchError, "malformed plan file"),
        (edited(mesh={"dp": 0}), OptionError, "at least one device"),
        (edited(mesh={"dp": "two"}), PlanMismatchError, "malformed plan file"),
        (edited(mesh=None), PlanMismatchError, "mesh is None, expected dict"),
        (edited(schedule={"kind": "none", "speed": 1}), PlanMismatchError, "malformed plan file"),
        (edited(options={"colour": 1}), OptionError, "unknown plan options colour"),
        (edited(options={"precision": "fp8"}), OptionError, "precision 'fp8'"),
        (edited(stages=[{"ops": {"k": {"in": ["R,R"], "out": ["R,R"], "remat": "maybe"}}}]), OptionError, "'maybe'"),
        (edited(stages=[{"ops": {"k": {"in": ["R,R"]}}}]), PlanMismatchError, "malformed plan file: KeyError: 'out'"),
        (
            edited(stages=[{"ops": {"k": {"in": ["R,R"], "out": ["R,R"], "keep_gathered": [1, 1]}}}]),
            PlanMismatchError,
            "op 'k' has 1 operands, but 2 entries of keep_gathered",
        ),
        ({k: v for k, v in edited().items() if k != "cluster"}, PlanMismatchError, "the key 'cluster' is missing"),
    ],
)
def test_malformed_plans(data: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Plan.from_json(data)


def test_the_hash_is_over_all_but_the_time_to_solve() -> None:
    assert plan().hash == plan().replace(solve_s=99.0).hash
    assert len(plan().hash) == 16
    different = [plan(), plan().replace(step_time_s=1.0), plan().replace(mesh=Mesh((4, 2), ("dp", "tp"))),
                 plan().replace(inputs={**plan().inputs, "x": at("R,R")}), plan().replace(stages=())]  # fmt: skip
    assert len({p.hash for p in different}) == len(different)
    assert Plan.from_json(json.loads(json.dumps(plan().to_json()))).hash == plan().hash


def test_the_text_says_what_matters() -> None:
    text = str(plan())
    assert "Small on 8 devices of cpu (mesh dp=2 x tp=4)" in text
    assert "250.00 ms" in text
    assert "1 of 2 ops recomputed" in text


def test_ops_of_all_stages() -> None:
    assert set(plan().ops) == {"lin:aten.mul#0", ":aten.sum#0"}
    assert plan().ops["lin:aten.mul#0"].shards(1)
    assert not plan().ops[":aten.sum#0"].shards(1)


options = st.builds(
    PlanOptions,
    cluster=st.none() | st.sampled_from(["h100-8x", "my.toml"]),
    nodes=st.none() | st.integers(1, 9),
    memory_bytes=st.none() | st.integers(1, 10**12),
    mesh=st.none() | st.just(MESH) | st.just(Mesh((3,))),
    pins=st.dictionaries(st.text(max_size=5), st.sampled_from(["R", "S(0)@tp"]), max_size=2),
    precision=st.sampled_from(["fp32", "bf16"]),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    remat=st.booleans(),
)


@given(options)
def test_options_round_trip(given_options: PlanOptions) -> None:
    data = json.loads(json.dumps(given_options.to_json()))
    assert PlanOptions.from_json(data) == given_options


def test_defaults_are_left_out() -> None:
    assert PlanOptions().to_json() == {}
    assert PlanOptions(remat=False, mesh=MESH).to_json() == {"remat": False, "mesh": {"dp": 2, "tp": 4}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"precision": "fp8"}, "precision 'fp8' is not one of fp32, bf16"),
        ({"optimizer": "lion"}, "optimizer 'lion' is not one of adamw"),
        ({"nodes": 1, "devices": 8}, "give nodes or devices, not both"),
        ({"nodes": 0}, "nodes must be at least 1, got 0"),
        ({"devices": -1}, "devices must be at least 1"),
        ({"memory_bytes": 0}, "memory_bytes must be at least 1"),
    ],
)
def test_impossible_options(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        PlanOptions(**changes)


@pytest.mark.parametrize("change", [{"nodes": "four"}, {"memory_bytes": "80GB"}, {"pins": [1]}, {"remat": "no"}])
def test_options_of_a_wrong_type(change: dict[str, Any]) -> None:
    with pytest.raises((OptionError, PlanMismatchError)):
        Plan.from_json(edited(options=change))


def test_plans_are_immutable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan().model = "Other"  # type: ignore[misc]


@pytest.mark.parametrize(
    "key",
    [
        "gap",
        "bound_s",
        "objective_s",
        "step_time_s",
        "solve_s",
        "peak_bytes",
        "cap_bytes",
        "breakdown",
        "replicated",
        "source",
    ],
)
@pytest.mark.parametrize("value", ["zz", None, ["zz"]])
def test_wrongly_typed_values_are_named(key: str, value: object) -> None:
    with pytest.raises(PlanMismatchError, match=key):
        Plan.from_json({**_any_plan().to_json(), key: value})


def test_missing_keys_are_named() -> None:
    data = _any_plan().to_json()
    del data["gap"]
    with pytest.raises(PlanMismatchError, match="'gap' is missing"):
        Plan.from_json(data)


def _any_plan() -> Plan:
    return Plan("m", "0" * 16, "c", "1" * 16, Mesh((2,)), {}, ())
