"""``mass``: the share of the mass of all paths, ``Σ |weight|**p``, that passes each component."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from functools import partial
from math import inf, isnan, nan, sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from gradtrace.components.components import Components, ComponentSelection, impossible
from gradtrace.errors import GradtraceError, NonFinite
from gradtrace.ir import memory
from gradtrace.ir.passes.entries import Entries
from gradtrace.ir.program import Program
from gradtrace.ir.rescaling import DeferredRescaling, Rescaling, rescaled
from gradtrace.kernels import backend_of, fetch_scalars
from gradtrace.kernels.precision import exact
from gradtrace.linops import Contract, Scale
from gradtrace.paths.masked_weights import finitely
from gradtrace.paths.path_mass import (
    BackwardMass,
    PathMass,
    SumLayout,
    path_masses,
    run_ahead,
)
from gradtrace.semirings import Abs, Semiring
from gradtrace.semirings.additive import LiftedAbs, LogAbs
from gradtrace.table import Column, Table
from gradtrace.tracing.counting import chosen_components
from gradtrace.tracing.traced_program import TracedProgram

NO_REST = "as much as the gradient: nothing cancels"
WHAT = "measuring the mass of paths"
REMEDY = "trace fewer samples at a time, or measure fewer components"


COLUMNS = (
    Column("share", "share", formula="ratio", of=("mass", "eligible")),
    Column("mass", "number", adds=True),
    Column("eligible", "number", adds=True),
)


def mass_of(traced: TracedProgram, by: Components, p: float) -> Table:
    """The share of the mass of all paths that passes each component.

    The mass of a path is ``|weight|**p``, the weight being the product of the derivatives along
    it. ``share`` is the mass of the paths through a component over that of all paths of the leaves
    outside it for which some route through it exists (``eligible``); its own leaves are left out of
    both. A path counts once, however often it visits a component. Shares of branches side by side,
    of which every path takes one, add up to 1.

    With ``p = 1`` all paths count by what they carry; with larger p the heaviest count more, and in
    the limit only the path that the rule "viterbi" finds. For several losses, masses are summed
    over losses before they are divided, and errors are over losses. Of one loss with ``p = 1``,
    ``about["cancellation"]`` is ``Σ |weight| / Σ |gradient|`` of all leaves, at least 1: how many
    times the gradient all paths carry, the rest of which cancels; nan where that is 0 or not
    finite.
    """
    checked_power(p)
    chosen = chosen_components(traced, by)
    may = traced.kept.facts(chosen).mass_plan(traced.program).entries.may
    if not any(may[leaf.value] for leaf in traced.program.leaves):
        raise impossible([each.name for each in chosen.components])
    found = mass_through(traced, chosen, p)
    table = replace(found, about={**found.about, "by": by})
    if p != 1 or traced.pairs > 1:
        return table
    size, total = gradient_size(traced.program), table.about["mass"]
    cancellation = total / size if 0 < size < inf else nan
    about = {**table.about, "cancellation": cancellation}
    return replace(table, notes=(_words(total, size), *table.notes), about=about)


def _words(total: float, size: float) -> str:
    """How many times the gradient, of this size, all paths carry."""
    if not size:
        why = "all paths cancel" if total else "no path has a weight other than 0"
        return f"the gradient is 0: {why}"
    if size == inf:
        return "some gradients are NaN or infinite, so paths are not compared with them"
    much = f"{total / size:.3g} times the gradient: the rest cancels"
    return f"all paths carry {much if total / size > 1.0005 else NO_REST}"


def mass_through(traced: TracedProgram, chosen: ComponentSelection, p: float = 1.0) -> Table:
    """The table of the chosen components. Powers of weights that leave the range of floats are
    taken as logarithms.
    """
    if p == 1:
        return _mass_in(Abs(), traced, chosen)
    if p <= LOGARITHMS_FROM:
        with suppress(NonFinite):
            table = _mass_in(Abs(p=checked_power(p)), traced, chosen)
            empty = [n for n, row in enumerate(table) if not row.eligible]
            if not empty:
                return table
            plain = mass_through(traced, chosen)
            if not any(plain.rows[n].eligible for n in empty):
                return table
    return _mass_in(LogAbs(p=checked_power(p)), traced, chosen)


def _mass_in(semiring: Abs | LogAbs, traced: TracedProgram, chosen: ComponentSelection) -> Table:
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

    power, many = found[0].power, traced.pairs > 1
    rows = []
    for k, component in enumerate(chosen.components):
        pairs = [_through(2 << k, *run) for run in runs]
        t, e = (sum(each) for each in zip(*pairs))
        errors = [_error(pairs)] if many else []
        share = t / e if e else nan
        rows.append((component.name, share, *errors, _float(t, power), _float(e, power)))
    columns = [Column("component"), *COLUMNS]
    if many:
        columns.insert(2, Column("± share", "share"))
    total = _float(sum(sum(each.leaves.values()) for each in found), power)
    about = {"losses": traced.pairs, "p": semiring.p, "mass": total}
    title = f"Mass of paths (p = {semiring.p:g})"
    return Table(title, tuple(columns), tuple(rows), traced.notes, about)  # type: ignore[arg-type]


def _float(number: int, power: int) -> float:
    """The float nearest to ``number · 2**power``; infinite beyond their range."""
    try:
        return float(Fraction(number) * Fraction(2) ** power)
    except OverflowError:
        return inf


def _error(pairs: Sequence[tuple[int, int]]) -> float:
    """The standard error of ``Σt / Σe`` over losses, as of a ratio estimator."""
    (t, e), many = (sum(each) for each in zip(*pairs)), len(pairs)
    if not e:
        return nan
    residual = sum((x / e - t / e * (y / e)) ** 2 for x, y in pairs)  # exact until divided
    return sqrt(residual * many / (many - 1))


def gradient_size(program: Program) -> float:
    """``Σ |gradient|`` over all leaves; infinite if one is infinite or NaN."""
    sizes = [_size(leaf.compute()) for leaf in program.leaves]
    total = sum(fetch_scalars(sizes))
    return inf if isnan(total) else total


def _size(x: Tensor) -> Tensor:
    return x.abs().sum(dtype=torch.float32) if x.itemsize < 4 else x.abs().sum()


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
