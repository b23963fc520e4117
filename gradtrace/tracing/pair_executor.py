"""Executes a program for a vector of losses, traced separately for each of them.

Values whose elements each belong to one pair are computed once for all pairs. Values that mix pairs
are computed in batches, each pair in its own slice along a new first dimension.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from gradtrace.ir.optimise import optimise
from gradtrace.ir.passes.provenance import NO_COMPONENTS, ComponentBits
from gradtrace.ir.passes.schedule import Request
from gradtrace.ir.plan import NO_LIMIT, Storage
from gradtrace.ir.program import Program
from gradtrace.linops import Map, copied
from gradtrace.linops.indexing import each_at
from gradtrace.tracing.compact_storage import take
from gradtrace.tracing.executor import Executor, TracedLeaf
from gradtrace.tracing.per_sample import Pairs, places
from gradtrace.tracing.traced_value import TracedValue

BATCH_MAX_ELEMENTS = 1 << 20
"""Pairs that mix are computed in batches, such that no batched value has more elements."""


def execute_pairs(
    program: Program,
    rule: str,
    pairs: Pairs,
    components: ComponentBits = NO_COMPONENTS,
    storage: Storage = NO_LIMIT,
) -> Iterator[TracedLeaf]:
    """The leaves of each loss of a vector."""
    constants, leaves = program.constants, {leaf.value: leaf for leaf in program.leaves}
    request = Request(rule, components, frozenset(pairs.apart), frozenset(pairs.of))
    executor = Executor(optimise(program, request, storage), constants)
    states = executor.values()
    states[program.root] = executor.root(program.seed)
    for value in executor.run(states):
        yield TracedLeaf(leaves[value], states[value], pairs.of[value])
    mixed = pairs.mixed(program)
    plan = optimise(program, Request(rule, components, mixed), storage)
    along = pairs.summed(program, mixed)
    batches = batches_of(program, mixed, len(program.seed), storage.compact)
    for some, maps in batched_maps(program, pairs, along, batches):
        executor = Executor(plan, constants, maps)
        here = executor.values()
        for value in along:
            here[value] = _only(states[value], pairs.of[value], some, maps.places.get(value))
        for value in executor.run(here):
            yield TracedLeaf(leaves[value], take(here, value), some)


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
            value: (dim, places(pairs.of[value], some, dim))
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
    state: TracedValue, of: Tensor, pairs: range, at: tuple[int, Tensor] | None
) -> TracedValue:
    """A value batched over pairs, with 0 at elements of other pairs.

    ``of`` gives each element's pair. ``at`` is a dimension and, for each pair, the indices along
    it to select; None selects all.
    """

    def only(x: Tensor | None) -> Tensor | None:
        return None if x is None else only_pairs([x], of, pairs, at)[0]

    assert state.value is not None
    return state._replace(value=only(state.value), ids=only(state.ids), size=only(state.size))


def only_pairs(
    tensors: Sequence[Tensor], of: Tensor, pairs: range, at: tuple[int, Tensor] | None
) -> list[Tensor]:
    """``_only`` for tensors of one value."""
    mine = torch.arange(pairs.start + 1, pairs.stop + 1, device=of.device)
    there = _each(of, at) == mine.reshape(-1, *[1] * of.dim())
    return [torch.where(there, _each(x, at), _zero(x)) for x in tensors]


def _zero(x: Tensor) -> Tensor:
    return torch.zeros((), dtype=x.dtype, device=x.device)


def _each(x: Tensor, at: tuple[int, Tensor] | None) -> Tensor:
    """A tensor with a new first dimension over pairs, indexed for each pair if ``at``."""
    return x.unsqueeze(0) if at is None else each_at(x, *at)
