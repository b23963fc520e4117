"""What a GPU's kernels must give, to the bit: cases for ``test_gpu`` (on a GPU) and
``test_emulated`` (the same sources on the processor).

Each takes the device that its tensors are to be on, and compares with plain torch on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import scalar_pairs
import torch
import torch.nn.functional as F
from backends import ops, plainly
from test_maps import apart, maker, whole
from test_maps import numbers as along_a_line
from test_select import odd
from test_selection_kernels import SHAPES as LINES
from test_selection_kernels import every_pair as all_pairs
from torch import Tensor, nn

import gradtrace
from gradtrace.ir.plan import Encoding, Form
from gradtrace.kernels import (
    backend_of,
    cuda_contraction,
    cuda_ids,
    cuda_reduce,
    plain_contraction,
    tuning,
)
from gradtrace.kernels.cuda_batched_tally import BatchedTally
from gradtrace.kernels.operands import Contraction, LowRankLines, Matrices, Operand
from gradtrace.kernels.strides import reduction
from gradtrace.linops import Contract, Normaliser, Scale
from gradtrace.semirings import ABS, TopK
from gradtrace.table import Table
from gradtrace.tracing import greedy_rule
from gradtrace.tracing.greedy_rule import Greedy
from gradtrace.tracing.provenance import ProvenanceTable
from gradtrace.tracing.traced_value import TracedValue

NAN, INF = math.nan, math.inf
MAKERS = {"generic": maker, "ties": whole, "odd": odd}
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
WIDE = FLOATS[:2]


def numbers(kind: str, dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    return MAKERS[kind](seed, torch.float64)(*shape).to(dtype)


def words(n: int, most: int, seed: int = 3) -> Tensor:
    return torch.randint(0, most, (n,), generator=torch.Generator().manual_seed(seed)).int()


def same(found: Tensor, wanted: Tensor) -> None:
    """To the bit, but that all NaNs are alike."""
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    torch.testing.assert_close(found.cpu(), wanted, rtol=0, atol=0, equal_nan=True)


def strided(x: Tensor) -> list[Tensor]:
    """The same numbers, lying otherwise."""
    back = list(reversed(range(x.dim())))
    return [x, apart(x), x.permute(back).contiguous().permute(back)]


# The contraction ---------------------------------------------------------------------------------


def spoilt(x: Tensor, number: float) -> Tensor:
    x = x.clone()
    x[0, 0, x.shape[2] // 2] = number
    return x


DATA: dict[str, Callable[[Tensor], Tensor]] = {
    "Gaussian": lambda x: x,
    "ties": lambda x: (2 * x).round(),
    "zeros": lambda x: torch.where(x > 1, x, 0),
    "nothing": torch.zeros_like,
    "NaN": lambda x: spoilt(x, NAN),
    "infinite": lambda x: spoilt(x, INF),
    "denormal": lambda x: x * 1e-20,
    "tiny": lambda x: x * 1e-21,  # products are 0 in bfloat16
    "near": lambda x: 1 + x / 99,  # equal in bfloat16
    "turned": lambda x: x.mT.contiguous().mT,
    "apart": lambda x: torch.stack([x, x], -1)[..., 0],
}
SMALL = [(1, 5, 3, 4), (2, 130, 37, 33), (1, 40, 300, 140), (3, 2, 1, 5)]
"""Matrices, m, k, n."""


def alike(found: Contraction, wanted: Contraction) -> None:
    there = None if wanted.value is None else wanted.value != 0
    for mine, theirs in zip(found, wanted):
        assert (mine is None) == (theirs is None)
        if mine is None or theirs is None:
            continue
        if theirs is wanted.index:  # it means nothing where the value is 0
            assert there is not None
            mine, theirs = mine.cpu()[there], theirs[there]
        same(mine, theirs)


def sent(x: Matrices, device: str) -> Matrices:
    return Operand(*(part.to(device) for part in x)) if isinstance(x, Operand) else x.to(device)


def contracted(device: str, a: Matrices, b: Matrices, **how: Any) -> None:
    """What ``gpu`` gives and what the reference does."""
    here: dict[str, Any] = {k: sent(x, device) if k == "ids" else x for k, x in how.items()}
    found = cuda_contraction.contraction(sent(a, device), sent(b, device), **here)
    alike(found, plain_contraction.contraction(a, b, **how))


def contraction(
    device: str, shape: tuple[int, int, int, int], name: str, dtype: torch.dtype
) -> None:
    """Index, marks of either side, value alone, marks alone."""
    i, m, k, n = shape
    draw = torch.Generator().manual_seed(0)
    a = DATA[name](torch.randn(i, m, k, generator=draw)).to(dtype)
    b = DATA[name](torch.randn(i, k, n, generator=draw)).to(dtype)
    contracted(device, a, b, index=True)
    contracted(device, a, b)
    for of_b, size in ((False, (i, m, k)), (True, (i, k, n))):
        marks = torch.randint(1, 1 << 20, size, dtype=torch.int32, generator=draw)
        contracted(device, a, b, ids=marks, of_b=of_b)
        contracted(device, a, b, value=False, ids=marks.long().mT.contiguous().mT, of_b=of_b)


def windows(device: str, scale: int = 1, dtype: torch.dtype = torch.float32) -> None:
    """Operands with tables are read where they lie."""
    draw = torch.Generator().manual_seed(0)
    sides = ((2, 500), (30 * scale, 7), (30 * scale, 3))
    data = torch.randn(500 + sides[1][0] * 7 + sides[2][0] * 3, generator=draw).to(dtype)
    tables = [torch.arange(n) * step for n, step in sides]
    some = Operand(data, *tables)
    marks = some._replace(data=torch.randint(1, 999, data.shape, generator=draw).int())
    b = torch.randn(2, 30 * scale, 40, generator=draw).to(dtype)
    contracted(device, some, b, ids=marks)
    contracted(device, some, b, index=True)
    a = torch.randn(2, 20, 30 * scale, generator=draw).to(dtype)
    contracted(device, a, some, ids=marks, of_b=True)
    contracted(device, a, b.mT.contiguous().mT, ids=marks._replace(rows=tables[1][:20]))


EINSUMS = {
    "mk,kn->mn": ((7, 30), (30, 9)),
    "mk,nk->mn": ((7, 30), (9, 30)),
    "mk,kn->nm": ((7, 30), (30, 9)),
    "bmk,kn->bmn": ((2, 7, 30), (30, 9)),
    "bkm,bkn->bnm": ((2, 30, 7), (2, 30, 9)),
    "bhqk,bhkd->bqhd": ((2, 3, 5, 30), (2, 3, 30, 4)),
    "abk,abn->kn": ((4, 5, 6), (4, 5, 7)),
    "abk,ban->nk": ((4, 5, 6), (5, 4, 7)),
    "mk,z->mz": ((7, 30), (3,)),
    "mk,knz->mn": ((7, 30), (30, 9, 2)),
    "m,n->mn": ((7,), (9,)),
    "k,k->": ((30,), (30,)),
    "mk,kn->mn ": ((0, 30), (30, 9)),
    " mk,kn->mn": ((7, 0), (0, 9)),
}
"""Contractions in all their forms: rows together or apart, results turned, in another order, of
letters that the weight lacks or has alone, of one element, of none.
"""


def carried(device: str, dtype: torch.dtype) -> None:
    """The marks of a contraction, of operands as they lie."""
    draw = torch.Generator().manual_seed(0)
    for spec, (x_shape, w_shape) in EINSUMS.items():
        x, w = (torch.randn(s, generator=draw).mul(3).round().to(dtype) for s in (x_shape, w_shape))
        marks = torch.randint(1, 1 << 20, x_shape, generator=draw).int()
        out = tuple(torch.einsum(spec.strip(), x.float(), w.float()).shape)
        ways = product(*(strided(each) for each in (x, w, marks)), (False, True))
        for mine, weight, words, value in ways:
            wanted = plainly(
                Contract(spec.strip(), weight, x_shape, out).select, mine, words, value
            )
            there = Contract(spec.strip(), weight.to(device), x_shape, out)
            found = there.select(mine.to(device), words.to(device), value)
            for one, other in zip(found, wanted):
                assert (one is None) == (other is None)
                if one is not None:
                    same(one, other)


def mixed(device: str) -> None:
    """Operands of different precisions."""
    a, b = torch.randn(2, 9, 30), torch.randn(2, 30, 7)
    contracted(device, a.half(), b, index=True)
    contracted(device, a, b.bfloat16(), index=True)
    contracted(device, a.half(), b.bfloat16(), index=True)


def nothing(device: str) -> None:
    """Sizes of 0."""
    for shape in ((0, 2, 3, 4), (2, 0, 3, 4), (2, 3, 0, 4), (2, 3, 4, 0)):
        i, m, k, n = shape
        contracted(device, torch.randn(i, m, k), torch.randn(i, k, n), index=True)


def top(device: str, many: int, shapes: list[tuple[int, int, int, int]]) -> None:
    """The largest few: what the generic way gives."""
    for (i, m, k, n), kind, dtype in product(shapes, MAKERS, FLOATS):
        semiring = TopK(many)
        parts = numbers(kind, dtype, many, i, m, k).abs().sort(0, descending=True).values
        x = tuple(part.to(torch.promote_types(dtype, torch.float32)) for part in parts)
        weight = numbers(kind, dtype, i, n, k, seed=4)
        wanted = plainly(semiring.contract, "imk,ink->imn", x, weight)
        here = tuple(part.to(device) for part in x)
        found = semiring.contract("imk,ink->imn", here, weight.to(device))
        assert len(found) == many
        for mine, theirs in zip(found, wanted):
            same(mine, theirs)


# Steps -------------------------------------------------------------------------------------------


def merge(device: str, large: bool) -> None:
    shapes = [(), (0, 3), (37,), (2, 3, 4)] + [(300, 1111)] * large
    for kind, dtype, shape in product(MAKERS, WIDE, shapes):
        size = numbers(kind, dtype, *shape).abs()
        marks, other = (words(size.numel(), 5, seed).reshape(shape) for seed in (1, 2))
        value = numbers(kind, torch.float64, *shape, seed=1)
        for read in FLOATS:
            given: list[Tensor | int] = [*strided(other)[1:], 4]
            for there, beside in zip(strided(value.to(read)), given):
                _merged(device, size, marks, there, beside, 3)
        _merged(device, size, marks, value, 0, 3)
    size, marks = torch.rand(3, 4, 5), words(60, 4).reshape(3, 4, 5)
    expanded = torch.randn(4, 1).expand(3, 4, 5)
    _merged(device, size, marks, expanded, words(5, 3).expand(3, 4, 5), 0)
    _merged(device, size, marks, torch.randn(()), 2, 0)
    many = torch.rand([2] * 9).permute(8, 6, 4, 2, 0, 7, 5, 3, 1)
    _merged(device, torch.rand([2] * 9), torch.zeros([2] * 9).int(), many, 7, 0)


def _merged(
    device: str, size: Tensor, marks: Tensor, value: Tensor, other: Tensor | int, shift: int
) -> None:
    wanted = size.clone(), marks.clone()
    found = size.clone().to(device), marks.clone().to(device)
    plainly(ops.merge, *wanted, value, other, shift)
    there = other.to(device) if isinstance(other, Tensor) else other
    ops.merge(*found, value.to(device), there, shift)
    same(found[0], wanted[0])
    same(found[1], wanted[1])


def tally(device: str, large: bool) -> None:
    """Sums to the bit, over several blocks, in long runs of a mark and in short ones."""
    most = 3_000_000 if large else 20_000
    for n, count, dtype in product((0, 1, 31, most), (1, 7, 129, 500), FLOATS):
        if n == most and dtype not in WIDE:
            continue
        gradient = numbers("generic", dtype, n) * 1.7
        for runs in (1, 300):
            _tallied(
                device, words(-(-n // runs), count).repeat_interleave(runs)[:n], gradient, count
            )
        _measured(device, gradient)


def tally_of_far_numbers(device: str) -> None:
    """Sums of numbers of all sizes, most of them not near to the first; more marks than there are
    places for in shared memory; and, of numbers that are rounded, always the nearest.
    """
    for dtype, spread, count in product(WIDE, (15.0, 200.0), (3, 900)):
        gradient = numbers("generic", torch.float64, 5000)
        gradient *= torch.exp(numbers("generic", torch.float64, 5000).flip(0) * spread)
        for few in (gradient, gradient.sort().values, gradient.abs().sort(descending=True).values):
            _tallied(device, words(5000, count), few.to(dtype), count)
            _measured(device, few.to(dtype))
    for dtype, tiny in ((torch.float32, 1e-42), (torch.float64, 1e-320)):
        _tallied(
            device, words(5000, 5), (numbers("generic", torch.float64, 5000) * tiny).to(dtype), 5
        )
        _measured(device, torch.full((5000,), torch.finfo(dtype).max, dtype=dtype))
    marks = torch.zeros(3, dtype=torch.int32)
    for less in (0.0, 2.0**-40, 2.0**-149):  # half a unit in the last place, and a bit more
        gradient = torch.tensor([2.0**53, 1.0, less])
        for mine, wanted in zip(
            ops.tally(marks.to(device), gradient.to(device), 1), (3, 2.0**53 + (2 if less else 0))
        ):
            assert float(mine[0]) == wanted


def _tallied(device: str, marks: Tensor, gradient: Tensor, count: int) -> None:
    found = ops.tally(marks.to(device), gradient.to(device), count)
    for mine, theirs in zip(found, plainly(ops.tally, marks, gradient, count)):
        same(mine, theirs)


def _measured(device: str, gradient: Tensor) -> None:
    found = ops.measure(gradient.to(device))
    for mine, theirs in zip(found, plainly(ops.measure, gradient)):
        same(mine, theirs)


def tally_of_matrices(device: str) -> None:
    """As they lie; NaN spoils only its own sum."""
    gradient, marks = numbers("odd", torch.float32, 9, 11), words(99, 5).reshape(9, 11)
    for mine, beside in product(strided(gradient), strided(marks)):
        _tallied(device, beside, mine, 5)
        _measured(device, mine)
    counts, sums = ops.tally(
        words(0, 1).to(device), torch.zeros(0, device=device), 0
    )  # no mark at all
    assert (counts.tolist(), sums.tolist()) == ([], [])


LONG: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((900, 7), (0,)), ((3, 4000), (1,))]
"""Lines that are cut."""


def leaves(device: str, rounds: int) -> None:
    """Counted together, each is what it is by itself: of all kinds, more than a launch takes."""
    jobs = BatchedTally(torch.device(device, 0) if device == "cuda" else torch.device(device))
    for seed in range(rounds):
        wanted: list[tuple[int, int, tuple[Tensor, Tensor]]] = []
        for n, given in enumerate(_mixed(seed)):
            at, alone = _taken(jobs, device, *given)
            if at is None:  # it would have to be copied
                x, marks, dims, _ = given
                assert dims is not None
                assert reduction(x.shape, x.stride(), marks.stride(), dims).levels is None
                continue
            wanted.append((at, len(alone[0]), alone))
            if jobs.full(1 << 30) or n % 23 == 22:
                _compared(jobs, wanted)
        _compared(jobs, wanted)


def _mixed(seed: int) -> list[tuple[Tensor, Tensor, tuple[int, ...] | None, int]]:
    """Leaves: values that are reduced over dimensions, or gradients; marks; how many there are."""
    found: list[tuple[Tensor, Tensor, tuple[int, ...] | None, int]] = []
    for (shape, dims), dtype in product([*LINES, *LONG], FLOATS):
        if math.prod(shape):
            count = (3, 130, 900)[len(found) % 3]
            x = numbers(("generic", "ties")[len(found) % 2], dtype, *shape, seed=seed)
            marks = words(x.numel(), count, seed).reshape(shape)
            found.append((strided(x)[len(found) % 3], marks, dims, count))
    for n, dtype, count in product((0, 1, 31, 9000), FLOATS, (1, 7, 900)):
        found.append((numbers("odd", dtype, n, seed=seed), words(n, count, seed), None, count))
    matrix = numbers("generic", torch.float32, 9, 11, seed=seed)
    found += [(x, words(99, 5).reshape(9, 11), None, 5) for x in strided(matrix)]
    found += [(x, x, None, 1) for x in strided(matrix)]  # all that is not 0
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(seed))
    return [found[n] for n in order.tolist()]


def _taken(
    jobs: BatchedTally,
    device: str,
    x: Tensor,
    marks: Tensor,
    dims: tuple[int, ...] | None,
    count: int,
) -> tuple[int | None, tuple[Tensor, Tensor]]:
    """Where a leaf will be, and what it is by itself."""
    here, beside = x.to(device), marks.to(device)
    if marks is x:
        number, total = plainly(ops.measure, x)
        return jobs.measure(here), (number.reshape(1), total.reshape(1))
    if dims is None:
        return jobs.tally(beside, here, count), plainly(ops.tally, marks, x, count)
    handed = plainly(ops.reduce, x, marks, dims).ids
    gradient = numbers("odd", x.dtype, *handed.shape, seed=count)
    wanted = plainly(ops.tally, handed, gradient, count)
    return jobs.reduce(here, beside, dims, gradient.to(device), count), wanted


def _compared(jobs: BatchedTally, wanted: list[tuple[int, int, tuple[Tensor, Tensor]]]) -> None:
    found = jobs.counted()
    assert jobs.bytes == jobs.entries == 0
    for at, size, alone in wanted:
        for mine, theirs in zip(found, alone):
            same(mine[at : at + size], theirs)
    wanted.clear()


class Branched(nn.Module):
    """Two ways, so that elements differ in their marks; what is reduced lies in one row or many;
    units that are dead, a bias that is used twice, and one that nobody's gradient reaches.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 10)
        self.norm = nn.LayerNorm(10)
        self.inner = nn.Linear(10, 10)
        self.scale = nn.Parameter(torch.rand(4, 1) + 0.5)
        self.one = nn.Parameter(torch.rand(()))
        self.last = nn.Linear(10, 12)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x)) + self.inner.bias
        x = x + self.inner(x).relu() * self.scale
        x = self.last(x) * self.one
        return x * (x > 0)


