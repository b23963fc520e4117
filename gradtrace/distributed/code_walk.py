"""Digests of code, and of the values that it refers to.

Code is compared as bytecode, so comments do not matter: that of the loss function, of the user's
modules, and of the user's functions that they call, with the settings, constants and tensors that
these refer to. Code of installed packages is identified by its name. What the code itself changes
when it runs (counters, caches) does not count.
"""

from __future__ import annotations

import functools
import sys
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Container, Mapping
from contextlib import suppress
from dataclasses import is_dataclass
from datetime import date, timedelta
from enum import Enum
from numbers import Number
from operator import attrgetter, itemgetter, methodcaller
from pathlib import PurePath
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as nn_module

from gradtrace.distributed import digests, tuning
from gradtrace.distributed.code_facts import (
    ALL_NAMES,
    CONSTRUCTORS,
    NO_NAMES,
    NOTHING,
    UsedNames,
    Written,
    all_code,
    assigned,
    assignments,
    called_code,
    closure,
    constructed,
    definition,
    exchanged,
    filled,
    filled_by,
    imported,
    installed,
    operands,
    owner_of,
    reassigned,
    used_names,
)
from gradtrace.distributed.model_tensors import named_tensors, tensor_digests
from gradtrace.pytorch.call_patches import unpatched
from gradtrace.pytorch.wrapped_modules import named_modules, unwrapped, user_class

SIMPLE = (
    *(*digests.PRIMITIVES, torch.dtype, torch.device, torch.Size, torch.layout),
    *(torch.memory_format, range, slice, Number, PurePath, date, timedelta, bytearray),
)
"""Types of which a value is its text."""

FUNCTIONS = (FunctionType, MethodType, functools.partial, BuiltinFunctionType)
CONTAINERS = (list, set, tuple, frozenset, deque, Mapping)
WEAK = (WeakKeyDictionary, WeakValueDictionary)
"""Containers that are caches."""

FILLED = (list, set, dict, deque, bytearray, Tensor, np.ndarray)
"""Types of variables of which code changes the contents."""

GETTERS = (attrgetter, itemgetter, methodcaller)
RECORDS = (
    *(Namespace, SimpleNamespace, torch.distributions.Distribution),
    torch.distributions.transforms.Transform,
)
DATA = (*CONTAINERS, *GETTERS, Enum, Tensor, np.ndarray, np.generic)
"""Types of attributes that count whoever defined their class."""

MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
"""Attributes that every module has."""

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
GLOBAL_HOOKS = tuple(f"_global{name}" for name in HOOKS)


class Uses(NamedTuple):
    """What code does when it runs: the names it uses, what it changes, and the attributes that it
    assigns to, by the id of their class or module (of None: of anything).
    """

    names: UsedNames = NO_NAMES
    filled: Written = NOTHING
    assigned: frozenset[tuple[int, str]] = frozenset()

    def counts(self, owner: type | ModuleType, name: str) -> bool:
        """Whether it assigns to this attribute of a class, its objects or a module."""
        kinds = owner.__mro__ if isinstance(owner, type) else (owner,)
        return any((id(each), name) in self.assigned for each in (None, *kinds))


def code_digests(model: nn.Module, loss_fn: Callable[..., Any]) -> tuple[str, str]:
    """Digests of the code and the settings of a model's modules, and of those of a loss function.

    A first walk finds the code that runs, and so what is changed by it.
    """
    survey = CodeWalk(model)
    survey.modules(model)
    survey.value(loss_fn)
    modules, loss = CodeWalk(model, survey), CodeWalk(model, survey)
    modules.modules(model)
    loss.value(loss_fn)
    return modules.digest(), loss.digest()


