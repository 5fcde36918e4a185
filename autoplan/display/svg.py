"""Memory as one bar, drawn as SVG that needs nothing else."""

from __future__ import annotations

import html
from collections.abc import Mapping

from autoplan.ir.units import format_bytes, format_percent

WIDTH, LEFT, BAR = 720, 10, 26
COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#b07aa1", "#9c755f", "#bab0ac", "#76b7b2")


def memory_svg(parts: Mapping[str, float], cap: float = 0.0) -> str:
    """A stacked bar of bytes, with the cap as a line where there is one.

    Args:
        parts: Name -> bytes, drawn from left to right; what is not above zero is left out.
        cap: Bytes that are allowed, or 0.
    """
    shown = {k: float(v) for k, v in parts.items() if v > 0}
    total = sum(shown.values())
    scale = (WIDTH - 2 * LEFT) / (max(total, cap) * 1.02 or 1.0)
    out, x = [], float(LEFT)
    for i, (name, value) in enumerate(shown.items()):
        label = f"{name}: {format_bytes(value)}"
        out.append(
            f'<rect x="{x:.1f}" y="24" width="{value * scale:.1f}" height="{BAR}" fill="{COLOURS[i % len(COLOURS)]}">'
            f"<title>{html.escape(label)}</title></rect>"
        )
        x += value * scale
    at = LEFT + cap * scale
    left = cap > 0 and at < WIDTH / 2  # the cap's name then stands right of its line, the sum at the far end
    if cap > 0:
        colour = "#d62728" if total > cap else "currentColor"
        out.append(
            f'<rect x="{LEFT}" y="24" width="{cap * scale:.1f}" height="{BAR}" fill="none" stroke="currentColor" '
            f'stroke-opacity=".35"/>'
            f'<line x1="{at:.1f}" x2="{at:.1f}" y1="18" y2="{24 + BAR + 6}" stroke="{colour}" stroke-width="2"/>'
            f'<text x="{at:.1f}" y="14" text-anchor="{"start" if left else "end"}" font-size="12" fill="{colour}">cap '
            f"{html.escape(format_bytes(cap))}</text>"
        )
    used = f"{format_bytes(total)}" + (f", {format_percent(total / cap)} of the cap" if cap > 0 else "")
    where = f'x="{WIDTH - LEFT}" text-anchor="end"' if left else f'x="{LEFT}"'
    out.append(f'<text {where} y="14" font-size="12" fill="currentColor">{html.escape(used)}</text>')
    legend, height = _legend(shown)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" role="img" '
        f'style="max-width:100%;font-family:sans-serif"><title>Memory: {html.escape(used)}</title>'
        + "".join(out)
        + legend
        + "</svg>"
    )


def _legend(parts: Mapping[str, float]) -> tuple[str, int]:
    """Coloured names below the bar, wrapped; and the height that the picture then needs."""
    out, x, y = [], LEFT, 24 + BAR + 22
    for i, (name, value) in enumerate(parts.items()):
        label = f"{name} {format_bytes(value)}"
        width = 24 + 7 * len(label)
        if x + width > WIDTH and x > LEFT:
            x, y = LEFT, y + 18
        out.append(
            f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{COLOURS[i % len(COLOURS)]}"/>'
            f'<text x="{x + 14}" y="{y}" font-size="12" fill="currentColor">{html.escape(label)}</text>'
        )
        x += width
    return "".join(out), y + 8
