"""Palettes: numbers that stand for marks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradtrace import marks, waiting
from gradtrace.marks import Palette, Table, compact, distinct, sliced


def read(numbers: torch.Tensor, palette: Palette) -> list[int]:
    """The mark of each element."""
    known = palette.marks()
    return [known[n] for n in numbers.reshape(-1).tolist()]


def test_more_bits_for_all_cost_nothing() -> None:
    palette = Palette((1, 3)).mark(1 << 200).mark(4)
    assert palette.rows == (1, 3)
    assert palette.marks() == [0, 1 | 4 | 1 << 200, 3 | 4 | 1 << 200]
    assert palette.mark(4) is palette


def test_one_palette_after_another() -> None:
    first, second = Palette((1, 3)).mark(8), Palette((1, 5)).mark(16)
    both, shift = first.then(second)
    assert both.marks() == [0, 9, 11, 17, 21]
    assert [both.marks()[n + shift] for n in (1, 2)] == second.marks()[1:]


def test_a_palette_after_itself_is_itself() -> None:
    palette = Palette((1, 3))
    assert palette.mark(8).then(palette.mark(8)) == (palette.mark(8), 0)
    assert palette.mark(8).then(palette.mark(16)) == (Palette((9, 11, 17, 19)), 2)


@pytest.mark.parametrize("waits", [True, False])
@given(st.lists(st.integers(0, 9), min_size=1, max_size=40), st.integers(0, 2**80))
def test_compact_changes_no_mark(waits: bool, drawn: list[int], extra: int) -> None:
    rows = tuple(1 | (n % 4) << 70 for n in range(9))  # some are equal
    palette = Palette(rows, extra)
    numbers = torch.tensor(drawn, dtype=torch.int32)
    before = read(numbers, palette)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(marks, "MANY", 2)
        patch.setattr(waiting, "avoid", lambda x: waits)
        found, smaller = compact(numbers, palette)
    assert read(found, smaller) == before
    assert found.dtype is torch.int32
    used = {palette.marks()[n] for n in drawn if n}
    assert len(smaller.rows) == max(1, len(used))


def test_small_palettes_are_left_alone() -> None:
    numbers = torch.tensor([0, 1], dtype=torch.int32)
    assert compact(numbers, Palette((1, 1))) == (numbers, Palette((1, 1)))


def test_slices_add_bits_of_their_own() -> None:
    palette = Palette((1, 3), 64)
    numbers = torch.tensor([[1, 2, 0], [2, 1, 1]], dtype=torch.int32)
    found, wider = sliced(numbers, palette, 1, [4, 8, 4])
    assert read(found, wider) == [69, 75, 0, 71, 73, 69]
    found, wider = sliced(numbers, palette, 0, [0, 8])
    assert read(found, wider) == [65, 67, 0, 75, 73, 73]


def test_many_marks_are_words() -> None:
    """Long palettes say what short ones do, however many bits they have."""
    few = Palette(tuple(1 | n << 60 for n in range(100)), 1 << 130)
    many = few
    wanted = few.marks()[1:]
    for turn in range(3):
        other = Palette(tuple(1 | n << (3 * turn) for n in range(100)), 2 << turn)
        many, shift = many.then(other)
        assert shift == len(wanted)
        wanted += other.marks()[1:]
    assert isinstance(many.rows, Table)
    assert many.mark(1 << 300).marks() == [0, *(mark | 1 << 300 for mark in wanted)]
    assert list(many.rows[10:12]) == wanted[10:12]
    both, shift = few.then(many.mark(1 << 300))
    assert both.marks() == [*few.marks(), *(mark | 1 << 300 for mark in wanted)]
    assert many.then(many) == (many, 0)


@pytest.mark.parametrize("width", [1, 3, 300])
def test_equal_marks_are_found_by_their_words(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where keys are the same by chance."""
    draw = np.random.default_rng(0)
    words = draw.integers(0, 2, (200, width), np.uint64)
    words[100:] = words[draw.permutation(100)]
    for odd in (marks.ODD, np.zeros_like(marks.ODD)):
        monkeypatch.setattr(marks, "ODD", odd)
        firsts, which = distinct(words)
        lines = [tuple(line) for line in words.tolist()]
        places = {line: n for n, line in reversed(list(enumerate(lines)))}
        assert firsts.tolist() == sorted(places.values())
        assert [lines[firsts[n]] for n in which] == lines
