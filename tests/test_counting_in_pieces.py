"""Large leaves are counted a piece at a time: marks of all of one are never there, and the table is
the same to the last bit.
"""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
import torch
from backends import ops
from torch import Tensor, nn

import gradtrace
from gradtrace.ir.lazy_gradient import LazyGradient
from gradtrace.kernels import tuning
from gradtrace.linops import Contract
from gradtrace.recording import gradients
from gradtrace.traced import Trace
from gradtrace.tracing.traced_value import PendingContribution

SPECS = {
    "mn,mk->kn": ((5, 4), (5, 6), (6, 4)),
    "mk,kn->nm": ((5, 4), (4, 3), (3, 5)),
    "bmn,bmk->kn": ((2, 5, 4), (2, 5, 6), (6, 4)),
    "bmk,bkn->bmn": ((3, 2, 4), (3, 4, 5), (3, 2, 5)),
}


@pytest.mark.parametrize("spec", SPECS)
def test_some_of_the_marks_are_those_of_all(spec: str) -> None:
    shape, weight, out = SPECS[spec]
    draw = torch.Generator().manual_seed(0)
    x, w = (torch.randn(s, generator=draw) for s in (shape, weight))
    marks = torch.randint(1, 99, shape, generator=draw, dtype=torch.int32)
    x[0] = 0
    map_ = Contract(spec, w, shape, out)
    for order in permutations(range(len(out))):
        every = map_.select(x, marks)[1].permute(order).reshape(-1)
        for first in range(0, len(every), 3):
            for last in {first + 1, min(first + 7, len(every)), len(every)}:
                some = map_.carry_some(x, marks, order, first, last)
                assert torch.equal(some, every[first:last])


class Branched(nn.Module):
    """Two ways from the last layer to the first, so that elements of that differ in their marks;
    ``tied``, its weight is used once more at the end.
    """

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.first = nn.Linear(12, 10)
        self.inner = nn.Linear(10, 10)
        self.last = nn.Linear(10, 12)
        self.tied = tied

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = self.last(x + self.inner(x).tanh())
        return x @ self.first.weight.T if self.tied else x


def traced(tied: bool, dtype: torch.dtype, rule: str = "greedy") -> Trace:
    torch.manual_seed(0)
    model = Branched(tied).to(dtype)
    with gradtrace.watch(model) as watch:
        loss = model(torch.randn(7, 12, dtype=dtype)).float().square().mean()
    return watch.trace(loss, rule=rule)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("piece", [7, 64])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("rule", ["greedy", "viterbi"])
def test_tables_are_the_same(
    rule: str,
    tied: bool,
    deferred: bool,
    piece: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if deferred:  # then gradients lie as products give them, and not as weights do
        monkeypatch.setattr(gradients, "DEFER_MIN_ELEMENTS", 1)
    trace = traced(tied, dtype, rule)
    assert any(isinstance(leaf.given, LazyGradient) for leaf in trace.program.leaves) is deferred
    whole = trace.influence()
    monkeypatch.setattr(tuning, "PIECE_ELEMENTS", piece)
    asked: list[int] = []
    real = Contract.carry_some

    def counted(self: Contract, *args: Any) -> Tensor:
        asked.append(args[-1] - args[-2])
        return real(self, *args)

    monkeypatch.setattr(Contract, "carry_some", counted)
    found = trace.influence()
    assert tied or (asked and max(asked) == piece)  # what is added to something is not put off
    monkeypatch.setattr(PendingContribution, "pieces", lambda *_: None)
    assert found == trace.influence()  # all of the marks, counted in the same order
    for row, other in zip(found, whole):
        assert (row.through, row.eligible) == (other.through, other.eligible)
        assert row.unreached == other.unreached
        assert float(row["|g| through"]) == pytest.approx(float(other["|g| through"]), rel=1e-6)


def test_sums_of_pieces_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    gradient = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 1e3
    marks = (torch.arange(1000) % 3).int()
    monkeypatch.setattr(tuning, "PIECE_ELEMENTS", 300)
    counts, sums = ops.tally(marks, gradient, 3)
    count, total = ops.measure(gradient.reshape(10, 100).T)
    wanted = [torch.zeros(3, dtype=torch.float64), torch.zeros((), dtype=torch.float64)]
    for first in range(0, 1000, 300):
        some = slice(first, first + 300)
        wanted[0] = wanted[0] + ops.tally(marks[some], gradient[some], 3)[1]
        wanted[1] = wanted[1] + ops.measure(gradient[some])[1]
    assert torch.equal(sums, wanted[0]) and torch.equal(total, wanted[1])
    assert torch.equal(counts, torch.bincount(marks)) and int(count) == 1000
