"""Induction: do measures find the heads, and the pairs of heads, that a trained network copies by?

Question: In two-layer attention networks that have learned to continue a repeated text, do the
heads and ordered pairs of heads (first one that looks at the word before, then one that finds the
earlier occurrence) that a measure finds agree with mean ablation and with path patching?

Expectation: From planted networks: influence finds heads once they are learned, and says little
before. A residual stream is a plain sum, so edge attribution patching (EAP) should find pairs well;
whether paths do as well is open.

Method: Each network (``gradtrace.experiments.induction_network``) has two layers of four heads of
12 units, 48 units in its stream, no layer norm and no other layers. Texts have 32 of 32 words and
repeat a segment of 8 to 16 different words; as periods differ, no fixed distance tells the next
word. Adam trains until 95% of the words that can be known are right, looked at every 20 steps, or
for 2,000 steps; a network that fails is counted and kept. Truth, on 256 new texts at the end: by
how much the loss rises if a head's output is replaced by its mean over texts (8 heads), and if only
one head of the second layer reads that mean (16 pairs), or only its query, key or value (48 pairs).
The same on 256 others tells how well the truth agrees with itself. Measures score heads and pairs
at the end, and at step 0 as a control, each at a cost of 32 backward passes
(``gradtrace.experiments.planted_scores``): those that cost more see fewer texts. Agreement in a
network is the rank correlation (Spearman's) of score and truth; beside it Kendall's, the AUC of the
top quarter, and whether the largest is the largest. Intervals (95%) are bootstrapped over networks;
differences from the baseline that is best after the fact are tested by flipping signs, and
corrected by Holm for all measures and questions.

Seeds: One for each network: its weights, batches and samples; by default 20.

Limits: Networks are tiny and have neither layer norm nor other layers, and the task needs one
circuit. Several heads of a layer often do the same work: each alone then costs little, and what
ablation says of one depends on the others. Mean ablation and patching are themselves answers to one
question, what the loss would be with less information; a measure of where gradient flows may be
right about another. EAP is scored by absolute value, as its authors do, the truth has a sign.
Decomposition needs a pass for each component, so at equal cost it sees a single text. A first run
was stopped after ten networks and thrown away, as EAP gave all readers of the stream one gradient;
results of six of them had been looked at by then, and the design did not change after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf, isfinite
from random import Random
from typing import Any, NamedTuple

import numpy as np
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
from gradtrace.experiments.harness.statistics import (
    Floats,
    Interval,
    out_of,
    percentiles,
    ranks,
    resample,
    with_interval,
)
from gradtrace.experiments.induction_network import (
    PORTS,
    Repeats,
    ablated,
    attention,
    build,
    patched,
)
from gradtrace.experiments.planted import auc, holm
from gradtrace.experiments.planted_scores import (
    BASELINES,
    EDGE_BASELINES,
    MEASURES,
    Batch,
    Scores,
    scores,
)
from gradtrace.experiments.training import descent, plain

FULL: dict[str, Any] = {
    "steps": 2000,
    "every": 20,
    "target": 0.95,
    "rate": 0.003,
    "batch": 64,
    "passes": 32,
    "evaluated": 256,
}
QUICK: dict[str, Any] = FULL | {"steps": 40, "passes": 8, "evaluated": 64}
SEEDS = Seeds(quick=2, full=20)
TIMED = False
FIGURE = "agreement"

LEVEL = 0.05
FEWEST = 8
"""With fewer networks nothing is tested."""

QUESTIONS = {
    "heads": "heads",
    "pairs": "pairs of heads",
    "ports": "pairs of a head and a query, key or value",
}
"""What is ordered, and how it is called."""

STATISTICS = {
    "spearman": "rank correlation",
    "kendall": "Kendall's τ",
    "top": "AUC of the top quarter",
    "first": "finds the first",
}

AGAIN = "the truth itself, on other texts"
"""Not a measure: how far the truth agrees with itself."""


def cells(settings: Mapping[str, Any], seeds: int) -> list[Cell]:
    """One for each network."""
    return [{**settings, "seed": seed} for seed in range(seeds)]


def measure(cell: Cell, tick: Tick) -> Result:
    """Train a network; score its heads and pairs before and after, and measure what is true."""
    model = build(cell["seed"])
    held = model.draw(cell["evaluated"], _generator(cell, "held"))
    with plain():
        looks = [_look(model, cell, 0)]
        step, right = _trained(model, cell, held, tick)
        looks.append(_look(model, cell, step))
        texts = [model.draw(cell["evaluated"], _generator(cell, f"truth {k}")) for k in range(2)]
        truth, again = (_truth(model, some) for some in texts)
        with torch.no_grad():
            loss = float(model.losses(*texts[0]).mean())
    return {
        "steps": step,
        "right": round(right, 4),
        "formed": right >= cell["target"],
        "loss": _short(loss),
        "looks": looks,
        "truth": truth,
        "again": again,
        "attention": _rounded(attention(model, held)),
    }


def _trained(model: Repeats, cell: Cell, held: Batch, tick: Tick) -> tuple[int, float]:
    """The number of steps, and the share of words that are right after them."""
    batches, step, right = _generator(cell, "batches"), 0, 0.0

    def loss() -> torch.Tensor:
        return model.losses(*model.draw(cell["batch"], batches)).mean()

    for step in descent(model, loss, cell["steps"], cell["rate"]):
        if step % cell["every"] == 0 or step == cell["steps"]:
            with torch.no_grad():
                right = model.right(*held)
            tick(f"{cell['seed']}: step {step}, right {right:.0%}")
            if right >= cell["target"]:
                break
    return step, right


def _look(model: Repeats, cell: Cell, step: int) -> Result:
    """Scores of heads and of their pairs, and of the pairs of a head and a port."""
    source = _generator(cell, f"scored {step}")
    found: dict[str, dict[str, Scores]] = {"heads": {}, "pairs": {}, "ports": {}}
    for ports in (False, True):
        model.compare(ports)
        said = scores(model, lambda samples: model.draw(samples, source), cell["passes"])
        for name, each in said.items():
            whole = {key: _short(value) for key, value in each.items()}
            pairs = {key: value for key, value in whole.items() if ">" in key}
            if pairs:
                found["ports" if ports else "pairs"][name] = pairs
            if not ports and len(pairs) < len(whole):
                found["heads"][name] = {k: v for k, v in whole.items() if k not in pairs}
    model.compare()
    return {"step": step, "scores": found}


def _truth(model: Repeats, batch: Batch) -> dict[str, Scores]:
    found = {"heads": ablated(model, batch), "pairs": patched(model, batch)}
    model.compare(ports=True)
    found["ports"] = patched(model, batch)
    model.compare()
    return {name: _rounded(each) for name, each in found.items()}


def _rounded(found: Mapping[str, float]) -> Scores:
    return {name: _short(value) for name, value in found.items()}


def _short(value: float) -> float:
    return float(f"{value:.6g}")


def _generator(cell: Cell, what: str) -> Generator:
    number = Random(f"induction/{cell['seed']}/{what}").getrandbits(63)
    return Generator().manual_seed(number)


# What was found -----------------------------------------------------------------------------------


class Question(NamedTuple):
    """What is ordered: agreement with the truth by statistic, network and measure."""

    name: str
    measures: tuple[str, ...]
    end: Mapping[str, Floats]  # by statistic: (networks, measures)
    start: Mapping[str, Floats]  # the same at step 0
    again: Mapping[str, Floats]  # (networks,): of the truth with itself

    def at(self, measure: str, statistic: str = "spearman") -> Floats:
        """One measure at the end: (networks,)."""
        column: Floats = self.end[statistic][:, self.measures.index(measure)]
        return column

    def before(self, measure: str) -> Floats:
        """The same rank correlation, of the scores at step 0."""
        column: Floats = self.start["spearman"][:, self.measures.index(measure)]
        return column

    def best(self, among: Sequence[str]) -> str:
        """The measure with the largest mean rank correlation."""
        return max(
            (name for name in self.measures if name in among),
            key=lambda name: float(np.nan_to_num(self.at(name)).mean()),
        )

    @property
    def baselines(self) -> list[str]:
        """Measures that need no tracing."""
        return [name for name in self.measures if name not in MEASURES]


class Difference(NamedTuple):
    """How far a measure is from the best baseline, and the chance of that."""

    gap: Interval
    chance: float  # corrected by Holm


def spearman(truth: Mapping[str, float], said: Mapping[str, float]) -> float:
    """The correlation of ranks; 0 where one of them has no order.

    >>> spearman({"a": 1.0, "b": 2.0, "c": 3.0}, {"a": 5.0, "b": 6.0, "c": 9.0})
    1.0
    """
    pairs = [(truth[name], said[name]) for name in truth]
    if not all(isfinite(value) for pair in pairs for value in pair):
        return 0.0
    a, b = (ranks(list(each)) - (len(pairs) + 1) / 2 for each in zip(*pairs))
    size = float(np.sqrt((a @ a) * (b @ b)))
    return round(float(a @ b) / size, 12) if size else 0.0


def agreement(truth: Mapping[str, float], said: Mapping[str, float]) -> dict[str, float]:
    """By every statistic. Of those that score highest together, the first has a part."""
    order = sorted(truth, key=lambda name: truth[name], reverse=True)
    top = {name: float(name in order[: len(order) // 4]) for name in order}
    most = max(said[name] for name in order)
    best = [name for name in order if said[name] == most]
    return {
        "spearman": spearman(truth, said),
        "kendall": 2 * auc(truth, said) - 1,
        "top": auc(top, said),
        "first": float(order[0] in best) / max(len(best), 1),
    }


def headline(facts: Mapping[str, Any]) -> str:
    """The answer in a sentence."""
    heads, worse = facts["best"]["heads"], len(facts["worse"]["heads"])
    return (
        f"Which attention heads a small network cannot spare, our best measure tells to "
        f"{with_interval(heads['ours'])} (1 is perfect) and the best score that needs no tracing "
        f"to {with_interval(heads['theirs'])}; {worse:g} of our {len(MEASURES)} measures are "
        f"surely worse than that."
    )


def conclude(rows: Sequence[Row]) -> Findings:
    """How far every measure agrees with ablation and patching."""
    if not rows:
        return Findings("No network was trained, so nothing can be said.")
    ordered = sorted(rows, key=lambda row: int(row.cell["seed"]))
    questions = [_question(name, ordered) for name in QUESTIONS]
    differences = _differences(questions)
    facts = {
        "networks": len(ordered),
        "formed": sum(bool(row.result["formed"]) for row in ordered),
        "best": {question.name: _best(question) for question in questions},
        "better": _sure(differences, 1),
        "worse": _sure(differences, -1),
        "means": {q.name: {m: _mean(q.at(m)).value for m in q.measures} for q in questions},
    }
    return Findings(
        _sentence(questions, facts),
        tables=(
            _by_measure(questions),
            *(_in_full(question, differences) for question in questions),
            _circuit(ordered),
            _learned(ordered),
        ),
        plots=(_bars(questions), *(_before(question) for question in questions)),
        facts=facts,
    )


def _question(name: str, rows: Sequence[Row]) -> Question:
    measures = MEASURES + (BASELINES if name == "heads" else EDGE_BASELINES)
    truths = [row.result["truth"][name] for row in rows]

    def table(said: Sequence[Sequence[Mapping[str, float]]]) -> dict[str, Floats]:
        found = [[agreement(t, each) for each in some] for t, some in zip(truths, said)]
        return {
            key: np.array([[each[key] for each in some] for some in found], dtype=np.float64)
            for key in STATISTICS
        }

    start, end = (
        table([[row.result["looks"][k]["scores"][name][m] for m in measures] for row in rows])
        for k in (0, -1)
    )
    again = table([[row.result["again"][name]] for row in rows])
    return Question(
        name, measures, end, start, {key: values[:, 0] for key, values in again.items()}
    )


def _mean(values: Floats) -> Interval:
    """The mean over networks, with its 95% interval."""
    value = float(values.mean())
    if len(values) < 2:
        return Interval(value, -inf, inf)
    return percentiles(value, values[resample(len(values))].mean(1))


def chance(gaps: Floats, rounds: int = 20_000) -> float:
    """The chance of a mean at least so far from 0 if signs were random; 1 with too few networks."""
    if len(gaps) < FEWEST or not np.isfinite(gaps).all() or not gaps.any():
        return 1.0
    signs = np.random.default_rng(0).choice((-1.0, 1.0), size=(rounds, len(gaps)))
    means = np.abs((signs * gaps).mean(1))
    return (1 + int((means >= abs(float(gaps.mean())) - 1e-12).sum())) / (1 + rounds)


def _differences(questions: Sequence[Question]) -> dict[tuple[str, str], Difference]:
    """Of our measures' rank correlations from the best baseline's, in pairs over networks."""
    gaps, chances = {}, {}
    for question in questions:
        best = question.at(question.best(question.baselines))
        for name in MEASURES:
            values = question.at(name) - best
            gaps[question.name, name] = _mean(values)
            chances[question.name, name] = chance(values)
    corrected = holm(chances)
    return {key: Difference(gap, corrected[key]) for key, gap in gaps.items()}


def _sure(differences: Mapping[tuple[str, str], Difference], sign: int) -> dict[str, list[str]]:
    """The measures that are surely better (1) or worse (-1) than the best baseline."""
    return {
        question: [
            name
            for (asked, name), each in differences.items()
            if asked == question and each.gap.value * sign > 0 and each.chance < LEVEL
        ]
        for question in QUESTIONS
    }


def _best(question: Question) -> dict[str, Any]:
    ours, theirs = question.best(MEASURES), question.best(question.baselines)
    return {
        "our name": ours,
        "ours": list(_mean(question.at(ours))),
        "their name": theirs,
        "theirs": list(_mean(question.at(theirs))),
        "again": list(_mean(question.again["spearman"])),
    }


def _sentence(questions: Sequence[Question], facts: Mapping[str, Any]) -> str:
    formed, networks = facts["formed"], facts["networks"]
    said = [
        f"{out_of(formed, networks)} networks learned to continue repeated texts"
        + ("." if formed == networks else "; the others count, too.")
    ]
    for question in questions:
        best = facts["best"][question.name]
        said.append(
            f"Of {QUESTIONS[question.name]}, {best['our name']} has a rank correlation of "
            f"{_told(best['ours'])} with the truth, the best baseline, {best['their name']}, "
            f"{_told(best['theirs'])}; the truth has {_told(best['again'])} with itself."
        )
    if networks < FEWEST:
        return " ".join([*said, f"{networks} networks are too few to tell more."])
    for question in questions:
        better, worse = (facts[key][question.name] for key in ("better", "worse"))
        said.append(
            f"For {QUESTIONS[question.name]}, of our {len(MEASURES)} measures {len(worse)} are "
            f"surely worse than the best baseline and {len(better)} surely better"
            + (f" ({'; '.join(better)})." if better else ".")
        )
    return " ".join(said)


def _told(found: Sequence[float]) -> str:
    """``0.81 [0.72, 0.90]``; of one network, without an interval."""
    value, low, high = found
    if low is None or high is None or not (isfinite(low) and isfinite(high)):
        return f"{value or 0.0:.2f}"
    return f"{value:.2f} [{low:.2f}, {high:.2f}]"


# Tables and figures -------------------------------------------------------------------------------


def _by_measure(questions: Sequence[Question]) -> Table:
    """The rank correlations of all measures."""
    rows = []
    for name in (*MEASURES, *BASELINES, *EDGE_BASELINES):
        values = [_told(_mean(q.at(name))) if name in q.measures else None for q in questions]
        rows.append((name, *values))
    rows.append((AGAIN, *(_told(_mean(q.again["spearman"])) for q in questions)))
    columns = ("measure", *(QUESTIONS[q.name] for q in questions))
    note = "The first eleven measures are gradtrace's, the others baselines."
    return Table("Rank correlation with the truth, after training", columns, tuple(rows), note)


def _in_full(question: Question, differences: Mapping[tuple[str, str], Difference]) -> Table:
    """Every statistic, the control, and the difference from the best baseline."""
    best = question.best(question.baselines)
    rows = []
    for name in question.measures:
        ours = differences.get((question.name, name))
        rows.append(
            (
                name,
                *(_told(_mean(question.at(name, key))) for key in list(STATISTICS)[1:]),
                _told(_mean(question.before(name))),
                _told(ours.gap) if ours else None,
                f"{ours.chance:.2g}" if ours else None,
            )
        )
    columns = (
        "measure",
        *list(STATISTICS.values())[1:],
        "rank correlation at step 0",
        f"difference from {best}",
        "p (Holm)",
    )
    return Table(f"In full: {QUESTIONS[question.name]}", columns, tuple(rows))


def _circuit(rows: Sequence[Row]) -> Table:
    """What the truth says of the networks: how much is at stake, and by which port."""
    largest: list[tuple[str, str, str | None]] = []
    for name, title in QUESTIONS.items():
        values = [sorted(row.result["truth"][name].values(), reverse=True) for row in rows]
        high, middle = (
            _mean(np.array([float(each[k]) for each in values])) for k in (0, len(values[0]) // 2)
        )
        largest.append((title, _told(high), _told(middle)))
    for port in PORTS:
        sums = [
            sum(v for k, v in row.result["truth"]["ports"].items() if k.endswith(port))
            for row in rows
        ]
        largest.append(
            (f"sum of all pairs that end in a {port}", _told(_mean(np.array(sums))), None)
        )
    for layer, what in (("one", "to the word before"), ("two", "to the word to copy")):
        most = [
            max(v for k, v in row.result["attention"].items() if k.startswith(layer))
            for row in rows
        ]
        title = f"attention {what}, layer {layer}: the share of the head with most"
        largest.append((title, _told(_mean(np.array(most))), None))
    columns = ("what is removed", "largest", "median")
    note = "Rise of the loss in nats, and shares of attention; means over networks."
    return Table("What the networks have learned", columns, tuple(largest), note)


def _learned(rows: Sequence[Row]) -> Table:
    """Each network: whether it learned, and by which heads."""
    found = []
    for row in rows:
        result = row.result
        truth = result["truth"]
        head, pair = (max(truth[k], key=lambda n, k=k: truth[k][n]) for k in ("heads", "ports"))  # type: ignore[misc]
        found.append(
            (
                row.cell["seed"],
                result["steps"],
                f"{result['right']:.0%}",
                "yes" if result["formed"] else "no",
                f"{head} ({truth['heads'][head]:.2f})",
                f"{pair} ({truth['ports'][pair]:.3f})",
            )
        )
    columns = ("seed", "steps", "right", "learned", "head that matters most", "pair")
    return Table("Every network", columns, tuple(found), "In brackets: the rise of the loss.")


def _bars(questions: Sequence[Question]) -> Plot:
    """Heads and pairs side by side; a measure has no bar where it does not apply."""
    series = []
    for question in questions:
        found = [_mean(question.at(name)) for name in question.measures]
        low, high = zip(*map(_ends, found))
        y = [x.value for x in found]
        series.append(Series(QUESTIONS[question.name], question.measures, y, low, high, "bars"))
    title = "Agreement with ablation (heads) and path patching (pairs)"
    return Plot("agreement", title, "", "rank correlation", tuple(series))


def _before(question: Question) -> Plot:
    names = list(question.measures)
    series = []
    for label, values in (("step 0 (control)", question.before), ("trained", question.at)):
        found = [_mean(values(name)) for name in names]
        low, high = zip(*map(_ends, found))
        series.append(Series(label, names, [x.value for x in found], low, high, "bars"))
    title = f"Before and after training: {QUESTIONS[question.name]}"
    return Plot(f"control-{question.name}", title, "", "rank correlation", tuple(series))


def _ends(found: Interval) -> tuple[float, float]:
    """The interval; of one network, its value."""
    if isfinite(found.low) and isfinite(found.high):
        return found.low, found.high
    return found.value, found.value
