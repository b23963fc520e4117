"""What the processes of a training run find at a step, each in its part of the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import chain
from typing import Any

from gradtrace.runs.history import Norms, StepRecord
from gradtrace.tracing.influence import Influence, Moments


@dataclass(frozen=True)
class StepResult:
    """What one process found at a step; an error, if it could not.

    ``seconds`` is what that took, and ``share`` the part of its training time that it has taken.
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

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it, without the error."""
        return {
            "loss": self.loss,
            "scale": self.scale,
            "influence": None if self.influence is None else self.influence.to_dict(),
            "verdict": self.verdict,
            "norms": {name: list(each) for name, each in (self.norms or {}).items()},
            "note": self.note,
            "seconds": self.seconds,
            "share": self.share,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> StepResult:
        """What ``to_dict`` gave."""
        table = data["influence"]
        more = {
            "influence": None if table is None else Influence.from_dict(table),
            "norms": {name: Norms(*each) for name, each in data["norms"].items()},
        }
        return cls(**{**data, **more})


def unscaled(look: StepResult) -> StepResult:
    """The same, of the loss before it was multiplied by its scale."""
    if look.scale == 1.0:
        return look
    by = look.scale
    norms = {
        # Outside of modules stands the loss itself, whose own gradient is 1 with any scale.
        name: Norms(each.output / (by if name else 1), None if each.own is None else each.own / by)
        for name, each in (look.norms or {}).items()
    }
    table = look.influence
    if table is not None:
        table = replace(
            table, rows=tuple(replace(r, gradient=_over(r.gradient, by)) for r in table)
        )
    return replace(look, loss=look.loss / by, influence=table, norms=norms)


def _over(moments: Moments, by: float) -> Moments:
    """The moments of gradients that are so many times smaller."""
    one = abs(Fraction(by))
    t, e, *squares = moments.parts()
    return Moments(t / one, e / one, *(each / one**2 for each in squares))


def merged(step: int, looks: Mapping[int, StepResult], world: int) -> StepRecord:
    """What processes found, by rank, as one: exact sums of counts, means of losses and norms."""
    found = [looks[rank] for rank in sorted(looks)]
    tables = [look.influence for look in found if look.influence is not None]
    norms: dict[str, list[Norms]] = {}
    for name, each in chain.from_iterable((look.norms or {}).items() for look in found):
        norms.setdefault(name, []).append(each)
    missing = [str(rank) for rank in range(world) if rank not in looks]
    notes = dict.fromkeys(look.note for look in found if look.note)
    if missing:
        notes[f"found by {len(looks)} of {world} processes, without {_some(missing)}"] = None
    return StepRecord(
        step,
        sum(look.loss for look in found) / len(found),
        tables[0].merge(*tables[1:]) if tables else None,
        " ".join(dict.fromkeys(look.verdict for look in found if look.verdict)),
        {name: Norms(*map(_mean, zip(*some))) for name, some in norms.items()},
        found[0].scale,
        found[0].seconds,
        found[0].share,
        tuple(notes),
    )


def _some(ranks: Sequence[str]) -> str:
    return ", ".join(ranks) if len(ranks) <= 8 else f"{', '.join(ranks[:8])} and others"


def _mean(values: Sequence[float | None]) -> Any:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
