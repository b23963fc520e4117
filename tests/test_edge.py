"""The rule ``edge``: by hand, against brute force, and the same along all ways to ask for it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import results
import torch
from bruteforce import ScalarGraph
from leaves import traced_leaves, with_ids
from randomgraphs import build
from thorough import THOROUGH, few
from torch import Tensor, nn

import gradtrace as gt
from gradtrace.errors import GradtraceError, UnknownName
from gradtrace.ir.passes.provenance import ComponentBits
from gradtrace.ir.plan import Storage
from gradtrace.paths.paths import path_provenance
from gradtrace.recording import gradients
from gradtrace.table import Table
from gradtrace.traced import Trace
from gradtrace.tracing.counting import chosen_components, counted_sample
from gradtrace.tracing.coverage import PATH_RULES

GRAPHS, EACH = few(100, 2000), 50


def leaf(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def first(loss: Tensor, x: Tensor, rule: str = "edge", index: int | tuple[int, ...] = 0) -> str:
    return gt.trace(loss, names={"x": x}, rule=rule).path("x", index).operators[0]


# By hand ------------------------------------------------------------------------------------------


def test_all_three_rules_differ() -> None:
    """X is handed 1 + 1 + 1 by expand, 2 by mul, and -5 + 4 by neg."""
    x = torch.tensor(1.0, requires_grad=True)
    y = -x
    loss = x.expand(3).sum() + 2 * x + (5 * y - 4 * y)
    graph = ScalarGraph.of(loss, {"x": x})
    wanted = {"greedy": ("Expand", 1.0), "edge": ("Mul", 2.0), "viterbi": ("Neg", -5.0)}
    for rule, (operator, weight) in wanted.items():
        trace = gt.trace(loss, rule=rule, names={"x": x})
        path = trace.path("x")
        assert (path.operators[0], path.weight) == (f"{operator}Backward0", weight)
        through = {name for name, share in trace.influence("operators").shares.items() if share}
        assert f"operator:{operator}Backward0" in through or f"{operator}Backward0" in through
        alone = getattr(graph, rule)("x", 0)
        assert alone.weight == weight


def test_a_sum_of_small_contributions_loses_to_one_edge() -> None:
    """The product hands back 1 + 1 + 1, and its largest edge is 1; the scaling hands back 2."""
    x = leaf(1.0, 2.0)[None].detach().requires_grad_()
    weight = torch.ones(2, 3, dtype=torch.float64)
    loss = (x @ weight).sum() + (2 * x).sum()
    assert first(loss, x, "greedy", (0, 0)) == "MmBackward0"
    assert first(loss, x, "edge", (0, 0)) == "MulBackward0"


def test_contributions_that_cancel_are_edges_all_the_same() -> None:
    """The product hands back 3 - 3 = 0, so greedy does not see it; its edges are 3, more than 2."""
    x = torch.ones(1, 1, dtype=torch.float64, requires_grad=True)
    weight = torch.tensor([[3.0, -3.0]], dtype=torch.float64)
    loss = (x @ weight).sum() + (2 * x).sum()
    assert first(loss, x, "greedy", (0, 0)) == "MulBackward0"
    assert first(loss, x, "edge", (0, 0)) == "MmBackward0"
    trace = gt.trace(loss, names={"x": x}, rule="edge")
    assert trace.influence("operators").shares[mm(trace)] == 1


def mm(trace: Trace) -> str:
    """What the component of the matrix product is called."""
    names = trace.influence("operators").shares
    return next(name for name in names if "MmBackward0" in name)


@pytest.mark.parametrize("users", [1, 2, 3])
def test_elements_whose_users_all_cancel_have_a_path(users: int) -> None:
    """Uniform provenance: nothing is compared, but whether there is a path is known."""
    x = torch.ones(1, 2, dtype=torch.float64, requires_grad=True)
    weight = torch.tensor([[3.0, -3.0], [1.0, 2.0]], dtype=torch.float64)
    loss = torch.stack([(x @ weight).sum() for _ in range(users)]).sum()
    for rule, reached in (("edge", 2), ("greedy", 2 if users == 1 else 1)):
        trace = gt.trace(loss, names={"x": x}, rule=rule)
        consistent(trace, {0: 2})
        row = trace.influence("operators")[mm(trace)]
        assert (row.through, row.unreached) == (reached, 2 - reached)


@pytest.mark.parametrize("scale", [0.0, 1.0])
def test_users_that_cancel_hand_back_nothing_by_greedy(scale: float) -> None:
    """The product hands back 3 - 3, and the other user 0 or 1; they are different components."""
    x = torch.ones(1, 1, dtype=torch.float64, requires_grad=True)
    weight = torch.tensor([[3.0, -3.0]], dtype=torch.float64)
    loss = (x.exp() * scale / math.e).sum() + (x @ weight).sum()
    for rule, paths in (("greedy", scale), ("edge", 1)):
        trace = gt.trace(loss, names={"x": x}, rule=rule)
        consistent(trace, components(len(trace.program.blocks), 0))
        row = trace.influence("operators")[mm(trace)]
        assert (row.eligible, row.unreached) == (paths, 1 - paths)


def test_ties_go_to_the_first_term_then_to_the_lowest_element() -> None:
    x = leaf(1.0)
    loss = (x.expand(3) * 2).sum() + (x.expand(2) * 2).sum()
    graph, trace = ScalarGraph.of(loss, {"x": x}), gt.trace(loss, names={"x": x}, rule="edge")
    path = trace.path("x", 0)
    wanted = graph.edge("x", 0)
    assert wanted is not None and graph.places[wanted.edges[0].above].element == 0
    program = trace.program
    user = next(block for block in program.blocks if block.operator == "ExpandBackward0")
    shape = program.maps[user.steps[0].terms[0].map].in_shape
    assert (path.steps[1].shape, path.steps[1].index) == (shape, (0,))


def test_size_starts_again_in_every_operator() -> None:
    """The product's 1 + 1 + 1 is one edge of weight 1 for the permutation after it, of size 3."""
    x = leaf(1.0)
    loss = (x.reshape(1, 1).t() @ torch.ones(1, 3, dtype=torch.float64)).sum() + (2 * x).sum()
    assert first(loss, x) == "ReshapeAliasBackward0" or first(loss, x) == "ViewBackward0"


