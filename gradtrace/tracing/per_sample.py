"""Assigns elements of a program to pairs, where the loss is a vector with one loss per pair."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import TypeAlias

import torch
from torch import Tensor

from gradtrace.ir.passes.nested_sums import nested
from gradtrace.ir.passes.schedule import partial_sums
from gradtrace.ir.program import Program, Step
from gradtrace.linops import Map
from gradtrace.linops.axes import MIXED, Axis, recognised
from gradtrace.types import Shape

Span: TypeAlias = Axis | Tensor
"""The pair of each element, from 1 on (0: none): along an axis, or a number for each."""


@dataclass
class Pairs:
    """Which pair each element belongs to, found by propagating pair numbers through the maps.

    ``apart`` are the values each of whose elements depends on one loss only. ``of`` gives the pair
    of each element, from 1 on (0: none), for those of them that are leaves or inputs of a step
    that mixes pairs; ``axes`` the dimension along which pairs are, if they are along one.
    """

    apart: set[int]
    of: dict[int, Tensor]
    axes: dict[int, Axis] = field(default_factory=dict)

    @classmethod
    def follow(cls, program: Program, count: int) -> Pairs:
        """Propagate pair numbers from a vector of ``count`` losses."""
        spans = Spans(program, count)
        apart, of = {program.root}, dict[int, Span]()
        chains = Chains(program)
        last, maps = program.last_uses, program.maps
        leaves = {leaf.value for leaf in program.leaves}
        n = -1
        for block in program.blocks:
            part = nested(block, maps)
            taken = {v: spans.of[v] for v in block.takes.values() if v in apart} if part else {}
            for step in (*block.steps, None, *block.merges):
                if step is None:  # a nested sum is computed as a whole
                    if part is not None and not part.gives <= apart:
                        apart.difference_update(each.out for each in block.steps)
                        of.update(taken)
                    continue
                n += 1
                if all(term.value in apart for term in step.terms) and spans.add(step):
                    apart.add(step.out)
                    if step.out in leaves:
                        of[step.out] = spans.of[step.out]
                for value, span in chains.broken(step, apart, spans.of):
                    of[value] = span
                if step.out not in apart:
                    of.update((t.value, spans.of[t.value]) for t in step.terms if t.value in apart)
                for term in step.terms:
                    if last[term.value] == n:
                        spans.of.pop(term.value, None)
        axes = {value: span for value, span in of.items() if isinstance(span, Axis)}
        shapes = {step.out: step.shape for step in program.steps()} | {program.root: (count,)}
        numbers = {value: spans.numbers(span, shapes[value]) for value, span in of.items()}
        return cls(apart, numbers, axes)

    def summed(self, program: Program, mixed: frozenset[int]) -> dict[int, int | None]:
        """For each input of a step that mixes pairs, a dimension that every user sums over: the one
        along which a pair has the smallest share of indices. None if there is none.
        """
        takers: dict[int, list[Map]] = {}
        for step in program.steps():
            if step.out in mixed:
                for term in step.terms:
                    if term.value in self.apart:
                        takers.setdefault(term.value, []).append(program.maps[term.map])
        found: dict[int, int | None] = {}
        for value, maps in takers.items():
            fit = [d for d in range(self.of[value].dim()) if all(m.sums_over(d) for m in maps)]
            share = self._shares(value, fit)
            found[value] = min(share, key=share.__getitem__, default=None)
        return found

    def _shares(self, value: int, dims: list[int]) -> dict[int, float]:
        """The share of indices along these dimensions at which the first pair has elements."""
        axis, of = self.axes.get(value), self.of[value]
        if axis is not None:
            return {d: 1 / axis.total if d == axis.dim else 1.0 for d in dims}
        first = of == 1
        return {d: len(lines(first, d)) / max(1, of.shape[d]) for d in dims}

    def places(self, value: int, pairs: range, dim: int) -> Tensor:
        """For each of these pairs, the indices along a dimension where it has elements: (pairs,
        longest). Shorter rows are padded with other indices.
        """
        of, axis = self.of[value], self.axes.get(value)
        if axis is None or axis.dim != dim:
            return places(of, pairs, dim)
        return axis.places(pairs, of.shape[dim], of.device)

    def mixed(self, program: Program) -> frozenset[int]:
        """The values that depend on several pairs, which are computed for each pair."""
        return frozenset(step.out for step in program.steps()) - self.apart


class Spans:
    """The pairs of the elements of values, step by step."""

    def __init__(self, program: Program, count: int) -> None:
        self.count, self.maps, self.device = count, program.maps, program.seed.device
        self.of: dict[int, Span] = {program.root: Axis(0, 1, count)}

    def numbers(self, span: Span, shape: Shape) -> Tensor:
        """The pair of each element as a tensor."""
        return span.numbers(shape, self.device) if isinstance(span, Axis) else span

    def add(self, step: Step) -> bool:
        """Follow the pairs of a step's inputs, each of which has one for each element; False, and
        nothing is added, if the output mixes pairs.
        """
        axes = self._axes(step)
        span = self._merged(step) if axes is None else axes.pop() if len(axes) == 1 else None
        if span is None or span is MIXED:
            return False
        self.of[step.out] = span
        return True

    def _axes(self, step: Step) -> set[Axis] | None:
        """The axes along which the terms have their pairs: an element of an output that has several
        would be of several pairs. None if that is not known of all.
        """
        found = set[Axis]()
        for at, value in step.terms:
            span, map_ = self.of[value], self.maps[at]
            if not isinstance(span, Axis) or 0 in map_.in_shape or 0 in map_.out_shape:
                return None
            axis = map_.follow_axis(span, self.device)
            if axis is None:
                return None
            found.add(axis)
        return found

    def _merged(self, step: Step) -> Span | None:
        """The pairs of a step's output, by the numbers of all elements; None if any has several."""
        # For each element the largest pair it depends on, and the smallest, as the largest in
        # reverse numbering; 0 is none in both.
        given = [(at, self.numbers(self.of[v], self.maps[at].in_shape)) for at, v in step.terms]
        high = reduce(torch.maximum, [self.maps[at].max_source(up) for at, up in given])
        down = ((at, torch.where(up > 0, self.count + 1 - up, 0)) for at, up in given)
        low = reduce(torch.maximum, [self.maps[at].max_source(part) for at, part in down])
        if not bool(((high == 0) | (high + low == self.count + 1)).all()):
            return None
        return recognised(high, self.count) or high


