"""Batch, mini-batch and stochastic descent on R(P,Q), and where descent ends up.

The lecture: batch descent learns only after all data was seen; stochastic descent (B = 1) is
noisier. A batch drawn without replacement from N samples misses the gradient g by

    E ‖g_B - g‖² = S²/B · (N - B)/(N - 1)        S²: the variance of one sample's gradient

and with a constant rate that noise keeps the weights from settling. Many runs go at a time: the
weights have shape (runs, 1), each run has batches of its own, and the gradient of the sum of all
losses is that of each.

"Descent finds a local minimum, may not be global": started from many random weights, how many
reach the best?
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice, pairwise
from math import isfinite
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from gradtrace.experiments.harness.findings import (
    Cell,
    Findings,
    Plot,
    Result,
    Row,
    Series,
    Table,
    Tick,
)
from gradtrace.experiments.harness.statistics import average, geometric, student, with_interval
from gradtrace.experiments.lecture import program
from gradtrace.experiments.lecture.descent import Point, descend, gradient, marks, minimum
from gradtrace.experiments.lecture.optimisers import Descent, constant

OFFSET = (0.6, -0.8, 0.6)
"""Where descent starts, off the true weights: in the valley of the best minimum."""

CLOSE = 1e-6
"""Losses that are nearer to each other are of the same minimum."""


REST = 1e-3
"""Where the slope is less, descent has come to rest."""


def cells(settings: Mapping[str, Any], seeds: int) -> list[Cell]:
    """One for each size of batch and seed, and one for starts everywhere."""
    number = settings["samples"]
    sizes = [size for size in settings["batches"] if size < number] + [number]
    kinds: list[Cell] = [
        {"kind": "batch", "size": s, "runs": settings["runs"], "rate": settings["rate"]}
        for s in sizes
    ]
    kinds.append({"kind": "starts", "runs": settings["starts"], "rate": 1.0})
    shared = {"samples": number, "updates": settings["updates"]}
    return [kind | shared | {"seed": seed} for kind in kinds for seed in range(seeds)]


def measure(cell: Cell, tick: Tick) -> Result:
    """Fit R(P,Q) many times at once."""
    data = program.samples(cell["samples"], cell["seed"])
    best = minimum(program.loss(data), program.weights(program.TRUTH))
    if cell["kind"] == "starts":
        return _starts(cell, data, best)
    generator = torch.Generator().manual_seed(1000 + cell["seed"])
    start = program.stacked(program.weights(program.TRUTH)) + torch.tensor(OFFSET).double()
    return _noise(cell, data, start) | _fit(cell, data, best, start, generator)


def _fit(
    cell: Cell, data: program.Samples, best: Point, start: Tensor, generator: torch.Generator
) -> Result:
    """Excess loss and distance after 1, ..., ``updates`` updates: means over runs."""
    runs, updates = cell["runs"], cell["updates"]
    batches = shuffled(len(data.p), cell["size"], runs, generator)
    rule = Descent(constant(cell["rate"]))
    points = descend(
        lambda w, _: program.errors(w, data.at(next(batches))).sum(),
        program.copies(program.weights(start), runs),
        rule,
    )
    least, looked = float(program.errors(best, data)), marks(updates, 12)
    excess, late = [], []
    for i, w in enumerate(islice(points, updates + 1)):
        if i in looked:
            excess.append(float(program.errors(w, data).mean()) - least)
        if 10 * i > 9 * updates:
            late.append(float(program.errors(w, data).mean()) - least)
    apart = program.stacked(w) - program.stacked(best)
    return {
        "updates": looked,
        "excess": excess,
        "floor": mean(late),
        "distance": float(apart.norm(dim=-1).mean()),
        "least": least,
    }


def shuffled(number: int, size: int, runs: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Batches of indices, (runs, size): each run goes through all data in an order of its own."""
    while True:
        order = torch.rand(runs, number, generator=generator).argsort(-1)
        for at in range(0, number - size + 1, size):
            yield order[:, at : at + size]


