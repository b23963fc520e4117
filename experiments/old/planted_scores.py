"""What every measure says of the components of a network, at equal cost.

``MEASURES`` are of gradtrace, ``BASELINES`` need no tracing. All get the same number of passes: a
measure that costs ``c`` backward passes is taken on ``passes / c`` samples. Means of activations,
that some baselines compare with, are of forward passes, which are not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from math import isnan, sqrt
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

import gradtrace as gt
from gradtrace.experiments.planted_networks import Planted, joined

Scores: TypeAlias = dict[str, float]
"""Of components, or of pairs of them (``"one.2 > two.0"``)."""

Batch: TypeAlias = tuple[Tensor, Tensor]

POWERS = (1.0, 2.0, 8.0)
STEPS = 8
"""Of integrated gradients."""

TRACE_COST = 4
"""Backward passes of an exact trace of a small network, or of mass (docs/benchmarks.md)."""

MEASURES = (
    "greedy",
    "greedy, weighted",
    "edge",
    "edge, weighted",
    "viterbi",
    "viterbi, weighted",
    "decomposition",
    "decomposition, size",
    *(f"mass, p = {p:g}" for p in POWERS),
)
"""Influence by three rules (the share of paths, and weighted by gradient), the gradient through a
component (signed share; its size over that of the whole), and mass.
"""

BASELINES = (
    "Taylor, signed",
    "Taylor, absolute",
    "integrated gradients",
    "|gradient × activation|",
    "activation deviation",
    "gradient norm",
    "parameter norm",
)
"""``Taylor``: gradient × (activation - its mean), the estimate of mean ablation's effect."""

EDGE_BASELINES = ("EAP", "EAP-IG")
"""Edge attribution patching: |gradient at what a component reads × (what another adds - its mean)|,
the mean over samples taken before the absolute value, as its authors do for a loss. The result of a
circuit is no loss: there the absolute value is taken first, as in the other baselines, or samples
on either side of the mean would cancel. EAP-IG: with the average of the gradients on the way from
the mean of what the stem gives to itself.
"""


def scores(model: Planted, draw: Callable[[int], Batch], passes: int) -> dict[str, Scores]:
    """``{measure: {component: score}}`` for all components, and for all ordered pairs."""
    mean = _means(model, draw(256))
    found = _traced(model, draw, passes)
    for name, score in (_baselines(model, draw, passes, mean)).items():
        found[name] = score
    if model.edges:
        for name, score in _edges(model, draw, passes, mean).items():
            found[name] = score
    return found


def components(model: Planted) -> list[str]:
    """All that are compared, in the order of the model."""
    return list(chain.from_iterable(model.groups))


# Measures of gradtrace ----------------------------------------------------------------------------