def influences(device: str, dtype: torch.dtype, pairs: int, **how: Any) -> Table:
    """Of the same small model, on a device."""
    torch.manual_seed(0)
    model = Branched().to(dtype)
    x = torch.randn(7, 4, 12, dtype=dtype)
    with torch.no_grad():
        model.last.bias[:3] = -99.0  # dead
    model, x = model.to(device), x.to(device)
    with gradtrace.watch(model) as watch:
        y = model(x).float().square()
        loss = y.mean() if pairs == 1 else y.mean((1, 2))
    return watch.trace(loss, **how).influence()


def cancelling(device: str) -> Table:
    """Of plain leaves with elements that are 0: of some because what comes to them cancels."""
    given = torch.tensor([[1.0, 2, 0, 3], [-1, 0, 0, 1]], device=device)
    some = {name: torch.ones(4, device=device, requires_grad=True) for name in "abc"}
    loss = sum((given * x).sum() for x in some.values())
    return gradtrace.trace(loss, names=some).influence("operators")


SHAPES = [*LINES, ((70, 65), (0,))]
MANY: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    ((700_001,), (0,)),
    ((3, 500_000), (1,)),
    ((500_000, 3), (0,)),
    ((900, 7000), (0,)),
    ((900, 7000), (1,)),
    ((12, 64, 64, 65), (0, 2)),
]


