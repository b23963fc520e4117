"""Notices tensors whose ``.data`` was set to another tensor, which no version counter tells."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from gradtrace.pytorch.plain_tensors import PLAIN


def data_of(tensors: Iterable[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Leaves, each with a view of its data. Autograd holds these themselves, so that values saved
    of them are read from what they are then; of values between operators it holds tensors of its
    own.

    >>> x = torch.zeros(3)
    >>> before = data_of([x])
    >>> x.data = x + 1
    >>> have_data(before)
    False
    """
    found = {id(t): t for t in tensors if t.is_leaf and type(t) in PLAIN}
    return [(t, t.detach()) for t in found.values() if t.layout is torch.strided]


def have_data(before: Iterable[tuple[Tensor, Tensor]]) -> bool:
    """Whether each of the tensors lies where it did."""
    return not [t for t, at in before if t.dtype is not at.dtype or not t.is_set_to(at)]
