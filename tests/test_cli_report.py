"""``gradtrace report``, and what all commands have in common."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fresh
import pytest
import torch
from torch import nn
from typer.testing import CliRunner, Result

import gradtrace as gt
from gradtrace.cli import app as typed
from gradtrace.cli import main, report
from gradtrace.cli.codes import BUG, INTERRUPTED, MEANING, UNREAD, WRONG
from gradtrace.cli.printing import working
from gradtrace.errors import GradtraceError

COMMANDS = ("demo", "diagnose", "trace", "report", "check")


def run(*args: object) -> Result:
    return CliRunner().invoke(typed, [str(arg) for arg in args])


def refused(result: Result) -> str:
    assert result.exit_code == 2, result.stdout
    assert result.stdout == "" and "Traceback" not in result.stderr
    return result.stderr.strip().splitlines()[-1]


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A trace in a file; other files go to the same folder."""
    monkeypatch.chdir(tmp_path)
    _save(tmp_path / "a.gradtrace")
    return tmp_path / "a.gradtrace"


def _save(path: Path, rule: str = "greedy") -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
    with gt.watch(model) as watch:
        loss = model(torch.ones(2, 3)).sum()
    watch.trace(loss, rule=rule).save(path, sample=20)


def _monitored(path: Path, steps: int, *, ended: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    with gt.Monitor(model, every=1, file=path, budget=None) as monitor:
        for _ in range(steps):
            monitor.step(model(torch.ones(2, 3)).sum())
    if not ended:
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(line for line in lines if b'"end"' not in line))


# gradtrace report ---------------------------------------------------------------------------------


def test_a_saved_trace(saved: Path) -> None:
    result = run("report", saved)
    assert result.exit_code == 0, result.stderr
    assert "a: greedy, 4 leaves of 16 elements" in result.stdout
    assert "The report is in a.html" in result.stdout
    assert Path("a.html").stat().st_size > 10_000


def test_two_traces(saved: Path) -> None:
    _save(Path("b ü.gradtrace"), "viterbi")
    asked = ["report", saved, "b ü.gradtrace", "--out", "new/ab.html", "--name", "first", "--json"]
    result = run(*asked)
    assert result.exit_code == 0, result.stderr
    data = json.loads(result.stdout)
    assert data["report"] == "new/ab.html" and data["running"] is None
    assert data["summary"].startswith("first: greedy") and "b ü: viterbi" in data["summary"]
    assert Path("new/ab.html").stat().st_size > 10_000


def test_it_is_opened(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr("typer.launch", opened.append)
    assert run("report", saved, "--open").exit_code == 0
    assert opened == [Path("a.html").resolve().as_uri()]


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (["none.gradtrace"], "does not exist"),
        (["text.gradtrace"], "not a gradtrace file"),
        (["none.jsonl"], "does not exist"),
        (["a.gradtrace", "run.jsonl"], "only traces are compared"),
        (
            ["run.gradtrace"],
            "view of a training run, for the page of its .jsonl file: give run.jsonl",
        ),
        (["a.gradtrace", "--name", "x", "--name", "y"], "2 names"),
        (["a.gradtrace", "--out", "a.gradtrace"], "is the file that is read"),
        (["a.gradtrace", "--out", "text.gradtrace/x.html"], "'text.gradtrace' cannot be made (Fi"),
        (["loop"], "'loop' cannot be opened (Too many levels of symbolic links)"),
        (["a.gradtrace", "--out", "loop"], "'loop' leads nowhere"),
        (["."], "'.' is a folder"),
        (["/"], "'/' is a folder"),
    ],
)
@pytest.mark.usefixtures("saved")
def test_what_cannot_be_shown(asked: list[str], words: str) -> None:
    Path("text.gradtrace").write_text("text")
    _monitored(Path("run.jsonl"), 1, ended=True)
    Path("loop").symlink_to("loop")
    assert words in refused(run("report", *asked))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_to(saved: Path) -> None:
    saved.parent.chmod(0o500)
    assert "ermission" in refused(run("report", saved))


