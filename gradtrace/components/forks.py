"""Forks: where paths divide. An operator with several arguments is a fork if paths from some leaf
can leave it by more than one of them; so is a tensor whose slices are labelled.

A path visits an operator once and leaves it by one argument, so the branches of a fork part the
paths that come to it: their shares add up to 1.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from gradtrace.components.operator_names import MOVES, SCALES, spoken
from gradtrace.errors import TooLarge
from gradtrace.ir.passes.provenance import ComponentBits, analyse_provenance
from gradtrace.ir.program import Block, Program
from gradtrace.pytorch.wrapped_modules import ancestors, within

SUMS = ("AddBackward0", "SubBackward0", "RsubBackward0", "IndexAddBackward0", "IndexPutBackward0")
"""Sums. A chain of them, as ``a + b + c``, is one fork."""

CONCATENATIONS = ("CatBackward0", "StackBackward0")

CONTAINERS = ("ModuleList", "ModuleDict", "ParameterList", "ParameterDict")
"""Classes of modules that are never called; a branch is named by the module inside."""


IN_SERIES = re.compile("Norm|Drop|StochasticDepth|Identity|[A-Z]LU|ReLU|Sigmoid|Tanh")
"""Classes of modules that a branch is not named by: what they are applied to is."""

RECURRENT = ("RNN", "LSTM", "GRU")
"""Classes of modules whose results are concatenated time steps."""

FORK_BITS = 1024
"""Branches that are analysed at a time."""

MAX_FORK_LEAVES = 10_000_000
"""The most forks times leaves of a program."""


NO_FORKS = (
    "there is no fork: every parameter of this loss has one way to it only, so paths have no choice"
)


class Branch(NamedTuple):
    """A branch: its name, the arguments, as (block, position), or the slices that it stands for."""

    name: str
    arguments: tuple[tuple[int, int], ...] = ()
    slices: tuple[int, ...] = ()


@dataclass
class Fork:
    """A place where paths divide.

    ``kind`` is "sum", "concatenation", "label" or "product" (any other operator). ``choosers`` are
    the leaves whose paths can take at least two branches, ``inner`` says that some leaf lies on one
    branch only, ``between`` that branches are modules or labelled slices.
    """

    block: int
    module: str
    operator: str
    kind: str
    branches: list[Branch]
    wholes: list[int] = field(default_factory=list)  # the values of the branches
    choosers: frozenset[str] = frozenset()
    inner: bool = False
    between: bool = False
    name: str = ""


def find_forks(
    program: Program, names: Mapping[int, str], modules: Mapping[str, str]
) -> list[Fork]:
    """The forks of a program, from the leaves to the loss. ``names`` are those of the leaves, by
    value; ``modules`` are classes by name.

    Arithmetic within an activation, a norm or a recurrent cell is left out: products of which no
    leaf lies on one branch only, or of which a leaf is a branch, and sums of the former kind in
    modules without parameters of their own.
    """
    graph = _Graph.of(program, names, modules)
    owners = {"", *(name.rpartition(".")[0] for name in names.values())}
    found: list[Fork] = []
    for some in _batches(list(graph.candidates())):
        for fork in graph.divided(some):
            if fork.kind == "product":
                shown = fork.inner and not any(whole in names for whole in fork.wholes)
            else:
                shown = fork.inner or fork.kind == "label" or fork.module in owners
            if shown:
                found.append(fork)
    if len(found) * len(names) > MAX_FORK_LEAVES:
        raise TooLarge(
            f"there are {len(found):,} forks for {len(names):,} leaves; trace a shorter sequence "
            "or a part of the model"
        )
    _name_forks(found)
    return found[::-1]


def _batches(forks: list[Fork]) -> Iterator[list[Fork]]:
    """Forks some at a time, so that provenance bits take little memory."""
    ends = [total // FORK_BITS for total in accumulate(len(f.branches) for f in forks)]
    for batch in sorted(set(ends)):
        yield [fork for fork, end in zip(forks, ends) if end == batch]


def fork_bits(
    forks: Sequence[Fork], blocks: Sequence[Block], bits: ComponentBits, first: int = 1
) -> list[int]:
    """Add a bit for each branch, from bit ``first`` on; the branches' bits, in order."""
    found: list[int] = []
    for fork in forks:
        label = blocks[fork.block].label
        slices = [0] * len(label[1]) if label else []
        if fork.kind == "label" and label:
            slices = bits.slices.setdefault(fork.block, (label[0], slices))[1]
        for branch in fork.branches:
            bit = 1 << (first + len(found))
            found.append(bit)
            for argument in branch.arguments:
                bits.position[argument] = bits.position.get(argument, 0) | bit
            for n in branch.slices:
                slices[n] |= bit
    return found


