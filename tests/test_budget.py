"""What monitoring may cost, with a clock that is told what time it is."""

from __future__ import annotations

import math

import pytest
import torch
from gradtrace.distributed.rank_exchange import RankExchange
from gradtrace.runs.step_results import StepResult
from gradtrace.training.overhead_budget import Budget
from gradtrace.training.schedule import Schedule
from torch import nn

import gradtrace as gt
from gradtrace.traced import Trace
from gradtrace.training import tuning
from gradtrace.training.monitor import Monitor


class Clock:
    """Goes on when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def loop(
    budget: float | None, steps: int, cost: float, each: float = 1.0, every: int = 1
) -> tuple[Monitor, Clock]:
    """A loop whose steps take ``each`` seconds and whose traces take ``cost``."""
    clock, model = Clock(), nn.Linear(2, 1)
    found = Monitor(model, every=every, budget=budget, clock=clock, view=False)
    look = found._tracer.measured

    def slow(*args: object) -> tuple[Trace, StepResult]:
        clock.now += cost
        return look(*args)  # type: ignore[arg-type]

    found._tracer.measured = slow  # type: ignore[method-assign]
    x = torch.ones(1, 2)
    for _ in range(steps):
        clock.now += each
        found.step(model(x).sum())
    return found, clock


@pytest.mark.parametrize(("budget", "cost"), [(0.03, 0.3), (0.03, 3.0), (0.1, 1.0), (0.5, 1.0)])
def test_the_share_stays_within_the_budget(budget: float, cost: float) -> None:
    found, _ = loop(budget, 150, cost)
    steps = found.history.steps
    found.close()
    # Each trace after the first is taken as soon as all of them fit.
    expected, spent = [0], cost
    for step in range(1, 150):
        if (spent + cost) / budget <= step - 1 + 1e-9:
            expected.append(step)
            spent += cost
    assert all(abs(a - b) <= 1 for a, b in zip(steps, expected))
    assert abs(len(steps) - len(expected)) <= 1
    assert found.cost.seconds == pytest.approx(cost * len(steps))
    assert found.cost.share <= budget or len(steps) == 1
    for record in found.history.records[1:]:
        assert record.share <= budget * (1 + 1e-9) and record.seconds == pytest.approx(cost)


def test_every_is_kept_where_it_can_be_afforded() -> None:
    found, _ = loop(0.03, 300, 0.01, every=50)
    assert found.history.steps == (0, 50, 100, 150, 200, 250)
    found.close()


def test_no_bound() -> None:
    found, _ = loop(None, 5, 1e6)
    assert found.history.steps == (0, 1, 2, 3, 4)
    assert found.cost.share > 1000
    found.close()


def test_seconds_of_steps_are_without_traces() -> None:
    found, _ = loop(None, 6, 30.0, each=0.5, every=2)
    found.close()
    assert found.history.timed == (0, 1, 2, 3, 4)
    assert found.history.seconds == pytest.approx([0.5] * 5)


def test_a_step_that_takes_no_time() -> None:
    found, _ = loop(0.03, 20, 1.0, each=0.0)
    assert found.history.steps == (0,)
    assert math.isnan(found.cost.share)  # of no time at all
    found.close()


class Sent(RankExchange):
    """One of two ranks; what it sends is kept."""

    def __init__(self, rank: int) -> None:
        super().__init__(None, "test")
        self.rank, self.world = rank, 2
        self.sent: list[dict[str, object]] = []

    def send(self, message: dict[str, object]) -> None:
        self.sent.append(message)


@pytest.mark.parametrize("numbered", [False, True])
def test_other_ranks_learn_where_the_run_begins_and_what_is_due(numbered: bool) -> None:
    """Messages count steps from 0, unless ``begin`` gives them numbers."""
    others = Sent(1)
    found = Schedule(10, 2, Budget(0.03, Clock()), others)
    if numbered:
        assert found.jump(100) and not found.jump(100)
    else:
        others.inbox.append((0, {"first": 100}))
        found.listen(None)
    assert found.decide() and found.number == 100
    assert found.message("step") == ({"step": 100, "absolute": True} if numbered else {"step": 0})
    found.traced()
    assert not found.decide()
    others.inbox.append((0, {"due": 103 if numbered else 3}))
    found.listen(None)
    for expected in (100, 101, 101, 102, 102):
        found.last = found.at
        found.advance()
        assert found.number == expected and not found.decide()
    found.advance()
    assert found.number == 103 and found.decide()


def test_a_step_that_is_begun_again_is_its_next_backward_pass() -> None:
    found = Schedule(1, 1, Budget(None, Clock()), Sent(0))
    assert found.decide()
    found.last = found.at
    found.advance()
    assert found.jump(0) and not found.decide()
    assert found.jump(1) and found.decide()


def test_slowed_steps_count() -> None:
    clock = Clock()
    budget = Budget(0.03, clock)
    for _ in range(10):
        clock.now += 1
        budget.tick(clock.now)
    assert budget.typical == 1.0
    assert budget.slowed(1.5) == 0.5
    assert budget.slowed(0.5) == 0.0
    assert budget.slowed(1000.0) == 10.0  # that was something else
    assert budget.slowed(None) == 0.0


def test_other_things_between_steps_are_not_timed() -> None:
    clock = Clock()
    budget = Budget(0.03, clock)
    budget.tick(clock.now)
    clock.now += 50
    assert budget.tick(clock.now, clean=False) is None
    assert not budget.recent and budget.total == 50


def test_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, model = Clock(), nn.Linear(2, 1)
    with gt.Monitor(model, clock=clock) as found:
        for step in range(4):
            found.step(model(torch.ones(1, 2)).sum())
            clock.now += 1
            if step == 1:
                found.pause()
    assert found.history.timed == (0, 2)
    assert tuning.FLUSH_STEPS > 1


def test_times_are_written_without_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "FLUSH_STEPS", 4)
    found, _ = loop(0.03, 12, 1.0, every=1000)
    assert found._gathering is not None
    assert len(found._times) < 4 and found._gathering.writer.read().timed == tuple(range(8))
    found.close()
    assert found.history.timed == tuple(range(11))
