"""``watch``: run a model's forward pass so that its operators know their modules."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradtrace import api
from gradtrace.atlas import NOWHERE, Atlas, Gradients, Place
from gradtrace.autograd import HookWatch
from gradtrace.errors import GradtraceError
from gradtrace.graph import Graph
from gradtrace.program import Program
from gradtrace.semirings import SUM, Semiring

WRAPPERS = ("DataParallel", "DistributedDataParallel", "OptimizedModule", "FullyShardedDataParallel")
"""Modules that only wrap another; the names inside are the user's."""


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's own module, without wrappers around it."""
    while type(model).__name__ in WRAPPERS:
        inner = getattr(model, "module", None) or getattr(model, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            break
        model = inner
    return model


def clean(name: str) -> str:
    """A module's or parameter's name without what torch.compile adds to it."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


class watch:
    """Watch a model's forward pass: ``with gt.watch(model) as watch: loss = ...``.

    Inside, module calls are noted, fused attention is composed, cuDNN's RNNs are off and compiled
    modules run eagerly, so that every operator can be followed. The model is as before after it.
    """

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            raise GradtraceError(
                f"watch takes a torch.nn.Module, got {type(model).__name__}; without a model use "
                "gradtrace.graph(loss, names=...) and gradtrace.backward(loss, names=...)"
            )
        self.model = model
        self.atlas = Atlas()
        self._hooks = HookWatch()
        self._handles: list[RemovableHandle] = []
        self._names: dict[nn.Module, str] = {}
        self._calls: dict[str, int] = {}
        self._stack: list[Place] = []
        self._thread = 0
        self._contexts = contextlib.ExitStack()

    # The forward pass ------------------------------------------------------------------------

    def __enter__(self) -> watch:
        if self._handles:
            raise GradtraceError("this watch is already open; make a second gradtrace.watch(model)")
        self._thread = threading.get_ident()
        model = unwrapped(self.model)
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self.atlas.name(parameter, clean(name))
        try:
            self._contexts.enter_context(_composed())
            for name, module in model.named_modules():
                self._names[module] = clean(name)
                before = module.register_forward_pre_hook(self._enter, with_kwargs=False)
                after = module.register_forward_hook(self._leave, always_call=True)
                self._handles += [before, after]
        except BaseException:
            self._close()
            raise
        self._hooks.reset()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()

    def _close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._stack.clear()
        self._contexts.close()

    def _enter(self, module: nn.Module, _: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        name = self._names[module]
        call = self._calls.get(name, 0)
        self._calls[name] = call + 1
        place = Place(name, call)
        self._stack.append(place)
        self.atlas.enter(_now(), place)
        for key, tensor in module._parameters.items():  # functional_call puts others in their place
            if isinstance(tensor, Tensor) and tensor.is_leaf and id(tensor) not in self.atlas.leaves:
                self.atlas.name(tensor, f"{name}.{key}" if name else key)

    def _leave(self, module: nn.Module, _: Any, __: Any) -> None:
        if threading.get_ident() != self._thread or not self._stack:
            return
        name = self._names[module]
        while self._stack and self._stack.pop().module != name:
            pass  # calls that an exception left open
        self.atlas.enter(_now(), self._stack[-1] if self._stack else NOWHERE)

    # The backward pass -----------------------------------------------------------------------

    def graph(self, loss: Tensor) -> Graph:
        """The computation graph behind the loss, with the module of each operator."""
        return api.graph_of(loss, self.atlas)

    def backward(self, loss: Tensor, semiring: Semiring = SUM, **options: Any) -> Gradients:
        """``{name: value}`` for every leaf; see ``gradtrace.backward``."""
        return api.backward_of(loss, semiring, self.atlas, self._hooks, **options)

    def program(self, loss: Tensor, **options: Any) -> Program:
        """The backward program of the loss; see ``gradtrace.program``."""
        return api.program_of(loss, self.atlas, self._hooks, **options)


def _now() -> int:
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


@contextlib.contextmanager
def _composed() -> Iterator[None]:
    """Ask PyTorch for operators that can be opened, in place of fused ones."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with contextlib.ExitStack() as stack:
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        if torch.cuda.is_available():
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        yield
