"""A pass over a program as the list of PyTorch calls it made, to be made again for the next loss.

Between two losses of one structure only tensors differ, but a pass in Python decides at each step
again what to call, which takes longer than a GPU needs for it. ``Tape`` has the calls alone, with
numbers in place of tensors: of the maps' own tensors first, then of results. It is used only for
maps that are the same but for the contents of their tensors, down to strides and to what their
functions close over; and only if the pass read no element.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from operator import attrgetter
from threading import Lock
from types import BuiltinFunctionType, CellType, FunctionType, MethodDescriptorType
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gradtrace.linops import Cut, Identity, Map, Reduce, Slot
from gradtrace.linops.enclosed import attributes, slots_of

MAX_MISSES = 2
"""After so many losses whose maps were not those of the tape, none is recorded any more."""

MAX_TAPES = 4
"""The most tapes that are kept for one structure and selection of components."""

WITHOUT_TENSORS = (Cut, Identity, Reduce, Slot)
"""Maps that are shared between programs, and hold numbers only."""

PLAIN = (
    type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout,
    torch.memory_format, torch.Size, slice, type(Ellipsis), type,
)  # fmt: skip
"""Types whose values are compared."""

MOST_COMMON = frozenset({int, bool, str, type(None), torch.Size})
"""Some of them, which are tried first: most attributes of maps have one of these types."""

SHAPES = frozenset({"in_shape", "out_shape"})
"""Attributes of maps that are tuples of numbers."""

METADATA = frozenset(
    {
        "__get__", "__hash__", "__len__", "_is_zerotensor", "can_cast", "dim", "element_size",
        "is_complex", "is_conj", "is_contiguous", "is_floating_point", "is_neg", "is_same_size",
        "is_signed", "ndimension", "nelement", "numel", "promote_types", "result_type", "size",
        "storage_offset", "stride", "untyped_storage",
    }
)  # fmt: skip
"""Functions of tensors that tell no element."""

SHAPED_BY_ELEMENTS = frozenset(
    {
        "_unique", "_unique2", "argwhere", "bincount", "histc", "masked_select", "nonzero",
        "repeat_interleave", "unique", "unique_consecutive",
    }
)  # fmt: skip
"""Functions whose results have as many elements as their arguments' elements say."""

ALIASES = frozenset({"contiguous", "detach", "double", "expand", "float", "reshape", "to", "view"})
"""Functions that may return their argument, or another tensor of the same elements."""


VIEWS = frozenset(
    {"__get__", "as_strided", "expand", "permute", "reshape", "transpose", "unsqueeze", "view"}
)
"""Functions that may return a view of their argument; a chain becomes one ``as_strided``."""


class NotReplayable(Exception):
    """The pass depends on more than a tape can tell."""


# What maps depend on ------------------------------------------------------------------------------


def parts_of(held: Any, tensors: list[Tensor]) -> Any:
    """What a map, or a part of it, is made of, but for its tensors, which are added to the list:
    equal for two maps that make the same calls. Raises ``NotReplayable`` for what it cannot tell.
    """
    kind = type(held)
    if kind in MOST_COMMON or (kind is tuple and {*map(type, held)} <= {int}):
        return kind, held
    if isinstance(held, Tensor):
        tensors.append(held)
        return held.dtype, held.device, held.shape, held.stride()
    if kind is FunctionType:
        cells = [parts_of(cell.cell_contents, tensors) for cell in held.__closure__ or ()]
        given = held.__defaults__, held.__kwdefaults__
        return held.__code__, cells, None if given == (None, None) else parts_of(given, tensors)
    if isinstance(held, Map):
        found: list[Any] = [kind]
        for name, each in attributes(held):
            plain = name in SHAPES or type(each) is str
            found.append(each if plain else parts_of(each, tensors))
        return found
    if isinstance(held, float):
        return kind, held.hex()  # tells -0.0 from 0.0, and is equal for NaN
    if isinstance(held, PLAIN):
        return kind, held
    if isinstance(held, (tuple, list)):
        return kind, [parts_of(each, tensors) for each in held]
    if isinstance(held, dict):
        return dict, parts_of([*held.items()], tensors)
    if is_dataclass(held):
        return kind, parts_of([getattr(held, each.name) for each in fields(held)], tensors)
    if isinstance(held, partial):
        return partial, parts_of((held.func, held.args, [*held.keywords.items()]), tensors)
    if isinstance(held, (BuiltinFunctionType, MethodDescriptorType, torch._ops.OpOverload)):
        return held
    raise NotReplayable(f"a {type(held).__name__}")


