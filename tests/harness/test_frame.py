"""Experiments as they are run: rows outlive a killed run, and every way to run gives one table."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from html.parser import HTMLParser
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import fresh
import launch
import pytest
import torch
from typer.testing import CliRunner, Result

from gradtrace.cli import app
from gradtrace.errors import GradtraceError
from gradtrace.experiments.harness import drawing, journal, page, pools, publishing, results
from gradtrace.experiments.harness.findings import Findings, Plot, Series, Table
from gradtrace.experiments.harness.journal import Journal, JournalEntry, OtherSettings
from gradtrace.experiments.harness.loading import ExperimentSource, load
from gradtrace.experiments.harness.table import EXPERIMENTS, available
from gradtrace.experiments.harness.work import Failed, measured

MINE = '''
"""Question: Is the sum <b>right</b>?

Expectation: ``a & b``.

Method: Numbers are
drawn and squared.

Seeds: Of the numbers.
"""

import time
from pathlib import Path

import torch

import beside
from gradtrace.experiments.harness.findings import Findings, Plot, Seeds, Series, Table

QUICK = {"n": 6, "held": [], "text": None, "broken": []}
FULL = {"n": 8, "held": [], "text": None, "broken": []}
SEEDS = Seeds(quick=1, full=2)
TIMED = False


def cells(settings, seeds):
    print("a result goes to stdout, and this is none")
    rest = {"held": settings["held"], "broken": settings["broken"]}
    return [{"k": k, "seed": s, **rest} for s in range(seeds) for k in range(settings["n"])]


def measure(cell, tick):
    tick(f"k = {cell['k']}")
    if cell["k"] in cell["broken"]:
        raise ValueError("broken on purpose")
    while cell["k"] in cell["held"] and not Path(__file__).with_name("gate").exists():
        time.sleep(0.01)
    drawn = torch.randn(1000, generator=torch.Generator().manual_seed(cell["seed"]))
    loose = torch.rand(3).sum()  # from the global generator
    return {"y": (drawn**2).sum().item() + cell["k"], "loose": loose.item(), "pair": (1, 2)}


def conclude(rows):
    rows = sorted(rows, key=lambda row: (row.cell["seed"], row.cell["k"]))
    assert all(row.result["pair"] == [1, 2] for row in rows)
    columns = ("k", "y", "loose", "<script>alert(1)</script>")
    body = tuple((r.cell["k"], r.result["y"], r.result["loose"], "|x|") for r in rows)
    x = [r.cell["k"] for r in rows]
    series = Series("y", x, [r.result["y"] for r in rows])
    plot = Plot("sums", "Sums of $x$ <i>", "k", "y", (series,))
    return Findings(
        f"{len(rows)} sums, <img src=x onerror=alert(1)> & more.",
        (Table("Sums", columns, body),),
        (plot,),
        {"rows": len(rows)},
        {"a <b>": "<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>"},
    )
'''


@pytest.fixture
def mine(tmp_path: Path, drawn_once: None) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    (tmp_path / "beside.py").write_text("")
    return path


def run(*args: object) -> Result:
    return CliRunner().invoke(app, ["experiment", *map(str, args)])


def refused(result: Result) -> str:
    """The one line that says why."""
    assert result.exit_code == 2, result.stderr
    assert "Traceback" not in result.stderr
    line = result.stderr.strip().splitlines()[-1]
    assert line.startswith("gradtrace: ")
    return line


def table(folder: Path) -> dict[str, Any]:
    """What was found, without when and how long."""
    data = json.loads((folder / "mine" / "results.json").read_text())
    return {key: value for key, value in data.items() if key not in ("seconds", "date")}


def rows_in(folder: Path) -> int:
    files = (folder / "mine" / "rows").glob("*.jsonl")
    return sum(max(path.read_bytes().count(b"\n") - 1, 0) for path in files)


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are copies of this process: new ones would import torch, which takes seconds."""
    monkeypatch.setattr(pools, "get_context", lambda _: get_context("fork"))


_drawn: dict[str, bytes] = {}


