"""What a pass takes, told before it begins."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gradtrace as gt
from gradtrace import memory
from gradtrace.errors import TooLarge
from gradtrace.memory import MARK
from gradtrace.trace import Trace


def chain(layers: int, keep: bool) -> Trace:
    x = torch.ones(1000, requires_grad=True)
    y = x
    for _ in range(layers):
        y = y.tanh()
    trace = gt.trace(y.sum(), names={"x": x})
    if not keep:
        trace.program.kept.clear()
    return trace


def test_a_chain_holds_two_values_at_a_time() -> None:
    """A value and the one it becomes, each of float32 with a mark."""
    short, long = (memory.streaming(chain(n, keep=False).program) for n in (5, 50))
    assert short == long == 2 * 1000 * (4 + MARK)


def test_kept_values_cost_their_marks_only() -> None:
    program = chain(5, keep=True).program
    assert memory.streaming(program) == 2 * 1000 * MARK
    assert memory.streaming(program, kept=False) == 2 * 1000 * (4 + MARK)  # of no use to viterbi


def test_whole_counts_every_value_that_was_not_kept() -> None:
    short, long = (memory.whole(chain(n, keep=False).program) for n in (5, 50))
    assert long - short == 45 * 1000 * 4
    kept = chain(5, keep=True).program
    assert memory.whole(kept) < 5 * 1000 * 4 < memory.whole(kept, kept=False)


def test_too_large_is_refused_before_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = chain(3, keep=False)
    monkeypatch.setattr(memory, "available", lambda device: 10_000)
    with pytest.raises(TooLarge, match=r"influence takes about 15\.6 KiB, and 9\.8 KiB are free"):
        trace.influence("operators")
    with pytest.raises(TooLarge, match=r"following paths takes about .* fewer samples"):
        trace.path("x", 0)
    monkeypatch.setattr(memory, "available", lambda device: 16_000)
    assert len(trace.influence("operators"))
    monkeypatch.setattr(memory, "available", lambda device: None)  # nobody tells
    assert len(trace.influence("operators"))


def test_this_machine_tells_how_much_is_free() -> None:
    free = memory.available(torch.device("cpu"))
    assert free is None or 0 < free < 1 << 60
    assert memory.available(torch.device("meta")) is None


def test_gradients_are_kept_within_bounds() -> None:
    """Recording keeps what it computed anyway, in no more memory than the leaves have."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(200)))  # 3.3 MB of parameters
    with gt.watch(model) as watch:
        loss = model(torch.randn(2000, 64)).square().mean()  # 0.5 MB a layer
    kept = watch.trace(loss).program.kept
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept.values()}
    leaves = sum(p.nbytes for p in model.parameters())
    assert 0 < sum(sizes.values()) <= max(leaves, 1 << 24)
