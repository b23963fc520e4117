"""Detects changes of weights, also those that version counters miss (``p.data.mul_(2)``)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from gradtrace.autodiff.tuning import COMPARE_ALL_MAX_ELEMENTS, SAMPLE_ELEMENTS

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class WeightFingerprints:
    """Copies of tensors, or of samples of them, to compare with later.

    Only tensors on the CPU are compared: reading those on a GPU would synchronise.

    >>> w, v = torch.zeros(3), torch.zeros(100_000)
    >>> prints = WeightFingerprints([w, v])
    >>> prints.hold()
    True
    >>> w.data[1] = -0.0
    >>> prints.hold()
    False
    """

    def __init__(self, tensors: Iterable[Tensor], whole: int = COMPARE_ALL_MAX_ELEMENTS) -> None:
        """Tensors of up to ``whole`` elements are compared as a whole."""
        self._views: dict[torch.dtype, list[Tensor]] = {}  # views, not copies
        with torch.no_grad():  # takes less time than to detach each
            for tensor in tensors:
                plain = tensor.is_cpu and tensor.layout is torch.strided
                if plain and tensor.numel() and not tensor._is_zerotensor():
                    flat = _flat_view(tensor, whole)
                    self._views.setdefault(flat.dtype, []).append(flat)
        self._held = self._read_bits()

    def _read_bits(self) -> list[Tensor]:
        # as integers, so that NaN equals itself and -0 differs from 0
        return [torch.cat(views).view(BITS[dtype.itemsize]) for dtype, views in self._views.items()]

    def hold(self) -> bool:
        """Whether the tensors have the same bits as when this object was made."""
        return all(map(torch.equal, self._read_bits(), self._held))


def _flat_view(tensor: Tensor, whole: int) -> Tensor:
    """A 1-d view of the elements; of large tensors, of evenly spaced ones.

    A tensor that is not contiguous is viewed as the whole range of storage it spans.
    """
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.is_contiguous():
        flat = tensor.view(-1)
    else:
        span = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride()))
        flat = tensor.as_strided((span,), (1,))
    size = flat.numel()
    return flat if size <= whole else flat[:: -(-size // SAMPLE_ELEMENTS)]
