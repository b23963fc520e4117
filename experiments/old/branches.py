"""Question: Is time linear in the size of the scalar graph, on random networks with branches?

Expectation: The chapter says so (Figure 1.3): its own engine and PyTorch's are linear in |V'| +
|E'|, and tracing is expected to be. Its networks are small, however, and each operator costs
something whatever its size; so their time may follow the number of operators instead, and be linear
in the scalars only for larger networks.

Method: Networks of ``branching``, which follows the chapter's procedure, on one random sample and
target with a squared error. PyTorch's ``loss.backward()``, the own engine, recording, and tracing
(the influence of all modules, recording included) run in turns; the best round of each counts, the
forward pass does not. Sizes are those of ``gradtrace.graph``. Lines by least squares, for the
chapter's networks (one expanded layer) and for up to 32 expanded layers after each other, over
scalars, over operators and over both. Intervals are from a bootstrap over networks. Gradients are
held against autograd's, and the procedure against its probabilities over many networks.

Seeds: The seed of a network says its architecture, weights, input and target: 0, 1, 2, ... for
the chapter's networks, from 1000·layers on for the larger ones. The procedure is counted from 0 on.

Limits: Networks are small, on one sample and one thread: the chapter's have few operators, so that
what is paid for each of them hides size. Which line fits is told by R², and not which law holds
beyond these sizes.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import gradtrace as gt
from gradtrace.experiments.branching import (
    ENDS,
    PROBABILITY,
    WIDTH,
    Branching,
    Plan,
    branching,
    plan,
    units,
)
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
from gradtrace.experiments.harness.interleaved_timing import (
    Way,
    Ways,
    interleaved,
    linear_fit,
    quotient,
    told,
)
from gradtrace.experiments.harness.statistics import Interval, bootstrap, with_interval
from gradtrace.experiments.rivals import listed

QUICK = {"stacks": [2, 4, 8], "each": 2, "rounds": 5, "counted": 2_000, "drawn": 3}
FULL = {"stacks": [2, 4, 8, 16, 32], "each": 6, "rounds": 15, "counted": 20_000, "drawn": 3}
SEEDS = Seeds(quick=12, full=100)
TIMED = True
FIGURE = "branches"

TORCH, OWN, RECORDING, TRACING = "PyTorch", "own engine", "recording", "tracing"
WAYS = (TORCH, OWN, RECORDING, TRACING)
LINEAR = 0.99
"""The least R² that is called linear."""
LEVELS = 4
"""How many levels of the procedure are looked at; deeper ones are rare."""


# What there is to measure ------------------------------------------------------------------------


def cells(settings: Mapping[str, Any], seeds: int) -> list[Cell]:
    """A cell for each network, one for the drawing, and one for the procedure."""
    rounds = settings["rounds"]
    found: list[Cell] = [
        {"kind": "procedure", "networks": settings["counted"]},
        {"kind": "drawing", "seed": settings["drawn"]},
    ]
    for seed in range(seeds):
        found.append({"kind": "network", "seed": seed, "layers": 1, "rounds": rounds})
    for layers in settings["stacks"]:
        for seed in range(1000 * layers, 1000 * layers + settings["each"]):
            found.append({"kind": "network", "seed": seed, "layers": layers, "rounds": rounds})
    return found


def measure(cell: Cell, tick: Tick) -> Result:
    """One of them."""
    if cell["kind"] == "procedure":
        tick(f"{cell['networks']:,} architectures")
        return _procedure(cell["networks"])
    if cell["kind"] == "drawing":
        tick("drawing")
        return _drawing(cell["seed"])
    tick(f"network {cell['seed']}")
    return _network(cell["seed"], cell["layers"], cell["rounds"])


# The procedure -----------------------------------------------------------------------------------


def _procedure(networks: int) -> Result:
    """How many layers there were at each level, and how many of them were expanded."""
    seen: Counter[int] = Counter()
    expanded: Counter[int] = Counter()
    for seed in range(networks):
        for level, split in _levels(plan(random.Random(seed), PROBABILITY, WIDTH)):
            seen[level] += 1
            expanded[level] += split
    levels = range(LEVELS)
    return {"seen": [seen[n] for n in levels], "expanded": [expanded[n] for n in levels]}


def _levels(planned: Plan, level: int = 0) -> Iterator[tuple[int, bool]]:
    """The level of every layer, and whether it was expanded."""
    yield level, not isinstance(planned, int)
    if not isinstance(planned, int):
        for part in planned:
            yield from _levels(part, level + 1)


def _drawing(seed: int) -> Result:
    model, loss = _problem(seed, 1)
    with gt.watch(model) as watch:
        graph = watch.graph(loss())
    return {"svg": graph.draw(), "plan": str(model.plans[0]), "operators": len(graph)}


# Networks ----------------------------------------------------------------------------------------


class Problem(NamedTuple):
    """A network, and its loss on one sample."""

    model: Branching
    loss: Callable[[], Tensor]


def _problem(seed: int, layers: int) -> Problem:
    model = branching(seed, layers=layers)
    draw = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, 1, ENDS, generator=draw)
    return Problem(model, lambda: F.mse_loss(model(x), y))


def _network(seed: int, layers: int, rounds: int) -> Result:
    problem = _problem(seed, layers)
    with gt.watch(problem.model) as watch:
        loss = problem.loss()
    graph = watch.graph(loss)
    timed = interleaved(_ways(problem), rounds, collect=False)
    return {
        "vertices": graph.scalar_vertices,
        "edges": graph.scalar_edges,
        "by_hand": list(by_hand(problem.model.plans)),
        "operators": len(graph),
        "parameters": sum(p.numel() for p in problem.model.parameters()),
        "difference": _difference(problem, watch, loss),
        "seconds": {way: timed.best(way) for way in WAYS},
    }


def by_hand(plans: Sequence[Plan]) -> tuple[int, int]:
    """|V'| and |E'| of such a network and its loss, from the widths alone.

    A layer from m to n is a weight, its transpose, a bias, a product and a tanh, 2·m·n + 3·n
    scalars; m·n edges transpose the weight, m·n take it into the product, n the bias, n go through
    the tanh, and m·n more come from the layer's input, unless that is the network's, which needs no
    gradient. A diamond copies its n scalars; the loss is one more, with an edge from each output.

    >>> by_hand([495])
    (21316, 25770)
    """
    vertices, edges, inputs = 1, ENDS, ENDS
    for depth, planned in enumerate([*plans, ENDS]):
        for part in _parts(planned):
            n = units(part)
            if isinstance(part, int):
                vertices += 2 * inputs * n + 3 * n
                edges += (3 if depth else 2) * inputs * n + 2 * n
            else:
                vertices += n
                edges += n
        inputs = units(planned)
    return vertices, edges


def _parts(planned: Plan) -> Iterator[Plan]:
    """A plan and all plans inside it."""
    yield planned
    if not isinstance(planned, int):
        for part in planned:
            yield from _parts(part)


def _difference(problem: Problem, watch: gt.watch, loss: Tensor) -> float:
    """The largest difference to autograd's gradients, over the largest gradient element."""
    ours = watch.backward(loss)
    names, parameters = zip(*problem.model.named_parameters())
    theirs = torch.autograd.grad(loss, parameters)
    largest = max(float(g.abs().max()) for g in theirs)
    apart = (float((ours[n] - g).abs().max()) for n, g in zip(names, theirs))
    return max(apart) / largest


