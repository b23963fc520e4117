"""Observes and changes calls of modules, however and on whichever thread they are made.

A module may be called as ``module(x)``, as ``module.forward(x)`` or through its own ``__call__``,
and its attributes must not change meanwhile: models are copied, pickled and scripted while they are
watched. So the class is patched, not the module: it gets a ``__call__``, ``_call_impl`` and
``forward`` that look up the listeners of the instance, and otherwise do nothing. The patch is
removed when no instance of the class has a listener.

The exception is a bound ``forward`` that a module keeps (``self.run = self.encoder.forward``), in
an attribute or in lists, dicts, tuples and partials there: it is replaced meanwhile, but copies get
the original.

A shallow copy of a module (``copy.copy``, replicas of ``nn.DataParallel``) is that module: its
calls are told to the module's listeners.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from types import MethodType
from typing import Any

from torch import nn

from gradtrace.pytorch import call_listeners
from gradtrace.pytorch.call_listeners import (
    LISTENERS,
    CallEvent,
    Forward,
    Listener,
    listeners_of,
    same_in_copies,
    set_listeners,
    shared_table,
)
from gradtrace.pytorch.call_patches import PATCHES, Patch

__all__ = [
    "Forward",
    "Listener",
    "Listening",
    "listen",
    "listen_to_all",
    "listeners_of",
    "same_in_copies",
]

_LOCK = threading.RLock()


def listen(listener: Listener, modules: Iterable[nn.Module]) -> Listening:
    """Notify ``listener`` of every call of these modules, until what is returned is called."""
    found = Listening(listener)
    found.extend(modules)
    return found


def listen_to_all(listener: Listener) -> Callable[[], None]:
    """Notify ``listener`` of every call of any module, until the returned function is called."""
    found = Listening(listener)
    found.extend_to_all()
    return found


class Listening:
    """The only registration of a listener, with its modules, which are kept alive. To call it ends
    it.
    """

    def __init__(self, listener: Listener) -> None:
        self.listener = listener
        self.modules: dict[int, nn.Module] = {}
        self.keys: dict[int, object] = {}  # kept alive, as ids are
        self.classes: dict[type, None] = {}
        self.bound: list[_Exchange] = []

    def knows(self, module: nn.Module) -> bool:
        """Whether the listener is told of calls of this very module."""
        return id(module) in self.modules

    def extend(self, modules: Iterable[nn.Module]) -> None:
        """Notify the listener of calls of these modules, too. Those that are known already may be
        of other classes now.
        """
        given = list(modules)
        try:
            with _LOCK:
                self.patch(kind for module in given for kind in _kinds(module))
                for module in given:
                    if id(module) not in self.modules:
                        self._add(module)
        except BaseException:  # Ctrl-C too
            self()
            raise

    def _add(self, module: nn.Module) -> None:
        self.modules[id(module)] = module
        for each in (module, shared_table(module)):
            if id(each) not in self.keys:
                self.keys[id(each)] = each
                set_listeners(id(each), (*LISTENERS.get(id(each), ()), self.listener))
        self.bound.extend(exchanges(module))

    def extend_to_all(self) -> None:
        """Notify the listener of calls of any module."""
        try:
            with _LOCK:
                self.patch(_subclasses())
                call_listeners.FOR_ALL = (*call_listeners.FOR_ALL, self)
        except BaseException:
            self()
            raise

    def patch(self, kinds: Iterable[type]) -> None:
        """Patch these classes, once each."""
        with _LOCK:
            for kind in kinds:
                if kind not in self.classes:
                    PATCHES.setdefault(kind, Patch(kind)).acquire()
                    self.classes[kind] = None

    def __call__(self) -> None:
        """Unregister the listener; Ctrl-C meanwhile does not stop that."""
        try:
            self._end()
        except BaseException:
            self._end()
            raise

    def __del__(self) -> None:
        if self.classes:  # Ctrl-C before the caller had what ends it
            self()

    def _end(self) -> None:
        with _LOCK:
            for key in self.keys:
                before = LISTENERS.get(key, ())
                set_listeners(key, tuple(each for each in before if each is not self.listener))
            others = (each for each in call_listeners.FOR_ALL if each is not self)
            call_listeners.FOR_ALL = tuple(others)
            while self.bound:
                self.bound.pop().release()
            self.modules, self.keys = {}, {}
            while self.classes:
                PATCHES[self.classes.popitem()[0]].release()


def _kinds(module: nn.Module) -> Iterator[type]:
    """The class of a module, and that which a lazy module will have."""
    kind = type(module)
    yield kind
    later = getattr(kind, "cls_to_become", None)  # a lazy module's class after a call
    if isinstance(later, type):
        yield later


def _subclasses() -> list[type]:
    """``nn.Module`` and all its subclasses."""
    found: dict[type, None] = {nn.Module: None}
    stack: list[type] = [nn.Module]
    while stack:
        below: list[type] = type.__subclasses__(stack.pop())
        for each in below:
            if each not in found:
                found[each] = None
                stack.append(each)
    return list(found)


# Kept ``forward``s -------------------------------------------------------------------------------

MODULE_TABLES = frozenset({"forward", *vars(nn.Module())})
"""Attributes of every module; what a user puts there is seen, or is no call."""

MOST_ENTRIES = 1_000
"""How many entries of a module's containers are searched for a bound ``forward``."""


