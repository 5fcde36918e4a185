"""Meshes and placements, and the one grammar in which placements are written everywhere.

A placement says, per mesh axis, how a tensor lies on the devices along that axis::

    R            every device holds the whole tensor
    S(d)         dim d is cut into equal consecutive pieces
    S(d:k)       dim d is viewed as k x rest, and *rest* is cut: each of the k blocks is sharded alike
    P            every device holds a summand; the tensor is their sum

``S(d:k)`` is how the heads of a fused QKV projection are sharded: its output dim is 3 x heads x head size, and
``S(1:3)`` shards the heads. Axes are separated by commas in mesh order, ``"R,S(1:3)"``; or named, in any order, axes
left out being replicated: ``"S(1:3)@tp"``. Where several axes shard the same factor of a dim, the earlier mesh axis
is the more significant.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autoplan.errors import OptionError


@dataclass(frozen=True)
class Mesh:
    """A grid of devices; the last axis is contiguous in rank numbering.

    Attributes:
        shape: Devices along each axis.
        axes: Name of each axis.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.axes:
            object.__setattr__(self, "axes", tuple(f"d{i}" for i in range(len(self.shape))))
        if len(self.axes) != len(self.shape) or len(set(self.axes)) != len(self.axes):
            raise OptionError(f"mesh {self.shape} needs {len(self.shape)} different axis names, got {self.axes}")
        if not self.shape or any(n < 1 for n in self.shape):
            raise OptionError(f"mesh shape {self.shape}: every axis needs at least one device")

    @property
    def size(self) -> int:
        """Number of devices."""
        return math.prod(self.shape)

    @property
    def rank(self) -> int:
        """Number of axes."""
        return len(self.shape)

    def coordinate(self, device: int) -> tuple[int, ...]:
        """Coordinate of a device (row-major, last axis fastest)."""
        out = []
        for n in reversed(self.shape):
            device, c = divmod(device, n)
            out.append(c)
        return tuple(reversed(out))

    def __str__(self) -> str:
        return " x ".join(f"{a}={n}" for a, n in zip(self.axes, self.shape, strict=True))

    @classmethod
    def parse(cls, text: str | Sequence[int] | Mesh) -> Mesh:
        """Reads ``2x4``, ``2,4``, ``dp=2,tp=4`` or a sequence of sizes.

        Raises:
            OptionError: The text is none of these.
        """
        if isinstance(text, Mesh):
            return text
        if not isinstance(text, str):
            try:
                return cls(tuple(int(n) for n in text))
            except (TypeError, ValueError):
                raise OptionError(f"mesh {text!r} is not a sequence of sizes such as (2, 4)") from None
        parts = text.split(",") if "=" in text else re.split(r"[,x×]", text)
        named = [re.fullmatch(r"\s*(?:([A-Za-z_]\w*)\s*=)?\s*(\d+)\s*", p) for p in parts]
        if not named or None in named:
            raise OptionError(f"mesh {text!r} is not of the form 2x4 or dp=2,tp=4")
        matches = [m for m in named if m]
        names = [m.group(1) for m in matches]
        if any(names) and not all(names):
            raise OptionError(f"mesh {text!r} names some axes and not others")
        return cls(tuple(int(m.group(2)) for m in matches), tuple(names) if all(names) else ())


