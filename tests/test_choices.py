"""Choices: how paths divide at forks, what is in series, and the tables of both."""

from __future__ import annotations

import gc
import json
import math
import pickle
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
import randomgraphs
import thorough
import torch
from torch import Tensor, nn

import gradtrace as gt
from gradtrace.errors import GradtraceError
from gradtrace.io import container, schemas
from gradtrace.report import encode
from gradtrace.report import forks as report_forks
from gradtrace.traced import Trace
from gradtrace.tracing.choices import Choices
from gradtrace.tracing.influence import Influence, Moments, Row


def leaf(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def traced(model: nn.Module, *inputs: Tensor, rule: str = "greedy") -> Trace:
    with gt.watch(model) as watch:
        out = model(*inputs)
    return watch.trace(out.square().sum(), rule=rule)


def adds_up(found: Choices) -> None:
    for fork, shares in found.shares.items():
        known = [share for share in shares.values() if not math.isnan(share)]
        assert not known or abs(sum(known) - 1) < 1e-12, (fork, shares)


# By hand ------------------------------------------------------------------------------------------


def test_a_residual_sum() -> None:
    x, w = leaf(1, 2, 5), leaf(0.5, 3, 0.25)
    found = gt.trace((x + w * x).sum(), names={"x": x, "w": w}).choices()
    assert found.shares == {"add": {"skip": 2 / 3, "mul of w": 1 / 3}}
    (skip, mul) = found
    assert (skip.count.t, skip.count.e, mul.count.t) == (2, 3, 1)
    gradients = [1.5, 4.0, 1.25]  # 1 + w
    assert mul.gradient.share == pytest.approx(4.0 / sum(gradients))


@pytest.mark.parametrize(
    "add",
    [
        lambda a, b, c: a + b + c,
        lambda a, b, c: a + (b + c),
        lambda a, b, c: a.clone().add_(b).add_(c),
        lambda a, b, c: sum([a, b, c]),
        lambda a, b, c: a - (-b) + c,
    ],
)
def test_a_chain_of_sums_is_one_fork(add: Callable[..., Tensor]) -> None:
    x = leaf(1, 2, 3, 4)
    ways = torch.tensor([[3, 1, 1, 1], [1, 3, 1, 1], [1, 1, 3, 3]], dtype=torch.float64)
    found = gt.trace(add(*(x * way for way in ways)).sum(), names={"x": x}).choices()
    (shares,) = found.shares.values()
    assert sorted(shares.values()) == [0.25, 0.25, 0.5]


def test_a_chain_with_another_user_is_two_forks() -> None:
    x = leaf(1, 2)
    part = x * 2 + x * 3
    found = gt.trace((part + x * 9 + part.sin()).sum(), names={"x": x}).choices()
    assert len(found.forks) == 2
    adds_up(found)


@pytest.mark.parametrize("join", [torch.cat, torch.stack])
def test_a_concatenation(join: Callable[[list[Tensor]], Tensor]) -> None:
    x, u = leaf(1, 2, 3), leaf(1, 1, 1)
    both = join([x * torch.tensor([1, 5, 1]), (x * u) * torch.tensor([3, 1, 4])])
    found = gt.trace(both.sum(), names={"x": x, "u": u}).choices()
    (shares,) = found.shares.values()
    assert list(shares.values()) == [1 / 3, 2 / 3]
    assert {row.kind for row in found} == {"concatenation"}


def test_values_used_twice_alone_are_no_choice() -> None:
    x = leaf(1, 2)
    found = gt.trace((x * x + 1).sum(), names={"x": x}).choices(every=True)
    assert len(found) == 0 and "no fork" in str(found)
    assert found.forks == () and found.to_pandas().empty


def test_products_are_gates() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(3, 4)
            self.gate, self.up = nn.Linear(4, 5), nn.Linear(4, 5)

        def forward(self, x: Tensor) -> Tensor:
            h = self.embed(x)
            return torch.sigmoid(self.gate(h)) * self.up(h)

    torch.manual_seed(0)
    found = traced(Gated(), torch.randn(2, 3)).choices()
    assert list(found.shares["mul"]) == ["gate", "up"]
    adds_up(found)


def test_arithmetic_within_an_activation_is_left_out() -> None:
    class Swish(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.sigmoid(x) + 0.1 * x**3

    model = nn.Sequential(nn.Linear(3, 4), Swish(), nn.Linear(4, 1))
    trace = traced(model, torch.randn(2, 3))
    assert trace.choices().forks == ()
    assert len(trace.choices(every=True).forks) == 2


# Names --------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.attn = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width))
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x)
        return x + self.mlp(x)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.pos = nn.Parameter(torch.randn(3, 4))
        self.h = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 2)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.pos
        for block in self.h:
            x = block(x)
        return self.head(x)


