"""Pass that gives every pair of elements of an operator one weight.

In some formulas an element reaches another along several routes. ``lift`` is not additive, so
running such routes separately would be wrong in any semiring but SUM. They are detected from the
program, not from a list of operators: first by the structure of the block (cheap, no false
negatives), then element by element. Routes that only move and scale elements are merged by adding
their weights, small formulas become a matrix, and for the rest the block gets a note.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import count
from math import prod

import torch
from torch import Tensor

from gradtrace.ir.bound import BoundStep, BoundTerm, Formula, bind, unbind
from gradtrace.ir.program import Block, Program
from gradtrace.linops import (
    Contract,
    Dense,
    Distances,
    Identity,
    Index,
    Map,
    Reduce,
    Scale,
    Scan,
    Scatter,
    Sparse,
    gather,
)
from gradtrace.linops.indexing import nearby
from gradtrace.types import Shape

DENSE_MAX_ENTRIES = 1 << 20
"""The most entries of a matrix that replaces a formula with several routes for a pair."""

MAX_WORK_PER_ENTRY = 16
"""Elements that may be computed for each entry of such a matrix."""

ENUMERATED_MAX_ELEMENTS = 1 << 24
"""The most elements whose sources and targets are enumerated."""

HASH_MULTIPLIER = -7046029254386353131
"""Multiplier of Fibonacci hashing: odd, 2**64 divided by the golden ratio, as a signed int64."""

MAX_ROUTES = 64
"""The most routes to a value that are enumerated."""

SINGLE_SOURCE_MAPS = (Identity, Scale, Index)
"""Maps that only move and scale: every output element has at most one source."""

NOTE = (
    "an element reaches another along several routes, and the operator is too large to add them "
    "up; semirings other than SUM take the routes apart"
)


@dataclass(slots=True)
class _Origin:
    """How a value is computed from the cotangents of its block: which ones, by which chain of maps,
    and whether a pair of elements may be connected by several routes (``suspect``).
    """

    takes: frozenset[int]
    chain: list[Map] | None = field(default_factory=list)  # None: more than one route
    suspect: bool = False


def merge_routes(program: Program) -> Program:
    """The program with one weight for every pair of elements of an operator, or with a note where
    that would be too large.
    """
    todo = [n for n, block in enumerate(program.blocks) if _is_candidate(block)]
    if not todo:
        return program
    shapes = {step.out: step.shape for step in program.steps()}
    shapes[program.root] = tuple(program.seed.shape)
    blocks, numbers, device = list(program.blocks), count(program.size), program.seed.device
    # Tensors made here without a device are to be on that of the values, not the caller's default.
    same = torch.empty(0).device == device == torch.device("cpu")
    with torch.no_grad(), nullcontext() if same else device:
        for n in todo:
            formula = bind(blocks[n], program.maps)
            _resolve(formula, numbers.__next__, shapes)
            blocks[n] = unbind(formula, blocks[n], program.maps)
    return replace(program, blocks=tuple(blocks), size=next(numbers))


def _is_candidate(block: Block) -> bool:
    """Whether a formula was recorded operation by operation and is more than a map for each
    argument.
    """
    if not block.composed or block.opened:
        return False
    return len(block.steps) != len(block.gives) or any(len(s.terms) > 1 for s in block.steps)


def _resolve(formula: Formula, new: Callable[[], int], shapes: dict[int, Shape]) -> None:
    """Rewrite a formula so that every pair of elements has one weight, or set its note.

    ``new`` returns a fresh value number. ``shapes`` are those of the values that it takes.
    """
    origins = _origins(formula)
    suspects = [value for value in formula.gives if origins[value].suspect]
    for value in suspects:
        _merge(formula, value, new, shapes)
    if suspects:
        _drop_unused(formula)
    _join_sums(formula, new)
    _unflip_scans(formula)


def _origins(formula: Formula) -> dict[int, _Origin]:
    found = {value: _Origin(frozenset([value])) for value in formula.takes}
    for step in formula.steps:
        if len(step.terms) == 1:
            found[step.out] = _extended(found[step.terms[0].value], step.terms[0].map)
            continue
        parts = [found[term.value] for term in step.terms]
        takes = frozenset().union(*(part.takes for part in parts))
        joined = len(takes) < sum(len(part.takes) for part in parts) and not _disjoint(step)
        nexts = [_extended(part, term.map) for part, term in zip(parts, step.terms)]
        found[step.out] = _Origin(takes, None, joined or any(n.suspect for n in nexts))
    return found


def _disjoint(step: BoundStep) -> bool:
    """Whether no element of the result comes from two terms (the parts of a ``cat``)."""
    taken = torch.zeros(step.shape, dtype=torch.bool)
    for term in step.terms:
        if not isinstance(term.map, Index) or not term.map.fills:
            return False
        here = term.map.source(taken.device) >= 0
        if bool((taken & here).any()):
            return False
        taken |= here
    return True


def _extended(origin: _Origin, step: Map) -> _Origin:
    suspect = origin.suspect
    if not suspect and not step.single_source:
        suspect = origin.chain is None or not _routes_start_apart(origin.chain, step)
    chain = None if origin.chain is None else [*origin.chain, step]
    return _Origin(origin.takes, chain, suspect)


def _routes_start_apart(before: list[Map], last: Map) -> bool:
    """Whether the routes that ``last`` sums, behind the chain ``before``, start at different
    elements; False if that is not known.
    """
    spreading = [n for n, step in enumerate(before) if not step.single_target]
    if not spreading:
        return True
    if isinstance(last, (Reduce, Scatter)):
        return _reduced_pairs_differ(before, last)
    if not isinstance(last, (Contract, Distances)):
        return False
    if all(isinstance(step, SINGLE_SOURCE_MAPS) for step in before):
        return _contracted_sources_differ(before, last)
    first, following = before[spreading[0]], before[spreading[0] + 1 :]
    if not isinstance(first, Contract):
        return False
    if all(isinstance(s, (Identity, Scale)) and s.out_shape == first.out_shape for s in following):
        return not first.produced() & last.contracted()
    return all(
        isinstance(step, SINGLE_SOURCE_MAPS) for step in following
    ) and _contracted_sources_differ(following, last, first)


def _reduced_pairs_differ(before: list[Map], last: Reduce | Scatter) -> bool:
    """Whether a sum of moved and scaled elements connects no (source, target) pair twice."""
    if (
        not all(isinstance(step, SINGLE_SOURCE_MAPS) for step in before)
        or last.inputs > ENUMERATED_MAX_ELEMENTS
    ):
        return False
    source = _source(before, before[0].in_shape).reshape(-1)
    target = last.targets().reshape(-1).to(source.device)
    return distinct((source * last.outputs + target)[(source >= 0) & (target >= 0)])


def distinct(numbers: Tensor) -> bool:
    """Whether no integer occurs twice, without sorting them all.

    Unless they ascend, each is written to a hash table, where the last write to a slot wins. A
    number that finds an equal one in its slot is a duplicate. Those that find another, about
    a sixteenth, collided and go through another round.

    >>> distinct(torch.arange(10_000)), distinct(torch.arange(10_000) % 9_999)
    (True, False)
    """
    if bool((numbers[1:] > numbers[:-1]).all()):
        return True
    while len(numbers) > 1 << 10:
        bits = (8 * len(numbers)).bit_length()
        place = (numbers * HASH_MULTIPLIER >> 64 - bits) & (1 << bits) - 1
        table = torch.zeros(1 << bits, dtype=numbers.dtype, device=numbers.device)
        own = torch.arange(len(numbers), device=numbers.device)
        table[place] = own
        winner = table[place]
        lost = winner != own
        if bool((numbers[winner[lost]] == numbers[lost]).any()):
            return False
        numbers = numbers[lost]
    different: Tensor = numbers.unique()  # type: ignore[no-untyped-call]
    return different.numel() == numbers.numel()


def _contracted_sources_differ(
    before: list[Map], last: Contract | Distances, first: Contract | None = None
) -> bool:
    """Whether no element, moved and scaled by ``before``, occurs twice in one sum of ``last``. With
    ``first``, a contraction before those, neither may two elements that it computes from the same
    inputs.
    """
    if last.inputs > ENUMERATED_MAX_ELEMENTS:
        return False
    source = _source(before, before[0].in_shape).reshape(last.in_shape)
    number = _slice_numbers(last.in_shape, last.contracted())
    there = source >= 0
    if first is not None:  # elements computed from the same inputs count as one
        source = (
            _slice_numbers(first.out_shape, first.produced())
            .expand(first.out_shape)
            .reshape(-1)[source.clamp(min=0)]
        )
    return distinct((number * prod(before[0].in_shape) + source)[there])


def _slice_numbers(shape: Shape, over: set[int]) -> Tensor:
    """Consecutive numbers for the slices along the dimensions ``over``; of size 1 in these."""
    number = torch.arange(prod(n for d, n in enumerate(shape) if d not in over))
    return number.reshape([1 if d in over else n for d, n in enumerate(shape)])


def _merge(formula: Formula, value: int, new: Callable[[], int], shapes: dict[int, Shape]) -> None:
    """Replace the step that makes a value by steps that are equal in SUM and give each pair one
    weight; or set the note.
    """
    step = next(step for step in formula.steps if step.out == value)
    made: list[BoundStep] = []
    terms: list[BoundTerm] = []
    for take in dict.fromkeys(formula.takes):
        routes = _routes(formula, value, take)
        if not routes:
            continue
        merged = (
            _merged_gathers(routes, shapes[take], step.dtype)
            or _merged_sparse(routes, shapes[take], step)
            or _merged_matrix(formula, value, take, shapes[take], step)
        )
        if merged is None:
            formula.note = NOTE
            return
        for chain in merged:
            at = take
            for link in chain[:-1]:
                middle = new()
                made.append(BoundStep(middle, (BoundTerm(link, at),), link.out_shape, step.dtype))
                at = middle
            terms.append(BoundTerm(chain[-1], at))
    formula.steps.remove(step)
    formula.steps += [*made, step._replace(terms=tuple(terms))]


def _routes(formula: Formula, value: int, take: int) -> list[list[Map]]:
    """The chains of maps from a cotangent to a value; stops after ``MAX_ROUTES + 1``."""
    steps = {step.out: step for step in formula.steps}
    found: list[list[Map]] = []
    stack: list[tuple[int, list[Map]]] = [(value, [])]
    while stack and len(found) <= MAX_ROUTES:
        at, chain = stack.pop()
        if at == take:
            found.append(chain)
        elif at in steps:
            stack += [(t.value, [t.map, *chain]) for t in reversed(steps[at].terms)]
    return found


def _merged_gathers(
    routes: list[list[Map]], shape: Shape, dtype: torch.dtype
) -> list[list[Map]] | None:
    """Merge routes that only move and scale: where two have the same source, add their weights.
    None if others are among them, or there are too many.
    """
    if len(routes) > MAX_ROUTES or not all(
        isinstance(s, SINGLE_SOURCE_MAPS) for chain in routes for s in chain
    ):
        return None
    sources = [_source(chain, shape) for chain in routes]
    weights = [_weight(chain, shape, dtype) for chain in routes]
    for i, first in enumerate(sources):
        for j in range(i + 1, len(sources)):
            both = (first == sources[j]) & (first >= 0)
            weights[i] = torch.where(both, weights[i] + weights[j], weights[i])
            sources[j] = torch.where(both, -1, sources[j])
    return [
        [gather(source, shape), Scale(weight, tuple(weight.shape))]
        for source, weight in zip(sources, weights)
        if bool((source >= 0).any())
    ]


def _merged_sparse(
    routes: list[list[Map]], shape: Shape, step: BoundStep
) -> list[list[Map]] | None:
    """Merge routes that move and scale elements and then sum some, into one sparse matrix; weights
    of entries for the same pair are added. None if others are among them, or it is too large.
    """
    if len(routes) > MAX_ROUTES or not prod(shape) * prod(step.shape):
        return None
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    for chain in routes:
        wide = next(
            (n for n, m in enumerate(chain) if not isinstance(m, SINGLE_SOURCE_MAPS)), len(chain)
        )
        head, tail = chain[:wide], chain[wide:]
        if not all(
            isinstance(m, (*SINGLE_SOURCE_MAPS, Reduce, Scatter)) and m.single_target for m in tail
        ):
            return None
        if prod(tail[0].in_shape if tail else step.shape) * len(routes) > ENUMERATED_MAX_ELEMENTS:
            return None
        source, weight = _source(head, shape).reshape(-1), _weight(head, shape, torch.float64)
        if tail:
            target, further = _targets_and_weights(tail, torch.float64)
            target, weight = target.reshape(-1), weight.reshape(-1) * further.reshape(-1)
        else:
            target, weight = torch.arange(len(source)), weight.reshape(-1)
        there = (source >= 0) & (target >= 0) & (weight != 0)
        found.append((target[there], source[there], weight[there].to(step.dtype)))
    row, column, weight = (torch.cat(parts) for parts in zip(*found))
    return [[Sparse.of((row, column, weight), shape, step.shape)]]


def _source(chain: list[Map], shape: Shape) -> Tensor:
    """For each output element of a chain, the number of its source; -1 for none."""
    numbers = torch.arange(1, prod(shape) + 1).reshape(shape)
    for step in chain:
        if isinstance(step, Index):
            numbers = step.move(numbers)
        elif isinstance(step, Identity):
            numbers = numbers.reshape(step.out_shape)
    return numbers - 1


def _weight(chain: list[Map], shape: Shape, dtype: torch.dtype) -> Tensor:
    """For each output element of a chain, the weight of its source."""
    ones = torch.ones(shape, dtype=dtype)
    for step in chain:
        ones = step.apply(ones)
    return ones


def _merged_matrix(
    formula: Formula, value: int, take: int, shape: Shape, step: BoundStep
) -> list[list[Map]] | None:
    """The formula as matrices, computed from unit cotangents; None if they are too large. One for
    each index along the leading dimensions that it does not mix (batch dimensions), or one for all.
    """
    inputs, outputs = prod(shape), prod(step.shape)
    if not inputs * outputs:
        return [[Dense(torch.zeros(outputs, inputs, dtype=step.dtype), shape, step.shape)]]
    shared = [
        n for n, (a, b) in enumerate(zip(shape, step.shape), 1) if shape[:n] == step.shape[:n]
    ]
    work = sum(prod(each.shape) for each in formula.steps) // MAX_WORK_PER_ENTRY
    for kept in (*reversed(shared), 0):
        batch = prod(shape[:kept])
        if inputs // batch * max(outputs, work) > DENSE_MAX_ENTRIES or (kept and batch == 1):
            continue
        matrices = _columns(formula, value, take, shape, step, kept)  # (column, batch, row)
        if kept and not _is_block_diagonal(formula, value, take, matrices, shape, step):
            continue
        if batch == 1:
            return [[Dense(matrices.squeeze(1).t().to(step.dtype), shape, step.shape)]]
        each_in, each_out = inputs // batch, outputs // batch
        there = matrices != 0
        if not bool(there.all()):
            column, sample, row = there.nonzero(as_tuple=True)
            pairs = sample * each_out + row, sample * each_in + column
            return [[Sparse.of((*pairs, matrices[there].to(step.dtype)), shape, step.shape)]]
        flat = ((batch, each_in), (batch, each_out))
        map_ = Contract("bj,bji->bi", matrices.transpose(0, 1).to(step.dtype), *flat)
        ends = Identity(shape, flat[0]), Identity(flat[1], step.shape)
        return [[ends[0], map_, ends[1]]]
    return None


def _columns(
    formula: Formula, value: int, take: int, shape: Shape, step: BoundStep, kept: int
) -> Tensor:
    """The results for unit cotangents, of shape (column, batch, row). Each unit is repeated along
    the first ``kept`` dimensions, the batch.
    """
    batch, each_in = prod(shape[:kept]), prod(shape[kept:])
    units = torch.eye(each_in, dtype=torch.float64)

    def column(unit: Tensor) -> Tensor:
        given = unit.reshape([1] * kept + list(shape[kept:])).expand(shape)
        return _run(formula, {take: given}, value).reshape(batch, -1)

    try:
        return torch.func.vmap(column)(units)
    except RuntimeError:  # an operation that cannot be batched
        return torch.stack([column(unit) for unit in units])


def _is_block_diagonal(
    formula: Formula, value: int, take: int, matrices: Tensor, shape: Shape, step: BoundStep
) -> bool:
    """Whether the formula is block-diagonal over the batch, so that these matrices are all of it:
    checked on a random cotangent, which an operator that mixes samples maps differently.
    """
    generator = torch.Generator().manual_seed(0)
    given = torch.rand(shape, generator=generator, dtype=torch.float64, device="cpu") + 0.5
    given = given.to(matrices.device)
    batch = matrices.shape[1]
    found = torch.einsum("bj,jbi->bi", given.reshape(batch, -1), matrices)
    wanted = _run(formula, {take: given}, value).reshape(batch, -1)
    size = torch.einsum("bj,jbi->bi", given.reshape(batch, -1), matrices.abs())
    slack = 64 * torch.finfo(torch.float64).eps * float(size.nan_to_num(0, 0, 0).amax())
    return torch.allclose(found, wanted, rtol=0, atol=slack, equal_nan=True)


def _run(formula: Formula, values: dict[int, Tensor], wanted: int) -> Tensor:
    """A block's value in SUM, in float64, for these cotangents; missing ones count as zero."""
    for step in formula.steps:
        parts = [t.map.apply(values[t.value]) for t in step.terms if t.value in values]
        if parts:
            values[step.out] = torch.stack([part.double() for part in parts]).sum(0)
    return values[wanted]


