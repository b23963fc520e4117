"""Losses for classification: cross entropy and Kullback-Leibler divergence.

For a target distribution t and ``p = softmax(z)``::

    CE(t, p) = -Σ t log p = H(t) + KL(t ‖ p)        ∂CE/∂z = ∂KL/∂z = p - t

so both have one gradient and one minimum. A model of biases alone is best at the frequencies of the
classes, where the loss is their entropy: a closed form. With features, at the minimum
``Σ x (p - t) = 0``. A sample that is wrong for sure keeps its gradient under cross entropy
(``p - t → ±1``), and loses it under the square error of a sigmoid (``2(p - t) p (1 - p) → 0``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import islice
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
from gradtrace.experiments.harness.statistics import student, with_interval
from gradtrace.experiments.lecture.descent import Point, descend, gradient, marks
from gradtrace.experiments.lecture.optimisers import Momentum

CLASSES, FEATURES = 3, 2
SATURATED = -10.0
"""The score of a sample that is wrong for sure."""


def cells(settings: Mapping[str, Any], seeds: int) -> list[Cell]:
    """One for each seed."""
    return [
        {"samples": settings["samples"], "updates": settings["updates"], "seed": seed}
        for seed in range(seeds)
    ]


def entropy(t: Tensor, z: Tensor) -> Tensor:
    """``-Σ t log softmax(z)``, mean over samples, from elementary operations."""
    scores = z - z.exp().sum(-1, keepdim=True).log()
    return -(t * scores).sum(-1).mean()


def divergence(t: Tensor, z: Tensor) -> Tensor:
    """``Σ t log (t / softmax(z))``, mean over samples; ``0 · log 0`` is 0."""
    p = z.exp() / z.exp().sum(-1, keepdim=True)
    return torch.sub(torch.special.xlogy(t, t), t * p.log()).sum(-1).mean()


def measure(cell: Cell, tick: Tick) -> Result:
    """Identities at random scores, then two fits."""
    generator = torch.Generator().manual_seed(cell["seed"])
    number = cell["samples"]
    z = torch.randn(number, CLASSES, dtype=torch.float64, generator=generator)
    t = torch.rand(number, CLASSES, dtype=torch.float64, generator=generator)
    t = t / t.sum(-1, keepdim=True)
    return _identities(t, z) | _fit(number, cell["updates"], generator) | _saturated()


def _identities(t: Tensor, z: Tensor) -> Result:
    cross, slope = gradient(lambda w: entropy(t, w["z"]), {"z": z})
    kl, other = gradient(lambda w: divergence(t, w["z"]), {"z": z})
    own = float(-torch.special.xlogy(t, t).sum(-1).mean())
    wanted = (z.softmax(-1) - t) / len(z)
    return {
        "sum": abs(cross - own - kl),
        "p_minus_t": float((slope["z"] - wanted).abs().max()),
        "same": float((slope["z"] - other["z"]).abs().max()),
    }


def _fit(number: int, updates: int, generator: torch.Generator) -> Result:
    """Biases alone against frequencies; then with features, three clouds that overlap."""
    labels = torch.randint(CLASSES + 2, (number,), generator=generator).clamp(max=CLASSES - 1)
    angle = 2 * math.pi * labels / CLASSES
    noise = torch.randn(number, FEATURES, dtype=torch.float64, generator=generator)
    x = torch.stack([angle.cos(), angle.sin()], -1).double() + noise
    t = torch.eye(CLASSES, dtype=torch.float64)[labels]
    share = t.mean(0)

    def plain(w: Point, _: int = 0) -> Tensor:
        return entropy(t, w["b"].expand(number, CLASSES))

    def full(w: Point, _: int = 0) -> Tensor:
        return entropy(t, x @ w["w"] + w["b"])

    b = torch.zeros(CLASSES, dtype=torch.float64)
    w = torch.zeros(FEATURES, CLASSES, dtype=torch.float64)
    *_, biases = islice(descend(plain, {"b": b}, Momentum(0.5)), updates + 1)
    curve = list(islice(descend(full, {"w": w, "b": b}, Momentum(0.2)), updates + 1))
    scores = x @ curve[-1]["w"] + curve[-1]["b"]
    return {
        "frequencies": float((biases["b"].softmax(-1) - share).abs().max()),
        "entropy": float(-(share * share.log()).sum()),
        "loss": float(plain(biases)),
        "moments": float((x.T @ (scores.softmax(-1) - t)).abs().max() / number),
        "accuracy": float((scores.argmax(-1) == labels).double().mean()),
        "with_features": float(full(curve[-1])),
        "steps": marks(updates),
        "curve": [float(full(curve[i])) for i in marks(updates)],
    }


def _saturated() -> Result:
    """The slope at a score of -10 where the target is 1."""
    at = {"z": torch.tensor(SATURATED, dtype=torch.float64)}
    _, cross = gradient(lambda w: -w["z"].sigmoid().log(), at)
    _, square = gradient(lambda w: (w["z"].sigmoid() - 1).square(), at)
    return {"wrong_cross": float(cross["z"]), "wrong_square": float(square["z"])}


def conclude(rows: Sequence[Row]) -> Findings:
    """Whether the identities hold, and where the fits end."""
    if not rows:
        return Findings("")

    def most(key: str) -> float:
        return max(float(row.result[key]) for row in rows)

    facts = {key: most(key) for key in ("sum", "p_minus_t", "same", "frequencies", "moments")}
    facts["off_entropy"] = max(abs(r.result["loss"] - r.result["entropy"]) for r in rows)
    gains = student([r.result["entropy"] - r.result["with_features"] for r in rows])
    facts["gains"] = gains.value
    facts["wrong_cross"], facts["wrong_square"] = most("wrong_cross"), most("wrong_square")
    sentence = (
        f"Cross entropy is entropy and KL added up, to {facts['sum']:.0e}, and both have the "
        f"gradient p - t; a model of biases ends at the entropy of the classes, to "
        f"{facts['off_entropy']:.0e}, and features save {with_interval(gains)} nats. A sample that "
        f"is wrong for sure (score {SATURATED:g}) has the slope "
        f"{facts['wrong_cross']:.3g} under cross entropy, {facts['wrong_square']:.1e} under the "
        "square error."
    )
    table = Table(
        "Cross entropy",
        ("seed", "entropy", "biases alone", "with features", "accuracy", "max |Σx(p - t)|/n"),
        tuple(
            (
                row.cell["seed"],
                *(row.result[k] for k in ("entropy", "loss", "with_features", "accuracy")),
                row.result["moments"],
            )
            for row in rows
        ),
    )
    first = rows[0].result
    plot = Plot(
        "entropy",
        "Three overlapping classes, softmax regression",
        "updates",
        "cross entropy",
        (
            Series("with features", first["steps"], first["curve"]),
            Series(
                "entropy of the classes",
                first["steps"],
                [first["entropy"]] * len(first["steps"]),
                style="dashed",
            ),
        ),
        log_x=True,
    )
    return Findings(sentence, (table,), (plot,), facts)
