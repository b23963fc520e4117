"""Undoes the side effects of user code that runs once more than it would without gradtrace.

A checkpointed part of a model runs again when it is traced, and a model that is measured runs in
addition to its training. Batch norms would then count a batch twice, and codebooks and moving
averages would be updated twice. ``Undo`` intercepts every ATen operation that writes to existing
memory and copies the old values first; ``WriteLog`` saves Python state (counters, attributes,
lists) module by module.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from gradtrace.pytorch import internals
from gradtrace.pytorch.function_modes import paused
from gradtrace.pytorch.global_switches import compiler_loaded
from gradtrace.pytorch.nested import tensors_in
from gradtrace.pytorch.python_state import PythonState
from gradtrace.pytorch.random_state import RandomState, cuda_devices

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
        self.entered = False  # whether code of the user's has run under it
        self._first: Callable[[], object] | None = None

    def before(self, first: Callable[[], object]) -> None:
        """Call a function once, before code of the user's runs under it."""
        self._first = first

    def begin(self) -> None:
        """Code of the user's is about to run under it."""
        first, self._first, self.entered = self._first, None, True
        if first is not None:
            first()

    def __enter__(self) -> Undo:
        self.begin()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

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
    undo: Undo | None = None
    state: PythonState | None = None  # restored with it
    functions: FunctionLog | None = None


_ACTIVE = _Active()


def users_code(code: Any = None) -> AbstractContextManager[Any]:
    """The context for user code that runs during a pass: the ``Undo`` of ``restored``, if any.

    ``code`` is the function that will run, if it is known.
    """
    if _ACTIVE.undo is None:
        return nullcontext()
    _ACTIVE.undo.begin()
    if code is not None and _ACTIVE.state is not None:
        _ACTIVE.state.note_code(code)
    return _ACTIVE.undo


def _memory(tensor: Tensor) -> int:
    """An identifier of a tensor's storage; for wrappers, which have none, of the tensor."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return id(tensor)


# Python state -------------------------------------------------------------------------------------


class WriteLog:
    """A snapshot of the attributes of a model's modules (also of modules in plain lists) and of the
    contents of their lists, dictionaries and sets, and of what forward hooks refer to; only with
    ``structure`` also of the tables of hooks.
    """

    @paused()
    def __init__(self, model: nn.Module, *, structure: bool = False) -> None:
        self._modules: dict[nn.Module, tuple[type, dict[str, Any]]] = {}
        self.state = PythonState()
        self._memory: list[tuple[Tensor, Tensor]] = []
        waiting = [model]
        while waiting:
            module = waiting.pop()
            if module in self._modules:
                continue
            self._modules[module] = (type(module), dict(module.__dict__))
            self.state.note_classes(type(module))
            for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
                self.state.note_code(hook)
            for name, value in module.__dict__.items():
                waiting += _modules_in(value)
                if structure or not name.endswith("_hooks"):
                    self._note(value)

    def _note(self, value: Any) -> None:
        """Save the contents of a container, the state of a generator, the storage of a tensor."""
        self.state.note((value,))
        inside = value.values() if isinstance(value, dict) else (value,)
        for tensor in inside:
            if isinstance(tensor, Tensor) and not nn.parameter.is_lazy(tensor):
                self._memory.append((tensor, tensor.detach()))
                self.state.note_attributes(tensor)

    @paused()
    def restore(self) -> None:
        """Restore the snapshot."""
        for module, (kind, before) in self._modules.items():
            if type(module) is not kind:
                continue  # a lazy module that has been initialised
            now = module.__dict__
            for name in [name for name in now if name not in before]:
                del now[name]
            for name, value in before.items():
                if name not in now or now[name] is not value:
                    now[name] = value
        self.state.restore()
        for tensor, memory in self._memory:  # x.data = y exchanges the storage of a tensor
            if tensor.layout is torch.strided and _memory(tensor) != _memory(memory):
                tensor.data = memory


def _modules_in(value: Any) -> list[nn.Module]:
    if isinstance(value, nn.Module):
        return [value]
    inside = value.values() if isinstance(value, dict) else value
    if isinstance(value, (dict, list, tuple, set)):
        return [each for each in inside if isinstance(each, nn.Module)]
    return []


@contextmanager
def restored(model: nn.Module, lazily: bool = False) -> Iterator[Undo]:
    """Restores the model's tensors and its modules' attributes on exit.

    Writes to tensors are undone if they happen under the dispatch mode that this yields, which
    ``users_code`` activates on this thread. With ``lazily`` the attributes are those of when that
    is first entered: the model must not be changed otherwise until then.
    """
    undo, outer = Undo.new(), (_ACTIVE.undo, _ACTIVE.state)
    notes: list[WriteLog] = []

    def note() -> None:
        notes.append(WriteLog(model))
        _ACTIVE.state = notes[0].state

    _ACTIVE.undo = undo
    if lazily:
        undo.before(note)
    else:
        note()
    try:
        yield undo
    finally:
        _ACTIVE.undo, _ACTIVE.state = outer
        undo.restore()
        for log in notes if undo.entered else ():  # else others have changed what has changed
            log.restore()


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
        return users_code()
    log.state.note_function(context, leaves)
    undo = _ACTIVE.undo or log.undo
    undo.ignore(grads)
    return undo


@contextmanager
def same_draws(model: nn.Module) -> Iterator[Callable[[int], None]]:
    """Restores the random generators of Python, NumPy and PyTorch (of the CPU, and of the GPUs that
    the model is on) on exit. Yields a function that seeds them.
    """
    devices = cuda_devices(model)
    before = RandomState.now(devices)

    def seed(number: int) -> None:
        for generator in (
            torch.default_generator,
            *(torch.cuda.default_generators[n] for n in devices),
        ):
            generator.manual_seed(number)
        random.seed(number)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed(number % (1 << 32))

    try:
        yield seed
    finally:
        before.restore()
