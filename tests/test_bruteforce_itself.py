"""The oracle on graphs worked out by hand, and against autograd on random ones."""

from __future__ import annotations

import ast
import math
import random
from collections import Counter
from pathlib import Path as File

import bruteforce
import pytest
import randomgraphs
import torch
import torch.nn.functional as F
from bruteforce import Hop, NotFinite, Path, ScalarGraph, TooManyPaths, Weights, sharp
from randomgraphs import NAMES, TRAITS, Rotate, Sample, build
from thorough import few
from torch import Tensor

SEEDS = range(few(80, 200))


def leaf(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64, requires_grad=True)


def number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64, requires_grad=True)


def graph_of(loss: Tensor, seed: Tensor | None = None, /, **leaves: Tensor) -> ScalarGraph:
    return ScalarGraph.of(loss, leaves, seed)


def names(graph: ScalarGraph, path: Path | None) -> list[str]:
    assert path is not None
    return [graph.operator(edge.consumer) for edge in path.edges]


# By hand


def test_a_square_has_two_paths() -> None:
    x = number(3.0)
    graph = graph_of(x * x, x=x)
    paths = graph.paths("x", ())
    assert [path.weight for path in paths] == [3.0, 3.0]
    assert [path.edges[0].position for path in paths] == [0, 1]
    assert graph.count_paths("x") == [2]
    assert graph.greedy("x", ()) == paths[0]  # a tie goes to the first
    assert all(graph.greedy_ok(path.edges, "x", 0, 0.0) for path in paths)
    assert all(graph.viterbi_ok(path.edges, "x", 0, 0.0) for path in paths)


def test_a_product_of_a_sum() -> None:
    x, y, z = number(2.0), number(3.0), number(-4.0)
    graph = graph_of((x + y) * z, x=x, y=y, z=z)
    assert {name: list(graph.weights(name, 0)) for name in "xyz"} == {
        "x": [-4.0],
        "y": [-4.0],
        "z": [5.0],
    }
    assert names(graph, graph.greedy("x", 0)) == ["AddBackward0", "MulBackward0"]
    assert names(graph, graph.greedy("z", 0)) == ["MulBackward0"]
    assert graph.size == 4
    assert [graph.operator(number) for number in range(2)] == ["MulBackward0", "AddBackward0"]


def test_a_chain_of_tanh_is_one_path() -> None:
    x = number(0.5)
    graph = graph_of(x.tanh().tanh(), x=x)
    inner = math.tanh(0.5)
    expected = (1 - inner**2) * (1 - math.tanh(inner) ** 2)
    (path,) = graph.paths("x", 0)
    assert path.weight == pytest.approx(expected, rel=1e-15)
    assert len(path.edges) == 2


@pytest.mark.parametrize(("weight", "through"), [(-3.0, 1), (0.5, 0)])
def test_a_residual_sum_has_a_path_by_each_way(weight: float, through: int) -> None:
    x, w = number(2.0), number(weight)
    graph = graph_of(x + w * x, x=x, w=w)
    assert sorted(graph.weights("x", 0)) == sorted([1.0, weight])
    assert graph.weights("x", 0).sum() == 1 + weight
    assert graph.weights("w", 0) == [2.0]
    found = names(graph, graph.greedy("x", 0))
    assert found == ["MulBackward0"] * through + ["AddBackward0"]


def test_softmax_has_one_weight_for_each_pair() -> None:
    x, c = leaf(0.1, -0.4, 0.7), [2.0, -1.0, 0.5]
    graph = graph_of((x.softmax(0) * torch.tensor(c, dtype=torch.float64)).sum(), x=x)
    y = x.softmax(0).tolist()
    for i in range(3):
        expected = [y[i] * ((i == j) - y[j]) * c[j] for j in range(3)]
        assert list(graph.weights("x", i)) == pytest.approx(expected, rel=1e-13)


