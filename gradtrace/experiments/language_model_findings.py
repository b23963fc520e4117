"""What the rows of ``language-model`` say: learning, influence, path length, cost."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isfinite, nan
from statistics import fmean, median
from typing import Any, NamedTuple

from gradtrace.experiments.harness.findings import Findings, Plot, Result, Row, Series, Table
from gradtrace.experiments.harness.interleaved_timing import (
    Fit,
    linear_fit,
    power_fit,
    quotient,
    told,
)
from gradtrace.experiments.harness.statistics import Interval, student
from gradtrace.experiments.induction import spearman
from gradtrace.experiments.language_model_cost import (
    APART,
    EXACT,
    RECORDING,
    SAMPLED,
    STEP,
    WATCHED,
    WAYS,
)

KINDS = {"lstm": "LSTM", "rnn": "RNN", "forward": "feed-forward network"}
STRAIGHT = 0.99
"""The least R² of a straight line; of fewer than three depths nothing is said."""


NEGATIVE_ZERO = re.compile(r"-(0(?:\.0+)?)(?![\d.])")


def within(share: Interval) -> Interval:
    """An interval of a share, cut at 0 and 1; one without bounds stays so."""
    if not all(map(isfinite, share)):
        return share
    return Interval(share.value, max(share.low, 0.0), min(share.high, 1.0))


class Model(NamedTuple):
    """A kind of model with so many layers: its results by seed."""

    kind: str
    layers: int
    words: int
    units: int
    results: list[Result]

    @property
    def title(self) -> str:
        """``LSTM, 2 layers``."""
        return f"{KINDS[self.kind]}, {self.layers} layer{'s' * (self.layers > 1)}"

    def over(self, get: Callable[[Result], float], tests: int = 1) -> Interval:
        """The mean over seeds, with its interval."""
        return student([get(result) for result in self.results], tests)

    def at(self, place: int, get: Callable[[Result], float]) -> Interval:
        """The mean at a moment: 0 is the first, -1 the last."""
        return self.over(lambda result: get(result["looks"][place]))

    def share(self, place: int, get: Callable[[Result], float]) -> Interval:
        """The mean at a moment of what is between 0 and 1, and so is its interval."""
        return within(self.at(place, get))

    @property
    def moments(self) -> list[int]:
        """Steps that were looked at."""
        return [look["step"] for look in self.results[0]["looks"]]

    @property
    def parts(self) -> list[str]:
        """The components of its layers."""
        return list(self.results[0]["looks"][0].get("influence", ()))


def models(rows: Iterable[Row]) -> list[Model]:
    """All that were trained, in the order of kinds and layers."""
    found: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        if row.cell["part"] == "training":
            found.setdefault((row.cell["kind"], row.cell["layers"]), []).append(row)
    made = []
    for kind, layers in sorted(found, key=lambda key: (list(KINDS).index(key[0]), key[1])):
        some = sorted(found[kind, layers], key=lambda row: int(row.cell["seed"]))
        cell = some[0].cell
        sizes = (cell["words"], cell["units"])
        made.append(Model(kind, layers, *sizes, [row.result for row in some]))
    return made


def costs(rows: Iterable[Row]) -> dict[int, Result]:
    """What was timed, by layers."""
    found = {row.cell["layers"]: row.result for row in rows if row.cell["part"] == "cost"}
    return dict(sorted(found.items()))


def findings(rows: Sequence[Row]) -> Findings:
    """The findings from all rows."""
    trained, timed = models(rows), costs(rows)
    changes = influence_changes(trained)
    facts = {
        "seeds": max((len(model.results) for model in trained), default=0),
        "sizes": list(trained[0][2:4]) if trained else [],
        "learned": {model.title: _learned(model) for model in trained},
        "control": list(_control(trained)),
        "changes": {
            title: {k: list(v) for k, v in each.items()} for title, each in changes.items()
        },
        "lengths": {model.title: _length_facts(model) for model in trained},
        "by_layers": {kind: _by_layers(trained, kind) for kind in KINDS},
        "by_graph": {model.title: _growth(model) for model in trained},
        "cost": {str(layers): _shares(result) for layers, result in timed.items()},
        "devices": sorted({row.result["device"] for row in rows}),
    }
    tables = (_learning(trained), _influence(trained, changes), _paths(trained), _fits(facts))
    more = (_sizes(trained), _cost_table(timed)) if timed else (_sizes(trained),)
    return Findings(
        _sentence(facts),
        tables=tuple(table for table in (*tables, *more) if table.rows),
        plots=tuple(plot for plot in _plots(trained, timed) if plot.series),
        facts=facts,
    )


# Facts --------------------------------------------------------------------------------------------


def _learned(model: Model) -> dict[str, Any]:
    """Loss and agreement at the first moment and the last."""
    return {
        "loss": [list(model.at(k, lambda look: look["loss"])) for k in (0, -1)],
        "above": list(model.at(-1, lambda look: look["loss"] - look["source"])),
        "source": model.at(-1, lambda look: look["source"]).value,
        "right": [list(model.share(k, lambda look: look["right"])) for k in (0, -1)],
        "least": list(within(model.over(lambda r: min(look["right"] for look in r["looks"])))),
    }


def influence_changes(trained: Sequence[Model]) -> dict[str, dict[str, Interval]]:
    """By how much the share of each component changed; intervals hold for those of a model."""
    return {
        model.title: {
            part: model.over(
                lambda r, part=part: (  # type: ignore[misc]
                    r["looks"][-1]["influence"][part][0] - r["looks"][0]["influence"][part][0]
                ),
                len(model.parts),
            )
            for part in model.parts
        }
        for model in trained
        if model.parts
    }


def _control(trained: Sequence[Model]) -> Interval:
    """The rank correlation of components before training and after, the mean over LSTMs."""
    some = [model for model in trained if len(model.parts) > model.layers]
    seeds = min((len(model.results) for model in some), default=0)
    found = []
    for seed in range(seeds):
        pairs = [
            [
                {part: share for part, (share, *_) in looks[at]["influence"].items()}
                for at in (0, -1)
            ]
            for looks in (model.results[seed]["looks"] for model in some)
        ]
        found.append(fmean(spearman(before, after) for before, after in pairs))
    return student(found)


def _sure(found: Sequence[float]) -> bool:
    """Whether an interval is finite and on one side of 0."""
    value, low, high = (nan if x is None else x for x in found)
    return all(map(isfinite, (value, low, high))) and (low > 0 or high < 0)


def _length_facts(model: Model) -> dict[str, Any]:
    """Paths from the first layer's input weight, at the first moment and the last."""

    def both(key: str) -> list[list[float]]:
        return [list(model.at(k, lambda look: look["path"][key])) for k in (0, -1)]

    found = {key: both(key) for key in ("length", "reach", "coverage")}
    graph = model.results[0]["graphs"]["end"][-1]
    largest = {key: graph[key] for key in ("time", "operators", "vertices", "edges")}
    lengths = model.over(lambda r: r["graphs"]["end"][-1]["length"])
    longest = max(_longest(model, k) for k in (0, -1))
    return found | {"longest": longest, "largest": largest | {"length": list(lengths)}}