def residual(rule: str = "greedy") -> Trace:
    torch.manual_seed(0)
    return traced(Residual(), torch.tensor([[1, 2, 3], [4, 5, 6]]), rule=rule)


@pytest.mark.parametrize("rule", ["greedy", "viterbi"])
def test_forks_and_branches_have_readable_names(rule: str) -> None:
    found = residual(rule).choices()
    assert found.forks == ("h.0.add (attn)", "h.0.add (mlp)", "h.1.add (attn)", "h.1.add (mlp)")
    assert list(found.shares["h.1.add (mlp)"]) == ["skip", "h.1.mlp"]
    adds_up(found)
    with pytest.raises(GradtraceError, match=r"no fork 'h.0.add'.*did you mean h\.0\.add \("):
        found["h.0.add"]
    assert len(found["h.0.add (mlp)"]) == 2


def test_arguments_are_named_after_leaves() -> None:
    names = residual().influence("arguments").names
    assert "add[1] from pos" in names and not any("leaf" in name for name in names)


def test_branches_of_one_module_are_told_apart() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inp, self.enc = nn.Linear(2, 6), nn.Linear(2, 3)

        def forward(self, x: Tensor) -> Tensor:
            a, b, c = self.inp(x).split(2, -1)
            return self.enc(a) * 2 + self.enc(b) + nn.functional.pad(c, (0, 1))

    found = traced(Shared(), torch.randn(4, 2)).choices()
    assert [list(shares) for shares in found.shares.values()] == [
        ["enc (call 1)", "enc (call 2)", "inp"]
    ]


def test_rotations_and_dropout_do_not_hide_where_a_branch_comes_from() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inp = nn.Linear(4, 4)
            self.q, self.k, self.v = (nn.Linear(4, 4) for _ in range(3))

        def turned(self, x: Tensor) -> Tensor:
            return 0.6 * x + 0.8 * torch.cat([-x[..., 2:], x[..., :2]], -1)

        def forward(self, x: Tensor) -> Tensor:
            h = self.inp(x)
            weights = self.turned(self.q(h)) @ self.turned(self.k(h)).mT
            return nn.functional.dropout(weights.softmax(-1)) @ self.v(h)

    torch.manual_seed(0)
    found = traced(nn.Sequential(Attention()), torch.randn(2, 5, 4)).choices()
    assert [list(shares) for shares in found.shares.values()] == [
        ["0.q", "0.k"],
        ["softmax", "0.v"],
    ]


def test_a_cell_called_many_times_is_one_fork() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.read = nn.RNNCell(2, 3), nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.zeros(1, 3)
            for step in x:
                h = self.cell(step[None], h)
            return self.read(h)

    torch.manual_seed(0)
    found = traced(Recurrent(), torch.randn(6, 2)).choices()
    assert list(found.shares["cell.add"]) == ["addmm of cell.weight_hh", "addmm of cell.weight_ih"]
    assert found["cell.add"].rows[0].times == 5  # the first state needs no gradient
    assert "cell.add (×5)" in str(found)
    adds_up(found)


def test_experts_added_one_by_one_are_one_fork() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inp = nn.Linear(3, 4)
            self.experts = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

        def forward(self, x: Tensor) -> Tensor:
            h, out = self.inp(x), torch.zeros(6, 4)
            for n, expert in enumerate(self.experts):
                mine = torch.tensor([n, n + 3])
                out = out.index_add(0, mine, expert(h[mine]))
            return out

    torch.manual_seed(0)
    found = traced(Experts(), torch.randn(6, 3)).choices()
    assert found.shares.keys() == {"index_add"}
    assert list(found.shares["index_add"]) == ["experts.0", "experts.1", "experts.2"]
    adds_up(found)


# Labels -------------------------------------------------------------------------------------------


