"""W&B in its offline mode: what was logged is read back from the file that it writes."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradtrace as gt

pytestmark = pytest.mark.xdist_group("wandb")  # its service is started once


@pytest.fixture(scope="module")
def wandb() -> Any:
    """Not imported while tests are collected, since that takes seconds in each worker."""
    return pytest.importorskip(
        "wandb", reason="NOT TESTED: W&B is not installed (pip install wandb)"
    )


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
    model = nn.Linear(4, 1)
    with gt.Monitor(model, every=5, writers=[run]) as monitor:
        for n in range(12):
            loss = model(torch.ones(3, 4)).sum()
            monitor.step(loss)
            loss.backward()
            if own != "nothing":
                run.log({"mine": n}, step=n if own == "steps" else None)
    run.finish()
    found = written(tmp_path)
    rows = [values(each.history.item) for each in found if each.HasField("history")]
    ours = [row for row in rows if "gradtrace/loss" in row]
    assert [row["gradtrace/step"] for row in ours] == [0, 5, 10]
    assert [row["gradtrace/loss"] for row in ours] == monitor.history.column("loss")
    if own != "nothing":  # none of the user's rows is lost, or another's
        assert [row["mine"] for row in rows if "mine" in row] == list(range(12))
