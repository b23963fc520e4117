"""Does a backward pass become slower while a network is trained, in Python engines and in C++?

The paper ("A Shadow Cost of Jacobian Accumulation in Computation Graph of Backpropagation") reports
that an epoch took 1.6 times as long after 30 epochs with its engine in C++, and suspects "the delay
in memory release timing".

Expectation: no. The graph is the same in each batch, so an engine that lets go of it takes the same
time. One that never does should need memory that grows, and a constant time for fresh pages.

Method: the paper's network (linear, ReLU, dropout, twice; linear; softmax cross entropy), 18,000
pictures in 120 batches of 150, 30 epochs. PyTorch's engine and our three schedules take turns in
each batch; timed are the pass and the release of its graph. Two engines leak on purpose, each in a
run of its own: ``kept`` keeps every graph, ``hooks`` adds a gradient hook in each batch. In C++
(shadow_cost_cpp, after the paper's four classes) three programs differ in one thing: ``freed`` lets
go of a graph after its batch, ``late`` after its epoch, ``cycles`` never, as functions hold their
results; what is measured is processor time. A control, the same work on the same numbers after each
batch, cannot be slowed by training: times are told relative to it. The change of a run is its
Theil-Sen slope times its length over its median, without the first epoch: in Python of the medians
of 32 blocks of batches, in C++ of epochs, to the last one. Intervals are Student's over seeds, in
C++ for the three programs together, as was fixed before its full run.

Limits: the paper's program is not available, nor the width of its hidden layers (here 200, in C++
50). Pictures are patterns with noise, in the published rows digits. Times are of one machine.
"""

from __future__ import annotations

import gc
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import gradtrace as gt
from experiments import lab

ALONE = True  # it measures time
ROWS = PYTHON, CPP = "shadow-cost", "shadow-cost-cpp"
FULL = {"samples": 18_000, "batch": 150, "epochs": 30, "optimise": "-O3"}
FEW = {"samples": 40, "batch": 10, "epochs": 3, "optimise": "-O1"}
SETTINGS = {
    "full": {**FULL, "seeds": 5, "hidden": {PYTHON: 200, CPP: 50}},
    "quick": {**FULL, "samples": 1_500, "epochs": 12, "seeds": 2, "hidden": {PYTHON: 50, CPP: 30}},
    "small": {**FEW, "seeds": 1, "hidden": {PYTHON: 6, CPP: 6}},
}
OURS = ("kahn", "creation", "recursive")
GROUPS = {"honest": ("torch", *OURS), "kept": ("kept",), "hooks": ("hooks",)}  # a run each
PROGRAMS = ("freed", "late", "cycles")
PARTS, CONTROL, OBJECTS = ("forward", "backward", "release"), "control", "live Python objects"
PIXELS = {PYTHON: 64, CPP: 784}
BLOCKS, CLASSES, DROPOUT, RATE, THEIRS = 32, 10, 0.2, 0.1, 1.6
SOURCE = Path(__file__).parent / "shadow_cost_cpp" / "train.cpp"
COMPILER = shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
THREE = (38.188, 7.649, 4.857, 3.961, 3.534, 3.287, 3.128, 3.016)
"""Quantiles as lab.STUDENT's, for three intervals together (Bonferroni)."""

TIMES = "start, ms", "end, ms", "change, %", "as timed, %"
ENGINES = "engine", *TIMES, "objects a batch"
GAUGES = {"objects a batch": ("objects", 1), "MB": ("resident", 1e6), "page faults": ("faults", 1)}
GRAPHS = ("graphs are", *TIMES, "backward alone, %", "over freed, %", *GAUGES)


