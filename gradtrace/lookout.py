"""Opens a watch in those forward passes of a training loop that are to be traced."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradtrace.hooks import ours
from gradtrace.passes import backward_runs
from gradtrace.watching import unwrapped, watch

MANY = 1 << 20
"""A watch that has noted so many module calls is replaced: none of them led to a step."""


class Lookout:
    """Stands on a model with one light hook, called before each of its forward passes.

    While ``wanted``, a forward pass that builds a graph is watched from its start to its end;
    ``open`` watches from now on until ``take``. ``idle`` is set by passes without a graph, such as
    an evaluation. The hook is left out of copies of the model.
    """

    def __init__(self, model: nn.Module, composed: bool | None, clock: Callable[[], float]) -> None:
        self.model = model
        self.wanted = self.idle = False
        self.seconds = 0.0  # that opening and closing took
        self._composed, self._clock = composed, clock
        self._watch: watch | None = None
        self._open = False
        self._steady = False  # opened by ``open``
        self._depth = 0
        self._after: RemovableHandle | None = None
        self._before = model.register_forward_pre_hook(Hook(self), prepend=True)
        ours(1)

    def enter(self, module: nn.Module) -> None:
        """A forward pass begins."""
        if not torch.is_grad_enabled():
            self.idle = True
        elif self.wanted and not self._steady and not backward_runs():
            if self._depth:
                self._depth += 1  # a pass within a pass
            else:
                self._start(module)

    def _start(self, module: nn.Module) -> None:
        begun = self._clock()
        self._stop()
        self._begin()
        assert self._watch is not None
        self._depth = 1
        self._after = module.register_forward_hook(self._leave, always_call=True)
        ours(1)
        if unwrapped(module) is module:
            self._watch.inside(module)
        self.seconds += self._clock() - begun

    def _leave(self, module: nn.Module, given: Any, result: Any) -> None:
        """A forward pass ends. After an error PyTorch goes through the hooks one by one and would
        trip over one that is gone, so then they stay until the next pass, or the end.
        """
        self._depth -= 1
        if self._depth == 0 and result is not None:
            begun = self._clock()
            self._stop()
            self.seconds += self._clock() - begun

    def open(self) -> None:
        """Watch from now on."""
        begun = self._clock()
        self._stop()
        self._begin()
        self._steady = True
        self.seconds += self._clock() - begun

    def take(self) -> watch | None:
        """What was watched since the last time, if anything was; the model is free of it."""
        self._stop()
        found, self._watch = self._watch, None
        return found

    def remove(self) -> None:
        """Leave the model as it was."""
        self.take()
        self._before.remove()

    def _begin(self) -> None:
        if self._watch is None or len(self._watch.atlas.starts) > MANY:
            self._watch = watch(self.model, composed=self._apart())
        self._watch.__enter__()
        self._open = True

    def _apart(self) -> bool:
        """Whether kernels are to be composed: on a CPU they can be opened as they are."""
        if self._composed is None:
            return any(tensor.device.type != "cpu" for tensor in self.model.parameters())
        return self._composed

    def _stop(self) -> None:
        self._depth, self._steady = 0, False
        if self._after is not None:
            self._after.remove()
            self._after = None
        if self._open and self._watch is not None:
            self._open = False
            self._watch.__exit__(None, None, None)


class Hook:
    """What stands on the model. Copies and pickles of the model have a hook that does nothing."""

    def __init__(self, lookout: Lookout) -> None:
        self._lookout = weakref.ref(lookout)

    def __call__(self, module: nn.Module, _: Any) -> None:
        """A forward pass begins."""
        if torch.compiler.is_compiling():
            return  # nothing of this is for the compiled code
        lookout = self._lookout()
        if lookout is not None:
            lookout.enter(module)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return nothing

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[()]]:
        return _copied, ()


def _copied() -> Callable[..., None]:
    return nothing


def nothing(module: nn.Module, _: Any) -> None:
    """A hook that does nothing."""


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Within, tracing cannot be noticed by training: random numbers and buffers are as before after
    it, and no mixed precision applies to it.

    Checkpointed parts of a model run again when they are traced: batch norms would count the batch
    once more, and a dropout without ``preserve_rng_state`` would draw.
    """
    devices = {tensor.device for tensor in model.parameters() if tensor.is_cuda}
    kinds = {"cpu", *(device.type for device in devices)}
    kept = _copies(model)
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng([d.index or 0 for d in devices]))
        for kind in kinds:
            stack.enter_context(torch.autocast(kind, enabled=False))
        try:
            yield
        finally:
            for buffer, before in kept:
                buffer.data.copy_(before)  # the graph may hold it: its version must stay


def _copies(model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Buffers that a forward pass may change: those of modules that train, if they are small. Batch
    norms change theirs without a new version, so that cannot tell.
    """
    return [
        (buffer, buffer.detach().clone())
        for module in model.modules()
        if module.training
        for buffer in module._buffers.values()
        if buffer is not None and buffer.numel() <= SMALL and not buffer.is_meta
    ]


SMALL = 1 << 16
"""Masks and tables of positions are larger, and do not change."""
