"""``Coverage``: what part of its element's gradient a path carries, over a sample of elements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import copysign, floor, isfinite, nan
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gradtrace.io import schemas
from gradtrace.io.table import Summarised, TextColumn, TextTable, known
from gradtrace.io.validation import check_read
from gradtrace.tracing.followed import (
    MAX_LOSSES,
    FollowedPaths,
    drawn_sample,
    follow_paths,
)
from gradtrace.tracing.traced_program import TracedProgram

LOW_MEDIAN = 0.25
"""If the median path carries less of its element's gradient, coverage is low."""

MANY = 0.25
"""Coverage is low too if this share of paths has the sign opposite to the gradient, or belongs to
elements whose gradient cancels to 0, or weighs more than ``HEAVY`` times the gradient.
"""

HEAVY = 2.0
"""A path that weighs more than this many times its element's gradient is mostly cancelled by other
paths.
"""

INSTEAD = (
    "Coverage is low: single paths explain little of the gradient. trace.decompose() divides the "
    "gradient itself, trace.mass() counts all paths, trace.agreement() compares the rules"
)

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, repr=False)
class Coverage(Summarised):
    """What part of its element's gradient a path carries: signed ``path.weight / path.gradient``.

    ``parts`` has it for each element, in ascending order. It is 1 for an element with a single
    path; it is negative if the path has the opposite sign, and above 1 if other paths cancel some
    of it. Left out are ``cancellations``, the number of elements whose gradient cancels to 0 (below
    the rounding of the path's own weight), ``nonfinite``, whose weight or gradient is infinite or
    not a number, and ``unreached``, that have no path. ``sampled``: these are not all elements.
    """

    parts: tuple[float, ...]
    cancellations: int = 0
    nonfinite: int = 0
    unreached: int = 0
    sampled: bool = True

    @property
    def elements(self) -> int:
        """The number of elements that have a path."""
        return len(self.parts) + self.cancellations + self.nonfinite

    @property
    def median(self) -> float:
        """The median of ``parts``; nan if there are none."""
        return self._quantile(0.5)

    @property
    def quartiles(self) -> tuple[float, float]:
        """The lower and the upper quartile of ``parts``, interpolated linearly between elements."""
        return self._quantile(0.25), self._quantile(0.75)

    @property
    def opposite(self) -> float:
        """The share of elements whose path has the sign opposite to their gradient."""
        return self._share(sum(part < 0 for part in self.parts))

    @property
    def cancelled(self) -> float:
        """The share of elements whose gradient cancels to 0."""
        return self._share(self.cancellations)

    @property
    def heavy(self) -> float:
        """The share of elements whose path weighs more than twice their gradient."""
        return self._share(sum(abs(part) > HEAVY for part in self.parts))

    @property
    def is_low(self) -> bool:
        """Whether single paths explain little: the median is below 25%, or over 25% of paths have
        the opposite sign, or weigh more than twice the gradient, or their gradient cancels to 0.
        """
        many = max(self.opposite, self.cancelled, self.heavy)
        return self.elements > 0 and (self.median < LOW_MEDIAN or many > MANY)

    def _quantile(self, q: float) -> float:
        return float(np.quantile(self.parts, q)) if self.parts else nan

    def _share(self, number: int) -> float:
        return number / self.elements if self.elements else nan

    def __add__(self, other: Coverage) -> Coverage:
        """The coverage of the elements of both."""
        return Coverage(
            tuple(sorted((*self.parts, *other.parts))),
            self.cancellations + other.cancellations,
            self.nonfinite + other.nonfinite,
            self.unreached + other.unreached,
            self.sampled or other.sampled,
        )

    # Display -------------------------------------------------------------------------------------

    def in_words(self) -> str:
        """One line.

        >>> print(Coverage((-0.2, 0.1, 0.2, 0.3, 0.8)).in_words())  # doctest: +NORMALIZE_WHITESPACE
        A path carries 20% of its element's gradient (median; quartiles 10% and 30%); 20% have the
        opposite sign, of 5 sampled elements
        """
        many = f"{self.elements:,} {'sampled ' if self.sampled else ''}elements"
        if not self.elements:
            return "No element has a path"
        if len(self.parts) == self.elements == 1:
            return f"The path carries {percent(self.median)} of its element's gradient"
        found = []
        if self.parts and all(abs(part - 1) < 0.01 for part in self.parts):
            found.append("A path carries the whole gradient of its element")
        elif self.parts:
            low, high = map(percent, self.quartiles)
            middle = percent(self.median)
            found.append(
                f"A path carries {middle} of its element's gradient (median; quartiles {low} and "
                f"{high})"
            )
            if self.opposite:
                found.append(f"{percent(self.opposite)} have the opposite sign")
        if self.cancellations:
            found.append(f"{percent(self.cancelled)} have a path whose gradient cancels to 0")
        if self.nonfinite:
            found.append(f"{self.nonfinite:,} are not finite")
        return f"{'; '.join(found)}, of {many}"

    def lines(self) -> tuple[str, ...]:
        """``in_words``, and a warning if coverage is low."""
        return (self.in_words(), INSTEAD) if self.is_low else (self.in_words(),)

    def table(self) -> TextTable:
        """The figures as a table of one row."""
        shares = ("median", "lower quartile", "upper quartile", "opposite", "heavy", "cancelled")
        columns = (
            *(TextColumn(name, "share") for name in shares),
            TextColumn("nonfinite", "count"),
            TextColumn("elements", "count"),
            TextColumn("unreached", "count"),
        )
        row = (self.median, *self.quartiles, self.opposite, self.heavy, self.cancelled)
        counts = self.nonfinite, self.elements, self.unreached
        return TextTable("Coverage of paths", columns, ((*map(known, row), *counts),), self.lines())

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def __repr__(self) -> str:
        low, high = map(percent, self.quartiles)
        return (
            f"Coverage(median {percent(self.median)}, quartiles {low} and {high}, opposite sign "
            f"{percent(self.opposite)}, {self.elements:,} elements)"
        )

    # Storage -------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON values."""
        return {
            "parts": list(self.parts),
            "cancellations": self.cancellations,
            "nonfinite": self.nonfinite,
            "unreached": self.unreached,
            "sampled": self.sampled,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Coverage:
        """The inverse of ``to_dict``.

        Args:
            data: What ``to_dict`` returned.

        Returns:
            The coverage.
        """
        check_read(schemas.COVERAGE, data, "coverage")
        counts = {name: int(data[name]) for name in ("cancellations", "nonfinite", "unreached")}
        return cls(tuple(map(float, data["parts"])), **counts, sampled=bool(data["sampled"]))


def combined(one: Coverage | None, other: Coverage | None) -> Coverage | None:
    """The coverage of two tables together, as far as it is known."""
    if one is None or other is None:
        return other if one is None else one
    return one + other


def percent(part: float) -> str:
    """A part of a whole, short: ``16%``, ``1.3%``, ``-40%``, ``31 times``. Only the whole is 100%.

    >>> [percent(x) for x in (0.164, 0.0132, -0.4, 31.0, 0.0, 0.9999, 1.0)]
    ['16%', '1.3%', '-40%', '31 times', '0%', '99.9%', '100%']
    """
    if not isfinite(part):
        return "–"
    if abs(part) >= 10:
        return f"{part:.2g} times" if abs(part) >= 1e6 else f"{part:,.0f} times"
    if 0.995 <= abs(part) < 1:
        return f"{copysign(floor(abs(part) * 1000) / 1000, part):.1%}"
    return f"{part:.1%}" if 0 < abs(part) < 0.0995 else f"{part:.0%}"


# Measuring ----------------------------------------------------------------------------------------


def measured(
    traced: TracedProgram, sample: int, seed: int, max_losses: int = MAX_LOSSES
) -> Coverage:
    """The coverage of a random sample of elements of all leaves, for at most ``max_losses``."""
    total = sum(leaf.tensor.numel() for leaf in traced.leaves.values()) * traced.pairs
    found = Coverage((), sampled=sample < total or traced.pairs > max_losses)
    traced = traced if traced._followers else replace(traced)  # values are freed afterwards
    for pair, drawn in drawn_sample(traced, sample, seed, max_losses):
        found += of_paths(traced, follow_paths(traced, drawn, pair))
    return found


def of_paths(traced: TracedProgram, paths: FollowedPaths) -> Coverage:
    """The coverage of paths, by their weights."""
    leaves = {leaf.value: leaf.tensor for leaf in traced.leaves.values()}
    each = [torch.finfo(leaves[value].dtype).eps for value in paths.drawn]
    whole = paths.whole
    rounding = np.repeat(each, [len(x) for x in paths.drawn.values()])[whole]
    mantissa, exponent = paths.mantissa[whole], paths.exponent[whole]
    gradient, power = np.frexp(paths.gradient.numpy()[whole])
    finite = np.isfinite(gradient) & np.isfinite(mantissa)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore", under="ignore"):
        part = np.ldexp(mantissa / gradient, np.clip(exponent - power, -4000, 4000))
        cancelled = finite & ~(np.abs(part) * rounding < 1)
    parts = np.sort(part[finite & ~cancelled]).tolist()
    counts = (int(cancelled.sum()), int((~finite).sum()), int((~whole).sum()))
    return Coverage(tuple(parts), *counts, sampled=False)