def reduce(device: str, large: bool) -> None:
    for (shape, dims), kind in product(SHAPES + MANY * large, MAKERS):
        for dtype in WIDE if kind == "odd" else FLOATS:
            x = numbers(kind, dtype, *shape)
            marks = torch.arange(1, x.numel() + 1, dtype=torch.int32).reshape(shape)
            wanted = plainly(ops.reduce, x, marks, dims)
            for mine, beside in zip(strided(x), (*strided(marks)[1:], marks)):
                found = ops.reduce(mine.to(device), beside.to(device), dims)
                same(found.value, wanted.value)
                same(found.ids, wanted.ids)


def scatter(device: str, large: bool) -> None:
    for (n, size), kind, dtype in product(
        [(0, 3), (1, 1), (20, 7), (500, 20), (9, 0)] + [(300_000, 1000)] * large, MAKERS, FLOATS
    ):
        x = numbers(kind, dtype, n)
        draw = torch.Generator().manual_seed(n)
        target = torch.randint(-1, max(size, 1), (n,), generator=draw)
        target = target if size else target.clamp(max=-1)
        marks = torch.arange(1, n + 1, dtype=torch.int32)
        wanted = plainly(ops.scatter, x, marks, target, size)
        for mine, where in ((x, target), (apart(x), target.int())):
            found = ops.scatter(mine.to(device), marks.to(device), where.to(device), size)
            same(found.value, wanted.value)
            same(found.ids, wanted.ids)