def test_broadcasting_is_undone_element_by_element() -> None:
    x, y = leaf(2.0), leaf(1.0, 2.0, 3.0)
    graph = graph_of((x * y).sum(), x=x, y=y)
    assert list(graph.weights("x", 0)) == [1.0, 2.0, 3.0]
    assert [list(graph.weights("y", i)) for i in range(3)] == [[2.0]] * 3
    path = graph.greedy("x", 0)
    assert path is not None and graph.places[path.edges[0].above].element == 2


def test_a_shared_leaf_has_the_paths_of_all_its_uses() -> None:
    w, x = number(3.0), number(2.0)
    graph = graph_of((w * x).square() + w, w=w, x=x)
    assert sorted(graph.weights("w", 0)) == [1.0, 24.0]  # 2(wx)·x, and 1
    assert list(graph.weights("x", 0)) == [36.0]


def test_a_dead_unit_has_no_path() -> None:
    x = leaf(-1.0, 2.0)
    graph = graph_of(x.relu().sum(), x=x)
    assert graph.count_paths("x") == [0, 1]
    assert graph.paths("x", 0) == [] and graph.greedy("x", 0) is None
    assert not graph.weights("x", 0).bool() and graph.weights("x", 1).bool()
    assert graph.greedy_ok(None, "x", 0) and graph.viterbi_ok(None, "x", 0)
    assert not graph.greedy_ok(None, "x", 1) and not graph.viterbi_ok(None, "x", 1)


def test_a_leaf_that_is_not_reached_has_no_path() -> None:
    x, y = number(1.0), leaf(1.0, 2.0)
    graph = graph_of(x * (y * 0).sum(), x=x, y=y, z=leaf(1.0))
    assert graph.count_paths("y") == [0, 0] and graph.count_paths("z") == [0]
    assert graph.greedy("z", 0) is None and graph.paths("z", 0) == []
    assert graph.table("y", Weights.max).tolist() == [0.0, 0.0]


def test_greedy_goes_by_the_consumer_and_viterbi_by_the_path() -> None:
    # By the matrix come 3 and -2.5, which make 0.5; by the sum comes 1.
    x = leaf(1.0)
    matrix = torch.tensor([[3.0], [-2.5]], dtype=torch.float64)
    graph = graph_of((matrix @ x).sum() + x.sum(), x=x)
    assert names(graph, graph.greedy("x", 0)) == ["SumBackward0", "AddBackward0"]
    best = graph.viterbi("x", 0)
    assert best is not None and best.weight == 3.0
    assert not graph.greedy_ok(best.edges, "x", 0)
    greedy = graph.greedy("x", 0)
    assert greedy is not None and not graph.viterbi_ok(greedy.edges, "x", 0)


def test_greedy_goes_by_gradients_not_by_paths() -> None:
    # a is worth 4 - 3.5, b is worth 1
    x = number(1.0)
    a, b = x * 1.0, x * 1.0
    graph = graph_of(4 * a - 3.5 * a + b, x=x)
    best = graph.viterbi("x", 0)
    assert best is not None and best.weight == 4.0
    greedy = graph.greedy("x", 0)
    assert greedy is not None and greedy.weight == 1.0


def test_inside_a_consumer_greedy_takes_the_largest_part() -> None:
    x = leaf(1.0)
    graph = graph_of((x * leaf(1.0, -5.0, 3.0).detach()).sum(), x=x)
    greedy = graph.greedy("x", 0)
    assert greedy is not None and greedy.weight == -5.0
    wrong = graph.paths("x", 0)[2]
    assert "gives more" in str(graph.greedy_fault(wrong.edges, "x", 0))


def test_where_the_gradient_cancels_there_is_no_greedy_path() -> None:
    x = number(2.0)
    y = x.exp()
    graph = graph_of(y - y, x=x)
    assert len(graph.paths("x", 0)) == 2
    assert graph.greedy("x", 0) is None and graph.greedy_ok(None, "x", 0, 0.0)
    claimed = graph.paths("x", 0)[0].edges
    assert not graph.greedy_ok(claimed, "x", 0, 0.0)
    assert graph.viterbi_ok(claimed, "x", 0)


