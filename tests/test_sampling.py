"""Sampled paths: single entries, single lines, the forest, its marks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from arguments import arguments
from backends import CPU, ops, use
from leaves import traced_leaves, with_ids
from oracle import matrix_of
from test_maps import TABLE, Make, maker, whole
from test_paths import MODELS, RULES, Made
from thorough import few
from torch import Tensor, nn

import gradtrace as gt
from gradtrace.components.components import ComponentFinder
from gradtrace.kernels import Reference, cpu_library
from gradtrace.kernels.operands import TensorLines
from gradtrace.linops import Index, Map
from gradtrace.linops.indexing import located, picked
from gradtrace.paths import paths as paths_module
from gradtrace.paths.path_forest import PathForest
from gradtrace.paths.paths import path_provenance, sampled
from gradtrace.traced import Trace

# Single elements of maps -------------------------------------------------------------------------


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize("make", [maker(), whole(), maker(dtype=torch.float32)])
def test_an_entry_is_that_of_the_matrix(name: str, make: Make) -> None:
    m = TABLE[name](make)
    matrix = matrix_of(m)
    at, source = matrix.nonzero().unbind(1)
    for found in (m.entry(at, source), Map.entry(m, at, source)):
        assert found.dtype is torch.float64
        torch.testing.assert_close(found, matrix[at, source], rtol=1e-6, atol=1e-6)


def test_elements_of_views() -> None:
    x = torch.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5)
    for view in (
        x,
        x.permute(3, 1, 0, 2),
        x[:, 1:, ::2],
        x[:, :1].expand(2, 6, 4, 5),
        x[1, 2, 3, 4],
    ):
        at = torch.arange(view.numel()).flip(0)
        assert torch.equal(picked(view, view.shape, at), view.reshape(-1)[at])
        memory = x.reshape(-1)[located(at, view.shape, view.stride()) + view.storage_offset()]
        assert torch.equal(memory, view.reshape(-1)[at])
    wide = picked(x[0, 0, 0], (3, 2, 5), torch.arange(30).reshape(5, 6))
    assert torch.equal(wide, x[0, 0, 0].expand(3, 2, 5).reshape(5, 6))
    assert picked(x, tuple(x.shape), torch.zeros(0, 2, dtype=torch.int64)).shape == (0, 2)


@pytest.mark.parametrize(
    "move",
    [
        lambda x: x,
        lambda x: x.permute(2, 0, 1),
        lambda x: x[:, 1:, ::2],
        lambda x: x.unsqueeze(1).expand(3, 7, 4, 5),
        lambda x: x.flip(1),
        lambda x: x[torch.tensor([2, 0])],
        lambda x: x.diagonal(0, 0, 1),
    ],
)
def test_sources_of_some_elements(move: Callable[[Tensor], Tensor]) -> None:
    out = tuple(move(torch.zeros(3, 4, 5)).shape)
    m = Index(move, (3, 4, 5), out)
    at = torch.arange(m.outputs).flip(0)
    assert torch.equal(m.sources(at), m.source().reshape(-1)[at])


# Single lines ------------------------------------------------------------------------------------


def lines(count: int, length: int, step: int, dtype: torch.dtype, seed: int) -> TensorLines:
    """Lines of whole numbers, some of them the same, so that there are ties."""
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(-3, 4, (length * step + 50,), generator=generator).to(dtype)
    offset = torch.randint(0, min(step, 20) + 10, (count,), generator=generator)
    return TensorLines(data, offset, step)


def brute(size: Tensor) -> tuple[list[float], list[int]]:
    """The largest of each row and its first place, one by one; NaN is largest."""
    values, places = [], []
    for row in size.tolist():
        key = [float("inf") if x != x else x for x in row]
        nan = [k for k, x in enumerate(row) if x != x]
        place = nan[0] if nan else key.index(max(key))
        values.append(row[place])
        places.append(place)
    return values, places


@pytest.fixture(params=[True, False], ids=["compiled", "plain"])
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the kernels, and without."""
    if request.param and cpu_library.library() is None:
        pytest.skip("the kernels were not built")
    if not request.param:
        use(monkeypatch, Reference(CPU))


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("steps", [(1, 1), (1, 7), (9, 1), (5, 40)])
@pytest.mark.parametrize("length", [1, 3, 17, 300, 700])
def test_the_largest_product_of_lines(
    length: int, steps: tuple[int, int], dtype: torch.dtype
) -> None:
    for bad in (None, float("inf"), float("nan")):
        a, b = (lines(60, length, step, dtype, n) for n, step in enumerate(steps))
        if bad is not None:
            a.data[::91] = bad
            b.data[5::67] = bad
        every = slice(None)
        size = (a.take(every, length) * b.take(every, length)).abs()
        value, place = brute(size)
        found = ops.contract_lines(a, b, length)
        torch.testing.assert_close(found[0].double(), torch.tensor(value).double(), equal_nan=True)
        there = torch.tensor(value) != 0
        assert torch.equal(found[1][there], torch.tensor(place)[there])


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("step", [1, 6])
@pytest.mark.parametrize("bad", [None, float("inf"), float("nan")])
@pytest.mark.parametrize("flat", [False, True])
def test_lines_of_which_little_can_win(
    flat: bool, bad: float | None, step: int, dtype: torch.dtype
) -> None:
    """Long lines with few large elements, so that most places are ruled out by a bound."""
    length, count = 2000, few(56, 300)  # each of 4 lines with each of 7, and twice
    generator = torch.Generator().manual_seed(step)
    a = torch.randint(-2, 3, (4, length), generator=generator).to(dtype)
    peaks = torch.randint(0, length, (4, 40), generator=generator)
    if not flat:
        a.scatter_(1, peaks, 64.0)
    b = torch.randint(-3, 4, (length * step + 7,), generator=generator).to(dtype)
    if bad is not None:
        a[1, 77] = a[2, 1900] = bad
        b[::3001] = bad
    left = TensorLines(a.reshape(-1), torch.arange(count) % 4 * length, 1)
    right = TensorLines(b, torch.arange(count) % 7, step)
    every = slice(None)
    size = (left.take(every, length) * right.take(every, length)).abs()
    value, place = brute(size)
    found = ops.contract_lines(left, right, length)
    torch.testing.assert_close(found[0].double(), torch.tensor(value).double(), equal_nan=True)
    assert found[1].tolist() == place


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("width", [2, 33, 600])
def test_the_largest_of_the_others(width: int, rank: int, dtype: torch.dtype) -> None:
    make = whole(width, dtype)
    left, right, x = make(rank, 50), make(rank, 4, width), make(4, width)
    line, skip = torch.arange(50) % 4, torch.arange(50) * 7 % width
    for bad in (1.0, float("inf"), float("nan")):
        x[2, width // 2] = bad
        size = (torch.einsum("rn,rnk->nk", left, right[:, line]) * x[line]).abs()
        size[torch.arange(50), skip] = -1.0
        value, place = brute(size)
        found = ops.normalise_at(left, right, x, line, skip)
        there = torch.tensor(value) != 0
        torch.testing.assert_close(found[0].double(), torch.tensor(value).double(), equal_nan=True)
        assert torch.equal(found[1][there], torch.tensor(place)[there])


def test_threads_do_not_matter() -> None:
    a, b = lines(3000, 400, 1, torch.float32, 0), lines(3000, 400, 30, torch.float32, 1)
    before = torch.get_num_threads()
    found = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        found.append(ops.contract_lines(a, b, 400))
    torch.set_num_threads(before)
    for value, place in found[1:]:
        assert torch.equal(value, found[0][0]) and torch.equal(place, found[0][1])


# The forest --------------------------------------------------------------------------------------


def grown(trace: Trace, sample: int, seed: int = 0) -> tuple[PathForest, dict[int, Tensor]]:
    """The forest of a sample, and the elements it begins at."""
    sizes = {name: grad.numel() for name, grad in trace.gradients.items()}
    drawn = sampled(sizes, sample, seed)
    starts = {trace.leaf(name).value: e for name, e in drawn.items() if len(e)}
    return trace.builder(0).follower.follow(starts, trace.rule), starts


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", MODELS)
def test_every_element_is_visited_once(name: str, rule: str) -> None:
    made = Made.of(name)
    forest, starts = grown(made.watch.trace(made.loss, rule=rule), 1 << 40)
    ends = [*forest.firsts[1:], len(forest.onward)]
    assert len(set(forest.values)) == len(forest.values)
    for first, last in zip(forest.firsts, ends):
        stage = forest.element[first:last].tolist()
        assert len(set(stage)) == len(stage)
        onward = forest.onward[first:last]
        assert bool(((onward >= last) | (onward == -1)).all())
    begun = [(forest.value(node), forest.place(node)) for node in forest.starts.tolist()]
    assert begun == [(v, e) for v, elements in starts.items() for e in elements.tolist()]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", MODELS)
def test_together_or_alone(name: str, rule: str) -> None:
    """A path does not depend on which others are followed with it."""
    made = Made.of(name)
    trace = made.watch.trace(made.loss, rule=rule)
    for path in trace.paths(sample=12, seed=4):
        assert trace.path(path.name, path.index) == path


def test_paths_are_made_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made.of("residual")
    trace = made.watch.trace(made.loss)
    count = []
    real = paths_module.ValueLabels.step
    monkeypatch.setattr(
        paths_module.ValueLabels, "step", lambda *args: count.append(1) or real(*args)
    )
    paths = trace.paths(sample=1 << 40)
    name = next(iter(trace.gradients))
    assert len(paths) > 50 and len(paths[3:]) == len(paths) - 3 and len(paths.of(name)) > 0
    assert not count
    steps = len(paths[7])
    assert len(count) == steps and paths[7] == paths[7] and len(count) == steps
    every = list(paths)
    assert len(count) < sum(map(len, every)) / 2  # paths that meet share what lies behind
    assert every[3:8] == list(paths[3:8]) and every[-1] == paths[-1]
    assert list(paths.of(name)) == [path for path in every if path.name == name]
    wanted = [path for path in every if path.name == name and path.index == every[0].index]
    assert list(paths.of(name, every[0].index)) == wanted != []
    assert len(paths.of("nothing")) == len(paths.of(name, (999, 999, 999))) == 0
    assert paths == trace.paths(sample=1 << 40) and hash(paths) == hash(paths[:])
    assert paths != paths[1:]
    with pytest.raises(IndexError):
        paths[len(paths)]


def test_paths_outlive_a_change_of_the_weights() -> None:
    """What was followed is kept, not where it was read from."""
    made = Made.of("residual")
    trace = made.watch.trace(made.loss)
    paths, others = trace.paths(sample=40), list(trace.paths(sample=40))
    with torch.no_grad():
        for parameter in made.model.parameters():
            parameter.mul_(3)
    assert list(paths) == others


def test_kept_gradients_are_taken() -> None:
    """What recording kept is not computed again, and the rest is computed from it."""
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    loss = ((x * 3) * torch.tensor([5.0, 7.0])).sum()
    trace = gt.trace(loss, names={"x": x})
    path = trace.path("x", 1)
    value = next(step.out for step in trace.program.steps() if step.out != trace.program.root)
    trace.program.constants.kept = {value: torch.full((2,), 11.0)}
    trace._followers.clear()
    assert [step.gradient for step in path.steps] == [21.0, 7.0, 1.0, 1.0]
    assert [step.gradient for step in trace.path("x", 1).steps] == [21.0, 77.0, 11.0, 1.0]


# Marks -------------------------------------------------------------------------------------------


def check_marks(trace: Trace, kind: str, sample: int) -> int:
    """Marks of the forest against those of the streaming pass; how many different there are."""
    chosen = arguments(trace)
    if kind != "arguments":
        chosen = ComponentFinder(trace.program, trace.modules, {}).choose(kind)
    forest, starts = grown(trace, sample)
    found = path_provenance(forest, trace.program, chosen.component_bits)
    assert len(set(found.sets)) == len(found.sets)
    mine = [found.sets[n] for n in found.number.tolist()]
    with torch.no_grad():
        leaves = traced_leaves(trace.program, trace.rule, chosen.component_bits)
        states = {f.leaf.value: f.state for f in leaves}
    theirs = []
    for value, elements in starts.items():
        state = with_ids(states[value])
        assert state.ids is not None
        known = state.provenance.sets()
        theirs += [known[n] for n in state.ids.reshape(-1)[elements].tolist()]
    assert [mark if mark & 1 else 0 for mark in mine] == theirs
    assert [mark & 1 for mark in mine] == forest.whole.int().tolist()
    return len(found.sets)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", MODELS)
def test_marks_are_those_of_the_streaming_pass(name: str, rule: str) -> None:
    made = Made.of(name)
    trace = made.watch.trace(made.loss, rule=rule)
    for kind in ("modules", "operators"):
        for sample in (1 << 40, 30):
            check_marks(trace, kind, sample)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["residual", "encoder", "joined", "lstm"])
def test_marks_of_arguments(name: str, rule: str) -> None:
    made = Made.of(name)
    assert check_marks(made.watch.trace(made.loss, rule=rule), "arguments", 1 << 40) > 1


def test_marks_of_labels_and_of_many_modules() -> None:
    """Bits along slices, and more bits than one word has."""

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(70))

        def forward(self, x: Tensor) -> Tensor:
            for part in self.parts:
                x = x + torch.tanh(part(x))
            return gt.label(x, 1, ["a", "b", "c", "d"])

    torch.manual_seed(0)
    model = Deep().double()
    with gt.watch(model) as watch:
        out = model(torch.randn(3, 4).double())
        loss = F.mse_loss(out, torch.zeros_like(out))
    trace = watch.trace(loss)
    assert check_marks(trace, "labels", 1 << 40) >= 4
    assert check_marks(trace, "modules", 1 << 40) > 62
