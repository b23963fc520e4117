"""Tables as values: text in a terminal, HTML in a notebook, raw values for programs.

>>> columns = (TextColumn("module"), TextColumn("paths", "count"), TextColumn("share", "share"))
>>> print(TextTable("Influence", columns, (("encoder", 12345, 0.75), ("解码器", 67, None))))
Influence
module    paths  share
───────  ──────  ─────
encoder  12,345  75.0%
解码器       67      –
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from importlib import import_module
from math import floor, isfinite, isnan, log10, nan
from typing import Any, Generic, Literal, Protocol, TypeVar

from gradtrace.errors import GradtraceError, UnknownName, did_you_mean, needs, printable
from gradtrace.io import plotting
from gradtrace.io.strict_json import json_value
from gradtrace.io.tuning import (
    CELL_WIDTH,
    DECIMAL_MAX_BITS,
    MAX_ROWS,
    ROUND_COUNTS_FROM,
    TOOLTIP_WIDTH,
)

RULE = "border-bottom:1px solid rgba(128,128,128,.35)"
CELL = "padding:.2em .8em;background:transparent"
IGNORE = "tex2jax_ignore mathjax_ignore"  # in a notebook, a $ in a name would start a formula


@dataclass(frozen=True)
class TextColumn:
    """A column's name, its kind of values (text, counts, shares of 1, other numbers), and unit."""

    name: str
    kind: Literal["text", "count", "share", "number"] = "text"
    unit: str = ""

    @property
    def header(self) -> str:
        """The name and the unit: ``time (ms)``."""
        return f"{self.name} ({self.unit})" if self.unit else self.name

    @property
    def side(self) -> str:
        """The side to which its values are aligned."""
        return "left" if self.kind == "text" else "right"


T = TypeVar("T", bound="Tabular")


class Shown:
    """What every result with a table can do: print it, plot it, hand it over to pandas.

    A subclass has ``table()``. A column whose name begins with ``±`` holds the standard errors of
    the column before it.
    """

    __slots__ = ()

    def table(self) -> TextTable:
        """The table that is printed."""
        raise NotImplementedError

    def plot(self, by: str | None = None, *, most: int = 20, ax: Any = None) -> Any:
        """Horizontal bars of a column (by default the first of shares, else of numbers), with error
        bars where there are standard errors; at most ``most`` rows.

        Args:
            by: Name of the column.
            most: The most rows to draw.
            ax: ``Axes`` to draw on; new ones by default.

        Returns:
            matplotlib's ``Axes``.
        """
        return self.table().bars(by, most, ax)

    def to_pandas(self) -> Any:
        """A ``pandas.DataFrame`` with a row for each row of the table."""
        return self.table().to_pandas()

    def __str__(self) -> str:
        return str(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


class Tabular(Shown):
    """A result whose rows can be sorted and cut, and stay what they are.

    If it is a dataclass whose field ``rows`` has one item for each row of the table, that is all;
    else a subclass overrides ``_picked``, and ``_row_table`` if ``table()`` has another order.

    >>> columns = (TextColumn("head"), TextColumn("share", "share"))
    >>> table = TextTable("", columns, (("a", 0.25), ("b", None), ("c", 0.75)))
    >>> print(table.sort("share").top(2))
    head  share
    ────  ─────
    c     75.0%
    a     25.0%
    """

    __slots__ = ()

    def _row_table(self) -> TextTable:
        """The table with one line for each item of ``rows``, in their order."""
        return self.table()

    def _shown(self) -> list[int]:
        """The indices of the items of ``rows``, in the order that ``table`` prints them."""
        return list(range(len(self._row_table().rows)))

    def to_pandas(self) -> Any:
        """A ``pandas.DataFrame`` with a row for each item of ``rows``, in their order."""
        return self._row_table().to_pandas()

    def _picked(self: T, order: Sequence[int]) -> T:
        """The same result with these of its rows, in this order."""
        rows: Sequence[Any] = self.rows  # type: ignore[attr-defined]
        return replace(self, rows=tuple(rows[n] for n in order))  # type: ignore[type-var]

    def sort(self: T, by: str, *, descending: bool | None = None) -> T:
        """The same rows ordered by a column; rows without a value come last. Rows of equal values
        keep their order.

        Args:
            by: Name of the column.
            descending: By default numbers descend and texts ascend.

        Returns:
            The sorted result, of the same type.
        """
        return self._picked(_ranked(self._row_table(), by, descending))

    def top(self: T, n: int, by: str | None = None) -> T:
        """The first ``n`` rows as printed, or the ``n`` rows of largest |value| in a column.

        Args:
            n: How many rows, from 1 on.
            by: Name of a column; by default the order that is printed.

        Returns:
            The shortened result, of the same type.
        """
        if not isinstance(n, int) or isinstance(n, bool) or n < 1:
            raise GradtraceError(f"top takes a number of rows from 1 on, not {n!r}")
        if by is None:
            return self._picked(self._shown()[:n])
        return self._picked(_ranked(self._row_table(), by, True, magnitude=True)[:n])


class _Named(Protocol):
    @property
    def name(self) -> str: ...


R = TypeVar("R")
N = TypeVar("N", bound=_Named)


class RowSequence(Generic[R]):
    """Rows one after another."""

    __slots__ = ()
    rows: tuple[R, ...]

    def __iter__(self) -> Iterator[R]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)


