"""``out = ⊕ₖ w[..k..] · in[..k..]``: matrix products in all their forms."""

from __future__ import annotations

from math import prod
from string import ascii_letters

import torch
from torch import Tensor

from gradtrace.maps.base import Count, Map
from gradtrace.semirings import Semiring
from gradtrace.shapes import Shape


class Contract(Map):
    """An einsum of the cotangent (first operand) with a weight (second).

    ``Contract("mk,kn->mn", w, (2, 3))`` is ``out[m, n] = ⊕ₖ in[m, k] · w[k, n]``. Every letter of
    the input is in the weight or in the result; the sum runs over letters the result lacks.
    """

    __slots__ = ("spec", "weight")

    def __init__(self, spec: str, weight: Tensor, in_shape: Shape, out_shape: Shape) -> None:
        self.spec = spec
        self.weight = weight
        self.in_shape = in_shape
        self.out_shape = out_shape

    def sizes(self) -> dict[str, int]:
        """The extent of each letter."""
        x, rest = self.spec.split(",")
        w, _ = rest.split("->")
        return dict(zip(x, self.in_shape)) | dict(zip(w, self.weight.shape))

    def letters(self) -> tuple[str, str, str]:
        """The letters of the input, of the weight and of the output."""
        x, rest = self.spec.split(",")
        w, out = rest.split("->")
        return x, w, out

    def contracted(self) -> set[int]:
        """The dimensions of the input that the sum runs over."""
        x, _, out = self.letters()
        return {d for d, letter in enumerate(x) if letter not in out}

    def produced(self) -> set[int]:
        """The dimensions of the output that come from the weight alone."""
        x, _, out = self.letters()
        return {d for d, letter in enumerate(out) if letter not in x}

    def pull(self, x: Tensor, semiring: Semiring) -> Tensor:
        return semiring.contract(self.spec, x, self.weight)

    def dense(self) -> Tensor:
        x, w, out = self.letters()
        free = next(letter for letter in ascii_letters if letter not in self.spec)
        unit = torch.eye(self.inputs, dtype=self.weight.dtype).reshape(self.inputs, *self.in_shape)
        columns = torch.einsum(f"{free}{x},{w}->{out}{free}", unit, self.weight)
        return columns.reshape(self.outputs, self.inputs)

    def routes(self, count: Count) -> Count:
        x, w, out = self.letters()
        sizes = self.sizes()
        if not isinstance(count, Tensor):
            return count * prod(sizes[letter] for letter in {*x, *w} - {*out})
        ones = torch.ones((), dtype=torch.float64).expand(self.weight.shape)
        return torch.einsum(self.spec, count, ones)

    def tensors(self) -> tuple[str, ...]:
        return ("weight",)