@pytest.fixture
def drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures of the same numbers are the same: `test_plots_are_drawn`."""
    real = drawing.png

    def png(plot: Plot) -> bytes:
        key = repr(plot)
        if key not in _drawn:
            _drawn[key] = real(plot)
        return _drawn[key]

    monkeypatch.setattr(drawing, "png", png)


@pytest.fixture
def whole(mine: Path, tmp_path: Path) -> Path:
    """A run in one process, without a break."""
    out = tmp_path / "whole"
    assert run(mine, "--quick", "--out", out).exit_code == 0
    return out


# A run --------------------------------------------------------------------------------------------


def test_a_run_leaves_results_pictures_and_pages(whole: Path) -> None:
    folder = whole / "mine"
    names = {path.name for path in folder.iterdir()}
    files = {"results.json", "rows.jsonl.gz", "index.html", "sums.png", "a-b.svg"}
    assert names == {"rows", *files}
    assert (folder / "sums.png").read_bytes().startswith(b"\x89PNG")
    assert (whole / "index.html").exists()
    data = json.loads((folder / "results.json").read_text())
    assert data["facts"] == {"rows": 6} and data["cells"] == 6 and data["form"] == "quick"
    assert data["about"]["method"] == "Numbers are drawn and squared."
    assert data["machines"][0]["cores"] > 0 and data["versions"][0]["torch"] == torch.__version__


def test_results_are_on_stdout_and_all_else_is_not(mine: Path, tmp_path: Path) -> None:
    result = run(mine, "--quick", "--out", tmp_path / "o", "--json")
    data = json.loads(result.stdout)
    assert data["experiments"]["mine"]["facts"] == {"rows": 6} and data["failed"] == {}
    assert "this is none" in result.stderr
    result = run(mine, "--quick", "--out", tmp_path / "o")
    assert "6 sums" in result.stdout and "none" not in result.stdout
    assert "6 of 6 cells are there already" in result.stderr


def test_nothing_is_measured_twice(mine: Path, whole: Path) -> None:
    before = table(whole)
    files = sorted((whole / "mine" / "rows").iterdir())
    assert run(mine, "--quick", "--out", whole).exit_code == 0
    assert sorted((whole / "mine" / "rows").iterdir()) == files
    assert table(whole) == before


def test_more_seeds_go_on_from_fewer(mine: Path, whole: Path, tmp_path: Path) -> None:
    assert run(mine, "--quick", "--seeds", 3, "--out", whole).exit_code == 0
    assert rows_in(whole) == 18
    assert run(mine, "--quick", "--seeds", 3, "--out", tmp_path / "other").exit_code == 0
    assert table(whole) == table(tmp_path / "other")


def test_a_result_does_not_depend_on_the_process(mine: Path) -> None:
    """Nor on its threads, nor on numbers drawn before; and the caller's are left alone."""
    source = ExperimentSource.of(mine)
    cell = load(source).cells(load(source).QUICK, 1)[3]
    threads = torch.get_num_threads()
    first = measured(source, cell, print).result
    torch.rand(5)
    torch.set_num_threads(2)
    try:
        before = torch.get_rng_state()
        assert measured(source, cell, print).result == first
        assert torch.equal(torch.get_rng_state(), before)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


# Killed -------------------------------------------------------------------------------------------

