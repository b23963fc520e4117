"""Captured passes, on a GPU that is imitated by noting calls: the same tables, to the bit."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import randomgraphs
import thorough
import torch
from architectures import ARCHITECTURES
from backends import use
from noted import NotingGpu
from random_transformers import gpt2
from test_kept_plans import Branches
from torch import Tensor, nn

import gradtrace as gt
from gradtrace.ir.static_operands import StaticOperands
from gradtrace.kernels import tuning
from gradtrace.kernels.capture import NotCapturable
from gradtrace.table import Table
from gradtrace.traced import Trace
from gradtrace.tracing import counting, executor, provenance, traced_value
from gradtrace.tracing.captured_pass import CapturedPass
from gradtrace.tracing.kept_plans import KEPT, forget


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[NotingGpu]:
    forget()
    found = NotingGpu()
    use(monkeypatch, found)
    yield found
    forget()


def traced(model: nn.Module, *given: Tensor, rule: str = "greedy") -> Trace:
    with gt.watch(model) as watch:
        loss = model(*given).square().mean()
    return watch.trace(loss, rule=rule)


def uncaptured(trace: Trace, kind: str | None = None, of: str | None = None) -> Table:
    """The same table, executed instruction by instruction."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(counting, "_captured", lambda *_: nullcontext())
        return trace.influence(kind, of=of)


def changed(model: nn.Module, size: float = 0.1) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(size * torch.randn_like(parameter))


def captured_pass() -> CapturedPass:
    """The one that is kept."""
    (found,) = [slot.made for kept in KEPT._kept.values() for slot in kept.captures if slot.made]
    assert isinstance(found, CapturedPass)
    return found


def compacting(patch: pytest.MonkeyPatch, above: int = 4) -> None:
    """Tables of more entries are compacted."""
    for module in (provenance, traced_value, executor):
        patch.setattr(module, "COMPACT_ABOVE_ENTRIES", above)


# The same tables ----------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["greedy", "edge"])
@pytest.mark.parametrize("above", [4, 512])
def test_weights_and_inputs_change(
    rule: str, above: int, gpu: NotingGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    compacting(monkeypatch, above)
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 90, "n_embd": 12, "n_layer": 3, "n_head": 2, "n_positions": 8}
    model = gpt2(8, **sizes).model
    for step in range(6):
        ids = torch.randint(0, 90, (1, 8))
        with gt.watch(model) as watch:
            loss = model(input_ids=ids, labels=ids).loss
        trace = watch.trace(loss, rule=rule)
        assert trace.influence() == uncaptured(trace), step
        changed(model)
    (row,) = KEPT.summary().rows
    assert (row.graphs, row.executed) == (3, "")
    assert [graph.replays for graph in gpu.graphs] == [3]
    capacities = captured_pass().fixed.capacities
    assert bool(capacities) is (above == 4)


@pytest.mark.parametrize("name", thorough.some(ARCHITECTURES, 5))
def test_architectures(name: str, gpu: NotingGpu) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        model, loss_of = ARCHITECTURES[name]()
        for step in range(5):
            with gt.watch(model) as watch:
                loss = loss_of(model)
            trace = watch.trace(loss)
            assert trace.influence() == uncaptured(trace), step
            changed(model, 0.01)


@pytest.mark.parametrize("rule", ["greedy", "edge"])
def test_random_graphs(rule: str, gpu: NotingGpu) -> None:
    replays = 0
    for seed in range(thorough.few(12, 300)):
        forget()
        for _ in range(5):
            sample = randomgraphs.build(seed)
            trace = gt.trace(sample.loss, names=sample.leaves, rule=rule)
            assert trace.influence("operators") == uncaptured(trace, "operators"), seed
        replays += KEPT.summary().rows[0].graphs
    assert replays


def test_ties_and_zeros(gpu: NotingGpu) -> None:
    """Whole numbers, of which many products are equal, and some 0."""
    torch.manual_seed(0)
    model = Branches(added=True)
    for step in range(7):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randint(-1, 2, parameter.shape))
        trace = traced(model, torch.randint(-1, 2, (5, 4)).float())
        assert trace.influence() == uncaptured(trace), step


