"""Scores of the edges between the nodes of an attribution graph: sums over the paths between them.

With g the gradient of a value v and t its derivative along the inputs' direction, ``⟨g, t⟩`` is the
sum over all paths through v of weight × direction. Divided by where paths go on, and by where they
come from, it is the same sum: what enters a node equals what leaves it. To find the edges to a
node, the gradient of its outputs is carried back through it, and on through what only connects, to
the outputs of other nodes: there ``⟨c, t⟩`` with the cotangent c that arrived is the edge's score.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import product
from math import prod

import torch
from torch import Tensor

from gradtrace.attribution.graph_sites import Site
from gradtrace.components.module_parts import ProgramPlaces
from gradtrace.ir import interpreter
from gradtrace.ir.program import Program, Step
from gradtrace.linops import transposed
from gradtrace.types import Shape

OUTPUT = "output"
"""The node at which all paths end."""

Edges = dict[tuple[str, str], float]
"""The score from a node to another."""


@dataclass(frozen=True)
class Cells:
    """Nodes by name, and which of them each element of a value belongs to."""

    names: Sequence[str]
    at: Tensor

    def sums(self, scores: Tensor) -> Iterator[tuple[str, float]]:
        """The sum of each node's elements, if one of them is not 0."""
        flat, at = scores.reshape(-1).double(), self.at.reshape(-1)
        size = len(self.names)
        sums = flat.new_zeros(size).index_add_(0, at, flat).tolist()
        some = flat.new_zeros(size).index_add_(0, at, flat.abs()).tolist()
        return ((name, x) for name, x, any_ in zip(self.names, sums, some) if any_)