@dataclass(frozen=True)
class Replicate:
    """Every device along the axis holds the whole tensor."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True)
class Shard:
    """Each block of `rest` in ``dim = outer x rest`` is cut along the axis; ``outer == 1`` cuts the dim itself."""

    dim: int
    outer: int = 1

    def __str__(self) -> str:
        return f"S({self.dim})" if self.outer == 1 else f"S({self.dim}:{self.outer})"


@dataclass(frozen=True)
class Partial:
    """Every device along the axis holds a summand."""

    def __str__(self) -> str:
        return "P"


AxisPlacement = Replicate | Shard | Partial
REPLICATE, PARTIAL = Replicate(), Partial()
_TOKEN = re.compile(r"\s*(R|P|S\(\s*(\d+)\s*(?::\s*(\d+)\s*)?\))\s*(?:@\s*([A-Za-z_]\w*))?\s*")


@dataclass(frozen=True)
class Placement:
    """One `AxisPlacement` per mesh axis."""

    per_axis: tuple[AxisPlacement, ...]

    def __iter__(self) -> Iterator[AxisPlacement]:
        return iter(self.per_axis)

    def __getitem__(self, axis: int) -> AxisPlacement:
        return self.per_axis[axis]

    def __len__(self) -> int:
        return len(self.per_axis)

    def __str__(self) -> str:
        return ",".join(map(str, self.per_axis))

    @classmethod
    def replicated(cls, n_axes: int) -> Placement:
        """``R`` on every axis."""
        return cls((REPLICATE,) * n_axes)

    @property
    def is_replicated(self) -> bool:
        """Whether every axis is ``R``."""
        return all(isinstance(p, Replicate) for p in self.per_axis)

    @property
    def has_partial(self) -> bool:
        """Whether some axis is ``P``."""
        return any(isinstance(p, Partial) for p in self.per_axis)

    @classmethod
    def parse(cls, text: str, mesh: Mesh) -> Placement:
        """Reads the grammar of this module for `mesh`.

        Raises:
            OptionError: Wrong syntax, an unknown or repeated axis name, or a wrong number of axes.
        """
        tokens = [_TOKEN.fullmatch(t) for t in re.split(r",(?![^(]*\))", text)]
        if not tokens or any(t is None for t in tokens):
            raise OptionError(
                f"placement {text!r}: expected per mesh axis one of R, P, S(dim), S(dim:outer), as in "
                f"'R,S(1:3)' or 'S(1:3)@{mesh.axes[-1]}'"
            )
        found = [t for t in tokens if t]
        named = [t.group(4) is not None for t in found]
        if any(named) and not all(named):
            raise OptionError(f"placement {text!r} names some axes and not others")
        items = [_axis_placement(t) for t in found]
        if not any(named):
            if len(items) != mesh.rank:
                raise OptionError(
                    f"placement {text!r} has {len(items)} entries, the mesh ({mesh}) has {mesh.rank} axes"
                )
            return cls(tuple(items))
        out: list[AxisPlacement] = [REPLICATE] * mesh.rank
        names = [t.group(4) for t in found]
        for name, item in zip(names, items, strict=True):
            if name not in mesh.axes or names.count(name) > 1:
                raise OptionError(
                    f"placement {text!r}: axis {name!r} is "
                    f"{'repeated' if name in mesh.axes else 'not one of ' + ', '.join(mesh.axes)}"
                )
            out[mesh.axes.index(name)] = item
        return cls(tuple(out))


def _axis_placement(token: re.Match[str]) -> AxisPlacement:
    kind = token.group(1)
    if kind == "R":
        return REPLICATE
    if kind == "P":
        return PARTIAL
    outer = int(token.group(3) or 1)
    if outer < 1:
        raise OptionError(f"placement {kind}: the outer factor must be at least 1")
    return Shard(int(token.group(2)), outer)


def local_shape(shape: Sequence[int], placement: Placement, mesh: Mesh) -> tuple[int, ...]:
    """Shape of one device's piece.

    Raises:
        OptionError: A sharded dim does not exist or does not divide evenly.
    """
    out = list(shape)
    parts: dict[Shard, int] = {}  # devices along all axes that cut the same factor
    for n, p in zip(mesh.shape, placement, strict=True):
        if isinstance(p, Shard):
            parts[p] = parts.get(p, 1) * n
    for p, n in parts.items():
        inner = [q.outer for q in parts if q.dim == p.dim and q.outer > p.outer]
        if p.dim >= len(out) or shape[p.dim] % (p.outer * n) or any(outer % (p.outer * n) for outer in inner):
            raise OptionError(f"{p} over {n} devices does not divide a tensor of shape {tuple(shape)} evenly")
        out[p.dim] //= n
    return tuple(out)
