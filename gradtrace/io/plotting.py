"""Horizontal bars by matplotlib, which is imported when a plot is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from math import isfinite
from typing import Any, NamedTuple

from gradtrace.errors import GradtraceError, needs


class Bars(NamedTuple):
    """What is drawn: a bar for each label, with standard errors where they are known."""

    labels: Sequence[str]
    values: Sequence[float | None]
    errors: Sequence[float | None] | None
    axis: str
    title: str


def axes(height: float, ax: Any = None) -> Any:
    """``ax``, or the axes of a new figure of this height in inches."""
    try:
        pyplot = import_module("matplotlib.pyplot")
    except ImportError as error:
        extra = "(or install gradtrace with its extra 'plot')"
        raise GradtraceError(f"{needs('plot()', 'matplotlib')} {extra}") from error
    return pyplot.subplots(figsize=(7, height), layout="constrained")[1] if ax is None else ax


def drawn(bars: Bars, most: int, shares: bool, ax: Any = None) -> Any:
    """Bars from top to bottom in the order given, at most ``most`` of them; returns the axes."""
    count = min(len(bars.labels), max(most, 1))
    ax = axes(1.2 + 0.28 * count, ax)
    places = range(count)
    errors = None if bars.errors is None else _known(bars.errors[:count])
    widths = _known(bars.values[:count])
    ax.barh(places, widths, height=0.7, xerr=errors, error_kw={"capsize": 2, "linewidth": 1})
    ax.set_yticks(places, [literal(label) for label in bars.labels[:count]])
    ax.invert_yaxis()
    ax.margins(y=0.01)
    left = len(bars.labels) - count
    ax.set_title(
        literal(bars.title) + (f" ({left:,} more rows)" if left else ""), fontsize="medium"
    )
    ax.set_xlabel(literal(bars.axis))
    ax.spines[["top", "right"]].set_visible(False)
    if shares:
        percent(ax.xaxis)
    if any(width < 0 for width in widths):
        ax.axvline(0, color="0.5", linewidth=0.8)
    return ax


def divided(
    bars: Mapping[str, Sequence[tuple[str, float]]], most: int, title: str, ax: Any = None
) -> Any:
    """One bar for each key, divided into named parts; at most ``most`` bars. Returns the axes."""
    shown = list(bars.items())[: max(most, 1)]
    ax = axes(1.2 + 0.4 * len(shown), ax)
    for place, (_, parts) in enumerate(shown):
        left = 0.0
        for n, (name, width) in enumerate(parts):
            width = width if isfinite(width) else 0.0
            ax.barh(place, width, left=left, height=0.75, color=f"C{n % 10}", edgecolor="white")
            if width > 0.02 * len(name):
                text = {"ha": "center", "va": "center", "fontsize": "small", "color": "white"}
                ax.text(left + width / 2, place, literal(name), text, clip_on=True)
            left += width
    ax.set_yticks(range(len(shown)), [literal(name) for name, _ in shown])
    ax.invert_yaxis()
    more = len(bars) - len(shown)
    ax.set_title(literal(title) + (f" ({more:,} more)" if more else ""), fontsize="medium")
    ax.spines[["top", "right"]].set_visible(False)
    percent(ax.xaxis)
    return ax


def percent(axis: Any) -> None:
    """Write the ticks of an axis as shares of 1."""
    axis.set_major_formatter(import_module("matplotlib.ticker").PercentFormatter(1.0))


def literal(text: str) -> str:
    """A text whose ``$`` do not begin a formula."""
    return text.replace("$", r"\$")


def _known(values: Sequence[float | None]) -> list[float]:
    """Values as finite floats; 0 where there is none."""
    return [float(x) if x is not None and isfinite(x) else 0.0 for x in values]
