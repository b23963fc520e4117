"""Rows of large weights sampled in an exact pass: rows stand for all rows, errors are right."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from test_influence import Skip
from test_sampled_shares import architecture, cells, hits, skip, traced
from torch import Tensor, nn

import gradtrace as gt
from gradtrace.errors import GradtraceError
from gradtrace.ir import interpreter, memory
from gradtrace.ir.passes.leaf_rows import keep_rows
from gradtrace.ir.program import Leaf, ProgramFacts, structure_of
from gradtrace.linops import Contract
from gradtrace.semirings import SUM
from gradtrace.traced import Trace
from gradtrace.tracing import leaf_rows
from gradtrace.tracing.influence import Influence


class Tied(nn.Module):
    """A weight that is both an embedding and the last layer, and a layer used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.inner = nn.Embedding(40, 6), nn.Linear(6, 6)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        return (x + self.inner(self.inner(x).tanh())) @ self.embed.weight.t()


def tied(dtype: torch.dtype = torch.float32) -> Trace:
    torch.manual_seed(0)
    model, words = Tied().to(dtype), torch.randint(40, (12,))
    return traced(model, lambda: nn.functional.cross_entropy(model(words[:-1]).float(), words[1:]))


def permuted(leaves: Sequence[Leaf], part: float, seed: int) -> dict[int, Tensor]:
    """All rows of all leaves, in another order."""
    return {
        leaf.value: torch.randperm(leaf.tensor.shape[0], device="cpu")
        for leaf in leaves
        if leaf.tensor.dim() > 1
    }


TRACES: dict[str, Callable[[], Trace]] = {
    "skip": skip,
    "skip, edge": lambda: skip("edge"),
    "skip, viterbi": lambda: skip("viterbi"),
    "two cells": cells,
    "tied": tied,
    "tied, bfloat16": lambda: tied(torch.bfloat16),
    "GPT-2": lambda: architecture("gpt2"),
    "Llama": lambda: architecture("llama"),
    "Mixtral": lambda: architecture("mixtral"),
}


@pytest.mark.parametrize("name", TRACES)
def test_all_rows_are_the_whole_table(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaf_rows, "draw_rows", permuted)
    monkeypatch.setattr(leaf_rows, "GROUPS", 2 if name == "two cells" else 1)
    trace = TRACES[name]()
    found = trace.influence(leaf_rows=0.5)
    assert "in rows drawn at random" in found.notes[0]
    for row, other in zip(trace.influence(), found, strict=True):
        assert (row.name, row.own, row.unreached) == (other.name, other.own, other.unreached)
        assert (row.count.t, row.count.e) == (other.count.t, other.count.e)
        assert float(row.gradient.t) == pytest.approx(float(other.gradient.t), rel=1e-5)
        assert float(row.gradient.e) == pytest.approx(float(other.gradient.e), rel=1e-5)
        assert other.count.error(1) == 0.0 or not row.count.e


