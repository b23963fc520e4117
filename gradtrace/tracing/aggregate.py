"""Sums the counts of all leaves by component, on the device that holds them.

A group is a leaf, a pair and a provenance set. There may be millions of groups and hundreds of
components.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gradtrace.errors import GradtraceError
from gradtrace.kernels import Backend, summing, tuning
from gradtrace.kernels.operands import Floats, GroupRequest, GroupSums, Whole, Words
from gradtrace.tracing.provenance import words_of


class Counts(NamedTuple):
    """The elements of a leaf by provenance: their number (int64) and Σ |gradient| (float64).

    Entry ``blank + n`` is for the set ``rows[n % len(rows)] | extra``, a path if that has bit 0,
    and for pair ``pair + n // len(rows)``; the first ``blank`` entries are for no path. The tensors
    stay on the leaf's device until all leaves are counted, to avoid syncs. Several leaves may share
    tensors: this one has ``size`` entries from ``start`` on (None: all).
    """

    counts: Tensor
    sums: Tensor
    rows: Sequence[int]
    extra: int
    pair: int
    blank: int = 0
    start: int = 0
    size: int | None = None


class Reach(NamedTuple):
    """Which components the paths of a leaf could pass.

    ``words``: the bits that some route gives, (leaves, words). ``owned``: (2, n), leaves and the
    components they belong to; a leaf does not count for its own components.
    """

    words: Words
    owned: Whole


def own_elements(
    names: Sequence[str], places: Sequence[int], sizes: Sequence[int], reach: Reach, count: int
) -> list[int]:
    """How many elements belong to each of ``count`` components, given the name, the place in
    ``reach`` and the size of each leaf. Of several leaves with one name the first counts.
    """
    first = {name: n for n, name in reversed([*enumerate(names)])}
    found, own = np.zeros(len(reach.words)), np.zeros(count)
    for n in first.values():
        found[places[n]] += sizes[n]  # exact below 2**53
    np.add.at(own, reach.owned[1], found[reach.owned[0]])
    return [int(size) for size in own]


class LeafSums(NamedTuple):
    """Which sums of the counts of leaves are wanted: over leaves that could pass each component,
    and over their paths that do.

    ``place`` is the index of each leaf in ``reach``, ``totals`` its largest possible number of
    paths, ``bits`` the bits of each component.
    """

    pairs: int
    reach: Reach
    place: Sequence[int]
    totals: Floats
    bits: list[int]


class Columns(NamedTuple):
    """Components with ``size`` bits each: their indices, and the positions of all their bits."""

    which: Tensor
    bits: Tensor
    size: int


class Groups(NamedTuple):
    """The elements of all leaves, grouped by leaf, pair and provenance; the counts of groups
    without a path are 0. A group's provenance is ``rows[row] | extra[leaf]``.
    """

    leaf: Tensor  # in ascending order
    pair: Tensor
    row: Tensor
    rows: Tensor  # of all provenance tables: (rows, words)
    extra: Tensor  # of each leaf: (leaves, words)
    counts: Tensor  # int64
    sums: Tensor  # float64

    def _reached(self) -> Groups:
        """With zero counts for groups without a path."""
        there = (self.rows[self.row, 0] | self.extra[self.leaf, 0]) & 1 != 0
        return self._replace(
            counts=torch.where(there, self.counts, 0), sums=torch.where(there, self.sums, 0.0)
        )

    def _ends(self) -> Tensor:
        """Where the groups of each leaf end, after a 0."""
        leaves = torch.arange(-1, len(self.extra), device=self.leaf.device)
        return torch.searchsorted(self.leaf, leaves, right=True)

    def totals(self) -> Tensor:
        """How many elements of each leaf have a path; exact below 2**53."""
        until = torch.cat([self.counts.new_zeros(1), self.counts.cumsum(0)])[self._ends()]
        return torch.diff(until).double()

    def _by_leaf(self, both: Tensor) -> Tensor:
        """Sums of the rows of groups by leaf; the same bits in every pass."""
        ends = self._ends()
        columns = (x.contiguous() for x in both.unbind(1))  # of lines, a GPU adds one by one
        sums = [torch.segment_reduce(x, "sum", offsets=ends, unsafe=True) for x in columns]
        return torch.stack(sums, 1)

    def added(self, wanted: LeafSums, backend: Backend) -> GroupSums:
        """Sum the groups whose leaf could pass each component, and those whose provenance has any
        of its bits. Sums that are not finite are left out.
        """
        pairs, reach, place, totals, bits = wanted
        device, count = self.leaf.device, len(bits)
        entries = backend.table_entries
        owners = owners_of(reach, count, device)
        able = eligible_components(reach, bits, owners, entries)
        where = to_device(np.array(place, np.int64), device)
        sums = self.sums.nan_to_num(0.0, 0.0, 0.0)
        both = torch.stack([self.counts.double(), sums], 1)
        paths = self.totals()
        missing = torch.zeros(able.shape[1], 1, dtype=torch.float64, device=device)
        missing.index_add_(0, where, (to_device(totals, device) - paths).unsqueeze(1))
        found = torch.zeros(2, pairs, count, 2, dtype=torch.float64, device=device)
        if pairs == 1:  # eligible depends on the leaf only: sum by leaf first
            by_leaf = torch.zeros(able.shape[1], 2, dtype=torch.float64, device=device)
            backend.add_rows(by_leaf, where, self._by_leaf(both))
            missing = torch.cat([missing, by_leaf], 1)
        by_component = _product(able, missing, entries)
        found[0, 0] += by_component[:, 1:] if pairs == 1 else 0
        width = max(self.rows.shape[1], 1)
        columns = bit_columns(bits, 64 * width, device)
        most = sets_at_once(columns, count, width, entries)
        for n in range(0, len(self.leaf), most):
            some = slice(n, n + most)
            leaf, pair = self.leaf[some], self.pair[some]
            here = where[leaf]
            sets = self.rows[self.row[some]] | self.extra[leaf]
            if pairs > 1:
                could = able.index_select(1, here)
                backend.add_rows(found[0], pair, could.mT.unsqueeze(2) * both[some].unsqueeze(1))
            _add_passing(found[1], sets, pair, both[some], columns, owners[:, here], backend)
        nonfinite = (sums != self.sums).any().double()
        line = torch.cat(
            [nonfinite.reshape(1), by_component[:, 0], found.reshape(-1)]
        ).cpu()  # one sync
        unlike, unreached, rest = np.split(line.numpy(), [1, 1 + count])
        eligible, through = rest.reshape(found.shape)
        return GroupSums(eligible, through, unreached, not unlike.any())


def _add_passing(
    total: Tensor,
    sets: Tensor,
    pair: Tensor,
    both: Tensor,
    columns: list[Columns],
    owners: Tensor,
    backend: Backend,
) -> None:
    """Add counts and sums of groups to the components whose bits their provenance has, except those
    that own them. ``total`` is (pairs, components, 2).
    """
    pairs, count, _ = total.shape
    sparse = None if backend.synchronises else _sparse_hits(sets, columns, count)
    if sparse is not None:
        row, component = sparse
        mine = (owners[:, row] != component).all(0)
        row, component = row[mine], component[mine]
        backend.add_rows(total.view(pairs * count, 2), pair[row] * count + component, both[row])
        return
    passing = component_hits(sets, columns, count, owners)
    if pairs == 1:
        total[0] += passing.double() @ both
    else:
        backend.add_rows(total, pair, passing.mT.unsqueeze(2) * both.unsqueeze(1))


def owners_of(reach: Reach, count: int, device: torch.device) -> Tensor:
    """The components that each leaf belongs to, padded with ``count`` (none): (most components of
    any leaf, leaves).
    """
    leaf, component = reach.owned
    order = np.argsort(leaf, kind="stable")
    leaf = leaf[order]
    rank = np.arange(len(leaf)) - np.searchsorted(leaf, leaf)
    found = np.full((int(rank.max(initial=-1)) + 1, len(reach.words)), count, np.int64)
    found[rank, leaf] = component[order]
    return to_device(found, device)


def eligible_components(reach: Reach, bits: list[int], owners: Tensor, entries: int) -> Tensor:
    """Which components the paths of each leaf could pass: (components, leaves), 0 or 1."""
    words = to_device(reach.words, owners.device)
    columns = bit_columns(bits, 64 * words.shape[1], owners.device)
    most = sets_at_once(columns, len(bits), words.shape[1], entries)
    found = torch.zeros(len(bits), len(words), dtype=torch.uint8, device=owners.device)
    for n in range(0, len(words), most):
        some = slice(n, n + most)
        found[:, some] = component_hits(words[some], columns, len(bits), owners[:, some])
    return found


def bit_columns(bits: list[int], width: int, device: torch.device) -> list[Columns]:
    """The bits of components below ``width``, grouped by their number; most have one."""
    found: dict[int, tuple[list[int], list[int]]] = {}
    for n, some in enumerate(bits):
        some &= (1 << width) - 1 if some.bit_length() > width else -1
        size = some.bit_count()
        if size:
            which, places = found.setdefault(size, ([], []))
            which.append(n)
            places += [some.bit_length() - 1] if size == 1 else _places(some)
    lines = [line for both in found.values() for line in both]
    whole = to_device(np.array([n for line in lines for n in line], np.int64), device)  # one copy
    parts = iter(torch.split(whole, [len(line) for line in lines]))
    return [Columns(next(parts), next(parts), size) for size in found]


def _places(bits: int) -> list[int]:
    line = np.frombuffer(bits.to_bytes(-(-bits.bit_length() // 8), "little"), np.uint8)
    places: list[int] = np.flatnonzero(np.unpackbits(line, bitorder="little")).tolist()
    return places


def sets_at_once(columns: list[Columns], count: int, width: int, entries: int) -> int:
    """How many provenance sets to process at a time."""
    return max(1, entries // max([count, 64 * width, *(len(c.bits) for c in columns)]))


def component_hits(words: Tensor, columns: list[Columns], count: int, but: Tensor) -> Tensor:
    """Which components share a bit with each provenance set, except ``but``, (k, sets): indices of
    components to leave out. (components, sets), 0 or 1.
    """
    many = len(words)
    octets = words.contiguous().view(torch.uint8).reshape(many, -1).mT.contiguous()
    shifts = torch.arange(8, dtype=torch.uint8, device=words.device).unsqueeze(1)
    flags = ((octets.unsqueeze(1) >> shifts) & 1).reshape(-1, many)
    found = torch.zeros(count + 1, many, dtype=torch.uint8, device=words.device)  # the last is none
    for which, bits, size in columns:
        here = flags.index_select(0, bits)
        found[which] = here if size == 1 else here.reshape(-1, size, many).amax(1)
    return found.scatter_(0, but, 0)[:count]


SPARSE_WORDS_FACTOR = 4
"""Sets are processed bit by bit if on average at most ``components / 64`` divided by this of their
words are nonzero; else by a dense table of sets and components.
"""


def _sparse_hits(words: Tensor, columns: list[Columns], count: int) -> tuple[Tensor, Tensor] | None:
    """Pairs (set, component) that share a bit; None if the sets have many bits. Reads how many."""
    which, word = words.nonzero(as_tuple=True)
    if SPARSE_WORDS_FACTOR * 64 * len(which) > len(words) * count:
        return None
    octets = words[which, word].numpy().view(np.uint8).reshape(-1, 8)
    at, bit = np.nonzero(np.unpackbits(octets, axis=1, bitorder="little"))
    some = torch.from_numpy(at)
    which, bits = which[some], word[some] * 64 + torch.from_numpy(bit)
    whose = [c.which.repeat_interleave(c.size) for c in columns]
    owner, held = torch.cat([bits[:0], *whose]), torch.cat([bits[:0], *(c.bits for c in columns)])
    held, order = held.sort()
    first = torch.searchsorted(held, bits)
    times = torch.searchsorted(held, bits, right=True) - first
    which = which.repeat_interleave(times)
    begin = (times.cumsum(0) - times).repeat_interleave(times)
    place = first.repeat_interleave(times) + torch.arange(len(which), device="cpu") - begin
    component = owner[order[place]]
    if all(c.size == 1 for c in columns):
        return which, component
    once: Tensor = (which * count + component).unique()  # type: ignore[no-untyped-call]
    return once // count, once % count


def _product(flags: Tensor, weights: Tensor, entries: int) -> Tensor:
    """``flags @ weights`` in double, some rows at a time; ``flags`` are 0 or 1."""
    found = weights.new_zeros(len(flags), weights.shape[1])
    most = max(1, entries // max(1, flags.shape[1]))
    for n in range(0, len(flags), most):
        found[n : n + most] = flags[n : n + most].double() @ weights
    return found


def to_device(x: npt.NDArray[Any], device: torch.device) -> Tensor:
    """An array copied to a device asynchronously; uint64 words as int64."""
    x = np.ascontiguousarray(x)
    x = x.view(np.int64) if x.dtype == np.uint64 else x
    return torch.from_numpy(x).to(device, non_blocking=True)


class ListedGroups(NamedTuple):
    """Counts of leaves, for a backend that sums them leaf by leaf (``sums_groups``)."""

    found: Sequence[Counts]

    def added(self, wanted: LeafSums, backend: Backend) -> GroupSums:
        """``Groups.added``."""
        counts, sums, starts = joined_counts(self.found, HOST)
        kernel = summing(backend)
        assert kernel is not None
        return kernel.group_sums(self.request(starts, wanted), counts, sums)

    def request(self, starts: Sequence[int], wanted: LeafSums) -> GroupRequest:
        """What is asked of the backend, given where the counts of each leaf begin."""
        found, (pairs, reach, place, totals, bits) = self.found, wanted
        if not len(found) == len(place) == len(totals):
            raise GradtraceError(f"{len(found)} leaves, {len(place)} places, {len(totals)} totals")
        known: dict[int, int] = {}
        tables: list[Words] = []
        leaves: list[tuple[int, ...]] = []
        for (each, _, rows, _, pair, blank, _, size), start, at in zip(found, starts, place):
            table = known.setdefault(id(rows), len(tables))
            if table == len(tables):
                tables.append(np.ascontiguousarray(words_of(rows), np.uint64))
            leaves.append((start, len(each) if size is None else size, blank, table, pair, at))
        width = max([1, *(words.shape[1] for words in tables)])
        extra = words_of([each.extra for each in found], 0, width)
        able = np.ascontiguousarray(reach.words, np.uint64)
        owned = _starts(reach.owned, len(able))
        by_bit = _by_bit(bits, 64 * max(extra.shape[1], able.shape[1]))
        lines = np.array(leaves, np.int64).reshape(-1, 6)
        return GroupRequest(lines, tables, extra, able, owned, by_bit, totals, pairs, len(bits))


HOST = torch.device("cpu")


def _starts(both: Whole, count: int) -> tuple[Whole, Whole]:
    """Group values by key, given (2, n) keys and values: offsets of each key, (count + 1,), and the
    values ordered by key.
    """
    key, value = both
    starts = np.zeros(count + 1, np.int64)
    np.cumsum(np.bincount(key, minlength=count), out=starts[1:])
    return starts, value[np.argsort(key, kind="stable")]


def _by_bit(bits: list[int], width: int) -> tuple[Whole, Whole]:
    """The components that have each bit below ``width``, as offsets and values by bit."""
    places: list[int] = []
    owners: list[int] = []
    for n, some in enumerate(bits):
        here = [some.bit_length() - 1] if some.bit_count() == 1 else _places(some)
        places += here
        owners += [n] * len(here)
    line = np.array([places, owners], np.int64)
    return _starts(line[:, line[0] < width], width)


def grouped(found: Sequence[Counts], backend: Backend) -> Groups | ListedGroups:
    """The counts of all leaves, listed for a backend that can sum them so. A GPU takes longer to
    add up few counts, in many calls, than to send them to the CPU.
    """
    if backend.sums_groups:
        return ListedGroups(found)
    if found and summing(backend) is not None and _entries(found) <= tuning.READ_MAX_COUNTS:
        counts, sums, starts = joined_counts(found, HOST)
        used = int(counts.count_nonzero())  # of as many, however much room their tables have
        if used <= tuning.SUMMED_ON_HOST_MAX_COUNTS:
            here = zip(found, starts)
            return ListedGroups([_at(each, counts, sums, start) for each, start in here])
    return groups_of(found)


def _entries(found: Sequence[Counts]) -> int:
    """How many counts there are, those included that are 0; tensors that leaves share once."""
    return sum({id(each.counts): len(each.counts) for each in found}.values())


def _at(found: Counts, counts: Tensor, sums: Tensor, start: int) -> Counts:
    """Counts that lie elsewhere, beside those of other leaves."""
    size = len(found.counts) if found.size is None else found.size
    return found._replace(counts=counts, sums=sums, start=start, size=size)


def groups_of(found: Sequence[Counts]) -> Groups:
    """The counts of all leaves as groups, on the device that holds the first."""
    device = found[0].counts.device if found else torch.device("cpu")
    counts, sums, places = joined_counts(found, device)
    extra = words_of([each.extra for each in found])
    rows, firsts = joined_rows(found, extra, device)
    extra = words_of([each.extra for each in found], 0, rows.shape[1])
    sizes = [len(each.counts) if each.size is None else each.size for each in found]
    begin = np.cumsum([0, *sizes], dtype=np.int64)
    total, begin = int(begin[-1]), begin[:-1]
    starts = begin + np.array([each.blank for each in found], np.int64)
    shifts = np.array(places, np.int64) - begin
    lengths = [len(each.rows) or 1 for each in found]
    pair = [each.pair for each in found]
    facts = np.array([starts, lengths, firsts, pair, sizes, shifts], np.int64)
    start, length, first, pairs, many, shift = to_device(facts, device)
    leaves = torch.arange(len(found), device=device)
    whose = torch.repeat_interleave(leaves, many, output_size=total)
    if shifts.any() or total != len(counts):  # a batch may have another order
        at = torch.arange(total, device=device) + shift[whose]
        counts, sums = counts[at], sums[at]
    blank = [n for at, each in zip(begin.tolist(), found) for n in range(at, at + each.blank)]
    if blank:  # no paths
        counts.index_fill_(0, to_device(np.array(blank, np.int64), device), 0)
    used = counts.nonzero().reshape(-1)
    leaf = whose[used]
    place = used - start[leaf]
    beyond = place // length[leaf]
    row = first[leaf] + place - beyond * length[leaf]
    here = Groups(
        leaf,
        pairs[leaf] + beyond,
        row,
        rows,
        to_device(extra, device),
        counts[used],
        sums[used],
    )
    return here._reached()


def joined_counts(
    found: Sequence[Counts], device: torch.device
) -> tuple[Tensor, Tensor, list[int]]:
    """Counts and sums concatenated, shared tensors once, and each leaf's offset."""
    begins: dict[int, int] = {}
    parts: list[tuple[Tensor, Tensor]] = []
    places, total = [], 0
    for each in found:
        begin = begins.get(id(each.counts))
        if begin is None:
            begin = begins[id(each.counts)] = total
            total += len(each.counts)
            parts.append((each.counts, each.sums))
        places.append(begin + each.start)
    if not parts:
        none = torch.zeros(0, dtype=torch.int64, device=device)
        return none, none.double(), places
    if all(counts.device == device for counts, _ in parts):
        if len(parts) == 1:  # of a sample: one for all leaves
            return *parts[0], places
        return torch.cat([c for c, _ in parts]), torch.cat([s for _, s in parts]), places
    return *_sent(parts, device), places