class ComponentRows(RowSequence[N]):
    """A row for each component, found by its name."""

    __slots__ = ()

    def __getitem__(self, name: str) -> N:
        for row in self.rows:
            if row.name == name:
                return row
        raise UnknownName(f"no component {name!r} in this table{did_you_mean(name, self.names)}")

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the components."""
        return tuple(row.name for row in self.rows)


def known(x: float) -> float | None:
    """A number for a table, which has none for nan."""
    return None if isnan(x) else x


class Summarised(Shown):
    """A result that says something of all its rows together: sorted or cut, it is a plain table."""

    __slots__ = ()

    def sort(self, by: str, *, descending: bool | None = None) -> TextTable:
        """``TextTable.sort`` of the table.

        Args:
            by: Name of the column.
            descending: By default numbers descend and texts ascend.

        Returns:
            The sorted table.
        """
        return self.table().sort(by, descending=descending)

    def top(self, n: int, by: str | None = None) -> TextTable:
        """``TextTable.top`` of the table.

        Args:
            n: How many rows, from 1 on.
            by: Name of a column; by default the order that is printed.

        Returns:
            The shortened table.
        """
        return self.table().top(n, by)


@dataclass(frozen=True, repr=False)
class TextTable(Tabular):
    """Rows under columns, with a title above and notes below. Values are stored unconverted."""

    title: str
    columns: tuple[TextColumn, ...]
    rows: tuple[tuple[object, ...], ...]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        names = [column.name for column in self.columns]
        if len(set(names)) < len(names):
            raise ValueError(f"two columns have one name: {names}")
        wrong = next((row for row in self.rows if len(row) != len(names)), None)
        if wrong is not None:
            raise ValueError(f"a row has {len(wrong)} values for {len(names)} columns: {wrong!r}")

    def table(self) -> TextTable:
        """The table itself."""
        return self

    def column(self, name: str) -> list[Any]:
        """The values of a column.

        Args:
            name: Name of the column.

        Returns:
            The values, unconverted, from the first row to the last.
        """
        names = {column.name: at for at, column in enumerate(self.columns)}
        if name not in names:
            raise UnknownName(f"no column {name!r} in this table{did_you_mean(name, names)}")
        return [_scalar(row[names[name]]) for row in self.rows]

    def text(self, limit: int | None = MAX_ROWS, width: int = CELL_WIDTH) -> str:
        """Aligned lines, as ``print`` shows them.

        Args:
            limit: The most rows; None is all of them.
            width: The most columns of a text in a cell.

        Returns:
            The lines, joined.

        >>> print(TextTable("", (TextColumn("step", "count"),), ((8,), (9,), (10,))).text(limit=1))
        step
        ────
           8
        … and 2 more rows
        """
        shown = self.lines(limit, width)
        widths = [max(map(_text_width, cells)) for cells in zip(*shown)]
        shown.insert(1, ["─" * size for size in widths])
        sides = [column.side for column in self.columns]
        lines = ["  ".join(map(_aligned, cells, widths, sides)).rstrip() for cells in shown]
        title = [self.heading] if self.title else []
        return "\n".join([*title, *lines, *self.words(limit)])

    @property
    def heading(self) -> str:
        """The title, with unprintable characters escaped."""
        return printable(self.title)

    def lines(self, limit: int | None = MAX_ROWS, width: int = CELL_WIDTH) -> list[list[str]]:
        """The headers and the rows as text, cell by cell, shortened and printable.

        Args:
            limit: The most rows; None is all of them.
            width: The most columns of a text in a cell.

        Returns:
            A list of cells for the header and each row.

        >>> TextTable("", (TextColumn("share", "share"),), ((0.5,), (None,))).lines()
        [['share'], ['50.0%'], ['–']]
        """
        whole = [[column.header for column in self.columns], *self._cells(limit)]
        return [[_brief(text, width) for text in cells] for cells in whole]

    def words(self, limit: int | None = MAX_ROWS) -> list[str]:
        """The lines below the rows: how many rows are left out, and the notes.

        Args:
            limit: The most rows that are shown; None is all of them.

        Returns:
            The lines.
        """
        return list(map(printable, self._notes_below(limit)))

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """HTML for notebooks, in the page's colours; shortened texts are complete in tooltips."""
        titles = [self.title] if self.title else []
        captions = [f"<caption>{_escaped(title, TOOLTIP_WIDTH)}</caption>" for title in titles]
        sides = [column.side for column in self.columns]
        head = [_tag("th", column.side, column.header) for column in self.columns]
        body = [[_tag("td", *cell) for cell in zip(sides, row)] for row in self._cells(MAX_ROWS)]
        rows = [f"<tr>{''.join(cells)}</tr>" for cells in (head, *body)]
        words = [
            f"<div>{_escaped(word, TOOLTIP_WIDTH)}</div>" for word in self._notes_below(MAX_ROWS)
        ]
        table = ['<table style="border-collapse:collapse">', *captions, *rows, "</table>"]
        return "\n".join([f'<div class="{IGNORE}">', *table, *words, "</div>"])

    def to_dicts(self) -> list[dict[str, Any]]:
        """The rows as dicts by column name, ready for JSON.

        Non-finite numbers, which JSON does not have, are strings; so are integers of over 4,200
        digits (in hexadecimal), which Python's JSON does not accept.

        >>> columns = (TextColumn("a"), TextColumn("b", "share"))
        >>> TextTable("", columns, (("x", 0.123456),)).to_dicts()
        [{'a': 'x', 'b': 0.123456}]
        """
        names = [column.name for column in self.columns]
        return [dict(zip(names, map(_plain, row))) for row in self.rows]

    def to_pandas(self) -> Any:
        """A ``pandas.DataFrame`` of the values; None is NaN among shares and other numbers."""
        try:
            pandas = import_module("pandas")
        except ImportError as error:
            raise GradtraceError(needs("to_pandas()", "pandas")) from error
        frame = pandas.DataFrame(index=range(len(self.rows)))
        for at, column in enumerate(self.columns):
            gap = nan if column.kind in ("share", "number") else None
            values = [gap if row[at] is None else _scalar(row[at]) for row in self.rows]
            # By default, pandas rounds counts to floats if one of them is None.
            dtype = object if any(value is None for value in values) else None
            frame[column.name] = pandas.Series(values, dtype=dtype)
        return frame

    def bars(self, by: str | None = None, most: int = 20, ax: Any = None) -> Any:
        """``Tabular.plot`` of this table.

        Args:
            by: Name of the column.
            most: The most rows to draw.
            ax: ``Axes`` to draw on; new ones by default.

        Returns:
            matplotlib's ``Axes``.
        """
        names = [column.name for column in self.columns]
        numbers = [
            c.name
            for kind in ("share", "number", "count")
            for c in self.columns
            if c.kind == kind and not c.name.startswith("±")
        ]
        if by is None and not numbers:
            raise GradtraceError("this table has no column of numbers to plot")
        name = numbers[0] if by is None else by
        values, column = self.column(name), self.columns[names.index(name)]
        if column.kind == "text":
            raise GradtraceError(f"column {name!r} holds texts; plot {' or '.join(numbers)}")
        after = names[names.index(name) + 1 :][:1]
        errors = self.column(after[0]) if after and after[0].startswith("±") else None
        texts = next((n for n, c in enumerate(self.columns) if c.kind != "text"), len(names)) or 1
        labels = ["  ".join(cells[:texts]) for cells in self.lines(None)[1:]]
        bars = plotting.Bars(labels, values, errors, column.header, self.heading)
        return plotting.drawn(bars, most, column.kind == "share", ax)

    def _cells(self, limit: int | None) -> list[list[str]]:
        kinds = [column.kind for column in self.columns]
        rows = self.rows if limit is None else self.rows[: max(limit, 0)]
        return [list(map(_cell, kinds, row)) for row in rows]

    def _notes_below(self, limit: int | None) -> list[str]:
        """The lines below the rows, unescaped: how many rows are left out, and the notes."""
        more = 0 if limit is None else len(self.rows) - max(limit, 0)
        left = [f"… and {more:,} more {'row' if more == 1 else 'rows'}"] if more > 0 else []
        return [*([] if self.rows else ["no rows"]), *left, *self.notes]


