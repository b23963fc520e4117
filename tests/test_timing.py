"""``gt.timing``: what is timed, what grows, and what is said of it. Times are made up where they
matter: nothing here depends on how fast the machine is.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gradtrace as gt
from gradtrace.errors import GradtraceError, NoGraph
from gradtrace.profiling import resource_meters
from gradtrace.profiling.resource_meters import MeterSeries
from gradtrace.profiling.summary import Pace, pace

MODULE = import_module("gradtrace.profiling.timing")  # its name is taken by the class


def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that stands still unless it is moved."""
    now = [100.0]
    for module in (MODULE, resource_meters):
        monkeypatch.setattr(module, "perf_counter", lambda: now[0])
    return now


def told(times: Any, **options: Any) -> Pace:
    return pace(list(times), [], {}, **options)


# Steps -------------------------------------------------------------------------------------------


def test_steps_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = clock(monkeypatch)
    with gt.timing(share=0) as timing:
        for seconds in (1.0, 2.0, 3.0):
            now[0] += 50  # outside of a step
            with timing.step():
                now[0] += seconds
    assert list(timing.times) == [1, 2, 3]
    assert len(timing) == 3


def test_ticks_end_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    now = clock(monkeypatch)
    with gt.timing(share=0) as timing:
        for epoch in range(2):
            now[0] += 50  # validation
            timing.epoch()
            for _ in range(2):
                now[0] += 1 + epoch
                timing.tick()
    assert list(timing.times) == [1, 1, 2, 2]
    assert list(timing.epochs) == [0, 2]
    loose: gt.timing[None] = gt.timing(share=0)
    loose.tick()  # the first starts the clock
    now[0] += 4
    loose.tick()
    assert list(loose.times) == [4]


def test_a_loader_is_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    now = clock(monkeypatch)

    class Loader:
        def __iter__(self) -> Iterator[int]:
            for item in range(3):
                now[0] += 7
                yield item

    timing = gt.timing(Loader())
    for _ in range(2):
        for item in timing:
            now[0] += item
    assert list(timing.times) == [0, 1, 2] * 2
    assert list(timing.epochs) == [0, 3]
    assert timing.seen["loading a step"].values[0] == 7
    assert repr(timing) == "timing(6 steps, 2 epochs)"


def test_a_step_that_fails_is_not_counted_and_a_loop_may_be_left() -> None:
    with gt.timing() as timing, pytest.raises(ZeroDivisionError), timing.step():
        _ = 1 / 0
    assert len(timing) == 0
    before = list(gc.callbacks)
    some = gt.timing(range(10))
    for item in some:
        if item == 4:
            break
    del item
    assert len(some) == 4
    gc.collect()
    assert gc.callbacks == before


def test_nothing_is_left_behind() -> None:
    before = list(gc.callbacks)
    with gt.timing() as timing, timing.step():
        pass
    assert gc.callbacks == before


@pytest.mark.parametrize("options", [{"steps": 3}, {"warmup": -1}, {"share": 1.0}, {"share": -0.1}])
def test_bad_arguments_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(GradtraceError):
        gt.timing(**options)


def test_there_must_be_something_to_run_over() -> None:
    with pytest.raises(GradtraceError, match="nothing to run over"):
        list(gt.timing())


# What grows --------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _alone() -> None:
    """What other tests left in this process is not looked at: growth is told as a share of all."""
    gc.collect()
    gc.freeze()


