"""Optimisers from scratch: each says the next point, given this one and the gradient.

With ``x`` a parameter, ``g`` its gradient and ``α`` the rate, all by element:

| rule | next ``x`` | kept |
|---|---|---|
| descent | ``x - αᵢ g`` | ``i`` |
| momentum | ``x - α v`` | ``v ← β v + g`` |
| Nesterov | ``x - α (g + β v)`` | ``v ← β v + g`` |
| AdaGrad | ``x - α g / (√s + ε)`` | ``s ← s + g²`` |
| AdamW | ``(1 - αλ) x - α m̂ / (√v̂ + ε)`` | ``m ← β₁ m + (1-β₁) g``, ``v ← β₂ v + (1-β₂) g²`` |

with ``m̂ = m / (1 - β₁ᵗ)`` and ``v̂ = v / (1 - β₂ᵗ)``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from gradtrace.experiments.lecture.descent import Point

Schedule = Callable[[int], float]
"""The rate of step i, counted from 0."""


def constant(rate: float) -> Schedule:
    """``αᵢ = rate``."""
    return lambda i: rate


def power(exponent: float, offset: float = 1.0) -> Schedule:
    """``αᵢ = (k / (k + i))ᵖ``; with p = k = 1, the lecture's 1/i (its i counts from 1)."""
    return lambda i: (offset / (offset + i)) ** exponent


@dataclass
class Descent:
    """Plain descent."""

    rate: Schedule
    done: int = 0

    def step(self, point: Point, gradient: Point) -> Point:
        """``x - αᵢ g``."""
        rate, self.done = self.rate(self.done), self.done + 1
        return {name: x - rate * gradient[name] for name, x in point.items()}


@dataclass
class Momentum:
    """The heavy ball; with ``nesterov``, as if the gradient were taken one step ahead."""

    rate: float
    decay: float = 0.9
    nesterov: bool = False
    velocity: Point = field(default_factory=dict)

    def step(self, point: Point, gradient: Point) -> Point:
        """``x - α v``, or ``x - α (g + β v)``."""
        found = {}
        for name, x in point.items():
            g = gradient[name]
            v = self.velocity[name] = self.decay * self.velocity.get(name, torch.zeros_like(g)) + g
            found[name] = x - self.rate * (g + self.decay * v if self.nesterov else v)
        return found


@dataclass
class AdaGrad:
    """Each element has a rate of its own, which falls with the gradients it has seen."""

    rate: float
    epsilon: float = 1e-10
    squares: Point = field(default_factory=dict)

    def step(self, point: Point, gradient: Point) -> Point:
        """``x - α g / (√Σg² + ε)``."""
        found = {}
        for name, x in point.items():
            g = gradient[name]
            s = self.squares[name] = self.squares.get(name, torch.zeros_like(g)) + g * g
            found[name] = x - self.rate * g / (s.sqrt() + self.epsilon)
        return found


@dataclass
class AdamW:
    """Running means of gradient and square; weight decay beside them, not within the gradient."""

    rate: float
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    decay: float = 0.01
    means: Point = field(default_factory=dict)
    squares: Point = field(default_factory=dict)
    done: int = 0

    def step(self, point: Point, gradient: Point) -> Point:
        """``(1 - αλ) x - α m̂ / (√v̂ + ε)``."""
        self.done += 1
        (first, second), found = self.betas, {}
        for name, x in point.items():
            g = gradient[name]
            zero = torch.zeros_like(g)
            m = first * self.means.get(name, zero) + (1 - first) * g
            v = second * self.squares.get(name, zero) + (1 - second) * g * g
            self.means[name], self.squares[name] = m, v
            step = m / (1 - first**self.done)
            size = (v / (1 - second**self.done)).sqrt() + self.epsilon
            found[name] = (1 - self.rate * self.decay) * x - self.rate * step / size
        return found
