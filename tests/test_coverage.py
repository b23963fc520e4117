"""Coverage of paths, and agreement of rules, against listed paths and numbers found by hand."""

from __future__ import annotations

import dataclasses
import random
from math import isnan

import against_bruteforce
import pytest
import randomgraphs
import torch
from thorough import few
from torch import Tensor, nn

import gradtrace as gt
from gradtrace.errors import GradtraceError, UnknownName
from gradtrace.measures.agreement import PATH_RULES, same_paths
from gradtrace.paths.paths import LazyPaths, Path
from gradtrace.traced import Trace
from gradtrace.tracing.coverage import Coverage, of_paths, percent
from gradtrace.tracing.followed import ends_of, follow_sample

EPS = torch.finfo(torch.float64).eps


def by_rule(trace: Trace, rule: str) -> Trace:
    return dataclasses.replace(trace, rule=rule)


def leaf(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64, requires_grad=True)


def two_rules() -> Trace:
    """Of ``x`` three small paths lead through one branch, and one larger through the other."""
    x = leaf(1.0)
    many = gt.label((x * torch.full((3,), 2.0, dtype=x.dtype)).reshape(1, 3), 0, ["many"])
    one = gt.label((x * 5.0).reshape(1), 0, ["one"])
    return gt.trace(many.sum() - one.sum(), names={"x": x})


# One path -----------------------------------------------------------------------------------------


def test_a_path_carries_its_weight_over_the_gradient() -> None:
    x = leaf(3.0)
    path = gt.trace((x * x - 8.0 * x).sum(), names={"x": x}).path("x", 0)
    assert (path.weight, path.gradient, path.coverage, path.share) == (-8.0, -2.0, 4.0, 4.0)
    assert "weight -8, gradient -2, coverage 400.0%" in str(path)


def test_a_path_may_have_the_opposite_sign() -> None:
    path = two_rules().path("x", 0)
    by_viterbi = by_rule(two_rules(), "viterbi").path("x", 0)
    assert (path.weight, path.gradient, path.coverage) == (2.0, 1.0, 2.0)
    assert (by_viterbi.weight, by_viterbi.coverage) == (-5.0, -5.0)


def test_the_coverage_of_a_gradient_that_cancels_is_not_a_number() -> None:
    x = leaf(3.0)
    path = gt.trace((x * 2.0 - x * 2.0).sum(), names={"x": x}).path("x", 0)
    assert isnan(path.coverage)
    assert "cancel to 0" in str(path)


def test_paths_of_whole_tensors_have_no_coverage() -> None:
    x = leaf(3.0)
    trace = gt.trace((x * x).sum(), names={"x": x}, granularity="operator")
    assert isnan(trace.path("x").coverage)
    assert "coverage" not in str(trace.path("x"))
    with pytest.raises(GradtraceError, match="granularity='scalar'"):
        trace.coverage()
    with pytest.raises(GradtraceError, match="granularity='scalar'"):
        trace.agreement()


# Many paths ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(few(100, 2000)))
def test_coverage_is_that_of_the_listed_paths(seed: int) -> None:
    """Weight and gradient by brute force; the table of all elements, path by path."""
    sample = randomgraphs.build(seed)
    trace = gt.trace(sample.loss, names=sample.leaves)
    for rule in PATH_RULES:
        ruled = by_rule(trace, rule)
        parts, cancelled = [], 0
        for path in ruled.paths(sample=10**9):
            check_part(path, sample)
            if isnan(path.coverage) or abs(path.coverage) * EPS >= 1:
                cancelled += 1
            else:
                parts.append(path.coverage)
        found = ruled.coverage(sample=10**9)
        assert found.cancellations == cancelled
        assert found.parts == pytest.approx(sorted(parts), rel=1e-12)
        total = sum(sample.leaves[name].numel() for name in trace.gradients)
        assert found.elements + found.unreached == total
        assert not found.sampled