def gather(device: str) -> None:
    marks = words(50, 1000) + 1
    source = torch.tensor([[3, -1, 49], [0, 7, -1]])
    for there in (source, source.t(), source[:0]):
        found = cuda_reduce.gather(marks.to(device), there.to(device).contiguous())
        same(found, torch.where(there >= 0, marks[there.clamp(min=0)], 0))
    empty = cuda_reduce.gather(marks[:0].to(device), torch.full((3,), -1, device=device))
    assert empty.tolist() == [0, 0, 0]


# Diagonal plus low rank --------------------------------------------------------------------------


def lines_of(kind: str, n: int, dtype: torch.dtype) -> LowRankLines:
    """Three lines of a kind, two pairs."""
    some = [along_a_line(kind, n, seed) for seed in range(3)]
    u0, u1, v0, v1, x = (
        torch.stack(part).to(dtype) for part in zip(*((*u, *v, x) for u, v, x in some))
    )
    return LowRankLines(-u1 - 0.5, (u0, u1), (v0, v1), x)


def every_pair(how: LowRankLines) -> tuple[Tensor, Tensor]:
    """The largest contribution to each element of lines, and its place: of rank two among all pairs
    (the hull of ``maps`` is for ordinary numbers), of rank one as ``Normaliser`` has it.
    """
    if len(how.left) == 2:
        return all_pairs(how)
    m = Normaliser(how.diagonal, list(zip(how.left, how.right)), [1], tuple(how.x.shape))
    value, place = m._best_places(how.x)
    return value, torch.where(value == 0, -1, place)


