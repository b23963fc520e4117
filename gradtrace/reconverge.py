"""One weight for a pair: formulas in which an element reaches another along several routes.

``lift`` is not additive, so where two routes of one operator join the same two elements, running
them apart would be wrong in any semiring but SUM. Such places are found, not listed: first by the
shape of the program (cheap, never misses one), then element by element. Routes that only move and
scale are merged by adding their weights; small formulas become a matrix; what is left is noted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from gradtrace.maps import (
    Contract,
    Dense,
    Identity,
    Index,
    Map,
    Reduce,
    Scale,
    Scan,
    Scatter,
    gather,
)
from gradtrace.maps.places import nearby
from gradtrace.program import Block, Step, Term
from gradtrace.shapes import Shape

SMALL = 1 << 20
"""The most entries of a matrix that takes the place of a reconverging formula."""

LISTED = 1 << 24
"""The most elements that are looked through one by one."""

ROUTES = 64
"""The most routes that are merged one by one."""

MOVES = (Identity, Scale, Index)
"""Maps that take every element from one place at most."""

NOTE = (
    "an element reaches another along several routes, and the operator is too large to add them "
    "up; semirings other than SUM take the routes apart"
)


@dataclass(slots=True)
class _Origin:
    """How a value comes from the cotangents of its block."""

    takes: frozenset[int]
    chain: list[Map] | None = field(default_factory=list)  # None: more than one route
    suspect: bool = False


def resolve(
    block: Block, new: Callable[[], int], shapes: dict[int, Shape], device: torch.device
) -> None:
    """Rewrite a block so that every pair of elements has one weight, or note that it has not.

    ``new`` makes values, ``shapes`` are those of the values that the block takes, on ``device``.
    """
    if len(block.steps) == len(block.gives) and all(len(s.terms) == 1 for s in block.steps):
        return  # one map for each argument
    with nullcontext() if device.type == "cpu" else device, _disable_current_modes():
        origins = _origins(block)
        suspects = [value for value in block.gives.values() if origins[value].suspect]
        if suspects:
            _rewrite(block, suspects, new, shapes)
        _join_sums(block, new)
        _turn_scans(block)


def _rewrite(
    block: Block, suspects: list[int], new: Callable[[], int], shapes: dict[int, Shape]
) -> None:
    for position, value in block.gives.items():
        if value in suspects:
            block.gives[position] = _merge(block, value, new, shapes)
    _drop_unused(block)


def _origins(block: Block) -> dict[int, _Origin]:
    found = {value: _Origin(frozenset([value])) for value in block.takes.values()}
    for step in block.steps:
        if len(step.terms) == 1:
            found[step.out] = _next(found[step.terms[0].value], step.terms[0].map)
            continue
        parts = [found[term.value] for term in step.terms]
        takes = frozenset().union(*(part.takes for part in parts))
        joined = len(takes) < sum(len(part.takes) for part in parts) and not _disjoint(step)
        nexts = [_next(part, term.map) for part, term in zip(parts, step.terms)]
        found[step.out] = _Origin(takes, None, joined or any(n.suspect for n in nexts))
    return found


def _disjoint(step: Step) -> bool:
    """Whether no element of the result comes from two terms (the parts of a ``cat``)."""
    taken = torch.zeros(step.shape, dtype=torch.bool, device="cpu")
    for term in step.terms:
        if not isinstance(term.map, Index) or not term.map.fills:
            return False
        here = term.map.source() >= 0
        if bool((taken & here).any()):
            return False
        taken |= here
    return True


def _next(origin: _Origin, step: Map) -> _Origin:
    suspect = origin.suspect
    if not suspect and not step.single_source:
        suspect = origin.chain is None or not _apart(origin.chain, step)
    chain = None if origin.chain is None else [*origin.chain, step]
    return _Origin(origin.takes, chain, suspect)


def _apart(before: list[Map], last: Map) -> bool:
    """Whether the many routes into ``last`` start at different elements."""
    spreading = [step for step in before if not step.single_target]
    if not spreading:
        return True
    if isinstance(last, (Reduce, Scatter)):
        return _pairs_differ(before, last)
    if isinstance(last, Contract) and all(isinstance(step, MOVES) for step in before):
        return _lines_differ(before, last)
    return (
        len(spreading) == 1
        and spreading[0] is before[-1]
        and isinstance(last, Contract)
        and isinstance(spreading[0], Contract)
        and not spreading[0].produced() & last.contracted()
    )


def _pairs_differ(before: list[Map], last: Reduce | Scatter) -> bool:
    """Whether elements that are moved, scaled and added up join no two elements twice."""
    if not all(isinstance(step, MOVES) for step in before) or last.inputs > LISTED:
        return False
    source = _source(before, before[0].in_shape).reshape(-1)
    target = last.targets().reshape(-1)
    pairs = (source * last.outputs + target)[(source >= 0) & (target >= 0)]
    different: Tensor = pairs.unique()  # type: ignore[no-untyped-call]
    return different.numel() == pairs.numel()


def _lines_differ(before: list[Map], last: Contract) -> bool:
    """Whether no element that was moved and scaled stands twice among those that are added up."""
    if last.inputs > LISTED:
        return False
    source = _source(before, before[0].in_shape).reshape(last.in_shape)
    over = sorted(last.contracted())
    lines = source.movedim(over, list(range(-len(over), 0))) if over else source.unsqueeze(-1)
    lines = lines.reshape(-1, prod(last.in_shape[d] for d in over)).sort(-1).values
    twice = (lines[:, 1:] == lines[:, :-1]) & (lines[:, 1:] >= 0)
    return not bool(twice.any())


def _merge(block: Block, value: int, new: Callable[[], int], shapes: dict[int, Shape]) -> int:
    """A value with the same meaning in SUM and one weight a pair; or the same value and a note."""
    step = next(step for step in block.steps if step.out == value)
    terms: list[Term] = []
    for take in dict.fromkeys(block.takes.values()):
        routes = _routes(block, value, take)
        if not routes:
            continue
        merged = _moved(routes, shapes[take], step.dtype) or _matrix(
            block, value, take, shapes[take], step
        )
        if merged is None:
            block.note = NOTE
            return value
        for chain in merged:
            at = take
            for link in chain[:-1]:
                between = new()
                block.steps.append(Step(between, (Term(link, at),), link.out_shape, step.dtype))
                at = between
            terms.append(Term(chain[-1], at))
    result = new()
    block.steps.append(Step(result, tuple(terms), step.shape, step.dtype))
    return result


def _routes(block: Block, value: int, take: int) -> list[list[Map]]:
    """The chains of maps from a cotangent to a value, until there are too many to list."""
    steps = {step.out: step for step in block.steps}
    found: list[list[Map]] = []
    stack: list[tuple[int, list[Map]]] = [(value, [])]
    while stack and len(found) <= ROUTES:
        at, chain = stack.pop()
        if at == take:
            found.append(chain)
        elif at in steps:
            stack += [(t.value, [t.map, *chain]) for t in reversed(steps[at].terms)]
    return found


def _moved(routes: list[list[Map]], shape: Shape, dtype: torch.dtype) -> list[list[Map]] | None:
    """Routes that only move and scale: where two agree on the source, their weights are added."""
    if len(routes) > ROUTES or not all(isinstance(s, MOVES) for chain in routes for s in chain):
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


def _source(chain: list[Map], shape: Shape) -> Tensor:
    numbers = torch.arange(1, prod(shape) + 1, device="cpu").reshape(shape)
    for step in chain:
        if isinstance(step, Index):
            numbers = step.move(numbers)
        elif isinstance(step, Identity):
            numbers = numbers.reshape(step.out_shape)
    return numbers - 1


def _weight(chain: list[Map], shape: Shape, dtype: torch.dtype) -> Tensor:
    ones = torch.ones(shape, dtype=dtype, device="cpu")
    for step in chain:
        ones = step.apply(ones)
    return ones


def _matrix(
    block: Block, value: int, take: int, shape: Shape, step: Step
) -> list[list[Map]] | None:
    """The formula as a matrix, by unit cotangents, if it is small; unchanged routes are kept."""
    inputs, outputs = prod(shape), prod(step.shape)
    if inputs * outputs > SMALL:
        return None
    if not inputs * outputs:
        return [
            [Dense(torch.zeros(outputs, inputs, dtype=step.dtype, device="cpu"), shape, step.shape)]
        ]
    units = torch.eye(inputs, dtype=step.dtype, device="cpu").reshape(inputs, *shape)

    def column(unit: Tensor) -> Tensor:
        return _run(block, {take: unit}, value).reshape(outputs)

    try:
        matrix = torch.func.vmap(column, out_dims=1)(units)
    except RuntimeError:  # an operation that cannot be batched
        matrix = torch.stack([column(unit) for unit in units], 1)
    return [[Dense(matrix, shape, step.shape)]]


def _run(block: Block, values: dict[int, Tensor], wanted: int) -> Tensor:
    """A block's value in SUM for these cotangents; absent ones count as zero."""
    for step in block.steps:
        parts = [t.map.apply(values[t.value]) for t in step.terms if t.value in values]
        if parts:
            values[step.out] = torch.stack([part.to(step.dtype) for part in parts]).sum(0)
    return values[wanted]


