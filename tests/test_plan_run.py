"""Plans that the compiled library executes in one call: counts are those of Python, to the bit."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import architectures
import numpy as np
import pytest
import randomgraphs
import thorough
import torch
import torch.nn.functional as F
from one_call import at_once, by_steps, table_of
from operators import CPU, entries, label, makers
from torch import Tensor, nn

import gradtrace as gt
from gradtrace.errors import GradtraceError, Unsupported
from gradtrace.kernels import cpu_library, cpu_plan
from gradtrace.kernels.cpu_plan import PlanWords, run_plan
from gradtrace.linops import Index
from gradtrace.traced import Trace
from gradtrace.tracing import counting, lowering, plan_run, plan_table
from gradtrace.tracing.kept_plans import KEPT, forget

pytestmark = pytest.mark.skipif(
    not hasattr(cpu_library.library(), "gradtrace_run_plan"),
    reason="the compiled library executes plans; this one is missing or was built before",
)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    forget()
    yield
    forget()


def traced(model: nn.Module, loss_of: Callable[[], Tensor], **how: Any) -> Trace:
    with gt.watch(model) as watch:
        loss = loss_of()
    return watch.trace(loss, **how)


def squared(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return model(x).square().mean()


def assert_same(trace: Trace, components: Any = "blocks") -> list[Any]:
    """Counts, sums and sets of all leaves are equal; the library has executed the plan."""
    found = at_once(trace, components)
    assert not isinstance(found, str), found
    assert repr(found) == repr(by_steps(trace, components))
    return found


class Residual(nn.Module):
    def __init__(self, layers: int, width: int, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + self.act(layer(x))
        return x


# Equal to Python ----------------------------------------------------------------------------------


FIRST = 40  # of these the library executes all


@pytest.mark.parametrize("seed", range(400 if thorough.THOROUGH else FIRST))
def test_random_graphs(seed: int) -> None:
    trace = gt.trace(randomgraphs.build(seed, dtype=torch.float32).loss)
    if seed >= FIRST and at_once(trace) in ("given up", "instruction Nested"):
        pytest.skip("Python executes it: too many sets of components, or sums of sums")
    assert_same(trace)


ARCHITECTURES = [*architectures.ARCHITECTURES] if thorough.THOROUGH else ["gpt2", "llama", "resnet"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # transformers' own
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures(name: str) -> None:
    model, loss_of = architectures.ARCHITECTURES[name]()
    for _ in range(2):
        trace = traced(model, lambda: loss_of(model))
        assert_same(trace)
        assert_same(trace, None)


OPERATORS = {label(op): op for op in entries(CPU)}
SOME = sorted(OPERATORS)[:: 1 if thorough.THOROUGH else 25]
UNCOVERED = "empty tensor", "Nested", "float64", "float16", "half", "complex"


@pytest.mark.filterwarnings("ignore::UserWarning")  # of PyTorch's, about its own operators
@pytest.mark.parametrize("name", SOME)
def test_operators(name: str) -> None:
    for make in makers(OPERATORS[name], torch.float32, 2, CPU):
        problem = make()
        if problem is None:
            continue
        leaves = [x for x in problem[1] if x.dtype is torch.float32]
        grads = torch.autograd.grad(problem[0], leaves, retain_graph=True, allow_unused=True)
        if any(g is not None and g.layout is not torch.strided for g in grads):
            continue
        try:
            trace = gt.trace(problem[0].float(), nonfinite="allow")
        except Unsupported as error:
            assert "sparse" in str(error)
            continue
        found = at_once(trace)
        if isinstance(found, str):
            assert any(word in found for word in UNCOVERED), found
        else:
            assert repr(found) == repr(by_steps(trace))


@pytest.mark.parametrize("act", [torch.tanh, torch.relu, F.hardtanh])
def test_zeros_and_weights_that_change(act: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model, x = Residual(6, 8, act), torch.randn(5, 8)
    x[1] = 0
    seen = []
    for step in range(4):
        seen.append(assert_same(traced(model, lambda: model(x).square().mean())))
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p)) if step < 2 else p.zero_()
    assert repr(seen[0]) != repr(seen[1]) != repr(seen[2])


class Cancelling(nn.Module):
    """Sums of products that are exactly 0, though none of the products is; and ties."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y = self.second(x) + self.third(x) + x
        return y @ torch.tensor([[1.0, -1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, 1.0]])


@pytest.mark.parametrize("same", [True, False])
def test_contributions_that_cancel_and_ties(same: bool) -> None:
    model = Cancelling()
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.5)
        model.second.weight[:, ::2] = -0.5 if not same else 0.5
    x = torch.ones(3, 4)
    found = assert_same(traced(model, lambda: model(x).sum(1).sum()))
    assert_same(traced(model, lambda: model(x)[:, 0].sum()))
    assert any(len(sets) > 1 for _, sets, *_ in found) or same


def test_large_tables_are_searched_for_equal_sets() -> None:
    """More than ``COMPACT_ABOVE_ENTRIES`` sets."""
    torch.manual_seed(0)
    model, x = Residual(14, 6, torch.tanh), torch.randn(64, 6)
    found = assert_same(traced(model, lambda: model(x).square().mean()))
    assert max(len(sets) for _, sets, *_ in found) > 100


