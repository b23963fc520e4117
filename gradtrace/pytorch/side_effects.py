"""Undoes what the ``torch.autograd.Function``s of the user's change in a pass of gradtrace.

Their ``backward`` runs once more than it would without. ``Undo`` intercepts every ATen operation
that writes to existing memory and copies the old values first; ``PythonState`` keeps the rest.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from gradtrace.pytorch import internals
from gradtrace.pytorch.function_modes import paused
from gradtrace.pytorch.global_switches import compiler_loaded
from gradtrace.pytorch.nested import tensors_in
from gradtrace.pytorch.python_state import PythonState

UNDECLARED_WRITES = frozenset({"running_mean", "running_var"})
"""Arguments that batch norms write to, although their schemas do not say so."""


@contextmanager
def _unseen() -> Iterator[None]:
    """Within, no mode of the caller sees what is computed, and no graph is built."""
    with _disable_current_modes(), paused(), torch.no_grad():
        yield


@cache
def _written(func: Any) -> tuple[tuple[int, str], ...]:
    """The arguments that an operation writes to, by position and name."""
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(func._schema.arguments)
        if (argument.alias_info is not None and argument.alias_info.is_write)
        or argument.name in UNDECLARED_WRITES
    )


def written_tensors(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that an operation will write to."""
    found: list[Tensor] = []
    for position, name in _written(func):
        found += tensors_in(args[position] if position < len(args) else kwargs.get(name))
    return found


@cache
def is_fresh(func: Any) -> bool:
    """Whether its results are new memory, unless they share that of an argument."""
    return all(result.alias_info is None for result in func._schema.returns)


class Undo(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While this mode is active, values are saved before they are overwritten; ``restore`` writes
    them back.

    Memory that was allocated under the mode is not saved: nothing outside refers to it.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # it would be imported for that, in the middle of a forward pass; see ``new``

    @classmethod
    def new(cls) -> Undo:
        """A new one, which the compiler leaves alone if it is loaded."""
        return _UncompiledUndo() if compiler_loaded() else cls()

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept: list[tuple[Tensor, Tensor, int | None]] = []
        self._seen: set[object] = set()
        self._fresh: set[int] = set()

    def ignore(self, tensors: Any) -> None:
        """Do not save what is written to these, which belong to the pass."""
        self._fresh.update(map(_memory, tensors_in(tensors)))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Save what the operation will overwrite, and run it."""
        kwargs = kwargs or {}
        for tensor in written_tensors(func, args, kwargs):
            self._keep(tensor)
        out = func(*args, **kwargs)
        if is_fresh(func):
            given_memory = set(map(_memory, tensors_in((args, kwargs))))
            self._fresh.update(set(map(_memory, tensors_in(out))) - given_memory)
        return out

    def _keep(self, tensor: Tensor) -> None:
        """Save a copy of a tensor, once for each range of memory, with its version."""
        memory = _memory(tensor)
        strided = tensor.layout is torch.strided
        place = (tensor.storage_offset(), tensor.size(), tensor.stride()) if strided else ()
        key = (memory, tensor.dtype, place)
        if memory in self._fresh or key in self._seen:
            return
        self._seen.add(key)
        version = None if tensor.is_inference() else tensor._version
        with _unseen():
            there = tensor.detach()
            self._kept.append((there, there.clone(), version))

    def restore(self) -> None:
        """Write the old values back, and reset versions so that graphs accept saved tensors."""
        with _unseen():
            for there, before, version in reversed(self._kept):
                there.copy_(before)
                if version is not None:
                    internals.set_version(there, version)
        self._kept.clear()
        self._seen.clear()


class _UncompiledUndo(Undo):  # type: ignore[no-untyped-call]
    """An ``Undo`` whose code ``torch.compile`` does not trace."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return True

    __torch_dispatch__ = Undo.__torch_dispatch__


class _Active(threading.local):
    functions: FunctionLog | None = None


_ACTIVE = _Active()


def _memory(tensor: Tensor) -> int:
    """An identifier of a tensor's storage; for wrappers, which have none, of the tensor."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return id(tensor)


class FunctionLog:
    """The state of the ``torch.autograd.Function``s that a pass calls, as it was before.

    The ``backward`` of such a function is written for one call: it may count on its context, drop
    what it no longer needs (``ctx.x = None``), take from a list, or write to tensors.
    """

    def __init__(self) -> None:
        self._grads: dict[int, tuple[Tensor, Tensor | None, Tensor | None]] = {}

    @cached_property
    def undo(self) -> Undo:
        """Undoes what they write to tensors."""
        return Undo.new()

    @cached_property
    def state(self) -> PythonState:
        """Their contexts and what these hold; made for the first of them."""
        return PythonState()

    def note_gradients(self, leaves: Iterable[Tensor]) -> None:
        """Save ``.grad`` of leaves."""
        for leaf in leaves:
            grad = leaf.grad
            self._grads.setdefault(id(leaf), (leaf, grad, None if grad is None else grad.clone()))

    def restore(self) -> None:
        """Restore what was noted."""
        for leaf, grad, value in self._grads.values():
            if grad is not None and value is not None:
                grad.copy_(value)
            leaf.grad = grad
        if "state" in vars(self):  # else none was called
            self.undo.restore()
            self.state.restore()


@contextmanager
def functions_restored() -> Iterator[None]:
    """Restores on exit what ``torch.autograd.Function``s change in ``function_code``."""
    log, outer = FunctionLog(), _ACTIVE.functions
    _ACTIVE.functions = log
    try:
        yield
    finally:
        _ACTIVE.functions = outer
        log.restore()


def note_gradients(leaves: Iterable[Tensor]) -> None:
    """Save ``.grad`` of leaves for the running pass: code of the user's is about to add to it."""
    if _ACTIVE.functions is not None:
        with _unseen():
            _ACTIVE.functions.note_gradients(leaves)


def function_code(
    context: Any, grads: Any, leaves: Iterable[Tensor]
) -> AbstractContextManager[Any]:
    """The context for the ``backward`` of a ``torch.autograd.Function`` in a pass. ``grads`` are
    the gradients that it is given, which it may write to; ``leaves``, those it is applied to.
    """
    log = _ACTIVE.functions
    if log is None:
        return nullcontext()
    log.state.note_function(context, leaves)
    log.undo.ignore(grads)
    return log.undo