def _sent(parts: Sequence[tuple[Tensor, Tensor]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Counts and sums on another device, with one copy from each."""
    found: dict[int, tuple[Tensor, Tensor]] = {}
    for where in dict.fromkeys(counts.device for counts, _ in parts):
        here = [n for n, (counts, _) in enumerate(parts) if counts.device == where]
        bits = [parts[n][1].view(torch.int64) for n in here]
        both = torch.cat([*[parts[n][0] for n in here], *bits]).to(device)
        sizes = [len(x) for x in bits]
        lines = torch.split(both, [*sizes, *sizes])
        for n, counts, sums in zip(here, lines, lines[len(here) :]):
            found[n] = counts, sums.view(torch.float64)
    order = [found[n] for n in range(len(parts))]
    return torch.cat([c for c, _ in order]), torch.cat([s for _, s in order])


def joined_rows(
    found: Sequence[Counts], extra: Words, device: torch.device
) -> tuple[Tensor, list[int]]:
    """The rows of all provenance tables on a device, as wide as ``extra`` at least, shared ones
    once; and each leaf's offset.
    """
    places: dict[int, int] = {}
    tables, count = [np.zeros((1, 1), np.uint64)], 1
    for each in found:
        if id(each.rows) not in places:
            places[id(each.rows)] = count
            tables.append(words_of(each.rows))
            count += len(each.rows)
    width = max(extra.shape[1], *(table.shape[1] for table in tables))
    # memory that a GPU reads fast, and that PyTorch keeps for the next trace
    pinned = device.type == "cuda"
    whole = torch.empty(count, width, dtype=torch.int64, device=HOST, pin_memory=pinned)
    words, at = whole.numpy().view(np.uint64), 0
    for table in tables:
        here = words[at : at + len(table)]
        here[:, : table.shape[1]] = table
        here[:, table.shape[1] :] = 0
        at += len(table)
    return whole.to(device, non_blocking=True), [places[id(each.rows)] for each in found]
