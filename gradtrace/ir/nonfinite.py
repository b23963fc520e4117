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
from gradtrace.kernels import Backend, backend_of, fetch_scalars
from gradtrace.pytorch.plain_tensors import numbers_of


def maybe_nonfinite(named: Mapping[str, Leaf]) -> list[str]:
    """The leaves whose gradients must be computed to know whether they are finite."""
    lazy = {n: leaf.given for n, leaf in named.items() if isinstance(leaf.given, LazyGradient)}
    sizes = sizes_of(lazy.values())
    sure = {name for name, sum_ in lazy.items() if sum_.surely_finite(sizes)}
    return [name for name, leaf in named.items() if name not in sure and leaf.layout is None]


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
    """Whether all gradients are certainly finite, by their sums; False also if a sum overflows."""
    by_backend: dict[Backend, list[Tensor]] = {}
    for grad in chain.from_iterable(map(numbers_of, grads)):
        grad = grad.float() if grad.itemsize == 1 else grad  # PyTorch cannot sum float8
        by_backend.setdefault(backend_of(grad), []).append(grad)
    sums = [x for backend, some in by_backend.items() for x in backend.finite_sums(some)]
    return all(map(math.isfinite, fetch_scalars(sums)))
