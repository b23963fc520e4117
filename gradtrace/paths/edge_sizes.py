"""The size of the largest single contribution to elements of a value: how ``edge`` compares users.

Found for few elements, row by row, by walking back from an operator's result to its sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gradtrace.ir.bound import BoundTerm
from gradtrace.ir.passes.edge_sizes import SingleContributions
from gradtrace.linops import Map
from gradtrace.linops.base import Best
from gradtrace.semirings.base import wide


@dataclass(frozen=True)
class EdgeSizes:
    """Largest single contributions |w · g| within one operator.

    ``gradient(value, at)``: |gradient| of elements of a value. ``offer(term, at)``: the largest
    contribution of a term, made of gradients. ``nested(value, at)``: the largest single
    contribution to a sum of sums, None for other values.
    """

    single: SingleContributions
    makers: Mapping[int, tuple[BoundTerm, ...]]
    gradient: Callable[[int, Tensor], Tensor]
    offer: Callable[[BoundTerm, Tensor], Best]
    nested: Callable[[int, Tensor], Tensor | None]

    def chooses(self, out: int, terms: tuple[BoundTerm, ...]) -> bool:
        """Whether the way on from a value depends on the sizes of single contributions: where it
        has several terms, and where a sum is scaled, as a sum that is 0 may have contributions.
        """
        if len(terms) > 1:
            return True
        (term,) = terms
        return not term.map.is_gather and self.single.carries(out, term.value)

    def offers(self, out: int, at: Tensor) -> list[Best]:
        """For each term of a value the largest single contribution to its elements ``at``."""
        found = [self._offer(out, term, at) for term in self.makers[out]]
        dtype = found[0].value.dtype
        return [best._replace(value=best.value.to(dtype)) for best in found]

    def _offer(self, out: int, term: BoundTerm, at: Tensor) -> Best:
        if not self.single.carries(out, term.value):
            return self.offer(term, at)
        source, weight = _single_row(term.map, at)
        size = self._at(term.value, source.clamp(min=0))
        size = _weighed(size, source, weight)
        return Best(size, torch.where(size == 0, -1, source))

    def _at(self, value: int, at: Tensor) -> Tensor:
        """The largest single contribution to elements of a value, within its operator."""
        after: list[tuple[Tensor, Tensor | None]] = []  # what follows the operator's sum
        size = self.nested(value, at)
        while size is None:
            terms = self.makers[value]
            if value not in self.single.summed:
                size = self.gradient(value, at)
            elif len(terms) > 1 or not self.single.carries(value, terms[0].value):
                size = torch.stack([best.value for best in self.offers(value, at)]).amax(0)
            else:
                source, weight = _single_row(terms[0].map, at)
                after.append((source, weight))
                value, at = terms[0].value, source.clamp(min=0)
                size = self.nested(value, at)
        for source, weight in reversed(after):
            size = _weighed(size, source, weight)
        return size


def _single_row(map_: Map, at: Tensor) -> tuple[Tensor, Tensor | None]:
    """The only source of each element ``at`` (-1: none), and its weight; None: all are 1."""
    source, weight = map_.rows(at)
    if map_.unit_weights or map_.is_gather:
        return source[:, 0], None
    return source[:, 0], weight.expand(source.shape)[:, 0]


def _weighed(size: Tensor, source: Tensor, weight: Tensor | None) -> Tensor:
    size = size if weight is None else (wide(weight) * size).abs().to(size.dtype)
    return torch.where(source < 0, 0, size)
