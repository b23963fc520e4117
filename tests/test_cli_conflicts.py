"""``gradtrace conflicts``: the table of a script's loss terms."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from gradtrace.cli import app

SCRIPT = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(2, 1, bias=False), nn.Linear(1, 1, bias=False)

def parts(sign):
    model = Net()
    x = torch.tensor([3.0, 4.0])
    up = model.body(x).sum()
    down = sign * model.body(torch.tensor([1.0, 0.0])).sum()
    return model, {"up": up, "down": down, "head": model.head(torch.ones(1)).sum()}

def terms(sign="-1"):
    return parts(float(sign))

def alone():
    return parts(-1.0)[1]

def samples():
    model = Net()
    return model, model.head(model.body(torch.eye(2))).squeeze(1)

def later():
    model = Net()
    return model, lambda model: model.head(model.body(torch.eye(2))).squeeze(1)

def one():
    return {"up": parts(1.0)[1]["up"]}

def wrong():
    return {"up": parts(1.0)[1]["up"], "down": 3.0}

def nothing():
    return None

def late_nothing():
    return Net(), lambda model: None
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(SCRIPT)
    return path


def run(*args: object) -> Result:
    return CliRunner().invoke(app, ["conflicts", *map(str, args)])


def test_terms_are_compared(script: Path) -> None:
    found = json.loads(run(f"{script}:terms", "--json").stdout)
    assert found["terms"] == ["up", "down", "head"]
    whole, body, head = found["conflicts"]["rows"]
    assert (whole["module"], body["module"], head["module"]) == ("(all)", "body", "head")
    assert body["norm up"] == 5.0 and body["cosine up·down"] == pytest.approx(-0.6)
    assert body["wins"] == "up" and body["cosine up·head"] is None
    assert "up and down in body (-0.60)" in found["conflicts"]["notes"][0]


def test_arguments_reach_the_script(script: Path) -> None:
    found = json.loads(run(f"{script}:terms", "--json", "--", "1").stdout)
    assert found["conflicts"]["rows"][1]["cosine up·down"] == pytest.approx(0.6)


def test_it_prints_a_table_of_modules_or_parameters(script: Path) -> None:
    done = run(f"{script}:terms")
    assert done.exit_code == 0 and "Gradients of 3 terms: up, down, head" in done.stdout
    assert " body " in done.stdout and "body.weight" not in done.stdout
    assert "body.weight" in run(f"{script}:terms", "--by-parameter").stdout
    assert "… and 2 more rows" in run(f"{script}:terms", "--top", 1).stdout


def test_the_model_need_not_be_returned(script: Path) -> None:
    rows = json.loads(run(f"{script}:alone", "--json", "--by-parameter").stdout)["conflicts"][
        "rows"
    ]
    assert {row["parameter"].rpartition(".")[0] for row in rows} == {"Linear", "Linear@1"}


@pytest.mark.parametrize("name", ["samples", "later"])
def test_samples_are_terms(script: Path, name: str) -> None:
    found = json.loads(run(f"{script}:{name}", "--json").stdout)
    assert found["terms"] == ["0", "1"]
    (row,) = [row for row in found["conflicts"]["rows"] if row["module"] == "body"]
    assert row["cosine 0·1"] == 0.0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("one", "at least two terms, got 'up'"),
        ("wrong", "term 'down' is a float"),
        ("nothing", 'return terms by name, {"ce": ce'),
        ("late_nothing", "loss_fn that late_nothing returned gave"),
        ("absent", "absent"),
    ],
)
def test_a_usage_error_is_2(script: Path, name: str, words: str) -> None:
    done = run(f"{script}:{name}")
    assert done.exit_code == 2 and words in done.stderr
