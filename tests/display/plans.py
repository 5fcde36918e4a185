"""Plans written by hand, shaped like those of a GPT-2."""

from __future__ import annotations

from autoplan.ir import Mesh, OpPlan, Placement, Plan, PlanOptions, StagePlan
from autoplan.ir.plan import Remat

MESH = Mesh((2, 4))


def place(text: str) -> Placement:
    return Placement.parse(text, MESH)


def layer(i: int, *, recompute: bool = True) -> dict[str, OpPlan]:
    h = f"transformer.h.{i}"
    act: Remat = "recompute" if recompute else "keep"
    return {
        f"{h}.ln_1:aten.layer_norm#0": OpPlan((place("S(0),R"), place("R,R")), (place("S(0),R"),)),
        f"{h}.mlp.c_fc:aten.addmm#0": OpPlan(
            (place("R,S(0)"), place("S(0),R"), place("R,S(1)")), (place("S(0),S(1)"),), "keep", (False, True, False)
        ),
        f"{h}.mlp.act:aten.mul#0": OpPlan((place("S(0),S(1)"),), (place("S(0),S(1)"),), act),
        f"{h}.mlp.act:aten.mul#1": OpPlan((place("S(0),S(1)"),), (place("S(0),S(1)"),), act),
        f"{h}.mlp.act:aten.tanh#0": OpPlan((place("S(0),S(1)"),), (place("S(0),S(1)"),), act),
    }


def make_plan(*, layers: int = 12, recomputed: int = 12, cap: int = 40_000_000_000, time_s: float = 0.0123) -> Plan:
    ops: dict[str, OpPlan] = {}
    inputs = {"input_ids": place("S(0),R"), "labels": place("S(0),R"), "transformer.wte.weight": place("R,S(0)")}
    for i in range(layers):
        ops |= layer(i, recompute=i < recomputed)
        inputs[f"transformer.h.{i}.mlp.c_fc.weight"] = place("R,S(1)")
        inputs[f"transformer.h.{i}.mlp.c_fc.bias"] = place("R,S(0)" if i % 2 else "R,R")
    plan = Plan(
        model="GPT2LMHeadModel",
        graph_fingerprint="0123456789abcdef",
        cluster="a100-8x",
        cluster_fingerprint="fedcba9876543210",
        mesh=MESH,
        inputs=inputs,
        stages=(StagePlan(ops),),
        options=PlanOptions(cluster="a100-8x", pins={"*.c_fc.weight": "R,S(1)"}, mesh=MESH),
        step_time_s=time_s,
        peak_bytes=(31_500_000_000,),
        cap_bytes=cap,
        objective_s=time_s,
        bound_s=time_s * 0.9995,
        gap=0.0005,
        solve_s=1.5,
        breakdown={
            "forward_compute_s": 0.003, "backward_compute_s": 0.006, "recompute_s": 0.001, "communication_s": 0.0023,
            "parameter_bytes": 5e9, "gradient_bytes": 5e9, "optimizer_bytes": 10e9, "activation_bytes": 11e9,
            "temporary_bytes": 0.5e9, "cells": 12,
        },
        replicated={"mylib.<magic>.default": 2},
        source={"model": "train.py:build", "batch": 8, "seq": 512},
    )  # fmt: skip
    return Plan.from_json(plan.to_json())  # as it is after a round trip: keep_gathered is written out
