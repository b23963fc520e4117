"""Snapshots of Python state: attributes, lists, dictionaries, variables that functions refer to.

Code of the user's that runs once more than it would without gradtrace may count, or take from a
list. What it can reach is saved before and restored afterwards.
"""

from __future__ import annotations

import contextlib
import copy
import dis
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

CONTAINERS = (list, dict, set, deque)
MAX_LOOKED_THROUGH = 10_000
"""Longer lists and dictionaries are copied, but not searched for others inside them."""
MAX_ARRAY_BYTES = 1 << 26
"""NumPy arrays that are larger are not copied."""
CONSTANTS = frozenset({bool, int, float, str, bytes, type(None), Tensor, nn.Parameter})
"""What holds nothing that could change, or is saved elsewhere."""
CODE = (FunctionType, MethodType, partial)
NOT_STATE = (Tensor, nn.Module, type, *CODE, BuiltinFunctionType, ModuleType, torch.Generator)
FOREIGN = frozenset(
    {"gradtrace", "torch", "lightning", "pytorch_lightning", "threading", "builtins", "abc"}
)
"""Packages whose objects are no state of a model: a Monitor, a trainer, a group of processes."""
_EMPTY = object()


class PythonState:
    """A snapshot of attributes of objects, of the contents of lists, dictionaries and sets, and of
    the variables that functions refer to.
    """

    def __init__(self) -> None:
        self._attributes: dict[int, tuple[Any, dict[str, Any]]] = {}
        self._inside: dict[int, tuple[Any, Any]] = {}
        self._cells: dict[int, tuple[CellType, Any]] = {}
        self._globals: dict[tuple[int, str], tuple[dict[str, Any], Any]] = {}
        self._classes: dict[type, dict[str, Any]] = {}
        self._code: dict[int, Any] = {}
        self._opaque: dict[int, tuple[Any, Callable[[], object]]] = {}  # and what restores it

    def note_attributes(self, owner: Any, depth: int = 2) -> None:
        """Save the attributes of an object, and what they hold, up to ``depth`` objects deep."""
        if id(owner) not in self._attributes:
            before = dict(getattr(owner, "__dict__", ()))
            self._attributes[id(owner)] = owner, before
            slots = {n: getattr(owner, n) for n in _slots(type(owner)) if hasattr(owner, n)}
            if slots:
                self._opaque[id(owner)] = owner, partial(_set_slots, owner, slots)
            self.note((*before.values(), *slots.values()), depth - 1)

    def note(self, values: Iterable[Any], depth: int = 1) -> None:
        """Save the contents of containers, nested ones too, and the attributes of plain objects."""
        waiting = list(values)
        while waiting:
            value = waiting.pop()
            if isinstance(value, CONTAINERS):
                if id(value) in self._inside:
                    continue
                self._inside[id(value)] = value, copy.copy(value)
            if isinstance(value, (tuple, *CONTAINERS)):
                if len(value) <= MAX_LOOKED_THROUGH:
                    waiting += value.values() if isinstance(value, dict) else value
            elif type(value) not in CONSTANTS and id(value) not in self._opaque:
                if (restores := restorer_of(value)) is not None:
                    self._opaque[id(value)] = value, restores
                elif depth and _is_plain(value):
                    self.note_attributes(value, depth)

    def note_function(self, context: Any, leaves: Iterable[Tensor]) -> None:
        """Save the state of a ``torch.autograd.Function``: of its context, of the attributes of its
        class and of the leaves that it is applied to, and what its ``backward`` refers to.
        """
        for owner in (context, *leaves):
            self.note_attributes(owner)
        kind = getattr(type(context), "_forward_cls", None)
        if isinstance(kind, type) and kind not in self._classes:
            self._note_class(kind)
            self.note_code(getattr(kind, "backward", None))

    def _note_class(self, kind: type) -> None:
        own = {k: v for k, v in vars(kind).items() if not k.startswith("__")}
        self._classes[kind] = {k: v for k, v in own.items() if not hasattr(v, "__get__")}
        self.note(self._classes[kind].values())

    def note_code(self, code: Any, depth: int = 4) -> None:
        """Save the variables around a function, and globals that it assigns to or changes."""
        while isinstance(code, (MethodType, partial)):
            if isinstance(code, partial):
                self.note((code.args, code.keywords))
            elif _is_plain(code.__self__):
                self.note_attributes(code.__self__)
            code = code.func if isinstance(code, partial) else code.__func__
        if _is_plain(code):
            self.note_attributes(code)  # an object that can be called
        if not isinstance(code, FunctionType) or id(code) in self._code or not depth:
            return
        self._code[id(code)] = code
        for cell, value in held_in(code):
            self._cells[id(cell)] = cell, value
            self._note_variable(value, depth)
        if code.__module__ is not None and code.__module__.partition(".")[0] not in FOREIGN:
            around = code.__globals__
            for name in assigned(code.__code__):
                self._globals[id(around), name] = around, around.get(name, _EMPTY)
            for name in code.__code__.co_names:
                self._note_variable(around.get(name), depth)

    def _note_variable(self, value: Any, depth: int) -> None:
        if isinstance(value, CODE):
            self.note_code(value, depth - 1)
        else:
            self.note((value,))

    def restore(self) -> None:
        """Restore the snapshot where something has changed."""
        for owner, before in self._attributes.values():
            now = getattr(owner, "__dict__", {})
            if now.keys() != before.keys() or any(now[name] is not before[name] for name in now):
                now.clear()
                now.update(before)
        for cell, value in self._cells.values():
            cell.cell_contents = value
        for (_, name), (around, value) in self._globals.items():
            if value is not _EMPTY:
                around[name] = value
            else:
                around.pop(name, None)
        for kind, attributes in self._classes.items():
            for name, value in attributes.items():
                if vars(kind).get(name) is not value:
                    setattr(kind, name, value)
        for held, contents in self._inside.values():
            _refill(held, contents)
        for _, restores in self._opaque.values():
            restores()


