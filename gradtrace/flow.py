"""How large the gradient is along the depth of a model, and where it vanishes, explodes or dies.

A backward pass multiplies long sequences of numbers: small ones make the gradient vanish, large
ones make it explode. One streaming pass measures every cotangent, ``‖g‖ = √Σ g[i]²``, and keeps
that alone. What one reads off it:

- **Activation side.** An operator above leaves that only moves their elements, each once (the
  transpose of a weight, a slice of a fused one, a concatenation, a cast), lies beside the way that
  gradient takes through the activations; so do a hook on a leaf and what
  ``torch.nn.utils.parametrize`` makes of leaves. Every other operator lies on it. Without an input
  that requires grad, it ends where the last parameter is used.
- **Depth** of an operator on the activation side: the most operators between it and the loss, whose
  own is 0.
- **Profile**: for each depth the operator with the largest norm. Its *top* is the median of the
  first three depths of the model's body (what follows the loss function), its *end* the median of
  the last tenth, so that no odd operator decides.
- **Uses** of a leaf at many depths, as in a recurrent net, are a sequence of their own: below it
  the profile may be as large as ever, since each step hands to its input what it gets.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import takewhile
from math import hypot, inf, isfinite, isnan, nan, prod, sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.linalg import vector_norm
from torch.nn import Parameter

from gradtrace.engine import gradient_of
from gradtrace.errors import NotScalar, UnknownName
from gradtrace.maps import Map
from gradtrace.program import HOOKS, Block, Program
from gradtrace.tables import Column, Table

FACTOR = 1000.0
"""A fall by more between top and end is called vanishing, a rise by more exploding. Healthy nets
of 30 layers and tiny models of 23 architectures stay within 20."""

MOSTLY = 0.95
"""A module is mostly dead if this share of the gradient's entries at its output is 0, and the
operator above it (a ReLU) made this share of them so. Of a healthy ReLU it is about a half."""

REPEATS = 8
"""From so many depths on at which a leaf is used, its uses are looked at as a sequence."""

FEW = 3
"""The depths that the top is the median of, and the least that a fall or a rise is read off."""

FAINT = 2.0**10
"""What becomes 0 within this factor of the smallest float did so by underflow: it vanished. What
was larger met a slope or a weight of 0: it is dead."""

NEAR = 1.05
"""A change by less is neither a fall nor a rise."""

SHOWN = 3
"""The most modules that a sentence names."""


# The result --------------------------------------------------------------------------------------


class Level(NamedTuple):
    """The operator of a depth at whose output the gradient's norm is largest.

    ``largest`` is ``max |g[i]|``, ``zeros`` the share of entries that are exactly 0.
    """

    depth: int
    norm: float
    operator: str
    module: str
    entries: int
    largest: float
    zeros: float

    @property
    def rms(self) -> float:
        """The root of the mean square: ``norm / √entries``."""
        return self.norm / sqrt(self.entries) if self.entries else 0.0

    @property
    def where(self) -> str:
        """The module's name in quotes; outside any, the operator's."""
        return f"'{self.module}'" if self.module else self.operator


@dataclass(frozen=True)
class Row:
    """The gradient at one module, counting the operators that no module inside it made.

    ``norm`` is the largest at its output: of the cotangents that reach its operators from outside
    the call. ``first`` and ``last`` are the same of its first and its last call alone. ``handed``
    is the largest that its operators give to those of other modules or calls, or to an input (None:
    nothing lies below), ``own`` that of all its parameters' gradients together (None: it has none).
    ``depth`` is the least of its operators', ``zeros`` the share of exact zeros at its output,
    ``verdict`` one of "", "dead", "mostly dead", "vanishing", "exploding" and "not finite".
    """

    module: str
    kind: str
    calls: int
    depth: int
    norm: float
    first: float
    last: float
    handed: float | None
    zeros: float
    own: float | None
    verdict: str = ""

    @property
    def gain(self) -> float | None:
        """``handed / norm``; None if nothing came or nothing lies below."""
        return self.handed / self.norm if self.handed is not None and self.norm else None


@dataclass(frozen=True, repr=False)
class Flow:
    """The gradient along depth: ``profile`` from the loss on, ``rows`` a module each, nearest to
    the loss first, ``findings`` what there is to say, in sentences.
    """

    profile: tuple[Level, ...]
    rows: tuple[Row, ...]
    findings: tuple[str, ...]

    @property
    def verdict(self) -> str:
        """Whether the gradient vanishes, explodes or dies, where, and what one can do."""
        return " ".join(self.findings)

    def __getitem__(self, module: str) -> Row:
        for row in self.rows:
            if row.module == module:
                return row
        known = ", ".join(repr(row.module) for row in self.rows[:8])
        raise UnknownName(f"no module {module!r} made operators of this loss; there are {known}")

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def table(self) -> Table:
        """One row a module; the verdict below it."""
        many = any(row.calls > 1 for row in self.rows)
        columns = (
            Column("module"),
            Column("class"),
            *([Column("calls", "count")] if many else []),
            Column("depth", "count"),
            Column("norm", "number"),
            *([Column("first call", "number"), Column("last call", "number")] if many else []),
            Column("handed on", "number"),
            Column("gain", "number"),
            Column("zeros", "share"),
            Column("parameters", "number"),
            Column("verdict"),
        )
        rows = tuple(
            (
                _name(row),
                row.kind,
                *([row.calls] if many else []),
                row.depth,
                row.norm,
                *([row.first, row.last] if many else []),
                row.handed,
                row.gain,
                row.zeros,
                row.own,
                row.verdict,
            )
            for row in self.rows
        )
        deep = f"{len(self.profile):,} operators deep"
        return Table(f"Gradient flow ({deep})", columns, rows, self.findings)

    def __str__(self) -> str:
        return str(self.table())

    def __repr__(self) -> str:
        return f"Flow({len(self.rows)} modules, {len(self.profile):,} deep: {self.verdict})"

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()

    def to_pandas(self) -> Any:
        """One row a module, as a pandas.DataFrame."""
        return self.table().to_pandas()

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON has it; numbers that are not finite as strings."""
        return {
            "profile": [_plain(level._asdict()) for level in self.profile],
            "rows": [_plain(asdict(row)) for row in self.rows],
            "findings": list(self.findings),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Flow:
        """What ``to_dict`` gave."""
        return cls(
            tuple(Level(**_parsed(level)) for level in data["profile"]),
            tuple(Row(**_parsed(row)) for row in data["rows"]),
            tuple(map(str, data["findings"])),
        )


WORDS = ("operator", "module", "kind", "verdict")
COUNTS = ("depth", "entries", "calls")


def _plain(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: str(value) if isinstance(value, float) and not isfinite(value) else value
        for key, value in fields.items()
    }


def _parsed(fields: Mapping[str, Any]) -> dict[str, Any]:
    def parsed(key: str, value: Any) -> Any:
        if value is None:
            return None
        return str(value) if key in WORDS else int(value) if key in COUNTS else float(value)

    return {key: parsed(key, value) for key, value in fields.items()}


def flow_of(
    program: Program,
    names: Mapping[int, str],
    classes: Mapping[str, str],
    seed: Tensor | None = None,
) -> Flow:
    """The gradient along the depth of a program, in one pass that keeps no cotangent.

    ``names`` are those of the leaves by value, ``classes`` those of a model's modules by name, and
    ``seed`` weighs the elements of the loss in place of the program's own.

    >>> import torch, gradtrace
    >>> y = x = torch.ones(4, requires_grad=True)
    >>> for _ in range(30):
    ...     y = (0.5 * y).tanh()
    >>> program = gradtrace.program(y.sum())
    >>> names = {leaf.value: f"leaf{i}" for i, leaf in enumerate(program.leaves)}
    >>> flow = flow_of(program, names, {})
    >>> print(flow.verdict)
    Vanishing: the gradient falls from 2 at depth 1 (TanhBackward0) to 7.3e-09 at depth 57 ...
    >>> [round(level.norm, 3) for level in flow.profile[:4]]
    [1.0, 2.0, 2.0, 1.0]
    """
    seed = program.seed if seed is None else seed.to(program.seed)
    if seed.shape != program.seed.shape:
        raise NotScalar(
            f"the seed has shape {tuple(seed.shape)} and the loss {tuple(program.seed.shape)}; "
            "pass a weight for each element of the loss"
        )
    size = measure(program, seed)
    wiring = Wiring(program, size)
    flow = Measured(wiring, size, losses_of(wiring, size))
    modules = Modules(flow, names, classes)
    return Flow(flow.profile, modules.rows, tuple(Report(flow, modules).findings()))


# The pass ----------------------------------------------------------------------------------------


class Size(NamedTuple):
    """What is kept of a cotangent."""

    norm: float
    largest: float
    nonzero: int
    entries: int
    dtype: torch.dtype


def measure(program: Program, seed: Tensor) -> dict[int, Size]:
    """The sizes of all cotangents that operators take and give, each dropped after its last use."""
    last, wanted = program.last_uses(), _wanted(program)
    values, found = {program.root: seed}, dict[int, Tensor]()
    shapes = {program.root: (seed.numel(), seed.dtype)}
    with torch.no_grad():
        found[program.root] = sizes(seed)
        for n, step in enumerate(program.steps()):
            values[step.out] = gradient_of(step, values)
            if step.out in wanted:
                found[step.out] = sizes(values[step.out])
                shapes[step.out] = (prod(step.shape), step.dtype)
            for value in (step.out, *(term.value for term in step.terms)):
                if last.get(value, -1) <= n:
                    values.pop(value, None)
    numbers = (each.tolist() for each in _together(list(found.values())))
    return {value: Size(a, b, int(c), *shapes[value]) for value, (a, b, c) in zip(found, numbers)}


def _wanted(program: Program) -> set[int]:
    wanted = {leaf.value for leaf in program.leaves}
    for block in program.blocks:
        wanted.update(block.takes.values(), block.gives.values())
    return wanted


def _together(many: list[Tensor]) -> Iterable[Tensor]:
    """Moved to the processor in one go: to wait for each would cost more than to compute it."""
    devices = {each.device for each in many}
    return torch.stack(many).cpu() if len(devices) == 1 else (each.cpu() for each in many)


def sizes(x: Tensor) -> Tensor:
    """``‖x‖``, ``max |x[i]|`` and how many entries are not 0; in float64, where squares of all
    smaller floats fit. Those of float64 do not, so there ``‖x‖ = m ‖x/m‖`` with m the largest.
    """
    if not x.numel():
        return torch.zeros(3, dtype=torch.float64, device=x.device)
    largest = vector_norm(x, inf).double()
    if x.dtype is torch.float64:
        unit = torch.where((largest > 0) & largest.isfinite(), largest, 1.0)
        norm = vector_norm(x / unit) * unit
    else:
        norm = vector_norm(x, dtype=torch.float64)
    return torch.stack([norm, largest, x.count_nonzero().double()])


# Who hands what to whom --------------------------------------------------------------------------


class Handed(NamedTuple):
    """A cotangent that an operator gives: to an operator of the activation side, or to a leaf."""

    giver: int
    value: int
    whole: int  # the value it is part of, if others give to the same argument
    taker: int | None
    leaf: int | None


class Wiring:
    """Operators by number, the edges between them, which are on the activation side, how deep."""

    def __init__(self, program: Program, size: Mapping[int, Size]) -> None:
        self.program = program
        self.size = size
        self.blocks = program.blocks
        self.takers = {v: n for n, block in enumerate(self.blocks) for v in block.takes.values()}
        self.wholes = self._wholes()
        self.aside = self._aside()
        self.edges = list(self._edges())
        self.depth = self._depth()

    def _wholes(self) -> dict[int, int]:
        """The sum that a value ends up in, if it is added to others."""
        found: dict[int, int] = {}
        for block in reversed(self.blocks):
            for step in reversed(block.merges):
                for term in step.terms:
                    found[term.value] = found.get(step.out, step.out)
        return found

    def _aside(self) -> dict[int, int]:
        """The operators beside the activations, with (one of) the leaves below; never the loss."""
        leaves = {leaf.value for leaf in self.program.leaves}
        found: dict[int, int] = {}
        for number in range(len(self.blocks) - 1, 0, -1):
            block = self.blocks[number]
            wholes = [self.wholes.get(value, value) for value in block.gives.values()]
            below = [w if w in leaves else found.get(self.takers.get(w, -1)) for w in wholes]
            if below and below[0] is not None and None not in below and self._prepares(block):
                found[number] = below[0]
        return found

    def _prepares(self, block: Block) -> bool:
        """Whether an operator above leaves only makes ready what others use."""
        parametrised = "parametrizations" in block.place.module.split(".")
        return block.operator == HOOKS or parametrised or self._views(block)

    def _views(self, block: Block) -> bool:
        """Whether an operator only moves elements, all of them and each once."""
        taken, given = (
            sum(self.size[value].nonzero for value in values.values())
            for values in (block.takes, block.gives)
        )
        return taken == given and all(m.moves for m in maps_of(block))

    def _edges(self) -> Iterator[Handed]:
        for number, block in enumerate(self.blocks):
            if number in self.aside:
                continue
            for value in block.gives.values():
                whole = self.wholes.get(value, value)
                taker = self.takers.get(whole)
                if taker is None or taker in self.aside:
                    leaf = whole if taker is None else self.aside[taker]
                    yield Handed(number, value, whole, None, leaf)
                else:
                    yield Handed(number, value, whole, taker, None)

    def _depth(self) -> dict[int, int]:
        found = {0: 0} if self.blocks else {}
        for edge in self.edges:  # givers come before takers
            if edge.taker is not None:
                found[edge.taker] = max(found.get(edge.taker, 0), found[edge.giver] + 1)
        return found

    def enters(self, edge: Handed) -> int | None:
        """The operator that an edge leads to, if that is in another call or another module."""
        if edge.taker is None or self.blocks[edge.taker].place == self.blocks[edge.giver].place:
            return None
        return edge.taker


def maps_of(block: Block) -> Iterator[Map]:
    """The maps of an operator's formula."""
    return (term.map for step in block.steps for term in step.terms)


def elementwise(block: Block) -> bool:
    """Whether an operator weighs or drops every element by itself, as activation functions do."""
    single = len(block.takes) == 1 == len(block.gives)
    return single and all(m.inputs == m.outputs and (m.stays or m.moves) for m in maps_of(block))


# What became 0 -----------------------------------------------------------------------------------


class Lost(NamedTuple):
    """Where a gradient of exactly 0 was still different from 0; ``faint``: and very small."""

    block: int
    faint: bool


def losses_of(wiring: Wiring, size: Mapping[int, Size]) -> dict[int, Lost]:
    """For every value that is 0, where it became so."""
    lost: dict[int, Lost] = {}
    for number, block in enumerate(wiring.blocks):
        takes = block.takes.values()
        before = [lost[value] for value in takes if value in lost]
        alive = [size[value] for value in takes if size[value].largest]
        for value in block.gives.values():
            if size[value].entries and not size[value].nonzero:
                here = Lost(number, underflows(block, alive, size[value]))
                lost[value] = here if alive or not before else _of(before)
        for step in block.merges:
            if all(term.value in lost for term in step.terms):
                lost[step.out] = _of([lost[term.value] for term in step.terms])
    return lost


def underflows(block: Block, takes: Sequence[Size], give: Size) -> bool:
    """Whether what an operator gives is 0 since it is too small for a float."""
    if not takes or (
        all(m.moves for m in maps_of(block)) and all(take.dtype is give.dtype for take in takes)
    ):
        return False
    kind = torch.finfo(give.dtype)
    return max(take.largest for take in takes) <= FAINT * kind.smallest_normal * kind.eps


def _of(many: Sequence[Lost]) -> Lost:
    return next((each for each in many if each.faint), many[0])


# Along depth -------------------------------------------------------------------------------------


class Change(NamedTuple):
    """From where to where the gradient falls or rises; ``uses`` of a leaf, if it is over these."""

    first: Level
    last: Level
    uses: int = 0

    @property
    def ratio(self) -> float:
        """``last / first``."""
        return self.last.norm / self.first.norm if self.first.norm else nan


@dataclass
class Measured:
    """A program with the sizes of its cotangents, and where those that are 0 became so."""

    wiring: Wiring
    size: dict[int, Size]
    lost: dict[int, Lost]

    @cached_property
    def _peaks(self) -> list[int]:
        """For each depth the operator with the largest norm, the first of equals."""
        found: dict[int, int] = {}
        for number, depth in self.wiring.depth.items():
            best = found.setdefault(depth, number)
            if _rank(self._at(number).norm) > _rank(self._at(best).norm):
                found[depth] = number
        return [found[depth] for depth in sorted(found)]

    def _value(self, number: int) -> int:
        """The largest cotangent at an operator's output."""
        takes = self.wiring.blocks[number].takes.values()
        return max(takes, key=lambda value: _rank(self.size[value].norm))

    def _at(self, number: int) -> Size:
        return self.size[self._value(number)]

    def level(self, number: int) -> Level:
        """An operator as a level."""
        block, size = self.wiring.blocks[number], self._at(number)
        place = (self.wiring.depth[number], size.norm, block.operator, block.place.module)
        return Level(*place, size.entries, size.largest, _share(size.entries, size.nonzero))

    @cached_property
    def profile(self) -> tuple[Level, ...]:
        """A level for each depth."""
        return tuple(map(self.level, self._peaks))

    @cached_property
    def body(self) -> tuple[Level, ...]:
        """The profile without the loss function and without depths where all is dead.

        The loss function is what comes first and is in no module; if that is the greater part of
        the profile, what comes first and is a single number. It is no part of the model, and its
        mean over a batch would look like a fall.
        """
        outside = _leading(not level.module for level in self.profile)
        single = _leading(level.entries == 1 for level in self.profile)
        head = next((n for n in (outside, single) if 2 * n <= len(self.profile)), 0)
        return tuple(self.level(number) for number in self._peaks[head:] if self._lives(number))

    def _lives(self, number: int) -> bool:
        """Whether gradient comes to an operator, or would if floats were finer."""
        value = self._value(number)
        return self.size[value].nonzero > 0 or self.faint(value)

    def faint(self, value: int) -> bool:
        """Whether a value is 0 by underflow."""
        return value in self.lost and self.lost[value].faint

    @cached_property
    def along(self) -> Change | None:
        """From the top to the end; None if there is too little between."""
        if len(self.body) < FEW:
            return None
        few = FEW if len(self.body) >= 2 * FEW else 1
        tenth = max(few, len(self.body) // 10) | 1
        return Change(_median(self.body[:few]), _median(self.body[-tenth:]))

    @cached_property
    def repeated(self) -> list[Change]:
        """From the nearest uses of a leaf to the farthest, where there are many."""
        uses: dict[int, dict[int, Level]] = {}
        for edge in self.wiring.edges:
            if edge.leaf is not None and self._lives(edge.giver):
                at, of = self.level(edge.giver), uses.setdefault(edge.leaf, {})
                of[at.depth] = max(of.get(at.depth, at), at, key=lambda level: _rank(level.norm))
        sequences = ([of[depth] for depth in sorted(of)] for of in uses.values())
        return [
            Change(_median(levels[:FEW]), _median(levels[-FEW:]), len(levels))
            for levels in sequences
            if len(levels) >= REPEATS
        ]


def _leading(tests: Iterable[bool]) -> int:
    """How many are true before the first that is not."""
    return sum(1 for _ in takewhile(bool, tests))


def _rank(norm: float) -> float:
    """What is not a number counts most."""
    return inf if isnan(norm) else norm


def _share(all_: int, others: int) -> float:
    """The part of all that is none of the others."""
    return 1 - others / all_ if all_ else 0.0


def _median(levels: Sequence[Level]) -> Level:
    return sorted(levels, key=lambda level: _rank(level.norm))[len(levels) // 2]


# Module by module --------------------------------------------------------------------------------


@dataclass
class Gathered:
    """The cotangents that reach and leave the operators of one module."""

    depth: int
    calls: set[int] = field(default_factory=set)
    reached: dict[int, dict[int, None]] = field(default_factory=dict)  # call: values, in order
    handed: list[int] = field(default_factory=list)
    own: list[int] = field(default_factory=list)
    dropped: float = 0.0  # the share of entries that an operator above made 0, at most

    @property
    def values(self) -> list[int]:
        """All that reach it."""
        return [value for call in self.reached.values() for value in call]

    @property
    def out(self) -> list[int]:
        """All that leave it."""
        return self.handed + self.own


@dataclass
class Modules:
    """What a measured program says of each module."""

    flow: Measured
    names: Mapping[int, str]
    classes: Mapping[str, str]

    @cached_property
    def gathered(self) -> dict[str, Gathered]:
        """By module, nearest to the loss first."""
        wiring, found = self.flow.wiring, dict[str, Gathered]()
        for number, depth in sorted(wiring.depth.items(), key=lambda item: item[1]):
            module, call = wiring.blocks[number].place
            found.setdefault(module, Gathered(depth)).calls.add(call)
        if wiring.blocks:
            self._enter(found, 0, wiring.program.root)
        for edge in wiring.edges:
            taker = wiring.enters(edge)
            if taker is not None:
                into = self._enter(found, taker, edge.whole)
                into.dropped = max(into.dropped, self._dropped(edge))
            if taker is not None or edge.leaf in self._inputs:
                found[wiring.blocks[edge.giver].place.module].handed.append(edge.value)
        for leaf in wiring.program.leaves:
            owner = next(filter(found.__contains__, self._owners(leaf.value)), None)
            if owner is not None and leaf.value not in self._inputs:
                found[owner].own.append(leaf.value)
        return found

    def _enter(self, found: dict[str, Gathered], number: int, value: int) -> Gathered:
        module, call = self.flow.wiring.blocks[number].place
        found[module].reached.setdefault(call, {})[value] = None
        return found[module]

    def _dropped(self, edge: Handed) -> float:
        """The share of entries that an elementwise operator made 0."""
        block = self.flow.wiring.blocks[edge.giver]
        if not elementwise(block):
            return 0.0
        (take,) = block.takes.values()
        return _share(self.flow.size[take].nonzero, self.flow.size[edge.value].nonzero)

    @cached_property
    def _inputs(self) -> set[int | None]:
        """Leaves that are no parameters; without a model, none is known to be an input."""
        return {
            leaf.value
            for leaf in self.flow.wiring.program.leaves
            if self.classes
            and not isinstance(leaf.tensor, Parameter)
            and "." not in self.names.get(leaf.value, "")
        }

    def _owners(self, leaf: int) -> Iterator[str]:
        """The modules that hold a leaf, innermost first."""
        name = self.names.get(leaf, "")
        while name:
            name = name.rpartition(".")[0]
            yield name

    # Rows ----------------------------------------------------------------------------------------

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """One for each module."""
        return tuple(self._row(module, found) for module, found in self.gathered.items())

    def _row(self, module: str, found: Gathered) -> Row:
        calls = [self._most(found.reached[call]) for call in sorted(found.reached)]
        return Row(
            module,
            self.classes.get(module, ""),
            len(found.calls),
            found.depth,
            self._most(found.values),
            calls[0],
            calls[-1],
            self._most(found.handed) if found.handed else None,
            self._zeros(found),
            hypot(*(self.flow.size[value].norm for value in found.own)) if found.own else None,
            self._word(module, found),
        )

    def _most(self, values: Iterable[int]) -> float:
        return max((self.flow.size[value].norm for value in values), key=_rank)

    def _zeros(self, found: Gathered) -> float:
        reached = [self.flow.size[value] for value in found.values]
        return _share(sum(size.entries for size in reached), sum(size.nonzero for size in reached))

    def _word(self, module: str, found: Gathered) -> str:
        if not isfinite(self._most(found.values)):
            return "not finite"
        if self._all_zero(found.values) or self._all_zero(found.out):
            return "vanishing" if any(map(self.flow.faint, found.values + found.out)) else "dead"
        if min(found.dropped, self._zeros(found)) >= MOSTLY:
            return "mostly dead"
        return self._far(module, found)

    def _all_zero(self, values: Iterable[int]) -> bool:
        """Whether there are entries, and all are 0."""
        entries = [self.flow.size[value] for value in values if self.flow.size[value].entries]
        return bool(entries) and not any(size.nonzero for size in entries)

    def _far(self, module: str, found: Gathered) -> str:
        """Whether the gradient at a module is far below the top or above it, at its nearest call or
        after many uses.
        """
        ratios = [change.ratio for change in self.flow.repeated if change.first.module == module]
        if self.flow.along:
            top, wiring = self.flow.along.first.norm, self.flow.wiring
            start = self.flow.body[0].depth
            body = [v for v in found.values if wiring.depth[wiring.takers[v]] >= start]
            ratios += [self._most(body) / top] if body and top else []
        if any(ratio < 1 / FACTOR for ratio in ratios):
            return "vanishing"
        return "exploding" if any(ratio > FACTOR for ratio in ratios) else ""


# In words ----------------------------------------------------------------------------------------

KEEP = (
    "Skip connections, normalisation, gated cells or another initialisation (He for ReLU, Xavier "
    "for tanh) keep it up."
)
TAME = (
    "Clip it (torch.nn.utils.clip_grad_norm_), take smaller steps, or remove the cause: "
    "normalisation or a smaller initialisation (He for ReLU, Xavier for tanh)."
)
REVIVE = "A smaller learning rate, another initialisation or a leaky slope bring it back."


@dataclass
class Report:
    """What there is to say, in sentences."""

    flow: Measured
    modules: Modules

    def findings(self) -> Iterator[str]:
        """One finding, or several, the dead parts first."""
        alone = self._nonfinite() or self._nothing()
        if alone:
            yield alone
            return
        dead = [text for text in (self._dead(), self._mostly()) if text]
        yield from dead
        changes = [change for change in (self.flow.along, *self.flow.repeated) if change]
        fall = next((change for change in changes if change.ratio < 1 / FACTOR), None)
        rise = next((change for change in changes if change.ratio > FACTOR), None)
        if fall:
            yield f"Vanishing: {self._told(fall)}{self._rest(fall)}. {KEEP}"
        if rise:
            yield f"Exploding: {self._told(rise)}. {TAME}"
        if not (fall or rise):
            yield from self._healthy(bool(dead))

    # Numbers -------------------------------------------------------------------------------------

    def _told(self, change: Change, subject: str = "the gradient") -> str:
        """From where to where, and how fast."""
        first, last, ratio = change.first, change.last, change.ratio
        if not last.norm and not change.uses:
            last = next(level for level in self.flow.body if not level.norm)
        verb = "goes" if 1 / NEAR < ratio < NEAR else "rises" if ratio > 1 else "falls"
        uses = f"through {change.uses:,} uses of the same weights " if change.uses else ""
        start = f"{uses}{subject} {verb} from {first.norm:.2g} at"
        if not last.norm:
            return f"{start} {first.where} to exactly 0 at depth {last.depth:,} ({last.where})"
        here, there = first.where, last.where
        if here == there:
            here, there = (f"depth {at.depth:,} ({at.where})" for at in (first, last))
        factor, over = max(ratio, 1 / ratio), last.depth - first.depth
        return (
            f"{start} {here} to {last.norm:.2g} at {there} (a factor of {factor:.2g} over {over:,} "
            f"operators, about {factor ** (1 / over):.3g} an operator)"
        )

    def _rest(self, fall: Change) -> str:
        """What is below a fall and has its gradient from elsewhere."""
        deepest = self.flow.profile[-1]
        if deepest.norm < fall.first.norm / FACTOR:
            return ""
        return f"; deeper down, {deepest.where} gets {deepest.norm:.2g} by other ways"

    def _healthy(self, dead: bool) -> Iterator[str]:
        change, deep = self.flow.along, len(self.flow.profile)
        if change:
            start = "Elsewhere the" if dead else "The"
            yield f"{start} gradient neither vanishes nor explodes: {self._told(change, 'it')}."
        elif not dead:
            yield f"The graph is {_count(deep, 'operator')} deep, too few to vanish or explode."
        silent = sum(not level.largest for level in self.flow.profile)
        if silent and not dead:
            yield f"At {silent:,} of {deep:,} depths it is exactly 0."
        for word, much in (("vanishing", "less"), ("exploding", "more")):
            far = [_name(row) for row in self.modules.rows if row.verdict == word]
            if far:
                gets = "gets" if len(far) == 1 else "get"
                yield f"Apart from that, {_listed(far)} {gets} over {FACTOR:,.0f} times {much}."

    # What is 0, or no number ---------------------------------------------------------------------

    def _nonfinite(self) -> str:
        """Where NaN or infinity first appears."""
        size, blocks = self.flow.size, self.flow.wiring.blocks
        bad = {value for value, found in size.items() if not isfinite(found.norm)}
        if not bad:
            return ""
        makers = (
            (number, value)
            for number, block in enumerate(blocks)
            if bad.isdisjoint(block.takes.values())
            for value in block.gives.values()
            if value in bad
        )
        root = self.flow.wiring.program.root
        number, value = next(makers, (None, min(bad)))
        kind = "NaN" if isnan(size[value].norm) else "infinity"
        if root in bad:
            return f"The gradient is not finite: the loss itself is weighed with {kind}."
        where = (
            "a sum of gradients" if number is None else f"what {self._operator(number)} hands on"
        )
        return (
            f"The gradient is not finite: {kind} first appears in {where}. Look at the values that "
            "go into it (a division by 0, a logarithm or root of 0, an overflow?)."
        )

    def _nothing(self) -> str:
        """Why no leaf gets any gradient."""
        size, program = self.flow.size, self.flow.wiring.program
        if any(size[leaf.value].nonzero for leaf in program.leaves):
            return ""
        if not size[program.root].nonzero:
            return "No gradient flows: the loss itself is weighed with 0."
        places = [self.flow.lost[v.value] for v in program.leaves if v.value in self.flow.lost]
        why = self._why(min(places)) if places else "Nothing but zeros reaches them."
        return f"No gradient flows: that of every leaf is exactly 0. {why}"

    def _dead(self) -> str:
        rows = [row for row in self.modules.rows if row.verdict == "dead"]
        silent = [_name(row) for row in rows if not row.norm]
        if not rows:
            return ""
        found = self.modules.gathered
        places = [
            self.flow.lost[value]
            for row in rows
            for value in (found[row.module].out if row.norm else found[row.module].values)
            if value in self.flow.lost
        ]
        why = self._why(min(places)) if places else "What reaches them adds up to 0."
        if silent:
            gets = "gets" if len(silent) == 1 else "get"
            return f"Dead: {_listed(silent)} {gets} no gradient at all. {why}"
        return f"Dead: {_listed([_name(row) for row in rows])} hands no gradient on. {why}"

    def _why(self, lost: Lost) -> str:
        """What an operator did that hands on nothing but zeros."""
        block = self.flow.wiring.blocks[lost.block]
        where = self._operator(lost.block)
        reached = sum(self.flow.size[value].nonzero for value in block.takes.values())
        if lost.faint:
            return f"It falls below the smallest float at {where}. {KEEP}"
        if elementwise(block) and not block.operator.startswith(("Mul", "Div")):
            return (
                f"{where} has slope 0 at all {_count(reached, 'entry')} that the gradient comes to "
                f"(a dead ReLU, a saturated unit, a closed gate?). {REVIVE}"
            )
        if all(m.moves for m in maps_of(block)):
            return f"{where} cuts it off: the loss does not use that part."
        return f"{where} multiplies it with zeros (weights or factors that start at 0?)."

    def _mostly(self) -> str:
        rows = [row for row in self.modules.rows if row.verdict == "mostly dead"]
        if not rows:
            return ""
        worst = max(rows, key=lambda row: row.zeros)
        return (
            f"Mostly dead: at the output of {_listed([_name(row) for row in rows])} up to "
            f"{worst.zeros:.1%} of the gradient is exactly 0 (ReLUs that seldom open?). {REVIVE}"
        )

    def _operator(self, number: int) -> str:
        block = self.flow.wiring.blocks[number]
        module = block.place.module
        return f"{block.operator} (in '{module}')" if module else block.operator


def _name(row: Row) -> str:
    return row.module or "(top)"


def _count(n: int, word: str) -> str:
    """``1 operator``, ``2 operators``, ``3 entries``."""
    many = f"{word[:-1]}ies" if word.endswith("y") else f"{word}s"
    return f"{n:,} {word if n == 1 else many}"


def _listed(names: Sequence[str]) -> str:
    """``'a', 'b' and 2 more``."""
    shown = [f"'{name}'" for name in names[:SHOWN]]
    if len(names) > SHOWN:
        return f"{', '.join(shown)} and {len(names) - SHOWN:,} more"
    return " and ".join(filter(None, (", ".join(shown[:-1]), shown[-1])))