def test_a_leaf_with_opposite_uses_still_has_a_greedy_path() -> None:
    x = number(2.0)
    graph = graph_of(x - x, x=x)
    greedy = graph.greedy("x", 0)
    assert greedy is not None and greedy.weight == 1.0


def test_what_is_no_path_is_refused() -> None:
    x, y = leaf(1.0, 2.0), leaf(3.0, 4.0)
    graph = graph_of((x * y).sum(), x=x, y=y)
    (path,) = graph.paths("x", 0)
    for edges in (path.edges[:1], path.edges[1:], (), graph.paths("x", 1)[0].edges):
        assert "no path" in str(graph.greedy_fault(edges, "x", 0))
        assert "no path" in str(graph.viterbi_fault(edges, "x", 0))


def test_ties_are_accepted_either_way_within_rounding() -> None:
    x = leaf(1.0)
    third = torch.tensor([0.1 + 0.2, 0.3], dtype=torch.float64)
    graph = graph_of((x * third).sum(), x=x)
    one, two = graph.paths("x", 0)
    assert one.weight > two.weight
    assert graph.greedy_ok(two.edges, "x", 0) and not graph.greedy_ok(two.edges, "x", 0, 0.0)
    assert graph.viterbi_ok(two.edges, "x", 0) and not graph.viterbi_ok(two.edges, "x", 0, 0.0)


# What semirings say of a list of paths


def test_statistics() -> None:
    weights = Weights([2.0, -3.0, 0.5])
    assert weights.sum() == -0.5
    assert weights.abs() == 5.5
    assert weights.max() == 3.0
    assert weights.extremes() == (2.0, -3.0)
    assert weights.span() == (2.0, -3.0)
    assert weights.count() == 3
    assert weights.top(2) == [3.0, 2.0]
    assert weights.top(4) == [3.0, 2.0, 0.5, 0.0]
    assert weights.top(2, signed=True) == [-3.0, 2.0]
    mass, spread = weights.entropy_sums()
    expected = -2 * math.log(2) - 3 * math.log(3) - 0.5 * math.log(0.5)
    assert mass == 5.5 and spread == pytest.approx(expected)


def test_statistics_of_no_path_and_of_one_sign() -> None:
    none = Weights()
    assert (none.sum(), none.abs(), none.max(), none.count()) == (0, 0, 0, 0)
    assert none.extremes() == (0.0, 0.0) and none.span() == (-math.inf, math.inf)
    assert none.entropy_sums() == (0.0, 0.0) and none.entropy() == 0.0
    assert Weights([1.0, 2.0]).extremes() == (2.0, 0.0)
    assert Weights([1.0, 2.0]).span() == (2.0, 1.0)


def test_entropy_of_equal_paths_is_the_logarithm_of_their_number() -> None:
    x = leaf(1.0)
    graph = graph_of(x.expand(4).mean() * 7, x=x)
    assert graph.weights("x", 0).entropy() == pytest.approx(math.log(4))


def test_a_table_has_the_shape_of_the_leaf() -> None:
    x = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    graph = graph_of((x @ x.T).sum(), x=x)
    assert graph.table("x", Weights.count).tolist() == [[4.0] * 3] * 2
    assert graph.table("x", Weights.extremes).shape == (2, 3, 2)
    assert graph.table("x", lambda weights: weights.top(3)).shape == (2, 3, 3)


# What the walk must mind


def test_several_losses_are_weighed_by_the_seed() -> None:
    x = leaf(1.0, 2.0, 3.0)
    graph = graph_of(x.square(), torch.tensor([1.0, 0.0, -2.0]), x=x)
    assert [list(graph.weights("x", i)) for i in range(3)] == [[2.0], [], [-12.0]]


