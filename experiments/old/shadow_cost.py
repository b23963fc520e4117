"""Question: does a backward pass become slower while a network is trained?

Expectation: no. The source ("A Shadow Cost of Jacobian Accumulation in Computation Graph of
Backpropagation") reports that time per epoch grew 1.6-fold over 30 epochs with a recursive engine
of its own, and suspects that memory is released late. The graph is the same in each batch, so an
engine that lets go of it should take the same time; one that leaks need not.

Method: the source's network (linear, ReLU, dropout, linear, ReLU, dropout, linear, softmax cross
entropy) on pictures of digits; 18,000 samples in 120 batches of 150, 30 epochs, 3,600 batches (the
source also speaks of "50 batches"; 3,600 and 120 are what its figures show). PyTorch's engine and
our three schedules take turns in each batch, with the same data and dropout, and the first changes
from batch to batch. Timed are the pass and the release of its graph. Beside them goes a control: a
pass over one fixed graph, again and again, which no training can slow; times are told relative to
it, so that the state of the machine does not count. Two variants leak on purpose, each in a run of
its own: "kept" never lets go of a graph, as the source suspects, and "hooks" adds a gradient hook
in each batch. Every run is a new process, since memory that an earlier one freed would hide growth.
Trends are Theil-Sen slopes and Mann-Kendall tests of medians of 32 blocks, without the first epoch,
corrected for what neighbours have in common and pooled over seeds; "grows" is said where p is below
0.05 over the number of engines in the group and the change is 1% at least. These rules (first
epoch, number of engines, 1%) were set after first quick runs on a busy machine, one of which said
"grows" of two honest engines; a full run is the first test of them. Objects that live are counted
after each epoch, by ``gt.timing``.

Seeds: initial weights, the order of samples and dropout. Times depend on the machine; counts and
gradients do not.

Limits: The source's program is not available: this is its network in PyTorch, with engines of
another making, on pictures of 64 pixels, so that nothing can be said of what its own program did.
Times are of one machine.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradtrace as gt
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
from gradtrace.experiments.harness.peak_memory import apart
from gradtrace.experiments.harness.statistics import Interval, Trend, medians, pooled, theil_sen
from gradtrace.experiments.images import pictures

Floats = npt.NDArray[np.float64]

FULL = {
    "samples": 18_000,
    "batch": 150,
    "epochs": 30,
    "hidden": 200,
    "dropout": 0.2,
    "rate": 0.1,
    "mnist": None,
}
QUICK = {**FULL, "samples": 1_500, "epochs": 12, "hidden": 50}
SEEDS = Seeds(quick=1, full=5)
TIMED = True
FIGURE = "batches"

GROUPS = {
    "honest": ("torch", "kahn", "creation", "recursive"),
    "kept": ("kept",),
    "hooks": ("hooks",),
}
"""What runs in one process: a leak would slow whatever is beside it."""

CONTROL = "control"
LEAKS = ("kept", "hooks")
WARM = 20
SOURCE = 0.6
"""By what share the source's time per epoch grew."""

SLIGHT, SMALL = 0.01, 0.05
"""A change below the first share is slight, though it be sure; if its interval ends below the
second, there is none to speak of.
"""

STILL = 0.1
"""Objects a batch: less is no leak."""

DIGITS = 7
TICK = 10.0**-DIGITS
"""Times are written with so many digits: a shorter one is 0, and counts as this many seconds."""

OBJECTS, TENSORS, MEMORY = "live Python objects", "live tensors", "resident memory"
WORDS = {
    "torch": "PyTorch's engine",
    "kahn": "our schedule kahn",
    "creation": "our schedule creation",
    "recursive": "our schedule recursive",
    "kept": "leak: every graph is kept",
    "hooks": "leak: a hook is added in each batch",
    CONTROL: "control: one fixed graph",
}


def cells(settings: Mapping[str, Any], seeds: int) -> list[Cell]:
    """One for each seed and group."""
    return [{"seed": seed, "group": group, **settings} for seed in range(seeds) for group in GROUPS]


# One run ------------------------------------------------------------------------------------------


def measure(cell: Cell, tick: Tick) -> Result:
    """Train with each engine of a group, in turns: seconds a batch, and what lives after epochs.

    In a new process: in one that has memory left from an earlier cell, a leak would not be seen,
    and a run that was killed and began anew would find another rate than one that was not.
    """
    pictures(cell["mnist"], cell["samples"], cell["seed"])  # what is wrong with them is told here
    tick(f"{cell['group']}, seed {cell['seed']}: {cell['epochs']} epochs")
    found: Result = apart(f"{__name__}:trained", cell, exact=False)
    return found


