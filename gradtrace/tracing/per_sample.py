"""Assigns elements of a program to pairs, where the loss is a vector with one loss per pair."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from gradtrace.ir.passes.nested_sums import nested
from gradtrace.ir.passes.schedule import partial_sums
from gradtrace.ir.program import Program, Step
from gradtrace.linops import Map


@dataclass
class Pairs:
    """Which pair each element belongs to, found by propagating pair numbers through the maps.

    ``apart`` are the values each of whose elements depends on one loss only. ``of`` gives the pair
    of each element, from 1 on (0: none), for those of them that are leaves or inputs of a step
    that mixes pairs.
    """

    apart: set[int]
    of: dict[int, Tensor]

    @classmethod
    def follow(cls, program: Program, count: int) -> Pairs:
        """Propagate pair numbers from a vector of ``count`` losses."""
        device = program.seed.device
        # For each element the largest pair it depends on, and the smallest, as the largest in
        # reverse numbering; 0 is none in both.
        up = torch.arange(1, count + 1, dtype=torch.int32, device=device)
        spans = {program.root: (up, up.flip(0))}
        apart, of = {program.root}, {}
        chains = Chains(program)
        last, maps = program.last_uses, program.maps
        leaves = {leaf.value for leaf in program.leaves}
        n = -1
        for block in program.blocks:
            part = nested(block, maps)
            taken = {v: spans[v][0] for v in block.takes.values() if v in apart} if part else {}
            for step in (*block.steps, None, *block.merges):
                if step is None:  # a nested sum is computed as a whole
                    if part is not None and not part.gives <= apart:
                        apart.difference_update(each.out for each in block.steps)
                        of.update(taken)
                    continue
                n += 1
                if all(term.value in apart for term in step.terms):
                    high, low = (
                        reduce(
                            torch.maximum,
                            [maps[at].max_source(spans[value][k]) for at, value in step.terms],
                        )
                        for k in (0, 1)
                    )
                    if bool(((high == 0) | (high + low == count + 1)).all()):
                        apart.add(step.out)
                        spans[step.out] = (high, low)
                        if step.out in leaves:
                            of[step.out] = high
                for value, span in chains.broken(step, apart, spans):
                    of[value] = span
                if step.out not in apart:
                    of.update((t.value, spans[t.value][0]) for t in step.terms if t.value in apart)
                for term in step.terms:
                    if last[term.value] == n:
                        spans.pop(term.value, None)
        return cls(apart, of)

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
            first = self.of[value] == 1
            some = {d: lines(first, d) for d in range(first.dim())}
            fit = [d for d in some if all(m.sums_over(d) for m in maps)]
            share = {d: len(some[d]) / max(1, first.shape[d]) for d in fit}
            found[value] = min(share, key=share.__getitem__, default=None)
        return found

    def mixed(self, program: Program) -> frozenset[int]:
        """The values that depend on several pairs, which are computed for each pair."""
        return frozenset(step.out for step in program.steps()) - self.apart


class Chains:
    """Chains of merges: sums over the users of a value, one more user at each step.

    All terms of a chain are compared one by one, whatever step they were added at. So if a later
    term mixes pairs, all steps of the chain count as mixing pairs.
    """

    def __init__(self, program: Program) -> None:
        self.partial = partial_sums(program)
        self.sums: dict[int, list[int]] = {}  # the steps so far of each partial sum
        self.terms: dict[int, list[tuple[int, Tensor]]] = {}

    def broken(
        self, step: Step, apart: set[int], spans: dict[int, tuple[Tensor, Tensor]]
    ) -> list[tuple[int, Tensor]]:
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
            terms += [(term.value, spans[term.value][0]) for term in more]
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
