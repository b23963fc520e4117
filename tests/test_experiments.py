"""Experiments run in their small form, and the tables of the pages are those of the rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from experiments import __main__ as command
from experiments import lab
from gradtrace.files import read_lines


@pytest.mark.parametrize("name", command.NAMES)
def test_it_runs_in_its_small_form(name: str, tmp_path: Path, capsys: Any) -> None:
    words = [name, "--form", "small", "--workers", "1", "--out", str(tmp_path)]
    assert command.main(words) == 0
    assert (tmp_path / f"{name}.png").stat().st_size
    page = (tmp_path / f"{name}.md").read_text()
    tables = {line for line in page.splitlines() if line.startswith("|")}
    assert tables and tables <= {*capsys.readouterr().out.splitlines()}


def test_a_killed_run_goes_on(tmp_path: Path) -> None:
    words = ["layers", "--form", "small", "--workers", "1", "--out", str(tmp_path)]
    assert command.main(words) == 0
    file = tmp_path / "layers.small.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:-1]) + lines[-1][: len(lines[-1]) // 2])  # killed while writing
    assert command.main(words) == 0
    assert len(read_lines(file)) == len(lines)
    assert command.main(words) == 0  # nothing is left to measure
    assert len(file.read_text().splitlines()) == len(lines) + 1


@pytest.mark.parametrize("name", command.NAMES)
def test_tables_of_the_pages_are_those_of_the_rows(name: str) -> None:
    pages = [path.read_text() for path in lab.DOCS.glob("*.md")]
    experiment = import_module(f"experiments.{name}")
    for table in experiment.tables(lab.published(name)):
        assert any(lab.markdown(table).strip() in page for page in pages), table[0]


@pytest.mark.parametrize("name", command.NAMES)
def test_its_docstring_says_what_is_asked_expected_done_and_left_open(name: str) -> None:
    text = import_module(f"experiments.{name}").__doc__ or ""
    assert text.splitlines()[0].endswith("?")
    for word in ("Expectation", "Method", "Limits"):
        assert f"\n{word}: " in text


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Ctrl-C after two cells."""
    measured = lab._measure
    done: list[int] = []

    def once_more(name: str, cell: lab.Cell) -> lab.Row:
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(1)
        return measured(name, cell)

    monkeypatch.setattr(lab, "_measure", once_more)
    yield done


def test_ctrl_c_keeps_the_rows(stopped: list[int], tmp_path: Path, capsys: Any) -> None:
    words = ["layers", "--form", "small", "--out", str(tmp_path)]
    assert command.main(words) == 130
    assert "goes on from here" in capsys.readouterr().err
    assert len(read_lines(tmp_path / "layers.small.jsonl")) == len(stopped) == 2


def test_bad_questions_get_one_sentence(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "file").write_text("")
    for words, said in (
        (["layerz"], "did you mean layers?"),
        (["layers", "--form", "small", "--out", str(tmp_path / "file")], "cannot be written"),
    ):
        assert command.main(words) == 2
        told = capsys.readouterr().err
        assert said in told and told.count("\n") == 1


def test_a_full_disk_keeps_the_rows(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrote = lab.append_line

    def full(path: Path, data: Any) -> None:
        if path.exists() and len(read_lines(path)):
            path = Path("/dev/full")
        wrote(path, data)

    monkeypatch.setattr(lab, "append_line", full)
    assert command.main(["layers", "--form", "small", "--out", str(tmp_path)]) == 2
    assert "No space left" in capsys.readouterr().err
    assert len(read_lines(tmp_path / "layers.small.jsonl")) == 1


def test_cells_are_measured_side_by_side_as_one_after_the_other(tmp_path: Path) -> None:
    experiment = import_module("experiments.path_entropy")
    cells = experiment.cells({**experiment.SETTINGS["small"], "points": 100, "widths": [4]})
    both = [lab.measured(tmp_path / f"{n}.jsonl", "path_entropy", cells, n) for n in (1, 2)]
    assert json.dumps(both[0]) == json.dumps(both[1])


def test_all_are_one_page(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "NAMES", ["layers"])
    assert command.main(["all", "--form", "small", "--out", str(tmp_path)]) == 0
    page = (tmp_path / "experiments.html").read_text()
    assert page.count("<h1>") == 1 and page.count('src="data:image/png;base64,') == 1
    assert page.count("<table>") == 2 and "experiments.html" in capsys.readouterr().out


def test_the_list_has_a_question_for_each(capsys: Any) -> None:
    assert command.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == command.NAMES
    assert all(line.endswith("?") for line in lines)
