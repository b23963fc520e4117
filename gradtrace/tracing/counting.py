"""Measures influence: traces the leaves of a program and counts their paths by component.

Of all leaves, of some of them, or of one element: then nothing else is traced. Of a sample of
elements or rows: these are followed, or counted, one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from gradtrace.autodiff.names import unknown
from gradtrace.components.components import (
    ComponentFinder,
    Components,
    ComponentSelection,
)
from gradtrace.errors import GradtraceError, UnknownName
from gradtrace.ir import memory
from gradtrace.ir.passes.provenance import ComponentBits
from gradtrace.ir.passes.select_leaves import select_leaves
from gradtrace.ir.passes.storage import choose_storage
from gradtrace.ir.plan import NO_LIMIT, Storage
from gradtrace.kernels import backend_of
from gradtrace.linops.indexing import nearby
from gradtrace.paths.paths import sampled
from gradtrace.paths.tensor_paths import TensorPaths
from gradtrace.pytorch.wrapped_modules import within
from gradtrace.tracing.aggregate import HOST
from gradtrace.tracing.captured_pass import captured
from gradtrace.tracing.coverage import Coverage, measured, of_paths
from gradtrace.tracing.executor import TracedLeaf, execute
from gradtrace.tracing.followed import FollowedPaths, follow_paths
from gradtrace.tracing.influence import Influence
from gradtrace.tracing.kept_plans import ComponentFacts
from gradtrace.tracing.leaf_rows import checked_rows, estimated, rows_kept
from gradtrace.tracing.moments import Drawn, seed_of, unit_of
from gradtrace.tracing.pair_executor import execute_pairs
from gradtrace.tracing.per_sample import Pairs
from gradtrace.tracing.provenance import ProvenanceTable
from gradtrace.tracing.tally import Tally, with_gradient
from gradtrace.tracing.traced_program import TracedProgram, indices
from gradtrace.tracing.traced_value import TracedValue
from gradtrace.tracing.uniform_tally import UniformTally

Leaves = str | Sequence[str]
"""Leaves by name, by pattern (``"encoder.*"``) or by the module that they belong to."""

Index = int | Sequence[int]

WHAT = "measuring influence"
REMEDY = (
    "trace fewer samples at a time, sampled elements: influence(sample=10_000), or whole tensors: "
    "granularity='operator'"
)


def component_finder(traced: TracedProgram) -> ComponentFinder:
    """Finds the components of a program by their names."""
    others = {name: traced.aliases.get(name, ()) for name in traced.leaves}
    given = (traced.program, traced.modules, others, traced.names, traced.model, traced.whole)
    return ComponentFinder(*given)


def chosen_components(traced: TracedProgram, components: Components) -> ComponentSelection:
    """The components of a program by their names; found once for all programs of its structure."""
    return traced.kept.chosen(lambda: component_finder(traced), components)


def counted(traced: TracedProgram, chosen: ComponentSelection) -> Influence:
    """The table of the chosen components, over the paths of all elements."""
    facts, storage = traced.kept.facts(chosen), NO_LIMIT
    if traced.granularity == "scalar":
        kept, budget = traced.uses_kept, traced.budget
        edges = facts.bounds(traced.program) if traced.rule == "edge" else None
        storage = choose_storage(traced.program, traced.backend, kept, budget, WHAT, REMEDY, edges)
    with torch.no_grad(), memory.within(traced.backend, WHAT, REMEDY):
        uniform = _uniform_tally(traced, facts, storage)
        if uniform is not None:
            sums = uniform.counted(traced.program.constants, traced.backend)
            table = Influence.of_sums(*facts.described(traced.program), sums, uniform.own)
            return replace(table, notes=(*traced.notes, *table.notes))
        if (executed := _executed_at_once(traced, facts, storage)) is not None:
            return executed
        with _captured(traced, facts, storage) as tally:
            if tally is None:
                parts = facts, traced.program, traced.pairs, traced.backend
                tally = Tally(*parts, storage.batch_bytes)
                for found, gradient in _traced_leaves(traced, facts, storage):
                    tally.add(found, gradient)
            return tally.result(traced.rule, "count", traced.notes)


def _captured(
    traced: TracedProgram, facts: ComponentFacts, storage: Storage
) -> AbstractContextManager[Tally | None]:
    """The counts of all leaves by a graph of launches, if there is one."""
    if traced.granularity != "scalar" or traced.pairs > 1 or not traced.backend.synchronises:
        return nullcontext()
    plan = facts.plan(traced.program, traced.rule, storage)
    return captured(facts, plan, traced.program, traced.backend)


def _uniform_tally(
    traced: TracedProgram, facts: ComponentFacts, storage: Storage
) -> UniformTally | None:
    """Counts the leaves without executing the plan; None if it must be executed."""
    once = traced.granularity == "scalar" and traced.pairs == 1
    if not once or not traced.backend.sums_groups:
        return None
    return facts.uniform(traced.program, facts.plan(traced.program, traced.rule, storage))


def _executed_at_once(
    traced: TracedProgram, facts: ComponentFacts, storage: Storage
) -> Influence | None:
    """The table of a plan that the compiled library executes in one call; None if Python does."""
    once = traced.granularity == "scalar" and traced.pairs == 1
    if not once or not traced.backend.sums_groups:
        return None
    program, backend = traced.program, traced.backend
    kept = facts.table(program, facts.plan(program, traced.rule, storage), backend)
    found = kept.counted(program, backend)
    if found is None:
        return None
    table = Influence.of_sums(*facts.described(program), *found)
    return replace(table, rule=traced.rule, notes=(*traced.notes, *table.notes))


def counted_rows(
    traced: TracedProgram, chosen: ComponentSelection, leaf_rows: float, seed: int = 0
) -> Influence:
    """``counted``, over random rows of large leaves: a part of their rows, or so many."""
    part, sampled = rows_kept(traced, checked_rows(leaf_rows), seed)
    facts = part.kept.facts(chosen)
    storage = choose_storage(part.program, part.backend, part.uses_kept, part.budget, WHAT, REMEDY)
    # apart, as the counts of whole leaves, which are few, are read, and those of rows are not
    whole, some = (
        Tally(facts, part.program, 1, part.backend, storage.batch_bytes // 2) for _ in range(2)
    )
    with torch.no_grad(), memory.within(traced.backend, WHAT, REMEDY):
        for found, gradient in _traced_leaves(part, facts, storage):
            leaf = sampled.get(found.leaf.value)
            if leaf is None:
                whole.add(found, gradient)
            else:
                gradient = found.gradient if gradient is None else gradient
                leaf.found = some.add_rows(found, gradient, leaf.groups)
        some.count_pending()
        table = whole.result(traced.rule, "count", traced.notes)
        return estimated(traced, facts, sampled.values(), table)


def _traced_leaves(
    traced: TracedProgram, facts: ComponentFacts, storage: Storage
) -> Iterator[tuple[TracedLeaf, Tensor | None]]:
    """Trace the program: its leaves, each with its gradient; None of those that are sparse."""
    program, rule, backend = traced.program, traced.rule, traced.backend
    if traced.granularity == "operator":
        yield from _traced_tensors(traced, facts.chosen.component_bits)
        return
    if traced.pairs == 1:
        for found in execute(facts.plan(program, rule, storage), program.constants, backend):
            if rule == "viterbi":
                gradient = nearby(found.leaf.gradient(), backend.device)
                if found.state.lazy:  # only its ids are to be found
                    found = found._replace(state=found.state._replace(value=gradient))
                yield found, gradient
            else:
                yield with_gradient(found, backend)
        return
    pairs = Pairs.follow(program, traced.pairs)
    leaves = execute_pairs(program, rule, pairs, facts, storage, backend)
    if rule != "viterbi":
        for found in leaves:
            yield found, found.gradient
        return
    gradients = execute_pairs(program, "gradient", pairs, facts, storage, backend)
    for found, other in zip(leaves, gradients):
        yield found, other.gradient


def _traced_tensors(
    traced: TracedProgram, component_bits: ComponentBits
) -> Iterator[tuple[TracedLeaf, Tensor]]:
    """``_traced_leaves`` at operator granularity: a leaf's elements all have its path."""
    if component_bits.slices:
        raise GradtraceError(
            "a path of whole tensors runs through all slices of a labelled one; measure labels "
            "with granularity='scalar'"
        )
    for pair in range(traced.pairs):
        follower = traced.builder(pair).follower
        coarse = TensorPaths(traced.program, traced.rule, follower.seed)
        for leaf in traced.program.leaves:
            chain = coarse.chain(leaf.value)
            bits = 1 if chain.links else 0
            for link in chain.links:
                bits |= component_bits.block.get(link.block, 0)
                bits |= component_bits.position.get((link.block, link.position), 0)
            gradient = follower.gradients[leaf.value]
            state = TracedValue(gradient, 0, chain.reached.int(), ProvenanceTable((bits,)))
            yield TracedLeaf(leaf, state, pair), gradient


