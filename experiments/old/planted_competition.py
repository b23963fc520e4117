"""Components in competition, designed anew: does influence tell which of them a network needs?

Question: Of three components that read the same letters, does the one with more influence over
training turn out to be the one whose loss hurts more? Does influence tell it better than scores
that need no tracing?

Expectation: The chapter (1.3) expects it. A review of ``competition``, which follows the chapter to
the letter, found that it cannot tell: its tasks were four and treated as fixed, its components of
different gain, its traces taken after the target was reached, and no component was necessary. From
pilots: influence finds what is needed once learning has happened, and a Taylor score does, too.

Method: Twelve tasks, two drawn from each of six families
(``gradtrace.experiments.question_tasks``): read a short word, say one answer. Four contests of
three components (``gradtrace.experiments.rival_networks``): "blind", three GRUs alike of which one
reads the word, the others unrelated words; "frozen", three GRUs alike of which one is trained;
"recurrent", an RNN, an LSTM and a GRU; "mechanisms", attention, a stack and a memory. All outputs
have the same standard deviation at the start. The network is trained by Adam until it answers 99%
of held-out samples rightly, or to the end of its budget, and traced every 20 steps until then, with
64 samples, each with its own loss (mass with 16 of them). Scores are shares among the rivals; that
of a measure is their mean over all traces but the first, which is the untrained control; the last
alone is shown beside it. The "primary endpoint" is the loss at once: by how much the loss of the
network, at the target, rises when the mean over held-out samples takes the place of a component's
output. "Secondary": how many more samples, in log₂, the network takes to 99% if it is trained
without the component, the rest beginning alike; the budget where it does not get there. Third, in
the first two contests, what was planted. The score of a measure is the share of pairs of rivals
that it puts in the order of the endpoint, 1/2 for ties; pairs whose endpoints differ by less than
0.02 nats or 0.25 doublings are left out. It is averaged over seeds, then tasks, then contests.
Intervals are bootstrapped over tasks and, in each task, seeds. Every measure is tested against
chance and against the Taylor score with mean baseline, signed, chosen beforehand; both corrected by
Holm over measures and endpoints; it is "equivalent" to Taylor where the 90% interval of the
difference lies within 0.05 (two one-sided tests). Mean ablation on other held-out samples is the
ceiling.

Seeds: one for each task, contest and repetition: weights, what is planted where, batches and
samples; by default 5. The first run had 2 seeds, no mass, and a budget of 200 steps in place of the
300 that were planned; this one has all, was planned when the first was known, and has the networks
of its two seeds among its own.

Limits: Networks are small, tasks are drawn from six families of our own, and two of the four
contests plant the answer. Here ``edge`` and ``greedy`` are the
same, as every component is read once. Where a pair of components costs about the same to lose, it
is left out. Twelve tasks let one tell differences of about 0.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any, TypeAlias

import torch
from torch import Generator, Tensor

import gradtrace as gt
from gradtrace.experiments.harness.findings import Cell, Result, Seeds, Tick
from gradtrace.experiments.planted_scores import sampled_scores
from gradtrace.experiments.question_tasks import draw_tasks
from gradtrace.experiments.rival_networks import RivalNetwork, build_rivals
from gradtrace.experiments.rival_verdicts import conclude, headline
from gradtrace.experiments.training import descent, plain

__all__ = ["FIGURE", "FULL", "QUICK", "SEEDS", "TIMED", "cells", "conclude", "headline", "measure"]

FULL: dict[str, Any] = {
    "families": ["recall", "count", "latest", "lookup", "automaton", "brackets"],
    "tasks": 2,  # of a family
    "contests": ["blind", "frozen", "recurrent", "mechanisms"],
    "width": 12,
    "budget": 300,  # steps
    "batch": 64,
    "rate": 0.01,
    "every": 20,  # steps between traces
    "evaluations": 10,  # steps between evaluations
    "target": 0.99,  # of held-out samples
    "traced": 64,  # samples
    "evaluated": 512,  # samples
}
QUICK: dict[str, Any] = FULL | {
    "families": ["recall", "latest"],
    "tasks": 1,
    "budget": 20,
    "traced": 8,
    "evaluated": 64,
}
SEEDS = Seeds(quick=1, full=5)
TIMED = False
FIGURE = "pairs"

Batch: TypeAlias = tuple[Tensor, Tensor]


def cells(settings: Mapping[str, Any], seeds: int) -> list[Cell]:
    """One for each network; seeds first, so that a run that is stopped has some of everything."""
    own = ("families", "tasks", "contests")
    shared = {key: value for key, value in settings.items() if key not in own}
    return [
        shared | {"family": family, "number": number, "contest": contest, "seed": seed}
        for seed in range(seeds)
        for number in range(settings["tasks"])
        for family in settings["families"]
        for contest in settings["contests"]
    ]


def measure(cell: Cell, tick: Tick) -> Result:
    """Train a network and score its rivals on the way; ablate each; train again without each."""
    network = _network(cell)
    held, other = (network.draw(cell["evaluated"], _generator(cell, k)) for k in ("held", "other"))
    with plain():
        looks: list[dict[str, Any]] = []
        reached = _train(network, cell, held, looks)
        tick(f"{_name(cell)}: {network.task.name}, target at {reached}")
        found: Result = {
            "task": network.task.name,
            "names": network.names,
            "truth": network.truth,
            "looks": looks,
            "reached": reached,
            "right": round(_right(network, held), 4),
            "held": _ablated(network, held),
            "other": _ablated(network, other),
            "without": {},
        }
        for part in network.names:
            rest = _network(cell).leave_out([part])
            found["without"][part] = _train(rest, cell, held)
            tick(f"{_name(cell)}: without {part}, target at {found['without'][part]}")
    return found


def _network(cell: Cell) -> RivalNetwork:
    task = draw_tasks(cell["family"], cell["number"] + 1)[-1]
    return build_rivals(cell["contest"], task, cell["width"], _name(cell))


def _name(cell: Cell) -> str:
    return f"{cell['family']}/{cell['number']}/{cell['contest']}/{cell['seed']}"


def _generator(cell: Cell, what: str) -> Generator:
    return Generator().manual_seed(Random(f"{_name(cell)}/{what}").getrandbits(63))


def _train(
    network: RivalNetwork, cell: Cell, held: Batch, looks: list[dict[str, Any]] | None = None
) -> int | None:
    """Train to the target; the step at which it was reached, None if it was not. A network that
    has nothing to train but its ends is trained, too.
    """
    batches = _generator(cell, "batches")

    def loss() -> Tensor:
        return network.losses(*network.draw(cell["batch"], batches)).mean()

    for step in descent(network, loss, cell["budget"], cell["rate"]):
        asked = step % cell["evaluations"] == 0 or step == cell["budget"]
        done = asked and step > 0 and _right(network, held) >= cell["target"]
        if looks is not None and (step % cell["every"] == 0 or done or step == cell["budget"]):
            looks.append(_look(network, cell, step))
        if done:
            return step
    return None


def _look(network: RivalNetwork, cell: Cell, step: int) -> dict[str, Any]:
    source = _generator(cell, f"traced {step}")
    batch, others = network.draw(cell["traced"], source), network.draw(256, source)
    said = sampled_scores(network, batch, others)
    return {
        "step": step,
        "scores": {
            name: {part: float(f"{score:.6g}") for part, score in each.items()}
            for name, each in said.items()
        },
    }


@torch.no_grad()
def _right(network: RivalNetwork, held: Batch) -> float:
    return network.right(*held)


@torch.no_grad()
def _ablated(network: RivalNetwork, held: Batch) -> dict[str, float]:
    """By how much the loss rises when the mean takes the place of a component's output."""
    whole = float(network.losses(*held).mean())
    found = {}
    for part in network.names:
        with gt.ablate(network, part, how="mean"):
            found[part] = float(network.losses(*held).mean()) - whole
    return found