def _longest(model: Model, place: int) -> int:
    return max(int(result["looks"][place]["path"]["longest"]) for result in model.results)


def _by_layers(trained: Sequence[Model], kind: str) -> dict[str, Any]:
    """The line of mean path length over layers, by seed; empty with fewer than two depths."""
    some = [model for model in trained if model.kind == kind]
    seeds = min((len(model.results) for model in some), default=0)
    if len(some) < 2:
        return {}
    found: dict[str, Any] = {}
    for word, place in (("start", 0), ("end", -1)):
        fits = [
            linear_fit(
                [model.layers for model in some],
                [model.results[s]["looks"][place]["path"]["length"] for model in some],
            )
            for s in range(seeds)
        ]
        found[word] = {
            "slope": list(student([fit.slope for fit in fits])),
            "intercept": list(student([fit.intercept for fit in fits])),
            "r2": min(fit.r2 if isfinite(fit.r2) else -1.0 for fit in fits),
        }
    return found | {"depths": len(some)}


def _growth(model: Model) -> dict[str, Any]:
    """How path length grows with the edges of the graph: the exponent p of length = c·edgesᵖ."""
    return {
        word: list(model.over(lambda r, word=word: _power(r["graphs"][word]).slope))  # type: ignore[misc]
        for word in ("start", "end")
    }


def _power(graphs: Sequence[Result]) -> Fit:
    lengths = [graph["length"] for graph in graphs]
    if len(graphs) < 2 or not all(isfinite(x) and x > 0 for x in lengths):
        return Fit(nan, nan)
    return power_fit([graph["edges"] for graph in graphs], lengths)


