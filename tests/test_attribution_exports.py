"""Attribution graphs in other tools' JSON, checked by what their loaders read."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import in_float64
from torch import nn

import gradtrace as gt
from gradtrace.attribution.graph import AttributionGraph
from gradtrace.attribution.graph_data import (
    GraphData,
    GraphEdge,
    GraphNode,
    InputPositions,
    ModelShape,
    Sizes,
)
from gradtrace.attribution.graph_export import (
    circuit_tracer,
    mib,
    model_explorer,
    model_explorer_data,
)
from gradtrace.errors import GradtraceError, UnknownName


def graph_of(name: str, **options: Any) -> AttributionGraph:
    model, _ = in_float64(name)
    model.eval()
    words = ["a", "b", "c", "d"]
    with gt.watch(model) as watch:
        tokens = model.get_input_embeddings()(torch.tensor([[5, 9, 3, 7]]))
        scalar = model(inputs_embeds=tokens).logits[0, -1, 5]
    return watch.attribute(scalar, {"tokens": tokens}, tokens={"tokens": words}).graph(**options)


def written(graph: AttributionGraph, path: Path, format: str) -> Any:
    graph.export(path / "graph.json", format=format)
    return json.loads((path / "graph.json").read_text())


def checked(data: dict[str, Any], fields: dict[str, type]) -> None:
    """The fields, no others, each of its type."""
    assert data.keys() == fields.keys()
    for name, kind in fields.items():
        assert type(data[name]) is kind, (name, data[name])


@pytest.mark.parametrize("positions", [False, True])
def test_circuit_tracer(tmp_path: Path, positions: bool) -> None:
    """The fields of its pydantic models, and what its page does with them."""
    graph = graph_of("gpt2", positions=positions)
    data = written(graph, tmp_path, "circuit-tracer")
    checked(data, {"metadata": dict, "qParams": dict, "nodes": list, "links": list})
    checked(
        data["metadata"],
        {
            "slug": str,
            "scan": str,
            "transcoder_list": list,
            "prompt_tokens": list,
            "prompt": str,
            "node_threshold": float,
        },
    )
    checked(
        data["qParams"],
        {"pinnedIds": list, "supernodes": list, "linkType": str, "clickedId": str, "sg_pos": str},
    )
    assert data["metadata"]["prompt_tokens"] == ["a", "b", "c", "d"]
    for node in data["nodes"]:
        checked(
            node,
            {
                "node_id": str,
                "feature": int,
                "layer": str,
                "ctx_idx": int,
                "feature_type": str,
                "token_prob": float,
                "is_target_logit": bool,
                "run_idx": int,
                "reverse_ctx_idx": int,
                "jsNodeId": str,
                "clerp": str,
                "influence": float,
                "activation": float,
            },
        )
        assert 0 <= node["ctx_idx"] < 4 and (node["layer"] == "E" or int(node["layer"]) >= 0)
        assert 0 < node["influence"] <= 1
    ids = {node["node_id"] for node in data["nodes"]}
    features = {(n["layer"], n["feature"], n["ctx_idx"]) for n in data["nodes"]}
    assert len(ids) == len(features) == len(data["nodes"])  # the page's keys
    (logit,) = (node for node in data["nodes"] if node["feature_type"] == "logit")
    assert float(logit["clerp"].split("(p=")[1].split(")")[0]) == logit["token_prob"]
    assert all(
        node is logit or int(node["layer"].replace("E", "-1")) < int(logit["layer"])
        for node in data["nodes"]
    )
    for link in data["links"]:
        checked(link, {"source": str, "target": str, "weight": float})
        assert {link["source"], link["target"]} <= ids
    weights = {(link["source"], link["target"]): link["weight"] for link in data["links"]}
    assert weights == {edge[:2]: edge.score for edge in graph.edges}
    words = {n["ctx_idx"]: n["clerp"] for n in data["nodes"] if n["feature_type"] == "embedding"}
    assert all(data["metadata"]["prompt_tokens"][at] == word for at, word in words.items())


def test_model_explorer(tmp_path: Path) -> None:
    """A collection of graphs; edges by the ids of inputs and outputs; node data by graph."""
    graph = graph_of("llama")
    data = written(graph, tmp_path, "model-explorer")
    checked(data, {"label": str, "graphs": list})
    (one,) = data["graphs"]
    checked(one, {"id": str, "nodes": list})
    ids = [node["id"] for node in one["nodes"]]
    assert len(set(ids)) == len(ids)
    edges = {}
    for node in one["nodes"]:
        lists = {"attrs": list, "incomingEdges": list, "inputsMetadata": list}
        checked(node, {"id": str, "label": str, "namespace": str, **lists})
        known = {item["id"]: item["attrs"] for item in node["inputsMetadata"]}
        for pair in node["attrs"] + [pair for attrs in known.values() for pair in attrs]:
            checked(pair, {"key": str, "value": str})
        for edge in node["incomingEdges"]:
            ends = {"sourceNodeId": str, "sourceNodeOutputId": str, "targetNodeInputId": str}
            checked(edge, ends)
            assert edge["sourceNodeId"] in ids
            (score,) = known[edge["targetNodeInputId"]]
            edges[edge["sourceNodeId"], node["id"]] = float(score["value"])
    assert edges == pytest.approx({e[:2]: e.score for e in graph.edges}, rel=1e-5)
    spaces = {node["id"]: node["namespace"] for node in one["nodes"]}
    assert spaces["model.layers.0.mlp"] == "model/layers/0"
    data = written(graph, tmp_path, "model-explorer-data")
    assert list(data) == [one["id"]]
    checked(data[one["id"]], {"name": str, "results": dict, "gradient": list})
    results = data[one["id"]]["results"]
    assert {name: x["value"] for name, x in results.items()} == {n.id: n.score for n in graph.nodes}
    stops = [stop["stop"] for stop in data[one["id"]]["gradient"]]
    assert stops[0] == 0 and stops[-1] == 1 and stops == sorted(stops)
    assert all(re.fullmatch("#[0-9a-f]{6}", s["bgColor"]) for s in data[one["id"]]["gradient"])


def mib_edges(cfg: dict[str, Any]) -> set[str]:
    """All edges of MIB's graph of a model: from all before, into q, k, v of heads."""
    found, before = set(), ["input"]
    for layer in range(cfg["n_layers"]):
        heads = [f"a{layer}.h{head}" for head in range(cfg["n_heads"])]
        found |= {f"{u}->{head}<{x}>" for u in before for head in heads for x in "qkv"}
        if not cfg["parallel_attn_mlp"]:
            before += heads
        found |= {f"{u}->m{layer}" for u in before}
        before += [*(heads if cfg["parallel_attn_mlp"] else []), f"m{layer}"]
    return found | {f"{u}->logits" for u in before}


