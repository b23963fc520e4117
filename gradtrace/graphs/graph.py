"""The computation graph of a loss: operators, edges, leaves, and its size in scalars."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradtrace.autodiff import nodes
from gradtrace.autodiff.hooks import HookWatch
from gradtrace.autodiff.names import NameTable, off_thread_calls, unknown
from gradtrace.autodiff.nodes import ACCUMULATE, Node
from gradtrace.autodiff.traversal import walk
from gradtrace.errors import GradtraceError, UnknownName, Unsupported, needs
from gradtrace.graphs.operators import Edge, Operator
from gradtrace.graphs.svg import draw
from gradtrace.io import container
from gradtrace.ir.program import HOOKS, Block, MapTable, Program
from gradtrace.linops import Identity, Index, Map
from gradtrace.linops.base import Count
from gradtrace.types import Shape

if TYPE_CHECKING:
    import networkx


@dataclass
class Graph:
    """Operators in topological order, each after all its users; operator 0 is the root.

    >>> import torch, gradtrace
    >>> w = torch.ones(3, 2, requires_grad=True)
    >>> graph = gradtrace.graph((torch.ones(4, 3) @ w).sum(), names={"w": w})
    >>> [operator.name for operator in graph]
    ['SumBackward0', 'MmBackward0', 'AccumulateGrad']
    >>> graph.scalar_vertices, graph.scalar_edges  # 1 + 8 + 6; 8 of the sum, 4·3·2 of the product
    (15, 32)
    """

    operators: list[Operator]
    edges: list[Edge]
    leaves: dict[str, Operator]
    _loss: Tensor = field(repr=False)
    _table: NameTable = field(repr=False)
    _watch: HookWatch = field(repr=False)

    def __iter__(self) -> Iterator[Operator]:
        return iter(self.operators)

    def __len__(self) -> int:
        return len(self.operators)

    def __getitem__(self, key: int | str) -> Operator:
        """An operator by index, or a leaf by any of its names."""
        if isinstance(key, int):
            return self.operators[key]
        for leaf in self.leaves.values():
            if key in leaf.names or key == leaf.leaf:
                return leaf
        raise UnknownName(unknown("leaf", key, self.leaves))

    @property
    def root(self) -> Operator:
        """The operator that made the loss."""
        return self.operators[0]

    @cached_property
    def _by_end(self) -> tuple[dict[int, list[Edge]], dict[int, list[Edge]]]:
        """The edges by consumer, and by producer."""
        consumers: dict[int, list[Edge]] = {}
        producers: dict[int, list[Edge]] = {}
        for edge in self.edges:
            consumers.setdefault(edge.consumer, []).append(edge)
            if edge.producer is not None:
                producers.setdefault(edge.producer, []).append(edge)
        return consumers, producers

    def arguments(self, operator: Operator) -> list[Edge]:
        """The edges to the operator's arguments, by position.

        Args:
            operator: One of ``operators``.

        Returns:
            The edges.
        """
        return self._by_end[0].get(operator.index, [])

    def uses(self, operator: Operator) -> list[Edge]:
        """The edges from the operator's users.

        Args:
            operator: One of ``operators``.

        Returns:
            The edges.
        """
        return self._by_end[1].get(operator.index, [])

    @property
    def scalar_vertices(self) -> int:
        """|V'|: the number of output scalars of all operators and leaves."""
        return sum(operator.size for operator in self.operators)

    @cached_property
    def scalar_edges(self) -> int:
        """|E'|: the number of (output scalar, input scalar) pairs that the operators connect.

        Computed from the maps of the backward program without building the edges: a product of m×k
        by k×n has m·n·k for each operand that needs a gradient. Costs about a backward pass.
        """
        from gradtrace.graphs.graph import count_edges
        from gradtrace.recording.record import record
        from gradtrace.recording.sharded import recorder_of

        seed, make = torch.ones_like(self._loss), recorder_of(self._loss, self._table)
        program = record(self._loss, seed, self._table, self._watch, make=make)
        if program.constants.parts is not None:
            raise Unsupported(
                "pairs are not counted where ranks work on local parts of DTensors; load the full "
                "state dict into a plain module"
            )
        return count_edges(program)

    def to_networkx(self) -> networkx.MultiDiGraph[int]:
        """The graph with an edge from each operator to each argument, keyed by position."""
        try:
            import networkx
        except ImportError as error:
            raise GradtraceError(needs("to_networkx()", "networkx")) from error
        graph: networkx.MultiDiGraph[int] = networkx.MultiDiGraph()
        for o in self.operators:
            graph.add_node(
                o.index, name=o.name, shape=o.shape, module=o.module, call=o.call, leaf=o.leaf
            )
        for e in self.edges:
            if e.producer is not None:
                graph.add_edge(e.consumer, e.producer, key=e.position, slot=e.slot)
        return graph

    def draw(self, path: str | None = None) -> str:
        """The graph as SVG text: root on top, shapes as labels, argument positions on edges.

        Args:
            path: File to write it to, too.

        Returns:
            The SVG text.
        """
        svg = draw(self.operators, self._by_end[0])
        if path is not None:
            container.put(path, svg)
        return svg

    def _repr_html_(self) -> str:
        return self.draw()

    def __repr__(self) -> str:
        count = sum(edge.producer is not None for edge in self.edges)
        return f"Graph({len(self):,} operators, {count:,} edges, {len(self.leaves):,} leaves)"


