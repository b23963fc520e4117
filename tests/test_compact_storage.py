"""Provenance ids in compact storage: nothing changes but what they take."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import randomgraphs
import torch
from architectures import ARCHITECTURES
from backends import use
from random_transformers import gpt2
from torch import Tensor, nn

import gradtrace as gt
from gradtrace.errors import TooLarge
from gradtrace.ir import memory
from gradtrace.ir.plan import Join
from gradtrace.kernels import Cuda, Reference, backend_of, cuda_launch, cuda_tiling, tuning
from gradtrace.linops import Contract, Identity
from gradtrace.traced import Trace
from gradtrace.tracing import compact_storage, executor
from gradtrace.tracing.compact_storage import CompactValues, packed, take, unpacked
from gradtrace.tracing.executor import Executor
from gradtrace.tracing.kept_plans import forget
from gradtrace.tracing.provenance import ProvenanceTable
from gradtrace.tracing.traced_value import TracedValue


def state(numbers: Tensor | None, count: int) -> TracedValue:
    return TracedValue(None, 0, numbers, ProvenanceTable(tuple(range(1, count + 1))))


@pytest.mark.parametrize(
    ("count", "kind"),
    [
        (1, torch.uint8),
        (255, torch.uint8),
        (256, torch.int16),
        (32_767, torch.int16),
        (32_768, torch.int32),
    ],
)
def test_every_number_comes_back(count: int, kind: torch.dtype) -> None:
    numbers = torch.arange(count + 1, dtype=torch.int32)
    held = packed(state(numbers, count))
    assert held.ids is not None and held.ids.dtype is kind
    back = unpacked(held).ids
    assert back is not None and back.dtype is torch.int32 and torch.equal(back, numbers)


def raw(shelf: CompactValues) -> list[Tensor]:
    """The numbers as they are held."""
    return [held.ids for held in shelf.values() if held.ids is not None]


def test_numbers_lie_as_they_did() -> None:
    """By that the order of sums is chosen."""
    x = torch.arange(24, dtype=torch.int32).reshape(2, 3, 4).clone()
    views = [x, x.permute(2, 0, 1), x.mT, x[1], x[0, 0, 0], x[:0], x[:, :1], x[1].mT, x[1, 1:]]
    views += [x[:, :, 1:3], x[:1].expand(5, 3, 4), x[:, ::2], x[..., 2]]
    for view in views:
        shelf = CompactValues()
        shelf[1] = state(view, 30)
        (held,) = raw(shelf)
        assert held.dtype is torch.uint8
        back = shelf[1].ids
        assert back is not None and back.dtype is torch.int32
        assert torch.equal(back, view) and back.stride() == view.stride()
        assert back.storage_offset() == view.storage_offset()


def test_what_lies_apart_stays() -> None:
    """If nobody knows what it is a part of."""
    line = torch.arange(24, dtype=torch.int32)
    for view in (line[1::2].detach(), line[:1].expand(5)):
        alone = torch.empty(0, dtype=torch.int32).set_(  # type: ignore[call-overload]
            line.untyped_storage(), view.storage_offset(), view.shape, view.stride()
        )
        assert alone._base is None
        shelf = CompactValues()
        shelf[1] = state(alone, 30)
        assert raw(shelf)[0] is alone and shelf[1].ids is alone


def test_numbers_that_are_shared_are_held_once() -> None:
    x = torch.arange(24, dtype=torch.int32)
    shelf = CompactValues()
    shelf[1], shelf[2], shelf[3] = state(x, 30), state(x, 31), state(x.view(4, 6).t(), 30)
    assert len({_memory(held) for held in raw(shelf)}) == 1
    again = shelf[3]
    shelf[4] = again._replace(provenance=ProvenanceTable((1,)))
    assert again.ids is not None
    shelf[5] = state(again.ids[1:], 30)
    assert len({_memory(held) for held in raw(shelf)}) == 1
    assert [held.dtype for held in raw(shelf)] == [torch.uint8] * 5
    wanted = [x, x, x.view(4, 6).t(), x.view(4, 6).t(), x.view(4, 6).t()[1:]]
    for value, numbers in enumerate(wanted, 1):
        found = shelf[value].ids
        assert found is not None and torch.equal(found, numbers)


def test_a_shelf() -> None:
    shelf = CompactValues()
    shelf[2] = state(None, 1)
    shelf[3] = state(torch.ones(2, dtype=torch.int32), 9)
    assert shelf[2].ids is None and raw(shelf)[0].dtype is torch.uint8
    found = take(shelf, 3)
    assert found.ids is not None and found.ids.dtype is torch.int32
    assert [*shelf] == [2]
    with pytest.raises(KeyError):
        take(shelf, 3)


# Results ------------------------------------------------------------------------------------------


@pytest.fixture
def kinds(monkeypatch: pytest.MonkeyPatch) -> set[torch.dtype]:
    """The types of marks that were put away."""
    seen: set[torch.dtype] = set()
    right = compact_storage.narrowed

    def spied(numbers: Tensor, count: int) -> Tensor:
        found = right(numbers, count)
        seen.add(found.dtype)
        return found

    monkeypatch.setattr(compact_storage, "narrowed", spied)
    return seen


def both(trace: Trace, *asked: Any) -> None:
    """The table is the same, to the last bit, with marks that wait in few bytes."""
    trace.budget = None
    wide = trace.influence(*asked)
    trace.budget, trace.asked = 0, {}
    assert trace.influence(*asked) == wide


@pytest.mark.parametrize("rule", ["greedy", "edge", "viterbi"])
def test_random_graphs(rule: str, kinds: set[torch.dtype]) -> None:
    for seed in range(30):
        sample = randomgraphs.build(seed)
        both(gt.trace(sample.loss, names=sample.leaves, rule=rule), "operators")
    assert torch.uint8 in kinds


@pytest.mark.parametrize("rule", ["greedy", "edge", "viterbi"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "resnet", "mamba2", "t5"])
def test_architectures(name: str, rule: str, kinds: set[torch.dtype]) -> None:
    model, loss_of = ARCHITECTURES[name]()
    torch.manual_seed(0)
    with gt.watch(model) as watch:
        loss = loss_of(model)
    both(watch.trace(loss, rule=rule))
    assert torch.uint8 in kinds


@pytest.mark.parametrize("rule", ["greedy", "edge", "viterbi"])
def test_pairs(rule: str, kinds: set[torch.dtype]) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"table": nn.Embedding(7, 6), "norm": nn.LayerNorm(6)})
    model["mix"] = nn.Linear(6, 6)
    with gt.watch(model) as watch:
        hidden = model["table"](torch.tensor([[1, 2, 2], [0, 1, 3]]))
        for _ in range(2):
            hidden = hidden + model["mix"](model["norm"](hidden)).tanh()
        loss = hidden.square().sum((1, 2))
    both(watch.trace(loss, rule=rule))
    assert torch.uint8 in kinds


def test_many_marks(kinds: set[torch.dtype]) -> None:
    """More of them than a byte holds."""
    x = torch.randn(40, 30, requires_grad=True)
    with gt.watch(nn.Identity()) as watch:
        hidden = gt.label(x.tanh(), 1, "unit")
        hidden = gt.label((hidden @ torch.randn(30, 40)).tanh(), 1, "other")
        loss = (hidden @ torch.randn(40, 5)).square().sum()
    both(watch.trace(loss), "labels")
    assert torch.int16 in kinds


# What they take -----------------------------------------------------------------------------------


def peak(trace: Trace, narrow: bool, monkeypatch: pytest.MonkeyPatch) -> int:
    """The most bytes of marks that wait at a time."""
    most, right = 0, executor.HANDLERS[Join]

    def joined(running: Executor, op: Any) -> tuple[int, ...]:
        nonlocal most
        sizes = {_memory(x): x.untyped_storage().nbytes() for x in _held(running.states)}
        most = max(most, sum(sizes.values()))
        return right(running, op)

    with monkeypatch.context() as patch:
        patch.setitem(executor.HANDLERS, Join, joined)
        patch.setattr(memory, "short", lambda *_: narrow)
        trace.asked = {}
        forget()  # plans of later losses are executed in one call
        trace.influence()
    return most


def _held(states: dict[int, TracedValue]) -> Iterator[Tensor]:
    return (each.ids for each in states.values() if each.ids is not None)


def _memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_marks_that_wait_take_a_quarter(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a little more, for those that lie apart in memory."""
    model, loss_of = ARCHITECTURES[name]()
    torch.manual_seed(0)
    with gt.watch(model) as watch:
        trace = watch.trace(loss_of(model))
    wide, narrow = (peak(trace, how, monkeypatch) for how in (False, True))
    assert 4 * narrow <= 1.2 * wide, (wide, narrow)


