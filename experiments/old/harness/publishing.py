"""Writes the output files of experiments: results, pictures, pages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from gradtrace.experiments.harness import drawing, page, published_rows, results
from gradtrace.experiments.harness.findings import Plot
from gradtrace.experiments.harness.results import write
from gradtrace.experiments.harness.table import EXPERIMENTS

INDEX = "index.html"


def publish(data: dict[str, Any], plots: Iterable[Plot], folder: Path, rows: bytes = b"") -> Path:
    """Write ``results.json``, a PNG for each plot, an SVG for each drawing, the rows as one file,
    and the page.
    """
    pictures = {plot.name: drawing.png(plot) for plot in plots} if drawing.possible() else {}
    write(folder / results.FILE, results.text(data))
    if rows:
        write(folder / published_rows.FILE, rows)
    for name, content in pictures.items():
        write(folder / f"{file_name(name)}.png", content)
    for title, svg in data["drawings"].items():
        write(folder / f"{file_name(title)}.svg", svg)
    write(folder / INDEX, page.alone(data, pictures))
    return folder / INDEX


def gather(out: Path) -> Path:
    """Write one page of all experiments that have results in a folder."""
    found = []
    for path in out.glob(f"*/{results.FILE}"):
        if data := results.read(path):
            found.append((data, dict(pictures(data, path.parent))))
    found.sort(key=lambda one: _order(one[0]))
    write(out / INDEX, page.several(found))
    return out / INDEX


def document(data: dict[str, Any], folder: Path, docs: Path) -> None:
    """Write an experiment's Markdown (a page, and one with its other figures and tables), JSON,
    rows and pictures, and the list of all there.
    """
    name = results.name(data)
    files = {}
    rows = folder / published_rows.FILE
    if rows.exists():
        files[published_rows.FILE] = f"{file_name(name)}.{published_rows.FILE}"
        write(docs / files[published_rows.FILE], rows.read_bytes())
    for title, kind in [*((p["name"], "png") for p in data["plots"]),
                        *((title, "svg") for title in data["drawings"])]:  # fmt: skip
        drawn = folder / f"{file_name(title)}.{kind}"
        if drawn.exists():
            files[title] = f"{file_name(name)}-{drawn.name}"
            write(docs / files[title], drawn.read_bytes())
    write(docs / f"{file_name(name)}.json", results.text(data))
    if more := page.more(data, files):
        files[page.MORE] = f"more/{file_name(name)}.md"
        write(docs / files[page.MORE], more)
    write(docs / f"{file_name(name)}.md", page.markdown(data, files))
    every = [found for path in docs.glob("*.json") if (found := results.read(path))]
    write(docs / "index.md", page.index(sorted(every, key=_order)))


def file_name(name: str) -> str:
    """A name reduced to characters that are safe in a file name."""
    return re.sub(r"[^A-Za-z0-9-]+", "-", name).strip("-").lower()[:80] or "plot"


def pictures(data: dict[str, Any], folder: Path) -> Iterator[tuple[str, bytes]]:
    """The figures that were drawn into an experiment's folder, by the name of the plot."""
    for plot in data["plots"]:
        path = folder / f"{file_name(plot['name'])}.png"
        if path.exists():
            yield plot["name"], path.read_bytes()


def _order(data: Mapping[str, Any]) -> tuple[int, str, str]:
    """Sort key: our experiments in their listed order, then others; runs on other data follow."""
    names, experiment = list(EXPERIMENTS), data["experiment"]
    place = names.index(experiment) if experiment in names else len(names)
    return place, experiment, results.name(data)