def _ways(problem: Problem) -> Ways:
    def plain() -> Callable[[], object]:
        problem.model.zero_grad(set_to_none=True)
        backward: Callable[[], object] = problem.loss().backward
        return backward

    return {
        TORCH: plain,
        OWN: _watched(problem, lambda watch, loss: watch.backward(loss)),
        RECORDING: _watched(problem, lambda watch, loss: watch.program(loss)),
        TRACING: _watched(problem, lambda watch, loss: watch.trace(loss).influence()),
    }


def _watched(problem: Problem, run: Callable[[gt.watch, Tensor], object]) -> Way:
    def prepare() -> Callable[[], object]:
        with gt.watch(problem.model) as watch:
            loss = problem.loss()
        return lambda: run(watch, loss)

    return prepare


# What came out -----------------------------------------------------------------------------------


class Line(NamedTuple):
    """How the times of one way, in one group of networks, follow from their sizes."""

    group: str
    way: str
    networks: int
    slope: Interval
    line: Interval  # what the line over scalars explains
    scalars: float
    operators: float
    more: Interval  # what a line over operators explains more than that over scalars
    both: float
    ratio: float


def headline(facts: Mapping[str, Any]) -> str:
    """The answer in a sentence."""
    which = {"the chapter's": "the chapter's small networks", "larger": "larger ones"}
    plain = {key: [value] for key, value in facts["r2"].items()}
    explained = facts.get("explained", plain)  # older results have no intervals
    found = {
        where: with_interval(explained[f"{name}: {TORCH}"], percent=True)
        for name, where in which.items()
        if f"{name}: {TORCH}" in explained
    }
    said = " and ".join(f"{text} among {where}" for where, text in found.items())
    return (
        "Of the differences in the time of PyTorch's backward pass the size of a network with "
        f"branches explains {said}."
        if said
        else "Too few networks were measured to fit a line of time over size."
    )


