"""Sums over components, against plain loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradtrace import groups
from gradtrace.groups import Counts, grouped
from gradtrace.marks import Table, words_of

NAN = math.nan


def drawn(seed: int, leaves: int, pairs: int) -> list[Counts]:
    """Leaves with palettes in common, some of them tables, of marks with and without a path."""
    draw = np.random.default_rng(seed)
    rows = [tuple(int(n) << 60 | int(n) % 3 for n in draw.integers(0, 99, 4)) for _ in range(2)]
    palettes = [rows[0], Table(words_of(rows[1]))]
    found = []
    for n in range(leaves):
        palette = palettes[n % 2]
        blank, many = n % 2, pairs if n % 3 == 0 else 1
        size = blank + many * len(palette)
        counts = torch.from_numpy(draw.integers(0, 3, size))
        sums = torch.from_numpy(draw.integers(0, 9, size) / 4.0)
        first = 0 if many == pairs else n % pairs
        found.append(Counts(counts, sums, palette, int(n) << 70 | n % 2, first, blank))
    return found


def plainly(
    found: list[Counts], pairs: int, could: np.ndarray, bits: list[int]
) -> tuple[np.ndarray, np.ndarray, list[int]]:
    eligible, through = np.zeros((pairs, len(bits), 2)), np.zeros((pairs, len(bits), 2))
    totals = []
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
        totals.append(total)
    return eligible, through, totals


@pytest.mark.parametrize("entries", [1, 7, 1 << 22])
@given(st.integers(0, 1000), st.integers(1, 7), st.integers(1, 4))
def test_groups_are_added_up(entries: int, seed: int, leaves: int, pairs: int) -> None:
    found = drawn(seed, leaves, pairs)
    if seed % 2:
        found[0].sums[-1] = (NAN, math.inf)[seed % 3 == 0]
    bits = [1, 1 << 61 | 1 << 72, 0, 1 << 200, 2 << 60]
    could = np.random.default_rng(seed).random((leaves, len(bits))) < 0.7
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "ENTRIES", (entries, entries))
        here = grouped(found)
        eligible, through, paths, finite = here.added(pairs, could, bits)
    *wanted, totals = plainly(found, pairs, could, bits)
    assert np.array_equal(eligible, wanted[0])  # quarters: sums are exact in any order
    assert np.array_equal(through, wanted[1])
    assert paths.tolist() == totals
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
    for mine, wanted in zip(grouped(shared), grouped(found)):
        assert torch.equal(mine, wanted)


def test_nothing_counted() -> None:
    here = grouped([])
    eligible, through, totals, finite = here.added(2, np.zeros((0, 3), bool), [1, 2, 4])
    assert eligible.shape == through.shape == (2, 3, 2)
    assert not eligible.any() and not through.any()
    assert finite and not len(totals)
