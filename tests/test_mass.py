"""The mass of paths through components: against the list of all paths, and by hand."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from glob import escape
from math import fsum, isnan, nan
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, in_float64
from arguments import SUMS, arguments
from bruteforce import Path, ScalarGraph
from randomgraphs import Sample, build
from thorough import THOROUGH, few, some
from torch import Tensor, nn

import gradtrace as gt
from gradtrace.errors import GradtraceError, NonFinite, UnknownName
from gradtrace.ir import interpreter
from gradtrace.semirings import Abs
from gradtrace.table import Table
from gradtrace.traced import Trace
from gradtrace.tracing.every_path import every_path

GRAPHS, EACH = few(120, 2000), 40
POWERS = (1.0, 2.0, 8.0)


# Random graphs -----------------------------------------------------------------------------------


def operators_above(graph: ScalarGraph) -> dict[int, set[str]]:
    """For each node the operators on any route of nodes from the root to it, itself included."""
    found: dict[Any, set[str]] = {graph.nodes[0]: set()}
    for number, node in enumerate(graph.nodes):
        mine = found.setdefault(node, set())
        mine.add(graph.operator(number))
        for below, _ in node.next_functions:
            if below is not None:
                found.setdefault(below, set()).update(mine)
    return {n: found[node] for n, node in enumerate(graph.nodes)}


def listed(sample: Sample) -> dict[str, list[Path]]:
    """All paths of each leaf."""
    return {
        name: [p for i in range(leaf.numel()) for p in sample.graph.paths(name, i)]
        for name, leaf in sample.leaves.items()
        if name in sample.graph.starts
    }


def wanted_masses(sample: Sample, paths: dict[str, list[Path]], p: float) -> dict[str, Any]:
    """Operator: (mass through it, eligible mass), path by path."""
    graph = sample.graph
    reach = operators_above(graph)
    found: dict[str, list[float]] = {}
    for name, several in paths.items():
        node = graph.places[graph.starts[name]].node
        everything = fsum(abs(path.weight) ** p for path in several)
        for operator in reach[node] - {"AccumulateGrad"}:
            found.setdefault(operator, [0.0, 0.0])[1] += everything
        for path in several:
            for operator in {graph.operator(edge.consumer) for edge in path.edges}:
                found[operator][0] += abs(path.weight) ** p
    return found


Place = tuple[int, int]
"""An argument: the number of its node, and the position."""


def arguments_above(graph: ScalarGraph) -> dict[int, set[Place]]:
    """For each node the arguments of sums on any route of nodes from the root to it."""
    found: dict[Any, set[Place]] = {graph.nodes[0]: set()}
    for number, node in enumerate(graph.nodes):
        mine = found.setdefault(node, set())
        children = [(at, below) for at, (below, _) in enumerate(node.next_functions) if below]
        joins = graph.operator(number) in SUMS and len(children) > 1
        for at, below in children:
            found.setdefault(below, set()).update(mine, {(number, at)} if joins else ())
    return {n: found[node] for n, node in enumerate(graph.nodes)}


def wanted_arguments(
    sample: Sample, paths: dict[str, list[Path]], p: float
) -> list[tuple[float, float]]:
    """Of every argument of a sum (mass through it, eligible mass), path by path."""
    graph, found = sample.graph, dict[Place, list[float]]()
    reach = arguments_above(graph)
    for name, several in paths.items():
        everything = fsum(abs(path.weight) ** p for path in several)
        for place in reach[graph.places[graph.starts[name]].node]:
            found.setdefault(place, [0.0, 0.0])[1] += everything
        for path in several:
            for edge in path.edges:  # a node is passed once
                if (edge.consumer, edge.position) in found:
                    found[edge.consumer, edge.position][0] += abs(path.weight) ** p
    return [(through, eligible) for through, eligible in found.values()]


def check(seed: int) -> None:
    sample = build(seed)
    trace = gt.trace(sample.loss, names=sample.leaves)
    paths = listed(sample)
    for p in POWERS if THOROUGH else POWERS[seed % 3 :][:1]:
        least = 1e-9 * max(1e-30, sample.graph.largest**p)
        wanted = wanted_masses(sample, paths, p)
        table = trace.mass("operators", p=p)
        for row in table:
            through, eligible = wanted.get(row.name, (0.0, 0.0))  # 0: opened, or no leaf below
            assert row.mass == pytest.approx(through, rel=1e-8, abs=least), (seed, p, row.name)
            assert row.eligible == pytest.approx(eligible, rel=1e-8, abs=least), (seed, row.name)
        total = fsum(abs(path.weight) ** p for several in paths.values() for path in several)
        assert table.about["mass"] == pytest.approx(total, rel=1e-8, abs=least)
        every = arguments(trace)
        if not any(component.bits for component in every.components):  # there is no sum of two
            continue
        found = trace.mass(every, p=p)  # type: ignore[arg-type]
        left = wanted_arguments(sample, paths, p)
        for row in found:
            if row.mass <= least and row.eligible <= least:
                continue
            mine = pytest.approx((row.mass, row.eligible), rel=1e-8, abs=least)
            assert mine in left, (seed, p, row.name)
            left.remove(mine)
        assert all(eligible <= 2 * least for _, eligible in left), (seed, p)


@pytest.mark.parametrize("first", range(0, GRAPHS, EACH))
def test_random_graphs(first: int) -> None:
    for seed in range(first, first + EACH):
        check(seed)


# Modules and labels, against the paths that the trace itself lists --------------------------------


class Branches(nn.Module):
    """``left(z) + right(z)`` of ``z = stem(x)``."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.left, self.right, self.head = (nn.Linear(3, 3) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        z = torch.tanh(self.stem(x))
        return self.head(self.left(z).relu() + self.right(z).sin())