def _noise(cell: Cell, data: program.Samples, start: Tensor) -> Result:
    """``E ‖g_B - g‖²`` at the start, measured over 1,000 batches and as the formula has it."""
    number, size = len(data.p), cell["size"]
    generator = torch.Generator().manual_seed(2000 + cell["seed"])
    drawn = torch.rand(1000, number, generator=generator).argsort(-1)[:, :size]

    def each(index: Tensor) -> Tensor:
        """The gradient of each batch: (batches, 3)."""
        w = program.copies(program.weights(start), len(index))
        return program.stacked(gradient(lambda w: program.errors(w, data.at(index)).sum(), w)[1])

    single = each(torch.arange(number)[:, None])
    whole = single.mean(0)
    variance = float((single - whole).square().sum(-1).mean())
    return {
        "noise": float((each(drawn) - whole).square().sum(-1).mean()),
        "formula": variance / size * (number - size) / (number - 1),
    }


def _starts(cell: Cell, data: program.Samples, best: Point) -> Result:
    """From random weights, by batch descent: where does it end?"""
    generator = torch.Generator().manual_seed(3000 + cell["seed"])
    at = 2 * torch.randn(3, cell["runs"], 1, dtype=torch.float64, generator=generator)
    points = descend(
        lambda w, _: program.errors(w, data).sum(),
        {f"w{i}": x for i, x in enumerate(at)},
        Descent(constant(cell["rate"])),
    )
    *_, end = islice(points, cell["updates"] + 1)
    ends, least = program.errors(end, data), float(program.errors(best, data))
    steep = gradient(lambda w: program.errors(w, data).sum(), end)[1]
    still = program.stacked(steep).norm(dim=-1) < REST
    return {
        "least": least,
        "reached": int((ends < least + 1e-3).sum()),
        "still": int(still.sum()),
        "stuck": int((still & (ends >= least + 1e-3)).sum()),
        "below": float((least - ends).max()),
        "runs": cell["runs"],
    }


def conclude(rows: Sequence[Row]) -> Findings:
    """What the size of a batch did."""
    batch = [row for row in rows if row.cell["kind"] == "batch"]
    sizes = sorted({row.cell["size"] for row in batch})
    if not sizes:
        return Findings("")

    def of(size: int, take: Callable[[Row], float]) -> list[float]:
        return [take(row) for row in batch if row.cell["size"] == size]

    budget = min(row.cell["updates"] for row in batch)
    table = Table(
        "R(P,Q): excess loss by size of batch, mean over seeds",
        (
            "batch",
            "gradient noise",
            "by formula",
            "after one pass",
            f"after {budget} samples",
            f"after {budget} updates",
        ),
        tuple(
            (
                size,
                mean(of(size, lambda row: row.result["noise"])),
                mean(of(size, lambda row: row.result["formula"])),
                mean(of(size, lambda row: _after(row, row.cell["samples"]))),
                mean(of(size, lambda row: _after(row, budget))),
                mean(of(size, lambda row: row.result["floor"])),
            )
            for size in sizes
        ),
        f"loss above its least value; the last column is the mean over the last tenth; rate "
        f"{batch[0].cell['rate']:g}, {batch[0].cell['samples']} samples, means of "
        f"{batch[0].cell['runs']} runs",
    )
    facts = _facts(table, [row for row in rows if row.cell["kind"] == "starts"]) | {
        "noise_ratio": _noise_ratio(batch),
        "small_over_batch": [
            _ratio(batch, sizes, lambda row: _after(row, row.cell["samples"])),
            _ratio(batch, sizes, lambda row: row.result["floor"]),
        ],
    }
    return Findings(_sentence(facts), (table,), (_plot(batch, sizes),), facts)


def _noise_ratio(rows: Sequence[Row]) -> list[float | None]:
    """Noise over what the formula says, of each seed over sizes, with its interval over seeds."""
    found: dict[int, list[float]] = {}
    for row in rows:
        if row.result["formula"]:
            each = row.result["noise"] / row.result["formula"]
            found.setdefault(row.cell["seed"], []).append(each)
    ratio = student([average(each) for each in found.values()])
    return [x if isfinite(x) else None for x in ratio]


