"""A vector of losses: traced together, the same as every sample traced alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import programs
import pytest
import torch
import torch.nn.functional as F
from backends import CPU
from oracle import matrix_of
from test_maps import TABLE, Make, maker
from torch import Tensor, nn

import gradtrace as gt
from gradtrace.errors import NotScalar, UnknownName
from gradtrace.ir.optimise import optimise
from gradtrace.ir.passes.schedule import Request
from gradtrace.ir.plan import Plan, Storage
from gradtrace.ir.program import Program
from gradtrace.kernels import backend_of
from gradtrace.linops import (
    Contract,
    Convolve,
    Dense,
    Identity,
    Index,
    Map,
    Normaliser,
    Reduce,
    Scale,
    Scatter,
    SideBySide,
    Slot,
    copied,
)
from gradtrace.linops.axes import MIXED, Axis, recognised
from gradtrace.semirings import MAX
from gradtrace.table import Table
from gradtrace.tracing.executor import Executor
from gradtrace.tracing.greedy_rule import Greedy
from gradtrace.tracing.kept_plans import forget
from gradtrace.tracing.per_sample import Pairs, places
from gradtrace.tracing.traced_value import TracedValue

BATCH = 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.position = nn.Parameter(torch.randn(5, 6))
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.norm = nn.LayerNorm(6)
        self.mlp = nn.Linear(6, 6)
        self.out = nn.Linear(6, 9)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return self.out(x + F.gelu(self.mlp(x)))


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(1, 3)
        self.down = nn.Conv2d(3, 2, 2)
        self.out = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv(x)))
        return self.out(F.max_pool2d(self.down(x), 2).flatten(1))


class BatchNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 4)
        self.norm = nn.BatchNorm1d(4)
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = gt.label(self.first(x), 1, "unit")
        return self.out(torch.tanh(self.norm(h)))


def tokens() -> tuple[nn.Module, Tensor, Tensor]:
    return Attention(), torch.randint(0, 9, (BATCH, 5)), torch.randint(0, 9, (BATCH, 5))


def images() -> tuple[nn.Module, Tensor, Tensor]:
    return Conv(), torch.randn(BATCH, 1, 8, 8).double(), torch.randint(0, 3, (BATCH,))


def recurrent() -> tuple[nn.Module, Tensor, Tensor]:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(3, 4, batch_first=True)
            self.gru = nn.GRU(3, 4, batch_first=True)
            self.out = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.out((self.lstm(x)[0] + self.gru(x)[0])[:, -1])

    return Model(), torch.randn(BATCH, 6, 3).double(), torch.randint(0, 3, (BATCH,))


def tied() -> tuple[nn.Module, Tensor, Tensor]:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(7, 4)
            self.mix = torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            h = self.embed(x).mean(1)
            return (h + torch.tanh(self.mix(h))) @ self.embed.weight.T

    return Model(), torch.randint(0, 7, (BATCH, 3)), torch.randint(0, 7, (BATCH,))


def ragged() -> tuple[nn.Module, Tensor, Tensor]:
    """Sequences of several lengths: only the longest reaches the last steps of the layers."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(5, 3)
            self.rnn = nn.RNN(3, 3, batch_first=True)
            self.gru = nn.GRU(3, 3, batch_first=True)
            self.out = nn.Linear(3, 5)

        def forward(self, x: Tensor) -> Tensor:
            h = self.embed(x)
            return self.out(self.rnn(h)[0] + self.gru(h)[0])

    x, y = torch.randint(0, 5, (2, BATCH, 7)).unbind()
    for row, length in enumerate((4, 7, 3, 5)):
        y[row, length:] = -100
    return Model(), x, y


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor, Tensor]]] = {
    "attention": tokens,
    "images": images,
    "ragged": ragged,
    "recurrent": recurrent,
    "tied": tied,
}


def losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out = model(x)
    if out.dim() == 3:
        return F.cross_entropy(out.transpose(1, 2), y, reduction="none").mean(1)
    return F.cross_entropy(out, y, reduction="none")


def watched(model: nn.Module, x: Tensor, y: Tensor) -> tuple[gt.watch, Tensor]:
    with gt.watch(model) as watch:
        loss = losses(model, x, y)
    return watch, loss


def assert_same(found: Table, wanted: Table) -> None:
    assert set(found.names) == set(wanted.names)
    for a in found:
        b = wanted[a.name]
        for column in ("through", "eligible", "own", "unreached"):
            assert a[column] == b[column], a.name
        for column in ("weighted", "± share", "± weighted", "|g| through", "|g| eligible"):
            assert a[column] == pytest.approx(b[column], rel=1e-9, abs=1e-12, nan_ok=True), column