HEARS = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore it
runpy.run_module("gradtrace", run_name="__main__", alter_sys=True)
"""


def started(*args: object, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", HEARS, "experiment", *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **env},
        start_new_session=True,
    )


def wait_for_rows(out: Path, rows: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + fresh.LONG
    while rows_in(out) < rows:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.02)


def alive(session: int) -> list[int]:
    """Processes of a session that still run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, of = path.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(of) == session and state != "Z":
            found.append(int(path.parent.name))
    return found


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.thorough), 2])
def test_killed_in_the_middle_it_goes_on_to_the_same_table(
    mine: Path, tmp_path: Path, workers: int
) -> None:
    out, whole = tmp_path / "killed", tmp_path / "whole"
    args = (mine, "--quick", "--set", "held=[2,3,4,5]", "--out")
    process = started(*args, out, "--workers", workers)
    wait_for_rows(out, 2, process)
    process.kill()  # -9
    process.wait()
    deadline = time.monotonic() + fresh.LONG / 4
    while alive(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = alive(process.pid)
    if left:
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert left == [], "workers outlive the run"
    assert rows_in(out) == 2
    (tmp_path / "gate").touch()
    result = run(*args, out)
    assert result.exit_code == 0, result.stderr
    assert "2 of 6 cells are there already" in result.stderr
    assert run(*args, whole).exit_code == 0
    assert table(out) == table(whole)


@pytest.mark.parametrize("workers", [1, 2])
def test_ctrl_c_stops_at_once_and_says_how_to_go_on(
    mine: Path, tmp_path: Path, workers: int
) -> None:
    out = tmp_path / "o"
    held = "held=[1,2,3,4,5]"  # for ever: it would not end by itself
    process = started(mine, "--quick", "--set", held, "--workers", workers, "--out", out)
    wait_for_rows(out, 1, process)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all of them
    _, told = process.communicate(timeout=fresh.LONG)
    assert process.returncode == 130, told
    assert "Traceback" not in told
    assert "the same command goes on from there" in told.splitlines()[-1]
    assert rows_in(out) == 1


# Code that was edited -----------------------------------------------------------------------------


EDITS: dict[str, tuple[str, str, bool] | None] = {
    "measure": ('return {"y": ', 'return {"y": 1 + ', True),
    "what measure uses": ("SIZE = 1000", "SIZE = 999", True),
    "a module beside it": None,
    "conclude": ('("k", "y", "loose"', '("k", "y", "more"', False),
    "a comment": ("# from the global", "# that comes from the global", False),
    "the docstring": ("squared.", "squared, each.", False),
}


@pytest.mark.parametrize("what", EDITS)
def test_rows_of_edited_code_are_measured_again(
    tmp_path: Path, drawn_once: None, what: str
) -> None:
    path, out = tmp_path / "mine.py", tmp_path / "o"
    text = MINE.replace("1000", "SIZE").replace("def measure", "SIZE = 1000\n\n\ndef measure")
    text = text.replace('["k"], "loose"', '["k"] + beside.more(), "loose"')
    helper = tmp_path / f"beside_{list(EDITS).index(what)}.py"
    text = text.replace("import beside", f"import {helper.stem} as beside")
    path.write_text(text)
    helper.write_text("def more():\n    return 0\n")
    args = (path, "--quick", "--out", out)
    assert run(*args).exit_code == 0
    before = table(out)
    edit = EDITS[what]
    if edit is None:
        # Of another size: Python keeps bytecode by size and second.
        helper.write_text("def more():\n    return 11\n")
        again = True
    else:
        assert edit[0] in text
        path.write_text(text.replace(edit[0], edit[1]))
        again = edit[2]
    result = run(*args)
    assert result.exit_code == 0, result.stderr
    assert ("6 cells are measured again, as the code" in result.stderr) == again
    assert ("6 of 6 cells are there already" in result.stderr) != again
    assert rows_in(out) == (12 if again else 6)  # the old ones are kept
    anew = run(path, "--quick", "--out", tmp_path / "fresh")
    assert anew.exit_code == 0
    assert table(out)["tables"] == table(tmp_path / "fresh")["tables"]
    assert (table(out)["tables"][0]["rows"] != before["tables"][0]["rows"]) == again
    path.write_text(text)  # as it was: so are its rows
    helper.write_text("def more():\n    return 0\n")
    assert "6 of 6 cells are there already" in run(*args).stderr
    assert table(out) == before


# The journal --------------------------------------------------------------------------------------


HEADER = {"experiment": "x", "form": "quick", "settings": {"n": 3}, "files": {}}


def test_rows_come_back(tmp_path: Path) -> None:
    one, two = (Journal(tmp_path, HEADER) for _ in range(2))
    one.append({"b": 1, "a": [2]}, JournalEntry({"y": 0.1}, 1.5))
    two.append({"b": 2, "a": [2]}, JournalEntry({"y": float("inf")}, 2.5))
    one.append({"b": 3, "a": []}, JournalEntry({}, 0.0))
    found, headers = two.read()
    assert found[journal.key({"a": [2], "b": 1})] == JournalEntry({"y": 0.1}, 1.5)
    assert found[journal.key({"a": [2], "b": 2})].result["y"] == float("inf")
    assert len(found) == 3 and len(headers) == 2 and len(list(one.rows.iterdir())) == 2


@pytest.mark.parametrize("left", range(1, 60, 7))
def test_a_torn_last_line_is_no_row(tmp_path: Path, left: int) -> None:
    written = Journal(tmp_path, HEADER)
    for k in range(2):
        written.append({"k": k}, JournalEntry({"y": k}, 0.0))
    (path,) = written.rows.iterdir()
    content = path.read_bytes()
    path.write_bytes(content[:-left])
    found, _ = Journal(tmp_path, HEADER).read()
    assert list(found) == ['{"k": 0}'] if left < 45 else len(found) <= 1
    again = Journal(tmp_path, HEADER)
    again.append({"k": 1}, JournalEntry({"y": 1}, 0.0))
    assert journal.key({"k": 1}) in again.read()[0]


def test_a_torn_header_is_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "1-a.jsonl").write_bytes(b'{"schema": 1, "exp')
    assert Journal(tmp_path, HEADER).read() == ({}, [])


