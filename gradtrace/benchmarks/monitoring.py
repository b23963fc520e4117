"""What ``gradtrace.Monitor`` costs: ``python -m gradtrace.benchmarks.monitoring [seconds]``.

Each model trains for so many seconds with the default settings, and as many steps without. Told
are a step, the share that the Monitor measured of itself and kept to, the share that a clock
beside both runs finds, its first trace, a later one, what an untraced step pays, and what it pays
with both triggers, none of which fires. Seconds are those of the processor, which other programs
disturb least: run it with OMP_NUM_THREADS=1.

``python -m gradtrace.benchmarks.monitoring triggers [steps]`` compares whole steps without a
Monitor and with one that has both triggers, none of which fires: they alternate, one by one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise
from statistics import median
from time import process_time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gradtrace.io.table import TextColumn, TextTable
from gradtrace.training.monitor import Monitor

Loss = Callable[[nn.Module], Tensor]


def perceptron() -> tuple[nn.Module, Loss]:
    """The 784-512-512-10 perceptron, 64 images a batch."""
    sizes = (784, 512, 512, 10)
    layers = [part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
    x, y = torch.randn(64, 784), torch.randint(10, (64,))
    return nn.Sequential(*layers[:-1]), lambda model: functional.cross_entropy(model(x), y)


def small_perceptron() -> tuple[nn.Module, Loss]:
    """A 784-128-10 perceptron, 64 images a batch."""
    model = nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
    x, y = torch.randn(64, 784), torch.randint(10, (64,))
    return model, lambda model: functional.cross_entropy(model(x), y)


def gpt2(texts: int = 8) -> tuple[nn.Module, Loss]:
    """GPT-2 with 4 layers of width 128, 8 texts of 64 tokens a batch."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 4, "n_head": 4, "n_embd": 128, "n_positions": 64, "vocab_size": 1000}
    config = GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM")
    ids = torch.randint(1000, (texts, 64))
    return GPT2LMHeadModel(config), lambda model: model(input_ids=ids, labels=ids).loss


class MonitoredLstm(nn.Module):
    """An LSTM of two layers and a linear one on its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(32, 64, 2, batch_first=True), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """The scores of ten classes."""
        found: Tensor = self.out(self.lstm(x)[0][:, -1])
        return found


def lstm() -> tuple[nn.Module, Loss]:
    """An LSTM of two layers of 64, 32 sequences of 30 steps a batch."""
    x, y = torch.randn(32, 30, 32), torch.randint(10, (32,))
    return MonitoredLstm(), lambda model: functional.cross_entropy(model(x), y)


def short_gpt2() -> tuple[nn.Module, Loss]:
    """The same with 3 texts a batch; it has dropouts, so that its random state is kept."""
    return gpt2(3)


WARM_STEPS = 40
"""Steps at the beginning that are not counted."""

MODELS = (perceptron, gpt2, lstm)
ALTERNATING = (small_perceptron, perceptron, short_gpt2)


def train(
    model: nn.Module, loss_of: Loss, monitor: Monitor | None, enough: Callable[[int], bool]
) -> list[float]:
    """Seconds of each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    times: list[float] = []
    while not enough(len(times)):
        begun = process_time()
        loss = loss_of(model)
        if monitor is not None:
            monitor.step(loss)
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        times.append(process_time() - begun)
    return times


def measured(make: Callable[[], tuple[nn.Module, Loss]], seconds: float) -> tuple[Any, ...]:
    """A row of the table."""
    torch.manual_seed(0)
    model, loss_of = make()
    train(model, loss_of, None, lambda step: step == 20)  # warm
    begun = process_time()
    with Monitor(model, clock=process_time) as monitor:
        watched = train(model, loss_of, monitor, lambda _: process_time() - begun > seconds)
        cost, records = monitor.cost, monitor.history.records
    plain = train(model, loss_of, None, lambda step: step == len(watched))
    later = median([record.seconds for record in records[1:]] or [records[0].seconds])
    return (
        make.__name__,
        len(watched),
        1000 * median(plain),
        len(records),
        records[0].seconds,
        later,
        cost.share,
        sum(watched) / sum(plain) - 1,
        1e6 * idle(),
        1e6 * triggered(model, loss_of),
    )