def _chosen(device: str, how: LowRankLines) -> None:
    """With the diagonal, and without it, so that others win."""
    _placed(device, how)
    _marked(device, how)
    others = how._replace(diagonal=torch.zeros_like(how.diagonal))
    _placed(device, others)
    _marked(device, others)


def _there(device: str, how: LowRankLines) -> LowRankLines:
    left, right = ([part.to(device) for part in side] for side in (how.left, how.right))
    return LowRankLines(how.diagonal.to(device), left, right, how.x.to(device))


def _placed(device: str, how: LowRankLines) -> None:
    """Value and place, to the bit."""
    value, place = plainly(every_pair, how)
    found = ops.normalise(_there(device, how))
    assert found is not None and found.place is not None and found.ids is None
    same(found.value, value)
    same(found.place, place)


def _marked(device: str, how: LowRankLines) -> None:
    """Value and mark, to the bit."""
    value, place = plainly(every_pair, how)
    marks = torch.arange(1, value.numel() + 1, dtype=torch.int32).reshape(value.shape)
    found = ops.normalise(_there(device, how), apart(marks).to(device))
    assert found is not None and found.ids is not None and found.place is None
    same(found.value, value)
    taken = torch.where(place >= 0, marks.gather(1, place.clamp(min=0)), 0)
    same(found.ids, taken)
    alone = ops.normalise(_there(device, how), apart(marks).to(device), value=False)
    assert alone is not None and alone.ids is not None and alone.place is None
    same(alone.ids, taken)


def _of_rank_one(how: LowRankLines) -> LowRankLines:
    return LowRankLines(how.diagonal, how.left[1:], how.right[1:], how.x)


def normalise(device: str, kind: str, sizes: tuple[int, ...], long: tuple[int, ...]) -> None:
    """Lines of some sizes, looked at from all sides, and long ones."""
    for n, dtype in product(sizes, WIDE):
        how = lines_of(kind, n, dtype)
        _chosen(device, how)
        _chosen(device, _of_rank_one(how))
        left = [apart(part) for part in how.left]
        right = [part.t().contiguous().t() for part in how.right]
        _placed(device, LowRankLines(apart(how.diagonal), left, right, apart(how.x)))
    for n, dtype in product(long, WIDE):
        how = lines_of(kind, n, dtype)
        _marked(device, how)
        _placed(device, how._replace(diagonal=torch.zeros_like(how.diagonal)))
        _placed(device, _of_rank_one(how))


def normalise_odd(device: str, seeds: int) -> None:
    """NaN, infinities, and products that leave the range."""
    for seed, n, dtype in product(range(seeds), (5, 100), WIDE):
        d, x, *parts = (numbers("odd", dtype, 3, n, seed=seed + k) for k in range(6))
        _chosen(device, LowRankLines(d, parts[:1], parts[2:3], x))
        _chosen(device, LowRankLines(d, parts[:2], parts[2:], x))
        how = lines_of("gaussian", n, dtype)
        for bad, part in product((NAN, INF), (how.x, how.left[1], how.right[0], how.diagonal)):
            kept = part[1, seed % n].clone()
            part[1, seed % n] = bad
            _placed(device, how)
            part[1, seed % n] = kept
    for power, dtype in product((-147, -100, 63, 120), WIDE):
        scale = 2.0 ** (power - 925 if dtype is torch.float64 and power < 0 else power)
        how = lines_of("gaussian", 100, dtype)
        how = how._replace(diagonal=torch.zeros_like(how.diagonal))
        _placed(device, how._replace(x=how.x * scale))
        _placed(device, how._replace(left=[u * scale for u in how.left]))
        _placed(device, how._replace(right=[how.right[0], how.right[1] * scale]))
        both = [u * scale for u in how.right], [u * scale for u in how.left]
        _placed(device, how._replace(right=both[0], left=both[1]))