def test_a_training_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _monitored(tmp_path / "run.jsonl", 3, ended=True)
    result = run("report", "run.jsonl", "--json", "--watch")  # has ended: it is not waited for
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["running"] is False
    assert Path("run.html").stat().st_size > 10_000


def test_a_run_that_goes_on_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for the file, writes the page again when there is more, and ends with training."""
    monkeypatch.chdir(tmp_path)
    path, pages = tmp_path / "run.jsonl", list[str]()
    acts: list[Callable[[], object]] = [
        lambda: _monitored(path, 1, ended=False),
        lambda: None,  # nothing new: nothing written
        lambda: path.rename("away"),  # for a moment it is not there, as when it is written again
        lambda: Path("away").rename(path),
        lambda: path.write_bytes(path.read_bytes() + b'{"kind": "end", "step": 1}\n'),
    ]
    monkeypatch.setattr(report.time, "sleep", lambda _: acts.pop(0)())
    real = report.write_page

    def counted(*asked: Any) -> tuple[str, bool | None]:
        done = real(*asked)
        pages.append(done[0])
        return done

    monkeypatch.setattr(report, "write_page", counted)
    result = run("report", path, "--watch", "--every", 0.1)
    assert result.exit_code == 0, result.stderr
    assert "waiting for" in result.stderr and acts == []
    assert [("has ended" in page) for page in pages] == [False, False, True]


def test_a_run_that_vanishes_between_two_looks_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run.jsonl"
    _monitored(path, 1, ended=False)
    real, asked = report.write_page, list[int]()

    def vanishing(*what: Any) -> tuple[str, bool | None]:
        asked.append(len(asked))
        if len(asked) == 2:
            held = path.read_bytes()
            path.unlink()
            try:
                return real(*what)
            finally:
                path.write_bytes(held + b'{"kind": "end", "step": 1}\n')
        return real(*what)

    monkeypatch.setattr(report, "write_page", vanishing)
    monkeypatch.setattr(report.time, "sleep", lambda _: os.utime(path, ns=(len(asked),) * 2))
    result = run("report", path, "--watch")
    assert result.exit_code == 0 and "has ended" in result.stdout, result.stderr
    assert len(asked) == 3


def test_ctrl_c_ends_a_watch(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(report.time, "sleep", stop)
    result = run("report", saved, "--watch")
    assert result.exit_code == INTERRUPTED and "gradtrace: stopped" in result.stderr


# All commands -------------------------------------------------------------------------------------


def test_the_help_tells_commands_and_exit_codes() -> None:
    text = " ".join(run("--help").stdout.split())
    places = [text.index(f"│ {name} ") for name in COMMANDS]
    assert places == sorted(places)
    assert all(f"{code} {meaning}" in text for code, meaning in MEANING.items())
    assert "--install-completion" in text


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_examples(name: str) -> None:
    result = run(name, "--help")
    assert result.exit_code == 0
    assert "Examples:" in result.stdout and f"gradtrace {name}" in result.stdout


def test_typos_in_commands() -> None:
    result = run("trase")
    assert result.exit_code == 2 and "Did you mean 'trace'?" in result.stderr


def test_a_bug_is_called_one(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise TypeError("unforeseen")

    monkeypatch.setattr(report, "write_page", broken)
    result = run("report", saved)
    assert result.exit_code == BUG and "Traceback" not in result.stderr
    assert "this is a bug: TypeError: unforeseen" in result.stderr
    assert isinstance(run("report", saved, "--debug").exception, TypeError)


def ended(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException
) -> tuple[int, str]:
    """What ``main`` makes of an error that comes out of a command."""

    def fails(prog_name: str) -> None:
        raise error

    monkeypatch.setattr(sys.modules["gradtrace.cli.app"], "app", fails)
    with pytest.raises(SystemExit) as end:
        main()
    assert isinstance(end.value.code, int)
    return end.value.code, capsys.readouterr().err


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SystemExit(1), 1),
        (BrokenPipeError(), UNREAD),
        (KeyboardInterrupt(), INTERRUPTED),
        (GradtraceError("what is wrong"), WRONG),
        (TypeError("unforeseen"), BUG),
    ],
)
def test_how_it_ends(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    debug: bool,
) -> None:
    monkeypatch.setattr(sys, "argv", ["gradtrace", *(["--debug"] if debug else [])])
    found, told = ended(monkeypatch, capsys, error)
    assert found == code
    assert ("Traceback" in told) is (debug and code in (WRONG, BUG))
    assert debug or str(error) in told or code not in (WRONG, BUG)


class Terminal(io.StringIO):
    """A stream that says it is one."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("term", "shown"), [("xterm-256color", True), ("dumb", False)])
