"""``decompose``: the gradient through a component against the list of all paths, and by hand."""

from __future__ import annotations

import math
import pickle
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from agreement import assert_agree
from architectures import ARCHITECTURES, in_float64
from bruteforce import Edge, ScalarGraph
from operators import entries, label, losses
from randomgraphs import build
from test_influence import residual
from thorough import few, some
from torch import Tensor, nn

import gradtrace as gt
from gradtrace.autodiff.labels import labels_of
from gradtrace.components.components import SUMS
from gradtrace.errors import GradtraceError, UnknownName
from gradtrace.ir.program import Program
from gradtrace.measures import decompose as measuring
from gradtrace.measures import leaf_products
from gradtrace.measures.decomposition import Decomposition
from gradtrace.measures.through import ThroughSweep
from gradtrace.pytorch.wrapped_modules import within
from gradtrace.table import Table
from gradtrace.traced import Trace

# Against all paths -------------------------------------------------------------------------------


Numbers = np.ndarray[Any, Any]

Bits = Callable[[Edge], int]
"""The components that an edge passes, a bit each."""

PATHS = 2_000
"""The most paths of one element of a random graph."""


def listed(graph: ScalarGraph, bits: Bits) -> list[list[tuple[float, int]]]:
    """Of every vertex the weight of each path to the root, and the components that it passes."""
    known: list[list[tuple[float, int]]] = []
    for at, edges in enumerate(graph.up):  # from the root down
        found = [(graph.seeds[at], 0)] if at in graph.seeds else []
        for edge in edges:
            w, here = edge.weight, bits(edge)
            found += [(w * weight, here | passed) for weight, passed in known[edge.above]]
        known.append(found)
    return known


class PathSums:
    """The gradients through components, by the list of all paths."""

    def __init__(self, graph: ScalarGraph, bits: Bits) -> None:
        self.graph = graph
        self.paths = listed(graph, bits)
        self.tables: dict[str, tuple[Numbers, Numbers, Numbers]] = {}

    def table(self, leaf: str) -> tuple[Numbers, Numbers, Numbers]:
        """Of all paths from the leaf: the element, the weight, the bits."""
        if leaf not in self.tables:
            start = self.graph.starts.get(leaf)
            size = 0 if start is None else math.prod(self.graph.shapes[leaf])
            every = [(n, *path) for n in range(size) for path in self.paths[(start or 0) + n]]
            columns = zip(*every) if every else ((), (), ())
            kinds = (np.int64, np.float64, np.int64)
            one, two, three = (np.array(c, kind) for c, kind in zip(columns, kinds))
            self.tables[leaf] = one, two, three
        return self.tables[leaf]

    def of(self, leaf: str, bits: int) -> tuple[Tensor, Tensor]:
        """The sum over the paths of each element that have one of the bits, and the mass of all."""
        shape = self.graph.shapes[leaf]
        element, weight, passed = self.table(leaf)
        parts = (weight * ((passed & bits) != 0), abs(weight))
        one, two = (np.bincount(element, part, math.prod(shape)) for part in parts)
        return torch.from_numpy(one).reshape(shape), torch.from_numpy(two).reshape(shape)

    def pass_both(self, first: int, second: int, leaf: str) -> bool:
        """Whether a path from the leaf passes both."""
        passed = self.table(leaf)[2]
        return bool((((passed & first) != 0) & ((passed & second) != 0)).any())


