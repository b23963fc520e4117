"""Attribution graphs in the JSON of other tools: circuit-tracer, Model Explorer, MIB.

- **circuit-tracer** draws nodes by layer and position: positions of inputs are its embeddings,
  heads and modules its features, the output its logit. ``influence`` is cumulative there: what
  nodes of more influence hold together, up to this one.
- **Model Explorer** shows nodes in namespaces by module, with scores as attributes, and colours
  them by another file, the node data.
- **MIB** (the circuit track of the Mechanistic Interpretability Benchmark) has the nodes ``input``,
  ``a0.h3``, ``m0``, ``logits`` and edges such as ``m0->a1.h3<q>``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import accumulate
from typing import Any

from gradtrace.attribution.graph_data import GraphData, GraphNode
from gradtrace.errors import GradtraceError

NAME = "attribution"
RED, WHITE, BLUE = "#b2182b", "#f7f7f7", "#2166ac"


def circuit_tracer(graph: GraphData) -> dict[str, Any]:
    """The graph as circuit-tracer's page reads it."""
    words = [word for each in graph.inputs.values() for word in each.labels]
    total = sum(node.influence for node in graph.nodes) or 1.0
    order = sorted(graph.nodes, key=lambda node: -node.influence)
    sums = accumulate(node.influence / total for node in order)
    cumulative = {node.id: min(held, 1.0) for node, held in zip(order, sums)}
    metadata = {
        "slug": NAME,
        "scan": NAME,
        "transcoder_list": [],
        "prompt_tokens": words,
        "prompt": " ".join(words),
        "node_threshold": graph.asked.nodes,
    }
    empty: dict[str, Any] = {"pinnedIds": [], "supernodes": []}
    return {
        "metadata": metadata,
        "qParams": {**empty, "linkType": "both", "clickedId": "", "sg_pos": ""},
        "nodes": [
            _placed(graph, n, node) | {"influence": cumulative[node.id], "activation": node.score}
            for n, node in enumerate(graph.nodes)
        ],
        "links": [
            {"source": edge.source, "target": edge.target, "weight": edge.score}
            for edge in graph.edges
        ],
    }


def _placed(graph: GraphData, number: int, node: GraphNode) -> dict[str, Any]:
    """A node of circuit-tracer: where it is drawn, and what is written there."""
    deepest = max((each.layer for each in graph.nodes if each.layer is not None), default=-1)
    last = deepest + 2 if node.kind == "output" else deepest + 1
    kind = {"input": "embedding", "output": "logit"}.get(node.kind, node.kind)
    at, logit = _context(graph, node), node.kind == "output"
    return {
        "node_id": node.id,
        "feature": at if node.kind == "input" else number,
        "layer": "E" if node.kind == "input" else str(last if node.layer is None else node.layer),
        "ctx_idx": at,
        "feature_type": kind,
        "token_prob": float(logit),
        "is_target_logit": logit,
        "run_idx": 0,
        "reverse_ctx_idx": 0,
        "jsNodeId": node.id,
        "clerp": f"{node.label} (p=1)" if logit else node.label,
    }


def _context(graph: GraphData, node: GraphNode) -> int:
    """The place of a node among all positions; the last for nodes that have none."""
    sizes = [len(each.labels) for each in graph.inputs.values()]
    if node.position is None:
        return max(sum(sizes) - 1, 0)
    starts = dict(zip(graph.inputs, accumulate(sizes, initial=0)))
    name = node.input if node.input is not None else next(iter(graph.inputs))
    at = 0
    for size, place in zip(graph.inputs[name].shape, node.position):
        at = at * size + place
    return starts[name] + at


def model_explorer(graph: GraphData) -> dict[str, Any]:
    """The graph as a collection of one graph for Model Explorer."""
    return {
        "label": NAME,
        "graphs": [{"id": NAME, "nodes": [_boxed(graph, n) for n in graph.nodes]}],
    }


def _boxed(graph: GraphData, node: GraphNode) -> dict[str, Any]:
    edges = graph.into(node.id)
    attrs = {"kind": node.kind, "score": f"{node.score:.6g}", "influence": f"{node.influence:.6g}"}
    return {
        "id": node.id,
        "label": node.label,
        "namespace": node.input or node.module.rpartition(".")[0].replace(".", "/"),
        "attrs": [{"key": key, "value": value} for key, value in attrs.items()],
        "incomingEdges": [
            {"sourceNodeId": edge.source, "sourceNodeOutputId": "0", "targetNodeInputId": str(n)}
            for n, edge in enumerate(edges)
        ],
        "inputsMetadata": [
            {"id": str(n), "attrs": [{"key": "score", "value": f"{edge.score:.6g}"}]}
            for n, edge in enumerate(edges)
        ],
    }


