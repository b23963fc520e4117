"""Arguments of the Monitor that a callback makes; shared by all callbacks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gradtrace.errors import GradtraceError, did_you_mean
from gradtrace.training.monitor import Monitor

TRAINER_ARGUMENTS = {"model", "start", "accumulate", "clock"}
"""Arguments of Monitor that the trainer determines."""

ARGUMENTS = [
    name for name in inspect.signature(Monitor).parameters if name not in TRAINER_ARGUMENTS
]
RUN_FILE, PAGE_FILE = "gradtrace.jsonl", "gradtrace.html"


def checked(options: Mapping[str, Any]) -> dict[str, Any]:
    """Check the names of arguments for a Monitor when the callback is made."""
    for name in options:
        if name not in ARGUMENTS:
            hint = did_you_mean(name, ARGUMENTS, most=len(ARGUMENTS))
            raise GradtraceError(f"GradTrace has no argument {name!r}{hint}")
    return dict(options)


def placed(
    options: Mapping[str, Any], folder: Callable[[], str | None], first: bool
) -> dict[str, Any]:
    """The arguments, with a file and a page in the trainer's folder unless given."""
    found = dict(options)
    if {"file", "report"} <= found.keys():
        return found
    at = Path(folder() or ".")
    if first:
        at.mkdir(parents=True, exist_ok=True)
    return {"file": at / RUN_FILE, "report": at / PAGE_FILE, **found}


class Divided:
    """A scaler's scale divided by a number of backward passes, evaluated lazily."""

    def __init__(self, scaler: Any, passes: int) -> None:
        self._scaler, self._passes = scaler, passes

    def get_scale(self) -> float:
        """The factor that a loss was multiplied by."""
        scale = 1.0 if self._scaler is None else float(self._scaler.get_scale())
        return scale / self._passes
