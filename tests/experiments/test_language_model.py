"""A language model of the Penn Treebank's size: its text, its layers, its rows."""

from __future__ import annotations

import json
from collections import Counter
from math import exp, log

import degenerate
import pytest
import torch

import gradtrace as gt
from gradtrace.errors import GradtraceError
from gradtrace.experiments import language_model
from gradtrace.experiments.harness import results
from gradtrace.experiments.harness.findings import Findings, Row
from gradtrace.experiments.language_model_cost import device, groups
from gradtrace.experiments.language_models import build, evaluate, loss_of, streams
from gradtrace.experiments.treebank_text import TOPICS, Speaker, kinds, text, zipf

CPU = torch.device("cpu")
SETTINGS = language_model.QUICK | {
    "words": 100,
    "units": 6,
    "length": 4,
    "corpus": 1_000,
    "steps": 2,
    "moments": [0],
    "models": {"lstm": [1], "rnn": [1], "forward": [1, 2]},
    "lengths": [2, 4],
    "rounds": 1,
    "sample": 50,
    "paths": 10,
    "windows": 3,
    "every": 2,
}


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    found = []
    for cell in language_model.cells(SETTINGS, 2):
        if cell["seed"] and cell["kind"] != "lstm":
            continue
        result = language_model.measure(cell, lambda _: None)
        found.append(Row(cell, json.loads(json.dumps(result))))
    return found


@pytest.fixture(scope="module")
def found(rows: list[Row]) -> Findings:
    return language_model.conclude(rows)


# The text -----------------------------------------------------------------------------------------


def test_a_vocabulary_has_as_many_words_as_asked_for() -> None:
    for words in (100, 1_234, 10_000):
        known = kinds(words)
        assert known.words == words and min(known.size.values()) > 0
        assert known.start["end"] == 0
    assert sum(name.startswith("verb") for name in kinds(10_000).size) == 2 * TOPICS
    with pytest.raises(GradtraceError, match="at least 96 words"):
        kinds(90)


def test_chances_are_those_of_what_is_said() -> None:
    """Where a kind of words has a stated chance, it occurs as often; all chances add up to 1."""
    speaker = Speaker(3, 0)
    for _ in range(20_000):
        speaker.sentence()
    stated: dict[tuple[str, str], Counter[tuple[str, float]]] = {}
    pairs = zip(speaker.said, speaker.said[1:], speaker.surprisal[1:])
    for before, kind, surprisal in pairs:
        for context in ("that", "verb 0 one"):
            if before == context:
                stated.setdefault((before, ""), Counter())[kind, round(exp(-surprisal), 9)] += 1
    after = stated["that", ""]
    total = after.total()
    verbs = sum(n for (kind, _), n in after.items() if kind.startswith("verb"))
    assert verbs / total == pytest.approx(0.6, abs=0.02)
    for (kind, chance), n in after.items():
        if not kind.startswith("verb"):
            assert n / total == pytest.approx(chance, abs=0.02)


def test_sentences_begin_with_every_topic_as_often_as_they_say() -> None:
    speaker = Speaker(3, 0)
    firsts: Counter[tuple[bool, float]] = Counter()
    last, seen = 0, 0
    for _ in range(20_000):
        start = len(speaker.said)
        speaker.sentence()
        place = next(k for k in range(start, len(speaker.said)) if speaker.said[k][:4] == "noun")
        topic = int(speaker.said[place].split()[1])
        chance = exp(-speaker.surprisal[place]) / 0.7
        if last == 0:
            firsts[topic == 0, round(chance, 6)] += 1
            seen += 1
        last = topic
    for (_, chance), n in firsts.items():
        assert n / seen == pytest.approx(chance, abs=0.02)
    assert sum(chance for _, chance in firsts) == pytest.approx(1)


def test_hard_verbs_follow_a_noun_of_the_other_number() -> None:
    words, known = text(5_000, 200), kinds(200)
    names = [name for name, size in known.size.items() for _ in range(size)]
    said = [names[word] for word in words.words.tolist()]
    nouns = ""
    for kind, hard in zip(said, words.hard.tolist()):
        if kind.startswith("noun"):
            nouns = kind.split()[2]
        if kind.startswith("verb"):
            number = kind.split()[2]
            assert hard == (0 if number == nouns else 1 if number == "one" else 2)
        else:
            assert hard == 0
    assert words.number[known.start["verb 1 many"]] == 2
    assert (words.hard > 0).float().mean() > 0.005


def test_the_source_knows_more_than_the_frequency_of_words() -> None:
    found = text(20_000, 200)
    again = text.__wrapped__(20_000, 200)
    assert all(torch.equal(a, b) for a, b in zip(found, again))
    shares = torch.bincount(found.words).double() / 20_000
    shares = shares[shares > 0]
    assert found.surprisal.mean() < -(shares * shares.log()).sum() - 1
    assert found.surprisal.min() >= -1e-12
    assert -log(zipf(3)[0]) == pytest.approx(-log(6 / 11))


