"""``Choices``: how paths, gradient and mass divide at each fork."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from math import isfinite, log2, nan
from typing import Any

from gradtrace.errors import GradtraceError, UnknownName, check_mergeable, did_you_mean, printable
from gradtrace.io import plotting, schemas
from gradtrace.io.table import RowSequence, Tabular, TextColumn, TextTable, known
from gradtrace.io.validation import check_read
from gradtrace.tracing.moments import NOTHING, Moments, loss_count

MEASURES = ("paths", "gradient", "mass")
"""How a fork can be divided: by paths of the trace's rule, by the signed gradient through each
branch, by the mass of all paths."""

SKIPS = ("skip", "direct")
"""Names of a branch that is a value which all other branches begin with too."""


@dataclass(frozen=True)
class Choice:
    """One branch of a fork.

    ``count`` holds how many elements' paths take the branch, of those that come to the fork and
    could take another; ``gradient`` the same weighted by |gradient|. ``others`` are the shares by
    other measures. ``times`` is how often the fork occurs (calls of a module, time steps).
    ``between`` says that branches of the fork are modules or labelled slices, not operators within
    one module.
    """

    fork: str
    branch: str
    kind: str = ""
    count: Moments = NOTHING
    gradient: Moments = NOTHING
    others: Mapping[str, float] = field(default_factory=dict)
    times: int = 1
    between: bool = False

    def __add__(self, other: Choice) -> Choice:
        return replace(
            self,
            count=self.count + other.count,
            gradient=self.gradient + other.gradient,
            others={},  # shares by other measures are of one trace
            times=max(self.times, other.times),
            between=self.between or other.between,
        )


@dataclass(frozen=True)
class Choices(RowSequence[Choice], Tabular):
    """A table of forks and their branches: at each fork the shares of its branches add up to 1.

    A fork is an operator that joins branches (a sum, a concatenation, a product), or a tensor with
    labelled slices. Elements are counted at a fork if they could take at least two of its branches
    and their path comes to it: parameters inside a branch have no choice, and are left out. Forks
    between modules are printed first, then those within one, each by information, ``elements ×
    entropy of the shares``, the largest first; ``rows`` are from the leaves to the loss. Counts are
    sums over losses, so tables can be merged.
    """

    rows: tuple[Choice, ...]
    pairs: int = 1
    rule: str = "greedy"
    notes: tuple[str, ...] = ()
    order: str = field(default="information", compare=False, repr=False)

    @property
    def forks(self) -> tuple[str, ...]:
        """The names of the forks, from the leaves to the loss."""
        return tuple(dict.fromkeys(row.fork for row in self.rows))

    @property
    def shares(self) -> dict[str, dict[str, float]]:
        """``{fork: {branch: share of the paths}}``; nan where no path comes to the fork."""
        found: dict[str, dict[str, float]] = {}
        for row in self.rows:
            found.setdefault(row.fork, {})[row.branch] = row.count.share
        return found

    @property
    def information(self) -> dict[str, float]:
        """``{fork: elements × entropy of the shares in bits}``: 0 if all take the same branch."""
        found = dict.fromkeys(self.forks, 0.0)
        for row in self.rows:
            share, elements = row.count.share, float(row.count.e)
            if 0 < share < 1:
                found[row.fork] -= elements * share * log2(share)
        return found

    def between_modules(self) -> dict[str, float]:
        """``{branch: share}`` at the forks between modules, the most informative fork first.

        Skip connections are left out, since they have the rest, and forks that no path comes to. A
        branch of several forks has the fork's name before its own.
        """
        ranks = {fork: n for n, fork in enumerate(self.ranked())}
        rows = [row for row in self.rows if row.between and row.branch not in SKIPS]
        often = Counter(row.branch for row in rows)
        found: dict[str, float] = {}
        for row in sorted(rows, key=lambda row: ranks[row.fork]):
            name = row.branch if often[row.branch] == 1 else f"{row.fork}/{row.branch}"
            if isfinite(row.count.share):
                found[name] = row.count.share
        return found

    def __getitem__(self, fork: str) -> Choices:
        rows = tuple(row for row in self.rows if row.fork == fork)
        if not rows:
            raise UnknownName(f"no fork {fork!r} in this table{did_you_mean(fork, self.forks)}")
        return replace(self, rows=rows)

    def merge(self, *others: Choices) -> Choices:
        """The table over the losses of all tables, by paths; the same in any order.

        Args:
            others: Tables of the same kind, over other losses.

        Returns:
            One table.
        """
        tables = (self, *others)
        for other in others:
            check_mergeable(self, other)
        if any(other.rule != self.rule for other in others):
            rules = " and ".join(sorted({table.rule for table in tables}))
            raise GradtraceError(f"choices by different rules cannot be merged: {rules}")
        found = {_key(row): Choice(*_key(row), times=0) for table in tables for row in table}
        for table in tables:
            came = {row.fork: row for row in table}  # what comes to a fork is equal in its rows
            mine = {_key(row): row for row in table}
            for key in found:
                if key[0] in came:
                    found[key] += mine.get(key) or _untaken(*key, came[key[0]])
        notes = tuple(sorted({note for table in tables for note in table.notes}))
        pairs = sum(table.pairs for table in tables)
        return replace(self, rows=tuple(found.values()), pairs=pairs, notes=notes)

    # Display --------------------------------------------------------------------------------------

    @property
    def measures(self) -> tuple[str, ...]:
        """The measures that the table has shares by."""
        return tuple(m for m in MEASURES if m == "paths" or any(m in r.others for r in self.rows))

    def _row_table(self) -> TextTable:
        many, more = self.pairs > 1, self.measures[1:]
        columns = (
            TextColumn("fork"),
            TextColumn("branch"),
            TextColumn("elements", "count"),
            TextColumn("paths", "share"),
            *([TextColumn("± error", "share")] if many else []),
            TextColumn("weighted", "share"),
            *(TextColumn(measure, "share") for measure in more),
        )
        rows = tuple(
            (
                row.fork + (f" (×{row.times})" if row.times > 1 else ""),
                row.branch,
                int(row.count.t),
                row.count.share if row.count.e else None,
                *([known(row.count.error(self.pairs))] if many else []),
                row.gradient.share if row.gradient.e else None,
                *(known(row.others.get(measure, nan)) for measure in more),
            )
            for row in self.rows
        )
        return TextTable(self._title(), columns, rows, self.notes)

    def _title(self) -> str:
        losses = f", {self.pairs:,} losses" if self.pairs > 1 else ""
        return f"Choices ({self.rule}{losses}): how paths divide at each fork"

    def _shown(self) -> list[int]:
        order = list(range(len(self.rows)))
        if self.order == "information":
            ranks = {fork: n for n, fork in enumerate(self.ranked())}
            order.sort(key=lambda n: ranks[self.rows[n].fork])
        return order

    def ranked(self) -> list[str]:
        """The names of the forks as they are printed: those between modules first, then those
        within one, each by information.
        """
        found, between = self.information, {row.fork for row in self.rows if row.between}
        return sorted(self.forks, key=lambda fork: (fork not in between, -found[fork]))

    def _picked(self, order: Sequence[int]) -> Choices:
        return replace(self, rows=tuple(self.rows[n] for n in order), order="rows")

    def top(self, n: int, by: str | None = None) -> Choices:
        """The first ``n`` forks as they are printed, whole; or the ``n`` largest branches by a
        column.

        Args:
            n: How many.
            by: Name of a column of shares; by default the order that is printed.

        Returns:
            The table with these forks.
        """
        if by is not None or not isinstance(n, int) or isinstance(n, bool) or n < 1:
            return super().top(n, by)
        rows = [self.rows[k] for k in self._shown()]
        first = list(dict.fromkeys(row.fork for row in rows))[:n]
        return replace(self, rows=tuple(r for r in rows if r.fork in first), order="rows")

    def table(self) -> TextTable:
        """One row per branch, fork by fork."""
        whole = self._row_table()
        return replace(whole, rows=tuple(whole.rows[n] for n in self._shown()))

    def _grouped(self) -> TextTable:
        """The table with each fork's name at its first branch only."""
        table, last, rows = self.table(), None, []
        for row in table.rows:
            rows.append(row if row[0] != last else ("", *row[1:]))
            last = row[0]
        return replace(table, rows=tuple(rows))

    def __str__(self) -> str:
        return str(self._grouped())

    def _repr_html_(self) -> str:
        return self._grouped()._repr_html_()

    def __repr__(self) -> str:
        return printable(f"Choices({len(self.forks)} forks, {loss_count(self.pairs)}, {self.rule})")

    def plot(self, by: str | None = None, *, most: int = 20, ax: Any = None) -> Any:
        """A bar for each fork, divided into its branches by a column of shares (``"paths"``); at
        most ``most`` forks.

        Args:
            by: Name of the column of shares; ``"paths"`` by default.
            most: The most forks to draw.
            ax: ``Axes`` to draw on; new ones by default.

        Returns:
            matplotlib's ``Axes``.
        """
        table, bars = self.table(), dict[str, list[tuple[str, float]]]()
        shares = [c.name for c in table.columns if c.kind == "share" and c.name[0] != "±"]
        if by is not None and by not in shares:
            raise UnknownName(f"no column of shares {by!r}{did_you_mean(by, shares)}")
        columns = (table.column(name) for name in ("fork", "branch", by or shares[0]))
        for fork, branch, share in zip(*columns):
            number = share if share is not None and isfinite(share) else nan
            bars.setdefault(fork, []).append((branch, number))
        return plotting.divided(bars, most, table.heading, ax)

    # Storage --------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON values; fractions as [numerator, denominator]."""
        return {
            "rows": [
                {
                    "fork": row.fork,
                    "branch": row.branch,
                    "kind": row.kind,
                    "count": row.count.to_json(),
                    "gradient": row.gradient.to_json(),
                    "others": {name: x for name, x in row.others.items() if isfinite(x)},
                    "times": row.times,
                    "between": row.between,
                }
                for row in self.rows
            ],
            "pairs": self.pairs,
            "rule": self.rule,
            "notes": list(self.notes),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Choices:
        """The inverse of ``to_dict``.

        Args:
            data: What ``to_dict`` returned.

        Returns:
            The table.
        """
        check_read(schemas.CHOICES, data, "table of choices")
        rows = tuple(
            Choice(
                str(row["fork"]),
                str(row["branch"]),
                str(row["kind"]),
                Moments.from_json(row["count"]),
                Moments.from_json(row["gradient"]),
                {str(name): float(x) for name, x in row["others"].items()},
                int(row["times"]),
                bool(row.get("between", False)),  # older files have none
            )
            for row in data["rows"]
        )
        return cls(rows, int(data["pairs"]), str(data["rule"]), tuple(data["notes"]))


def _key(row: Choice) -> tuple[str, str, str]:
    return row.fork, row.branch, row.kind


def _untaken(fork: str, branch: str, kind: str, other: Choice) -> Choice:
    """A branch that no path of a table could take, given another one of its fork."""
    count, gradient = _none_of(other.count), _none_of(other.gradient)
    return Choice(fork, branch, kind, count, gradient, {}, other.times, other.between)


def _none_of(moments: Moments) -> Moments:
    _, e, _, _, ee = moments.parts()
    return Moments(e=e, ee=ee)


# Choices of a table whose trace is gone -----------------------------------------------------------

REGROUPED_NOTE = (
    "divided without the trace: parameters inside a branch, which have no choice, count too"
)
_ARGUMENT = re.compile(r"(.+)\[\d+\] from (.+)", re.DOTALL)
_NUMBERED = re.compile(r"(.*\S) ?\d+", re.DOTALL)


def regrouped(rows: Mapping[str, tuple[Moments, Moments]], labels: bool, empty: Choices) -> Choices:
    """``empty``, with the choices in a table of arguments or labels: by the name of each its count
    and its gradient.
    """
    groups: dict[str, dict[str, tuple[Moments, Moments]]] = {}
    for name, row in rows.items():
        if found := _ARGUMENT.fullmatch(name):
            mine = groups.setdefault(found[1], {})
            mine[_unlike(found[2], mine)] = row
        elif labels:
            stem = _NUMBERED.fullmatch(name)
            groups.setdefault(stem[1] if stem else "label", {})[name] = row
    choices = []
    for fork, branches in groups.items():
        totals = [sum(part.t for part in column) for column in zip(*branches.values())]
        for branch, row in branches.items() if len(branches) > 1 else ():
            parts = [Moments.of(float(part.t), float(e)) for part, e in zip(row, totals)]
            choices.append(Choice(fork, branch, "", parts[0], parts[1]))
    if not choices:
        raise GradtraceError(
            "the trace of this table is gone, and its components are no branches: keep the trace "
            "and call trace.choices(), or measure influence('arguments') or influence('labels')"
        )
    losses = [f"sums over {empty.pairs:,} losses"] if empty.pairs > 1 else []
    notes = (*losses, REGROUPED_NOTE, *empty.notes)
    return replace(empty, rows=tuple(choices), pairs=1, notes=notes)


def _unlike(name: str, known: Mapping[str, object]) -> str:
    """The name, numbered if it is known already."""
    numbered = (f"{name} #{n}" for n in count(2))
    return name if name not in known else next(each for each in numbered if each not in known)
