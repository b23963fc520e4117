"""Does a score of components tell what it costs to remove them? The statistics of that question.

Components that do the same work side by side are *rivals*. Every measure (influence by a rule, a
baseline) gives each of them a score, and removing each has a cost. The *rank correlation within
rivals* takes both as ranks among the rivals, less their mean, and correlates these over all of
them::

    ρ = Σ r·c / √(Σ r² · Σ c²)        r, c: centred ranks of score and cost

It is 1 if the order by score always is the order by cost, and 0 on average if the score knows
nothing; what differs between networks or tasks does not enter. Rivals that cost the same (because
none of them reaches the target) add nothing to Σ r·c.

Rivals of one network share its seed, so they are no independent points: intervals are bootstrapped
over networks. They are 95% intervals of each number alone, not corrected for how many there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import isnan, nan
from typing import Any

import numpy as np
import numpy.typing as npt

from gradtrace.experiments.harness.findings import Plot, Series, Table
from gradtrace.experiments.harness.interleaved_timing import told
from gradtrace.experiments.harness.statistics import (
    Floats,
    Interval,
    average,
    percentiles,
    ranks,
    resample,
)

RULES = {"greedy": "influence (greedy)", "viterbi": "influence (viterbi)"}
"""The two rules, as measures are called."""

BASELINES = ("gradient norm", "|weight × gradient|", "size", "random")
"""Scores that need no tracing. ``size`` is the number of the component's parameters."""

FEWEST = 8
"""With fewer networks a bootstrap says too little about its own width: nothing is concluded."""

WEAK = 0.3
"""A correlation that surely is below this one, and perhaps 0, is as good as none."""


@dataclass(frozen=True)
class Rivals:
    """Components that do the same work, by name, with their scores and what removing them costs."""

    names: tuple[str, ...]
    scores: Mapping[str, Sequence[float]]  # by measure
    costs: Mapping[str, Sequence[float]]  # by kind of cost


@dataclass(frozen=True)
class Network:
    """One trained network: what is drawn independently of the others."""

    group: str
    seed: int
    rivals: tuple[Rivals, ...]


Networks = Sequence[Network]


# Correlation --------------------------------------------------------------------------------------


def correlation(networks: Networks, measure: str, cost: str) -> Interval:
    """The rank correlation within rivals, and its interval over networks."""
    sums = _sums(networks, measure, cost)
    found = _interval(_rho(sums[None]), _rho(sums[_draws(sums)]))
    return Interval(found.value, max(found.low, -1.0), min(found.high, 1.0))


def difference(networks: Networks, first: str, second: str, cost: str) -> Interval:
    """By how much the correlation of one measure is above that of another, on the same networks."""
    a, b = _sums(networks, first, cost), _sums(networks, second, cost)
    draws = _draws(a)
    return _interval(_rho(a[None]) - _rho(b[None]), _rho(a[draws]) - _rho(b[draws]))


def by_group(networks: Networks) -> list[Network]:
    """All networks of a group as one: to draw groups, where they are what was drawn."""
    found: dict[str, tuple[Rivals, ...]] = {}
    for network in networks:
        found[network.group] = (*found.get(network.group, ()), *network.rivals)
    return [Network(group, 0, rivals) for group, rivals in sorted(found.items())]


def drawn_of(networks: Networks) -> Networks:
    """What was drawn: the tasks; of one task, which cannot be drawn again, its networks."""
    tasks = by_group(networks)
    return tasks if len(tasks) > 1 else networks


def is_one_task(networks: Networks) -> bool:
    """Whether all that can be said is of one task."""
    return len({network.group for network in networks}) == 1


def mean(values: Sequence[float]) -> Interval:
    """The mean over networks, with its interval."""
    array = np.asarray(values, dtype=np.float64)
    return _interval(array[None].mean(1), array[_draws(array)].mean(1))


def _draws(values: Floats) -> npt.NDArray[np.int64]:
    """Draws of networks; none where there is but one, which tells nothing of others."""
    return resample(len(values), rounds=2000 if len(values) > 1 else 0)


def _interval(value: Floats, draws: Floats) -> Interval:
    """Of a statistic: its value on all networks (in a row of one), and on draws of them."""
    return percentiles(float(value[0]), draws)


def hits(networks: Networks, measure: str, cost: str) -> tuple[float, float]:
    """How often the rival of the highest score costs the most, and how often chance would do it.

    A tie of n at the top counts 1/n.
    """
    found, chance = [], []
    for rivals in (rivals for network in networks for rivals in network.rivals):
        best, dear = _top(rivals.scores[measure]), _top(rivals.costs[cost])
        found.append(len(best & dear) / len(best))
        chance.append(len(dear) / len(rivals.names))
    return average(found), average(chance)


def _top(values: Sequence[float]) -> set[int]:
    return {place for place, value in enumerate(values) if value == max(values)}


