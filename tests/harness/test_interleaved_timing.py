"""Timing in turns, and the line through times."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import pytest

from gradtrace.experiments.harness.interleaved_timing import (
    Timed,
    interleaved,
    linear_fit,
    power_fit,
)


def test_ways_take_turns_and_preparation_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    def way(name: str) -> Callable[[], Callable[[], object]]:
        def prepare() -> Callable[[], object]:
            order.append(f"prepare {name}")
            clock[0] += 100
            return run

        def run() -> None:
            order.append(name)
            clock[0] += len(name)

        return prepare

    timed = interleaved({"a": way("a"), "bb": way("bb")}, 2, patience=1e9)
    assert order == ["prepare a", "a", "prepare bb", "bb"] * 2
    assert timed.rounds == 2
    assert timed.seconds == {"a": [1, 1], "bb": [2, 2]}


def test_patience_ends_with_a_whole_round() -> None:
    ways = {name: lambda: lambda: None for name in "ab"}
    timed = interleaved(ways, 100, patience=0.0)
    assert [len(seconds) for seconds in timed.seconds.values()] == [1, 1]


def test_ratios() -> None:
    timed = Timed({"torch": [2.0, 4.0, 1.0], "ours": [6.0, 4.0, 5.0]})
    assert timed.baseline == 1.0 and timed.best("ours") == 4.0
    assert timed.ratio("ours") == 4.0  # best over best
    assert timed.typical("ours") == 3.0  # of 3, 1, 5
    assert timed.middle("ours") == 5.0


def test_another_clock_may_be_used() -> None:
    ways = {"a": lambda: lambda: 3.0, "b": lambda: lambda: 5.0}
    timed = interleaved(ways, 2, collect=False, clock=lambda run: float(str(run())))
    assert timed.seconds == {"a": [3, 3], "b": [5, 5]}


def test_power_fit() -> None:
    cube = power_fit([1, 10, 100], [2, 2e3, 2e6])
    assert (cube.slope, cube.r2, cube.intercept) == pytest.approx((3, 1, math.log(2)))


def test_linear_fit() -> None:
    line = linear_fit([1, 2, 4], [5, 7, 11])
    assert (line.slope, line.r2, line.intercept) == pytest.approx((2, 1, 3))
    # y = x² on -1, 0, 1, 2: the line 1 + x leaves 2, of squares about the mean 1.5 of 9
    bent = linear_fit([-1, 0, 1, 2], [1, 0, 1, 4])
    assert (bent.slope, bent.r2, bent.intercept) == pytest.approx((1, 1 - 4 / 9, 1))


def test_a_flat_line_is_exact_and_points_above_each_other_have_none() -> None:
    flat = linear_fit([2, 3, 7], [0.005859375] * 3)
    assert (flat.slope, flat.r2, flat.intercept) == (0, 1, 0.005859375)
    above = linear_fit([2, 2], [1, 3])
    assert math.isnan(above.slope) and math.isnan(above.r2) and above.intercept == 2


def test_a_clock_too_coarse_tells_no_ratio() -> None:
    timed = Timed({"torch": [0.0, 0.0], "ours": [1.0, 0.0]})
    assert math.isnan(timed.ratio("ours")) and math.isnan(timed.typical("ours"))
