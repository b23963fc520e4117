"""Influence measured by the ranks of a group: equal to one process, to the last count.

The processes do what ``ranks`` says. One start serves for many scenarios, and the results are
looked at one by one.
"""

from __future__ import annotations

import json
import socket
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from launch import Ended, Group, started
from torch import nn
from torch.utils.data import DataLoader

import gradtrace as gt
from gradtrace.distributed import batches, process_group
from gradtrace.distributed.batches import BatchEntry
from gradtrace.distributed.checkpoint import CheckpointFiles, PartialResult, pooled
from gradtrace.distributed.identity import identity
from gradtrace.errors import GradtraceError, RankFailed
from gradtrace.io import container
from gradtrace.tracing.influence import Influence

HERE = Path(__file__).parent


WORDS = {
    "measures": ("--json", "--journal", "{folder}/run.gradtrace"),
    "fails": ("--", "1"),
}


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """All groups of this file, one after the other; the processes are copies of one."""
    folder = {
        name: tmp_path_factory.mktemp(name)
        for name in ("two", "four", "killed2", "killed4", *WORDS)
    }
    asked = {
        "two": Group("same,parts,wrong,slow,stopped,wrappers", 2, folder["two"]),
        "four": Group("same,wrong,slow", 4, folder["four"]),
        "killed2": Group("killed", 2, folder["killed2"]),
        "killed4": Group("killed", 4, folder["killed4"]),
    }
    for name, words in WORDS.items():
        target = f"{scripted(folder[name])}:parts"
        told = ["influence", target, *(word.format(folder=folder[name]) for word in words)]
        asked[name] = Group(json.dumps(told), 2, folder[name])
    return dict(zip(asked, started("ranks", *asked.values())))


@pytest.fixture(scope="module")
def two(groups: dict[str, Ended]) -> Ended:
    groups["two"].check()
    return groups["two"]


@pytest.fixture(scope="module")
def four(groups: dict[str, Ended]) -> Ended:
    groups["four"].check()
    return groups["four"]


@pytest.fixture(scope="module", params=[2, 4])
def world(request: pytest.FixtureRequest, two: Ended, four: Ended) -> Ended:
    """The groups of two and of four."""
    return {2: two, 4: four}[request.param]


@cache
def alone(name: str = "greedy", size: int = 4) -> dict[str, Any]:
    """The table of one process."""
    if name == "greedy":
        return gt.influence(ranks.model(), ranks.losses, ranks.loader(size)).to_dict()
    return ranks.SAME[name]().to_dict()


# Equal to one process ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ranks.SAME)
def test_ranks_together_are_one_process(name: str, world: Ended) -> None:
    """Six batches on four ranks, one batch on two: parts are uneven, and some are empty."""
    whole = alone(name)
    assert world.each("same", name) == [whole] * len(world.codes)
    assert whole["pairs"] > 0


def test_a_slow_rank_is_waited_for(world: Ended) -> None:
    many = len(world.codes)
    assert world.each("slow", "slow") == [alone()] * many
    assert world.each("slow", "slow, of its own") == [alone()] * many


def test_a_rank_may_measure_alone(two: Ended) -> None:
    assert two.each("same", "alone") == [alone()] * 2
    assert two.each("parts", "a group of one") == [alone()] * 2


def test_tables_merge_in_any_order() -> None:
    parts = [
        gt.influence(ranks.model(), ranks.losses, [batch], weight="gradient")
        for batch in ranks.loader()
    ]
    whole = gt.influence(ranks.model(), ranks.losses, ranks.loader(), weight="gradient")
    for seed in range(5):
        order = torch.randperm(len(parts), generator=torch.Generator().manual_seed(seed)).tolist()
        first, *others = (parts[n] for n in order)
        middle = len(others) // 2
        left, right = first.merge(*others[:middle]), others[middle].merge(*others[middle + 1 :])
        assert right.merge(left) == whole


# Loaders -----------------------------------------------------------------------------------------


def test_a_loader_of_ones_own_is_not_shared_out_again(two: Ended) -> None:
    assert two.each("parts", "own") == [alone()] * 2
    assert two.each("parts", "own, one empty") == [alone()] * 2


