"""What a competition showed: from the loss curves and scores of its networks to a sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite, log2, nan
from typing import Any

from gradtrace.experiments.harness.findings import Findings, Plot, Row, Series, Table
from gradtrace.experiments.harness.statistics import Interval, average, out_of, with_interval
from gradtrace.experiments.rivals import (
    BASELINES,
    FEWEST,
    RULES,
    Network,
    Rivals,
    bars,
    by_group,
    correlation,
    correlations,
    counted,
    differences,
    drawn_of,
    is_one_task,
    mean,
    numbers,
    stated,
    task_verdict,
    verdict,
)

HALF = 0.5
"""The target is set by what the full network reaches in this part of its budget."""

DROP = 0.9
"""The target lies this far on the way from the first loss to the lowest, in logarithms."""

COSTS = {"samples": "samples to target", "final": "final loss", "zeroed": "loss at once"}
"""What a removal costs: log₂ of the ratio of samples; by how much the loss is higher."""

Curve = Sequence[Sequence[float]]
Scores = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Trial:
    """The networks of one task and seed: the full one, and one for each set of removed ones."""

    task: str
    seed: int
    names: tuple[str, ...]
    curves: Mapping[frozenset[str], Curve]
    scores: Sequence[Mapping[str, Any]]
    zeroed: Mapping[str, float]

    @property
    def finite(self) -> bool:
        """Whether it has numbers to compare: of a loss that became NaN there are none."""
        losses = [loss for curve in self.curves.values() for _, loss in curve]
        scores = [score for kind in self.means.values() for score in kind.values()]
        return all(map(isfinite, (*losses, *scores, *self.zeroed.values())))

    @property
    def budget(self) -> float:
        """All samples of the full network."""
        return self.curves[frozenset()][-1][0]

    @cached_property
    def target(self) -> float:
        """The loss to reach."""
        curve = self.curves[frozenset()]
        lowest = min(loss for samples, loss in curve if samples <= HALF * self.budget)
        return float(curve[0][1] ** (1 - DROP) * lowest**DROP)

    def samples(self, removed: Sequence[str] = ()) -> float:
        """How many it takes to get to the target; the budget if it does not."""
        found = crossing(self.curves[frozenset(removed)], self.target)
        return self.budget if found is None else max(found, 1.0)

    def censored(self, removed: Sequence[str]) -> bool:
        """Whether it never got there."""
        return crossing(self.curves[frozenset(removed)], self.target) is None

    def final(self, removed: Sequence[str] = ()) -> float:
        """The last loss: the mean of the last tenth of evaluations, which go up and down."""
        curve = self.curves[frozenset(removed)]
        last = [loss for _, loss in curve[-max(1, len(curve) // 10) :]]
        return average(last)

    @cached_property
    def means(self) -> dict[str, dict[str, float]]:
        """The mean over training of every score: ``{measure: {component: score}}``."""
        kinds = [kind for kind in self.scores[0] if kind != "step"]
        return {
            kind: {n: average(s[kind][n] for s in self.scores) for n in self.names}
            for kind in kinds
        }

    def rivals(self, scores: Scores) -> Rivals:
        """Scores beside costs."""
        costs = {
            "samples": [log2(self.samples([n]) / self.samples()) for n in self.names],
            "final": [self.final([n]) - self.final() for n in self.names],
            "zeroed": [self.zeroed[n] - self.curves[frozenset()][-1][1] for n in self.names],
        }
        return Rivals(self.names, {k: [v[n] for n in self.names] for k, v in scores.items()}, costs)

    def network(self, scores: Scores | None = None) -> Network:
        """For the statistics."""
        return Network(self.task, self.seed, (self.rivals(scores or self.means),))

    def order(self, measure: str) -> list[str]:
        """The components, the highest score first."""
        score = self.means[measure]
        return sorted(self.names, key=lambda name: (-score[name], name))


def crossing(curve: Curve, target: float) -> float | None:
    """Where a curve first is as low as the target, on the line between two points; or None.

    >>> crossing([(0, 3.0), (10, 1.0)], 2.0)
    5.0
    """
    before: tuple[float, float] | None = None
    for samples, loss in curve:
        if loss <= target:
            if before is None or before[1] == loss:
                return float(samples)
            part = (before[1] - target) / (before[1] - loss)
            return before[0] + part * (samples - before[0])
        before = (samples, loss)
    return None


def trials(rows: Sequence[Row]) -> list[Trial]:
    """Rows by task and seed; those that are not complete are left out."""
    groups: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.cell["task"], row.cell["seed"]), []).append(row)
    found = []
    for (task, seed), group in sorted(groups.items()):
        by = {frozenset(row.cell["removed"]): row for row in group}
        names = tuple(group[0].cell["names"])
        if {frozenset(), *(frozenset([name]) for name in names)} <= by.keys():
            full = by[frozenset()].result
            curves = {removed: row.result["curve"] for removed, row in by.items()}
            found.append(Trial(task, seed, names, curves, full["scores"], full["zeroed"]))
    return found


def headline(facts: Mapping[str, Any]) -> str:
    """The answer in a sentence: of tasks like these, not of these alone; one task is all it is."""
    found = facts["over tasks"][RULES["greedy"]]
    if facts["tasks"] == 1:
        return _of_one_task(facts)
    scale = f"by rank, 0 is chance and 1 perfect: {with_interval(found)}"
    if facts["tasks"] < FEWEST:
        return (
            f"{counted(facts['tasks'], 'task')} too few to tell whether the component with more "
            f"influence is the one that a network needs more ({scale})."
        )
    word = verdict(Interval(*(nan if x is None else x for x in found)), int(facts["tasks"]))
    return (
        f"Whether the component with more influence is the one that a network needs more: "
        f"influence {word} it ({scale})."
    )


def _of_one_task(facts: Mapping[str, Any]) -> str:
    """The answer for one task, by the networks that were trained on it."""
    networks, norm = int(facts["networks"]), BASELINES[0]
    ours, theirs = (with_interval(facts["over tasks"][n]) for n in (RULES["greedy"], norm))
    if networks < FEWEST:
        return (
            f"{counted(networks)} too few to tell whether the component with more influence is the "
            f"one that a network needs more (by rank, 0 is chance and 1 perfect: {ours})."
        )
    return (
        f"On one task, the order of components by influence agrees to {ours} with the order in "
        f"which a network needs them (0 is chance and 1 perfect; over {networks} networks), the "
        f"order by the norm of their gradient, which needs no tracing, to {theirs}. One task "
        "tells nothing of others."
    )


def _answer(found: Mapping[str, Interval], drawn: Sequence[Network]) -> str:
    """What the rank correlations let one say, tasks drawn, or the networks of one task."""
    tasks, one = len(drawn), is_one_task(drawn)
    if tasks < FEWEST and one:
        return f"{counted(tasks)} too few to tell whether influence predicts {WHAT}"
    if tasks < FEWEST:
        return f"{counted(tasks, 'task')} too few to tell whether influence predicts {WHAT}"
    rules = [
        stated(f"influence by {rule}", found[name], tasks, "networks" if one else "tasks")
        for rule, name in RULES.items()
    ]
    if not one:
        return f"Does influence predict {WHAT}: {'; '.join(rules)}"
    left = correlation(_turned(drawn), RULES["greedy"], "samples")
    return (
        f"In this one task, does influence predict {WHAT}: {'; '.join(rules)}. Within a kind of "
        f"component, over seeds, greedy agrees to {left}: what is told is which kind is needed here"
    )


def _over_tasks(networks: Sequence[Network]) -> dict[str, Interval]:
    """Correlations with the samples to the target, with intervals that draw tasks, if there are
    several.
    """
    drawn = drawn_of(networks)
    return {name: correlation(drawn, name, "samples") for name in (*RULES.values(), *BASELINES[:2])}


def conclude(rows: Sequence[Row]) -> Findings:
    """Correlations, the chapter's procedure, and how influence went over training."""
    complete = trials(rows)
    found = [trial for trial in complete if trial.finite]
    if not found:
        return Findings("Nothing was measured to the end, so nothing can be said.")
    lost = len(complete) - len(found)
    networks = [trial.network() for trial in found]
    tasks, drawn = sorted({trial.task for trial in found}), drawn_of(networks)
    return Findings(
        f"{_introduction(found)} {_answer(_over_tasks(networks), drawn)}. {_chain(found)} "
        f"{ANEW}"
        + (f" {_number(lost, 'network')} with a loss that is not finite: left out." * bool(lost)),
        tables=(
            correlations(networks, COSTS, "Scores against the cost of removal", drawn),
            differences(networks, "samples", "Influence against the baselines", drawn),
            _by_task(networks),
            _when(found),
            _procedure(found),
            _components(found),
        ),
        plots=(
            bars(networks, "samples", "Which score predicts samples to target?"),
            _scatter(networks),
            _removal(found),
            *(_training([trial for trial in found if trial.task == task]) for task in tasks),
        ),
        facts=_facts(found, networks),
    )