def counted_sample(
    traced: TracedProgram, chosen: ComponentSelection, sample: int, seed: int = 0
) -> Influence:
    """``counted`` over the paths of a random sample of elements, which are followed one by one."""
    if traced.granularity == "operator":
        raise GradtraceError(
            "at operator granularity a leaf has one path, and there is nothing to sample; "
            "trace with granularity='scalar', or leave sample out"
        )
    sizes = {leaf.value: leaf.tensor.numel() for leaf in traced.leaves.values()}
    population = sum(sizes.values())
    drawn = Drawn(min(sample, population), population)
    followed = (
        follow_paths(traced, sampled(sizes, sample, seed_of(seed, pair)), pair, chosen)
        for pair in range(traced.pairs)
    )
    table = count_followed(traced, chosen, followed, drawn=drawn)
    assert table.measured is not None
    return replace(
        table,
        notes=(_drawn_note(drawn, traced.pairs), *table.notes),
        measured=replace(table.measured, sampled=drawn.sample < population),
    )


def _drawn_note(drawn: Drawn, pairs: int) -> str:
    if not drawn.left:
        return f"paths of {drawn.sample:,} elements"
    many = f"{drawn.sample:,} of {drawn.population:,} elements, drawn at random"
    if pairs > 1:
        return f"paths of {many} for each loss; ± is the standard error over losses and samples"
    return f"paths of {many}; ± is the standard error of that sample"


