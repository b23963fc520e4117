"""Forks: how paths divide at sums, products and concatenations, by hand; what is in series."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import randomgraphs
import thorough
import torch
from torch import Tensor, nn

import gradtrace as gt
from gradtrace.errors import GradtraceError, UnknownName
from gradtrace.table import Table
from gradtrace.traced import Trace
from gradtrace.tracing.counting import chosen_components, counts_of
from gradtrace.tracing.followed import follow_paths
from gradtrace.tracing.influence import SERIES


def leaf(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def traced(model: nn.Module, *inputs: Tensor, rule: str = "greedy") -> Trace:
    with gt.watch(model) as watch:
        out = model(*inputs)
    return watch.trace(out.square().sum(), rule=rule)


def forks(table: Table) -> dict[str, dict[str, float]]:
    """The shares of the branches of each fork, which add up to 1."""
    found: dict[str, dict[str, float]] = {}
    for row in table:
        fork, _, branch = row.name.partition("/")
        found.setdefault(fork, {})[branch] = row.share
    for shares in found.values():
        known = [share for share in shares.values() if not math.isnan(share)]
        assert not known or abs(sum(known) - 1) < 1e-12
    return found


def forks_of(loss: Tensor, **names: Tensor) -> dict[str, dict[str, float]]:
    return forks(gt.trace(loss, names=names).influence("forks"))


# By hand ------------------------------------------------------------------------------------------


def test_a_residual_sum() -> None:
    x, w = leaf(1, 2, 5), leaf(0.5, 3, 0.25)
    table = gt.trace((x + w * x).sum(), names={"x": x, "w": w}).influence("forks")
    assert table.shares == {"add/skip": 2 / 3, "add/mul of w": 1 / 3}
    assert [(row.through, row.eligible) for row in table] == [(2, 3), (1, 3)]
    gradients = [1.5, 4.0, 1.25]  # 1 + w
    assert table["add/mul of w"].weighted == pytest.approx(4.0 / sum(gradients))
    one, group = (
        gt.trace((x + w * x).sum(), names={"x": x, "w": w}).influence(by)
        for by in ("add/skip", {"s": "add/skip"})
    )
    assert one["add/skip"].share == 2 / 3  # of those that could take another branch
    assert group["s"].share == 2 / 3


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
    (shares,) = forks_of(add(*(x * way for way in ways)).sum(), x=x).values()
    assert sorted(shares.values()) == [0.25, 0.25, 0.5]


def test_a_chain_with_another_user_is_two_forks() -> None:
    x = leaf(1, 2)
    part = x * 2 + x * 3
    assert len(forks_of((part + x * 9 + part.sin()).sum(), x=x)) == 2


@pytest.mark.parametrize("join", [torch.cat, torch.stack])
def test_a_concatenation(join: Callable[[list[Tensor]], Tensor]) -> None:
    x, u = leaf(1, 2, 3), leaf(1, 1, 1)
    both = join([x * torch.tensor([1, 5, 1]), (x * u) * torch.tensor([3, 1, 4])])
    (shares,) = forks_of(both.sum(), x=x, u=u).values()
    assert sorted(shares.values()) == [1 / 3, 2 / 3]


def test_values_used_twice_alone_are_no_choice() -> None:
    x = leaf(1, 2)
    with pytest.raises(UnknownName, match="there is no fork"):
        gt.trace((x * x + 1).sum(), names={"x": x}).influence("forks")


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
    found = traced(Gated(), torch.randn(2, 3)).influence("forks")
    assert list(forks(found)["mul"]) == ["gate", "up"]


def test_arithmetic_within_an_activation_is_left_out() -> None:
    class Swish(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.sigmoid(x) + 0.1 * x**3

    model = nn.Sequential(nn.Linear(3, 4), Swish(), nn.Linear(4, 1))
    trace = traced(model, torch.randn(2, 3))
    with pytest.raises(UnknownName, match="there is no fork"):
        trace.influence("forks")


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
    found = forks(residual(rule).influence("forks"))
    assert sorted(found) == [f"h.{n}.add ({part})" for n in (0, 1) for part in ("attn", "mlp")]
    assert sorted(found["h.1.add (mlp)"]) == ["h.1.mlp", "skip"]
    with pytest.raises(GradtraceError, match=r"did you mean h\.0\.add \(.*\)/skip"):
        residual(rule).influence("h.0.add/skip")


def test_branches_of_one_module_are_told_apart() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inp, self.enc = nn.Linear(2, 6), nn.Linear(2, 3)

        def forward(self, x: Tensor) -> Tensor:
            a, b, c = self.inp(x).split(2, -1)
            return self.enc(a) * 2 + self.enc(b) + nn.functional.pad(c, (0, 1))

    found = traced(Shared(), torch.randn(4, 2)).influence("forks")
    assert [list(shares) for shares in forks(found).values()] == [
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
    found = traced(nn.Sequential(Attention()), torch.randn(2, 5, 4)).influence("forks")
    branches = sorted(sorted(shares) for shares in forks(found).values())
    assert branches == [["0.k", "0.q"], ["0.v", "softmax"]]


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
    found = traced(Recurrent(), torch.randn(6, 2)).influence("forks")
    assert list(forks(found)["cell.add"]) == ["addmm of cell.weight_hh", "addmm of cell.weight_ih"]
    assert found["cell.add/addmm of cell.weight_hh"].eligible > 5  # of all calls


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
    found = traced(Experts(), torch.randn(6, 3)).influence("forks")
    assert set(forks(found)) == {"index_add"}
    assert list(forks(found)["index_add"]) == ["experts.0", "experts.1", "experts.2"]


def test_labelled_heads() -> None:
    x, gains = leaf(1, 2, 3, 4), torch.tensor([1.0, 5, 1, 1], dtype=torch.float64)
    heads = gt.label(torch.stack([x, x * gains, x * 2]), 0, ["head 0", "head 1", None])
    found = forks_of(heads.sum(), x=x)
    assert found["label"] == {"head 0": 0.0, "head 1": 0.25, "(no label)": 0.75}


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
        found = forks(watch.trace(model(torch.arange(4))).influence("forks"))
    assert sorted(found["gru.stack"]) == [f"gru step {n}" for n in range(4)]  # as by="steps"
    assert set(next(iter(found.values()))) == {"rnn", "gru"}


# Random graphs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("seeds", [range(n, n + 20) for n in range(0, thorough.few(80, 2000), 20)])
def test_shares_add_up_and_are_those_of_the_paths(seeds: range) -> None:
    for seed in seeds:
        sample = randomgraphs.build(seed)
        trace = gt.trace(sample.loss, names=sample.leaves)
        try:
            table = trace.influence("forks")
        except UnknownName:
            continue
        forks(table)
        paths = followed(trace)
        for row in table:
            assert row.through == sum(row.name in some for some in paths), (seed, row.name)


def followed(trace: Trace) -> list[set[str]]:
    """Of each path the branches that it takes, of forks at which its leaf has a choice."""
    chosen = chosen_components(trace, "forks")
    every = chosen.counted.components
    found = []
    for pair in range(trace.pairs):
        for leaf in trace.leaves.values():
            drawn = {leaf.value: torch.arange(leaf.tensor.numel())}
            ends = follow_paths(trace, drawn, pair, chosen)
            for at in range(leaf.tensor.numel()):
                bits = ends.provenance.sets[int(ends.provenance.number[at])]
                name = trace.names[leaf.value]
                found.append({b.name for b in every if b.bits & bits and name not in b.owns})
    return found


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
        table, counts = trace.influence("operators"), counts_of(trace, "operators")[0]
        for row in counts.rows:
            mine = [ways[each.value] for each in trace.program.leaves]
            eligible = [some for some in mine if any(row.name in way for way in some)]
            always = all(row.name in way for some in eligible for way in some)
            assert row.alternative is (None if not eligible else not always), (seed, row.name)
            assert (table[row.name].choice == SERIES) == (row.alternative is False)
            if row.alternative is False and row.count.e:
                assert table[row.name].share == 1


# Series -------------------------------------------------------------------------------------------


def test_a_perceptron_is_in_series() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 2))
    table = traced(model, torch.randn(5, 3)).influence()
    assert {row.name for row in table if row.choice == SERIES} == {"1", "2", "3"}
    assert all(row.share == 1 for row in table if row.choice)
    assert "in series: every path" in str(table)


def test_a_module_around_two_branches_is_in_series() -> None:
    table = residual().influence()
    series = {row.name for row in table if row.choice == SERIES}
    assert series == {"h", "h.0", "h.1", "head"} == set(table.names[-4:])


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
    assert [row.name for row in table if row.choice == SERIES] == ["both"]
    assert table["both"].share == 1


def test_information_orders_the_table() -> None:
    x, w = leaf(1, 2, 5), leaf(0.5, 3, 0.25)
    table = gt.trace((x + w * x).sum(), names={"x": x, "w": w}).influence("operators")
    assert table.names[0] == "MulBackward0"
    assert table.sort("component").names[0] == "AddBackward0"