@pytest.mark.parametrize("name", ["gpt2", "llama", "gpt_neox"])
def test_mib(tmp_path: Path, name: str) -> None:
    """Every edge is one of MIB's; what enters a head by q, k and v leaves it."""
    graph = graph_of(name, nodes=1, edges=1, qkv=True)
    assert graph.defect < (1e-6 if name == "llama" else 1e-12)  # its norms are in float32
    data = written(graph, tmp_path, "mib")
    checked(data, {"cfg": dict, "nodes": dict, "edges": dict})
    kinds = {"n_layers": int, "n_heads": int, "parallel_attn_mlp": bool, "d_model": int}
    checked(data["cfg"], kinds)
    assert data["cfg"]["n_layers"] == data["cfg"]["n_heads"] == 2
    assert data["cfg"]["parallel_attn_mlp"] == (name == "gpt_neox")
    names = mib_edges(data["cfg"])
    assert data["edges"].keys() <= names and len(data["edges"]) > len(names) / 2
    nodes = {end.partition("<")[0] for edge in names for end in edge.split("->")}
    assert data["nodes"].keys() == nodes
    for node in data["nodes"].values():
        checked(node, {"in_graph": bool})
    for edge in data["edges"].values():
        checked(edge, {"score": float, "in_graph": bool})
    for node in nodes - {"input", "logits"}:
        enters, leaves = (
            sum(x["score"] for edge, x in data["edges"].items() if edge.split("->")[end] in at)
            for end, at in ((1, {node, *(f"{node}<{x}>" for x in "qkv")}), (0, {node}))
        )
        assert enters == pytest.approx(leaves, rel=1e-6, abs=1e-6)
    whole = graph_of(name, nodes=1, edges=1)
    logits = sum(x["score"] for edge, x in data["edges"].items() if edge.endswith("->logits"))
    assert logits == pytest.approx(whole.total)
    (head,) = (n for n in whole.nodes if n.id.endswith("head 1") and n.layer == 1)
    out = sum(x["score"] for edge, x in data["edges"].items() if edge.startswith("a1.h1->"))
    assert out == pytest.approx(head.score)


