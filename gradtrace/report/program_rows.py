"""The program as rows: modules, operators with the leaves, and edges with how much gradient each
operator passed to each of its arguments.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Sequence
from functools import cached_property
from typing import Generic, TypeVar

import numpy as np
from torch.nn.parameter import is_lazy

from gradtrace.autodiff.names import enclosing
from gradtrace.pytorch.wrapped_modules import named_parameters
from gradtrace.report.model import Edges, Ints, Module, Operators
from gradtrace.report.source import Source

LEAF = "AccumulateGrad"
"""Autograd's name of a leaf's node."""

LISTS = ("ModuleList", "ModuleDict")
"""Containers of modules that cannot be called."""

VIEWS = re.compile(
    "(Alias|AsStrided|Clone|ConjPhysical|Contiguous|Diagonal|Expand|Flatten|Lift|LiftFresh|"
    "Movedim|Narrow|Permute|Reshape|ReshapeAlias|Select|Slice|Split|SplitWithSizes|Squeeze|"
    "SwapAxes|SwapDims|T|ToCopy|Transpose|Unbind|Unflatten|Unfold|UnsafeSplit|"
    "UnsafeSplitWithSizes|UnsafeView|Unsqueeze|View|ViewAsComplex|ViewAsReal)"
    "(Copy)?Backward\\d*(_copy)?"
)
"""Operators that only rearrange elements. Embedding lookups and concatenations do so too, but a
reader of the report wants to see these: they are where data enters and where it is joined."""

K = TypeVar("K", bound=Hashable)


class Numbered(Generic[K]):
    """Numbers distinct values in the order of their first use."""

    def __init__(self) -> None:
        self.known: dict[K, int] = {}

    def __call__(self, value: K) -> int:
        """The number of a value."""
        return self.known.setdefault(value, len(self.known))


class ProgramRows:
    """The rows of a program: its operators, then its leaves.

    ``modules`` are the numbers of the modules: those of the model in its order, then others that
    operators refer to; parents come before their children.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.words: Numbered[str] = Numbered()
        self.shapes: Numbered[tuple[int, ...]] = Numbered()
        first = len(source.blocks)
        self.leaf = {leaf.value: first + n for n, leaf in enumerate(source.leaves)}  # by value
        takes = ((v, n) for n, b in enumerate(source.blocks) for v in b.takes.values())
        self.of = {**dict(takes), **self.leaf}  # by value of an operator's output, or of a leaf
        number: Numbered[str] = Numbered()
        for name in ("", *source.traced.modules, *(block.place.module for block in source.blocks)):
            if name not in number.known:
                for each in reversed([name, *enclosing(name)]):
                    number(each)
        self.modules = number.known

    def operators(self) -> Operators:
        """A row for each operator and leaf."""
        blocks, size, shapes = self.source.blocks, self.source.size, self.source.shapes
        rows: list[tuple[int, ...]] = []
        for block in blocks:
            place = self.modules[block.place.module], block.place.call
            # In the program of an attribution blocks that lead to parameters take nothing.
            first = shapes[block.takes[min(block.takes)]] if block.takes else ()
            is_view = VIEWS.fullmatch(block.operator) is not None
            rows.append((self.words(block.operator), *place, self.shapes(first), -1, is_view))
        word = self.words(LEAF)
        for n, leaf in enumerate(self.source.leaves):
            home = self.modules[self.home(self.source.names[leaf.value])]
            rows.append((word, home, 0, self.shapes(tuple(leaf.tensor.shape)), n, 0))
        masses = [sum(size[value].mass for value in block.takes.values()) for block in blocks]
        masses += [size[leaf.value].mass for leaf in self.source.leaves]
        name, module, call, shape, leaf_, view = columns(rows, 6)
        mass = np.array(masses, dtype=np.float64)
        return Operators(name, module, call, shape, leaf_, view.astype(np.uint8), mass)

    def home(self, leaf: str) -> str:
        """The module that contains a leaf, by its name; the model itself if none does."""
        return next((name for name in enclosing(leaf) if name in self.modules), "")

    def edges(self) -> Edges:
        """A row for each cotangent that an operator passes to an argument."""
        wholes = self.source.traced.program.wholes()
        rows, masses = [], []
        for n, block in enumerate(self.source.blocks):
            for place, value in sorted(block.gives.items()):
                maker = self.of.get(wholes.get(value, value))
                if maker is not None:
                    rows.append((n, maker, place))
                    masses.append(self.source.size[value].mass)
        consumer, producer, position = columns(rows, 3)
        mass = np.array(masses, dtype=np.float64)
        total = np.bincount(producer, mass, len(self.source.blocks) + len(self.source.leaves))
        with np.errstate(all="ignore"):
            share = np.where(mass == 0, 0.0, mass / total[producer])
        return Edges(consumer, producer, position, mass, share.astype(np.float32))

    # Modules -------------------------------------------------------------------------------------

    def module_rows(self) -> tuple[Module, ...]:
        """The modules, in the order of their numbers."""
        first: dict[tuple[str, int], int] = {}
        calls, forms, parameters = self._calls(), self._forms(), self._parameters()
        found = []
        for name, n in self.modules.items():
            like, at = n, -1
            if name:
                parent = enclosing(name)[0]
                like, at = first.setdefault((parent, forms[name]), n), self.modules[parent]
            kind = self.source.traced.modules.get(name, "")
            found.append(Module(name, kind, at, calls[name], parameters[name], like))
        return tuple(found)

    @cached_property
    def _children(self) -> dict[str, list[str]]:
        """The direct children of each module; children come before their parents."""
        found: dict[str, list[str]] = {name: [] for name in reversed(self.modules)}
        for name in self.modules:
            if name:
                found[enclosing(name)[0]].append(name)
        return found

    def _calls(self) -> dict[str, int]:
        """The number of calls of each, from its operators. For a module that only calls others, it
        is the largest number of calls among its children.
        """
        seen: dict[str, set[int]] = {}
        for block in self.source.blocks:
            seen.setdefault(block.place.module, set()).add(block.place.call)
        found: dict[str, int] = {}
        for name, children in self._children.items():
            inside = max((found[child] for child in children), default=0) if name else 1
            held = self.source.traced.modules.get(name, "") in LISTS
            found[name] = len(seen.get(name, ())) or (0 if held else inside)
        return found

    def _parameters(self) -> dict[str, int]:
        """The number of parameter elements in each module and its children, tied ones once; also of
        parameters that the gradient does not reach.
        """
        sizes: dict[tuple[str, ...], int] = {}
        for leaf in filter(self.source.is_parameter, self.source.leaves):
            name = self.source.names[leaf.value]
            sizes[(name, *self.source.traced.aliases.get(name, ()))] = leaf.tensor.numel()
        known = {each for names in sizes for each in names}
        model, others = self.source.traced.model, dict[int, tuple[int, list[str]]]()
        for name, parameter in () if model is None else named_parameters(model):
            if name not in known and not is_lazy(parameter):
                others.setdefault(id(parameter), (parameter.numel(), []))[1].append(name)
        sizes |= {tuple(names): elements for elements, names in others.values()}
        found = dict.fromkeys(self.modules, 0)
        for names, elements in sizes.items():
            for module in {module for each in names for module in enclosing(each)}:
                if module in found:
                    found[module] += elements
        return found

    def _forms(self) -> dict[str, int]:
        """A number for the structure of each module: equal for modules with the same class,
        operators, shapes, parameters, and children of the same names and structures.
        """
        parts: dict[str, Counter[Hashable]] = {name: Counter() for name in self.modules}
        for block in self.source.blocks:
            shapes = tuple(self.source.shapes[value] for value in block.takes.values())
            parts[block.place.module][block.operator, shapes] += 1
        for leaf in self.source.leaves:
            name = self.source.names[leaf.value]
            home = self.home(name)
            parts[home][name.removeprefix(home), tuple(leaf.tensor.shape)] += 1
        number: Numbered[Hashable] = Numbered()
        found: dict[str, int] = {}
        for name, children in self._children.items():
            inside = tuple((child.rpartition(".")[2], found[child]) for child in children)
            own = frozenset(parts[name].items())
            found[name] = number((self.source.traced.modules.get(name, ""), own, inside))
        return found


def columns(rows: Sequence[Sequence[int]], many: int) -> list[Ints]:
    """Transpose rows of integers into ``many`` columns."""
    return list(np.array(rows, dtype=np.int32).reshape(-1, many).T.copy())
