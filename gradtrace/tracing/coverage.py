"""Coverage: what part of its element's gradient a path carries, over a sample of elements.

Signed: ``weight / gradient``. 1 for an element with a single path; negative if the path has the
opposite sign, and above 1 if other paths cancel some of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import copysign, floor, isfinite, nan
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from gradtrace.errors import TooLarge
from gradtrace.kernels.operands import Floats
from gradtrace.paths.path_forest import PathForest
from gradtrace.table import Column, Table
from gradtrace.tracing.followed import (
    FollowedElements,
    FollowedPaths,
    drawn_sample,
    ends_of,
    follow_elements,
)
from gradtrace.tracing.rules import RULES
from gradtrace.tracing.traced_program import TracedProgram

PATH_RULES = tuple(name for name in RULES if name != "gradient")
"""The rules that choose paths."""

LOW_MEDIAN, MANY, HEAVY = 0.25, 0.25, 2.0
"""Coverage is low if the median path carries less than this part of its element's gradient, or if
more than this share of paths has the opposite sign, belongs to elements whose gradient cancels to
0, or weighs more than ``HEAVY`` times the gradient.
"""

LOW_NOTE = (
    "coverage is low: single paths explain little of the gradient; trace.decompose() divides the "
    "gradient itself, trace.mass() counts all paths"
)

COLUMNS = (
    Column("leaf"),
    Column("elements", "count"),
    *(Column(name, "share") for name in ("median", "lower", "upper", "opposite", "cancelled")),
)

Bools = npt.NDArray[np.bool_]


class Parts(NamedTuple):
    """Of some elements that have a path, the leaf and the part of the gradient; nan where that
    cancels to 0 (below the rounding of the path's own weight), infinite where weight or gradient
    are not finite.
    """

    leaf: npt.NDArray[np.int64]
    part: Floats

    def of(self, leaf: int) -> Floats:
        """Those of one leaf."""
        found: Floats = self.part[self.leaf == leaf]
        return found


def coverage_of(traced: TracedProgram, sample: int, seed: int) -> Table:
    """The coverage of a random sample of elements: of all, and leaf by leaf."""
    traced = traced if traced._followers else replace(traced)  # values are freed afterwards
    followed = list(_by_every_rule(traced, sample, seed))
    mine = [each[traced.rule] for each in followed]
    found = parts_of(traced, (ends_of(traced, each) for each in mine))
    rows = [_row("all", found.part)]
    for value, name in traced.names.items():
        if len(some := found.of(value)):
            rows.append(_row(name, some))
    elements = sum(leaf.tensor.numel() for leaf in traced.leaves.values()) * traced.pairs
    about = {"rule": traced.rule, "losses": traced.pairs}
    if sample < elements:
        about["sampled"] = sample
    notes = [*_notes(found.part), *_agreement(followed)]
    return Table(f"Coverage ({traced.rule})", COLUMNS, tuple(rows), tuple(notes), about)  # type: ignore[arg-type]


def parts_of(traced: TracedProgram, followed: Iterator[FollowedPaths]) -> Parts:
    """The parts of the gradient that paths carry, by their weights."""
    leaves = {leaf.value: leaf.tensor for leaf in traced.leaves.values()}
    found = [Parts(np.zeros(0, np.int64), np.zeros(0))]
    for paths in followed:
        sizes, whole = [len(some) for some in paths.drawn.values()], paths.whole
        each = [torch.finfo(leaves[value].dtype).eps for value in paths.drawn]
        rounding = np.repeat(each, sizes)[whole]
        mantissa, exponent = paths.mantissa[whole], paths.exponent[whole]
        gradient, power = np.frexp(paths.gradient.numpy()[whole])
        finite = np.isfinite(gradient) & np.isfinite(mantissa)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore", under="ignore"):
            part = np.ldexp(mantissa / gradient, np.clip(exponent - power, -4000, 4000))
            cancelled = ~(np.abs(part) * rounding < 1)
        part = np.where(finite, np.where(cancelled, np.nan, part), np.inf)
        values = np.repeat(np.array([*paths.drawn], np.int64), sizes)[whole]
        found.append(Parts(values, part))
    return Parts(*map(np.concatenate, zip(*found)))


def _row(name: str, part: Floats) -> tuple[Any, ...]:
    many, known = len(part), part[np.isfinite(part)]
    quantiles = [float(np.quantile(known, q)) if len(known) else nan for q in (0.5, 0.25, 0.75)]
    shares = [_share(known < 0, many), _share(np.isnan(part), many)]
    return name, many, *quantiles, *shares


def _share(which: Bools, many: int) -> float:
    return int(which.sum()) / many if many else nan


def _notes(part: Floats) -> list[str]:
    """What is special about the elements, and whether coverage is low."""
    known = part[np.isfinite(part)]
    if not len(part):
        return ["no element has a path"]
    broken = int(np.isinf(part).sum())
    found = [f"{broken:,} elements are not finite"] if broken else []
    many = max(
        _share(which, len(part)) for which in (known < 0, np.isnan(part), np.abs(known) > HEAVY)
    )
    low = len(known) > 0 and float(np.quantile(known, 0.5)) < LOW_MEDIAN
    return [*found, LOW_NOTE] if low or many > MANY else found


def percent(part: float) -> str:
    """A part of a whole, short: ``16%``, ``1.3%``, ``-40%``, ``31 times``. Only the whole is 100%.

    >>> [percent(x) for x in (0.164, 0.0132, -0.4, 31.0, 0.0, 0.9999, 1.0)]
    ['16%', '1.3%', '-40%', '31 times', '0%', '99.9%', '100%']
    """
    if not isfinite(part):
        return "–"
    if abs(part) >= 10:
        return f"{part:.2g} times" if abs(part) >= 1e6 else f"{part:,.0f} times"
    if 0.995 <= abs(part) < 1:
        return f"{copysign(floor(abs(part) * 1000) / 1000, part):.1%}"
    return f"{part:.1%}" if 0 < abs(part) < 0.0995 else f"{part:.0%}"


# Agreement of the rules ---------------------------------------------------------------------------

ByRule = Mapping[str, FollowedElements]


def _by_every_rule(traced: TracedProgram, sample: int, seed: int) -> Iterator[ByRule]:
    """The paths of the same elements by every rule; by the trace's alone where memory is short."""
    others = {rule: replace(traced, rule=rule) for rule in PATH_RULES if rule != traced.rule}
    for pair, drawn in drawn_sample(traced, sample, seed):
        found = {traced.rule: follow_elements(traced, drawn, pair)}
        with suppress(TooLarge):
            for rule, other in others.items():
                found[rule] = follow_elements(other, drawn, pair)
        yield found


def _agreement(followed: Sequence[ByRule]) -> list[str]:
    """On which share of the elements all rules choose the same path, in a line."""
    if any(len(each) < len(PATH_RULES) for each in followed):
        return []
    same, many = 0, 0
    for each in followed:
        first, *others = (each[rule].forest for rule in PATH_RULES)
        whole = np.logical_and.reduce([x.whole.numpy() for x in (first, *others)])
        alike = np.logical_and.reduce([same_paths(first, other) for other in others])
        same, many = same + int((alike & whole).sum()), many + int(whole.sum())
    if not many:
        return []
    return [f"the rules choose the same path for {percent(same / many)} of {many:,} elements"]


def same_paths(one: PathForest, other: PathForest) -> Bools:
    """For each start whether both paths visit the same elements; starts must be the same."""
    values, others = _values(one), _values(other)
    element, onward = one.element.numpy(), one.onward.numpy()
    their_element, their_onward = other.element.numpy(), other.onward.numpy()
    here, there = one.starts.numpy(), other.starts.numpy()
    same, left = np.ones(len(here), dtype=bool), np.arange(len(here))
    while len(left):
        equal = (values[here] == others[there]) & (element[here] == their_element[there])
        here, there = onward[here], their_onward[there]
        equal &= (here < 0) == (there < 0)
        same[left[~equal]] = False
        further = equal & (here >= 0)
        left, here, there = left[further], here[further], there[further]
    return same


def _values(forest: PathForest) -> npt.NDArray[np.int64]:
    """The value of every node."""
    sizes = np.diff([*forest.firsts, len(forest.onward)])
    return np.repeat(np.array(forest.values, dtype=np.int64), sizes)
