"""Run a backward program in a semiring."""

from __future__ import annotations

from collections.abc import Mapping
from math import frexp, isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradtrace.ir.program import MapTable, Program, Step
from gradtrace.linops import Map, tiled, tiling
from gradtrace.semirings import Semiring, Value

RESCALE_EXPONENT = 24
"""Values are rescaled to a largest entry near 1 when it is above 2**this or below 2**-this."""


class ScaledValue(NamedTuple):
    """``value · 2**exponent``. Deep graphs leave the range of floats; scaling by powers of two is
    exact.
    """

    value: Value
    exponent: int


def run(program: Program, semiring: Semiring) -> dict[Tensor, Any]:
    """The value of every leaf: ``⊕`` over all paths of ``⊗`` of the lifted derivatives along each.

    Returns a tensor for each leaf, or a tuple of tensors for semirings whose values have several
    parts. Values are freed after their last use, so memory is as for a backward pass.
    """
    last, maps = program.last_uses, program.maps
    keep = {leaf.value for leaf in program.leaves}
    ends = keep - last.keys()  # no step reads them, so they need no rescaling
    with torch.no_grad():
        values = {program.root: ScaledValue(semiring.weigh(program.seed), 0)}
        for n, step in enumerate(program.steps()):
            held = value_of(step, maps, values, semiring)
            same = step.out in ends or (len(step.terms) == 1 and maps[step.terms[0].map].is_gather)
            values[step.out] = held if same else balanced(held, semiring)
            for term in step.terms:
                if last[term.value] == n and term.value not in keep:
                    values.pop(term.value, None)
        found = {leaf.tensor: values[leaf.value] for leaf in program.leaves}
        done = {leaf: semiring.finish(*held) for leaf, held in found.items()}
    return {leaf: x[0] if len(x) == 1 else x for leaf, x in done.items()}


def value_of(
    step: Step, maps: MapTable, values: Mapping[int, ScaledValue], semiring: Semiring
) -> ScaledValue:
    """``⊕`` over the terms of one step."""
    if len(step.terms) > 1 and (order := tiling(maps.of(step))):
        held = [values[term.value] for term in step.terms]
        return _tiled(step, maps.of(step), held, order, semiring)
    (at, value), *rest = step.terms
    out, exponent = maps[at].apply_in(values[value].value, semiring), values[value].exponent
    for at, value in rest:
        other, power = maps[at].apply_in(values[value].value, semiring), values[value].exponent
        if power < exponent:
            other = semiring.scale(other, power - exponent)
        elif power > exponent:
            out, exponent = semiring.scale(out, exponent - power), power
        out = semiring.plus(out, other)
    return ScaledValue(semiring.settle(out, step.dtype), exponent)


def _tiled(
    step: Step, maps: list[Map], held: list[ScaledValue], order: list[int], semiring: Semiring
) -> ScaledValue:
    """``value_of`` for terms that are the parts of a concatenation, in ``order``."""
    exponent = max(each.exponent for each in held)
    parts = [
        each.value
        if each.exponent == exponent
        else semiring.scale(each.value, each.exponent - exponent)
        for each in held
    ]
    out = tuple(tiled(maps, part, order) for part in zip(*parts))
    return ScaledValue(semiring.settle(out, step.dtype), exponent)


def balanced(held: ScaledValue, semiring: Semiring) -> ScaledValue:
    """The same value rescaled to a largest entry near 1, if it was outside the range of
    ``RESCALE_EXPONENT``. Zero and non-finite values are returned as they are.
    """
    size = semiring.size(held.value)
    power = frexp(size)[1]
    if abs(power) <= RESCALE_EXPONENT or not size or not isfinite(size):
        return held
    return ScaledValue(semiring.scale(held.value, -power), held.exponent + power)


def gradient_of(step: Step, maps: MapTable, values: Mapping[int, Tensor]) -> Tensor:
    """One step in SUM, without scaling: the ordinary gradient."""
    if len(step.terms) > 1 and (order := tiling(maps.of(step))):
        parts = [values[term.value] for term in step.terms]
        return tiled(maps.of(step), parts, order).to(step.dtype)
    (at, value), *rest = step.terms
    out = maps[at].apply(values[value])
    for at, value in rest:
        out = out + maps[at].apply(values[value])
    return out.to(step.dtype)