def _shares(result: Result) -> dict[str, Any]:
    """Milliseconds, and what a trace every 100 steps takes of training time."""
    times = {way: median(result["seconds"][way]) * 1e3 for way in WAYS}
    extra = times[WATCHED] + times[RECORDING]
    monitor = result["monitor"]
    found = {
        "alone": result["alone"],
        "milliseconds": times,
        "exact": quotient(extra + times[EXACT], 100 * times[STEP]),
        "sampled": quotient(extra + times[SAMPLED], 100 * times[STEP]),
        "within": _within(result["errors_apart"]),
    }
    if "refused" not in monitor:
        found["monitor"] = quotient(monitor["with"], monitor["plain"]) - 1
        found["every"] = monitor["every"]
        found["said"] = monitor["said"] * 1e3
    return found


def _within(apart: Sequence[float]) -> float:
    """The part of sampled shares that are within 1.96 standard errors of the exact ones."""
    return sum(x <= 1.96 for x in apart) / len(apart) if apart else nan


# In words -----------------------------------------------------------------------------------------


def _said(found: Sequence[float], form: str = ".2f", scale: float = 1.0) -> str:
    """``0.81 [0.72, 0.90]``; without an interval if that is not finite."""
    value, low, high = (nan if x is None else x * scale for x in found)
    text = told(value, form)
    if isfinite(low) and isfinite(high):
        text += f" [{low:{form}}, {high:{form}}]"
    return NEGATIVE_ZERO.sub(r"\1", text)


def _percent(found: Sequence[float]) -> str:
    return _said(found, ".0f", 100).replace(" [", "% [") + ("" if _bounded(found) else "%")


def _bounded(found: Sequence[float]) -> bool:
    return all(x is not None and isfinite(x) for x in found[1:])


def _main(facts: Mapping[str, Any]) -> str:
    """The model that sentences are about: the first, which is an LSTM of one layer."""
    return next(iter(facts["learned"]), "")


def told_headline(facts: Mapping[str, Any]) -> str:
    """The result in a sentence."""
    name = _main(facts)
    if not name:
        return ""
    learned, lengths = facts["learned"][name], facts["lengths"][name]
    words, _ = facts["sizes"]
    before, after = (each[0] for each in lengths["length"])
    seeds = facts["seeds"]
    said = (
        f"A language model with {words:,} words ({seeds} seed{'s' * (seeds != 1)}) comes within "
        f"{learned['above'][0]:.2f} nats a word of the least possible loss; a path from its first "
        f"weights has {after:.0f} operators ({before:.0f} untrained)"
    )
    cost = next(iter(facts["cost"].values()), None)
    if cost is None or cost["sampled"] is None:
        return f"{said}."
    return f"{said}, and tracing a sample every 100 steps takes {cost['sampled']:.1%} of training."


def _sentence(facts: Mapping[str, Any]) -> str:
    if not facts["learned"]:
        return " ".join(
            ["No model was trained, so nothing is said of influence.", *_on_cost(facts)]
        )
    parts = [_on_learning(facts), *_on_influence(facts), *_on_layers(facts), *_on_graph(facts)]
    return " ".join([*parts, *_on_cost(facts)])


def _on_learning(facts: Mapping[str, Any]) -> str:
    said = []
    for name, each in facts["learned"].items():
        if not name.endswith("1 layer"):
            continue
        before, after = each["right"]
        said.append(
            f"The {name} is {_said(each['above'])} nats above the source; its agreement is "
            f"{_percent(before)} before training, {_percent(each['least'])} at its lowest, "
            f"{_percent(after)} at the end."
        )
    source = next(iter(facts["learned"].values()))["source"]
    return (
        f"After training, of up to {facts['seeds']} seeds, the least possible loss is "
        f"{told(source, '.2f')} nats a word. {' '.join(said)}"
    )


def _on_influence(facts: Mapping[str, Any]) -> list[str]:
    if not facts["changes"]:
        return []
    every = [
        (name, part, found)
        for name, each in facts["changes"].items()
        for part, found in each.items()
    ]
    sure = [(name, part, found) for name, part, found in every if _sure(found)]
    control = (
        f"In LSTMs the order of components before training has a rank correlation of "
        f"{_said(facts['control'])} with that after."
    )
    if not sure:
        return [
            f"Of {len(every)} components none has an influence that training surely changes "
            f"({facts['seeds']} seeds).",
            control,
        ]
    largest = sorted(sure, key=lambda one: -abs(one[2][0]))[:2]
    told_ones = " and ".join(
        f"{name}, {part}: {found[0] * 100:+.0f} points [{found[1] * 100:+.0f}, "
        f"{found[2] * 100:+.0f}]"
        for name, part, found in largest
    )
    return [
        f"Training surely changes the influence of {len(sure)} of {len(every)} components, most "
        f"that of {told_ones}.",
        control,
    ]


