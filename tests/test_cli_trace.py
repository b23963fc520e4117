"""``gradtrace trace``: what a user's function may return, and what is shown."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import fresh
import pytest
import torch
from torch import nn
from typer.testing import CliRunner, Result

import gradtrace as gt
from gradtrace.cli import app
from gradtrace.cli.influence import KINDS, kinds, parsed
from gradtrace.cli.measures import MEASURES, Question
from gradtrace.cli.target import functions
from gradtrace.cli.trace import element
from gradtrace.components.components import KINDS as KNOWN
from gradtrace.errors import GradtraceError

SCRIPT = """
import os
import sys
import torch
from torch import nn
import beside

print("it prints")
os.write(1, b"and writes\\n")
ARGV = list(sys.argv)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.left, self.right = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, words):
        x = self.embed(words)
        return (self.left(x).tanh() + self.right(x).relu()).sum(-1)

    def score(self, words):
        return self(words).square().mean()

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

def function():
    model, words = made()
    return model, lambda model: model.score(words)

def function_first():
    model, words = made()
    return (lambda: model.score(words)), model

def output():
    return {"loss": loss()}

def trained(steps="3"):
    model, words = made()
    for _ in range(int(steps)):
        model.score(words).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad
                parameter.grad = None
    return model.score(words)

def several():
    model, words = made()
    return model(words).square()

def args(*args):
    raise ValueError(f"{args} {ARGV[1:]}")

def number():
    return 3

def two_models():
    return nn.Linear(2, 2), nn.Linear(2, 2)

def not_a_loss():
    return nn.Linear(2, 2), lambda model: 3

def freed():
    model, words = made()
    found = model.score(words)
    found.backward()
    return model, found

def no_graph():
    with torch.no_grad():
        return loss()

def leaves():
    sys.exit(3)

def compiled():
    model, words = made()
    return torch.compile(model.score)(words)

def hostile():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.add_module("</script>\\u202e[red]🙂\\n" + "x" * 10_000, nn.Linear(2, 2))
            self.add_module("second", nn.Linear(2, 2))
        def forward(self, x):
            for child in self.children():
                x = child(x)
            return x.sum()
    model = Odd()
    return model, model(torch.ones(1, 2))

def nan():
    model, words = made()
    return model.score(words) * float("nan")

def nothing():
    x = torch.zeros(3, requires_grad=True)
    return (x * 0).sum()

def parts():
    model, words = made()
    return model, lambda model, batch: model.score(batch), [words, words.flip(0) + 1, words * 2]

def half():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)).bfloat16()
    return model, model(torch.ones(2, 3, dtype=torch.bfloat16)).sum()
