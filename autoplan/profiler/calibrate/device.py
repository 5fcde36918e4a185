"""Overheads, matrix products, copies and new memory of a device."""

from __future__ import annotations

import torch
from torch import nn

from autoplan.profiler.calibrate.machine import Machine, Sample, net


def launch(m: Machine) -> tuple[Sample, Sample]:
    """Seconds of one kernel where nothing but overhead counts: as in a step, after other work, and in a hot loop.

    A block of linear, GELU and layer norm starts 3 kernels forward and 3 + 1 + 1 backward, as the profiler counts them.
    """
    blocks = [layer for _ in range(16) for layer in (nn.Linear(4, 4), nn.GELU(), nn.LayerNorm(4))]
    model = nn.Sequential(*blocks).to(m.device)
    x = torch.ones(2, 4, device=m.device, requires_grad=True)

    def step() -> None:
        model(x).sum().backward()
        model.zero_grad()

    return m.cold(step, per=16 * 8), m.sample(step, per=16 * 8)


def view(m: Machine) -> Sample:
    """Seconds of a view in eager autograd, forward or backward, after other work."""
    x = torch.ones(2, 2, device=m.device, requires_grad=True)

    def step() -> None:
        y = x
        for _ in range(32):
            y = y.transpose(0, 1).view_as(y)
        y.sum().backward()  # type: ignore[no-untyped-call]

    return m.cold(step, per=4 * 32)


def bare(m: Machine) -> float:
    """Seconds of a call into PyTorch, without modules and autograd."""
    a, b = torch.zeros(1, device=m.device), torch.ones(1, device=m.device)
    return m.sample(lambda: b.copy_(a)).seconds


def updates(m: Machine) -> list[tuple[float, Sample]]:
    """Seconds of AdamW, as `torch.optim` runs it by itself, for one parameter of so many bytes."""
    rows = []
    for n, count in ((1 << 4, 24), (1 << 12, 24), (1 << 16, 8), (1 << 20, 2)):
        parameters = [nn.Parameter(torch.zeros(n, device=m.device)) for _ in range(count)]
        for p in parameters:
            p.grad = torch.ones_like(p)
        rows.append((4.0 * n, m.cold(torch.optim.AdamW(parameters).step, per=count)))
    return rows


def products(
    m: Machine, launch: float, quick: bool
) -> tuple[list[tuple[float, Sample]], list[tuple[str, float, Sample]]]:
    """(flops, sample) of square products in float32, and (dtype, flops per second, sample) of one size."""
    cuda = m.device.type == "cuda"
    sizes = (
        (256, 512, 1024, 2048, 4096, 8192)
        if cuda
        else (32, 64, 128, 256, 512)
        if quick
        else (32, 64, 128, 256, 512, 1024)
    )

    def product(n: int, dtype: torch.dtype) -> tuple[float, Sample]:
        a = torch.randn(n, n, device=m.device).to(dtype)
        out = torch.empty_like(a)
        return 2.0 * n**3, net(m.sample(lambda: torch.mm(a, a, out=out)), launch)

    rows = [product(n, torch.float32) for n in sizes]
    rates = []
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        flops, s = product(sizes[-1] if cuda else 256, dtype)
        rates.append((str(dtype).removeprefix("torch."), flops / s.seconds, s))
    return rows, rates


def copies(m: Machine, launch: float, quick: bool) -> list[tuple[float, Sample]]:
    """(bytes read plus written, sample) of copies into memory that exists."""
    largest = 28 if m.device.type == "cuda" else 24 if quick else 26
    rows = []
    for power in range(14, largest + 1, 2):
        a = torch.ones(1 << power >> 2, device=m.device)
        b = torch.empty_like(a)
        rows.append((2.0 * a.nbytes, net(m.sample(lambda a=a, b=b: b.copy_(a)), launch)))  # type: ignore[misc]
    return rows


def new_tensors(m: Machine, quick: bool) -> list[tuple[float, Sample]]:
    """Seconds that a new tensor costs beyond one that exists; 64 MiB are held and freed in reverse, as in training.

    With that much held the figures hardly depend on what the process allocated before; with less the C library keeps or
    returns all of it, by history.
    """
    torch.empty(1 << 20).fill_(1.0)
    rows = []
    for power in range(14, 25 if quick else 27, 2):
        n, count = 1 << power >> 2, max(2, 1 << 26 >> power)
        kept = [torch.zeros(n) for _ in range(4)]

        def made(n: int = n, count: int = count) -> None:
            held = [torch.empty(n).fill_(1.0) for _ in range(count)]
            while held:
                held.pop()

        exists = m.sample(lambda k=kept: [t.fill_(1.0) for t in k], per=4)  # type: ignore[misc]
        new = m.sample(made, per=count)
        rows.append((4.0 * n, Sample(max(new.seconds - exists.seconds, 1e-7), new.spread)))
    return rows
