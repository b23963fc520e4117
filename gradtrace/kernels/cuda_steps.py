"""The functions of ``steps`` on a GPU, by the kernels of ``cuda/steps.cu``, without a sync.

Tensors are read by their strides and in their own dtype, half precisions included.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from gradtrace.kernels import cuda_launch
from gradtrace.kernels.pointers import on_device

FILE = "steps.cu"
KINDS = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}
WIDE = {torch.float32: "float", torch.float64: "double"}
MAX_DIMS = 6
"""The most dimensions that ``merge`` supports, after collapsing (see ``_collapsed``)."""

BINS = {False: (40, 8), True: (264, 12)}
"""By whether values are double: bins per id in ``steps.cu``, and how many are in shared memory."""

MAX_TALLIES, MAX_REDUCTIONS = 32, 16
"""The most leaves per launch of the tally and of the reduction; the same as in ``steps.cu``."""

UNUSED_WORDS = (0,) * 512
"""Argument words of unused job slots."""

HEADER_WORDS, BLOCK_MIN_ELEMENTS = 16, 4096
"""Words before the bins in the workspace, and elements from which another block pays."""

SHARED_BYTES, WORK_MAX_BYTES, CACHED_WORDS = 47 << 10, 1 << 27, 1 << 19
"""Bytes of shared memory for bins, the most bytes of bins in a workspace, and the words of the
workspace that is cached for each stream.
"""

ELEMENTS_PER_THREAD, TILE_MAX_THREADS = 4, 256
"""Elements that a thread compares with all others of their line, and the most threads per block."""

PAIRWISE_MAX_ELEMENTS = 64
"""Up to this many elements per line, all pairs are compared without pruning first."""

NULL_OPERAND = (0, 0, 0)
"""Null operand."""


class LineLayout(NamedTuple):
    """Tensors of other shapes read as lines: the number of lines, their length, the shape of the
    results, and for each of diagonal, x, left, right and provenance ids the stride from line to
    line and from element to element.
    """

    lines: int
    n: int
    shape: Sequence[int]
    steps: Sequence[tuple[int, int]]


Levels = tuple[tuple[int, int, int], ...]
"""Four levels: the size of each, its stride in the values and in the provenance ids."""


def serves(*tensors: Tensor) -> bool:
    """Whether these tensors are on one GPU, for which the kernels compile."""
    return cuda_launch.serves(FILE, *tensors)


def _blocks(n: int) -> tuple[int, int, int]:
    """Grid with one thread per element up to 2²⁰ blocks, then a grid-stride loop."""
    return min(-(-n // 256), 1 << 20), 1, 1


THREADS, TALLY_THREADS = (256, 1, 1), (512, 1, 1)


def merge(size: Tensor, marks: Tensor, value: Tensor, other: Tensor | int, shift: int) -> bool:
    """``steps.merge``; False if the kernel does not support the tensors."""
    n = size.numel()
    if not n or (isinstance(other, int) and not other):
        return True
    if value.dtype not in KINDS or size.dtype not in WIDE or marks.dtype is not torch.int32:
        return False
    shape = size.shape
    value = value if value.shape == shape else value.expand(shape)
    beside, constant = marks, other
    if isinstance(other, Tensor):
        beside, constant = other if other.dtype is torch.int32 else other.to(torch.int32), 0
        beside = beside if beside.shape == shape else beside.expand(shape)
    steps = size.stride(), marks.stride(), value.stride(), beside.stride()
    how = _collapsed(shape, *steps)
    if how is None:
        return False
    there = 0 if isinstance(other, int) else on_device(beside)
    device = size.device
    with cuda_launch.at(device):
        cuda_launch.kernel(device, FILE, f"merge_{WIDE[size.dtype]}")(
            _blocks(n), THREADS,
            (
                on_device(size), on_device(marks), on_device(value), there, int(constant), shift,
                KINDS[value.dtype], n, *how,
            ),
        )  # fmt: skip
    return True


def larger(
    first: Tensor,
    marks: Tensor | int,
    unmasked: bool,
    second: Tensor,
    others: Tensor | int,
    shift: int,
) -> Tensor | None:
    """``others + shift`` where ``others`` is not 0 and |second| > |first|, else ``marks``.

    ``marks`` and ``others`` are provenance ids, one per element or one for all. If ``unmasked``
    (unmasked), an id in ``marks`` counts only where its element is not 0. NaN counts as the largest
    value, and of equals the first stays. None if the kernel does not support the tensors; then
    ``steps.merge`` computes the same in several passes.
    """
    beside = [x for x in (marks, others) if isinstance(x, Tensor)]
    n, kind, other = first.numel(), KINDS.get(first.dtype), KINDS.get(second.dtype)
    if (
        not cuda_launch.serves(FILE, first, second, *beside)
        or not n
        or kind is None
        or other is None
    ):
        return None
    shape, device = first.shape, first.device
    if second.shape != shape:
        return None
    for x in beside:
        if x.dtype is not torch.int32 or x.shape != shape:
            return None
    out = torch.empty(shape, dtype=torch.int32, device=device)
    mine, here, mark = _ids_operand(marks, out)
    theirs, there, another = _ids_operand(others, out)
    strides = (out.stride(), first.stride(), mine.stride(), second.stride(), theirs.stride())
    how = _collapsed(shape, *strides)
    if how is None:
        return None
    words = (
        on_device(out), on_device(first), here, on_device(second), there, mark, another, shift,
        int(unmasked), kind, other, n, *how,
    )  # fmt: skip
    with cuda_launch.at(device):
        name = "larger_double" if kind == 1 else "larger_float"
        cuda_launch.kernel(device, FILE, name)(_blocks(n), THREADS, words)
    return out


def _ids_operand(marks: Tensor | int, out: Tensor) -> tuple[Tensor, int, int]:
    """A tensor with the strides of the ids, their address, and the constant id. A tensor of ids
    has no constant (0); a constant has no address (0), and ``out`` supplies the strides.
    """
    return (marks, on_device(marks), 0) if isinstance(marks, Tensor) else (out, 0, marks)


@lru_cache(4096)
def _collapsed(shape: Sequence[int], *steps: Sequence[int]) -> tuple[int, ...] | None:
    """Collapse dimensions that are adjacent in memory in all tensors. The argument words of the
    kernels: the number of dimensions left, then their sizes, innermost first, then the strides of
    each tensor; None if more than ``MAX_DIMS`` are left.
    """
    sizes: list[int] = []
    found: list[tuple[int, ...]] = []
    for d in reversed(range(len(shape))):
        here = tuple(step[d] for step in steps)
        if shape[d] == 1:
            continue
        if sizes and here == tuple(sizes[-1] * step for step in found[-1]):
            sizes[-1] *= shape[d]
            continue
        sizes.append(shape[d])
        found.append(here)
    if len(sizes) > MAX_DIMS:
        return None
    rest = MAX_DIMS - len(sizes)
    words = [len(sizes), *sizes, *[1] * rest]
    for k in range(len(steps)):
        words += [*(step[k] for step in found), *[0] * rest]
    return tuple(words)


class TallyJob(NamedTuple):
    """A leaf to tally: addresses of its provenance ids (0: all nonzero elements count as one id)
    and of its gradient, dtype code, number of elements; the number of ids, the lowest of them, the
    plan; the offsets of its results and of its workspace, in words.
    """

    marks: int
    gradient: int
    kind: int
    n: int
    id_count: int
    low: int
    plan: TallyPlan
    at: int = 0
    work: int = 0


def counted(
    name: str,
    device: torch.device,
    jobs: Sequence[TallyJob],
    found: tuple[Tensor, Tensor],
    work: int,
) -> None:
    """Tally at most ``MAX_TALLIES`` leaves in one launch, into the counts and sums of ``found``;
    ``work`` is the total size of their workspaces in words.
    """
    memory = _work(device, work)  # a reference until the launch: a large workspace is not cached
    counts, sums, place = on_device(found[0]), on_device(found[1]), on_device(memory)
    words, first, shared = [len(jobs)], 0, 0
    for marks, gradient, kind, n, id_count, low, plan, at, mine in jobs:
        words += (
            marks, gradient, kind, n, id_count, low, min(plan.slots, id_count), plan.length,
            place + 8 * mine, sums + 8 * at, counts + 8 * at, first, plan.blocks,
        )  # fmt: skip
        first += plan.blocks
        shared = max(shared, plan.shared)
    words += UNUSED_WORDS[: 13 * (MAX_TALLIES - len(jobs))]
    cuda_launch.kernel(device, FILE, name)((first, 1, 1), TALLY_THREADS, tuple(words), shared)


def results(count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Uninitialised counts and sums for ``count`` provenance ids."""
    counts = torch.empty(count, dtype=torch.int64, device=device)
    return counts, torch.empty(count, dtype=torch.float64, device=device)


