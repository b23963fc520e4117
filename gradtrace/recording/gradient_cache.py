"""A cache, of limited size, of gradients that recording computes anyway."""

from __future__ import annotations

from torch import Tensor

from gradtrace.ir.program import Block, MapTable
from gradtrace.linops import Contract, Convolve
from gradtrace.recording.aten_rules import as_real


class GradientCache:
    """Gradients by value number, in at most ``budget`` bytes; a shared storage counts once.

    Results of matrix products and convolutions are expensive to recompute, so half of the budget
    is reserved for them.
    """

    def __init__(self, budget: int, maps: MapTable) -> None:
        self.budget = budget
        self.maps = maps
        self.bytes_left = budget
        self.values: dict[int, Tensor] = {}
        self.storages: set[int] = set()
        self.refused = False  # whether a gradient was not kept for want of memory

    def add(self, value: int, tensor: Tensor, expensive: Block | bool) -> None:
        """Keep a gradient, if the budget allows. ``expensive``: whether it is expensive to
        recompute, or the block that made it.
        """
        if self.bytes_left <= 0:
            self.refused = True
            return
        storage = tensor.untyped_storage()
        place = storage._cdata
        if place not in self.storages:
            left = self.bytes_left - storage.nbytes()
            if left < self.budget // 2:
                if isinstance(expensive, Block):
                    expensive = self._is_expensive(expensive)
                if left < 0 or not expensive:
                    self.refused = True
                    return
            self.bytes_left = left
            self.storages.add(place)
        self.values[value] = as_real(tensor) if tensor.is_complex() else tensor

    def spend(self, nbytes: int) -> bool:
        """Reserve memory for another use; False if less than half of the budget would be left."""
        enough = self.bytes_left - nbytes >= self.budget // 2 > 0
        if enough:
            self.bytes_left -= nbytes
        else:
            self.refused = True
        return enough

    def hold(self, value: int, tensor: Tensor) -> None:
        """Add a gradient that is kept alive elsewhere, whatever the budget."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self.storages:
            self.storages.add(storage._cdata)
            self.bytes_left -= storage.nbytes()
        self.values[value] = as_real(tensor)

    def _is_expensive(self, block: Block) -> bool:
        """Whether a block contains a matrix product or a convolution."""
        maps = (map_ for step in block.steps for map_ in self.maps.of(step))
        return any(isinstance(map_, Contract | Convolve) for map_ in maps)
