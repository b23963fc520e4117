"""The identity of a measurement: a model, its weights, its mode and the code of a loss function.

Counts of one model must not be added to those of another. So a checkpoint stores a
``RunIdentity``, and a run that continues it compares. Code is compared as bytecode, so comments do
not matter: that of the loss function, of the user's modules, and of the user's functions that
they call, with the constants and tensors that these refer to. Code of installed packages is
identified by its name. Lists and dicts count unless the code that refers to them changes them.
"""

from __future__ import annotations

import dis
import functools
import platform
import sys
import sysconfig
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
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

from gradtrace.distributed import digests
from gradtrace.pytorch.wrapped_modules import join, named_modules, unwrapped

CONSTRUCTORS = ("__init__", "__post_init__", "__new__", "__setstate__")
"""Methods that construct an object: attributes that other methods assign change during use."""

MUTATORS = frozenset(
    {"add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem"}
    | {"popleft", "remove", "reverse", "setdefault", "sort", "subtract", "update", "write"}
)
"""Methods that change a container."""

STORES = ("STORE_SUBSCR", "DELETE_SUBSCR", "STORE_SLICE")
MAX_CONTAINER_ITEMS = 10_000
"""For containers with more items than this, only the number of items counts."""

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

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RunIdentity:
        """The inverse of ``to_dict``; raises a ValueError for anything else."""
        names = cls.__dataclass_fields__.keys()
        if data.keys() != names or not all(isinstance(data[name], str) for name in names):
            raise ValueError("no identity of a model and a loss function")
        return cls(**data)

    def to_dict(self) -> dict[str, str]:
        """The fields by name, for JSON."""
        return asdict(self)

    def differences(self, now: RunIdentity, names: list[str]) -> list[str]:
        """What has changed since, as text; ``names`` are the names of the model's tensors now."""
        if self.gradtrace != now.gradtrace:
            return [f"gradtrace (it was {self.gradtrace}, this is {now.gradtrace})"]
        if self.python != now.python:
            return [f"Python (it was {self.python}, this is {now.python})"]
        if self.model != now.model:
            return [f"the model (it was a {self.model}, this is a {now.model})"]
        found = []
        if self.tensors != now.tensors:
            found.append("the model's parameters and buffers (names, shapes, dtypes)")
        elif self.values != now.values:
            found.append(_values(self.values, now.values, names))
        if self.modules != now.modules:
            found.append("the code or the settings of the model's modules")
        if self.mode != now.mode:
            found.append("the mode of modules (model.train() and model.eval())")
        if self.loss != now.loss:
            found.append("the loss function (its code, or constants that it uses)")
        return found


def _values(before: str, now: str, names: list[str]) -> str:
    odd = [name for n, name in enumerate(names) if before[8 * n : 8 * n + 8] != now[8 * n :][:8]]
    more = f" and {len(odd) - 1:,} more" if len(odd) > 1 else ""
    return f"the values of weights or buffers ({odd[0] if odd else 'all'}{more})"


def identity(model: nn.Module, loss_fn: Callable[..., Any]) -> tuple[RunIdentity, list[str]]:
    """The identity of a measurement, and the names of the model's tensors."""
    tensors = dict(_tensors(model))
    return RunIdentity(
        gradtrace=sys.modules["gradtrace"].__version__,
        python=".".join(platform.python_version_tuple()[:2]),
        model=digests.named(_class(unwrapped(model))),
        tensors=digests.digest(
            *((n, str(t.dtype), tuple(t.shape), t.requires_grad) for n, t in tensors.items())
        ),
        values="".join(each[:8] for each in tensor_digests(tensors).values()),
        modules=_modules(model),
        mode=digests.digest(*((name, module.training) for name, module in named_modules(model))),
        loss=_code(loss_fn, unwrapped(model)),
    ), list(tensors)


def tensor_digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """A digest of each of some tensors."""
    found = {name: digests.new() for name in tensors}
    digests.add_tensors([(found[name], tensor) for name, tensor in tensors.items()])
    return {name: state.hexdigest() for name, state in found.items()}


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers, without running statistics of norms in training mode, which do not
    use them.
    """
    for name, module in named_modules(model):
        tensors: dict[str, Tensor | None] = dict(module._parameters)
        if not (module.training and isinstance(module, _NormBase)):
            tensors |= module._buffers
        for key, tensor in tensors.items():
            if tensor is not None:
                yield join(name, key), tensor


def _class(module: nn.Module) -> type:
    """The user's class of a module; ``fully_shard`` replaces it by a subclass."""
    kinds = type(module).__mro__
    return kinds[2] if kinds[1].__name__ == "FSDPModule" else kinds[0]


# Code ---------------------------------------------------------------------------------------------


def _modules(model: nn.Module) -> str:
    walk = CodeWalk(unwrapped(model))
    for name, module in named_modules(model):
        walk.add_text(name)
        walk.kind(_class(module))
        walk.settings(module, MODULE_ATTRIBUTES)
    return walk.digest()


def _code(function: Any, model: nn.Module) -> str:
    walk = CodeWalk(model)
    walk.value(function, None)
    return walk.digest()


