"""The mass of all paths, and of those through components: two runs over a program.

``ahead[v]`` is ``Σ |w|**p`` over the paths from an element of value v on to the leaves, found from
the leaves to the root by the transposes of maps; ``behind[v]`` is the same over the paths from the
root to it. The paths through an element have the mass ``behind · ahead``, and those through a
component are the paths through its entries (``ir.passes.entries``), each counted at its first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import floor, frexp, inf, isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradtrace.errors import NonFinite
from gradtrace.ir.interpreter import applied, is_move, reshaped, value_of
from gradtrace.ir.passes.entries import Entries, Entry, find_entries
from gradtrace.ir.passes.provenance import ComponentBits
from gradtrace.ir.program import Program, Step, Term
from gradtrace.ir.rescaling import Rescaling, Scalar, ScaledValue, SizeLimit
from gradtrace.kernels import fetch_scalars
from gradtrace.kernels.strides import without_repetition
from gradtrace.linops import (
    Identity,
    Reduce,
    Slot,
    column_sums,
    is_permutation,
    tiled,
    tiling,
    transposed,
)
from gradtrace.semirings import Semiring
from gradtrace.semirings.additive import LogAbs
from gradtrace.semirings.base import each


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


class MassPlan(NamedTuple):
    """What of a mass pass follows from the structure of a program: the entries of components and
    their values, all values that are made of these, all that lead to a leaf, and ``leaf_tails``.
    """

    entries: Entries
    entered: set[int]
    below: set[int]
    alive: set[int]
    tails: dict[int, int]


def plan_mass(program: Program, bits: ComponentBits, owned: dict[int, int]) -> MassPlan:
    """The plan for components with these bits; ``owned`` are those that leaves belong to."""
    entries = find_entries(program, bits, owned)
    entered = entries.values()
    below, alive = values_below(program, entered), leading_to_leaves(program)
    return MassPlan(entries, entered, below, alive, leaf_tails(program, entered))


class Ahead(NamedTuple):
    """``ahead`` at the values that are entered, and the column sums of maps to leaves, by index,
    where they are small.
    """

    kept: dict[int, ScaledValue]
    sums: dict[int, ScaledValue]


def run_ahead(
    program: Program, rescaling: Rescaling, keep: set[int], below: set[int], tails: dict[int, int]
) -> Ahead:
    """Run the program from the leaves up to the last values that are kept, through those that are
    made of them (``below``); the others are freed when they have been used.
    """
    semiring = rescaling.semiring
    (like,) = semiring.weigh(program.seed)
    parts = _Contributions(program, rescaling, like)
    kept: dict[int, ScaledValue] = {}
    steps = program.steps()
    shapes = {step.out: step.shape for step in steps}
    for leaf in program.leaves:
        if leaf.value not in tails:
            shape = shapes.get(leaf.value, tuple(program.seed.shape))
            parts.held[leaf.value] = ScaledValue((like.new_full(shape, semiring.one[0]),), 0)
    for step in reversed(steps):
        whole = parts.pop(step.out)
        if whole is not None:
            if step.out in keep:
                kept[step.out] = whole
        elif step.out not in tails:
            continue
        for at, value in step.terms:
            if value in below and value not in tails:
                parts.add(value, at, whole)
    whole = parts.pop(program.root)
    if whole is not None:
        kept[program.root] = whole
    return Ahead(kept, parts.sums)


@dataclass
class _Contributions:
    """What ``ahead`` of values is a sum of, collected until it is complete.

    Slots that tile a value are concatenated, so they wait in ``slots``. So do maps to leaves, in
    ``ends``: their column sums are added up before they are given the powers of the rest. ``moved``
    are the values that are another one, only moved: these need no rescaling.
    """

    program: Program
    rescaling: Rescaling
    like: Tensor
    held: dict[int, ScaledValue] = field(default_factory=dict)
    slots: dict[int, list[tuple[Slot, ScaledValue]]] = field(default_factory=dict)
    ends: dict[int, list[int]] = field(default_factory=dict)
    sums: dict[int, ScaledValue] = field(default_factory=dict)
    moved: set[int] = field(default_factory=set)

    def add(self, value: int, at: int, whole: ScaledValue | None) -> None:
        """A map that leads from the value to another whose ``ahead`` is known, or to a leaf."""
        if whole is None:
            self.ends.setdefault(value, []).append(at)
            self.moved.discard(value)
            return
        map_ = self.program.maps[at]
        if type(map_) is Identity:
            found = reshaped(whole, map_.in_shape)
        else:
            map_ = transposed(map_)
            if isinstance(map_, Slot):
                self.slots.setdefault(value, []).append((map_, whole))
                return
            found = applied(map_, whole, self.rescaling.semiring)
        before = self.held.get(value)
        if before is None:
            self.held[value] = found
            if map_.is_gather and value not in self.ends:
                self.moved.add(value)
        else:
            self.held[value] = self.rescaling.plus(before, found)
            self.moved.discard(value)

    def pop(self, value: int) -> ScaledValue | None:
        """``ahead`` of a value to which all has been added; None if there is nothing."""
        found = self.held.pop(value, None)
        slots = self.slots.pop(value, None)
        if slots:
            found = self._join(found, slots)
            self.moved.discard(value)
        if ends := self.ends.pop(value, None):
            found = self._finish(found, ends)
        if found is None or value in self.moved:
            return found
        return self.rescaling.balanced(found, alone=not self.held and not self.slots)

    def _join(
        self, found: ScaledValue | None, slots: list[tuple[Slot, ScaledValue]]
    ) -> ScaledValue:
        """The sum with what slots hold: concatenated, if they tile the value."""
        if order := tiling([slot for slot, _ in slots]):
            parts = self.rescaling.aligned([whole for _, whole in slots])
            joined = tiled([slot for slot, _ in slots], [part.value[0] for part in parts], order)
            age = max(part.age for part in parts)
            return self._plus(found, parts[0]._replace(value=(joined,), age=age))
        for slot, whole in slots:
            found = self._plus(found, applied(slot, whole, self.rescaling.semiring))
        assert found is not None
        return found

    def _finish(self, found: ScaledValue | None, ends: list[int]) -> ScaledValue:
        """The sum with the column sums of maps to leaves, which are small, or repeated."""
        semiring, maps = self.rescaling.semiring, self.program.maps
        ones, total = (self.rescaling.one((), self.like),), None
        for at in ends:
            columns = column_sums(maps[at], semiring, ones)
            if _is_small(columns[0]):
                self.sums[at] = ScaledValue(columns, 0)
            few = each(columns, without_repetition)
            total = few if total is None else semiring.plus(total, few)
        assert total is not None
        shape = maps[ends[0]].in_shape
        if found is None:
            return ScaledValue(each(total, lambda part: part.expand(shape)), 0, age=1)
        if not found.powers:
            return self.rescaling.plus(found, ScaledValue(total, 0, age=1))
        one = (self.rescaling.one(found.powers, self.like),)
        return found._replace(value=semiring.plus_times(found.value, total, one))

    def _plus(self, a: ScaledValue | None, b: ScaledValue) -> ScaledValue:
        return b if a is None else self.rescaling.plus(a, b)


def values_below(program: Program, values: set[int]) -> set[int]:
    """These values, and all that are made of them."""
    found = set(values)
    for step in program.steps():
        if any(term.value in found for term in step.terms):
            found.add(step.out)
    return found


def _is_small(x: Tensor) -> bool:
    """Whether a tensor is repeated in memory: it takes an eighth of what its elements would."""
    return x.untyped_storage().nbytes() * 8 <= x.numel() * x.itemsize


class PathMass(NamedTuple):
    """Masses of one run from the root: of all paths of each leaf, of the paths that enter each
    component, or exit it (by number of its bit), and of the paths of leaves that avoid a component.
    All are whole multiples of ``2**power``.
    """

    leaves: dict[int, int]
    entered: dict[int, int]
    avoiding: dict[tuple[int, int], int]
    power: int


class Collected(NamedTuple):
    """The parts of ``PathMass``, not yet summed."""

    leaves: dict[int, list[Scalar]]
    entered: dict[int, list[Scalar]]
    avoiding: dict[tuple[int, int], list[Scalar]]


@dataclass
class BackwardMass:
    """The run from the root to the leaves, which multiplies with ``ahead`` at entries.

    ``behind`` are the masses of all paths to a value, ``around[k]`` those that have avoided the
    component of bit k, where some have and some have not.
    """

    program: Program
    rescaling: Rescaling
    entries: Entries
    alive: set[int]
    tails: dict[int, int]
    ahead: Ahead
    behind: dict[int, ScaledValue] = field(default_factory=dict)
    around: dict[int, dict[int, ScaledValue]] = field(default_factory=dict)
    one: Tensor = field(init=False)
    leaves: dict[int, list[Scalar]] = field(default_factory=dict)
    entered: dict[int, list[Scalar]] = field(default_factory=dict)
    avoiding: dict[tuple[int, int], list[Scalar]] = field(default_factory=dict)

    @property
    def semiring(self) -> Semiring:
        """The semiring of the values."""
        return self.rescaling.semiring

    def run(self, seed: Tensor) -> Collected:
        """The masses of the paths from this seed; nothing is read."""
        program, entries = self.program, self.entries
        self.leaves, self.entered, self.avoiding = {}, {}, {}
        (root,) = self.semiring.weigh(seed)
        self.one = self.rescaling.one((), root)
        self.behind = {program.root: ScaledValue((root,), 0)}
        last, maps, n = program.last_uses, program.maps, 0
        leaves = {leaf.value for leaf in program.leaves}
        for number, block in enumerate(program.blocks):
            self._enter(entries.takes.get(number, ()))
            ended: list[int] = []  # leaves that nothing is made of
            for k, step in enumerate((*block.steps, *block.merges)):
                if k == len(block.steps):
                    self._exit(entries.exits.get(number, ()))
                    self._enter(entries.gives.get(number, ()))
                self._step(step)
                if step.out in leaves and step.out not in self.tails:
                    self._end(step.out)
                    ended += [step.out] if step.out not in last else []
                for _, value in step.terms:
                    if last[value] == n:
                        self._free(value)
                if step.out in self.behind and not is_move(step, maps):
                    alone = len(self.behind) == 1 and not any(self.around.values())
                    self.behind[step.out] = self.rescaling.balanced(self.behind[step.out], alone)
                n += 1
            if not block.merges:
                self._exit(entries.exits.get(number, ()))
                self._enter(entries.gives.get(number, ()))
            for value in ended:
                self._free(value)
        self.behind, self.around = {}, {}
        return Collected(self.leaves, self.entered, self.avoiding)

    def _step(self, step: Step) -> None:
        out = step.out
        if out in self.tails:
            self._add_to_leaf(step)
            return
        if out not in self.alive:
            return
        maps, rescaling, (at, value) = self.program.maps, self.rescaling, step.terms[0]
        if len(step.terms) == 1 and type(maps[at]) is Identity:
            self.behind[out] = reshaped(self.behind[value], step.shape)
        else:
            self.behind[out] = value_of(step, maps, self.behind, rescaling)
        needed = self.entries.needed.get(out)
        for k in bits_of(needed) if needed else ():
            terms, values = self._avoided(step, k)
            part = value_of(step._replace(terms=terms), maps, values, rescaling)
            moved = is_move(step, maps)
            self.around.setdefault(k, {})[out] = part if moved else rescaling.balanced(part)

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
        leaf = self.tails[step.out]
        channels = list(bits_of(self.entries.needed.get(leaf, 0)))
        for term in step.terms:
            if term.value in self.tails:
                continue
            weights = self._column_sums(term.map)
            self.leaves.setdefault(leaf, []).append(self._dot(self.behind[term.value], weights))
            for k in channels:
                terms, values = self._avoided(step._replace(terms=(term,)), k)
                if terms:
                    self._avoids(k, leaf).append(self._dot(values[term.value], weights))

    def _column_sums(self, at: int) -> ScaledValue | None:
        """The column sums of a map; None if all are 1."""
        map_ = self.program.maps[at]
        if isinstance(map_, Reduce) or is_permutation(map_):
            return None
        sums = self.ahead.sums.get(at)
        return sums or ScaledValue(column_sums(map_, self.semiring, (self.one,)), 0)

    def _dot(self, a: ScaledValue, b: ScaledValue | None) -> Scalar:
        """The sum of all products; of a alone if b is 1."""
        return self.rescaling.total(a) if b is None else self.rescaling.inner(a, b)

    def _end(self, leaf: int) -> None:
        """Note the mass of a leaf that is no tail."""
        self.leaves[leaf] = [self.rescaling.total(self.behind[leaf])]
        for k in bits_of(self.entries.needed.get(leaf, 0)):
            self._avoids(k, leaf).append(self.rescaling.total(self.around[k][leaf]))

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
                    mass = self._dot(held, ahead)
                    for k in bits_of(mask & entry.whole):
                        self.entered.setdefault(k, []).append(mass)
                if sliced is not None and mask & of_slices & ~entry.whole:
                    self._enter_slices(mask & of_slices & ~entry.whole, held, ahead, sliced)
            self._leave(entry)

    def _exit(self, exits: Iterable[tuple[int, int]]) -> None:
        """Count the paths that exit components here."""
        for value, mask in exits:
            if value in self.ahead.kept:
                mass = self._dot(self.behind[value], self.ahead.kept[value])
                for k in bits_of(mask):
                    self.entered.setdefault(k, []).append(mass)

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
            exponent, powers = held.exponent + ahead.exponent, held.powers + ahead.powers
            self.entered.setdefault(k, []).append(Scalar(total, exponent, powers))

    def _leave(self, entry: Entry) -> None:
        """Beyond an entry, the paths that avoid its components are those of the other slices."""
        for k in bits_of(entry.after):
            mine = self.around.setdefault(k, {})
            held = mine.get(entry.value, self.behind[entry.value])
            if entry.slices is not None and any(kind >> k & 1 for kind in entry.slices[1]):
                dim, kinds = entry.slices
                places = _places(kinds, k, held.value[0].device)
                none = self.semiring.zero[0]
                held = held._replace(value=(held.value[0].index_fill(dim, places, none),))
            mine[entry.value] = held

    def _free(self, value: int) -> None:
        self.behind.pop(value, None)
        if self.around:
            for mine in self.around.values():
                mine.pop(value, None)


class SumLayout(NamedTuple):
    """Sums of scalars that are not yet read: for each group and key the exponent of each scalar and
    the numbers of its further powers of two. ``limits``: those of the largest elements of values,
    None if no value can have left its range; ``powers``: how many powers there are.
    """

    groups: tuple[dict[Any, list[tuple[int, tuple[int, ...]]]], ...]
    powers: int
    limits: tuple[SizeLimit, ...] | None
    logarithms: bool

    @classmethod
    def of(
        cls, groups: Iterable[Mapping[Any, Sequence[Scalar]]], rescaling: Rescaling
    ) -> tuple[SumLayout, list[Tensor]]:
        """The layout, and the numbers that it is of."""
        rescaling.flush()
        scales, groups = rescaling.unread(), list(groups)
        scalars = [scalar for group in groups for some in group.values() for scalar in some]
        numbers = [scalar.value for scalar in scalars if scalar.value is not None]
        known = tuple(
            {key: [(each.exponent, each.powers) for each in some] for key, some in group.items()}
            for group in groups
        )
        limits = None if type(rescaling) is Rescaling else scales.limits
        logarithms = isinstance(rescaling.semiring, LogAbs)
        layout = cls(known, len(scales.powers), limits, logarithms)
        return layout, [*numbers, *scales.powers, *scales.sizes]

    def read(self, tensors: Sequence[Tensor]) -> tuple[list[dict[Any, int]], int] | None:
        """The sums of each key, or of what the scalars are the base-2 logarithms of: exact, as
        whole multiples of a power of two, and its exponent. None if values have left their range.
        """
        several = [some for group in self.groups for some in group.values()]
        count = sum(map(len, several))
        read = fetch_scalars(tensors)
        numbers, powers = read[:count], read[count : count + self.powers]
        sizes = read[count + self.powers :]
        if self.limits is not None and not self._in_range(numbers, powers, sizes):
            return None
        parts = [0] * count
        if self.logarithms:
            parts = [floor(x) if isfinite(x) else 0 for x in numbers]
            numbers = [2.0 ** (x - whole) for x, whole in zip(numbers, parts)]
        if not all(map(isfinite, numbers)):
            raise NonFinite(
                "the mass of paths is not finite: a derivative is NaN or infinite; "
                "trace.norms() tells where"
            )
        shifts, wholes = [frexp(power)[1] - 1 for power in powers], iter(zip(numbers, parts))
        terms = [[_whole(*next(wholes), *each, shifts) for each in some] for some in several]
        unit = min((power for some in terms for number, power in some if number), default=0)
        sums = iter([sum(n << power - unit for n, power in some if n) for some in terms])
        return [{key: next(sums) for key in group} for group in self.groups], unit

    def _in_range(
        self, numbers: Sequence[float], powers: Sequence[float], sizes: Sequence[float]
    ) -> bool:
        """Whether all are finite, and all values on the way had largest elements that allow for
        products and sums.
        """
        if not all(map(isfinite, numbers)) or not all(0 < x < inf for x in powers):
            return False
        return all(limit.holds(size) for size, limit in zip(sizes, self.limits or ()))


def path_masses(
    found: tuple[list[dict[Any, int]], int] | None,
) -> list[PathMass] | None:
    """The masses of runs, whose parts are in turn the groups of a layout that was read."""
    if found is None:
        return None
    sums, power = iter(found[0]), found[1]
    return [PathMass(*three, power) for three in zip(sums, sums, sums)]


def _whole(
    number: float, shift: int, exponent: int, numbers: tuple[int, ...], powers: Sequence[int]
) -> tuple[int, int]:
    """A scalar of which the number has been read, as ``n · 2**power`` with a whole n."""
    above, below = number.as_integer_ratio()
    power = shift + exponent + sum(powers[n] for n in numbers)
    return above, power + 1 - below.bit_length()


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