def held_in(code: FunctionType) -> list[tuple[CellType, Any]]:
    """The cells around a function that are not empty, and what they hold."""
    found = []
    for cell in code.__closure__ or ():
        with contextlib.suppress(ValueError):
            found.append((cell, cell.cell_contents))
    return found


@lru_cache(1024)
def assigned(code: CodeType) -> frozenset[str]:
    """The global variables that code assigns to."""
    found = dis.get_instructions(code)
    return frozenset(str(each.argval) for each in found if each.opname == "STORE_GLOBAL")


def _is_plain(value: Any) -> bool:
    """Whether this is an object of a class of the user's, of which the attributes are state."""
    if isinstance(value, NOT_STATE) or _is_foreign(type(value)):
        return False
    return isinstance(getattr(value, "__dict__", None), dict) or bool(_slots(type(value)))


def _slots(kind: type) -> list[str]:
    """The names in ``__slots__`` of a class of the user's and those that it inherits from."""
    found: list[str] = []
    for each in kind.__mro__:
        names = () if _is_foreign(each) else vars(each).get("__slots__", ())
        found += [names] if isinstance(names, str) else names
    return [name for name in found if name not in ("__dict__", "__weakref__")]


def _set_slots(owner: Any, before: dict[str, Any]) -> None:
    for name, value in before.items():
        if getattr(owner, name, _EMPTY) is not value:
            object.__setattr__(owner, name, value)


def _is_foreign(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in FOREIGN


def restorer_of(value: Any) -> Callable[[], object] | None:
    """A function that sets a generator or an array to what it is now; None for anything else."""
    if isinstance(value, random.Random):
        return partial(value.setstate, value.getstate())
    if isinstance(value, bytearray):
        return partial(value.__setitem__, slice(None), bytes(value))
    if isinstance(value, torch.Generator):
        return partial(value.set_state, value.get_state())
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    if isinstance(value, numpy.random.RandomState):
        return partial(value.set_state, value.get_state())
    if isinstance(value, numpy.random.Generator):
        value = value.bit_generator
    if isinstance(value, numpy.random.BitGenerator):
        return partial(setattr, value, "state", copy.deepcopy(value.state))
    small = isinstance(value, numpy.ndarray) and value.nbytes <= MAX_ARRAY_BYTES
    return partial(numpy.copyto, value, value.copy()) if small and value.flags.writeable else None


def _refill(held: Any, before: Any) -> None:
    """Restore the contents of a container in place, if they have changed."""
    if held != before if isinstance(held, set) else _identities(held) != _identities(before):
        held.clear()
        (held.update if isinstance(held, (dict, set)) else held.extend)(before)


def _identities(held: Any) -> list[int]:
    return list(map(id, (*held, *held.values()) if isinstance(held, dict) else held))
