"""The append-only file of a run: exact, resumable, readable while it grows, hard to break."""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import fresh
import pytest
import torch
from gradtrace.report.tuning import MAX_SHARES
from gradtrace.runs import history
from gradtrace.runs.history import Norms, StepRecord
from gradtrace.runs.writer import Writer
from gradtrace.training.step_tracer import StepTracer
from torch import nn

import gradtrace as gt
from gradtrace.errors import GradtraceError
from gradtrace.report.training import timing, training
from gradtrace.traced import Trace
from gradtrace.tracing.influence import Influence, Moments, Row
from gradtrace.training import run_report

HOSTILE = ["</script><b>", 'a"b\\', "\u202eright", "🙂", "x" * 10_000, "\ud800", "\x00\n"]


def table(*names: str, pairs: int = 1) -> Influence:
    count = Moments.over([3.0] * pairs, [4.0] * pairs)
    gradient = Moments.over([0.1 + n for n in range(pairs)], [0.3 + n for n in range(pairs)])
    rows = tuple(Row(name, 5, 1, count, gradient) for name in names)
    return Influence(rows, pairs, notes=("paths of 4 elements",))


def record(step: int, *names: str, **more: Any) -> StepRecord:
    return StepRecord(step, 0.5 / (step + 1), table(*(names or ("a", "b"))), share=0.01, **more)


def run(path: Path, steps: int = 3) -> Path:
    writer = Writer(path, {"rule": "greedy"})
    for step in range(steps):
        writer.record(record(step))
        writer.times(step, [0.25])
    writer.end(steps)
    writer.close()
    return path


# What is written is what is read ------------------------------------------------------------------


def test_records_come_back_exactly(tmp_path: Path) -> None:
    odd = Moments(Fraction(1, 3), Fraction(2, 3), Fraction(1, 9), Fraction(2, 9), Fraction(4, 9))
    records = [
        record(0, norms={"a": Norms(1.5, 0.1), "": Norms(1.0, None)}, verdict="fine", scale=1024.0),
        StepRecord(7, math.nan, None, notes=("the gradient of a is not finite",)),
        StepRecord(8, math.inf, table("a", "c", pairs=3), seconds=0.1 + 0.2, share=math.nan),
        StepRecord(
            9, -1.0, Influence((Row("c", 0, 0, odd, odd),), weight="gradient", rule="viterbi")
        ),
        StepRecord(10, 0.0, Influence(())),
    ]
    writer = Writer(tmp_path / "run.jsonl", {"rule": "greedy"})
    for each in records:
        writer.record(each)
    writer.times(0, [0.1, None, 0.3])
    found = history.read(tmp_path / "run.jsonl")
    assert [str(a) for a in found.records] == [str(b) for b in records]  # NaN is not itself
    assert found.influences == tuple(each.influence for each in records)
    assert (found.timed, found.seconds) == ((0, 2), (0.1, 0.3))
    assert found.running and math.isnan(found.cost)
    assert found.components == ("a", "b", "c")
    writer.end(11)
    assert not history.read(tmp_path / "run.jsonl").running
    writer.close()


def test_what_is_in_series_comes_back(tmp_path: Path) -> None:
    path, marks = tmp_path / "run.jsonl", ([True, False, None], [True, True, None], [True] * 3)
    tables = []
    writer = Writer(path, {})
    for step, alternatives in enumerate((*marks, marks[-1])):
        rows = zip(table("a", "b", "c"), alternatives)
        rows_marked = tuple(replace(row, alternative=mark) for row, mark in rows)
        tables.append(Influence(rows_marked, kind="labels"))
        writer.record(StepRecord(step, 1.0, tables[-1]))
    writer.close()
    found = history.read(path).influences
    assert [[row.alternative for row in each] for each in found] == [*marks, marks[-1]]
    assert [str(each) for each in found] == [str(each) for each in tables]
    assert "in series" in str(found[0]) and "in series" not in str(found[1])
    assert found[0].choices().rows == tables[0].choices().rows
    assert path.read_text().count('"kind":"names"') == 3
    older = [json.loads(line) for line in path.read_text().splitlines()]
    for line in older:
        line.pop("alternative", None), line.pop("components", None)
    path.write_text("".join(json.dumps(line) + "\n" for line in older))
    plain = history.read(path).influences
    assert plain == found and [row.alternative for row in plain[0]] == [None] * 3


