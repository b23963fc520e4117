"""One random graph against the list of all its paths: every semiring, both rules, every path."""

from __future__ import annotations

import dataclasses

import torch
from bruteforce import Hop, ScalarGraph, Weights, sharp
from randomgraphs import Sample
from torch import Tensor

import gradtrace as gt
from gradtrace import engine
from gradtrace import semirings as S
from gradtrace.paths import Path
from gradtrace.program import Program
from gradtrace.trace import Trace

K = 4


def check(sample: Sample, paths: int = 6) -> None:
    """Raise AssertionError where anything differs; ``paths`` elements of each leaf are followed."""
    greedy = gt.trace(sample.loss, names=sample.leaves)
    check_semirings(greedy.program, greedy, sample.graph, sample)
    check_paths(greedy, sample, paths)
    viterbi = dataclasses.replace(greedy, rule="viterbi")
    check_paths(viterbi, sample, paths)
    names = [name for name in viterbi.gradients if sample.leaves[name].numel()]
    if names:
        check_best(viterbi, names[sample.seed % len(names)], sample.graph)


def check_semirings(program: Program, trace: Trace, graph: ScalarGraph, sample: Sample) -> None:
    tensors = {name: leaf for name, leaf in sample.leaves.items() if name in trace.gradients}
    values = {
        semiring.name: engine.run(program, semiring)
        for semiring in (S.SUM, S.ABS, S.MAX, S.EXTREMES, S.ENTROPY, S.TopK(K), S.COUNT, S.BOOL)
    }
    exact = sharp(graph, sample.loss, sample.leaves) and not hazy(sample)
    for name, leaf in tensors.items():
        mass = graph.table(name, Weights.abs)

        def same(semiring: str, statistic: object, leaf: Tensor = leaf, name: str = name) -> None:
            found = values[semiring][leaf]
            parts = torch.stack(found, -1) if isinstance(found, tuple) else found
            close(parts, graph.table(name, statistic), mass, f"{semiring} of {name}")  # type: ignore[arg-type]

        same("SUM", Weights.sum)
        same("ABS", Weights.abs)
        same("MAX", Weights.max)
        same("EXTREMES", Weights.extremes)
        same("ENTROPY", Weights.entropy_sums)
        same(f"TopK({K})", lambda weights: weights.top(K))
        if exact:
            same("COUNT", Weights.count)
            same("BOOL", Weights.bool)


def hazy(sample: Sample) -> bool:
    """Whether derivatives may be 0 by one formula and rounding by another: norms of equal numbers."""
    return "whole" in sample.traits and any("norm" in op or "soft" in op for op in sample.ops)


def close(found: Tensor, wanted: Tensor, mass: Tensor, what: str) -> None:
    """Equal up to rounding, which is relative to the mass of all paths."""
    assert found.shape == wanted.shape, what
    scale = mass.reshape([*mass.shape, *[1] * (wanted.dim() - mass.dim())]).clamp(min=1e-300)
    error = (found.double() - wanted).abs() / (scale + wanted.abs())
    assert not error.numel() or float(error.max()) < 1e-9, f"{what}: {float(error.max())}"


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
    fault = graph.greedy_fault if trace.rule == "greedy" else graph.viterbi_fault
    if path is None:
        if trace.rule == "greedy" and lost(trace, name, element, graph):
            return
        assert fault(None, name, element) is None, (
            f"{name}[{element}]: {fault(None, name, element)}"
        )
        return
    same = graph.matching(name, element, hops_of(path))
    assert same, f"{name}[{element}] has no such path:\n{path}"
    near = [p for p in same if abs(p.weight - path.weight) <= 1e-9 * abs(p.weight) + 1e-300]
    assert near, f"{path.weight} is the weight of none of {[p.weight for p in same]}"
    faults = [fault(p.edges, name, element) for p in near]
    assert None in faults, f"{trace.rule} path of {name}[{element}]: {faults}\n{path}"


def lost(trace: Trace, name: str, element: int, graph: ScalarGraph) -> bool:
    """Whether autograd's own formulas round this gradient to 0: a softmax that is all but 1 and 0
    subtracts two numbers that are equal but for what is small beside the rest of the graph.
    """
    vertex = graph.vertex(name, element)
    zero = float(trace.gradients[name].reshape(-1)[element]) == 0
    largest = max(graph.mass(at) for at in range(len(graph.places)))
    return zero and vertex is not None and graph.mass(vertex) < 1e-12 * largest


def check_best(trace: Trace, name: str, graph: ScalarGraph) -> None:
    """The k best paths of the first element."""
    wanted = [w for w in graph.weights(name, 0).top(K) if w]
    index = _unravel(0, graph.shapes[name])
    found = [abs(path.weight) for path in trace.paths(name, index, k=K)]
    assert len(found) == len(wanted), (found, wanted)
    for a, b in zip(found, wanted):
        assert abs(a - b) <= 1e-9 * b, (found, wanted)
