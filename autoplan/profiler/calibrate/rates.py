"""Ops that run far from the rate of a matrix product, each by itself at a usual size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from autoplan.profiler.calibrate.machine import Machine, Sample, net
from autoplan.profiler.flops import operations
from autoplan.profiler.seconds import rate_key
from autoplan.trace import trace


class _Probe(nn.Module):
    """One op of a usual size, so that tracing finds it and the clock sees little else."""

    def __init__(self, run: Callable[..., Any], *operands: tuple[int, ...]) -> None:
        super().__init__()
        self.run = run
        self.operands = nn.ParameterList(nn.Parameter(torch.rand(*shape)) for shape in operands)

    def forward(self, unused: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor | tuple[torch.Tensor, ...] = self.run(*self.operands)
        return out if isinstance(out, torch.Tensor) else out[0]


def _probes() -> list[_Probe]:
    rows, image = (512, 256), (4, 32, 32, 32)
    pointwise: list[Callable[..., torch.Tensor]] = [
        torch.tanh, torch.exp, torch.sigmoid, torch.erf, torch.cos, torch.sin, torch.rsqrt, F.gelu, F.silu, F.softplus,
        F.relu, lambda x: x.pow(2), lambda x: x.pow(3.0), lambda x: F.softmax(x, -1), lambda x: F.log_softmax(x, -1),
        lambda x: F.dropout(x, 0.1), lambda x: F.layer_norm(x, (256,)),
    ]  # fmt: skip

    def attention(x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(x, torch.zeros(512, dtype=torch.int64, device=x.device))

    def masked(x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x, torch.zeros(1, 1, 128, 128, device=x.device))

    def bag(w: torch.Tensor) -> torch.Tensor:
        return F.embedding_bag(torch.arange(4096, device=w.device).view(512, 8) % 2000, w, mode="sum")

    def pairs(x: torch.Tensor) -> torch.Tensor:
        i, j = torch.tril_indices(16, 16, -1, device=x.device)
        return x[:, i, j]

    return [
        *(_Probe(run, rows) for run in pointwise),
        _Probe(attention, (4, 4, 128, 32)),
        _Probe(lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.1), (4, 4, 128, 32)),
        _Probe(masked, (4, 4, 128, 32)),
        _Probe(lambda x, m: F.scaled_dot_product_attention(x, x, x, m), (4, 4, 128, 32), (1, 4, 128, 128)),
        _Probe(loss, (512, 1024)),
        _Probe(bag, (2000, 64)),
        _Probe(pairs, (256, 16, 16)),
        *(_Probe(kind(128, 128, batch_first=True), (8, 64, 128)) for kind in (nn.LSTM, nn.GRU, nn.RNN)),
        _Probe(lambda x, w: F.conv1d(x, w, padding=1), (4, 64, 128), (64, 64, 3)),
        _Probe(lambda x, w: F.conv1d(x, w, padding=1, groups=64), (4, 64, 128), (64, 1, 3)),
        _Probe(F.conv1d, (4, 64, 128), (64, 64, 1)),
        _Probe(lambda x, w: F.conv2d(x, w, padding=1), image, (32, 32, 3, 3)),
        _Probe(lambda x, w: F.conv2d(x, w, padding=3, groups=32), image, (32, 1, 7, 7)),
        _Probe(F.conv2d, image, (32, 32, 1, 1)),
        _Probe(lambda x, w: F.conv_transpose2d(x, w, stride=2), image, (32, 32, 2, 2)),
        _Probe(lambda x: F.batch_norm(x, None, None, training=True), image),
        _Probe(lambda x: F.group_norm(x, 4), image),
        _Probe(lambda x: F.max_pool2d(x, 2), image),
        _Probe(lambda x: F.avg_pool2d(x, 2), image),
    ]


def own_rates(m: Machine, launch: float) -> list[tuple[str, tuple[float, float], Sample]]:
    """(op, (forward, backward) flops per second, sample); its result is freed each time, so that no memory is new."""
    found: dict[str, tuple[tuple[float, float], Sample]] = {}
    nothing = torch.zeros(1, device=m.device)
    for probe in _probes():
        graph = trace(probe, (nothing.cpu(),)).graph
        op = max(graph.ops, key=lambda op: sum(operations(op, graph)))
        ahead, behind = operations(op, graph)
        model = probe.to(m.device)
        gradient = torch.ones_like(model(nothing))

        def forward(model: nn.Module = model) -> torch.Tensor:
            out: torch.Tensor = model(nothing)
            return out

        def both(run: Callable[[], torch.Tensor] = forward, g: torch.Tensor = gradient) -> None:
            run().backward(g)  # type: ignore[no-untyped-call]

        one, back = m.difference(forward, both)
        first, second = net(one, launch).seconds, net(back, launch).seconds
        rates = (max(ahead, 1) / first, max(behind, 1) / second)  # a copy by index computes backward only
        key = rate_key(op, graph)
        if key not in found or rates[0] < found[key][0][0]:  # the slowest variant of an op
            found[key] = rates, Sample(one.seconds, max(one.spread, back.spread))
    return [(key, rates, sample) for key, (rates, sample) in found.items()]
