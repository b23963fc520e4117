"""Gradient hooks: found without a list of them, and run as PyTorch's engine runs them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from gradtrace.autodiff.nodes import Grads, Node, explain, handed, is_python, name_of
from gradtrace.errors import GradtraceError, Unsupported

_OWN_HANDLES = [0]


def exclude_handles(count: int) -> None:
    """So many handles were made by us, and are no hooks on gradients."""
    _OWN_HANDLES[0] += count


def _registered() -> int:
    """How many hooks there have been so far that are not ours."""
    return int(RemovableHandle.next_id) - _OWN_HANDLES[0]


class HookWatch:
    """Knows which graphs are free of gradient hooks, without asking their nodes.

    PyTorch cannot list the hooks of a node, but every hook takes a number from one counter. While
    that counter stands still, no hook stands on a node made since ``reset``. The other nodes are
    asked one by one, which is slow but right (``before``, ``after``).
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Nodes made from now on are free of hooks until the counter moves."""
        self._sequence = int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]
        self._handles = _registered()
        self._thread = threading.get_ident()

    def clear_since(self) -> int:
        """The sequence number from which on nodes are free of hooks."""
        still = _registered() == self._handles
        return self._sequence if still and threading.get_ident() == self._thread else NEVER

    def refresh(self) -> None:
        """``reset``, if hooks may have been registered; if not, older graphs are free too."""
        if self.clear_since() == NEVER:
            self.reset()


NEVER = (1 << 64) - 1


class SilencedHooks:
    """A pass that runs no hooks, and whether there may have been any."""

    hooked = False


_SILENT = threading.local()


@contextmanager
def silenced() -> Iterator[SilencedHooks]:
    """Within, hooks do not run: the gradient is that before them.

    For passes in addition to one of the user's own, in which hooks run too: what they do besides
    (count, average, log) must not be done twice, and nobody can know whether they do.
    """
    outer = _current_silence()
    _SILENT.current = found = SilencedHooks()
    try:
        yield found
    finally:
        _SILENT.current = outer


def _current_silence() -> SilencedHooks | None:
    return getattr(_SILENT, "current", None)


def has_active_hooks(leaf: Tensor) -> bool:
    """Whether there are hooks on a leaf that are to be run."""
    if not leaf._backward_hooks:
        return False
    silence = _current_silence()
    if silence is not None:
        silence.hooked = True
    return silence is None


def run_leaf_hooks(leaf: Tensor, grads: Grads) -> list[Tensor | None]:
    """The gradient of a leaf after the hooks that stand on it."""
    node = get_gradient_edge(leaf).node
    try:
        return _run_tensor_hooks(node, grads)
    except GradtraceError:
        raise
    except Exception as error:
        raise explain(error, node, f" (a hook on a leaf of shape {tuple(leaf.shape)})") from error


def _run_tensor_hooks(node: Node, grads: Grads) -> list[Tensor | None]:
    """The cotangents of a node after the hooks that stand on its output tensors.

    The engine runs these, and only these, when it is asked for the gradient of a node's output by
    itself.
    """
    given = [i for i, grad in enumerate(grads) if grad is not None]
    edges = [GradientEdge(node, i) for i in given]
    found = torch.autograd.grad(edges, edges, [grads[i] for i in given], retain_graph=True)
    after = list(grads)
    for i, grad in zip(given, found):
        after[i] = grad
    return after


def _hooks(register: Callable[[Any], RemovableHandle]) -> list[Callable[..., Any]]:
    """The hooks already there, read from the table that a hook of ours is put in and out of."""
    handle = register(lambda *_: None)
    exclude_handles(1)
    try:
        table = handle.hooks_dict_ref()
        return [] if table is None else [h for k, h in table.items() if k != handle.id]
    finally:
        handle.remove()


def before(node: Node, grads: Grads) -> Grads:
    """The cotangents of a node after the hooks that stand on its outputs and before the node."""
    silence = _current_silence()
    if silence is not None:
        silence.hooked = True
        return _unhooked(node, grads)
    if is_python(node):
        return handed(node, grads)
    found = tuple(_run_tensor_hooks(node, grads))
    for hook in _hooks(node.register_prehook):
        changed = hook(found)
        if changed is not None:
            found = changed if isinstance(changed, tuple) else (changed,)
    return found


def after(node: Node, outs: Grads, grads: Grads) -> Grads:
    """What a node gives after the hooks that stand behind it."""
    if _current_silence() is not None:
        return outs
    found = tuple(outs)
    for hook in _hooks(node.register_hook):
        changed = hook(found, tuple(grads))
        if changed is not None:
            found = changed if isinstance(changed, tuple) else (changed,)
    return found


IDENTITIES = frozenset({"BackwardHookFunctionBackward"})
"""Functions that hand on what they are given, whether a gradient is missing or zero."""


def _unhooked(node: Node, grads: Grads) -> Grads:
    """The cotangents of a node on which hooks may stand, without these."""
    missing = any(grad is None for grad in grads)
    if missing and is_python(node) and name_of(node) not in IDENTITIES:
        raise Unsupported(
            f"{name_of(node)} has outputs that the loss does not use, and hooks may stand on it: "
            "what it is to be given for them only PyTorch's engine knows, which would run the "
            "hooks. Register hooks before the forward pass, or use all outputs"
        )
    return grads
