"""Diagonal plus low rank along dimensions: softmax and the norms."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from gradtrace.errors import Unsupported
from gradtrace.maps.base import Count, Map
from gradtrace.semirings import Semiring
from gradtrace.shapes import Shape


class Normaliser(Map):
    """``out[i] = d[i]·in[i] + Σᵣ left[r][i] · Σⱼ right[r][j]·in[j]``, j over ``dims``.

    One weight for a pair: ``J[i, j] = δᵢⱼ·d[i] + Σᵣ left[r][i]·right[r][j]`` where i and j agree
    outside ``dims``. ``diagonal``, ``left`` and ``right`` broadcast to the shape.
    """

    __slots__ = ("diagonal", "dims", "left", "right")

    def __init__(
        self,
        diagonal: Tensor,
        pairs: Sequence[tuple[Tensor, Tensor]],
        dims: Sequence[int],
        shape: Shape,
    ) -> None:
        self.diagonal = diagonal
        self.left = tuple(u for u, _ in pairs)
        self.right = tuple(v for _, v in pairs)
        self.dims = tuple(d % len(shape) for d in dims) if shape else ()
        self.in_shape = self.out_shape = shape

    def pull(self, x: Tensor, semiring: Semiring) -> Tensor:
        if semiring.name != "SUM":
            raise Unsupported(f"{semiring.name} is not defined on normalisers yet")
        out = self.diagonal * x
        for u, v in zip(self.left, self.right):
            out = out + u * semiring.reduce(v * x, self.dims)
        return out

    def dense(self) -> Tensor:
        shape, n = self.in_shape, self.inputs
        kept = tuple(1 if d in self.dims else size for d, size in enumerate(shape))
        line = torch.arange(prod(kept)).reshape(kept).expand(shape).reshape(-1)
        same = line.reshape(-1, 1) == line
        matrix = torch.diag(self.diagonal.expand(shape).reshape(n))
        for u, v in zip(self.left, self.right):
            outer = u.expand(shape).reshape(n, 1) * v.expand(shape).reshape(1, n)
            matrix = matrix + torch.where(same, outer, torch.zeros((), dtype=outer.dtype))
        return matrix

    def routes(self, count: Count) -> Count:
        if isinstance(count, Tensor):
            total = count.sum(self.dims, keepdim=True) if self.dims else count
            return total.expand(self.out_shape)
        return count * prod(self.in_shape[d] for d in self.dims)