class _Exchange:
    """An entry of a container whose bound ``forward``s are replaced by ``CallEvent``s."""

    def __init__(self, holder: Any, key: Any, found: Any) -> None:
        self.holder, self.key = holder, key
        self.before, self.now = holder[key], found
        self.users = 0

    def acquire(self) -> _Exchange:
        """Make the exchange, if this is its first user."""
        self.users += 1
        if self.users == 1:
            EXCHANGES[id(self.holder), self.key] = self
            self.holder[self.key] = self.now
        return self

    def holds(self) -> bool:
        """Whether the entry is still what was put there."""
        try:
            return self.holder[self.key] is self.now
        except LookupError:
            return False

    def release(self) -> None:
        """With the last user, put back what was there, unless it has been replaced since."""
        self.users -= 1
        if self.users:
            return
        if EXCHANGES.get((id(self.holder), self.key)) is self:
            del EXCHANGES[id(self.holder), self.key]
        if self.holds():
            self.holder[self.key] = self.before


EXCHANGES: dict[tuple[int, Any], _Exchange] = {}  # by the container's id, and the key in it


def exchanges(module: nn.Module) -> Iterator[_Exchange]:
    """Exchanges of all that a module keeps; none in what every module has."""
    found: list[tuple[Any, Any]] = [
        (vars(module), key) for key in list(vars(module)) if key not in MODULE_TABLES
    ]
    for holder, key in found:  # grows meanwhile
        value = holder[key]
        known = EXCHANGES.get((id(holder), key)) if EXCHANGES else None
        if known is not None and known.holds():
            yield known.acquire()
        elif type(value) in (list, dict):
            if len(found) + len(value) <= MOST_ENTRIES:
                keys = range(len(value)) if type(value) is list else list(value)
                found += [(value, inside) for inside in keys]
        elif (now := _observed(value)) is not value:
            yield _Exchange(holder, key, now).acquire()


def _observed(value: Any) -> Any:
    """The value with ``CallEvent``s for bound ``forward``s; itself if it has none."""
    if type(value) is MethodType:
        owner = value.__self__
        if value.__name__ == "forward" and isinstance(owner, nn.Module):
            return CallEvent(owner, value, kept=True)
        return value
    if type(value) is functools.partial:
        run = _observed(value.func)
        return value if run is value.func else functools.partial(run, *value.args, **value.keywords)
    if type(value) is tuple and len(value) <= MOST_ENTRIES:
        parts = tuple(_observed(each) for each in value)
        return value if all(a is b for a, b in zip(parts, value)) else parts
    return value