@pytest.mark.parametrize("line", [b"{not json}", b"[1]", b'{"cell": {}}', b"\xff\xfe"])
def test_damage_in_the_middle_is_told_with_its_line(tmp_path: Path, line: bytes) -> None:
    written = Journal(tmp_path, HEADER)
    written.append({"k": 1}, JournalEntry({}, 0.0))
    (path,) = written.rows.iterdir()
    path.write_bytes(path.read_bytes() + line + b"\n")
    with pytest.raises(GradtraceError, match=r"line 3 is damaged .*; delete that line"):
        Journal(tmp_path, HEADER).read()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"settings": {"n": 4}}, "n 3, not 4"),
        ({"settings": {"n": 3, "m": 1}}, "m null, not 1"),
        ({"form": "full"}, 'form "quick", not "full"'),
        ({"experiment": "y"}, 'experiment "x", not "y"'),
        ({"files": {"text": "abc"}}, 'text null, not "abc"'),
    ],
)
def test_rows_of_other_settings_are_refused(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    Journal(tmp_path, HEADER).append({"k": 1}, JournalEntry({}, 0.0))
    with pytest.raises(OtherSettings, match=re.escape(words)) as error:
        Journal(tmp_path, HEADER | change).read()
    assert "--restart" in str(error.value) and "--out" in str(error.value)


def test_other_versions_may_go_on_and_are_told(tmp_path: Path) -> None:
    for torch_version in ("1", "2"):
        Journal(tmp_path, HEADER | {"versions": {"torch": torch_version}}).append(
            {"k": torch_version}, JournalEntry({}, 0.0)
        )
    found, headers = Journal(tmp_path, HEADER).read()
    assert len(found) == 2 and {h["versions"]["torch"] for h in headers} == {"1", "2"}


def test_another_schema_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "1-a.jsonl").write_text('{"schema": 99}\n')
    with pytest.raises(GradtraceError, match="schema 99, not 1"):
        Journal(tmp_path, HEADER).read()


def test_settings_of_the_command_are_refused_or_set_aside(mine: Path, whole: Path) -> None:
    before = rows_in(whole)
    line = refused(run(mine, "--quick", "--set", "n=3", "--out", whole))
    assert "n 6, not 3" in line and "--restart" in line
    assert rows_in(whole) == before
    for number in (1, 2):
        result = run(mine, "--quick", "--set", "n=3", "--out", whole, "--restart")
        assert result.exit_code == 0 and rows_in(whole) == 3
        assert (whole / "mine" / f"rows.{number}").is_dir(), "nothing is ever lost"


def test_a_text_is_known_by_what_is_in_it(mine: Path, tmp_path: Path) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "o"
    text.write_text("one")
    assert run(mine, "--quick", "--text", text, "--out", out).exit_code == 0
    text.write_text("two")
    assert "rows of other settings" in refused(run(mine, "--quick", "--text", text, "--out", out))


def test_a_full_disk_is_told_and_rows_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = Journal(tmp_path, HEADER)
    written.append({"k": 0}, JournalEntry({}, 0.0))

    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(GradtraceError, match="No space left on device; the rows written"):
            written.append({"k": 1}, JournalEntry({}, 0.0))
    assert journal.key({"k": 0}) in written.read()[0]
    written.append({"k": 2}, JournalEntry({}, 0.0))
    assert {journal.key({"k": 0}), journal.key({"k": 2})} <= set(written.read()[0])


def test_a_file_system_without_fsync_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(file: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", unknown)
    written = Journal(tmp_path, HEADER)
    written.append({"k": 0}, JournalEntry({}, 0.0))
    assert len(written.read()[0]) == 1


def test_a_folder_that_cannot_be_written_is_told(mine: Path, tmp_path: Path) -> None:
    (tmp_path / "o").write_text("a file where the folder should be")
    line = refused(run(mine, "--quick", "--out", tmp_path / "o"))
    assert "cannot" in line and "--out" in line


# Many processes -----------------------------------------------------------------------------------


def test_workers_give_the_same_table(mine: Path, whole: Path, tmp_path: Path) -> None:
    result = run(mine, "--quick", "--workers", 2, "--out", tmp_path / "two")
    assert result.exit_code == 0, result.stderr
    assert table(tmp_path / "two") == table(whole)


RANKS = {"two": (), "broken": ("--set", "broken=[1]")}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, launch.Ended]:
    """What two processes left that are started as torchrun does: a run, and one that fails."""
    asked = {}
    for name, more in RANKS.items():
        folder = tmp_path_factory.mktemp(name)
        (folder / "mine.py").write_text(MINE)
        (folder / "beside.py").write_text("")
        words = ["experiment", str(folder / "mine.py"), "--quick", *more, "--out", f"{folder}/o"]
        asked[name] = launch.Group(json.dumps(words), 2, folder)
    return dict(zip(asked, launch.started("ranks", *asked.values())))


def test_two_ranks_give_the_same_table(ranks: dict[str, launch.Ended], whole: Path) -> None:
    found = ranks["two"]
    assert found.codes == [0, 0], found.printed
    assert "6 sums" in found.out(0) and found.out(1) == ""
    assert len(list((found.folder / "o" / "mine" / "rows").iterdir())) == 2
    assert table(found.folder / "o") == table(whole)


