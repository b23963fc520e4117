"""The page: nothing of the user's in it but base64 and an escaped title; files; notebooks."""

from __future__ import annotations

import errno
import html
import os
import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pages import decoded, read
from torch import Tensor, nn

import gradtrace as gt
from gradtrace import report
from gradtrace.errors import GradtraceError
from gradtrace.io import container
from gradtrace.io.validation import SchemaMismatch
from gradtrace.report import View, encode, page, trace_view
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
        x = gt.label(torch.ones(2, 3), -1, [name, "b", None])
        loss = gt.label(linear(x) * 2, -1, [name, "b"]).square().sum()
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
    if name:
        assert name in told["tables"]["labels"]["name"]


def test_a_title_is_cut(tmp_path: Path) -> None:
    assert page.filled(FRAME, "x" * 500, "").count("x") == page.TITLE_MAX_CHARS - 1


@pytest.mark.parametrize("name", ["</script>.html", "a b'\".html", "🙂.html"])
def test_names_of_files(tmp_path: Path, name: str) -> None:
    file = tmp_path / name.replace("/", "∕")
    trace().report(file)
    assert read(file)["title"] == "Module"


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


@pytest.mark.parametrize("options", [{}, {"granularity": "operator"}, {"rule": "viterbi"}])
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


def test_files_of_the_first_schema(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, write = tmp_path / "old.gradtrace", container.write

    def old(path: Any, kind: str, meta: Any, tensors: dict[str, Tensor]) -> None:
        write(path, kind, meta, {n: t for n, t in tensors.items() if n != "view"})

    with monkeypatch.context() as patch:
        patch.setattr(container, "SCHEMA", 1)
        patch.setattr(container, "write", old)
        trace().save(file)
    found = gt.load(file)
    assert found.influence() == trace().influence()
    with pytest.raises(GradtraceError, match=r"no view .*save again"):
        found.report(tmp_path / "x.html")
    assert "no view" in found._repr_html_()


def test_a_damaged_view_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, write = tmp_path / "bad.gradtrace", container.write
    bad = encode.contained({"name": "x", "operators": np.zeros(3)})

    def wrong(path: Any, kind: str, meta: Any, tensors: dict[str, Tensor]) -> None:
        view = torch.frombuffer(bytearray(bad), dtype=torch.uint8)
        write(path, kind, meta, {**tensors, "view": view})

    monkeypatch.setattr(container, "write", wrong)
    trace().save(file)
    with pytest.raises(container.BadFile, match="do not fit together"):
        gt.load(file)


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_full_disk_leaves_what_was_there(
    tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, made = tmp_path / "x.html", trace()
    file.write_text("before")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, step, full)
    with pytest.raises(container.BadFile, match=r"No space left.*untouched"):
        made.report(file)
    assert file.read_text() == "before" and [*tmp_path.iterdir()] == [file]


def test_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(container.BadFile, match="folder that does not exist"):
        trace().report(tmp_path / "no" / "x.html")


# Two traces, and runs -----------------------------------------------------------------------------


def test_two_traces(tmp_path: Path) -> None:
    made = trace()
    made.save(tmp_path / "t.gradtrace")
    made.report(tmp_path / "x.html", compare=gt.load(tmp_path / "t.gradtrace"))
    data = read(tmp_path / "x.html")
    assert [one["name"] for one in data["traces"]] == ["Module", "Module (2)"]
    assert data["title"] == "Module and Module (2)"
    made.report(tmp_path / "x.html", compare=trace("other"), name=("before", "after"))
    data = read(tmp_path / "x.html")
    assert [one["name"] for one in data["traces"]] == ["before", "after"]
    assert [key for key, _ in data["made"]] == ["gradtrace", "torch", "Python"]
    assert data["schema"] == 1 and data["training"] is None and data["timing"] is None


def test_what_cannot_be_reported(tmp_path: Path) -> None:
    made, file = trace(), tmp_path / "x.html"
    with pytest.raises(GradtraceError, match="a dict cannot be compared"):
        made.report(file, compare={})  # type: ignore[arg-type]
    with pytest.raises(GradtraceError, match="2 names for 1 traces"):
        made.report(file, name=("a", "b"))
    with pytest.raises(GradtraceError, match="name is text"):
        made.report(file, name=[1])  # type: ignore[list-item]
    with pytest.raises(GradtraceError, match="from 1 on"):
        made.report(file, sample=0)
    with pytest.raises(container.BadFile, match="does not exist"):
        made.report(file, training=tmp_path / "none.jsonl")
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
    assert {start for leaf in told["leaves"] for start in leaf["map"]["start"]} <= {-1, -2}
    monkeypatch.setattr(page, "NOTEBOOK_MAX_CHARS", 100)
    assert "too large for a notebook" in made._repr_html_()


def test_a_large_model_in_a_notebook_has_a_smaller_view(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_view, "FULL_VIEW_MAX_OPERATORS", 1)
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


def test_a_view_survives_a_file() -> None:
    view = trace()._view()
    assert torch.equal(report.saved(report.loaded(report.saved(view))), report.saved(view))


BEYOND: dict[tuple[str, str], Callable[[View], int]] = {
    ("operators", "name"): lambda view: len(view.words),
    ("operators", "module"): lambda view: len(view.modules),
    ("operators", "shape"): lambda view: len(view.shapes),
    ("operators", "leaf"): lambda view: len(view.leaves),
    ("edges", "producer"): lambda view: len(view.operators.name),
    ("forest", "operator"): lambda view: len(view.operators.name),
    ("forest", "word"): lambda view: len(view.words),
    ("forest", "next"): lambda view: len(view.forest.next),
    ("forest", "element"): lambda view: -2,
    ("flow", "depth"): lambda view: -1,
}
"""Columns of a view, each with the least number that is out of its bounds, or the greatest."""


@pytest.mark.parametrize(("part", "column"), BEYOND)
def test_an_index_out_of_bounds_is_refused(part: str, column: str) -> None:
    view = trace()._view()
    whole = getattr(view, part)
    changed = getattr(whole, column).copy()
    changed[0] = BEYOND[part, column](view)
    wrong = replace(view, **{part: replace(whole, **{column: changed})})
    with pytest.raises(SchemaMismatch, match=f"^{part} {column} is out of bounds"):
        report.loaded(report.saved(wrong))


@pytest.mark.parametrize("change", [{"module": 99}, {"operator": -1}, {"zero": 7}])
def test_a_leaf_out_of_bounds_is_refused(change: dict[str, int]) -> None:
    view = trace()._view()
    wrong = replace(view, leaves=(replace(view.leaves[0], **change), *view.leaves[1:]))
    with pytest.raises(SchemaMismatch, match=r"^leaves\[0\] \w+ is out of bounds"):
        report.loaded(report.saved(wrong))
