"""Splits every gradient by component: the sum over the paths that pass it, and over the others.

``g = through + around``, at every value. Of most values one of the two is known without work: all
routes to the loss pass the component (``through = g``), or none does (``through = 0``). Only where
routes of both kinds join is it computed, by the same maps that compute the gradient. It is carried
from the loss to the leaves, so that nothing is a difference of large numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod

import torch
from torch import Tensor

from gradtrace.autodiff.loss_checks import isolated
from gradtrace.components.components import Component
from gradtrace.ir import memory
from gradtrace.ir.passes.provenance import ComponentBits, ProvenanceBounds, analyse_provenance
from gradtrace.ir.passes.tails import find_tails
from gradtrace.ir.program import Block, Program, Step, Term
from gradtrace.linops import (
    Contract,
    Identity,
    Map,
    Normaliser,
    Reduce,
    Scale,
    copied,
    tiled,
    tiling,
)
from gradtrace.measures.leaf_products import WHOLE, TailPart, dense
from gradtrace.paths.path_mass import bits_of
from gradtrace.tracing.traced_program import TracedProgram

WHAT = "decomposing the gradient"
REMEDY = "trace fewer samples at a time, or name fewer components"


@dataclass(frozen=True)
class ComponentRoutes:
    """Which components the routes from each value to the loss pass: all, some, or none of them.

    Bit ``1 << n + 1`` stands for component n as a whole, however many provenance bits it has.
    """

    program: Program
    bits: ComponentBits
    count: int

    @classmethod
    def of(
        cls, program: Program, components: Sequence[Component], atoms: ComponentBits
    ) -> ComponentRoutes:
        """The routes of a program, given the provenance bits (``atoms``) of the components."""
        owners: dict[int, int] = {}
        for n, component in enumerate(components):
            for place in bits_of(component.bits):
                owners[place] = owners.get(place, 0) | 1 << n + 1

        def whole(some: int) -> int:
            found = 0
            for place in bits_of(some):
                found |= owners.get(place, 0)
            return found

        block = {at: bits for at, some in atoms.block.items() if (bits := whole(some))}
        position = {at: bits for at, some in atoms.position.items() if (bits := whole(some))}
        slices = {at: (dim, list(map(whole, kinds))) for at, (dim, kinds) in atoms.slices.items()}
        slices = {at: both for at, both in slices.items() if any(both[1])}
        return cls(program, ComponentBits(block, position, slices), len(components))

    @cached_property
    def bounds(self) -> ProvenanceBounds:
        """The components that all routes from a value pass, and those that any does."""
        return analyse_provenance(self.program, self.bits)

    def mixed(self, value: int) -> int:
        """The components that some routes from a value pass and others do not."""
        must, may = self.bounds
        return may[value] & ~must[value]

    def overlaps(self) -> dict[int, int]:
        """For each component the others that a route may pass too, by operators: elements of one
        operator that belong to different components count as one way.
        """
        found = dict.fromkeys(range(self.count), 0)
        may = {self.program.root: 1}
        for number, block in enumerate(self.program.blocks):
            entered = self.bits.block.get(number, 0)
            kinds = set(self.bits.slices.get(number, (0, [0]))[1])
            for value in block.takes.values():
                before = may[value]
                for kind in kinds:
                    _join(found, kind | entered, before | kind | entered)
                    may[value] |= kind | entered
            for step in block.steps:
                may[step.out] = _any(may, step)
            for at, value in block.gives.items():
                extra = self.bits.position.get((number, at), 0)
                _join(found, extra, may[value] | extra)
                may[value] |= extra
            for step in block.merges:
                may[step.out] = _any(may, step)
        return {n: others & ~(1 << n + 1) & ~1 for n, others in found.items()}


def _any(may: Mapping[int, int], step: Step) -> int:
    found = 0
    for _, value in step.terms:
        found |= may[value]
    return found


def _join(found: dict[int, int], added: int, present: int) -> None:
    """Note that routes which pass the ``added`` components pass those ``present``, and back."""
    if not added:
        return
    for n in components_in(present):
        found[n] |= added
    for n in components_in(added):
        found[n] |= present


@lru_cache(65_536)
def components_in(bits: int) -> tuple[int, ...]:
    """The components of these bits; bit 0 is none of them."""
    return tuple(place - 1 for place in bits_of(bits & ~1))


Parts = dict[int, Tensor]
"""What of a value's gradient came through each component; one that is absent has 0."""


