"""Collapses repeated layers: ``h.0.mlp`` … ``h.11.mlp`` with equal content become one line ``h.*.mlp``."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)
_NUMBER = re.compile(r"(?<![\w])\d+(?![\w])")


@dataclass(frozen=True)
class Fold(Generic[T]):
    """Paths that differ in layer numbers only and have the same content.

    Attributes:
        pattern: The path with ``*`` where all numbers occur, ``{0-3,7}`` where only some do.
        content: What they have in common.
        count: How many there are.
    """

    pattern: str
    content: T
    count: int


def fold(items: Iterable[tuple[str, T]]) -> list[Fold[T]]:
    """Groups (path, content) by path without numbers and by content, in order of first occurrence."""
    groups: dict[tuple[str, T], list[tuple[int, ...]]] = {}
    totals: dict[str, int] = {}
    for path, content in items:
        shape, numbers = split_numbers(path)
        groups.setdefault((shape, content), []).append(numbers)
        totals[shape] = totals.get(shape, 0) + 1
    return [
        Fold(_pattern(shape, numbers, whole=len(numbers) == totals[shape]), content, len(numbers))
        for (shape, content), numbers in groups.items()
    ]


def split_numbers(path: str) -> tuple[str, tuple[int, ...]]:
    """``h.3.mlp`` -> (``h.*.mlp``, (3,)); numbers inside words (``ln_1``) and ordinals (``#2``) stay."""
    head, mark, tail = path.partition(":")
    return _NUMBER.sub("*", head) + mark + tail, tuple(int(n) for n in _NUMBER.findall(head))


def _pattern(shape: str, numbers: list[tuple[int, ...]], *, whole: bool) -> str:
    columns = [sorted(set(column)) for column in zip(*numbers, strict=True)]
    texts = iter(str(c[0]) if len(c) == 1 else "*" if whole else "{" + ranges(c) + "}" for c in columns)
    head, mark, tail = shape.partition(":")
    return "".join(next(texts) if part == "*" else part for part in re.split(r"(\*)", head)) + mark + tail


def ranges(numbers: Iterable[int]) -> str:
    """``0-3,7`` for 0, 1, 2, 3, 7."""
    runs: list[list[int]] = []
    for n in sorted(set(numbers)):
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
