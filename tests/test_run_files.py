"""A run whose file others touch, and programs that end in unusual ways: training goes on."""

from __future__ import annotations

import errno
import os
import shutil
import textwrap
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import fresh
import pytest
import torch
from gradtrace.runs import history
from gradtrace.runs.history import History
from torch import Tensor, nn

import gradtrace as gt
from gradtrace.errors import GradtraceError, caution
from gradtrace.io import jsonl
from gradtrace.io.atomic_files import BadFile
from gradtrace.training import gathering

STEPS = 6


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


def loss_of(model: nn.Module) -> Tensor:
    return model(torch.ones(3, 4)).square().mean()  # type: ignore[no-any-return]


def trained(file: Path, touch: Callable[[Path], object], **more: object) -> tuple[History, Path]:
    """A run whose file is touched after the third step: its history in the end, and its file."""
    model = net()
    options = {"every": 1, "budget": None, "view": False, **more}
    with gt.Monitor(model, file=file, **options) as monitor:  # type: ignore[arg-type]
        for step in range(STEPS):
            monitor.step(loss_of(model))
            if step == 2:
                touch(file)
    assert monitor._gathering is not None and monitor._gathering.writer.path is not None
    return monitor.history, monitor._gathering.writer.path


def delete_folder(file: Path) -> None:
    shutil.rmtree(file.parent)


def move(file: Path) -> None:
    file.rename(file.with_suffix(".old"))


def replace(file: Path) -> None:
    file.unlink()
    file.write_text("something else\n")


def save_again(file: Path) -> None:
    """As editors do: a copy takes the place."""
    copy = file.with_suffix(".tmp")
    shutil.copy(file, copy)
    os.replace(copy, file)


def empty(file: Path) -> None:
    file.write_bytes(b"")


def cut(file: Path) -> None:
    with open(file, "r+b") as held:
        held.truncate(file.stat().st_size - 30)


def cut_header(file: Path) -> None:
    with open(file, "r+b") as held:
        held.truncate(20)


def add(file: Path) -> None:
    with open(file, "ab") as held:
        held.write(b"not one of its li")


TOUCHED: dict[str, tuple[Callable[[Path], None], str, tuple[int, ...]]] = {
    "deleted": (Path.unlink, "was deleted", tuple(range(STEPS))),
    "folder deleted": (delete_folder, "was deleted", tuple(range(STEPS))),
    "moved away": (move, "was deleted", tuple(range(STEPS))),
    "replaced": (replace, "was replaced by another file", tuple(range(STEPS))),
    "saved again": (save_again, "", tuple(range(STEPS))),
    "emptied": (empty, "was cut short", (3, 4, 5)),
    "cut in a line": (cut, "was cut short", (0, 1, 2, 3, 4, 5)),  # the times of steps are lost
    "cut in the header": (cut_header, "was cut short", (3, 4, 5)),
    "added to": (add, "", tuple(range(STEPS))),
}


@pytest.mark.parametrize("what", TOUCHED)
def test_a_file_that_others_touch(tmp_path: Path, what: str) -> None:
    touch, told, steps = TOUCHED[what]
    file = tmp_path / "scratch" / "run.jsonl"
    file.parent.mkdir()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found, path = trained(file, touch)
    assert [told in str(each.message) for each in said] == [True] * bool(told)
    assert found.steps == steps and not found.running
    assert history.read(path).steps == steps
    assert path.exists() and (path == file) == (what != "replaced")
    if what == "replaced":
        assert file.read_text() == "something else\n" and path.name == "run-2.jsonl"
    _, again = trained(path, lambda file: None)  # it can be gone on with
    assert history.read(again).steps == (*steps, *range(STEPS, 2 * STEPS))


def test_warnings_as_errors_do_not_end_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found, _ = trained(tmp_path / "run.jsonl", Path.unlink, report=tmp_path / "no" / "x.html")
        caution("a word")
    assert found.steps == tuple(range(STEPS))
    told = capsys.readouterr().err
    assert "was deleted while the run goes on" in told and "the report was not written" in told
    assert "gradtrace: a word" in told


def test_a_deleted_file_does_not_lose_the_report(tmp_path: Path) -> None:
    page = tmp_path / "run.html"
    with pytest.warns(UserWarning, match="was deleted"):
        trained(tmp_path / "run.jsonl", Path.unlink, report=page)
    assert page.stat().st_size > 1000


