"""Counting paths: how many of each mark end at each leaf, and the table that comes of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import starmap
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import Parameter

from gradtrace.components import Component
from gradtrace.influence import Influence, Moments, Row, Weight
from gradtrace.kernels import steps as fused
from gradtrace.maps.places import laid
from gradtrace.marks import Ints, Marks, Table, Words, words_of
from gradtrace.program import Program, Step
from gradtrace.states import State, cancelled, solid
from gradtrace.tracing import Found

Bools: TypeAlias = npt.NDArray[np.bool_]
Floats: TypeAlias = npt.NDArray[np.float64]

NONFINITE = "some gradients are NaN or infinite; their paths count, but have no weight"

ENTRIES = (1 << 22, 1 << 24)
"""How many pairs of a group and a component to look at in one go, and how many on a GPU."""


class Counts(NamedTuple):
    """The elements of a leaf by mark: how many (int64), and Σ |gradient| (float64).

    Entry ``blank + n`` is for the mark ``rows[n % len(rows)] | extra``, a path if that has bit 0,
    and for pair ``pair + n // len(rows)``; those before it are for no path. They stay on the leaf's
    device until all leaves are counted, so that nobody waits for them.
    """

    counts: Tensor
    sums: Tensor
    rows: Sequence[int]
    extra: int
    pair: int
    blank: int = 0


@dataclass
class Counted:
    """A leaf by name and value, how many elements it has, and how many paths there could be."""

    name: str
    value: int
    size: int
    total: int
    found: Counts


class Groups(NamedTuple):
    """The elements of all leaves that have a path, by leaf, pair and mark."""

    leaf: Ints
    pair: Ints
    row: Ints  # of palettes
    rows: Words  # those that are used; a mark is one of them and the bits of its leaf
    extra: Words  # of each leaf
    sums: Floats  # (groups, 2): how many, and Σ |gradient|; counts are exact below 2**53
    device: torch.device  # that counted them


@dataclass
class Tally:
    """Counts paths as leaves come in: those of a program, by marks that components are made of."""

    components: list[Component]
    program: Program
    marks: Marks
    names: dict[int, str]
    pairs: int
    leaves: list[Counted] = field(default_factory=list)
    sized: set[str] = field(default_factory=set)

    def add(self, found: Found, gradient: Tensor) -> None:
        """Count the paths of a leaf."""
        value, total = found.leaf.value, gradient.numel()
        if isinstance(found.pair, Tensor):
            # A parameter is there for every pair, even if no two of them meet in an element of it
            # (an embedding whose rows are each used once); an input is there once, each part for
            # its pair.
            shared = isinstance(found.leaf.tensor, Parameter) or bool((found.pair == 0).any())
            total = total * self.pairs if shared else total
        self._count(value, gradient.numel(), total, counts_of(found, gradient, self.pairs))

    def add_some(
        self, value: int, pair: int, marks: list[int], number: Tensor, gradient: Tensor, size: int
    ) -> None:
        """Count the paths of some elements of a leaf, which has ``size`` of them: each element's
        number among the marks, and its gradient.
        """
        counts, sizes = fused.tally(number.int(), gradient, len(marks))
        self._count(value, size, len(number), Counts(counts, sizes, marks, 0, pair))

    def _count(self, value: int, size: int, total: int, found: Counts) -> None:
        name = self.names[value]
        own = 0 if name in self.sized else size
        self.sized.add(name)
        self.leaves.append(Counted(name, value, own, total, found))

    def result(self, rule: str, weight: Weight, notes: Iterable[str] = ()) -> Influence:
        """The table. What can be said without the counts comes first: a GPU may still be busy."""
        owns, reached = self._owned(), possible(self.program, self.marks)
        bits = [component.bits for component in self.components]
        could = hits([reached[leaf.value] for leaf in self.leaves], bits) & ~owns
        groups = grouped([leaf.found for leaf in self.leaves])
        sizes = np.array([leaf.size for leaf in self.leaves], dtype=float)  # exact below 2**53
        totals = np.array([leaf.total for leaf in self.leaves], dtype=float)
        missing = totals - np.bincount(groups.leaf, groups.sums[:, 0], len(self.leaves))
        own, unreached = sizes @ owns.astype(float), missing @ could.astype(float)
        if not np.isfinite(groups.sums).all():
            notes = (*notes, NONFINITE)
        eligible, through = self._sums(groups, could, bits)
        moments = (
            map(Moments.over, through[:, :, k].T.tolist(), eligible[:, :, k].T.tolist())
            for k in (0, 1)
        )
        names = (component.name for component in self.components)
        counts = map(int, own.tolist()), map(int, unreached.tolist())
        rows = tuple(map(Row, names, *counts, *moments))
        return Influence(rows, self.pairs, weight, rule, tuple(notes))

    def _owned(self) -> Bools:
        """Which leaf belongs to which component."""
        places: dict[str, list[int]] = {}
        for place, leaf in enumerate(self.leaves):
            places.setdefault(leaf.name, []).append(place)
        leaves: list[int] = []
        components: list[int] = []
        for n, component in enumerate(self.components):
            for name in component.owns:
                here = places.get(name, ())
                leaves += here
                components += [n] * len(here)
        owns = np.zeros((len(self.leaves), len(self.components)), dtype=bool)
        owns[leaves, components] = True
        return owns

    def _sums(self, groups: Groups, could: Bools, bits: list[int]) -> tuple[Floats, Floats]:
        """By pair and component, how many elements could pass and how many do, and the same by
        |gradient|, in the order of the leaves. There may be many groups, so it is the device that
        counted them which adds them up.
        """
        shape = (self.pairs, len(self.components), 2)
        eligible, through = np.zeros(shape), np.zeros(shape)
        sums = np.where(np.isfinite(groups.sums), groups.sums, 0.0)
        width = max(groups.rows.shape[1], groups.extra.shape[1])
        wanted = words_of(bits, 0, width)
        rows, extra = (_wide(words, wanted.shape[1]) for words in (groups.rows, groups.extra))
        there = [_lent(x, groups.device) for x in (could, wanted, rows, extra)]
        order = np.argsort(groups.pair, kind="stable")
        most = max(1, ENTRIES[groups.device.type == "cuda"] // max(1, len(self.components)))
        for pair, mine in _runs(order, groups.pair):
            for n in range(0, len(mine), most):
                some = mine[n : n + most]
                given = (groups.leaf[some], groups.row[some], sums[some])
                able, passing = _added(*there, *(_lent(x, groups.device) for x in given))
                eligible[pair] += able
                through[pair] += passing
        return eligible, through


def _lent(x: npt.NDArray[Any], device: torch.device) -> Tensor:
    """An array on a device; words as whole numbers with a sign."""
    x = x.view(np.int64) if x.dtype == np.uint64 else x
    return torch.from_numpy(np.ascontiguousarray(x)).to(device, non_blocking=True)


def _added(
    could: Tensor,
    wanted: Tensor,
    rows: Tensor,
    extra: Tensor,
    leaf: Tensor,
    row: Tensor,
    sums: Tensor,
) -> tuple[Floats, Floats]:
    """The sums of groups whose leaf could pass a component, and of those whose mark does: that has
    any of its bits. (components, 2)
    """
    able = could[leaf]
    passing = torch.zeros_like(able)
    for w, mark in enumerate((rows[row] | extra[leaf]).unbind(1)):
        passing |= (mark.unsqueeze(1) & wanted[:, w]) != 0
    passing &= able
    both = torch.stack([able, passing]).double().mT @ sums
    found = both.cpu().numpy()
    return found[0], found[1]


def _runs(order: Ints, pairs: Ints) -> Iterator[tuple[int, Ints]]:
    """Each pair with its groups."""
    cuts = np.flatnonzero(np.diff(pairs[order])) + 1
    for mine in np.split(order, cuts):
        if len(mine):
            yield int(pairs[mine[0]]), mine


def grouped(found: Sequence[Counts]) -> Groups:
    """What was counted, of all leaves, without what nobody has.

    Leaves have palettes in common, so each row that is used is looked at once.
    """
    counts = _fetched([each.counts for each in found], np.int64)
    sizes = _fetched([each.sums for each in found], np.float64)
    starts = np.cumsum([0, *(len(each.counts) for each in found)])
    used = np.flatnonzero(counts)
    leaf = np.searchsorted(starts, used, side="right") - 1
    place = used - starts[leaf] - np.array([each.blank for each in found], np.intp)[leaf]
    pair, row = np.divmod(place, np.array([len(each.rows) or 1 for each in found], np.intp)[leaf])
    row, rows = _rows(found, leaf, row)
    extra = words_of([each.extra for each in found])
    path = (rows[row, 0] | extra[leaf, 0]) & np.uint64(1) != 0
    there = path & (place >= 0)
    used, leaf, row = used[there], leaf[there], row[there]
    pairs = pair[there] + np.array([each.pair for each in found], np.intp)[leaf]
    sums = np.stack([counts[used].astype(float), sizes[used]], 1)
    device = found[0].counts.device if found else torch.device("cpu")
    return Groups(leaf, pairs, row, rows, extra, sums, device)


def _rows(found: Sequence[Counts], leaf: Ints, row: Ints) -> tuple[Ints, Words]:
    """The rows of palettes that are used, one after the other, and which of them each is: given by
    leaf and number.
    """
    palettes = {id(each.rows): each.rows for each in found}
    sizes = [len(rows) or 1 for rows in palettes.values()]
    firsts = dict(zip(palettes, np.cumsum([0, *sizes]).tolist()))
    number = np.array([firsts[id(each.rows)] for each in found], np.intp)[leaf] + row
    used = np.zeros(sum(sizes), bool)
    used[number] = True
    tables = [
        _picked(rows, np.flatnonzero(used[firsts[key] :][: len(rows)]))
        for key, rows in palettes.items()
    ]
    width = max((table.shape[1] for table in tables), default=1)
    whole = [np.zeros((0, width), np.uint64), *(_wide(table, width) for table in tables)]
    return (np.cumsum(used) - 1)[number], np.concatenate(whole)


def _picked(rows: Sequence[int], at: Ints) -> Words:
    return rows.words[at] if isinstance(rows, Table) else words_of([rows[n] for n in at.tolist()])


def _wide(words: Words, width: int) -> Words:
    return words_of(Table(words), 0, width)


def _fetched(tensors: Sequence[Tensor], dtype: npt.DTypeLike) -> npt.NDArray[np.generic]:
    """One after the other, as an array; those of one device come all at once."""
    if len({tensor.device for tensor in tensors}) == 1:
        tensors = [torch.cat(list(tensors))]
    return np.concatenate([np.zeros(0, dtype), *(tensor.cpu().numpy() for tensor in tensors)])


def counts_of(found: Found, gradient: Tensor, pairs: int) -> Counts:
    """The elements of a leaf by pair and mark."""
    state, pair = found.state, found.pair
    if state.few is not None and isinstance(pair, int):
        return _of_few(state, gradient, pair)
    if state.late and isinstance(pair, int):
        pieces = state.parts[0].pieces(gradient, fused.PIECE)
        if pieces is not None:
            return _of_pieces(state, pieces, pair)
    if state.mark is not None and isinstance(pair, int) and state.value is gradient:
        return _of_plain(state, gradient, pair)
    state = solid(state).written()
    numbers, (rows, extra) = state.numbers, state.palette
    assert numbers is not None
    if isinstance(pair, int):
        return Counts(*fused.tally(numbers, gradient, len(rows) + 1), rows, extra, pair, 1)
    there = (pair > 0) & (numbers > 0)
    numbers = torch.where(there, (pair.int() - 1) * len(rows) + numbers, 0)
    return Counts(*fused.tally(numbers, gradient, pairs * len(rows) + 1), rows, extra, 0, 1)


def _of_pieces(state: State, pieces: Iterable[tuple[Tensor, Tensor]], pair: int) -> Counts:
    """A large leaf: marks are worked out and counted a piece at a time."""
    rows, extra = state.palette
    counted = starmap(lambda marks, part: fused.tally(marks, part, len(rows) + 1), pieces)
    # each piece is gone when the next one comes
    return Counts(*fused.summed(counted), rows, extra, pair, 1)


def _of_plain(state: State, gradient: Tensor, pair: int) -> Counts:
    """A leaf all of whose paths have one mark: its elements that are not 0, and those to which
    something came all the same.
    """
    count, size = fused.measured(gradient)
    if state.parts and int(count) < gradient.numel():
        missed = cancelled(state.parts, gradient)
        count = count if missed is None else count + missed.sum()
    return Counts(count.reshape(1), size.reshape(1), *state.palette, pair)


def _of_few(state: State, gradient: Tensor, pair: int) -> Counts:
    """A leaf of which few elements have marks of their own: these are counted by themselves, and
    the others, unless they have nothing, as a plain leaf is.
    """
    few, (rows, extra) = state.few, state.palette
    assert few is not None
    counts, sizes = fused.tally(few.marks, few.value, len(rows) + 1)
    if not state.parts:
        line, at = laid(gradient, few.at)
        line[at] = 0  # for a moment
        count, size = fused.measured(gradient)
        line[at] = few.value
        counts[1] += count
        sizes[1] += size
    return Counts(counts, sizes, rows, extra, pair, 1)


def hits(marks: list[int], bits: list[int]) -> Bools:
    """Which marks have any of some bits, as a matrix of marks by sets of bits."""
    found = np.zeros((len(marks), len(bits)), dtype=bool)
    for mark, some in zip(words_of(marks).T, words_of(bits).T):
        found |= (mark[:, None] & some) != 0
    return found


def possible(program: Program, marks: Marks) -> dict[int, int]:
    """For each value the bits that some route of operators from it to the root would give."""
    found = {program.root: 1}
    for number, block in enumerate(program.blocks):
        bits = marks.block.get(number, 0)
        for each in marks.slices.get(number, (0, []))[1]:
            bits |= each
        for value in block.takes.values():
            found[value] |= bits
        for step in block.steps:
            found[step.out] = _any(found, step)
        for position, value in block.gives.items():
            found[value] |= marks.position.get((number, position), 0)
        for step in block.merges:
            found[step.out] = _any(found, step)
    return found


def _any(found: dict[int, int], step: Step) -> int:
    total = 0
    for _, value in step.terms:
        total |= found[value]
    return total