def test_of_some_leaves_and_of_other_components(gpu: NotingGpu) -> None:
    torch.manual_seed(0)
    model = Branches()
    for _ in range(5):
        trace = traced(model, torch.randn(5, 4))
        for kind, of in (("operators", None), ("modules", "left")):
            assert trace.influence(kind, of=of) == uncaptured(trace, kind, of)
    assert len(gpu.graphs) == 2 and {row.graphs for row in KEPT.summary().rows} == {2}


def test_earlier_traces_stay_valid(gpu: NotingGpu) -> None:
    """Their tensors are their own."""
    torch.manual_seed(0)
    model = Branches()
    traces = [traced(model, torch.randn(5, 4)) for _ in range(6)]
    wanted = [uncaptured(trace) for trace in traces]
    assert [trace.influence() for trace in traces] == wanted
    assert [trace.influence() for trace in reversed(traces)] == wanted[::-1]
    assert KEPT.summary().rows[0].graphs == 9


# What does not fit --------------------------------------------------------------------------------


class Cancelling(nn.Module):
    """Two ways to one value, and one past both; with ``other`` = -1 the two cancel."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)
        self.other = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        here = self.first(x)
        there = here.sin() + self.other * here.sin()
        found: Tensor = self.last(there)
        return found + there.tanh()


def test_what_cancels_is_executed_as_before(gpu: NotingGpu) -> None:
    torch.manual_seed(0)
    model = Cancelling()
    for step in range(9):
        with torch.no_grad():
            model.other.fill_(-1.0 if step == 5 else 0.5 + step)
        trace = traced(model, torch.randn(4, 3))
        assert trace.influence() == uncaptured(trace), step
    assert KEPT.summary().rows[0].graphs


def assumed_wrong(gpu: NotingGpu, model: nn.Module, x: Tensor) -> str:
    trace = traced(model, x)
    assert trace.influence() == uncaptured(trace)
    return KEPT.summary().rows[0].executed


def test_cancelled_elements_of_values_between(gpu: NotingGpu) -> None:
    """Elements whose contributions cancel, though none is 0: nobody looks until the end."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2, bias=False))

    def reason() -> str:
        with gt.watch(model) as watch:
            loss = model(torch.randn(3, 2)).sum()
        trace = watch.trace(loss)
        assert trace.influence() == uncaptured(trace)
        return KEPT.summary().rows[0].executed

    assert [reason() for _ in range(4)] == [*2 * ["it was not met often enough"], "", ""]
    with torch.no_grad():
        model[2].weight.copy_(torch.tensor([[1.0, 2.0, 3.0], [-1.0, 2.0, 3.0]]))
    assert reason() == "elements whose contributions cancel"
    assert KEPT.summary().rows[0].graphs == 1 and KEPT.summary().device_bytes == 0


