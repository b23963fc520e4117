"""Gradient norms along depth, and by module."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from math import hypot, inf, isfinite, isnan, nan
from typing import NamedTuple

from torch.nn import Parameter

from gradtrace.flow.result import (
    FAR_FACTOR,
    MEDIAN_DEPTHS,
    MOSTLY_DEAD_SHARE,
    SEQUENCE_MIN_DEPTHS,
    Level,
    ModuleFlow,
)
from gradtrace.flow.sizing import OperatorGraph, PassedGradient, Size, VanishedGradient, elementwise


class Change(NamedTuple):
    """A change of the gradient from one level to another; ``uses``: over this many uses of a leaf
    (0: along the profile).
    """

    first: Level
    last: Level
    uses: int = 0

    @property
    def ratio(self) -> float:
        """``last / first``."""
        return self.last.norm / self.first.norm if self.first.norm else nan


@dataclass
class Measured:
    """A program with the sizes of its cotangents, and where zero cotangents became 0."""

    wiring: OperatorGraph
    size: Mapping[int, Size]
    lost: dict[int, VanishedGradient]

    @cached_property
    def _peaks(self) -> list[int]:
        """For each depth the operator with the largest norm, the first if equal."""
        found: dict[int, int] = {}
        for number, depth in self.wiring.depth.items():
            best = found.setdefault(depth, number)
            if _rank(self._at(number).norm) > _rank(self._at(best).norm):
                found[depth] = number
        return [found[depth] for depth in sorted(found)]

    def _value(self, number: int) -> int:
        """The value of the largest cotangent at an operator's outputs."""
        takes = self.wiring.blocks[number].takes.values()
        return max(takes, key=lambda value: _rank(self.size[value].norm))

    def _at(self, number: int) -> Size:
        return self.size[self._value(number)]

    def level(self, number: int) -> Level:
        """The level of an operator."""
        block, size = self.wiring.blocks[number], self._at(number)
        place = (self.wiring.depth[number], size.norm, block.operator, block.place.module)
        return Level(*place, size.entries, size.largest, _share(size.entries, size.nonzero))

    @cached_property
    def profile(self) -> tuple[Level, ...]:
        """The levels of all depths."""
        return tuple(map(self.level, self._peaks))

    @cached_property
    def body(self) -> tuple[Level, ...]:
        """The profile without the loss function and without dead depths.

        The loss function is the leading levels outside any module; if these are more than half of
        the profile, the leading levels with one entry. It is left out because its mean over a batch
        would look like a fall of the gradient.
        """
        outside = _leading(not level.module for level in self.profile)
        single = _leading(level.entries == 1 for level in self.profile)
        head = next((n for n in (outside, single) if 2 * n <= len(self.profile)), 0)
        return tuple(self.level(number) for number in self._peaks[head:] if self._lives(number))

    def _lives(self, number: int) -> bool:
        """Whether an operator's gradient is nonzero, or is 0 only by underflow."""
        value = self._value(number)
        return self.size[value].nonzero > 0 or self.faint(value)

    def faint(self, value: int) -> bool:
        """Whether a value is 0 by underflow."""
        return value in self.lost and self.lost[value].faint

    @cached_property
    def along(self) -> Change | None:
        """The change from the top to the end of the body; None if the body is too short."""
        if len(self.body) < MEDIAN_DEPTHS:
            return None
        count = MEDIAN_DEPTHS if len(self.body) >= 2 * MEDIAN_DEPTHS else 1
        tenth = max(count, len(self.body) // 10) | 1
        return Change(_median(self.body[:count]), _median(self.body[-tenth:]))

    @cached_property
    def repeated(self) -> list[Change]:
        """For leaves used at many depths: the change from the nearest to the farthest uses."""
        uses: dict[int, dict[int, Level]] = {}
        for edge in self.wiring.edges:
            if edge.leaf is not None and self._lives(edge.giver):
                at, of = self.level(edge.giver), uses.setdefault(edge.leaf, {})
                of[at.depth] = max(of.get(at.depth, at), at, key=lambda level: _rank(level.norm))
        sequences = ([of[depth] for depth in sorted(of)] for of in uses.values())
        return [
            Change(_median(levels[:MEDIAN_DEPTHS]), _median(levels[-MEDIAN_DEPTHS:]), len(levels))
            for levels in sequences
            if len(levels) >= SEQUENCE_MIN_DEPTHS
        ]


def _leading(tests: Iterable[bool]) -> int:
    """The number of leading True values."""
    return sum(1 for _ in takewhile(bool, tests))


def _rank(norm: float) -> float:
    """A sort key that puts NaN last, as infinity."""
    return inf if isnan(norm) else norm


def _share(all_: int, others: int) -> float:
    """``1 - others / all_``; 0 if there are none."""
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
    dropped: float = 0.0  # the largest share of entries that an operator above set to 0

    @property
    def values(self) -> list[int]:
        """All cotangents that reach the module."""
        return [value for call in self.reached.values() for value in call]

    @property
    def out(self) -> list[int]:
        """All cotangents that leave the module, and its parameters' gradients."""
        return self.handed + self.own


@dataclass
class Modules:
    """The measurements of a program by module."""

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
        """The share of nonzero entries that an elementwise operator set to 0."""
        block = self.flow.wiring.blocks[edge.giver]
        if not elementwise(block, self.flow.wiring.program):
            return 0.0
        (take,) = block.takes.values()
        return _share(self.flow.size[take].nonzero, self.flow.size[edge.value].nonzero)

    @cached_property
    def _inputs(self) -> set[int | None]:
        """Leaves that are not parameters; empty without a model, as inputs are then unknown."""
        return {
            leaf.value
            for leaf in self.flow.wiring.program.leaves
            if self.classes
            and not isinstance(leaf.tensor, Parameter)
            and "." not in self.names.get(leaf.value, "")
        }

    def _owners(self, leaf: int) -> Iterator[str]:
        """The modules that contain a leaf, innermost first."""
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
        if min(found.dropped, self._zeros(found)) >= MOSTLY_DEAD_SHARE:
            return "mostly dead"
        return self._far(module, found)

    def _all_zero(self, values: Iterable[int]) -> bool:
        """Whether there are entries, and all are 0."""
        entries = [self.flow.size[value] for value in values if self.flow.size[value].entries]
        return bool(entries) and not any(size.nonzero for size in entries)

    def _far(self, module: str, found: Gathered) -> str:
        """``vanishing`` or ``exploding`` if the gradient at a module is far below or above the top,
        or changes as much over many uses of a leaf; else an empty string.
        """
        ratios = [change.ratio for change in self.flow.repeated if change.first.module == module]
        if self.flow.along:
            top, wiring = self.flow.along.first.norm, self.flow.wiring
            start = self.flow.body[0].depth
            body = [v for v in found.values if wiring.depth[wiring.takers[v]] >= start]
            ratios += [self._most(body) / top] if body and top else []
        if any(ratio < 1 / FAR_FACTOR for ratio in ratios):
            return "vanishing"
        return "exploding" if any(ratio > FAR_FACTOR for ratio in ratios) else ""
