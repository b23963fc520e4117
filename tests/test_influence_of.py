"""Influence on some leaves, or on one element, over losses; and what a table says of its paths."""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path as FilePath
from typing import Any

import architectures
import pytest
import randomgraphs
import torch
from thorough import few, some
from torch import Tensor, nn

import gradtrace as gt
from gradtrace.errors import GradtraceError, UnknownName
from gradtrace.ir.passes.select_leaves import select_leaves
from gradtrace.ir.program import Program
from gradtrace.measures import table_source
from gradtrace.measures.agreement import PATH_RULES
from gradtrace.paths.paths import Path
from gradtrace.report.encode import contained, read
from gradtrace.report.model import View, revived
from gradtrace.report.saving import Saved
from gradtrace.traced import Trace
from gradtrace.tracing.coverage import Coverage
from gradtrace.tracing.influence import Influence, Row
from gradtrace.tracing.moments import Moments


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


def traced(reduction: str = "mean", rule: str = "greedy", **options: str) -> Trace:
    torch.manual_seed(0)
    model, x = Branches().double(), torch.randint(7, (3, 5))
    with gt.watch(model) as watch:
        losses = nn.functional.cross_entropy(model(x).mT, x, reduction="none")
        loss = losses.mean(1) if reduction == "none" else losses.mean()
    return watch.trace(loss, rule=rule, **options)


def total(tables: list[Influence]) -> dict[str, tuple[object, ...]]:
    """Counts and |gradient| of tables over other leaves, added up."""
    found: dict[str, list[float]] = {}
    for table in tables:
        for row in table.rows:
            sums = found.setdefault(row.name, [0.0] * 5)
            numbers = (row.through, row.eligible, row.unreached, row.own, row["|g| through"])
            for n, number in enumerate(numbers):
                sums[n] += float(number)
    return {name: tuple(sums) for name, sums in found.items()}


def check_sums(trace: Trace, components: str | None) -> None:
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
@pytest.mark.parametrize("components", [None, "arguments", "classes", "operators"])
def test_tables_of_leaves_add_up(rule: str, reduction: str, components: str | None) -> None:
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


def test_operator_granularity() -> None:
    trace = traced(granularity="operator")
    check_sums(trace, None)
    assert trace.influence(of="embed.weight").coverage is None
    with pytest.raises(GradtraceError, match="followed as a whole"):
        trace.influence(of="embed.weight", index=(0, 0))


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
            assert float(found[part].gradient.e) == pytest.approx(size)
        assert found.coverage is not None
        assert found.coverage.parts == pytest.approx(sorted(path.coverage for path in there))


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


# Data sets ----------------------------------------------------------------------------------------


def batches() -> tuple[nn.Module, Callable[[nn.Module, Tensor], Tensor], list[Tensor]]:
    torch.manual_seed(0)

    def losses(model: nn.Module, x: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(x).mT, x, reduction="none").mean(1)

    return Branches().double(), losses, [torch.randint(7, (3, 5)) for _ in range(4)]


@pytest.mark.parametrize("index", [None, (3, 2)])
def test_influence_on_a_leaf_over_a_data_set(index: tuple[int, int] | None) -> None:
    model, losses, loader = batches()
    found = gt.influence(model, losses, loader, of="embed.weight", index=index)
    parts = []
    for x in loader:
        with gt.watch(model) as watch:
            loss = losses(model, x)
        parts.append(watch.trace(loss).influence(of="embed.weight", index=index))
    first, *rest = parts
    assert found.rows == first.merge(*rest).rows
    assert found.pairs == 12
    note = "embed.weight" if index is None else "embed.weight[3, 2]"
    assert f"influence on {note} alone" in found.notes


def test_coverage_of_a_data_set_is_that_of_its_first_batches() -> None:
    model, losses, loader = batches()
    found = gt.influence(model, losses, loader)
    assert found.coverage is not None
    assert found.coverage.elements + found.coverage.unreached == 4 * 100
    assert "A path carries" in str(found)
    assert gt.influence(model, losses, loader, coverage=False).coverage is None
    assert gt.influence(model, losses, loader, granularity="operator").coverage is None
    many = gt.influence(model, losses, [x[:1] for x in loader] * 4)
    assert many.coverage is not None
    assert many.coverage.elements + many.coverage.unreached == 10 * 100


def test_a_checkpoint_keeps_coverage_and_belongs_to_its_leaf(tmp_path: object) -> None:
    model, losses, loader = batches()
    file = f"{tmp_path}/run.gradtrace"

    def stopped() -> Iterator[Tensor]:
        yield from loader[:2]
        raise KeyboardInterrupt

    part = gt.influence(model, losses, stopped(), of="rnn", checkpoint=file)
    assert part.interrupted
    for other in (None, "conv"):
        with pytest.raises(GradtraceError, match="of"):
            gt.influence(model, losses, loader, of=other, checkpoint=file)
    whole = gt.influence(model, losses, loader, of="rnn", checkpoint=file)
    alone = gt.influence(model, losses, loader, of="rnn")
    assert whole.rows == alone.rows and whole.coverage == alone.coverage


