"""The competition of planted components: tasks, networks, endpoints and verdicts."""

from __future__ import annotations

import json
from math import isnan, log2
from typing import Any

import degenerate
import numpy as np
import pytest
import torch

import gradtrace as gt
from gradtrace.experiments import planted_competition, rival_verdicts
from gradtrace.experiments.harness.findings import Cell, Row
from gradtrace.experiments.planted_scores import BASELINES, MEASURES
from gradtrace.experiments.question_tasks import FAMILIES, draw_tasks
from gradtrace.experiments.rival_networks import CONTESTS, LONGEST, RivalNetwork, build_rivals
from gradtrace.experiments.rival_verdicts import CEILING, TAYLOR, Contests, Trial

SMALL = planted_competition.QUICK | {
    "families": ["recall"],
    "budget": 1,
    "traced": 4,
    "evaluated": 16,
    "width": 4,
    "batch": 8,
}


def nothing(_: str) -> None:
    pass


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def network(contest: str, seed: str = "a") -> RivalNetwork:
    return build_rivals(contest, draw_tasks("recall", 1)[0], 4, seed)


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    """As the journal has them."""
    found = [
        (c, planted_competition.measure(c, nothing)) for c in planted_competition.cells(SMALL, 1)
    ]
    return [Row(*json.loads(json.dumps(each))) for each in found]


@pytest.fixture(autouse=True)
def fewer_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rival_verdicts, "ROUNDS", 200)


# Tasks --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_tasks_of_a_family_differ_and_can_be_answered(family: str) -> None:
    tasks = draw_tasks(family, 4)
    assert len({task.name for task in tasks}) == 4
    assert [task.name for task in draw_tasks(family, 4)] == [task.name for task in tasks]
    for task in tasks:
        words, answers = task.draw(600, generator())
        assert words.max() < task.letters and words.shape[1] <= LONGEST
        shares = torch.bincount(answers, minlength=task.classes) / 600
        assert len(shares) == task.classes and shares.max() < 2 / 3


def answers(family: str, number: int, words: list[list[int]]) -> list[int]:
    found: list[int] = draw_tasks(family, number + 1)[number].answer(torch.tensor(words)).tolist()
    return found


def test_answers_by_hand() -> None:
    assert draw_tasks("brackets", 1)[0].name.startswith("brackets: 2 kinds")
    assert answers("brackets", 0, [[0, 1, 2, 2, 2], [0, 1, 2, 1, 0], [2, 1, 0, 2, 2]]) == [2, 0, 2]
    assert answers("lookup", 0, [[0, 3, 1, 4, 1], [1, 2, 0, 4, 1]]) == [2, 0]
    asked = draw_tasks("latest", 1)[0].classes - 1
    assert answers("latest", 0, [[0, 1, asked], [asked, asked, asked]]) == [1, asked]


# Networks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("contest", CONTESTS)
def test_outputs_of_rivals_have_the_same_size_at_the_start(contest: str) -> None:
    model = network(contest)
    model.requires_grad_(False)
    h = model.stem(model.draw(2000, generator(3))[0])
    sizes = [float(part(h[:, int(k)]).std(0).mean()) for k, part in model.parts.items()]
    assert sizes == pytest.approx([1, 1, 1], rel=0.15)


def test_only_the_planted_one_can_tell() -> None:
    """Others read words that have nothing to do with the answer, or are not trained."""
    model = network("blind")
    words, said = model.draw(200, generator())
    for place in range(3):
        right = bool((model.task.answer(words[:, place]) == said).all())
        assert right == bool(model.truth[f"parts.{place}"])
    frozen = network("frozen")
    for name, planted in frozen.truth.items():
        own = frozen.get_submodule(name).parameters()
        assert {each.requires_grad for each in own} == {bool(planted)}
    assert {network("blind", str(k)).planted for k in range(12)} == {0, 1, 2}


@pytest.mark.parametrize("contest", CONTESTS)
def test_the_rest_begins_as_in_the_whole(contest: str) -> None:
    whole, rest = network(contest), network(contest).leave_out(["parts.1"])
    assert set(rest.parts) == {"0", "2"}
    kept = dict(whole.named_parameters())
    assert all(torch.equal(each, kept[name]) for name, each in rest.named_parameters())
    x, _ = whole.draw(8, generator())
    assert rest.outputs(x).shape == (8, whole.task.classes)


