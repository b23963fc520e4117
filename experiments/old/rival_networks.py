"""Networks of three rivals: components that read the same letters, and whose outputs are averaged.

``blind``: three GRUs alike, of which one reads the word, the others words that have nothing to do
with the answer. ``frozen``: three GRUs alike that all read it, of which one is trained, the others
stay as they began. ``recurrent``: an RNN, an LSTM and a GRU. ``mechanisms``: attention, a stack
and a memory of slots. The outputs of all have the same size at the start: each is divided by its
standard deviation over words of the task (its *gain* is equalised).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import TypeAlias

import torch
from torch import Generator, Tensor, nn

from gradtrace.experiments.planted_networks import Planted
from gradtrace.experiments.question_tasks import Question

RIVALS = 3
LONGEST = 8
"""The most letters of a word."""

DEPTH, SLOTS = 4, 4
"""Of the stack and of the memory."""

Core: TypeAlias = Callable[[int], nn.Module]
"""Makes a component of a width: (samples, time, width) to (samples, width)."""


# Components ---------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    """A recurrent layer of PyTorch: its last output."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """(samples, time, width) to (samples, width)."""
        found: Tensor = self.layer(x)[0][:, -1]
        return found


class Attention(nn.Module):
    """One head: the last letter asks, all letters with their places answer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(LONGEST, width))
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.result = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(samples, time, width) to (samples, width)."""
        placed = x + self.places[: x.shape[1]]
        asked = self.query(placed[:, -1:]) @ self.key(placed).transpose(1, 2)
        read = (asked / x.shape[2] ** 0.5).softmax(2) @ self.value(placed)
        found: Tensor = torch.tanh(self.result(read[:, 0]))
        return found


class Stack(nn.Module):
    """A controller with a stack that is pushed, popped and left alone in parts that add to 1."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.read = nn.Linear(3 * width, width)
        self.act, self.push = nn.Linear(width, 3), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(samples, time, width) to (samples, width)."""
        state = x.new_zeros(len(x), x.shape[2])
        stack = x.new_zeros(len(x), DEPTH, x.shape[2])
        for letter in x.unbind(1):
            state = torch.tanh(self.read(torch.cat([letter, state, stack[:, 0]], 1)))
            push, pop, keep = self.act(state).softmax(1)[:, :, None, None].unbind(1)
            above = torch.cat([torch.tanh(self.push(state))[:, None], stack[:, :-1]], 1)
            below = torch.cat([stack[:, 1:], torch.zeros_like(stack[:, :1])], 1)
            stack = push * above + pop * below + keep * stack
        return torch.tanh(self.read(torch.cat([torch.zeros_like(state), state, stack[:, 0]], 1)))


class Memory(nn.Module):
    """A controller with slots: it reads by content, and writes where it says."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.keys = nn.Parameter(torch.randn(SLOTS, width))
        self.read, self.ask = nn.Linear(3 * width, width), nn.Linear(width, width)
        self.where, self.write = nn.Linear(width, SLOTS), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(samples, time, width) to (samples, width)."""
        state = x.new_zeros(len(x), x.shape[2])
        slots = x.new_zeros(len(x), SLOTS, x.shape[2])
        for letter in x.unbind(1):
            asked = (slots + self.keys) @ self.ask(letter + state)[:, :, None]
            seen = (asked.softmax(1) * slots).sum(1)
            state = torch.tanh(self.read(torch.cat([letter, state, seen], 1)))
            part = self.where(state).softmax(1)[:, :, None]
            slots = slots + part * (torch.tanh(self.write(state))[:, None] - slots)
        return state


CORES: dict[str, Core] = {
    "rnn": lambda width: Recurrent(nn.RNN(width, width, batch_first=True)),
    "lstm": lambda width: Recurrent(nn.LSTM(width, width, batch_first=True)),
    "gru": lambda width: Recurrent(nn.GRU(width, width, batch_first=True)),
    "attention": Attention,
    "stack": Stack,
    "memory": Memory,
}
"""Components by name."""

CONTESTS: dict[str, tuple[str, ...]] = {
    "blind": ("gru", "gru", "gru"),
    "frozen": ("gru", "gru", "gru"),
    "recurrent": ("rnn", "lstm", "gru"),
    "mechanisms": ("attention", "stack", "memory"),
}
"""Which components compete."""


class Part(nn.Module):
    """A component with a gain that is not trained."""

    def __init__(self, core: nn.Module) -> None:
        super().__init__()
        self.core, self.gain = core, 1.0

    def forward(self, x: Tensor) -> Tensor:
        """``gain · core(x)``."""
        found: Tensor = self.gain * self.core(x)
        return found


# Networks -----------------------------------------------------------------------------------------


class RivalNetwork(Planted):
    """``out(mean of parts(stem(words)))``; words are (samples, rivals, time), one word a rival.

    ``names`` says what each part is. ``truth`` is 1 for the one that was planted, 0 for others,
    and empty where none was. ``without`` leaves parts out: the rest begins as in the whole.
    """

    def __init__(self, contest: str, task: Question, width: int, choice: Random) -> None:
        super().__init__()
        kinds, self.task, self.contest = CONTESTS[contest], task, contest
        self.planted = choice.randrange(RIVALS)
        self.stem = nn.Embedding(task.letters, width)
        self.parts = nn.ModuleDict(
            {str(k): Part(CORES[kind](width)) for k, kind in enumerate(kinds)}
        )
        self.out = nn.Linear(width, task.classes)
        self.names = {f"parts.{k}": kind for k, kind in enumerate(kinds)}
        self.truth = (
            {f"parts.{k}": float(k == self.planted) for k in range(RIVALS)}
            if contest in ("blind", "frozen")
            else {}
        )
        self.groups, self.pairs = [dict.fromkeys(self.names, 0.0)], {}
        if contest == "frozen":
            for k, part in self.parts.items():
                part.requires_grad_(int(k) == self.planted)

    @torch.no_grad()
    def equalise(self, words: Tensor) -> None:
        """Let outputs of all parts vary as much."""
        h = self.stem(words)
        for k, part in self.parts.items():
            if isinstance(part, Part):
                part.gain = float(1 / part.core(h[:, int(k)]).std(0).mean().clamp(min=1e-6))

    def leave_out(self, parts: Sequence[str]) -> RivalNetwork:
        """Without these parts, whose names are ``parts.0`` and so on."""
        for name in parts:
            del self.parts[name.rpartition(".")[2]]
        return self

    def draw(self, samples: int, source: Generator) -> tuple[Tensor, Tensor]:
        """A word for each rival, and the answer; all read the same, unless they are blind."""
        words, answers = self.task.draw(samples, source)
        every = [words] * RIVALS
        if self.contest == "blind":
            every = [
                words if k == self.planted else self.task.words(samples, source)
                for k in range(RIVALS)
            ]
        return torch.stack(every, 1), answers

    def outputs(self, x: Tensor) -> Tensor:
        """Scores of the answers."""
        h = self.stem(x)
        every = [part(h[:, int(k)]) for k, part in self.parts.items()]
        scores: Tensor = self.out(torch.stack(every).mean(0))
        return scores


def build_rivals(contest: str, task: Question, width: int, seed: str) -> RivalNetwork:
    """The network of a seed, gains equalised; all random numbers come from the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(Random(f"{seed}/weights").getrandbits(63))
        network = RivalNetwork(contest, task, width, Random(f"{seed}/choice"))
    source = Generator().manual_seed(Random(f"{seed}/gain").getrandbits(63))
    network.equalise(network.draw(512, source)[0])
    return network
