"""What a ``Monitor`` measures of a traced step, as numbers by the names of their columns."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from itertools import combinations
from math import isfinite
from typing import Any

from torch import Tensor, nn

from gradtrace.errors import GradtraceError, listed
from gradtrace.traced import Trace


def measured(
    trace: Trace, scale: float, by: Any, sample: Any, seed: int, forks: bool
) -> dict[str, float]:
    """The shares of a trace, as ``Trace.influence`` has them, with ``forks`` those of branches as
    well; and norms of the gradient, as if the loss had not been multiplied by ``scale``.
    """
    table, found = trace.influence(by, sample=sample, seed=seed), dict[str, float]()
    for row in table:
        found |= {f"share {row.name}": row.share, f"weighted {row.name}": row.weighted}
        if isfinite(error := table.errors[row.name]):
            found[f"± share {row.name}"] = error
    if forks and by == "modules":
        with suppress(GradtraceError):  # there are too many forks
            shares = trace.influence("forks", sample=sample, seed=seed).shares
            found |= {f"fork {name}": share for name, share in shares.items()}
    return found | {f"norm {row.name}": row.norm / abs(scale) for row in trace.norms()}


def compared(watch: Any, terms: Mapping[str, Tensor], scale: float) -> dict[str, float]:
    """Norms and cosines of loss terms, which are followed at the scale of the loss."""
    scaled = {name: term * scale for name, term in terms.items()}
    table = watch.conflicts(scaled, nonfinite="allow")
    cosines = {f"cosine {a} {b}": table.cosine(a, b) for a, b in combinations(terms, 2)}
    return {f"term {name}": table.norm(name) / abs(scale) for name in terms} | cosines


def silent(model: nn.Module, trace: Trace) -> str:
    """What to tell of the parameters that require grad and get none, if there are any."""
    reached = {*trace.gradients, *getattr(trace.gradients, "aliases", {})}
    trained = [name for name, each in model.named_parameters() if each.requires_grad]
    names = [name for name in trained if name not in reached]
    text = f"{len(names):,} of {len(trained):,} parameters get no gradient in this step: "
    return f"{text}{listed(names, 4)}. gt.diagnose(model, loss_fn) says why" if names else ""
