"""Question: does a graph of C++ objects that is freed late, or never, make training slower?

Expectation: no. The source ("A Shadow Cost of Jacobian Accumulation in Computation Graph of
Backpropagation") times a recursive engine in C++, reports that an epoch took 1.6 times as long
after 30 epochs, and suspects "the delay in memory release timing". A graph that holds itself in
cycles of ``shared_ptr`` should cost memory that grows, and processor time for fresh pages that does
not.

Method: our own program after the source's description (``gradtrace/experiments/pointer_graph``):
four classes (variable, function, graph, model), each variable with a ``shared_ptr`` to the function
that made it, each function with its inputs, gradient by recursion through these pointers. The
source's network (linear, ReLU, dropout, linear, ReLU, dropout, linear, softmax cross entropy) on
pictures of 784 pixels (digits of 8 × 8, scaled up; or MNIST in a file), 18,000 samples in 120
batches of 150, 30 epochs. Three programs that differ in one thing: "freed" lets go of a graph after
its batch, "late" after its epoch, "cycles" never, since each function also holds its result. All of
a seed train alike. Five processes each, in turns, whose order changes from seed to seed. Measured
is processor time (user and system, ``CLOCK_PROCESS_CPUTIME_ID``; ``getrusage`` by epoch), not time
on the wall, which other programs lengthen. A control, one product of fixed matrices after each
batch, tells how fast the machine is; times are told relative to it. Primary endpoint, written down
before the full run: the change of an epoch's time (forward, backward, release) from the second
epoch to the last, by the Theil-Sen slope of each process; intervals are Student's over processes,
at 95% for the three programs together (Bonferroni). "Grows" is said if the interval lies above 0
and the mean is 1% at least; "does not grow" if it ends below 5%. Beside it: backward passes alone,
what programs take relative to "freed", resident memory, page faults, live objects, and the share of
subnormal numbers among gradients, which some processors are slow with. The source does not tell the
width of its hidden layers; here it is 50 (100 in a run that was stopped for want of time, before
its first process had ended).

Seeds: initial weights, order of samples, dropout. Times depend on the machine; counts do not.

Limits: The source's program is not available: ours follows its description, which leaves out the
width of hidden layers and contradicts itself in places (a table lists them). Five processes of one
machine leave intervals of some percent where the allocator asks the system for memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isfinite, log
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from gradtrace.experiments import pointer_graph
from gradtrace.experiments.harness.findings import (
    Cell,
    Findings,
    Plot,
    Result,
    Row,
    Seeds,
    Series,
    Table,
    Tick,
)
from gradtrace.experiments.harness.interleaved_timing import told
from gradtrace.experiments.harness.statistics import Interval, student, theil_sen
from gradtrace.experiments.images import pictures

Floats = npt.NDArray[np.float64]

FULL = {
    "samples": 18_000,
    "batch": 150,
    "epochs": 30,
    "hidden": 50,
    "dropout": 0.2,
    "rate": 0.1,
    "mnist": None,
}
QUICK = {**FULL, "samples": 1_500, "epochs": 12, "hidden": 30}
SEEDS = Seeds(quick=2, full=5)
TIMED = True
FIGURE = "epochs"

WAYS = {
    "freed": "freed after each batch",
    "late": "freed after each epoch",
    "cycles": "never freed, in cycles",
}
PARTS = ("forward", "backward", "release")
SIDE, PIXELS = 28, 784
SOURCE = 0.6
"""By what share the source's time per epoch grew."""

SLIGHT, SMALL = 0.01, 0.05
"""A change below the first share is not called growth; one that ends below the second is none."""

MEGA = 1e6

