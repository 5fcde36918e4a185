"""A table as plain text cells, and its two renderings: rich for terminals, HTML for notebooks."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text


@dataclass(frozen=True)
class Grid:
    """A table.

    Attributes:
        title: Above it.
        columns: Headings; one that starts with ``>`` is aligned right. None of them is shown where all are empty.
        rows: Cells.
        note: Below it.
        folded: Whether a notebook shows it closed at first.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    folded: bool = False

    @property
    def headed(self) -> bool:
        """Whether there are headings."""
        return any(c.strip("> ") for c in self.columns)


def rich_table(grid: Grid) -> RenderableType:
    """For a terminal. Cells are taken as they are, not as markup."""
    table = Table(box=box.SIMPLE_HEAD if grid.headed else box.SIMPLE, show_header=grid.headed, pad_edge=False)
    for i, column in enumerate(grid.columns):
        right = column.startswith(">")
        style = "cyan" if i == 0 and not grid.headed else ""
        table.add_column(column.lstrip("> "), justify="right" if right else "left", overflow="fold", style=style)
    for row in grid.rows:
        table.add_row(*(Text(cell) for cell in row))
    note = [Text(grid.note, "dim"), Text("")] if grid.note else []
    return Group(Text(grid.title, "bold"), table, *note)


def html_table(grid: Grid) -> str:
    """For a notebook; everything is escaped."""
    right = [c.startswith(">") for c in grid.columns]
    head = "".join(_cell("th", c.lstrip("> "), r) for c, r in zip(grid.columns, right, strict=True))
    body = "".join(
        "<tr>" + "".join(_cell("td", c, r) for c, r in zip(row, right, strict=True)) + "</tr>" for row in grid.rows
    )
    table = (
        '<table style="border-collapse:collapse;font-size:13px;margin:2px 0 2px 0">'
        + (f"<thead><tr>{head}</tr></thead>" if grid.headed else "")
        + f"<tbody>{body}</tbody></table>"
        + (f'<div style="font-size:12px;opacity:.7">{html.escape(grid.note)}</div>' if grid.note else "")
    )
    title = html.escape(grid.title)
    if grid.folded:
        return f'<details style="margin:8px 0"><summary><b>{title}</b></summary>{table}</details>'
    return f'<div style="margin:8px 0"><b>{title}</b>{table}</div>'


def html_page(parts: Sequence[str]) -> str:
    """One self-contained fragment."""
    return '<div class="autoplan" style="font-family:sans-serif">' + "".join(parts) + "</div>"


def _cell(tag: str, text: str, right: bool) -> str:
    align = "right" if right else "left"
    style = f"text-align:{align};padding:1px 10px 1px 0;vertical-align:top;white-space:pre-wrap"
    return f'<{tag} style="{style}">{html.escape(text)}</{tag}>'
