"""``Mass``: the share of the mass of all paths, ``Σ |weight|**p``, that passes each component."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from math import inf, isnan, nan
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from gradtrace.autodiff.loss_checks import isolated
from gradtrace.components.components import Components, ComponentSelection, impossible
from gradtrace.errors import GradtraceError, NonFinite, check_mergeable, listed, printable
from gradtrace.io.table import ComponentRows, Tabular, TextColumn, TextTable, known
from gradtrace.ir import memory
from gradtrace.ir.passes.entries import Entries
from gradtrace.ir.program import Program
from gradtrace.ir.rescaling import DeferredRescaling, Rescaling, rescaled
from gradtrace.kernels import backend_of, fetch_scalars
from gradtrace.kernels.precision import exact
from gradtrace.linops import Contract, Scale
from gradtrace.paths.masked_weights import finitely
from gradtrace.paths.path_mass import (
    Ahead,
    BackwardMass,
    PathMass,
    SumLayout,
    leading_to_leaves,
    leaf_tails,
    path_masses,
    run_ahead,
)
from gradtrace.semirings import Abs, Semiring
from gradtrace.semirings.additive import LiftedAbs, LogAbs
from gradtrace.tracing.counting import chosen_components
from gradtrace.tracing.moments import NOTHING, Moments, as_float, in_units, loss_count
from gradtrace.tracing.traced_program import TracedProgram

NO_REST = "as much as the gradient: nothing cancels"
WHAT = "measuring the mass of paths"
REMEDY = "trace fewer samples at a time, or measure fewer components"


GRADIENT_MAX_ELEMENTS = 1 << 22
"""The most leaf elements whose gradients are summed at once; those of large models take half of a
backward pass, so they are summed when they are asked for.
"""


@dataclass(frozen=True)
class MassRow:
    """A component: the mass of the paths through it, and of those that could pass through it."""

    name: str
    moments: Moments = NOTHING

    @property
    def mass(self) -> float:
        """``Σ |weight|**p`` over the paths through the component."""
        return as_float(self.moments.t)

    @property
    def eligible(self) -> float:
        """``Σ |weight|**p`` over all paths of the leaves outside it that could pass through it."""
        return as_float(self.moments.e)

    @property
    def share(self) -> float:
        """The ratio of the two; nan if no path could pass through the component."""
        return self.moments.share

    def __add__(self, other: MassRow) -> MassRow:
        return replace(self, moments=self.moments + other.moments)


@dataclass(frozen=True)
class Mass(ComponentRows[MassRow], Tabular):
    """A table of components: how much of the mass of all paths passes through each.

    The mass of a path is ``|weight|**p``, the weight being the product of the derivatives along
    it. ``share`` is the mass of the paths through a component over that of all paths of the leaves
    outside it for which some route through it exists; its own leaves are left out of both. A path
    counts once, however often it visits a component. Shares of branches side by side, of which
    every path takes one, add up to 1.

    With ``p = 1`` all paths count by what they carry; with larger p the heaviest count more, and in
    the limit only the path that the rule "viterbi" finds. For several losses, masses are summed
    over losses before they are divided, and ``errors`` are over losses. ``total`` is the mass of
    all paths.
    """

    rows: tuple[MassRow, ...]
    p: float = 1.0
    pairs: int = 1
    total: float = nan
    notes: tuple[str, ...] = ()
    source: Callable[[], float] | None = field(default=None, compare=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "size": self.gradient, "source": None}

    @property
    def shares(self) -> dict[str, float]:
        """``{component: share}``; nan if no path could pass through it."""
        return {row.name: row.share for row in self.rows}

    @property
    def errors(self) -> dict[str, float]:
        """``{component: standard error of its share over losses}``; nan for fewer than two."""
        return {row.name: row.moments.error(self.pairs) for row in self.rows}

    @property
    def gradient(self) -> float:
        """``Σ |gradient|`` over all leaves, of one loss and for ``p = 1``; else nan. It is infinite
        if a gradient is infinite or NaN. Of more than four million elements it is summed when first
        asked for or printed, which takes the trace; if that is gone, or was changed, it is nan.
        """
        if "size" not in self.__dict__:
            self.__dict__["size"] = nan if self.source is None else self.source()
        return float(self.__dict__["size"])

    @property
    def cancellation(self) -> float:
        """``Σ |weight| / Σ |gradient|``, at least 1: how many times the gradient the paths carry
        that cancel in it. nan where ``gradient`` is; ``Trace.cancellation`` is that of several
        losses.
        """
        return self.total / self.gradient if 0 < self.gradient < inf else nan

    def merge(self, *others: Mass) -> Mass:
        """The table over the losses of all tables; the same in any order and grouping.

        Args:
            others: Tables of the same kind, over other losses.

        Returns:
            One table.
        """
        result = self
        for other in others:
            check_mergeable(self, other)
            if other.p != result.p:
                raise GradtraceError(
                    f"masses with p = {result.p:g} and p = {other.p:g} cannot be merged"
                )
            mine = {row.name: row for row in result.rows}
            theirs = {row.name: row for row in other.rows}
            names = list(mine) if list(mine) == list(theirs) else sorted(mine | theirs)
            rows = tuple(mine.get(n, MassRow(n)) + theirs.get(n, MassRow(n)) for n in names)
            result = replace(
                result,
                rows=rows,
                pairs=result.pairs + other.pairs,
                total=result.total + other.total,
                source=None,
                notes=tuple(sorted({*result.notes, *other.notes})),
            )
        return result

    # Display -------------------------------------------------------------------------------------

    def table(self) -> TextTable:
        """The table as text: one row per component."""
        many = self.pairs > 1
        columns = (
            TextColumn("component"),
            TextColumn("share", "share"),
            *([TextColumn("± error", "share")] if many else []),
            TextColumn("mass", "number"),
            TextColumn("eligible", "number"),
        )
        rows = tuple(
            (
                row.name,
                known(row.share),
                *([known(row.moments.error(self.pairs))] if many else []),
                row.mass,
                row.eligible,
            )
            for row in self.rows
        )
        losses = f", {self.pairs:,} losses" if many else ""
        return TextTable(f"Mass of paths (p = {self.p:g}{losses})", columns, rows, self._words())

    def _words(self) -> tuple[str, ...]:
        words = []
        if not isnan(self.cancellation):
            much = f"{self.cancellation:.3g} times the gradient: the rest cancels"
            words.append(f"all paths carry {much if self.cancellation > 1.0005 else NO_REST}")
        elif self.source is not None:
            words.append(self._uncompared())
        total = sum(row.share for row in self.rows if row.moments.e)
        if total > 1.0005:
            words.append(
                f"shares add up to {total:.0%}: each is of the paths that could pass the component "
                "(eligible), and a path counts in every component that it passes"
            )
        apart = [row.name for row in self.rows if not row.moments.e]
        if apart:
            shown = listed(apart)
            words.append(
                f"no path of a leaf outside it can pass through {shown} with a weight other than 0"
            )
        return (*words, *self.notes)

    def _uncompared(self) -> str:
        """Why it is not said how many times the gradient all paths carry."""
        if not self.gradient:
            why = "all paths cancel" if self.total else "no path has a weight other than 0"
            return f"the gradient is 0: {why}"
        if not isnan(self.gradient):
            return "some gradients are NaN or infinite, so paths are not compared with them"
        return (
            "how many times the gradient all paths carry is not known, as the trace is gone or "
            "was changed: print the table before, or keep trace.cancellation()"
        )

    def __repr__(self) -> str:
        many = f"{len(self.rows)} components, p={self.p:g}, {loss_count(self.pairs)}"
        return printable(f"Mass({many})")


def mass_of(traced: TracedProgram, components: Components, p: float) -> Mass:
    """The table of components; see ``Mass``."""
    checked_power(p)
    chosen = chosen_components(traced, components)
    may = traced.kept.facts(chosen).mass_plan(traced.program).entries.may
    if not any(may[leaf.value] for leaf in traced.program.leaves):
        raise impossible([each.name for each in chosen.components])
    table = mass_through(traced, chosen, p)
    return replace(table, source=_gradient_source(traced)) if p == 1 == traced.pairs else table


def mass_through(traced: TracedProgram, chosen: ComponentSelection, p: float = 1.0) -> Mass:
    """The table of the chosen components. Powers of weights that leave the range of floats are
    taken as logarithms.
    """
    if p == 1:
        return _mass_in(Abs(), traced, chosen)
    if p <= LOGARITHMS_FROM:
        with suppress(NonFinite):
            table = _mass_in(Abs(p=checked_power(p)), traced, chosen)
            empty = [n for n, row in enumerate(table.rows) if not row.moments.e]
            if not empty:
                return table
            plain = mass_through(traced, chosen)
            if not any(plain.rows[n].moments.e for n in empty):
                return table
    return _mass_in(LogAbs(p=checked_power(p)), traced, chosen)


def _mass_in(semiring: Abs | LogAbs, traced: TracedProgram, chosen: ComponentSelection) -> Mass:
    """The table, in a semiring of masses."""
    program, facts = traced.program, traced.kept.facts(chosen)
    plan, owned = facts.mass_plan(program), facts.owners()
    entries, tails = plan.entries, plan.tails

    def measured(program: Program) -> list[PathMass]:
        def collect(rescaling: Rescaling) -> tuple[SumLayout, list[Tensor]]:
            rescaling.semiring = lifted(semiring, program, tails)
            ahead = run_ahead(program, rescaling, plan.entered, plan.below, tails)
            backward = BackwardMass(program, rescaling, entries, plan.alive, tails, ahead)
            runs = [backward.run(seed) for seed in _seeds(traced)]
            return SumLayout.of([group for run in runs for group in run], rescaling)

        def run(rescaling: Rescaling) -> list[PathMass] | None:
            if isinstance(rescaling, DeferredRescaling):  # which reads nothing
                key = (semiring.p, rescaling.steps, rescaling.parts, traced.pairs)
                once = partial(collect, rescaling)
                layout, tensors = facts.mass_tapes.run(key, program.seed, program.maps, once)
            else:
                layout, tensors = collect(rescaling)
            return path_masses(layout.read(tensors))

        return rescaled(semiring, program, run)

    precise = exact(*semiring.weigh(program.seed))  # here once, and not at every product
    with torch.no_grad(), memory.within(traced.backend, WHAT, REMEDY), precise:
        found = finitely(program, measured)
    runs = [(each, entries, _Eligible.of(each, entries, owned)) for each in found]

    def moments(bit: int) -> Moments:
        pairs = [_through(bit, *run) for run in runs]
        return Moments.whole([t for t, _ in pairs], [e for _, e in pairs], found[0].power)

    names = [component.name for component in chosen.components]
    rows = tuple(MassRow(name, moments(2 << k)) for k, name in enumerate(names))
    masses = sum(sum(each.leaves.values()) for each in found)
    total = as_float(in_units(masses, found[0].power))
    return Mass(rows, semiring.p, traced.pairs, total, traced.notes)


def _gradient_source(traced: TracedProgram) -> Callable[[], float]:
    """``Mass.gradient``: known already if there are few leaf elements. It does not keep the trace
    alive.
    """
    if sum(leaf.tensor.numel() for leaf in traced.program.leaves) <= GRADIENT_MAX_ELEMENTS:
        size = gradient_size(traced.program)
        return lambda: size
    trace = ref(traced)

    @isolated()
    def measure() -> float:
        there = trace()
        with suppress(GradtraceError):
            if there is not None:
                there.check_unchanged()
                return gradient_size(there.program)
        return nan

    return measure


def gradient_size(program: Program) -> float:
    """``Σ |gradient|`` over all leaves; infinite if one is infinite or NaN."""
    sizes = [_size(leaf.compute()) for leaf in program.leaves]
    total = sum(fetch_scalars(sizes))
    return inf if isnan(total) else total


def _size(x: Tensor) -> Tensor:
    return x.abs().sum(dtype=torch.float32) if x.itemsize < 4 else x.abs().sum()


def cancellation_of(traced: TracedProgram) -> float:
    """``Σ |weight| / Σ |gradient|`` over all paths and all leaves, of the sum of all losses."""
    program = traced.program
    ahead, alive, tails = Ahead({}, {}), leading_to_leaves(program), leaf_tails(program, set())

    def measured(program: Program) -> list[PathMass]:
        def run(rescaling: Rescaling) -> list[PathMass] | None:
            backward = BackwardMass(program, rescaling, Entries({}, {}), alive, tails, ahead)
            layout, tensors = SumLayout.of(backward.run(program.seed), rescaling)
            return path_masses(layout.read(tensors))

        return rescaled(Abs(), program, run)

    with torch.no_grad(), memory.within(traced.backend, WHAT, REMEDY):
        (found,) = finitely(program, measured)
        size = gradient_size(program)
    mass = in_units(sum(found.leaves.values()), found.power)
    return as_float(mass / Fraction(size)) if 0 < size < inf else nan


LIFTED_PART = 4
"""The absolute values of weights take at most this part of the memory that is free."""


def lifted(semiring: Semiring, program: Program, tails: dict[int, int]) -> Semiring:
    """The semiring with absolute values of the weights that both passes read, where it takes a
    launch to compute each.
    """
    backend = backend_of(program.seed)
    if semiring != Abs() or not backend.synchronises:
        return semiring
    weights = []
    for step in program.steps():
        for at, _ in step.terms if step.out not in tails else ():
            map_ = program.maps[at]  # its subclasses gather or copy a weight when it is read
            if isinstance(map_, (Scale, Contract)) and type(map_) in (Scale, Contract):
                weights += [map_.weight] if isinstance(map_.weight, Tensor) else []
    free = memory.available(backend)
    return LiftedAbs.of(weights, sys.maxsize if free is None else free // LIFTED_PART)


MAX_POWER = 1e6
"""The largest power: with it, a path that weighs 0.1% more than another counts e**1000 times."""

LOGARITHMS_FROM = 16
"""Above this power masses are computed as logarithms: elements of one tensor are too far apart."""


def checked_power(p: float) -> float:
    """A finite number above 0, or a clear error."""
    number = isinstance(p, (int, float)) and not isinstance(p, bool)
    if not number or not p > 0:
        raise GradtraceError(f"p is a positive number, not {p!r}")
    if p > MAX_POWER:
        raise GradtraceError(
            f"p is a positive number, not {p!r}, and at most {MAX_POWER:,.0f}; for the heaviest "
            "path alone: trace(rule='viterbi')"
        )
    return float(p)


def _seeds(traced: TracedProgram) -> Iterator[Tensor]:
    """The seed of each loss."""
    seed = traced.program.seed
    if traced.pairs == 1:
        yield seed
        return
    for pair in range(traced.pairs):
        chosen = torch.tensor(pair, device=seed.device)
        yield torch.zeros_like(seed).index_fill(0, chosen, 1)


class _Eligible(NamedTuple):
    """Of the masses of one loss, those of leaves that are alike: by the components outside which
    they are that any of their paths pass (bits). ``mixed``: those that only some paths of a leaf
    pass.
    """

    masses: dict[int, int]
    mixed: int

    @classmethod
    def of(cls, found: PathMass, entries: Entries, owned: Mapping[int, int]) -> _Eligible:
        """The leaves of a run; ``owned`` are the components that each belongs to."""
        masses: dict[int, int] = {}
        mixed = 0
        for leaf, mass in found.leaves.items():
            may = entries.may[leaf] & ~owned[leaf]
            masses[may] = masses.get(may, 0) + mass
            mixed |= entries.mixed(leaf) & ~owned[leaf]
        return cls(masses, mixed)


def _through(bit: int, found: PathMass, entries: Entries, alike: _Eligible) -> tuple[int, int]:
    """The mass through a component, and that which could pass through it."""
    eligible = sum([mass for may, mass in alike.masses.items() if may & bit])
    if not alike.mixed & bit:
        return eligible, eligible  # all of its paths pass
    k = bit.bit_length() - 1
    if bit & entries.avoided:
        through = eligible - sum([found.avoiding.get((k, leaf), 0) for leaf in found.leaves])
    else:
        through = found.entered.get(k, 0)
    return min(max(through, 0), eligible), eligible
