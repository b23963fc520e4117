"""Code of the user's that runs once more than it would: what it wrote is written back.

A checkpointed part of a model runs again when it is traced, and a model that is measured runs in
addition to its training. Batch norms then count a batch once more, codebooks and moving averages
move. Here every write on memory that was there before is seen, as an ATen operation, and what was
there is copied first; Python's side (counters, attributes, lists) is noted module by module.
"""

from __future__ import annotations

import copy
import random
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from gradtrace.pytorch import internals


class Writes(NamedTuple):
    """What an operation does to memory that it is given."""

    to: tuple[tuple[int, str], ...]  # the arguments that it writes on, by position and name
    fresh: bool  # whether its results are new, unless they share memory with an argument


_WRITES: dict[Any, Writes] = {}

UNDECLARED_WRITES = frozenset({"running_mean", "running_var"})
"""Arguments that batch norms write on though their schemas do not say so."""


def _learn(func: Any) -> Writes:
    schema = func._schema
    written = tuple(
        (position, argument.name)
        for position, argument in enumerate(schema.arguments)
        if (argument.alias_info is not None and argument.alias_info.is_write)
        or argument.name in UNDECLARED_WRITES
    )
    fresh = all(result.alias_info is None for result in schema.returns)
    _WRITES[func] = found = Writes(written, fresh)
    return found


class Undo(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While this mode is on, what is about to be overwritten is kept; ``restore`` writes it back.

    Memory that was made under the mode is not kept: nothing else knows it.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept: list[tuple[Tensor, Tensor, int | None]] = []
        self._seen: set[object] = set()
        self._fresh: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Keep what the operation will overwrite, and run it."""
        kwargs = kwargs or {}
        writes = _WRITES.get(func) or _learn(func)
        for position, name in writes.to:
            given = args[position] if position < len(args) else kwargs.get(name)
            for tensor in _tensors((given,)):
                self._keep(tensor)
        out = func(*args, **kwargs)
        if writes.fresh:
            given_memory = {_memory(x) for x in _tensors((*args, *kwargs.values()))}
            self._fresh.update({_memory(x) for x in _tensors((out,))} - given_memory)
        return out

    def _keep(self, tensor: Tensor) -> None:
        memory = _memory(tensor)
        strided = tensor.layout is torch.strided
        place = (tensor.storage_offset(), tensor.size(), tensor.stride()) if strided else ()
        key = (memory, tensor.dtype, place)
        if memory in self._fresh or key in self._seen:
            return
        self._seen.add(key)
        version = None if tensor.is_inference() else tensor._version
        with _disable_current_modes(), torch.no_grad():
            there = tensor.detach()
            self._kept.append((there, there.clone(), version))

    def restore(self) -> None:
        """Write back what was there. Graphs that hold the memory do not notice."""
        with _disable_current_modes(), torch.no_grad():
            for there, before, version in reversed(self._kept):
                there.copy_(before)
                if version is not None:
                    internals.set_version(there, version)
        self._kept.clear()
        self._seen.clear()


_HERE = threading.local()


@contextmanager
def undoing(undo: Undo) -> Iterator[None]:
    """Within, what code of the user's writes while a graph is walked is kept by ``undo``."""
    outer = getattr(_HERE, "undo", None)
    _HERE.undo = undo
    try:
        yield
    finally:
        _HERE.undo = outer


def users_code() -> AbstractContextManager[Any]:
    """Around code of the user's that runs while a graph is walked."""
    return getattr(_HERE, "undo", None) or nullcontext()


def _memory(tensor: Tensor) -> int:
    """What tells the memory of tensors apart; wrappers, which have none, by themselves."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return id(tensor)


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


# Python's side ------------------------------------------------------------------------------------

CONTAINERS = (list, dict, set, deque)
SKIPPED_ATTRIBUTES = frozenset({"_modules"})


class WriteLog:
    """The attributes of a model's modules, also of those in plain lists, and what is in their
    lists, dictionaries and sets; hooks and submodules aside.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules: dict[nn.Module, tuple[type, dict[str, Any]]] = {}
        self._inside: list[tuple[Any, Any]] = []
        self._memory: list[tuple[Tensor, Tensor]] = []
        self._random: list[tuple[torch.Generator, Tensor]] = []
        waiting = [model]
        while waiting:
            module = waiting.pop()
            if module in self._modules:
                continue
            self._modules[module] = (type(module), dict(module.__dict__))
            for name, value in module.__dict__.items():
                waiting += _modules_in(value)
                if name not in SKIPPED_ATTRIBUTES and not name.endswith("_hooks"):
                    self._note(value)

    def _note(self, value: Any) -> None:
        if isinstance(value, CONTAINERS):
            self._inside.append((value, copy.copy(value)))
        elif isinstance(value, torch.Generator):
            self._random.append((value, value.get_state()))
        inside = value.values() if isinstance(value, dict) else (value,)
        for tensor in inside:
            if isinstance(tensor, Tensor) and not nn.parameter.is_lazy(tensor):
                self._memory.append((tensor, tensor.detach()))

    def restore(self) -> None:
        """Everything as it was noted."""
        for module, (kind, before) in self._modules.items():
            if type(module) is not kind:
                continue  # a lazy module, which has become what it is for
            now = module.__dict__
            for name in [name for name in now if name not in before]:
                del now[name]
            for name, value in before.items():
                if name not in now or now[name] is not value:
                    now[name] = value
        for held, before in self._inside:
            _refill(held, before)
        for tensor, memory in self._memory:  # x.data = y gives a tensor other memory
            if tensor.layout is torch.strided and _memory(tensor) != _memory(memory):
                tensor.data = memory
        for generator, state in self._random:
            generator.set_state(state)


def _modules_in(value: Any) -> list[nn.Module]:
    if isinstance(value, nn.Module):
        return [value]
    inside = value.values() if isinstance(value, dict) else value
    if isinstance(value, (dict, list, tuple, set)):
        return [each for each in inside if isinstance(each, nn.Module)]
    return []


def _refill(held: Any, before: Any) -> None:
    if len(held) == len(before):
        if isinstance(held, dict):
            same = all(k in held and held[k] is v for k, v in before.items())
        elif isinstance(held, set):
            same = held == before
        else:
            same = all(a is b for a, b in zip(held, before))
        if same:
            return
    held.clear()
    (held.update if isinstance(held, (dict, set)) else held.extend)(before)


@contextmanager
def restored(model: nn.Module) -> Iterator[Undo]:
    """After it, the model is as it was before: what runs under the mode that this gives may have
    written on its tensors, and on the attributes of its modules.
    """
    notes, undo = WriteLog(model), Undo()
    try:
        yield undo
    finally:
        undo.restore()
        notes.restore()


@contextmanager
def same_draws() -> Iterator[None]:
    """After it, the generators of Python and NumPy are as before."""
    numpy = sys.modules.get("numpy")
    ours, theirs = random.getstate(), None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(ours)
        if numpy is not None:
            numpy.random.set_state(theirs)
