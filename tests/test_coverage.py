"""Coverage of paths, and agreement of rules, against listed paths and numbers found by hand."""

from __future__ import annotations

import dataclasses
import re
from math import isnan

import against_bruteforce
import numpy as np
import pytest
import randomgraphs
import torch
from thorough import few
from torch import Tensor, nn

import gradtrace as gt
from gradtrace.errors import GradtraceError
from gradtrace.paths.paths import Path
from gradtrace.table import Table
from gradtrace.traced import Trace
from gradtrace.tracing import coverage
from gradtrace.tracing.coverage import LOW_NOTE, PATH_RULES, same_paths
from gradtrace.tracing.followed import drawn_sample, follow_elements

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


# Many paths ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(few(100, 2000)))
def test_coverage_is_that_of_the_listed_paths(seed: int) -> None:
    """Weight and gradient by brute force; the table of all elements, path by path."""
    sample = randomgraphs.build(seed)
    trace = gt.trace(sample.loss, names=sample.leaves)
    for rule in PATH_RULES:
        ruled = by_rule(trace, rule)
        parts = {name: list[float]() for name in trace.gradients}
        for path in ruled.paths(sample=10**9):
            check_part(path, sample)
            cancelled = isnan(path.coverage) or abs(path.coverage) * EPS >= 1
            parts[path.name].append(float("nan") if cancelled else path.coverage)
        found = ruled.coverage(sample=10**9)
        check_row(found, "all", [x for some in parts.values() for x in some])
        for name, some in parts.items():
            if some:
                check_row(found, name, some)
            else:
                assert name not in found


def check_row(found: Table, name: str, parts: list[float]) -> None:
    row, known = found[name], [x for x in parts if not isnan(x)]
    assert row.elements == len(parts)
    if parts:
        assert row.cancelled == (len(parts) - len(known)) / len(parts)
        assert row.opposite == sum(x < 0 for x in known) / len(parts)
    if known:
        quantiles = np.quantile(known, [0.5, 0.25, 0.75])
        assert (row.median, row.lower, row.upper) == pytest.approx(tuple(quantiles), rel=1e-12)
    else:
        assert isnan(row.median)


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


@pytest.mark.parametrize(
    ("parts", "low"),
    [
        ((0.3, 0.9, 1.0, 1.0), False),
        ((0.2, 0.24, 0.24, 1.0), True),
        ((-1.0, -1.0, 0.9, 1.0, 1.0, 1.0), True),
        ((0.9, 1.0, 3.0, 3.0, 1.0), True),
        ((1.0, 1.0, float("nan")), True),
        ((), False),
    ],
)
def test_low_coverage_is_said(parts: tuple[float, ...], low: bool) -> None:
    assert (LOW_NOTE in coverage._notes(np.array(parts))) == low


def test_a_sample_is_reproducible_and_of_the_size_asked_for() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 4))
    with gt.watch(model) as watch:
        loss = model(torch.randn(8, 20)).square().mean()
    trace = watch.trace(loss)
    found = trace.coverage(100)
    assert found["all"].elements == 100 == sum(row.elements for row in found) - 100
    assert found.about == {"rule": "greedy", "losses": 1, "sampled": 100}
    assert found == trace.coverage(100) != trace.coverage(100, seed=1)
    with pytest.raises(GradtraceError, match="sample"):
        trace.coverage(0)
    part = trace.coverage(of="0")
    assert part.names == ("all", "0.weight", "0.bias")
    with torch.no_grad():
        model[0].weight.mul_(2.0)
    with pytest.raises(GradtraceError, match="changed in place"):
        trace.coverage()


def test_of_a_vector_of_losses_each_path_is_one_of_its_own_loss() -> None:
    x = leaf(*range(1, 13))
    losses = (x * x + x).reshape(12, 1).sum(1)
    assert gt.trace(losses, names={"x": x}).coverage()["all"].elements == 8
    few_losses = gt.trace(losses[:5], names={"x": x}).coverage()
    assert few_losses["x"].elements == 5 and few_losses["x"].median == pytest.approx(3 / 7)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_narrow_numbers(dtype: torch.dtype) -> None:
    x = torch.tensor([1.0, 2.0], dtype=dtype, requires_grad=True)
    found = gt.trace((x * x * 3.0 + x).sum(), names={"x": x}).coverage()
    assert found["x"].median == pytest.approx((3 / 7 + 6 / 13) / 2, rel=0.01)