@pytest.mark.parametrize("rule", ["greedy", "edge", "viterbi"])
@pytest.mark.parametrize("name", MODELS)
def test_together_is_each_alone(name: str, rule: str) -> None:
    torch.manual_seed(3)
    model, x, y = MODELS[name]()
    model = model.double()
    watch, loss = watched(model, x, y)
    # PyTorch takes other operators for a batch of one in attention and recurrent layers.
    for components in (None, "operators") if name in ("images", "tied") else (None,):
        together = watch.trace(loss, rule=rule).influence(components)
        alone = []
        for b in range(BATCH):
            one, single = watched(model, x[b : b + 1], y[b : b + 1])
            alone.append(one.trace(single, rule=rule).influence(components))
        total = Table.total(alone)
        assert together.about["losses"] == total.about["losses"] == BATCH
        assert_same(together, total)


@pytest.mark.parametrize("rule", ["greedy", "edge", "viterbi"])
@pytest.mark.parametrize("name", MODELS)
def test_paths_of_a_pair_are_those_of_the_sample_alone(name: str, rule: str) -> None:
    torch.manual_seed(4)
    model, x, y = MODELS[name]()
    model = model.double()
    watch, loss = watched(model, x, y)
    trace = watch.trace(loss, rule=rule)
    one, single = watched(model, x[2:3], y[2:3])
    mine, theirs = trace.paths(sample=60, pair=2), one.trace(single, rule=rule).paths(sample=60)
    assert len(mine) == len(theirs) > 0
    for a, b in zip(mine, theirs):
        assert (a.name, a.index, a.modules) == (b.name, b.index, b.modules)
        assert a.weight == pytest.approx(b.weight, rel=1e-9)
        assert a.gradient == pytest.approx(b.gradient, rel=1e-9)
        assert a.pair == 2


# Where samples mix -------------------------------------------------------------------------------


def one_by_one(watch: gt.watch, loss: Tensor, rule: str, components: str | None = None) -> Table:
    """Every pair by a pass of its own, from the same graph."""
    found = [watch.trace(loss[b], rule=rule).influence(components) for b in range(len(loss))]
    return Table.total(found)


@pytest.mark.parametrize("rule", ["greedy", "edge", "viterbi"])
def test_batch_norm_in_training_is_traced_pair_by_pair(rule: str) -> None:
    torch.manual_seed(5)
    model = BatchNorm().double()
    x, y = torch.randn(BATCH, 5).double(), torch.randint(0, 3, (BATCH,))
    watch, loss = watched(model, x, y)
    pairs = Pairs.follow(program_of(watch, loss), BATCH)
    assert "first" in module_of_mixed(program_of(watch, loss), pairs)
    for components in (None, "labels"):
        wanted = one_by_one(watch, loss, rule, components)
        assert_same(watch.trace(loss, rule=rule).influence(components), wanted)


def program_of(watch: gt.watch, loss: Tensor) -> Program:
    return programs.of(watch)(loss, cotangent=torch.ones_like(loss))


def module_of_mixed(program: Program, pairs: Pairs) -> set[str]:
    """Modules whose cotangents hold several pairs in an element."""
    mixed = pairs.mixed(program)
    return {
        block.place.module
        for block in program.blocks
        for value in block.takes.values()
        if value in mixed
    }


def test_samples_that_do_not_mix_are_traced_together() -> None:
    for name in MODELS:
        torch.manual_seed(6)
        model, x, y = MODELS[name]()
        model = model.double()
        watch, loss = watched(model, x, y)
        program = program_of(watch, loss)
        pairs = Pairs.follow(program, BATCH)
        mixed = pairs.mixed(program)
        taken = [
            block
            for block in program.blocks
            if any(value in mixed for value in block.takes.values())
        ]
        # Only what prepares a parameter comes after the contraction that ends in it.
        assert len(taken) < len(program.blocks) / 2, (name, [b.operator for b in taken])


def test_inputs_that_need_a_gradient_belong_to_their_pair() -> None:
    x = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    w = torch.randn(2, dtype=torch.float64, requires_grad=True)
    trace = gt.trace(torch.tanh(x @ w), names={"x": x, "w": w})
    row = trace.influence(["operator:TanhBackward0"])["operator:TanhBackward0"]
    assert row.eligible == 3 * 2 + 3 * 2  # w for each pair, and each row of x once
    assert row.unreached == 0


