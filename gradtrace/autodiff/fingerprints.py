"""Whether weights hold what they held, also where no version counter tells (``p.data.mul_(2)``)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

COMPARE_ALL_MAX_ELEMENTS = 1 << 16
"""Tensors of at most so many elements are compared element by element."""

SAMPLE_ELEMENTS = 1 << 12
"""Of larger ones so many elements, evenly spread."""

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class WeightFingerprints:
    """What tensors on the CPU held when this was made. Those on a GPU are left out: to look at them
    is to wait for it.

    >>> w, v = torch.zeros(3), torch.zeros(100_000)
    >>> prints = WeightFingerprints([w, v])
    >>> prints.hold()
    True
    >>> w.data[1] = -0.0
    >>> prints.hold()
    False
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._views: dict[torch.dtype, list[Tensor]] = {}  # views of the memory itself
        for tensor in tensors:
            if tensor.is_cpu and tensor.layout is torch.strided and tensor.numel():
                flat = _flat_view(tensor.detach())
                self._views.setdefault(flat.dtype, []).append(flat)
        self._held = self._read_bits()

    def _read_bits(self) -> list[Tensor]:
        # as whole numbers, so that NaN equals itself and -0 is not 0
        return [torch.cat(views).view(BITS[dtype.itemsize]) for dtype, views in self._views.items()]

    def hold(self) -> bool:
        """Whether the tensors hold what they held."""
        return all(map(torch.equal, self._read_bits(), self._held))


def _flat_view(tensor: Tensor) -> Tensor:
    """A view of the elements, or of some of a large tensor, in one dimension: of the memory between
    the first and the last, if they lie apart.
    """
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.is_contiguous():
        flat = tensor.view(-1)
    else:
        span = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride()))
        flat = tensor.as_strided((span,), (1,))
    return (
        flat if len(flat) <= COMPARE_ALL_MAX_ELEMENTS else flat[:: -(-len(flat) // SAMPLE_ELEMENTS)]
    )
