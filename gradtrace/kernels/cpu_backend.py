"""``Cpu``: the compiled library, where it supports the tensors; else plain torch."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from gradtrace.kernels import cpu_contraction, cpu_library, cpu_low_rank, pointers, tuning
from gradtrace.kernels.cpu_contraction import Algorithm
from gradtrace.kernels.cpu_library import checked, threads_for
from gradtrace.kernels.operands import (
    ColumnLayout,
    Compressed,
    Contraction,
    GroupRequest,
    GroupSums,
    LargestEntry,
    LeafBatch,
    LineLayout,
    LowRankLines,
    Matrices,
    MatrixLayout,
    Selected,
    TensorLines,
    line_operands,
    product_dtype,
    sizes,
)
from gradtrace.kernels.plain_contraction import line_results, widened
from gradtrace.kernels.reference import Reference
from gradtrace.kernels.strides import extent, leveled, reduction

SUFFIX = {torch.float32: "float", torch.float64: "double"}
"""Names of the dtypes that the kernels compute in."""

_GROUPS = struct.Struct("22q")


def _serves(value: Tensor, *others: Tensor) -> bool:
    """Whether the kernels support these tensors: all on the CPU, values float32 or float64."""
    if not value.is_cpu or value.dtype not in SUFFIX:
        return False
    return False not in [x.is_cpu for x in others]  # half the time of all()


def _is_wide(x: Tensor) -> bool:
    return x.dtype is torch.float64


class Cpu(Reference):
    """The backend of a CPU for which the library is loaded."""

    sums_groups = True

    def __init__(self, device: torch.device, library: ctypes.CDLL) -> None:
        super().__init__(device)
        self.library = library
        self.executes_plans = hasattr(library, "gradtrace_run_plan")

    def contract(
        self,
        a: Matrices,
        b: Matrices,
        *,
        value: bool = True,
        index: bool = False,
        ids: Matrices | None = None,
        of_b: bool = False,
    ) -> Contraction:
        if not cpu_contraction.serves(a, b):
            return super().contract(a, b, value=value, index=index, ids=ids, of_b=of_b)
        values_only = ids is None and not index and isinstance(a, Tensor) and isinstance(b, Tensor)
        if values_only and sizes(a)[2] == 1:  # a single k: no maximum to take
            assert isinstance(a, Tensor) and isinstance(b, Tensor)
            dtype = product_dtype(a, b)
            return Contraction(a.to(dtype).abs() * b.to(dtype).abs(), None, None)
        how = Algorithm.BY_MEASURE
        return cpu_contraction.compiled(a, b, value, index, ids, how, of_b)[0]

    def contract_strided(
        self,
        a: Tensor,
        b: Tensor,
        ids: Tensor,
        layout: MatrixLayout,
        shape: tuple[int, ...],
        value: bool,
    ) -> Contraction:
        if cpu_contraction.serves_strided(a, b, ids, layout):
            return cpu_contraction.strided(a, b, ids, layout, shape, value)
        return super().contract_strided(a, b, ids, layout, shape, value)

    def contract_lines(self, a: TensorLines, b: TensorLines, length: int) -> tuple[Tensor, Tensor]:
        if not (_serves(a.data, b.data) and a.data.dtype is b.data.dtype and length):
            return super().contract_lines(a, b, length)
        value, place = line_results(a.offset, a.data.dtype)
        first, second = a.offset.contiguous(), b.offset.contiguous()
        n, at = len(first), pointers.flat
        given: list[int] = []
        for lines, offset in ((a, first), (b, second)):
            size = lines.data.numel()
            given += at(lines.data, value.dtype, size), at(offset, torch.int64, n), lines.step, size
        found = at(value, value.dtype, n), at(place, torch.int64, n)
        call = getattr(self.library, f"gradtrace_products_{SUFFIX[value.dtype]}")
        checked(call(*given, n, length, *found, torch.get_num_threads()))
        return value, place

    def normalise_at(
        self, left: Tensor, right: Tensor, x: Tensor, line: Tensor, skip: Tensor
    ) -> tuple[Tensor, Tensor]:
        alike = left.dtype is right.dtype is x.dtype
        if not (len(left) == 2 and alike and _serves(left, right, x)):
            return super().normalise_at(left, right, x, line, skip)
        left, right, x = left.contiguous(), right.contiguous(), x.contiguous()
        line, skip = line.contiguous(), skip.contiguous()
        value, place = line_results(line, x.dtype)
        (lines, width), n, kind, at = x.shape, len(line), x.dtype, pointers.flat
        given = (
            at(left, kind, 2 * n), at(right, kind, 2 * lines * width), at(x, kind, lines * width),
            at(line, torch.int64, n), at(skip, torch.int64, n),
        )  # fmt: skip
        found = at(value, kind, n), at(place, torch.int64, n)
        call = getattr(self.library, f"gradtrace_others_{SUFFIX[kind]}")
        checked(call(*given, n, lines, width, *found, torch.get_num_threads()))
        return value, place

    def reduce(self, x: Tensor, ids: Tensor, dims: Sequence[int]) -> Selected:
        how = reduction(x.shape, x.stride(), ids.stride(), tuple(dims))
        x = widened(x)
        if not (how.short and _serves(x, ids)):
            return super().reduce(x, ids, dims)
        x, ids, levels = leveled(x, ids, dims, how.levels)
        value = torch.empty(how.shape, dtype=x.dtype, device="cpu")
        out = torch.empty(how.shape, dtype=torch.int32, device="cpu")
        numbers = (ctypes.c_int64 * 12)(*[part[n] for n in range(3) for part in levels])
        given = (
            pointers.address(x, x.dtype, extent(levels, 1)),
            pointers.address(ids, torch.int32, extent(levels, 2)),
        )
        found = (value.data_ptr(), out.data_ptr())  # just made
        threads = threads_for(x.numel())
        checked(self.library.gradtrace_reduce(_is_wide(x), *given, numbers, *found, threads))
        return Selected(value, out)

    def scatter(self, x: Tensor, ids: Tensor, target: Tensor, size: int) -> Selected:
        x = widened(x)
        if not _serves(x, ids, target):
            return super().scatter(x, ids, target, size)
        x, ids, target = x.contiguous(), ids.contiguous(), target.long().contiguous()
        value, out = x.new_zeros(size), ids.new_zeros(size)
        n, at = x.numel(), pointers.flat
        where = (at(x, x.dtype, n), at(ids, torch.int32, n), at(target, torch.int64, n), size)
        found = (at(value, x.dtype, size), at(out, torch.int32, size))
        checked(self.library.gradtrace_scatter(_is_wide(x), n, *where, *found))
        return Selected(value, out)

    def sparse(self, matrices: Compressed, x: Tensor, ids: Tensor) -> Selected:
        if not _serves_sparse(matrices, x, ids):
            return super().sparse(matrices, x, ids)
        size = _sparse_results(matrices)
        value, out = x.new_zeros(size), ids.new_zeros(size)
        self._sparse(matrices, x, ids, value, out)
        return Selected(value, out)

    def sparse_sum(self, matrices: Compressed, x: Tensor) -> Tensor:
        if not _serves_sparse(matrices, x):
            return super().sparse_sum(matrices, x)
        value = x.new_zeros(_sparse_results(matrices))
        self._sparse(matrices, x, None, value, None)
        return value

    def _sparse(
        self, matrices: Compressed, x: Tensor, ids: Tensor | None, value: Tensor, out: Tensor | None
    ) -> None:
        """``sparse`` into ``value`` and ``out``; ``sparse_sum`` into ``value`` without ids."""
        starts, source, weight, x = (part.contiguous() for part in (*matrices[:3], x))
        blocks, planes, inner, columns, rows = matrices.sizes
        n, at, size = len(source), pointers.flat, blocks * planes * inner
        where = (
            at(starts, torch.int64, blocks * rows + 1),
            at(source, torch.int64, n),
            at(weight, x.dtype, n),
            at(x, x.dtype, size * columns),
        )
        ids = None if ids is None else ids.contiguous()
        beside = 0 if ids is None else at(ids, torch.int32, size * columns)
        found = 0 if out is None else at(out, torch.int32, size * rows)
        results = (beside, at(value, x.dtype, size * rows), found)
        numbers = (ctypes.c_int64 * 6)(*matrices.sizes, n)
        threads = threads_for(n * planes * inner)
        checked(self.library.gradtrace_sparse(_is_wide(x), numbers, *where, *results, threads))

    def normalise(
        self,
        lines: LowRankLines,
        ids: Tensor | None = None,
        value: bool = True,
        layout: LineLayout | None = None,
    ) -> LargestEntry | None:
        found, x, rank = line_operands(lines, ids, layout), lines.x, len(lines.left)
        if found is None or not _serves(x, *found[0]):
            return super().normalise(lines, ids, value, layout)
        given, (count, n, shape, steps) = found
        most = x.new_empty(shape)
        place = torch.empty(shape, dtype=torch.int64, device=x.device) if ids is None else None
        out = None if ids is None else ids.new_empty(shape)
        numbers: list[int] = []
        for part, (line, step) in zip(given, steps):
            reach = 1 + (count - 1) * line + (n - 1) * step
            kind = torch.int32 if part is ids else x.dtype
            numbers += (pointers.address(part, kind, reach), line, step)
        where = (ctypes.c_int64 * (6 * rank + 9))(*numbers)
        wanted = ((most, x.dtype), (place, torch.int64), (out, torch.int32))
        results = (0 if t is None else pointers.flat(t, dtype, count * n) for t, dtype in wanted)
        sizes, threads = (count, n, rank), threads_for(count * n * 16)
        checked(self.library.gradtrace_normalise(_is_wide(x), *sizes, where, *results, threads))
        return LargestEntry(most, place, out)

    def low_rank(self, lines: LowRankLines, layout: ColumnLayout) -> Tensor | None:
        return cpu_low_rank.product(self.library, lines, layout)

    def low_rank_sums(
        self, left: Sequence[Tensor], sums: Sequence[Tensor], layout: ColumnLayout
    ) -> Tensor | None:
        return cpu_low_rank.of_sums(self.library, left, sums, layout)

    def merge(
        self, size: Tensor, ids: Tensor, value: Tensor, other: Tensor | int, shift: int = 0
    ) -> None:
        value = value.to(size.dtype)
        if not (_serves(size, ids, value) and size.is_contiguous() and ids.is_contiguous()):
            return super().merge(size, ids, value, other, shift)
        if isinstance(other, int) and not other:
            return None
        value = value.expand(size.shape).contiguous()
        beside, constant = (None, other) if isinstance(other, int) else (other.contiguous(), 0)
        n, at = size.numel(), pointers.flat
        there = 0 if beside is None else at(beside, torch.int32, n)
        where = (at(size, size.dtype, n), at(ids, torch.int32, n), at(value, size.dtype, n), there)
        threads = threads_for(n)
        checked(self.library.gradtrace_merge(_is_wide(size), n, *where, constant, shift, threads))
        return None

    def tally_piece(self, ids: Tensor, gradient: Tensor, count: int) -> tuple[Tensor, Tensor]:
        gradient = widened(gradient)
        if not _serves(gradient, ids):
            return super().tally_piece(ids, gradient, count)
        counts = torch.empty(count, dtype=torch.int64, device=gradient.device)
        sums = torch.empty(count, dtype=torch.float64, device=gradient.device)
        n, at = gradient.numel(), pointers.flat
        where = (at(ids, torch.int32, n), at(gradient, gradient.dtype, n), count)
        found = (counts.data_ptr(), sums.data_ptr())  # just made
        wide, threads = _is_wide(gradient), threads_for(n)
        checked(self.library.gradtrace_tally(wide, n, *where, *found, threads))
        return counts, sums

    def measure_piece(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        gradient = widened(gradient)
        if not _serves(gradient):
            return super().measure_piece(gradient)
        n = gradient.numel()
        count = torch.empty((), dtype=torch.int64, device=gradient.device)
        total = torch.empty((), dtype=torch.float64, device=gradient.device)
        place = pointers.flat(gradient, gradient.dtype, n)
        found = (count.data_ptr(), total.data_ptr())  # just made
        wide, threads = _is_wide(gradient), threads_for(n)
        checked(self.library.gradtrace_magnitude(wide, n, place, *found, threads))
        return count, total

    def measure_many(self, gradients: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        batch = CpuBatchedTally(torch.device("cpu"), self.library)
        places = [batch.measure(gradient) for gradient in gradients]
        counts, sums = batch.counted()
        if None not in places:
            return counts, sums
        both = zip(gradients, places)  # large ones, or in another layout, are measured one by one
        found = [self.measure(x) if at is None else (counts[at], sums[at]) for x, at in both]
        each, totals = zip(*found)
        return torch.stack(each), torch.stack(totals)

    def measure_rows(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return cpu_library.rows(self.library, gradient) or super().measure_rows(gradient)

    def sizes(self, xs: Sequence[Tensor]) -> Tensor | None:
        return cpu_library.sizes(self.library, xs)

    def zeros(self, x: Tensor) -> Tensor:
        found = cpu_library.zeros(self.library, x)
        return super().zeros(x) if found is None else found

    def has_zeros(self, x: Tensor) -> bool:
        found = cpu_library.has_zeros(self.library, x)
        return super().has_zeros(x) if found is None else found

    def tally_batch(self, gradient: Tensor) -> LeafBatch | None:
        return CpuBatchedTally(gradient.device, self.library)

    def group_sums(self, request: GroupRequest, counts: Tensor, sums: Tensor) -> GroupSums:
        leaves, tables, extra, able, owned, by_bit, totals, pairs, components = request
        sets = [(table.ctypes.data, table.shape[1], table.shape[0]) for table in tables]
        facts = np.empty((len(leaves), 8), np.int64)
        facts[:, :3], facts[:, 6:] = leaves[:, :3], leaves[:, 4:]
        facts[:, 3:6] = np.array(sets, np.int64).reshape(-1, 3)[leaves[:, 3]]
        totals = np.ascontiguousarray(totals, np.float64)
        entries, width = len(counts), extra.shape[1]
        found = np.zeros((2, components, pairs, 2))
        unreached, nonfinite = np.zeros(components), np.zeros(1, np.int64)
        arrays: tuple[Any, ...] = (
            extra, able, *owned, *by_bit, totals, found[0], found[1], unreached, nonfinite,
        )  # fmt: skip
        words = (
            *(len(leaves), entries, pairs, components, len(able), width, able.shape[1]),
            *(len(owned[1]), facts.ctypes.data),
            pointers.flat(counts, torch.int64, entries),
            pointers.flat(sums, torch.float64, entries),
            *(array.ctypes.data for array in arrays),
        )
        checked(self.library.gradtrace_groups(_GROUPS.pack(*words)))
        eligible, through = found.transpose(0, 2, 1, 3)
        return GroupSums(eligible, through, unreached, not nonfinite.any())


def _serves_sparse(matrices: Compressed, x: Tensor, *ids: Tensor) -> bool:
    alike = matrices.weight.dtype is x.dtype and not is_functorch_wrapped_tensor(x)
    return alike and _serves(x, *matrices[:3], *ids)


def _sparse_results(matrices: Compressed) -> int:
    blocks, planes, inner, _, rows = matrices.sizes
    return blocks * planes * inner * rows


class CpuBatchedTally:
    """Leaves without provenance ids, collected to be measured in one call; see ``LeafBatch``.

    Only small ones: of these the call takes as long as the work. A large leaf is measured by
    itself, on all threads, and need not be held until then.
    """

    def __init__(self, device: torch.device, library: ctypes.CDLL) -> None:
        self.device = device
        self.library = library
        self._held: list[Tensor] = []
        self._items: list[int] = []  # address, size and whether it is float64, of each

    def full(self, room: int) -> bool:
        """Whether the leaves must be measured now."""
        return len(self._held) * tuning.CPU_BATCH_MAX_ELEMENTS * 8 > room

    def tally(self, ids: Tensor, gradient: Tensor, count: int) -> int | None:
        """None: a leaf with ids is tallied by itself."""
        return None

    def reduce(
        self, x: Tensor, ids: Tensor, dims: tuple[int, ...], gradient: Tensor, count: int
    ) -> int | None:
        """None: a leaf with ids is tallied by itself."""
        return None

    def measure(self, gradient: Tensor) -> int | None:
        """Add a leaf for ``Backend.measure``; None for a large one."""
        size, dtype = gradient.numel(), gradient.dtype
        if size > tuning.CPU_BATCH_MAX_ELEMENTS or not gradient.is_contiguous():
            return None
        if dtype is not torch.float32 and dtype is not torch.float64:
            return None
        self._items += (pointers.quick_address(gradient, dtype, size), size, dtype is torch.float64)
        self._held.append(gradient)
        return len(self._held) - 1

    def counted(self) -> tuple[Tensor, Tensor]:
        """Measure all added leaves, and release them: counts and sums."""
        found = cpu_library.magnitudes(self.library, np.array(self._items, np.int64).reshape(-1, 3))
        self._held, self._items = [], []
        return found