class _Expected:
    """The parts of a map, to be compared with those of another: shapes and words by themselves,
    tensors by what ``parts_of`` tells of them, and only the rest by ``parts_of``.
    """

    __slots__ = ("kind", "plain", "read", "rest")

    def __init__(self, map_: Map) -> None:
        names, held = zip(*attributes(map_))
        if len(names) < len(slots_of(type(map_))):
            raise NotReplayable("a map without some of its attributes")
        self.kind, self.read = type(map_), attrgetter(*names)
        quick = [name in SHAPES or type(each) is str for name, each in zip(names, held)]
        self.plain = [(n, each) for n, (each, yes) in enumerate(zip(held, quick)) if yes]
        self.rest = [
            (n, isinstance(each, Tensor), parts_of(each, []))
            for n, (each, yes) in enumerate(zip(held, quick))
            if not yes
        ]

    def has(self, map_: Map, tensors: list[Tensor]) -> bool:
        """Whether the other has these parts; its tensors are added to the list."""
        if type(map_) is not self.kind:
            return False
        held = self.read(map_)
        for n, there in self.plain:
            if held[n] != there:
                return False
        for n, is_tensor, there in self.rest:
            each = held[n]
            if is_tensor and isinstance(each, Tensor):
                tensors.append(each)
                if (each.dtype, each.device, each.shape, each.stride()) != there:
                    return False
            elif parts_of(each, tensors) != there:
                return False
        return True


class MapParts:
    """The seed and the maps of a program as ``parts_of`` tells them. Those that programs share are
    told by themselves.
    """

    def __init__(self, seed: Tensor, maps: Sequence[Map]) -> None:
        self.shared = [map_ if type(map_) in WITHOUT_TENSORS else None for map_ in maps]
        self.tensors: list[Tensor] = []
        self.seed = parts_of(seed, self.tensors)
        for map_ in self._others(maps):
            parts_of(map_, self.tensors)
        self.expected = [_Expected(map_) for map_ in self._others(maps)]
        self.equal = _first_places(self.tensors)

    def _others(self, maps: Sequence[Map]) -> list[Map]:
        return [map_ for map_, same in zip(maps, self.shared) if same is None]

    def matched(self, seed: Tensor, maps: Sequence[Map]) -> list[Tensor] | None:
        """The tensors of other maps, if these are the same but for their tensors."""
        if len(maps) != len(self.shared):
            return None
        for map_, same in zip(maps, self.shared):
            if map_ is not same is not None and parts_of(map_, []) != parts_of(same, []):
                return None
        tensors: list[Tensor] = []
        try:
            if parts_of(seed, tensors) != self.seed:
                return None
            for map_, expected in zip(self._others(maps), self.expected):
                if not expected.has(map_, tensors):
                    return None
        except (AttributeError, NotReplayable):  # a map without an attribute has other parts
            return None
        return tensors if _first_places(tensors) == self.equal else None