def check_part(path: Path, sample: randomgraphs.Sample) -> None:
    graph = sample.graph
    vertex = graph.vertex(path.name, path.index)
    assert vertex is not None
    noise = 1e-9 * graph.largest
    gradient = graph.gradient(vertex)
    if abs(gradient) < 1e3 * noise or isnan(path.coverage):
        assert abs(gradient) < 1e3 * noise or not gradient
        return
    same = graph.matching(path.name, path.index, against_bruteforce.hops_of(path))
    near = min(abs(p.weight / gradient - path.coverage) for p in same)
    assert near <= 1e-6 * (1 + abs(path.coverage)) + noise / abs(gradient)


def test_quartiles_by_hand() -> None:
    found = Coverage((-2.0, 0.0, 0.5, 1.0, 4.0), cancellations=3, nonfinite=2)
    assert (found.median, found.quartiles) == (0.5, (0.0, 1.0))
    assert (found.elements, found.opposite, found.cancelled, found.heavy) == (10, 0.1, 0.3, 0.1)
    even = Coverage((0.0, 1.0, 2.0, 3.0))
    assert (even.median, even.quartiles) == (1.5, (0.75, 2.25))
    assert isnan(Coverage(()).median) and isnan(Coverage(()).opposite)


def test_coverage_is_low_by_four_measures() -> None:
    assert not Coverage((0.3, 0.9, 1.0, 1.0)).is_low
    assert Coverage((0.2, 0.24, 0.24, 1.0)).is_low
    assert Coverage((-1.0, -1.0, 0.9, 1.0, 1.0, 1.0)).is_low
    assert Coverage((0.9, 1.0, 3.0, 3.0, 1.0)).is_low
    assert Coverage((1.0, 1.0), cancellations=1).is_low
    assert not Coverage(()).is_low
    text = str(Coverage((0.2,)))
    assert "decompose" in text and "mass" in text and "agreement" in text
    assert "decompose" not in str(Coverage((1.0,)))


def test_words() -> None:
    found = Coverage((-0.2, 0.1, 0.2, 0.3, 0.8), cancellations=5, nonfinite=1200, sampled=False)
    assert found.in_words() == (
        "A path carries 20% of its element's gradient (median; quartiles 10% and 30%); 0.1% have "
        "the opposite sign; 0.4% have a path whose gradient cancels to 0; 1,200 are not finite, "
        "of 1,210 elements"
    )
    assert Coverage((1.0, 1.0001)).in_words() == (
        "A path carries the whole gradient of its element, of 2 sampled elements"
    )
    assert Coverage(()).in_words() == "No element has a path"
    assert Coverage((-0.5,)).in_words() == "The path carries -50% of its element's gradient"
    assert percent(float("nan")) == "–" and percent(1e9) == "1e+09 times"


def test_coverages_add_up_in_any_order() -> None:
    rng = random.Random(0)
    parts = [
        Coverage(tuple(sorted(rng.gauss(0, 1) for _ in range(5))), n, 1, 2, n > 1) for n in range(4)
    ]
    a, b, c, d = parts
    assert (a + b) + (c + d) == d + (c + (b + a))
    assert (a + b).elements == a.elements + b.elements
    assert Coverage.from_dict((a + d).to_dict()) == a + d
    assert (a + d).to_pandas()["elements"][0] == (a + d).elements
    assert "lower quartile" in a._repr_html_()


def test_a_sample_is_reproducible_and_of_the_size_asked_for() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 4))
    with gt.watch(model) as watch:
        loss = model(torch.randn(8, 20)).square().mean()
    trace = watch.trace(loss)
    assert trace.coverage(100).elements == 100
    assert trace.coverage(100) == trace.coverage(100)
    assert trace.coverage(100) != trace.coverage(100, seed=1)
    with pytest.raises(GradtraceError, match="sample"):
        trace.coverage(0)
    with torch.no_grad():
        model[0].weight.mul_(2.0)
    with pytest.raises(GradtraceError, match="changed in place"):
        trace.coverage()
    with pytest.raises(GradtraceError, match="changed in place"):
        trace.agreement()


