"""Run a backward program in a semiring."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gradtrace.ir.program import MapTable, Program, Step
from gradtrace.ir.rescaling import Rescaling, ScaledValue
from gradtrace.linops import Map, tiled, tiling
from gradtrace.semirings import Semiring
from gradtrace.types import Shape


def run(program: Program, semiring: Semiring) -> dict[Tensor, Any]:
    """The value of every leaf: ``⊕`` over all paths of ``⊗`` of the lifted derivatives along each.

    Returns a tensor for each leaf, or a tuple of tensors for semirings whose values have several
    parts. Values are freed after their last use, so memory is as for a backward pass.
    """
    last, maps = program.last_uses, program.maps
    keep = {leaf.value for leaf in program.leaves}
    ends = keep - last.keys()  # no step reads them, so they need no rescaling
    rescaling = Rescaling(semiring)
    with torch.no_grad():
        values = {program.root: ScaledValue(semiring.weigh(program.seed), 0)}
        for n, step in enumerate(program.steps()):
            held = value_of(step, maps, values, rescaling)
            same = step.out in ends or is_move(step, maps)
            values[step.out] = held if same else rescaling.balanced(held)
            for term in step.terms:
                if last[term.value] == n and term.value not in keep:
                    values.pop(term.value, None)
        found = {leaf.tensor: values[leaf.value] for leaf in program.leaves}
        done = {leaf: semiring.finish(*held[:2]) for leaf, held in found.items()}
        if any(leaf.device is not None for leaf in program.leaves):
            done = {leaf: tuple(x.to(leaf.device) for x in parts) for leaf, parts in done.items()}
    return {leaf: x[0] if len(x) == 1 else x for leaf, x in done.items()}


def is_move(step: Step, maps: MapTable) -> bool:
    """Whether a step only moves elements of one value."""
    return len(step.terms) == 1 and maps[step.terms[0].map].is_gather


def value_of(
    step: Step, maps: MapTable, values: Mapping[int, ScaledValue], rescaling: Rescaling
) -> ScaledValue:
    """``⊕`` over the terms of one step."""
    semiring, many = rescaling.semiring, len(step.terms) > 1
    if many and (order := tiling(maps.of(step))):
        held = rescaling.aligned([values[term.value] for term in step.terms])
        parts = zip(*(each.value for each in held))
        joined = tuple(tiled(maps.of(step), part, order) for part in parts)
        found = held[0]._replace(value=joined, age=max(each.age for each in held))
    else:
        at, value = step.terms[0]
        found = applied(maps[at], values[value], semiring)
        for at, value in step.terms[1:] if many else ():
            found = rescaling.plus(found, applied(maps[at], values[value], semiring))
    out = semiring.settle(found.value, step.dtype)
    return found if out is found.value else found._replace(value=out)


def applied(map_: Map, held: ScaledValue, semiring: Semiring) -> ScaledValue:
    """A map applied to a value."""
    value, exponent, powers, age = held
    age += not map_.is_gather
    return ScaledValue(map_.apply_in(value, semiring), exponent, powers, age)


def reshaped(held: ScaledValue, shape: Shape) -> ScaledValue:
    """An identity applied to a value: half of all steps are such, so nothing else is called."""
    value = held.value
    if value[0].shape == shape:
        return held
    moved = tuple([torch.reshape(part, shape) for part in value])
    return ScaledValue(moved, held.exponent, held.powers, held.age)


def gradient_of(step: Step, maps: MapTable, values: Mapping[int, Tensor]) -> Tensor:
    """One step in SUM, without scaling: the ordinary gradient."""
    if len(step.terms) > 1 and (order := tiling(maps.of(step))):
        parts = [values[term.value] for term in step.terms]
        return tiled(maps.of(step), parts, order).to(step.dtype)
    (at, value), *rest = step.terms
    out = maps[at].apply(values[value])
    for at, value in rest:
        other = maps[at].apply(values[value])
        first = out.is_contiguous() or not other.is_contiguous()  # its layout is that of the sum
        out = out + other if first else other + out
    return out.to(step.dtype)
