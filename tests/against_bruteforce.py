"""One random graph against the list of all its paths: every semiring, all rules, every path."""

from __future__ import annotations

import dataclasses
from math import log

import torch
from bruteforce import Hop, ScalarGraph, Statistic, Weights, sharp
from randomgraphs import Sample
from torch import Tensor

import gradtrace as gt
from gradtrace import semirings as S
from gradtrace.ir import interpreter
from gradtrace.ir.program import Program
from gradtrace.paths.paths import Path
from gradtrace.traced import Trace

K = 4

NOISE = 1e-10
"""What is smaller beside the largest path mass of a graph is, or may be, rounding of 0."""


def check(sample: Sample, paths: int = 6) -> None:
    """Raise AssertionError where anything differs; ``paths`` elements of each leaf are followed."""
    greedy = gt.trace(sample.loss, names=sample.leaves)
    check_semirings(greedy.program, greedy, sample.graph, sample)
    check_paths(greedy, sample, paths)
    check_paths(dataclasses.replace(greedy, rule="edge"), sample, paths)
    viterbi = dataclasses.replace(greedy, rule="viterbi")
    check_paths(viterbi, sample, paths)
    names = [name for name in viterbi.gradients if sample.leaves[name].numel()]
    if names:
        check_best(viterbi, names[sample.seed % len(names)], sample.graph)


def check_semirings(program: Program, trace: Trace, graph: ScalarGraph, sample: Sample) -> None:
    values = {
        semiring.name: interpreter.run(program, semiring)
        for semiring in (S.SUM, S.ABS, S.MAX, S.EXTREMES, S.ENTROPY, S.TopK(K), S.COUNT, S.BOOL)
    }
    exact = sharp(graph, sample.loss, sample.leaves) and not hazy(sample)
    # What is so small beside the rest of the graph is rounding of other numbers.
    least = 1e-6 * graph.largest + 1e-300
    for name in trace.gradients:
        for semiring, (statistic, scale) in STATISTICS.items():
            found = values[semiring][sample.leaves[name]]
            parts = torch.stack(found, -1) if isinstance(found, tuple) else found
            mass = graph.table(name, scale)
            if scale is certain and not (
                exact and bool((graph.table(name, faintest) > 1e-6 * least).all())
            ):
                continue
            close(parts, graph.table(name, statistic), mass, least, f"{semiring} of {name}")


def certain(weights: Weights) -> float:
    """Numbers of paths have no rounding."""
    return 0.0


def faintest(weights: Weights) -> float:
    return min(map(abs, weights), default=1.0)


def spread(weights: Weights) -> float:
    return sum(abs(w) * (1 + abs(log(abs(w)))) for w in weights if w)


STATISTICS: dict[str, tuple[Statistic, Statistic]] = {
    "SUM": (Weights.sum, Weights.abs),
    "ABS": (Weights.abs, Weights.abs),
    "MAX": (Weights.max, Weights.abs),
    "EXTREMES": (Weights.extremes, Weights.abs),
    "ENTROPY": (Weights.entropy_sums, spread),
    f"TopK({K})": (lambda weights: weights.top(K), Weights.abs),
    "COUNT": (Weights.count, certain),
    "BOOL": (Weights.bool, certain),
}
"""What each semiring is, of the list of all weights, and what rounding is relative to."""


def hazy(sample: Sample) -> bool:
    """Whether derivatives may be 0 by one formula, and rounding by another: norms of equals."""
    return "whole" in sample.traits and any("norm" in op or "soft" in op for op in sample.ops)


def close(found: Tensor, wanted: Tensor, mass: Tensor, least: float, what: str) -> None:
    """Equal up to rounding, which is relative to the mass of all paths."""
    assert found.shape == wanted.shape, what
    scale = mass.reshape([*mass.shape, *[1] * (wanted.dim() - mass.dim())]) + least
    error = (found.double() - wanted).abs() / (scale + wanted.abs())
    assert not error.numel() or float(error.max()) < 1e-8, f"{what}: {float(error.max())}"


def check_paths(trace: Trace, sample: Sample, most: int) -> None:
    graph = sample.graph
    found = {(path.name, path.index): path for path in trace.paths(sample=10**9)}
    for name in trace.gradients:
        size = sample.leaves[name].numel()
        shape = tuple(sample.leaves[name].shape)
        for element in range(size)[:most]:
            path = found.get((name, _unravel(element, shape)))
            check_path(trace, path, name, element, graph)


def _unravel(element: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    found = []
    for n in reversed(shape):
        found.append(element % n)
        element //= n
    return tuple(reversed(found))


def _ravel(index: tuple[int, ...], shape: tuple[int, ...]) -> int:
    number = 0
    for i, n in zip(index, shape):
        number = number * n + i
    return number


def hops_of(path: Path) -> list[Hop]:
    return [
        Hop(step.operator, None, None, _ravel(step.index, step.shape)) for step in path.steps[1:]
    ]


def check_path(
    trace: Trace, path: Path | None, name: str, element: int, graph: ScalarGraph
) -> None:
    """The path is one of the graph, has the weight it says, and is what the rule asks for."""
    faults_by = {
        "greedy": graph.greedy_fault,
        "edge": graph.edge_fault,
        "viterbi": graph.viterbi_fault,
    }
    fault = faults_by[trace.rule]
    if path is None:
        if lost(trace.rule, name, element, graph):
            return
        assert fault(None, name, element) is None, (
            f"{name}[{element}]: {fault(None, name, element)}"
        )
        return
    same = graph.matching(name, element, hops_of(path))
    assert same, f"{name}[{element}] has no such path:\n{path}"
    slack = NOISE * graph.largest
    near = [p for p in same if abs(p.weight - path.weight) <= 1e-9 * abs(p.weight) + slack]
    assert near, f"{path.weight} is the weight of none of {[p.weight for p in same]}"
    faults = [fault(p.edges, name, element) for p in near]
    assert None in faults, f"{trace.rule} path of {name}[{element}]: {faults}\n{path}"


def lost(rule: str, name: str, element: int, graph: ScalarGraph) -> bool:
    """Whether all that comes here is rounding: a softmax that is all but 1 and 0 subtracts numbers
    that are equal but for what is nothing beside the rest of the graph.
    """
    vertex, least = graph.vertex(name, element), NOISE * graph.largest
    if vertex is None or graph.mass(vertex) < least:
        return True
    if rule == "edge":
        edges = [abs(e.weight * graph.gradient(e.above)) for e in graph.up[vertex]]
        return max(edges, default=0.0) < least
    handed = [abs(use.contribution) for use in graph.consumers(vertex)]
    return rule == "greedy" and max(handed, default=0.0) < least


def check_best(trace: Trace, name: str, graph: ScalarGraph) -> None:
    """The k best paths of the first element."""
    least = NOISE * graph.largest
    wanted = [w for w in graph.weights(name, 0).top(K) if w > least]
    index = _unravel(0, graph.shapes[name])
    found = [abs(path.weight) for path in trace.paths(name, index, k=K)]
    found = [weight for weight in found if weight > least]
    assert len(found) == len(wanted), (found, wanted)
    for a, b in zip(found, wanted):
        assert abs(a - b) <= 1e-9 * b, (found, wanted)
