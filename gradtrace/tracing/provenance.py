"""Provenance: the set of components that the path of an element has visited.

A set is a Python int with one bit for each atom of the requested components; bit 0 says that there
is a path at all. Each element holds the int32 *id* of its set; a ``ProvenanceTable`` maps ids to
sets. So a set may have any number of bits, and adding a bit to all elements costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from operator import and_, or_
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gradtrace.kernels import Backend
from gradtrace.kernels.capture import NotCapturable
from gradtrace.tracing import fixed_pass
from gradtrace.tracing.fixed_pass import FixedPass

Words: TypeAlias = npt.NDArray[np.uint64]
Ints: TypeAlias = npt.NDArray[np.intp]

COMPACT_ABOVE_ENTRIES = 512
"""A provenance table with more entries is searched for equal and unused ones; see ``compact``."""

TUPLE_MAX_ROWS = 16
"""A table with more rows is stored as ``PackedSets`` instead of a tuple of ints."""


class Bounds(NamedTuple):
    """Bounds of distinct provenance sets: each contains ``least`` and is contained in ``most``.

    While bounds are known, no two sets of the table are equal, and none need be compared.
    """

    least: int
    most: int

    def with_bits(self, bits: int) -> Bounds | None:
        """With bits added to every set; None if two sets may then be equal."""
        if bits & self.most & ~self.least:
            return None
        return Bounds(self.least | bits, self.most | bits)

    def joined(self, other: Bounds) -> Bounds | None:
        """Bounds of the union of two tables; None if a set may be in both."""
        if not self.least & ~other.most and not other.least & ~self.most:
            return None
        return Bounds(self.least & other.least, self.most | other.most)


class PackedSets(Sequence[int]):
    """Provenance sets as 64-bit words, the lowest first: (sets, words). Read-only.

    ``bounds`` is given where all sets are known to be distinct. ``words`` may be a function, called
    at the first access: reading a result of the GPU then synchronises. ``fitted``: ``compact`` made
    it, and it has not grown since.
    """

    __slots__ = ("_words", "bounds", "fitted")

    def __init__(
        self,
        words: Words | Callable[[], Words],
        bounds: Bounds | None = None,
        fitted: bool = False,
    ) -> None:
        self._words = words
        self.bounds = bounds
        self.fitted = fitted

    @property
    def words(self) -> Words:
        """The sets, (sets, words); computed at the first access."""
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


class FixedSets(PackedSets):
    """Sets whose number is fixed, though which they are follows from what a pass of fixed sizes
    finds; the last ones are of no element.
    """

    __slots__ = ("_make", "_size")

    def __init__(
        self,
        fixed: FixedPass,
        make: Callable[[], Words],
        bounds: Bounds | None,
        size: int,
        fitted: bool = False,
    ) -> None:
        super().__init__(make, bounds, fitted)
        self._make, self._size = make, size
        fixed.register(self)

    def __len__(self) -> int:
        return self._size

    def forget(self) -> None:
        """Make them anew at the next access."""
        self._words = self._make


def _is_fixed(rows: Sequence[int]) -> bool:
    return isinstance(rows, FixedSets)


def words_of(rows: Sequence[int], extra: int = 0, width: int = 1) -> Words:
    """Provenance sets, each with the bits ``extra``, as at least ``width`` words; read-only."""
    width = max(width, _width(rows, extra))
    if isinstance(rows, PackedSets) and not extra and width == rows.words.shape[1]:
        return rows.words
    found = np.empty((len(rows), width), np.uint64)
    _write(rows, extra, found)
    return found


def _width(rows: Sequence[int], extra: int) -> int:
    """How many words a set needs, with the bits ``extra``."""
    if isinstance(rows, PackedSets):
        held: int = rows.words.shape[1]
    else:
        held = -(-max(rows, default=0).bit_length() // 64)
    return max(held, -(-extra.bit_length() // 64))


def _bounds(rows: Sequence[int], extra: int) -> Bounds | None:
    """Bounds of the sets with ``extra`` added; None if two of them may be equal."""
    if isinstance(rows, PackedSets):
        found = rows.bounds
    elif len({*rows}) < len(rows):
        found = None
    else:
        found = Bounds(reduce(and_, rows), reduce(or_, rows))
    return None if found is None else found.with_bits(extra)


def _write(rows: Sequence[int], extra: int, out: Words) -> None:
    """Write the sets, each with the bits ``extra``, into ``out``: (sets, words)."""
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
    """Maps ids to provenance sets: id n ≥ 1 is the set ``rows[n - 1] | extra``; id 0 is no path.

    More than ``TUPLE_MAX_ROWS`` rows are a ``PackedSets``.
    """

    rows: Sequence[int] = (1,)
    extra: int = 0

    @property
    def single(self) -> bool:
        """Whether there is only one set; False if the number is not known without a sync."""
        return type(self.rows) is tuple and len(self.rows) == 1

    def with_bits(self, bits: int) -> ProvenanceTable:
        """The same ids, with bits added to every set."""
        return ProvenanceTable(self.rows, self.extra | bits) if bits & ~self.extra else self

    def sets(self) -> list[int]:
        """The set of each id, from 0 on."""
        return [0, *self._whole()]

    def joined(self, other: ProvenanceTable) -> tuple[ProvenanceTable, int]:
        """Both tables concatenated, and the offset of the second's ids; 0 if both are the same
        table.

        >>> ProvenanceTable((1, 3)).joined(ProvenanceTable((5,)))
        (ProvenanceTable(rows=(1, 3, 5), extra=0), 2)
        """
        if self.rows is other.rows and self.extra == other.extra:
            return self, 0
        count = len(self.rows)
        fixed = fixed_pass.current()
        if fixed is not None and (_is_fixed(self.rows) or _is_fixed(other.rows)):
            make, size = partial(self._beside, other), count + len(other.rows)
            return ProvenanceTable(FixedSets(fixed, make, self._bounds(other), size)), count
        if count + len(other.rows) <= TUPLE_MAX_ROWS:
            return ProvenanceTable((*self._whole(), *other._whole())), count
        return ProvenanceTable(PackedSets(self._beside(other), self._bounds(other))), count

    def _beside(self, other: ProvenanceTable) -> Words:
        """The sets of both, one after the other."""
        count, width = len(self.rows), max(1, _width(*self), _width(*other))
        found = np.empty((count + len(other.rows), width), np.uint64)
        _write(*self, found[:count])
        _write(*other, found[count:])
        return found

    def _bounds(self, other: ProvenanceTable) -> Bounds | None:
        """Bounds of the concatenation."""
        mine, theirs = _bounds(*self), _bounds(*other)
        return None if mine is None or theirs is None else mine.joined(theirs)

    def _whole(self) -> list[int]:
        rows, extra = self
        return [row | extra for row in rows]

    def times(self, bits: list[int]) -> ProvenanceTable:
        """The product table: each set with each of ``bits`` added. Id n with ``bits[i]`` becomes
        id ``(n - 1)·len(bits) + i + 1``.
        """
        if len(self.rows) * len(bits) <= TUPLE_MAX_ROWS:
            return ProvenanceTable(
                tuple(row | more for row in self.rows for more in bits), self.extra
            )
        words = words_of(self.rows, 0, max(1, _width(bits, 0)))
        found = words[:, None] | words_of(bits, 0, words.shape[1])
        return ProvenanceTable(PackedSets(found.reshape(-1, words.shape[1])), self.extra)


def compact(
    ids: Tensor, provenance: ProvenanceTable, backend: Backend
) -> tuple[Tensor, ProvenanceTable]:
    """Remove duplicate and unused entries from a large table, and renumber the ids."""
    fitted = isinstance(provenance.rows, PackedSets) and provenance.rows.fitted
    bounds = _bounds(*provenance) if fitted else None
    if bounds is not None:  # it has not grown, and no two sets became equal
        return ids, provenance
    count = len(provenance.rows)
    if count <= COMPACT_ABOVE_ENTRIES:
        return ids, provenance
    bounds, fixed = _bounds(*provenance), fixed_pass.current()
    if fixed is not None:
        return _fitted(ids, provenance, bounds, fixed)
    closed = None if bounds is None else backend.close_gaps(ids, count + 1)
    if closed is not None and bounds is not None:
        renumbered, flags = closed

        def words() -> Words:  # reads back which entries are used
            return _selected(provenance, np.flatnonzero(flags().numpy()[1:]))

        return renumbered, ProvenanceTable(PackedSets(words, bounds, fitted=True))
    there = backend.used(ids, count + 1).numpy()
    there[0] = False
    used = np.flatnonzero(there[1:])
    if not len(used):
        return ids, ProvenanceTable()
    sets = _selected(provenance, used)
    found = distinct(sets) if bounds is None else None
    if found is None:
        table = np.cumsum(there, dtype=np.int32)  # only unused entries are removed
    else:
        firsts, which = found
        sets, table = sets.take(firsts, 0), np.zeros(count + 1, np.int32)
        table[used + 1] = which + 1
    smaller = ProvenanceTable(_rows(sets, bounds))
    if len(sets) == count:  # nothing was removed: ids are unchanged
        return ids, smaller
    return backend.renumber(ids, torch.from_numpy(table)), smaller


def _fitted(
    ids: Tensor, provenance: ProvenanceTable, bounds: Bounds | None, fixed: FixedPass
) -> tuple[Tensor, ProvenanceTable]:
    """``compact`` into a table of fixed capacity."""
    if bounds is None:
        raise NotCapturable("two sets of components may be the same")
    count, backend = len(provenance.rows), fixed.backend
    table, capacity, number = fixed.table(*backend.gaps(ids, count + 1), count + 1)

    def words() -> Words:
        found = _selected(provenance, np.flatnonzero(fixed.used(number).numpy()[1:]))
        rest = np.zeros((capacity - len(found), found.shape[1]), np.uint64)
        rest[:, :1] = 1  # as if there were a path
        return np.concatenate([found, rest])

    rows = FixedSets(fixed, words, bounds, capacity, fitted=True)
    return backend.renumber(ids, table), ProvenanceTable(rows)


def _selected(provenance: ProvenanceTable, used: Ints) -> Words:
    """The rows ``used`` of a table, with ``extra`` added."""
    sets = words_of(provenance.rows, 0, _width(*provenance)).take(used, 0)
    _write(PackedSets(sets), provenance.extra, sets)
    return sets


def _rows(sets: Words, bounds: Bounds | None) -> Sequence[int]:
    """Distinct sets as the rows of a table."""
    if len(sets) <= TUPLE_MAX_ROWS:
        return tuple(PackedSets(sets))
    if bounds is None:
        bounds = Bounds(
            *PackedSets(np.stack([np.bitwise_and.reduce(sets), np.bitwise_or.reduce(sets)]))
        )
    return PackedSets(sets, bounds, fitted=True)


def distinct(words: Words) -> tuple[Ints, Ints] | None:
    """The indices of first occurrences, and for each set the index of its own among these; None if
    all sets are distinct.
    """
    count, width = words.shape
    odd = ODD[:width] if width <= HASH_WORDS else np.resize(ODD, width)
    keys = words @ odd + (words >> np.uint64(32)) @ odd[::-1]  # products lose high bits
    line = np.sort(keys)
    if (line[1:] != line[:-1]).all():
        return None
    # sort (upper bits of the key, index): equal keys become adjacent, in index order
    low, places = np.uint64(count.bit_length()), np.arange(count)
    line = np.sort((keys >> low << low) | places.astype(np.uint64))
    order = (line & ((np.uint64(1) << low) - np.uint64(1))).astype(np.intp)
    line >>= low
    heads = np.concatenate([[True], line[1:] != line[:-1]])
    first = np.empty_like(places)
    first[order] = order[heads][np.cumsum(heads) - 1]
    if (words.take(first, 0) != words).any():  # hash collision
        _, firsts, which = np.unique(words, return_index=True, return_inverse=True, axis=0)
        first = firsts[which.reshape(-1)]
    heads = first == places
    return np.flatnonzero(heads), (np.cumsum(heads) - 1)[first]


HASH_WORDS = 256
ODD = np.random.default_rng(0).integers(0, 1 << 63, HASH_WORDS, np.uint64) * np.uint64(
    2
) + np.uint64(1)
"""Random odd multipliers of the hash in ``distinct``."""


def sliced(
    ids: Tensor, provenance: ProvenanceTable, dim: int, bits: list[int], backend: Backend
) -> tuple[Tensor, ProvenanceTable]:
    """Add ``bits[k]`` to the provenance of slice k along a dimension."""
    fixed_pass.refuse("labelled slices")
    # by identity: ints of one bit have few distinct hashes, and each name has one int object
    ones = {id(each): each for each in bits}
    kinds, places = list(ones.values()), {each: n for n, each in enumerate(ones)}
    which = torch.tensor([places[id(b)] for b in bits], dtype=torch.int32, device=ids.device)
    shape = [len(bits) if d == dim else 1 for d in range(ids.dim())]
    product = (ids - 1) * len(kinds) + which.reshape(shape) + 1
    found = torch.where(ids == 0, 0, product)
    return compact(found, provenance.times(kinds), backend)
