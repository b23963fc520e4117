"""What a report says of a trace is what the trace says."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from itertools import groupby
from math import prod
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pages import decoded, path_of
from torch import Tensor, nn

import gradtrace as gt
from gradtrace.report import building, encode, page
from gradtrace.report.building import LEAF_MAX_ELEMENTS, Limits
from gradtrace.traced import Trace


def payload(trace: Trace, **options: Any) -> Any:
    """The trace as a page has it."""
    whole = page.report(trace._view(**options))
    return decoded(encode.lettered(encode.contained(whole)))["traces"][0]


class Attention(nn.Module):
    """Embeddings tied to the output, attention, a skip connection, a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.blocks = nn.ModuleList([nn.TransformerEncoderLayer(4, 2, 8) for _ in range(2)])
        self.out = nn.Linear(4, 6, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = h + block(h)
        return self.out(h)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4, batch_first=True)
        self.out = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(x)[0][:, -1])


def attention(**options: Any) -> Trace:
    torch.manual_seed(0)
    model = Attention().eval()
    x = torch.randint(0, 6, (3, 5))
    with gt.watch(model) as watch:
        loss = F.cross_entropy(model(x).flatten(0, 1), x.flatten())
    return watch.trace(loss, **options)


def perceptron(dtype: torch.dtype = torch.float32, **options: Any) -> Trace:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).to(dtype)
    with gt.watch(model) as watch:
        loss = model(torch.randn(6, 4, dtype=dtype)).square().mean()
    return watch.trace(loss, **options)


def recurrent(**options: Any) -> Trace:
    torch.manual_seed(0)
    model = Recurrent()
    with gt.watch(model) as watch:
        loss = model(torch.randn(2, 6, 3)).square().mean()
    return watch.trace(loss, **options)


def nameless(**options: Any) -> Trace:
    """No model; an input, a leaf of one element, one of none, one that nothing comes to."""
    torch.manual_seed(0)
    x = torch.randn(3, 2, requires_grad=True)
    scalar = torch.tensor(2.0, requires_grad=True)
    empty = torch.zeros(0, 2, requires_grad=True)
    dead = torch.ones(2, requires_grad=True)
    loss = torch.cat([x * scalar, empty]).sum() + (dead * torch.zeros(2)).sum()
    names = {"x": x, "scalar": scalar, "empty": empty, "dead": dead}
    return gt.trace(loss, names=names, **options)


def hooked(**options: Any) -> Trace:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    model[0].weight.register_hook(lambda grad: 2 * grad)
    model[1].weight.register_hook(lambda grad: None)
    x = torch.randn(4, 3, requires_grad=True)
    with gt.watch(model) as watch:
        loss = model(x).square().mean()
    return watch.trace(loss, **options)


MODELS: list[Callable[..., Trace]] = [
    attention,
    perceptron,
    recurrent,
    nameless,
    hooked,
]
ways = pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)


# Paths --------------------------------------------------------------------------------------------


def same(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))