class Experts(nn.Module):
    """One of two layers, chosen by the input."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        self.out = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.experts[int(x[0, 0] > 0)](x))


def test_a_parameter_that_takes_no_part_in_a_batch_has_no_paths_there() -> None:
    torch.manual_seed(0)
    model = Experts()
    loader = [torch.ones(2, 2), -torch.ones(2, 2), torch.ones(2, 2)]

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        found: Tensor = model(x).sum(1)
        return found

    found = gt.influence(model, loss, loader, of="experts.0.weight")
    assert (found.pairs, found["out"].eligible) == (6, 2 * 4)
    both = gt.influence(model, loss, loader, of=["experts.0", "experts.1"])
    assert both["out"].eligible == 6 * 6
    assert gt.influence(model, loss, loader, of="experts.0.bias", index=1)["out"].through == 2
    with pytest.raises(UnknownName, match=r"batch 0: no leaf 'expert\.0'"):
        gt.influence(model, loss, loader, of="expert.0")


# What tables say ----------------------------------------------------------------------------------


def test_a_table_measures_its_coverage_when_it_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = traced()
    table = trace.influence()
    assert table.measured is None
    assert "A path carries" not in str(table.table())
    assert trace.coverage().in_words() in str(table)
    assert table.measured == trace.coverage() == table.by("gradient").coverage
    assert "A path carries" in table._repr_html_()
    part = trace.influence(of="rnn")
    assert part.coverage == trace.coverage(of="rnn") != table.coverage


def test_a_temporary_trace_can_be_printed() -> None:
    text, part = str(traced().influence()), str(traced().influence(of="rnn"))
    divided = traced().influence().choices()
    one, other = (lambda t: (t.influence(), t.influence("classes")))(traced())  # two of one trace
    assert one.coverage == other.coverage == traced().coverage()
    trace = traced()
    assert text == str(trace.influence()) and "A path carries" in text
    assert part == str(trace.influence(of="rnn")) and "A path carries" in part
    assert divided == trace.choices()


def program_of(trace: gt.Trace) -> weakref.ref[Program]:
    return weakref.ref(trace.program)


def test_a_table_keeps_a_small_program_until_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing lies in a cycle: memory returns without the garbage collector."""
    gc.disable()
    try:
        trace = traced()
        program, table = program_of(trace), trace.influence()
        trace.influence("classes")
        del trace
        assert program() is not None
        del table
        assert program() is None
        trace = traced()
        program, table = program_of(trace), trace.influence()
        del trace
        later = traced().influence()
        assert program() is None and table.coverage is None and "carries" not in str(table)
        assert later.coverage is not None
        for limit in ("KEPT_MAX_BYTES", "KEPT_MAX_TENSORS"):
            with monkeypatch.context() as patch:
                patch.setattr(table_source, limit, 1)
                trace = traced()
                program, table = program_of(trace), trace.influence()
                assert "A path carries" in str(table)  # while the trace is there
                del trace
                assert program() is None and "carries" in str(table)
                found = traced().influence().coverage  # an assertion would keep the trace
                assert found is None
    finally:
        gc.enable()


def test_what_a_table_keeps_is_checked_for_changes() -> None:
    trace = traced()
    table, bias = trace.influence(), trace.leaves["conv.bias"].tensor
    del trace
    with torch.no_grad():
        bias.add_(1.0)
    assert table.coverage is None and "contradict" not in str(table)


def test_a_table_of_changed_weights_has_no_coverage_unless_measured_before() -> None:
    trace = traced()
    table, seen = trace.influence(), trace.influence()
    known = str(seen)
    with torch.no_grad():
        trace.leaves["conv.bias"].tensor.add_(1.0)
    trace._coverages.clear()
    assert table.coverage is None
    assert str(seen) == known


def test_traces_that_were_replaced_share_no_results(tmp_path: FilePath) -> None:
    """By greedy no path passes ``one``, by viterbi all do."""
    trace = two_branches()
    tables = {kind: trace.influence(kind) for kind in (None, "classes", "operators")}
    trace.coverage(), trace.agreement(), trace.save(tmp_path / "greedy")
    other = dataclasses.replace(trace, rule="viterbi")
    assert other.coverage(of="x").parts == (-5.0,) and trace.coverage(of="x").parts == (2.0,)
    assert other.influence("classes").rule == "viterbi"
    trace.save(tmp_path / "greedy"), other.save(tmp_path / "viterbi")
    trace.rule = "viterbi"  # a trace may be changed, too
    trace.save(tmp_path / "changed")
    for name in ("greedy", "viterbi", "changed"):
        saved, rule = gt.load(tmp_path / name), "greedy" if name == "greedy" else "viterbi"
        assert isinstance(saved, Saved) and saved._view().rule == rule
        assert {table.rule for table in saved._tables.values()} == {rule}
        assert saved.influence()["one"].through == int(rule == "viterbi")
        seen = saved._view().tables[""]
        assert seen.through[seen.name.index("one")] == int(rule == "viterbi")
    assert gt.load(tmp_path / "greedy").influence("operators") == tables["operators"]