"""

FORMS = ("loss", "with_model", "model_last", "function", "function_first", "output", "trained")


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "mein skript ü.py"
    path.write_text(SCRIPT, encoding="utf-8")
    (tmp_path / "beside.py").write_text("")
    return path


def run(*args: object) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])


def refused(result: Result) -> str:
    assert result.exit_code == 2, result.stdout
    assert result.stdout == "" and "Traceback" not in result.stderr
    line = result.stderr.strip().splitlines()[-1]
    assert line.startswith("gradtrace: ")
    return line


def traced(script: Path, name: str, *options: object) -> dict[str, Any]:
    result = run("trace", f"{script}:{name}", "--json", *options)
    assert result.exit_code == 0, result.stderr
    data: dict[str, Any] = json.loads(result.stdout)
    return data


def direct() -> gt.watch:
    """The same without the command line."""
    space: dict[str, Any] = {}
    exec(SCRIPT.replace("import beside", "").replace("os.write", "len or "), space)
    model, words = space["made"]()
    with gt.watch(model) as watch:
        watch.loss = model.score(words)  # type: ignore[attr-defined]
    return watch


# What a function returns --------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMS)
def test_every_form_gives_the_names_of_the_model(script: Path, name: str) -> None:
    data = traced(script, name, "--path", "left.weight[0,1]")
    wanted = ["embed.weight", "left.bias", "left.weight", "right.bias", "right.weight"]
    assert sorted(data["leaves"]) == wanted
    assert [row["component"] for row in data["influence"]] == ["embed", "left", "right"]
    steps = data["paths"][0]["steps"]
    assert steps[1]["module"] == "left"  # no number of a call: it was the first of this loss
    assert math.isfinite(data["loss"][0])


def test_the_numbers_are_those_of_a_watch(script: Path) -> None:
    watch = direct()
    trace = watch.trace(watch.loss)  # type: ignore[attr-defined]
    for name in ("loss", "function"):
        data = traced(script, name, "--path", "embed.weight[1,2]")
        found = {row["component"]: row for row in data["influence"]}
        for row in trace.influence():
            assert found[row.name]["through"] == row.through
            assert found[row.name]["eligible"] == row.eligible
        path = trace.path("embed.weight", (1, 2))
        assert data["paths"][0]["weight"] == pytest.approx(path.weight)
        assert [step["operator"] for step in data["paths"][0]["steps"][1:]] == path.operators


def test_influence_on_some_parameters(script: Path) -> None:
    watch = direct()
    wanted = watch.trace(watch.loss).influence(of="embed.weight")  # type: ignore[attr-defined]
    data = traced(script, "loss", "--of", "embed.weight")
    for row in data["influence"]:
        assert row["eligible"] == wanted[row["component"]].eligible
    assert run("trace", f"{script}:loss", "--of", "embd.weight").exit_code
    assert "A path carries" in run("trace", f"{script}:loss").stdout


def test_a_vector_of_losses(script: Path) -> None:
    data = traced(script, "several")
    assert len(data["loss"]) == 3
    assert all("error" in row for row in data["influence"])
    assert "Mean of 3 losses" in run("trace", f"{script}:several").stdout


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of PyTorch's own parts
def test_compiled_code_is_run_as_it_was_written(script: Path) -> None:
    before = os.environ.get("TORCH_COMPILE_DISABLE")
    assert traced(script, "compiled")["operators"] == traced(script, "loss")["operators"]
    assert os.environ.get("TORCH_COMPILE_DISABLE") == before
    assert torch._dynamo.config.disable is (before == "1")


def test_half_precision(script: Path) -> None:
    assert traced(script, "half")["influence"][1]["share"] == 1


# What is shown ------------------------------------------------------------------------------------


def test_the_table(script: Path) -> None:
    result = run(
        "trace", f"{script}:loss", "--top", 1, "--path", "left.bias", "--weight", "gradient"
    )
    assert result.exit_code == 0, result.stderr
    assert "Influence (greedy)" in result.stdout and "and 2 more components" in result.stdout
    assert "Flow: " in result.stdout and "left.bias[" in result.stdout
    assert "it prints" not in result.stdout and "it prints" in result.stderr


def test_what_is_asked_for(script: Path) -> None:
    data = traced(script, "loss", "--components", "both=left,right", "--components", "r*")
    assert [row["component"] for row in data["influence"]] == ["both", "r*"]
    assert data["influence"][0]["share"] == 1
    data = traced(script, "loss", "--components", "operators", "--rule", "viterbi", "--top", 2)
    assert data["rule"] == "viterbi" and len(data["influence"]) == 2
    every = traced(script, "loss")["influence"]
    (first,) = traced(script, "loss", "--top", 1)["influence"]
    assert first in every and 0 < first["share"] < 1  # what is in series comes last
    (shares,) = traced(script, "loss")["choices"].values()
    assert sum(shares.values()) == pytest.approx(1)
    data = traced(script, "loss", "--granularity", "operator", "--path", "embed.weight")
    assert data["granularity"] == "operator" and data["paths"][0]["weight"] == "nan"
    data = traced(script, "loss", "--sample", 5, "--seed", 1)
    assert sum(row["eligible"] for row in data["influence"]) <= 15


def test_other_measures(script: Path) -> None:
    """As ``trace.decompose()`` and its like have them."""
    asked = [part for name in MEASURES for part in ("--measure", name)]
    both = ["--components", "left", "--components", "right"]
    found = traced(script, "loss", *both, *asked)["measures"]
    watch = direct()
    trace = watch.trace(watch.loss)  # type: ignore[attr-defined]
    question = Question({"left": ["left"], "right": ["right"]}, None, 1.0)
    for name, measure in MEASURES.items():
        assert found[name]["rows"] == json.loads(
            json.dumps(measure(trace, question).table().to_dicts())
        )
    for name in ("decompose", "mass"):
        assert sum(row["share"] for row in found[name]["rows"]) == pytest.approx(1, abs=1e-9)
    square = traced(script, "loss", *both, "--measure", "mass", "--power", 2)["measures"]
    assert list(square) == ["mass"] and square["mass"]["rows"] != found["mass"]["rows"]
    assert traced(script, "loss")["measures"] == {}


def test_other_measures_are_printed(script: Path) -> None:
    asked = ["--measure", "choices", "--measure", "decompose", "--measure", "decompose"]
    text = run("trace", f"{script}:loss", *asked, "--top", 1).stdout
    assert text.count("Gradient by component") == 1 == text.count("Choices (greedy)")
    assert "more rows (--top" in text


def test_files(script: Path, tmp_path: Path) -> None:
    saved, page = tmp_path / "new" / "ä 🙂.gradtrace", tmp_path / "neu" / "ö.html"
    data = traced(script, "function", "--out", saved, "--report", page)
    assert (data["out"], data["report"]) == (str(saved), str(page))
    assert set(gt.load(saved).influence().shares) == {"embed", "left", "right"}
    assert page.read_text(encoding="utf-8").lstrip().lower().startswith("<!doctype html>")


def test_a_file_that_cannot_be_written(script: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    line = refused(run("trace", f"{script}:loss", "--report", tmp_path / "file" / "x.html"))
    assert "file" in line


def test_names_that_are_not_meant_well(script: Path) -> None:
    result = run("trace", f"{script}:hostile")
    assert result.exit_code == 0, result.stderr
    assert "\u202e" not in result.stdout and "[red]" in result.stdout
    assert max(map(len, result.stdout.splitlines())) < 400
    data = traced(script, "hostile")
    assert any(len(row["component"]) > 10_000 for row in data["influence"])


def test_the_interpreter_is_left_as_it_was(script: Path) -> None:
    path, argv, modules = list(sys.path), list(sys.argv), set(sys.modules)
    hooks = len(nn.modules.module._global_forward_hooks)
    run("trace", f"{script}:loss")
    run("trace", f"{script}:args", "--", "x")
    assert (sys.path, sys.argv) == (path, argv)
    assert "gradtrace_script" not in set(sys.modules) - modules
    assert len(nn.modules.module._global_forward_hooks) == hooks
    assert not nn.modules.module._global_forward_pre_hooks


# Errors -------------------------------------------------------------------------------------------

ERRORS: dict[str, tuple[str, ...]] = {
    "number": ("number returned int", "return a loss"),
    "two_models": ("two_models returned (Linear, Linear)",),
    "not_a_loss": ("gave int, not a loss",),
    "freed": ("backward",),
    "no_graph": ("grad",),
    "leaves": ("SystemExit: 3",),
    "nan": ("not finite",),
    "los": ("did you mean loss",),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_one_clear_line(script: Path, name: str) -> None:
    line = refused(run("trace", f"{script}:{name}", "--json"))
    assert all(part in line for part in ERRORS[name]), line


UNUSUAL = """
class Stop(BaseException):
    pass

