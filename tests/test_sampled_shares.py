"""Standard errors of sampled tables: do exact shares lie where they say?"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from math import isnan, sqrt

import architectures
import numpy as np
import pytest
import torch
from random_transformers import gpt2
from test_influence import Skip
from torch import Tensor, nn

import gradtrace as gt
from gradtrace.kernels import backend_of
from gradtrace.paths.path_forest import PathProvenance
from gradtrace.paths.paths import path_provenance, sampled
from gradtrace.table import Table
from gradtrace.traced import Trace
from gradtrace.tracing.counting import component_finder, counts_of
from gradtrace.tracing.followed import follow_elements
from gradtrace.tracing.influence import SERIES, Counted
from gradtrace.tracing.moments import Drawn, Moments, drawn_variances, seed_of, unit_of
from gradtrace.tracing.tally import Tally
from tests.backends import imitate_gpu
from tests.waits import Waits


class TwoCells(nn.Module):
    """Two recurrent cells beside each other, each called many times, behind one embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(20, 6), nn.Linear(6, 20)
        self.lstm, self.gru = nn.LSTM(6, 6), nn.GRU(6, 6)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        out: Tensor = self.out(self.lstm(x)[0] + self.gru(x)[0])
        return out


def traced(model: nn.Module, loss: Callable[[], Tensor], rule: str = "greedy") -> Trace:
    with gt.watch(model) as watch:
        found = loss()
    return watch.trace(found, rule=rule)


def skip(rule: str = "greedy", pairs: bool = False) -> Trace:
    torch.manual_seed(0)
    model, x = Skip(), torch.randn(5, 6)
    return traced(model, lambda: model(x).square().sum(1 if pairs else (0, 1)), rule)


def cells() -> Trace:
    torch.manual_seed(1)
    model, words = TwoCells(), torch.randint(20, (30,))
    return traced(model, lambda: nn.functional.cross_entropy(model(words[:-1]), words[1:]))


def architecture(name: str) -> Trace:
    pytest.importorskip("transformers")
    model, loss = architectures.ARCHITECTURES[name]()
    torch.manual_seed(0)
    return traced(model, lambda: loss(model))


class Every:
    """All elements of a trace, followed once; any sample of them can then be counted."""

    def __init__(self, trace: Trace) -> None:
        self.trace, self.chosen = trace, component_finder(trace).choose(None)
        self.sizes = {leaf.value: leaf.tensor.numel() for leaf in trace.leaves.values()}
        whole = {value: torch.arange(size) for value, size in self.sizes.items()}
        self.firsts = dict(zip(whole, np.cumsum([0, *self.sizes.values()]).tolist()))
        self.found, self.gradients = [], []
        for pair in range(trace.pairs):
            forest = follow_elements(trace, whole, pair).forest
            found = path_provenance(forest, trace.program, self.chosen.component_bits)
            self.found.append(found)
            self.gradients.append(forest.gradient[forest.starts])

    def sampled(self, sample: int, seed: int) -> Counted:
        """The counts of ``trace.influence(sample=sample, seed=seed)``."""
        trace = self.trace
        tally = Tally(
            trace.kept.facts(self.chosen),
            trace.program,
            trace.pairs,
            backend_of(torch.device("cpu")),
        )
        for pair, (found, gradients) in enumerate(zip(self.found, self.gradients)):
            drawn = sampled(self.sizes, sample, seed_of(seed, pair))
            at = {value: elements + self.firsts[value] for value, elements in drawn.items()}
            if tally.drawn is None:
                unit = unit_of(gradients[torch.cat([*at.values()])])
                tally.drawn = Drawn(sample, sum(self.sizes.values()), unit)
            whole = torch.cat([*at.values()])
            paths = PathProvenance(found.sets, found.number[whole])
            counts = {value: len(some) for value, some in at.items()}
            tally.add_some(counts, pair, paths, gradients[whole], self.sizes)
        return tally.result()


