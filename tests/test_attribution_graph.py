"""``attribution.graph``: edges against all paths, one by one; conservation; pruning; JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import in_float64
from oracle import matrix_of
from test_attribution import EMBEDDINGS
from torch import Tensor, nn

import gradtrace as gt
from gradtrace.attribution.graph import AttributionGraph
from gradtrace.attribution.graph_data import Sizes
from gradtrace.attribution.graph_making import influences, prune
from gradtrace.attribution.result import Attribution
from gradtrace.errors import GradtraceError, UnknownName

EXAMPLE = Path(__file__).parent / "report" / "attribution_graph.json"


class Branch(nn.Module):
    """Width 2 to 2, not linear."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(2, 2), nn.Linear(2, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).tanh())


class Heads(nn.Module):
    """Attention of two heads of width 1."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 2
        self.q, self.v, self.out = (nn.Linear(2, 2, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, v = (f(x).view(-1, 2, 1).transpose(0, 1) for f in (self.q, self.v))
        mixed = (q @ x.t()[:, None]).softmax(-1) @ v
        return self.out(mixed.transpose(0, 1).reshape(-1, 2))


class Residual(nn.Module):
    """``y = x + heads(x); y + branch(norm(y)) + branch(y)``: the branch is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.norm, self.branch = Heads(), nn.LayerNorm(2), Branch()

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.attn(x)
        return y + self.branch(self.norm(y)) + self.branch(y)


def small() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(Residual(), nn.Linear(2, 1)).double()
    return model, torch.randn(2, 2, dtype=torch.float64, requires_grad=True)


def attributed(rule: str = "gradient") -> Attribution:
    model, x = small()
    with gt.watch(model) as watch:
        scalar = model(x)[1, 0]
    return watch.attribute(scalar, {"x": x}, rule=rule)


# Against all paths -------------------------------------------------------------------------------


def all_paths(found: Attribution) -> Iterator[tuple[list[tuple[int, int]], float]]:
    """Every path from the output to an element of x: (block, element of what it takes) on the way,
    and the product of the entries of all maps along it.
    """
    program = found.trace.program
    (leaf,) = program.leaves
    steps = [(n, step) for n, b in enumerate(program.blocks) for step in (*b.steps, *b.merges)]
    takes = {value: n for n, b in enumerate(program.blocks) for value in b.takes.values()}
    users: dict[int, list[tuple[int, Tensor]]] = {}
    for _, step in steps:
        for term in step.terms:
            users.setdefault(term.value, []).append((step.out, matrix_of(program.maps[term.map])))
    pending: list[tuple[int, int, list[tuple[int, int]], float]] = [(program.root, 0, [], 1.0)]
    while pending:
        value, element, way, weight = pending.pop()
        if value == leaf.value:
            yield [*way, (-1, element)], weight
            continue
        here = [*way, (takes[value], element)] if value in takes else way
        for out, matrix in users.get(value, ()):
            column = matrix.reshape(-1, matrix.shape[-1])[:, element]
            for row in column.nonzero().flatten().tolist():
                pending.append((out, row, here, weight * float(column[row])))


def edges_by_paths(found: Attribution) -> dict[tuple[str, str], float]:
    """The same edges, path by path: the nodes that each passes, in order."""
    blocks = found.trace.program.blocks
    x = found.directions["x"].flatten().tolist()
    attn = [n for n, b in enumerate(blocks) if b.place.module.startswith("0.attn")]
    joined = next(
        n
        for n in attn
        if blocks[n].operator in ("ViewBackward0", "ReshapeAliasBackward0")
        and blocks[n].place.module == "0.attn"
    )  # the last: joins the heads
    edges: dict[tuple[str, str], float] = {}
    for way, weight in all_paths(found):
        nodes = ["output"]
        for block, element in way:
            if block == -1:
                name = f"x[{element // 2}]"
            elif block == joined:
                name = f"0.attn head {element % 2}"
            elif blocks[block].place.module.startswith("0.branch"):
                name = f"0.branch call {blocks[block].place.call}"
            elif blocks[block].place.module == "1":
                name = "1"
            else:
                continue
            if nodes[-1] != name:
                nodes.append(name)
        score = weight * x[way[-1][1]]
        for target, source in pairwise(nodes):
            edges[source, target] = edges.get((source, target), 0.0) + score
    return edges