def test_shapes_that_change_and_dropout() -> None:
    model = nn.Sequential(Residual(3, 8, torch.tanh), nn.Dropout(0.5), Residual(2, 8, torch.relu))
    for rows in (4, 4, 7, 4, 1, 7):
        assert_same(traced(model, partial(squared, model, torch.randn(rows, 8))))


def test_layouts_that_change() -> None:
    """Tensors of the same shapes, but other strides."""
    model = Residual(3, 8, torch.tanh)
    for step in range(plan_run.MAX_ATTEMPTS + 1):
        x = torch.randn(8, 8)
        assert_same(traced(model, partial(squared, model, x.t() if step % 2 else x)))


def test_indices_that_change() -> None:
    """Gathers that data decide, and embeddings."""
    torch.manual_seed(0)
    embed, model = nn.Embedding(9, 8), Residual(3, 8, torch.tanh)
    whole = nn.ModuleList([embed, model])
    for _ in range(4):
        ids, rows = torch.randint(0, 9, (6,)), torch.randint(0, 6, (4,))
        assert_same(traced(whole, partial(squared, lambda i, r=rows: model(embed(i))[r], ids)))


def test_recurrent_layers_that_share_weights() -> None:
    model, x = nn.LSTM(6, 6), torch.randn(20, 3, 6)
    for _ in range(2):
        assert_same(traced(model, lambda: model(x)[0].square().mean()))


def test_influence_is_that_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Residual(8, 8, torch.relu), torch.randn(5, 8)
    tables = [traced(model, lambda: model(x).square().mean()).influence() for _ in range(3)]
    calls = []
    monkeypatch.setattr(counting, "_executed_at_once", lambda *given: calls.append(given))
    tables.append(traced(model, lambda: model(x).square().mean()).influence())
    assert calls and all(table == tables[0] for table in tables)


# When ---------------------------------------------------------------------------------------------


