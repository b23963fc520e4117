"""The tables and figures of ``language-model``, and its findings as a whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from gradtrace.experiments.harness.findings import Findings, Plot, Result, Row, Series, Table
from gradtrace.experiments.harness.interleaved_timing import told
from gradtrace.experiments.harness.statistics import Interval
from gradtrace.experiments.language_model_cost import (
    APART,
    STEP,
    WAYS,
)
from gradtrace.experiments.language_model_facts import (
    KINDS,
    Model,
    cost_facts,
    costs,
    growth_by_graph,
    growth_by_layers,
    influence_changes,
    is_sure,
    learned_facts,
    length_facts,
    models,
    order_control,
)
from gradtrace.experiments.language_model_sentences import (
    is_bounded,
    percent,
    sentence,
    stated,
)


def findings(rows: Sequence[Row]) -> Findings:
    """The findings from all rows."""
    trained, timed = models(rows), costs(rows)
    changes = influence_changes(trained)
    facts: dict[str, Any] = {
        "seeds": max((len(model.results) for model in trained), default=0),
        "sizes": list(trained[0][2:4]) if trained else [],
        "learned": {model.title: learned_facts(model) for model in trained},
        "control": list(order_control(trained)),
        "changes": {
            title: {k: list(v) for k, v in each.items()} for title, each in changes.items()
        },
        "lengths": {model.title: length_facts(model) for model in trained},
        "by_layers": {kind: growth_by_layers(trained, kind) for kind in KINDS},
        "by_graph": {model.title: growth_by_graph(model) for model in trained},
        "cost": {str(layers): cost_facts(some) for layers, some in timed.items()},
        "devices": sorted({str(row.result["device"]) for row in rows}),
    }
    tables = (_learning(trained), _influence(trained, changes), _paths(trained), _fits(facts))
    more = (_sizes(trained), _cost_table(facts["cost"], timed)) if timed else (_sizes(trained),)
    return Findings(
        sentence(facts),
        tables=tuple(table for table in (*tables, *more) if table.rows),
        plots=tuple(plot for plot in _plots(trained, facts["cost"]) if plot.series),
        facts=facts,
    )


# Tables -------------------------------------------------------------------------------------------


def _learning(trained: Sequence[Model]) -> Table:
    rows = []
    for model in trained:
        found = learned_facts(model)
        rows.append(
            (
                model.title,
                len(model.results),
                model.results[0]["parameters"],
                *(stated(each) for each in found["loss"]),
                told(found["source"], ".2f"),
                percent(found["right"][0]),
                percent(found["least"]),
                percent(found["right"][1]),
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
                    percent(model.share(0, share)),
                    percent(model.share(-1, share)),
                    stated(changes[model.title][part], "+.1f", 100),
                    "yes" if is_sure(changes[model.title][part]) else "no",
                    *(
                        percent(model.share(k, lambda look, place=place: share(look, place)))  # type: ignore[misc]
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
        found = length_facts(model)
        rows.append(
            (
                model.title,
                *(stated(each, ".1f") for each in found["length"]),
                found["longest"],
                *(stated(each, ".1f") for each in found["reach"]),
                *(percent(each) for each in found["coverage"]),
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
            stated(each[when]["slope"]),
            stated(each[when]["intercept"]),
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
                    *(stated(each, ".1f") for each in lengths),
                )
            )
    columns = ("model", "time steps", "operators", "|V'|", "|E'|")
    last = ("path length, untrained", "path length, trained")
    return Table("Path length against the size of the graph", columns + last, tuple(rows))


def _cost_table(cost: Mapping[str, Any], timed: Mapping[int, Sequence[Result]]) -> Table:
    facts = cost.values()

    def shares(key: str) -> list[str | None]:
        return [percent(each[key], ".1f") if key in each else None for each in facts]

    rows: list[tuple[str | float | None, ...]] = [
        ("seeds", *(each["seeds"] for each in facts)),
        *((f"{way}, ms", *(_ms(each["milliseconds"][way]) for each in facts)) for way in WAYS),
        ("peak memory of a training step, MiB", *(each["peak"].get(STEP) for each in facts)),
        (
            "peak memory of an exact trace, MiB",
            *(each["peak"].get("exact trace") for each in facts),
        ),
        ("of 100 steps, all elements", *shares("exact")),
        ("of 100 steps, a sample", *shares("sampled")),
        ("added by a Monitor, by a clock", *shares("monitor")),
        (
            "a Monitor's trace, ms",
            *(_ms(each["said"]) if "said" in each else None for each in facts),
        ),
        (
            "sampled within 1.96 errors",
            *(f"{x:.1%}" if isfinite(x) else None for x in (each["within"] for each in facts)),
        ),
    ]
    columns = ("what", *(f"{layers} layer{'s' * (layers != '1')}" for layers in cost))
    every = (result["monitor"] for some in timed.values() for result in some)
    refused = [monitor["refused"] for monitor in every if "refused" in monitor]
    note = (
        "Of each seed the median over its rounds, then means over seeds with their intervals; "
        f"memory is the most of any. {STEP.capitalize()}: fused kernels, with the optimiser; "
        f"{APART}: by operators, unwatched."
        + (f" A Monitor was refused: {refused[0]}" if refused else "")
    )
    return Table("What a trace costs beside training (LSTM)", columns, tuple(rows), note)


def _ms(found: Sequence[float]) -> str:
    """Milliseconds with their interval, three digits or more."""
    return stated(found, ".2f" if found[0] < 10 else ".1f" if found[0] < 100 else ".0f")


# Figures ------------------------------------------------------------------------------------------


def _plots(trained: Sequence[Model], cost: Mapping[str, Any]) -> list[Plot]:
    if not trained:
        return [_cost_plot(cost)]
    return [
        _over_training(trained[0]),
        _agreement(trained),
        _losses(trained),
        _layers(trained),
        _graph_sizes(trained),
        _in_time(trained[0]),
        _cost_plot(cost),
    ]


def _series(label: str, x: Sequence[float | str], found: Sequence[Interval], **more: Any) -> Series:
    """A series with its intervals; where one is not finite, the value."""
    bounds = [(f.low, f.high) if is_bounded(f) else (f.value, f.value) for f in found]
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


def _cost_plot(cost: Mapping[str, Any]) -> Plot:
    title = "What a trace costs beside a training step (LSTM)"
    names = [f"{layers} layer{'s' * (layers != '1')}" for layers in cost]
    found = {way: [Interval(*each["milliseconds"][way]) for each in cost.values()] for way in WAYS}
    series = [_series(way, names, each, style="bars") for way, each in found.items() if each]
    return Plot("cost", title, "", "ms", tuple(series), log_y=True)
