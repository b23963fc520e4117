"""The computation graph of a loss: operators, edges and leaves, as autograd keeps them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from math import prod
from typing import TYPE_CHECKING

from torch import Tensor

from gradtrace.autodiff import nodes
from gradtrace.autodiff.names import NameTable, off_thread_calls, unknown
from gradtrace.autodiff.nodes import ACCUMULATE, Node
from gradtrace.autodiff.traversal import walk
from gradtrace.errors import GradtraceError, UnknownName, needs
from gradtrace.files import write_text
from gradtrace.types import Shape

if TYPE_CHECKING:
    import networkx


@dataclass(frozen=True, slots=True)
class Operator:
    """A vertex: an operator of the forward pass, or a leaf.

    ``shapes`` has one shape for each output. ``leaf`` is the name of a leaf, and ``names`` are all
    its names (tied weights have several). ``module`` is the innermost module in whose forward it
    was made (``""`` outside any), ``call`` the index of that module's call.
    """

    index: int
    name: str
    shapes: tuple[Shape, ...]
    module: str = ""
    call: int = 0
    leaf: str | None = None
    names: tuple[str, ...] = ()

    @property
    def shape(self) -> Shape:
        """The shape of the (first) output."""
        return self.shapes[0] if self.shapes else ()

    @property
    def size(self) -> int:
        """The number of output scalars."""
        return sum(prod(shape) for shape in self.shapes)


@dataclass(frozen=True, slots=True)
class Edge:
    """``(u, v, k)``: output ``slot`` of operator v is the k-th argument of operator u.

    ``producer`` is None where the argument needs no gradient.
    """

    consumer: int
    producer: int | None
    position: int
    slot: int = 0


@dataclass
class Graph:
    """Operators in topological order, each after all its users; operator 0 is the root.

    >>> import torch, gradtrace
    >>> w = torch.ones(3, 2, requires_grad=True)
    >>> graph = gradtrace.graph((torch.ones(4, 3) @ w).sum(), names={"w": w})
    >>> [operator.name for operator in graph], graph["w"].shape
    (['SumBackward0', 'MmBackward0', 'AccumulateGrad'], (3, 2))
    """

    operators: list[Operator]
    edges: list[Edge]
    leaves: dict[str, Operator]

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
    def _arguments(self) -> dict[int, list[Edge]]:
        found: dict[int, list[Edge]] = {}
        for edge in self.edges:
            found.setdefault(edge.consumer, []).append(edge)
        return found

    @cached_property
    def _uses(self) -> dict[int | None, list[Edge]]:
        found: dict[int | None, list[Edge]] = {}
        for edge in self.edges:
            found.setdefault(edge.producer, []).append(edge)
        return found

    def arguments(self, operator: Operator) -> list[Edge]:
        """The edges to the operator's arguments, by position.

        Args:
            operator: One of ``operators``.

        Returns:
            The edges.
        """
        return self._arguments.get(operator.index, [])

    def uses(self, operator: Operator) -> list[Edge]:
        """The edges from the operator's users.

        Args:
            operator: One of ``operators``.

        Returns:
            The edges.
        """
        return self._uses.get(operator.index, [])

    def to_networkx(self) -> networkx.MultiDiGraph[int]:
        """The graph with an edge from each operator to each argument, keyed by position."""
        try:
            graph: networkx.MultiDiGraph[int] = import_module("networkx").MultiDiGraph()
        except ImportError as error:
            raise GradtraceError(needs("to_networkx()", "networkx")) from error
        for o in self.operators:
            facts = {name: getattr(o, name) for name in ("name", "shape", "module", "call", "leaf")}
            graph.add_node(o.index, **facts)
        for e in self.edges:
            if e.producer is not None:
                graph.add_edge(e.consumer, e.producer, key=e.position, slot=e.slot)
        return graph

    def draw(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        values: Mapping[int | str, object] | None = None,
    ) -> str:
        """The graph as SVG text: root on top, shapes as labels, argument positions on edges.

        Args:
            path: File to write it to, too.
            values: Texts or numbers to show, by index of an operator or name of a leaf.

        Returns:
            The SVG text.
        """
        svg: str = import_module("gradtrace.report.drawing").draw(self, values or {})
        if path is not None:
            write_text(path, svg)
        return svg

    def _repr_html_(self) -> str:
        return self.draw()

    def __repr__(self) -> str:
        count = sum(edge.producer is not None for edge in self.edges)
        return f"Graph({len(self):,} operators, {count:,} edges, {len(self.leaves):,} leaves)"


def build(loss: Tensor, table: NameTable) -> Graph:
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
    return Graph(operators, edges, ends)
