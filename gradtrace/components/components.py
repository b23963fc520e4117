"""Components: the parts of a program whose influence is measured, and their provenance bits.

``by=`` names them, everywhere in one language: a kind (``KINDS``), a name or pattern of modules or
of anything else that a table prints, a class of modules, a list of these, or ``{group: names}``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor, nn

from gradtrace.autodiff.names import unknown
from gradtrace.components.forks import NO_FORKS, find_forks, fork_bits
from gradtrace.components.module_parts import ModuleParts, WholeProgram
from gradtrace.errors import GradtraceError, UnknownName
from gradtrace.ir.passes.provenance import ComponentBits
from gradtrace.ir.program import HOOKS, Block, Program
from gradtrace.pytorch.wrapped_modules import ancestors, named_modules

Name = str | type[nn.Module]
Components = Name | Sequence[Name] | Mapping[str, Name | Sequence[Name]] | None
"""How a caller names components (``by=``); see ``ComponentFinder.choose``."""


def spelt(by: Any) -> Any:
    """Components as JSON values, classes as ``class:Linear``: to check that a file was made for the
    same ones, and to ask for them again whatever becomes of the list that was given.
    """
    if isinstance(by, Mapping):
        return {name: spelt(parts) for name, parts in by.items()}
    if isinstance(by, type) and issubclass(by, nn.Module):
        return f"class:{by.__name__}"
    alone = isinstance(by, (str, bytes, type, nn.Module, Tensor)) or not isinstance(by, Iterable)
    return by if alone else [spelt(each) for each in by]  # what is no name is left, for an error


def impossible(names: Sequence[str]) -> GradtraceError:
    """The error for components of which no path can pass any."""
    named = ", ".join(map(repr, names[:4])) + (", ..." if names[4:] else "")
    return GradtraceError(
        f"no path from a leaf to this loss can pass {named}: not called, or nothing behind it "
        "needs a gradient"
    )


PARTS = ("layers", "heads", "experts", "steps")
"""Parts of modules, which ``module_parts`` finds from the modules of a watched model."""

KINDS = ("modules", *PARTS, "forks", "labels", "operators")

OTHERS = ("heads", "experts", "steps", "labels", "forks", "operators")
"""Kinds among which a name is looked for that is no module's."""


class Component(NamedTuple):
    """A named set of atoms (provenance bits), and the leaves that belong to it."""

    name: str
    bits: int
    owns: frozenset[str] = frozenset()


@dataclass
class Region:
    """All components of one kind in a program: bits by name, and leaves by name. ``branches``: for
    each branch those of its fork.
    """

    bits: dict[str, int] = field(default_factory=dict)
    owns: dict[str, frozenset[str]] = field(default_factory=dict)
    branches: dict[str, ForkBranches] = field(default_factory=dict)


class ForkBranches(NamedTuple):
    """All branches of a fork, also of other forks of that name (of other calls, say), as components
    of their own. A leaf without a choice at a fork belongs to its branches. ``between``: some of
    them are modules, or labelled slices.
    """

    branches: tuple[Component, ...]
    between: bool


