"""The diagnosis in a report: what ``watch.diagnose`` says, first of all."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pages import read
from torch import Tensor, nn

import gradtrace as gt
from gradtrace.errors import GradtraceError
from gradtrace.report.encode import View, contained
from gradtrace.traced import Trace


class Cut(nn.Module):
    """One layer is detached, one of a list is never called; both have a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 4)
        self.side = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.rest = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.rest[1].weight = self.side[0].weight
        self.out = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.words(x)
        found: Tensor = self.out(h + self.side(h).detach())
        return found


def watched(diagnose: bool = True, scale: float = 1.0) -> tuple[gt.watch, Tensor]:
    torch.manual_seed(0)
    model = Cut()
    with gt.watch(model, diagnose=diagnose) as watch:
        loss = model(torch.tensor([1, 3])).square().mean() * scale
    return watch, loss


def view(**options: Any) -> View:
    watch, loss = watched(**options)
    return watch.trace(loss)._view()


def test_it_is_what_diagnose_says_with_the_numbers_of_modules() -> None:
    watch, loss = watched()
    wanted = watch.diagnose(loss).to_dict()
    shown = watch.trace(loss)._view()
    found = shown["diagnosis"]["findings"]
    names = [module["name"] for module in shown["modules"]]
    assert len(found) == 2
    for mine, theirs in zip(found, wanted["findings"], strict=True):
        assert names[mine["module"]] == mine["place"] == theirs["module"] != ""
        assert {**mine, "module": mine["place"]} == {**theirs, "place": mine["place"]}
    assert ".detach())" in found[0]["line"]
    assert "words.weight 7 of 9" in shown["diagnosis"]["remarks"][0]


def test_without_it_a_report_names_what_gets_no_gradient() -> None:
    """By the outermost modules that get none; not why. So do the lines below a printed table."""
    shown = view(diagnose=False)["diagnosis"]["findings"]
    assert {each["severity"] for each in shown} == {"warning"}
    assert [(each["place"], each["title"]) for each in shown] == [
        ("side", "no gradient: side.0.weight, side.0.bias, side.2.weight, side.2.bias"),
        ("rest", "no gradient: rest.0.weight, rest.0.bias, rest.1.bias"),
    ]
    assert all("diagnose=True" in each["advice"] and not each["line"] for each in shown)
    watch, loss = watched(diagnose=False)
    table = watch.trace(loss).influence()
    assert "No gradient: side.0.weight, side.0.bias, side.2.weight, side.2.bias and 3 more;" in str(
        table
    )
    assert "No gradient" not in str(watch.trace(loss).influence(of="words.weight"))
    for parameter in (*watch.model.side.parameters(), *watch.model.rest.parameters()):
        parameter.requires_grad_(False)
    assert watch.trace(loss)._view()["diagnosis"] is None


def test_without_a_model_and_of_inputs_a_report_has_none() -> None:
    x = torch.ones(2, requires_grad=True)
    assert gt.trace((x * x).sum())._view()["diagnosis"] is None
    model = nn.Linear(2, 1)
    with gt.watch(model) as watch:
        scalar = model(x).sum()
    found = watch.attribute(scalar, {"x": x}).trace
    assert found._view()["diagnosis"] is None and "No gradient" not in str(found.influence())


def test_the_rest_of_the_report_is_the_same_with_and_without() -> None:
    with_, without = view(), view(diagnose=False)
    bare = [contained({**each, "diagnosis": None}) for each in (with_, without)]
    assert bare[0] == bare[1]


def test_a_value_that_is_not_finite_comes_first() -> None:
    watch, loss = watched(scale=float("nan"))
    found = watch.trace(loss, nonfinite="allow")._view()["diagnosis"]["findings"][0]
    assert found["kind"] == "non-finite" and found["severity"] == "error"
    assert "scale" in found["line"]


def test_other_rules_and_saved_traces_have_it_too(tmp_path: Path) -> None:
    watch, loss = watched()
    trace = watch.trace(loss)
    assert replace(trace, rule="viterbi")._view()["diagnosis"] == trace._view()["diagnosis"]
    trace.save(tmp_path / "a.gradtrace")
    gt.load(tmp_path / "a.gradtrace").report(tmp_path / "a.html")
    (data,) = read(tmp_path / "a.html")["traces"]
    assert [each["kind"] for each in data["diagnosis"]["findings"]] == ["silent", "silent"]


def test_it_is_there_after_backward_and_a_step(tmp_path: Path) -> None:
    watch, loss = watched()
    trace = watch.trace(loss)
    trace._view()  # what is measured of paths must be asked for before
    loss.backward()
    trace.report(tmp_path / "a.html")
    assert read(tmp_path / "a.html")["traces"][0]["diagnosis"]["findings"]


def test_a_diagnosis_that_fails_does_not_stop_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise GradtraceError("a step that cannot be measured")

    monkeypatch.setattr(sys.modules["gradtrace.watching"], "diagnosed", fail)
    found = view()["diagnosis"]["findings"]
    assert "cannot be measured" in found[0]["evidence"]


def test_parameters_without_gradient_count_once_among_those_of_their_module() -> None:
    watch, loss = watched()
    trace: Trace = watch.trace(loss)
    sizes = {row["name"]: row["parameters"] for row in trace._view()["modules"]}
    assert sizes["side"] == 40 and sizes["rest"] == 40  # one weight is in both
    assert sizes[""] == sum(p.numel() for p in watch.model.parameters())
    assert sum(gradient.numel() for gradient in trace.gradients.values()) < sizes[""]