class ThroughSweep:
    """One pass over a program in SUM, which carries gradients and what of them came through each
    of the ``wanted`` components (bits).

    ``values`` and ``parts`` are those in use, by value number. ``known`` are gradients that need
    not be computed. ``subset`` are the values to compute (None: all), of which ``keep`` stay after
    their last use. ``maps`` gives the map of a term, if values have a new first dimension. With
    ``defers`` leaves that are larger than what they are made of are not computed: ``tails`` has
    their contributions.
    """

    def __init__(
        self,
        routes: ComponentRoutes,
        wanted: int,
        known: Mapping[int, Tensor],
        subset: frozenset[int] | None = None,
        keep: frozenset[int] = frozenset(),
        maps: Callable[[int, int], Map] | None = None,
        defers: bool = False,
    ) -> None:
        self.program = routes.program
        self.routes = routes
        self.wanted = wanted
        self.known = known
        self.subset = subset
        self.keep = keep
        self.batched = maps is not None
        table = self.program.maps
        self.map = maps or (lambda at, value: table[at])
        self.leaves = {leaf.value for leaf in self.program.leaves}
        self.values: dict[int, Tensor] = {}
        self.parts: dict[int, Parts] = {}
        self.tails: dict[int, list[TailPart]] = {}
        self.deferrable = self._deferrable() if defers else set[int]()

    def _deferrable(self) -> set[int]:
        """Values that only a leaf is made of. What enters a labelled slice is computed."""
        blocks, slices = self.program.blocks, self.routes.bits.slices
        return find_tails(self.program) - {v for at in slices for v in blocks[at].takes.values()}

    def run(self) -> Iterator[int]:
        """Compute all values, and yield leaves as they are complete; each is freed after that."""
        program, subset, last = self.program, self.subset, self._last_uses()
        if program.root in self.leaves and program.root in self.values and not self.batched:
            yield program.root
        number = -1
        for at, block in enumerate(program.blocks):
            if at in self.routes.bits.slices:
                self._enter_slices(at, block)
            for step in (*block.steps, *block.merges):
                number += 1
                if subset is not None and step.out not in subset:
                    continue
                self._run(step)
                if step.out in self.leaves:
                    yield step.out
                for value in (step.out, *(term.value for term in step.terms)):
                    if last.get(value, -1) <= number and value not in self.keep:
                        for held in (self.values, self.parts, self.tails):
                            held.pop(value, None)

    def _last_uses(self) -> dict[int, int]:
        if self.subset is None:
            return self.program.last_uses
        steps = enumerate(self.program.steps())
        return {term.value: n for n, s in steps if s.out in self.subset for term in s.terms}

    def gradient(self, value: int) -> Tensor:
        """The gradient of a value; computed now if it was deferred."""
        if value not in self.values:
            found = self.known.get(value)
            if found is None:
                found = dense(self.tails[value], WHOLE)
                assert found is not None
            self.values[value] = found
        return self.values[value]

    def through(self, value: int, component: int) -> Tensor | None:
        """What of a value's gradient came through a component; None if nothing did."""
        if self.routes.bounds.must[value] >> component + 1 & 1:
            return self.gradient(value)
        if value in self.tails:
            return dense(self.tails[value], component)
        return self.parts.get(value, {}).get(component)

    def components_of(self, value: int) -> tuple[int, ...]:
        """The components that a part, but not all, of a deferred value came through."""
        mixed = components_in(self.routes.mixed(value) & self.wanted)
        return tuple(c for c in mixed if any(c in part.rows for part in self.tails[value]))

    def _run(self, step: Step) -> None:
        out = step.out
        if out in self.deferrable and self._defer(step):
            return
        known = self.known.get(out)
        if known is None:
            known = self._sum(step, [self.gradient(term.value) for term in step.terms])
        self.values[out] = known
        mixed = self.routes.mixed(out) & self.wanted
        if mixed:
            self.parts[out] = self._mixed(step, components_in(mixed))

    def _defer(self, step: Step) -> bool:
        """Hold a value by its contributions, if these have fewer elements than it has."""
        must, found = self.routes.bounds.must, list[TailPart]()
        for at, value in step.terms:
            map_ = self.map(at, value)
            before = self.tails.get(value)
            if before is None:
                before = [TailPart((map_,), self._inputs(value))]
            elif not (isinstance(map_, Identity) and map_.in_shape == map_.out_shape):
                before = [part.then(map_) for part in before]
            added = components_in(must[step.out] & ~must[value] & self.wanted)
            if added:  # by the argument of a sum
                before = [part.all_through(added) for part in before]
            found += before
        if sum(part.inputs for part in found) >= prod(step.shape):
            return False
        self.tails[step.out] = found
        return True

    def _inputs(self, value: int) -> dict[int, Tensor]:
        """A value's gradient, and what of it came through each component."""
        found = {WHOLE: self.gradient(value)}
        for component in components_in(self.routes.bounds.may[value] & self.wanted):
            x = self.through(value, component)
            if x is not None:
                found[component] = x
        return found

    def _mixed(self, step: Step, components: Sequence[int]) -> Parts:
        """One step in SUM for each component."""
        if len(step.terms) > 1 and tiling([self.map(*term) for term in step.terms]) is not None:
            found = {}
            for component in components:
                inputs = [self.through(term.value, component) for term in step.terms]
                if any(x is not None for x in inputs):
                    found[component] = self._sum(step, inputs)
            return found
        total: Parts = {}
        for at, value in step.terms:
            given = {c: x for c in components if (x := self.through(value, c)) is not None}
            for c, x in zip(given, applied(self.map(at, value), list(given.values()))):
                total[c] = total[c] + x if c in total else x
        return {c: total[c].to(step.dtype) for c in components if c in total}

    def _sum(self, step: Step, inputs: Sequence[Tensor | None]) -> Tensor:
        """One step in SUM. Inputs that are None are 0; not all of them are."""
        terms = step.terms
        if len(terms) > 1:
            maps = [self.map(*term) for term in terms]
            if (order := tiling(maps)) is not None:
                return tiled(maps, self._filled(terms, inputs), order).to(step.dtype)
            found = [map_.apply(x) for map_, x in zip(maps, inputs) if x is not None]
            total = found[0]
            for other in found[1:]:
                total = total + other
        else:
            (x,) = inputs
            assert x is not None
            total = self.map(*terms[0]).apply(x)
        return total.to(step.dtype)

    def _filled(self, terms: Sequence[Term], inputs: Sequence[Tensor | None]) -> list[Tensor]:
        pairs = zip(terms, inputs)
        return [torch.zeros_like(self.gradient(v)) if x is None else x for (_, v), x in pairs]

    def _enter_slices(self, number: int, block: Block) -> None:
        """What reaches a labelled slice has come through its components."""
        dim, kinds = self.routes.bits.slices[number]
        for value in block.takes.values():
            if value not in self.values or not (self.subset is None or value in self.subset):
                continue
            gradient, parts = self.values[value], dict(self.parts.get(value, {}))
            for component in components_in(self.routes.mixed(value) & self.wanted):
                here = [n for n, bits in enumerate(kinds) if bits >> component + 1 & 1]
                if here:
                    before = parts.get(component)
                    before = torch.zeros_like(gradient) if before is None else before
                    at = torch.tensor(here, device=gradient.device)
                    along = dim + self.batched
                    slices = gradient.index_select(along, at)
                    parts[component] = before.index_copy(along, at, slices)
            self.parts[value] = parts


