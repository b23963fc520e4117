"""``shadow-cost``: counts, gradients and verdicts; never times."""

from __future__ import annotations

import gzip
import json
import random
import sys
from pathlib import Path
from typing import Any

import degenerate
import numpy as np
import pytest
import torch

from gradtrace.errors import GradtraceError
from gradtrace.experiments import images, shadow_cost
from gradtrace.experiments.harness.findings import Row

SMALL = {**shadow_cost.QUICK, "samples": 200, "batch": 5, "epochs": 4, "hidden": 8}
BATCHES = 160


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Pictures in a file, as MNIST has them: the label comes last."""
    generator = np.random.default_rng(0)
    table = np.column_stack([generator.integers(0, 256, (60, 9)), np.arange(60) % 10])
    table[:, 0] = 0
    path = tmp_path_factory.mktemp("data") / "few.csv.gz"
    path.write_bytes(gzip.compress("\n".join(",".join(map(str, r)) for r in table).encode()))
    return str(path)


@pytest.fixture(scope="module")
def rows(data: str) -> list[Row]:
    cells = shadow_cost.cells({**SMALL, "mnist": data}, 1)
    found = [shadow_cost.trained(cell) for cell in cells]
    return [Row(cell, json.loads(json.dumps(result))) for cell, result in zip(cells, found)]


def test_honest_engines_leave_nothing_and_leaks_do(rows: list[Row]) -> None:
    facts = shadow_cost.conclude(rows).facts
    objects, tensors = facts["objects_a_batch"], facts["tensors_a_batch"]
    for name in shadow_cost.GROUPS["honest"]:
        assert abs(objects[name][0]) < 0.1
        assert tensors[name] == [0, 0, 0]
    assert tensors["kept"] == [1, 1, 1]  # a straight line: the interval has no width
    assert objects["kept"][0] == pytest.approx(2, abs=0.1)
    assert objects["hooks"][0] == pytest.approx(1, abs=0.1)
    assert tensors["hooks"] == [0, 0, 0]


def test_all_train_alike(rows: list[Row]) -> None:
    facts = shadow_cost.conclude(rows).facts
    assert max(facts["difference"].values()) < 1e-6
    losses = [loss for values in facts["losses"].values() for loss in values]
    assert losses == pytest.approx([losses[0]] * 6, rel=1e-4)
    assert facts["batches"] == BATCHES


def test_the_order_of_rows_does_not_matter(rows: list[Row]) -> None:
    mixed = random.Random(0).sample(rows, len(rows))
    assert shadow_cost.conclude(mixed) == shadow_cost.conclude(rows)


def test_a_cell_is_measured_alike_again_and_leaves_the_callers_state(data: str) -> None:
    cell = shadow_cost.cells({**SMALL, "mnist": data, "epochs": 1}, 2)[-1]
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    first, second = (shadow_cost.trained(cell) for _ in range(2))
    assert first["losses"] == second["losses"]
    assert torch.equal(state, torch.get_rng_state())
    assert torch.get_num_threads() == threads


def test_what_the_process_did_before_is_not_seen(data: str) -> None:
    """Memory that an earlier cell freed hid a leak, and a run that was killed told another rate."""
    cell = shadow_cost.cells({**SMALL, "mnist": data, "epochs": 1}, 1)[-1]
    before: list[list[int]] = [[] for _ in range(1_000_000)]
    found = shadow_cost.measure(cell, lambda text: None)
    assert 0 < found["live"][shadow_cost.OBJECTS][0] < len(before)
    assert found["losses"] == shadow_cost.trained(cell)["losses"]


def made(grow: float, noise: float = 0.01, seeds: int = 3) -> list[Row]:
    """Rows in which the times of kahn grow by a share, and no others."""
    rows = []
    for cell in shadow_cost.cells({**SMALL, "epochs": 20}, seeds):
        generator = np.random.default_rng(cell["seed"])
        names = (*shadow_cost.GROUPS[cell["group"]], shadow_cost.CONTROL)
        load = 1 + np.linspace(0, 2, 200)  # the machine becomes slower, for all alike
        times: dict[str, Any] = {
            n: 1e-3 * load * (1 + noise * generator.normal(size=200)) for n in names
        }
        if "kahn" in times:
            times["kahn"] *= 1 + grow * np.arange(200) / 200
        live = {k: [1.0] * 20 for k in (shadow_cost.OBJECTS, shadow_cost.TENSORS)}
        result = {
            "times": {n: t.tolist() for n, t in times.items()},
            "batches": 10,
            "live": {**live, shadow_cost.MEMORY: []},
            "differences": dict.fromkeys(names[:-1], 0.0),
            "losses": dict.fromkeys(names[:-1], 0.0),
        }
        rows.append(Row(cell, result))
    return rows


def test_who_slows_down_is_named_and_a_slow_machine_is_not_blamed_on_engines() -> None:
    found = shadow_cost.conclude(made(0.6))
    assert found.facts["verdicts"]["kahn"] == "grows"
    assert found.facts["change"]["kahn"][0] == pytest.approx(0.45, abs=0.05)  # over the median
    assert {found.facts["verdicts"][n] for n in ("torch", "creation")} == {"does not grow"}
    assert "our schedule kahn slowed down" in found.sentence
    assert "no shadow cost" not in found.sentence


def test_no_growth_is_said_to_be_none() -> None:
    found = shadow_cost.conclude(made(0.0))
    assert "no shadow cost" in found.sentence
    assert "beyond all of these intervals" in found.sentence
    json.dumps([found.facts, [table.rows for table in found.tables]], allow_nan=False)


def test_noise_is_said_to_tell_nothing() -> None:
    found = shadow_cost.conclude(made(0.0, noise=0.5, seeds=1))
    assert "do not rule one out" in found.sentence


# Pictures ----------------------------------------------------------------------------------------


def test_digits_are_there() -> None:
    pytest.importorskip("sklearn")
    x, y = images.pictures(None, 2000, 0)
    assert x.shape == (2000, 64)
    assert (float(x.min()), float(x.max())) == (0, 1)
    assert set(y.tolist()) == set(range(10))


def test_without_scikit_learn_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(GradtraceError, match=r"pip install scikit-learn"):
        images.pictures(None, 10, 0)


def idx(array: np.ndarray) -> bytes:
    sizes = np.array(array.shape, ">u4").tobytes()
    return bytes([0, 0, 8, array.ndim]) + sizes + array.astype(np.uint8).tobytes()


@pytest.mark.parametrize("packed", [False, True])
def test_idx_files_are_read(tmp_path: Path, packed: bool) -> None:
    pixels, labels = np.arange(24).reshape(3, 2, 4) * 10, np.array([7, 0, 2])
    end = ".gz" if packed else ""
    for name, array in (("images-idx3", pixels), ("labels-idx1", labels)):
        content = idx(array)
        path = tmp_path / f"train-{name}-ubyte{end}"
        path.write_bytes(gzip.compress(content) if packed else content)
    x, y = images.mnist(tmp_path / f"train-images-idx3-ubyte{end}")
    assert torch.allclose(x, torch.tensor(pixels.reshape(3, 8) / 255, dtype=torch.float32))
    assert y.tolist() == [7, 0, 2]


def test_a_csv_may_have_a_header_and_its_label_first(tmp_path: Path) -> None:
    path = tmp_path / "some.csv"
    path.write_text("label,a,b\n3,0,255\n1,0,0\n9,0,51\n")
    x, y = images.mnist(path)
    assert y.tolist() == [3, 1, 9]
    assert x.tolist() == [[0, 1], [0, 0], [0, pytest.approx(0.2)]]


@pytest.mark.parametrize(
    ("name", "content"),
    [("no", None), ("x-images-idx3", b"\0\0\x08\1\0\0\0\0"), ("a.csv", b"1,2\n1,2\n")],
)
def test_other_files_are_refused(tmp_path: Path, name: str, content: bytes | None) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(GradtraceError, match="mnist is an idx file"):
        images.mnist(path)


@degenerate.every
def test_degenerate_measurements_are_concluded_from(rows: list[Row], kind: str) -> None:
    degenerate.concludes(shadow_cost, rows, kind)
