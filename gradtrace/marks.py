"""Marks: which components the path of an element has visited.

A mark is a set of bits, held in a whole number: bit 0 says that there is a path, each other bit is
an atom of the components that are asked for. Elements hold only the *number* of their mark, an
int32; a ``Palette`` says which mark a number stands for. So a mark may have any number of bits, and
to add a bit to all elements costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gradtrace import waiting

MANY = 512
"""A palette with more entries is looked through for those that are equal, or that nobody uses."""


class Palette(NamedTuple):
    """Number n, from 1 on, stands for the mark ``rows[n - 1] | extra``; 0 for no path."""

    rows: tuple[int, ...] = (1,)
    extra: int = 0

    def mark(self, bits: int) -> Palette:
        """The same numbers, with more bits in every mark."""
        return Palette(self.rows, self.extra | bits) if bits & ~self.extra else self

    def marks(self) -> list[int]:
        """The mark of each number, from 0 on."""
        return [0, *self._whole()]

    def then(self, other: Palette) -> tuple[Palette, int]:
        """Both, and what the second's numbers grow by: they follow those of the first, unless the
        two are one and the same.

        >>> Palette((1, 3)).then(Palette((5,)))
        (Palette(rows=(1, 3, 5), extra=0), 2)
        """
        if self.rows is other.rows and self.extra == other.extra:
            return self, 0
        return Palette((*self._whole(), *other._whole())), len(self.rows)

    def _whole(self) -> list[int]:
        rows, extra = self
        return [row | extra for row in rows]

    def times(self, bits: list[int]) -> Palette:
        """Every mark with every one of some sets of bits; number n with set i becomes number
        ``(n - 1)·len(bits) + i + 1``.
        """
        return Palette(tuple(row | more for row in self.rows for more in bits), self.extra)


def compact(numbers: Tensor, palette: Palette) -> tuple[Tensor, Palette]:
    """The same marks, without palette entries that are equal or that nobody uses."""
    count = len(palette.rows)
    if count <= MANY:
        return numbers, palette
    places: dict[int, int] = {}
    rows, extra = palette
    remap, used = np.zeros(count + 1, np.int32), np.flatnonzero(_used(numbers, count))
    marks = [rows[n] | extra for n in used.tolist()]
    remap[used + 1] = [places.setdefault(mark, len(places) + 1) for mark in marks]
    table = torch.from_numpy(remap).to(numbers.device, non_blocking=True)
    return table[numbers], Palette(tuple(places) or (1,))


def _used(numbers: Tensor, count: int) -> npt.NDArray[np.bool_]:
    """Which numbers, from 1 on, are there."""
    if waiting.avoid(numbers):  # to count them would wait for how many there are
        there = torch.zeros(count + 1, dtype=torch.bool, device=numbers.device)
        there.index_fill_(0, numbers.reshape(-1).long(), True)
    else:
        there = torch.bincount(numbers.reshape(-1), minlength=count + 1) != 0
    return there.cpu().numpy()[1:]


@dataclass
class Marks:
    """Which bits a path gets: ``block`` for visiting a block at all, ``position`` for leaving it to
    an argument, ``slices`` for the slices of a labelled tensor, along a dimension.
    """

    bits: int
    block: dict[int, int]
    position: dict[tuple[int, int], int]
    slices: dict[int, tuple[int, list[int]]]


NO_MARKS = Marks(1, {}, {}, {})
"""Only whether there is a path."""


def sliced(numbers: Tensor, palette: Palette, dim: int, bits: list[int]) -> tuple[Tensor, Palette]:
    """Marks of a tensor whose slices along a dimension each add bits of their own."""
    kinds = list(dict.fromkeys(bits))
    which = torch.tensor([kinds.index(b) for b in bits], dtype=torch.int32, device=numbers.device)
    shape = [len(bits) if d == dim else 1 for d in range(numbers.dim())]
    product = (numbers - 1) * len(kinds) + which.reshape(shape) + 1
    found = torch.where(numbers == 0, 0, product)
    return compact(found, palette.times(kinds))
