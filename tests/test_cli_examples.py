"""The examples below every command's help, run as they stand there."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from gradtrace.cli import app

TRAIN = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, width, layers):
        super().__init__()
        self.embed, self.out = nn.Embedding(50, width), nn.Linear(width, 50)
        self.encoder = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.lstm, self.gru = nn.LSTM(width, width), nn.GRU(width, width)

    def forward(self, words):
        x = self.embed(words)
        for layer in self.encoder:
            x = x + layer(x).tanh()
        return self.out(self.lstm(x)[0] + self.gru(x)[0])


def cross_entropy(model, words):
    return nn.functional.cross_entropy(model(words[:-1]), words[1:])


def parts(size="base", layers="2"):
    torch.manual_seed(0)
    model = Net({"tiny": 4, "base": 5}[size], int(layers))
    return model, cross_entropy, [torch.tensor([23, 7, 23, 4]), torch.tensor([1, 2, 3, 4])]


def loss(size="tiny", layers="1"):
    model, loss_fn, loader = parts(size, layers)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return model, lambda: loss_fn(model, loader[0]), optimizer
"""
NOT_RUN = ("gradtrace demo", "torchrun ")
"""Those that take long, and have tests of their own."""


def examples() -> list[str]:
    """The lines after ``Examples:`` of all commands."""
    group: Any = typer.main.get_command(app)
    texts = [group.commands[name].epilog or "" for name in group.list_commands(None)]
    lines = [line.strip() for text in texts for line in text.split("\n")[1:]]
    return [line for line in lines if not line.startswith("where ")]


RUN = [line for line in examples() if not line.startswith(NOT_RUN)]
OTHERS = [line for line in examples() if line not in RUN]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What examples read."""
    folder = tmp_path_factory.mktemp("examples")
    (folder / "train.py").write_text(TRAIN)
    return folder


def test_examples_are_found() -> None:
    assert len(RUN) > 8 and len(OTHERS) > 2
    assert any("-- tiny 3" in line for line in RUN)


@pytest.mark.filterwarnings("ignore:gradtrace")
@pytest.mark.parametrize("line", RUN)
def test_it_runs(line: str, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for file in files.iterdir():
        shutil.copy(file, tmp_path)
    monkeypatch.chdir(tmp_path)
    program, *args = shlex.split(line)
    result = CliRunner().invoke(app, args)
    assert program == "gradtrace"
    assert result.exit_code == 0, result.output
    assert result.stdout


@pytest.mark.parametrize("line", OTHERS)
def test_its_options_are_known(line: str) -> None:
    _, _, rest = line.rpartition("gradtrace ")
    name, *args = shlex.split(rest)
    group: Any = typer.main.get_command(app)
    group.commands[name].make_context(name, args).close()