def test_pairs_are_followed_exactly() -> None:
    """Element by element, by gradients of single losses that are not zero by structure."""
    torch.manual_seed(7)
    model, x, y = tokens()
    model = model.double()
    watch, loss = watched(model, x, y)
    program = program_of(watch, loss)
    pairs = Pairs.follow(program, BATCH)
    for b in range(BATCH):
        seed = torch.zeros(BATCH, dtype=torch.float64)
        seed[b] = 1
        plan = optimise(program, Request("gradient", keep=frozenset(pairs.of)))
        executor = Executor(plan, program.constants, backend_of(seed))
        states = {program.root: executor.root(seed)}
        with torch.no_grad():
            list(executor.run(states))
        for value, numbers in pairs.of.items():
            foreign = states[value].value[(numbers != b + 1)]
            assert not foreign.any(), "an element got gradient of another pair"


def test_a_loss_of_one_element_is_one_pair() -> None:
    x = torch.tensor([2.0], requires_grad=True)
    trace = gt.trace(x * x, names={"x": x})
    assert trace.pairs == 1
    assert trace.path("x", 0).weight == 2.0


def test_losses_of_more_dimensions_are_refused() -> None:
    x = torch.randn(2, 3, requires_grad=True)
    with pytest.raises(NotScalar, match=r"\(2, 3\).*vector"):
        gt.trace(x * 2)
    with pytest.raises(NotScalar, match="empty"):
        gt.trace(x[0, :0] * 2)


def test_pairs_that_are_not_there() -> None:
    x = torch.randn(3, requires_grad=True)
    with pytest.raises(UnknownName, match="loss 3"):
        gt.trace(x * 2).path("leaf0", 0, pair=3)


def test_gradients_are_those_of_the_sum() -> None:
    torch.manual_seed(8)
    model, x, y = images()
    model = model.double()
    watch, loss = watched(model, x, y)
    trace = watch.trace(loss)
    wanted = torch.autograd.grad(loss.sum(), list(model.parameters()))
    for (name, _), grad in zip(model.named_parameters(), wanted):
        torch.testing.assert_close(trace.gradients[name], grad)


# Many at once ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TABLE)
def test_copies_of_a_map_are_the_map_for_each(name: str) -> None:
    """``copied``: along a new first dimension, each input by itself."""
    make = maker()
    m = TABLE[name](make)
    many, plain = copied(m, 3), SideBySide([m] * 3)
    assert many.in_shape == plain.in_shape and many.out_shape == plain.out_shape
    assert (many.is_gather, many.is_diagonal) == (m.is_gather, m.is_diagonal)
    assert_equal_maps(many, plain, make)