def hits(exact: Counted, found: Counted, weight: str) -> list[bool]:
    """Of each component that has an alternative: whether the exact share is within 1.96 errors."""
    within = []
    for one, other in zip(exact.rows, found.rows, strict=True):
        share, sample = getattr(one, weight).share, getattr(other, weight)
        if one.alternative is not False and sample.e and not isnan(share):
            error = sample.error(found.losses)
            assert error >= 0
            within.append(abs(sample.share - share) <= 1.96 * error + 1e-12)
    return within


TRACES: dict[str, tuple[Callable[[], Trace], int, int]] = {
    "skip": (skip, 30, 100),
    "skip, viterbi": (lambda: skip("viterbi"), 30, 60),
    "skip, five losses": (lambda: skip(pairs=True), 30, 60),
    "two cells": (cells, 150, 60),
    "GPT-2": (lambda: architecture("gpt2"), 300, 12),
    "ResNet": (lambda: architecture("resnet"), 300, 20),
}
"""How many elements are drawn, and how often."""


def test_exact_shares_are_within_the_errors() -> None:
    found: dict[tuple[str, str], list[bool]] = {}
    for name, (make, sample, times) in TRACES.items():
        every = Every(make())
        exact, _ = counts_of(every.trace)
        for seed in range(times):
            table = every.sampled(sample, seed)
            for weight in ("count", "gradient"):
                found.setdefault((name, weight), []).extend(hits(exact, table, weight))
    for key, each in found.items():
        assert len(each) >= 60, key
        assert sum(each) >= 0.92 * len(each), (key, sum(each) / len(each))
    every_hit = [hit for each in found.values() for hit in each]
    assert sum(every_hit) >= 0.95 * len(every_hit), sum(every_hit) / len(every_hit)


@pytest.mark.parametrize("make", [skip, lambda: skip("edge"), lambda: skip(pairs=True), cells])
def test_samples_are_those_of_the_trace(make: Callable[[], Trace]) -> None:
    every = Every(make())
    for sample, seed in ((30, 0), (7, 3), (1, 1)):
        counts, _ = counts_of(every.trace, sample=sample, seed=seed)
        assert every.sampled(sample, seed).rows == counts.rows
        table = every.trace.influence(sample=sample, seed=seed)
        assert table == every.trace.influence(sample=sample, seed=seed)


@pytest.mark.parametrize("pairs", [False, True])
def test_a_sample_of_everything_has_no_error(pairs: bool) -> None:
    trace = skip(pairs=pairs)
    assert trace.influence() == trace.influence(sample=105)


def test_the_error_of_a_share_by_hand() -> None:
    """30 of 90 drawn, of which 10 could pass and 4 do."""
    rest, n, t, a = 1 - 30 / 90, 30, 4.0, 6.0
    variances = rest * n / (n - 1) * np.array([t - t * t / n, -t * a / n, a - a * a / n])
    found = drawn_variances(
        Drawn(30, 90),
        *(np.array([[x]]) for x in (t, t + a)),
        (np.array([[t]]), np.array([[t + a]])),
    )
    assert [float(x) for x in found[0]()] == pytest.approx([*variances, 10, rest * 10], rel=1e-6)
    moments = Moments.over([t], [t + a], found[0])
    # of a ratio: Σ (t - share·e)² = 10 · 0.4 · 0.6; z²/m for few units
    expected = sqrt(rest * n / (n - 1) * 10 * 0.4 * 0.6 / 10**2 * (1 + 1.96**2 / 10))
    assert moments.error(1) == pytest.approx(expected, rel=1e-6)
    assert isnan(Moments.of(t, t + a).error(1))


