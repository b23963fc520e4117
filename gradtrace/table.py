"""``Table``, the one result: rows with names, to print, plot, save, and add up over losses.

>>> columns = Column("module"), Column("paths", "count"), Column("share", "share")
>>> table = Table("Influence", columns, (("encoder", 12345, 0.75), ("解码器", 67, nan)))
>>> print(table)
Influence
module    paths  share
───────  ──────  ─────
encoder  12,345  75.0%
解码器       67      –
>>> table["encoder"].share, table.shares
(0.75, {'encoder': 0.75, '解码器': nan})

Nothing of the package is imported here but errors, so that every room may return a table.
"""

from __future__ import annotations

import csv
import io
import os
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from html import escape
from importlib import import_module
from math import isfinite, nan, sqrt
from typing import Any, Literal, TypeVar, cast

from gradtrace.errors import GradtraceError, UnknownName, did_you_mean, needs, printable
from gradtrace.files import json_value, write_json, write_text

MAX_ROWS = 40
"""The most rows that are printed."""

MOST_NOTES = 5
"""The most notes of a sum of tables that not all of them have."""

CELL_WIDTH, TOOLTIP_WIDTH = 60, 400
"""The most terminal columns of a text in a cell, and in its tooltip in a notebook."""

ROUNDED_FROM = 10**18
"""Counts from here on are printed rounded: there can be very many paths."""

Kind = Literal["text", "count", "share", "number"]

FORMULAS: dict[str, Callable[..., float]] = {
    "ratio": lambda a, b: a / b if b else nan,
    "root": lambda a: sqrt(a) if a >= 0 else nan,
    "cosine": lambda a, b, c: max(-1.0, min(1.0, a / (sqrt(b) * sqrt(c)))) if b and c else nan,
}
"""How a column follows from others, so that it can be found again in a sum of tables."""


@dataclass(frozen=True)
class Column:
    """A column: its name, its kind of values, and their unit.

    ``adds``: a sum of tables has the sums of its values. ``formula`` of the columns ``of``: its
    values follow from those. A column that is not ``shown`` is not printed, but saved.
    """

    name: str
    kind: Kind = "text"
    unit: str = ""
    adds: bool = False
    formula: str = ""
    of: tuple[str, ...] = ()
    shown: bool = True

    @property
    def header(self) -> str:
        """The name and the unit: ``time (ms)``."""
        return f"{self.name} ({self.unit})" if self.unit else self.name

    def value(self, found: Mapping[str, Any]) -> Any:
        """The value that follows from those of other columns."""
        return FORMULAS[self.formula](*(found[name] for name in self.of))


class Row:
    """One row of a table: ``row["whole norm"]`` or ``row.whole_norm``; ``row.name`` is its first
    value.
    """

    __slots__ = ("_places", "values")

    def __init__(self, places: Mapping[str, int], values: tuple[Any, ...]) -> None:
        self._places, self.values = places, values

    def __getitem__(self, column: str) -> Any:
        if column not in self._places:
            raise UnknownName(f"no column {column!r}{did_you_mean(column, self._places)}")
        return self.values[self._places[column]]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        places = {"name": 0} | {each.replace(" ", "_"): n for each, n in self._places.items()}
        if name not in places:
            raise AttributeError(f"no column {name!r}{did_you_mean(name, places)}")
        return self.values[places[name]]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Row) or list(self._places) != list(other._places):
            return False
        return all(map(_same, self.values, other.values))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        shown = ((name, self.values[at]) for name, at in self._places.items())
        cells = (f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v!r}" for k, v in shown)
        return printable(f"Row({', '.join(cells)})")


T = TypeVar("T", bound="Table")


