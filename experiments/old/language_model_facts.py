"""The numbers behind ``language-model``: models by kind, learning, influence, path length, cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isfinite, nan
from statistics import fmean, median
from typing import Any, NamedTuple

from gradtrace.experiments.harness.findings import Result, Row
from gradtrace.experiments.harness.interleaved_timing import Fit, linear_fit, power_fit, quotient
from gradtrace.experiments.harness.statistics import Interval, student
from gradtrace.experiments.induction import spearman
from gradtrace.experiments.language_model_cost import (
    EXACT,
    RECORDING,
    SAMPLED,
    STEP,
    WATCHED,
    WAYS,
)

KINDS = {"lstm": "LSTM", "rnn": "RNN", "forward": "feed-forward network"}


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


def costs(rows: Iterable[Row]) -> dict[int, list[Result]]:
    """What was timed, by layers, of each seed."""
    found: dict[int, list[Row]] = {}
    for row in rows:
        if row.cell["part"] == "cost":
            found.setdefault(row.cell["layers"], []).append(row)
    return {
        layers: [row.result for row in sorted(found[layers], key=lambda row: int(row.cell["seed"]))]
        for layers in sorted(found)
    }


def learned_facts(model: Model) -> dict[str, Any]:
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


def order_control(trained: Sequence[Model]) -> Interval:
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


def is_sure(found: Sequence[float]) -> bool:
    """Whether an interval is finite and on one side of 0."""
    value, low, high = (nan if x is None else x for x in found)
    return all(map(isfinite, (value, low, high))) and (low > 0 or high < 0)


def length_facts(model: Model) -> dict[str, Any]:
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


def growth_by_layers(trained: Sequence[Model], kind: str) -> dict[str, Any]:
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


def growth_by_graph(model: Model) -> dict[str, Any]:
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


def cost_facts(results: Sequence[Result]) -> dict[str, Any]:
    """Milliseconds, and what a trace every 100 steps takes of training time: of each seed by its
    medians, then the mean over seeds with its interval.
    """
    times = [{way: median(r["seconds"][way]) * 1e3 for way in WAYS} for r in results]
    found: dict[str, Any] = {
        "seeds": len(results),
        "alone": all(result["alone"] for result in results),
        "milliseconds": {way: list(student([each[way] for each in times])) for way in WAYS},
        "exact": list(student([_of_training(each, EXACT) for each in times])),
        "sampled": list(student([_of_training(each, SAMPLED) for each in times])),
        "peak": _peaks(results),
        "within": _within([x for result in results for x in result["errors_apart"]]),
    }
    monitors = [r["monitor"] for r in results if "refused" not in r["monitor"]]
    if monitors:
        added = [quotient(each["with"], each["plain"]) - 1 for each in monitors]
        found["monitor"] = list(student(added))
        found["every"] = monitors[0]["every"]
        found["said"] = list(student([each["said"] * 1e3 for each in monitors]))
    return found


def _of_training(times: Mapping[str, float], way: str) -> float:
    """What a trace every 100 steps takes of the time of these."""
    return quotient(times[WATCHED] + times[RECORDING] + times[way], 100 * times[STEP])


def _peaks(results: Sequence[Result]) -> dict[str, float]:
    """The most MiB over seeds, where a device says them."""
    known = [result["peak"] for result in results if result["peak"]]
    return {name: max(peak[name] for peak in known) for name in (known[0] if known else ())}


def _within(apart: Sequence[float]) -> float:
    """The part of sampled shares that are within 1.96 standard errors of the exact ones."""
    return sum(x <= 1.96 for x in apart) / len(apart) if apart else nan
