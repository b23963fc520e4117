"""The context of a backward pass of gradtrace: how PyTorch's hooks and checkpoints see it, and how
the nodes it has visited can be freed.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import threading
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import count
from types import CellType
from typing import Any

import torch
from torch.utils import checkpoint

from gradtrace.autodiff.nodes import Edges, Node, leaves_below
from gradtrace.autodiff.tuning import FREE_SPAN_NODES
from gradtrace.pytorch.function_modes import resumed
from gradtrace.pytorch.global_switches import Change, Switch
from gradtrace.pytorch.python_state import held_in
from gradtrace.pytorch.side_effects import functions_restored, note_gradients


class _PassState(threading.local):
    """The pass of gradtrace that runs on this thread."""

    passes = 0  # nested ones
    own = 0  # nested calls of gradtrace, a pass or what is computed from one
    number = -1
    recomputation: uuid.UUID | None = None
    reached: Callable[[], Collection[Node]] = tuple  # the nodes that the pass visits


_PASS = _PassState()


def backward_runs() -> bool:
    """Whether a backward pass, of gradtrace or of PyTorch, runs on this thread.

    If so, a call of a module is the recomputation of a checkpoint.
    """
    return _PASS.passes > 0 or _TASK() != -1


@contextlib.contextmanager
def own_work() -> Iterator[None]:
    """Within, what is computed on this thread is gradtrace's, not the user's."""
    with collector_off():
        _PASS.own += 1
        try:
            yield
        finally:
            _PASS.own -= 1


def collector_off() -> contextlib.AbstractContextManager[None]:
    """Within, the garbage collector does not run: a pass makes many small objects that are all in
    use and in no cycle, and to scan them repeatedly, and then all of the process's, takes a
    quarter of the time of a small network's trace.
    """
    return _COLLECTOR_OFF()


def _without_collector() -> Change:
    collecting = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if collecting:
            gc.enable()


_COLLECTOR_OFF = Switch(_without_collector)  # of the process, so threads share it


def own_work_runs() -> bool:
    """Whether this thread is within ``own_work``, or ``backward_runs`` holds."""
    return _PASS.own > 0 or backward_runs()


def pass_runs() -> bool:
    """Whether a pass of gradtrace runs on this thread."""
    return _PASS.passes > 0


KEEPER = "gradtrace: frees a deep graph step by step"
"""The metadata key under which a node holds references to some of its children."""


def limit_recursion(nodes: Sequence[Node], edges: Mapping[Node, Edges]) -> None:
    """Make a graph of any depth safe to free, on any thread, without stack overflow.

    ``nodes`` are all nodes of a walk, each after the nodes that lead to it. PyTorch frees a graph
    in a loop, but since 2.13 not nodes that Python has seen: these free one another by recursion,
    with about 210 bytes of C stack each, so that a chain of 2,500 overflows a stack of 512 kB.
    Python's containers avoid this: beyond 50 nested deallocations the rest is queued (the
    "trashcan"). So in a long chain every ``FREE_SPAN_NODES``-th node also holds its children in a
    tuple in its metadata, which is released after its edges. This does not extend the lifetime of
    the children, since the node's edges refer to them anyway.
    """
    for node, children in far_children(nodes, edges).items():
        node.metadata[KEEPER] = children


def far_children(
    nodes: Sequence[Node], edges: Mapping[Node, Edges]
) -> dict[Node, tuple[Node, ...]]:
    """The nodes that ``limit_recursion`` lets hold some of their children, and these."""
    found: dict[Node, tuple[Node, ...]] = {}
    if len(nodes) <= 2 * FREE_SPAN_NODES:
        return found
    heights: dict[Node | None, int] = {None: -1}  # length of the longest path to a leaf
    for node in reversed(nodes):
        height = -1
        for child, _ in edges.get(node, ()):
            below = heights.get(child, 0)  # 0: a leaf that is not listed yet
            if below > height:
                height = below
        heights[node] = height = height + 1
        start = height - height % FREE_SPAN_NODES
        if start > FREE_SPAN_NODES:
            far = tuple(
                [n for n, _ in edges.get(node, ()) if FREE_SPAN_NODES <= heights.get(n, 0) < start]
            )
            if far:
                found[node] = far
    return found


@contextlib.contextmanager
def one_pass() -> Iterator[None]:
    """One backward pass: no graph is built, and checkpointed parts are recomputed once."""
    outer = _PASS.passes, _PASS.number
    _PASS.passes, _PASS.number = outer[0] + 1, next(_NUMBERS)
    try:
        with collector_off(), torch.no_grad(), recomputed_once(), _PATCHED(), functions_restored():
            yield
    finally:
        _PASS.passes, _PASS.number = outer


def set_reached_nodes(reached: Callable[[], Collection[Node]]) -> None:
    """Set which nodes the pass on this thread visits; ``reached`` is called when a hook asks."""
    _PASS.reached = reached


# Functions of PyTorch that are replaced during a pass ---------------------------------------------

_NUMBERS = count(1 << 40)  # pass numbers, which cannot collide with those of the engine
_TASK = torch._C._current_graph_task_id
_EXECUTES = torch._C._will_engine_execute_node
_CACHED: Any = vars(checkpoint)["_CachedTorchDispatchMode"]
_ENTER, _EXIT = _CACHED.__enter__, _CACHED.__exit__
_RUN_BACKWARD: Any = vars(torch.autograd)["_engine_run_backward"]
_RECOMPUTATION: Any = vars(checkpoint)["_recomputation_hook"]


def _task() -> int:
    """The number of the running backward pass.

    A multi-grad hook counts its calls by this number. In a pass of gradtrace the hook is called by
    several passes of PyTorch's engine, over one node each, which must have the same number.
    """
    return _PASS.number if _PASS.passes else _TASK()


def _executes(node: Node) -> bool:
    """Whether the running pass visits a node."""
    return node in _PASS.reached() if _PASS.passes else _EXECUTES(node)


class _Recomputation(_RECOMPUTATION):  # type: ignore[misc]
    """The recomputation of a checkpoint: modes of PyTorch's functions that the caller has entered
    take part in it.

    A context of the user's (``context_fn``) made by ``contextlib.contextmanager`` can be entered
    once only: a pass of gradtrace enters a copy.
    """

    def __init__(self, frame: Callable[[], Any], *more: Any) -> None:
        super().__init__(frame, *more)
        self._code = frame().recompute_fn
        self._contexts: list[tuple[CellType, Any]] = []
        self._modes = resumed()

    def __enter__(self) -> None:
        if _PASS.passes:
            self._contexts = _single_use(self._code)
            for cell, context in self._contexts:
                cell.cell_contents = context._recreate_cm()
        super().__enter__()
        self._modes.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._modes.__exit__(*error)
        for cell, context in self._contexts:
            cell.cell_contents = context
        super().__exit__(*error)


def _single_use(code: Any) -> list[tuple[CellType, Any]]:
    """The cells of a recomputation's function that hold such a context, and the contexts."""
    found: list[tuple[CellType, Any]] = []
    waiting = [code]
    while waiting:
        for cell, value in held_in(waiting.pop()):
            if isinstance(value, contextlib._GeneratorContextManager) and hasattr(value, "args"):
                found.append((cell, value))
            elif getattr(value, "__name__", "") == "recompute_fn":
                waiting.append(value)
    return found