def _traced(model: Planted, draw: Callable[[int], Batch], passes: int) -> dict[str, Scores]:
    """Paths to what comes before all components; other parameters need no gradient meanwhile."""
    chosen, cost = _components_and_pairs(model), TRACE_COST
    found: dict[str, Scores] = {}
    with _only(model, model.leaves):
        for rule in ("greedy", "edge", "viterbi"):
            table = _trace(model, draw(passes // cost), rule).influence(chosen)
            found[rule] = _with_pairs(model, table.shares)
            found[f"{rule}, weighted"] = _with_pairs(model, table.by("gradient").shares)
        for p in POWERS:
            shares = _trace(model, draw(passes // cost)).mass(chosen, p=p).shares
            found[f"mass, p = {p:g}"] = _with_pairs(model, shares)
        # a pass for each component, and one for all
        trace = _trace(model, draw(max(1, passes // (len(chosen) + 1))))
        found |= _decomposed(model, trace, chosen)
    return found


def _decomposed(model: Planted, trace: Any, chosen: Mapping[str, list[str]]) -> dict[str, Scores]:
    """The share of the gradient through each, ⟨g_C, g⟩/⟨g, g⟩, and ‖g_C‖/‖g‖."""
    split = trace.decompose(chosen)
    whole = trace.gradients
    total = float(sum(g.square().sum() for g in whole.values())) or 1.0
    parts = {name: split.gradients(name) for name in chosen}
    for first, then in model.pairs:
        a, b, either = parts[first], parts[then], parts[joined(first, then)]
        parts[joined(first, then)] = {leaf: a[leaf] + b[leaf] - either[leaf] for leaf in either}
    share = {
        name: float(sum((part * whole[leaf]).sum() for leaf, part in each.items())) / total
        for name, each in parts.items()
    }
    if not model.trains:  # a score, not a loss: what matters moves it in either direction
        share = {name: abs(part) for name, part in share.items()}
    size = {
        name: (float(sum(part.square().sum() for part in each.values())) / total) ** 0.5
        for name, each in parts.items()
    }
    return {"decomposition": share, "decomposition, size": size}


def _components_and_pairs(model: Planted) -> dict[str, list[str]]:
    """Every component alone, and both of a pair as a group: what passes either."""
    chosen = {name: [name] for name in components(model)}
    return chosen | {joined(a, b): [a, b] for a, b in model.pairs}


def _with_pairs(model: Planted, shares: Mapping[str, float]) -> Scores:
    """Shares; of a pair, that of the paths through both: P(a) + P(b) - P(a or b).

    Each layer's components lie after those of the layer before, so both means first a, then b.
    """
    found = {name: 0.0 if isnan(share) else share for name, share in shares.items()}
    for a, b in model.pairs:
        found[joined(a, b)] = found[a] + found[b] - found[joined(a, b)]
    return found


def _trace(model: Planted, batch: Batch, rule: str = "greedy") -> Any:
    with gt.watch(model) as watch:
        losses = model.losses(*batch)
    return watch.trace(losses, rule=rule)


@contextmanager
def _only(model: nn.Module, leaves: str) -> Iterator[None]:
    """Only the parameters of one module require gradients."""
    kept = {parameter: parameter.requires_grad for parameter in model.parameters()}
    for parameter in kept:
        parameter.requires_grad_(False)
    model.get_submodule(leaves).requires_grad_()
    try:
        yield
    finally:
        for parameter, required in kept.items():
            parameter.requires_grad_(required)


# Baselines ----------------------------------------------------------------------------------------


@contextmanager
def _outputs(
    model: nn.Module,
    names: Sequence[str],
    change: Callable[[str, Tensor], Tensor] = lambda _, x: x,
) -> Iterator[dict[str, Tensor]]:
    """The outputs of modules in the forward passes inside, and what they are replaced by."""
    found: dict[str, Tensor] = {}

    def hook(name: str) -> Callable[..., Tensor]:
        def keep(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
            found[name] = change(name, output)
            return found[name]

        return keep

    handles = [model.get_submodule(name).register_forward_hook(hook(name)) for name in names]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def _means(model: Planted, batch: Batch) -> dict[str, Tensor]:
    """The mean output of each component."""
    with _outputs(model, components(model)) as found:
        model.losses(*batch)
    return {name: x.mean(0) for name, x in found.items()}


def _baselines(
    model: Planted, draw: Callable[[int], Batch], passes: int, mean: Mapping[str, Tensor]
) -> dict[str, Scores]:
    names, batch = components(model), draw(passes)
    with _outputs(model, names) as outputs:
        losses = model.losses(*batch)
    gradients = torch.autograd.grad(
        losses.sum(), list(outputs.values()), retain_graph=True, materialize_grads=True
    )
    found: dict[str, Scores] = {name: {} for name in BASELINES}
    for (name, output), g in zip(outputs.items(), gradients):
        x = output.detach()
        effect = _by_sample(g * (x - mean[name]))
        # where the loss would rise if the mean took its place, the component matters
        found["Taylor, signed"][name] = -float(effect.mean())
        found["Taylor, absolute"][name] = float(effect.abs().mean())
        found["|gradient × activation|"][name] = float(_by_sample((g * x).abs()).mean())
        found["activation deviation"][name] = float((x - mean[name]).square().mean().sqrt())
    found["integrated gradients"] = _integrated(model, draw(max(1, passes // STEPS)), mean)
    found |= _of_parameters(model, losses.mean())
    if not model.trains:
        found["Taylor, signed"] = found["Taylor, absolute"]
    return found


def _of_parameters(model: Planted, loss: Tensor) -> dict[str, Scores]:
    """Norms of a component's parameters and of their gradients; 0 where it has none."""
    norms: dict[str, Scores] = {"gradient norm": {}, "parameter norm": {}}
    for name in components(model):
        own = list(model.get_submodule(name).parameters())
        free = [parameter for parameter in own if parameter.requires_grad]
        gradients = (
            torch.autograd.grad(loss, free, retain_graph=True, materialize_grads=True)
            if free
            else ()
        )
        norms["gradient norm"][name] = _norm(gradients)
        norms["parameter norm"][name] = _norm(own)
    return norms


def _integrated(model: Planted, batch: Batch, mean: Mapping[str, Tensor]) -> Scores:
    """Gradients along the line from the means of a group's components to their outputs, all of
    the group at once: Σ (x - mean) · average gradient.
    """
    found: Scores = {}
    for group in model.groups:
        names = list(group)
        with torch.no_grad(), _outputs(model, names) as kept:
            model.losses(*batch)
        clean = {name: x.clone() for name, x in kept.items()}
        total = {name: torch.zeros_like(x) for name, x in clean.items()}
        for step in range(STEPS):
            part = (step + 0.5) / STEPS

            def between(
                name: str,
                _: Tensor,
                clean: dict[str, Tensor] = clean,
                part: float = part,
            ) -> Tensor:
                start = mean[name]
                return (start + part * (clean[name] - start)).requires_grad_()

            with _outputs(model, names, between) as outputs:
                loss = model.losses(*batch).sum()
            gradients = torch.autograd.grad(loss, list(outputs.values()), materialize_grads=True)
            for name, g in zip(outputs, gradients):
                total[name] += g / STEPS
        for name in names:
            effect = _by_sample(total[name] * (clean[name] - mean[name]))
            found[name] = -float(effect.mean()) if model.trains else float(effect.abs().mean())
    return found


def _edges(
    model: Planted, draw: Callable[[int], Batch], passes: int, mean: Mapping[str, Tensor]
) -> dict[str, Scores]:
    """EAP: (a - mean of a) · ∂loss/∂(what b reads), where b reads a sum to which a is added."""
    found = {"EAP": _edge_scores(model, draw(passes), mean, (1.0,))}
    parts = [(step + 0.5) / STEPS for step in range(STEPS)]
    found["EAP-IG"] = _edge_scores(model, draw(max(1, passes // STEPS)), mean, parts)
    return found


def _edge_scores(
    model: Planted, batch: Batch, mean: Mapping[str, Tensor], parts: Sequence[float]
) -> Scores:
    """``parts``: how far inputs are from their mean (0) to themselves (1) where gradients are
    taken; their average counts.
    """
    firsts, entries = (list(dict.fromkeys(names)) for names in zip(*model.edges.values()))
    with torch.no_grad(), _outputs(model, firsts) as outputs:
        model.losses(*batch)
    gradient: dict[str, Tensor] = {}
    for part in parts:
        with (
            _outputs(model, [model.leaves], _towards(part, model.rank)),
            _outputs(model, entries) as read,
        ):
            loss = model.losses(*batch).sum()
        for name, g in zip(read, torch.autograd.grad(loss, list(read.values()))):
            gradient[name] = gradient.get(name, 0.0) + g / len(parts)
    found = {}
    for name, (first, entry) in model.edges.items():
        effect = _by_sample(gradient[entry] * (outputs[first] - mean[first]))
        found[name] = abs(float(effect.mean())) if model.trains else float(effect.abs().mean())
    return found


def _towards(part: float, rank: int) -> Callable[[str, Tensor], Tensor]:
    """Between the mean of a batch and its samples; what has fewer dimensions (the positions of
    words) has no batch and stays.
    """

    def change(_: str, x: Tensor) -> Tensor:
        return x if x.ndim < rank else x.mean(0) + part * (x - x.mean(0))

    return change


def _by_sample(x: Tensor) -> Tensor:
    return x.flatten(1).sum(1) if x.ndim > 1 else x


def _norm(tensors: Sequence[Tensor]) -> float:
    return sqrt(sum(float(x.detach().square().sum()) for x in tensors))


# All on the same samples --------------------------------------------------------------------------


def sampled_scores(model: Planted, batch: Batch, others: Batch) -> dict[str, Scores]:
    """Every measure and every baseline, on one batch.

    Integrated gradients see an eighth of it, so that they cost as many passes as the others; mass
    sees a quarter, and still takes longer than all of these.

    Args:
        model: The network; only the parameters of ``model.leaves`` are traced to.
        batch: What is traced, a loss for each sample.
        others: Of which the means of activations are taken.

    Returns:
        ``{measure: {component: score}}``.
    """
    chosen, found = _components_and_pairs(model), dict[str, Scores]()

    def first(samples: int) -> Batch:
        return batch[0][:samples], batch[1][:samples]

    with _only(model, model.leaves):
        for rule in ("greedy", "edge", "viterbi"):
            table = _trace(model, batch, rule).influence(chosen)
            found[rule] = _with_pairs(model, table.shares)
            found[f"{rule}, weighted"] = _with_pairs(model, table.by("gradient").shares)
        found |= _decomposed(model, _trace(model, batch), chosen)
        few = _trace(model, first(max(1, len(batch[0]) // TRACE_COST)))
        for p in POWERS:
            found[f"mass, p = {p:g}"] = _with_pairs(model, few.mass(chosen, p=p).shares)
    return found | _baselines(model, first, len(batch[0]), _means(model, others))