def problem() -> Trace:
    torch.manual_seed(0)
    given = gpt2(8, vocab_size=30, n_embd=12, n_layer=3, n_head=2, n_positions=8)
    with gt.watch(given.model) as watch:
        return watch.trace(given.loss())


def test_what_did_not_fit_may_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = problem()
    wide, narrow = (memory.streaming(trace.program, True, how) for how in (False, True))
    assert narrow < wide
    table = trace.influence()
    for free, fits in ((2 * wide, True), (wide - 1, True), (narrow, True), (narrow - 1, False)):
        trace.asked = {}
        monkeypatch.setattr(memory, "available", lambda device, free=free: free)
        if fits:
            assert trace.influence() == table
        else:
            with pytest.raises(TooLarge, match="measuring influence takes about"):
                trace.influence()


def test_what_is_needed_is_told_for_narrow_marks() -> None:
    """A value and the one it becomes: the first grows, the second is new."""
    x = torch.ones(1000, requires_grad=True)
    y = x
    for _ in range(5):
        y = y.tanh()
    program = gt.trace(y.sum(), names={"x": x}).program
    assert memory.streaming(program, kept=False) == 2 * 1000 * (4 + 4)
    assert memory.streaming(program, kept=False, narrow=True) == 2 * 1000 * (4 + 4)
    side = torch.ones(1000, requires_grad=True)
    waits = gt.trace(((x * side).tanh().sum() + y.sum()), names={"x": x, "side": side}).program
    assert memory.streaming(waits, False, True) < memory.streaming(waits, False)


