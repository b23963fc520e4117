"""Descent on parameterised programs: a loss of named tensors, its gradient, the next point."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

import gradtrace as gt

Point: TypeAlias = dict[str, Tensor]
"""The values of a program's parameters, by name."""

Loss: TypeAlias = Callable[[Point], Tensor]


class Rule(Protocol):
    """How to go on from a point, given the gradient there."""

    def step(self, point: Point, gradient: Point) -> Point:
        """The next point; the given one is left as it is."""


def gradient(loss: Loss, point: Point) -> tuple[float, Point]:
    """The loss at a point, and its gradient; 0 for what the program did not use."""
    leaves = {name: value.detach().requires_grad_() for name, value in point.items()}
    value = loss(leaves)
    found = gt.backward(value, names=leaves)
    zero = {name: torch.zeros_like(x) for name, x in point.items()}
    return value.item(), zero | dict(found)


def descend(loss: Callable[[Point, int], Tensor], start: Point, rule: Rule) -> Iterator[Point]:
    """The points after 0, 1, 2, ... steps, for as long as they are asked for.

    ``loss(point, i)`` is the loss that step i goes down: the same each time, or that of a batch.
    """
    point, i = start, 0
    while True:
        yield point
        _, slope = gradient(lambda at, i=i: loss(at, i), point)  # type: ignore[misc]
        point, i = rule.step(point, slope), i + 1


def minimum(loss: Loss, start: Point, rounds: int = 25) -> Point:
    """The minimum nearby, by Newton's method: ``x - H⁻¹ g`` with H from differences of g.

    For programs of a few scalars, and to know where descent should arrive.
    """
    names, width = list(start), 1e-5
    x = torch.stack([start[name] for name in names])

    def slope(x: Tensor) -> Tensor:
        _, found = gradient(loss, dict(zip(names, x)))
        return torch.stack([found[name] for name in names])

    for _ in range(rounds):
        g = slope(x)
        steps = width * torch.eye(len(names), dtype=x.dtype)
        rows = [(slope(x + h) - slope(x - h)) / (2 * width) for h in steps]
        hessian = torch.stack(rows)
        x = x - torch.linalg.solve((hessian + hessian.T) / 2, g)
        if float(g.norm()) < 1e-12:
            break
    return dict(zip(names, x))


def marks(steps: int, each: int = 6) -> list[int]:
    """Numbers of steps to look at: 1 to ``steps``, ``each`` per factor of ten."""
    found = {1, steps}
    exponent = 0
    while (mark := round(10 ** (exponent / each))) < steps:
        found.add(mark)
        exponent += 1
    return sorted(found)
