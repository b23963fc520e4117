"""A language model of the Penn Treebank's size, trained with traces.

Question: What do traces show of a language model with 10,000 words and 1,000 units while it learns?
By which gates and over how many time steps do paths run, before training and after; how long are
they against the layers and the size of the graph; and what does it cost?

Expectation: The chapter supposes "an RNN language model on the Penn Treebank corpus" with "a
vocabulary size of 10,000 words and 1,000 hidden units", and says of it and others: "In practice,
the length of the gradient tracing path is likely to be far shorter than the number of vertices and
edges in the computation graph. Indeed, in a simple multi-layer feed-forward network, its length
will be proportional to the number of layers." In a feed-forward network every path from a weight
has one length, so that must hold, up to what every path has in common; in a recurrent one it is
open, since paths may run through all time steps or none. Of an LSTM one expects that paths take to
its memory as it learns what agrees over a distance. Influence at step 0 is the control: what is as
large there comes from the form of the network, not from learning.

Method: The text is ours (``gradtrace.experiments.treebank_text``), as none can be downloaded: a
million words of a grammar with 10,000 words by Zipf's law, topics, and verbs that agree with their
subject over clauses. The probability of each of its words is known, so the least possible loss is,
too. The last tenth is held out. Models are LSTMs and Elman's RNNs of 1, 2 and 3 layers, and
feed-forward networks of 1, 2, 4 and 8 that read four words; Adam (0.001, gradient clipped to norm
1), 20 streams, 35 steps of time, state carried on, 3,000 updates. Agreement is the share of verbs
whose nearest noun has the wrong number, at which verbs of the right number get more probability
than those of the other. At eleven moments one held-out batch (20 × 35 words, always the same) is
traced by the rule greedy: the share of paths from the embeddings of the words read (all elements)
through each gate, the recurrent product and the memory (c times the forget gate); the same of
10,000 elements of the layers' weights, and through each time step; and paths of 300 elements of the
first layer's input weight: operators on them, and time steps from first to last. Before and after
training these are counted again with 5 to 80 steps of time, beside the size of the graph. Cost, of
LSTMs, in turns, nothing beside it: a training step (fused kernels), the watched forward pass,
recording, influence of all elements and of a sample; and training under ``gt.Monitor`` with a trace
every 100 steps against as many steps without. Intervals are Student's (95%) over seeds; those of
changes of influence hold for all components of a model together (Bonferroni). What is tested first
of all is the LSTM of one layer.

Seeds: Each seed draws the weights and the text: five for recurrent models of one layer, three for
all others. Costs have five seeds, too: of each the medians of five rounds, and of two runs under a
Monitor. ``--set models={}`` leaves costs alone to measure: run that first, without ``--workers``,
beside which they are marked as not measured alone.

Limits: In the published run paths are those of 100 elements, not 300, and models were trained nine
at a time on one GPU, costs apart. The text is no natural language: it has no rare constructions,
and its words carry nothing but number and topic. Models learn for 2.3 epochs, at one learning rate
that was not tuned. Of a layer's weights a quarter belongs to each gate and passes it in any case,
so influence on them is listed, but conclusions are drawn from paths to the embeddings, which may
take any gate. One batch is traced at each moment. A path carries a small part of its element's
gradient, so shares speak of paths, not of all gradient. Three to five seeds make wide intervals.
The design changed before the full run, after smaller ones: updates went from 2,000 to 3,000 after
pilots with 128 and 250 units, of which loss and agreement were looked at (at 250 units and 10,000
words the pilot was stopped at update 600, before agreement was learned). After the influence of the
quick form (16 units, two seeds) had been seen, conclusions were moved from paths to the layers'
weights to those to the embeddings, the correction from all components of all models to those of
each model, and seeds from three to five. Costs were at first of one seed, by medians. After they
had been seen they were given as means over its rounds, to have an interval: of three layers 38% of
training instead of 44%, as the machine went faster from the middle of that run on. They are by
medians again, as designed, and of five seeds, measured anew a day later by the code of then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite, nan
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor

import gradtrace as gt
from gradtrace.experiments import language_model_sentences
from gradtrace.experiments.harness import machine
from gradtrace.experiments.harness.findings import (
    Cell,
    Findings,
    Result,
    Row,
    Seeds,
    Tick,
)
from gradtrace.experiments.language_model_cost import Training, cost, device, groups
from gradtrace.experiments.language_model_findings import findings
from gradtrace.experiments.language_models import (
    LanguageModel,
    Streams,
    build,
    evaluate,
    loss_of,
    streams,
)

FULL: dict[str, Any] = {
    "words": 10_000,
    "units": 1_000,
    "batch": 20,
    "length": 35,
    "corpus": 1_000_000,
    "steps": 3_000,
    "rate": 0.001,
    "moments": [0, 20, 50, 100, 200, 400, 700, 1_000, 1_500, 2_000, 3_000],
    "models": {"lstm": [1, 2, 3], "rnn": [1, 2, 3], "forward": [1, 2, 4, 8]},
    "lengths": [5, 10, 20, 40, 80],
    "sample": 10_000,
    "paths": 300,
    "windows": 30,
    "timed": [1, 2, 3],
    "rounds": 5,
    "every": 100,
    "device": "auto",
}
QUICK: dict[str, Any] = FULL | {
    "words": 200,
    "units": 16,
    "batch": 4,
    "length": 6,
    "corpus": 4_000,
    "steps": 60,
    "rate": 0.01,
    "moments": [0, 20, 60],
    "models": {"lstm": [1, 2], "rnn": [1], "forward": [1, 2]},
    "lengths": [3, 6],
    "sample": 200,
    "paths": 50,
    "timed": [1],
    "rounds": 1,
    "every": 5,
}
SEEDS = Seeds(quick=2, full=5)
TIMED = False
FIGURE = "influence"

SHARED = ("words", "units", "batch", "length", "corpus", "rate", "device")
FEWER = 3
"""The most seeds of models that are not recurrent with one layer."""
CURVE = 50
"""Points of a curve of the training loss."""


def cells(settings: Mapping[str, Any], seeds: int) -> list[Cell]:
    """One for each model and seed, and one for each cost and seed; without models, costs alone."""
    shared = {name: settings[name] for name in SHARED}
    own = ("steps", "moments", "lengths", "sample", "paths", "windows")
    found = []
    for seed in range(seeds):
        for kind, layers in settings["models"].items():
            found += [
                {"part": "training", "kind": kind, "layers": n, "seed": seed}
                | shared
                | {name: settings[name] for name in own}
                for n in layers
                if seed < FEWER or (n == 1 and kind != "forward")
            ]
    costs = [
        {"part": "cost", "kind": "lstm", "layers": n, "seed": seed}
        | shared
        | {"rounds": settings["rounds"], "every": settings["every"]}
        for seed in range(seeds)
        for n in settings["timed"]
    ]
    return found[:1] + costs + found[1:]  # early, so that a run that is stopped has them


def measure(cell: Cell, tick: Tick) -> Result:
    """Train a model with traces, or measure what they cost."""
    return cost(cell, tick) if cell["part"] == "cost" else _trained(cell, tick)


def _trained(cell: Cell, tick: Tick) -> Result:
    where = device(cell["device"])
    train, held = streams(cell["words"], cell["corpus"], cell["batch"], cell["seed"], where)
    model = build(cell["kind"], cell["words"], cell["units"], cell["layers"], cell["seed"])
    training = Training(model.to(where), train, cell["length"], cell["rate"])
    looks, losses = [], list[Tensor]()
    graphs = {"start": _graphs(model, held, cell)}
    for step in range(cell["steps"] + 1):
        if step in cell["moments"] or step in (0, cell["steps"]):
            tick(f"{cell['kind']} {cell['layers']}, seed {cell['seed']}: step {step}")
            looks.append({"step": step} | _look(model, held, cell))
        if step < cell["steps"]:
            losses.append(training.advance())
    graphs["end"] = _graphs(model, held, cell)
    return {
        "device": machine.gpu(where),
        "parameters": sum(p.numel() for p in model.parameters()),
        "looks": looks,
        "curve": _curve(torch.stack(losses).tolist()),
        "graphs": graphs,
    }


def _curve(losses: Sequence[float]) -> list[list[float]]:
    """Means of the training loss over equal parts: [last step, loss] each."""
    size = max(len(losses) // CURVE, 1)
    return [
        [start + size, _short(fmean(losses[start : start + size]))]
        for start in range(0, len(losses) - size + 1, size)
    ]


# Traces -------------------------------------------------------------------------------------------


def _traced(model: LanguageModel, held: Streams, length: int) -> tuple[gt.watch, Tensor]:
    """A watched loss on the first words of the held-out text, layers taken apart."""
    read, target = held.words[:length], held.words[1 : length + 1]
    model.take_apart(True)
    with gt.watch(model, diagnose=False) as watch:
        loss = loss_of(model, read, target, model.start(read.shape[1]))
    model.take_apart(False)
    return watch, loss


def _look(model: LanguageModel, held: Streams, cell: Cell) -> Result:
    """How well the model does, and what a trace shows of it."""
    known = evaluate(model, held, cell["length"], cell["windows"])
    watch, loss = _traced(model, held, cell["length"])
    trace = watch.trace(loss)
    found: Result = {
        "loss": _short(known.loss),
        "source": _short(known.source),
        "right": _short(known.right),
        "verbs": known.verbs,
        "traced": _short(loss.item()),
        "path": _lengths(trace, model, cell["paths"]),
    }
    parts = groups(model)
    if not parts:
        return found
    words = trace.influence(parts, of="embed.weight")
    own = trace.influence(parts, of="layers.*", sample=cell["sample"])
    tables = (words.shares, words.by("gradient").shares, own.shares, own.by("gradient").shares)
    found["influence"] = {name: [_short(shares[name]) for shares in tables] for name in parts}
    steps = trace.influence("steps", of="layers.*", sample=cell["sample"]).shares
    top = f"layers.{cell['layers'] - 1}.cell step"
    found["time"] = [_short(steps.get(f"{top} {t}", nan)) for t in range(cell["length"])]
    return found


def _graphs(model: LanguageModel, held: Streams, cell: Cell) -> list[Result]:
    """Counts of the graph, and the paths of the first layer, for several lengths of time."""
    found = []
    for length in cell["lengths"]:
        watch, loss = _traced(model, held, length)
        graph = watch.graph(loss)
        found.append(
            {
                "time": length,
                "operators": len(graph),
                "vertices": graph.scalar_vertices,
                "edges": graph.scalar_edges,
            }
            | _lengths(watch.trace(loss), model, cell["paths"])
        )
    return found


def _lengths(trace: Any, model: LanguageModel, sample: int) -> Result:
    """The paths from random elements of the first layer's input weight."""
    name = next(name for name, _ in model.named_parameters() if name.startswith("layers.0."))
    paths = list(trace.paths(name, sample=sample))
    lengths = [len(path.operators) for path in paths]
    if not paths:
        return {"paths": 0, "length": nan, "longest": 0, "reach": nan, "coverage": nan}
    coverages = [path.coverage for path in paths if isfinite(path.coverage)]
    return {
        "paths": len(paths),
        "length": _short(fmean(lengths)),
        "longest": max(lengths),
        "reach": _short(fmean(_reach(path) for path in paths)),
        "coverage": _short(median(coverages)) if coverages else nan,
    }


def _reach(path: Any) -> int:
    """Time steps from the first that a path visits to the last; 0 if there are none."""
    times = [step.call for step in path.steps if ".cell" in step.module]
    return max(times) - min(times) + 1 if times else 0


def _short(value: float) -> float:
    return float(f"{value:.6g}")


# What was found -----------------------------------------------------------------------------------


def headline(facts: Mapping[str, Any]) -> str:
    """The result in a sentence."""
    return language_model_sentences.headline(facts)


def conclude(rows: Sequence[Row]) -> Findings:
    """Learning, influence, path length and cost."""
    return findings(rows)
