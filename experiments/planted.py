"""Which score finds the component that matters, where it is known which one does?

Expectation: once a network has learned, influence finds what was planted, and what a network can
spare least (the chapter's 1.3, where the dip in performance is proportional to importance). Whether
it beats a Taylor score is open. A stack and a memory of slots generalise to longer words (1.1).

Method: *planted*: four views of which one tells the class (the others have a gain), four frozen
branches behind gates of known size (alike, or of another frequency, gain or offset), two layers of
heads of which one pair does the work; trained to the end by Adam. All scores have as many passes.
What counts is the share of comparisons that a score puts in order, a tie ½ (AUC). *rivals*: three
components read the same word: GRUs of which one reads the right one (blind) or is trained (frozen);
an RNN, an LSTM and a GRU; attention, a stack and a memory. They are traced every 20 steps until 99%
of held-out words are right. Losing one costs by how much the loss rises when its mean takes its
place; scores are shares, averaged over traces but the first; costs within 0.02 nats are alike.
*longer*: each component alone learns brackets of one length, and reads words of twice that.

Limits: small networks; what matters was planted, one thing at a time, in kinds that were chosen,
not drawn. Intervals draw kinds, tasks or seeds, and each is of one number.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import count, permutations, product, takewhile
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Generator, Tensor

import gradtrace as gt
from experiments import lab, nets

ROWS = "planted", "planted-competition", "planted-longer"
PARTS = "planted", "rivals", "longer"
ALONE = "rnn", "lstm", "gru", "attention", "stack", "memory"
KINDS = [("views", x) for x in ("0.25", "1", "4", "16")] + [("heads", "induction")]
KINDS += [("gates", x) for x in ("equal", *nets.VARIED)]
TASKS = [(family, number) for family in nets.FAMILIES for number in (0, 1)]
FULL: dict[str, Any] = {"seeds": [64, 5, 5], "kinds": KINDS, "steps": [3_200, 300, 600]}
FULL |= {"tasks": [*product(TASKS, nets.CONTESTS)], "passes": 64, "alone": ALONE}
ONE = {"seeds": [1, 1, 1], "tasks": FULL["tasks"][1:4]}
SETTINGS: dict[str, dict[str, Any]] = {
    "full": FULL,
    "quick": FULL | ONE | {"kinds": KINDS[2:6], "steps": [80, 20, 80], "passes": 16},
    "small": FULL
    | ONE
    | {"kinds": KINDS[2:3], "steps": [1, 1, 1], "passes": 4}
    | {"tasks": FULL["tasks"][3:4], "alone": ALONE[2:4]},
}
COST, TARGET, MARGIN = 4, 0.99, 0.02
TRACED = "greedy", "edge", "viterbi", "decomposition", "mass"
TAYLOR, SIGNED, HARD, PAIRS = "Taylor, absolute", "Taylor, signed", "views 16", "pairs"
LINES = "greedy", "greedy, weighted", "decomposition", SIGNED, TAYLOR
SHOWN = "greedy, weighted", "decomposition, size", "mass, p = 8", TAYLOR
ORDER = "score", "planted", "less Taylor, absolute", "views × 16", PAIRS, "rivals", "less signed"
LINE = "share", "slope", "cost at share 0", "R²", "correlation of ranks"
LONGER = "component", "of 8", "of 16", "of 8 that close", "of 16 that close"


def cells(settings: lab.Cell) -> list[lab.Cell]:
    """The networks of all three parts."""
    (many, some, few), (long, short, alone) = settings["seeds"], settings["steps"]
    same = {"batch": 64, "rate": 0.01, "evaluated": 512, "passes": settings["passes"]}
    found: list[lab.Cell] = []
    for seed, (network, kind) in product(range(many), settings["kinds"]):
        steps = {"heads": min(long, 400), "16": 4 * long}
        own = {"network": network, "kind": kind, "rate": 0.005 if network == "heads" else 0.01}
        own |= {"seed": seed, "steps": steps.get(network, steps.get(kind, long))}
        found.append({"part": "planted", **same, **own})
    for seed, ((family, number), contest) in product(range(some), settings["tasks"]):
        own = {"family": family, "number": number, "contest": contest, "seed": seed, "width": 12}
        found.append({"part": "rivals", **same, **own, "steps": short})
    for seed, kind in product(range(few), settings["alone"]):
        own = {"kind": kind, "seed": seed, "width": 16, "length": 8}
        found.append({"part": "longer", **same, **own, "steps": alone})
    return found


def measure(cell: lab.Cell) -> lab.Row:
    """Train a network, and score its components or let it read longer words."""
    return longer(cell) if cell["part"] == "longer" else scored(cell)


def learn(model: nets.Planted, cell: lab.Cell, name: str, done: Callable[[int], bool]) -> None:
    """Train until it is done."""
    batches, steps = nets.source(name, "batches"), takewhile(lambda step: not done(step), count())
    optimizer = torch.optim.Adam(model.parameters(), lr=cell["rate"], fused=True)
    draw = partial(model.draw, cell["batch"], batches)
    lab.train(model, optimizer, (lambda: model.losses(*draw()).mean() for _ in steps))


def scored(cell: lab.Cell) -> lab.Row:
    """Scores before, at 400 steps and at the end; of rivals every 20 steps, and what each costs."""
    rivals, looks = cell["part"] == "rivals", list[lab.Row]()
    own = ("family", "number", "contest", "seed") if rivals else ("part", "network", "kind", "seed")
    name = "/".join(str(cell[each]) for each in own)
    if rivals:
        task = nets.task(cell["family"], cell["number"])
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
    batch = model.draw(passes, stream) if rivals else None
    by = {name: name.split(" > ") for group in model.groups for name in group}
    names = [name for name, both in by.items() if len(both) == 1]
    given = run(model, names, model.draw(256, stream))[1]
    mean = {name: x.detach().mean(0) for name, x in given.items()}

    def draw(cost: int) -> tuple[Tensor, Tensor]:
        some = max(1, passes // cost)
        return (batch[0][:some], batch[1][:some]) if batch else model.draw(some, stream)

    def trace(cost: int, rule: str = "greedy") -> Any:
        with gt.watch(model) as watch:
            losses = model.losses(*draw(cost))
        return watch.trace(losses, rule=rule)

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model.requires_grad_(False).get_submodule("stem").requires_grad_()
    found = traced(trace, by, rivals)
    for parameter in trained:
        parameter.requires_grad_()
    return found | baselines(model, draw(1), mean)


def traced(trace: Any, by: Mapping[str, list[str]], rivals: bool) -> dict[str, Any]:
    """Paths to the stem; of a pair what passes both: a + b - (a or b)."""

    def both(each: Mapping[str, Any]) -> dict[str, Any]:
        pairs = {name: two for name, two in by.items() if len(two) == 2}
        return {**each, **{name: each[a] + each[b] - each[name] for name, (a, b) in pairs.items()}}

    found = {}
    for rule in ("greedy", "edge", "viterbi"):
        table = trace(1 if rivals else COST, rule).influence(by)
        found[rule] = both(table.shares)
        found[f"{rule}, weighted"] = both(dict(zip(table.names, table.column("weighted"))))
    for p in (1, 2, 8):
        found[f"mass, p = {p}"] = both(trace(COST).mass(by, p=p).shares)
    last = trace(1 if rivals else len(by) + 1)
    split, whole = last.decompose(by), torch.cat([g.flatten() for g in last.gradients.values()])
    through = {n: [split.gradients(n)[leaf].flatten() for leaf in last.gradients] for n in by}
    each = both({name: torch.cat(some) for name, some in through.items()})
    found["decomposition"] = {name: float(g @ whole / (whole @ whole)) for name, g in each.items()}
    found["decomposition, size"] = {n: float(g.norm() / whole.norm()) for n, g in each.items()}
    return found


def run(model: nets.Planted, names: Sequence[str], batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The losses of samples, and what modules give."""
    found: dict[str, Tensor] = {}

    hooks = [
        model.get_submodule(name).register_forward_hook(
            partial(lambda n, *x: found.update({n: x[-1]}), name)
        )
        for name in names
    ]
    losses = model.losses(*batch)
    for hook in hooks:
        hook.remove()
    return losses, found


