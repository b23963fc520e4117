"""``watch``: records which module call made each operator of a forward pass; ``diagnose``."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradtrace.autodiff.hooks import HookWatch
from gradtrace.autodiff.loss_checks import isolated, unseen_modules, unwatched
from gradtrace.autodiff.moved_modules import Moves, Names, moved_modules, names_of_moved
from gradtrace.autodiff.names import (
    GIVEN,
    MADE,
    NO_MODULE,
    OUTSIDE,
    ModuleCall,
    NameTable,
    ThreadCall,
)
from gradtrace.autodiff.nodes import annotate, maker_of, next_sequence
from gradtrace.autodiff.pass_scope import backward_runs, pass_runs
from gradtrace.autodiff.saved_hooks import UNPACKED_ONCE
from gradtrace.autodiff.sharded_hooks import QUIET
from gradtrace.diagnosis import (
    Diagnosis,
    Finding,
    ForwardRecord,
    ForwardRecorder,
    Subject,
    diagnosed,
)
from gradtrace.errors import GradtraceError
from gradtrace.pytorch import composed_lstm
from gradtrace.pytorch.composed_checkpoints import COMPOSED_CHECKPOINTS
from gradtrace.pytorch.fsdp import ShardedModel
from gradtrace.pytorch.global_switches import COMPOSED, eager
from gradtrace.pytorch.module_calls import Listener
from gradtrace.pytorch.module_tree import ModuleTree
from gradtrace.pytorch.nested import tensors_in
from gradtrace.pytorch.wrapped_modules import (
    join,
    named_modules,
    named_parameters,
    refuse_flat,
    user_class,
)
from gradtrace.session import Session
from gradtrace.traced import Trace

W = TypeVar("W", bound="watch")

MAX_MOVES = 1_000
"""How often modules may change places in a loss so that it is told; an open watch forgets more."""

NO_BATCH = object()
"""In place of a batch where ``loss_fn`` takes the model alone."""

UNASKED_OPERATIONS = 5_000
"""How many operations a watch records for ``diagnose`` if it was not told whether to."""


class watch(Session, Listener):
    """Watch a model's forward pass: ``with gt.watch(model) as watch: loss = ...``.

    Inside, module calls are recorded on all threads; fused attention and recurrent layers are
    decomposed and compiled modules run eagerly, so that every operator can be followed. The model
    is not modified, and may be copied and saved inside. Calls on a thread that has opened its own
    watch are recorded by that watch only.

    Args:
        model: The model to watch; it is not modified.
        composed: If False, kernels stay fused, so that the pass gives the same bits as without a
            watch; on a CPU they can be decomposed later, at a cost.
        diagnose: True records every operation with its line of code and the range of its values,
            for ``diagnose``, and reports of traces lead with what is wrong. None records the first
            5,000 operations, and ranges on the CPU only, where that does not wait for a device.
            False records nothing, which saves some 0.25 ms an operation.
        names: ``{name: tensor}`` for inputs that require grad, which are leaf0, leaf1, ...
            otherwise.

    >>> import torch, gradtrace as gt
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> with gt.watch(model) as watch:
    ...     loss = model(torch.tensor([3.0, 4.0])).sum()
    >>> watch.backward(loss)
    {'weight': tensor([[3., 4.]])}
    """

    _frames = 3  # no function around the method

    def __init__(
        self,
        model: nn.Module,
        *,
        composed: bool = True,
        diagnose: bool | None = None,
        names: Mapping[str, Tensor] | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise GradtraceError(
                f"watch takes a torch.nn.Module, got {type(model).__name__}; without a model use "
                "gradtrace.graph(loss, names=...) and gradtrace.backward(loss, names=...)"
            )
        super().__init__(names)
        self.model: nn.Module = model
        self.composed = composed
        self._diagnosed = bool(diagnose)
        self._record: ForwardRecord | None = None
        if diagnose is not False:
            room = inf if diagnose else UNASKED_OPERATIONS
            self._record = ForwardRecord(room=room, everywhere=bool(diagnose))
        self._hooks = HookWatch()
        self._stop_listening: Callable[[], None] | None = None
        self._tree = ModuleTree(model)
        self._named: dict[int, tuple[str, ...]] = {}  # leaves by the model's names, by id
        self._calls: dict[str, int] = {}
        self._moves: Moves = deque(maxlen=MAX_MOVES)
        self._lock = threading.RLock()
        self._here = _ThreadState()
        self._thread = 0
        self._repeated = False  # whether an outermost module was called several times
        self._contexts = contextlib.ExitStack()

    def __enter__(self: W) -> W:
        if self._stop_listening is not None:
            raise GradtraceError("this watch is already open; make a second gradtrace.watch(model)")
        if self._thread not in (0, threading.get_ident()):
            raise GradtraceError("this watch was open on another thread; make a second one")
        refuse_flat(self.model)
        self.name_table.sharded = ShardedModel.of(self.model)
        self._thread = threading.get_ident()
        self._here = _ThreadState()
        try:
            self._contexts.enter_context(eager())
            self._contexts.enter_context(UNPACKED_ONCE())
            if self.composed:
                self._contexts.enter_context(COMPOSED())
                self._contexts.enter_context(COMPOSED_CHECKPOINTS())
            if self.name_table.sharded is not None:
                self._contexts.enter_context(QUIET())
            self._stop_listening = self._attach()
            if self._record is not None:
                for tensor, _ in self.name_table.leaves.values():
                    self._record.make(tensor)
                self._contexts.enter_context(ForwardRecorder(self._record, self._innermost))
            self._contexts.enter_context(_counted())
            self._hooks.refresh()
            self.name_table.enter(next_sequence(), NO_MODULE)
        except BaseException:
            self._close()
            raise
        return self

    def _attach(self) -> Callable[[], None]:
        """Name the parameters, and listen to every module call; returns a function to stop."""
        self._rename_leaves()
        return self._tree.listen(self)

    def name_leaves(self) -> None:
        """Name the parameters that the model has now; inside ``torch.func.functional_call`` they
        may be tensors made from them, which are no leaves.
        """
        for name, parameter in named_parameters(self.model):
            if parameter.is_leaf:
                self.name_table.name(parameter, name)

    def _rename_leaves(self) -> None:
        """Name the parameters that the model has now as it names them now, and in its order."""
        if self.name_table.sharded is not None:
            self.name_leaves()
            return
        leaves = ((name, p) for name, p in named_parameters(self.model) if p.is_leaf)
        self._named |= self.name_table.rename(leaves, self._named)

    def _follow(self, module: nn.Module | None) -> None:
        """Look whether submodules were replaced: of a module that is called, or of all."""
        tree = self._tree
        if tree.has_moved_anywhere() if module is None else tree.has_moved(module):
            with self._lock:
                self._moves.append((next_sequence(), tree.follow()))
                self._rename_leaves()

    def __exit__(self, *_: object) -> None:
        self._close()

    def inside(self, module: nn.Module) -> None:
        """The watch was opened inside the forward pass of this module."""
        self.enter(module, (), {})

    def _close(self) -> None:
        try:
            if self._stop_listening is not None:
                self._stop_listening()
                self._stop_listening = None
            while self._here.stack:
                self._here.stack.pop().fuse_again()
            self._name_gathered()
            if self._thread == threading.get_ident():
                self.name_table.enter(next_sequence(), OUTSIDE)
        finally:
            self._contexts.close()

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> Noted | None:
        """A module is called: nodes created by this thread from now on belong to it."""
        if self._stop_listening is None or not self._is_recording():
            return None
        self._prepare(module, args, kwargs)
        return self._begin(module, self._next_call(self._tree.name(module)))

    def resume(
        self, entered: Noted | None, module: nn.Module, args: Any, kwargs: Any
    ) -> Noted | None:
        """A call goes on that had paused: nodes belong to it again."""
        if entered is None or self._stop_listening is None or not self._is_recording():
            return None
        self._prepare(module, args, kwargs)
        return self._begin(module, entered.place)

    def _prepare(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Look at the leaves of a call that begins, or at its inputs on another thread."""
        here = self._here
        if threading.get_ident() == self._thread:
            if not here.stack:
                self.name_table.forget()
            self._follow(module if here.stack else None)
            for each in (module,) if here.stack else tuple(self._tree.modules.values()):
                self._name_parameters(each)
        elif here.away is None:
            here.away, self.name_table.away = ThreadCall(), True
            for tensor in tensors_in((args, kwargs)):
                annotate(tensor, here.away, GIVEN)

    def _begin(self, module: nn.Module, place: ModuleCall) -> Noted:
        here = self._here
        notes = self.name_table if here.away is None else here.away
        noted = Noted(here, place)
        self._repeated |= not here.stack and place.call > 0
        here.stack.append(noted)
        notes.enter(next_sequence(), noted.place)
        if isinstance(module, nn.LSTM):
            noted.compose(beside=not self.composed)
        return noted

    def _innermost(self) -> str | None:
        """The module whose call runs on this thread; None if none does."""
        stack = self._here.stack
        return stack[-1].place.module if stack else None

    def _next_call(self, name: str) -> ModuleCall:
        with self._lock:
            call = self._calls.get(name, 0)
            self._calls[name] = call + 1
        return ModuleCall(name, call)

    def _names_for(self, loss: Tensor) -> NameTable:
        if self._named and self.name_table.sharded is None:  # what was put there in the last call
            for each in tuple(self._tree.modules.values()):
                self._name_parameters(each)
            if self._tree.has_moved_anywhere():  # by hand
                self.name_leaves()
        made = isinstance(loss, Tensor) and maker_of(loss) is not None
        if made and self._repeated and not self.name_table.away:
            return self.name_table.of_loss(loss)
        return self.name_table

    def _name_parameters(self, module: nn.Module) -> None:
        """Name leaves that ``torch.func.functional_call`` substituted for parameters."""
        known = self.name_table.leaves
        for key, tensor in module._parameters.items():
            if isinstance(tensor, Tensor) and id(tensor) not in known and tensor.is_leaf:
                self.name_table.name(tensor, join(self._tree.name(module), key))

    def _name_gathered(self) -> None:
        """Name the parameters that units had in their forward passes, in the model's order."""
        model = self.name_table.sharded
        if model is None:
            return
        gathered = {id(each.sharded): each.gathered for each in model.parameters()}
        before, self.name_table.leaves = self.name_table.leaves, {}
        for name, parameter in named_parameters(self.model):
            self.name_table.name(gathered.get(id(parameter), parameter), name)
        for tensor, names in before.values():
            if id(tensor) not in gathered and id(tensor) not in self.name_table.leaves:
                self.name_table.leaves[id(tensor)] = tensor, names

    def leave(self, entered: Noted | None, result: Any) -> None:
        """The call has ended: new nodes belong to the enclosing module again."""
        if entered is None:
            return
        entered.fuse_again()
        here = entered.here
        if here is not self._here or not any(entered is each for each in here.stack):
            return  # the watch was closed in between
        while here.stack.pop() is not entered:
            pass  # entered by ``inside``
        notes = self.name_table if here.away is None else here.away
        notes.enter(next_sequence(), here.stack[-1].place if here.stack else NO_MODULE)
        if not here.stack:
            self._name_gathered()
        if here.away is not None and not here.stack:
            for tensor in tensors_in(result):
                annotate(tensor, here.away, MADE)
            here.away = None

    def _is_recording(self) -> bool:
        if backward_runs():
            return False
        if threading.get_ident() == self._thread:
            return True
        return not _OPEN.watches and torch.is_grad_enabled()

    @isolated()
    def diagnose(
        self, loss: Tensor | float, *, optimizer: Optimizer | Sequence[Optimizer] | None = None
    ) -> Diagnosis:
        """What is wrong with the loss and its gradient, worst first, with the lines to change.

        Parameters that require grad and get none (``.silent``), each with the reason; the first
        value that is NaN or infinite (``.nonfinite``); gradients that vanish, explode, underflow,
        or leave terms and branches with nothing. A forward pass of more than 5,000 operations, and
        values on a GPU, are recorded by ``gt.watch(model, diagnose=True)`` only. See
        docs/diagnosis.md.

        Args:
            loss: Loss of the watched forward pass, best computed inside the watch.
            optimizer: What moves the parameters, one or several: parameters that it does not have
                and learning rates of 0 are findings, too.

        Returns:
            The findings, worst first; ``print`` it to read it.

        >>> import torch, gradtrace as gt
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
        >>> with gt.watch(model) as watch:
        ...     loss = model[1](model[0](torch.ones(2, 3)).detach()).sum()
        >>> found = watch.diagnose(loss)
        >>> [(each.parameter, str(each.reason)) for each in found.silent]
        [('0.weight', 'output detached'), ('0.bias', 'output detached')]
        """
        if isinstance(loss, Tensor) and maker_of(loss) is not None:
            self._warn_of_unwatched(loss)
        several = (optimizer,) if isinstance(optimizer, Optimizer) else tuple(optimizer or ())
        return diagnosed(replace(self._subject(), optimizers=several), loss)

    def _unwatched(self, loss: Tensor) -> str:
        return unwatched(loss, self.name_table, self._names_by_id, self._calls)

    def _unseen(self, loss: Tensor, leaves: Names, aliases: Mapping[str, str]) -> tuple[str, ...]:
        moved = moved_modules(self._moves, self.name_table, loss)
        called = {*self._calls, *moved}
        return unseen_modules(self.model, leaves, aliases, called) + names_of_moved(moved, leaves)

    def _names_by_id(self) -> dict[int, str]:
        known = {id(parameter): name for name, parameter in named_parameters(self.model)}
        return known | {key: names[0] for key, (_, names) in self.name_table.leaves.items()}

    def _origin_of(self, loss: Tensor) -> str:
        try:
            found = diagnosed(self._subject(), loss)
        except GradtraceError:
            return ""
        if found.nonfinite is None or not found.nonfinite.line:
            return ""
        first = found.findings[0]
        return f"\nIn the forward pass: {first.line}\n{first.evidence} What to do: {first.advice}"

    def _diagnosis_of(self, loss: Tensor, trace: Trace) -> Mapping[str, Any] | None:
        if not self._diagnosed:
            return None
        try:
            return diagnosed(replace(self._subject(), trace=lambda _: trace), loss).to_dict()
        except GradtraceError as error:
            failed = Finding("diagnosis", "warning", "it was not diagnosed", evidence=str(error))
            return Diagnosis((failed,)).to_dict()

    def _subject(self) -> Subject:
        roots, called = {"": self.model}, set(self._calls)
        record = self._record if self._record is not None and self._record.whole else None
        short = self._record is not None and record is None
        subject = Subject(roots, self.name_table, self._hooks, called, record, self._traced)
        return replace(subject, cut_short=short)

    def _again(self) -> watch:
        return watch(self.model, composed=self.composed)

    def _classes(self) -> dict[str, str]:
        return {name: user_class(module).__name__ for name, module in named_modules(self.model)}


