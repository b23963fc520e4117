"""Follows single paths through a program, from elements of leaves to the root.

Many elements are followed at once: steps are visited in reverse order, and every element reached in
a step's output moves on to the input element that contributes most. Needs the values of the
program, and one row of a map for each element.
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

from gradtrace.ir.bound import BoundTerm
from gradtrace.ir.interpreter import gradient_of, value_of
from gradtrace.ir.passes.edge_sizes import SingleContributions, single_contributions
from gradtrace.ir.passes.nested_sums import NestedSum, nested
from gradtrace.ir.program import Block, MapTable, Program, Step
from gradtrace.ir.recompute import RecomputedValues, Values
from gradtrace.ir.rescaling import Rescaling, ScaledValue
from gradtrace.kernels import backend_of
from gradtrace.linops import Contract, Identity, Index, Map, Normaliser, Reduce, Scale
from gradtrace.linops.base import Best
from gradtrace.linops.gather import Gather
from gradtrace.linops.indexing import nearby, picked
from gradtrace.paths.edge_sizes import EdgeSizes
from gradtrace.paths.path_forest import ElementEdges, ForestBuilder, PathForest
from gradtrace.semirings import MAX
from gradtrace.semirings.base import shifted, wide
from gradtrace.types import Shape

_RESCALING = Rescaling(MAX)

ROW_COST_ELEMENTS = 64
"""Computing one element by its row costs at most as much as this many elements of a full pass."""


class PathEdge(NamedTuple):
    """An edge to an element of a step's input: the input value, the element number, the weight."""

    value: int
    element: int
    weight: float


class GradientValues(dict[int, Tensor]):
    """The gradient of every value: kept by recording, or computed at the first access."""

    def __init__(self, program: Program, seed: Tensor) -> None:
        super().__init__(kept_by(program) if seed is program.seed else {})
        self[program.root] = seed
        self.steps = {step.out: step for step in program.steps()}
        self.maps = program.maps

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
                        self[step.out] = gradient_of(step, self.maps, self)
        return self[value]


def kept_by(program: Program) -> dict[int, Tensor]:
    """The gradients known from recording: of leaves, and of the values it kept."""
    known = {leaf.value: leaf.known for leaf in program.leaves}
    real = {v: grad for v, grad in known.items() if grad is not None and not grad.is_complex()}
    device = program.seed.device
    return {v: nearby(grad, device) for v, grad in {**real, **program.kept}.items()}


