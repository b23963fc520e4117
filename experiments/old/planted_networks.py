"""Networks whose answer is known by construction: which of their components matters.

``views``: four equal views of one input, of which one sees the signal; the others see noise, and
their output has a gain. ``gates``: four frozen branches behind gates of known size. ``heads``: two
layers of attention with masks of equal length; one head of the first layer sees the word before,
one of the second sees far back, and the task needs both. ``circuit``: a small program compiled by
hand, in which some edges cannot change the result, though all have weights of equal size.

Each is a ``Planted``: a module whose forward pass gives a loss (or a score) for each sample, the
components in groups that are compared with each other, and the truth.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

Truth: TypeAlias = dict[str, float]
"""How much each component matters; only the order counts."""

GATES = (1.0, 0.5, 0.25, 0.125)
FREQUENCIES = (1.0, 2.0, 4.0, 8.0)
GAINS = (0.25, 0.5, 2.0, 4.0)
OFFSETS = (0.0, 1.0, 4.0, 16.0)
VIEW, WIDTH, HIDDEN, CLASSES = 6, 8, 16, 2
"""Inputs of a view, units of the sum, hidden units of a branch, classes."""


def joined(first: str, then: str) -> str:
    """The name of an ordered pair."""
    return f"{first} > {then}"


class Planted(nn.Module):
    """A network with a known answer.

    ``groups`` are the components that are compared with each other, by the names of their modules;
    ``pairs`` are those of (first, then) whose edge is asked for. ``edges`` are what edge
    attribution patching scores: by name, the module whose output is added, and the one that hands
    on what a reader reads. ``leaves`` names the module whose parameters all paths are traced to: it
    comes before every component; its output for samples has ``rank`` dimensions. ``trains`` is
    False for what was compiled.
    """

    groups: list[Truth]
    pairs: dict[tuple[str, str], float]
    leaves = "stem"
    rank = 2
    trains = True

    @property
    def edges(self) -> dict[str, tuple[str, str]]:
        """Those of the pairs: the second reads a stream that the first is added to."""
        return {joined(a, b): (a, f"{b}.entry") for a, b in self.pairs}

    @abstractmethod
    def draw(self, samples: int, source: Generator) -> tuple[Tensor, Tensor]:
        """Inputs and targets."""

    @abstractmethod
    def outputs(self, x: Tensor) -> Tensor:
        """Scores of the classes, for each sample."""

    def losses(self, x: Tensor, target: Tensor) -> Tensor:
        """The loss of every sample: (samples,)."""
        return F.cross_entropy(self.outputs(x), target, reduction="none")

    def right(self, x: Tensor, target: Tensor) -> float:
        """The share of samples that are classified rightly."""
        return float((self.outputs(x).argmax(-1) == target).float().mean())


class Teacher:
    """A random function of a few numbers: which of two classes a point belongs to."""

    def __init__(self, inputs: int, source: Generator) -> None:
        self.first = torch.randn(inputs, 8, generator=source) / inputs**0.5 * 1.5
        self.second = torch.randn(8, generator=source)
        points = torch.randn(512, inputs, generator=source)
        self.limit = float(self._score(points).median())

    def _score(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.first) @ self.second

    def __call__(self, x: Tensor) -> Tensor:
        """0 or 1 for each point."""
        return (self._score(x) > self.limit).long()


class Branch(nn.Module):
    """A small network with a gain and an offset that are not trained."""

    def __init__(
        self,
        inputs: int,
        gain: float = 1.0,
        offset: float = 0.0,
        shape: Callable[[Tensor], Tensor] = torch.tanh,
    ) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(inputs, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.gain, self.offset, self.shape = gain, offset, shape

    def forward(self, h: Tensor) -> Tensor:
        """``gain · W₂ f(W₁ h) + offset``."""
        found: Tensor = self.gain * self.second(self.shape(self.first(h))) + self.offset
        return found


class Views(Planted):
    """Four views of an input; the class is told by one of them. The others have a gain."""

    def __init__(self, kind: str, source: Generator, choice: Random) -> None:
        super().__init__()
        number, gain = choice.randrange(4), float(kind)
        self.sees = number
        self.stem, self.out = nn.Linear(VIEW, VIEW), nn.Linear(WIDTH, CLASSES)
        self.branch = nn.ModuleList(Branch(VIEW, 1.0 if k == number else gain) for k in range(4))
        self.teacher = Teacher(VIEW, source)
        self.groups = [{f"branch.{k}": float(k == number) for k in range(4)}]
        self.pairs = {}

    def draw(self, samples: int, source: Generator) -> tuple[Tensor, Tensor]:
        """Four independent views, and the class that one of them tells."""
        x = torch.randn(samples, 4, VIEW, generator=source)
        return x, self.teacher(x[:, self.sees])

    def outputs(self, x: Tensor) -> Tensor:
        """The views' branches, added up."""
        h = torch.tanh(self.stem(x))
        total = torch.stack([branch(h[:, k]) for k, branch in enumerate(self.branch)]).sum(0)
        scores: Tensor = self.out(torch.tanh(total))
        return scores


