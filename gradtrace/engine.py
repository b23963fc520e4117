"""Run a backward program in a semiring."""

from __future__ import annotations

import torch
from torch import Tensor

from gradtrace.program import Program, Step
from gradtrace.semirings import Semiring


def run(program: Program, semiring: Semiring) -> dict[Tensor, Tensor]:
    """The value of every leaf: ``⊕`` over all paths of ``⊗`` of the lifted derivatives along each.

    Values are dropped after their last use, so memory is as for a backward pass.
    """
    last = {term.value: n for n, step in enumerate(program.steps()) for term in step.terms}
    keep = {leaf.value for leaf in program.leaves}
    values = {program.root: program.seed}
    with torch.no_grad():
        for n, step in enumerate(program.steps()):
            values[step.out] = value_of(step, values, semiring)
            for term in step.terms:
                if last[term.value] == n and term.value not in keep:
                    values.pop(term.value, None)
    return {leaf.tensor: values[leaf.value] for leaf in program.leaves}


def value_of(step: Step, values: dict[int, Tensor], semiring: Semiring) -> Tensor:
    """``⊕`` over the terms of one step."""
    (map_, value), *rest = step.terms
    out = map_.pull(values[value], semiring)
    for map_, value in rest:
        out = semiring.plus(out, map_.pull(values[value], semiring))
    return out.to(step.dtype)
