"""Language models that train with fused kernels and are traced operator by operator.

A recurrent layer holds the weights of ``nn.LSTM`` or ``nn.RNN`` and trains with it (on a GPU by
cuDNN). Taken ``apart`` it computes the same from the same weights by a cell, whose gates are
modules: so each gate is a component, and each call of the cell a time step, on every device. A
layer of the feed-forward model is affine with tanh; it reads the last four words.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradtrace.experiments.treebank_text import Text, text

States: TypeAlias = list[tuple[Tensor, ...]]
"""The state of each layer, (batch, units) each."""

WINDOW = 4
"""Words that the feed-forward model reads."""
HELD = 0.1
"""The part of a text that is not trained on."""


class Times(nn.Module):
    """The elementwise product, as a component."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """``a * b``."""
        return a * b


class Affine(nn.Module):
    """The affine function of given weights, as a component."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """``weight @ x + bias``."""
        return F.linear(x, weight, bias)


class GatedCell(nn.Module):
    """A step of an LSTM: ``c = forget · c + input · candidate``, ``h = output · tanh(c)``."""

    def __init__(self) -> None:
        super().__init__()
        self.input, self.forget, self.output = nn.Sigmoid(), nn.Sigmoid(), nn.Sigmoid()
        self.candidate = nn.Tanh()
        self.memory = Times()
        self.recurrent = Affine()

    def forward(
        self, given: Tensor, state: tuple[Tensor, ...], weight: Tensor, bias: Tensor
    ) -> tuple[Tensor, ...]:
        """The next state; ``given`` is the product with the input."""
        h, c = state
        i, f, g, o = (given + self.recurrent(h, weight, bias)).chunk(4, 1)
        c = self.memory(self.forget(f), c) + self.input(i) * self.candidate(g)
        return self.output(o) * torch.tanh(c), c


class PlainCell(nn.Module):
    """A step of Elman's network: ``h = tanh(input + recurrent)``."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = Affine()

    def forward(
        self, given: Tensor, state: tuple[Tensor, ...], weight: Tensor, bias: Tensor
    ) -> tuple[Tensor, ...]:
        """The next state; ``given`` is the product with the input."""
        return (torch.tanh(given + self.recurrent(state[0], weight, bias)),)


PARTS: dict[str, tuple[str, ...]] = {
    "lstm": ("recurrent", "memory", "input", "forget", "candidate", "output"),
    "rnn": ("recurrent",),
    "forward": (),
}
"""The components of each kind's layers; the first lead from one time step to the next."""


