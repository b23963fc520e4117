"""What a ``Monitor`` measures of a traced step, as numbers by the names of their columns."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from itertools import combinations
from math import isfinite, nan
from typing import Any, NamedTuple

from torch import Tensor, nn

from gradtrace.errors import GradtraceError

EXACT = 20_000_000
SAMPLED = 10_000
MOST_TERMS = 4
"""Of more loss terms, the lowest cosine stands for all pairs."""


class Asked(NamedTuple):
    """What is measured: see ``Trace.influence``."""

    by: Any
    rule: str
    sample: Any
    seed: int
    forks: bool  # shares of branches as well


def measured(
    watch: Any, loss: Tensor, asked: Asked, terms: Any, scale: float
) -> tuple[dict[str, float], set[str]]:
    """The numbers of a loss, and the names of the parameters that it reaches."""
    trace = watch.trace(loss, rule=asked.rule)
    found = _shares(trace, asked)
    if asked.forks and asked.by == "modules":
        with suppress(GradtraceError):  # there are too many forks
            found |= _forks(trace, asked)
    norms = {row.module: row.norm / abs(scale) for row in trace.flow()}
    found |= {f"norm {name}": norm for name, norm in norms.items() if name}
    if terms is not None:
        found |= _compared(watch, terms, scale)
    return found, {*trace.gradients, *getattr(trace.gradients, "aliases", {})}


def _sample(trace: Any, asked: Asked) -> Any:
    if asked.sample != "auto":
        return asked.sample
    elements = sum(leaf.tensor.numel() for leaf in trace.leaves.values())
    return None if elements <= EXACT else SAMPLED


def _shares(trace: Any, asked: Asked) -> dict[str, float]:
    by = None if asked.by == "modules" else asked.by
    table = trace.influence(by, sample=_sample(trace, asked), seed=asked.seed)
    found = dict[str, float]()
    for row in table:
        found |= {f"share {row.name}": row.count.share, f"weighted {row.name}": row.gradient.share}
        if isfinite(error := table.errors.get(row.name, nan) if table.measured else nan):
            found[f"± share {row.name}"] = error
    return found


def _forks(trace: Any, asked: Asked) -> dict[str, float]:
    choices = trace.choices(sample=_sample(trace, asked), seed=asked.seed)
    return {f"fork {name}": share for name, share in choices.between_modules().items()}


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
