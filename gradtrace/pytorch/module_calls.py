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

import copy
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType, MethodType
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.modules import module as _module

Forward: TypeAlias = Callable[..., Any]

is_compiling = torch.compiler.is_compiling
_CALL = nn.Module.__call__


class Listener:
    """Callbacks for the calls of modules; see ``listen``.

    ``outermost`` says that ``around`` changes nothing, and that calls of a module directly from
    within itself need not be told: where that holds of all listeners, a call costs little.
    """

    outermost = False

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Called on the calling thread when a call begins, before the module's own hooks."""

    def leave(self, entered: Any, result: Any) -> None:
        """Called when the call ends. ``entered`` is what ``enter`` returned, ``result`` what the
        module returned, or None if it raised an exception.
        """

    def around(self, module: nn.Module, forward: Forward) -> Forward:
        """The function to run instead of the module's ``forward``."""
        return forward


_LOCK = threading.RLock()
_LISTENERS: dict[int, tuple[Listener, ...]] = {}  # by id of the module, and of its table of hooks
_OUTERMOST: set[int] = set()  # the keys of _LISTENERS where all listeners are ``outermost``
_ONLY: dict[int, Listener] = {}  # the one listener of a module, if it is ``outermost``
_ALL: tuple[_Registration, ...] = ()  # those for every module
_PATCHES: dict[type, Patch] = {}
_MISSING = object()


def listen(listener: Listener, modules: Iterable[nn.Module]) -> Callable[[], None]:
    """Notify ``listener`` of every call of these modules, until the returned function is called."""
    return _Registration(listener, list(modules)).close


def listen_to_all(listener: Listener) -> Callable[[], None]:
    """Notify ``listener`` of every call of any module, until the returned function is called."""
    return _Registration(listener, None).close


class _Registration:
    """The only registration of a listener, with its modules (None: all), which are kept alive."""

    def __init__(self, listener: Listener, modules: list[nn.Module] | None) -> None:
        global _ALL
        self.listener = listener
        self.modules = {id(module): module for module in modules or ()}
        self.classes: dict[type, None] = {}
        self.bound: list[_Exchange] = []
        tables = [(module, _shared_table(module)) for module in self.modules.values()]
        self.keys = {id(each): each for pair in tables for each in pair}  # kept alive, as ids are
        with _LOCK:
            try:
                self.patch(_subclasses() if modules is None else self._kinds())
            except BaseException:
                self.close()
                raise
            for key in self.keys:
                _set_listeners(key, (*_LISTENERS.get(key, ()), listener))
            if modules is None:
                _ALL = (*_ALL, self)
            for holder in self.modules.values():
                self.bound += _exchanges(holder)

    def patch(self, kinds: Iterable[type]) -> None:
        """Patch these classes, once each."""
        with _LOCK:
            for kind in kinds:
                if kind not in self.classes:
                    _PATCHES.setdefault(kind, Patch(kind)).acquire()
                    self.classes[kind] = None

    def _kinds(self) -> Iterator[type]:
        """The classes of the modules, and those that lazy modules will have."""
        for module in self.modules.values():
            kind = type(module)
            yield kind
            later = getattr(kind, "cls_to_become", None)  # a lazy module's class after a call
            if isinstance(later, type):
                yield later

    def close(self) -> None:
        """Unregister the listener."""
        global _ALL
        with _LOCK:
            for key in self.keys:
                before = _LISTENERS.get(key, ())
                _set_listeners(key, tuple(each for each in before if each is not self.listener))
            _ALL = tuple(registration for registration in _ALL if registration is not self)
            while self.bound:
                self.bound.pop().release()
            self.modules, self.keys = {}, {}
            while self.classes:
                _PATCHES[self.classes.popitem()[0]].release()


def _set_listeners(key: int, listeners: tuple[Listener, ...]) -> None:
    _OUTERMOST.discard(key)
    _ONLY.pop(key, None)
    if listeners:
        _LISTENERS[key] = listeners
        if all(each.outermost for each in listeners):
            _OUTERMOST.add(key)
            if len(listeners) == 1:
                _ONLY[key] = listeners[0]
    else:
        _LISTENERS.pop(key, None)


def same_in_copies(module: nn.Module) -> int:
    """A key that a module shares with its shallow copies, such as replicas of ``DataParallel``."""
    return id(_shared_table(module))


