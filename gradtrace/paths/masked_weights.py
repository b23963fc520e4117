"""Weights that are not finite, of paths that reach no leaf.

Some backward formulas divide by 0 and mask the result: of ``std`` where all elements are equal, of
``norm`` at 0, of ``sinc``. No path through such a weight reaches a leaf, but masses are products of
what lies before and after a weight, and 0 times infinity is not a number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch

from gradtrace.errors import NonFinite
from gradtrace.ir.program import MapTable, Program
from gradtrace.ir.rescaling import Rescaling
from gradtrace.linops import Scale
from gradtrace.paths.path_mass import run_ahead, values_below
from gradtrace.semirings import BOOL

Result = TypeVar("Result")


def finitely(program: Program, measure: Callable[[Program], Result]) -> Result:
    """The measure of a program; if it is not finite, that of the program without masked weights."""
    try:
        return measure(program)
    except NonFinite:
        mended = without_masked_weights(program)
        if mended is program:
            raise
    return measure(mended)


def without_masked_weights(program: Program) -> Program:
    """The program with 0 in place of the weights that are not finite and lead to no leaf."""
    broken: dict[int, list[int]] = {}
    for step in program.steps():
        for at, _ in step.terms:
            map_ = program.maps[at]
            if isinstance(map_, Scale) and not torch.as_tensor(map_.weight).isfinite().all():
                broken.setdefault(at, []).append(step.out)
    if not broken:
        return program
    values = {value for some in broken.values() for value in some}
    below = values_below(program, values)
    reached = run_ahead(program, Rescaling(BOOL), values, below, {}).kept
    maps = MapTable(program.maps)
    for at, some in broken.items():
        map_ = program.maps[at]
        assert isinstance(map_, Scale)
        there = torch.stack([reached[v].value[0] for v in some if v in reached]).any(0)
        weight = torch.as_tensor(map_.weight).to(there.device)
        maps[at] = Scale(torch.where(there, weight, 0), map_.in_shape)
    return replace(program, constants=replace(program.constants, maps=maps))