def trained(cell: Cell) -> Result:
    """In the new process."""
    threads, data = torch.get_num_threads(), pictures(cell["mnist"], cell["samples"], cell["seed"])
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            return _trained(cell, data)
    finally:
        torch.set_num_threads(threads)


def _trained(cell: Cell, data: tuple[Tensor, Tensor]) -> Result:
    names = GROUPS[cell["group"]]
    ways = [Way(name, cell, data[0].shape[1]) for name in names]
    control = Control(cell, data)
    for way in ways:
        way.warm(*control.batch)
    live: dict[str, list[float]] = {OBJECTS: [], TENSORS: [], MEMORY: []}
    census: gt.timing[None] = gt.timing(share=0)
    with census:
        for epoch in range(cell["epochs"]):
            for number, (x, y) in enumerate(_batches(cell, data, epoch)):
                turn = number % len(ways)
                for way in ways[turn:] + ways[:turn]:
                    way.step(x, y, seed=epoch * cell["samples"] + number, check=number == 0)
                control.step()
                census.tick()
            gc.collect()
            census.look()
            for kind, values in live.items():
                if kind in census.seen:  # memory is not told everywhere
                    values.append(census.seen[kind].values[-1])
    times = {way.name: _rounded(way.timing.times) for way in ways}
    return {
        "times": {**times, CONTROL: _rounded(control.timing.times)},
        "batches": len(census) // cell["epochs"],
        "live": live,
        "differences": {way.name: way.difference for way in ways},
        "losses": {way.name: way.loss for way in ways},
    }


class Way:
    """A network that is trained with one engine."""

    def __init__(self, name: str, cell: Cell, inputs: int) -> None:
        self.name = name
        self.net = network(cell, inputs)
        self.parameters = list(self.net.parameters())
        self.timing: gt.timing[None] = gt.timing(share=0)
        self.difference = self.loss = 0.0
        self._rate = cell["rate"]
        self._kept: list[Tensor] = []
        self._run = self._engine()

    def warm(self, x: Tensor, y: Tensor) -> None:
        """Some passes that are not timed: the first ones are slower. They leak nothing."""
        for _ in range(WARM):
            loss = F.cross_entropy(self.net(x), y)
            self._torch(loss) if self.name in LEAKS else self._run(loss)

    def step(self, x: Tensor, y: Tensor, seed: int, check: bool) -> None:
        """One batch; the pass and the release of its graph are timed."""
        torch.manual_seed(seed)  # the same dropout for every engine
        loss = F.cross_entropy(self.net(x), y)
        expected = self._torch(loss, keep=True) if check else None
        if check:
            self.loss = loss.item()
        with self.timing.step():
            found = self._run(loss)
            del loss
        if expected is not None:
            self.difference = max(self.difference, _difference(found, expected))
        with torch.no_grad():
            for parameter, gradient in zip(self.parameters, found):
                parameter.sub_(gradient, alpha=self._rate)

    def _engine(self) -> Callable[[Tensor], Sequence[Tensor]]:
        if self.name in ("torch", "kept", "hooks"):
            return {"torch": self._torch, "kept": self._keep, "hooks": self._hook}[self.name]
        names = dict(self.net.named_parameters())

        def run(loss: Tensor) -> Sequence[Tensor]:
            found = gt.backward(loss, names=names, schedule=self.name)
            return [found[name] for name in names]

        return run

    def _torch(self, loss: Tensor, keep: bool = False) -> Sequence[Tensor]:
        return torch.autograd.grad(loss, self.parameters, retain_graph=keep)

    def _keep(self, loss: Tensor) -> Sequence[Tensor]:
        self._kept.append(loss)
        return self._torch(loss)

    def _hook(self, loss: Tensor) -> Sequence[Tensor]:
        self.parameters[0].register_hook(lambda gradient: None)  # type: ignore[no-untyped-call]
        return self._torch(loss)


class Control:
    """A pass over one graph, always the same: what it takes is the state of the machine."""

    def __init__(self, cell: Cell, data: tuple[Tensor, Tensor]) -> None:
        self.batch = x, y = data[0][: cell["batch"]], data[1][: cell["batch"]]
        net = network(cell, x.shape[1])
        self._loss = F.cross_entropy(net(x), y)
        self._parameters = list(net.parameters())
        self.timing: gt.timing[None] = gt.timing(share=0)

    def step(self) -> None:
        """Once more."""
        with self.timing.step():
            torch.autograd.grad(self._loss, self._parameters, retain_graph=True)