def _shared_table(module: nn.Module) -> object:
    """What a module shares with its shallow copies, and with no other: the table of its hooks."""
    return vars(module).get("_forward_hooks", module)


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


def listeners_of(module: nn.Module) -> tuple[Listener, ...]:
    """The listeners of this module."""
    found = _LISTENERS.get(id(module))
    if found is None and _LISTENERS:
        found = _LISTENERS.get(same_in_copies(module))
    return (
        (*(found or ()), *(registration.listener for registration in _ALL)) if _ALL else found or ()
    )


# Running calls -----------------------------------------------------------------------------------

CALL, IMPLEMENTATION, FORWARD = range(3)
"""The stages of one call, in order: ``__call__`` runs ``_call_impl``, which runs ``forward``."""


class _Stack(threading.local):
    def __init__(self) -> None:
        self.calls: list[tuple[nn.Module, int]] = []  # running on this thread; the stages reached


_STACK = _Stack()


def _needs_nothing(module: nn.Module) -> bool:
    """Whether this is a stage of a call whose beginning was told, to listeners that need no more"""
    if id(module) not in _OUTERMOST or _ALL:
        return False
    return _is_running(module)


def _is_running(module: nn.Module) -> bool:
    """Whether a call of the module is the innermost on this thread."""
    calls = _STACK.calls
    return bool(calls) and calls[-1][0] is module


def _run(stage: int, module: nn.Module, run: Forward, args: Any, kwargs: Any) -> Any:
    """Run one stage of a call. The first stage that is reached begins the call and notifies the
    listeners; later ones are part of it. ``forward`` is replaced by what their ``around`` return.
    """
    listeners = listeners_of(module)
    if not listeners:
        return run(*args, **kwargs)
    calls = _STACK.calls
    begins = not (calls and calls[-1][0] is module and calls[-1][1] < stage)
    notified: list[tuple[Listener, Any]] = []
    result = None
    calls.append((module, stage))
    try:
        if begins:
            for listener in listeners:
                notified.append((listener, listener.enter(module, args, kwargs)))
        if stage == FORWARD:
            for listener in listeners:
                run = listener.around(module, run)
        result = run(*args, **kwargs)
        return result
    finally:
        calls.pop()
        for listener, entered in reversed(notified):
            listener.leave(entered, result)


# Classes -----------------------------------------------------------------------------------------


def _static(kind: type, name: str) -> Any:
    """An attribute of a class or its bases, without calling descriptors."""
    return next(vars(each)[name] for each in kind.__mro__ if name in vars(each))


