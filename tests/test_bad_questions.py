"""What a user may get wrong, and the one sentence that each gets: what, where, what to do.

``tests/test_bad_input.py`` has what may be wrong with a graph; here are models, losses, loaders,
files and names, by the public calls.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradtrace as gt
from gradtrace.errors import GradtraceError
from gradtrace.table import Column, Table


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enc, self.head, self.spare = nn.Linear(3, 4), nn.Linear(4, 1), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.enc(x).tanh())


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = model(x).square().mean()
    return found


X = torch.linspace(-1, 1, 12).reshape(4, 3)


def watched(make: Callable[[nn.Module], Tensor], model: nn.Module | None = None) -> Any:
    model = model or Net()
    with gt.watch(model) as watch:
        loss = make(model)
    return watch, loss


def traced(make: Callable[[nn.Module], Tensor], model: nn.Module | None = None) -> Any:
    watch, loss = watched(make, model)
    return watch.trace(loss)


def frozen() -> nn.Module:
    return Net().requires_grad_(False)


def freed() -> Any:
    watch, loss = watched(lambda model: loss_fn(model, X))
    loss.backward()
    return watch.trace(loss)


def detached(model: nn.Module) -> Tensor:
    return loss_fn(model, X).detach()


def never_called() -> None:
    model = Net()
    with gt.ablate(model, "spare"):
        loss_fn(model, X)


LOSSES: dict[str, tuple[Callable[[], object], str]] = {
    "no graph": (lambda: traced(detached), "no graph.*|.*grad_fn"),
    "not scalar": (lambda: traced(lambda m: m(X)), r"shape \(4, 1\)"),
    "freed": (freed, "freed.*retain_graph=True"),
    "complex": (
        lambda: traced(lambda m: m(X).to(torch.complex64).sum()),
        "complex.*real",
    ),
    "a number": (
        lambda: traced(lambda m: loss_fn(m, X).item()),
        "float.*tensor|not a tensor|got float",
    ),  # type: ignore[arg-type, return-value]
    "nothing is trained": (
        lambda: traced(lambda m: loss_fn(m, X), frozen()),
        "requires_grad|require",
    ),
    "nan": (
        lambda: traced(lambda m: loss_fn(m, X * float("nan"))),
        "(?s)nan.*",
    ),
    "no module": (lambda: gt.watch(lambda x: x), "watch takes a torch.nn.Module"),  # type: ignore[arg-type, return-value]
    "unknown component": (
        lambda: traced(lambda m: loss_fn(m, X)).influence("haed"),
        "'haed'.*did you mean.*head",
    ),
    "unknown parameter": (
        lambda: traced(lambda m: loss_fn(m, X)).influence(of="enc.wieght"),
        "did you mean.*enc.weight",
    ),
    "unknown rule": (
        lambda: gt.trace(loss_fn(Net(), X), rule="gredy"),
        "'gredy'; did you mean 'greedy'",
    ),
    "wrong order": (
        lambda: gt.check(lambda: loss_fn(Net(), X), Net()),  # type: ignore[arg-type]
        "model, loss_fn",
    ),
    "ablate: unknown": (lambda: gt.ablate(Net(), "hed").__enter__(), "'hed'.*did you mean.*head"),
    "ablate: never called": (never_called, "spare.*never called"),
    "loader: empty": (lambda: gt.influence(Net(), loss_fn, []), "no batch|empty"),
    "loader: wrong batches": (
        lambda: gt.influence(Net(), loss_fn, [X, {"x": X}]),
        "(?s)batch 1.*dict",
    ),
    "loader: not iterable": (lambda: gt.influence(Net(), loss_fn, 3), "int.*batches|loader"),  # type: ignore[arg-type]
    "loader: no loss": (
        lambda: gt.influence(Net(), lambda m, x: 3.0, [X]),  # type: ignore[arg-type, return-value]
        "(?s)batch 0.*float",
    ),
    "diagnose: no loss": (
        lambda: gt.diagnose(Net(), lambda model: None),  # type: ignore[arg-type, return-value]
        "NoneType",
    ),
}


@pytest.mark.filterwarnings("ignore:gradtrace")
@pytest.mark.parametrize("case", LOSSES)
def test_a_wrong_question_gets_a_sentence(case: str) -> None:
    ask, words = LOSSES[case]
    with pytest.raises(GradtraceError) as found:
        ask()
    text = str(found.value)
    assert re.search(words, text), text
    assert len(text) < 1_500


def test_the_first_operator_with_nan_is_named() -> None:
    with pytest.raises(GradtraceError, match=r"(?s)'enc'|enc"):
        traced(lambda m: loss_fn(m, X * float("nan")))


# Files -------------------------------------------------------------------------------------------


def saved(folder: Path) -> dict[str, Path]:
    """A good file of each kind, by its suffix."""
    trace = traced(lambda m: loss_fn(m, X))
    places = {end: folder / f"good{end}" for end in (".gradtrace", ".json", ".jsonl", ".pt")}
    trace.save(places[".gradtrace"])
    trace.norms().save(places[".json"])
    model = Net()
    with gt.Monitor(model, every=1, file=places[".jsonl"], folder=folder / "kept") as monitor:
        for x in (X, X * float("nan")):
            loss = loss_fn(model, x)
            monitor.step(loss, batch=x)
            loss.backward()
        incident = monitor.incidents[0]
    Path(incident).rename(places[".pt"])
    return places


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return saved(tmp_path_factory.mktemp("files"))


@pytest.mark.parametrize("end", [".gradtrace", ".json", ".jsonl", ".pt"])
def test_good_files_are_read(good: dict[str, Path], end: str) -> None:
    assert str(gt.load(good[end]))


BROKEN: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "cut": lambda data: data[: len(data) // 2],
    "foreign": lambda data: b"PK\x03\x04 something else\n" * 20,
    "other JSON": lambda data: json.dumps([1, {"a": 2}]).encode(),
}


@pytest.mark.parametrize("how", BROKEN)
@pytest.mark.parametrize("end", [".gradtrace", ".json", ".jsonl", ".pt"])
def test_torn_empty_and_foreign_files(
    good: dict[str, Path], end: str, how: str, tmp_path: Path
) -> None:
    bad = tmp_path / f"bad{end}"
    bad.write_bytes(BROKEN[how](good[end].read_bytes()))
    if (end, how) == (".jsonl", "cut"):  # its whole lines are kept
        assert str(gt.load(bad))
        return
    with pytest.raises(GradtraceError, match=r"bad\."):
        gt.load(bad)


def test_files_that_are_not_there_or_of_no_kind(tmp_path: Path) -> None:
    with pytest.raises(GradtraceError, match=r"none\.json.*check the name"):
        gt.load(tmp_path / "none.json")
    with pytest.raises(GradtraceError, match=r"\.gradtrace.*\.json"):
        gt.load(tmp_path / "model.bin")


def unwritable(folder: Path) -> Path:
    """A place in a folder that is none, which root cannot write to either."""
    (folder / "file").write_text("")
    return folder / "file" / "x"


WRITTEN: dict[str, Callable[[Path], object]] = {
    "table": lambda at: traced(lambda m: loss_fn(m, X)).norms().save(f"{at}.csv"),
    "trace": lambda at: traced(lambda m: loss_fn(m, X)).save(f"{at}.gradtrace"),
    "report": lambda at: traced(lambda m: loss_fn(m, X)).report(f"{at}.html"),
    "graph": lambda at: gt.graph(loss_fn(Net(), X)).draw(f"{at}.svg"),
    "journal": lambda at: gt.influence(Net(), loss_fn, [X], journal=f"{at}.jsonl"),
    "monitor": lambda at: gt.Monitor(Net(), file=f"{at}.jsonl"),
    "incidents": lambda at: gt.Monitor(Net(), folder=at),
}


@pytest.mark.parametrize("what", WRITTEN)
def test_places_that_cannot_be_written_to(what: str, tmp_path: Path) -> None:
    at = unwritable(tmp_path)
    with pytest.raises(GradtraceError, match=r"file.*(write|folder|written)"):
        WRITTEN[what](at)
    assert os.listdir(tmp_path) == ["file"]


def test_a_journal_of_another_run(tmp_path: Path) -> None:
    journal = tmp_path / "counts.jsonl"
    torch.manual_seed(0)
    model = Net()
    first = gt.influence(model, loss_fn, [X], journal=journal, key="a")
    assert gt.influence(model, loss_fn, [X], journal=journal, key="a").shares == first.shares
    for other, options in ((Net(), {"key": "a"}), (model, {"key": "b"}), (model, {"rule": "edge"})):
        with pytest.raises(GradtraceError, match=r"counts\.jsonl"):
            gt.influence(other, loss_fn, [X], journal=journal, **{"key": "a", **options})  # type: ignore[arg-type]


# Names -------------------------------------------------------------------------------------------

HOSTILE = "</script><b>\x1b[31m\n\u202eevil"


def hostile() -> nn.Module:
    model = nn.Sequential()
    model.add_module(HOSTILE, nn.Linear(3, 3))
    model.add_module("out", nn.Linear(3, 1))
    return model


def test_names_are_text_wherever_they_are_shown(tmp_path: Path) -> None:
    trace = traced(lambda m: loss_fn(m, X), hostile())
    page = tmp_path / "page.html"
    trace.report(page)
    assert "</script><b>" not in page.read_text(encoding="utf-8")
    table = trace.influence()
    for text in (str(trace), str(table), table.to_markdown(), table._repr_html_()):
        assert not set(text) & {"\x1b", "\u202e"}
    assert "<b>" not in table._repr_html_()
    assert HOSTILE in table.names and trace.influence(HOSTILE).names == (HOSTILE,)
    with pytest.raises(GradtraceError) as error:
        trace.influence("e\x1b[31m")
    assert "\x1b" not in str(error.value)


def test_a_table_of_one_row_from_a_hostile_name() -> None:
    table = Table("", (Column("name"),), ((HOSTILE,),))  # type: ignore[arg-type]
    assert len(str(table).split("\n")) == 3
