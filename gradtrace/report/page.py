"""Pages: a template from the wheel, with the data of a report inserted as one string; as a file, or
in a notebook's output (``<iframe srcdoc>``, which VS Code, Lab and Colab show).
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from html import escape
from importlib import resources

import numpy as np
import torch

from gradtrace.errors import GradtraceError, printable
from gradtrace.io import container
from gradtrace.report.encode import contained, lettered
from gradtrace.report.model import (
    UNFOLLOWED,
    Attribution,
    Forest,
    HeatMap,
    Report,
    Timing,
    Training,
    View,
)
from gradtrace.report.tuning import FRAME_HEIGHT_PX, NOTEBOOK_MAX_CHARS, TITLE_MAX_CHARS

SCHEMA = 1
"""Version of the data that the page reads."""

TITLE, DATA = "<!--gradtrace-title-->", "<!--gradtrace-data-->"
"""Placeholders of the title and the data. Nothing else of a report is in the page as text: base64
has no character with a meaning in HTML or JavaScript, and the title is escaped."""

LIGHTER = (
    "to keep the notebook small the paths of single elements are left out; "
    ".report('report.html') writes all"
)
TOO_LARGE = "its report is too large for a notebook; .report('report.html') writes it to a file"


def report(
    views: Sequence[View],
    names: str | Sequence[str] | None = None,
    training: Training | None = None,
    timing: Timing | None = None,
    attribution: Attribution | None = None,
) -> Report:
    """A report of zero, one or two traces, under ``names`` or their own names."""
    given = [names] if isinstance(names, str) else list(names or ())
    if not all(isinstance(name, str) for name in given):
        raise GradtraceError(f"name={names!r}: a report's name is text, or one for each trace")
    if len(given) > max(1, len(views)):
        raise GradtraceError(f"{len(given)} names for {len(views)} traces: give one for each")
    called = given + [view.name for view in views[len(given) :]]
    if len(called) > 1 and called[1] == called[0]:
        called[1] += " (2)"  # names must differ
    versions = {
        "gradtrace": sys.modules["gradtrace"].__version__,
        "torch": torch.__version__,
        "Python": platform.python_version(),
    }
    return Report(
        SCHEMA,
        " and ".join(called) if called else "Training",
        tuple((name, str(version)) for name, version in versions.items()),
        tuple(replace(view, name=name) for view, name in zip(views, called)),
        training,
        timing,
        attribution,
    )


def write(path: str | os.PathLike[str], contents: Report) -> None:
    """Write a report to a file, atomically."""
    container.put(path, page(contents))


def page(contents: Report) -> str:
    """A report as one self-contained HTML file."""
    return filled(template(), contents.title, lettered(contained(contents)))


def filled(frame: str, title: str, data: str) -> str:
    """A template with the title and the data inserted; all in ASCII, so that no bidirectional
    control or lone surrogate of a title is in the file.

    >>> filled(f"<title>{TITLE}</title><script>{DATA}</script>", "</title>", "abc=")
    '<title>&lt;/title&gt;</title><script>abc=</script>'
    """
    for placeholder in (TITLE, DATA):
        if frame.count(placeholder) != 1:
            raise GradtraceError(
                f"the report's template holds {placeholder!r} {frame.count(placeholder)} times in "
                "place of once: install gradtrace again, or build its page (make web)"
            )
    short = title if len(title) <= TITLE_MAX_CHARS else title[: TITLE_MAX_CHARS - 1] + "…"
    text = escape(printable(short)).encode("ascii", "xmlcharrefreplace").decode()
    return frame.replace(TITLE, text).replace(DATA, data)


def template() -> str:
    """The page as it was built, without data."""
    try:
        return resources.files("gradtrace.report").joinpath("template.html").read_text("utf-8")
    except OSError as error:
        raise GradtraceError(
            "the report's template is missing from this installation: install gradtrace again, or, "
            "in a clone of it, build the page with make web"
        ) from error


# In notebooks -------------------------------------------------------------------------------------


def framed(view: Callable[[], View], called: str) -> str:
    """HTML for notebooks: a report in a sandboxed frame, which can run scripts and access nothing
    outside it, without paths if it is large; or a text that says why there is none.
    """
    try:
        found = view()
        text = page(report([found]))
        if len(text) > NOTEBOOK_MAX_CHARS:
            text = page(report([_without_paths(found)]))
        if len(text) > NOTEBOOK_MAX_CHARS:
            raise GradtraceError(TOO_LARGE)
    except GradtraceError as error:
        return f"<p>{escape(printable(called))}</p><p>{escape(str(error))}</p>"
    style = "width:100%;border:1px solid rgba(128,128,128,.35);border-radius:6px"
    return (
        f'<iframe srcdoc="{escape(text)}" sandbox="allow-scripts allow-downloads" '
        f'title="{escape(printable(found.name))}" width="100%" height="{FRAME_HEIGHT_PX}" '
        f'style="{style}"></iframe>'
    )


def _without_paths(view: View) -> View:
    """A view without its paths, which take most of its size."""

    def unfollowed(found: HeatMap | None) -> HeatMap | None:
        if found is None:
            return None
        start = np.where(found.start >= 0, UNFOLLOWED, found.start).astype(np.int32)
        return replace(found, start=start)

    return replace(
        view,
        notes=(*view.notes, LIGHTER),
        forest=Forest(**{name: column[:0] for name, column in vars(view.forest).items()}),
        routes=tuple(replace(route, starts=()) for route in view.routes),
        leaves=tuple(replace(leaf, map=unfollowed(leaf.map)) for leaf in view.leaves),
    )
