"""Provenance: the set of components that the path of an element has visited.

A set is a Python int with one bit for each atom of the components asked for; bit 0 says that there
is a path at all. Each element holds the int32 *id* of its set; a ``ProvenanceTable`` maps ids to
sets. So a set may have any number of bits, and adding a bit to all elements costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_, or_
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gradtrace.kernels import cuda_steps, sync

Words: TypeAlias = npt.NDArray[np.uint64]
Ints: TypeAlias = npt.NDArray[np.intp]

MANY = 512
"""A palette with more entries is looked through for those that are equal, or that nobody uses."""

LONG = 16
"""More rows than this are held as words."""


class Bounds(NamedTuple):
    """Of marks no two of which are equal: each has at least and at most these bits."""

    least: int
    most: int

    def mark(self, bits: int) -> Bounds | None:
        """With more bits in every mark; None if two may be equal then."""
        if bits & self.most & ~self.least:
            return None
        return Bounds(self.least | bits, self.most | bits)

    def joined(self, other: Bounds) -> Bounds | None:
        """Of both; None if one may be equal to one of the others."""
        if not self.least & ~other.most and not other.least & ~self.most:
            return None
        return Bounds(self.least & other.least, self.most | other.most)


class PackedSets(Sequence[int]):
    """Many marks, as words of 64 bits, the lowest first: (marks, words). Not to be written to.

    With ``bounds``, where no two are known to be equal. Words may be a function: what a GPU has not
    found out yet is asked for when somebody needs it.
    """

    __slots__ = ("_words", "bounds")

    def __init__(self, words: Words | Callable[[], Words], bounds: Bounds | None = None) -> None:
        self._words = words
        self.bounds = bounds

    @property
    def words(self) -> Words:
        """The marks."""
        if callable(self._words):
            self._words = self._words()
        return self._words

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, n: Any) -> Any:
        if isinstance(n, slice):
            return PackedSets(self.words[n])
        return int.from_bytes(self.words[n].astype("<u8").tobytes(), "little")

    def __iter__(self) -> Iterator[int]:
        if self.words.shape[1] == 1:
            return iter(self.words[:, 0].tolist())
        line, step = self.words.astype("<u8").tobytes(), 8 * self.words.shape[1]
        return (int.from_bytes(line[n : n + step], "little") for n in range(0, len(line), step))


def words_of(rows: Sequence[int], extra: int = 0, width: int = 1) -> Words:
    """Marks with more bits in each, as at least so many words; not to be written to."""
    width = max(width, _width(rows, extra))
    if isinstance(rows, PackedSets) and not extra and width == rows.words.shape[1]:
        return rows.words
    found = np.empty((len(rows), width), np.uint64)
    _put(rows, extra, found)
    return found


def _width(rows: Sequence[int], extra: int) -> int:
    """How many words the marks need, with more bits in each."""
    if isinstance(rows, PackedSets):
        held: int = rows.words.shape[1]
    else:
        held = -(-max(rows, default=0).bit_length() // 64)
    return max(held, -(-extra.bit_length() // 64))


def _bounds(rows: Sequence[int], extra: int) -> Bounds | None:
    """What is known of marks with more bits in each."""
    if isinstance(rows, PackedSets):
        found = rows.bounds
    elif len({*rows}) < len(rows):
        found = None
    else:
        found = Bounds(reduce(and_, rows), reduce(or_, rows))
    return None if found is None else found.mark(extra)


def _put(rows: Sequence[int], extra: int, out: Words) -> None:
    """Write marks, with more bits in each, into as many lines of words."""
    width = out.shape[1]
    if isinstance(rows, PackedSets):
        words = rows.words
        if words.shape[1] < width:
            out[:, : words.shape[1]], out[:, words.shape[1] :] = words, 0
            words = out
    else:
        line = b"".join([row.to_bytes(8 * width, "little") for row in rows])
        words = np.frombuffer(line, "<u8").reshape(len(rows), width)
    if extra:
        np.bitwise_or(words, np.frombuffer(extra.to_bytes(8 * width, "little"), "<u8"), out)
    elif words is not out:
        out[:] = words


class ProvenanceTable(NamedTuple):
    """Number n, from 1 on, stands for the mark ``rows[n - 1] | extra``; 0 for no path.

    Many rows are a ``PackedSets``.
    """

    rows: Sequence[int] = (1,)
    extra: int = 0

    @property
    def single(self) -> bool:
        """Whether there is but one mark; no if that is not known yet."""
        return type(self.rows) is tuple and len(self.rows) == 1

    def mark(self, bits: int) -> ProvenanceTable:
        """The same numbers, with more bits in every mark."""
        return ProvenanceTable(self.rows, self.extra | bits) if bits & ~self.extra else self

    def marks(self) -> list[int]:
        """The mark of each number, from 0 on."""
        return [0, *self._whole()]

    def joined(self, other: ProvenanceTable) -> tuple[ProvenanceTable, int]:
        """Both, and what the second's numbers grow by: they follow those of the first, unless the
        two are one and the same.

        >>> ProvenanceTable((1, 3)).joined(ProvenanceTable((5,)))
        (ProvenanceTable(rows=(1, 3, 5), extra=0), 2)
        """
        if self.rows is other.rows and self.extra == other.extra:
            return self, 0
        count = len(self.rows)
        if count + len(other.rows) <= LONG:
            return ProvenanceTable((*self._whole(), *other._whole())), count
        width = max(1, _width(*self), _width(*other))
        found = np.empty((count + len(other.rows), width), np.uint64)
        _put(*self, found[:count])
        _put(*other, found[count:])
        return ProvenanceTable(PackedSets(found, self._bounds(other))), count

    def _bounds(self, other: ProvenanceTable) -> Bounds | None:
        """Those of both, one after the other."""
        mine, theirs = _bounds(*self), _bounds(*other)
        return None if mine is None or theirs is None else mine.joined(theirs)

    def _whole(self) -> list[int]:
        rows, extra = self
        return [row | extra for row in rows]

    def times(self, bits: list[int]) -> ProvenanceTable:
        """Every mark with every one of some sets of bits; number n with set i becomes number
        ``(n - 1)·len(bits) + i + 1``.
        """
        if len(self.rows) * len(bits) <= LONG:
            return ProvenanceTable(
                tuple(row | more for row in self.rows for more in bits), self.extra
            )
        words = words_of(self.rows, 0, max(1, _width(bits, 0)))
        found = words[:, None] | words_of(bits, 0, words.shape[1])
        return ProvenanceTable(PackedSets(found.reshape(-1, words.shape[1])), self.extra)


def compact(numbers: Tensor, provenance: ProvenanceTable) -> tuple[Tensor, ProvenanceTable]:
    """The same marks, without palette entries that are equal or that nobody uses."""
    count = len(provenance.rows)
    if count <= MANY:
        return numbers, provenance
    bounds, bits = _bounds(*provenance), cuda_steps.used(numbers, count + 1)
    if bits is not None and bounds is not None:
        return _closed(numbers, provenance, bounds, bits)
    there = _used(numbers, count) if bits is None else _flags(bits, count)
    used = np.flatnonzero(there[1:])
    if not len(used):
        return numbers, ProvenanceTable()
    marks = _taken(provenance, used)
    found = distinct(marks) if bounds is None else None
    if found is None:
        table = np.cumsum(there, dtype=np.int32)  # they move up
    else:
        firsts, which = found
        marks, table = marks.take(firsts, 0), np.zeros(count + 1, np.int32)
        table[used + 1] = which + 1
    smaller = ProvenanceTable(_rows(marks, bounds))
    if len(marks) == count:  # each is what it was
        return numbers, smaller
    return _renumbered(numbers, torch.from_numpy(table)), smaller


def _closed(
    numbers: Tensor, provenance: ProvenanceTable, bounds: Bounds, bits: Tensor
) -> tuple[Tensor, ProvenanceTable]:
    """``compact`` of marks no two of which are equal, by a GPU that nobody waits for: it gives new
    numbers itself, and tells which marks are left when they are asked for.
    """
    count = len(provenance.rows)
    found = _renumbered(numbers, cuda_steps.closed(bits, count + 1))
    letter = sync.AsyncCopy(bits)

    def words() -> Words:
        return _taken(provenance, np.flatnonzero(_flags(letter.read(), count)[1:]))

    return found, ProvenanceTable(PackedSets(words, bounds))


def _taken(provenance: ProvenanceTable, used: Ints) -> Words:
    """Some of the marks of a palette."""
    marks = words_of(provenance.rows, 0, _width(*provenance)).take(used, 0)
    _put(PackedSets(marks), provenance.extra, marks)
    return marks


def _rows(marks: Words, bounds: Bounds | None) -> Sequence[int]:
    """Marks no two of which are equal."""
    if len(marks) <= LONG:
        return tuple(PackedSets(marks))
    if bounds is None:
        bounds = Bounds(
            *PackedSets(np.stack([np.bitwise_and.reduce(marks), np.bitwise_or.reduce(marks)]))
        )
    return PackedSets(marks, bounds)


def distinct(words: Words) -> tuple[Ints, Ints] | None:
    """Where each mark that is not equal to an earlier one is, and which of these each one is; None
    if no two are equal.
    """
    count, width = words.shape
    odd = ODD[:width] if width <= WIDE else np.resize(ODD, width)
    keys = words @ odd + (words >> np.uint64(32)) @ odd[::-1]  # of high bits a product keeps few
    line = np.sort(keys)
    if (line[1:] != line[:-1]).all():
        return None
    # the upper bits of a key, then the place: what is equal lies together, in order
    low, places = np.uint64(count.bit_length()), np.arange(count)
    line = np.sort((keys >> low << low) | places.astype(np.uint64))
    order = (line & ((np.uint64(1) << low) - np.uint64(1))).astype(np.intp)
    line >>= low
    heads = np.concatenate([[True], line[1:] != line[:-1]])
    first = np.empty_like(places)
    first[order] = order[heads][np.cumsum(heads) - 1]
    if (words.take(first, 0) != words).any():  # some that are not equal have one key
        _, firsts, which = np.unique(words, return_index=True, return_inverse=True, axis=0)
        first = firsts[which.reshape(-1)]
    heads = first == places
    return np.flatnonzero(heads), (np.cumsum(heads) - 1)[first]


WIDE = 256
ODD = np.random.default_rng(0).integers(0, 1 << 63, WIDE, np.uint64) * np.uint64(2) + np.uint64(1)
"""What words are multiplied with, so that sums of them hardly ever are the same by chance."""


def _used(numbers: Tensor, count: int) -> npt.NDArray[np.bool_]:
    """Which numbers, from 1 on, are there; 0 is not."""
    if sync.would_sync(numbers):  # to count them would wait for how many there are
        flags = torch.zeros(count + 1, dtype=torch.bool, device=numbers.device)
        there = flags.index_fill_(0, numbers.reshape(-1).long(), True).cpu().numpy()
    else:
        there = torch.bincount(numbers.reshape(-1), minlength=count + 1).cpu().numpy() != 0
    there[0] = False
    return there


def _flags(bits: Tensor, count: int) -> npt.NDArray[np.bool_]:
    """``_used``, of a bit for each number."""
    line = bits.cpu().numpy().view(np.uint8)
    there = np.unpackbits(line, count=count + 1, bitorder="little").view(np.bool_)
    there[0] = False
    return there


def _renumbered(numbers: Tensor, table: Tensor) -> Tensor:
    """``table[numbers]``."""
    table = table.to(numbers.device, non_blocking=True)
    found = cuda_steps.renumbered(numbers, table)
    return table[numbers] if found is None else found


@dataclass
class ComponentBits:
    """Which bits a path gets: ``block`` for visiting a block at all, ``position`` for leaving it to
    an argument, ``slices`` for the slices of a labelled tensor, along a dimension.
    """

    bits: int
    block: dict[int, int]
    position: dict[tuple[int, int], int]
    slices: dict[int, tuple[int, list[int]]]


NO_MARKS = ComponentBits(1, {}, {}, {})
"""Only whether there is a path."""


def sliced(
    numbers: Tensor, provenance: ProvenanceTable, dim: int, bits: list[int]
) -> tuple[Tensor, ProvenanceTable]:
    """Marks of a tensor whose slices along a dimension each add bits of their own."""
    # by identity: whole numbers of one bit have few different hashes, and one name one number
    ones = {id(each): each for each in bits}
    kinds, places = list(ones.values()), {each: n for n, each in enumerate(ones)}
    which = torch.tensor([places[id(b)] for b in bits], dtype=torch.int32, device=numbers.device)
    shape = [len(bits) if d == dim else 1 for d in range(numbers.dim())]
    product = (numbers - 1) * len(kinds) + which.reshape(shape) + 1
    found = torch.where(numbers == 0, 0, product)
    return compact(found, provenance.times(kinds))
