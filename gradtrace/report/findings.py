"""A diagnosis as a report shows it, from the dict that ``Diagnosis.to_dict`` gives.

That may come from the same process or from a file; ``gradtrace.diagnosis`` lies above this room.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gradtrace.autodiff.names import enclosing
from gradtrace.errors import listed
from gradtrace.report.encode import View

NAMED = 6
"""How many parameters a title names."""


def diagnosis(found: Mapping[str, Any] | None, modules: Mapping[str, int]) -> View | None:
    """The diagnosis with the numbers of its modules; ``modules`` are these by name.

    >>> shown = {"kind": "silent", "severity": "error", "title": "no gradient: a.0.weight",
    ...     "module": "a.0", "parameters": ["a.0.weight"], "line": "", "evidence": "", "advice": ""}
    >>> diagnosis({"findings": [shown], "remarks": []}, {"": 0, "a": 1})["findings"][0]["module"]
    1
    """
    if found is None:
        return None
    rows = found.get("unused_rows", {}).items()
    words = [f"{name} {n:,} of {total:,}" for name, (n, total) in rows]
    unused = [f"Rows that do not occur in this batch: {', '.join(words)}."] if words else []
    findings = [_finding(each, modules) for each in found["findings"]]
    return {"findings": findings, "remarks": [*unused, *found["remarks"]]}


def undiagnosed(
    silent: Sequence[str], reached: Iterable[str], modules: Mapping[str, int]
) -> View | None:
    """What is known without a diagnosis: which parameters the loss does not depend on, not why. One
    finding for each outermost module that has no others.

    >>> found = undiagnosed(["a.0.weight", "a.1.weight", "b.bias"], ["b.weight"], {"": 0, "a": 1})
    >>> [each["title"] for each in found["findings"]]
    ['no gradient: a.0.weight, a.1.weight', 'no gradient: b.bias']
    """
    alive = {module for name in reached for module in (*enclosing(name), "")}
    groups: dict[str, list[str]] = {}
    for name in silent:
        around = enclosing(name)  # the innermost first
        groups.setdefault(
            next((m for m in reversed(around) if m not in alive), around[0]), []
        ).append(name)
    findings = [_silent(module, names, modules) for module, names in groups.items()]
    return {"findings": findings, "remarks": []} if findings else None


def _silent(module: str, names: Sequence[str], modules: Mapping[str, int]) -> View:
    found = {
        "kind": "silent",
        "severity": "warning",
        "title": f"no gradient: {listed(names, NAMED)}",
        "module": module,
        "parameters": names,
        "line": "",
        "evidence": "The loss does not depend on what requires grad here.",
        "advice": "trace under gt.watch(model, diagnose=True): the report then says why, with the "
        "line of code. If this is meant to be frozen, say so with requires_grad_(False).",
    }
    return _finding(found, modules)


def _finding(found: Mapping[str, Any], modules: Mapping[str, int]) -> View:
    """A finding, with the number of the innermost module that the page knows, and its name."""
    place = found["module"]
    around = [name for name in (place, *enclosing(place)) if name and name in modules]
    return {**found, "module": modules[around[0]] if around else -1, "place": place}