def test_labelled_heads() -> None:
    x, gains = leaf(1, 2, 3, 4), torch.tensor([1.0, 5, 1, 1], dtype=torch.float64)
    heads = gt.label(torch.stack([x, x * gains, x * 2]), 0, ["head 0", "head 1", None])
    trace = gt.trace(heads.sum(), names={"x": x})
    shares = trace.choices().shares
    assert shares["label"] == {"head 0": 0.0, "head 1": 0.25, "(no label)": 0.75}
    table = trace.influence("labels")
    del trace
    assert table.choices().shares == shares  # of its small program
    table = replace(table, source=None)
    assert table.choices().shares == {"head": {"head 0": 0.0, "head 1": 1.0}}


def test_whole_tensors_have_no_slices() -> None:
    x = leaf(1, 2)
    loss = gt.label(x + 2 * x.sin(), 0, "part").sum()
    found = gt.trace(loss, names={"x": x}, granularity="operator").choices()
    assert found.forks == ("add",)
    adds_up(found)


# Random graphs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("seeds", [range(n, n + 20) for n in range(0, thorough.few(80, 2000), 20)])
def test_shares_add_up_and_are_those_of_the_paths(seeds: range) -> None:
    for seed in seeds:
        sample = randomgraphs.build(seed)
        trace = gt.trace(sample.loss, names=sample.leaves)
        found = trace.choices(every=True)
        adds_up(found)
        if trace.pairs == 1:
            one_by_one = trace.choices(every=True, sample=10**9)
            assert [row.count for row in one_by_one] == [row.count for row in found], seed


def routes(trace: Trace) -> dict[int, set[frozenset[str]]]:
    """By value, the sets of operators on its routes to the loss, one by one."""
    found: dict[int, set[frozenset[str]]] = {trace.program.root: {frozenset()}}
    for block in trace.program.blocks:
        for value in block.takes.values():
            found[value] = {way | {block.operator} for way in found[value]}
        for out, terms, *_ in (*block.steps, *block.merges):
            found[out] = {way for term in terms for way in found[term.value]}
    return found


@pytest.mark.parametrize("seeds", [range(n, n + 20) for n in range(0, thorough.few(80, 2000), 20)])
def test_series_are_what_every_route_visits(seeds: range) -> None:
    for seed in seeds:
        sample = randomgraphs.build(seed)
        trace = gt.trace(sample.loss, names=sample.leaves)
        ways = routes(trace)
        for row in trace.influence("operators"):
            mine = [ways[each.value] for each in trace.program.leaves]
            eligible = [some for some in mine if any(row.name in way for way in some)]
            always = all(row.name in way for some in eligible for way in some)
            assert row.alternative is (None if not eligible else not always), (seed, row.name)
            if row.series and row.count.e:
                assert row.count.share == 1


# Series -------------------------------------------------------------------------------------------


def test_a_perceptron_is_in_series() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 2))
    table = traced(model, torch.randn(5, 3)).influence()
    assert [row.alternative for row in table] == [None, False, False, False]
    assert all(row.count.share == 1 for row in table if row.series)
    assert "in series: every path" in str(table)


def test_a_module_around_two_branches_is_in_series() -> None:
    table = residual().influence()
    series = {row.name for row in table if row.series}
    assert series == {"h", "h.0", "h.1", "head"}
    shown = table.table().column("component")
    assert set(shown[-4:]) == series and "h.1.mlp" in shown[:-4]
    assert table.names[0] == "embed"  # rows keep the model's order


def test_parts_side_by_side_are_in_series_together() -> None:
    """Every path passes one of them, though none is passed by every path."""

    class Parallel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inp = nn.Linear(2, 3)
            self.both = nn.ModuleList([nn.Linear(3, 1), nn.Linear(3, 1)])

        def forward(self, x: Tensor) -> Tensor:
            h = self.inp(x)
            return self.both[0](h) + self.both[1](h)

    table = traced(Parallel(), torch.randn(4, 2)).influence()
    known = {row.name: row.alternative for row in table}
    assert known == {"inp": None, "both": False, "both.0": True, "both.1": True}
    assert table["both"].count.share == 1