def _ratio(
    rows: Sequence[Row], sizes: Sequence[int], take: Callable[[Row], float]
) -> list[float | None]:
    """The smallest batch's over the largest's, of the same seed, with its interval over seeds."""
    ends: dict[int, dict[int, float]] = {}
    for row in rows:
        ends.setdefault(row.cell["seed"], {})[row.cell["size"]] = take(row)
    few, many = sizes[0], sizes[-1]
    found = geometric([e[few] / e[many] for e in ends.values() if e.get(few) and e.get(many)])
    return [x if isfinite(x) else None for x in found]


def _after(row: Row, seen: int) -> float:
    """The excess loss once so many samples were seen, at the last update that was looked at."""
    updates = max(1, seen // row.cell["size"])
    found = [e for i, e in zip(row.result["updates"], row.result["excess"]) if i <= updates]
    return float(found[-1])


def _facts(table: Table, starts: Sequence[Row]) -> dict[str, Any]:
    columns = list(zip(*table.rows))
    runs = sum(row.result["runs"] for row in starts)
    return {
        "noise_falls": _ordered(columns[1]),
        "noise_over_formula": [m / f if f else 1.0 for m, f in zip(columns[1], columns[2])],
        "batch_noise": columns[1][-1],
        "small_learns_first": columns[3][0] < columns[3][-1],
        "large_ends_lower": _ordered(columns[5]),
        "starts": runs,
        "reached": sum(row.result["reached"] for row in starts),
        "share": _share(starts, "reached"),
        "share_stuck": _share(starts, "stuck"),
        "stuck": sum(row.result["stuck"] for row in starts),
        "below": max((row.result["below"] for row in starts), default=0.0),
    }


def _share(starts: Sequence[Row], what: str) -> list[float | None]:
    """Of the starts of a seed, with its interval over seeds."""
    found = student([row.result[what] / row.result["runs"] for row in starts])
    return [x if isfinite(x) else None for x in found]


def _ordered(values: Sequence[Any]) -> bool:
    return all(b < a for a, b in pairwise(values))


def _sentence(facts: Mapping[str, Any]) -> str:
    early = "less" if facts["small_learns_first"] else "NOT less"
    once, often = (with_interval(each, ".2g") for each in facts["small_over_batch"])
    text = (
        "Batches: the noise of a batch's gradient is "
        f"{with_interval(facts['noise_ratio'], '.2f')} times what the formula says. After one pass "
        f"over the data one sample at a time is {early} far from the best loss than whole batches "
        f"({once} times as far), after equally many updates {often} times as far"
        + ("." if facts["large_ends_lower"] else ", but not for each size between.")
    )
    if facts["starts"]:
        share, stuck = (with_interval(facts[key], percent=True) for key in ("share", "share_stuck"))
        text += f" Of {facts['starts']} random starts {share} reach the best minimum, "
        text += (
            f"{stuck} come to rest elsewhere (slope below {REST:g}): as the lecture says, "
            "descent need not find it."
            if facts["stuck"]
            else "and none came to rest elsewhere."
        )
    if facts["below"] > CLOSE:
        text += f" A start went {facts['below']:.1e} below what was taken for the best minimum."
    return text


def _plot(rows: Sequence[Row], sizes: Sequence[int]) -> Plot:
    series = []
    for size in sizes:
        runs = [row.result for row in rows if row.cell["size"] == size]
        values = list(zip(*(run["excess"] for run in runs)))
        series.append(
            Series(
                f"B = {size}",
                [size * i for i in runs[0]["updates"]],
                [max(mean(v), 1e-17) for v in values],
                [max(min(v), 1e-17) for v in values] if len(runs) > 1 else (),
                [max(max(v), 1e-17) for v in values] if len(runs) > 1 else (),
            )
        )
    return Plot(
        "batches",
        "R(P,Q) by batch, mini-batch and stochastic descent",
        "samples seen",
        "excess loss",
        tuple(series),
        log_x=True,
        log_y=True,
    )
