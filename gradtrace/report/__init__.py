"""The report of a trace: one HTML file, made of a ``View``, which is plain data.

``Source`` is what a trace brings, ``view`` makes a ``View`` of it, ``report`` puts views together
and ``write`` writes the page.
"""

from gradtrace.report.building import FULL, SMALL, Limits, view
from gradtrace.report.inline import inline
from gradtrace.report.model import Report, View
from gradtrace.report.page import page
from gradtrace.report.source import Source
from gradtrace.report.training import timing, training
from gradtrace.report.writing import loaded, report, saved, write

__all__ = [
    "FULL",
    "SMALL",
    "Limits",
    "Report",
    "Source",
    "View",
    "inline",
    "loaded",
    "page",
    "report",
    "saved",
    "timing",
    "training",
    "view",
    "write",
]