@dataclass(frozen=True, repr=False)
class Table:
    """Rows under columns, with a title above and notes below; the first column has their names.

    ``rows`` are given as tuples of values. A column whose name begins with ``±`` has the standard
    errors of the column before it. ``about`` says what was asked: the rule, the number of losses.
    """

    title: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    about: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        places = {column.name: at for at, column in enumerate(self.columns)}
        if len(places) < len(self.columns):
            raise ValueError(f"two columns have one name: {[each.name for each in self.columns]}")
        values = [tuple(row.values if isinstance(row, Row) else row) for row in self.rows]
        wrong = next((row for row in values if len(row) != len(places)), None)
        if wrong is not None:
            raise ValueError(f"a row has {len(wrong)} values for {len(places)} columns: {wrong!r}")
        rows = tuple([Row(places, _plain(row)) for row in values])
        object.__setattr__(self, "rows", rows)

    # Rows and columns -----------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __getitem__(self, name: str | tuple[str, ...]) -> Row:
        """The row of this name; of several that have it, as of pairs, give all names."""
        names = name if isinstance(name, tuple) else (name,)
        for row in self.rows:
            if row.values[: len(names)] == names:
                return row
        shown = ", ".join(names)
        raise UnknownName(f"no row {shown!r} in this table{did_you_mean(shown, self.names)}")

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the rows."""
        return tuple(row.values[0] for row in self.rows)

    def column(self, name: str) -> list[Any]:
        """The values of a column, from the first row to the last.

        Args:
            name: Name of the column.

        Returns:
            The values, unrounded.
        """
        return [row.values[self._place(name)] for row in self.rows]

    def _place(self, name: str) -> int:
        names = [column.name for column in self.columns]
        if name not in names:
            raise UnknownName(f"no column {name!r} in this table{did_you_mean(name, names)}")
        return names.index(name)

    @property
    def shares(self) -> dict[str, float]:
        """``{name: value}`` of the first column of shares; nan where there is none."""
        first = next((c.name for c in self.columns if c.kind == "share"), None)
        if first is None:
            raise GradtraceError("this table has no column of shares")
        return dict(zip(self.names, self.column(first)))

    @property
    def errors(self) -> dict[str, float]:
        """``{name: standard error of its share}``; nan if none is known."""
        known = [column.name for column in self.columns if column.name.startswith("±")]
        values = self.column(known[0]) if known else [nan] * len(self)
        return dict(zip(self.names, values))

    def sort(self: T, by: str, *, descending: bool | None = None) -> T:
        """The rows ordered by a column; those without a value come last.

        Args:
            by: Name of the column.
            descending: By default numbers descend and texts ascend.

        Returns:
            The sorted table.
        """
        at = self._place(by)
        known = [row for row in self.rows if not _missing(row.values[at])]
        rest = [row for row in self.rows if _missing(row.values[at])]
        down = self.columns[at].kind != "text" if descending is None else descending
        known.sort(key=lambda row: row.values[at], reverse=down)
        return replace(self, rows=(*known, *rest))

    def top(self: T, n: int, by: str | None = None) -> T:
        """The first ``n`` rows, or the ``n`` of largest |value| in a column.

        Args:
            n: How many rows, from 1 on.
            by: Name of a column; by default the rows' own order.

        Returns:
            The shortened table.
        """
        if not isinstance(n, int) or isinstance(n, bool) or n < 1:
            raise GradtraceError(f"top takes a number of rows from 1 on, not {n!r}")
        rows = list(self.rows)
        if by is not None:
            at = self._place(by)
            known = [row for row in rows if not _missing(row.values[at])]
            rows = sorted(known, key=lambda row: abs(row.values[at]), reverse=True)
        return replace(self, rows=tuple(rows[:n]))

    # Sums -----------------------------------------------------------------------------------------

    @classmethod
    def total(cls, tables: Sequence[Table]) -> Table:
        """The table over the losses of all these tables, with standard errors over them.

        Columns that add are added in the order given, and those of a formula are found again; of
        others the largest number is taken, or the text that all have. An error is the larger of
        what the tables differ by and what their own errors amount to.

        Args:
            tables: Tables that the same call made of different losses.

        Returns:
            One table.

        >>> columns = Column("part"), Column("t", adds=True), Column("e", adds=True)
        >>> columns = *columns, Column("share", "share", formula="ratio", of=("t", "e"))
        >>> a, b = (Table("", columns, (("x", n, 4, n / 4),)) for n in (1, 3))
        >>> Table.total([a, b])["x"]
        Row(part='x', t=4, e=8, share=0.5, ± share=0.25)
        """
        first = tables[0]
        plain = [c for c in first.columns if not c.name.startswith("±")]
        for other in tables[1:]:
            names = [c.name for c in other.columns if not c.name.startswith("±")]
            asked = {(each.about.get("rule"), each.about.get("p")) for each in (first, other)}
            if names != [c.name for c in plain] or len(asked) > 1:
                raise GradtraceError(
                    f"{first.title!r} and {other.title!r} cannot be added: add tables that the "
                    "same call made of other losses"
                )
        columns = list[Column]()
        for c in plain:
            columns.append(c)
            sampled = any(f"± {c.name}" in (e.name for e in t.columns) for t in tables)
            if c.formula == "ratio" and c.kind == "share" and (len(tables) > 1 or sampled):
                columns.append(Column(f"± {c.name}", "share"))
        names = list(dict.fromkeys(row.values[0] for table in tables for row in table))
        every = {name: [t[name] for t in tables if name in t] for name in names}
        rows = tuple(_sum(columns, every[name], len(tables)) for name in names)
        notes = tuple(_notes_of(tables))
        losses = sum(table.about.get("losses", 1) for table in tables)
        about = {**first.about, "losses": losses}
        return Table(first.title, tuple(columns), rows, notes, about)  # type: ignore[arg-type]

    # Display --------------------------------------------------------------------------------------

    @property
    def heading(self) -> str:
        """The title, with the number of losses if there are several."""
        if (losses := self.about.get("losses", 1)) == 1:
            return printable(self.title)
        title, end = self.title, f"{losses:,} losses)"
        return printable(f"{title[:-1]}, {end}" if title.endswith(")") else f"{title} ({end}")

    def text(self, limit: int | None = MAX_ROWS, width: int = CELL_WIDTH) -> str:
        """Aligned lines, as ``print`` shows them.

        Args:
            limit: The most rows; None is all of them.
            width: The most terminal columns of a text.

        Returns:
            The lines, joined.
        """
        shown = self._visible()
        lines = [[c.header for c in shown], *self._cells(limit)]
        cells = [[_brief(text, width) for text in line] for line in lines]
        widths = [max(map(_width, column)) for column in zip(*cells)]
        cells.insert(1, ["─" * size for size in widths])
        left = [column.kind == "text" for column in shown]
        aligned = ("  ".join(map(_aligned, line, widths, left)).rstrip() for line in cells)
        title = [self.heading] if self.title else []
        return "\n".join([*title, *aligned, *map(printable, self._below(limit))])

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """HTML for notebooks, in the page's colours; shortened texts are whole in tooltips."""
        sides = ["left" if c.kind == "text" else "right" for c in self._visible()]
        head = [_tag("th", *cell) for cell in zip(sides, (c.header for c in self._visible()))]
        body = [[_tag("td", *cell) for cell in zip(sides, row)] for row in self._cells(MAX_ROWS)]
        rows = [f"<tr>{''.join(cells)}</tr>" for cells in (head, *body)]
        caption = [f"<caption>{_escaped(self.heading)}</caption>"] if self.title else []
        words = [f"<div>{_escaped(word)}</div>" for word in self._below(MAX_ROWS)]
        table = ['<table style="border-collapse:collapse">', *caption, *rows, "</table>"]
        # A $ in a name would start a formula.
        return "\n".join(['<div class="tex2jax_ignore mathjax_ignore">', *table, *words, "</div>"])

    def to_markdown(self) -> str:
        """The table in Markdown, all rows."""
        shown = self._visible()
        rule = ["---" if column.kind == "text" else "---:" for column in shown]
        texts = [[c.header for c in shown], *self._cells(None)]
        lines = [[printable(text).replace("|", "\\|") for text in line] for line in texts]
        lines.insert(1, rule)
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def to_pandas(self) -> Any:
        """A ``pandas.DataFrame`` with a row for each row, and all columns."""
        pandas = _imported("pandas", "to_pandas()")
        return pandas.DataFrame({column.name: self.column(column.name) for column in self.columns})

    def plot(self, by: str | None = None, *, most: int = 20, ax: Any = None) -> Any:
        """Horizontal bars of a column, with standard errors if there are any.

        Args:
            by: Name of the column; by default the first of shares, else of numbers, of counts.
            most: The most rows to draw.
            ax: ``Axes`` to draw on; new ones by default.

        Returns:
            matplotlib's ``Axes``.
        """
        pyplot = _imported("matplotlib.pyplot", "plot()")
        name = self._plotted() if by is None else by
        at = self._place(name)
        if self.columns[at].kind == "text":
            raise GradtraceError(f"column {name!r} holds texts; plot {self._plotted()!r}")
        rows = [row for row in self.rows if not _missing(row.values[at])]
        shown = rows[: max(most, 1)]
        known = f"± {name}" in (c.name for c in self.columns)
        errors = [_drawn(row[f"± {name}"]) for row in shown] if known else None
        if ax is None:
            height = 1.2 + 0.28 * len(shown)
            ax = pyplot.subplots(figsize=(7, height), layout="constrained")[1]
        places, widths = range(len(shown)), [_drawn(float(row.values[at])) for row in shown]
        ax.barh(places, widths, height=0.7, xerr=errors)
        texts = [n for n, c in enumerate(self.columns) if c.kind == "text"] or [0]
        labels = ["  ".join(printable(row.values[n]) for n in texts[:2]) for row in shown]
        ax.set_yticks(places, [_brief(label, CELL_WIDTH).replace("$", r"\$") for label in labels])
        ax.invert_yaxis()
        more = f" ({len(rows) - len(shown):,} more rows)" if len(rows) > len(shown) else ""
        ax.set_title((self.heading + more).replace("$", r"\$"), fontsize="medium")
        ax.set_xlabel(self.columns[at].header.replace("$", r"\$"))
        ax.spines[["top", "right"]].set_visible(False)
        if self.columns[at].kind == "share":
            percent = import_module("matplotlib.ticker").PercentFormatter
            ax.xaxis.set_major_formatter(percent(1.0))
        return ax

    def _plotted(self) -> str:
        for kind in ("share", "number", "count"):
            for c in self._visible():
                if c.kind == kind and not c.name.startswith("±"):
                    return c.name
        raise GradtraceError("this table has no column of numbers to plot")

    def _visible(self) -> list[Column]:
        return [column for column in self.columns if column.shown]

    def _cells(self, limit: int | None) -> list[list[str]]:
        shown = [(n, column) for n, column in enumerate(self.columns) if column.shown]
        rows = self.rows if limit is None else self.rows[: max(limit, 0)]
        return [[_cell(c.kind, row.values[n], bool(c.formula)) for n, c in shown] for row in rows]

    def _below(self, limit: int | None) -> list[str]:
        """The lines below the rows: how many rows are left out, and the notes."""
        more = 0 if limit is None else len(self.rows) - max(limit, 0)
        left = [f"… and {more:,} more {'row' if more == 1 else 'rows'}"] if more > 0 else []
        return [*([] if self.rows else ["no rows"]), *left, *self.notes]

    # Files ----------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """The table as JSON values; NaN and infinities, which JSON does not have, are texts."""
        fields = {"title": self.title, "notes": self.notes, "about": self.about}
        columns = [vars(column) for column in self.columns]
        found = {**fields, "columns": columns, "rows": [row.values for row in self.rows]}
        return cast("dict[str, Any]", json_value(found))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Table:
        """The inverse of ``to_dict``; of a result that can do more, the table alone.

        Args:
            data: What ``to_dict`` returned.

        Returns:
            The table.
        """
        columns = tuple(Column(**{**each, "of": tuple(each["of"])}) for each in data["columns"])
        kinds = [column.kind for column in columns]
        rows = tuple(tuple(map(_number_again, kinds, row)) for row in data["rows"])
        return Table(data["title"], columns, rows, tuple(data["notes"]), dict(data["about"]))  # type: ignore[arg-type]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the table: ``.json`` has all of it, for ``gradtrace.load``; ``.csv`` its rows.

        Args:
            path: File to write.
        """
        if os.fspath(path).endswith(".json"):
            write_json(path, {"gradtrace": "table", **self.to_dict()})
        elif os.fspath(path).endswith(".csv"):
            lines = io.StringIO()
            csv.writer(lines).writerows([[c.name for c in self.columns], *(r.values for r in self)])
            write_text(path, lines.getvalue())
        else:
            raise GradtraceError(f"{os.fspath(path)!r} is neither .json nor .csv; name it so")


class Tabled:
    """A result that is printed as its ``table()``."""

    __slots__ = ()

    def table(self) -> Table:
        """The table that is printed."""
        raise NotImplementedError

    def __str__(self) -> str:
        return str(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()

    def to_pandas(self) -> Any:
        """A ``pandas.DataFrame`` of the table."""
        return self.table().to_pandas()


# Sums --------------------------------------------------------------------------------------------


def _sum(columns: Sequence[Column], rows: Sequence[Row], tables: int) -> tuple[Any, ...]:
    """The values of one row of a sum: of the rows of this name in so many tables."""
    found: dict[str, Any] = {}
    for column in columns:
        if column.formula or column.name.startswith("±"):
            continue
        values = [row[column.name] for row in rows]
        if column.adds:
            found[column.name] = sum(values[1:], values[0])
        elif column.kind == "text":
            found[column.name] = values[0] if len({*values}) == 1 else ""
        else:
            found[column.name] = max((x for x in values if x is not None), default=None)
    for column in columns:
        if column.formula:
            found[column.name] = column.value(found)
            found[f"± {column.name}"] = _error(column, rows, found, tables)
    return tuple(found[column.name] for column in columns)


def _notes_of(tables: Sequence[Table]) -> Iterator[str]:
    """The notes of all tables, and the most frequent ones that some alone have."""
    found = Counter(note for table in tables for note in dict.fromkeys(table.notes))
    for note, count in found.items():
        if count == len(tables):
            yield note
    for note, count in found.most_common(MOST_NOTES):
        if count < len(tables):
            yield f"{count:,} of {len(tables):,}: {note}"


def _error(column: Column, rows: Sequence[Row], found: Mapping[str, Any], tables: int) -> float:
    """The standard error of a ratio: by what tables differ, and by their own errors."""
    if column.formula != "ratio" or not found[column.of[1]]:
        return nan
    above, below = column.of
    whole, share = float(found[below]), float(found[column.name])
    known = list[float]()
    if tables > 1:
        residual = sum((float(row[above]) - share * float(row[below])) ** 2 for row in rows)
        known.append(residual * tables / (tables - 1))
    own = f"± {column.name}"
    if all(own in row._places for row in rows):
        errors = [(row[own] * float(row[below])) ** 2 for row in rows if isfinite(row[own])]
        known.append(sum(errors))
    return sqrt(max(known)) / abs(whole) if known else nan


# Values ------------------------------------------------------------------------------------------


PLAIN = frozenset({str, int, float, bool, type(None)})


def _plain(row: tuple[Any, ...]) -> tuple[Any, ...]:
    return row if PLAIN.issuperset(map(type, row)) else tuple(map(_plain_number, row))


def _plain_number(value: Any) -> Any:
    """The number in a zero-dimensional tensor or array; anything else unchanged."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else value