CONTRADICTIONS = (
    (
        "batches in an epoch",
        "18,000 samples in 50 batches",
        "3,600 batches in 30 epochs are 120 an epoch, of 150 samples",
    ),
    (
        "time of an epoch",
        "16,000 to 25,000 ms",
        "120 batches of its 7 to 14 ms are 840 to 1,680 ms, a fifteenth",
    ),
    (
        "growth of an epoch",
        "1.6-fold, and faster than that of batches",
        "an epoch is the sum of its batches: both grow by one share; its 7 to 8 ms are 1.14-fold",
    ),
    (
        "end of an epoch's growth",
        "25,000 ms in the results",
        "24,000 ms in the conclusion: 1.5-fold",
    ),
    (
        "which is which",
        "conclusion: an epoch grew by 7 to 8 ms, a batch by 16,000 to 24,000 ms",
        "batch and epoch are swapped, and these are times, not what they grew by",
    ),
    ("unit of both figures", "seconds in the captions", "milliseconds in the text"),
    ("what is timed", '"CPU idle time is measured"', "execution time, by the text around it"),
    ("the loss", "square error in Equation 1", "softmax cross entropy in Listing 2"),
    (
        "derivatives",
        "Equations 3 and 6 have ∂Z/∂E and ∂U/∂E, Equation 7 f(U)",
        "∂E/∂Z, ∂E/∂U and f'(U) are meant; the sign of Equation 3 is lost",
    ),
    ("the call of a function's backward", "line 16 of Listing 1", "line 14; line 16 is the loop"),
    (
        "the cause",
        '"delay in memory release timing"',
        "no memory was measured, and one run has no interval",
    ),
)
"""What the source says, and what it says elsewhere."""


def cells(settings: Mapping[str, Any], seeds: int) -> list[Cell]:
    """One for each seed and program; the order of programs changes from seed to seed."""
    names, sources = list(WAYS), pointer_graph.digest()
    return [
        {"seed": seed, "release": name, "sources": sources, **settings}
        for seed in range(seeds)
        for name in (*names[seed % len(names) :], *names[: seed % len(names)])
    ]


# One process --------------------------------------------------------------------------------------


def measure(cell: Cell, tick: Tick) -> Result:
    """Train in one process of the C++ program."""
    images, labels = pictures(cell["mnist"], cell["samples"], cell["seed"])
    tick(f"{cell['release']}, seed {cell['seed']}: {cell['epochs']} epochs")
    names = ("epochs", "batch", "rate", "dropout", "seed")
    found, _ = pointer_graph.train(
        cell["release"],
        widened(images),
        labels,
        parameters(cell["seed"], PIXELS, cell["hidden"]),
        **{name: cell[name] for name in names},
    )
    whole = ("variables", "functions", "faults", "resident")
    return {
        name: [int(x) if name in whole else float(x) for x in values]
        for name, values in found.items()
    }


def widened(images: Tensor) -> Tensor:
    """Pictures of 28 × 28 pixels; smaller ones are scaled up."""
    side = round(images.shape[1] ** 0.5)
    square = images.reshape(-1, 1, side, side)
    if side != SIDE:
        square = F.interpolate(square, (SIDE, SIDE), mode="bilinear", align_corners=False)
    return square.reshape(len(images), PIXELS).contiguous()


def parameters(seed: int, inputs: int, hidden: int, classes: int = 10) -> list[Tensor]:
    """Weights (inputs, outputs) by He's rule and biases 0 of the three layers."""
    generator = torch.Generator().manual_seed(seed)
    found: list[Tensor] = []
    for a, b in ((inputs, hidden), (hidden, hidden), (hidden, classes)):
        weight = torch.randn(a, b, generator=generator, device="cpu") * (2 / a) ** 0.5
        found += [weight, torch.zeros(1, b, device="cpu")]
    return found


# What came out ------------------------------------------------------------------------------------


