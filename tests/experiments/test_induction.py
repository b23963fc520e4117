"""Repeated texts: they need both layers, truth is exact, agreement is what it says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from random import Random

import degenerate
import numpy as np
import pytest
import torch

from gradtrace.experiments import induction
from gradtrace.experiments.harness import results
from gradtrace.experiments.harness.findings import Cell, Row
from gradtrace.experiments.induction_network import (
    HEADS,
    IGNORED,
    PERIODS,
    PORTS,
    Repeats,
    ablated,
    attention,
    build,
    patch,
    patched,
)
from gradtrace.experiments.planted_scores import (
    BASELINES,
    EDGE_BASELINES,
    MEASURES,
    Batch,
    Scores,
    _edges,
    _means,
    components,
    joined,
    scores,
)


def nothing(_: str) -> None:
    pass


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def cell(seed: int = 0, **more: object) -> Cell:
    few = {"steps": 2, "every": 1, "batch": 4, "passes": 4, "evaluated": 8}
    return induction.FULL | few | {"seed": seed} | more


def said(model: Repeats, draw: object, passes: int) -> dict[str, Scores]:
    """In place of scores, which take seconds: numbers that are always the same."""
    heads, pairs = components(model), [joined(*pair) for pair in model.pairs]
    names = dict.fromkeys(MEASURES, heads + pairs) | dict.fromkeys(BASELINES, heads)
    return {
        name: {key: Random(f"{name} {key}").random() for key in keys}
        for name, keys in (names | dict.fromkeys(EDGE_BASELINES, pairs)).items()
    }


@pytest.fixture(scope="module")
def rows() -> Iterator[list[Row]]:
    """As the journal has them, with made scores."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(induction, "scores", said)
        once = json.dumps([cell(), induction.measure(cell(), nothing)])
    first, again = Row(*json.loads(once)), Row(*json.loads(once))
    again.cell["seed"] = 1
    for each in again.result["truth"].values():  # another network
        each.update(zip(list(each), reversed(list(each.values()))))
    yield [first, again]


@pytest.fixture(scope="module")
def model() -> Repeats:
    """Weights large enough for every part to matter."""
    found = build(3)
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.mul_(2)
    return found


@pytest.fixture(scope="module")
def batch(model: Repeats) -> Batch:
    return model.draw(16, generator())


def loss(model: Repeats, batch: Batch) -> float:
    with torch.no_grad():
        return float(model.losses(*batch).mean())


# The task -----------------------------------------------------------------------------------------


def test_the_next_word_is_the_one_after_the_earlier_occurrence() -> None:
    words, target = build(0).draw(100, generator())
    periods = set()
    for text, wanted in zip(words.tolist(), target.tolist()):
        first = next(place for place, word in enumerate(wanted) if word != IGNORED)
        periods.add(first)
        assert len(set(text[:first])) == first  # of different words
        for place in range(first, len(text)):
            assert wanted[place] == text[text.index(text[place]) + 1 :][0]
    assert periods == set(range(PERIODS[0], PERIODS[1] + 1))


def test_nothing_is_seen_ahead_and_only_what_can_be_known_counts(model: Repeats) -> None:
    words, target = model.draw(4, generator())
    other = words.clone()
    other[:, -1] = (other[:, -1] + 1) % 32
    with torch.no_grad():
        assert torch.equal(model.outputs(words)[:, :-1], model.outputs(other)[:, :-1])
        each = torch.nn.functional.cross_entropy(model.outputs(words)[0], target[0])
        assert float(model.losses(words, target)[0]) == pytest.approx(float(each), rel=1e-5)


def test_a_network_is_always_the_same() -> None:
    for a, b in zip(build(1).parameters(), build(1).parameters()):
        assert torch.equal(a, b)
    assert not torch.equal(build(1).stem.weight, build(2).stem.weight)


# Truth --------------------------------------------------------------------------------------------