# Order -------------------------------------------------------------------------------------------


def _ranked(
    table: TextTable, by: str, descending: bool | None, magnitude: bool = False
) -> list[int]:
    """The indices of a table's rows, ordered by a column; those without a value last."""
    values, keys = table.column(by), list[Any]()
    kind = next(column.kind for column in table.columns if column.name == by)
    if kind == "text":
        keys = [None if value is None else str(value) for value in values]
    else:
        keys = [_number(value, magnitude) for value in values]
    known = [n for n, key in enumerate(keys) if key is not None]
    down = kind != "text" if descending is None else descending
    ranked = sorted(known, key=lambda n: keys[n], reverse=down)
    return [*ranked, *sorted(set(range(len(values))) - set(known))]


def _number(value: object, magnitude: bool) -> Any:
    """A value, or its magnitude, to sort by; None if it is no number."""
    if not isinstance(value, (int, float)) or value != value:
        return None
    return abs(value) if magnitude else value


# Values ------------------------------------------------------------------------------------------


def _cell(kind: str, value: object) -> str:
    """A value as text.

    >>> _cell("count", 1234567), _cell("share", 0.1234), _cell("number", 3.14159), _cell("text", 1)
    ('1,234,567', '12.3%', '3.142', '1')
    """
    value = _scalar(value)
    if value is None:
        return "–"
    if isinstance(value, int) and abs(value) >= (
        2**DECIMAL_MAX_BITS if kind == "text" else ROUND_COUNTS_FROM
    ):
        return _rounded(value)
    if kind == "text" or not isinstance(value, (int, float)):
        return str(value)
    if kind == "count" and abs(value) < ROUND_COUNTS_FROM and value == int(value):
        return f"{int(value):,}"
    return f"{value:.1%}" if kind == "share" and isfinite(value) else f"{value:.4g}"


