"""``watch``: run a model's forward pass so that its operators know their modules."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from gradtrace import api
from gradtrace.autodiff.hooks import HookWatch
from gradtrace.autodiff.names import (
    GIVEN,
    MADE,
    NO_MODULE,
    Gradients,
    ModuleCall,
    NameTable,
    ThreadCall,
)
from gradtrace.autodiff.nodes import annotate
from gradtrace.autodiff.pass_scope import backward_runs
from gradtrace.errors import GradtraceError, Unsupported
from gradtrace.graphs.graph import Graph
from gradtrace.ir.program import Program
from gradtrace.pytorch import composed_lstm
from gradtrace.pytorch.global_switches import COMPOSED, eager
from gradtrace.pytorch.module_calls import Listener, listen, same_in_replicas
from gradtrace.pytorch.nested import tensors_in
from gradtrace.semirings import SUM, Semiring
from gradtrace.trace import Trace

W = TypeVar("W", bound="watch")

WRAPPERS = {
    "DataParallel": "module",
    "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "OptimizedModule": "_orig_mod",
}
"""Modules that only wrap another, and where they keep it; the names inside are the user's."""


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's own module, without wrappers around it."""
    while type(model).__name__ in WRAPPERS:
        model = model._modules[WRAPPERS[type(model).__name__]]  # type: ignore[assignment]
    return model


def named_modules(
    module: nn.Module, name: str = "", above: tuple[nn.Module, ...] = ()
) -> Iterator[tuple[str, nn.Module]]:
    """Every module under every name that the user has for it, as if there were no wrappers."""
    module = unwrapped(module)
    if any(module is each for each in above):
        return  # a module that holds one of those it lies in
    yield name, module
    for key, child in module._modules.items():
        if child is not None:
            yield from named_modules(child, join(name, key), (*above, module))


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Every parameter under every name that the user has for it, in the model's order."""
    for name, module in named_modules(model):
        for key, parameter in module._parameters.items():
            if parameter is not None:
                yield join(name, key), parameter


def sharded_modules(model: nn.Module) -> list[Any]:
    """The modules that ``torch.distributed.fsdp.fully_shard`` was applied to."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # who has sharded has imported it
    kind = getattr(fsdp, "FSDPModule", None)
    return [] if kind is None else [m for m in model.modules() if isinstance(m, kind)]


def sharding_hooks(hooks: Mapping[int, Any]) -> list[int]:
    """Which of a module's hooks gather and free its parameters."""
    home = "torch.distributed.fsdp"
    return [k for k, hook in hooks.items() if str(getattr(hook, "__module__", "")).startswith(home)]


def refuse_flat(model: nn.Module) -> None:
    """Refuse a model whose parameters lie in one tensor, behind names that are not the user's."""
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise Unsupported(
            "the model is wrapped in FullyShardedDataParallel, whose parameters are slices of one "
            "flat tensor: shard it with torch.distributed.fsdp.fully_shard, or load its full state "
            "dict into a plain module and trace that"
        )


def refuse_sharded(model: nn.Module) -> None:
    """Refuse a model of which each rank holds a part."""
    refuse_flat(model)
    for module in sharded_modules(model):
        if sharding_hooks(module._forward_pre_hooks):
            raise Unsupported(
                "fully_shard has sharded the model, and its parameters are gone when the forward "
                "pass is over: use gradtrace.influence, or first enter "
                "gradtrace.distributed.unwrap.gathered(model), on all ranks"
            )
    for name, parameter in named_parameters(model):
        if hasattr(parameter, "full_tensor"):
            raise Unsupported(
                f"{name} is a DTensor, of which each rank holds a part: load the full state dict "
                "(torch.distributed.checkpoint.state_dict, full_state_dict=True) into a plain "
                "module and trace that"
            )


def join(name: str, key: str) -> str:
    """``encoder`` and ``weight``: ``encoder.weight``."""
    return f"{name}.{key}" if name else key


