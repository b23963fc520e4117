"""How many parameters and edges has a model of the Penn Treebank's size, and where are the edges?

Expectation: the chapter supposes "roughly 2.1 million parameters and 30·n million edges" for n
words, a graph that is sparse with very dense regions, and back-propagation as a fair proxy of a
trace's time.

Method: Elman's network on n random words, 10,000 to choose from and 1,000 units. *counts*:
parameters, also of models that may have been meant; of each argument of an operator, its elements
times those of the output, and how many of these pairs are edges. *scale*: the edges of longer
texts, and the best times of `loss.backward()` and of a trace with influence; the interval draws
weights and words.

Limits: edges depend on how the loss and the products are written, so three counts are given.
Published times are of a busy machine and gradtrace 0.1.0.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise
from math import exp, log, prod
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from torch import nn

from experiments import lab
from experiments.language_model import LanguageModel, loss_of, seconds, watched

ALONE = True  # it measures time
ROWS = ("treebank-scale", "treebank-counts")
SETTINGS: dict[str, dict[str, Any]] = {
    "full": {"words": 10_000, "units": 1_000, "n": [*range(10, 101, 10)], "rounds": 3, "seeds": 3},
    "quick": {"words": 1_000, "units": 100, "n": [2, 10], "rounds": 2, "seeds": 2},
    "small": {"words": 100, "units": 10, "n": [2, 10], "rounds": 1, "seeds": 1},
}
WAYS = "loss.backward()", "trace and influence"
SCALE = "n", "edges", "backward, ms", "trace, ms", "times backward"
DENSE = "argument", "edges of pairs", "of all edges"
COUNTED = "recorded", "log-softmax in pieces", "and products"


def cells(settings: lab.Cell) -> list[lab.Cell]:
    """The counts of ten words, and a text of each length with each seed."""
    sizes = {name: settings[name] for name in ("words", "units")}
    scale = {"part": "scale", **sizes, "rounds": settings["rounds"]}
    texts = [(n, seed) for n in settings["n"] for seed in range(settings["seeds"])]
    return [
        {"part": "counts", **sizes, "steps": 10, "seed": 0},
        *({**scale, "steps": n, "seed": seed} for n, seed in texts),
    ]


def measure(cell: lab.Cell) -> lab.Row:
    """Counts of one graph, or edges and times of one text."""
    torch.manual_seed(cell["seed"])
    model = LanguageModel("elman", cell["words"], cell["units"])
    words = torch.randint(cell["words"], (cell["steps"] + 1,))
    watch, loss = watched(model, words)
    graph = watch.graph(loss)
    found = arguments(graph)
    if cell["part"] == "scale":
        best = map(min, zip(*(times(model, words) for _ in range(cell["rounds"]))))
        edges = sum(edges for _, edges in found.values())
        return {"edges": edges, "seconds": dict(zip(WAYS, best))}
    vertices = sum(operator.size for operator in graph)
    return {"parameters": parameters(), "vertices": vertices, "arguments": found}


def times(model: LanguageModel, words: torch.Tensor) -> tuple[float, float]:
    """Seconds of both ways, without the forward pass."""
    model.zero_grad()
    plain, (watch, loss) = loss_of(model, words, []), watched(model, words)
    return seconds(plain.backward), seconds(lambda: watch.trace(loss).influence())


def arguments(graph: Any) -> dict[str, tuple[int, int]]:
    """Of each argument: the pairs of its elements and the output's, and how many are edges."""
    found: dict[str, tuple[int, int]] = {}
    for edge in (edge for edge in graph.edges if edge.producer is not None):
        user, shape = graph[edge.consumer], graph[edge.producer].shapes[edge.slot]
        size, name = prod(shape), user.name.removesuffix("Backward0")
        edges = size if name in ("Stack", "Cat") else user.size
        if name == "Addmm" and edge.position:  # (n, k) @ (k, m); the bias is as all others
            name += ", input" if edge.position == 1 else ", weight"
            edges = user.size * shape[edge.position == 1]
        elif name == "LogSoftmax":
            edges = size * shape[-1]
        elif name == "NllLoss":
            edges = shape[0]
        pairs, before = found.get(name, (0, 0))
        found[name] = pairs + size * user.size, before + edges
    return found