class _ThreadState(threading.local):
    """A watch's state for one thread."""

    def __init__(self) -> None:
        self.stack: list[Noted] = []
        # calls inside the outermost call, if this is not the watch's own thread
        self.away: ThreadCall | None = None


class Noted:
    """A module call in progress."""

    def __init__(self, here: _ThreadState, place: ModuleCall) -> None:
        self.here = here
        self.place = place
        self._composed: contextlib.AbstractContextManager[None] | None = None

    def compose(self, beside: bool) -> None:
        """Run the LSTM of this call operator by operator instead of fused, or beside it."""
        self._composed = composed_lstm.beside(pass_runs) if beside else composed_lstm.composed()
        self._composed.__enter__()

    def fuse_again(self) -> None:
        """End ``compose``, if it was called."""
        composed, self._composed = self._composed, None
        if composed is not None:
            composed.__exit__(None, None, None)


class _OpenCount(threading.local):
    watches = 0  # open watches of this thread


_OPEN = _OpenCount()


@contextlib.contextmanager
def _counted() -> Iterator[None]:
    _OPEN.watches += 1
    try:
        yield
    finally:
        _OPEN.watches -= 1


def diagnose(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    *,
    batch: Any = NO_BATCH,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
) -> Diagnosis:
    """Why does this model not learn? What is wrong with a loss and its gradient, worst first.

    The loss is computed once, watched, and nothing is written on the model, ``.grad`` or the
    optimiser. In a training loop of your own: ``watch.diagnose(loss)``.

    Args:
        model: The model; its parameters that require grad are judged.
        loss_fn: ``loss_fn(model)`` returns the loss, or ``loss_fn(model, batch)`` with a batch.
        batch: What ``loss_fn`` is called with, beside the model.
        optimizer: What moves the parameters, one or several: parameters that it does not have and
            learning rates of 0 are findings, too.

    Returns:
        The findings, with the lines to change; ``print`` it to read it.

    >>> import torch, gradtrace as gt
    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
    >>> loss_fn = lambda model: model[1](model[0](torch.ones(2, 3)).detach()).sum()
    >>> found = gt.diagnose(model, loss_fn)
    >>> found.healthy, [each.parameter for each in found.silent]
    (False, ['0.weight', '0.bias'])
    """
    given = () if batch is NO_BATCH else (batch,)
    with watch(model, diagnose=True) as watched:
        loss = loss_fn(model, *given)
    if not isinstance(loss, (Tensor, float)):
        raise GradtraceError(
            f"loss_fn returned {type(loss).__name__}, not a loss: return the tensor on which "
            "training calls backward()"
        )
    return watched.diagnose(loss, optimizer=optimizer)
