"""Does gradient come by query and key where a model looks whether its first word comes again?

Du et al. (2023) took the largest path from each word to the score of the right answer, by the four
branches that read the input of attention. Most of it ran through keys (.0301; query .0174, skip
.0094, value .00095): the repeated word's by its key (.269), the first word's by its query (.174).

Expectation: both hold where softmax and layer norm are written in pieces, as in their library, and
often not where each is one operator of PyTorch. Path patching, the witness, knows no operators.

Method: their task (20 words, one never used, length 10, half of the sequences with one repetition,
10,000, 70% to train), model (a layer of BERT, hidden 16, 2 heads, intermediate 32, no dropout; the
answer is read off the first word) and training (Adam 0.001, batches of 32, 42 epochs). On held-out
sequences the branches are four leaves of one value. Their measure: of what operators hand back,
sums inside, the most positive and the most negative, sorted again after every operator; a word has
that of its largest element, the branch that wins gets it. It is taken on two writings of equal
values: ``theirs``, in pieces, with variance as E[x²] - E[x]² and paths through the shift of
softmax, and ``fused``; beside them unsorted, on fused operators also the largest path of elements
and the gradient's size. Path patching: one branch reads another word, so that the answer turns; the
effect is by how much the score of the right answer falls. Models below 95% right are left out.

Limits: one task, one small architecture, one way to train it. Patching replaces a word in all that
a branch reads, and asks of means over sequences: one of several questions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy, gelu

import gradtrace as gt
from experiments import lab

FULL = {"sequences": 10_000, "epochs": 42, "rate": 0.001, "samples": 1000}
SHORT = {"sequences": 4_000, "epochs": 26, "rate": 0.003, "samples": 200}
SETTINGS = {
    "full": {"seeds": 20, "learned": 0.95, **FULL},
    "quick": {"seeds": 2, "learned": 0.0, **SHORT},
    "small": {"seeds": 2, "learned": 0.0, **SHORT, "sequences": 100, "epochs": 1},
}
WORDS, LENGTH, HIDDEN, HEADS, WIDE = 20, 10, 16, 2, 32
BATCH, START, EPSILON = 32, 0.02, 1e-12
BRANCHES = ("key", "query", "skip", "value")
CLAIMED = {"first": "query", "repeated": "key"}
THEIRS = {"key": 0.0301, "query": 0.0174, "skip": 0.0094, "value": 0.00095}
THEIR_WORDS = {("first", "query"): 0.174, ("repeated", "key"): 0.269}
MEASURES = "theirs", "fused", "theirs, unsorted", "fused, unsorted", "largest, fused", "gradient"


class Encoder(nn.Module):
    """A layer of BERT with a classifier on the first word; of a seed always the same."""

    pieces = False  # whether softmax and norms are written as theirs, or are PyTorch's

    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.words, self.places = nn.Embedding(WORDS, HIDDEN), nn.Embedding(LENGTH, HIDDEN)
            self.query, self.key, self.value = (nn.Linear(HIDDEN, HIDDEN) for _ in range(3))
            self.mix = nn.Linear(HIDDEN, HIDDEN)
            self.wide, self.narrow = nn.Linear(HIDDEN, WIDE), nn.Linear(WIDE, HIDDEN)
            self.pool, self.answer = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, 2)
            for each in self.children():
                nn.init.normal_(each.get_parameter("weight"), std=START)
                if isinstance(each, nn.Linear):
                    nn.init.zeros_(each.bias)
        self.before, self.after, self.last = (nn.LayerNorm(HIDDEN, EPSILON) for _ in range(3))

    def norm(self, x: Tensor, by: nn.LayerNorm) -> Any:
        """Layer norm; in pieces, with the variance as the mean of x² less the mean's square."""
        if not self.pieces:
            return by(x)
        mean, square = x.sum(-1, keepdim=True) / HIDDEN, x.pow(2).sum(-1, keepdim=True) / HIDDEN
        return by.weight * ((x - mean) / (square - mean.pow(2) + by.eps).sqrt()) + by.bias

    def softmax(self, x: Tensor) -> Tensor:
        """Softmax; in pieces, ``exp(x - logsumexp(x))``, shifted by the largest element."""
        if not self.pieces:
            return x.softmax(-1)
        top = x.max(-1, keepdim=True).values
        return (x - ((x - top).exp().sum(-1, keepdim=True).log() + top)).exp()

    def embed(self, words: Tensor) -> Any:
        """The input of attention: (sequence, word, hidden)."""
        return self.norm(self.words(words) + self.places.weight, self.before)

    def read(self, x: Mapping[str, Tensor]) -> Any:
        """From the input of attention, by branch, to the two scores."""
        query, key, value = (
            of(x[name]).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for name, of in (("query", self.query), ("key", self.key), ("value", self.value))
        )
        pattern = self.softmax(query @ key.mT / math.sqrt(HIDDEN // HEADS))
        mixed = self.mix((pattern @ value).transpose(1, 2).flatten(2))
        u = self.norm(x["skip"] + mixed, self.after)
        first = self.norm(u + self.narrow(gelu(self.wide(u))), self.last)[:, 0]
        return self.answer(torch.tanh(self.pool(first)))

    def forward(self, words: Tensor) -> Any:
        """The two scores; of the first word only the query and the skip are needed."""
        x = self.embed(words)
        return self.read({"key": x, "value": x, "query": x[:, :1], "skip": x[:, :1]})


class Data(NamedTuple):
    """Sequences, whether the first word comes again, and where (0: nowhere)."""

    words: Tensor
    labels: Tensor
    places: Tensor

    def part(self, which: slice | Tensor) -> Data:
        """Some of them."""
        return Data(*(each[which] for each in self))


def sequences(count: int, seed: int) -> Data:
    """Half of them with one repetition of the first word; word 0 does not occur."""
    source = Generator().manual_seed(seed)
    first = torch.randint(1, WORDS, (count, 1), generator=source)
    step = torch.randint(1, WORDS - 1, (count, LENGTH), generator=source)  # to another word
    words = 1 + (first - 1 + step) % (WORDS - 1)
    words[:, :1] = first
    labels = torch.randperm(count, generator=source) % 2
    places = torch.randint(1, LENGTH, (count,), generator=source) * labels
    return Data(words.scatter(1, places[:, None], first), labels, places)


def cells(settings: lab.Cell) -> list[lab.Cell]:
    """A model for each seed."""
    rest = {name: settings[name] for name in ("learned", *FULL)}
    return [{"seed": seed, **rest} for seed in range(settings["seeds"])]


def measure(cell: lab.Cell) -> lab.Row:
    """Train a model; on held-out sequences, take all measures, and patch."""
    data, end = sequences(cell["sequences"], cell["seed"]), 7 * cell["sequences"] // 10
    model, rest = trained(data.part(slice(end)), cell), data.part(slice(end, None))
    accuracy = float((model(rest.words).argmax(1) == rest.labels).double().mean())
    some, means = rest.part(slice(cell["samples"])), {}
    every = torch.arange(LENGTH).expand(len(some.words), -1)
    again = (every == some.places[:, None]) & (every > 0)
    groups = {"all": every >= 0, "first": every == 0, "repeated": again}
    for name, best in measured(model, model.embed(some.words), some.labels).items():
        won = torch.where(best == best.amax(0), best, 0.0)
        of = {group: won[:, where].mean(1).tolist() for group, where in groups.items()}
        means[name] = {group: dict(zip(BRANCHES, values)) for group, values in of.items()}
    falls = patched(model, some.part(some.labels > 0), cell["seed"])
    return {"accuracy": accuracy, "means": means, "patching": falls}


def trained(data: Data, cell: lab.Cell) -> Encoder:
    """A model after all epochs, in float64; its weights need no gradient any more."""
    model, random = Encoder(cell["seed"]), Generator().manual_seed(cell["seed"])

    def loss_of(batch: Tensor) -> Tensor:
        return cross_entropy(model(data.words[batch]), data.labels[batch])

    orders = (torch.randperm(len(data.words), generator=random) for _ in range(cell["epochs"]))
    losses = (partial(loss_of, batch) for each in orders for batch in torch.split(each, BATCH))
    lab.train(model, torch.optim.Adam(model.parameters(), lr=cell["rate"], fused=True), losses)
    return model.double().requires_grad_(False)


def measured(model: Encoder, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """The largest element of each word by all measures: (branch, sequence, word)."""
    found: dict[str, Mapping[str, Tensor]] = {}
    for name, model.pieces in (("theirs", True), ("fused", False)):
        leaves = {branch: x.clone().requires_grad_() for branch in BRANCHES}
        score = model.read(leaves).gather(1, labels[:, None]).sum()
        found[name] = most_positive(score, leaves, True)
        found[f"{name}, unsorted"] = most_positive(score, leaves, False)
    found["gradient"] = {k: g.abs() for k, g in gt.backward(score, names=leaves).items()}
    found["largest, fused"] = gt.backward(score, gt.semirings.MAX, names=leaves)
    return {k: torch.stack([v[name].amax(-1) for name in BRANCHES]) for k, v in found.items()}


@torch.no_grad()
def most_positive(output: Any, leaves: Mapping[str, Tensor], sort: bool) -> dict[str, Tensor]:
    """The most positive path of operators from each element of the leaves, as their library has it.

    A value has the most positive and the most negative weight of the paths behind it. An operator
    is applied to both; as a negative derivative swaps them, what it hands back is sorted again.
    Where a value is used twice, the larger and the smaller are kept.
    """
    held, found = {output.grad_fn: (torch.ones_like(output),) * 2}, {}
    for node in ordered(output.grad_fn):
        pair = held.pop(node)
        if hasattr(node, "variable"):
            found[id(node.variable)] = torch.maximum(*pair)
            continue
        given = [each if isinstance(each, tuple) else (each,) for each in map(node, pair)]
        for (child, slot), *parts in zip(node.next_functions, *given):
            if child is not None:
                leaf = getattr(child, "variable", None)
                like = child._input_metadata[slot] if leaf is None else leaf
                high, low = (part.sum_to_size(tuple(like.shape)) for part in parts)
                if sort:
                    high, low = torch.maximum(high, low), torch.minimum(high, low)
                top, bottom = held.get(child, (high, low))
                held[child] = torch.maximum(top, high), torch.minimum(bottom, low)
    return {name: found[id(leaf)] for name, leaf in leaves.items()}


def ordered(root: Any) -> list[Any]:
    """All operators behind one, each before those that it hands gradient to."""
    found: dict[Any, None] = {}

    def visit(node: Any) -> None:
        for child, _ in node.next_functions:
            if child is not None and child not in found:
                visit(child)
        found[node] = None

    visit(root)
    return [*found][::-1]


def patched(model: Encoder, data: Data, seed: int) -> dict[str, dict[str, float]]:
    """By how much the score of the right answer falls if one branch reads another word."""
    x, found = model.embed(data.words), {}
    clean = dict.fromkeys(BRANCHES, x)
    for group in CLAIMED:
        free = torch.rand(len(x), WORDS, generator=Generator().manual_seed(seed))
        free[:, 0] = -1.0
        free.scatter_(1, data.words if group == "first" else data.words[:, :1], -1.0)
        at = (data.places * (group == "repeated"))[:, None]
        other = model.embed(data.words.scatter(1, at, free.argmax(1, keepdim=True)))
        falls = {k: model.read(clean) - model.read({**clean, k: other}) for k in BRANCHES}
        found[group] = {name: float(fall[:, 1].mean()) for name, fall in falls.items()}
    return found


def kept(row: lab.Row) -> list[lab.Row]:
    """A row of docs/experiments has ten models, and a third writing."""
    return [{**model, "learned": 0.95} for model in row["models"]]


def share(holds: Sequence[bool]) -> str:
    """In how many models something holds, with Wilson's 95% interval of their share.

    >>> share([True] * 10 + [False] * 9)
    '10 [32%, 73%]'
    """
    n, hits, z = len(holds), sum(holds), NormalDist().inv_cdf(0.975)
    middle, half = hits / n + z * z / (2 * n), z * math.sqrt(hits * (n - hits) / n + z * z / 4) / n
    low, high = ((middle + sign * half) / (1 + z * z / n) for sign in (-1, 1))
    return f"{hits} [{low:.0%}, {high:.0%}]"


def fronts(found: Mapping[str, Mapping[str, float]]) -> dict[str, str]:
    """The branch with the largest value, by word."""
    return {group: max(BRANCHES, key=lambda name: found[group][name]) for group in CLAIMED}


def holding(rows: Sequence[lab.Row], kind: str) -> dict[str, list[bool]]:
    """For each model that learned, which claims hold."""
    some = [row for row in rows if row["accuracy"] >= row["learned"]]
    mine = [fronts(row["patching"] if kind == "patching" else row["means"][kind]) for row in some]
    found = {f"{g}: {name}": [each[g] == name for each in mine] for g, name in CLAIMED.items()}
    does = [fronts(row["patching"]) for row in some]
    both = [each == CLAIMED for each in mine]
    return {**found, "both": both, "as patching": [a == b for a, b in zip(mine, does)]}


def tables(rows: Sequence[lab.Row]) -> list[lab.Table]:
    """Claims by measure, and each branch by word: patched, by their measure, and by theirs."""
    some = [row for row in rows if row["accuracy"] >= row["learned"]]
    held = {kind: holding(rows, kind) for kind in (*MEASURES, "patching")}
    claims = [(kind, *map(share, each.values())) for kind, each in held.items()]
    branches = []
    for group, name in [(group, name) for group in ("all", *CLAIMED) for name in BRANCHES]:
        theirs = THEIRS[name] if group == "all" else THEIR_WORDS.get((group, name), "–")
        means = [[row["means"][kind][group][name] for row in some] for kind in MEASURES[:2]]
        told = [lab.said(lab.interval(each), ".4f") for each in means]
        fall = lab.spoken([r["patching"][group][name] for r in some]) if group != "all" else "–"
        branches.append((group, name, theirs, *told, fall))
    what = "word", "branch", "Du et al.", "theirs", "fused", "fall if patched"
    learned = f"{len(some)} of {len(rows)} are at least {rows[0]['learned']:.0%} right"
    return [
        (f"Models in which claims hold ({learned})", ("measure", *held["fused"]), claims),
        ("What branches win, and what they do", what, branches),
    ]


def figure(rows: Sequence[lab.Row], path: Path) -> None:
    """In which share of models claims hold, by measure."""
    kinds = ("patching", *MEASURES[::-1])
    held = [holding(rows, kind) for kind in kinds]
    curves = {k: ([sum(each[k]) / len(each[k]) for each in held], kinds) for k in held[0]}
    del curves["both"]
    lab.lines(path, "Models in which claims hold", "share", "", curves)