def test_information_orders_the_table() -> None:
    x, w = leaf(1, 2, 5), leaf(0.5, 3, 0.25)
    table = gt.trace((x + w * x).sum(), names={"x": x, "w": w}).influence("operators")
    assert table.information["MulBackward0"] == pytest.approx(6 * 0.9182958340544896)
    assert table.table().column("component")[0] == "MulBackward0"
    assert table.sort("component").table().column("component")[0] == "AddBackward0"
    assert table.top(1).names == ("MulBackward0",)


def test_merged_tables_know_an_alternative() -> None:
    rows = [Row("a", alternative=known) for known in (None, False, True)]
    for n, first in enumerate(rows):
        for m, second in enumerate(rows):
            assert (first + second).alternative is rows[max(n, m)].alternative


# Files --------------------------------------------------------------------------------------------


def test_old_tables_are_read_and_new_ones_written() -> None:
    table = residual().influence()
    data = json.loads(json.dumps(table.to_dict()))
    schemas.INFLUENCE(data)
    again = Influence.from_dict(data)
    assert again == table and [row.series for row in again] == [row.series for row in table]
    for row in data["rows"]:
        row.pop("alternative", None)
    schemas.INFLUENCE(data)
    old = Influence.from_dict(data)
    assert old == table and not any(row.series for row in old)
    assert "series" not in str(old)


def test_choices_as_json() -> None:
    found = residual().choices()
    again = Choices.from_dict(json.loads(json.dumps(found.to_dict())))
    assert again == found and again.shares == found.shares


def test_files_hold_choices_and_old_ones_do_not(tmp_path: Path) -> None:
    trace, file = residual(), tmp_path / "a.gradtrace"
    trace.influence("arguments")
    trace.save(file)
    found = gt.load(file)
    assert found.choices() == trace.choices()
    assert [row.series for row in found.influence()] == [row.series for row in trace.influence()]
    assert repr(found._view().choices) == repr(trace._view().choices)  # nan is not nan
    meta, tensors = container.read(file, "trace", lambda _: None)[1:]
    del meta["choices"]
    for table in meta["tables"].values():
        for row in table["rows"]:
            row.pop("alternative", None)
    view = encode.read(tensors["view"].numpy().tobytes())
    for part in ("choices", "coverage"):
        del view[part]
    for table in view["tables"].values():
        del table["series"]
    tensors["view"] = torch.frombuffer(bytearray(encode.contained(view)), dtype=torch.uint8)
    container.write(file, "trace", meta, tensors)
    old = gt.load(file)
    assert old._view().choices is None and old._view().tables[""].series is None
    assert old.influence() == trace.influence()
    adds_up(old.influence("arguments").choices())
    with pytest.raises(GradtraceError, match="saved by an older gradtrace"):
        old.choices()
    old.report(tmp_path / "old.html")