def test_a_monitored_run_knows_what_is_in_series(tmp_path: Path) -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.branch, self.last = (nn.Linear(3, 3) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            return self.last(x + self.branch(x)).sum()

    model = Residual()
    with gt.Monitor(model, every=1, budget=None, file=tmp_path / "run.jsonl") as monitor:
        monitor.step(model(torch.ones(2, 3)))
    (found,) = history.read(tmp_path / "run.jsonl").influences
    marks = {row.name: row.alternative for row in found}
    assert marks["branch"] is True and marks["last"] is False
    assert str(found).count("in series") == 2  # the row and its note


def test_a_line_is_small(tmp_path: Path) -> None:
    names = [f"encoder.layer.{n}.attention" for n in range(100)]
    writer = Writer(tmp_path / "run.jsonl", {})
    writer.record(record(0, *names))
    before = (tmp_path / "run.jsonl").stat().st_size
    writer.record(record(1, *names))
    assert (tmp_path / "run.jsonl").stat().st_size - before < 100 * 60
    writer.close()


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names(tmp_path: Path, name: str) -> None:
    writer = Writer(tmp_path / "run.jsonl", {"model": name})
    writer.record(record(0, name, norms={name: Norms(1.0, 2.0)}, verdict=name))
    writer.close()
    found = history.read(tmp_path / "run.jsonl")
    assert found.components == (name,) and found.records[0].norms == {name: Norms(1.0, 2.0)}
    assert b"</script>" not in (tmp_path / "run.jsonl").read_bytes() or "script" in name


def test_in_memory() -> None:
    writer = Writer(None, {})
    writer.record(record(0))
    writer.end(1)
    assert writer.read().records == (record(0),) and not writer.read().running


# Going on -----------------------------------------------------------------------------------------


def test_a_run_goes_on(tmp_path: Path) -> None:
    path = run(tmp_path / "run.jsonl")
    before = path.read_bytes()
    writer = Writer(path, {"rule": "greedy"})
    assert writer.first == 3
    assert history.read(path).running
    writer.record(record(3))
    writer.close()
    assert path.read_bytes().startswith(before)
    assert history.read(path).steps == (0, 1, 2, 3)
    assert repr(history.read(path)) == "History(4 traced steps of 4, running)"


def test_steps_go_on_where_the_end_mark_says(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "run.jsonl", {})
    writer.record(record(0))
    writer.end(50)
    writer.close()
    writer = Writer(tmp_path / "run.jsonl", {})
    assert writer.first == 50
    writer.close()
    assert history.read(tmp_path / "run.jsonl").running


def test_a_run_that_goes_back(tmp_path: Path) -> None:
    path = run(tmp_path / "run.jsonl")
    writer = Writer(path, {"rule": "greedy"}, start=1)
    assert writer.first == 1
    writer.record(record(2, "other"))
    writer.close()
    found = history.read(path)
    assert found.steps == (0, 2) and found.timed == (0,)
    assert found.components == ("a", "b", "other")
    assert "2 traced steps from before are left out" in found.notes[0]


def test_another_question_is_refused(tmp_path: Path) -> None:
    path = run(tmp_path / "run.jsonl")
    before = path.read_bytes()
    with pytest.raises(GradtraceError, match="a run of another rule"):
        Writer(path, {"rule": "viterbi"})
    assert path.read_bytes() == before


def test_two_runs_at_a_time_are_refused(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "run.jsonl", {})
    with pytest.raises(GradtraceError, match="another run"):
        Writer(tmp_path / "run.jsonl", {})
    writer.close()
    Writer(tmp_path / "run.jsonl", {}).close()


# Damage -------------------------------------------------------------------------------------------


def test_every_cut_of_a_file_is_read_or_told(tmp_path: Path) -> None:
    whole = run(tmp_path / "run.jsonl").read_bytes()
    header = whole.index(b"\n") + 1
    for cut in range(0, len(whole), 7):
        if cut < header:
            with pytest.raises(GradtraceError, match="empty"):
                history.parse(whole[:cut], "it")
        else:
            found = history.parse(whole[:cut], "it")
            assert found.running and len(found) <= 3
            assert bool(found.notes) == (whole[cut - 1 : cut] != b"\n")


def test_a_torn_line_stays_where_it_is(tmp_path: Path) -> None:
    path = run(tmp_path / "run.jsonl")
    lines = path.read_bytes().splitlines(keepends=True)
    torn = b"".join(lines[:-3]) + lines[-3][:40]
    path.write_bytes(torn)
    writer = Writer(path, {"rule": "greedy"})
    assert writer.first == 2
    writer.record(record(2))
    writer.close()
    assert path.read_bytes().startswith(torn)
    found = history.read(path)
    assert found.steps == (0, 1, 2) and "line 7 was cut short" in found.notes[0]


def test_a_torn_header(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(b'{"kind": "ru')
    writer = Writer(path, {})
    writer.record(record(0))
    writer.close()
    assert history.read(path).steps == (0,)


def test_a_damaged_line_is_told_with_its_number(tmp_path: Path) -> None:
    path = run(tmp_path / "run.jsonl")
    lines = path.read_bytes().splitlines(keepends=True)
    lines[4] = lines[4][:20] + b"#" + lines[4][21:]
    path.write_bytes(b"".join(lines))
    with pytest.raises(GradtraceError, match=r"damaged in line 5; delete that line"):
        history.read(path)
    del lines[4]
    path.write_bytes(b"".join(lines))
    assert history.read(path).steps == (0, 2)


@pytest.mark.parametrize(
    "line",
    [
        {"kind": "strange"},
        {"kind": "step", "step": 3},
        {"kind": "step", "step": 3, "loss": [], "verdict": "", "norms": {}},
        {"kind": "times", "step": "x", "seconds": [1]},
        {"kind": "run", "schema_version": 1},
        {"kind": "take"},
        {"kind": "names", "names": ["a", "b"], "alternative": [True]},
        {"kind": "names", "names": ["a"], "alternative": [1]},
        {"kind": "names", "names": ["a"], "components": 3},
        {"kind": "_init__"},
    ],
)
def test_lines_that_make_no_sense(tmp_path: Path, line: dict[str, Any]) -> None:
    path = run(tmp_path / "run.jsonl")
    with open(path, "a") as file:
        file.write(json.dumps(line) + "\n")
    with pytest.raises(GradtraceError, match="damaged in line 10"):
        history.read(path)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "empty"),
        (b"\n\n", "empty"),
        (b"hello\n", "line 1"),
        (b'{"kind": "step"}\n', "does not begin"),
        (b'{"kind": "run", "schema_version": 99}\n', "another version"),
        (b"[" * 100_000 + b"\n", "line 1"),
        (b"\xff\xfe\n", "line 1"),
    ],
)
def test_other_files(content: bytes, told: str) -> None:
    with pytest.raises(GradtraceError, match=told):
        history.parse(content, "it")


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(GradtraceError, match="does not exist"):
        history.read(tmp_path / "none.jsonl")
    with pytest.raises(GradtraceError, match="cannot be written"):
        Writer(tmp_path / "no folder" / "run.jsonl", {})