@pytest.mark.thorough
def test_torchrun_gives_the_same_table(mine: Path, whole: Path, tmp_path: Path) -> None:
    """The command itself, which sets up its ranks in its own way."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*torchrun, "-m", "gradtrace", "experiment", mine, "--quick"]
    done = subprocess.run(
        [*command, "--out", tmp_path / "two"], capture_output=True, text=True, timeout=fresh.LONG
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("6 sums") == 1
    assert len(list((tmp_path / "two" / "mine" / "rows").iterdir())) == 2
    assert table(tmp_path / "two") == table(whole)


def test_a_rank_that_fails_fails_the_run_and_is_named(ranks: dict[str, launch.Ended]) -> None:
    found = ranks["broken"]
    for rank in range(2):
        assert found.codes[rank] == 2 and found.out(rank) == ""
        last = found.err(rank).strip().splitlines()[-1]
        assert "rank 1: " in last and "broken on purpose" in last


def test_a_rank_by_itself_is_told_what_is_missing(
    mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert "start with torchrun" in refused(run(mine, "--quick", "--out", tmp_path))


def test_what_measures_time_runs_alone(mine: Path, tmp_path: Path) -> None:
    mine.write_text(MINE.replace("TIMED = False", "TIMED = True"))
    result = run(mine, "--quick", "--workers", 2, "--out", tmp_path / "o")
    assert result.exit_code == 0 and "one process does all" in result.stderr
    assert len(list((tmp_path / "o" / "mine" / "rows").iterdir())) == 1


def test_ray_is_asked_for_where_it_is_missing(
    mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "ray" else find(name, *rest),
    )
    line = refused(run(mine, "--quick", "--ray", "--out", tmp_path / "o"))
    assert "--ray needs ray, which is not installed: pip install ray" in line


class Ray:
    """A cluster in this process, as far as it is used."""

    class exceptions:
        class RayError(Exception): ...

    def __init__(self) -> None:
        self.on = False
        self.lost: list[int] = []

    def is_initialized(self) -> bool:
        return self.on

    def init(self, **options: Any) -> None:
        self.on = True

    def shutdown(self) -> None:
        self.on = False

    def remote(self, **options: Any) -> Any:
        def wrapped(function: Any) -> Any:
            class Task:
                @staticmethod
                def remote(*args: Any) -> Any:
                    return lambda: function(*args), args[1]["k"]

            return Task

        return wrapped

    def wait(self, pending: list[Any]) -> tuple[list[Any], list[Any]]:
        return pending[-1:], pending[:-1]

    def get(self, reference: Any) -> Any:
        if reference[1] in self.lost:
            raise self.exceptions.RayError("the worker died")
        return reference[0]()


def test_ray_gives_the_same_table(
    mine: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Ray()
    monkeypatch.setattr(pools, "needs_ray", lambda: cluster)
    result = run(mine, "--quick", "--ray", "--out", tmp_path / "ray")
    assert result.exit_code == 0, result.stderr
    assert table(tmp_path / "ray") == table(whole) and not cluster.on


def test_a_lost_task_of_ray_is_told(
    mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Ray()
    cluster.lost = [2]
    monkeypatch.setattr(pools, "needs_ray", lambda: cluster)
    line = refused(run(mine, "--quick", "--ray", "--out", tmp_path / "ray"))
    assert "the worker died" in line and rows_in(tmp_path / "ray") == 5


# What goes wrong ----------------------------------------------------------------------------------


def test_a_cell_that_fails_leaves_the_others_their_rows(mine: Path, tmp_path: Path) -> None:
    out = tmp_path / "o"
    line = refused(run(mine, "--quick", "--set", "broken=[2]", "--out", out))
    assert 'cell {"broken": [2], "held": [], "k": 2' in line and "mine.py, line" in line
    assert "ValueError: broken on purpose" in line and rows_in(out) == 5


@pytest.mark.usefixtures("forked")
def test_of_workers_too(mine: Path, tmp_path: Path) -> None:
    out = tmp_path / "o"
    line = refused(run(mine, "--quick", "--set", "broken=[2]", "--workers", 2, "--out", out))
    assert "ValueError: broken on purpose" in line and rows_in(out) == 5


def test_a_run_that_always_fails_is_given_up(mine: Path, tmp_path: Path) -> None:
    result = run(mine, "--quick", "--set", "broken=[0,1,2,3,4,5]", "--out", tmp_path / "o")
    assert "3 cells failed" in refused(result)


@pytest.mark.usefixtures("forked")
def test_a_worker_that_dies_is_told(mine: Path, tmp_path: Path) -> None:
    mine.write_text(MINE.replace("    drawn =", "    import os; os._exit(9)\n    drawn ="))
    line = refused(run(mine, "--quick", "--workers", 2, "--out", tmp_path / "o"))
    assert "a worker process was killed" in line and "fewer --workers" in line


WRONG = {
    "no docstring": ('"""Question: Is', '"""Is', "Question: is missing"),
    "no method": ("Method: ", "", "Method: is missing"),
    "no name": ("TIMED = False", "", "it needs TIMED"),
    "no function": ("def conclude", "def concluded", "it needs conclude"),
    "syntax": ("TIMED = False", "TIMED =", "SyntaxError"),
    "import": ("import beside", "import missing_beside", "ModuleNotFoundError"),
    "cells": ("return [{", "return 1 / 0 or [{", "mine.py, line"),
    "no cells": ("for s in range(seeds)", "for s in range(0)", "nothing to measure"),
    "cells twice": ('"seed": s', '"seed": 0, **{}', "there twice"),
    "cells no JSON": ('"seed": s', '"seed": {1}', "a cell is not JSON"),
    "result no JSON": ('"pair": (1, 2)', '"pair": {1}', "the result is not JSON"),
    "conclude": ("rows = sorted(", "rows = 1 / 0 or sorted(", "ZeroDivisionError"),
    "table": ('"|x|") for r', '"|x|", 5) for r', "4 columns, but a row of 5"),
    "series": ("x, [r.result", "x[1:], [r.result", "the series 'y' has"),
    "facts": ('{"rows": len(rows)}', '{"rows": {1}}', "not JSON"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_module_that_is_wrong_is_told_what_is(mine: Path, tmp_path: Path, case: str) -> None:
    old, new, words = WRONG[case]
    assert old in MINE
    mine.write_text(MINE.replace(old, new, 1))
    assert words in refused(run(mine, "--quick", "--seeds", 2, "--out", tmp_path / "o"))


ASKED = {
    "nothing": ([], "give the name of an experiment"),
    "both": (["layers", "--all"], "give the name of an experiment"),
    "close": (["layer"], "did you mean layers?"),
    "unknown": (["qqqq"], "there is no experiment 'qqqq'; there are layers"),
    "no file": (["none.py"], "there is no file 'none.py'"),
    "no setting": (["layers", "--set", "round=3"], "did you mean rounds?"),
    "no value": (["layers", "--set", "rounds"], "write --set key=value"),
    "no number": (["layers", "--set", "rounds=x"], "rounds is a number"),
    "no text": (["layers", "--text", __file__], "layers takes no --text"),
    "no such text": (["layers", "--text", "none.txt"], "there is no text 'none.txt'"),
}


@pytest.mark.parametrize("case", ASKED)
def test_what_was_typed_wrong_is_told(case: str) -> None:
    args, words = ASKED[case]
    assert words in refused(run(*args))


@pytest.mark.parametrize("option", ["--seeds", "--workers"])
def test_numbers_are_positive(option: str) -> None:
    assert run("layers", option, 0).exit_code == 2


# The table of experiments -------------------------------------------------------------------------


def test_every_experiment_that_is_listed_is_there() -> None:
    missing = set(EXPERIMENTS) - set(available())
    assert missing == set()


@pytest.mark.parametrize("name", available())
def test_an_experiment_is_well_formed(name: str) -> None:
    """Equal arguments give equal cells, which are JSON and all different, in both forms."""
    experiment = load(ExperimentSource(name, EXPERIMENTS[name]))
    for settings in (experiment.QUICK, experiment.FULL):
        copy = json.loads(json.dumps(dict(settings)))
        first, again = experiment.cells(copy, 2), experiment.cells(copy, 2)
        assert first == again
        keys = [journal.key(cell) for cell in first]
        assert keys and len(set(keys)) == len(keys)
    assert experiment.SEEDS.quick >= 1 and experiment.SEEDS.full >= experiment.SEEDS.quick


def test_the_list_has_names_and_questions() -> None:
    result = run("--list")
    assert result.exit_code == 0
    found = json.loads(run("--list", "--json").stdout)["experiments"]
    assert [one["name"] for one in found] == list(available())
    assert all(one["question"].endswith("?") and one["name"] in result.stdout for one in found)


def test_all_go_on_when_one_fails(
    mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = tmp_path / "wrong.py"
    wrong.write_text(MINE.replace("rows = sorted(", "rows = 1 / 0 or sorted("))
    places = {"mine": str(mine), "wrong": str(wrong), "more": str(mine)}
    monkeypatch.setattr("gradtrace.experiments.harness.command.available", lambda: places)
    result = run("--all", "--quick", "--out", tmp_path / "o", "--json")
    assert result.exit_code == 1
    data = json.loads(result.stdout)
    assert list(data["experiments"]) == ["mine", "more"] and list(data["failed"]) == ["wrong"]
    assert "wrong FAILED: wrong.py, line" in result.stderr
    page = (tmp_path / "o" / "index.html").read_text()
    assert 'href="#mine"' in page and 'id="more"' in page


# Pages --------------------------------------------------------------------------------------------


class Reader(HTMLParser):
    """All tags with their attributes, and all text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.sources: list[str] = []
        self.stack: list[str] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.sources += [value or "" for name, value in attrs if name in ("src", "href")]
        assert not any(name.startswith("on") for name, _ in attrs)
        if tag not in ("meta", "img", "link", "br"):
            self.stack.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize("name", ["mine/index.html", "index.html"])