def test_of_a_vector_of_losses_each_path_is_one_of_its_own_loss() -> None:
    x = leaf(*range(1, 13))
    losses = (x * x + x).reshape(12, 1).sum(1)
    found = gt.trace(losses, names={"x": x}).coverage()
    assert found.sampled and found.elements == 8 and found.unreached == 8 * 11
    few_losses = gt.trace(losses[:5], names={"x": x}).coverage()
    assert few_losses.parts == pytest.approx(sorted(n / (2 * n + 1) for n in range(1, 6)))
    assert not few_losses.sampled


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_narrow_numbers(dtype: torch.dtype) -> None:
    x = torch.tensor([1.0, 2.0], dtype=dtype, requires_grad=True)
    found = gt.trace((x * x * 3.0 + x).sum(), names={"x": x}).coverage()
    assert found.parts == pytest.approx([3 / 7, 6 / 13], rel=0.01)


def test_what_cancels_but_for_rounding_has_cancelled() -> None:
    x = torch.tensor([0.1], requires_grad=True)
    third = (x * 0.7 + x * 0.2 - x * 0.9).sum()
    found = gt.trace(third, names={"x": x}).coverage()
    assert (found.parts, found.cancellations) == ((), 1)
    assert found.is_low


def test_infinite_gradients_are_counted_apart() -> None:
    x = torch.tensor([0.0, 4.0], requires_grad=True)
    loss = (x.sqrt() + x).sum()
    found = gt.trace(loss, names={"x": x}, nonfinite="allow").coverage()
    assert found.nonfinite == 1 and len(found.parts) == 1


def test_long_paths_do_not_underflow() -> None:
    """The product from the leaf on is 1e-360 at some point; from the loss on it is not below
    1e-210.
    """
    x = leaf(1.0)
    y = x * -1.0
    for factor in [1e-3] * 120 + [1e3] * 50:
        y = y * factor
    trace = gt.trace(y.sum(), names={"x": x})
    assert trace.coverage().parts == pytest.approx((1.0,), rel=1e-9)
    assert trace.path("x", 0).coverage == pytest.approx(1.0, rel=1e-9)


@pytest.mark.parametrize("shape", [(), (0,), (1, 0, 3)])
def test_leaves_of_odd_shapes(shape: tuple[int, ...]) -> None:
    x = torch.ones(shape, dtype=torch.float64, requires_grad=True)
    y = leaf(1.0)
    trace = gt.trace((x.sum() + y.sum()) * 2.0, names={"x": x, "y": y})
    assert trace.coverage().elements == x.numel() + 1
    assert trace.agreement().elements == x.numel() + 1


def test_a_leaf_that_is_the_loss_has_no_path() -> None:
    x = leaf(1.0, 2.0)
    trace = gt.trace((x * 1.0).sum(), names={"x": x})
    assert trace.coverage().parts == (1.0, 1.0)


# Agreement ----------------------------------------------------------------------------------------


def test_rules_that_contradict_each_other_by_hand() -> None:
    """Three paths of weight 2 through one branch, one of weight -5 through the other."""
    trace = two_rules()
    found = trace.agreement()
    assert found.elements == 1
    assert found.same_path["greedy", "viterbi"] == 0.0
    assert found.same_components["greedy", "viterbi"] == 0.0
    assert found["many"].shares["greedy"] == 1.0 and found["many"].shares["viterbi"] == 0.0
    assert found["one"].difference == 1.0
    assert found.coverage["greedy"].parts == (2.0,)
    assert found.coverage["viterbi"].parts == (-5.0,)
    text = str(found)
    assert "contradict each other" in text and "100% by greedy" in text and "0% by viterbi" in text
    assert "greedy = viterbi 0%" in repr(found)
    assert set(found.to_pandas()["component"]) == {"many", "one"}
    assert len(found.top(1).rows) == 1
    with pytest.raises(UnknownName, match="did you mean many"):
        found["mny"]
    assert "contradict" in found._repr_html_()


