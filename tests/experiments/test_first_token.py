"""Branches of attention: facts of paths that hold of any model, and the words of conclusions."""

from __future__ import annotations

import copy
import math
import re
from typing import Any

import degenerate
import pytest
import torch

import gradtrace as gt
from gradtrace.experiments import first_token as experiment
from gradtrace.experiments import first_token_model as task
from gradtrace.experiments.harness.findings import Row
from gradtrace.experiments.operator_paths import most_positive
from gradtrace.semirings import EXTREMES

SMALL = {"sequences": 300, "epochs": 1, "samples": 24, "few": 12, "side_by_side": 2}


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return [
        Row(cell, experiment.measure(cell, lambda _: None)) for cell in experiment.cells(SMALL, 3)
    ]


@pytest.fixture(scope="module")
def setup() -> tuple[task.Encoder, task.Data, torch.Tensor]:
    """A model whose patterns are not flat: larger weights than those that training starts with."""
    data = task.sequences(30, 3)
    model = task._fresh(3).double().requires_grad_(False)
    for each in model.parameters():
        if each.dim() == 2:
            each.mul_(20)
    return model, data, model.embed(data.words)


def test_sequences() -> None:
    words, labels, places = task.sequences(1000, 0)
    again = words[:, 1:] == words[:, :1]
    assert torch.equal(again.sum(1), labels)  # exactly once, or not at all
    assert int(labels.sum()) == 500 and int(words.min()) == 1 and int(words.max()) == 19
    assert torch.equal(again.int().argmax(1)[labels > 0] + 1, places[labels > 0])
    assert bool((places[labels == 0] == 0).all())


def test_models_side_by_side_are_models(setup: Any) -> None:
    """Scores of all at once are those of each; one that is trained beside others is as alone."""
    model, data, x = setup
    pair = [model, task._fresh(1).double()]
    weights = {
        name: torch.stack([each.get_parameter(name).detach() for each in pair])
        for name, _ in model.named_parameters()
    }
    scores = task.all_scores(weights, data.words.expand(2, -1, -1))
    for found, each in zip(scores, pair):
        torch.testing.assert_close(found, each(data.words))
    torch.testing.assert_close(model(data.words), model.read(dict.fromkeys(task.BRANCHES, x)))
    few = [task.sequences(96, seed) for seed in range(3)]
    beside = task.trained(few, [0, 1, 2], 2, lambda _: None)[1]
    (alone,) = task.trained(few[1:2], [1], 2, lambda _: None)
    for one, other in zip(beside.parameters(), alone.parameters()):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
    assert not torch.equal(alone.answer.weight, task._fresh(1).double().answer.weight)


def test_writings_have_equal_values_and_gradients(setup: Any) -> None:
    model, data, x = setup
    found = {}
    for writing in experiment.WRITINGS:
        _, score, watch = experiment.scored(model, x, data.labels, writing)
        found[writing] = watch.backward(score)
        operators = {each.name for each in watch.graph(score).operators}
        assert ("SoftmaxBackward0" in operators) is (writing == "fused")
        assert ("MaxBackward0" in operators) is (writing == "theirs")
        for name in task.BRANCHES:
            torch.testing.assert_close(found[writing][name], found["fused"][name])
    whole = x.clone().requires_grad_()
    score = model.read(dict.fromkeys(task.BRANCHES, whole)).gather(1, data.labels[:, None]).sum()
    (total,) = torch.autograd.grad(score, whole)
    torch.testing.assert_close(sum(found["fused"].values()), total)


def test_paths_of_operators_on_scalars_are_paths() -> None:
    """Where operators have one element nothing is summed inside: EXTREMES, though signs turn."""
    for seed in range(5):
        w = torch.randn(6, generator=torch.Generator().manual_seed(seed)).double()
        x = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
        a = (x * w[0]).tanh() + x * w[1]
        b = (a * w[2]) * (a * w[3]).sin()
        loss = b * w[4] - a * w[5] + b
        high, low = gt.backward(loss, EXTREMES, names={"x": x})["x"]
        found = most_positive(loss, {"x": x})["x"]
        torch.testing.assert_close(found, high)
        assert float(low) < float(found)


def test_sorting_again_by_hand() -> None:
    """A fork hands (3, 1) and (-2, 1); signs turn at the second element, then both are summed."""
    x = torch.tensor(1.0, requires_grad=True)
    value = x.expand(2) * torch.tensor([1.0, -1.0])
    loss = (value * torch.tensor([3.0, -2.0])).sum() + value.sum()
    # at value: most positive (3, 1), most negative (1, -2); times (1, -1): (3, -1) and (1, 2)
    assert float(most_positive(loss, {"x": x})["x"]) == 5.0  # sorted: (3, 2) are summed
    assert float(most_positive(loss, {"x": x}, sort=False)["x"]) == 3.0  # 3 - 1, 1 + 2


def test_gradient_where_nothing_forks() -> None:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    loss = (x @ torch.linspace(-1, 1, 8).view(4, 2) + torch.ones(2)).tanh().sum()
    (true,) = torch.autograd.grad(loss, x, retain_graph=True)
    torch.testing.assert_close(most_positive(loss, {"x": x})["x"], true)


