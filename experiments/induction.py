"""Which attention heads can a small network that has learned to copy not spare?

Expectation: influence and Taylor scores find such heads once they are learned, not before.

Method: two layers of four heads, no norm, no other layers. Texts repeat a segment of 8 to 16
different words; as periods differ, no fixed distance tells the next word. Adam trains until 95% of
the words that can be known are right. Truth: by how much the loss on 256 new texts rises if a head
gives its mean over texts; on 256 others, how far that agrees with itself. Scores are taken before
and after training, each at the cost of 32 backward passes: those that cost more see fewer texts.
Agreement is the rank correlation (Spearman) of score and truth over a network's eight heads.

Limits: tiny networks that need one circuit. Heads of a layer often do the same work; each alone
then costs little. The best baseline is the one that came out best.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy

import gradtrace as gt
from experiments import lab

SETTINGS = {
    "full": {"seeds": 20, "steps": 2000, "passes": 32, "texts": 256},
    "quick": {"seeds": 2, "steps": 240, "passes": 32, "texts": 256},
    "small": {"seeds": 2, "steps": 20, "passes": 1, "texts": 8},
}
WORDS, LENGTH, WIDTH, HEAD, IGNORED = 32, 32, 48, 12, -100
BATCH, RATE, EVERY, ENOUGH = 64, 0.003, 20, 0.95
SEEN = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
HEADS = [f"{layer}.{k}" for layer in ("one", "two") for k in range(4)]
TRACED = [f"{rule}{how}" for rule in ("greedy", "edge", "viterbi") for how in ("", ", weighted")]
TRACED += ["decomposition", "decomposition, size", *(f"mass, p = {p}" for p in (1, 2, 8))]
COLUMNS = "measure", "trained", "less best baseline", "finds the first", "scored untrained"
Scores = dict[str, float]
Draw = Callable[[int], tuple[Tensor, Tensor]]


class Head(nn.Module):
    """Causal attention; keeps the weights and the output of the last forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, HEAD, bias=False) for _ in range(3))
        self.result = nn.Linear(HEAD, WIDTH, bias=False)
        nn.init.normal_(self.result.weight, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        """What it adds to the stream. It reads a view, so that rules compare heads as wholes."""
        x = x.view_as(x)
        scores = self.query(x) @ self.key(x).mT / HEAD**0.5
        weights = scores.masked_fill(~SEEN, float("-inf")).softmax(-1)
        self.weights, self.added = weights.detach(), self.result(weights @ self.value(x))
        return self.added  # type: ignore[no-any-return]


class Copier(nn.Module):
    """Two layers of four heads; of a seed always the same."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(Random(f"induction/{seed}").getrandbits(63))
            self.stem = nn.Embedding(WORDS + LENGTH, WIDTH)  # words and positions
            self.one, self.two = (nn.ModuleList(Head() for _ in range(4)) for _ in range(2))
            self.out = nn.Linear(WIDTH, WORDS)
            nn.init.normal_(self.stem.weight, std=0.5)
        self.heads: dict[str, Any] = {name: self.get_submodule(name) for name in HEADS}

    def forward(self, x: Tensor) -> Any:
        """Scores of the next word: (texts, length, words)."""
        h = self.stem(x) + self.stem(torch.arange(WORDS, WORDS + LENGTH))
        for layer in (self.one, self.two):
            h = h + torch.stack([head(h) for head in layer]).sum(0)
        return self.out(h)

    def losses(self, x: Tensor, y: Tensor) -> Tensor:
        """The mean loss of every text, over the words that can be known."""
        return cross_entropy(self(x).mT, y, reduction="none").sum(1) / (y != IGNORED).sum(1)


def draw(source: Generator, texts: int) -> tuple[Tensor, Tensor]:
    """Texts, and the next word wherever it can be told from what came before."""
    period = torch.randint(8, 17, (texts, 1), generator=source)
    segment = torch.rand(texts, WORDS, generator=source).argsort(1)
    place = torch.arange(LENGTH + 1)[None]
    words = segment.gather(1, place % period)
    return words[:, :-1], words[:, 1:].masked_fill(place[:, :-1] < period, IGNORED)


def cells(settings: lab.Cell) -> list[lab.Cell]:
    """A network for each seed."""
    rest = {name: settings[name] for name in ("steps", "passes", "texts")}
    return [{"seed": seed, **rest} for seed in range(settings["seeds"])]


def measure(cell: lab.Cell) -> lab.Row:
    """Train a network; score its heads before and after, and measure what is true."""

    def drawn(what: str) -> Draw:
        number = Random(f"induction/{cell['seed']}/{what}").getrandbits(63)
        return partial(draw, Generator().manual_seed(number))

    model, held = Copier(cell["seed"]), drawn("held")(cell["texts"])
    before = scores(model, drawn("scored 0"), cell["passes"])
    steps, right = trained(model, drawn("batches"), held, cell["steps"])
    after = scores(model, drawn(f"scored {steps}"), cell["passes"])
    truth, again = (ablated(model, drawn(f"truth {k}")(cell["texts"])) for k in range(2))
    found = {"steps": steps, "right": right, "copied": copied(model, *held)}
    return {**found, "truth": truth, "again": again, "before": before, "after": after}


def trained(model: Copier, batches: Draw, held: Any, most: int) -> tuple[int, float]:
    """How many steps it took, and the share of words that are right after them."""
    optimizer, (x, y) = torch.optim.Adam(model.parameters(), lr=RATE, fused=True), held
    step, right = 0, 0.0
    while step < most and right < ENOUGH:
        lab.train(model, optimizer, [lambda: model.losses(*batches(BATCH)).mean()] * EVERY)
        right, step = float((model(x).argmax(-1) == y)[y != IGNORED].double().mean()), step + EVERY
    return step, right


def ablated(model: Copier, batch: tuple[Tensor, Tensor]) -> Scores:
    """By how much the loss rises without each head."""
    without = gt.ablate(model, HEADS, how="mean")
    table = without.effects(lambda _, b: model.losses(*b).mean(), [batch])
    return dict(zip(table.names, table.column("rise")))


@torch.no_grad()
def copied(model: Copier, x: Tensor, y: Tensor) -> Scores:
    """The weight of each head of the second layer on the word to copy."""
    model(x)
    same, known = (x[:, None] == y[:, :, None]) & SEEN, y != IGNORED
    return {n: float((model.heads[n].weights * same).sum(-1)[known].mean()) for n in HEADS[4:]}


def scores(model: Copier, texts: Draw, passes: int) -> dict[str, Scores]:
    """What all measures say."""
    model(texts(256)[0])
    mean = {name: head.added.detach().mean(0) for name, head in model.heads.items()}
    model.requires_grad_(False).stem.requires_grad_()  # all paths begin before the heads
    found = traced(model, texts, passes)
    model.requires_grad_()
    losses = model.losses(*texts(passes))
    for name, head in model.heads.items():
        x, own = head.added.detach(), [*head.parameters()]
        g, *gradients = torch.autograd.grad(losses.mean(), [head.added, *own], retain_graph=True)
        effect = (g * (x - mean[name])).sum((1, 2))
        for measure, number in {
            "Taylor, signed": -effect.sum(),
            "Taylor, absolute": effect.abs().sum(),
            "gradient × activation": (g * x).abs().sum(),
            "activation deviation": (x - mean[name]).norm() / x.numel() ** 0.5,
            "gradient norm": nn.utils.parameters_to_vector(gradients).norm(),
            "parameter norm": nn.utils.parameters_to_vector(own).detach().norm(),
        }.items():
            found.setdefault(measure, {})[name] = float(number)
    return found


def traced(model: Copier, texts: Draw, passes: int) -> dict[str, Scores]:
    """Influence by each rule, the gradient through each head, and mass."""

    def trace(cost: int, rule: str = "greedy") -> Any:  # cost: in backward passes
        with gt.watch(model) as watch:
            losses = model.losses(*texts(max(1, passes // cost)))
        return watch.trace(losses, rule=rule)

    found = {}
    for rule in ("greedy", "edge", "viterbi"):
        table = trace(4, rule).influence(HEADS)
        for name, column in ((rule, "share"), (f"{rule}, weighted", "weighted")):
            found[name] = dict(zip(table.names, table.column(column)))
    for p in (1, 2, 8):
        found[f"mass, p = {p}"] = trace(4).mass(HEADS, p=p).shares
    split = trace(len(HEADS) + 1).decompose(HEADS)
    size = {row.name: row.norm / row.whole_norm for row in split}
    return found | {"decomposition": split.shares, "decomposition, size": size}


def kept(row: lab.Row) -> list[lab.Row]:
    """A row of docs/experiments has pairs of heads and integrated gradients, too."""
    before, after = (dict(look["scores"]["heads"]) for look in row["looks"])
    for scored in (before, after):
        del scored["integrated gradients"]
        scored["gradient × activation"] = scored.pop("|gradient × activation|")
    found = {name: row[name]["heads"] for name in ("truth", "again")}
    found["copied"] = {name: row["attention"][name] for name in HEADS[4:]}
    return [{**row, **found, "before": before, "after": after}]


def agreement(truth: Scores, said: Scores) -> float:
    """The rank correlation; equal scores share a rank, and it is 0 if all are equal."""
    values = [[each[name] for name in HEADS] for each in (truth, said)]
    x = torch.tensor(values, dtype=torch.float64).nan_to_num()
    a, b = (x[:, :, None] - x[:, None]).sign().sum(2)
    return float(a @ b / (a.norm() * b.norm()).clamp_min(1e-9))


def tables(rows: Sequence[lab.Row]) -> list[lab.Table]:
    """Agreement with ablation by measure, and what networks have learned."""
    names = [*TRACED, *(m for m in rows[0]["after"] if m not in TRACED)]
    right = {m: [agreement(row["truth"], row["after"][m]) for row in rows] for m in names}
    best = max(names[len(TRACED) :], key=lambda m: fmean(right[m]))
    found: list[Sequence[object]] = []
    for m in names:
        less = lab.spoken([a - b for a, b in zip(right[m], right[best])]) if m in TRACED else "–"
        both = [(row["truth"], row["after"][m]) for row in rows]
        first = sum(max(a, key=a.get) == max(b, key=b.get) for a, b in both)
        before = lab.spoken([agreement(row["truth"], row["before"][m]) for row in rows])
        found.append((m, lab.spoken(right[m]), less, first, before))
    again = lab.spoken([agreement(row["truth"], row["again"]) for row in rows])
    found.append(("ablation, on other texts", again, "–", "–", "–"))
    learned = sum(row["right"] >= ENOUGH for row in rows)
    of = {"rise of the loss without the head that matters most": "truth"}
    of["attention of a head to the word to copy, the largest"] = "copied"
    told = [(what, lab.spoken([max(row[k].values()) for row in rows])) for what, k in of.items()]
    return [
        (f"Rank correlation with ablation (best baseline: {best})", COLUMNS, found),
        (f"What {learned} of {len(rows)} networks have learned", ("of a network", "mean"), told),
    ]


def figure(rows: Sequence[lab.Row], path: Path) -> None:
    """Agreement before and after training, by measure."""
    names, curves = [*rows[0]["after"]][::-1], {}
    for look in ("before", "after"):
        of = [fmean(agreement(row["truth"], row[look][m]) for row in rows) for m in names]
        curves[f"{look} training"] = of, names
    lab.lines(path, "Agreement with ablation", "rank correlation", "", curves)
