"""The page: nothing of the user's in it but base64 and an escaped title; files; notebooks."""

from __future__ import annotations

import errno
import html
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pages import decoded, read
from torch import nn

import gradtrace as gt
from gradtrace.errors import BadFile, GradtraceError
from gradtrace.report import building, encode, page
from gradtrace.table import Column, Table
from gradtrace.traced import Trace

HOSTILE = [
    "</script><script>alert(1)</script>",
    "<!--<script>",
    "]]><img src=x onerror=alert(1)>",
    "\"'`${x}",
    "\u202eabc\u2066",
    "x" * 10_000,
    "🙂\ud800\x00",
    page.DATA,
    page.TITLE,
    "",
]
FRAME = f"<!doctype html><title>{page.TITLE}</title><body><script>{page.DATA}</script>"


@pytest.fixture(autouse=True)
def frame(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small template: how the real one looks is no matter here."""
    monkeypatch.setattr(page, "template", lambda: FRAME)


def model(name: str = "mix") -> nn.Module:
    torch.manual_seed(0)
    found = nn.Module()
    found.add_module(name.replace(".", "·") or "empty", nn.Linear(3, 2))
    return found


def trace(name: str = "mix", **options: Any) -> Trace:
    found = model(name)
    (linear,) = found.children()
    with gt.watch(found) as watch:
        loss = linear(torch.ones(2, 3)).square().sum()
    return watch.trace(loss, **options)


class Tags(HTMLParser):
    """What a browser would see of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.comments: list[str] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)

    def handle_comment(self, data: str) -> None:
        self.comments.append(data)

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_names_are_never_markup(tmp_path: Path, name: str) -> None:
    file = tmp_path / "x.html"
    trace(name).report(file, name=name)
    text = file.read_text("utf-8")
    assert text.isascii()
    found = Tags(text)
    assert found.tags == ["title", "body", "script"] and not found.comments
    body = re.fullmatch(
        r"<!doctype html><title>(.*)</title><body><script>([A-Za-z0-9+/=]+)</script>", text, re.S
    )
    assert body and not re.search("[<>\"']", body[1])
    data = decoded(body[2])
    assert data["title"] == name
    (told,) = data["traces"]
    assert told["name"] == name
    assert (name.replace(".", "·") or "empty") in [m["name"] for m in told["modules"]]


def test_a_title_is_cut(tmp_path: Path) -> None:
    assert page.filled(FRAME, "x" * 500, "").count("x") == page.TITLE_MAX_CHARS - 1


def test_a_template_that_is_missing_or_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(page.resources, "files", lambda _: Path("/nowhere"))
    with pytest.raises(GradtraceError, match=r"template is missing.*make web"):
        page.template()
    with pytest.raises(GradtraceError, match="0 times in place of once"):
        page.filled("<title></title>", "a", "b")


def test_the_template_in_the_package_has_its_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    text = page.filled(page.template(), "a title", "H4sIdata")
    assert "<title>a title</title>" in text and text.count("H4sIdata") == 1


# Files --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"rule": "viterbi"}])
def test_a_saved_trace_has_the_same_report(tmp_path: Path, options: dict[str, str]) -> None:
    made = trace(**options)
    made.save(tmp_path / "t.gradtrace", sample=30, seed=2)
    made.report(tmp_path / "a.html", sample=30, seed=2, name="same")
    gt.load(tmp_path / "t.gradtrace").report(tmp_path / "b.html", name="same")
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()


def test_a_report_after_the_weights_have_changed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    with gt.watch(net) as watch:
        loss = net(torch.ones(1, 3)).square().sum()
    made, late = watch.trace(loss), watch.trace(loss)
    made.report(tmp_path / "before.html")
    with torch.no_grad():
        net[1].weight.mul_(2)
    made.report(tmp_path / "after.html")
    assert (tmp_path / "before.html").read_bytes() == (tmp_path / "after.html").read_bytes()
    with pytest.raises(GradtraceError, match="changed in place"):
        late.report(tmp_path / "late.html")
    assert not (tmp_path / "late.html").exists()
    assert "changed in place" in late._repr_html_()


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_full_disk_leaves_what_was_there(
    tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, made = tmp_path / "x.html", trace()
    file.write_text("before")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, step, full)
    with pytest.raises(BadFile, match="No space left"):
        made.report(file)
    assert file.read_text() == "before" and [*tmp_path.iterdir()] == [file]


# What else a page has ----------------------------------------------------------------------------


def test_names_and_versions(tmp_path: Path) -> None:
    trace().report(tmp_path / "x.html", name="mine")
    data = read(tmp_path / "x.html")
    assert data["title"] == "mine" and [one["name"] for one in data["traces"]] == ["mine"]
    assert [key for key, _ in data["made"]] == ["gradtrace", "torch", "Python"]
    assert data["schema"] == 1 and data["training"] is None and data["timing"] is None


