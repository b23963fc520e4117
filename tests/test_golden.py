"""The library answers as release 0.1.0 did: `tests/golden`, made by `make_golden`."""

from __future__ import annotations

from functools import cache

import answers
import make_golden
import nets
import pytest
import torch

OTHER = torch.__version__.split("+")[0] != make_golden.PINNED
PINNED_ONLY = {"paths", "paths in full"}
"""Questions about single steps, which another PyTorch may do in other operators."""

LIMIT = 1_000_000


@cache
def watched(name: str, seed: int) -> answers.Net:
    return answers.Net(nets.NETS[name](seed))


@pytest.mark.parametrize("question", make_golden.QUESTIONS)
@pytest.mark.parametrize("name", nets.NETS)
def test_answers(name: str, question: str) -> None:
    if OTHER and question in PINNED_ONLY:
        pytest.skip("held for one PyTorch only")
    file = make_golden.read(name)
    found = make_golden.answered(watched(name, file["seed"]), name, question)
    tolerance = make_golden.CLOSE if OTHER else make_golden.EXACT
    said = make_golden.differences(file[question], found, tolerance)
    assert not said, f"{len(said)} differences:\n" + "\n".join(said[:40])


@pytest.mark.parametrize("name", nets.BROKEN)
def test_diagnoses(name: str) -> None:
    file = make_golden.read(make_golden.BROKEN)
    assert answers.diagnosis(nets.BROKEN[name]()) == file["diagnosis"][name]


def test_files_are_small_and_all_there() -> None:
    files = {path.stem: path for path in make_golden.GOLDEN.glob("*.json")}
    assert set(files) == {*nets.NETS, make_golden.BROKEN}
    assert sum(path.stat().st_size for path in files.values()) <= LIMIT


def test_a_difference_is_seen() -> None:
    file = {"sum": {"a": {"size": 1.0, "through": 3}, "b": {"size": 1e-6, "through": 0}}}
    off = {"sum": {"a": {"size": 1.0, "through": 3}, "b": {"size": 1e-6 + 1e-11, "through": 1}}}
    said = make_golden.differences(file, off, 1e-12)
    assert [text.split(":")[1].strip() for text in said] == ["b, size", "b, through"]
    assert make_golden.differences(file, file, 0.0) == []
    assert make_golden.differences(file, {}, 0.0) == ["sum: not there"]
