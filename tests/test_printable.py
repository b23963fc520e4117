"""Names and files with terminal escapes, bidi marks and newlines: nothing of it is printed raw."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import gradtrace as gt
from gradtrace.cli import output
from gradtrace.cli.app import app
from gradtrace.errors import HIDDEN, BadFile, GradtraceError, UnknownName, caution, printable

EVIL = {
    "colour": "\x1b[31mred",
    "title": "\x1b]0;owned\x07",
    "link": "\x1b]8;;http://x\x1b\\here\x1b]8;;\x1b\\",
    "c1": "\x9b31m\x90q\x9c",
    "bidi": "a\u202eb\u2066c\u200f",
    "newline": "ok\ngradtrace: all is well",
    "return": "hidden\rshown",
    "separators": "a\u2028b\u2029c\x85d\x0be",
    "surrogate": "\ud800",
    "nul": "a\0b\x7f",
    "tag": "\U000e0041\ufeff",
}
MARKUP = "[link=http://x][red]markup[/red]"


def unprintable(text: str) -> list[str]:
    """What a terminal must not get; lines and the colours of rich are its own."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", text) if "\x1b[31mred" not in text else text
    return [char for char in text if char != "\n" and printable(char) != char]


@pytest.mark.parametrize("text", EVIL.values(), ids=EVIL)
def test_everything_hidden_is_an_escape(text: str) -> None:
    found = printable(text)
    assert unprintable(found) == [] and "\n" not in found
    assert printable(found) == found and found.encode().decode() == found
    assert HIDDEN


def test_what_can_be_read_stays() -> None:
    for text in ("", "encoder.0", "解码器", "é", "a b", "🙂", MARKUP, "\\x1b"):
        assert printable(text) is text


# Errors and warnings -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVIL.values(), ids=EVIL)
@pytest.mark.parametrize("kind", [GradtraceError, UnknownName, BadFile])
def test_errors_are_printable(kind: type[GradtraceError], name: str) -> None:
    error = kind(f"no leaf {name} takes part")
    assert unprintable(str(error)) == [] and unprintable(repr(error)) == []
    assert error.args == (f"no leaf {name} takes part",)


@pytest.mark.parametrize("name", EVIL.values(), ids=EVIL)
def test_warnings_are_printable(name: str) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        caution(f"no view was kept: {name}")
    assert len(told) == 1 and all(unprintable(str(each.message)) == [] for each in told)
    assert [each.filename for each in told] == [__file__]


def evil_model(name: str) -> tuple[nn.Module, Callable[[], Tensor]]:
    model = nn.Module()
    for each in (name, MARKUP):
        model._modules[each] = nn.Linear(2, 2)
    first, second = model._modules.values()
    assert first is not None and second is not None
    return model, lambda: second(first(torch.ones(1, 2)) * 1e-30).sum()


@pytest.mark.parametrize("name", EVIL.values(), ids=EVIL)
def test_results_are_printable(name: str) -> None:
    """Tables, verdicts and what is shown of an object, also in a notebook."""
    model, loss = evil_model(name)
    with gt.watch(model) as watch:
        value = loss()
    trace = watch.trace(value)
    flow, table, paths = trace.norms(), trace.influence(), trace.paths(k=1, name=f"{name}.weight")
    graph = watch.graph(value)
    shown = [
        *(str(x) for x in (flow, table, paths, paths[0], graph)),
        *(repr(x) for x in (flow, table, paths, paths[0], graph, trace, trace.gradients)),
        *(x._repr_html_() for x in (flow, table, paths[0])),
        graph.draw(),
    ]
    assert [unprintable(text) for text in shown] == [[]] * len(shown)
    with pytest.raises(GradtraceError) as told:
        trace.path("nothing")
    assert unprintable(str(told.value)) == []


# The command line --------------------------------------------------------------------------------

SCRIPT = """
import torch
from torch import nn
NAME = {name!r}
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self._modules[NAME] = nn.Linear(2, 2)
        self._modules[{markup!r}] = nn.Linear(2, 2)
    def forward(self, x):
        for each in self._modules.values():
            x = each(x) * 1e-6
        return x
def loss():
    return Net()(torch.ones(1, 2)).sum()
def parts():
    return Net(), lambda model, x: model(x).sum(), [torch.ones(1, 2)]
def broken():
    raise ValueError(NAME)
def pair():
    net = Net()
    return lambda: net(torch.ones(1, 2)).sum(), net
"""


def ran(*args: str) -> str:
    result = CliRunner().invoke(app, list(args))
    return result.output + (result.stderr or "")


COMMANDS = {
    "trace": ["trace", "evil.py:loss"],
    "trace --json": ["trace", "evil.py:loss", "--json"],
    "path": ["trace", "evil.py:loss", "--path", "nothing"],
    "influence": ["influence", "evil.py:parts"],
    "check": ["check", "evil.py:pair"],
    "an error": ["trace", "evil.py:broken"],
    "no function": ["trace", "evil.py:@"],
    "no such command": ["@"],
    "no such option": ["trace", "--@"],
    "an extra argument": ["demo", "a", "b", "@"],
    "a bad value": ["trace", "evil.py:loss", "--top", "@"],
}


@pytest.mark.parametrize("name", ["\x1b[31mred\x9b\u202e\x07", "ok\x1b]8;;http://x\x07\x0dlink"])
@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_commands_print_no_controls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, command: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    (tmp_path / "evil.py").write_text(SCRIPT.format(name=name, markup=MARKUP))
    output = ran(*(word.replace("@", name) for word in command))
    assert output and [c for c in output if c != "\n" and printable(c) != c] == []


def test_remarks_and_json_are_printable(capsys: pytest.CaptureFixture[str]) -> None:
    output.say("a\x1b[31m\u202eb\x9b")
    output.write_json({"a": "\x7f\x1b"})
    out, err = capsys.readouterr()
    assert unprintable(err + out) == []
    assert json.loads(out) == {"a": "\x7f\x1b"}
