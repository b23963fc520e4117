"""Pages: a template from the wheel, with the data of a report inserted as one string; as a file, or
in a notebook's output (``<iframe srcdoc>``, which VS Code, Lab and Colab show).
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable
from html import escape
from importlib import resources

import torch

from gradtrace.errors import GradtraceError, printable
from gradtrace.files import write_text
from gradtrace.report.encode import View, contained, lettered

SCHEMA = 1
"""Version of the data that the page reads."""

TITLE, DATA = "<!--gradtrace-title-->", "<!--gradtrace-data-->"
"""Placeholders of the title and the data. Nothing else of a report is in the page as text: base64
has no character with a meaning in HTML or JavaScript, and the title is escaped."""

TITLE_MAX_CHARS = 200
"""The most characters of a title."""

FRAME_HEIGHT_PX, NOTEBOOK_MAX_CHARS = 640, 2_000_000
"""The height of a page in a notebook, and the most characters of one, which notebooks save."""

TOO_LARGE = "its report is too large for a notebook; .report('report.html') writes it to a file"


def report(
    view: View | None,
    name: str | None = None,
    *,
    training: View | None = None,
    timing: View | None = None,
    attribution: View | None = None,
) -> View:
    """The data of a page: of a trace, or of a run alone (None), under this name or its own."""
    if not isinstance(name, str | None):
        raise GradtraceError(f"name={name!r}: a report's name is text")
    title = name if name is not None else view["name"] if view else ""
    versions = {
        "gradtrace": sys.modules["gradtrace"].__version__,
        "torch": torch.__version__,
        "Python": platform.python_version(),
    }
    return {
        "schema": SCHEMA,
        "title": title or ("" if view else "Training"),
        "made": [(name, str(version)) for name, version in versions.items()],
        "traces": [{**view, "name": title}] if view else [],
        "training": training,
        "timing": timing,
        "attribution": attribution,
    }


def write(path: str | os.PathLike[str], contents: View) -> None:
    """Write a report to a file, whole or not at all."""
    write_text(path, page(contents))


def page(contents: View) -> str:
    """A report as one self-contained HTML file."""
    return filled(template(), contents["title"], lettered(contained(contents)))


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


def framed(view: Callable[[], View], lighter: Callable[[View], View], called: str) -> str:
    """HTML for notebooks: a report in a sandboxed frame, which can run scripts and access nothing
    outside it, made ``lighter`` if it is large; or a text that says why there is none.
    """
    try:
        found = view()
        text = page(report(found))
        if len(text) > NOTEBOOK_MAX_CHARS:
            text = page(report(lighter(found)))
        if len(text) > NOTEBOOK_MAX_CHARS:
            raise GradtraceError(TOO_LARGE)
    except GradtraceError as error:
        return f"<p>{escape(printable(called))}</p><p>{escape(str(error))}</p>"
    style = "width:100%;border:1px solid rgba(128,128,128,.35);border-radius:6px"
    return (
        f'<iframe srcdoc="{escape(text)}" sandbox="allow-scripts" '
        f'title="{escape(printable(found["name"]))}" width="100%" height="{FRAME_HEIGHT_PX}" '
        f'style="{style}"></iframe>'
    )
