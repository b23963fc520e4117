"""Follow single paths through a program whose values were kept: one row of a map per step.

Many elements are followed at once: steps are gone through in reverse, and every element that has
arrived at a step's output moves on to the element of its input that contributes most.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from heapq import heappop, heappush
from itertools import count
from math import inf, log2
from typing import NamedTuple

import torch
from torch import Tensor

from gradtrace.ir.interpreter import ScaledValue, balanced, gradient_of, value_of
from gradtrace.ir.nested_sums import NestedSum, nested
from gradtrace.ir.program import Block, Program, Step, Term
from gradtrace.ir.recompute import RecomputedValues, Values
from gradtrace.kernels import sync
from gradtrace.linops import Identity, Index, Map, Scale
from gradtrace.linops.base import Best
from gradtrace.linops.indexing import nearby, picked
from gradtrace.semirings import MAX
from gradtrace.semirings.base import shifted, wide
from gradtrace.tracing.path_forest import ForestBuilder, Hops, PathForest
from gradtrace.types import Shape

SINGLE = 64
"""To work out an element by itself costs as much as so many together, or less."""

ENTRIES = 1 << 22
"""How many entries of a map to look at in one go."""


class PathEdge(NamedTuple):
    """From an element of a step's output to one of an input: the value, its element, the weight."""

    value: int
    element: int
    weight: float


class GradientValues(dict[int, Tensor]):
    """The gradient at every value: as recording kept it, else computed when it is asked for."""

    def __init__(self, program: Program, seed: Tensor) -> None:
        super().__init__(kept_by(program) if seed is program.seed else {})
        self[program.root] = seed
        self.steps = {step.out: step for step in program.steps()}

    def __missing__(self, value: int) -> Tensor:
        stack = [value]
        with torch.no_grad():
            while stack:
                step = self.steps[stack[-1]]
                before = [term.value for term in step.terms if term.value not in self]
                if before:
                    stack += before
                else:
                    stack.pop()
                    if step.out not in self:
                        self[step.out] = gradient_of(step, self)
        return self[value]


def kept_by(program: Program) -> dict[int, Tensor]:
    """The gradients that are known since recording: of leaves, and of what was kept."""
    known = {leaf.value: leaf.known for leaf in program.leaves}
    real = {v: grad for v, grad in known.items() if grad is not None and not grad.is_complex()}
    device = program.seed.device
    return {v: nearby(grad, device) for v, grad in {**real, **program.kept}.items()}


