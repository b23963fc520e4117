"""Components in competition: does influence tell which of them the network needs?

Question: If an RNN, an LSTM and a GRU read the same embedding and their outputs are averaged, does
the influence of each over training predict how many more samples the network takes to learn the
task without it? And does it do so better than scores that need no tracing?

Expectation: The chapter (1.3) expects that the loss of performance is in proportion to the
influence of what was removed: the most influential first, then the second, and so on.

Method: Train the network on language modelling (copy, Dyck words, counting, and words of a text;
that alone where a text is given). At six steps, spread over the whole budget of training, trace the
loss of single samples by both rules, and take each component's share of the paths of the
embedding's elements. Train it anew without each component, and without each two: the same initial
weights and batches for the rest, the average over the rest. Samples to target are those until the
evaluation loss first is as low as the target: 90% of the way, on a logarithmic scale, from the
first loss of the full network to the lowest of the first half of its budget. A network that does
not get there within the budget is censored: it counts as one that gets there at the end of it, so
that all such are tied, and dearer than any that gets there. Beside it the final loss, and the loss
of the trained network at once with the component's output set to zero. Baselines: the norm of the
gradient of the component's parameters, Σ |weight · gradient|, their number, and a random score,
from the same samples.

Seeds: one for each task and repetition, of weights, batches and samples; by default 10.

Limits: Tasks are four (one where a text is given), so that nothing can be said of tasks in general:
intervals of the tables draw networks, and only the verdict draws tasks. Where there is one task it
is that of its networks, and of no other task; so since its results were known, before which it was
"cannot tell". In one task a score that only ranks kinds of component, whatever the network, may
agree with cost by chance: "over seeds" in the tables says what is left without that. Traces are
taken at six steps spread over the whole budget, and targets were mostly reached between the first
and the second, so the mean is of networks that have learned already. The three components hand back
gradient of different size from the start (1 : 1/2 : 1/4), which influence sees whatever the task
is. No component was necessary: half of the costs are below 0.15 doublings. Even true ablation of
the trained network goes only weakly with the cost of training without the component.
``planted-competition`` was designed to mend these.

For components and data of your own see docs/competition.md; ``compete`` takes them as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from itertools import combinations
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

import gradtrace as gt
from gradtrace.errors import GradtraceError
from gradtrace.experiments.contest import conclude, headline
from gradtrace.experiments.harness.findings import Cell, Findings, Result, Row, Seeds, Tick
from gradtrace.experiments.languages import LANGUAGES, UNSCORED, Batch, Task
from gradtrace.experiments.scores import Scores, scores
from gradtrace.experiments.text import digest, words
from gradtrace.experiments.training import descent, moments, plain

__all__ = [
    "FIGURE",
    "FULL",
    "QUICK",
    "SEEDS",
    "TIMED",
    "cells",
    "compete",
    "conclude",
    "headline",
    "measure",
]

Factory: TypeAlias = Callable[[int], nn.Module]
"""Makes a component from its width: (batch, time, width) to the same shape, or a tuple with that
first, as PyTorch's recurrent layers give.
"""

COMPONENTS: dict[str, Factory] = {
    "rnn": lambda width: nn.RNN(width, width, batch_first=True),
    "lstm": lambda width: nn.LSTM(width, width, batch_first=True),
    "gru": lambda width: nn.GRU(width, width, batch_first=True),
}
"""Those of the chapter."""

FULL: dict[str, Any] = {
    "tasks": ["copy", "dyck", "counting", "text"],
    "components": ["rnn", "lstm", "gru"],
    "removed": 2,  # how many components are removed together, at most
    "text": None,  # a file; without one, sentences of a grammar
    "vocabulary": 100,
    "width": 16,
    "steps": 1500,
    "batch": 32,
    "rate": 0.005,
    "every": 20,  # steps between evaluations
    "evaluated": 128,  # samples
    "traced": 6,  # how often, over training
    "pairs": 8,  # samples that are traced each time
}
QUICK: dict[str, Any] = FULL | {
    "tasks": ["copy", "counting"],
    "steps": 160,
    "every": 10,
    "evaluated": 64,
    "traced": 3,
    "pairs": 4,
    "rate": 0.02,
    "width": 12,
}
SEEDS = Seeds(quick=1, full=10)
TIMED = False
FIGURE = "correlation"


def cells(settings: Mapping[str, Any], seeds: int) -> list[Cell]:
    """One for each task, seed and set of removed components, from none to all but one."""
    names = [named(each) for each in settings["components"]]
    most = min(settings["removed"], len(names) - 1)
    if most < 1 or len(set(names)) < len(names):
        raise GradtraceError(
            "a competition takes two components or more, of different names, and removes at least "
            f"one; got {', '.join(names)} and removed={settings['removed']}"
        )
    shared = {key: value for key, value in settings.items() if key not in ("tasks", "removed")}
    shared["names"], shared["files"] = names, _files(settings)
    return [
        shared | {"task": task, "seed": seed, "removed": list(removed)}
        for task in _tasks(settings)
        for seed in range(seeds)
        for count in range(most + 1)
        for removed in combinations(names, count)
    ]


def _files(settings: Mapping[str, Any]) -> dict[str, str]:
    """The files that take part, and what tells whether they are still the same."""
    places = [each.partition(":")[0] for each in (*settings["components"], *settings["tasks"])]
    found = [place for place in places if place.endswith(".py")]
    found += [settings["text"]] if settings["text"] else []
    return {place: digest(place) for place in sorted(set(found))}


def _tasks(settings: Mapping[str, Any]) -> list[str]:
    """The tasks, and the words of a file if there is one."""
    tasks = list(settings["tasks"])
    return [*tasks, "text"] if settings["text"] and "text" not in tasks else tasks


def measure(cell: Cell, tick: Tick) -> Result:
    """Train one network, and measure it: the full one is traced, too."""
    for place, seen in cell["files"].items():
        if digest(place) != seen:
            raise GradtraceError(f"{place} has changed since the experiment began; begin it anew")
    return trained(cell, factories(cell["components"]), task(cell), tick)


def compete(
    components: Mapping[str, Factory] | None = None,
    tasks: Mapping[str, Task] | Sequence[str] | None = None,
    *,
    seeds: int = 3,
    tick: Tick = lambda text: None,
    **settings: Any,
) -> Findings:
    """The experiment on components and tasks of your own, here and now.

    ``components`` maps names to factories, ``tasks`` names to tasks (or lists some of ours).
    Other settings are those of ``FULL``, and take the place of those of ``QUICK``.

    >>> found = compete({"rnn": COMPONENTS["rnn"], "gru": COMPONENTS["gru"]}, ["copy"],
    ...                 seeds=1, steps=4, every=2, pairs=2, traced=2)
    >>> found.facts["networks"]
    1
    """
    made = dict(COMPONENTS if components is None else components)
    named = tasks if isinstance(tasks, Mapping) else {}
    asked = {"components": list(made)} | ({} if tasks is None else {"tasks": list(tasks)})
    unknown = settings.keys() - QUICK.keys()
    if unknown:
        raise GradtraceError(f"no setting {sorted(unknown)[0]!r}; there are {', '.join(QUICK)}")
    rows = []
    for cell in cells({**QUICK, **settings, **asked}, seeds):
        source = named.get(cell["task"]) or task(cell)
        rows.append(Row(cell, trained(cell, made, source, tick)))
    return conclude(rows)


# What takes part ----------------------------------------------------------------------------------


def named(where: str) -> str:
    """The name of a component: that of the function that makes it.

    >>> named("lstm"), named("mine.py:attention")
    ('lstm', 'attention')
    """
    return where.rpartition(":")[2]


def factories(chosen: Sequence[str]) -> dict[str, Factory]:
    """The components of a cell: names of ours, ``"file.py:function"`` or ``"module:function"``."""
    known = f"a component is one of {', '.join(COMPONENTS)}"
    return {named(each): COMPONENTS.get(each) or _imported(each, known) for each in chosen}


def task(cell: Mapping[str, Any]) -> Task:
    """The task of a cell: a language, ``"text"``, or a function of yours that gives one."""
    name = cell["task"]
    if name in LANGUAGES:
        return LANGUAGES[name]()
    if name == "text":
        return _text(cell["text"], cell["vocabulary"])
    found: Task = _imported(name, f"a task is one of {', '.join(LANGUAGES)}, text")()
    return found


@lru_cache(maxsize=1)
def _text(file: str | None, most: int) -> Task:
    return words(file, most=most)


@lru_cache
def _imported(where: str, known: str) -> Any:
    place, _, name = where.partition(":")
    if not name:
        raise GradtraceError(f"{known}, or 'file.py:function', not {where!r}")
    module = _loaded(place) if place.endswith(".py") else import_module(place)
    if not hasattr(module, name):
        raise GradtraceError(f"there is no {name!r} in {place}")
    return getattr(module, name)


def _loaded(file: str) -> ModuleType:
    """A file of the user's, as a module."""
    spec = spec_from_file_location(f"competition_{Path(file).stem}", file)
    if spec is None or spec.loader is None or not Path(file).is_file():
        raise GradtraceError(f"there is no file {file!r} (in {Path.cwd()})")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Competition(nn.Module):
    """``output(1/K · Σ_k component_k(embed(x)))``."""

    def __init__(self, components: Mapping[str, nn.Module], vocabulary: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.components = nn.ModuleDict(components)
        self.output = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:  # (batch, time) -> (batch, time, vocabulary)
        """Scores of the next token."""
        x = self.embed(tokens)
        found = [component(x) for component in self.components.values()]
        outputs = [each if isinstance(each, Tensor) else each[0] for each in found]
        scores: Tensor = self.output(torch.stack(outputs).mean(0))
        return scores


def build(cell: Cell, components: Mapping[str, Factory], vocabulary: int) -> Competition:
    """The network without what is removed. The rest starts as it does in the full one."""
    parts = {}
    with torch.random.fork_rng(devices=[]):
        for name, factory in components.items():
            if name not in cell["removed"]:
                torch.manual_seed(_seed(cell, "component", name))
                parts[name] = factory(cell["width"])
        torch.manual_seed(_seed(cell, "ends"))
        return Competition(parts, vocabulary, cell["width"])


def _seed(cell: Cell, *what: str) -> int:
    """A seed for one use of random numbers; the same for every set of removed components."""
    return Random("/".join(map(str, (cell["task"], cell["seed"], *what)))).getrandbits(63)


def _generator(cell: Cell, *what: str) -> Generator:
    return Generator().manual_seed(_seed(cell, *what))


# Training -----------------------------------------------------------------------------------------


def trained(cell: Cell, components: Mapping[str, Factory], source: Task, tick: Tick) -> Result:
    """Train, and say how the loss went down; of the full network also what every measure says."""
    model = build(cell, components, source.vocabulary)
    held = source.evaluation(cell["evaluated"], _generator(cell, "evaluation"))
    batches = _generator(cell, "batches")
    curve: list[tuple[int, float]] = []
    found: list[dict[str, Any]] = []
    asked = set() if cell["removed"] else moments(cell["steps"], cell["traced"])

    def loss() -> Tensor:
        return _loss(model, source.batch(cell["batch"], batches))

    with plain():
        for step in descent(model, loss, cell["steps"], cell["rate"]):
            if step % cell["every"] == 0 or step == cell["steps"]:
                curve.append((step * cell["batch"], _evaluated(model, held)))
                tick(f"{cell['task']} {cell['seed']} {_title(cell)}: loss {curve[-1][1]:.3f}")
            if step in asked:
                found.append({"step": step} | scored(model, source, cell, step))
        result: Result = {"curve": curve, "scores": found}
        if not cell["removed"]:
            result["zeroed"] = zeroed(model, held)
            result["parameters"] = sum(p.numel() for p in model.parameters())
    return result


def scored(model: Competition, source: Task, cell: Cell, step: int) -> Scores:
    """What every measure says of the components, on a few samples."""
    batch = source.batch(cell["pairs"], _generator(cell, "traced", str(step)))
    parts = {name: f"components.{name}" for name in model.components}
    seed = _seed(cell, "random", str(step))
    return scores(model, parts, lambda: losses(model, batch), seed)


def _title(cell: Cell) -> str:
    return f"without {' and '.join(cell['removed'])}" if cell["removed"] else "full"


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy, the mean over all that is asked."""
    return F.cross_entropy(
        model(batch.tokens).flatten(0, 1), batch.targets.flatten(), ignore_index=UNSCORED
    )


def losses(model: nn.Module, batch: Batch) -> Tensor:
    """The same of every sample alone: (samples,)."""
    each = F.cross_entropy(
        model(batch.tokens).transpose(1, 2), batch.targets, reduction="none", ignore_index=UNSCORED
    )
    return each.sum(1) / (batch.targets != UNSCORED).sum(1)


@torch.no_grad()
def _evaluated(model: nn.Module, held: Batch) -> float:
    model.eval()
    found = float(_loss(model, held))
    model.train()
    return found


def zeroed(model: Competition, held: Batch) -> dict[str, float]:
    """The loss of the trained network with each component's output set to zero, at once."""
    found = {}
    for name in model.components:
        with gt.ablate(model, f"components.{name}"):
            found[name] = _evaluated(model, held)
    return found