@dataclass
class EdgeFinder:
    """Finds the edges of a program between sites, its leaves and its root.

    ``inputs`` are the nodes of each leaf, by its value; ``directions`` what gradients are
    multiplied with; ``lead`` the positions by which sites are divided, if their outputs have them.
    """

    places: ProgramPlaces
    sites: Sequence[Site]
    inputs: Mapping[int, Cells]
    directions: Mapping[int, Tensor]
    lead: Shape = ()
    _owner: dict[int, int] = field(init=False)

    def __post_init__(self) -> None:
        self._owner = {block: n for n, site in enumerate(self.sites) for block in site.blocks}

    @property
    def program(self) -> Program:
        """The program of the scalar."""
        return self.places.program

    def find(self) -> Edges:
        """The scores of all edges; those that are 0 for every path are left out."""
        found: Edges = {}
        with torch.no_grad():
            for target, arrivals in self._arrivals():
                for value, cotangent in arrivals:
                    scores = cotangent * self._tangents[value]
                    for source, score in self._cells[value].sums(scores):
                        found[source, target] = found.get((source, target), 0.0) + score
        return found

    # Borders --------------------------------------------------------------------------------------

    @cached_property
    def _borders(self) -> dict[int, int]:
        """Values that enter another site, connector or the output from a site or a leaf; with the
        number of the site, or -1 for a leaf.
        """
        leaves = {leaf.value for leaf in self.program.leaves}
        users = {v: n for n, block in enumerate(self.program.blocks) for v in block.gives.values()}
        found = {}
        for value, user in {**users, self.program.root: -1}.items():
            whole = self.places.wholes.get(value, value)
            if whole in leaves:
                found[value] = -1
                continue
            site = self._owner.get(self.places.takers.get(whole, -1))
            if site is not None and site != self._owner.get(user):
                found[value] = site
        return found

    @cached_property
    def _cells(self) -> dict[int, Cells]:
        """The nodes that the elements of each border value come from."""
        by_site: dict[int, list[int]] = {}
        for value, site in self._borders.items():
            by_site.setdefault(site, []).append(value)
        found = {}
        for site, values in by_site.items():
            lead = self.lead if all(self._has_positions(v) for v in values) else ()
            for value in values:
                if site == -1:
                    found[value] = self.inputs[self.places.wholes.get(value, value)]
                else:
                    found[value] = self._site_cells(self.sites[site], value, lead)
        return found

    def _has_positions(self, value: int) -> bool:
        shape = self.places.shapes[value]
        return shape[: len(self.lead)] == self.lead and len(shape) > len(self.lead)

    def _site_cells(self, site: Site, value: int, lead: Shape) -> Cells:
        shape, device = self.places.shapes[value], self.places.device
        at = site.cells(value, shape, device)
        if not lead:
            return Cells(site.names, at)
        position = torch.arange(prod(lead), device=device).reshape(
            *lead, *[1] * (len(shape) - len(lead))
        )
        places = [",".join(map(str, place)) for place in product(*map(range, lead))]
        names = [f"{name} at {place}" for place in places for name in site.names]
        return Cells(names, position * len(site.names) + at)

    # Passes ---------------------------------------------------------------------------------------

    def _arrivals(self) -> Iterator[tuple[str, Iterable[tuple[int, Tensor]]]]:
        """Each node, and the cotangents that arrive at the outputs of those before it."""
        seed = {self.program.root: self.program.seed}
        yield OUTPUT, seed.items() if self.program.root in self._borders else self._carried(seed)
        by_site: dict[int, list[int]] = {}
        for value, site in self._borders.items():
            if site != -1:
                by_site.setdefault(site, []).append(value)
        for values in by_site.values():
            for n, name in enumerate(self._cells[values[0]].names):
                held = {v: self._gradients[v] * (self._cells[v].at == n) for v in values}
                held = {value: part for value, part in held.items() if bool(part.any())}
                if held:
                    yield name, self._carried(held)

    @cached_property
    def _gradients(self) -> dict[int, Tensor]:
        """The gradient of every border value."""
        program, found = self.program, dict[int, Tensor]()
        values, last = {program.root: program.seed}, program.last_uses
        for n, step in enumerate(program.steps()):
            value = values[step.out] = interpreter.gradient_of(step, program.maps, values)
            if step.out in self._borders:
                found[step.out] = value
            for term in step.terms:
                if last[term.value] == n:
                    values.pop(term.value, None)
        return found | {program.root: program.seed}

    @cached_property
    def _tangents(self) -> dict[int, Tensor]:
        """The derivative of every border value along the directions of the leaves."""
        program, found = self.program, dict[int, Tensor]()
        along = dict(self.directions)
        for step in reversed(program.steps()):
            here = along.pop(step.out, None)
            if here is None:
                continue
            if step.out in self._borders:
                found[step.out] = here
            for term in step.terms:
                back = transposed(program.maps[term.map]).apply(here)
                there = along.get(term.value)
                along[term.value] = back if there is None else there + back
        return found | along

    @cached_property
    def _users(self) -> dict[int, list[int]]:
        """The steps that read each value."""
        found: dict[int, list[int]] = {}
        for n, step in enumerate(self.program.steps()):
            for term in step.terms:
                found.setdefault(term.value, []).append(n)
        return found

    def _carried(self, held: dict[int, Tensor]) -> Iterator[tuple[int, Tensor]]:
        """The cotangents that arrive at the next border values."""
        steps, maps = self._steps, self.program.maps
        pending = list({n for value in held for n in self._users.get(value, ())})
        queued = set(pending)
        heapify(pending)
        while pending:
            step = steps[heappop(pending)]
            terms = tuple(term for term in step.terms if term.value in held)
            arrived = interpreter.gradient_of(step._replace(terms=terms), maps, held)
            if step.out in self._borders:
                if step.out in self._tangents:
                    yield step.out, arrived
                continue
            held[step.out] = arrived
            for n in self._users.get(step.out, ()):
                if n not in queued:
                    queued.add(n)
                    heappush(pending, n)

    @cached_property
    def _steps(self) -> list[Step]:
        return self.program.steps()