@pytest.fixture
def unsearchable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder whose files nobody may look at; root may, so this is simulated."""
    folder, real = tmp_path / "closed", os.stat
    folder.mkdir()

    def stat(path: object, *args: object, **options: object) -> os.stat_result:
        if isinstance(path, (str, os.PathLike)) and str(folder) + os.sep in os.fspath(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path, *args, **options)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(os, "stat", stat)
    return folder


def test_a_page_in_a_folder_that_may_not_be_searched_does_not_end_the_program(
    unsearchable: Path, tmp_path: Path
) -> None:
    file = tmp_path / "run.jsonl"
    with pytest.warns(UserWarning, match=r"report was not written.*Permission denied"):
        found, _ = trained(file, lambda _: None, report=unsearchable / "page.html")
    assert found.steps == history.read(file).steps == tuple(range(STEPS))


@pytest.mark.parametrize("measure", [gt.influence, gt.decompose])
def test_a_journal_in_a_folder_that_may_not_be_searched_is_refused(
    unsearchable: Path, measure: Callable[..., object]
) -> None:
    def losses(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().mean(1)  # type: ignore[no-any-return]

    with pytest.raises(BadFile, match=r"journal' .*Permission denied"):
        measure(net(), losses, [torch.ones(3, 4)], checkpoint=unsearchable / "journal")


def test_deleted_after_the_end(tmp_path: Path) -> None:
    model, file = net(), tmp_path / "run.jsonl"
    with gt.Monitor(model, file=file) as monitor:
        monitor.step(loss_of(model))
    file.unlink()
    with pytest.raises(GradtraceError, match=r"run\.jsonl"):
        monitor.history  # noqa: B018
    monitor.close()


def test_an_error_within_ends_the_run_only(tmp_path: Path) -> None:
    for error in (KeyboardInterrupt, SystemExit, ValueError):
        file = tmp_path / f"{error.__name__}.jsonl"
        with pytest.raises(error):
            trained(file, lambda _: (_ for _ in ()).throw(error()))  # noqa: B023
        found = history.read(file)
        assert found.steps == (0, 1, 2) and error.__name__ in found.notes[-1]


def fill(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the disk is full."""

    def append(file: object, text: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(jsonl, "append", append)


@contextmanager
def told_of_a_full_disk() -> Iterator[None]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        yield
    first, second = (str(each.message) for each in said)
    assert "cannot write to" in first and "(No space left on device): training goes on" in first
    assert "lines of" in second and "are not written (No space left on device)" in second


def filled_at_the_end(path: Path, monkeypatch: pytest.MonkeyPatch) -> gt.Monitor:
    """A Monitor that was closed while its disk was full; of six steps the file holds three."""
    model = net()
    with told_of_a_full_disk(), gt.Monitor(model, every=1, budget=None, file=path) as monitor:
        for step in range(STEPS):
            monitor.step(loss_of(model))
            if step == 2:
                fill(monkeypatch)
    assert history.read(path).steps == (0, 1, 2)
    return monitor


def test_a_disk_that_is_full_to_the_end_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.jsonl"
    monitor = filled_at_the_end(path, monkeypatch)
    assert "6 of 6 steps are traced" in capsys.readouterr().err
    assert monitor.history.steps == tuple(range(STEPS)) and not monitor.history.running
    monitor.report(tmp_path / "page.html")
    monkeypatch.undo()  # there is room again
    assert monitor.history.steps == history.read(path).steps == tuple(range(STEPS))
    assert not history.read(path).running and not gathering.LINGERING


def test_what_a_full_disk_has_not_taken_is_written_at_the_end_of_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.jsonl"
    filled_at_the_end(path, monkeypatch)
    monkeypatch.undo()
    gathering.end_all(0)
    assert history.read(path).steps == tuple(range(STEPS)) and not gathering.LINGERING


@pytest.mark.parametrize("room", [True, False])
def test_another_run_takes_over_a_file_that_was_left_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: bool
) -> None:
    path = tmp_path / "run.jsonl"
    monitor = filled_at_the_end(path, monkeypatch)
    if room:
        monkeypatch.undo()
        trained(path, lambda file: None)
        assert history.read(path).steps == tuple(range(2 * STEPS))
    else:
        with told_of_a_full_disk():
            trained(path, lambda file: None)
        assert monitor.history.steps == tuple(range(STEPS))
    gathering.release(path)
    assert not gathering.LINGERING


