"""Influence with the rows of large weights sampled: an exact pass that counts some rows only.

Half of the products of a pass end in weights, and nothing is made of these. Of each large weight
random rows are contracted and counted; they stand for all its rows, and are drawn in groups, so
that the table has standard errors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gradtrace.errors import GradtraceError
from gradtrace.ir.passes.leaf_rows import keep_rows
from gradtrace.ir.program import Leaf
from gradtrace.kernels.operands import Floats
from gradtrace.tracing.components import Component, ComponentSelection
from gradtrace.tracing.executor import TracedLeaf
from gradtrace.tracing.influence import Influence, Row
from gradtrace.tracing.moments import Moments
from gradtrace.tracing.sampling import NOTHING_DRAWN, seed_of, variances
from gradtrace.tracing.traced_program import TracedProgram
from gradtrace.tracing.traced_value import materialise

LARGE_LEAF_ELEMENTS = 1 << 16
"""Rows are sampled of leaves with more elements than this; others are counted whole: their
products are small.
"""

GROUPS = 32
"""The rows of a leaf are drawn in this many groups, whose differences give the standard error."""


class SampledLeaf(NamedTuple):
    """A leaf of which ``rows`` of ``height`` rows were drawn, as its groups come among pairs."""

    value: int
    rows: int
    height: int
    pairs: range

    @property
    def factor(self) -> float:
        """How many rows each of them stands for."""
        return self.height / self.rows

    @property
    def left(self) -> float:
        """The part of its rows that was not drawn."""
        return 1 - self.rows / self.height


def checked_rows(leaf_rows: float) -> float:
    """A part of the rows, or their number; an error for anything else."""
    number = isinstance(leaf_rows, (int, float)) and not isinstance(leaf_rows, bool)
    if number and (0 < leaf_rows < 1 or (leaf_rows >= 1 and leaf_rows == int(leaf_rows))):
        return leaf_rows
    raise GradtraceError(
        f"leaf_rows is the part of a weight's rows that is counted, such as 1/16, or their number, "
        f"such as 64; not {leaf_rows!r}"
    )


def draw_rows(leaves: Sequence[Leaf], leaf_rows: float, seed: int) -> dict[int, Tensor]:
    """Random rows of large leaves, in random order, by value: a multiple of ``GROUPS``, at least
    one a group. Leaves of which all rows would be drawn are left out.
    """
    found: dict[int, Tensor] = {}
    for number, leaf in enumerate(leaves):
        shape = leaf.tensor.shape
        if len(shape) < 2 or leaf.tensor.numel() <= LARGE_LEAF_ELEMENTS or leaf.shard is not None:
            continue
        wanted = leaf_rows * shape[0] if leaf_rows < 1 else leaf_rows
        rows = max(1, round(wanted / GROUPS)) * GROUPS
        if rows < shape[0]:
            generator = torch.Generator().manual_seed(seed_of(seed, number))
            order = torch.randperm(shape[0], generator=generator, device="cpu")
            found[leaf.value] = order[:rows].to(leaf.tensor.device)
    return found


def rows_kept(
    traced: TracedProgram, leaf_rows: float, seed: int
) -> tuple[TracedProgram, dict[int, SampledLeaf]]:
    """The trace of some rows of large leaves, and these leaves by value."""
    if traced.pairs > 1 or traced.granularity == "operator":
        raise GradtraceError(
            "rows of weights are sampled for one loss, element by element: trace losses.mean() "
            "with granularity='scalar', or leave leaf_rows out"
        )
    drawn = draw_rows(traced.program.leaves, leaf_rows, seed)
    program, done = keep_rows(traced.program, drawn)
    sampled: dict[int, SampledLeaf] = {}
    for leaf in traced.program.leaves:
        if leaf.value in done:
            pairs = range(GROUPS * len(sampled), GROUPS * (len(sampled) + 1))
            height = leaf.tensor.shape[0]
            sampled[leaf.value] = SampledLeaf(leaf.value, len(drawn[leaf.value]), height, pairs)
    return replace(traced, program=program), sampled


def grouped_leaf(
    found: TracedLeaf, gradient: Tensor, leaf: SampledLeaf
) -> tuple[TracedLeaf, Tensor]:
    """The rows of a leaf in their groups, as if each were for a pair of its own."""
    state = materialise(found.state).with_provenance()
    assert state.ids is not None
    ids = state.ids.reshape(len(leaf.pairs), -1)
    state = state._replace(value=None, size=None, ids=ids)
    return found._replace(state=state, pair=leaf.pairs), gradient.reshape(len(leaf.pairs), -1)


def estimated(
    traced: TracedProgram,
    chosen: ComponentSelection,
    sampled: Mapping[int, SampledLeaf],
    table: Influence,
    may: Mapping[int, int],
) -> Influence:
    """The table over all rows, estimated from that of the rows drawn: ``table`` has a pair for each
    group, and the last for leaves counted whole.
    """
    leaves = list(sampled.values())
    sizes = {leaf.value: leaf.tensor.numel() for leaf in traced.program.leaves}
    columns = list[list[Moments]]()
    for kind in ("count", "gradient"):
        moments = [getattr(row, kind) for row in table.rows]
        through, eligible = (
            np.array([getattr(m, name) for m in moments]).reshape(len(moments), -1)
            for name in ("through", "eligible")
        )
        columns.append(_estimates(through, eligible, leaves, [row.series for row in table.rows]))
    rows = tuple(
        replace(
            row,
            own=sum(sizes[v] for v, name in traced.names.items() if name in component.owns),
            unreached=_unreached(traced, component, row, leaves, sizes, may),
            count=count,
            gradient=gradient,
        )
        for row, component, count, gradient in zip(table.rows, chosen.components, *columns)
    )
    return replace(table, rows=rows, pairs=1, notes=(_note(leaves, sizes), *table.notes))


def _estimates(
    through: Floats, eligible: Floats, leaves: Sequence[SampledLeaf], series: Sequence[bool]
) -> list[Moments]:
    """Σt and Σe of each component over all rows, from those by (component, group). The variance of
    ``N/n · Σ x`` over the groups x of a leaf is ``(N/n)² · (1 - n/N) · G/(G-1) · Σ (x - mean)²``;
    what is drawn at once is a row.
    """
    count, groups = len(series), max([1, *(len(leaf.pairs) for leaf in leaves)])
    factor, left, rows = (
        np.array([float(getattr(leaf, name)) for leaf in leaves])
        for name in ("factor", "left", "rows")
    )
    t, e = (
        x[:, :-1].reshape(count, len(leaves), groups) * factor[:, None] for x in (through, eligible)
    )
    a = e - t
    dt, da = (x - x.mean(2, keepdims=True) if x.size else x for x in (t, a))
    scale = left * groups / max(groups - 1, 1)
    units = (e**2).sum(2) * groups / rows
    products = [((x * y).sum(2) * scale).sum(1) for x, y in ((dt, dt), (dt, da), (da, da))]
    found = variances([*products, units.sum(1), (units * left).sum(1)])
    wholes = e.sum((1, 2)) + eligible[:, -1]
    parts = np.minimum(t.sum((1, 2)) + through[:, -1], wholes)
    return [
        Moments.over([x], [y], NOTHING_DRAWN if sure else variance)
        for x, y, variance, sure in zip(parts.tolist(), wholes.tolist(), found, series)
    ]


def _unreached(
    traced: TracedProgram,
    component: Component,
    row: Row,
    leaves: Sequence[SampledLeaf],
    sizes: Mapping[int, int],
    may: Mapping[int, int],
) -> int:
    """How many elements could pass a component but have no path, over all rows."""
    eligible, total = row.count.eligible, float(row.unreached)
    for leaf in leaves:
        if may[leaf.value] & component.bits and traced.names[leaf.value] not in component.owns:
            paths = sum(eligible[leaf.pairs.start : leaf.pairs.stop])
            total += (leaf.factor - 1) * (sizes[leaf.value] / leaf.factor - paths)
    return round(total)


def _note(leaves: Sequence[SampledLeaf], sizes: Mapping[int, int]) -> str:
    if not leaves:
        return "all rows of all leaves were counted: none is large enough for leaf_rows"
    whole = sum(sizes[leaf.value] for leaf in leaves)
    drawn = round(sum(sizes[leaf.value] / leaf.factor for leaf in leaves))
    many = f"{len(leaves)} large leaves" if len(leaves) > 1 else "a large leaf"
    return (
        f"{drawn:,} of {whole:,} elements of {many} counted, in rows drawn at random; ± is the "
        "standard error of that"
    )
