"""Saved-tensor hooks of the user's: a pass unpacks in place of the user's own backward pass.

``torch.autograd.graph.saved_tensors_hooks`` are used to move activations away. Their ``unpack`` may
work once only (it takes from a table, or deletes a file) or count its calls. So what a pass of
gradtrace has unpacked is kept, and handed to PyTorch's backward pass when that asks for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from gradtrace.autodiff.pass_scope import pass_runs
from gradtrace.pytorch.global_switches import Change, Switch

Pack: TypeAlias = Callable[[Tensor], Any]
Unpack: TypeAlias = Callable[[Any], Tensor]

_ENTER = saved_tensors_hooks.__enter__


class _Packed:
    """What ``pack`` has returned; and what ``unpack`` made of it in a pass of gradtrace."""

    __slots__ = ("data", "unpacked")

    def __init__(self, data: Any) -> None:
        self.data = data
        self.unpacked: Tensor | None = None


def _wrapped(pack: Pack, unpack: Unpack) -> tuple[Pack, Unpack]:
    def packed(tensor: Tensor) -> _Packed:
        return _Packed(pack(tensor))

    def unpacked(packed: _Packed) -> Tensor:
        found = packed.unpacked
        if found is None:
            found = unpack(packed.data)
        packed.unpacked = found if pass_runs() else None
        return found

    return packed, unpacked


def _enter(hooks: saved_tensors_hooks) -> Any:
    """Push wrapped hooks; those of PyTorch (``save_on_cpu``, checkpoints) may be called again."""
    kind = type(hooks)
    theirs = kind is not saved_tensors_hooks and kind.__module__.startswith("torch.")
    if theirs or torch.compiler.is_compiling():
        return _ENTER(hooks)
    own = hooks.pack_hook, hooks.unpack_hook
    hooks.pack_hook, hooks.unpack_hook = _wrapped(*own)
    try:
        return _ENTER(hooks)
    finally:
        hooks.pack_hook, hooks.unpack_hook = own


def _patched() -> Change:
    try:
        type.__setattr__(saved_tensors_hooks, "__enter__", _enter)
        yield
    finally:
        type.__setattr__(saved_tensors_hooks, "__enter__", _ENTER)


UNPACKED_ONCE = Switch(_patched)
"""What is saved under hooks that are entered meanwhile is unpacked once for gradtrace and for
PyTorch."""