@pytest.mark.parametrize("through", [0.0, 100.0])
def test_rare_components_do_not_claim_certainty(through: float) -> None:
    """Rule of three: none of 100 says that it is less than some 3%."""
    t, e = np.array([[through]]), np.array([[100.0]])
    variance = drawn_variances(Drawn(100, 10**6), t, e, (t, e))
    error = Moments.over([through], [100.0], variance[0]).error(1)
    assert 0.025 < 1.96 * error < 0.031


def test_components_in_series_have_no_error() -> None:
    table = skip().influence(["b", "c"], sample=20)
    assert table["c"].choice == SERIES and table.errors["c"] == 0.0 < table.errors["b"]


def test_small_gradients_are_not_squared_to_zero() -> None:
    torch.manual_seed(0)
    model, x = Skip().double(), torch.randn(5, 6).double()
    tables = [
        traced(model, lambda f=factor: model(x).square().sum() * f).influence(sample=30)
        for factor in (1.0, 2.0**-900)
    ]
    errors = [table["b"]["± weighted"] for table in tables]
    assert errors[0] == pytest.approx(errors[1]) and errors[0] > 0


def test_errors_are_in_the_table_and_in_files() -> None:
    table = skip().influence(["b"], sample=40)
    text = str(table)
    assert "± share" in text and "± weighted" in text and "40 of 105 elements" in text
    again = Table.from_dict(json.loads(json.dumps(table.to_dict())))
    assert again == table and again.errors == table.errors
    assert table.to_pandas()["± share"][0] == table.errors["b"]
    assert "±" not in str(skip().influence(["b"]))


def test_shares_at_forks_have_errors() -> None:
    exact, table = skip().influence("forks"), skip().influence("forks", sample=40)
    for row in table:
        error = table.errors[row.name]
        assert error > 0 and abs(row.share - exact[row.name].share) < 3 * error


def test_every_pair_has_a_sample_of_its_own() -> None:
    """What differs between pairs includes the error of samples only if these are independent."""
    assert seed_of(3, 0) == 3
    assert len({seed_of(seed, pair) for seed in range(20) for pair in range(20)}) == 400
    torch.manual_seed(0)
    model, x = Skip(), torch.randn(1, 6).expand(20, 6)
    trace = traced(model, lambda: model(x).square().sum(1))
    assert trace.influence(["b"]).errors["b"] == 0.0  # all losses are the same
    assert trace.influence(["b"], sample=20).errors["b"] > 0


# As on a GPU -------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["greedy", "edge", "viterbi"])
@pytest.mark.parametrize("name", ["skip", "two cells", "GPT-2", "dying"])
def test_nothing_changes_on_a_gpu(name: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """There nothing is read before paths have reached the loss, but how they divide at forks."""
    makes = {"skip": skip, "two cells": cells, "dying": dying}
    trace = makes[name]() if name in makes else architecture("gpt2")
    tables, paths = [], []
    for _ in range(2):
        trace = replace(trace, rule=rule)
        tables.append(trace.influence(sample=200, seed=1))
        paths.append(list(trace.paths(sample=60, seed=2)))
        imitate_gpu(monkeypatch)
    assert tables[0].rows == tables[1].rows
    assert paths[0] == paths[1]


def dying() -> Trace:
    """A network in which many elements have no path."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    x = torch.randn(2, 6)
    return traced(model, lambda: model(x).relu().square().sum())


def test_waits_for_a_gpu_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    imitate_gpu(monkeypatch)
    counts = []
    for layers in (2, 4):
        torch.manual_seed(0)
        sizes = {"vocab_size": 30, "n_embd": 12, "n_head": 2, "n_positions": 8}
        problem = gpt2(8, n_layer=layers, **sizes)
        trace = traced(problem.model, problem.loss)
        with Waits() as waits:
            trace.influence(sample=500)
        host = ("_split", "sampled", "located")  # of tensors that are on the CPU
        counts.append([at for at in waits.places if at.split()[-1] not in host])
    assert len(counts[1]) - len(counts[0]) <= 2 * 24, counts[1]