@dataclass
class PathFollower:
    """Follows paths through a program, by its gradients (greedy, edge) or MAX values (viterbi)."""

    program: Program
    seed: Tensor
    budget: int | None = None  # bytes for values; None: keep all
    orders: dict[int, Tensor] = field(default_factory=dict, repr=False)  # of sorted targets
    _nested_cache: tuple[NestedSum, dict[int, ScaledValue]] | None = field(default=None, repr=False)

    @property
    def waits(self) -> bool:
        """Whether reading an element of a value waits for a GPU."""
        return backend_of(self.seed).synchronises

    @cached_property
    def gradients(self) -> Values[Tensor]:
        """The gradient of every value."""
        if self.budget is None:
            return GradientValues(self.program, self.seed)
        return RecomputedValues(self.program, self.seed, gradient_of, self.budget)

    @cached_property
    def largest(self) -> Values[ScaledValue]:
        """Every value in the MAX semiring: the largest |product| of a path to the root."""
        root = ScaledValue(MAX.weigh(self.seed), 0)
        if self.budget is not None:
            return RecomputedValues(self.program, root, _largest, self.budget)
        values = {self.program.root: root}
        with torch.no_grad():
            for step in self.program.steps():
                values[step.out] = _largest(step, self.program.maps, values)
        return values

    @cached_property
    def makers(self) -> dict[int, tuple[BoundTerm, ...]]:
        """The terms that make each value; chained merges as one sum over all users."""
        return _makers(self.program)

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
        """The nested sums, by the outputs of their steps."""
        found = filter(None, (nested(block, self.program.maps) for block in self.program.blocks))
        return {step.out: part for part in found for step in part.steps}

    def _within_nested(self, part: NestedSum) -> dict[int, ScaledValue]:
        """The largest single |contribution| to every value of a nested sum; caches one sum."""
        if self._nested_cache is None or self._nested_cache[0] is not part:
            values = {v: ScaledValue((wide(self.gradients[v]).abs(),), 0) for v in part.takes}
            for step in part.steps:
                values[step.out] = _largest(step, self.program.maps, values)
            self._nested_cache = part, values
        return self._nested_cache[1]

    @cached_property
    def _single(self) -> SingleContributions:
        return single_contributions(self.program)

    @property
    def edges(self) -> EdgeSizes:
        """The sizes of single contributions, by which the rule ``edge`` chooses. Not kept, since
        it refers to this: they would be freed by the garbage collector only.
        """
        return EdgeSizes(
            self._single,
            self.makers,
            lambda value, at: wide(self.gradient(value, at)).abs(),
            lambda term, at: self._offer(term, at, None),
            self._nested_sizes,
        )

    def _nested_sizes(self, value: int, at: Tensor) -> Tensor | None:
        """The largest single |contribution| to elements of a sum of sums; None for other values."""
        part = self.nested.get(value)
        if part is None:
            return None
        held = self._within_nested(part)[value]
        return shifted(held.value[0].reshape(-1)[at], held.exponent)

    # Following the largest contributions -------------------------------------------------------

    def follow(self, starts: Mapping[int, Tensor], rule: str, gradients: bool = True) -> PathForest:
        """The paths from elements of values towards the root, in one sweep over the program.

        ``starts`` maps values to element numbers; paths are numbered in its order. ``gradients``:
        of the outputs of all operators on the way, or else only of the starts and of the root.
        """
        builder = ForestBuilder(starts, self.waits)
        with torch.no_grad():
            for out, terms in reversed(self.makers.items()):
                if builder.arrived(out):
                    at = builder.stage(out, terms[0].map.outputs)
                    alive, diagonal = False, _is_scale(terms)
                    if out in starts or (out in self.takers and (gradients or diagonal)):
                        gradient = self.gradient(out, at)
                        builder.gradient(gradient)
                        check = diagonal and not self.waits
                        alive = check and bool(gradient.all())
                    if self.edge_chooses(out, terms, rule):
                        edges = _chosen(terms, at, self.edges.offers(out, at), self.waits)
                    else:
                        edges = self._onward(terms, at, self.compared(out, rule), alive)
                    for some in edges:
                        builder.send(some)
            root = self.program.root
            if builder.arrived(root):
                at = builder.stage(root, self.seed.numel())
                builder.gradient(self.seed.reshape(-1)[at])
            return builder.forest(root)

    def edge_chooses(self, out: int, terms: tuple[BoundTerm, ...], rule: str) -> bool:
        """Whether the rule ``edge`` chooses among the terms of a value, by single contributions."""
        return rule == "edge" and out not in self.nested and self.edges.chooses(out, terms)

    def compared(self, out: int, rule: str) -> Values[ScaledValue] | None:
        """The sizes by which the terms of a value are compared; None for the gradients."""
        if rule == "viterbi":
            return self.largest
        part = self.nested.get(out)
        return None if part is None else self._within_nested(part)

    def _onward(
        self,
        terms: tuple[BoundTerm, ...],
        at: Tensor,
        held: Values[ScaledValue] | None,
        alive: bool,
    ) -> Iterator[ElementEdges]:
        """Edges from the elements ``at`` to the next; ``alive`` if all their gradients are known
        and nonzero.
        """
        if len(terms) == 1:
            # a nonzero output of a diagonal map has a nonzero input
            if alive and held is None and terms[0].map.is_diagonal:
                yield _edges(terms[0], at, at, None)
                return
            yield from self._single_term(terms[0], at, held)
            return
        offers = [self._offer(term, at, held) for term in terms]
        sizes = self._sizes(terms, offers, at, held)
        offers = [offer._replace(value=size) for offer, size in zip(offers, sizes)]
        yield from _chosen(terms, at, offers, self.waits)

    def _single_term(
        self, term: BoundTerm, at: Tensor, held: Values[ScaledValue] | None
    ) -> Iterator[ElementEdges]:
        """The edges of a step of one term."""
        if isinstance(term.map, Identity):
            yield ElementEdges(term.value, at, None, None, True)
            return
        if term.map.is_gather:
            source = term.map.rows(at).source[:, 0]
        else:
            source = term.map.best(self.value(term.value, held), at).source
        if _unread(term.map, self.waits):
            yield _ended_edges(term, at, source, None)
            return
        if not source.numel() or int(source.min()) >= 0:
            yield _edges(term, at, source, None)
            return
        there = (source >= 0).nonzero().reshape(-1)
        if there.numel():
            yield _edges(term, at[there], source[there], there)

    def _offer(self, term: BoundTerm, at: Tensor, held: Values[ScaledValue] | None) -> Best:
        """The largest |contribution| of one of several terms to the elements ``at``."""
        if held is not None or not term.map.is_gather or term.value in self.gradients:
            return term.map.best(self.value(term.value, held), at)
        source = term.map.rows(at).source[:, 0]
        found = wide(self.gradient(term.value, source.clamp(min=0))).abs()
        found = torch.where(source < 0, 0, found)
        return Best(found, torch.where(found == 0, -1, source))

    def gradient(self, value: int, at: Tensor) -> Tensor:
        """The gradient of the elements ``at`` of a value. If the value's gradient is not known and
        the elements are few, only these are computed: ``Σⱼ w[i,j] · g[j]``.
        """
        if (
            value in self.gradients
            or ROW_COST_ELEMENTS * len(at) > self.makers[value][0].map.outputs
        ):
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
        return map_.apply_at(self.gradients[value], at)

    def _shape(self, value: int) -> Shape:
        return self.makers[value][0].map.out_shape

    def value(self, value: int, held: Values[ScaledValue] | None) -> Tensor:
        """The value by which contributions are compared: the gradient, or the one in ``held``."""
        return self.gradients[value] if held is None else held[value].value[0]

    def _sizes(
        self,
        terms: tuple[BoundTerm, ...],
        offers: list[Best],
        at: Tensor,
        held: Values[ScaledValue] | None,
    ) -> list[Tensor]:
        """The size of each term, by which one of them is chosen."""
        if held is None:
            return [self._total(term, offer.value, at) for term, offer in zip(terms, offers)]
        powers = [held[term.value].exponent for term in terms]
        return [shifted(offer.value, p - max(powers)) for offer, p in zip(offers, powers)]

    def _total(self, term: BoundTerm, largest: Tensor, at: Tensor) -> Tensor:
        """|Σ contributions| of a term to the elements ``at``; 0 where all contributions are 0."""
        if term.map.is_gather or term.map.is_diagonal:
            return largest
        total = wide(term.map.apply(self.gradients[term.value])).abs().reshape(-1)[at]
        return torch.where(largest == 0, 0, total)

    # The best paths, in descending order --------------------------------------------------------

    def best(
        self, value: int, elements: Tensor, limit: int
    ) -> Iterator[tuple[int, list[PathEdge]]]:
        """Paths of greatest |weight| from any of ``elements``, each with its index in ``elements``.

        Best-first search (A*) with priority |product so far| times the largest |product| from there
        to the root, which is exact. So paths come in descending order, at most ``limit`` of them.
        """
        numbers = count()
        heap: list[tuple[float, int, int, _PartialPath]] = []
        with torch.no_grad():
            sizes = self._logs(value)[elements]
            for place in sizes.topk(min(limit, len(elements))).indices.tolist():
                start = _PartialPath(None, PathEdge(value, int(elements[place]), 1.0), 0.0)
                heappush(heap, (-float(sizes[place]), next(numbers), place, start))
            while heap and limit:
                size, _, place, partial = heappop(heap)
                if size == inf:
                    return
                if partial.edge.value == self.program.root:
                    limit -= 1
                    yield place, partial.edges()
                    continue
                for further, priority in self._branches(partial, limit):
                    heappush(heap, (-priority, next(numbers), place, further))

    def _logs(self, value: int) -> Tensor:
        held = self.largest[value]
        return held.value[0].reshape(-1).double().log2() + held.exponent

    def _branches(self, partial: _PartialPath, limit: int) -> Iterator[tuple[_PartialPath, float]]:
        at = torch.tensor([partial.edge.element], device=self.seed.device)
        for term in self.makers[partial.edge.value]:
            source, weight = term.map.rows(at)
            weight = weight.expand(source.shape)[0].double()
            source = source[0]
            there = ((source >= 0) & (weight != 0)).nonzero().reshape(-1)
            source, weight = source[there], weight[there]
            size = partial.size + weight.abs().log2() + self._logs(term.value)[source]
            for k in size.topk(min(limit, len(source))).indices.tolist():
                edge = PathEdge(term.value, int(source[k]), float(weight[k]))
                yield (
                    _PartialPath(partial, edge, partial.size + log2(abs(edge.weight))),
                    float(size[k]),
                )

    # All paths -----------------------------------------------------------------------------------

    def every(self, value: int, element: int, zeros: bool) -> Iterator[list[PathEdge]]:
        """All paths from an element to the root, those of weight 0 too if ``zeros``."""
        stack = [_PartialPath(None, PathEdge(value, element, 1.0), 0.0)]
        while stack:
            partial = stack.pop()
            if partial.edge.value == self.program.root:
                yield partial.edges()
                continue
            at = torch.tensor([partial.edge.element], device=self.seed.device)
            onward = []
            for term in self.makers[partial.edge.value]:
                source, weight = term.map.rows(at)
                weights = weight.expand(source.shape)[0].tolist()
                onward += [
                    _PartialPath(partial, PathEdge(term.value, place, w), 0.0)
                    for place, w in zip(source[0].tolist(), weights)
                    if place >= 0 and (w or zeros)
                ]
            stack += reversed(onward)


