"""Gradients of leaves that are computed when somebody asks: the same as at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from backends import imitate_gpu
from torch import Tensor, nn

import gradtrace as gt
from gradtrace import session
from gradtrace.errors import GradtraceError, NonFinite, UnknownName
from gradtrace.ir.lazy_gradient import LazyGradient
from gradtrace.ir.program import MapTable
from gradtrace.recording import gradients
from gradtrace.recording.gradients import GradientCache
from gradtrace.traced import Trace
from gradtrace.tracing.greedy_rule import Greedy
from gradtrace.tracing.traced_value import TracedValue


@pytest.fixture(autouse=True)
def _all_are_large(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(gradients, "DEFER_MIN_ELEMENTS", 1)
    torch.manual_seed(0)
    yield


class Tied(nn.Module):
    """A table that is looked up at the bottom and multiplied with at the top."""

    def __init__(self, padding: int | None = None, rows: int = 9, both: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(rows, 5, padding_idx=padding)
        self.middle = nn.Linear(5, 5)
        self.out = nn.Linear(5, rows, bias=False)
        if both:
            self.out.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        return self.out((x + self.middle(x)).tanh())


class Unrolled(nn.Module):
    """One matrix, used at every step; a second as its transpose, once."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(6, 6)
        self.other = nn.Parameter(torch.randn(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(2, 6)
        for step in x.unbind(1):
            h = torch.tanh(self.cell(h) + step)
        return h @ self.other + h @ self.other.t()


def tied(
    padding: int | None = None, rows: int = 9, both: bool = True
) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    words = torch.tensor([[1, 2, 1], [0, 3, 1]])
    return Tied(padding, rows, both), lambda m: F.cross_entropy(
        m(words).flatten(0, 1), words.roll(1).flatten()
    )


def unrolled() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    x = torch.randn(2, 4, 6)
    return Unrolled(), lambda m: m(x).square().sum()


def batched() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """The last operand of a batched product is a leaf."""

    class Batched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 4, 8))
            self.first = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.bmm(self.first(x), self.weight)

    x = torch.randn(3, 2, 4)
    return Batched(), lambda m: m(x).tanh().sum()


CASES = {
    "tied": tied,
    "padded": lambda: tied(1),
    "many rows": lambda: tied(rows=100),
    "many rows, padded": lambda: tied(2, rows=100),
    "two tables": lambda: tied(1, rows=100, both=False),
    "unrolled": unrolled,
    "batched": batched,
}


def traced(model: nn.Module, loss_of: Callable[[nn.Module], Tensor], rule: str = "greedy") -> Trace:
    with gt.watch(model) as watch:
        loss = loss_of(model)
    return watch.trace(loss, rule=rule)


def put_off(trace: Trace) -> list[str]:
    return [trace.names[x.value] for x in trace.program.leaves if isinstance(x.given, LazyGradient)]


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_autograd(case: str) -> None:
    model, loss_of = CASES[case]()
    trace = traced(model, loss_of)
    assert put_off(trace)
    names, parameters = zip(*model.named_parameters())
    for name, grad in zip(names, torch.autograd.grad(loss_of(model), parameters)):
        torch.testing.assert_close(trace.gradients[name], grad)