WHAT = "how many more samples a network needs without a component"
ANEW = (
    "This is the chapter's procedure to the letter; planted-competition asks anew, of more tasks "
    "and of networks in which it is known which component is needed."
)


def _introduction(found: Sequence[Trial]) -> str:
    tasks = sorted({trial.task for trial in found})
    seeds = len({trial.seed for trial in found})
    singles = [trial.censored([name]) for trial in found for name in trial.names]
    return (
        f"{', '.join(found[0].names)} side by side in {_number(len(found), 'network')} "
        f"({', '.join(tasks)}; {_number(seeds, 'seed')}), each trained again with parts removed; "
        f"{out_of(sum(singles), len(singles))} without one did not reach the target in the "
        "budget."
    )


def _number(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _facts(found: Sequence[Trial], networks: Sequence[Network]) -> dict[str, Any]:
    return {
        "networks": len(found),
        "tasks": len(by_group(networks)),
        "correlations": numbers(networks, COSTS),
        "over tasks": {
            name: [round(float(x), 6) if isfinite(x) else None for x in each]
            for name, each in _over_tasks(networks).items()
        },
        "verdicts": {
            rule: task_verdict(drawn_of(networks), name, "samples") for rule, name in RULES.items()
        },
        "shares add up": all(
            abs(sum(scores[name].values()) - 1) < 1e-9
            for trial in found
            for scores in trial.scores
            for name in RULES.values()
        ),
    }


# Parts of the answer ------------------------------------------------------------------------------


def _by_task(networks: Sequence[Network]) -> Table:
    """The same for every task alone, and for every component alone, over seeds."""
    rows: list[tuple[str | float | int | None, ...]] = []
    kinds = [*RULES.values(), *BASELINES[:2]]
    for task in sorted({network.group for network in networks}):
        part = [network for network in networks if network.group == task]
        rows.append((task, len(part), *(str(correlation(part, k, "samples")) for k in kinds)))
    turned = _turned(networks)
    rows.append(
        ("over seeds", len(networks), *(str(correlation(turned, k, "samples")) for k in kinds))
    )
    note = (
        "'over seeds' asks something else: for one task and one component, do the seeds in which "
        "it is more influential need it more? A score that only knows that, say, a GRU is better "
        "than an RNN gets 0 there. Its points are few and its intervals rough."
    )
    return Table("By task: samples to target", ("task", "networks", *kinds), tuple(rows), note)


def _turned(networks: Sequence[Network]) -> list[Network]:
    """Seeds of one task and component as rivals, in place of the components of one seed."""
    groups: dict[tuple[str, str], list[tuple[Rivals, int]]] = {}
    for network in networks:
        for place, name in enumerate(network.rivals[0].names):
            groups.setdefault((network.group, name), []).append((network.rivals[0], place))
    found = []
    for (task, name), members in sorted(groups.items()):
        scores = {k: [r.scores[k][p] for r, p in members] for k in members[0][0].scores}
        costs = {k: [r.costs[k][p] for r, p in members] for k in members[0][0].costs}
        names = tuple(str(place) for place in range(len(members)))
        found.append(Network(f"{task} {name}", 0, (Rivals(names, scores, costs),)))
    return found


def _when(found: Sequence[Trial]) -> Table:
    """Does it matter when influence is measured?"""
    kinds = [*RULES.values(), *BASELINES[:2]]
    rows = []
    for place, first in enumerate(found[0].scores):
        part = [t.network({k: t.scores[place][k] for k in kinds}) for t in found]
        rows.append((first["step"], *(str(correlation(part, k, "samples")) for k in kinds)))
    return Table("By the step at which it is measured", ("step", *kinds), tuple(rows))


def _mean_log(found: Sequence[Trial], removed: Sequence[Sequence[str]]) -> float:
    """The geometric mean of samples to the target."""
    logs = [log2(trial.samples(names)) for trial, names in zip(found, removed)]
    return float(2 ** average(logs))


def _longest(found: Sequence[Trial]) -> int:
    """How many were removed together, in every trial and order."""
    return min(max(map(len, trial.curves)) for trial in found)


def _orders(found: Sequence[Trial]) -> dict[str, list[list[str]]]:
    """Orders of removal in every trial, by what they are called."""
    orders = {}
    for measure in (*RULES.values(), *BASELINES):
        orders[f"most {measure} first"] = [trial.order(measure) for trial in found]
    for measure in RULES.values():
        orders[f"least {measure} first"] = [trial.order(measure)[::-1] for trial in found]
    return orders


def _procedure(found: Sequence[Trial]) -> Table:
    """The chapter's: remove the most influential, then the second as well."""
    counts = range(_longest(found) + 1)
    rows: list[tuple[str | float, ...]] = []
    for title, orders in _orders(found).items():
        cut = [[order[:n] for order in orders] for n in counts]
        final = [t.final(names) for t, names in zip(found, cut[-1])]
        rows.append((title, *(round(_mean_log(found, c)) for c in cut), round(average(final), 4)))
    columns = ("order", *(f"{n} removed" for n in counts), f"final loss, {counts[-1]} removed")
    note = (
        "Geometric mean of samples to target; networks that do not get there count with the budget "
        f"of {found[0].budget:,.0f}, so large numbers are too small."
    )
    return Table("The chapter's procedure", columns, tuple(rows), note)


def _chain(found: Sequence[Trial]) -> str:
    """Most influential against least influential first, in words."""
    parts = []
    for rule, measure in RULES.items():
        orders = [trial.order(measure) for trial in found]
        ratio = mean([log2(t.samples(o[:1]) / t.samples(o[-1:])) for t, o in zip(found, orders)])
        low, high = (2.0**x for x in ratio[1:])
        chance = "" if ratio.sign else ", which may be chance"
        few = len(found) < FEWEST
        sure = "" if few else f" ([{low:.2f}, {high:.2f}]{chance})"
        parts.append(f"{2**ratio.value:.2f} times by {rule}{sure}")
    return (
        "The samples that a network needs without its most influential component are those that "
        f"it needs without its least influential one {' and '.join(parts)}."
    )


def _components(found: Sequence[Trial]) -> Table:
    """What each component is like, task by task."""
    rows: list[tuple[str | float, ...]] = []
    for task in sorted({trial.task for trial in found}):
        part = [trial for trial in found if trial.task == task]
        for name in part[0].names:
            shares = [mean([t.means[m][name] for t in part]).value for m in RULES.values()]
            cost = mean([log2(t.samples([name]) / t.samples()) for t in part])
            lost = sum(t.censored([name]) for t in part)
            final = mean([t.final([name]) - t.final() for t in part]).value
            rows.append(
                (task, name, *(round(s, 3) for s in shares), str(cost), lost, round(final, 4))
            )
    columns = ("task", "component", *RULES.values(), "cost", "censored", "final loss")
    note = "Means over seeds. Cost: log₂ of samples to target without it over those with it."
    return Table("Components", columns, tuple(rows), note)


# Plots --------------------------------------------------------------------------------------------


def _scatter(networks: Sequence[Network]) -> Plot:
    points: dict[str, list[tuple[float, float]]] = {}
    for rivals in (network.rivals[0] for network in networks):
        shares, costs = rivals.scores[RULES["greedy"]], rivals.costs["samples"]
        for name, share, cost in zip(rivals.names, shares, costs):
            points.setdefault(name, []).append((share, cost))
    series = tuple(
        Series(name, [x for x, _ in xy], [y for _, y in xy], style="points")
        for name, xy in points.items()
    )
    return Plot(
        "cost",
        "Influence, and what removal costs",
        "influence (greedy), mean over training",
        "log₂ of samples without over with",
        series,
    )


def _removal(found: Sequence[Trial]) -> Plot:
    counts = list(range(_longest(found) + 1))
    series = tuple(
        Series(
            title,
            counts,
            [_mean_log(found, [order[:n] for order in orders]) for n in counts],
            style="dashed" if title.startswith("least") else "line",
            like=title.replace("least", "most") if title.startswith("least") else "",
        )
        for title, orders in _orders(found).items()
        if "influence" in title or "random" in title
    )
    title = "Removing one after the other"
    return Plot("removal", title, "components removed", "samples to target", series, log_y=True)


def _training(found: Sequence[Trial]) -> Plot:
    """The share of every component over training, in one task."""
    series = []
    for rule, measure in RULES.items():
        for name in found[0].names:
            steps = [scores["step"] for scores in found[0].scores]
            shares = [
                mean([trial.scores[place][measure][name] for trial in found])
                for place in range(len(steps))
            ]
            known = all(abs(s.low) < 2 and abs(s.high) < 2 for s in shares)
            series.append(
                Series(
                    f"{name} ({rule})",
                    steps,
                    [s.value for s in shares],
                    [s.low for s in shares] if known else (),
                    [s.high for s in shares] if known else (),
                    style="line" if rule == "greedy" else "dashed",
                    like="" if rule == "greedy" else f"{name} (greedy)",
                )
            )
    task = found[0].task
    title = f"Influence over training: {task}"
    return Plot(
        f"training-{task.replace(':', '-')}", title, "step", "share of paths", tuple(series)
    )