def test_an_interrupted_write_is_completed_by_the_next(tmp_path: Path) -> None:
    model, file = net(), tmp_path / "run.jsonl"
    with gt.Monitor(model, every=1, budget=None, file=file, view=False) as monitor:
        monitor.step(loss_of(model))
        assert monitor._gathering is not None
        writer = monitor._gathering.writer
        whole, calls = writer._file.file, []

        class Interrupted:
            def write(self, data: bytes) -> int:
                if not calls:
                    calls.append(1)
                    whole.write(data[:40])
                    raise KeyboardInterrupt
                return int(whole.write(data))

            def fileno(self) -> int:
                return int(whole.fileno())

            def close(self) -> None:
                whole.close()

        writer._file.file = Interrupted()  # type: ignore[assignment]
        with pytest.raises(KeyboardInterrupt):
            monitor.step(loss_of(model))
        monitor.step(loss_of(model))
    found = history.read(file)
    assert found.steps == (0, 1) and not found.running and not found.notes


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_leaves_the_file_alone(tmp_path: Path) -> None:
    script = """
        import os, sys, torch, gradtrace as gt
        model = torch.nn.Linear(2, 1)
        monitor = gt.Monitor(model, every=1, budget=None, file=sys.argv[1], view=False)
        monitor.step(model(torch.ones(1, 2)).sum())
        if os.fork() == 0:
            monitor.step(model(torch.ones(1, 2)).sum())
            sys.exit()  # which closes what is open
        os.wait()
        monitor.step(model(torch.ones(1, 2)).sum())
        # The program ends without a close.
    """
    words = ("-W", "ignore", "-c", textwrap.dedent(script), str(tmp_path / "run.jsonl"))
    fresh.python(*words, check=True)
    found = history.read(tmp_path / "run.jsonl")
    assert found.steps == (0, 1) and not found.running and not found.notes
    lines = (tmp_path / "run.jsonl").read_text().splitlines()
    assert sum('"kind":"end"' in line for line in lines) == 1


# What is over budget ------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_steps_over_budget_are_told_and_counted(tmp_path: Path) -> None:
    """Traces take 30 s, steps 1 s: 1% pays for one in 3,000, and every=20 asks for fifty."""
    clock, model, file = Clock(), net(), tmp_path / "run.jsonl"
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with gt.Monitor(model, every=20, file=file, clock=clock, view=False) as monitor:
            look = monitor._tracer.measured

            def slow(*args: object) -> object:
                clock.now += 30
                return look(*args)  # type: ignore[arg-type]

            monitor._tracer.measured = slow  # type: ignore[method-assign, assignment]
            for step in range(200):
                clock.now += 1
                monitor.step(loss_of(model))
                if step == 70:
                    assert monitor.history.skipped == 3
    (one,) = said
    assert "step 20 was due (every=20)" in str(one.message)
    assert "about one in 3,000 is affordable" in str(one.message)
    assert "budget=None traces every 20 steps" in str(one.message)
    found = history.read(file)
    assert found.steps == (0,) and found.skipped == 9
    assert "9 steps that were due (every=20) were not traced" in found.notes[-1]
    assert found.cost == pytest.approx(30 / 199) == monitor.cost.share
    assert str(monitor.cost) == "1 trace took 30 s, 15.1% of training time"


def test_what_can_be_afforded_is_not_told_of() -> None:
    clock, model = Clock(), net()
    with gt.Monitor(model, every=5, clock=clock, view=False) as monitor:
        for _ in range(20):
            clock.now += 1
            monitor.step(loss_of(model))
    assert monitor.history.skipped == 0 and monitor.history.steps == (0, 5, 10, 15)


def test_no_time_is_no_share() -> None:
    """Not an infinite one."""
    model, clock = net(), Clock()
    with gt.Monitor(model, clock=clock) as monitor:
        monitor.step(loss_of(model))
        assert "training time" not in str(monitor.cost)
    assert monitor.history.cost != monitor.history.cost  # NaN
