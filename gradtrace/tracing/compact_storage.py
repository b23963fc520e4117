"""Compact storage of traced values between uses, where memory is short.

Provenance ids are int32 while they are computed with. Most provenance tables have few entries, so
one or two bytes are enough while a value waits for its use.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from gradtrace.kernels.strides import is_dense
from gradtrace.tracing.traced_value import TracedValue

ID_DTYPES = ((torch.uint8, 255), (torch.int16, 32_767))
"""Types, and the highest id that each can hold."""


class CompactValues(dict[int, TracedValue]):
    """Traced values by number: ids are narrowed when a value is stored and widened when it is read.

    Many values share their ids, or are views of them: diagonal maps and gathers keep ids. So a weak
    dictionary maps wide tensors to their narrow ones, and views are stored as views of the narrow
    tensor. Tensors that were stored or read must not be written to.
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
        return state._replace(ids=_same_view(held, wide))

    def _packed(self, ids: Tensor, count: int) -> Tensor:
        whole = _whole(ids)
        narrow: Tensor | None = self._narrow.get(whole)  # type: ignore[no-untyped-call]
        if narrow is None:
            narrow = narrowed(whole, count)
            if narrow is whole:
                return ids
            self._narrow[whole] = narrow
        return _same_view(ids, narrow)


def _whole(x: Tensor) -> Tensor:
    """The base of a view, if it is dense and starts at offset 0; else the tensor itself."""
    base = x._base
    return x if base is None or base.storage_offset() or not is_dense(base) else base


def _same_view(view: Tensor, whole: Tensor) -> Tensor:
    """The same view (shape, strides, offset) of ``whole``, which has the strides of its base."""
    if view.shape == whole.shape and view.stride() == whole.stride():
        return whole
    return whole.as_strided(view.shape, view.stride(), view.storage_offset())


def narrowed(ids: Tensor, count: int) -> Tensor:
    """Ids of a table of ``count`` entries in the narrowest type.

    Tensors with gaps or overlapping elements stay as they are: a copy might take more memory, and
    would have other strides, on which the order of summation depends.
    """
    if not is_dense(ids):
        return ids
    return ids.to(next((kind for kind, most in ID_DTYPES if count <= most), torch.int32))


def packed(state: TracedValue) -> TracedValue:
    """A value with narrow ids, whose tensors are not shared."""
    if state.ids is None:
        return state
    return state._replace(ids=narrowed(state.ids, len(state.provenance.rows)))


def unpacked(state: TracedValue) -> TracedValue:
    """The same value with int32 ids, which may be written to."""
    return state if state.ids is None else state._replace(ids=state.ids.int())


def take(states: dict[int, TracedValue], value: int) -> TracedValue:
    """Pop a value; reads it first, so that ``CompactValues`` widens its ids."""
    state = states[value]
    del states[value]
    return state