@pytest.mark.parametrize("rule", ["gradient", "frozen"])
def test_edges_are_sums_over_paths(rule: str) -> None:
    """Attention of two heads, a norm, residual sums, a module that is called twice."""
    found = attributed(rule)
    want = edges_by_paths(found)
    graph = found.graph(nodes=1, edges=1)
    have = {(edge.source, edge.target): edge.score for edge in graph.edges}
    assert have == pytest.approx({ends: x for ends, x in want.items() if ends in have})
    assert all(abs(x) < 1e-12 for ends, x in want.items() if ends not in have)
    assert len(have) > 15 and {node.kind for node in graph.nodes} == {
        "input",
        "head",
        "module",
        "output",
    }
    assert graph.defect < 1e-14 and graph.kept == pytest.approx((1, 1))


def test_positions_add_up_to_modules() -> None:
    found = attributed()
    whole, apart = (found.graph(nodes=1, edges=1, positions=p) for p in (False, True))
    assert apart.defect < 1e-14
    sums: dict[str, float] = {}
    for node in apart.nodes:
        name = node.id.partition(" at ")[0]
        sums[name] = sums.get(name, 0.0) + node.score
    assert sums == pytest.approx({node.id: node.score for node in whole.nodes})
    assert apart["0.attn head 1 at 1"].position == (1,)


def test_modules_are_chosen() -> None:
    found = attributed()
    graph = found.graph(nodes=1, edges=1, modules=["0.branch.*"])
    names = [node.id for node in graph.nodes if node.kind == "module"]
    assert sorted(names) == [f"0.branch.{x} call {n}" for x in ("down", "up") for n in (0, 1)]
    assert graph.defect < 1e-14
    assert graph["0.branch.up call 0"].score == pytest.approx(
        found.graph(nodes=1, edges=1)["0.branch call 0"].score
    )
    with pytest.raises(UnknownName, match="passes a module 'brunch'"):
        found.graph(modules=["brunch"])


# Conservation ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EMBEDDINGS)
@pytest.mark.parametrize("rule", ["gradient", "frozen"])
def test_what_enters_a_node_leaves_it(name: str, rule: str) -> None:
    """On twelve architectures: of every node, of every position, and of the output."""
    model, loss_of = in_float64(name)
    model.eval()
    seen: list[Tensor] = []
    hook = model.get_submodule(EMBEDDINGS[name]).register_forward_hook(
        lambda _, __, out: seen.append(out)
    )
    with gt.watch(model) as watch:
        loss = loss_of(model)
    hook.remove()
    found = watch.attribute(loss, {f"tokens{n}": x for n, x in enumerate(seen)}, rule=rule)
    graph = found.graph(nodes=1, edges=1)
    assert graph.defect < 1e-12
    for node in graph.nodes:
        enters, leaves = (sum(e.score for e in f(node.id)) for f in (graph.into, graph.out_of))
        if node.kind != "input":
            assert enters == pytest.approx(node.score, rel=1e-9, abs=1e-12)
        if node.kind != "output":
            assert leaves == pytest.approx(node.score, rel=1e-9, abs=1e-12)
    scores = {f"{r.input}[{','.join(map(str, r.position))}]": r.score for r in found.tokens}
    for node in graph.nodes:
        if node.kind == "input":
            assert node.score == pytest.approx(scores[node.id], rel=1e-9, abs=1e-12)
    assert graph["output"].score == found.sum and graph.total == found.sum


def test_head_of_gpt2_is_the_score_through_it() -> None:
    """As ``by`` finds it, from the scalar to the inputs."""
    model, _ = in_float64("gpt2")
    model.eval()
    with gt.watch(model) as watch:
        tokens = model.get_input_embeddings()(torch.tensor([[5, 9, 3, 7]]))
        scalar = model(inputs_embeds=tokens).logits[0, -1, 5]
    found = watch.attribute(scalar, {"tokens": tokens})
    graph = found.graph(nodes=1, edges=1)
    table = found.by("heads")
    for name, score in zip(table.column("component"), table.column("score")):
        assert graph[name].score == pytest.approx(score)
        assert graph[name].layer == int(name.split(".")[2])
    ranks = [graph[f"transformer.h.{n}.attn head 0"].rank for n in range(2)]
    assert ranks == [1, 3] and graph["output"].rank == 6