class Full:
    """A disk with so many bytes left."""

    def __init__(self, file: Any, room: int) -> None:
        self.file, self.room = file, room

    def write(self, data: bytes) -> int:
        if self.room <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done = int(self.file.write(data[: self.room]))
        self.room -= done
        return done

    def fileno(self) -> int:
        return int(self.file.fileno())

    def close(self) -> None:
        self.file.close()


@pytest.mark.parametrize("room", [0, 1, 60, 400])
def test_a_full_disk(tmp_path: Path, room: int) -> None:
    path = tmp_path / "run.jsonl"
    writer = Writer(path, {})
    disk: Any = Full(writer._file.file, room)
    writer._file.file = disk
    with pytest.warns(UserWarning, match="No space left") as told:
        for step in range(4):
            writer.record(record(step))
    assert len(told) == 1
    assert writer.read().steps == (0, 1, 2, 3)
    disk.room = 5  # some comes free, not enough
    writer.record(record(4))
    assert writer.read().steps == (0, 1, 2, 3, 4)
    disk.room = 1 << 30
    writer.record(record(5))
    assert not writer._file.pending
    writer.close()
    found = history.read(path)
    assert found.steps == (0, 1, 2, 3, 4, 5)
    assert found.influences == tuple(table("a", "b") for _ in range(6))


