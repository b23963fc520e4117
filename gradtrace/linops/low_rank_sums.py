"""``out[i] = Σⱼ |J[i, j]|**p · x[j]`` for lines with ``J = diag(d) + Σᵣ uᵣvᵣᵀ``, in less than n².

Norms have rank two. The sign of ``u₁[i]·v₁[j] + u₂[i]·v₂[j]`` changes once along the j sorted by
``v₁[j] / v₂[j]``, so for whole p the sum is a polynomial of u₁[i] and u₂[i] whose coefficients are
prefix sums: ``n log n`` for a line of n elements. Other powers and ranks take n², in chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import comb

import numpy as np
import torch
from torch import Tensor

from gradtrace.kernels import backend_of
from gradtrace.linops import tuning
from gradtrace.semirings import Semiring, Value

MAX_POLYNOMIAL_POWER = 8
"""The largest power that is expanded; the terms of higher ones are too large beside their sum."""


CHUNK_ELEMENTS = 1 << 16
"""The most elements of lines that are expanded at a time; their terms fit into a CPU's cache."""

DEVICE_CHUNK_ELEMENTS = 1 << 26
"""The same on other devices, where every chunk takes some forty launches."""


def is_expanded(p: float, rank: int, width: int) -> bool:
    """Whether ``expanded_sums`` is exact up to rounding, and faster than ``pairwise_sums``."""
    whole = p == int(p) and p <= MAX_POLYNOMIAL_POWER
    return whole and rank == 2 and width > tuning.PAIRWISE_MAX_ELEMENTS


def expanded_sums(
    diagonal: Tensor, left: Sequence[Tensor], right: Sequence[Tensor], x: Tensor, p: int
) -> Tensor:
    """The sums of lines, (lines, elements), for rank two and a whole p; in float64."""
    most = CHUNK_ELEMENTS if backend_of(x).host else DEVICE_CHUNK_ELEMENTS
    step = max(1, most // max(1, x.shape[1]))
    found = []
    for line in range(0, len(x), step):
        some = slice(line, line + step)
        d, *uv = (part[some] for part in (diagonal, *left, *right))
        found.append(_expanded(d, uv, x[some], p))
    return torch.cat(found)


def _expanded(diagonal: Tensor, uv: list[Tensor], x: Tensor, p: int) -> Tensor:
    u1, u2, v1, v2 = uv
    own = (u1 * v1 + u2 * v2).double()
    place, weight = None, x
    if p % 2:
        flip = torch.where((u1 < 0) | ((u1 == 0) & (u2 < 0)), -1.0, 1.0)
        u1, u2 = u1 * flip + 0.0, u2 * flip  # the sign does not matter; -0.0 would in a quotient
        flip = torch.where((v2 < 0) | ((v2 == 0) & (v1 < 0)), -1.0, 1.0)
        v1, v2 = v1 * flip, v2 * flip + 0.0
        ratio, zero = (
            (a / b).nan_to_num(0.0, torch.inf, -torch.inf) for a, b in ((v1, v2), (-u2, u1))
        )
        order, place = _sorted_places(ratio, zero)
        v1, v2, weight = v1.gather(1, order), v2.gather(1, order), x.gather(1, order)
    u1, u2, v1, v2, weight, x = (part.double() for part in (u1, u2, v1, v2, weight, x))
    total = torch.zeros_like(x)
    for k in range(p + 1):
        moment = _monomial(v1, v2, k, p) * weight
        if place is None:
            found = moment.sum(1, keepdim=True)
        else:  # products before the place are negative
            prefix = torch.cat([moment.new_zeros(len(moment), 1), moment.cumsum(1)], 1)
            found = prefix[:, -1:] - 2 * prefix.gather(1, place)
        total = total.addcmul_(_monomial(u1, u2, k, p), found, value=comb(p, k))
    others = (total - own.abs().pow(p) * x).clamp_(min=0)
    return others + (diagonal + own).abs().pow(p) * x


def _sorted_places(ratio: Tensor, zero: Tensor) -> tuple[Tensor, Tensor]:
    """The order of each line of ratios, and the place of each of the other numbers in it."""
    if not backend_of(ratio).host or ratio.dtype is not torch.float32:
        ratio, order = ratio.sort(1)
        return order, torch.searchsorted(ratio.contiguous(), zero.contiguous())
    # On a CPU one sort of whole numbers, (key, index), takes a fifth of the time of both.
    lines, n = ratio.shape
    keys = torch.cat([ratio, zero], 1).numpy().view(np.int32).astype(np.int64)
    keys = np.where(keys < 0, keys ^ 0x7FFFFFFF, keys) << 32  # ordered as the floats are
    index = np.sort(keys | np.arange(2 * n), 1) & 0xFFFFFFFF
    wanted = index >= n
    before = np.cumsum(~wanted, 1)
    place = np.empty((lines, n), np.int64)
    np.put_along_axis(
        place, (index[wanted] - n).reshape(lines, n), before[wanted].reshape(lines, n), 1
    )
    return torch.from_numpy(index[~wanted].reshape(lines, n)), torch.from_numpy(place)


def sums_of_others(x: Tensor) -> Tensor:
    """``out[l, i] = Σⱼ x[l, j]`` over ``j ≠ i``, for x ≥ 0, without cancellation: nothing is
    subtracted from a sum that it is the largest part of.
    """
    most, at = x.max(1, keepdim=True)
    rest = x.scatter(1, at, 0.0)
    total = rest.sum(1, keepdim=True)
    return (total - rest).add_(most).scatter_(1, at, total)


def _monomial(a: Tensor, b: Tensor, k: int, p: int) -> Tensor:
    """``a**k · b**(p − k)``."""
    if k in (0, p):
        return a.pow(p) if k else b.pow(p)
    return a.pow(k) * b.pow(p - k)


def pairwise_sums(
    diagonal: Tensor, left: Sequence[Tensor], right: Sequence[Tensor], x: Value, semiring: Semiring
) -> Value:
    """``⊕ⱼ lift(J[i, j]) ⊗ x[j]`` of lines, (lines, elements), in any semiring and for any rank.
    All n² weights of a line are formed, in chunks of ``ROWS_MAX_ENTRIES``.
    """
    lines, n = x[0].shape
    rows = min(n, max(1, tuning.ROWS_MAX_ENTRIES // max(1, n)))
    step = max(1, tuning.ROWS_MAX_ENTRIES // max(1, n * rows))
    found: list[Value] = []
    for line in range(0, lines, step):
        some = slice(line, line + step)
        parts = tuple(part[some] for part in x)
        chunks = []
        for first in range(0, n, rows):
            here = slice(first, first + rows)
            weight = diagonal.new_zeros(len(parts[0]), len(range(n)[here]), n)  # (line, i, j)
            for u, v in zip(left, right):
                weight = weight + u[some, here].unsqueeze(2) * v[some].unsqueeze(1)
            weight.diagonal(first, 1, 2).add_(diagonal[some, here])
            chunks.append(semiring.contract("lj,lij->li", parts, weight))
        found.append(tuple(torch.cat(pieces, 1) for pieces in zip(*chunks)))
    return tuple(torch.cat(pieces) for pieces in zip(*found))
