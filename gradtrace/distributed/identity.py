"""The identity of a measurement: a model, its weights, its mode and the code of a loss function.

Counts of one model must not be added to those of another. So a checkpoint stores a
``RunIdentity``, and a run that continues it compares. Code is compared as bytecode, so comments do
not matter: that of the loss function, of the user's modules, and of the user's functions that
they call, with the constants and tensors that these refer to. Code of installed packages is
identified by its name. Lists and dicts count unless the code that refers to them changes them.
"""

from __future__ import annotations

import functools
import platform
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, is_dataclass
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from gradtrace.distributed import digests, tuning
from gradtrace.distributed.code_facts import (
    all_code,
    assigned,
    changes_containers,
    constructed,
    filled,
    filled_by,
    installed,
    operands,
)
from gradtrace.pytorch.wrapped_modules import (
    join,
    named_modules,
    refuse_lazy,
    unwrapped,
    user_class,
)

SIMPLE = (*digests.PRIMITIVES, torch.dtype, torch.device, torch.Size, range, slice)
"""Types of which a value is its text."""

FUNCTIONS = (FunctionType, MethodType, functools.partial)
DATA = (list, dict, set, tuple, frozenset, Tensor, np.ndarray)
"""Types of attributes that count whoever defined their class."""

MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
"""Attributes that every module has."""


@dataclass(frozen=True)
class RunIdentity:
    """Short texts and digests that identify a model and a loss function."""

    gradtrace: str
    python: str
    model: str  # its class
    tensors: str  # names, shapes and types of parameters and buffers
    values: str  # 8 hexadecimal digits for each of them
    modules: str  # classes, code and settings of modules
    mode: str  # which modules are in training
    loss: str

    def differences(self, now: RunIdentity, names: list[str]) -> list[str]:
        """What has changed since, as text; ``names`` are the names of the model's tensors now."""
        for field, what, a in (
            ("gradtrace", "gradtrace", ""),
            ("python", "Python", ""),
            ("model", "the model", "a "),
        ):
            before, after = getattr(self, field), getattr(now, field)
            if before != after:
                return [f"{what} (it was {a}{before}, this is {a}{after})"]
        changed = [
            text for field, text in CHANGES.items() if getattr(self, field) != getattr(now, field)
        ]
        if self.tensors == now.tensors and self.values != now.values:
            changed.insert(0, _values(self.values, now.values, names))
        return changed


CHANGES = {
    "tensors": "the model's parameters and buffers (names, shapes, dtypes)",
    "modules": "the code or the settings of the model's modules",
    "mode": "the mode of modules (model.train() and model.eval()) or torch.autocast around it",
    "loss": "the loss function (its code, or constants that it uses)",
}
"""What has changed if a field of two identities differs."""


def _values(before: str, now: str, names: list[str]) -> str:
    odd = [name for n, name in enumerate(names) if before[8 * n : 8 * n + 8] != now[8 * n :][:8]]
    more = f" and {len(odd) - 1:,} more" if len(odd) > 1 else ""
    return f"the values of weights or buffers ({odd[0] if odd else 'all'}{more})"


def identity(model: nn.Module, loss_fn: Callable[..., Any]) -> tuple[RunIdentity, list[str]]:
    """The identity of a measurement, and the names of the model's tensors."""
    tensors = named_tensors(model)
    for name, tensor in tensors.items():
        refuse_lazy(name, tensor)
    modules, loss = CodeWalk(unwrapped(model)), CodeWalk(unwrapped(model))
    for name, module in named_modules(model):
        modules.add_text(name)
        modules.module(module)
    loss.value(loss_fn, None)
    return RunIdentity(
        gradtrace=sys.modules["gradtrace"].__version__,
        python=".".join(platform.python_version_tuple()[:2]),
        model=digests.named(user_class(unwrapped(model))),
        tensors=digests.digest(
            *((n, str(t.dtype), tuple(t.shape), t.requires_grad) for n, t in tensors.items())
        ),
        values="".join(each[:8] for each in tensor_digests(tensors).values()),
        modules=modules.digest(),
        mode=digests.digest(
            _autocast(model), *((name, module.training) for name, module in named_modules(model))
        ),
        loss=loss.digest(),
    ), list(tensors)


