"""What is put on the classes of modules while an instance has a listener."""

from __future__ import annotations

import functools
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as _module

from gradtrace.pytorch import call_listeners
from gradtrace.pytorch.call_listeners import (
    CALL,
    FORWARD,
    IMPLEMENTATION,
    ONLY,
    STACK,
    CallEvent,
    Forward,
    is_compiling,
    listeners_of,
    needs_nothing,
    pausing,
    run_stage,
)
from gradtrace.pytorch.paused_calls import PAUSING

_CALL = nn.Module.__call__
MISSING = object()
PATCHES: dict[type, Patch] = {}


def _static(kind: type, name: str) -> Any:
    """An attribute of a class or its bases, without calling descriptors."""
    return next(vars(each)[name] for each in kind.__mro__ if name in vars(each))


def _patch_when_instantiated(init: Forward) -> Forward:
    """While listeners for all modules exist, patches new classes when first instantiated."""

    @functools.wraps(init)
    def observed_call(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        for registration in call_listeners.FOR_ALL:
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
        own, kind = vars(self.kind).get(name, MISSING), self.kind
        forward = _plain_forward(kind) if stage == IMPLEMENTATION else None

        @functools.wraps(_static(kind, name))
        def observed_call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            """The original; listeners are notified, unless the instance is of a subclass."""
            run = getattr(super(kind, self), name) if own is MISSING else MethodType(own, self)
            if torch.compiler.is_compiling():
                if forward is not None and _only_forward(self):
                    return forward(self, *args, **kwargs)
                return run(*args, **kwargs)
            if type(self) is not kind or needs_nothing(self):
                return run(*args, **kwargs)
            return run_stage(stage, self, run, args, kwargs)

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
            listener = ONLY.get(id(self))
            if (
                listener is None
                or call_listeners.FOR_ALL
                or type(self) is not kind
                or type(kind.__dict__.get(name)) is not _ObservedCall  # another took its place
                or nn.Module.__call__ is not _CALL  # as torch.fx does while it traces
                or torch._C._get_tracing_state()
                or self._compiled_call_impl is not None
                or not _only_forward(self)
            ):
                return staged(self, *args, **kwargs)
            calls = STACK.calls
            if calls and calls[-1][0] is self:  # a call from within itself
                return forward(self, *args, **kwargs)
            entered, result, depth = listener.enter(self, args, kwargs), None, len(calls)
            try:
                calls.append((self, FORWARD))
                result = forward(self, *args, **kwargs)
                if type(result) in PAUSING:
                    result = pausing(result, self, ((listener, entered),), args, kwargs)
                return result
            finally:
                del calls[depth:]
                listener.leave(entered, result)

        return observed_call

    def _set(self, name: str, value: Any) -> None:
        self.put[name] = vars(self.kind).get(name, MISSING), value
        type.__setattr__(self.kind, name, value)

    def release(self) -> None:
        """With the last user, restore the original attributes that have not been replaced since."""
        self.users -= 1
        if self.users:
            return
        del PATCHES[self.kind]
        for name, (before, value) in self.put.items():
            if vars(self.kind).get(name) is not value:
                continue
            if isinstance(value, _ObservedCall):
                value.function = None  # breaks a reference cycle with the descriptor
            if before is MISSING:
                type.__delattr__(self.kind, name)
            else:
                type.__setattr__(self.kind, name, before)


def _as_written(kind: type, name: str) -> Any:
    """The attribute of the class itself without the patch, or ``MISSING``."""
    put = PATCHES[kind].put if kind in PATCHES else {}
    return put[name][0] if name in put else vars(kind).get(name, MISSING)


def _plain_forward(kind: type) -> FunctionType | None:
    """The ``forward`` of a class, if it is a function and ``_call_impl`` is not overridden."""
    above = kind.__mro__[: kind.__mro__.index(nn.Module)]
    if any(_as_written(each, "_call_impl") is not MISSING for each in above):
        return None
    written = (_as_written(each, "forward") for each in above)
    found = next((each for each in written if each is not MISSING), None)
    return found if isinstance(found, FunctionType) else None


def _plain_call(kind: type) -> FunctionType | None:
    """The ``forward`` of a class, if it is a function of its own and ``__call__`` is torch's."""
    own = _as_written(kind, "forward")
    if kind is nn.Module or type(own) is not FunctionType or _plain_forward(kind) is not own:
        return None
    above = kind.__mro__[: kind.__mro__.index(nn.Module)]
    plain = all(_as_written(each, "__call__") is MISSING for each in above)
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
        self.own = vars(kind).get("forward", MISSING)
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
        return bool(listeners_of(module)) and not needs_nothing(module)

    def _of_class(self, module: nn.Module | None, owner: type) -> Any:
        """The ``forward`` of the class without the patch, bound to the module."""
        if self.own is MISSING:
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
        return run_stage(FORWARD, module, found, args, kwargs)


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
