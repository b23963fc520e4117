"""``Agreement``: whether the rules find the same paths, and the same shares of components."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import isnan, nan
from typing import Any

import numpy as np
import numpy.typing as npt

from gradtrace.components.components import ComponentSelection
from gradtrace.io.table import ComponentRows, Tabular, TextColumn, TextTable, known
from gradtrace.paths.path_forest import PathForest
from gradtrace.paths.paths import path_provenance
from gradtrace.tracing.counting import count_followed
from gradtrace.tracing.coverage import Coverage, percent
from gradtrace.tracing.followed import FollowedElements, ends_of, follow_sample
from gradtrace.tracing.rules import RULES
from gradtrace.tracing.traced_program import TracedProgram

PATH_RULES = tuple(name for name in RULES if name != "gradient")
"""The rules that choose paths."""

CONTRADICTION = 0.2
"""Rules contradict each other on a component if their shares differ by more than this."""

NONE_OR_ALL = 0.01
"""By a rule no path passes a component if its share is below this, and all do if it is as near to
1. Then a difference of ``AGAINST_NONE_OR_ALL`` is a contradiction.
"""

AGAINST_NONE_OR_ALL = 0.1

NAMED = 3
"""How many contradictions are put in words."""

Pair = tuple[str, str]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class ComponentShares:
    """The share of one component by each rule; nan where no element is eligible."""

    name: str
    shares: Mapping[str, float]

    @property
    def difference(self) -> float:
        """The largest difference between two rules; nan if no rule has a share."""
        known = [share for share in self.shares.values() if not isnan(share)]
        return max(known) - min(known) if known else nan

    @property
    def contradicts(self) -> bool:
        """Whether the rules contradict each other: shares differ by more than 20 points, or by more
        than 10 where one rule says that none or all pass (below 1%, above 99%).

        >>> rows = (0.5, 0.29), (0.5, 0.31), (0.12, 0.0), (0.88, 1.0), (0.2, 0.08)
        >>> [ComponentShares("", {"greedy": a, "viterbi": b}).contradicts for a, b in rows]
        [True, False, True, True, False]
        """
        known = [share for share in self.shares.values() if not isnan(share)]
        extreme = any(min(share, 1 - share) < NONE_OR_ALL for share in known)
        return self.difference > (AGAINST_NONE_OR_ALL if extreme else CONTRADICTION)

    def in_words(self) -> str:
        """``conv2: 51% by greedy, 0% by viterbi``."""
        parts = (f"{percent(share)} by {rule}" for rule, share in self.shares.items())
        return f"{self.name}: {', '.join(parts)}"


@dataclass(frozen=True)
class Agreement(ComponentRows[ComponentShares], Tabular):
    """How far the rules agree, over the same sample of elements.

    ``same_path`` is, for each two rules, the share of elements for which both find the identical
    path: the same elements, by the same arguments of the same operators. ``same_components``: the
    share for which both paths pass through the same set of components. ``elements`` is the number
    of elements that have a path by every rule, which these are shares of. ``rows`` has the share of
    each component by each rule (as ``influence(sample=...)`` has it), those that differ most first;
    ``coverage`` is what part of the gradient the paths of each rule carry.
    """

    rows: tuple[ComponentShares, ...]
    same_path: Mapping[Pair, float]
    same_components: Mapping[Pair, float]
    coverage: Mapping[str, Coverage]
    elements: int

    @property
    def rules(self) -> tuple[str, ...]:
        """The rules that were compared."""
        return tuple(self.coverage)

    @property
    def contradictions(self) -> tuple[ComponentShares, ...]:
        """The components on which rules contradict each other (see ``ComponentShares``), those that
        differ most first.
        """
        return tuple(row for row in self.rows if row.contradicts)

    # Display -------------------------------------------------------------------------------------

    def warning(self) -> str:
        """The contradictions in words; empty if there are none."""
        return _in_words(self.contradictions)

    def lines(self) -> tuple[str, ...]:
        """For each two rules how often they agree, then coverage by rule and contradictions."""
        found = [
            f"{' and '.join(pair)} choose the same path for {percent(share)} of elements, and the "
            f"same components for {percent(self.same_components[pair])}"
            for pair, share in self.same_path.items()
            if self.elements
        ]
        found += [f"{rule}: {each.in_words()}" for rule, each in self.coverage.items()]
        return (*found, *filter(None, [self.warning()]))

    def table(self) -> TextTable:
        """The shares of components by each rule, those that differ most first."""
        shares = (TextColumn(rule, "share") for rule in self.rules)
        columns = (TextColumn("component"), *shares, TextColumn("difference", "share"))
        rows = tuple(
            (row.name, *(known(row.shares[rule]) for rule in self.rules), known(row.difference))
            for row in self.rows
        )
        title = f"Agreement of rules ({self.elements:,} elements)"
        return TextTable(title, columns, rows, self.lines())

    def __repr__(self) -> str:
        pairs = (f"{' = '.join(p)} {percent(share)}" for p, share in self.same_path.items())
        return f"Agreement({', '.join(pairs)}, {self.elements:,} elements)"


def _in_words(found: Sequence[ComponentShares]) -> str:
    if not found:
        return ""
    more = f"; and {len(found) - NAMED:,} more" if len(found) > NAMED else ""
    named = "; ".join(row.in_words() for row in found[:NAMED])
    return f"The rules contradict each other: {named}{more}"


def warning_of(tables: Mapping[str, Mapping[str, float]]) -> str:
    """``Agreement.warning`` of the shares of components by each rule.

    >>> warning_of({"greedy": {"conv2": 0.51}, "viterbi": {"conv2": 0.0}})
    'The rules contradict each other: conv2: 51% by greedy, 0% by viterbi'
    """
    one, *others = tables.values()
    tables = {rule: tables[rule] for rule in PATH_RULES if rule in tables}
    rows = _rows([name for name in one if all(name in by for by in others)], tables)
    return _in_words([row for row in rows if row.contradicts])


def _rows(
    names: Sequence[str], tables: Mapping[str, Mapping[str, float]]
) -> tuple[ComponentShares, ...]:
    """The shares of each component by every rule, those that differ most first."""
    found = [ComponentShares(n, {rule: by[n] for rule, by in tables.items()}) for n in names]
    found.sort(key=lambda row: 0.0 if isnan(row.difference) else -1 - row.difference)
    return tuple(found)


# Measuring ----------------------------------------------------------------------------------------


def agreement(
    traced: TracedProgram, chosen: ComponentSelection, sample: int, seed: int
) -> Agreement:
    """Follow the same elements by every rule. The program is not recorded again."""
    followed: dict[str, list[FollowedElements]] = {}
    shares: dict[str, dict[str, float]] = {}
    coverage: dict[str, Coverage] = {}
    for rule in PATH_RULES:
        by_rule = traced if rule == traced.rule else replace(traced, rule=rule)
        followed[rule] = list(follow_sample(by_rule, sample, seed))
        ends = (ends_of(by_rule, some, chosen.component_bits) for some in followed[rule])
        table = count_followed(by_rule, chosen, ends)
        assert table.measured is not None
        shares[rule], coverage[rule] = table.shares, table.measured
    passed = {rule: _passed(traced, chosen, some) for rule, some in followed.items()}
    whole = np.logical_and.reduce([_joined([f.forest.whole for f in x]) for x in followed.values()])
    same_path, same_components = dict[Pair, float](), dict[Pair, float]()
    for one, other in combinations(followed, 2):
        forests = zip(followed[one], followed[other])
        same = _joined([same_paths(a.forest, b.forest) for a, b in forests])
        same_path[one, other] = _share(same, whole)
        alike = (passed[one] == passed[other]).all(1)
        same_components[one, other] = _share(alike, whole)
    rows = _rows([component.name for component in chosen.components], shares)
    return Agreement(rows, same_path, same_components, coverage, int(whole.sum()))


def _share(which: Bools, among: Bools) -> float:
    many = int(among.sum())
    return int((which & among).sum()) / many if many else nan


def _joined(parts: list[Any]) -> Bools:
    return np.concatenate([np.zeros(0, dtype=bool), *(np.asarray(part) for part in parts)])


def _passed(
    traced: TracedProgram, chosen: ComponentSelection, followed: list[FollowedElements]
) -> Bools:
    """For each followed element, whether its path passes each component: (elements, components)."""
    bits = [component.bits for component in chosen.components]
    found = [np.zeros((0, len(bits)), dtype=bool)]
    for each in followed:
        sets, number = path_provenance(each.forest, traced.program, chosen.component_bits)
        rows = np.array([[bool(one & part) for part in bits] for one in sets], dtype=bool)
        found.append(rows.reshape(len(sets), len(bits))[number.numpy()])
    return np.concatenate(found)


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
