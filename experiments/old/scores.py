"""Scores of components: their influence by both rules, and baselines that need no tracing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isnan
from random import Random
from typing import TypeAlias

import torch
from torch import Tensor, nn

import gradtrace as gt
from gradtrace.experiments.rivals import BASELINES, RULES

Scores: TypeAlias = dict[str, dict[str, float]]
"""``{measure: {component: score}}``."""

Losses: TypeAlias = Callable[[], Tensor]
"""Runs the model, and gives a loss for each sample."""


def scores(model: nn.Module, parts: Mapping[str, str], losses: Losses, seed: int) -> Scores:
    """What every measure says of components, on a few samples.

    ``parts`` maps the names of components to those of modules; ``seed`` is for the random score.
    """
    found = influences(model, parts, losses)
    weights = {name: tuple(model.get_submodule(part).parameters()) for name, part in parts.items()}
    loss = losses().mean()
    norm, product, size, chance = (found.setdefault(kind, {}) for kind in BASELINES)
    source = Random(seed)
    for name, own in weights.items():
        gradients = torch.autograd.grad(loss, own, retain_graph=True, materialize_grads=True)
        norm[name] = _norm(gradients)
        product[name] = sum(float((w.detach() * g).abs().sum()) for w, g in zip(own, gradients))
        size[name] = float(sum(w.numel() for w in own))
        chance[name] = source.random()
    return found


def influences(model: nn.Module, parts: Mapping[str, str], losses: Losses) -> Scores:
    """The share of paths through each component, by both rules, by count and by gradient."""
    with gt.watch(model) as watch:
        loss = losses()
    tables = {rule: watch.trace(loss, rule=rule).influence(dict(parts)) for rule in RULES}
    plain = {RULES[rule]: _shares(table.shares) for rule, table in tables.items()}
    weighted = {
        f"{RULES[rule]}, weighted": _shares(table.by("gradient").shares)
        for rule, table in tables.items()
    }
    return plain | weighted


def _shares(shares: Mapping[str, float]) -> dict[str, float]:
    """Where there is no path at all, none runs through a component."""
    return {name: 0.0 if isnan(share) else share for name, share in shares.items()}


def _norm(gradients: Sequence[Tensor]) -> float:
    return float(torch.stack([g.square().sum() for g in gradients]).sum().sqrt())