def _enter(mode: Any) -> Any:
    """Selective checkpointing returns each saved value once. In a pass of gradtrace the values are
    restored afterwards (``_exit``), so that the user's own pass finds them.
    """
    if _PASS.passes:
        mode._gradtrace_saved = {key: copy.copy(some) for key, some in mode.storage.items()}
    return _ENTER(mode)


def _exit(mode: Any, *error: object) -> Any:
    saved = mode.__dict__.pop("_gradtrace_saved", None)
    if saved is not None:
        mode.storage.clear()
        mode.storage.update(saved)
    return _EXIT(mode, *error)


def _run_backward(outputs: Any, *args: Any, **kwargs: Any) -> Any:
    """A backward pass that user code runs inside a pass of gradtrace, as a reentrant checkpoint of
    the user's does: what it adds to ``.grad`` is taken back.
    """
    if _PASS.passes and kwargs.get("accumulate_grad"):
        note_gradients(leaves_below(outputs))
    return _RUN_BACKWARD(outputs, *args, **kwargs)


_PATCHES: tuple[tuple[Any, str, Any], ...] = (
    (torch.autograd, "_engine_run_backward", _run_backward),
    (torch._C, "_current_graph_task_id", _task),
    (torch._C, "_will_engine_execute_node", _executes),
    (checkpoint, "_recomputation_hook", _Recomputation),
    (_CACHED, "__enter__", _enter),
    (_CACHED, "__exit__", _exit),
)


def _patched_torch() -> Change:
    """Within, PyTorch's hooks and checkpoints treat a pass of gradtrace as a backward pass.

    The patches are process-wide; on other threads they behave as the originals.
    """
    originals = [getattr(where, name) for where, name, _ in _PATCHES]
    try:
        for where, name, ours in _PATCHES:
            setattr(where, name, ours)
        yield
    finally:
        for (where, name, _), theirs in zip(_PATCHES, originals):
            setattr(where, name, theirs)


_PATCHED = Switch(lambda: _patched_torch())


@contextlib.contextmanager
def recomputed_once() -> Iterator[None]:
    """Within, a checkpointed part is recomputed at most once; each saved value may be read once."""
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
    """Replaces the module ``uuid`` in ``torch.utils.checkpoint`` of torch 2.6 to 2.9.

    There a part is recomputed once for each result of ``uuid4``, which is called whenever a saved
    value is read outside PyTorch's own backward pass. Within a pass of gradtrace, on its thread,
    the result is always the same.
    """

    def uuid4(self) -> uuid.UUID:
        return _PASS.recomputation or uuid.uuid4()


@contextlib.contextmanager
def _recomputed_once_before_2_10() -> Iterator[None]:
    vars(checkpoint)["uuid"] = _Uuid()
    outer = _PASS.recomputation, _PASS.number
    _PASS.recomputation, _PASS.number = uuid.uuid4(), next(_NUMBERS)
    try:
        yield
    finally:
        _PASS.recomputation, _PASS.number = outer
