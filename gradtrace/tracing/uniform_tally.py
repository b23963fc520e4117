"""Counts the leaves of a network without branches, whose plan need not be executed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gradtrace.ir.passes.uniform_leaves import Contribution, UniformLeaf
from gradtrace.ir.program import Constants, Program
from gradtrace.kernels import Backend
from gradtrace.kernels.operands import GroupRequest, GroupSums, Whole
from gradtrace.linops import Scatter
from gradtrace.linops.scatter import SparseElements
from gradtrace.tracing.aggregate import HOST, Counts, LeafSums, ListedGroups, Reach, own_elements
from gradtrace.tracing.provenance import ProvenanceTable, words_of
from gradtrace.tracing.traced_value import PendingContribution, cancelled


class UniformTally(NamedTuple):
    """The leaves of a plan whose provenance is known beforehand (``passes.uniform_leaves``), and
    what ``Backend.group_sums`` is asked for but the counts. It holds no tensor of a program, and
    serves all of its structure.
    """

    root: int
    leaves: Sequence[UniformLeaf]
    places: list[int]  # of each among the leaves of a program
    sizes: Whole
    request: GroupRequest
    through: bool  # whether a path passes all components that it could pass
    own: list[int]  # the number of elements that belong to each component

    @classmethod
    def of(
        cls,
        leaves: Sequence[UniformLeaf],
        program: Program,
        names: Mapping[int, str],
        reach: Reach,
        bits: list[int],
    ) -> UniformTally:
        """``names`` of leaves are by value; ``bits`` are those of each component."""
        place = {leaf.value: n for n, leaf in enumerate(program.leaves)}
        places = [place[leaf.value] for leaf in leaves]
        sizes = [program.leaves[n].tensor.numel() for n in places]
        counts = torch.zeros(len(leaves), dtype=torch.int64, device=HOST)
        sums, rows = counts.double(), ProvenanceTable().rows  # one for all: many leaves share them
        found = [Counts(counts, sums, rows, leaf.bits, 0, 0, n, 1) for n, leaf in enumerate(leaves)]
        totals = np.array(sizes, dtype=float)
        starts = range(len(leaves))
        request = ListedGroups(found).request(starts, LeafSums(1, reach, places, totals, bits))
        passed = words_of([leaf.bits | 1 for leaf in leaves], 0, reach.words.shape[1])
        through = np.array_equal(passed, reach.words[places])
        if through:  # then they need not be summed twice
            request = request._replace(extra=np.zeros((len(leaves), 1), np.uint64))
        own = own_elements([names[leaf.value] for leaf in leaves], places, sizes, reach, len(bits))
        return cls(program.root, leaves, places, np.array(sizes, np.int64), request, through, own)

    def counted(self, constants: Constants, backend: Backend) -> GroupSums:
        """The sums of a program's leaves, by component; they are on the CPU (``sums_groups``)."""
        known, many = constants.known_gradients(), len(self.leaves)
        known[self.root] = constants.seed
        counts, sums = np.zeros(many, np.int64), np.zeros(many)
        together: dict[int, Tensor] = {}
        for n, (leaf, place) in enumerate(zip(self.leaves, self.places)):
            gradient = known.get(leaf.value)
            if gradient is None and (few := _few(leaf.part, known, constants)) is not None:
                found = backend.tally(few.ids, few.value, 2)
                counts[n], sums[n] = (each[1].item() for each in found)
                continue
            if gradient is None:
                gradient = constants.leaves[place].compute()  # one at a time: these are large
            else:
                together[n] = gradient
                continue
            number, total = map(Tensor.item, backend.measure(gradient))
            if number < gradient.numel() and leaf.part is not None:
                number += _count_cancelled(leaf.part, gradient, known, constants, backend)
            counts[n], sums[n] = number, total
        if together:
            found = backend.measure_many([*together.values()])
            counts[[*together]], sums[[*together]] = (each.numpy() for each in found)
        short = set(np.flatnonzero(counts < self.sizes).tolist())
        for n, more in self._cancelled(short & together.keys(), known, constants, backend):
            counts[n] += more
        summed = backend.group_sums(self.request, torch.from_numpy(counts), torch.from_numpy(sums))
        return summed._replace(through=summed.eligible) if self.through else summed

    def _cancelled(
        self, short: set[int], known: dict[int, Tensor], constants: Constants, backend: Backend
    ) -> Iterator[tuple[int, int]]:
        """Of these leaves, the number of elements that are 0 but have a path."""
        parts = {n: part for n in short if (part := self.leaves[n].part) is not None}
        values = [*{part.value for part in parts.values()}]
        zero: set[int] = set()
        if values:
            found = backend.measure_many([known[value] for value in values])[0].tolist()
            zero = {value for value, count in zip(values, found) if not count}
        for n, part in parts.items():
            if part.value not in zero:  # else all contributions are 0
                gradient = known[self.leaves[n].value]
                yield n, _count_cancelled(part, gradient, known, constants, backend)


def _count_cancelled(
    part: Contribution,
    gradient: Tensor,
    known: dict[int, Tensor],
    constants: Constants,
    backend: Backend,
) -> int:
    """The number of elements that are 0 though a contribution is not."""
    found = cancelled((_pending(part, known, constants),), gradient, backend)
    return 0 if found is None else int(found.sum())


def _few(
    part: Contribution | None, known: dict[int, Tensor], constants: Constants
) -> SparseElements | None:
    """The elements of a leaf, if only few are added to."""
    if part is None or part.moves or not isinstance(constants.maps[part.map], Scatter):
        return None
    return _pending(part, known, constants).few()


def _pending(
    part: Contribution, known: dict[int, Tensor], constants: Constants
) -> PendingContribution:
    maps, x = constants.maps, known[part.value]
    for at in part.before:
        x = maps[at].apply(x)
    return PendingContribution(maps[part.map], x, tuple([maps[at] for at in part.moves]))