def test_a_run_beside_a_trace(tmp_path: Path) -> None:
    shares = ("share a", "weighted a", "share b", "weighted b")
    columns = (
        Column("step", "count"),
        Column("loss", "number"),
        *(Column(n, "share") for n in shares),
    )
    rows = tuple((n, 1.0, 0.25, 0.5, float("nan"), 0.0, 0.01, "a note") for n in (0, 5))
    columns = *columns, Column("cost", "share"), Column("note")
    history = Table("Run", columns, rows, ("all",), {"running": True})
    about = {"slope": 1e-3, "grows": True}
    seconds = tuple((n, 0.1) for n in range(9_000))
    columns = Column("step", "count"), Column("seconds", "number")
    times = Table("Times", columns, seconds, ("slows down",), about)
    trace().report(tmp_path / "x.html", training=(history, times))
    data = read(tmp_path / "x.html")
    told = data["training"]
    assert (told["step"], told["components"]) == ([0, 5], ["a", "b"])
    assert told["share"][0] == [0.25, 0.25] and told["weighted"][1] == [0.0, 0.0]
    assert told["running"] and told["cost"] == 0.01 and told["notes"] == ["all", "a note"]
    assert data["timing"]["grows"] and data["timing"]["verdict"] == "slows down"
    assert data["timing"]["slope"] == 1e-3 and data["timing"]["low"] == "nan"
    assert len(data["timing"]["step"]) == 5_000 and data["timing"]["step"][-1] == 8_999


def test_what_cannot_be_reported(tmp_path: Path) -> None:
    made, file = trace(), tmp_path / "x.html"
    with pytest.raises(GradtraceError, match="name is text"):
        made.report(file, name=[1])  # type: ignore[arg-type]
    with pytest.raises(GradtraceError, match="from 1 on"):
        made.report(file, sample=0)
    with pytest.raises(GradtraceError, match=r"give gt\.load.*two tables"):
        made.report(file, training="run.jsonl")  # type: ignore[arg-type]
    assert not file.exists()


# Notebooks ----------------------------------------------------------------------------------------


def framed(text: str) -> str:
    found = re.fullmatch(r'<iframe srcdoc="([^"]*)" [^<>]*></iframe>', text)
    assert found
    return html.unescape(found[1])


@pytest.mark.parametrize("name", HOSTILE[:5], ids=range(5))
def test_a_trace_in_a_notebook(tmp_path: Path, name: str) -> None:
    made = trace(name)
    text = made._repr_html_()
    assert Tags(text).tags == ["iframe"] and "sandbox=" in text
    made.report(tmp_path / "x.html")
    assert framed(text) == (tmp_path / "x.html").read_text()
    made.save(tmp_path / "t.gradtrace")
    assert framed(gt.load(tmp_path / "t.gradtrace")._repr_html_()) == framed(text)


def test_a_large_report_in_a_notebook_has_no_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    made = trace()
    whole = made._repr_html_()
    monkeypatch.setattr(page, "NOTEBOOK_MAX_CHARS", len(framed(whole)) - 1)
    data = decoded(re.findall(r"<script>(.*)</script>", framed(made._repr_html_()))[0])
    (told,) = data["traces"]
    assert told["forest"]["next"] == [] and any("left out" in note for note in told["notes"])
    assert {start for leaf in told["leaves"] for start in leaf["start"]} <= {-1, -2}
    monkeypatch.setattr(page, "NOTEBOOK_MAX_CHARS", 100)
    assert "too large for a notebook" in made._repr_html_()


def test_a_large_model_in_a_notebook_has_a_smaller_view(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "FULL_VIEW_MAX_OPERATORS", 1)
    data = decoded(re.findall(r"<script>(.*)</script>", framed(trace()._repr_html_()))[0])
    notes = data["traces"][0]["notes"]
    assert any("smaller view" in note and "report.html" in note for note in notes)


# The container ------------------------------------------------------------------------------------


def test_the_container() -> None:
    data = {
        "a": np.array([1, -2], dtype=np.int32),
        "b": [np.array([], dtype=np.float64), np.array([1, 2, 3], dtype=np.uint8)],
        "c": np.array([0.5, np.nan], dtype=np.float32),
        "d": [float("nan"), float("inf"), -float("inf"), None, True, "\u2028\ud800"],
    }
    text = encode.lettered(encode.contained(data))
    assert text == encode.lettered(encode.contained(data))
    found = decoded(text)
    assert found["a"] == [1, -2] and found["b"] == [[], [1, 2, 3]]
    assert found["c"][0] == 0.5 and found["c"][1] != found["c"][1]
    assert found["d"] == ["nan", "inf", "-inf", None, True, "\u2028\ud800"]
    again = encode.read(encode.contained(data))
    assert again["b"][1].tolist() == [1, 2, 3]
