"""Every measure of small models, as numbers: to compare devices, and kernels with plain torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from math import isnan
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradtrace as gt
from gradtrace.trace import Trace

POWERS = (1, 8, 20)


class Model(nn.Module):
    """Branches side by side, attention with labelled heads, a cell called many times, a residual
    branch, a tied weight, a convolution, and a table of which few rows occur.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.linear = nn.Embedding(40, 4), nn.LSTM(4, 4), nn.Linear(4, 4)
        self.qkv, self.norm = nn.Linear(4, 12), nn.LayerNorm(4)
        self.conv, self.cell = nn.Conv1d(4, 4, 3, padding=1), nn.RNNCell(4, 4)
        self.mlp = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)  # (time, batch, width)
        x = (
            self.lstm(x)[0]
            + torch.tanh(self.linear(x))
            + self.conv(x.permute(1, 2, 0)).permute(2, 0, 1)
        )
        state = torch.zeros_like(x[0])
        for now in x:
            state = self.cell(now, state) * 0.5 + state
        x = x + self.attended(self.norm(x)) + state
        x = x + self.mlp(self.norm(x))
        return x @ self.embed.weight.T

    def attended(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).unflatten(-1, (2, 3, 2)).permute(3, 1, 2, 0, 4)  # part, batch, head
        heads = F.scaled_dot_product_attention(*parts)
        return gt.label(heads, 1, ["head 0", "head 1"]).permute(2, 0, 1, 3).flatten(2)


COMPONENTS = {
    **{name: name for name in ("lstm", "linear", "conv", "cell", "mlp", "mlp.0", "norm", "qkv")},
    "branches": ["lstm", "linear", "conv"],
    "head 0": "label:head 0",
    "head 1": "label:head 1",
    "tanh": "operator:TanhBackward0",
    "sums": "argument:*",
}


def trace(device: str, dtype: torch.dtype, pairs: bool, rule: str = "greedy") -> Trace:
    torch.manual_seed(0)
    words = torch.randint(0, 9, (4, 3))
    model = Model().to(dtype)
    model, words = model.to(device), words.to(device)
    with gt.watch(model) as watch:
        logits = model(words)[:-1].permute(1, 2, 0)
        losses = F.cross_entropy(logits, words[1:].T, reduction="none").mean(1)
    return watch.trace(losses if pairs else losses.sum(), rule=rule)


def measures(device: str, dtype: torch.dtype, pairs: bool) -> dict[str, Any]:
    """All numbers by name: sums of floats in ``"floats"``, what is counted in ``"counts"``."""
    traced = trace(device, dtype, pairs)
    floats = {**decomposed(traced), **masses(traced)}
    counts: dict[str, Any] = {}
    for rule in ("greedy", "edge", "viterbi"):
        ruled = dataclasses.replace(traced, rule=rule)
        counts[rule] = [
            (row.name, row.through, row.eligible, row.unreached)
            for table in (
                ruled.influence(COMPONENTS),
                ruled.influence(COMPONENTS, of="embed.weight"),
                ruled.influence(COMPONENTS, of="embed.weight", index=(3, 2)),
            )
            for row in table
        ]
        floats[f"coverage {rule}"] = list(ruled.coverage().parts)
    if not pairs:
        found = traced.choices(("paths", "gradient", "mass"), every=True)
        counts["choices"] = [(row.fork, row.branch, int(row.count.t)) for row in found]
        floats["choices"] = [share for row in found for share in row.others.values()]
        counts["agreement"] = list(traced.agreement(COMPONENTS).same_path.values())
    return {"floats": floats, "counts": counts}


def decomposed(traced: Trace) -> dict[str, Any]:
    found = traced.decompose(COMPONENTS)
    return {
        "shares": list(found.shares.values()),
        "contested": list(found.contested.values()),
        "norms": list(found.norms.values()),
        "cosines": [products.cosine for products in found.products.values()],
        "through": [found.gradient(name, "embed.weight").cpu() for name in COMPONENTS],
    }


def masses(traced: Trace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for p in POWERS:
        table = traced.mass(COMPONENTS, p=p)
        found[f"mass {p}"] = [table.total, *((row.mass, row.eligible) for row in table)]
        found[f"mass shares {p}"] = list(table.shares.values())
        for by in ("length", "branches") if p == 1 else ():
            spectrum = traced.spectrum(by, p=p)
            found[f"{by} {p}"] = [(row.grade, row.mass, row.gradient) for row in spectrum]
    part = traced.spectrum("branches", of="linear.weight")
    found["parts"] = [gradient.cpu() for gradient in part.gradients.values()]
    return found


def flattened(numbers: Any) -> Iterator[float]:
    if isinstance(numbers, Tensor):
        yield from numbers.double().reshape(-1).tolist()
    elif isinstance(numbers, (list, tuple)):
        for each in numbers:
            yield from flattened(each)
    else:
        yield float(numbers)


def agree(found: dict[str, Any], wanted: dict[str, Any], dtype: torch.dtype) -> None:
    """Equal to rounding, and in float64 equal counts."""
    rel = 1e-9 if dtype is torch.float64 else 2e-3
    for name, numbers in wanted["floats"].items():
        mine, theirs = list(flattened(found["floats"][name])), list(flattened(numbers))
        if name.startswith("coverage") and dtype is not torch.float64:
            continue  # of other paths, where two are nearly equal
        least = rel * max((abs(x) for x in theirs if not isnan(x)), default=0.0)
        assert mine == pytest.approx(theirs, rel=rel, abs=least, nan_ok=True), name
    if dtype is torch.float64:
        assert found["counts"] == wanted["counts"]