def model_explorer_data(graph: GraphData) -> dict[str, Any]:
    """Scores of the nodes, which Model Explorer colours the graph by."""
    size = max((abs(node.score) for node in graph.nodes), default=0.0) or 1.0
    low = min((node.score for node in graph.nodes), default=0.0)
    high = max((node.score for node in graph.nodes), default=0.0)
    results = {node.id: {"value": node.score} for node in graph.nodes}
    ends = [(0.0, _colour(low / size)), (1.0, _colour(high / size))]
    if low < 0 < high:
        ends.insert(1, (-low / (high - low), WHITE))
    gradient = [{"stop": stop, "bgColor": colour} for stop, colour in ends]
    return {NAME: {"name": "score", "results": results, "gradient": gradient}}


def _colour(part: float) -> str:
    """Red for -1, white for 0, blue for 1."""
    end = RED if part < 0 else BLUE
    mixed = (
        round(int(WHITE[n : n + 2], 16) * (1 - abs(part)) + int(end[n : n + 2], 16) * abs(part))
        for n in (1, 3, 5)
    )
    return "#" + "".join(f"{x:02x}" for x in mixed)


def mib(graph: GraphData) -> dict[str, Any]:
    """The graph as a circuit of MIB: edges between heads, layers' other modules, input and logits.

    Nodes are contracted: all positions, and what is before the first layer, to ``input``; what is
    after the last to ``logits``; modules of a layer that are no attention to its ``m``.
    """
    if graph.model is None:
        raise GradtraceError(
            "MIB's circuits are of one list of layers that all have the same number of heads; this "
            "graph has none. Export it as 'gradtrace', 'circuit-tracer' or 'model-explorer'"
        )
    if any(node.kind == "head" for node in graph.nodes) and not _has_letters(graph):
        raise GradtraceError("MIB divides edges to heads by q, k, v: use graph(qkv=True)")
    layers, heads, width, parallel = graph.model
    nodes = {"input": True}
    for layer in range(layers):
        nodes |= {f"a{layer}.h{head}": False for head in range(heads)} | {f"m{layer}": False}
    nodes["logits"] = True
    first = min((n.rank for n in graph.nodes if n.layer is not None), default=0)
    names = {node.id: _mib_name(node, first) for node in graph.nodes}
    scores: dict[str, float] = {}
    for edge in graph.edges:
        source, target = names[edge.source].partition("<")[0], names[edge.target]
        if source != target.partition("<")[0]:
            nodes[source] = nodes[target.partition("<")[0]] = True
            scores[f"{source}->{target}"] = scores.get(f"{source}->{target}", 0.0) + edge.score
    cfg = {"n_layers": layers, "n_heads": heads, "parallel_attn_mlp": parallel, "d_model": width}
    return {
        "cfg": cfg,
        "nodes": {name: {"in_graph": kept} for name, kept in nodes.items()},
        "edges": {name: {"score": score, "in_graph": True} for name, score in scores.items()},
    }


def _has_letters(graph: GraphData) -> bool:
    return any(re.search(r" head \d+ [qkv]$", node.id) for node in graph.nodes)


def _mib_name(node: GraphNode, first: int) -> str:
    """``a0.h3``, ``a0.h3<q>`` for what makes its queries, ``m0``, ``input``, ``logits``."""
    if node.position is not None and node.kind != "input":
        raise GradtraceError("MIB's circuits have no positions: use graph(positions=False)")
    found = re.search(r" head (\d+)(?: ([qkv]))?$", node.id)
    if node.kind == "head" and node.layer is not None and found:
        letter = f"<{found[2]}>" if found[2] else ""
        return f"a{node.layer}.h{found[1]}{letter}"
    if node.kind == "module" and node.layer is not None:
        return f"m{node.layer}"
    return "input" if node.kind == "input" or node.rank < first else "logits"


FORMATS: dict[str, Callable[[GraphData], dict[str, Any]]] = {
    "circuit-tracer": circuit_tracer,
    "model-explorer": model_explorer,
    "model-explorer-data": model_explorer_data,
    "mib": mib,
}
"""By name: what writes the graph for JSON."""