def test_a_table_that_is_too_small(gpu: NotingGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    compacting(monkeypatch, 2)
    torch.manual_seed(0)
    model = Towers()
    for _ in range(3):
        assert assumed_wrong(gpu, model, torch.randn(5, 4)) in ("it was not met often enough", "")
    fixed = captured_pass().fixed
    assert fixed.capacities
    fixed.capacities = [1] * len(fixed.capacities)
    assert assumed_wrong(gpu, model, torch.randn(5, 4)).endswith("more than 1")
    for _ in range(3):
        assert assumed_wrong(gpu, model, torch.randn(5, 4)) == ""
    assert [graph.replays for graph in gpu.graphs] == [1, 2]  # with new capacities


class Towers(nn.Module):
    """Residual layers, whose tables double."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x


def test_after_several_misses_there_is_no_more_attempt(
    gpu: NotingGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StaticOperands, "take", lambda *_: "of another kind")
    model = Branches()
    for _ in range(7):
        assumed_wrong(gpu, model, torch.randn(5, 4))
    (row,) = KEPT.summary().rows
    assert row.executed == "of another kind" and not row.graphs and not gpu.graphs
    slot = next(iter(KEPT._kept.values())).captures[0]
    assert slot.off and slot.misses == 3


def test_two_models_of_one_structure_in_turns(gpu: NotingGpu) -> None:
    torch.manual_seed(0)
    models = Branches(), Branches()
    for step in range(12):
        reason = assumed_wrong(gpu, models[step % 2], torch.randn(5, 4))
    assert reason == "weights lie elsewhere" and not gpu.graphs
    assert next(iter(KEPT._kept.values())).captures[0].off


@pytest.mark.parametrize(
    "rule, most, reason",
    [("viterbi", 1 << 20, "the rule viterbi looks at values"), ("greedy", 9, "its tensors take")],
)
def test_reasons(
    rule: str, most: int, reason: str, gpu: NotingGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "CAPTURED_MAX_BYTES", most)
    for _ in range(4):
        traced(Branches(), torch.randn(5, 4), rule=rule).influence()
    (row,) = KEPT.summary().rows
    assert row.executed.startswith(reason)


def test_what_looks_at_elements_is_refused(gpu: NotingGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    compacting(monkeypatch, 2)
    real = NotingGpu.gaps

    def looking(self: NotingGpu, ids: Tensor, count: int) -> tuple[Tensor, Tensor]:
        assert bool(ids.any())
        return real(self, ids, count)

    monkeypatch.setattr(NotingGpu, "gaps", looking)
    model = Towers()
    for _ in range(5):
        reason = assumed_wrong(gpu, model, torch.randn(5, 4))
    assert reason.endswith("looks at elements") and not gpu.graphs


# Memory -------------------------------------------------------------------------------------------


def captured_model(gpu: NotingGpu) -> tuple[Branches, weakref.ref[Any]]:
    model = Branches()
    for _ in range(4):
        traced(model, torch.randn(5, 4)).influence()
    made = captured_pass()
    assert 0 < made.nbytes == KEPT.summary().device_bytes
    return model, weakref.ref(made)


def test_memory_is_freed_on_request(gpu: NotingGpu) -> None:
    _, made = captured_model(gpu)
    forget()
    gc.collect()
    assert made() is None


def test_memory_is_freed_with_the_model(gpu: NotingGpu) -> None:
    model, made = captured_model(gpu)
    del model
    gc.collect()
    assert made() is None
    assert KEPT.summary().rows[0].executed == "the model has gone"


def test_the_last_passes_are_kept(gpu: NotingGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "CAPTURED_MAX_PASSES", 2)
    model = Branches()
    for batch in (5, 6, 7):
        for _ in range(4):
            traced(model, torch.randn(batch, 4)).influence()
    assert [bool(row.device_bytes) for row in KEPT.summary().rows] == [True, True, False]
    assert KEPT.summary().rows[2].executed == "other passes took its memory"


def test_operands_that_share_memory_keep_sharing_it() -> None:
    x = torch.arange(24.0).reshape(4, 6)
    w = nn.Parameter(torch.ones(6))
    parts = (x * w).split(2, dim=1)
    loss = (parts[0] * parts[1] * parts[2]).sum()
    given = gt.trace(loss, names={"w": w}).program.constants
    operands = StaticOperands(given, 1 << 20)
    assert operands.take(given) == ""
    with pytest.raises(NotCapturable, match="its tensors take"):
        StaticOperands(given, 8)
    for map_, other in zip(given.maps, operands.constants.maps):
        assert type(map_) is type(other)
        for name in map_.weights:
            mine, theirs = getattr(map_, name), getattr(other, name)
            if isinstance(mine, Tensor):
                assert torch.equal(mine, theirs) and mine.stride() == theirs.stride()
                same = mine.data_ptr() == theirs.data_ptr()
                assert same is (mine.untyped_storage().data_ptr() == w.untyped_storage().data_ptr())