def alternating(make: Callable[[], tuple[nn.Module, Loss]], steps: int) -> tuple[Any, ...]:
    """A row of the table of triggers: steps without and with them, in turn, in one process."""
    both = []
    for wanted in (False, True):
        torch.manual_seed(0)
        model, loss_of = make()
        options: dict[str, Any] = {"trigger": ("spike", "nonfinite"), "view": False}
        monitor = Monitor(model, every=1 << 40, **options) if wanted else None
        if not wanted:  # of a class of its own, which nothing listens to
            kind = type(model)
            model.__class__ = type(kind.__name__, (kind,), {"forward": kind.forward})
        both.append((model, loss_of, monitor, torch.optim.SGD(model.parameters(), lr=0.01)))
    times: tuple[list[float], list[float]] = ([], [])
    for step in range(2 * (steps + WARM_STEPS)):
        model, loss_of, monitor, optimizer = both[step % 2]
        begun = process_time()
        loss = loss_of(model)
        if monitor is not None:
            monitor.step(loss)
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        times[step % 2].append(process_time() - begun)
    plain, watched = (each[WARM_STEPS:] for each in times)
    more, error = _difference(plain, watched)
    if both[1][2] is not None:
        both[1][2].close()
    usual = median(plain)
    return make.__name__, len(plain), 1000 * usual, 1e6 * more, 1e6 * error, more / usual


def _difference(a: list[float], b: list[float]) -> tuple[float, float]:
    """The median of ``b - a``, pair by pair, and its standard error, as for a normal variable."""
    found = sorted(y - x for x, y in zip(a, b))
    middle = median(found)
    spread = 1.4826 * median([abs(each - middle) for each in found])
    return middle, 1.2533 * spread / len(found) ** 0.5


def triggered(model: nn.Module, loss_of: Loss, steps: int = 200) -> float:
    """Seconds that an untraced step pays with both triggers: what is kept at the model's call, the
    look at the loss, and that at gradients before the optimiser moves.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    took = 0.0
    with Monitor(model, trigger=("spike", "nonfinite"), view=False) as monitor:
        looks = monitor._triggers
        assert looks is not None
        for step in range(steps + 1):
            loss = loss_of(model)
            looks.keeper.take()
            begun = process_time()
            looks.keeper.leave(looks.keeper.enter(model, (), {}), None)
            if not step:  # which is traced, and not counted
                monitor.step(loss)
                monitor._schedule.due = 1 << 40
                monitor._decide_next()
                continue
            monitor.step(loss)
            took += process_time() - begun
            torch.autograd.backward(loss)
            begun = process_time()
            looks.before_optimiser(optimizer)
            took += process_time() - begun
            optimizer.zero_grad()
    return took / steps


def idle(steps: int = 20_000) -> float:
    """Seconds that an untraced step of a Monitor takes, the hook on the model included."""
    model, x = nn.Identity(), torch.ones(1)
    loss = nn.Linear(1, 1)(x).sum()
    took = []
    for watched in (True, False):
        monitor = Monitor(model, every=1 << 40) if watched else None
        if monitor is not None:
            monitor._schedule.due = 1 << 40
            monitor._decide_next()
        begun = process_time()
        for _ in range(steps):
            model(x)
            if monitor is not None:
                monitor.step(loss)
        took.append((process_time() - begun) / steps)
        if monitor is not None:
            monitor.close()
    return took[0] - took[1]


def main(seconds: float) -> None:
    """Print the table."""
    columns = (
        TextColumn("model"),
        TextColumn("steps", "count"),
        TextColumn("ms a step", "number"),
        TextColumn("traces", "count"),
        TextColumn("first, s", "number"),
        TextColumn("later, s", "number"),
        TextColumn("own share", "share"),
        TextColumn("by the clock", "share"),
        TextColumn("untraced, µs", "number"),
        TextColumn("with triggers, µs", "number"),
    )
    title = f"Monitor, {seconds:g} s each, {torch.get_num_threads()} threads"
    for make in MODELS:
        print(TextTable(title, columns, (measured(make, seconds),)), flush=True)


def main_of_triggers(steps: int) -> None:
    """Print the table of triggers."""
    columns = (
        TextColumn("model"),
        TextColumn("steps", "count"),
        TextColumn("ms a step", "number"),
        TextColumn("more, µs", "number"),
        TextColumn("standard error, µs", "number"),
        TextColumn("share", "share"),
    )
    title = f"Both triggers, none fires, {torch.get_num_threads()} threads"
    for make in ALTERNATING:
        print(TextTable(title, columns, (alternating(make, steps),)), flush=True)


if __name__ == "__main__" and sys.argv[1:2] == ["triggers"]:
    main_of_triggers(int(sys.argv[2]) if len(sys.argv) > 2 else 3000)
elif __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 60.0)