def test_a_stack_gives_back_what_was_pushed_first_last() -> None:
    """With its actions set by hand, the top after push, push, pop is what was pushed first."""
    stack: Any = network("mechanisms").get_submodule("parts.1").core
    with torch.no_grad():
        for each in stack.parameters():
            each.zero_()
        eye = torch.eye(4)
        stack.read.weight[:, :4], stack.push.weight[:] = 3 * eye, 3 * eye
        stack.act.weight[0, :2], stack.act.weight[1, 2] = 50.0, 200.0  # 0 and 1 push, 2 pops
        words = torch.tensor([[0, 1, 2], [1, 0, 2]])
        stack.read.weight[:, 8:] = eye  # the top is read at the end
        found = stack(eye[words])
    assert found.argmax(1).tolist() == [0, 1]


# What is measured ---------------------------------------------------------------------------------


def test_rows_have_all_scores_and_endpoints(rows: list[Row]) -> None:
    assert {row.cell["contest"] for row in rows} == set(CONTESTS)
    for row in rows:
        parts = set(row.result["names"])
        assert [look["step"] for look in row.result["looks"]] == [0, 1]
        for look in row.result["looks"]:
            assert set(look["scores"]) == {*MEASURES, *BASELINES}
            assert all(set(each) == parts for each in look["scores"].values())
            for rule in ("greedy", "edge", "viterbi", "decomposition"):
                assert sum(look["scores"][rule].values()) == pytest.approx(1, abs=1e-3)
        assert set(row.result["without"]) == set(row.result["held"]) == parts


def test_the_loss_at_once_is_that_of_mean_ablation() -> None:
    model = network("recurrent")
    held = model.draw(64, generator())
    found = planted_competition._ablated(model, held)
    with torch.no_grad():
        h = model.stem(held[0])
        every = [part(h[:, int(k)]) for k, part in model.parts.items()]
        every[1] = every[1].mean(0).expand_as(every[1])
        scores = model.out(torch.stack(every).mean(0))
        loss = torch.nn.functional.cross_entropy(scores, held[1])
        whole = model.losses(*held).mean()
    assert found["parts.1"] == pytest.approx(float(loss - whole), abs=1e-6)
    assert gt.ablate is not None


def test_training_stops_at_the_target() -> None:
    (cell, *_) = planted_competition.cells(SMALL | {"budget": 9, "evaluations": 3, "every": 2}, 1)
    looks: list[dict[str, Any]] = []
    model = planted_competition._network(cell)
    held = model.draw(16, generator())
    assert planted_competition._train(model, cell | {"target": 0.0}, held, looks) == 3
    assert [look["step"] for look in looks] == [0, 2, 3]
    assert planted_competition._train(model, cell | {"target": 1.1, "budget": 1}, held) is None


# Verdicts -----------------------------------------------------------------------------------------


def test_pairs_in_order() -> None:
    costs = {"a": 1.0, "b": 0.5, "c": 0.49}
    assert rival_verdicts.in_order({"a": 3, "b": 1, "c": 2}, costs, 0.02) == 1.0
    assert rival_verdicts.in_order({"a": 1, "b": 2, "c": 3}, costs, 0.02) == 0.0
    assert rival_verdicts.in_order({"a": 1, "b": 1, "c": 0}, costs, 0.02) == 0.75
    assert isnan(rival_verdicts.in_order(costs, dict.fromkeys(costs, 0.0), 0.02))


def made(tasks: int, good: dict[str, float], seeds: int = 2) -> list[Row]:
    """Networks in which a measure has the right order with some chance; others know nothing."""
    source, found = np.random.default_rng(0), []
    for task in range(tasks):
        for seed in range(seeds):
            for contest in CONTESTS:
                costs = {f"parts.{k}": float(x) for k, x in enumerate(source.permutation(3))}
                looks = [_look(step, costs, good, source) for step in (0, 20, 40)]
                cell: Cell = {"seed": seed, "contest": contest, "budget": 80}
                result = {
                    "task": f"task {task}",
                    "names": dict.fromkeys(costs, "gru"),
                    "truth": {},
                    "looks": looks,
                    "reached": 20,
                    "right": 1.0,
                    "held": costs,
                    "other": costs,
                    "without": {name: 20 * 2 ** int(cost) for name, cost in costs.items()},
                }
                found.append(Row(cell, result))
    return found