@pytest.mark.parametrize("rule", ["greedy", "edge", "viterbi"])
def test_only_edge_depends_on_views(rule: str) -> None:
    """As docs/tracing.md says: a linear layer of a 3-d tensor begins with a view, which is handed
    the sum; of a matrix it begins with the product itself.
    """
    torch.manual_seed(1)
    model = Branches().double()
    x = torch.randn(16, 8, dtype=torch.float64)
    shares = []
    for given in (x, x.view(2, 8, 8)):
        with gt.watch(model) as watch:
            loss = model(given).square().mean()
        shares.append(watch.trace(loss, rule=rule).influence(["one", "two"]).shares)
    assert (shares[0] == shares[1]) == (rule != "edge")


class Branches(nn.Module):
    """Two linear layers side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.one, self.two = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.stem(x))
        return torch.tanh(self.one(h)) + torch.relu(self.two(h))


def test_no_path_where_all_is_zero() -> None:
    x = leaf(1.0, 1.0)
    loss = (x * torch.tensor([0.0, 1.0])).sum() + (x * 0).sum()
    trace = gt.trace(loss, names={"x": x}, rule="edge")
    with pytest.raises(GradtraceError, match="no path"):
        trace.path("x", 0)
    consistent(trace, {0: 2})


# Influence is that of the paths ------------------------------------------------------------------


def consistent(trace: Trace, entered: dict[int, int], storage: Storage | None = None) -> None:
    """The provenance of every element of every leaf is that of its path, followed by itself."""
    program, bits = trace.program, ComponentBits(entered, {}, {})
    given = () if storage is None else (storage,)
    with torch.no_grad():
        found = {f.leaf.value: f for f in traced_leaves(program, trace.rule, bits, *given)}
    leaves = [leaf for leaf in program.leaves if not leaf.tensor.is_complex()]
    starts = {leaf.value: torch.arange(leaf.tensor.numel()) for leaf in leaves}
    forest = trace.builder(0).follower.follow(starts, trace.rule)
    wanted, at = path_provenance(forest, program, bits), 0
    for value, elements in starts.items():
        state = found[value].state._replace(value=found[value].gradient)
        state = with_ids(state)
        assert state.ids is not None
        sets = state.provenance.sets()
        mine = [sets[number] for number in state.ids.reshape(-1).tolist()]
        theirs = [wanted.sets[n] for n in wanted.number[at : at + len(elements)].tolist()]
        at += len(elements)
        assert mine == [one if one & 1 else 0 for one in theirs], trace.names[value]


def components(count: int, kind: int) -> dict[int, int]:
    """Bits of blocks: each its own, groups of three, or few."""
    if kind == 0:
        return {n: 2 << n for n in range(count)}
    if kind == 1:
        return {n: 2 << n // 3 for n in range(count)}
    return {n: 2 for n in range(count) if n % 4 == kind % 4}


@pytest.mark.parametrize("seed", range(0, GRAPHS, EACH))
def test_provenance_is_that_of_the_path(seed: int) -> None:
    """Random graphs; ``against_bruteforce.check`` compares the paths with all paths."""
    for number in range(seed, seed + EACH):
        sample = build(number)
        for rule in PATH_RULES if THOROUGH or number % 5 == 0 else ("edge",):
            trace = gt.trace(sample.loss, names=sample.leaves, rule=rule)
            consistent(trace, components(len(trace.program.blocks), number % 3))


class Recurrent(nn.Module):
    """A cell that is called again and again, beside a way past it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 4)
        self.cell, self.skip, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4)
        self.out = nn.Linear(4, 40, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for _ in range(3):
            x = x + torch.tanh(self.cell(self.norm(x))) * self.skip(x)
        logits: Tensor = self.out(x)
        return logits


class Gates(nn.Module):
    """A fused recurrent layer, whose steps count as operators."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.other = nn.LSTM(3, 4, batch_first=True), nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return (self.rnn(x)[0] + self.other(x)).pow(2)


def recurrent(dtype: torch.dtype) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Recurrent().to(dtype), torch.randint(0, 40, (4, 3))


def gates(dtype: torch.dtype) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Gates().to(dtype), torch.randn(4, 5, 3, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", [recurrent, gates])
@pytest.mark.parametrize("storage", [None, Storage(compact=True)])
def test_models(
    case: Callable[[torch.dtype], tuple[nn.Module, Tensor]],
    dtype: torch.dtype,
    storage: Storage | None,
) -> None:
    """Tied weights with few rows, residuals, a cell called many times, fused layers."""
    model, x = case(dtype)
    with gt.watch(model) as watch:
        loss = model(x).square().mean()
    trace = watch.trace(loss, rule="edge")
    for kind in range(3):
        consistent(trace, components(len(trace.program.blocks), kind), storage)


def test_without_names_the_gradient_is_asked_for_before() -> None:
    """A leaf whose gradient is known is not computed again."""
    model, x = recurrent(torch.float32)
    with gt.watch(model) as watch:
        loss = model(x).square().mean()
    trace, other = (watch.trace(loss, rule="edge") for _ in range(2))
    assert dict(other.gradients)
    assert trace.influence() == other.influence()


@pytest.mark.parametrize("case", [recurrent, gates])
def test_pairs_are_each_loss_alone(
    case: Callable[[torch.dtype], tuple[nn.Module, Tensor]],
) -> None:
    model, x = case(torch.float64)
    with gt.watch(model) as watch:
        losses = model(x).square().flatten(1).mean(1)
        trace = watch.trace(losses, rule="edge")
    alone = []
    for n in range(len(x)):
        with gt.watch(model) as watch:
            alone.append(watch.trace(model(x[n : n + 1]).square().mean(), rule="edge").influence())
    assert counts(trace.influence()) == counts(Table.total(alone))


def counts(table: Table) -> dict[str, tuple[int, int, int]]:
    return {row.name: (row.through, row.eligible, row.unreached) for row in table}


def followed(trace: Trace) -> dict[str, tuple[int, int, int]]:
    """The counts of all elements, whose paths are followed one by one."""
    rows = counted_sample(trace, chosen_components(trace, "modules"), 10**6).rows
    return {row.name: (int(row.count.t), int(row.count.e), row.unreached) for row in rows}


def test_a_sample_of_all_is_the_table() -> None:
    model, x = recurrent(torch.float64)
    with gt.watch(model) as watch:
        trace = watch.trace(model(x).square().mean(), rule="edge")
    assert counts(trace.influence()) == followed(trace)


def test_paths_within_a_budget() -> None:
    model, x = recurrent(torch.float64)
    with gt.watch(model) as watch:
        trace = watch.trace(model(x).square().mean(), rule="edge")
    wanted = [path.steps for path in trace.paths(sample=50)]
    again = copy.copy(trace)
    again.budget, again._followers = 10_000, {}
    assert [path.steps for path in again.paths(sample=50)] == wanted


def test_complex() -> None:
    x = leaf(1.0, 3.0)
    y = torch.complex(x, 2 * x)
    matrix = torch.tensor([[1 + 1j, 2.0], [0.5j, 1.0]], dtype=y.dtype)
    loss = (matrix @ y).abs().sum() + (2 * y).abs().sum()
    trace = gt.trace(loss, names={"x": x}, rule="edge")
    consistent(trace, components(len(trace.program.blocks), 0))


# Sizes, by their definition ----------------------------------------------------------------------


def defined_sizes(trace: Trace) -> dict[int, list[Tensor]]:
    """For each term of every step the largest single contribution to each element: MAX over all
    entries of the Jacobians of a block's steps, started at |gradient| of what the block takes. In a
    decomposed block each step starts again. For sums over users, those of their terms.
    """
    gradients, maps = trace.builder(0).follower.gradients, trace.program.maps
    found: dict[int, list[Tensor]] = {}
    whole: dict[int, Tensor] = {}
    for block in trace.program.blocks:
        inner: dict[int, Tensor] = {}
        for step in block.steps:
            found[step.out] = []
            for at, value in step.terms:
                x = gradients[value].reshape(-1).abs().double()
                x = x if block.opened else inner.get(value, x)
                rows = maps[at].rows(torch.arange(maps[at].outputs))
                entries = rows.weight.expand(rows.source.shape).double().abs()
                entries = entries * torch.where(rows.source < 0, 0, x[rows.source.clamp(min=0)])
                entries = torch.cat([entries, entries.new_zeros(len(entries), 1)], 1)
                found[step.out].append(entries.amax(1))
            whole[step.out] = inner[step.out] = torch.stack(found[step.out]).amax(0)
        for step in block.merges:
            first, second = (term.value for term in step.terms)
            terms = found[first] if first not in whole else [whole[first]]
            found[step.out] = [*terms, whole[second]]
    return found


@torch.no_grad()  # as all that follows paths
def sizes_are_defined(trace: Trace) -> int:
    """Compare the sizes by which terms are compared; how many values have several."""
    follower, wanted = trace.builder(0).follower, defined_sizes(trace)
    several = {
        out: terms
        for out, terms in follower.makers.items()
        if len(terms) > 1 and out not in follower.nested
    }
    for out, terms in several.items():
        offers = follower.edges.offers(out, torch.arange(terms[0].map.outputs))
        for offer, size in zip(offers, wanted[out], strict=True):
            torch.testing.assert_close(offer.value.double(), size, rtol=1e-5, atol=1e-12)
    return len(several)


def test_sizes_of_random_graphs() -> None:
    merges = 0
    for number in range(few(60, 600)):
        sample = build(number)
        merges += sizes_are_defined(gt.trace(sample.loss, names=sample.leaves, rule="edge"))
    assert merges > 30


@pytest.mark.parametrize("seed", range(4))
def test_the_steps_of_a_fused_layer_are_operators(seed: int) -> None:
    torch.manual_seed(seed)
    model, x = nn.LSTM(3, 6, batch_first=True), torch.randn(2, 3, 3, requires_grad=True)
    out, (last, cell) = model(x)
    weight = torch.randn_like(out)
    loss = (weight * out).sum() + (0.5 * cell).sum() + last.exp().sum() + (0.1 * x).sum()
    trace = gt.trace(loss, names={"x": x, **dict(model.named_parameters())}, rule="edge")
    assert any(block.opened for block in trace.program.blocks)
    assert sizes_are_defined(trace) > 10
    consistent(trace, components(len(trace.program.blocks), 0))


class Formula(torch.autograd.Function):
    """A function of two arguments with a given backward formula, of the cotangent and a matrix."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, matrix: Tensor, kind: str) -> Tensor:
        ctx.matrix, ctx.kind = matrix, kind
        return (x + y) @ matrix

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *FORMULAS[ctx.kind](grads[0], ctx.matrix.T), None, None


FORMULAS: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "scaled after the sum": lambda g, m: (2 * (g @ m), (g @ m) * 0.5),
    "one sum for two": lambda g, m: (s := g @ m, s.view(s.shape)),
    "turned": lambda g, m: ((m.T @ g.T).T.flip(0).flip(0), g @ m),
    "sums of sums": lambda g, m: (g @ m + g.flip(0) @ (m + 1), g @ m),
    "joined": lambda g, m: (torch.cat([g[:1] @ m, g[1:] @ (2 * m)]), g @ m),
}


