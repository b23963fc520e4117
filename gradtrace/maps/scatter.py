"""``out[i] = ⊕ in[j]`` over the j sent to i: index_add, embeddings, pooling."""

from __future__ import annotations

import torch
from torch import Tensor

from gradtrace.maps.base import Count, Map, per_element
from gradtrace.semirings import SUM, Semiring
from gradtrace.shapes import Shape


class Scatter(Map):
    """``out[i] = ⊕ in[j]`` over ``target[j] = i``; what has target -1 goes nowhere."""

    __slots__ = ("target",)
    single_target = True

    def __init__(self, target: Tensor, out_shape: Shape) -> None:
        self.target = target
        self.in_shape = tuple(target.shape)
        self.out_shape = out_shape

    def targets(self) -> Tensor:
        """For each input element, the number of the output element it goes to; -1 for none."""
        return self.target

    def pull(self, x: Tensor, semiring: Semiring) -> Tensor:
        flat = semiring.scatter(x.reshape(-1), self.target.reshape(-1), self.outputs)
        return flat.reshape(self.out_shape)

    def dense(self) -> Tensor:
        rows = torch.arange(self.outputs).reshape(-1, 1)
        return (rows == self.target.reshape(1, -1)).float()

    def routes(self, count: Count) -> Count:
        return self.pull(per_element(count, self.in_shape), SUM)
