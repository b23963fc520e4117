"""``by=``: one language for components, in which every name that a table prints is accepted."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import nets
import pytest
import torch
from torch import Tensor, nn

import gradtrace as gt
from gradtrace.components.components import KINDS
from gradtrace.errors import GradtraceError
from gradtrace.table import Table
from gradtrace.traced import Trace


class Labelled(nn.Module):
    """Two labelled slices, a sum of two ways, and names that look like patterns."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"a[0]": nn.Linear(3, 4), "a/b": nn.Linear(4, 4)})
        self.out = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.parts["a[0]"](x)
        h = gt.label(h + self.parts["a/b"](h).tanh(), 1, ["one", "one", "two", None])
        return self.out(h)


@cache
def trace(name: str) -> Trace:
    if name == "labelled":
        torch.manual_seed(0)
        model = Labelled()
        with gt.watch(model) as watch:
            loss = model(torch.randn(5, 3)).square().mean()
        return watch.trace(loss)
    model, loss_fn, batch = nets.NETS[name](0)
    with gt.watch(model) as watch:
        loss = loss_fn(model, batch)
    return watch.trace(loss)


NAMES = ["labelled", "gpt2", "experts", "lstm", "resnet_eval"]
ASK: dict[str, Callable[[Trace, Any], Table]] = {
    "influence": lambda trace, by: trace.influence(by),
    "decompose": lambda trace, by: trace.decompose(by),
    "mass": lambda trace, by: trace.mass(by),
}


@pytest.mark.parametrize("measure", ASK)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_every_printed_name_is_accepted_back(name: str, kind: str, measure: str) -> None:
    """In a list, and the first one alone, with the values that it was printed with."""
    traced, ask = trace(name), ASK[measure]
    try:
        table = ask(traced, kind)
    except GradtraceError:  # it has none
        return
    again = ask(traced, list(table.names))
    assert again.names == table.names or set(again.names) == set(table.names)
    for row in table:
        assert again[row.name].values == pytest.approx(row.values, nan_ok=True), row.name
    first = next((n for n in table.names if n not in KINDS), None)
    if first is not None:
        assert ask(traced, first)[first].values == pytest.approx(table[first].values, nan_ok=True)


def test_every_kind_occurs() -> None:
    found = set()
    for name in NAMES:
        for kind in KINDS:
            try:
                found.add(trace(name).influence(kind).about["by"])
            except GradtraceError:
                continue
    assert found == set(KINDS)


def test_classes_patterns_lists_and_groups() -> None:
    traced = trace("labelled")
    table = traced.influence([nn.Linear, "parts.*", "one", "forks", "class:Linear"])
    assert {"class:Linear", "parts.*", "one"} < set(table.names)
    assert table["parts.*"].own == 36
    assert table["class:Linear"].own == 46
    assert traced.influence(nn.Linear)["class:Linear"].values == table["class:Linear"].values
    groups = traced.influence({"linear": nn.Linear, "both": ["one", "label:two"]})
    assert groups["linear"].values[1:] == table["class:Linear"].values[1:]
    assert groups.about["by"] == {"linear": "class:Linear", "both": ["one", "label:two"]}


def test_a_module_may_be_called_like_a_kind() -> None:
    model = nn.ModuleDict({"layers": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))})
    with gt.watch(model) as watch:
        loss = model["layers"](torch.ones(1, 2)).sum()
    traced = watch.trace(loss)
    assert set(traced.influence("layers").names) == {"layers.0", "layers.1"}
    assert traced.influence(["layers"]).names == ("layers",)


@pytest.mark.parametrize(
    ("by", "match"),
    [
        ("module", "no component 'module' .* did you mean modules"),
        (["prts"], "did you mean parts"),
        ({"x": "class:Conv9d"}, "no class"),
        ({"x": "label:oen"}, "did you mean one"),
        ({"x": "operator:Nope"}, "no operator"),
        ("onee", "did you mean one"),
        ("heads", "the heads are not known"),
        ({"x": [3]}, "made of 3"),
        ({"x": []}, "made of nothing"),
        ({3: "out"}, "called by names, not 3"),
        ({}, "there is no component"),
        ([], "there is no component"),
        ("", "the whole model"),
        (3, "made of 3"),
        (int, "made of <class 'int'>"),
        (nn.LSTM, "no class 'LSTM' takes part in this loss"),
    ],
)
def test_what_is_no_component(by: Any, match: str) -> None:
    for ask in ASK.values():
        with pytest.raises(GradtraceError, match=match):
            ask(trace("labelled"), by)


def test_a_module_is_named() -> None:
    traced = trace("labelled")
    assert traced.model is not None
    with pytest.raises(GradtraceError, match=r"name it: \['out'\]"):
        traced.influence([traced.model.out])  # type: ignore[list-item]