def count_followed(
    traced: TracedProgram,
    chosen: ComponentSelection,
    followed: Iterable[FollowedPaths],
    sizes: Mapping[int, int] | None = None,
    drawn: Drawn | None = None,
) -> Influence:
    """``counted`` over the paths of some elements, which have been followed one by one. ``sizes``
    are the numbers of elements that count as a component's own, by value (None: of whole leaves).
    ``drawn``: they were drawn at random for each pair, so that the table has standard errors.
    """
    tally = Tally(traced.kept.facts(chosen), traced.program, traced.pairs, backend_of(HOST))
    if sizes is None:
        sizes = {leaf.value: leaf.tensor.numel() for leaf in traced.leaves.values()}
    coverage = Coverage((), sampled=False)
    for each in followed:
        coverage += of_paths(traced, each)
        if drawn is not None and tally.drawn is None:
            tally.drawn = drawn._replace(unit=unit_of(each.gradient))
        counts = {value: len(some) for value, some in each.drawn.items()}
        tally.add_some(counts, each.pair, each.provenance, each.gradient, sizes)
    return replace(tally.result(traced.rule, "count", traced.notes), measured=coverage)


# Some leaves, or one element ----------------------------------------------------------------------


def selected(traced: TracedProgram, of: Leaves) -> TracedProgram:
    """The trace of some leaves alone: only what leads to them is computed."""
    names = leaf_names(traced, of)
    values = {traced.leaves[name].value for name in names}
    return replace(
        traced,
        program=select_leaves(traced.program, values),
        names={value: name for value, name in traced.names.items() if value in values},
    )


def leaf_names(traced: TracedProgram, of: Leaves) -> list[str]:
    """The names of leaves, in the order of the model; an error for one that matches none."""
    found: set[str] = set()
    known = {name: name for name in traced.leaves} | dict(traced.gradients.aliases)
    for pattern in _patterns(of):
        hits = _matching(known, pattern)
        if not hits:
            raise UnknownName(unknown("leaf", pattern, known))
        found.update(known[name] for name in hits)
    return [name for name in traced.leaves if name in found]


