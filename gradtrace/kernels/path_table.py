"""A program as a table of 64-bit words, by which kernels follow paths (``cuda/paths.cu``).

Nodes, terms and layouts are given by their places in the table, tensors by their addresses.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gradtrace.errors import GradtraceError
from gradtrace.kernels.operands import Floats, Whole
from gradtrace.kernels.pointers import on_device
from gradtrace.types import Shape

MOVE, TABLE, SLOT, SCALE, SUM, NORMALISE, SCATTER = range(7)
"""Kinds of terms; the same as in ``paths.cu``."""

KINDS = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}
"""Codes of the dtypes that kernels read; the same as in ``paths.cu``."""

ARGS = 14
"""Argument words of a term; the same as in ``paths.cu``."""

MAX_WORDS = 128
"""The most words of a set of components."""

MAX_RANK = 4
"""The largest rank of a map that is diagonal plus low rank."""

NOT_WHOLE = -(1 << 40)
"""The exponent of a path that does not reach the root."""

FIRST_SLOT, FIRST_NUMBER = 1 << 62, (1 << 62) + (1 << 61)
"""From here on a word stands for a tensor or a number; sets of components have 62 bits a word."""

Reference = tuple[int, int, int]
"""An operand: its address, dtype and layout."""

NONE: Reference = (0, 0, 0)


class Dims(NamedTuple):
    """A layout: element n is at ``offset + Σ (n // step % size)·stride``; ``dims`` are (step, size,
    stride), the last dimension first.
    """

    dims: tuple[tuple[int, int, int], ...]
    offset: int = 0


class PathTerm(NamedTuple):
    """A term of a node: see ``struct Term`` in ``paths.cu``. ``node``: the number of the next."""

    kind: int
    node: int
    x: Reference = NONE
    w: Reference = NONE
    total: Reference = NONE
    shift: int = 0
    source: int = 0
    args: Sequence[int] = ()


class PathEnds(NamedTuple):
    """What is known of paths that were followed: the components of each, as words; its weight,
    ``mantissa · 2**exponent``, with ``NOT_WHOLE`` for one that does not reach the root; and the
    gradient of the element where it starts.
    """

    sets: Whole
    mantissa: Floats
    exponent: Whole
    gradient: Floats


class TensorSlot(NamedTuple):
    """A tensor that a table refers to: how it is found, given what paths are followed in, and its
    dtype, shape and strides when the table was written.
    """

    find: Callable[[Any], Tensor]
    dtype: torch.dtype
    shape: Shape
    strides: Shape


class PathTable(NamedTuple):
    """A table without the addresses of tensors, so that it serves for other tensors of the same
    layout. ``nodes``: the places of nodes, by number. ``facts``: what else must be as it was.
    ``unread``: the nodes whose gradient is not in the table.
    """

    words: Whole
    nodes: dict[int, int]
    at: Whole  # the places of addresses and numbers
    which: Whole  # and which tensor it is, or beyond these, which number
    tensors: list[TensorSlot]
    numbers: list[Callable[[Any], float]]
    facts: list[tuple[Callable[[Any], object], object]]
    unread: frozenset[int]
    width: int  # words of a set of components

    def bound(self, source: object) -> BoundTable | None:
        """The table with the tensors of ``source``; None if these lie otherwise in memory."""
        for find, wanted in self.facts:
            if find(source) != wanted:
                return None
        held = [slot.find(source) for slot in self.tensors]
        for x, (_, dtype, shape, strides) in zip(held, self.tensors):
            if x.dtype is not dtype or x.shape != shape or x.stride() != strides:
                return None
        try:
            numbers = [*map(on_device, held), *(_bits(find(source)) for find in self.numbers)]
        except GradtraceError:  # a tensor without memory of its own
            return None
        words = self.words.copy()
        words[self.at] = np.array(numbers, dtype=np.int64)[self.which]
        return BoundTable(words, held)


class BoundTable(NamedTuple):
    """The words of a table with all addresses, and the tensors that are there."""

    words: Whole
    held: list[Tensor]


@dataclass
class TableWriter:
    """Writes a ``PathTable``. Until it is finished, words from ``FIRST_SLOT`` on stand for tensors,
    and from ``FIRST_NUMBER`` on for numbers, which are filled in later.
    """

    words: list[int] = field(default_factory=lambda: [0])
    tensors: list[TensorSlot] = field(default_factory=list)
    numbers: list[Callable[[Any], float]] = field(default_factory=list)
    places: dict[object, int] = field(default_factory=dict)
    nodes: dict[int, int] = field(default_factory=dict)
    pending: list[tuple[int, int]] = field(default_factory=list)
    facts: list[tuple[Callable[[Any], object], object]] = field(default_factory=list)

    def finished(self, unread: set[int], width: int) -> PathTable:
        """The table of all nodes."""
        for at, node in self.pending:
            self.words[at] = self.nodes[node]
        words = np.array(self.words, dtype=np.int64)
        places = np.flatnonzero(words >= FIRST_SLOT)
        which = words[places]
        beyond = which >= FIRST_NUMBER
        which = np.where(beyond, which - FIRST_NUMBER + len(self.tensors), which - FIRST_SLOT)
        filled = self.tensors, self.numbers, self.facts
        return PathTable(words, self.nodes, places, which, *filled, frozenset(unread), width)

    def put(self, key: object, words: Sequence[int]) -> int:
        """The place of these words, which are written once for a key."""
        found = self.places.get(key)
        if found is None:
            found = self.places[key] = len(self.words)
            self.words += words
        return found

    def layout(self, how: Dims, always: bool = False) -> int:
        """The place of a layout; 0 if elements are at their numbers, unless ``always``."""
        dims = how.dims
        if not always and not how.offset and len(dims) == 1 and dims[0][0] == dims[0][2] == 1:
            return 0
        return self.put(how, [len(dims), how.offset, *(number for dim in dims for number in dim)])

    def tensor(self, x: Tensor, find: Callable[[Any], Tensor]) -> int:
        """A word that stands for the address of a tensor."""
        self.tensors.append(TensorSlot(find, x.dtype, tuple(x.shape), x.stride()))
        return FIRST_SLOT + len(self.tensors) - 1

    def number(self, dtype: torch.dtype, find: Callable[[Any], float]) -> Reference:
        """A weight that is one number, computed with in this dtype."""
        self.numbers.append(find)
        return 0, KINDS[dtype], FIRST_NUMBER + len(self.numbers) - 1

    def node(
        self, number: int, bits: int, slices: int, terms: Sequence[PathTerm], gradient: Reference
    ) -> None:
        """Add a node."""
        at = [self._term(term) for term in terms]
        first = len(self.words)
        self.words += at
        self.nodes[number] = len(self.words)
        self.words += (bits, slices, len(terms), first, *gradient)

    def _term(self, term: PathTerm) -> int:
        at = len(self.words)
        self.pending.append((at + 1, term.node))
        args = (*term.args, *[0] * (ARGS - len(term.args)))
        given = (*term.x, *term.w, *term.total, term.shift, term.source)
        self.words += (term.kind, 0, *given, *args)
        return at


def _bits(number: float) -> int:
    """The bits of a float64."""
    found: int = _BITS.unpack(_NUMBER.pack(number))[0]
    return found


_BITS, _NUMBER = struct.Struct("q"), struct.Struct("d")
