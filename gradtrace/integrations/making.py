"""What callbacks share: how they make a Monitor."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from gradtrace.errors import GradtraceError
from gradtrace.training.monitor import Monitor

THEIRS = {"model", "start", "accumulate", "clock"}
"""Arguments of Monitor that a trainer knows by itself."""

NAMES = [name for name in inspect.signature(Monitor).parameters if name not in THEIRS]
RUN, PAGE = "gradtrace.jsonl", "gradtrace.html"


def checked(how: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments for a Monitor, refused where the callback is made if there is no such."""
    for name in how:
        if name not in NAMES:
            close = get_close_matches(name, NAMES, n=1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(NAMES)}"
            raise GradtraceError(f"GradTrace has no argument {name!r}; {hint}")
    return dict(how)


def placed(how: Mapping[str, Any], folder: Callable[[], str | None], first: bool) -> dict[str, Any]:
    """The arguments with a file and a page in the trainer's folder, unless they say where."""
    found = dict(how)
    if {"file", "report"} <= found.keys():
        return found
    at = Path(folder() or ".")
    if first:
        at.mkdir(parents=True, exist_ok=True)
    return {"file": at / RUN, "report": at / PAGE, **found}


class Divided:
    """A scaler's scale over a number of passes, asked for when it is needed."""

    def __init__(self, scaler: Any, passes: int) -> None:
        self._scaler, self._passes = scaler, passes

    def get_scale(self) -> float:
        """What a loss was multiplied by."""
        scale = 1.0 if self._scaler is None else float(self._scaler.get_scale())
        return scale / self._passes
