"""Opens a watch only in the forward passes of a training loop that are to be traced."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from gradtrace.autodiff.hooks import SilencedHooks, silenced
from gradtrace.autodiff.pass_scope import backward_runs
from gradtrace.pytorch.module_calls import Listener, listen
from gradtrace.pytorch.side_effects import restored, same_draws, undoing
from gradtrace.pytorch.wrapped_modules import unwrapped
from gradtrace.session import watch

MAX_NOTED_CALLS = 1 << 20
"""A watch that has recorded more module calls than this is replaced: none of them led to a step."""


class SampledWatch:
    """Listens to the forward passes of a model, without changing the model's attributes.

    While ``wanted``, a forward pass that builds a graph is watched from its start to its end.
    ``open`` watches from the call on, until ``take``. ``idle`` is set by passes without a graph,
    such as those of an evaluation.
    """

    def __init__(self, model: nn.Module, composed: bool | None, clock: Callable[[], float]) -> None:
        self.model = model
        self.wanted = self.idle = False
        self.seconds = 0.0  # spent opening and closing watches
        self._composed, self._clock = composed, clock
        self._watch: watch | None = None
        self._open = False
        self._explicit = False  # opened by ``open``
        self._depth = 0
        self._unlisten = weakref.finalize(self, listen(Relay(self), [model]))

    def enter(self, module: nn.Module) -> bool:
        """Called when a forward pass begins; whether ``leave`` is to be called at its end."""
        if not torch.is_grad_enabled():
            self.idle = True
            return False
        if not self.wanted or self._explicit or backward_runs():
            return False
        if self._depth:
            self._depth += 1  # a nested forward pass
        else:
            self._start(module)
        return True

    def _start(self, module: nn.Module) -> None:
        begun = self._clock()
        self._close_watch()
        self._open_watch()
        assert self._watch is not None
        self._depth = 1
        if unwrapped(module) is module:
            self._watch.inside(module)
        self.seconds += self._clock() - begun

    def leave(self) -> None:
        """Called when a watched forward pass ends."""
        self._depth -= 1
        if self._depth == 0:
            begun = self._clock()
            self._close_watch()
            self.seconds += self._clock() - begun

    def open(self) -> None:
        """Watch from now on, until ``take``."""
        begun = self._clock()
        self._close_watch()
        self._open_watch()
        self._explicit = True
        self.seconds += self._clock() - begun

    def take(self) -> watch | None:
        """The watch since the last call, closed; None if no forward pass was watched."""
        self._close_watch()
        found, self._watch = self._watch, None
        return found

    def remove(self) -> None:
        """Close the watch and stop listening to the model."""
        self.take()
        self._unlisten()

    def _open_watch(self) -> None:
        if self._watch is None or len(self._watch.name_table.starts) > MAX_NOTED_CALLS:
            self._watch = watch(self.model, composed=self._use_composed())
        self._watch.__enter__()
        self._open = True

    def _use_composed(self) -> bool:
        """Whether to replace fused kernels by composed ones: needed on other devices than a CPU."""
        if self._composed is None:
            return any(tensor.device.type != "cpu" for tensor in self.model.parameters())
        return self._composed

    def _close_watch(self) -> None:
        self._depth, self._explicit = 0, False
        if self._open and self._watch is not None:
            self._open = False
            self._watch.__exit__(None, None, None)


class Relay(Listener):
    """Forwards module calls to a ``SampledWatch``, holding only a weak reference to it."""

    def __init__(self, sampled: SampledWatch) -> None:
        self._sampled = weakref.ref(sampled)

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> SampledWatch | None:
        """Called when a forward pass begins."""
        sampled = self._sampled()
        return sampled if sampled is not None and sampled.enter(module) else None

    def leave(self, entered: SampledWatch | None, result: Any) -> None:
        """Called when the forward pass ends."""
        if entered is not None:
            entered.leave()


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[SilencedHooks]:
    """Within this context, tracing has no side effects on training.

    The state of random number generators, tensors and the attributes of modules are restored
    afterwards, autocast is disabled, and hooks on gradients do not run.

    Checkpointed parts of a model run again when they are traced: batch norms would count the batch
    once more, and a dropout without ``preserve_rng_state`` would draw random numbers.
    """
    kinds = {"cpu", *("cuda" for tensor in model.parameters() if tensor.is_cuda)}
    with ExitStack() as stack:
        stack.enter_context(same_draws(model))
        for kind in kinds:
            stack.enter_context(torch.autocast(kind, enabled=False))
        stack.enter_context(undoing(stack.enter_context(restored(model))))
        yield stack.enter_context(silenced())
