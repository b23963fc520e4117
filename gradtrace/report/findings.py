"""A diagnosis as a report shows it, from the dict that ``Diagnosis.to_dict`` gives.

That may come from the same process or from a file; ``gradtrace.diagnosis`` lies above this room.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradtrace.autodiff.names import enclosing
from gradtrace.report.model import Diagnosis, Finding

SEVERITIES = ("error", "warning", "note")


def diagnosis(found: Mapping[str, Any] | None, modules: Mapping[str, int]) -> Diagnosis | None:
    """The diagnosis with the numbers of its modules; ``modules`` are these by name.

    >>> shown = {"kind": "silent", "severity": "error", "title": "no gradient: a.0.weight",
    ...     "module": "a.0", "parameters": ["a.0.weight"], "line": "", "evidence": "", "advice": ""}
    >>> diagnosis({"findings": [shown], "remarks": []}, {"": 0, "a": 1}).findings[0].module
    1
    """
    if found is None:
        return None
    rows = found.get("unused_rows", {}).items()
    words = [f"{name} {n:,} of {total:,}" for name, (n, total) in rows]
    unused = [f"Rows that do not occur in this batch: {', '.join(words)}."] if words else []
    findings = tuple(_finding(each, modules) for each in found["findings"])
    return Diagnosis(findings, (*unused, *found["remarks"]))


def _finding(found: Mapping[str, Any], modules: Mapping[str, int]) -> Finding:
    place = found["module"]
    around = [name for name in (place, *enclosing(place)) if name and name in modules]
    return Finding(
        found["kind"],
        found["severity"],
        found["title"],
        modules[around[0]] if around else -1,
        place,
        tuple(found["parameters"]),
        found["line"],
        found["evidence"],
        found["advice"],
    )