def replaced(held: Any, others: Mapping[int, Tensor]) -> Any:
    """What ``parts_of`` tells of, with other tensors in the place of those with these ``id()``."""
    if isinstance(held, Tensor):
        return others[id(held)]
    if type(held) in MOST_COMMON or type(held) in WITHOUT_TENSORS:
        return held
    if type(held) is FunctionType:
        cells = [CellType(replaced(c.cell_contents, others)) for c in held.__closure__ or ()]
        given = held.__code__, held.__globals__, held.__name__
        function = FunctionType(*given, replaced(held.__defaults__, others), tuple(cells))
        function.__kwdefaults__ = replaced(held.__kwdefaults__, others)
        return function
    if isinstance(held, Map):
        found = object.__new__(type(held))
        for name, each in attributes(held):
            setattr(found, name, replaced(each, others))
        return found
    if isinstance(held, PLAIN):
        return held
    if isinstance(held, (tuple, list)):
        make = getattr(held, "_make", type(held))  # of a NamedTuple, or a plain one
        return make([replaced(each, others) for each in held])
    if isinstance(held, dict):
        return {key: replaced(each, others) for key, each in held.items()}
    if is_dataclass(held) and not isinstance(held, type):
        made = copy(held)
        for each in fields(held):
            object.__setattr__(made, each.name, replaced(getattr(held, each.name), others))
        return made
    if isinstance(held, partial):
        args, keywords = replaced((held.args, held.keywords), others)
        return partial(held.func, *args, **keywords)
    return held


def _first_places(tensors: Sequence[Tensor]) -> list[int]:
    """Where each tensor comes for the first time: which of them are the same."""
    first: dict[int, int] = {}
    return [first.setdefault(id(x), n) for n, x in enumerate(tensors)]


# Calls --------------------------------------------------------------------------------------------


class Call(NamedTuple):
    """A call whose tensors are numbers: those of arguments by position (``at``), those of lists of
    tensors by position (``lists``), those of keywords. ``out`` is the number of the result, or a
    tuple of them. ``freed`` are not used after it.
    """

    function: Callable[..., Any]
    args: list[Any]
    kwargs: dict[str, Any]
    at: tuple[tuple[int, int], ...]
    lists: tuple[tuple[int, tuple[int, ...]], ...]
    named: tuple[tuple[str, int], ...]
    out: int | tuple[int, ...]
    freed: tuple[int, ...] = ()

    @property
    def used(self) -> Iterator[int]:
        """The numbers of its arguments."""
        for _, n in (*self.at, *self.named):
            yield n
        for _, several in self.lists:
            yield from several

    @property
    def outs(self) -> tuple[int, ...]:
        """The numbers of its results."""
        return self.out if isinstance(self.out, tuple) else (self.out,)

    @property
    def in_place(self) -> bool:
        """Whether it may change an argument."""
        name = getattr(self.function, "__name__", "")
        dunder = name.startswith("__i") or name == "__setitem__"
        return dunder or (name.endswith("_") and not name.endswith("__")) or "out" in self.kwargs


