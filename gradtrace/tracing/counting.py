"""Measures influence: traces the leaves of a program and counts their paths by component.

Of all leaves, of some of them, or of one element: then nothing else is traced. Of a sample of
elements: these are followed one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from fnmatch import fnmatchcase
from math import log2
from operator import attrgetter
from typing import Any, Literal

import torch
from torch import Tensor

from gradtrace.autodiff.names import unknown
from gradtrace.components.components import ComponentFinder, Components, ComponentSelection, spelt
from gradtrace.errors import GradtraceError, UnknownName, listed
from gradtrace.ir import memory
from gradtrace.ir.passes.select_leaves import select_leaves
from gradtrace.ir.passes.storage import choose_storage
from gradtrace.ir.plan import Storage
from gradtrace.kernels import backend_of
from gradtrace.linops.indexing import nearby
from gradtrace.paths.paths import sampled
from gradtrace.pytorch.wrapped_modules import within
from gradtrace.table import Table
from gradtrace.tracing.aggregate import HOST
from gradtrace.tracing.captured_pass import captured
from gradtrace.tracing.executor import TracedLeaf, execute
from gradtrace.tracing.followed import FollowedPaths, follow_paths
from gradtrace.tracing.influence import Count, Counted, table_of
from gradtrace.tracing.kept_plans import ComponentFacts
from gradtrace.tracing.moments import NOTHING_DRAWN, Drawn, Moments, seed_of, unit_of
from gradtrace.tracing.pair_executor import execute_pairs
from gradtrace.tracing.per_sample import Pairs
from gradtrace.tracing.tally import Tally, with_gradient
from gradtrace.tracing.traced_program import TracedProgram, indices
from gradtrace.tracing.uniform_tally import UniformTally

Leaves = str | Sequence[str]
"""Leaves by name, by pattern (``"encoder.*"``) or by the module that they belong to."""

Index = int | Sequence[int]

Sample = int | Literal["auto"] | None

EXACT_MAX_ELEMENTS, AUTO_SAMPLE = 20_000_000, 10_000
"""With ``sample="auto"`` up to so many elements are all counted; of more, some are drawn."""

NAMED = 4
"""How many parameters without a gradient are named."""

WHAT = "measuring influence"
REMEDY = "trace fewer samples at a time, or sampled elements: influence(sample=10_000)"


def component_finder(traced: TracedProgram) -> ComponentFinder:
    """Finds the components of a program by their names."""
    others = {name: traced.aliases.get(name, ()) for name in traced.leaves}
    given = (traced.program, traced.modules, others, traced.names, traced.model, traced.whole)
    return ComponentFinder(*given)


def chosen_components(traced: TracedProgram, by: Components) -> ComponentSelection:
    """The components of a program by their names; found once for all programs of its structure."""
    return traced.kept.chosen(lambda: component_finder(traced), by)


def counted(traced: TracedProgram, chosen: ComponentSelection) -> Counted:
    """The counts of the chosen components, over the paths of all elements."""
    facts, kept = traced.kept.facts(chosen), traced.uses_kept
    edges = facts.bounds(traced.program) if traced.rule == "edge" else None
    given = traced.program, traced.backend, kept, traced.budget
    storage = choose_storage(*given, WHAT, REMEDY, edges)
    with torch.no_grad(), memory.within(traced.backend, WHAT, REMEDY):
        if (uniform := _uniform_tally(traced, facts, storage)) is not None:
            sums = uniform.counted(traced.program.constants, traced.backend)
            found = Counted.of_sums(*facts.described(traced.program), sums, uniform.own)
            return found.noted(*traced.notes)
        if (executed := _executed_at_once(traced, facts, storage)) is not None:
            return executed
        with _captured(traced, facts, storage) as tally:
            if tally is None:
                parts = facts, traced.program, traced.pairs, traced.backend
                tally = Tally(*parts, storage.batch_bytes)
                for leaf, gradient in _traced_leaves(traced, facts, storage):
                    tally.add(leaf, gradient)
            return tally.result(traced.notes)


def _captured(
    traced: TracedProgram, facts: ComponentFacts, storage: Storage
) -> AbstractContextManager[Tally | None]:
    """The counts of all leaves by a graph of launches, if there is one."""
    if traced.pairs > 1 or not traced.backend.synchronises:
        return nullcontext()
    plan = facts.plan(traced.program, traced.rule, storage)
    return captured(facts, plan, traced.program, traced.backend)


def _uniform_tally(
    traced: TracedProgram, facts: ComponentFacts, storage: Storage
) -> UniformTally | None:
    """Counts the leaves without executing the plan; None if it must be executed."""
    if traced.pairs > 1 or not traced.backend.sums_groups:
        return None
    return facts.uniform(traced.program, facts.plan(traced.program, traced.rule, storage))


def _executed_at_once(
    traced: TracedProgram, facts: ComponentFacts, storage: Storage
) -> Counted | None:
    """The counts of a plan that the compiled library executes in one call; None if Python does."""
    if traced.pairs > 1 or not traced.backend.sums_groups:
        return None
    program, backend = traced.program, traced.backend
    kept = facts.table(program, facts.plan(program, traced.rule, storage), backend)
    found = kept.counted(program, backend)
    if found is None:
        return None
    return Counted.of_sums(*facts.described(program), *found).noted(*traced.notes)


def _traced_leaves(
    traced: TracedProgram, facts: ComponentFacts, storage: Storage
) -> Iterator[tuple[TracedLeaf, Tensor | None]]:
    """Trace the program: its leaves, each with its gradient; None of those that are sparse."""
    program, rule, backend = traced.program, traced.rule, traced.backend
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


def counted_sample(
    traced: TracedProgram, chosen: ComponentSelection, sample: int, seed: int = 0
) -> Counted:
    """``counted`` over the paths of a random sample of elements, which are followed one by one."""
    sizes = {leaf.value: leaf.tensor.numel() for leaf in traced.leaves.values()}
    population = sum(sizes.values())
    drawn = Drawn(min(sample, population), population)
    followed = (
        follow_paths(traced, sampled(sizes, sample, seed_of(seed, pair)), pair, chosen)
        for pair in range(traced.pairs)
    )
    return count_followed(traced, chosen, followed, drawn=drawn)


def count_followed(
    traced: TracedProgram,
    chosen: ComponentSelection,
    followed: Iterable[FollowedPaths],
    sizes: Mapping[int, int] | None = None,
    drawn: Drawn | None = None,
) -> Counted:
    """``counted`` over the paths of some elements, which have been followed one by one. ``sizes``
    are the numbers of elements that count as a component's own, by value (None: of whole leaves).
    ``drawn``: they were drawn at random for each pair, so that shares have standard errors.
    """
    tally = Tally(traced.kept.facts(chosen), traced.program, traced.pairs, backend_of(HOST))
    if sizes is None:
        sizes = {leaf.value: leaf.tensor.numel() for leaf in traced.leaves.values()}
    for each in followed:
        if drawn is not None and tally.drawn is None:
            tally.drawn = drawn._replace(unit=unit_of(each.gradient))
        counts = {value: len(some) for value, some in each.drawn.items()}
        tally.add_some(counts, each.pair, each.provenance, each.gradient, sizes)
    return tally.result(traced.notes)


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
    by: Components = None,
    of: Leaves | None = None,
    index: Index | None = None,
    sample: Sample = "auto",
    seed: int = 0,
) -> Table:
    """The influence on some leaves (None: on all), or on the element ``index`` of one of them."""
    found, about = counts_of(traced, by, of, index, sample, seed)
    silent = [silent_note(traced.silent)] if traced.silent and of is None else []
    return table_of(found, about, silent)


def counts_of(
    traced: TracedProgram,
    by: Components = None,
    of: Leaves | None = None,
    index: Index | None = None,
    sample: Sample = "auto",
    seed: int = 0,
) -> tuple[Counted, dict[str, Any]]:
    """What ``influence_of`` makes its table of, and what that is about."""
    chosen = chosen_components(traced, by)
    about: dict[str, Any] = {"rule": traced.rule, "by": chosen.by or spelt(by)}
    if index is not None:
        name = only_leaf(traced, of)
        if sample not in ("auto", None):
            raise GradtraceError(f"index names one element of {name}: leave sample out")
        found = _counted_element(selected(traced, name), chosen.counted, name, index)
        return divided(chosen, found), about
    part = traced if of is None else selected(traced, of)
    drawn = drawn_of(part, sample)
    if drawn is None:
        found = counted(part, chosen.counted)
    else:
        found = counted_sample(part, chosen.counted, drawn, seed)
        about["sampled"] = drawn
    words = [] if drawn is None else [_drawn_note(drawn, elements_of(part), traced.pairs)]
    if of is not None:
        words.append(f"influence on {of if isinstance(of, str) else ', '.join(of)} alone")
    return divided(chosen, found).noted(*words), about


def elements_of(traced: TracedProgram) -> int:
    """How many elements the leaves have."""
    return sum(leaf.tensor.numel() for leaf in traced.leaves.values())


def drawn_of(traced: TracedProgram, sample: Sample) -> int | None:
    """How many elements to draw; None for all of them."""
    elements = elements_of(traced)
    if sample == "auto":
        return AUTO_SAMPLE if elements > EXACT_MAX_ELEMENTS else None
    if sample is None:
        return None
    drawn = positive("sample", sample)
    return drawn if drawn < elements else None


def _drawn_note(drawn: int, elements: int, pairs: int) -> str:
    many = f"{drawn:,} of {elements:,} elements, drawn at random"
    if pairs > 1:
        return f"paths of {many} for each loss; ± is the standard error over losses and samples"
    return f"paths of {many}; ± is the standard error; sample=None counts all"


def silent_note(names: Sequence[str]) -> str:
    """Which parameters the loss does not depend on, in words."""
    return f"No gradient: {listed(names, NAMED)}; watch.diagnose(loss) says why"


def _counted_element(
    traced: TracedProgram, chosen: ComponentSelection, name: str, index: Index
) -> Counted:
    """The influence on one element: its path to each of the losses, followed one by one."""
    value, element = traced.element(name, index)
    drawn = {value: torch.tensor([element], device="cpu")}
    followed = (follow_paths(traced, drawn, pair, chosen) for pair in range(traced.pairs))
    found = count_followed(traced, chosen, followed, {value: 1})
    return found.noted(f"influence on {name}{list(indices(index)) or ''} alone")


def positive(word: str, number: Any) -> int:
    """The number, or an error if it is no number of paths."""
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise GradtraceError(f"{word} is a number of paths from 1 on, not {number!r}")
    return number


# Forks --------------------------------------------------------------------------------------------


def divided(chosen: ComponentSelection, found: Counted) -> Counted:
    """The counts of what was chosen, from those of ``chosen.counted``. At a fork those elements are
    eligible that could take at least two of its branches, and come to it.
    """
    if not chosen.forks:
        return found
    taken: dict[str, Count] = {}
    for row in found.rows:
        before = taken.get(row.name)
        taken[row.name] = row if before is None else _added(before, row)
    rows = [_of_fork(each.name, chosen, taken) for each in chosen.components]
    return replace(found, rows=tuple(_forks_ranked(rows, chosen) if chosen.by else rows))


def _forks_ranked(rows: Sequence[Count], chosen: ComponentSelection) -> list[Count]:
    """The branches fork by fork: those between modules first, each by information."""
    found = dict[int, float]()
    for row in rows:
        fork, share = id(chosen.forks[row.name][1]), row.count.share
        bits = -float(row.count.e) * share * log2(share) if 0 < share < 1 else 0.0
        found[fork] = found.get(fork, 0.0) + bits
    forks = {row.name: chosen.forks[row.name][1] for row in rows}
    order = {key: n for n, key in enumerate(found)}
    ranks = {n: (not f.between, -found[id(f)], order[id(f)]) for n, f in forks.items()}
    return sorted(rows, key=lambda row: ranks[row.name])


def _of_fork(name: str, chosen: ComponentSelection, taken: Mapping[str, Count]) -> Count:
    if name not in chosen.forks:
        return taken[name]
    branch, (every, _) = chosen.forks[name]
    mine, others = taken[branch], [taken[n] for n in dict.fromkeys(b.name for b in every)]
    count, gradient = (
        Moments.over(of(mine).through, _summed([of(each).through for each in others]))
        for of in (attrgetter("count"), attrgetter("gradient"))
    )
    if (known := mine.count.sampling) is not None and known.units:
        left = count.e * known.left / known.units
        count.sampling = NOTHING_DRAWN._replace(units=count.e, left=left)
    return Count(name, 0, mine.unreached, count, gradient)


def _added(one: Count, other: Count) -> Count:
    """The counts of a branch at two forks of one name."""
    count, gradient = (
        Moments.over(_summed([a.through, b.through]), (), a.sampling)
        for a, b in ((one.count, other.count), (one.gradient, other.gradient))
    )
    return replace(one, unreached=one.unreached + other.unreached, count=count, gradient=gradient)


def _summed(some: Sequence[Sequence[float]]) -> list[float]:
    """The sums of the numbers of each loss."""
    return [sum(each) for each in zip(*some)]


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
