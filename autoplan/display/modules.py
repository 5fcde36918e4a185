"""The tree of a model's modules, equal neighbours (the layers of a stack) drawn once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from autoplan.display.fold import ranges
from autoplan.profiler import OpCost

Row = tuple[str, ...]


@dataclass
class Branch:
    """A module with all that is inside it.

    Attributes:
        name: Last part of its path.
        children: Modules inside it.
        count: Ops.
        forward_flops: Flops forward.
        backward_flops: Flops backward.
        forward_s: Seconds forward.
        backward_s: Seconds backward.
        saved_bytes: Bytes kept for backward.
        forward_bytes: Bytes read and written forward.
        backward_bytes: Likewise backward.
    """

    name: str
    children: dict[str, Branch] = field(default_factory=dict)
    count: int = 0
    forward_flops: int = 0
    backward_flops: int = 0
    forward_s: float = 0.0
    backward_s: float = 0.0
    saved_bytes: int = 0
    forward_bytes: int = 0
    backward_bytes: int = 0

    def add(self, n: OpCost) -> None:
        """Counts an op."""
        self.count += 1
        self.forward_flops += n.forward_flops
        self.backward_flops += n.backward_flops
        self.forward_s += n.forward_s
        self.backward_s += n.backward_s
        self.saved_bytes += n.saved_bytes
        self.forward_bytes += n.forward_bytes
        self.backward_bytes += n.backward_bytes


def module_tree(nodes: Sequence[OpCost]) -> Branch:
    """The tree of all modules that ops belong to."""
    root = Branch("(model)")
    for n in nodes:
        branch = root
        branch.add(n)
        for part in n.module.split(".") if n.module else ():
            branch = branch.children.setdefault(part, Branch(part))
            branch.add(n)
    return root


def module_rows(root: Branch, depth: int, cells: Callable[[Branch], Row]) -> Iterator[Row]:
    """Rows of a table: the tree, indented, down to `depth` levels below the root, and how many are alike.

    Args:
        root: Whole model.
        depth: Levels to show.
        cells: What to say of a module; modules are alike where this is.
    """
    yield (root.name, *cells(root), "1")
    yield from _inside(root, depth, cells, "", 1)


def _inside(branch: Branch, depth: int, cells: Callable[[Branch], Row], indent: str, times: int) -> Iterator[Row]:
    if depth < 1:
        return
    groups: dict[object, list[Branch]] = {}
    for child in branch.children.values():
        alike = _signature(child, depth - 1, cells) if child.name.isdigit() else child.name
        groups.setdefault(alike, []).append(child)
    for i, members in enumerate(groups.values()):
        last = i == len(groups) - 1
        first, n = members[0], len(members)
        name = first.name if n == 1 else "{" + ranges(int(m.name) for m in members) + "}"
        yield (f"{indent}{'└─ ' if last else '├─ '}{name}", *cells(first), str(n * times))
        yield from _inside(first, depth - 1, cells, indent + ("   " if last else "│  "), n * times)


def _signature(branch: Branch, depth: int, cells: Callable[[Branch], Row]) -> object:
    inside = [(name, _signature(c, depth - 1, cells)) for name, c in branch.children.items()] if depth > 0 else []
    return cells(branch), tuple(inside)
