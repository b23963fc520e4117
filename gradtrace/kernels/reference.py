"""``Reference``: every operation of a backend in plain torch, on any device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite

import torch
from torch import Tensor

from gradtrace.kernels import exact_sums, plain_contraction, plain_selection, tuning
from gradtrace.kernels.capture import Captured
from gradtrace.kernels.exact_sums import summed
from gradtrace.kernels.operands import (
    ColumnLayout,
    Contraction,
    GroupRequest,
    GroupSums,
    LargestEntry,
    LeafBatch,
    LineLayout,
    LowRankLines,
    MatrixLayout,
)
from gradtrace.kernels.path_table import BoundTable, PathEnds
from gradtrace.kernels.plain_contraction import as_matrices, widened
from gradtrace.kernels.precision import exact
from gradtrace.kernels.strides import flattened
from gradtrace.kernels.sync import DeferredChecks
from gradtrace.pytorch import memory_limits


class Reference:
    """Defines the operations that ``Backend`` describes; ``Cpu`` and ``Cuda`` override some.

    A leaf is tallied and measured in pieces of at most ``PIECE_ELEMENTS``: kernels override
    ``tally_piece`` and ``measure_piece``, whose arguments are flat.
    """

    synchronises = False
    sums_groups = False
    sums_lines = False
    executes_plans = False
    table_entries = tuning.TABLE_ENTRIES

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.host = device.type == "cpu"

    contract = staticmethod(plain_contraction.contraction)
    contract_lines = staticmethod(plain_contraction.lines)
    normalise_at = staticmethod(plain_contraction.others)
    reduce = staticmethod(plain_selection.reduce)
    scatter = staticmethod(plain_selection.scatter)
    sparse = staticmethod(plain_selection.sparse)
    sparse_sum = staticmethod(plain_selection.sparse_sum)
    merge = staticmethod(plain_selection.merge)

    def contract_strided(
        self,
        a: Tensor,
        b: Tensor,
        ids: Tensor,
        layout: MatrixLayout,
        shape: tuple[int, ...],
        value: bool,
    ) -> Contraction:
        left, right, words = as_matrices(a, b, ids, layout)
        largest, _, chosen = self.contract(left, right, value=value, ids=words, of_b=layout.of_b)
        assert chosen is not None
        largest = None if largest is None else largest.reshape(shape)
        return Contraction(largest, None, chosen.reshape(shape))

    @property
    def max_top_k(self) -> int:
        return 0

    def contract_top(self, parts: Sequence[Tensor], weight: Tensor) -> tuple[Tensor, ...] | None:
        return None

    def normalise(
        self,
        lines: LowRankLines,
        ids: Tensor | None = None,
        value: bool = True,
        layout: LineLayout | None = None,
    ) -> LargestEntry | None:
        return None

    def normalised_sums(
        self, lines: LowRankLines, layout: LineLayout | None = None
    ) -> Tensor | None:
        return None

    def low_rank(self, lines: LowRankLines, layout: ColumnLayout) -> Tensor | None:
        """None: there is no kernel."""
        return None

    def low_rank_sums(
        self, left: Sequence[Tensor], sums: Sequence[Tensor], layout: ColumnLayout
    ) -> Tensor | None:
        """None: there is no kernel."""
        return None

    def widened_product(self, a: Tensor, b: Tensor) -> Tensor:
        with exact(a):
            return torch.bmm(a, b.to(a.dtype))

    # Provenance ids ------------------------------------------------------------------------------

    def fuses(self, value: Tensor, *others: Tensor) -> bool:
        return False

    def merge_pair(
        self,
        first: Tensor,
        ids: Tensor | int,
        unmasked: bool,
        second: Tensor,
        others: Tensor | int,
        shift: int,
    ) -> Tensor | None:
        return None

    def merge_sized(
        self,
        first: Tensor,
        ids: Tensor | int,
        unmasked: bool,
        second: Tensor,
        others: Tensor | int,
        shift: int,
    ) -> tuple[Tensor, Tensor] | None:
        return None

    def scaled_ids(self, x: Tensor, weight: Tensor | float, ids: Tensor | None) -> Tensor | None:
        return None

    def masked(self, ids: Tensor, value: Tensor) -> Tensor:
        if not self.synchronises and bool(value.all()):  # reading is cheaper than copying
            return ids
        return ids * (value != 0)

    def used(self, ids: Tensor, count: int) -> Tensor:
        if not self.synchronises:
            return torch.bincount(ids.reshape(-1), minlength=count).cpu() != 0
        flags = torch.zeros(count, dtype=torch.bool, device=ids.device)  # bincount would sync
        return flags.index_fill_(0, ids.reshape(-1).long(), True).cpu()

    def close_gaps(self, ids: Tensor, count: int) -> tuple[Tensor, Callable[[], Tensor]] | None:
        return None

    def gaps(self, ids: Tensor, count: int) -> tuple[Tensor, Tensor]:
        flags = torch.zeros(count, dtype=torch.bool, device=ids.device)
        flags.index_fill_(0, ids.reshape(-1).long(), True)[:1] = False
        return flags, torch.where(flags, flags.cumsum(0), 0).int()

    def flags(self, there: Tensor, count: int) -> Tensor:
        return there

    def captured(self, run: Callable[[], object]) -> Captured | None:
        return None

    def renumber(self, ids: Tensor, table: Tensor) -> Tensor:
        return table.to(ids.device, non_blocking=True)[ids]

    # Counts and sums -----------------------------------------------------------------------------

    def tally(self, ids: Tensor, gradient: Tensor, count: int) -> tuple[Tensor, Tensor]:
        if gradient.device != ids.device:  # a CPU scalar among GPU tensors
            gradient = gradient.to(ids.device)
        ids, gradient = flattened(ids, gradient)
        if gradient.numel() <= tuning.PIECE_ELEMENTS:
            return self.tally_piece(ids, gradient, count)
        pieces = zip(*(torch.split(x, tuning.PIECE_ELEMENTS) for x in (ids, gradient)))
        return summed(self.tally_piece(some, part, count) for some, part in pieces)

    def tally_piece(self, ids: Tensor, gradient: Tensor, count: int) -> tuple[Tensor, Tensor]:
        return exact_sums.tally(ids, widened(gradient), count)

    def measure(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        (flat,) = flattened(gradient)
        if flat.numel() <= tuning.PIECE_ELEMENTS:
            return self.measure_piece(flat)
        return summed(map(self.measure_piece, torch.split(flat, tuning.PIECE_ELEMENTS)))

    def measure_piece(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return exact_sums.measure(widened(gradient))

    def measure_many(self, gradients: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        found = [self.measure(gradient) for gradient in gradients]
        counts = torch.tensor([int(count) for count, _ in found], dtype=torch.int64, device="cpu")
        sums = torch.tensor([float(sum_) for _, sum_ in found], dtype=torch.float64, device="cpu")
        return counts, sums

    def measure_rows(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        rows = len(gradient)
        if gradient.numel() > tuning.PIECE_ELEMENTS:
            counts, sums = zip(*map(self.measure, gradient))
            return torch.stack(counts), torch.stack(sums)
        number = torch.arange(1, rows + 1, dtype=torch.int32, device=gradient.device)
        number = number.reshape(-1, *[1] * (gradient.dim() - 1))
        found = self.tally(torch.where(gradient != 0, number, 0), gradient, rows + 1)
        return found[0][1:], found[1][1:]

    def sizes(self, xs: Sequence[Tensor]) -> Tensor | None:
        return None

    def zeros(self, x: Tensor) -> Tensor:
        return (x == 0).reshape(-1).nonzero().reshape(-1)

    def has_zeros(self, x: Tensor) -> bool:
        return not bool(x.all())

    def tally_batch(self, gradient: Tensor) -> LeafBatch | None:
        return None

    def add_rows(self, total: Tensor, index: Tensor, rows: Tensor) -> None:
        total.index_add_(0, index, rows)

    def group_sums(self, request: GroupRequest, counts: Tensor, sums: Tensor) -> GroupSums:
        raise NotImplementedError("tracing.aggregate.Groups has it in plain torch")

    @property
    def follows_paths(self) -> bool:
        return False

    def follow_paths(self, table: BoundTable, starts: Tensor, words: int) -> PathEnds:
        raise NotImplementedError("paths.path_search has it in plain torch")

    def finite_sums(self, tensors: Sequence[Tensor]) -> bool:
        by_shape: dict[tuple[torch.dtype, torch.Size], list[Tensor]] = {}
        sums: list[Tensor] = []
        for x in tensors:
            if x.numel() < tuning.CONCAT_MAX_ELEMENTS:
                by_shape.setdefault((x.dtype, x.shape), []).append(x)
            else:
                sums.append(x.sum())
        for some in by_shape.values():
            sums.append((torch.cat(some) if some[0].dim() else torch.stack(some)).sum())
        return all(isfinite(x.item()) for x in sums)

    # Checks --------------------------------------------------------------------------------------

    def checks(self) -> DeferredChecks | None:
        return DeferredChecks() if self.synchronises else None

    def check(self, checks: DeferredChecks | None, holds: Callable[[], Tensor]) -> bool:
        if checks is None or not self.synchronises:
            return bool(holds().all())
        checks.add(holds())
        return True

    # Memory --------------------------------------------------------------------------------------

    @property
    def label(self) -> str:
        return str(self.device)

    def free_bytes(self) -> int | None:
        return memory_limits.recently_available() if self.host else None

    def held_bytes(self) -> int | None:
        return memory_limits.resident() if self.host else None

    def spare_bytes(self) -> int | None:
        return None

    def workspace_bytes(self, shape: tuple[int, int, int], k: int) -> int:
        return 0

    def workspace_max_bytes(self) -> int:
        return 0