@pytest.mark.parametrize("case", CASES)
def test_on_a_gpu_with_room_nothing_is_put_off(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, loss_of = CASES[case]()
    imitate_gpu(monkeypatch)
    monkeypatch.setattr(session, "kept_gradient_bytes", lambda *_: 1 << 30)
    trace = traced(model, loss_of)
    assert not put_off(trace)
    names, parameters = zip(*model.named_parameters())
    for name, grad in zip(names, torch.autograd.grad(loss_of(model), parameters)):
        assert torch.equal(trace.gradients[name], grad)
    monkeypatch.setattr(session, "kept_gradient_bytes", lambda *_: 8)
    assert put_off(traced(model, loss_of))


def test_memory_is_spent_as_long_as_there_is_plenty() -> None:
    store = GradientCache(100, MapTable())
    assert [store.spend(n) for n in (30, 30, 20, 1)] == [True, False, True, False]
    assert store.bytes_left == 50
    assert not GradientCache(0, MapTable()).spend(0)


@pytest.mark.parametrize("rule", ["greedy", "edge", "viterbi"])
@pytest.mark.parametrize("case", CASES)
def test_nothing_depends_on_it(case: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, loss_of = CASES[case]()
    later = traced(model, loss_of, rule)
    few = later.paths(sample=20)
    monkeypatch.setattr(gradients, "DEFER_MIN_ELEMENTS", 1 << 40)
    at_once = traced(model, loss_of, rule)
    assert not put_off(at_once)
    for ours, theirs in zip(later.influence().rows, at_once.influence().rows, strict=True):
        assert (ours.name, ours.own, ours.unreached) == (theirs.name, theirs.own, theirs.unreached)
        assert (ours.through, ours.eligible) == (theirs.through, theirs.eligible)
        assert float(ours["|g| through"]) == pytest.approx(float(theirs["|g| through"]), rel=1e-5)
    for mine, other in zip(few, at_once.paths(sample=20), strict=True):
        assert (mine.name, mine.index, mine.operators) == (
            other.name,
            other.index,
            other.operators,
        )
        assert mine.gradient == pytest.approx(other.gradient, rel=1e-4, abs=1e-7)
        assert mine.weight == pytest.approx(other.weight, rel=1e-4, abs=1e-7)


@pytest.mark.parametrize("rule", ["greedy", "edge"])
def test_few_rows_of_a_large_table_are_compared_by_themselves(
    rule: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, loss_of = tied(rows=100)
    seen = []
    real = Greedy._join_sparse

    def counted(self: Greedy, states: list[TracedValue], dtype: torch.dtype) -> TracedValue | None:
        seen.append(real(self, states, dtype))
        return seen[-1]

    monkeypatch.setattr(Greedy, "_join_sparse", counted)
    found = traced(model, loss_of, rule).influence()
    (state,) = seen
    assert state is not None and state.sparse is not None
    assert len(state.sparse.at) == 4 * 5  # four words occur
    assert len(set(state.sparse.ids.tolist())) == 3  # past the middle, through it, from the top
    monkeypatch.setattr(Greedy, "_join_sparse", lambda self, states, dtype: None)
    plain = traced(model, loss_of, rule).influence()
    for ours, theirs in zip(found.rows, plain.rows, strict=True):
        assert (ours.through, ours.eligible) == (theirs.through, theirs.eligible)
        assert float(ours["|g| through"]) == pytest.approx(float(theirs["|g| through"]), rel=1e-6)


def test_equal_products_become_one() -> None:
    model, loss_of = unrolled()
    trace = traced(model, loss_of)
    (cell,) = (x for x in trace.program.leaves if trace.names[x.value] == "cell.weight")
    assert isinstance(cell.given, LazyGradient)
    assert len(cell.given.parts) == 4  # three products, and a sum
    calls: list[str] = []
    whole = torch.einsum

    def counted(spec: str, *operands: Tensor) -> Tensor:
        calls.append(spec)
        return whole(spec, *operands)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "einsum", counted)
        cell.given.total()
    assert len(calls) == 1


@pytest.mark.parametrize("steps", [3, 40])
def test_no_more_is_held_for_a_leaf_than_its_gradient_takes(steps: int) -> None:
    """A matrix of 6 × 6 that is used by 2 × 6 elements at a time: three are held, then sums."""
    model = Unrolled()
    x = torch.randn(2, steps, 6)

    def loss_of(model: nn.Module) -> Tensor:
        return model(x).square().sum()

    trace = traced(model, loss_of)
    (cell,) = (x for x in trace.program.leaves if trace.names[x.value] == "cell.weight")
    assert isinstance(cell.given, LazyGradient)
    products = [part for part in cell.given.parts if part.maps and part.x.shape == (2, 6)]
    assert len(products) == 3
    assert len(cell.given.parts) == (3 if steps == 3 else 4)  # and one sum of all the others
    (grad,) = torch.autograd.grad(loss_of(model), [model.cell.weight])
    torch.testing.assert_close(trace.gradients["cell.weight"], grad)


def test_a_matrix_and_its_transpose_are_not_mixed_up() -> None:
    model, loss_of = unrolled()
    trace = traced(model, loss_of)
    (grad,) = torch.autograd.grad(loss_of(model), [model.get_parameter("other")])
    torch.testing.assert_close(trace.gradients["other"], grad)


def test_hooks_see_true_gradients() -> None:
    model, loss_of = tied()
    seen: list[Tensor] = []
    weight = model.get_parameter("middle.weight")
    weight.register_hook(lambda grad: seen.append(grad.clone()) or 2 * grad)
    trace = traced(model, loss_of)
    assert "middle.weight" not in put_off(trace)
    (grad,) = torch.autograd.grad(loss_of(model), [weight])
    torch.testing.assert_close(trace.gradients["middle.weight"], grad)
    torch.testing.assert_close(seen[0], grad / 2)


def test_an_overflow_is_seen_all_the_same() -> None:
    model = nn.Linear(4, 4, bias=False)
    x = torch.full((2, 4), 1e30)
    with gt.watch(model) as watch:
        loss = (model(x) * 1e30).sum()
    with pytest.raises(NonFinite, match="weight"):
        watch.trace(loss)


def test_large_factors_alone_are_no_overflow() -> None:
    model = nn.Linear(4, 4, bias=False)
    x = torch.full((2, 4), 1e30)
    with gt.watch(model) as watch:
        loss = (model(x) * 1e8).sum()
    trace = watch.trace(loss)
    torch.testing.assert_close(trace.gradients["weight"], torch.full((4, 4), 2e38))


def test_activations_that_change_are_noticed() -> None:
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    trace = traced(model, lambda m: m(x).tanh().sum())
    x.add_(1)
    with pytest.raises(GradtraceError, match="changed in place"):
        _ = trace.gradients["weight"]


def test_gradients_stay_after_a_step_of_the_optimiser() -> None:
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    trace = traced(model, lambda m: m(x).tanh().sum())
    (grad,) = torch.autograd.grad(model(x).tanh().sum(), [model.weight])
    with torch.no_grad():
        model.weight.sub_(1.0)
    torch.testing.assert_close(trace.gradients["weight"], grad)


def test_gradients_are_a_mapping_by_name() -> None:
    model, loss_of = tied()
    found = traced(model, loss_of).gradients
    assert list(found) == ["embed.weight", "middle.weight", "middle.bias"]
    assert len(found) == 3 and "middle.bias" in found and "out.weight" not in found
    assert found["out.weight"] is found["embed.weight"]  # tied, and computed once
    assert dict(found)["middle.weight"] is found["middle.weight"]
    with pytest.raises(UnknownName, match=r"middle\.weight"):
        _ = found["middle.weigth"]


def test_small_gradients_are_dropped_where_large_ones_are() -> None:
    """Between large ones that come and go they would keep memory from being used again."""
    store = GradientCache(9_000, MapTable())
    large, small = torch.ones(1 << 10), torch.ones(2)
    store.add(0, small.clone(), False)
    store.add(1, large, False)
    store.add(2, large.clone(), False)  # past half of the budget
    assert store.refused and set(store.values) == {0, 1}
    store.add(3, small, False)
    store.add(4, small, True)
    assert set(store.values) == {0, 1, 4}
