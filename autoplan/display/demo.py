"""What the demo did, as tables."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.text import Text

from autoplan.display.grid import Grid, rich_table
from autoplan.display.plan import plan_tables
from autoplan.ir.units import format_bytes, format_percent, format_seconds

if TYPE_CHECKING:  # the demo's module imports torch
    from autoplan.api import DemoResult


def demo_tables(result: DemoResult) -> list[RenderableType]:
    """The plan, memory of each rank, losses beside those of one process, and a verdict."""
    return [
        *plan_tables(result.plan, ops=False),
        *(rich_table(grid) for grid in demo_grids(result)),
        Text("; ".join(result.failures), "bold red") if result.failures else Text(_verdict(result), "bold green"),
    ]


def demo_grids(result: DemoResult) -> list[Grid]:
    """Memory and losses."""
    predicted, cap = max(result.plan.peak_bytes, default=0), result.plan.cap_bytes
    memory = tuple(
        (f"rank {i}", format_bytes(predicted), format_bytes(peak), _difference(peak, predicted), format_bytes(cap))
        for i, peak in enumerate(result.peak_bytes)
    )
    free = f"without a cap the plan needs {format_bytes(result.free_bytes)}"
    seconds = ", ".join(f"{name} {format_seconds(s)}" for name, s in result.seconds.items())
    return [
        Grid("Peak memory", ("", ">predicted", ">measured", ">difference", ">cap"), memory, note=free),
        Grid(
            "Training",
            (">step", ">loss", ">one process", ">difference", ">gradient norm", ">one process", ">difference"),
            tuple(_steps(result)),
            note=f"took: {seconds}",
        ),
    ]


def _steps(result: DemoResult) -> Iterable[tuple[str, ...]]:
    columns = (result.losses, result.single_losses, result.norms, result.single_norms)
    for i, (loss, single, norm, single_norm) in enumerate(zip(*columns, strict=True)):
        yield (
            str(i),
            f"{loss:.6f}",
            f"{single:.6f}",
            _relative(loss, single),
            f"{norm:.6f}",
            f"{single_norm:.6f}",
            _relative(norm, single_norm),
        )


def _relative(a: float, b: float) -> str:
    return f"{abs(a - b) / abs(b):.1e}" if b else f"{abs(a):.1e}"


def _difference(measured: float, predicted: float) -> str:
    return format_percent(measured / predicted - 1) if predicted else ""


def _verdict(result: DemoResult) -> str:
    return (
        f"Losses agree to {result.worst_loss:.1e} and gradient norms to {result.worst_norm:.1e} relative; every rank "
        f"stays under the cap of {format_bytes(result.plan.cap_bytes)}."
    )