def _look(
    step: int, costs: dict[str, float], good: dict[str, float], source: Any
) -> dict[str, Any]:
    scores = {}
    for name in (*MEASURES, *BASELINES):
        known = source.random() < good.get(name, 0.0)
        noise = dict(zip(costs, map(float, source.random(3))))
        scores[name] = {part: cost + 1 for part, cost in costs.items()} if known else noise
    return {"step": step, "scores": scores}


def test_verdicts() -> None:
    same = {"greedy": 1.0, "edge": 0.6, TAYLOR: 1.0}
    said = rival_verdicts.verdicts(Contests([Trial(row) for row in made(12, same)]))
    assert said["greedy", "loss"][1::2] == ("tells", "equivalent")
    assert said["edge", "loss"].taylor == "worse" and said["edge", "samples"].chance == "tells"
    assert said["viterbi", "loss"].chance in ("cannot tell", "a guess")
    better = rival_verdicts.verdicts(Contests([Trial(row) for row in made(12, {"greedy": 1.0})]))
    assert better["greedy", "loss"].taylor == "better"
    few = rival_verdicts.verdicts(Contests([Trial(row) for row in made(4, same)]))
    assert {v.chance for v in few.values()} == {"cannot tell"} == {v.taylor for v in few.values()}


def test_that_nothing_is_told_takes_many_tasks() -> None:
    gaps = np.random.default_rng(0).normal(0, 0.01, 500)
    assert rival_verdicts._against_chance((0.0, gaps), False, 12) == "a guess"
    assert rival_verdicts._against_chance((0.0, 10 * gaps), False, 12) == "cannot tell"
    assert rival_verdicts._against_chance((-0.2, gaps), True, 12) == "misleads"


def test_intervals_draw_tasks_and_not_only_networks() -> None:
    """Where tasks differ and seeds do not, more seeds make no interval narrower."""
    rows = made(10, {}, seeds=6)
    for row in rows:
        right = int(row.result["task"].split()[1]) % 2 == 0
        for look in row.result["looks"]:
            costs = row.result["held"]
            look["scores"]["greedy"] = {p: c + 1 if right else 4 - c for p, c in costs.items()}
    key = ("greedy", "loss", "training")
    many = Contests([Trial(row) for row in rows]).share(key)
    one = Contests([Trial(row) for row in rows if row.cell["seed"] == 0]).share(key)
    assert many.value == one.value == 0.5
    assert many.high - many.low == pytest.approx(one.high - one.low, abs=0.05)
    assert many.high - many.low > 0.4


def test_networks_without_a_component_that_never_get_there_count_with_the_budget() -> None:
    (row, *_) = made(1, {})
    row.result["without"] = {"parts.0": None, "parts.1": 20, "parts.2": 40}
    assert Trial(row).costs["samples"] == {"parts.0": log2(4), "parts.1": 0.0, "parts.2": 1.0}
    row.result["reached"] = None
    assert Trial(row).costs["samples"] == {}


def test_the_sentence_follows_the_numbers() -> None:
    worse = rival_verdicts.conclude(made(12, {"greedy": 0.3, TAYLOR: 1.0}))
    assert ": influence is worse." in rival_verdicts.headline(worse.facts)
    better = rival_verdicts.conclude(made(12, {"greedy": 1.0}))
    assert ": influence is better." in rival_verdicts.headline(better.facts)
    assert "too few" in rival_verdicts.headline(rival_verdicts.conclude(made(2, {})).facts)
    worse.facts["verdicts"]["loss"]["greedy"] = ["tells", "cannot tell"]
    worse.facts["less Taylor"]["loss"]["greedy"] = [-0.10, -0.17, -0.02]
    told = rival_verdicts.headline(worse.facts)
    assert "influence is probably worse, by 10 [2, 17] points, but" in told
    worse.facts["less Taylor"]["loss"]["greedy"] = [-0.10, -0.22, 0.02]
    assert "cannot be told" in rival_verdicts.headline(worse.facts)
    shares = better.facts["pairs in order"]["loss"]
    assert shares["greedy"][0] == shares[CEILING][0] == 1.0


def test_findings(rows: list[Row]) -> None:
    found = planted_competition.conclude(rows)
    assert found.sentence.startswith("4 networks of three rivals, 1 tasks")
    assert planted_competition.conclude(rows[::-1]) == found
    assert planted_competition.conclude([]).sentence.startswith("No two components")


@degenerate.every
def test_whatever_is_measured(rows: list[Row], kind: str) -> None:
    degenerate.concludes(planted_competition, rows, kind)
