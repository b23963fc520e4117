"""A small classifier with planted bugs, and what gradtrace finds of them: ``gradtrace demo``."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradtrace.diagnosis import Diagnosis, Reason
from gradtrace.table import Column, Table
from gradtrace.traced import Trace
from gradtrace.watching import watch

VIEWS = ("first", "second", "third", "last")
WORDS, CLASSES = 16, 4


class Classifier(nn.Module):
    """Views of the quarters of a text and a memory of all of it, added up; a choice of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8)
        self.views = nn.ModuleDict(
            {name: nn.Sequential(nn.Linear(24, 32), nn.Tanh(), nn.Linear(32, 16)) for name in VIEWS}
        )
        self.memory = nn.Sequential(nn.Linear(8, 16), nn.Tanh())
        self.router = nn.Linear(16, 3)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.spare = nn.Linear(16, 16)
        self.output = nn.Linear(16, CLASSES)
        with torch.no_grad():
            self.router.bias[2] = -30.0

    def forward(self, words: Tensor) -> Tensor:
        """Scores of the classes."""
        x = self.embed(words)
        h = self.memory(x.mean(1)).detach()
        for view, quarter in zip(self.views.values(), x.flatten(1).chunk(len(VIEWS), 1)):
            h = h + view(quarter)
        weight, chosen = self.router(h).softmax(-1).max(-1)
        for number, expert in enumerate(self.experts):
            at = (chosen == number).nonzero().squeeze(1)
            h = h.index_add(0, at, weight[at, None] * expert(h[at]))
        scores: Tensor = self.output(h)
        return scores


QUESTIONS = {
    "Which module is cut off by a detach?": ("memory", Reason.DETACHED),
    "Which expert never gets a sample?": ("experts.2", Reason.NO_SAMPLES),
    "Which layer is never used?": ("spare", Reason.NEVER_CALLED),
}


COLUMNS = ("question", "planted", "found", "seen")


def look() -> tuple[Table, Trace, Diagnosis]:
    """Train the network for a moment, diagnose it, and ask which view its gradient comes through:
    each question with what was planted and what was found, and what it was found with.

    The caller's random numbers stay as they are.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = Classifier()
        for _ in range(30):
            step(model)
        with watch(model, diagnose=True) as watched:
            loss = loss_of(model)
    trace, diagnosis = watched.trace(loss), watched.diagnose(loss)
    shares = trace.decompose([f"views.{name}" for name in VIEWS]).shares
    best = max(shares, key=lambda name: shares[name])
    seen = f"{shares[best]:.0%} of the embedding's gradient comes through it"
    rows = [("Which view of the text is the answer in?", "views.third", best, seen)]
    for question, (module, reason) in QUESTIONS.items():
        silent = next((each for each in diagnosis.silent if each.reason == reason), None)
        found, seen = (silent.module, f"{reason} {silent.line}") if silent else ("", "not found")
        rows.append((question, module, found, seen.strip()))
    return Table("", tuple(map(Column, COLUMNS)), tuple(rows)), trace, diagnosis  # type: ignore[arg-type]


def step(model: nn.Module) -> None:
    """A step along the signs of the gradient: to import ``torch.optim`` takes ten seconds."""
    parameters = [*model.parameters()]
    found = torch.autograd.grad(loss_of(model), parameters, allow_unused=True)
    with torch.no_grad():
        for parameter, gradient in zip(parameters, found):
            if gradient is not None:
                parameter.sub_(gradient.sign(), alpha=0.01)


def loss_of(model: nn.Module) -> Tensor:
    """Cross entropy of random texts."""
    words = torch.randint(WORDS, (64, 12))
    return F.cross_entropy(model(words), words[:, 7] % CLASSES)