def _sums(networks: Networks, measure: str, cost: str) -> Floats:
    """Σ r·c, Σ r² and Σ c² of every network: (networks, 3)."""
    rows = np.zeros((len(networks), 3))
    for row, network in zip(rows, networks):
        for rivals in network.rivals:
            r, c = _centred(rivals.scores[measure]), _centred(rivals.costs[cost])
            row += (r @ c, r @ r, c @ c)
    return rows


def _centred(values: Sequence[float]) -> Floats:
    """Ranks around their mean; kept, as each is asked for by many statistics."""
    return _centred_ranks(tuple(values))


@lru_cache(maxsize=100_000)
def _centred_ranks(values: tuple[float, ...]) -> Floats:
    found = ranks(values)
    found -= found.mean()
    found.flags.writeable = False
    return found


def _rho(sums: Floats) -> Floats:
    """Of every draw of networks, (draws, networks, 3); nan where nothing differs."""
    both, first, second = np.moveaxis(sums.sum(1), -1, 0)
    norm = np.sqrt(first * second)
    found: Floats = np.divide(both, norm, out=np.full_like(norm, nan), where=norm > 0)
    return found


# Words --------------------------------------------------------------------------------------------


def verdict(interval: Interval, networks: int) -> str:
    """What an interval lets one say.

    >>> verdict(Interval(0.5, 0.2, 0.7), 30), verdict(Interval(0.1, -0.2, 0.5), 30)
    ('predicts', 'cannot tell from 30')
    >>> verdict(Interval(0.0, -0.1, 0.2), 300), verdict(Interval(0.5, 0.2, 0.7), 3)
    ('does not predict', 'cannot tell from 3')
    """
    if networks < FEWEST or np.isnan(interval.value):
        return f"cannot tell from {networks}"
    if interval.sign:
        return "predicts" if interval.sign > 0 else "predicts the opposite"
    return "does not predict" if interval.high < WEAK else f"cannot tell from {networks}"


def stated(name: str, interval: Interval, networks: int, unit: str = "networks") -> str:
    """One measure's verdict as a clause.

    >>> stated("greedy", Interval(0.5, 0.2, 0.7), 30)
    'greedy predicts it (0.50 [0.20, 0.70])'
    >>> stated("greedy", Interval(0.1, -0.2, 0.7), 30)
    'of greedy we cannot tell from 30 networks (0.10 [-0.20, 0.70])'
    """
    word = verdict(interval, networks)
    if word.startswith("cannot"):
        return f"of {name} we {word} {unit} ({interval})"
    word = word.replace("opposite", "opposite of")
    return f"{name} {word} it ({interval})"


def against(networks: Networks, rule: str, cost: str) -> str:
    """A rule beside every baseline, as a clause."""
    words: dict[str, list[str]] = {"better than": [], "worse than": [], "not told apart from": []}
    for baseline in BASELINES:
        sign = difference(networks, RULES[rule], baseline, cost).sign
        if not sign:
            words["not told apart from"].append(baseline)
        else:
            words["better than" if sign > 0 else "worse than"].append(baseline)
    parts = [f"{word} {listed(names)}" for word, names in words.items() if names]
    return f"{rule} is " + "; ".join(parts)


def sentence(networks: Networks, cost: str, what: str) -> str:
    """Both rules, and both against the baselines; ``what`` is the cost in words."""
    question, n = f"Does influence predict {what}?", len(networks)
    found = {name: correlation(networks, name, cost) for name in (*RULES.values(), *BASELINES)}
    if n < FEWEST:
        values = [f"{name} {told(each.value, '.2f')}" for name, each in found.items()]
        return (
            f"{question} {counted(n)} too few to tell; it takes {FEWEST}, and many more to be "
            f"sure. Rank correlations of these: {', '.join(values)}."
        )
    rules = [stated(f"influence by {rule}", found[name], n) for rule, name in RULES.items()]
    others = [f"{name} {found[name]}" for name in BASELINES]
    beside = "; ".join(against(networks, rule, cost) for rule in RULES)
    return (
        f"{question} {capital('; '.join(rules))} [rank correlation among rivals over {n} networks, "
        f"95% interval]. Baselines: {', '.join(others)}. By paired differences, {beside}."
    )


def headline(facts: Mapping[str, Any], what: str) -> str:
    """The verdict on the better rule in a sentence, and the best baseline.

    >>> headline({"networks": 2, "correlations": {"samples": {}}}, "the cost")
    '2 networks are too few to tell whether influence predicts the cost.'
    """
    found = {
        name: Interval(*(nan if x is None else x for x in row))
        for name, row in facts["correlations"]["samples"].items()
    }
    n = facts["networks"]
    if n < FEWEST:
        return f"{counted(n)} too few to tell whether influence predicts {what}."
    ours, best = (
        max(some, key=lambda name: found[name].value) for some in (RULES.values(), BASELINES)
    )
    word = verdict(found[ours], n).replace("cannot tell", "cannot be told to predict")
    return (
        f"Influence {word} {what}: by rank the better rule agrees to {found[ours]}, where 0 is "
        f"chance and 1 perfect; the best score that needs no tracing, {best}, agrees to "
        f"{found[best]}."
    )


