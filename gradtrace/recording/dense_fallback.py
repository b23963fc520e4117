"""Formulas that cannot be recorded: stored as dense matrices if small, else as functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from gradtrace.errors import GradtraceError
from gradtrace.recording.aten_rules import as_real, shape_of
from gradtrace.recording.dispatch import close

Formula: TypeAlias = "Callable[[Sequence[Tensor | None]], Sequence[Tensor | None]]"
"""From cotangents (None where missing) to results."""

Refusal: TypeAlias = "Callable[[], GradtraceError]"
"""Makes the error that says why a formula could not be recorded. A factory, not an exception: a
raised exception refers to its frames, so keeping it in one of them makes a reference cycle."""


def matrices(
    f: Formula,
    grads: Sequence[Tensor | None],
    outs: Sequence[Tensor | None],
    limit: int,
    refusal: Refusal,
) -> list[list[tuple[int, Tensor]]]:
    """For each result, pairs (slot, matrix): the Jacobian with respect to each cotangent.

    Columns are computed one by one from unit cotangents. Raises ``refusal()`` if the matrices have
    more than ``limit`` entries, or do not reproduce ``outs``, so that ``f`` is not linear.
    """
    found: list[list[tuple[int, Tensor]]] = [[] for _ in outs]
    if entries(grads, outs) > limit:
        raise refusal()
    totals = [None if o is None else torch.zeros_like(_flatten(o)) for o in outs]
    for slot, grad in enumerate(grads):
        if grad is None:
            continue
        results = []
        for j in range(shape_size(grad)):
            unit = torch.zeros(shape_of(grad), dtype=grad.dtype.to_real(), device=grad.device)
            unit.reshape(-1)[j] = 1
            only: list[Tensor | None] = [None if g is None else torch.zeros_like(g) for g in grads]
            only[slot] = torch.view_as_complex(unit) if grad.is_complex() else unit
            results.append(f(only))
        for k, out in enumerate(outs):
            total = totals[k]
            if out is None or total is None:
                continue
            columns_k = [total * 0 if (c := r[k]) is None else _flatten(c) for r in results]
            matrix = torch.stack(columns_k, -1) if columns_k else total.new_zeros(len(total), 0)
            found[k].append((slot, matrix))
            totals[k] = total + matrix @ _flatten(grad).to(matrix.dtype)
    for out, total in zip(outs, totals):
        if out is not None and total is not None and not close(total, _flatten(out)):
            raise refusal()
    return found


def entries(grads: Sequence[Tensor | None], outs: Sequence[Tensor | None]) -> int:
    """The number of entries of the matrix from all cotangents to all results."""
    rows = sum(shape_size(o) for o in outs if o is not None)
    return rows * sum(shape_size(g) for g in grads if g is not None)


def single(
    f: Formula,
    grads: Sequence[Tensor | None],
    slot: int,
    k: int,
) -> Callable[[Tensor], Tensor]:
    """The k-th result as a function of the cotangent ``slot``, with the others zero."""
    like = [None if g is None else (g.shape, g.dtype, g.device) for g in grads]

    def function(x: Tensor) -> Tensor:
        given: list[Tensor | None] = [
            None if a is None else torch.zeros(a[0], dtype=a[1], device=a[2]) for a in like
        ]
        at = like[slot]
        assert at is not None
        given[slot] = torch.view_as_complex(x.contiguous()) if at[1].is_complex else x.to(at[1])
        out = f(given)[k]
        assert out is not None
        return as_real(out)

    return function


def shape_size(x: Tensor) -> int:
    """The number of real numbers in a tensor; a complex element counts as two."""
    return x.numel() * (2 if x.is_complex() else 1)


def _flatten(x: Tensor) -> Tensor:
    return as_real(x).reshape(-1)
