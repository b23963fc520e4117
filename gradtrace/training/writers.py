"""Writers: what a ``Monitor`` measures, as curves in TensorBoard, W&B or any other log."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from math import isfinite, nan
from typing import Any, TypeAlias

from gradtrace.errors import GradtraceError, caution, reason_of

Scalars: TypeAlias = Mapping[str, float]
Write: TypeAlias = Callable[[int, Scalars], object]

PREFIX = "gradtrace/"
MOST_SHARES = 24
"""The most shares that are written as curves, unless all of the others are few as well."""


def writing(writer: Any) -> Write:
    """A function of a step and its values that hands them to a writer of any kind.

    >>> seen = []
    >>> writing(lambda step, values: seen.append((step, values)))(3, {"loss": 0.5})
    >>> seen
    [(3, {'loss': 0.5})]
    """
    if callable(getattr(writer, "add_scalar", None)):  # TensorBoard
        return lambda step, values: [writer.add_scalar(*each, step) for each in values.items()]
    if callable(getattr(writer, "log_metrics", None)):  # Lightning, mlflow
        return lambda step, values: writer.log_metrics(dict(values), step=step)
    if type(writer).__module__.partition(".")[0] == "wandb":
        return _Wandb(writer)
    if callable(getattr(writer, "log", None)):
        return lambda step, values: writer.log(dict(values), step=step)
    if callable(writer):
        return lambda step, values: writer(step, dict(values))
    raise GradtraceError(
        f"a {type(writer).__name__} is no writer: give an object with log(values, step) or "
        "add_scalar(name, value, step), a W&B run, or a function of a step and its values"
    )


class _Wandb:
    """Adds to the row that a W&B run is at: rows are the user's, who numbers them, and W&B drops
    what comes for an earlier one. So ``gradtrace/step`` is the step.
    """

    def __init__(self, run: Any) -> None:
        self._run, self._row = run, -1
        run.define_metric(f"{PREFIX}*", step_metric=f"{PREFIX}step")

    def __call__(self, step: int, values: Scalars) -> None:
        if self._row == self._run.step:  # nobody has ended the row since
            self._run.log({}, commit=True)
        self._run.log({**values, f"{PREFIX}step": step}, commit=False)
        self._row = self._run.step


class Writers:
    """Several writers. One that fails is told once, and training goes on."""

    def __init__(self, writers: Iterable[Any]) -> None:
        if isinstance(writers, (str, bytes)) or not isinstance(writers, Iterable):
            raise GradtraceError(
                f"writers is a list of writers, not a {type(writers).__name__}: writers=[writer]"
            )
        self._all = [(type(each).__name__, writing(each)) for each in writers]
        self._failed = set[str]()

    def write(self, line: Mapping[str, Any]) -> None:
        """Write the curves of a traced step."""
        values = curves(line)
        for name, write in self._all:
            try:
                write(line["step"], values)
            except Exception as error:  # a service may raise anything
                if name not in self._failed:
                    caution(f"{name} did not take what was measured: {reason_of(error)}")
                self._failed.add(name)


def curves(line: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a line by names that every log accepts: where paths have a choice, the shares
    of its branches; else those that are neither 0 nor 1.

    >>> curves({"step": 2, "loss": 0.5, "share a": 1.0, "share b c": 0.25, "note": ""})
    {'gradtrace/loss': 0.5, 'gradtrace/share/b_c': 0.25}
    """
    forks = [name for name in line if name.startswith("fork ")]
    shares = [name for name in line if name.startswith("share ") and 0 < line[name] < 1]
    terms = [name for name in line if name.startswith(("term ", "cosine "))]
    kept = ["loss", "cost", *(forks or shares)[:MOST_SHARES], *terms]
    numbers = {name: line[name] for name in kept if isfinite(line.get(name, nan))}
    return {PREFIX + plain(name): value for name, value in numbers.items()}


def plain(name: str) -> str:
    """Letters, digits, ``_ . / -``; the first word becomes a folder.

    >>> plain("fork add (gate, experts.0)/gate")
    'fork/add_gate_experts.0/gate'
    """
    words = re.sub(r"[^\w./-]+", "_", name.replace(" ", "/", 1))
    return re.sub(r"_*/_*", "/", words).strip("_")