def test_a_distributed_sampler_is_noticed(two: Ended) -> None:
    first, second = two.each("parts", "sampler")
    assert first == second
    other = {"rows": None, "coverage": None}  # of other batches
    assert {**first, **other} == {**alone(), **other}
    rows, whole = first["rows"], alone()["rows"]
    assert [row["count"] for row in rows] == [row["count"] for row in whole]
    for message in two.each("parts", "sampler of four"):
        assert "DistributedSampler is for 4 ranks, and 2 measure together" in message


def test_samples_of_other_ranks_are_not_loaded(two: Ended) -> None:
    first, second = two.each("parts", "read")
    assert not set(first) & set(second)
    assert sorted(first + second) == list(range(ranks.SIZE))


def test_a_sampler_that_repeats_samples_is_told_of() -> None:
    sampler: Any = torch.utils.data.DistributedSampler(ranks.data(), 4, 0)
    assert batches.remarks(DataLoader(ranks.data(), sampler=sampler)) == (
        "DistributedSampler gives 2 samples twice, to even out 4 ranks",
    )
    sampler = torch.utils.data.DistributedSampler(ranks.data(), 4, 0, drop_last=True)
    assert "2 samples not at all" in batches.remarks(DataLoader(ranks.data(), sampler=sampler))[0]
    assert batches.remarks(ranks.loader()) == ()


# What goes wrong ---------------------------------------------------------------------------------


@pytest.mark.parametrize("who", [0, 1])
def test_an_error_on_one_rank_reaches_all(world: Ended, who: int) -> None:
    told = world.each("wrong", f"rank {who} raises")
    assert told.pop(who) == "ValueError: no such word"
    assert len(told) == len(world.codes) - 1
    for each in told:
        assert each.startswith(f"RankFailed: rank {who}: ValueError: no such word; what was")
        assert f"raised{who}.gradtrace" in each
    kept = dict(world.found("wrong")[0])[f"kept {who}"]
    assert f"raised{who}.gradtrace.rank{who}" in kept


@pytest.mark.parametrize("who", [0, 1])
def test_a_run_that_failed_goes_on(world: Ended, who: int) -> None:
    many = len(world.codes)
    assert world.each("wrong", f"resumed {who}") == [alone()] * many
    assert world.each("wrong", f"again {who}") == [alone()] * many
    assert sorted(path.name for path in world.folder.glob(f"raised{who}*")) == [
        f"raised{who}.gradtrace"
    ]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("models", "the model of rank 1 is not that of rank 0: first.bias differs"),
        ("rules", "rank 1 has rule='viterbi', and rank 0 has 'greedy'"),
        ("orders", "the loader of rank 1 did not give the batches that rank 0's gave"),
        ("kinds", "rank 1's loader is not a part of its own, and rank 0's is"),
        ("nothing", "the loader gave no batch"),
    ],
)
def test_ranks_that_do_not_do_the_same_are_refused(world: Ended, name: str, message: str) -> None:
    first, *others = world.each("wrong", name)
    assert first.startswith("GradtraceError: ")
    assert message in first
    assert others == [first] * (len(world.codes) - 1)


@pytest.mark.parametrize("who", [0, 1])
def test_ctrl_c_on_one_rank_stops_all(two: Ended, who: int) -> None:
    first, second = two.each("stopped", f"stopped {who}")
    assert first == second
    assert first["interrupted"]
    assert 0 < first["pairs"] < ranks.SIZE
    assert two.each("stopped", f"resumed {who}") == [alone("greedy", 2)] * 2


def test_a_resumed_run_draws_what_an_uninterrupted_one_does(two: Ended) -> None:
    """Rank 0's generators count, those at the beginning of the first run."""
    first, second = two.each("stopped", "stopped at random")
    assert first == second and first["interrupted"] and 0 < first["pairs"] < ranks.SIZE
    assert two.each("stopped", "resumed at random") == [alone("random")] * 2


def test_ctrl_c_before_anything_was_counted(two: Ended) -> None:
    assert two.each("stopped", "at once") == ["KeyboardInterrupt: "] * 2
    assert "losses of 2 ranks counted" in two.printed[0]
    assert "counted" not in two.printed[1]