class Chains:
    """Chains of merges: sums over the users of a value, one more user at each step.

    All terms of a chain are compared one by one, whatever step they were added at. So if a later
    term mixes pairs, all steps of the chain count as mixing pairs.
    """

    def __init__(self, program: Program) -> None:
        self.partial = partial_sums(program)
        self.sums: dict[int, list[int]] = {}  # the steps so far of each partial sum
        self.terms: dict[int, list[tuple[int, Span]]] = {}

    def broken(
        self, step: Step, apart: set[int], spans: Mapping[int, Span]
    ) -> list[tuple[int, Span]]:
        """If this step mixes pairs: the earlier terms of its chain, whose partial sums are removed
        from ``apart``.
        """
        first = step.terms[0].value
        if step.out not in self.partial and first not in self.sums:
            return []
        more = step.terms[1:] if first in self.sums else step.terms
        sums, terms = self.sums.pop(first, []), self.terms.pop(first, [])
        if step.out not in apart:
            apart.difference_update(sums)
            return terms
        if step.out in self.partial:  # extend the lists in place
            sums.append(step.out)
            terms += [(term.value, spans[term.value]) for term in more]
            self.sums[step.out], self.terms[step.out] = sums, terms
        return []


def places(of: Tensor, pairs: range, dim: int) -> Tensor:
    """For each of these pairs, the indices along a dimension where it has elements, given the pair
    ``of`` each element: (pairs, longest). Shorter rows are padded with other indices.
    """
    pair = of - (pairs.start + 1)
    here = (pair >= 0) & (pair < len(pairs))
    at = here.nonzero()[:, dim]
    there = torch.zeros(len(pairs), of.shape[dim], dtype=torch.int8, device=of.device)
    there[pair[here].long(), at] = 1
    longest = max(1, int(there.sum(1).max()))
    return there.argsort(dim=1, descending=True, stable=True)[:, :longest]


def lines(there: Tensor, dim: int) -> Tensor:
    """The indices along a dimension where any element is True."""
    others = [d for d in range(there.dim()) if d != dim]
    return (there.any(tuple(others)) if others else there).nonzero().reshape(-1)
