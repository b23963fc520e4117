"""What a ``Monitor`` measures of a traced step, as numbers by the names of their columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import combinations
from math import isfinite, nan
from typing import Any, NamedTuple

from torch import Tensor, nn

from gradtrace.autodiff.hooks import silenced
from gradtrace.errors import GradtraceError
from gradtrace.pytorch.function_modes import paused
from gradtrace.training.state import undisturbed

MOST_TERMS = 4
"""Of more loss terms, the lowest cosine stands for all pairs."""


class Asked(NamedTuple):
    """What is measured: see ``Trace.influence``."""

    by: Any
    rule: str
    sample: Any
    seed: int
    forks: bool  # shares of branches as well


@contextmanager
def aside(model: nn.Module) -> Iterator[None]:
    """Within, a trace leaves training alone: buffers and random numbers are put back, hooks on
    gradients do not run, and modes of PyTorch's functions see nothing.
    """
    with paused(), undisturbed(model), silenced():
        yield


def measured(
    watch: Any, loss: Tensor, asked: Asked, terms: Any, scale: float
) -> tuple[dict[str, float], set[str]]:
    """The numbers of a loss, and the names of the parameters that it reaches."""
    trace = watch.trace(loss, rule=asked.rule)
    how = {"sample": asked.sample, "seed": asked.seed}
    table, found = trace.influence(asked.by, **how), dict[str, float]()
    for row in table:
        found |= {f"share {row.name}": row.share, f"weighted {row.name}": row.weighted}
        if isfinite(error := table.errors[row.name]):
            found[f"± share {row.name}"] = error
    if asked.forks and asked.by == "modules":
        with suppress(GradtraceError):  # there are too many forks
            forks = trace.influence("forks", **how).shares
            found |= {f"fork {name}": share for name, share in forks.items()}
    found |= {f"norm {row.name}": row.norm / abs(scale) for row in trace.norms()}
    if terms is not None:
        found |= _compared(watch, terms, scale)
    return found, {*trace.gradients, *getattr(trace.gradients, "aliases", {})}


def _compared(watch: Any, terms: Mapping[str, Tensor], scale: float) -> dict[str, float]:
    """Norms and cosines of loss terms, at the scale of the loss."""
    scaled = {n: t * scale if isinstance(t, Tensor) else t for n, t in terms.items()}
    table = watch.conflicts(scaled, nonfinite="allow")
    found = {f"term {name}": table.norm(name) / abs(scale) for name in terms}
    cosines = {f"cosine {a} {b}": table.cosine(a, b) for a, b in combinations(terms, 2)}
    if len(terms) <= MOST_TERMS:
        return found | cosines
    return found | {"lowest cosine": min(filter(isfinite, cosines.values()), default=nan)}


def silent(model: nn.Module, reached: set[str]) -> tuple[list[str], int]:
    """The parameters that require grad and get none, and how many require it."""
    trained = [name for name, each in model.named_parameters() if each.requires_grad]
    return [name for name in trained if name not in reached], len(trained)