class Process:
    """What one process measured."""

    def __init__(self, row: Row) -> None:
        self.cell, self.result = row
        self.epochs = len(self.result["resident"])
        self.batches = len(self.result["control"]) // self.epochs

    def by_epoch(self, *parts: str) -> Floats:
        """Processor seconds of parts, summed over an epoch."""
        found: Floats = np.sum([self.result[part] for part in parts], axis=0)
        sums: Floats = found.reshape(self.epochs, -1).sum(1)
        return sums

    def relative(self, *parts: str) -> Floats:
        """The same over the control's."""
        with np.errstate(divide="ignore", invalid="ignore"):
            found: Floats = self.by_epoch(*parts) / self.by_epoch("control")
        return found

    def change(self, *parts: str, relative: bool = True) -> float:
        """By what share time changed from the second epoch to the last."""
        times = (self.relative if relative else self.by_epoch)(*parts)[1:]
        middle = float(np.median(times))
        if len(times) < 2 or not np.isfinite(times).all() or not middle:
            return float("nan")
        slope = theil_sen(range(len(times)), times).value
        return slope * (len(times) - 1) / middle

    def level(self) -> float:
        """The logarithm of its relative time."""
        middle = float(np.median(self.relative(*PARTS)[1:]))
        return log(middle) if isfinite(middle) and middle > 0 else float("nan")

    def a_batch(self, *names: str) -> float:
        """How much there is more of something after each batch; the first epoch is left out."""
        values: Floats = np.sum([self.result[name] for name in names], axis=0)[1:]
        if len(values) < 2 or not np.isfinite(values).all():
            return float("nan")
        return theil_sen(range(len(values)), values).value / self.batches


class Program:
    """What was measured of one program, over all its processes."""

    def __init__(self, name: str, rows: Sequence[Row], base: Mapping[int, float]) -> None:
        self.name, self.word = name, WAYS[name]
        self.runs = [Process(row) for row in rows]
        self.change = self._over(lambda one: one.change(*PARTS), len(WAYS))
        self.timed = self._over(lambda one: one.change(*PARTS, relative=False), len(WAYS))
        self.backward = self._over(lambda one: one.change("backward"), len(WAYS))
        self.memory = self._over(lambda one: one.a_batch("resident"))
        self.faults = self._over(lambda one: one.a_batch("faults"))
        self.objects = self._over(lambda one: one.a_batch("variables", "functions"))
        self.more = self._over(
            lambda one: np.expm1(one.level() - base.get(one.cell["seed"], np.nan)), len(WAYS)
        )

    def _over(self, of: Callable[[Process], float], tests: int = 1) -> Interval:
        return student([of(one) for one in self.runs], tests)

    @property
    def verdict(self) -> str:
        """In a word or two."""
        low, high = self.change.low, self.change.high
        if not isfinite(low) or not isfinite(high):
            return "cannot be told"
        if low > 0 and self.change.value >= SLIGHT:
            return "grows"
        return "does not grow" if high < SMALL else "cannot be told"

    def milliseconds(self, epoch: int) -> float:
        """Processor time of a batch in an epoch, the median over processes."""
        found = [one.by_epoch(*PARTS)[epoch] / one.batches for one in self.runs]
        return 1000 * float(np.median(found))

    def system(self, third: int) -> float:
        """Milliseconds of the system a batch, in a third of the epochs; the mean over processes."""
        found = []
        for one in self.runs:
            each = np.diff(one.result["system"]) / one.batches
            part = np.array_split(each, 3)[third]
            found.append(float(part.mean()) if len(part) else float("nan"))
        return 1000 * float(np.mean(found))

    def end(self, name: str) -> float:
        """What a gauge showed at the end, the mean over processes."""
        return float(np.mean([one.result[name][-1] for one in self.runs]))


SLOWER = {
    "grows": "becomes slower",
    "does not grow": "does not become slower",
    "cannot be told": "may or may not become slower",
}
"""Verdicts in other words."""


