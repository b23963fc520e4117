"""Refuses gradients that are NaN or infinite, and says where that began."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from gradtrace.autodiff.backward import first_nonfinite
from gradtrace.autodiff.hooks import HookWatch
from gradtrace.autodiff.names import NameTable
from gradtrace.errors import NonFinite
from gradtrace.ir.lazy_gradient import LazyGradient, sizes_of
from gradtrace.ir.program import Leaf, Program
from gradtrace.kernels import Backend, backend_of
from gradtrace.linops.enclosed import parts_of
from gradtrace.pytorch.plain_tensors import PLAIN, numbers_of


def maybe_nonfinite(named: Mapping[str, Leaf]) -> list[str]:
    """The leaves whose gradients must be computed to know whether they are finite."""
    lazy = {n: leaf.given for n, leaf in named.items() if isinstance(leaf.given, LazyGradient)}
    sizes = sizes_of(lazy.values()) if lazy else {}
    sure = {name for name, sum_ in lazy.items() if sum_.surely_finite(sizes)}
    return [name for name, leaf in named.items() if name not in sure and leaf.layout is None]


def surely_finite(program: Program) -> bool:
    """Whether nothing that a program reads is NaN or infinite. A gradient may still overflow;
    values of other semirings have a wider range. False also if ranks hold parts of its values: they
    must go on alike.
    """
    if program.constants.parts is not None:
        return False
    tensors, waiting = [program.seed], list[Any](program.maps)
    while waiting:
        each = waiting.pop()
        if isinstance(each, Tensor):
            tensors.append(each)
        elif isinstance(each, float) and not isfinite(each):
            return False
        else:
            waiting += parts_of(each)
    read = {id(x): x for x in tensors if x.is_floating_point() and x.layout is torch.strided}
    return sums_are_finite(read.values())


def refuse_nonfinite(
    named: Mapping[str, Tensor],
    loss: Tensor,
    seed: Tensor,
    table: NameTable,
    watch: HookWatch,
    loss_too: bool = False,
) -> None:
    """Raise if a gradient (with ``loss_too``: or the loss) is NaN or infinite; names it, and the
    operator where that began.
    """
    value = loss.detach()
    if sums_are_finite([*named.values(), *([value] if loss_too else [])]):
        return
    bad = [name for name, grad in named.items() if not _is_finite(grad)]
    text = f"the loss is not finite ({float(value.sum()):.4g})" if not _is_finite(value) else ""
    if bad:
        where = first_nonfinite(loss, seed, table, watch)
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        raise NonFinite(
            f"{text}{', and ' * bool(text)}the gradient of {bad[0]}{more} is not finite; NaN or "
            f"infinity first appears at {where}. {DIAGNOSE}, or pass nonfinite='allow'"
        )
    if text and loss_too:
        raise NonFinite(f"{text}, though its gradient is. {DIAGNOSE}, or pass nonfinite='allow'")


DIAGNOSE = (
    "Look at the values that go into it, ask for the line in your code (with "
    "gradtrace.watch(model, diagnose=True) as watch: ...; print(watch.diagnose(loss)))"
)


def _is_finite(x: Tensor) -> bool:
    return all(bool(torch.isfinite(part).all()) for part in numbers_of(x))


def sums_are_finite(grads: Iterable[Tensor]) -> bool:
    """Whether all gradients are certainly finite, by their sums; False also if a sum overflows."""
    by_backend: dict[Backend, list[Tensor]] = {}
    held = [(x,) if type(x) in PLAIN else numbers_of(x) for x in grads]
    for grad in chain.from_iterable(held):
        grad = grad.float() if grad.itemsize == 1 else grad  # PyTorch cannot sum float8
        by_backend.setdefault(backend_of(grad), []).append(grad)
    return all(backend.finite_sums(some) for backend, some in by_backend.items())