def normalise_many(device: str, lines: int) -> None:
    """More lines than processors, of some length; and lines none of whose products are exact to a
    few roundings, so that each element must be compared with every other.
    """
    for n, dtype in product((600, 1030), WIDE):
        d, x, *parts = (numbers("generic", dtype, lines, n, seed=k) for k in range(4))
        _chosen(device, LowRankLines(d, parts[:1], parts[1:], x))
        parts = [part.t().contiguous().t() for part in parts]
        _placed(device, LowRankLines(d, parts[:1], parts[1:], x))
    for dtype, tiny in ((torch.float32, 2.0**-115), (torch.float64, 2.0**-1005)):
        d, x, *parts = (numbers("generic", dtype, 2, 700, seed=k) for k in range(6))
        _placed(device, LowRankLines(d, [part * tiny for part in parts[:2]], parts[2:], x))


def normalise_expanded(device: str) -> None:
    """As layer norm makes them: a number a line, a number an element."""
    unit, g = numbers("generic", torch.float32, 7, 100), numbers("ties", torch.float32, 7, 100)
    gain, scale = numbers("generic", torch.float32, 100), numbers("generic", torch.float32, 7, 1)
    left = [(-scale / 100).expand(7, 100), -scale * unit / 100]
    _chosen(device, LowRankLines(scale * gain, left, [gain.expand(7, 100), gain * unit], g))


def normalise_lying(device: str) -> None:
    """Maps whose tensors lie one way or another, and marks that do: along the last dimension, along
    two, along the first; rank one and two.
    """
    shape = (3, 4, 70)
    for dims, rank, dtype in product(([2], [1, 2], [0], [0, 2]), (1, 2), FLOATS):
        sizes = [1 if d in dims else n for d, n in enumerate(shape)], shape[2:], shape
        draw = [numbers("ties", dtype, *size, seed=n) for n, size in enumerate(sizes * 2)]
        x = numbers("generic", dtype, *shape, seed=7)
        marks = words(x.numel(), 5).reshape(shape)
        pairs = list(zip(draw[1:], draw[::-1]))[:rank]
        wanted = plainly(Normaliser(draw[0], pairs, dims, shape).select, x, marks, True)
        there = [(u.to(device), v.to(device)) for u, v in pairs]
        m = Normaliser(draw[0].to(device), there, dims, shape)
        for turn in (lambda t: t, apart, lambda t: t.mT.contiguous().mT):
            given = turn(x).to(device), turn(marks).to(device)
            value, found = m.select(*given, value=True)
            assert value is not None
            same(value, wanted[0])
            same(found, wanted[1])
            nothing, found = m.select(*given)
            assert nothing is None
            same(found, wanted[1])


def normalised_sums(device: str) -> None:
    """``Σⱼ |J[i, j]|·x[j]`` of lines of some lengths, of many lines, of tensors that lie one way or
    another; in rank one, where one element has nearly all of the sum.
    """
    cases = [((2, 2, n), [2], rank) for n in (1, 2, 17, 140) for rank in (1, 2)]
    cases += [((2, 3, 33), dims, rank) for dims in ([1, 2], [0], [0, 2]) for rank in (1, 2)]
    cases += [((2, 1050), [1], 1), ((1, 1050), [1], 2), ((81, 520), [1], 1)]
    for (shape, dims, rank), dtype in product(cases, WIDE):
        sizes = [1 if d in dims else n for d, n in enumerate(shape)], shape[-1:], shape
        draw = [numbers("generic", dtype, *size, seed=n) for n, size in enumerate(sizes * 2)]
        x = numbers("generic", dtype, *shape, seed=7).abs()
        x.view(-1)[5 % x.numel()] *= 1e12 if rank == 1 else 1.0
        pairs = list(zip(draw[1:], draw[::-1]))[:rank]
        wanted = _absolute(draw[0], pairs, dims, x)
        there = [(u.to(device), v.to(device)) for u, v in pairs]
        m = Normaliser(draw[0].to(device), there, dims, shape)
        turns = (lambda t: t, apart, lambda t: t.mT.contiguous().mT)
        for turn in turns if len(shape) == 3 else turns[:1]:
            (found,) = m.apply_in((turn(x).to(device),), ABS)
            assert found.dtype is dtype
            tolerance = 1e-11 if dtype is torch.float64 else 1e-5
            torch.testing.assert_close(found.cpu().double(), wanted, rtol=tolerance, atol=0.0)


def _absolute(
    diagonal: Tensor, pairs: list[tuple[Tensor, Tensor]], dims: list[int], x: Tensor
) -> Tensor:
    """All n² weights of each line, in float64."""
    order = [d for d in range(x.dim()) if d not in dims] + dims
    width = math.prod(x.shape[d] for d in dims)

    def lines(part: Tensor) -> Tensor:
        return part.double().expand(x.shape).permute(order).reshape(-1, width)

    weight = torch.diag_embed(lines(diagonal))
    for u, v in pairs:
        weight = weight + lines(u).unsqueeze(2) * lines(v).unsqueeze(1)
    found = (weight.abs() * lines(x).unsqueeze(1)).sum(2)
    back = [order.index(d) for d in range(x.dim())]
    return found.reshape([x.shape[d] for d in order]).permute(back)


