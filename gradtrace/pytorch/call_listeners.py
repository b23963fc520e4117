"""Who listens to the calls of which modules, and how a call is run for them."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from types import MethodType
from typing import Any, Protocol, TypeAlias

import torch
from torch import nn

from gradtrace.pytorch.paused_calls import PAUSING, told

Forward: TypeAlias = Callable[..., Any]

is_compiling = torch.compiler.is_compiling


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

    def resume(self, entered: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Called on the calling thread when a call goes on that has ended for ``leave``: it has
        returned a generator or a coroutine. What this returns is for ``leave``, when it pauses;
        None if that need not be called.
        """


LISTENERS: dict[int, tuple[Listener, ...]] = {}  # by id of the module, and of its table of hooks
OUTERMOST: set[int] = set()  # the keys of LISTENERS where all listeners are ``outermost``
ONLY: dict[int, Listener] = {}  # the one listener of a module, if it is ``outermost``


class RegisteredForAll(Protocol):
    """A listener to every module."""

    listener: Listener

    def patch(self, kinds: Iterable[type]) -> None:
        """Patch these classes, once each."""


FOR_ALL: tuple[RegisteredForAll, ...] = ()


def set_listeners(key: int, listeners: tuple[Listener, ...]) -> None:
    """Set the listeners of a module, by its key in ``LISTENERS``."""
    OUTERMOST.discard(key)
    ONLY.pop(key, None)
    if listeners:
        LISTENERS[key] = listeners
        if all(each.outermost for each in listeners):
            OUTERMOST.add(key)
            if len(listeners) == 1:
                ONLY[key] = listeners[0]
    else:
        LISTENERS.pop(key, None)


def same_in_copies(module: nn.Module) -> int:
    """A key that a module shares with its shallow copies, such as replicas of ``DataParallel``."""
    return id(shared_table(module))


def shared_table(module: nn.Module) -> object:
    """What a module shares with its shallow copies, and with no other: the table of its hooks."""
    return vars(module).get("_forward_hooks", module)


def listeners_of(module: nn.Module) -> tuple[Listener, ...]:
    """The listeners of this module."""
    found = LISTENERS.get(id(module))
    if found is None and LISTENERS:
        found = LISTENERS.get(same_in_copies(module))
    return (*(found or ()), *(each.listener for each in FOR_ALL)) if FOR_ALL else found or ()


# Running calls -----------------------------------------------------------------------------------

CALL, IMPLEMENTATION, FORWARD = range(3)
"""The stages of one call, in order: ``__call__`` runs ``_call_impl``, which runs ``forward``."""


class _Stack(threading.local):
    def __init__(self) -> None:
        self.calls: list[tuple[nn.Module, int]] = []  # running on this thread; the stages reached


STACK = _Stack()


def needs_nothing(module: nn.Module) -> bool:
    """Whether this is a stage of a call whose beginning was told, to listeners that need no more"""
    if id(module) not in OUTERMOST or FOR_ALL:
        return False
    return is_running(module)


def is_running(module: nn.Module) -> bool:
    """Whether a call of the module is the innermost on this thread."""
    calls = STACK.calls
    return bool(calls) and calls[-1][0] is module


def run_stage(stage: int, module: nn.Module, run: Forward, args: Any, kwargs: Any) -> Any:
    """Run one stage of a call. The first stage that is reached begins the call and notifies the
    listeners; later ones are part of it. ``forward`` is replaced by what their ``around`` return.
    """
    listeners = listeners_of(module)
    if not listeners:
        return run(*args, **kwargs)
    calls = STACK.calls
    begins = not (calls and calls[-1][0] is module and calls[-1][1] < stage)
    notified: list[tuple[Listener, Any]] = []
    result, depth = None, len(calls)
    try:
        calls.append((module, stage))
        if begins:
            for listener in listeners:
                notified.append((listener, listener.enter(module, args, kwargs)))
        if stage == FORWARD:
            for listener in listeners:
                run = listener.around(module, run)
        result = run(*args, **kwargs)
        if begins and type(result) in PAUSING:
            result = pausing(result, module, notified, args, kwargs)
        return result
    finally:
        del calls[depth:]
        for listener, entered in reversed(notified):
            listener.leave(entered, result)


def pausing(
    result: Any, module: nn.Module, notified: Sequence[tuple[Listener, Any]], args: Any, kwargs: Any
) -> Any:
    """A generator or coroutine that a call has returned, so that its listeners are told when it
    goes on. One that the call was given is the caller's.
    """
    if any(result is each for each in (*args, *kwargs.values())):
        return result
    before = tuple(notified)

    def step(advance: Callable[..., Any], *given: Any) -> Any:
        calls, resumed, found = STACK.calls, [], None
        calls.append((module, FORWARD))
        try:
            for listener, entered in before:
                token = listener.resume(entered, module, args, kwargs)
                if token is not None:
                    resumed.append((listener, token))
            found = advance(*given)
            return found
        finally:
            calls.pop()
            for listener, token in reversed(resumed):
                listener.leave(token, found)

    return told(result, step)


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
        if is_compiling() or (self.kept and is_running(self.module)):
            return self.forward(*args, **kwargs)
        return run_stage(FORWARD, self.module, self.forward, args, kwargs)

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
