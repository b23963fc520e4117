"""transformers: ``Trainer(..., callbacks=[GradTrace()])``."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any

from torch import Tensor

from gradtrace.errors import GradtraceError, needs
from gradtrace.integrations.making import Divided, checked, placed
from gradtrace.runs.history import StepRecord, scalars
from gradtrace.training.monitor import Monitor

if TYPE_CHECKING:
    from transformers import Trainer, TrainerCallback
else:
    try:
        from transformers import Trainer, TrainerCallback
    except ImportError as error:
        raise GradtraceError(
            needs("gradtrace.integrations.transformers", "transformers", "accelerate")
        ) from error

DEPTH = 2
"""Names of so many parts are handed to the trainer's log, which is printed; the file has all."""


class GradTrace(TrainerCallback):  # type: ignore[misc]
    """Trace training with transformers: ``Trainer(..., callbacks=[GradTrace(every=100)])``.

    Takes what ``gradtrace.Monitor`` takes. ``every`` counts the trainer's ``global_step``; of the
    backward passes of a step the first is traced, with the loss that the trainer hands to
    ``backward``, whoever computed it (label smoothing, ``compute_loss_func``,
    ``num_items_in_batch``). Some numbers go to the trainer's own log; the file and the page are
    ``gradtrace.jsonl`` and ``gradtrace.html`` in ``output_dir``, unless ``file`` and ``report`` say
    otherwise. After training, ``callback.monitor.history`` has what was found.
    """

    def __init__(self, **how: Any) -> None:
        self._how = checked(how)
        self.monitor: Monitor | None = None
        self._wiring: TrainerHooks | None = None
        self._record: StepRecord | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin to monitor."""
        self._close("")
        trainer = trainer_of(self, sys._getframe())
        how = placed(self._how, lambda: args.output_dir, state.is_world_process_zero)
        self.monitor = Monitor(
            trainer.model_wrapped,
            start=state.global_step,
            accumulate=args.gradient_accumulation_steps,
            **how,
        )
        self._wiring = TrainerHooks(self, trainer)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Hand what was found to the trainer's log."""
        if self._record is not None and self._wiring is not None:
            record, self._record = self._record, None
            self._wiring.log(shallow(scalars(record), DEPTH))

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Evaluation is no part of a step."""
        if self.monitor is not None and self._wiring is not None:
            self.monitor.pause()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the report."""
        self._close("")

    def begin(self, step: int) -> None:
        """A backward pass of this step comes."""
        if self.monitor is not None:
            self.monitor.begin(step)

    def found(self, loss: Tensor, scale: Divided) -> None:
        """The loss that is handed to ``backward``."""
        if self.monitor is not None:
            self._record = self.monitor.step(loss, scale=scale) or self._record

    def _close(self, error: str) -> None:
        if self._wiring is not None:
            self._wiring.remove()
            self._wiring = None
        if self.monitor is not None:
            self.monitor.close(error)


class TrainerHooks:
    """Where a trainer's steps begin, and where its losses go: callbacks are told neither.

    Two methods are wrapped, on this trainer and its accelerator alone, while it trains.
    """

    def __init__(self, callback: GradTrace, trainer: Trainer) -> None:
        self._callback, self._trainer = callback, trainer
        self._step, self._backward = trainer.training_step, trainer.accelerator.backward
        trainer.training_step = self._stepped
        trainer.accelerator.backward = self._backwards

    def _stepped(self, *args: Any, **kwargs: Any) -> Any:
        self._callback.begin(self._trainer.state.global_step)
        try:
            return self._step(*args, **kwargs)
        except BaseException as error:
            self._callback._close(type(error).__name__)
            raise

    def _backwards(self, loss: Tensor, **kwargs: Any) -> Any:
        """The trainer has divided the loss by the passes of a step, or by the items in all of them;
        the accelerator multiplies it by the scale of half precision.
        """
        trainer = self._trainer
        scaler = trainer.accelerator.scaler
        passes = getattr(trainer, "current_gradient_accumulation_steps", 1)
        scaled = loss if scaler is None else scaler.scale(loss)
        self._callback.found(scaled, Divided(scaler, passes))
        return self._backward(loss, **kwargs)

    def log(self, numbers: dict[str, float]) -> None:
        """Write to the trainer's log."""
        self._trainer.log(numbers)

    def remove(self) -> None:
        """Leave the trainer as it was."""
        vars(self._trainer).pop("training_step", None)
        vars(self._trainer.accelerator).pop("backward", None)


def trainer_of(callback: TrainerCallback, frame: FrameType | None) -> Trainer:
    """The trainer that calls a callback. Callbacks are not told, so it is looked for among the
    callers.
    """
    while frame is not None:
        found = frame.f_locals.get("self")
        if isinstance(found, Trainer) and callback in found.callback_handler.callbacks:
            return found
        frame = frame.f_back
    raise GradtraceError(
        "GradTrace is called by no transformers.Trainer; pass it as "
        "Trainer(callbacks=[GradTrace()]), or use gradtrace.Monitor in a loop of your own"
    )


def shallow(numbers: Mapping[str, float], depth: int) -> dict[str, float]:
    """The numbers of modules that lie no deeper.

    >>> shallow({"gradtrace/loss": 2.0, "gradtrace/share/h.0.attn": 0.5}, 2)
    {'gradtrace/loss': 2.0}
    """
    return {name: value for name, value in numbers.items() if name.count(".") < depth}
