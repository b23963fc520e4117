"""Networks without branches: their leaves are counted without executing the plan."""

from __future__ import annotations

import random
from contextlib import ExitStack
from unittest import mock

import pytest
import randomgraphs
import thorough
import torch
from torch import Tensor, nn

import gradtrace as gt
from gradtrace.kernels import backend_of, tuning
from gradtrace.kernels.reference import Reference
from gradtrace.linops import Scatter
from gradtrace.recording import gradients
from gradtrace.table import Table
from gradtrace.traced import Trace
from gradtrace.tracing.kept_plans import ComponentFacts

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(
    not backend_of(CPU).sums_groups, reason="plans are executed without the compiled library"
)


def both(trace: Trace, components: str | None = None) -> tuple[Table, Table, bool]:
    """The table, that of an executed plan, and whether the first was counted without executing."""
    found, asked = [], ComponentFacts.uniform

    def noted(*given: object) -> object:
        found.append(asked(*given))  # type: ignore[arg-type]
        return found[-1]

    with mock.patch.object(ComponentFacts, "uniform", noted):
        table = trace.influence(components)
    with mock.patch.object(ComponentFacts, "uniform", lambda *given: None):
        executed = trace.influence(components)
    return table, executed, found != [None] and bool(found)


def network(seed: int) -> tuple[nn.Sequential, Tensor]:
    """Random layers after each other."""
    rng, size, parts = random.Random(seed), 6, list[nn.Module]()
    torch.manual_seed(seed)
    for _ in range(rng.randint(1, 8)):
        wide = rng.choice([1, 3, 6, 20])
        kinds = [nn.Tanh(), nn.ReLU(), nn.Dropout(), nn.LayerNorm(wide), nn.Hardtanh(-0.1, 0.1)]
        parts += [nn.Linear(size, wide, bias=rng.random() < 0.8), rng.choice(kinds)]
        size = wide
    model = nn.Sequential(*parts)
    if rng.random() < 0.3:  # whole numbers, so that contributions cancel
        for weight in model.parameters():
            weight.data = torch.randint(-1, 2, weight.shape).float()
    dtype = rng.choice([torch.float32, torch.float64])
    return model.to(dtype), torch.randint(-2, 3, (rng.choice([1, 2, 5]), 6)).to(dtype)


def test_tables_are_those_of_the_executed_plan() -> None:
    uniform = zeros = 0
    for seed in range(thorough.few(60, 2000)):
        model, x = network(seed)
        with gt.watch(model) as watch:
            loss = model(x).square().sum()
        trace = watch.trace(loss)
        for components in (None, "operators"):
            table, executed, fast = both(trace, components)
            assert table == executed, seed
            uniform += fast
        zeros += any(row.unreached for row in table)
    assert uniform > thorough.few(80, 3000) and zeros > 5


def test_random_graphs() -> None:
    uniform = 0
    for seed in range(thorough.few(16, 2000)):
        sample = randomgraphs.build(seed)
        trace = gt.trace(sample.loss, names=sample.leaves)
        table, executed, fast = both(trace, "operators")
        assert table == executed, seed
        uniform += fast
    assert uniform


def test_an_element_whose_contributions_cancel_has_a_path() -> None:
    """One leaf has derivatives 1 and -1, which cancel; the other 0 and 0."""
    b, c = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    for leaf, signs, reached in ((b, [1.0, -1.0], 1), (c, [0.0, 0.0], 0)):
        loss = (leaf.expand(2) * torch.tensor(signs)).sum()
        table, executed, fast = both(gt.trace(loss, names={"leaf": leaf}), "operators")
        assert fast and table == executed
        row = table["MulBackward0"]
        assert (row.through, row.unreached) == (reached, 1 - reached)


