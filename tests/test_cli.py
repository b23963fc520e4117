"""The command line, as a user, a shell or another program meets it."""

from __future__ import annotations

import io
import json
import math
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

import gradtrace as gt
from gradtrace.cli import app
from gradtrace.cli.app import BUG, INTERRUPTED, UNREAD, WRONG
from gradtrace.cli.trace import element
from gradtrace.errors import GradtraceError

SCRIPT = """
import sys
import torch
from torch import nn
import beside

print("it prints")

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.left, self.right = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, words, cut=False):
        x = self.embed(words)
        left = self.left(x).tanh()
        left = left.detach() if cut else left
        return (left + self.right(x).sigmoid()).sum(-1)

    def score(self, words, cut=False):
        return self(words, cut).square().mean()

class Wrong(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return 1.01 * grad

def made():
    torch.manual_seed(0)
    return Net().double(), torch.tensor([1, 2, 3])

def loss():
    model, words = made()
    return model.score(words)

def with_model():
    model, words = made()
    return model, model.score(words)

def model_last():
    return tuple(reversed(with_model()))

def function(size="3"):
    model, words = made()
    return model, lambda model: model.score(words[: int(size)])

def function_first():
    model, words = made()
    return (lambda: model.score(words)), model

def output():
    return {"loss": loss()}

def cut():
    model, words = made()
    return model, model.score(words, cut=True)

def number():
    return loss().item()

def still():
    model, words = made()
    return model, model.score(words), torch.optim.SGD(model.embed.parameters(), 0.1)

def wrong():
    model, words = made()
    return lambda: Wrong.apply(model(words)).sum(), model

def parts():
    model, words = made()
    return model, lambda model, batch: model.score(batch), [words, words.flip(0) + 1, words * 2]

def echo(*args):
    raise ValueError(f"got {args!r} {sys.argv[1:]}")

def nothing():
    return None

def two_models():
    return nn.Linear(2, 2), nn.Linear(2, 2)

def not_a_loss():
    return nn.Linear(2, 2), lambda model: 3

def freed():
    model, found = with_model()
    found.backward()
    return model, found

def leaves():
    raise SystemExit(3)

def hostile():
    model = nn.Sequential()
    model.add_module("</script>\\u202e[red]\\x1b[31m\\n" + "x" * 10_000, nn.Linear(2, 2))
    return model, model(torch.ones(1, 2)).sum()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "mein skript ü.py"
    path.write_text(SCRIPT, encoding="utf-8")
    (tmp_path / "beside.py").write_text("")
    return path


def run(*args: object, **env: str) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args], env=env)


def found(*args: object, code: int = 0) -> dict[str, Any]:
    """What a command prints as JSON."""
    result = run(*args, "--json")
    assert result.exit_code == code, result.stderr
    data: dict[str, Any] = json.loads(result.stdout)
    return data


def refused(result: Result) -> str:
    """The one line that says why, without a traceback."""
    assert result.exit_code == WRONG, result.stdout
    assert result.stdout == "" and "Traceback" not in result.stderr
    line = result.stderr.strip().splitlines()[-1]
    assert line.startswith("gradtrace: ")
    return line


# All commands ------------------------------------------------------------------------------------


def test_version_says_which_kernels_and_devices_there_are() -> None:
    text = run("--version").stdout
    assert gt.__version__ in text and torch.__version__ in text
    assert "CPU kernels" in text and "CUDA devices" in text


def test_help_names_every_command_and_code() -> None:
    text = run("--help").stdout
    for word in ("diagnose", "trace", "influence", "check", "demo", "Exit codes", "130"):
        assert word in text


def test_debug_shows_the_traceback(script: Path) -> None:
    result = run("--debug", "check", f"{script}:echo")
    assert result.exit_code == WRONG and "Traceback" in result.stderr
    assert "raise ValueError(f" in result.stderr and "GradtraceError: mein" in result.stderr
    assert "No such option: --debug (" in refused(run("check", "--debug"))


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (KeyboardInterrupt(), INTERRUPTED, ""),
        (BrokenPipeError(), UNREAD, ""),
        (RuntimeError("odd"), BUG, "this is a bug: RuntimeError: odd"),
        (GradtraceError("no"), WRONG, "gradtrace: no"),
        (OSError(28, "No space left"), WRONG, "No space left"),
    ],
)
def test_ends(error: BaseException, code: int, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("gradtrace.cli.script._parsed", fails)
    result = run("check", "x.py:f")
    assert result.exit_code == code and text in result.stderr and "Traceback" not in result.stderr


def test_a_reader_that_has_gone() -> None:
    command = [sys.executable, "-m", "gradtrace", "--help"]
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert done.returncode == UNREAD and "Traceback" not in done.stderr


def test_the_module_is_the_command_also_on_a_stream_without_these_characters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "argv", ["gradtrace", "--version"])
    with pytest.raises(SystemExit) as end:
        runpy.run_module("gradtrace", run_name="__main__")
    print("→", file=stream)
    assert not end.value.code


ERRORS = {
    "SCRIPT:lsos": ("no function 'lsos'", "did you mean loss"),
    "SCRIPT": ("names no function", "script.py:function"),
    "none.py:loss": ("no script", "none.py"),
    "broken.py:f": ("broken.py", "line 2", "SyntaxError"),
    "SCRIPT:leaves": ("SystemExit: 3",),
    "SCRIPT:nothing": ("nothing returned NoneType", "return loss or (model, loss)"),
    "SCRIPT:two_models": ("(Linear, Linear)",),
    "SCRIPT:number": ("got float",),
    "SCRIPT:not_a_loss": ("got int",),
    "SCRIPT:freed": ("freed",),
    "SCRIPT:echo": ("ValueError: got () []", "line "),
}


@pytest.mark.parametrize("target", ERRORS)
def test_errors_are_one_clear_line(
    script: Path, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (script.parent / "broken.py").write_text("x = 1\ndef f(:\n")
    monkeypatch.chdir(script.parent)
    line = refused(run("trace", target.replace("SCRIPT", script.name), "--json"))
    assert all(part in line for part in ERRORS[target]), line


def test_arguments_are_passed_as_strings(script: Path) -> None:
    line = refused(run("check", f"{script}:echo", "--", "--json", "-x", "a b"))
    assert "got ('--json', '-x', 'a b') ['--json', '-x', 'a b']" in line
    line = refused(run("check", f"{script}:function", "--", "3", "4"))
    assert "function() takes from 0 to 1 positional arguments but 2 were given" in line


def test_the_interpreter_is_left_as_it_was(script: Path) -> None:
    before = list(sys.path), list(sys.argv)
    run("trace", f"{script}:echo", "--", "x")
    assert (list(sys.path), list(sys.argv)) == before


# diagnose ----------------------------------------------------------------------------------------


def test_a_healthy_step_is_0(script: Path) -> None:
    result = run("diagnose", f"{script}:function")
    assert result.exit_code == 0 and "Diagnosis: healthy" in result.stdout
    assert "it prints" not in result.stdout and "it prints" in result.stderr


def test_a_finding_is_1_with_the_line_of_the_script(script: Path) -> None:
    result = run("diagnose", f"{script}:cut")
    assert result.exit_code == 1 and "left = left.detach() if cut else left" in result.stdout
    assert "left.weight, left.bias" in result.stdout


def test_a_number_and_an_optimiser_are_looked_at(script: Path) -> None:
    data = found("diagnose", f"{script}:number", code=1)
    assert {each["reason"] for each in data["silent"]} == {"output detached"}
    result = run("diagnose", f"{script}:still")
    assert result.exit_code == 1 and "not in the optimiser" in result.stdout


# trace -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["loss", "with_model", "model_last", "function", "function_first", "output"]
)
def test_every_form_gives_the_names_of_the_model(script: Path, name: str) -> None:
    data = found("trace", f"{script}:{name}", "--path", "left.weight[0,1]")
    wanted = ["embed.weight", "left.bias", "left.weight", "right.bias", "right.weight"]
    assert sorted(data["parameters"]) == wanted
    rows = {row["component"]: row for row in data["influence"]["rows"]}
    assert set(rows) == {"embed", "left", "right"} and rows["left"]["eligible"] > 0
    assert data["paths"][0]["steps"][1]["module"] == "left"
    assert math.isfinite(data["loss"])


def test_what_is_asked_for(script: Path) -> None:
    data = found("trace", f"{script}:loss", "--by", "both=left,right", "--by", "r*")
    rows = {row["component"]: row["share"] for row in data["influence"]["rows"]}
    assert set(rows) == {"both", "r*"} and rows["both"] == 1
    data = found("trace", f"{script}:loss", "--by", "operators", "--rule", "viterbi")
    assert data["rule"] == "viterbi" and len(data["influence"]["rows"]) > 3
    asked = [w for name in ("decompose", "mass", "coverage", "norms") for w in ("--measure", name)]
    data = found("trace", f"{script}:loss", "--by", "left", "--by", "right", *asked)
    for name in ("decompose", "mass"):
        assert sum(row["share"] for row in data[name]["rows"]) == pytest.approx(1, abs=1e-9)
    assert data["norms"]["rows"] and data["coverage"]["rows"]
    assert "did you mean 'mass'" in refused(run("trace", "x.py:f", "--measure", "masss"))
    assert "did you mean" in refused(run("trace", f"{script}:loss", "--of", "embd.weight"))


def test_tables_are_cut_and_say_so(script: Path) -> None:
    text = run("trace", f"{script}:loss", "--top", 1, "--path", "left.bias").stdout
    assert "and 2 more rows (--top 3 shows all)" in text and "left.bias[" in text


def test_files(script: Path, tmp_path: Path) -> None:
    saved, page = tmp_path / "ä 🙂.gradtrace", tmp_path / "ö.html"
    assert found("trace", f"{script}:function", "--save", saved, "--report", page)["paths"] == []
    assert "left.weight" in gt.load(saved).gradients
    assert page.read_text(encoding="utf-8").lstrip().lower().startswith("<!doctype html>")
    line = refused(run("trace", f"{script}:loss", "--report", script))
    assert "would be overwritten" in line
    (tmp_path / "file").write_text("")
    assert "file" in refused(run("trace", f"{script}:loss", "--report", tmp_path / "file" / "x"))


def test_names_that_are_not_meant_well(script: Path) -> None:
    text = run("trace", f"{script}:hostile").stdout
    assert not {"\u202e", "\x1b"} & set(text) and "[red]" in text
    assert max(map(len, text.splitlines())) < 400


def test_elements() -> None:
    assert element("a.b[1, -2]") == ("a.b", (1, -2))
    for wrong in ("", "[1]", "a[x]", "a[1"):
        with pytest.raises(GradtraceError, match="write NAME"):
            element(wrong)


# influence and check -----------------------------------------------------------------------------


def test_influence_over_a_data_set(script: Path, tmp_path: Path) -> None:
    journal = tmp_path / "counts.jsonl"
    first = found("influence", f"{script}:parts", "--journal", journal)
    again = found("influence", f"{script}:parts", "--journal", journal)
    assert first == again and first["losses"] == 3
    assert "return (model, loss_fn, loader)" in refused(run("influence", f"{script}:loss"))


def test_check(script: Path) -> None:
    right = found("check", f"{script}:function", "--sample", 1)
    assert right["ok"] and len(right["rows"]) == 5
    assert not found("check", f"{script}:wrong", "--sample", 2, code=1)["ok"]


# demo --------------------------------------------------------------------------------------------


def test_the_demo_finds_what_was_planted(tmp_path: Path) -> None:
    page = tmp_path / "demo.html"
    data = found("demo", "--out", page)
    assert len(data["planted"]) == 4
    assert all(row["found"].startswith(row["planted"]) for row in data["planted"])
    assert page.stat().st_size > 10_000
    text = run("demo", "--out", page).stdout
    assert "4 of the 4" in text and str(page) in text
