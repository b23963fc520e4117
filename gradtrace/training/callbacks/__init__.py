"""``GradTrace`` for trainers: in ``callbacks.lightning``, ``.transformers`` and ``.accelerate``.

Each takes the arguments of ``gradtrace.Monitor``, and writes to the trainer's own log. The run's
file, its page and the incidents lie in the trainer's folder, unless they are given.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from gradtrace.errors import GradtraceError, did_you_mean
from gradtrace.files import made_folder
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
        self._batch: Any = None

    def terms(self, **terms: Tensor) -> None:
        """Name what the loss of this step is the sum of: ``callback.terms(ce=ce, kl=0.1 * kl)``.

        Args:
            terms: Scalars by name, with their weights.
        """
        self._terms = terms

    def _make(self, model: Any, folder: Any, writers: Any, start: int, accumulate: int) -> None:
        """Make the Monitor."""
        at = None if folder is None else made_folder(folder)
        places = {} if at is None else {name: at / file for name, file in PLACES.items()}
        options = {**places, **self._options, "start": start, "accumulate": accumulate}
        options["writers"] = [*self._options.get("writers", ()), *writers]
        self.monitor = Monitor(model, **options)

    def _begin(self, step: int, batch: Any) -> None:
        """Begin a backward pass of a step."""
        self._batch = batch
        if self.monitor is not None:
            self.monitor.begin(step)

    def _step(self, loss: Tensor, heard: Tensor, scaler: Any, passes: float) -> None:
        """Hand on the loss of one of so many backward passes; ``heard``: see ``Monitor._pass``."""
        (terms, self._terms), (batch, self._batch) = (self._terms, None), (self._batch, None)
        if self.monitor is not None:
            one = torch.ones((), device=loss.device)
            scale = 1 / passes if scaler is None else scaler.scale(one) / passes
            self.monitor._pass(loss, heard, batch, terms, scale)

    def _unscaled(self, loss: Tensor, scaler: Any, passes: float) -> None:
        """Hand on a loss that a scaler will yet multiply."""
        self._step(loss if scaler is None else scaler.scale(loss), loss, scaler, passes)

    def _close(self, error: str = "") -> None:
        if self.monitor is not None:
            self.monitor.close(error)
