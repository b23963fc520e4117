"""Networks that several experiments share: random ones with branches, as of the chapter's 1.7.

One layer is active at first. With probability 0.95 it becomes a *diamond*: its input goes to two
layers, whose outputs are concatenated. These are expanded in the same way, with half the
probability. Every layer has a tanh and a number of units that is uniform in 10..500, both included;
inputs and outputs have 10 elements.

What the chapter leaves open: a diamond is as wide as its layers together, so that one more layer,
with a tanh, gives the 10 outputs. An expanded layer is small (3.4 layers on average): several of
them after each other make larger graphs.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import TypeAlias

import torch
from torch import Tensor, nn

PROBABILITY, WIDTH, ENDS = 0.95, (10, 500), 10
Plan: TypeAlias = "int | tuple[Plan, Plan]"
"""A layer with so many units, or a diamond of two plans."""


def plan(draw: Random, probability: float = PROBABILITY, width: tuple[int, int] = WIDTH) -> Plan:
    """Expand one active layer.

    >>> plan(Random(3))
    (199, 252)
    """
    if draw.random() < probability:
        left = plan(draw, probability / 2, width)
        return left, plan(draw, probability / 2, width)
    return draw.randint(*width)


def units(planned: Plan) -> int:
    """The width of what a plan stands for.

    >>> units((3, (4, 5)))
    12
    """
    return planned if isinstance(planned, int) else units(planned[0]) + units(planned[1])


def parts(planned: Plan, way: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Plan]]:
    """A plan and all inside it, outer ones first, each with the way to it.

    >>> [way for way, _ in parts((3, (4, 5)))]
    [(), ('left',), ('right',), ('right', 'left'), ('right', 'right')]
    """
    yield way, planned
    if not isinstance(planned, int):
        for side, part in zip(("left", "right"), planned):
            yield from parts(part, (*way, side))


class Diamond(nn.Module):
    """Two parts side by side on one input; their outputs are concatenated."""

    def __init__(self, left: nn.Module, right: nn.Module) -> None:
        super().__init__()
        self.left, self.right = left, right

    def forward(self, x: Tensor) -> Tensor:
        """``[left(x), right(x)]``."""
        return torch.cat([self.left(x), self.right(x)], dim=-1)


def built(planned: Plan, inputs: int) -> nn.Module:
    """The module of a plan."""
    if isinstance(planned, int):
        return nn.Sequential(nn.Linear(inputs, planned), nn.Tanh())
    return Diamond(built(planned[0], inputs), built(planned[1], inputs))


class Branching(nn.Module):
    """Expanded layers after each other, and an output layer; of a seed always the same.

    >>> Branching(3).sides()
    {'1.left': 'layers.0.left', '1.right': 'layers.0.right'}
    """

    def __init__(self, seed: int, layers: int = 1, width: tuple[int, int] = WIDTH) -> None:
        super().__init__()
        draw = Random(seed)
        self.plans = tuple(plan(draw, PROBABILITY, width) for _ in range(layers))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            inputs = (ENDS, *map(units, self.plans))
            self.layers = nn.Sequential(*map(built, self.plans, inputs))
            self.output = built(ENDS, inputs[-1])

    def forward(self, x: Tensor) -> Tensor:
        """(..., 10) to (..., 10)."""
        found: Tensor = self.output(self.layers(x))
        return found

    def sides(self) -> dict[str, str]:
        """The sides of all diamonds, after the number of the expanded layer: the modules' names."""
        return {
            ".".join([str(number + 1), *way]): ".".join(["layers", str(number), *way])
            for number, planned in enumerate(self.plans)
            for way, _ in parts(planned)
            if way
        }