def test_a_page_needs_nothing_else_and_escapes_everything(whole: Path, name: str) -> None:
    found = Reader((whole / name).read_text(encoding="utf-8"))
    assert found.stack == [] and found.tags.count("img") == 2
    assert not {"script", "b", "i", "iframe", "link"} & set(found.tags)
    assert all(source.startswith(("data:image/", "#")) for source in found.sources)
    for words in (
        "Is the sum <b>right</b>?",
        "a & b",
        "<img src=x onerror=alert(1)> & more",
        "<script>alert(1)</script>",
        "6 cells",
        f"torch {torch.__version__}",
    ):
        assert words in found.text


def test_the_same_on_other_data_has_a_page_of_its_own(
    mine: Path, whole: Path, tmp_path: Path
) -> None:
    docs, words = tmp_path / "docs", tmp_path / "words of mine.txt"
    words.write_text("a b c")
    assert run(mine, "--quick", "--out", whole, "--docs", docs).exit_code == 0
    before = {path.name: path.read_bytes() for path in docs.glob("*.*")}
    other = ("--set", "n=7", "--seeds", 2, "--text", words, "--name", "mine-other")
    result = run(mine, "--quick", *other, "--out", whole, "--docs", docs)
    assert result.exit_code == 0, result.stderr
    assert "mine-other: 14 sums" in result.stdout
    assert rows_in(whole) == 6  # and these of the other lie beside them
    after = {path.name: path.read_bytes() for path in docs.glob("*.*")}
    for name in before.keys() - {"index.md"}:
        assert after[name] == before[name]
    assert {"mine-other.md", "mine-other.json", "mine-other-sums.png"} <= after.keys()
    index = after["index.md"].decode()
    assert index.index("[mine](mine.md): 6 sums") < index.index("[mine-other](mine-other.md): 14")
    page = after["mine-other.md"].decode()
    assert page.startswith("# mine-other\n")
    data = json.loads(after["mine-other.json"])
    assert data["experiment"] == "mine"
    assert data["command"] == (
        f"gradtrace experiment mine.py --quick --seeds 2 --set n=7 --text '{words}' "
        "--name mine-other"
    )
    assert f"`{data['command']}`" in page
    assert 'id="mine-other"' in (whole / "index.html").read_text()


