"""``shadow-cost-cpp``: gradients, counts and verdicts; never times."""

from __future__ import annotations

import json
import random
import shutil
from typing import Any

import degenerate
import numpy as np
import pytest
import torch
import torch.nn.functional as F

import gradtrace as gt
from gradtrace.errors import GradtraceError
from gradtrace.experiments import pointer_graph, shadow_cost_cpp
from gradtrace.experiments.harness.findings import Row

SMALL = {**shadow_cost_cpp.QUICK, "samples": 40, "batch": 10, "epochs": 4, "hidden": 6}

built = pytest.mark.skipif(
    not (shutil.which("cmake") and any(map(shutil.which, pointer_graph.COMPILERS))),
    reason="needs cmake and a C++ compiler",
)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    """From pictures of 9 pixels in a file, so that nothing else need be installed."""
    generator = np.random.default_rng(0)
    table = np.column_stack([generator.integers(0, 256, (60, 9)), np.arange(60) % 10])
    path = tmp_path_factory.mktemp("data") / "few.csv"
    path.write_text("\n".join(",".join(map(str, r)) for r in table))
    cells = shadow_cost_cpp.cells({**SMALL, "mnist": str(path)}, 2)
    found = [shadow_cost_cpp.measure(cell, lambda text: None) for cell in cells]
    return [Row(cell, json.loads(json.dumps(result))) for cell, result in zip(cells, found)]


@built
@pytest.mark.xdist_group("pointer_graph")
@pytest.mark.parametrize("release", shadow_cost_cpp.WAYS)
def test_its_gradient_is_ours(release: str) -> None:
    """One step on one batch, without dropout: what was subtracted is the rate × our gradient."""
    generator = torch.Generator().manual_seed(1)
    x, y = torch.rand(12, 784, generator=generator), torch.arange(12) % 10
    start, rate = shadow_cost_cpp.parameters(0, 784, 7), 0.5
    options = {"epochs": 1, "batch": 12, "rate": rate, "dropout": 0.0, "seed": 0}
    told, end = pointer_graph.train(release, x, y, start, **options)
    names = {str(i): p.clone().requires_grad_() for i, p in enumerate(start)}
    p = list(names.values())
    hidden = (((x @ p[0] + p[1]).relu()) @ p[2] + p[3]).relu()
    loss = F.cross_entropy(hidden @ p[4] + p[5], y)
    found = gt.backward(loss, names=names)
    assert told["loss"] == pytest.approx([loss.item()], rel=1e-5)
    for i, (before, after) in enumerate(zip(start, end)):
        torch.testing.assert_close(
            before - torch.from_numpy(after), rate * found[str(i)], rtol=1e-3, atol=1e-6
        )


@built
@pytest.mark.xdist_group("pointer_graph")
def test_only_cycles_keep_objects(rows: list[Row]) -> None:
    facts = shadow_cost_cpp.conclude(rows).facts
    assert facts["objects_a_batch"]["freed"] == facts["objects_a_batch"]["late"] == [0, 0, 0]
    assert facts["objects_a_batch"]["cycles"] == [17, 17, 17]  # 8 functions, 8 results, the data
    last = {row.cell["release"]: row.result for row in rows}
    assert last["freed"]["variables"] == last["late"]["variables"] == [6] * 4
    assert last["cycles"]["functions"] == [32, 64, 96, 128]
    assert facts["batches"] == 16
    assert facts["processes"] == dict.fromkeys(shadow_cost_cpp.WAYS, 2)


@built
@pytest.mark.xdist_group("pointer_graph")
def test_programs_of_a_seed_train_alike(rows: list[Row]) -> None:
    facts = shadow_cost_cpp.conclude(rows).facts
    assert facts["alike"]
    assert facts["learned"]
    assert facts["subnormal"] == 0


@built
@pytest.mark.xdist_group("pointer_graph")
@degenerate.every
def test_degenerate_measurements_are_concluded_from(rows: list[Row], kind: str) -> None:
    degenerate.concludes(shadow_cost_cpp, rows, kind)
    shadow_cost_cpp.headline(shadow_cost_cpp.conclude(degenerate.spoilt(rows, kind)).facts)


@pytest.mark.parametrize(
    ("there", "said"),
    [((), "cmake and a C.. compiler are not"), (("cmake",), "; a C.. compiler is not"),
     (("c++",), "; cmake is not")],
)  # fmt: skip
def test_what_to_install_is_said(
    monkeypatch: pytest.MonkeyPatch, there: tuple[str, ...], said: str
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: name if name in there else None)
    with pytest.raises(GradtraceError, match=f"{said} found: install them .*apt-get install"):
        pointer_graph.built()


