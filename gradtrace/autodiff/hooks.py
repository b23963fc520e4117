"""Gradient hooks: detects which nodes may have some, and runs them as PyTorch's engine does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from gradtrace.autodiff.nodes import (
    OF_MODULE_HOOKS,
    Grads,
    Node,
    engine_cotangents,
    explain,
    is_python,
    name_of,
    refuse_no_tensors,
)
from gradtrace.errors import GradtraceError, Unsupported, listed

_OWN_HANDLES = [0]
"""How many handles gradtrace took itself; they are not gradient hooks of the user."""


def _registered() -> int:
    """The number of hooks registered so far in this process, without gradtrace's own."""
    return int(RemovableHandle.next_id) - _OWN_HANDLES[0]


class HookWatch:
    """Tells which nodes cannot have gradient hooks, without asking each node.

    PyTorch cannot list the hooks of a node, but every hook takes a number from one global counter.
    While that counter is unchanged, nodes made since ``reset`` have no hooks. Other nodes are
    asked one by one (``before``, ``after``), which is correct but slow.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Nodes made from now on have no hooks, until the counter changes."""
        self._sequence = int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]
        self._handles = _registered()
        self._thread = threading.get_ident()

    def clear_since(self) -> int:
        """Nodes with at least this sequence number have no hooks; ``NEVER`` if that is unknown."""
        still = _registered() == self._handles
        return self._sequence if still and threading.get_ident() == self._thread else NEVER

    def refresh(self) -> None:
        """``reset`` if hooks may have been registered; otherwise older nodes stay known too."""
        if self.clear_since() == NEVER:
            self.reset()


NEVER = (1 << 64) - 1
"""Greater than all sequence numbers."""


class SilencedHooks:
    """The state of ``silenced``: ``hooked`` is True once a hook may have been skipped."""

    hooked = False


class _Silence(threading.local):
    current: SilencedHooks | None = None  # the innermost ``silenced`` of this thread


_SILENCE = _Silence()


@contextmanager
def silenced() -> Iterator[SilencedHooks]:
    """Within, hooks do not run, and gradients are those before the hooks.

    For passes in addition to the user's own backward pass, which runs the hooks: side effects of
    hooks (counting, averaging, logging) must not happen twice, and cannot be detected.
    """
    outer = _SILENCE.current
    _SILENCE.current = found = SilencedHooks()
    try:
        yield found
    finally:
        _SILENCE.current = outer


def _skips_hooks() -> bool:
    """Whether hooks are silenced; notes that one may have been skipped."""
    if _SILENCE.current is None:
        return False
    _SILENCE.current.hooked = True
    return True


def has_active_hooks(leaf: Tensor) -> bool:
    """Whether a leaf has hooks and these are not silenced."""
    return bool(leaf._backward_hooks) and not _skips_hooks()


def run_leaf_hooks(leaf: Tensor, grads: Grads, name: str) -> list[Tensor | None]:
    """The gradient of a leaf after the hooks on it; it is called ``name`` in messages."""
    node = get_gradient_edge(leaf).node
    try:
        return _run_tensor_hooks(node, grads)
    except GradtraceError:
        raise
    except Exception as error:
        known = (leaf._backward_hooks or {}).values()
        own = [getattr(hook, "__qualname__", type(hook).__name__) for hook in known]
        raise explain(error, node, f" (a hook on {name}: {listed(own, 4)})") from error


def _run_tensor_hooks(node: Node, grads: Grads) -> list[Tensor | None]:
    """The cotangents of a node after the hooks on its output tensors.

    PyTorch's engine runs these, and only these, when it computes the gradient of a node's output
    by itself.
    """
    given = [i for i, grad in enumerate(grads) if grad is not None]
    edges = [GradientEdge(node, i) for i in given]
    found = torch.autograd.grad(edges, edges, [grads[i] for i in given], retain_graph=True)
    after = list(grads)
    for i, grad in zip(given, found):
        after[i] = grad
    return after


def _hooks(register: Callable[[Any], RemovableHandle]) -> list[Callable[..., Any]]:
    """The registered hooks, found by registering one more, reading its table, and removing it."""
    handle = register(lambda *_: None)
    _OWN_HANDLES[0] += 1
    try:
        table = handle.hooks_dict_ref()
        return [] if table is None else [h for k, h in table.items() if k != handle.id]
    finally:
        handle.remove()


def before(node: Node, grads: Grads) -> Grads:
    """The cotangents of a node after its tensor hooks and its pre-hooks."""
    if _skips_hooks():
        return _unhooked(node, grads)
    if is_python(node):
        return engine_cotangents(node, grads)
    return _run(_hooks(node.register_prehook), _run_tensor_hooks(node, grads))


def after(node: Node, outs: Grads, grads: Grads) -> Grads:
    """The results of a node after its post-hooks (``Node.register_hook``)."""
    return outs if _skips_hooks() else _run(_hooks(node.register_hook), outs, tuple(grads))


def _run(hooks: Iterable[Callable[..., Any]], found: Grads, *others: Grads) -> Grads:
    """Call hooks in turn, each on what the one before returned (None: on what it was given)."""
    for hook in hooks:
        changed = hook(found := tuple(found), *others)
        if changed is not None:
            found = changed if isinstance(changed, tuple) else (changed,)
            refuse_no_tensors(found, "a hook on it")
    return tuple(found)


IDENTITIES = frozenset({OF_MODULE_HOOKS})
"""Functions that return their cotangents unchanged, so a missing one may stay None."""


def _unhooked(node: Node, grads: Grads) -> Grads:
    """The cotangents of a node that may have hooks, without running these."""
    missing = any(grad is None for grad in grads)
    if missing and is_python(node) and name_of(node) not in IDENTITIES:
        raise Unsupported(
            f"{name_of(node)} has outputs that the loss does not use, and hooks may stand on it: "
            "what it is to be given for them only PyTorch's engine knows, which would run the "
            "hooks. Register hooks before the forward pass, or use all outputs"
        )
    return grads


@contextmanager
def uncounted() -> Iterator[None]:
    """Within, hooks that are registered do not count: they do not change gradients."""
    before = RemovableHandle.next_id
    try:
        yield
    finally:
        _OWN_HANDLES[0] += RemovableHandle.next_id - before
