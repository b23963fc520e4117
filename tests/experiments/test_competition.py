"""Components in competition: what cannot be otherwise, whatever the noise."""

from __future__ import annotations

import json
from collections import Counter
from math import log2
from pathlib import Path
from random import Random

import degenerate
import pytest
import torch
from torch import Tensor, nn

import gradtrace as gt
from gradtrace.errors import GradtraceError
from gradtrace.experiments import branch_ablation, competition, contest, languages, rivals, text
from gradtrace.experiments.harness.findings import Cell, Findings, Row
from gradtrace.experiments.rivals import RULES, Network, Rivals

SMALL = competition.QUICK | {
    "tasks": ["copy"],
    "steps": 8,
    "every": 2,
    "pairs": 2,
    "traced": 2,
    "evaluated": 16,
    "width": 6,
}


def nothing(_: str) -> None:
    pass


def measured(cell: Cell) -> Row:
    """A row as the journal has it."""
    return Row(*json.loads(json.dumps([cell, competition.measure(cell, nothing)])))


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return [measured(cell) for cell in competition.cells(SMALL, 2)]


# Languages ----------------------------------------------------------------------------------------


def sequences(name: str) -> list[list[int]]:
    """Whole sequences, without what fills them up."""
    batch = languages.LANGUAGES[name]().batch(200, torch.Generator().manual_seed(1))
    found = []
    for tokens, targets in zip(batch.tokens.tolist(), batch.targets.tolist()):
        last = max(n for n, target in enumerate(targets) if target != languages.UNSCORED)
        found.append([*tokens[: last + 1], targets[last]])
    return found


@pytest.mark.parametrize(("name", "step"), [("copy", 1), ("reversal", -1)])
def test_words_come_again(name: str, step: int) -> None:
    lengths = set()
    for *both, end in sequences(name):
        half = both.index(4)
        assert end == 5 and both[half + 1 :] == both[:half][::step]
        lengths.add(half)
    assert lengths == {1, 2, 3, 4, 5}


def test_brackets_balance() -> None:
    for begin, *word in sequences("dyck"):
        assert begin == 4 and len(word) == 12
        stack: list[int] = []
        for bracket in word:
            if bracket < 2:
                stack.append(bracket)
            else:
                assert stack.pop() == bracket - 2
        assert not stack


def test_letters_are_counted() -> None:
    for begin, *word, end in sequences("counting"):
        assert begin == end == 3 and word == sorted(word)
        assert len({Counter(word)[letter] for letter in range(3)}) == 1


@pytest.mark.parametrize("name", languages.LANGUAGES)
def test_targets_are_the_next_tokens(name: str) -> None:
    task = languages.LANGUAGES[name]()
    tokens, targets = task.batch(50, torch.Generator().manual_seed(0))
    asked = targets[:, :-1] != languages.UNSCORED
    assert (tokens[:, 1:][asked] == targets[:, :-1][asked]).all()
    assert int(tokens.max()) < task.vocabulary
    again = task.batch(50, torch.Generator().manual_seed(0))
    assert torch.equal(tokens, again.tokens) and torch.equal(targets, again.targets)
    assert not torch.equal(tokens, task.batch(50, torch.Generator().manual_seed(1)).tokens)


def test_an_odd_number_of_brackets_is_refused() -> None:
    with pytest.raises(GradtraceError, match="even"):
        languages.dyck(5)


# Text ---------------------------------------------------------------------------------------------


def test_words_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "éclair.txt"
    file.write_text(
        "the cat sat\nthe dög ran\n" * 30 + "unseen words here\n" * 12, encoding="utf-8"
    )
    task = text.words(file, most=4, length=5, held=0.2)
    assert task.name == "éclair" and task.vocabulary == 4
    batch = task.batch(8, torch.Generator().manual_seed(0))
    assert torch.equal(batch.tokens[:, 1:], batch.targets[:, :-1])
    # what is held out is of words that are not in the part that is trained on
    assert set(task.evaluation(64, torch.Generator()).tokens.flatten().tolist()) <= {0, 1, 2, 3}
    assert int(task.evaluation(64, torch.Generator()).tokens.eq(0).sum()) > 64


def test_the_vocabulary_is_of_the_most_frequent() -> None:
    assert text.vocabulary(["b", "a", "b", "<unk>", "c", "a"], 3) == {"<unk>": 0, "a": 1, "b": 2}


def test_a_text_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_text("too short")
    with pytest.raises(GradtraceError, match="longer"):
        text.words(file)
    file.write_bytes(b"\xff\xfe\xff" * 100)
    with pytest.raises(GradtraceError, match="UTF-8"):
        text.words(file)


