"""``gradtrace attribute``: scores and the graph of a script's scalar."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from gradtrace.attribution.graph import AttributionGraph
from gradtrace.cli import app

SCRIPT = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(4, 3)

def asked(model, words=None):
    x = torch.randn(1, 3, 4, requires_grad=True)
    found = {"scalar": model.out(model.body(x))[0, -1, 1], "inputs": {"x": x}}
    return {**found, "tokens": {"x": words}} if words else found

def logit():
    model = Net()
    return model, asked(model, ["a", "b", "c"])

def alone():
    return asked(Net())

def later():
    return Net(), asked

def wrong():
    return Net(), {"scalar": 3}
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(SCRIPT)
    return path


def run(*args: object) -> Result:
    return CliRunner().invoke(app, ["attribute", *map(str, args)])


def test_table_and_json(script: Path) -> None:
    found = json.loads(run(f"{script}:logit", "--json").stdout)
    rows = found["attribution"]["rows"]
    assert [row["token"] for row in rows] == ["a", "b", "c"]
    assert sum(row["score"] for row in rows) == pytest.approx(found["total"])
    text = run(f"{script}:logit", "--top", 2).stdout
    assert "Attribution: gradient × input" in text and "1 more rows" in text
    largest = sorted(rows, key=lambda row: -abs(row["score"]))[:2]
    short = json.loads(run(f"{script}:logit", "--top", 2, "--json").stdout)
    assert short["attribution"]["rows"] == largest
    assert all(f"{row['score']:.4g}" in text for row in largest)
    for name in ("alone", "later"):
        assert len(json.loads(run(f"{script}:{name}", "--json").stdout)["attribution"]["rows"]) == 3


def test_rules_and_components(script: Path) -> None:
    totals = {
        rule: json.loads(run(f"{script}:logit", "--rule", rule, "--json").stdout)["total"]
        for rule in ("gradient", "frozen", "attnlrp")
    }
    assert len(set(totals.values())) == 3
    for name in ("logit", "later"):
        result = run(f"{script}:{name}", "--by", "heads", "--json")
        assert len(json.loads(result.stdout)["attribution"]["rows"]) == 4


@pytest.mark.parametrize("name", ["gradtrace", "circuit-tracer", "model-explorer", "mib"])
def test_graph_is_written(script: Path, tmp_path: Path, name: str) -> None:
    path = tmp_path / "graph.json"
    result = run(f"{script}:logit", "--graph", path, "--format", name)
    assert result.exit_code == 0 and f"The graph is in {path}" in result.stdout
    data = json.loads(path.read_text())
    if name == "gradtrace":
        assert AttributionGraph.from_dict(data).nodes[-1].id == "output"
    keys = {"gradtrace": "edges", "circuit-tracer": "links", "model-explorer": "graphs"}
    assert data[keys.get(name, "edges")]


def test_what_the_function_is_to_return(script: Path) -> None:
    result = run(f"{script}:wrong")
    assert result.exit_code != 0 and 'return {"scalar": logit' in result.output