# The structure of a program -----------------------------------------------------------------------


@dataclass
class _Graph:
    """A program as operators and arguments. ``takers``: the block that computed a value forward, by
    the value of its cotangent. ``wholes``: see ``Program.wholes``.
    """

    program: Program
    leaves: Mapping[int, str]
    modules: Mapping[str, str]
    takers: dict[int, tuple[int, int]]  # block, output slot
    wholes: dict[int, int]
    shared: frozenset[int]  # values with several users

    @classmethod
    def of(cls, program: Program, names: Mapping[int, str], modules: Mapping[str, str]) -> _Graph:
        takers = {
            value: (number, slot)
            for number, block in enumerate(program.blocks)
            for slot, value in block.takes.items()
        }
        wholes = program.wholes()
        return cls(program, names, modules, takers, wholes, frozenset(wholes.values()))

    def candidates(self) -> Iterator[Fork]:
        """Operators of which two arguments may come from one leaf, and labelled tensors."""
        blocks, absorbed = self.program.blocks, set[int]()
        for number, block in enumerate(blocks):
            if block.label is not None:
                yield from _label_fork(number, block)
            if len(block.gives) < 2 or number in absorbed:
                continue
            found = self._arguments(number, absorbed)
            once = sum(self._used_once(whole) for whole in found)
            if len(found) - once < 2:  # leaves that are used once have no choice
                continue
            kind = "sum" if block.operator in SUMS else "product"
            kind = "concatenation" if block.operator in CONCATENATIONS else kind
            branches = [Branch("", tuple(some)) for some in found.values()]
            yield Fork(number, block.place.module, block.operator, kind, branches, list(found))

    def _arguments(self, number: int, absorbed: set[int]) -> dict[int, list[tuple[int, int]]]:
        """The arguments of an operator, by value; those of a chain of sums are of one."""
        found: dict[int, list[tuple[int, int]]] = {}
        pending = self._given(number)
        while pending:
            block, position, value = pending.pop()
            inner = self._chained(number, value)
            if inner is None:
                whole = self.wholes.get(value, value)
                found.setdefault(whole, []).append((block, position))
            else:
                absorbed.add(inner)
                pending += self._given(inner)
        return found

    def _used_once(self, value: int) -> bool:
        """Whether a value is a leaf, or made of one leaf alone, and used nowhere else."""
        for _ in range(100):
            if value in self.shared or value in self.leaves:
                return value not in self.shared
            if value not in self.takers:
                return True  # a constant
            gives = self.program.blocks[self.takers[value][0]].gives
            if len(gives) != 1:
                break
            value = next(self.wholes.get(each, each) for each in gives.values())
        return False

    def _given(self, number: int) -> list[tuple[int, int, int]]:
        gives = self.program.blocks[number].gives
        return [(number, position, gives[position]) for position in sorted(gives, reverse=True)]

    def _chained(self, number: int, value: int) -> int | None:
        """The sum that made an argument of a sum, if nothing else uses it."""
        if value in self.wholes or value not in self.takers:
            return None
        outer, inner = self.program.blocks[number], self.takers[value][0]
        block = self.program.blocks[inner]
        alike = outer.operator in SUMS and block.operator in SUMS and block.place == outer.place
        return inner if alike and len(block.takes) == 1 else None

    def divided(self, forks: list[Fork]) -> Iterator[Fork]:
        """The forks at which a leaf has a choice, with the branches that it has, and names."""
        bits = ComponentBits({}, {}, {})
        branches = iter(fork_bits(forks, self.program.blocks, bits))
        may = analyse_provenance(self.program, bits).may
        for fork in forks:
            mine = [next(branches) for _ in fork.branches]
            mask = sum(mine)
            ways = {name: may[value] & mask for value, name in self.leaves.items()}
            choosers = {name: way for name, way in ways.items() if way & (way - 1)}
            taken = 0
            for way in choosers.values():
                taken |= way
            if not taken:
                continue
            fork.choosers = frozenset(choosers)
            fork.inner = any(way and name not in choosers for name, way in ways.items())
            keep = [n for n, bit in enumerate(mine) if bit & taken]
            if fork.kind != "label":
                whole = [may[fork.wholes[n]] for n in keep]
                skips = [not taken & ~way for way in whole]
                labels = self._branch_names(fork, [fork.wholes[n] for n in keep], skips)
                fork.branches = [fork.branches[n]._replace(name=x) for n, x in zip(keep, labels)]
                fork.wholes = [fork.wholes[n] for n in keep]
            called = {word for b in fork.branches for word in re.split(r" \(call |[(),] ?", b.name)}
            fork.between = fork.kind == "label" or not called.isdisjoint(self.modules)
            yield fork

    # Names ----------------------------------------------------------------------------------------

    def _branch_names(self, fork: Fork, wholes: list[int], skips: list[bool]) -> list[str]:
        """A name for each branch: a leaf, a module, or an operator; "skip" for a value that all
        other branches begin with too.
        """
        routes = [self._source(fork.module, whole) for whole in wholes]
        names = [route[0] for route in routes]
        if len(set(names)) > 1:
            word = "direct" if fork.kind == "product" else "skip"
            names = [word if skip else name for skip, name in zip(skips, names)]
        places: dict[str, list[int]] = {}
        for n, name in enumerate(names):
            places.setdefault(name, []).append(n)
        for name, alike in places.items():
            levels = [[routes[n][level] for n in alike] for level in (1, 2, 3)]
            if self.modules.get(fork.module) in RECURRENT and fork.kind == "concatenation":
                of = [fork.branches[fork.wholes.index(wholes[n])].arguments[0] for n in alike]
                levels = [[f"{fork.module} step {position}" for _, position in of]]
            levels.append([f"{name} #{k + 1}" for k in range(len(alike))])
            finer = next(some for some in levels if len(set(some)) == len(some))
            for n, text in zip(alike, finer if len(alike) > 1 else [name]):
                names[n] = text
        return names

    def _source(
        self, module: str, value: int, depth: int = 3, told: bool = True
    ) -> tuple[str, str, str, str]:
        """What made a value, as seen from a module: names that tell more and more. Arguments of an
        operator are ``told`` in the last two; their own are not, or every way to a value would be
        walked.
        """
        first, weak, slot, blocks = "", "", "", self.program.blocks
        for _ in range(100):  # back through operators of one argument, to a module or a leaf
            if value in self.leaves:
                first, leaf = first or weak, self.leaves[value]
                return (f"{first} of {leaf}" if first else leaf,) * 4
            if value not in self.takers:
                return (first or weak or "constant",) * 4
            number, out = self.takers[value]
            block, operator = blocks[number], spoken(blocks[number].operator)
            slot = f"[{out}]" if len(block.takes) > 1 else slot
            if not within(module, block.place.module):
                name, call = self._outer(block.place.module, module), block.place.call
                if depth and (inner := self._through(name, value)) is not None:
                    return self._source(module, inner, depth - 1)
                called = f"{name} (call {call + 1})"
                return name, name + slot, called, block.place.module + slot
            made = [self._behind(each) for each in block.gives.values()]
            used = [self.leaves[each] for each in made if each in self.leaves]
            if len(made) > 1 and len(used) >= len(made) - 1:
                name = min(used, key=lambda leaf: ("bias" in leaf, len(leaf)))
                return (f"{operator} of {name}",) + (f"{operator} of {name}{slot}",) * 3
            if len(made) != 1:
                if not first and (one := self._one_source(module, made, depth)):
                    return one
                arguments = [self._made(each, module) for each in made] if told else []
                finer = f"{operator}({', '.join(arguments)})"
                return first or operator, (first or operator) + slot, finer, finer + slot
            weak = weak or (operator if operator in SCALES else "")
            first = first or ("" if operator in MOVES | SCALES else operator)
            value = self.wholes.get(value := next(iter(block.gives.values())), value)
        return (first or weak,) * 4

    def _through(self, name: str, value: int) -> int | None:
        """The one value that a norm, a dropout or an activation made another of, if nothing else
        uses it: then what made that value is the branch.
        """
        if not IN_SERIES.search(self.modules.get(name, "")):
            return None
        inside, found, seen = [value], set[int](), set[int]()
        while inside and len(seen) < 100:
            number = self.takers[inside.pop()][0]
            given = {self.wholes.get(x, x) for x in self.program.blocks[number].gives.values()}
            for each in given - seen - self.leaves.keys():
                seen.add(each)
                if each in self.takers:
                    place = self.program.blocks[self.takers[each][0]].place.module
                    (inside.append if within(place, name) else found.add)(each)
        if inside or len(found) != 1:
            return None
        (entered,) = found
        return None if entered in self.shared and self._used_outside(entered, name) else entered

    def _used_outside(self, value: int, name: str) -> bool:
        """Whether an operator outside of a module uses a value."""
        users = (b for b in self.program.blocks if not within(b.place.module, name))
        return any(self.wholes.get(each, each) == value for b in users for each in b.gives.values())

    def _one_source(
        self, module: str, values: list[int], depth: int
    ) -> tuple[str, str, str, str] | None:
        """The module that all of some values come from, as in a rotation of what it gave."""
        if not depth or not 2 <= len(values) <= 4:
            return None
        routes = [self._source(module, self.wholes.get(v, v), depth - 1) for v in values]
        same = len({route[0] for route in routes}) == 1 and routes[0][0] in self.modules
        return routes[0] if same else None

    def _behind(self, value: int) -> int:
        """The value that an argument is a view of."""
        for _ in range(100):
            value = self.wholes.get(value, value)
            if value not in self.takers:
                break
            block = self.program.blocks[self.takers[value][0]]
            if len(block.gives) != 1 or spoken(block.operator) not in MOVES:
                break
            value = next(iter(block.gives.values()))
        return value

    def _made(self, value: int, module: str) -> str:
        """What made a value, as seen from a module: another module, an operator, or the leaf."""
        if value not in self.takers:
            return self.leaves.get(value, "constant")
        source = self._source(module, value, 0, told=False)[0]
        if source in self.modules:
            return source
        return spoken(self.program.blocks[self.takers[value][0]].operator)

    def _outer(self, name: str, module: str) -> str:
        """The outermost module around ``name`` that ``module`` is not inside of."""
        for above in ancestors(name):
            if not within(module, above) and self.modules.get(above) not in CONTAINERS:
                return above
        return name


