"""A Monitor in processes that do not go in step: it holds up none of them, and loses nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import monitors
import pytest
import torch
import torch.distributed as dist

import gradtrace as gt
from gradtrace import history
from gradtrace.history import History
from gradtrace.influence import Influence

HERE = Path(__file__).parent
LONG = 240
MODES = ("even", "left", "barrier", "more", "slow", "raises", "budget", "killed")

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="this torch has no gloo"
)


class Ended(NamedTuple):
    codes: list[int]
    printed: list[str]
    folder: Path

    def read(self, mode: str) -> History:
        return history.read(self.folder / f"{mode}.jsonl")

    def told(self, rank: int) -> dict[str, Any]:
        return json.loads((self.folder / f"{rank}.json").read_text())  # type: ignore[no-any-return]


def started(world: int, folder: Path) -> Ended:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, str(HERE / "monitors.py"), ",".join(MODES)]
    processes = [
        subprocess.Popen(
            [*command, *map(str, (rank, world, store.port)), str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for rank in range(world)
    ]
    try:
        printed = [process.communicate(timeout=LONG)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return Ended([process.returncode for process in processes], printed, folder)


@pytest.fixture(scope="module", params=[2, 4])
def ended(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    return started(request.param, tmp_path_factory.mktemp("uneven"))


@cache
def look(step: int, rank: int) -> Influence:
    """What one process finds in its part; weights do not change in these runs."""
    net = monitors.model()
    with gt.watch(net) as watch:
        loss = net(monitors.part(step, rank)).square().mean()
    return watch.trace(loss).influence(sample=10_000)


def agrees(found: History, step: int, ranks: list[int], world: int) -> bool:
    record = found.records[found.steps.index(step)]
    assert record.influence is not None
    expected, *others = (look(step, rank) for rank in ranks)
    whole = expected.merge(*others)
    counts = [(row.name, row.own, row.count) for row in record.influence]
    partly = any(f"{len(ranks)} of {world} processes" in note for note in record.notes)
    return counts == [(row.name, row.own, row.count) for row in whole] and (
        partly == (len(ranks) < world)
    )


def test_no_process_is_held_up_or_broken(ended: Ended) -> None:
    world = len(ended.codes)
    assert [code for rank, code in enumerate(ended.codes) if rank != 1] == [0] * (world - 1), (
        ended.printed
    )
    assert ended.codes[1] == -9
    for rank in range(world):
        if rank != 1:
            told = ended.told(rank)
            assert told.keys() == set(MODES)
            # A step that waits for one which never comes would take minutes.
            assert all(each.get("longest", 0) < 30 for each in told.values())


@pytest.mark.parametrize("mode", ["even", "left", "barrier", "more", "slow"])
def test_every_step_is_of_all_that_had_it(ended: Ended, mode: str) -> None:
    world, found = len(ended.codes), ended.read(mode)
    many = {rank: monitors.steps(mode, rank) for rank in range(world)}
    assert found.steps == tuple(range(max(many.values()))) and not found.running
    for step in found.steps:
        assert agrees(found, step, [rank for rank in many if many[rank] > step], world)


@pytest.mark.parametrize("mode", ["raises", "killed"])
def test_one_that_ends_leaves_the_others_complete(ended: Ended, mode: str) -> None:
    world, found = len(ended.codes), ended.read(mode)
    assert found.steps == tuple(range(monitors.STEPS)) and not found.running
    for step in found.steps[3:]:
        assert agrees(found, step, [rank for rank in range(world) if rank != 1], world)
    if mode == "raises":
        for step in found.steps[:3]:
            assert agrees(found, step, list(range(world)), world)


def test_a_budget_is_that_of_the_first_process(ended: Ended) -> None:
    """It says ahead which steps are traced, so that the others trace the same."""
    found = ended.read("budget")
    pairs = [table.pairs for table in found.influences if table is not None]
    assert found.steps[0] == 0 and pairs[0] == len(ended.codes)
    assert sum(pairs) >= 2 * len(ended.codes)


def test_no_thread_is_left(ended: Ended) -> None:
    assert all("Traceback" not in text for text in ended.printed), ended.printed


def test_alone() -> None:
    from gradtrace.shards import Shards

    alone = Shards()
    assert alone.first and alone.world == 1 and alone.line is None
    alone.tell({"nothing": 1})
    assert alone.heard() == []
    alone.close()
    assert torch.distributed.is_available()
