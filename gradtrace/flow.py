"""How large the gradient is along the depth of a model, and where it vanishes, explodes or dies.

A backward pass multiplies long sequences of numbers: small ones make the gradient vanish, large ones
make it explode. One streaming pass measures every cotangent, ``‖g‖ = √Σ g[i]²``, and keeps that
alone. What one reads off it:

- **Activation side.** An operator that only views one leaf (the transpose of a weight, a slice of a
  fused one, a cast) lies beside the way that gradient takes through the activations, and so does
  what a hook does to a leaf; every other operator lies on it, reparametrised weights included.
  Without an input that requires grad, the activation side ends where the last parameter is used.
- **Depth** of an operator on the activation side: the most operators between it and the loss, whose
  own is 0.
- **Profile**: for each depth the operator with the largest norm. Its *top* is the median of the first
  three depths of the model's body (what follows the loss function), its *end* the median of the last
  tenth, so that no odd operator decides.
- **Uses** of a leaf at many depths, as in a recurrent net, are a sequence of their own: below it the
  profile may be as large as ever, since each step hands to its input what it gets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from math import fsum, hypot, inf, isfinite, isnan, nan, prod, sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.linalg import vector_norm
from torch.nn import Parameter

from gradtrace.components import within
from gradtrace.engine import gradient_of
from gradtrace.errors import NotScalar, UnknownName
from gradtrace.maps import Map
from gradtrace.program import HOOKS, Block, Program
from gradtrace.tables import Column, Table

FACTOR = 1000.0
"""Between top and end, a fall by more is called vanishing and a rise by more exploding. Healthy nets
of 30 layers, and tiny transformers of 23 architectures, stay within 20."""

MOSTLY = 0.95
"""A module is mostly dead if this share of the gradient's entries at its output is 0, and the
operator above it (a ReLU) made this share of them so. Of a healthy ReLU it is about a half."""

REPEATS = 8
"""From so many depths on at which a leaf is used, its uses are looked at as a sequence."""

FEW = 3
"""The depths that the top is the median of, and the least that a fall or a rise is read off."""

FAINT = 2.0**10
"""What becomes 0 within this factor of the smallest float did so by underflow: it vanished. What was
larger met a slope or a weight of 0: it is dead."""

SHOWN = 3
"""The most modules that a sentence names."""


# The result --------------------------------------------------------------------------------------


class Level(NamedTuple):
    """The operator of a depth at whose output the gradient's norm is largest.

    ``largest`` is the largest \\|entry\\|, ``zeros`` the share of entries that are exactly 0.
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
    the call. ``first`` and ``last`` are the same of its first and its last call alone. ``handed`` is
    the largest that its operators give to those of other modules or calls, or to an input (None:
    nothing lies below), ``own`` that of the gradients of its parameters, ``‖·‖`` of all together
    (None: it has none). ``depth`` is the least of its operators', ``zeros`` the share of exact zeros
    at its output, ``verdict`` one of "", "dead", "mostly dead", "vanishing", "exploding" and "not
    finite".
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
    """The gradient along depth: ``profile`` from the loss on, ``rows`` a module each, nearest to the
    loss first, ``findings`` what there is to say, in sentences.
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
                row.module or "(top)",
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
    >>> x = torch.ones(4, requires_grad=True)
    >>> y = x
    >>> for _ in range(30):
    ...     y = (0.5 * y).tanh()
    >>> program = gradtrace.program(y.sum())
    >>> names = {leaf.value: f"leaf{i}" for i, leaf in enumerate(program.leaves)}
    >>> flow = flow_of(program, names, {})
    >>> print(flow.verdict)
    Vanishing: the gradient falls from 1 at MulBackward0 to 4.7e-09 at MulBackward0 (a factor of ...
    >>> [round(level.norm, 3) for level in flow.profile[:4]]
    [1.0, 2.0, 2.0, 1.0]
    """
    seed = program.seed if seed is None else seed
    if seed.shape != program.seed.shape:
        raise NotScalar(
            f"the seed has shape {tuple(seed.shape)} and the loss {tuple(program.seed.shape)}; "
            "pass a weight for each element of the loss"
        )
    wiring = Wiring(program)
    flow = Measured(wiring, measure(program, seed), names, classes)
    return Flow(flow.profile, flow.rows, tuple(flow.findings()))


# The pass ----------------------------------------------------------------------------------------


class Size(NamedTuple):
    """What is kept of a cotangent."""

    norm: float
    largest: float
    nonzero: int
    entries: int
    dtype: torch.dtype


