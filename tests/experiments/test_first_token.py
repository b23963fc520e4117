"""Branches of attention: facts of paths that hold of any model, and the words of conclusions."""

from __future__ import annotations

import copy
import math
from typing import Any

import degenerate
import pytest
import torch

import gradtrace as gt
from gradtrace.experiments import first_token as experiment
from gradtrace.experiments.harness.findings import Row

SMALL = {"sequences": 400, "epochs": [1], "samples": 24, "traced": 6}


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return [
        Row(cell, experiment.measure(cell, lambda _: None)) for cell in experiment.cells(SMALL, 2)
    ]


@pytest.fixture(scope="module")
def setup() -> tuple[experiment.Encoder, experiment.Data, torch.Tensor]:
    data = experiment.sequences(40, 3)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = experiment.trained(data, {"epochs": 2}, lambda _: None)
    return model, data, model.embed(data.words)


def test_sequences() -> None:
    words, labels, places = experiment.sequences(1000, 0)
    again = words[:, 1:] == words[:, :1]
    assert torch.equal(again.sum(1), labels)  # exactly once, or not at all
    assert int(labels.sum()) == 500 and int(words.min()) == 1 and int(words.max()) == 19
    assert torch.equal(again.int().argmax(1)[labels > 0] + 1, places[labels > 0])
    assert bool((places[labels == 0] == 0).all())


def test_facts_of_any_model(rows: list[Row]) -> None:
    for row in rows:
        assert row.result["facts"] == {"signs": True, "silent": True}
        # Greedy follows the branch of the largest gradient, viterbi that of the largest path.
        assert row.result["influence"]["apart"] < 1e-9
        for group in ("first", "repeated"):
            for shares in row.result["influence"][group].values():
                assert math.isclose(sum(shares.values()), 1)


def test_gradients_of_branches_add_up(setup: Any) -> None:
    model, data, x = setup
    leaves = experiment.copies(x)
    u = model.attend(leaves)
    parts = gt.backward(model.decide(u, u)[:, 0].sum(), names=leaves)
    whole = x.clone().requires_grad_()
    (total,) = torch.autograd.grad(model.read(whole)[:, 0].sum(), whole)
    torch.testing.assert_close(sum(parts.values()), total, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(model.read(x), model(data.words))


def test_by_operator_is_the_best_of_paths_of_operators(setup: Any) -> None:
    """Through the wide layer or past it; if one of the two is best everywhere, it is that one's."""
    model, data, x = setup
    leaves = experiment.copies(x)
    u = model.attend(leaves)
    fork = [u.detach().clone().requires_grad_() for _ in range(2)]
    score = model.decide(*fork).gather(1, data.labels[:, None]).sum()
    one, two = torch.autograd.grad(score, fork)
    keys = [
        torch.autograd.grad(u, leaves["key"], end, retain_graph=True)[0]
        for end in (torch.maximum(one, two), torch.minimum(one, two))
    ]
    found = experiment.by_operator(model, x, data.labels)["key"]
    torch.testing.assert_close(found, torch.maximum(*keys), rtol=1e-4, atol=1e-6)


def test_largest_path_is_that_of_trace(setup: Any) -> None:
    model, data, x = setup
    one = experiment.Data(*(field[:1] for field in data))
    values = experiment.by_path(model, x[:1], one.labels)["largest"]
    leaf = x[:1].clone().requires_grad_()
    score = model.read(leaf)[0, int(one.labels[0])]
    path = gt.trace(score, rule="viterbi", names={"x": leaf}).path("x", (0, 0, 5))
    best = max(float(values[name][0, 0, 5]) for name in experiment.BRANCHES)
    assert math.isclose(abs(path.weight), best, rel_tol=1e-4)


def test_the_winner_takes_all() -> None:
    values = {"key": [[[1.0, 5.0]]], "query": [[[2.0, 2.0]]], "skip": [[[0.0, -1.0]]]}
    values["value"] = [[[4.0, 4.0]]]
    tensors = {name: torch.tensor(value) for name, value in values.items()}
    won = experiment.words_of(tensors, win=True)[:, 0, 0].tolist()
    assert dict(zip(experiment.BRANCHES, won)) == {"key": 5.0, "query": 0, "skip": 0, "value": 0}
    best = experiment.words_of(tensors, win=False)[:, 0, 0].tolist()
    assert dict(zip(experiment.BRANCHES, best)) == {"key": 5, "query": 2, "skip": 0, "value": 4}


def test_a_cell_is_measured_the_same_again(rows: list[Row]) -> None:
    state = torch.get_rng_state()
    assert experiment.measure(rows[1].cell, lambda _: None) == rows[1].result
    assert torch.equal(state, torch.get_rng_state())


def test_conclusions(rows: list[Row]) -> None:
    assert "None of 2 models learned" in experiment.conclude(rows).sentence  # after one epoch
    learned = [row._replace(result=copy.deepcopy(row.result)) for row in rows]
    for row in learned:
        row.result["accuracy"] = 1.0
        for kind in row.result["means"].values():
            kind["won"]["all"] = {"key": 4.0, "query": 3.0, "skip": 2.0, "value": 1.0}
            kind["won"]["repeated"] = {"key": 4.0, "query": 0.0, "skip": 0.0, "value": 1.0}
            kind["won"]["first"] = {"key": 1.0, "query": 3.0, "skip": 2.0, "value": 1.0}
    found = experiment.conclude(learned)
    assert "Their claims hold in all of them" in found.sentence
    assert experiment.conclude(learned[::-1]) == found
    assert found.facts["claims"]["operator"] == {"order": 2, "key": 2, "repeated": 2, "first": 2}
    learned[0].result["means"]["operator"]["won"]["all"]["value"] = 9.0
    found = experiment.conclude(learned)
    assert "Their claims hold in part" in found.sentence
    assert found.facts["claims"]["operator"]["order"] == 1


def test_the_shortest_training_that_was_enough(rows: list[Row]) -> None:
    many = [
        Row({**row.cell, "epochs": n}, {**row.result, "accuracy": 1.0 if n > 1 else 0.5})
        for row in rows
        for n in (1, 2, 3)
    ]
    found = experiment.conclude(many)
    assert found.facts["epochs"] == 2 and "in 2 epochs" in found.sentence
    assert "after 2 epochs" in found.sentence and "after 3 epochs" in found.sentence
    assert experiment.conclude(many[::-1]) == found


@degenerate.every
def test_degenerate_measurements_are_concluded_from(rows: list[Row], kind: str) -> None:
    degenerate.concludes(experiment, rows, kind)