@pytest.mark.parametrize("name", ["skip", "two cells", "tied", "GPT-2", "Llama"])
def test_only_the_rows_drawn_are_contracted(name: str) -> None:
    program = TRACES[name]().program
    drawn = {
        leaf.value: torch.randperm(leaf.tensor.shape[0])[:3]
        for leaf in program.leaves
        if leaf.tensor.dim() > 1
    }
    small, done = keep_rows(program, drawn)
    assert done == drawn.keys()
    whole = {leaf.value: leaf for leaf in program.leaves}
    steps = {step.out: step for step in small.steps()}
    for leaf in small.leaves:
        gradient = whole[leaf.value].compute()
        if leaf.value in drawn:
            gradient = gradient[drawn[leaf.value]]
            assert steps[leaf.value].shape == tuple(gradient.shape)
        torch.testing.assert_close(leaf.compute(), gradient, rtol=1e-4, atol=1e-6)
    sizes = [
        sum(m.outputs for step in p.steps() for m in p.maps.of(step) if isinstance(m, Contract))
        for p in (program, small)
    ]
    assert sizes[1] < sizes[0]
    values = interpreter.run(small, SUM)
    for leaf, value in zip(small.leaves, values.values()):
        torch.testing.assert_close(value, leaf.compute(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("name", "times"), [("two cells", 30), ("tied", 40), ("GPT-2", 15)])
def test_exact_shares_are_within_the_errors(
    name: str, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leaf_rows, "LARGE_LEAF_ELEMENTS", 60)
    monkeypatch.setattr(leaf_rows, "GROUPS", 8)
    trace = TRACES[name]()
    exact, found = trace.influence(), list[bool]()
    means: dict[str, list[float]] = {}
    for seed in range(times):
        table = trace.influence(leaf_rows=8, seed=seed)
        found += hits(exact, table, "count") + hits(exact, table, "gradient")
        for row in table:
            means.setdefault(row.name, []).append(float(row.count.e))
    assert len(found) >= 60
    assert sum(found) >= 0.95 * len(found), sum(found) / len(found)
    for row in exact:  # unbiased: the mean over seeds is the exact number, within its own error
        if row.count.e:
            spread = torch.tensor(means[row.name]).double()
            error = float(spread.std()) / len(spread) ** 0.5
            assert abs(float(spread.mean()) - row.eligible) <= 4 * error + 1e-6


def test_leaves_that_are_not_large_are_counted_whole() -> None:
    trace = skip()
    exact, found = trace.influence(), trace.influence(leaf_rows=1 / 16)
    assert "none is large enough" in found.notes[0]
    assert [row.count for row in exact] == [row.count for row in found]
    assert {error for error in found.errors.values() if error == error} == {0.0}


def test_the_same_seed_draws_the_same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaf_rows, "LARGE_LEAF_ELEMENTS", 60)
    monkeypatch.setattr(leaf_rows, "GROUPS", 4)
    trace = tied()
    table = trace.influence(["inner"], leaf_rows=0.2)
    assert table == trace.influence(["inner"], leaf_rows=0.2)
    assert table != trace.influence(["inner"], leaf_rows=0.2, seed=1)
    assert "48 of 240 elements of a large leaf" in table.notes[0]
    assert "± error" in str(table) and table.errors["inner"] > 0
    assert Influence.from_dict(table.to_dict()) == table
    both = table.merge(trace.influence(["inner"], leaf_rows=0.2, seed=1))
    assert both.errors["inner"] > 0


def test_what_cannot_be_asked() -> None:
    trace = skip()
    for odd in (0, -1, 1.5, True, "all", float("nan")):
        with pytest.raises(GradtraceError, match="leaf_rows is the part"):
            trace.influence(leaf_rows=odd)  # type: ignore[arg-type]
    for how in ({"sample": 3}, {"of": "a.bias", "index": 1}):
        with pytest.raises(GradtraceError, match="leave sample and index out"):
            trace.influence(leaf_rows=0.5, **how)  # type: ignore[arg-type]
    with pytest.raises(GradtraceError, match=r"losses\.mean\(\)"):
        skip(pairs=True).influence(leaf_rows=0.5)
    torch.manual_seed(0)
    model, x = Skip(), torch.randn(5, 6)
    with gt.watch(model) as watch:
        loss = model(x).sum()
    with pytest.raises(GradtraceError, match="granularity='scalar'"):
        watch.trace(loss, granularity="operator").influence(leaf_rows=0.5)


def test_what_follows_from_structure_is_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of programs of some rows, too: of as many rows of a replayed loss."""
    monkeypatch.setattr(leaf_rows, "LARGE_LEAF_ELEMENTS", 64)
    model, words = Tied(), torch.randint(40, (12,))

    def structure() -> object:
        with gt.watch(model) as watch:
            loss = nn.functional.cross_entropy(model(words[:-1]), words[1:])
        rows = leaf_rows.rows_kept(watch.trace(loss), 0.8, 0)[0]
        fresh = keep_rows(rows.program, {})[0]  # the same, with facts of its own
        fresh.facts = ProgramFacts()
        assert structure_of(fresh) == structure_of(rows.program)
        kept, narrow = rows.uses_kept, False
        assert memory.streaming(rows.program, kept, narrow) == memory.streaming(fresh, kept, narrow)
        return structure_of(rows.program)

    structure()  # recorded
    assert structure() is structure()
