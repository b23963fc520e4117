"""Results of a traced step: one of each process, for its part of the batch, and their merge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import chain
from math import sqrt
from typing import Any

from gradtrace.runs.history import Norms, StepRecord
from gradtrace.runs.influence import Influence, Moments


@dataclass(frozen=True)
class StepResult:
    """The result of one process at a step, or the error if tracing failed.

    ``seconds`` is what the trace took, and ``share`` the share of this process's training time that
    all its traces have taken so far.
    """

    loss: float
    scale: float
    influence: Influence | None = None
    verdict: str = ""
    norms: Mapping[str, Norms] | None = None
    note: str = ""
    error: Exception | None = None
    seconds: float = 0.0
    share: float = 0.0
    terms: Mapping[str, float] | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON values, without the error."""
        return {
            "loss": self.loss,
            "scale": self.scale,
            "influence": None if self.influence is None else self.influence.to_dict(),
            "verdict": self.verdict,
            "norms": {name: list(each) for name, each in (self.norms or {}).items()},
            "note": self.note,
            "seconds": self.seconds,
            "share": self.share,
            "terms": self.terms,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> StepResult:
        """The inverse of ``to_dict``."""
        table = data["influence"]
        more = {
            "influence": None if table is None else Influence.from_dict(table),
            "norms": {name: Norms(*each) for name, each in data["norms"].items()},
        }
        return cls(**{**data, **more})


def unscaled(result: StepResult) -> StepResult:
    """The result for the loss before it was multiplied by its scale."""
    if result.scale == 1.0:
        return result
    by = result.scale
    size, table = abs(by), result.influence
    norms = {
        name: Norms(each.output / size, None if each.own is None else each.own / size)
        for name, each in (result.norms or {}).items()
    }
    if "" in norms:  # the largest of what lies outside of modules, the loss itself among it
        scaled = (result.norms or {})[""].output
        losses = sqrt(table.pairs if table is not None else 1)  # has a gradient of 1 with any scale
        inside = norms[""].output if scaled > losses * (1 + 1e-6) else 0.0
        norms[""] = norms[""]._replace(output=max(losses, inside))
    if table is not None:
        table = replace(
            table, rows=tuple(replace(r, gradient=_divided(r.gradient, by)) for r in table)
        )
    return replace(result, loss=result.loss / by, influence=table, norms=norms)


def _divided(moments: Moments, by: float) -> Moments:
    """The moments of gradients divided by ``by``."""
    one = abs(Fraction(by))
    t, e, *squares = moments.numbers()
    return Moments(t / one, e / one, *(each / one**2 for each in squares))


def merged(step: int, results: Mapping[int, StepResult], world: int) -> StepRecord:
    """One record from the results by rank: exact sums of counts, means of losses and norms."""
    found = [results[rank] for rank in sorted(results)]
    tables = [result.influence for result in found if result.influence is not None]
    norms: dict[str, list[Norms]] = {}
    for name, each in chain.from_iterable((result.norms or {}).items() for result in found):
        norms.setdefault(name, []).append(each)
    terms: dict[str, list[float]] = {}
    for name, number in chain.from_iterable((result.terms or {}).items() for result in found):
        terms.setdefault(name, []).append(number)
    missing = [str(rank) for rank in range(world) if rank not in results]
    notes = dict.fromkeys(result.note for result in found if result.note)
    if missing:
        notes[f"found by {len(results)} of {world} processes, without {_some(missing)}"] = None
    return StepRecord(
        step,
        sum(result.loss for result in found) / len(found),
        tables[0].merge(*tables[1:]) if tables else None,
        " ".join(dict.fromkeys(result.verdict for result in found if result.verdict)),
        {name: Norms(*map(_mean, zip(*some))) for name, some in norms.items()},
        found[0].scale,
        found[0].seconds,
        found[0].share,
        tuple(notes),
        {},
        {name: _mean(some) for name, some in terms.items()},
    )


def _some(ranks: Sequence[str]) -> str:
    return ", ".join(ranks) if len(ranks) <= 8 else f"{', '.join(ranks[:8])} and others"


def _mean(values: Sequence[float | None]) -> Any:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