def _rounded(value: int) -> str:
    """Four digits of an integer that may be larger than any float.

    >>> _rounded(-(2**20000))
    '-3.98e+6020'
    """
    digits = log10(abs(value))
    power = floor(digits)
    lead = f"{10 ** (digits - power):.4g}"
    lead, power = ("1", power + 1) if lead == "10" else (lead, power)
    return f"{'-' if value < 0 else ''}{lead}e+{power}"


def _scalar(value: Any) -> object:
    """The number in a zero-dimensional tensor or array; anything else unchanged."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else value


def _plain(value: object) -> object:
    value = _scalar(value)
    if isinstance(value, int):
        return value if value.bit_length() < DECIMAL_MAX_BITS else hex(value)
    return json_value(value) if value is None or isinstance(value, float) else str(value)


# Text --------------------------------------------------------------------------------------------


def _brief(text: str, width: int) -> str:
    """Shorten in the middle to ``width`` terminal columns, and at most as many characters.

    >>> _brief("encoder.layers.11.weight", 12)
    'encod…weight'
    """
    width = max(width, 1)
    few = (
        text if len(text) <= 2 * width else text[:width] + text[-width:]
    )  # so that very long names cost little
    few = printable(few)
    if sum(max(_char_width(char), 1) for char in few) <= width:
        return few
    end = _start(few[::-1], width // 2)[::-1]
    return f"{_start(few, (width - 1) // 2)}…{end}"


def _start(text: str, width: int) -> str:
    """The longest prefix that fits; a combining character, of no width, counts as one column."""
    for at, char in enumerate(text):
        width -= max(_char_width(char), 1)
        if width < 0:
            return text[:at]
    return text


def _char_width(char: str) -> int:
    if unicodedata.category(char) in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def _text_width(text: str) -> int:
    return sum(map(_char_width, text))


def _aligned(text: str, width: int, side: str) -> str:
    gap = " " * (width - _text_width(text))
    return text + gap if side == "left" else gap + text


def _escaped(text: str, width: int) -> str:
    return escape(_brief(text, width), quote=True)


def _tag(tag: str, side: str, text: str) -> str:
    shown, full = _escaped(text, CELL_WIDTH), _escaped(text, TOOLTIP_WIDTH)
    more = f' title="{full}"' if full != shown else ""
    return f'<{tag} style="text-align:{side};{CELL};{RULE}"{more}>{shown}</{tag}>'
