"""Plans that are kept for the next loss of the same structure.

A training loop computes the same operators in every step. What passes find out of a program's
structure (its components, the bounds of provenance, the plan) is therefore kept, and found again by
``ir.program.Structure``, which is compared whole: a plan is used for a loss only if recording it
gave the very same steps. Recordings are kept too (``recording.replay``): a loss whose recording was
replayed has the structure of the earlier one by that. Neither holds tensors.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from operator import attrgetter
from threading import Lock
from typing import Any, NamedTuple

import numpy as np

from gradtrace.components.components import (
    Component,
    ComponentFinder,
    Components,
    ComponentSelection,
    spelt,
)
from gradtrace.components.series import alternatives
from gradtrace.ir.optimise import optimise
from gradtrace.ir.passes.entries import Entries, bits_by_component
from gradtrace.ir.passes.provenance import NO_COMPONENTS, ProvenanceBounds, analyse_provenance
from gradtrace.ir.passes.schedule import Request
from gradtrace.ir.passes.uniform_leaves import uniform_leaves
from gradtrace.ir.plan import Plan, Storage
from gradtrace.ir.program import Program, ProgramFacts, Structure, difference, structure_of
from gradtrace.ir.tape import Tapes
from gradtrace.kernels import Backend, tuning
from gradtrace.kernels.path_table import PathTable
from gradtrace.paths.path_mass import MassPlan, plan_mass
from gradtrace.recording.kept_recordings import RECORDINGS, KeptRecording
from gradtrace.tracing.aggregate import Reach
from gradtrace.tracing.captures import Slot
from gradtrace.tracing.plan_run import KeptTable, table_of
from gradtrace.tracing.plan_table import PlanTable
from gradtrace.tracing.provenance import words_of
from gradtrace.tracing.uniform_tally import UniformTally

MAX_STRUCTURES = 64
"""The most structures that are kept; the one that was used least recently goes first."""

MAX_STEPS = 500_000
"""The most steps of all structures that are kept together: some 0.5 GiB."""

MAX_SELECTIONS = 32
"""The most choices of components for which a structure's plans are kept; then all are forgotten."""


MAX_PAIR_PLANS = 32
"""The most plans for parts of a program that are kept; then all are forgotten."""


class ProgramPart(NamedTuple):
    """The values of a program that a pass computes, and those that it does not free."""

    values: frozenset[int]
    keep: frozenset[int] = frozenset()


PathTables = dict[Hashable, PathTable | None]
"""Tables by which kernels follow paths; None where they cannot."""


class ReachableComponents(NamedTuple):
    """The index of each leaf's value, and by that index the components that paths from the leaf
    could pass and those it belongs to.
    """

    place: dict[int, int]
    reach: Reach