def _join_sums(formula: Formula, new: Callable[[], int]) -> None:
    """Merge sums of sums into one scatter: an operator selects among all elements that it sums, not
    first within groups.

    (The backward of ``repeat`` sums over the repetitions of one dimension after the other.)
    """
    sums = [term.map for step in formula.steps for term in step.terms]
    if sum(isinstance(map_, (Reduce, Scatter)) and not map_.single_source for map_ in sums) < 2:
        return
    made = {step.out: step for step in formula.steps}
    uses = Counter(term.value for step in formula.steps for term in step.terms)
    uses.update(formula.gives)
    for n, step in reversed(list(enumerate(formula.steps))):
        chain, at = _sum_chain(step, made, uses)
        if (
            sum(not link.single_source for link in chain) < 2
            or chain[0].inputs > ENUMERATED_MAX_ELEMENTS
        ):
            continue
        target, weight = _targets_and_weights(chain, step.dtype)
        middle = new()
        scale = BoundStep(
            middle,
            (BoundTerm(Scale(weight, chain[0].in_shape), at),),
            chain[0].in_shape,
            step.dtype,
        )
        total = BoundTerm(Scatter(target, step.shape), middle)
        formula.steps[n : n + 1] = [scale, BoundStep(step.out, (total,), step.shape, step.dtype)]
        _drop_unused(formula)
        return _join_sums(formula, new)


