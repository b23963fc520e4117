"""Initialisation: what He's and Xavier's do to the gradient along depth.

A stack of square layers ``h ← φ(W h)`` with ``W[i, j] ~ N(0, s/n)``, n the width: Xavier (Glorot)
is s = 1, He s = 2; s = 1/4 is too small and s = 4 too large. Of wide layers mean-field theory says
how the mean square q of a layer's sums and the gradient's square go on from layer to layer::

    q ← s · E φ(√q z)²        ‖g‖² ← χ(q) ‖g‖²,  χ(q) = s · E φ'(√q z)²        z ~ N(0, 1)

Gradient is measured by ``trace.norms()``: the norm at the output of each linear layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn

import gradtrace as gt
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

SCALES = {"small": 0.25, "Xavier": 1.0, "He": 2.0, "large": 4.0}
"""``n · Var W`` of each initialisation."""

SHAPES: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "ReLU": nn.ReLU}

FAR = 1000.0
"""What ``trace.norms()`` calls vanishing or exploding: a change by more from top to bottom."""

BATCH = 16


def cells(settings: Mapping[str, Any], seeds: int) -> list[Cell]:
    """One for each activation, initialisation and seed."""
    return [
        {"shape": shape, "start": start, "seed": seed}
        | {key: settings[key] for key in ("depth", "width")}
        for shape in SHAPES
        for start in SCALES
        for seed in range(seeds)
    ]


def measure(cell: Cell, tick: Tick) -> Result:
    """The gradient's norm at each layer, from the last to the first."""
    generator = torch.Generator().manual_seed(cell["seed"])
    width, depth = cell["width"], cell["depth"]
    net = nn.Sequential(
        *(
            nn.Sequential(
                nn.Linear(width, width, bias=False, dtype=torch.float64, device="meta"),
                SHAPES[cell["shape"]](),
            )
            for _ in range(depth)
        )
    ).to_empty(device="cpu")  # by way of meta, so that no random number of the caller's is drawn
    deviation = math.sqrt(SCALES[cell["start"]] / width)
    for weight in net.parameters():
        nn.init.normal_(weight, 0.0, deviation, generator=generator)
    x, v = torch.randn(2, BATCH, width, dtype=torch.float64, generator=generator)
    with gt.watch(net) as watch:
        loss = (net(x) * v).sum()
    found = watch.trace(loss).norms()
    norms = [found[f"{layer}.0"].norm for layer in reversed(range(depth))]
    word = found.notes[0].partition(":")[0]
    return {"norms": norms, "verdict": "neither" if " neither " in word else word.lower()}


@cache
def _normal() -> tuple[Any, Any]:
    """Points and weights of ``E f(z)``, z ~ N(0, 1)."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(201)
    return nodes, weights / weights.sum()


def gains(shape: str, scale: float, depth: int) -> list[float]:
    """``√χ`` of each layer by theory, first layer first."""
    nodes, weights = _normal()
    q, found = scale, []  # the input's mean square is 1, so that of the first sums is s
    for _ in range(depth):
        value, slope = _activation(shape, math.sqrt(q) * nodes)
        found.append(math.sqrt(scale * float(weights @ slope**2)))
        q = scale * float(weights @ value**2)
    return found


def predicted(shape: str, scale: float, depth: int) -> list[float]:
    """The gradient's norm at each layer by theory, last layer first, the last one's being 1."""
    # Between the sums of layer l and those of layer l + 1 lie φ' of layer l and the next weights.
    between = gains(shape, scale, depth)[:-1]
    return [float(x) for x in np.cumprod([1.0, *reversed(between)])]


def crossing(most: int = 1000) -> int:
    """From how many layers on Xavier changes the gradient of a tanh network less than He."""
    xavier, he = (
        np.abs(np.cumsum(np.log(gains("tanh", SCALES[start], most)))) for start in ("Xavier", "He")
    )
    return int(np.flatnonzero(xavier >= he).max()) + 3  # n layers have n - 1 gains between


def _activation(shape: str, z: Any) -> tuple[Any, Any]:
    if shape == "ReLU":
        return np.maximum(z, 0), np.where(z > 0, 1.0, np.where(z < 0, 0.0, math.sqrt(0.5)))
    value = np.tanh(z)
    return value, 1 - value**2


# What came out -----------------------------------------------------------------------------------


def conclude(rows: Sequence[Row]) -> Findings:
    """Which initialisation keeps the gradient up, and how near theory comes."""
    if not rows:
        return Findings("")
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.cell["shape"], row.cell["start"]), []).append(row)
    keys = [(shape, start) for shape in SHAPES for start in SCALES if (shape, start) in groups]
    facts = {f"{shape} {start}": _factors(groups[shape, start]) for shape, start in keys}
    depth, width = rows[0].cell["depth"], rows[0].cell["width"]
    table = Table(
        f"Initialisation: gradient over {depth} layers of {width}",
        ("activation", "start", "n·Var W", "last → first layer", "by theory", "a layer", "verdict"),
        tuple((*key, *_line(groups[key])) for key in keys),
        "geometric means over seeds; the verdict is that of trace.norms()",
    )
    return Findings(_sentence(groups, depth), (table,), tuple(_plots(groups)), {"factors": facts})


def _factors(rows: Sequence[Row]) -> dict[str, Any]:
    """How much of the gradient at the last layer comes to the first, of each seed and by theory."""
    cell = rows[0].cell
    return {
        "measured": [_scaled(row)[-1] for row in rows],
        "theory": predicted(cell["shape"], SCALES[cell["start"]], cell["depth"])[-1],
        "verdicts": sorted({row.result["verdict"] for row in rows}),
    }


def _scaled(row: Row) -> list[float]:
    """Norms as shares of the last layer's; a gradient of 0 is nowhere left."""
    norms = row.result["norms"]
    return [x / norms[0] if norms[0] else 0.0 for x in norms]


