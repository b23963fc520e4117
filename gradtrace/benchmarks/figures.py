"""Curves as SVG files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gradtrace.benchmarks.results import Curve, Figure
from gradtrace.experiments.harness import drawing
from gradtrace.io.atomic_files import make_folder

COLOURS = ("#1f5a8c", "#8a8a8a", "#b5651d")
LIMIT = "#b03030"
STYLE: dict[str, Any] = {
    **drawing.STYLE,
    "svg.hashsalt": "gradtrace",  # the same curves give the same file
    "svg.fonttype": "none",
}


def draw(sections: Iterable[Mapping[str, Any]], folder: Path) -> list[Path]:
    """Draw all figures of sections, as the page's data have them, into a folder."""
    make_folder(folder)
    return [_drawn(_read(figure), folder) for some in sections for figure in some["figures"]]


def _read(figure: Mapping[str, Any]) -> Figure:
    return Figure(**{**figure, "curves": [Curve(**curve) for curve in figure["curves"]]})


def _drawn(figure: Figure, folder: Path) -> Path:
    import matplotlib
    from matplotlib.figure import Figure as Canvas

    path = folder / f"{figure.name}.svg"
    with matplotlib.rc_context(STYLE):
        canvas = Canvas(figsize=(6.0, 3.8), layout="constrained")
        axes = canvas.add_subplot()
        for curve, colour in zip(figure.curves, COLOURS):
            _add(axes, curve, colour, figure.joined)
        axes.set(title=figure.title, xlabel=figure.x, ylabel=figure.y)
        _scale(axes, "log" if figure.log else "linear")
        axes.grid(visible=True, which="major", color="#e6e6e6", linewidth=0.8)
        axes.set_axisbelow(True)
        canvas.legend(loc="outside lower center", ncols=len(figure.curves))
        canvas.savefig(path, format="svg", metadata={"Date": None})
    return path


def _add(axes: Any, curve: Curve, colour: str, joined: bool) -> None:
    look: dict[str, Any] = {"marker": "o", "markersize": 4, "color": colour}
    if curve.limit:
        look = {"marker": "" if joined else "_", "color": LIMIT, "linewidth": 1.2}
    line = ("--" if curve.limit else "-") if joined else "none"
    axes.plot(curve.x, curve.y, linestyle=line, label=curve.label, **look)


def _scale(axes: Any, scale: str) -> None:
    """Set both axes' scale, with numbers written out: 1,000 and 0.1."""
    from matplotlib.ticker import NullFormatter

    axes.set(xscale=scale, yscale=scale)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda number, _: f"{number:,.10g}")
        axis.set_minor_formatter(NullFormatter())
    if scale == "linear":
        axes.set(xlim=(0, None), ylim=(0, None))
