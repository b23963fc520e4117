"""Influence measured by the ranks of a group: equal to one process, or an error on all.

The processes do what ``ranks`` says. One start serves for many scenarios, and the results are
looked at one by one.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from launch import Ended, Group, started
from torch import nn

import gradtrace as gt
from gradtrace.table import Table

HERE = Path(__file__).parent
WORDS = {"measures": ("--json", "--journal", "{folder}/run"), "fails": ("--", "1")}


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """All groups of this file, one after the other; the processes are copies of one."""
    names = ("two", "four", "killed", *WORDS)
    folder = {name: tmp_path_factory.mktemp(name) for name in names}
    asked = {
        "two": Group("same,wrong,wrappers", 2, folder["two"]),
        "four": Group("same,wrong", 4, folder["four"]),
        "killed": Group("killed", 2, folder["killed"]),
    }
    for name, words in WORDS.items():
        target = f"{scripted(folder[name])}:parts"
        told = ["influence", target, *(word.format(folder=folder[name]) for word in words)]
        asked[name] = Group(json.dumps(told), 2, folder[name])
    return dict(zip(asked, started("ranks", *asked.values())))


@pytest.fixture(scope="module", params=["two", "four"])
def world(request: pytest.FixtureRequest, groups: dict[str, Ended]) -> Ended:
    groups[request.param].check()
    return groups[request.param]


@pytest.fixture(scope="module")
def two(groups: dict[str, Ended]) -> Ended:
    groups["two"].check()
    return groups["two"]


@cache
def alone(name: str = "greedy") -> Any:
    """The table of one process."""
    return json.loads(json.dumps(ranks.SAME[name]().to_dict()))


@cache
def by_twos() -> Any:
    table = gt.influence(ranks.model(), ranks.mean, ranks.loader(2))
    return json.loads(json.dumps(table.to_dict()))


# Equal to one process ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ranks.SAME)
def test_ranks_together_are_one_process(name: str, world: Ended) -> None:
    """Six batches on four ranks, one batch on two: parts are uneven, and some are empty."""
    assert world.each("same", name) == [alone(name)] * len(world.codes)


# What goes wrong ---------------------------------------------------------------------------------


@pytest.mark.parametrize("who", [0, 1])
def test_an_error_on_one_rank_reaches_all_and_the_run_goes_on(world: Ended, who: int) -> None:
    many = len(world.codes)
    for told in world.each("wrong", f"rank {who} raises"):
        assert told.startswith(f"RankFailed: rank {who}: batch {who + many}, a list of")
        assert told.endswith("ValueError: no such word")
    assert world.each("wrong", f"resumed {who}") == [by_twos()] * many


@pytest.mark.parametrize("who", [0, 1])
def test_ctrl_c_on_one_rank_gives_all_the_table_so_far(world: Ended, who: int) -> None:
    first, *others = world.each("wrong", f"rank {who} stops")
    assert others == [first] * len(others) and first["about"]["interrupted"]
    assert 0 < first["about"]["losses"] < 11
    assert world.each("wrong", f"goes on {who}") == [by_twos()] * len(world.codes)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("weights", "GradtraceError: the ranks differ in weights or settings"),
        ("rules", "GradtraceError: the ranks differ in weights or settings"),
        ("orders", "GradtraceError: the loaders of the ranks do not give the same batches"),
        ("sampler", "RankFailed: rank 0: the loader has a DistributedSampler"),
        ("nothing", "GradtraceError: the loader gave no batch"),
    ],
)
def test_ranks_that_do_not_do_the_same_are_refused(world: Ended, name: str, message: str) -> None:
    first, *others = world.each("wrong", name)
    assert first.startswith(message)
    assert others == [first] * len(others)


def test_a_rank_that_is_killed_fails_the_other_and_the_journals_are_kept(
    groups: dict[str, Ended],
) -> None:
    """Any number of ranks reads them."""
    ended = groups["killed"]
    assert ended.codes == [0, -9]
    (told,) = ended.each("killed", "killed")
    assert told.startswith("RankFailed: another rank ended")
    assert {path.name for path in ended.folder.glob("run*")} == {"run.rank0", "run.rank1"}
    calls = list[int]()

    def loss(net: nn.Module, batch: ranks.Batch) -> torch.Tensor:
        calls.append(1)
        return ranks.mean(net, batch)

    file = ended.folder / "run"
    table = gt.influence(ranks.model(), loss, ranks.loader(2), journal=file)
    assert json.loads(json.dumps(table.to_dict())) == by_twos()
    assert len(calls) == 11 - 6 - 1


# Wrapped models ----------------------------------------------------------------------------------


def test_a_model_in_ddp_is_the_model_inside_and_trains_on(two: Ended) -> None:
    net = nn.Sequential(ranks.model(), nn.BatchNorm1d(2))
    names = gt.influence(net, ranks.mean, ranks.loader(8)).names
    first, second = two.each("wrappers", "ddp")
    assert first == second and first["about"]["losses"] == 3
    assert [row[0] for row in first["rows"]] == list(names)
    first, second = two.each("wrappers", "ddp goes on")
    assert first == second and any(first)


@pytest.mark.parametrize("name", ["fsdp", "fsdp in bfloat16"])
def test_a_sharded_model_is_measured_whole_and_trains_on(two: Ended, name: str) -> None:
    half = "16" in name
    plain = ranks.model().eval()
    net = ranks.model().eval().bfloat16() if half else plain

    def loss(net: nn.Module, batch: ranks.Batch) -> torch.Tensor:
        logits = net(batch[0].bfloat16()).float() if half else net(batch[0])
        return nn.functional.cross_entropy(logits, batch[1])

    assert two.each("wrappers", f"{name} is sharded") == [True, True]
    table = gt.influence(net, loss, ranks.loader(8))
    gathered = gt.influence(net, loss, [next(iter(ranks.loader()))])
    for wanted, what in ((table, name), (gathered, f"{name} gathered")):
        for found in two.each("wrappers", what):
            same = Table.from_dict(found)
            assert same.column("through") == wanted.column("through")
    torch.autograd.backward(ranks.mean(plain, next(iter(ranks.loader()))))
    want = [float(p.grad.double().sum()) for p in plain.parameters() if p.grad is not None]
    for found in two.each("wrappers", f"{name} goes on"):
        assert found == pytest.approx(want, rel=0.1 if half else 1e-4, abs=0.05)


# The command line --------------------------------------------------------------------------------

SCRIPT = """
import os, sys
sys.path.insert(0, {tests!r})
import ranks

def parts(what="fine"):
    def loss(model, batch):
        if what == os.environ.get("RANK", "0"):
            raise ValueError("no such word")
        return ranks.mean(model, batch)
    print("this is no result")
    return loss, ranks.loader(), ranks.model()
"""


def scripted(folder: Path) -> Path:
    path = folder / "train.py"
    path.write_text(SCRIPT.format(tests=str(HERE)))
    return path


def test_the_command_measures_on_two_ranks(groups: dict[str, Ended]) -> None:
    ended = groups["measures"]
    ended.check()
    assert ended.out(1) == ""
    found = [list(row.values()) for row in json.loads(ended.out(0))["rows"]]
    assert found == [row[: len(found[0])] for row in alone()["rows"]]
    assert (ended.folder / "run.rank1").exists()


def test_the_command_fails_on_all_ranks_with_one(groups: dict[str, Ended]) -> None:
    ended = groups["fails"]
    assert ended.codes == [2, 2] and ended.out(0) == ended.out(1) == ""
    assert "rank 1: batch 1, a list of" in ended.err(0) and "no such word" in ended.err(0)