def check(trace: Trace, paths: PathSums, components: Any, bits: dict[str, int]) -> None:
    """Every component's gradients, share, norm and angles are those of the listed paths."""
    try:
        found, least = trace.decompose(components), 1e-6 * paths.graph.largest + 1e-300
    except GradtraceError as error:
        assert "no path from a leaf to this loss can pass" in str(error)
        assert not any(paths.pass_both(b, b, leaf) for b in bits.values() for leaf in trace.leaves)
        return
    wanted: dict[str, dict[str, Tensor]] = {name: {} for name in bits}
    for name, mine in bits.items():
        for leaf, grad in found.gradients(name).items():
            wanted[name][leaf], mass = paths.of(leaf, mine)
            error = (grad - wanted[name][leaf]).abs() / (mass + least)
            assert not error.numel() or float(error.max()) < 1e-8, (name, leaf)
    for name in bits:
        leaves = leaves_of(found, name)
        g = flat(trace.gradients[leaf] for leaf in leaves)
        c = flat(wanted[name][leaf] for leaf in leaves)
        scale = float(g.norm() + c.norm()) + least
        assert abs(found[name]["dot"] - float(g @ c)) <= 1e-8 * scale**2
        assert abs(found[name].norm - float(c.norm())) <= 1e-7 * scale
        for other in bits:
            both = set(leaves) & set(leaves_of(found, other))
            dot = sum(float((wanted[name][k] * wanted[other][k]).sum()) for k in both)
            products = found.products.get((name, other))
            if products is not None and not products.overlap:
                assert not any(paths.pass_both(bits[name], bits[other], k) for k in both)
            if products is not None and both:
                assert abs(products.dot - dot) <= 1e-8 * paths.graph.largest**2 * len(g)


def leaves_of(found: Decomposition, component: str) -> list[str]:
    """The leaves outside a component from which a path could pass it."""
    leaves = [p.leaf for p in found.parts if p.component == component and not p.own]
    assert len(leaves) == found[component].leaves
    return leaves


def flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([torch.zeros(0, dtype=torch.float64), *(x.reshape(-1) for x in tensors)])


def is_first_argument(graph: ScalarGraph, edge: Edge) -> bool:
    node = graph.nodes[edge.consumer]
    several = sum(child is not None for child, _ in node.next_functions) > 1
    return graph.operator(edge.consumer) in SUMS and several and edge.position == 0


EACH = 20


@pytest.mark.parametrize("first", range(0, few(100, 2000), EACH))
def test_random_graphs(first: int) -> None:
    for seed in range(first, first + EACH):
        sample = build(seed, PATHS)
        graph, trace = sample.graph, gt.trace(sample.loss, names=sample.leaves)
        operators = sorted({b.operator for b in trace.program.blocks})
        number = {op: 2 << n for n, op in enumerate(operators)}
        paths = PathSums(
            graph,
            lambda e, graph=graph, number=number: (  # type: ignore[misc]
                number[graph.operator(e.consumer)] | is_first_argument(graph, e)
            ),
        )
        check(trace, paths, "operators", number)
        several = operators[seed % 3 :: 2]
        if several:
            group = {"group": [f"operator:{op}" for op in several]}
            check(trace, paths, group, {"group": sum(number[op] for op in several)})
        if any(b.operator in SUMS and len(b.gives) > 1 for b in trace.program.blocks):
            check(trace, paths, {"first": "argument:*[[]0] from *"}, {"first": 1})


