"""Tables of influence and the gradient along depth, as columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from gradtrace import flow
from gradtrace.report.model import Floats, Flow, FlowRow, Influence
from gradtrace.tracing.influence import Influence as Measured


def table(found: Measured, modules: Mapping[str, int]) -> Influence:
    """A table; ``modules`` are the numbers of components that are modules."""
    rows = found.rows
    return Influence(
        tuple(row.name for row in rows),
        np.array([modules.get(row.name, -1) for row in rows], dtype=np.int32),
        _floats([row.count.share for row in rows]),
        _floats([row.gradient.share for row in rows]),
        _floats([row.count.error(found.pairs) for row in rows]),
        _floats([row.count.t for row in rows]),
        _floats([row.count.e for row in rows]),
        _floats([row.unreached for row in rows]),
        _floats([row.own for row in rows]),
        found.notes,
    )


def along(found: flow.Flow, modules: Mapping[str, int]) -> Flow:
    """The gradient along depth."""
    profile = found.profile
    return Flow(
        found.findings,
        np.array([level.depth for level in profile], dtype=np.int32),
        _floats([level.norm for level in profile]),
        _floats([level.rms for level in profile]),
        _floats([level.zeros for level in profile]),
        tuple(level.operator for level in profile),
        tuple(level.module for level in profile),
        tuple(
            FlowRow(
                modules.get(row.module, 0),
                row.depth,
                row.norm,
                row.gain,
                row.zeros,
                row.own,
                row.verdict,
            )
            for row in found.rows
        ),
    )


def _floats(numbers: Sequence[object]) -> Floats:
    return np.array([float(x) for x in numbers], dtype=np.float64)  # type: ignore[arg-type]