@pytest.mark.parametrize("name", TABLE)
def test_maps_are_narrowed_for_each(name: str) -> None:
    """``narrow``: places of its own for each input, as columns of the matrix."""
    make = maker()
    m = TABLE[name](make)
    number = torch.arange(m.inputs).reshape(m.in_shape)
    for dim, size in enumerate(m.in_shape):
        if not m.sums_over(dim):
            continue
        for rows, many in ((3, size - size // 2), (1, 0), (1, 1), (2, size)):
            index = torch.stack([torch.randperm(size)[:many] for _ in range(rows)])
            parts = [number.index_select(dim, row) for row in index]
            wanted = [
                Dense(matrix_of(m)[:, part.reshape(-1)], tuple(part.shape), m.out_shape)
                for part in parts
            ]
            assert_equal_maps(m.narrow(dim, index), SideBySide(wanted), make)


def assert_equal_maps(found: Map, wanted: Map, make: Make) -> None:
    """In all that a pass and a path ask of a map."""
    assert (found.in_shape, found.out_shape) == (wanted.in_shape, wanted.out_shape)
    x = make(*wanted.in_shape)
    torch.testing.assert_close(matrix_of(found), matrix_of(wanted))
    torch.testing.assert_close(found.apply(x), wanted.apply(x))
    torch.testing.assert_close(found.apply_in((x.abs(),), MAX), wanted.apply_in((x.abs(),), MAX))
    marks = torch.randint(1, 5, wanted.in_shape, dtype=torch.int32)
    for mine, theirs in zip(
        found.select(x, marks, value=True), wanted.select(x, marks, value=True)
    ):
        torch.testing.assert_close(mine, theirs)
    torch.testing.assert_close(found.best(x), wanted.best(x))
    at = torch.arange(0, wanted.outputs, 2)
    torch.testing.assert_close(found.best(x, at), wanted.best(x, at))
    for mine, theirs in zip(written(found, at), written(wanted, at)):
        torch.testing.assert_close(mine, theirs)
    reached = torch.randint(0, 4, wanted.in_shape, dtype=torch.int32)
    if not any(isinstance(m, Convolve) for m in getattr(found, "maps", [])):  # only a bound
        assert torch.equal(found.max_source(reached), wanted.max_source(reached))
    count = torch.randint(0, 4, wanted.in_shape).double()
    assert torch.equal(
        torch.as_tensor(found.routes(count, CPU)), torch.as_tensor(wanted.routes(count, CPU))
    )


def written(m: Map, at: Tensor) -> tuple[Tensor, ...]:
    """Rows as a part of the matrix, and each entry asked for by itself."""
    source, weight = m.rows(at)
    there = source >= 0
    row = torch.arange(len(at)).unsqueeze(1).expand(source.shape)[there]
    matrix = torch.zeros(len(at), m.inputs, dtype=torch.float64)
    matrix[row, source[there]] = weight.expand(source.shape)[there].double()
    return matrix, m.entry(at[row], source[there]).sort().values


def test_everyday_maps_have_copies_of_their_own_kind() -> None:
    """So that a hundred pairs take as many steps as one."""
    make = maker()
    kinds = {Identity, Scale, Index, Slot, Reduce, Contract, Scatter, Normaliser}
    for name, build in TABLE.items():
        m = build(make)
        if type(m) in kinds and name != "Normaliser 0-d":
            assert type(copied(m, 2)) is type(m), name
    for m in (TABLE["Contract mk,kn->mn"](make), TABLE["Reduce"](make), TABLE["Scatter"](make)):
        assert type(m.narrow(1, torch.zeros(2, 1, dtype=torch.int64))) is type(m)


@pytest.mark.parametrize("limit", [1, 75, 200])
@pytest.mark.parametrize("rule", ["greedy", "edge", "viterbi"])
def test_pairs_may_come_some_at_a_time(
    rule: str, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(10)
    model, x, y = ragged()
    watch, loss = watched(model.double(), x, y)
    trace = watch.trace(loss, rule=rule)
    together = trace.influence("operators")
    monkeypatch.setattr("gradtrace.tracing.pair_executor.BATCH_MAX_ELEMENTS", limit)
    assert_same(trace.influence("operators"), together)


def test_more_pairs_take_no_more_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is computed for each pair is computed for all of them by the same steps."""
    steps: list[int] = []
    through = Greedy.through

    def counting(*args: Any) -> TracedValue:
        steps.append(1)
        return through(*args)

    def number(batch: int) -> int:
        torch.manual_seed(11)
        watch, loss = watched(BatchNorm(), torch.randn(batch, 5), torch.randint(0, 3, (batch,)))
        steps.clear()
        watch.trace(loss).influence()
        return len(steps)

    monkeypatch.setattr(Greedy, "through", counting)
    assert number(64) == number(4) > 0


# Only where the pair is --------------------------------------------------------------------------


def test_maps_that_sum_can_be_narrowed() -> None:
    w = torch.ones(3, 4, dtype=torch.float64)
    assert Contract("km,kn->mn", w, (3, 2), (2, 4)).sums_over(0)
    assert not Contract("km,kn->mn", w, (3, 2), (2, 4)).sums_over(1)
    assert Reduce([0], (3, 2), (2,)).sums_over(0)
    assert not Reduce([0], (3, 2), (2,)).sums_over(1)
    assert Scatter(torch.zeros(3, 2, dtype=torch.int64), (4,)).sums_over(1)
    assert Normaliser(w, [(w, w)], [0], (3, 4)).sums_over(0)
    assert not Normaliser(w, [(w, w)], [0], (3, 4)).sums_over(1)
    with pytest.raises(NotImplementedError, match="does not sum"):
        Scale(w, (3, 4)).narrow(0, torch.zeros(1, 1, dtype=torch.int64))


def test_only_the_rows_of_a_pair_are_contracted() -> None:
    torch.manual_seed(9)
    model, x, y = tokens()
    watch, loss = watched(model, x, y)
    program = program_of(watch, loss)
    pairs = Pairs.follow(program, BATCH)
    along = pairs.summed(program, pairs.mixed(program))
    assert sum(dim is None for dim in along.values()) < len(along) / 4


# Along an axis -----------------------------------------------------------------------------------


def axes_of(shape: tuple[int, ...]) -> list[Axis]:
    """All numberings of at least two numbers along a dimension of this shape."""
    return [
        Axis(dim, block, count)
        for dim, size in enumerate(shape)
        for block in range(1, size // 2 + 1)
        for count in range(2, size // block + 1)
        if not size % (block * count)
    ]


def numbered(m: Map, axis: Axis) -> tuple[Tensor, bool]:
    """The largest number of each output element's sources, and whether any has several."""
    up = axis.numbers(m.in_shape, CPU)
    high, low = m.max_source(up), m.max_source(axis.total + 1 - up)
    return high, not bool(((high == 0) | (high + low == axis.total + 1)).all())


@pytest.mark.parametrize("name", TABLE)
def test_an_axis_is_followed_as_the_numbers_of_its_elements(name: str) -> None:
    m = TABLE[name](maker())
    for axis in axes_of(m.in_shape) if m.inputs and m.outputs else ():
        found, (wanted, mixed) = m.follow_axis(axis, CPU), numbered(m, axis)
        if found is not None:
            assert (found is MIXED) == mixed, axis
        if found is not None and not mixed:
            assert torch.equal(found.numbers(m.out_shape, CPU), wanted), axis


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "transpose": lambda x: x.transpose(0, 2),
    "permute": lambda x: x.permute(1, 2, 0),
    "expand": lambda x: x.unsqueeze(1).expand(6, 5, 4, 2),
    "narrow": lambda x: x[:, 1:3],
    "narrow the axis": lambda x: x[2:],
    "select": lambda x: x[:, 1],
    "select of the axis": lambda x: x[1],
    "step": lambda x: x[::2],
    "diagonal": lambda x: x.diagonal(dim1=0, dim2=1),
    "windows": lambda x: x.unfold(0, 2, 1),
    "reshape": lambda x: x.reshape(3, 2, 8),
    "merge": lambda x: x.reshape(24, 2),
    "copy": lambda x: x.flip(0),
}


@pytest.mark.parametrize("name", VIEWS)
def test_axes_of_views(name: str) -> None:
    move = VIEWS[name]
    m = Index(move, (6, 4, 2), tuple(move(torch.zeros(6, 4, 2)).shape))
    for axis in axes_of(m.in_shape):
        found, (wanted, mixed) = m.follow_axis(axis, CPU), numbered(m, axis)
        assert not mixed and found is not MIXED
        assert found is None or torch.equal(found.numbers(m.out_shape, CPU), wanted)
        known = recognised(wanted, axis.total)
        assert known is None or torch.equal(known.numbers(m.out_shape, CPU), wanted)
        if name in ("transpose", "permute", "expand"):
            assert found is not None


@pytest.mark.parametrize("block", [1, 2])
def test_places_along_an_axis(block: int) -> None:
    axis = Axis(1, block, 3)
    of = axis.numbers((2, 6 * block, 2), CPU)
    found = axis.places(range(1, 3), of.shape[1], CPU)
    assert torch.equal(found, places(of, range(1, 3), 1))


def batch_norm() -> tuple[nn.Module, Tensor, Tensor]:
    return BatchNorm(), torch.randn(BATCH, 5).double(), torch.randint(0, 3, (BATCH,))


MIXING = {**MODELS, "batch norm": batch_norm}


@pytest.mark.parametrize("name", MIXING)
def test_pairs_along_axes_are_the_pairs_of_all_elements(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(12)
    model, x, y = MIXING[name]()
    watch, loss = watched(model.double(), x, y)
    program = program_of(watch, loss)
    fast = Pairs.follow(program, BATCH)
    if name not in ("images", "ragged"):  # with elements that are of no pair
        assert len(fast.axes) > len(fast.of) / 2
    for known in {type(m) for m in program.maps}:
        monkeypatch.setattr(known, "follow_axis", lambda *args: None)
    monkeypatch.setattr("gradtrace.tracing.per_sample.recognised", lambda *args: None)
    slow = Pairs.follow(program, BATCH)
    assert fast.apart == slow.apart and fast.of.keys() == slow.of.keys()
    assert all(torch.equal(fast.of[value], slow.of[value]) for value in slow.of)
    mixed = slow.mixed(program)
    assert slow.axes.keys() <= {program.root}
    assert fast.summed(program, mixed) == slow.summed(program, mixed)


def test_the_next_vector_of_a_structure_needs_no_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(13)
    model, x, y = batch_norm()
    planned: list[Request] = []

    def planning(program: Program, request: Request, storage: Storage) -> Plan:
        planned.append(request)
        return optimise(program, request, storage)

    monkeypatch.setattr("gradtrace.tracing.kept_plans.optimise", planning)
    forget()
    found = []
    for rule in ("greedy", "viterbi", "greedy", "viterbi"):
        watch, loss = watched(model.double(), x, y)
        watch.trace(loss, rule=rule).influence()
        found.append(len(planned))
    assert found == [2, 6, 6, 6]
