"""Planted answers: which measure finds the component that is known to matter, and when?

Question: In networks whose answer is known by construction, which measures rank what matters above
what does not? Does any of gradtrace's do so as well as the best baseline, or better?

Expectation: From pilots: influence finds a planted component once learning has happened; before, it
is misled by gain. Whether it beats a Taylor score with mean baseline is open. In the circuit EAP
cannot fail: the result is linear in what an edge carries, so it is the effect of ablation itself.

Method: Four families (``gradtrace.experiments.planted_networks``). "views": four equal branches, of
which one sees the signal, the others noise, with a gain of 1/4, 1, 4 or 16 on their outputs.
"gates": four frozen branches behind gates of 1, 1/2, 1/4 and 1/8; they are alike, or differ in
frequency, in a gain or in a constant that is taken back outside. "heads": two layers of attention
with masks of equal length; one head sees the word before, one sees far back, and the task needs
both, one after the other. "circuit": a program compiled by hand with edges that cannot matter: from
a constant, to a sum that is taken away again, to a clamp. All are trained by Adam, and scored at
step 0, which is the untrained control (of the circuit: the same wires with random weights), over
400 steps, and views and gates once more after 3,200; views with distractors × 16 after 12,800, too.
Networks of a kind have converged if in the second half of their steps they gain less than one point
of accuracy on held-out samples, surely (by the interval over networks). Every measure gets the same
number of passes: those that cost more see fewer samples (``gradtrace.experiments.planted_scores``).
Where edges are asked for, the ordered pairs of heads and all of the circuit, EAP and EAP-IG are
baselines, too; both compare with the mean, and the result of the circuit, which is no loss, counts
by its absolute value in each sample. The score of a measure in a network is its AUC, the share of
pairs (one that matters more, one that matters less) that it puts in the right order, 1/2 for ties.
Differences from the best baseline of a cell are tested in pairs over networks, and corrected by
Holm for all measures and cells.

Seeds: one for each network of a cell: its weights, what is planted where, its teacher, batches and
samples; by default 64.

Limits: All networks are small, and what matters in them is what was planted, one thing at a time;
real networks share work among parts. AUC asks for order, not for size. That a measure is best over
these eleven kinds does not make it best over others: the interval draws kinds and networks, but
kinds were chosen, not drawn. EAP has no place where components are not joined by a sum, and in the
circuit it is no test of EAP. This was first published with 400 steps and no EAP in the circuit;
both were added when those results were known, and the page has what was found at step 400, too. How
many steps to add was chosen by the loss of 15 other networks, before any was scored. They were run
a day later on another machine, the circuit anew: all its earlier scores came out equal, and so did
the accuracy of all networks at step 400. Views with distractors × 16, which had not converged by
step 3,200, were trained on to 12,800 when all other results were known; that many by the accuracy
of three other networks. While this was built, heads were given a tensor each to read, since EAP
gave all heads of a layer one score; whether results had been looked at by then is not on record.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from math import erfc, inf, isfinite, sqrt
from random import Random
from statistics import fmean
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Generator

from gradtrace.experiments.harness.findings import (
    Cell,
    Findings,
    Plot,
    Result,
    Row,
    Seeds,
    Series,
    Table,
    Tick,
)
from gradtrace.experiments.harness.statistics import Interval, percentiles, resample, with_interval
from gradtrace.experiments.planted_networks import Planted, build, joined
from gradtrace.experiments.planted_scores import (
    BASELINES,
    EDGE_BASELINES,
    MEASURES,
    Batch,
    scores,
)
from gradtrace.experiments.rivals import capital, listed
from gradtrace.experiments.training import descent, plain

FULL: dict[str, Any] = {
    "kinds": {
        "views": ["0.25", "1", "4", "16"],
        "gates": ["equal", "frequency", "gain", "offset"],
        "heads": ["induction"],
        "circuit": ["compiled", "random"],
    },
    "looks": {
        "views": [0, 10, 25, 50, 100, 200, 400],
        "gates": [0, 50, 400],
        "heads": [0, 50, 100, 200, 400],
        "circuit": [0],
    },
    "converged": {"views": 3200, "gates": 3200, "views 16": 12_800},
    "rate": {"views": 0.01, "gates": 0.01, "heads": 0.005, "circuit": 0.0},
    "batch": 64,
    "passes": 64,
    "evaluated": 512,
}
QUICK: dict[str, Any] = FULL | {
    "kinds": {
        "views": ["4"],
        "gates": ["offset"],
        "heads": ["induction"],
        "circuit": ["compiled", "random"],
    },
    "looks": {"views": [0, 60], "gates": [0, 20], "heads": [0, 20], "circuit": [0]},
    "converged": {"views": 120, "gates": 40},
    "passes": 24,
}
SEEDS = Seeds(quick=2, full=64)
TIMED = False

CLOSE = 0.02
"""A measure whose AUC is no further below the best baseline's is as good, for what we ask."""