@pytest.mark.parametrize("world", [2, 4])
def test_a_rank_that_is_killed_fails_the_others(groups: dict[str, Ended], world: int) -> None:
    """The first of two, the last of four: each in its second batch."""
    dead = 0 if world == 2 else 3
    ended = groups[f"killed{world}"]
    assert [code for rank, code in enumerate(ended.codes) if rank != dead] == [0] * (world - 1)
    assert ended.codes[dead] == -9
    told = ended.each("killed", "killed")
    assert len(told) == world - 1
    for message in told:
        assert f"RankFailed: rank {dead} exited unexpectedly: it was killed" in message
        assert "what was counted is kept beside" in message
    assert (ended.folder / f"killed.gradtrace.rank{dead}").exists()
    file = ended.folder / "killed.gradtrace"
    ranks.TROUBLE["calls"] = 0
    table = gt.influence(ranks.model(), ranks.calm(), ranks.loader(2), checkpoint=file)
    assert table.to_dict() == alone("greedy", 2)
    assert ranks.TROUBLE["calls"] < 11
    assert [path.name for path in ended.folder.glob("*.gradtrace*")] == ["killed.gradtrace"]


# Wrapped models ----------------------------------------------------------------------------------


def evaluated(net: nn.Module) -> dict[str, Any]:
    return gt.influence(net, ranks.losses, ranks.loader(8)).to_dict()


def test_a_model_in_ddp_is_the_model_inside(two: Ended) -> None:
    net = nn.Sequential(ranks.model(), nn.BatchNorm1d(2))
    tables = [dict(found)["ddp"] for found in two.found("wrappers")]
    assert tables[0] == tables[1]
    assert tables[0]["pairs"] == ranks.SIZE
    names = [row["name"] for row in evaluated(net.eval())["rows"]]
    assert [row["name"] for row in tables[0]["rows"]] == names
    for found in two.each("wrappers", "ddp watched"):
        assert found == sorted(names)
    assert two.each("wrappers", "ddp has no gradient") == [True, True]


def test_ddp_trains_on_as_before(two: Ended) -> None:
    first, second = two.each("wrappers", "ddp goes on")
    assert first == second
    assert any(first)


def test_a_sharded_model_is_measured_whole(two: Ended) -> None:
    assert two.each("wrappers", "fsdp") == [evaluated(ranks.model())] * 2
    assert two.each("wrappers", "fsdp is sharded") == [True, True]
    half = ranks.model().bfloat16()

    def converted(net: nn.Module, batch: ranks.Batch) -> torch.Tensor:
        logits = net(batch[0].bfloat16()).float()
        return nn.functional.cross_entropy(logits, batch[1], reduction="none")

    table = gt.influence(half, converted, ranks.loader(8)).to_dict()
    for found in two.each("wrappers", "fsdp in bfloat16"):
        assert [row["count"] for row in found["rows"]] == [row["count"] for row in table["rows"]]


def test_a_sharded_model_is_gathered(two: Ended) -> None:
    with gt.watch(net := ranks.model()) as watch:
        table = watch.trace(ranks.losses(net, next(iter(ranks.loader())))).influence()
    assert two.each("wrappers", "fsdp gathered") == [table.to_dict()] * 2


@pytest.mark.parametrize("name", ["fsdp", "fsdp in bfloat16"])
def test_a_sharded_model_trains_on(two: Ended, name: str) -> None:
    net = ranks.model()
    ranks.losses(net, next(iter(ranks.loader()))).sum().backward()  # type: ignore[no-untyped-call]
    want = [float(p.grad.double().sum()) for p in net.parameters() if p.grad is not None]
    for found in two.each("wrappers", f"{name} goes on"):
        assert found == pytest.approx(want, rel=0.1 if "16" in name else 1e-4, abs=0.05)


# What is kept ------------------------------------------------------------------------------------


def one() -> Influence:
    return gt.influence(ranks.model(), ranks.losses, ranks.loader(ranks.SIZE))


def some(*numbers: int, loader: str = "") -> dict[tuple[str, str], BatchEntry]:
    return {(loader, f"{n:016x}"): BatchEntry(n, "") for n in numbers}