def _on_layers(facts: Mapping[str, Any]) -> list[str]:
    said = []
    for kind, each in facts["by_layers"].items():
        if not each:
            continue
        start, end = each["start"], each["end"]
        straight = min(start["r2"], end["r2"]) >= STRAIGHT
        line = f" ({'' if straight else 'not '}a straight line)" if each["depths"] > 2 else ""
        said.append(
            f"In the {KINDS[kind]} each layer adds {_said(start['slope'], '.1f')} operators to a "
            f"path untrained and {_said(end['slope'], '.1f')} trained, beside "
            f"{_said(start['intercept'], '.1f')} and {_said(end['intercept'], '.1f')} of any{line}."
        )
    return said


def _on_graph(facts: Mapping[str, Any]) -> list[str]:
    name = _main(facts)
    lengths, growth = facts["lengths"][name], facts["by_graph"][name]
    reach, graph = lengths["reach"], lengths["largest"]
    return [
        f"Path length against the graph ({name}): at {graph['time']} time steps a path has "
        f"{_said(graph['length'], '.0f')} of {graph['operators']:,} operators, in a graph of "
        f"{graph['edges'] / 1e9:.3g} billion edges; with more time steps paths grow as the edges "
        f"to the power of {_said(growth['start'])} untrained and {_said(growth['end'])} trained. "
        f"They span {_said(reach[0], '.1f')} time steps untrained and {_said(reach[1], '.1f')} "
        f"trained."
    ]


def _on_cost(facts: Mapping[str, Any]) -> list[str]:
    said = []
    for layers, each in facts["cost"].items():
        text = (
            f"A trace every 100 steps of an LSTM of {layers} layer{'s' * (layers != '1')} takes "
            f"{told(each['exact'] * 100, '.1f')}% of training time with all elements and "
            f"{told(each['sampled'] * 100, '.1f')}% with a sample"
        )
        if "monitor" in each:
            text += (
                f" ({told(each['monitor'] * 100, '.1f')}% by a clock beside ``gt.Monitor`` every "
                f"{each['every']})"
            )
        said.append(f"{text}." if each["alone"] else f"{text}, measured beside other work.")
    return said


# Tables -------------------------------------------------------------------------------------------


def _learning(trained: Sequence[Model]) -> Table:
    rows = []
    for model in trained:
        found = _learned(model)
        rows.append(
            (
                model.title,
                len(model.results),
                model.results[0]["parameters"],
                *(_said(each) for each in found["loss"]),
                told(found["source"], ".2f"),
                _percent(found["right"][0]),
                _percent(found["least"]),
                _percent(found["right"][1]),
            )
        )
    columns = ("model", "seeds", "parameters", "loss before", "loss after", "least possible loss")
    agreement = ("agreement before", "lowest agreement", "agreement after")
    note = (
        "Nats a word on held-out text. Agreement is that of verbs whose nearest noun has the other "
        "number: a model that goes by the nearest noun has 0%, one that guesses 50%."
    )
    return Table("What the models learned", columns + agreement, tuple(rows), note)


def _influence(trained: Sequence[Model], changes: Mapping[str, Mapping[str, Interval]]) -> Table:
    rows = []
    for model in trained:
        for part in model.parts:

            def share(look: Result, place: int = 0, part: str = part) -> float:
                return float(look["influence"][part][place])

            rows.append(
                (
                    model.title,
                    part,
                    _percent(model.share(0, share)),
                    _percent(model.share(-1, share)),
                    _said(changes[model.title][part], "+.1f", 100),
                    "yes" if _sure(changes[model.title][part]) else "no",
                    *(
                        _percent(model.share(k, lambda look, place=place: share(look, place)))  # type: ignore[misc]
                        for place in (1, 2)
                        for k in (0, -1)
                    ),
                )
            )
    columns = (
        *("model", "component", "share at step 0", "share trained", "change, points", "sure"),
        *("weighted, step 0", "weighted, trained", "of own weights, step 0", "and trained"),
    )
    note = (
        "Of the elements of the embeddings of words that were read: how many have their path "
        "through the component; then weighted by |gradient|; then of the layers' weights, of which "
        "each gate owns a quarter. Intervals of changes hold for all components "
        "of a model together."
    )
    return Table("Influence before and after training", columns, tuple(rows), note)


