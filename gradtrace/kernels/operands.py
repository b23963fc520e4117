"""The operands and results of a backend's operations, as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# Contractions ------------------------------------------------------------------------------------


class Operand(NamedTuple):
    """A batch of matrices given by offset tables: ``x[i, r, k] = data[batch[i] + rows[r] +
    inner[k]]``, ``data`` flat; for example the windows of a convolution.
    """

    data: Tensor
    batch: Tensor
    rows: Tensor
    inner: Tensor

    @property
    def device(self) -> torch.device:
        """The device of the data."""
        return self.data.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the data."""
        return self.data.dtype


Matrices: TypeAlias = Tensor | Operand
"""A batch of matrices. As right operand of a contraction, a tensor is (i, k, n), and an ``Operand``
has n as its rows and k as its inner dimension.
"""


class Contraction(NamedTuple):
    """Results of a contraction, each (i, m, n); None where it was not requested."""

    value: Tensor | None
    index: Tensor | None  # type: ignore[assignment]  # not tuple.index
    ids: Tensor | None


Steps: TypeAlias = tuple[int, int, int]
"""Strides from matrix to matrix, row to row and k to k."""


@dataclass(frozen=True, eq=False, slots=True)
class MatrixLayout:
    """Strides that read tensors as matrices, without making views: the sizes (i, m, n) and k, and
    the strides of a, b and the provenance ids, which belong to b (``of_b``) or to a. Made once for
    all tensors with these strides, and compared by identity.
    """

    shape: tuple[int, int, int]
    k: int
    a: Steps
    b: Steps
    ids: Steps
    of_b: bool


def sizes(x: Matrices) -> tuple[int, int, int]:
    """(matrices, rows, k) of an operand; the shape of a tensor."""
    if isinstance(x, Operand):
        return len(x.batch), len(x.rows), len(x.inner)
    batch, rows, inner = x.shape
    return batch, rows, inner


def columns(b: Matrices) -> int:
    """The n of a right operand."""
    return len(b.rows) if isinstance(b, Operand) else b.shape[2]


def product_dtype(a: Matrices, b: Matrices) -> torch.dtype:
    """The dtype of the products; half precisions are promoted to float32."""
    left, right = a.dtype, b.dtype
    if left is right and left.itemsize > 2:
        return left
    wide = [torch.float32 if dtype.itemsize == 2 else dtype for dtype in (left, right)]
    return torch.promote_types(*wide)


def as_int32(ids: Matrices) -> Matrices:
    """Provenance ids as int32, the dtype that kernels read."""
    if ids.dtype is torch.int32:
        return ids
    return ids._replace(data=ids.data.int()) if isinstance(ids, Operand) else ids.int()


class TensorLines(NamedTuple):
    """Strided lines of a tensor: element k of line n is ``data[offset[n] + k·step]``, ``data``
    flat.
    """

    data: Tensor
    offset: Tensor
    step: int

    def take(self, some: slice, length: int) -> Tensor:
        """A slice of the lines as a tensor: (lines, length)."""
        number = torch.arange(length, device=self.offset.device) * self.step
        return self.data[self.offset[some].unsqueeze(1) + number]


# Other selections --------------------------------------------------------------------------------


class Selected(NamedTuple):
    """The largest |contribution| to each element, and the provenance id of its source."""

    value: Tensor
    ids: Tensor


class Compressed(NamedTuple):
    """Sparse matrices in CSR format: row r has the entries from ``starts[r]`` to
    ``starts[r + 1]``, with ascending columns ``source`` and values ``weight``.

    ``sizes`` are (blocks, planes, inner, columns, rows): x is (blocks, planes, columns, inner), the
    result (blocks, planes, rows, inner). Rows are numbered across all blocks, columns within each.
    """

    starts: Tensor
    source: Tensor
    weight: Tensor
    sizes: tuple[int, int, int, int, int]


class LowRankLines(NamedTuple):
    """``J[i, j] = diagonal[i]·δᵢⱼ + Σᵣ left[r][i]·right[r][j]`` for every line (row) of x; each
    tensor is (lines, n), possibly expanded.
    """

    diagonal: Tensor
    left: Sequence[Tensor]
    right: Sequence[Tensor]
    x: Tensor


