"""Dimension factors: every dim as an ordered product of atomic factors, found by a fixpoint over the graph.

Each dim carries its *cuts*, the sizes ``c`` such that the dim may be viewed as ``(size / c) x c``. A dim starts with
``{1, size}``; a `Link` says that its spans share their cuts, in coordinates of the factor they have in common. Sweeps
forward and backward through the graph until nothing changes; a cut that does not form a divisibility chain with those
already there is left out (the dim then cannot carry that factor). Consecutive cuts are the factors: the fused QKV
weight of GPT-2 gets cuts {1, 128, 2048, 6144}, that is 3 x 16 x 128.

A *position* ``(dim, outer)`` names a factor in a tensor: `outer` is the product of the factors before it in its dim,
just as in the placement ``S(dim:outer)``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autoplan.ir import Op, OpGraph
from autoplan.rules.rule import Link, OpRule, Span, rule_of

Position = tuple[int, int]


@dataclass(frozen=True)
class Choice:
    """One factor along which an op's work may be divided.

    Attributes:
        size: Of the factor; a mesh axis must divide it.
        operands: Per operand its position, or None where it does not have the factor.
        results: Per result likewise; all None where the factor is contracted.
        additive: Operands that must be partial sums, because the result is one.
    """

    size: int
    operands: tuple[Position | None, ...]
    results: tuple[Position | None, ...]
    additive: tuple[int, ...] = ()

    @property
    def contracted(self) -> bool:
        """Whether sharding it leaves partial sums."""
        return all(p is None for p in self.results)


@dataclass(frozen=True)
class FactorTable:
    """Factors of every value, and per op the choices that follow from its rule.

    Attributes:
        sizes: Per value and position, the size of the factor (factors of size 1 are left out).
        choices: Per op key.
        rules: Per op key.
    """

    sizes: Mapping[str, Mapping[Position, int]]
    choices: Mapping[str, tuple[Choice, ...]]
    rules: Mapping[str, OpRule]

    def text(self, value: str, rank: int) -> str:
        """``(2048) x (3*16*128)`` for people."""
        dims: list[list[str]] = [[] for _ in range(rank)]
        for (dim, _), size in sorted(self.sizes[value].items()):
            dims[dim].append(str(size))
        return " x ".join("(" + ("*".join(d) or "1") + ")" for d in dims)


def analyse(graph: OpGraph) -> FactorTable:
    """Finds the factors of every value of a graph."""
    rules = {op.key: rule_of(op, graph) for op in graph.ops}
    cuts: dict[str, list[set[int]]] = {v: [{1, n} for n in s.shape] for v, s in graph.values.items()}
    links = []
    for op in graph.ops:
        for link in rules[op.key].links:
            members = [(cuts[op.inputs[s.tensor]], s) for s in link.operands]
            members += [(cuts[op.outputs[s.tensor]], s) for s in link.results]
            links.append(members)
    forward = True
    changed = True
    while changed:
        changed = False
        for members in links if forward else reversed(links):
            changed |= _share(members)
        forward = not forward
    sizes = {v: dict(_factors(c)) for v, c in cuts.items()}
    choices = {
        op.key: tuple(_dedupe(c for link in rules[op.key].links for c in _choices(op, link, cuts))) for op in graph.ops
    }
    return FactorTable(sizes, choices, rules)


def _flat(dims: list[set[int]], span: Span) -> set[int]:
    """Cuts of the flattened span, in the coordinate of its middle part."""
    out: set[int] = set()
    below = 1
    for d in reversed(span.dims):
        out.update(c * below for c in dims[d])
        below *= max(dims[d])
    n = below // (span.outer * span.inner)
    return {c // span.inner for c in out if c % span.inner == 0 and span.inner <= c <= span.inner * n}


def _push(dims: list[set[int]], span: Span, cuts: set[int]) -> bool:
    """Adds cuts, given in the coordinate of the middle part, to the dims of a span."""
    changed = False
    below = 1
    for d in reversed(span.dims):
        size = max(dims[d])
        for c in sorted(cuts):
            flat = c * span.inner
            if flat % below == 0 and below <= flat <= below * size:
                changed |= _insert(dims[d], flat // below)
        below *= size
    return changed


def _insert(cuts: set[int], cut: int) -> bool:
    size = max(cuts)
    if cut in cuts or size % cut or any(c % cut and cut % c for c in cuts):
        return False
    cuts.add(cut)
    return True


def _share(members: list[tuple[list[set[int]], Span]]) -> bool:
    shared: set[int] = set()
    for dims, span in members:
        shared |= _flat(dims, span)
        if span.outer > 1 or span.inner > 1:
            n = 1
            for d in span.dims:
                n *= max(dims[d])
            shared |= {1, n // (span.outer * span.inner)}
    changed = False
    for dims, span in members:
        changed |= _push(dims, span, shared)
    return changed


def _factors(dims: list[set[int]]) -> Iterator[tuple[Position, int]]:
    for d, cuts in enumerate(dims):
        ordered = sorted(cuts, reverse=True)
        for big, small in zip(ordered, ordered[1:], strict=False):
            yield (d, ordered[0] // big), big // small


def _atoms(dims: list[set[int]], span: Span) -> dict[tuple[int, int], Position]:
    """``(size below the factor, its size)`` in the span's coordinate -> position."""
    out: dict[tuple[int, int], Position] = {}
    total = 1
    for d in span.dims:
        total *= max(dims[d])
    n = total // (span.outer * span.inner)
    below = 1
    for d in reversed(span.dims):
        ordered = sorted(dims[d], reverse=True)
        for big, small in zip(ordered, ordered[1:], strict=False):
            low, high = small * below, big * below
            if low % span.inner == 0 and span.inner <= low and high <= span.inner * n:
                out[low // span.inner, big // small] = (d, ordered[0] // big)
        below *= ordered[0]
    return out


def _choices(op: Op, link: Link, cuts: Mapping[str, list[set[int]]]) -> Iterator[Choice]:
    places = [(False, s, _atoms(cuts[op.inputs[s.tensor]], s)) for s in link.operands]
    places += [(True, s, _atoms(cuts[op.outputs[s.tensor]], s)) for s in link.results]
    common = set.intersection(*(set(atoms) for _, _, atoms in places)) if places else set()
    for atom in sorted(common, reverse=True):
        operands: list[Position | None] = [None] * len(op.inputs)
        results: list[Position | None] = [None] * len(op.outputs)
        clash = False
        for is_result, span, atoms in places:
            side = results if is_result else operands
            clash |= side[span.tensor] not in (None, atoms[atom])
            side[span.tensor] = atoms[atom]
        if not clash:
            yield Choice(atom[1], tuple(operands), tuple(results), link.additive)


def _dedupe(choices: Iterator[Choice]) -> Iterator[Choice]:
    seen: set[Choice] = set()
    for c in choices:
        if c not in seen:
            seen.add(c)
            yield c
