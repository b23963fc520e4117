"""W&B in its offline mode: what was logged is read back from the file that it writes."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradtrace as gt
from gradtrace.errors import GradtraceError
from gradtrace.training import loggers

pytestmark = pytest.mark.xdist_group("wandb")  # its service is started once


@pytest.fixture(scope="module")
def wandb() -> Any:
    """Not imported while tests are collected, since that takes seconds in each worker."""
    return pytest.importorskip(
        "wandb", reason="NOT TESTED: W&B is not installed (pip install wandb)"
    )


class Skip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.into, self.mix, self.never = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.into(x)
        return h + self.mix(h)


@pytest.fixture
def run(wandb: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    settings = wandb.Settings(disable_git=True, disable_code=True, console="off")
    found = wandb.init(project="gradtrace", dir=str(tmp_path), settings=settings)
    yield found
    found.finish()


def records(folder: Path) -> Iterator[Any]:
    """The records of an offline run: a log of LevelDB's format, with 7 bytes before it."""
    from wandb.proto import wandb_internal_pb2

    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    raw, at, part = path.read_bytes(), 7, b""
    while at + 7 <= len(raw):
        room = 32_768 - at % 32_768
        if room < 7:
            at += room
            continue
        size, kind = int.from_bytes(raw[at + 4 : at + 6], "little"), raw[at + 6]
        part, at = part + raw[at + 7 : at + 7 + size], at + 7 + size
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(part)
            yield record
            part = b""


def written(folder: Path, seconds: float = 120) -> list[Any]:
    """All records, once the last is there: W&B's service writes them after ``finish``."""
    last = time.monotonic() + seconds
    while True:
        found = list(records(folder))
        if found and found[-1].HasField("exit"):
            return found
        assert time.monotonic() < last, "the run's file has no end"
        time.sleep(0.1)


def values(items: Any) -> dict[str, Any]:
    return {each.key or "/".join(each.nested_key): json.loads(each.value_json) for each in items}


@pytest.mark.parametrize("own", ["nothing", "rows", "steps"])
def test_what_is_logged_is_in_the_file(run: Any, tmp_path: Path, own: str) -> None:
    model = Skip()
    with gt.Monitor(
        model, every=5, budget=None, loggers=[run], file=tmp_path / "run.jsonl"
    ) as monitor:
        for n in range(12):
            out = model(torch.ones(3, 4))
            terms = {"size": out.square().mean(), "sign": 0.1 * out.sum()}
            loss = terms["size"] + terms["sign"]
            monitor.step(loss, terms=terms)
            loss.backward()
            if own != "nothing":
                run.log({"mine": n}, step=n if own == "steps" else None)
    run.finish()
    found = written(tmp_path)
    rows = [values(each.history.item) for each in found if each.HasField("history")]
    ours = [row for row in rows if "gradtrace/loss" in row]
    assert [row["gradtrace/step"] for row in ours] == [0, 5, 10]
    if own != "nothing":  # none of the user's rows is lost, or another's
        assert [row["mine"] for row in rows if "mine" in row] == list(range(12))
        # With step= a row stays open until the next one begins, so ours join the one before.
        assert [row["mine"] for row in ours] == ([0, 4, 9] if own == "steps" else [0, 5, 10])
    shares = {name for name in ours[0] if name.startswith("gradtrace/choice/")}
    assert shares == {"gradtrace/choice/mix"}
    history = monitor.history
    for row, record in zip(ours, history.records):
        assert row["gradtrace/loss"] == pytest.approx(record.loss)
        assert row["gradtrace/choice/mix"] == pytest.approx(record.choices["mix"])
        cosine = record.terms["cosine size sign"]
        assert row["gradtrace/terms/cosine_size_sign"] == pytest.approx(cosine)
    summary: dict[str, Any] = {}
    for each in found:
        summary |= values(each.summary.update)
    assert "never.weight, never.bias (module never called)" in summary["gradtrace/diagnosis"]
    assert summary["gradtrace/report"].endswith(f"file: {tmp_path / 'run.jsonl'}")
    (page,) = tmp_path.glob("wandb/offline-run-*/files/media/html/gradtrace/diagnosis_page*.html")
    assert "module never called" in page.read_text()


def test_the_module_stands_for_its_run(run: Any, wandb: Any) -> None:
    loggers.adapted(wandb)(3, {"gradtrace/loss": 0.5})
    speak = loggers.speaking(wandb)
    assert speak is not None
    speak(3, "gradtrace/diagnosis", "<fine>")
    assert run.summary["gradtrace/diagnosis"] == "<fine>"


def test_no_run_is_open(wandb: Any) -> None:
    with pytest.raises(GradtraceError, match="no W&B run is open"):
        loggers.adapted(wandb)(3, {"gradtrace/loss": 0.5})
