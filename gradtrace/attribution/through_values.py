"""What every element of an intermediate value contributes to gradient × input, in two passes.

With g the gradient of a tensor v and ``t = ∂v/∂x · d`` its derivative along a direction d of the
inputs, ``g[j] · t[j]`` is the sum over all paths through element j of weight × d. Over all elements
of a tensor that every path passes once, these add up to ``⟨∂f/∂x, d⟩``. The first is a pass from
the scalar, the second one from the inputs by the transposes of maps.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from gradtrace.autodiff.loss_checks import isolated
from gradtrace.ir import interpreter
from gradtrace.ir.program import Program
from gradtrace.linops import transposed


@isolated()
def through_value(program: Program, wanted: int, directions: Mapping[int, Tensor]) -> Tensor:
    """``g ⊙ t`` of the value ``wanted``; ``directions`` are d, by the values of leaves."""
    gradient = _gradient(program, wanted)
    derivative = _derivative(program, wanted, directions)
    return torch.zeros_like(gradient) if derivative is None else gradient * derivative


def _gradient(program: Program, wanted: int) -> Tensor:
    """The gradient of a value."""
    values = {program.root: program.seed}
    last = program.last_uses
    for n, step in enumerate(program.steps()):
        if wanted in values:
            break
        values[step.out] = interpreter.gradient_of(step, program.maps, values)
        for term in step.terms:
            if last[term.value] == n and term.value != wanted:
                values.pop(term.value, None)
    return values[wanted]


def _derivative(program: Program, wanted: int, directions: Mapping[int, Tensor]) -> Tensor | None:
    """The derivative of the tensor whose gradient the value is, along the directions of leaves;
    None if it does not depend on them.
    """
    along = dict(directions)
    for step in reversed(program.steps()):
        here = along.get(step.out) if step.out == wanted else along.pop(step.out, None)
        if step.out == wanted or here is None:
            continue
        for term in step.terms:
            back = transposed(program.maps[term.map]).apply(here)
            there = along.get(term.value)
            along[term.value] = back if there is None else there + back
    return along.get(wanted)