def measure(program: Program, seed: Tensor) -> dict[int, Size]:
    """The sizes of all cotangents that operators take and give; each is dropped after its last use."""
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

    def __init__(self, program: Program) -> None:
        self.program = program
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
        """The operators that only view one leaf, and the leaf's value. The loss is never aside."""
        leaves = {leaf.value for leaf in self.program.leaves}
        found: dict[int, int] = {}
        for number in range(len(self.blocks) - 1, 0, -1):
            block = self.blocks[number]
            if len(block.gives) == 1 and (block.operator == HOOKS or views(block)):
                (value,) = block.gives.values()
                whole = self.wholes.get(value, value)
                leaf = whole if whole in leaves else found.get(self.takers.get(whole, -1))
                if leaf is not None:
                    found[number] = leaf
        return found

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

    def enters(self, edge: Handed) -> bool:
        """Whether an edge leads into another call of a module."""
        return (
            edge.taker is not None
            and self.blocks[edge.taker].place != self.blocks[edge.giver].place
        )


def maps_of(block: Block) -> Iterator[Map]:
    """The maps of an operator's formula."""
    return (term.map for step in block.steps for term in step.terms)


def views(block: Block) -> bool:
    """Whether an operator only moves elements, all of them (what it did not take is filled up)."""
    return all(m.moves and not (m.inputs == m.outputs and _fills(m)) for m in maps_of(block))


def elementwise(block: Block) -> bool:
    """Whether an operator weighs or drops every element by itself, as activation functions do."""
    single = len(block.takes) == 1 == len(block.gives)
    return single and all(
        m.inputs == m.outputs and (m.stays or m.moves) for m in maps_of(block)
    )


def _fills(map_: Map) -> bool:
    return bool(getattr(map_, "fills", False))


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


# What it says of modules -------------------------------------------------------------------------


@dataclass
class Gathered:
    """What reaches and leaves the operators of one module."""

    depth: int
    reached: dict[int, dict[int, None]] = field(default_factory=dict)  # call: values, in order
    handed: list[float] = field(default_factory=list)
    dropped: float = 0.0  # the share of entries that the operator above made 0, at most

    def values(self) -> list[int]:
        """All that reaches it."""
        return [value for call in self.reached.values() for value in call]


class Change(NamedTuple):
    """From where to where the gradient falls or rises; ``uses`` of one leaf, if it is over these."""

    first: Level
    last: Level
    uses: int = 0

    @property
    def ratio(self) -> float:
        """``last / first``."""
        return self.last.norm / self.first.norm if self.first.norm else nan