def _autocast(model: nn.Module) -> list[str]:
    """The dtypes of ``torch.autocast`` around the call, on the devices of a model."""
    kinds = sorted({tensor.device.type for tensor in (*model.parameters(), *model.buffers())})
    on = [kind for kind in kinds if torch.amp.is_autocast_available(kind)]
    return [f"{x} {torch.get_autocast_dtype(x)}" for x in on if torch.is_autocast_enabled(x)]


def tensor_digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """A digest of each of some tensors."""
    found = {name: digests.new() for name in tensors}
    digests.add_tensors([(found[name], tensor) for name, tensor in tensors.items()])
    return {name: state.hexdigest() for name, state in found.items()}


def used_buffers(module: nn.Module) -> bool:
    """Whether a module uses its buffers: norms in training do not use their running statistics."""
    return not (module.training and isinstance(module, _NormBase))


def named_tensors(
    model: nn.Module, with_buffers: Callable[[nn.Module], bool] = used_buffers
) -> dict[str, Tensor]:
    """Parameters, and buffers of the modules for which ``with_buffers`` is true."""
    return {
        join(name, key): tensor
        for name, module in named_modules(model)
        for table in (module._parameters, module._buffers if with_buffers(module) else {})
        for key, tensor in table.items()
        if tensor is not None
    }


# Code ---------------------------------------------------------------------------------------------