def _imported(module: str, what: str) -> Any:
    """A module of a package that only ``what`` needs."""
    try:
        return import_module(module)
    except ImportError as error:
        raise GradtraceError(needs(what, module.partition(".")[0])) from error


def _drawn(value: float) -> float:
    """The length of a bar: 0 for what is not finite."""
    return value if isfinite(value) else 0.0


def _same(a: Any, b: Any) -> bool:
    return bool(a == b or (a != a and b != b))


def _missing(value: Any) -> bool:
    return value is None or value != value


def _number_again(kind: Kind, value: Any) -> Any:
    """A value as it was before JSON, which has texts in place of NaN and infinities."""
    return float(value) if kind in ("share", "number") and isinstance(value, str) else value


def _cell(kind: Kind, value: Any, formula: bool = False) -> str:
    """A value as text; nan is no value among shares, and where a ``formula`` has none.

    >>> _cell("count", 1234567), _cell("share", 0.1234), _cell("number", 3.14159), _cell("text", 1)
    ('1,234,567', '12.3%', '3.142', '1')
    >>> _cell("count", -(2**20000))
    '-3.980e+6020'
    """
    if value is None or ((formula or kind == "share") and value != value):
        return "–"
    if kind == "text" or not isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, int) and abs(value) >= ROUNDED_FROM:
        return f"{Decimal(value):.4g}"
    if kind == "count" and abs(value) < ROUNDED_FROM and value == int(value):
        return f"{int(value):,}"
    return f"{value:.1%}" if kind == "share" and isfinite(value) else f"{value:.4g}"


