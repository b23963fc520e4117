"""Whether series rise: spikes, likeness of neighbours, jumps. ``test_statistics`` has the formulas
against scipy.
"""

from __future__ import annotations

from math import isinf, isnan

import numpy as np
import pytest

from gradtrace.profiling.trend_tests import (
    inflation_of,
    mann_kendall,
    medians,
    pooled,
    shift,
    theil_sen,
    trend,
)
from gradtrace.profiling.tuning import MIN_TREND_POINTS


def noise(seed: int, n: int, rho: float) -> np.ndarray:
    """Autoregressive noise: every value has ``rho`` of the one before it."""
    fresh = np.random.default_rng(seed).normal(size=n)
    values = np.empty(n)
    values[0] = fresh[0] / np.sqrt(1 - rho**2)
    for at in range(1, n):
        values[at] = rho * values[at - 1] + fresh[at]
    return values


def test_a_line_is_found_exactly() -> None:
    found = trend([5 + 0.25 * i for i in range(1000)])
    assert found.slope.value == pytest.approx(0.25)
    assert found.sign == 1
    assert found.points == 32
    assert trend([5 - 0.25 * i for i in range(1000)]).sign == -1


def test_a_constant_has_no_trend() -> None:
    found = trend([3.0] * 100)
    assert found.slope == (0, 0, 0)
    assert (found.sign, found.p, found.inflation) == (0, 1.0, 1.0)


def test_spikes_do_not_matter() -> None:
    values = 10 + 0.01 * np.arange(1000)
    values[::7] += 1000
    found = trend(values)
    assert found.sign == 1
    assert found.slope.value == pytest.approx(0.01, rel=0.05)


def test_x_need_not_be_even() -> None:
    steps = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]
    assert trend([3.0 * at for at in steps], steps).slope.value == pytest.approx(3)


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.9, 0.97])
def test_noise_that_remembers_is_seldom_a_trend(rho: float) -> None:
    series = [noise(seed, 800, rho) for seed in range(150)]
    assert np.mean([trend(values).sign != 0 for values in series]) < 0.1


def test_the_plain_test_would_be_fooled() -> None:
    """What the correction is there for."""
    series = [medians(noise(seed, 800, 0.97)) for seed in range(150)]
    assert np.mean([mann_kendall(values).p < 0.05 for values in series]) > 0.2


def test_the_interval_holds_the_slope_as_often_as_it_says() -> None:
    slope, held = 0.003, 0
    for seed in range(200):
        low, high = trend(slope * np.arange(600) + noise(seed, 600, 0.8)).slope[1:]
        held += low <= slope <= high
    assert held >= 180


def test_inflation_widens_both() -> None:
    values = noise(1, 60, 0.5) + 0.05 * np.arange(60)
    found, blocks = trend(values), medians(values)
    narrow, wide = theil_sen(medians(range(60)), blocks), found.slope
    assert found.inflation > 1
    assert wide.low < narrow.low < narrow.value == wide.value < narrow.high < wide.high
    assert found.p > mann_kendall(blocks).p


def test_inflation_grows_with_likeness() -> None:
    means = [np.mean([inflation_of(noise(s, 32, rho)) for s in range(50)]) for rho in (0, 0.4, 0.8)]
    assert 1 <= means[0] < 2 < means[1] < means[2]


@pytest.mark.parametrize("n", range(MIN_TREND_POINTS))
def test_few_numbers_tell_nothing(n: int) -> None:
    found = trend(range(n))
    assert found.sign == 0
    assert isnan(found.slope.value)
    assert isinf(found.slope.high)
    assert shift(range(n)) is None


@pytest.mark.parametrize("curve", [lambda t: t**2, lambda t: t**0.5, np.exp])
@pytest.mark.parametrize("n", [40, 2000])
def test_whatever_always_rises_has_a_trend(curve: object, n: int) -> None:
    assert callable(curve)
    assert trend(curve(np.linspace(0, 3, n))).sign == 1


def test_a_jump_is_no_trend_but_is_told() -> None:
    values = 1 + 0.1 * noise(0, 400, 0)
    values[280:] += 4
    found = shift(values)
    assert found is not None
    assert found.at == pytest.approx(280, abs=13)
    assert found.after - found.before == pytest.approx(4, abs=0.1)
    assert trend(values).sign == 0


def test_noise_has_no_jump() -> None:
    assert not any(shift(noise(seed, 500, 0.5)) for seed in range(50))


def test_of_nothing_there_are_no_shares() -> None:
    rising = [1.0 + 0.1 * at for at in range(40)]
    alone = pooled([rising])
    assert pooled([[0.0] * 40, rising]) == alone  # left out
    nothing = pooled([[0.0] * 40])
    assert nothing.points == 0 and nothing.sign == 0 and isnan(nothing.slope.value)
    still = trend([0.0] * 40)
    assert still.relative(40) == (0, 0, 0)
    some = trend([-1.0, 1.0] * 8 + [0.0, *range(1, 18)])._replace(middle=0.0)
    assert isnan(some.relative(3).value)
