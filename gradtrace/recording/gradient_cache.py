"""Gradients that recording has computed anyway, kept as far as there is room."""

from __future__ import annotations

from torch import Tensor

from gradtrace.ir.program import Block
from gradtrace.linops import Contract, Convolve
from gradtrace.recording.aten_rules import as_real


class GradientCache:
    """Gradients that are worth keeping, in a number of bytes; those of one memory count once.

    What products and convolutions made is dear, so half of the memory is for these alone.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.left = budget
        self.values: dict[int, Tensor] = {}
        self.storages: set[int] = set()

    def add(self, value: int, tensor: Tensor, expensive: Block | bool) -> None:
        """Keep a gradient, if there is room: that of a block, or one that is dear or not."""
        if self.left <= 0:
            return
        storage = tensor.untyped_storage()
        place = storage._cdata
        if place not in self.storages:
            left = self.left - storage.nbytes()
            if left < self.budget // 2:
                if isinstance(expensive, Block):
                    expensive = _is_expensive(expensive)
                if left < 0 or not expensive:
                    return
            self.left = left
            self.storages.add(place)
        self.values[value] = as_real(tensor) if tensor.is_complex() else tensor

    def spend(self, nbytes: int) -> bool:
        """Take memory for something else, if there is plenty: if half of it is left then."""
        enough = self.left - nbytes >= self.budget // 2 > 0
        if enough:
            self.left -= nbytes
        return enough

    def hold(self, value: int, tensor: Tensor) -> None:
        """Count a gradient that is held anyway."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self.storages:
            self.storages.add(storage._cdata)
            self.left -= storage.nbytes()
        self.values[value] = as_real(tensor)


def _is_expensive(block: Block) -> bool:
    """Whether a block holds a product or a convolution."""
    return any(isinstance(term.map, Contract | Convolve) for s in block.steps for term in s.terms)
