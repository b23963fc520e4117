"""Random feed-forward networks with branches, as those of the chapter's Figure 1.3.

The chapter's procedure starts with one active layer. With probability 0.95 the layer becomes a
*diamond*: its input goes to two layers, whose outputs are concatenated. The two are expanded in the
same way, with half the probability. Otherwise it is one layer. Every layer has a tanh and a number
of hidden units that is uniform in 10..500. Input and output of the whole have 10 elements.

What it leaves open, and what was chosen here:

- The width of a diamond follows from its layers: it is the sum of theirs. So the expanded layer has
  any width, and the output of size 10 takes one more layer after it. That is a layer like every
  other: it has a tanh.
- Both ends of the range are in it: 10 and 500 units are possible.
- A layer is ``tanh(W·x + b)``, and ``W`` and ``b`` start as ``nn.Linear`` does.
- The procedure makes one expanded layer, with 3.4 layers on average and, in theory, no largest
  number. ``layers`` puts several of them after each other, for larger graphs.

Influence counts the parameters before a component, and before the diamonds of one expanded layer
there are none: take ``layers=2`` or more, or an input that requires gradients, in ``names``.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import TypeAlias

import torch
from torch import Tensor, nn

PROBABILITY = 0.95
WIDTH = (10, 500)
ENDS = 10

Plan: TypeAlias = "int | tuple[Plan, Plan]"
"""A layer with this many units, or a diamond of two plans."""


def plan(draw: random.Random, probability: float, width: tuple[int, int]) -> Plan:
    """Expand one active layer: the architecture alone, without weights.

    >>> plan(random.Random(3), 0.95, (10, 500))
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


class Layer(nn.Sequential):
    """``tanh(W·x + b)``."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(nn.Linear(inputs, outputs), nn.Tanh())


class Diamond(nn.Module):
    """Two parts side by side on one input; their outputs are concatenated: ``[left, right]``."""

    def __init__(self, left: nn.Module, right: nn.Module) -> None:
        super().__init__()
        self.left, self.right = left, right

    def forward(self, x: Tensor) -> Tensor:  # (..., inputs) -> (..., left + right)
        """``[left(x), right(x)]``."""
        return torch.cat([self.left(x), self.right(x)], dim=-1)


def build(planned: Plan, inputs: int) -> Layer | Diamond:
    """The module of a plan."""
    if isinstance(planned, int):
        return Layer(inputs, planned)
    return Diamond(build(planned[0], inputs), build(planned[1], inputs))


class Branching(nn.Module):
    """Expanded layers after each other, and an output layer."""

    def __init__(self, plans: tuple[Plan, ...], inputs: int, outputs: int) -> None:
        super().__init__()
        self.plans = plans
        parts = []
        for planned in plans:
            parts.append(build(planned, inputs))
            inputs = units(planned)
        self.layers = nn.Sequential(*parts)
        self.output = Layer(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:  # (..., inputs) -> (..., outputs)
        """What the output layer makes of the last expanded layer."""
        found: Tensor = self.output(self.layers(x))
        return found

    def components(self) -> dict[str, str]:
        """Every sub-layer of every diamond: a name to read, and the submodule's name.

        Outer ones come before those inside them, left before right; ``"left.right"`` is the right
        one in the diamond that is the left one. With several expanded layers the number of the
        layer, from 1 on, is in front: ``"2.left"``. Both ends of a diamond count, be they a layer
        or again a diamond; a network whose one layer was not expanded has none. The output of each
        has a width of its own, so that ``gradtrace.ablate`` sets it to zero or to its mean, but
        cannot remove it.

        >>> branching(3).components()
        {'left': 'layers.0.left', 'right': 'layers.0.right'}
        """
        found: dict[str, str] = {}
        for number, planned in enumerate(self.plans):
            first = [] if len(self.plans) == 1 else [str(number + 1)]
            for side in _sides(planned):
                found[".".join([*first, *side])] = ".".join(["layers", str(number), *side])
        return found

    def rivals(self) -> list[tuple[str, str]]:
        """The two sub-layers of each diamond, by their names in ``components``.

        >>> branching(3).rivals()
        [('left', 'right')]
        """
        names = list(self.components())
        left = [name for name in names if name.split(".")[-1] == "left"]
        return [(name, name.removesuffix("left") + "right") for name in left]


def _sides(planned: Plan) -> Iterator[tuple[str, ...]]:
    """The way to each sub-layer of each diamond, outer ones first."""
    if isinstance(planned, int):
        return
    for side, part in zip(("left", "right"), planned):
        yield (side,)
        yield from ((side, *rest) for rest in _sides(part))


def branching(
    seed: int,
    *,
    probability: float = PROBABILITY,
    width: tuple[int, int] = WIDTH,
    inputs: int = ENDS,
    outputs: int = ENDS,
    layers: int = 1,
) -> Branching:
    """The network of a seed: always the same architecture and weights.

    ``probability`` is that of the outermost expansion, ``width`` the least and the most units of a
    layer, both included.

    >>> branching(3)(torch.zeros(2, 10)).shape
    torch.Size([2, 10])
    """
    if not 0 <= probability <= 1 or not 1 <= width[0] <= width[1] or layers < 1:
        raise ValueError(
            "probability lies in 0..1, width goes upwards from 1, and layers are 1 or more; "
            f"got {probability}, {width}, {layers}"
        )
    draw = random.Random(seed)
    plans = tuple(plan(draw, probability, (width[0], width[1])) for _ in range(layers))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Branching(plans, inputs, outputs)