class CodeWalk:
    """Digests code and the values it refers to, visiting each function once.

    Without a ``survey`` of what the code changes it is one itself, and digests no tensors.
    """

    def __init__(self, model: nn.Module, survey: CodeWalk | None = None) -> None:
        own = unwrapped(model)
        self._into = digests.new()
        self._light = survey is None
        self._seen: dict[int, Any] = {id(own): own}  # its weights are digested separately
        self._unchanged: set[type] = {object}  # installed classes, but for what was exchanged
        self.functions: dict[str, list[FunctionType]] = {}  # the user's, by name
        self.entries: list[CodeType] = []
        self._uses = Uses() if survey is None else _uses(survey)
        self._facts: Callable[[type], tuple[set[str], set[str], set[str]]] = functools.cache(
            self._facts_of
        )
        self._written: Callable[[FunctionType], Written] = functools.cache(filled_by)

    def digest(self) -> str:
        """The digest of everything added."""
        return str(self._into.hexdigest())

    def _facts_of(self, kind: type) -> tuple[set[str], set[str], set[str]]:
        used = self._uses.names
        changed = assigned(kind, used) | _cached(kind)
        contents = filled(kind, used).attributes
        if all(base in (nn.Module, object) for base in kind.__mro__ if installed(base)):
            # what other methods change matters if code that runs reads it
            changed |= assigned(kind, ALL_NAMES) - used.loaded
            contents |= filled(kind, ALL_NAMES).attributes - used.loaded
        return changed, constructed(kind) | {"_param"}, contents

    def add_text(self, *texts: object) -> None:
        """Add texts."""
        self._into.update(f"{texts!r}".encode("utf-8", "surrogatepass"))

    def value(self, value: Any, entry: bool = True) -> None:
        """Add a value. If it is a function, it may be called; unless it is not an ``entry``, but
        called by its name.

        An object that cannot be inspected is identified by its class.
        """
        try:
            if entry:
                self.entries += called_code(value)
            self._value(value)
        except Exception:  # the user's objects may raise anything when inspected
            self.add_text(digests.named(type(value)))

    def _value(self, value: Any) -> None:
        if isinstance(value, (Tensor, np.ndarray, np.generic)):
            if not self._light:
                digests.add(self._into, value)
        elif isinstance(value, Enum):
            self.add_text(digests.named(type(value)), value.name)
            self.value(value.value)
        elif isinstance(value, memoryview):
            self.add_text(bytes(value))
        elif isinstance(value, SIMPLE):
            self.add_text(value)
        elif isinstance(value, CONTAINERS):
            self._container(value)
        elif id(value) in self._seen:
            self.add_text("again")
        else:
            self._seen[id(value)] = value
            self._object(value)

    def _container(self, value: Any) -> None:
        self.add_text(type(value).__name__, len(value))
        items = (
            [each for pair in value.items() for each in pair]
            if isinstance(value, Mapping)
            else value
        )
        if isinstance(value, (set, frozenset)):
            self.add_text(*sorted(_text(each) for each in value))
        elif all(type(each) in digests.PRIMITIVES for each in items):
            self.add_text(*items)
        elif len(value) <= tuning.MAX_CONTAINER_ITEMS:
            for each in items:
                self.value(each)

    def _object(self, value: Any) -> None:
        if isinstance(value, FunctionType):
            self._function(value)
        elif isinstance(value, MethodType):
            self.value(value.__func__)
            self.value(value.__self__)
        elif isinstance(value, functools.partial):
            for part in (value.func, value.args, tuple(value.keywords.items())):
                self.value(part)
        elif isinstance(value, type):
            self._kind(value)
        elif isinstance(value, ModuleType):
            self.add_text(value.__name__)
        elif isinstance(value, nn.Module):
            self._model(value)
        elif isinstance(value, GETTERS):
            self.value(value.__reduce__())
        elif _holds_settings(value):
            self._kind(type(value))
            self._settings(value, frozenset())
        elif callable(value):
            self._callable(value)
        else:
            self._kind(type(value))

    def _callable(self, value: Any) -> None:
        """Add a function that an installed package or PyTorch has made, of the user's or not."""
        self.add_text(digests.named(type(value)), getattr(value, "__qualname__", ""))
        self.add_text(*(text for name in ("__name__", "code") if (text := _own_text(value, name))))
        bound = getattr(value, "__self__", None)
        self.value(None if isinstance(bound, ModuleType) else bound)
        inside = {**digests.attributes(value), "__wrapped__": getattr(value, "__wrapped__", None)}
        for name, each in sorted(inside.items()):
            if isinstance(each, FUNCTIONS):
                self.add_text(name)
                self.value(each)

    def _model(self, module: nn.Module) -> None:
        """Another model that a loss function uses."""
        for text in () if self._light else tensor_digests(named_tensors(module)).values():
            self.add_text(text)
        for name, each in named_modules(module):
            self.add_text(name, each.training)
            self._module(each)

    def modules(self, model: nn.Module) -> None:
        """Add the modules of a model, and hooks on all modules."""
        first: dict[int, str] = {}
        for name, module in named_modules(model):
            self.add_text(name, first.setdefault(id(module), name))
            self._module(module)
        for table in GLOBAL_HOOKS:
            self._hooks(table, getattr(nn_module, table, {}))
        for owner in (torch, nn.functional, Tensor):
            self._exchanged(owner)

    def _module(self, module: nn.Module) -> None:
        """Add the class, the settings and the hooks of a module, without its children."""
        self._kind(user_class(module))
        self.add_text(_own_text(module, "code"))  # of TorchScript and torch.fx
        self._settings(module, MODULE_ATTRIBUTES)
        for table in HOOKS:
            self._hooks(table, getattr(module, table, {}))
        for name, parameter in module._parameters.items():
            self._hooks(name, getattr(parameter, "_backward_hooks", None) or {})

    def _hooks(self, name: str, hooks: Mapping[int, Any]) -> None:
        """Add hooks, but for those of gradtrace itself."""
        for hook in hooks.values():
            if not str(getattr(hook, "__module__", "")).startswith("gradtrace."):
                self.add_text(name)
                self.value(hook)

    def _settings(self, item: Any, without: frozenset[str]) -> None:
        """Add the attributes of an object that code which runs does not assign: simple ones and
        functions; and, unless it fills them, containers, tensors and objects of the user's. Of
        private ones those count that code of the user's makes.
        """
        changed, own, contents = self._facts(type(item))
        contents = contents | self._uses.filled.attributes
        for name, value in sorted(digests.attributes(item).items()):
            if name in without or name in changed or (name.startswith("_") and name not in own):
                continue
            if self._uses.counts(type(item), name):
                continue
            if isinstance(value, (*SIMPLE, *FUNCTIONS)) or (
                name not in contents and (isinstance(value, DATA) or _holds_settings(value))
            ):
                self.add_text(name)
                self.value(value)

    def _kind(self, kind: type) -> None:
        """Add a class: its name, and if it is the user's, its code."""
        if installed(kind):
            self.add_text(kind.__module__)
        self.add_text(digests.named(kind))
        changed, _, contents = self._facts(kind)
        for base in kind.__mro__:
            if installed(base) and base not in self._unchanged:
                self._unchanged.add(base)
                self._exchanged(base)
            if installed(base) or (id(base) in self._seen and base is not kind):
                continue
            self._seen[id(base)] = base
            for name, value in sorted(unpatched(base).items()):
                function = definition(value)
                if isinstance(function, FunctionType):
                    self.add_text(name)
                    self._named(name, function)
                elif name.startswith("__") or name in changed or self._uses.counts(kind, name):
                    continue
                elif isinstance(function, (*SIMPLE, *FUNCTIONS)) or (
                    isinstance(value, DATA) and name not in contents | self._uses.filled.attributes
                ):
                    self.add_text(name)
                    self.value(function)

    def _named(self, name: str, function: FunctionType) -> None:
        """Add a function that code calls by a name."""
        self.functions.setdefault(name, []).append(function)
        self.value(function, entry=False)

    def _exchanged(self, owner: Any, names: Container[str] | None = None) -> None:
        """Add the user's functions in an installed module or class, of some names."""
        for name, function in exchanged(owner).items():
            if names is None or name in names:
                self.add_text(name)
                self._named(name, function)

    def _function(self, function: FunctionType) -> None:
        code = function.__code__
        own = not installed(function)
        written = self._written(function).names if own or function.__closure__ else set()
        changed = operands(code, "STORE_GLOBAL", "STORE_DEREF", "DELETE_GLOBAL")  # counters
        if own:
            self.functions.setdefault(function.__name__, []).append(function)
            self._bytecode(code)
        else:
            self.add_text(function.__module__, digests.named(function))
        self.value(function.__defaults__ or ())
        self.value(tuple((function.__kwdefaults__ or {}).items()))
        variables = closure(function)
        # co_names would include attributes
        loads = operands(code, "LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
        globals_ = function.__globals__
        if own:
            variables |= {name: globals_[name] for name in sorted(loads) if name in globals_}
            for name, module in imported(function).items():
                self.add_text(name)
                self._bytecode(module)
                now = sys.modules.get(name)
                for text, value in reassigned(now, module).items():
                    if now is None or not self._uses.counts(now, text):
                        self.add_text(text)
                        self.value(value)
        for name, value in variables.items():
            if name not in changed:
                self.add_text(name)
                self._variable(name, value, code, name in written)

    def _variable(self, name: str, value: Any, code: CodeType, written: bool) -> None:
        """Add the value of a variable around a function."""
        if isinstance(value, WEAK) or (written and isinstance(value, FILLED)):
            self.add_text(type(value).__name__)
        elif isinstance(value, FunctionType) and not installed(value):
            self._named(name, value)
        else:
            self.value(value, entry=not isinstance(value, ModuleType))
        if isinstance(value, ModuleType):
            self._attributes(value, {name for each in all_code(code) for name in each.co_names})

    def _attributes(self, module: ModuleType, names: set[str]) -> None:
        """Add what code that has these names may use of one of the user's modules."""
        if installed(module):
            self._exchanged(module, names)
            return
        for name in sorted(names & vars(module).keys()):
            if self._uses.counts(module, name):
                continue
            self.add_text(name)
            value = vars(module)[name]
            known = id(value) in self._seen
            if isinstance(value, FunctionType):
                self._named(name, value)
            else:
                self.value(value)
            if isinstance(value, ModuleType) and not known:
                self._attributes(value, names)

    def _bytecode(self, code: CodeType) -> None:
        self.add_text(code.co_code, code.co_names, code.co_argcount, code.co_flags)
        for each in code.co_consts:
            self._constant(each)

    def _constant(self, value: Any) -> None:
        if isinstance(value, CodeType):
            self._bytecode(value)
        elif isinstance(value, tuple):
            for each in value:
                self._constant(each)
        elif isinstance(value, frozenset):  # its order differs between processes
            self.add_text(*sorted(map(repr, value)))
        else:
            self.add_text(value)


def _uses(survey: CodeWalk) -> Uses:
    """What the code that was visited does when it runs."""
    named = [(name, f) for name, some in survey.functions.items() for f in some]
    used = used_names(((name, f.__code__) for name, f in named), survey.entries)
    runs = [f for name, f in named if f.__code__ in survey.entries or used.runs("read", name)]
    filled = NOTHING.join(*map(filled_by, runs))
    runs += [f for name, f in named if name in CONSTRUCTORS and _made_in(f) in used.loaded]
    return Uses(used, filled, frozenset().union(*map(_assigned_by, runs)))


def _assigned_by(function: FunctionType) -> frozenset[tuple[int, str]]:
    """The attributes that a function assigns to."""
    found = set()
    for path, name in assignments(function):
        owner = owner_of(function, path)
        known = owner is None or isinstance(owner, (type, ModuleType))
        found.add((id(owner if known else type(owner)), name))
    return frozenset(found)


def _made_in(constructor: FunctionType) -> str:
    """The name of the class that a constructor is of."""
    return constructor.__qualname__.rpartition(".")[0].rpartition(".")[2]


def _text(value: Any) -> str:
    """A text for an item of a set, which does not depend on the process."""
    known = (*digests.PRIMITIVES, tuple, frozenset, Enum, *SIMPLE)
    return digests.digest(value) if isinstance(value, known) else digests.named(type(value))


def _own_text(value: Any, name: str) -> str:
    """An attribute of an object if it is text, else nothing."""
    with suppress(Exception):
        found = getattr(value, name)
        return found if isinstance(found, str) else ""
    return ""


def _holds_settings(value: Any) -> bool:
    """Whether the attributes of an object may be settings of the user's: those of objects of the
    user's, of records, distributions, and configurations, as of transformers.
    """
    if isinstance(value, (type, ModuleType, nn.Module)):
        return False
    known = isinstance(value, RECORDS) or is_dataclass(value)
    return known or hasattr(value, "to_dict") or not installed(type(value))


def _cached(kind: type) -> set[str]:
    """Attributes that a class computes when they are first asked for."""
    lazy = (torch.distributions.utils.lazy_property, functools.cached_property)
    return {name for base in kind.__mro__ for name, v in vars(base).items() if isinstance(v, lazy)}
