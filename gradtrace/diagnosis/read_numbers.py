"""Numbers that were read from tensors into Python, and come back as arguments."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable

COMMON = frozenset((0.0, 1.0, -1.0, 0.5, 2.0))
"""Numbers that are equal to one that was read by chance."""

KEPT = 32
"""So many numbers are kept of each line that reads them."""

DIGITS, TOLERANCE = 3, 1e-12
"""A coefficient that somebody wrote has at most so many digits, up to rounding."""


class ReadNumbers:
    """Recognises numbers that were read: themselves, the sum of the last ones that a line has
    read, and such times or divided by a coefficient of up to three digits.

    >>> read = ReadNumbers()
    >>> read.add(0.7312994, 1, "a")
    >>> read.add(1.2239871, 2, "a")
    >>> read.values(0.7312994), read.values(0.01 * 1.2239871), read.values(0.3)
    ([1], [2], [])
    >>> read.values((0.7312994 + 1.2239871) / 2)
    [2, 1]
    """

    def __init__(self) -> None:
        self._same: dict[float, int] = {}
        self._lines: dict[str, deque[tuple[float, int]]] = defaultdict(lambda: deque(maxlen=KEPT))

    def __bool__(self) -> bool:
        return bool(self._same)

    def add(self, number: float, value: int, line: str) -> None:
        """Note that a number was read from a value."""
        if number not in COMMON:
            self._same[number] = value
            self._lines[line].append((number, value))

    def values(self, number: float) -> list[int]:
        """The values that a number was made of, as far as that is certain."""
        if number in self._same:
            return [self._same[number]]
        if not _finite(number) or _is_short(number):  # which somebody may have written as it is
            return []
        for read in self._lines.values():
            if found := _summands(number, reversed(read)):
                return found
        return []


def _summands(number: float, read: Iterable[tuple[float, int]]) -> list[int]:
    total, found = 0.0, list[int]()
    for each, value in read:
        total += each
        found.append(value)
        if _finite(total) and not _is_short(total):
            factor = number / total
            if _is_short(factor) or (factor and _is_short(1 / factor)):
                return found
    return []


def _finite(number: float) -> bool:
    """Whether a number is neither 0 nor infinite nor NaN."""
    return number != 0 and number - number == 0


def _is_short(number: float) -> bool:
    """Whether a number can be written with few digits."""
    return abs(float(f"{number:.{DIGITS}g}") - number) <= TOLERANCE * abs(number)
