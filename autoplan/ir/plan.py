"""`Plan`: the only bridge between deciding and doing.

The planner writes one, codegen and runtime read it; it is versioned JSON that a person can read and edit. It is keyed
by names that survive re-tracing: parameter paths, input paths and op keys (module path, op, ordinal).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from autoplan.errors import OptionError, PlanMismatchError
from autoplan.ir.files import write_whole
from autoplan.ir.placement import Mesh, Placement

FORMAT = 1
Remat = Literal["keep", "recompute"]
PRECISIONS = ("fp32", "bf16")
OPTIMIZERS: dict[str, int] = {"adamw": 2, "sgd": 0, "sgd-momentum": 1, "none": 0}
"""Optimizer name -> full-size state tensors per parameter."""


@dataclass(frozen=True)
class PlanOptions:
    """What a user may ask of a plan; shared by `plan`, `parallelize`, the command line and the plan file.

    Attributes:
        cluster: Name of a profile file, path of one, or None for the embedded default.
        nodes: Number of nodes, or None for the profile's own.
        devices: Number of devices, or None; excludes `nodes`.
        memory_bytes: Cap per device, or None for the device's memory.
        mesh: Mesh shape, or None to let the planner choose.
        pins: Placement of parameters and inputs by glob over their path.
        precision: ``fp32``, or ``bf16`` compute with fp32 parameters.
        optimizer: Name in `OPTIMIZERS`; decides the bytes of optimizer state.
        remat: False keeps every activation that backward needs.
    """

    cluster: str | None = None
    nodes: int | None = None
    devices: int | None = None
    memory_bytes: int | None = None
    mesh: Mesh | None = None
    pins: Mapping[str, str] = field(default_factory=dict)
    precision: str = "fp32"
    optimizer: str = "adamw"
    remat: bool = True

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise OptionError(f"precision {self.precision!r} is not one of {', '.join(PRECISIONS)}")
        if self.optimizer not in OPTIMIZERS:
            raise OptionError(f"optimizer {self.optimizer!r} is not one of {', '.join(OPTIMIZERS)}")
        if self.nodes is not None and self.devices is not None:
            raise OptionError("give nodes or devices, not both")
        for what in ("nodes", "devices", "memory_bytes"):
            n = getattr(self, what)
            if n is not None and (not isinstance(n, int) or n < 1):
                raise OptionError(f"{what} must be at least 1, got {n!r}")

    def to_json(self) -> dict[str, Any]:
        """JSON with the defaults left out."""
        out: dict[str, Any] = {}
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if f.name == "mesh" and value is not None:
                out["mesh"] = mesh_json(value)
            elif value not in (None, {}) and value != f.default:
                out[f.name] = dict(value) if f.name == "pins" else value
        return out

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PlanOptions:
        """Inverse of `to_json`.

        Raises:
            OptionError: Unknown keys or values.
        """
        known = {f.name for f in dataclasses.fields(cls)}
        unknown = set(data) - known
        if unknown:
            raise OptionError(f"unknown plan options {', '.join(sorted(unknown))}; known: {', '.join(sorted(known))}")
        if not isinstance(data.get("pins", {}), Mapping) or not isinstance(data.get("remat", True), bool):
            raise OptionError("plan options: 'pins' is a mapping of globs to placements, 'remat' is true or false")
        mesh = data.get("mesh")
        return cls(**{**data, "mesh": None if mesh is None else mesh_from(mesh)})


@dataclass(frozen=True)
class Schedule:
    """How microbatches pass through the stages.

    Attributes:
        kind: ``none`` (no pipeline) for now.
        microbatches: Pieces a step's batch is cut into.
    """

    kind: str = "none"
    microbatches: int = 1


@dataclass(frozen=True)
class OpPlan:
    """What one op does on one device.

    Attributes:
        operands: Placement in which it wants each of ``Op.inputs``.
        results: Placement in which it leaves each of ``Op.outputs``.
        remat: Whether its results, where backward needs them, are kept or recomputed.
        keep_gathered: Per operand, whether a resharded copy is kept for backward rather than made again.
    """

    operands: tuple[Placement, ...]
    results: tuple[Placement, ...]
    remat: Remat = "keep"
    keep_gathered: tuple[bool, ...] = ()

    def shards(self, axis: int) -> bool:
        """Whether the op's work is divided along a mesh axis."""
        from autoplan.ir.placement import Shard

        return any(isinstance(p[axis], Shard) for p in (*self.operands, *self.results))


@dataclass(frozen=True)
class StagePlan:
    """One pipeline stage: its ops by key, in any order."""

    ops: Mapping[str, OpPlan]