def test_outputs_of_one_node_are_vertices_of_their_own() -> None:
    x = leaf(1.0, 2.0, 4.0)
    one, _, three = x.unbind(0)
    graph = graph_of(2 * one + three, x=x)
    assert [list(graph.weights("x", i)) for i in range(3)] == [[2.0], [], [1.0]]
    (path,) = graph.paths("x", 2)
    assert graph.places[path.edges[0].above].slot == 2


def test_two_outputs_that_reach_one_element_are_one_consumer() -> None:
    x = leaf(1.0, 3.0)
    variance, mean = torch.var_mean(x, 0)
    graph = graph_of(variance + mean, x=x)
    at = graph.vertex("x", 1)
    assert at is not None
    (use,) = graph.consumers(at)
    assert [graph.places[edge.above].slot for edge in use.edges] == [0, 1]
    assert use.contribution == 2.5  # 2·(3 - 2) and 1/2


@pytest.mark.parametrize("both", [True, False])
def test_functions_of_the_user(both: bool) -> None:
    a, b = leaf(1.0), leaf(2.0)
    one, two = Rotate.apply(a, 0.5, b)  # type: ignore[no-untyped-call]
    graph = graph_of((one + 2 * two if both else one).sum(), a=a, b=b)
    cos, sin = math.cos(0.5), math.sin(0.5)
    assert sorted(graph.weights("a", 0)) == pytest.approx([cos, 2 * sin] if both else [cos])
    assert sorted(graph.weights("b", 0)) == pytest.approx([-sin, 2 * cos] if both else [-sin])


def test_writes_in_place() -> None:
    x, y = leaf(1.0, 2.0), number(5.0)
    z = x * 3
    z[0] = y
    z[1].mul_(2)
    graph = graph_of(z.sum(), x=x, y=y)
    assert [list(graph.weights("x", i)) for i in range(2)] == [[], [6.0]]
    assert list(graph.weights("y", 0)) == [1.0]


def test_nothing_is_left_behind() -> None:
    x = leaf(1.0, 2.0)
    loss = x.tanh().sum()
    graph_of(loss, x=x)
    assert x.grad is None
    assert torch.autograd.grad(loss, x)  # the graph is still there


def test_float32_is_weighed_in_float64() -> None:
    x = torch.ones(2, requires_grad=True)
    assert graph_of(x.exp().sum(), x=x).weights("x", 0) == [float(torch.ones(()).exp())]


def test_infinite_derivatives_are_refused() -> None:
    x = leaf(0.0, 1.0)
    with pytest.raises(NotFinite, match="SqrtBackward0"):
        graph_of(x.sqrt().sum(), x=x)


def test_too_many_paths_are_counted_and_not_listed() -> None:
    x = torch.full((4, 4), 0.5, dtype=torch.float64, requires_grad=True)
    y = x
    for _ in range(30):
        y = y @ torch.full((4, 4), 0.25, dtype=torch.float64)
    graph = graph_of(y.sum(), x=x)
    assert graph.count_paths("x") == [4**30] * 16 and graph.most_paths() == 4**30
    with pytest.raises(TooManyPaths):
        graph.paths("x", 0)
    with pytest.raises(TooManyPaths):
        graph.weights("x", (1, 2))
    with pytest.raises(TooManyPaths):
        ScalarGraph.of(y.sum(), {"x": x}, most_edges=100)
    with pytest.raises(TooManyPaths):
        ScalarGraph.of(y.sum(), {"x": x}, most_paths=100)


def test_elements_are_named_flat_or_by_dimension() -> None:
    x = torch.arange(6, dtype=torch.float64).reshape(2, 3).requires_grad_()
    graph = graph_of(x.square().sum(), x=x)
    assert graph.weights("x", (1, 2)) == graph.weights("x", 5) == [10.0]
    for wrong in (6, -1, (2, 0), (0,)):
        with pytest.raises(IndexError):
            graph.paths("x", wrong)


