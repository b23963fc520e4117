"""Two layers of attention on repeated texts, and what each head and each edge between heads does.

The text repeats a segment of different words; its period differs from text to text, so that no head
can find the word to copy by its distance alone. The loss counts where the segment has come once.
The network has no layer norm and no other layers: what a head of the second layer reads is a sum of
the embedding and of what the first layer's heads add, so an edge can be patched exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

import gradtrace as gt
from gradtrace.experiments.planted_networks import Entry, Planted, joined
from gradtrace.experiments.planted_scores import Batch, components

WORDS, LENGTH, WIDTH, HEAD, HEADS = 32, 32, 48, 12, 4
"""Words, the length of a text, units of the residual stream and of a head, heads of a layer."""

PERIODS = (8, 16)
"""The shortest and the longest segment."""

PORTS = ("query", "key", "value")

Effects: TypeAlias = dict[str, float]
"""By how much the loss rises, by the name of what is taken away."""

IGNORED = -100


class Port(nn.Module):
    """A projection of the stream; ``entry`` is where what it reads comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.entry, self.weight = Entry(), nn.Linear(WIDTH, HEAD, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Queries, keys or values."""
        found: Tensor = self.weight(self.entry(x))
        return found


class Head(nn.Module):
    """Causal attention; ``entry`` is where what it reads comes in, before its three ports."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = Entry()
        self.query, self.key, self.value = Port(), Port(), Port()
        self.result = nn.Linear(HEAD, WIDTH, bias=False)
        nn.init.normal_(self.result.weight, std=0.1)
        self.register_buffer("seen", torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril())

    def weights(self, x: Tensor) -> Tensor:
        """How much each position attends to each: (samples, length, length)."""
        scores = self.query(x) @ self.key(x).transpose(-1, -2) / HEAD**0.5
        weights: Tensor = scores.masked_fill(~self.get_buffer("seen"), float("-inf")).softmax(-1)
        return weights

    def forward(self, x: Tensor) -> Tensor:
        """What it adds to the stream."""
        x = self.entry(x)
        added: Tensor = self.result(self.weights(x) @ self.value(x))
        return added


class Repeats(Planted):
    """Two layers of four heads, to be trained on repeated texts. Nothing is planted: ``groups`` and
    ``pairs`` name what is compared, and the truth is measured after training.
    """

    rank = 3

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Embedding(WORDS + LENGTH, WIDTH)  # words and positions
        self.one = nn.ModuleList(Head() for _ in range(HEADS))
        self.two = nn.ModuleList(Head() for _ in range(HEADS))
        self.out = nn.Linear(WIDTH, WORDS)
        nn.init.normal_(self.stem.weight, std=0.5)
        self.compare()

    def compare(self, ports: bool = False) -> None:
        """What is compared from now on: heads and their pairs, or the ports of the second layer's
        heads and the pairs of a head and a port.
        """
        first, second = ([f"{layer}.{k}" for k in range(HEADS)] for layer in ("one", "two"))
        if ports:
            second = [f"{head}.{port}" for head in second for port in PORTS]
        self.groups = [dict.fromkeys(first, 0.0), dict.fromkeys(second, 0.0)]
        self.pairs = {(a, b): 0.0 for a in first for b in second}

    def draw(self, samples: int, source: Generator) -> tuple[Tensor, Tensor]:
        """Texts, and the next word wherever it can be told from what came before."""
        short, long = PERIODS
        period = torch.randint(short, long + 1, (samples, 1), generator=source)
        segment = torch.rand(samples, WORDS, generator=source).argsort(1)
        place = torch.arange(LENGTH + 1)[None]
        words = segment.gather(1, place % period)
        return words[:, :-1], words[:, 1:].masked_fill(place[:, :-1] < period, IGNORED)

    def outputs(self, x: Tensor) -> Tensor:
        """Scores of the next word: (samples, length, words)."""
        h = self.stem(x) + self.stem(torch.arange(WORDS, WORDS + LENGTH))
        for layer in (self.one, self.two):
            h = h + torch.stack([head(h) for head in layer]).sum(0)
        scores: Tensor = self.out(h)
        return scores

    def losses(self, x: Tensor, target: Tensor) -> Tensor:
        """The mean loss of every text, over the places that count: (samples,)."""
        each = F.cross_entropy(self.outputs(x).transpose(1, 2), target, reduction="none")
        return each.sum(1) / (target != IGNORED).sum(1)

    def right(self, x: Tensor, target: Tensor) -> float:
        """The share of the places that count at which the next word is right."""
        counts = target != IGNORED
        return float((self.outputs(x).argmax(-1) == target)[counts].float().mean())


def build(seed: int) -> Repeats:
    """The untrained network of a seed, always the same."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(Random(f"induction/{seed}").getrandbits(63))
        return Repeats()


# What is true -------------------------------------------------------------------------------------


@torch.no_grad()
def ablated(model: Repeats, batch: Batch) -> Effects:
    """By how much the loss rises where a head's output is replaced by its mean over the batch."""
    whole = float(model.losses(*batch).mean())
    found = {}
    for name in components(model):
        with gt.ablate(model, name, how="mean"):
            found[name] = float(model.losses(*batch).mean()) - whole
    return found


@torch.no_grad()
def patched(model: Repeats, batch: Batch) -> Effects:
    """By how much the loss rises where one head, or one port, reads the mean of another head's
    output and all else reads the output itself; for all pairs that are compared.
    """
    whole = float(model.losses(*batch).mean())
    found = {}
    for first, then in model.pairs:
        with patch(model, first, then):
            found[joined(first, then)] = float(model.losses(*batch).mean()) - whole
    return found


@contextmanager
def patch(model: nn.Module, first: str, then: str) -> Iterator[None]:
    """In forward passes inside, ``then`` reads the mean of what ``first`` adds to the stream."""
    kept: list[Tensor] = []

    def keep(module: nn.Module, inputs: Any, output: Tensor) -> None:
        kept[:] = [output]

    def replace(module: nn.Module, inputs: Any, read: Tensor) -> Tensor:
        return read - kept[0] + kept[0].mean(0)

    handles = [
        model.get_submodule(first).register_forward_hook(keep),
        model.get_submodule(f"{then}.entry").register_forward_hook(replace),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def attention(model: Repeats, batch: Batch) -> Effects:
    """How far a head does what its name would say: of the first layer, its attention to the word
    before; of the second, to the words that are the next one.
    """
    x, target = batch
    counts = target != IGNORED
    right = (x[:, None] == target[:, :, None]) & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    found = {}
    with _read(model) as read:
        model.outputs(x)
    for name in (name for name, _ in model.named_modules() if name in read):
        head = model.get_submodule(name)
        assert isinstance(head, Head)
        weights = head.weights(read[name])
        if name.startswith("one"):
            found[name] = float(weights.diagonal(-1, 1, 2).mean())
        else:
            found[name] = float((weights * right).sum(-1)[counts].mean())
    return found


@contextmanager
def _read(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """What heads read in forward passes inside."""
    found: dict[str, Tensor] = {}

    def hook(name: str) -> Callable[..., None]:
        def keep(module: nn.Module, inputs: tuple[Tensor]) -> None:
            found[name] = inputs[0]

        return keep

    heads = [(name, each) for name, each in model.named_modules() if isinstance(each, Head)]
    handles = [each.register_forward_pre_hook(hook(name)) for name, each in heads]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
