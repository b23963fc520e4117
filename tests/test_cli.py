"""The command line, as a user or a script meets it."""

from __future__ import annotations

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner, Result

import gradtrace
from gradtrace.cli import app
from gradtrace.errors import GradtraceError
from gradtrace.experiments import competition, demo, demo_network
from gradtrace.recording.aten_rules import OPENED, RULES

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
    assert result.exit_code == 0 and gradtrace.__version__ in result.stdout


def test_help_names_every_command() -> None:
    result = run("--help")
    assert result.exit_code == 0
    assert all(name in result.stdout for name in ("demo", "check", "ops"))


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


# gradtrace ops -----------------------------------------------------------------------------------


def test_ops_lists_every_row_of_the_tables() -> None:
    data = json.loads(run("ops", "--json").stdout)
    assert [op["name"] for op in data["operations"]] == [*RULES, *OPENED]
    assert all(op["how"] for op in data["operations"])
    assert set(data["kinds"]) <= {"exact", "view", "probed", "opened", "dense"}
    assert sum(data["kinds"].values()) > 1000


def test_ops_as_a_table() -> None:
    result = run("ops")
    assert result.exit_code == 0
    assert "convolution_backward" in result.stdout
    assert re.search(r"All [\d,]+ functional ATen overloads: ", result.stdout)


@pytest.mark.parametrize("name", ["mul.Tensor", "aten::mul.Tensor", "aten.mul.Tensor"])
def test_ops_by_name(name: str) -> None:
    data = json.loads(run("ops", name, "--json").stdout)
    assert [(op["name"], op["kind"]) for op in data["operations"]] == [("mul.Tensor", "exact")]


def test_ops_without_overload_shows_all_functional_ones() -> None:
    data = json.loads(run("ops", "tanh_backward", "add", "--json").stdout)
    names = [op["name"] for op in data["operations"]]
    assert names[0] == "tanh_backward" and {"add.Tensor", "add.Scalar"} <= set(names)
    assert not any(name.endswith("out") for name in names)


def test_ops_in_place() -> None:
    data = json.loads(run("ops", "add_.Tensor", "--json").stdout)
    assert data["operations"][0]["how"].startswith("in place: ")


def test_ops_unknown_name() -> None:
    assert "did you mean tanh_backward" in refused(run("ops", "tanh_bakward"))


# gradtrace demo ----------------------------------------------------------------------------------

VOID = {"meta", "br", "hr", "img", "link", "input"}


class Page(HTMLParser):
    """Sees that tags are balanced and nothing is fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        for name, value in attrs:
            inside = (value or "#").startswith(("#", "data:image/"))
            assert name not in ("src", "href") or inside
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A competition of few steps."""
    small = {"tasks": ["counting"], "steps": 4, "every": 2, "evaluated": 4, "traced": 1, "pairs": 2}
    monkeypatch.setattr(competition, "QUICK", competition.QUICK | small | {"width": 4})
    monkeypatch.setattr(demo, "SHORT", ())


@pytest.fixture(scope="module")
def found() -> demo.Look:
    """What the demo finds in its network, which it draws and trains alike each time."""
    return demo.look()


@pytest.fixture
def looked(found: demo.Look, monkeypatch: pytest.MonkeyPatch) -> None:
    """A demo that has looked already."""
    monkeypatch.setattr(demo, "look", lambda: found)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("as_json", [False, True])
def test_demo(tmp_path: Path, as_json: bool, request: pytest.FixtureRequest) -> None:
    if as_json:
        request.getfixturevalue("looked")
    out = tmp_path / "report.html"
    result = run("demo", "--out", out, *(["--json"] if as_json else []))
    assert result.exit_code == 0, result.stderr
    page = Page()
    page.feed(out.read_text(encoding="utf-8"))
    assert page.open == [] and {"iframe", "table", "style"} <= page.seen
    assert not {"script", "link"} & page.seen
    text = " ".join(page.text)
    assert "found 3 of the 3" in text and "rnn, lstm, gru side by side" in text
    assert gradtrace.__version__ in text and "views.third" in text and "output detached" in text
    written = out.read_text(encoding="utf-8")  # of the competition a sentence and a figure are open
    assert written.index("too few to tell") < written.index("<details>") < written.index("In full")
    assert 'data-of="found">views.third<' in written  # the column, for narrow pages
    if not as_json:
        assert str(out) in result.stdout and "views.third" in result.stdout
        return
    data = json.loads(result.stdout)
    assert data["report"] == str(out)
    assert data["competition"]["sentence"] and data["competition"]["form"] == "quick"
    assert [row["right"] for row in data["planted"]] == [True] * 3
    assert not data["diagnosis"]["healthy"]


