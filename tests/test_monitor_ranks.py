"""A Monitor in processes that train together: one file tells of all of them.

Where they do not go in step it holds up none of them, and loses nothing.
"""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import monitors
import pytest
import torch
import torch.distributed as dist
from gradtrace.distributed.rank_exchange import Message, RankExchange
from gradtrace.runs import history
from gradtrace.runs.history import History
from gradtrace.runs.step_results import StepResult
from gradtrace.runs.writer import Writer
from gradtrace.training.gathering import Gathering
from gradtrace.training.loggers import Loggers
from launch import Ended, Group, started

import gradtrace as gt
from gradtrace.tracing.influence import Influence

MODES = ("even", "left", "barrier", "more", "slow", "raises", "budget", "bad", "killed")

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="this torch has no gloo"
)


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> list[Ended]:
    """Two and four processes that do not go in step; one after the other, as copies of one."""
    folders = [tmp_path_factory.mktemp("uneven") for _ in range(2)]
    modes = ",".join(MODES)
    return started("monitors", Group(f"ddp,{modes}", 2, folders[0]), Group(modes, 4, folders[1]))


@pytest.fixture(scope="module", params=[2, 4])
def ended(request: pytest.FixtureRequest, groups: list[Ended]) -> Ended:
    return groups[request.param // 2 - 1]


def read(ended: Ended, mode: str) -> History:
    return history.read(ended.folder / f"{mode}.jsonl")


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
    assert len(ended.found("told")) == world - 1
    for told in ended.found("told"):
        assert told.keys() == set(MODES)
        # A step that waits for one which never comes would take minutes.
        assert all(each.get("longest", 0) < 30 for each in told.values())


@pytest.mark.parametrize("mode", ["even", "left", "barrier", "more", "slow"])
def test_every_step_is_of_all_that_had_it(ended: Ended, mode: str) -> None:
    world, found = len(ended.codes), read(ended, mode)
    many = {rank: monitors.steps(mode, rank) for rank in range(world)}
    assert found.steps == tuple(range(max(many.values()))) and not found.running
    for step in found.steps:
        assert agrees(found, step, [rank for rank in many if many[rank] > step], world)


@pytest.mark.parametrize("mode", ["raises", "killed"])
def test_one_that_ends_leaves_the_others_complete(ended: Ended, mode: str) -> None:
    world, found = len(ended.codes), read(ended, mode)
    assert found.steps == tuple(range(monitors.STEPS)) and not found.running
    for step in found.steps[3:]:
        assert agrees(found, step, [rank for rank in range(world) if rank != 1], world)
    if mode == "raises":
        for step in found.steps[:3]:
            assert agrees(found, step, list(range(world)), world)


def test_a_budget_is_that_of_the_first_process(ended: Ended) -> None:
    """It says ahead which steps are traced, so that the others trace the same."""
    found = read(ended, "budget")
    pairs = [table.pairs for table in found.influences if table is not None]
    assert found.steps[0] == 0 and pairs[0] == len(ended.codes)
    # Messages may be late where the machine is busy: a step is then traced by some of them.
    assert sum(pairs) >= 2 * len(ended.codes) and max(pairs[1:]) > 1


def test_incidents_of_all_processes_are_in_the_file(ended: Ended) -> None:
    found = read(ended, "bad").incidents
    expected = [rank for rank in range(len(ended.codes)) if rank != 1]
    assert [(each.step, each.rank, each.trigger) for each in found] == [
        (13, rank, "nonfinite") for rank in expected
    ]
    assert all((f"rank{each.rank}" in each.file) == bool(each.rank) for each in found)
    assert all((f"of process {each.rank}" in str(each)) == bool(each.rank) for each in found)
    assert all(gt.load_incident(each.file).rank == each.rank for each in found)


def test_no_thread_is_left(ended: Ended) -> None:
    assert all("Traceback" not in text for text in ended.printed), ended.printed


# In step, with DistributedDataParallel -----------------------------------------------------------


def test_two_processes_are_one_over_both_parts(groups: list[Ended]) -> None:
    found = read(groups[0], "ddp")
    assert found.steps == (0, 2, 4) and not found.running
    kept = torch.load(groups[0].folder / "0.pt")
    model = monitors.model()
    for record in found.records[:2]:
        model.load_state_dict(kept[record.step])
        tables, losses = [], []
        for rank in (0, 1):
            with gt.watch(model) as watch:
                loss = model(monitors.part(record.step, rank)).square().mean()
            tables.append(watch.trace(loss).influence(sample=10_000))
            losses.append(loss.item())
        expected = tables[0].merge(tables[1])
        assert record.influence is not None and record.influence.pairs == 2
        counts = [(row.name, row.own, row.unreached, row.count) for row in record.influence]
        assert counts == [(row.name, row.own, row.unreached, row.count) for row in expected]
        assert record.loss == pytest.approx(sum(losses) / 2, rel=1e-6)
        assert set(record.norms) >= {"first", "left", "right", "out"}


def test_one_process_that_fails_to_trace_is_told(groups: list[Ended]) -> None:
    last = read(groups[0], "ddp").records[-1]
    assert last.influence is not None and last.influence.pairs == 1
    assert last.notes and "not finite" in last.notes[0]


def test_both_processes_train_alike(groups: list[Ended]) -> None:
    first, second = (torch.load(groups[0].folder / f"{rank}.pt") for rank in (0, 1))
    assert all(torch.equal(first[4][name], second[4][name]) for name in first[4])


# In whatever order looks come ---------------------------------------------------------------------


class Told(RankExchange):
    """Four processes, of which this is the first; a test says what the others tell."""

    def __init__(self) -> None:
        super().__init__(None, "")
        self.world, self.messages = 4, list[tuple[int, Message]]()
        self.failed = "there is no connection"

    def received(self) -> list[tuple[int, Message]]:
        found, self.messages = self.messages, []
        return found


@pytest.mark.parametrize("dead", [(), (1,)], ids=["all live", "one is dead"])
def test_no_look_is_lost(tmp_path: Path, dead: tuple[int, ...]) -> None:
    """Others may be ahead of the first process, or behind; one that is dead never tells its end."""
    for seed in range(8):
        draw, told = random.Random(seed), Told()
        writer = Writer(tmp_path / f"{seed}.jsonl", {})
        run = Gathering(writer, Loggers([]), told)
        left = {rank: list(range(6)) for rank in range(4) if rank not in dead}
        while any(left.values()):
            rank = draw.choice([rank for rank in left if left[rank]])
            step, look = left[rank].pop(0), StepResult(2.0**rank, 1.0)
            if rank == 0:
                run.add_own(step, look)
            else:
                told.messages.append((rank, {"step": step, "result": look.to_dict()}))
            for act in (run.pump, run.read):
                if draw.random() < 0.3:
                    act()
        told.messages += [(rank, {"end": 6}) for rank in left if rank]
        run.pump()
        run.close(6, "", 0.0, lambda: None)
        records = history.read(tmp_path / f"{seed}.jsonl").records
        expected = sum(2.0**rank for rank in left) / len(left)
        assert [(each.step, each.loss) for each in records] == [(n, expected) for n in range(6)]
        assert all(bool(each.notes) == bool(dead) for each in records)


def test_an_incident_that_is_told_after_the_end_is_in_the_file_and_on_the_page(
    tmp_path: Path,
) -> None:
    told, pages = Told(), list[int]()
    told.failed = ""
    run = Gathering(Writer(tmp_path / "r.jsonl", {}), Loggers([]), told)
    run.base = 100
    run.add_own(100, StepResult(1.0, 1.0))
    told.messages += [(rank, {"end": 6}) for rank in (2, 3)]
    run.pump()
    run.close(106, "ValueError", 0.0, lambda: pages.append(1))
    what = history.StepIncident(105, "spike", "the loss is 9", "", "", "", "r-rank1.gradtrace", 1)
    sent = what._replace(step=5)._asdict()  # it counts from 0
    told.messages += [(1, {"step": 5, "incident": sent}), (1, {"end": 6})]
    run.pump()
    found = history.read(tmp_path / "r.jsonl")
    assert found.incidents == (what,) and not found.running and pages == [1]


def test_alone() -> None:
    alone = RankExchange(None, "")
    assert alone.first and alone.world == 1
    alone.send({"nothing": 1})
    assert alone.received() == []
    alone.close(0)
    assert torch.distributed.is_available()
