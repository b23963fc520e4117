"""The forward passes of a training loop: some are watched, and what they begin with is kept."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from contextlib import ExitStack
from time import perf_counter
from typing import Any

import torch
from torch import nn

from gradtrace.autodiff.pass_scope import backward_runs
from gradtrace.pytorch.module_calls import Listener, listen
from gradtrace.training.incident import beginning, unwrapped
from gradtrace.training.state import State
from gradtrace.watching import watch

PAUSING = (Generator, Coroutine, AsyncGenerator)


class Forwards(Listener):
    """Listens to a model while a pass is ``wanted``, and always if it ``keeps`` beginnings.

    A compiled model cannot be listened to, and where submodules are called and not the model,
    nothing is heard of that: then ``open`` watches from the call on until ``take``.
    """

    outermost = True

    def __init__(self, model: nn.Module, keeps: bool) -> None:
        self.model, self.keeps = model, keeps
        self._early = getattr(model, "_compiled_call_impl", None) is not None
        self._early |= type(model).__name__ == "OptimizedModule"
        self.explicit = self._early
        self.began: State | None = None  # what the pass began with
        self.seconds = 0.0  # that opening and closing took
        self._watch: Any = None
        self._entered = ExitStack()  # holds the watch while it is open
        self._calls = 0  # of the model, within each other
        self._stop: Callable[[], object] | None = None
        self._wanted = False

    @property
    def wanted(self) -> bool:
        """Whether the next pass is watched."""
        return self._wanted

    @wanted.setter
    def wanted(self, wanted: bool) -> None:
        self._wanted = wanted
        listens = self.keeps or (wanted and not self.explicit)
        if listens and self._stop is None:
            self._stop = listen(self, [self.model])
        elif not listens:
            self.close()
        if wanted and self._early:
            self.open()

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> bool:
        """The model is called; whether this call is watched."""
        if not torch.is_grad_enabled() or backward_runs():
            return False
        if self.keeps and self.began is None:
            self.began = beginning(self.model)
        if not self._wanted or self.explicit:
            return False
        if not self._calls:
            self.open()
            if unwrapped(module) is module:
                self._watch.inside(module)
        self._calls += 1
        return True

    def leave(self, entered: bool, result: Any) -> None:
        """The call has ended. A generator or a coroutine has yet to run: watch until ``take``."""
        if entered and self._calls:
            self._calls -= 1
            if not self._calls and not isinstance(result, PAUSING):
                self._close()

    def begin(self) -> None:
        """A pass begins here, and not where the model is called."""
        self.explicit, self._early = True, False
        if self.keeps and self.began is None:
            self.began = beginning(self.model)
        if self._wanted:
            self.open()

    def open(self) -> None:
        """Watch from now on."""
        begun = perf_counter()
        self._close()
        if self._watch is None:
            fused = all(each.device.type == "cpu" for each in self.model.parameters())
            self._watch = watch(self.model, composed=not fused, diagnose=False)
        self._entered.enter_context(self._watch)
        self.seconds += perf_counter() - begun

    def take(self) -> Any:
        """The watch since the last call, closed; None if no pass was watched."""
        self._close()
        found, self._watch, self._calls = self._watch, None, 0
        if found is not None and found.name_table.sharded is None:
            found.name_leaves()  # it may have been opened inside functional_call
        return found

    def close(self) -> None:
        """Stop listening."""
        self._close()
        stop, self._stop = self._stop, None
        if stop is not None:
            stop()

    def _close(self) -> None:
        begun = perf_counter()
        self._entered.close()
        self.seconds += perf_counter() - begun