def conclude(rows: Sequence[Row]) -> Findings:
    """Lines through times, shares of expanded layers, and the drawing."""
    by = {kind: _sorted(rows, kind) for kind in ("network", "procedure", "drawing")}
    groups = {
        "the chapter's": [r for r in by["network"] if r.cell["layers"] == 1],
        "larger": [r for r in by["network"] if r.cell["layers"] > 1],
    }
    lines = [
        _line(name, way, found) for name, found in groups.items() if len(found) > 2 for way in WAYS
    ]
    shares = [share for row in by["procedure"] for share in _shares(row.result)]
    return Findings(
        sentence=_sentence(lines, groups, by["network"]),
        tables=(_fits(lines), _sizes(groups), _chances(shares)),
        plots=tuple(_plot(name, found) for name, found in groups.items() if found),
        facts=_facts(lines, by["network"], shares),
        drawings={
            f"Network {r.cell['seed']}, of layers {r.result['plan']}": r.result["svg"]
            for r in by["drawing"]
        },
    )


def _sorted(rows: Sequence[Row], kind: str) -> list[Row]:
    found = [row for row in rows if row.cell["kind"] == kind]
    return sorted(found, key=lambda r: (r.cell.get("layers", 0), r.cell.get("seed", 0)))


def _size(row: Row) -> float:
    return float(row.result["vertices"] + row.result["edges"])


def _time(row: Row, way: str) -> float:
    """In milliseconds."""
    return float(row.result["seconds"][way]) * 1e3


def _line(group: str, way: str, rows: list[Row]) -> Line:
    points = [(_size(r), float(r.result["operators"]), _time(r, way)) for r in rows]
    size, operators, time = (list(column) for column in zip(*points))
    return Line(
        group,
        way,
        len(rows),
        bootstrap(points, _slope, rounds=1000),
        bootstrap(points, lambda some: explained([[p[0] for p in some]], [p[2] for p in some])),
        explained([size], time),
        explained([operators], time),
        bootstrap(points, _explained_more, rounds=1000),
        explained([size, operators], time),
        float(np.median([quotient(_time(r, way), _time(r, TORCH)) for r in rows])),
    )


def _explained_more(points: Sequence[tuple[float, float, float]]) -> float:
    """R² over operators less R² over scalars."""
    size, operators, time = (list(column) for column in zip(*points))
    return explained([operators], time) - explained([size], time)


def _slope(points: Sequence[tuple[float, float, float]]) -> float:
    """Nanoseconds a scalar; nan if a draw has one network only."""
    x, y = [p[0] for p in points], [p[2] for p in points]
    return linear_fit(x, y).slope * 1e6


def explained(columns: Sequence[Sequence[float]], y: Sequence[float]) -> float:
    """R² of the least-squares fit ``y = a + Σ b·x`` over columns x.

    It is 1 where all y are equal, as the fit is exact; nan where one is not finite.

    >>> round(explained([[1, 2, 3, 4], [0, 1, 0, 1]], [1, 4, 3, 6]), 6)
    1.0
    """
    x = np.array([[value / max(column) for value in column] for column in columns]).T
    design = np.column_stack([np.ones(len(y)), x])
    target = np.array(y)
    if not np.isfinite(target).all():
        return math.nan
    rest = target - design @ np.linalg.lstsq(design, target, rcond=None)[0]
    spread = float(((target - target.mean()) ** 2).sum())
    return 1 - float((rest**2).sum()) / spread if spread else 1.0


def _shares(result: Result) -> Iterator[tuple[int, int, float, float, float]]:
    """Level, layers there, the share that was expanded, what it should be, and how many standard
    errors lie between.
    """
    for level, (seen, expanded) in enumerate(zip(result["seen"], result["expanded"])):
        chance = PROBABILITY / 2**level
        error = math.sqrt(chance * (1 - chance) / seen) if seen else math.inf
        share = expanded / seen if seen else math.nan
        yield level, seen, share, chance, (share - chance) / error


# In words, tables and figures --------------------------------------------------------------------


def _sentence(lines: list[Line], groups: Mapping[str, list[Row]], networks: list[Row]) -> str:
    parts = [_of_group([x for x in lines if x.group == g], rows) for g, rows in groups.items()]
    if not networks:
        return "No network was measured."
    apart = told(max(row.result["difference"] for row in networks), ".1g")
    parts.append(
        f"The own engine's gradients differ from autograd's by {apart} of the largest element "
        "at most."
    )
    return " ".join(part for part in parts if part)


