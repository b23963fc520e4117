"""Maximise many linear forms over a set of points, with the help of its convex hull."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import cos, pi, sin

import torch
from torch import Tensor

from gradtrace.kernels import argmax
from gradtrace.linops.tuning import HULL_CHUNK_PRODUCTS, HULL_DIRECTIONS, PAIRWISE_MAX_ELEMENTS


@dataclass
class PointCloud:
    """Finds, for each i of every line, the j ≠ i that maximises
    ``c[i, j] = |Σᵣ left[r][i]·right[r][j]|·|x[j]|``. Tensors are (lines, n).

    For rank two that is the point ``(right[0][j]·x[j], right[1][j]·x[j])`` with the largest
    absolute projection on the direction ``(left[0][i], left[1][i])``: a corner of the convex hull
    of all points and their mirror images. Points well inside a polygon of extreme points are not
    corners, so few candidates are left to compare. An i that is itself a candidate is compared with
    all j.
    """

    left: Sequence[Tensor]
    right: Sequence[Tensor]
    x: Tensor

    def others(self) -> tuple[Tensor, Tensor]:
        """For each i of each line the largest ``c[i, j]``, j ≠ i, and the lowest such j."""
        lines, n = self.x.shape
        if n < 2:
            zeros = torch.zeros_like(self.x)
            return zeros, torch.full_like(zeros, -1, dtype=torch.int64)
        if len(self.left) != 2 or n <= PAIRWISE_MAX_ELEMENTS:
            return self._pairwise()
        corner = self._corners()
        most = max(int(corner.sum(1).max()), 1)
        if most > n // 4:
            return self._pairwise()
        # The corners of each line, ascending; lines with fewer are padded with their first corner.
        candidates = (
            torch.where(corner, torch.arange(n, device=self.x.device), n).sort(1).values[:, :most]
        )
        candidates = torch.where(candidates == n, candidates[:, :1].clamp(max=n - 1), candidates)
        value, place = self._best_of_candidates(
            torch.arange(lines, device=self.x.device), candidates
        )
        line, at = corner.nonzero().unbind(1)
        step = max(1, HULL_CHUNK_PRODUCTS // n)
        for first in range(0, len(line), step):
            row, i = line[first : first + step], at[first : first + step]
            whole = self._pairs(row, i).scatter_(1, i.unsqueeze(1), -1.0)
            value[row, i], place[row, i] = argmax(whole, 1)
        return value, place

    def _pairs(self, line: Tensor, i: Tensor) -> Tensor:
        """``c[i, :]`` for single elements (line, i)."""
        weight = torch.zeros((), dtype=self.x.dtype, device=self.x.device)
        for u, v in zip(self.left, self.right):
            weight = weight + u[line, i].unsqueeze(1) * v[line]
        return (weight * self.x[line]).abs()

    def _best_of_candidates(self, lines: Tensor, candidates: Tensor) -> tuple[Tensor, Tensor]:
        """The largest among the candidates j of each line, for every i. Not valid where i is a
        candidate itself, since j = i is not excluded.
        """
        n, width = self.x.shape[1], candidates.shape[1]
        values, places = [], []
        step, part = (
            max(1, HULL_CHUNK_PRODUCTS // (n * width)),
            max(1, HULL_CHUNK_PRODUCTS // width),
        )
        for first in range(0, len(lines), step):
            some = lines[first : first + step]
            chosen = candidates[some]
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
        if part < n:  # each chunk is a part of one line
            return torch.cat(values, 1).reshape(shape), torch.cat(places, 1).reshape(shape)
        return torch.cat(values), torch.cat(places)

    def _pairwise(self) -> tuple[Tensor, Tensor]:
        """Compare every element with every other, in chunks."""
        lines, n = self.x.shape
        found = []
        step = max(1, HULL_CHUNK_PRODUCTS // n)
        for first in range(0, lines * n, step):
            some = torch.arange(first, min(first + step, lines * n), device=self.x.device)
            line, i = some // n, some % n
            size = self._pairs(line, i)
            size.scatter_(1, i.unsqueeze(1), -1.0)
            found.append(argmax(size, 1))
        values, places = zip(*found)
        return torch.cat(values).reshape(lines, n), torch.cat(places).reshape(lines, n)

    def _corners(self) -> Tensor:
        """A mask of the points that may be corners of the hull: those not well inside the polygon
        of the extreme points in ``HULL_DIRECTIONS`` directions.
        """
        a, b = self.right[0] * self.x, self.right[1] * self.x
        wide_, high = a.abs().amax(1, keepdim=True), b.abs().amax(1, keepdim=True)
        # Scaling a coordinate maps hull corners to hull corners: bring both to the same range.
        a, b = _divided(a, wide_), _divided(b, high)
        p, q = [], []
        corner = torch.zeros_like(a, dtype=torch.bool)
        for d in range(HULL_DIRECTIONS):
            angle = pi * d / HULL_DIRECTIONS
            along = a * cos(angle) + b * sin(angle)
            at = along.abs().argmax(1, keepdim=True)
            corner.scatter_(1, at, True)
            sign = along.gather(1, at).sign()
            p.append(a.gather(1, at) * sign)
            q.append(b.gather(1, at) * sign)
        p, q = [*p, -p[0]], [*q, -q[0]]  # after half a turn, the mirror image of the first
        slack = 4 * torch.finfo(a.dtype).eps
        for d in range(HULL_DIRECTIONS):
            normal = q[d + 1] - q[d], p[d] - p[d + 1]  # outward normal of the edge
            edge = normal[0] * p[d] + normal[1] * q[d]
            size = normal[0].abs() + normal[1].abs()
            above = (normal[0] * a + normal[1] * b).abs() - edge
            corner |= ~((size == 0) | (above <= slack * size))  # NaN counts as a corner
            # Of points on the edge, its ends are candidates already. Ties go to the lowest number,
            # so the first point on it is one too.
            on = above.abs() <= slack * size
            first = on.int().argmax(1, keepdim=True)
            corner.scatter_(1, first, corner.gather(1, first) | on.gather(1, first))
        return corner


def _divided(x: Tensor, size: Tensor) -> Tensor:
    """``x / size``, or x where size is 0."""
    return torch.where(size > 0, x / size, x)
