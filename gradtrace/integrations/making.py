"""Arguments of the Monitor that a callback makes; shared by all callbacks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from gradtrace.errors import GradtraceError, did_you_mean
from gradtrace.io.atomic_files import make_folder
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
    """The arguments, with a diagnosis, a file and a page in the trainer's folder unless given."""
    found = {"diagnose": True, **options}
    if {"file", "report"} <= found.keys():
        return found
    at = Path(folder() or ".")
    if first:
        make_folder(at)
    return {"file": at / RUN_FILE, "report": at / PAGE_FILE, **found}


class LossTerms:
    """The terms of the loss that a training step is about to hand over, if it is traced."""

    monitor: Monitor | None = None
    _given: dict[str, Tensor] | None = None

    def terms(self, **terms: Tensor) -> None:
        """Name what the loss of this step is the sum of: ``callback.terms(ce=ce, kl=0.1 * kl)``.

        Call it where the loss is computed. Norms of their gradients and cosines of each pair are
        logged at traced steps; at others it does nothing.

        Args:
            terms: Scalars by name, with their weights.
        """
        if self.monitor is not None and self.monitor.due:
            self._given = terms

    def _take_terms(self) -> dict[str, Tensor] | None:
        given, self._given = self._given, None
        return given


class Divided:
    """A scaler's scale divided by a number of backward passes, evaluated lazily; ``dynamic`` if
    there is a scaler, which skips steps whose gradients are not finite.
    """

    def __init__(self, scaler: Any, passes: int) -> None:
        self._scaler, self._passes = scaler, passes
        self.dynamic = scaler is not None

    def get_scale(self) -> float:
        """The factor that a loss was multiplied by."""
        scale = 1.0 if self._scaler is None else float(self._scaler.get_scale())
        return scale / self._passes