def _join_sums(block: Block, new: Callable[[], int]) -> None:
    """Sums of sums become one: an operator chooses among all that it adds up, not group by group.

    (``repeat`` backwards sums over the repetitions of one dimension after the other.)
    """
    made = {step.out: step for step in block.steps}
    uses = Counter(term.value for step in block.steps for term in step.terms)
    uses.update(block.gives.values())
    for n, step in reversed(list(enumerate(block.steps))):
        chain, at = _summing(step, made, uses)
        if sum(not link.single_source for link in chain) < 2 or chain[0].inputs > LISTED:
            continue
        target, weight = _sent(chain, step.dtype)
        between = new()
        scale = Step(
            between, (Term(Scale(weight, chain[0].in_shape), at),), chain[0].in_shape, step.dtype
        )
        total = Term(Scatter(target, step.shape), between)
        block.steps[n : n + 1] = [scale, Step(step.out, (total,), step.shape, step.dtype)]
        _drop_unused(block)
        return _join_sums(block, new)


def _turn_scans(block: Block) -> None:
    """Elements turned round, summed up and turned round again are a sum from the other end.

    (``cumsum`` backwards. The first of equals is to be the lowest element, not the last.)
    """
    made = {step.out: step for step in block.steps}
    for n, step in enumerate(block.steps):
        last = step.terms[0]
        middle = made.get(last.value)
        if len(step.terms) > 1 or middle is None or len(middle.terms) > 1:
            continue
        scan, first = middle.terms[0].map, made.get(middle.terms[0].value)
        if not isinstance(scan, Scan) or first is None or len(first.terms) > 1:
            continue
        if _flips(first.terms[0].map, scan) and _flips(last.map, scan):
            turned = Scan(scan.dim, scan.in_shape, not scan.reverse)
            block.steps[n] = step._replace(terms=(Term(turned, first.terms[0].value),))
    _drop_unused(block)