def test_progress_is_for_terminals(monkeypatch: pytest.MonkeyPatch, term: str, shown: bool) -> None:
    monkeypatch.setenv("TERM", term)
    monkeypatch.delenv("NO_COLOR", raising=False)
    for stream, seen in ((Terminal(), shown), (io.StringIO(), False)):
        monkeypatch.setattr(sys, "stderr", stream)
        with working("counting [red]") as work:
            work.begin("still counting [red]")
            work.advance(1, 2)
        assert ("still counting [red]" in stream.getvalue()) is seen


# Processes ----------------------------------------------------------------------------------------


def process(*args: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gradtrace", *args]
    return subprocess.run(command, text=True, stderr=subprocess.PIPE, timeout=fresh.LONG, **options)  # type: ignore[call-overload, no-any-return]


def test_a_reader_that_has_gone() -> None:
    read, write = os.pipe()
    os.close(read)
    done = process("trace", "--help", stdout=write)
    os.close(write)
    assert done.returncode == UNREAD and done.stderr == ""


def test_stdout_that_is_closed() -> None:
    done = process("report", "--help", preexec_fn=lambda: os.close(1))
    assert done.returncode == 0 and done.stderr == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_disk_that_is_full() -> None:
    with open("/dev/full", "w") as full:
        done = process("trace", "--help", stdout=full)
    assert done.returncode == WRONG and "No space left" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_errors_that_cannot_be_told_have_their_exit_code(unbuffered: str) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "gradtrace", "check", "none.py:loss"]
        env = os.environ | {"PYTHONUNBUFFERED": unbuffered}
        done = subprocess.run(command, stderr=full, timeout=fresh.LONG, check=False, env=env)
    assert done.returncode == WRONG


@pytest.mark.skipif(sys.platform != "linux", reason="the folder of a process can be removed")
def test_a_folder_that_was_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    for asked in (["report", "a.gradtrace"], ["check", "none.py:loss"]):
        line = refused(run(*asked))
        assert line == "gradtrace: the current folder was removed: change to another one"


def test_a_script_can_do_as_it_likes(tmp_path: Path) -> None:
    """It prints, and so do its subprocesses; with --debug its own lines are shown, no others."""
    script = tmp_path / "loud.py"
    script.write_text(
        "import os, sys, torch\nprint('printed')\nos.system('echo echoed')\n"
        "def loss():\n    os.write(1, b'written')\n"
        "    return torch.ones(2, requires_grad=True).sum()\n"
        "def fails():\n    raise ValueError('own')\n"
    )
    done = fresh.python("-m", "gradtrace", "trace", f"{script}:loss", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["loss"] == [2.0]
    assert all(word in done.stderr for word in ("printed", "echoed", "written"))
    done = fresh.python("-m", "gradtrace", "trace", f"{script}:fails", "--debug")
    assert done.returncode == WRONG and done.stdout == ""
    assert "raise ValueError('own')" in done.stderr and "trace.py" not in done.stderr
    assert "loud.py, line 8: ValueError: own" in done.stderr


def test_the_shell_is_answered() -> None:
    words = {"_GRADTRACE_COMPLETE": "complete_bash", "COMP_WORDS": "gradtrace infl"}
    done = process(stdout=subprocess.PIPE, env={**os.environ, **words, "COMP_CWORD": "1"})
    assert done.stdout.split() == ["influence"], done.stderr