def test_what_cancels_but_for_rounding_has_cancelled() -> None:
    x = torch.tensor([0.1], requires_grad=True)
    third = (x * 0.7 + x * 0.2 - x * 0.9).sum()
    found = gt.trace(third, names={"x": x}).coverage()
    assert found["x"].cancelled == 1.0 and isnan(found["x"].median)
    assert LOW_NOTE in found.notes


def test_infinite_gradients_are_said() -> None:
    x = torch.tensor([0.0, 4.0], requires_grad=True)
    found = gt.trace((x.sqrt() + x).sum(), names={"x": x}, nonfinite="allow").coverage()
    assert found["x"].elements == 2 and found["x"].median == 0.8
    assert "1 elements are not finite" in found.notes


def test_long_paths_do_not_underflow() -> None:
    """The product from the leaf on is 1e-360 at some point; from the loss on it is not below
    1e-210.
    """
    x = leaf(1.0)
    y = x * -1.0
    for factor in [1e-3] * 120 + [1e3] * 50:
        y = y * factor
    trace = gt.trace(y.sum(), names={"x": x})
    assert trace.coverage()["x"].median == pytest.approx(1.0, rel=1e-9)
    assert trace.path("x", 0).coverage == pytest.approx(1.0, rel=1e-9)


@pytest.mark.parametrize("shape", [(), (0,), (1, 0, 3)])
def test_leaves_of_odd_shapes(shape: tuple[int, ...]) -> None:
    x = torch.ones(shape, dtype=torch.float64, requires_grad=True)
    y = leaf(1.0)
    trace = gt.trace((x.sum() + y.sum()) * 2.0, names={"x": x, "y": y})
    assert trace.coverage()["all"].elements == x.numel() + 1


# Agreement ----------------------------------------------------------------------------------------


def agreeing(found: Table) -> tuple[str, str]:
    """What a table says of the rules: for how many elements, of how many, the same path."""
    (note,) = (note for note in found.notes if note.startswith("the rules"))
    said = re.fullmatch(r"the rules choose the same path for (.*) of (.*) elements", note)
    assert said is not None
    return said[1], said[2]


def test_rules_that_disagree_and_rules_that_agree() -> None:
    """Three paths of weight 2 through one branch, one of weight -5 through the other."""
    trace = two_rules()
    assert agreeing(trace.coverage()) == ("0%", "1")
    assert (trace.coverage()["x"].median, by_rule(trace, "viterbi").coverage()["x"].median) == (
        2,
        -5,
    )
    x = leaf(1.0, 2.0)
    assert agreeing(gt.trace((x * x).sum(), names={"x": x}).coverage()) == ("100%", "2")


@pytest.mark.parametrize("seed", range(few(30, 600)))
def test_agreement_is_that_of_single_paths(seed: int) -> None:
    """Of all elements of a random graph: of those with a path by every rule."""
    sample = randomgraphs.build(seed)
    trace = gt.trace(sample.loss, names=sample.leaves)
    ways = [
        {(p.name, p.index): [(s.operator, s.index) for s in p.steps] for p in some}
        for some in (by_rule(trace, rule).paths(sample=10**9) for rule in PATH_RULES)
    ]
    common = set.intersection(*map(set, ways))
    notes = [n for n in trace.coverage(sample=10**9).notes if n.startswith("the rules")]
    if not common:
        assert not notes
        return
    same = sum(all(way[key] == ways[0][key] for way in ways) for key in common)
    share, many = agreeing(trace.coverage(sample=10**9))
    assert many == f"{len(common):,}"
    if same < len(common):  # the same operators may be reached by other arguments
        assert share != "100%"


def test_paths_are_the_same_only_if_all_they_visit_is() -> None:
    trace = gt.trace(randomgraphs.build(3).loss)
    ((pair, drawn),) = drawn_sample(trace, 50, 0)
    forest = follow_elements(trace, drawn, pair).forest
    assert same_paths(forest, forest).all()
    elsewhere = dataclasses.replace(forest, values=tuple(v + 1000 for v in forest.values))
    assert not same_paths(forest, elsewhere).any()
    ends = dataclasses.replace(forest, onward=forest.onward.clone())
    ends.onward[forest.starts[0]] = -1
    for one, other in ((forest, ends), (ends, forest)):
        assert same_paths(one, other).tolist()[:2] == [False, True]
