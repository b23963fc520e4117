"""Tables of provenance: ids that stand for sets of components."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from backends import imitate_gpu
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gradtrace.kernels import backend_of
from gradtrace.tracing import provenance
from gradtrace.tracing.provenance import (
    PackedSets,
    ProvenanceTable,
    Words,
    compact,
    distinct,
    sliced,
    words_of,
)


def compacted(ids: Tensor, table: ProvenanceTable) -> tuple[Tensor, ProvenanceTable]:
    return compact(ids, table, backend_of(ids))


def read(numbers: torch.Tensor, palette: ProvenanceTable) -> list[int]:
    """The mark of each element."""
    known = palette.sets()
    return [known[n] for n in numbers.reshape(-1).tolist()]


def test_more_bits_for_all_cost_nothing() -> None:
    palette = ProvenanceTable((1, 3)).with_bits(1 << 200).with_bits(4)
    assert palette.rows == (1, 3)
    assert palette.sets() == [0, 1 | 4 | 1 << 200, 3 | 4 | 1 << 200]
    assert palette.with_bits(4) is palette


def test_one_palette_after_another() -> None:
    first, second = ProvenanceTable((1, 3)).with_bits(8), ProvenanceTable((1, 5)).with_bits(16)
    both, shift = first.joined(second)
    assert both.sets() == [0, 9, 11, 17, 21]
    assert [both.sets()[n + shift] for n in (1, 2)] == second.sets()[1:]


def test_a_palette_after_itself_is_itself() -> None:
    palette = ProvenanceTable((1, 3))
    assert palette.with_bits(8).joined(palette.with_bits(8)) == (palette.with_bits(8), 0)
    assert palette.with_bits(8).joined(palette.with_bits(16)) == (
        ProvenanceTable((9, 11, 17, 19)),
        2,
    )


@pytest.mark.parametrize("waits", [True, False])
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=40),
    st.integers(0, 2**80),
    st.sampled_from([4, 8, 9]),
    st.booleans(),
)
def test_compact_changes_no_mark(
    waits: bool, drawn: list[int], extra: int, kinds: int, words: bool
) -> None:
    """And leaves each that is used once."""
    rows: Sequence[int] = tuple(1 | (n % kinds) << 70 for n in range(9))  # some are equal
    rows = PackedSets(words_of(rows)) if words else rows
    palette = ProvenanceTable(rows, extra)
    numbers = torch.tensor(drawn, dtype=torch.int32)
    before = read(numbers, palette)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(provenance, "COMPACT_ABOVE_ENTRIES", 2)
        patch.setattr(provenance, "TUPLE_MAX_ROWS", 5)
        imitate_gpu(patch, waits)
        found, smaller = compacted(numbers, palette)
    assert read(found, smaller) == before
    assert found.dtype is torch.int32
    used = {palette.sets()[n] for n in drawn if n}
    assert len(smaller.rows) == max(1, len(used))


def test_small_palettes_are_left_alone() -> None:
    numbers = torch.tensor([0, 1], dtype=torch.int32)
    assert compacted(numbers, ProvenanceTable((1, 1))) == (numbers, ProvenanceTable((1, 1)))


def test_slices_add_bits_of_their_own() -> None:
    palette = ProvenanceTable((1, 3), 64)
    numbers = torch.tensor([[1, 2, 0], [2, 1, 1]], dtype=torch.int32)
    found, wider = sliced(numbers, palette, 1, [4, 8, 4], backend_of(numbers))
    assert read(found, wider) == [69, 75, 0, 71, 73, 69]
    found, wider = sliced(numbers, palette, 0, [0, 8], backend_of(numbers))
    assert read(found, wider) == [65, 67, 0, 75, 73, 73]


def test_many_marks_are_words() -> None:
    """Long palettes say what short ones do, however many bits they have."""
    few = ProvenanceTable(tuple(1 | n << 60 for n in range(100)), 1 << 130)
    many = few
    wanted = few.sets()[1:]
    for turn in range(3):
        other = ProvenanceTable(tuple(1 | n << (3 * turn) for n in range(100)), 2 << turn)
        many, shift = many.joined(other)
        assert shift == len(wanted)
        wanted += other.sets()[1:]
    assert isinstance(many.rows, PackedSets)
    assert many.with_bits(1 << 300).sets() == [0, *(mark | 1 << 300 for mark in wanted)]
    assert list(many.rows[10:12]) == wanted[10:12]
    both, shift = few.joined(many.with_bits(1 << 300))
    assert both.sets() == [*few.sets(), *(mark | 1 << 300 for mark in wanted)]
    assert many.joined(many) == (many, 0)


@pytest.mark.parametrize(
    "odd", [provenance.ODD, np.zeros_like(provenance.ODD)], ids=["keys", "one key"]
)
@given(
    st.sampled_from([1, 3, 300]),
    st.lists(st.integers(0, 40), max_size=60),
    st.integers(0, 1000),
)
def test_equal_marks_are_found_by_their_words(
    odd: Words, width: int, drawn: list[int], seed: int
) -> None:
    """Even where keys are the same by chance."""
    kinds = np.random.default_rng(seed).integers(0, 1 << 63, (41, width), np.uint64)
    words = kinds[np.array(drawn, dtype=np.intp)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(provenance, "ODD", odd)
        found = distinct(words)
    lines = [tuple(line) for line in words.tolist()]
    places = {line: n for n, line in reversed(list(enumerate(lines)))}
    if found is None:
        assert len(places) == len(lines)
        return
    firsts, which = found
    assert firsts.tolist() == sorted(places.values())
    assert [lines[firsts[n]] for n in which] == lines


def test_marks_all_different_are_left_where_they_are() -> None:
    words = np.arange(5000, dtype=np.uint64).reshape(-1, 2)
    assert distinct(words) is None
    assert distinct(words[:0]) is None
    words[7] = words[2000]
    found = distinct(words)
    assert found is not None
    assert len(found[0]) == len(words) - 1


@given(st.lists(st.integers(1, 2**200), min_size=1, max_size=12), st.integers(1, 12))
def test_words_are_the_marks_they_were(rows: list[int], long: int) -> None:
    """As they are, one after the other, and with bits of slices."""
    assert list(PackedSets(words_of(rows))) == rows
    assert list(PackedSets(words_of(rows, 5, 9))) == [row | 5 for row in rows]
    table = ProvenanceTable(PackedSets(words_of(rows)), 1 << 70)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(provenance, "TUPLE_MAX_ROWS", long)
        for first, second in (
            (ProvenanceTable(rows, 2), table),
            (table, ProvenanceTable(rows)),
            (table, table),
        ):
            both, _ = first.joined(second)
            assert both.sets() == [0, *first.sets()[1:], *second.sets()[1:]][: 1 + len(both.rows)]
            assert isinstance(both.rows, PackedSets) == (len(both.rows) > long or first is second)
        more = [4, 1 << 300]
        wanted = [row | bits for row in table.sets()[1:] for bits in more]
        assert table.times(more).sets() == [0, *wanted]


def test_words_of_a_table_are_its_own() -> None:
    table = PackedSets(words_of([1, 2, 3]))
    assert words_of(table) is table.words
    words_of(table, 8)
    ProvenanceTable(table, 8).joined(ProvenanceTable((4,)))
    assert list(table) == [1, 2, 3]


@given(
    st.lists(
        st.tuples(st.sampled_from(["mark", "twice", "both", "compact"]), st.integers(0, 31)),
        max_size=16,
    )
)
def test_what_is_known_of_marks_holds(moves: list[tuple[str, int]]) -> None:
    """Through all that palettes go through, against a list of the elements' marks; none is there
    twice after it was looked for, nor ever where that is said.
    """
    numbers, palette, wanted = torch.tensor([0, 1], dtype=torch.int32), ProvenanceTable(), [0, 1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(provenance, "COMPACT_ABOVE_ENTRIES", 1)
        patch.setattr(provenance, "TUPLE_MAX_ROWS", 2)
        for kind, drawn in moves:
            bits = drawn << 62  # in two words
            if kind == "mark":
                palette = palette.with_bits(bits)
                wanted = [mark and mark | bits for mark in wanted]
            elif kind == "compact":
                numbers, palette = compacted(numbers, palette)
                assert len({*palette.rows}) == len(palette.rows) == max(1, len({*wanted} - {0}))
            else:
                other = (
                    ProvenanceTable((1, 9)).with_bits(bits)
                    if kind == "both"
                    else palette.with_bits(bits)
                )
                palette, shift = palette.joined(other)
                more = 1 + (torch.arange(3, dtype=torch.int32) + drawn) % len(other.rows)
                wanted += [other.sets()[n] for n in more.tolist()]
                numbers = torch.cat([numbers, more + shift])
            assert read(numbers, palette) == wanted
            known = palette.rows.bounds if isinstance(palette.rows, PackedSets) else None
            if known is not None:
                assert len({*palette.rows}) == len(palette.rows)
                for row in palette.rows:
                    assert row & known.least == known.least
                    assert row | known.most == known.most


def test_marks_that_are_known_to_differ_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of terms one of which went through a module, again and again."""
    monkeypatch.setattr(provenance, "distinct", pytest.fail)
    palette, numbers = ProvenanceTable(), torch.ones(1, dtype=torch.int32)
    for turn in range(1, 30):
        palette, shift = palette.joined(palette.with_bits(1 << 7 * turn))
        numbers, palette = compacted(torch.cat([numbers, numbers + shift])[-700:], palette)
    assert len({*palette.rows}) == len(palette.rows) == len(numbers) == 700


def test_marks_that_became_equal_are_one() -> None:
    """A bit that some of them have comes to all."""
    first = ProvenanceTable(tuple(1 | n << 1 for n in range(300)))
    both, _ = first.joined(first.with_bits(1 << 40))
    assert isinstance(both.rows, PackedSets)
    assert both.rows.bounds is not None
    numbers = torch.arange(601, dtype=torch.int32)
    before = read(numbers, both.with_bits(1 << 40))
    found, smaller = compacted(numbers, both.with_bits(1 << 40))
    assert read(found, smaller) == before
    assert len(smaller.rows) == 300
