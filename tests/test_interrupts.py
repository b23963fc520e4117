"""Ctrl-C wherever CPython lets it strike: no switch stays changed, and nothing listens."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from test_threads import switches
from torch import nn

import gradtrace as gt
from gradtrace.pytorch import call_listeners, global_switches
from gradtrace.pytorch.call_patches import PATCHES

CHECKED = ("CALL", "RESUME")
"""What instructions are called after which CPython looks for signals."""


@cache
def places(code: CodeType) -> frozenset[int]:
    """The instructions before which a signal may be handled."""
    steps = list(dis.get_instructions(code))
    return frozenset(b.offset for a, b in pairwise(steps) if a.opname.startswith(CHECKED))


class CtrlC:
    """Raises KeyboardInterrupt at the n-th such place in one of these files; 0 only counts them."""

    def __init__(self, files: tuple[str, ...], at: int) -> None:
        self.files, self.at, self.passed, self.where = files, at, 0, ""

    def run(self, work: Callable[[], object]) -> None:
        before = sys.gettrace()
        sys._getframe().f_trace_opcodes = True  # else Python 3.12 tells none the first time
        sys.settrace(self._called)
        try:
            work()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)

    def _called(self, frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.endswith(self.files) or code.co_name == "__exit__":
            return None  # Ctrl-C as the first thing in __exit__: so for every context in Python
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._at

    def _at(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "opcode" and frame.f_lasti in places(frame.f_code):
            self.passed += 1
            if self.passed == self.at:
                self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._at


pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
"""Where Ctrl-C strikes in what runs as something is freed, CPython tells it and goes on."""


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:

    yield
    call_listeners.STACK.calls.clear()
    call_listeners.LISTENERS.clear()
    for patch in list(PATCHES.values()):
        while patch.users:
            patch.release()


def left() -> tuple[object, ...]:
    """What a block that has ended must not leave behind."""
    return (*switches(), dict(call_listeners.LISTENERS), list(call_listeners.STACK.calls))


def struck(work: Callable[[], object], files: tuple[str, ...], every: int = 1) -> list[str]:
    """Strike at each place in turn, or at every n-th; where something was left behind."""
    for _ in range(2):
        work()
    counted, before = CtrlC(files, 0), left()
    counted.run(work)
    assert counted.passed > 20
    found = []
    for n in range(1, counted.passed + 1, every):
        interrupt = CtrlC(files, n)
        interrupt.run(work)
        if left() != before:
            found.append(interrupt.where)
            before = left()
    return found


def test_a_watch_leaves_nothing() -> None:
    model = nn.Linear(2, 1)

    def work() -> None:
        with gt.watch(model):
            pass

    files = ("global_switches.py", "call_listeners.py")
    assert not struck(work, files, every=3)


def test_calls_of_a_watched_lstm_leave_nothing() -> None:
    model, x = nn.LSTM(2, 2), torch.ones(1, 1, 2)

    def work() -> None:
        with gt.watch(model):
            model(x)

    assert not struck(work, ("gradtrace/pytorch/call_listeners.py", "composed_lstm.py"))


def test_a_pass_leaves_gradients_on() -> None:
    """Ctrl-C inside of ``torch.no_grad().__enter__`` leaves them off."""
    x = torch.ones(2, requires_grad=True)
    loss = (x * x).sum()
    files = ("torch/autograd/grad_mode.py", "global_switches.py")
    assert not struck(lambda: gt.backward(loss), files)


def test_a_context_that_nobody_leaves_is_left_when_it_is_freed() -> None:
    before = switches()
    context = global_switches.COMPOSED()
    context.__enter__()
    assert switches() != before
    del context
    assert switches() == before
