"""``out[i, k] = ⊕ⱼ φ(x[i, k] − y[j, k]) · in[i, j]``: the backward of pairwise distances."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

import torch
from torch import Tensor

from gradtrace.linops import tuning
from gradtrace.linops.base import Count, Map, Rows
from gradtrace.linops.contraction import Contract
from gradtrace.linops.indexing import multi_index
from gradtrace.linops.side_by_side import BlockDiagonal
from gradtrace.semirings.base import wide
from gradtrace.types import Shape


class Distances(BlockDiagonal):
    """From (batch, n, m), one number for each pair of points, to (batch, n, k), the coordinates of
    the first point. The weight is ``φ(gap) = sign(gap)·|gap|^(power − 1)`` of the gap between the
    coordinates; for an infinite power it is sign(gap) if |gap| equals the ``distance``, else 0.
    There are n·m·k weights for each sample of the batch; they are materialised in chunks.
    """

    __slots__ = ("distance", "power", "x", "y")
    weights = ("x", "y", "distance")

    def __init__(
        self, x: Tensor, y: Tensor, power: float, distance: Tensor, shapes: tuple[Shape, Shape]
    ) -> None:
        self.x = wide(x)  # (batch, n, k)
        self.y = wide(y)  # (batch, m, k)
        self.power = power
        self.distance = wide(distance)  # (batch, n, m)
        self.in_shape, self.out_shape = shapes

    @property
    def _sizes(self) -> tuple[int, int, int, int]:
        """batch, n, m, k."""
        return self.x.shape[0], self.x.shape[1], self.y.shape[1], self.x.shape[2]

    def contracted(self) -> set[int]:
        """The dimensions of the input that the sum runs over."""
        return {len(self.in_shape) - 1}

    def _weight(self, gap: Tensor, distance: Tensor) -> Tensor:
        if self.power == 2:
            return gap
        if self.power == 1:
            return gap.sign_()
        if self.power == inf:
            return gap.sign() * (gap.abs() == distance)
        slope = gap.sign() * gap.abs().pow_(self.power - 1)
        return slope if self.power > 1 else torch.where(gap == 0, 0, slope)

    def blocks(self, *x: Tensor) -> Iterator[tuple[Map, tuple[Tensor, ...]]]:
        """Contractions of a chunk of points each."""
        batch, n, m, k = self._sizes
        step = max(1, tuning.DISTANCES_CHUNK_WEIGHTS // max(1, m * k))
        x = tuple(part.reshape(batch, n, m) for part in x)
        for b in range(batch if self.outputs else 0):
            for first in range(0, n, step):
                points = slice(first, min(n, first + step))
                gap = self.x[b, points].unsqueeze(1) - self.y[b].unsqueeze(0)
                weight = self._weight(gap, self.distance[b, points].unsqueeze(2))
                parts = tuple(part[b, points] for part in x)
                yield Contract("nm,nmk->nk", weight, (len(gap), m), (len(gap), k)), parts

    def rows(self, at: Tensor) -> Rows:
        _, n, m, k = self._sizes
        line, along = multi_index(at, (self.outputs // max(k, 1), k))
        batch, point = line // max(n, 1), line % max(n, 1)
        source = line.unsqueeze(1) * m + torch.arange(m, device=at.device)
        gap = self.x[batch, point, along].unsqueeze(1) - self.y[batch, :, along]
        return Rows(source, self._weight(gap, self.distance[batch, point]))

    @property
    def width(self) -> int:
        return self._sizes[2]

    def max_source(self, x: Tensor) -> Tensor:
        _, _, m, k = self._sizes
        most = x.amax(-1, keepdim=True) if m else x.new_zeros(*x.shape[:-1], 1)
        return most.expand(*x.shape[:-1], k).reshape(self.out_shape)

    def routes(self, count: Count, device: torch.device) -> Count:
        if not isinstance(count, Tensor):
            return count * self.width
        return count.sum(-1, keepdim=True).expand(self.out_shape)
