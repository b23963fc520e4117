"""Many paths as one forest: each visited element once, with the element it points to."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gradtrace.kernels.operands import Whole
from gradtrace.types import Shape

SORT_MIN_RATIO = 64
"""If a value has this many times more elements than were visited, duplicates are found by sorting;
else by a table over all its elements.
"""

WORD_BITS = 62
"""Bits of a provenance set per int64 word."""


class ElementEdges(NamedTuple):
    """Edges from elements of a stage to elements of a value.

    ``element``: the targets' element numbers. ``weight``: None if all are 1. ``mine``: the sources'
    positions in the stage (None: all of it). ``distinct``: whether all targets are distinct.
    ``ended``: which sources have no target (None: all have one); the element is then any, and its
    node is one that no path leads to. So nothing has to be read from a GPU.
    """

    value: int
    element: Tensor
    weight: Tensor | None
    mine: Tensor | None
    distinct: bool
    ended: Tensor | None = None


class PathPoint(NamedTuple):
    """One element on a path: its node in the forest, its value, its number in that value, the
    weight of the edge to the next element, and its gradient.
    """

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
    """The distinct provenance sets of paths, and for each start the index of its own."""

    sets: list[int]
    number: Tensor


@dataclass(frozen=True)
class PathForest:
    """The elements that paths visit, each once; paths that meet share their remaining nodes.

    Nodes are numbered stage by stage. A stage is the visited elements of one value; a node points
    to a node of a later stage (``onward``), or to none (-1). ``starts`` are the nodes where paths
    begin.
    """

    root: int
    values: tuple[int, ...]
    firsts: tuple[int, ...]  # the first node of each stage
    element: Tensor
    onward: Tensor
    weight: Tensor
    gradient: Tensor  # nan where it was not requested
    starts: Tensor

    @cached_property
    def whole(self) -> Tensor:
        """Whether the path of each start reaches the root; False for a start at the root."""
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
        """The element number of a node in its value."""
        return int(self._arrays[0][node])

    def until(self, node: int, values: Container[int]) -> Iterator[PathPoint]:
        """A node and its successors, up to and including the first one at any of ``values``."""
        element, onward, weight, gradient = self._arrays
        first = True
        while node >= 0:
            value = self.value(node)
            yield PathPoint(node, value, element[node], weight[node], gradient[node])
            if value in values and not first:
                return
            node, first = onward[node], False

    def provenance(
        self, bits: Mapping[int, int], slices: Mapping[int, SliceBits]
    ) -> PathProvenance:
        """The provenance of each start: the union over its path of the bits of each node's value
        and slice. Bit 0 is set at the root where the seed is not 0.
        """
        words = words_of([*bits.values(), *(b for s in slices.values() for b in s.bits)])
        onward, last = self.onward.numpy(), len(self.onward)
        found = np.zeros((last + 1, words), np.int64)  # the last for "none"
        by_stage = _split([bits.get(value, 0) for value in self.values], words)
        stages = zip(self.values[::-1], self.firsts[::-1], by_stage[::-1])
        for value, first, named in stages:
            here = np.bitwise_or(found[onward[first:last]], named, out=found[first:last])
            if value == self.root:
                here[:, 0] |= (self.gradient[first:last] != 0).numpy()
            if value in slices:
                shape, dim, of_slices = slices[value]
                step = prod(shape[dim + 1 :])
                place = self.element[first:last] // step % shape[dim]
                here |= _split(of_slices, words)[place.numpy()]
            last = first
        return different_sets(torch.from_numpy(found)[self.starts])

    @cached_property
    def _arrays(self) -> tuple[memoryview, memoryview, memoryview, memoryview]:
        parts = (self.element, self.onward, self.weight, self.gradient)
        element, onward, weight, gradient = (part.numpy().data for part in parts)
        return element, onward, weight, gradient


@dataclass
class ForestBuilder:
    """Builds a ``PathForest`` stage by stage, from the leaves towards the root."""

    starts: Mapping[int, Tensor]
    waits: bool  # whether reading an element waits for a GPU
    values: list[int] = field(default_factory=list)
    firsts: list[int] = field(default_factory=list)
    elements: list[Tensor] = field(default_factory=list)
    gradients: dict[int, Tensor] = field(default_factory=dict)  # by first node
    waiting: dict[int, list[tuple[Tensor | None, ElementEdges]]] = field(default_factory=dict)
    links: list[tuple[Tensor, Tensor, Tensor | None]] = field(default_factory=list)
    start_nodes: dict[int, Tensor] = field(default_factory=dict)
    nodes: int = 0
    here: Tensor | None = None  # the nodes of the last stage, if they were computed
    slots: Tensor | None = None  # scratch space, one entry per element of a value; never cleared

    def __post_init__(self) -> None:
        for value, elements in self.starts.items():
            self.waiting[value] = [(None, ElementEdges(value, elements, None, None, False))]

    def arrived(self, value: int) -> bool:
        """Whether any path has reached this value."""
        return value in self.waiting

    def stage(self, value: int, size: int) -> Tensor:
        """Add a stage: the distinct elements that paths reach in a value of ``size`` elements."""
        groups = self.waiting.pop(value)
        if len(groups) == 1:
            element = groups[0][1].element
            distinct = groups[0][1].distinct or element.numel() == 1
        else:
            element, distinct = torch.cat([edges.element for _, edges in groups]), False
        # without waiting for a GPU: an element may have several nodes until the next join
        alone = len(groups) == 1 and self.waits
        number = None if distinct or alone else self._numbered(element, size)
        if number is None:
            last = self.nodes + element.numel()
            heads = self.here = torch.arange(self.nodes, last, device=element.device)
        else:
            self.here = None
            element, heads = number[0], number[1] + self.nodes
        first = 0
        for tails, edges in groups:
            count = edges.element.numel()
            mine = heads[first : first + count] if len(groups) > 1 else heads
            first += count
            if tails is None:
                self.start_nodes[value] = mine
            else:
                mine = mine if edges.ended is None else torch.where(edges.ended, -1, mine)
                self.links.append((tails, mine, edges.weight))
        self.values.append(value)
        self.firsts.append(self.nodes)
        self.elements.append(element)
        self.nodes += element.numel()
        return element

    def _numbered(self, element: Tensor, size: int) -> tuple[Tensor, Tensor] | None:
        """The distinct elements, and for each given element its index among them; None if all are
        distinct.
        """
        if SORT_MIN_RATIO * element.numel() < size:
            found: tuple[Tensor, Tensor] = element.unique(return_inverse=True)  # type: ignore[no-untyped-call]
            return found
        number = torch.arange(element.numel(), device=element.device)
        if self.slots is None or self.slots.numel() < size:
            self.slots = torch.empty(size, dtype=torch.int64, device=element.device)
        self.slots[element] = number
        same = self.slots[element]  # the position of one equal element
        is_first = same == number
        firsts = is_first.nonzero().reshape(-1)
        if len(firsts) == len(element):
            return None
        return element[firsts], (is_first.cumsum(0) - 1)[same]

    def gradient(self, gradient: Tensor) -> None:
        """Set the gradient of the elements of the last stage."""
        self.gradients[self.firsts[-1]] = gradient.double()

    def send(self, edges: ElementEdges) -> None:
        """Add edges from the last stage to a value."""
        first = self.firsts[-1]
        if edges.mine is not None:
            tails = edges.mine + first
        elif self.here is not None:
            tails = self.here
        else:
            tails = torch.arange(first, self.nodes, device=edges.element.device)
        self.waiting.setdefault(edges.value, []).append((tails, edges))

    def forest(self, root: int) -> PathForest:
        """The finished forest."""
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
        starts = [self.start_nodes[value] for value in self.starts]
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


def different_sets(words: Tensor) -> PathProvenance:
    """The distinct rows of words, as provenance sets, and for each row the index of its own."""
    number = torch.zeros(len(words), dtype=torch.int64, device=words.device)
    many = 1
    for column in words.unbind(1):  # several times as fast as unique(dim=0)
        found, here = column.unique(return_inverse=True)  # type: ignore[no-untyped-call]
        number, many = number * len(found) + here, many * len(found)
        if many > len(words):
            found, number = number.unique(return_inverse=True)
            many = len(found)
    found, number = number.unique(return_inverse=True)  # type: ignore[no-untyped-call]
    one = torch.zeros_like(found).scatter_(0, number, torch.arange(len(words), device=words.device))
    rows = words[one].tolist()
    sets = [sum(word << n * WORD_BITS for n, word in enumerate(row)) for row in rows]
    return PathProvenance(sets, number)


def words_of(sets: Sequence[int]) -> int:
    """How many words the largest provenance set needs."""
    return max(1, *(-(-one.bit_length() // WORD_BITS) for one in sets)) if sets else 1


def split_words(sets: Sequence[int], words: int) -> list[list[int]]:
    """Provenance sets as rows of words: (sets, words)."""
    mask = (1 << WORD_BITS) - 1
    return [[one >> n * WORD_BITS & mask for n in range(words)] for one in sets]


def _split(sets: Sequence[int], words: int) -> Whole:
    return np.array(split_words(sets, words), np.int64).reshape(-1, words)
