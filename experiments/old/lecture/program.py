"""The lecture's running example: a function of two reals with three weights.

::

    Function R(P,Q) {  A = W0*P   B = f0(A,Q)   C = W1*B   D = W2*B
                       E = f1(C)  F = f2(D)     R = f3(E,F)   return R }

The lecture leaves the base functions open ("tanh, sigmoid, sin, cos, ..."). Here
``f0 = tanh(a + q)``, ``f1 = sigmoid``, ``f2 = sin``, ``f3 = e·f``, so that other weights give
another function.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gradtrace.experiments.lecture.descent import Loss, Point

TRUTH = (0.8, 1.5, -1.2)
"""The weights that made the targets."""

NOISE = 0.1
"""The standard deviation of the targets around them."""


class Samples(NamedTuple):
    """Training data: N triples."""

    p: Tensor
    q: Tensor
    t: Tensor

    def at(self, index: Tensor) -> Samples:
        """Some of them."""
        return Samples(self.p[index], self.q[index], self.t[index])


def run(w: Point, p: Tensor, q: Tensor) -> Tensor:
    """``R(P, Q)``."""
    a = w["w0"] * p
    b = torch.tanh(a + q)
    c = w["w1"] * b
    d = w["w2"] * b
    e = torch.sigmoid(c)
    f = torch.sin(d)
    return e * f


def weights(values: tuple[float, ...] | Tensor) -> Point:
    """The point ``{"w0": ..., "w1": ..., "w2": ...}``."""
    found = torch.as_tensor(values, dtype=torch.float64)
    return {f"w{i}": x for i, x in enumerate(found)}


def samples(number: int, seed: int) -> Samples:
    """``t = R(TRUTH; p, q) + noise`` with standard normal p and q."""
    generator = torch.Generator().manual_seed(seed)
    p, q, noise = torch.randn(3, number, dtype=torch.float64, generator=generator)
    return Samples(p, q, run(weights(TRUTH), p, q) + NOISE * noise)


def errors(w: Point, data: Samples) -> Tensor:
    """``mean (t - R(w; p, q))²`` over the last dimension: with weights of shape (n, 1) and data of
    (n, batch) or (batch,), n programs at a time.
    """
    return (data.t - run(w, data.p, data.q)).square().mean(-1)


def loss(data: Samples) -> Loss:
    """``Loss(w0, w1, w2) = 1/N Σ (tᵢ - R(w; pᵢ, qᵢ))²``."""
    return lambda w: errors(w, data)


def copies(w: Point, number: int) -> Point:
    """The same weights for that many programs: shape (number, 1)."""
    return {name: x.expand(number, 1).clone() for name, x in w.items()}


def stacked(w: Point) -> Tensor:
    """The weights of n programs as a matrix (n, 3); of one, as a vector."""
    return torch.stack([x.squeeze(-1) if x.dim() else x for x in w.values()], -1)
