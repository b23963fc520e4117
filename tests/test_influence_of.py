"""Influence on some leaves, or on one element, over losses; and what a table says of its paths."""

from __future__ import annotations

import dataclasses
import weakref

import architectures
import pytest
import randomgraphs
import torch
from thorough import few, some
from torch import Tensor, nn

import gradtrace as gt
from gradtrace.errors import GradtraceError, UnknownName
from gradtrace.ir.passes.select_leaves import select_leaves
from gradtrace.paths.paths import Path
from gradtrace.table import Table
from gradtrace.traced import Trace
from gradtrace.tracing.coverage import PATH_RULES


class Branches(nn.Module):
    """An embedding that is read by a recurrent and a convolutional branch, and used by the output
    (tied weights).
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.rnn = nn.GRU(4, 4, batch_first=True)
        self.conv = nn.Conv1d(4, 4, 3, padding=1)
        self.out = nn.Linear(4, 7)
        self.out.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        e = self.embed(x)
        return self.out(self.rnn(e)[0] + self.conv(e.mT).mT)


class TwoBranches(nn.Module):
    """Three paths of weight 2 through ``many``, one of weight -5 through ``one``."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.ones(1))
        self.many, self.one = nn.Linear(1, 3, bias=False), nn.Linear(1, 1, bias=False)
        nn.init.constant_(self.many.weight, 2.0)
        nn.init.constant_(self.one.weight, -5.0)

    def forward(self) -> Tensor:
        found: Tensor = self.many(self.x).sum() + self.one(self.x).sum()
        return found


def two_branches(rule: str = "greedy") -> Trace:
    model = TwoBranches()
    with gt.watch(model) as watch:
        loss = model()
    return watch.trace(loss, rule=rule)


def traced(reduction: str = "mean", rule: str = "greedy") -> Trace:
    torch.manual_seed(0)
    model, x = Branches().double(), torch.randint(7, (3, 5))
    with gt.watch(model) as watch:
        losses = nn.functional.cross_entropy(model(x).mT, x, reduction="none")
        loss = losses.mean(1) if reduction == "none" else losses.mean()
    return watch.trace(loss, rule=rule)


def total(tables: list[Table]) -> dict[str, tuple[object, ...]]:
    """Counts and |gradient| of tables over other leaves, added up."""
    found: dict[str, list[float]] = {}
    for table in tables:
        for row in table.rows:
            sums = found.setdefault(row.name, [0.0] * 5)
            numbers = (row.through, row.eligible, row.unreached, row.own, row["|g| through"])
            for n, number in enumerate(numbers):
                sums[n] += float(number)
    return {name: tuple(sums) for name, sums in found.items()}


def check_sums(trace: Trace, components: str) -> None:
    whole = total([trace.influence(components)])
    if not trace.gradients:  # nothing but constants reaches the loss
        assert not any(map(any, whole.values()))
        return
    parts = total([trace.influence(components, of=name) for name in trace.gradients])
    assert whole.keys() == parts.keys()
    for name, numbers in whole.items():
        assert parts[name][:4] == numbers[:4], name
        assert parts[name][4] == pytest.approx(numbers[4], rel=1e-9)


# Whole leaves -------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(few(50, 1000)))
def test_tables_of_leaves_add_up_on_random_graphs(seed: int) -> None:
    sample = randomgraphs.build(seed)
    trace = gt.trace(sample.loss, names=sample.leaves)
    for rule in PATH_RULES:
        check_sums(dataclasses.replace(trace, rule=rule), "operators")


@pytest.mark.parametrize("rule", PATH_RULES)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("components", ["modules", "forks", "operators"])
def test_tables_of_leaves_add_up(rule: str, reduction: str, components: str) -> None:
    check_sums(traced(reduction, rule), components)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", some(architectures.ARCHITECTURES, 4))
def test_tables_of_leaves_add_up_on_architectures(name: str) -> None:
    torch.manual_seed(0)
    model, make = architectures.ARCHITECTURES[name]()
    with gt.watch(model) as watch:
        loss = make(model)
    trace = watch.trace(loss)
    leaves = list(trace.gradients)
    parts = [leaves[n::3] for n in range(3)]  # each table of a third of the leaves
    whole = total([trace.influence()])
    found = total([trace.influence(of=some_of) for some_of in parts if some_of])
    assert {n: x[:4] for n, x in found.items()} == {n: x[:4] for n, x in whole.items()}


def test_leaves_by_name_pattern_module_and_alias() -> None:
    trace = traced()
    rows = [trace.influence(of=of).rows for of in ("rnn.*", "rnn", ["rnn.weight*", "rnn.bias*"])]
    assert rows[0] == rows[1] == rows[2]
    assert trace.influence(of="out.weight").rows == trace.influence(of="embed.weight").rows
    assert trace.influence(of=["embed", "embed.weight"]).rows == trace.influence(of="embed").rows
    assert trace.influence(of="*").rows == trace.influence().rows
    assert "influence on rnn.* alone" in str(trace.influence(of="rnn.*"))