def test_from_the_second_loss_on(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    real = plan_run.run_plan
    monkeypatch.setattr(plan_run, "run_plan", lambda *given: runs.append(1) or real(*given))
    model, x = Residual(3, 8, torch.tanh), torch.randn(5, 8)
    for n in range(4):
        traced(model, lambda: model(x).square().mean()).influence()
        assert len(runs) == max(0, n)


@pytest.mark.parametrize(
    ("rule", "dtype", "why"),
    [("edge", torch.float32, "the rule edge"), ("greedy", torch.float64, "torch.float64")],
)
def test_what_is_not_covered_is_told(rule: str, dtype: torch.dtype, why: str) -> None:
    model, x = Residual(3, 8, torch.tanh).to(dtype), torch.randn(5, 8, dtype=dtype)
    for _ in range(3):
        traced(model, lambda: model(x).square().mean(), rule=rule).influence()
    assert why in KEPT.summary().rows[0].stepwise


def test_gradients_that_are_not_kept_are_computed_up_to_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, x = nn.LSTM(6, 6), torch.randn(20, 3, 6)
    monkeypatch.setattr(plan_table, "MAX_COMPUTED_BYTES", 0)
    for _ in range(3):
        traced(model, lambda: model(x)[0].square().mean()).influence()
    assert "did not keep" in KEPT.summary().rows[0].stepwise


def test_a_table_that_never_fits_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Residual(3, 8, torch.tanh), torch.randn(5, 8)
    monkeypatch.setattr(plan_run.TableRun, "fits", lambda run: False)
    for _ in range(plan_run.MAX_ATTEMPTS + 3):
        traced(model, lambda: model(x).square().mean()).influence()
    assert "otherwise each time" in KEPT.summary().rows[0].stepwise


def test_gradients_that_are_deferred_are_computed_one_at_a_time() -> None:
    torch.manual_seed(0)
    model, x = Residual(3, 260, torch.tanh), torch.randn(64, 260)
    trace = traced(model, lambda: model(x).square().mean())
    assert_same(trace)
    table = table_of(trace).table
    assert table is not None and len(table.lazy) == 3


def test_a_table_takes_no_tensor_and_is_counted() -> None:
    model, x = Residual(20, 8, torch.tanh), torch.randn(5, 8)
    sizes = []
    for _ in range(3):
        traced(model, lambda: model(x).square().mean()).influence()
        sizes.append(KEPT.summary().bytes)
    assert sizes[0] < sizes[1] == sizes[2]


def test_inputs_that_were_changed_in_place_are_refused() -> None:
    model, x = Residual(3, 8, torch.tanh), torch.randn(5, 8)
    for _ in range(2):
        traced(model, lambda: model(x).square().mean()).influence()
    trace = traced(model, lambda: model(x).square().mean())
    with torch.no_grad():
        model.layers[1].weight.add_(1)
    with pytest.raises(GradtraceError, match="changed"):
        trace.influence()


def test_memory_that_was_freed_is_refused() -> None:
    model, x = Residual(3, 8, torch.tanh), torch.randn(5, 8)
    for _ in range(2):
        traced(model, lambda: model(x).square().mean()).influence()
    trace = traced(model, lambda: model(x).square().mean())
    at_once(trace, "modules")
    table = table_of(trace, "modules").table
    assert table is not None
    read = [each.key for each in table.readings if each.key in trace.program.kept]
    trace.program.kept[read[1]].untyped_storage().resize_(0)
    with pytest.raises(GradtraceError, match="in memory"):
        trace.influence()


def test_threads_of_python_may_trace_at_once() -> None:
    model, x = Residual(6, 8, torch.tanh), torch.randn(5, 8)
    wanted = [traced(model, lambda: model(x).square().mean()).influence() for _ in range(2)][1]
    trace = traced(model, lambda: model(x).square().mean())
    found: list[Any] = []

    def ask() -> None:
        kept = table_of(trace, None)
        for _ in range(20):
            with torch.no_grad():
                found.append(kept.run(trace.program, trace.backend))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 80 and trace.influence() == wanted
    assert all(np.array_equal(each[1].counts, found[0][1].counts) for each in found)


def test_ctrl_c_is_seen_between_turns() -> None:
    """A plan that looks 100,000 times for zeros, which takes minutes."""
    x = torch.ones(1 << 22)
    words = words_of(
        0, 0, *[8, 1, 0, 0, 0, 3, 0, 0, 0] * 100_000, views=[[0, 0, 1, len(x), *VIEW[4:]]]
    )
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    before = signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    begun = time.perf_counter()
    try:
        with pytest.raises(KeyboardInterrupt):
            executed(words, x)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert time.perf_counter() - begun < 5


# Operands that cannot be read ---------------------------------------------------------------------


def words_of(*ops: int, views: Any = ()) -> PlanWords:
    table = np.array(views, np.int64).reshape(-1, 15)
    return PlanWords(np.array(ops, np.int64), table, np.ones((1, 1), np.uint64), 1, 2)


def executed(words: PlanWords, *tensors: Tensor) -> Any:
    places = np.array([x.data_ptr() for x in tensors], np.int64)
    return run_plan(words, places, lambda n: 0, lambda n, ids: ids)


VIEW = [0, 0, 1, 4, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    "words",
    [
        words_of(99),
        words_of(0, 2),  # a slot that there is not
        words_of(0, 0, 2, 1),  # it ends within an instruction
        words_of(2, 1, 0),  # a value that there is not
        words_of(0, 0, 1, 0, 5),  # bits that there are not
        words_of(0, 0, 3, 1, 0, 7),  # a view that there is not
        words_of(0, 0, 11, 0, 0, 0, views=[1, *VIEW[1:]]),  # an address that there is not
        words_of(0, 0, views=[0, 0, 9, *VIEW[3:]]),  # more dimensions than there are
        words_of(0, 0, 5, 1, 0, 2, 3, 4, 2),  # a part beyond its line
    ],
)
def test_bad_words_are_refused(words: PlanWords) -> None:
    x = torch.ones(4)
    with pytest.raises(GradtraceError, match="operands that it cannot read"):
        executed(words, x)


def test_a_plan_by_hand() -> None:
    """Two terms of a sum: the set of the larger, or of the first; none where both are 0."""
    x, y = torch.tensor([1.0, 3.0, 2.0, 0.0]), torch.tensor([2.0, 1.0, -2.0, 0.0])
    ops = (
        *(0, 0, 2, 1, 0, 1, 1, 0),  # slot 1 is slot 0 with the first set of bits
        *(9, 0, 4, 2, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0, 0, -1),  # slot 0 becomes the sum of 0 and 1
        *(11, 0, 0, 0),
    )
    views = [VIEW, [1, *VIEW[1:]]]
    words = words_of(*ops, views=views)._replace(bits=np.array([[4]], np.uint64))
    found = executed(words, x, y)
    assert found is not None
    assert found.counts.tolist() == [1, 2, 1] and found.sums[1:].tolist() == [5.0, 1.0]
    assert found.sets.tolist() == [[1], [5]] and found.leaves.tolist() == [[0, 0, 3, 1, 0]]


def test_every_instruction_has_the_number_that_the_library_knows() -> None:
    source = (Path(cpu_plan.__file__).parent / "cpu" / "run_plan.cpp").read_text()
    listed = source.split("enum Op : int64_t {")[1].split("}")[0].replace("\n", " ").split(",")
    names = [name.strip() for name in listed]
    assert names[: len(plan_table.Op)] == [op.name for op in plan_table.Op]


def test_a_function_is_recognised_by_its_code_and_what_it_has_taken() -> None:
    def shifted(k: int) -> Callable[[Tensor], Tensor]:
        return lambda x: x.roll(k)

    def looked_up(index: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda x: x[index]

    facts = [lowering.fact_of(Index(shifted(k), (4,), (4,))) for k in (1, 1, 2)]
    assert facts[0] == facts[1] != facts[2]
    assert lowering.fact_of(Index(looked_up(torch.arange(4)), (4,), (4,))) is None  # copied
    turned = lowering.fact_of(Index(lambda x: F.pad(x, (0, 0)), (4,), (4,)))
    assert turned is not None
