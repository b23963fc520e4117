"""Sums over components, against plain loops."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from operator import or_

import numpy as np
import pytest
import torch
from backends import CPU
from hypothesis import given
from hypothesis import strategies as st

from gradtrace.kernels import Reference, backend_of, cpu_library
from gradtrace.tracing import aggregate
from gradtrace.tracing.aggregate import (
    Counts,
    Groups,
    LeafSums,
    ListedGroups,
    Reach,
    grouped,
    groups_of,
)
from gradtrace.tracing.provenance import PackedSets, words_of

NAN = math.nan
NOBODY = np.zeros((2, 0), np.int64)


def drawn(seed: int, leaves: int, pairs: int) -> list[Counts]:
    """Leaves with palettes in common, some of them tables, of marks with and without a path."""
    draw = np.random.default_rng(seed)
    rows = [tuple(int(n) << 60 | int(n) % 3 for n in draw.integers(0, 99, 4)) for _ in range(2)]
    provenances = [rows[0], PackedSets(words_of(rows[1]))]
    found = []
    for n in range(leaves):
        provenance = provenances[n % 2]
        blank, many = n % 2, pairs if n % 3 == 0 else 1
        size = blank + many * len(provenance)
        counts = torch.from_numpy(draw.integers(0, 3, size))
        sums = torch.from_numpy(draw.integers(0, 9, size) / 4.0)
        first = 0 if many == pairs else n % pairs
        found.append(Counts(counts, sums, provenance, int(n) << 70 | n % 2, first, blank))
    return found


def reached(seed: int, found: list[Counts], bits: list[int]) -> tuple[Reach, np.ndarray]:
    """What leaves could pass by their bits, among which are those of their marks, and what they
    belong to; and both as a matrix.
    """
    draw = np.random.default_rng(seed)
    marks = [reduce(or_, each.rows) | each.extra for each in found]
    marks = [mark | sum(int(draw.integers(2)) << n for n in (61, 72, 200)) for mark in marks]
    owned = draw.random((len(found), len(bits))) < 0.2
    could = np.array([[bool(mark & some) for some in bits] for mark in marks]) & ~owned
    return Reach(words_of(marks), np.array(np.nonzero(owned))), could


def plainly(
    found: list[Counts], pairs: int, could: np.ndarray, bits: list[int], most: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    eligible, through = np.zeros((pairs, len(bits), 2)), np.zeros((pairs, len(bits), 2))
    unreached = np.zeros(len(bits))
    for leaf, each in enumerate(found):
        total = 0
        for n, (count, sum_) in enumerate(zip(each.counts.tolist(), each.sums.tolist())):
            pair, row = divmod(n - each.blank, len(each.rows))
            mark = each.rows[row] | each.extra
            if n < each.blank or not count or not mark & 1:
                continue
            total += count
            more = np.array([count, sum_ if math.isfinite(sum_) else 0.0])
            for c, some in enumerate(bits):
                if could[leaf, c]:
                    eligible[each.pair + pair, c] += more
                    through[each.pair + pair, c] += more * bool(mark & some)
        unreached += could[leaf] * (most[leaf] - total)
    return eligible, through, unreached


def listed(found: list[Counts]) -> ListedGroups:
    """By the compiled library."""
    here = grouped(found, backend_of(CPU))
    assert isinstance(here, ListedGroups)
    return here


WAYS: dict[str, tuple[Callable[[list[Counts]], Groups | ListedGroups], int, int]] = {
    f"torch {entries} {sparse}": (groups_of, entries, sparse)
    for entries in (1, 1000, 1 << 22)
    for sparse in (0, 1 << 30)
}
if cpu_library.library() is not None:
    WAYS["library"] = (listed, 1, 1)


@pytest.mark.parametrize("way", WAYS)
@given(st.integers(0, 1000), st.integers(1, 7), st.integers(1, 4))
def test_groups_are_added_up(way: str, seed: int, leaves: int, pairs: int) -> None:
    make, entries, sparse = WAYS[way]
    found = drawn(seed, leaves, pairs)
    if seed % 2:
        found[0].sums[-1] = (NAN, math.inf)[seed % 3 == 0]
    bits = [1, 1 << 61 | 1 << 72, 0, 1 << 200, 2 << 60, 1 << 72 | 1 << 200]
    order = np.random.default_rng(seed).permutation(leaves)  # where each leaf is in reach
    reach, could = reached(seed, [found[n] for n in np.argsort(order)], bits)
    most = np.arange(leaves, dtype=float) + 20
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reference, "table_entries", entries)
        patch.setattr(aggregate, "SPARSE_WORDS_FACTOR", sparse)
        here = make(found)
        eligible, through, unreached, finite = here.added(
            LeafSums(pairs, reach, order.tolist(), most, bits), backend_of(CPU)
        )
    wanted = plainly(found, pairs, could[order], bits, most)
    assert np.array_equal(eligible, wanted[0])  # quarters: sums are exact in any order
    assert np.array_equal(through, wanted[1])
    assert np.array_equal(unreached, wanted[2])
    last = found[0].rows[-1] | found[0].extra
    assert finite == (not seed % 2 or not found[0].counts[-1] or not last & 1)


@given(st.integers(0, 1000), st.integers(1, 7), st.integers(1, 4))
def test_leaves_that_share_tensors(seed: int, leaves: int, pairs: int) -> None:
    """In whatever order they lie there, with gaps, and beside others: groups come leaf by leaf."""
    found = drawn(seed, leaves, pairs)
    order = np.random.default_rng(seed).permutation(leaves)
    places: dict[int, int] = {}
    counts, sums = [torch.tensor([7])], [torch.tensor([5.0], dtype=torch.float64)]
    for n in order[: leaves // 2 + 1]:
        places[int(n)] = sum(map(len, counts))
        counts.append(found[n].counts)
        sums.append(found[n].sums)
    both = torch.cat(counts), torch.cat(sums)
    shared = [
        Counts(*both, *each[2:6], places[n], len(each.counts)) if n in places else each
        for n, each in enumerate(found)
    ]
    for mine, wanted in zip(groups_of(shared), groups_of(found)):
        assert torch.equal(mine, wanted)
    bits, reach = [1, 1 << 61 | 1 << 72], Reach(words_of([-1 & (1 << 300) - 1] * leaves), NOBODY)
    asked = LeafSums(pairs, reach, range(leaves), np.arange(leaves, dtype=float), bits)
    for mine, wanted in zip(
        grouped(shared, backend_of(CPU)).added(asked, backend_of(CPU)),
        groups_of(found).added(asked, backend_of(CPU)),
    ):
        assert np.array_equal(mine, wanted)


@pytest.mark.parametrize("make", [lambda found: grouped(found, backend_of(CPU)), groups_of])
def test_nothing_counted(make: Callable[[list[Counts]], Groups | ListedGroups]) -> None:
    here = make([])
    reach = Reach(np.zeros((0, 1), np.uint64), np.zeros((2, 0), np.int64))
    eligible, through, unreached, finite = here.added(
        LeafSums(2, reach, [], np.zeros(0), [1, 2, 4]), backend_of(CPU)
    )
    assert eligible.shape == through.shape == (2, 3, 2)
    assert not eligible.any() and not through.any() and not unreached.any()
    assert finite
