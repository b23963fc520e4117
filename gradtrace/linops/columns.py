"""Some columns of a map, others for each of several inputs."""

from __future__ import annotations

from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from gradtrace.kernels import backend_of
from gradtrace.kernels.operands import ColumnLayout
from gradtrace.linops import tuning
from gradtrace.linops.base import Count, Map, Rows, Selection, any_nonzero, per_element
from gradtrace.linops.indexing import each_at, merged_stride, resized
from gradtrace.semirings import Semiring, Value
from gradtrace.types import Shape


class LowRankColumns(Map):
    """A diagonal plus low rank (``Normaliser``), restricted for each row of ``index`` to the input
    elements at these places along ``dim``; see ``Map.narrow``.

    ``whole`` is the map of as many inputs without the restriction: all but ``apply`` sets the other
    elements to 0 and asks it.
    """

    __slots__ = ("diagonal", "dim", "dims", "index", "left", "right", "whole")

    def __init__(
        self,
        whole: Map,
        diagonal: Tensor,
        pairs: tuple[tuple[Tensor, ...], tuple[Tensor, ...]],
        dims: Shape,
        dim: int,
        index: Tensor,
    ) -> None:
        self.whole = whole
        self.diagonal = diagonal
        self.left, self.right = pairs
        self.dims = tuple([d + 1 for d in dims])  # of an input: the first are those of ``index``
        self.dim, self.index = dim, index
        self.out_shape = whole.out_shape
        self.in_shape = (len(index), *resized(whole.in_shape[1:], dim, index.shape[1]))

    def apply(self, x: Tensor) -> Tensor:
        totals = [(self._here(v) * x).sum(self.dims, keepdim=True) for v in self.right]
        own = self._here(self.diagonal) * x
        for u, total in zip(self.left, totals):
            own = own + self._here(u) * total
        return self._put(self._others(totals, own), own)

    def _others(self, totals: list[Tensor], own: Tensor) -> Tensor:
        """What elements get from those at other places."""
        if self.outputs >= tuning.KERNEL_MIN_ELEMENTS and backend_of(own).host:
            parts = (*self.left, *totals)
            tensors = [(part.shape, part.stride()) for part in parts]
            layout = column_layout(self.out_shape, self.dims, *tensors)
            found = layout and backend_of(own).low_rank_sums(self.left, totals, layout)
            if found is not None:
                return found.reshape(self.out_shape)
        out = own.new_zeros(self.out_shape)
        for u, total in zip(self.left, totals):
            out += u * total
        return out

    def _here(self, t: Tensor) -> Tensor:
        """A tensor that broadcasts to a single input of ``whole``, at the places of each input."""
        t = t[(None,) * (len(self.out_shape) - 1 - t.dim())]
        if t.shape[self.dim] == 1 != self.out_shape[self.dim + 1]:
            return t
        return each_at(t, self.dim, self.index)

    def _put(self, out: Tensor, x: Tensor) -> Tensor:
        """Write an input to its places in a tensor of the shape of the output."""
        dim = self.dim + 1
        number = torch.arange(len(self.index), device=x.device).unsqueeze(1)
        out.movedim(dim, 1)[number, self.index] = x.movedim(dim, 1).to(out.dtype)
        return out

    def _spread(self, x: Tensor, zero: float = 0) -> Tensor:
        """An input with ``zero`` at all other elements."""
        return self._put(x.new_full(self.out_shape, zero), x)

    def apply_in(self, x: Value, semiring: Semiring) -> Value:
        spread = [self._spread(part, zero) for part, zero in zip(x, semiring.zero)]
        return self.whole.apply_in(tuple(spread), semiring)

    def select(self, x: Tensor, ids: Tensor, value: bool = False) -> Selection:
        return self.whole.select(self._spread(x), self._spread(ids), value)

    def rows(self, at: Tensor) -> Rows:
        source, weight = self.whole.rows(at)
        numbers = torch.arange(1, self.inputs + 1, device=at.device).reshape(self.in_shape)
        numbers = self._spread(numbers).reshape(-1) - 1
        found, order = numbers[source].sort(dim=1)
        return Rows(found, weight.expand(source.shape).gather(1, order))

    def may_be_nonzero(self, x: Tensor) -> Tensor | None:
        return any_nonzero(x, self.dims, keepdim=True).expand(self.out_shape)

    def max_source(self, x: Tensor) -> Tensor:
        return self.whole.max_source(self._spread(x))

    def routes(self, count: Count, device: torch.device) -> Count:
        return self.whole.routes(self._spread(per_element(count, self.in_shape, device)), device)

    @property
    def width(self) -> int:
        return self.whole.width


@lru_cache(maxsize=4096)
def column_layout(shape: Shape, dims: Shape, *tensors: tuple[Shape, Shape]) -> ColumnLayout | None:
    """Tensors with these shapes and strides, broadcast to ``shape``, read as (lines, n, columns)
    where n is over ``dims``; None if they are not laid out like that.
    """
    first, last = (dims[0], dims[-1] + 1) if dims else (0, 0)
    if last - first != len(dims) or prod(shape[last:]) < 2:
        return None
    groups = [tuple(range(*ends)) for ends in ((0, first), (first, last), (last, len(shape)))]
    found: list[tuple[int, int]] = []
    for sizes, strides in tensors:
        missing = len(shape) - len(sizes)
        steps = [0] * missing + [s if size > 1 else 0 for size, s in zip(sizes, strides)]
        line, row, column = (merged_stride(shape, steps, group) for group in groups)
        if line is None or row is None or column != 1:
            return None
        found.append((line, row))
    count, n, columns = (prod(shape[d] for d in group) for group in groups)
    return ColumnLayout(count, n, columns, tuple(found))