class Recurrent(nn.Module):
    """A layer of an LSTM or of Elman's network."""

    def __init__(self, kind: str, units: int) -> None:
        super().__init__()
        lstm = kind == "lstm"
        self.weights = nn.LSTM(units, units) if lstm else nn.RNN(units, units)
        self.cell = GatedCell() if lstm else PlainCell()
        self.apart = False

    def forward(self, x: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """(time, batch, units), and the last state."""
        weights = self.weights
        if not self.apart:
            given = tuple(part.unsqueeze(0) for part in state)
            out, last = weights(x, given if len(given) > 1 else given[0])
            return out, tuple(p.squeeze(0) for p in (last if len(given) > 1 else (last,)))
        outs = []
        w_input, w_state, b_input, b_state = weights.parameters()
        for each in F.linear(x, w_input, b_input).unbind(0):
            state = self.cell(each, state, w_state, b_state)
            outs.append(state[0])
        return torch.stack(outs), state


class Forward(nn.Module):
    """A layer of a feed-forward network."""

    def __init__(self, inputs: int, units: int) -> None:
        super().__init__()
        self.weights = nn.Linear(inputs, units)

    def forward(self, x: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """``tanh(weight @ x + bias)``; it has no state."""
        return torch.tanh(self.weights(x)), state


class LanguageModel(nn.Module):
    """Scores of the next word at every place of a text."""

    def __init__(self, kind: str, words: int, units: int, layers: int) -> None:
        super().__init__()
        self.kind = kind
        self.embed = nn.Embedding(words, units)
        nn.init.uniform_(self.embed.weight, -0.1, 0.1)
        made: list[nn.Module] = []
        for n in range(layers):
            wide = units if n else WINDOW * units
            made.append(Forward(wide, units) if kind == "forward" else Recurrent(kind, units))
        self.layers = nn.ModuleList(made)
        self.out = nn.Linear(units, words)

    def start(self, batch: int) -> States:
        """States of zeros."""
        each = {"lstm": 2, "rnn": 1, "forward": 0}[self.kind]
        zeros = self.embed.weight.new_zeros(batch, self.embed.embedding_dim)
        return [(zeros,) * each for _ in self.layers]

    def forward(self, words: Tensor, states: States) -> tuple[Tensor, States]:
        """(time, batch) words to (time, batch, vocabulary) scores, and the last states."""
        x, last = self.embed(words), []
        if self.kind == "forward":
            padded = torch.cat([x.new_zeros(WINDOW - 1, *x.shape[1:]), x])
            x = torch.cat([padded[k : k + len(words)] for k in range(WINDOW)], 2)
        for layer, state in zip(self.layers, states):
            x, state = layer(x, state)
            last.append(state)
        return self.out(x), last

    def take_apart(self, apart: bool) -> None:
        """Whether recurrent layers compute operator by operator."""
        for layer in self.layers:
            if isinstance(layer, Recurrent):
                layer.apart = apart


def build(kind: str, words: int, units: int, layers: int, seed: int) -> LanguageModel:
    """A model, always the same for the same numbers, on the CPU."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LanguageModel(kind, words, units, layers)


# The text -----------------------------------------------------------------------------------------


class Streams(NamedTuple):
    """A text as ``batch`` streams side by side."""

    words: Tensor  # (time, batch)
    surprisal: Tensor  # (time, batch)
    hard: Tensor  # (time, batch)
    number: Tensor  # (vocabulary,)

    def window(self, step: int, length: int) -> tuple[Tensor, Tensor]:
        """Words of the step-th window, and those that follow each; over and over again."""
        first = step % ((len(self.words) - 1) // length) * length
        return self.words[first : first + length], self.words[first + 1 : first + length + 1]


def streams(
    words: int, count: int, batch: int, seed: int, device: torch.device
) -> tuple[Streams, Streams]:
    """A text to train on and one that is held out, on a device."""
    whole = text(count, words, seed)
    cut = round(count * (1 - HELD))
    return _streams(whole, 0, cut, batch, device), _streams(whole, cut, count, batch, device)


def _streams(whole: Text, start: int, stop: int, batch: int, device: torch.device) -> Streams:
    long = (stop - start) // batch
    words, surprisal, hard = (
        part[start : start + long * batch].reshape(batch, long).t().contiguous().to(device)
        for part in whole[:3]
    )
    return Streams(words, surprisal.float(), hard, whole.number.to(device))


def loss_of(model: LanguageModel, read: Tensor, target: Tensor, states: States) -> Tensor:
    """The mean cross entropy of the words to come."""
    scores, _ = model(read, states)
    return F.cross_entropy(scores.flatten(0, 1), target.flatten())


class Held(NamedTuple):
    """How well a model knows text that it was not trained on."""

    loss: float  # nats a word
    source: float  # the least loss that any model can have on these words
    right: float  # of verbs after a noun of the other number: how many have the right number
    verbs: int


@torch.no_grad()
def evaluate(model: LanguageModel, held: Streams, length: int, windows: int) -> Held:
    """The loss on so many windows, and the agreement of hard verbs with their subjects."""
    states = model.start(held.words.shape[1])
    loss = held.words.new_zeros((), dtype=torch.float64)
    source, right, verbs = loss.clone(), loss.clone(), loss.clone()
    windows = min(windows, (len(held.words) - 1) // length)
    for step in range(windows):
        read, target = held.window(step, length)
        scores, states = model(read, states)
        logs = scores.log_softmax(-1)
        loss += F.nll_loss(logs.flatten(0, 1), target.flatten())
        part = slice(step * length + 1, (step + 1) * length + 1)
        source += held.surprisal[part].mean()
        wanted = held.hard[part].unsqueeze(-1)
        chances = logs.exp()
        mass = torch.stack([(chances * (held.number == n)).sum(-1) for n in (1, 2)], -1)
        other = torch.where(wanted == 1, mass[..., 1:], mass[..., :1])
        own = torch.where(wanted == 1, mass[..., :1], mass[..., 1:])
        right += ((own > other) & (wanted > 0)).sum()
        verbs += (wanted > 0).sum()
    count = int(verbs)
    return Held(float(loss) / windows, float(source) / windows, float(right) / max(count, 1), count)