POINT = 0.01
"""Networks that gain less accuracy than that in the second half of their steps have converged."""

FIRST_END = 400
"""Where the first run of this ended."""

LEVEL = 0.05
FEWEST = 8
"""With fewer networks in a cell nothing is tested."""

Floats: TypeAlias = npt.NDArray[np.float64]


def cells(settings: Mapping[str, Any], seeds: int) -> list[Cell]:
    """One for each network, and one for each that is trained on until it has converged; seeds
    first, so that a run that is stopped has some of everything.
    """
    shared = {key: settings[key] for key in ("batch", "passes", "evaluated")}
    return [
        shared
        | {"network": network, "kind": kind, "seed": seed}
        | {"looks": looks, "rate": settings["rate"][network]}
        for seed in range(seeds)
        for network, kinds in settings["kinds"].items()
        for kind in kinds
        for looks in _looks(settings, network, kind)
    ]


def _looks(settings: Mapping[str, Any], network: str, kind: str) -> list[list[int]]:
    """The steps at which the cells of a network are scored: on the way, and after those of its
    family and of its kind.
    """
    ends = [settings["converged"].get(name) for name in (network, f"{network} {kind}")]
    return list(filter(None, [settings["looks"][network], *([end] for end in ends if end)]))


def measure(cell: Cell, tick: Tick) -> Result:
    """Train a network, and score its components on the way."""
    model = build(cell)
    batches, found, course = _generator(cell, "batches"), [], []
    held = model.draw(cell["evaluated"], _generator(cell, "evaluation"))
    doublings = {max(cell["looks"]) >> place for place in range(4)}
    with plain():
        for step in _steps(model, cell, batches):
            if step in doublings:
                course.append({"step": step, **_learned_by_now(model, held)})
            if step in cell["looks"]:
                found.append(_look(model, cell, step, held))
                name = f"{cell['network']} {cell['kind']} {cell['seed']}"
                tick(f"{name}: step {step}, right {found[-1]['right']:.0%}")
    truth = model.groups
    pairs = {joined(*pair): value for pair, value in model.pairs.items()}
    return {"looks": found, "course": course, "truth": [*truth, pairs] if pairs else truth}


def _steps(model: Planted, cell: Cell, batches: Generator) -> Iterable[int]:
    if not model.trains:
        return (0,)

    def loss() -> torch.Tensor:
        return model.losses(*model.draw(cell["batch"], batches)).mean()

    return descent(model, loss, max(cell["looks"]), cell["rate"])


@torch.no_grad()
def _learned_by_now(model: Planted, held: Batch) -> dict[str, float]:
    """The share of held-out samples that are right, and their mean loss."""
    loss = float(model.losses(*held).mean())
    return {"right": round(model.right(*held), 4), "loss": float(f"{loss:.6g}")}


def _look(model: Planted, cell: Cell, step: int, held: Batch) -> Result:
    source = _generator(cell, f"scored {step}")
    right = _learned_by_now(model, held)["right"]
    said = scores(model, lambda samples: model.draw(samples, source), cell["passes"])
    rounded = {
        name: {key: float(f"{value:.6g}") for key, value in each.items()}
        for name, each in said.items()
    }
    return {"step": step, "right": right, "scores": rounded}


def _generator(cell: Cell, what: str) -> Generator:
    name = f"planted/{cell['network']}/{cell['kind']}/{cell['seed']}/{what}"
    return Generator().manual_seed(Random(name).getrandbits(63))


# What was found -----------------------------------------------------------------------------------


