"""Pass that finds where paths enter components, and where they may have entered them before.

A path runs from the root to a leaf here, as cotangents do. It *enters* a component at the value
that a block of the component takes, at an argument, or at a slice of a labelled value. Only the
first entry of a path counts. Whether an entry is the first is known from the structure of the
program alone where no path, or every path, has been in the component before; where only some have,
the entry is *mixed*, and the paths that have avoided the component so far are followed apart.

The paths of a component's own leaves do not count, and may weigh many times as much as those that
do: to subtract them would leave rounding. So a component with leaves of its own is counted where
paths *exit* it; where they may come back to it, or to its leaves, the paths of other leaves that
avoid it are counted instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import and_, or_
from typing import NamedTuple

from gradtrace.ir.passes.provenance import ComponentBits, analyse_provenance, propagate
from gradtrace.ir.program import Program, Step


class Entry(NamedTuple):
    """A value at which paths enter components; sets of components are bits.

    ``whole`` are entered by every element, ``slices`` (dimension, components of each slice) by the
    elements of a slice. For ``first`` no path has been there before, for ``mixed`` some have;
    ``after`` are those whose avoiding paths must be followed beyond this value.
    """

    value: int
    whole: int
    slices: tuple[int, list[int]] | None
    first: int
    mixed: int
    after: int = 0


@dataclass
class Entries:
    """The entries of a program, by block: where blocks begin, and at their arguments.

    ``must`` and ``may`` are the components that all, and any, paths from the root to a value have
    entered. ``needed`` are, by value, those whose avoiding paths are followed there. ``exits`` are,
    by block, the values at which paths exit components for good, with these; ``avoided`` are the
    components whose avoiding paths are counted instead.
    """

    must: dict[int, int]
    may: dict[int, int]
    takes: dict[int, list[Entry]] = field(default_factory=dict)
    gives: dict[int, list[Entry]] = field(default_factory=dict)
    needed: dict[int, int] = field(default_factory=dict)
    exits: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    avoided: int = 0

    def mixed(self, value: int) -> int:
        """The components that some paths to the value have entered, but not all."""
        return self.may[value] & ~self.must[value]

    def values(self) -> set[int]:
        """The values at which anything is entered."""
        every = (*self.takes.values(), *self.gives.values())
        exits = {value for exits in self.exits.values() for value, _ in exits}
        return exits | {entry.value for entries in every for entry in entries}


def bits_by_component(atoms: ComponentBits, components: Sequence[int]) -> ComponentBits:
    """Component bits with one bit for each component in place of atoms: bit k + 1 for the k-th, as
    bit 0 says that there is a path.
    """
    known: dict[int, int] = {}

    def of(bits: int) -> int:
        if bits not in known:
            known[bits] = sum(2 << k for k, mine in enumerate(components) if mine & bits)
        return known[bits]

    return ComponentBits(
        {n: of(bits) for n, bits in atoms.block.items()},
        {place: of(bits) for place, bits in atoms.position.items()},
        {n: (dim, [of(bits) for bits in kinds]) for n, (dim, kinds) in atoms.slices.items()},
    )


def find_entries(program: Program, bits: ComponentBits, owned: dict[int, int]) -> Entries:
    """The entries that are counted. ``bits`` are by component; ``owned`` are the components that
    leaves, by value, belong to.

    A component that every path of the leaves outside it passes, or none, is left out: nothing need
    be counted to know its share.
    """
    bounds = analyse_provenance(program, bits)
    found = Entries(dict(bounds.must), dict(bounds.may))
    for bound in (found.must, found.may):
        bound.update((value, mask & ~1) for value, mask in bound.items())  # bit 0: there is a path
    leaves = [leaf.value for leaf in program.leaves]
    counted = reduce(or_, (found.mixed(v) & ~owned.get(v, 0) for v in leaves), 0)
    owning = reduce(or_, (owned.get(v, 0) & found.may[v] for v in leaves), 0) & counted
    found.avoided = owning & _find_exits(program, bits, owned, owning, found)
    for number, exits in found.exits.items():
        kept = [(value, mask & ~found.avoided) for value, mask in exits]
        found.exits[number] = [(value, mask) for value, mask in kept if mask]
    _collect(program, bits, counted & ~owning, found)
    _need(program, found, {v: found.mixed(v) & found.avoided & ~owned.get(v, 0) for v in leaves})
    return found


def _find_exits(
    program: Program, bits: ComponentBits, owned: dict[int, int], owning: int, found: Entries
) -> int:
    """Note the exits from components, and return those to which paths may come back after one, or
    which have parts that are no blocks.
    """
    below = {leaf.value: owned.get(leaf.value, 0) for leaf in program.leaves}
    ends, wholes = dict(below), program.wholes()
    takers: dict[int, int] = {}
    again = reduce(or_, bits.position.values(), 0)
    for _, kinds in bits.slices.values():
        again |= reduce(or_, kinds, 0)
    for number in reversed(range(len(program.blocks))):
        block, mine = program.blocks[number], bits.block.get(number, 0) & owning
        _reach(reversed(block.merges), below)
        for value in set(block.gives.values()) if mine else ():
            whole = wholes.get(value, value)
            exited, inside = mine & ~below.get(value, 0), takers.get(whole, 0) | ends.get(whole, 0)
            if exited:
                found.exits.setdefault(number, []).append((value, exited))
            again |= mine & ~exited & ~inside
        _reach(reversed(block.steps), below)
        for value in block.takes.values():
            takers[value] = bits.block.get(number, 0)
            below[value] = below.get(value, 0) | takers[value]
    return again


def _reach(steps: Iterable[Step], below: dict[int, int]) -> None:
    for out, terms, _, _ in steps:
        mine = below.get(out, 0)
        for _, value in terms if mine else ():
            below[value] = below.get(value, 0) | mine


def _collect(program: Program, bits: ComponentBits, counted: int, found: Entries) -> None:
    """Walk as ``analyse_provenance`` does, and note what has been entered before each entry."""
    must, may = {program.root: 0}, {program.root: 0}
    for number, block in enumerate(program.blocks):
        whole, sliced = bits.block.get(number, 0), bits.slices.get(number)
        cut = counted | found.avoided  # what avoids a component must avoid its slices
        kinds = [kind & ~whole & cut for kind in sliced[1]] if sliced else []
        every, some = reduce(and_, kinds or [0]), reduce(or_, kinds, 0)
        slices = (sliced[0], kinds) if sliced and some else None
        for value in block.takes.values() if whole | some else ():
            seen = (must[value], may[value])
            entry = _entry(value, whole & counted, slices, seen)
            found.takes.setdefault(number, []).extend(entry)
            must[value] |= whole | every
            may[value] |= whole | some
        propagate(block.steps, must, may)
        for at, value in block.gives.items() if bits.position else ():
            mine = bits.position.get((number, at), 0)
            if mine:
                entry = _entry(value, mine & counted, None, (must[value], may[value]))
                found.gives.setdefault(number, []).extend(entry)
                must[value] |= mine
                may[value] |= mine
        propagate(block.merges, must, may)


def _entry(
    value: int, whole: int, slices: tuple[int, list[int]] | None, seen: tuple[int, int]
) -> list[Entry]:
    """An entry, unless every path has been in all its components before."""
    must, may = seen
    entered = whole | (reduce(or_, slices[1], 0) if slices else 0)
    first, mixed = entered & ~may, entered & may & ~must
    return [Entry(value, whole, slices, first, mixed)] if first | mixed else []


def _need(program: Program, found: Entries, counted: dict[int, int]) -> None:
    """Find the values at which avoiding paths are followed: those that a mixed entry, or a leaf for
    which they are counted, is reached from.
    """
    needed = found.needed
    needed.update((value, mask) for value, mask in counted.items() if mask)
    for number in reversed(range(len(program.blocks))):
        block = program.blocks[number]
        _need_terms(reversed(block.merges), found)
        found.gives[number] = list(_resolved(found.gives.pop(number, []), found))
        _need_terms(reversed(block.steps), found)
        found.takes[number] = list(_resolved(found.takes.pop(number, []), found))


def _need_terms(steps: Iterable[Step], found: Entries) -> None:
    for out, terms, _, _ in steps:
        wanted = found.needed.get(out, 0)
        for _, value in terms if wanted else ():
            mask = wanted & found.mixed(value)
            if mask:
                found.needed[value] = found.needed.get(value, 0) | mask


def _resolved(entries: list[Entry], found: Entries) -> Iterator[Entry]:
    """Entries with what is needed after them; ``needed`` of their values becomes that before."""
    for entry in entries:
        after = found.needed.pop(entry.value, 0) & ~entry.whole
        before = (after & ~entry.first) | entry.mixed
        if before:
            found.needed[entry.value] = before
        yield entry._replace(after=after)
