"""``GradTrace`` for trainers: in ``callbacks.lightning``, ``.transformers`` and ``.accelerate``.

Each takes the arguments of ``gradtrace.Monitor``, and writes to the trainer's own log. The run's
file, its page and the incidents lie in the trainer's folder, unless they are given.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from gradtrace.errors import GradtraceError, did_you_mean
from gradtrace.files import naming
from gradtrace.training.monitor import Monitor

OPTIONS = [
    name
    for name in inspect.signature(Monitor).parameters
    if name not in ("model", "start", "accumulate")  # which the trainer knows
]
PLACES = {"file": "gradtrace.jsonl", "report": "gradtrace.html", "folder": "incidents"}


class Traced:
    """What the callbacks of all trainers have in common."""

    monitor: Monitor | None = None

    def __init__(self, **options: Any) -> None:
        for name in options:
            if name not in OPTIONS:
                hint = did_you_mean(name, OPTIONS, most=len(OPTIONS))
                raise GradtraceError(f"GradTrace has no argument {name!r}{hint}")
        self._options = options
        self._terms: dict[str, Tensor] | None = None

    def terms(self, **terms: Tensor) -> None:
        """Name what the loss of this step is the sum of: ``callback.terms(ce=ce, kl=0.1 * kl)``.

        Args:
            terms: Scalars by name, with their weights.
        """
        if self.monitor is not None and self.monitor.due:
            self._terms = terms

    def _make(self, model: Any, folder: Any, writers: Any, first: bool, **given: Any) -> Monitor:
        places: Mapping[str, Any] = {}
        if folder is not None:
            places = {name: Path(folder) / file for name, file in PLACES.items()}
            with naming(folder, "written") as at:
                at.mkdir(parents=True, exist_ok=True) if first else None
        options = {**places, **self._options}
        options["writers"] = [*options.get("writers", ()), *writers]
        self.monitor = Monitor(model, **options, **given)
        return self.monitor

    def _step(self, loss: Tensor, scaler: Any, passes: float, batch: Any = None) -> None:
        """Hand on the loss of a backward pass, as it is before a scaler multiplies it."""
        terms, self._terms = self._terms, None
        if self.monitor is not None:
            scaled = loss if scaler is None else scaler.scale(loss)
            scale = 1 / passes if scaler is None else Divided(scaler, passes)
            self.monitor.step(scaled, batch=batch, terms=terms, scale=scale)

    def _close(self, error: str = "") -> None:
        if self.monitor is not None:
            self.monitor.close(error)


class Divided:
    """A scaler's scale, divided by the number of backward passes of a step."""

    def __init__(self, scaler: Any, passes: float) -> None:
        self._scaler, self._passes = scaler, passes

    @property
    def _scale(self) -> Any:
        there = getattr(self._scaler, "_scale", None)
        return None if there is None else there / self._passes

    def get_scale(self) -> float:
        """The factor that a loss was multiplied by."""
        return float(self._scaler.get_scale()) / self._passes
