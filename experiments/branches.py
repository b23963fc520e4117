"""Is time linear in the size of the scalar graph, on random networks with branches?

Expectation: yes (Figure 1.3 of the chapter, for its own engine and PyTorch's), and so for tracing.
But the chapter's networks are small, and each operator costs something whatever its size: their
time may follow the number of operators, and be linear in scalars for larger networks only.

Method: networks of the chapter's procedure (``nets``), and up to 32 such expanded layers after each
other, on one sample with a squared error. PyTorch's backward, our engine, recording (``trace``) and
tracing (the influence of modules, recording included) are timed in turns; the best round counts,
the forward pass does not. Least-squares lines go over |V'| + |E'|, over operators, and over both;
intervals draw networks. |V'| and |E'| follow from widths, |V'| is also counted from the graph.
The procedure is held against its probabilities.

Limits: one sample and one thread. R² tells which line fits, not which law holds beyond these sizes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from math import sqrt
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter

import torch
from torch import Tensor
from torch.nn.functional import mse_loss

import gradtrace as gt
from experiments import lab, nets

ALONE = True  # it measures time
SETTINGS = {
    "full": {"single": 100, "stacks": [2, 4, 8, 16, 32], "each": 6, "rounds": 15, "plans": 20_000},
    "quick": {"single": 12, "stacks": [2, 4, 8], "each": 2, "rounds": 5, "plans": 2_000},
    "small": {"single": 4, "stacks": [2], "each": 3, "rounds": 1, "plans": 200},
}
WAYS = "PyTorch", "own engine", "recording", "tracing"
GROUPS = "the chapter's", "larger"
LEVELS = 4  # of the procedure; deeper ones are rare
SCALARS, OPERATORS = 0, 1  # columns, before that of times
COLUMNS = (
    *("networks", "pass", "ns a scalar", "R² over scalars", "over operators"),
    *("operators less scalars", "over both", "times PyTorch's"),
)
SIZES = "networks", "of", "least", "median", "most"
CHANCES = "level", "layers", "became diamonds", "probability", "apart, standard errors"


def cells(settings: lab.Cell) -> list[lab.Cell]:
    """The procedure, and each network; its seed says all of it."""
    seeds = [(1, seed) for seed in range(settings["single"])]
    seeds += [(n, 1000 * n + k) for n in settings["stacks"] for k in range(settings["each"])]
    rounds = settings["rounds"]
    found = [{"layers": layers, "seed": seed, "rounds": rounds} for layers, seed in seeds]
    return [{"plans": settings["plans"]}, *found]


def measure(cell: lab.Cell) -> lab.Row:
    """The procedure; or the sizes of a network, its gradients, and the best time of each pass."""
    if "plans" in cell:
        return procedure(cell["plans"])
    model = nets.Branching(cell["seed"], cell["layers"])
    x, y = torch.randn(2, 1, nets.ENDS, generator=torch.Generator().manual_seed(cell["seed"]))

    def loss_of() -> Tensor:
        return mse_loss(model(x), y)

    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(cell["rounds"]):
        for way in WAYS:
            seconds[way].append(timed(way, model, loss_of))
    best = {way: min(some) for way, some in seconds.items()}
    return {**facts(model, loss_of), "seconds": best}


def procedure(count: int) -> lab.Row:
    """How many layers there are at each level, and how many of them became diamonds."""
    found = [part for seed in range(count) for part in nets.parts(nets.plan(Random(seed)))]
    seen = Counter(len(way) for way, _ in found)
    split = Counter(len(way) for way, part in found if not isinstance(part, int))
    return {"seen": [seen[n] for n in range(LEVELS)], "split": [split[n] for n in range(LEVELS)]}


def timed(way: str, model: nets.Branching, loss_of: Callable[[], Tensor]) -> float:
    """The seconds of one pass."""
    model.zero_grad(set_to_none=True)
    watch = gt.watch(model)
    with torch.enable_grad() if way == "PyTorch" else watch:
        loss = loss_of()
    ways: dict[str, Callable[[], object]] = {
        "PyTorch": loss.backward,
        "own engine": lambda: watch.backward(loss),
        "recording": lambda: watch.trace(loss),
        "tracing": lambda: watch.trace(loss).influence(),
    }
    began = perf_counter()
    result = ways[way]()
    took = perf_counter() - began
    del result
    return took


def facts(model: nets.Branching, loss_of: Callable[[], Tensor]) -> lab.Row:
    """Sizes, and how far our gradients are from PyTorch's, relative to their largest element."""
    with gt.watch(model) as watch:
        loss = loss_of()
    graph, ours, names = watch.graph(loss), watch.backward(loss), dict(model.named_parameters())
    theirs = torch.autograd.grad(loss, [*names.values()])
    off = max(float((ours[name] - g).abs().max()) for name, g in zip(names, theirs))
    vertices, edges = sizes(model.plans)
    return {
        "vertices": vertices,
        "edges": edges,
        "counted": sum(operator.size for operator in graph),
        "operators": len(graph),
        "difference": off / max(float(g.abs().max()) for g in theirs),
    }


