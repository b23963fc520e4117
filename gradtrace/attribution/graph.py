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
from gradtrace.errors import UnknownName, not_one_of, printable
from gradtrace.io import validation as valid
from gradtrace.io.atomic_files import naming, put, replacing
from gradtrace.io.table import Summarised, TextColumn, TextTable

FORMAT, VERSION = "gradtrace.attribution_graph", 1


@dataclass(frozen=True, repr=False)
class AttributionGraph(GraphData, Summarised):
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

    def table(self) -> TextTable:
        """The edges as a table.

        Returns:
            One row per edge, those of most influence first.
        """
        columns = (
            TextColumn("from"),
            TextColumn("to"),
            TextColumn("score", "number"),
            TextColumn("influence", "share"),
        )
        labels = {node.id: _title(node) for node in self.nodes}
        rows = tuple(
            (labels[edge.source], labels[edge.target], edge.score, edge.influence)
            for edge in self.edges
        )
        return TextTable("Attribution graph", columns, rows, self._notes())

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
        valid.check_read(SCHEMA, data, "attribution graph")
        nodes = (
            GraphNode(**each | {"position": _maybe(tuple, each["position"])})
            for each in data["nodes"]
        )
        more: dict[str, Any] = {
            key: data[key] for key in ("value", "total", "rule", "points", "defect")
        }
        more |= {key: Sizes(**data[key]) for key in ("asked", "kept", "whole")}
        more["edges"] = tuple(GraphEdge(**each) for each in data["edges"])
        more["inputs"] = {
            name: InputPositions(tuple(each["shape"]), tuple(each["labels"]))
            for name, each in data["inputs"].items()
        }
        more["model"] = None if data["model"] is None else ModelShape(**data["model"])
        return cls(tuple(nodes), **more)

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
        data = json.dumps(found, ensure_ascii=False, allow_nan=False)
        with naming(path, "cannot be written ({}): give another path") as at, replacing(at) as file:
            put(file, data.encode())


def _maybe(kind: type, value: Any) -> Any:
    return None if value is None else kind(value)


def _title(node: GraphNode) -> str:
    return f"{node.id} {node.label}" if node.kind == "input" and node.label != node.id else node.id


_SHARES = valid.record(nodes=valid.finite(0, 1), edges=valid.finite(0, 1))
_NODE = valid.record(
    id=valid.text(),
    kind=valid.one_of("input", "module", "head", "output"),
    label=valid.text(),
    module=valid.text(),
    input=valid.maybe(valid.text()),
    position=valid.maybe(valid.array(valid.integer())),
    layer=valid.maybe(valid.integer()),
    rank=valid.integer(),
    score=valid.finite(),
    influence=valid.finite(0),
)
_EDGE = valid.record(
    source=valid.text(), target=valid.text(), score=valid.finite(), influence=valid.finite(0)
)


def _edges_have_ends(data: Any) -> None:
    known = {node["id"] for node in data["nodes"]}
    if len(known) < len(data["nodes"]):
        valid.unfit("two nodes have one id")
    for edge in data["edges"]:
        for end in (edge["source"], edge["target"]):
            if end not in known:
                valid.unfit(f"an edge has an end {end!r}, which is no node")


SCHEMA = valid.each_of(
    valid.record(
        format=valid.one_of(FORMAT),
        version=valid.integer(VERSION, VERSION),
        value=valid.finite(),
        total=valid.finite(),
        rule=valid.text(),
        points=valid.integer(),
        defect=valid.finite(0),
        asked=_SHARES,
        whole=valid.record(nodes=valid.integer(), edges=valid.integer()),
        kept=_SHARES,
        inputs=valid.mapping(
            valid.record(shape=valid.array(valid.integer()), labels=valid.array(valid.text()))
        ),
        model=valid.maybe(
            valid.record(
                layers=valid.integer(),
                heads=valid.integer(),
                width=valid.integer(),
                parallel=valid.boolean(),
            )
        ),
        nodes=valid.array(_NODE),
        edges=valid.array(_EDGE),
    ),
    _edges_have_ends,
)
"""What ``to_dict`` gives."""