def test_claims_may_leave_things_open() -> None:
    x, y = leaf(1.0, 2.0), leaf(3.0, 4.0)
    loss = (x * y).sum() + (x * x).sum()
    graph = graph_of(loss, x=x, y=y)
    add, total = Hop("AddBackward0"), Hop("SumBackward0")
    assert len(graph.matching("x", 0, [Hop("MulBackward0"), total, add])) == 3
    assert len(graph.matching("x", 0, [Hop(position=1), Hop(), Hop()])) == 1
    square = loss.grad_fn.next_functions[1][0].next_functions[0][0]  # type: ignore[union-attr]
    found = graph.matching("x", 1, [Hop(square, element=1), total, Hop(slot=0)])
    assert [path.weight for path in found] == [2.0, 2.0]
    assert all(graph.is_path(path.edges, "x", 1) for path in found)
    assert not graph.matching("x", 1, [Hop(element=0), total, add])
    assert not graph.matching("x", 1, [Hop(), Hop()])
    assert graph.describe(found[0]).count("MulBackward0") == 1


def test_zeros_that_rounding_makes_can_be_dropped() -> None:
    x = leaf(1.0, 2.0)
    weight = torch.tensor([[1.0, 1e-17], [1.0, 1.0]], dtype=torch.float64)
    loss = (weight @ x).sum()
    graph = graph_of(loss, x=x)
    assert graph.count_paths("x") == [2, 2] and graph.faintest == 1e-17
    assert not sharp(graph, loss, {"x": x})
    assert ScalarGraph.of(loss, {"x": x}, zero=1e-12).count_paths("x") == [2, 1]


def test_norms_of_ties_may_not_be_sharp() -> None:
    x = leaf(0.7, 0.7, 0.3)  # the first two do not hang on the third, but for rounding
    loss = (F.layer_norm(x, (3,), eps=0.0) * torch.arange(1.0, 4.0)).sum()
    assert not sharp(graph_of(loss, x=x), loss, {"x": x})


def test_derivatives_that_are_mostly_noise_are_seen() -> None:
    x = leaf(0.1, 0.7, -0.3)
    assert graph_of(x.softmax(0).square().sum(), x=x).blur < 1e-14
    for steep in (60, 300):  # at 300 what is left of 1 - y is 0, not noise
        assert graph_of((x * steep).softmax(0).square().sum(), x=x).blur > 1e-10


def test_a_loss_without_a_graph_is_refused() -> None:
    with pytest.raises(ValueError, match="grad_fn"):
        ScalarGraph.of(torch.ones(()), {})


# On random programs


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    return [build(seed) for seed in SEEDS]


def test_the_sum_over_paths_is_the_gradient(samples: list[Sample]) -> None:
    for sample in samples:
        leaves = list(sample.leaves.values())
        wanted = torch.autograd.grad(sample.loss, leaves, allow_unused=True, retain_graph=True)
        for (name, x), grad in zip(sample.leaves.items(), wanted):
            grad = torch.zeros_like(x) if grad is None else grad
            off = (sample.graph.table(name, Weights.sum) - grad).abs()
            mass = sample.graph.table(name, Weights.abs)
            assert bool((off <= 1e-9 * mass).all()), (sample, name)


