"""Measures influence: traces the leaves of a program and counts their paths by component."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from gradtrace.errors import GradtraceError
from gradtrace.ir import memory
from gradtrace.ir.passes.provenance import ComponentBits
from gradtrace.ir.passes.storage import choose_storage
from gradtrace.ir.plan import NO_LIMIT, Storage
from gradtrace.tracing.components import ComponentFinder, Components, ComponentSelection
from gradtrace.tracing.coverage import Coverage, of_elements
from gradtrace.tracing.executor import TracedLeaf, execute
from gradtrace.tracing.followed import FollowedElements, follow_elements
from gradtrace.tracing.influence import Influence
from gradtrace.tracing.kept_plans import ComponentFacts
from gradtrace.tracing.leaf_rows import checked_rows, estimated, grouped_leaf, rows_kept
from gradtrace.tracing.pair_executor import execute_pairs
from gradtrace.tracing.paths import path_provenance, sampled
from gradtrace.tracing.per_sample import Pairs
from gradtrace.tracing.provenance import ProvenanceTable
from gradtrace.tracing.sampling import Drawn, seed_of, unit_of
from gradtrace.tracing.tally import Tally
from gradtrace.tracing.tensor_paths import TensorPaths
from gradtrace.tracing.traced_program import TracedProgram
from gradtrace.tracing.traced_value import TracedValue

WHAT = "measuring influence"
REMEDY = (
    "trace fewer samples at a time, sampled elements: influence(sample=10_000), or whole tensors: "
    "granularity='operator'"
)


def component_finder(traced: TracedProgram) -> ComponentFinder:
    """Finds the components of a program by their names."""
    others = {name: traced.aliases.get(name, ()) for name in traced.leaves}
    return ComponentFinder(traced.program, traced.modules, others, traced.names)


def chosen_components(traced: TracedProgram, components: Components) -> ComponentSelection:
    """The components of a program by their names; found once for all programs of its structure."""
    return traced.kept.chosen(lambda: component_finder(traced), components)


def counted(traced: TracedProgram, chosen: ComponentSelection) -> Influence:
    """The table of the chosen components, over the paths of all elements."""
    facts, storage = traced.kept.facts(chosen), NO_LIMIT
    tally = Tally(facts, traced.program, traced.pairs)
    if traced.granularity == "scalar":
        kept, budget = traced.uses_kept, traced.budget
        edges = facts.bounds(traced.program) if traced.rule == "edge" else None
        storage = choose_storage(traced.program, kept, budget, WHAT, REMEDY, edges)
        tally.room = storage.batch_bytes
    with torch.no_grad(), memory.within(traced.device, WHAT, REMEDY):
        for found, gradient in _traced_leaves(traced, facts, storage):
            tally.add(found, gradient)
        return tally.result(traced.rule, "count", traced.notes)


def counted_rows(
    traced: TracedProgram, chosen: ComponentSelection, leaf_rows: float, seed: int = 0
) -> Influence:
    """``counted``, over random rows of large leaves: a part of their rows, or so many."""
    part, sampled = rows_kept(traced, checked_rows(leaf_rows), seed)
    facts = part.kept.facts(chosen)
    storage = choose_storage(part.program, part.uses_kept, part.budget, WHAT, REMEDY)
    whole = sum(len(leaf.pairs) for leaf in sampled.values())
    tally = Tally(facts, part.program, whole + 1, room=storage.batch_bytes)
    with torch.no_grad(), memory.within(traced.device, WHAT, REMEDY):
        for found, gradient in _traced_leaves(part, facts, storage):
            leaf = sampled.get(found.leaf.value)
            if leaf is None:
                tally.add(found._replace(pair=whole), gradient)
            else:
                tally.add(*grouped_leaf(found, gradient, leaf))
        table = tally.result(traced.rule, "count", traced.notes)
    return estimated(traced, chosen, sampled, table, facts.bounds(part.program).may)


def _traced_leaves(
    traced: TracedProgram, facts: ComponentFacts, storage: Storage
) -> Iterator[tuple[TracedLeaf, Tensor]]:
    """Trace the program: its leaves, each with its gradient."""
    program, rule, component_bits = traced.program, traced.rule, facts.chosen.component_bits
    if traced.granularity == "operator":
        yield from _traced_tensors(traced, component_bits)
        return
    if traced.pairs == 1:
        for found in execute(facts.plan(program, rule, storage), program.constants):
            if rule == "viterbi":
                yield found, found.leaf.compute()
            else:
                gradient = found.state.value
                if gradient is None:  # it was deferred until here
                    gradient = found.leaf.compute()
                    found = found._replace(state=found.state._replace(value=gradient))
                yield found, gradient
        return
    pairs = Pairs.follow(program, traced.pairs)
    leaves = execute_pairs(program, rule, pairs, component_bits, storage)
    if rule != "viterbi":
        for found in leaves:
            yield found, found.gradient
        return
    gradients = execute_pairs(program, "gradient", pairs, storage=storage)
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
        follow_elements(traced, sampled(sizes, sample, seed_of(seed, pair)), pair)
        for pair in range(traced.pairs)
    )
    table = count_followed(traced, chosen, followed, drawn=drawn)
    assert table.measured is not None
    return replace(
        table,
        notes=(_drawn_note(drawn), *table.notes),
        measured=replace(table.measured, sampled=drawn.sample < population),
    )


def _drawn_note(drawn: Drawn) -> str:
    if not drawn.left:
        return f"paths of {drawn.sample:,} elements"
    return (
        f"paths of {drawn.sample:,} of {drawn.population:,} elements, drawn at random; ± is the "
        "standard error of that sample"
    )


def count_followed(
    traced: TracedProgram,
    chosen: ComponentSelection,
    followed: Iterable[FollowedElements],
    sizes: Mapping[int, int] | None = None,
    drawn: Drawn | None = None,
) -> Influence:
    """``counted`` over the paths of some elements, which have been followed one by one. ``sizes``
    are the numbers of elements that count as a component's own, by value (None: of whole leaves).
    ``drawn``: they were drawn at random for each pair, so that the table has standard errors.
    """
    tally = Tally(traced.kept.facts(chosen), traced.program, traced.pairs)
    if sizes is None:
        sizes = {leaf.value: leaf.tensor.numel() for leaf in traced.leaves.values()}
    coverage = Coverage((), sampled=False)
    for each in followed:
        pair, elements, forest = each
        coverage += of_elements(traced, each)
        found, first = path_provenance(forest, traced.program, chosen.component_bits), 0
        gradient = forest.gradient[forest.starts]
        if drawn is not None and tally.drawn is None:
            tally.drawn = drawn._replace(unit=unit_of(gradient))
        for value, some in elements.items():
            mine = slice(first, first + len(some))
            first = mine.stop
            ids = found.number[mine]
            tally.add_some(value, pair, found.sets, ids, gradient[mine], sizes[value])
    return replace(tally.result(traced.rule, "count", traced.notes), measured=coverage)