# Of two terms ------------------------------------------------------------------------------------


def duel(device: str) -> None:
    """``merge_pair`` says what ``with_provenance`` and ``ops.merge`` say, in one step."""
    for kind, dtype, shape in product(MAKERS, FLOATS, [(), (37,), (2, 3, 4), (5, 400)]):
        first, second = (numbers(kind, dtype, *shape, seed=seed) for seed in (0, 1))
        n = first.numel()
        mine, theirs = (words(n, 5, seed).reshape(shape) for seed in (1, 2))
        ways = zip(strided(first), strided(mine), strided(second)[::-1], strided(theirs))
        for a, marks, b, others in ways:
            for unmasked in (False, True):
                _larger(device, a, marks, unmasked, b, others, 3)
            _larger(device, a, 1, True, b, others, 1)
            _larger(device, a, marks, True, b, 1, 4)
    many = torch.rand([2] * 9).permute(8, 6, 4, 2, 0, 7, 5, 3, 1)
    nine = torch.rand([2] * 9).to(device)
    assert cuda_ids.merge_pair(nine, 1, True, many.to(device), 1, 1) is None  # too many steps
    assert cuda_ids.merge_pair(nine, 1, True, nine[0], 1, 1) is None
    assert cuda_ids.merge_pair(nine[:0], 1, True, nine[:0], 1, 1) is None


def _joined(states: list[TracedValue], form: Form) -> TracedValue:
    assert states[0].value is not None
    return Greedy(backend_of(states[0].value)).join(states, form)


def shared_sums(device: str) -> None:
    """A sum of terms that have the very same marks, some of them 0, is what it is by comparing
    them.
    """
    marks = torch.arange(4, dtype=torch.int32).repeat_interleave(27).to(device)
    signs = torch.tensor([[-1.0, 0.0, 1.0]])
    each = torch.cartesian_prod(*signs.expand(3, 3)).repeat(4, 1).T  # every way to be 0
    odd = torch.where(each > 0, NAN, each)
    provenance = ProvenanceTable((1, 3, 5))
    for terms, count, unmasked, dtype in product((each, odd), (2, 3), (True, False), WIDE):
        values = [term.to(device, dtype) * (n + 1) for n, term in enumerate(terms[:count])]
        states = [TracedValue(value, 0, marks, provenance, unmasked=unmasked) for value in values]
        form = Form(Encoding.DENSE, dtype)
        found = _joined(states, form)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(greedy_rule, "shared", lambda states: False)
            wanted = plainly(_joined, states, form)
        assert found.provenance == wanted.provenance and not found.unmasked
        same(found.value, wanted.value.cpu())
        same(found.ids, wanted.ids.cpu())


def _larger(
    device: str,
    first: Tensor,
    marks: Tensor | int,
    unmasked: bool,
    second: Tensor,
    others: Tensor | int,
    shift: int,
) -> None:
    size = first.to(first.dtype if first.dtype in WIDE else torch.float32).abs().contiguous()
    wanted = torch.where((size != 0) | (not unmasked), marks, 0).int().contiguous()
    plainly(ops.merge, size, wanted, second, others, shift)
    there = [x.to(device) if isinstance(x, Tensor) else x for x in (first, marks, second, others)]
    a, mine, b, theirs = there
    assert isinstance(a, Tensor) and isinstance(b, Tensor)
    for sized in (False, True):
        found = cuda_ids.merge_pair(a, mine, unmasked, b, theirs, shift, sized)
        assert found is not None and (found[1] is not None) is sized
        same(found[0], wanted)
        if found[1] is not None:
            assert found[1].is_contiguous()
            same(found[1], size)


def scaled(device: str) -> None:
    """``scaled_ids`` says where a product of half precision is not 0 in float32, by strides."""
    tiny = torch.tensor([0.0, -0.0, 1e-30, 1e-7, 1.0, -2.0, float("inf"), NAN])
    for dtype, other, shape in product(FLOATS, FLOATS, [(), (8,), (3, 8), (2, 5, 8)]):
        x, weight = (
            tiny[torch.randint(8, shape, generator=torch.Generator().manual_seed(seed))].to(kind)
            for seed, kind in ((0, dtype), (1, other))
        )
        marks = words(x.numel(), 5, 1).reshape(shape)
        for a, w, ids in zip(strided(x), strided(weight)[::-1], strided(marks)):
            for by in (w, w[..., :1] if w.dim() else w, 1.0, 1e-7, 1e-40, 0):
                for some in (ids, None):
                    _scaled(device, a, by, some)
    assert cuda_ids.scaled(tiny.double().to(device), 1.0, None) is None
    assert cuda_ids.scaled(tiny.to(device), tiny.double().to(device), None) is None
    assert cuda_ids.scaled(tiny.to(device), 1.0, words(8, 5, 1).long().to(device)) is None
    many = torch.rand([2] * 9).permute(8, 6, 4, 2, 0, 7, 5, 3, 1)
    assert cuda_ids.scaled(torch.rand([2] * 9).to(device), many.to(device), None) is None
    empty = cuda_ids.scaled(tiny[:0].to(device), 2.0, None)
    assert empty is not None and not empty.numel()