def unravelled(element: int, shape: list[int]) -> tuple[int, ...]:
    return tuple(element // prod(shape[n + 1 :]) % size for n, size in enumerate(shape))


def assert_paths(trace: Trace, found: Any) -> int:
    """Some listed elements' paths, of each leaf, are those of ``trace.path``; how many have one."""
    forest, rows, count = found["forest"], found["operators"], 0
    for n, leaf in enumerate(found["leaves"]):
        every = max(1, leaf["elements"] // 5)  # to ask for a path takes a while
        for n_th, element in list(enumerate(leaf["element"]))[::every]:
            index = unravelled(element, leaf["shape"])
            start = leaf["start"][n_th]
            if start == -1:
                with pytest.raises(gt.errors.GradtraceError, match="has no path"):
                    trace.path(leaf["name"], index)
                continue
            assert start >= 0
            path, stops = trace.path(leaf["name"], index), path_of(found, n, n_th)
            assert len(path.steps) == len(stops)
            assert leaf["gradient"][n_th] == pytest.approx(path.gradient, rel=1e-5)
            for step, at in zip(path.steps, stops):
                row = forest["operator"][at]
                assert found["words"][forest["word"][at]] == step.operator
                assert tuple(found["shapes"][forest["shape"][at]]) == step.shape
                assert unravelled(forest["element"][at], list(step.shape)) == step.index
                assert same(forest["derivative"][at], step.derivative)
                assert forest["gradient"][at] == pytest.approx(step.gradient, rel=1e-5)
                assert forest["share"][at] == pytest.approx(step.share, rel=1e-5, nan_ok=True)
                if step.operator != "leaf":
                    assert found["words"][rows["name"][row]] == step.operator
                    assert found["modules"][rows["module"][row]]["name"] == step.module
                    assert rows["call"][row] == step.call
            assert forest["operator"][stops[0]] == leaf["operator"]
            assert forest["operator"][stops[-1]] == 0
            weight = prod(forest["derivative"][at] for at in stops)
            assert weight == pytest.approx(path.weight, rel=1e-12)
            count += 1
    return count


@ways
@pytest.mark.parametrize("rule", ["greedy", "viterbi"])
def test_paths_of_elements_are_those_of_the_trace(make: Callable[..., Trace], rule: str) -> None:
    trace = make(rule=rule)
    found = payload(trace)
    assert found["rule"] == rule
    assert assert_paths(trace, found)
    joined = zip(found["forest"]["next"], range(len(found["forest"]["next"])))
    assert all(further == -1 or further > at for further, at in joined)


# Operators and edges ------------------------------------------------------------------------------


def loss_of(make: Callable[..., Trace], monkeypatch: pytest.MonkeyPatch) -> tuple[Trace, Any]:
    """A trace, and the graph of the same loss."""
    kept: list[Any] = []
    traced, whole = gt.watch.trace, gt.trace

    def watched(self: gt.watch, loss: Tensor, **options: Any) -> Trace:
        kept.append(self.graph(loss))
        return traced(self, loss, **options)

    def bare(loss: Tensor, **options: Any) -> Trace:
        kept.append(gt.graph(loss, names=options["names"]))
        return whole(loss, **options)

    monkeypatch.setattr(gt.watch, "trace", watched)
    monkeypatch.setattr(gt, "trace", bare)
    trace = make()
    return trace, kept[0]


def ends(found: Any, row: int) -> tuple[Any, ...]:
    rows = found["operators"]
    leaf = rows["leaf"][row]
    return (
        found["words"][rows["name"][row]],
        tuple(found["shapes"][rows["shape"][row]]),
        "" if leaf >= 0 else found["modules"][rows["module"][row]]["name"],
        rows["call"][row],
        None if leaf < 0 else found["leaves"][leaf]["name"],
    )


@pytest.mark.parametrize("make", [m for m in MODELS if m is not hooked], ids=lambda m: m.__name__)
def test_operators_and_edges_are_those_of_the_graph(
    make: Callable[..., Trace], monkeypatch: pytest.MonkeyPatch
) -> None:
    trace, graph = loss_of(make, monkeypatch)
    found = payload(trace)
    rows, edges = found["operators"], found["edges"]
    have = Counter(ends(found, row) for row in range(len(rows["name"])))

    def of(n: int) -> tuple[Any, ...]:
        o = graph[n]
        return o.name, o.shape, "" if o.leaf else o.module, o.call, o.leaf

    assert have == Counter(of(o.index) for o in graph)
    mine = zip(edges["consumer"], edges["producer"], edges["position"])
    assert Counter((ends(found, c), ends(found, p), k) for c, p, k in mine) == Counter(
        (of(e.consumer), of(e.producer), e.position) for e in graph.edges if e.producer is not None
    )
    assert ends(found, 0) == of(0)
    assert all(c < p for c, p in zip(edges["consumer"], edges["producer"]))


def masses(inputs: dict[str, Tensor], output: Tensor) -> dict[str, float]:
    grads = torch.autograd.grad(output, list(inputs.values()), retain_graph=True)
    return {name: float(grad.abs().sum()) for name, grad in zip(inputs, grads)}


def test_masses_are_sums_of_gradients() -> None:
    torch.manual_seed(0)
    w, v = (torch.randn(4, 4, requires_grad=True) for _ in range(2))
    a = torch.randn(3, 4) @ w
    b = a.tanh()
    c = b @ v
    loss = (c * b).sum() + b.square().mean()  # b is used three times
    expected = masses({"w": w, "v": v, "a": a, "b": b, "c": c}, loss)
    (dc,) = torch.autograd.grad(loss, c, retain_graph=True)
    with torch.no_grad():
        uses = {"MmBackward0": (dc @ v.T).abs().sum(), "MulBackward0": c.abs().sum()}
        uses["PowBackward0"] = (2 * b / b.numel()).abs().sum()
    found = payload(gt.trace(loss, names={"w": w, "v": v}))
    rows, edges = found["operators"], found["edges"]
    words = [found["words"][n] for n in rows["name"]]
    tanh = words.index("TanhBackward0")
    assert rows["mass"][tanh] == pytest.approx(expected["b"], rel=1e-5)
    for leaf in found["leaves"]:
        assert rows["mass"][leaf["operator"]] == pytest.approx(expected[leaf["name"]], rel=1e-5)
    into = [k for k, p in enumerate(edges["producer"]) if p == tanh]
    assert {words[edges["consumer"][k]] for k in into} == uses.keys()
    for k in into:
        mass = float(uses[words[edges["consumer"][k]]])
        assert edges["mass"][k] == pytest.approx(mass, rel=1e-5)
        assert edges["share"][k] == pytest.approx(mass / float(sum(uses.values())), rel=1e-5)


@ways
def test_leaves_have_the_gradient_of_autograd(make: Callable[..., Trace]) -> None:
    trace = make()
    found = payload(trace)
    assert [leaf["name"] for leaf in found["leaves"]] == list(trace.gradients)
    for n, leaf in enumerate(found["leaves"]):
        grad = trace.gradients[leaf["name"]].double()
        assert leaf["shape"] == list(grad.shape) and leaf["elements"] == grad.numel()
        assert leaf["zero"] == int((grad == 0).sum())
        assert leaf["norm"] == pytest.approx(float(grad.norm()), rel=1e-6)
        assert leaf["largest"] == (float(grad.abs().max()) if grad.numel() else 0)
        assert found["operators"]["leaf"][leaf["operator"]] == n
        size = grad.reshape(-1).abs()
        largest = size.argsort(descending=True, stable=True)[:LEAF_MAX_ELEMENTS]
        assert leaf["element"] == largest.tolist()
        assert leaf["gradient"] == grad.reshape(-1)[largest].tolist()


def test_operators_that_only_move_elements() -> None:
    torch.manual_seed(0)
    w = torch.randn(4, 6, requires_grad=True)
    x = w.view(2, 12).t().reshape(4, 6).permute(1, 0).contiguous().unsqueeze(0).squeeze(0)
    y = torch.cat([x[:2], x[2:].clone()]).expand(3, 6, 4).transpose(1, 2)
    found = payload(gt.trace(y.double().exp().sum(), names={"w": w}))
    rows = found["operators"]
    told = {found["words"][n]: view for n, view in zip(rows["name"], rows["view"])}
    others = {"SumBackward0", "ExpBackward0", "CatBackward0", "AccumulateGrad"}
    assert {word for word, view in told.items() if not view} == others
    assert len(told) > 12


# Modules ------------------------------------------------------------------------------------------


def test_modules_are_a_tree_with_tied_parameters_once() -> None:
    trace = attention()
    found = payload(trace)
    modules = {m["name"]: m for m in found["modules"]}
    assert found["modules"][0]["name"] == ""
    assert {name: m["kind"] for name, m in modules.items()} == dict(trace.modules)
    for n, m in enumerate(found["modules"]):
        parent = m["name"].rpartition(".")[0]
        assert m["parent"] == -1 if not n else found["modules"][m["parent"]]["name"] == parent
        assert m["parent"] < n
    assert modules[""]["parameters"] == sum(g.numel() for g in trace.gradients.values())
    assert modules["embed"]["parameters"] == modules["out"]["parameters"] == 24
    tied = next(leaf for leaf in found["leaves"] if leaf["name"] == "embed.weight")
    assert tied["names"] == ["embed.weight", "out.weight"]
    assert modules["embed"]["calls"] == modules[""]["calls"] == modules["blocks.1"]["calls"] == 1
    assert modules["blocks"]["calls"] == 0


def test_alike_is_by_operators_and_shapes_too() -> None:
    class Bend(nn.Module):
        def __init__(self, size: int, smooth: bool) -> None:
            super().__init__()
            self.size, self.smooth = size, smooth

        def forward(self, x: Tensor) -> Tensor:
            x = x[: self.size]
            return x.tanh() if self.smooth else x.sigmoid()

    kinds = [(8, True), (8, True), (8, False), (4, True), (4, False)]
    model = nn.Sequential(*(Bend(*kind) for kind in kinds))
    with gt.watch(model) as watch:
        loss = model(torch.ones(8, requires_grad=True)).sum()
    assert [m["like"] for m in payload(watch.trace(loss))["modules"]] == [0, 1, 1, 3, 4, 5]


# Influence, flow, routes --------------------------------------------------------------------------


@ways
def test_tables_are_those_of_the_trace(make: Callable[..., Trace]) -> None:
    trace = make()
    found, table, norms = payload(trace), trace.influence(), trace.norms()
    told = found["tables"][""]
    assert told["name"] == list(table.names) and told["notes"] == list(table.notes)
    for name in ("through", "eligible", "share", "weighted", "unreached", "own"):
        assert told[name] == pytest.approx(table.column(name), nan_ok=True)
    for at, row in zip(told["module"], table):
        is_module = row.name in trace.modules
        assert (found["modules"][at]["name"] == row.name) if is_module else at == -1
    assert found["flow"]["findings"] == list(norms.notes)
    for mine, row in zip(found["flow"]["rows"], norms, strict=True):
        assert found["modules"][mine["module"]]["name"] == row.name.replace("(top)", "")
        for name in ("depth", "norm", "gain", "zeros", "own", "verdict"):
            assert mine[name] == row[name]
    every = trace.coverage(1000)["all"]
    assert found["coverage"]["elements"] == every.elements
    assert found["coverage"]["median"] == pytest.approx(every.median, nan_ok=True)


def test_forks_are_those_of_the_trace_by_information() -> None:
    trace = attention()
    shares = trace.influence("forks").shares
    told = payload(trace)["choices"]
    mine = {f"{f['name']}/{b['name']}": b["share"] for f in told for b in f["branches"]}
    assert mine == {name: share if share == share else "nan" for name, share in shares.items()}
    known = [f for f in told if all(b["share"] != "nan" for b in f["branches"])]
    for fork in known:
        assert sum(b["share"] for b in fork["branches"]) == pytest.approx(1)
    assert payload(perceptron())["choices"] == []


@pytest.mark.parametrize("make", [attention, recurrent, nameless], ids=lambda m: m.__name__)
def test_routes_are_the_paths_of_the_sample(make: Callable[..., Trace]) -> None:
    trace = make()
    found = payload(trace, sample=60, seed=3)
    paths = trace.paths(sample=60, seed=3)
    sample, routes = found["sample"], found["routes"]
    elements = sum(leaf["elements"] for leaf in found["leaves"])
    assert sample == {
        "paths": len(paths),
        "drawn": min(60, elements),
        "elements": elements,
        "seed": 3,
    }
    rows, words, modules = found["operators"], found["words"], found["modules"]
    told: Counter[tuple[str, ...]] = Counter()
    for route in routes:
        told[tuple(words[rows["name"][n]] for n in route["operators"])] += route["count"]
        names = [modules[n]["name"] for n in route["modules"]]
        passed = (modules[rows["module"][n]]["name"] for n in route["operators"])
        assert names == [name for name, _ in groupby(filter(None, passed))]
        assert route["operators"][-1] == 0
        assert route["share"] == pytest.approx(route["count"] / len(paths))
        assert route["starts"]
        for start in route["starts"]:
            at, way = found["forest"]["next"][start], []
            while at >= 0:
                way.append(found["forest"]["operator"][at])
                at = found["forest"]["next"][at]
            assert way == route["operators"]
    if len(routes) < 50:
        assert told == Counter(tuple(path.operators) for path in paths)
        assert sum(route["share"] for route in routes) == pytest.approx(1)
        assert sum(route["weighted"] for route in routes) == pytest.approx(1)
    counts = [route["count"] for route in routes]
    assert counts == sorted(counts, reverse=True)


# Sizes --------------------------------------------------------------------------------------------


def test_a_wide_model_keeps_to_the_budget() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(600, 600) for _ in range(12)]
    model = nn.Sequential(*(each for layer in layers for each in (layer, nn.Tanh())))
    with gt.watch(model) as watch:
        loss = model(torch.randn(2, 600)).square().mean()
    trace = watch.trace(loss)
    found = payload(trace)
    listed = [len(leaf["element"]) for leaf in found["leaves"]]
    assert max(listed) == LEAF_MAX_ELEMENTS and sum(listed) <= 4_000
    assert 2_000 < len(found["forest"]["next"]) <= 60_000
    for leaf in found["leaves"]:
        assert min(leaf["start"]) >= 0
        assert abs(leaf["gradient"][0]) == pytest.approx(leaf["largest"], rel=1e-6)


def test_a_deep_chain_is_followed_by_fewer_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "FULL", Limits(elements=50, points=500, steps=4_000))
    x = torch.linspace(0.5, 1, 300).requires_grad_()
    y = x
    for _ in range(100):
        y = y * 1.01
    found = payload(gt.trace(y.sum(), names={"x": x}))
    assert found["sample"]["drawn"] == 4_000 // 102
    assert len(found["forest"]["next"]) <= 500
    starts = found["leaves"][0]["start"]
    assert len(starts) == 4_000 // 102
    assert starts.count(-2) > 30 and any(start >= 0 for start in starts)


