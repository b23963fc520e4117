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
from shards import CASES, PARALLEL_CASES, PLANS, given, losses, model, tokens, traced

import gradtrace as gt
from gradtrace.table import Table

PARALLEL = [(world, *case) for world, cases in PARALLEL_CASES.items() for case in cases]
ALL = [(world, *case) for world, cases in CASES.items() for case in cases]


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Ended]:
    asked = {
        n: Group("fsdp,tensor_parallel", n, tmp_path_factory.mktemp(f"ranks{n}")) for n in (2, 4)
    }
    found = dict(zip(asked, started("shards", *asked.values())))
    for ended in found.values():
        ended.check()
    return found


@pytest.fixture
def two(groups: dict[int, Ended]) -> Ended:
    return groups[2]


def counts(table: Any) -> list[Any]:
    rows = Table.from_dict(table)
    return [(r.name, r.own, r.unreached, r.through, r.eligible) for r in rows]


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


def test_hooks_of_users_run_and_those_of_units_do_not(two: Ended) -> None:
    for rank, found in enumerate(two.each("fsdp", "hooked")):
        assert found == as_json(shards.hooked(model("transformer"), given("transformer", rank)))


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
    assert second.startswith("NonFinite: the loss is not finite (nan), and the gradient of embed")


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
                shares = watch.trace(loss).influence().shares
                assert found == {f"share {n}": s for n, s in shares.items() if s == s}
        (sum(parts) / 2).backward()  # type: ignore[union-attr]
        optimiser.step()
        optimiser.zero_grad()


# Tensor parallel ---------------------------------------------------------------------------------


@pytest.mark.parametrize("world,plan,rule,one", PARALLEL)
def test_a_trace_of_parts_is_that_of_the_whole_model(
    groups: dict[int, Ended], world: int, plan: str, rule: str, one: bool
) -> None:
    net = model(PLANS[plan])
    table = traced(net, tokens(PLANS[plan]), rule, one).influence()
    for found in groups[world].each("tensor_parallel", f"{plan} {rule} {one}"):
        assert counts(found) == counts(as_json(table.to_dict()))
        shares = Table.from_dict(found).column("weighted")
        assert shares == pytest.approx(table.column("weighted"), rel=1e-9, nan_ok=True)


@pytest.mark.parametrize("world,plan", [(2, "layers"), (2, "sequence"), (4, "layers")])
def test_training_of_parts_goes_on(groups: dict[int, Ended], world: int, plan: str) -> None:
    want = shards.training(model("decoder"), tokens("decoder"))
    for found in groups[world].each("tensor_parallel", f"{plan} goes on"):
        assert found == pytest.approx(want, rel=1e-9, abs=1e-12)


def test_measures_of_parts_are_those_of_the_whole_model(two: Ended) -> None:
    trace = traced(model("decoder"), tokens("decoder"), one=True)
    flow = {row.module: row.norm for row in trace.norms()}
    sums = {name: float(grad.square().sum()) for name, grad in trace.gradients.items()}
    for found in two.found("tensor_parallel"):
        ranks = dict(found)
        assert ranks["decompose"] == str(trace.decompose(["layers.1", "layers.0.attention"]))
        assert ranks["forks"] == as_json(trace.influence("forks").names)
        assert dict(ranks["levels"]) == pytest.approx(flow)
        assert ranks["gradient sums"] == pytest.approx(sums)


def test_data_sets_and_monitors_of_parts_are_refused(two: Ended) -> None:
    for found in map(dict, two.found("tensor_parallel")):
        assert "the model is tensor parallel" in found["data set"]
        assert "tensor" in found["monitor"] and "parallel" in found["monitor"]


def test_what_leads_to_other_ranks_is_refused(two: Ended) -> None:
    for found in map(dict, two.found("tensor_parallel")):
        for what in ("path", "mass"):
            assert "lead from one rank to another" in found[what]
        assert "names slices of a local part" in found["labelled"]
        assert "is a plain tensor that is used on local parts of a DTensor" in found["local leaf"]
        assert "run the forward pass inside gradtrace.watch(model)" in found["hooked"]
        assert found["unwatched"]
