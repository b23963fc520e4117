"""Refuses gradients that are NaN or infinite, and says where that began."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import chain

import torch
from torch import Tensor

from gradtrace.autodiff.backward import first_nonfinite
from gradtrace.autodiff.hooks import HookWatch
from gradtrace.autodiff.names import NameTable
from gradtrace.errors import NonFinite
from gradtrace.ir.lazy_gradient import LazyGradient, sizes_of
from gradtrace.ir.program import Leaf
from gradtrace.kernels import sync
from gradtrace.kernels.sync import fetch_scalars
from gradtrace.pytorch.plain_tensors import numbers_of


def maybe_nonfinite(named: Mapping[str, Leaf]) -> list[str]:
    """The leaves whose gradients must be computed to know whether they are finite."""
    lazy = {n: leaf.given for n, leaf in named.items() if isinstance(leaf.given, LazyGradient)}
    sizes = sizes_of(lazy.values())
    sure = {name for name, sum_ in lazy.items() if sum_.surely_finite(sizes)}
    return [name for name in named if name not in sure]


def refuse_nonfinite(
    named: Mapping[str, Tensor], loss: Tensor, seed: Tensor, table: NameTable, watch: HookWatch
) -> None:
    """Raise if a gradient is NaN or infinite; names it, and the operator where that began."""
    if sums_are_finite(named.values()):
        return
    bad = [
        name
        for name, grad in named.items()
        if not all(bool(torch.isfinite(part).all()) for part in numbers_of(grad))
    ]
    if bad:
        where = first_nonfinite(loss, seed, table, watch)
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        raise NonFinite(
            f"the gradient of {bad[0]}{more} is not finite; NaN or infinity first appears at "
            f"{where}. Look at the values that go into it, or pass nonfinite='allow'"
        )


def sums_are_finite(grads: Iterable[Tensor]) -> bool:
    """Whether all gradients are certainly finite, by their sums; False also if a sum overflows.

    Small gradients of one shape are concatenated and summed in one call, to save overhead. On a GPU
    one call per dtype computes the largest magnitude of each.
    """
    by_shape: dict[tuple[object, ...], list[Tensor]] = {}
    on_gpu: dict[tuple[object, ...], list[Tensor]] = {}
    sums: list[Tensor] = []
    for grad in chain.from_iterable(map(numbers_of, grads)):
        if grad.itemsize == 1:  # PyTorch cannot sum float8
            grad = grad.float()
        if sync.would_sync(grad) and grad.numel():
            on_gpu.setdefault((grad.dtype, grad.device), []).append(grad)
        elif grad.numel() < CONCAT_MAX_ELEMENTS:
            by_shape.setdefault((grad.dtype, grad.device, grad.shape), []).append(grad)
        else:
            sums.append(grad.sum())
    for some in on_gpu.values():
        sums.extend(torch._foreach_norm(some, math.inf))
    for some in by_shape.values():
        sums.append((torch.cat(some) if some[0].dim() else torch.stack(some)).sum())
    return all(map(math.isfinite, fetch_scalars(sums)))


CONCAT_MAX_ELEMENTS = 1 << 12
"""Gradients of fewer elements are concatenated before they are summed."""