def _paths(trained: Sequence[Model]) -> Table:
    rows = []
    for model in trained:
        found = _length_facts(model)
        rows.append(
            (
                model.title,
                *(_said(each, ".1f") for each in found["length"]),
                found["longest"],
                *(_said(each, ".1f") for each in found["reach"]),
                *(_percent(each) for each in found["coverage"]),
            )
        )
    columns = (
        *("model", "operators, step 0", "operators, trained", "most on a path"),
        *("time steps, step 0", "time steps, trained", "coverage, step 0", "coverage, trained"),
    )
    note = (
        "Means over paths from elements of the first layer's input weight; coverage is the median "
        "part of its element's gradient that a path carries."
    )
    return Table("Paths before and after training", columns, tuple(rows), note)


def _fits(facts: Mapping[str, Any]) -> Table:
    rows = [
        (
            KINDS[kind],
            word,
            _said(each[when]["slope"]),
            _said(each[when]["intercept"]),
            told(each[when]["r2"], ".3f"),
        )
        for kind, each in facts["by_layers"].items()
        if each
        for when, word in (("start", "untrained"), ("end", "trained"))
    ]
    columns = ("model", "", "operators a layer", "operators besides", "least R²")
    return Table("Path length against layers: length = a·layers + b", columns, tuple(rows))


def _sizes(trained: Sequence[Model]) -> Table:
    rows = []
    for model in trained:
        if model.layers != min(m.layers for m in trained if m.kind == model.kind):
            continue
        for k, graph in enumerate(model.results[0]["graphs"]["start"]):
            lengths = [
                model.over(lambda r, w=word, k=k: r["graphs"][w][k]["length"])  # type: ignore[misc]
                for word in ("start", "end")
            ]
            rows.append(
                (
                    model.title,
                    graph["time"],
                    *(graph[key] for key in ("operators", "vertices", "edges")),
                    *(_said(each, ".1f") for each in lengths),
                )
            )
    columns = ("model", "time steps", "operators", "|V'|", "|E'|")
    last = ("path length, untrained", "path length, trained")
    return Table("Path length against the size of the graph", columns + last, tuple(rows))


def _cost_table(timed: Mapping[int, Result]) -> Table:
    rows: list[tuple[str | float | None, ...]] = []
    facts = {layers: _shares(result) for layers, result in timed.items()}
    for way in WAYS:
        rows.append((f"{way}, ms", *(each["milliseconds"][way] for each in facts.values())))
    for layers, result in timed.items():
        facts[layers]["peaks"] = result["peak"] or {}
    for name in ("training step", "exact trace"):
        values = [each["peaks"].get(name) for each in facts.values()]
        rows.append((f"peak memory of a {name}, MiB".replace("a exact", "an exact"), *values))
    rows += [
        ("of 100 steps, all elements", *(_part(each["exact"]) for each in facts.values())),
        ("of 100 steps, a sample", *(_part(each["sampled"]) for each in facts.values())),
        ("under a Monitor, by a clock", *(_part(each.get("monitor")) for each in facts.values())),
        ("a Monitor's trace, ms", *(each.get("said") for each in facts.values())),
        ("sampled within 1.96 errors", *(_part(each["within"]) for each in facts.values())),
    ]
    columns = ("what", *(f"{layers} layer{'s' * (layers > 1)}" for layers in facts))
    refused = [r["monitor"]["refused"] for r in timed.values() if "refused" in r["monitor"]]
    note = (
        f"Medians. {STEP.capitalize()}: fused kernels, with the optimiser; {APART}: by operators, "
        "unwatched." + (f" A Monitor was refused: {refused[0]}" if refused else "")
    )
    return Table("What a trace costs beside training (LSTM)", columns, tuple(rows), note)


def _part(value: float | None) -> str | None:
    return None if value is None or not isfinite(value) else f"{value:.1%}"


# Figures ------------------------------------------------------------------------------------------


def _plots(trained: Sequence[Model], timed: Mapping[int, Result]) -> list[Plot]:
    if not trained:
        return [_cost_plot(timed)]
    return [
        _over_training(trained[0]),
        _agreement(trained),
        _losses(trained),
        _layers(trained),
        _graph_sizes(trained),
        _in_time(trained[0]),
        _cost_plot(timed),
    ]