def _unflip_scans(formula: Formula) -> None:
    """Replace flip, cumulative sum, flip by one reversed cumulative sum.

    (The backward of ``cumsum``. With it, ties go to the lowest element, not to the last.)
    """
    made = {step.out: step for step in formula.steps}
    for n, step in enumerate(formula.steps):
        last = step.terms[0]
        middle = made.get(last.value)
        if len(step.terms) > 1 or middle is None or len(middle.terms) > 1:
            continue
        scan, first = middle.terms[0].map, made.get(middle.terms[0].value)
        if not isinstance(scan, Scan) or first is None or len(first.terms) > 1:
            continue
        if _flips(first.terms[0].map, scan) and _flips(last.map, scan):
            turned = Scan(scan.dim, scan.in_shape, not scan.reverse)
            formula.steps[n] = step._replace(terms=(BoundTerm(turned, first.terms[0].value),))
    _drop_unused(formula)


def _flips(step: Map, scan: Scan) -> bool:
    """Whether a map flips the dimension of a scan."""
    if not isinstance(step, Index) or not (step.in_shape == step.out_shape == scan.in_shape):
        return False
    own = torch.arange(step.inputs).reshape(step.in_shape)
    return torch.equal(step.source(own.device), own.flip(scan.dim))


def _sum_chain(
    step: BoundStep, made: dict[int, BoundStep], uses: Counter[int]
) -> tuple[list[Map], int]:
    """The longest chain of single-target maps that ends at a step, and the value it starts from."""
    chain: list[Map] = []
    at = step.out
    while at in made and len(made[at].terms) == 1 and (not chain or uses[at] == 1):
        map_, before = made[at].terms[0]
        if not map_.single_target or not isinstance(map_, (*SINGLE_SOURCE_MAPS, Reduce, Scatter)):
            break
        chain.insert(0, map_)
        at = before
    return chain, at