def tally(marks: Tensor, gradient: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """``steps.tally`` of at most ``steps.PIECE_ELEMENTS`` contiguous elements; ``count`` ≥ 1."""
    device, kind, n = gradient.device, KINDS[gradient.dtype], gradient.numel()
    found, plan = results(count, device), tally_plan(n, count, kind == 1, device)
    where = on_device(marks), on_device(gradient), kind, n
    with cuda_launch.at(device):
        for low in range(0, count, plan.marks):
            job = TallyJob(*where, min(plan.marks, count - low), low, plan, low)
            counted(TALLY[kind == 1], device, (job,), found, plan.words)
    return found


def measured(gradient: Tensor) -> tuple[Tensor, Tensor]:
    """``steps.measured`` of at most ``steps.PIECE_ELEMENTS`` contiguous elements."""
    device, kind, n = gradient.device, KINDS[gradient.dtype], gradient.numel()
    found, plan = results(1, device), tally_plan(n, 1, kind == 1, device)
    job = TallyJob(0, on_device(gradient), kind, n, 1, 0, plan)
    with cuda_launch.at(device):
        counted(MEASURE[kind == 1], device, (job,), found, plan.words)
    return found[0].reshape(()), found[1].reshape(())


TALLY, MEASURE = ("tally_float", "tally_double"), ("measure_float", "measure_double")


class TallyPlan(NamedTuple):
    """How a leaf is tallied: thread blocks, elements per block, provenance ids in shared memory,
    bytes of shared memory; ids per launch, and words of workspace for these.
    """

    blocks: int
    length: int
    slots: int
    shared: int
    marks: int
    words: int


def tally_plan(n: int, count: int, wide: bool, device: torch.device) -> TallyPlan:
    """The plan for tallying n elements by ``count`` provenance ids."""
    return _tally_plan(n, count, wide, cuda_launch.processors(device))


@lru_cache(4096)
def _tally_plan(n: int, count: int, wide: bool, processors: int) -> TallyPlan:
    bins, window = BINS[wide]
    blocks = max(1, min(-(-n // BLOCK_MIN_ELEMENTS), 2 * processors))
    length = -(-n // blocks // 32) * 32 or 32  # a multiple of 32: whole cache lines
    marks = min(count, WORK_MAX_BYTES // (8 * (bins + 2)))
    slots = min(marks, SHARED_BYTES // (4 * (2 * window + 2)))
    shared = 4 * slots * (2 * window + (2 if slots < marks else 1))
    return TallyPlan(
        max(1, -(-n // length)), length, slots, shared, marks, HEADER_WORDS + (bins + 2) * marks
    )


_WORK: dict[tuple[torch.device, int], Tensor] = {}


def _work(device: torch.device, words: int) -> Tensor:
    """A workspace of at least this many zero words. Kernels leave it zeroed, so that one tensor per
    stream is reused.
    """
    stream = torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0
    found = _WORK.get((device, stream))
    if found is None or len(found) < words:
        found = torch.zeros(max(words, CACHED_WORDS), dtype=torch.int64, device=device)
        if words <= CACHED_WORDS:
            _WORK[device, stream] = found
    return found


def reduce(x: Tensor, marks: Tensor, levels: Levels, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """``steps.reduce`` of tensors whose dimensions collapse to four levels."""
    device = x.device
    dtype = torch.float64 if x.dtype is torch.float64 else torch.float32
    value = torch.empty(shape, dtype=dtype, device=device)
    out = torch.empty(shape, dtype=torch.int32, device=device)
    how, most = reduce_plan(levels, cuda_launch.processors(device)), 0
    if how.combine_blocks:
        partial = torch.empty(2 * how.places, dtype=torch.int64, device=device)
        most = on_device(partial)
    where = on_device(x), on_device(marks), KINDS[x.dtype]
    job = ReduceJob(*where, how, most, on_device(value), on_device(out))
    with cuda_launch.at(device):
        reduced(dtype is torch.float64, device, (job,))
    return value, out


class ReduceJob(NamedTuple):
    """A reduction: addresses of values and provenance ids, dtype code, plan; address of the partial
    results, if lines are cut into several parts; addresses of the resulting values (0: not wanted)
    and ids.
    """

    x: int
    marks: int
    kind: int
    reduce_plan: ReducePlan
    most: int
    value: int
    out: int


def reduced(wide: bool, device: torch.device, jobs: Sequence[ReduceJob]) -> None:
    """Run at most ``MAX_REDUCTIONS`` reductions in one launch, and one more launch to combine the
    parts of lines that were cut.
    """
    words, first, combine_blocks = [len(jobs)], 0, 0
    for x, marks, kind, how, most, value, out in jobs:
        words += (x, marks, kind, *how.words, most, most + 8 * how.places, value, out, first)
        first += how.blocks
        combine_blocks = max(combine_blocks, how.combine_blocks)
    words += UNUSED_WORDS[: 25 * (MAX_REDUCTIONS - len(jobs))]
    given = tuple(words)
    cuda_launch.kernel(device, FILE, REDUCE[wide])((first, 1, 1), THREADS, given)
    if combine_blocks:
        cuda_launch.kernel(device, FILE, COMBINE[wide])(
            (combine_blocks, len(jobs), 1), THREADS, given
        )


REDUCE, COMBINE = ("reduce_float", "reduce_double"), ("settle_float", "settle_double")


class ReducePlan(NamedTuple):
    """How lines are reduced: thread blocks, argument words of the kernel, thread blocks of the
    second pass that combines parts (0: lines are not cut), parts of all lines, number of results.
    """

    blocks: int
    words: tuple[int, ...]
    combine_blocks: int
    places: int
    results: int


@lru_cache(4096)
def reduce_plan(levels: Levels, processors: int) -> ReducePlan:
    """The plan for a reduction on a GPU with this many multiprocessors."""
    (r1, *_), (k1, *_), (r2, *_), (k2, *_) = levels
    columns, rows, cuts, length = divided(r1 * r2, k1 * k2, k2 > 1, processors)
    words = (
        *(level[part] for part in range(3) for level in levels),
        int(k2 > 1), columns, rows, cuts, length,
    )  # fmt: skip
    results = k1 * k2
    combine_blocks = -(-results // 256) if cuts > 1 else 0
    return ReducePlan(-(-results // columns) * cuts, words, combine_blocks, cuts * results, results)


@lru_cache(4096)
def divided(reduced: int, results: int, beside: bool, processors: int) -> tuple[int, int, int, int]:
    """Results per block of 256 threads, threads per result, parts into which each line is cut so
    that all multiprocessors have work, and elements per part.
    """
    whole = 1 << max(0, reduced - 1).bit_length()  # a power of two
    if beside:  # 32 neighbours, or 8, for coalesced reads
        columns = 32 if -(-results // 32) >= 2 * processors else 8
        rows = min(256 // columns, whole)
    else:
        rows = min(whole, 32 if reduced <= 512 else 256)
    columns = 256 // rows
    blocks = -(-results // columns)
    cuts = max(1, min(2 * processors // blocks, reduced // (8 * rows)))
    length = -(-reduced // cuts)
    return columns, rows, -(-reduced // length), length


def scatter(x: Tensor, marks: Tensor, target: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """``steps.scatter`` of flat contiguous tensors; the target is int64."""
    device, n = x.device, x.numel()
    dtype = torch.float64 if x.dtype is torch.float64 else torch.float32
    value = torch.zeros(size, dtype=dtype, device=device)
    first = torch.full((size,), n, dtype=torch.int64, device=device)
    words = (
        on_device(x), on_device(target), KINDS[x.dtype], n, size, on_device(value),
        on_device(first),
    )  # fmt: skip
    with cuda_launch.at(device):
        for name in ("send", "find") if n and size else ():
            cuda_launch.kernel(device, FILE, f"{name}_{WIDE[dtype]}")(_blocks(n), THREADS, words)
        return value, gather(marks, first)


def gather(marks: Tensor, source: Tensor) -> Tensor:
    """``marks[source]`` of contiguous tensors, ``marks`` flat; 0 for an index out of range."""
    out = torch.empty(source.shape, dtype=torch.int32, device=marks.device)
    n = source.numel()
    if n:
        with cuda_launch.at(marks.device):
            cuda_launch.kernel(marks.device, FILE, "gather")(
                _blocks(n), THREADS,
                (on_device(marks), on_device(source), n, marks.numel(), on_device(out)),
            )  # fmt: skip
    return out


def normalise(
    given: Sequence[Tensor], rank: int, layout: LineLayout, sized: bool = True
) -> tuple[Tensor | None, Tensor]:
    """``steps.normalise``: values if ``sized``, and indices or provenance ids. ``given`` are the
    diagonal, x, ``rank`` tensors left, ``rank`` tensors right, and optionally provenance ids.
    """
    lines, n, shape, steps = layout
    x = given[1]
    device, dtype, marked = x.device, x.dtype, len(given) > 2 * rank + 2
    value = torch.empty(shape, dtype=dtype, device=device) if sized else None
    found = torch.empty(shape, dtype=torch.int32 if marked else torch.int64, device=device)
    at = [(on_device(part), *step) for part, step in zip(given, steps)]
    # A warp per line if lines are short or there are enough of them, else a block per line.
    rows = 32 if n <= 512 or lines >= 16 * cuda_launch.processors(device) else 256
    words = (
        *at[0], *at[1], *at[2], *(at[3] if rank == 2 else NULL_OPERAND),
        *at[rank + 2], *(at[5] if rank == 2 else NULL_OPERAND),
        *(at[-1] if marked else NULL_OPERAND),
        lines, n, rows, 0 if value is None else on_device(value),
        *((0, on_device(found)) if marked else (on_device(found), 0)),
    )  # fmt: skip
    with cuda_launch.at(device):
        if rank == 1:
            grid = -(-lines // (256 // rows)), 1, 1
            cuda_launch.kernel(device, FILE, RANKED[dtype])(grid, THREADS, (*words, 0))
        else:
            _pairs(x, lines, n, words)
    return value, found


RANKED = {dtype: f"ranked_{name}" for dtype, name in WIDE.items()}
PRUNED = {dtype: f"pruned_{name}" for dtype, name in WIDE.items()}
PAIRED = {dtype: f"paired_{name}" for dtype, name in WIDE.items()}


def _pairs(x: Tensor, lines: int, n: int, words: tuple[int, ...]) -> None:
    """``normalise`` of rank two. In long lines, elements that cannot attain the maximum are pruned
    first; lines where pruning does not work are left to the pairwise kernel.
    """
    device, dtype, left = x.device, x.dtype, 0
    if n > PAIRWISE_MAX_ELEMENTS:
        over = torch.empty(lines, dtype=torch.int32, device=device)
        left = on_device(over)
        cuda_launch.kernel(device, FILE, PRUNED[dtype])((lines, 1, 1), THREADS, (*words, left))
    threads = min(TILE_MAX_THREADS, -(-n // (32 * ELEMENTS_PER_THREAD)) * 32)
    grid = lines * -(-n // (ELEMENTS_PER_THREAD * threads)), 1, 1
    cuda_launch.kernel(device, FILE, PAIRED[dtype])(grid, (threads, 1, 1), (*words, left))


def used(numbers: Tensor, count: int) -> Tensor | None:
    """Bitmap of the numbers below ``count`` that occur, lowest bit first, in int32 words. None if
    the kernel does not support the tensor.
    """
    if numbers.dtype is not torch.int32 or not cuda_launch.serves(FILE, numbers):
        return None
    how = _collapsed(numbers.shape, numbers.stride())
    if how is None:
        return None
    device, n, words = numbers.device, numbers.numel(), -(-count // 32)
    there = torch.zeros(words, dtype=torch.int32, device=device)
    if n and words:
        slots = min(words, SHARED_BYTES // 4)
        blocks = min(-(-n // BLOCK_MIN_ELEMENTS), 2 * cuda_launch.processors(device))
        with cuda_launch.at(device):
            cuda_launch.kernel(device, FILE, "used")(
                (blocks, 1, 1), TALLY_THREADS,
                (on_device(numbers), on_device(there), words, slots, n, *how), 4 * slots,
            )  # fmt: skip
    return there


def closed(there: Tensor, count: int) -> Tensor:
    """Table that renumbers the numbers in the bitmap ``there`` (from ``used``) to 1, 2, ... without
    gaps, in order; other numbers below ``count``, and 0, become 0.
    """
    table = torch.empty(count, dtype=torch.int32, device=there.device)
    if count:
        with cuda_launch.at(there.device):
            words = on_device(there), on_device(table), count
            cuda_launch.kernel(there.device, FILE, "close")((1, 1, 1), TALLY_THREADS, words)
    return table


def renumbered(numbers: Tensor, table: Tensor) -> Tensor | None:
    """``table[numbers]``, 0 for a number out of range; both int32, the table contiguous. None if
    the kernel does not support the tensors.
    """
    if numbers.dtype is not torch.int32 or not cuda_launch.serves(FILE, numbers, table):
        return None
    out = torch.empty_like(numbers)
    how = _collapsed(numbers.shape, out.stride(), numbers.stride())
    if how is None:
        return None
    n = numbers.numel()
    if n:
        with cuda_launch.at(numbers.device):
            cuda_launch.kernel(numbers.device, FILE, "renumber")(
                _blocks(n), THREADS,
                (on_device(out), on_device(numbers), on_device(table), len(table), n, *how),
            )  # fmt: skip
    return out
