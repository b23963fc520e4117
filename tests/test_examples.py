"""The examples on real architectures, in short: what they print cannot be told from a few steps of
training, but that it is there, and makes sense, can.
"""

from __future__ import annotations

import json
import math
import re
import runpy
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from gradtrace.cli import app

FOLDER = Path(__file__).parent.parent / "examples"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "stage")
README = (FOLDER / "README.md").read_text(encoding="utf-8")


@pytest.fixture
def example(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(str(FOLDER))
    module = import_module(request.param)
    monkeypatch.delitem(sys.modules, request.param)  # a folder's names are not for other tests
    if request.param == "bert":
        monkeypatch.setattr(module, "LATE", "1")
    return module


def test_all_architectures_are_there() -> None:
    assert NAMES == ["bert", "gpt2", "lstm", "resnet", "vit"]
    assert all(f"[{name}.py]({name}.py)" in README for name in NAMES)


@pytest.mark.parametrize("example", NAMES, indirect=True)
def test_a_table_and_a_sentence(example: Any) -> None:
    before = torch.get_rng_state()
    model, loss_fn = example.run("1")
    stage = import_module("stage")
    loss = float(loss_fn(model).detach())
    tables, sentence = example.tell(model, loss_fn, stage.traced(model, loss_fn))
    torch.set_rng_state(before)
    assert math.isfinite(loss)
    assert sentence.endswith(".") and re.search(r"\d", sentence) and "nan" not in sentence
    for table in tables:
        assert table.rows
        shares = [column.name for column in table.columns if column.kind == "share"]
        assert shares and all(0 <= row[name] <= 1 for row in table for name in shares)


@pytest.mark.parametrize("name", NAMES)
def test_the_command_line_takes_over(name: str, tmp_path: Path) -> None:
    """Without the training, which the other test has had."""
    pytest.importorskip("transformers")
    page = tmp_path / f"{name}.html"
    asked = ["trace", f"{FOLDER / name}.py:run", "--report", str(page), "--json", "--", "0"]
    result = CliRunner().invoke(app, asked)
    sys.modules.pop("stage", None)
    assert result.exit_code == 0, result.stderr
    data = json.loads(result.stdout)
    assert page.stat().st_size > 50_000
    rows = data["influence"]["rows"]
    shares = [row["share"] for row in rows if row["share"] != "nan"]
    assert shares and all(0 <= share <= 1 for share in shares)
    assert all(row["component"] for row in rows)


def test_as_a_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A report goes where it is told to, and nowhere else."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(sys, "argv", ["lstm.py", "--steps", "1", "--out", "there"])
    runpy.run_path(str(FOLDER / "lstm.py"), run_name="__main__")
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["lstm.html"]
    printed = capsys.readouterr().out
    assert "candidate" in printed and "The report is in there/lstm.html" in printed
    sys.modules.pop("stage", None)