def build(loss: Tensor, table: NameTable, watch: HookWatch) -> Graph:
    """The computation graph of a loss."""
    arguments: dict[Node, nodes.Edges] = {}
    walk(loss, arguments.__setitem__)
    order = {node: index for index, node in enumerate(arguments)}
    leaves = {node.variable: node for node in order if type(node) is ACCUMULATE}
    labels = {leaves[leaf]: label for leaf, label in table.label(leaves).items()}
    others = off_thread_calls(loss, table)
    operators = []
    for node, index in order.items():
        place, label = others.get(node) or table.place_of(node), labels.get(node)
        names = () if label is None else table.names_of(node.variable) or (label,)
        shapes = nodes.shapes_of(node)
        operators.append(Operator(index, nodes.name_of(node), shapes, *place, label, names))
    edges = [
        Edge(order[node], None if child is None else order[child], position, slot)
        for node, out in arguments.items()
        for position, (child, slot) in enumerate(out)
    ]
    ends = {operator.leaf: operator for operator in operators if operator.leaf is not None}
    return Graph(operators, edges, ends, loss, table, watch)


def count_edges(program: Program) -> int:
    """|E'|: the number of pairs of scalars that an operator connects, summed over operators."""
    device = program.seed.device
    return sum(block_edges(block, program.maps, device) for block in program.blocks)


def block_edges(block: Block, maps: MapTable, device: torch.device) -> int:
    """How many pairs of scalars one operator connects. For a decomposed operator, the sum over its
    steps. ``device`` is that of the program's values.
    """
    if block.operator == HOOKS:
        return 0
    if block.opened:
        steps = [map_ for step in block.steps for map_ in maps.of(step)]
        return sum(
            _total(step.routes(1, device), step.out_shape)
            for step in steps
            if not _is_relayout(step)
        )
    counts: dict[int, Count] = dict.fromkeys(block.takes.values(), 1)
    shapes = {}
    for step in block.steps:
        total: Count = 0
        for term in step.terms:
            total = total + maps[term.map].routes(counts[term.value], device)
        counts[step.out] = total
        shapes[step.out] = step.shape
    return sum(_total(counts[value], shapes[value]) for value in block.gives.values())


def _is_relayout(step: Map) -> bool:
    """Whether a map only moves or reshapes elements, so that it adds no edges of its own."""
    return isinstance(step, (Identity, Index))


def _total(count: Count, shape: Shape) -> int:
    return count * prod(shape) if isinstance(count, int) else int(count.sum())