def cells(settings: lab.Cell) -> list[lab.Cell]:
    """Each group of engines and each program for each seed; programs in an order that changes."""
    names, hidden = ("samples", "batch", "epochs", "optimise"), settings["hidden"]
    rest, found = {name: settings[name] for name in names}, list[lab.Cell]()
    for seed in range(settings["seeds"]):
        python, cpp = ({"rows": n, "seed": seed, "hidden": hidden[n], **rest} for n in ROWS)
        found += [{**python, "group": group} for group in GROUPS]
        order = (*PROGRAMS[seed % 3 :], *PROGRAMS[: seed % 3])
        found += [{**cpp, "program": way} for way in order]
    if COMPILER:
        return found
    print("shadow_cost: NO C++ COMPILER (g++, c++, clang++), its part is SKIPPED", file=sys.stderr)
    return [cell for cell in found if cell["rows"] == PYTHON]


def measure(cell: lab.Cell) -> lab.Row:
    """One process, of a group of engines or of a program."""
    if cell["rows"] == CPP:
        told = program(cell, [*pictures(cell), *parameters(cell)])
        return {name: values for name, values in told.items() if name != "parameters"}
    return trained(cell)


def pictures(cell: lab.Cell) -> tuple[Tensor, Tensor]:
    """Ten patterns with noise, and which it is."""
    random, pixels = torch.Generator().manual_seed(cell["seed"]), PIXELS[cell["rows"]]
    y = torch.randint(CLASSES, (cell["samples"],), generator=random)
    patterns = torch.rand(CLASSES, pixels, generator=random)
    noise = torch.randn(len(y), pixels, generator=random)
    return (patterns[y] + noise).clamp(0, 1), y


def network(cell: lab.Cell) -> nn.Sequential:
    """The paper's; the softmax is in the loss."""
    torch.manual_seed(cell["seed"])
    layers: list[nn.Module] = []
    for a in (PIXELS[PYTHON], cell["hidden"]):
        layers += [nn.Linear(a, cell["hidden"]), nn.ReLU(), nn.Dropout(DROPOUT)]
    return nn.Sequential(*layers, nn.Linear(cell["hidden"], CLASSES))


def passed(way: str, loss: Tensor, names: Mapping[str, Tensor], held: list[Tensor]) -> list[Tensor]:
    """The gradients by one engine; what leaks leaks."""
    if way in OURS:
        return [*gt.backward(loss, names=names, schedule=way).values()]
    if way == "kept":
        held.append(loss)
    if way == "hooks":
        names["0.weight"].register_hook(lambda gradient: None)  # type: ignore[no-untyped-call]
    return [*torch.autograd.grad(loss, [*names.values()])]


def step(way: str, net: nn.Module, x: Tensor, y: Tensor, held: list[Tensor]) -> tuple[float, float]:
    """One batch: the seconds of the pass and the release of its graph, and how far gradients are
    from PyTorch's.
    """
    loss, names = cross_entropy(net(x), y), dict(net.named_parameters())
    theirs = torch.autograd.grad(loss, [*names.values()], retain_graph=True)
    began = perf_counter()
    ours = passed(way, loss, names, held)
    del loss
    took = perf_counter() - began
    off = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, theirs))
    with torch.no_grad():
        for weight, gradient in zip(names.values(), ours):
            weight.sub_(gradient, alpha=RATE)
    return round(took, 7), off


