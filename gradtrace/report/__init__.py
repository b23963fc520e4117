"""The report of a trace: one HTML file, made from a ``View``, which contains only data.

``trace_view`` makes a ``View`` from a trace, ``report`` combines views, ``write`` writes the page.
"""

from gradtrace.report.encode import loaded, saved
from gradtrace.report.model import Report, View
from gradtrace.report.page import framed, report, write

__all__ = ["Report", "View", "framed", "loaded", "report", "saved", "write"]
