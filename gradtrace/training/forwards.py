"""The forward passes of a training loop: some are watched, and what they begin with is kept."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from gradtrace.autodiff.pass_scope import backward_runs
from gradtrace.pytorch.module_calls import Listener, listen
from gradtrace.pytorch.wrapped_modules import unwrapped
from gradtrace.training.incident import beginning
from gradtrace.training.state import State
from gradtrace.watching import watch

PAUSING = (Generator, Coroutine, AsyncGenerator)


class Forwards(Listener):
    """Listens to a model while a pass is ``wanted``, and always if it ``keeps`` beginnings."""

    outermost = True

    def __init__(self, model: nn.Module, keeps: bool) -> None:
        self.model, self.keeps, self.wanted = model, keeps, False
        self.began: State | None = None  # what the pass began with
        self._watch: Any = None
        self._open = ExitStack()  # holds the watch while it is open
        self._is_open = False
        self._stop: Callable[[], object] | None = None
        self.want(False)

    def want(self, wanted: bool) -> None:
        """Say whether the next pass is watched."""
        self.wanted, listens = wanted, wanted or self.keeps
        if listens and self._stop is None:
            self._stop = listen(self, [self.model])
        elif self._stop is not None and not listens:
            self.close()

    def begin(self) -> bool:
        """A pass begins, or one of several calls of the model in it; whether it is watched."""
        if self.keeps and self.began is None:
            self.began = beginning(self.model)
        if self.wanted and not self._is_open:
            if self._watch is None:
                fused = all(each.device.type == "cpu" for each in self.model.parameters())
                self._watch = watch(self.model, composed=not fused, diagnose=False)
            self._open.enter_context(self._watch)
            self._is_open = True
        return self._is_open

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> bool:
        """The model is called; whether that has opened the watch."""
        if self._is_open or not torch.is_grad_enabled() or backward_runs():
            return False
        watched = self.begin()
        if watched and unwrapped(module) is module:
            self._watch.inside(module)
        return watched

    def leave(self, entered: bool, result: Any) -> None:
        """The call has ended. A generator or a coroutine has yet to run: watch until ``take``."""
        if entered and not isinstance(result, PAUSING):
            self._shut()

    def take(self) -> Any:
        """The watch since the last call, closed; None if no pass was watched."""
        self._shut()
        found, self._watch = self._watch, None
        if found is not None and found.name_table.sharded is None:
            found.name_leaves()  # it may have been opened inside functional_call
        return found

    def close(self) -> None:
        """Stop listening."""
        self._shut()
        stop, self._stop = self._stop, None
        if stop is not None:
            stop()

    def _shut(self) -> None:
        self._open.close()
        self._is_open = False