def test_numbers_that_are_not_finite() -> None:
    x = torch.tensor([0.0, 4.0], requires_grad=True)
    found = payload(gt.trace((x.sqrt() * 2).sum(), names={"x": x}, nonfinite="allow"))
    (leaf,) = found["leaves"]
    assert leaf["gradient"] == [math.inf, 0.5]
    assert leaf["largest"] == "inf" and leaf["norm"] == "inf"
    y = torch.tensor([0.0, 1.0], requires_grad=True)
    loss = (y * torch.tensor([math.nan, 1.0])).sum()
    (leaf,) = payload(gt.trace(loss, names={"y": y}, nonfinite="allow"))["leaves"]
    assert math.isnan(leaf["gradient"][0]) and leaf["largest"] == "nan"


def test_a_model_without_parameters() -> None:
    model = nn.Sequential(nn.Tanh(), nn.ReLU())
    x = torch.randn(3, requires_grad=True, generator=torch.Generator().manual_seed(0))
    with gt.watch(model) as watch:
        loss = model(x).sum()
    found = payload(watch.trace(loss))
    assert [m["parameters"] for m in found["modules"]] == [0, 0, 0]
    assert [leaf["parameter"] for leaf in found["leaves"]] == [False]


def test_the_same_trace_gives_the_same_bytes() -> None:
    one, two = (encode.contained(attention()._view()) for _ in range(2))
    assert one == two
    other = encode.contained(attention()._view(seed=1))
    assert other != one