def parameters() -> dict[str, int]:
    """The parameters of models, built on the meta device: they hold no numbers."""
    dense, wide = (25_088, 4_096, 4_096, 1_000), [3, *[64] * 2, *[128] * 2, *[256] * 3, *[512] * 6]
    with torch.device("meta"):
        layers = [nn.Conv2d(a, b, 3) for a, b in pairwise(wide)], map(nn.Linear, dense, dense[1:])
        models = {
            "Elman's network": LanguageModel("elman", 10_000, 1_000),
            "embedding and nn.RNN": LanguageModel("rnn", 10_000, 1_000),
            "embedding and nn.LSTM": LanguageModel("lstm", 10_000, 1_000),
            "nn.RNN alone": nn.RNN(1_000, 1_000),
            "embedding and nn.LSTM, 100 units": LanguageModel("lstm", 10_000, 100),
            "VGG-16": nn.ModuleList(chain(*layers)),
        }
    return {name: sum(p.numel() for p in model.parameters()) for name, model in models.items()}


def kept(row: lab.Row) -> list[lab.Row]:
    """Old rows of a text have no part; parameters are counted anew."""
    return [] if row.get("kind") == "parameters" else [{"part": "scale", **row}]


def _counted(row: lab.Row) -> tuple[int, int, int]:
    """The edges of a text: as recorded, with log-softmax in pieces, and with products, too."""
    words, units, steps = row["words"], row["units"], row["steps"]
    apart = row["edges"] - steps * (words**2 - 3 * words)
    return row["edges"], apart, apart + steps * units * (words + units)


def _word(texts: Sequence[lab.Row]) -> str:
    """The edges that each word adds, by three ways to count."""
    first, last = (pick(texts, key=lambda row: row["steps"]) for pick in (min, max))
    steps = last["steps"] - first["steps"]
    ways = ((b - a) / steps / 1e6 for a, b in zip(_counted(first), _counted(last)))
    each = "{:.3f} million edges a word, {:.3f} with log-softmax in pieces, {:.3f} with products"
    return each.format(*ways)


def _density(count: lab.Row) -> list[tuple[str, float, str]]:
    """The arguments with most edges: the share of pairs that are edges, and of all edges."""
    every = sum(edges for _, edges in count["arguments"].values())
    dense = sorted(count["arguments"].items(), key=lambda each: -each[1][1])[:6]
    found = [(name, edges / pairs, f"{edges / every:.1%}") for name, (pairs, edges) in dense]
    return [*found, ("the whole graph", 2 * every / count["vertices"] ** 2, "100%")]


def _texts(texts: Sequence[lab.Row]) -> list[list[object]]:
    """Edges, medians of milliseconds over seeds, and the ratio of times."""
    found: list[list[object]] = []
    for steps in sorted({row["steps"] for row in texts}):
        some = [row for row in texts if row["steps"] == steps]
        times = [median(row["seconds"][way] for row in some) * 1e3 for way in WAYS]
        found.append([steps, f"{some[0]['edges']:,}", *(f"{t:.0f}" for t in times), ""])
    logs = [(r["seed"], log(r["seconds"][WAYS[1]] / r["seconds"][WAYS[0]])) for r in texts]
    ratios = [fmean(x for at, x in logs if at == seed) for seed in sorted({at for at, _ in logs})]
    mean, low, high = map(exp, lab.interval(ratios))
    found = found[:: max(len(found) // 3, 1)]
    return [*found, ["all lengths", "", "", "", lab.said((mean, low, high))]]


def tables(rows: Sequence[lab.Row]) -> list[lab.Table]:
    """Parameters, density, and edges and time."""
    (count,) = (row for row in rows if row["part"] == "counts")
    texts = [row for row in rows if row["part"] == "scale"]
    sizes = [(name, f"{size:,}") for name, size in count["parameters"].items()]
    return [
        ("Parameters", ("model", "parameters"), sizes),
        (f"Density, {count['steps']} words", DENSE, _density(count)),
        (f"Elman's network: {_word(texts)}", SCALE, _texts(texts)),
    ]


def figure(rows: Sequence[lab.Row], path: Path) -> None:
    """Edges over the length of the text, by each way to count, and as the chapter has it."""
    found = {r["steps"]: _counted(r) for r in rows if r["part"] == "scale"}
    steps = sorted(found)
    counts = zip(COUNTED, zip(*(found[n] for n in steps)))
    curves = {name: (steps, [edges / 1e6 for edges in each]) for name, each in counts}
    curves["30·n"] = steps, [30 * n for n in steps]
    lab.lines(path, "Edges of Elman's network", "words, n", "million edges", curves)
