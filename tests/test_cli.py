"""The command line, as a user or a script meets it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner, Result

import gradtrace
from gradtrace.cli import app
from gradtrace.errors import GradtraceError

SCRIPT = """
import torch
from torch import nn
import beside

print("a script may print")

class Wrong(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return 1.01 * grad

def right(size="3"):
    print("and print again")
    model, x = nn.Linear(int(size), 2), torch.ones(4, int(size))
    return lambda model: model(x).tanh().sum(), model

def wrong():
    model, x = nn.Linear(3, 2), torch.ones(3)
    return lambda: (Wrong.apply(model.weight) @ x + model.bias).tanh().sum(), model

def echo(*args):
    raise ValueError(f"got {args!r}")

def swapped():
    loss_fn, model = right()
    return model, loss_fn, torch.optim.SGD(model.parameters(), 0.1)

def alone():
    return right()[1]

def several():
    model = nn.Linear(3, 2)
    return lambda m: m.weight, model

def leaves():
    raise SystemExit(0)

def fails_later():
    model = nn.Linear(3, 2)
    def loss(m):
        return m(torch.ones(5)).sum()
    return loss, model
"""


def line_of(text: str) -> int:
    """Where a statement stands in the script."""
    return SCRIPT[: SCRIPT.index(text)].count("\n") + 1


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    (tmp_path / "beside.py").write_text("")
    return path


def run(*args: object, **env: str) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args], env=env)


def refused(result: Result) -> str:
    """The one line that says why, without a traceback."""
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    line = result.stderr.strip().splitlines()[-1]
    assert line.startswith("gradtrace: ")
    return line


# gradtrace ---------------------------------------------------------------------------------------


def test_version() -> None:
    result = run("--version")
    assert result.exit_code == 0
    assert gradtrace.__version__ in result.stdout and torch.__version__ in result.stdout
    assert "CPU kernels:" in result.stdout and "CUDA devices:" in result.stdout


def test_help_names_every_command() -> None:
    result = run("--help")
    assert result.exit_code == 0
    assert all(name in result.stdout for name in ("demo", "check", "trace"))


def test_an_unknown_command_is_an_error() -> None:
    assert run("nothing").exit_code == 2


def test_debug_shows_the_error_itself(tmp_path: Path) -> None:
    result = run("--debug", "check", tmp_path / "none.py:f")
    assert isinstance(result.exception, GradtraceError)


def test_the_module_is_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    import runpy

    monkeypatch.setattr(sys, "argv", ["gradtrace", "--version"])
    with pytest.raises(SystemExit) as end:
        runpy.run_module("gradtrace", run_name="__main__")
    assert end.value.code == 0


# gradtrace check ---------------------------------------------------------------------------------


def test_a_right_gradient_is_0(script: Path) -> None:
    result = run("check", f"{script}:right")
    assert result.exit_code == 0, result.stderr
    assert "gradients agree: 8 elements of 2 parameters" in result.stdout
    assert "print" not in result.stdout and "a script may print" in result.stderr


def test_a_wrong_gradient_is_1_and_named(script: Path) -> None:
    result = run("check", f"{script}:wrong")
    assert result.exit_code == 1
    assert "wrong gradient: weight" in result.stdout


@pytest.mark.parametrize(("name", "code"), [("right", 0), ("swapped", 0), ("wrong", 1)])
def test_check_as_json(script: Path, name: str, code: int) -> None:
    result = run("check", f"{script}:{name}", "--json", "--sample", 1, "--seed", 3)
    assert result.exit_code == code
    data = json.loads(result.stdout)
    assert data["ok"] is (code == 0)
    assert [row["checked"] for row in data["rows"]] == [1, 1]


def test_arguments_are_passed_as_strings(script: Path) -> None:
    result = run("check", f"{script}:right", "--json", "--", "5")
    sizes = {row["name"]: row["shape"] for row in json.loads(result.stdout)["rows"]}
    assert sizes == {"weight": [2, 5], "bias": [2]}
    line = refused(run("check", f"{script}:echo", "--", "--json", "-x", "a b"))
    where = f"script.py, line {line_of('raise ValueError')}"
    assert f"{where}: ValueError: got ('--json', '-x', 'a b')" in line


CHECK_ERRORS: dict[str, tuple[str, ...]] = {
    "script.py:rihgt": ("no function 'rihgt'", "did you mean right"),
    "script.py": ("names no function", "script.py:function"),
    "script.py:": ("names no function",),
    "none.py:right": ("no script", "none.py"),
    "script.py:alone": ("alone returned Linear", "(model, loss_fn)"),
    "script.py:several": ("6 elements",),
    "script.py:leaves": (f"line {line_of('raise SystemExit')}: SystemExit",),
    "script.py:fails_later": (f"line {line_of('return m(torch')}: RuntimeError", "--debug"),
    "broken.py:f": ("broken.py, line 2: SyntaxError",),
    "text.txt:f": ("text.txt is not a Python script",),
}


@pytest.mark.parametrize("target", CHECK_ERRORS)
def test_errors_are_one_clear_line(
    script: Path, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (script.parent / "broken.py").write_text("x = 1\ndef f(:\n")
    (script.parent / "text.txt").write_text("")
    monkeypatch.chdir(script.parent)
    line = refused(run("check", target, "--json"))
    assert all(part in line for part in CHECK_ERRORS[target]), line


def test_too_many_arguments(script: Path) -> None:
    line = refused(run("check", f"{script}:right", "--", "3", "4"))
    assert "right(size='3') was given 2 arguments" in line


def test_the_interpreter_is_left_as_it_was(script: Path) -> None:
    path, modules = list(sys.path), set(sys.modules)
    run("check", f"{script}:right")
    run("check", f"{script}:echo")
    assert sys.path == path
    assert "gradtrace_script" not in set(sys.modules) - modules


@pytest.mark.parametrize(("env", "coloured"), [({"NO_COLOR": "1"}, False), ({}, True)])
def test_no_color(
    script: Path, env: dict[str, str], coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    forced = {"FORCE_COLOR": "1", "TERM": "xterm-256color", **env}
    result = run("check", f"{script}:right", **forced)
    assert ("\x1b[" in result.stdout) is coloured


# gradtrace demo ----------------------------------------------------------------------------------


def test_the_demo_finds_what_was_planted(tmp_path: Path) -> None:
    before, out = torch.get_rng_state(), tmp_path / "new" / "report.html"
    result = run("demo", "--out", out)
    assert result.exit_code == 0, result.stderr
    assert "found 4 of the 4" in result.stdout and str(out) in result.stdout
    assert "planted.py:" in result.stdout and ".detach()" in result.stdout
    assert "gradtrace report" in out.read_text(encoding="utf-8")
    assert torch.equal(torch.get_rng_state(), before)


def test_the_demo_as_json(tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    data = json.loads(run("demo", "--out", out, "--json").stdout)
    assert data["report"] == str(out) and not data["diagnosis"]["healthy"]
    assert [row["found"] for row in data["planted"]] == [
        "views.third",
        "memory.0",
        "experts.2",
        "spare",
    ]


def test_the_demo_finds_nothing_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same network without its faults."""
    from gradtrace.cli import planted

    class Sound(planted.Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.spare = nn.Identity()
            with torch.no_grad():
                self.router.bias.zero_()

        def forward(self, words: Tensor) -> Tensor:
            x = self.embed(words)
            h = sum(v(q) for v, q in zip(self.views.values(), x.flatten(1).chunk(4, 1)))
            h = h + self.memory(x.mean(1))
            experts = torch.stack([expert(h) for expert in self.experts], -1)
            scores: Tensor = self.output((experts * self.router(h).softmax(-1)[:, None]).sum(-1))
            return scores

    monkeypatch.setattr(planted, "Classifier", Sound)
    assert [row.found for row in planted.look().rows][1:] == ["", "", ""]


def test_the_demo_into_a_place_that_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("here")
    assert "file" in refused(run("demo", "--out", tmp_path / "file" / "report.html"))
    for folder in (tmp_path, ""):  # told before anything runs
        line = refused(run("demo", "--out", folder))
        assert "is a folder: give the name of a file to write" in line


def test_help_of_commands_is_broken_at_the_edge_only() -> None:
    """Words that fit in the line before do not stand alone in the next."""
    lines = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "100"}).stdout.split("\n")
    at = next(n for n, line in enumerate(lines) if "diagnose " in line)
    first, second = (line.strip("│ ") for line in lines[at : at + 2])
    assert len(lines[at].rstrip("│ ")) + len(second.split()[0]) + 1 > 95, (first, second)
