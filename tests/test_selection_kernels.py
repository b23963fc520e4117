"""Steps between contractions: the compiled ones against plain torch, both against plain loops."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from backends import ops, plainly
from test_maps import KINDS, Make, apart, maker, one_gradient_a_sample, whole
from test_maps import numbers as along_a_line
from test_select import odd, same
from thorough import few
from torch import Tensor

from gradtrace.errors import GradtraceError
from gradtrace.kernels import backend_of, cpu_library, tuning
from gradtrace.kernels.operands import Compressed, LowRankLines, Selected
from gradtrace.linops import Around, Normaliser, Sparse

NAN = math.nan
TYPES = (torch.float32, torch.float64)
MAKERS: dict[str, Callable[..., Make]] = {"generic": maker, "ties": whole, "odd": odd}

pytestmark = pytest.mark.skipif(cpu_library.library() is None, reason="without compiled kernels")


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """So many threads, whatever the size."""
    monkeypatch.setattr(tuning, "SINGLE_THREAD_MAX_ELEMENTS", 0)
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def magnitude(gradient: Tensor) -> tuple[int, float]:
    count, total = ops.measure(gradient)
    return int(count), float(total)


def numbers(kind: str, dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    return MAKERS[kind](seed, dtype)(*shape)


def marks_like(x: Tensor, most: int = 5, seed: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, most, x.shape, generator=generator).int()


def larger(a: float, b: float) -> bool:
    """Whether a is larger than b; NaN is largest of all, and no larger than itself."""
    return a > b or (math.isnan(a) and not math.isnan(b))


# Choosing among terms ----------------------------------------------------------------------------


def merged(size: Tensor, marks: Tensor, value: Tensor, other: Tensor | int, shift: int) -> None:
    """``merge``, element by element."""
    for at in product(*map(range, size.shape)):
        mark = int(other[at]) if isinstance(other, Tensor) else other
        if mark and larger(abs(float(value[at])), float(size[at])):
            size[at] = value[at].abs()
            marks[at] = mark + shift


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (37,), (5, 7)])
def test_merge(kind: str, dtype: torch.dtype, shape: tuple[int, ...], threads: int) -> None:
    size = numbers(kind, dtype, *shape).abs()
    marks = marks_like(size, seed=1)
    value = numbers(kind, dtype, *shape, seed=1)
    for other, shift in product((marks_like(size), 4, 0), (0, 3)):
        for given in (value, apart(value), value.half(), value.double()):
            beside = apart(other) if isinstance(other, Tensor) else other
            found, plain, loop = ((size.clone(), marks.clone()) for _ in range(3))
            ops.merge(*found, given, beside, shift)
            plainly(ops.merge, *plain, given, other, shift)
            merged(*loop, given.to(dtype), other, shift)
            for got in (found, plain):
                same(got[0], loop[0])
                assert torch.equal(got[1], loop[1])


def test_merge_of_many(threads: int) -> None:
    for kind, dtype in product(MAKERS, TYPES):
        size = numbers(kind, dtype, 200_001).abs()
        marks, value = marks_like(size, seed=1), numbers(kind, dtype, 200_001, seed=5)
        found, plain = ((size.clone(), marks.clone()) for _ in range(2))
        ops.merge(*found, value, marks_like(size), 2)
        plainly(ops.merge, *plain, value, marks_like(size), 2)
        same(found[0], plain[0])
        assert torch.equal(found[1], plain[1])


def test_merge_into_what_lies_otherwise() -> None:
    """Marks and sizes are written where they are, whatever their strides."""
    size, value = numbers("generic", torch.float32, 6, 5).abs(), torch.randn(6, 5)
    marks, other = marks_like(size, seed=1), marks_like(size)
    wanted = size.clone(), marks.clone()
    ops.merge(*wanted, value, other, 3)
    for turns in product((False, True), repeat=4):
        parts = zip((size, marks, value, other), turns)
        given = [x.T.contiguous().T if turn else x.clone() for x, turn in parts]
        ops.merge(given[0], given[1], given[2], given[3], 3)
        assert torch.equal(given[0], wanted[0]) and torch.equal(given[1], wanted[1])


def test_what_is_0_never_wins() -> None:
    size, marks = torch.zeros(2), torch.zeros(2, dtype=torch.int32)
    ops.merge(size, marks, torch.tensor([0.0, -0.0]), 7)
    assert marks.tolist() == [0, 0]
    ops.merge(size, marks, torch.tensor([NAN, 1.0]), torch.tensor([0, 2], dtype=torch.int32))
    assert (size.tolist(), marks.tolist()) == ([0.0, 1.0], [0, 2])


# Counting ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["generic", "ties"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (9, 11), (2, 3, 5)])
def test_tally(kind: str, shape: tuple[int, ...], threads: int) -> None:
    gradient = numbers(kind, torch.float64, *shape)
    marks = marks_like(gradient)
    for turn in (torch.clone, apart, turned):
        for measured in (ops.tally, lambda *given: plainly(ops.tally, *given)):
            counts, sums = measured(turn(marks), turn(gradient), 6)
            assert (counts.dtype, sums.dtype) == (torch.int64, torch.float64)
            for mark in range(6):
                there = marks == mark
                assert int(counts[mark]) == int(there.sum())
                expected = float(gradient[there].abs().sum())
                assert float(sums[mark]) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("runs", [1, 2, 5, 1000])
@pytest.mark.parametrize("dtype", [*TYPES, torch.bfloat16], ids=str)
def test_sums_are_the_same(runs: int, dtype: torch.dtype, threads: int) -> None:
    """To the bit, in long runs of one mark and in short ones, over several chunks."""
    most = few(50_000, 200_000)
    for n, count in ((most + 1, 7), (most + 2, 7), (70_001, 129), (most // 2 + 3, most)):
        gradient = numbers("generic", torch.float64, n).to(dtype) * 1.7
        marks = marks_like(torch.zeros(-(-n // runs)), count).repeat_interleave(runs)[:n]
        found, plain = (
            ops.tally(marks, gradient, count),
            plainly(ops.tally, marks, gradient, count),
        )
        assert torch.equal(found[0], plain[0])
        assert torch.equal(found[1], plain[1])
        assert magnitude(gradient) == plainly(magnitude, gradient)


SPREADS = {"near": 0.0, "far": 12.0, "all": 200.0}


@pytest.mark.parametrize("runs", [1, 100])
@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_sums_are_exact(dtype: torch.dtype, spread: str, runs: int, threads: int) -> None:
    """Rounded once, as those of ``math.fsum`` are: whatever the sizes, in whatever order."""
    for (n, count), unit in product(
        ((0, 1), (33, 5), (500, 200), (17_000, 5)), (1.0, 1e-42, 1e-320)
    ):
        gradient = numbers("generic", torch.float64, n) * unit
        gradient *= torch.exp(numbers("generic", torch.float64, n).flip(0) * SPREADS[spread])
        gradient = gradient.to(dtype)
        marks = marks_like(torch.zeros(-(-n // runs)), count).repeat_interleave(runs)[:n]
        sizes = gradient.double().abs()
        wanted = [math.fsum(sizes[marks == mark].tolist()) for mark in range(count)]
        for measured in (ops.tally, lambda *given: plainly(ops.tally, *given)):
            assert measured(marks, gradient, count)[1].tolist() == wanted
        for size in (magnitude, lambda *given: plainly(magnitude, *given)):
            assert size(gradient) == (int(gradient.count_nonzero()), math.fsum(sizes.tolist()))


def test_a_sum_too_large_is_infinite() -> None:
    gradient = torch.tensor([1e308, 1e308, 1e308, 1.0], dtype=torch.float64)
    marks = torch.tensor([0, 0, 1, 1], dtype=torch.int32)
    for measured in (ops.tally, lambda *given: plainly(ops.tally, *given)):
        assert measured(marks, gradient, 2)[1].tolist() == [math.inf, 1e308]
    for size in (magnitude, lambda *given: plainly(magnitude, *given)):
        assert size(gradient) == (4, math.inf)


def test_nan_is_counted_and_spoils_only_its_own_sum() -> None:
    gradient = torch.tensor([1.0, NAN, -2.0, 0.0, math.inf])
    marks = torch.tensor([1, 2, 1, 0, 3], dtype=torch.int32)
    for measured in (ops.tally, lambda *given: plainly(ops.tally, *given)):
        counts, sums = measured(marks, gradient, 4)
        assert counts.tolist() == [1, 2, 1, 1]
        assert str(sums.tolist()) == "[0.0, 3.0, nan, inf]"
    for size in (magnitude, lambda *given: plainly(magnitude, *given)):
        assert str(size(gradient)) == "(4, nan)"


def test_magnitude_of_a_matrix() -> None:
    x = torch.randn(40, 30)
    count, size = plainly(magnitude, x)
    assert (count, size) == magnitude(x) == magnitude(x.reshape(-1))
    assert count == 1200


def test_magnitude_of_nothing() -> None:
    assert magnitude(torch.zeros(0)) == plainly(magnitude, torch.zeros(0)) == (0, 0.0)
    assert magnitude(torch.zeros(3, 2).t()) == (0, 0.0)


def test_a_mark_beyond_the_table_is_refused() -> None:
    for mark in (3, -1):
        with pytest.raises((GradtraceError, RuntimeError)):
            ops.tally(torch.tensor([mark], dtype=torch.int32), torch.ones(1), 3)


def test_no_mark_at_all() -> None:
    """Nothing to count, in no row."""
    nothing = torch.zeros(0, dtype=torch.int32), torch.zeros(0), 0
    for counts, sums in (ops.tally(*nothing), plainly(ops.tally, *nothing)):
        assert (counts.tolist(), sums.tolist()) == ([], [])
        assert (counts.dtype, sums.dtype) == (torch.int64, torch.float64)


def turned(x: Tensor) -> Tensor:
    """The same, with the last dimension outermost in memory."""
    back = list(reversed(range(x.dim())))
    return x.permute(back).clone(memory_format=torch.contiguous_format).permute(back)


# Choosing along lines ----------------------------------------------------------------------------


SHAPES: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    ((7,), (0,)),
    ((3, 5), (0,)),
    ((3, 5), (1,)),
    ((3, 5), (0, 1)),
    ((3, 5), ()),
    ((2, 3, 4), (1,)),
    ((2, 3, 4), (0, 2)),
    ((2, 3, 2, 3), (0, 2)),
    ((2, 3, 2, 3), (1, 3)),
    ((2, 3, 2, 3, 2), (0, 2, 4)),
    ((2, 1, 3), (1,)),
    ((), ()),
    ((0, 3), (0,)),
    ((3, 0), (0,)),
    ((600, 3), (0,)),
    ((3, 600), (1,)),
    ((2, 3, 1100), (0, 2)),
    ((2, 1100), (0,)),
]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("shape, dims", SHAPES, ids=str)
def test_reduce(
    shape: tuple[int, ...], dims: tuple[int, ...], kind: str, dtype: torch.dtype, threads: int
) -> None:
    x = numbers(kind, dtype, *shape)
    marks = torch.arange(1, x.numel() + 1, dtype=torch.int32).reshape(shape)
    plain = plainly(ops.reduce, x, marks, dims)
    for turn in (torch.clone, apart, turned):
        for beside in (turn(marks), marks):
            found = ops.reduce(turn(x), beside, dims)
            same(found.value, plain.value)
            assert torch.equal(found.ids, plain.ids)
    check_reduced(x, marks, dims, plain)


def check_reduced(x: Tensor, marks: Tensor, dims: tuple[int, ...], got: Selected) -> None:
    """Line by line."""
    kept = [d for d in range(x.dim()) if d not in dims]
    for at in product(*(range(x.shape[d]) for d in kept)):
        place: list[Any] = [slice(None)] * x.dim()
        for d, n in zip(kept, at):
            place[d] = n
        most, mark = 0.0, 0
        line = x[tuple(place)].reshape(-1).tolist()
        for size, here in zip(line, marks[tuple(place)].reshape(-1).tolist()):
            if larger(abs(size), most):
                most, mark = abs(size), here
        same(got.value[at], torch.tensor(most, dtype=x.dtype))
        assert int(got.ids[at]) == mark


MANY: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    ((70_001,), (0,)),
    ((3, 50_000), (1,)),
    ((50_000, 3), (0,)),
    ((900, 700), (0,)),
    ((900, 700), (1,)),
    ((40_000, 2), (1,)),
]


@pytest.mark.parametrize("shape, dims", MANY, ids=str)
def test_reduce_of_many(shape: tuple[int, ...], dims: tuple[int, ...], threads: int) -> None:
    for kind, dtype in product(MAKERS, TYPES):
        x = numbers(kind, dtype, *shape)
        marks = torch.arange(1, x.numel() + 1, dtype=torch.int32).reshape(shape)
        found, plain = ops.reduce(x, marks, dims), plainly(ops.reduce, x, marks, dims)
        same(found.value, plain.value)
        assert torch.equal(found.ids, plain.ids)


@pytest.mark.parametrize("dtype", [*TYPES, torch.float16], ids=str)
@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("n, size", [(0, 3), (1, 1), (20, 7), (500, 20), (9, 0)])
def test_scatter(n: int, size: int, kind: str, dtype: torch.dtype) -> None:
    x = numbers(kind, dtype, n)
    generator = torch.Generator().manual_seed(n)
    target = torch.randint(-1, max(size, 1), (n,), generator=generator)
    target = target if size else target.clamp(max=-1)
    marks = torch.arange(1, n + 1, dtype=torch.int32)
    found, plain = (
        ops.scatter(x, marks, target, size),
        plainly(ops.scatter, x, marks, target, size),
    )
    same(found.value, plain.value)
    assert torch.equal(found.ids, plain.ids)
    for i in range(size):
        most, mark = 0.0, 0
        for j in range(n):
            if int(target[j]) == i and larger(abs(float(x[j])), most):
                most, mark = abs(float(x[j])), j + 1
        same(found.value[i].double(), torch.tensor(most, dtype=torch.float64))
        assert int(found.ids[i]) == mark


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize(
    "around", [Around(), Around(1, 3, 1), Around(2, 1, 5), Around(3, 2, 2)], ids=str
)
def test_sparse(around: Around, kind: str, dtype: torch.dtype, threads: int) -> None:
    blocks, planes, inner = around
    columns, rows, n = 30, 400, 700
    generator = torch.Generator().manual_seed(n)
    block = torch.randint(blocks, (n,), generator=generator)
    row = block * rows + torch.randint(rows, (n,), generator=generator)
    column = block * columns + torch.randint(columns, (n,), generator=generator)
    shapes = [(blocks, planes, size, inner) for size in (columns, rows)]
    m = Sparse.of((row, column, numbers(kind, dtype, n)), shapes[0], shapes[1], around)
    x = numbers(kind, dtype, *m.in_shape, seed=1)
    marks = torch.arange(1, m.inputs + 1, dtype=torch.int32).reshape(m.in_shape)
    how = Compressed(m.starts, m.source, m.weight, (*around, columns, rows))
    found, plain = ops.sparse(how, x, marks), plainly(ops.sparse, how, x, marks)
    same(found.value, plain.value)
    assert torch.equal(found.ids, plain.ids)
    total, wanted = ops.sparse_sum(how, x), plainly(ops.sparse_sum, how, x)
    torch.testing.assert_close(total, wanted, equal_nan=True)


@pytest.mark.parametrize(
    "starts, source",
    [
        ([0, 1, 3], [0, 1, 1 << 40]),
        ([0, 1, 3], [0, -1, 1]),
        ([0, 3, 2], [0, 1, 0]),
        ([0, 1, 9], [0]),
    ],
    ids=["beyond", "before", "falling", "too many"],
)
def test_entries_that_point_outside_are_refused(starts: list[int], source: list[int]) -> None:
    weight = torch.ones(len(source))
    how = Compressed(torch.tensor(starts), torch.tensor(source), weight, (1, 1, 1, 2, 2))
    with pytest.raises(GradtraceError, match="index beside the data"):
        ops.sparse_sum(how, torch.tensor([3.0, 4.0]))


# Diagonal plus low rank --------------------------------------------------------------------------


def every_pair(how: LowRankLines) -> tuple[Tensor, Tensor]:
    """The largest contribution to each element, of all of its line, and its place."""
    x, number = how.x, torch.arange(how.x.shape[1])
    own = number.unsqueeze(1) == number
    weight = torch.zeros((), dtype=x.dtype)
    diagonal = how.diagonal
    for u, v in zip(how.left, how.right):
        weight = weight + u.unsqueeze(2) * v.unsqueeze(1)
        diagonal = diagonal + u * v
    if len(how.left) == 1:  # the product of the others is formed before u comes in
        others = how.left[0].abs().unsqueeze(2) * (how.right[0] * x).abs().unsqueeze(1)
    else:
        others = (weight * x.unsqueeze(1)).abs()
    size = torch.where(own, (diagonal * x).abs().unsqueeze(2), others)
    value, place = size.max(2)
    return value, torch.where(value == 0, -1, place)


def check_normalised(how: LowRankLines) -> None:
    """With the diagonal, and without it, so that others win."""
    check_chosen(how)
    check_chosen(how._replace(diagonal=torch.zeros_like(how.diagonal)))


def check_chosen(how: LowRankLines) -> None:
    """Place, value and mark, to the bit."""
    value, place = every_pair(how)
    found = ops.normalise(how)
    assert found is not None and found.place is not None
    same(found.value, value)
    assert torch.equal(found.place, place)
    marks = torch.arange(1, value.numel() + 1, dtype=torch.int32).reshape(value.shape)
    handed = ops.normalise(how, apart(marks))
    assert handed is not None and handed.ids is not None
    same(handed.value, value)
    taken = marks.gather(1, place.clamp(min=0))
    assert torch.equal(handed.ids, torch.where(place >= 0, taken, 0))


def lines_of(kind: str, n: int, dtype: torch.dtype) -> LowRankLines:
    """Three lines of a kind, two pairs."""
    some = [along_a_line(kind, n, seed) for seed in range(3)]
    u0, u1, v0, v1, x = (
        torch.stack(part).to(dtype) for part in zip(*((*u, *v, x) for u, v, x in some))
    )
    return LowRankLines(-u1 - 0.5, (u0, u1), (v0, v1), x)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(
    "n", [1, 2, 16, 17, 65, 127, 300, pytest.param(768, marks=pytest.mark.thorough)]
)
@pytest.mark.parametrize("kind", KINDS)
def test_lines_of_rank_two(kind: str, n: int, dtype: torch.dtype, threads: int) -> None:
    how = lines_of(kind, n, dtype)
    check_normalised(how)
    check_normalised(
        LowRankLines(*([apart(u) for u in p] if isinstance(p, tuple) else apart(p) for p in how))
    )  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_lines_of_rank_one(kind: str, dtype: torch.dtype, threads: int) -> None:
    for n in (1, 2, 17, 127):
        how = lines_of(kind, n, dtype)
        check_normalised(LowRankLines(how.diagonal, how.left[1:], how.right[1:], how.x))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("power", [-147, -140, -120, -100, 0, 60, 120])
def test_lines_of_numbers_that_are_small_or_large(power: int, dtype: torch.dtype) -> None:
    """Where products lose digits, or leave the range."""
    scale = 2.0 ** (power - 925 if dtype is torch.float64 and power < 0 else power)
    how = lines_of("gaussian", 200, dtype)
    check_normalised(how._replace(x=how.x * scale))
    check_normalised(how._replace(left=[u * scale for u in how.left]))
    check_normalised(how._replace(right=[u * scale for u in how.right]))
    check_normalised(how._replace(right=[how.right[0], how.right[1] * scale]))
    check_normalised(
        how._replace(right=[u * scale for u in how.right], left=[u / scale for u in how.left])
    )


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("seed", range(20))
def test_lines_with_nan_and_infinity(seed: int, dtype: torch.dtype) -> None:
    for n in (5, 40):
        d, x, *parts = (numbers("odd", dtype, 3, n, seed=seed + k) for k in range(6))
        check_normalised(LowRankLines(d, parts[:2], parts[2:], x))
        m = Normaliser(d, [(parts[0], parts[2])], [1], (3, n))
        found, plain = m.best(x), plainly(m.best, x)
        same(found.value, plain.value)
        assert torch.equal(found.source, plain.source)
        spoilt = lines_of("gaussian", n, dtype)
        for bad in (math.nan, math.inf):
            for part in (spoilt.x, spoilt.left[1], spoilt.right[0], spoilt.diagonal):
                kept = part[1, seed % n].clone()
                part[1, seed % n] = bad
                check_normalised(spoilt)
                part[1, seed % n] = kept


def test_many_points_on_an_edge() -> None:
    """Batch norm before average pooling, and equal gradients: every point is on the hull."""
    m, x = one_gradient_a_sample(8, 100)
    parts = [part.reshape(1, -1) for part in (m.diagonal, x, *m.left, *m.right)]
    check_normalised(LowRankLines(parts[0], parts[2:4], parts[4:], parts[1]))
    single = [part.float() for part in parts]
    check_normalised(LowRankLines(single[0], single[2:4], single[4:], single[1]))


def test_expanded_lines(threads: int) -> None:
    """As layer norm makes them: a number a line, a number an element."""
    unit, g = numbers("generic", torch.float32, 40, 100), numbers("ties", torch.float32, 40, 100)
    gain, scale = numbers("generic", torch.float32, 100), numbers("generic", torch.float32, 40, 1)
    pairs = (
        [(-scale / 100).expand(40, 100), -scale * unit / 100],
        [gain.expand(40, 100), gain * unit],
    )
    check_normalised(LowRankLines(scale * gain, *pairs, g))


def test_what_the_kernel_cannot_do_is_left_to_torch() -> None:
    part = numbers("generic", torch.float32, 2, 3)
    assert ops.normalise(LowRankLines(part, [part], [part.double()], part)) is None
    assert ops.normalise(LowRankLines(part, [part] * 3, [part] * 3, part)) is None
    assert plainly(ops.normalise, LowRankLines(part, [part], [part], part)) is None


SIZES = (0, 1, 7, 8, 9, 31, 1023, 1024, 1032, 5000, 16_384)


@pytest.mark.parametrize("isa", cpu_library.isas())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_many_leaves_are_measured_in_one_call(dtype: torch.dtype, isa: str) -> None:
    """As each is by itself, and as plain torch does."""
    before = cpu_library.isa()
    torch.manual_seed(0)
    leaves = []
    for size in SIZES:
        spread = torch.randn(size, dtype=dtype) * 10.0 ** torch.randint(-30, 30, (size,))
        near = torch.randn(size, dtype=dtype) * (torch.rand(size) < 0.9)
        odd = torch.where(torch.rand(size) < 0.01, math.inf, near)
        leaves += [spread, near, odd.to(dtype), torch.zeros(size, dtype=dtype)]
    leaves.append(torch.full((9,), torch.finfo(dtype).smallest_normal / 4, dtype=dtype))
    leaves.append(torch.tensor([math.nan] * 8 + [1.0] * 8, dtype=dtype))
    cpu_library.use_isa(isa)
    try:
        batch = backend_of(leaves[0]).tally_batch(leaves[0])
        assert batch is not None and not batch.full(1 << 28)
        assert [batch.measure(leaf) for leaf in leaves] == list(range(len(leaves)))
        counts, sums = batch.counted()
        alone = [ops.measure(leaf) for leaf in leaves]
    finally:
        cpu_library.use_isa(before)
    plain = [plainly(ops.measure, leaf) for leaf in leaves]
    for found in (alone, plain):
        torch.testing.assert_close(
            (counts, sums),
            (torch.stack([n for n, _ in found]), torch.stack([s for _, s in found])),
            rtol=0,
            atol=0,
            equal_nan=True,
        )


def test_a_batch_takes_small_leaves_alone() -> None:
    batch = backend_of(torch.ones(1)).tally_batch(torch.ones(1))
    assert batch is not None
    assert batch.measure(torch.ones(1 << 15)) is None  # large
    assert batch.measure(torch.ones(4, 4).t()[:, 1:]) is None  # not contiguous
    assert batch.measure(torch.ones(4, dtype=torch.bfloat16)) is None
    assert batch.tally(torch.ones(4, dtype=torch.int32), torch.ones(4), 2) is None
    assert batch.measure(torch.ones(4)) == 0 and batch.full(1)
    assert [part.tolist() for part in batch.counted()] == [[4], [4.0]]
    assert [part.tolist() for part in batch.counted()] == [[], []]  # released


@pytest.mark.parametrize("isa", cpu_library.isas())
def test_sizes_and_zeros(isa: str, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As plain torch finds them; zeros are listed in a second pass if there are many."""
    monkeypatch.setattr(tuning, "ZEROS_ROOM", 3)
    before = cpu_library.isa()
    cpu_library.use_isa(isa)
    try:
        for size in (*SIZES[1:], 40_000):
            x = torch.randn(size) * 10.0 ** torch.randint(-30, 30, (size,))
            x *= torch.rand(size) < 0.8
            found = ops.sizes([x, x[:1]])
            assert found is not None
            wide = x.double()
            wanted = wide.norm(), wide.abs().max(), wide.count_nonzero().double(), wide.abs().sum()
            torch.testing.assert_close(found[0], torch.stack(wanted), rtol=1e-12, atol=0)
            assert found[1, 3] == wide[0].abs()
            for each in (x, wide, torch.ones(size), -0.0 * x):
                assert torch.equal(ops.zeros(each), plainly(ops.zeros, each))
                assert ops.has_zeros(each) is (0 in each) is plainly(ops.has_zeros, each)
    finally:
        cpu_library.use_isa(before)
    turned = torch.randn(30, 20).T
    assert not ops.has_zeros(turned)
    assert ops.has_zeros(turned.relu()) and ops.has_zeros(turned.relu()[:, ::2])
    torch.testing.assert_close(
        ops.sizes([turned]), ops.sizes([turned.contiguous()]), rtol=1e-12, atol=0
    )
    spread = torch.randn(4, 3)[:, ::2].unsqueeze(0).expand(2, 4, 2)
    for other in (spread, torch.ones(2, 2)[:, ::1].expand(2, 2)[:, :1].expand(2, 2)):
        assert ops.sizes([x, other]) is None  # gaps, or elements that are there twice
    assert ops.sizes([torch.randn(5, dtype=torch.float64)]) is None
