"""Which components have an alternative: whether some path goes around them.

What is in series has a share of 1 by definition: every path from every leaf that could pass it
does. This follows from the structure of the program alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from operator import or_

from gradtrace.components.components import Component
from gradtrace.ir.passes.provenance import ComponentBits, ProvenanceBounds, analyse_provenance
from gradtrace.ir.program import Program


def alternatives(
    program: Program,
    components: Sequence[Component],
    bits: ComponentBits,
    bounds: ProvenanceBounds,
    names: Mapping[int, str],
) -> list[bool | None]:
    """Whether paths have an alternative to each component; None if no leaf can pass it."""
    leaves = [(names[leaf.value], leaf.value) for leaf in program.leaves]
    leaves.sort(key=lambda each: -bounds.may[each[1]].bit_count())  # most are decided by the first
    found = _avoidable(components, bounds, leaves)
    # All paths may pass a component, though they pass no single one of its parts.
    unsure = [n for n, known in enumerate(found) if known and components[n].bits.bit_count() > 1]
    if unsure:
        wholes = [Component("", 2 << k, components[n].owns) for k, n in enumerate(unsure)]
        whole_bits = _by_component([components[n].bits for n in unsure], bits)
        sure = _avoidable(wholes, analyse_provenance(program, whole_bits), leaves)
        for n, known in zip(unsure, sure):
            found[n] = known
    return found


Leaves = Sequence[tuple[str, int]]
"""Names and values of leaves."""


def _avoidable(
    components: Sequence[Component], bounds: ProvenanceBounds, leaves: Leaves
) -> list[bool | None]:
    """Whether some route from a leaf that could pass a component avoids all bits of it."""
    some = reduce(or_, (bounds.may[value] for _, value in leaves), 0)
    loose = reduce(or_, (bounds.may[value] & ~bounds.must[value] for _, value in leaves), 0)
    # Most components are one part, and no leaf's own: no function call for each of them.
    return [
        (each.bits & loose != 0 if each.bits & some else None)
        if not each.owns and not (each.bits & (each.bits - 1) and each.bits & loose)
        else _one_avoidable(each, bounds, leaves, each.bits & loose != 0)
        for each in components
    ]


def _one_avoidable(
    component: Component, bounds: ProvenanceBounds, leaves: Leaves, loose: bool
) -> bool | None:
    """``_avoidable`` of one component; ``loose``: some leaf's routes differ in its bits."""
    bits, owns, passed = component.bits, component.owns, False
    for name, value in leaves:
        if bounds.may[value] & bits and name not in owns:
            if loose and not bounds.must[value] & bits:
                return True
            passed = True
            if not loose:
                break
    return False if passed else None


def _by_component(wanted: Sequence[int], bits: ComponentBits) -> ComponentBits:
    """Bits for whole components instead of their parts: bit ``k + 1`` for the k-th."""
    by_part: dict[int, int] = {}  # by position: many powers of two have the same hash
    for k, some in enumerate(wanted):
        for part in _positions(some):
            by_part[part] = by_part.get(part, 0) | 2 << k

    def whole(some: int) -> int:
        return reduce(or_, (by_part.get(part, 0) for part in _positions(some)), 0)

    return ComponentBits(
        {block: whole(some) for block, some in bits.block.items()},
        {place: whole(some) for place, some in bits.position.items()},
        {block: (dim, [*map(whole, some)]) for block, (dim, some) in bits.slices.items()},
    )


def _positions(bits: int) -> Iterator[int]:
    while bits:
        yield bits.bit_length()
        bits ^= 1 << bits.bit_length() - 1