class Residual(nn.Module):
    """``x + f(x)`` twice, with a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.one, self.two = nn.Linear(2, 3), nn.Linear(3, 3), nn.Linear(3, 3)
        self.norm = nn.LayerNorm(3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.one(self.norm(x)).tanh()
        return x + self.two(self.norm(x)).tanh()


class Recurrent(nn.Module):
    """A cell and a gate called at each step, with a way around them."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.cell, self.gate = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.start(x)
        for _ in range(2):
            h = h.sin() + self.gate(self.cell(h).tanh()) * 0.5
        return h


class Tied(nn.Module):
    """The first and the last layer share their weight; the embedding has a way of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mid, self.head = nn.Embedding(3, 2), nn.Linear(2, 2), nn.Linear(2, 3)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(torch.tensor([0, 2]))
        return self.head(h * 0.3 + self.mid(h).tanh()).square()


MODELS = {kind.__name__: kind for kind in (Branches, Residual, Recurrent, Tied)}


def traced(name: str, **options: Any) -> Trace:
    torch.manual_seed(3)
    model = MODELS[name]().double()
    size = 3 if name == "Branches" else 2
    with gt.watch(model) as watch:
        loss = model(torch.randn(2, size, dtype=torch.float64)).square().sum()
    return watch.trace(loss, **options)


def check_listed(trace: Trace, members: dict[str, set[str]], *tables: Table) -> None:
    """Each row against the list of all paths; ``members``: the modules of each component."""
    paths = list(every_path(trace, limit=100_000, zeros=True))
    modules = [frozenset(step.module for step in path.steps[1:]) for path in paths]
    names = {path.name for path in paths}
    everywhere = frozenset[str]().union(*modules)
    for component, mine in members.items():

        def inside(module: str, mine: set[str] = mine) -> bool:
            return any(module == each or module.startswith(each + ".") for each in mine)

        own = {n for n in names if any(map(inside, {n, *trace.aliases.get(n, ())}))}
        there = frozenset(filter(inside, everywhere))
        passes = [not there.isdisjoint(each) for each in modules]
        could = {path.name for path, passed in zip(paths, passes) if passed} - own
        for table in tables:
            masses = [abs(path.weight) ** table.about["p"] * (path.name in could) for path in paths]
            through = sum(mass for mass, passed in zip(masses, passes) if passed)
            found = table[component]
            assert found.mass == pytest.approx(through, rel=1e-9), component
            assert found.eligible == pytest.approx(sum(masses), rel=1e-9), component


@pytest.mark.parametrize("name", MODELS)
def test_modules_are_the_listed_paths(name: str) -> None:
    trace = traced(name)
    tables = [trace.mass(p=p) for p in POWERS]
    assert len({table.names for table in tables}) == 1
    check_listed(trace, {name: {name} for name in tables[0].names}, *tables)


def test_groups_are_counted_once() -> None:
    trace = traced("Recurrent")
    groups = {"both": ["cell", "gate"], "cell": "cell", "all": ["start", "cell", "gate"]}
    members = {"both": {"cell", "gate"}, "cell": {"cell"}, "all": {"start", "cell", "gate"}}
    table = trace.mass(groups)
    check_listed(trace, members, table)
    assert 0 < table.shares["cell"] < 1


def test_branches_that_exhaust_the_paths_add_up_to_one() -> None:
    table = traced("Branches").mass(["left", "right"])
    assert sum(table.shares.values()) == pytest.approx(1, abs=1e-12)
    both = traced("Branches").mass({"both": ["left", "right"], "stem": "stem"})
    assert both.shares["both"] == 1  # exactly: every path takes one of them
    assert isnan(both.shares["stem"])


class Nested(nn.Module):
    """A residual block on a leaf, and a cell that paths come back to, with ways around both."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.inner(x).tanh()

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.randn(2, 2))
        self.block, self.cell = self.Block(), nn.Linear(2, 2)

    def forward(self) -> Tensor:
        h = self.block(self.x)
        for _ in range(2):
            h = h.sin() + self.cell(h).exp()
        return self.x.cos() * h  # in backward order: the block's users of x are added up first


