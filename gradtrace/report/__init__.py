"""The report of a trace: one HTML file, made from a ``View``, which contains only data.

``Source`` is the input from a trace, ``view`` makes a ``View`` from it, ``report`` combines views,
and ``write`` writes the page.
"""

from gradtrace.report.building import FULL, SMALL, Limits, view
from gradtrace.report.inline import framed
from gradtrace.report.model import Report, View
from gradtrace.report.source import Source
from gradtrace.report.writing import loaded, report, saved, write

__all__ = [
    "FULL",
    "SMALL",
    "Limits",
    "Report",
    "Source",
    "View",
    "framed",
    "loaded",
    "report",
    "saved",
    "view",
    "write",
]