class ComponentFacts:
    """What follows from the structure of a program alone, for some of its components. Each fact is
    found when it is first asked for, from any program of this structure.
    """

    def __init__(self, chosen: ComponentSelection, names: Mapping[int, str]) -> None:
        self.chosen = chosen
        self.names = names  # of leaves, by value
        self.plans: dict[tuple[str, Storage, int], Plan] = {}
        self.pair_plans: dict[tuple[str, Storage, ProgramPart], Plan] = {}
        self.tables: PathTables = {}
        self._bounds: ProvenanceBounds | None = None
        self._reachable: ReachableComponents | None = None
        self._alternatives: list[bool | None] | None = None
        self._tallies: dict[int, UniformTally | None] = {}  # by id of the plan, which is kept
        self._tables: dict[int, KeptTable] = {}  # likewise
        self._mass_plan: MassPlan | None = None
        self.mass_tapes = Tapes()
        self.captures: dict[int, Slot] = {}  # by id of the plan
        self._owners: dict[int, int] | None = None

    def plan(self, program: Program, rule: str, storage: Storage) -> Plan:
        """The plan of an influence pass."""
        key = (rule, storage, tuning.PIECE_ELEMENTS)  # leaves above it are counted in pieces
        found = self.plans.get(key)
        if found is None:
            bits, bounds = self.chosen.component_bits, self.bounds(program)
            request = Request(rule, bits, gradients=rule != "viterbi", bounds=bounds)
            found = self.plans[key] = optimise(program, request, storage)
        return found

    def pair_plan(self, program: Program, rule: str, storage: Storage, part: ProgramPart) -> Plan:
        """The plan of a pass over a part of the program, for a vector of losses. Which values are
        in it may follow from data, so that there may be many.
        """
        key = (rule, storage, part)
        found = self.pair_plans.get(key)
        if found is None:
            if len(self.pair_plans) >= MAX_PAIR_PLANS:
                self.pair_plans.clear()
            if rule == "gradient":
                request = Request(rule, NO_COMPONENTS, *part)
            else:
                bits, bounds = self.chosen.component_bits, self.bounds(program)
                request = Request(rule, bits, *part, bounds=bounds)
            found = self.pair_plans[key] = optimise(program, request, storage)
        return found

    def uniform(self, program: Program, plan: Plan) -> UniformTally | None:
        """Counts the leaves without executing the plan; None if it must be executed."""
        if id(plan) not in self._tallies:
            facts = structure_of(program)
            known = {*facts.kept, *[value for value, computed in facts.leaves if computed]}
            leaves = uniform_leaves(plan, known, program.seed.dtype)
            _, reach = self.reachable(program)
            self._tallies[id(plan)] = (
                None
                if leaves is None
                else UniformTally.of(leaves, program, self.names, reach, self.chosen.bits)
            )
        return self._tallies[id(plan)]

    def table(self, program: Program, plan: Plan, backend: Backend) -> KeptTable:
        """Executes the plan in one call, if it can be."""
        found = self._tables.get(id(plan))
        if found is None:
            reach = self.reachable(program).reach
            given = plan, program, self.names, reach, self.chosen.bits, backend
            found = self._tables[id(plan)] = table_of(*given)
        return found

    def tables_of_plans(self) -> list[KeptTable]:
        """Those that there are."""
        return [*self._tables.values()]

    def bounds(self, program: Program) -> ProvenanceBounds:
        """The bits of provenance that all paths from a value have, and those that any has."""
        if self._bounds is None:
            self._bounds = analyse_provenance(program, self.chosen.component_bits)
        return self._bounds

    def reachable(self, program: Program) -> ReachableComponents:
        """The components that the paths of each leaf could pass, and those it belongs to."""
        if self._reachable is None:
            values = [leaf.value for leaf in program.leaves]
            may = self.bounds(program).may
            words = words_of([may[value] for value in values])
            place = {value: n for n, value in enumerate(values)}
            self._reachable = ReachableComponents(place, Reach(words, self._owned(values)))
        return self._reachable

    def alternatives(self, program: Program) -> list[bool | None]:
        """Whether paths have an alternative to each component."""
        if self._alternatives is None:
            parts = self.chosen.components, self.chosen.component_bits, self.bounds(program)
            self._alternatives = alternatives(program, *parts, self.names)
        return self._alternatives

    def described(self, program: Program) -> tuple[list[str], list[bool | None]]:
        """The name of each component, and its ``alternatives``."""
        return [each.name for each in self.chosen.components], self.alternatives(program)

    def mass_plan(self, program: Program) -> MassPlan:
        """The plan of a mass pass."""
        if self._mass_plan is None:
            every = [each.bits for each in self.chosen.components]
            bits = bits_by_component(self.chosen.component_bits, every)
            self._mass_plan = plan_mass(program, bits, self.owners())
        return self._mass_plan

    def owners(self) -> dict[int, int]:
        """For each leaf, by value, the bits of the components that it belongs to: bit k + 1 for the
        k-th.
        """
        if self._owners is None:
            by_name: dict[str, int] = {}
            for k, component in enumerate(self.chosen.components):
                for name in component.owns:
                    by_name[name] = by_name.get(name, 0) | 2 << k
            self._owners = {value: by_name.get(name, 0) for value, name in self.names.items()}
        return self._owners

    def _owned(self, values: Sequence[int]) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
        """(2, n): indices of leaves, and of the components they belong to."""
        places: dict[str, list[int]] = {}
        for place, value in enumerate(values):
            places.setdefault(self.names[value], []).append(place)
        leaves: list[int] = []
        components: list[int] = []
        for n, component in enumerate(self.chosen.components):
            here = [place for name in component.owns for place in places.get(name, ())]
            leaves += here
            components += [n] * len(here)
        return np.array([leaves, components], np.int64)


