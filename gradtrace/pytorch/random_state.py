"""Generators of random numbers for samples."""

from __future__ import annotations

from numbers import Integral
from typing import Any

import torch

from gradtrace.errors import GradtraceError


def seeded(seed: Any) -> torch.Generator:
    """A generator on the CPU; an error for a seed that is no whole number of 64 bits."""
    if not isinstance(seed, Integral) or not -(1 << 63) <= int(seed) < 1 << 63:
        raise GradtraceError(f"seed is a whole number of at most 64 bits, not {seed!r}")
    return torch.Generator().manual_seed(int(seed))
