"""The page in a notebook's output: ``<iframe srcdoc>``, which VS Code, Lab and Colab show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from html import escape

import numpy as np

from gradtrace.errors import GradtraceError
from gradtrace.printable import printable
from gradtrace.report.forest import UNFOLLOWED
from gradtrace.report.model import Forest, HeatMap, View
from gradtrace.report.page import page
from gradtrace.report.writing import report

FRAME_HEIGHT = 640
PAGE_MAX_CHARS = 2_000_000
"""The most characters that a page in a notebook may have: it is saved with every output."""

LIGHTER = (
    "to keep the notebook small the paths of single elements are left out; "
    ".report('report.html') writes all"
)
TOO_LARGE = "its report is too large for a notebook; .report('report.html') writes it to a file"


def framed(view: Callable[[], View], called: str) -> str:
    """HTML for notebooks: a report in a frame, without paths if it is large; or a text that says
    why there is none.
    """
    try:
        found = view()
        for each in (found, lighter(found)):
            text = page(report([each]))
            if len(text) <= PAGE_MAX_CHARS:
                return frame(text, each.name)
        raise GradtraceError(TOO_LARGE)
    except GradtraceError as error:
        return f"<p>{escape(printable(called))}</p><p>{escape(str(error))}</p>"


def frame(text: str, title: str) -> str:
    """A page in a sandboxed frame, which can run scripts and access nothing outside it.

    >>> frame('<p class="a">', "x")
    '<iframe srcdoc="&lt;p class=&quot;a&quot;&gt;" ... title="x" ...></iframe>'
    """
    style = "width:100%;border:1px solid rgba(128,128,128,.35);border-radius:6px"
    return (
        f'<iframe srcdoc="{escape(text)}" sandbox="allow-scripts allow-downloads" '
        f'title="{escape(printable(title))}" width="100%" height="{FRAME_HEIGHT}" '
        f'style="{style}"></iframe>'
    )


def lighter(view: View) -> View:
    """A view without its paths, which take most of its size."""
    empty = {name: column[:0] for name, column in vars(view.forest).items()}
    return replace(
        view,
        notes=(*view.notes, LIGHTER),
        forest=Forest(**empty),
        routes=tuple(replace(route, starts=()) for route in view.routes),
        leaves=tuple(replace(leaf, map=_unfollowed(leaf.map)) for leaf in view.leaves),
    )


def _unfollowed(found: HeatMap | None) -> HeatMap | None:
    if found is None:
        return None
    start = np.where(found.start >= 0, UNFOLLOWED, found.start).astype(np.int32)
    return replace(found, start=start)
