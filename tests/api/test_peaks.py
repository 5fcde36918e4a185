"""The peak that a plan predicts is the peak that its ranks reach, to a few bytes, for many small networks."""

from __future__ import annotations

import random

import torch
from torch import nn

from autoplan import parallelize, plan
from autoplan.errors import InfeasibleError
from autoplan.runtime import measure_peak
from tests.multiprocess import run_ranks

HELD_LOSS_BYTES = 4
"""Predictions let the user hold the loss through the optimizer's update; the step below lets it go."""


class Network(nn.Module):
    """Linear layers of random widths, some with norms."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        torch.manual_seed(seed)
        self.widths = [draw.choice([4, 8, 12, 16]) for _ in range(draw.randint(2, 5))]
        layers: list[nn.Module] = []
        for a, b in zip(self.widths, self.widths[1:], strict=False):
            layers += [nn.Linear(a, b, bias=draw.random() < 0.6), draw.choice([nn.ReLU, nn.GELU, nn.Tanh, nn.SiLU])()]
            if draw.random() < 0.3:
                layers.append(nn.LayerNorm(b))
        self.layers = nn.Sequential(*layers)
        self.rows = draw.choice([4, 8, 16])

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.layers(x) - y).square().mean()}

    def batch(self) -> dict[str, torch.Tensor]:
        return {"x": torch.randn(self.rows, self.widths[0]), "y": torch.randn(self.rows, self.widths[-1])}


def peaks(rank: int, seed: int, cap: int) -> tuple[int, int] | None:
    model = Network(seed)
    batch = model.batch()
    try:
        module = parallelize(model, batch, memory=cap)
    except InfeasibleError:
        return None
    del model
    optimizer = torch.optim.AdamW(module.parameters())

    def step() -> None:
        module(**batch)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    return module.plan.peak_bytes[0], min(measure_peak(step) for _ in range(3))


def test_peaks_of_random_networks() -> None:
    compared = 0
    for seed in range(6):
        model = Network(seed)
        free = plan(model, model.batch(), cluster="cpu-gloo", devices=2).peak_bytes[0]
        for cap in (free, int(0.85 * free)):
            for found in run_ranks(2, peaks, seed, cap):
                if found is not None:
                    predicted, measured = found
                    assert predicted - HELD_LOSS_BYTES <= measured <= predicted <= cap, (seed, cap)
                    compared += 1
    assert compared >= 20
