"""Models of which each rank holds a part: the tables are those of the whole model.

The processes do what ``shards`` says.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
import shards
import torch
from launch import Ended, Group, started
from shards import CASES, given, losses, model, traced

import gradtrace as gt

ALL = [(world, *case) for world, cases in CASES.items() for case in cases]


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Ended]:
    asked = {n: Group("fsdp", n, tmp_path_factory.mktemp(f"ranks{n}")) for n in (2, 4)}
    found = dict(zip(asked, started("shards", *asked.values())))
    for world, ended in found.items():
        assert ended.codes == [0] * world, ended.printed
    return found


@pytest.fixture
def two(groups: dict[int, Ended]) -> Ended:
    return groups[2]


def counts(table: Any) -> list[Any]:
    return [(row["name"], row["own"], row["unreached"], row["count"]) for row in table["rows"]]


def as_json(found: Any) -> Any:
    return json.loads(json.dumps(found))


# fully_shard --------------------------------------------------------------------------------------


@pytest.mark.parametrize("world,name,rule,one", ALL)
def test_a_trace_of_units_is_that_of_the_whole_model(
    groups: dict[int, Ended], world: int, name: str, rule: str, one: bool
) -> None:
    for rank, found in enumerate(groups[world].each("fsdp", f"{name} {rule}")):
        table = traced(model(name), given(name, rank), rule, one).influence()
        assert found == as_json(table.to_dict())


@pytest.mark.parametrize("world,name,rule,one", ALL)
def test_training_goes_on_after_a_trace(
    groups: dict[int, Ended], world: int, name: str, rule: str, one: bool
) -> None:
    net = model(name)
    sum(losses(net, given(name, n)).sum() for n in range(world)).backward()  # type: ignore[union-attr]
    want = [float(p.grad.sum()) / world for p in net.parameters() if p.grad is not None]
    for found in groups[world].each("fsdp", f"{name} {rule} goes on"):
        assert found == pytest.approx(want, rel=1e-9, abs=1e-12)


@cache
def whole(rank: int) -> dict[str, Any]:
    return as_json(dict(shards.measured(model("transformer"), rank)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("measure", shards.MEASURES)
def test_every_measure_is_that_of_the_whole_model(two: Ended, measure: str) -> None:
    for rank, found in enumerate(two.each("fsdp", measure)):
        assert found == whole(rank)[measure]


def test_units_that_stay_gathered_are_traced(two: Ended) -> None:
    for rank, found in enumerate(two.each("fsdp", "kept")):
        assert found == as_json(traced(model("mlp"), given("mlp", rank)).influence().to_dict())


def test_gradients_are_those_of_the_whole_model(two: Ended) -> None:
    for rank, found in enumerate(two.each("fsdp", "gradients")):
        want = shards.gradients(model("transformer"), given("transformer", rank))
        assert list(found) == list(want)
        assert found == pytest.approx(want)


def test_never_are_all_units_in_memory(two: Ended) -> None:
    for forward, trace, after in two.each("fsdp", "most gathered"):
        assert trace <= forward == 2  # of three: the root and one block
        assert after == 1  # FSDP keeps the root until the backward pass


def test_what_cannot_be_traced_is_refused(two: Ended) -> None:
    for what in ("unwatched", "unwatched backward"):
        for message in two.each("fsdp", what):
            assert message.startswith("Unsupported: a leaf of shape (11, 8) is a parameter that")
            assert "inside gradtrace.watch(model)" in message
    for message in two.each("fsdp", "stepped"):
        assert "changed in place since the trace was made" in message
    first, second = two.each("fsdp", "not finite")
    assert first.startswith("NonFinite: a gradient of another rank")
    assert second.startswith("NonFinite: the gradient of embed.weight")


def test_a_monitor_traces_units_together(two: Ended) -> None:
    assert two.each("fsdp", "same weights") == [True, True]
    net = model("transformer")
    optimiser = torch.optim.SGD(net.parameters(), 0.1)
    for step in range(5):
        parts = [losses(net, given("transformer", 2 * step + rank)).mean() for rank in range(2)]
        if step % 4 == 0:
            for rank, found in enumerate(two.each("fsdp", f"monitor {step}")):
                with gt.watch(net, composed=False) as watch:
                    loss = losses(net, given("transformer", 2 * step + rank)).mean()
                want = as_json(watch.trace(loss).influence().to_dict())
                assert counts(found) == counts(want)
        (sum(parts) / 2).backward()  # type: ignore[union-attr]
        optimiser.step()
        optimiser.zero_grad()
