"""`plan` and `profile`, and the loop that makes the memory cap hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from torch import nn

from autoplan.api.emitting import Emitted, emit
from autoplan.codegen.liveness import Liveness
from autoplan.errors import InfeasibleError, OptionError
from autoplan.hardware import ClusterSpec, load_cluster
from autoplan.ir import Mesh, Plan, PlanOptions
from autoplan.ir.units import format_bytes, parse_bytes
from autoplan.planner import Candidate, Search, assemble
from autoplan.profiler import Profile, make_profile
from autoplan.trace import TracedModel, replay, trace
from autoplan.trace.capture import LossFn

Progress = Callable[[str], None]
Cluster = str | Path | ClusterSpec | None
DEFAULT_CLUSTER = "cpu-gloo"
EMISSIONS = 10
"""Proposals that are emitted and measured before the search settles for the smallest."""
SPREAD = 6
BISECTIONS = 8
"""Proposals beyond those when nothing fits, to say which cap would do: all over the frontier, then by bisection."""
MISSES = 3
"""Proposals that may miss a cap before it counts as one that nothing fits."""
CLOSE = 0.02
"""Relative distance from the largest cap known to fail at which the bisection ends."""


def make_options(
    *,
    cluster: Cluster = None,
    nodes: int | None = None,
    devices: int | None = None,
    memory: int | str | None = None,
    mesh: Mesh | Sequence[int] | str | None = None,
    pins: Mapping[str, str] | None = None,
    precision: str | None = None,
    optimizer: str = "adamw",
    remat: bool = True,
) -> PlanOptions:
    """`PlanOptions` from what a user writes.

    Raises:
        OptionError: Something is malformed.
    """
    size = parse_bytes(memory) if isinstance(memory, str) else memory
    name = cluster.name if isinstance(cluster, ClusterSpec) else None if cluster is None else str(cluster)
    return PlanOptions(
        cluster=name,
        nodes=nodes,
        devices=devices,
        memory_bytes=size,
        mesh=None if mesh is None else Mesh.parse(mesh),
        pins=dict(pins or {}),
        precision=precision or "fp32",
        optimizer=optimizer,
        remat=remat,
    )


def sized_cluster(cluster: Cluster, options: PlanOptions) -> ClusterSpec:
    """The cluster at the size that was asked for; a mesh alone asks for as many devices as it has.

    Raises:
        OptionError: The mesh is larger than the cluster.
    """
    devices = options.devices
    if devices is None and options.nodes is None and options.mesh is not None:
        devices = options.mesh.size
    spec = load_cluster(cluster or DEFAULT_CLUSTER, nodes=options.nodes, devices=devices)
    if options.mesh is not None and options.mesh.size > spec.n_devices:
        raise OptionError(f"mesh {options.mesh} needs {options.mesh.size} devices, the cluster has {spec.n_devices}")
    return spec


def plan(
    model: nn.Module,
    inputs: Any,
    *,
    cluster: Cluster = None,
    nodes: int | None = None,
    devices: int | None = None,
    memory: int | str | None = None,
    mesh: Mesh | Sequence[int] | str | None = None,
    pins: Mapping[str, str] | None = None,
    precision: str | None = None,
    optimizer: str = "adamw",
    remat: bool = True,
    loss_fn: LossFn | None = None,
    source: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Plans how to train a model, without running it.

    Args:
        model: Any module; weights may be on the meta device.
        inputs: Example batch of one step: a dict of keyword arguments, or a tuple.
        cluster: Name of a profile file, path of one, or a `ClusterSpec`; ``cpu-gloo`` by default.
        nodes: Number of nodes.
        devices: Number of devices, instead of `nodes`.
        memory: Cap per device in bytes, or as ``"40GB"``; the device's memory by default.
        mesh: Fixes the mesh, as ``(2, 4)`` or ``"dp=2,tp=4"``.
        pins: Fixes placements of parameters and inputs: glob over their names -> placement, one per mesh axis
            (``{"*.c_fc.weight": "R,S(1)"}``).
        precision: ``fp32`` or ``bf16`` (compute; parameters stay fp32).
        optimizer: ``adamw``, ``sgd``, ``sgd-momentum`` or ``none``.
        remat: False keeps every activation.
        loss_fn: ``loss_fn(outputs, inputs)`` where the model does not return its loss.
        source: How to load the model again; kept in the plan.
        progress: Called with the name of each phase.

    Raises:
        TraceError: The model cannot be traced.
        InfeasibleError: Nothing fits; says what does.
        OptionError: An option is malformed.
        ProfileError: The cluster is unknown or its file malformed.
    """
    options = make_options(
        cluster=cluster,
        nodes=nodes,
        devices=devices,
        memory=memory,
        mesh=mesh,
        pins=pins,
        precision=precision,
        optimizer=optimizer,
        remat=remat,
    )
    report = progress or (lambda phase: None)
    spec = sized_cluster(cluster, options)
    report("tracing the model")
    traced = trace(model, inputs, precision=options.precision, loss_fn=loss_fn)
    made, _ = plan_traced(traced, spec, options, report)
    return made.replace(source=dict(source)) if source else made


