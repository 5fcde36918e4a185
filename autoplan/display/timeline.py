"""Memory over one training step: a line of blocks for terminals, a stacked picture in SVG for notebooks."""

from __future__ import annotations

import html
from collections.abc import Sequence

from autoplan.display.svg import COLOURS, LEFT, WIDTH
from autoplan.ir.units import format_bytes
from autoplan.profiler import Moment

BLOCKS = "▁▂▃▄▅▆▇█"
PARTS = ("parameters", "optimizer", "inputs", "gradients", "saved", "temporaries")
LABELS = ("parameters", "optimizer state", "buffers and batch", "gradients", "saved activations", "temporaries")
COLUMNS, HEIGHT, TOP = 300, 160, 24


def columns(timeline: Sequence[Moment], width: int) -> list[Moment]:
    """At most `width` moments, each the largest of a run of neighbours of one phase."""
    out: list[Moment] = []
    for phase in dict.fromkeys(m.phase for m in timeline):
        run = [m for m in timeline if m.phase == phase]
        n = max(1, min(len(run), width * len(run) // len(timeline)))
        bounds = [len(run) * i // n for i in range(n + 1)]
        out += [max(run[a:b], key=lambda m: m.total) for a, b in zip(bounds, bounds[1:], strict=False)]
    return out


def sparkline(timeline: Sequence[Moment], width: int = 100) -> str:
    """Memory as a line of blocks, from zero to the peak, with the phases below it."""
    shown = columns(timeline, width)
    peak = max(m.total for m in shown) or 1
    line = "".join(BLOCKS[min(7, m.total * 8 // peak)] for m in shown)
    phases = [(p, sum(m.phase == p for m in shown)) for p in dict.fromkeys(m.phase for m in shown)]
    below = "".join(("└" + p)[:n].ljust(n) for p, n in phases)
    return f"Memory over the step, peak {format_bytes(peak)}\n\n {line}\n {below}"


def timeline_svg(timeline: Sequence[Moment], cap: float = 0.0) -> str:
    """Memory over the step, its parts stacked, as SVG that needs nothing else.

    Args:
        timeline: Moments in order.
        cap: Bytes that the device has, drawn where the picture reaches that far; or 0.
    """
    shown = columns(timeline, COLUMNS)
    peak = max(m.total for m in shown) or 1
    step = (WIDTH - 2 * LEFT) / len(shown)
    capped = 0 < cap <= 1.5 * peak
    scale = HEIGHT / max(peak, cap if capped else 0)
    ground, base = TOP + HEIGHT, [0.0] * len(shown)
    out = []
    for part, label, colour in zip(PARTS, LABELS, COLOURS, strict=False):
        above = [b + getattr(m, part) for b, m in zip(base, shown, strict=True)]
        edge = [f"{LEFT + (i + k) * step:.1f},{ground - y * scale:.1f}" for i, y in enumerate(above) for k in (0, 1)]
        back = [f"{LEFT + (i + k) * step:.1f},{ground - y * scale:.1f}" for i, y in enumerate(base) for k in (0, 1)]
        most = format_bytes(max(getattr(m, part) for m in shown))
        if any(getattr(m, part) for m in shown):
            out.append(
                f'<polygon points="{" ".join(edge + back[::-1])}" fill="{colour}"><title>{label}: up to {most}</title>'
                "</polygon>"
            )
        base = above
    at, text = 0, 'font-size="12" fill="currentColor"'
    for phase in dict.fromkeys(m.phase for m in shown):
        x = LEFT + at * step
        out.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{ground + 4}" stroke="currentColor" stroke-opacity=".4"/>'
            f'<text x="{x + 3:.1f}" y="{ground + 14}" {text}>{html.escape(phase)}</text>'
        )
        at += sum(m.phase == phase for m in shown)
    if capped:
        y = ground - cap * scale
        out.append(f'<line x1="{LEFT}" x2="{WIDTH - LEFT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#d62728"/>')
    title = f"peak {format_bytes(peak)}" + (f"; the device has {format_bytes(cap)}" if cap else "")
    out.append(f'<text x="{LEFT}" y="14" {text}>{title}</text>')
    for i, (label, colour) in enumerate(zip(LABELS, COLOURS, strict=False)):
        x, y = LEFT + 120 * i, ground + 34
        out.append(
            f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{colour}"/>'
            f'<text x="{x + 13}" y="{y}" font-size="11" fill="currentColor">{label}</text>'
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {ground + 42}" width="{WIDTH}" role="img" '
        f'style="max-width:100%;font-family:sans-serif"><title>Memory over the step: {title}</title>'
        + "".join(out)
        + "</svg>"
    )