@dataclass
class PathFollower:
    """A program and its values: gradients, or MAX with powers of two."""

    program: Program
    seed: Tensor
    budget: int | None = None  # bytes; None: all values are kept
    _latest: tuple[NestedSum, dict[int, ScaledValue]] | None = field(default=None, repr=False)

    @cached_property
    def gradients(self) -> Values[Tensor]:
        """The gradient at every value."""
        if self.budget is None:
            return GradientValues(self.program, self.seed)
        return RecomputedValues(self.program, self.seed, gradient_of, self.budget)

    @cached_property
    def largest(self) -> Values[ScaledValue]:
        """MAX at every value: the largest |product| from there to the root."""
        root = ScaledValue(MAX.weigh(self.seed), 0)
        if self.budget is not None:
            return RecomputedValues(self.program, root, _largest, self.budget)
        values = {self.program.root: root}
        with torch.no_grad():
            for step in self.program.steps():
                values[step.out] = _largest(step, values)
        return values

    @cached_property
    def makers(self) -> dict[int, tuple[Term, ...]]:
        """The terms that make each value; sums over all users of an argument in one."""
        made: dict[int, tuple[Term, ...]] = {}
        sums: dict[int, list[Term]] = {}
        for block in self.program.blocks:
            for step in block.steps:
                made[step.out] = step.terms
            for step in block.merges:
                first, *rest = step.terms
                terms = sums.pop(first.value, None)  # not copied: there may be thousands
                if terms is None:
                    terms = [first]
                else:
                    del made[first.value]  # nobody else uses a sum that goes on
                terms += rest
                sums[step.out] = terms
                made[step.out] = ()  # in its place
        made.update((value, tuple(terms)) for value, terms in sums.items())
        return made

    @cached_property
    def takers(self) -> dict[int, tuple[Block, int]]:
        """The block, and its output slot, that each value is the cotangent of."""
        return {
            value: (block, slot)
            for block in self.program.blocks
            for slot, value in block.takes.items()
        }

    @cached_property
    def nested(self) -> dict[int, NestedSum]:
        """The sums of sums, by the values of their steps."""
        found = filter(None, map(nested, self.program.blocks))
        return {step.out: part for part in found for step in part.steps}

    def _inside(self, part: NestedSum) -> dict[int, ScaledValue]:
        """The largest single |contribution| to every value of sums of sums."""
        if self._latest is None or self._latest[0] is not part:
            values = {v: ScaledValue((wide(self.gradients[v]).abs(),), 0) for v in part.takes}
            for step in part.steps:
                values[step.out] = _largest(step, values)
            self._latest = part, values
        return self._latest[1]

    # Following the largest contributions -------------------------------------------------------

    def follow(self, starts: Mapping[int, Tensor], rule: str) -> PathForest:
        """From elements of values towards the root, by a rule, in one sweep over the program.

        Paths are numbered in the order of ``starts``.
        """
        growth = ForestBuilder(starts)
        with torch.no_grad():
            for out, terms in reversed(self.makers.items()):
                if growth.arrived(out):
                    at = growth.stage(out, terms[0].map.outputs)
                    alive = False
                    if out in self.takers or out in starts:
                        gradient = self.gradient(out, at)
                        growth.gradient(gradient)
                        look = terms[0].map.is_diagonal and not sync.would_sync(gradient)
                        alive = look and bool(gradient.all())
                    for hops in self._onward(terms, at, self._compared(out, rule), alive):
                        growth.send(hops)
            root = self.program.root
            if growth.arrived(root):
                at = growth.stage(root, self.seed.numel())
                growth.gradient(self.seed.reshape(-1)[at])
            return growth.forest(root)

    def _compared(self, out: int, rule: str) -> Values[ScaledValue] | None:
        """The sizes by which the terms of a value are compared; None for the gradients."""
        if rule != "greedy":
            return self.largest
        part = self.nested.get(out)
        return None if part is None else self._inside(part)

    def _onward(
        self, terms: tuple[Term, ...], at: Tensor, held: Values[ScaledValue] | None, alive: bool
    ) -> Iterator[Hops]:
        """Where elements go on to; ``alive`` if their gradients are known, and none is 0."""
        if len(terms) == 1:
            if (
                alive and held is None and terms[0].map.is_diagonal
            ):  # what it comes from is not 0 either
                yield _hops(terms[0], at, at, None)
                return
            yield from self._alone(terms[0], at, held)
            return
        offers = [self._offer(term, at, held) for term in terms]
        sizes = self._sizes(terms, offers, at, held)
        which = torch.stack(sizes).max(0).indices
        for k, (term, offer) in enumerate(zip(terms, offers)):
            mine = ((which == k) & (offer.source >= 0)).nonzero().reshape(-1)
            if mine.numel():
                yield _hops(term, at[mine], offer.source[mine], mine)

    def _alone(self, term: Term, at: Tensor, held: Values[ScaledValue] | None) -> Iterator[Hops]:
        """The hops of a step of one term."""
        if isinstance(term.map, Identity):
            yield Hops(term.value, at, None, None, True)
            return
        if term.map.is_gather:
            source = term.map.rows(at).source[:, 0]
        else:
            source = term.map.best(self._value(term.value, held), at).source
        if not source.numel() or int(source.min()) >= 0:
            yield _hops(term, at, source, None)
            return
        there = (source >= 0).nonzero().reshape(-1)
        if there.numel():
            yield _hops(term, at[there], source[there], there)

    def _offer(self, term: Term, at: Tensor, held: Values[ScaledValue] | None) -> Best:
        """What one of several terms has for some elements."""
        if held is not None or not term.map.is_gather or term.value in self.gradients:
            return term.map.best(self._value(term.value, held), at)
        source = term.map.rows(at).source[:, 0]
        found = wide(self.gradient(term.value, source.clamp(min=0))).abs()
        found = torch.where(source < 0, 0, found)
        return Best(found, torch.where(found == 0, -1, source))

    def gradient(self, value: int, at: Tensor) -> Tensor:
        """The gradient of some elements of a value. If that is not known and they are few, it is
        worked out for them alone: ``Σⱼ w[i,j] · g[j]``.
        """
        if value in self.gradients or SINGLE * len(at) > self.makers[value][0].map.outputs:
            return picked(self.gradients[value], self._shape(value), at)
        total: Tensor | None = None
        for map_, source in self.makers[value]:
            here = self._summed(map_, source, at)
            total = here if total is None else total + here
        assert total is not None
        return total

    def _summed(self, map_: Map, value: int, at: Tensor) -> Tensor:
        if map_.is_gather:
            source = map_.rows(at).source[:, 0]
            return torch.where(source < 0, 0, self.gradient(value, source.clamp(min=0)))
        x = self.gradients[value]
        flat, found = x.reshape(-1), []
        for some in torch.split(at, max(1, ENTRIES // max(1, map_.width))):
            source, weight = map_.rows(some)
            taken = torch.where(source < 0, 0, flat[source.clamp(min=0)])
            found.append((taken * weight).sum(1).to(x.dtype))
        return torch.cat(found)

    def _shape(self, value: int) -> Shape:
        return self.makers[value][0].map.out_shape

    def _value(self, value: int, held: Values[ScaledValue] | None) -> Tensor:
        return self.gradients[value] if held is None else held[value].value[0]

    def _sizes(
        self,
        terms: tuple[Term, ...],
        offers: list[Best],
        at: Tensor,
        held: Values[ScaledValue] | None,
    ) -> list[Tensor]:
        """How much each term counts for in the choice among them."""
        if held is None:
            return [self._total(term, offer.value, at) for term, offer in zip(terms, offers)]
        powers = [held[term.value].exponent for term in terms]
        return [shifted(offer.value, p - max(powers)) for offer, p in zip(offers, powers)]

    def _total(self, term: Term, largest: Tensor, at: Tensor) -> Tensor:
        """What a term brings in all, if it brings anything."""
        if term.map.is_gather or term.map.is_diagonal:
            return largest
        total = wide(term.map.apply(self.gradients[term.value])).abs().reshape(-1)[at]
        return torch.where(largest == 0, 0, total)

    # The best paths, in falling order ----------------------------------------------------------

    def best(
        self, value: int, elements: Tensor, limit: int
    ) -> Iterator[tuple[int, list[PathEdge]]]:
        """Paths of greatest |weight| from any of these elements, each with the element's place.

        A search that always goes on where the product so far, times the largest product from there
        to the root, is greatest; so paths come out in order, at most ``limit`` of them.
        """
        numbers = count()
        heap: list[tuple[float, int, int, _Trail]] = []
        with torch.no_grad():
            sizes = self._logs(value)[elements]
            for place in sizes.topk(min(limit, len(elements))).indices.tolist():
                start = _Trail(None, PathEdge(value, int(elements[place]), 1.0), 0.0)
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
                hop = PathEdge(term.value, int(source[k]), float(weight[k]))
                yield _Trail(trail, hop, trail.size + log2(abs(hop.weight))), float(size[k])

    # All of them ---------------------------------------------------------------------------------

    def every(self, value: int, element: int, zeros: bool) -> Iterator[list[PathEdge]]:
        """All paths from an element to the root, those of weight 0 too if ``zeros``."""
        stack = [_Trail(None, PathEdge(value, element, 1.0), 0.0)]
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
                    _Trail(trail, PathEdge(term.value, place, w), 0.0)
                    for place, w in zip(source[0].tolist(), weights)
                    if place >= 0 and (w or zeros)
                ]
            stack += reversed(onward)


def _largest(step: Step, values: dict[int, ScaledValue]) -> ScaledValue:
    return balanced(value_of(step, values, MAX), MAX)


def _hops(term: Term, at: Tensor, source: Tensor, mine: Tensor | None) -> Hops:
    """Hops within one term, from some (None: all) of the elements of a stage."""
    weight = None if term.map.is_gather else term.map.entry(at, source)
    return Hops(term.value, source, weight, mine, _apart(term.map))


def _apart(map_: Map) -> bool:
    """Whether different elements are known to come from different ones."""
    return isinstance(map_, (Identity, Scale)) or (isinstance(map_, Index) and bool(map_.injective))


class _Trail(NamedTuple):
    """A path from an element on, as far as it is known; ``size`` is log₂ of its product."""

    before: _Trail | None
    hop: PathEdge
    size: float

    def hops(self) -> list[PathEdge]:
        """From the element on."""
        found, at = [], self
        while at.before is not None:
            found.append(at.hop)
            at = at.before
        return found[::-1]
