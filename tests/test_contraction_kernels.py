"""The compiled contraction in (max, ×) against the reference, to the bit."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from itertools import islice, product

import fresh
import pytest
import torch
from backends import ops
from thorough import THOROUGH
from torch import Tensor

from gradtrace.errors import GradtraceError
from gradtrace.kernels import cpu_contraction, cpu_library, plain_contraction, tuning
from gradtrace.kernels.cpu_contraction import Algorithm, compiled
from gradtrace.kernels.operands import Contraction, Matrices, Operand

INF, NAN = math.inf, math.nan
HALF = [torch.float16, torch.bfloat16]

pytestmark = pytest.mark.skipif(
    cpu_library.library() is None, reason="there is no compiled library"
)


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Every test leaves the number of threads and the instruction set as they were."""
    threads, isa = torch.get_num_threads(), cpu_library.isa()
    yield
    torch.set_num_threads(threads)
    cpu_library.use_isa(isa)


# Data --------------------------------------------------------------------------------------------


def numbers(kind: str, shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> Tensor:
    """Numbers of a kind; the rare ones stand among many that are plain."""
    generator = torch.Generator().manual_seed(seed)
    plain = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    if kind == "random":
        return plain
    few = torch.finfo(dtype)
    pools = {
        "ties": [-2.0, -1.0, 1.0, 2.0],
        "signs": [-1.0, 1.0],
        "zeros": [0.0, -0.0, 0.0, 1.0],
        "denormals": [few.smallest_normal / 4, -few.smallest_normal, 1.0, few.tiny / 3],
        "tiny": [few.tiny ** (0.5) / 3, few.tiny ** (0.5), few.tiny ** (0.5) * 1.7],
        "huge": [few.max / 2, -few.max / 3, 2.0, 1.0],
        "infinities": [INF, -INF, 0.0, 1.0],
        "nan": [NAN, INF, 0.0, -1.0],
    }
    pool = torch.tensor(pools[kind], dtype=torch.float64).to(dtype)
    drawn = pool[torch.randint(len(pool), shape, generator=generator)]
    if kind not in ("infinities", "nan"):
        return drawn
    rare = torch.rand(shape, generator=generator) < 0.02
    return torch.where(rare, drawn, plain)


KINDS = (
    "random", "ties", "signs", "zeros", "denormals", "tiny", "huge", "infinities", "nan",
)  # fmt: skip


def transposed(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def apart(x: Tensor) -> Tensor:
    """The same numbers, with others between them."""
    return torch.stack([x, torch.full_like(x, 99)], -1)[..., 0]


def expanded(x: Tensor) -> Tensor:
    return x[:1].expand_as(x)


LAYOUTS = {"plain": lambda x: x, "transposed": transposed, "apart": apart, "expanded": expanded}


# Comparison --------------------------------------------------------------------------------------


def same_bits(found: Tensor | None, wanted: Tensor | None) -> bool:
    """Equal to the bit, but for which NaN it is."""
    if found is None or wanted is None:
        return found is wanted
    if found.dtype is not wanted.dtype or found.shape != wanted.shape:
        return False
    if not wanted.is_floating_point():
        return torch.equal(found, wanted)
    whole = torch.int64 if wanted.dtype is torch.float64 else torch.int32
    nan = wanted.isnan()
    bits = found.view(whole) == wanted.view(whole)
    return bool(torch.where(nan, found.isnan(), bits).all())


def agree(found: Contraction, wanted: Contraction) -> None:
    assert wanted.value is not None
    assert wanted.index is not None
    if found.value is not None:
        assert same_bits(found.value, wanted.value)
    if found.index is not None:
        assert found.index.dtype is torch.int64
        there = wanted.value != 0  # where all is 0, the place means nothing
        assert torch.equal(found.index[there], wanted.index[there])
    if found.ids is not None:
        assert same_bits(found.ids, wanted.ids)


def words(*shape: int) -> Tensor:
    """Marks that are all different and none 0."""
    return torch.arange(1, math.prod(shape) + 1, dtype=torch.int32).reshape(shape)


WANTED = list(islice(product([True, False], repeat=3), 7))  # all but nothing at all
WAYS = [Algorithm.DENSE, Algorithm.PRUNED, Algorithm.BY_MEASURE]


def check(a: Matrices, b: Matrices, marks: Matrices, everything: bool = False) -> None:
    """Every instruction set and way gives what the reference gives, for one and two threads."""
    wanted = plain_contraction.contraction(a, b, index=True, ids=marks)
    before: dict[int, Contraction] = {}
    for isa, threads, way in product(cpu_library.isas(), (1, 2), WAYS):
        cpu_library.use_isa(isa)
        torch.set_num_threads(threads)
        for value, index, marked in WANTED if everything else WANTED[:1]:
            found = compiled(a, b, value, index, marks if marked else None, way)[0]
            assert (found.value is not None, found.index is not None) == (value, index)
            agree(found, wanted)
            if value and index and marked:
                first = before.setdefault(0, found)
                assert all(same_bits(x, y) for x, y in zip(found[::2], first[::2]))


def pair(
    kind: str, shape: tuple[int, int, int, int], dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    i, m, k, n = shape
    return numbers(kind, (i, m, k), 0, dtype), numbers(kind, (i, k, n), 1, dtype)


# Tests -------------------------------------------------------------------------------------------

# Around every border: vectors of 2 to 16, panels of 16 to 64 columns, 16 k that
# are looked at together, lists of 40, runs of 32 rows, 1024 k a panel.
SHAPES = [
    *[(1, m, 5, 7) for m in (1, 2, 3, 31, 32, 33, 34, 35, 65, 70)],
    *[(1, 3, k, 5) for k in (1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 32, 33, 39, 40, 41, 42, 43, 44, 45)],
    *[(1, 3, k, 66) for k in (47, 48, 49, 63, 64, 65, 100, 127, 128, 129, 255, 256, 257)],
    *[(1, 3, k, 3) for k in (1023, 1024, 1025, 1039, 1040, 1041, 2047, 2048, 2049, 3073)],
    *[(1, 3, 50, n) for n in (1, 2, 3, 4, 5, 8, 9, 12, 15, 16, 17, 24, 28, 29, 31, 32, 33)],
    *[(1, 5, 50, n) for n in (47, 48, 49, 60, 63, 64, 65, 79, 80, 81, 96, 97, 127, 128, 129, 200)],
    *[(i, 4, 20, 6) for i in (2, 3, 4, 5, 9)],
    (2, 40, 70, 70), (3, 17, 33, 65), (5, 66, 18, 33), (1, 130, 90, 40), (1, 40, 600, 40),
    (1, 1, 2000, 1), (1, 1100, 3, 2), (2, 35, 1600, 9), (1, 100, 1, 100), (1, 1, 5, 1023),
    (1, 2, 6, 1024), (3, 1, 7, 1025), (1, 2, 4, 2051), (1, 1, 1, 1030), (4, 2, 3, 1),
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape: tuple[int, int, int, int]) -> None:
    """Each with all layouts; with kinds of data that take turns, but in the thorough run."""
    turn = SHAPES.index(shape)
    marks = words(*shape[:3])
    for kind in KINDS if THOROUGH else ("random", *KINDS[1 + turn % 2 :: 2]):
        check(*pair(kind, shape), marks)
    for layout in (transposed, apart):
        check(*map(layout, pair("random", shape)), layout(marks))
    for kind in ("random", KINDS[turn % len(KINDS)], KINDS[(turn + 4) % len(KINDS)]):
        check(*pair(kind, shape, torch.float64), marks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(2, 5, 90, 70), (1, 36, 50, 33), (1, 3, 1700, 5)], ids=str)
def test_kinds(kind: str, shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    check(*pair(kind, shape, dtype), words(*shape[:3]), everything=True)


@pytest.mark.parametrize("left", LAYOUTS)
@pytest.mark.parametrize("right", LAYOUTS)
@pytest.mark.parametrize("kind", ["random", "ties", "nan"])
def test_layouts(kind: str, left: str, right: str) -> None:
    for shape in ((3, 18, 35, 37), (2, 1, 70, 66), (2, 33, 4, 64)):
        a, b = pair(kind, shape)
        marks = LAYOUTS[right](words(*shape[:3]))
        check(LAYOUTS[left](a), LAYOUTS[right](b), marks)


@pytest.mark.parametrize("left", [*HALF, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("right", [*HALF, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", ["random", "ties", "nan", "denormals", "infinities"])
def test_precisions(left: torch.dtype, right: torch.dtype, kind: str) -> None:
    a = numbers(kind, (2, 5, 50), 0, left)
    b = numbers(kind, (2, 50, 21), 1, right)
    check(a, b, words(2, 5, 50))
    check(transposed(a), transposed(b), words(2, 5, 50))


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_every_half(dtype: torch.dtype) -> None:
    """All 65,536 numbers of half precision are read as torch reads them."""
    a = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype).reshape(1, -1, 1)
    one = torch.ones(1, 1, 1, dtype=dtype)
    for isa in cpu_library.isas():
        cpu_library.use_isa(isa)
        assert same_bits(ops.contract(a, one).value, a.float().abs())
        assert same_bits(ops.contract(one, a.transpose(1, 2)).value, a.float().abs().mT)


@pytest.mark.parametrize("shape", [s for s in product((0, 2), repeat=4) if not all(s)], ids=str)
def test_nothing(shape: tuple[int, int, int, int]) -> None:
    """No k has the value 0 and no mark; no m, n or i has no value."""
    a, b = pair("random", shape)
    found = ops.contract(a, b, index=True, ids=words(*shape[:3]))
    i, m, _, n = shape
    assert same_bits(found.value, torch.zeros(i, m, n))
    assert same_bits(found.ids, torch.zeros(i, m, n, dtype=torch.int32))
    assert found.index is not None
    assert found.index.shape == (i, m, n)


def windows(x: Tensor, size: int) -> Operand:
    """The windows of a convolution: rows are places in the image, k is channel, line, column."""
    batch, channels, high, wide = x.shape
    image = torch.arange(batch) * (channels * high * wide)
    lines, columns = torch.arange(high - size + 1), torch.arange(wide - size + 1)
    corner = (lines[:, None] * wide + columns).flatten()
    spot = torch.arange(size)[:, None] * wide + torch.arange(size)
    inner = (torch.arange(channels)[:, None, None] * (high * wide) + spot).flatten()
    return Operand(x.flatten(), image, corner, inner)


@pytest.mark.parametrize("kind", ["random", "ties", "nan"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_windows(kind: str, dtype: torch.dtype) -> None:
    """A convolution on either side, its windows not written out."""
    x = numbers(kind, (2, 3, 9, 8), 0, dtype)
    left = windows(x, 3)  # 42 places, 27 k
    weight = numbers(kind, (1, 27, 20), 1, dtype).expand(2, 27, 20)
    marks = left._replace(data=words(*x.shape).flatten())
    check(left, weight, marks)
    check(weight.transpose(1, 2), left, words(1, 20, 27).expand(2, 20, 27))
    written = torch.nn.functional.unfold(x.double(), 3).to(dtype)  # (batch, k, places)
    found, wanted = ops.contract(left, weight), ops.contract(written.transpose(1, 2), weight)
    assert same_bits(found.value, wanted.value)


def test_windows_beside_the_data_are_refused() -> None:
    x = windows(torch.ones(1, 1, 4, 4), 3)
    for wrong in (x._replace(rows=x.rows + 1), x._replace(inner=x.inner - 1)):
        with pytest.raises((GradtraceError, RuntimeError)):
            ops.contract(wrong, torch.ones(1, 9, 2))


def test_long_calls_are_made_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """By matrices, by rows, and by rows of each matrix."""
    monkeypatch.setattr(tuning, "SPLIT_MIN_ROWS", 3)
    torch.set_num_threads(1)
    a, b = pair("ties", (3, 10, 6, 4))
    marks = words(3, 10, 6)
    wanted = plain_contraction.contraction(a, b, index=True, ids=marks)
    for limit in (1, 100, 24 * 5, 240, 241, 480, 719, 720, 721):
        monkeypatch.setattr(tuning, "THREAD_PRODUCTS_PER_CALL", limit)
        agree(ops.contract(a, b, index=True, ids=marks), wanted)


def test_marks_of_other_dtypes() -> None:
    a, b = pair("random", (1, 4, 5, 3))
    wanted = plain_contraction.contraction(a, b, index=True, ids=words(1, 4, 5))
    for dtype in (torch.int64, torch.int16, torch.int32):
        agree(ops.contract(a, b, ids=words(1, 4, 5).to(dtype)), wanted)


@pytest.mark.parametrize("isa", ["generic", "abacus"])
def test_the_environment_names_an_instruction_set(isa: str) -> None:
    """One that is not there is passed over."""
    code = "from gradtrace.kernels.cpu_library import isa, isas; print(isa(), isas()[-1])"
    told = fresh.python("-c", code, check=True, env=os.environ | {"GRADTRACE_ISA": isa})
    used, best = told.stdout.split()
    assert used == ("generic" if isa == "generic" else best)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("rows", [1, 5])
def test_every_nan_is_the_same(rows: int, dtype: torch.dtype) -> None:
    """The first wins, though a later one have larger bits; in any sign."""
    whole = torch.int64 if dtype is torch.float64 else torch.int32
    nan = torch.full((60,), NAN, dtype=dtype).view(whole) + torch.arange(60, dtype=whole)
    a = numbers("random", (1, rows, 120), 0, dtype)
    a[..., 30:90] = nan.view(dtype)
    a[..., 60:] = -a[..., 60:]
    check(a, torch.ones(1, 120, 40, dtype=dtype), words(1, rows, 120))
    a[..., 30:90] = INF  # times 0
    b = numbers("zeros", (1, 120, 40), 0, dtype)
    check(a, b, words(1, rows, 120))


def test_what_survives() -> None:
    """Equals all survive; of random numbers the fewer the more there are."""
    ones = torch.ones(1, 40, 300)
    assert cpu_contraction.survivors(ones, ones.transpose(1, 2)) == 1.0
    few, many = (cpu_contraction.survivors(*pair("random", (1, 40, k, 40))) for k in (100, 1000))
    assert 0 < many < few < 1


def test_the_instruction_set_can_be_chosen() -> None:
    assert cpu_library.isas()[0] == "generic"
    cpu_library.use_isa("generic")
    assert cpu_library.isa() == "generic"
    with pytest.raises(ValueError, match="no instruction set 'abacus'"):
        cpu_library.use_isa("abacus")


@pytest.mark.parametrize("kind", ["random", "ties", "zeros", "nan", "denormals"])
@pytest.mark.parametrize("shape", [(1, 5, 30, 70), (2, 36, 130, 33), (1, 3, 1700, 5), (1, 1, 4, 9)])
def test_marks_of_the_other_operand(kind: str, shape: tuple[int, int, int, int]) -> None:
    a, b = pair(kind, shape)
    marks = words(*b.shape)
    wanted = plain_contraction.contraction(a, b, index=True, ids=marks, of_b=True)
    assert wanted.index is not None and wanted.value is not None
    by_hand = marks.gather(1, wanted.index).masked_fill(wanted.value == 0, 0)
    assert wanted.ids is not None and torch.equal(wanted.ids, by_hand)
    for isa, threads, way in product(cpu_library.isas(), (1, 2), Algorithm):
        cpu_library.use_isa(isa)
        torch.set_num_threads(threads)
        agree(compiled(a, b, True, True, marks, way, True)[0], wanted)
        turned = transposed(marks)
        assert torch.equal(compiled(a, b, False, False, turned, way, True)[0].ids, wanted.ids)


def test_one_k_is_a_plain_product() -> None:
    a, b = torch.tensor([[[-2.0], [NAN]]]), torch.tensor([[[3.0, -INF, 0.0]]])
    found, wanted = ops.contract(a, b), plain_contraction.contraction(a, b)
    assert same_bits(found.value, wanted.value)
    half = ops.contract(a.half(), b.bfloat16()).value
    assert half is not None and half.dtype is torch.float32
