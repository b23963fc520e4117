"""Tables of influence in run files, with exact sums."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import log2
from typing import Any, Literal

from gradtrace.autodiff.names import enclosing
from gradtrace.errors import (
    GradtraceError,
    UnknownName,
    check_mergeable,
    listed,
    not_one_of,
    printable,
)
from gradtrace.io import schemas
from gradtrace.io.table import ComponentRows, Tabular, TextColumn, TextTable
from gradtrace.io.validation import check_read
from gradtrace.tracing.influence import Counted
from gradtrace.tracing.moments import NOTHING, loss_count
from gradtrace.tracing.moments import Moments as Moments

Weight = Literal["count", "gradient"]

NONFINITE = "some gradients are NaN or infinite; their paths count, but have no weight"


@dataclass(frozen=True, repr=False)
class Row:
    """The counts of one component; see ``Influence``. ``alternative``: whether some path from a
    parameter goes around it, or every path that could pass it does; None if unknown.
    """

    name: str
    own: int = 0
    unreached: int = 0
    count: Moments = NOTHING
    gradient: Moments = NOTHING
    alternative: bool | None = field(default=None, compare=False)

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
            alternative=_either(self.alternative, other.alternative),
        )

    @property
    def series(self) -> bool:
        """Whether every path that could pass the component does: its share is 1 by definition."""
        return self.alternative is False


@dataclass(frozen=True)
class Influence(ComponentRows[Row], Tabular):
    """A table of components.

    ``eligible`` is the number of parameter elements outside a component that could pass through it:
    some route through it exists, and the element has a path. ``through`` is how many of them do,
    ``share`` the ratio; ``weighted`` is the share with every element weighted by its |gradient|.
    ``unreached`` is the number of elements with a route but no path, as all their contributions are
    0; ``own`` is the number of the component's own parameters, which are left out. Counts are sums
    over losses, so tables can be merged: ``a.merge(b)``.

    A component in series, which every path that could pass it does pass, has a share of 1 by
    definition (``row.series``). The printed table has those last, before them what has no
    parameters of its own (dropouts, activations), and the others by information, ``eligible ×
    entropy of the share``, the largest first; ``rows`` are in the model's order.
    """

    rows: tuple[Row, ...]
    pairs: int = 1
    weight: Weight = "count"
    rule: str = "greedy"
    notes: tuple[str, ...] = ()
    interrupted: bool = False
    kind: str = field(default="", compare=False, repr=False)  # as in influence(kind), if known
    order: str = field(default="information", compare=False, repr=False)

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
        return self.__dict__

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the components."""
        later = self.__dict__.get("_later")
        return tuple(later[0]) if later else tuple(row.name for row in self.rows)

    @property
    def shares(self) -> dict[str, float]:
        """``{component: share}``, by count or by gradient as ``weight`` says; nan if none is
        eligible.
        """
        return {row.name: getattr(row, self.weight).share for row in self.rows}

    @property
    def errors(self) -> dict[str, float]:
        """``{component: standard error of its share}``: over losses, and of the sample of elements
        if not all were counted (``Moments.error``); nan for a single loss of which all were.
        """
        return {row.name: getattr(row, self.weight).error(self.pairs) for row in self.rows}

    @property
    def sampled(self) -> bool:
        """Whether only a sample of elements was counted, so that shares have a sampling error."""
        return any(row.count.sampling is not None for row in self.rows)

    @property
    def has_errors(self) -> bool:
        """Whether shares have standard errors: over losses, or of a sample of elements."""
        return self.pairs > 1 or self.sampled

    def by(self, weight: Weight) -> Influence:
        """The same table, with shares by ``"count"`` or by ``"gradient"``.

        Args:
            weight: ``"count"``: every element counts 1; ``"gradient"``: its |gradient|.

        Returns:
            The table with these shares.
        """
        return replace(self, weight=checked_weight(weight))

    def merge(self, *others: Influence) -> Influence:
        """The table over the losses of all tables; the same in any order and grouping.

        Args:
            others: Tables of the same kind, over other losses.

        Returns:
            One table.
        """
        result = self
        for other in others:
            check_mergeable(self, other)
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
            )
        return result

    @property
    def information(self) -> dict[str, float]:
        """``{component: eligible elements × entropy of its share, in bits}``."""
        return {row.name: _information(row, self.weight) for row in self.rows}

    # Display -------------------------------------------------------------------------------------

    def table(self) -> TextTable:
        """The table as text: one row per component, by information, those in series last."""
        whole = self._row_table()
        return replace(whole, rows=tuple(whole.rows[n] for n in self._shown()))

    def _shown(self) -> list[int]:
        order = list(range(len(self.rows)))
        if self.order == "information":
            plain = [row.own == 0 and row.count.e > 0 for row in self.rows]  # a dropout, a ReLU
            told = [
                (row.series, without, -_information(row, self.weight))
                for row, without in zip(self.rows, plain)
            ]
            order.sort(key=lambda n: told[n])
        return order

    def _picked(self, order: Sequence[int]) -> Influence:
        return replace(self, rows=tuple(self.rows[n] for n in order), order="rows")

    def _row_table(self) -> TextTable:
        many, series = self.has_errors, any(row.series for row in self.rows)
        columns = (
            TextColumn("component"),
            TextColumn("through", "count"),
            TextColumn("eligible", "count"),
            TextColumn("share", "share"),
            *([TextColumn("± error", "share")] if many else []),
            TextColumn("weighted", "share"),
            *([TextColumn("± weighted", "share")] if self.sampled else []),
            TextColumn("unreached", "count"),
            TextColumn("own", "count"),
            *([TextColumn("choice")] if series else []),
        )
        rows = tuple(
            (
                row.name,
                int(row.count.t),
                int(row.count.e),
                row.count.share if row.count.e else None,
                *([_error(row.count, self.pairs)] if many else []),
                row.gradient.share if row.gradient.e else None,
                *([_error(row.gradient, self.pairs)] if self.sampled else []),
                row.unreached,
                row.own,
                *(["in series" if row.series else ""] if series else []),
            )
            for row in self.rows
        )
        losses = f", {self.pairs:,} losses" if self.pairs > 1 else ""
        words = [*([SERIES_NOTE] if series else []), *self._impassable(), *self._inside()]
        notes = (*words, *self.notes)
        return TextTable(f"Influence ({self.rule}{losses})", columns, rows, notes)

    def _impassable(self) -> list[str]:
        """Which components no path can pass, of those without parameters that could."""
        none = [r.name for r in self.rows if not (r.count.e or r.unreached or r.own)]
        return [f"no path from a leaf can pass {listed(none)}"] if none else []

    def _inside(self) -> list[str]:
        """Why a module may have a larger share than the one that it is in, if one has."""
        shares = {row.name: row.count.share for row in self.rows if row.count.e}
        pairs = [
            (inner, outer)
            for inner, share in shares.items()
            for outer in enclosing(inner)
            if outer and outer != inner and shares.get(outer, share) < share
        ]
        if not pairs:
            return []
        inner, outer = pairs[0]
        return [
            f"{inner} has a larger share than {outer}, which it is in: parameters of {outer} that "
            f"are outside {inner} are eligible for {inner} alone"
        ]

    def plot(self, by: str | None = None, *, most: int = 20, ax: Any = None) -> Any:
        """Bars of the shares, or of another column, with standard errors if there are any; without
        the components in series if there are others.

        Args:
            by: Name of the column.
            most: The most rows to draw.
            ax: ``Axes`` to draw on; new ones by default.

        Returns:
            matplotlib's ``Axes``.
        """
        free = [n for n in self._shown() if not self.rows[n].series and self.rows[n].count.e]
        shown = self._picked(free) if free else self
        return shown._row_table().bars(by or _COLUMN[self.weight], most, ax)

    def __repr__(self) -> str:
        many = f"{len(self.rows)} components, {loss_count(self.pairs)}"
        return printable(f"Influence({many}, {self.rule})")

    # Storage -------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON values; fractions as [numerator, denominator]. Coverage only if it has
        been measured.
        """
        return {
            "rows": [
                {
                    "name": row.name,
                    "own": row.own,
                    "unreached": row.unreached,
                    "count": row.count.to_json(),
                    "gradient": row.gradient.to_json(),
                    **({} if row.alternative is None else {"alternative": row.alternative}),
                }
                for row in self.rows
            ],
            "pairs": self.pairs,
            "weight": self.weight,
            "rule": self.rule,
            "notes": list(self.notes),
            "interrupted": self.interrupted,
            **({"kind": self.kind} if self.kind else {}),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Influence:
        """The inverse of ``to_dict``.

        Args:
            data: What ``to_dict`` returned.

        Returns:
            The table.
        """
        check_read(schemas.INFLUENCE, data, "table of influence")
        rows = tuple(
            Row(
                str(row["name"]),
                int(row["own"]),
                int(row["unreached"]),
                Moments.from_json(row["count"]),
                Moments.from_json(row["gradient"]),
                row.get("alternative"),
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
            kind=str(data.get("kind", "")),
        )


SERIES_NOTE = "in series: every path that could pass it does, so its share is 100% by definition"
_COLUMN = {"count": "share", "gradient": "weighted"}


def _error(moments: Moments, pairs: int) -> float | None:
    """The standard error of a share; None if nothing is eligible."""
    return moments.error(pairs) if moments.e else None


def _information(row: Row, weight: Weight) -> float:
    """Eligible elements times the entropy of the share, in bits; 0 where there is none."""
    share = float(getattr(row, weight).share)
    if not 0 < share < 1:
        return 0.0
    return -float(row.count.e) * (share * log2(share) + (1 - share) * log2(1 - share))


def checked_weight(weight: str) -> Weight:
    """``"count"`` or ``"gradient"``, or a clear error."""
    if weight == "count":
        return "count"
    if weight == "gradient":
        return "gradient"
    raise UnknownName(not_one_of("weight", weight, ("count", "gradient")))


def _either(first: bool | None, second: bool | None) -> bool | None:
    """Whether there is an alternative in either of two tables; None is not known."""
    return second if first is None else first if second is None else first or second


def _order(first: tuple[Row, ...], second: tuple[Row, ...]) -> Any:
    """Names in an order that does not depend on which table was first."""
    first, second = first or second, second or first  # an empty table has no say
    if [row.name for row in first] == [row.name for row in second]:
        place = {row.name: n for n, row in enumerate(first)}
        return lambda name: place[name]
    return lambda name: name


def of_counts(found: Counted, rule: str) -> Influence:
    """The table as a run file has it."""
    rows = tuple(
        Row(row.name, row.own, row.unreached, row.count, row.gradient, row.alternative)
        for row in found.rows
    )
    return Influence(rows, found.losses, rule=rule, notes=found.notes)