def test_rules_that_agree() -> None:
    x = leaf(1.0, 2.0)
    found = gt.trace((x * x).sum(), names={"x": x}).agreement("operators")
    assert set(found.same_path.values()) == {1.0} == set(found.same_components.values())
    assert not found.contradictions and not found.warning()
    assert found.rules == PATH_RULES


def test_the_same_components_may_be_passed_on_other_paths() -> None:
    """Two users within one operator kind: other elements, the same component."""
    x = leaf(1.0)
    y = x * torch.tensor([3.0, 2.0, 2.0], dtype=x.dtype)
    z = torch.stack([y[0] * 1.0, (y[1] + y[2]) * 0.9])
    found = gt.trace(z.sum(), names={"x": x}).agreement("operators")
    for pair, share in found.same_path.items():
        assert found.same_components[pair] >= share


def test_unknown_components() -> None:
    with pytest.raises(UnknownName, match="did you mean many"):
        two_rules().agreement(["label:mny"])


@pytest.mark.parametrize("seed", range(few(30, 600)))
def test_agreement_is_that_of_single_paths(seed: int) -> None:
    """The identical paths, and the shares, of all elements of a random graph."""
    sample = randomgraphs.build(seed)
    trace = gt.trace(sample.loss, names=sample.leaves)
    found = trace.agreement("operators", sample=10**9)
    visits = {}
    for rule in PATH_RULES:
        ruled = by_rule(trace, rule)
        visits[rule] = visited(ruled)
        shares = ruled.influence("operators", sample=10**9).shares
        assert {row.name: row.shares[rule] for row in found.rows} == pytest.approx(
            shares, nan_ok=True
        )
        assert found.coverage[rule].parts == ruled.coverage(sample=10**9).parts
    common = set.intersection(*(set(each) for each in visits.values()))
    assert found.elements == len(common)
    for (one, other), share in found.same_path.items():
        same = sum(visits[one][key] == visits[other][key] for key in common)
        assert share == pytest.approx(same / len(common) if common else share, nan_ok=True)
        sets = sum(
            {v[0] for v in visits[one][key]} | {""} == {v[0] for v in visits[other][key]} | {""}
            for key in common
        )
        wanted = sets / len(common) if common else found.same_components[one, other]
        assert found.same_components[one, other] == pytest.approx(wanted, nan_ok=True)


def visited(trace: Trace) -> dict[tuple[int, int], list[tuple[str, int, int]]]:
    """By leaf element: the operator, value and element of each vertex of its path, and of each
    argument by which it reached an operator.
    """
    lazy, found = trace.paths(sample=10**9).items, {}
    assert isinstance(lazy, LazyPaths)
    places = {v: "" for block in trace.program.blocks for v in block.gives.values()}
    places |= {value: place[0] for value, place in lazy.labels.places.items()}
    for node in lazy.starts:
        first, *points = lazy.forest.until(node, ())
        steps = [(places[p.value], p.value, p.element) for p in points if p.value in places]
        found[first.value, first.element] = steps
    return found


def test_a_forest_is_the_same_as_itself() -> None:
    trace = gt.trace(randomgraphs.build(3).loss)
    (followed,) = follow_sample(trace, 50, 0)
    assert same_paths(followed.forest, followed.forest).all()
    assert of_paths(trace, ends_of(trace, followed)).elements == int(followed.forest.whole.sum())


def test_paths_are_the_same_only_if_all_they_visit_is() -> None:
    (followed,) = follow_sample(gt.trace(randomgraphs.build(3).loss), 50, 0)
    forest = followed.forest
    elsewhere = dataclasses.replace(forest, values=tuple(v + 1000 for v in forest.values))
    assert not same_paths(forest, elsewhere).any()
    ends = dataclasses.replace(forest, onward=forest.onward.clone())
    ends.onward[forest.starts[0]] = -1
    for one, other in ((forest, ends), (ends, forest)):
        assert same_paths(one, other).tolist()[:2] == [False, True]


def test_the_program_is_not_recorded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = two_rules()

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("recorded again")

    monkeypatch.setattr("gradtrace.recording.record.record", fail)
    assert trace.agreement().elements == 1
