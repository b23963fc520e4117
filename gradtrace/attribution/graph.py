"""``AttributionGraph``: nodes and edges by which inputs move a scalar, pruned to what matters."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gradtrace.attribution.graph_data import (
    GraphData,
    GraphEdge,
    GraphNode,
    InputPositions,
    ModelShape,
    Sizes,
)
from gradtrace.attribution.graph_export import FORMATS
from gradtrace.errors import BadFile, UnknownName, not_one_of, printable
from gradtrace.files import write_text
from gradtrace.table import Column, Table, Tabled

FORMAT, VERSION = "gradtrace.attribution_graph", 1


@dataclass(frozen=True, repr=False)
class AttributionGraph(GraphData, Tabled):
    """The nodes and edges by which inputs move a scalar.

    The score of an edge is gradient × input summed over all paths from its source to its target
    that pass no other node. In the whole graph what enters a node equals what leaves it: the score
    of the node. ``defect`` is by how much that fails, as a part of the largest edge.

    ``influence`` says what of the output comes through a node or an edge, by sizes: the edges to a
    node divide its influence in proportion to |score|, from the output (1) back to the inputs.
    ``asked`` are the shares of influence that pruning was to keep, ``kept`` those it kept, and
    ``whole`` the numbers of nodes and edges before.
    """

    # Output ---------------------------------------------------------------------------------------

    def table(self) -> Table:
        """The edges as a table.

        Returns:
            One row per edge, those of most influence first.
        """
        columns = (
            Column("from"),
            Column("to"),
            Column("score", "number"),
            Column("influence", "share"),
        )
        labels = {node.id: _title(node) for node in self.nodes}
        rows = tuple(
            (labels[edge.source], labels[edge.target], edge.score, edge.influence)
            for edge in self.edges
        )
        return Table("Attribution graph", columns, rows, self._notes())  # type: ignore[arg-type]

    def _notes(self) -> tuple[str, ...]:
        nodes, edges = self.whole
        return (
            f"{len(self.nodes):,} of {nodes:,} nodes with {self.kept.nodes:.1%} of their "
            f"influence, {len(self.edges):,} of {edges:,} edges with {self.kept.edges:.1%}",
            f"Scores into the output add up to {self.total:.4g}, before pruning; "
            f"in and out of a node differ by {self.defect:.1e} of the largest edge at most",
        )

    def __repr__(self) -> str:
        return printable(f"AttributionGraph({len(self.nodes)} nodes, {len(self.edges)} edges)")

    def to_dict(self) -> dict[str, Any]:
        """The graph for JSON.

        Returns:
            What ``from_dict`` reads; docs/attribution.md describes its fields.
        """
        return {
            "format": FORMAT,
            "version": VERSION,
            **{key: getattr(self, key) for key in ("value", "total", "rule", "points", "defect")},
            **{key: getattr(self, key)._asdict() for key in ("asked", "whole", "kept")},
            "inputs": {
                name: {"shape": list(each.shape), "labels": list(each.labels)}
                for name, each in self.inputs.items()
            },
            "model": None if self.model is None else self.model._asdict(),
            "nodes": [
                node._asdict() | {"position": _maybe(list, node.position)} for node in self.nodes
            ],
            "edges": [edge._asdict() for edge in self.edges],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> AttributionGraph:
        """Read a graph.

        Args:
            data: What ``to_dict`` gave.

        Returns:
            The same graph.
        """
        try:
            if (data["format"], data["version"]) != (FORMAT, VERSION):
                raise ValueError(f"its format is {data['format']!r}, version {data['version']!r}")
            return _graph(data)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise BadFile(
                f"this is no attribution graph of this version ({type(error).__name__}: {error}); "
                "read what graph.to_dict() gave"
            ) from error

    def export(self, path: str | os.PathLike[str], format: str = "gradtrace") -> None:
        """Write the graph to a JSON file.

        Args:
            path: The file.
            format: ``"gradtrace"`` is ``to_dict``; ``"circuit-tracer"``, ``"model-explorer"`` and
                ``"mib"`` are what these tools read, ``"model-explorer-data"`` the scores by which
                Model Explorer colours the graph. See docs/attribution.md.
        """
        if format not in ("gradtrace", *FORMATS):
            raise UnknownName(not_one_of("format", format, ("gradtrace", *FORMATS)))
        found = self.to_dict() if format == "gradtrace" else FORMATS[format](self)
        write_text(path, json.dumps(found, ensure_ascii=False, allow_nan=False))


def _maybe(kind: type, value: Any) -> Any:
    return None if value is None else kind(value)


def _title(node: GraphNode) -> str:
    return f"{node.id} {node.label}" if node.kind == "input" and node.label != node.id else node.id


def _graph(data: Mapping[str, Any]) -> AttributionGraph:
    """The inverse of ``to_dict``."""
    nodes = tuple(
        GraphNode(**{**each, "position": _maybe(tuple, each["position"])}) for each in data["nodes"]
    )
    edges = tuple(GraphEdge(**each) for each in data["edges"])
    known = {node.id for node in nodes}
    if strange := {end for edge in edges for end in (edge.source, edge.target)} - known:
        raise ValueError(f"an edge has an end {min(strange)!r}, which is no node")
    more: dict[str, Any] = {
        key: data[key] for key in ("value", "total", "rule", "points", "defect")
    }
    more |= {key: Sizes(**data[key]) for key in ("asked", "kept", "whole")}
    more["inputs"] = {
        name: InputPositions(tuple(each["shape"]), tuple(each["labels"]))
        for name, each in data["inputs"].items()
    }
    more["model"] = None if data["model"] is None else ModelShape(**data["model"])
    return AttributionGraph(nodes, edges, **more)