@pytest.mark.usefixtures("short", "looked")
def test_a_demo_that_was_stopped_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "report.html"
    first = demo.demo(out, say=lambda line: None)
    monkeypatch.setattr(competition, "trained", None)  # nothing is measured again
    again = demo.demo(out, say=lambda line: None)
    assert again["competition"]["tables"] == first["competition"]["tables"]


def test_the_demo_finds_what_was_planted_and_draws_no_random_numbers() -> None:
    before = torch.get_rng_state()
    found = demo.look().found
    assert torch.equal(torch.get_rng_state(), before)
    shares, untrained = found["shares"]["trained"], found["shares"]["untrained"]
    assert shares["views.third"] > 0.9 and max(untrained.values()) < 0.7
    assert sum(shares.values()) == pytest.approx(1)
    assert [(row["planted"], row["right"]) for row in found["planted"]] == [
        ("views.third", True),
        ("memory", True),
        ("mixture.experts.2", True),
    ]
    assert {each["module"] for each in found["diagnosis"]["silent"]} == {
        "memory.0",
        "mixture.experts.2.0",
        "mixture.experts.2.2",
    }


def test_the_demo_finds_nothing_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same network without its faults."""

    class Sound(demo_network.Classifier):
        def __init__(self) -> None:
            super().__init__()
            with torch.no_grad():
                self.mixture.router.bias.zero_()

        def forward(self, words: Tensor) -> Tensor:
            x = self.embed(words)
            h = torch.stack([view(x) for view in self.views.values()]).sum(0)
            return self.output(self.mixture(h + self.memory(x.mean(1))))

    monkeypatch.setattr(demo_network, "Classifier", Sound)
    found = demo.look().found
    assert [row["right"] for row in found["planted"]] == [True, False, False]
    assert demo.verdict(found).startswith("gradtrace found 1 of the 3")


@pytest.mark.usefixtures("short", "looked")
def test_demo_makes_the_folder_it_writes_to(tmp_path: Path) -> None:
    out = tmp_path / "new" / "folder" / "report.html"
    assert run("demo", "--out", out).exit_code == 0
    assert out.stat().st_size > 1_000


@pytest.mark.usefixtures("short", "looked")
def test_demo_into_a_place_that_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("here")
    line = refused(run("demo", "--out", tmp_path / "file" / "report.html"))
    assert "file" in line
    for folder in (tmp_path, ""):  # told before anything runs
        line = refused(run("demo", "--out", folder))
        assert "is a folder: give the name of a file to write" in line


@pytest.mark.usefixtures("short")
def test_names_are_escaped(
    found: demo.Look, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Module names are untrusted text."""
    rows = [{**row, "found": "<script>alert(1)</script>"} for row in found.found["planted"]]
    nasty = found._replace(found=found.found | {"planted": rows})
    monkeypatch.setattr(demo, "look", lambda: nasty)
    demo.demo(tmp_path / "report.html", say=lambda line: None)
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<script>" not in text and "&lt;script&gt;" in text


def test_help_of_commands_is_broken_at_the_edge_only() -> None:
    """Words that fit in the line before do not stand alone in the next."""
    lines = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "100"}).stdout.split("\n")
    at = next(n for n, line in enumerate(lines) if "diagnose " in line)
    first, second = (line.strip("│ ") for line in lines[at : at + 2])
    assert len(lines[at].rstrip("│ ")) + len(second.split()[0]) + 1 > 95, (first, second)
