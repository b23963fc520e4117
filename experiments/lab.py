"""What experiments share: rows that are measured once, training, intervals, tables, figures.

An experiment is a module. Its docstring says the question, the expectation, the method and the
limits; ``SETTINGS`` has what is measured in its ``full``, ``quick`` and ``small`` form;
``cells(settings)`` lists it, ``measure(cell)`` measures one cell, and ``tables(rows)`` and
``figure(rows, path)`` show what came out. ``kept(row)`` reads a row of docs/experiments, where it
was written in another form.
"""

from __future__ import annotations

import gzip
import json
import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib import import_module
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from rich.progress import track
from torch import Tensor, nn

from gradtrace.errors import BadFile
from gradtrace.files import append_line, naming, read_lines

Cell = Mapping[str, Any]
Row = dict[str, Any]
Table = tuple[str, Sequence[str], Sequence[Sequence[Any]]]
"""A title, the names of columns, and rows."""

DOCS = Path(__file__).parent.parent / "docs" / "experiments"
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306)
"""95% quantiles of Student's t for 1 to 8 degrees of freedom: of few values, no bootstrap."""

DRAWS = 2_000


# Rows --------------------------------------------------------------------------------------------


def measured(path: Path, name: str, cells: Sequence[Cell], workers: int) -> list[Row]:
    """The rows of all cells, each ``cell | measure(cell)``.

    Each is a line of the file as soon as it is known, and what is in the file is not measured again
    (a line that a killed run left unfinished is no row). Several are measured at once in processes
    of one thread, unless the experiment measures time.
    """
    lines = read_lines(path) if path.exists() and path.stat().st_size else []
    known = {_key(line["cell"]): line["result"] for line in lines}
    missing = [cell for cell in cells if _key(cell) not in known]
    for cell, result in track(_results(name, missing, workers), name, total=len(missing)):
        append_line(path, {"cell": dict(cell), "result": result})
        known[_key(cell)] = json.loads(json.dumps(result))
    return [{**cell, **known[_key(cell)]} for cell in cells]


def _key(cell: Cell) -> str:
    return json.dumps(cell, sort_keys=True)


def _results(name: str, cells: Sequence[Cell], workers: int) -> Iterator[tuple[Cell, Row]]:
    if workers < 2 or len(cells) < 2:
        yield from ((cell, _measure(name, cell)) for cell in cells)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        waiting = {pool.submit(_measure, name, cell): cell for cell in cells}
        try:
            yield from ((waiting[done], done.result()) for done in as_completed(waiting))
        finally:
            pool.shutdown(cancel_futures=True)


def _measure(name: str, cell: Cell) -> Row:
    torch.set_num_threads(1)
    found: Row = import_module(f"experiments.{name}").measure(cell)
    return found


def published(name: str) -> list[Row]:
    """The rows of docs/experiments, as the experiment reads them: those of the files in its
    ``ROWS``, or of the one that has its name. Each has its file's name as ``"rows"``.
    """
    experiment = import_module(f"experiments.{name}")
    files = getattr(experiment, "ROWS", (name.replace("_", "-"),))
    rows = [{**row, "rows": file} for file in files for row in _read(file)]
    return [each for row in rows for each in experiment.kept(row)]


def _read(file: str) -> list[Row]:
    path = DOCS / f"{file}.rows.jsonl.gz"
    with naming(path, "read") as at, gzip.open(at, "rt", encoding="utf-8") as text:
        lines = [json.loads(line) for line in text]
    return [{**line["cell"], **line["result"]} for line in lines if "cell" in line]


# Training and numbers ----------------------------------------------------------------------------


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, losses: Iterable[Callable[[], Tensor]]
) -> list[float]:
    """A step for each loss; their values."""
    found = []
    for loss_of in losses:
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        found.append(loss.item())
    return found


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The mean of what was drawn (seeds, networks), and its 95% interval: by bootstrap, and by
    Student's t where there are fewer than ten values.

    >>> interval([1.0, 1.0, 1.0]), [round(x, 2) for x in interval([1.0, 2.0, 3.0])]
    ((1.0, 1.0, 1.0), [2.0, -0.48, 4.48])
    """
    mean, count = fmean(values), len(values)
    if count < 2:
        return mean, mean, mean
    if count < 10:
        half = STUDENT[count - 2] * stdev(values) / sqrt(count)
        return mean, mean - half, mean + half
    found, random = torch.tensor(values, dtype=torch.float64), torch.Generator().manual_seed(0)
    draws = found[torch.randint(count, (DRAWS, count), generator=random)].mean(1)
    low, high = draws.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return mean, low, high


def spoken(values: Sequence[float]) -> str:
    """``2.21 [2.08, 2.35]``."""
    return said(interval(values)) if len(values) > 1 else f"{values[0]:.2f}"


def said(found: tuple[float, float, float], form: str = ".2f") -> str:
    """A number and its interval: ``2.21 [2.08, 2.35]``."""
    value, low, high = (format(x, form) for x in found)
    return f"{value} [{low}, {high}]"


def resampled(rows: Tensor, of: Callable[[Tensor], Tensor]) -> tuple[float, float, float]:
    """A number that follows from all rows, and its 95% interval by bootstrap over them: ``of`` has
    draws of rows, and gives a value for each draw. Draws without a finite value do not count.

    >>> resampled(torch.ones(5, 2), lambda draws: draws.sum((1, 2)))
    (10.0, 10.0, 10.0)
    """
    value, random = float(of(rows[None])), torch.Generator().manual_seed(0)
    found = of(rows[torch.randint(len(rows), (DRAWS, len(rows)), generator=random)]).double()
    found = found[found.isfinite()]
    if not len(found):
        return value, value, value
    low, high = found.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return value, low, high


def line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Slope and R² of the least-squares line.

    >>> line([1, 2, 3], [2, 4, 6])
    (2.0, 1.0)
    """
    a, b = (torch.tensor(each, dtype=torch.float64) for each in (x, y))
    a, b = a - a.mean(), b - b.mean()
    both = float(a @ b)
    return both / float(a @ a), both**2 / float((a @ a) * (b @ b))


# What is shown -----------------------------------------------------------------------------------


def markdown(table: Table) -> str:
    """A table under its title."""
    title, columns, rows = table
    cells = [[f"{x:.4g}" if isinstance(x, float) else str(x) for x in row] for row in rows]
    lines = [columns, ["---"] * len(columns), *cells]
    return f"### {title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def lines(path: Path, title: str, x: str, y: str, curves: Mapping[str, Any], **axes: Any) -> None:
    """A figure of ``{label: (xs, ys)}``; ``axes`` are properties, such as ``xscale="log"``."""
    from matplotlib.figure import Figure

    canvas = Figure(figsize=(6.4, 4.0), layout="constrained")
    plot = canvas.add_subplot(title=title, xlabel=x, ylabel=y, **axes)
    for label, (xs, ys) in curves.items():
        plot.plot(xs, ys, marker="o", markersize=3, label=label)
    plot.grid(color="#e6e6e6")
    canvas.legend(loc="outside lower center", ncols=4, frameon=False)
    try:
        canvas.savefig(path, dpi=150)
    except OSError as error:
        raise BadFile(f"'{path}' cannot be written ({error.strerror})") from error
