"""``gradtrace diagnose``: what it prints, and its exit codes."""

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
        self.enc, self.head, self.rest = nn.Linear(3, 3), nn.Linear(3, 1), [nn.Linear(3, 3)]

    def forward(self, x, cut):
        h = self.enc(x)
        h = h.detach() if cut else h
        return self.head(h).square().mean()

def well():
    return Net()(torch.ones(2, 3), False)

def cut():
    model = Net()
    return model, model(torch.ones(2, 3), True)

def listed():
    model = Net()
    return model(model.rest[0](torch.ones(2, 3)), False)

def number():
    return Net()(torch.ones(2, 3), False).item()

def later():
    model = Net()
    return model, lambda model: model(torch.ones(2, 3), True)

def nothing():
    return None

def still():
    model = Net()
    return model, model(torch.ones(2, 3), False), torch.optim.SGD(model.head.parameters(), lr=0.1)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(SCRIPT)
    return path


def run(*args: object) -> Result:
    return CliRunner().invoke(app, ["diagnose", *map(str, args)])


def test_a_healthy_step_is_0(script: Path) -> None:
    done = run(f"{script}:well")
    assert done.exit_code == 0 and "Diagnosis: healthy" in done.stdout


@pytest.mark.parametrize("name", ["cut", "later"])
def test_a_finding_is_1_with_the_line_of_the_script(script: Path, name: str) -> None:
    done = run(f"{script}:{name}")
    assert done.exit_code == 1
    assert "mine.py:12: h = h.detach() if cut else h" in done.stdout
    assert "enc.weight, enc.bias" in done.stdout


def test_the_model_need_not_be_returned(script: Path) -> None:
    found = json.loads(run(f"{script}:number", "--json").stdout)
    assert {each["reason"] for each in found["silent"]} == {"output detached"}
    assert {each["parameter"] for each in found["silent"]} == {
        *("enc.weight", "enc.bias", "head.weight", "head.bias")
    }
    (finding,) = json.loads(run(f"{script}:listed", "--json").stdout)["findings"]
    assert finding["kind"] == "unregistered"


def test_a_usage_error_is_2(script: Path) -> None:
    for target in (f"{script}:none", f"{script}:nothing", "none.py:loss"):
        done = run(target)
        assert done.exit_code == 2 and done.stderr.startswith("gradtrace: ")


def test_an_optimiser_that_is_returned_is_looked_at(script: Path) -> None:
    done = run(f"{script}:still")
    assert done.exit_code == 1 and "not in the optimiser: enc.weight, enc.bias" in done.stdout