def _series(label: str, x: Sequence[float | str], found: Sequence[Interval], **more: Any) -> Series:
    """A series with its intervals; where one is not finite, the value."""
    bounds = [(f.low, f.high) if _bounded(f) else (f.value, f.value) for f in found]
    low, high = zip(*bounds)
    return Series(label, x, [f.value for f in found], low, high, **more)


def _over_training(model: Model) -> Plot:
    steps = [f"{step:,}" for step in model.moments]
    series = [
        _series(
            part.partition(", ")[2],
            steps,
            [
                model.share(k, lambda look, part=part: look["influence"][part][0])  # type: ignore[misc]
                for k in range(len(steps))
            ],
        )
        for part in model.parts
    ]
    title = f"Influence on embeddings over training: {model.title}"
    return Plot("influence", title, "updates", "share of paths", tuple(series))


def _agreement(trained: Sequence[Model]) -> Plot:
    series = [
        _series(
            model.title,
            [f"{step:,}" for step in model.moments],
            [model.share(k, lambda look: look["right"]) for k in range(len(model.moments))],
        )
        for model in _shallow(trained)
    ]
    title = "Verbs that agree with their subject, not with the nearest noun"
    return Plot("agreement", title, "updates", "share", tuple(series))


def _shallow(trained: Sequence[Model]) -> list[Model]:
    """The model of each kind with fewest layers."""
    return [
        next(m for m in trained if m.kind == kind)
        for kind in dict.fromkeys(m.kind for m in trained)
    ]


def _losses(trained: Sequence[Model]) -> Plot:
    series = []
    for model in _shallow(trained):
        steps = [point[0] for point in model.results[0]["curve"]]
        found = [
            model.over(lambda r, k=k: r["curve"][k][1])  # type: ignore[misc]
            for k in range(len(steps))
        ]
        series.append(_series(model.title, steps, found))
    ends = [steps[0], steps[-1]]
    least = trained[0].at(-1, lambda look: look["source"]).value
    series.append(Series("least possible", ends, [least, least], style="dashed"))
    return Plot("loss", "Training loss", "updates", "nats a word", tuple(series))


def _layers(trained: Sequence[Model]) -> Plot:
    series = []
    for kind in dict.fromkeys(model.kind for model in trained):
        some = [model for model in trained if model.kind == kind]
        label = KINDS[kind]
        for word, place in (("", -1), (", untrained", 0)):
            found = [m.at(place, lambda look: look["path"]["length"]) for m in some]
            style = {"style": "dashed", "like": label} if word else {}
            series.append(_series(label + word, [m.layers for m in some], found, **style))
    title = "Operators on a path from the first layer's weights"
    return Plot("layers", title, "layers", "operators", tuple(series))


def _graph_sizes(trained: Sequence[Model]) -> Plot:
    series = []
    for model in _shallow(trained):
        for word, when in (("", "end"), (", untrained", "start")):
            graphs = model.results[0]["graphs"][when]
            found = [
                model.over(lambda r, w=when, k=k: r["graphs"][w][k]["length"])  # type: ignore[misc]
                for k in range(len(graphs))
            ]
            style = {"style": "dashed", "like": model.title} if word else {}
            edges = [graph["edges"] for graph in graphs]
            series.append(_series(model.title + word, edges, found, **style))
    title = "Path length against the size of the graph"
    return Plot("graph", title, "|E'|", "operators", tuple(series), log_x=True, log_y=True)


def _in_time(model: Model) -> Plot:
    if not model.parts:
        return Plot("time", "", "", "", ())
    times = range(len(model.results[0]["looks"][0]["time"]))
    series = [
        _series(
            word,
            list(times),
            [model.share(place, lambda look, t=t: look["time"][t]) for t in times],  # type: ignore[misc]
        )
        for word, place in (("step 0 (control)", 0), ("trained", -1))
    ]
    title = f"Influence by time step: {model.title}"
    return Plot("time", title, "time step", "share of paths", tuple(series))


def _cost_plot(timed: Mapping[int, Result]) -> Plot:
    names = [f"{layers} layer{'s' * (layers > 1)}" for layers in timed]
    series = [
        Series(way, names, [median(r["seconds"][way]) * 1e3 for r in timed.values()], style="bars")
        for way in WAYS
    ]
    title = "What a trace costs beside a training step (LSTM)"
    return Plot("cost", title, "", "ms", tuple(series) if timed else (), log_y=True)
