"""`parallelize`: the one line."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from autoplan.api.emitting import Emitted, adapt, emit
from autoplan.api.planning import Cluster, make_options, plan_traced, sized_cluster
from autoplan.codegen.partition import Partitioned
from autoplan.codegen.program import LocalProgram
from autoplan.errors import OptionError, PlanMismatchError
from autoplan.hardware import load_cluster
from autoplan.ir import Mesh, Plan, PlanOptions
from autoplan.runtime import InputSignature, ParallelModule, RuntimeMesh, abort_on_error, broadcast_or_raise
from autoplan.runtime.guard import note_uncaught, synchronise_weights, unlike_ranks
from autoplan.trace import TracedModel, trace
from autoplan.trace.capture import LossFn


def parallelize(
    model: nn.Module,
    batch: Any,
    *,
    cluster: Cluster = None,
    memory: int | str | None = None,
    mesh: Mesh | Sequence[int] | str | None = None,
    pins: Mapping[str, str] | None = None,
    plan: Plan | str | Path | None = None,
    loss_fn: LossFn | None = None,
    precision: str | None = None,
    optimizer: str = "adamw",
    remat: bool = True,
    inputs: Literal["global", "sharded"] = "global",
) -> ParallelModule:
    """Plans a model for the running processes and returns the module that runs the plan.

    Under ``torchrun`` the running process group is used, and started where none runs; in a single process the same
    script runs with world size 1. Rank 0 plans; all ranks execute that plan.

    Args:
        model: The model to train, with its weights; where they differ between ranks, rank 0's are taken.
        batch: One example batch, of the shapes to train with (dict of keyword arguments, or tuple).
        cluster: Profile file of the hardware; ``cpu-gloo`` by default.
        memory: Cap per device, in bytes or as ``"40GB"``.
        mesh: Fixes the mesh.
        pins: Fixes placements by name, as in `autoplan.plan`.
        plan: A plan, or the path of one, to run instead of planning.
        loss_fn: ``loss_fn(outputs, inputs)`` where the model does not return its loss; the module then returns
            ``(loss, outputs)``.
        precision: ``fp32`` or ``bf16``.
        optimizer: Which optimizer will be used, for its memory.
        remat: False keeps every activation.
        inputs: ``global``: every rank passes the whole batch; ``sharded``: its own piece of it.

    Raises:
        AutoplanError: As `autoplan.plan`; on every rank, when it happens on any.
        PlanMismatchError: `plan` was made for another model, batch, precision, mesh or format.
    """
    world = _start()
    note_uncaught()
    with abort_on_error("parallelize"):
        _check_bare(model)
        given = Plan.load(plan) if isinstance(plan, str | Path) else plan
        options = make_options(
            cluster=cluster,
            devices=None if given else _devices(world, mesh),
            memory=memory,
            mesh=mesh,
            pins=pins,
            precision=precision or (given.options.precision if given else None),
            optimizer=optimizer,
            remat=remat,
        )
        traced = trace(model, batch, precision=options.precision, loss_fn=loss_fn)
        chosen, emitted = _agree(traced, cluster, options, given, world)
        if emitted is None:
            emitted = emit(traced.graph, chosen, device=_device_type())
        at = RuntimeMesh.create(chosen.mesh)
        if synchronise_weights(model, at):
            warnings.warn(
                "weights differed between ranks and were set to rank 0's: call torch.manual_seed with one seed on "
                "every rank before building the model, or load the same weights",
                stacklevel=2,
            )
        signature = InputSignature.of(traced.args, traced.kwargs, traced.paths, model.forward)

        def retrace(training: bool) -> tuple[Partitioned, LocalProgram]:
            before = model.training
            model.train(training)
            try:
                other = trace(model, batch, precision=options.precision, loss_fn=loss_fn).graph
            finally:
                model.train(before)
            made = emit(other, adapt(chosen, other), device=_device_type())
            return made.graphs, made.program

        module = ParallelModule(
            model, emitted.graphs, emitted.program, signature, traced.out_spec, at=at, inputs=inputs, retrace=retrace
        )
    object.__setattr__(module, "plan", chosen)
    return module


def _check_bare(model: nn.Module) -> None:
    if isinstance(model, ParallelModule):
        raise OptionError("the model is parallel already: pass the model itself to parallelize, once")
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise OptionError(f"the model is wrapped in {type(model).__name__}: pass model.module, autoplan does the rest")
    if any(isinstance(p, DTensor) for p in model.parameters()):
        raise OptionError("parameters are DTensors already (by fully_shard, parallelize_module?): pass the bare model")


def _start() -> int:
    """World size; starts torch.distributed under torchrun where the script has not."""
    if not dist.is_available() or dist.is_initialized():
        return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        if _device_type() == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("nccl" if _device_type() == "cuda" else "gloo")
        return dist.get_world_size()
    return 1


def _device_type() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _devices(world: int, mesh: Mesh | Sequence[int] | str | None) -> int:
    if mesh is None:
        return world
    size = Mesh.parse(mesh).size
    if size > world:
        raise OptionError(
            f"mesh {Mesh.parse(mesh)} needs {size} processes, {world} run: torchrun --nproc-per-node {size}"
        )
    return size


def _agree(
    traced: TracedModel, cluster: Cluster, options: PlanOptions, given: Plan | None, world: int
) -> tuple[Plan, Emitted | None]:
    """The plan that all ranks execute: rank 0's. Rank 0 also has its emitted graphs where it has just planned."""
    made: list[Emitted] = []
    _check_options(cluster, options, given)

    def decide() -> str:
        if given is not None:
            _check(given, traced, cluster, world)
            return json.dumps(given.to_json())
        found, emitted = plan_traced(traced, sized_cluster(cluster, options), options, lambda phase: None)
        if _device_type() == "cpu":
            made.append(emitted)
        return json.dumps(found.to_json())

    text = broadcast_or_raise(decide)
    chosen = Plan.from_json(json.loads(text))
    _check_hash(chosen)
    if chosen.graph_fingerprint != traced.graph.fingerprint:
        raise PlanMismatchError(
            f"this rank traced another graph ({traced.graph.fingerprint}) than rank 0 planned "
            f"({chosen.graph_fingerprint}): model, batch shapes and torch version must be alike on all ranks"
        )
    if world > chosen.mesh.size and (not dist.is_initialized() or dist.get_rank() == 0):
        warnings.warn(f"the plan uses {chosen.mesh.size} of {world} processes; the others stay idle", stacklevel=3)
    return chosen, made[0] if made else None