# Models -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["lstm", "rnn", "forward"])
def test_layers_taken_apart_compute_the_same(kind: str) -> None:
    model = build(kind, 100, 6, 2, 0)
    train, _ = streams(100, 500, 3, 0, CPU)
    read, target = train.window(1, 5)
    states = [tuple(torch.randn_like(part) for part in state) for state in model.start(3)]
    gradients = []
    for apart in (False, True):
        model.take_apart(apart)
        loss = loss_of(model, read, target, states)
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
        ends = model(read, states)[1]
        assert [len(state) for state in ends] == [len(state) for state in states]
    for ours, theirs in zip(*gradients):
        assert torch.allclose(ours, theirs, atol=1e-6)


def test_every_component_is_found_and_steps_are_those_of_time() -> None:
    model = build("lstm", 100, 6, 2, 0)
    train, _ = streams(100, 500, 3, 0, CPU)
    model.take_apart(True)
    with gt.watch(model, diagnose=False) as watch:
        loss = loss_of(model, *train.window(0, 4), model.start(3))
    trace = watch.trace(loss)
    shares = trace.influence(groups(model)).shares
    assert len(shares) == 12 and all(0 < share < 1 for share in shares.values())
    assert {f"layers.1.cell step {t}" for t in range(4)} <= set(trace.influence("steps").shares)
    path = trace.path("layers.0.weights.weight_hh_l0", (0, 0))
    assert 1 <= language_model._reach(path) <= 4


def test_a_model_that_knows_the_subject_agrees() -> None:
    """The bias of the output makes verbs of one number likely: it is right for these alone."""
    _, held = streams(100, 20_000, 4, 0, CPU)
    model = build("rnn", 100, 6, 1, 0)
    shares = []
    for number in (1, 2):
        with torch.no_grad():
            model.out.bias.copy_((held.number == number) * 20.0)
        known = evaluate(model, held, 20, 15)
        shares.append(known.right)
    assert sum(shares) == pytest.approx(1) and 0 < shares[0] < 1 and known.verbs > 3
    assert known.source == pytest.approx(float(held.surprisal[1:301].mean()), rel=1e-5)


def test_the_device_is_the_one_that_is_named() -> None:
    assert device("cpu") == CPU
    assert device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


# Rows ---------------------------------------------------------------------------------------------


def test_a_row_has_moments_and_graphs(rows: list[Row]) -> None:
    for row in rows:
        result = row.result
        if row.cell["part"] == "cost":
            assert result["alone"] and "refused" not in result["monitor"]
            assert result["monitor"]["traces"] == 2
            continue
        assert [look["step"] for look in result["looks"]] == [0, 2]
        assert all(0 < look["path"]["paths"] <= 10 for look in result["looks"])
        graphs = result["graphs"]
        assert [graph["edges"] for graph in graphs["start"]] == [g["edges"] for g in graphs["end"]]
        if row.cell["kind"] == "forward":
            assert all(look["path"]["reach"] == 0 for look in result["looks"])
        else:
            assert all(1 <= look["path"]["reach"] <= 4 for look in result["looks"])


def test_paths_of_a_feed_forward_network_have_one_length(found: Findings) -> None:
    line = found.facts["by_layers"]["forward"]
    assert line["start"] == line["end"] and line["start"]["r2"] == 1
    assert found.facts["by_graph"]["feed-forward network, 1 layer"]["end"][0] == 0


def test_findings(rows: list[Row], found: Findings) -> None:
    assert language_model.conclude(rows[::-1]) == found
    assert "agreement" in found.sentence and "rank correlation" in found.sentence
    said = results.lead(language_model, results.found(found, "language-model"))
    assert said["figure"] == "influence" and said["headline"].startswith("A language model with")
    assert len(results.sentences(said["headline"])) <= 2
    assert len(found.tables) == 6 and len(found.plots) == 7
    assert language_model.conclude([]).sentence.startswith("No model was trained")


def test_a_change_is_sure_if_all_seeds_agree(rows: list[Row]) -> None:
    part = "layer 1, memory"
    changed = json.loads(json.dumps([row._asdict() for row in rows]))
    for seed, row in enumerate(r for r in changed if r["cell"]["part"] == "training"):
        for at, share in ((0, 0.2), (-1, 0.6 + 1e-4 * seed)):
            if "influence" in row["result"]["looks"][at] and row["cell"]["kind"] == "lstm":
                row["result"]["looks"][at]["influence"][part][0] = share
    found = language_model.conclude([Row(**row) for row in changed])
    value, low, _ = found.facts["changes"]["LSTM, 1 layer"][part]
    assert value == pytest.approx(0.4, abs=0.01) and low > 0
    assert "LSTM, 1 layer, layer 1, memory: +40 points" in found.sentence


@degenerate.every
def test_whatever_is_measured(rows: list[Row], kind: str) -> None:
    degenerate.concludes(language_model, rows, kind)
