"""``out = ⊕ in`` over dimensions: sums, means, the undoing of broadcasting."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradtrace.maps.base import Count, Map
from gradtrace.semirings import Semiring
from gradtrace.shapes import Shape


class Reduce(Map):
    """``out[i] = ⊕ in[j]`` over the j that agree with i outside ``dims``."""

    __slots__ = ("dims",)
    single_target = True

    def __init__(self, dims: Sequence[int], in_shape: Shape, out_shape: Shape) -> None:
        self.dims = tuple(d % len(in_shape) for d in dims)
        self.in_shape = in_shape
        self.out_shape = out_shape

    @property
    def single_source(self) -> bool:  # type: ignore[override]
        """Whether the dimensions summed over are of size 1 anyway."""
        return all(self.in_shape[d] <= 1 for d in self.dims)

    def pull(self, x: Tensor, semiring: Semiring) -> Tensor:
        return semiring.reduce(x, self.dims).reshape(self.out_shape)

    def _kept(self) -> Shape:
        return tuple(1 if d in self.dims else n for d, n in enumerate(self.in_shape))

    def targets(self) -> Tensor:
        """For each input element, the number of the output element it goes to."""
        return torch.arange(self.outputs).reshape(self._kept()).expand(self.in_shape)

    def dense(self) -> Tensor:
        target = self.targets().reshape(1, -1)
        return (torch.arange(self.outputs).reshape(-1, 1) == target).float()

    def routes(self, count: Count) -> Count:
        if isinstance(count, Tensor):
            return count.sum(self.dims).reshape(self.out_shape) if self.dims else count
        for d in self.dims:
            count *= self.in_shape[d]
        return count