@dataclass(frozen=True)
class Plan:
    """A complete decision.

    Attributes:
        model: Name of the model, for people.
        graph_fingerprint: `OpGraph.fingerprint` of the graph that was planned.
        cluster: Name of the cluster.
        cluster_fingerprint: `ClusterSpec.fingerprint`.
        mesh: Devices used.
        schedule: Microbatching.
        inputs: Placement of every parameter, buffer and step input by path.
        stages: One entry per pipeline stage.
        options: What the user asked.
        step_time_s: Predicted seconds of a training step.
        peak_bytes: Predicted peak per device, one entry per stage, from the emitted graphs.
        cap_bytes: Memory cap per device.
        objective_s: Objective of the optimisation.
        bound_s: Proven lower bound of the objective within the model.
        gap: (objective − bound) / objective.
        solve_s: Seconds spent solving.
        breakdown: Predicted seconds and bytes by kind, for people.
        replicated: Ops that had no sharding rule: target -> count.
        source: How to load the model again (``MODEL`` of the command line with its sizes), where known.
    """

    model: str
    graph_fingerprint: str
    cluster: str
    cluster_fingerprint: str
    mesh: Mesh
    inputs: Mapping[str, Placement]
    stages: tuple[StagePlan, ...]
    schedule: Schedule = Schedule()
    options: PlanOptions = PlanOptions()
    step_time_s: float = 0.0
    peak_bytes: tuple[int, ...] = ()
    cap_bytes: int = 0
    objective_s: float = 0.0
    bound_s: float = 0.0
    gap: float = 0.0
    solve_s: float = 0.0
    breakdown: Mapping[str, float] = field(default_factory=dict)
    replicated: Mapping[str, int] = field(default_factory=dict)
    source: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ops(self) -> Mapping[str, OpPlan]:
        """All ops of all stages by key."""
        return {k: o for s in self.stages for k, o in s.ops.items()}

    @property
    def hash(self) -> str:
        """16 hex digits over the whole plan but for what only describes it (times to solve)."""
        data = self.to_json()
        data.pop("solve_s")
        return hashlib.blake2b(json.dumps(data, sort_keys=True).encode(), digest_size=8).hexdigest()

    def replace(self, **changes: Any) -> Plan:
        """Copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def to_json(self) -> dict[str, Any]:
        """Versioned JSON; placements as written in `autoplan.ir.placement`."""
        return {
            "format": FORMAT,
            "model": self.model,
            "graph_fingerprint": self.graph_fingerprint,
            "cluster": self.cluster,
            "cluster_fingerprint": self.cluster_fingerprint,
            "mesh": mesh_json(self.mesh),
            "schedule": dataclasses.asdict(self.schedule),
            "step_time_s": self.step_time_s,
            "peak_bytes": list(self.peak_bytes),
            "cap_bytes": self.cap_bytes,
            "objective_s": self.objective_s,
            "bound_s": self.bound_s,
            "gap": self.gap,
            "solve_s": self.solve_s,
            "breakdown": dict(self.breakdown),
            "options": self.options.to_json(),
            "source": dict(self.source),
            "replicated": dict(self.replicated),
            "inputs": {k: str(p) for k, p in self.inputs.items()},
            "stages": [{"ops": {k: _op_json(o) for k, o in s.ops.items()}} for s in self.stages],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Plan:
        """Inverse of `to_json`.

        Raises:
            PlanMismatchError: Another format version, or a file that is no plan.
            OptionError: A malformed placement or option.
        """
        if not isinstance(data, Mapping) or "format" not in data or "graph_fingerprint" not in data:
            raise PlanMismatchError("this is no plan file: the keys 'format' and 'graph_fingerprint' are missing")
        if data["format"] != FORMAT:
            raise PlanMismatchError(
                f"plan format {data['format']!r}, but this version of autoplan reads {FORMAT}: plan again"
            )
        _check_types(data)
        if not data["stages"] or len(data["peak_bytes"]) not in (0, len(data["stages"])):  # 0: nothing emitted yet
            raise PlanMismatchError("malformed plan file: 'stages' and 'peak_bytes' need one entry for each stage")
        if data["schedule"].get("kind", "none") != "none":
            raise PlanMismatchError(f"schedule {data['schedule']['kind']!r} is not known to this version: plan again")
        try:
            mesh = mesh_from(data["mesh"])
            plain = (
                "model",
                "graph_fingerprint",
                "cluster",
                "cluster_fingerprint",
                "step_time_s",
                "cap_bytes",
                "objective_s",
                "bound_s",
                "gap",
                "solve_s",
                "breakdown",
                "source",
                "replicated",
            )
            return cls(
                mesh=mesh,
                schedule=Schedule(**data["schedule"]),
                peak_bytes=tuple(data["peak_bytes"]),
                options=PlanOptions.from_json(data["options"]),
                inputs={k: Placement.parse(p, mesh) for k, p in data["inputs"].items()},
                stages=tuple(StagePlan({k: _op_from(k, o, mesh) for k, o in s["ops"].items()}) for s in data["stages"]),
                **{k: data[k] for k in plain},
            )
        except (KeyError, TypeError, AttributeError, ValueError) as e:
            raise PlanMismatchError(f"malformed plan file: {type(e).__name__}: {e}") from e

    def save(self, path: str | Path) -> None:
        """Writes the plan; the file appears whole or not at all."""
        write_whole(path, json.dumps(self.to_json(), indent=1) + "\n", "the plan")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Reads a plan file.

        Raises:
            PlanMismatchError: Not a plan of this format version.
            OptionError: The file cannot be read.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as e:
            reason = e.strerror if isinstance(e, OSError) else e
            raise OptionError(f"cannot read the plan {path}: {reason}") from e
        try:
            data = json.loads(text)
        except json.JSONDecodeError as e:
            raise PlanMismatchError(f"{path}: not a plan file (JSON line {e.lineno}: {e.msg})") from e
        try:
            return cls.from_json(data)
        except (PlanMismatchError, OptionError) as e:
            raise type(e)(f"{path}: {e}") from e

    def _repr_html_(self) -> str:
        from autoplan.display import plan_html  # display stands above ir; only for notebooks

        return plan_html(self)

    def __str__(self) -> str:
        recomputed = sum(o.remat == "recompute" for o in self.ops.values())
        peak = max(self.peak_bytes, default=0)
        return (
            f"Plan for {self.model} on {self.mesh.size} devices of {self.cluster} (mesh {self.mesh}): "
            f"{self.step_time_s * 1e3:.2f} ms per step, peak {peak / 1e9:.3f} of {self.cap_bytes / 1e9:.3f} GB, "
            f"{recomputed} of {len(self.ops)} ops recomputed, gap {self.gap:.2%}"
        )


_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("model", "graph_fingerprint", "cluster", "cluster_fingerprint"), (str,)),
    **dict.fromkeys(("step_time_s", "objective_s", "bound_s", "gap", "solve_s"), (int, float)),
    **dict.fromkeys(("schedule", "options", "inputs", "breakdown", "source", "replicated"), (dict,)),
    "mesh": (dict, list, str),
    "cap_bytes": (int,),
    "peak_bytes": (list,),
    "stages": (list,),
}


def _check_types(data: Mapping[str, Any]) -> None:
    """Every key is there and holds what it should; names the first that does not."""
    for key, kinds in _TYPES.items():
        if key not in data:
            raise PlanMismatchError(f"malformed plan file: the key {key!r} is missing")
        if not isinstance(data[key], kinds) or isinstance(data[key], bool):
            wanted = " or ".join(k.__name__ for k in kinds)
            raise PlanMismatchError(f"malformed plan file: {key} is {data[key]!r:.60}, expected {wanted}")
    numbers = [("peak_bytes", n) for n in data["peak_bytes"]]
    numbers += [(f"{key}.{k}", n) for key in ("breakdown", "replicated") for k, n in data[key].items()]
    for key, n in numbers:
        if isinstance(n, bool) or not isinstance(n, int | float):
            raise PlanMismatchError(f"malformed plan file: {key} holds {n!r:.60}, expected a number")


def mesh_json(mesh: Mesh) -> dict[str, int]:
    """``{axis: size}`` in mesh order."""
    return dict(zip(mesh.axes, mesh.shape, strict=True))


def mesh_from(data: Mapping[str, int] | Sequence[int] | str) -> Mesh:
    """Inverse of `mesh_json`; also what `Mesh.parse` reads."""
    if isinstance(data, Mapping):
        return Mesh(tuple(data.values()), tuple(data))
    return Mesh.parse(data)


def _op_json(op: OpPlan) -> dict[str, Any]:
    out: dict[str, Any] = {"in": [str(p) for p in op.operands], "out": [str(p) for p in op.results]}
    if op.remat != "keep":
        out["remat"] = op.remat
    if any(op.keep_gathered):
        out["keep_gathered"] = [int(k) for k in op.keep_gathered]
    return out


def _op_from(key: str, data: Mapping[str, Any], mesh: Mesh) -> OpPlan:
    remat = data.get("remat", "keep")
    if remat not in ("keep", "recompute"):
        raise OptionError(f"remat {remat!r} is neither 'keep' nor 'recompute'")
    operands = tuple(Placement.parse(p, mesh) for p in data["in"])
    kept = tuple(bool(k) for k in data.get("keep_gathered", [0] * len(operands)))
    if len(kept) != len(operands):
        raise PlanMismatchError(f"op {key!r} has {len(operands)} operands, but {len(kept)} entries of keep_gathered")
    return OpPlan(operands, tuple(Placement.parse(p, mesh) for p in data["out"]), remat, kept)
