"""A small classifier that the demo looks into. What there is to find is known, as it was planted:

- the class is told by a word of the third quarter of the text, which ``views.third`` alone can see;
- ``memory`` is cut off by a ``detach`` that looks like a slip, so it never learns;
- the router's bias keeps the last expert from ever being chosen.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SEED = 0
STEPS = 30
BATCH = 64
WORDS = 16
CLASSES = 4
WIDTH = 16
VIEWS = ("first", "second", "third", "last")
QUARTER = 3  # words that a view sees
TELLS = 7  # the word that says the class; the third view sees words 6 to 8

PLANTED = {"answer": "views.third", "cut off": "memory", "never chosen": "mixture.experts.2"}
"""What there is to find, and the module that it is to be found in."""


class View(nn.Module):
    """A quarter of the text."""

    def __init__(self, start: int) -> None:
        super().__init__()
        self.seen = slice(start, start + QUARTER)
        self.net = nn.Sequential(nn.Linear(QUARTER * 8, 32), nn.Tanh(), nn.Linear(32, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Its embeddings, as one vector for each text."""
        found: Tensor = self.net(x[:, self.seen].flatten(1))
        return found


class Mixture(nn.Module):
    """Three experts, of which the router chooses one for each text."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, WIDTH)) for _ in range(3)
        )
        with torch.no_grad():
            self.router.bias[2] = -30.0  # planted: it is never chosen

    def forward(self, h: Tensor) -> Tensor:
        """``h`` and what its expert makes of it."""
        weight, chosen = self.router(h).softmax(-1).max(-1)
        for number, expert in enumerate(self.experts):
            at = (chosen == number).nonzero().squeeze(1)
            h = h.index_add(0, at, weight[at, None] * expert(h[at]))
        return h


class Classifier(nn.Module):
    """Four views of one text and a memory of all of it, added up; a mixture of experts; scores."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8)
        self.views = nn.ModuleDict({name: View(QUARTER * k) for k, name in enumerate(VIEWS)})
        self.memory = nn.Sequential(nn.Linear(8, WIDTH), nn.Tanh())
        self.mixture = Mixture()
        self.output = nn.Linear(WIDTH, CLASSES)

    def forward(self, words: Tensor) -> Tensor:
        """Scores of the classes."""
        x = self.embed(words)
        h = torch.stack([view(x) for view in self.views.values()]).sum(0)
        h = h + self.memory(x.mean(1)).detach()  # planted: nothing comes back to the memory
        scores: Tensor = self.output(self.mixture(h))
        return scores


class Sample(NamedTuple):
    """Texts and their classes."""

    words: Tensor
    classes: Tensor


def draw(generator: torch.Generator) -> Sample:
    """A batch: random words; the class is told by one of them."""
    words = torch.randint(WORDS, (BATCH, QUARTER * len(VIEWS)), generator=generator)
    return Sample(words, words[:, TELLS] % CLASSES)


def loss_of(model: nn.Module, sample: Sample) -> Tensor:
    """Cross entropy."""
    return F.cross_entropy(model(sample.words), sample.classes)


def train(model: nn.Module, generator: torch.Generator, steps: int = STEPS) -> None:
    """A few steps of Adam, each on a batch of its own."""
    optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimiser.zero_grad()
        torch.autograd.backward(loss_of(model, draw(generator)))
        optimiser.step()
