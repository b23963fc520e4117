"""Short forms of the long runs in ``soak.py``."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import soak

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]


@pytest.mark.parametrize("kind", soak.KINDS)
def test_killed_runs_go_on_to_the_same_result(kind: str) -> None:
    runs, wrong = soak.kill(kind, 3, seed=1)
    assert runs >= 1 and wrong == []


@pytest.mark.parametrize("name", soak.MODELS)
def test_gauges_of_a_monitored_run(tmp_path: Path, name: str) -> None:
    gauge = soak.train(name, 8, tmp_path)
    assert len(gauge.rows) == 8 and gauge.told().count("MB") == 4
    gauge.rows = [(n, 100.0, 1000, 10, 1.0) for n in range(40)]
    assert gauge.verdict() == []
    gauge.rows = [(n, 100.0 + n, 1000 + 100 * n, 10 + n, 1.0) for n in range(40)]
    assert [text.split()[0] for text in gauge.verdict()] == ["memory", "objects", "handles"]


def test_threads() -> None:
    assert soak.threads(2, 3, ["mlp"]) == 0


def test_the_tests_of_ranks_are_there() -> None:
    assert all(path.exists() for path in soak.RANK_TESTS)