def _check_options(cluster: Cluster, options: PlanOptions, given: Plan | None) -> None:
    """All ranks must ask for the same; raises on every rank where they do not."""
    spec = None if cluster is None else load_cluster(cluster).fingerprint
    asked = [options.to_json(), spec, None if given is None else given.hash]
    if others := unlike_ranks(json.dumps(asked, sort_keys=True)):
        raise OptionError(f"ranks {others} call parallelize with other options or another plan than rank 0")


def _check_hash(chosen: Plan) -> None:
    """All ranks must hold one plan; raises on every rank where they do not."""
    if others := unlike_ranks(chosen.hash):
        raise PlanMismatchError(
            f"ranks {others} hold another plan than rank 0 (here its hash is {chosen.hash}): autoplan must be of one "
            "version on all ranks"
        )


def _check(plan: Plan, traced: TracedModel, cluster: Cluster, world: int) -> None:
    if plan.graph_fingerprint != traced.graph.fingerprint:
        raise PlanMismatchError(
            f"the plan was made for {plan.model} with graph fingerprint {plan.graph_fingerprint}; this model, batch, "
            f"mode and precision give {traced.graph.fingerprint}. Plan again, or pass the batch it was made for"
        )
    if plan.mesh.size > world:
        raise PlanMismatchError(
            f"the plan's mesh ({plan.mesh}) needs {plan.mesh.size} processes, but {world} run: "
            f"torchrun --nproc-per-node {plan.mesh.size} ..., or plan again"
        )
    if cluster is not None:
        spec = load_cluster(cluster, devices=plan.options.devices, nodes=plan.options.nodes)
        if spec.fingerprint != plan.cluster_fingerprint:
            raise PlanMismatchError(
                f"the plan was made for cluster {plan.cluster} with fingerprint {plan.cluster_fingerprint}, but "
                f"{spec.name} has {spec.fingerprint}: leave cluster out to run it all the same, or plan again"
            )
