"""Of an RNN, an LSTM and a GRU, does a network need the one with more influence more?

Expectation: yes. The chapter (1.3) has the three read the same words, averages their outputs,
removes the most influential one, then the second, and expects performance to dip in proportion. It
also expects that influence depends on the task and its data.

Method: an embedding, the three side by side, their average and a linear layer learn to model
copying, Dyck words, counting, a text of a small grammar, or Shakespeare's. At six steps the losses
of single samples are traced by both rules; influence is a component's share of the paths of the
embedding's elements. Then each, and each two, are left out from the start, with the same weights
and batches for the rest. Samples to target are those until the loss is 90% of the way, in
logarithms, from the whole network's first to the lowest of the first half of its training; or all,
if it never is. Of each two components a score is right if it puts first the one that is dearer to
lose, and half right if both are equal; chance is 50%. That the task matters is told by the share of
influence's variance that is between tasks, and by permutations.

Limits: four tasks cannot stand for all, and a text has a larger vocabulary, too. No component was
necessary: half of the costs are below 0.12 doublings. Influence is averaged over all of training,
most of it after the target. From the start the three hand back gradient of different size
(1 : ½ : ¼), which influence sees whatever the task is.

``cells({**SETTINGS["full"], "tasks": ["a-file.txt"], "vocabulary": 1000})`` asks it of a text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import TypeAlias

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy

from experiments import data, lab, nets
from experiments.branch_ablation import (
    MEASURES,
    RULES,
    Network,
    compared,
    in_order,
    percent,
    told,
    trained,
)

TASKS = ["copy", "counting", "dyck", "text"]
FULL = {"tasks": TASKS, "seeds": 10, "vocabulary": 100, "width": 16, "steps": 1500, "batch": 32}
FULL |= {"rate": 0.005, "every": 20, "evaluated": 128, "traced": 6, "pairs": 8}
QUICK = {**FULL, "tasks": ["copy", "text"], "seeds": 1, "steps": 100, "every": 5, "rate": 0.02}
SMALL = {**QUICK, "steps": 6, "every": 2, "traced": 2, "pairs": 2}
SETTINGS = {"full": FULL, "quick": QUICK, "small": SMALL}
Tasks: TypeAlias = dict[str, list[Network]]
ROWS = "competition", "competition-shakespeare"
KINDS: dict[str, Callable[..., nn.Module]] = {"rnn": nn.RNN, "lstm": nn.LSTM, "gru": nn.GRU}
WHEN = {
    f"{rule}, {when}": (measure, looks)
    for rule, measure in RULES.items()
    for when, looks in (("before training", slice(1)), ("over training", slice(1, None)))
}


def cells(settings: lab.Cell) -> list[lab.Cell]:
    """For each task and seed the whole network, and those without one or two components."""
    shared = {name: value for name, value in settings.items() if name not in ("tasks", "seeds")}
    removed = [list(some) for count in range(3) for some in combinations(KINDS, count)]
    runs = [(task, seed) for task in settings["tasks"] for seed in range(settings["seeds"])]
    return [{"task": t, "seed": n, "removed": some, **shared} for t, n in runs for some in removed]


class Competition(nn.Module):
    """``output(mean of component(embed(x)))``; the rest starts the same whatever is removed."""

    def __init__(self, cell: lab.Cell, vocabulary: int) -> None:
        super().__init__()
        width, self.components = cell["width"], nn.ModuleDict()
        random = partial(nets.source, cell["task"], cell["seed"])
        with torch.random.fork_rng(devices=[]):
            for name in (name for name in KINDS if name not in cell["removed"]):
                torch.manual_seed(random("component", name).initial_seed())
                self.components[name] = KINDS[name](width, width, batch_first=True)
            torch.manual_seed(random("ends").initial_seed())
            self.embed = nn.Embedding(vocabulary, width)
            self.output = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:  # (batch, time) -> (batch, vocabulary, time)
        """Scores of the next token."""
        x = self.embed(tokens)
        outputs = [component(x)[0] for component in self.components.values()]
        scores: Tensor = self.output(torch.stack(outputs).mean(0)).transpose(1, 2)
        return scores


def measure(cell: lab.Cell) -> lab.Row:
    """Train a network; measure the whole one."""
    random = partial(nets.source, cell["task"], cell["seed"])
    task, ignore = data.task(cell["task"], cell["vocabulary"]), data.UNASKED
    model = Competition(cell, task.vocabulary)

    def losses(count: int, source: Generator, held: bool = False) -> Tensor:
        tokens, targets = (task.held if held else task.draw)(count, source)
        each = cross_entropy(model(tokens), targets, ignore_index=ignore, reduction="none")
        return each.sum(1) * count / (targets != ignore).sum()  # their mean is that of all tokens

    parts = {} if cell["removed"] else {name: f"components.{name}" for name in KINDS}
    return trained(model, cell, parts, random, losses)


def kept(row: lab.Row) -> list[lab.Row]:
    """A row of docs/experiments names a file of text beside the task."""
    return [{**row, "task": row["text"] or row["task"]}]


def contests(rows: Sequence[lab.Row]) -> Tasks:
    """The whole networks of each task, and what it costs to remove one or two components."""
    groups: dict[tuple[str, int], dict[str, lab.Row]] = {}
    for row in rows:
        groups.setdefault((row["task"], row["seed"]), {})[" ".join(row["removed"])] = row
    found: dict[str, list[Network]] = {}
    for (task, _), group in groups.items():
        without = {names: row["curve"] for names, row in group.items() if names}
        each = compared(group[""], without, [*combinations(KINDS, 2)])
        found.setdefault(task, []).append(each)
    return found


def tables(rows: Sequence[lab.Row]) -> list[lab.Table]:
    """Pairs in order, the chapter's procedure, components by task, and what the task explains."""
    tasks = contests(rows)
    known = {task: some for task, some in tasks.items() if task in TASKS} or tasks
    parts = [(task, *component(some, kind)) for task, some in tasks.items() for kind in KINDS]
    named = [(kind, *(by_task(known, kind, m, at) for m, at in WHEN.values())) for kind in KINDS]
    return [
        in_tasks(tasks, known),
        procedure(tasks, known),
        ("Components", ("task", "component", *RULES.values(), "cost, doublings of samples"), parts),
        (f"Variance of influence between {len(known)} tasks", ("component", *WHEN), named),
    ]


