"""Operators and edges as rows: how much gradient each operator passed to each of its arguments."""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

import numpy as np

from gradtrace.report.model import Edges, Ints, Operators
from gradtrace.report.source import Source

LEAF = "AccumulateGrad"
"""Autograd's name of a leaf's node."""

VIEWS = re.compile(
    "(Alias|AsStrided|Clone|ConjPhysical|Contiguous|Diagonal|Expand|Flatten|Lift|LiftFresh|"
    "Movedim|Narrow|Permute|Reshape|ReshapeAlias|Select|Slice|Split|SplitWithSizes|Squeeze|"
    "SwapAxes|SwapDims|T|ToCopy|Transpose|Unbind|Unflatten|Unfold|UnsafeSplit|"
    "UnsafeSplitWithSizes|UnsafeView|Unsqueeze|View|ViewAsComplex|ViewAsReal|ReshapeCopy|"
    "ViewCopy|ExpandCopy|PermuteCopy|TransposeCopy|SelectCopy|SliceCopy)(Copy)?Backward\\d*(_copy)?"
)
"""Operators that only rearrange elements. Embedding lookups and concatenations do so too, but a
reader of the report wants to see these: they are where data enters and where it is joined."""

K = TypeVar("K", bound=Hashable)


class Numbered(Generic[K]):
    """Numbers distinct values in the order of their first use."""

    def __init__(self) -> None:
        self.known: dict[K, int] = {}

    def __call__(self, value: K) -> int:
        """The number of a value."""
        return self.known.setdefault(value, len(self.known))

    def all(self) -> tuple[K, ...]:
        """All values, in the order of their numbers."""
        return tuple(self.known)


@dataclass
class ProgramRows:
    """The rows of a program: its operators, then its leaves."""

    source: Source
    words: Numbered[str]
    shapes: Numbered[tuple[int, ...]]
    modules: dict[str, int]

    @cached_property
    def leaf(self) -> dict[int, int]:
        """The row of each leaf's value."""
        first = len(self.source.blocks)
        return {leaf.value: first + n for n, leaf in enumerate(self.source.leaves)}

    @cached_property
    def of(self) -> dict[int, int]:
        """The row of each value that is a leaf's, or the cotangent of an operator's output."""
        takes = ((v, n) for n, b in enumerate(self.source.blocks) for v in b.takes.values())
        return {**dict(takes), **self.leaf}

    def operators(self) -> Operators:
        """A row for each operator and leaf."""
        blocks, size, shapes = self.source.blocks, self.source.size, self.source.shapes
        rows: list[tuple[int, ...]] = []
        for block in blocks:
            place = self.modules[block.place.module], block.place.call
            first = shapes[block.takes[min(block.takes)]]
            is_view = VIEWS.fullmatch(block.operator) is not None
            rows.append((self.words(block.operator), *place, self.shapes(first), -1, is_view))
        word = self.words(LEAF)
        for n, leaf in enumerate(self.source.leaves):
            home = self.home(self.source.names[leaf.value])
            rows.append((word, home, 0, self.shapes(tuple(leaf.tensor.shape)), n, 0))
        masses = [sum(size[value].mass for value in block.takes.values()) for block in blocks]
        masses += [size[leaf.value].mass for leaf in self.source.leaves]
        name, module, call, shape, leaf_, view = columns(rows, 6)
        mass = np.array(masses, dtype=np.float64)
        return Operators(name, module, call, shape, leaf_, view.astype(np.uint8), mass)

    def home(self, leaf: str) -> int:
        """The number of the module that contains a leaf, by its name; 0 if none does."""
        return next((self.modules[name] for name in above(leaf) if name in self.modules), 0)

    def edges(self) -> Edges:
        """A row for each cotangent that an operator passes to an argument."""
        wholes, rows = self.source.program.wholes(), []
        masses = []
        for n, block in enumerate(self.source.blocks):
            for place, value in sorted(block.gives.items()):
                maker = self.of.get(wholes.get(value, value))
                if maker is not None:
                    rows.append((n, maker, place))
                    masses.append(self.source.size[value].mass)
        consumer, producer, position = columns(rows, 3)
        mass = np.array(masses, dtype=np.float64)
        total = np.bincount(producer, mass, len(self.source.blocks) + len(self.source.leaves))
        with np.errstate(all="ignore"):
            share = np.where(mass == 0, 0.0, mass / total[producer])
        return Edges(consumer, producer, position, mass, share.astype(np.float32))


def columns(rows: Sequence[Sequence[int]], many: int) -> list[Ints]:
    """Transpose rows of integers into ``many`` columns."""
    return list(np.array(rows, dtype=np.int32).reshape(-1, many).T.copy())


def above(name: str) -> list[str]:
    """The names of the modules that contain something of this name, innermost first.

    >>> above("a.b.weight")
    ['a.b', 'a', '']
    """
    found = []
    while name:
        name = name.rpartition(".")[0]
        found.append(name)
    return found
