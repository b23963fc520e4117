"""The largest of many linear forms: which point of a line's cloud lies furthest in a direction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import cos, pi, sin

import torch
from torch import Tensor

from gradtrace.kernels import argmax

DIRECTIONS = 16
"""In how many directions of a half circle the outermost point is looked for first."""

PLAIN = 64
"""Lines of at most this many elements are compared one with another."""

LIMIT = 1 << 20
"""The most products that are written out at a time."""


@dataclass
class PointCloud:
    """``c[i, j] = |Σᵣ left[r][i]·right[r][j]|·|x[j]|`` along every line; for each i, which j ≠ i is
    largest?

    Of rank two that is the point ``(right[0][j]·x[j], right[1][j]·x[j])`` that lies furthest,
    either way, in the direction ``(left[0][i], left[1][i])``: a corner of the convex hull of all
    points and their mirror images. Points well inside a polygon of outermost points are no corners,
    so few are left to compare; an i that is itself one of these few is compared with all. Tensors
    are (lines, n).
    """

    left: Sequence[Tensor]
    right: Sequence[Tensor]
    x: Tensor

    def others(self) -> tuple[Tensor, Tensor]:
        """For each i of each line the largest ``c[i, j]``, j ≠ i, and the lowest such j."""
        lines, n = self.x.shape
        if n < 2:
            nothing = torch.zeros_like(self.x)
            return nothing, torch.full_like(nothing, -1, dtype=torch.int64)
        if len(self.left) != 2 or n <= PLAIN:
            return self._all()
        corner = self._corners()
        most = max(int(corner.sum(1).max()), 1)
        if most > n // 4:
            return self._all()
        # Corners of each line, in rising order, the last place of short lines repeated.
        few = torch.where(corner, torch.arange(n, device=self.x.device), n).sort(1).values[:, :most]
        few = torch.where(few == n, few[:, :1].clamp(max=n - 1), few)
        value, place = self._compared(torch.arange(lines, device=self.x.device), few)
        line, at = corner.nonzero().unbind(1)
        step = max(1, LIMIT // n)
        for first in range(0, len(line), step):
            row, i = line[first : first + step], at[first : first + step]
            whole = self._pairs(row, i).scatter_(1, i.unsqueeze(1), -1.0)
            value[row, i], place[row, i] = argmax(whole, 1)
        return value, place

    def _pairs(self, line: Tensor, i: Tensor) -> Tensor:
        """``c[i, :]`` for single elements of lines."""
        weight = torch.zeros((), dtype=self.x.dtype, device=self.x.device)
        for u, v in zip(self.left, self.right):
            weight = weight + u[line, i].unsqueeze(1) * v[line]
        return (weight * self.x[line]).abs()

    def _compared(self, lines: Tensor, few: Tensor) -> tuple[Tensor, Tensor]:
        """The largest among a few j of each line, for every i; wrong where i is one of them."""
        n, width = self.x.shape[1], few.shape[1]
        values, places = [], []
        step, part = max(1, LIMIT // (n * width)), max(1, LIMIT // width)
        for first in range(0, len(lines), step):
            some = lines[first : first + step]
            chosen = few[some]
            theirs = [v[some].gather(1, chosen).unsqueeze(1) for v in self.right]
            x = self.x[some].gather(1, chosen).unsqueeze(1)
            for i in range(0, n, part):
                weight = torch.zeros((), dtype=self.x.dtype, device=self.x.device)
                for u, v in zip(self.left, theirs):
                    weight = weight + u[some, i : i + part].unsqueeze(2) * v
                value, at = argmax((weight * x).abs(), 2)
                values.append(value)
                places.append(chosen.gather(1, at))
        shape = self.x.shape
        if part < n:  # the pieces of a line, line after line
            return torch.cat(values, 1).reshape(shape), torch.cat(places, 1).reshape(shape)
        return torch.cat(values), torch.cat(places)

    def _all(self) -> tuple[Tensor, Tensor]:
        """Every element with every other, some lines at a time."""
        lines, n = self.x.shape
        found = []
        step = max(1, LIMIT // n)
        for first in range(0, lines * n, step):
            some = torch.arange(first, min(first + step, lines * n), device=self.x.device)
            line, i = some // n, some % n
            size = self._pairs(line, i)
            size.scatter_(1, i.unsqueeze(1), -1.0)
            found.append(argmax(size, 1))
        values, places = zip(*found)
        return torch.cat(values).reshape(lines, n), torch.cat(places).reshape(lines, n)

    def _corners(self) -> Tensor:
        """Which points may be corners of the hull: those not well inside a polygon of points."""
        a, b = self.right[0] * self.x, self.right[1] * self.x
        wide_, high = a.abs().amax(1, keepdim=True), b.abs().amax(1, keepdim=True)
        a, b = (
            _over(a, wide_),
            _over(b, high),
        )  # hulls turn with their points: bring both to one size
        p, q = [], []
        corner = torch.zeros_like(a, dtype=torch.bool)
        for d in range(DIRECTIONS):
            angle = pi * d / DIRECTIONS
            along = a * cos(angle) + b * sin(angle)
            at = along.abs().argmax(1, keepdim=True)
            corner.scatter_(1, at, True)
            sign = along.gather(1, at).sign()
            p.append(a.gather(1, at) * sign)
            q.append(b.gather(1, at) * sign)
        p, q = [*p, -p[0]], [*q, -q[0]]  # half a turn on, the mirror image
        slack = 4 * torch.finfo(a.dtype).eps
        for d in range(DIRECTIONS):
            normal = q[d + 1] - q[d], p[d] - p[d + 1]  # of the edge, outwards
            edge = normal[0] * p[d] + normal[1] * q[d]
            size = normal[0].abs() + normal[1].abs()
            above = (normal[0] * a + normal[1] * b).abs() - edge
            corner |= ~((size == 0) | (above <= slack * size))  # NaN stays
            # Of points on the edge itself, its ends are there; of equals, the first is wanted.
            on = above.abs() <= slack * size
            first = on.int().argmax(1, keepdim=True)
            corner.scatter_(1, first, corner.gather(1, first) | on.gather(1, first))
        return corner


def _over(x: Tensor, size: Tensor) -> Tensor:
    return torch.where(size > 0, x / size, x)