def in_tasks(tasks: Tasks, known: Tasks) -> lab.Table:
    """In how many pairs each score is right: in all known tasks, and in each task."""
    every = [each for some in known.values() for each in some]
    rows = []
    for m in MEASURES:
        tasks_drawn = lab.interval(
            [float(percent(in_order(some, m)[None])) for some in known.values()]
        )
        found = [told(some, m, ".0f") for some in (every, *tasks.values())]
        rows.append((m, *found, lab.said(tasks_drawn, ".0f")))
    title = f"% of pairs in order by samples to target, {len(every)} networks"
    return title, ("score", "all", *tasks, "tasks drawn"), rows


def procedure(tasks: Tasks, known: Tasks) -> lab.Table:
    """The chapter's: the first by score is removed, and the second as well."""
    rows = []
    for m in MEASURES:
        by = {task: [ratios(some, m, n) for n in (1, 2)] for task, some in tasks.items()}
        found = [[x for task in known for x in by[task][n]] for n in (0, 1)]
        found += [[fmean(by[task][n]) for task in known] for n in (0, 1)]
        found += [each for task in tasks if task not in known for each in by[task]]
        logs = map(lab.interval, found)
        rows.append((m, *(lab.said((2**x, 2**low, 2**high)) for x, low, high in logs)))
    whom = ("", ", tasks drawn", *(f", {task}" for task in tasks if task not in known))
    columns = ("score", *(f"{n} removed{who}" for who in whom for n in (1, 2)))
    return "Samples without the first by score over those without the last", columns, rows


def ratios(some: Sequence[Network], measure: str, count: int) -> list[float]:
    """log₂ of samples without the first so many over those without the last."""
    found = []
    for each in some:
        order = sorted(KINDS, key=lambda kind: (-each.scores[measure][kind], kind))
        first, last = ({*order[:count]}, {*order[-count:]})
        a, b = (" ".join(kind for kind in KINDS if kind in some) for some in (first, last))
        found.append(each.costs[a] - each.costs[b])
    return found


def component(some: Sequence[Network], kind: str) -> list[str]:
    """Its mean influences in a task, and what it costs to lose."""
    values = [[each.scores[m][kind] for each in some] for m in RULES.values()]
    cost = [each.costs[kind] for each in some]
    return [kind, *map(lab.spoken, (*values, cost))]


def by_task(tasks: Tasks, kind: str, measure: str, looks: slice) -> str:
    """What tasks explain of a component's influence at these looks, and how often chance does."""
    numbers = [
        (at, fmean(look[measure][kind] for look in each.row["scores"][looks]))
        for at, some in enumerate(tasks.values())
        for each in some
    ]
    points, random = torch.tensor(numbers, dtype=torch.float64), torch.Generator().manual_seed(0)
    orders = torch.rand(lab.DRAWS, len(points), generator=random).argsort(1)
    mixed = torch.stack([points[:, 0].expand(lab.DRAWS, -1), points[:, 1][orders]], -1)
    chance = int((explained(mixed) >= explained(points[None]) - 1e-12).sum())
    found = lab.said(lab.resampled(points, explained))
    return f"{found}, p = {(1 + chance) / (1 + lab.DRAWS):.1g}"


def explained(draws: Tensor) -> Tensor:
    """The share of the variance of the second column that is between tasks, for each draw."""
    tasks = draws[..., :1] == torch.arange(int(draws[..., 0].max()) + 1)  # (draws, networks, tasks)
    apart = draws[..., 1:] - draws[..., 1:].mean(1, keepdim=True)
    between = (apart * tasks).sum(1).square() / tasks.sum(1).clamp_min(1)
    found: Tensor = between.sum(1) / apart.square().sum((1, 2))
    return found


def figure(rows: Sequence[lab.Row], path: Path) -> None:
    """The influence of the GRU over training, the mean of each task."""
    curves, measure = {}, RULES["viterbi"]
    for task, some in contests(rows).items():
        looks = [*zip(*(each.row["scores"] for each in some))]
        shares = [fmean(look[measure]["gru"] for look in each) for each in looks]
        curves[task] = [each[0]["step"] for each in looks], shares
    what = "Influence of the GRU (viterbi) over training"
    lab.lines(path, what, "step", "share of paths", curves)
