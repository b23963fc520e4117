"""Memory over depth, counted in bytes: nothing here depends on the machine."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import degenerate
import pytest
import torch

from gradtrace.experiments import memory
from gradtrace.experiments.harness.findings import Findings, Row
from gradtrace.experiments.harness.live_bytes import LiveBytes

SETTINGS = {
    "width": 6,
    "depths": [1, 4, 9],
    "batch": 5,
    "batches": [1, 5, 40],
    "functions": ["tanh", "relu", "gelu", "silu", "sigmoid"],
    "system": [8, 4, 4],
}


def here(name: str, cell: dict[str, Any]) -> dict[str, float]:
    """In this process, to save time; ``test_resident`` has the new process."""
    assert name == "gradtrace.experiments.memory:peaks"
    return memory.peaks(cell)


@pytest.fixture(scope="module")
def rows() -> Iterator[list[Row]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "apart", here)
        cells = memory.cells(SETTINGS, 1)
        yield [Row(cell, memory.measure(cell, lambda _: None)) for cell in cells]


@pytest.fixture(scope="module")
def findings(rows: list[Row]) -> Findings:
    return memory.conclude(rows)


def result(rows: list[Row], **wanted: object) -> dict[str, Any]:
    base = {"kind": "bytes", "batch": 5, "depth": 4, "function": "tanh", "checkpoint": False}
    (found,) = (r for r in rows if {**base, **wanted}.items() <= r.cell.items())
    return found.result


def test_cells_are_all_different() -> None:
    cells = memory.cells(SETTINGS, 2)
    assert cells == memory.cells(SETTINGS, 2)
    assert len({str(sorted(cell.items())) for cell in cells}) == len(cells)
    assert len(cells) == 2 * (2 * 3 + 2 + 4) + 2


@pytest.mark.parametrize(
    "fact",
    [
        "activations_by_hand",
        "activations_linear",
        "checkpointed_linear_in_parts",
        "gradients_are_the_models_size",
        "saved_are_activations",
        "trace_linear",
        "trace_with_checkpoints_is_the_same_in_all",
    ],
)
def test_facts(findings: Findings, fact: str) -> None:
    assert findings.facts[fact] is True


def test_activations_are_linear_in_depth_and_as_the_root_with_checkpoints(rows: list[Row]) -> None:
    unit = 5 * 6 * 4
    for root in (1, 2, 3):
        plain, parted = (result(rows, depth=root * root, checkpoint=c) for c in (False, True))
        assert plain["activations"] == root * root * unit + 4
        assert parted["activations"] == root * unit + 4
        assert parted["parts"] == root
    assert parted["held"] < plain["held"]


def test_checkpoints_do_not_change_gradients(findings: Findings) -> None:
    assert findings.facts["largest_difference"] < 1e-6


def test_what_functions_keep(rows: list[Row]) -> None:
    kept = {f: result(rows, function=f)["saved"] for f in SETTINGS["functions"]}  # type: ignore[attr-defined]
    assert kept["tanh"] == kept["relu"] == kept["sigmoid"]
    assert kept["gelu"] == kept["silu"] == 2 * kept["tanh"]


def test_additional_memory_grows_with_the_batch_and_has_gradients_in_it(rows: list[Row]) -> None:
    found = [result(rows, batch=batch) for batch in (1, 5, 40)]
    peaks = [r["peak_added"] / r["model"] for r in found]
    assert 1 < peaks[0] < peaks[1] < peaks[2]
    for r in found:
        assert r["peak"] >= r["gradients"] and r["peak_added"] >= r["activations"] + r["gradients"]


def test_a_byte_more_would_be_seen(rows: list[Row]) -> None:
    wrong = [Row(r.cell, {**r.result, "activations": r.result["activations"] + 1}) for r in rows]
    facts = memory.conclude(wrong).facts
    assert not facts["activations_by_hand"] and not facts["saved_are_activations"]
    assert facts["activations_linear"]
    bent = [
        Row(
            r.cell, {**r.result, "activations": r.cell["depth"] ** 2, "trace": r.cell["depth"] ** 2}
        )
        for r in rows
    ]
    facts = memory.conclude(bent).facts
    assert not facts["activations_linear"] and not facts["trace_linear"]


def test_rows_may_come_in_any_order(findings: Findings, rows: list[Row]) -> None:
    assert memory.conclude(random.Random(0).sample(rows, len(rows))) == findings


# Words -------------------------------------------------------------------------------------------


def told(rows: list[Row], ratio: float) -> str:
    """What is said of the rule, if training takes so many times the model."""
    changed = [Row(r.cell, {**r.result, "peak_added": ratio * r.result["model"]}) for r in rows]
    return memory.conclude(changed).sentence


def test_the_rule_holds_for_all_some_or_none(rows: list[Row], findings: Findings) -> None:
    assert "rule of 2 holds for all of them" in told(rows, 2.1)
    assert "rule of 2 holds for none of them" in told(rows, 9.0)
    assert "not less as the slides suggest" in findings.sentence
    assert "gelu keeps 2" in findings.sentence or "gelu keeps 1.9" in findings.sentence
    assert "checkpoints do not help it" in findings.sentence


def test_less_for_a_relu_would_be_said(rows: list[Row]) -> None:
    half = [
        Row(r.cell, {**r.result, "activations": 1}) if r.cell["function"] == "relu" else r
        for r in rows
    ]
    assert "cheaper to store, as the slides say" in memory.conclude(half).sentence


# The ledger --------------------------------------------------------------------------------------


def test_the_ledger_counts_storages_that_are_alive() -> None:
    x = torch.ones(8)
    with LiveBytes([x]) as ledger:
        assert ledger.now() == 0
        x.view(2, 4).t()  # a view of what is known
        assert ledger.now() == 0
        y = x + 1
        z = y[2:]
        assert ledger.now() == 32
        del y
        assert ledger.now() == 32  # z holds it
        del z
        assert ledger.now() == 0
    assert ledger.peak == 32


def test_the_ledger_tells_gradients_apart() -> None:
    x = torch.ones(8, requires_grad=True)
    with LiveBytes([x]) as ledger:
        (x * 3).sum().backward()
        torch.ones(1)
    assert x.grad is not None and ledger.now() == 32
    assert ledger.held == ledger.peak  # before the gradient was handed over


@degenerate.every
def test_degenerate_measurements_are_concluded_from(rows: list[Row], kind: str) -> None:
    degenerate.concludes(memory, rows, kind)