@pytest.mark.parametrize("p", POWERS)
def test_components_together_are_those_of_each_alone(p: float) -> None:
    """The entries of one are values that another need not keep."""
    torch.manual_seed(0)
    model = Nested().double()
    with gt.watch(model) as watch:
        loss = model().sum()
    trace, names = watch.trace(loss), ["block", "cell", "block.inner"]
    table = trace.mass(names, p=p)
    check_listed(trace, {name: {name} for name in names}, table)
    for name in names:
        alone = trace.mass([name], p=p)[name]
        assert table[name].mass == pytest.approx(alone.mass, rel=1e-12)
        assert table[name].eligible == pytest.approx(alone.eligible, rel=1e-12)


def test_labels() -> None:
    """Slices, of which some have no name and two have one; the name is in two tensors."""
    torch.manual_seed(1)
    w, v = (torch.randn(4, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    names = ["a", "b", None, "a"]
    h = gt.label(torch.randn(2, 4, dtype=torch.float64) @ w, 1, names).tanh()
    loss = (gt.label(h @ v, 1, ["b", "a", "c", None]) + h).square().sum()
    trace = gt.trace(loss, names={"w": w, "v": v})
    labels = {0: names, 1: ["b", "a", "c", None]}
    wanted, total = dict.fromkeys("abc", 0.0), 0.0
    for path in every_path(trace):
        total += abs(path.weight)
        steps = [step for step in path.steps if step.operator == "LabelBackward"]
        which = [0, 1] if len(steps) == 2 else [0 if path.name == "w" else 1]
        met = {labels[n][step.index[1]] for n, step in zip(which, steps)}
        for name in met - {None}:
            wanted[str(name)] += abs(path.weight)
    table = trace.mass("labels")
    assert {row.name: row.mass for row in table} == pytest.approx(wanted, rel=1e-12)
    assert table["a"].eligible == pytest.approx(total, rel=1e-12)


class Experts(nn.Module):
    """Two experts of two products each, their weights stacked."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 2
        self.up, self.down = (nn.Parameter(torch.randn(2, 2, 2)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(torch.bmm(x.expand(2, -1, -1), self.up).tanh(), self.down)


class Mixture(nn.Module):
    """Experts, and a gate that passes by them."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.stem, self.gate = Experts(), nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return (self.mlp(x) * self.gate(x).T.unsqueeze(-1)).sum(0)


def test_slices_of_a_component_with_leaves_of_its_own() -> None:
    torch.manual_seed(2)
    model = Mixture().double()
    with gt.watch(model) as watch:
        loss = model(torch.randn(2, 2, dtype=torch.float64)).square().sum()
    trace = watch.trace(loss)
    groups = {"first": ["expert:mlp expert 0"], "both": ["expert:mlp expert 0", "gate"]}
    wanted, eligible = dict.fromkeys(groups, 0.0), 0.0
    for path in every_path(trace):
        if not path.name.startswith("stem."):  # all others are the groups' own, or lead by them
            continue
        first = any(s.operator == "BmmBackward0" and s.index[0] == 0 for s in path.steps)
        eligible += abs(path.weight)
        wanted["first"] += abs(path.weight) * first
        wanted["both"] += abs(path.weight) * (first or "gate" in path.modules)
    table = trace.mass(groups)
    assert {row.name: row.mass for row in table} == pytest.approx(wanted, rel=1e-9)
    assert [row.eligible for row in table] == pytest.approx([eligible, eligible], rel=1e-9)


# By hand -----------------------------------------------------------------------------------------


def test_by_hand() -> None:
    """``loss = 3a·b + 4a``: of a, one path of mass |3b| and one of 4; of b one of |3a|."""
    a, b = (torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (2.0, -5.0))
    trace = gt.trace((3 * a) * b + 4 * a, names={"a": a, "b": b})
    table = trace.mass(arguments(trace))  # type: ignore[arg-type]
    assert [(row.mass, row.eligible) for row in table] == [(15.0 + 6.0, 25.0), (4.0, 19.0)]
    assert table.about["mass"] == 25.0
    assert table.about["cancellation"] == 25 / (abs(-15 + 4) + 6)
    square = trace.mass(arguments(trace), p=2)  # type: ignore[arg-type]
    assert [row.mass for row in square] == [225.0 + 36.0, 16.0]
    assert "cancellation" not in square.about


def test_the_total_is_that_of_the_semiring() -> None:
    trace = traced("Residual")
    for p in (1.0, 3.0):
        found = interpreter.run(trace.program, Abs(p=p)).values()
        wanted = sum(float(part.sum()) for part in found)
        assert trace.mass(p=p).about["mass"] == pytest.approx(wanted, rel=1e-12)


def test_deep_graphs_do_not_leave_the_range() -> None:
    x = torch.full((2,), 0.5, requires_grad=True)
    y = x
    for _ in range(300):
        y = y * 1e-3 + y * 1e-3
    trace = gt.trace(y.sum(), names={"x": x})
    table = trace.mass(arguments(trace))  # type: ignore[arg-type]
    assert table.about["mass"] == 0  # below the range of floats
    assert list(table.shares.values()) == pytest.approx([0.5] * 600, rel=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_large_powers_tend_to_viterbi(name: str) -> None:
    """Shares tend to those of the best paths of all elements, each weighed by |weight|**p."""
    trace, p = traced(name, rule="viterbi"), 64
    paths, table = trace.paths(sample=10**6), trace.mass(p=p)
    every = every_path(trace, limit=100_000)
    seen = {(path.name, step.module) for path in every for step in path.steps[1:]}
    passed = {(p.name, p.index): {step.module for step in p.steps[1:]} for p in paths}
    for row in table:
        if isnan(row.share):
            continue
        could = {leaf for leaf, module in seen if module == row.name}
        own = {n for n in could if row.name in (n.split(".")[0], *_first(trace, n))}
        best = [path for path in paths if path.name in could - own]
        masses = [abs(path.weight) ** p for path in best]
        inside = [row.name in passed[path.name, path.index] for path in best]
        wanted = sum(m for m, there in zip(masses, inside) if there) / sum(masses)
        assert row.share == pytest.approx(wanted, abs=1e-3), row.name
    heaviest = max(abs(path.weight) for path in paths)
    assert table.about["mass"] ** (1 / p) == pytest.approx(heaviest, rel=0.03)


def _first(trace: Trace, name: str) -> list[str]:
    return [other.split(".")[0] for other in trace.aliases.get(name, ())]


# Several losses ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_pairs_are_added(name: str) -> None:
    """A vector of losses gives the table that those of its losses give together."""
    torch.manual_seed(0)
    model = MODELS[name]().double()
    x = torch.randn(2, 3 if name == "Branches" else 2, dtype=torch.float64)
    with gt.watch(model) as watch:
        losses = model(x).square().sum(1)
    table = watch.trace(losses).mass()
    first, second = (watch.trace(loss).mass() for loss in losses)
    both = Table.total([first, second])
    assert (table.about["losses"], both.about["losses"]) == (2, 2)
    for row, other in zip(table, both):
        assert (row.mass, row.eligible) == pytest.approx((other.mass, other.eligible), rel=1e-12)
    assert table.errors == pytest.approx(both.errors, rel=1e-9, nan_ok=True)
    assert "2 losses" in str(table) and "± share" in str(table)
    with pytest.raises(GradtraceError, match="cannot be added"):
        Table.total([first, watch.trace(losses[1]).mass(p=2)])


# Errors ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [0, -1.0, nan, "2", None, True])
def test_powers_that_are_none(p: Any) -> None:
    with pytest.raises(GradtraceError, match="p is a positive number, not"):
        traced("Residual").mass(p=p)


def test_infinite_power_is_viterbi() -> None:
    with pytest.raises(GradtraceError, match="rule='viterbi'"):
        traced("Residual").mass(p=float("inf"))
    with pytest.raises(GradtraceError, match=r"at most 1,000,000.*rule='viterbi'"):
        traced("Residual").mass(p=1e308)


def test_unknown_components() -> None:
    with pytest.raises(UnknownName, match=r"'onee'.*did you mean one"):
        traced("Residual").mass(["onee"])


def test_what_is_not_finite() -> None:
    x = torch.tensor([0.0, 1.0], requires_grad=True)
    trace = gt.trace((x.sqrt() * 2).sum(), names={"x": x}, nonfinite="allow")
    with pytest.raises(NonFinite, match="mass of paths is not finite"):
        trace.mass("operators")


def test_changed_weights_are_refused() -> None:
    x = torch.ones(2, requires_grad=True)
    trace = gt.trace((x * x).sum(), names={"x": x})
    with torch.no_grad():
        x.mul_(2)
    with pytest.raises(GradtraceError, match="changed in place"):
        trace.mass()


# Other inputs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_other_precisions(dtype: torch.dtype) -> None:
    """Masses are computed at least in single precision, so shares are those of the weights."""
    torch.manual_seed(3)
    model = Branches().to(dtype)
    with gt.watch(model) as watch:
        loss = model(torch.randn(2, 3, dtype=dtype)).square().sum()
    trace = watch.trace(loss)
    for p in POWERS:
        table = trace.mass(["left", "right"], p=p)
        assert sum(table.shares.values()) == pytest.approx(1, abs=1e-5)


def test_complex_numbers_are_pairs() -> None:
    parts = torch.tensor([[1.0, 2.0], [3.0, -1.0]], dtype=torch.float64, requires_grad=True)
    z = torch.view_as_complex(parts)
    w = (z * (2 - 1j)).exp() * z
    trace = gt.trace((w.real + w.imag.sin()).sum(), names={"parts": parts})
    table, paths = trace.mass("operators"), every_path(trace)
    assert table.about["mass"] == pytest.approx(sum(abs(path.weight) for path in paths))
    exp = sum(abs(path.weight) for path in paths if "ExpBackward0" in path.operators)
    assert table["ExpBackward0"].mass == pytest.approx(exp)


def test_in_place_views_and_scalars() -> None:
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    s = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    y = x.clone()
    y[1:].mul_(s)
    y[:, 0] = y[:, 1] + s
    trace = gt.trace((y.t().reshape(-1).cumsum(0) * s).sum(), names={"x": x, "s": s})
    wanted: dict[str, float] = {}
    total = 0.0
    for path in every_path(trace, limit=100_000):
        total += abs(path.weight)
        for operator in set(path.operators):
            wanted[operator] = wanted.get(operator, 0.0) + abs(path.weight)
    table = trace.mass("operators")
    assert table.about["mass"] == pytest.approx(total)
    for row in table:
        assert row.mass == pytest.approx(wanted.get(row.name, 0.0), rel=1e-9), row.name


def test_no_gradient_at_all() -> None:
    """All weights are 0: there is no mass to divide."""
    x = torch.ones(2, requires_grad=True)
    table = gt.trace((x * 0).sum(), names={"x": x}).mass("operators")
    assert table.about["mass"] == 0 and all(isnan(share) for share in table.shares.values())
    assert "–" in str(table)


@pytest.mark.parametrize("scale", [None, 2.0])
@pytest.mark.parametrize("p", [1, 2, 20])
@pytest.mark.parametrize(
    "masked",
    [
        lambda x: x.std(),
        lambda x: x.reshape(2, 2).norm(p=3, dim=1).sum(),
        lambda x: torch.sinc(x).sum(),
    ],
    ids=["std", "norm", "sinc"],
)
def test_formulas_that_divide_by_zero_and_mask_it(
    masked: Callable[[Tensor], Tensor], p: float, scale: float | None
) -> None:
    """Their weights are infinite where no path goes on; autograd's gradient is that of sin."""
    x = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    h = x if scale is None else x * scale
    trace = gt.trace(masked(h) + (h.sin() * 3).sum(), names={"x": x})
    weight = 3 * (scale or 1.0)
    table = trace.mass("operators", p=p)
    assert table.about["mass"] == pytest.approx(4 * weight**p)
    assert table.shares["SinBackward0"] == 1
    assert p != 1 or table.about["cancellation"] == 1


def test_recurrent_layers_called_many_times() -> None:
    """Every mixed entry of a cell in a long sequence; a class is all of its modules."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"cell": nn.GRUCell(2, 3), "out": nn.Linear(3, 1)}).double()
    with gt.watch(model) as watch:
        h = torch.zeros(1, 3, dtype=torch.float64)
        for _ in range(6):
            h = 0.5 * h + model["cell"](torch.ones(1, 2, dtype=torch.float64), h)
        loss = model["out"](h).sum()
    trace = watch.trace(loss)
    table = trace.mass({"out": "out", "add": "operator:AddBackward0", "cell": "cell"})
    assert table.shares["out"] == 1
    assert 0 < table.shares["add"] <= 1
    assert isnan(table.shares["cell"])  # all leaves above it belong to out


@pytest.mark.parametrize("name", some(ARCHITECTURES, 4))
def test_architectures(name: str) -> None:
    """The arguments of a sum have together the mass of all that comes through it. Where every path
    of a leaf that can come through it does, that is all of its mass.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, loss_of = in_float64(name)
        torch.manual_seed(0)
        with gt.watch(model) as watch:
            loss = loss_of(model)
    trace, sums = watch.trace(loss), dict[str, list[str]]()
    for each in arguments(trace).components:
        sums.setdefault(each.name.partition("[")[0], []).append(each.name)
    sums = dict(list(sums.items())[-4:])
    groups = {name: f"{escape(name)}[[]*" for name in sums}
    groups |= {name: escape(name) for some_ in sums.values() for name in some_}
    chosen = arguments(trace, groups)
    series = {row.name for row in trace.influence(chosen) if row.choice == "in series"}  # type: ignore[arg-type]
    for p in POWERS:
        table = trace.mass(chosen, p=p)  # type: ignore[arg-type]
        for name, mine in sums.items():
            total = sum(table[argument].mass for argument in mine)
            assert total == pytest.approx(table[name].mass, rel=1e-12)
            assert table[name].share == 1 if name in series else 0 < table[name].share < 1
    found = interpreter.run(trace.program, Abs()).values()
    wanted = sum(float(part.sum()) for part in found)
    assert trace.mass().about["mass"] == pytest.approx(wanted, rel=1e-12)
    for share in trace.mass("operators").shares.values():
        assert isnan(share) or 0 <= share <= 1


def test_it_prints() -> None:
    table = traced("Residual").mass()
    assert str(table).startswith("Mass of paths (p = 1)\ncomponent")
    assert list(table.to_pandas()["component"]) == list(table.names)
    assert "<table" in table._repr_html_()
    assert len(table) == 4 and table["one"].share == table.shares["one"]
    with pytest.raises(UnknownName, match="no row 'three'"):
        table["three"]


def branches(scale: float = 1.0, dtype: torch.dtype = torch.float64) -> gt.Trace:
    """A leaf with two ways to the loss, along weights of this size."""
    x, a, b = (torch.tensor([v, 2 * v], dtype=dtype, requires_grad=True) for v in (1.0, 3.0, 4.0))
    loss = (x * (a.detach() * scale) + x * (b.detach() * -scale)).sum()
    return gt.trace(loss, names={"x": x})


@pytest.mark.parametrize("scale", [1e-100, 1e100])
def test_powers_of_weights_that_leave_the_range_of_floats(scale: float) -> None:
    """|1e-100|**8 is 0 as a float, and |1e100|**8 infinite: such masses are logarithms."""
    shares = branches(scale).mass("forks", p=8).shares
    assert list(shares.values()) == pytest.approx([3**8 / (3**8 + 4**8), 4**8 / (3**8 + 4**8)])
    assert sum(shares.values()) == pytest.approx(1, abs=1e-9)


def test_nothing_is_compared_with_gradients_that_are_none() -> None:
    """The table says in words why, whatever is wrong with the gradient."""
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    cancelled = gt.trace((x * 3 - x * 3).sum(), names={"x": x})
    table = cancelled.mass("forks")
    assert isnan(table.about["cancellation"]) and "the gradient is 0: all paths cancel" in str(
        table
    )
    dead = gt.trace((x * 0).sum(), names={"x": x}).mass("operators")
    assert "the gradient is 0: no path has a weight other than 0" in str(dead)
    broken = gt.trace((x + (x * 0).sqrt()).sum(), names={"x": x}, nonfinite="allow")
    table = broken.mass("forks")
    assert isnan(table.about["cancellation"])
    assert "some gradients are NaN or infinite" in str(table)


def test_half_precision_gradients_are_summed_in_single() -> None:
    """Σ |gradient| of these is above the largest float16."""
    x = torch.ones(300, dtype=torch.float16, requires_grad=True)
    trace = gt.trace((x * 300).float().sum(), names={"x": x})
    assert trace.mass("operators").about["cancellation"] == 1