def test_a_full_disk_and_a_file_that_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    writer = Writer(path, {})
    for step in range(2):
        writer.record(record(step))
        writer.times(step, [0.25])
    disk: Any = Full(writer._file.file, 30)
    writer._file.file = disk
    with pytest.warns(UserWarning, match="No space left"):
        writer.record(record(2))
    assert history.read(path).steps == (0, 1) and writer.read().steps == (0, 1, 2)
    os.truncate(path, path.stat().st_size - 50)  # in the line before the last
    disk.room = 1 << 30
    with pytest.warns(UserWarning, match="was cut short"):
        writer.record(record(3))
    writer.close()
    found = history.read(path)
    assert found.steps == (0, 1, 2, 3) and found.timed == (0,) and "cut short" in found.notes[0]


def test_files_with_gaps_are_read() -> None:
    """As they were written where the disk was full for a while."""
    begin = {"kind": "run", "schema_version": 1, "step": 0, "settings": {}, "versions": {}}
    times = {"kind": "times", "step": 0, "seconds": [0.5]}
    whole = [json.dumps(line) + "\n" for line in (begin, {"kind": "gap"}, times)]
    whole.insert(1, '{"kind": "step", "st\n')
    found = history.parse("".join(whole).encode(), "it")
    assert found.seconds == (0.5,) and "line 2 was cut short" in found.notes[0]


# A killed run -------------------------------------------------------------------------------------

SCRIPT = """
    import sys, torch, gradtrace as gt
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    with gt.Monitor(model, every=1, budget=None, file=sys.argv[1], view=False) as monitor:
        for step in range(int(sys.argv[2])):
            loss = model(torch.randn(5, 3)).square().mean()
            monitor.step(loss)
            loss.backward()
            print(step, flush=True)
"""