def _of_group(lines: list[Line], rows: list[Row]) -> str:
    if not lines:
        return ""
    sizes = [_size(row) for row in rows]
    straight = [x.way for x in lines if x.scalars >= LINEAR]
    bent = [x.way for x in lines if not x.scalars >= LINEAR]
    text = (
        f"On {len(rows)} {_GROUP[lines[0].group]} (|V'| + |E'| from {min(sizes):,.0f} to "
        f"{max(sizes):,.0f}), over size, "
    )
    if not bent:
        return f"{text}all times are lines (R² of {LINEAR} or more), as the chapter says."
    better = [x for x in lines if x.way in bent and x.more.sign > 0]
    if straight:
        values = [with_interval(x.line, ".3f") for x in lines if x.way in straight]
        text += (
            f"{_list(straight)} linear (R² of {LINEAR} or more: {listed(values)}), {_list(bent)} "
            "not."
        )
    else:
        text += f"no way's R² reaches {LINEAR}, so the chapter's plain line is too simple here."
    if better:
        more = [f"{x.way} ({with_interval(x.more, '+.2f')} of R²)" for x in better]
        text += f" The number of operators explains more than size does of {listed(more)}."
    return text


_GROUP = {
    "the chapter's": "networks of the chapter's procedure",
    "larger": "networks with several expanded layers after each other",
}


def _list(names: Sequence[str]) -> str:
    return f"{listed(names)} {'are' if len(names) > 1 else 'is'}"


def _fits(lines: list[Line]) -> Table:
    return Table(
        "Lines through times",
        (
            *("networks", "pass", "how many", "ns a scalar", "low", "high"),
            *("R² over scalars", "R², low", "R², high"),
            *("R² over operators", "more than scalars", "R² over both", "times PyTorch's, median"),
        ),
        tuple(
            (
                *(x.group, x.way, x.networks, *x.slope, *x.line),
                *(x.operators, with_interval(x.more, "+.2f"), x.both, x.ratio),
            )
            for x in lines
        ),
        "Low and high: 95% intervals of what stands before, from a bootstrap over networks.",
    )


def _sizes(groups: Mapping[str, list[Row]]) -> Table:
    measured = ("vertices", "edges", "operators", "parameters")
    rows = []
    for name, found in groups.items():
        for what in measured if found else ():
            values = [r.result[what] for r in found]
            rows.append((name, what, min(values), float(np.median(values)), max(values)))
    return Table("Sizes", ("networks", "of", "least", "median", "most"), tuple(rows))


def _chances(shares: list[tuple[int, int, float, float, float]]) -> Table:
    return Table(
        "The procedure: how many layers become diamonds",
        ("level", "layers", "share expanded", "probability", "difference, standard errors"),
        tuple(shares),
    )


def _plot(name: str, rows: list[Row]) -> Plot:
    ordered = sorted(rows, key=_size)
    sizes = [_size(r) for r in ordered]
    series = []
    for way in WAYS:
        times = [_time(r, way) for r in ordered]
        series.append(Series(way, sizes, times, style="points"))
        if len(set(sizes)) > 1:
            fit = linear_fit(sizes, times)
            ends = [sizes[0], sizes[-1]]
            line = [fit.intercept + fit.slope * x for x in ends]
            series.append(Series(f"line through {way}", ends, line, style="dashed", like=way))
    chapter = name == "the chapter's"
    return Plot(
        "branches" if chapter else "branches-larger",
        "Random networks with branches (Figure 1.3)"
        if chapter
        else "Several expanded layers after each other",
        "|V'| + |E'|, scalars",
        "milliseconds",
        tuple(series),
    )


def _facts(
    lines: list[Line],
    networks: list[Row],
    shares: list[tuple[int, int, float, float, float]],
) -> dict[str, Any]:
    return {
        "networks": len(networks),
        "largest_difference": max((r.result["difference"] for r in networks), default=None),
        "counts_follow_from_widths": all(
            r.result["by_hand"] == [r.result["vertices"], r.result["edges"]] for r in networks
        ),
        "procedure": [
            {"level": level, "share": share, "probability": chance, "errors": errors}
            for level, _, share, chance, errors in shares
        ],
        "r2": {f"{x.group}: {x.way}": x.scalars for x in lines},
        "explained": {f"{x.group}: {x.way}": list(x.line) for x in lines},
    }
