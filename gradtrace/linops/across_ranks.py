"""Maps between what a rank holds of a tensor and the whole of it."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from gradtrace.errors import Unsupported
from gradtrace.linops.base import Best, Count, Map, Rows
from gradtrace.linops.gather import Index
from gradtrace.pytorch.dtensor import Layout
from gradtrace.semirings import Semiring, Value
from gradtrace.types import Shape


class RankGather(Map):
    """From the part that each rank holds of a tensor to the whole of it.

    ``out[i] = in[j]`` of the rank that holds element i. All ranks apply it together, each to its
    own part, and all get the same result. Its rows lie on other ranks, so it has none.
    """

    __slots__ = ("layout",)
    across_ranks = single_source = single_target = unit_weights = True

    def __init__(self, layout: Layout, in_shape: Shape) -> None:
        self.layout = layout
        self.in_shape, self.out_shape = in_shape, layout.shape

    def structure(self) -> object:
        return RankGather, self.layout.dims, self.out_shape

    def apply(self, x: Tensor) -> Tensor:
        return self.layout.gather(x)

    def apply_in(self, x: Value, semiring: Semiring) -> Value:
        return tuple(self.layout.gather(part) for part in x)

    def max_source(self, x: Tensor) -> Tensor:
        return self.layout.gather(x)

    def routes(self, count: Count, device: torch.device) -> Count:
        return self.layout.gather(count) if isinstance(count, Tensor) else count

    def copies(self, count: int) -> Map:
        return RankGather(self.layout.batched(count), (count, *self.in_shape))

    def rows(self, at: Tensor) -> Rows:
        self._refuse()

    def largest(self, x: Tensor, at: Tensor | None = None) -> Best:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise Unsupported(
            "single paths of a tensor-parallel model lead from one rank to another, and are not "
            "followed; influence, flow and gradients are. Load the full state dict into a plain "
            "module for the others"
        )


def own_part(layout: Layout) -> Index:
    """From a whole tensor to the part that this rank holds."""
    there = torch.empty(layout.shape, dtype=torch.uint8, device=layout.mesh.device_type)
    shape = tuple(layout.part(there).shape)
    return Index(layout.part, layout.shape, shape, injective=True)
