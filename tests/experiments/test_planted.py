"""Networks with a known answer: the answer is true, scores are what they say, verdicts follow."""

from __future__ import annotations

import json
from collections.abc import Iterator
from random import Random

import degenerate
import numpy as np
import pytest
import torch

import gradtrace as gt
from gradtrace.experiments import planted, planted_scores
from gradtrace.experiments.harness.findings import Cell, Row
from gradtrace.experiments.planted_networks import KINDS, Planted, build, joined
from gradtrace.experiments.planted_scores import (
    BASELINES,
    EDGE_BASELINES,
    MEASURES,
    components,
    scores,
)
from gradtrace.experiments.training import descent, plain

KIND = {"views": "4", "gates": "equal", "heads": "induction", "circuit": "compiled"}


def nothing(_: str) -> None:
    pass


def cell(network: str, kind: str = "", seed: int = 0, **more: object) -> Cell:
    shared = {"batch": 64, "passes": 24, "evaluated": 64, "looks": [0, 4], "rate": 0.01}
    return shared | {"network": network, "kind": kind or KIND[network], "seed": seed} | more


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    """As the journal has them."""
    some = [cell(network, seed=seed) for network in KINDS for seed in range(2)]
    some.append(cell("circuit", "random"))
    return [Row(*json.loads(json.dumps([each, planted.measure(each, nothing)]))) for each in some]


# The answer is true -------------------------------------------------------------------------------


def trained(network: str, kind: str, steps: int, rate: float) -> Planted:
    model, source = build(cell(network, kind)), generator()
    with plain():
        for _ in descent(model, lambda: model.losses(*model.draw(64, source)).mean(), steps, rate):
            pass
    return model


def costs(model: Planted, names: list[str]) -> dict[str, float]:
    """How far the outputs move where the mean takes the place of a component's output."""
    x, target = model.draw(256, generator(7))
    found = {}
    with torch.no_grad():
        whole = model.losses(x, target)
        for name in names:
            with gt.ablate(model, name, how="mean"):
                found[name] = float((model.losses(x, target) - whole).abs().mean())
    return found


@pytest.mark.parametrize("seed", range(4))
def test_edges_of_a_circuit_that_do_not_matter_cannot_move_it(seed: int) -> None:
    model = build(cell("circuit", seed=seed))
    (truth,) = model.groups
    assert 0 < sum(truth.values()) < len(truth)
    for name, cost in costs(model, list(truth)).items():
        assert (cost > 1e-2) == bool(truth[name]), name


@pytest.mark.parametrize("kind", ["0.25", "16"])
def test_the_view_that_sees_the_signal_is_needed(kind: str) -> None:
    model = trained("views", kind, 300, 0.01)
    x, target = model.draw(512, generator(3))
    (truth,) = model.groups
    assert model.right(x, target) > 0.8
    for name in truth:
        with gt.ablate(model, name, how="mean"), torch.no_grad():
            assert (model.right(x, target) < 0.7) == bool(truth[name]), name


def test_the_text_needs_both_heads() -> None:
    """The word before is seen by one head, the first half by one; no other way leads there."""
    model = build(cell("heads"))
    words, target = model.draw(300, generator())
    for text, word in zip(words.tolist(), target.tolist()):
        (at,) = [place for place, each in enumerate(text[:-1]) if each == text[-1]]
        assert at < 5 and text[at + 1] == word
    one, two = model.groups
    for number in range(4):
        before = model.get_submodule(f"one.{number}").get_buffer("mask")
        assert bool(before[7, 6]) == bool(one[f"one.{number}"])
        far = model.get_submodule(f"two.{number}").get_buffer("mask")
        assert bool(far[-1, :6].any()) == bool(two[f"two.{number}"])
        assert set(far.sum(1).tolist()) == {6}
        assert set(before[8:].sum(1).tolist()) == {2}


def test_gates_decide_how_much_a_branch_varies() -> None:
    for kind in ("equal", "frequency", "gain", "offset"):
        model = build(cell("gates", kind))
        x, _ = model.draw(2000, generator(5))
        h = torch.tanh(model.get_submodule("stem")(x))
        outer = model.get_buffer("outer")
        for number, gate in enumerate(model.groups[0].values()):
            part = (outer[number] * model.get_submodule(f"branch.{number}")(h)).detach()
            assert float(part.std(0).mean()) == pytest.approx(gate, rel=0.15)


