"""What was counted at all leaves, added up by component: on the device that counted it.

There may be millions of groups, of a leaf, a pair and a mark, and hundreds of components.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gradtrace.marks import Words, words_of

Bools: TypeAlias = npt.NDArray[np.bool_]
Floats: TypeAlias = npt.NDArray[np.float64]

ENTRIES = (1 << 22, 1 << 24)
"""How many pairs of a group and a component to look at in one go, and how many on a GPU."""


class Counts(NamedTuple):
    """The elements of a leaf by mark: how many (int64), and Σ |gradient| (float64).

    Entry ``blank + n`` is for the mark ``rows[n % len(rows)] | extra``, a path if that has bit 0,
    and for pair ``pair + n // len(rows)``; those before it are for no path. They stay on the leaf's
    device until all leaves are counted, so that nobody waits for them. Several leaves may share
    tensors: the entries of this one are ``size`` of them from ``start`` on (None: all).
    """

    counts: Tensor
    sums: Tensor
    rows: Sequence[int]
    extra: int
    pair: int
    blank: int = 0
    start: int = 0
    size: int | None = None


class Word(NamedTuple):
    """A word of the bits of components: its number, which of them have any there, and these."""

    number: int
    which: Tensor
    bits: Tensor


def sparse(words: Words) -> Iterator[tuple[int, npt.NDArray[np.intp], Words]]:
    """Of each word those that have bits: most components have all of theirs in one."""
    for n, word in enumerate(words.T):
        which = np.flatnonzero(word)
        if len(which):
            yield n, which, word[which]


class Sums(NamedTuple):
    """By pair and component, the number of elements and the sum of those that could pass it, and of
    those that do; how many elements of each leaf have a path; and whether all sums are finite.
    """

    eligible: Floats
    through: Floats
    totals: Floats
    finite: bool


class Groups(NamedTuple):
    """The elements of all leaves by leaf, pair and mark; such as have no path count for nothing.
    A mark is a row and the bits of its leaf.
    """

    leaf: Tensor  # in ascending order
    pair: Tensor
    row: Tensor
    rows: Tensor  # of all palettes: (rows, words)
    extra: Tensor  # of each leaf: (leaves, words)
    counts: Tensor  # int64
    sums: Tensor  # float64

    def _reached(self) -> Groups:
        """Those that have a path; others count for nothing."""
        there = (self.rows[self.row, 0] | self.extra[self.leaf, 0]) & 1 != 0
        return self._replace(
            counts=torch.where(there, self.counts, 0), sums=torch.where(there, self.sums, 0.0)
        )

    def totals(self) -> Tensor:
        """How many elements of each leaf have a path; exact below 2**53."""
        leaves = torch.arange(len(self.extra), device=self.leaf.device)
        ends = torch.searchsorted(self.leaf, leaves, right=True)
        until = torch.cat([self.counts.new_zeros(1), self.counts.cumsum(0)])[ends]
        return torch.diff(until, prepend=until.new_zeros(1)).double()

    def added(self, pairs: int, could: Bools, bits: list[int]) -> Sums:
        """Of the groups whose leaf could pass a component (leaves, components), and of those whose
        mark does, that has any of its bits. Sums that are not finite count for nothing.
        """
        device = self.leaf.device
        wanted = [
            Word(w, lent(which, device), lent(some, device))
            for w, which, some in sparse(words_of(bits)[:, : self.rows.shape[1]])
        ]
        able, sums = lent(could, device), self.sums.nan_to_num(0.0, 0.0, 0.0)
        both = torch.stack([self.counts.double(), sums], 1)
        found = torch.zeros(pairs, 2, len(bits), 2, dtype=torch.float64, device=device)
        most = max(1, ENTRIES[device.type == "cuda"] // max(1, len(bits)))
        for pair, mine in self._runs(pairs):
            for n in range(0, len(mine), most):
                found[pair] += self._some(mine[n : n + most], able, wanted, both)
        odd = (both[:, 1] != self.sums).any().double()
        told = torch.cat([odd.reshape(1), self.totals(), found.reshape(-1)]).cpu()  # one wait
        unlike, totals, line = np.split(told.numpy(), [1, 1 + len(self.extra)])
        eligible, through = line.reshape(found.shape).transpose(1, 0, 2, 3)
        return Sums(eligible, through, totals, not unlike.any())

    def _some(self, at: Tensor, could: Tensor, wanted: Sequence[Word], sums: Tensor) -> Tensor:
        leaf = self.leaf[at]
        able = could[leaf]
        passing = torch.zeros_like(able)
        marks = self.rows[self.row[at]] | self.extra[leaf]
        for n, which, bits in wanted:
            hit = (marks[:, n : n + 1] & bits) != 0
            if len(which) == passing.shape[1]:
                passing |= hit
            else:
                passing[:, which] |= hit
        return torch.stack([able, passing & able]).double().mT @ sums[at]

    def _runs(self, pairs: int) -> Iterator[tuple[int, Tensor]]:
        """Each pair with its groups."""
        if pairs == 1:
            yield 0, torch.arange(len(self.pair), device=self.pair.device)
            return
        order = torch.argsort(self.pair, stable=True)
        places = torch.arange(pairs + 1, device=self.pair.device)
        starts = torch.searchsorted(self.pair[order], places).tolist()
        for pair in range(pairs):
            if starts[pair] < starts[pair + 1]:
                yield pair, order[starts[pair] : starts[pair + 1]]


def lent(x: npt.NDArray[Any], device: torch.device) -> Tensor:
    """An array on a device; words as whole numbers with a sign."""
    x = np.ascontiguousarray(x)
    x = x.view(np.int64) if x.dtype == np.uint64 else x
    return torch.from_numpy(x).to(device, non_blocking=True)


def grouped(found: Sequence[Counts]) -> Groups:
    """What was counted, of all leaves."""
    device = found[0].counts.device if found else torch.device("cpu")
    counts, sums, places = _joined(found, device)
    rows, firsts = _rows(found)
    extra = words_of([each.extra for each in found], 0, rows.shape[1])
    rows = _padded(rows, extra.shape[1])
    sizes = [len(each.counts) if each.size is None else each.size for each in found]
    begin = np.cumsum([0, *sizes], dtype=np.int64)
    total, begin = int(begin[-1]), begin[:-1]
    starts = begin + np.array([each.blank for each in found], np.int64)
    shifts = np.array(places, np.int64) - begin
    lengths = [len(each.rows) or 1 for each in found]
    pair = [each.pair for each in found]
    facts = np.array([starts, lengths, firsts, pair, sizes, shifts], np.int64)
    start, length, first, pairs, many, shift = lent(facts, device)
    leaves = torch.arange(len(found), device=device)
    whose = torch.repeat_interleave(leaves, many, output_size=total)
    if shifts.any() or total != len(counts):  # what was counted together lies in another order
        at = torch.arange(total, device=device) + shift[whose]
        counts, sums = counts[at], sums[at]
    blank = [n for at, each in zip(begin.tolist(), found) for n in range(at, at + each.blank)]
    if blank:  # no paths
        counts.index_fill_(0, lent(np.array(blank, np.int64), device), 0)
    used = counts.nonzero().reshape(-1)
    leaf = whose[used]
    place = used - start[leaf]
    beyond = place // length[leaf]
    row = first[leaf] + place - beyond * length[leaf]
    here = Groups(
        leaf,
        pairs[leaf] + beyond,
        row,
        lent(rows, device),
        lent(extra, device),
        counts[used],
        sums[used],
    )
    return here if (rows[1:, 0] & 1).all() else here._reached()


def _joined(found: Sequence[Counts], device: torch.device) -> tuple[Tensor, Tensor, list[int]]:
    """Counts and sums, tensors that leaves share once, and where those of each leaf begin."""
    begins: dict[int, int] = {}
    counts = [torch.zeros(0, dtype=torch.int64, device=device)]
    sums = [torch.zeros(0, dtype=torch.float64, device=device)]
    places, total = [], 0
    for each in found:
        begin = begins.get(id(each.counts))
        if begin is None:
            begin = begins[id(each.counts)] = total
            total += len(each.counts)
            near = each.counts.device == device
            counts.append(each.counts if near else each.counts.to(device))
            sums.append(each.sums if near else each.sums.to(device))
        places.append(begin + each.start)
    return torch.cat(counts), torch.cat(sums), places


def _rows(found: Sequence[Counts]) -> tuple[Words, list[int]]:
    """The rows of all palettes, which leaves have in common, and where those of each leaf begin."""
    places: dict[int, int] = {}
    tables, count = [np.zeros((1, 1), np.uint64)], 1
    for each in found:
        if id(each.rows) not in places:
            places[id(each.rows)] = count
            tables.append(words_of(each.rows))
            count += len(each.rows)
    width = max(table.shape[1] for table in tables)
    whole = np.concatenate([_padded(table, width) for table in tables])
    return whole, [places[id(each.rows)] for each in found]


def _padded(words: Words, width: int) -> Words:
    """As so many words each."""
    if words.shape[1] == width:
        return words
    return np.concatenate([words, np.zeros((len(words), width - words.shape[1]), np.uint64)], 1)