class Question(NamedTuple):
    """One kind of network, or the ordered pairs of one: AUC by step, network and measure."""

    name: str
    measures: tuple[str, ...]
    found: Mapping[int, Floats]  # by step: (networks, measures)
    right: Mapping[int, Floats]  # by step, at more steps: (networks,)

    @property
    def final(self) -> Floats:
        """At the end of training."""
        return self.found[max(self.found)]

    def until(self, step: int) -> Question:
        """As if training had ended there."""
        found = {at: values for at, values in self.found.items() if at <= step}
        return self._replace(found=found) if found else self

    def gained(self) -> Interval | None:
        """Accuracy that was gained in the second half of the steps; None where this is unknown."""
        last = max(self.right)
        if not last or last // 2 not in self.right:
            return None
        with np.errstate(invalid="ignore"):
            return _mean(self.right[last] - self.right[last // 2])

    def at(self, measure: str, values: Floats) -> Floats:
        """One measure: (networks,)."""
        column: Floats = values[:, self.measures.index(measure)]
        return column


def auc(truth: Mapping[str, float], said: Mapping[str, float]) -> float:
    """The share of pairs of different truth that scores put in the same order; ties count half.
    Where there is none, nothing is told: 1/2.

    >>> auc({"a": 1, "b": 0, "c": 0}, {"a": 2, "b": 1, "c": 2})
    0.75
    """
    pairs = [(said[a], said[b]) for a in truth for b in truth if truth[a] > truth[b]]
    wins = sum(1.0 if a > b else 0.5 if a == b else 0.0 for a, b in pairs)
    return wins / len(pairs) if pairs else 0.5


def headline(facts: Mapping[str, Any]) -> str:
    """The answer in two sentences."""
    if "ours" not in facts:
        return "No network was trained, so nothing can be said."
    ours, theirs = facts["ours"], facts["baseline"]
    kinds, good = facts["kinds"], facts["everywhere"]
    which = f"Of ours, {listed(good)} is" if good else "Yet no measure of ours is"
    return (
        f"In networks whose answer is known, our best measure ({ours['name']}) puts what matters "
        f"above what does not in {with_interval(ours['auc'], percent=True)} of comparisons, the "
        f"best score that needs no tracing ({theirs['name']}) in "
        f"{with_interval(theirs['auc'], percent=True)}. {which} as good as the best of these "
        f"in all {kinds:g} kinds of network."
    )


def conclude(rows: Sequence[Row]) -> Findings:
    """Which measure finds what was planted, and whether one of ours is as good as the baselines."""
    questions = _questions(rows)
    asked = [question for question in questions if not question.name.endswith("random")]
    if not asked:
        return Findings("No network was trained, so nothing can be said.")
    tests = _tests(asked)
    verdicts = {name: _verdict(name, asked, tests) for name in MEASURES}
    return Findings(
        _sentence(asked, verdicts),
        tables=(
            _summary(asked),
            _over(asked, tests),
            _by_cell(asked, "final", "At the end of training"),
            _by_cell(questions, "control", "Before training"),
            _learned(asked),
        ),
        plots=(_bars(asked), *_curves(asked)),
        facts={
            "networks": len(rows),
            "kinds": len(asked),
            **_best(asked),
            "converged": [question.name for question in asked if _converged(question)],
            "everywhere": _everywhere(asked, verdicts),
            "verdicts": verdicts,
            "auc": _numbers(questions),
        },
    )


def _questions(rows: Sequence[Row]) -> list[Question]:
    """Rows of one kind together, in the order of their seeds."""
    kinds: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: (int(row.cell["seed"]), max(row.cell["looks"]))):
        kinds.setdefault(_name(row.cell), []).append(row)
    found = []
    for name in sorted(kinds, key=_place):
        alike = kinds[name]
        pairs = alike[0].cell["network"] == "heads"
        whole = MEASURES + BASELINES
        if name.startswith("circuit"):
            whole += EDGE_BASELINES
        found.append(_question(name, alike, whole, slice(0, -1) if pairs else slice(None)))
        if pairs:
            edges = MEASURES + EDGE_BASELINES
            found.append(_question("ordered pairs of heads", alike, edges, slice(-1, None)))
    return found


def _question(name: str, rows: Sequence[Row], measures: Sequence[str], groups: slice) -> Question:
    """Of the rows of one kind; a network has a row of its steps, and may have one of its end."""
    found: dict[int, dict[int, list[float]]] = {}  # by step and seed
    right: dict[int, dict[int, float]] = {}
    for row in rows:
        truth, seed = row.result["truth"][groups], int(row.cell["seed"])
        for look in row.result["looks"]:
            means = [fmean(auc(group, look["scores"][m]) for group in truth) for m in measures]
            found.setdefault(int(look["step"]), {})[seed] = means
        for look in (*row.result.get("course", ()), *row.result["looks"]):
            right.setdefault(int(look["step"]), {})[seed] = look["right"]
    return Question(name, tuple(measures), _complete(found), _complete(right))


def _complete(found: Mapping[int, Mapping[int, Any]]) -> dict[int, Floats]:
    """Arrays by step, in the order of seeds, of the steps that all networks have."""
    seeds = sorted(set().union(*found.values()))
    return {
        step: np.array([found[step][seed] for seed in seeds], dtype=np.float64)
        for step in sorted(found)
        if len(found[step]) == len(seeds)
    }


def _name(cell: Cell) -> str:
    words = {
        "views": "views, distractors × ",
        "gates": "gates, ",
        "heads": "",
        "circuit": "circuit, ",
    }
    return words[cell["network"]] + ("heads" if cell["network"] == "heads" else cell["kind"])


def _place(name: str) -> tuple[int, float, str]:
    order = ("views", "gates", "heads", "ordered", "circuit")
    first = next(place for place, word in enumerate(order) if name.startswith(word))
    number = float(name.rpartition(" ")[2]) if first == 0 else 0.0
    return first, number, name


def baselines(question: Question) -> list[str]:
    """Those that need no tracing."""
    return [name for name in question.measures if name not in MEASURES]


def best_baseline(question: Question) -> str:
    """The one with the largest mean AUC at the end."""
    return max(baselines(question), key=lambda name: question.at(name, question.final).mean())


class Test(NamedTuple):
    """How far a measure is from the best baseline of a cell, and what chance would give."""

    difference: Interval
    chance: float  # corrected by Holm


def _tests(questions: Sequence[Question]) -> dict[tuple[str, str], Test]:
    """Paired differences over networks, at the end of training; two-sided."""
    found, chances = {}, {}
    for question in questions:
        best = question.at(best_baseline(question), question.final)
        for name in MEASURES:
            gaps = question.at(name, question.final) - best
            found[name, question.name] = _mean(gaps)
            chances[name, question.name] = _chance(gaps)
    corrected = holm(chances)
    return {key: Test(found[key], corrected[key]) for key in found}


def _chance(gaps: Floats) -> float:
    """The chance of a mean so far from 0, by the normal distribution; 1 with too few networks."""
    if len(gaps) < FEWEST or not gaps.any():
        return 1.0
    error = float(gaps.std(ddof=1)) / sqrt(len(gaps))
    return erfc(abs(float(gaps.mean())) / error / sqrt(2)) if error else 0.0


def holm(chances: Mapping[Any, float]) -> dict[Any, float]:
    """Holm's correction of several chances.

    >>> holm({"a": 0.01, "b": 0.04, "c": 0.03})
    {'a': 0.03, 'c': 0.06, 'b': 0.06}
    """
    found, most = {}, 0.0
    for place, key in enumerate(sorted(chances, key=lambda key: chances[key])):
        most = max(most, min(1.0, chances[key] * (len(chances) - place)))
        found[key] = most
    return found


def _mean(values: Floats) -> Interval:
    """The mean over networks, with its 95% interval."""
    value = float(values.mean())
    if len(values) < 2:
        return Interval(value, -inf, inf)
    return percentiles(value, values[resample(len(values))].mean(1))


def _overall(questions: Sequence[Question], measure: str) -> Interval:
    """The mean over cells; its interval draws cells, and networks in each."""
    values = [q.at(measure, q.final) for q in questions if measure in q.measures]
    value = float(np.mean([each.mean() for each in values]))
    if len(values) < 2 or len(values[0]) < 2:
        return Interval(value, -inf, inf)
    source = np.random.default_rng(0)
    means = np.stack([each[resample(len(each), 500, k)].mean(1) for k, each in enumerate(values)])
    drawn = source.integers(len(values), size=(500, len(values)))
    return percentiles(value, np.take_along_axis(means.T, drawn, 1).mean(1))


def _verdict(name: str, questions: Sequence[Question], tests: Mapping[Any, Test]) -> dict[str, Any]:
    """In which cells a measure is close to the best baseline, surely worse and surely better."""
    own = {question.name: tests[name, question.name] for question in questions}
    return {
        "close": [q for q, test in own.items() if test.difference.value >= -CLOSE],
        "worse": [q for q, t in own.items() if t.difference.value < 0 and t.chance < LEVEL],
        "better": [q for q, t in own.items() if t.difference.value > 0 and t.chance < LEVEL],
    }


def _best(questions: Sequence[Question]) -> dict[str, Any]:
    """Our best measure over all kinds, and the best baseline that fits everywhere."""
    found = {}
    for key, names in (("ours", MEASURES), ("baseline", _common(questions))):
        scores = {name: _overall(questions, name) for name in names}
        best = max(scores, key=lambda name: scores[name].value)
        found[key] = {"name": best, "auc": list(scores[best])}
    return found


def _everywhere(
    questions: Sequence[Question], verdicts: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    """The measures that are close to the best baseline in every kind, and better in some."""
    many = len(questions)
    return [name for name, v in verdicts.items() if len(v["close"]) == many and v["better"]]


def _sentence(questions: Sequence[Question], verdicts: Mapping[str, Mapping[str, Any]]) -> str:
    networks, many = len(questions[0].final), len(questions)
    good, best = _everywhere(questions, verdicts), _best(questions)
    about = (
        f"Over {many} kinds of networks ({networks} each), the best of gradtrace's measures is "
        f"{best['ours']['name']} (AUC {with_interval(best['ours']['auc'])}), the best baseline "
        f"that fits everywhere {best['baseline']['name']} "
        f"({with_interval(best['baseline']['auc'])}). {_training_said(questions)}"
    )
    if networks < FEWEST:
        return f"{about} {capital(str(networks))} networks of a kind are too few to tell."
    if good:
        return (
            f"{about} {capital(listed(good))} come within {CLOSE} of the best baseline of every "
            "kind and are better in some."
        )
    closest = max(verdicts, key=lambda name: len(verdicts[name]["close"]))
    found = {key: len(cells) for key, cells in verdicts[closest].items()}
    return (
        f"{about} No measure of ours is within {CLOSE} of the best baseline everywhere: {closest} "
        f"comes nearest, in {found['close']} of {many}, surely worse in {found['worse']} and "
        f"surely better in {found['better']}."
    )


def _converged(question: Question) -> bool:
    """Whether the second half of the steps surely added less than one point of accuracy."""
    gained = question.gained()
    return gained is not None and gained.high < POINT


def _training_said(questions: Sequence[Question]) -> str:
    """Which kinds have converged, and what would have been said of the first steps alone."""
    trained = [question for question in questions if max(question.found)]
    going_on = [question.name for question in trained if not _converged(question)]
    said = f"{len(trained) - len(going_on)} of the {len(trained)} kinds that are trained converged"
    said += f" (not {listed(going_on)})." if going_on else "."
    if max(max(question.found) for question in questions) <= FIRST_END:
        return said
    best = _best([question.until(FIRST_END) for question in questions])
    then = [f"{each['name']} ({with_interval(each['auc'])})" for each in best.values()]
    return f"{said} After {FIRST_END} steps these were {then[0]} and {then[1]}."


def _common(questions: Sequence[Question]) -> list[str]:
    """Baselines that all components have; edges have others."""
    return [
        name
        for name in BASELINES
        if all(name in q.measures for q in questions if "pairs" not in q.name)
    ]


def _told(interval: Interval) -> str:
    if not isfinite(interval.low):
        return f"{interval.value:.2f}"
    return f"{interval.value:.2f} [{interval.low:.2f}, {interval.high:.2f}]"


# Tables and figures -------------------------------------------------------------------------------


def _summary(questions: Sequence[Question]) -> Table:
    """For each cell the best of both sides."""
    rows = []
    for question in questions:
        ours = max(MEASURES, key=lambda name: question.at(name, question.final).mean())
        best = best_baseline(question)
        rows.append(
            (
                question.name,
                ours,
                _told(_mean(question.at(ours, question.final))),
                best,
                _told(_mean(question.at(best, question.final))),
            )
        )
    columns = ("kind of network", "best of ours", "AUC", "best baseline", "AUC, baseline")
    return Table("Which measure to trust when", columns, tuple(rows), "Chosen after the fact.")


def _over(questions: Sequence[Question], tests: Mapping[Any, Test]) -> Table:
    """Every measure over all cells, and how it does against the best baseline of each."""
    rows = []
    for name in (*MEASURES, *BASELINES, *EDGE_BASELINES):
        asked = [q for q in questions if name in q.measures]
        if not asked:
            continue
        first = [question.until(FIRST_END) for question in asked]
        if name in MEASURES:
            found = _verdict(name, questions, tests)
            counts: tuple[str | None, ...] = tuple(
                f"{len(found[key])} of {len(questions)}" for key in ("close", "better", "worse")
            )
        else:
            counts = (None, None, None)
        rows.append((name, _told(_overall(asked, name)), *counts, _told(_overall(first, name))))
    columns = (
        *("measure", "AUC over kinds", f"within {CLOSE} of the best", "better", "worse"),
        f"AUC after {FIRST_END} steps",
    )
    note = (
        "Better and worse than the best baseline of a kind: by Holm over all measures and kinds. "
        "EAP and EAP-IG: over the kinds that ask for edges."
    )
    return Table("All kinds together, at the end", columns, tuple(rows), note)


def _by_cell(questions: Sequence[Question], when: str, title: str) -> Table:
    names = list(dict.fromkeys(chain.from_iterable(q.measures for q in questions)))
    rows = []
    for name in names:
        values: list[str | None] = []
        for question in questions:
            step = max(question.found) if when == "final" else min(question.found)
            has = name in question.measures
            values.append(_told(_mean(question.at(name, question.found[step]))) if has else None)
        rows.append((name, *values))
    return Table(title, ("measure", *(q.name for q in questions)), tuple(rows))


def _learned(questions: Sequence[Question]) -> Table:
    """The share of samples that networks classify rightly: whether they have learned, and all."""
    rows = []
    for q in questions:
        gained, last = q.gained(), max(q.right)
        points = with_interval([100 * x for x in gained], ".1f") if gained else None
        shares = (f"{float(q.right[step].mean()):.0%}" for step in (min(q.right), last))
        converged = None if gained is None else "yes" if _converged(q) else "no"
        rows.append((q.name, *shares, last, points, converged))
    columns = ("kind of network", "before", "after", "steps", "points in the second half")
    note = (
        "Samples classified rightly, and how many more in 100 the second half of the steps added. "
        "Converged: surely less than one."
    )
    return Table("What was learned", (*columns, "converged"), tuple(rows), note)


def _bars(questions: Sequence[Question]) -> Plot:
    names = [*MEASURES, *_common(questions)]
    found = [_overall([q for q in questions if name in q.measures], name) for name in names]
    low = [x.low if isfinite(x.low) else x.value for x in found]
    high = [x.high if isfinite(x.high) else x.value for x in found]
    series = Series("AUC", names, [x.value for x in found], low, high, "bars")
    return Plot("overall", "Which measure finds what was planted?", "", "AUC over kinds", (series,))


SHOWN = ("greedy, weighted", "viterbi, weighted", "decomposition", "mass, p = 2")
"""Of ours, in figures over training; beside them the two most used baselines."""


def _curves(questions: Sequence[Question]) -> list[Plot]:
    found = []
    for question in questions:
        if len(question.found) < 2:
            continue
        other = [name for name in (*BASELINES[:3], *EDGE_BASELINES) if name in question.measures]
        steps = sorted(question.found)
        places = [f"{step:,}" for step in steps]  # evenly spaced
        series = []
        for name in (*SHOWN, *other):
            each = [_mean(question.at(name, question.found[step])) for step in steps]
            style = "line" if name in SHOWN else "dashed"
            series.append(Series(name, places, [x.value for x in each], style=style))
        title = f"Over training: {question.name}"
        slug = question.name.replace(",", "").replace(" × ", "-").replace(" ", "-")
        found.append(Plot(slug, title, "step", "AUC", tuple(series)))
    return found


def _numbers(questions: Sequence[Question]) -> dict[str, Any]:
    return {
        question.name: {
            str(step): {
                name: round(float(question.at(name, values).mean()), 4)
                for name in question.measures
            }
            for step, values in question.found.items()
        }
        for question in questions
    }
