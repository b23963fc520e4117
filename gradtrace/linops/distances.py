"""``out[i, k] = ⊕ⱼ φ(x[i, k] − y[j, k]) · in[i, j]``: the backward of pairwise distances."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf
from typing import TypeVar

import torch
from torch import Tensor

from gradtrace.linops.base import Best, Count, Map, Rows, multi_index
from gradtrace.linops.contraction import Contract
from gradtrace.semirings import Semiring, Value
from gradtrace.semirings.base import wide
from gradtrace.types import Shape

CHUNK_WEIGHTS = 1 << 18
"""The most weights that are materialised at a time; this many fit into a CPU's cache."""

Result = TypeVar("Result")


class Distances(Map):
    """From (batch, n, m), one number for each pair of points, to (batch, n, k), the coordinates of
    the first point. The weight is ``φ(gap) = sign(gap)·|gap|^(power − 1)`` of the gap between the
    coordinates; for an infinite power it is sign(gap) if |gap| equals the ``distance``, else 0.
    There are n·m·k weights for each sample of the batch; they are materialised in chunks.
    """

    __slots__ = ("distance", "power", "x", "y")

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

    def _parts(self) -> Iterator[tuple[Contract, slice]]:
        """The map as contractions of a chunk of points each, with their rows of (batch·n)."""
        batch, n, m, k = self._sizes
        step = max(1, CHUNK_WEIGHTS // max(1, m * k))
        for b in range(batch if self.outputs else 0):
            for first in range(0, n, step):
                last = min(n, first + step)
                gap = self.x[b, first:last].unsqueeze(1) - self.y[b].unsqueeze(0)
                weight = self._weight(gap, self.distance[b, first:last].unsqueeze(2))
                shapes = (last - first, m), (last - first, k)
                yield Contract("nm,nmk->nk", weight, *shapes), slice(b * n + first, b * n + last)

    def _each(self, call: Callable[[Contract, slice], Result]) -> list[Result]:
        return [call(part, rows) for part, rows in self._parts()]

    def _lines(self, x: Tensor) -> Tensor:
        """The input reshaped to (batch·n, m)."""
        batch, n, m, _ = self._sizes
        return x.reshape(batch * n, m)

    def apply(self, x: Tensor) -> Tensor:
        lines = self._lines(x)
        found = self._each(lambda part, rows: part.apply(lines[rows]))
        return torch.cat(found).reshape(self.out_shape) if found else x.new_zeros(self.out_shape)

    def apply_in(self, x: Value, semiring: Semiring) -> Value:
        lines = [self._lines(part) for part in x]
        found = self._each(
            lambda part, rows: part.apply_in(tuple(line[rows] for line in lines), semiring)
        )
        if not found:
            return semiring.zeros(self.out_shape, x)
        return tuple(torch.cat(parts).reshape(self.out_shape) for parts in zip(*found))

    def best(self, x: Tensor, at: Tensor | None = None) -> Best:
        if at is not None:
            return self.largest(x, at)
        lines, m = self._lines(x), self._sizes[2]
        found = self._each(lambda part, rows: (part.best(lines[rows]), rows.start * m))
        if not found:
            return self.largest(x)
        value = torch.cat([best.value for best, _ in found])
        source = torch.cat([torch.where(b.source < 0, -1, b.source + first) for b, first in found])
        return Best(value.reshape(self.out_shape), source.reshape(self.out_shape))

    def select(self, x: Tensor, marks: Tensor, value: bool = False) -> tuple[Tensor | None, Tensor]:
        lines, ids = self._lines(x), self._lines(marks)
        found = self._each(lambda part, rows: part.select(lines[rows], ids[rows], value))
        if not found:
            return super().select(x, marks, value)
        selected = torch.cat([numbers for _, numbers in found]).reshape(self.out_shape)
        if not value:
            return None, selected
        largest = torch.cat([most for most, _ in found if most is not None])
        return largest.reshape(self.out_shape), selected

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
        lines, k = self._lines(x), self._sizes[3]
        most = lines.amax(1) if lines.numel() else lines.new_zeros(lines.shape[0])
        return most.unsqueeze(1).expand(-1, k).reshape(self.out_shape)

    def routes(self, count: Count) -> Count:
        if not isinstance(count, Tensor):
            return count * self._sizes[2]
        total = self._lines(count).sum(1, keepdim=True)
        return total.expand(-1, self._sizes[3]).reshape(self.out_shape)

    def tensors(self) -> tuple[str, ...]:
        return ("x", "y", "distance")