def _makers(program: Program) -> dict[int, tuple[BoundTerm, ...]]:
    """The terms that make each value; chained merges as one sum over all users."""
    made: dict[int, tuple[BoundTerm, ...]] = {}
    sums: dict[int, list[BoundTerm]] = {}
    maps = program.maps
    for block in program.blocks:
        for step in block.steps:
            made[step.out] = tuple([BoundTerm(maps[at], value) for at, value in step.terms])
        for step in block.merges:
            first, *rest = (BoundTerm(maps[at], value) for at, value in step.terms)
            terms = sums.pop(first.value, None)  # extended in place: there may be thousands
            if terms is None:
                terms = [first]
            else:
                del made[first.value]  # a partial sum has no other user
            terms += rest
            sums[step.out] = terms
            made[step.out] = ()  # keeps the position in the order; filled below
    made.update((value, tuple(terms)) for value, terms in sums.items())
    return made


def _chosen(
    terms: tuple[BoundTerm, ...], at: Tensor, offers: list[Best], waits: bool
) -> Iterator[ElementEdges]:
    """The edges of the largest of several offers to each of the elements ``at``."""
    which = torch.stack([offer.value for offer in offers]).max(0).indices
    if all(_unread(term.map, waits) for term in terms):
        order = which.argsort(stable=True)
        numbers = torch.arange(len(terms), device=at.device).unsqueeze(1)
        counts = (which == numbers).sum(1).tolist()  # one wait for all terms
        for term, offer, mine in zip(terms, offers, torch.split(order, counts)):
            if len(mine):
                yield _ended_edges(term, at[mine], offer.source[mine], mine)
        return
    for k, (term, offer) in enumerate(zip(terms, offers)):
        mine = ((which == k) & (offer.source >= 0)).nonzero().reshape(-1)
        if mine.numel():
            yield _edges(term, at[mine], offer.source[mine], mine)


