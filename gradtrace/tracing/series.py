"""Which components have an alternative: whether some path goes around them.

What is in series has a share of 1 by definition: every path from every leaf that could pass it
does. This follows from the structure of the program alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import or_

from gradtrace.ir.passes.provenance import ComponentBits, ProvenanceBounds, analyse_provenance
from gradtrace.ir.program import Program
from gradtrace.tracing.components import Component


def alternatives(
    program: Program,
    components: Sequence[Component],
    bits: ComponentBits,
    bounds: ProvenanceBounds,
    names: Mapping[int, str],
) -> list[bool | None]:
    """Whether paths have an alternative to each component; None if no leaf can pass it."""
    leaves = [(names[leaf.value], leaf.value) for leaf in program.leaves]
    some = reduce(or_, (bounds.may[value] for _, value in leaves), 0)
    loose = reduce(or_, (bounds.may[value] & ~bounds.must[value] for _, value in leaves), 0)
    found = []
    for each in components:
        simple = not each.owns and (each.bits.bit_count() <= 1 or not each.bits & loose)
        found.append(
            _simple(each.bits, some, loose) if simple else _avoidable(each, bounds, leaves)
        )
    # All paths may pass a component, though they pass no single one of its parts.
    unsure = [n for n, known in enumerate(found) if known and components[n].bits.bit_count() > 1]
    if unsure:
        wholes = [Component("", 2 << k, components[n].owns) for k, n in enumerate(unsure)]
        mine = _by_component([components[n].bits for n in unsure], bits)
        whole_bounds = analyse_provenance(program, mine)
        for n, whole in zip(unsure, wholes):
            found[n] = _avoidable(whole, whole_bounds, leaves)
    return found


def _simple(bits: int, some: int, loose: int) -> bool | None:
    """``_avoidable`` of a component that no leaf belongs to, by what holds of any leaf."""
    return bool(bits & loose) if bits & some else None


def _avoidable(
    component: Component, bounds: ProvenanceBounds, leaves: Sequence[tuple[str, int]]
) -> bool | None:
    """Whether some route from a leaf that could pass the component avoids it."""
    bits, owns, passed = component.bits, component.owns, False
    for name, value in leaves:
        if bounds.may[value] & bits and name not in owns:
            if not bounds.must[value] & bits:
                return True
            passed = True
    return False if passed else None


def _by_component(wanted: Sequence[int], bits: ComponentBits) -> ComponentBits:
    """Bits for whole components instead of their parts: bit ``k + 1`` for the k-th."""
    known: dict[int, int] = {}
    by_part: dict[int, int] = {}
    for k, some in enumerate(wanted):
        while some:
            part = some & -some
            by_part[part] = by_part.get(part, 0) | 2 << k
            some ^= part

    def whole(some: int) -> int:
        if some not in known:
            parts, rest = [0], some
            while rest:
                parts.append(by_part.get(rest & -rest, 0))
                rest &= rest - 1
            known[some] = reduce(or_, parts)
        return known[some]

    return ComponentBits(
        {block: whole(some) for block, some in bits.block.items()},
        {place: whole(some) for place, some in bits.position.items()},
        {block: (dim, [*map(whole, some)]) for block, (dim, some) in bits.slices.items()},
    )