class Gates(Planted):
    """Four frozen branches of equal size behind gates of known size; the rest is trained."""

    def __init__(self, kind: str, source: Generator, choice: Random) -> None:
        super().__init__()
        order = [choice.sample(range(4), 4) for _ in range(2)]
        self.stem, self.out = nn.Linear(VIEW, VIEW), nn.Linear(WIDTH, CLASSES)
        gates = [GATES[n] for n in order[0]]
        self.branch = nn.ModuleList(_gated(kind, n) for n in order[1])
        self.teacher = Teacher(VIEW, source)
        self._normalise(torch.tanh(self.stem(self.draw(512, source)[0])))
        outer = [gate / branch.gain for gate, branch in zip(gates, self._branches)]
        self.register_buffer("outer", torch.tensor(outer))
        self.offset = sum(gate * branch.offset for gate, branch in zip(outer, self._branches))
        for parameter in self.branch.parameters():
            parameter.requires_grad_(False)
        self.groups = [{f"branch.{k}": gate for k, gate in enumerate(gates)}]
        self.pairs = {}

    @property
    def _branches(self) -> list[Branch]:
        return [branch for branch in self.branch if isinstance(branch, Branch)]

    @torch.no_grad()
    def _normalise(self, h: Tensor) -> None:
        """Every branch varies as much as the others before its gain, so that the gates decide."""
        for branch in self._branches:
            varies = branch.second(branch.shape(branch.first(h))).std(0).mean()
            branch.second.weight /= varies
            branch.second.bias.zero_()

    def draw(self, samples: int, source: Generator) -> tuple[Tensor, Tensor]:
        """A point and its class."""
        x = torch.randn(samples, VIEW, generator=source)
        return x, self.teacher(x)

    def outputs(self, x: Tensor) -> Tensor:
        """The branches behind their gates, added up, without what is constant."""
        h, outer = torch.tanh(self.stem(x)), self.get_buffer("outer")
        total = torch.stack([gate * branch(h) for gate, branch in zip(outer, self.branch)]).sum(0)
        scores: Tensor = self.out(torch.tanh(total - self.offset))
        return scores


def _gated(kind: str, number: int) -> Branch:
    """A branch of which something other than its gate differs: nothing, its frequency, its gain,
    or a constant that it adds; gains and constants are taken back outside.
    """
    if kind == "frequency":
        return Branch(VIEW, shape=lambda h, w=FREQUENCIES[number]: torch.sin(w * h))  # type: ignore[misc]
    if kind == "gain":
        return Branch(VIEW, gain=GAINS[number])
    return Branch(VIEW, offset=OFFSETS[number] if kind == "offset" else 0.0)


# Attention ----------------------------------------------------------------------------------------

WORDS, LENGTH, STREAM, HEAD = 8, 12, 24, 8
"""Words, the length of a text, units of the residual stream and of a head."""

BEFORE = ((1, 6), (2, 3), (4, 5), (0, 7))
"""How far back the heads of the first layer see: two words each; one sees the word before."""

FAR = LENGTH // 2
"""The second layer's heads see half of the text each: one the first half, the others the second."""


class Entry(nn.Module):
    """What one reader reads, as a tensor of its own: an identity would hand the same tensor to all
    readers, whose gradient is that of all of them together.
    """

    def forward(self, x: Tensor) -> Tensor:
        """The same numbers."""
        return x.view_as(x)


class Head(nn.Module):
    """Attention to the positions of a mask; ``entry`` is where what it reads comes in."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.entry = Entry()
        self.query, self.key, self.value = (nn.Linear(STREAM, HEAD, bias=False) for _ in range(3))
        self.result = nn.Linear(HEAD, STREAM, bias=False)
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        """What it adds to the stream."""
        x = self.entry(x)
        scores = self.query(x) @ self.key(x).transpose(-1, -2) / HEAD**0.5
        weights = scores.masked_fill(~self.get_buffer("mask"), float("-inf")).softmax(-1)
        added: Tensor = self.result(weights @ self.value(x))
        return added


class Heads(Planted):
    """Two layers of four heads: which word came after the last one's earlier occurrence?"""

    rank = 3

    def __init__(self, kind: str, source: Generator, choice: Random) -> None:
        super().__init__()
        self.stem = nn.Embedding(WORDS + LENGTH, STREAM)  # words and positions
        one, two = choice.sample(range(4), 4), choice.sample(range(4), 4)
        self.one = nn.ModuleList(Head(_back(BEFORE[n])) for n in one)
        self.two = nn.ModuleList(Head(_half(n == 0)) for n in two)
        self.out = nn.Linear(STREAM, WORDS)
        for name in ("one", "two"):
            for head in getattr(self, name):
                nn.init.normal_(head.result.weight, std=0.2)
        first = {f"one.{k}": float(n == 0) for k, n in enumerate(one)}
        second = {f"two.{k}": float(n == 0) for k, n in enumerate(two)}
        self.groups = [first, second]
        self.pairs = {(a, b): first[a] * second[b] for a in first for b in second}

    def draw(self, samples: int, source: Generator) -> tuple[Tensor, Tensor]:
        """Words of which the last occurs once before, in the first half; the target follows it."""
        words = torch.randint(WORDS - 1, (samples, LENGTH), generator=source)
        at = torch.randint(FAR - 1, (samples,), generator=source)
        rows, last = torch.arange(samples), torch.randint(WORDS, (samples,), generator=source)
        words = (words + last[:, None] + 1) % WORDS  # no other is the last word
        words[rows, at], words[:, -1] = last, last
        return words, words[rows, at + 1]

    def outputs(self, x: Tensor) -> Tensor:
        """Scores of the words, at the last position."""
        h = self.stem(x) + self.stem(torch.arange(WORDS, WORDS + LENGTH))
        for layer in (self.one, self.two):
            h = h + torch.stack([head(h) for head in layer]).sum(0)
        scores: Tensor = self.out(h[:, -1])
        return scores