def counted(count: float, unit: str = "network") -> str:
    """How many there are.

    >>> counted(1), counted(2, "task")
    ('1 network is', '2 tasks are')
    """
    return f"1 {unit} is" if count == 1 else f"{count:g} {unit}s are"


def capital(text: str) -> str:
    """The text, with a capital first."""
    return text[:1].upper() + text[1:]


def listed(names: Sequence[str]) -> str:
    """Names in a row.

    >>> listed(["a", "b", "c"])
    'a, b and c'
    """
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


# Tables and plots ---------------------------------------------------------------------------------


def correlations(
    networks: Networks, costs: Mapping[str, str], title: str, drawn: Networks = ()
) -> Table:
    """Every measure against every kind of cost; ``costs`` maps kinds to what they are called.

    ``drawn``, if given, are those of ``drawn_of``: verdicts draw these, intervals the networks.
    """
    first = next(iter(costs))
    rows = []
    for measure in measures(networks):
        found = [correlation(networks, measure, cost) for cost in costs]
        hit, chance = hits(networks, measure, first)
        word = verdict(found[0], len(networks))
        if drawn:
            word = task_verdict(drawn, measure, first)
        rows.append((measure, *map(str, found), word, f"{hit:.0%} ({chance:.0%})"))
    note = (
        f"Rank correlation within rivals over {len(networks)} networks, with 95% intervals from a "
        f"bootstrap over networks, each for itself. The verdict is on {costs[first]}, and so is "
        "the share of rivals in which the highest score is the dearest to remove (by chance)."
    )
    if drawn:
        note += f" {ONE_TASK if is_one_task(drawn) else TASKS_DRAWN}"
    return Table(
        title, ("measure", *costs.values(), "verdict", "top is dearest"), tuple(rows), note
    )


TASKS_DRAWN = "Intervals are of these tasks as they are; the verdict is on tasks like them."
ONE_TASK = "Verdicts are on other networks of this one task; of other tasks nothing is said."


def task_verdict(drawn: Networks, measure: str, cost: str) -> str:
    """What the tasks let one say of others, or the networks of one task; those of ``drawn_of``."""
    word = verdict(correlation(drawn, measure, cost), len(drawn))
    one = is_one_task(drawn)
    if word.startswith("cannot"):
        return f"{word} {'network' if one else 'task'}{'s' * (len(drawn) != 1)}"
    return f"{word}, in this task" if one else word


def differences(networks: Networks, cost: str, title: str, drawn: Networks = ()) -> Table:
    """Each rule less each baseline, paired; ``drawn`` as in ``correlations``."""
    rows = []
    for rule, name in RULES.items():
        for baseline in BASELINES:
            found = difference(networks, name, baseline, cost)
            judged = difference(drawn, name, baseline, cost) if drawn else found
            sure = judged.sign if len(drawn or networks) >= FEWEST else 0
            word = {1: "better", -1: "worse", 0: "cannot tell"}[sure]
            rows.append((rule, baseline, round(found.value, 3), *_ends(found), word))
    columns = ("rule", "baseline", "difference", "low", "high", "influence is")
    return Table(title, columns, tuple(rows), "Difference of rank correlations, 95% interval.")


def _ends(interval: Interval) -> tuple[float | None, float | None]:
    low, high = (round(x, 3) if np.isfinite(x) else None for x in interval[1:])
    return low, high


def bars(networks: Networks, cost: str, title: str) -> Plot:
    """The correlation of every measure."""
    every = {name: correlation(networks, name, cost) for name in measures(networks)}
    names = [name for name, each in every.items() if not isnan(each.value)]
    found = [every[name] for name in names]
    series = Series(
        "rank correlation, 95% interval",
        names,
        [each.value for each in found],
        [max(each.low, -1.0) for each in found],
        [min(each.high, 1.0) for each in found],
        style="bars",
    )
    return Plot("correlation", title, "measure", "rank correlation within rivals", (series,))


def measures(networks: Networks) -> list[str]:
    """The names of all measures, rules first."""
    rivals = [rivals for network in networks for rivals in network.rivals]
    return list(rivals[0].scores) if rivals else []


def numbers(networks: Networks, costs: Iterable[str]) -> dict[str, Any]:
    """The correlations as plain numbers, for ``facts``: ``{cost: {measure: [ρ, low, high]}}``."""
    return {
        cost: {
            measure: [_plain(x) for x in correlation(networks, measure, cost)]
            for measure in measures(networks)
        }
        for cost in costs
    }


def _plain(x: float) -> float | None:
    return round(float(x), 6) if np.isfinite(x) else None
