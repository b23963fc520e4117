"""Branches in competition: does influence tell which side of a diamond the network needs?

Question: In random networks with branches, does the influence of a sub-layer over training predict
what the network loses without it? And does it do so better than scores that need no tracing?

Expectation: As in the chapter's 1.3: the more influential the component, the dearer its removal.

Method: Random architectures from ``gradtrace.experiments.branching`` (two expanded layers after
each other, 4 to 32 units a layer, so that every component matters; and as many with 12 in every
layer, where many sides are of equal size, and size cannot be what influence sees) learn a random
teacher: inputs are normal, targets are what a network of one hidden layer makes of them. The two
sides of every diamond are rivals. At several steps the loss of single samples is traced by both
rules; influence counts the paths of the inputs' elements and of the parameters before the
component. Then the network is trained anew without each component, its output set to zero from the
first step on (``gradtrace.ablate``), from the same weights on the same batches. Costs, target and
baselines are those of ``competition``: samples to target, final loss, and the loss of the trained
network at once without the component. Only rivals are compared with each other; one table has all
components of a network, where larger ones hold smaller ones.

Seeds: one for each architecture of a kind, of its plan, weights, teacher, batches and samples; by
default 50.

Limits: Networks are small, one teacher each, trained on one kind of task. A larger side does more
and has more paths, so influence and size tell much the same; where sides are of equal size, little
can be told. A component removed from the first step on is another question than one removed at the
end, which the table has beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from random import Random
from typing import Any

import torch
from torch import Generator, Tensor, nn

import gradtrace as gt
from gradtrace.experiments.branching import Branching, branching
from gradtrace.experiments.contest import COSTS, Trial
from gradtrace.experiments.harness.findings import Cell, Findings, Result, Row, Seeds, Tick
from gradtrace.experiments.harness.statistics import Interval, out_of, with_interval
from gradtrace.experiments.rivals import (
    BASELINES,
    FEWEST,
    RULES,
    Network,
    Rivals,
    bars,
    correlation,
    correlations,
    counted,
    differences,
    numbers,
    sentence,
    stated,
    verdict,
)
from gradtrace.experiments.rivals import (
    headline as verdicts,
)
from gradtrace.experiments.scores import Scores, scores
from gradtrace.experiments.training import descent, moments, plain

FULL: dict[str, Any] = {
    "widths": {"random": [4, 32], "equal": [12, 12]},
    "layers": 2,
    "teacher": 64,  # hidden units of what is learnt
    "steps": 600,
    "batch": 32,
    "rate": 0.005,
    "every": 20,  # steps between evaluations
    "evaluated": 512,  # samples
    "traced": 6,  # how often, over training
    "pairs": 16,  # samples that are traced each time
}
QUICK: dict[str, Any] = FULL | {"steps": 100, "every": 5, "traced": 3, "pairs": 4}
SEEDS = Seeds(quick=4, full=50)
TIMED = False
FIGURE = "correlation"

ENDS = 10
"""Elements of inputs and of outputs, as in the chapter."""


def cells(settings: Mapping[str, Any], seeds: int) -> list[Cell]:
    """One for each architecture; it has all its ablations, which are short."""
    shared = {key: value for key, value in settings.items() if key != "widths"}
    return [
        shared | {"kind": kind, "width": width, "seed": seed}
        for kind, width in settings["widths"].items()
        for seed in range(seeds)
    ]


def measure(cell: Cell, tick: Tick) -> Result:
    """Train the network of a seed, and again without each of its components."""
    names = network(cell).components()
    with plain():
        full = trained(cell, None, tick)
        curves = {name: trained(cell, name, tick)["curve"] for name in names}
    return full | {"without": curves, "rivals": network(cell).rivals()}


# Training -----------------------------------------------------------------------------------------


def network(cell: Cell) -> Branching:
    """The network of a cell, always the same."""
    low, high = cell["width"]
    return branching(
        cell["seed"], width=(low, high), inputs=ENDS, outputs=ENDS, layers=cell["layers"]
    )


def teacher(cell: Cell) -> nn.Module:
    """``tanh(V·tanh(W·x))`` with normal weights, so that it is far from linear."""
    hidden = cell["teacher"]
    source = _generator(cell, "teacher")
    first, second = nn.Linear(ENDS, hidden), nn.Linear(hidden, ENDS)
    with torch.no_grad():
        first.weight.copy_(torch.randn(hidden, ENDS, generator=source) / ENDS**0.5)
        second.weight.copy_(torch.randn(ENDS, hidden, generator=source) * 2 / hidden**0.5)
        first.bias.copy_(torch.randn(hidden, generator=source))
        second.bias.zero_()
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh()).requires_grad_(False)


def trained(cell: Cell, removed: str | None, tick: Tick) -> Result:
    """Train with one component removed, or none; of the full network also what measures say."""
    model, goal = network(cell), teacher(cell)
    parts = model.components()
    held = torch.randn(cell["evaluated"], ENDS, generator=_generator(cell, "evaluation"))
    curve, found = [], []
    asked = set() if removed else moments(cell["steps"], cell["traced"])
    batches = _generator(cell, "batches")

    def loss() -> Tensor:
        x = torch.randn(cell["batch"], ENDS, generator=batches)
        return losses(model, goal, x).mean()

    with _without(model, parts.get(removed or "")):
        for step in descent(model, loss, cell["steps"], cell["rate"]):
            if step % cell["every"] == 0 or step == cell["steps"]:
                curve.append((step * cell["batch"], _evaluated(model, goal, held)))
            if step in asked and parts:
                found.append({"step": step} | scored(model, goal, cell, step))
    tick(f"{cell['kind']} {cell['seed']} without {removed or 'nothing'}: loss {curve[-1][1]:.4f}")
    if removed:
        return {"curve": curve}
    zeroed = {}
    for name, part in parts.items():
        with gt.ablate(model, part):
            zeroed[name] = _evaluated(model, goal, held)
    return {"curve": curve, "scores": found, "zeroed": zeroed}


def _without(model: nn.Module, part: str | None) -> AbstractContextManager[Any]:
    return gt.ablate(model, part) if part else nullcontext()


def losses(model: nn.Module, goal: nn.Module, x: Tensor) -> Tensor:
    """The squared error of every sample: (samples,)."""
    error: Tensor = (model(x) - goal(x.detach())).square().mean(-1)
    return error


@torch.no_grad()
def _evaluated(model: nn.Module, goal: nn.Module, held: Tensor) -> float:
    return float(losses(model, goal, held).mean())


def scored(model: Branching, goal: nn.Module, cell: Cell, step: int) -> Scores:
    """What every measure says; inputs have gradients, too, or nothing lies before the branches."""
    x = torch.randn(cell["pairs"], ENDS, generator=_generator(cell, "traced", str(step)))
    x.requires_grad_()
    seed = _seed(cell, "random", str(step))
    return scores(model, model.components(), lambda: losses(model, goal, x), seed)


def _seed(cell: Cell, *what: str) -> int:
    """A seed for one use of random numbers; the same whatever is removed."""
    return Random("/".join(("branches", cell["kind"], str(cell["seed"]), *what))).getrandbits(63)


def _generator(cell: Cell, *what: str) -> Generator:
    return Generator().manual_seed(_seed(cell, *what))


# What was found -----------------------------------------------------------------------------------


def headline(facts: Mapping[str, Any]) -> str:
    """The result in a sentence, and what is left of it where size cannot help."""
    said, equal = verdicts(facts, WHAT), facts.get("equal size", {}).get("samples")
    if not equal:
        return said
    best = max(RULES.values(), key=lambda name: facts["correlations"]["samples"][name][0] or -1)
    return f"{said} Between sides of equal size influence agrees to {with_interval(equal[best])}."


def conclude(rows: Sequence[Row]) -> Findings:
    """Correlations among rivals, among those of equal size, and among all components."""
    order = sorted(rows, key=lambda row: (str(row.cell["kind"]), int(row.cell["seed"])))
    trained = [(_trial(row), row.result["rivals"]) for row in order]
    found = [(trial, pairs) for trial, pairs in trained if pairs and trial.finite]
    if not found:
        return Findings("No network had a diamond and a finite loss, so nothing can be said.")
    rivals = [_network(trial, pairs) for trial, pairs in found]
    equal = _equal(rivals)
    whole = [trial.network() for trial, _ in found]
    return Findings(
        " ".join([_introduction(found), sentence(rivals, "samples", WHAT), _matched(equal)]),
        tables=(
            correlations(rivals, COSTS, "The two sides of every diamond"),
            differences(rivals, "samples", "Influence against the baselines"),
            *([correlations(equal, COSTS, "Sides of equal size")] if equal else []),
            correlations(whole, COSTS, "All components of a network"),
        ),
        plots=(bars(rivals, "samples", "Which score predicts samples to target?"),),
        facts=_facts(found, rivals, equal),
    )


WHAT = "which side of a diamond costs more samples to do without"


def _equal(networks: Sequence[Network]) -> list[Network]:
    """Only the rivals of equal size, and the networks that have some."""
    found = []
    for network in networks:
        same = tuple(r for r in network.rivals if len(set(r.scores["size"])) == 1)
        if same:
            found.append(Network(network.group, network.seed, same))
    return found


def _trial(row: Row) -> Trial:
    without = row.result["without"]
    curves = {frozenset([name]): curve for name, curve in without.items()}
    curves[frozenset()] = row.result["curve"]
    seed, names = row.cell["seed"], tuple(without)
    return Trial(row.cell["kind"], seed, names, curves, row.result["scores"], row.result["zeroed"])


def _network(trial: Trial, pairs: Sequence[Sequence[str]]) -> Network:
    """The two sides of each diamond as rivals."""
    whole = trial.rivals(trial.means)
    return Network(trial.task, trial.seed, tuple(_chosen(whole, pair) for pair in pairs))


def _chosen(whole: Rivals, names: Sequence[str]) -> Rivals:
    places = [whole.names.index(name) for name in names]
    scores = {kind: [values[p] for p in places] for kind, values in whole.scores.items()}
    costs = {kind: [values[p] for p in places] for kind, values in whole.costs.items()}
    return Rivals(tuple(names), scores, costs)


def _introduction(found: Sequence[tuple[Trial, Any]]) -> str:
    diamonds = sum(len(pairs) for _, pairs in found)
    arms = [trial.censored([name]) for trial, _ in found for name in trial.names]
    return (
        f"{len(found)} random networks with {diamonds} diamonds, trained again without each of "
        f"their {len(arms)} sides; {out_of(sum(arms), len(arms))} of these did not reach the "
        "target in the budget."
    )


def _matched(equal: Sequence[Network]) -> str:
    """The verdict where size cannot help, in words."""
    if not equal:
        return "No two sides were of equal size."
    if len(equal) < FEWEST:
        return f"With sides of equal size, {counted(len(equal))} too few to tell."
    diamonds = sum(len(network.rivals) for network in equal)
    parts = []
    for rule, name in RULES.items():
        parts.append(stated(f"influence by {rule}", _samples(equal, name), len(equal)))
    others = [f"{name} {_samples(equal, name)}" for name in BASELINES if name != "size"]
    return (
        f"Between sides of equal size ({diamonds} diamonds in {len(equal)} networks): "
        f"{'; '.join(parts)}; {', '.join(others)}."
    )


def _samples(networks: Sequence[Network], measure: str) -> Interval:
    return correlation(networks, measure, "samples")


def _facts(
    found: Sequence[tuple[Trial, Any]], rivals: Sequence[Network], equal: Sequence[Network]
) -> dict[str, Any]:
    return {
        "networks": len(found),
        "diamonds": sum(len(pairs) for _, pairs in found),
        "correlations": numbers(rivals, COSTS),
        "equal size": numbers(equal, COSTS),
        "verdicts": {r: verdict(_samples(rivals, n), len(rivals)) for r, n in RULES.items()},
        "sides add up": all(_adds_up(trial, pair) for trial, pairs in found for pair in pairs),
    }


def _adds_up(trial: Trial, pair: Sequence[str]) -> bool:
    """A path through a diamond takes one of its sides: their shares add up to what enters it."""
    outer = pair[0].rpartition(".")[0]
    return all(
        abs(sum(scores[kind][side] for side in pair) - scores[kind].get(outer, 1.0)) < 1e-9
        for scores in trial.scores
        for kind in RULES.values()
    )