def _back(steps: Sequence[int]) -> Tensor:
    """Which positions see which: some steps back, or the first word where there are none."""
    rows = torch.arange(LENGTH)
    mask = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
    for step in steps:
        mask[rows, (rows - step).clamp(min=0)] = True
    return mask


def _half(first: bool) -> Tensor:
    mask = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
    mask[:, :FAR] = first
    mask[:, FAR:] = not first
    return mask


# Circuits -----------------------------------------------------------------------------------------


class Edge(nn.Module):
    """A weight on what one node hands to another."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        """``w·x``."""
        return self.weight * x


class Circuit(Planted):
    """A program of five features and four readers, compiled by hand.

    A feature is 1 where one of the input's numbers is above a limit, and 0 elsewhere, by a steep
    ramp; one feature is always 1. Every reader takes a weighted sum of all of them: two readers go
    to the result; one is added and taken away again; one is always clamped. So the edges that
    matter are those from a feature that varies to a reader that counts. ``random``: the same wires
    with random weights and limits, in which no edge is planted: a control.
    """

    trains = False

    def __init__(self, kind: str, source: Generator, choice: Random) -> None:
        super().__init__()
        features, readers = 5, 4
        self.stem = nn.Linear(features, features)
        constant, (cancelled, clamped) = (
            choice.randrange(features),
            choice.sample(range(readers), 2),
        )
        with torch.no_grad():
            if kind == "compiled":
                self.stem.weight.copy_(torch.eye(features))
                self.stem.bias.zero_()
                self.stem.bias[constant] = 50.0
        self.slope = 2.0
        signed = [
            choice.choice((-1, 1)) * choice.uniform(0.5, 2) for _ in range(features * readers)
        ]
        self.edge = nn.ModuleList(Edge(weight) for weight in signed)
        self.reader = nn.ModuleList(Entry() for _ in range(readers))
        self.shifts = [0.0] * readers
        self.shifts[clamped] = 50.0 if kind == "compiled" else 0.0
        self.back = [choice.uniform(0.5, 2) for _ in range(readers)]
        self.cancelled = cancelled if kind == "compiled" else None
        self.features = features
        matters = {
            f"edge.{reader * features + feature}": float(
                feature != constant and reader not in (cancelled, clamped)
            )
            for reader in range(readers)
            for feature in range(features)
        }
        self.groups, self.pairs = [matters], {}

    @property
    def edges(self) -> dict[str, tuple[str, str]]:
        """All components, each with its reader."""
        (names,) = self.groups
        return {name: (name, f"reader.{k // self.features}") for k, name in enumerate(names)}

    def draw(self, samples: int, source: Generator) -> tuple[Tensor, Tensor]:
        """Numbers; there is nothing to learn."""
        return torch.randn(samples, self.features, generator=source), torch.zeros(samples)

    def outputs(self, x: Tensor) -> Tensor:
        """The result of the program: (samples, 1)."""
        on = torch.sigmoid(self.slope * self.stem(x))
        total = torch.zeros(len(x))
        for number, (shift, back) in enumerate(zip(self.shifts, self.back)):
            first = number * self.features
            added = [self.edge[first + k](on[:, k]) for k in range(self.features)]
            read = self.reader[number](torch.stack(added).sum(0))
            done = torch.clamp(read + shift, -20.0, 20.0)
            total = total + back * done
            if number == self.cancelled:
                total = total - back * done
        return total[:, None]

    def losses(self, x: Tensor, target: Tensor) -> Tensor:
        """The result itself: what was compiled has no loss to learn from."""
        return self.outputs(x)[:, 0]

    def right(self, x: Tensor, target: Tensor) -> float:
        """A compiled program is right."""
        return 1.0


KINDS: Mapping[str, Callable[[str, Generator, Random], Planted]] = {
    "views": Views,
    "gates": Gates,
    "heads": Heads,
    "circuit": Circuit,
}


def build(cell: Mapping[str, Any]) -> Planted:
    """The network of a cell, always the same."""
    name = f"planted/{cell['network']}/{cell['kind']}/{cell['seed']}"
    number = Random(name).getrandbits(63)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(number)
        source = Generator().manual_seed(number)
        return KINDS[cell["network"]](cell["kind"], source, Random(number))