@pytest.mark.usefixtures("forked")
def test_a_page_tells_the_command_that_made_it(mine: Path, whole: Path, tmp_path: Path) -> None:
    """All that changes the numbers, and nothing of this machine."""
    plain = json.loads((whole / "mine" / "results.json").read_text())
    assert plain["command"] == "gradtrace experiment mine.py --quick"
    told = run(
        mine, "--set", "n=3", "--set", "held=[]", "--workers", 2, "--out", tmp_path / "o", "--json"
    )
    data = json.loads(told.stdout)["experiments"]["mine"]
    assert data["command"] == "gradtrace experiment mine.py --set n=3"
    older = {key: value for key, value in plain.items() if key not in ("command", "name")}
    assert "Written by `gradtrace experiment mine --quick`" in page.markdown(older, {})


@pytest.mark.parametrize("name", ["../x", "", "a b", "Ä", "-x", "a" * 81, "layers"])
def test_a_name_that_is_no_name_is_refused(mine: Path, tmp_path: Path, name: str) -> None:
    line = refused(run(mine, "--quick", f"--name={name}", "--out", tmp_path / "o"))
    assert "--name" in line and not (tmp_path / "o").exists()


def test_a_name_is_of_one_experiment(tmp_path: Path) -> None:
    line = refused(run("--all", "--quick", "--name", "x", "--out", tmp_path / "o"))
    assert "--name is of one experiment" in line