class Silent(Exception):
    def __str__(self):
        raise RuntimeError("no text")

def stop():
    raise Stop("enough")

def silent():
    raise Silent

def memory():
    raise MemoryError

def relative():
    from . import sibling
"""


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("stop", "line 10: Stop: enough"),
        ("silent", "line 13: Silent, whose text cannot be read"),
        ("memory", "line 16: MemoryError, which came without a text"),
        ("relative", "no known parent package; a script is no part of a package: give one beside"),
    ],
)
@pytest.mark.parametrize("command", ["trace", "check", "influence"])
def test_errors_that_scripts_seldom_raise(
    tmp_path: Path, name: str, words: str, command: str
) -> None:
    file = tmp_path / "unusual.py"
    file.write_text(UNUSUAL)
    assert words in refused(run(command, f"{file}:{name}"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--out", "script.py"], "script.py is the script, which would be overwritten"),
        (["--report", "link.py"], "script.py is the script"),
        (["--out", "same", "--report", "./same"], "same is to be written twice; give two names"),
        (["--report", "script.py/x.html"], "the folder 'script.py' cannot be made (File exists)"),
    ],
)
def test_files_that_cannot_be_written(
    script: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], words: str
) -> None:
    monkeypatch.chdir(script.parent)
    held = script.read_bytes()
    (script.parent / "link.py").unlink(missing_ok=True)
    (script.parent / "link.py").symlink_to(script)
    asked = [text.replace("script.py", script.name) for text in options]
    line = refused(run("trace", f"{script}:loss", *asked))
    assert words.replace("script.py", script.name) in line and script.read_bytes() == held


SPAWNS = """
import multiprocessing, sys

class Item:
    pass

def kind(item):
    return type(item).__module__, sys.argv[1:]

def loss(how):
    with multiprocessing.get_context(how).Pool(1) as pool:
        raise ValueError(pool.apply(kind, [Item()]))