class Tape:
    """Calls on the tensors of ``given`` maps; ``results`` are the numbers of what it returns."""

    def __init__(self, given: MapParts, calls: Sequence[Call], results: Sequence[int]) -> None:
        self._given, self.inputs = given, len(given.tensors)
        given.tensors = []  # not kept alive
        self.calls = _freeing(_needed(calls, results), results, self.inputs)
        self._function = _compiled(self.calls, self.inputs, results)

    def matched(self, seed: Tensor, maps: Sequence[Map]) -> list[Tensor] | None:
        """The tensors of these maps, if the tape is theirs too."""
        return self._given.matched(seed, maps)

    def run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Make all calls."""
        found: list[Tensor] = self._function(tensors)
        return found


def _compiled(calls: Sequence[Call], inputs: int, results: Sequence[int]) -> Callable[..., Any]:
    """A function that makes these calls: Python code of one line each, ``v7 = f3(v1, c5)``, as a
    loop over them would take as long as some of them.
    """
    names: dict[str, Any] = {}
    known: dict[int, str] = {}

    def named(held: object, letter: str) -> str:
        if id(held) not in known:
            known[id(held)] = f"{letter}{len(names)}"
            names[known[id(held)]] = held
        return known[id(held)]

    def line(call: Call) -> str:
        args = [named(each, "c") for each in call.args]
        for place, n in call.at:
            args[place] = f"v{n}"
        for place, several in call.lists:
            args[place] = f"[{', '.join(f'v{n}' for n in several)}]"
        args += [f"{name}={named(each, 'c')}" for name, each in call.kwargs.items()]
        args += [f"{name}=v{n}" for name, n in call.named]
        out = (
            "".join(f"v{n}, " for n in call.outs) if isinstance(call.out, tuple) else f"v{call.out}"
        )
        freed = "".join(f"; v{n} = 0" for n in call.freed)
        return f"    {out} = {named(call.function, 'f')}({', '.join(args)}){freed}"

    given = "".join(f"v{n}, " for n in range(inputs))
    body = [f"    {given} = given", *map(line, calls)]
    source = ["def run(given):", *body, f"    return [{', '.join(f'v{n}' for n in results)}]"]
    exec(compile("\n".join(source), "<tape>", "exec"), names)  # of numbers alone
    found: Callable[..., Any] = names["run"]
    return found


def _needed(calls: Sequence[Call], results: Iterable[int]) -> list[Call]:
    """Without the calls whose results nothing uses."""
    used, found = set(results), []
    for call in reversed(calls):
        if call.in_place or not used.isdisjoint(call.outs):
            used.update(call.used)
            found.append(call)
    return found[::-1]


def _freeing(calls: Sequence[Call], results: Iterable[int], inputs: int) -> list[Call]:
    """With the numbers that each call is the last to use."""
    seen, found = set(results), []
    for call in reversed(calls):
        last = {n for n in (*call.used, *call.outs) if n >= inputs} - seen
        seen |= last
        found.append(call._replace(freed=tuple(last)))
    return found[::-1]


class _Recorder(TorchFunctionMode):
    """Notes all calls of PyTorch functions."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.size = 0
        self._numbers: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._viewed: dict[int, int] = {}  # number of a view: number of the tensor it is a view of
        for tensor in tensors:
            self._name(tensor, self.size)
            self.size += 1

    def _name(self, tensor: Tensor, number: int) -> None:
        self._numbers[id(tensor)] = weakref.ref(tensor), number

    def number(self, tensor: Tensor) -> int:
        """The number of a tensor that the tape knows."""
        found = self._numbers.get(id(tensor))
        if found is None or found[0]() is not tensor:
            raise NotReplayable("a tensor that is no map's and no call's")
        return found[1]

    def _result(self, tensor: Tensor | None) -> int:
        """The number of a result, a new one unless it is an argument; some functions return None
        beside tensors.
        """
        if tensor is not None:
            found = self._numbers.get(id(tensor))
            if found is not None and found[0]() is tensor:
                return found[1]
            self._name(tensor, self.size)
        self.size += 1
        return self.size - 1

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in SHAPED_BY_ELEMENTS:
            raise NotReplayable(f"{name} has as many results as elements say")
        if isinstance(found, Tensor):
            if not self._is_alias(name, found, args):
                self._note(func, args, kwargs, self._result, found)
        elif isinstance(found, (tuple, list)) and any(isinstance(x, Tensor) for x in found):
            self._note(func, args, kwargs, lambda some: tuple(map(self._result, some)), found)
        elif name not in METADATA:
            raise NotReplayable(f"{name} reads elements")
        return found

    def _is_alias(self, name: str, found: Tensor, args: Sequence[Any]) -> bool:
        """Whether a result is the first argument, by another name if at all."""
        x = args[0] if args else None
        if name not in ALIASES or not isinstance(x, Tensor):
            return False
        if found is not x:
            if found.dtype is not x.dtype or found.stride() != x.stride():
                return False
            if found.shape != x.shape or found.data_ptr() != x.data_ptr():
                return False
            self._name(found, self.number(x))
        return True

    def _note(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], name: Any, found: Any
    ) -> None:
        at, lists, plain = [], [], list(args)
        for place, each in enumerate(args):
            if isinstance(each, Tensor):
                if func is Tensor.__getitem__ and place and each.dtype in (torch.bool, torch.uint8):
                    raise NotReplayable("a mask has as many results as elements say")
                at.append((place, self.number(each)))
                plain[place] = None
            elif isinstance(each, (tuple, list)) and any(isinstance(x, Tensor) for x in each):
                lists.append((place, tuple([self.number(x) for x in each])))
                plain[place] = None
        named = tuple((k, self.number(x)) for k, x in kwargs.items() if isinstance(x, Tensor))
        rest = {k: x for k, x in kwargs.items() if not isinstance(x, Tensor)}
        if any(isinstance(x, (tuple, list)) and _has_tensor(x) for x in rest.values()):
            raise NotReplayable("a list of tensors by keyword")
        out = name(found)
        if getattr(func, "__name__", "") in VIEWS and at and _is_view(found, args[0]):
            number = at[0][1]
            if number in self._viewed:  # a view of a view: made of the tensor that both are of
                at[0] = 0, self._viewed[number]
                func, rest = Tensor.as_strided, {}
                plain = [None, tuple(found.shape), found.stride()]
            self._viewed[out] = at[0][1]
        self.calls.append(Call(func, plain, rest, tuple(at), tuple(lists), named, out))


