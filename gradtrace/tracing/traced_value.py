"""What is known of a value while gradient is traced: its elements, marks, and what is put off."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from gradtrace.kernels import sync
from gradtrace.linops import Contract, Map
from gradtrace.linops.scatter import Few
from gradtrace.semirings.base import wide
from gradtrace.tracing.provenance import MANY, Palette

SINGLE = 64
"""To look at an element by itself costs as much as to look at so many together, or less."""


SOON = 1 << 22
"""On a GPU, so many elements that are 0 are looked for as soon as it is asked whether there are
any: each answer is waited for.
"""


class Part(NamedTuple):
    """A contribution that was not worked out: ``map(x)``, then moved; with the numbers of the marks
    of x, if those of the result were not worked out either.
    """

    map: Map
    x: Tensor
    moves: tuple[Map, ...] = ()
    marks: Tensor | None = None

    def value(self) -> Tensor:
        """The summed contribution."""
        return self._moved(self.map.apply(self.x))

    def loud(self) -> Tensor | None:
        """Which elements may get anything but 0; None if all of them may."""
        found = self.map.loud(self.x)
        if found is None or not self.moves:
            return found
        return self._moved(found.int()) != 0

    def reached(self, at: Tensor) -> Tensor:
        """Which of these elements get anything but 0 from some element."""
        if SINGLE * len(at) > self.map.outputs:
            _, found = self.map.carry(self.x, torch.ones_like(self.x, dtype=torch.int32))
            return self._moved(found).reshape(-1)[at] != 0
        there = torch.ones_like(at, dtype=torch.bool)
        for move in reversed(self.moves):
            source = move.rows(at).source[:, 0]
            there, at = there & (source >= 0), source.clamp(min=0)
        return there & (self.map.best(self.x, at).value != 0)

    def numbers(self) -> Tensor:
        """Those of the marks of the result."""
        assert self.marks is not None
        return self._moved(self.map.carry(self.x, self.marks)[1])

    def pieces(self, gradient: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]] | None:
        """So many elements of the result at a time, as the gradient lies in memory: the numbers of
        their marks, and their gradients. None where all marks would be counted in another order.
        """
        if not isinstance(self.map, Contract):
            return None
        result = torch.empty(self.map.out_shape, device="meta")
        moved = self._moved(result)
        if moved is not result and moved._base is not result:
            return None
        if not gradient.is_contiguous() and moved.stride() != gradient.stride():
            return None
        steps = result.stride()
        if sorted(moved.stride()) != sorted(steps) or len({*steps}) < len(steps):
            return None  # not only turned
        along = sorted(range(gradient.dim()), key=gradient.stride, reverse=True)
        order = [steps.index(moved.stride(d)) for d in along]
        return self._pieces(gradient.permute(along).reshape(-1), order, size)

    def _pieces(self, line: Tensor, order: list[int], size: int) -> Iterator[tuple[Tensor, Tensor]]:
        assert isinstance(self.map, Contract) and self.marks is not None
        for first in range(0, len(line), size):
            last = min(first + size, len(line))
            yield self.map.carry_some(self.x, self.marks, order, first, last), line[first:last]

    def _moved(self, x: Tensor) -> Tensor:
        for move in self.moves:
            x = move.apply(x)
        return x


class State(NamedTuple):
    """What is known of a value's elements: value, power of two, numbers of marks, palette.

    ``numbers`` is None for a *plain* value: those of its elements that are not 0 have a path, all
    with the same mark. ``parts`` say what made the value if that is put off (``value`` is None), or
    if nobody has looked yet whether an element that is 0 has a path all the same, because its
    contributions cancel; of several parts, one that is not 0 itself counts.

    ``few``, if there are any, are the elements that have something to say, each with its mark; the
    others have a path, with the first mark, where ``value`` is not 0, or none if that is put off.

    A part with marks is the only one, and says what the numbers will be: those of a leaf may be
    *late*, worked out when they are counted: a piece at a time if it is large, and together with
    others if it is small.

    Of ``loose`` numbers, those of elements that are 0 do not count. Nobody chooses such an element
    anyway, so most are never cleared away.
    """

    value: Tensor | None
    exponent: int
    numbers: Tensor | None
    palette: Palette
    parts: tuple[Part, ...] = ()
    size: Tensor | None = None  # of the largest term so far, where a sum goes on
    few: Few | None = None
    loose: bool = False

    @property
    def mark(self) -> int | None:
        """The one mark of a plain value."""
        plain = self.numbers is None and self.few is None and not self.late
        return self.palette.rows[0] | self.palette.extra if plain else None

    @property
    def late(self) -> bool:
        """Whether numbers have not been worked out."""
        return bool(self.parts) and self.parts[0].marks is not None

    def marked(self, bits: int) -> State:
        """More bits in every mark."""
        if not bits & ~self.palette.extra:
            return self
        value, exponent, numbers, palette, *rest = self  # _replace takes longer
        return _tuple(State, (value, exponent, numbers, palette.mark(bits), *rest))

    def at(self, index: tuple[int, ...]) -> int:
        """The mark of one element; 0 if it has no path."""
        state = solid(self).written()
        assert state.numbers is not None
        return self.palette.marks()[int(state.numbers[index])]

    def written(self) -> State:
        """With a number for each element, none of them loose."""
        if self.numbers is not None and not self.loose:
            return self
        assert self.value is not None
        if self.numbers is not None:
            return self._replace(numbers=where(self.value, self.numbers), loose=False)
        numbers = torch.empty(self.value.shape, dtype=torch.int32, device=self.value.device)
        torch.ne(self.value, 0, out=numbers)
        if self.few is not None:
            numbers.view(-1)[self.few.at] = self.few.marks
        return self._replace(numbers=numbers, few=None)


_tuple = tuple.__new__


def made(
    value: Tensor | None,
    numbers: Tensor | None,
    palette: Palette,
    parts: tuple[Part, ...] = (),
    loose: bool = False,
) -> State:
    """A state without a power of two. There is one for every step, so the tuple is made as tuples
    are, which takes a third of the time.
    """
    return _tuple(State, (value, 0, numbers, palette, parts, None, None, loose))


class Scope(NamedTuple):
    """What a step may know: gradients that were kept, values that only leaves are made of, those
    that are leaves, and whether there is memory for leaves that are counted together.
    """

    known: Mapping[int, Tensor]
    tails: frozenset[int] | set[int]
    ends: frozenset[int] = frozenset()
    ample: bool = False


def solid(state: State) -> State:
    """The state with its value, and with all paths of elements that are 0."""
    if not state.parts:
        return state
    value = state.value
    if state.few is not None:
        value = state.parts[0].value() if value is None else value
        there = torch.zeros(value.shape, dtype=torch.int32, device=value.device)
        there.view(-1)[state.few.at] = state.few.marks
        return state._replace(value=value, numbers=there, parts=(), few=None)
    if value is None:
        value = state.parts[0].value()
        for part in state.parts[1:]:
            value = value + part.value()
    if state.late:
        return state._replace(value=value, numbers=state.parts[0].numbers(), parts=())
    if state.numbers is not None:
        return state._replace(value=value, parts=())
    missed = cancelled(state.parts, value)
    numbers = None if missed is None else ((value != 0) | missed).int()
    return state._replace(value=value, numbers=numbers, parts=())


def cancelled(parts: tuple[Part, ...], value: Tensor) -> Tensor | None:
    """Which elements of a sum are 0 though something came to them; None if there is none."""
    waits = sync.avoid(value)
    if not (waits and value.numel() <= SOON) and bool(value.all()):
        return None
    if not waits and not any(bool(part.x.any()) for part in parts):
        return None  # nothing came at all
    zero, loud = value == 0, _loud(parts)
    if loud is not None:
        zero &= loud.reshape(zero.shape)
    at = zero.reshape(-1).nonzero().reshape(-1)
    if not len(at):
        return None
    if len(parts) == 1:
        reached = parts[0].reached(at)
    else:
        reached = torch.zeros(len(at), dtype=torch.bool, device=at.device)
        for part in parts:
            reached |= part.value().reshape(-1)[at] != 0
    if not bool(reached.any()):
        return None
    found = torch.zeros(value.numel(), dtype=torch.bool, device=value.device)
    found[at] = reached
    return found.reshape(value.shape)


def _loud(parts: tuple[Part, ...]) -> Tensor | None:
    """Which elements may get anything but 0 from one of the parts; None if all of them may."""
    found = parts[0].loud()
    for part in parts[1:]:
        here = None if found is None else part.loud()
        found = None if found is None or here is None else found | here
    return found


def shared(states: list[State]) -> bool:
    """Whether all have one and the same tensor of numbers, and of a short palette; values of one
    dtype.
    """
    first = states[0]
    numbers, palette, value = first.numbers, first.palette, first.value
    if numbers is None or value is None:
        return False
    dtype = value.dtype
    for state in states:
        if state.numbers is not numbers or state.size is not None:
            return False
        if state.palette.rows is not palette.rows or state.palette.extra != palette.extra:
            return False
        if state.value is None or state.value.dtype is not dtype:
            return False
    return len(palette.rows) <= MANY  # last, as a GPU may not have told yet


def alike(states: list[State], told: int = 0) -> bool:
    """Whether all are plain, with one and the same mark; the first ``told`` of them are, if the
    first is plain.
    """
    mark = states[0].mark
    return mark is not None and all(state.mark == mark for state in states[max(1, told) :])


def where(value: Tensor, numbers: Tensor) -> Tensor:
    """The numbers of marks, 0 where the value is 0."""
    if not sync.avoid(value) and bool(value.all()):  # a look is cheaper than a copy
        return numbers
    return numbers * (value != 0)


def sizes(x: Tensor) -> Tensor:
    """|x| in a memory of its own, row by row."""
    x = wide(x)
    if x.is_contiguous():
        return x.abs()
    return torch.abs(x, out=torch.empty(x.shape, dtype=x.dtype, device=x.device))


def own(x: Tensor) -> Tensor:
    """A copy that may be written to."""
    return x.clone(memory_format=torch.contiguous_format)
