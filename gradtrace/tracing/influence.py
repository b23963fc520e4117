"""Influence: the share of parameter elements whose paths pass through each component.

``Counted`` has the counts of components; ``table_of`` makes the table that users see.

``eligible`` is the number of parameter elements outside a component that could pass through it:
some route through it exists, and the element has a path. ``through`` is how many of them do,
``share`` the ratio; ``weighted`` is the share with every element weighted by its |gradient|.
``unreached`` is the number of elements with a route but no path, as all their contributions are 0;
``own`` is the number of the component's own parameters, which are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from math import log2, nan
from typing import Any

from gradtrace.autodiff.names import enclosing
from gradtrace.errors import listed
from gradtrace.kernels.operands import GroupSums
from gradtrace.table import Column, Table
from gradtrace.tracing.moments import NOTHING, KnownVariance, Moments

NONFINITE = "some gradients are NaN or infinite; their paths count, but have no weight"
SERIES = "in series"
SERIES_NOTE = "in series: every path that could pass it does, so its share is 100% by definition"
INSIDE_NOTE = (
    "a module may have a larger share than the one that it is in, whose other parameters are "
    "eligible for the inner one alone"
)

SUMS = ("|g| through", "|g| eligible")
"""Columns that are not printed: what the weighted share is the ratio of."""


@dataclass(frozen=True)
class Count:
    """The counts of one component. ``alternative``: whether some path from a parameter goes around
    it, or every path that could pass it does; None if unknown.
    """

    name: str
    own: int = 0
    unreached: int = 0
    count: Moments = NOTHING
    gradient: Moments = NOTHING
    alternative: bool | None = None


@dataclass(frozen=True)
class Counted:
    """The counts of components over ``losses`` losses."""

    rows: tuple[Count, ...]
    losses: int = 1
    notes: tuple[str, ...] = ()

    @classmethod
    def of_sums(
        cls,
        names: Iterable[str],
        avoidable: Iterable[bool | None],
        sums: GroupSums,
        own: Iterable[int],
        known: Iterable[Iterable[KnownVariance]] = (repeat(None), repeat(None)),
    ) -> Counted:
        """The counts of these sums, given the name of each component, whether it can be avoided and
        how many elements it has; ``known`` are the sampling variances by count and by |gradient|.
        """
        eligible, through, unreached, finite = sums
        moments = (
            map(Moments.over, through[:, :, k].T.tolist(), eligible[:, :, k].T.tolist(), each)
            for k, each in enumerate(known)
        )
        counts = own, map(int, unreached.tolist())
        rows = tuple(map(Count, names, *counts, *moments, avoidable))
        return cls(rows, len(eligible), () if finite else (NONFINITE,))

    def noted(self, *notes: str) -> Counted:
        """The same with these notes first."""
        return replace(self, notes=(*notes, *self.notes))


# The table ----------------------------------------------------------------------------------------


def table_of(found: Counted, about: Mapping[str, Any], notes: Sequence[str] = ()) -> Table:
    """The table of counts, by information; standard errors where there are several losses or only a
    sample was counted (``about["sampled"]``). ``notes`` come last.
    """
    errors = found.losses > 1 or "sampled" in about
    rows = [_values(row, found.losses, errors) for row in found.rows]
    series = any(row.alternative is False for row in found.rows)
    words = [SERIES_NOTE] if series else []
    none = [row[0] for row in rows if not row[2] and not any(row[-5:-3])]
    words += [f"no path from a leaf can pass {listed(none)}"] if none else []
    shares = {row[0]: row[3] for row in rows if row[2]}
    words += [INSIDE_NOTE] if _some_larger_inside(shares) else []
    about = {**about, "losses": found.losses}
    every = (*words, *found.notes, *notes)
    if about["by"] != "forks":
        rows.sort(key=_rank)
    title, columns = f"Influence ({about['rule']})", _columns(errors, series)
    return Table(title, columns, tuple(rows), every, about)  # type: ignore[arg-type]


def ordered(table: Table) -> Table:
    """A sum of tables in the order of ``table_of``."""
    if table.about["by"] == "forks":
        return table
    return replace(table, rows=tuple(sorted(table.rows, key=lambda row: _rank(row.values))))


def _rank(values: Sequence[Any]) -> tuple[bool, bool, float]:
    """Where a row of these values comes; the last are own, choice and the two sums."""
    _, _, eligible, share, *_, own, choice, _, _ = values
    plain = own == 0 and eligible > 0  # a dropout, a ReLU
    return choice == SERIES, plain, -information(share, eligible)


def information(share: float, eligible: int) -> float:
    """Eligible elements times the entropy of the share, in bits; 0 where there is none.

    >>> information(0.5, 8), information(1.0, 8)
    (8.0, 0.0)
    """
    if not 0 < share < 1:
        return 0.0
    return -eligible * (share * log2(share) + (1 - share) * log2(1 - share))


def _columns(errors: bool, series: bool) -> tuple[Column, ...]:
    shares = [
        Column("share", "share", formula="ratio", of=("through", "eligible")),
        Column("weighted", "share", formula="ratio", of=SUMS),
    ]
    return (
        Column("component"),
        Column("through", "count", adds=True),
        Column("eligible", "count", adds=True),
        *(x for c in shares for x in (c, Column(f"± {c.name}", "share"))[: 1 + errors]),
        Column("unreached", "count", adds=True),
        Column("own", "count"),
        Column("choice", shown=series),
        *(Column(name, "number", adds=True, shown=False) for name in SUMS),
    )


def _values(row: Count, losses: int, errors: bool) -> tuple[Any, ...]:
    """One row of the table."""
    count, gradient = row.count, row.gradient
    through, eligible = count.sums
    shares: list[float] = [count.share, gradient.share]
    if errors:
        each = [x.error(losses) if x.e else nan for x in (count, gradient)]
        shares = [count.share, each[0], gradient.share, each[1]]
    choice = SERIES if row.alternative is False else ""
    first = row.name, int(through), int(eligible)
    return (*first, *shares, row.unreached, row.own, choice, *gradient.sums)


def _some_larger_inside(shares: Mapping[str, float]) -> bool:
    """Whether a module has a larger share than one that it is in."""
    return any(
        shares.get(outer, share) < share
        for inner, share in shares.items()
        for outer in enclosing(inner)
        if outer
    )
