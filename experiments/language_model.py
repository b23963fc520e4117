"""What do traces show of a language model as large as the Penn Treebank's, and what do they cost?

Expectation: the chapter supposes "roughly 2.1 million parameters and 30·n million edges", graphs
sparse with very dense regions, paths far shorter than these, in a feed-forward network in
proportion to its layers. It calls LSTM and GRU easier to train than RNN.

Method: text of a grammar, whose least possible loss is known. *training*: models learn by Adam, the
gradient clipped to 1, state carried on; one held-out batch is traced (greedy) over training: paths
from the first layer's weights, influence on the embeddings. *cost*: of a trace of 10,000 elements,
and of a Monitor. *scale*: Elman's network on n words, edges and best times. *counts*: parameters;
of each argument of an operator, its elements times those of the output, and how many of these pairs
are edges. Intervals draw weights and text.

Limits: no natural language; learning rates were not tuned; one batch is traced. Published large
models and costs are of one GPU and gradtrace 0.1.0, whose Monitor measured more; GRU was compared
in a smaller size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, cycle, islice, pairwise
from math import exp, inf, isfinite, log, prod
from pathlib import Path
from random import Random
from statistics import fmean, median
from time import perf_counter
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradtrace as gt
from experiments import lab

ALONE = True  # it measures time
ROWS = ("language-model", "treebank-scale", "language-model-gru")
SIZE = {"words": 10_000, "units": 1_000}
LARGE = {**SIZE, "batch": 20, "length": 35, "corpus": 1_000_000, "rate": 0.001}
LONG = {**LARGE, "long": 80, "moments": [0, 20, 50, 100, 200, 400, 700, 1_000, 1_500, 2_000, 3_000]}
LESS = {**LONG, "words": 1_000, "units": 100, "corpus": 200_000, "rate": 0.003}
LESS["moments"] = [0, 20, 50, 100, 200, 400, 700]
ONE = [{"kind": kind, "layers": 1} for kind in ("lstm", "rnn", "gru", "forward")]
DEEP = [{"kind": kind, "layers": n} for kind in ("lstm", "rnn") for n in (2, 3)]
DEEP += [{"kind": "forward", "layers": n} for n in (1, 2, 4, 8)]


def brief(updates: int, seeds: int, **sizes: int) -> dict[str, Any]:
    """The parts of a short form."""
    tiny = {"words": 200, "units": 16, "batch": 4, "length": 6, "corpus": 4_000, "rate": 0.01}
    return {
        "training": [({**tiny, "moments": [0, updates // 2, updates], "long": 6}, ONE, seeds)],
        "cost": [({**tiny, "rounds": seeds, "every": 5}, [{"layers": 1}], seeds)],
        "counts": [({**sizes, "steps": 10}, [{}], 1)],
        "scale": [({**sizes, "rounds": seeds}, [{"steps": n} for n in (2, 10)], seeds)],
    }


SETTINGS: dict[str, dict[str, Any]] = {  # of each part: what is shared, what differs, seeds
    "full": {
        "training": [(LONG, ONE[:2], 5), (LONG, DEEP, 3), (LESS, ONE[:3], 4)],
        "cost": [({**LARGE, "rounds": 5, "every": 100}, [{"layers": n} for n in (1, 2, 3)], 5)],
        "counts": [({**SIZE, "steps": 10}, [{}], 1)],
        "scale": [({**SIZE, "rounds": 3}, [{"steps": n} for n in range(10, 101, 10)], 3)],
    },
    "quick": brief(60, 2, words=1_000, units=100),
    "small": brief(4, 1, words=100, units=10),
}


def cells(settings: lab.Cell) -> list[lab.Cell]:
    """The variants of each part, with each seed."""
    return [
        {"part": part, **shared, **variant, "seed": seed}
        for part, groups in settings.items()
        for shared, variants, seeds in groups
        for variant in variants
        for seed in range(seeds)
    ]


def measure(cell: lab.Cell) -> lab.Row:
    """One part of one model."""
    parts = {"training": training, "cost": cost, "counts": counts, "scale": scale}
    return parts[cell["part"]](cell)


# Text --------------------------------------------------------------------------------------------


def kinds(topics: int, seed: int) -> Iterator[tuple[str, float]]:
    """Kinds of words, each with its probability given all before: *the dogs that a cat near the
    trees sees run*. Verbs agree with their subjects in number and topic.
    """
    draw, weights = Random(f"treebank text/{seed}"), 1 / np.arange(1, topics + 1)
    share = (weights / weights.sum()).tolist()

    def noun(topic: int, stays: float, chance: float) -> Any:
        number = draw.choice(("one", "many"))
        yield number, chance / 2
        while draw.random() < 0.3:
            yield "adjective", 0.3
        new = draw.choices(range(topics), share)[0] if draw.random() >= stays else topic
        yield f"noun {new} {number}", 0.7 * (stays * (new == topic) + (1 - stays) * share[new])
        return new, number

    def beside(topic: int, number: str, depth: int = 0) -> Any:
        clause, choice = (0.25 if depth < 2 else 0.0), draw.random()
        if choice >= 0.15 + clause:
            return 0.85 - clause  # the chance of a verb at once
        yield ("preposition", 0.15) if choice < 0.15 else ("that", clause)
        if choice < 0.15:
            yield from noun(topic, 0.6, 1.0)
        elif draw.random() < 0.6:  # that sees the cat
            yield f"verb {topic} {number}", 0.6
            yield from noun(topic, 0.6, 1.0)
        else:  # that the cat sees
            inner, other = yield from noun(topic, 0.6, 0.4)
            chance = yield from beside(inner, other, depth + 1)
            yield f"verb {inner} {other}", chance
        return 1.0

    topic = 0
    while True:
        topic, number = yield from noun(topic, 0.8, 1.0)
        chance = yield from beside(topic, number)
        yield f"verb {topic} {number}", chance
        choice = draw.random()
        if choice < 0.55:
            yield from noun(topic, 0.6, 0.55)
        elif choice < 0.75:
            yield "adverb", 0.2
        yield "end", 1.0 if choice < 0.75 else 0.25


def text(count: int, words: int, seed: int) -> tuple[Tensor, Tensor]:
    """Numbers of words, and -log of their probabilities; within a kind by Zipf's law.

    >>> numbers, surprisal = text(1000, 200, 0)
    >>> len(numbers), bool(numbers.max() < 200), bool(surprisal.min() >= 0)
    (1000, True, True)
    """
    rest, topics = words - 16, min(20, (words - 16) // 40)
    sizes = {"end": 1, "that": 1, "one": 3, "many": 3, "preposition": 8}
    sizes["adjective"] = rest * 3 // 20
    for name in [f"{topic} {number}" for topic in range(topics) for number in ("one", "many")]:
        sizes |= {f"noun {name}": rest // (4 * topics), f"verb {name}": rest * 3 // (20 * topics)}
    sizes["adverb"] = words - sum(sizes.values())
    said, chances = map(np.array, zip(*islice(kinds(topics, seed), count)))
    found, start, draw = np.zeros(count, dtype=np.int64), 0, np.random.default_rng(seed)
    for kind, size in sizes.items():
        places, zipf = np.flatnonzero(said == kind), 1 / np.arange(1, size + 1)
        zipf /= zipf.sum()
        ranks = np.searchsorted(np.cumsum(zipf), draw.random(len(places)), side="right")
        ranks = np.minimum(ranks, size - 1)
        found[places], start = start + ranks, start + size
        chances[places] *= zipf[ranks]
    return torch.from_numpy(found), torch.from_numpy(-np.log(chances))


# Models ------------------------------------------------------------------------------------------

NAMES = {"lstm": "LSTM", "rnn": "RNN", "gru": "GRU", "forward": "feed-forward"}
FUSED = {"lstm": nn.LSTM, "rnn": nn.RNN, "gru": nn.GRU}
GATES: dict[str, tuple[str, ...]] = {
    "lstm": ("input", "forget", "output", "candidate", "memory", "recurrent"),
    "gru": ("reset", "update", "candidate", "memory", "recurrent"),
}
FUNCTIONS: dict[str, Any] = {"candidate": torch.tanh, "memory": torch.mul, "recurrent": F.linear}
WINDOW = 4  # words that a feed-forward model reads
WAYS = "loss.backward()", "trace and influence"
TRACE = "a trace", "forward pass, watched", "recording", "influence, sampled"


Losses: TypeAlias = Iterator[Callable[[], Tensor]]


class Part(nn.Module):
    """A function as a component; gates are sigmoids."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.forward: Any = FUNCTIONS.get(name, torch.sigmoid)