def headline(facts: Mapping[str, Any]) -> str:
    """The answer in two sentences."""
    known = [one[0] for one in facts.get("change", {}).values() if one[0] is not None]
    if not known:
        return "Nothing was measured."
    told_of = [
        f"{text} if graphs are {' or '.join(named)}"
        for word, text in SLOWER.items()
        if (named := [WAYS[name] for name, one in facts["verdicts"].items() if one == word])
    ]
    most = [one[2] for one in facts["change"].values() if one[2] is not None]
    bound = f"no interval ends above {max(most):+.1%}, " if most else ""
    return (
        f"Over {facts['batches']:,.0f} batches training in C++ {'; it '.join(told_of)}: {bound}"
        "where the source reports +60%."
    )


def conclude(rows: Sequence[Row]) -> Findings:
    """Whose time grows, what it holds, and what the source contradicts itself in."""
    rows = sorted(filter(_told_all, rows), key=lambda row: (row.cell["seed"], row.cell["release"]))
    if not rows:
        return Findings("No times were told, so nothing can be said.", (_contradictions(),))
    base = {row.cell["seed"]: Process(row).level() for row in rows if _is(row, "freed")}
    found = [
        Program(name, some, base) for name in WAYS if (some := [r for r in rows if _is(r, name)])
    ]
    facts = _facts(found, rows)
    tables = (_times(found), _memory(found), _contradictions())
    return Findings(_sentence(found, facts), tables, (_curves(found), _resident(found)), facts)


def _is(row: Row, name: str) -> bool:
    return bool(row.cell["release"] == name)


def _told_all(row: Row) -> bool:
    """Whether the clock told every number, and the control took time."""
    parts = [np.array(row.result[name]) for name in (*PARTS, "control")]
    return all(bool(np.isfinite(part).all()) for part in parts) and bool(parts[-1].sum() > 0)


def _sentence(found: Sequence[Program], facts: Mapping[str, Any]) -> str:
    said = "; ".join(f"{one.verdict} if {one.word} ({_share(one.change)})" for one in found)
    beyond = [one for one in found if one.change.high < SOURCE]
    which = "all" if len(beyond) == len(found) else f"{len(beyond)} of {len(found)}"
    alike = "the same losses" if facts["alike"] else "losses that DIFFER"
    return " ".join(
        (
            f"Over {facts['batches']:,} batches the processor time of an epoch, of graphs: {said}.",
            f"The source's +60% lies beyond {which} of these intervals.",
            *map(_costs, found),
            f"All programs of a seed have {alike}. Of the gradients a share of",
            f"{told(facts['subnormal'], '.2g')} at most is subnormal. The source's own figures do",
            "not fit each other: 120 batches of 7 to 14 ms do not last 16 s (a table lists all).",
        )
    )


def _costs(one: Program) -> str:
    """What a program takes and holds, beside that which frees graphs at once."""
    holds = (
        f"{told(one.objects.value, '.0f')} objects and {told(one.memory.value / MEGA, '.2f')} MB "
        f"stay behind in each batch ({told(one.end('resident') / MEGA, ',.0f')} MB are resident in "
        "the end)"
    )
    if one.name == "freed":
        return f"Graphs {one.word}: {holds}."
    return f"Graphs {one.word}: time is {_share(one.more)} off that, from the start, and {holds}."


def _share(change: Interval) -> str:
    value, low, high = (told(part, "+.1%") for part in change)
    return f"{value} [{low}, {high}]"


def _times(found: Sequence[Program]) -> Table:
    columns = (
        "graphs are",
        "second epoch (ms a batch)",
        "last epoch (ms a batch)",
        "change over training (%)",
        "backward alone (%)",
        "without the control (%)",
        "more than freed at once (%)",
        "time",
    )
    rows = tuple(
        (
            one.word,
            *(_rounded(one.milliseconds(at), 3) for at in (1 if one.runs[0].epochs > 1 else 0, -1)),
            *(_percent(part) for part in (one.change, one.backward, one.timed)),
            None if one.name == "freed" else _percent(one.more),
            one.verdict,
        )
        for one in found
    )
    note = "Processor time; means over processes, with intervals for three programs at once."
    return Table("Time over training", columns, rows, note)