def test_integrated_graph_is_the_mean() -> None:
    model, x = small()
    graphs = []

    def scalar(x: Tensor) -> Tensor:
        return model(x)[1, 0]  # type: ignore[no-any-return]

    found = gt.watch(model).attribute(scalar, {"x": x}, integrated=2)
    for part in (0.25, 0.75):
        at = (part * x.detach()).requires_grad_()
        graphs.append(gt.watch(model).attribute(scalar, {"x": at}).graph(nodes=1, edges=1))
    graph = found.graph(nodes=1, edges=1)
    assert graph.defect < 1e-14 and graph.points == 2
    for edge in graph.edges:
        each = [
            e.score / part
            for part, g in zip((0.25, 0.75), graphs)
            for e in g.edges
            if e[:2] == edge[:2]
        ]
        assert edge.score == pytest.approx(sum(each) / 2)


# Shapes of models --------------------------------------------------------------------------------


def edges_of(scalar: Callable[..., Tensor], model: nn.Module, **inputs: Tensor) -> dict[Any, float]:
    graph = gt.watch(model).attribute(scalar, inputs).graph(nodes=1, edges=1)
    assert graph.defect < 1e-6
    return {(edge.source, edge.target): edge.score for edge in graph.edges}


def test_no_modules_scalars_and_the_input_itself() -> None:
    x = torch.tensor(3.0)
    assert edges_of(lambda x: x * x, nn.Identity(), x=x) == {("x[]", "output"): 18}
    two = {"x": x, "y": torch.tensor([2.0, 0.0])}
    found = edges_of(lambda x, y: (x * y).sum(), nn.Identity(), **two)
    assert found == {("x[]", "output"): 6, ("y[0]", "output"): 6}


def test_a_module_at_the_end_and_shared_wires() -> None:
    """A module's output that is the scalar; one that is used inside and outside of it."""

    class Both(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = 2 * x
            return y, y * 3

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.both, self.end = Both(), nn.Flatten(0)

        def forward(self, x: Tensor) -> Tensor:
            y, z = self.both(x)
            return y.sum() + z.sum()

    x = torch.tensor([1.0, 10.0])
    found = edges_of(Model(), Model(), x=x)
    assert sum(x for (_, target), x in found.items() if target == "output") == 88
    model = Model()
    graph = gt.watch(model).attribute(model, {"x": x}).graph(modules=["both"])
    assert [(e.source, e.score) for e in graph.edges] == [
        ("both", 88.0),
        ("x[1]", 80.0),
        ("x[0]", 8.0),
    ]

    class Summed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.exp().sum()

    model2 = nn.Sequential(Summed())
    assert edges_of(model2, model2, x=torch.ones(1)) == pytest.approx(
        {("x[0]", "0"): torch.e, ("0", "output"): torch.e}
    )


def test_a_module_that_calls_one_outside_it_is_opened() -> None:
    """Else there would be a cycle: caller → helper → caller."""

    class Caller(nn.Module):
        def __init__(self, helper: nn.Module) -> None:
            super().__init__()
            self.helper = [helper]
            self.first, self.last = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.helper[0](self.first(x)))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.helper = nn.Linear(2, 2)
            self.caller = Caller(self.helper)

        def forward(self, x: Tensor) -> Tensor:
            return self.caller(x).sum()

    torch.manual_seed(0)
    model = Model()
    found = edges_of(model, model, x=torch.randn(1, 2))
    ways = [("x[0]", "caller.first"), ("caller.first", "helper"), ("helper", "caller.last")]
    assert list(found) == [("caller.last", "output"), *reversed(ways)]


def test_half_precision() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)).to(torch.bfloat16)
    graph = (
        gt.watch(model)
        .attribute(lambda x: model(x).sum(), {"x": torch.randn(2, 4, dtype=torch.bfloat16)})
        .graph()
    )
    assert graph.defect < 0.05 and graph["output"].score == graph.total


# Pruning -----------------------------------------------------------------------------------------


