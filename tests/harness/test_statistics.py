"""The small statistics, held against scipy."""

from functools import reduce
from itertools import permutations
from math import inf, isnan, nan
from operator import add
from typing import Any

import numpy as np
import pytest

from gradtrace.experiments.harness.statistics import (
    Interval,
    average,
    bootstrap,
    percentiles,
    ranks,
    steady,
    student,
    student_quantile,
    theil_sen,
)
from gradtrace.profiling.trend_tests import mann_kendall

SEEDS = range(8)


@pytest.fixture(scope="module")
def stats() -> Any:
    """``scipy.stats``, whose import takes longer than these tests."""
    from scipy import stats

    return stats


def series(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Two rows of numbers; every second with many ties."""
    generator = np.random.default_rng(seed)
    n = int(generator.integers(5, 60))
    x, noise = generator.normal(size=(2, n))
    y = x * generator.normal() + noise
    return (np.round(x), np.round(y)) if seed % 2 else (x, y)


@pytest.mark.parametrize("seed", SEEDS)
def test_ranks_are_those_of_scipy(seed: int, stats: Any) -> None:
    x, _ = series(seed)
    assert ranks(x).tolist() == stats.rankdata(x).tolist()


@pytest.mark.parametrize("seed", SEEDS)
def test_theil_sen_is_that_of_scipy(seed: int, stats: Any) -> None:
    x, y = series(seed)
    expected = stats.theilslopes(y, x, alpha=0.95)
    assert theil_sen(x, y) == pytest.approx((expected[0], *expected[2:]), abs=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
def test_mann_kendall_is_kendalls_test_over_time(seed: int, stats: Any) -> None:
    _, y = series(seed)
    n = len(y)
    trend = mann_kendall(y)
    ties = n * (n - 1) / 2 - sum(c * (c - 1) / 2 for c in np.unique(y, return_counts=True)[1])
    tau = stats.kendalltau(np.arange(n), y, method="asymptotic")
    assert trend.s == pytest.approx(tau.statistic * np.sqrt(n * (n - 1) / 2 * ties), abs=1e-6)
    # scipy's p has no correction for continuity: take it off again
    uncorrected = trend.z * trend.s / (trend.s - np.sign(trend.s)) if abs(trend.s) > 1 else 0.0
    if abs(trend.s) > 1:
        assert 2 * stats.norm.sf(abs(uncorrected)) == pytest.approx(tau.pvalue, abs=1e-9)
    assert trend.p == pytest.approx(2 * stats.norm.sf(abs(trend.z)), abs=1e-12)


def test_mann_kendall_is_close_to_the_exact_distribution() -> None:
    every = [mann_kendall(order) for order in permutations(range(6))]
    for s in (5, 9, 13):
        exact = sum(abs(trend.s) >= s for trend in every) / len(every)
        approximate = next(trend.p for trend in every if trend.s == s)
        assert approximate == pytest.approx(exact, abs=0.02)


def test_nothing_moves_without_a_trend() -> None:
    assert mann_kendall([3, 3, 3, 3]) == (0, 0.0, 1.0)
    assert mann_kendall([1.0]).p == 1.0
    assert isnan(theil_sen([1, 1], [1, 2]).value)


def test_bootstrap_is_that_of_scipy(stats: Any) -> None:
    values = np.random.default_rng(0).normal(size=50)
    got = bootstrap(values.tolist(), lambda v: float(np.mean(v)), rounds=4000)
    same = np.random.default_rng(0)  # scipy draws alike
    expected = stats.bootstrap((values,), np.mean, n_resamples=4000, method="percentile", rng=same)
    assert got == pytest.approx((values.mean(), *expected.confidence_interval))


def test_clusters_stay_together() -> None:
    clusters = [[v] * 20 for v in np.random.default_rng(1).normal(size=10).tolist()]

    def mean(drawn: list[list[float]]) -> float:
        return float(np.mean([v for cluster in drawn for v in cluster]))

    together = bootstrap(clusters, mean)
    alone = bootstrap([[v] for cluster in clusters for v in cluster], mean)
    assert together.high - together.low > 3 * (alone.high - alone.low)


def test_one_cluster_tells_nothing() -> None:
    assert bootstrap([1.0], lambda v: v[0]).sign == 0
    assert Interval(0.5, 0.1, 0.9).sign == 1
    assert Interval(-0.5, -0.9, -0.1).sign == -1


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="nan"):
        ranks([1.0, float("nan")])
    with pytest.raises(ValueError, match="as many"):
        theil_sen([1, 2, 3], [1, 2])


@pytest.mark.parametrize("freedom", [1, 2, 4, 30])
@pytest.mark.parametrize("share", [0.5, 0.9, 0.975, 0.9917, 0.01])
def test_students_quantiles_are_those_of_scipy(share: float, freedom: int, stats: Any) -> None:
    found = student_quantile(share, freedom)
    assert found == pytest.approx(stats.t.ppf(share, freedom), rel=1e-5, abs=1e-6)


def test_students_interval() -> None:
    assert student([]).low == student([3.0]).low == -inf
    assert student([3.0, nan]).value == 3.0
    assert student([2.0, 2.0, 2.0]) == (2.0, 2.0, 2.0)
    alone, several = student([1.0, 2.0, 4.0]), student([1.0, 2.0, 4.0], tests=3)
    assert several.low < alone.low < alone.value < alone.high < several.high


# The last bits of a number say nothing ------------------------------------------------------------


def beside(value: float) -> list[float]:
    """The floats around a number, as another order of summation gives them."""
    down = up = value
    found = [value]
    for _ in range(8):
        down, up = float(np.nextafter(down, -inf)), float(np.nextafter(up, inf))
        found += [down, up]
    return found


@pytest.mark.parametrize("value", [0.075, -0.235, 0.625, 7.425, 34.65, 0.1 / 3])
def test_what_is_told_does_not_depend_on_the_last_bits(value: float) -> None:
    draws = np.array([-2 * value, 0.0, 2 * value])
    assert len({str(percentiles(each, draws)) for each in beside(value)}) == 1
    assert len({str(student([0.0, each, 2 * each])) for each in beside(value)}) == 1
    assert len({steady(each) for each in beside(value)}) == 1


def test_equal_means_tie_in_any_order() -> None:
    shares = [0.1, 0.7, 0.7, 0.3, 0.2, 0.4]
    assert len({reduce(add, order) / 6 for order in permutations(shares)}) > 1
    assert {average(order) for order in permutations(shares)} == {0.4}
    assert average([1 / 3, 2 / 3, 0.5]) == average([0.25, 0.75, 0.5]) == 0.5
    assert steady(0.3 - 0.1 - 0.2, 0.3) == 0 and steady(1e-300) == 1e-300
    assert isnan(average([])) and isnan(average([inf, -inf])) and average([inf, 1.0]) == inf