class LanguageModel(nn.Module):
    """Scores of the next word, by layers of PyTorch; in ``eval`` operator by operator. Of the kind
    "elman" it is ``h = tanh(E[word] + W·h + b)``.
    """

    def __init__(self, kind: str, words: int, units: int, layers: int = 1) -> None:
        super().__init__()
        self.kind, self.embed = kind, nn.Embedding(words, units)
        nn.init.uniform_(self.embed.weight, -0.1, 0.1)
        wide = [WINDOW * units if kind == "forward" else units, *[units] * layers]
        self.layers = nn.ModuleList(FUSED.get(kind, nn.Linear)(*size) for size in pairwise(wide))
        self.out, self.parts = nn.Linear(units, words), nn.Module()
        for name in GATES.get(kind, ("recurrent",)):
            self.parts.add_module(name, Part(name))

    def forward(self, words: Tensor, states: list[Any]) -> Tensor:
        """Scores at each time; in training the layers' last states are left in ``states``."""
        x = self.embed(words)
        if self.kind == "forward":
            padded = torch.cat([x.new_zeros(WINDOW - 1, *x.shape[1:]), x])
            x = torch.cat([padded[k : k + len(words)] for k in range(WINDOW)], 2)
        for n, layer in enumerate(self.layers):
            if self.kind == "forward":
                x = torch.tanh(layer(x))
            elif self.kind == "elman":
                x = self.opened(x, *layer.parameters())
            elif self.training:
                x, state = layer(x, states[n])
                lstm = self.kind == "lstm"
                states[n] = [each.detach() for each in state] if lstm else state.detach()
            else:
                w_in, w, b_in, b = layer.parameters()
                x = self.opened(F.linear(x, w_in, b_in), w, b)
        found: Tensor = self.out(x)
        return found

    def opened(self, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        """States from zeros on; ``x`` is what each step gets from the layer below."""
        p: Any = self.parts
        h = c = x.new_zeros(*x.shape[1:-1], w.shape[1])
        outs = []
        for given in x.unbind(0):
            known = p.recurrent(h, w, b)
            if self.kind == "lstm":
                i, f, g, o = (given + known).chunk(4, 1)
                c = p.memory(p.forget(f), c) + p.input(i) * p.candidate(g)
                h = p.output(o) * torch.tanh(c)
            elif self.kind == "gru":
                (r, z, n), (rh, zh, nh) = given.chunk(3, 1), known.chunk(3, 1)
                z, n = p.update(z + zh), p.candidate(n + p.reset(r + rh) * nh)
                h = (1 - z) * n + p.memory(z, h)
            else:
                h = torch.tanh(given + known)
            outs.append(h)
        return torch.stack(outs)


def loss_of(model: nn.Module, words: Tensor, states: list[Any], monitor: Any = None) -> Tensor:
    """The mean cross entropy of each next word."""
    scores = model(words[:-1], states)
    loss = F.cross_entropy(scores.flatten(0, -2), words[1:].flatten())
    if monitor is not None:
        monitor.step(loss)
    return loss


def losses(model: LanguageModel, words: Tensor, length: int, monitor: Any = None) -> Losses:
    """The loss on each window of a text, over and over; the state is carried on."""
    states: list[Any] = [None] * len(model.layers)
    for first in cycle(range(0, len(words) - length, length)):
        yield partial(loss_of, model, words[first : first + length + 1], states, monitor)


def watched(model: nn.Module, words: Tensor) -> tuple[gt.watch, Tensor]:
    """A loss to trace."""
    model.eval()
    with gt.watch(model) as watch:
        loss = loss_of(model, words, [])
    model.train()
    return watch, loss


def built(cell: lab.Cell) -> tuple[LanguageModel, torch.optim.Optimizer, list[Tensor]]:
    """A model, its optimiser, and streams side by side: text, held-out text and its surprisal."""
    where = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(cell["seed"])
    sizes = cell["words"], cell["units"], cell["layers"]
    model = LanguageModel(cell.get("kind", "lstm"), *sizes).to(where)
    optimizer = torch.optim.Adam(model.parameters(), lr=cell["rate"])

    def clip(*_: object) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    optimizer.register_step_pre_hook(clip)
    words, surprisal = text(cell["corpus"], cell["words"], cell["seed"])
    cut, batch = round(0.9 * len(words)), cell["batch"]
    parts = words[:cut], words[cut:], surprisal[cut:]
    streams = [part[: len(part) // batch * batch].view(batch, -1).T.to(where) for part in parts]
    return model, optimizer, streams


# What is measured --------------------------------------------------------------------------------


def training(cell: lab.Cell) -> lab.Row:
    """Train a model, look at it at each moment, and at its graph on a long text in the end."""
    model, optimizer, (train, *held) = built(cell)
    steps, looks = losses(model, train, cell["length"]), []
    for last, step in pairwise([0, *cell["moments"]]):
        lab.train(model, optimizer, islice(steps, step - last))
        looks.append({"step": step, **look(model, held, cell["length"])})
    watch, loss = watched(model, held[0][: cell["long"] + 1])
    graph, found = watch.graph(loss), paths(watch.trace(loss))
    edges = sum(edges for _, edges in arguments(graph).values())
    return {"looks": looks, "graphs": {"end": [{**found, "operators": len(graph), "edges": edges}]}}


def look(model: LanguageModel, held: Sequence[Tensor], length: int) -> lab.Row:
    """The loss and the least possible; paths, and the share of words' that take each gate."""
    words, surprisal = held
    windows = min(30, (len(words) - 1) // length)
    with torch.no_grad():
        loss = fmean(float(run()) for run in islice(losses(model, words, length), windows))
    least = float(surprisal[1 : windows * length + 1].mean())
    watch, traced = watched(model, words[: length + 1])
    trace, by = watch.trace(traced), {gate: f"parts.{gate}" for gate in GATES.get(model.kind, ())}
    shares = trace.influence(by, of="embed.weight", sample=None).shares if by else {}
    influence = {f"layer 1, {gate}": [share] for gate, share in shares.items()}
    return {"loss": loss, "source": least, "path": paths(trace), "influence": influence}


def paths(trace: Any) -> dict[str, float]:
    """The operators on paths from the first layer's weights, and the gradient they carry."""
    name = next(name for name in trace.gradients if name.startswith("layers.0.weight"))
    found = trace.paths(name, sample=100)
    carried = [path.coverage for path in found if isfinite(path.coverage)]
    return {"length": fmean(len(p.operators) for p in found), "coverage": median(carried)}


def seconds(run: Callable[[], object]) -> float:
    """What a call takes, that of a GPU included."""
    wait: Callable[[], object] = torch.cuda.synchronize if torch.cuda.is_available() else int
    wait()
    began = perf_counter()
    run()
    wait()
    return perf_counter() - began


def influence(watch: gt.watch, loss: Tensor, **asked: Any) -> None:
    """What is timed of a trace."""
    watch.trace(loss).influence(**asked)


def cost(cell: lab.Cell) -> lab.Row:
    """Seconds of a trace, and of a training step without and with a Monitor."""
    model, optimizer, (train, *_) = built(cell)
    length, every = cell["length"], cell["every"]

    def steps(count: int, monitor: gt.Monitor | None = None) -> float:
        some = islice(losses(model, train, length, monitor), count)
        return seconds(lambda: lab.train(model, optimizer, some)) / count

    def trace() -> None:
        by = {gate: f"parts.{gate}" for gate in GATES["lstm"]}
        influence(*watched(model, train[: length + 1]), by=by, sample=10_000)

    _, *traces = (seconds(trace) for _ in range(1 + cell["rounds"]))  # the first takes longer
    _, plain = steps(every), steps(2 * every)
    with gt.Monitor(model, every=every) as monitor:
        _, monitored = steps(every, monitor), steps(2 * every, monitor)
    found = {"training step": [plain], "a trace": traces}
    return {"seconds": found, "monitor": {"plain": plain, "with": monitored}}


def scale(cell: lab.Cell) -> lab.Row:
    """Edges of Elman's network on so many words, and the best times of passes."""
    torch.manual_seed(cell["seed"])
    model, best = LanguageModel("elman", cell["words"], cell["units"]), dict.fromkeys(WAYS, inf)
    words = torch.randint(cell["words"], (cell["steps"] + 1,))
    for _ in range(cell["rounds"]):
        model.zero_grad()
        plain, (watch, loss) = loss_of(model, words, []), watched(model, words)
        runs: tuple[Callable[[], object], ...] = plain.backward, partial(influence, watch, loss)
        best = {way: min(best[way], seconds(run)) for way, run in zip(WAYS, runs)}
    edges = sum(edges for _, edges in arguments(watch.graph(loss)).values())
    return {"edges": edges, "seconds": best}


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


def counts(cell: lab.Cell) -> lab.Row:
    """Pairs and edges of Elman's arguments; the parameters of models that hold no numbers."""
    sizes, dense = SIZE.values(), (25_088, 4_096, 4_096, 1_000)
    wide = [3, *[64] * 2, *[128] * 2, *[256] * 3, *[512] * 6]
    with torch.device("meta"):
        layers = [nn.Conv2d(a, b, 3) for a, b in pairwise(wide)], map(nn.Linear, dense, dense[1:])
        models = {
            "Elman's network": LanguageModel("elman", *sizes),
            "embedding and nn.RNN": LanguageModel("rnn", *sizes),
            "embedding and nn.LSTM": LanguageModel("lstm", *sizes),
            "nn.RNN alone": nn.RNN(1_000, 1_000),
            "embedding and nn.LSTM, 100 units": LanguageModel("lstm", 10_000, 100),
            "VGG-16": nn.ModuleList(chain(*layers)),
        }
    parameters = {name: sum(p.numel() for p in m.parameters()) for name, m in models.items()}
    words = torch.randint(cell["words"], (cell["steps"] + 1,))
    watch, loss = watched(LanguageModel("elman", cell["words"], cell["units"]), words)
    vertices = sum(operator.size for operator in watch.graph(loss))
    found = arguments(watch.graph(loss))
    return {"parameters": parameters, "vertices": vertices, "arguments": found}


# What came out -----------------------------------------------------------------------------------

LEARNED = (
    *("layers", "words", "seeds", "above least loss", "operators, step 0", "trained"),
    *("% they carry", "in a long graph", "of operators", "billion edges"),
)
GATED = "model, words", "gate", "step 0", "trained"
COST = "layers", "seeds", "step, ms", "trace, ms", "% every 100 steps", "% of a Monitor"
SCALE = "n", "edges", "backward, ms", "trace, ms", "times backward"
DENSE = "argument", "edges of pairs", "of all edges"


def kept(row: lab.Row) -> list[lab.Row]:
    """Old rows of a text have no part; parameters are counted anew."""
    return [] if row.get("kind") == "parameters" else [{"part": "scale", **row}]


def groups(rows: Sequence[lab.Row], part: str, *names: str) -> list[tuple[Any, list[lab.Row]]]:
    """The rows of a part, all seeds of a cell together, under its names."""
    some = [row for row in rows if row["part"] == part]
    keys = dict.fromkeys(tuple(row[name] for name in names) for row in some)
    return [(key, [r for r in some if tuple(r[n] for n in names) == key]) for key in keys]


def told(values: Iterable[float], form: str = ".2f", times: float = 1.0) -> str:
    """The mean over seeds with its interval."""
    return lab.said(lab.interval([times * value for value in values]), form)


def _learned(rows: Sequence[lab.Row], words: int, kind: str, layers: int) -> list[object]:
    """A model: the loss, its paths before and after, and those in a long graph."""
    first, last = ([row["looks"][place] for row in rows] for place in (0, -1))
    ends = [row["graphs"]["end"][-1] for row in rows]
    lengths = [[each["path"]["length"] for each in looks] for looks in (first, last)]
    return [
        *(f"{NAMES[kind]}, {layers}", f"{words:,}", len(rows)),
        told(each["loss"] - each["source"] for each in last),
        *(told(some, ".1f") for some in lengths),
        told((each["path"]["coverage"] for each in last), ".1f", 100),
        told((end["length"] for end in ends), ".1f"),
        *(f"{ends[0]['operators']:,}", f"{ends[0]['edges'] / 1e9:.3g}"),
    ]


def _gates(rows: Sequence[lab.Row], words: int, kind: str, layers: int) -> list[list[object]]:
    """The share of paths through each gate of a layer alone, before training and after."""
    found: list[list[object]] = []
    for gate in GATES.get(kind, ()) if layers == 1 else ():
        shares = [
            [r["looks"][k]["influence"][f"layer 1, {gate}"][0] for r in rows] for k in (0, -1)
        ]
        found.append([f"{NAMES[kind]}, {words:,}", gate, *(told(s, ".0f", 100) for s in shares)])
    return found


def _cost(rows: Sequence[lab.Row], layers: int) -> list[object]:
    """Milliseconds, and what percent traces add to training; of traces the medians of a seed."""
    plain = [median(row["seconds"]["training step"]) for row in rows]
    traces = [sum(median(row["seconds"].get(way, [0])) for way in TRACE) for row in rows]
    added = [row["monitor"]["with"] / row["monitor"]["plain"] - 1 for row in rows]
    often = told((b / a for a, b in zip(plain, traces)), ".1f")
    times = (told(some, ".1f", 1e3) for some in (plain, traces))
    return [layers, len(rows), *times, often, told(added, ".0f", 100)]


def _texts(rows: Sequence[lab.Row]) -> list[list[object]]:
    """Elman's network on texts: edges, medians of milliseconds over seeds, and their ratio."""
    found: list[list[object]] = []
    for (steps,), some in groups(rows, "scale", "steps"):
        times = [median(row["seconds"][way] for row in some) * 1e3 for way in WAYS]
        found.append([steps, f"{some[0]['edges']:,}", *(f"{t:.0f}" for t in times), ""])
    ratios = [
        fmean(log(row["seconds"][WAYS[1]] / row["seconds"][WAYS[0]]) for row in some)
        for _, some in groups(rows, "scale", "seed")
    ]
    mean, low, high = map(exp, lab.interval(ratios))
    return [
        *found[:: max(len(found) // 3, 1)],
        ["all lengths", "", "", "", lab.said((mean, low, high))],
    ]


def _word(rows: Sequence[lab.Row]) -> str:
    """The edges that each word adds, by three ways to count."""
    texts = [row for row in rows if row["part"] == "scale"]
    (a, first), *_, (b, last) = sorted((row["steps"], row["edges"]) for row in texts)
    words, units, fused = texts[0]["words"], texts[0]["units"], (last - first) / (b - a)
    apart = fused - words**2 + 3 * words
    ways = (f"{x / 1e6:.3f}" for x in (fused, apart, apart + units * (words + units)))
    return "{} million edges a word, {} with log-softmax in pieces, {} with products".format(*ways)


def tables(rows: Sequence[lab.Row]) -> list[lab.Table]:
    """What models learned, paths, influence, cost; parameters, density, edges and time."""
    models = groups(rows, "training", "words", "kind", "layers")
    learned = [_learned(some, *key) for key, some in models]
    gates = [line for key, some in models for line in _gates(some, *key)]
    costs = [_cost(some, *key) for key, some in groups(rows, "cost", "layers")]
    (count,) = (row for row in rows if row["part"] == "counts")
    sizes = [(name, f"{size:,}") for name, size in count["parameters"].items()]
    every = sum(edges for _, edges in count["arguments"].values())
    dense = sorted(count["arguments"].items(), key=lambda each: -each[1][1])[:6]
    density = [(name, edges / pairs, f"{edges / every:.1%}") for name, (pairs, edges) in dense]
    density.append(("the whole graph", 2 * every / count["vertices"] ** 2, "100%"))
    return [
        ("Loss, and paths from the first layer", LEARNED, learned),
        ("Percent of the paths from words that take each gate", GATED, gates),
        ("A trace beside training (LSTM)", COST, costs),
        ("Parameters", ("model", "parameters"), sizes),
        (f"Density, {count['steps']} words", DENSE, density),
        (f"Elman's network: {_word(rows)}", SCALE, _texts(rows)),
    ]


def figure(rows: Sequence[lab.Row], path: Path) -> None:
    """The length of paths over training, of one layer."""
    curves = {}
    single = [row for row in rows if row.get("layers") == 1]
    for (words, kind), some in groups(single, "training", "words", "kind"):
        looks = [*zip(*(row["looks"] for row in some))]
        lengths = [fmean(each["path"]["length"] for each in moment) for moment in looks]
        curves[f"{NAMES[kind]} {words:,}"] = [each[0]["step"] for each in looks], lengths
    what = "Operators on paths from the first layer, by kind and words"
    lab.lines(path, what, "updates", "operators", curves, xscale="symlog")