def trained(cell: lab.Cell) -> lab.Row:
    """Train with each engine of a group, in turns; what lives is counted after each epoch."""
    (x, y), ways = pictures(cell), GROUPS[cell["group"]]
    nets, still, size = {way: network(cell) for way in ways}, network(cell), cell["batch"]
    fixed = cross_entropy(still(x[:size]), y[:size])
    times: dict[str, list[float]] = {way: [] for way in (*ways, CONTROL)}
    held, live, off = list[Tensor](), list[int](), dict.fromkeys(ways, 0.0)
    for epoch in range(cell["epochs"]):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
        for number in range(len(x) // size):
            some, turn = order[number * size :][:size], number % len(ways)
            for way in ways[turn:] + ways[:turn]:
                torch.manual_seed(epoch * len(x) + number)  # the same dropout for every engine
                took, apart = step(way, nets[way], x[some], y[some], held)
                times[way].append(took)
                off[way] = max(off[way], apart)
            began = perf_counter()
            torch.autograd.grad(fixed, [*still.parameters()], retain_graph=True)
            times[CONTROL].append(round(perf_counter() - began, 7))
        gc.collect()
        live.append(len(gc.get_objects()))
    return {"times": times, "live": {OBJECTS: live}, "differences": off}


@cache
def _built(optimise: str) -> TemporaryDirectory[str]:
    folder: TemporaryDirectory[str] = TemporaryDirectory(prefix="gradtrace-shadow-cost-")
    command = [str(COMPILER), optimise, "-march=native", "-std=c++17", str(SOURCE)]
    subprocess.run([*command, "-o", f"{folder.name}/train"], check=True)
    return folder


def program(cell: lab.Cell, data: Sequence[Tensor], dropout: float = DROPOUT) -> lab.Row:
    """What the program measured and learned of images, labels and parameters."""
    sizes = len(data[0]), PIXELS[CPP], cell["hidden"], CLASSES, cell["epochs"], cell["batch"]
    words = map(str, (cell["program"], *sizes, RATE, dropout, cell["seed"]))
    command = [f"{_built(cell['optimise']).name}/train", *words]
    given = torch.cat([part.detach().float().flatten() for part in data]).numpy().tobytes()
    done = subprocess.run(command, input=given, stdout=subprocess.PIPE, check=True)
    found: lab.Row = json.loads(done.stdout)
    return found


def parameters(cell: lab.Cell) -> Iterator[Tensor]:
    """Weights (inputs, outputs) by He's rule, and biases 0."""
    random, hidden = torch.Generator().manual_seed(cell["seed"]), cell["hidden"]
    for a, b in ((PIXELS[CPP], hidden), (hidden, hidden), (hidden, CLASSES)):
        yield torch.randn(a, b, generator=random) * (2 / a) ** 0.5
        yield torch.zeros(1, b)


def kept(row: lab.Row) -> list[lab.Row]:
    """Rows of docs/experiments in C++ have times by batch; those of the release stand where the
    name of the program was, and what lives and is resident tells it.
    """
    if row["rows"] == PYTHON:
        return [row]
    late = row["resident"][-1] > 1e8
    way = "cycles" if row["functions"][-1] else "late" if late else "freed"
    sums = {n: torch.tensor(row[n]).view(row["epochs"], -1).sum(1) for n in (*PARTS, CONTROL)}
    objects = [a + b for a, b in zip(row["variables"], row["functions"])]
    return [{**row, **sums, "program": way, "objects": objects}]


def series(row: lab.Row, way: str, parts: Sequence[str] = PARTS, timed: bool = False) -> Any:
    """Time by block or epoch, without the first epoch: over the control's, or ms a batch."""
    count, python = row["samples"] // row["batch"], row["rows"] == PYTHON
    times, names = (row["times"], [way]) if python else (row, parts)
    own = torch.stack([torch.as_tensor(times[name]).double() for name in names]).sum(0)
    over = 1e-3 * (1 if python else count) if timed else torch.as_tensor(times[CONTROL])
    found = (own / over)[count if python else 1 :]
    if not python:
        return found.tolist()
    many = min(BLOCKS, len(found))
    cuts = [round(len(found) * at / many) for at in range(many + 1)]
    return [float(found[a:b].quantile(0.5)) for a, b in pairwise(cuts)]


def slope(y: Sequence[float]) -> float:
    """Theil and Sen's: the median of the slopes between all pairs.

    >>> slope([1, 3, 5, 100, 9, 11])
    2.0
    """
    pairs = [(b - a) / (j - i) for j, b in enumerate(y) for i, a in enumerate(y[:j])]
    return median(pairs) if pairs else 0.0


def change(row: lab.Row, way: str, parts: Sequence[str] = PARTS, timed: bool = False) -> float:
    """In percent of the median, over all blocks or from the second epoch to the last."""
    y = series(row, way, parts, timed)
    steps = len(y) - 1 if row["rows"] == CPP else len(y)
    return 100 * slope(y) * steps / float(median(y))


def spoken(values: Sequence[float], together: bool) -> str:
    """A mean and its interval; for the three programs together wider."""
    mean, low, high = lab.interval(values)
    at = min(len(values), 9) - 2
    wide = THREE[at] / lab.STUDENT[at] if together and at >= 0 else 1.0
    return lab.said((mean, mean - wide * (mean - low), mean + wide * (high - mean)), "+.1f")


def times(rows: Sequence[lab.Row], way: str) -> list[object]:
    """Milliseconds a batch at the start and the end, median over seeds, and how they change."""
    timed = [series(row, way, timed=True) for row in rows]
    cpp = rows[0]["rows"] == CPP
    changes = [spoken([change(row, way, timed=t) for row in rows], cpp) for t in (False, True)]
    return [way, *(median(y[at] for y in timed) for at in (0, -1)), *changes]


def more(row: lab.Row, gauge: Sequence[float]) -> float:
    """What there is more of after each batch."""
    return slope(gauge[1:]) * float(row["batch"] / row["samples"])


def _engine(rows: Sequence[lab.Row], way: str) -> list[object]:
    some = [row for row in rows if way in row["times"]]
    return [*times(some, way), median(more(row, row["live"][OBJECTS]) for row in some)]


def _program(rows: Sequence[lab.Row], way: str) -> list[object]:
    base = {row["seed"]: median(series(row, "freed")) for row in rows if row["program"] == "freed"}
    some = [row for row in rows if row["program"] == way]
    over = [100 * (median(series(row, way)) / base[row["seed"]] - 1) for row in some]
    backward = [change(row, way, ["backward"]) for row in some]
    left = [median(more(r, r[name]) for r in some) / unit for name, unit in GAUGES.values()]
    return [*times(some, way), spoken(backward, True), spoken(over, True), *left]


def tables(rows: Sequence[lab.Row]) -> list[lab.Table]:
    """Time over training, and what stays behind."""
    python, cpp = ([row for row in rows if row["rows"] == name] for name in ROWS)
    off = max(max(row["differences"].values()) for row in python)
    engines = [_engine(python, way) for group in GROUPS.values() for way in group]
    title = f"Engines in Python (gradients are at most {off:.1g} off)"
    found: list[lab.Table] = [(title, ENGINES, engines)]
    if cpp:
        first = {row["seed"]: row["loss"] for row in cpp}
        same = sum(row["loss"] == first[row["seed"]] for row in cpp)
        title = f"Programs in C++ ({same} of {len(cpp)} have the same losses by seed)"
        found.append((title, GRAPHS, [_program(cpp, way) for way in PROGRAMS]))
    return found


def figure(rows: Sequence[lab.Row], path: Path) -> None:
    """Time over the share of training that is done, relative to its median; medians over seeds."""
    curves: dict[str, Any] = {}
    for way in (way for group in (*GROUPS.values(), PROGRAMS) for way in group):
        some = [row for row in rows if way in (row.get("program"), *row.get("times", ()))]
        lines = [[y / median(found) for y in found] for found in (series(r, way) for r in some)]
        if lines:
            x = [100 * at / max(len(lines[0]) - 1, 1) for at in range(len(lines[0]))]
            curves[way] = x, [median(part) for part in zip(*lines)]
    curves["the paper"] = [0, 100], [2 / (1 + THEIRS), 2 * THEIRS / (1 + THEIRS)]
    what = "Time of a pass relative to the control's, 1 at its median"
    lab.lines(path, what, "% of training done", "time", curves)
