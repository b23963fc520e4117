"""Measures every cotangent of a program."""

from __future__ import annotations

from math import hypot, inf
from typing import NamedTuple

import torch
from torch import Tensor
from torch.linalg import vector_norm

from gradtrace.ir.interpreter import gradient_of
from gradtrace.ir.program import Program, Step
from gradtrace.kernels import backend_of
from gradtrace.linops import Identity, Index
from gradtrace.linops.indexing import filled
from gradtrace.pytorch.dtensor import LocalParts, told

LARGE_ELEMENTS, LINE_ELEMENTS = 1 << 15, 1 << 12
SQUARES_MIN, SQUARES_MAX = 1e-12, 1e15
"""Largest magnitudes for which float32 holds sums of squares, up to squares that do not matter."""


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
    transfer: a sync for each would cost more than its computation. They are rows of one table: a
    small tensor for each would lie between the cotangents, whose memory could not be used again.
    """
    last = program.last_uses
    kept = program.kept if seed is program.seed else {}
    wanted = {leaf.value for leaf in program.leaves}
    for block in program.blocks:
        wanted.update(block.takes.values(), block.gives.values())
    values, forms = {program.root: seed}, {program.root: (seed.numel(), seed.dtype)}
    found = {program.root: 0}  # the rows of values in ``table``
    table = torch.zeros((len(program.steps()) + 1, 4), dtype=torch.float64, device=seed.device)
    with torch.no_grad():
        table[0] = sizes(seed)
        for n, step in enumerate(program.steps()):
            known = kept.get(step.out)
            x = gradient_of(step, program.maps, values) if known is None else known
            values[step.out] = x
            if step.out in wanted:
                before = step.terms[0].value
                moved = before in found and forms[before][1] is x.dtype and _permutes(step, program)
                found[step.out] = found[before] if moved else n + 1
                if not moved:
                    table[n + 1] = sizes(x)
                forms[step.out] = (x.numel(), x.dtype)
            for value in (step.out, *(term.value for term in step.terms)):
                if last.get(value, -1) <= n:
                    values.pop(value, None)
    numbers = table.tolist()
    measured = {}
    for value, row in found.items():
        norm, largest, nonzero, mass = numbers[row]
        measured[value] = Size(norm, largest, int(nonzero), mass, *forms[value])
    parts = program.constants.parts
    return measured if parts is None else _over_ranks(measured, parts)


def _permutes(step: Step, program: Program) -> bool:
    """Whether a step moves every element of one value, so that its sizes are those of the value."""
    if len(step.terms) > 1:
        return False
    map_ = program.maps[step.terms[0].map]
    if isinstance(map_, Index):
        return bool(map_.injective) and not map_.fills and map_.inputs == map_.outputs
    return isinstance(map_, Identity)


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
    large = x.dtype is torch.float32 and x.numel() >= LARGE_ELEMENTS
    if large and backend_of(x).host and filled(x):
        found = _host_sizes(x.detach().as_strided((x.numel(),), (1,)))
        if found is not None:
            return found
    largest = vector_norm(x, inf).double()
    if x.dtype is torch.float64:
        unit = torch.where((largest > 0) & largest.isfinite(), largest, 1.0)
        norm = vector_norm(x / unit) * unit
    else:
        norm = vector_norm(x, dtype=torch.float64)
    mass = vector_norm(x, 1, dtype=torch.float64)
    return torch.stack([norm, largest, x.count_nonzero().double(), mass])


def _host_sizes(flat: Tensor) -> Tensor | None:
    """``sizes`` of a flat float32 tensor on the CPU, a tenth of the time: squares are added in
    float32, ``LINE_ELEMENTS`` at a time. None if these might be outside its range.
    """
    low, high = torch.aminmax(flat)
    largest = max(abs(float(low)), abs(float(high)))  # NaN if one is
    if not SQUARES_MIN <= largest <= SQUARES_MAX:
        return None
    nonzero, mass = backend_of(flat).measure(flat)
    lines = len(flat) // LINE_ELEMENTS * LINE_ELEMENTS
    norms = [vector_norm(flat[lines:]).reshape(1)]
    if lines:
        norms.append(vector_norm(flat[:lines].view(-1, LINE_ELEMENTS), dim=1))
    norm = float(vector_norm(torch.cat(norms), dtype=torch.float64))
    numbers = [norm, largest, float(nonzero), float(mass)]
    return torch.tensor(numbers, dtype=torch.float64, device=flat.device)