@dataclass
class Measured:
    """A program and the sizes of its cotangents: the levels, the rows, the sentences."""

    wiring: Wiring
    size: dict[int, Size]
    names: Mapping[int, str]
    classes: Mapping[str, str]

    @cached_property
    def lost(self) -> dict[int, Lost]:
        """Where values that are 0 became so."""
        return losses_of(self.wiring, self.size)

    def _value(self, number: int) -> int:
        """The largest cotangent at an operator's output; one that is not a number counts most."""
        takes = self.wiring.blocks[number].takes.values()
        return max(takes, key=lambda value: _rank(self.size[value].norm))

    def level(self, number: int) -> Level:
        """An operator as a level."""
        block, size = self.wiring.blocks[number], self.size[self._value(number)]
        place = (self.wiring.depth[number], size.norm, block.operator, block.place.module)
        return Level(*place, size.entries, size.largest, _share(size.entries, size.nonzero))

    @cached_property
    def _peaks(self) -> list[int]:
        """For each depth the operator with the largest norm, the first of equals."""
        found: dict[int, int] = {}
        for number, depth in self.wiring.depth.items():
            best = found.setdefault(depth, number)
            if _rank(self._norm(number)) > _rank(self._norm(best)):
                found[depth] = number
        return [found[depth] for depth in sorted(found)]

    def _norm(self, number: int) -> float:
        return self.size[self._value(number)].norm

    @cached_property
    def profile(self) -> tuple[Level, ...]:
        """A level for each depth."""
        return tuple(map(self.level, self._peaks))

    @cached_property
    def body(self) -> tuple[Level, ...]:
        """The profile without the loss function, as far as the gradient is not cut off.

        The loss function is what comes first and is in no module; where no modules are known, what
        comes first and is a single number: means over a batch would look like a fall.
        """
        tests: tuple[Callable[[Level], bool], ...] = (
            lambda level: not level.module,
            lambda level: level.entries == 1,
        )
        heads = (next((n for n, at in enumerate(self.profile) if not t(at)), inf) for t in tests)
        head = next((int(n) for n in heads if 2 * n <= len(self.profile)), 0)
        ends = (n for n, number in enumerate(self._peaks) if n > head and self._cut(number))
        return self.profile[head : next(ends, None)]

    def _cut(self, number: int) -> bool:
        value = self._value(number)
        return not self.size[value].largest and not self._faint(value)

    def _faint(self, value: int) -> bool:
        return value in self.lost and self.lost[value].faint

    @cached_property
    def along(self) -> Change | None:
        """From the top to the end."""
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
            if edge.leaf is not None:
                at = self.level(edge.giver)
                of = uses.setdefault(edge.leaf, {})
                of[at.depth] = max(of.get(at.depth, at), at, key=lambda level: _rank(level.norm))
        found = []
        for of in uses.values():
            levels = [of[depth] for depth in sorted(of)]
            if len(levels) >= REPEATS:
                ends = _median(levels[:FEW]), _median(levels[-FEW:])
                found.append(Change(*ends, uses=len(levels)))
        return found

    # Rows ----------------------------------------------------------------------------------------

    @cached_property
    def gathered(self) -> dict[str, Gathered]:
        """By module, nearest to the loss first."""
        found: dict[str, Gathered] = {}
        order = sorted(self.wiring.depth.items(), key=lambda item: item[1])
        for number, depth in order:
            found.setdefault(self.wiring.blocks[number].place.module, Gathered(depth))
        if self.wiring.blocks:
            self._reach(found, 0, self.wiring.program.root)
        for edge in self.wiring.edges:
            enters = self.wiring.enters(edge)
            if edge.taker is not None and enters:
                self._reach(found, edge.taker, edge.whole)
                into = found[self.wiring.blocks[edge.taker].place.module]
                into.dropped = max(into.dropped, self._dropped(edge))
            if enters or (edge.leaf is not None and edge.leaf in self._inputs):
                out = found[self.wiring.blocks[edge.giver].place.module]
                out.handed.append(self.size[edge.value].norm)
        return found

    def _reach(self, found: dict[str, Gathered], number: int, value: int) -> None:
        module, call = self.wiring.blocks[number].place
        found[module].reached.setdefault(call, {})[value] = None

    def _dropped(self, edge: Handed) -> float:
        """The share of entries that an elementwise operator made 0."""
        block = self.wiring.blocks[edge.giver]
        if not elementwise(block):
            return 0.0
        (take,) = block.takes.values()
        return _share(self.size[take].nonzero, self.size[edge.value].nonzero)

    @cached_property
    def _inputs(self) -> set[int]:
        """Leaves that are no parameters. Where no model is known, all leaves may be."""
        return {
            leaf.value
            for leaf in self.wiring.program.leaves
            if self.classes
            and not isinstance(leaf.tensor, Parameter)
            and "." not in self.names.get(leaf.value, "")
        }

    @cached_property
    def _own(self) -> dict[str, list[float]]:
        """The norms of leaves' gradients, by the innermost module with a row that holds them."""
        found: dict[str, list[float]] = {}
        for leaf in self.wiring.program.leaves:
            name = self.names.get(leaf.value, "")
            owners = [module for module in self.gathered if within(name, module)]
            if owners and leaf.value not in self._inputs:
                found.setdefault(max(owners, key=len), []).append(self.size[leaf.value].norm)
        return found

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """One for each module."""
        return tuple(self._row(module, found) for module, found in self.gathered.items())

    def _row(self, module: str, found: Gathered) -> Row:
        calls = [_most(self.size[v].norm for v in found.reached[n]) for n in sorted(found.reached)]
        reached = [self.size[value] for value in found.values()]
        entries, nonzero = (sum(size[k] for size in reached) for k in (3, 2))
        own = self._own.get(module)
        return Row(
            module,
            self.classes.get(module, ""),
            len({number for number in self._calls(module)}),
            found.depth,
            _most(calls),
            calls[0],
            calls[-1],
            _most(found.handed) if found.handed else None,
            _share(entries, nonzero),
            hypot(*own) if own else None,
            self._word(module, found),
        )

    def _calls(self, module: str) -> Iterator[int]:
        places = (self.wiring.blocks[number].place for number in self.wiring.depth)
        return (place.call for place in places if place.module == module)

    def _word(self, module: str, found: Gathered) -> str:
        reached = [self.size[value] for value in found.values()]
        if not all(isfinite(size.norm) for size in reached):
            return "not finite"
        if self._stopped(module, found):
            return "vanishing" if any(map(self._faint, found.values())) else "dead"
        entries, nonzero = (sum(size[k] for size in reached) for k in (3, 2))
        if min(found.dropped, _share(entries, nonzero)) >= MOSTLY:
            return "mostly dead"
        return self._far(module, found)

    def _stopped(self, module: str, found: Gathered) -> bool:
        """Whether nothing reaches a module, or nothing comes out of it."""
        reached = [self.size[value] for value in found.values() if self.size[value].entries]
        out = [*found.handed, *self._own.get(module, ())]
        return bool(reached) and (
            not any(size.nonzero for size in reached) or (bool(out) and not any(out))
        )

    def _far(self, module: str, found: Gathered) -> str:
        """Whether a module lies far below the top, or far above it."""
        ...


def _rank(norm: float) -> float:
    return inf if isnan(norm) else norm


def _most(norms: Iterable[float]) -> float:
    return max(norms, key=_rank)


def _share(all_: int, others: int) -> float:
    """The part of all that is none of the others."""
    return 1 - others / all_ if all_ else 0.0


def _median(levels: Sequence[Level]) -> Level:
    return sorted(levels, key=lambda level: _rank(level.norm))[len(levels) // 2]