def test_queries_keys_and_values_by_hand() -> None:
    """As elements of the projection's output have it: three parts, each of two heads."""
    model, _ = in_float64("gpt2")
    model.eval()
    model.set_attn_implementation("eager")
    with gt.watch(model) as watch:
        tokens = model.get_input_embeddings()(torch.tensor([[5, 9, 3, 7]]))
        scalar = model(inputs_embeds=tokens).logits[0, -1, 5]
    found = watch.attribute(scalar, {"tokens": tokens})
    graph = found.graph(nodes=1, edges=1, qkv=True)
    at = found.at("transformer.h.1.attn.c_attn").reshape(4, 3, 2, -1).sum((0, 3))  # q, k, v; head
    for n, letter in enumerate("qkv"):
        for head in range(2):
            name = f"transformer.h.1.attn head {head} {letter}"
            assert graph[name].score == pytest.approx(float(at[n, head]))


def test_what_cannot_be_exported(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    graph = gt.watch(model).attribute(lambda x: model(x).sum(), {"x": torch.ones(1, 2)}).graph()
    with pytest.raises(GradtraceError, match="one list of layers"):
        graph.export(tmp_path / "a", format="mib")
    with pytest.raises(GradtraceError, match=r"qkv=True"):
        graph_of("gpt2").export(tmp_path / "a", format="mib")
    with pytest.raises(UnknownName, match="format is"):
        graph.export(tmp_path / "a", format="dot")
    with pytest.raises(GradtraceError, match="missing"):
        graph.export(tmp_path / "missing" / "a")
    graph.export(tmp_path / "a")
    assert AttributionGraph.from_dict(json.loads((tmp_path / "a").read_text())) == graph
    for name in ("circuit-tracer", "model-explorer", "model-explorer-data"):
        assert written(graph, tmp_path, name)


# A graph by hand ---------------------------------------------------------------------------------


def by_hand() -> GraphData:
    """Two inputs of two and three tokens, a head and a module of layer 1, a module of none."""
    nodes = (
        GraphNode("p[1]", "input", "b", input="p", position=(1,), score=-1.0, influence=0.1),
        GraphNode("q[2]", "input", "e", input="q", position=(2,), score=4.0, influence=0.5),
        GraphNode("x.1 head 0", "head", "head 0", "x.1", layer=1, rank=1, score=3.0, influence=0.4),
        GraphNode("x.1.mlp", "module", "mlp", "x.1.mlp", layer=1, rank=2, score=2.0, influence=0.3),
        GraphNode("norm", "module", "norm", "norm", rank=3, score=3.0, influence=0.5),
        GraphNode("output", "output", "logit", rank=4, score=3.0, influence=0.2),
    )
    edges = (
        GraphEdge("p[1]", "output", -1.0, 0.2),
        GraphEdge("q[2]", "x.1.mlp", 4.0, 0.8),
        GraphEdge("q[2]", "output", 0.5, 0.1),
        GraphEdge("x.1.mlp", "norm", 1.5, 0.1),
        GraphEdge("norm", "output", 3.0, 0.5),
    )
    inputs = {"p": InputPositions((2,), ("a", "b")), "q": InputPositions((3,), ("c", "d", "e"))}
    sizes = Sizes(0.8, 0.98), Sizes(1.0, 1.0), Sizes(6, 5)
    shape = ModelShape(2, 2, 8, False)
    return GraphData(nodes, edges, 3.0, 3.0, "gradient", 1, 0.0, *sizes, inputs, shape)


def test_circuit_tracer_by_hand() -> None:
    data = circuit_tracer(by_hand())
    found = {node["node_id"]: node for node in data["nodes"]}
    assert data["metadata"]["node_threshold"] == 0.8
    assert data["metadata"]["prompt"] == "a b c d e"
    assert {name: node["ctx_idx"] for name, node in found.items()} == {
        "p[1]": 1, "q[2]": 4, "x.1 head 0": 4, "x.1.mlp": 4, "norm": 4, "output": 4
    }  # fmt: skip
    assert [found[name]["layer"] for name in found] == ["E", "E", "1", "1", "2", "3"]
    assert {name: node["activation"] for name, node in found.items()} == {
        node.id: node.score for node in by_hand().nodes
    }
    order = ["q[2]", "norm", "x.1 head 0", "x.1.mlp", "output", "p[1]"]  # by influence
    held = [0.25, 0.5, 0.7, 0.85, 0.95, 1.0]  # with those before, of 2
    assert [found[name]["influence"] for name in order] == pytest.approx(held)
    assert [found[name]["token_prob"] for name in found] == [0, 0, 0, 0, 0, 1]
    assert [found[name]["is_target_logit"] for name in found] == [False] * 5 + [True]


def test_positions_of_several_dimensions_are_counted_row_by_row() -> None:
    graph = by_hand()
    grid = InputPositions((2, 3), tuple("abcdef"))
    node = graph["q[2]"]._replace(position=(1, 2))
    changed = replace(graph, nodes=(node,), inputs={**graph.inputs, "q": grid})
    (found,) = circuit_tracer(changed)["nodes"]
    before = len(graph.inputs["p"].labels)
    assert found["ctx_idx"] == before + 1 * 3 + 2


def test_model_explorer_by_hand() -> None:
    (graph,) = model_explorer(by_hand())["graphs"]
    found = {node["id"]: node for node in graph["nodes"]}
    assert [found[name]["namespace"] for name in found] == ["p", "q", "x", "x/1", "", ""]
    edges = found["output"]["incomingEdges"]
    assert [(edge["sourceNodeId"], edge["targetNodeInputId"]) for edge in edges] == [
        ("p[1]", "0"), ("q[2]", "1"), ("norm", "2")
    ]  # fmt: skip
    scores = {each["id"]: each["attrs"][0]["value"] for each in found["output"]["inputsMetadata"]}
    assert scores == {"0": "-1", "1": "0.5", "2": "3"}
    attrs = {each["key"]: each["value"] for each in found["q[2]"]["attrs"]}
    assert attrs == {"kind": "input", "score": "4", "influence": "0.5"}


def test_colours_of_scores_by_hand() -> None:
    graph = by_hand()
    data = model_explorer_data(graph)["attribution"]
    assert [(each["stop"], each["bgColor"]) for each in data["gradient"]] == [
        (0.0, "#e6bfc4"),  # a quarter of the way from white to red, as -1 is of 4
        (0.2, "#f7f7f7"),
        (1.0, "#2166ac"),
    ]
    positive = replace(graph, nodes=tuple(node for node in graph.nodes if node.score > 0))
    stops = model_explorer_data(positive)["attribution"]["gradient"]
    assert [each["stop"] for each in stops] == [0.0, 1.0]


def test_mib_by_hand() -> None:
    graph = by_hand()
    plain = replace(graph, nodes=tuple(node for node in graph.nodes if node.kind != "head"))
    data = mib(plain)
    assert {name: each["score"] for name, each in data["edges"].items()} == {
        "input->logits": -0.5, "input->m1": 4.0, "m1->logits": 1.5
    }  # fmt: skip
    kept = {name for name, each in data["nodes"].items() if each["in_graph"]}
    assert kept == {"input", "m1", "logits"}
    assert data["cfg"] == {"n_layers": 2, "n_heads": 2, "parallel_attn_mlp": False, "d_model": 8}
    with pytest.raises(GradtraceError, match=r"qkv=True"):
        mib(graph)
    embed = GraphNode("embed", "module", "embed", "embed", rank=1)  # before the first layer
    later = GraphEdge("embed", "x.1.mlp", 2.5, 0.1)
    more = replace(plain, nodes=(*plain.nodes, embed), edges=(*plain.edges, later))
    assert mib(more)["edges"]["input->m1"]["score"] == 4.0 + 2.5