def test_markdown_for_the_docs(mine: Path, whole: Path, tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    assert run(mine, "--quick", "--out", whole, "--docs", docs).exit_code == 0
    names = {path.relative_to(docs).as_posix() for path in docs.rglob("*.*")}
    files = {"mine.md", "mine.json", "mine.rows.jsonl.gz", "mine-sums.png", "mine-a-b.svg"}
    assert names == {"index.md", "more/mine.md", *files}
    text = (docs / "mine.md").read_text()
    assert "\\<script\\>" in text and "<script>" not in text and r"\|x\|" in text
    assert "![Sums of $x$ \\<i\\>](mine-sums.png)" in text and "`a & b`" in text
    assert "- [mine](mine.md): 6 sums" in (docs / "index.md").read_text()
    assert "\n- More: [its other figures and tables](more/mine.md)\n" in text
    rest = (docs / "more" / "mine.md").read_text()
    assert "What [mine](../mine.md) has no room for." in rest and "](../mine-a-b.svg)" in rest
    bare = json.loads((docs / "mine.json").read_text()) | {"drawings": {}}
    assert page.more(bare, {}) == "" and "- More: " not in page.markdown(bare, {})


HOSTILE = ("$x", "_hidden", "a$b$c", "<b>", "\\frac{", "名前", "")


@pytest.mark.parametrize("style", ["line", "points", "bars", "dashed"])
@pytest.mark.parametrize("log", [False, True])
def test_plots_are_drawn(style: str, log: bool) -> None:
    number = [0.5, 2.0, 8.0]
    series = tuple(
        Series(label, [1, 2, 4], number, [y / 2 for y in number], [2 * y for y in number], style)
        for label in HOSTILE
    )
    plot = Plot("p", "A $title", "x_$", "^y", series, log_x=log, log_y=log)
    drawn = drawing.png(plot)
    assert drawn.startswith(b"\x89PNG")
    assert drawing.png(plot) == drawn


@pytest.mark.parametrize("style", ["line", "points", "bars", "dashed"])
def test_texts_are_categories(style: str) -> None:
    long = [f"a long name of a task, number {k}" for k in range(8)]
    values = [float("nan"), 0.0, -1.0, *map(float, range(5))]
    one = Series("one", long, values, style=style)
    some = Series("some", long[3:5], [1.0, 2.0], [0.5, 2.5], [1.5, 1.0], style)
    assert drawing.png(Plot("p", "t", "x", "y", (one, some), log_y=True)).startswith(b"\x89PNG")


def test_what_cannot_be_drawn_to_scale_is_drawn_without() -> None:
    nothing = Series("zeros", [0, -1], [0.0, float("inf")])
    bars = Series("bars", ["a", "b"], [float("inf"), 1.0], style="bars")
    for series in ((nothing,), (bars,), (Series("empty", [], []),), ()):
        plot = Plot("p", "t", "x", "y", series, log_x=True, log_y=True)
        assert drawing.png(plot).startswith(b"\x89PNG")


def test_without_matplotlib_there_are_no_figures_and_it_is_told(
    mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "o"
    with monkeypatch.context() as patch:
        patch.setattr(drawing, "possible", lambda: False)
        result = run(mine, "--quick", "--out", out)
    assert result.exit_code == 0 and "LEFT OUT: figures" in result.stderr
    assert "not drawn" in (out / "mine" / "index.html").read_text()
    assert run(mine, "--quick", "--out", out).exit_code == 0
    assert (out / "mine" / "sums.png").exists(), "drawn later, from the same rows"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *(
            (None, "–"),
            (float("nan"), "–"),
            (True, "yes"),
            (12345, "12,345"),
            (0.012345, "0.01235"),
        ),
        *((123456.7, "123,457"), (1e-9, "1e-09"), (2.0, "2"), ("a", "a"), (float("inf"), "–")),
    ],
)
def test_cells_are_written(value: Any, text: str) -> None:
    assert results.told(value) == text


def test_numbers_that_json_does_not_know_are_null() -> None:
    nan = float("nan")
    findings = Findings("s", (Table("t", ("a",), ((nan,),)),), (), {"x": [nan, 1.0], 3: (1,)})
    data = results.found(findings, "x")
    assert data["tables"][0]["rows"] == [[None]] and data["facts"] == {"x": [None, 1.0], "3": [1]}
    json.loads(results.text(data), parse_constant=lambda name: pytest.fail(name))


def test_names_are_parts_of_paths() -> None:
    assert publishing.file_name("../../A b/c.png") == "a-b-c-png"
    assert publishing.file_name("..") == "plot"


def test_files_are_written_whole_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "page"
    results.write(path, "before")

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(GradtraceError, match="No space left on device"):
            results.write(path, "after")
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]


def test_failed_cells_are_of_the_family() -> None:
    assert issubclass(Failed, GradtraceError) and page.anchor({"experiment": "a b<"}) == "a-b-"


def test_a_series_that_is_like_another_has_its_colour() -> None:
    one, theory, two = Series("a", [1], [1]), Series("b", [1], [1], like="a"), Series("c", [1], [1])
    plot = Plot("name", "title", "x", "y", (one, theory, two, Series("d", [1], [1], like="none")))
    colours = [drawing._colour(plot, k) for k in range(4)]
    assert colours[0] == colours[1] and len(set(colours)) == 3


def test_each_experiment_is_tried_on_degenerate_measurements() -> None:
    """A verdict on memory crashed where all cells took as much: no experiment goes untried."""
    tried = set()
    for path in (Path(__file__).parents[1] / "experiments").glob("test_*.py"):
        text = path.read_text(encoding="utf-8")
        other = dict(re.findall(r"import (\w+) as (\w+)", text))
        names = {alias: name for name, alias in other.items()}
        tried |= {names.get(it, it) for it in re.findall(r"degenerate\.concludes\((\w+)", text)}
    assert tried == {place.rpartition(".")[2] for place in EXPERIMENTS.values()}
