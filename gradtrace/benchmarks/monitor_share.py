"""What part of training time ``gradtrace.Monitor`` takes: one step in a hundred is traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from gradtrace.benchmarks.cases import Problem, gpt2
from gradtrace.benchmarks.devices import place, told, waited
from gradtrace.benchmarks.gpu import TOKENS, made_on, tiny
from gradtrace.benchmarks.models import chosen
from gradtrace.benchmarks.results import Absent, ResultColumn, Section, Setting
from gradtrace.experiments.harness.interleaved_timing import Timed, Ways, interleaved
from gradtrace.kernels.precision import without_tf32

if TYPE_CHECKING:
    from gradtrace.training.monitor import Monitor

EVERY = 100
"""Steps from one trace to the next."""

SHARE = 0.01
"""What a Monitor may take of training time."""

PLAIN, TRACED = "a step", "a step that is traced"


def monitor_share(setting: Setting) -> Section:
    """The share of a Monitor's traces in the time of a training loop."""
    section = _section(setting, "")
    for case in chosen(setting):
        if case.paths:  # the language model
            timed = interleaved(_steps(case.make()), setting.turns(10))
            _add(section, case.name, timed, setting)
    return section


def gpu_monitor_share(setting: Setting) -> Section:
    """The same on a GPU."""
    device, section = place(setting), _section(setting, ", on a GPU")
    make = tiny if setting.quick else (lambda: gpt2(TOKENS))
    ways = _steps(made_on(setting, device, make))
    with without_tf32():
        for _ in range(3):  # kernels are compiled, and plans kept
            for way in ways.values():
                way()()
        timed = interleaved(ways, setting.turns(10), patience=8, clock=waited(device))
    name = "GPT-2 build, 8 tokens" if setting.quick else f"GPT-2 small, {TOKENS:,} tokens, float32"
    _add(section, name, timed, setting)
    return told(section, device, setting)


def _section(setting: Setting, where: str) -> Section:
    if not setting.has("networkx", "the share of a Monitor"):
        raise Absent("a Monitor needs networkx")
    section = Section(
        f"`gt.Monitor(model, every={EVERY})`, over a training loop{where}",
        [
            ResultColumn("model"),
            ResultColumn("a step, ms", ".2f"),
            ResultColumn("a step that is traced, ms", ".2f"),
            ResultColumn("an untraced step more, µs", ".1f"),
            ResultColumn("share", ".2%"),
            ResultColumn("median of rounds", ".2%"),
            ResultColumn("target", ".0%", limits="share"),
            ResultColumn("rounds", "d"),
        ],
    )
    section.note(
        f"A step is forward pass, backward pass and SGD. The share is what one step of {EVERY} "
        "takes more because it is traced, and each of the others because a Monitor is there. "
        "Traces are later ones of a run, of 10,000 sampled elements if the model is large (the "
        "default). No budget is set: by default (`budget=0.01`) a Monitor whose traces would take "
        "more than 1% traces fewer steps."
    )
    return section


def _add(section: Section, name: str, timed: Timed, setting: Setting) -> None:
    from gradtrace.benchmarks.monitoring import idle

    waiting = idle(1_000 if setting.quick else 20_000)
    shares = [
        ((of(TRACED) - of(PLAIN)) / EVERY + waiting) / of(PLAIN)
        for of in (timed.best, timed.middle)
    ]
    milliseconds = [1e3 * timed.best(way) for way in (PLAIN, TRACED)]
    aim = setting.limit(SHARE)
    section.add(name, *milliseconds, 1e6 * waiting, *shares, aim, timed.rounds)


def _steps(problem: Problem) -> Ways:
    """A step of training without a Monitor, and one that is traced."""
    from gradtrace.training.monitor import Monitor

    model = problem.model
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    def step(monitor: Monitor | None = None) -> None:
        loss = problem.loss()
        if monitor is not None:
            monitor.step(loss)
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    def traced() -> Callable[[], object]:
        monitor = Monitor(model, every=EVERY, budget=None, view=False)

        def run() -> None:
            with monitor:
                step(monitor)

        return run

    return {PLAIN: lambda: step, TRACED: traced}