def _targets_and_weights(chain: list[Map], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """For each input element of a chain, the number of its target (-1: none) and its weight."""
    shape = chain[0].in_shape
    target = torch.arange(prod(shape))
    weight = torch.ones(prod(shape), dtype=dtype)
    for link in chain:
        if isinstance(link, Scale):
            factor = link.weight
            if not isinstance(factor, Tensor):
                factor = torch.tensor(factor)
            number = nearby(factor, target.device)
            here = number.expand(link.in_shape).reshape(-1)
            weight = torch.where(target >= 0, weight * here[target.clamp(min=0)].to(dtype), weight)
            continue
        if isinstance(link, Index):
            source = link.source(target.device).reshape(-1)
            onward = torch.full((link.inputs,), -1)
            there = source >= 0
            onward[source[there]] = torch.arange(link.outputs)[there]
        elif isinstance(link, (Reduce, Scatter)):
            onward = link.targets().reshape(-1).to(target.device)
        else:
            continue
        target = torch.where(target >= 0, onward[target.clamp(min=0)], -1)
    return target.reshape(shape), weight.reshape(shape)


def _drop_unused(formula: Formula) -> None:
    """Remove steps that no result of the block depends on."""
    used = set(formula.gives)
    kept: list[BoundStep] = []
    for step in reversed(formula.steps):
        if step.out in used:
            kept.append(step)
            used.update(term.value for term in step.terms)
    formula.steps[:] = reversed(kept)
