"""``gt.influence`` over a data set: batches, pairs, interruptions, resuming, errors."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import gradtrace as gt
from gradtrace.distributed import dataset_influence
from gradtrace.distributed.checkpoint import CheckpointFiles, PartialResult
from gradtrace.distributed.identity import identity
from gradtrace.errors import GradtraceError
from gradtrace.tracing.influence import Influence

Batch = tuple[Tensor, Tensor]


def model() -> nn.Module:
    torch.manual_seed(4)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(3, 4)
            self.left = nn.Linear(4, 4)
            self.right = nn.Linear(4, 4)
            self.out = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.first(x))
            return self.out(torch.tanh(self.left(x)) + torch.tanh(self.right(x)))

    return Model().double()


def losses(net: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(net(batch[0]), batch[1], reduction="none")


def batches(n: int = 5, size: int = 3) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(size, 3, generator=generator, dtype=torch.float64),
            torch.randint(0, 2, (size,), generator=generator),
        )
        for _ in range(n)
    ]


def direct(net: nn.Module, some: list[Batch], **options: Any) -> Influence:
    found = []
    for batch in some:
        with gt.watch(net) as watch:
            loss = losses(net, batch)
        found.append(watch.trace(loss).influence(**options))
    return found[0].merge(*found[1:])


def test_it_is_the_merge_of_the_batches() -> None:
    net = model()
    table = gt.influence(net, losses, batches())
    assert table == direct(net, batches())
    assert table.pairs == 15
    assert not table.interrupted
    assert set(table.shares) == {"first", "left", "right", "out"}
    assert sum(table.shares[name] for name in ("left", "right")) == pytest.approx(1)
    assert 0 < table.by("gradient").errors["left"] < 0.2


def test_it_does_not_depend_on_how_samples_are_batched() -> None:
    net = model()
    xs, ys = (torch.cat(parts) for parts in zip(*batches()))
    tables = [
        gt.influence(net, losses, DataLoader(TensorDataset(xs, ys), batch_size=size))
        for size in (1, 4, 15)
    ]
    for table in tables[1:]:
        assert [row.count for row in table] == [row.count for row in tables[0]]
        assert table.pairs == 15


def test_the_options_of_a_trace_are_passed_on() -> None:
    net = model()
    table = gt.influence(
        net, losses, batches(2), components=["left", "right"], weight="gradient", rule="viterbi"
    )
    assert (table.weight, table.rule) == ("gradient", "viterbi")
    assert set(table.shares) == {"left", "right"}
    coarse = gt.influence(net, losses, batches(2), granularity="operator")
    assert coarse == gt.influence(net, losses, batches(2), granularity="operator")
    assert coarse != gt.influence(net, losses, batches(2))


def test_nothing_is_left_behind() -> None:
    net = model().eval()
    before = {name: p.clone() for name, p in net.named_parameters()}
    gt.influence(net, losses, batches(2))
    assert not net.training
    for name, parameter in net.named_parameters():
        assert parameter.grad is None
        assert torch.equal(parameter, before[name])


# Interrupted, resumed ----------------------------------------------------------------------------


class Stops:
    """Batches, and Ctrl-C before one of them."""

    def __init__(self, some: list[Batch], at: int) -> None:
        self.some, self.at = some, at

    def __iter__(self) -> Iterator[Batch]:
        for n, batch in enumerate(self.some):
            if n == self.at:
                # Jobs in the background are started with Ctrl-C ignored.
                before = signal.signal(signal.SIGINT, signal.default_int_handler)
                try:
                    signal.raise_signal(signal.SIGINT)
                finally:
                    signal.signal(signal.SIGINT, before)
            yield batch


def test_ctrl_c_keeps_what_was_counted(capsys: pytest.CaptureFixture[str]) -> None:
    net = model()
    table = gt.influence(net, losses, Stops(batches(), 3))
    assert table.interrupted
    assert table.pairs == 9
    assert [row.count for row in table] == [row.count for row in direct(net, batches()[:3])]
    assert "9 losses counted" in capsys.readouterr().err


def test_ctrl_c_before_anything_was_counted_is_an_interrupt() -> None:
    with pytest.raises(KeyboardInterrupt):
        gt.influence(model(), losses, Stops(batches(), 0))


@pytest.mark.parametrize("at", [1, 3, 4])
def test_a_run_goes_on_where_it_was_stopped(tmp_path: Path, at: int) -> None:
    net, file = model(), tmp_path / "run.gradtrace"
    seen: list[int] = []

    def counting(net: nn.Module, batch: Batch) -> Tensor:
        seen.append(1)
        return losses(net, batch)

    first = gt.influence(net, counting, Stops(batches(), at), checkpoint=file)
    assert first.interrupted
    seen.clear()
    table = gt.influence(net, counting, batches(), checkpoint=file)
    assert len(seen) == 5 - at
    assert table == direct(net, batches())
    again = gt.influence(net, counting, batches(), checkpoint=file)
    assert again == table
    assert len(seen) == 5 - at


def test_an_error_in_a_batch_names_it_and_loses_nothing(tmp_path: Path) -> None:
    net, file = model(), tmp_path / "run.gradtrace"
    some = batches()
    some[3][0][0, 0] = float("nan")
    with pytest.raises(gt.errors.NonFinite, match="batch 3"):
        gt.influence(net, losses, some, checkpoint=file)
    table = gt.influence(net, losses, batches(), checkpoint=file)
    assert table == direct(net, batches())


def test_another_question_does_not_go_on_in_the_same_file(tmp_path: Path) -> None:
    net, file = model(), tmp_path / "run.gradtrace"
    gt.influence(net, losses, batches(1), checkpoint=file)
    with pytest.raises(GradtraceError, match="another rule"):
        gt.influence(net, losses, batches(1), checkpoint=file, rule="viterbi")
    with pytest.raises(GradtraceError, match="another components"):
        gt.influence(net, losses, batches(1), checkpoint=file, components=["left"])
    with pytest.raises(GradtraceError, match="another coverage"):
        gt.influence(net, losses, batches(), checkpoint=file, coverage=False)
    other = tmp_path / "other.gradtrace"
    gt.influence(net, losses, batches(1), checkpoint=other, coverage=False)
    with pytest.raises(GradtraceError, match="another coverage"):
        gt.influence(net, losses, batches(), checkpoint=other)


# Errors ------------------------------------------------------------------------------------------


def test_an_empty_loader() -> None:
    with pytest.raises(GradtraceError, match="no batch"):
        gt.influence(model(), losses, [])


def test_a_loss_that_is_no_tensor() -> None:
    with pytest.raises(GradtraceError, match="batch 0: loss_fn returned a float"):
        gt.influence(model(), lambda net, batch: 1.0, batches(1))  # type: ignore[arg-type, return-value]


def test_a_loss_without_a_graph() -> None:
    def detached(net: nn.Module, batch: Batch) -> Tensor:
        return losses(net, batch).detach()

    with pytest.raises(gt.errors.NoGraph, match="batch 0"):
        gt.influence(model(), detached, batches(1))


def test_the_progress_bar_is_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    gt.influence(model(), losses, batches(2), progress=True)
    shown = capsys.readouterr()
    assert "2/2" in shown.err
    assert not shown.out
    gt.influence(model(), losses, iter(batches(2)), progress=True)
    assert "tracing" in capsys.readouterr().err
    gt.influence(model(), losses, batches(2))
    assert not capsys.readouterr().err
    assert dataset_influence.bar is not None


def test_a_loss_fn_that_takes_something_else_is_told_what_it_gets() -> None:
    model = nn.Linear(2, 1)

    def of_the_output(output: Tensor) -> Tensor:
        return output.mean()

    wanted = (
        r"batch 0: loss_fn is called as loss_fn\(model, batch\), and does not take that: too many"
    )
    with pytest.raises(GradtraceError, match=wanted):
        gt.influence(model, of_the_output, [torch.ones(3, 2)])  # type: ignore[arg-type]


# A file that cannot be written -------------------------------------------------------------------


def vanishing(folder: Path, at: int, comes_back: int = 0) -> Iterator[Batch]:
    """Batches, and the folder of the checkpoint is removed before one of them."""
    for n, batch in enumerate(batches()):
        if n == at:
            shutil.rmtree(folder)
        if n == comes_back > at:
            folder.mkdir()
        yield batch


@pytest.mark.parametrize("kind", ["influence", "decompose"])
@pytest.mark.parametrize("at", [1, 4])
def test_a_folder_that_is_removed_loses_nothing(tmp_path: Path, kind: str, at: int) -> None:
    net, folder = model(), tmp_path / "scratch"
    folder.mkdir()
    call = getattr(gt, kind)
    with pytest.warns(UserWarning, match=r"run\.gradtrace.*its result will be returned") as told:
        table = call(net, losses, vanishing(folder, at), checkpoint=folder / "run.gradtrace")
    assert len(told) == 1 and told[0].filename == __file__
    wanted = call(net, losses, batches())
    assert table.pairs == 15 and table.shares == wanted.shares and not table.interrupted


def test_ctrl_c_after_the_folder_was_removed_returns_what_was_counted(tmp_path: Path) -> None:
    net, folder = model(), tmp_path / "scratch"
    folder.mkdir()

    def stops() -> Iterator[Batch]:
        yield from itertools.islice(vanishing(folder, 1), 3)
        yield from Stops(batches(), 0)

    with pytest.warns(UserWarning, match="its result will be returned"):
        table = gt.influence(net, losses, stops(), checkpoint=folder / "run.gradtrace")
    assert table.interrupted and table.pairs == 9


def test_a_folder_that_comes_back_is_written_to(tmp_path: Path) -> None:
    net, file = model(), tmp_path / "scratch" / "run.gradtrace"
    file.parent.mkdir()
    with pytest.warns(UserWarning, match="its result will be returned"):
        table = gt.influence(net, losses, vanishing(file.parent, 1, 3), checkpoint=file)
    assert gt.influence(net, losses, batches(), checkpoint=file) == table


def test_a_folder_that_never_was_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(GradtraceError, match=r"nowhere.run\.gradtrace"):
        gt.influence(model(), losses, batches(), checkpoint=tmp_path / "nowhere" / "run.gradtrace")


def test_a_folder_that_cannot_be_listed_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(self: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))

    monkeypatch.setattr(Path, "iterdir", denied)
    with pytest.raises(GradtraceError, match=r"cannot be read \(Permission denied"):
        CheckpointFiles(tmp_path / "journal", {}, 0, 2).parts()


def test_parts_of_ranks_stay_where_the_whole_cannot_be_written(tmp_path: Path) -> None:
    file = tmp_path / "run.gradtrace"
    files = CheckpointFiles(file, {}, 0, 2)
    files.identity = identity(model(), losses)[0]
    files.keep(PartialResult(draws="01"))
    file.mkdir()
    with pytest.warns(UserWarning, match="its result will be returned"):
        assert not files.close(PartialResult(draws="01"))
    assert files.own is not None and files.own.exists()
    file.rmdir()
    assert files.close(PartialResult(draws="01")) and not files.own.exists()