def test_parts_that_the_whole_has_are_left_out() -> None:
    table = one()
    whole = PartialResult(table, some(0, 1, 2))
    rest, left = pooled(whole, [PartialResult(table, some(1)), PartialResult(table, some(3))], [])
    assert rest == whole
    assert left == [PartialResult(), PartialResult(table, some(3))]
    part = PartialResult(table, some(4, 5))
    rest, _ = pooled(whole, left, [left[1], part])
    assert rest == whole.join(part)
    assert PartialResult.from_dict(whole.to_dict()) == whole
    with pytest.raises(GradtraceError, match="the same batches twice"):
        pooled(whole, [PartialResult(table, some(0, 3))], [])


SETTINGS = {"components": None, "weight": "count", "rule": "greedy", "granularity": "scalar"}


def test_a_file_of_an_earlier_version_is_refused(tmp_path: Path) -> None:
    """It does not know its model."""
    table = one()
    meta = {"settings": SETTINGS, "batches": 1, "influence": table.to_dict()}
    file = tmp_path / "run.gradtrace"
    container.write(file, "influence", meta, {})
    before = file.read_bytes()
    with pytest.raises(GradtraceError, match=r"older gradtrace.*delete it to begin again"):
        gt.influence(ranks.model(), ranks.losses, ranks.loader(), checkpoint=file)
    assert file.read_bytes() == before


def test_loaders_of_other_ranks_are_not_gone_on_with(tmp_path: Path) -> None:
    file = tmp_path / "run.gradtrace"
    book = CheckpointFiles(file, SETTINGS, 1, 2)
    book.identity, _ = identity(ranks.model(), ranks.losses)
    book.keep(PartialResult(one(), some(0, loader="1/2")))
    with pytest.raises(GradtraceError, match="batches of 2 ranks with loaders of their own"):
        gt.influence(ranks.model(), ranks.losses, ranks.loader(), checkpoint=file)


def test_a_group_must_be_one() -> None:
    with pytest.raises(GradtraceError, match="is not initialised"):
        gt.influence(ranks.model(), ranks.losses, ranks.loader(), group="all")


# The command line --------------------------------------------------------------------------------

SCRIPT = """
import os, sys
sys.path.insert(0, {tests!r})
import ranks

def parts(what="fine"):
    def losses(model, batch):
        if what == os.environ.get("RANK", "0"):
            raise ValueError("no such word")
        return ranks.losses(model, batch)
    print("this is no result")
    return losses, ranks.loader(), ranks.model()
"""


def scripted(folder: Path) -> Path:
    path = folder / "train.py"
    path.write_text(SCRIPT.format(tests=str(HERE)))
    return path


def test_the_command_measures_on_two_ranks(groups: dict[str, Ended]) -> None:
    ended = groups["measures"]
    ended.check()
    assert ended.out(1) == ""
    found = json.loads(ended.out(0))
    assert found["pairs"] == ranks.SIZE
    table = {row[0]: row for row in Influence.from_dict(alone()).table().rows}
    shares = [(name, table[name][1], table[name][3]) for name in Influence.from_dict(alone()).names]
    assert [(r["component"], r["through"], r["share"]) for r in found["influence"]] == shares
    assert (ended.folder / "run.gradtrace").exists()


def test_the_command_fails_on_all_ranks_with_one(groups: dict[str, Ended]) -> None:
    ended = groups["fails"]
    assert ended.codes == [2, 2]
    assert "gradtrace: rank 1: ValueError: no such word" in ended.err(0)
    assert "train.py, line 9: ValueError: no such word" in ended.err(1)
    assert ended.out(0) == ended.out(1) == ""


def test_a_host_without_an_address_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def unresolved(*_: object) -> None:
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    def in_vain(*_: object, **__: object) -> None:
        raise RuntimeError("timed out")

    for name, value in {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "node7"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setattr(socket, "getaddrinfo", unresolved)
    monkeypatch.setattr(torch.distributed, "init_process_group", in_vain)
    advice = r"host 'node7' has no address here \(Temporary.*torchrun --standalone --local-addr"
    with (
        pytest.warns(UserWarning, match=advice),
        pytest.raises(RankFailed, match=advice),
        process_group.launched(),
    ):
        pass