class Cells(nn.Module):
    """A choice between two recurrent layers, within each of which there are many."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn, self.gru = nn.Embedding(5, 3), nn.RNN(3, 3), nn.GRU(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        e = self.embed(x)
        return (self.rnn(e)[0] + self.gru(e)[0]).sum()


def test_forks_between_modules_are_printed_first() -> None:
    """And time steps have the name of their layer, and their number."""
    torch.manual_seed(0)
    model = Cells()
    with gt.watch(model) as watch:
        found = watch.trace(model(torch.arange(4))).choices()
    steps = [f"gru step {n}" for n in range(4)]  # as in influence("steps")
    assert list(found.shares["gru.stack"]) == steps
    known, ranked = found.information, found.ranked()
    assert set(found.shares[ranked[0]]) == {"rnn", "gru"} and known[ranked[0]] < max(known.values())
    within = [known[fork] for fork in ranked[1:]]
    assert within == sorted(within, reverse=True)
    assert found.top(1).forks == (ranked[0],)
    assert found.table().rows[0][0] == ranked[0]
    assert Choices.from_dict(found.to_dict()).ranked() == found.merge(found).ranked() == ranked


def test_a_report_begins_with_the_forks_between_modules() -> None:
    """Within recurrent layers more elements have a choice, but nobody asked about these."""
    torch.manual_seed(0)
    model = Cells()
    with gt.watch(model) as watch:
        trace = watch.trace(model(torch.arange(4)))
    forks = trace._view().choices
    assert forks is not None and len(forks) > 1
    assert {branch.name for branch in forks[0].branches} == {"rnn", "gru"}
    known = trace.choices().information
    assert forks[0].name != max(known, key=lambda name: known[name])
    assert [known[fork.name] for fork in forks[1:]] == sorted(
        (known[fork.name] for fork in forks[1:]), reverse=True
    )


def test_a_report_has_the_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = residual()
    forks = trace._view().choices
    assert forks is not None
    told = trace.choices().information
    assert [fork.name for fork in forks] == sorted(told, key=lambda name: -told[name])
    assert forks[0].module > 0 and forks[0].branches[1].module > 0
    for fork in forks:
        assert sum(branch.share for branch in fork.branches) == pytest.approx(1)
    monkeypatch.setattr(report_forks, "FORK_MAX_BRANCHES", 3)
    monkeypatch.setattr(report_forks, "MAX_FORKS", 1)
    x = leaf(1, 2)
    parts = [x * n for n in range(1, 7)]
    (fork,) = report_forks.shown(gt.trace(torch.cat(parts).sum(), names={"x": x}).choices(), {})
    assert [branch.name for branch in fork.branches][2] == "4 other branches"
    assert sum(branch.share for branch in fork.branches) == pytest.approx(1)


# Without the trace --------------------------------------------------------------------------------


def test_a_table_does_not_keep_its_trace() -> None:
    trace = residual()
    table, arguments = trace.influence(), trace.influence("arguments")
    assert table.choices() == trace.choices() == arguments.choices()
    assert pickle.loads(pickle.dumps(table)) == table
    del trace
    gc.collect()
    residual().influence()  # until then a table keeps a small program
    with pytest.raises(GradtraceError, match="trace of this table is gone"):
        table.choices()
    found = arguments.choices()
    adds_up(found)
    assert list(found.shares["h.0.add"]) == ["h.0", "h.0.mlp.2"]
    assert "without the trace" in str(found)


# Tables -------------------------------------------------------------------------------------------


def test_pairs_have_errors() -> None:
    torch.manual_seed(0)
    model, x = Residual(), torch.randint(7, (8, 3))
    with gt.watch(model) as watch:
        losses = model(x).square().sum((1, 2))
    found = watch.trace(losses).choices()
    adds_up(found)
    assert found.pairs == 8 and "± error" in str(found)
    whole = [row.count.t for row in found]
    parts = [watch.trace(loss).choices() for loss in losses]
    merged = parts[0].merge(*parts[1:])
    assert [row.count.t for row in merged] == whole and merged.pairs == 8
    assert [row.count for row in merged] == [row.count for row in found]


def test_merging_with_a_table_that_lacks_a_branch() -> None:
    x, u = leaf(1, 2, 3), leaf(2, 2, 2)

    def table(*branches: Tensor) -> Choices:
        return gt.trace(torch.cat([*branches]).sum(), names={"x": x, "u": u}).choices()

    two = table(x, (x * u).sin() * 9)
    three = table(x, (x * u).sin() * 9, x.exp())
    for merged in (two.merge(three), three.merge(two)):
        adds_up(merged)
        assert {row.count.e for row in merged} == {6}
        assert len(merged) == 3
    other = gt.trace((x + x.sin()).sum(), names={"x": x}, rule="viterbi").choices()
    with pytest.raises(GradtraceError, match="different rules"):
        two.merge(other)


def test_sorted_and_cut() -> None:
    found = residual().choices()
    information = list(found.information.values())
    assert found.top(1).forks == (found.forks[information.index(max(information))],)
    assert len(found.top(2)) == 4 and len(found.top(3, "paths")) == 3
    by_share = found.sort("paths", descending=False).table().column("paths")
    assert by_share == sorted(by_share)
    assert len(found.to_pandas()) == 8
    assert found.to_pandas()["fork"].is_unique is False
    for wrong in (0, True, "2"):
        with pytest.raises(GradtraceError, match="number of rows from 1 on"):
            found.top(wrong)  # type: ignore[arg-type]


def test_plots() -> None:
    pytest.importorskip("matplotlib").use("agg")
    pyplot = pytest.importorskip("matplotlib.pyplot")
    trace = residual()
    ax = trace.choices().plot(most=3)
    assert len(ax.get_yticklabels()) == 3 and len(ax.patches) == 6
    with pytest.raises(GradtraceError, match="no column of shares 'branch'"):
        trace.choices().plot("branch")
    bars = trace.influence().plot()
    names = [text.get_text() for text in bars.get_yticklabels()]
    assert "h.1.mlp" in names and "head" not in names  # in series
    alone = traced(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), torch.ones(1, 2)).influence()
    assert len(alone.plot().patches) == 2
    pyplot.close("all")


def test_measures_are_checked() -> None:
    trace = residual()
    with pytest.raises(GradtraceError, match="'path' is none of paths, gradient, mass"):
        trace.choices(["path"])
    with pytest.raises(GradtraceError, match="measures are several"):
        trace.choices("paths")


def test_gradient_and_mass_by_hand() -> None:
    x, w = leaf(1, 2, 5), leaf(0.5, -3, 0.25)
    found = gt.trace((x + w * x).sum(), names={"x": x, "w": w}).choices(["gradient", "mass"])
    skip, mul = found
    g = 1 + w.detach()
    assert skip.others["gradient"] == pytest.approx(float(g.sum() / g.square().sum()))
    assert mul.others["gradient"] == pytest.approx(float((w.detach() * g).sum() / (g * g).sum()))
    assert skip.others["mass"] == pytest.approx(3 / 6.75)
    assert found.measures == ("paths", "gradient", "mass")
    assert "gradient" in str(found) and len(found.plot("mass").patches) == 2
    again = Choices.from_dict(json.loads(json.dumps(found.to_dict())))
    assert again == found


def test_gradient_and_mass_add_up() -> None:
    for seed in range(thorough.few(30, 500)):
        sample = randomgraphs.build(seed)
        trace = gt.trace(sample.loss, names=sample.leaves)
        found = trace.choices(("gradient", "mass"), every=True)
        for fork in found.forks:
            for measure in ("gradient", "mass"):
                shares = [row.others[measure] for row in found[fork]]
                assert all(map(math.isnan, shares)) or abs(sum(shares) - 1) < 1e-9, (seed, fork)
            assert all(not row.others["mass"] < 0 for row in found)


def test_measures_of_labels_and_calls() -> None:
    torch.manual_seed(0)
    cell, x = nn.RNNCell(2, 3), torch.randn(4, 1, 2)
    with gt.watch(cell) as watch:
        h = torch.zeros(1, 3)
        for step in x:
            h = gt.label(cell(step, h), 1, "unit")
        loss = h.square().sum()
    found = watch.trace(loss).choices(("gradient", "mass"))
    assert {row.times for row in found if row.kind == "label"} == {4}
    for fork in found.forks:
        for measure in ("gradient", "mass"):
            assert sum(row.others[measure] for row in found[fork]) == pytest.approx(1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.complex64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    x = torch.tensor([[1.0, 2.0]], dtype=dtype.to_real(), requires_grad=True)
    z = torch.view_as_complex(x) if dtype.is_complex else x
    z = z.sin() + 3 * z
    out = torch.view_as_real(z) if dtype.is_complex else z
    found = gt.trace(out.float().sum(), names={"x": x}).choices()
    adds_up(found)
    assert set(found.shares["add"]) == {"sin of x", "mul of x"}


def test_a_scalar_and_an_empty_leaf() -> None:
    x, none = leaf(2).sum().detach().requires_grad_(), torch.zeros(0, requires_grad=True)
    loss = x + 2 * x.sin() + (none + none.sin()).sum()
    adds_up(gt.trace(loss, names={"x": x, "none": none}).choices())


def test_weights_that_changed() -> None:
    x = leaf(1, 2)
    trace = gt.trace((x + x.sin()).sum(), names={"x": x})
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(GradtraceError, match="changed in place"):
        trace.choices()


def test_fractions_are_not_printed() -> None:
    table = Influence((Row("a", 0, 0, Moments.of(1, 3), Moments.of(0.1, 0.3)),))
    assert "/" not in str(table) and isinstance(table["a"].count.t, Fraction)


def test_many_ways_to_a_value_are_not_walked_one_by_one() -> None:
    """Sixty diamonds in one module have 3^60 ways from the last to the first."""

    class Diamonds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.into(x)
            for _ in range(60):
                h = torch.tanh(h) + torch.sigmoid(h) * h
            return h

    model = Diamonds()
    with gt.watch(model) as watch:
        loss = model(torch.ones(2, 3)).sum()
    assert "add (tanh, mul) (×59)" in str(watch.trace(loss).choices())