def test_a_budget_says_when_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available", lambda device: 1000)
    here = backend_of(torch.device("cpu"))
    assert not memory.short(500, here) and memory.short(501, here)
    assert memory.short(500, here, 999) and not memory.short(500, here, 1000)
    assert memory.short(1, here, 0) and not memory.short(0, here, 0)
    monkeypatch.setattr(memory, "available", lambda device: None)  # nobody tells
    assert not memory.short(1 << 60, here)


# A contraction's workspace ------------------------------------------------------------------------


def product(m: int, k: int, n: int) -> Contract:
    weight = torch.ones(1).expand(k, n)
    return Contract("mk,kn->mn", weight, (m, k), (m, n))


GPU = torch.device("cuda", 0)


def _all(shape: tuple[int, int, int], k: int) -> int:
    """What it takes at once, with operands that have to be copied."""
    return cuda_tiling.contraction_plan(shape, k, (None, None), (True, True), 132).space.size


def test_a_contraction_lays_its_operands_out_on_a_gpu_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small, large = product(64, 32, 48), product(1 << 15, 1 << 12, 1 << 15)
    monkeypatch.setattr(cuda_launch, "processors", lambda device: 132)
    gpu = Cuda(GPU)
    assert memory.workspace(small, Reference(GPU)) == 0
    assert memory.workspace(Identity((3,)), gpu) == 0
    assert memory.workspace(product(0, 3, 4), gpu) == 0
    assert memory.workspace(small, gpu) == _all((1, 64, 48), 32)
    assert memory.workspace(large, gpu) == tuning.SMALL_WORKSPACE_BYTES
    assert gpu.workspace_max_bytes() > tuning.SMALL_WORKSPACE_BYTES
    long = product(1 << 10, 1 << 20, 1 << 10)  # a tile of it is more than that
    assert memory.workspace(long, gpu) == _all((1, 256, 256), 1 << 20)


def test_it_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    program = problem().program
    before = memory.streaming(program)
    monkeypatch.setattr(memory, "workspace", lambda map_, backend: 1000)
    program.facts.streaming_bytes.clear()
    assert memory.streaming(program) == before  # on the CPU nobody asks
    use(monkeypatch, Cuda(GPU))
    program.facts.streaming_bytes.clear()
    assert memory.streaming(program) == before + 1000
