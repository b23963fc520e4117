"""Curves as SVG files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gradtrace.bench.results import Curve, Figure, Section

COLOURS = ("#1f5a8c", "#8a8a8a", "#b5651d")
LIMIT = "#b03030"
STYLE: dict[str, Any] = {
    "svg.hashsalt": "gradtrace",  # the same curves give the same file
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#666666",
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "legend.frameon": False,
}


def draw(sections: list[Section], folder: Path) -> list[Path]:
    """Draw all figures into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    return [_drawn(figure, folder) for section in sections for figure in section.figures]


def _drawn(figure: Figure, folder: Path) -> Path:
    import matplotlib
    from matplotlib.figure import Figure as Canvas

    path = folder / f"{figure.name}.svg"
    with matplotlib.rc_context(STYLE):
        canvas = Canvas(figsize=(6.0, 3.8), layout="constrained")
        axes = canvas.add_subplot()
        for curve, colour in zip(figure.curves, COLOURS):
            _add(axes, curve, colour)
        axes.set(title=figure.title, xlabel=figure.x, ylabel=figure.y, xscale="log", yscale="log")
        axes.grid(visible=True, which="major", color="#e6e6e6", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.legend(loc="upper left")
        canvas.savefig(path, format="svg", metadata={"Date": None})
    return path


def _add(axes: Any, curve: Curve, colour: str) -> None:
    if curve.kind == "limit":
        axes.plot(curve.x, curve.y, "--", color=LIMIT, linewidth=1.2, label=curve.label)
    else:
        line = "-" if curve.kind == "line" else ""
        axes.plot(curve.x, curve.y, line, marker="o", markersize=4, color=colour, label=curve.label)
