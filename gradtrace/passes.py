"""What surrounds a walk over a graph: one backward pass, and how what it has seen is freed."""

from __future__ import annotations

import contextlib
import gc
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch.utils import checkpoint

from gradtrace.autograd import Edges, Node

_RUNNING = threading.local()


def backward_runs() -> bool:
    """Whether a backward pass, ours or PyTorch's, runs on this thread.

    A module that is called now recomputes what a checkpoint dropped.
    """
    task = torch._C._current_graph_task_id()
    return task != -1 or getattr(_RUNNING, "passes", 0) > 0


SPAN = 32
"""So many nodes in a row may free one another before a container stands between two of them."""

KEEPER = "gradtrace: frees a deep graph step by step"
"""The key under which a node's metadata holds some of the nodes that it leads to."""


def limit_recursion(nodes: Sequence[Node], edges: Mapping[Node, Edges]) -> None:
    """See to it that a graph can be freed at any depth, on any thread, as soon as it is let go.

    ``nodes`` are all that a walk has met, each after the nodes that lead to it. PyTorch frees a
    graph in a loop, but since 2.13 not nodes that Python has seen: these free one another by
    recursion, some 210 bytes of C stack each, so that a chain of 2,500 overflows a stack of 512 kB.
    Python's own containers avoid that: past 50 of them, one inside the other, the rest waits in a
    list (the "trashcan"). So where a chain of nodes is long, every ``SPAN``-th of them also holds
    its successors by a tuple in its metadata, which is let go after its edges are. The successors
    live no longer than before, since the node leads to them anyway.
    """
    if len(nodes) <= 2 * SPAN:
        return
    heights: dict[Node | None, int] = {None: -1}  # the longest way down to a leaf
    for node in reversed(nodes):
        height = -1
        for child, _ in edges[node]:
            below = heights.get(child, 0)  # a leaf may come first, as in order of creation
            if below > height:
                height = below
        heights[node] = height = height + 1
        start = height - height % SPAN
        if start > SPAN:
            far = tuple([n for n, _ in edges[node] if SPAN <= heights.get(n, 0) < start])
            if far:
                node.metadata[KEEPER] = far


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
    if not hasattr(checkpoint, "GraphExecGroup"):
        with _recomputed_once_before_2_10():
            yield
        return
    outer = torch._C._get_graph_exec_group()
    torch._C._set_graph_exec_group(None)
    try:
        with checkpoint.GraphExecGroup():
            yield
    finally:
        torch._C._set_graph_exec_group(outer)


class _Uuid:
    """In place of the module ``uuid`` in ``torch.utils.checkpoint`` of torch 2.6 to 2.9.

    There a part is recomputed once for each number that ``uuid4`` gives, which is asked for at
    every saved value that is read outside PyTorch's own backward pass. Within a pass of ours, and
    on its thread, it gives one number.
    """

    def uuid4(self) -> uuid.UUID:
        return getattr(_RUNNING, "recomputation", None) or uuid.uuid4()


@contextlib.contextmanager
def _recomputed_once_before_2_10() -> Iterator[None]:
    vars(checkpoint)["uuid"] = _Uuid()
    outer = getattr(_RUNNING, "recomputation", None)
    _RUNNING.recomputation = uuid.uuid4()
    try:
        yield
    finally:
        _RUNNING.recomputation = outer