@dataclass(eq=False)
class KeptPlans:
    """All that was found out of one structure. ``hits`` counts the losses that used it again."""

    structure: Structure
    names: Mapping[int, str]
    hits: int = 0
    missed: str = ""  # why it was not found among those kept before
    replays: int = 0  # losses of which an earlier recording was replayed
    recorded: str = ""  # why the last one was not
    selections: dict[Hashable, ComponentSelection] = field(default_factory=dict)
    tables: PathTables = field(default_factory=dict)
    path_bytes: dict[bool, tuple[int, int]] = field(default_factory=dict)  # if gradients were kept
    _facts: dict[int, ComponentFacts] = field(default_factory=dict)  # by id, which they keep alive

    @property
    def steps(self) -> int:
        """The number of steps of the program."""
        both = (map(attrgetter(part), self.structure.blocks) for part in ("steps", "merges"))
        return sum(sum(map(len, each)) for each in both)

    def chosen(self, finder: Callable[[], ComponentFinder], by: Components) -> ComponentSelection:
        """``finder().choose(by)``, found once."""
        key = _spelling(by := spelt(by))
        if key is None:
            return finder().choose(by)
        found = self.selections.get(key)
        if found is None:
            if len(self.selections) >= MAX_SELECTIONS:
                self.selections.clear()
            found = self.selections[key] = finder().choose(by)
        return found

    def facts(self, chosen: ComponentSelection) -> ComponentFacts:
        """What follows from the structure for these components."""
        found = self._facts.get(id(chosen))
        if found is None:
            if len(self._facts) >= MAX_SELECTIONS:
                self._facts.clear()
            found = self._facts[id(chosen)] = ComponentFacts(chosen, self.names)
        return found

    @property
    def stepwise(self) -> str:
        """Why Python executes plans step by step."""
        tables = (table for facts in self._facts.values() for table in facts.tables_of_plans())
        return "; ".join(dict.fromkeys(table.reason for table in tables if table.reason))

    @property
    def captures(self) -> list[Slot]:
        """Whether the plans have captured passes."""
        return [slot for facts in self._facts.values() for slot in facts.captures.values()]

    @property
    def plans(self) -> int:
        """The number of plans, by components and rule."""
        return sum(len(facts.plans) + len(facts.pair_plans) for facts in self._facts.values())


class PlanRow(NamedTuple):
    """A structure that is kept: how many operators, leaves and plans it has, for how many losses it
    was used again and for how many of these recording too, how many bytes it takes, why it was new,
    why the last loss was recorded anew (empty if it was not), and why Python executes its plans
    step by step, and not the compiled library in one call (empty where that was not tried). On a
    GPU, how many losses were executed by a graph of launches, how many bytes of the GPU these
    graphs hold, and why the last loss was not (empty if it was, and where there are no graphs).
    """

    operators: int
    leaves: int
    plans: int
    hits: int
    replays: int
    bytes: int
    missed: str
    recorded: str
    stepwise: str
    graphs: int = 0
    device_bytes: int = 0
    executed: str = ""


@dataclass(frozen=True)
class Plans:
    """The plans that are kept, the most recently used first."""

    rows: tuple[PlanRow, ...]
    hits: int
    misses: int

    @property
    def bytes(self) -> int:
        """The memory that all of them take."""
        return sum(row.bytes for row in self.rows)

    @property
    def device_bytes(self) -> int:
        """The memory of GPUs that all of them take."""
        return sum(row.device_bytes for row in self.rows)


