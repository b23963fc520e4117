"""Influence over a data set: sums of single traces, resumed runs, and what is put back."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kills
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import gradtrace as gt
from gradtrace.errors import BadFile, GradtraceError, NoGraph, NotScalar, UnknownName
from gradtrace.files import read_lines
from gradtrace.table import Table
from gradtrace.tracing.influence import ordered
from gradtrace.training.state import seed_all, undisturbed

Made = tuple[nn.Module, Callable[..., Tensor], list[Tensor]]


def made(kind: str) -> Made:
    torch.manual_seed(0)
    model: Any = {
        "mlp": lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(0.4), nn.Linear(4, 2)),
        "convnet": lambda: nn.Sequential(nn.Conv1d(1, 2, 2), nn.BatchNorm1d(2), nn.ReLU()),
        "lstm": lambda: nn.LSTM(3, 4),
    }[kind]()
    shape = {"mlp": (4, 3), "convnet": (4, 1, 6), "lstm": (5, 2, 3)}[kind]

    def loss(model: Any, x: Tensor) -> Tensor:
        out = model(x)
        return (out[0] if kind == "lstm" else out).square().mean()  # type: ignore[no-any-return]

    return model, loss, [torch.randn(shape) for _ in range(6)]


def by_hand(model: nn.Module, loss_fn: Any, batches: list[Tensor], rule: str) -> list[Table]:
    """The tables of the batches, each with the draws that follow from its number."""
    tables = []
    for number, batch in enumerate(batches):
        with undisturbed(model):
            seed_all(1_000_003 * number)
            with gt.watch(model) as watch:
                loss = loss_fn(model, batch)
            tables.append(watch.trace(loss, rule=rule).influence())
    return tables


@pytest.mark.parametrize("rule", ["greedy", "viterbi"])
@pytest.mark.parametrize("kind", ["mlp", "convnet", "lstm"])
def test_the_table_is_the_sum_of_those_of_the_batches(kind: str, rule: str) -> None:
    model, loss, batches = made(kind)
    table = gt.influence(model, loss, batches, rule=rule)
    wanted = ordered(Table.total(by_hand(model, loss, batches, rule)))
    assert table.rows == wanted.rows and table.about["losses"] == len(batches)
    assert table.rows == gt.influence(model, loss, iter(batches), rule=rule).rows


class Sometimes(nn.Module):
    """A second branch is used where the first number of a batch is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.a, self.b = nn.Linear(2, 9), nn.Linear(9, 2), nn.Linear(9, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        out: Tensor = self.a(h) + self.b(h) if x[0, 0] > 0 else self.a(h)
        return out


def test_what_one_batch_has_in_series_others_choose() -> None:
    torch.manual_seed(0)
    batches = [torch.tensor([[sign, 1.0]]) for sign in (-1.0, 1.0, 1.0)]
    table = gt.influence(Sometimes(), lambda m, x: m(x).square().sum(), batches)
    assert 0.5 < table["a"].share < 1 and table["a"].choice == ""
    assert table.names[0] in "ab" and table.names[-1] == "first"


def test_decompose_is_the_sum_of_those_of_the_batches() -> None:
    model, loss, batches = made("convnet")
    tables = []
    for batch in batches:
        with undisturbed(model), gt.watch(model) as watch:
            tables.append(watch.trace(loss(model, batch)).decompose("modules"))
    assert gt.decompose(model, loss, batches).rows == Table.total(tables).rows


def test_each_sample_by_itself() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    batches = list(torch.randn(3, 4, 3))
    table = gt.influence(model, lambda m, x: m(x).square()[:, 0], batches, per_sample=True)
    single = [x[None] for batch in batches for x in batch]
    wanted = gt.influence(model, lambda m, x: m(x).square().sum(), single)
    assert table.about["losses"] == 12
    assert [table.shares, table.errors] == [wanted.shares, wanted.errors]


class Experts(nn.Module):
    """One of two layers, chosen by the input."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        self.out = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.experts[int(x[0, 0] > 0)](x)).sum()
        return out


def test_one_element_is_counted_over_the_losses_that_it_takes_part_in() -> None:
    batches = [-torch.ones(2, 2), torch.ones(2, 2), -torch.ones(2, 2)]
    ask: Any = {"loss_fn": lambda model, x: model(x), "loader": batches}
    table = gt.influence(Experts(), **ask, of="experts.0.bias", index=1)
    assert (table["out"].through, table["out"].eligible, table.about["losses"]) == (2, 2, 3)
    assert gt.influence(Experts(), **ask, of="experts.0")["out"].eligible == 2 * 6
    with pytest.raises(UnknownName, match=r"batch 0: no leaf 'expert\.0'"):
        gt.influence(Experts(), **ask, of="expert.0")
    with pytest.raises(GradtraceError, match="takes part in any loss"):
        gt.influence(Experts(), ask["loss_fn"], batches[:1], of="experts.1")


# What is put back --------------------------------------------------------------------------------


def test_nothing_is_disturbed() -> None:
    model, _, batches = made("convnet")
    torch.autograd.backward(model(batches[0]).sum())
    model[1].eval()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    draws, python = torch.get_rng_state(), random.getstate()
    seen = list[Tensor]()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        seen.append(batch[0])
        model.train(not model.training)
        return model(batch[0]).mean() + random.random() + torch.rand(())

    loader = DataLoader(TensorDataset(torch.stack(batches)), None, shuffle=True)
    with torch.no_grad():
        first = gt.influence(model, loss, loader)
    assert first.rows == gt.influence(model, loss, loader).rows  # shuffled in the same way
    assert all(torch.equal(a, b) for a, b in zip(seen[:6], seen[6:]))
    assert torch.equal(torch.get_rng_state(), draws) and random.getstate() == python
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert [m.training for m in model] == [True, False, True]
    assert all(torch.equal(a, p.grad) for a, p in zip(grads, model.parameters()))


# Journals ----------------------------------------------------------------------------------------


def stopping(batches: list[Tensor], after: int) -> Iterator[Tensor]:
    yield from batches[:after]
    raise KeyboardInterrupt


def test_ctrl_c_gives_the_table_so_far_and_the_journal_goes_on(tmp_path: Path) -> None:
    model, loss, batches = made("mlp")
    whole = gt.influence(model, loss, batches)
    file = tmp_path / "run"
    part = gt.influence(model, loss, stopping(batches, 2), journal=file)
    assert part.about["interrupted"] and part.about["losses"] == 2
    assert "2 batches were counted" in part.notes[-1]
    calls = list[int]()

    def counted(model: Any, x: Tensor) -> Tensor:
        calls.append(1)
        return loss(model, x)

    with open(f"{file}.rank0", "ab") as opened:
        opened.write(b'{"batch": 2, "tab')  # a line that was being written
    assert gt.influence(model, counted, batches, journal=file) == whole
    assert len(calls) == 4
    assert gt.influence(model, counted, batches, journal=file) == whole and len(calls) == 4
    assert len(read_lines(f"{file}.rank0")) == 6
    with pytest.raises(KeyboardInterrupt):
        gt.influence(model, loss, stopping(batches, 0))


def test_another_run_is_refused_and_the_journal_left(tmp_path: Path) -> None:
    model, loss, batches = made("mlp")
    ask: dict[str, Any] = {"journal": tmp_path / "run", "key": "a"}
    gt.influence(model, loss, batches, **ask)
    kept = (tmp_path / "run.rank0").read_bytes()
    for other in ({"key": "b"}, {"rule": "edge"}, {"seed": 1}, {"by": "layers"}, {"of": "0"}):
        with pytest.raises(BadFile, match=r"run\.rank0' is of other weights, settings or"):
            gt.influence(model, loss, batches, **{**ask, **other})
    for change in (lambda: model.eval(), lambda: model[0].weight.data.mul_(2)):
        change()
        with pytest.raises(BadFile, match="other weights"):
            gt.influence(model, loss, batches, **ask)
        model.train()
    model[0].weight.data.div_(2)
    with pytest.raises(BadFile, match="first batch is another"):
        gt.influence(model, loss, batches[::-1], **ask)
    assert (tmp_path / "run.rank0").read_bytes() == kept
    (tmp_path / "run.rank0").write_text('{"epoch": 1}\n')
    with pytest.raises(BadFile, match="or no journal"):
        gt.influence(model, loss, batches, **ask)


def test_a_killed_run_goes_on_to_the_same_table(tmp_path: Path) -> None:
    """``python tests/kills.py`` does it ten times, and on two processes."""
    (tmp_path / "whole").mkdir()
    wanted = kills.measured(tmp_path / "whole")
    assert kills.killed(tmp_path, 1, 0.2) < kills.BATCHES
    assert kills.measured(tmp_path) == wanted


# Errors ------------------------------------------------------------------------------------------

LINEAR = nn.Linear(2, 1)
BATCH = {"x": torch.ones(3, 2)}
ERRORS: dict[str, tuple[type[Exception], str, Callable[[], Any]]] = {
    "no batch": (GradtraceError, "no batch", lambda: ask(lambda m, x: m(x), [])),
    "no loader": (GradtraceError, "a int does not", lambda: ask(lambda m, x: m(x), 3)),
    "what loss_fn cannot take": (
        GradtraceError,
        r"batch 1, a dict of {'x': \(3, 2\)}: KeyError: 'y'",
        lambda: ask(lambda m, batch: m(batch["y"]).sum(), [{"y": BATCH["x"]}, BATCH]),
    ),
    "arguments": (
        GradtraceError,
        r"batch 0, a Tensor of \(3, 2\): TypeError",
        lambda: ask(lambda m: m, [BATCH["x"]]),
    ),
    "no loss": (GradtraceError, "returned a NoneType", lambda: ask(lambda m, x: None, [BATCH])),
    "no graph": (NoGraph, "batch 0: ", lambda: ask(lambda m, x: torch.ones(()), [BATCH])),
    "a vector": (
        NotScalar,
        r"shape \(3, 1\); return one loss .* per_sample=True",
        lambda: ask(lambda m, x: m(x["x"]), [BATCH]),
    ),
    "no vector": (
        NotScalar,
        r"shape \(\); return a vector",
        lambda: ask(lambda m, x: m(x["x"]).sum(), [BATCH], per_sample=True),
    ),
    "no folder": (
        BadFile,
        "cannot be written",
        lambda: ask(lambda m, x: m(x["x"]).sum(), [BATCH], journal="/no/such/folder/run"),
    ),
}


def ask(loss_fn: Any, loader: Any, **options: Any) -> Table:
    return gt.influence(LINEAR, loss_fn, loader, **options)


@pytest.mark.parametrize("name", ERRORS)
def test_errors_say_what_where_and_what_to_do(name: str) -> None:
    kind, text, call = ERRORS[name]
    with pytest.raises(kind, match=text):
        call()


def test_progress_is_shown_on_stderr_alone(capsys: pytest.CaptureFixture[str]) -> None:
    ask(lambda m, x: m(x["x"]).sum(), [BATCH] * 3, progress=True)
    assert capsys.readouterr().out == ""
    ask(lambda m, x: m(x["x"]).sum(), [BATCH] * 3)
    assert capsys.readouterr().err == ""
