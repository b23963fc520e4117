"""``Cuda``: the CUDA kernels, where they support the tensors; else plain torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite

import numpy as np
import torch
from torch import Tensor

from gradtrace.kernels import (
    cuda_contraction,
    cuda_graph,
    cuda_half_products,
    cuda_ids,
    cuda_launch,
    cuda_normalise,
    cuda_paths,
    cuda_reduce,
    cuda_sizes,
    cuda_tally,
    cuda_tiling,
    cuda_top_k,
    tuning,
)
from gradtrace.kernels.capture import Captured
from gradtrace.kernels.cuda_batched_tally import BatchedTally, batchable
from gradtrace.kernels.cuda_launch import KINDS, STEPS, WIDE
from gradtrace.kernels.operands import (
    Contraction,
    LargestEntry,
    LeafBatch,
    LineLayout,
    LowRankLines,
    Matrices,
    MatrixLayout,
    Selected,
    line_operands,
)
from gradtrace.kernels.path_table import BoundTable, PathEnds
from gradtrace.kernels.reference import Reference
from gradtrace.kernels.strides import leveled, reduction
from gradtrace.kernels.sync import AsyncCopy, fetch_scalars


def _is_one_piece(*tensors: Tensor) -> bool:
    """Whether these are contiguous and no larger than one piece."""
    return tensors[0].numel() <= tuning.PIECE_ELEMENTS and all(x.is_contiguous() for x in tensors)


class Cuda(Reference):
    """The backend of a GPU. Nothing synchronises but reading what was deferred."""

    synchronises = True
    sums_lines = True

    @property
    def follows_paths(self) -> bool:
        return cuda_launch.serves(cuda_paths.PATHS, torch.empty(0, device=self.device))

    table_entries = tuning.CUDA_TABLE_ENTRIES

    def fuses(self, value: Tensor, *others: Tensor) -> bool:
        return value.dtype in KINDS and cuda_launch.serves(STEPS, value, *others)

    # The largest contribution --------------------------------------------------------------------

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
        served = cuda_contraction.serves(a, b)
        run = cuda_contraction.contraction if served else super().contract
        return run(a, b, value=value, index=index, ids=ids, of_b=of_b)

    def contract_strided(
        self,
        a: Tensor,
        b: Tensor,
        ids: Tensor,
        layout: MatrixLayout,
        shape: tuple[int, ...],
        value: bool,
    ) -> Contraction:
        found = None
        if cuda_contraction.serves_strided(a, b, ids):
            found = cuda_contraction.strided(a, b, ids, layout, shape, value)
        return found or super().contract_strided(a, b, ids, layout, shape, value)

    @property
    def max_top_k(self) -> int:
        return cuda_top_k.MAX_PARTS

    def contract_top(self, parts: Sequence[Tensor], weight: Tensor) -> tuple[Tensor, ...] | None:
        served = cuda_top_k.serves(parts, weight)
        return cuda_top_k.contraction(parts, weight) if served else None

    def reduce(self, x: Tensor, ids: Tensor, dims: Sequence[int]) -> Selected:
        how = reduction(x.shape, x.stride(), ids.stride(), tuple(dims))
        if not (how.short and ids.dtype is torch.int32 and self.fuses(x, ids)):
            return super().reduce(x, ids, dims)
        x, ids, levels = leveled(x, ids, dims, how.levels)
        return Selected(*cuda_reduce.reduce(x, ids, levels, how.shape))

    def scatter(self, x: Tensor, ids: Tensor, target: Tensor, size: int) -> Selected:
        if ids.dtype is not torch.int32 or not self.fuses(x, ids, target):
            return super().scatter(x, ids, target, size)
        flat = (x.contiguous(), ids.contiguous(), target.long().contiguous())
        return Selected(*cuda_reduce.scatter(*flat, size))

    def normalise(
        self,
        lines: LowRankLines,
        ids: Tensor | None = None,
        value: bool = True,
        layout: LineLayout | None = None,
    ) -> LargestEntry | None:
        found = line_operands(lines, ids, layout) if lines.x.dtype in WIDE else None
        if found is None or not cuda_launch.serves(STEPS, *found[0]):
            return super().normalise(lines, ids, value, layout)
        given, layout = found
        most, at = cuda_normalise.normalise(given, len(lines.left), layout, value)
        return LargestEntry(most, at, None) if ids is None else LargestEntry(most, None, at)

    def normalised_sums(
        self, lines: LowRankLines, layout: LineLayout | None = None
    ) -> Tensor | None:
        found = line_operands(lines, None, layout) if lines.x.dtype in WIDE else None
        if found is None or not cuda_launch.serves(STEPS, *found[0]):
            return None
        given, layout = found
        if len(lines.left) == 2 and layout.n > tuning.PAIRED_SUMS_MAX_ELEMENTS:
            return None
        return cuda_normalise.sums(given, len(lines.left), layout)

    def follow_paths(self, table: BoundTable, starts: Tensor, words: int) -> PathEnds:
        return cuda_paths.follow(table, starts, words)

    def sizes(self, xs: Sequence[Tensor]) -> Tensor | None:
        return cuda_sizes.sizes(xs) if cuda_sizes.serves(xs) else None

    def widened_product(self, a: Tensor, b: Tensor) -> Tensor:
        served = cuda_half_products.serves(a, b)
        return cuda_half_products.product(a, b) if served else super().widened_product(a, b)

    # Provenance ids ------------------------------------------------------------------------------

    def merge(
        self, size: Tensor, ids: Tensor, value: Tensor, other: Tensor | int, shift: int = 0
    ) -> None:
        served = self.fuses(size, ids, value)
        if not served or not cuda_ids.merge(size, ids, value, other, shift):
            super().merge(size, ids, value, other, shift)

    def merge_pair(
        self,
        first: Tensor,
        ids: Tensor | int,
        unmasked: bool,
        second: Tensor,
        others: Tensor | int,
        shift: int,
    ) -> Tensor | None:
        found = cuda_ids.merge_pair(first, ids, unmasked, second, others, shift)
        return None if found is None else found[0]

    def merge_sized(
        self,
        first: Tensor,
        ids: Tensor | int,
        unmasked: bool,
        second: Tensor,
        others: Tensor | int,
        shift: int,
    ) -> tuple[Tensor, Tensor] | None:
        found = cuda_ids.merge_pair(first, ids, unmasked, second, others, shift, True)
        if found is None or found[1] is None:
            return None
        return found[1], found[0]

    def scaled_ids(self, x: Tensor, weight: Tensor | float, ids: Tensor | None) -> Tensor | None:
        return cuda_ids.scaled(x, weight, ids)

    def masked(self, ids: Tensor, value: Tensor) -> Tensor:
        found = cuda_ids.scaled(value, 1.0, ids)
        return super().masked(ids, value) if found is None else found

    def used(self, ids: Tensor, count: int) -> Tensor:
        bits = cuda_ids.used(ids, count)
        return super().used(ids, count) if bits is None else _flags(bits.cpu(), count)

    def close_gaps(self, ids: Tensor, count: int) -> tuple[Tensor, Callable[[], Tensor]] | None:
        bits = cuda_ids.used(ids, count)
        if bits is None:
            return None
        found, copy = self.renumber(ids, cuda_ids.closed(bits, count)), AsyncCopy(bits)
        return found, lambda: _flags(copy.read(), count)

    def gaps(self, ids: Tensor, count: int) -> tuple[Tensor, Tensor]:
        bits = cuda_ids.used(ids, count)
        bits = cuda_ids.used(ids.contiguous(), count) if bits is None else bits
        return super().gaps(ids, count) if bits is None else (bits, cuda_ids.closed(bits, count))

    def flags(self, there: Tensor, count: int) -> Tensor:
        return there if there.dtype is torch.bool else _flags(there, count)

    def captured(self, run: Callable[[], object]) -> Captured | None:
        return cuda_graph.capture(self.device, run)

    def renumber(self, ids: Tensor, table: Tensor) -> Tensor:
        table = table.to(ids.device, non_blocking=True)
        found = cuda_ids.renumbered(ids, table)
        return super().renumber(ids, table) if found is None else found

    # Counts and sums -----------------------------------------------------------------------------

    def tally(self, ids: Tensor, gradient: Tensor, count: int) -> tuple[Tensor, Tensor]:
        if _is_one_piece(gradient, ids) and ids.device == gradient.device:
            return self.tally_piece(ids, gradient, count)
        return super().tally(ids, gradient, count)

    def tally_piece(self, ids: Tensor, gradient: Tensor, count: int) -> tuple[Tensor, Tensor]:
        if count and ids.dtype is torch.int32 and self.fuses(gradient, ids):
            return cuda_tally.tally(ids, gradient, count)
        return super().tally_piece(ids.reshape(-1), gradient.reshape(-1), count)

    def measure(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        one = _is_one_piece(gradient)
        return self.measure_piece(gradient) if one else super().measure(gradient)

    def measure_piece(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        if self.fuses(gradient):
            return cuda_tally.measured(gradient)
        return super().measure_piece(gradient.reshape(-1))

    def tally_batch(self, gradient: Tensor) -> LeafBatch | None:
        return BatchedTally(gradient.device) if batchable(gradient) else None

    def add_rows(self, total: Tensor, index: Tensor, rows: Tensor) -> None:
        # index_add_ adds in whatever order threads come, index_put_ sorts first; on the CPU it is
        # the other way round
        total.index_put_((index,), rows, accumulate=True)

    def finite_sums(self, tensors: Sequence[Tensor]) -> bool:
        """By the largest magnitude of each tensor; one call per dtype."""
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for x in tensors:
            if x.numel():
                by_dtype.setdefault(x.dtype, []).append(x)
        norms = [x for some in by_dtype.values() for x in torch._foreach_norm(some, float("inf"))]
        return all(map(isfinite, fetch_scalars(norms)))

    # Memory --------------------------------------------------------------------------------------

    @property
    def label(self) -> str:
        return f"the GPU ({self.device}, {torch.cuda.get_device_name(self.device)})"

    def free_bytes(self) -> int | None:
        free, total = torch.cuda.mem_get_info(self.device)
        used, reserved = cuda_launch.allocated_and_reserved(self.device)
        cached = reserved - used  # held by PyTorch's caching allocator, but unused
        allowed = int(total * torch.cuda.get_per_process_memory_fraction(self.device))
        return max(0, min(free + cached, allowed - used))

    def held_bytes(self) -> int | None:
        return cuda_launch.allocated_and_reserved(self.device)[0]

    def spare_bytes(self) -> int | None:
        return self.free_bytes()

    def workspace_bytes(self, shape: tuple[int, int, int], k: int) -> int:
        return cuda_tiling.workspace(shape, k, cuda_launch.processors(self.device))

    def workspace_max_bytes(self) -> int:
        return tuning.WORKSPACE_MAX_BYTES


def _flags(bits: Tensor, count: int) -> Tensor:
    """The bits of int32 words on the CPU, lowest first, as ``count`` flags."""
    octets = bits.view(torch.uint8).numpy()
    return torch.from_numpy(np.unpackbits(octets, count=count, bitorder="little")).bool()
