"""Whether the gradients of some parameters are finite, looked at in every step of training.

One small operation of torch takes 5 µs, and 30 to 40 where the caches hold the step's own data; the
compiled function some microseconds.
"""

from __future__ import annotations

import ctypes
from array import array
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
        here = all(each.is_cpu for each in parameters)
        self._compiled = cpu_library.brief("first_nonfinite") if here else None
        if any(each.dtype not in KINDS for each in parameters):
            self._compiled = None
        self._known = [(3 * n, p, p.dtype, p.numel()) for n, p in enumerate(parameters)]
        facts = [each for p in parameters for each in (0, p.numel(), KINDS.get(p.dtype, 0))]
        self._items = array("q", facts)  # addresses, sizes and kinds
        self._address = ctypes.c_void_p(self._items.buffer_info()[0])
        self._count = ctypes.c_int64(len(parameters))

    def finite(self) -> bool:
        """Whether all are, as far as this can tell: the sum of large numbers may be infinite."""
        compiled = self._compiled
        if compiled is None:
            return self._by_sums()
        try:
            for at, parameter, dtype, size in self._known:
                grad = parameter.grad
                if (
                    type(grad) is not Tensor
                    or grad.dtype is not dtype
                    or not grad.is_contiguous()
                    or grad.numel() != size
                    or not grad.is_cpu
                ):
                    return self._by_sums()
                self._items[at] = grad.data_ptr()
        except RuntimeError:  # of sparse gradients, which have no address
            return self._by_sums()
        return bool(compiled(self._count, self._address) < 0)

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