def test_what_is_taken_back_outside_does_not_change_the_network() -> None:
    x, _ = build(cell("gates")).draw(8, generator())
    found = []
    for kind in ("equal", "gain", "offset"):
        torch.manual_seed(0)
        found.append(KINDS["gates"](kind, generator(), Random(0)).outputs(x))
    assert torch.allclose(found[0], found[1], atol=1e-5)
    assert torch.allclose(found[0], found[2], atol=1e-4)


def test_a_network_is_always_the_same() -> None:
    for network in KINDS:
        first, again = build(cell(network)), build(cell(network))
        assert first.groups == again.groups
        other = [build(cell(network, seed=seed)).groups for seed in range(1, 12)]
        assert any(each != first.groups for each in other)
        for a, b in zip(first.parameters(), again.parameters()):
            assert torch.equal(a, b)


# Scores -------------------------------------------------------------------------------------------


def drawn(model: Planted) -> Iterator[int]:
    """Numbers of samples that are asked for."""
    asked: list[int] = []
    source = generator()

    def draw(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
        asked.append(samples)
        return model.draw(samples, source)

    scores(model, draw, 64)
    return iter(asked)


def test_every_measure_has_the_same_number_of_passes() -> None:
    model = build(cell("views"))
    assert list(drawn(model)) == [256, *[16] * 6, 12, 64, 8]


@pytest.mark.parametrize("network", KINDS)
def test_all_components_have_all_scores(network: str) -> None:
    model, source = build(cell(network)), generator()
    before = [parameter.requires_grad for parameter in model.parameters()]
    found = scores(model, lambda samples: model.draw(samples, source), 24)
    pairs = {joined(*pair) for pair in model.pairs}
    for name in MEASURES:
        assert set(found[name]) == set(components(model)) | pairs
    for name in BASELINES:
        assert set(found[name]) == set(components(model))
    for name in EDGE_BASELINES if model.edges else ():
        assert set(found[name]) == (pairs or set(components(model)))
    assert [parameter.requires_grad for parameter in model.parameters()] == before
    assert all(parameter.grad is None for parameter in model.parameters())


def test_shares_of_views_and_of_pairs_add_up() -> None:
    """A path takes one view; one that passes two heads passes one of each layer."""
    model, source = build(cell("views")), generator()
    found = scores(model, lambda samples: model.draw(samples, source), 24)
    for name in ("greedy", "edge, weighted", "viterbi", "mass, p = 2", "decomposition"):
        assert sum(found[name].values()) == pytest.approx(1, abs=1e-4)
    model = build(cell("heads"))
    found = scores(model, lambda samples: model.draw(samples, source), 24)
    for name in ("EAP", "EAP-IG"):  # a score for each reader, not one for all that read alike
        assert len({found[name][joined(a, b)] for a, b in model.pairs}) == len(model.pairs)
    for name in ("greedy", "mass, p = 1"):
        for head in model.groups[0]:
            both = sum(found[name][joined(a, b)] for a, b in model.pairs if a == head)
            assert -1e-6 <= both <= found[name][head] + 1e-6


def test_taylor_is_the_effect_of_the_mean_in_a_linear_network() -> None:
    """A circuit's result is linear in its edges, unless it is clamped: the estimate is exact."""
    model, source = build(cell("circuit")), generator()
    batch = model.draw(256, source)  # of which also the means are taken
    found = scores(model, lambda samples: (batch[0][:samples], batch[1][:samples]), 256)
    for name, cost in costs_of(model, batch).items():
        assert found["Taylor, absolute"][name] == pytest.approx(cost, abs=1e-4)
        assert found["EAP" if "EAP" in found else "Taylor, signed"][name] >= 0


def test_edges_of_a_circuit_have_the_effect_of_their_mean_by_edge_attribution() -> None:
    """EAP is Taylor's score there, and so is EAP-IG, as gradients are the same on the way."""
    model, source = build(cell("circuit", seed=1)), generator()
    batch = model.draw(256, source)
    found = planted_scores._edges(model, lambda _: batch, 8, planted_scores._means(model, batch))
    for name, cost in costs_of(model, batch).items():
        assert found["EAP"][name] == pytest.approx(cost, abs=1e-4)
        assert found["EAP-IG"][name] == pytest.approx(cost, abs=1e-4)


def costs_of(model: Planted, batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, float]:
    found = {}
    with torch.no_grad():
        whole = model.losses(*batch)
        for name in components(model):
            with gt.ablate(model, name, how="mean"):
                found[name] = float((model.losses(*batch) - whole).abs().mean())
    return found


# Verdicts -----------------------------------------------------------------------------------------


def test_auc() -> None:
    truth = {"a": 3.0, "b": 2.0, "c": 1.0}
    assert planted.auc(truth, {"a": 9, "b": 8, "c": 7}) == 1
    assert planted.auc(truth, {"a": 7, "b": 8, "c": 9}) == 0
    assert planted.auc(truth, {"a": 1, "b": 1, "c": 1}) == 0.5
    assert planted.auc({"a": 1.0}, {"a": 1}) == 0.5


def question(name: str, gap: float, networks: int = 40) -> planted.Question:
    """One of ours is better than the best baseline by ``gap`` on average; others know nothing."""
    source = np.random.default_rng(0)
    measures = planted.MEASURES + planted.BASELINES
    values = np.full((networks, len(measures)), 0.5)
    noise = source.normal(0, 0.01, networks)
    values[:, measures.index("Taylor, signed")] = 0.8 + noise
    values[:, 0] = 0.8 + gap + source.normal(0, 0.01, networks)
    right = {0: np.full(networks, 0.5), 5: np.full(networks, 0.9)}
    return planted.Question(name, measures, {0: values, 5: values}, right)


@pytest.mark.parametrize(
    ("gaps", "words"),
    [
        ((0.1, 0.0), "greedy come within 0.02"),
        ((-0.1, 0.1), "No measure of ours"),
        ((0.0, 0.0), "No measure of ours"),
    ],
)
def test_a_verdict_needs_all_kinds_and_one_that_is_better(
    gaps: tuple[float, float], words: str
) -> None:
    asked = [question("views, distractors × 1", gaps[0]), question("heads", gaps[1])]
    tests = planted._tests(asked)
    verdicts = {name: planted._verdict(name, asked, tests) for name in planted.MEASURES}
    assert words.lower() in planted._sentence(asked, verdicts).lower()
    assert bool(verdicts["greedy"]["better"]) == (max(gaps) > 0.05)
    assert bool(verdicts["greedy"]["worse"]) == (min(gaps) < -0.05)


def test_chance_is_corrected() -> None:
    draw = Random(0)
    chances = {number: draw.random() for number in range(50)} | {"true": 1e-5}
    corrected = planted.holm(chances)
    assert [key for key, chance in corrected.items() if chance < 0.05] == ["true"]
    assert all(corrected[key] >= chances[key] for key in chances)
    assert planted._chance(np.zeros(20)) == 1.0 == planted._chance(np.ones(4))


def test_a_network_is_trained_on_until_it_has_converged() -> None:
    """Its end is a cell of its own, and joins the steps before it."""
    asked = planted.cells(planted.FULL, 1)
    assert [c["looks"][-1] for c in asked if c["network"] == "gates"] == [400, 3200] * 4
    assert [c["looks"][-1] for c in asked if c["kind"] == "16"] == [400, 3200, 12_800]
    assert len({json.dumps(c, sort_keys=True) for c in asked}) == len(asked) == 20
    some = [cell("views", seed=s, looks=looks) for s in range(2) for looks in ([0, 4], [8])]
    made = [Row(c, planted.measure(c, nothing)) for c in some]
    (found,) = planted._questions(made[::-1])
    assert list(found.found) == [0, 4, 8] and list(found.right) == [0, 1, 2, 4, 8]
    assert found.until(4).final is found.found[4] and found.gained() is not None
    assert np.array_equal(
        found.right[4],
        [row.result["looks"][-1]["right"] for row in made if row.cell["looks"][0] == 0],
    )


@pytest.mark.parametrize(("gain", "converged"), [(0.0, True), (0.005, True), (0.02, False)])
def test_what_has_converged(gain: float, converged: bool) -> None:
    one = question("heads", 0.0)
    right = {0: np.full(40, 0.5), 2: np.full(40, 0.9), 4: np.full(40, 0.9 + gain)}
    one = one._replace(found={0: one.final, 4: one.final}, right=right)
    assert planted._converged(one) == converged
    assert planted._learned([one]).rows[0][-1] == ("yes" if converged else "no")
    said = planted._training_said([one])
    assert ("not heads" in said) != converged


def test_findings(rows: list[Row]) -> None:
    found = planted.conclude(rows)
    assert "too few to tell" in found.sentence and "5 kinds" in found.sentence
    assert planted.conclude(rows[::-1]) == found
    control = found.tables[3]
    assert control.columns[-1] == "circuit, random"
    assert found.facts["auc"]["circuit, compiled"]["0"]["Taylor, absolute"] == 1.0
    assert planted.conclude([]).sentence.startswith("No network")


@degenerate.every
def test_whatever_is_measured(rows: list[Row], kind: str) -> None:
    degenerate.concludes(planted, rows, kind)