def _scaled(device: str, x: Tensor, weight: Tensor | float, ids: Tensor | None) -> None:
    there = [each.to(device) if isinstance(each, Tensor) else each for each in (x, weight, ids)]
    found = cuda_ids.scaled(*there)  # type: ignore[arg-type]
    if torch.float64 in (x.dtype, getattr(weight, "dtype", None)):
        assert found is None
        return
    factor = weight.float() if isinstance(weight, Tensor) else torch.tensor(float(weight)).float()
    assert found is not None and found.dtype is torch.int32
    same(found, torch.where(x.float() * factor != 0, 1 if ids is None else ids, 0).int())


def underflows(device: str) -> None:
    """An element that a weight in half precision makes 0 keeps its path, and one of weight 0 has
    none; a mask of ids is the same for values of all kinds.
    """
    x = torch.tensor([1e-4, 0.0, -1e-5, 2.0], dtype=torch.float16).to(device)
    weight = torch.tensor([1e-4, 1.0, 1e-5, 0.0], dtype=torch.float16).to(device)
    marks = torch.tensor([3, 2, 1, 2], dtype=torch.int32).to(device)
    backend = backend_of(x)
    assert not bool((x * weight)[:3].any())
    form = Form(Encoding.SCALED, torch.float16)
    for ids, wanted in ((marks, [3, 0, 1, 0]), (None, [1, 0, 1, 0])):
        state = TracedValue(x, 0, ids, ProvenanceTable((1, 3, 5) if ids is not None else (1,)))
        found = Greedy(backend).through(Scale(weight, (4,)), state, form)
        assert found.ids is not None and found.ids.tolist() == wanted
    for dtype in FLOATS:
        assert backend.masked(marks, (x * 1e4).to(dtype)).tolist() == [3, 0, 1, 2]


# Numbers of marks --------------------------------------------------------------------------------


def numbering(device: str, large: bool) -> None:
    """Which numbers are there, and others in their place: few and more than there are bits for in
    shared memory, as they lie in memory.
    """
    shapes = [(), (0, 3), (37,), (2, 3, 4), (70, 301)] + [(1024, 3000)] * large
    for shape, count in product(shapes, (1, 33, 1000, 32 * tuning.SHARED_BYTES // 4 + 999)):
        for given in strided(words(math.prod(shape), count).reshape(shape).to(device)):
            _numbered(given, count)
    _numbered(words(5, 9).to(device).expand(3, 4, 5), 9)
    odd = torch.tensor([-1, 0, 2, 5, 130, 1 << 30], dtype=torch.int32, device=device)
    assert _bits(cuda_ids.used(odd, 3))[:3] == [1, 0, 1]
    table = torch.tensor([7, 8, 9], dtype=torch.int32, device=device)
    found = cuda_ids.renumbered(odd, table)
    assert found is not None
    assert found.tolist() == [0, 7, 9, 0, 0, 0]
    many = torch.zeros([2] * 9, dtype=torch.int32, device=device).permute(8, 6, 4, 2, 0, 7, 5, 3, 1)
    assert cuda_ids.used(many, 5) is None
    assert cuda_ids.used(odd.long(), 5) is None
    assert cuda_ids.renumbered(odd.long(), table) is None


def _bits(words: Tensor | None) -> list[int]:
    assert words is not None
    return [word >> n & 1 for word in words.tolist() for n in range(32)]


def _numbered(given: Tensor, count: int) -> None:
    wanted = torch.bincount(given.cpu().reshape(-1), minlength=count) > 0
    there = cuda_ids.used(given, count)
    assert _bits(there)[:count] == wanted.tolist()
    assert there is not None
    wanted[:1] = False
    same(cuda_ids.closed(there, count), (wanted.cumsum(0) * wanted).int())
    table = words(count, 1 << 30, 5).to(given.device)
    found = cuda_ids.renumbered(given, table)
    assert found is not None
    same(found, table[given].cpu())
    assert found.stride() == table[given].stride() or not found.numel()


def scalar_edges(name: str, device: str) -> int:
    """The pairs of scalars that a loss's operators connect: embeddings and their tied weight, a
    convolution, a gather of some rows that are summed where they came from, a sparse product.
    """
    torch.manual_seed(0)
    x = torch.randn(5, 4, 6).to(device).requires_grad_()
    at = torch.tensor([0, 3, 3, 1]).to(device)
    if name == "gpt2":
        table = torch.randn(7, 6).to(device).requires_grad_()
        words = F.embedding(at, table)
        loss = F.cross_entropy(F.layer_norm(words, (6,)) @ table.T, at)
    elif name == "conv":
        weight = torch.randn(3, 4, 3).to(device).requires_grad_()
        loss = F.avg_pool1d(F.conv1d(x, weight, padding=1), 3, 2).square().mean()
    elif name == "gather":
        taken = x[at].cumsum(1)
        loss = torch.zeros_like(x).index_add(0, at, taken).exp().sum()
    else:
        with torch.sparse.check_sparse_tensor_invariants(True):
            places, numbers = torch.stack([at, at.flip(0)]), torch.rand(4).to(device)
            edges = torch.sparse_coo_tensor(places, numbers, (4, 4)).coalesce()
            loss = torch.sparse.mm(edges, x[:4, 0]).exp().sum()
    return scalar_pairs.scalar_edges(loss)
