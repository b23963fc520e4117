"""Opens a watch only in the forward passes of a training loop that are to be traced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from gradtrace.autodiff.pass_scope import of_training
from gradtrace.kernels import backend_of
from gradtrace.pytorch.paused_calls import PAUSING
from gradtrace.pytorch.wrapped_modules import unwrapped
from gradtrace.training.forward_keeper import Watcher
from gradtrace.training.tuning import MAX_NOTED_CALLS
from gradtrace.watch import watch


class SampledWatch(Watcher):
    """Watches forward passes of a model whose calls it listens to.

    While ``wanted``, a forward pass that builds a graph is watched from its start to its end.
    ``open`` watches from the call on, until ``take``. ``idle`` is set by passes without a graph,
    such as those of an evaluation. While ``diagnose``, operations are recorded with their lines.
    """

    def __init__(
        self,
        model: nn.Module,
        composed: bool | None,
        clock: Callable[[], float],
        diagnose: bool = False,
    ) -> None:
        self.model, self.diagnose = model, diagnose
        self.wanted = self.idle = False
        self.seconds = 0.0  # spent opening and closing watches
        self._composed, self._clock = composed, clock
        self._watch: watch | None = None
        self._entered = ExitStack()  # holds the watch while it is open
        self._explicit = False  # opened by ``open``
        self._depth = 0  # of nested forward passes

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> bool:
        """Called when a forward pass begins; whether it is watched."""
        if not torch.is_grad_enabled():
            self.idle = True
            return False
        if not self.wanted or self._explicit or not of_training():
            return False
        if not self._depth:
            watched = self._reopen()
            if unwrapped(module) is module:
                watched.inside(module)
        self._depth += 1
        return True

    def leave(self, entered: bool, result: Any) -> None:
        """Called when a forward pass ends. If it is a generator or a coroutine, it has yet to run,
        and the watch stays open until ``take``.
        """
        if entered and self._depth:  # unless taken meanwhile
            self._depth -= 1
            self._explicit |= type(result) in PAUSING
            if not self._depth and not self._explicit:
                with self._timed():
                    self._close()

    def open(self) -> None:
        """Watch from now on, until ``take``."""
        self._reopen()
        self._explicit = True

    def take(self) -> watch | None:
        """The watch since the last call, closed; None if no forward pass was watched."""
        self._close()
        found, self._watch = self._watch, None
        if found is not None and found.name_table.sharded is None:
            found.name_leaves()  # it may have been opened inside functional_call
        return found

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Within, between two forward passes, nothing is watched."""
        wanted, explicit = self.wanted, self._explicit
        self._close()
        self.wanted = False
        try:
            yield
        finally:
            self.wanted = wanted
            if explicit:
                self.open()

    def _reopen(self) -> watch:
        with self._timed():
            self._close()
            if self._watch is None or len(self._watch.name_table.starts) > MAX_NOTED_CALLS:
                composed = self._composed
                if composed is None:  # fused kernels can be followed on a CPU only
                    composed = not all(backend_of(each).host for each in self.model.parameters())
                self._watch = watch(self.model, composed=composed, diagnose=self.diagnose)
            return self._entered.enter_context(self._watch)

    def _close(self) -> None:
        self._depth, self._explicit = 0, False
        self._entered.close()

    @contextmanager
    def _timed(self) -> Iterator[None]:
        begun = self._clock()
        yield
        self.seconds += self._clock() - begun
