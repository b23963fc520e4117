"""Marks: which components the path of an element has visited.

A mark is a set of bits, held in a whole number: bit 0 says that there is a path, each other bit is
an atom of the components that are asked for. Elements hold only the *number* of their mark, an
int32; a ``Palette`` says which mark a number stands for. So a mark may have any number of bits, and
to add a bit to all elements costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gradtrace import waiting

Words: TypeAlias = npt.NDArray[np.uint64]
Ints: TypeAlias = npt.NDArray[np.intp]

MANY = 512
"""A palette with more entries is looked through for those that are equal, or that nobody uses."""

LONG = 256
"""More rows than this are held as words."""


class Table(Sequence[int]):
    """Many marks, as words of 64 bits, the lowest first: (marks, words). Not to be written to."""

    __slots__ = ("words",)

    def __init__(self, words: Words) -> None:
        self.words = words

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, n: Any) -> Any:
        if isinstance(n, slice):
            return Table(self.words[n])
        return int.from_bytes(self.words[n].astype("<u8").tobytes(), "little")


def words_of(rows: Sequence[int], extra: int = 0, width: int = 1) -> Words:
    """Marks with more bits in each, as at least so many words."""
    if isinstance(rows, Table):
        width = max(width, rows.words.shape[1], -(-extra.bit_length() // 64))
        found = np.zeros((len(rows), width), np.uint64)
        found[:, : rows.words.shape[1]] = rows.words
    else:
        longest = max((row.bit_length() for row in rows), default=0)
        width = max(width, -(-max(longest, extra.bit_length()) // 64))
        line = b"".join([row.to_bytes(8 * width, "little") for row in rows])
        found = np.frombuffer(line, "<u8").reshape(len(rows), width).astype(np.uint64)
    if extra:
        found |= np.frombuffer(extra.to_bytes(8 * width, "little"), "<u8")
    return found


class Palette(NamedTuple):
    """Number n, from 1 on, stands for the mark ``rows[n - 1] | extra``; 0 for no path.

    Many rows are a ``Table``.
    """

    rows: Sequence[int] = (1,)
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
        count = len(self.rows)
        if count + len(other.rows) <= LONG:
            return Palette((*self._whole(), *other._whole())), count
        first = words_of(*self)
        second = words_of(*other, first.shape[1])
        first = words_of(Table(first), 0, second.shape[1])
        return Palette(Table(np.concatenate([first, second]))), count

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
    remap, used = np.zeros(count + 1, np.int32), np.flatnonzero(_used(numbers, count))
    marks = words_of(*palette)[used]
    firsts, which = distinct(marks)
    remap[used + 1] = which + 1
    rows: Sequence[int] = Table(marks[firsts])
    rows = rows if len(rows) > LONG else tuple(rows) or (1,)
    return torch.from_numpy(remap).to(numbers.device, non_blocking=True)[numbers], Palette(rows)


def distinct(words: Words) -> tuple[Ints, Ints]:
    """Where each mark that is not equal to an earlier one is, and which of these each one is."""
    width = words.shape[1]
    keys = (words * ODD[:width]).sum(1, dtype=np.uint64) if width <= WIDE else words[:, 0]
    _, firsts, which = np.unique(keys, return_index=True, return_inverse=True)
    if (words[firsts[which]] != words).any():  # some that are not equal have one key
        _, firsts, which = np.unique(words, return_index=True, return_inverse=True, axis=0)
    order = np.argsort(firsts)
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    return firsts[order], place[which.reshape(-1)]


WIDE = 256
ODD = np.random.default_rng(0).integers(0, 1 << 63, WIDE, np.uint64) * np.uint64(2) + np.uint64(1)
"""What words are multiplied with, so that sums of them hardly ever are the same by chance."""


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