@pytest.mark.parametrize("kind", FORMULAS)
@pytest.mark.parametrize("beside", [None, 0.0, 1.0])
def test_formulas(kind: str, beside: float | None) -> None:
    """Contributions of ±3, ±1, ... that partly cancel, beside no users or such that hand back 2
    or 0.
    """
    x, y = (torch.ones(2, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    matrix = torch.tensor([[3.0, -3.0, 1.0], [1.0, 1.0, 1.0], [2.0, -1.0, -1.0]]).double()
    out = Formula.apply(x, y, matrix, kind)  # type: ignore[no-untyped-call]
    loss = out.sum()
    if beside is not None:
        loss = 2 * beside * x.sum() + (3 * beside * y).sum() + loss
    leaves = {"x": x, "y": y}
    trace = gt.trace(loss, names=leaves, rule="edge")
    graph = ScalarGraph.of(loss, leaves)
    sizes_are_defined(trace)
    for kinds in range(2):
        consistent(trace, components(len(trace.program.blocks), kinds))
    found = {(path.name, path.index): path for path in trace.paths(sample=99)}
    for name in leaves:
        for number in range(6):
            wanted = graph.edge(name, number)
            assert wanted is not None
            path = found[name, divmod(number, 3)]
            assert path.operators[0] == graph.operator(wanted.edges[0].consumer).split("::")[-1]
            assert path.weight == pytest.approx(wanted.weight)


class Two(torch.autograd.Function):
    """Two products of one argument: what it gets back is a sum of two sums."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *matrices: Tensor) -> tuple[Tensor, Tensor]:
        ctx.one, ctx.two = matrices
        return x @ ctx.one, x @ ctx.two

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0] @ ctx.one.T + grads[1] @ ctx.two.T, None, None


@pytest.mark.parametrize("inner", [False, True])
def test_sums_of_sums_beside_another_user(inner: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 9, dtype=torch.float64, requires_grad=True)
    one, two = (torch.randn(9, 6, dtype=torch.float64) for _ in range(2))
    h = x.exp() if inner else x
    first, second = Two.apply(h, one, two)  # type: ignore[no-untyped-call]
    loss = (1.5 * h).sum() + first.sum() + second.square().sum() / 9
    trace = gt.trace(loss, names={"x": x}, rule="edge")
    assert trace.builder(0).follower.nested
    consistent(trace, components(len(trace.program.blocks), 0))
    graph = ScalarGraph.of(loss, {"x": x})
    for path in trace.paths(sample=99):
        found = graph.edge("x", path.index)
        assert found is not None and path.weight == pytest.approx(found.weight)
    greedy = [graph.greedy("x", n) for n in range(27)]
    assert greedy != [graph.edge("x", n) for n in range(27)]


def test_users_of_one_component_then_another() -> None:
    """Three users, of which the first two have the same provenance."""
    torch.manual_seed(1)
    x = torch.randn(8, 9, dtype=torch.float64, requires_grad=True)
    one, two = (torch.randn(9, 6, dtype=torch.float64) for _ in range(2))
    h = x.exp()
    loss = (1.5 * h).sum() + (h @ one).sum() + (h @ two).sum()
    trace = gt.trace(loss, names={"x": x}, rule="edge")
    sizes_are_defined(trace)
    names = [block.operator for block in trace.program.blocks]
    consistent(trace, {n: 2 for n, name in enumerate(names) if name == "MmBackward0"})
    consistent(trace, {n: 2 for n, name in enumerate(names) if name == "MulBackward0"})


class Tied(nn.Module):
    """Rows of a large table that occur often, and again as the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(400, 4), nn.Linear(4, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embed(tokens)
        return self.embed.weight @ (h + torch.tanh(self.mix(h))).T


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("lazy", [True, False])
def test_few_rows_of_a_large_table(seed: int, lazy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """``lazy``: the gradient of the table is not known; only the rows that occur are compared."""
    if lazy:
        monkeypatch.setattr(gradients, "DEFER_MIN_ELEMENTS", 1)
    torch.manual_seed(seed)
    model, tokens = Tied().double(), torch.randint(0, 9, (30,))
    weight = torch.randn(400, 30, dtype=torch.float64)
    weight[9:] *= 0.02
    with gt.watch(model) as watch:
        loss = (weight * model(tokens)).sum()
    shares = []
    for rule in ("greedy", "edge"):
        trace = watch.trace(loss, rule=rule)
        consistent(trace, components(len(trace.program.blocks), 0))
        shares.append(trace.influence("operators").shares)
    assert shares[0] != shares[1]


class Mixing(nn.Module):
    """A value of which one user keeps samples apart and another mixes them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.apart, self.mixed = nn.Linear(3, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        return (torch.tanh(self.apart(h)) + self.mixed(h)).square().sum(1)


def test_pairs_that_mix() -> None:
    torch.manual_seed(0)
    model = Mixing().double()
    with gt.watch(model) as watch:
        losses = model(torch.randn(6, 3, dtype=torch.float64))
    trace = watch.trace(losses, rule="edge")
    assert counts(trace.influence()) == followed(trace)
    assert 0 < trace.influence().shares["apart"] < 1


# Wherever a rule is named -------------------------------------------------------------------------


def test_unknown_rules() -> None:
    x = leaf(1.0)
    with pytest.raises(UnknownName, match=r"'greedy', 'edge' or 'viterbi', not 'egde'; did you"):
        gt.trace((x * x).sum(), names={"x": x}, rule="egde")
    with pytest.raises(GradtraceError, match="not 'edges'; did you mean 'edge'"):
        gt.Monitor(nn.Linear(1, 1), rule="edges")


def test_data_sets_and_files(tmp_path: Path) -> None:
    model, x = recurrent(torch.float32)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().mean()

    batches = x.split(2)
    table = gt.influence(model, loss, batches, rule="edge", progress=False)
    assert table.about["rule"] == "edge" and "edge" in str(table)
    with gt.watch(model) as watch:
        trace = watch.trace(model(x).square().mean(), rule="edge")
    trace.save(tmp_path / "a.gradtrace", sample=20)
    saved = gt.load(tmp_path / "a.gradtrace")
    assert saved.rule == "edge" and saved.influence().rows == trace.influence().rows
    trace.report(tmp_path / "a.html", sample=20)
    with gt.Monitor(model, every=1, rule="edge") as monitor:
        monitor.step(model(x).square().mean())
    assert monitor.history.about["rule"] == "edge" and not monitor.history.rows[0].note


def test_versions_are_compared_by_every_rule() -> None:
    """``tests/results.py`` digests what each of them finds: here they choose three paths."""
    assert set(results.RULES) == set(PATH_RULES)
    x = torch.tensor(1.0, requires_grad=True)
    d = x * 1.0
    loss = x.expand(3).sum() + x * 2.0 + (d * 5.0 - d * 4.5)
    found = [[*results.of_operator(loss, {"x": x}, rule)] for rule in results.RULES]
    gradients, _, paths = zip(*found)
    assert len(set(gradients)) == 1 and len(set(paths)) == 3
    assert found == [[*results.of_operator(loss, {"x": x}, rule)] for rule in results.RULES]