def test_another_word_turns_the_answer(setup: Any) -> None:
    some = setup[1].repeated()
    for group in experiment.CLAIMED:
        words = experiment.another_word(some, group, 0)
        changed = (words != some.words).nonzero()
        assert torch.equal(changed[:, 0], torch.arange(len(words)))  # one word of each
        places = changed[:, 1]
        assert torch.equal(places, some.places * (group == "repeated"))
        assert bool((words > 0).all()) and not bool((words[:, 1:] == words[:, :1]).any())


def test_patching_reads_one_branch(setup: Any) -> None:
    """Other words than the first have no query or skip to be read; all branches: the new scores."""
    model, data, _ = setup
    some = data.repeated()
    effects = experiment.patched(model, some, "repeated", 1)
    by = dict(zip(task.BRANCHES, effects))
    assert float(by["query"].abs().max()) == float(by["skip"].abs().max()) == 0.0
    assert float(by["key"].abs().min()) > 0 and float(by["value"].abs().min()) > 0
    new = model(experiment.another_word(some, "repeated", 1))[:, 1]
    torch.testing.assert_close(effects[-1], model(some.words)[:, 1] - new)
    for name, effect in zip(task.BRANCHES, experiment.patched(model, some, "first", 1)):
        assert float(effect.abs().min()) > 0, name


def test_the_winner_takes_all() -> None:
    best = torch.tensor([5.0, 2.0, 0.0, 4.0])[:, None, None]
    assert experiment.won(best)[:, 0, 0].tolist() == [5.0, 0.0, 0.0, 0.0]


def test_a_cell_is_measured_the_same_again(rows: list[Row]) -> None:
    state = torch.get_rng_state()
    assert experiment.measure(rows[1].cell, lambda _: None) == rows[1].result
    assert torch.equal(state, torch.get_rng_state())
    assert [row.cell["seeds"] for row in rows] == [[0, 1], [2]]


def _learned(rows: list[Row], groups: dict[str, dict[str, float]]) -> list[Row]:
    found = [row._replace(result=copy.deepcopy(row.result)) for row in rows]
    for model in (each for row in found for each in row.result["models"]):
        model["accuracy"] = 1.0
        for kind in model["means"]:
            model["means"][kind] = copy.deepcopy(groups)
        model["patching"].update(copy.deepcopy(groups))
    return found


def test_conclusions(rows: list[Row]) -> None:
    assert "None of 3 models learned" in experiment.conclude(rows).sentence  # after one epoch
    assert all(each["silent"] for row in rows for each in row.result["models"])
    first = {"key": 1.0, "query": 3.0, "skip": 2.0, "value": 1.0, "together": 4.0}
    again = {"key": 4.0, "query": 0.0, "skip": 0.0, "value": 1.0, "together": 4.0}
    whole = {"key": 4.0, "query": 3.0, "skip": 2.0, "value": 1.0}
    learned = _learned(rows, {"all": whole, "first": first, "repeated": again})
    found = experiment.conclude(learned)
    assert experiment.conclude(learned[::-1]) == found
    assert found.facts["claims"]["theirs"] == dict.fromkeys(
        ("first", "repeated", "both", "key", "order"), 3
    )
    assert found.facts["agree"]["fused"] == 3
    assert (
        "by its key is open, and that the first word works by its query is open" in found.sentence
    )
    for model in (each for row in learned for each in row.result["models"]):
        model["means"]["fused"]["first"]["skip"] = 9.0
        model["patching"]["same"]["opened"] = dict.fromkeys(experiment.CLAIMED, 0.75)
        model["patching"]["same"]["fused"] = dict.fromkeys(experiment.CLAIMED, 0.5)
    found = experiment.conclude(learned)
    assert found.facts["claims"]["fused"]["both"] == 0 and found.facts["agree"]["fused"] == 0
    assert "opened operators name the branch of path patching more often" in found.sentence
    assert "opened less fused is 0.25 [0.25, 0.25]" in found.sentence
    assert "more with the opened one: fused less opened is -1.00 [-1.00, -1.00]" in found.sentence
    learned[0].result["models"][0]["accuracy"] = 0.9  # left out, and told of beside
    less = experiment.conclude(learned)
    assert "hold in 2 of 2 [34%, 100%] of these models opened by" in less.sentence
    assert "hold opened in 3 of 3 [44%, 100%] without sorting again" in less.sentence
    assert re.search(
        r"in 0 of \d+ \[0%, \d+%\] cut as PyTorch does", experiment.headline(found.facts)
    )
    many = found.facts["patched"]["first"] | {"query": 20}
    assert experiment.stands(many, "query", 20) == "stands"
    assert experiment.stands(many, "skip", 20) == "does not stand"


def test_wilson() -> None:
    """Newcombe (1998), table I: 81 of 263, and 0 of 20."""
    found = experiment.wilson(81, 263)
    assert math.isclose(found.low, 0.2553, abs_tol=1e-4)
    assert math.isclose(found.high, 0.3662, abs_tol=1e-4)
    none = experiment.wilson(0, 20)
    assert none.low == 0.0 and math.isclose(none.high, 0.1611, abs_tol=1e-4)


@degenerate.every
def test_degenerate_measurements_are_concluded_from(rows: list[Row], kind: str) -> None:
    degenerate.concludes(experiment, rows, kind)
