"""The CUDA sources, run on the processor, give the bits of plain torch: cases of ``devices``."""

from __future__ import annotations

import ctypes
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import devices
import pytest
import torch
from backends import ops, plainly
from emulated import EmulatedGpu, Emulator, compiler
from test_maps import KINDS
from thorough import some
from torch import Tensor

from gradtrace import kernels
from gradtrace.ir import memory
from gradtrace.kernels import (
    backend_of,
    cuda_half_products,
    cuda_launch,
    cuda_pair_contraction,
    cuda_reduce,
    cuda_tally,
    cuda_tiling,
    cuda_top_k,
    tuning,
)
from gradtrace.kernels.cuda_batched_tally import BatchedTally
from gradtrace.kernels.sync import AsyncCopy
from gradtrace.linops import Contract, Normaliser
from gradtrace.semirings import ABS, TopK
from gradtrace.tracing import tally
from gradtrace.tracing.aggregate import Counts
from gradtrace.tracing.provenance import ProvenanceTable, compact


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    found = compiler()
    if found is None:
        pytest.skip("THE CUDA SOURCES ARE NOT TESTED: there is no C++ compiler (g++ or clang++)")
    return Emulator(tmp_path_factory.mktemp("emulated"), found)


@pytest.fixture
def emulator(built: Emulator, monkeypatch: pytest.MonkeyPatch) -> Iterator[Emulator]:
    built.use(monkeypatch)
    yield built
    assert built.launches, "nothing was launched"


# The contraction ---------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", devices.SMALL, ids=str)
@pytest.mark.parametrize("name", devices.DATA)
def test_contraction(name: str, shape: tuple[int, int, int, int], emulator: Emulator) -> None:
    devices.contraction("cpu", shape, name, torch.float32)


@pytest.mark.parametrize("dtype", devices.FLOATS[2:], ids=str)
def test_contraction_of_half_precision(dtype: torch.dtype, emulator: Emulator) -> None:
    for name in ("Gaussian", "ties", "NaN"):
        devices.contraction("cpu", (2, 9, 37, 33), name, dtype)
    devices.mixed("cpu")


@pytest.mark.parametrize("name", devices.DATA)
def test_contraction_of_bfloat16_in_pairs(name: str, emulator: Emulator) -> None:
    shape = (1, 130, 300, 140) if name == "Gaussian" else (1, 20, 300, 30)  # four tiles, or one
    devices.contraction("cpu", shape, name, torch.bfloat16)
    assert "contract_pairs" in emulator.launches


