"""Reading one table of a TOML profile: every value is checked, and every mistake names the file and the key."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping

from autoplan.errors import ProfileError
from autoplan.hardware.curve import Curve
from autoplan.hardware.spec import Sources

NUMBER = "a finite number above zero"
COUNT = "a whole number above zero"
AMOUNT = "a finite number, zero or more"


def closest(word: str, known: Iterable[str]) -> str:
    """A half sentence naming the known word nearest to `word`, or nothing."""
    match = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {match[0]!r}?" if match else ""


class Table:
    """One table of a profile file; remembers which keys were read, so that unknown ones are found at the end."""

    def __init__(self, data: object, *, file: str, where: str) -> None:
        self.file = file
        self.where = where
        if not isinstance(data, Mapping):
            raise ProfileError(f"{file}: {where}: expected a table, found {data!r}")
        self._data = data
        self._known: set[str] = set()
        self._numbers: list[str] = []

    def error(self, key: str, expected: str, found: object) -> ProfileError:
        """The error for a value that is not what it has to be."""
        shown = "nothing" if found is None else repr(found)
        return ProfileError(f"{self.file}: {self.where} {key}: expected {expected}, found {shown}")

    def has(self, key: str) -> bool:
        """Whether an optional key is there."""
        self._known.add(key)
        return key in self._data

    def get(self, key: str, expected: str) -> object:
        """The raw value of a required key."""
        if not self.has(key):
            raise self.error(key, expected, None)
        return self._data[key]

    def text(self, key: str) -> str:
        """A string that is not empty."""
        value = self.get(key, "a text")
        if not isinstance(value, str) or not value.strip():
            raise self.error(key, "a text", value)
        return value

    def number(self, key: str, *, default: float | None = None, at_most: float = math.inf) -> float:
        """A number above zero."""
        expected = NUMBER if at_most == math.inf else f"{NUMBER}, at most {at_most:g}"
        if default is not None and not self.has(key):
            return default
        value = _finite(self.get(key, expected))
        if value is None or not 0 < value <= at_most:
            raise self.error(key, expected, self._data[key])
        self._numbers.append(key)
        return value

    def amount(self, key: str) -> float:
        """A number that may be zero."""
        value = _finite(self.get(key, AMOUNT))
        if value is None or value < 0:
            raise self.error(key, AMOUNT, self._data[key])
        self._numbers.append(key)
        return value

    def count(self, key: str) -> int:
        """A whole number above zero, possibly written as 80e9."""
        value = self.number(key) if _finite(self.get(key, COUNT)) is not None else 0.0
        if value != int(value) or value < 1:
            raise self.error(key, COUNT, self._data[key])
        return int(value)

    def rates(self, key: str) -> tuple[tuple[str, float], ...]:
        """A table from name to number above zero, at least one entry."""
        inner = Table(self.get(key, "a table of numbers"), file=self.file, where=f"{self.where}.{key}")
        if not inner._data:
            raise self.error(key, "at least one entry", {})
        self._numbers.append(key)
        return tuple((name, inner.number(name)) for name in inner._data)

    def pairs(self, key: str) -> tuple[tuple[str, tuple[float, float]], ...]:
        """A table from name to two numbers above zero, at least one entry."""
        data = self.get(key, "a table of pairs")
        expected = "two finite numbers above zero, forward and backward"
        if not isinstance(data, Mapping) or not data:
            raise self.error(key, "a table of pairs", data)
        for name, value in data.items():
            if not isinstance(value, list) or len(value) != 2 or any((_finite(v) or 0.0) <= 0 for v in value):
                raise self.error(f"{key}.{name}", expected, value)
        self._numbers.append(key)
        return tuple((name, (float(forward), float(backward))) for name, (forward, backward) in data.items())

    def curve(self, key: str, *, check: Callable[[Curve], None]) -> Curve:
        """A list of [size, value] points."""
        expected = "a list of [size, value] points, sizes rising"
        rows = self.rows(key, width=2, expected=expected)
        return self.checked(key, [(row[0], row[1]) for row in rows], check)

    def rows(self, key: str, *, width: int, expected: str) -> list[list[float]]:
        """A list of rows of numbers above zero, at least one row."""
        value = self.get(key, expected)
        if not isinstance(value, list) or not value:
            raise self.error(key, expected, value)
        for row in value:
            if not isinstance(row, list) or len(row) != width or any((_finite(v) or 0.0) <= 0 for v in row):
                raise self.error(key, expected, row)
        self._numbers.append(key)
        return [[float(v) for v in row] for row in value]

    def checked(self, key: str, points: list[tuple[float, float]], check: Callable[[Curve], None]) -> Curve:
        """A curve of these points that passes `check`."""
        try:
            curve = Curve(tuple(points))
            check(curve)
        except ValueError as error:
            raise ProfileError(f"{self.file}: {self.where} {key}: {error}") from error
        return curve

    def sources(self) -> Sources:
        """The `source` table: one text for every number that was read, and for nothing else. Ends the reading."""
        data = self.get("source", "a table of texts")
        self.finish()
        table = Table(data, file=self.file, where=f"{self.where}.source")
        out = tuple((key, table.text(key)) for key in self._numbers)
        table.finish()
        return out

    def finish(self) -> None:
        """Rejects keys that nobody asked for."""
        for key in self._data:
            if key not in self._known:
                hint = closest(key, self._known) or f"; known keys: {', '.join(sorted(self._known))}"
                raise ProfileError(f"{self.file}: {self.where} {key}: unknown key{hint}")


def _finite(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)
