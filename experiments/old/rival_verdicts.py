"""What the competition of planted components showed: from its rows to verdicts.

The number behind all of it is the *share of pairs in order*: of two rivals in a network, does the
one with the higher score have the higher cost? 1/2 is chance, 1 is always. It is averaged over the
seeds of a task, then over tasks, then over contests; intervals draw tasks, and seeds in each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from math import erfc, inf, isfinite, log2, nan, sqrt
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from gradtrace.experiments.harness.findings import Findings, Plot, Row, Series, Table
from gradtrace.experiments.harness.statistics import (
    Floats,
    Interval,
    average,
    out_of,
    percentiles,
    steady,
    with_interval,
)
from gradtrace.experiments.planted_scores import BASELINES, MEASURES

TAYLOR = "Taylor, signed"
"""The baseline that measures are compared with, chosen before the run."""

CEILING = "mean ablation, other samples"
"""What the endpoint itself says, on samples of its own."""

ENDPOINTS = {"loss": "loss at once", "samples": "samples to 99%", "planted": "planted"}
"""Primary, secondary, and what is known by construction."""

MARGINS = {"loss": 0.02, "samples": 0.25, "planted": 0.5}
"""Costs of two rivals that differ by no more are not told apart: the pair is left out."""

MOMENTS = {"training": "over training", "target": "at the target", "untrained": "untrained"}
CLOSE = 0.05
"""A difference of shares of pairs that does not matter."""

LEVEL, ROUNDS = 0.05, 2000
FEWEST = 8
"""With fewer tasks nothing is concluded."""

Key: TypeAlias = tuple[str, str, str]
"""A measure, an endpoint and a moment."""


# A network ----------------------------------------------------------------------------------------


def in_order(scores: Mapping[str, float], costs: Mapping[str, float], margin: float) -> float:
    """The share of pairs that scores put in the order of costs; nan where no costs differ.

    >>> in_order({"a": 3, "b": 2, "c": 2}, {"a": 1, "b": 0, "c": 0.5}, 0.1)
    0.8333333333333334
    """
    found = []
    for a, b in combinations(costs, 2):
        cost, score = costs[a] - costs[b], scores[a] - scores[b]
        if abs(cost) > margin and isfinite(cost) and isfinite(score):
            found.append(0.5 if score == 0 else float((score > 0) == (cost > 0)))
    return sum(found) / len(found) if found else nan


@dataclass(frozen=True)
class Trial:
    """A network with its rivals."""

    row: Row

    @property
    def place(self) -> tuple[str, int, str]:
        """Task, seed and contest."""
        cell = self.row.cell
        return str(self.row.result["task"]), int(cell["seed"]), str(cell["contest"])

    @cached_property
    def costs(self) -> dict[str, dict[str, float]]:
        """What it costs to lose a component, by endpoint; empty where it is not known."""
        found, budget = self.row.result, self.row.cell["budget"]
        reached = found["reached"]
        samples = {
            part: log2((step or budget) / reached) for part, step in found["without"].items()
        } if reached else {}  # fmt: skip
        return {"loss": found["held"], "samples": samples, "planted": found["truth"]}

    @cached_property
    def scores(self) -> dict[str, dict[str, dict[str, float]]]:
        """By moment and measure; scores of a look are shares of the sum of their sizes."""
        looks = [
            {name: _shares(each) for name, each in look["scores"].items()}
            for look in self.row.result["looks"]
        ]
        later = looks[1:] or looks
        mean = {
            name: {part: average(look[name][part] for look in later) for part in each}
            for name, each in looks[0].items()
        }
        made = {"training": mean, "target": looks[-1], "untrained": looks[0]}
        ceiling = {CEILING: self.row.result["other"]}
        return {moment: each | ceiling for moment, each in made.items()}

    def value(self, key: Key) -> float:
        """The share of pairs in order."""
        measure, endpoint, moment = key
        scores = self.scores[moment][measure]
        return in_order(scores, self.costs[endpoint], MARGINS[endpoint])


def _shares(scores: Mapping[str, float]) -> dict[str, float]:
    total = len(scores) * average(map(abs, scores.values())) or 1.0
    return {part: score / total for part, score in scores.items()}


# All networks -------------------------------------------------------------------------------------


class Contests:
    """The shares of all networks as an array (tasks, seeds, contests), nan where there is none."""

    def __init__(self, trials: Sequence[Trial]) -> None:
        self.trials = trials
        places = [trial.place for trial in trials]
        self.tasks = sorted({place[0] for place in places})
        self.seeds = sorted({place[1] for place in places})
        self.contests = sorted({place[2] for place in places})
        source = np.random.default_rng(0)
        tasks, seeds = len(self.tasks), len(self.seeds)
        self._draw = source.integers(tasks, size=(ROUNDS, tasks))
        self._seeds = source.integers(seeds, size=(ROUNDS, tasks, seeds))
        self._kept: dict[Key, Floats] = {}

    def values(self, key: Key) -> Floats:
        """(tasks, seeds, contests)."""
        if key not in self._kept:
            found = np.full((len(self.tasks), len(self.seeds), len(self.contests)), nan)
            for trial in self.trials:
                task, seed, contest = trial.place
                at = (self.tasks.index(task), self.seeds.index(seed), self.contests.index(contest))
                found[at] = trial.value(key)
            self._kept[key] = found
        return self._kept[key]

    def draws(self, key: Key, contest: str | None = None) -> tuple[float, Floats]:
        """The mean over seeds, tasks and contests (or of one), and that of all rounds."""
        values = self.values(key)
        if contest is not None:
            at = self.contests.index(contest)
            values = values[:, :, at : at + 1]
        drawn = values[self._draw[:, :, None], self._seeds]  # (rounds, tasks, seeds, contests)
        return float(_means(values[None])[0]), _means(drawn)

    def share(self, key: Key, contest: str | None = None) -> Interval:
        """With its interval over tasks and seeds."""
        value, draws = self.draws(key, contest)
        return _interval(value, draws, len(self.tasks))


def _means(values: Floats) -> Floats:
    """(rounds, tasks, seeds, contests) to (rounds,): over seeds, then tasks, then contests."""
    for axis in (2, 1, 1):
        there = np.isfinite(values)
        count = there.sum(axis)
        total = np.where(there, values, 0.0).sum(axis)
        values = np.divide(total, count, out=np.full(total.shape, nan), where=count > 0)
    return values


def _interval(value: float, draws: Floats, tasks: int) -> Interval:
    return percentiles(value, draws) if tasks > 1 else Interval(value, -inf, inf)


class Verdict(NamedTuple):
    """A measure and an endpoint: against chance and against Taylor, in words."""

    share: Interval
    chance: str
    difference: Interval
    taylor: str


def verdicts(found: Contests) -> dict[tuple[str, str], Verdict]:
    """Every measure of ours, every endpoint, over training; corrected by Holm."""
    asked = [(name, end) for end in ENDPOINTS for name in MEASURES if _known(found, name, end)]
    alone, beside = {}, {}
    for name, end in asked:
        value, draws = found.draws((name, end, "training"))
        other, others = found.draws((TAYLOR, end, "training"))
        alone[name, end] = (value - 0.5, draws - 0.5)
        beside[name, end] = (value - other, draws - others)
    sure = [_sure(each) for each in (alone, beside)]
    tasks = len(found.tasks)
    return {
        key: Verdict(
            found.share((*key, "training")),
            _against_chance(alone[key], sure[0][key], tasks),
            _interval(*beside[key], tasks),
            _against_taylor(beside[key], sure[1][key], tasks),
        )
        for key in asked
    }


def _known(found: Contests, name: str, endpoint: str) -> bool:
    return bool(np.isfinite(found.values((name, endpoint, "training"))).any())


def _sure(gaps: Mapping[tuple[str, str], tuple[float, Floats]]) -> dict[tuple[str, str], bool]:
    """Which differences from 0 chance would hardly give, by Holm over all of them."""
    chances = {key: _chance(value, draws) for key, (value, draws) in gaps.items()}
    found, most = {}, 0.0
    for place, key in enumerate(sorted(chances, key=lambda key: chances[key])):
        most = max(most, chances[key] * (len(chances) - place))
        found[key] = most < LEVEL
    return found


def _chance(value: float, draws: Floats) -> float:
    draws = draws[np.isfinite(draws)]
    error = float(draws.std()) if len(draws) else 0.0
    if not error:
        return 0.0 if value and isfinite(value) else 1.0
    return erfc(abs(value) / error / sqrt(2))


def _within(draws: Floats) -> bool:
    """Whether two one-sided tests say that a difference does not matter."""
    draws = draws[np.isfinite(draws)]
    if not len(draws):
        return False
    low, high = np.quantile(draws, [LEVEL, 1 - LEVEL])
    return bool(low > -CLOSE and high < CLOSE)


def _against_chance(gap: tuple[float, Floats], sure: bool, tasks: int) -> str:
    if tasks < FEWEST:
        return "cannot tell"
    if sure:
        return "tells" if gap[0] > 0 else "misleads"
    return "a guess" if _within(gap[1]) else "cannot tell"


def _against_taylor(gap: tuple[float, Floats], sure: bool, tasks: int) -> str:
    if tasks < FEWEST:
        return "cannot tell"
    word = ("better" if gap[0] > 0 else "worse") if sure else ""
    same = "equivalent" if _within(gap[1]) else ""
    return ", but ".join(filter(None, (word, same))) or "cannot tell"


# Words --------------------------------------------------------------------------------------------


def conclude(rows: Sequence[Row]) -> Findings:
    """Verdicts for all endpoints, and what they rest on."""
    trials = [
        Trial(row) for row in sorted(rows, key=lambda row: (row.result["task"], str(row.cell)))
    ]
    found = Contests(trials)
    if not any(_known(found, name, end) for name in MEASURES for end in ENDPOINTS):
        return Findings("No two components differ in what they cost, so nothing can be said.")
    said = verdicts(found)
    return Findings(
        _sentence(found, said),
        tables=(
            _endpoints(found, said),
            _compared(said),
            _by_contest(found),
            _by_moment(found),
            _by_task(found),
            _networks(found),
            _limits(found),
        ),
        plots=(_bars(found), _moments(found), _scatter(trials)),
        facts=_facts(found, said),
    )


def _facts(found: Contests, said: Mapping[tuple[str, str], Verdict]) -> dict[str, Any]:
    names = (*MEASURES, *BASELINES, CEILING)
    return {
        "networks": len(found.trials),
        "tasks": len(found.tasks),
        "pairs in order": {
            end: {name: _numbers(found.share((name, end, "training"))) for name in names}
            for end in ENDPOINTS
        },
        "less Taylor": {
            end: {name: _numbers(v.difference) for (name, e), v in said.items() if e == end}
            for end in ENDPOINTS
        },
        "verdicts": {
            end: {name: [v.chance, v.taylor] for (name, e), v in said.items() if e == end}
            for end in ENDPOINTS
        },
    }


def _numbers(interval: Interval) -> list[float | None]:
    return [round(float(x), 4) if isfinite(x) else None for x in interval]


BESIDE = {
    "better": "influence is better",
    "worse": "influence is worse",
    "equivalent": "influence is as good",
    "better, but equivalent": "influence is better, by too little to matter",
    "worse, but equivalent": "influence is worse, by too little to matter",
    "cannot tell": "whether influence is as good cannot be told",
}
"""Verdicts beside Taylor, in words."""


def headline(facts: Mapping[str, Any]) -> str:
    """The answer for the greedy rule, beside the baseline."""
    greedy, taylor = (facts["pairs in order"]["loss"][name] for name in ("greedy", TAYLOR))
    if facts["tasks"] < FEWEST or None in (*greedy, *taylor):
        return (
            f"{facts['tasks']:g} tasks are too few to tell whether influence finds what is needed."
        )
    beside = _beside(facts["verdicts"]["loss"]["greedy"][1], facts["less Taylor"]["loss"]["greedy"])
    return (
        "Of two components of a network, the one with more influence during training is the one "
        f"that it can spare less in {with_interval(greedy, percent=True)} of cases, where a guess "
        f"is right in 50%. A Taylor score, which needs no tracing, is right in "
        f"{with_interval(taylor, percent=True)}: {beside}."
    )


def _beside(verdict: str, difference: Sequence[float | None]) -> str:
    """A verdict beside Taylor in words. Where the interval of the difference leaves out 0, and only
    the correction for the number of comparisons withholds a verdict, both are said.
    """
    value, low, high = difference
    if verdict != "cannot tell" or value is None or low is None or high is None or low * high <= 0:
        return BESIDE[verdict]
    sizes = sorted((abs(low), abs(high)))
    return (
        f"influence is probably {'better' if value > 0 else 'worse'}, by {abs(value) * 100:.0f} "
        f"[{sizes[0] * 100:.0f}, {sizes[1] * 100:.0f}] points, but this may still be chance"
    )


def _told(interval: Interval) -> str:
    if not isfinite(interval.value):
        return "–"
    if not isfinite(interval.low):
        return f"{interval.value:.2f}"
    return f"{interval.value:.2f} [{interval.low:.2f}, {interval.high:.2f}]"


def _sentence(found: Contests, said: Mapping[tuple[str, str], Verdict]) -> str:
    reached = sum(trial.row.result["reached"] is not None for trial in found.trials)
    about = (
        f"{len(found.trials)} networks of three rivals, {len(found.tasks)} tasks, "
        f"{len(found.seeds)} seed{'s' * (len(found.seeds) != 1)}; "
        f"{out_of(reached, len(found.trials))} reached the target."
    )
    parts = []
    for end, title in ENDPOINTS.items():
        greedy = said.get(("greedy", end))
        if greedy is None:
            continue
        taylor, top = (found.share((name, end, "training")) for name in (TAYLOR, CEILING))
        parts.append(
            f"{title[0].upper()}{title[1:]}: greedy puts {_told(greedy.share)} of pairs in order, "
            f"Taylor {_told(taylor)}, mean ablation on other samples {_told(top)}"
        )
    counts = [
        f"Of our {len(MEASURES)} measures, by {title}: "
        f"{_counted([v for (_, e), v in said.items() if e == end])}."
        for end, title in ENDPOINTS.items()
        if any(e == end for _, e in said)
    ]
    before = _told(found.share(("greedy", "loss", "untrained")))
    return (
        f"{about} {'. '.join(parts)}. Before training, greedy has {before} (loss at once). "
        f"{' '.join(counts)}"
    )


def _counted(said: Sequence[Verdict]) -> str:
    """How many measures have each verdict."""
    chance, taylor = [v.chance for v in said], [v.taylor for v in said]
    better, worse = (sum(word.startswith(sign) for word in taylor) for sign in ("better", "worse"))
    return (
        f"{chance.count('tells')} tell more than a guess, {chance.count('misleads')} mislead; "
        f"{better} are surely better than Taylor, {worse} surely worse and "
        f"{sum('equivalent' in word for word in taylor)} equivalent; the others cannot be told"
    )


# Tables -------------------------------------------------------------------------------------------


def _endpoints(found: Contests, said: Mapping[tuple[str, str], Verdict]) -> Table:
    """Every measure and baseline, every endpoint."""
    rows = []
    for name in (*MEASURES, *BASELINES, CEILING):
        shares = [_told(found.share((name, end, "training"))) for end in ENDPOINTS]
        ours = [said[name, end].chance if (name, end) in said else None for end in ENDPOINTS]
        rows.append((name, *(x for pair in zip(shares, ours) for x in pair)))
    columns = [x for title in ENDPOINTS.values() for x in (title, f"verdict, {title}")]
    note = (
        "The share of pairs of rivals in the order of what they cost; 0.5 is a guess. Scores are "
        "means over training until the target. 95% intervals over tasks and seeds; verdicts by "
        "Holm over all measures of ours and endpoints. 'A guess': surely within 0.05 of one."
    )
    return Table("Which score tells what is needed?", ("score", *columns), tuple(rows), note)


def _compared(said: Mapping[tuple[str, str], Verdict]) -> Table:
    rows = []
    for name in MEASURES:
        row: list[str | None] = [name]
        for end in ENDPOINTS:
            verdict = said.get((name, end))
            row += [_told(verdict.difference), verdict.taylor] if verdict else [None, None]
        rows.append(tuple(row))
    columns = [x for title in ENDPOINTS.values() for x in (title, f"verdict, {title}")]
    note = (
        "Share of pairs in order, less that of the Taylor score. Equivalent: surely within "
        f"{CLOSE} (two one-sided tests at 5%). Better and worse: by Holm."
    )
    return Table("Influence less the Taylor score", ("measure", *columns), tuple(rows), note)


def _by_contest(found: Contests) -> Table:
    rows = tuple(
        (name, *(_told(found.share((name, "loss", "training"), c)) for c in found.contests))
        for name in (*MEASURES, *BASELINES, CEILING)
    )
    return Table("By contest: loss at once", ("score", *found.contests), rows)


def _by_moment(found: Contests) -> Table:
    rows = tuple(
        (name, *(_told(found.share((name, "loss", moment))) for moment in MOMENTS))
        for name in (*MEASURES, *BASELINES)
    )
    note = "Untrained: the control. What it tells beyond 0.5 is not learned."
    return Table("By when it is measured: loss at once", ("score", *MOMENTS.values()), rows, note)


def _by_task(found: Contests) -> Table:
    """Of every task alone, over contests and seeds."""
    kinds = ("greedy", "viterbi", TAYLOR, CEILING)
    rows = []
    for place, task in enumerate(found.tasks):
        means = [
            _means(found.values((k, "loss", "training"))[None, place : place + 1]) for k in kinds
        ]
        part = [t.row.result["reached"] for t in found.trials if t.place[0] == task]
        steps = sorted(step for step in part if step is not None)
        middle = steps[len(steps) // 2] if steps else None
        values = (round(steady(m[0]), 2) if isfinite(m[0]) else None for m in means)
        rows.append((task, *values, f"{len(steps)} of {len(part)}", middle))
    columns = ("task", *kinds, "reached the target", "median step")
    return Table("By task: loss at once", columns, tuple(rows))


def _networks(found: Contests) -> Table:
    """What components cost, by contest."""
    rows: list[tuple[str | float | int | None, ...]] = []
    for contest in found.contests:
        part = [trial for trial in found.trials if trial.place[2] == contest]
        for title, members in _titles(part).items():
            losses = [t.costs["loss"][p] for t, p in members]
            shares = [t.scores["training"]["greedy"][p] for t, p in members]
            before = [t.scores["untrained"]["greedy"][p] for t, p in members]
            known = [(t, p) for t, p in members if t.costs["samples"]]
            lost = sum(t.row.result["without"][p] is None for t, p in known)
            more = [t.costs["samples"][p] for t, p in known]
            numbers = [_mean(each) for each in (losses, more)]
            rows.append(
                (contest, title, *numbers, f"{lost} of {len(known)}", _mean(before), _mean(shares))
            )
    columns = (
        *("contest", "component", "loss at once", "log₂ samples", "never got there"),
        *("greedy, untrained", "greedy, over training"),
    )
    note = "Means over tasks and seeds; 'never got there': without it, within the budget."
    return Table("What the components are like", columns, tuple(rows), note)


def _titles(trials: Sequence[Trial]) -> dict[str, list[tuple[Trial, str]]]:
    found: dict[str, list[tuple[Trial, str]]] = {}
    for trial in trials:
        truth, names = trial.row.result["truth"], trial.row.result["names"]
        for part, name in names.items():
            title = ("planted" if truth[part] else trial.place[2]) if truth else name
            found.setdefault(title, []).append((trial, part))
    return dict(sorted(found.items()))


def _mean(values: Sequence[float]) -> float | None:
    known = [value for value in values if isfinite(value)]
    return round(average(known), 3) if known else None


def _limits(found: Contests) -> Table:
    """How many pairs there were to tell apart."""
    rows = []
    for end, title in ENDPOINTS.items():
        counts = []
        for contest in found.contests:
            every = [
                abs(t.costs[end][a] - t.costs[end][b]) > MARGINS[end]
                for t in found.trials
                if t.place[2] == contest and t.costs[end]
                for a, b in combinations(t.costs[end], 2)
            ]
            counts.append(f"{sum(every)} of {len(every)}")
        rows.append((title, *counts))
    return Table("Pairs whose costs differ", ("endpoint", *found.contests), tuple(rows), LIMITS)


LIMITS = (
    "Limits: networks are tiny and words short, and most of what intervals hold is how tasks "
    "differ. Tasks are drawn from six families and speak for these. Mean ablation takes away what "
    "a component adds for one word and not for another; what it adds for all is not counted. A "
    "frozen component has no gradient of its own, so the gradient norm finds the planted one there "
    "for nothing. Integrated gradients see an eighth of the samples, mass a quarter, as they cost "
    "more."
)


# Figures ------------------------------------------------------------------------------------------


def _bars(found: Contests) -> Plot:
    names = [n for n in (*MEASURES, *BASELINES, CEILING) if _known(found, n, "loss")]
    shares = [found.share((name, "loss", "training")) for name in names]
    return Plot(
        "pairs",
        "Which score tells what a network can spare less?",
        "",
        "share of pairs in order (a guess: 0.5)",
        (_series("loss at once, 95% interval", names, shares, "bars"),),
    )


def _series(label: str, x: Sequence[str | float], shares: Sequence[Interval], style: str) -> Series:
    low = [s.low if isfinite(s.low) else s.value for s in shares]
    high = [s.high if isfinite(s.high) else s.value for s in shares]
    return Series(label, x, [s.value for s in shares], low, high, style)


def _moments(found: Contests) -> Plot:
    """Untrained, over training, at the target."""
    order = ("untrained", "training", "target")
    series = []
    for name in ("greedy", "viterbi", "decomposition", TAYLOR, "gradient norm"):
        if _known(found, name, "loss"):
            shares = [found.share((name, "loss", moment)) for moment in order]
            series.append(_series(name, [MOMENTS[moment] for moment in order], shares, "line"))
    title = "When is it measured?"
    return Plot("moments", title, "", "share of pairs in order (a guess: 0.5)", tuple(series))


def _scatter(trials: Sequence[Trial]) -> Plot:
    points: dict[str, list[tuple[float, float]]] = {}
    for trial in trials:
        for part, cost in trial.costs["loss"].items():
            share = trial.scores["training"]["greedy"][part]
            points.setdefault(trial.place[2], []).append((share, cost))
    series = tuple(
        Series(contest, [x for x, _ in xy], [y for _, y in xy], style="points")
        for contest, xy in sorted(points.items())
    )
    title = "Influence, and what it costs to lose a component"
    return Plot("cost", title, "influence (greedy), over training", "loss at once, nats", series)