def test_a_patch_of_all_ports_is_a_patch_of_the_head(model: Repeats, batch: Batch) -> None:
    whole = loss(model, batch)
    with patch(model, "one.1", "two.2"):
        head = loss(model, batch)
    with (
        patch(model, "one.1", "two.2.query"),
        patch(model, "one.1", "two.2.key"),
        patch(model, "one.1", "two.2.value"),
    ):
        assert loss(model, batch) == pytest.approx(head, rel=1e-6)
    assert abs(head - whole) > 1e-3
    assert loss(model, batch) == whole  # as before


def test_patches_of_all_readers_are_the_ablation_of_a_head(batch: Batch) -> None:
    """Where the output does not read the first layer: the second's heads take all it adds."""
    model = build(3)
    model.get_submodule("one.0").register_forward_hook(lambda m, i, out: out * 20)
    direct = ablated(model, batch)["one.0"]
    with (
        patch(model, "one.0", "two.0"),
        patch(model, "one.0", "two.1"),
        patch(model, "one.0", "two.2"),
        patch(model, "one.0", "two.3"),
    ):
        through = loss(model, batch)
    kept: list[torch.Tensor] = []
    model.get_submodule("one.0").register_forward_hook(lambda m, i, out: kept.append(out))
    model.outputs(batch[0])
    added = kept[0].detach()

    def without(module: object, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        return (inputs[0] - added + added.mean(0),)

    whole = loss(model, batch)
    with (
        patch(model, "one.0", "two.0"),
        patch(model, "one.0", "two.1"),
        patch(model, "one.0", "two.2"),
        patch(model, "one.0", "two.3"),
    ):
        model.get_submodule("out").register_forward_pre_hook(without)
        assert loss(model, batch) - whole == pytest.approx(direct, rel=1e-4)
    assert through != pytest.approx(whole + direct, rel=1e-3)


def test_a_port_without_weights_reads_nothing(batch: Batch) -> None:
    model = build(3)
    port = model.get_submodule("two.1.key")
    with torch.no_grad():
        for parameter in port.parameters():
            parameter.zero_()
    model.compare(ports=True)
    found = patched(model, batch)
    assert len(found) == HEADS * HEADS * len(PORTS)
    assert all(found[joined(f"one.{k}", "two.1.key")] == 0 for k in range(HEADS))
    assert found[joined("one.0", "two.1.value")] != 0


def test_attention_is_a_share(model: Repeats, batch: Batch) -> None:
    found = attention(model, batch)
    assert list(found) == [f"{layer}.{k}" for layer in ("one", "two") for k in range(HEADS)]
    assert all(0 < share < 1 for share in found.values())


# Scores -------------------------------------------------------------------------------------------


def test_scores_are_those_that_rows_expect() -> None:
    """Of three parts, as all of them take seconds."""
    model = build(0)
    model.groups = [{"one.0": 0.0}, {"two.0.key": 0.0, "two.0.value": 0.0}]
    model.pairs = {("one.0", "two.0.key"): 0.0, ("one.0", "two.0.value"): 0.0}
    source = generator()
    found = scores(model, lambda samples: model.draw(min(samples, 8), source), 4)
    other = said(model, None, 4)
    assert {name: set(each) for name, each in found.items()} == {
        name: set(each) for name, each in other.items()
    }


@pytest.mark.parametrize("ports", [False, True])
def test_eap_is_of_one_edge(model: Repeats, batch: Batch, ports: bool) -> None:
    """The effect of a small step along an edge, which is another for every reader."""
    model.compare(ports)
    try:
        found = _edges(model, lambda samples: batch, 16, _means(model, batch))["EAP"]
        pairs = list(model.pairs)
    finally:
        model.compare()
    assert len(set(found.values())) == len(pairs)
    for first, then in pairs[:: 5 if ports else 3]:
        up, down = (stepped(model, batch, first, then, step) for step in (0.01, -0.01))
        slope = abs(up - down) / 0.02
        assert found[joined(first, then)] == pytest.approx(slope, rel=0.05, abs=2e-4)


@torch.no_grad()
def stepped(model: Repeats, batch: Batch, first: str, then: str, step: float) -> float:
    """The loss where one reader reads a little more of what makes a head differ from its mean."""
    kept: list[torch.Tensor] = []
    hooks = [
        model.get_submodule(first).register_forward_hook(lambda m, i, out: kept.append(out)),
        model.get_submodule(f"{then}.entry").register_forward_hook(
            lambda m, i, x: x + step * (kept[0] - kept[0].mean(0))
        ),
    ]
    found = float(model.double().losses(*batch).mean())
    for hook in hooks:
        hook.remove()
    model.float()
    return found


# Agreement ----------------------------------------------------------------------------------------

TRUTH = {name: float(value) for value, name in enumerate("abcdefgh")}


def test_agreement_is_1_for_the_order_and_not_for_its_reverse() -> None:
    same = induction.agreement(TRUTH, {name: value**2 for name, value in TRUTH.items()})
    assert same == {"spearman": 1, "kendall": 1, "top": 1, "first": 1}
    other = induction.agreement(TRUTH, {name: -value for name, value in TRUTH.items()})
    assert other == {"spearman": -1, "kendall": -1, "top": 0, "first": 0}
    none = induction.agreement(TRUTH, dict.fromkeys(TRUTH, 1.0))
    assert none == {"spearman": 0, "kendall": 0, "top": 0.5, "first": 1 / 8}


def test_spearman_is_that_of_ranks() -> None:
    said = dict(zip("abcdefgh", [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0]))
    places = [4.0, 1.5, 5.0, 1.5, 6.0, 8.0, 3.0, 7.0]
    wanted = float(np.corrcoef(range(8), places)[0, 1])
    assert induction.spearman(TRUTH, said) == pytest.approx(wanted)


def test_chance_is_that_of_signs() -> None:
    assert induction.chance(np.ones(4)) == 1 == induction.chance(np.zeros(20))
    assert induction.chance(np.ones(10)) == pytest.approx(2 / 2**10, rel=0.5)
    assert induction.chance(np.array([1.0, -1.0] * 10)) == 1
    assert induction.chance(np.array([1.0, np.nan] * 10)) == 1


def question(gap: float, networks: int = 20) -> induction.Question:
    """Greedy is better than the best baseline by ``gap``; the others know nothing."""
    source = np.random.default_rng(0)
    measures = (*MEASURES, "EAP", "EAP-IG")
    values = source.normal(0, 0.01, (networks, len(measures)))
    values[:, measures.index("EAP")] += 0.6
    values[:, 0] += 0.6 + gap
    found = dict.fromkeys(induction.STATISTICS, values)
    return induction.Question("pairs", measures, found, found, {"spearman": values[:, 0]})


@pytest.mark.parametrize("gap", [-0.1, 0.0, 0.1])
def test_a_difference_is_sure_if_there_is_one(gap: float) -> None:
    found = induction._differences([question(gap)])
    better, worse = (induction._sure(found, sign)["pairs"] for sign in (1, -1))
    assert ("greedy" in better) == (gap > 0) and ("greedy" in worse) == (gap < 0)
    assert set(MEASURES) - {"greedy"} == set(worse) - {"greedy"}


# Rows ---------------------------------------------------------------------------------------------


def test_a_row_has_every_score(rows: list[Row]) -> None:
    result = rows[0].result
    for look in result["looks"]:
        for name, many in (("heads", 8), ("pairs", 16), ("ports", 48)):
            assert set(look["scores"][name]) >= set(MEASURES)
            for each in look["scores"][name].values():
                assert set(each) == set(result["truth"][name]) and len(each) == many
    assert [look["step"] for look in result["looks"]] == [0, 2] and not result["formed"]
    assert result["truth"] != result["again"]


def test_findings(rows: list[Row]) -> None:
    found = induction.conclude(rows)
    assert induction.conclude(rows[::-1]) == found
    assert found.sentence.startswith("0 of 2 [0%, 66%] networks") and "too few" in found.sentence
    said = results.lead(induction, results.found(found, "induction"))["headline"]
    assert "our best measure tells to" in said and len(said) < 320
    assert len(results.sentences(said)) == 1
    assert induction.conclude([]).sentence.startswith("No network")


@degenerate.every
def test_whatever_is_measured(rows: list[Row], kind: str) -> None:
    degenerate.concludes(induction, rows, kind)
