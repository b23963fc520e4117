"""Draws plots as PNG with matplotlib, in one style (extra ``experiments``)."""

from __future__ import annotations

import importlib.util
import io
import warnings
from collections.abc import Sequence
from math import isfinite, log10, nan
from typing import Any

from gradtrace.experiments.harness.findings import Plot, Series

COLOURS = (
    *("#1f5a8c", "#b5651d", "#4d7c4d", "#8a8a8a", "#7a4f8f", "#b03030", "#2f8f8f", "#a08a2a"),
)
GRID = "#e6e6e6"
STYLE: dict[str, Any] = {
    "font.family": ["DejaVu Sans", "sans-serif"],
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#666666",
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "legend.frameon": False,
}
DPI = 150
WIDE = 12
"""Characters of a category's name from which on names are rotated."""
LEGEND = 80
"""Characters of a legend row that fit below a figure."""
FEW = 2
"""Logarithmic axes of fewer decades get more tick labels than the powers of ten."""


def possible() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def png(plot: Plot) -> bytes:
    """Draw a plot; the same plot gives the same bytes."""
    import matplotlib
    from matplotlib.figure import Figure

    file = io.BytesIO()
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # a user's names, in any script
        canvas = Figure(figsize=(6.4, 4.0), layout="constrained")
        axes = canvas.add_subplot()
        names = _categories(plot)
        for number in range(len(plot.series)):
            _add(axes, plot, number, names)
        axes.set(title=plain(plot.title), xlabel=plain(plot.x), ylabel=plain(plot.y))
        _scale(axes, plot, names)
        axes.grid(visible=True, which="major", color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        if len(plot.series) > 1:
            canvas.legend(loc="outside lower center", ncols=_columns(plot))
        canvas.savefig(file, format="png", dpi=DPI, metadata={"Software": None})
    return file.getvalue()


def plain(text: str) -> str:
    """Escape a text for matplotlib: ``$`` starts a formula, ``_`` hides a label in the legend."""
    return text.replace("$", r"\$") if not text.startswith("_") else " " + text.replace("$", r"\$")


def _colour(plot: Plot, number: int) -> str:
    """The colour of a series: that of the series it is ``like``, or its own."""
    own = [series.label for series in plot.series if not series.like]
    series = plot.series[number]
    label = series.like if series.like in own else series.label
    return COLOURS[(own.index(label) if label in own else number) % len(COLOURS)]


def _columns(plot: Plot) -> int:
    """The number of columns of the legend that fit."""
    longest = max(len(series.label) for series in plot.series)
    return max(1, min(3, len(plot.series), LEGEND // (longest + 8)))


def _categories(plot: Plot) -> list[str]:
    """The category names on the x axis, in order of appearance; empty if x is numeric."""
    found = [x for series in plot.series for x in series.x]
    if not any(isinstance(x, str) for x in found):
        return []
    return list(dict.fromkeys(str(x) for x in found))


def _add(axes: Any, plot: Plot, number: int, names: Sequence[str]) -> None:
    series, colour = plot.series[number], _colour(plot, number)
    x = [float(names.index(str(v))) if names else float(v) for v in series.x]
    y = [float(v) if v is not None and isfinite(v) else nan for v in series.y]
    label = plain(series.label)
    if series.style == "bars":
        _bars(axes, plot, number, (x, y), label)
        return
    line = {"line": "-", "dashed": "--", "points": "none"}.get(series.style, "-")
    marker = "" if series.style == "dashed" else "o"
    size = 4 if len(x) <= 60 or series.style == "points" else 0
    look = {"color": colour, "linestyle": line, "marker": marker, "markersize": size}
    axes.plot(x, y, label=label, **look)
    if len(series.low):
        low, high = list(series.low), list(series.high)
        if series.style == "points" or names:
            axes.errorbar(x, y, _reach(series, y), fmt="none", ecolor=colour, capsize=3)
        else:
            axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)


def _bars(
    axes: Any, plot: Plot, number: int, points: tuple[list[float], list[float]], label: str
) -> None:
    """Draw the bars of a series beside those of the others."""
    barred = [k for k, series in enumerate(plot.series) if series.style == "bars"]
    x, y = points
    gaps = [b - a for a, b in zip(sorted(set(x)), sorted(set(x))[1:])]
    width = 0.8 * min(gaps, default=1.0) / len(barred)
    shift = (barred.index(number) - (len(barred) - 1) / 2) * width
    at = [v + shift for v in x]
    colour = _colour(plot, number)
    axes.bar(at, y, width=width, label=label, color=colour)
    series = plot.series[number]
    if len(series.low):
        axes.errorbar(at, y, _reach(series, y), fmt="none", ecolor="#444444", capsize=3)


def _reach(series: Series, y: Sequence[float]) -> list[list[float]]:
    """The lengths of error bars below and above, for matplotlib."""
    below = [max(v - low, 0.0) for v, low in zip(y, series.low)]
    return [below, [max(high - v, 0.0) for v, high in zip(y, series.high)]]


def _scale(axes: Any, plot: Plot, names: Sequence[str]) -> None:
    """Set the scales and tick labels: logarithmic if requested and possible; 1,000 and 0.1."""
    low_high = [v for s in plot.series for part in (s.y, s.low, s.high) for v in part]
    _numbers(axes, "y", low_high, plot.log_y)
    if not names:
        _numbers(axes, "x", [x for series in plot.series for x in series.x], plot.log_x)
        return
    turned = 30 if max(map(len, names)) * len(names) > 5 * WIDE else 0
    look = {"rotation": turned, "ha": "right" if turned else "center"}
    axes.set_xticks(range(len(names)), [plain(name) for name in names], **look)


def _numbers(axes: Any, letter: str, values: Sequence[Any], log: bool) -> None:
    """Set the scale of one axis and its tick positions."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    axis = axes.yaxis if letter == "y" else axes.xaxis
    seen = [float(v) for v in values if v is not None and isfinite(v)]
    positive = [v for v in seen if v > 0]
    if log and positive:
        axes.set(**{f"{letter}scale": "log"})
        decades = log10(max(positive) / min(positive))
        if decades < FEW:  # powers of ten alone would leave it without labels
            axis.set_major_locator(LogLocator(subs=(1, 2, 5) if decades > 1 else range(1, 10)))
        axis.set_minor_formatter(NullFormatter())
    elif seen and all(v == int(v) for v in seen):
        axis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True))
    axis.set_major_formatter(FuncFormatter(_power))


def _power(number: float, _: object) -> str:
    """A tick label: 1,000 and 0.1, but 1e-12."""
    return f"{number:,.10g}" if number == 0 or 1e-4 <= abs(number) < 1e7 else f"{number:.3g}"
