"""The mass of all paths, and of those through components: two runs over a program.

``ahead[v]`` is ``Σ |w|**p`` over the paths from an element of value v on to the leaves, found from
the leaves to the root by the transposes of maps; ``behind[v]`` is the same over the paths from the
root to it. The paths through an element have the mass ``behind · ahead``, and those through a
component are the paths through its entries (``ir.passes.entries``), each counted at its first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from math import floor, inf, isfinite
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from gradtrace.errors import NonFinite
from gradtrace.ir.interpreter import ScaledValue, balanced, value_of
from gradtrace.ir.passes.entries import Entries, Entry
from gradtrace.ir.program import Program, Step, Term
from gradtrace.kernels import fetch_scalars
from gradtrace.linops import column_sums, is_permutation, transposed
from gradtrace.semirings import Semiring, Value
from gradtrace.semirings.logarithmic import LogAbs


class Scalar(NamedTuple):
    """``value · 2**exponent``, on the device."""

    value: Tensor
    exponent: int


def leaf_tails(program: Program, entered: set[int]) -> dict[int, int]:
    """The values whose elements are the elements of a leaf, only moved, and nothing else is made
    of: each with the leaf's value. Their elements have ``ahead = 1``, so that only sums over them
    are needed. Values that are entered are left out.
    """
    uses: dict[int, int] = {}
    for step in program.steps():
        for term in step.terms:
            uses[term.value] = uses.get(term.value, 0) + 1
    leaves = {leaf.value for leaf in program.leaves}
    found = {v: v for v in leaves if v not in uses and v not in entered}
    for step in reversed(program.steps()):
        leaf = found.get(step.out)
        for at, value in step.terms if leaf is not None else ():
            free = uses[value] == 1 and value not in entered and value not in leaves
            if free and leaf is not None and is_permutation(program.maps[at]):
                found[value] = leaf
    found.pop(program.root, None)
    return found


def leading_to_leaves(program: Program) -> set[int]:
    """The values from which some leaf is reached."""
    found = {leaf.value for leaf in program.leaves}
    for step in reversed(program.steps()):
        if step.out in found:
            found.update(term.value for term in step.terms)
    return found


class Ahead(NamedTuple):
    """``ahead`` at the values that are entered, all values that lead to a leaf, and the column sums
    of maps to leaves, by index, where they are small.
    """

    kept: dict[int, ScaledValue]
    alive: set[int]
    sums: dict[int, Value]


def run_ahead(program: Program, semiring: Semiring, keep: set[int], tails: dict[int, int]) -> Ahead:
    """Run the program from the leaves up to the last values that are kept; the others are freed
    when they have been used.
    """
    like = semiring.weigh(program.seed)
    held: dict[int, ScaledValue] = {}
    kept: dict[int, ScaledValue] = {}
    sums: dict[int, Value] = {}
    needed = _below(program, keep)
    shapes = {step.out: step.shape for step in program.steps()}
    for leaf in program.leaves:
        if leaf.value not in tails:
            shape = shapes.get(leaf.value, tuple(program.seed.shape))
            held[leaf.value] = ScaledValue((like[0].new_full(shape, semiring.one[0]),), 0)
    for step in reversed(program.steps()):
        whole = held.pop(step.out, None)
        if whole is not None:
            whole = balanced(whole, semiring)
            if step.out in keep:
                kept[step.out] = whole
        elif step.out not in tails:
            continue
        for at, value in step.terms:
            if value in tails or value not in needed:
                continue
            map_ = program.maps[at]
            if whole is None:
                found = ScaledValue(column_sums(map_, semiring, like), 0)
                if _is_small(found.value[0]):
                    sums[at] = found.value
            else:
                found = ScaledValue(
                    transposed(map_).apply_in(whole.value, semiring), whole.exponent
                )
            held[value] = found if value not in held else _plus(held[value], found, semiring)
    if program.root in held:
        kept[program.root] = held[program.root]
    return Ahead(kept, leading_to_leaves(program), sums)


def _below(program: Program, values: set[int]) -> set[int]:
    """These values, and all that are made of them."""
    found = set(values)
    for step in program.steps():
        if any(term.value in found for term in step.terms):
            found.add(step.out)
    return found


def _is_small(x: Tensor) -> bool:
    """Whether a tensor is repeated in memory: it takes an eighth of what its elements would."""
    return x.untyped_storage().nbytes() * 8 <= x.numel() * x.itemsize


def _plus(a: ScaledValue, b: ScaledValue, semiring: Semiring) -> ScaledValue:
    if a.exponent < b.exponent:
        a, b = b, a
    shift = b.exponent - a.exponent
    smaller = semiring.scale(b.value, shift) if shift else b.value
    return ScaledValue(semiring.plus(a.value, smaller), a.exponent)


@dataclass
class PathMass:
    """Masses of one run from the root: of all paths of each leaf, of the paths that enter each
    component, or exit it (by number of its bit), and of the paths of leaves that avoid a component.
    """

    leaves: dict[int, Fraction] = field(default_factory=dict)
    entered: dict[int, Fraction] = field(default_factory=dict)
    avoiding: dict[tuple[int, int], Fraction] = field(default_factory=dict)


@dataclass
class BackwardMass:
    """The run from the root to the leaves, which multiplies with ``ahead`` at entries.

    ``behind`` are the masses of all paths to a value, ``around[k]`` those that have avoided the
    component of bit k, where some have and some have not.
    """

    program: Program
    semiring: Semiring
    entries: Entries
    tails: dict[int, int]
    ahead: Ahead
    behind: dict[int, ScaledValue] = field(default_factory=dict)
    around: dict[int, dict[int, ScaledValue]] = field(default_factory=dict)
    leaves: dict[int, list[Scalar]] = field(default_factory=dict)
    entered: dict[int, list[Scalar]] = field(default_factory=dict)
    avoiding: dict[tuple[int, int], list[Scalar]] = field(default_factory=dict)

    def run(self, seed: Tensor) -> PathMass:
        """The masses of the paths from this seed."""
        program, entries = self.program, self.entries
        self.behind = {program.root: ScaledValue(self.semiring.weigh(seed), 0)}
        last, n = program.last_uses, 0
        leaves = {leaf.value for leaf in program.leaves}
        for number, block in enumerate(program.blocks):
            self._enter(entries.takes.get(number, ()))
            for k, step in enumerate((*block.steps, *block.merges)):
                if k == len(block.steps):
                    self._exit(entries.exits.get(number, ()))
                    self._enter(entries.gives.get(number, ()))
                self._step(step)
                if step.out in leaves and step.out not in self.tails:
                    self._end(step.out)
                for term in step.terms:
                    if last[term.value] == n:
                        self._free(term.value)
                n += 1
            if not block.merges:
                self._exit(entries.exits.get(number, ()))
                self._enter(entries.gives.get(number, ()))
        return self._fetched()

    def _step(self, step: Step) -> None:
        out = step.out
        if out in self.tails:
            self._add_to_leaf(step)
            return
        if out not in self.ahead.alive:
            return
        maps, semiring = self.program.maps, self.semiring
        self.behind[out] = balanced(value_of(step, maps, self.behind, semiring), semiring)
        for k in bits_of(self.entries.needed.get(out, 0)):
            terms, values = self._avoided(step, k)
            part = value_of(step._replace(terms=terms), maps, values, semiring)
            self.around.setdefault(k, {})[out] = balanced(part, semiring)

    def _avoided(self, step: Step, k: int) -> tuple[tuple[Term, ...], dict[int, ScaledValue]]:
        """The terms of a step whose paths, or some of them, have avoided component k, and their
        values.
        """
        bit, must, may = 1 << k, self.entries.must, self.entries.may
        terms = tuple(term for term in step.terms if not must[term.value] & bit)
        mine = self.around.get(k, {})
        return terms, {v: mine[v] if may[v] & bit else self.behind[v] for _, v in terms}

    def _add_to_leaf(self, step: Step) -> None:
        """Add what comes to a tail to the mass of its leaf, by column sums."""
        leaf, like = self.tails[step.out], self.semiring.weigh(self.program.seed)
        channels = bits_of(self.entries.needed.get(leaf, 0))
        for term in step.terms:
            if term.value in self.tails:
                continue
            sums = self.ahead.sums.get(term.map)
            if sums is None:
                sums = column_sums(self.program.maps[term.map], self.semiring, like)
            weights = ScaledValue(sums, 0)
            self.leaves.setdefault(leaf, []).append(
                _dot(self.behind[term.value], weights, self.semiring)
            )
            for k in channels:
                terms, values = self._avoided(step._replace(terms=(term,)), k)
                if terms:
                    held = _dot(values[term.value], weights, self.semiring)
                    self._avoids(k, leaf).append(held)

    def _end(self, leaf: int) -> None:
        """Note the mass of a leaf that is no tail."""
        self.leaves[leaf] = [_total(self.behind[leaf], self.semiring)]
        for k in bits_of(self.entries.needed.get(leaf, 0)):
            self._avoids(k, leaf).append(_total(self.around[k][leaf], self.semiring))

    def _avoids(self, k: int, leaf: int) -> list[Scalar]:
        return self.avoiding.setdefault((k, leaf), [])

    def _enter(self, entries: Iterable[Entry]) -> None:
        """Count the paths that enter components for the first time here."""
        for entry in entries:
            value = entry.value
            if value not in self.ahead.kept:
                continue
            ahead, sliced = self.ahead.kept[value], entry.slices
            of_slices = 0
            for mask in sliced[1] if sliced else ():
                of_slices |= mask
            here = [(entry.first, self.behind[value])]
            here += [(1 << k, self.around[k][value]) for k in bits_of(entry.mixed)]
            for mask, held in here:
                if mask & entry.whole:
                    total = _dot(held, ahead, self.semiring)
                    for k in bits_of(mask & entry.whole):
                        self.entered.setdefault(k, []).append(total)
                if sliced is not None and mask & of_slices & ~entry.whole:
                    self._enter_slices(mask & of_slices & ~entry.whole, held, ahead, sliced)
            self._leave(entry)

    def _exit(self, exits: Iterable[tuple[int, int]]) -> None:
        """Count the paths that exit components here."""
        for value, mask in exits:
            if value in self.ahead.kept:
                total = _dot(self.behind[value], self.ahead.kept[value], self.semiring)
                for k in bits_of(mask):
                    self.entered.setdefault(k, []).append(total)

    def _enter_slices(
        self, mask: int, held: ScaledValue, ahead: ScaledValue, slices: tuple[int, list[int]]
    ) -> None:
        dim, kinds = slices
        (product,) = self.semiring.times(held.value, ahead.value)
        lines = product.movedim(dim, 0).reshape(len(kinds), -1)
        (by_slice,) = self.semiring.fold((lines,), 1)
        for k in bits_of(mask):
            mine = _places(kinds, k, by_slice.device)
            (total,) = self.semiring.fold((by_slice.index_select(0, mine),), 0)
            exponent = held.exponent + ahead.exponent
            self.entered.setdefault(k, []).append(Scalar(total, exponent))

    def _leave(self, entry: Entry) -> None:
        """Beyond an entry, the paths that avoid its components are those of the other slices."""
        for k in bits_of(entry.after):
            mine = self.around.setdefault(k, {})
            held = mine.get(entry.value, self.behind[entry.value])
            if entry.slices is not None and any(kind >> k & 1 for kind in entry.slices[1]):
                dim, kinds = entry.slices
                places = _places(kinds, k, held.value[0].device)
                none = self.semiring.zero[0]
                held = ScaledValue((held.value[0].index_fill(dim, places, none),), held.exponent)
            mine[entry.value] = held

    def _free(self, value: int) -> None:
        self.behind.pop(value, None)
        for mine in self.around.values():
            mine.pop(value, None)

    def _fetched(self) -> PathMass:
        logs = isinstance(self.semiring, LogAbs)
        return PathMass(
            exact_sums(self.leaves, logs),
            exact_sums(self.entered, logs),
            exact_sums(self.avoiding, logs),
        )


Key = TypeVar("Key")


def exact_sums(scalars: Mapping[Key, list[Scalar]], logs: bool = False) -> dict[Key, Fraction]:
    """The sums of scalars, or of what they are the base-2 logarithms of, as exact numbers; with one
    synchronisation.
    """
    numbers = iter(fetch_scalars([each.value for some in scalars.values() for each in some]))
    found: dict[Key, Fraction] = {}
    for key, some in scalars.items():
        total = Fraction(0)
        for scalar, number in zip(some, numbers):
            power = scalar.exponent
            if logs:
                whole = floor(number) if isfinite(number) else 0
                number, power = 2.0 ** (number - whole), power + whole
            if not isfinite(number):
                raise NonFinite(
                    "the mass of paths is not finite: a derivative is NaN or infinite; "
                    "trace.flow() tells where"
                )
            total += Fraction(number) * Fraction(2) ** power
        found[key] = total
    return found


def as_float(exact: Fraction) -> float:
    """The nearest float; infinite beyond their range."""
    try:
        return float(exact)
    except OverflowError:
        return inf


def bits_of(mask: int) -> Iterator[int]:
    """The numbers of the bits that are set, lowest first."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def _places(kinds: list[int], k: int, device: torch.device) -> Tensor:
    """The slices that belong to the component of bit k."""
    mine = [n for n, kind in enumerate(kinds) if kind >> k & 1]
    return torch.tensor(mine, dtype=torch.int64, device=device)


def _dot(a: ScaledValue, b: ScaledValue, semiring: Semiring) -> Scalar:
    return _total(ScaledValue(semiring.times(a.value, b.value), a.exponent + b.exponent), semiring)


def _total(held: ScaledValue, semiring: Semiring) -> Scalar:
    (total,) = semiring.fold((held.value[0].reshape(-1),), 0)
    return Scalar(total, held.exponent)
