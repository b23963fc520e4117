"""Which score finds the component that matters, where it is known which one does?

Expectation: once a network has learned, influence finds what was planted, and what a network can
spare least (the chapter's 1.3, where the dip in performance is proportional to importance). Whether
it beats a Taylor score is open. A stack and a memory of slots generalise to longer words (1.1).

Method: *planted*: four views of which one tells the class (the others have a gain), four frozen
branches behind gates of known size (alike, or of another frequency, gain or offset), two layers of
heads of which one each does the work. All scores have as many passes. A score counts by the share
of comparisons that it puts in order, a tie ½ (AUC). *rivals*: three components read the same word:
GRUs, one of them trained; an RNN, an LSTM and a GRU; attention, a stack and a memory. They are
traced every 20 steps until 99% of held-out words are right. Losing one costs the rise of the loss
when its mean takes its place; scores are shares, averaged over traces but the first; costs within
0.02 nats are alike. *longer*: each alone learns brackets, and reads words of twice the length.

Limits: small networks; what matters was planted, one thing at a time, in kinds that were chosen,
not drawn. Intervals draw kinds, tasks or seeds, and each is of one number.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from itertools import count, permutations, product, takewhile
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Generator, Tensor
from torch.nn.utils import parameters_to_vector

import gradtrace as gt
from experiments import lab, nets

ROWS = "planted", "planted-competition", "planted-longer"
PARTS = "planted", "rivals", "longer"
ALONE = "rnn", "lstm", "gru", "attention", "stack", "memory"
KINDS = [("views", x) for x in ("0.25", "1", "4", "16")] + [("heads", "induction")]
KINDS += [("gates", x) for x in ("equal", *nets.VARIED)]
FULL: dict[str, Any] = {"seeds": [64, 5, 5], "kinds": KINDS, "steps": [3_200, 300, 600]}
FULL |= {"tasks": [*product(nets.TASKS, (0, 1), nets.CONTESTS)], "passes": 64, "alone": ALONE}
ONE = FULL | {"seeds": [1, 1, 1], "kinds": KINDS[2:6], "tasks": FULL["tasks"][:3]}
SETTINGS: dict[str, dict[str, Any]] = {
    "full": FULL,
    "quick": ONE | {"steps": [80, 20, 80], "passes": 16},
    "small": ONE | {"kinds": KINDS[2:3], "steps": [1, 1, 1], "passes": 4, "alone": ALONE[2:4]},
}
COST, TARGET, MARGIN = 4, 0.99, 0.02
TRACED = "greedy", "edge", "viterbi", "decomposition", "mass"
TAYLOR, SIGNED, HARD = "Taylor, absolute", "Taylor, signed", "views 16"
DROPPED = "decomposition, size", "gradient norm", "EAP", "EAP-IG"  # in older rows
LINES = "greedy", "greedy, weighted", "decomposition", SIGNED, TAYLOR
SHOWN = "greedy", "decomposition", "mass, p = 8", TAYLOR
ORDER = "score", "planted", "less Taylor, absolute", "views × 16", "rivals", "less signed"
LINE = "share", "slope", "cost at share 0", "R²", "correlation of ranks"
LONGER = "component", "of 8", "of 16", "of 8 that close", "of 16 that close"


def cells(settings: lab.Cell) -> list[lab.Cell]:
    """The networks of all three parts."""
    (many, some, few), (long, short, alone) = settings["seeds"], settings["steps"]
    same = {"batch": 64, "rate": 0.01, "evaluated": 512, "passes": settings["passes"]}
    found: list[lab.Cell] = []
    for seed, (network, kind) in product(range(many), settings["kinds"]):
        steps = {"induction": min(long, 400), "16": 4 * long}.get(kind, long)
        own = {"network": network, "kind": kind, "rate": 0.005 if network == "heads" else 0.01}
        found.append({"part": "planted", **same, **own, "seed": seed, "steps": steps})
    for seed, (family, number, contest) in product(range(some), settings["tasks"]):
        own = {"family": family, "number": number, "contest": contest, "seed": seed, "width": 12}
        found.append({"part": "rivals", **same, **own, "steps": short})
    for seed, kind in product(range(few), settings["alone"]):
        own = {"kind": kind, "seed": seed, "width": 16, "length": 8}
        found.append({"part": "longer", **same, **own, "steps": alone})
    return found


def learn(model: nets.Planted, cell: lab.Cell, name: str, done: Callable[[int], bool]) -> None:
    """Train until it is done."""
    draw = partial(model.draw, cell["batch"], nets.source(name, "batches"))
    optimizer = torch.optim.Adam(model.parameters(), lr=cell["rate"], fused=True)
    for _ in takewhile(lambda step: not done(step), count()):
        lab.train(model, optimizer, [lambda: model.losses(*draw()).mean()])


def measure(cell: lab.Cell) -> lab.Row:
    """Scores before, at 400 steps and at the end; of rivals every 20 steps, and what each costs."""
    if cell["part"] == "longer":
        return longer(cell)
    rivals, looks = cell["part"] == "rivals", list[lab.Row]()
    own = ("family", "number", "contest", "seed") if rivals else ("part", "network", "kind", "seed")
    name = "/".join(str(cell[each]) for each in own)
    if rivals:
        task = nets.TASKS[cell["family"]][cell["number"]]
        model: nets.Planted = nets.Rivals(cell["contest"], task, cell["width"], name)
    else:
        model = nets.planted(cell["network"], cell["kind"], cell["seed"])
    held = model.draw(cell["evaluated"], nets.source(name, "held" if rivals else "evaluation"))

    def done(step: int) -> bool:
        early = rivals and step and step % 10 == 0 and model.right(*held) >= TARGET
        if early or step in (0, 400, cell["steps"]) or (rivals and step % 20 == 0):
            stream = nets.source(name, f"{'traced' if rivals else 'scored'} {step}")
            found = scores(model, stream, cell["passes"], rivals)
            looks.append({"step": step, "right": model.right(*held), "scores": found})
        return bool(early or step == cell["steps"])

    learn(model, cell, name, done)
    if rivals:
        return {"looks": looks, "task": task.name, "held": ablated(model, held)}
    return {"looks": looks, "truth": model.groups}


@torch.no_grad()
def ablated(model: nets.Planted, held: tuple[Tensor, Tensor]) -> dict[str, float]:
    """By how much the loss rises when the mean takes the place of a component's output."""
    whole, found = float(model.losses(*held).mean()), {}
    for part in model.groups[0]:
        with gt.ablate(model, part, how="mean"):
            found[part] = float(model.losses(*held).mean()) - whole
    return found


