"""Measures every cotangent of a program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import hypot, inf
from typing import NamedTuple

import torch
from torch import Tensor
from torch.linalg import vector_norm

from gradtrace.ir.interpreter import gradient_of
from gradtrace.ir.program import Program, Step
from gradtrace.kernels import backend_of
from gradtrace.linops import Identity, Index
from gradtrace.pytorch.dtensor import LocalParts, told

TOGETHER, TOGETHER_MAX_BYTES = 64, 1 << 28
"""On a GPU so many cotangents are measured together, and those that nothing else keeps in memory
have at most so many bytes.
"""


class Size(NamedTuple):
    """Measurements of a cotangent; ``mass`` is ``Σ |x[i]|``."""

    norm: float
    largest: float
    nonzero: int
    mass: float
    entries: int
    dtype: torch.dtype


def measure(program: Program) -> dict[int, Size]:
    """The sizes of all cotangents at operators' outputs and inputs, and of leaves.

    One pass; each cotangent is dropped after its last use. The numbers are copied to the CPU in one
    transfer: a sync for each would cost more than its computation. They are rows of one table: a
    small tensor for each would lie between the cotangents, whose memory could not be used again.
    """
    with torch.no_grad():
        found = _Measuring(program)
        for n, step in enumerate(program.steps()):
            found.follow(n, step)
        found.measure_waiting()
    numbers, measured = found.table.tolist(), {}
    for value, row in found.rows.items():
        norm, largest, nonzero, mass = numbers[row]
        measured[value] = Size(norm, largest, int(nonzero), mass, *found.forms[value])
    parts = program.constants.parts
    return measured if parts is None else _over_ranks(measured, parts)


class _Measuring:
    """The values of a program that are still needed, and the sizes so far: ``rows`` of values in a
    ``table``.
    """

    def __init__(self, program: Program) -> None:
        self.program, seed = program, program.seed
        self.last = program.last_uses
        self.known = _known(program)
        self.wanted = {leaf.value for leaf in program.leaves}
        for block in program.blocks:
            self.wanted.update(block.takes.values(), block.gives.values())
        self.values = {program.root: seed}
        self.forms = {program.root: (seed.numel(), seed.dtype)}
        size = len(program.steps()) + 1, 4
        self.table = torch.zeros(size, dtype=torch.float64, device=seed.device)
        self.rows: dict[int, int] = {}
        self.most = TOGETHER if backend_of(seed).synchronises else 1
        self.waiting: list[Tensor] = []  # are measured together; their rows are the next
        self.filled = self.held = 0
        self._measure(program.root, seed)

    def follow(self, n: int, step: Step) -> None:
        """Measure the result of a step, the n-th."""
        out, values = step.out, self.values
        known = self.known.get(out)
        if known is None or known.dtype is not step.dtype:  # of a cast, or complex
            known = gradient_of(step, self.program.maps, values)
        values[out] = known
        if out in self.wanted:
            self.forms[out] = known.numel(), known.dtype
            before = step.terms[0].value
            moved = before in self.rows and self.forms[before][1] is known.dtype
            if moved and _permutes(step, self.program):
                self.rows[out] = self.rows[before]
            else:
                self._measure(out, known)
        for value in (out, *(term.value for term in step.terms)):
            if self.last.get(value, -1) <= n:
                values.pop(value, None)

    def _measure(self, value: int, x: Tensor) -> None:
        """Measure a value, now or together with others."""
        self.rows[value] = self.filled + len(self.waiting)
        self.waiting.append(x)
        self.held += 0 if value in self.known else x.nbytes
        if len(self.waiting) >= self.most or self.held > TOGETHER_MAX_BYTES:
            self.measure_waiting()

    def measure_waiting(self) -> None:
        """Measure those that wait."""
        if self.waiting:
            end = self.filled + len(self.waiting)
            self.table[self.filled : end] = sizes_of(self.waiting)
            self.filled, self.waiting, self.held = end, [], 0


def _known(program: Program) -> dict[int, Tensor]:
    """The gradients that recording has computed, by value. A value that is only moved into one of
    these, and used for nothing else, has the same sizes: there it is that gradient, in its order.
    """
    known, steps = program.constants.known_gradients(), program.steps()
    uses = Counter(value for step in steps for _, value in step.terms)
    for step in reversed(steps):
        value = step.terms[0].value
        alone = value not in known and uses[value] == 1
        if alone and step.out in known and _permutes(step, program):
            known[value] = known[step.out]
    return {value: x for value, x in known.items() if x.layout is torch.strided}


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


def sizes_of(xs: Sequence[Tensor]) -> Tensor:
    """``sizes`` of each tensor: (len(xs), 4)."""
    found = backend_of(xs[0]).sizes(xs)
    if found is None:
        found = torch.stack([sizes(x).to(xs[0].device) for x in xs])
    return found


def sizes(x: Tensor) -> Tensor:
    """``‖x‖``, ``max |x[i]|``, the number of nonzero entries and ``Σ |x[i]|``, as float64 (4,).

    float64 holds the squares of all smaller floats. Squares of float64 may overflow, so there
    ``‖x‖ = m ‖x/m‖`` with m the largest magnitude.
    """
    if not x.numel():
        return torch.zeros(4, dtype=torch.float64, device=x.device)
    found = backend_of(x).sizes([x])
    if found is not None:
        return found[0]
    largest = vector_norm(x, inf).double()
    if x.dtype is torch.float64:
        unit = torch.where((largest > 0) & largest.isfinite(), largest, 1.0)
        norm = vector_norm(x / unit) * unit
    else:
        norm = vector_norm(x, dtype=torch.float64)
    mass = vector_norm(x, 1, dtype=torch.float64)
    return torch.stack([norm, largest, x.count_nonzero().double(), mass])