def _label_fork(number: int, block: Block) -> Iterator[Fork]:
    """The slices of a labelled tensor, if they have two names at least."""
    assert block.label is not None
    slices: dict[str, list[int]] = {}
    for n, name in enumerate(block.label[1]):
        slices.setdefault("(no label)" if name is None else name, []).append(n)
    if len(slices) > 1:
        branches = [Branch(name, (), tuple(some)) for name, some in slices.items()]
        yield Fork(number, block.place.module, "label", "label", branches)


def _name_forks(forks: list[Fork]) -> None:
    """Name forks by module and operator, and where that is ambiguous by their branches."""
    for fork in forks:
        fork.name = f"{fork.module}.{spoken(fork.operator)}".removeprefix(".")
    kinds: dict[str, set[tuple[str, ...]]] = {}
    for fork in forks:
        kinds.setdefault(fork.name, set()).add(_branches(fork))
    for fork in forks:
        if len(kinds[fork.name]) > 1:
            fork.name += f" ({_described(fork)})"
    named: dict[str, dict[tuple[str, ...], int]] = {}
    for fork in forks:  # names may have been shortened
        number = named.setdefault(fork.name, {})
        n = number.setdefault(_branches(fork), len(number))
        fork.name += f" #{n + 1}" if n else ""


def _branches(fork: Fork) -> tuple[str, ...]:
    return tuple(branch.name for branch in fork.branches)


def _described(fork: Fork) -> str:
    """The branches in a few words, relative to the fork's module."""
    names = [b.name for b in fork.branches if b.name not in ("skip", "direct")]
    start = f"{fork.module}." if fork.module else ""
    short = [name.removeprefix(start) for name in names]
    return ", ".join(short if len(short) <= 3 else [short[0], "…", short[-1]])