def started(path: Path, steps: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(path), str(steps)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_kill_and_go_on(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    process = started(path, 1_000_000)
    assert process.stdout is not None
    for line in process.stdout:
        if int(line) >= 5:
            break
    early = history.read(path)  # while it goes on
    assert early.running and len(early) >= 6
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    found = history.read(path)
    assert found.running and found.steps == tuple(range(len(found)))
    assert found.records[: len(early)] == early.records
    before = path.read_bytes()
    fresh.python("-c", textwrap.dedent(SCRIPT), str(path), "2", check=True)
    after = history.read(path)
    assert path.read_bytes().startswith(before)
    assert not after.running and after.steps == tuple(range(len(found) + 2))


# Reports ------------------------------------------------------------------------------------------


def test_a_run_as_the_page_shows_it(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "run.jsonl", {})
    writer.record(record(0, "a"))
    writer.record(StepRecord(5, math.nan, None, notes=("not finite",)))
    writer.record(record(10, "a", "b"))
    writer.times(0, [0.5] * 11)
    found = history.read(tmp_path / "run.jsonl")
    writer.close()
    shown = training(found)
    assert shown is not None
    assert shown.step.tolist() == [0, 5, 10] and shown.components == ("a", "b")
    assert shown.share[0].tolist()[::2] == [0.75, 0.75] and math.isnan(shown.share[0][1])
    assert math.isnan(shown.share[1][0]) and shown.share[1][2] == 0.75
    assert shown.running and shown.cost == 0.01
    assert "step 5: not finite" in shown.notes
    times = timing(found)
    assert times is not None and times.step.tolist() == list(range(11))
    assert times.grows is None and times.verdict.startswith("Too few")


def test_long_runs_are_thinned() -> None:
    names = [f"m{n}" for n in range(100)]
    records = tuple(record(step, *names) for step in range(1200))
    header = {"settings": {}}
    found = history.History(header, records, tuple(range(20_000)), (0.1,) * 20_000)
    shown, times = training(found), timing(found)
    assert shown is not None and len(shown.step) * 100 <= MAX_SHARES
    assert shown.step[0] == 0 and shown.step[-1] == 1199
    assert "1,000 of 1,200 traced steps" in shown.notes[0]
    assert times is not None and len(times.step) <= 5_000 and times.grows is False


def test_an_empty_run() -> None:
    found = history.History({"settings": {}})
    assert training(found) is None and timing(found) is None


def test_the_report_of_a_run_that_goes_on(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    file = tmp_path / "run.jsonl"
    with gt.Monitor(model, every=1, budget=None, file=file, clock=lambda: 0.0) as monitor:
        for step in range(3):
            loss = model(torch.randn(5, 3)).square().mean()
            monitor.step(loss)
            loss.backward()
            monitor.report(tmp_path / "live.html")
            seen = run_report.kept(tmp_path / "run.gradtrace")
            assert seen is not None and seen.step == step
        found = run_report.report_run(tmp_path / "run.jsonl", tmp_path / "x.html", "mine")
        assert found.running and found.steps == (0, 1, 2)
    assert (tmp_path / "live.html").stat().st_size == pytest.approx(
        (tmp_path / "x.html").stat().st_size, rel=0.1
    )
    assert "mine, step 2" in (tmp_path / "x.html").read_text()


def test_without_a_budget_views_take_no_longer_than_traces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, made = 0.0, []
    model = nn.Linear(3, 1)
    view, result = Trace._view, StepTracer.result

    def slow(trace: Trace, *args: Any, **options: Any) -> Any:
        nonlocal now
        now += 3.0
        made.append(monitor._schedule.number)
        return view(trace, *args, **options)

    def traced(*args: Any) -> Any:
        nonlocal now
        now += 1.0
        return result(*args)

    monkeypatch.setattr(Trace, "_view", slow)
    monkeypatch.setattr(StepTracer, "result", traced)
    file = tmp_path / "run.jsonl"
    with gt.Monitor(model, every=1, budget=None, file=file, clock=lambda: now) as monitor:
        for _ in range(9):
            monitor.step(model(torch.randn(5, 3)).square().mean())
    assert made == [0, 5, 8]  # 3 of 1, then 6 of 6, then 9 of 9 seconds


def test_a_report_without_a_file_has_a_view_too(tmp_path: Path) -> None:
    model = nn.Linear(3, 1)
    page = tmp_path / "x.html"
    with gt.Monitor(model, budget=None, report=page) as monitor:
        monitor.step(model(torch.randn(5, 3)).square().mean())
    assert "Linear, step 0" in page.read_text()


def test_a_report_that_cannot_be_written_does_not_end_training(tmp_path: Path) -> None:
    model = nn.Linear(3, 1)
    with (
        pytest.warns(UserWarning, match="the report was not written"),
        gt.Monitor(model, budget=None, report=tmp_path / "none" / "x.html") as monitor,
    ):
        monitor.step(model(torch.randn(5, 3)).square().mean())


def test_a_trace_beside_a_run_is_not_replaced_by_its_view(tmp_path: Path) -> None:
    """A user's own run.gradtrace, beside run.jsonl."""
    model, x = nn.Linear(3, 1), torch.randn(5, 3)
    with gt.watch(model) as watch:
        loss = model(x).square().mean()
    watch.trace(loss).save(tmp_path / "run.gradtrace")
    with (
        pytest.warns(UserWarning, match=r"no view was kept: .*run\.gradtrace' holds a trace"),
        gt.Monitor(model, budget=None, file=tmp_path / "run.jsonl") as monitor,
    ):
        monitor.step(model(x).square().mean())
    assert gt.load(tmp_path / "run.gradtrace").gradients.keys() == {"weight", "bias"}
    run_report.report_run(tmp_path / "run.jsonl", tmp_path / "x.html")
    assert (tmp_path / "x.html").exists()


def test_a_damaged_view_is_told(tmp_path: Path) -> None:
    run(tmp_path / "run.jsonl")
    (tmp_path / "run.gradtrace").write_bytes(b"something else")
    with pytest.raises(GradtraceError, match=r"run\.gradtrace"):
        run_report.report_run(tmp_path / "run.jsonl", tmp_path / "x.html")


# How much work it is ------------------------------------------------------------------------------


def test_a_history_is_read_without_fractions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables are made when they are looked at, of floats; sums only when somebody asks."""
    influence = sys.modules["gradtrace.tracing.moments"]
    path = run(tmp_path / "run.jsonl", steps=50)
    made: list[str] = []
    summed, row = influence._summed, history._unpacked
    monkeypatch.setattr(influence, "_summed", lambda *two: made.append("sums") or summed(*two))
    monkeypatch.setattr(history, "_unpacked", lambda *one: made.append("row") or row(*one))
    found = history.read(path)
    assert found.components == ("a", "b") and found.steps == tuple(range(50))
    assert made == []
    assert len(found.records[7].influence or ()) == 2 and made == ["row"] * 2
    shown = training(found)
    assert shown is not None and made == ["row"] * 100
    assert shown.share[0].tolist() == [0.75] * 50
    assert found.records[7] == record(7)


def test_shares_of_floats_are_those_of_fractions() -> None:
    import random

    rng = random.Random(0)
    numbers = [0.0, 5e-324, 1e-310, 1e-200, 0.1, 1 / 3, 1.0, 3.0, 1e16, 1e200, 1.7e308]
    numbers += [rng.random() * 10.0 ** rng.randrange(-30, 30) for _ in range(300)]
    for e in numbers[1:]:
        for t in (0.0, e, e * rng.random(), rng.choice(numbers)):
            exact = Moments(*Moments.of(t, e).parts())
            try:
                wanted = exact.share
            except OverflowError:
                continue
            assert Moments.of(t, e).share == wanted, (t, e)


def test_tables_to_be_made_later_are_tables(tmp_path: Path) -> None:
    import copy
    import pickle
    from dataclasses import replace

    path = run(tmp_path / "run.jsonl")
    first, *others = (history.read(path).records[0].influence for _ in range(5))
    want = record(0).influence
    assert want is not None and None not in (first, *others)
    assert first == want and hash(others[0]) == hash(want)
    assert pickle.loads(pickle.dumps(others[1])) == want
    assert copy.deepcopy(others[2]) == want and replace(others[3], pairs=2).rows == want.rows  # type: ignore[type-var]
    with pytest.raises(AttributeError, match="no attribute 'row'"):
        first.row  # type: ignore[union-attr]  # noqa: B018


def test_a_run_that_goes_on_often_is_read_in_linear_work() -> None:
    """Going on from a step costs what is left out, not what is there."""
    line = history.Timeline[int]()
    for step in range(200_000):
        line.put(step, step)
    begun = time.process_time()
    for _ in range(100_000):
        assert line.cut(199_999) == 1
        line.put(199_999, 5)
    assert time.process_time() - begun < 8 and line.cut(300_000) == 0
    line.put(500, 7)
    line.put(2, 8)
    assert len(line.all()) == 200_000 and line.all()[500] == 7
    assert line.cut(3) == 199_997 and line.steps == (0, 1, 2) and line.all() == (0, 1, 8)
    line.put(1_000, 1)
    line.put(50, 2)
    assert line.steps == (0, 1, 2, 50, 1000) and line.all() == (0, 1, 8, 2, 1)


# As a table ---------------------------------------------------------------------------------------


def test_a_run_as_a_table(tmp_path: Path) -> None:
    found = history.read(run(tmp_path / "run.jsonl"))
    frame = found.to_pandas()
    assert frame["step"].tolist() == [0, 1, 2]
    assert frame["loss"].tolist() == list(found.losses)
    assert frame["share/a"].tolist() == [0.75] * 3
    assert str(found).startswith("History(3 traced steps of 3, ended)\nstep")
    assert found.sort("loss", descending=False).column("step") == [2, 1, 0]
    assert history.History({}).to_pandas().empty


def test_a_run_as_a_plot() -> None:
    pytest.importorskip("matplotlib").use("agg")
    norms = {"lstm": Norms(1.0, 2.0)}
    found = history.History({}, (record(0, norms=norms), record(1, "a", "c", norms=norms)))
    shares = found.plot()
    assert [line.get_label() for line in shares.lines] == ["a", "b", "c"]
    assert shares.lines[0].get_xdata().tolist() == [0, 1]
    losses = found.plot("loss")
    assert losses.lines[0].get_ydata().tolist() == [0.5, 0.25]
    assert found.plot("norm/lstm").lines[0].get_ydata().tolist() == [2.0, 2.0]
    with pytest.raises(GradtraceError, match=r"no curve 'los' in this run; did you mean loss\?"):
        found.plot("los")
    plt = pytest.importorskip("matplotlib.pyplot")
    plt.close("all")


def test_the_first_step_has_no_cost_yet(tmp_path: Path) -> None:
    """There was no training time to compare with: the table leaves it out, and says no infinity."""
    first = StepRecord(0, 1.0, None, seconds=0.1, share=math.inf)
    found = history.History({}, (first,))
    assert repr(found).startswith("History(1 traced step of")
    assert "inf" not in str(found.table())
