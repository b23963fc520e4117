"""Executes plans in the compiled library, in one call, and counts their leaves.

A plan is lowered when its second loss comes, and the table is kept with it. For each loss the
addresses of its tensors are filled in; where these lie in memory otherwise, it is lowered again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gradtrace.ir.plan import Plan
from gradtrace.ir.program import Constants, Program
from gradtrace.kernels import Backend, pointers
from gradtrace.kernels.cpu_plan import PlanCounts, run_plan
from gradtrace.kernels.operands import GroupRequest, GroupSums, Whole
from gradtrace.linops import Identity
from gradtrace.linops.select_words import NotCovered
from gradtrace.tracing.aggregate import Counts, LeafSums, ListedGroups, Reach, own_elements
from gradtrace.tracing.lowering import fact_of, lowered
from gradtrace.tracing.plan_table import CountedLeaf, PendingPart, PlanTable
from gradtrace.tracing.provenance import PackedSets
from gradtrace.tracing.traced_value import PendingContribution, cancelled

MAX_ATTEMPTS = 4
"""So often a plan is lowered anew, or its run given up, before it is left to Python for good."""


@dataclass
class KeptTable:
    """The table of a plan, for all losses of its structure. ``reason``: why there is none; empty
    while there is one, or none has been asked for.
    """

    plan: Plan
    names: Mapping[int, str]
    reach: Reach
    bits: list[int]
    reason: str = ""
    attempts: int = 0
    losses: int = 0
    table: PlanTable | None = None
    _asked: tuple[GroupRequest, list[int]] | None = None

    def counted(self, program: Program, backend: Backend) -> tuple[GroupSums, list[int]] | None:
        """The sums of all leaves by component, and the number of elements that belong to each; None
        if Python is to execute the plan, as it does for the first loss, since most losses are the
        only ones of their structure.
        """
        self.losses += 1
        if self.losses < 2:
            return None
        run = self.run(program, backend)
        if run is None:
            return None
        table, found = run
        asked = self._asked
        if asked is None:
            asked = self._asked = self._ask(table)
        request, own = asked
        lines = request.leaves.copy()
        lines[:, :4] = found.leaves[:, 1:]
        tables = [found.sets[a:b] for a, b in zip(found.starts, found.starts[1:])]
        request = request._replace(leaves=lines, tables=tables, extra=found.extra)
        counts, sums = torch.from_numpy(found.counts), torch.from_numpy(found.sums)
        return backend.group_sums(request, counts, sums), own

    def run(self, program: Program, backend: Backend) -> tuple[PlanTable, PlanCounts] | None:
        """The counts of all leaves, and the table of these; None if Python is to execute the plan.
        Several threads may do so at once.
        """
        if self.reason:
            return None
        run = self._prepared(program.constants)
        if run is None:
            return None
        found = run.counts()
        if found is None:
            self._attempted("contributions to some elements cancel")
            return None
        run.complete(found, backend)
        return run.table, found

    def _prepared(self, constants: Constants) -> TableRun | None:
        table = self.table
        if table is not None:
            run = TableRun(table, constants)
            if run.fits():
                return run
            self._attempted("its tensors lie in memory otherwise each time")
        try:
            table = None if self.reason else lowered(self.plan, constants)
        except NotCovered as error:
            self.reason, table = str(error), None
        self.table = table
        if table is None:
            return None
        run = TableRun(table, constants)
        return run if run.fits() else None

    def _attempted(self, why: str) -> None:
        self.attempts += 1
        if self.attempts > MAX_ATTEMPTS:
            self.reason, self.table = why, None

    def _ask(self, table: PlanTable) -> tuple[GroupRequest, list[int]]:
        """What is asked of the sums but the counts: the same for every loss."""
        leaves, width = table.leaves, table.words.width
        places = [leaf.place for leaf in leaves]
        sizes = [leaf.size for leaf in leaves]
        wanted = LeafSums(1, self.reach, places, np.array(sizes, float), self.bits)
        none = torch.empty(0, device="cpu")
        rows = (1 << 64 * width - 1,)  # as wide as those that are counted
        each = [Counts(none, none, rows, 0, 0) for _ in leaves]
        request = ListedGroups(each).request(range(len(leaves)), wanted)
        names = [self.names[leaf.value] for leaf in leaves]
        return request, own_elements(names, places, sizes, self.reach, len(self.bits))


def leaf_counts(found: PlanCounts) -> list[Counts]:
    """The counts as those of a ``Tally``, leaf by leaf."""
    counts, sums = torch.from_numpy(found.counts), torch.from_numpy(found.sums)
    tables = [PackedSets(found.sets[a:b]) for a, b in zip(found.starts, found.starts[1:])]
    return [
        Counts(
            counts,
            sums,
            tables[table],
            int.from_bytes(extra.tobytes(), "little"),
            0,
            blank,
            start,
            size,
        )
        for (_, start, size, blank, table), extra in zip(found.leaves.tolist(), found.extra)
    ]


class TableRun:
    """One run of a table, on the tensors of one loss."""

    def __init__(self, table: PlanTable, constants: Constants) -> None:
        self.table, self.constants = table, constants
        self.known = constants.known_gradients()
        self.known[table.root] = constants.seed
        for each in table.computed:
            self.known[each.key] = each.tensor(constants, self.known)
        self.tensors = [
            None if n in table.lazy else reading.tensor(constants, self.known)
            for n, reading in enumerate(table.readings)
        ]
        self.held: Tensor | None = None  # the gradient that is being counted

    def fits(self) -> bool:
        """Whether tensors and maps are as those that the table was made for."""
        maps = self.constants.maps
        if any(fact_of(maps[at]) != fact for at, fact in self.table.facts):
            return False
        return all(
            x is None or (x.shape, x.stride()) == layout
            for x, layout in zip(self.tensors, self.table.layouts)
        )

    def counts(self) -> PlanCounts | None:
        """Execute the plan; None if it needs what only Python has."""
        places = [0 if x is None else _address(x) for x in self.tensors]
        return run_plan(self.table.words, np.array(places, np.int64), self._wanted, self._asked)

    def _wanted(self, pointer: int) -> int:
        """The address of a leaf's gradient, which is computed now and dropped at the next."""
        gradient = self.constants.leaves[self.table.lazy[pointer]].gradient()
        shape, strides = self.table.layouts[pointer]
        if gradient.shape != shape or gradient.stride() != strides:
            again = torch.empty_strided(shape, strides, dtype=gradient.dtype, device="cpu")
            gradient = again.copy_(gradient)
        self.held = gradient
        return _address(gradient)

    def _asked(self, number: int, ids: Tensor) -> Tensor:
        """The ids that a map selects which the library does not know."""
        at, key = self.table.questions[number]
        map_ = self.constants.maps[at]
        return map_.select(self.known[key], ids.reshape(map_.in_shape))[1]

    def complete(self, found: PlanCounts, backend: Backend) -> None:
        """Count what the library leaves to Python: elements of uniform leaves that are 0 but have a
        path, and leaves with few elements that are not 0.
        """
        leaves = self.table.leaves
        first = found.leaves[:, 1]
        for n in _short(leaves, found):
            leaf, at = leaves[n], int(first[n])
            gradient = self.known.get(leaf.value)
            if gradient is None:
                gradient = self.constants.leaves[leaf.place].gradient()
            parts = tuple(self._pending(part) for part in leaf.parts)
            missed = cancelled(parts, gradient, backend)
            found.counts[at] += 0 if missed is None else int(missed.sum())
        for n, leaf in enumerate(leaves):
            if leaf.sparse:
                few = self._pending(leaf.parts[0]).few()
                assert few is not None
                counts, sums = backend.tally(few.ids, few.value, 2)
                at = int(first[n])
                found.counts[at : at + 2], found.sums[at : at + 2] = counts.numpy(), sums.numpy()

    def _pending(self, part: PendingPart) -> PendingContribution:
        x, maps = self.known[part.key], self.constants.maps
        map_ = Identity(tuple(x.shape)) if part.map < 0 else maps[part.map]
        return PendingContribution(map_, x, tuple([maps[at] for at in part.moves]))


def _address(x: Tensor) -> int:
    if x.is_contiguous():
        return pointers.quick_address(x, x.dtype, x.numel())
    reach = 1 + sum([(size - 1) * step for size, step in zip(x.shape, x.stride())])
    return pointers.address(x, x.dtype, reach)


def _short(leaves: list[CountedLeaf], found: PlanCounts) -> list[int]:
    """The uniform leaves of which an element is 0, with contributions that may cancel."""
    sizes: Whole = np.array([leaf.size for leaf in leaves], np.int64)
    blank, first = found.leaves[:, 3], found.leaves[:, 1]
    some = np.flatnonzero((blank == 0) & (found.counts[first] < sizes))
    return [n for n in some.tolist() if leaves[n].parts]


def table_of(
    plan: Plan,
    program: Program,
    names: Mapping[int, str],
    reach: Reach,
    bits: list[int],
    backend: Backend,
) -> KeptTable:
    """The table of a plan; with a reason if there cannot be one."""
    found = KeptTable(plan, names, reach, bits)
    if not (backend.sums_groups and backend.executes_plans):
        found.reason = "the compiled library does not execute plans"
    elif program.seed.dtype is not torch.float32:
        found.reason = f"the loss is {program.seed.dtype}"
    return found
