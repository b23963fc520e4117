"""Along depth, and module by module."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from math import hypot, inf, isfinite, isnan, nan
from typing import NamedTuple

from torch.nn import Parameter

from gradtrace.flow.result import FACTOR, FEW, MOSTLY, REPEATS, Level, ModuleFlow
from gradtrace.flow.sizing import OperatorGraph, PassedGradient, Size, VanishedGradient, elementwise


class Change(NamedTuple):
    """From where to where the gradient falls or rises; ``uses`` of a leaf, if it is over these."""

    first: Level
    last: Level
    uses: int = 0

    @property
    def ratio(self) -> float:
        """``last / first``."""
        return self.last.norm / self.first.norm if self.first.norm else nan


@dataclass
class Measured:
    """A program with the sizes of its cotangents, and where those that are 0 became so."""

    wiring: OperatorGraph
    size: Mapping[int, Size]
    lost: dict[int, VanishedGradient]

    @cached_property
    def _peaks(self) -> list[int]:
        """For each depth the operator with the largest norm, the first of equals."""
        found: dict[int, int] = {}
        for number, depth in self.wiring.depth.items():
            best = found.setdefault(depth, number)
            if _rank(self._at(number).norm) > _rank(self._at(best).norm):
                found[depth] = number
        return [found[depth] for depth in sorted(found)]

    def _value(self, number: int) -> int:
        """The largest cotangent at an operator's output."""
        takes = self.wiring.blocks[number].takes.values()
        return max(takes, key=lambda value: _rank(self.size[value].norm))

    def _at(self, number: int) -> Size:
        return self.size[self._value(number)]

    def level(self, number: int) -> Level:
        """An operator as a level."""
        block, size = self.wiring.blocks[number], self._at(number)
        place = (self.wiring.depth[number], size.norm, block.operator, block.place.module)
        return Level(*place, size.entries, size.largest, _share(size.entries, size.nonzero))

    @cached_property
    def profile(self) -> tuple[Level, ...]:
        """A level for each depth."""
        return tuple(map(self.level, self._peaks))

    @cached_property
    def body(self) -> tuple[Level, ...]:
        """The profile without the loss function and without depths where all is dead.

        The loss function is what comes first and is in no module; if that is the greater part of
        the profile, what comes first and is a single number. It is no part of the model, and its
        mean over a batch would look like a fall.
        """
        outside = _leading(not level.module for level in self.profile)
        single = _leading(level.entries == 1 for level in self.profile)
        head = next((n for n in (outside, single) if 2 * n <= len(self.profile)), 0)
        return tuple(self.level(number) for number in self._peaks[head:] if self._lives(number))

    def _lives(self, number: int) -> bool:
        """Whether gradient comes to an operator, or would if floats were finer."""
        value = self._value(number)
        return self.size[value].nonzero > 0 or self.faint(value)

    def faint(self, value: int) -> bool:
        """Whether a value is 0 by underflow."""
        return value in self.lost and self.lost[value].faint

    @cached_property
    def along(self) -> Change | None:
        """From the top to the end; None if there is too little between."""
        if len(self.body) < FEW:
            return None
        few = FEW if len(self.body) >= 2 * FEW else 1
        tenth = max(few, len(self.body) // 10) | 1
        return Change(_median(self.body[:few]), _median(self.body[-tenth:]))

    @cached_property
    def repeated(self) -> list[Change]:
        """From the nearest uses of a leaf to the farthest, where there are many."""
        uses: dict[int, dict[int, Level]] = {}
        for edge in self.wiring.edges:
            if edge.leaf is not None and self._lives(edge.giver):
                at, of = self.level(edge.giver), uses.setdefault(edge.leaf, {})
                of[at.depth] = max(of.get(at.depth, at), at, key=lambda level: _rank(level.norm))
        sequences = ([of[depth] for depth in sorted(of)] for of in uses.values())
        return [
            Change(_median(levels[:FEW]), _median(levels[-FEW:]), len(levels))
            for levels in sequences
            if len(levels) >= REPEATS
        ]


def _leading(tests: Iterable[bool]) -> int:
    """How many are true before the first that is not."""
    return sum(1 for _ in takewhile(bool, tests))


def _rank(norm: float) -> float:
    """What is not a number counts most."""
    return inf if isnan(norm) else norm


def _share(all_: int, others: int) -> float:
    """The part of all that is none of the others."""
    return 1 - others / all_ if all_ else 0.0


def _median(levels: Sequence[Level]) -> Level:
    return sorted(levels, key=lambda level: _rank(level.norm))[len(levels) // 2]


# Module by module --------------------------------------------------------------------------------


@dataclass
class Gathered:
    """The cotangents that reach and leave the operators of one module."""

    depth: int
    calls: set[int] = field(default_factory=set)
    reached: dict[int, dict[int, None]] = field(default_factory=dict)  # call: values, in order
    handed: list[int] = field(default_factory=list)
    own: list[int] = field(default_factory=list)
    dropped: float = 0.0  # the share of entries that an operator above made 0, at most

    @property
    def values(self) -> list[int]:
        """All that reach it."""
        return [value for call in self.reached.values() for value in call]

    @property
    def out(self) -> list[int]:
        """All that leave it."""
        return self.handed + self.own


@dataclass
class Modules:
    """What a measured program says of each module."""

    flow: Measured
    names: Mapping[int, str]
    classes: Mapping[str, str]

    @cached_property
    def gathered(self) -> dict[str, Gathered]:
        """By module, nearest to the loss first."""
        wiring, found = self.flow.wiring, dict[str, Gathered]()
        for number, depth in sorted(wiring.depth.items(), key=lambda item: item[1]):
            module, call = wiring.blocks[number].place
            found.setdefault(module, Gathered(depth)).calls.add(call)
        if wiring.blocks:
            self._enter(found, 0, wiring.program.root)
        for edge in wiring.edges:
            taker = wiring.enters(edge)
            if taker is not None:
                into = self._enter(found, taker, edge.whole)
                into.dropped = max(into.dropped, self._dropped(edge))
            if taker is not None or edge.leaf in self._inputs:
                found[wiring.blocks[edge.giver].place.module].handed.append(edge.value)
        for leaf in wiring.program.leaves:
            owner = next(filter(found.__contains__, self._owners(leaf.value)), None)
            if owner is not None and leaf.value not in self._inputs:
                found[owner].own.append(leaf.value)
        return found

    def _enter(self, found: dict[str, Gathered], number: int, value: int) -> Gathered:
        module, call = self.flow.wiring.blocks[number].place
        found[module].reached.setdefault(call, {})[value] = None
        return found[module]

    def _dropped(self, edge: PassedGradient) -> float:
        """The share of entries that an elementwise operator made 0."""
        block = self.flow.wiring.blocks[edge.giver]
        if not elementwise(block):
            return 0.0
        (take,) = block.takes.values()
        return _share(self.flow.size[take].nonzero, self.flow.size[edge.value].nonzero)

    @cached_property
    def _inputs(self) -> set[int | None]:
        """Leaves that are no parameters; without a model, none is known to be an input."""
        return {
            leaf.value
            for leaf in self.flow.wiring.program.leaves
            if self.classes
            and not isinstance(leaf.tensor, Parameter)
            and "." not in self.names.get(leaf.value, "")
        }

    def _owners(self, leaf: int) -> Iterator[str]:
        """The modules that hold a leaf, innermost first."""
        name = self.names.get(leaf, "")
        while name:
            name = name.rpartition(".")[0]
            yield name

    # Rows ----------------------------------------------------------------------------------------

    @cached_property
    def rows(self) -> tuple[ModuleFlow, ...]:
        """One for each module."""
        return tuple(self._row(module, found) for module, found in self.gathered.items())

    def _row(self, module: str, found: Gathered) -> ModuleFlow:
        calls = [self._most(found.reached[call]) for call in sorted(found.reached)]
        return ModuleFlow(
            module,
            self.classes.get(module, ""),
            len(found.calls),
            found.depth,
            self._most(found.values),
            calls[0],
            calls[-1],
            self._most(found.handed) if found.handed else None,
            self._zeros(found),
            hypot(*(self.flow.size[value].norm for value in found.own)) if found.own else None,
            self._word(module, found),
        )

    def _most(self, values: Iterable[int]) -> float:
        return max((self.flow.size[value].norm for value in values), key=_rank)

    def _zeros(self, found: Gathered) -> float:
        reached = [self.flow.size[value] for value in found.values]
        return _share(sum(size.entries for size in reached), sum(size.nonzero for size in reached))

    def _word(self, module: str, found: Gathered) -> str:
        if not isfinite(self._most(found.values)):
            return "not finite"
        if self._all_zero(found.values) or self._all_zero(found.out):
            return "vanishing" if any(map(self.flow.faint, found.values + found.out)) else "dead"
        if min(found.dropped, self._zeros(found)) >= MOSTLY:
            return "mostly dead"
        return self._far(module, found)

    def _all_zero(self, values: Iterable[int]) -> bool:
        """Whether there are entries, and all are 0."""
        entries = [self.flow.size[value] for value in values if self.flow.size[value].entries]
        return bool(entries) and not any(size.nonzero for size in entries)

    def _far(self, module: str, found: Gathered) -> str:
        """Whether the gradient at a module is far below the top or above it, at its nearest call or
        after many uses.
        """
        ratios = [change.ratio for change in self.flow.repeated if change.first.module == module]
        if self.flow.along:
            top, wiring = self.flow.along.first.norm, self.flow.wiring
            start = self.flow.body[0].depth
            body = [v for v in found.values if wiring.depth[wiring.takers[v]] >= start]
            ratios += [self._most(body) / top] if body and top else []
        if any(ratio < 1 / FACTOR for ratio in ratios):
            return "vanishing"
        return "exploding" if any(ratio > FACTOR for ratio in ratios) else ""
