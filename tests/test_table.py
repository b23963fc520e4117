"""``Table``: what people see of it, what programs get, and sums over losses."""

from __future__ import annotations

import io
import json
import math
import re
import sys
import unicodedata
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradtrace as gt
from gradtrace.errors import GradtraceError, UnknownName
from gradtrace.table import Column, Table

COLUMNS = (
    Column("name"),
    Column("paths", "count"),
    Column("share", "share"),
    Column("time", "number", "ms"),
)
HOSTILE = (
    "<script>alert(1)</script>",
    "\"><img src=x onerror='alert(1)'>",
    "$x^2$ \\(y\\)",
    "a\nb\tc\x1b[31m\0",
    "\u202egnp.exe\u2066\u200b\ufeff",
    "\ud800 alone",
    "e" + "\u0301" * 5000,
    "層" * 5000,
    "",
)


def made(*rows: tuple[Any, ...], columns: tuple[Column, ...] = COLUMNS, title: str = "") -> Table:
    return Table(title, columns, rows)  # type: ignore[arg-type]


def one(kind: str, value: object) -> str:
    """The text of a table's only cell."""
    table = made((value,), columns=(Column("x", kind),))  # type: ignore[arg-type]
    return table.text().split("\n")[-1].strip()


def breadth(line: str) -> int:
    """Columns of a terminal, counted apart from the code under test."""
    wide = sum(unicodedata.east_asian_width(char) in "WF" for char in line)
    return len(line) + wide - sum(unicodedata.category(char) in ("Mn", "Me") for char in line)


# Text --------------------------------------------------------------------------------------------


def test_a_table_as_text() -> None:
    rows = (
        ("layers.0", 1234567, 0.1234, 3.14159265),
        ("解码器 🚀", 7, 1.0, 1e-9),
        ("", None, None, 0),
    )
    table = replace(made(*rows, title="Influence"), notes=("a note",), about={"losses": 1200})
    assert str(table) == repr(table) == table.text()
    assert str(table).split("\n") == [
        "Influence (1,200 losses)",
        "name           paths   share  time (ms)",
        "─────────  ─────────  ──────  ─────────",
        "layers.0   1,234,567   12.3%      3.142",
        "解码器 🚀          7  100.0%      1e-09",
        "                   –       –          0",
        "a note",
    ]
    hidden = replace(table, columns=(*COLUMNS[:3], replace(COLUMNS[3], shown=False)))
    assert "time" not in str(hidden) and hidden["layers.0"].time == 3.14159265


