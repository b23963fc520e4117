"""The modules of a model: what each is, how large, and which are made alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from functools import cached_property

from gradtrace.report.graph import Numbered, above
from gradtrace.report.model import Module
from gradtrace.report.source import Source

LISTS = ("ModuleList", "ModuleDict")
"""Modules that hold others and cannot be called."""


def named(source: Source) -> dict[str, int]:
    """The number of each module: those of the model in its order, then others that operators name
    (or lie in); parents come before their children.
    """
    told = ["", *source.modules, *(block.place.module for block in source.blocks)]
    number: Numbered[str] = Numbered()
    for name in dict.fromkeys(told):
        for each in reversed([name, *above(name)]):
            number(each)
    return number.known


@dataclass
class Tree:
    """The modules of a view."""

    source: Source
    number: dict[str, int]

    def modules(self) -> tuple[Module, ...]:
        """One for each name."""
        first: dict[tuple[str, int], int] = {}
        found = []
        for name, n in self.number.items():
            parent = above(name)[0] if name else None
            like = n if parent is None else first.setdefault((parent, self.form[name]), n)
            at = -1 if parent is None else self.number[parent]
            kind, calls = self.source.modules.get(name, ""), self.calls[name]
            found.append(Module(name, kind, at, calls, self.parameters[name], like))
        return tuple(found)

    @cached_property
    def children(self) -> dict[str, list[str]]:
        """The modules within each."""
        found: dict[str, list[str]] = {name: [] for name in self.number}
        for name in self.number:
            if name:
                found[above(name)[0]].append(name)
        return found

    @cached_property
    def upward(self) -> list[str]:
        """Children before their parents."""
        return list(reversed(self.number))

    @cached_property
    def calls(self) -> dict[str, int]:
        """How often each was called, as its operators tell. One that only calls others was called
        as often as the one among these that was called most.
        """
        seen: dict[str, set[int]] = {}
        for block in self.source.blocks:
            seen.setdefault(block.place.module, set()).add(block.place.call)
        found: dict[str, int] = {}
        for name in self.upward:
            inside = max((found[child] for child in self.children[name]), default=0)
            held = self.source.modules.get(name, "") in LISTS
            own = len(seen.get(name, ()))
            found[name] = own or (0 if held else inside if name else 1)
        return found

    @cached_property
    def parameters(self) -> dict[str, int]:
        """The elements of parameters in each, with all inside it, tied ones once."""
        found = dict.fromkeys(self.number, 0)
        for leaf in self.source.leaves:
            if self.source.is_parameter(leaf):
                for module in self._homes(self.source.names[leaf.value]):
                    found[module] += leaf.tensor.numel()
        return found

    def _homes(self, leaf: str) -> Iterable[str]:
        """All modules that a leaf lies in, by any of its names."""
        every = (leaf, *self.source.aliases.get(leaf, ()))
        return {module for name in every for module in above(name) if module in self.number}

    @cached_property
    def form(self) -> dict[str, int]:
        """A number for each module, the same for those of the same class, operators, shapes and
        parameters whose modules within are the same and have the same names.
        """
        operators: dict[str, Counter[Hashable]] = {name: Counter() for name in self.number}
        for block in self.source.blocks:
            shapes = tuple(self.source.shapes[value] for value in block.takes.values())
            operators[block.place.module][block.operator, shapes] += 1
        for leaf in self.source.leaves:
            name = self.source.names[leaf.value]
            home = next((m for m in above(name) if m in operators), "")
            operators[home][name.removeprefix(home), tuple(leaf.tensor.shape)] += 1
        number: Numbered[Hashable] = Numbered()
        found: dict[str, int] = {}
        for name in self.upward:
            inside = tuple((c.rpartition(".")[2], found[c]) for c in self.children[name])
            own = frozenset(operators[name].items())
            found[name] = number((self.source.modules.get(name, ""), own, inside))
        return found
