"""Every measure of small models, as numbers: to compare devices, and kernels with plain torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from math import isnan
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import gradtrace as gt
from gradtrace.traced import Trace
from gradtrace.tracing.coverage import parts_of
from gradtrace.tracing.followed import drawn_sample, follow_paths

POWERS = (1, 8, 20)


class Unrolled(nn.Module):
    """An RNN, step by step: ``nn.RNN`` has other operators on a GPU than on the CPU, which
    multiplies the inputs of all steps at once.
    """

    def __init__(self, inputs: int, units: int) -> None:
        super().__init__()
        self.step = nn.RNNCell(inputs, units)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        state, states = torch.zeros_like(x[0]), list[Tensor]()
        for now in x:
            state = self.step(now, state)
            states.append(state)
        return torch.stack(states), state


class Model(nn.Module):
    """Branches side by side, attention with labelled heads, a cell called many times, a residual
    branch, a tied weight, a convolution, and a table of which few rows occur.
    """

    def __init__(self, recurrent: type[nn.Module] = Unrolled) -> None:
        super().__init__()
        self.embed, self.linear = nn.Embedding(40, 4), nn.Linear(4, 4)
        self.recurrent = recurrent(4, 4)
        self.qkv, self.norm = nn.Linear(4, 12, bias=False), nn.LayerNorm(4)  # a key's bias gets 0
        self.conv, self.cell = nn.Conv1d(4, 4, 3, padding=1), nn.RNNCell(4, 4)
        self.mlp = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)  # (time, batch, width)
        x = (
            self.recurrent(x)[0]
            + torch.tanh(self.linear(x))
            + self.conv(x.permute(1, 2, 0)).permute(2, 0, 1)
        )
        state = torch.zeros_like(x[0])
        for now in x:
            state = self.cell(now, state) * 0.5 + state
        x = x + self.attended(self.norm(x)) + state
        x = x + self.mlp(self.norm(x))
        return x @ self.embed.weight.to(x.device).T

    def attended(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).unflatten(-1, (2, 3, 2)).permute(3, 1, 2, 0, 4)  # part, batch, head
        heads = F.scaled_dot_product_attention(*parts)
        return gt.label(heads, 1, ["head 0", "head 1"]).permute(2, 0, 1, 3).flatten(2)


MODULES = {
    **{name: name for name in ("recurrent", "linear", "conv", "cell", "mlp", "mlp.0", "norm")},
    "qkv": "qkv",
    "branches": ["recurrent", "linear", "conv"],
    "head 0": "label:head 0",
    "head 1": "label:head 1",
}
COMPONENTS = {**MODULES, "tanh": "operator:TanhBackward0", "sums": "operator:AddBackward0"}


def trace(
    device: str,
    dtype: torch.dtype,
    pairs: bool,
    places: Mapping[str, str] | None = None,
    recurrent: type[nn.Module] = Unrolled,
) -> Trace:
    """The model on a device, but modules in ``places`` on others, and its "loss"."""
    torch.manual_seed(0)
    words = torch.randint(0, 9, (4, 3))
    model = Model(recurrent).to(dtype)
    model, words = model.to(device), words.to(device)
    places = dict(places or {})
    lossy = places.pop("loss", device)
    for name, place in places.items():
        _put(model.get_submodule(name), place, device)
    with gt.watch(model) as watch:
        logits = model(words)[:-1].permute(1, 2, 0).to(lossy)
        losses = F.cross_entropy(logits, words[1:].T.to(lossy), reduction="none").mean(1)
    return watch.trace(losses if pairs else losses.sum())


def _put(module: nn.Module, place: str, device: str) -> None:
    """Put a module on another device than those around it, as ``device_map`` does."""

    def moved(x: Any, place: str) -> Any:
        return tree_map(lambda y: y.to(place) if isinstance(y, Tensor) else y, x)

    module.to(place)
    module.register_forward_pre_hook(lambda _, args: moved(args, place))
    module.register_forward_hook(lambda _, args, out: moved(out, device))


def measures(
    device: str, dtype: torch.dtype, pairs: bool, places: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """All numbers by name: sums of floats in ``"floats"``, what is counted in ``"counts"``."""
    return measures_of(trace(device, dtype, pairs, places=places), pairs)


def parts(traced: Trace) -> list[float]:
    """The part of its gradient that the path of each element carries, in ascending order."""
    drawn = drawn_sample(traced, 10**9, 0)
    found = parts_of(traced, (follow_paths(traced, some, pair) for pair, some in drawn)).part
    return sorted(found[np.isfinite(found)].tolist())


def measures_of(traced: Trace, pairs: bool) -> dict[str, Any]:
    floats = {**decomposed(traced, COMPONENTS), **masses(traced)}
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
        floats[f"coverage {rule}"] = parts(ruled)
    if not pairs:
        found = traced.influence("forks")
        counts["forks"] = [(row.name, row.through, row.eligible) for row in found]
    return {"floats": floats, "counts": counts}


def of_modules(device: str, dtype: torch.dtype, recurrent: type[nn.Module]) -> dict[str, Any]:
    """What does not depend on whether the cell of a recurrent layer is one operator, as on a GPU,
    or many: the gradient through modules; and of an LSTM, which has the same routes in both, their
    masses and the heaviest of them. Not those of greedy, which chooses among operators by their
    sums: on a GPU each step is one, on the CPU the inputs of all steps are multiplied at once.
    """
    traced, counts = trace(device, dtype, False, recurrent=recurrent), {}
    floats = decomposed(traced, MODULES)
    if recurrent is nn.LSTM:
        for p in POWERS:
            floats[f"mass shares {p}"] = traced.mass(MODULES, p=p).shares
        table = dataclasses.replace(traced, rule="viterbi").influence(MODULES)
        counts["viterbi"] = [(row.name, row.through, row.eligible) for row in table]
    return {"floats": floats, "counts": counts}


def decomposed(traced: Trace, components: dict[str, Any]) -> dict[str, Any]:
    found = traced.decompose(components)
    return {
        "shares": found.shares,
        "contested": dict(zip(found.names, found.column("contested"))),
        "norms": dict(zip(found.names, found.column("norm"))),
        "cosines": {name: products.cosine for name, products in found.products.items()},
        "through": {name: found.gradient(name, "embed.weight").cpu() for name in components},
    }


def masses(traced: Trace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for p in POWERS:
        table = traced.mass(COMPONENTS, p=p)
        found[f"mass {p}"] = {row.name: (row.mass, row.eligible) for row in table}
        found[f"total mass {p}"] = table.about["mass"]
        found[f"mass shares {p}"] = table.shares
    return found


def flattened(numbers: Any, name: str) -> Iterator[tuple[str, float]]:
    """All numbers, each with where it is from."""
    if isinstance(numbers, Tensor):
        numbers = numbers.double().reshape(-1).tolist()
    if isinstance(numbers, (list, tuple)):
        numbers = dict(enumerate(numbers))
    if isinstance(numbers, dict):
        for key, each in numbers.items():
            yield from flattened(each, f"{name}, {key}")
    else:
        yield name, float(numbers)


def agree(found: dict[str, Any], wanted: dict[str, Any], dtype: torch.dtype) -> None:
    """Equal to rounding, and in float64 equal counts; the error names what is not."""
    rel = 1e-9 if dtype is torch.float64 else 2e-3
    for name, numbers in wanted["floats"].items():
        if name.startswith("coverage") and dtype is not torch.float64:
            continue  # of other paths, where two are nearly equal
        mine, theirs = (dict(flattened(x, name)) for x in (found["floats"][name], numbers))
        assert mine.keys() == theirs.keys()
        least = rel * max((abs(x) for x in theirs.values() if not isnan(x)), default=0.0)
        if "shares" in name:
            least = max(least, rel * 1e-3)  # of 1: a share is 1 less what goes around
        for which, number in theirs.items():
            same = pytest.approx(number, rel=rel, abs=least, nan_ok=True)
            assert mine[which] == same, f"{which}: {mine[which]}, not {number}"
    if dtype is torch.float64:
        assert found["counts"] == wanted["counts"]