def _patch_when_instantiated(init: Forward) -> Forward:
    """While listeners for all modules exist, patches new classes when first instantiated."""

    @functools.wraps(init)
    def observed_call(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        for registration in _ALL:
            registration.patch([type(self)])
        init(self, *args, **kwargs)

    return observed_call


class Patch:
    """The changes to a class while an instance of it has a listener."""

    def __init__(self, kind: type) -> None:
        self.kind = kind
        self.users = 0
        self.put: dict[str, tuple[Any, Any]] = {}  # by name: what was there, what is there now

    def acquire(self) -> None:
        """Set the observing methods on the class, if this is their first user."""
        self.users += 1
        if self.users > 1:
            return
        plainly = _plain_call(self.kind)
        staged = self._stage("__call__", CALL)
        self._set("__call__", staged if plainly is None else self._quick(plainly, staged))
        self._set("_call_impl", self._stage("_call_impl", IMPLEMENTATION))
        if self.kind is nn.Module:
            self._set("__init__", _patch_when_instantiated(vars(self.kind)["__init__"]))
        elif _static(self.kind, "forward") is not vars(nn.Module)["forward"]:
            self._set("forward", _ObservedCall(self.kind))

    def _stage(self, name: str, stage: int) -> Forward:
        """The observing method that replaces ``__call__`` or ``_call_impl``."""
        own, kind = vars(self.kind).get(name, _MISSING), self.kind
        forward = _plain_forward(kind) if stage == IMPLEMENTATION else None

        @functools.wraps(_static(kind, name))
        def observed_call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            """The original; listeners are notified, unless the instance is of a subclass."""
            run = getattr(super(kind, self), name) if own is _MISSING else MethodType(own, self)
            if torch.compiler.is_compiling():
                if forward is not None and _only_forward(self):
                    return forward(self, *args, **kwargs)
                return run(*args, **kwargs)
            if type(self) is not kind or _needs_nothing(self):
                return run(*args, **kwargs)
            return _run(stage, self, run, args, kwargs)

        return observed_call

    def _quick(self, forward: FunctionType, staged: Forward) -> Forward:
        """The observing ``__call__`` of a class whose calls run its own ``forward`` and nothing
        else, for instances with one listener that need not be told of every stage: it takes the
        place of ``__call__`` and ``_call_impl``. ``staged`` is for all others.
        """
        kind, name = self.kind, "forward"

        @functools.wraps(staged)
        def observed_call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                return staged(self, *args, **kwargs)
            listener = _ONLY.get(id(self))
            if (
                listener is None
                or _ALL
                or type(self) is not kind
                or type(kind.__dict__.get(name)) is not _ObservedCall  # another took its place
                or nn.Module.__call__ is not _CALL  # as torch.fx does while it traces
                or torch._C._get_tracing_state()
                or self._compiled_call_impl is not None
                or not _only_forward(self)
            ):
                return staged(self, *args, **kwargs)
            calls = _STACK.calls
            if calls and calls[-1][0] is self:  # a call from within itself
                return forward(self, *args, **kwargs)
            entered, result = listener.enter(self, args, kwargs), None
            calls.append((self, FORWARD))
            try:
                result = forward(self, *args, **kwargs)
                return result
            finally:
                calls.pop()
                listener.leave(entered, result)

        return observed_call

    def _set(self, name: str, value: Any) -> None:
        self.put[name] = vars(self.kind).get(name, _MISSING), value
        type.__setattr__(self.kind, name, value)

    def release(self) -> None:
        """With the last user, restore the original attributes that have not been replaced since."""
        self.users -= 1
        if self.users:
            return
        del _PATCHES[self.kind]
        for name, (before, value) in self.put.items():
            if vars(self.kind).get(name) is not value:
                continue
            if isinstance(value, _ObservedCall):
                value.function = None  # breaks a reference cycle with the descriptor
            if before is _MISSING:
                type.__delattr__(self.kind, name)
            else:
                type.__setattr__(self.kind, name, before)


def _as_written(kind: type, name: str) -> Any:
    """The attribute of the class itself without the patch, or ``_MISSING``."""
    put = _PATCHES[kind].put if kind in _PATCHES else {}
    return put[name][0] if name in put else vars(kind).get(name, _MISSING)


def _plain_forward(kind: type) -> FunctionType | None:
    """The ``forward`` of a class, if it is a function and ``_call_impl`` is not overridden."""
    above = kind.__mro__[: kind.__mro__.index(nn.Module)]
    if any(_as_written(each, "_call_impl") is not _MISSING for each in above):
        return None
    written = (_as_written(each, "forward") for each in above)
    found = next((each for each in written if each is not _MISSING), None)
    return found if isinstance(found, FunctionType) else None


def _plain_call(kind: type) -> FunctionType | None:
    """The ``forward`` of a class, if it is a function of its own and ``__call__`` is torch's."""
    own = _as_written(kind, "forward")
    if kind is nn.Module or type(own) is not FunctionType or _plain_forward(kind) is not own:
        return None
    above = kind.__mro__[: kind.__mro__.index(nn.Module)]
    plain = all(_as_written(each, "__call__") is _MISSING for each in above)
    return own if plain else None


def _only_forward(module: nn.Module) -> bool:
    """Whether a call only runs ``forward`` of the class, without hooks. Used in compiled code,
    which in torch 2.8 and older cannot trace ``_ObservedCall``.
    """
    return not (
        "forward" in module.__dict__
        or module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or _module._global_forward_hooks
        or _module._global_forward_pre_hooks
        or _module._global_backward_hooks
        or _module._global_backward_pre_hooks
    )


class _ObservedCall:
    """A descriptor for ``forward`` of a class, which notifies the listeners of an instance.

    As a data descriptor it precedes an attribute ``forward`` of the instance, which is observed as
    well.
    """

    def __init__(self, kind: type) -> None:
        self.kind = kind
        self.own = vars(kind).get("forward", _MISSING)
        self.data = hasattr(type(self.own), "__set__")  # such as a property
        original = _static(kind, "forward")
        self.function = (
            _with_signature_of(self._notify_and_run, original) if callable(original) else None
        )

    def __get__(self, module: nn.Module | None, owner: type) -> Any:
        if module is None:
            return self.function or self._of_class(None, owner)
        own = not self.data and "forward" in vars(module)
        found = vars(module)["forward"] if own else self._of_class(module, owner)
        if not self._is_observed(module):
            return found
        bound = isinstance(found, MethodType) and found.__self__ is module
        if self.function is None or own or not bound:
            return CallEvent(module, found)
        return MethodType(self.function, module)

    def _is_observed(self, module: nn.Module) -> bool:
        """Whether the module has listeners, and this was not reached by ``super().forward``."""
        if type(module) is not self.kind or torch.compiler.is_compiling():
            return False
        return bool(listeners_of(module)) and not _needs_nothing(module)

    def _of_class(self, module: nn.Module | None, owner: type) -> Any:
        """The ``forward`` of the class without the patch, bound to the module."""
        if self.own is _MISSING:
            above: Any = super(self.kind, owner if module is None else module)
            return above.forward
        if torch.compiler.is_compiling() and type(self.own) is FunctionType and module is not None:
            return functools.partial(self.own, module)  # the compiler cannot trace ``__get__``
        get = getattr(type(self.own), "__get__", None)
        try:
            return self.own if get is None else get(self.own, module, owner)
        except AttributeError:
            if module is None:
                raise
            return module.__getattr__("forward")  # where TorchScript has it

    def __set__(self, module: nn.Module, value: Any) -> None:
        if self.data:
            self.own.__set__(module, value)
        else:
            vars(module)["forward"] = value

    def __delete__(self, module: nn.Module) -> None:
        if self.data:
            self.own.__delete__(module)
        elif "forward" in vars(module):
            del vars(module)["forward"]
        else:
            raise AttributeError("forward")

    def _notify_and_run(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """``Kind.forward(module, x)``, and ``module.forward(x)``."""
        if not isinstance(module, self.kind):  # a lazy module has another class after its pre-hook
            lazy = getattr(self.kind, "cls_to_become", None) is type(module)
            own = type(module).forward if lazy else self._of_class(None, self.kind)
            return own(module, *args, **kwargs)
        found = self._of_class(module, type(module))
        if not self._is_observed(module):
            return found(*args, **kwargs)
        return _run(FORWARD, module, found, args, kwargs)


def _with_signature_of(function: Forward, original: Any) -> FunctionType:
    """A function that calls ``function`` and has the source, signature and globals of the original,
    which ``torch.jit.script`` reads.
    """

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(self, *args, **kwargs)

    assert isinstance(forward, FunctionType)
    place = getattr(original, "__globals__", forward.__globals__)
    found = FunctionType(forward.__code__, place, closure=forward.__closure__)
    functools.update_wrapper(found, original)
    return found


class CallEvent:
    """Wraps a ``forward`` that is not a method of the class, such as one set on the instance.

    Or one that was bound before the class was patched (``kept``); if a module runs its own, that is
    part of its call.
    """

    def __init__(self, module: nn.Module, forward: Forward, kept: bool = False) -> None:
        self.module = module
        self.forward = forward
        self.kept = kept
        functools.update_wrapper(self, forward, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped ``forward`` and notify the listeners."""
        if is_compiling() or (self.kept and _is_running(self.module)):
            return self.forward(*args, **kwargs)
        return _run(FORWARD, self.module, self.forward, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["forward"], name)

    def __eq__(self, other: object) -> bool:
        return self.forward == (other.forward if isinstance(other, CallEvent) else other)

    def __hash__(self) -> int:
        return hash(self.forward)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.forward, memo)

    def __reduce__(self) -> Any:
        if isinstance(self.forward, MethodType):
            return self.forward.__reduce__()
        return _same, (self.forward,)


def _same(value: Any) -> Any:
    return value


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
            _EXCHANGES[id(self.holder), self.key] = self
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
        if _EXCHANGES.get((id(self.holder), self.key)) is self:
            del _EXCHANGES[id(self.holder), self.key]
        if self.holds():
            self.holder[self.key] = self.before


_EXCHANGES: dict[tuple[int, Any], _Exchange] = {}  # by the container's id, and the key in it


def _exchanges(module: nn.Module) -> Iterator[_Exchange]:
    """Exchanges of all that a module keeps; none in what every module has."""
    found: list[tuple[Any, Any]] = [
        (vars(module), key) for key in list(vars(module)) if key not in MODULE_TABLES
    ]
    for holder, key in found:  # grows meanwhile
        value = holder[key]
        known = _EXCHANGES.get((id(holder), key)) if _EXCHANGES else None
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