# Text --------------------------------------------------------------------------------------------


def _brief(text: str, width: int) -> str:
    """Shorten in the middle to ``width`` terminal columns, and at most as many characters.

    >>> _brief("encoder.layers.11.weight", 12)
    'encod…weight'
    """
    few = text if len(text) <= 2 * width else text[:width] + text[-width:]  # long names cost little
    few = printable(few)
    if sum(max(_columns(char), 1) for char in few) <= width:
        return few
    end = _start(few[::-1], width // 2)[::-1]
    return f"{_start(few, (width - 1) // 2)}…{end}"


def _start(text: str, width: int) -> str:
    """The longest prefix that fits; a combining character, of no width, counts as one column."""
    for at, char in enumerate(text):
        width -= max(_columns(char), 1)
        if width < 0:
            return text[:at]
    return text


def _columns(char: str) -> int:
    if unicodedata.category(char) in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def _width(text: str) -> int:
    return sum(map(_columns, text))


def _aligned(text: str, width: int, left: bool) -> str:
    gap = " " * (width - _width(text))
    return text + gap if left else gap + text


def _escaped(text: str, width: int = TOOLTIP_WIDTH) -> str:
    return escape(_brief(text, width), quote=True)


def _tag(tag: str, side: str, text: str) -> str:
    shown, full = _escaped(text, CELL_WIDTH), _escaped(text)
    more = f' title="{full}"' if full != shown else ""
    style = "padding:.2em .8em;background:transparent;border-bottom:1px solid rgba(128,128,128,.35)"
    return f'<{tag} style="text-align:{side};{style}"{more}>{shown}</{tag}>'