class PlanCache:
    """Kept plans by structure; bounded, and safe to use from several threads."""

    def __init__(self, structures: int = MAX_STRUCTURES, steps: int = MAX_STEPS) -> None:
        self.max_structures, self.max_steps = structures, steps
        self._lock = Lock()
        self._kept: OrderedDict[Hashable, KeptPlans] = OrderedDict()
        self._steps = self.hits = self.misses = 0

    def of(
        self,
        program: Program,
        names: Mapping[int, str],
        modules: Mapping[str, str],
        aliases: Mapping[str, str],
    ) -> KeptPlans:
        """The plans of a program; new ones if there are none for its structure and the names of its
        leaves (by value), modules (their classes) and aliases of leaves.
        """
        structure = structure_of(program)
        key = (structure, *((*some.items(),) for some in (names, modules, aliases)))
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
                found.hits += 1
                self.hits += 1
                if program.recorded is not None:  # else made of another program
                    found.replays += not program.recorded
                    found.recorded = program.recorded
                program.facts.structure = found.structure  # the same object is found faster
                return found
            found = KeptPlans(structure, dict(names), missed=self._reason(structure, names))
            found.recorded = program.recorded or ""
            self.misses += 1
            self._kept[key] = found
            self._steps += found.steps
            while len(self._kept) > 1 and (
                len(self._kept) > self.max_structures or self._steps > self.max_steps
            ):
                self._steps -= self._kept.popitem(last=False)[1].steps
            return found

    def _reason(self, structure: Structure, names: Mapping[int, str]) -> str:
        """Why no plan was found: how the last loss of the same leaves was different."""
        known = set(names.values())
        for kept in reversed(self._kept.values()):
            if set(kept.names.values()) == known:
                return difference(kept.structure, structure)
        return "its first loss"

    def clear(self) -> None:
        """Forget all plans."""
        with self._lock:
            self._kept.clear()
            self._steps = self.hits = self.misses = 0

    def summary(self) -> Plans:
        """What is kept now."""
        with self._lock:
            kept = list(reversed(self._kept.values()))
            hits, misses = self.hits, self.misses
        rows = [
            PlanRow(
                len(each.structure.blocks),
                len(each.structure.leaves),
                each.plans,
                each.hits,
                each.replays,
                _bytes_of(
                    (each, [r for r in RECORDINGS.all() if r.facts.structure == each.structure])
                ),
                each.missed,
                each.recorded,
                each.stepwise,
                *_graphs(each.captures),
            )
            for each in kept
        ]
        return Plans(tuple(rows), hits, misses)


def _graphs(slots: Sequence[Slot]) -> tuple[int, int, str]:
    """How many losses were executed by graphs, the bytes that these hold, and why the last was
    not.
    """
    made = [slot.made for slot in slots if slot.made is not None]
    reasons = [slot.reason for slot in slots if slot.reason]
    replays, held = sum(slot.replays for slot in slots), sum(each.nbytes for each in made)
    return replays, held, reasons[-1] if reasons else ""


KEPT = PlanCache()
"""The plans of this process."""


def forget() -> None:
    """Forget all plans and recordings, and how often they were used."""
    KEPT.clear()
    RECORDINGS.clear()


def _spelling(by: Any) -> Hashable:
    """Components as a key; None if they are no names, which an error will say, or if they do not
    follow from the structure alone: which experts were called is in the data.
    """
    if "expert" in str(by) or isinstance(by, ComponentSelection):
        return None
    if isinstance(by, Mapping):
        by = [(name, tuple(x) if isinstance(x, list) else x) for name, x in by.items()]
    key: Hashable = (type(by), *by) if isinstance(by, list) else by
    try:
        hash(key)
    except TypeError:
        return None
    return key


_COUNTED = (
    *(KeptPlans, ComponentFacts, ComponentSelection, Component, Plan),
    *(Structure, KeptRecording, ProgramFacts, Entries, KeptTable, PlanTable),
)


def _bytes_of(root: object) -> int:
    """The bytes of an object and all that it refers to, each once; of Python's own and of arrays,
    not of classes and what they share.
    """
    seen: set[int] = set()
    stack, total = [root], 0
    while stack:
        item = stack.pop()
        if id(item) in seen or isinstance(item, type):
            continue
        seen.add(id(item))
        total += sys.getsizeof(item)
        if isinstance(item, Mapping):
            stack += [*item.keys(), *item.values()]
        elif isinstance(item, (tuple, list, set, frozenset)):
            stack += item
        elif is_dataclass(item) and not hasattr(item, "__dict__"):  # all in slots
            stack += [getattr(item, each.name) for each in fields(item)]
        elif isinstance(item, _COUNTED):
            stack += vars(item).values()
    return total
