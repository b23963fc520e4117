"""What surrounds a walk over a graph: one backward pass, and how what it has seen is freed."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import GraphExecGroup

from gradtrace.autograd import Node

_RUNNING = threading.local()


def backward_runs() -> bool:
    """Whether a backward pass, ours or PyTorch's, runs on this thread.

    A module that is called now recomputes what a checkpoint dropped.
    """
    task = torch._C._current_graph_task_id()
    return task != -1 or getattr(_RUNNING, "passes", 0) > 0


DEEP = 2_000
"""From this many nodes on, a graph that Python has walked is let go by ``hold``."""

_HELD: set[int] = set()  # losses, by identity


def hold(loss: Tensor, nodes: list[Node]) -> None:
    """Keep the nodes of a walked graph until the loss is gone, and then free them from the root on.

    PyTorch frees a graph in a loop, but for nodes that Python has seen: these free one another by
    recursion, and a chain of 100,000 overflows the stack. So they are held one by one, in order.
    The list is made a cycle when the loss goes, since only the garbage collector lets it go after
    the loss itself has.
    """
    key = id(loss)
    if len(nodes) < DEEP or key in _HELD:
        return

    def release(held: list[Any]) -> None:
        _HELD.discard(key)
        held.insert(0, held)

    _HELD.add(key)
    weakref.finalize(loss, release, nodes[::-1]).atexit = False


@contextlib.contextmanager
def one_pass() -> Iterator[None]:
    """One backward pass: no graph is built, and checkpointed parts are recomputed once.

    The garbage collector pauses: a pass makes many small objects that are all in use, and to look
    through them again and again costs a fifth of the time.
    """
    collecting = gc.isenabled()
    gc.disable()
    _RUNNING.passes = getattr(_RUNNING, "passes", 0) + 1
    try:
        with torch.no_grad(), recomputed_once():
            yield
    finally:
        _RUNNING.passes -= 1
        if collecting:
            gc.enable()


@contextlib.contextmanager
def recomputed_once() -> Iterator[None]:
    """Within, a checkpointed part is recomputed at most once, and each of its values used once."""
    outer = torch._C._get_graph_exec_group()
    torch._C._set_graph_exec_group(None)
    try:
        with GraphExecGroup():
            yield
    finally:
        torch._C._set_graph_exec_group(outer)
