"""Influence with the rows of large weights sampled: an exact pass that counts some rows only.

Half of the products of a pass end in weights, and nothing is made of these. Of each large weight
random rows are contracted and counted; they stand for all its rows, and are drawn in groups, so
that the table has standard errors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from gradtrace.errors import GradtraceError
from gradtrace.ir.passes.leaf_rows import keep_rows
from gradtrace.ir.program import Leaf
from gradtrace.pytorch.random_state import seeded
from gradtrace.tracing.influence import Influence, Row
from gradtrace.tracing.kept_plans import ComponentFacts
from gradtrace.tracing.moments import Moments
from gradtrace.tracing.row_sums import RowCounts, RowSums, row_sums
from gradtrace.tracing.sampling import NOTHING_DRAWN, seed_of, variances
from gradtrace.tracing.tally import NONFINITE, LeafCounts
from gradtrace.tracing.traced_program import TracedProgram

LARGE_LEAF_ELEMENTS = 1 << 16
"""Rows are sampled of leaves with more elements than this; others are counted whole: their
products are small.
"""

GROUPS = 32
"""The rows of a leaf are drawn in this many groups, whose differences give the standard error."""


@dataclass
class SampledLeaf:
    """A leaf of which ``rows`` of ``height`` rows were drawn, in groups; ``found``: its counts."""

    value: int
    rows: int
    height: int
    groups: int
    found: LeafCounts | None = None

    def counts(self, place: int) -> RowCounts:
        """Its counts, of the leaf at this place among all."""
        assert self.found is not None and self.found.found is not None
        return RowCounts(self.found.found, self.rows, self.height, place, self.found.total)


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
    wanted: dict[torch.device, list[tuple[int, int, int]]] = {}
    for number, leaf in enumerate(leaves):
        shape = leaf.tensor.shape
        if len(shape) < 2 or leaf.tensor.numel() <= LARGE_LEAF_ELEMENTS or leaf.shard is not None:
            continue
        part = leaf_rows * shape[0] if leaf_rows < 1 else leaf_rows
        rows = max(1, round(part / GROUPS)) * GROUPS
        if rows < shape[0]:
            wanted.setdefault(leaf.tensor.device, []).append((number, shape[0], rows))
    found: dict[int, Tensor] = {}
    for device, some in wanted.items():
        every = _drawn(tuple(some), seed).to(device, non_blocking=True)  # one copy
        drawn = torch.split(every, [rows for _, _, rows in some])
        found |= {leaves[number].value: rows for (number, _, _), rows in zip(some, drawn)}
    return {leaf.value: found[leaf.value] for leaf in leaves if leaf.value in found}


@lru_cache(16)
def _drawn(wanted: Sequence[tuple[int, int, int]], seed: int) -> Tensor:
    """For each (number of a leaf, height, rows) as many of its rows, concatenated; kept, as a loop
    draws the same again.
    """
    found = list[Tensor]()
    for number, height, rows in wanted:
        generator = seeded(seed_of(seed, number))
        found.append(torch.randperm(height, generator=generator, device="cpu")[:rows])
    return torch.cat(found)


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
    sampled = {
        leaf.value: SampledLeaf(leaf.value, len(drawn[leaf.value]), leaf.tensor.shape[0], GROUPS)
        for leaf in traced.program.leaves
        if leaf.value in done
    }
    return replace(traced, program=program), sampled


def estimated(
    traced: TracedProgram,
    facts: ComponentFacts,
    sampled: Iterable[SampledLeaf],
    whole: Influence,
) -> Influence:
    """The table over all rows of all leaves, from that of the leaves counted ``whole`` and the rows
    of the ``sampled`` ones.
    """
    leaves = list(sampled)
    sizes = {leaf.value: leaf.tensor.numel() for leaf in traced.program.leaves}
    notes = (_note(leaves, sizes), *whole.notes)
    place, reach = facts.reachable(traced.program)
    components = facts.chosen.components
    counts = [leaf.counts(place[leaf.value]) for leaf in leaves]
    found = row_sums(counts, GROUPS, reach, facts.chosen.bits, traced.backend.table_entries)
    if not found.finite and NONFINITE not in notes:
        notes = (*notes, NONFINITE)
    names = {name: sizes[value] for value, name in traced.names.items()}
    rows = tuple(
        replace(row, own=sum(names.get(name, 0) for name in component.owns))
        for row, component in zip(_summed(whole, found), components)
    )
    return replace(whole, rows=rows, notes=notes)


def _summed(whole: Influence, found: RowSums) -> tuple[Row, ...]:
    """The rows of a table with estimates added, and their variances."""
    moments = list[list[Moments]]()
    for k, kind in enumerate(("count", "gradient")):
        errors = variances([part[:, k] for part in found[2:7]])
        estimates = zip(found.through[:, k].tolist(), found.eligible[:, k].tolist())
        column = list[Moments]()
        for row, (t, e), error in zip(whole.rows, estimates, errors):
            (t0,), (e0,) = (getattr(getattr(row, kind), name) for name in ("through", "eligible"))
            drawn = NOTHING_DRAWN if row.series else error
            column.append(Moments.over([t0 + t], [e0 + e], drawn))
        moments.append(column)
    unreached = (row.unreached + round(x) for row, x in zip(whole.rows, found.unreached.tolist()))
    return tuple(
        replace(row, unreached=missing, count=counts, gradient=sums)
        for row, missing, counts, sums in zip(whole.rows, unreached, *moments)
    )


def _note(leaves: Sequence[SampledLeaf], sizes: Mapping[int, int]) -> str:
    if not leaves:
        return "all rows of all leaves were counted: none is large enough for leaf_rows"
    whole = sum(sizes[leaf.value] for leaf in leaves)
    drawn = sum(sizes[leaf.value] // leaf.height * leaf.rows for leaf in leaves)
    many = f"{len(leaves)} large leaves" if len(leaves) > 1 else "a large leaf"
    return (
        f"{drawn:,} of {whole:,} elements of {many} counted, in rows drawn at random; ± is the "
        "standard error of that"
    )
