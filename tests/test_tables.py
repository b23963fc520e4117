"""Tables: what people see of them, and what programs get."""

from __future__ import annotations

import importlib
import inspect
import io
import json
import math
import pkgutil
import re
import sys
import unicodedata
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradtrace
from gradtrace.errors import GradtraceError
from gradtrace.io import table as tables
from gradtrace.io.table import TextColumn, TextTable

COLUMNS = (
    TextColumn("name"),
    TextColumn("paths", "count"),
    TextColumn("share", "share"),
    TextColumn("time", "number", "ms"),
)
HOSTILE = (
    "<script>alert(1)</script>",
    "\"><img src=x onerror='alert(1)'>",
    "&lt;b&gt;",
    "$x^2$ \\(y\\)",
    "a\nb\tc\x1b[31m\0",
    "\u202egnp.exe\u2066\u200b\ufeff",
    "\ud800 alone",
    "e" + "\u0301" * 5000,
    "層" * 5000,
    "",
)


def one(kind: str, value: object) -> str:
    """The text of a table's only cell."""
    table = TextTable("", (TextColumn("x", kind),), ((value,),))  # type: ignore[arg-type]
    return table.text().split("\n")[-1].strip()


def breadth(line: str) -> int:
    """Columns of a terminal, counted apart from the code under test."""
    wide = sum(unicodedata.east_asian_width(char) in "WF" for char in line)
    return len(line) + wide - sum(unicodedata.category(char) in ("Mn", "Me") for char in line)


# Text --------------------------------------------------------------------------------------------


def test_a_table_as_text() -> None:
    rows = (
        ("encoder.layers.0", 1234567, 0.1234, 3.14159265),
        ("解码器 🚀", 7, 1.0, 1e-9),
        ("", None, None, math.nan),
    )
    table = TextTable("Influence", COLUMNS, rows, ("2 losses", "weighted by |gradient|"))
    assert str(table) == repr(table) == table.text()
    assert str(table).split("\n") == [
        "Influence",
        "name                  paths   share  time (ms)",
        "────────────────  ─────────  ──────  ─────────",
        "encoder.layers.0  1,234,567   12.3%      3.142",
        "解码器 🚀                 7  100.0%      1e-09",
        "                          –       –        nan",
        "2 losses",
        "weighted by |gradient|",
    ]