def plan_traced(
    traced: TracedModel, cluster: ClusterSpec, options: PlanOptions, progress: Progress
) -> tuple[Plan, Emitted]:
    """Searches, emits, and accepts the fastest plan whose emitted code fits."""
    if traced.graph.loss is None:
        raise OptionError(
            f"{traced.graph.name} returns no scalar loss that depends on its parameters: pass labels with the batch, "
            "or loss_fn=lambda outputs, inputs: ..."
        )
    cap = options.memory_bytes or cluster.device.usable_bytes
    search = Search(traced.graph, cluster, options, progress=progress)
    return accept(traced, search, cap, progress)


def accept(traced: TracedModel, search: Search, cap_bytes: int, progress: Progress) -> tuple[Plan, Emitted]:
    """The fastest candidate whose emitted code stays under the cap.

    Raises:
        InfeasibleError: None does; carries the smallest cap that works.
    """
    best: tuple[Candidate, Emitted, Liveness] | None = None
    for attempt in range(EMISSIONS):
        limit = best[0].value.cost_s if best else float("inf")
        candidate = search.next(cap_bytes, limit)
        if candidate is None or (best is not None and attempt >= EMISSIONS // 2):
            break
        progress(f"checking memory of emitted code ({attempt + 1})")
        emitted, live = _measure(traced, search, candidate, cap_bytes)
        if live.peak_bytes <= cap_bytes:
            best = candidate, emitted, live
    if best is None:
        best = _smallest(traced, search, cap_bytes, progress)
    candidate, emitted, live = best
    made = assemble(search, candidate, cap_bytes=cap_bytes)
    breakdown = {**made.breakdown, **{f"{k}_bytes": float(v) for k, v in live.parts.items()}}
    return made.replace(peak_bytes=(live.peak_bytes,), breakdown=breakdown), emitted


def _measure(traced: TracedModel, search: Search, candidate: Candidate, cap_bytes: int) -> tuple[Emitted, Liveness]:
    emitted = emit(traced.graph, assemble(search, candidate, cap_bytes=cap_bytes))
    idle = sum(n for sizes in traced.idle_bytes.values() for n in sizes)
    live = emitted.memory(search.options.optimizer, idle)
    search.learn(candidate, live.peak_bytes)
    return emitted, live


def _smallest(
    traced: TracedModel, search: Search, cap_bytes: int, progress: Progress
) -> tuple[Candidate, Emitted, Liveness]:
    """The last proposals: all over the frontier, then by bisection below the least peak found.

    They do not depend on the cap, so that what is suggested here is found again under the suggested cap.
    """
    search = search.afresh()
    candidates = search.spread(SPREAD)
    low, misses = min(c.value.bytes for c in candidates), 0
    least: Liveness | None = None
    for attempt in range(SPREAD + BISECTIONS):
        progress(f"looking for the smallest plan ({attempt + 1})")
        target = low if least is None else (low + least.peak_bytes) // 2
        candidate = candidates.pop(0) if candidates else search.next(target, hopeful=True)
        if candidate is not None:
            emitted, live = _measure(traced, search, candidate, cap_bytes)
            if live.peak_bytes <= cap_bytes:
                return candidate, emitted, live
            misses += live.peak_bytes > target and not candidates
            if least is None or live.peak_bytes < least.peak_bytes:
                least = live
        if candidate is None or misses == MISSES:
            low, misses = target, 0
        if least is not None and not candidates and least.peak_bytes <= low * (1 + CLOSE):
            break
    assert least is not None
    binding = max(least.parts, key=lambda k: least.parts[k])
    unit, name = (1_000_000, "MB") if least.peak_bytes > 100_000_000 else (1_000, "KB")
    works = f"{-(-least.peak_bytes // unit)}{name}"
    raise InfeasibleError(
        f"no plan fits {format_bytes(cap_bytes)} per device: the smallest found peaks at "
        f"{format_bytes(least.peak_bytes)}, in {least.phase} at {least.label}, where {binding} take "
        f"{format_bytes(least.parts[binding])}. A cap of {works} works (--memory {works}); so may more devices or a "
        "smaller batch.",
        minimum_bytes=least.peak_bytes,
    )


def profile(
    model: nn.Module,
    inputs: Any,
    *,
    cluster: Cluster = DEFAULT_CLUSTER,
    precision: str | None = None,
    optimizer: str = "adamw",
    loss_fn: LossFn | None = None,
    causal_flops: Literal["full", "half"] = "full",
    progress: Progress | None = None,
) -> Profile:
    """What a training step costs per op on one device of a cluster, without running it.

    Args:
        model: Any module; weights may be on the meta device.
        inputs: Example batch.
        cluster: Whose device to price on.
        precision: ``fp32`` or ``bf16``.
        optimizer: Decides the optimizer state.
        loss_fn: Loss, where the model does not return it.
        causal_flops: ``full`` counts causal attention like any other, as torch's flop counter does; ``half`` counts
            the half that kernels execute which skip masked blocks.
        progress: Called with the name of each phase.

    Raises:
        TraceError: The model cannot be traced.
        ProfileError: The cluster is unknown.
    """
    options = make_options(cluster=cluster, precision=precision, optimizer=optimizer)
    if progress:
        progress("tracing the model")
    traced = trace(model, inputs, precision=options.precision, loss_fn=loss_fn, as_is=True)
    if progress:
        progress("following memory")
    events = replay(traced.graph, in_place=traced.in_place)
    where = load_cluster(cluster or DEFAULT_CLUSTER)
    return make_profile(
        traced.graph, where, events, idle_bytes=traced.idle_bytes, optimizer=optimizer, notes=traced.notes,
        causal_flops=causal_flops,
    )  # fmt: skip