def _mean(values: Sequence[float]) -> float:
    return math.exp(average(map(math.log, values))) if all(values) else 0.0


def _far(factor: float) -> float:
    """How far a factor is from 1, in nats; 0 is as far as can be."""
    return abs(math.log(factor)) if factor else math.inf


def _line(rows: Sequence[Row]) -> tuple[str | float, ...]:
    found, cell = _factors(rows), rows[0].cell
    factor = _mean(found["measured"])
    return (
        SCALES[cell["start"]],
        _told(found["measured"]),
        found["theory"],
        factor ** (1 / (cell["depth"] - 1)),
        ", ".join(found["verdicts"]),
    )


def _sentence(groups: Mapping[tuple[str, str], Sequence[Row]], depth: int) -> str:
    said, off = [], []
    for shape in SHAPES:
        factors = {start: _factors(rows) for (s, start), rows in groups.items() if s == shape}
        means = {start: _mean(found["measured"]) for start, found in factors.items()}
        if not means:
            continue
        best = min(means, key=lambda start: _far(means[start]))
        words = ", ".join(
            f"{start} {_word(means[start])}{_kept(means[start], factors[start]['measured'])}"
            for start in SCALES
            if start in means
        )
        wanted = {"tanh": "Xavier", "ReLU": "He"}[shape]
        as_said = "as the rule says" if best == wanted else f"where the rule says {wanted}"
        least = f"{best} changes it least, {as_said}"
        if best != wanted and wanted in factors and _is_as_far(factors[best], factors[wanted]):
            least = f"{best} and {wanted}, which the rule says, change it equally little"
        if shape == "tanh" and best == "He":
            least += f" (by theory it is Xavier from {crossing()} layers on)"
        said.append(f"Initialisation of {depth} layers of {shape}: {words}; {least}.")
        for found in factors.values():
            off += [_far(m / found["theory"]) / (depth - 1) for m in found["measured"]]
    away = 100 * (math.exp(max(off)) - 1)
    theory = f"within {away:.1f}% of" if math.isfinite(away) else "nothing to do with"
    return f"{' '.join(said)} The factor of a layer is {theory} mean-field theory."


def _is_as_far(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    """Whether seeds do not tell which of two factors is farther from 1."""
    pairs = zip(ours["measured"], theirs["measured"])
    found = student([_far(a) - _far(b) for a, b in pairs])
    return found.low <= 0 <= found.high


def _told(measured: Sequence[float]) -> str:
    """The geometric mean, with its interval over seeds."""
    return with_interval(geometric(measured) if all(measured) else [0.0], ".1e")


def _kept(factor: float, measured: Sequence[float]) -> str:
    """What is left, where it neither vanishes nor explodes."""
    return f" ({_told(measured)})" if _word(factor) == "stays" else ""


def _word(factor: float) -> str:
    if factor < 1 / FAR:
        return "vanishes"
    return "explodes" if factor > FAR else "stays"


def _plots(groups: Mapping[tuple[str, str], Sequence[Row]]) -> list[Plot]:
    plots = []
    for shape in SHAPES:
        series = []
        for (s, start), rows in groups.items():
            if s != shape:
                continue
            depth = rows[0].cell["depth"]
            layers = list(range(depth, 0, -1))
            scaled = [_scaled(row) for row in rows]
            series += [
                Series(start, layers, [_mean(values) for values in zip(*scaled)]),
                Series(
                    f"{start}, theory",
                    layers,
                    predicted(shape, SCALES[start], depth),
                    style="dashed",
                    like=start,
                ),
            ]
        if series:
            title = f"Gradient along the depth of a {shape} network"
            plots.append(
                Plot(
                    f"starts-{shape.lower()}",
                    title,
                    "layer",
                    "gradient ÷ that at the last layer",
                    tuple(series),
                    log_y=True,
                )
            )
    return plots
