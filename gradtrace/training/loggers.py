"""Loggers that receive scalars during training: one protocol, and adapters for common ones.

A logger has ``log(step, scalars)``. Also accepted: functions of the same two arguments,
TensorBoard's ``SummaryWriter``, Lightning's loggers, the module ``mlflow``, and W&B runs; none of
these packages is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

from gradtrace.errors import GradtraceError, caution

Log = Callable[[int, Mapping[str, float]], object]


@runtime_checkable
class Logger(Protocol):
    """Receives the scalars of each traced step."""

    def log(self, step: int, scalars: Mapping[str, float]) -> object:
        """Log the scalars of a step."""


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
    home = getattr(logger, "__name__", "") or type(logger).__module__
    if str(home).partition(".")[0] == "wandb":  # a run, or the module itself
        return lambda step, scalars: logger.log(dict(scalars), step=step)
    if isinstance(logger, Logger):
        return logger.log
    if callable(logger):
        return lambda step, scalars: logger(step, scalars)
    raise GradtraceError(
        f"a {type(logger).__name__} is no logger; give an object with log(step, scalars), a "
        "function of these two, a SummaryWriter, a logger of Lightning, mlflow or a W&B run"
    )


class Loggers:
    """Several loggers. One that fails is warned about once, and training goes on."""

    def __init__(self, loggers: Iterable[Any]) -> None:
        if isinstance(loggers, (str, bytes)) or not isinstance(loggers, Iterable):
            raise GradtraceError(
                f"loggers is a list of loggers, not a {type(loggers).__name__}: loggers=[writer]"
            )
        self._all = [(logger, adapted(logger)) for logger in loggers]
        self._failed: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._all)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Log the scalars with all loggers."""
        for logger, log in self._all:
            try:
                log(step, scalars)
            except Exception as error:  # a logging service may raise anything
                if id(logger) not in self._failed:
                    self._failed.add(id(logger))
                    caution(
                        f"{type(logger).__name__} failed to log ({type(error).__name__}: {error}); "
                        "training goes on",
                        stacklevel=4,
                    )