def longer(cell: lab.Cell) -> lab.Row:
    """How often a component is right: in words as long as those it learned, and twice as long; in
    all, and in those whose last letter closes a bracket.
    """
    kind, length, found = cell["kind"], cell["length"], {}
    name, room = f"longer/{kind}/{cell['seed']}", [2 * length] if kind in nets.OWN else []
    model = nets.Rivals(kind, nets.brackets(2, length), cell["width"], name, *room)
    learn(model, cell, name, lambda step: step == cell["steps"])
    for times in (1, 2):
        model.task = nets.brackets(2, times * length)
        x, y = model.draw(4 * cell["evaluated"], nets.source(name, times))
        right = (model(x).argmax(-1) == y).double()
        found[str(times)] = [float(right.mean()), float(right[x[:, 0, -1] == 2].mean())]
    return {"right": found}


def scores(model: nets.Planted, stream: Generator, passes: int, rivals: bool) -> dict[str, Any]:
    """What each score says. For planted components each has new samples, so many that all cost as
    many backward passes; for rivals all have the first of one batch.
    """
    model = deepcopy(model).requires_grad_(False)
    model.get_submodule("stem").requires_grad_()  # where all paths end
    batch = model.draw(passes, stream) if rivals else None
    names = [name for group in model.groups for name in group]
    given = run(model, names, model.draw(256, stream))[1]
    mean = {name: x.detach().mean(0) for name, x in given.items()}

    def draw(cost: int) -> tuple[Tensor, Tensor]:
        some = max(1, passes // cost)
        return (batch[0][:some], batch[1][:some]) if batch else model.draw(some, stream)

    def trace(cost: int, rule: str = "greedy") -> Any:
        with gt.watch(model) as watch:
            losses = model.losses(*draw(cost))
        return watch.trace(losses, rule=rule)

    return traced(trace, names, rivals) | baselines(model, draw(1), mean)


def traced(trace: Any, by: Sequence[str], rivals: bool) -> dict[str, Any]:
    """Shares of the paths to the stem, and of its gradient."""
    found = {}
    for rule in ("greedy", "edge", "viterbi"):
        table = trace(1 if rivals else COST, rule).influence(by)
        found[rule] = table.shares
        found[f"{rule}, weighted"] = dict(zip(table.names, table.column("weighted")))
    for p in (1, 2, 8):
        found[f"mass, p = {p}"] = trace(COST).mass(by, p=p).shares
    last = trace(1 if rivals else len(by) + 1)
    split, leaves = last.decompose(by), last.gradients.items()
    whole = float(sum(g.square().sum() for _, g in leaves))
    along = {n: sum((split.gradients(n)[leaf] * g).sum() for leaf, g in leaves) for n in by}
    return found | {"decomposition": {name: float(g) / whole for name, g in along.items()}}


def run(model: nets.Planted, names: Sequence[str], batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The losses of samples, and what modules give."""
    found: dict[str, Tensor] = {}
    hooks = [
        model.get_submodule(name).register_forward_hook(lambda *x, n=name: found.update({n: x[2]}))
        for name in names
    ]
    losses = model.losses(*batch)
    for hook in hooks:
        hook.remove()
    return losses, found


def baselines(model: nets.Planted, batch: Any, mean: Mapping[str, Tensor]) -> dict[str, Any]:
    """Scores of one pass without tracing; Taylor: gradient × (activation - its mean)."""
    losses, given = run(model, [*mean], batch)
    found: dict[str, Any] = defaultdict(dict)
    slopes = torch.autograd.grad(losses.sum(), [*given.values()])
    for (name, x), g in zip(given.items(), slopes):
        apart = x.detach() - mean[name]
        effect = (g * apart).flatten(1).sum(1)
        numbers = {
            SIGNED: -effect.mean(),
            TAYLOR: effect.abs().mean(),
            "|gradient × activation|": (g * x.detach()).abs().flatten(1).sum(1).mean(),
            "activation deviation": apart.square().mean().sqrt(),
            "parameter norm": parameters_to_vector(model.get_submodule(name).parameters()).norm(),
        }
        for score, number in numbers.items():
            found[score][name] = float(number)
    return found


def kept(row: lab.Row) -> list[lab.Row]:
    """Rows of docs/experiments have the parts in files; random circuits were a control."""
    part = PARTS[ROWS.index(row["rows"])]
    return [{**row, "part": part}] if row.get("kind") != "random" else []


def in_order(said: lab.Cell, truth: lab.Cell, margin: float = 0.0) -> list[float]:
    """For each comparison 100 where a score has the order of the truth, 50 for a tie."""
    pairs = [(a, b) for a, b in permutations(truth, 2) if truth[a] - truth[b] > margin]
    return [50.0 if said[a] == said[b] else 100.0 * (said[a] > said[b]) for a, b in pairs]


def by_kind(rows: Sequence[lab.Row]) -> dict[str, dict[str, float]]:
    """Of each score the percentage in order at the end, by kind: a mean over networks."""
    ends = sorted(rows, key=lambda row: row["looks"][-1]["step"])
    last = {(row["network"], row["kind"], row["seed"]): row for row in ends}
    found: dict[str, Any] = defaultdict(lambda: defaultdict(list))
    for (network, kind, _), row in last.items():
        groups = [group for group in row["truth"] if " > " not in "".join(group)]
        for score, said in row["looks"][-1]["scores"].items():
            for group in groups if score not in DROPPED else []:
                found[score][f"{network} {kind}"] += in_order(said, group)
    return {score: {kind: fmean(x) for kind, x in own.items()} for score, own in found.items()}


def shares(row: lab.Row, score: str) -> dict[str, float]:
    """Those of rivals, means over traces but the first."""
    looks = [look["scores"][score] for look in row["looks"][1:] or row["looks"]]
    sizes = [sum(map(abs, said.values())) or 1.0 for said in looks]
    return {n: fmean(said[n] / size for said, size in zip(looks, sizes)) for n in row["held"]}


def by_task(rows: Sequence[lab.Row], score: str) -> list[float]:
    """The percentage in order for each task: a mean over networks."""
    found = defaultdict[str, list[float]](list)
    for row in rows:
        if some := in_order(shares(row, score), row["held"], MARGIN):
            found[row["task"]].append(fmean(some))
    return [*map(fmean, found.values())]


def told(values: Sequence[float], form: str = ".1f") -> str:
    """A mean and its interval, if there are values."""
    return lab.said(lab.interval(values), form) if values else "–"


def _score(score: str, kinds: Mapping[str, Any], rivals: Sequence[lab.Row]) -> list[object]:
    """A score beside Taylor's, in kinds and in tasks."""
    own, tasks, signed = kinds[score], by_task(rivals, score), by_task(rivals, SIGNED)
    name = f"**{score}**" if score.startswith(TRACED) else score.replace("|", "")
    gaps = told([own[kind] - kinds[TAYLOR][kind] for kind in own], "+.1f")
    hard = f"{own[HARD]:.0f}" if HARD in own else "–"
    more = told([a - b for a, b in zip(tasks, signed)], "+.1f")
    return [name, told([*own.values()]), gaps, hard, told(tasks), more]


def _line(rows: Sequence[lab.Row], score: str) -> list[object]:
    """Of each task the line of costs over shares, and the correlation of ranks."""
    found = []
    for task in dict.fromkeys(row["task"] for row in rows):
        some = [(shares(row, score), row["held"]) for row in rows if row["task"] == task]
        x, y = ([each[k][n] for each in some for n in each[1]] for k in (0, 1))
        (slope, r2), ranks = lab.line(x, y), [[sorted(v).index(a) for a in v] for v in (x, y)]
        found.append((slope, fmean(y) - slope * fmean(x), r2, lab.line(*ranks)[0]))
    return [score, *(told(each, ".2f") for each in zip(*found))]


def tables(rows: Sequence[lab.Row]) -> list[lab.Table]:
    """Comparisons in order, costs over shares, and longer words."""
    planted, rivals, alone = ([row for row in rows if row["part"] == part] for part in PARTS)
    kinds, right = by_kind(planted), []
    best = sorted(kinds, key=lambda score: -fmean(kinds[score].values()))
    for kind in dict.fromkeys(row["kind"] for row in alone):
        own = [row["right"] for row in alone if row["kind"] == kind]
        right.append([kind, *(told([100 * r[n][k] for r in own]) for k in (0, 1) for n in "12")])
    return [
        ("Comparisons in order, %", ORDER, [_score(score, kinds, rivals) for score in best]),
        ("Nats that it costs to lose a rival", LINE, [_line(rivals, score) for score in LINES]),
        ("Right answers, %, after words of 8 letters were learned", LONGER, right),
    ]


def figure(rows: Sequence[lab.Row], path: Path) -> None:
    """What each score puts in order, by kind."""
    kinds = by_kind([row for row in rows if row["part"] == "planted"])
    curves = {name: ([*own.values()], [*own]) for name, own in kinds.items() if name in SHOWN}
    lab.lines(path, "Comparisons in order", "%", "", curves)
