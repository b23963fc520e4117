"""Components: the parts of a program whose influence is measured, and their provenance bits.

A component is made of modules, classes, operators, labelled slices, arguments of sums, or parts of
modules: heads, experts, layers, time steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from torch import Tensor, nn

from gradtrace.autodiff.names import unknown
from gradtrace.components.module_parts import ModuleParts, WholeProgram
from gradtrace.components.operator_names import MOVES, spoken
from gradtrace.errors import GradtraceError, UnknownName
from gradtrace.ir.passes.provenance import ComponentBits
from gradtrace.ir.program import HOOKS, Block, Program
from gradtrace.pytorch.wrapped_modules import named_modules

Components = str | Sequence[str] | Mapping[str, str | Sequence[str]] | None
"""How a caller names components; see ``ComponentFinder.choose``."""


def spelt(components: Components) -> Components:
    """Components as JSON values: to check that a file was made for the same components, and to ask
    for them again whatever becomes of the list that was given.
    """
    if isinstance(components, Mapping):
        return {name: _listed(parts) for name, parts in components.items()}
    found: Components = _listed(components)
    return found


def impossible(names: Sequence[str]) -> GradtraceError:
    """The error for components of which no path can pass any."""
    named = ", ".join(map(repr, names[:4])) + (", ..." if names[4:] else "")
    return GradtraceError(
        f"no path from a leaf to this loss can pass {named}: not called, or nothing behind it "
        "needs a gradient"
    )


def _listed(given: Any) -> Any:
    """Several names as a list; what is none is left as it is, for an error."""
    alone = isinstance(given, (str, bytes, nn.Module, Tensor)) or not isinstance(given, Iterable)
    return given if alone else list(given)


SUMS = ("AddBackward0", "SubBackward0", "CatBackward0", "StackBackward0")
"""Operators whose arguments count as branches; see ``ComponentFinder.arguments``."""

PARTS = ("heads", "experts", "layers", "steps")
"""Parts of modules, which ``module_parts`` finds from the modules of a watched model."""

KINDS = ("modules", "classes", "operators", "labels", "arguments", *PARTS)


class Component(NamedTuple):
    """A named set of atoms (provenance bits), and the leaves that belong to it."""

    name: str
    bits: int
    owns: frozenset[str] = frozenset()


@dataclass
class Region:
    """All components of one kind in a program: bits by name, and leaves by name."""

    bits: dict[str, int] = field(default_factory=dict)
    owns: dict[str, frozenset[str]] = field(default_factory=dict)


@dataclass
class ComponentSelection:
    """Components, and the blocks, arguments and slices that set their bits."""

    components: list[Component]
    component_bits: ComponentBits

    @property
    def bits(self) -> list[int]:
        """The bits of each component."""
        return [component.bits for component in self.components]


@dataclass
class Routes:
    """Finds the operator or module that made an argument, from the argument's cotangent."""

    takers: dict[int, Block]
    wholes: dict[int, int]
    names: Mapping[int, str]  # of leaves, by value

    @classmethod
    def of(cls, program: Program, names: Mapping[int, str] | None = None) -> Routes:
        """The routes of a program."""
        takers = {value: block for block in program.blocks for value in block.takes.values()}
        return cls(takers, program.wholes(), names or {})

    def source(self, value: int) -> str:
        """The leaf that the argument is, or a view of; else the nearest module that it came from,
        or the operator.
        """
        first = ""
        for _ in range(100):  # skip operators outside any module
            value = self.wholes.get(value, value)
            block = self.takers.get(value)
            if block is None:
                return first or self.names.get(value, "leaf")
            if block.place.module:
                return block.place.module
            first = first or ("" if spoken(block.operator) in MOVES else block.operator)
            if not block.gives:
                return first
            value = next(iter(block.gives.values()))
        return first


