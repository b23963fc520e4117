"""An attribution graph as a report shows it, from the dict that ``AttributionGraph.to_dict`` gives;
``gradtrace.attribution`` lies above this room.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from gradtrace.errors import GradtraceError, TooLarge
from gradtrace.report.encode import View

FORMAT = "gradtrace.attribution_graph"

ATTRIBUTION_MAX_EDGES = 5_000
"""The most edges of an attribution graph in a page."""


class Graph(Protocol):
    """What ``watch.attribute(...).graph()`` returns."""

    def to_dict(self) -> dict[str, Any]:
        """The graph as JSON values."""


def attribution(graph: Graph | Mapping[str, Any] | None) -> View | None:
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
    fields = ("value", "total", "rule", "points", "defect")
    return {
        **{name: data[name] for name in fields},
        "whole": [data["whole"]["nodes"], data["whole"]["edges"]],
        "kept": [data["kept"]["nodes"], data["kept"]["edges"]],
        "nodes": [{**node, "name": node["id"]} for node in data["nodes"]],
        "edges": [
            {**edge, "source": number[edge["source"]], "target": number[edge["target"]]}
            for edge in data["edges"]
        ],
    }
