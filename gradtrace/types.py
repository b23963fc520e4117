"""Type aliases and names shared by all packages, and the numbers of elements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

Shape: TypeAlias = tuple[int, ...]

RULES = ("greedy", "edge", "viterbi")
"""The rules by which a path chooses: by what each user hands back, by single edges, by the product.
"""


def unravel(element: int, shape: Shape) -> Shape:
    """The multi-index of an element's flat index. (``torch.unravel_index`` imports sympy, which
    takes a second or two.)
    """
    found = []
    for size in reversed(shape):
        found.append(element % size)
        element //= size
    return tuple(reversed(found))


def ravel(index: Sequence[int], shape: Shape) -> int:
    """The flat index of a multi-index."""
    number = 0
    for i, size in zip(index, shape):
        number = number * size + i
    return number