def test_blurred_programs_have_the_gradient_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is drawn again for being ill-conditioned is not thereby hidden."""
    monkeypatch.setattr(randomgraphs, "BLUR", math.inf)
    for sample in map(build, range(1000, few(1040, 1100))):
        leaves = list(sample.leaves.values())
        wanted = torch.autograd.grad(sample.loss, leaves, allow_unused=True)
        largest = max((float(grad.abs().amax()) for grad in wanted if grad is not None), default=0)
        for name, grad in zip(sample.leaves, wanted):
            found = sample.graph.table(name, Weights.sum)
            grad = torch.zeros_like(found) if grad is None else grad
            torch.testing.assert_close(found, grad, rtol=1e-9, atol=1e-9 * max(1, largest))


def test_both_ways_to_list_paths_agree(samples: list[Sample]) -> None:
    for sample in samples[: few(20, 60)]:
        graph = sample.graph
        for name, x in sample.leaves.items():
            assert graph.table(name, Weights.count).flatten().tolist() == graph.count_paths(name)
            for i in range(x.numel()):
                paths = graph.paths(name, i)
                assert all(graph.is_path(path.edges, name, i) for path in paths)
                listed = sorted(path.weight for path in paths)
                assert listed == pytest.approx(sorted(graph.weights(name, i)), rel=1e-12)
                assert len({path.edges for path in paths}) == len(paths)


def test_greedy_paths_pass_their_own_test(samples: list[Sample]) -> None:
    for sample in samples:
        graph = sample.graph
        for name, x in sample.leaves.items():
            for i in range(x.numel()):
                path = graph.greedy(name, i)
                edges = None if path is None else path.edges
                assert graph.greedy_fault(edges, name, i, 0.0) is None, (sample, name, i)
                assert path is None or graph.counts[path.edges[0].below]


def test_paths_drawn_at_random_seldom_pass_for_greedy(samples: list[Sample]) -> None:
    """The test of greedy paths has teeth: among many paths, most are refused."""
    rng, passed = random.Random(0), Counter[bool]()
    for sample in samples:
        graph = sample.graph
        for name, x in sample.leaves.items():
            for i in range(x.numel()):
                if 4 <= graph.count_paths(name)[i] <= 2000:
                    path = rng.choice(graph.paths(name, i))
                    passed[graph.greedy_ok(path.edges, name, i)] += 1
    assert passed[True] < 0.3 * passed[False]


def test_a_seed_determines_the_program() -> None:
    for seed in range(20):
        one, two = build(seed), build(seed)
        assert repr(one) == repr(two) and one.traits == two.traits
        assert torch.equal(one.loss, two.loss)
        assert one.graph.up == two.graph.up
    assert len({repr(build(seed)).split(": ")[1] for seed in range(20)}) == 20


def test_programs_stay_small(samples: list[Sample]) -> None:
    assert max(sample.graph.most_paths() for sample in samples) <= bruteforce.LIMIT
    assert max(sample.graph.size for sample in samples) <= randomgraphs.EDGES
    small = build(3, limit=20, edges=100)
    assert small.graph.most_paths() <= 20 and small.graph.size <= 100


def test_operators_and_traits_all_turn_up() -> None:
    """Every operator is drawn; what is drawn fits often enough."""
    rng = random.Random(0)
    found, traits = Counter[str](), set[str]()
    for seed in range(1200):
        draft = randomgraphs.Draft(random.Random(seed), seed % 7 == 0, torch.float64)
        for _ in range(8):
            draft.step(rng.choice(NAMES))
        found.update(draft.ops)
        traits |= draft.traits
    assert not [name for name in NAMES if not found[name]]
    assert traits == set(TRAITS) - {"shared", "dead", "cancelled"}  # which the graph shows


def test_float32_programs(samples: list[Sample]) -> None:
    sample = build(1, dtype=torch.float32)
    assert sample.loss.dtype is torch.float32
    loss, leaves, text = randomgraphs.graphs(random.Random(5))
    assert loss.requires_grad and leaves and text.startswith("build(")


def test_few_draws_are_thrown_away(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = Counter[str]()
    attempt = randomgraphs._attempt

    def counted(*args: object) -> Sample:
        tries["all"] += 1
        return attempt(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(randomgraphs, "_attempt", counted)
    for seed in range(100):
        build(seed)
    assert tries["all"] <= 115


@pytest.mark.parametrize("module", [bruteforce, randomgraphs])
def test_the_oracle_knows_nothing_of_gradtrace(module: object) -> None:
    tree = ast.parse(File(str(module.__file__)).read_text())  # type: ignore[attr-defined]
    imported = {
        name.name if isinstance(node, ast.Import) else str(node.module)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in node.names
    }
    assert not [name for name in imported if name.startswith("gradtrace")]
