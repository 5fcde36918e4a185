"""The network the planner decides on: nodes with options, edges with values; repeated blocks folded into one.

Identical blocks are recognised by structure: each cell gets a signature of its ops, shapes, parameters and pins, and a
repeated stretch of signatures is a run of blocks if every block reads what the block before it reads, shifted by one
block. Folded, a block stands once with its multiplicity; the edge from one block to the next becomes an edge of the
block to itself, so that all blocks share their boundary placement.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autoplan.ir import OpGraph
from autoplan.planner.cells import Cell
from autoplan.rules import FactorTable
from autoplan.rules.redistribute import Codes

_MATMULS = {"linear", "addmm", "matmul", "mm", "bmm"}


@dataclass(frozen=True)
class Node:
    """A graph input (`cell` is None and `value` set), a cell, or a fan (`fan` is set).

    Attributes:
        name: For people and variable names.
        cell: The cell, or None.
        value: The graph input's value, or the value that a fan shares.
        fan: Whether it is a fan.
    """

    name: str
    cell: Cell | None = None
    value: str = ""
    fan: bool = False

    @property
    def exports(self) -> tuple[str, ...]:
        """Values it shows to others."""
        return self.cell.exports if self.cell else (self.value,)

    @property
    def ext(self) -> tuple[str, ...]:
        """Values it reads."""
        return self.cell.ext if self.cell else ((self.value,) if self.fan else ())


@dataclass(frozen=True)
class Edge:
    """Export `port` of node `source` is read as `slot` of node `target`."""

    source: int
    port: int
    target: int
    slot: int
    value: str


@dataclass(frozen=True)
class Network:
    """Nodes in an order in which each reads only earlier ones, and their edges.

    Attributes:
        nodes: All of them.
        edges: All of them.
        cls: Per node, the node that stands for it (itself where nothing is folded).
        block: Per node, the index of its block within its run of identical blocks, or -1.
        runs: Number of blocks of each run, for people.
    """

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    cls: tuple[int, ...]
    block: tuple[int, ...]
    runs: tuple[int, ...] = ()

    def unfolded(self) -> Network:
        """The same network with every node standing for itself."""
        return Network(self.nodes, self.edges, tuple(range(len(self.nodes))), self.block, self.runs)


def build_network(
    graph: OpGraph,
    table: FactorTable,
    cells: Sequence[Cell],
    *,
    fold: bool = True,
    pins: Mapping[str, Codes] | None = None,
) -> Network:
    """Builds the network of a graph's cells.

    Args:
        graph: The forward graph.
        table: Its factors.
        cells: Its cells.
        fold: Whether identical blocks stand once.
        pins: Placements of inputs by path; blocks that are pinned apart are not identical.
    """
    nodes: list[Node] = [Node(i.path, value=i.value) for i in graph.inputs]
    producer: dict[str, tuple[int, int]] = {i.value: (k, 0) for k, i in enumerate(graph.inputs)}
    fans = _fan_values(graph, cells)
    fan_of: dict[str, tuple[int, int]] = {}
    edges: list[Edge] = []
    cell_nodes: list[int] = []
    for cell in cells:
        index = len(nodes)
        nodes.append(Node(cell.name, cell=cell))
        cell_nodes.append(index)
        producer.update({v: (index, p) for p, v in enumerate(cell.exports)})
        for slot, value in enumerate(cell.ext):
            source, port = producer[value]
            if value in fans and _is_product(cell) and value in _product_operands(cell):
                source, port = fan_of[value]
            edges.append(Edge(source, port, index, slot, value))
        for value in cell.exports:
            if value in fans:
                fan = len(nodes)
                nodes.append(Node(f"fan {value}", value=value, fan=True))
                fan_of[value] = (fan, 0)
                edges.append(Edge(*producer[value], fan, 0, value))
    identity = tuple(range(len(nodes)))
    flat = Network(tuple(nodes), tuple(edges), identity, (-1,) * len(nodes))
    return _fold(flat, graph, cell_nodes, pins or {}) if fold else flat


def _is_product(cell: Cell) -> bool:
    return cell.ops[0].name in _MATMULS


def _product_operands(cell: Cell) -> tuple[str, ...]:
    return cell.ops[0].inputs


def _fan_values(graph: OpGraph, cells: Sequence[Cell]) -> set[str]:
    """Values with a gradient that at least two products read."""
    count: dict[str, int] = {}
    made = {v for c in cells for v in c.exports}
    for cell in cells:
        if _is_product(cell):
            for v in _product_operands(cell):
                if v in made and graph.values[v].requires_grad:
                    count[v] = count.get(v, 0) + 1
    return {v for v, n in count.items() if n > 1}


def _signature(cell: Cell, graph: OpGraph, pins: Mapping[str, Codes]) -> tuple[object, ...]:
    """Equal for cells that do the same work on tensors of the same shapes, with parameters pinned alike."""
    names = {v: i for i, v in enumerate((*cell.ext, *(o for op in cell.ops for o in op.outputs)))}

    def arg(a: object) -> object:
        if isinstance(a, tuple):
            return tuple(arg(x) for x in a)
        return ("%", names[getattr(a, "value")]) if hasattr(a, "value") else a  # noqa: B009

    inputs = [graph.input_of.get(v) for v in cell.ext]
    kinds = tuple(("",) if i is None else (i.kind, pins.get(i.path)) for i in inputs)
    ops = tuple(
        (op.target, arg(op.args), tuple((k, arg(v)) for k, v in op.kwargs.items()), len(op.outputs)) for op in cell.ops
    )
    specs = tuple((graph.values[v].shape, graph.values[v].dtype, graph.values[v].requires_grad) for v in names)
    return ops, kinds, specs, tuple(names[v] for v in cell.exports)


def _fold(net: Network, graph: OpGraph, cell_nodes: Sequence[int], pins: Mapping[str, Codes]) -> Network:
    signatures: dict[object, int] = {}
    marks = []
    for n in cell_nodes:
        cell = net.nodes[n].cell
        assert cell is not None
        key = _signature(cell, graph, pins)
        marks.append(signatures.setdefault(key, len(signatures)))
    cls, block, runs = list(net.cls), list(net.block), []
    start = 0
    while start < len(marks):
        best = _longest_run(marks, start)
        if best is not None:
            period, count = best
            members = _match_blocks(net, graph, [cell_nodes[start + i] for i in range(period * count)], period, count)
            if members is not None:
                for group in members:
                    for k, node in enumerate(group):
                        cls[node], block[node] = group[0], k
                runs.append(count)
                start += period * count
                continue
        start += 1
    return Network(net.nodes, net.edges, tuple(cls), tuple(block), tuple(runs))


def _longest_run(marks: Sequence[int], start: int) -> tuple[int, int] | None:
    """``(period, count)`` of the repetition at `start` that covers most, the shortest period among equals."""
    best: tuple[int, int] | None = None
    for period in range(1, (len(marks) - start) // 2 + 1):
        count = 1
        while marks[start : start + period] == marks[start + count * period : start + (count + 1) * period]:
            count += 1
        if count > 1 and period > 1 and (best is None or period * count > best[0] * best[1]):
            best = period, count
    return best


def _match_blocks(
    net: Network, graph: OpGraph, cells: Sequence[int], period: int, count: int
) -> list[list[int]] | None:
    """Corresponding nodes of the blocks (cells, fans, own parameters), or None where the blocks are wired apart."""
    incoming: dict[int, dict[int, Edge]] = {}
    outgoing: dict[int, list[Edge]] = {}
    for e in net.edges:
        incoming.setdefault(e.target, {})[e.slot] = e
        outgoing.setdefault(e.source, []).append(e)
    place: dict[int, tuple[int, int]] = {}
    for i, n in enumerate(cells):
        place[n] = (i // period, i % period)
    fan_nodes: dict[int, int] = {}
    for n in cells:
        for e in outgoing.get(n, []):
            if net.nodes[e.target].fan:
                block, position = place[n]
                place[e.target] = (block, period * (2 + e.port) + position)
                fan_nodes[e.target] = n
    own: dict[tuple[int, int, int], int] = {}
    for n in cells:
        block, position = place[n]
        for slot, e in incoming.get(n, {}).items():
            source = net.nodes[e.source]
            if source.cell is None and not source.fan and graph.input_of[source.value].kind == "parameter":
                if len({x.target for x in outgoing[e.source]}) > 1:
                    return None
                own[block, position, slot] = e.source

    def relative(e: Edge, block: int) -> tuple[object, ...]:
        if e.source in place:
            b, position = place[e.source]
            return block - b, position, e.port
        return ("outside", net.nodes[e.source].name if block else None)

    for position in range(period):
        for slot in incoming.get(cells[position], {}):
            kinds: list[tuple[object, ...]] = []
            for block in range(count):
                n = cells[block * period + position]
                e = incoming[n][slot]
                if (block, position, slot) in own:
                    spec = graph.values[net.nodes[e.source].value]
                    kinds.append(("own", spec.shape, spec.dtype, spec.requires_grad))
                else:
                    kinds.append(relative(e, block))
            steady = kinds[1:]
            first_ok = kinds[0] == steady[0] or kinds[0][0] == "outside"
            if len(set(steady)) > 1 or not first_ok:
                return None
    fans_at: dict[tuple[int, int], int] = {place[f]: f for f in fan_nodes}
    groups = [[cells[b * period + p] for b in range(count)] for p in range(period)]
    for b, position in sorted(fans_at):
        if b == 0:
            group = [fans_at.get((k, position)) for k in range(count)]
            if None in group:
                continue  # the last block's stream feeds other readers: those fans stand for themselves
            groups.append([g for g in group if g is not None])
    for (b, position, slot), _ in sorted(own.items()):
        if b == 0:
            groups.append([own[k, position, slot] for k in range(count)])
    return groups
