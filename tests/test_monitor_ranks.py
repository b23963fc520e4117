"""A Monitor in each of several processes: the first traces and writes, none waits for another."""

from __future__ import annotations

import math

import monitors
import pytest
import torch
import torch.distributed as dist
from launch import Ended, Group, started
from torch import nn

import gradtrace as gt
from gradtrace.errors import GradtraceError
from gradtrace.training.history import read
from gradtrace.training.incident import load_incident

MODES = ("ddp", "apart", "bad", "raises", "killed")

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="this torch has no gloo"
)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    folder = tmp_path_factory.mktemp("ranks")
    return started("monitors", Group(",".join(MODES), 2, folder))[0]


def test_processes_end_as_without_a_monitor(ended: Ended) -> None:
    assert ended.codes == [0, -9], ended.printed
    assert "Traceback" not in ended.out(0) + ended.err(0)
    assert ended.found("told")[1]["raises"] == {"error": "on purpose"}


@pytest.mark.parametrize("mode", MODES)
def test_the_first_process_writes_of_its_own_part(ended: Ended, mode: str) -> None:
    history, times = read(ended.folder / f"{mode}.jsonl")
    told = [each.get(mode, {}) for each in ended.found("told")]
    assert history.column("step") == [0, 2, 4] and not history.about["running"]
    losses = history.column("loss")
    assert losses == pytest.approx([told[0]["losses"][step] for step in (0, 2, 4)])
    assert told[1].get("steps", []) == [] and len(times) == monitors.STEPS - 1


def test_equal_weights_are_noted(ended: Ended) -> None:
    first, second = (each["ddp"]["weights"] for each in ended.found("told"))
    assert first == second
    assert not any("other weights" in note for note in read(ended.folder / "ddp.jsonl")[0].notes)
    (note,) = (n for n in read(ended.folder / "apart.jsonl")[0].notes if n)
    assert note.startswith("process 1 had other weights") and "DistributedDataParallel" in note


def test_a_process_keeps_its_own_incidents(ended: Ended) -> None:
    names = sorted(path.name for path in (ended.folder / "bad").iterdir())
    assert names == ["step4-rank1.pt", "step4.pt"]  # the gradient of all is not finite
    found = [load_incident(ended.folder / "bad" / name) for name in names]
    assert found[0].why == "the loss is nan" and "gradient of 0.weight" in found[1].why
    for rank, each in ((1, found[0]), (0, found[1])):
        assert torch.equal(each.batch, monitors.part(4, rank)) and "0.weight" in each.state
    diagnosis = found[1].diagnose(monitors.model(), lambda net, x: net(x).sum() * math.nan)
    assert diagnosis.nonfinite is not None


def test_sharded_models_are_refused_where_ranks_would_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradtrace.training.ranks.sharded_modules", lambda model: [model])
    for how in ({}, {"every": 2, "folder": "kept"}):
        with pytest.raises(GradtraceError, match="give every= a number, and leave folder out"):
            gt.Monitor(nn.Linear(2, 1), **how)  # type: ignore[arg-type]
