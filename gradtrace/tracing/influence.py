"""``Influence``: the share of parameter elements whose paths pass through each component."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, Literal

from gradtrace.errors import GradtraceError, UnknownName
from gradtrace.io.table import Tabular, TextColumn, TextTable
from gradtrace.printable import printable
from gradtrace.tracing.coverage import Coverage, CoverageSource, combined
from gradtrace.tracing.moments import NOTHING
from gradtrace.tracing.moments import Moments as Moments

Weight = Literal["count", "gradient"]


@dataclass(frozen=True, repr=False)
class Row:
    """The counts of one component; see ``Influence``."""

    name: str
    own: int = 0
    unreached: int = 0
    count: Moments = NOTHING
    gradient: Moments = NOTHING

    @property
    def through(self) -> int:
        """The number of elements whose paths pass through the component."""
        return int(self.count.t)

    @property
    def eligible(self) -> int:
        """The number of elements that have a path and could pass through it."""
        return int(self.count.e)

    @property
    def share(self) -> float:
        """``through / eligible``; nan if none is eligible."""
        return self.count.share

    @property
    def weighted(self) -> float:
        """The share with every element weighted by its |gradient|."""
        return self.gradient.share

    def __repr__(self) -> str:
        shares = f"share={self.share:.4g}, weighted={self.weighted:.4g}"
        counts = f"through={self.through}, eligible={self.eligible}"
        rest = f"unreached={self.unreached}, own={self.own}"
        return printable(f"Row({self.name!r}, {counts}, {shares}, {rest})")

    def __add__(self, other: Row) -> Row:
        return replace(
            self,
            own=max(self.own, other.own),
            unreached=self.unreached + other.unreached,
            count=self.count + other.count,
            gradient=self.gradient + other.gradient,
        )


@dataclass(frozen=True)
class Influence(Tabular):
    """A table of components.

    ``eligible`` is the number of parameter elements outside a component that could pass through it:
    some route through it exists, and the element has a path. ``through`` is how many of them do,
    ``share`` the ratio; ``weighted`` is the share with every element weighted by its |gradient|.
    ``unreached`` is the number of elements with a route but no path, as all their contributions are
    0; ``own`` is the number of the component's own parameters, which are left out. Counts are sums
    over pairs, so tables can be merged: ``a.merge(b)``.
    """

    rows: tuple[Row, ...]
    pairs: int = 1
    weight: Weight = "count"
    rule: str = "greedy"
    notes: tuple[str, ...] = ()
    interrupted: bool = False
    measured: Coverage | None = field(default=None, compare=False, repr=False)
    source: CoverageSource | None = field(default=None, compare=False, repr=False)

    @classmethod
    def later(
        cls, names: Sequence[str], make: Callable[[], tuple[Row, ...]], **rest: Any
    ) -> Influence:
        """A table with these names whose rows are made by ``make`` at the first access.

        A run's file holds thousands of tables, most of which are never read.
        """
        found = cls((), **rest)
        del found.__dict__["rows"]
        found.__dict__["_later"] = (names, make)
        return found

    def __getattr__(self, name: str) -> Any:
        """The rows of a table made by ``later``."""
        if name != "rows" or "_later" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        self.__dict__["rows"] = self.__dict__.pop("_later")[1]()
        return self.__dict__["rows"]

    def __getstate__(self) -> dict[str, Any]:
        _ = self.rows
        return {**self.__dict__, "source": None}

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the components."""
        later = self.__dict__.get("_later")
        return tuple(later[0]) if later else tuple(row.name for row in self.rows)

    def __getitem__(self, name: str) -> Row:
        for row in self.rows:
            if row.name == name:
                return row
        known = ", ".join(row.name for row in self.rows[:8])
        raise UnknownName(f"no component {name!r} in this table; there are {known}")

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def shares(self) -> dict[str, float]:
        """``{component: share}``, by count or by gradient as ``weight`` says; nan if none is
        eligible.
        """
        return {row.name: getattr(row, self.weight).share for row in self.rows}

    @property
    def errors(self) -> dict[str, float]:
        """``{component: standard error of its share over pairs}``; nan for fewer than two."""
        return {row.name: getattr(row, self.weight).error(self.pairs) for row in self.rows}

    @property
    def coverage(self) -> Coverage | None:
        """What part of its element's gradient a path behind this table carries; measured when first
        asked for or printed, which takes the trace that the table was made from. None if that is
        gone, or its weights have changed, and for tables from files that do not have it.
        """
        if self.measured is None and self.source is not None:
            self.__dict__["measured"] = self.source.measure()
        return self.measured

    def by(self, weight: Weight) -> Influence:
        """The same table, with shares by ``"count"`` or by ``"gradient"``."""
        return replace(self, weight=checked_weight(weight))

    def merge(self, *others: Influence) -> Influence:
        """The table over the pairs of all tables; the same in any order and grouping."""
        result = self
        for other in others:
            if (other.weight, other.rule) != (result.weight, result.rule):
                raise GradtraceError(
                    f"a table by {result.rule} and {result.weight} cannot be merged with one by "
                    f"{other.rule} and {other.weight}"
                )
            mine = {row.name: row for row in result.rows}
            theirs = {row.name: row for row in other.rows}
            names = sorted(mine.keys() | theirs.keys(), key=_order(result.rows, other.rows))
            rows = tuple(mine.get(n, Row(n)) + theirs.get(n, Row(n)) for n in names)
            notes = tuple(sorted({*result.notes, *other.notes}))
            result = replace(
                result,
                rows=rows,
                pairs=result.pairs + other.pairs,
                notes=notes,
                interrupted=result.interrupted or other.interrupted,
                measured=combined(result.measured, other.measured),
                source=None,
            )
        return result

    # Display -------------------------------------------------------------------------------------

    def table(self) -> TextTable:
        """The table as text: one row per component."""
        many = self.pairs > 1
        columns = (
            TextColumn("component"),
            TextColumn("through", "count"),
            TextColumn("eligible", "count"),
            TextColumn("share", "share"),
            *([TextColumn("± error", "share")] if many else []),
            TextColumn("weighted", "share"),
            TextColumn("unreached", "count"),
            TextColumn("own", "count"),
        )
        rows = tuple(
            (
                row.name,
                int(row.count.t),
                int(row.count.e),
                row.count.share if row.count.e else None,
                *([row.count.error(self.pairs)] if many else []),
                row.gradient.share if row.gradient.e else None,
                row.unreached,
                row.own,
            )
            for row in self.rows
        )
        pairs = f", {self.pairs:,} pairs" if many else ""
        return TextTable(f"Influence ({self.rule}{pairs})", columns, rows, self.notes)

    def _explained(self) -> TextTable:
        """The table, with its coverage in words below."""
        table, coverage = self.table(), self.coverage
        lines = () if coverage is None else coverage.lines()
        warning = "" if self.source is None else self.source.contradictions()
        return replace(table, notes=(*table.notes, *lines, *([warning] if warning else [])))

    def __str__(self) -> str:
        return str(self._explained())

    def _repr_html_(self) -> str:
        return self._explained()._repr_html_()

    def __repr__(self) -> str:
        many = f"{len(self.rows)} components, {self.pairs:,} pairs"
        return printable(f"Influence({many}, {self.rule})")

    # Storage -------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON values; fractions as [numerator, denominator]. Coverage only if it has
        been measured.
        """
        coverage = {} if self.measured is None else {"coverage": self.measured.to_dict()}
        return coverage | {
            "rows": [
                {
                    "name": row.name,
                    "own": row.own,
                    "unreached": row.unreached,
                    "count": [[f.numerator, f.denominator] for f in row.count.parts()],
                    "gradient": [[f.numerator, f.denominator] for f in row.gradient.parts()],
                }
                for row in self.rows
            ],
            "pairs": self.pairs,
            "weight": self.weight,
            "rule": self.rule,
            "notes": list(self.notes),
            "interrupted": self.interrupted,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Influence:
        """The inverse of ``to_dict``."""
        rows = tuple(
            Row(
                str(row["name"]),
                int(row["own"]),
                int(row["unreached"]),
                Moments(*(Fraction(*pair) for pair in row["count"])),
                Moments(*(Fraction(*pair) for pair in row["gradient"])),
            )
            for row in data["rows"]
        )
        return cls(
            rows,
            int(data["pairs"]),
            checked_weight(data["weight"]),
            str(data["rule"]),
            tuple(data["notes"]),
            bool(data["interrupted"]),
            Coverage.from_dict(data["coverage"]) if "coverage" in data else None,
        )


def checked_weight(weight: str) -> Weight:
    """``"count"`` or ``"gradient"``, or a clear error."""
    if weight == "count":
        return "count"
    if weight == "gradient":
        return "gradient"
    raise UnknownName(f"weight is 'count' or 'gradient', not {weight!r}")


def _order(first: tuple[Row, ...], second: tuple[Row, ...]) -> Any:
    """Names in an order that does not depend on which table was first."""
    first, second = first or second, second or first  # an empty table has no say
    if [row.name for row in first] == [row.name for row in second]:
        place = {row.name: n for n, row in enumerate(first)}
        return lambda name: place[name]
    return lambda name: name