@pytest.mark.parametrize(
    ("kind", "value", "text"),
    [
        ("count", 0, "0"),
        ("count", -1234, "-1,234"),
        ("count", 999_999_999_999_999_999, "999,999,999,999,999,999"),
        ("count", 10**18, "1e+18"),
        ("count", 2**64, "1.845e+19"),
        ("count", 10**5000, "1e+5000"),
        ("count", 10**5000 - 1, "1e+5000"),
        ("count", 99_999 * 10**15, "1e+20"),
        ("count", -(7**9999), "-1.366e+8450"),
        ("count", 1234.0, "1,234"),
        ("count", 12.5, "12.5"),
        ("count", 1e30, "1e+30"),
        ("count", math.inf, "inf"),
        ("count", math.nan, "nan"),
        ("count", None, "–"),
        ("count", True, "1"),
        ("count", torch.tensor(1500), "1,500"),
        ("count", np.int64(1500), "1,500"),
        ("count", "n/a", "n/a"),
        ("share", 0.1234, "12.3%"),
        ("share", 0, "0.0%"),
        ("share", 1.5, "150.0%"),
        ("share", -0.25, "-25.0%"),
        ("share", math.nan, "nan"),
        ("share", -math.inf, "-inf"),
        ("share", None, "–"),
        ("share", torch.tensor(0.5), "50.0%"),
        ("number", 1234567.0, "1.235e+06"),
        ("number", 0.000123456, "0.0001235"),
        ("number", 12, "12"),
        ("number", 0.5, "0.5"),
        ("number", -math.inf, "-inf"),
        ("number", 10**400, "1e+400"),
        ("number", None, "–"),
        ("text", None, "–"),
        ("text", 0.123456789, "0.123456789"),
        ("text", ("a", 1), "('a', 1)"),
        ("text", 2**64, "18446744073709551616"),
        ("text", 10**5000, "1e+5000"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_value_as_text(kind: str, value: object, text: str) -> None:
    assert one(kind, value) == text


@given(st.integers(10**18, 10**300), st.sampled_from([1, -1]))
def test_large_counts_are_rounded_right(value: int, sign: int) -> None:
    assert float(one("count", sign * value)) == pytest.approx(sign * value, rel=1e-3)


def test_rows_past_the_limit_are_counted() -> None:
    table = TextTable("", (TextColumn("n", "count"),), tuple((i,) for i in range(1040)))
    lines = str(table).split("\n")
    assert lines[-1] == "… and 1,000 more rows"
    assert len(lines) == 2 + 40 + 1
    assert table.text(1039).endswith("\n… and 1 more row")
    assert table.text(1040).endswith("\n1,039")
    assert table.text(None) == table.text(1040) == table.text(10**9)
    assert table.text(0).split("\n")[2:] == ["… and 1,040 more rows"]
    assert table.text(-5) == table.text(0)


def test_no_rows_no_columns() -> None:
    assert (
        TextTable("t", (TextColumn("a"), TextColumn("b", "count")), ()).text()
        == "t\na  b\n─  ─\nno rows"
    )
    assert "no rows" in TextTable("", (), ()).text()
    assert "no rows" in TextTable("", (), ())._repr_html_()
    assert TextTable("", (), ((),)).text().strip() == ""


def test_long_text_is_cut_in_the_middle() -> None:
    name = "encoder." + "x" * 10_000 + ".weight"
    cell = one("text", name)
    assert len(cell) == 60
    assert cell.startswith("encoder.x") and "…" in cell and cell.endswith("x.weight")
    assert one("text", "x" * 60) == "x" * 60
    assert one("text", "x" * 61) == "x" * 29 + "…" + "x" * 30
    assert len(one("text", "e" + "\u0301" * 5000)) == 60, "marks that take no room are counted"
    assert one("text", "層" * 31) == "層" * 14 + "…" + "層" * 15
    narrow = TextTable("", (TextColumn("module"),), (("encoder.weight",),)).text(width=8)
    assert narrow.split("\n")[0::2] == ["module", "enc…ight"]
    assert TextTable("", (TextColumn("module"),), (("ab",),)).text(width=0).split("\n")[2] == "…"


@pytest.mark.parametrize("name", HOSTILE, ids=ascii)
def test_hostile_names_stay_in_their_cell(name: str) -> None:
    rows = ((name, 1), ("plain", 22))
    table = TextTable(name, (TextColumn("a" + name), TextColumn("b", "count")), rows, (name,))
    text = table.text()
    text.encode()  # no lone surrogates: it can be printed
    assert not [c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Cs") and c != "\n"]
    lines = text.split("\n")
    assert len(lines) == 6 if name else 4
    body = lines[1:5] if name else lines
    assert [breadth(line) for line in body[2:4]] == [breadth(body[1])] * 2
    assert [line.split()[-1] for line in body[2:4]] == ["1", "22"]


def test_marks_of_direction_are_shown_as_escapes() -> None:
    assert one("text", "\u202egnp.exe") == "\\u202egnp.exe"
    assert one("text", "a\r\nb\x1b[0m") == "a\\r\\nb\\x1b[0m"
    assert one("text", "\ud800") == "\\ud800"
    assert one("text", "\U000e0041") == "\\U000e0041"


@given(st.lists(st.text(st.characters(), max_size=90), min_size=1, max_size=5))
def test_columns_line_up(names: list[str]) -> None:
    columns = (TextColumn("a"), TextColumn("b", "count"))
    lines = TextTable("", columns, tuple((name, 7) for name in names)).text().split("\n")
    assert len(lines) == len(names) + 2
    widths = {breadth(line) for line in lines}
    assert len(widths) == 1
    assert widths.pop() <= 60 + 2 + 1


# HTML --------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Tags, attributes and text, as a browser would see them."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.cells: list[str] = []
        self.words = ""
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.open.append(tag)
        self.attributes += attrs
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data
        if self.open and self.open[-1] in ("td", "th"):
            self.cells[-1] += data

    def handle_comment(self, data: str) -> None:
        raise AssertionError("a comment")


TAGS = {"div", "table", "caption", "tr", "th", "td"}


def test_a_table_as_html() -> None:
    table = TextTable("Influence", COLUMNS, (("解码器", 1234, 0.5, None),), ("a note",))
    page = Page(table._repr_html_())
    assert set(page.tags) == TAGS
    assert page.cells == ["name", "paths", "share", "time (ms)", "解码器", "1,234", "50.0%", "–"]
    assert "Influence" in page.words and "a note" in page.words
    sides = re.findall(r"<td style=\"text-align:(\w+)", table._repr_html_())
    assert sides == ["left", "right", "right", "right"]


@pytest.mark.parametrize("name", HOSTILE, ids=ascii)
def test_hostile_names_are_text_in_html(name: str) -> None:
    table = TextTable(
        name, (TextColumn(name), TextColumn("n" + name, "count")), ((name, name),), (name,)
    )
    html = table._repr_html_()
    html.encode()
    page = Page(html)
    assert set(page.tags) <= TAGS
    assert {key for key, _ in page.attributes} <= {"style", "class", "title"}
    told = [value for key, value in page.attributes if key in ("style", "class")]
    assert not any(name and name in (value or "") for value in told)
    assert len(html) < 60_000
    assert len(page.cells) == 4
    if name.isascii() and name.isprintable():
        assert page.cells[2] == name


def test_html_is_quiet_in_light_and_dark() -> None:
    """Colours are the page's; nothing is loaded or run; a $ starts no formula."""
    html = TextTable("t", COLUMNS, (("a", 1, 0.5, 2.0),))._repr_html_()
    assert not re.search(r"[^-]color:|#[0-9a-f]{3}|<style|<script|http|url\(|on\w+=", html)
    assert "mathjax_ignore" in html and "tex2jax_ignore" in html


def test_html_shows_few_rows_and_tells_cut_text() -> None:
    name = "x" * 100 + '"' + "y" * 100
    page = Page(TextTable("", (TextColumn("a"),), ((name,),) * 100)._repr_html_())
    assert page.tags.count("td") == 40
    assert "… and 60 more rows" in page.words
    assert [value for key, value in page.attributes if key == "title"] == [name] * 40
    assert all(len(cell) == 60 for cell in page.cells[1:])
    page = Page(TextTable("", (TextColumn("a"),), (("x" * 10_000,),))._repr_html_())
    assert [len(value or "") for key, value in page.attributes if key == "title"] == [400]


@given(st.text(st.characters(), max_size=200))
def test_any_name_is_text_in_html(name: str) -> None:
    page = Page(TextTable(name, (TextColumn(name),), ((name,),), (name,))._repr_html_())
    assert set(page.tags) <= TAGS


# Values ------------------------------------------------------------------------------------------

ROWS = (
    ("a", 2**60 + 1, 0.123456789, math.nan),
    (None, None, None, None),
    ("c", 3, 1.0, math.inf),
)


def test_dicts_hold_raw_values_for_json() -> None:
    dicts = TextTable("", COLUMNS, ROWS).to_dicts()
    assert dicts == [
        {"name": "a", "paths": 2**60 + 1, "share": 0.123456789, "time": "nan"},
        {"name": None, "paths": None, "share": None, "time": None},
        {"name": "c", "paths": 3, "share": 1.0, "time": "inf"},
    ]
    assert json.loads(json.dumps(dicts, allow_nan=False)) == dicts


def test_dicts_hold_plain_python() -> None:
    row = (torch.tensor(2), np.float32(0.5), True, 10**5000, ("x",), "\ud800")
    columns = tuple(TextColumn(letter) for letter in "abcdef")
    (found,) = TextTable("", columns, (row,)).to_dicts()
    assert list(found.values()) == [2, 0.5, True, hex(10**5000), "('x',)", "\ud800"]
    assert [type(value) for value in found.values()] == [int, float, bool, str, str, str]
    json.dumps(found, allow_nan=False)
    (kept,) = TextTable("", (TextColumn("a"),), ((10**4200,),)).to_dicts()
    assert json.loads(json.dumps(kept)) == {"a": 10**4200}


def test_frames_hold_raw_values() -> None:
    pytest.importorskip("pandas")
    frame = TextTable("", COLUMNS, ROWS).to_pandas()
    assert list(frame.columns) == ["name", "paths", "share", "time"]
    assert frame["paths"].tolist() == [2**60 + 1, None, 3]
    assert frame["share"].dtype == frame["time"].dtype == np.float64
    assert frame["share"][0] == 0.123456789 and math.isnan(frame["share"][1])
    assert math.isnan(frame["time"][0]) and math.isinf(frame["time"][2])
    assert frame["name"].tolist() == ["a", None, "c"]
    whole = TextTable("", (TextColumn("n", "count"),), ((1,), (torch.tensor(2),))).to_pandas()
    assert whole["n"].dtype == np.int64


def test_frames_of_no_rows() -> None:
    pytest.importorskip("pandas")
    frame = TextTable("", COLUMNS, ()).to_pandas()
    assert frame.shape == (0, 4)
    assert list(frame.columns) == [column.name for column in COLUMNS]


def test_without_pandas_the_way_out_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(GradtraceError, match="pip install pandas"):
        TextTable("", COLUMNS, ()).to_pandas()


def test_a_table_is_a_value() -> None:
    table = TextTable("t", COLUMNS, (("a", 1, 0.5, 2.0),))
    assert table == TextTable("t", COLUMNS, (("a", 1, 0.5, 2.0),))
    assert hash(table) == hash(TextTable("t", COLUMNS, (("a", 1, 0.5, 2.0),)))
    with pytest.raises(AttributeError):
        table.title = "u"  # type: ignore[misc]


def test_tables_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="a row has 1 values for 4 columns"):
        TextTable("", COLUMNS, (("a", 1, 0.5, 2.0), ("b",)))
    with pytest.raises(ValueError, match="two columns have one name"):
        TextTable("", (TextColumn("a"), TextColumn("a", "count")), ())


def test_a_long_name_costs_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a name, only its ends are looked at."""
    looked: list[int] = []
    printable = tables.printable
    monkeypatch.setattr(
        tables, "printable", lambda text: looked.append(len(text)) or printable(text)
    )
    str(TextTable("", (TextColumn("a"),), (("x" * 10**7,),)))
    assert max(looked) <= 120


# Sorting, cutting, plotting ----------------------------------------------------------------------

HEADS = TextTable(
    "Heads",
    (
        TextColumn("head"),
        TextColumn("share", "share"),
        TextColumn("± error", "share"),
        TextColumn("weight", "number"),
    ),
    (
        ("b", 0.25, 0.01, -8.0),
        ("a", None, None, 2.0),
        ("$c$", 0.75, math.nan, math.nan),
        ("d", 0.25, 0.02, 4),
    ),
    ("a note",),
)


def heads(table: TextTable) -> list[object]:
    return table.column("head")


def test_rows_are_sorted_by_a_column() -> None:
    assert heads(HEADS.sort("share")) == ["$c$", "b", "d", "a"]
    assert heads(HEADS.sort("share", descending=False)) == ["b", "d", "$c$", "a"]
    assert heads(HEADS.sort("head")) == ["$c$", "a", "b", "d"]
    assert heads(HEADS.sort("weight")) == ["d", "a", "b", "$c$"]
    assert HEADS.sort("share").notes == HEADS.notes
    with pytest.raises(GradtraceError, match="no column 'shares' in this table; did you mean sha"):
        HEADS.sort("shares")


def test_the_top_rows() -> None:
    assert heads(HEADS.top(2)) == ["b", "a"]
    assert heads(HEADS.top(2, "weight")) == ["b", "d"]
    assert heads(HEADS.top(99, "share")) == ["$c$", "b", "d", "a"]
    for wrong in (0, -1, True, 1.5, "3"):
        with pytest.raises(GradtraceError, match="a number of rows from 1 on"):
            HEADS.top(wrong)  # type: ignore[arg-type]
    empty = TextTable("", HEADS.columns, ())
    assert empty.sort("share").top(3).rows == ()


def test_values_that_are_no_numbers_come_last() -> None:
    columns = (TextColumn("x", "number"),)
    table = TextTable("", columns, ((1,), ("many",), (torch.tensor(3.0),), (math.inf,)))
    assert table.sort("x").column("x") == [math.inf, 3.0, 1, "many"]


def test_bars() -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    from matplotlib import pyplot

    ax = HEADS.plot()
    assert [bar.get_width() for bar in ax.patches] == [0.25, 0.0, 0.75, 0.25]
    assert [t.get_text() for t in ax.get_yticklabels()] == ["b", "a", r"\$c\$", "d"]
    assert ax.get_xlabel() == "share" and ax.get_title() == "Heads"
    assert any(getattr(each, "has_xerr", False) for each in ax.containers)
    ax.figure.savefig(io.BytesIO())
    again = HEADS.plot("weight", most=2, ax=ax)
    assert again is ax and ax.get_title() == "Heads (2 more rows)"
    for wrong, text in (("head", "holds texts; plot share or weight"), ("x", "no column 'x'")):
        with pytest.raises(GradtraceError, match=text):
            HEADS.plot(wrong)
    with pytest.raises(GradtraceError, match="no column of numbers to plot"):
        TextTable("", (TextColumn("a"),), ()).plot()
    pyplot.close("all")


def test_a_plot_without_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(GradtraceError, match=r"pip install matplotlib \(.*extra 'plot'"):
        HEADS.plot()


def test_results_keep_their_kind() -> None:
    x = torch.tensor([3.0, 4.0], requires_grad=True)
    trace = gradtrace.trace((x * x).sum(), names={"x": x})
    paths = trace.paths(sample=2)
    best = paths.top(1, "weight")
    assert isinstance(best, type(paths)) and best[0].index == (1,)
    assert [path.index for path in paths.sort("weight", descending=False)] == [(0,), (1,)]
    assert trace.influence().sort("component").names == ("MulBackward0", "SumBackward0")
    assert isinstance(trace.norms().top(1), type(trace.norms()))
    assert isinstance(best[0].sort("gradient"), TextTable)
    assert len(best[0].top(2).rows) == 2
    found = gradtrace.check(lambda model: model(torch.ones(1, 1)).sum(), torch.nn.Linear(1, 1))
    assert len(found.top(1).to_pandas()) == 1


def test_every_result_with_a_table_can_be_sorted_plotted_and_handed_on() -> None:
    found = set()
    for each in pkgutil.walk_packages(gradtrace.__path__, "gradtrace."):
        parts = each.name.split(".")
        if {"cli", "__main__", "triton_contraction"} & set(parts):
            continue
        for kind in vars(importlib.import_module(each.name)).values():
            if inspect.isclass(kind) and kind.__module__ == each.name:
                made = getattr(kind, "table", None)
                hint = getattr(made, "__annotations__", {}).get("return")
                if hint == "TextTable" and kind is not tables.Shown:
                    found.add(kind)
    assert {kind.__name__ for kind in found} >= {"Influence", "Paths", "Flow", "History", "Mass"}
    for kind in found:
        for verb in ("sort", "top", "plot", "to_pandas", "_repr_html_"):
            assert hasattr(kind, verb), (kind, verb)