def _largest(step: Step, maps: MapTable, values: dict[int, ScaledValue]) -> ScaledValue:
    return _RESCALING.balanced(value_of(step, maps, values, _RESCALING))


def _is_scale(terms: tuple[BoundTerm, ...]) -> bool:
    """Whether a value is one other, scaled element by element."""
    return len(terms) == 1 and terms[0].map.is_diagonal and not terms[0].map.is_gather


def _edges(term: BoundTerm, at: Tensor, source: Tensor, mine: Tensor | None) -> ElementEdges:
    """The edges of one term, from some (None: all) of the elements of a stage."""
    weight = None if term.map.is_gather else term.map.entry(at, source)
    return ElementEdges(term.value, source, weight, mine, _injective(term.map))


def _unread(map_: Map, waits: bool) -> bool:
    """Whether sources stay on the GPU that holds them, though some elements may have none: reading
    how many would wait for it. Other maps cannot tell the weight of a pair that is no entry.
    """
    kinds = (Contract, Gather, Normaliser, Reduce, Scale)
    return waits and isinstance(map_, kinds) and map_.inputs > 0


def _ended_edges(term: BoundTerm, at: Tensor, source: Tensor, mine: Tensor | None) -> ElementEdges:
    """``_edges`` to sources that may be -1, for none."""
    edges = _edges(term, at, source.clamp(min=0), mine)
    return edges._replace(distinct=False, ended=source < 0)


def _injective(map_: Map) -> bool:
    """Whether distinct elements are known to have distinct sources."""
    return isinstance(map_, (Identity, Scale)) or (isinstance(map_, Index) and bool(map_.injective))


class _PartialPath(NamedTuple):
    """A partial path as a linked list of edges; ``size`` is log₂ of |product|."""

    before: _PartialPath | None
    edge: PathEdge
    size: float

    def edges(self) -> list[PathEdge]:
        """The edges in order, from the start."""
        found, at = [], self
        while at.before is not None:
            found.append(at.edge)
            at = at.before
        return found[::-1]
