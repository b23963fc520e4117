"""Follow single paths through a program whose values were kept: one row of a map per step.

Many elements are followed at once: steps are gone through in reverse, and every element that has
arrived at a step's output moves on to the element of its input that contributes most.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from itertools import count
from math import inf, log2
from typing import NamedTuple

import torch
from torch import Tensor

from gradtrace.engine import Held, balanced, gradient_of, value_of
from gradtrace.maps import Map
from gradtrace.program import Block, Program, Term
from gradtrace.semirings import MAX
from gradtrace.semirings.base import shifted, wide


class Hop(NamedTuple):
    """From an element of a step's output to one of an input: the value, its element, the weight."""

    value: int
    element: int
    weight: float


class Hops(NamedTuple):
    """The same for many paths at once; ``paths`` says which."""

    paths: Tensor
    value: int
    element: Tensor
    weight: Tensor


@dataclass
class Kept:
    """A program and its values: gradients, or MAX with powers of two."""

    program: Program
    seed: Tensor

    @cached_property
    def gradients(self) -> dict[int, Tensor]:
        """The gradient at every value."""
        values = {self.program.root: self.seed}
        with torch.no_grad():
            for step in self.program.steps():
                values[step.out] = gradient_of(step, values)
        return values

    @cached_property
    def largest(self) -> dict[int, Held]:
        """MAX at every value: the largest |product| from there to the root."""
        with torch.no_grad():
            values = {self.program.root: Held(MAX.weigh(self.seed), 0)}
            for step in self.program.steps():
                values[step.out] = balanced(value_of(step, values, MAX), MAX)
        return values

    @cached_property
    def makers(self) -> dict[int, tuple[Term, ...]]:
        """The terms that make each value; sums over all users of an argument in one."""
        merges = {step.out for block in self.program.blocks for step in block.merges}
        made: dict[int, tuple[Term, ...]] = {}
        for block in self.program.blocks:
            for step in block.steps:
                made[step.out] = step.terms
            for step in block.merges:
                first, *rest = step.terms
                before = made[first.value] if first.value in merges else (first,)
                made[step.out] = (*before, *rest)
        return made

    @cached_property
    def takers(self) -> dict[int, tuple[Block, int]]:
        """The block, and its output slot, that each value is the cotangent of."""
        return {
            value: (block, slot)
            for block in self.program.blocks
            for slot, value in block.takes.items()
        }

    # Following the largest contributions -------------------------------------------------------

    def follow(self, starts: Mapping[int, Tensor], rule: str) -> list[Hops]:
        """From elements of values to the root, by a rule. A path without hops does not exist.

        Paths are numbered in the order of ``starts``.
        """
        waiting: dict[int, list[tuple[Tensor, Tensor]]] = {}
        first = 0
        for value, elements in starts.items():
            numbers = torch.arange(first, first + len(elements), device=elements.device)
            waiting[value] = [(numbers, elements)]
            first += len(elements)
        found: list[Hops] = []
        with torch.no_grad():
            for out, terms in reversed(self.makers.items()):
                if out in waiting:
                    here = waiting.pop(out)
                    paths = torch.cat([numbers for numbers, _ in here])
                    at = torch.cat([element for _, element in here])
                    for hops in self._onward(terms, paths, at, rule):
                        found.append(hops)
                        waiting.setdefault(hops.value, []).append((hops.paths, hops.element))
        return found

    def _onward(
        self, terms: tuple[Term, ...], paths: Tensor, at: Tensor, rule: str
    ) -> Iterator[Hops]:
        which = torch.zeros_like(at)
        if len(terms) > 1:
            which = torch.stack(self._sizes(terms, at, rule)).max(0).indices
        for k, term in enumerate(terms):
            mine = (which == k).nonzero().reshape(-1)
            if len(mine):
                yield from self._inside(term, paths[mine], at[mine], rule, alone=len(terms) == 1)

    def _inside(
        self, term: Term, paths: Tensor, at: Tensor, rule: str, alone: bool
    ) -> Iterator[Hops]:
        if term.map.moves:
            source = term.map.rows(at).source[:, 0]
            if not alone:
                size = self._value(term.value, rule).reshape(-1)[source.clamp(min=0)]
                source = torch.where(size == 0, -1, source)
        else:
            source = term.map.best(self._value(term.value, rule), at).source
        there = (source >= 0).nonzero().reshape(-1)
        if len(there):
            weight = entries(term.map, at[there], source[there])
            yield Hops(paths[there], term.value, source[there], weight)

    def _value(self, value: int, rule: str) -> Tensor:
        return self.gradients[value] if rule == "greedy" else self.largest[value].value[0]

    def _sizes(self, terms: tuple[Term, ...], at: Tensor, rule: str) -> list[Tensor]:
        """How much each term counts for in the choice among them."""
        if rule == "greedy":
            return [self._total(term.map, self.gradients[term.value], at) for term in terms]
        held = [self.largest[term.value] for term in terms]
        top = max(each.exponent for each in held)
        return [
            shifted(term.map.best(each.value[0], at).value, each.exponent - top)
            for term, each in zip(terms, held)
        ]

    @staticmethod
    def _total(map_: Map, x: Tensor, at: Tensor) -> Tensor:
        if map_.moves or map_.stays:
            return map_.best(x, at).value
        total = wide(map_.apply(x)).abs().reshape(-1)[at]
        return torch.where(map_.best(x, at).value == 0, 0, total)

    # The best paths, in falling order ----------------------------------------------------------

    def best(self, value: int, elements: Tensor, limit: int) -> Iterator[tuple[int, list[Hop]]]:
        """Paths of greatest |weight| from any of these elements, each with the element's place.

        A search that always goes on where the product so far, times the largest product from there
        to the root, is greatest; so paths come out in order, at most ``limit`` of them.
        """
        numbers = count()
        heap: list[tuple[float, int, int, _Trail]] = []
        with torch.no_grad():
            sizes = self._logs(value)[elements]
            for place in sizes.topk(min(limit, len(elements))).indices.tolist():
                start = _Trail(None, Hop(value, int(elements[place]), 1.0), 0.0)
                heappush(heap, (-float(sizes[place]), next(numbers), place, start))
            while heap and limit:
                size, _, place, trail = heappop(heap)
                if size == inf:
                    return
                if trail.hop.value == self.program.root:
                    limit -= 1
                    yield place, trail.hops()
                    continue
                for further, priority in self._branches(trail, limit):
                    heappush(heap, (-priority, next(numbers), place, further))

    def _logs(self, value: int) -> Tensor:
        held = self.largest[value]
        return held.value[0].reshape(-1).double().log2() + held.exponent

    def _branches(self, trail: _Trail, limit: int) -> Iterator[tuple[_Trail, float]]:
        at = torch.tensor([trail.hop.element], device=self.seed.device)
        for term in self.makers[trail.hop.value]:
            source, weight = term.map.rows(at)
            weight = weight.expand(source.shape)[0].double()
            source = source[0]
            there = ((source >= 0) & (weight != 0)).nonzero().reshape(-1)
            source, weight = source[there], weight[there]
            size = trail.size + weight.abs().log2() + self._logs(term.value)[source]
            for k in size.topk(min(limit, len(source))).indices.tolist():
                hop = Hop(term.value, int(source[k]), float(weight[k]))
                yield _Trail(trail, hop, trail.size + log2(abs(hop.weight))), float(size[k])

    # All of them ---------------------------------------------------------------------------------

    def every(self, value: int, element: int, zeros: bool) -> Iterator[list[Hop]]:
        """All paths from an element to the root, those of weight 0 too if ``zeros``."""
        stack = [_Trail(None, Hop(value, element, 1.0), 0.0)]
        while stack:
            trail = stack.pop()
            if trail.hop.value == self.program.root:
                yield trail.hops()
                continue
            at = torch.tensor([trail.hop.element], device=self.seed.device)
            onward = []
            for term in self.makers[trail.hop.value]:
                source, weight = term.map.rows(at)
                weights = weight.expand(source.shape)[0].tolist()
                onward += [
                    _Trail(trail, Hop(term.value, place, w), 0.0)
                    for place, w in zip(source[0].tolist(), weights)
                    if place >= 0 and (w or zeros)
                ]
            stack += reversed(onward)


class _Trail(NamedTuple):
    """A path from an element on, as far as it is known; ``size`` is log₂ of its product."""

    before: _Trail | None
    hop: Hop
    size: float

    def hops(self) -> list[Hop]:
        """From the element on."""
        found, at = [], self
        while at.before is not None:
            found.append(at.hop)
            at = at.before
        return found[::-1]


def entries(map_: Map, at: Tensor, source: Tensor) -> Tensor:
    """``J[at, source]``, pair by pair, in float64."""
    found = []
    step = max(1, (1 << 20) // max(1, map_.width))
    for n in range(0, len(at), step):
        some, wanted = at[n : n + step], source[n : n + step]
        rows = map_.rows(some)
        weight = rows.weight.expand(rows.source.shape)
        place = (rows.source == wanted.unsqueeze(1)).int().argmax(1, keepdim=True)
        found.append(weight.gather(1, place).squeeze(1).double())
    return torch.cat(found)
