"""What loggers receive during training: curves that are worth looking at, and texts.

A logger has ``log(step, scalars)``, and may have ``say(step, name, text)``. Also accepted:
functions of ``(step, scalars)``, TensorBoard's ``SummaryWriter``, Lightning's loggers, Accelerate's
trackers, the module ``mlflow``, and W&B runs; none of these packages is imported.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from html import escape
from math import isfinite
from typing import Any, Protocol, runtime_checkable

from gradtrace.errors import GradtraceError, caution, reason_of
from gradtrace.runs.history import StepRecord
from gradtrace.training.tuning import LOGGED_SHARES

Log = Callable[[int, Mapping[str, float]], object]
Say = Callable[[int, str, str], object]

PREFIX = "gradtrace/"


@runtime_checkable
class Logger(Protocol):
    """Receives the scalars of each traced step."""

    def log(self, step: int, scalars: Mapping[str, float]) -> object:
        """Log the scalars of a step."""


class Curves:
    """The scalars of a run that are logged: loss, cost, norms and cosines of loss terms, and at
    most ``most`` shares, the same ones at every step.

    Shares are those of branches where paths divide between modules (``choice/…``) or, if the
    Monitor was asked for components of its own, of those that paths can go around (``share/…``),
    the most informative ones of the first traced step. What lies in series, whose share is 1 by
    definition, is never logged.
    """

    def __init__(self, most: int = LOGGED_SHARES, components: bool = False) -> None:
        self.most, self.components = most, components
        self._kept: list[str] = []

    def of(self, record: StepRecord) -> dict[str, float]:
        """The scalars of a traced step by name; non-finite ones are left out."""
        shares = self._shares(record)
        self._kept = self._kept or list(shares)[: self.most]
        found = {"loss": record.loss, "cost": record.share}
        found |= {f"terms/{name}": number for name, number in record.terms.items()}
        found |= {name: shares[name] for name in self._kept if name in shares}
        return {PREFIX + plain(name): x for name, x in found.items() if isfinite(x)}

    def _shares(self, record: StepRecord) -> dict[str, float]:
        """All shares that may be logged, the most informative first."""
        if not self.components:
            return {f"choice/{name}": share for name, share in record.choices.items()}
        table = record.influence
        if table is None:
            return {}
        known = table.information
        rows = [row for row in table if row.alternative or 0 < row.share < 1]
        rows.sort(key=lambda row: -known[row.name])
        return {f"share/{row.name}": row.share for row in rows}


def plain(name: str) -> str:
    """A name that every logger accepts: letters, digits, ``_ . / -``.

    >>> plain("choice/add (gate, experts.0)/gate")
    'choice/add_gate_experts.0/gate'
    """
    words = re.sub(r"[^\w./-]+", "_", name)
    return re.sub(r"_*/_*", "/", words).strip("_")


# Adapters -----------------------------------------------------------------------------------------


def adapted(logger: Any) -> Log:
    """A ``log(step, scalars)`` function for a logger of any accepted kind.

    >>> logged = []
    >>> adapted(lambda step, scalars: logged.append((step, scalars["loss"])))(3, {"loss": 0.5})
    >>> logged
    [(3, 0.5)]
    """
    if callable(getattr(logger, "add_scalar", None)):
        return lambda step, scalars: [logger.add_scalar(*each, step) for each in scalars.items()]
    if callable(getattr(logger, "log_metrics", None)):  # Lightning's, and mlflow
        return lambda step, scalars: logger.log_metrics(dict(scalars), step=step)
    if hasattr(logger, "store_init_configuration"):  # a tracker of Accelerate
        return lambda step, scalars: logger.log(dict(scalars), step=step)
    if _is_wandb(logger):
        return WandbRows(logger)
    if isinstance(logger, Logger):
        return logger.log
    if callable(logger):
        return lambda step, scalars: logger(step, scalars)
    raise GradtraceError(
        f"a {type(logger).__name__} is no logger; give an object with log(step, scalars), a "
        "function of these two, a SummaryWriter, a logger of Lightning, a tracker of Accelerate, "
        "mlflow or a W&B run"
    )


def speaking(logger: Any) -> Say | None:
    """A ``say(step, name, text)`` function for a logger; None if it takes no text."""
    if callable(getattr(logger, "say", None)):
        say: Say = logger.say
        return say
    if callable(getattr(logger, "add_text", None)):  # Markdown, in which indented lines are kept
        return lambda step, name, text: logger.add_text(name, _indented(text), step)
    if _is_wandb(logger):
        return lambda step, name, text: _say_to_wandb(logger, name, text)
    if callable(getattr(logger, "log_text", None)) and hasattr(logger, "log_metrics"):  # mlflow
        return lambda step, name, text: logger.log_text(text, f"{name}.txt")
    inner = getattr(logger, "experiment", None)  # of Lightning
    if inner is None and hasattr(logger, "store_init_configuration"):
        inner = logger.tracker  # of Accelerate
    return None if inner is None or inner is logger else speaking(inner)


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


def _is_wandb(logger: Any) -> bool:
    """Whether it is a W&B run, or the module itself."""
    home = getattr(logger, "__name__", "") or type(logger).__module__
    return str(home).partition(".")[0] == "wandb"


class WandbRows:
    """Adds scalars to the row that a W&B run is at, beside what the user logs.

    W&B numbers rows itself and drops what is logged for an earlier one. So rows are left to the
    user, and ``gradtrace/step`` is the step of our scalars. Only where the user has logged nothing
    since the last ones is their row completed, for the next.
    """

    def __init__(self, run: Any) -> None:
        self._given = run
        self._row: int | None = None
        self._defined = False

    def __call__(self, step: int, scalars: Mapping[str, float]) -> None:
        """Log the scalars of a step."""
        run = _run_of(self._given)
        if not self._defined:
            self._defined = True
            run.define_metric(f"{PREFIX}*", step_metric=f"{PREFIX}step")
        if self._row == run.step:
            run.log({}, commit=True)
        run.log({**scalars, f"{PREFIX}step": step}, commit=False)
        self._row = run.step


def _run_of(given: Any) -> Any:
    """The run that is given, or the one that the module ``wandb`` has open."""
    run = getattr(given, "run", None) if hasattr(given, "init") else given
    if run is None:
        raise GradtraceError("no W&B run is open; call wandb.init() before training")
    return run


def _say_to_wandb(given: Any, name: str, text: str) -> None:
    run, wandb = _run_of(given), sys.modules.get("wandb")
    run.summary[name] = text
    if wandb is not None:
        run.log({f"{name}_page": wandb.Html(f"<pre>{escape(text)}</pre>")}, commit=False)


class Loggers:
    """Several loggers. One that fails is warned about once, and training goes on."""

    def __init__(self, loggers: Iterable[Any], curves: Curves | None = None) -> None:
        if isinstance(loggers, (str, bytes)) or not isinstance(loggers, Iterable):
            raise GradtraceError(
                f"loggers is a list of loggers, not a {type(loggers).__name__}: loggers=[writer]"
            )
        self._all = [(logger, adapted(logger)) for logger in loggers]
        self._curves = curves or Curves()
        self._failed: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._all)

    def log(self, record: StepRecord) -> None:
        """Log the curves of a traced step with all loggers."""
        scalars = self._curves.of(record) if self._all else {}
        for logger, log in self._all:
            self._try(logger, log, record.step, scalars)

    def say(self, step: int, name: str, text: str) -> None:
        """Give a text to all loggers that take texts."""
        for logger, _ in self._all:
            self._try(logger, _say, logger, step, PREFIX + name, text)

    def _try(self, logger: Any, call: Callable[..., object], *args: object) -> None:
        try:
            call(*args)
        except Exception as error:  # a logging service may raise anything
            if id(logger) not in self._failed:
                self._failed.add(id(logger))
                caution(
                    f"{type(logger).__name__} failed to log ({type(error).__name__}: "
                    f"{reason_of(error)}); training goes on"
                )


def _say(logger: Any, step: int, name: str, text: str) -> None:
    if (say := speaking(logger)) is not None:
        say(step, name, text)
