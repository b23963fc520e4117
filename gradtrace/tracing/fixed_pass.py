"""Sizes and decisions of a pass that is made again without Python, so that none may follow from
elements of tensors.

Provenance tables get a fixed capacity, and where a pass would look at elements it assumes the usual
answer. What was assumed, and which entries of each table are used, is read after the pass: if a
table was too small, or an assumption wrong, its results are not used.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from gradtrace.kernels import Backend
from gradtrace.kernels.capture import NotCapturable

SPARE_ENTRIES = 64
"""A table has room for half as many entries more than one loss needed, and up to so many."""


class Sets(Protocol):
    """Provenance sets that follow from what is read after a pass."""

    def forget(self) -> None:
        """Make them anew at the next access."""


class FixedPass:
    """The fixed sizes of a pass. The first time they are found, by a look at the elements; then
    the same pass may be made any number of times.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.capacities: list[int] = []
        self.found = False  # whether the capacities are
        self._tables: list[tuple[Tensor, int]] = []  # which entries are used; how many there are
        self._wrong: list[tuple[Tensor, str]] = []
        self._sets: list[Sets] = []
        self._told: list[Tensor] = []
        self._line: Tensor | None = None
        self._read: list[Tensor] = []
        self.numbers: list[Tensor] = []  # what was told, read

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Begin anew; what runs inside, on this thread, has these sizes."""
        self._tables, self._wrong, self._sets = [], [], []
        _CURRENT.fixed = self
        try:
            yield
            self._line = self._joined()
        finally:
            _CURRENT.fixed = None

    def table(self, there: Tensor, table: Tensor, count: int) -> tuple[Tensor, int, int]:
        """A table that renumbers ``count`` ids from 0 on, made to fit; how many sets it has then,
        and its number, for ``used``.
        """
        number = len(self._tables)
        if not self.found:
            most = int(table.max())
            wanted = (3 * most // 2 // SPARE_ENTRIES + 1) * SPARE_ENTRIES
            self.capacities.append(min(count - 1, wanted))
        elif number >= len(self.capacities):
            raise NotCapturable("it is another pass than the first time")
        capacity = self.capacities[number]
        self._tables.append((there, count))
        if capacity < count - 1:
            table = torch.where(table <= capacity, table, 0)
        return table, capacity, number

    def assume_not(self, holds: Tensor, why: str) -> None:
        """Assume that this is not true, which will be looked at after the pass."""
        self._wrong.append((holds, why))

    def register(self, sets: Sets) -> None:
        """Provenance sets that follow from what is read after the pass."""
        self._sets.append(sets)

    def tell(self, numbers: Sequence[Tensor]) -> None:
        """Read these, too: tensors of 8 bytes an element."""
        self._told = [*numbers]

    def used(self, number: int) -> Tensor:
        """Which ids of a table were used in the last pass."""
        return self._read[number]

    def _joined(self) -> Tensor:
        """All that is to be read, as one tensor of bytes; words of 8 bytes first."""
        wrong = [holds.reshape(1) for holds, _ in self._wrong]
        tables = [there.reshape(-1) for there, _ in self._tables]
        every = [*self._told, *tables, *wrong]
        every += [torch.zeros(1, dtype=torch.bool, device=self.backend.device)]
        return torch.cat([x.view(torch.uint8) for x in every])

    def read(self, fetch: Callable[[Tensor], Tensor]) -> str:
        """Read what the last pass has told and assumed: why it was wrong, empty if it was not."""
        assert self._line is not None
        kinds = [(x.dtype, x.nbytes) for x in [*self._told, *(there for there, _ in self._tables)]]
        sizes = [size for _, size in kinds]
        whole = fetch(self._line)
        *parts, rest = torch.split(whole, [*sizes, len(whole) - sum(sizes)])
        for (_, why), holds in zip(self._wrong, rest.tolist()):
            if holds:
                return why
        read = [part.view(dtype) for part, (dtype, _) in zip(parts, kinds)]
        self.numbers = read[: len(self._told)]
        tables = zip(read[len(self._told) :], self._tables)
        self._read = [self.backend.flags(part, count) for part, (_, count) in tables]
        for here, capacity in zip(self._read, self.capacities):
            many = int(here[1:].sum())
            if many > capacity:
                return f"{many:,} sets of components, more than {capacity:,}"
        for sets in self._sets:
            sets.forget()
        return ""


class _Current(threading.local):
    fixed: FixedPass | None = None


_CURRENT = _Current()


def current() -> FixedPass | None:
    """The fixed sizes of the pass that runs on this thread, if it has any."""
    return _CURRENT.fixed


def refuse(what: str) -> None:
    """Raise ``NotCapturable`` in a pass of fixed sizes."""
    if _CURRENT.fixed is not None:
        raise NotCapturable(what)