@pytest.mark.parametrize(
    ("kind", "value", "text"),
    [
        ("count", -1234, "-1,234"),
        ("count", 999_999_999_999_999_999, "999,999,999,999,999,999"),
        ("count", 2**64, "1.845e+19"),
        ("count", -(7**9999), "-1.366e+8450"),
        ("count", 12.5, "12.5"),
        ("count", math.inf, "inf"),
        ("count", torch.tensor(1500), "1,500"),
        ("count", np.int64(1500), "1,500"),
        ("count", "n/a", "n/a"),
        ("share", -0.25, "-25.0%"),
        ("share", math.nan, "–"),
        ("share", -math.inf, "-inf"),
        ("number", 0.000123456, "0.0001235"),
        ("number", math.nan, "nan"),
        ("number", None, "–"),
        ("text", 0.123456789, "0.123456789"),
        ("text", ("a", 1), "('a', 1)"),
        ("text", "\u202egnp.exe", "\\u202egnp.exe"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_value_as_text(kind: str, value: object, text: str) -> None:
    assert one(kind, value) == text


def test_rows_past_the_limit_are_counted() -> None:
    table = made(*((i,) for i in range(1040)), columns=(Column("n", "count"),))
    assert str(table).split("\n")[-1] == "… and 1,000 more rows"
    assert table.text(1039).endswith("\n… and 1 more row")
    assert table.text(None) == table.text(1040) == table.text(10**9)
    assert "no rows" in made().text() and "no rows" in made()._repr_html_()


def test_long_text_is_cut_in_the_middle() -> None:
    cell = one("text", "encoder." + "x" * 10_000 + ".weight")
    assert len(cell) == 60
    assert cell.startswith("encoder.x") and "…" in cell and cell.endswith("x.weight")
    assert one("text", "層" * 31) == "層" * 14 + "…" + "層" * 15
    assert len(one("text", "e" + "\u0301" * 5000)) == 60, "marks that take no room are counted"


@pytest.mark.parametrize("name", HOSTILE, ids=ascii)
def test_hostile_names_stay_in_their_cell(name: str) -> None:
    columns = Column("a" + name), Column("b", "count")
    table = replace(made((name, 1), ("plain", 22), columns=columns, title=name), notes=(name,))
    text = table.text()
    text.encode()  # no lone surrogates: it can be printed
    assert not [c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Cs") and c != "\n"]
    lines = text.split("\n")
    body = lines[1:5] if name else lines
    assert [breadth(line) for line in body[2:4]] == [breadth(body[1])] * 2
    assert [line.split()[-1] for line in body[2:4]] == ["1", "22"]


# HTML --------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Tags, attributes and the texts of cells, as a browser would see them."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.cells: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] in ("td", "th"):
            self.cells[-1] += data.removesuffix("\n")


def test_a_table_as_html() -> None:
    """Colours are the page's; nothing is loaded or run; a $ starts no formula."""
    html = made(("解码器", 1234, 0.5, None), title="Influence")._repr_html_()
    cells = Page(html).cells
    assert cells == ["name", "paths", "share", "time (ms)", "解码器", "1,234", "50.0%", "–"]
    assert re.findall(r"<td style=\"text-align:(\w+)", html) == ["left", *["right"] * 3]
    assert not re.search(r"[^-]color:|#[0-9a-f]{3}|<style|<script|http|url\(|on\w+=", html)
    assert "mathjax_ignore" in html and "tex2jax_ignore" in html


@given(st.text(st.characters(), max_size=200) | st.sampled_from(HOSTILE))
def test_any_name_is_text_in_html(name: str) -> None:
    table = made((name, name), columns=(Column(name), Column("n" + name, "count")), title=name)
    page = Page(replace(table, notes=(name,))._repr_html_())
    assert set(page.tags) <= {"div", "table", "caption", "tr", "th", "td"}
    assert {key for key, _ in page.attributes} <= {"style", "class", "title"}
    assert all(len(cell) <= 60 for cell in page.cells)


# Values ------------------------------------------------------------------------------------------

HEADS = replace(
    made(
        ("b", 0.25, 0.01, -8.0),
        ("a", None, None, 2.0),
        ("$c$", 0.75, math.nan, math.nan),
        ("d", 0.25, 0.02, 4),
        columns=(
            Column("head"),
            Column("share", "share"),
            Column("± share", "share"),
            Column("weight", "number"),
        ),
        title="Heads",
    ),
    notes=("a note",),
)


def test_rows_by_name() -> None:
    assert HEADS["d"].weight == HEADS["d"]["weight"] == 4 and HEADS["d"].name == "d"
    assert HEADS.shares["b"] == 0.25 and HEADS.errors["b"] == 0.01 and "a" in HEADS
    with pytest.raises(UnknownName, match="no row 'e'"):
        HEADS["e"]
    with pytest.raises(AttributeError, match="no column 'wieght'; did you mean weight"):
        HEADS["d"].wieght  # noqa: B018
    with pytest.raises(GradtraceError, match="no column of shares"):
        made(columns=COLUMNS[:1]).shares  # noqa: B018


def test_frames_hold_raw_values() -> None:
    pytest.importorskip("pandas")
    frame = made(("a", 2**60 + 1, 0.123456789, math.nan), ("c", 3, 1.0, math.inf)).to_pandas()
    assert list(frame.columns) == ["name", "paths", "share", "time"]
    assert frame["paths"].tolist() == [2**60 + 1, 3] and frame["share"][0] == 0.123456789


@pytest.mark.parametrize("verb", ["to_pandas", "plot"])
def test_without_the_package_the_way_out_is_told(
    verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("pandas", "matplotlib.pyplot"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(GradtraceError, match=r"pip install (pandas|matplotlib)"):
        getattr(HEADS, verb)()


def test_files_hold_all_of_it(tmp_path: Path) -> None:
    HEADS.save(tmp_path / "heads.json")
    assert gt.load(tmp_path / "heads.json") == HEADS
    HEADS.save(tmp_path / "heads.csv")
    lines = (tmp_path / "heads.csv").read_text().splitlines()
    assert lines[:2] == ["head,share,± share,weight", "b,0.25,0.01,-8.0"]
    with pytest.raises(GradtraceError, match=r"neither \.json nor \.csv"):
        HEADS.save(tmp_path / "heads.txt")
    json.dumps(HEADS.to_dict(), allow_nan=False)


def test_tables_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="a row has 1 values for 4 columns"):
        made(("a", 1, 0.5, 2.0), ("b",))
    with pytest.raises(ValueError, match="two columns have one name"):
        made(columns=(Column("a"), Column("a", "count")))


# Sorting, cutting, plotting ----------------------------------------------------------------------


def test_rows_are_sorted_by_a_column() -> None:
    assert HEADS.sort("share").names == ("$c$", "b", "d", "a")
    assert HEADS.sort("share", descending=False).names == ("b", "d", "$c$", "a")
    assert HEADS.sort("head").names == ("$c$", "a", "b", "d")
    assert HEADS.sort("weight").names == ("d", "a", "b", "$c$")
    assert HEADS.sort("share").notes == HEADS.notes
    with pytest.raises(GradtraceError, match="no column 'shares' in this table; did you mean sha"):
        HEADS.sort("shares")


def test_the_top_rows() -> None:
    assert HEADS.top(2).names == ("b", "a") and HEADS.top(2, "weight").names == ("b", "d")
    for wrong in (0, -1, True, 1.5, "3"):
        with pytest.raises(GradtraceError, match="a number of rows from 1 on"):
            HEADS.top(wrong)  # type: ignore[arg-type]


def test_bars() -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    from matplotlib import pyplot

    ax = HEADS.plot()
    assert [bar.get_width() for bar in ax.patches] == [0.25, 0.75, 0.25]
    assert [t.get_text() for t in ax.get_yticklabels()] == ["b", r"\$c\$", "d"]
    assert ax.get_xlabel() == "share" and ax.get_title() == "Heads"
    assert any(getattr(each, "has_xerr", False) for each in ax.containers)
    ax.figure.savefig(io.BytesIO())
    assert HEADS.plot("weight", most=2, ax=ax).get_title() == "Heads (1 more rows)"
    with pytest.raises(GradtraceError, match="holds texts; plot 'share'"):
        HEADS.plot("head")
    pyplot.close("all")


# Sums --------------------------------------------------------------------------------------------

PARTS = (
    Column("part"),
    Column("t", "number", adds=True),
    Column("e", "number", adds=True),
    Column("share", "share", formula="ratio", of=("t", "e")),
    Column("norm", "number", formula="root", of=("e",)),
    Column("depth", "count"),
)


def loss(t: float, e: float, *notes: str, **about: Any) -> Table:
    row = "x", t, e, t / e if e else math.nan, math.sqrt(e), 3
    return replace(made(row, columns=PARTS), notes=notes, about=about)


def test_a_sum_of_tables_by_hand() -> None:
    found = Table.total([loss(1, 4, "both", "one"), loss(3, 12, "both"), loss(0, 0, "both")])
    (row,) = found
    assert (row.t, row.e, row.share, row.norm, row.depth) == (4, 16, 0.25, 4.0, 3)
    assert found.errors["x"] == 0.0 and found.about["losses"] == 3  # all have the same share
    assert found.notes == ("both", "1 of 3: one")
    (row,) = Table.total([loss(1, 4), loss(3, 4)])
    assert row.share == 0.5 and row["± share"] == pytest.approx(math.sqrt(2 * (1 + 1)) / 8)
    first, second = Table.total([loss(1, 4), loss(3, 4)]), Table.total([loss(2, 4), loss(1, 2)])
    both = Table.total([first, second])
    assert both["x"].share == 0.5 and both.about["losses"] == 4
    assert both.errors["x"] >= first.errors["x"] / 2


def test_a_sum_has_the_texts_that_all_tables_have() -> None:
    """What is in series in one batch alone is not in series."""
    columns = Column("x"), Column("t", "count", adds=True), Column("choice")
    one, other = (made(("a", 1, "in series"), ("b", 1, text), columns=columns) for text in "pq")
    found = Table.total([one, other])
    assert (found["a"].choice, found["b"].choice, found["b"].t) == ("in series", "", 2)


def test_sums_of_what_differs_are_refused() -> None:
    for other in (loss(1, 2, rule="edge"), loss(1, 2, p=2.0), HEADS):
        with pytest.raises(GradtraceError, match="cannot be added"):
            Table.total([loss(1, 2, rule="greedy", p=1.0), other])
