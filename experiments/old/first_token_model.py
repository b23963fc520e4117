"""The task and the model of ``first_token``: one layer of BERT that looks for its first word again.

Sizes and training are those of Du et al. (2023): their file of settings, not only their paper.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gradtrace.experiments.harness.findings import Tick

WORDS, LENGTH, HIDDEN, HEADS, WIDE = 20, 10, 16, 2, 32
BATCH, RATE, START, EPSILON = 32, 0.001, 0.02, 1e-12
BRANCHES = ("key", "query", "skip", "value")


class Skip(nn.Module):
    """``out = x``: an operator of its own, so that the branch has a place in the graph."""

    def forward(self, x: Tensor) -> Tensor:
        """A copy."""
        return x.clone()


class Norm(nn.LayerNorm):
    """Layer norm, which can be written as Du et al. do: the variance as ``mean of x² - mean²``."""

    by_hand = False

    def forward(self, x: Tensor) -> Tensor:
        """The same values either way."""
        if not self.by_hand:
            return super().forward(x)
        mean, square = x.sum(-1, keepdim=True) / HIDDEN, x.pow(2).sum(-1, keepdim=True) / HIDDEN
        deviation = (square - mean.pow(2) + self.eps).sqrt()
        out: Tensor = self.weight * ((x - mean) / deviation) + self.bias
        return out


def softmax_by_hand(x: Tensor) -> Tensor:
    """``exp(x - logsumexp(x))`` as they write it, with paths through the largest element."""
    top = x.max(-1, keepdim=True).values
    sums = (x - top).exp().sum(-1, keepdim=True).log() + top
    return (x - sums).exp()


class Attention(nn.Module):
    """``norm(skip(x) + mix(softmax(query(x)·key(x)ᵀ / √d) · value(x)))``, each branch a module."""

    by_hand = False

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(HIDDEN, HIDDEN) for _ in range(3))
        self.skip, self.mix = Skip(), nn.Linear(HIDDEN, HIDDEN)
        self.norm = Norm(HIDDEN, EPSILON)

    def forward(self, x: Mapping[str, Tensor]) -> Tensor:
        """``x`` is the input by branch: the same tensor, or a leaf for each."""
        q, k, v = (
            getattr(self, name)(x[name]).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for name in ("query", "key", "value")
        )  # (batch, head, word, hidden / heads)
        scores = q @ k.transpose(-1, -2) / math.sqrt(HIDDEN // HEADS)
        pattern = softmax_by_hand(scores) if self.by_hand else scores.softmax(-1)
        read = (pattern @ v).transpose(1, 2).flatten(2)
        out: Tensor = self.norm(self.skip(x["skip"]) + self.mix(read))
        return out


class Encoder(nn.Module):
    """One layer of BERT with a classifier on the first word."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, HIDDEN), nn.Embedding(LENGTH, HIDDEN)
        self.norm, self.last = Norm(HIDDEN, EPSILON), Norm(HIDDEN, EPSILON)
        self.attention = Attention()
        self.wide, self.narrow = nn.Linear(HIDDEN, WIDE), nn.Linear(WIDE, HIDDEN)
        self.pool, self.answer = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, 2)
        for each in self.modules():
            if isinstance(each, (nn.Linear, nn.Embedding)):
                nn.init.normal_(each.weight, std=START)
            if isinstance(each, nn.Linear):
                nn.init.zeros_(each.bias)

    def write(self, by_hand: bool) -> None:
        """Write softmax and norms as Du et al. do, or leave them to PyTorch."""
        for each in self.modules():
            if isinstance(each, (Norm, Attention)):
                each.by_hand = by_hand

    def embed(self, words: Tensor) -> Tensor:
        """x, the input of attention: (batch, word, hidden)."""
        x: Tensor = self.norm(self.words(words) + self.places.weight)
        return x

    def read(self, x: Mapping[str, Tensor]) -> Tensor:
        """From x, by branch, to the two scores."""
        u = self.attention(x)
        wide = self.narrow(nn.functional.gelu(self.wide(u)))
        first = self.last(u + wide)[:, 0]
        scores: Tensor = self.answer(torch.tanh(self.pool(first)))
        return scores

    def forward(self, words: Tensor) -> Tensor:
        """(batch, word) -> (batch, 2). The answer is read off the first word, so that only its
        query and its skip are needed.
        """
        x = self.embed(words)
        first = x[:, :1]
        return self.read({"key": x, "value": x, "query": first, "skip": first})


