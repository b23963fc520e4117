"""The arguments of sums and concatenations as components: of every one, also where no leaf has a
choice, which ``by="forks"`` leaves out. To count paths by hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from gradtrace.components.components import Component, ComponentSelection
from gradtrace.components.operator_names import MOVES, spoken
from gradtrace.ir.passes.provenance import ComponentBits
from gradtrace.ir.program import Block
from gradtrace.table import Row
from gradtrace.traced import Trace

SUMS = ("AddBackward0", "SubBackward0", "CatBackward0", "StackBackward0")


def rows(trace: Trace) -> list[Row]:
    """The rows of the influence of all arguments, from the first sum on."""
    chosen = arguments(trace)
    table = trace.influence(chosen)
    return [table[name] for name in (each.name for each in chosen.components)]


def arguments(trace: Trace, groups: Mapping[str, str] | None = None) -> Any:
    """The arguments by name, such as ``add[1] from layer``; or groups of them, by pattern."""
    bits, found, seen = ComponentBits({}, {}, {}), list[Component](), dict[str, int]()
    takers = {v: block for block in trace.program.blocks for v in block.takes.values()}
    for number, block in enumerate(trace.program.blocks):
        if block.operator not in SUMS or len(block.gives) < 2:
            continue
        where = f"{block.place.module}.{spoken(block.operator)}".removeprefix(".")
        which = seen[where] = seen.get(where, -1) + 1
        for position, value in sorted(block.gives.items()):
            name = f"{where}{which or ''}[{position}] from {_source(trace, takers, value)}"
            bit = bits.position[number, position] = 2 << len(bits.position)
            found.append(Component(name, bit))
    if groups is not None:
        found = [
            Component(name, sum(each.bits for each in found if fnmatchcase(each.name, pattern)))
            for name, pattern in groups.items()
        ]
    return ComponentSelection(found, bits)


def _source(trace: Trace, takers: Mapping[int, Block], value: int) -> str:
    """The leaf that an argument is, or a view of; else the module or operator that it came from."""
    first, wholes = "", trace.program.wholes()
    while True:
        block = takers.get(value := wholes.get(value, value))
        if block is None:
            return first or trace.names.get(value, "leaf")
        if block.place.module:
            return block.place.module
        first = first or ("" if spoken(block.operator) in MOVES else block.operator)
        if not block.gives:
            return first
        value = next(iter(block.gives.values()))