def test_only_what_leads_to_the_leaf_is_computed() -> None:
    trace = traced()
    leaf = trace.leaves["out.bias"]
    part = select_leaves(trace.program, {leaf.value})
    assert len(part.blocks) == len(trace.program.blocks)
    assert len(part.steps()) < len(trace.program.steps()) / 5
    assert [kept.value for kept in part.leaves] == [leaf.value]


def test_a_sample_of_one_leaf() -> None:
    trace = traced()
    found = trace.influence(["rnn", "conv"], of="embed.weight", sample=5)
    assert found["rnn"].eligible + found["rnn"].unreached == 5
    whole = trace.influence(["rnn", "conv"], of="embed.weight", sample=10**6)
    assert whole.rows == trace.influence(["rnn", "conv"], of="embed.weight").rows


# One element --------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", PATH_RULES)
def test_the_table_of_an_element_is_that_of_its_paths(rule: str) -> None:
    trace = traced("none", rule)
    for index in [(0, 0), (3, 2), (6, 3)]:
        found = trace.influence(["rnn", "conv"], of="embed.weight", index=index)
        paths = [path_of(trace, index, pair) for pair in range(trace.pairs)]
        there = [path for path in paths if path is not None]
        for part in ("rnn", "conv"):
            through = sum(any(m.split(".")[0] == part for m in path.modules) for path in there)
            assert found[part].through == through
            assert found[part].eligible == len(there)
            assert found[part].unreached == len(paths) - len(there)
            assert found[part].own == 0
            size = sum(abs(path.gradient) for path in there)
            assert found[part]["|g| eligible"] == pytest.approx(size)


def path_of(trace: Trace, index: tuple[int, int], pair: int) -> Path | None:
    try:
        return trace.path("embed.weight", index, pair=pair)
    except GradtraceError:
        return None


def test_all_elements_of_a_leaf_are_the_leaf() -> None:
    trace = traced("none")
    whole = total([trace.influence(of="conv.bias")])
    parts = total([trace.influence(of="conv.bias", index=n) for n in range(4)])
    assert parts == pytest.approx(whole)


def test_an_element_counts_as_its_own() -> None:
    found = traced().influence(of="rnn.bias_hh_l0", index=-1)
    assert (found["rnn"].own, found["rnn"].eligible, found["out"].through) == (1, 0, 1)
    assert "influence on rnn.bias_hh_l0[-1] alone" in found.notes


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"of": "embd.weight"}, UnknownName, "did you mean embed.weight"),
        ({"of": ["embed.weight", "nothing.*"]}, UnknownName, "no leaf 'nothing"),
        ({"of": []}, UnknownName, "names no leaf"),
        ({"of": ""}, UnknownName, "no leaf ''"),
        ({"of": 3}, UnknownName, "no name of a leaf"),
        ({"of": [3]}, UnknownName, "no name of a leaf"),
        ({"index": (0, 0)}, GradtraceError, "say which"),
        ({"of": "rnn", "index": 0}, GradtraceError, "matches 4"),
        ({"of": "embed.weight", "index": 0}, UnknownName, "2 dimensions"),
        ({"of": "embed.weight", "index": (7, 0)}, UnknownName, "outside its shape"),
        ({"of": "embed.weight", "index": (0, 0), "sample": 3}, GradtraceError, "leave sample out"),
    ],
)
def test_errors(arguments: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        traced().influence(**arguments)  # type: ignore[arg-type]


# Copies -------------------------------------------------------------------------------------------


def test_traces_that_were_replaced_share_no_results() -> None:
    """By greedy no path passes ``one``, by viterbi all do."""
    trace = two_branches()
    assert (trace.influence()["one"].through, trace.coverage()["x"].median) == (0, 2.0)
    other = dataclasses.replace(trace, rule="viterbi")
    assert (other.influence()["one"].through, other.coverage(of="x")["x"].median) == (1, -5.0)
    assert other.influence().about["rule"] == "viterbi"
    trace.rule = "viterbi"  # a trace may be changed, too
    assert trace.influence() == other.influence()


def test_a_replaced_trace_knows_the_weights_of_the_first() -> None:
    trace = traced()
    with torch.no_grad():
        trace.leaves["conv.bias"].tensor.add_(1.0)
    with pytest.raises(GradtraceError, match="changed in place"):
        dataclasses.replace(trace, rule="viterbi").influence()


def test_nothing_is_kept_alive_by_a_table() -> None:
    trace = traced()
    table = trace.influence()
    gone = weakref.ref(trace)
    del trace
    assert gone() is None and len(table)