def sizes(plans: Sequence[nets.Plan]) -> tuple[int, int]:
    """|V'| and |E'| of a network and its loss.

    A layer from m to n has a weight, its transpose, a bias, a product and a tanh: 2·m·n + 3·n
    scalars. Edges: m·n to transpose, m·n into the product, n from the bias, n into the tanh, and
    m·n from an input that is not the network's. A diamond copies its n scalars.

    >>> sizes([495])
    (21316, 25770)
    """
    vertices, edges, inputs = 1, nets.ENDS, nets.ENDS
    for depth, planned in enumerate([*plans, nets.ENDS]):
        for _, part in nets.parts(planned):
            n = nets.units(part)
            is_layer = isinstance(part, int)
            vertices += 2 * inputs * n + 3 * n if is_layer else n
            edges += (3 if depth else 2) * inputs * n + 2 * n if is_layer else n
        inputs = nets.units(planned)
    return vertices, edges


def kept(row: lab.Row) -> list[lab.Row]:
    """Rows of docs/experiments have both ways to count; one of them is a drawing."""
    if row["kind"] == "procedure":
        return [{"plans": row["networks"], "seen": row["seen"], "split": row["expanded"]}]
    if row["kind"] == "drawing":
        return []
    vertices, edges = row["by_hand"]
    return [{**row, "counted": row["vertices"], "vertices": vertices, "edges": edges}]


def groups(rows: Sequence[lab.Row]) -> dict[str, list[lab.Row]]:
    """The chapter's networks, of one expanded layer, and larger ones, by size."""
    some = sorted((row for row in rows if "layers" in row), key=lambda r: r["vertices"])
    return {name: [r for r in some if (r["layers"] == 1) == (name == GROUPS[0])] for name in GROUPS}


def explained(draws: Tensor, columns: Sequence[int]) -> Tensor:
    """R² of the line of the last column over these, for each draw; 0 if nothing differs."""
    apart = draws - draws.mean(1, keepdim=True)
    apart = apart / apart.norm(dim=1, keepdim=True).clamp_min(1e-300)
    x, y = apart[..., columns], apart[..., -1:]
    both = x.mT @ y
    found: Tensor = both.mT @ torch.linalg.pinv(x.mT @ x, hermitian=True) @ both
    return found.flatten()


def slope(draws: Tensor) -> Tensor:
    """Nanoseconds a scalar."""
    apart = draws - draws.mean(1, keepdim=True)
    x, y = apart[..., SCALARS], apart[..., -1]
    return 1e9 * (x * y).sum(1) / (x * x).sum(1)


def more(draws: Tensor) -> Tensor:
    """What operators explain more than scalars do."""
    return explained(draws, [OPERATORS]) - explained(draws, [SCALARS])


def _fit(name: str, way: str, rows: Sequence[lab.Row]) -> list[object]:
    seconds = [row["seconds"][way] for row in rows]
    numbers = [(r["vertices"] + r["edges"], r["operators"], t) for r, t in zip(rows, seconds)]
    points = torch.tensor(numbers, dtype=torch.float64)
    line = partial(explained, columns=[SCALARS])
    told = [lab.said(lab.resampled(points, of), ".3f") for of in (slope, line)]
    gain = lab.said(lab.resampled(points, more), "+.2f")
    some, both = (float(explained(points[None], c)) for c in ([OPERATORS], [SCALARS, OPERATORS]))
    times = median(t / row["seconds"]["PyTorch"] for row, t in zip(rows, seconds))
    return [f"{len(rows)} {name}", way, *told, some, gain, both, times]


def _chances(row: lab.Row) -> list[list[object]]:
    """Shares of layers that became diamonds, and how many standard errors off they are."""
    found: list[list[object]] = []
    for level, (seen, split) in enumerate(zip(row["seen"], row["split"])):
        share, chance = split / seen, nets.PROBABILITY / 2**level
        error = sqrt(chance * (1 - chance) / seen)
        found.append([level, f"{seen:,}", share, chance, (share - chance) / error])
    return found


def tables(rows: Sequence[lab.Row]) -> list[lab.Table]:
    """Lines through times, sizes, and the procedure beside its probabilities."""
    found = groups(rows)
    every = [row for some in found.values() for row in some]
    off = max(row["difference"] for row in every)
    same = sum(row["counted"] == row["vertices"] for row in every)
    spread = [
        (name, what, *(f"{of(row[what] for row in some):,.0f}" for of in (min, median, max)))
        for name, some in found.items()
        for what in ("vertices", "edges", "operators")
    ]
    fits = [_fit(name, way, some) for name, some in found.items() for way in WAYS]
    chances = _chances(next(row for row in rows if "plans" in row))
    return [
        (f"Lines through times (gradients are at most {off:.1e} from PyTorch's)", COLUMNS, fits),
        (f"Sizes ({same} of {len(every)} are as the graph's)", SIZES, spread),
        ("The procedure", CHANCES, chances),
    ]


def figure(rows: Sequence[lab.Row], path: Path) -> None:
    """Times over size."""
    some = [row for group in groups(rows).values() for row in group]
    size = [row["vertices"] + row["edges"] for row in some]
    curves = {way: (size, [1e3 * row["seconds"][way] for row in some]) for way in WAYS}
    what, both = "Times of random networks with branches", {"xscale": "log", "yscale": "log"}
    lab.lines(path, what, "|V'| + |E'|, scalars", "milliseconds", curves, **both)
