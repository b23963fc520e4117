"""States that wait for their use where memory is short: their marks in the narrowest type.

A number of a mark takes four bytes while it is worked with. Most palettes have few entries, so that
one byte, or two, hold it while it waits.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from gradtrace.linops.indexing import filled
from gradtrace.tracing.traced_value import TracedValue

NARROW = ((torch.uint8, 255), (torch.int16, 32_767))
"""Types, and the highest number that each can hold."""


class CompactValues(dict[int, TracedValue]):
    """States by value: narrowed when they are put there, as they were when they are looked at.

    Many have the same numbers, or views of them: those of elements that are only weighed, or only
    moved. So it is remembered which narrow tensor a wide one was made of or became, as long as
    somebody has the wide one, and views are taken of the narrow one. What was put here, or looked
    at, is not written to.
    """

    def __init__(self) -> None:
        super().__init__()
        self._narrow = WeakTensorKeyDictionary()

    def __setitem__(self, value: int, state: TracedValue) -> None:
        ids = state.ids
        if ids is not None and ids.dtype is torch.int32:
            state = state._replace(ids=self._packed(ids, len(state.provenance.rows)))
        super().__setitem__(value, state)

    def __getitem__(self, value: int) -> TracedValue:
        state = super().__getitem__(value)
        held = state.ids
        if held is None or held.dtype is torch.int32:
            return state
        whole = _whole(held)
        wide = whole.int()
        self._narrow[wide] = whole
        return state._replace(ids=_as(held, wide))

    def _packed(self, ids: Tensor, count: int) -> Tensor:
        whole = _whole(ids)
        narrow: Tensor | None = self._narrow.get(whole)  # type: ignore[no-untyped-call]
        if narrow is None:
            narrow = narrowed(whole, count)
            if narrow is whole:
                return ids
            self._narrow[whole] = narrow
        return _as(ids, narrow)


def _whole(x: Tensor) -> Tensor:
    """What a tensor is a view of, if that fills its memory from the start; or itself."""
    base = x._base
    return x if base is None or base.storage_offset() or not filled(base) else base


def _as(view: Tensor, whole: Tensor) -> Tensor:
    """The same view of a tensor that lies as what it is a view of."""
    if view.shape == whole.shape and view.stride() == whole.stride():
        return whole
    return whole.as_strided(view.shape, view.stride(), view.storage_offset())


def narrowed(ids: Tensor, count: int) -> Tensor:
    """Numbers of a palette of so many entries, in the narrowest type. Those that lie apart in
    memory, or on top of each other, stay: a copy might take more, and would not lie as they do, by
    which the order of sums is chosen.
    """
    if not filled(ids):
        return ids
    return ids.to(next((kind for kind, most in NARROW if count <= most), torch.int32))


def packed(state: TracedValue) -> TracedValue:
    """A state that nobody shares, with narrow numbers."""
    if state.ids is None:
        return state
    return state._replace(ids=narrowed(state.ids, len(state.provenance.rows)))


def unpacked(state: TracedValue) -> TracedValue:
    """The same with numbers to work with, and to write to."""
    return state if state.ids is None else state._replace(ids=state.ids.int())


def take(states: dict[int, TracedValue], value: int) -> TracedValue:
    """A state that nobody asks for again."""
    state = states[value]
    del states[value]
    return state
