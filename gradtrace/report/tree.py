"""The modules of a model: class, calls, parameters, and which have the same structure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from functools import cached_property

from gradtrace.report.graph import Numbered, above
from gradtrace.report.model import Module
from gradtrace.report.source import Source

LISTS = ("ModuleList", "ModuleDict")
"""Containers of modules that cannot be called."""


def named(source: Source) -> dict[str, int]:
    """The number of each module: those of the model in its order, then others that operators refer
    to, with their parents; parents come before their children.
    """
    module_names = ["", *source.modules, *(block.place.module for block in source.blocks)]
    number: Numbered[str] = Numbered()
    for name in dict.fromkeys(module_names):
        for each in reversed([name, *above(name)]):
            number(each)
    return number.known


@dataclass
class Tree:
    """The modules of a view."""

    source: Source
    number: dict[str, int]

    def modules(self) -> tuple[Module, ...]:
        """The modules, in the order of their numbers."""
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
        """The direct children of each module."""
        found: dict[str, list[str]] = {name: [] for name in self.number}
        for name in self.number:
            if name:
                found[above(name)[0]].append(name)
        return found

    @cached_property
    def upward(self) -> list[str]:
        """The names, children before their parents."""
        return list(reversed(self.number))

    @cached_property
    def calls(self) -> dict[str, int]:
        """The number of calls of each, from its operators. For a module that only calls others, it
        is the largest number of calls among its children.
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
        """The number of parameter elements in each module and its children, tied ones once."""
        found = dict.fromkeys(self.number, 0)
        for leaf in self.source.leaves:
            if self.source.is_parameter(leaf):
                for module in self._homes(self.source.names[leaf.value]):
                    found[module] += leaf.tensor.numel()
        return found

    def _homes(self, leaf: str) -> Iterable[str]:
        """All modules that contain a leaf, by any of its names."""
        every = (leaf, *self.source.aliases.get(leaf, ()))
        return {module for name in every for module in above(name) if module in self.number}

    @cached_property
    def form(self) -> dict[str, int]:
        """A number for the structure of each module: equal for modules with the same class,
        operators, shapes, parameters, and children of the same names and structures.
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