class ComponentFinder:
    """Finds the components of a program that paths can pass through, and gives them bits.

    ``modules`` maps the names of a model's modules to their classes, ``leaves`` are the names of
    the program's leaves, with all their aliases, ``names`` the first of them by value. ``model`` is
    asked for its heads, experts, layers and time steps, which are found in ``whole``, if given.
    """

    def __init__(
        self,
        program: Program,
        modules: Mapping[str, str],
        leaves: Mapping[str, Iterable[str]],
        names: Mapping[int, str] | None = None,
        model: nn.Module | None = None,
        whole: WholeProgram | None = None,
    ) -> None:
        self.program = program
        self.model = model
        self.whole = whole
        self.classes = dict(modules)
        self.leaves = {name: {name, *others} for name, others in leaves.items()}
        self.names = names or {}
        self.next = 1  # bit 0 says that there is a path
        self.component_bits = ComponentBits({}, {}, {})

    def _atom(self) -> int:
        bit = 1 << self.next
        self.next += 1
        return bit

    # Kinds of components --------------------------------------------------------------------------

    def _by(self, key: Callable[[Block], str]) -> Region:
        """One atom for each key of a block; blocks of no key are left out."""
        bits, component_bits = dict[str, int](), self.component_bits.block
        for number, block in enumerate(self.program.blocks):
            name = key(block)
            if name and block.operator != HOOKS:
                bit = bits.get(name, 0)
                if not bit:
                    bit = bits[name] = self._atom()
                component_bits[number] = component_bits.get(number, 0) | bit
        return Region(bits)

    def modules(self) -> Region:
        """Modules, each with all its submodules."""
        direct = self._by(lambda block: block.place.module)
        seen = {above for name in direct.bits for above in ancestors(name)}
        order = [name for name in self.classes if name in seen]
        order += sorted(seen - set(order))
        region = Region(dict.fromkeys(order, 0))
        for name, bit in direct.bits.items():
            for above in ancestors(name):
                region.bits[above] |= bit
        region.owns = {name: self._owned(name) for name in order}
        return region

    def _owned(self, module: str) -> frozenset[str]:
        """The leaves that belong to a module by any of their names."""
        if not module:
            return frozenset(self.leaves)
        return frozenset(self.inside.get(module, ()))

    @cached_property
    def inside(self) -> dict[str, set[str]]:
        """The leaves by each prefix of their names: modules, and the full names themselves."""
        found: dict[str, set[str]] = {}
        for name, every in self.leaves.items():
            for other in every:
                for above in ancestors(other):
                    found.setdefault(above, set()).add(name)
        return found

    def by_class(self) -> Region:
        """All modules of a class, each with all its submodules."""
        region, found = self.modules(), Region()
        for name, bits in region.bits.items():
            kind = self.classes.get(name, "")
            if kind:
                found.bits[kind] = found.bits.get(kind, 0) | bits
                found.owns[kind] = found.owns.get(kind, frozenset()) | region.owns[name]
        return found

    def operators(self) -> Region:
        """Operators by type name, such as ``AddmmBackward0``."""
        return self._by(lambda block: block.operator)

    def labels(self) -> Region:
        """Slices of tensors that ``gradtrace.label`` named."""
        region = Region()
        for number, block in enumerate(self.program.blocks):
            if block.label is None:
                continue
            dim, names = block.label
            for name in names:
                if name is not None and name not in region.bits:
                    region.bits[name] = self._atom()
            bits = [0 if name is None else region.bits[name] for name in names]
            self.component_bits.slices[number] = (dim, bits)
        return region

    def arguments(self) -> Region:
        """The arguments of sums and concatenations: which branch a path takes."""
        routes = Routes.of(self.program, self.names)
        region, seen = Region(), dict[str, int]()
        for number, block in enumerate(self.program.blocks):
            if block.operator not in SUMS or len(block.gives) < 2:
                continue
            kind = block.operator.removesuffix("Backward0").lower()
            where = f"{block.place.module}.{kind}".removeprefix(".")
            which = seen[where] = seen.get(where, -1) + 1
            for position, value in sorted(block.gives.items()):
                name = f"{where}{which or ''}[{position}] from {routes.source(value)}"
                region.bits[name] = self.component_bits.position[number, position] = self._atom()
        return region

    def parts(self, kind: str, strict: bool = True) -> Region:
        """Heads, experts, layers or time steps; see ``module_parts``."""
        modules = {} if self.model is None else dict(named_modules(self.model))
        program, names, leaves = self.whole or (self.program, self.names, self.leaves)
        found = ModuleParts(program, modules, names, leaves).find(kind, strict)
        region, bits = Region(), self.component_bits
        for name, part in found.items():
            bit = region.bits[name] = self._atom()
            region.owns[name] = part.owns
            for number in part.blocks:
                bits.block[number] = bits.block.get(number, 0) | bit
            for number, dim, size, chosen in part.slices:
                slices = bits.slices.setdefault(number, (dim, [0] * size))[1]
                for at in chosen:
                    slices[at] |= bit
        return region

    # Choosing ------------------------------------------------------------------------------------

    def choose(self, components: Components) -> ComponentSelection:
        """Resolve components: a kind (one of ``KINDS``), a list of names or patterns, or a mapping
        from names to those. None: modules if there are any, else labels, else operators.
        """
        if components is None:
            components = (
                "modules"
                if any(b.place.module for b in self.program.blocks)
                else ("labels" if any(b.label for b in self.program.blocks) else "operators")
            )
        if isinstance(components, str):
            region = self._region(components)
            names = [n for n in region.bits if n]
            found = [Component(n, region.bits[n], region.owns.get(n, frozenset())) for n in names]
            return ComponentSelection(found, self.component_bits)
        components = spelt(components)
        if isinstance(components, list):
            components = {name: name for each in components for name in self._names(each, each)}
        if not isinstance(components, Mapping):
            raise GradtraceError(self._not_names("components", components))
        if not components:
            raise GradtraceError("there is no component: name at least one, or leave them out")
        regions: dict[str, Region] = {}
        found = [self._group(name, parts, regions) for name, parts in components.items()]
        return ComponentSelection(found, self.component_bits)

    def _not_names(self, what: str, given: object) -> str:
        """What is wrong with a component that is given by something else than a name."""
        if isinstance(given, nn.Module):
            modules = {} if self.model is None else dict(named_modules(self.model))
            names = [name for name, module in modules.items() if name and module is given]
            hint = f"name it: [{names[0]!r}]" if names else "it is none of the watched model"
            return f"components are names, not modules such as {type(given).__name__}; {hint}"
        return (
            f"{what} is made of {given!r}; give names such as 'encoder.*', 'class:LSTM', "
            "'operator:AddmmBackward0', 'label:head 0'"
        )

    def _region(self, kind: str, strict: bool = True) -> Region:
        makers = dict(
            zip(KINDS, (self.modules, self.by_class, self.operators, self.labels, self.arguments))
        )
        if kind not in KINDS:
            raise UnknownName(
                f"components={kind!r} is none of {', '.join(KINDS)}; to choose modules by name "
                f"pass a list: components=[{kind!r}]"
            )
        if kind in PARTS:
            return self.parts(kind, strict)
        region = makers[kind]()
        if not region.bits:
            raise UnknownName(_EMPTY[kind])
        return region

    def _names(self, name: object, parts: object) -> list[str]:
        """The names that a component is made of; an error for anything else."""
        found: list[Any] = parts if isinstance(parts, list) else [parts]
        for part in found:
            if not isinstance(part, str):
                raise GradtraceError(self._not_names(f"component {name!r}", part))
            if not part:
                raise UnknownName(
                    "component '' is the whole model, whose own operators are not told from those "
                    "outside it; name modules inside it, or all of them: '*'"
                )
        if not isinstance(name, str):
            raise GradtraceError(f"components are called by names, not {name!r}")
        if not found:
            raise GradtraceError(f"component {name!r} is made of nothing; give it at least a name")
        return found

    def _group(
        self, name: str, parts: str | Sequence[str], regions: dict[str, Region]
    ) -> Component:
        bits, owns = 0, frozenset[str]()
        for part in self._names(name, parts):
            prefix, _, rest = part.partition(":")
            kind = _PREFIX.get(prefix, "modules") if rest else "modules"
            pattern = rest if rest and prefix in _PREFIX else part
            if kind not in regions:
                regions[kind] = self._region(kind, strict=False)
            region = regions[kind]
            hits = [n for n in region.bits if n == pattern or fnmatchcase(n, pattern)]
            if not hits and kind == "modules" and pattern in self.classes:
                owns |= self._owned(pattern)  # the module was not called
                continue
            if not hits:
                word = prefix if prefix in _PREFIX and rest else "module"
                raise UnknownName(unknown(word, pattern, region.bits))
            bits |= union(region.bits[n] for n in hits)
            owns |= frozenset().union(*(region.owns.get(n, frozenset()) for n in hits))
        return Component(name, bits, owns)


_PREFIX = {
    "module": "modules",
    "class": "classes",
    "operator": "operators",
    "label": "labels",
    "argument": "arguments",
    **{kind.removesuffix("s"): kind for kind in PARTS},
}
_OUTSIDE = (
    "no operator was made inside a module below the model; run the forward pass under "
    "gradtrace.watch, or, if the model is one layer, ask for its 'operators'"
)
_EMPTY = {
    "modules": _OUTSIDE,
    "classes": _OUTSIDE,
    "operators": "there is no operator",
    "labels": "no tensor behind this loss was labelled; call gradtrace.label(tensor, dim, names) "
    "in the forward pass",
    "arguments": "no sum or concatenation joins two branches that need a gradient",
}


@lru_cache(65_536)
def ancestors(name: str) -> tuple[str, ...]:
    """``a.b.c``: ``a``, ``a.b``, ``a.b.c``."""
    parts = name.split(".")
    return tuple(".".join(parts[:n]) for n in range(1, len(parts) + 1))


def union(bits: Iterable[int]) -> int:
    """The union of the bits."""
    total = 0
    for each in bits:
        total |= each
    return total
