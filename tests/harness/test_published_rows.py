"""Rows beside a page: all of them, always the same bytes, and enough to make the page again."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from gradtrace.cli import app
from gradtrace.errors import GradtraceError
from gradtrace.experiments.harness import command, results, runner
from gradtrace.experiments.harness.journal import JournalEntry
from gradtrace.experiments.harness.loading import ExperimentSource
from gradtrace.experiments.harness.published_rows import packed, unpacked
from gradtrace.experiments.harness.table import EXPERIMENTS

DOCS = Path(__file__).parents[2] / "docs" / "experiments"
MINE = '''"""An experiment.

Question: What?

Expectation: This.

Method: So.

Seeds: Some.
"""
from gradtrace.experiments.harness.findings import Findings, Seeds, Table

QUICK = FULL = {"n": 3}
SEEDS, TIMED = Seeds(2, 2), False


def cells(settings, seeds):
    return [{"k": k, "seed": s} for s in range(seeds) for k in range(settings["n"])]


def measure(cell, tick):
    return {"y": cell["k"] / 3 + cell["seed"], "none": float("nan")}


def conclude(rows):
    body = tuple((row.cell["k"], row.result["y"]) for row in rows)
    return Findings(f"There are {len(rows)} rows.", (Table("All", ("k", "y"), body),))
'''
RAN: dict[str, Any] = {
    "schema": 1,
    "experiment": "mine",
    "name": "mine",
    "command": "gradtrace experiment mine.py",
    "form": "full",
    "settings": {"n": 1},
    "seeds": 1,
    "cells": 1,
    "seconds": 0.5,
    "machines": [{"processor": "p", "cores": 2, "system": "s"}],
    "versions": [{"torch": "2"}],
    "date": "2000-01-01",
}
ROW = ({"k": 1}, JournalEntry({"y": 0.1 + 0.2}, 0.25))


def run(*args: object) -> Result:
    return CliRunner().invoke(app, ["experiment", *map(str, args)])


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return path


def test_a_page_is_made_again_of_its_rows(mine: Path, tmp_path: Path) -> None:
    docs, again = tmp_path / "docs", tmp_path / "again"
    assert run(mine, "--out", tmp_path / "o", "--docs", docs).exit_code == 0
    file = docs / "mine.rows.jsonl.gz"
    mine.write_text(MINE.replace('return {"y"', 'raise RuntimeError\n    return {"y"'))
    done = run(mine, "--rows", file, "--out", tmp_path / "p", "--docs", again)
    assert done.exit_code == 0, done.stderr
    for path in docs.glob("*.*"):
        assert (again / path.name).read_bytes() == path.read_bytes(), path.name
    assert "mine.rows.jsonl.gz" in (docs / "mine.md").read_text()
    assert len(unpacked(file).rows) == 6


def test_equal_rows_are_equal_files_and_nothing_is_lost(tmp_path: Path) -> None:
    raw = packed(RAN, [ROW])
    assert raw == packed(dict(reversed(RAN.items())), [ROW])
    assert raw[3:9] == bytes([0, 0, 0, 0, 0, 2])  # no name, no time, the best compression
    path = tmp_path / "a.gz"
    path.write_bytes(raw)
    found = unpacked(path)
    assert found.ran == RAN and found.rows[0] == (ROW[0], ROW[1].result)


@pytest.mark.parametrize(
    "case",
    ["none", "no gzip", "torn", "a row less", "a bad row", "no header", "half a pair", "no number"],
)
def test_a_file_that_is_not_whole_is_told(tmp_path: Path, case: str) -> None:
    path = tmp_path / "rows.jsonl.gz"
    raw = packed(RAN, [ROW])
    header, row = gzip.decompress(raw).splitlines(keepends=True)
    bad = {
        "no gzip": b"rows",
        "torn": raw[:-20],
        "a row less": gzip.compress(header),
        "a bad row": gzip.compress(header + row.replace(b"cell", b"sell")),
        "no header": gzip.compress(row + row),
        "half a pair": gzip.compress(header.replace(b'"name":"', b'"name":"\\uD800') + row),
        "no number": gzip.compress(header.replace(b'{"n":1}', b'{"n":NaN}') + row),
    }
    if case != "none":
        path.write_bytes(bad[case])
    with pytest.raises(GradtraceError, match=r"rows\.jsonl\.gz"):
        unpacked(path)


def test_rows_say_whose_they_are() -> None:
    """The page of an experiment on other data is made again by its own name, or without one."""
    rows = DOCS / "competition-shakespeare.rows.jsonl.gz"
    for name in ("competition-shakespeare", "competition", None):
        (source,) = command.sources(name, False, [rows])
        assert source.name == "competition"
    with pytest.raises(GradtraceError, match="no experiment 'other'"):
        command.sources("other", False, [rows])
    with pytest.raises(GradtraceError, match="give the name"):
        command.sources(None, False, [Path("missing")])


def test_rows_measured_later_take_their_place(mine: Path, tmp_path: Path) -> None:
    """A part of the cells that is run again, or more seeds of it, makes one run with the others."""
    whole, again = tmp_path / "whole", tmp_path / "again"
    assert run(mine, "--seeds", 1, "--out", whole).exit_code == 0
    mine.write_text(MINE.replace('cell["k"] / 3', '100 + cell["k"]').replace("cells(s", "all(s")
                    + "\n\ndef cells(settings, seeds):\n"
                    "    return [c for c in all(settings, seeds) if c['k'] == 1]\n")  # fmt: skip
    assert run(mine, "--seeds", 1, "--out", again).exit_code == 0
    mine.write_text(MINE)
    first, later = (path / "mine" / "rows.jsonl.gz" for path in (whole, again))
    docs = tmp_path / "docs"
    done = run(mine, "--rows", first, "--rows", later, "--out", tmp_path / "o", "--docs", docs)
    assert done.exit_code == 0, done.stderr
    found = unpacked(docs / "mine.rows.jsonl.gz")
    assert [row.result["y"] for row in found.rows] == [0, 101, 2 / 3]
    assert found.ran["cells"] == 3 and len(found.ran["machines"]) == 1
    refused = run(mine, "--rows", later, "--rows", later, "--out", tmp_path / "o")
    assert refused.exit_code == 2 and "2 of the 3 cells" in refused.stderr


def test_rows_of_another_experiment_and_of_all_are_refused(mine: Path, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(packed(RAN | {"experiment": "other"}, [ROW]))
    for args in ((mine, "--rows", path), (mine, "--rows", tmp_path / "none"), ("--all",)):
        done = run(*args, "--rows", path) if args == ("--all",) else run(*args)
        assert done.exit_code == 2 and "gradtrace: " in done.stderr


@pytest.mark.parametrize("path", sorted(DOCS.glob("*.rows.jsonl.gz")), ids=lambda path: path.name)
def test_published_tables_are_those_of_the_published_rows(path: Path) -> None:
    wanted = json.loads((DOCS / path.name.replace(".rows.jsonl.gz", ".json")).read_text())
    name = wanted["experiment"]
    data = runner.recomputed(ExperimentSource(name, EXPERIMENTS[name]), path).data
    again = json.loads(results.text(data))
    for part in ("settings", "seeds", "cells", "sentence", "headline"):
        assert again[part] == wanted[part], part
    assert_same(again["tables"], wanted["tables"])


def assert_same(found: object, wanted: object) -> None:
    """Equal, but for the rounding of floats: Python 3.12 adds more exactly than 3.11."""
    assert type(found) is type(wanted)
    if isinstance(wanted, dict) and isinstance(found, dict):
        assert found.keys() == wanted.keys()
        found, wanted = list(found.values()), list(wanted.values())
    if isinstance(wanted, list) and isinstance(found, list):
        assert len(found) == len(wanted)
        for a, b in zip(found, wanted):
            assert_same(a, b)
    elif isinstance(wanted, float):
        assert found == pytest.approx(wanted, rel=1e-9, nan_ok=True)
    else:
        assert found == wanted
