"""Measures every cotangent of a program."""

from __future__ import annotations

from math import hypot, inf
from typing import NamedTuple

import torch
from torch import Tensor
from torch.linalg import vector_norm

from gradtrace.ir.interpreter import gradient_of
from gradtrace.ir.program import Program
from gradtrace.pytorch.dtensor import LocalParts, told


class Size(NamedTuple):
    """Measurements of a cotangent; ``mass`` is ``Σ |x[i]|``."""

    norm: float
    largest: float
    nonzero: int
    mass: float
    entries: int
    dtype: torch.dtype


def measure(program: Program, seed: Tensor) -> dict[int, Size]:
    """The sizes of all cotangents at operators' outputs and inputs, and of leaves.

    One pass; each cotangent is dropped after its last use. The numbers are copied to the CPU in one
    transfer: a sync for each would cost more than its computation.
    """
    last = program.last_uses
    kept = program.kept if seed is program.seed else {}
    wanted = {leaf.value for leaf in program.leaves}
    for block in program.blocks:
        wanted.update(block.takes.values(), block.gives.values())
    values, forms = {program.root: seed}, {program.root: (seed.numel(), seed.dtype)}
    with torch.no_grad():
        found = {program.root: sizes(seed)}
        for n, step in enumerate(program.steps()):
            known = kept.get(step.out)
            x = gradient_of(step, program.maps, values) if known is None else known
            values[step.out] = x
            if step.out in wanted:
                found[step.out] = sizes(x).to(seed.device)
                forms[step.out] = (x.numel(), x.dtype)
            for value in (step.out, *(term.value for term in step.terms)):
                if last.get(value, -1) <= n:
                    values.pop(value, None)
    numbers = torch.stack(list(found.values())).tolist()
    measured = {
        value: Size(norm, largest, int(nonzero), mass, *forms[value])
        for value, (norm, largest, nonzero, mass) in zip(found, numbers)
    }
    parts = program.constants.parts
    return measured if parts is None else _over_ranks(measured, parts)


def _over_ranks(found: dict[int, Size], parts: LocalParts) -> dict[int, Size]:
    """The sizes of whole tensors, of those of the parts that ranks have. Called by all ranks."""
    mine = [tuple(size)[:-1] for value, size in found.items() if value in parts.values]
    each = iter(list(zip(*told(mine, parts.mesh))))  # for each value, the sizes of all parts
    for value in [value for value in found if value in parts.values]:
        norms, largest, nonzero, mass, entries = zip(*next(each))
        found[value] = Size(
            hypot(*norms), max(largest), sum(nonzero), sum(mass), sum(entries), found[value].dtype
        )
    return found


def sizes(x: Tensor) -> Tensor:
    """``‖x‖``, ``max |x[i]|``, the number of nonzero entries and ``Σ |x[i]|``, as float64 (4,).

    float64 holds the squares of all smaller floats. Squares of float64 may overflow, so there
    ``‖x‖ = m ‖x/m‖`` with m the largest magnitude.
    """
    if not x.numel():
        return torch.zeros(4, dtype=torch.float64, device=x.device)
    largest = vector_norm(x, inf).double()
    if x.dtype is torch.float64:
        unit = torch.where((largest > 0) & largest.isfinite(), largest, 1.0)
        norm = vector_norm(x / unit) * unit
    else:
        norm = vector_norm(x, dtype=torch.float64)
    mass = vector_norm(x, 1, dtype=torch.float64)
    return torch.stack([norm, largest, x.count_nonzero().double(), mass])
