"""The HTML page: a template from the wheel, with the data inserted as one string."""

from __future__ import annotations

from html import escape
from importlib import resources

from gradtrace.errors import GradtraceError
from gradtrace.printable import printable
from gradtrace.report.encode import contained, lettered
from gradtrace.report.model import Report, plain

TITLE, DATA = "<!--gradtrace-title-->", "<!--gradtrace-data-->"
"""Placeholders of the title and the data. Nothing else of a report is in the page as text: base64
has no character with a meaning in HTML or JavaScript, and the title is escaped."""

TITLE_MAX_CHARS = 200
"""The most characters of a title."""


def page(report: Report) -> str:
    """A report as one self-contained HTML file."""
    return filled(template(), report.title, lettered(contained(plain(report))))


def filled(frame: str, title: str, data: str) -> str:
    """A template with the title and the data inserted.

    >>> filled(f"<title>{TITLE}</title><script>{DATA}</script>", "</title>", "abc=")
    '<title>&lt;/title&gt;</title><script>abc=</script>'
    """
    for placeholder in (TITLE, DATA):
        if frame.count(placeholder) != 1:
            raise GradtraceError(
                f"the report's template holds {placeholder!r} {frame.count(placeholder)} times in "
                "place of once: install gradtrace again, or build its page (make web)"
            )
    return frame.replace(TITLE, _text(title)).replace(DATA, data)


def _text(title: str) -> str:
    """A title as HTML in ASCII: no bidirectional control or lone surrogate is in the file."""
    short = title if len(title) <= TITLE_MAX_CHARS else title[: TITLE_MAX_CHARS - 1] + "…"
    return escape(printable(short)).encode("ascii", "xmlcharrefreplace").decode()


def template() -> str:
    """The page as it was built, without data."""
    try:
        return resources.files("gradtrace.report").joinpath("template.html").read_text("utf-8")
    except OSError as error:
        raise GradtraceError(
            "the report's template is missing from this installation: install gradtrace again, or, "
            "in a clone of it, build the page with make web"
        ) from error