class CodeWalk:
    """Digests code and the values it refers to, visiting each function once."""

    def __init__(self, model: nn.Module) -> None:
        self._into = digests.new()
        self._seen: dict[int, Any] = {id(model): model}  # its weights are digested separately
        self._assigned: dict[type, frozenset[str]] = {}

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
        if isinstance(value, digests.PRIMITIVES) or _is_simple(value):
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
        if isinstance(value, (list, dict, set)) and user is not None and _changes(user):
            return
        if len(value) > MAX_CONTAINER_ITEMS:
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
            self.kind(value)
        elif isinstance(value, (ModuleType, BuiltinFunctionType)):
            self.add_text(getattr(value, "__name__", ""))
        elif isinstance(value, nn.Module):
            self._module(value)
        else:
            self.kind(type(value))
            if not installed(type(value)) or isinstance(value, (Namespace, SimpleNamespace)):
                self.settings(value, frozenset())

    def _module(self, module: nn.Module) -> None:
        """Another model that a loss function uses."""
        for text in tensor_digests(dict(_tensors(module))).values():
            self.add_text(text)
        for name, each in named_modules(module):
            self.add_text(name, each.training)
            self.kind(_class(each))
            self.settings(each, MODULE_ATTRIBUTES)

    def settings(self, item: Any, without: frozenset[str]) -> None:
        """Add the simple attributes of an object that only its constructor assigns."""
        kind = type(item)
        if kind not in self._assigned:
            self._assigned[kind] = _assigned(kind)
        changed = self._assigned[kind]
        for name, value in sorted(digests.attributes(item).items()):
            if name in without or name in changed or name.startswith("_"):
                continue
            if isinstance(value, digests.PRIMITIVES) or _is_simple(value):
                self.add_text(name, value)
            elif isinstance(value, (FunctionType, MethodType, functools.partial)):
                self.add_text(name)
                self.value(value, None)

    def kind(self, kind: type) -> None:
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
        changed = _stored(code)
        if own:
            self._bytecode(code)
        else:
            self.add_text(function.__module__, digests.named(function))
        for part in (function.__defaults__ or (), tuple((function.__kwdefaults__ or {}).items())):
            self.value(part, code)
        for name, cell in zip(code.co_freevars, function.__closure__ or ()):
            if name not in changed:
                self.add_text(name)
                self._held(cell, code)
        for name in sorted(_globals(code)) if own else ():
            if name in function.__globals__ and name not in changed:
                self.add_text(name)
                self._global(function.__globals__[name], code)

    def _held(self, cell: Any, code: CodeType) -> None:
        try:
            value = cell.cell_contents
        except ValueError:  # not assigned yet
            return
        self.value(value, code)

    def _global(self, value: Any, code: CodeType) -> None:
        self.value(value, code)
        if isinstance(value, ModuleType) and not installed(value):
            for name in sorted(_names(code)):
                if name in vars(value):
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


def _is_simple(value: Any) -> bool:
    return isinstance(value, (torch.dtype, torch.device, torch.Size, range, slice))


def _all(code: CodeType) -> Iterator[CodeType]:
    """A function's code and that of functions within it."""
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _all(each)


def _names(code: CodeType) -> set[str]:
    """Names of globals and of attributes."""
    return {name for each in _all(code) for name in each.co_names}


def _globals(code: CodeType) -> set[str]:
    """Names of globals that a function reads. ``co_names`` would include attributes."""
    return {
        step.argval
        for each in _all(code)
        for step in dis.get_instructions(each)
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
    }


def _stored(code: CodeType) -> frozenset[str]:
    """Names outside a function that it assigns to, such as counters."""
    return frozenset(
        step.argval
        for each in _all(code)
        for step in dis.get_instructions(each)
        if step.opname in ("STORE_GLOBAL", "STORE_DEREF", "DELETE_GLOBAL")
    )


def _changes(code: CodeType) -> bool:
    """Whether a function may change containers that it refers to."""
    return any(
        step.opname in STORES
        or (step.opname in ("LOAD_ATTR", "LOAD_METHOD") and step.argval in MUTATORS)
        for each in _all(code)
        for step in dis.get_instructions(each)
    )


def _assigned(kind: type) -> frozenset[str]:
    """Attributes that methods of a class other than its constructors assign."""
    found = set()
    for base in kind.__mro__:
        for name, value in vars(base).items():
            function = getattr(value, "__func__", value)
            if name in CONSTRUCTORS or not isinstance(function, FunctionType) or installed(base):
                continue
            for each in _all(function.__code__):
                found |= {
                    step.argval
                    for step in dis.get_instructions(each)
                    if step.opname == "STORE_ATTR"
                }
    return frozenset(found)


@functools.cache
def _roots() -> tuple[str, ...]:
    """Directories of installed code."""
    found = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    ours = sys.modules["gradtrace"].__file__ or ""
    return (*(path for path in found if path), ours.removesuffix("__init__.py"))


def installed(definition: Any) -> bool:
    """Whether code belongs to an installed package, and not to the user's own program."""
    code = getattr(definition, "__code__", None)
    if isinstance(code, CodeType):
        file = code.co_filename
    else:
        name = definition.__name__ if isinstance(definition, ModuleType) else definition.__module__
        module = sys.modules.get(name)
        file = getattr(module, "__file__", None) or ""
        if module is not None and not file:
            return name != "__main__"  # built in
    return "site-packages" in file or file.startswith(_roots())