"""


@pytest.mark.parametrize("how", ["spawn", "forkserver"])
def test_processes_that_a_script_spawns_find_its_classes(tmp_path: Path, how: str) -> None:
    """As workers of a DataLoader are: on macOS, and elsewhere since Python 3.14."""
    (tmp_path / "spawns.py").write_text(SPAWNS)
    words = ["-m", "gradtrace", "trace", "spawns.py:loss", "--", how]
    done = fresh.python(*words, cwd=tmp_path)
    assert f"ValueError: ('gradtrace_script', ['{how}'])" in done.stderr, done.stderr


def test_a_loss_without_any_path_has_a_table_all_the_same(script: Path) -> None:
    data = traced(script, "nothing")
    assert all(row["share"] is None for row in data["influence"])
    assert "has no path" in refused(run("trace", f"{script}:nothing", "--path", "leaf0"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--path", "left.wieght[0,1]"], "did you mean left.weight"),
        (["--path", "left.weight[9,9]"], "outside its shape"),
        (["--path", "left.weight[a]"], "write NAME or NAME[INDEX]"),
        (["--components", "lfet"], "did you mean left"),
        (["--measure", "mas"], "did you mean mass?"),
        (["--measure", "influence"], "there are decompose, mass, choices"),
        (["--measure", "mass", "--power", "0"], "p is a positive number"),
        (["--measure", "mass", "--power", "nan"], "p is a positive number"),
    ],
)
def test_what_is_not_there(script: Path, options: list[str], words: str) -> None:
    assert words in refused(run("trace", f"{script}:loss", *options))


@pytest.mark.parametrize("option", ["--rule", "--granularity", "--weight"])
def test_choices(script: Path, option: str) -> None:
    result = run("trace", f"{script}:loss", option, "other")
    assert result.exit_code == 2 and "not one of" in result.stderr and result.stdout == ""


def test_arguments_are_in_argv_too(script: Path) -> None:
    line = refused(run("trace", f"{script}:args", "--", "a", "--debug"))
    assert "('a', '--debug') ['a', '--debug']" in line


def test_debug_may_stand_anywhere(script: Path) -> None:
    for asked in (["--debug", "trace"], ["trace", "--debug"]):
        result = run(*asked, f"{script}:args")
        assert isinstance(result.exception, GradtraceError)
        assert isinstance(result.exception.__cause__, ValueError)


# Parts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("w", ("w", None)),
        ("a.w[2]", ("a.w", (2,))),
        ("w[2, -3]", ("w", (2, -3))),
        ("w[2][3]", ("w", (2, 3))),
        ("w[]", ("w", ())),
    ],
)
def test_elements(text: str, wanted: tuple[str, tuple[int, ...] | None]) -> None:
    assert element(text) == wanted


@pytest.mark.parametrize("text", ["", "[1]", "w[1", "w]1[", "w[1]x"])
def test_what_is_no_element(text: str) -> None:
    with pytest.raises(GradtraceError, match="write NAME"):
        element(text)


def test_components() -> None:
    assert parsed([]) is None and parsed(["classes"]) == "classes"
    assert parsed(["a", "g=b,c.*"]) == {"a": ["a"], "g": ["b", "c.*"]}


def test_completion(script: Path) -> None:
    assert KINDS == KNOWN and kinds("cl") == ["classes"]
    assert functions(f"{script}:with") == [f"{script}:with_model"]
    assert functions("nothing.py:x") == functions(str(script)) == []
    script.write_text("def f(:")
    assert functions(f"{script}:f") == []


# A data set ---------------------------------------------------------------------------------------


def test_decompose_over_a_data_set(script: Path, tmp_path: Path) -> None:
    """As ``gradtrace.decompose`` has it; a journal goes on where it ended."""
    asked = ("decompose", f"{script}:parts", "--components", "left", "--components", "right")
    journal = tmp_path / "run.gradtrace"
    result = run(*asked, "--json", "--journal", journal)
    assert result.exit_code == 0, result.stderr
    data = json.loads(result.stdout)
    assert data["pairs"] == 3 and not data["interrupted"] and data["journal"] == str(journal)
    space: dict[str, Any] = {}
    exec(SCRIPT.replace("import beside", "").replace("os.write", "len or "), space)
    wanted = gt.decompose(*space["parts"](), components=["left", "right"])
    shares = {row["component"]: row["share"] for row in data["decompose"]["rows"]}
    assert shares == pytest.approx(wanted.shares)
    assert sum(shares.values()) == pytest.approx(1)
    assert len(json.loads(run(*asked, "--json", "--top", 1).stdout)["decompose"]["rows"]) == 1
    again = run(*asked, "--journal", journal)
    assert again.exit_code == 0 and "left" in again.stdout and "3 losses" in again.stdout
    assert "no module 'nowhere'" in refused(run(*asked[:2], "--components", "nowhere"))