@dataclass
class ComponentSelection:
    """Components, and the blocks, arguments and slices that set their bits.

    ``forks`` has, for each component that is one branch, its name there and its fork.
    """

    components: list[Component]
    component_bits: ComponentBits
    by: str = ""  # the kind, if all are of one
    forks: dict[str, tuple[str, ForkBranches]] = field(default_factory=dict)

    @property
    def bits(self) -> list[int]:
        """The bits of each component."""
        return [component.bits for component in self.components]

    @cached_property
    def counted(self) -> ComponentSelection:
        """What influence counts: the branches of all forks instead of those that were asked for."""
        if not self.forks:
            return self
        plain = [each for each in self.components if each.name not in self.forks]
        every = {id(some): some for _, some in self.forks.values()}
        branches = [branch for some in every.values() for branch in some.branches]
        return ComponentSelection([*plain, *branches], self.component_bits, self.by)


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
        self._given = (program, modules, leaves, names, model, whole)
        self.program = program
        self.model = model
        self.whole = whole
        self.classes = dict(modules)
        self.leaves = {name: {name, *others} for name, others in leaves.items()}
        self.names = names or {}
        self.next = 1  # bit 0 says that there is a path
        self.component_bits = ComponentBits({}, {}, {})
        self._regions: dict[str, Region] = {}
        self._apart: dict[str, Mapping[str, int]] = {}
        self._forks: dict[str, tuple[str, ForkBranches]] = {}

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
        region, found = self._region("modules"), Region()
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
            _, known = self.component_bits.slices.get(number, (dim, [0] * len(bits)))
            self.component_bits.slices[number] = (dim, [a | b for a, b in zip(bits, known)])
        return region

    def forks(self) -> Region:
        """The branches of forks, called ``fork/branch``."""
        found = find_forks(self.program, self.names, self.classes)
        bits = fork_bits(found, self.program.blocks, self.component_bits, self.next)
        self.next += len(bits)
        region, numbers, forks = Region(), iter(bits), dict[str, list[Component]]()
        between = {fork.name for fork in found if fork.between}
        for fork in found:
            others = frozenset(self.names.values()) - fork.choosers
            for branch in fork.branches:
                name = f"{fork.name}/{branch.name}"
                bit = next(numbers)
                forks.setdefault(fork.name, []).append(Component(name, bit, others))
                region.bits[name] = region.bits.get(name, 0) | bit
                region.owns[name] = region.owns.get(name, others) & others
        for fork_name, some in forks.items():
            every = ForkBranches(tuple(some), fork_name in between)
            region.branches.update((each.name, every) for each in some)
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

    def choose(self, by: Components) -> ComponentSelection:
        """Resolve components. Where nothing was made inside modules, ``"modules"`` (or None) are
        labels, or else operators.
        """
        by = spelt("modules" if by is None else by)
        if isinstance(by, ComponentSelection):  # made by hand
            return by
        if isinstance(by, str):
            if by in KINDS:
                return self._every(by)
            by = [by]
        if isinstance(by, list):
            by = {name: name for each in by for name in self._entries(each)}
        if not isinstance(by, Mapping):
            raise GradtraceError(self._not_names("by", by))
        if not by:
            raise GradtraceError("there is no component: name at least one, or leave them out")
        found = [self._group(name, parts) for name, parts in by.items()]
        return ComponentSelection(found, self.component_bits, forks=self._forks)

    def _every(self, kind: str) -> ComponentSelection:
        """All components of a kind."""
        blocks = self.program.blocks
        if kind == "modules" and not any(block.place.module for block in blocks):
            kind = "labels" if any(block.label for block in blocks) else "operators"
        region = self._region(kind, strict=True)
        names = [name for name in region.bits if name]
        found = [Component(n, region.bits[n], region.owns.get(n, frozenset())) for n in names]
        forks = {name: (name, some) for name, some in region.branches.items()}
        return ComponentSelection(found, self.component_bits, kind, forks)

    def _entries(self, entry: Any) -> list[str]:
        """The components of one entry of a list: a kind has many, unless a module is called so."""
        if isinstance(entry, str) and entry in KINDS and entry not in self.classes:
            return [each.name for each in self._every(entry).components]
        return self._names(entry, entry)

    def _not_names(self, what: str, given: object) -> str:
        """What is wrong with a component that is given by something else than a name."""
        if isinstance(given, nn.Module):
            modules = {} if self.model is None else dict(named_modules(self.model))
            names = [name for name, module in modules.items() if name and module is given]
            hint = f"name it: [{names[0]!r}]" if names else "it is none of the watched model"
            return f"components are names, not modules such as {type(given).__name__}; {hint}"
        return (
            f"{what} is made of {given!r}; give one of {', '.join(KINDS)}, names such as "
            "'encoder.*', or classes such as nn.LSTM"
        )

    def _region(self, kind: str, strict: bool = False) -> Region:
        """All components of a kind; an error if there are none."""
        if kind not in self._regions:
            found = self.parts(kind, strict) if kind in PARTS else getattr(self, _MAKERS[kind])()
            if not found.bits:
                raise UnknownName(_EMPTY[kind])
            self._regions[kind] = found
        return self._regions[kind]

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

    def _group(self, name: str, parts: Any) -> Component:
        bits, owns = 0, frozenset[str]()
        for part in (every := self._names(name, parts)):
            kind, hits = self._found(part)
            if hits:
                region = self._region(kind)
                if kind == "forks" and len(every) == len(hits) == 1:
                    self._forks[name] = hits[0], region.branches[hits[0]]
                bits |= union(region.bits[n] for n in hits)
                owns |= frozenset().union(*(region.owns.get(n, frozenset()) for n in hits))
            else:
                owns |= self._owned(part)  # a module that was not called
        return Component(name, bits, owns)

    def _found(self, part: str) -> tuple[str, list[str]]:
        """The kind of a name, and what it matches; no kind for a module that was not called."""
        prefix, _, rest = part.partition(":")
        if rest and prefix in _PREFIX:
            kind = _PREFIX[prefix]
            known = self._region(kind).bits
            if hits := _matching(known, rest):
                return kind, hits
            if kind != "modules" or rest not in self.classes:
                raise UnknownName(unknown(prefix, rest, known))
            return "", []
        known = dict.fromkeys(KINDS, 0) | dict.fromkeys(self.classes, 0)
        for kind in ("modules", *OTHERS):
            some = self._known(kind)
            if hits := _matching(some, part):
                return kind, hits
            if kind == "modules" and part in self.classes:
                return "", []
            known |= some
        raise UnknownName(unknown("component", part, known))

    def _known(self, kind: str) -> Mapping[str, int]:
        """The components of a kind; looked for apart, so that those not chosen take no bits."""
        if kind not in self._regions and kind not in self._apart:
            try:
                self._apart[kind] = ComponentFinder(*self._given)._region(kind).bits
            except GradtraceError:  # there is none
                self._apart[kind] = {}
        return self._regions[kind].bits if kind in self._regions else self._apart[kind]


def _matching(known: Iterable[str], pattern: str) -> list[str]:
    return [n for n in known if n and (n == pattern or fnmatchcase(n, pattern))]


_MAKERS = {kind: kind for kind in KINDS} | {"classes": "by_class"}
_PREFIX = {"class": "classes", **{kind.removesuffix("s"): kind for kind in KINDS}}
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
    "forks": NO_FORKS,
}


def union(bits: Iterable[int]) -> int:
    """The union of the bits."""
    total = 0
    for each in bits:
        total |= each
    return total
