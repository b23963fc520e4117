"""Norms of weight gradients that are not computed: of ``P = A B`` by the products of the rows of
each factor, ``‖P‖² = Σ (Aᵀ A) · (B Bᵀ)``, element by element.

The gradient of a weight is a product over the samples of a batch. Where these are far fewer than
the weight's rows and columns, that takes a fraction of the product itself, and no memory. Products
are in float64, whose rounding does not matter even if samples cancel.
"""

from __future__ import annotations

from math import sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from gradtrace.ir.program import Program, Step
from gradtrace.kernels import backend_of
from gradtrace.linops import Contract, Identity, Map, Scatter
from gradtrace.linops.indexing import located
from gradtrace.linops.scatter import SparseElements

MIN_ELEMENTS = 1 << 16
"""Smaller weights are computed."""

FEWER_PRODUCTS = 2
"""A norm is found this way if it takes so many times fewer products, in float64, than the value."""

NORM_MIN, NORM_MAX = 1e-30, 1e30
"""Beyond these norms, elements in float32 may have become 0 or infinite: they are computed."""


class UnmadeProduct(NamedTuple):
    """``moves(map(x))``, which is not computed; ``moves`` are permutations of its elements."""

    map: Contract
    x: Tensor
    moves: tuple[Map, ...] = ()

    def value(self) -> Tensor:
        """The product, computed now."""
        return _moved(self.map.apply(self.x), self.moves)

    def moved(self, move: Map) -> UnmadeProduct:
        """After one more permutation."""
        return self._replace(moves=(*self.moves, move))

    def _factors(self) -> tuple[Tensor, Tensor]:
        how = self.map.plan()
        return how.left(self.x), how.right(self.map.weight)  # (b, m, k), (b, k, n)

    def norm(self) -> float:
        """``‖map(x)‖``."""
        left, right = (factor.double() for factor in self._factors())
        return sqrt(max(0.0, float(((left.mT @ left) * (right @ right.mT)).sum())))

    def at(self, number: Tensor) -> Tensor | None:
        """The elements with these numbers; None if they are too scattered."""
        for move in reversed(self.moves):
            number = move.rows(number).source[:, 0]
        left, right = self._factors()
        steps = self.map.plan().element_strides
        if len(left) != 1:
            return None
        rows, columns = (located(number, self.map.out_shape, s) for s in (steps.row, steps.column))
        some, row = torch.unique(rows, return_inverse=True)
        others, column = torch.unique(columns, return_inverse=True)
        if len(some) * len(others) > 4 * len(number):
            return None
        return (left[0, some] @ right[0, :, others])[row, column]


class UnmadeScatter(NamedTuple):
    """``moves(map(x))``, which is 0 but in few elements; ``moves`` are permutations."""

    map: Scatter
    x: Tensor
    elements: SparseElements
    moves: tuple[Map, ...] = ()

    def moved(self, move: Map) -> UnmadeScatter:
        """After one more permutation."""
        return self._replace(moves=(*self.moves, move))

    def value(self) -> Tensor:
        """The gradient, computed now."""
        return _moved(self.map.apply(self.x), self.moves)


def _moved(found: Tensor, moves: tuple[Map, ...]) -> Tensor:
    for move in moves:
        found = move.apply(found)
    return found


def product_of(step: Step, program: Program, x: Tensor) -> UnmadeProduct | None:
    """The product of a step of one term, if its norm is cheaper to find than the product."""
    map_ = program.maps[step.terms[0].map]
    if not isinstance(map_, Contract) or map_.outputs < MIN_ELEMENTS:
        return None
    if not x.dtype is map_.weight.dtype is step.dtype is torch.float32 or not backend_of(x).host:
        return None
    how = map_.plan()
    rows, inner, columns = (how.size(letters) for letters in (how.rows, how.inner, how.columns))
    if FEWER_PRODUCTS * inner * (rows + columns) > rows * columns:
        return None
    return UnmadeProduct(map_, x)


def few_elements(step: Step, program: Program, x: Tensor) -> UnmadeScatter | None:
    """The scatter of a step of one term, the gradient of an embedding, if it adds to few elements
    of many.
    """
    map_ = program.maps[step.terms[0].map]
    if not isinstance(map_, Scatter) or not map_.sparse or map_.outputs < MIN_ELEMENTS:
        return None
    if not x.dtype is step.dtype is torch.float32 or not backend_of(x).host:
        return None
    return UnmadeScatter(map_, x, map_.few(x, torch.ones_like(x, dtype=torch.int32)))


def norm_of_sum(product: UnmadeProduct, norm: float, few: UnmadeScatter) -> float | None:
    """The norm of a product of this norm plus few elements: only these are computed. None if they
    are too scattered.
    """
    number, added = few.elements.at, few.elements.value.double()
    here = None if any(not isinstance(m, Identity) for m in few.moves) else product.at(number)
    if here is None:
        return None
    here = here.double()
    return sqrt(max(0.0, norm**2 + float((added * (2 * here + added)).sum())))
