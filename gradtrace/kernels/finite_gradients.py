"""Whether the gradients of some parameters are finite, looked at in every step of training.

One small operation of torch takes 5 µs, and 30 to 40 where the caches hold the step's own data; the
compiled function some microseconds.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from math import isfinite, nan
from typing import Any

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
        here = all(each.is_cpu and each.dtype in KINDS for each in parameters)
        self._compiled = compiled = cpu_library.brief("first_nonfinite") if here else None
        self.finite = self._by_sums if compiled is None else self._by_address(compiled)
        """Whether all are, as far as this can tell: the sum of large numbers may be infinite."""

    def _by_address(self, compiled: Callable[..., Any]) -> Callable[[], bool]:
        """``finite`` by the compiled function. All it needs are variables of its own, since it runs
        in every step, where attributes have left the caches.
        """
        known = [(3 * n, each, each.nbytes) for n, each in enumerate(self._parameters)]
        facts = [fact for each in self._parameters for fact in (0, each.numel(), KINDS[each.dtype])]
        items = array("q", facts)  # addresses, sizes and kinds
        address = ctypes.c_void_p(items.buffer_info()[0])
        count, otherwise = ctypes.c_int64(len(known)), self._by_sums

        def finite() -> bool:
            try:
                for at, parameter, size in known:
                    grad = parameter.grad
                    if (
                        type(grad) is not Tensor
                        or not grad.is_contiguous()
                        or grad.nbytes != size  # of another dtype, or the parameter was replaced
                        or not grad.is_cpu
                    ):
                        return otherwise()
                    items[at] = grad.data_ptr()
            except RuntimeError:  # of sparse gradients, which have no address
                return otherwise()
            return compiled(count, address) < 0  # type: ignore[no-any-return]

        return finite

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
