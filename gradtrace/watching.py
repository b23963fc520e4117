"""``watch``: run a model's forward pass so that its operators know their modules."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradtrace import api
from gradtrace.atlas import NOWHERE, Atlas, Gradients, Place
from gradtrace.errors import GradtraceError, Unsupported
from gradtrace.graph import Graph
from gradtrace.hooks import HookWatch, ours
from gradtrace.passes import backward_runs
from gradtrace.program import Program
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
    if module in above:
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
                "pass is over: use gradtrace.influence, or enter gradtrace.wrapped.gathered(model) "
                "first, on all ranks"
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


class watch:
    """Watch a model's forward pass: ``with gt.watch(model) as watch: loss = ...``.

    Inside, module calls are noted, fused attention and recurrent layers are composed and compiled
    modules run eagerly, so that every operator can be followed. The model is as before after it.
    Calls on other threads are not noted. With ``composed=False`` kernels stay fused, so that the
    pass has the bits it has without a watch; on a CPU they can be opened later, at a price.
    """

    def __init__(self, model: nn.Module, *, composed: bool = True) -> None:
        if not isinstance(model, nn.Module):
            raise GradtraceError(
                f"watch takes a torch.nn.Module, got {type(model).__name__}; without a model use "
                "gradtrace.graph(loss, names=...) and gradtrace.backward(loss, names=...)"
            )
        self.model = model
        self.composed = composed
        self.atlas = Atlas()
        self._hooks = HookWatch()
        self._handles: list[RemovableHandle] = []
        self._names: dict[nn.Module, str] = {}
        self._calls: dict[str, int] = {}
        self._stack: list[tuple[nn.Module, Place]] = []
        self._thread = 0
        self._contexts = contextlib.ExitStack()
        self._onednn: bool | None = None  # what it was before a recurrent layer

    # The forward pass ------------------------------------------------------------------------

    def __enter__(self: W) -> W:
        if self._handles:
            raise GradtraceError("this watch is already open; make a second gradtrace.watch(model)")
        if self._thread not in (0, threading.get_ident()):
            raise GradtraceError("this watch was open on another thread; make a second one")
        refuse_sharded(self.model)
        self._thread = threading.get_ident()
        try:
            self._contexts.enter_context(_COMPOSED.within(self.composed))
            self._attach()
        except BaseException:
            self._close()
            raise
        self._hooks.reset()
        return self

    def _attach(self) -> None:
        """Name the parameters, and see every call of a module."""
        for name, parameter in named_parameters(self.model):
            self.atlas.name(parameter, name)
        for name, module in named_modules(self.model):
            if self._names.setdefault(module, name) == name:
                before = module.register_forward_pre_hook(self._enter, prepend=True)
                after = module.register_forward_hook(self._leave, always_call=True)
                self._handles += [before, after]
                ours(2)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()

    def inside(self, module: nn.Module) -> None:
        """The forward pass of a module had begun when this watch was opened in it."""
        self._enter(module, ())

    def _close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._stack.clear()
        self._fuse_again()
        self.atlas.enter(_now(), NOWHERE)
        self._contexts.close()

    def _enter(self, module: nn.Module, _: Any) -> None:
        if not self._noting():
            return
        for each in (module,) if self._stack else tuple(self._names):
            self._name_parameters(each)
        name = self._names[module]
        call = self._calls.get(name, 0)
        self._calls[name] = call + 1
        place = Place(name, call)
        self._stack.append((module, place))
        self.atlas.enter(_now(), place)
        if self.composed and isinstance(module, nn.LSTM) and self._onednn is None:
            self._onednn = torch._C._get_mkldnn_enabled()
            torch._C._set_mkldnn_enabled(False)  # one node for all time steps would hide them

    def _fuse_again(self) -> None:
        if self._onednn is not None:
            torch._C._set_mkldnn_enabled(self._onednn)
            self._onednn = None

    def _name_parameters(self, module: nn.Module) -> None:
        """torch.func.functional_call puts other tensors in the place of parameters."""
        known = self.atlas.leaves
        for key, tensor in module._parameters.items():
            if isinstance(tensor, Tensor) and tensor.is_leaf and id(tensor) not in known:
                self.atlas.name(tensor, join(self._names[module], key))

    def _leave(self, module: nn.Module, _: Any, __: Any) -> None:
        if not self._noting() or not any(module is inside for inside, _ in self._stack):
            return
        while self._stack.pop()[0] is not module:
            pass  # calls that an exception left open
        if isinstance(module, nn.LSTM):
            self._fuse_again()
        self.atlas.enter(_now(), self._stack[-1][1] if self._stack else NOWHERE)

    def _noting(self) -> bool:
        return threading.get_ident() == self._thread and not backward_runs()

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


def _now() -> int:
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


class Composed:
    """Ask PyTorch for operators that can be opened, in place of fused ones.

    Its switches are for the whole process, so watches that overlap share them: the first throws
    them, the last puts them back.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watches = 0
        self._apart = 0  # of these, how many want kernels composed
        self._eager = False
        self._stance = contextlib.ExitStack()
        self._kernels = contextlib.ExitStack()

    @contextlib.contextmanager
    def within(self, apart: bool) -> Iterator[None]:
        """Compiled modules run eagerly; if ``apart``, fused kernels are composed."""
        self._enter(apart)
        try:
            yield
        finally:
            self._leave(apart)

    def _enter(self, apart: bool) -> None:
        with self._lock:
            if apart and not self._apart:
                self._compose()
            self._apart += apart
            self._watches += 1
            if not self._eager and "torch._dynamo" in sys.modules:
                # Without it nothing is compiled yet, and to import it takes seconds.
                self._stance.enter_context(torch.compiler.set_stance("force_eager"))
                self._eager = True

    def _compose(self) -> None:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        self._kernels.enter_context(sdpa_kernel(SDPBackend.MATH))
        if torch.cuda.is_available():
            self._kernels.enter_context(torch.backends.cudnn.flags(enabled=False))

    def _leave(self, apart: bool) -> None:
        with self._lock:
            self._watches -= 1
            self._apart -= apart
            if not self._apart:
                self._kernels.close()
            if not self._watches:
                self._eager = False
                self._stance.close()


_COMPOSED = Composed()