@pytest.mark.parametrize("seed", range(few(10, 50)))
def test_labels_against_all_paths(seed: int) -> None:
    torch.manual_seed(seed)
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    w = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    h = gt.label(x @ w, seed % 2, ["a", None, "b"] if seed % 2 else ["a", "b"])
    h = gt.label(torch.tanh(h @ w), 1, ["a", "b", "b"]) * x
    loss = (torch.softmax(h, 0) * x).sum() + h.pow(3).sum()
    leaves = {"x": x, "w": w}
    graph = ScalarGraph.of(loss, leaves)

    def bits(edge: Edge) -> int:
        found = labels_of(graph.nodes[edge.consumer])
        if found is None:
            return 0
        element = graph.places[edge.above].element
        name = found[1][element // 3 if found[0] == 0 else element % 3]
        return {"a": 1, "b": 2, None: 0}[name]

    check(gt.trace(loss, names=leaves), PathSums(graph, bits), "labels", {"a": 1, "b": 2})


# Against autograd --------------------------------------------------------------------------------


def around(program: Program, cut: Iterable[int]) -> dict[Tensor, Tensor]:
    """The sum over paths that enter none of these blocks: what they are handed is 0."""
    cut, values = set(cut), {program.root: program.seed}
    for number, block in enumerate(program.blocks):
        if number in cut:
            for value in block.takes.values():
                values[value] = torch.zeros_like(values[value])
        for step in (*block.steps, *block.merges):
            parts = [program.maps[at].apply(values[value]) for at, value in step.terms]
            values[step.out] = torch.stack(parts).sum(0).to(step.dtype)
    return {leaf.tensor: values[leaf.value] for leaf in program.leaves}


ROUNDING = 1e-13
"""Of float64, relative to the largest gradient of a loss."""


def check_sums(trace: Trace, loss: Tensor, name: str, cut: list[int]) -> None:
    """``g_through + g_around`` is autograd's gradient."""
    parts, other = trace.decompose({"it": name}).gradients("it"), around(trace.program, cut)
    leaves = [leaf.tensor for leaf in trace.leaves.values()]
    wanted = torch.autograd.grad(loss, leaves, retain_graph=True)
    sums = {leaf.tensor: parts[n] + other[leaf.tensor] for n, leaf in trace.leaves.items()}
    assert_agree(sums, leaves, wanted)
    if all(grad.dtype is torch.float64 for grad in wanted):
        errors = flat(sums[leaf] - grad for leaf, grad in zip(leaves, wanted))
        largest = flat(wanted).abs().max()
        assert errors.abs().max() <= ROUNDING * largest


ENTRIES = {label(op): op for op in entries()}
SPARSE = {"sparse.sampled_addmm", "sparse.mm.reduce", "to_sparse"}


@pytest.mark.parametrize("name", some(sorted(set(ENTRIES) - SPARSE), 80))
def test_operators(name: str) -> None:
    """A skip connection around the operator, so that it is not all of the gradient."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss, leaves = (
            next(losses(ENTRIES[name], torch.float64, 1), (None, []))
            if (torch.float64 in ENTRIES[name].supported_backward_dtypes("cpu"))
            else next(losses(ENTRIES[name], torch.float32, 1))
        )
        assert loss is not None
        if any(leaf.is_complex() for leaf in leaves):
            pytest.skip("complex leaf")
        if not any(leaf.numel() for leaf in leaves):
            pytest.skip("nothing passes an operator on empty tensors")
        skip = sum((leaf.double().sin() * 0.3).sum() for leaf in leaves)
        total = loss.double() + loss.double() * skip
        wanted = torch.autograd.grad(total, leaves, retain_graph=True, allow_unused=True)
        if not all(bool(g.isfinite().all()) for g in wanted if g is not None):
            pytest.skip("gradients are not finite")
        trace = gt.trace(total)
    blocks = trace.program.blocks
    names = sorted({b.operator for b in blocks if b.gives})
    for operator in some(names, 3):
        cut = [n for n, b in enumerate(blocks) if b.operator == operator]
        check_sums(trace, total, f"operator:{operator}", cut)


@pytest.mark.parametrize("name", some(ARCHITECTURES, 8))
def test_architectures(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, loss_of = in_float64(name)
        torch.manual_seed(0)
        with gt.watch(model) as watch:
            loss = loss_of(model)
        trace = watch.trace(loss)
    blocks = trace.program.blocks
    modules = sorted({b.place.module for b in blocks} - {""})
    for module in some(modules, 3):
        cut = [n for n, b in enumerate(blocks) if within(b.place.module, module)]
        check_sums(trace, loss, module, cut)
    assert str(trace.decompose(some(modules, 6)))


# By hand -----------------------------------------------------------------------------------------


class Branches(nn.Module):
    """Branches side by side on one embedding: every path goes through one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.rnn = nn.RNN(4, 4, batch_first=True)
        self.lstm = nn.LSTM(4, 4, batch_first=True)
        self.linear = nn.Linear(4, 4)
        self.out = nn.Linear(4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        h = self.rnn(x)[0] + self.lstm(x)[0] + torch.tanh(self.linear(x))
        return self.out(h.mean(1))


def branches(
    reduction: str = "mean", dtype: torch.dtype = torch.float64, seed: int = 0
) -> tuple[Trace, Tensor]:
    torch.manual_seed(seed)
    model = Branches().to(dtype)
    tokens, targets = torch.randint(0, 7, (4, 5)), torch.randint(0, 3, (4,))
    with gt.watch(model) as watch:
        loss = F.cross_entropy(model(tokens), targets, reduction=reduction)
    return watch.trace(loss), loss


def test_signed_gradients_of_two_branches_by_hand() -> None:
    x = torch.tensor([3.0, -1.0], dtype=torch.float64, requires_grad=True)
    loss = (x * 5 - x.pow(2)).sum()  # 5 - 2x
    found = gt.trace(loss, names={"x": x}).decompose("arguments")
    five, square = found.shares
    assert found.gradient(five, "x").tolist() == [5, 5]
    assert found.gradient(square, "x").tolist() == [-6, 2]
    assert found.around(five, "x").tolist() == [-6, 2]
    whole = 1.0 + 49.0  # g = (-1, 7)
    assert found.shares == {five: pytest.approx(30 / whole), square: pytest.approx(20 / whole)}
    assert found[five].norm == pytest.approx(50**0.5)
    assert found[five].whole_norm == pytest.approx(whole**0.5)
    assert found.cosine(five, square) == pytest.approx(-20 / (50 * 40) ** 0.5)
    assert found.cosine(square, five) == found.cosine(five, square)
    assert found.cosine(five, five) == 1
    assert "pull against each other" in str(found)


def test_a_share_may_be_negative_or_above_one() -> None:
    x = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    found = gt.trace(x * 3 - x.pow(2), names={"x": x}).decompose("arguments")  # 3 - 4 = -1
    assert list(found.shares.values()) == pytest.approx([-3, 4])
    assert "points against the whole gradient" in str(found)


def test_a_path_that_enters_a_component_many_times_passes_it_once() -> None:
    x = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    loss = x.sin().sin() + 2 * x.sin() + 5 * x
    found = gt.trace(loss, names={"x": x}).decompose(["operator:SinBackward0"])
    (name,) = found.shares
    wanted = math.cos(math.sin(0.7)) * math.cos(0.7) + 2 * math.cos(0.7)
    assert float(found.gradient(name, "x")) == pytest.approx(wanted, rel=1e-12)
    assert float(found.around(name, "x")) == pytest.approx(5, rel=1e-12)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_branches_that_exhaust_the_paths_add_up_to_one(reduction: str) -> None:
    trace, _ = branches(reduction)
    found = trace.decompose(["rnn", "lstm", "linear"])
    assert abs(sum(found.shares.values()) - 1) < 1e-9
    assert leaves_of(found, "rnn") == ["embed.weight"]
    total = sum(found.gradient(name, "embed.weight") for name in found.shares)
    torch.testing.assert_close(total, trace.gradients["embed.weight"], rtol=1e-10, atol=1e-14)
    assert trace.decompose(["out"]).shares["out"] == 1.0
    assert math.isnan(trace.decompose(["out"])["out"].contested)
    assert "some paths pass two" not in str(found)


def test_arguments_of_each_sum_share_out_what_is_contested() -> None:
    _, watch, loss = residual()
    found = watch.trace(loss).decompose("arguments")
    sums: dict[str, float] = {}
    for name, share in zip(found.names, found.column("contested")):
        sums[name.partition("[")[0]] = sums.get(name.partition("[")[0], 0) + share
    assert len(sums) == 4
    assert all(abs(total - 1) < 1e-9 for total in sums.values())


def test_heads_of_a_label_add_up_to_one() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    heads = gt.label(torch.tanh(x @ torch.randn(8, 8).double()).reshape(3, 4, 2), 1, "head")
    loss = (heads.softmax(1) * heads).pow(2).sum()
    found = gt.trace(loss, names={"x": x}).decompose("labels")
    assert list(found.shares) == [f"head {n}" for n in range(4)]
    assert abs(sum(found.shares.values()) - 1) < 1e-9
    assert not any(products.overlap for products in found.products.values())


def test_recurrent_cells_and_tied_weights() -> None:
    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(5, 3)
            self.cell = nn.GRUCell(3, 3)
            self.out = nn.Linear(3, 5, bias=False)
            self.out.weight = self.embed.weight

        def forward(self, tokens: Tensor) -> Tensor:
            h = torch.zeros(1, 3, dtype=torch.float64)
            for token in tokens:
                h = self.cell(self.embed(token[None]), h)
            return self.out(h)

    model = Model().double()
    tokens = torch.randint(0, 5, (30,))
    with gt.watch(model) as watch:
        loss = F.cross_entropy(model(tokens), torch.tensor([1]))
    trace = watch.trace(loss)
    found = trace.decompose(["cell", "embed", "out"])
    # cut by hand: the embedding's part of a tied weight is what comes through the cells
    h = torch.zeros(1, 3, dtype=torch.float64)
    weight = model.embed.weight
    for token in tokens:
        h = model.cell(F.embedding(token[None], weight), h)
    by_hand = F.cross_entropy(F.linear(h, weight.detach()), torch.tensor([1]))
    (wanted,) = torch.autograd.grad(by_hand, [weight])
    torch.testing.assert_close(found.gradient("cell", "embed.weight"), wanted)
    torch.testing.assert_close(found.gradient("cell", "out.weight"), wanted)  # its other name
    torch.testing.assert_close(
        found.gradients("out")["embed.weight"], trace.gradients["embed.weight"]
    )
    assert leaves_of(found, "cell") == ["embed.weight"]
    assert not found["embed"].leaves
    assert "no path from a leaf outside can pass embed" in str(found)


def test_a_gradient_of_zero_has_no_share() -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    found = gt.trace((x * 1 - x * 1).sum(), names={"x": x}).decompose("arguments")
    assert all(map(math.isnan, found.shares.values()))
    first, second = found.shares
    assert found.cosine(first, second) == pytest.approx(-1)
    assert "against each other" in str(found.cosines())


# Pairs, dtypes, memory ---------------------------------------------------------------------------


class Norm(nn.Module):
    """Batch norm mixes pairs early; the branches are side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 4)
        self.norm = nn.BatchNorm1d(4)
        self.left = nn.Linear(4, 3)
        self.right = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        return self.left(x) * 2 + self.right(x).tanh()


@pytest.mark.parametrize("kind", [Branches, Norm])
def test_pairs_are_those_of_single_losses(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = kind().double()
    x = torch.randint(0, 7, (4, 5)) if kind is Branches else torch.randn(4, 5).double()
    names = ["rnn", "lstm"] if kind is Branches else ["left", "right", "norm"]
    with gt.watch(model) as watch:
        losses_ = F.cross_entropy(model(x), torch.tensor([0, 1, 2, 0]), reduction="none")
    found = watch.trace(losses_).decompose(names)
    singles = [watch.trace(loss).decompose(names) for loss in losses_.unbind()]
    same(found, Table.total(singles))
    assert found.about["losses"] == 4
    for name in names:
        for leaf, grad in found.gradients(name).items():
            total = sum(single.gradient(name, leaf) for single in singles)
            torch.testing.assert_close(grad, total)


def test_pairs_of_inputs_in_any_layout() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)  # pairs are columns
    losses_ = (x.exp() + 2 * x.pow(2)).sum(0)
    found = gt.trace(losses_, names={"x": x}).decompose("arguments")
    one, two = x.detach().exp(), 4 * x.detach()
    whole = ((one + two) ** 2).sum(0)
    for (name, part), t in zip(found.shares.items(), (one, two)):
        dots = (t * (one + two)).sum(0)
        assert part == pytest.approx(float(dots.sum() / whole.sum()))
        residual = ((dots - part * whole) ** 2).sum() * 4 / 3 / whole.sum() ** 2
        assert found.errors[name] == pytest.approx(float(residual.sqrt()))


def test_components_of_several_kinds_are_those_of_each_alone() -> None:
    _, watch, loss = residual()
    trace = watch.trace(loss)
    names = {
        "module": "blocks.1",
        "operator": "operator:AddmmBackward0",
        "class": "class:Linear",
        "argument": "argument:add2[[]1]*",
        "group": ["left", "operator:TanhBackward0"],
    }
    found = trace.decompose(names)
    for name, part in names.items():
        alone = trace.decompose({name: part})
        torch.testing.assert_close(found.gradients(name), alone.gradients(name))
        assert found.shares[name] == pytest.approx(alone.shares[name])
        assert leaves_of(found, name) == leaves_of(alone, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype: torch.dtype) -> None:
    trace, _ = branches(dtype=dtype)
    exact, _ = branches()
    found, wanted = (t.decompose(["rnn", "lstm", "linear"]) for t in (trace, exact))
    tolerance = 1e-4 if dtype is torch.float32 else 0.2
    assert found.gradient("rnn", "embed.weight").dtype is dtype
    assert found.shares == pytest.approx(wanted.shares, abs=tolerance)


def test_inner_values_may_be_complex() -> None:
    x = torch.randn(6, dtype=torch.float64, requires_grad=True)
    loss = torch.fft.fft(x).abs().sum() + x.sin().sum()
    found = gt.trace(loss, names={"x": x}).decompose("arguments")
    assert abs(sum(found.shares.values()) - 1) < 1e-9
    torch.testing.assert_close(found.gradient(list(found.shares)[1], "x"), x.detach().cos())


def test_in_place_and_zero_dimensional() -> None:
    x = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    y = x.clone()
    y += x.exp()
    found = gt.trace(y * 2, names={"x": x}).decompose("arguments")
    parts = [float(found.gradient(name, "x")) for name in found.shares]
    assert parts == pytest.approx([2, 2 * math.exp(0.5)])


def same(found: Table, wanted: Table) -> None:
    """Equal but for rounding."""
    assert found.names == wanted.names and found.about["losses"] == wanted.about["losses"]
    for column in wanted.columns[1:]:
        tolerance = {"rel": 1e-6, "abs": 1e-12} if column.name.startswith("±") else {"rel": 1e-9}
        values = wanted.column(column.name)
        assert found.column(column.name) == pytest.approx(values, nan_ok=True, **tolerance)


class Wide(nn.Module):
    """Weights that are larger than the activations they meet; some are used twice, or tied."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(60, 24, padding_idx=3)
        self.once = nn.Linear(24, 32)
        self.twice = nn.Linear(32, 32)
        self.mixed = nn.Parameter(torch.randn(32, 24))
        self.out = nn.Linear(24, 60, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.once(self.embed(tokens))
        x = x + torch.tanh(self.twice(x))
        x = x + torch.tanh(self.twice(x))
        x = x @ self.mixed + F.linear(x[..., :24], self.mixed[:24]).tanh()
        return self.out(x)


@pytest.mark.parametrize("names", [["once", "twice", "operator:TanhBackward0"], "arguments"])
def test_large_leaves_are_not_computed(names: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, tokens = Wide().double(), torch.tensor([[5, 3, 5, 7]])
    with gt.watch(model) as watch:
        loss = F.cross_entropy(model(tokens)[0], torch.tensor([1, 2, 5, 3]))
    trace = watch.trace(loss)
    called = dict.fromkeys(("_weight_gram", "_scatter_gram"), 0)
    for name in called:
        way = getattr(leaf_products, name)

        def counting(*args: Any, name: str = name, way: Any = way) -> Tensor:
            called[name] += 1
            found: Tensor = way(*args)
            return found

        monkeypatch.setattr(leaf_products, name, counting)
    found = trace.decompose(names)
    assert called["_weight_gram"] >= 2
    assert called["_scatter_gram"] == 1
    parts = {name: found.gradients(name) for name in found.shares}
    monkeypatch.setattr(ThroughSweep, "_deferrable", lambda self: set())
    wanted = trace.decompose(names)
    same(found, wanted)
    for name in parts:
        torch.testing.assert_close(parts[name], wanted.gradients(name))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_small_budget_takes_several_sweeps_and_gives_the_same(
    reduction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace, _ = branches(reduction)
    names = ["rnn", "lstm", "linear", "out", "embed"]
    whole = trace.decompose(names)
    sweeps: list[int] = []
    products = measuring._products

    def counted(*args: Any) -> Any:
        sweeps.append(args[2])
        return products(*args)

    monkeypatch.setattr(measuring, "_products", counted)
    trace.budget = 1
    parts = trace.decompose(names)
    assert len(sweeps) == 10  # every two of five
    same(parts, whole)
    sweeps.clear()
    trace.budget = 8  # four components at a time: groups of 2, 2 and 1
    monkeypatch.setattr(measuring, "held_bytes", lambda routes, wanted: wanted.bit_count())
    same(trace.decompose(names), whole)
    assert [some.bit_count() for some in sweeps] == [4, 3, 3]
    monkeypatch.setattr(leaf_products, "GRAM_ELEMENTS", 7)
    same(trace.decompose(names), whole)


# Results and bad input ---------------------------------------------------------------------------


def test_tables() -> None:
    trace, _ = branches("none")
    found = trace.decompose(["rnn", "lstm", "linear", "out"])
    assert isinstance(found.top(1, by="share"), Decomposition)
    assert found.sort("share").names[0] == "out" and found.to_pandas()["share"][3] == 1.0
    (row,) = found.by_leaf("rnn")
    assert row.leaf == "embed.weight" and row.share == pytest.approx(found.shares["rnn"])
    assert "4 losses" in str(found) and "<table" in found._repr_html_()
    assert "a path that passes two of these (rnn and out and 2 more) counts in both" in str(found)
    assert "add up" not in str(trace.decompose(["rnn", "lstm"]))  # no path passes both
    assert "no path has another way than through out" in str(found)


def test_sums_and_pickled_results_have_no_tensors() -> None:
    found = branches()[0].decompose(["rnn", "lstm"])
    other = branches(seed=1)[0].decompose(["lstm", "linear"])
    total = Table.total([found, other])
    assert total.names == ("rnn", "lstm", "linear") and not hasattr(total, "gradient")
    assert total["lstm"]["dot"] == found["lstm"]["dot"] + other["lstm"]["dot"]
    again = pickle.loads(pickle.dumps(found))
    assert again == found
    with pytest.raises(GradtraceError, match="has sums only"):
        again.gradient("lstm", "embed.weight")


def test_bad_input() -> None:
    trace, _ = branches()
    with pytest.raises(UnknownName, match="did you mean lstm"):
        trace.decompose(["lsmt"])
    with pytest.raises(UnknownName, match="none of modules"):
        trace.decompose("branches")
    with pytest.raises(UnknownName, match="the heads are not known"):
        trace.decompose("heads")
    found = trace.decompose(["rnn", "lstm"])
    with pytest.raises(UnknownName, match="did you mean rnn"):
        found.gradient("rn", "embed.weight")
    with pytest.raises(UnknownName, match=r"did you mean embed\.weight"):
        found.gradient("rnn", "embed.weigth")
    with pytest.raises(UnknownName, match="did you mean rnn"):
        found.cosine("lstm", "rn")
    with pytest.raises(GradtraceError, match="norms"):
        found.sort("norms")
    with pytest.raises(GradtraceError, match="from 1 on"):
        found.top(0)
    for leaf in trace.leaves.values():
        with torch.no_grad():
            leaf.tensor.add_(1)
    for ask in (trace.decompose, lambda: found.gradient("rnn", "embed.weight")):
        with pytest.raises(GradtraceError, match="changed in place"):
            ask()


def test_a_module_that_was_not_called() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2), "c": nn.Linear(2, 2)})
    x = torch.ones(2, requires_grad=True)
    with gt.watch(model) as watch:
        loss = (model["a"](x) + model["b"](x)).sum()
    trace = watch.trace(loss)
    with pytest.raises(GradtraceError, match="no path from a leaf to this loss can pass 'c'"):
        trace.decompose(["c"])
    found = trace.decompose(["a", "c"])
    assert math.isnan(found.shares["c"])
    assert math.isnan(found.cosine("a", "c"))
    assert "no path from a leaf outside can pass c" in str(found)
    assert "no leaf has paths through either" in str(found.cosines())


def test_gradients_that_are_not_finite_are_left_out() -> None:
    x = torch.tensor([0.0, 1.0], requires_grad=True)
    y = torch.tensor([2.0, 1.0], requires_grad=True)
    loss = (x.sqrt() + y.exp() + y * 2).sum()
    trace = gt.trace(loss, names={"x": x, "y": y}, nonfinite="allow")
    found = trace.decompose(["operator:ExpBackward0", "operator:SqrtBackward0"])
    assert "left out: x" in str(found)
    assert 0 < found.shares["operator:ExpBackward0"] < 1


# Over a data set ---------------------------------------------------------------------------------


def data(count: int = 3) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (
            torch.randint(0, 7, (4, 5), generator=generator),
            torch.randint(0, 3, (4,), generator=generator),
        )
        for _ in range(count)
    ]


def losses_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def test_a_data_set_is_the_sum_of_its_batches() -> None:
    torch.manual_seed(0)
    model, names, tables = Branches().double(), ["rnn", "lstm", "linear"], []
    for batch in data():
        with gt.watch(model) as watch:
            loss = losses_of(model, batch)
        tables.append(watch.trace(loss).decompose(names))
    found = gt.decompose(model, losses_of, data(), by=names)
    same(found, Table.total(tables))
    assert found.about["losses"] == len(data()) and abs(sum(found.shares.values()) - 1) < 1e-9
    assert all(0 < error < 1 for error in found.errors.values())


def test_a_share_of_nothing_has_no_text() -> None:
    """Of a gradient that is 0, or whose contributions cancel."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    with gt.watch(model) as watch:
        out = model(torch.randn(5, 3)) * 0.0
    a, b = (torch.randn(3, requires_grad=True) for _ in range(2))
    cancels = gt.trace((a * b - a * b).sum(), names={"a": a, "b": b})
    for trace in (watch.trace(out.sum()), watch.trace(out[:, 0]), cancels):
        results: list[Any] = [trace.decompose("operators"), trace.influence("operators")]
        results += [trace.mass("operators"), trace.choices(), trace.coverage(), trace.spectrum()]
        results += [trace.paths(sample=3), trace.agreement(), trace.norms(), trace.decompose()]
        for result in results:
            assert "nan" not in f"{result} {result!r} {result._repr_html_()}", result
    path = cancels.path("a", 0)
    assert "leaf                  3       [0]" in str(path) and "nan" not in str(path)


def test_where_a_gradient_is_0_a_decomposition_says_so() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    with gt.watch(model) as watch:
        loss = model(torch.randn(5, 3)).sum() * 0.0
    text = str(watch.trace(loss).decompose())
    assert "no share of 1, 2: the gradient of all leaves outside is 0" in text
    assert "shares add up" not in text
