"""Executes a program for a vector of losses, traced separately for each of them.

Values whose elements each belong to one pair are computed once for all pairs. Values that mix pairs
are computed in batches, each pair in its own slice along a new first dimension.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from gradtrace.ir.plan import Storage
from gradtrace.ir.program import Program
from gradtrace.kernels import Backend
from gradtrace.linops import Map, copied
from gradtrace.linops.indexing import each_at
from gradtrace.tracing.compact_storage import take
from gradtrace.tracing.executor import Executor, TracedLeaf
from gradtrace.tracing.kept_plans import ComponentFacts, ProgramPart
from gradtrace.tracing.per_sample import Pairs
from gradtrace.tracing.traced_value import TracedValue

BATCH_MAX_ELEMENTS = 1 << 20
"""Pairs that mix are computed in batches, such that no batched value has more elements."""


def execute_pairs(
    program: Program,
    rule: str,
    pairs: Pairs,
    facts: ComponentFacts,
    storage: Storage,
    backend: Backend,
) -> Iterator[TracedLeaf]:
    """The leaves of each loss of a vector."""
    constants, leaves = program.constants, {leaf.value: leaf for leaf in program.leaves}
    apart = ProgramPart(frozenset(pairs.apart), frozenset(pairs.of))
    executor = Executor(facts.pair_plan(program, rule, storage, apart), constants, backend)
    states = executor.values()
    states[program.root] = executor.root(program.seed)
    for value in executor.run(states):
        yield TracedLeaf(leaves[value], states[value], pairs.of[value])
    mixed = pairs.mixed(program)
    plan = facts.pair_plan(program, rule, storage, ProgramPart(mixed))
    along = pairs.summed(program, mixed)
    batches = batches_of(program, mixed, len(program.seed), storage.compact)
    if mixed and backend.host:
        _expect_large(program.seed.dtype)
    for some, maps in batched_maps(program, pairs, along, batches):
        executor = Executor(plan, constants, backend, maps)
        here = executor.values()
        for value in along:
            here[value] = _only(states[value], pairs, value, some, maps.places.get(value))
        for value in executor.run(here):
            yield TracedLeaf(leaves[value], take(here, value), some)


def _expect_large(dtype: torch.dtype) -> None:
    """Ask for as much memory as a batch takes, and return it untouched: glibc's allocator keeps
    then what some steps of a batch free for the next ones. Else it returns blocks of this size to
    the system each time, and to get their pages again takes longer than the steps do.
    """
    torch.empty(4 * BATCH_MAX_ELEMENTS, dtype=dtype, device="cpu")


def batched_maps(
    program: Program, pairs: Pairs, along: Mapping[int, int | None], batches: Iterable[range]
) -> Iterator[tuple[range, BatchedMaps]]:
    """Batches of pairs, each with the maps for it; ``along`` are the values that pairs share, and
    the dimension along which each has a pair's elements.
    """
    maps: BatchedMaps | None = None
    for some in batches:
        if maps is None or maps.count != len(some):
            maps = BatchedMaps(program, len(some))
        maps.places = {
            value: (dim, pairs.places(value, some, dim))
            for value, dim in along.items()
            if dim is not None  # only the pair's own indices: the others would add 0
        }
        yield some, maps


class BatchedMaps:
    """The maps of a program for ``count`` pairs along a new first dimension.

    ``places``: for a value, a dimension and the indices along it of each pair's elements.
    """

    def __init__(self, program: Program, count: int) -> None:
        self.maps = program.maps
        self.count = count
        self.places: dict[int, tuple[int, Tensor]] = {}
        self.copied: dict[int, Map] = {}  # by id of a map: many terms share one

    def __call__(self, at: int, value: int) -> Map:
        """The map of a term."""
        map_ = self.maps[at]
        if value in self.places:
            return map_.narrow(*self.places[value])
        found = self.copied.get(id(map_))
        if found is None:
            found = self.copied[id(map_)] = copied(map_, self.count)
        return found


def batches_of(
    program: Program, mixed: frozenset[int], count: int, compact: bool
) -> Iterator[range]:
    """The pairs in batches, if any value mixes pairs; see ``BATCH_MAX_ELEMENTS``."""
    most = max((prod(s.shape) for s in program.steps() if s.out in mixed), default=1)
    size = 1 if compact else max(1, BATCH_MAX_ELEMENTS // max(1, most))
    for first in range(0, count if mixed else 0, size):
        yield range(first, min(first + size, count))


def _only(
    state: TracedValue, pairs: Pairs, value: int, some: range, at: tuple[int, Tensor] | None
) -> TracedValue:
    """The state of a value batched over pairs, with 0 at elements of other pairs."""

    def only(x: Tensor | None) -> Tensor | None:
        return None if x is None else only_pairs([x], pairs, value, some, at)[0]

    assert state.value is not None
    return state._replace(value=only(state.value), ids=only(state.ids), size=only(state.size))


def only_pairs(
    tensors: Sequence[Tensor], pairs: Pairs, value: int, some: range, at: tuple[int, Tensor] | None
) -> list[Tensor]:
    """Tensors of a value batched over ``some`` pairs, with 0 at elements of other pairs. ``at`` is
    a dimension and, for each pair, the indices along it to select; None selects all.
    """
    of, axis = pairs.of[value], pairs.axes.get(value)
    if axis is not None and at is not None and axis.dim == at[0]:
        return [each_at(x, *at) for x in tensors]  # all of these elements are the pair's
    if axis is not None and at is None and all(x.is_contiguous() for x in tensors):
        index = axis.places(some, of.shape[axis.dim], of.device)
        return [_spread(x, axis.dim, index) for x in tensors]
    mine = torch.arange(some.start + 1, some.stop + 1, device=of.device)
    there = _each(of, at) == mine.reshape(-1, *[1] * of.dim())
    return [torch.where(there, _each(x, at), _zero(x)) for x in tensors]


def _spread(x: Tensor, dim: int, index: Tensor) -> Tensor:
    """For each row of an index a copy of a tensor, along a new first dimension, with 0 but at these
    indices along ``dim``.
    """
    out = x.new_zeros((len(index), *x.shape))
    pair = torch.arange(len(index), device=x.device).unsqueeze(1)
    out.movedim(dim + 1, 1)[pair, index] = x.movedim(dim, 0)[index]
    return out


def _zero(x: Tensor) -> Tensor:
    return torch.zeros((), dtype=x.dtype, device=x.device)


def _each(x: Tensor, at: tuple[int, Tensor] | None) -> Tensor:
    """A tensor with a new first dimension over pairs, indexed for each pair if ``at``."""
    return x.unsqueeze(0) if at is None else each_at(x, *at)
