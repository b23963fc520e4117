"""``out[i] = ⊕ₑ weight[e] · in[source[e]]`` over the entries e of row i: a sparse matrix."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from gradtrace.kernels import backend_of
from gradtrace.kernels.operands import Compressed
from gradtrace.linops import tuning
from gradtrace.linops.base import Count, Map, Rows, Selection, per_element
from gradtrace.linops.indexing import multi_index
from gradtrace.semirings import MAX, SUM, Semiring, Value
from gradtrace.semirings.base import each, wide
from gradtrace.types import Shape


class Around(NamedTuple):
    """The batch dimensions of a sparse map: each of ``blocks`` matrices is applied to ``planes``
    planes of ``inner`` columns. The input is (blocks, planes, columns of the matrix, inner), the
    output (blocks, planes, rows of the matrix, inner).
    """

    blocks: int = 1
    planes: int = 1
    inner: int = 1


class Sparse(Map):
    """Block-diagonal sparse matrices in CSR format, each applied to ``around.planes`` planes.

    Row r of block b holds the entries from ``starts[b·rows + r]`` on. ``source`` is the column of
    each entry within its block, strictly ascending along a row, so there is one weight for a pair.
    Every operation takes time proportional to the number of entries.
    """

    __slots__ = ("around", "source", "starts", "weight")
    weights = ("weight",)

    def __init__(
        self,
        starts: Tensor,
        source: Tensor,
        weight: Tensor,
        in_shape: Shape,
        out_shape: Shape,
        around: Around | None = None,
    ) -> None:
        self.starts = starts
        self.source = source
        self.weight = weight
        self.in_shape = in_shape
        self.out_shape = out_shape
        self.around = Around() if around is None else around
        if not self.inputs * self.outputs:
            self.starts = starts.new_zeros(self.outputs + 1)
            self.source, self.weight, self.around = source[:0], weight[:0], Around()

    @classmethod
    def of(
        cls,
        entries: tuple[Tensor, Tensor, Tensor],
        in_shape: Shape,
        out_shape: Shape,
        around: Around | None = None,
    ) -> Sparse:
        """From entries (row, column, weight) in any order; weights for the same pair are added.

        Rows and columns are numbered consecutively across blocks.

        >>> row, column = torch.tensor([1, 0, 1]), torch.tensor([2, 0, 2])
        >>> m = Sparse.of((row, column, torch.tensor([1.0, 5.0, 2.0])), (3,), (2,))
        >>> m.apply(torch.tensor([1.0, 10.0, 100.0])).tolist()
        [5.0, 300.0]
        """
        row, column, weight = (part.reshape(-1) for part in entries)
        around = Around() if around is None else around
        if not prod(in_shape) * prod(out_shape):
            row, column, weight, around = row[:0], column[:0], weight[:0], Around()
        each_in, each_out = (prod(shape) // prod(around) for shape in (in_shape, out_shape))
        rows, columns = around.blocks * each_out, around.blocks * each_in
        pairs, order = (row * columns + column).sort(stable=True)
        weight = weight[order]
        new = torch.ones_like(pairs, dtype=torch.bool)
        new[1:] = pairs[1:] != pairs[:-1]
        if not bool(new.all()):
            weight = weight.new_zeros(int(new.sum())).index_add_(0, new.cumsum(0) - 1, weight)
            pairs = pairs[new]
        row = pairs // max(columns, 1)
        count = torch.bincount(row, minlength=rows)
        starts = torch.cat([count.new_zeros(1), count.cumsum(0)])
        source = pairs % max(columns, 1) % max(each_in, 1)
        return cls(starts, source, weight, in_shape, out_shape, around)

    @property
    def _sizes(self) -> tuple[int, int]:
        """The columns and the rows of one block."""
        return self.inputs // prod(self.around), self.outputs // prod(self.around)

    def _compressed(self, weight: Tensor) -> Compressed:
        columns, rows = self._sizes
        return Compressed(self.starts, self.source, weight, (*self.around, columns, rows))

    def _row(self) -> Tensor:
        """The row of each entry, numbered consecutively across blocks."""
        numbers = torch.arange(len(self.starts) - 1, device=self.starts.device)
        return numbers.repeat_interleave(self.starts.diff(), output_size=len(self.source))

    def apply(self, x: Tensor) -> Tensor:
        # Weights of half precision are multiplied in float32, as by PyTorch's own kernels.
        matrices = self._compressed(self.weight.to(wide(x).dtype))
        found = backend_of(x).sparse_sum(matrices, wide(x))
        return found.to(x.dtype).reshape(self.out_shape)

    def apply_in(self, x: Value, semiring: Semiring) -> Value:
        if semiring == SUM:
            return (self.apply(x[0]),)
        if semiring == MAX:
            return (self.weighed(x[0]),)
        columns, rows = self._sizes
        blocks, planes, inner = self.around
        weight = each(semiring.weigh(self.weight), lambda part: part.reshape(1, -1, 1))
        row = self._row()
        column = self.source + row // max(rows, 1) * columns
        by_plane = each(x, lambda part: self._by_plane(part, columns))
        found = []
        for some in self._planes():
            taken = tuple(part[some].index_select(1, column) for part in by_plane)
            product = each(semiring.times(weight, taken), lambda part: part.reshape(-1))
            size = len(taken[0]) * blocks * rows * inner
            target = torch.arange(size, device=row.device).reshape(-1, blocks * rows, inner)
            target = target.index_select(1, row).reshape(-1)
            found.append(semiring.scatter(product, target, size))
        if not found:
            return semiring.zeros(self.out_shape, x)
        whole = tuple(torch.cat(parts) for parts in zip(*found))
        back = (planes, blocks, rows, inner)
        return each(whole, lambda part: part.reshape(back).transpose(0, 1).reshape(self.out_shape))

    def _by_plane(self, x: Tensor, size: int) -> Tensor:
        """(blocks, planes, size, inner) reshaped to (planes, blocks · size, inner)."""
        blocks, planes, inner = self.around
        whole = x.reshape(blocks, planes, size, inner).transpose(0, 1)
        return whole.reshape(planes, blocks * size, inner)

    def _planes(self) -> Iterator[slice]:
        """The planes in chunks of at most ``SPARSE_CHUNK_PRODUCTS`` products."""
        step = max(1, tuning.SPARSE_CHUNK_PRODUCTS // max(1, len(self.source) * self.around.inner))
        planes = self.around.planes if self.outputs else 0
        return (slice(n, min(n + step, planes)) for n in range(0, planes, step))

    def select(self, x: Tensor, ids: Tensor, value: bool = False) -> Selection:
        x, weight = wide(x), wide(self.weight)
        kind = torch.promote_types(x.dtype, weight.dtype)
        matrices = self._compressed(weight.to(kind))
        largest, selected = backend_of(x).sparse(matrices, x.to(kind), ids)
        largest = largest.reshape(self.out_shape)
        return largest if value else None, selected.reshape(self.out_shape)

    def rows(self, at: Tensor) -> Rows:
        columns, rows = self._sizes
        blocks, planes, inner = self.around
        block, plane, row, along = multi_index(at, (blocks, planes, rows, inner))
        first = self.starts[block * rows + row]
        count = self.starts[block * rows + row + 1] - first
        number = torch.arange(int(count.max()) if len(at) else 0, device=at.device)
        there = number < count.unsqueeze(1)
        entry = torch.where(there, first.unsqueeze(1) + number, 0)
        base = (block * planes + plane).unsqueeze(1) * columns
        if not len(self.source):
            return Rows(entry, self.weight.new_zeros(()))
        source = (base + self.source[entry]) * inner + along.unsqueeze(1)
        return Rows(torch.where(there, source, -1), self.weight[entry])

    @property
    def width(self) -> int:
        return max(1, int(self.starts.diff().max())) if len(self.starts) > 1 else 1

    def may_be_nonzero(self, x: Tensor) -> Tensor | None:
        blocks, planes, inner = self.around
        filled = (self.starts.diff() > 0).reshape(blocks, 1, -1, 1)
        return filled.expand(blocks, planes, filled.shape[2], inner).reshape(self.out_shape)

    def max_source(self, x: Tensor) -> Tensor:
        columns, rows = self._sizes
        blocks, planes, inner = self.around
        row = self._row()
        column = self.source + row // max(rows, 1) * columns
        taken = self._by_plane(x, columns).index_select(1, column)
        target = row.reshape(1, -1, 1).expand(taken.shape)
        out = taken.new_zeros(planes, blocks * rows, inner).scatter_reduce(1, target, taken, "amax")
        return out.reshape(planes, blocks, rows, inner).transpose(0, 1).reshape(self.out_shape)

    def routes(self, count: Count, device: torch.device) -> Count:
        ones = torch.ones(self.weight.shape, dtype=torch.float64, device=device)
        there = Sparse(self.starts, self.source, ones, self.in_shape, self.out_shape, self.around)
        return there.apply(per_element(count, self.in_shape, device).double())