def baselines(model: nets.Planted, batch: Any, mean: Mapping[str, Tensor]) -> dict[str, Any]:
    """Scores of one pass without tracing; Taylor: gradient × (activation - its mean)."""
    losses, given = run(model, [*mean], batch)
    free = [p for p in model.parameters() if p.requires_grad]
    ask = partial(torch.autograd.grad, retain_graph=True, materialize_grads=True)
    own, found = dict(zip(free, ask(losses.mean(), free))), defaultdict[str, Any](dict)
    slopes = ask(losses.sum(), [*given.values()])
    for name, g, x in zip(given, slopes, (x.detach() for x in given.values())):
        parts, apart = [*model.get_submodule(name).parameters()], x - mean[name]
        effect = (g * apart).flatten(1).sum(1)
        numbers = {
            SIGNED: -effect.mean(),
            TAYLOR: effect.abs().mean(),
            "|gradient × activation|": (g * x).abs().flatten(1).sum(1).mean(),
            "activation deviation": apart.square().mean().sqrt(),
            "gradient norm": sum(own[p].square().sum() for p in parts if p in own) ** 0.5,
            "parameter norm": sum(p.detach().square().sum() for p in parts) ** 0.5,
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


def means(entries: Iterable[tuple[Any, float]]) -> dict[Any, float]:
    """The mean of what has the same key."""
    found = defaultdict[Any, list[float]](list)
    for key, value in entries:
        found[key].append(value)
    return {key: fmean(values) for key, values in found.items()}


def by_kind(rows: Sequence[lab.Row]) -> dict[str, dict[str, float]]:
    """Of each score the percentage in order at the end, by kind: a mean over networks."""
    ends = sorted(rows, key=lambda row: row["looks"][-1]["step"])
    last = {(row["network"], row["kind"], row["seed"]): row for row in ends}
    each = means(
        ((score, PAIRS if " > " in next(iter(group)) else f"{network} {kind}"), found)
        for (network, kind, _), row in last.items()
        for score, said in row["looks"][-1]["scores"].items()
        for group in row["truth"]
        if group.keys() <= said.keys()
        for found in in_order(said, group)
    )
    scores = dict.fromkeys(score for score, _ in each)
    return {score: {k: x for (s, k), x in each.items() if s == score} for score in scores}


def shares(row: lab.Row, score: str) -> dict[str, float]:
    """Those of rivals, means over traces but the first."""
    looks = [look["scores"][score] for look in row["looks"][1:] or row["looks"]]
    sizes = [sum(map(abs, said.values())) or 1.0 for said in looks]
    return {n: fmean(said[n] / size for said, size in zip(looks, sizes)) for n in row["held"]}


def by_task(rows: Sequence[lab.Row], score: str) -> list[float]:
    """The percentage in order for each task: a mean over contests, in each over networks."""
    each = [(row, in_order(shares(row, score), row["held"], MARGIN)) for row in rows]
    own = means(((row["task"], row["contest"]), fmean(some)) for row, some in each if some)
    return [*means((task, value) for (task, _), value in own.items()).values()]


def told(values: Sequence[float], form: str = ".1f") -> str:
    """A mean and its interval, if there are values."""
    return lab.said(lab.interval(values), form) if values else "–"


def _score(score: str, kinds: Mapping[str, Any], rivals: Sequence[lab.Row]) -> list[object]:
    """Means are of the kinds that the Taylor score has, too: pairs are apart."""
    own, taylor = kinds[score], kinds[TAYLOR]
    both = [kind for kind in taylor if taylor.keys() <= own.keys()]
    has = both and score in rivals[0]["looks"][0]["scores"]
    tasks, signed = (by_task(rivals, name) if has else [] for name in (score, SIGNED))
    name = f"**{score}**" if score.startswith(TRACED) else score.replace("|", "")
    mean, gaps = [own[kind] for kind in both], [own[kind] - taylor[kind] for kind in both]
    alone = [f"{own[kind]:.0f}" if kind in own else "–" for kind in (HARD, PAIRS)]
    more = told([a - b for a, b in zip(tasks, signed)], "+.1f")
    return [name, told(mean), told(gaps, "+.1f"), *alone, told(tasks), more]


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
    best = sorted(kinds, key=lambda score: -fmean(kinds[score].get(k, 0) for k in kinds[TAYLOR]))
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
