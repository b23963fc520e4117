"""``gt.check`` on a right formula, on a wrong one, and at kinks of ReLU and of ``|x|``.

"Need to check the correctness, using the numerical method" say the slides of the analytic method.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import gradtrace as gt
from gradtrace.experiments.harness.findings import Cell, Findings, Result, Row, Tick
from gradtrace.experiments.harness.statistics import out_of


class Weights(nn.Module):
    """A vector as a model."""

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.w = nn.Parameter(values.clone())


class Forgetful(torch.autograd.Function):
    """``tanh`` whose backward formula has lost a square: ``1 - y`` for ``1 - y²``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """``y = tanh(x)``."""
        y = torch.tanh(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        """Wrong on purpose."""
        (y,) = ctx.saved_tensors
        return g.mul(1 - y)


FORMULAS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "right": lambda w, at: torch.tanh(w),
    "wrong": lambda w, at: Forgetful.apply(w),  # type: ignore[no-untyped-call]
    "kink": lambda w, at: (w - at).relu(),  # where it is looked at, it has no derivative
    "even kink": lambda w, at: (w - at).abs(),  # both sides cancel in a central difference
}
WANTED = {"right": "ok", "wrong": "wrong", "kink": "kink", "even kink": "kink"}


def cells(settings: Mapping[str, Any], seeds: int) -> list[Cell]:
    """One for each formula and seed."""
    return [{"formula": name, "seed": seed} for name in FORMULAS for seed in range(seeds)]


def measure(cell: Cell, tick: Tick) -> Result:
    """What ``gt.check`` says of a formula."""
    generator = torch.Generator().manual_seed(cell["seed"])
    at, x = torch.randn(2, 6, dtype=torch.float64, generator=generator)
    formula = FORMULAS[cell["formula"]]
    found = gt.check(lambda model: (formula(model.w, at) * x).sum(), Weights(at))
    return {"ok": found.ok, "verdict": found.rows[0].verdict, "error": found.rows[0].error}


def conclude(rows: Sequence[Row]) -> Findings:
    """What was found, by formula."""
    verdicts: dict[str, list[str]] = {}
    for row in rows:
        verdicts.setdefault(row.cell["formula"], []).append(row.result["verdict"])
    said = [
        f"{out_of(found.count(WANTED[name]), len(found))} {name}"
        for name, found in sorted(verdicts.items())
    ]
    text = f"Of formulas, gt.check names as such {', '.join(said)}."
    missed = verdicts.get("even kink", []).count("ok")
    if missed:
        text += (
            f" It passes |x| at 0 in {out_of(missed, len(verdicts['even kink']))}: there the "
            "central difference is 0, as is torch's gradient, so that kink is not seen."
        )
    return Findings(text, facts=verdicts)