def test_a_replaced_trace_knows_the_weights_of_the_first() -> None:
    trace = traced()
    with torch.no_grad():
        trace.leaves["conv.bias"].tensor.add_(1.0)
    with pytest.raises(GradtraceError, match="changed in place"):
        dataclasses.replace(trace, rule="viterbi").influence()


def test_low_coverage_is_warned_of() -> None:
    table = dataclasses.replace(traced().influence(), measured=Coverage((0.1, 0.2)))
    assert "trace.decompose()" in str(table)
    assert "trace.decompose()" not in str(dataclasses.replace(table, measured=Coverage((1.0,))))


def test_a_printed_table_says_where_the_rules_contradict_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def found(rule: str = "greedy", **how: Any) -> str:
        return str(two_branches(rule).influence(**how))  # the trace is gone by then

    said = "many: 100% by greedy, 100% by edge, 0% by viterbi"
    assert said in found() and said in found(weight="gradient") and said in found(of="x")
    assert said in found("viterbi") and said in found("edge")
    assert "contradict" not in found(of="many")
    assert said in " ".join(two_branches()._view().coverage.words)
    assert "contradict" not in found(sample=10)  # shares of other elements are no contradiction
    monkeypatch.setattr(table_source, "COMPARED_MAX_ELEMENTS", 10)
    assert "contradict" not in found()


def test_contradictions_of_rules_that_were_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_source, "COMPARED_MAX_ELEMENTS", 0)  # as of a large program
    trace = traced()
    table = trace.influence()
    assert "contradict" not in str(table)
    found = trace.agreement()
    assert bool(found.warning()) == ("contradict" in str(table))
    trace.compared = dataclasses.replace(
        found, rows=(dataclasses.replace(found.rows[0], shares={"greedy": 0.51, "viterbi": 0.0}),)
    )
    assert "51% by greedy, 0% by viterbi" in str(table)


def test_merged_tables_have_the_coverage_of_all() -> None:
    one, two, three = (traced().influence(sample=n) for n in (3, 4, 5))
    merged = one.merge(two, three)
    assert merged.coverage is not None and one.measured is not None
    assert merged.coverage == three.merge(one, two).coverage
    plain = traced().influence()
    assert one.merge(plain).coverage == one.measured == plain.merge(one).coverage
    assert plain.merge(plain).coverage is None


@pytest.mark.parametrize(
    "through",
    [
        copy.copy,
        copy.deepcopy,
        lambda table: pickle.loads(pickle.dumps(table)),
        lambda table: Influence.from_dict(table.to_dict()),
    ],
)
def test_copies_and_files_keep_what_was_measured(
    through: Callable[[Influence], Influence],
) -> None:
    trace = traced()
    table = trace.influence()
    assert "coverage" not in table.to_dict()
    assert table.coverage is not None
    found = through(table)
    assert found == table
    assert found.measured == table.measured


def test_files_of_traces_keep_coverage(tmp_path: object) -> None:
    trace = traced()
    trace.influence("operators")
    trace.save(f"{tmp_path}/a.gradtrace")
    saved = gt.load(f"{tmp_path}/a.gradtrace")
    for kind in (None, "operators"):
        assert saved.influence(kind).coverage == trace.coverage()
    assert "carries" in str(saved.influence())


def test_a_report_says_coverage() -> None:
    trace = traced()
    view = trace._view()
    wanted = trace.coverage()
    assert view.coverage is not None
    assert (view.coverage.median, view.coverage.words) == (wanted.median, wanted.lines())
    assert wanted.in_words() in view.notes
    data = read(contained(view))
    assert revived(View, data).coverage == view.coverage
    del data["coverage"]  # a file of an older version
    assert revived(View, data).coverage is None
    assert traced(granularity="operator")._view().coverage is None


def test_nothing_is_kept_alive_by_a_printed_table() -> None:
    trace = traced()
    table = trace.influence()
    str(table)
    assert not trace._followers
    gone = weakref.ref(trace)
    del trace
    assert gone() is None


# Rows in numbers ----------------------------------------------------------------------------------


def test_rows_print_numbers() -> None:
    row = Row("attn", 7, 2, Moments.over((3.0, 1.0), (4.0, 4.0)), Moments.of(0.1, 0.3))
    assert repr(row) == (
        "Row('attn', through=4, eligible=8, share=0.5, weighted=0.3333, unreached=2, own=7)"
    )
    assert (row.through, row.eligible, row.share) == (4, 8, 0.5)
    assert row.weighted == pytest.approx(1 / 3)
    assert repr(row.gradient) == "Moments(through=0.1, eligible=0.3, share=0.3333)"
    assert repr(Row("none")) == (
        "Row('none', through=0, eligible=0, share=nan, weighted=nan, unreached=0, own=0)"
    )
    assert "inf" in repr(Moments.over((1e308, 1e308), (1e308, 1e308)))
    assert "\x1b" not in repr(Row("\x1b[31m"))
