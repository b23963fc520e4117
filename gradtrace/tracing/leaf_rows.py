"""Influence with the rows of large weights sampled: an exact pass that counts some rows only.

Half of the products of a pass end in weights, and nothing is made of these. Of each large weight
random rows are contracted and counted; they stand for all its rows, and are drawn in groups, so
that the table has standard errors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gradtrace.errors import GradtraceError
from gradtrace.ir.passes.leaf_rows import keep_rows
from gradtrace.ir.program import Leaf
from gradtrace.kernels.operands import Floats
from gradtrace.pytorch.random_state import seeded
from gradtrace.tracing.aggregate import (
    Counts,
    Reach,
    bit_columns,
    component_hits,
    eligible_components,
    joined_counts,
    joined_rows,
    owners_of,
    sets_at_once,
    to_device,
)
from gradtrace.tracing.influence import NONFINITE, Influence, Row
from gradtrace.tracing.kept_plans import ComponentFacts
from gradtrace.tracing.moments import NOTHING_DRAWN, Moments, seed_of, variances
from gradtrace.tracing.provenance import words_of
from gradtrace.tracing.tally import LeafCounts
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


# Sums over rows -----------------------------------------------------------------------------------


class RowCounts(NamedTuple):
    """The counts of ``rows`` random rows of a leaf of ``height``, in groups of equal size: entry
    ``g·(sets + 1) + id`` is for group g. ``place``: of the leaf in ``Reach``; ``elements``: how
    many were counted.
    """

    counts: Counts
    rows: int
    height: int
    place: int
    elements: int

    @property
    def factor(self) -> float:
        """How many rows each of them stands for."""
        return self.height / self.rows

    @property
    def left(self) -> float:
        """The part of the leaf's rows that was not drawn."""
        return 1 - self.rows / self.height


class RowSums(NamedTuple):
    """Estimates over all rows of the sampled leaves, by component and kind (number of elements,
    |gradient|): (components, 2). The fields from ``tt`` on are those of ``SamplingVariance``;
    ``unreached`` is (components,); ``finite``: whether all gradients counted are.
    """

    through: Floats
    eligible: Floats
    tt: Floats
    ta: Floats
    aa: Floats
    units: Floats
    left: Floats
    unreached: Floats
    finite: bool


class _Sets(NamedTuple):
    """The provenance sets of all leaves, (sets, words); the leaf of each; the number of elements
    and Σ |gradient| of each by group: (sets, 2, groups).
    """

    words: Tensor
    leaf: Tensor
    numbers: Tensor


def row_sums(
    found: Sequence[RowCounts], groups: int, reach: Reach, bits: list[int], entries: int
) -> RowSums:
    """Σt and Σe over all rows, and how far they may be off, with one sync. ``entries`` of tables
    are computed at a time.

    Of N rows of a leaf n were drawn, in G groups whose sums are x: the leaf counts ``N/n · Σ x``.
    Leaves are drawn independently, so each of the G numbers ``d = Σ N/n · √(1 - n/N) · (x - mean)``
    over all leaves has 1/G of the variance of the total.
    """
    if not found:
        none = np.zeros((len(bits), 2))
        return RowSums(none, none, none, none, none, none, none, none[:, 0], True)
    sets = _sets(found, groups)
    device, count, (many, width) = sets.leaf.device, len(bits), sets.words.shape
    owners = owners_of(reach, count, device)
    scale = [(each.factor * each.left**0.5, each.factor, each.place) for each in found]
    weight, factor, places = to_device(np.array(scale).T, device)
    place = places.long()
    table = _weighted(sets.numbers, weight[sets.leaf], factor[sets.leaf])
    by_leaf = torch.zeros(len(found), 2, groups, dtype=torch.float64, device=device)
    by_leaf.index_add_(0, sets.leaf, sets.numbers)
    able = eligible_components(reach, bits, owners, entries)[:, place].double()
    eligible = able @ torch.cat([_weighted(by_leaf, weight, factor), _units(found, by_leaf)], 1)
    through = torch.zeros(count, table.shape[1], dtype=torch.float64, device=device)
    columns = bit_columns(bits, 64 * width, device)
    most = sets_at_once(columns, count, width, entries)
    for n in range(0, many, most):
        some = slice(n, n + most)
        here = owners[:, place[sets.leaf[some]]]
        through += component_hits(sets.words[some], columns, count, here).double() @ table[some]
    return _estimates(torch.cat([through, eligible], 1).cpu().numpy(), groups)