class Data(NamedTuple):
    """Sequences, whether the first word comes again, and where (0: nowhere)."""

    words: Tensor
    labels: Tensor
    places: Tensor

    def part(self, start: int, stop: int) -> Data:
        """Some of them."""
        return Data(*(field[start:stop] for field in self))

    def repeated(self) -> Data:
        """Those whose first word comes again."""
        return Data(*(field[self.labels > 0] for field in self))


def sequences(count: int, seed: int) -> Data:
    """Half of them with one repetition of the first word; word 0 does not occur."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(1, WORDS, (count, 1), generator=generator)
    # A step of 1 to WORDS - 2 around the circle of words that occur is any word but the first.
    step = torch.randint(1, WORDS - 1, (count, LENGTH), generator=generator)
    words = 1 + (first - 1 + step) % (WORDS - 1)
    words[:, :1] = first
    labels = torch.randperm(count, generator=generator) % 2
    places = torch.randint(1, LENGTH, (count,), generator=generator) * labels
    return Data(words.scatter(1, places[:, None], first), labels, places)


# Training many models side by side ----------------------------------------------------------------

Weights = dict[str, Tensor]
"""The weights of all models by name: (model, ...)."""


def _linear(weights: Weights, name: str, x: Tensor) -> Tensor:
    """(model, n, in) -> (model, n, out)."""
    matrix, bias = weights[f"{name}.weight"], weights[f"{name}.bias"]
    return torch.baddbmm(bias[:, None], x, matrix.transpose(1, 2))


def _norm(weights: Weights, name: str, x: Tensor) -> Tensor:
    found = nn.functional.layer_norm(x, (HIDDEN,), eps=EPSILON)
    return found * weights[f"{name}.weight"][:, None] + weights[f"{name}.bias"][:, None]


def all_scores(weights: Weights, words: Tensor) -> Tensor:
    """The scores of every model for its sequences: (model, batch, word) -> (model, batch, 2).

    What ``Encoder`` computes, for all models in one go.
    """
    models, batch, _ = words.shape
    rows = words + WORDS * torch.arange(models, device=words.device)[:, None, None]
    x = nn.functional.embedding(rows, weights["words.weight"].flatten(0, 1))
    x = _norm(weights, "norm", (x + weights["places.weight"][:, None]).flatten(1, 2))
    first = x.view(models, batch, LENGTH, HIDDEN)[:, :, 0]
    key, value = (
        _linear(weights, f"attention.{name}", x).view(models, batch, LENGTH, HEADS, -1)
        for name in ("key", "value")
    )
    query = _linear(weights, "attention.query", first).view(models, batch, 1, HEADS, -1)
    pattern = ((query * key).sum(-1, keepdim=True) / math.sqrt(HIDDEN // HEADS)).softmax(2)
    read = _linear(weights, "attention.mix", (pattern * value).sum(2).flatten(2))
    u = _norm(weights, "attention.norm", first + read)
    wide = _linear(weights, "narrow", nn.functional.gelu(_linear(weights, "wide", u)))
    pooled = _linear(weights, "pool", _norm(weights, "last", u + wide)).tanh()
    return _linear(weights, "answer", pooled)


def trained(data: Sequence[Data], seeds: Sequence[int], epochs: int, tick: Tick) -> list[Encoder]:
    """A model for each seed and its data, after all epochs; weights need no gradient any more.

    They are trained side by side, which is several times quicker for models this small: a step adds
    up their losses, and Adam moves each weight by its own gradients, so that none sees another.
    """
    models = [_fresh(seed) for seed in seeds]
    names = [name for name, _ in models[0].named_parameters()]
    weights = {
        name: torch.stack([m.get_parameter(name).detach() for m in models]).requires_grad_()
        for name in names
    }
    optimiser = torch.optim.Adam(list(weights.values()), lr=RATE, fused=True)
    words, labels = (torch.stack([each[n] for each in data]) for n in range(2))
    orders = [torch.Generator().manual_seed(seed) for seed in seeds]
    which = torch.arange(len(models))[:, None]
    for epoch in range(epochs):
        tick(f"epoch {epoch + 1} of {epochs}")
        order = torch.stack([torch.randperm(words.shape[1], generator=each) for each in orders])
        for batch in torch.split(order, BATCH, 1):
            scores, right = all_scores(weights, words[which, batch]), labels[which, batch]
            each = nn.functional.cross_entropy(scores.flatten(0, 1), right.flatten())
            optimiser.zero_grad()
            torch.autograd.backward(each * len(models))  # a mean over each model's batch
            optimiser.step()
    for n, model in enumerate(models):
        model.load_state_dict({name: each[n].detach() for name, each in weights.items()})
    return [model.double().requires_grad_(False) for model in models]


def _fresh(seed: int) -> Encoder:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Encoder()
