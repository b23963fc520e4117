"""Names the modules of a model whose calls are listened to, also while submodules are replaced.

A submodule may be replaced, wrapped, added or removed at any time, and so may its class be (as
``torch.nn.utils.parametrize`` does). What is registered in the usual ways is listened to from then
on; other changes (``model._modules["a"] = b``, a list of layers whose items move up) are noticed
when a module is called whose children were others at its last call, or the model itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from gradtrace.pytorch.call_listeners import Listener, same_in_copies
from gradtrace.pytorch.module_calls import Listening, listen
from gradtrace.pytorch.wrapped_modules import named_modules


class ModuleTree:
    """The names of a model's modules, each the first that it has; of removed ones, the last."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules: dict[int, nn.Module] = {}  # by id
        self._names: dict[int, str] = {}  # by id, and by ``same_in_copies``
        self._seen: dict[int, _Look] = {}
        self._registered = False  # whether a module was, since names were given
        self._lock = threading.RLock()
        self._listening: Listening | None = None

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Tell the listener of every call of these modules, until the returned function is
        called, and of those that take their places.
        """
        self.modules, self._names, self._seen = {}, {}, {}
        self._name()
        self._listening = listening = listen(listener, self.modules.values())
        _listen_to_registrations(self)

        def stop() -> None:
            _ignore_registrations(self)
            with self._lock:
                self._listening = None
            listening()

        return stop

    def know(self, module: nn.Module, name: str) -> None:
        """Give a module a name, whether it is the model's or not."""
        self.modules[id(module)] = module
        for key in (id(module), same_in_copies(module)):
            self._names.setdefault(key, name)

    def name(self, module: nn.Module) -> str:
        """The name of a module of the model, or of a shallow copy of one."""
        found = self._names.get(id(module))
        return self._names[same_in_copies(module)] if found is None else found

    def has_moved(self, module: nn.Module) -> bool:
        """Whether a module, or what it contains, is no longer what it was when names were given."""
        seen = self._seen.get(id(module))
        if self._registered or seen is None:  # a copy, or removed
            return self._registered
        if type(module) is not seen.kind:
            return True
        if not module._modules:
            return bool(seen.children)
        return seen.children is not None and _children(module) != seen.children

    def has_moved_anywhere(self) -> bool:
        """Whether this is so of any module."""
        return any(map(self.has_moved, tuple(self.modules.values())))

    def follow(self) -> dict[str, str]:
        """Name the modules that the model has now, and listen to the new ones. Returns the former
        names of those that have others now, by these.
        """
        with self._lock:
            before = self._names.copy()
            self._name()
            if self._listening is not None:
                self._listening.extend(self.modules.values())
            old = {self._names[key]: before.get(key, self._names[key]) for key in self._seen}
        return {name: former for name, former in old.items() if former != name}

    def _name(self) -> None:
        self._registered = False
        now: dict[int, str] = {}
        seen: dict[int, _Look] = {}
        for name, module in named_modules(self.model):
            self.modules.setdefault(id(module), module)
            for key in (id(module), same_in_copies(module)):
                now.setdefault(key, name)
            seen[id(module)] = _Look(type(module), _children(module))
        self._names.update(now)
        self._seen = seen

    def registered(self, owner: nn.Module, module: nn.Module | None) -> None:
        """A module is about to become part of another one, whichever."""
        with self._lock:
            listening = self._listening
            if listening is None or not listening.knows(owner):
                return
            self._registered = True
            listening.extend([owner])  # whose class may be another now, as of what is parametrized
            if module is not None and "_modules" in vars(module):  # else it was not initialised
                listening.extend(each for _, each in named_modules(module))


_FOLLOWING: tuple[ModuleTree, ...] = ()  # replaced, never changed: other threads go through it
_LOCK = threading.Lock()


def _listen_to_registrations(tree: ModuleTree) -> None:
    global _FOLLOWING
    with _LOCK:
        _FOLLOWING = (*_FOLLOWING, tree)


def _ignore_registrations(tree: ModuleTree) -> None:
    global _FOLLOWING
    with _LOCK:
        _FOLLOWING = tuple(each for each in _FOLLOWING if each is not tree)


def _registered(owner: nn.Module, _: str, module: nn.Module | None) -> None:
    for tree in _FOLLOWING:
        tree.registered(owner, module)


# Once, and not with each watch: every hook takes a number, by which watches, also of other threads,
# see that nodes may have hooks.
register_module_module_registration_hook(_registered)


class _Look(NamedTuple):
    """What a module was when names were given."""

    kind: type
    children: list[object] | None  # names, and the ids of the modules


def _children(module: nn.Module) -> list[object] | None:
    """The names of what a module contains, and the ids; None if only TorchScript knows."""
    held: Any = module._modules
    if isinstance(module, torch.jit.ScriptModule):
        return None
    return [*held, *map(id, held.values())]