def _sets(found: Sequence[RowCounts], groups: int) -> _Sets:
    every = [each.counts for each in found]
    device = every[0].counts.device
    counts, sums, starts = joined_counts(every, device)
    extra = words_of([each.extra for each in every])
    rows, firsts = joined_rows(every, extra, device)
    extra = words_of([each.extra for each in every], 0, rows.shape[1])
    sizes = np.array([len(each.rows) for each in every], np.int64)
    before = np.cumsum(sizes) - sizes
    facts = np.array([sizes, starts - before + 1, firsts - before, sizes + 1], np.int64)
    many, *others = to_device(facts, device)
    leaves, total = torch.arange(len(found), device=device), int(sizes.sum())
    whose = torch.repeat_interleave(leaves, many, output_size=total)
    begin, first, stride = (each[whose] for each in others)
    number = torch.arange(total, device=device)
    words = rows[first + number] | to_device(extra, device)[whose]
    group = torch.arange(groups, device=device)
    place = (begin + number).unsqueeze(1) + stride.unsqueeze(1) * group
    numbers = torch.stack([counts[place].double(), sums[place]], 1)
    there = (words[:, 0] & 1 != 0).reshape(-1, 1, 1)
    return _Sets(words, whose, torch.where(there, numbers, 0.0))


def _weighted(numbers: Tensor, weight: Tensor, factor: Tensor) -> Tensor:
    """Of numbers (n, 2, groups): deviations from their mean over groups times ``weight``, both
    totals times ``factor``, and how many are not finite; (n, 2·groups + 4).
    """
    finite = numbers.nan_to_num(0.0, 0.0, 0.0)
    apart = (finite - finite.mean(2, keepdim=True)) * weight.reshape(-1, 1, 1)
    odd = (numbers != finite).double().sum(2)
    return torch.cat([apart.flatten(1), finite.sum(2) * factor.unsqueeze(1), odd], 1)


def _units(found: Sequence[RowCounts], by_leaf: Tensor) -> Tensor:
    """For each leaf Σ (eligible part of a row drawn)², by kind; the same times the part of its rows
    that was not drawn; the number of elements without a path: (leaves, 5).
    """
    groups = by_leaf.shape[2]
    facts = [(e.factor**2 * groups / e.rows, e.left, e.factor, e.elements) for e in found]
    square, left, factor, elements = to_device(np.array(facts).T, by_leaf.device).unsqueeze(2)
    units = by_leaf.nan_to_num(0.0, 0.0, 0.0).square().sum(2) * square
    missing = (elements - by_leaf[:, 0].sum(1, keepdim=True)) * factor
    return torch.cat([units, units * left, missing], 1)


def _estimates(table: Floats, groups: int) -> RowSums:
    """What the columns of ``row_sums`` say. Their variance is itself estimated, from G - 1 degrees
    of freedom, and taken (G - 1) / (G - 3) times, the variance of Student's t.
    """
    half = 2 * groups
    passes, could, rest = np.split(table, [half + 4, 2 * half + 8], 1)
    t = passes[:, :half].reshape(-1, 2, groups)
    a = could[:, :half].reshape(-1, 2, groups) - t
    scale = groups / max(groups - 3, 1)
    tt, ta, aa = (scale * (x * y).sum(2) for x, y in ((t, t), (t, a), (a, a)))
    through, eligible = passes[:, half : half + 2], could[:, half : half + 2]
    units, left, missing = np.split(rest, [2, 4], 1)
    finite = not could[:, half + 2 :].any()
    return RowSums(
        np.minimum(through, eligible), eligible, tt, ta, aa, units, left, missing[:, 0], finite
    )
