"""Sums of float64 that are exact and rounded once, so that they do not depend on the order."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

UNIT_EXPONENT = -1074
"""Every float64 is an integer multiple of 2**UNIT_EXPONENT."""

BIN_BITS = 8
"""Bits from one bin to the next."""


def sums_by_id(ids: Tensor, gradient: Tensor, count: int) -> Tensor:
    """Σ |gradient| by provenance id, exact and rounded once.

    Each value is an integer number of units, of at most 60 bits counted from the start of a bin.
    Its lower 32 bits are added to that bin, the others to the bin where they begin.
    """
    size = gradient.double().abs()
    finite, bits = size.isfinite(), size.view(torch.int64)
    field = bits >> 52
    shift = (field - 1).clamp(min=0)
    whole = bits & (1 << 52) - 1 | (field > 0).long() << 52
    whole = torch.where(finite, whole, 0)
    there = shift[whole > 0]
    if not len(there):
        lowest = rows = 0
    else:
        lowest = int(there.min()) // BIN_BITS
        rows = int(there.max()) // BIN_BITS - lowest + 1 + 32 // BIN_BITS
    units, row = whole << shift % BIN_BITS, torch.where(whole > 0, shift // BIN_BITS - lowest, 0)
    rows = max(rows, 1 + 32 // BIN_BITS)
    bins = torch.zeros(rows * count, dtype=torch.int64, device=ids.device)
    bins.index_add_(0, row * count + ids, units & (1 << 32) - 1)
    bins.index_add_(0, (row + 32 // BIN_BITS) * count + ids, units >> 32)
    odd = torch.zeros(count, dtype=torch.float64, device=ids.device)
    odd.index_add_(0, ids, torch.where(finite, 0.0, size))
    return _rounded(bins.reshape(rows, count), BIN_BITS * lowest + UNIT_EXPONENT) + odd


def _rounded(bins: Tensor, power: int) -> Tensor:
    """``Σᵢ bins[i]·2**(power + BIN_BITS·i)`` as float64, rounded to nearest, ties to even.

    The highest nonzero digit of BIN_BITS bits and the seven below it form two integers, whose sum
    is rounded once; of all lower digits it only matters whether they are 0 (a sticky bit).
    """
    carry = torch.zeros_like(bins[0])
    high, low, lost = carry, carry, carry
    held = [carry] * 4
    mask = (1 << BIN_BITS) - 1
    for n in range(len(bins) + 64 // BIN_BITS):
        carry = carry + bins[n] if n < len(bins) else carry
        digit, carry = carry & mask, carry >> BIN_BITS
        lost = lost | low & mask
        low = low >> BIN_BITS | (high & mask) << 32 - BIN_BITS
        high = high >> BIN_BITS | digit << 32 - BIN_BITS
        now = (high, low, lost, torch.full_like(carry, n))
        held = [torch.where(digit > 0, new, old) for new, old in zip(now, held)]
    high, low, lost, top = held
    total = high.double() * 2.0**32 + (low | (lost > 0).long()).double()
    power_of_two = power + BIN_BITS * (top - 7)
    first = power_of_two.clamp(min=-1000)
    return total * _two(first) * _two(power_of_two - first)  # two factors: no early underflow


def _two(power: Tensor) -> Tensor:
    """``2**power``, exact."""
    return (power + 1023 << 52).view(torch.float64)


def tally(ids: Tensor, gradient: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """``Backend.tally`` of one flat piece."""
    return torch.bincount(ids, minlength=count), sums_by_id(ids, gradient, count)


def measure(gradient: Tensor) -> tuple[Tensor, Tensor]:
    """``Backend.measure`` of one flat piece."""
    same_id = torch.zeros(len(gradient), dtype=torch.int64, device=gradient.device)
    return gradient.count_nonzero(), sums_by_id(same_id, gradient, 1).reshape(())


def summed(pieces: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Add up the counts and sums of pieces, in order."""
    found: tuple[Tensor, Tensor] | None = None
    for counts, sums in pieces:
        found = (counts, sums) if found is None else (found[0] + counts, found[1] + sums)
    assert found is not None
    return found