def _flips(step: Map, scan: Scan) -> bool:
    """Whether a map turns the elements round along the dimension of a scan."""
    if not isinstance(step, Index) or not (step.in_shape == step.out_shape == scan.in_shape):
        return False
    own = torch.arange(step.inputs, device="cpu").reshape(step.in_shape)
    return torch.equal(step.source(), own.flip(scan.dim))


def _summing(step: Step, made: dict[int, Step], uses: Counter[int]) -> tuple[list[Map], int]:
    """The maps up to a step through which every element goes to one place, and where they begin."""
    chain: list[Map] = []
    at = step.out
    while at in made and len(made[at].terms) == 1 and (not chain or uses[at] == 1):
        map_, before = made[at].terms[0]
        if not map_.single_target or not isinstance(map_, (*MOVES, Reduce, Scatter)):
            break
        chain.insert(0, map_)
        at = before
    return chain, at


def _sent(chain: list[Map], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Where each element of the first map's input goes, and what it is multiplied with."""
    shape = chain[0].in_shape
    target = torch.arange(prod(shape), device="cpu")
    weight = torch.ones(prod(shape), dtype=dtype, device="cpu")
    for link in chain:
        if isinstance(link, Scale):
            factor = link.weight
            if not isinstance(factor, Tensor):
                factor = torch.tensor(factor, device="cpu")
            number = nearby(factor, target.device)
            here = number.expand(link.in_shape).reshape(-1)
            weight = torch.where(target >= 0, weight * here[target.clamp(min=0)].to(dtype), weight)
            continue
        if isinstance(link, Index):
            source = link.source().reshape(-1)
            onward = torch.full((link.inputs,), -1, device="cpu")
            there = source >= 0
            onward[source[there]] = torch.arange(link.outputs, device="cpu")[there]
        elif isinstance(link, (Reduce, Scatter)):
            onward = link.targets().reshape(-1)
        else:
            continue
        target = torch.where(target >= 0, onward[target.clamp(min=0)], -1)
    return target.reshape(shape), weight.reshape(shape)


def _drop_unused(block: Block) -> None:
    used = set(block.gives.values())
    kept: list[Step] = []
    for step in reversed(block.steps):
        if step.out in used:
            kept.append(step)
            used.update(term.value for term in step.terms)
    block.steps[:] = reversed(kept)