def _memory(found: Sequence[Program]) -> Table:
    columns = ("graphs are", "MB a batch", "MB at the end", "objects a batch", "objects at the end",
               "page faults a batch", "system, first third (ms a batch)", "last third")  # fmt: skip
    rows = tuple(
        (
            one.word,
            _rounded(one.memory.value / MEGA, 4),
            _rounded(one.end("resident") / MEGA, 1),
            _rounded(one.objects.value, 3),
            one.end("variables") + one.end("functions"),
            _rounded(one.faults.value, 1),
            *(_rounded(one.system(third), 2) for third in (0, 2)),
        )
        for one in found
    )
    note = (
        "Resident memory and objects after epochs; six objects are the parameters. The system's "
        "time was looked at after the run, when the figure showed that late epochs of cycles rise."
    )
    return Table("Memory and objects", columns, rows, note)


def _contradictions() -> Table:
    columns = ("about", "the source says", "but")
    return Table("Where the source contradicts itself", columns, CONTRADICTIONS)


def _curves(found: Sequence[Program]) -> Plot:
    series = []
    for one in found:
        lines = [run.relative(*PARTS) for run in one.runs]
        y = np.array(
            [line / (np.median(line[1:4]) if len(line) > 1 else line[0]) for line in lines]
        )
        series.append(
            Series(
                one.word,
                list(range(1, y.shape[1] + 1)),
                np.median(y, 0).tolist(),
                y.min(0).tolist(),
                y.max(0).tolist(),
            )
        )
    last = max((len(one.x) for one in series), default=1)
    series.append(Series("the source", [1, last], [1, 1 + SOURCE], style="dashed"))
    title = "Processor time of an epoch: median and range of processes"
    return Plot("epochs", title, "epoch", "time over the control's, 1 at the start", tuple(series))


def _resident(found: Sequence[Program]) -> Plot:
    series = []
    for one in found:
        y = np.median([run.result["resident"] for run in one.runs], axis=0) / MEGA
        series.append(Series(one.word, list(range(1, len(y) + 1)), y.tolist()))
    return Plot("memory", "Resident memory", "epoch", "MB", tuple(series), log_y=True)


def _facts(found: Sequence[Program], rows: Sequence[Row]) -> dict[str, Any]:
    def each(of: Callable[[Program], Interval]) -> dict[str, list[float | None]]:
        return {one.name: [_rounded(x) for x in of(one)] for one in found}

    losses: dict[int, list[list[float]]] = {}
    for row in rows:
        losses.setdefault(row.cell["seed"], []).append(row.result["loss"])
    shares = [x for row in rows for x in row.result["subnormal"]]
    return {
        "batches": found[0].runs[0].batches * found[0].runs[0].epochs,
        "processes": {one.name: len(one.runs) for one in found},
        "change": each(lambda one: one.change),
        "backward": each(lambda one: one.backward),
        "more": each(lambda one: one.more),
        "bytes_a_batch": each(lambda one: one.memory),
        "faults_a_batch": each(lambda one: one.faults),
        "objects_a_batch": each(lambda one: one.objects),
        "alike": all(some == several[0] for several in losses.values() for some in several),
        "learned": all(one[-1] < one[0] for several in losses.values() for one in several),
        "subnormal": max(shares, default=0.0),
        "verdicts": {one.name: one.verdict for one in found},
    }


def _percent(change: Interval) -> str:
    """``+0.3 [-0.5, +1.1]``."""
    value, low, high = (told(100 * part, "+.1f") for part in change)
    return f"{value} [{low}, {high}]"


def _rounded(value: float, digits: int | None = None) -> float | None:
    if not isfinite(value):
        return None
    return float(value) if digits is None else round(float(value), digits)
