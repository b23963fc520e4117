"""What tracing costs beside the training of a language model, on any device."""

from __future__ import annotations

import time
from collections.abc import Callable
from multiprocessing import parent_process
from statistics import median
from typing import Any

import torch
from torch import Tensor

import gradtrace as gt
from gradtrace.experiments.harness import machine
from gradtrace.experiments.harness.findings import Cell, Result, Tick
from gradtrace.experiments.language_models import (
    PARTS,
    LanguageModel,
    Streams,
    build,
    loss_of,
    streams,
)

STEP, APART, WATCHED = "training step", "training step, taken apart", "forward pass, watched"
RECORDING, EXACT, SAMPLED = "recording", "influence, all elements", "influence, sampled"
WAYS = (STEP, APART, WATCHED, RECORDING, EXACT, SAMPLED)
_FIRST = dict.fromkeys(WAYS, 1) | {STEP: 5, WATCHED: 2, RECORDING: 2}
"""Calls in a round of each, the first of which is not counted."""
SAMPLE = 10_000
"""Elements of a sample."""


def device(name: str) -> torch.device:
    """The device of this name; "auto" is a GPU where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


class Training:
    """A model with its optimiser, which is trained window by window."""

    def __init__(self, model: LanguageModel, train: Streams, length: int, rate: float) -> None:
        self.model, self.train, self.length = model, train, length
        self.optimizer = torch.optim.Adam(model.parameters(), lr=rate, fused=True)
        self.states = model.start(train.words.shape[1])
        self.step = 0

    def forward(self) -> Tensor:
        """The loss on the next window, from the state where the last one ended."""
        read, target = self.train.window(self.step, self.length)
        scores, states = self.model(read, self.states)
        self.states = [tuple(part.detach() for part in state) for state in states]
        return torch.nn.functional.cross_entropy(scores.flatten(0, 1), target.flatten())

    def update(self, loss: Tensor) -> None:
        """Back-propagate, clip the gradient to norm 1, and move."""
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.step += 1

    def advance(self) -> Tensor:
        """One step; its loss."""
        loss = self.forward()
        self.update(loss)
        return loss.detach()


def groups(model: LanguageModel) -> dict[str, str]:
    """The components of a model's layers: a name for each, and its module."""
    return {
        f"layer {n + 1}, {part}": f"layers.{n}.cell.{part}"
        for n in range(len(model.layers))
        for part in PARTS[model.kind]
    }


class Clock:
    """Seconds of calls, with nothing left to do on the device before and after each."""

    def __init__(self, where: torch.device) -> None:
        self.where = where
        self.seconds: dict[str, list[float]] = {}

    def settle(self) -> None:
        """Wait for the device."""
        if self.where.type == "cuda":
            torch.cuda.synchronize(self.where)

    def time(self, name: str, run: Callable[[], Any]) -> Any:
        """Run, and note what it took."""
        self.settle()
        begun = time.perf_counter()
        found = run()
        self.settle()
        self.seconds.setdefault(name, []).append(time.perf_counter() - begun)
        return found


def cost(cell: Cell, tick: Tick) -> Result:
    """Times of a training step and of the parts of a trace, and of training under a Monitor.

    The first round loads and compiles, and is kept apart.
    """
    where = device(cell["device"])
    train, _ = streams(cell["words"], cell["corpus"], cell["batch"], cell["seed"], where)
    model = build(cell["kind"], cell["words"], cell["units"], cell["layers"], cell["seed"])
    training = Training(model.to(where), train, cell["length"], cell["rate"])
    clock = Clock(where)
    differences: list[float] = []
    for n in range(cell["rounds"] + 1):
        tick(f"cost, {cell['layers']} layers, round {n}")
        for _ in range(5):
            clock.time(STEP, training.advance)
        model.take_apart(True)
        clock.time(APART, training.advance)
        differences += _round(clock, training)
        model.take_apart(False)
    peak = _peak(where, training)
    times = {name: [round(s, 6) for s in clock.seconds[name]] for name in WAYS}
    tick("cost, under a Monitor")
    return {
        "device": machine.gpu(where),
        "alone": parent_process() is None,
        "parameters": sum(p.numel() for p in model.parameters()),
        "first": {name: taken[0] for name, taken in times.items()},
        "seconds": {name: taken[_FIRST[name] :] for name, taken in times.items()},
        "errors_apart": [round(x, 4) for x in differences],
        "peak": peak,
        "monitor": _monitored(clock, training, cell["every"]),
    }


def _round(clock: Clock, training: Training) -> list[float]:
    """Each part of a trace; by how many standard errors sampled shares differ from exact ones."""
    parts = groups(training.model)
    trace = _trace(clock, training)
    exact = clock.time(EXACT, lambda: trace.influence(parts))
    trace = _trace(clock, training)  # another, which has computed nothing yet
    sampled = clock.time(SAMPLED, lambda: trace.influence(parts, sample=SAMPLE))
    errors = sampled.errors
    return [
        abs(sampled.shares[name] - exact.shares[name]) / errors[name]
        for name in parts
        if errors.get(name)
    ]


def _trace(clock: Clock, training: Training) -> Any:
    """A trace of the next window."""
    model, states = training.model, training.states
    read, target = training.train.window(training.step, training.length)
    with gt.watch(model, diagnose=False) as watch:
        loss = clock.time(WATCHED, lambda: loss_of(model, read, target, states))
    return clock.time(RECORDING, lambda: watch.trace(loss))


def _peak(where: torch.device, training: Training) -> dict[str, float] | None:
    """MiB at the peak of a training step and of an exact trace; None if the device does not say."""
    if where.type != "cuda":
        return None
    found = {}
    runs: dict[str, Callable[[], object]] = {
        "training step": training.advance,
        "exact trace": lambda: _traced(training),
    }
    for name, run in runs.items():
        torch.cuda.synchronize(where)
        torch.cuda.reset_peak_memory_stats(where)
        run()
        torch.cuda.synchronize(where)
        found[name] = round(torch.cuda.max_memory_allocated(where) / 2**20, 1)
    return found


def _traced(training: Training) -> None:
    training.model.take_apart(True)
    with gt.watch(training.model, diagnose=False) as watch:
        loss = training.forward()
    watch.trace(loss).influence(groups(training.model))
    training.model.take_apart(False)


def _monitored(clock: Clock, training: Training, every: int) -> dict[str, Any]:
    """As many steps with a Monitor and without: what it says that it costs, and what a clock says.

    Fused layers are taken apart by the Monitor itself. A refusal is kept as a text.
    """
    steps = 2 * every

    def plain() -> None:
        for _ in range(steps):
            training.advance()

    def watched(steps: int = steps) -> gt.Monitor:
        with gt.Monitor(training.model, every=every, budget=None, view=False) as monitor:
            for _ in range(steps):
                loss = training.forward()
                monitor.step(loss)
                training.update(loss)
        return monitor

    try:
        watched(every)  # the first trace compiles
        for _ in range(2):
            clock.time("plain", plain)
            monitor = clock.time("monitor", watched)
    except gt.errors.GradtraceError as error:
        return {"refused": str(error)}
    return {
        "every": every,
        "traces": monitor.cost.traces,
        "said": monitor.cost.seconds / max(monitor.cost.traces, 1),
        "plain": median(clock.seconds["plain"]) / steps,
        "with": median(clock.seconds["monitor"]) / steps,
    }
