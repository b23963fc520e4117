"""The program as rows: modules, operators with the leaves, and edges with how much gradient each
operator passed to each of its arguments.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Mapping
from functools import cached_property
from typing import Any, Generic, TypeVar

import numpy as np
from torch.nn import Parameter
from torch.nn.parameter import is_lazy

from gradtrace.autodiff.names import enclosing
from gradtrace.flow import Size
from gradtrace.ir.program import Leaf
from gradtrace.pytorch.wrapped_modules import named_parameters
from gradtrace.report.encode import View, columns, floats
from gradtrace.traced import Trace
from gradtrace.types import Shape

LEAF = "AccumulateGrad"
"""Autograd's name of a leaf's node."""

INPUT = re.compile(r"leaf\d+")
"""The generated names of leaves that the user has not named."""

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

    ``size`` and ``shapes`` are those of each value. ``modules`` are the numbers of the modules:
    those of the model in its order, then others that operators refer to; parents come first.
    """

    def __init__(
        self, traced: Trace, size: Mapping[int, Size], shapes: Mapping[int, Shape]
    ) -> None:
        self.traced, self.size, self.value_shapes = traced, size, shapes
        self.blocks, self.leaves = traced.program.blocks, list(traced.leaves.values())
        self.words: Numbered[str] = Numbered()
        self.shapes: Numbered[Shape] = Numbered()
        first = len(self.blocks)
        self.leaf = {leaf.value: first + n for n, leaf in enumerate(self.leaves)}  # by value
        takes = ((v, n) for n, b in enumerate(self.blocks) for v in b.takes.values())
        self.of = {**dict(takes), **self.leaf}  # by value of an operator's output, or of a leaf
        number: Numbered[str] = Numbered()
        for name in ("", *traced.modules, *(block.place.module for block in self.blocks)):
            if name not in number.known:
                for each in reversed([name, *enclosing(name)]):
                    number(each)
        self.modules = number.known

    def name(self, leaf: Leaf) -> str:
        """The first name of a leaf."""
        return self.traced.names[leaf.value]

    def is_parameter(self, leaf: Leaf) -> bool:
        """Whether a leaf is a parameter; torch.func replaces some by tensors that are not."""
        named = bool(self.traced.modules) and not INPUT.fullmatch(self.name(leaf))
        return isinstance(leaf.tensor, Parameter) or named

    def home(self, leaf: str) -> str:
        """The module that contains a leaf, by its name; the model itself if none does."""
        return next((name for name in enclosing(leaf) if name in self.modules), "")

    def operators(self) -> View:
        """A row for each operator and leaf."""
        rows: list[tuple[int, ...]] = []
        for block in self.blocks:
            place = self.modules[block.place.module], block.place.call
            # In the program of an attribution blocks that lead to parameters take nothing.
            first = self.value_shapes[block.takes[min(block.takes)]] if block.takes else ()
            is_view = VIEWS.fullmatch(block.operator) is not None
            rows.append((self.words(block.operator), *place, self.shapes(first), -1, is_view))
        word = self.words(LEAF)
        for n, leaf in enumerate(self.leaves):
            home = self.modules[self.home(self.name(leaf))]
            rows.append((word, home, 0, self.shapes(tuple(leaf.tensor.shape)), n, 0))
        masses = [sum(self.size[v].mass for v in block.takes.values()) for block in self.blocks]
        masses += [self.size[leaf.value].mass for leaf in self.leaves]
        names = ("name", "module", "call", "shape", "leaf", "view")
        found: View = dict(zip(names, columns(rows, 6)))
        return {**found, "view": found["view"].astype(np.uint8), "mass": floats(masses)}

    def edges(self) -> View:
        """A row for each cotangent that an operator passes to an argument."""
        wholes = self.traced.program.wholes()
        rows, masses = [], []
        for n, block in enumerate(self.blocks):
            for place, value in sorted(block.gives.items()):
                maker = self.of.get(wholes.get(value, value))
                if maker is not None:
                    rows.append((n, maker, place))
                    masses.append(self.size[value].mass)
        consumer, producer, position = columns(rows, 3)
        mass = floats(masses)
        total = np.bincount(producer, mass, len(self.blocks) + len(self.leaves))
        with np.errstate(all="ignore"):
            share = np.where(mass == 0, 0.0, mass / total[producer]).astype(np.float32)
        ends = {"consumer": consumer, "producer": producer, "position": position}
        return {**ends, "mass": mass, "share": share}

    # Modules -------------------------------------------------------------------------------------

    def module_rows(self) -> list[dict[str, Any]]:
        """The modules, in the order of their numbers."""
        first: dict[tuple[str, int], int] = {}
        calls, forms, parameters = self._calls(), self._forms(), self._parameters()
        found = []
        for name, n in self.modules.items():
            like, at = n, -1
            if name:
                parent = enclosing(name)[0]
                like, at = first.setdefault((parent, forms[name]), n), self.modules[parent]
            row = {"name": name, "kind": self.traced.modules.get(name, ""), "parent": at}
            facts = {"calls": calls[name], "parameters": parameters[name], "like": like}
            found.append({**row, **facts})
        return found

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
        for block in self.blocks:
            seen.setdefault(block.place.module, set()).add(block.place.call)
        found: dict[str, int] = {}
        for name, children in self._children.items():
            inside = max((found[child] for child in children), default=0) if name else 1
            held = self.traced.modules.get(name, "") in LISTS
            found[name] = len(seen.get(name, ())) or (0 if held else inside)
        return found

    def _parameters(self) -> dict[str, int]:
        """The number of parameter elements in each module and its children, tied ones once; also of
        parameters that the gradient does not reach.
        """
        sizes: dict[tuple[str, ...], int] = {}
        for leaf in filter(self.is_parameter, self.leaves):
            name = self.name(leaf)
            sizes[(name, *self.traced.aliases.get(name, ()))] = leaf.tensor.numel()
        known = {each for names in sizes for each in names}
        model, others = self.traced.model, dict[int, tuple[int, list[str]]]()
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
        for block in self.blocks:
            shapes = tuple(self.value_shapes[value] for value in block.takes.values())
            parts[block.place.module][block.operator, shapes] += 1
        for leaf in self.leaves:
            name = self.name(leaf)
            home = self.home(name)
            parts[home][name.removeprefix(home), tuple(leaf.tensor.shape)] += 1
        number: Numbered[Hashable] = Numbered()
        found: dict[str, int] = {}
        for name, children in self._children.items():
            inside = tuple((child.rpartition(".")[2], found[child]) for child in children)
            own = frozenset(parts[name].items())
            found[name] = number((self.traced.modules.get(name, ""), own, inside))
        return found
