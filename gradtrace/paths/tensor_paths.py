"""Tracing at operator granularity: one path per leaf, through whole tensors.

The gradient of a tensor is the sum of its users' contributions. The path follows the contribution
with the largest ``Σ |element|``; in an operator with several outputs, the output whose cotangent
contributes the most. By ``greedy`` and ``edge`` the tensors are the gradients; by ``viterbi`` a
tensor is only what came along the path chosen so far. An edge joins one output of an operator with
one of its arguments, so ``edge`` compares users by what a single output contributes, ``greedy`` by
all of their outputs together.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from gradtrace.ir.program import Block, MapTable, Program, Step
from gradtrace.semirings.base import wide


class TensorEdge(NamedTuple):
    """The largest contribution to a value: its block, argument, and the block's cotangent (take).

    ``size`` is that block's contribution (``edge``: of that cotangent alone), ``total`` that of all
    blocks (of all their cotangents), both as ``Σ |element|``.
    """

    block: int
    position: int
    take: int
    size: float
    total: float


class Chain(NamedTuple):
    """The edges from a leaf's value to the root, and which of the leaf's elements are not 0."""

    links: list[TensorEdge]
    reached: Tensor


class TensorPaths:
    """One pass over a program; ``chain`` gives the path of a leaf."""

    def __init__(self, program: Program, rule: str, seed: Tensor) -> None:
        self.program = program
        self.viterbi, self.edge = rule == "viterbi", rule == "edge"
        self.links: dict[int, TensorEdge] = {}
        self.reached: dict[int, Tensor] = {}
        with torch.no_grad():
            self._run(seed)

    def chain(self, value: int) -> Chain:
        """The path from a leaf's value to the root; no links if it does not reach the root."""
        found, at = [], value
        while at in self.links:
            found.append(self.links[at])
            at = found[-1].take
        whole = at == self.program.root
        return Chain(found if whole else [], self.reached[value])

    def _run(self, seed: Tensor) -> None:
        values = {self.program.root: seed}
        last = {value: n for n, block in enumerate(self.program.blocks) for value in _uses(block)}
        leaves = {leaf.value for leaf in self.program.leaves}
        for number, block in enumerate(self.program.blocks):
            self._give(number, block, values)
            for step in block.merges:
                self._merge(step, values)
            for value in [v for v in values if last.get(v, number) <= number]:
                if value in leaves:
                    self.reached[value] = values[value] != 0
                elif value in last:
                    del values[value]
        for value in leaves - self.reached.keys():
            self.reached[value] = values[value] != 0

    def _give(self, number: int, block: Block, values: dict[int, Tensor]) -> None:
        """Compute a block's contributions to its arguments, and the output that gives the most."""
        takes = list(dict.fromkeys(block.takes.values()))
        alone = [run_block(block, self.program.maps, {take: values[take]}) for take in takes]
        for position, value in block.gives.items():
            parts = {t: found[value] for t, found in zip(takes, alone) if value in found}
            sizes = {take: _size(part) for take, part in parts.items()}
            best = max(sizes, key=lambda take: sizes[take])
            handed = parts[best] if self.viterbi else _sum(list(parts.values()))
            values[value] = handed
            size = sizes[best] if len(parts) == 1 or self.edge else _size(handed)
            if sizes[best] != 0:
                total = sum(sizes.values()) if self.edge else size
                self.links[value] = TensorEdge(number, position, best, size, total)

    def _merge(self, step: Step, values: dict[int, Tensor]) -> None:
        """Add the contributions of two users; follow the larger, the first if equal."""
        first, second = (term.value for term in step.terms)
        a, b = self.links.get(first), self.links.get(second)
        later = a is None or (b is not None and b.size > a.size)
        chosen = b if later else a
        if self.viterbi:
            values[step.out] = values[second if later else first]
        else:
            values[step.out] = values[first] + values[second]
        if chosen is not None:
            total = sum(link.total for link in (a, b) if link is not None)
            self.links[step.out] = chosen._replace(total=total)


def _size(x: Tensor) -> float:
    return float(wide(x).abs().sum(dtype=torch.float64)) if x.numel() else 0.0


def _uses(block: Block) -> Iterator[int]:
    yield from block.takes.values()
    for step in block.merges:
        for term in step.terms:
            yield term.value


def run_block(block: Block, maps: MapTable, values: dict[int, Tensor]) -> dict[int, Tensor]:
    """A block's gradients from some of its cotangents; values these do not reach are left out."""
    found = dict(values)
    for step in block.steps:
        parts = [maps[at].apply(found[value]) for at, value in step.terms if value in found]
        if parts:
            found[step.out] = _sum(parts).to(step.dtype)
    return found


def _sum(parts: list[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
