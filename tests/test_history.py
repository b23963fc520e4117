"""The file of a run: readable at any moment, resumed, and what it says of step times."""

from __future__ import annotations

import json
import math
from pathlib import Path

import fresh
import pytest
import torch
from torch import nn

import gradtrace as gt
from gradtrace.errors import BadFile
from gradtrace.training.history import RunLog, read, trend


def steps(monitor: gt.Monitor, model: nn.Module, count: int) -> None:
    for _ in range(count):
        loss = model(torch.ones(1, 2)).sum()
        monitor.step(loss)
        loss.backward()


def test_a_run_goes_on_in_its_file(tmp_path: Path) -> None:
    path, model = tmp_path / "run.jsonl", nn.Linear(2, 1)
    for _ in range(2):
        with gt.Monitor(model, every=2, file=path) as monitor:
            steps(monitor, model, 4)
    history, times = read(path)
    assert history == monitor.history and times == monitor.times
    assert history.column("step") == [0, 2, 3, 5]  # the fourth step's time was never known
    assert times.column("step") == [0, 1, 2, 3, 4, 5]
    assert [each.kind for each in history.columns[:2]] == ["count", "number"]
    assert history.about["model"] == "Linear" and not history.about["running"]
    with gt.Monitor(model, every=1, file=path, start=2) as monitor:  # from a checkpoint
        steps(monitor, model, 1)
    assert read(path)[0].column("step") == [0, 2, 3, 5]


ENDS = {"raise KeyboardInterrupt": 3, "os.kill(os.getpid(), 9)": 0, "pass": 4}
"""How programs end at their fourth step of five, and how many step times are in their files."""


def test_programs_that_end_leave_readable_files(tmp_path: Path) -> None:
    code = """
import os, sys, torch, gradtrace as gt
for end in sys.argv[2:]:
    if not os.fork():
        break
else:
    [os.wait() for end in sys.argv[2:]]
    sys.exit()
model = torch.nn.Linear(2, 1)
monitor = gt.Monitor(model, every=2, file=f"{sys.argv[1]}/{end[:4]}.jsonl")
for n in range(5):
    loss = model(torch.ones(1, 2)).sum()
    monitor.step(loss)
    if n == 3: exec(end)
"""
    fresh.python("-c", code, str(tmp_path), *ENDS)
    for end, count in ENDS.items():
        history, times = read(tmp_path / f"{end[:4]}.jsonl")
        assert history.column("step") == ([0, 2, 4] if end == "pass" else [0, 2])
        assert history.about["running"] and len(times) == count


def test_torn_and_foreign_files(tmp_path: Path) -> None:
    (path := tmp_path / "run.jsonl").write_text("")
    log = RunLog(path, {"model": "m"})
    log.add({"step": 0, "loss": math.nan, "share a": 0.5})
    path.write_text(path.read_text() + '{"step": 1, "lo')
    history, _ = read(path)
    assert history.column("share a") == [0.5] and math.isnan(history.rows[0].loss)
    RunLog(path, {}).add({"step": 1, "loss": 2.0})
    assert read(path)[0].column("loss")[1] == 2.0
    for text in ("", "[1]", "text", json.dumps({"run": "other"})):
        path.write_text(text)
        with pytest.raises(BadFile, match="is no run of a"):
            read(path)
    path.write_text(json.dumps({"run": "gradtrace", "version": 2}))
    with pytest.raises(BadFile, match="update gradtrace"):
        read(path)
    with pytest.raises(BadFile, match="cannot be written"):
        gt.Monitor(nn.Linear(2, 1), file=tmp_path / "none" / "run.jsonl")


def test_a_file_that_cannot_be_written_any_more_stops_nothing(tmp_path: Path) -> None:
    path, model = tmp_path / "folder" / "run.jsonl", nn.Linear(2, 1)
    path.parent.mkdir()
    with gt.Monitor(model, every=1, file=path) as monitor:
        path.unlink(), path.parent.rmdir()
        with pytest.warns(UserWarning, match="training goes on"):
            steps(monitor, model, 3)
    assert monitor.history.column("step") == [0, 1, 2]


@pytest.mark.parametrize(
    ("slope", "words"), [(0.0, "no more or less"), (1e-6, "more each 1,000"), (-1e-6, "less each")]
)
def test_the_trend_of_step_times(slope: float, words: str) -> None:
    noise = torch.randn(3000, generator=torch.Generator().manual_seed(0)).tolist()
    seconds = [0.01 + slope * n + 1e-4 * each for n, each in enumerate(noise)]
    seconds[100] = 30.0  # an evaluation
    assert words in trend(range(3000), seconds)[0]
    assert trend(range(5), [1.0, 2, 3, 4, 5])[0] == ""
