"""What the training of small networks has in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def plain() -> Iterator[None]:
    """Without oneDNN, which takes two to three times as long as plain torch for small layers."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)  # torch.backends.mkldnn refuses, or warns, in test suites
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def descent(model: nn.Module, loss: Callable[[], Tensor], steps: int, rate: float) -> Iterator[int]:
    """Train by Adam; gives the number of steps done, from 0 to the last."""
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, fused=True)
    yield 0
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        loss().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        yield step


def moments(steps: int, times: int) -> set[int]:
    """When to look: at the first and the last step, and evenly between.

    >>> sorted(moments(100, 3))
    [0, 50, 100]
    """
    last = max(times - 1, 1)
    return {round(steps * n / last) for n in range(times)}