def loop(kind: str, steps: int = 60) -> gt.timing[None]:
    """A training loop with a mistake in it, read six times."""
    torch.manual_seed(0)
    model, x = nn.Linear(3, 2), torch.ones(4, 3)
    parameters = list(model.parameters())
    kept: list[Any] = []
    state = torch.zeros(4, 2)
    timing: gt.timing[None] = gt.timing(share=0)
    with timing:
        for step in range(steps):
            with timing.step():
                out = model(x)
                if kind == "state":
                    out = state = (out + state).tanh()
                loss = out.square().mean()
                torch.autograd.grad(loss, parameters, retain_graph=kind == "state")
                if kind == "losses":
                    kept.append(loss)
                if kind == "lists":
                    kept.append([loss.item(), kept])
            if (step + 1) % (steps // 6 or 1) == 0:
                timing._note(loss)
                timing.look()
    return timing


def growing(timing: gt.timing[None]) -> dict[str, float]:
    found = timing.report().growing
    return {growth.kind.name: growth.rate.value for growth in found if growth.kind.exact}


def test_a_loop_without_mistakes_grows_nothing() -> None:
    assert growing(loop("none")) == {}


def test_kept_losses_are_found() -> None:
    report = loop("losses").report()
    found = {growth.kind.name: growth for growth in report.growing}
    assert found["live tensors"].rate == (1, 1, 1)
    assert "operators in the graph" not in found
    assert "live tensors +1 a step" in report.verdict
    assert "loss.item()" in report.verdict


def test_a_state_that_is_carried_over_is_found() -> None:
    timing = loop("state")
    assert growing(timing)["operators in the graph"] == pytest.approx(4, abs=1)
    assert "detach()" in timing.report().verdict


def test_objects_are_found() -> None:
    assert growing(loop("lists", 2000)) == {"live Python objects": pytest.approx(1, abs=0.2)}


def test_loss_is_not_kept_alive_and_must_have_a_graph() -> None:
    timing = loop("none", 5)
    loss = nn.Linear(2, 1)(torch.ones(2)).sum()
    timing.graph(loss)
    timing.tick(loss)
    assert not [it for it in gc.get_referrers(loss) if isinstance(it, dict) and "_graph" in it]
    with pytest.raises(NoGraph):
        timing.tick(torch.ones(()))


def test_counting_the_graph_is_not_in_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = clock(monkeypatch)

    def walk(loss: Tensor, visit: Any) -> None:
        now[0] += 1000
        visit(None, None)

    monkeypatch.setattr(MODULE, "walk", walk)
    loss = nn.Linear(2, 1)(torch.ones(2)).sum()
    with gt.timing() as timing, timing.step():
        now[0] += 1
        timing.graph(loss)
    assert list(timing.times) == [1]
    assert timing.seen["operators in the graph"].values == [1]


def test_readings_pace_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 1 s and readings of 1 s: at 1% these are seldom, but at doublings at first."""
    now = clock(monkeypatch)

    def scan() -> tuple[list[Tensor], int]:
        now[0] += 1
        return [], 0

    monkeypatch.setattr(resource_meters, "scan", scan)
    with gt.timing() as timing:
        for _ in range(3000):
            with timing.step():
                now[0] += 1
    assert list(timing.times) == [1] * 3000
    readings = timing.seen["live tensors"].steps
    assert readings[0] == 1
    assert readings[-1] == 3000
    assert 8 < len(readings) < 20


def test_pauses_of_the_collector_are_seen() -> None:
    with resource_meters.Pauses() as pauses:
        gc.collect()
    assert pauses.total > 0
    assert pauses not in gc.callbacks


def test_tensors_and_bytes() -> None:
    base = torch.zeros(1000)
    found, objects = resource_meters.scan()
    assert any(it is base for it in found)
    assert objects > len(found)
    assert resource_meters.bytes_of([base, base[10:], base.view(10, 100)]) == 4000
    assert resource_meters.bytes_of([torch.eye(3).to_sparse()]) == 0


# What is said ------------------------------------------------------------------------------------


def noise(n: int, size: float = 0.02) -> np.ndarray:
    return 1e-3 * (1 + size * np.random.default_rng(0).gamma(1, 1, n))


@pytest.mark.parametrize("n", range(0, 13, 3))
def test_few_steps_tell_nothing(n: int) -> None:
    report = told(noise(n))
    assert report.verdict.startswith("Too few steps to tell")
    assert report.slower == 0
    assert str(report)
    json.dumps(report.to_dict(), allow_nan=False)


@pytest.mark.parametrize("times", [[0.0] * 40, [0.0] * 30 + [1.0] * 10, [0.004] * 40])
def test_a_clock_that_stands_still_tells_little_but_something(times: list[float]) -> None:
    seen = {"x": MeterSeries(resource_meters.RESIDENT, list(range(1, 41)), times)}
    report = pace(times, list(range(0, 40, 3)), seen)
    assert "nan" not in report.verdict and "inf" not in report.verdict
    assert report.slower == 0
    if not any(times):
        assert report.verdict.startswith("Steps do not slow down: 0 ns each, +0.0%")
    assert str(report)
    json.dumps(report.to_dict(), allow_nan=False)


def test_steady_steps() -> None:
    report = told(noise(2000))
    assert report.verdict.startswith("Steps do not slow down: 1.0")
    assert "per 1,000 steps" in report.verdict


def test_slow_steps_and_what_grows_with_them() -> None:
    times = noise(2000) * (1 + 0.0001 * np.arange(2000))
    steps = list(range(100, 2000, 100))
    seen = {"x": MeterSeries(resource_meters.TENSORS, steps, [12.0 * step for step in steps])}
    report = pace(list(times), [], seen)
    assert report.slower == 1
    assert report.verdict.startswith("Steps slow down: 1.1")
    assert "What grows with them: live tensors +12 a step (a list that keeps" in report.verdict
    assert (
        "Nothing that is measured"
        in pace(
            list(times), [], {"x": MeterSeries(resource_meters.TENSORS, steps, [5.0] * len(steps))}
        ).verdict
    )


def test_fast_steps_jumps_and_doubt() -> None:
    assert told(noise(500) * np.linspace(2, 1, 500)).verdict.startswith("Steps speed up")
    jump = noise(500)
    jump[350:] *= 3
    assert "but change at about step 3" in told(jump).verdict
    assert told(noise(40, 1.0)).verdict.startswith("It cannot be told")


def test_spikes_and_warm_up_do_not_matter() -> None:
    times = noise(1000)
    times[::9] *= 50
    times[:10] = 10.0
    assert told(times).verdict.startswith("Steps do not slow down: 1.0")


def test_epochs_have_their_own_trend() -> None:
    times = noise(1200) * np.repeat(np.linspace(1, 1.6, 12), 100)
    report = pace(list(times), list(range(0, 1200, 100)), {})
    assert report.epochs is not None
    assert report.epochs.sign == 1
    assert "Over 12 epochs the time of a step grows" in report.verdict
    assert pace(list(times), [0, 400, 800], {}).epochs is None


def test_the_machine_is_told_apart() -> None:
    steps = list(range(20, 2000, 10))
    slower = [1e-5 * (1 + step / 4000) for step in steps]
    report = pace(list(noise(2000)), [], {"x": MeterSeries(resource_meters.MACHINE, steps, slower)})
    assert "the machine itself becomes slower" in report.verdict


def test_it_shows_itself() -> None:
    timing = loop("losses")
    assert "live tensors" in str(timing)
    assert "To time a step takes" in str(timing)
    assert "<table" in timing._repr_html_()
    found = json.loads(json.dumps(timing.to_dict(), allow_nan=False))
    assert found["steps"] == 50
    assert 0 < found["overhead"] < 1e-3
    assert {it["name"] for it in found["measures"] if it["grows"]} >= {"live tensors"}


def test_parameters_that_are_not_initialised_yet_count_for_nothing() -> None:
    lazy = torch.nn.LazyLinear(3)
    assert resource_meters.bytes_of([lazy.weight, torch.zeros(4)]) == 16
