"""Opens a watch in those forward passes of a training loop that are to be traced."""

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
from gradtrace.session import unwrapped, watch

MANY = 1 << 20
"""A watch that has noted so many module calls is replaced: none of them led to a step."""


class SampledWatch:
    """Is told of the forward passes of a model, whose attributes stay as they are.

    While ``wanted``, a forward pass that builds a graph is watched from its start to its end;
    ``open`` watches from now on until ``take``. ``idle`` is set by passes without a graph, such as
    an evaluation.
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
        self._end = weakref.finalize(self, listen(Relay(self), [model]))

    def enter(self, module: nn.Module) -> bool:
        """A forward pass begins; whether ``leave`` is to be told of its end."""
        if not torch.is_grad_enabled():
            self.idle = True
            return False
        if not self.wanted or self._steady or backward_runs():
            return False
        if self._depth:
            self._depth += 1  # a pass within a pass
        else:
            self._start(module)
        return True

    def _start(self, module: nn.Module) -> None:
        begun = self._clock()
        self._stop()
        self._begin()
        assert self._watch is not None
        self._depth = 1
        if unwrapped(module) is module:
            self._watch.inside(module)
        self.seconds += self._clock() - begun

    def leave(self) -> None:
        """A forward pass ends."""
        self._depth -= 1
        if self._depth == 0:
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
        self._end()

    def _begin(self) -> None:
        if self._watch is None or len(self._watch.name_table.starts) > MANY:
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
        if self._open and self._watch is not None:
            self._open = False
            self._watch.__exit__(None, None, None)


class Relay(Listener):
    """Tells a lookout, and does not keep it alive."""

    def __init__(self, lookout: SampledWatch) -> None:
        self._lookout = weakref.ref(lookout)

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> SampledWatch | None:
        """A forward pass begins."""
        lookout = self._lookout()
        return lookout if lookout is not None and lookout.enter(module) else None

    def leave(self, entered: SampledWatch | None, result: Any) -> None:
        """It ends."""
        if entered is not None:
            entered.leave()


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[SilencedHooks]:
    """Within, tracing cannot be noticed by training: random numbers, tensors and the attributes of
    modules are as before after it, no mixed precision applies to it, and hooks on gradients do not
    run.

    Checkpointed parts of a model run again when they are traced: batch norms would count the batch
    once more, and a dropout without ``preserve_rng_state`` would draw.
    """
    devices = {tensor.device for tensor in model.parameters() if tensor.is_cuda}
    kinds = {"cpu", *(device.type for device in devices)}
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng([d.index or 0 for d in devices]))
        stack.enter_context(same_draws())
        for kind in kinds:
            stack.enter_context(torch.autocast(kind, enabled=False))
        stack.enter_context(undoing(stack.enter_context(restored(model))))
        yield stack.enter_context(silenced())
