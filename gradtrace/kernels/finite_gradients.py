"""Whether the gradients of some parameters are finite, looked at in every step of training.

One small operation of torch takes 5 µs, and 30 to 40 where the caches hold the step's own data; the
compiled function some microseconds.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from math import isfinite, nan

import torch
from torch import Tensor

from gradtrace.kernels import cpu_library

KINDS = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
"""The numbers of dtypes in the compiled function."""


class FiniteGradients:
    """Looks at the gradients of parameters that lie on one device.

    >>> weight = torch.nn.Parameter(torch.ones(3))
    >>> check = FiniteGradients([weight])
    >>> weight.grad = torch.tensor([1.0, 2.0, 3.0])
    >>> check.finite()
    True
    >>> weight.grad[1] = float("inf")
    >>> check.finite()
    False
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = tuple(parameters)
        library = cpu_library.library() if all(each.is_cpu for each in parameters) else None
        self._compiled = getattr(library, "gradtrace_first_nonfinite", None)
        if any(each.dtype not in KINDS for each in parameters):
            self._compiled = None
        self._known = [(each, each.dtype, each.numel()) for each in parameters]
        self._items = (ctypes.c_int64 * (3 * len(self._known)))()
        self._address = ctypes.addressof(self._items)

    def finite(self) -> bool:
        """Whether all are, as far as this can tell: the sum of large numbers may be infinite."""
        compiled, items, end = self._compiled, self._items, 0
        if compiled is None:
            return self._by_sums()
        try:
            for parameter, dtype, size in self._known:
                grad = parameter.grad
                if grad is None:
                    continue
                place = grad.data_ptr()
                plain = type(grad) is Tensor and grad.dtype is dtype and grad.is_contiguous()
                if not plain or not place or grad.numel() != size or not grad.is_cpu:
                    return self._by_sums()
                items[end], items[end + 1], items[end + 2] = place, size, KINDS[dtype]
                end += 3
        except RuntimeError:  # of sparse gradients, which have no address
            return self._by_sums()
        return bool(compiled(end // 3, self._address) < 0)

    def _by_sums(self) -> bool:
        grads = [grad for each in self._parameters if (grad := each.grad) is not None]
        return not grads or isfinite(_total(grads))


def _total(grads: list[Tensor]) -> float:
    """A number that is finite only if all numbers are; NaN if that is not known."""
    if len(grads) == 1:
        return float(grads[0].sum())
    try:
        return float(torch.stack(torch._foreach_norm(grads)).sum())
    except (RuntimeError, NotImplementedError):  # of sparse gradients
        return nan
