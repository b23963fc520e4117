"""An attribution graph as a report shows it, from the dict that ``AttributionGraph.to_dict`` gives;
``gradtrace.attribution`` lies above this room.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from gradtrace.errors import GradtraceError, TooLarge
from gradtrace.report.model import Attribution, AttributionEdge, AttributionNode
from gradtrace.report.tuning import ATTRIBUTION_MAX_EDGES

FORMAT = "gradtrace.attribution_graph"


class Graph(Protocol):
    """What ``watch.attribute(...).graph()`` returns."""

    def to_dict(self) -> dict[str, Any]:
        """The graph as JSON values."""


def attribution(graph: Graph | Mapping[str, Any] | None) -> Attribution | None:
    """The graph with numbers for the names of nodes; None if there is none."""
    if graph is None:
        return None
    data = graph if isinstance(graph, Mapping) else getattr(graph, "to_dict", dict)()
    if data.get("format") != FORMAT:
        raise GradtraceError(
            f"attribution is a {type(graph).__name__}; give the graph of an attribution, "
            "watch.attribute(...).graph(), or the dict that its to_dict() returns"
        )
    if len(data["edges"]) > ATTRIBUTION_MAX_EDGES:
        raise TooLarge(
            f"the attribution graph has {len(data['edges']):,} edges, and a report shows at most "
            f"{ATTRIBUTION_MAX_EDGES:,}; prune it further: .graph(nodes=0.5, edges=0.9)"
        )
    number = {node["id"]: n for n, node in enumerate(data["nodes"])}
    return Attribution(
        float(data["value"]),
        float(data["total"]),
        data["rule"],
        data["points"],
        float(data["defect"]),
        (data["whole"]["nodes"], data["whole"]["edges"]),
        (float(data["kept"]["nodes"]), float(data["kept"]["edges"])),
        tuple(_node(node) for node in data["nodes"]),
        tuple(
            AttributionEdge(number[edge["source"]], number[edge["target"]], *_sizes(edge))
            for edge in data["edges"]
        ),
    )


def _node(node: Mapping[str, Any]) -> AttributionNode:
    return AttributionNode(node["id"], node["kind"], node["label"], node["rank"], *_sizes(node))


def _sizes(part: Mapping[str, Any]) -> tuple[float, float]:
    return float(part["score"]), float(part["influence"])