class LineLayout(NamedTuple):
    """Tensors of other shapes read as lines: the number of lines, their length, the shape of the
    results, and for each of diagonal, x, left, right and provenance ids the stride from line to
    line and from element to element.
    """

    lines: int
    n: int
    shape: Sequence[int]
    steps: Sequence[tuple[int, int]]


class ColumnLayout(NamedTuple):
    """Tensors read as (lines, n, columns), where elements of a row are side by side in memory, and
    for each of them the stride from line to line and from row to row.
    """

    lines: int
    n: int
    columns: int
    steps: Sequence[tuple[int, int]]


class LargestEntry(NamedTuple):
    """The largest ``|J[i, j]·x[j]|`` if requested, and either the lowest j that attains it (-1 for
    none) or the provenance id at that j.
    """

    value: Tensor | None
    place: Tensor | None
    ids: Tensor | None


def line_operands(
    lines: LowRankLines, ids: Tensor | None, layout: LineLayout | None
) -> tuple[tuple[Tensor, ...], LineLayout] | None:
    """The tensors in the order in which kernels take them (diagonal, x, left, right and, if given,
    provenance ids), and their layout; None if kernels do not support the rank, sizes or dtypes.
    """
    diagonal, left, right, x = lines
    parts = (diagonal, x, *left, *right)
    given = parts if ids is None else (*parts, ids)
    if layout is None:
        each = [(part.stride(0), part.stride(1)) for part in given]
        layout = LineLayout(x.shape[0], x.shape[1], x.shape, each)
    if not layout.lines * layout.n or layout.n >= 1 << 31 or len(left) not in (1, 2):
        return None
    return (given, layout) if len({part.dtype for part in parts}) == 1 else None


# Sums over groups of elements --------------------------------------------------------------------

Words: TypeAlias = npt.NDArray[np.uint64]
Whole: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]


class GroupRequest(NamedTuple):
    """What ``Backend.group_sums`` adds up.

    ``leaves``: (leaves, 6), of each where its counts and sums begin, how many they are, how many of
    the first stand for no path, which of ``tables`` has its provenance sets, the first pair they
    are for, and its place. ``tables``: (sets, words) each, repeated for each pair. ``extra``: bits
    that all sets of a leaf have (leaves, words). ``able``: the components that paths from a place
    could pass (places, words). ``owned``: offsets by place and components that it belongs to.
    ``by_bit``: offsets by bit and components that have it. ``totals``: the most paths of each leaf.
    """

    leaves: Whole
    tables: Sequence[Words]
    extra: Words
    able: Words
    owned: tuple[Whole, Whole]
    by_bit: tuple[Whole, Whole]
    totals: Floats
    pairs: int
    components: int


class GroupSums(NamedTuple):
    """Sums by pair and component: (pairs, components, 2), the number of elements and Σ |gradient|.

    ``eligible`` is over the elements that could pass the component, ``through`` over those that do.
    ``unreached`` is the number of elements, by component, that could but have no path; ``finite``
    says whether all sums of gradients are finite.
    """

    eligible: Floats
    through: Floats
    unreached: Floats
    finite: bool


class LeafBatch(Protocol):
    """Leaves on one device, collected to be tallied in one call or launch.

    ``tally``, ``measure`` and ``reduce`` each add a leaf with its gradient, and return the index in
    the results at which its counts will begin; or None if the leaf must be tallied by itself. The
    tensors are referenced until ``counted``, and must not change before it.
    """

    device: torch.device

    def full(self, room: int) -> bool:
        """Whether the leaves must be tallied now, if at most ``room`` bytes may be referenced."""

    def tally(self, ids: Tensor, gradient: Tensor, count: int) -> int | None:
        """Add a leaf for ``Backend.tally``."""

    def measure(self, gradient: Tensor) -> int | None:
        """Add a leaf for ``Backend.measure``."""

    def reduce(
        self, x: Tensor, ids: Tensor, dims: tuple[int, ...], gradient: Tensor, count: int
    ) -> int | None:
        """Add a leaf for ``Backend.tally``, with the ids that ``Backend.reduce`` returns."""

    def counted(self) -> tuple[Tensor, Tensor]:
        """Tally all added leaves, and release them: counts and sums."""