def test_the_story_agrees() -> None:
    """A noun of many has a verb of many, also over a clause between."""
    for line in text.story(200).splitlines():
        first, noun, *rest = line.split()
        many = first in ("some", "all") or noun.endswith("s") or noun == "children"
        verbs = {*text.RUNS, *text.SEES}
        verb = next(word for word in rest if word in verbs or word.rstrip("s") in verbs)
        assert (verb in verbs) == many, line


# The network --------------------------------------------------------------------------------------


def test_cells_are_all_sets_but_the_whole() -> None:
    cells = competition.cells(competition.FULL, 10)
    assert len(cells) == 4 * 10 * 7
    assert cells == competition.cells(competition.FULL, 10)
    json.dumps(cells)


def test_what_is_left_starts_as_in_the_full_network() -> None:
    full, without, *_ = competition.cells(SMALL, 1)
    first = competition.build(full, competition.COMPONENTS, 6)
    second = competition.build(without, competition.COMPONENTS, 6)
    assert set(first.components) - set(second.components) == {"rnn"}
    there = first.state_dict()
    for name, weight in second.state_dict().items():
        assert torch.equal(weight, there[name])


def test_outputs_are_averaged() -> None:
    cell = competition.cells(SMALL, 1)[0]
    model = competition.build(cell, competition.COMPONENTS, 6)
    tokens = torch.randint(6, (2, 5), generator=torch.Generator().manual_seed(0))
    x = model.embed(tokens)
    mean = sum(part(x)[0] for part in model.components.values()) / 3
    assert torch.allclose(model(tokens), model.output(mean), atol=1e-6)


def test_losses_of_samples_are_those_of_each_alone() -> None:
    cell = competition.cells(SMALL, 1)[0]
    model = competition.build(cell, competition.COMPONENTS, 6)
    batch = languages.copy().batch(4, torch.Generator().manual_seed(0))
    together = competition.losses(model, batch)
    for n in range(4):
        alone = languages.Batch(batch.tokens[n : n + 1], batch.targets[n : n + 1])
        assert torch.allclose(together[n], competition._loss(model, alone))


def test_a_cell_is_the_same_in_any_order_and_leaves_the_caller_alone(rows: list[Row]) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    onednn = torch.backends.mkldnn.enabled
    assert measured(rows[0].cell).result == rows[0].result
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.backends.mkldnn.enabled == onednn


def test_only_the_full_network_is_traced(rows: list[Row]) -> None:
    for row in rows:
        assert bool(row.result["scores"]) == (not row.cell["removed"])
        curve = row.result["curve"]
        assert [samples for samples, _ in curve] == [step * 32 for step in (0, 2, 4, 6, 8)]


def test_findings(rows: list[Row]) -> None:
    found = competition.conclude(rows)
    assert found == competition.conclude(rows[::-1])
    assert found.facts["networks"] == 2
    assert found.facts["shares add up"]
    assert found.facts["verdicts"] == dict.fromkeys(RULES, "cannot tell from 2 networks")
    assert "2 networks are too few" in found.sentence and "predicts it" not in found.sentence
    for table in found.tables:
        assert all(len(row) == len(table.columns) for row in table.rows)


def test_one_task_is_judged_by_its_networks(rows: list[Row]) -> None:
    """Not drawn again, it is all that is spoken of; with two, tasks are drawn, and are too few."""
    many = [
        Row(row.cell | {"seed": row.cell["seed"] + 2 * k, "task": task}, row.result)
        for row in rows
        for k in range(4)
        for task in ("copy", "other")
    ]
    one = competition.conclude([row for row in many if row.cell["task"] == "copy"])
    said = competition.headline(one.facts)
    assert said.startswith("On one task, ") and "8 networks" in said and "of others" in said
    assert "In this one task" in one.sentence and "of this one task" in one.tables[0].note
    two = competition.conclude(many)
    assert "2 tasks are too few" in competition.headline(two.facts)
    assert two.facts["verdicts"] == dict.fromkeys(RULES, "cannot tell from 2 tasks")


def test_networks_that_are_not_complete_are_left_out(rows: list[Row]) -> None:
    assert competition.conclude(rows[:-5]).facts["networks"] == 1
    assert "nothing" in competition.conclude(rows[:2]).sentence


# Components and data of one's own -----------------------------------------------------------------

MINE = """
from torch import nn
from gradtrace.experiments.languages import Word, task

def conv(width):
    return nn.Sequential(nn.Linear(width, width), nn.ReLU())

def abc():
    return task("abc", 3, lambda draw: Word([0, 1, 2, 0, 1, 2]), 6)
"""