def test_pictures_are_scaled_up_and_large_ones_left() -> None:
    corner = torch.zeros(1, 64)
    corner[0, :4] = 1
    wide = shadow_cost_cpp.widened(corner).reshape(28, 28)
    assert wide[0, :12].tolist() == [1] * 12
    assert not wide[6:].any()
    large = torch.rand(2, 784)
    assert torch.equal(shadow_cost_cpp.widened(large), large)


def made(grow: dict[str, float], noise: float = 0.002, seeds: int = 5) -> list[Row]:
    """Rows in which the time of an epoch grows by a share, on a machine that becomes slower."""
    settings = {**SMALL, "epochs": 20}
    rows = []
    for cell in shadow_cost_cpp.cells(settings, seeds):
        random_ = np.random.default_rng([cell["seed"], len(cell["release"])])
        load = np.repeat(1 + np.linspace(0, 2, 20), 4)
        by = 1 + grow.get(cell["release"], 0.0) * np.repeat(np.arange(20) / 19, 4)
        slow = 1.2 if cell["release"] == "cycles" else 1.0

        def times(share: Any, load: Any = load, random_: Any = random_) -> list[float]:
            return list(1e-3 * share * load * (1 + noise * random_.normal(size=80)))

        result: dict[str, Any] = {part: times(slow * by) for part in shadow_cost_cpp.PARTS}
        gauges = {"resident": 10**6, "faults": 7, "variables": 6, "functions": 0}
        result |= {name: [value] * 20 for name, value in gauges.items()}
        result["system"] = [0.01 * (1 + i) for i in range(20)]
        result |= {"control": times(1.0), "loss": [1.0] * 20, "subnormal": [0.0] * 20}
        rows.append(Row(cell, result))
    return rows


def test_who_slows_down_is_named_and_a_slow_machine_is_not() -> None:
    found = shadow_cost_cpp.conclude(made({"cycles": 0.6}))
    assert found.facts["verdicts"] == {
        "freed": "does not grow",
        "late": "does not grow",
        "cycles": "grows",
    }
    assert found.facts["change"]["cycles"][0] == pytest.approx(0.43, abs=0.03)  # over the median
    assert (
        "++ becomes slower if graphs are never freed, in cycles; it does not"
        in shadow_cost_cpp.headline(found.facts)
    )


def test_a_constant_cost_is_no_growth() -> None:
    found = shadow_cost_cpp.conclude(made({}))
    assert set(found.facts["verdicts"].values()) == {"does not grow"}
    assert found.facts["more"]["cycles"][0] == pytest.approx(0.2, abs=0.01)
    assert found.facts["more"]["cycles"][1] > 0.15
    assert "beyond all of these intervals" in found.sentence
    said = shadow_cost_cpp.headline(found.facts)
    assert "does not become slower if graphs are freed after each batch or freed" in said
    assert "may or may not" not in said


def test_noise_and_single_processes_tell_nothing() -> None:
    noisy = shadow_cost_cpp.conclude(made({}, noise=2.0, seeds=2)).facts
    alone = shadow_cost_cpp.conclude(made({}, seeds=1)).facts
    for facts in (noisy, alone):
        assert set(facts["verdicts"].values()) == {"cannot be told"}
        assert "may or may not" in shadow_cost_cpp.headline(facts)


def test_the_order_of_rows_does_not_matter_and_that_of_programs_changes() -> None:
    rows = made({"late": 0.1})
    mixed = random.Random(0).sample(rows, len(rows))
    assert shadow_cost_cpp.conclude(mixed) == shadow_cost_cpp.conclude(rows)
    first = [row.cell["release"] for row in rows[::3]]
    assert set(first[:3]) == set(shadow_cost_cpp.WAYS)


def test_the_sources_figures_contradict_each_other() -> None:
    """The sums in the table of contradictions."""
    table = {row[0]: row[2] for row in shadow_cost_cpp.CONTRADICTIONS}
    assert 18_000 / (3_600 / 30) == 150
    assert f"{120 * 7} to {120 * 14:,} ms" in table["time of an epoch"]
    assert round(8 / 7, 2) == 1.14
    assert round(25 / 16, 1) == 1.6 and 24 / 16 == 1.5
    assert shadow_cost_cpp.conclude([]).tables[0].rows == shadow_cost_cpp.CONTRADICTIONS
