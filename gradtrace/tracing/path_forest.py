"""Many paths at once: every element that any of them visits, once, with the one it points to."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from gradtrace.types import Shape

SPARSE = 64
"""Elements that are fewer than their value has by this factor are sorted to find equal ones."""

WORD = 62
"""How many bits of a mark are held in one number."""


class Hops(NamedTuple):
    """From elements of a stage to elements of a value. ``mine`` are the places in the stage (None:
    all of it), ``weight`` is None where all are 1; ``apart`` says that no two elements are equal.
    """

    value: int
    element: Tensor
    weight: Tensor | None
    mine: Tensor | None
    apart: bool


class PathPoint(NamedTuple):
    """One element on a path: its value, its number there, the weight to the next, its gradient."""

    node: int
    value: int
    element: int
    weight: float
    gradient: float


class SliceBits(NamedTuple):
    """Bits for the slices of a value of this shape, along a dimension."""

    shape: Shape
    dim: int
    bits: Sequence[int]


class PathProvenance(NamedTuple):
    """The different marks that paths gathered, and for each start the number of its own."""

    marks: list[int]
    number: Tensor


@dataclass(frozen=True)
class PathForest:
    """The elements that paths visit, each once; paths that meet share what lies behind.

    Nodes are numbered stage by stage; a stage is all that is visited of a value, and a node points
    to one of a later stage, or to none (-1). ``starts`` are the nodes where paths begin.
    """

    root: int
    values: tuple[int, ...]
    firsts: tuple[int, ...]  # the first node of each stage
    element: Tensor
    onward: Tensor
    weight: Tensor
    gradient: Tensor  # where it was asked for
    starts: Tensor

    @cached_property
    def whole(self) -> Tensor:
        """Whether the path of each start reaches the root; one that begins there is none."""
        if not self.values or self.values[-1] != self.root:
            return torch.zeros_like(self.starts, dtype=torch.bool)
        first = self.firsts[-1]
        below = self.starts < first
        if bool((self.onward[:first] >= 0).all()):
            return below
        jump = torch.where(
            self.onward >= 0, self.onward, torch.arange(len(self.onward), device="cpu")
        )
        while not torch.equal(further := jump[jump], jump):
            jump = further
        return below & (jump[self.starts] >= first)

    def value(self, node: int) -> int:
        """The value that a node is an element of."""
        return self.values[bisect_right(self.firsts, node) - 1]

    def place(self, node: int) -> int:
        """Which element of its value a node is."""
        return int(self._arrays[0][node])

    def until(self, node: int, values: Container[int]) -> Iterator[PathPoint]:
        """A node and those behind it, up to the first at one of these values."""
        element, onward, weight, gradient = self._arrays
        first = True
        while node >= 0:
            value = self.value(node)
            yield PathPoint(node, value, element[node], weight[node], gradient[node])
            if value in values and not first:
                return
            node, first = onward[node], False

    def marks(self, bits: Mapping[int, int], slices: Mapping[int, SliceBits]) -> PathProvenance:
        """What each path gathers: of a node, the bits of its value and of its slice, and all that
        the node it points to has gathered. Bit 0 is set at the root where the seed is not 0.
        """
        words = _words([*bits.values(), *(b for s in slices.values() for b in s.bits)])
        found = torch.zeros(
            len(self.onward) + 1, words, dtype=torch.int64, device="cpu"
        )  # the last for "none"
        last = len(self.onward)
        for value, first in zip(reversed(self.values), reversed(self.firsts)):
            here = found[first:last].copy_(found[self.onward[first:last]])
            if value == self.root:
                here[:, 0] = (self.gradient[first:last] != 0).long()
            if bits.get(value):
                here |= _split([bits[value]], words)
            if value in slices:
                shape, dim, named = slices[value]
                step = prod(shape[dim + 1 :])
                place = self.element[first:last] // step % shape[dim]
                here |= _split(named, words)[place]
            last = first
        rows, number = found[self.starts].unique(dim=0, return_inverse=True)  # type: ignore[no-untyped-call]
        different = [sum(word << n * WORD for n, word in enumerate(row)) for row in rows.tolist()]
        return PathProvenance(different, number)

    @cached_property
    def _arrays(self) -> tuple[memoryview, memoryview, memoryview, memoryview]:
        parts = (self.element, self.onward, self.weight, self.gradient)
        element, onward, weight, gradient = (part.numpy().data for part in parts)
        return element, onward, weight, gradient


@dataclass
class ForestBuilder:
    """A forest while it grows, from the leaves towards the root."""

    starts: Mapping[int, Tensor]
    values: list[int] = field(default_factory=list)
    firsts: list[int] = field(default_factory=list)
    elements: list[Tensor] = field(default_factory=list)
    gradients: dict[int, Tensor] = field(default_factory=dict)  # by first node
    waiting: dict[int, list[tuple[Tensor | None, Hops]]] = field(default_factory=dict)
    links: list[tuple[Tensor, Tensor, Tensor | None]] = field(default_factory=list)
    begun: dict[int, Tensor] = field(default_factory=dict)
    nodes: int = 0
    here: Tensor | None = None  # the nodes of the last stage, if they are at hand
    slots: Tensor | None = None  # one for each element of a value; what it held before is no matter

    def __post_init__(self) -> None:
        for value, elements in self.starts.items():
            self.waiting[value] = [(None, Hops(value, elements, None, None, False))]

    def arrived(self, value: int) -> bool:
        """Whether any path is at this value."""
        return value in self.waiting

    def stage(self, value: int, size: int) -> Tensor:
        """The different elements of a value, of this size, that paths have arrived at."""
        groups = self.waiting.pop(value)
        if len(groups) == 1:
            element = groups[0][1].element
            apart = groups[0][1].apart or element.numel() == 1
        else:
            element, apart = torch.cat([hops.element for _, hops in groups]), False
        number = None if apart else self._numbered(element, size)
        if number is None:
            last = self.nodes + element.numel()
            heads = self.here = torch.arange(self.nodes, last, device=element.device)
        else:
            self.here = None
            element, heads = number[0], number[1] + self.nodes
        first = 0
        for tails, hops in groups:
            count = hops.element.numel()
            mine = heads[first : first + count] if len(groups) > 1 else heads
            first += count
            if tails is None:
                self.begun[value] = mine
            else:
                self.links.append((tails, mine, hops.weight))
        self.values.append(value)
        self.firsts.append(self.nodes)
        self.elements.append(element)
        self.nodes += element.numel()
        return element

    def _numbered(self, element: Tensor, size: int) -> tuple[Tensor, Tensor] | None:
        """The different elements, and for each of those given the number of its own among them;
        None if all are different.
        """
        if SPARSE * element.numel() < size:
            found: tuple[Tensor, Tensor] = element.unique(return_inverse=True)  # type: ignore[no-untyped-call]
            return found
        number = torch.arange(element.numel(), device=element.device)
        if self.slots is None or self.slots.numel() < size:
            self.slots = torch.empty(size, dtype=torch.int64, device=element.device)
        self.slots[element] = number
        same = self.slots[element]  # one of the places that the element is at
        is_first = same == number
        if bool(is_first.all()):
            return None
        return element[is_first], (is_first.cumsum(0) - 1)[same]

    def gradient(self, gradient: Tensor) -> None:
        """Note the gradient of the elements of the last stage."""
        self.gradients[self.firsts[-1]] = gradient.double()

    def send(self, hops: Hops) -> None:
        """From the last stage to a value."""
        first = self.firsts[-1]
        if hops.mine is not None:
            tails = hops.mine + first
        elif self.here is not None:
            tails = self.here
        else:
            tails = torch.arange(first, self.nodes, device=hops.element.device)
        self.waiting.setdefault(hops.value, []).append((tails, hops))

    def forest(self, root: int) -> PathForest:
        """What has grown."""
        device = next(iter(self.starts.values())).device if self.starts else None
        onward = torch.full((self.nodes,), -1, device=device)
        weight = torch.ones(self.nodes, dtype=torch.float64, device=device)
        gradient = torch.full_like(weight, torch.nan)
        if self.links:
            tails, heads, _ = zip(*self.links)
            onward[torch.cat(tails)] = torch.cat(heads)
        if heavy := [(tail, found) for tail, _, found in self.links if found is not None]:
            tails, weights = zip(*heavy)
            weight[torch.cat(tails)] = torch.cat(weights)
        if self.gradients:
            lines = [
                torch.arange(n, n + x.numel(), device="cpu") for n, x in self.gradients.items()
            ]
            gradient[torch.cat(lines).to(gradient.device)] = torch.cat([*self.gradients.values()])
        element = torch.cat(self.elements) if self.elements else onward
        starts = [self.begun[value] for value in self.starts]
        return PathForest(
            root,
            tuple(self.values),
            tuple(self.firsts),
            element.cpu(),
            onward.cpu(),
            weight.cpu(),
            gradient.cpu(),
            torch.cat(starts).cpu() if starts else onward.cpu(),
        )


def _words(marks: Sequence[int]) -> int:
    """How many words the largest mark takes."""
    return max(1, *(-(-mark.bit_length() // WORD) for mark in marks)) if marks else 1


def _split(marks: Sequence[int], words: int) -> Tensor:
    """Marks as rows of words."""
    mask = (1 << WORD) - 1
    return torch.tensor(
        [[mark >> n * WORD & mask for n in range(words)] for mark in marks], device="cpu"
    )
