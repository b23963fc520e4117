"""A plan executed in one call of the library, beside its definition: Python, step by step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from gradtrace.ir.passes.provenance import ComponentBits
from gradtrace.ir.plan import NO_LIMIT, Storage
from gradtrace.traced import Trace
from gradtrace.tracing.counting import _traced_leaves, chosen_components
from gradtrace.tracing.kept_plans import ComponentFacts
from gradtrace.tracing.plan_run import KeptTable, leaf_counts
from gradtrace.tracing.provenance import words_of
from gradtrace.tracing.tally import Tally

Leaf = tuple[str, list[int], list[int], list[float]]
"""A leaf's name, the provenance set of each entry, and their counts and sums."""


def facts_of(trace: Trace, components: Any = "blocks") -> ComponentFacts:
    """Of components by name; ``"blocks"``: a bit for every operator, and for some arguments."""
    if components != "blocks":
        return trace.kept.facts(chosen_components(trace, components))
    known: dict[int, ComponentFacts] = vars(trace.kept).setdefault("of_blocks", {})
    if not known:
        blocks = trace.program.blocks
        given = {(n, at): 2 << len(blocks) for n, b in enumerate(blocks) for at in (*b.gives,)[1:2]}
        bits = ComponentBits({n: 2 << n for n in range(len(blocks)) if n % 5}, given, {})
        chosen = replace(chosen_components(trace, "operators"), component_bits=bits)
        known[0] = ComponentFacts(chosen, trace.kept.names)
    return known[0]


def by_steps(trace: Trace, components: Any = "blocks") -> list[Leaf]:
    """The counts of all leaves, by Python."""
    facts = facts_of(trace, components)
    tally = Tally(facts, trace.program, 1, trace.backend)
    with torch.no_grad():
        for found, gradient in _traced_leaves(trace, facts, NO_LIMIT):
            tally.add(found, gradient)
        tally._flush_uniform()
    return [_listed(leaf.name, leaf.found) for leaf in tally.leaves]


def table_of(trace: Trace, components: Any = "blocks") -> KeptTable:
    facts = facts_of(trace, components)
    plan = facts.plan(trace.program, trace.rule, Storage())
    return facts.table(trace.program, plan, trace.backend)


def at_once(trace: Trace, components: Any = "blocks") -> list[Leaf] | str:
    """The same by the library; or why it does not execute the plan."""
    kept = table_of(trace, components)
    with torch.no_grad():
        found = kept.run(trace.program, trace.backend)
    if found is None:
        return kept.reason or "given up"
    table, counts = found
    names = [trace.names[leaf.value] for leaf in table.leaves]
    return [_listed(name, each) for name, each in zip(names, leaf_counts(counts))]


def _listed(name: str, found: Any) -> Leaf:
    size = len(found.counts) if found.size is None else found.size
    first, last = found.start + found.blank, found.start + size
    words = words_of(found.rows, found.extra)
    sets = [int.from_bytes(row.tobytes(), "little") for row in words[: last - first]]
    return name, sets, found.counts[first:last].tolist(), found.sums[first:last].tolist()