def test_influence_and_pruning_by_hand() -> None:
    """``out ← a (3), b (-1); a ← x (1), y (1); b ← y (2)``."""
    scores = {
        ("a", "output"): 3.0,
        ("b", "output"): -1.0,
        ("x", "a"): 1.0,
        ("y", "a"): -1.0,
        ("y", "b"): 2.0,
    }
    nodes, edges = influences(scores)
    assert nodes == {"output": 1, "a": 0.75, "b": 0.25, "x": 0.375, "y": 0.625}
    assert edges["y", "b"] == 0.25 and edges["y", "a"] == 0.375
    kept, between, shares = prune(scores, Sizes(0.7, 1))  # of a and b, a holds 0.75
    assert kept == {"output", "a", "x", "y"} and shares == Sizes(0.75, 1)
    assert between == {("a", "output"): 1, ("x", "a"): 0.5, ("y", "a"): 0.5}  # anew, without b
    kept, between, shares = prune(scores, Sizes(1, 0.5))
    assert ("b", "output") not in between and ("y", "b") not in between and "b" not in kept
    assert prune(scores, Sizes(1, 1))[0] == set(nodes)
    assert prune({}, Sizes(1, 1))[0] == {"output"}


def test_pruned_graph_keeps_the_shares() -> None:
    found = attributed()
    whole, graph = found.graph(nodes=1, edges=1), found.graph(nodes=0.6, edges=0.7)
    assert len(graph.edges) < len(whole.edges) and len(graph.nodes) < len(whole.nodes)
    assert graph.whole == Sizes(len(whole.nodes), len(whole.edges))
    scores = {edge[:2]: edge.score for edge in whole.edges}
    assert all(scores[edge[:2]] == edge.score for edge in graph.edges)
    for node in graph.nodes:
        assert node.kind == "input" or graph.into(node.id)
        assert node.kind == "output" or graph.out_of(node.id)
        assert node == whole[node.id]
    influence = [edge.influence for edge in graph.edges]
    assert influence == sorted(influence, reverse=True)
    with pytest.raises(GradtraceError, match="nodes is the share of influence"):
        found.graph(nodes=80)


# JSON --------------------------------------------------------------------------------------------


def test_dict_and_back() -> None:
    graph = attributed().graph(positions=True)
    data = json.loads(json.dumps(graph.to_dict(), allow_nan=False))
    assert AttributionGraph.from_dict(data) == graph
    with pytest.raises(UnknownName, match="no node"):
        graph["0.attn head 7"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 2}, "version"),
        ({"format": "graph"}, "format"),
        ({"edges": [{"source": "a", "target": "b", "score": 1.0, "influence": 0.0}]}, "no node"),
    ],
)
def test_other_data_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(GradtraceError, match=f"no attribution graph.*{words}"):
        AttributionGraph.from_dict(attributed().graph().to_dict() | change)


def example() -> AttributionGraph:
    """The graph in ``EXAMPLE``, which tests of the report draw."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
    model = nn.ModuleDict(
        {
            "body": nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
            "out": nn.Linear(8, 5),
        }
    ).double()
    for parameter in model["body"].parameters():
        parameter.data *= 2
    words = ["the", "cat", "sat", "on", "the", "mat"]
    tokens = torch.randn(1, 6, 8, dtype=torch.float64, requires_grad=True)
    with gt.watch(model) as watch:
        logits = model["out"](model["body"](tokens))[0, -1]
    found = watch.attribute(logits[2] - logits[3], {"tokens": tokens}, tokens={"tokens": words})
    return found.graph()


def test_the_example_is_what_is_made() -> None:
    """Run this file to write it anew."""
    kept, made = AttributionGraph.from_dict(json.loads(EXAMPLE.read_text())), example()
    assert [node.id for node in kept.nodes] == [node.id for node in made.nodes]
    assert {edge[:2] for edge in kept.edges} == {edge[:2] for edge in made.edges}
    for edge in kept.edges:
        (same,) = (other for other in made.edges if other[:2] == edge[:2])
        assert same[2:] == pytest.approx(edge[2:])


if __name__ == "__main__":
    EXAMPLE.write_text(json.dumps(example().to_dict(), indent=1) + "\n")
