"""Masses over weights whose absolute values are computed once, many in one launch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradtrace.kernels import backend_of
from gradtrace.kernels.precision import exact
from gradtrace.kernels.strides import is_dense
from gradtrace.semirings.additive import Abs
from gradtrace.semirings.base import Value, wide
from gradtrace.semirings.einsum_plan import plan, sum_weight_only_letters

FLOATS = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})


@dataclass(frozen=True)
class LiftedAbs(Abs):
    """``ABS`` for a program that is run more than once: ``known`` has the absolute values of
    weights, by their id. Each is beside its weight, which it keeps alive.
    """

    known: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, weights: Iterable[Tensor], most: int) -> LiftedAbs:
        """The semiring that knows these weights, or the smallest of them, of ``most`` bytes."""
        unique = {id(w): w for w in weights if w.dtype in FLOATS and w.dim() and is_dense(w)}
        by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for weight in sorted(unique.values(), key=lambda w: w.numel() * w.itemsize):
            most -= weight.numel() * weight.itemsize
            if most < 0:
                break
            by_kind.setdefault((weight.dtype, weight.device), []).append(weight)
        found = cls()
        for some in by_kind.values():
            lifted = torch._foreach_abs(some)
            found.known.update({id(w): (w, abs_) for w, abs_ in zip(some, lifted)})
        return found

    def _lifted(self, weight: Tensor) -> Tensor:
        """``|weight|``, in its own dtype."""
        pair = self.known.get(id(weight))
        if pair is not None:
            return pair[1]
        return weight if weight.dtype is torch.bool else weight.abs()

    def weigh(self, weight: Tensor) -> Value:
        return (wide(self._lifted(weight)),)

    def times_weight(self, x: Value, weight: Tensor) -> Value:
        return (x[0] * self._lifted(weight),)  # a half-precision weight is widened on the way

    def contract(self, spec: str, x: Value, weight: Tensor) -> Value:
        spec, weight = sum_weight_only_letters(spec, weight)
        (given,), lifted = x, self._lifted(weight)
        how = plan(spec, given.shape, lifted.shape)
        left, right = how.left(given), how.right(lifted)
        if right.dtype is left.dtype:
            with exact(left):
                if how.turned:  # written as it is read later: strided sums take twice as long
                    turned = torch.bmm(right.mT, left.mT)
                    return (torch.reshape(turned, [how.sizes[c] for c in how.out]),)
                return (how.back(torch.bmm(left, right)),)
        return (how.back(backend_of(left).widened_product(left, right)),)
