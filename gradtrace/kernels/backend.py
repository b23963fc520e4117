"""What the rest of the library may ask of a device: the protocol ``Backend``.

``Reference`` defines every operation in plain torch; ``Cpu`` and ``Cuda`` override those for which
they have kernels, and return the same bits. ``gradtrace.kernels.backend_of`` chooses one for each
device, once. Where an operation takes several tensors, the backend is that of the first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from gradtrace.kernels.capture import Captured
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
)
from gradtrace.kernels.path_table import BoundTable, PathEnds
from gradtrace.kernels.sync import DeferredChecks


class Backend(Protocol):
    """Operations on the tensors of one device.

    ``synchronises``: whether reading an element waits for queued work, so that it is avoided.
    ``host``: whether tensors are in the memory of the processor that runs Python.
    ``table_entries``: how many entries of a table to compute at a time.
    ``sums_groups``: whether there is a kernel for ``group_sums``; ``sums_lines``: whether there is
    one for ``normalised_sums``. ``executes_plans``: whether plans can be executed in one call
    (``cpu_plan``).
    """

    device: torch.device
    synchronises: bool
    host: bool
    table_entries: int
    sums_groups: bool
    sums_lines: bool
    executes_plans: bool

    def __hash__(self) -> int: ...

    # The largest contribution, with its index or provenance id -----------------------------------

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
        """``value[i, m, n] = maxₖ |a[i, m, k] · b[i, k, n]|``, 0 if k is empty.

        ``index`` is the lowest k that attains the maximum, undefined where the value is 0. The
        provenance ids of the result are ``ids[i, m, index]``, or ``ids[i, index, n]`` if the ids
        belong to b (``of_b``); 0 where the value is 0. NaN counts as the largest value. The rows of
        an ``Operand`` given as ``b`` are its n.
        """

    def contract_strided(
        self,
        a: Tensor,
        b: Tensor,
        ids: Tensor,
        layout: MatrixLayout,
        shape: tuple[int, ...],
        value: bool,
    ) -> Contraction:
        """``contract`` with provenance ids, of tensors read by the strides in ``layout``. Results
        have the given shape, with as many elements as (i, m, n).
        """

    def contract_lines(self, a: TensorLines, b: TensorLines, length: int) -> tuple[Tensor, Tensor]:
        """``maxₖ |a[n, k]·b[n, k]|`` along every line and the lowest k that attains it; the k is
        undefined where the value is 0.
        """

    def contract_top(self, parts: Sequence[Tensor], weight: Tensor) -> tuple[Tensor, ...] | None:
        """The ``len(parts)`` largest of ``parts[p][i, m, k] · weight[i, k, n]`` over k and p, in
        descending order, each (i, m, n). Values are nonnegative, and ``parts[p]`` descends in p.
        None if there is no kernel for it; there is none for more than ``max_top_k`` parts.
        """

    @property
    def max_top_k(self) -> int:
        """The most parts that ``contract_top`` takes."""

    def reduce(self, x: Tensor, ids: Tensor, dims: Sequence[int]) -> Selected:
        """The largest |x| over ``dims``, which are removed, and the provenance id of its first
        occurrence.
        """

    def scatter(self, x: Tensor, ids: Tensor, target: Tensor, size: int) -> Selected:
        """``max |x[j]|`` over all j with ``target[j] = i`` (-1: dropped) for each i below ``size``,
        and the provenance id of its first occurrence. All tensors are flat.
        """

    def sparse(self, matrices: Compressed, x: Tensor, ids: Tensor) -> Selected:
        """The largest ``|weight[e]·x[source[e]]|`` over the entries e of each row, and the
        provenance id of its first occurrence. Returned flat.
        """

    def sparse_sum(self, matrices: Compressed, x: Tensor) -> Tensor:
        """``Σₑ weight[e]·x[source[e]]`` over the entries e of each row, in order. Returned flat."""

    def normalise(
        self,
        lines: LowRankLines,
        ids: Tensor | None = None,
        value: bool = True,
        layout: LineLayout | None = None,
    ) -> LargestEntry | None:
        """``maxⱼ |J[i, j]·x[j]|`` for each element i of every line, with its index j or, given
        provenance ids, the id at j. With a layout, tensors may have other shapes than (lines, n).
        None if there is no kernel for it; ``linops.diag_low_rank`` has it in plain torch.
        """

    def normalised_sums(
        self, lines: LowRankLines, layout: LineLayout | None = None
    ) -> Tensor | None:
        """``Σⱼ |J[i, j]|·x[j]`` for each element i of every line, for x ≥ 0, with a layout as in
        ``normalise``; up to rounding. None if there is no kernel for it; ``linops.diag_low_rank``
        has it in plain torch.
        """

    def low_rank(self, lines: LowRankLines, layout: ColumnLayout) -> Tensor | None:
        """``d[i]·x[i] + Σᵣ left[r][i] · Σⱼ right[r][j]·x[j]`` over the rows i, j of each line,
        column by column: (lines, n, columns). ``layout`` is of diagonal, x, left and right. None if
        there is no kernel for it; ``linops.diag_low_rank`` has it in plain torch, with the same
        bits where torch adds up columns in blocks of 16.
        """

    def low_rank_sums(
        self, left: Sequence[Tensor], sums: Sequence[Tensor], layout: ColumnLayout
    ) -> Tensor | None:
        """``Σᵣ left[r][i]·sums[r]`` for the rows i of each line, column by column: (lines, n,
        columns). ``layout`` is of left and sums. None if there is no kernel for it;
        ``linops.columns`` has it in plain torch, with the same bits.
        """

    def widened_product(self, a: Tensor, b: Tensor) -> Tensor:
        """``Σₖ a[i, m, k]·b[i, k, n]`` for a in float32 and b in half precision. For operands
        that are at least 0 the relative error is at most (k + 2)·2⁻²⁴.
        """

    def normalise_at(
        self, left: Tensor, right: Tensor, x: Tensor, line: Tensor, skip: Tensor
    ) -> tuple[Tensor, Tensor]:
        """For ``w[n, k] = Σᵣ left[r, n]·right[r, line[n], k]``: the largest
        ``|w[n, k]·x[line[n], k]|`` over ``k ≠ skip[n]`` and the lowest k that attains it. Lines
        have at least two elements.
        """

    @property
    def follows_paths(self) -> bool:
        """Whether there is a kernel for ``follow_paths``."""

    def follow_paths(self, table: BoundTable, starts: Tensor, words: int) -> PathEnds:
        """Follow paths from ``starts``, (paths, 2): the place of a node in the table and the number
        of an element of it. Each path moves on to the element that contributes most, up to the
        root. ``words``: how many words a set of components has.
        """

    # Provenance ids ------------------------------------------------------------------------------

    def merge(
        self, size: Tensor, ids: Tensor, value: Tensor, other: Tensor | int, shift: int = 0
    ) -> None:
        """Elementwise maximum with another term, in place: where ``|value| > size``, set
        ``size = |value|`` and ``ids = other + shift``.

        NaN counts as the largest value, and the first NaN stays. ``other`` is one provenance id or
        one per element; where it is 0, and where the value is 0, nothing changes.
        """

    def fuses(self, value: Tensor, *others: Tensor) -> bool:
        """Whether ``merge_pair`` and ``tally_batch`` have kernels for these tensors."""

    def merge_pair(
        self,
        first: Tensor,
        ids: Tensor | int,
        unmasked: bool,
        second: Tensor,
        others: Tensor | int,
        shift: int,
    ) -> Tensor | None:
        """``others + shift`` where ``others`` is not 0 and |second| > |first|, else ``ids``.

        ``ids`` and ``others`` are provenance ids, one per element or one for all. If ``unmasked``,
        an id in ``ids`` counts only where its element is not 0. NaN counts as the largest value,
        and of equals the first stays. None if there is no kernel for it; then ``merge`` computes
        the same in several passes.
        """

    def merge_sized(
        self,
        first: Tensor,
        ids: Tensor | int,
        unmasked: bool,
        second: Tensor,
        others: Tensor | int,
        shift: int,
    ) -> tuple[Tensor, Tensor] | None:
        """What ``merge`` makes of the first term, if the second is merged into it: the size of the
        larger, contiguous, and the ids that ``merge_pair`` returns. None if there is no kernel.
        """

    def scaled_ids(self, x: Tensor, weight: Tensor | float, ids: Tensor | None) -> Tensor | None:
        """The ids (None: all 1) of ``weight·x``: 0 where that product is 0 in float32. None if
        there is no kernel for these; there is none for float64.
        """

    def masked(self, ids: Tensor, value: Tensor) -> Tensor:
        """The ids, 0 where the value is 0."""

    def used(self, ids: Tensor, count: int) -> Tensor:
        """Which ids below ``count`` occur: flags, on the CPU."""

    def close_gaps(self, ids: Tensor, count: int) -> tuple[Tensor, Callable[[], Tensor]] | None:
        """The ids renumbered to 1, 2, ... without gaps, in order, without a sync; and a function
        that returns what ``used`` does. None if there is no kernel for it.
        """

    def gaps(self, ids: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Which of the numbers below ``count`` occur, as ``flags`` reads them, and the table by
        which ``renumber`` closes the gaps between those above 0; nothing is read from the device.
        """

    def flags(self, there: Tensor, count: int) -> Tensor:
        """What ``gaps`` told, once it is on the CPU: a flag for each number."""

    def captured(self, run: Callable[[], object]) -> Captured | None:
        """The launches of ``run``, which are noted and not made; None where there is nothing like
        it. Raises ``NotCapturable``.
        """

    def renumber(self, ids: Tensor, table: Tensor) -> Tensor:
        """``table[ids]``; the table, int32, may be on the CPU."""

    # Counts and sums -----------------------------------------------------------------------------

    def tally(self, ids: Tensor, gradient: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """``counts[m]`` (int64) and ``sums[m] = Σ |gradient|`` (float64) over the elements with
        provenance id m, for m below ``count``; on the device of the ids, without a sync.

        Sums are exact and rounded once, so that they are the same bits on every device and in any
        order of elements; leaves larger than ``PIECE_ELEMENTS`` are summed piece by piece. An id
        that is not below ``count`` is an error; on a GPU, where checking would need a sync, its
        element is ignored.
        """

    def measure(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """The number of nonzero elements (int64) and ``Σ |gradient|`` (float64, exact as in
        ``tally``); both 0-d, on the device of the gradient, without a sync.
        """

    def measure_many(self, gradients: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """``measure`` of many tensors: counts and sums, on the CPU."""

    def measure_rows(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """``measure`` of each slice along the first dimension: counts and sums, on the device of
        the gradient, without a sync.
        """

    def sizes(self, xs: Sequence[Tensor]) -> Tensor | None:
        """For each tensor x ``‖x‖``, ``max |x[i]|``, the number of nonzero elements and
        ``Σ |x[i]|``: (len(xs), 4) in float64. None if there is no kernel for these;
        ``flow.sizing`` has it in plain torch.
        """

    def zeros(self, x: Tensor) -> Tensor:
        """The numbers of the elements that are 0, ascending."""

    def has_zeros(self, x: Tensor) -> bool:
        """Whether any element is 0."""

    def tally_batch(self, gradient: Tensor) -> LeafBatch | None:
        """An empty batch of leaves, if leaves like this one can be tallied many at a time."""

    def add_rows(self, total: Tensor, index: Tensor, rows: Tensor) -> None:
        """``total[index[n]] += rows[n]``, in the order of n, so that sums are always the same
        bits.
        """

    def group_sums(self, request: GroupRequest, counts: Tensor, sums: Tensor) -> GroupSums:
        """Sums over the counts (int64) of leaves and their Σ |gradient| (float64), by pair and
        component; both flat, on the CPU.
        """

    def finite_sums(self, tensors: Sequence[Tensor]) -> bool:
        """Whether sums over these tensors are finite, and so all elements; False also if a sum
        overflows. Synchronises once.
        """

    # Checks --------------------------------------------------------------------------------------

    def checks(self) -> DeferredChecks | None:
        """A list for conditions that are fetched later; None where they are evaluated at once."""

    def check(self, checks: DeferredChecks | None, holds: Callable[[], Tensor]) -> bool:
        """Whether all elements of a condition hold. If that would synchronise and there is a list
        to defer it to, it is added there and taken to hold.
        """

    # Memory --------------------------------------------------------------------------------------

    @property
    def label(self) -> str:
        """The device's name for error messages."""

    def free_bytes(self) -> int | None:
        """How many bytes can still be allocated; None if unknown."""

    def held_bytes(self) -> int | None:
        """How many bytes this process holds; None if unknown."""

    def spare_bytes(self) -> int | None:
        """``free_bytes`` of a memory that usually has one user, as that of a GPU; else None."""

    def workspace_bytes(self, shape: tuple[int, int, int], k: int) -> int:
        """Upper bound of what ``contract`` allocates besides its results, for sizes (i, m, n) and k
        and any layout of the operands; of the smallest parts if it can be split.
        """

    def workspace_max_bytes(self) -> int:
        """The most bytes that ``contract`` allocates besides its results."""
