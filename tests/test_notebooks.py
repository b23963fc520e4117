"""The notebooks of ``examples/`` run, and show what they show here; they are small and clean."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import blocks
import notebooks
import pytest
from notebooks import NOTEBOOKS, ROOT

MOST = 100_000
"""Bytes."""


@pytest.fixture(scope="module")
def today() -> dict[Path, Any]:
    """All of them as they run today."""
    return dict(zip(NOTEBOOKS, notebooks.run(*map(notebooks.read, NOTEBOOKS))))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run_and_show_what_is_saved(path: Path, today: dict[Path, Any]) -> None:
    """If not, and it should be so: python tests/notebooks.py."""
    if isinstance(today[path], Exception):
        raise today[path]
    assert notebooks.differences(notebooks.read(path), today[path]) == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_small_and_clean(path: Path) -> None:
    assert path.stat().st_size < MOST
    saved = notebooks.read(path)
    assert saved == notebooks.cleaned(saved)
    counts = [cell.execution_count for cell in saved.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    assert not any("stderr: " in notebooks.printed(cell) for cell in saved.cells)


def test_a_notebook_that_shows_what_is_not_so_is_found() -> None:
    saved = notebooks.read(NOTEBOOKS[0])
    changed = notebooks.read(NOTEBOOKS[0])
    cell = next(cell for cell in changed.cells if notebooks.printed(cell).strip())
    cell.outputs[0] = {"output_type": "stream", "name": "stdout", "text": "something else"}
    found = notebooks.nbformat.from_dict(changed)
    assert notebooks.differences(saved, saved) == []
    assert len(notebooks.differences(saved, found)) == 1
    cell.outputs[0] = {"output_type": "stream", "name": "stderr", "text": "UserWarning: look"}
    found = notebooks.nbformat.from_dict(changed)
    assert "stderr" in notebooks.differences(found, found)[0]


def test_reports_and_large_outputs_are_not_saved() -> None:
    notebook = notebooks.read(NOTEBOOKS[0])
    cell = next(cell for cell in notebook.cells if cell.cell_type == "code")
    shown = {"output_type": "display_data", "metadata": {}}
    cell.outputs = [
        notebooks.nbformat.from_dict(shown | {"data": {"text/plain": "x", "text/html": html}})
        for html in ("<table></table>", "<iframe srcdoc=''></iframe>", "x" * notebooks.LARGE)
    ]
    kept = notebooks.cleaned(notebook).cells[notebook.cells.index(cell)].outputs
    assert [sorted(output.data) for output in kept] == [
        ["text/html", "text/plain"],
        ["text/plain"],
        ["text/plain"],
    ]


GUIDES = {
    "start": "start.md",
    "learning": "guides/learn.md",
    "training": "training.md",
    "semirings": "guides/teach.md",
}
"""The guide that each notebook belongs to."""


def test_the_site_lists_every_notebook_with_a_badge_that_downloads_it() -> None:
    docs = ROOT / "docs"
    assert set(GUIDES) == {path.stem for path in NOTEBOOKS}
    for stem, guide in GUIDES.items():
        assert f"[{stem}.ipynb](../examples/{stem}.ipynb)" in (docs / "notebooks.md").read_text()
        for name in ("notebooks.md", guide):
            up = "../" * name.count("/")
            badge = f"{up}images/notebook.svg)]({up}../examples/{stem}.ipynb)"
            assert f"[![Download the notebook]({badge}" in (docs / name).read_text()
    assert blocks.blocks(docs / "notebooks.md")