def _is_view(found: Tensor, of: Tensor) -> bool:
    """Whether a tensor is a view of another that begins at the same place."""
    same = found.untyped_storage().data_ptr() == of.untyped_storage().data_ptr()
    return same and found.numel() > 0 and found.data_ptr() == of.data_ptr()


def _has_tensor(some: Iterable[object]) -> bool:
    return any(isinstance(each, Tensor) for each in some)


Layout = TypeVar("Layout")


@dataclass
class _Slot(Generic[Layout]):
    """A tape, and what is known of its results without reading them."""

    noted: tuple[Tape, Layout] | None = None
    runs: int = 0
    misses: int = 0


@dataclass
class Tapes:
    """The tapes of a structure, by what else the calls of a pass depend on. One is recorded with
    the second loss, as recording takes longer than the pass.
    """

    kept: dict[Hashable, _Slot[Any]] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    def run(
        self,
        key: Hashable,
        seed: Tensor,
        maps: Sequence[Map],
        compute: Callable[[], tuple[Layout, list[Tensor]]],
    ) -> tuple[Layout, list[Tensor]]:
        """What ``compute`` returns: tensors, and what is known of them without reading them."""
        with self._lock:
            if key not in self.kept and len(self.kept) >= MAX_TAPES:
                self.kept.clear()
            slot = self.kept.setdefault(key, _Slot())
            slot.runs += 1
            noted, first = slot.noted, slot.runs == 1
        if slot.misses > MAX_MISSES or first:
            return compute()
        if noted is not None:
            tape, layout = noted
            tensors = tape.matched(seed, maps)
            if tensors is not None:
                slot.misses = 0
                return layout, tape.run(tensors)
            slot.misses += 1
        return self._recorded(slot, seed, maps, compute)

    def _recorded(
        self,
        slot: _Slot[Layout],
        seed: Tensor,
        maps: Sequence[Map],
        compute: Callable[[], tuple[Layout, list[Tensor]]],
    ) -> tuple[Layout, list[Tensor]]:
        try:
            given = MapParts(seed, maps)
            recorder = _Recorder(given.tensors)
            with recorder:
                layout, tensors = compute()
            results = [recorder.number(tensor) for tensor in tensors]
        except NotReplayable:
            slot.misses = MAX_MISSES + 1
            return compute()
        tape = Tape(given, recorder.calls, results)
        with self._lock:
            slot.noted = tape, layout
        return layout, tensors
