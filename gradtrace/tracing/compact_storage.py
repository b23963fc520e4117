"""States that wait for their use where memory is short: their marks in the narrowest type.

A number of a mark takes four bytes while it is worked with. Most palettes have few entries, so that
one byte, or two, hold it while it waits.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from gradtrace.linops.indexing import filled
from gradtrace.tracing.traced_value import State

NARROW = ((torch.uint8, 255), (torch.int16, 32_767))
"""Types, and the highest number that each can hold."""


class Shelf(dict[int, State]):
    """States by value: narrowed when they are put there, as they were when they are looked at.

    Many have the same numbers, or views of them: those of elements that are only weighed, or only
    moved. So it is remembered which narrow tensor a wide one was made of or became, as long as
    somebody has the wide one, and views are taken of the narrow one. What was put here, or looked
    at, is not written to.
    """

    def __init__(self) -> None:
        super().__init__()
        self._narrow = WeakTensorKeyDictionary()

    def __setitem__(self, value: int, state: State) -> None:
        numbers = state.numbers
        if numbers is not None and numbers.dtype is torch.int32:
            state = state._replace(numbers=self._packed(numbers, len(state.palette.rows)))
        super().__setitem__(value, state)

    def __getitem__(self, value: int) -> State:
        state = super().__getitem__(value)
        held = state.numbers
        if held is None or held.dtype is torch.int32:
            return state
        whole = _whole(held)
        wide = whole.int()
        self._narrow[wide] = whole
        return state._replace(numbers=_as(held, wide))

    def _packed(self, numbers: Tensor, count: int) -> Tensor:
        whole = _whole(numbers)
        narrow: Tensor | None = self._narrow.get(whole)  # type: ignore[no-untyped-call]
        if narrow is None:
            narrow = narrowed(whole, count)
            if narrow is whole:
                return numbers
            self._narrow[whole] = narrow
        return _as(numbers, narrow)


def _whole(x: Tensor) -> Tensor:
    """What a tensor is a view of, if that fills its memory from the start; or itself."""
    base = x._base
    return x if base is None or base.storage_offset() or not filled(base) else base


def _as(view: Tensor, whole: Tensor) -> Tensor:
    """The same view of a tensor that lies as what it is a view of."""
    if view.shape == whole.shape and view.stride() == whole.stride():
        return whole
    return whole.as_strided(view.shape, view.stride(), view.storage_offset())


def narrowed(numbers: Tensor, count: int) -> Tensor:
    """Numbers of a palette of so many entries, in the narrowest type. Those that lie apart in
    memory, or on top of each other, stay: a copy might take more, and would not lie as they do, by
    which the order of sums is chosen.
    """
    if not filled(numbers):
        return numbers
    return numbers.to(next((kind for kind, most in NARROW if count <= most), torch.int32))


def packed(state: State) -> State:
    """A state that nobody shares, with narrow numbers."""
    if state.numbers is None:
        return state
    return state._replace(numbers=narrowed(state.numbers, len(state.palette.rows)))


def unpacked(state: State) -> State:
    """The same with numbers to work with, and to write to."""
    return state if state.numbers is None else state._replace(numbers=state.numbers.int())


def take(states: dict[int, State], value: int) -> State:
    """A state that nobody asks for again."""
    state = states[value]
    del states[value]
    return state