def test_components_and_tasks_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    settings = SMALL | {"components": ["gru", f"{file}:conv"], "tasks": [f"{file}:abc"], "steps": 2}
    cells = competition.cells(settings, 1)
    assert [cell["removed"] for cell in cells] == [[], ["gru"], ["conv"]]
    found = competition.conclude([measured(cell) for cell in cells])
    assert found.facts["networks"] == 1 and found.facts["shares add up"]
    file.write_text(MINE + "# changed")
    with pytest.raises(GradtraceError, match="changed"):
        competition.measure(cells[0], nothing)


class Silent(nn.Module):
    """Has weights, but its output is always 0."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale * 0


def test_what_does_nothing_has_no_influence_and_costs_nothing_at_once() -> None:
    components = {"gru": competition.COMPONENTS["gru"], "silent": Silent}
    cell = competition.cells(SMALL | {"components": ["gru", "silent"]}, 1)[0]
    result = competition.trained(cell, components, languages.copy(), nothing)
    for scores in result["scores"]:
        for name in RULES.values():
            assert scores[name] == {"gru": 1.0, "silent": 0.0}
        assert scores["gradient norm"]["silent"] == 0
    assert result["zeroed"]["silent"] == pytest.approx(result["curve"][-1][1], rel=1e-6)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"components": ["rnn"]}, "two components"),
        ({"components": ["rnn", "rnn"]}, "different names"),
        ({"components": ["rnn", "nosuch"]}, "one of rnn, lstm, gru"),
        ({"components": ["rnn", "math:nosuch"]}, "no 'nosuch' in math"),
        ({"components": ["rnn", "nosuch.py:f"]}, "there is no file"),
        ({"tasks": ["nosuch"]}, "one of copy"),
        ({"text": "nosuch.txt"}, "there is no file"),
    ],
)
def test_bad_settings(settings: dict[str, object], words: str) -> None:
    with pytest.raises(GradtraceError, match=words):
        competition.measure(competition.cells(SMALL | settings, 1)[0], nothing)
    with pytest.raises(GradtraceError, match="no setting"):
        competition.compete(nosuch=1)


# Statistics ---------------------------------------------------------------------------------------


def trial(curves: dict[frozenset[str], list[tuple[int, float]]]) -> contest.Trial:
    first, last = {"a": 1.0, "b": 2.0}, {"a": 3.0, "b": 2.5}
    scores = [{"step": 0, "score": first}, {"step": 1, "score": last}]
    return contest.Trial("task", 0, ("a", "b"), curves, scores, {"a": 1.5, "b": 2.0})


def test_samples_to_target_by_hand() -> None:
    full = [(0, 16.0), (100, 4.0), (200, 1.0), (300, 0.5), (400, 0.25)]
    slow = [(0, 16.0), (100, 8.0), (200, 4.0), (300, 2.0), (400, 1.0)]
    never = [(0, 16.0), (400, 3.0)]
    one = trial({frozenset(): full, frozenset("a"): slow, frozenset("b"): never})
    assert one.target == pytest.approx(16**0.1)  # the lowest of the first half is 1
    assert one.samples() == pytest.approx(200 - 100 * (one.target - 1) / 3)
    assert one.samples("a") == pytest.approx(400 - 100 * (one.target - 1))
    assert one.censored("b") and one.samples("b") == one.budget == 400
    rivals_ = one.rivals(one.means)
    assert rivals_.scores["score"] == [2.0, 2.25]
    assert rivals_.costs["samples"] == [log2(one.samples(n) / one.samples()) for n in "ab"]
    assert rivals_.costs["zeroed"] == [1.25, 1.75]
    assert one.order("score") == ["b", "a"]


def made(count: int, noise: float, seed: int = 0) -> list[Network]:
    """Networks whose greedy score is the cost with noise, and whose other scores know nothing."""
    source, found = Random(seed), []
    for n in range(count):
        cost = [source.random() for _ in range(3)]
        scores = {kind: [source.random() for _ in range(3)] for kind in rivals.BASELINES}
        scores |= {RULES["viterbi"]: [source.random() for _ in range(3)]}
        scores |= {RULES["greedy"]: [c + noise * source.gauss(0, 1) for c in cost]}
        found.append(Network("task", n, (Rivals(("a", "b", "c"), scores, {"samples": cost}),)))
    return found


def test_equal_shares_over_training_tie() -> None:
    """Whatever their order: ``sum`` differs in the last bit, and by the version of Python."""
    shares = [(0.1, 0.9), (0.2, 0.8), (0.9, 0.1), (0.8, 0.2)]  # means of 0.5 each
    looks = [{"step": k, "score": {"a": a, "b": b}} for k, (a, b) in enumerate(shares)]
    curves = {frozenset(): [(0, 4.0), (10, 1.0)]}
    one = contest.Trial("task", 0, ("a", "b"), curves, looks, {})
    assert one.means["score"]["a"] == one.means["score"]["b"] == 0.5


def test_a_score_that_knows_is_found_out() -> None:
    networks = made(60, noise=0.0)
    assert rivals.correlation(networks, RULES["greedy"], "samples") == (1, 1, 1)
    assert abs(rivals.correlation(networks, "random", "samples").value) < 0.4
    assert rivals.difference(networks, RULES["greedy"], "random", "samples").sign == 1
    words = rivals.sentence(networks, "samples", "it all")
    assert "Influence by greedy predicts it" in words
    assert "greedy is better than gradient norm" in words
    assert rivals.hits(networks, RULES["greedy"], "samples")[0] == 1


def test_intervals_cover_as_often_as_they_say() -> None:
    """Of scores that know nothing, about one in twenty intervals leaves out 0."""
    wrong = sum(
        rivals.correlation(made(30, 0.3, seed), kind, "samples").sign != 0
        for seed in range(30)
        for kind in ("random", "size", "gradient norm")
    )
    assert wrong <= 13


def test_rivals_that_cost_the_same_add_nothing() -> None:
    tied = Network("task", 99, (Rivals(("a", "b"), {"s": [1.0, 2.0]}, {"samples": [3.0, 3.0]}),))
    other = Network("task", 1, (Rivals(("a", "b"), {"s": [1.0, 2.0]}, {"samples": [1.0, 3.0]}),))
    assert rivals.correlation([tied], "s", "samples").sign == 0
    found = rivals.correlation([tied, other], "s", "samples").value
    assert found == pytest.approx(0.5**0.5)
    assert rivals.hits([tied], "s", "samples") == (1.0, 1.0)


def test_the_opposite_is_said() -> None:
    assert rivals.verdict(rivals.Interval(-0.5, -0.7, -0.2), 30) == "predicts the opposite"
    words = rivals.stated("x", rivals.Interval(-0.5, -0.7, -0.2), 30)
    assert words.startswith("x predicts the opposite of it")


# Branches -----------------------------------------------------------------------------------------

TINY = branch_ablation.QUICK | {"steps": 10, "every": 2, "pairs": 2, "traced": 2, "evaluated": 32}


@pytest.fixture(scope="module")
def branches() -> tuple[list[Row], Findings]:
    found = []
    for cell in branch_ablation.cells(TINY, 2):
        result = branch_ablation.measure(cell, nothing)
        found.append(Row(*json.loads(json.dumps([cell, result]))))
    return found, branch_ablation.conclude(found)


def test_branches_findings(branches: tuple[list[Row], Findings]) -> None:
    rows, found = branches
    assert found.facts["sides add up"]
    assert found.facts["networks"] == 4
    assert found.facts["diamonds"] == sum(len(row.result["rivals"]) for row in rows)
    assert found == branch_ablation.conclude(rows[::-1])
    assert "4 networks are too few" in found.sentence
    assert branch_ablation.measure(rows[1].cell, nothing)["curve"][-1][1] == pytest.approx(
        rows[1].result["curve"][-1][1], abs=0
    )


def test_a_removed_branch_learns_nothing() -> None:
    cell = branch_ablation.cells(TINY, 1)[0]
    model = branch_ablation.network(cell)
    name, part = next(iter(model.components().items()))
    goal, x = branch_ablation.teacher(cell), torch.ones(3, 10)
    with gt.ablate(model, part):
        branch_ablation.losses(model, goal, x).mean().backward()
    gradients = [weight.grad for weight in model.get_submodule(part).parameters()]
    assert not any(bool(gradient.any()) for gradient in gradients if gradient is not None)
    assert name == "1.left"


def test_sides_of_equal_size_are_told() -> None:
    equal = branch_ablation.cells(TINY, 1)[1]
    assert equal["kind"] == "equal" and equal["width"] == [12, 12]
    scores = {"size": [3.0, 3.0]}
    same = Rivals(("a", "b"), scores, {})
    other = Rivals(("a", "b"), {"size": [3.0, 4.0]}, {})
    found = branch_ablation._equal([Network("x", 0, (same, other)), Network("x", 1, (other,))])
    assert found == [Network("x", 0, (same,))]


@degenerate.every
def test_degenerate_measurements_are_concluded_from(rows: list[Row], kind: str) -> None:
    degenerate.concludes(competition, rows, kind)


@degenerate.every
def test_branches_are_concluded_from_degenerate_measurements(
    branches: tuple[list[Row], Findings], kind: str
) -> None:
    degenerate.concludes(branch_ablation, branches[0], kind)
