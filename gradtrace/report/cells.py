"""Heat maps: the elements of a leaf that are shown, one for each cell of a grid."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from gradtrace.report.model import Floats, Ints
from gradtrace.report.tuning import LEAF_MAX_CELLS
from gradtrace.types import Shape

MAX_NUMBERED_ELEMENTS = 2**31 - 1
"""The most elements of a tensor whose elements the page can number."""


class Grid(NamedTuple):
    """The size of a leaf as a matrix, and the number of cells along each side."""

    height: int
    width: int
    rows: int
    columns: int


class Cells(NamedTuple):
    """The element of the largest |gradient| in each cell, as flat index, and its gradient."""

    grid: Grid
    element: Ints
    gradient: Floats


def grids(shapes: Sequence[Shape], budget: int) -> list[Grid]:
    """A grid for each leaf, with about ``budget`` cells at most in total: small leaves have a cell
    for each element, the others share the remaining cells equally.
    """
    low, high, alike = 1, LEAF_MAX_CELLS, Counter(shapes)
    while low < high:
        most = -(-(low + high) // 2)
        cuts = {shape: grid(shape, most) for shape in alike}
        if sum(cuts[s].rows * cuts[s].columns * many for s, many in alike.items()) <= budget:
            low = most
        else:
            high = most - 1
    cuts = {shape: grid(shape, low) for shape in alike}
    return [cuts[shape] for shape in shapes]


def grid(shape: Shape, most: int) -> Grid:
    """A leaf as a matrix: the first dimension by all others, a vector as one row.

    >>> grid((4, 5), 2304), grid((100, 3, 20), 16), grid((7,), 4)
    (Grid(height=4, width=5, rows=4, columns=5), Grid(height=100, width=60, rows=4, columns=4),
     Grid(height=1, width=7, rows=1, columns=4))
    """
    height = shape[0] if len(shape) > 1 else 1
    width = prod(shape[1:] if len(shape) > 1 else shape)
    if height * width <= most:
        return Grid(height, width, height, width)
    rows = max(1, min(height, int(most**0.5)))
    columns = max(1, min(width, most // rows))
    return Grid(height, width, max(1, min(height, most // columns)), columns)


def cells(gradient: Tensor, cut: Grid) -> Cells:
    """The element of largest |gradient| in each cell, the first of equal ones; NaN is largest."""
    height, width, rows, columns = cut
    flat = gradient.reshape(-1)
    if (rows, columns) == (height, width):
        element = torch.arange(flat.numel(), device=flat.device)
    else:
        size = flat.reshape(height, width).abs()
        size = torch.where(size.isnan(), torch.inf, size)
        largest, column = _largest(size, columns)  # (height, columns)
        _, row = _largest(largest.T, rows)  # (columns, rows)
        element = (row.T * width + column.gather(0, row.T)).reshape(-1)
    return Cells(cut, element.int().cpu().numpy(), flat[element].double().cpu().numpy())


def _largest(x: Tensor, parts: int) -> tuple[Tensor, Tensor]:
    """The largest entry of each part of every row, and the first column that has it; column ``i``
    is in part ``i · parts // size``.

    Parts differ by one column at most. Each is read with as many as the longest has: some with
    their last column twice.
    """
    size = x.shape[1]
    starts = torch.arange(parts + 1).mul_(size).add_(parts - 1).div_(parts, rounding_mode="floor")
    columns = starts[:-1, None] + torch.arange(-(-size // parts))
    most = x[:, torch.minimum(columns, starts[1:, None] - 1).to(x.device)].max(2)
    return most.values, most.indices + starts[:-1].to(x.device)
