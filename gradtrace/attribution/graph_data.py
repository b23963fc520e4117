"""Nodes, edges and the other data of an attribution graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from gradtrace.errors import UnknownName, did_you_mean


class GraphNode(NamedTuple):
    """A node: a position of an input, a module or a head, or the output.

    ``score`` is the sum over all paths through it of weight × input; ``influence`` its share of
    what reaches the output, by |score|; ``rank`` the length of the longest way to it.
    """

    id: str
    kind: str  # "input", "module", "head" or "output"
    label: str
    module: str = ""
    input: str | None = None
    position: tuple[int, ...] | None = None
    layer: int | None = None
    rank: int = 0
    score: float = 0.0
    influence: float = 0.0


class GraphEdge(NamedTuple):
    """An edge: the sum over all paths from ``source`` to ``target`` that pass no other node."""

    source: str
    target: str
    score: float
    influence: float = 0.0


class Sizes(NamedTuple):
    """A number for nodes and one for edges."""

    nodes: float
    edges: float


class InputPositions(NamedTuple):
    """The positions of an input, and the token at each; empty texts where none were given."""

    shape: tuple[int, ...]
    labels: tuple[str, ...]


class ModelShape(NamedTuple):
    """Of a list of layers that all have the same number of heads: these numbers, the width of the
    inputs, and whether attention and the rest of a layer have the same input.
    """

    layers: int
    heads: int
    width: int
    parallel: bool


@dataclass(frozen=True, repr=False)
class GraphData:
    """The fields of an ``AttributionGraph``, which tells what they are."""

    nodes: tuple[GraphNode, ...]
    edges: tuple[GraphEdge, ...]
    value: float
    total: float
    rule: str
    points: int
    defect: float
    asked: Sizes
    kept: Sizes
    whole: Sizes
    inputs: Mapping[str, InputPositions] = field(default_factory=dict)
    model: ModelShape | None = None
    _by_id: dict[str, GraphNode] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_id", {node.id: node for node in self.nodes})

    def __getitem__(self, name: str) -> GraphNode:
        """A node by its id."""
        if name not in self._by_id:
            raise UnknownName(f"no node {name!r} in this graph{did_you_mean(name, self._by_id)}")
        return self._by_id[name]

    def into(self, name: str) -> tuple[GraphEdge, ...]:
        """The edges to a node."""
        return tuple(edge for edge in self.edges if edge.target == self[name].id)

    def out_of(self, name: str) -> tuple[GraphEdge, ...]:
        """The edges from a node."""
        return tuple(edge for edge in self.edges if edge.source == self[name].id)