def test_cancelling_products_of_a_large_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two samples with opposite cotangents: the gradient of the weight is 0 everywhere."""
    monkeypatch.setattr(tuning, "CPU_BATCH_MAX_ELEMENTS", 64)
    model = nn.Linear(300, 300, bias=False)
    x = torch.ones(2, 300)
    x[:, 7] = 0
    with gt.watch(model) as watch:
        loss = (model(x) * torch.tensor([[1.0], [-1.0]])).sum()
    table, executed, fast = both(watch.trace(loss), "operators")
    assert fast and table == executed
    row = table["MulBackward0"]
    assert (row.through, row.unreached) == (300 * 299, 300)


def test_tied_weights_are_executed() -> None:
    """Their gradient is a sum over two uses, of different provenance."""
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.Tanh(), shared)
    with gt.watch(model) as watch:
        loss = model(torch.randn(3, 4)).sum()
    table, executed, fast = both(watch.trace(loss), "operators")
    assert not fast and table == executed


def test_half_precision_is_executed() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).bfloat16()
    with gt.watch(model) as watch:
        loss = model(torch.randn(3, 4).bfloat16()).float().sum()
    table, executed, fast = both(watch.trace(loss))
    assert not fast and table == executed


def test_weights_that_changed_are_counted_anew() -> None:
    model, x = nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 1)), torch.randn(1, 5)
    for _ in range(3):
        with gt.watch(model) as watch:
            loss = model(x).sum()
        table, executed, fast = both(watch.trace(loss))
        assert fast and table == executed
        for weight in model.parameters():
            weight.data = torch.randn(weight.shape)


def test_gradients_that_are_not_finite_are_noted() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    model[0].weight.data.fill_(float("nan"))
    with gt.watch(model) as watch:
        loss = model(torch.ones(1, 2)).sum()
    table, executed, fast = both(watch.trace(loss, nonfinite="allow"))
    assert fast and table == executed and any("NaN" in note for note in table.notes)


def test_many_are_measured_as_one_by_one() -> None:
    backend = backend_of(CPU)
    given = [torch.randn(3), torch.zeros(4, 4).double(), torch.randn(9, 7).t(), torch.ones(1 << 15)]
    counts, sums = backend.measure_many(given)
    each = [backend.measure(x) for x in given]
    assert counts.tolist() == [int(count) for count, _ in each]
    assert sums.tolist() == [float(total) for _, total in each]
    assert [len(found) for found in backend.measure_many([])] == [0, 0]


def test_rows_are_measured_as_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    given = torch.randn(5, 20, 30)
    given[1, 2], given[2], given[3, 0, :2] = 0, 0, torch.tensor([float("nan"), float("inf")])
    for x in (given, given.double(), given.half(), given.mT, given.transpose(0, 2), given[:, 0]):
        for limit in (tuning.PIECE_ELEMENTS, 64):
            monkeypatch.setattr(tuning, "PIECE_ELEMENTS", limit)
            for backend in (backend_of(CPU), Reference(CPU)):
                counts, sums = backend.measure_rows(x)
                each = [Reference(CPU).measure(row) for row in x]
                assert counts.tolist() == [int(count) for count, _ in each]
                torch.testing.assert_close(
                    sums, torch.stack([n for _, n in each]), rtol=0, atol=0, equal_nan=True
                )


@pytest.mark.parametrize("branches", [1, 2])
def test_an_embedding_is_counted_by_the_rows_of_its_batch(
    branches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its gradient, which is 0 in all other rows, is never made; two uses of a row cancel."""
    monkeypatch.setattr(gradients, "DEFER_MIN_ELEMENTS", 64)
    torch.manual_seed(0)
    embed, sides = nn.Embedding(400, 3), [nn.Linear(3, 2) for _ in range(branches)]
    model = nn.Sequential(embed, *sides)
    signs = torch.tensor([1.0, 1.0, -1.0, 2.0]).unsqueeze(1)
    with gt.watch(model) as watch:
        x = embed(torch.tensor([7, 3, 7, 0]))
        loss = sum((side(x) * signs).sum() for side in sides)
    wanted = []
    for sparse in (True, False):
        with mock.patch.object(Scatter, "sparse", sparse), ExitStack() as stack:
            if sparse:
                stack.enter_context(mock.patch.object(Scatter, "apply", side_effect=AssertionError))
            wanted.append(watch.trace(loss).influence("operators"))
    assert wanted[0] == wanted[1]
    row = wanted[0]["EmbeddingBackward0"]
    assert (row.through, row.unreached) == (9, 397 * 3)