class CodeWalk:
    """Digests code and the values it refers to, visiting each function once."""

    def __init__(self, model: nn.Module) -> None:
        self._into = digests.new()
        self._seen: dict[int, Any] = {id(model): model}  # its weights are digested separately
        self._facts: Callable[[type], tuple[set[str], set[str], set[str]]] = functools.cache(
            lambda kind: (assigned(kind), constructed(kind), filled(kind))
        )
        kinds = {user_class(module) for module in model.modules()}
        self._filled = set[str]().union(*map(filled, kinds))  # by any module or function

    def digest(self) -> str:
        """The digest of everything added."""
        return str(self._into.hexdigest())

    def add_text(self, *texts: object) -> None:
        """Add texts."""
        self._into.update(f"{texts!r}".encode("utf-8", "surrogatepass"))

    def value(self, value: Any, user: CodeType | None) -> None:
        """Add a value that the code ``user`` refers to and may change.

        An object that cannot be inspected is identified by its class.
        """
        try:
            self._value(value, user)
        except Exception:  # the user's objects may raise anything when inspected
            self.add_text(digests.named(type(value)))

    def _value(self, value: Any, user: CodeType | None) -> None:
        if isinstance(value, SIMPLE):
            self.add_text(value)
        elif isinstance(value, (list, dict, set, tuple, frozenset)):
            self._container(value, user)
        elif isinstance(value, (Tensor, np.ndarray)):
            digests.add(self._into, value)
        elif id(value) in self._seen:
            self.add_text("again")
        else:
            self._seen[id(value)] = value
            self._object(value, user)

    def _container(self, value: Any, user: CodeType | None) -> None:
        self.add_text(type(value).__name__)
        if isinstance(value, (list, dict, set)) and user is not None and changes_containers(user):
            return
        if len(value) > tuning.MAX_CONTAINER_ITEMS:
            self.add_text(len(value))
        elif isinstance(value, (set, frozenset)):
            self.add_text(
                *sorted(repr(each) for each in value if isinstance(each, digests.PRIMITIVES))
            )
        else:
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for key, each in items:
                self.value(key, user)
                self.value(each, user)

    def _object(self, value: Any, user: CodeType | None) -> None:
        if isinstance(value, FunctionType):
            self._function(value)
        elif isinstance(value, MethodType):
            self.value(value.__func__, None)
            self.value(value.__self__, user)
        elif isinstance(value, functools.partial):
            for part in (value.func, value.args, tuple(value.keywords.items())):
                self.value(part, None)
        elif isinstance(value, type):
            self._kind(value)
        elif isinstance(value, (ModuleType, BuiltinFunctionType)):
            self.add_text(getattr(value, "__name__", ""))
        elif isinstance(value, nn.Module):
            self._model(value)
        else:
            self._kind(type(value))
            if _holds_settings(value):
                self._settings(value, frozenset())

    def _model(self, module: nn.Module) -> None:
        """Another model that a loss function uses."""
        for text in tensor_digests(named_tensors(module)).values():
            self.add_text(text)
        for name, each in named_modules(module):
            self.add_text(name, each.training)
            self.module(each)

    def module(self, module: nn.Module) -> None:
        """Add the class, the settings and the hooks of a module, without its children."""
        self._kind(user_class(module))
        self._settings(module, MODULE_ATTRIBUTES)
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            self.value(hook, None)

    def _settings(self, item: Any, without: frozenset[str]) -> None:
        """Add the attributes of an object that only its constructor assigns: simple ones and
        functions; and, unless something fills them later, containers, tensors and objects of the
        user's. Of private ones those count that code of the user's makes.
        """
        changed, own, contents = self._facts(type(item))
        contents = contents | self._filled
        for name, value in sorted(digests.attributes(item).items()):
            if name in without or name in changed or (name.startswith("_") and name not in own):
                continue
            if isinstance(value, SIMPLE):
                self.add_text(name, value)
            elif isinstance(value, FUNCTIONS) or (
                name not in contents and (isinstance(value, DATA) or _holds_settings(value))
            ):
                self.add_text(name)
                self.value(value, None)

    def _kind(self, kind: type) -> None:
        """Add a class: its name, and if it is the user's, its code."""
        if installed(kind):
            self.add_text(kind.__module__)
        self.add_text(digests.named(kind))
        for base in kind.__mro__:
            if installed(base) or (id(base) in self._seen and base is not kind):
                continue
            self._seen[id(base)] = base
            for name, value in sorted(vars(base).items()):
                function = getattr(value, "__func__", getattr(value, "fget", value))
                if isinstance(function, FunctionType):
                    self.add_text(name)
                    self.value(function, None)
                elif not name.startswith("__") and isinstance(value, digests.PRIMITIVES):
                    self.add_text(name, value)

    def _function(self, function: FunctionType) -> None:
        code = function.__code__
        own = not installed(function)
        assigned = operands(code, "STORE_GLOBAL", "STORE_DEREF", "DELETE_GLOBAL")  # counters
        if own:
            self._filled |= filled_by(function)
            self._bytecode(code)
        else:
            self.add_text(function.__module__, digests.named(function))
        for part in (function.__defaults__ or (), tuple((function.__kwdefaults__ or {}).items())):
            self.value(part, code)
        for name, cell in zip(code.co_freevars, function.__closure__ or ()):
            if name not in assigned:
                self.add_text(name)
                with suppress(ValueError):  # not assigned yet
                    self.value(cell.cell_contents, code)
        # co_names would include attributes
        loaded = operands(code, "LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
        for name in sorted(loaded - assigned) if own else ():
            if name in function.__globals__:
                self.add_text(name)
                self._global(function.__globals__[name], code)

    def _global(self, value: Any, code: CodeType) -> None:
        self.value(value, code)
        if isinstance(value, ModuleType) and not installed(value):
            names = {name for each in all_code(code) for name in each.co_names}
            for name in sorted(names & vars(value).keys()):
                self.add_text(name)
                self.value(vars(value)[name], code)

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


def _holds_settings(value: Any) -> bool:
    """Whether the attributes of an object may be settings of the user's."""
    records = isinstance(value, (Namespace, SimpleNamespace)) or is_dataclass(value)
    return records or not installed(type(value))