class watch(Listener):
    """Watch a model's forward pass: ``with gt.watch(model) as watch: loss = ...``.

    Inside, module calls are noted, on all threads; fused attention and recurrent layers are
    composed and compiled modules run eagerly, so that every operator can be followed. Nothing is
    put on the model, which may be copied and saved inside, and is as before after it. A thread that
    has a watch of its own is noted by that one only. With ``composed=False`` kernels stay fused, so
    that the pass has the bits it has without a watch; on a CPU they can be opened later, at a
    price.
    """

    def __init__(self, model: nn.Module, *, composed: bool = True) -> None:
        if not isinstance(model, nn.Module):
            raise GradtraceError(
                f"watch takes a torch.nn.Module, got {type(model).__name__}; without a model use "
                "gradtrace.graph(loss, names=...) and gradtrace.backward(loss, names=...)"
            )
        self.model = model
        self.composed = composed
        self.atlas = NameTable()
        self._hooks = HookWatch()
        self._close_ears: Callable[[], None] | None = None
        self._modules: dict[int, nn.Module] = {}  # by id
        self._names: dict[int, str] = {}  # by id, and by what is the same in replicas
        self._calls: dict[str, int] = {}
        self._lock = threading.RLock()
        self._here = _Here()
        self._thread = 0
        self._contexts = contextlib.ExitStack()

    # The forward pass ------------------------------------------------------------------------

    def __enter__(self: W) -> W:
        if self._close_ears is not None:
            raise GradtraceError("this watch is already open; make a second gradtrace.watch(model)")
        if self._thread not in (0, threading.get_ident()):
            raise GradtraceError("this watch was open on another thread; make a second one")
        refuse_sharded(self.model)
        self._thread = threading.get_ident()
        self._here = _Here()
        try:
            self._contexts.enter_context(eager())
            if self.composed:
                self._contexts.enter_context(COMPOSED)
            self._close_ears = self._attach()
        except BaseException:
            self._close()
            raise
        _OPEN.watches += 1
        self._contexts.callback(_one_less)
        self._hooks.reset()
        return self

    def _attach(self) -> Callable[[], None]:
        """Name the parameters, and see every call of a module."""
        for name, parameter in named_parameters(self.model):
            self.atlas.name(parameter, name)
        for name, module in named_modules(self.model):
            self._know(module, name)
        return listen(self, self._modules.values())

    def _know(self, module: nn.Module, name: str) -> None:
        """The name of a module, if it has none so far."""
        self._modules.setdefault(id(module), module)
        for key in (id(module), same_in_replicas(module)):
            self._names.setdefault(key, name)

    def _name(self, module: nn.Module) -> str:
        found = self._names.get(id(module))
        return self._names[same_in_replicas(module)] if found is None else found

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()

    def inside(self, module: nn.Module) -> None:
        """The forward pass of a module had begun when this watch was opened in it."""
        self.enter(module, (), {})

    def _close(self) -> None:
        if self._close_ears is not None:
            self._close_ears()
            self._close_ears = None
        while self._here.stack:
            self._here.stack.pop().fuse_again()
        if self._thread == threading.get_ident():
            self.atlas.enter(_now(), NO_MODULE)
        self._contexts.close()

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> Noted | None:
        """A module is called: from now on, nodes of this thread belong to it."""
        here = self._here
        if self._close_ears is None or not self._noting():
            return None
        if threading.get_ident() == self._thread:
            for each in (module,) if here.stack else tuple(self._modules.values()):
                self._name_parameters(each)
        elif here.away is None:
            here.away, self.atlas.away = ThreadCall(), True
            for tensor in tensors_in((args, kwargs)):
                annotate(tensor, here.away, GIVEN)
        notes = self.atlas if here.away is None else here.away
        noted = Noted(here, self._next_call(self._name(module)))
        here.stack.append(noted)
        notes.enter(_now(), noted.place)
        if self.composed and isinstance(module, nn.LSTM):
            noted.compose()
        return noted

    def _next_call(self, name: str) -> ModuleCall:
        with self._lock:
            call = self._calls.get(name, 0)
            self._calls[name] = call + 1
        return ModuleCall(name, call)

    def _name_parameters(self, module: nn.Module) -> None:
        """torch.func.functional_call puts other tensors in the place of parameters."""
        known = self.atlas.leaves
        for key, tensor in module._parameters.items():
            if isinstance(tensor, Tensor) and tensor.is_leaf and id(tensor) not in known:
                self.atlas.name(tensor, join(self._name(module), key))

    def leave(self, entered: Noted | None, result: Any) -> None:
        """The call is over: nodes belong to the module around it again."""
        if entered is None:
            return
        entered.fuse_again()
        here = entered.here
        if here is not self._here or not any(entered is each for each in here.stack):
            return  # closed since
        while here.stack.pop() is not entered:
            pass  # entered by ``inside``
        notes = self.atlas if here.away is None else here.away
        notes.enter(_now(), here.stack[-1].place if here.stack else NO_MODULE)
        if here.away is not None and not here.stack:
            for tensor in tensors_in(result):
                annotate(tensor, here.away, MADE)
            here.away = None

    def _noting(self) -> bool:
        if backward_runs():
            return False
        if threading.get_ident() == self._thread:
            return True
        return not _OPEN.watches and torch.is_grad_enabled()

    # The backward pass -----------------------------------------------------------------------

    def graph(self, loss: Tensor) -> Graph:
        """The computation graph behind the loss, with the module of each operator."""
        return api.graph_of(loss, self.atlas, self._hooks)

    def backward(self, loss: Tensor, semiring: Semiring = SUM, **options: Any) -> Gradients:
        """``{name: value}`` for every leaf; see ``gradtrace.backward``."""
        return api.backward_of(loss, semiring, self.atlas, self._hooks, **options)

    def trace(self, loss: Tensor, **options: Any) -> Trace:
        """The paths of the loss's gradient; see ``gradtrace.trace``."""
        return api.trace_of(loss, self.atlas, self._hooks, self._classes(), **options)

    def _classes(self) -> dict[str, str]:
        return {name: type(module).__name__ for name, module in named_modules(self.model)}

    def program(self, loss: Tensor, **options: Any) -> Program:
        """The backward program of the loss; see ``gradtrace.program``."""
        return api.program_of(loss, self.atlas, self._hooks, **options)


class _Here(threading.local):
    """What a watch knows of one thread."""

    def __init__(self) -> None:
        self.stack: list[Noted] = []
        self.away: ThreadCall | None = (
            None  # notes of the outermost call, if it is not the watch's own
        )


class Noted:
    """A call of a module that is under way."""

    def __init__(self, here: _Here, place: ModuleCall) -> None:
        self.here = here
        self.place = place
        self._composed = False

    def compose(self) -> None:
        """It is an LSTM, to be computed operator by operator."""
        composed_lstm.begin()
        self._composed = True

    def fuse_again(self) -> None:
        """No longer so."""
        if self._composed:
            self._composed = False
            composed_lstm.end()


class _Open(threading.local):
    watches = 0  # of this thread, that are open


_OPEN = _Open()


def _one_less() -> None:
    _OPEN.watches -= 1


def _now() -> int:
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]
