"""Modules that change places in a forward pass: called by one name, with weights of another."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from typing import TypeAlias

from torch import Tensor

from gradtrace.autodiff.names import NameTable, enclosing, first_number
from gradtrace.errors import listed
from gradtrace.pytorch.wrapped_modules import within

Names: TypeAlias = Collection[str]
Moves: TypeAlias = deque[tuple[int, dict[str, str]]]
"""When modules got other names: the sequence number of the next node, their former names by the new
ones.
"""


def moved_modules(moves: Moves, name_table: NameTable, loss: Tensor) -> dict[str, set[str]]:
    """The other names by which modules were called in the forward pass of a loss, by those that
    they have now. Modules inside of such a module are not listed.
    """
    if not moves:
        return {}
    begin = first_number(loss)
    calls, found = name_table.since(begin), dict[str, set[str]]()
    for at, names in moves:
        if at <= begin:
            continue
        known = zip(calls.starts, calls.places)
        called = {place.module for start, place in known if start < at}
        calls = calls.since(at)
        now = {
            name: (found.get(former, set()) | ({former} & called)) - {name}
            for name, former in names.items()
        }
        gone = {*names.values()}
        found = {name: others for name, others in found.items() if name not in gone} | now
    found = {name: others for name, others in found.items() if others}
    return {name: found[name] for name in found if found.keys().isdisjoint(enclosing(name))}


def names_of_moved(moved: Mapping[str, set[str]], leaves: Names) -> tuple[str, ...]:
    """A note on these modules, if weights of theirs are among the leaves of a loss."""
    said = [
        f"{name} (called as {listed(sorted(others))})"
        for name, others in sorted(moved.items())
        if any(within(leaf, name) for leaf in leaves)
    ]
    if not said:
        return ()
    return (
        f"{listed(said)}: modules changed places in the forward pass, so rows have the names of "
        "the calls, and weights those that the model has now",
    )
