"""An attribution graph in a report, and how large the page may be."""

from __future__ import annotations

import copy
import gzip
from pathlib import Path
from typing import Any

import pytest
import torch
from pages import read

import gradtrace as gt
from gradtrace.errors import GradtraceError, TooLarge
from gradtrace.report import attribution, page

SIZES = {"score": 1, "influence": 1}
GRAPH: dict[str, Any] = {
    "format": "gradtrace.attribution_graph",
    "version": 1,
    "value": 2.0,
    "total": float("nan"),
    "rule": "gradient",
    "points": 0,
    "defect": 0.0,
    "asked": {"nodes": 0.8, "edges": 0.98},
    "whole": {"nodes": 4, "edges": 9},
    "kept": {"nodes": 0.9, "edges": 1},
    "nodes": [
        {
            "id": "x[0]",
            "kind": "input",
            "label": "</script>",
            "rank": 0,
            "score": 1,
            "influence": 1,
        },
        {
            "id": "output",
            "kind": "output",
            "label": "output",
            "rank": 3,
            "score": 1,
            "influence": 1,
        },
    ],
    "edges": [{"source": "x[0]", "target": "output", "score": -1.5, "influence": 1.0}],
}


class Graph:
    """As ``watch.attribute(...).graph()`` returns it."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data

    def to_dict(self) -> dict[str, Any]:
        return self.data


def trace() -> Any:
    x = torch.tensor([3.0, 4.0], requires_grad=True)
    return gt.trace((x * x).sum(), names={"x": x})


def test_a_graph_is_in_the_report_of_a_trace_and_of_a_saved_one(tmp_path: Path) -> None:
    found = trace()
    found.report(tmp_path / "a.html", attribution=Graph(GRAPH))
    shown = read(tmp_path / "a.html")["attribution"]
    assert [node["name"] for node in shown["nodes"]] == ["x[0]", "output"]
    assert shown["edges"] == [{"source": 0, "target": 1, "score": -1.5, "influence": 1.0}]
    assert shown["total"] == "nan" and shown["whole"] == [4, 9] and shown["kept"] == [0.9, 1]
    found.save(tmp_path / "a.gradtrace")
    gt.load(tmp_path / "a.gradtrace").report(tmp_path / "b.html", attribution=Graph(GRAPH))
    assert read(tmp_path / "b.html")["attribution"] == shown


def test_the_trace_of_an_attribution_has_a_report(tmp_path: Path) -> None:
    """Nothing goes to parameters there, so that operators before them have no gradient."""
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1)), torch.ones(1, 3)
    with gt.watch(model) as watch:
        words = x * 2
        out = model(words.requires_grad_()).sum()
    found = watch.attribute(out, {"words": words})
    assert not all(block.takes for block in found.trace.program.blocks)
    graph = found.graph(nodes=1.0, edges=1.0)
    found.trace.report(tmp_path / "a.html", attribution=graph)
    shown = read(tmp_path / "a.html")
    assert len(shown["attribution"]["nodes"]) == len(graph.to_dict()["nodes"]) > 2
    assert [leaf["name"] for leaf in shown["traces"][0]["leaves"]] == ["words"]


def test_a_report_without_one_has_none(tmp_path: Path) -> None:
    trace().report(tmp_path / "a.html")
    assert read(tmp_path / "a.html")["attribution"] is None


def test_other_things_are_refused(tmp_path: Path) -> None:
    for wrong in (Graph({"format": "other"}), object()):
        with pytest.raises(GradtraceError, match=r"watch\.attribute\(\.\.\.\)\.graph\(\)"):
            trace().report(tmp_path / "a.html", attribution=wrong)
    assert not (tmp_path / "a.html").exists()


def test_a_graph_that_is_too_large_says_how_to_prune_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attribution, "ATTRIBUTION_MAX_EDGES", 1)
    large = copy.deepcopy(GRAPH)
    large["edges"] *= 2
    with pytest.raises(TooLarge, match=r"2 edges.*at most 1; prune it further"):
        attribution.attribution(large)


def test_the_page_is_small() -> None:
    """Every report holds it, and every notebook that shows one."""
    text = page.template().encode()
    assert len(text) < 260_000 and len(gzip.compress(text)) < 92_000