def test_pairs_of_windows_batches_and_long_rows(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices.windows("cpu", 5, torch.bfloat16)
    devices.contraction("cpu", (3, 40, 140, 70), "ties", torch.bfloat16)
    monkeypatch.setattr(cuda_pair_contraction, "MAX_K_BLOCKS", 3)
    cuda_pair_contraction.plan.cache_clear()
    devices.contraction("cpu", (1, 3, 700, 5), "near", torch.bfloat16)
    cuda_pair_contraction.plan.cache_clear()
    emulator.backwards = True
    devices.contraction("cpu", (1, 130, 140, 70), "ties", torch.bfloat16)
    assert set(emulator.launches) >= {"contract_pairs", "rescan_pairs", "contract"}


def test_long_contractions_are_cut(emulator: Emulator) -> None:
    """Several thread blocks work on a tile, and k are in larger blocks."""
    assert cuda_tiling.plan(1, 3, 5, 700, 5).parts > 1
    devices.contraction("cpu", (1, 3, 700, 5), "ties", torch.float32)
    for k, block in some(((2100, 32), (17_000, 128)), 1):
        assert cuda_tiling.plan(1, 3, 5, k, 5).block == block
        a, b = torch.randn(1, 3, k).round(), torch.randn(1, k, 5).round()
        devices.contracted("cpu", a, b, index=True)
        devices.contracted("cpu", a.mT.contiguous().mT, b, index=True)


@pytest.mark.parametrize("m, k, n", [(300, 150, 20), (20, 150, 300), (70, 150, 70)], ids=str)
@pytest.mark.parametrize("gap", [0, 1], ids=["aligned", "not aligned"])
def test_operands_are_read_as_they_lie(
    m: int, k: int, n: int, gap: int, emulator: Emulator
) -> None:
    """Rows together or k together; held in shared memory or not; with wide tiles and high ones."""
    draw = torch.Generator().manual_seed(0)
    flat = torch.randn(3 * (k + 4 + gap) * 304, generator=draw).mul(3).round()
    for turned_a, turned_b in ((False, False), (True, True), (False, True), (True, False)):
        a, b = (
            flat[gap:].as_strided((2, rows, k), _steps(rows, k + 2, turned, gap))
            for rows, turned in ((m, turned_a), (n, turned_b))
        )
        marks = torch.randint(1, 1 << 20, (2, n, k), generator=draw).int().mT
        devices.contracted("cpu", a, b.mT, ids=marks, of_b=True)
        devices.contracted("cpu", a, b.mT, index=True)
        devices.contracted("cpu", a, b.mT)
    apart: tuple[int, int, int] = (0, 1, 400)
    held = cuda_tiling.contraction_plan((2, m, n), k, (apart, apart), (True, True), 5).held
    assert [line > 0 for line in held] == [n < 300, n == 300]


def _steps(rows: int, k: int, turned: bool, gap: int) -> tuple[int, int, int]:
    """Of matrices with row by k, or k by row; with gaps, rows are no multiples of 4 apart."""
    line = -(-(rows if turned else k) // 4) * 4 + gap
    return (line * 2, 1, line) if turned else (line * 2, line, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_marks_through_contractions_in_all_their_forms(
    dtype: torch.dtype, emulator: Emulator
) -> None:
    devices.carried("cpu", dtype)


def test_operands_that_lie_as_matrices_are_not_laid_out(emulator: Emulator) -> None:
    """Only where the weight is summed, or its k are in another order."""
    copied = {"mk,knz->mn", "abk,ban->nk"}
    for spec, shapes in devices.EINSUMS.items():
        x, w = (torch.ones(shape) for shape in shapes)
        out = tuple(torch.einsum(spec.strip(), x, w).shape)
        map_ = Contract(spec.strip(), w, tuple(x.shape), out)
        found = map_._select_strided(x, torch.ones(x.shape, dtype=torch.int32), False)
        assert (found is None) == (spec in copied), spec


def test_windows_are_read_where_they_lie(emulator: Emulator) -> None:
    devices.windows("cpu")


def test_a_contraction_too_large_for_the_room_goes_in_pieces(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of matrices, rows and columns."""
    monkeypatch.setattr(tuning, "SMALL_WORKSPACE_BYTES", 0)
    a, b = (torch.randn(2, 300, 20).round(), torch.randn(2, 20, 270).round())
    marks = torch.randint(1, 99, (2, 20, 270)).int()
    for room, pieces in ((1 << 40, 1), (200_000, 2), (140_000, 4), (1, 8)):
        emulator.room = room
        emulator.launches.clear()
        devices.contracted("cpu", a, b, index=True)
        assert emulator.launches.count("contract") == pieces
        devices.contracted("cpu", a, b, ids=marks, of_b=True)
        devices.contracted("cpu", a, b)
    devices.windows("cpu")


def test_contraction_of_nothing(built: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    built.use(monkeypatch)
    devices.nothing("cpu")
    assert not built.launches


def test_the_order_of_threads_and_blocks_does_not_matter(emulator: Emulator) -> None:
    emulator.backwards = True
    devices.contraction("cpu", (2, 130, 37, 33), "ties", torch.float32)
    devices.contraction("cpu", (1, 3, 700, 5), "NaN", torch.float32)
    devices.tally_of_matrices("cpu")
    devices.tally_of_far_numbers("cpu")
    devices.reduce("cpu", False)
    devices.scatter("cpu", False)
    devices.normalise("cpu", "ties", (17,), (65,))
    devices.numbering("cpu", False)


def test_what_is_asked_of_the_kernels_reaches_them(emulator: Emulator) -> None:
    a, b = torch.randn(1, 20, 30), torch.randn(1, 30, 10)
    assert torch.equal(
        kernels.largest(a, b), (a.mT[0, :, :, None] * b[0, :, None]).abs().amax(0)[None]
    )
    assert emulator.launches == ["contract"]


def test_the_largest_few(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    devices.top("cpu", 3, [(2, 3, 5, 4), (1, 18, 20, 70), (1, 2, 0, 3), (0, 2, 3, 1)])
    monkeypatch.setattr(cuda_top_k, "MAX_BATCH", 2)
    devices.top("cpu", 3, [(5, 3, 2, 4)])
    assert set(emulator.launches) == {"top_float", "top_double"}


def test_too_many_of_the_largest_are_left_to_torch(emulator: Emulator) -> None:
    x, weight = torch.rand(9, 1, 2, 3).sort(0, descending=True).values.unbind(), torch.rand(1, 3, 2)
    assert not cuda_top_k.serves(x, weight)
    assert not cuda_top_k.serves(x[:2], weight.double())
    assert cuda_top_k.serves(x[:2], weight)
    assert len(TopK(9).contract("imk,ikn->imn", x, weight)) == 9
    assert not emulator.launches
    TopK(3).contract("imk,ikn->imn", x[:3], weight)


# Steps -------------------------------------------------------------------------------------------


def test_merge(emulator: Emulator) -> None:
    devices.merge("cpu", False)


def test_tally(emulator: Emulator) -> None:
    devices.tally("cpu", False)
    devices.tally_of_matrices("cpu")
    devices.tally_of_far_numbers("cpu")
    assert all(
        not work.any() for work in cuda_tally._WORK.values()
    )  # left as the next one needs it


def test_marks_that_are_too_many_are_counted_some_at_a_time(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "WORK_MAX_BYTES", 5000)
    cuda_tally._tally_plan.cache_clear()
    devices._tallied("cpu", devices.words(500, 40), torch.randn(500), 40)
    assert emulator.launches.count("tally_float") == 3
    cuda_tally._tally_plan.cache_clear()


def test_one_launch_counts_a_leaf(emulator: Emulator) -> None:
    for n in (5, 60_000):
        ops.tally(devices.words(n, 9), torch.ones(n), 9)
        ops.measure(torch.ones(n))
    assert emulator.launches == ["tally_float", "measure_float"] * 2


def test_a_mark_that_is_not_in_the_table_is_left_out(emulator: Emulator) -> None:
    """As no GPU is waited for; the compiled kernels of the CPU refuse it."""
    marks = torch.tensor([-1, 0, 2, 5, 130], dtype=torch.int32)
    counts, _ = cuda_tally.tally(marks, torch.ones(5), 3)
    assert counts.tolist() == [1, 0, 1]


@pytest.mark.parametrize("backwards", [False, True])
def test_leaves_are_counted_together(backwards: bool, emulator: Emulator) -> None:
    emulator.backwards = backwards
    devices.leaves("cpu", 1)
    assert len(emulator.launches) < 70  # of some 130 leaves, of floats and of doubles
    assert {"combine_float", "combine_double"} < {*emulator.launches}
    assert all(not work.any() for work in cuda_tally._WORK.values())


def test_each_leaf_has_memory_of_its_own(built: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU counts them at the same time."""
    built.use(monkeypatch)
    given: list[cuda_tally.TallyJob] = []
    lines: list[cuda_reduce.ReduceJob] = []
    monkeypatch.setattr(cuda_tally, "counted", lambda _name, _device, jobs, *_: given.extend(jobs))
    monkeypatch.setattr(cuda_reduce, "reduced", lambda _wide, _device, jobs: lines.extend(jobs))
    monkeypatch.setattr(tuning, "SPACE_WORDS", 2500)
    jobs = BatchedTally(torch.device("cpu"))
    for n in range(9):
        x, marks = torch.ones(700, 7 + n), torch.ones(700, 7 + n).int()
        jobs.reduce(x, marks, (0,), x[0], 5 + n)
        jobs.tally(marks, x, 3 + n)
        jobs.measure(x)
    entries = jobs.entries
    held = jobs._held  # so that no memory is given out twice
    jobs.counted()
    apart([(job.work, job.plan.words) for job in given], 1 << 40)
    apart([(job.at, job.id_count) for job in given], entries)
    assert {job.out for job in lines} < {job.ids for job in given}
    assert len(lines) == 9 and all(job.reduce_plan.combine_blocks for job in lines) and held
    parts = [(job.most, 16 * job.reduce_plan.places) for job in lines]
    apart(parts + [(job.out, 4 * job.reduce_plan.results) for job in lines], 1 << 62)


def test_work_is_held_until_the_launch(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than is kept between launches belongs to this one alone."""
    alive: list[bool] = []
    made: list[weakref.ref[Tensor]] = []
    work, kernel = cuda_tally._work, cuda_launch.kernel

    def making(device: torch.device, words: int) -> Tensor:
        found = work(device, words)
        made.append(weakref.ref(found))
        return found

    def launching(*args: Any) -> Callable[..., None]:
        run = kernel(*args)

        def launched(*words: Any) -> None:
            alive.extend(each() is not None for each in made)
            assert all(alive)  # else the kernel would write into memory of others
            run(*words)

        return launched

    monkeypatch.setattr(tuning, "CACHED_WORDS", 1)
    monkeypatch.setattr(cuda_tally, "_work", making)
    monkeypatch.setattr(cuda_launch, "kernel", launching)
    counts, _ = cuda_tally.tally(torch.arange(90).int() % 7, torch.ones(90), 7)
    assert counts.sum() == 90 and alive


def apart(places: list[tuple[int, int]], most: int) -> None:
    """Whether none begins before another ends."""
    end = 0
    for start, size in sorted(places):
        assert start >= end
        end = start + size
    assert end <= most


def test_leaves_that_are_counted_by_themselves(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = BatchedTally(torch.device("cpu"))
    x, marks, gradient = torch.ones(4, 5), torch.zeros(4, 5).int(), torch.ones(5)
    assert jobs.tally(marks.long(), x, 3) is None
    assert jobs.tally(marks, x.long(), 3) is None
    assert jobs.reduce(x, marks.long(), (0,), gradient, 3) is None
    assert jobs.reduce(x, marks, (0,), torch.ones(10)[::2], 3) is None
    assert jobs.reduce(x, marks, (0,), torch.ones(4), 3) is None
    assert jobs.reduce(x[:0], marks[:0], (0,), gradient, 3) is None
    monkeypatch.setattr(tuning, "PIECE_ELEMENTS", 4)
    assert jobs.tally(marks, x, 3) is None
    assert jobs.measure(x) is None
    monkeypatch.setattr(tuning, "PIECE_ELEMENTS", 100)
    monkeypatch.setattr(tuning, "WORK_MAX_BYTES", 5000)
    cuda_tally._tally_plan.cache_clear()
    assert jobs.tally(marks, x, 40) is None
    assert (jobs.entries, jobs.bytes) == (0, 0)
    assert jobs.tally(marks, x, 3) == 0
    assert jobs.reduce(x, marks, (0,), gradient, 3) == 3
    cuda_tally._tally_plan.cache_clear()
    assert [part.tolist() for part in jobs.counted()] == [
        [20, 0, 0, 5, 0, 0],
        [20.0, 0, 0, 5, 0, 0],
    ]


@pytest.mark.parametrize("room", [1, 3000, 1 << 28])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_influence_is_that_of_the_cpu(
    room: int, dtype: torch.dtype, emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever may be held; and no more is held than that and a leaf."""
    wanted = plainly(devices.influences, "cpu", dtype, 1)
    held, real = [], BatchedTally.counted

    def counted(self: BatchedTally) -> tuple[Tensor, Tensor]:
        held.append(self.bytes)
        return real(self)

    monkeypatch.setattr(memory, "LEAF_BATCH_MAX_BYTES", room)
    monkeypatch.setattr(BatchedTally, "counted", counted)
    monkeypatch.setattr(tuning, "SPACE_WORDS", 8)
    emulator.launches.clear()
    assert devices.influences("cpu", dtype, 1) == wanted
    most = 28 * 10 * (4 + dtype.itemsize) + 1000
    assert max(held) <= room + most
    assert (len(held) == 1) == (room == 1 << 28)
    assert (len(held) >= 10) == (room == 1)


@pytest.mark.parametrize("room", [1, 1 << 28])
def test_plain_leaves_are_looked_at_once(
    room: int, emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless they hold too much."""
    wanted = plainly(devices.cancelling, "cpu")
    assert next(iter(wanted)).unreached == 3  # to one element of each leaf nothing comes
    looks, real = [], tally._first_counts

    def look(found: Sequence[Counts]) -> list[int]:
        looks.append(len(found))
        return real(found)

    monkeypatch.setattr(tally, "_first_counts", look)
    monkeypatch.setattr(memory, "LEAF_BATCH_MAX_BYTES", room)
    assert devices.cancelling("cpu") == wanted
    assert [n for n in looks if n] == ([1, 1, 1] if room == 1 else [3])


@pytest.mark.parametrize("rule", ["greedy", "edge", "viterbi"])
def test_influence_of_pairs_is_that_of_the_cpu(rule: str, emulator: Emulator) -> None:
    for pairs in (1, 7):
        wanted = plainly(devices.influences, "cpu", torch.float32, pairs, rule=rule)
        assert devices.influences("cpu", torch.float32, pairs, rule=rule) == wanted


def test_where_memory_is_short_leaves_do_not_wait(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = devices.influences("cpu", torch.float32, 1)
    launches = len(emulator.launches)
    monkeypatch.setattr(memory, "short", lambda *_: True)
    monkeypatch.setattr(BatchedTally, "__init__", None)  # nobody makes any
    emulator.launches.clear()
    assert devices.influences("cpu", torch.float32, 1) == wanted
    assert len(emulator.launches) > launches


def test_reduce(emulator: Emulator) -> None:
    devices.reduce("cpu", False)


def test_long_lines_are_cut() -> None:
    for reduced, results, beside in ((70_001, 1, False), (600, 3, True), (1, 10**6, True)):
        columns, rows, cuts, length = cuda_reduce.divided(reduced, results, beside, 5)
        assert columns * rows == 256
        assert cuts * length >= reduced > (cuts - 1) * length
    assert cuda_reduce.divided(70_001, 1, False, 5)[2] > 1


def test_scatter(emulator: Emulator) -> None:
    devices.scatter("cpu", False)


def test_gather(emulator: Emulator) -> None:
    devices.gather("cpu")


@pytest.mark.parametrize("kind", KINDS)
def test_normalise(kind: str, emulator: Emulator) -> None:
    devices.normalise("cpu", kind, (1, 2, 17), (65, 300))


def test_normalise_long_lines(emulator: Emulator) -> None:
    devices.normalise("cpu", "norm with ties", (), (1100,))


def test_normalise_many_lines(emulator: Emulator) -> None:
    devices.normalise_many("cpu", 81)


def test_normalise_what_is_not_finite(emulator: Emulator) -> None:
    devices.normalise_odd("cpu", 1)


def test_normalise_expanded(emulator: Emulator) -> None:
    devices.normalise_expanded("cpu")


def test_normalise_tensors_as_they_lie(emulator: Emulator) -> None:
    devices.normalise_lying("cpu")


def test_normalised_sums(emulator: Emulator) -> None:
    devices.normalised_sums("cpu")
    names = {name.removesuffix("_float").removesuffix("_double") for name in emulator.launches}
    assert names == {"ranked_sums", "paired_sums"}


def test_normalised_sums_of_what_is_not_finite(emulator: Emulator) -> None:
    for bad, n, rank in product((float("nan"), float("inf")), (5, 100), (1, 2)):
        x, one = torch.rand(2, n), torch.ones(2, n)
        x[1, 3] = bad
        found = Normaliser(one, [(one, one)] * rank, [1], (2, n)).apply_in((x,), ABS)[0]
        assert found[0].isfinite().all() and not found[1].isfinite().any()


def test_products_of_half_precision(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within their bound, for numbers of any size; what is not finite stays so."""
    monkeypatch.setattr(tuning, "SPLIT_PRODUCT_MIN_PRODUCTS", 1)
    monkeypatch.setattr(tuning, "SPLIT_PRODUCT_MIN_COLUMNS", 1)
    monkeypatch.setattr(cuda_half_products, "summed_products", lambda a, b: a.float() @ b.float())
    sizes = torch.logspace(-30, 30, 5).unsqueeze(1)
    shapes = ((1, 5, 40, 3), (3, 5, 1, 9), (2, 5, 7, 1))
    for (i, m, k, n), parts in product(shapes, (2, 3)):
        monkeypatch.setattr(tuning, "TWO_PARTS_MIN_K", 1 if parts == 2 else 64)
        a, b = torch.rand(i, k, m).mT * sizes, torch.rand(i, k, n).bfloat16()
        split = cuda_half_products.split(a, parts)
        assert split.dtype is torch.bfloat16 and bool((split >= 0).all())
        whole = split.double().view(i, m, parts, k).sum(2)
        left_out = 2**-16 if parts == 2 else 0.0
        torch.testing.assert_close(whole, a.double(), rtol=left_out, atol=0.0)
        wanted = a.double() @ b.double()
        bound = left_out + parts * (k + 1) * 2**-24
        for found in (ops.widened_product(a, b), ops.widened_product(a, b.mT.contiguous().mT)):
            torch.testing.assert_close(found.double(), wanted, rtol=bound, atol=0.0)
    for bad in (float("inf"), float("nan")):
        a[0, 1, 0] = bad
        assert not ops.widened_product(a, b)[0, 1].isfinite().any()


def test_sizes(emulator: Emulator) -> None:
    """Of more tensors than a launch takes; those of several thread blocks in a fixed order."""
    wide = torch.randn(3, 40_000) * 10.0 ** torch.randint(-30, 30, (3, 40_000))
    xs = [wide * (torch.rand(3, 40_000) < 0.5), torch.zeros(7), wide.T, torch.tensor(-2.0)]
    xs += [
        x.to(dtype)
        for x in (torch.randn(50, 10).T, torch.ones(1))
        for dtype in (torch.float16, torch.bfloat16)
    ]
    xs += [torch.tensor([1.0, float(bad)]) for bad in ("nan", "inf")]
    xs += [torch.full((n,), 3.0) for n in range(1, 70)]
    found = ops.sizes(xs)
    assert found is not None and emulator.launches[-4:] == ["sizes", "sizes_combined"] * 2
    for x, row in zip(xs, found, strict=True):
        x = x.double()
        wanted = [x.norm(), x.abs().max(), x.count_nonzero().double(), x.abs().sum()]
        torch.testing.assert_close(row, torch.stack(wanted), rtol=1e-12, atol=0, equal_nan=True)
    assert torch.equal(ops.sizes(xs[:1]), found[:1])
    assert ops.sizes([xs[0], torch.ones(2, dtype=torch.float64)]) is None
    assert ops.sizes([wide[:, ::2]]) is None and ops.sizes([torch.ones(0)]) is None


def test_terms_with_the_same_marks(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EmulatedGpu, "synchronises", True)
    devices.shared_sums("cpu")


def test_most_elements_of_long_lines_are_left_out(emulator: Emulator) -> None:
    """But where that cannot be: nearly all are corners, or products may leave the range."""
    left, empty = torch.zeros(3, dtype=torch.int32), torch.empty

    def made(*shape: object, **how: Any) -> Tensor:
        return left.fill_(7) if shape == (3,) else empty(*shape, **how)  # type: ignore[call-overload]

    for kind, over in (("gaussian", 0), ("circle", 1)):
        how = devices.lines_of(kind, 300, torch.float32)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "empty", made)
            ops.normalise(how)
        assert left.tolist() == [over] * 3, kind


def test_numbers_of_marks(emulator: Emulator) -> None:
    devices.numbering("cpu", False)


def test_a_palette_is_looked_through_with_two_launches(emulator: Emulator) -> None:
    """And with one, where nobody is left."""
    rows, numbers = tuple(1 | n % 500 << 60 for n in range(600)), devices.words(900, 601)
    for given in (numbers, numbers.reshape(30, 30).mT, numbers % 2, numbers % 1):
        found, wanted = (do(_compacted, given, ProvenanceTable(rows, 2)) for do in (_done, plainly))
        assert torch.equal(found[0], wanted[0])
        assert (tuple(found[1].rows), found[1].extra) == (tuple(wanted[1].rows), wanted[1].extra)
    assert emulator.launches == ["used", "renumber"] * 3 + ["used"]


def test_nobody_waits_for_marks_that_differ(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU gives new numbers by itself; which marks are left is told when somebody asks."""
    read: list[AsyncCopy] = []
    old = AsyncCopy.read
    monkeypatch.setattr(AsyncCopy, "read", lambda letter: (read.append(letter), old(letter))[1])
    provenance, numbers = (
        ProvenanceTable(tuple(range(1, 1200, 2)), 1 << 70),
        devices.words(900, 601),
    )
    whole = torch.arange(601, dtype=torch.int32)
    for given in (numbers, numbers.reshape(30, 30).mT, numbers % 2, numbers % 1, whole):
        emulator.launches.clear()
        found, less = _compacted(given, provenance)
        assert emulator.launches == ["used", "close", "renumber"]
        assert not less.single and not read
        wanted, fewer = plainly(_compacted, given, provenance)
        same = wanted.any()
        assert torch.equal(found, wanted)
        assert less.sets() == fewer.sets() if same else less.sets() == [0]
        assert len(less.rows) == len(less.sets()) - 1
        assert len(read) == 1
        read.clear()


def _compacted(ids: Tensor, table: ProvenanceTable) -> tuple[Tensor, ProvenanceTable]:
    return compact(ids, table, backend_of(ids))


def _done(f: Callable[..., Any], *given: Any) -> Any:
    return f(*given)


# The emulator, and the compiler ------------------------------------------------------------------


def test_the_emulator_tells_what_cannot_work(emulator: Emulator) -> None:
    kernel = cuda_launch.kernel(torch.device("cpu"), "steps.cu", "gather")
    with pytest.raises(AssertionError, match="another number of words"):
        kernel((1, 1, 1), (1, 1, 1), (0,))
    with pytest.raises(AssertionError, match="too large"):
        kernel((1, 70_000, 1), (1, 1, 1), (0,) * 5)
    with pytest.raises(AssertionError, match="no such kernel"):
        cuda_launch.kernel(torch.device("cpu"), "steps.cu", "nobody")((1, 1, 1), (1, 1, 1), ())
    kernel((1, 1, 1), (1, 1, 1), (0,) * 5)


def nvrtc() -> ctypes.CDLL | None:
    """NVIDIA's run-time compiler, which needs no GPU, where torch or the system has it."""
    folders = [Path(path) / "nvidia" for path in [*sys.path, str(Path(torch.__file__).parents[1])]]
    libraries = [each for folder in folders for each in folder.glob("**/libnvrtc.so.*")]
    for place in libraries:
        for more in place.parent.glob("libnvrtc-builtins.so.*"):
            ctypes.CDLL(str(more), mode=ctypes.RTLD_GLOBAL)
        return ctypes.CDLL(str(place))
    return None


SOURCES = [
    *(
        ("contract.cu", (f"KB {block}", f"BM {rows}", f"BN {columns}", "INDEX"))
        for block in (8, 16)
        for rows, columns in cuda_tiling.TILES
    ),
    ("contract.cu", ("KB 32", "BM 128", "BN 128", "INDEX")),
    ("contract.cu", ("KB 64", "BM 128", "BN 128", "INDEX")),
    ("contract.cu", ("KB 128", "BM 128", "BN 128", "INDEX")),
    ("contract.cu", ("KB 128", "BM 128", "BN 128")),
    ("contract_pairs.cu", ()),
    ("rescan.cu", ("KB 8",)),
    ("rescan.cu", ("KB 16",)),
    ("rescan.cu", ("KB 128",)),
    ("steps.cu", ()),
    ("top.cu", ("TOP 8",)),
]


def test_the_larger_of_two_terms(emulator: Emulator) -> None:
    devices.duel("cpu")


def test_ids_of_products_of_half_precision(emulator: Emulator) -> None:
    devices.scaled("cpu")
    devices.underflows("cpu")


@pytest.mark.parametrize("file, defines", SOURCES, ids=str)
def test_the_sources_compile_for_a_gpu(file: str, defines: tuple[str, ...]) -> None:
    library = nvrtc()
    if library is None:
        pytest.skip("there is no NVRTC here")
    program, text = ctypes.c_void_p(), cuda_launch.source(file, defines)
    created = library.nvrtcCreateProgram(
        ctypes.byref(program), text.encode(), b"source.cu", 0, None, None
    )
    assert created == 0
    options = (ctypes.c_char_p * 2)(b"--gpu-architecture=sm_90", b"--ptxas-options=-v")
    code = library.nvrtcCompileProgram(program, 2, options)
    length = ctypes.c_size_t()
    library.nvrtcGetProgramLogSize(program, ctypes.byref(length))
    log = ctypes.create_string_buffer(length.value)
    library.nvrtcGetProgramLog(program, log)
    told = log.value.decode()
    library.nvrtcDestroyProgram(ctypes.byref(program))
    assert code == 0, told
    spills = [line for line in told.splitlines() if "spill" in line]
    assert len(spills) == len(cuda_launch.names(text))
    assert all(" 0 bytes spill stores" in line for line in spills), told