def taking_part(traced: TracedProgram, of: Leaves, parameters: Sequence[str]) -> list[str]:
    """Those of the names and patterns that match a leaf of this loss; an error for one that matches
    no parameter of the model either.
    """
    known = [*traced.leaves, *traced.gradients.aliases]
    found = [pattern for pattern in _patterns(of) if _matching(known, pattern)]
    for pattern in _patterns(of):
        if pattern not in found and not _matching(parameters, pattern):
            leaf_names(traced, pattern)
    return found


def _patterns(of: Leaves) -> list[str]:
    several = isinstance(of, Iterable) and not isinstance(of, (str, Tensor))
    patterns: list[Any] = list(of) if several else [of]
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise UnknownName(
                f"of={pattern!r} is no name of a leaf; give names such as 'embed.weight', patterns "
                "such as 'encoder.*', or modules"
            )
    if not patterns:
        raise UnknownName("of=[] names no leaf")
    return patterns


def _matching(names: Iterable[str], pattern: str) -> list[str]:
    """The name itself, or those that the pattern matches, or those of leaves in that module."""
    every = list(names)
    if pattern in every:
        return [pattern]
    found = [name for name in every if fnmatchcase(name, pattern)]
    return found or [name for name in every if pattern and within(name, pattern)]


def influence_of(
    traced: TracedProgram,
    chosen: ComponentSelection,
    of: Leaves | None,
    index: Index | None = None,
    sample: tuple[int, int] | None = None,
    rows: tuple[float, int] | None = None,
) -> Influence:
    """The influence on some leaves (None: on all), or on the element ``index`` of one of them.
    ``sample``: over that many random elements, with a seed; ``rows``: of that part of the rows of
    large leaves, with a seed.
    """
    if rows is not None and (index is not None or sample is not None):
        raise GradtraceError("leaf_rows counts rows of whole leaves: leave sample and index out")
    if index is not None:
        name = only_leaf(traced, of)
        if sample is not None:
            raise GradtraceError(f"index names one element of {name}: leave sample out")
        return _counted_element(selected(traced, name), chosen, name, index)
    part = traced if of is None else selected(traced, of)
    if rows is not None:
        table = counted_rows(part, chosen, *rows)
    else:
        table = counted(part, chosen) if sample is None else counted_sample(part, chosen, *sample)
    return table if of is None else _noted(table, of if isinstance(of, str) else ", ".join(of))


def _noted(table: Influence, of: str) -> Influence:
    return replace(table, notes=(f"influence on {of} alone", *table.notes))


def _counted_element(
    traced: TracedProgram, chosen: ComponentSelection, name: str, index: Index
) -> Influence:
    """The influence on one element: its path to each of the losses, followed one by one."""
    if traced.granularity == "operator":
        raise GradtraceError(
            "at operator granularity a leaf is followed as a whole: leave index out, or trace with "
            "granularity='scalar'"
        )
    value, element = traced.element(name, index)
    drawn = {value: torch.tensor([element], device="cpu")}
    followed = (follow_paths(traced, drawn, pair, chosen) for pair in range(traced.pairs))
    table = count_followed(traced, chosen, followed, {value: 1})
    return _noted(table, f"{name}{list(indices(index)) or ''}")


def coverage_of(
    traced: TracedProgram,
    known: dict[tuple[object, ...], Coverage],
    of: Leaves | None,
    sample: int,
    seed: int,
) -> Coverage:
    """The coverage of a sample of elements of some leaves (None: of all); ``known`` has those that
    were measured before, which are available after an optimiser's step.
    """
    key = (traced.rule, sample, seed, None if of is None else tuple(leaf_names(traced, of)))
    if key not in known:
        traced.check_unchanged()
        known[key] = measured(traced if of is None else selected(traced, of), sample, seed)
    return known[key]


def only_leaf(traced: TracedProgram, of: Leaves | None) -> str:
    """The one leaf that an index is in; an error if there are several."""
    if of is None:
        raise GradtraceError("index names an element of a leaf: say which, of='embed.weight'")
    names = leaf_names(traced, of)
    if len(names) > 1:
        raise GradtraceError(
            f"index names an element of one leaf, and of={of!r} matches {len(names)}: "
            f"{', '.join(names[:8])}"
        )
    return names[0]