def network(cell: Cell, inputs: int, classes: int = 10) -> nn.Sequential:
    """The source's network; the softmax is in the loss."""
    torch.manual_seed(cell["seed"])
    hidden, dropout = cell["hidden"], cell["dropout"]
    return nn.Sequential(
        *(nn.Linear(inputs, hidden), nn.ReLU(), nn.Dropout(dropout)),
        *(nn.Linear(hidden, hidden), nn.ReLU(), nn.Dropout(dropout)),
        nn.Linear(hidden, classes),
    )


def _batches(
    cell: Cell, data: tuple[Tensor, Tensor], epoch: int
) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(cell["seed"] + 1000 * epoch)
    order = torch.randperm(len(data[0]), generator=generator)
    whole = len(order) // cell["batch"] * cell["batch"]
    for some in torch.split(order[:whole], cell["batch"]):
        yield data[0][some], data[1][some]


def _difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest difference, as a share of the largest gradient."""
    apart = max(float((a - b).abs().max()) for a, b in zip(found, expected))
    return apart / max(float(b.abs().max()) for b in expected)


def _rounded(times: Sequence[float]) -> list[float]:
    return [round(seconds, DIGITS) for seconds in times]


# What came out ------------------------------------------------------------------------------------


def headline(facts: Mapping[str, Any]) -> str:
    """The answer in a sentence."""
    engines = [name for name in facts["verdicts"] if name not in LEAKS]
    slow = [name for name in engines if facts["verdicts"][name] == "grows"]
    ends = [x for name in engines for x in facts["change"][name][2:] if x is not None]
    bound = f"ends above {max(ends):+.1%}" if ends else "is known"
    which = f"{len(slow)} of {len(engines)}" if slow else f"None of {len(engines)}"
    unsure = [name for name in engines if facts["verdicts"][name] == "cannot be told"]
    but = f" (of {len(unsure)} it cannot be told)" if unsure else ""
    return (
        f"{which} engines became slower during training{but}: over {facts['batches']:,.0f} batches "
        f"no interval of the change of a backward pass {bound}, where the source reports +60%."
    )


def conclude(rows: Sequence[Row]) -> Findings:
    """Whose time grows, by how much, and what lives longer than it should."""
    rows = sorted(filter(_told_all, rows), key=lambda row: (row.cell["group"], row.cell["seed"]))
    if not rows:
        return Findings("No times were told, so nothing can be said.")
    groups = [group for group in GROUPS if any(row.cell["group"] == group for row in rows)]
    names = [name for group in groups for name in GROUPS[group]]
    found = {name: Measured(name, _rows(rows, name)) for name in names}
    cell, result = rows[0]
    steps = len(result["times"][CONTROL])
    leaks = [found[name] for name in ("kept", "hooks") if name in found]
    honest = [found[name] for name in GROUPS["honest"] if name in found]
    start = f"Over {cell['epochs']} epochs ({steps:,} batches)"
    parts = [*_honest(start, honest), *(one.leak() for one in leaks)]
    return Findings(
        " ".join(parts),
        (_table(found.values(), rows), _epochs(found.values())),
        tuple(_plots(list(found.values()), result["batches"])),
        _facts(found, rows, steps),
    )


def _told_all(row: Row) -> bool:
    """Whether the clock and the gauges told every number."""
    parts = (*row.result["times"].values(), *row.result["live"].values())
    return all(bool(np.isfinite(part).all()) for part in parts)


class Measured:
    """What was measured of one engine, over all seeds."""

    def __init__(self, name: str, rows: Sequence[Row]) -> None:
        self.name, self.word, self.rows = name, WORDS[name], rows
        self.times = [np.array(row.result["times"][name]) for row in rows]
        self.control = [np.array(row.result["times"][CONTROL]) for row in rows]
        self.batches = int(rows[0].result["batches"])
        self.ratios = [a / np.maximum(b, TICK) for a, b in zip(self.times, self.control)]
        ratios = [some[self.batches :] for some in self.ratios]
        self.raw = pooled([times[self.batches :] for times in self.times])
        self.trend = pooled(ratios)
        self.epochs = pooled([np.median(self.rounds(some), axis=1) for some in ratios])
        self.difference = max(float(row.result["differences"][name]) for row in rows)

    @property
    def steps(self) -> int:
        """Batches that count: those after the first epoch."""
        return len(self.times[0]) - self.batches

    @property
    def change(self) -> Interval:
        """The change over training, as a share, relative to the control."""
        return self.trend.relative(self.steps)

    def rounds(self, times: Floats) -> Floats:
        """By epoch: (epochs, batches)."""
        return times.reshape(-1, self.batches)

    def median(self, epoch: int) -> float:
        """Milliseconds of a batch in the first (0) or last (-1) epoch."""
        parts = [self.rounds(some)[epoch] for some in self.times]
        return 1000 * float(np.median(np.concatenate(parts)))

    def rate(self, kind: str) -> Interval | None:
        """How much there is more of a kind after each batch; the first epoch is left out."""
        found = []
        for row in self.rows:
            values = row.result["live"][kind][1:]
            if len(values) > 1:
                x = [self.batches * at for at in range(len(values))]
                found.append(theil_sen(x, values))
        if not found:
            return None
        return Interval(*(float(np.median([one[at] for one in found])) for at in range(3)))

    @property
    def verdict(self) -> str:
        """In a word or two."""
        return _verdict(self.trend, self.change, self.tests)

    @property
    def tests(self) -> int:
        """How many engines are tested beside each other."""
        return next(len(names) for names in GROUPS.values() if self.name in names)

    def leak(self) -> str:
        """A sentence about a leak."""
        more = [
            f"{rate.value:.2f} {kind}"
            for kind in (TENSORS, OBJECTS)
            if (rate := self.rate(kind)) is not None and rate.value > STILL
        ]
        memory = self.rate(MEMORY)
        if memory is not None and memory.low > 0:
            more.append(f"{memory.value / 1024:.1f} KiB")
        gains = f"leaves {', '.join(more)} behind in each batch" if more else "leaves no trace"
        return f"The {self.word.replace('leak:', 'leak where')} {gains}; its time {_told(self)}."


def _verdict(trend: Trend, change: Interval, tests: int) -> str:
    if trend.sign and trend.p < 0.05 / tests:
        if abs(change.value) < SLIGHT:
            return "hardly changes"
        return "grows" if trend.sign > 0 else "falls"
    return "does not grow" if change.high < SMALL else "cannot be told"


def _told(one: Measured) -> str:
    """``does not grow: +0.3% (95% interval -0.5% to +1.1%)``."""
    words = {"cannot be told": "may or may not grow"}
    return f"{words.get(one.verdict, one.verdict)}: {_share(one.change)}"


def _share(change: Interval) -> str:
    value, low, high = (told(part, "+.1%") for part in change)
    return f"{value} (95% interval {low} to {high})"


def _honest(start: str, honest: Sequence[Measured]) -> Iterator[str]:
    if not honest:
        return
    yield f"{start} the time of a backward pass is told relative to a control."
    for one in honest:
        yield f"That of {one.word} {_told(one)}."
    slower = [one for one in honest if one.verdict == "grows"]
    unsure = [one.word for one in honest if one.verdict == "cannot be told"]
    beyond = [one for one in honest if one.change.high < SOURCE]
    if slower:
        words = " and ".join(one.word for one in slower)
        less = all(one.change.high < SOURCE for one in slower)
        much = "by less than the source's engine" if less else "as the source's engine did"
        yield f"So {words} slowed down, {much}."
    elif unsure:
        yield "So no slow-down was seen, but these times do not rule one out everywhere."
    else:
        yield "So there is no shadow cost to speak of, against what the source reports."
    which = "all" if len(beyond) == len(honest) else f"{len(beyond)} of {len(honest)}"
    yield f"The source's factor of 1.6 lies beyond {which} of these intervals."
    rate = honest[0].rate(OBJECTS)
    if rate is not None:
        still = abs(rate.value) < STILL
        words = "is constant" if still else "changes"
        yield f"The number of live objects {words} with these engines ({rate.value:+.2f} a batch)."
    apart = max(one.difference for one in honest)
    differ = told(apart, ".1g")
    yield f"Their gradients differ from PyTorch's by {differ} of the largest at most."


def _table(found: Any, rows: Sequence[Row]) -> Table:
    columns = (
        "engine",
        "first epoch (ms a batch)",
        "last epoch (ms a batch)",
        "change over training, relative to the control (%)",
        "low",
        "high",
        "p",
        "change, as timed (%)",
        "objects a batch",
        "tensors a batch",
        "KiB a batch",
        "time",
    )
    lines: list[tuple[str | float | None, ...]] = []
    for one in found:
        raw = one.raw.relative(one.steps)
        rates = [one.rate(kind) for kind in (OBJECTS, TENSORS, MEMORY)]
        values = [None if rate is None else rate.value for rate in rates]
        memory = None if values[2] is None else round(values[2] / 1024, 2)
        lines.append(
            (
                one.word,
                *(round(one.median(epoch), 3) for epoch in (0, -1)),
                *(_percent(part) for part in one.change),
                _finite(one.trend.p, 4),
                _percent(raw.value),
                *(_finite(value, 3) for value in values[:2]),
                memory,
                one.verdict,
            )
        )
    for group in GROUPS:
        control = [r.result["times"][CONTROL] for r in rows if r.cell["group"] == group]
        if control:
            batches = next(r.result["batches"] for r in rows if r.cell["group"] == group)
            trend = pooled([times[batches:] for times in control])
            raw = trend.relative(len(control[0]) - batches)
            word = f"{WORDS[CONTROL]}, beside {group}"
            lines.append((word, *[None] * 5, _finite(trend.p, 4), _percent(raw.value), *[None] * 4))
    note = "Live objects and memory are those of the process, which the honest engines share."
    return Table("Time and objects over training", columns, tuple(lines), note)


def _epochs(found: Any) -> Table:
    rows = []
    for one in found:
        change = one.epochs.relative(one.steps // one.batches)
        numbers = (*(_percent(part) for part in change), _finite(one.epochs.p, 4))
        rows.append((one.word, *numbers, _verdict(one.epochs, change, one.tests)))
    columns = ("engine", "change over training (%)", "low", "high", "p", "time")
    note = "Medians of epochs, relative to the control; eleven epochs are needed at least."
    return Table("The same by epochs", columns, tuple(rows), note)


def _plots(found: Sequence[Measured], batches: int) -> Iterator[Plot]:
    yield Plot(
        "batches",
        "Time of a pass over training",
        "batch",
        "time over the control's, 1 at its median",
        tuple(_relative(one) for one in found),
    )
    yield Plot(
        "epochs",
        "Time of an epoch's passes",
        "epoch",
        "seconds",
        tuple(_seconds(one) for one in found),
    )
    for kind, unit in ((OBJECTS, ""), (MEMORY, "MiB")):
        series = tuple(_alive(group, kind, found) for group in GROUPS)
        title = f"{kind[0].upper()}{kind[1:]} since the first epoch"
        name = kind.split()[-1]
        yield Plot(name, title, "batch", unit or kind, tuple(s for s in series if len(s.x)))


def _relative(one: Measured) -> Series:
    lines = [medians(some) / (np.median(some) or 1.0) for some in one.ratios]
    x = medians(list(range(len(one.times[0]))))
    return Series(one.word, x.tolist(), np.median(lines, axis=0).tolist())


def _seconds(one: Measured) -> Series:
    y = np.median([one.rounds(some).sum(axis=1) for some in one.times], axis=0)
    return Series(one.word, list(range(1, len(y) + 1)), y.tolist())


def _alive(group: str, kind: str, found: Sequence[Measured]) -> Series:
    one = next((one for one in found if one.name in GROUPS[group]), None)
    lines = [row.result["live"][kind] for row in one.rows] if one else []
    if not one or not lines or not lines[0]:
        return Series(group, (), ())
    y = np.median([np.array(line) - line[0] for line in lines], axis=0)
    y = y / 2**20 if kind == MEMORY else y
    return Series(group, [one.batches * (at + 1) for at in range(len(y))], y.tolist())


def _facts(found: Mapping[str, Measured], rows: Sequence[Row], steps: int) -> dict[str, Any]:
    def rates(kind: str) -> dict[str, list[float] | None]:
        each = {name: one.rate(kind) for name, one in found.items()}
        return {name: None if rate is None else list(rate) for name, rate in each.items()}

    return {
        "batches": steps,
        "seeds": len({row.cell["seed"] for row in rows}),
        "objects_a_batch": rates(OBJECTS),
        "tensors_a_batch": rates(TENSORS),
        "bytes_a_batch": rates(MEMORY),
        "difference": {name: one.difference for name, one in found.items()},
        "losses": {
            name: [row.result["losses"][name] for row in one.rows] for name, one in found.items()
        },
        "change": {name: [_finite(part) for part in one.change] for name, one in found.items()},
        "verdicts": {name: one.verdict for name, one in found.items()},
    }


def _rows(rows: Sequence[Row], name: str) -> list[Row]:
    return [row for row in rows if name in row.result["times"]]


def _percent(share: float) -> float | None:
    return _finite(100 * share, 2)


def _finite(value: float | None, digits: int | None = None) -> float | None:
    if value is None or not np.isfinite(value):
        return None
    return float(value) if digits is None else round(float(value), digits)
