"""A linear function of unknown structure that is too large to be materialised as a matrix."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gradtrace.errors import TooLarge
from gradtrace.linops.base import Count, Map, Rows
from gradtrace.types import Shape


class Opaque(Map):
    """``out = f(in)``, linear, with unknown entries. Enough for tracing at operator granularity;
    everything that needs entries raises TooLarge with ``reason``.
    """

    __slots__ = ("function", "reason")

    def __init__(
        self, function: Callable[[Tensor], Tensor], in_shape: Shape, out_shape: Shape, reason: str
    ) -> None:
        self.function = function
        self.in_shape = in_shape
        self.out_shape = out_shape
        self.reason = reason

    def apply(self, x: Tensor) -> Tensor:
        return self.function(x)

    def rows(self, at: Tensor) -> Rows:
        raise TooLarge(self.reason)

    def routes(self, count: Count, device: torch.device) -> Count:
        raise TooLarge(self.reason)

    def max_source(self, x: Tensor) -> Tensor:
        most = x.amax() if x.numel() else x.new_zeros(())
        return most.expand(self.out_shape)
