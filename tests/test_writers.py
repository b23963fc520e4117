"""Writers: few curves, of real choices, in whatever log there is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradtrace as gt
from gradtrace.training.writers import MOST_SHARES, PREFIX, curves, plain


class Skip(nn.Module):
    """Two ways: through a layer, and around it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.into, self.mix = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.into(x)
        return h + self.mix(h)  # type: ignore[no-any-return]


def run(writer: Any, **how: Any) -> gt.Monitor:
    model = Skip()
    with gt.Monitor(model, every=2, writers=[writer], **how) as monitor:
        for _ in range(4):
            out = model(torch.ones(3, 4))
            terms = {"size": out.square().mean(), "sign": 0.1 * out.sum()}
            loss = terms["size"] + terms["sign"]
            monitor.step(loss, terms=terms)
            loss.backward()
    return monitor


class Heard:
    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []

    def put(self, step: int, values: Mapping[str, float]) -> None:
        self.rows.append((step, dict(values)))


class Scalars(Heard):
    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.put(step, {name: value})


class Log(Heard):
    def log(self, values: Mapping[str, float], step: int) -> None:
        self.put(step, values)


class Metrics(Heard):
    def log_metrics(self, values: Mapping[str, float], step: int) -> None:
        self.put(step, values)


@pytest.mark.parametrize("kind", [Scalars, Log, Metrics, None])
def test_every_kind_of_writer_gets_the_same(kind: type[Any] | None) -> None:
    heard = Heard() if kind is None else kind()
    monitor = run(heard.put if kind is None else heard)
    values: dict[int, dict[str, float]] = {}
    for step, each in heard.rows:
        values.setdefault(step, {}).update(each)
    assert values.keys() == {0, 2}
    found = {name for name in values[0] if "mean" not in name}  # the fork of the two terms
    assert found == {
        *(PREFIX + each for each in ("loss", "cost", "term/size", "term/sign")),
        *(PREFIX + each for each in ("cosine/size_sign", "fork/add_mix/mix", "fork/add_mix/skip")),
    }
    row = monitor.history.rows[1]
    assert values[2][f"{PREFIX}loss"] == row.loss
    assert values[2][f"{PREFIX}fork/add_mix/mix"] == row["fork add (mix)/mix"]


def test_named_parts_are_curves() -> None:
    heard = Log()
    run(heard, by={"mine": ["mix"], "all": ["into", "mix"]})
    assert f"{PREFIX}share/mine" in heard.rows[0][1]
    assert f"{PREFIX}share/all" not in heard.rows[0][1]  # 1 by definition


def test_a_writer_that_fails_is_told_once() -> None:
    class Fails:
        def log(self, values: Mapping[str, float], step: int) -> None:
            raise OSError("no network")

    with pytest.warns(UserWarning, match="Fails did not take .*: no network") as told:
        monitor = run(Fails())
    assert len(told) == 1 and len(monitor.history) == 2


def test_curves_are_few_and_their_names_plain() -> None:
    shares = {f"share layer {n}": 0.5 for n in range(100)}
    found = curves({"step": 0, "loss": float("nan"), **shares})
    assert len(found) == MOST_SHARES and plain("share a b/<c>") == "share/a_b/c"


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path) as writer:  # type: ignore[no-untyped-call]
        monitor = run(writer)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    found = [(each.step, each.value) for each in events.Scalars(f"{PREFIX}loss")]
    assert [step for step, _ in found] == [0, 2]
    assert [value for _, value in found] == pytest.approx(monitor.history.column("loss"))
