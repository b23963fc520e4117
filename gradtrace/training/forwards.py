"""The forward passes of a training loop: some are watched, and what they begin with is kept."""

from __future__ import annotations

import weakref
from contextlib import ExitStack
from time import perf_counter
from typing import Any

import torch
from torch import nn

from gradtrace.training.incident import beginning, unwrapped
from gradtrace.training.state import State
from gradtrace.watching import watch


class Forwards:
    """Listens to a model while a pass is ``wanted``, and always if it ``keeps`` beginnings.

    A compiled model cannot be listened to, and where submodules are called and not the model,
    nothing is heard of that: then ``open`` watches from the call on until ``take``.
    """

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
        self._hooks = list[Any]()
        self._wanted = False

    @property
    def wanted(self) -> bool:
        """Whether the next pass is watched."""
        return self._wanted

    @wanted.setter
    def wanted(self, wanted: bool) -> None:
        self._wanted = wanted
        listens = self.keeps or (wanted and not self.explicit)
        if listens and not self._hooks:
            entered, left = _Hook(self, "enter"), _Hook(self, "leave")
            self._hooks = [
                self.model.register_forward_pre_hook(entered, prepend=True),
                self.model.register_forward_hook(left, always_call=True),
            ]
        elif not listens:
            self.close()
        if wanted and self._early:
            self.open()

    def enter(self) -> None:
        """The model is called."""
        self._calls += 1
        if self._calls > 1 or not torch.is_grad_enabled() or _recomputed():
            return
        if self.keeps and self.began is None:
            self.began = beginning(self.model)
        if self._wanted and not self.explicit:
            self.open()
            if unwrapped(self.model) is self.model:
                self._watch.inside(self.model)

    def leave(self) -> None:
        """The call has ended."""
        self._calls -= 1
        if not self._calls and not self.explicit:
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
        while self._hooks:
            self._hooks.pop().remove()

    def _close(self) -> None:
        begun = perf_counter()
        self._entered.close()
        self.seconds += perf_counter() - begun


class _Hook:
    """Tells ``Forwards`` of a call of the model; in a copy of the model it does nothing."""

    def __init__(self, forwards: Forwards | None = None, name: str = "") -> None:
        self._told = (lambda: None) if forwards is None else weakref.ref(forwards)
        self._name = name

    def __call__(self, *_: Any) -> None:
        if (forwards := self._told()) is not None:
            getattr(forwards, self._name)()

    def __reduce__(self) -> Any:
        return _Hook, ()


def _recomputed() -> bool:
    """Whether a backward pass runs: a checkpoint is computed again."""
    return torch._C._current_graph_task_id() != -1