BATCHED = (Contract, Normaliser, Reduce, Scale)
"""Maps that are applied to several components at once; the others move elements, mostly as views,
or have no faster way.
"""


def applied(map_: Map, rows: Sequence[Tensor]) -> Sequence[Tensor]:
    """The map applied to each row."""
    if len(rows) > 1 and isinstance(map_, BATCHED):
        return copied(map_, len(rows)).apply(torch.stack(tuple(rows))).unbind()
    return [map_.apply(x) for x in rows]


def held_bytes(routes: ComponentRoutes, wanted: int) -> int:
    """About the most bytes that a sweep holds at a time: live values, each with its parts. What
    leaves are made of is held, if that is less.
    """
    program, tails = routes.program, find_tails(routes.program)
    last, now, most = program.last_uses, 0, 0
    held: dict[int, int] = {}
    for n, step in enumerate(program.steps()):
        copies, count = 1 + (routes.mixed(step.out) & wanted).bit_count(), prod(step.shape)
        if step.out in tails:
            count = min(count, sum(program.maps[at].inputs for at, _ in step.terms))
        size = held[step.out] = copies * count * step.dtype.itemsize
        now += size
        most = max(most, now)
        for value in {step.out, *(term.value for term in step.terms)}:
            if last.get(value, -1) <= n:
                now -= held.pop(value, 0)
    return most


@dataclass(frozen=True)
class ThroughSource:
    """Computes the gradients through a component, from the trace that was decomposed."""

    traced: TracedProgram
    routes: ComponentRoutes
    names: tuple[str, ...]

    @isolated()
    def gradients(self, component: str, leaf: str | None = None) -> dict[str, Tensor]:
        """What came through a component, of one leaf or of all of them, summed over pairs."""
        traced, number = self.traced, self.names.index(component)
        traced.check_unchanged()
        wanted = {traced.leaf(leaf).value} if leaf is not None else set(traced.names)
        program, found = traced.program, dict[str, Tensor]()
        with memory.within(traced.backend, WHAT, REMEDY):
            known = program.constants.known_gradients()
            sweep = ThroughSweep(self.routes, 1 << number + 1, known, defers=True)
            sweep.values[program.root] = program.seed
            for value in sweep.run():
                if value in wanted:
                    x = sweep.through(value, number)
                    x = torch.zeros_like(sweep.gradient(value)) if x is None else x.clone()
                    name = traced.names[value]
                    found[name] = x.to(traced.leaves[name].tensor.device)
        return {name: found[name] for name in traced.leaves if name in found}

    def first_name(self, leaf: str) -> str:
        """The name of a leaf that has several."""
        return self.traced.names[self.traced.leaf(leaf).value]

    def whole(self, leaf: str) -> Tensor:
        """The gradient of a leaf."""
        return self.traced.gradients[leaf]
