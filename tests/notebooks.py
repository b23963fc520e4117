"""Notebooks of ``examples/``: run, held against what is saved in them, and saved clean.

``python tests/notebooks.py`` runs all, or those named, and saves them with what they print.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import nbformat
from blocks import same
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
LARGE = 20_000
"""Longer HTML outputs are not saved, nor are reports: they are there when one runs the cell."""


def read(path: Path) -> NotebookNode:
    return nbformat.read(path, as_version=4)


def run(*notebooks: NotebookNode) -> list[NotebookNode | CellExecutionError]:
    """The same with the outputs of today, or what made one fail; each in a folder of its own.

    One kernel runs them one after the other, as to start one takes longer than most of them: it
    forgets all names in between.
    """
    settings = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, settings):
        place = {"metadata": {"path": folder}}
        client = NotebookClient(
            nbformat.v4.new_notebook(),
            kernel_name="python3",
            timeout=600,
            resources=place,
            coalesce_streams=True,
        )
        client.startup_timeout = 300
        manager = client.create_kernel_manager()
        manager.transport, manager.ip = "ipc", f"{folder}/kernel"  # files, not ports
        with client.setup_kernel():
            return [_run(client, each, Path(folder, str(n))) for n, each in enumerate(notebooks)]


def _run(
    client: NotebookClient, notebook: NotebookNode, folder: Path
) -> NotebookNode | CellExecutionError:
    folder.mkdir()
    begin = nbformat.v4.new_code_cell(f"%reset -f\nimport os; os.chdir({str(folder)!r}); del os")
    client.nb = nbformat.from_dict({**notebook, "cells": [begin, *notebook.cells]})
    client.reset_execution_trackers()
    try:
        for n, cell in enumerate(client.nb.cells):
            if cell.cell_type == "code":
                client.execute_cell(cell, n)
    except CellExecutionError as error:
        return error
    found = nbformat.from_dict({**client.nb, "cells": client.nb.cells[1:]})
    numbers = count(1)
    for cell in found.cells:
        if cell.cell_type == "code":
            cell.execution_count = next(numbers)
    return cleaned(found)


def cleaned(notebook: NotebookNode) -> NotebookNode:
    """Without what differs from one machine or run to the next."""
    cells = []
    for n, cell in enumerate(notebook.cells):
        kept: dict[str, Any] = {
            "cell_type": cell.cell_type,
            "id": f"cell-{n}",
            "metadata": {},
            "source": cell.source,
        }
        if cell.cell_type == "code":
            kept["execution_count"] = cell.execution_count
            kept["outputs"] = [_small(output) for output in cell.outputs if not _ends_run(output)]
        cells.append(kept)
    return nbformat.from_dict(
        {"cells": cells, "metadata": METADATA, "nbformat": 4, "nbformat_minor": 5}
    )


def _ends_run(output: NotebookNode) -> bool:
    """Whether it is the line by which a Monitor says where its results are; no warning."""
    text = output.get("text", "") if output.get("name") == "stderr" else ""
    return bool(re.fullmatch(r"gradtrace: (traces one step|the first steps)[^\n]*\n", text))


def _small(output: NotebookNode) -> dict[str, Any]:
    kept = dict(output)
    if "data" in kept:
        kept["metadata"] = {}
        kept["data"] = {
            kind: text
            for kind, text in kept["data"].items()
            if kind == "text/plain"
            or (kind == "text/html" and "<iframe" not in text and len(text) < LARGE)
        }
    return kept


def printed(cell: NotebookNode) -> str:
    """The text that a cell shows; what went to stderr, a warning perhaps, is marked."""
    parts = []
    for output in cell.get("outputs", []):
        if output.output_type == "stream":
            parts.append(output.text if output.name == "stdout" else f"stderr: {output.text}")
        elif output.output_type == "error":
            parts.append(f"error: {output.ename}: {output.evalue}")
        else:
            parts.append(output.data.get("text/plain", ""))
    return "\n".join(parts)


def differences(saved: NotebookNode, found: NotebookNode) -> list[str]:
    """Cells that do not print what is saved, or print warnings."""
    told = []
    for n, (old, new) in enumerate(zip(saved.cells, found.cells)):
        before, now = printed(old), printed(new)
        if not same(before, now):
            told.append(f"cell {n} prints\n{now}\nand not\n{before}")
        elif "stderr: " in now:
            told.append(f"cell {n} writes to stderr\n{now}")
    return told


def main(names: list[str]) -> None:
    for path in map(Path, names) if names else NOTEBOOKS:
        (found,) = run(read(path))
        if isinstance(found, CellExecutionError):
            raise found
        nbformat.write(found, path)
        print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
