"""What do traces show of a language model as large as the Penn Treebank's, and what do they cost?

Expectation: the chapter supposes paths far shorter than the graph, in a feed-forward network in
proportion to its layers. It calls LSTM and GRU easier to train than RNN.

Method: text of a grammar, whose least possible loss is known. *training*: models learn by Adam, the
gradient clipped to 1, state carried on; over training one held-out batch is traced (greedy), and
paths from the first layer's weights are followed; in the end also on a longer text. *cost*: of a
trace of 10,000 elements beside a step. Intervals draw weights and text.

Limits: no natural language; rates were not tuned; one batch is traced. Published large models and
costs are of one GPU and gradtrace 0.1.0; GRU was compared in a smaller size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import cycle, islice, pairwise
from math import isfinite
from pathlib import Path
from statistics import fmean, median
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradtrace as gt
from experiments import data, lab

ALONE = True  # it measures time
ROWS = ("language-model", "language-model-gru")
LARGE: dict[str, Any] = {"words": 10_000, "units": 1_000, "corpus": 1_000_000, "rate": 0.001}
LARGE |= {"batch": 20, "length": 35}
LONG = {**LARGE, "long": 80, "moments": [0, 20, 50, 100, 200, 400, 700, 1_000, 1_500, 2_000, 3_000]}
LESS = {**LONG, "words": 1_000, "units": 100, "corpus": 200_000, "rate": 0.003}
LESS["moments"] = LONG["moments"][:7]
TINY = {"words": 200, "units": 16, "batch": 4, "length": 6, "corpus": 4_000, "rate": 0.01}
TINY |= {"long": 6, "steps": 5}
ONE = [{"kind": kind, "layers": 1} for kind in ("lstm", "rnn", "gru", "forward")]
DEEP = [{"kind": kind, "layers": n} for kind in ("lstm", "rnn") for n in (2, 3)]
DEEP += [{"kind": "forward", "layers": n} for n in (1, 2, 4, 8)]
SETTINGS: dict[str, dict[str, Any]] = {  # of each part: what is shared, what differs, seeds
    "full": {
        "training": [(LONG, ONE[:2], 5), (LONG, DEEP, 3), (LESS, ONE[:3], 4)],
        "cost": [({**LARGE, "rounds": 5, "steps": 100}, [ONE[0], *DEEP[:2]], 5)],
    },
    "quick": {
        "training": [({**TINY, "moments": [0, 30, 60]}, ONE, 2)],
        "cost": [({**TINY, "rounds": 2}, ONE[:1], 2)],
    },
    "small": {
        "training": [({**TINY, "moments": [0, 2, 4]}, ONE, 1)],
        "cost": [({**TINY, "rounds": 1}, ONE[:1], 1)],
    },
}
NAMES = {"lstm": "LSTM", "rnn": "RNN", "gru": "GRU", "forward": "feed-forward"}
FUSED = {"lstm": nn.LSTM, "rnn": nn.RNN, "gru": nn.GRU}
WINDOW = 4  # words that a feed-forward model reads
TRACE = "a trace", "forward pass, watched", "recording", "influence, sampled"
LEARNED = (
    *("layers", "words", "seeds", "above least loss", "operators, step 0", "trained"),
    *("% they carry", "in a long graph", "of operators"),
)
COST = "layers", "seeds", "step, ms", "trace, ms", "% every 100 steps"


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
    """A model in training, or what its traces cost."""
    return training(cell) if cell["part"] == "training" else cost(cell)


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
        self.out = nn.Linear(units, words)

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
        h = c = x.new_zeros(*x.shape[1:-1], w.shape[1])
        outs = []
        for given in x.unbind(0):
            known = F.linear(h, w, b)
            if self.kind == "lstm":
                i, f, g, o = (given + known).chunk(4, 1)
                c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
                h = torch.sigmoid(o) * torch.tanh(c)
            elif self.kind == "gru":
                (r, z, n), (rh, zh, nh) = given.chunk(3, 1), known.chunk(3, 1)
                z, n = torch.sigmoid(z + zh), torch.tanh(n + torch.sigmoid(r + rh) * nh)
                h = (1 - z) * n + z * h
            else:
                h = torch.tanh(given + known)
            outs.append(h)
        return torch.stack(outs)


def loss_of(model: nn.Module, words: Tensor, states: list[Any]) -> Tensor:
    """The mean cross entropy of each next word."""
    scores = model(words[:-1], states)
    return F.cross_entropy(scores.flatten(0, -2), words[1:].flatten())


def losses(model: LanguageModel, words: Tensor, length: int) -> Iterator[Callable[[], Tensor]]:
    """The loss on each window of a text, over and over; the state is carried on."""
    states: list[Any] = [None] * len(model.layers)
    for first in cycle(range(0, len(words) - length, length)):
        yield partial(loss_of, model, words[first : first + length + 1], states)


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
    model = LanguageModel(*(cell[k] for k in ("kind", "words", "units", "layers"))).to(where)
    optimizer = torch.optim.Adam(model.parameters(), lr=cell["rate"])

    def clip(*_: object) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    optimizer.register_step_pre_hook(clip)
    words, surprisal = data.corpus(cell["corpus"], cell["words"], cell["seed"])
    cut, batch = round(0.9 * len(words)), cell["batch"]
    parts = words[:cut], words[cut:], surprisal[cut:]
    streams = [part[: len(part) // batch * batch].view(batch, -1).T.to(where) for part in parts]
    return model, optimizer, streams


def training(cell: lab.Cell) -> lab.Row:
    """Train a model, look at it at each moment, and at its graph on a long text in the end."""
    model, optimizer, (train, *held) = built(cell)
    steps, looks = losses(model, train, cell["length"]), []
    for last, step in pairwise([0, *cell["moments"]]):
        lab.train(model, optimizer, islice(steps, step - last))
        looks.append({"step": step, **look(model, held, cell["length"])})
    watch, loss = watched(model, held[0][: cell["long"] + 1])
    graph, found = watch.graph(loss), paths(watch.trace(loss))
    return {"looks": looks, "graphs": {"end": [{**found, "operators": len(graph)}]}}


def look(model: LanguageModel, held: Sequence[Tensor], length: int) -> lab.Row:
    """The held-out loss, the least possible, and the paths."""
    words, surprisal = held
    windows = min(30, (len(words) - 1) // length)
    with torch.no_grad():
        loss = fmean(float(run()) for run in islice(losses(model, words, length), windows))
    least = float(surprisal[1 : windows * length + 1].mean())
    watch, traced = watched(model, words[: length + 1])
    return {"loss": loss, "source": least, "path": paths(watch.trace(traced))}


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


def cost(cell: lab.Cell) -> lab.Row:
    """Seconds of a training step, and of a trace."""
    model, optimizer, (train, *_) = built(cell)

    def steps() -> None:
        some = losses(model, train, cell["length"])
        lab.train(model, optimizer, islice(some, cell["steps"]))

    def trace() -> None:
        watch, loss = watched(model, train[: cell["length"] + 1])
        watch.trace(loss).influence(sample=10_000)

    _, *traces = (seconds(trace) for _ in range(1 + cell["rounds"]))  # the first takes longer
    _, *plain = (seconds(steps) / cell["steps"] for _ in range(3))
    return {"seconds": {"training step": plain, "a trace": traces}}


def kept(row: lab.Row) -> list[lab.Row]:
    """Rows of docs/experiments are as those of today."""
    return [row]


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
        f"{ends[0]['operators']:,}",
    ]


def _cost(rows: Sequence[lab.Row], layers: int) -> list[object]:
    """Milliseconds, medians of a seed, and what percent traces add to training."""
    plain = [median(row["seconds"]["training step"]) for row in rows]
    traces = [sum(median(row["seconds"].get(way, [0])) for way in TRACE) for row in rows]
    often = told((b / a for a, b in zip(plain, traces)), ".1f")
    return [layers, len(rows), *(told(some, ".1f", 1e3) for some in (plain, traces)), often]


def tables(rows: Sequence[lab.Row]) -> list[lab.Table]:
    """What models learned, their paths, and what traces cost."""
    models = groups(rows, "training", "words", "kind", "layers")
    learned = [_learned(some, *key) for key, some in models]
    costs = [_cost(some, *key) for key, some in groups(rows, "cost", "layers")]
    return [
        ("Loss, and paths from the first layer", LEARNED, learned),
        ("A trace beside training (LSTM)", COST, costs),
    ]


def figure(rows: Sequence[lab.Row], path: Path) -> None:
    """The length of paths over training, of one layer."""
    curves, single = {}, [row for row in rows if row.get("layers") == 1]
    for (words, kind), some in groups(single, "training", "words", "kind"):
        looks = [*zip(*(row["looks"] for row in some))]
        lengths = [fmean(each["path"]["length"] for each in moment) for moment in looks]
        curves[f"{NAMES[kind]} {words:,}"] = [each[0]["step"] for each in looks], lengths
    title = "Operators on paths from the first layer, by kind and words"
    lab.lines(path, title, "updates", "operators", curves, xscale="symlog")
