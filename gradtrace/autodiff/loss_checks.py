"""Checks that a loss can be traced, and isolates a pass from the caller's PyTorch modes.

A pass runs PyTorch's backward formulas and many small operations of gradtrace. Modes of the caller
(inference mode, autocast, forward-mode AD, dispatch modes) would change their results, so they are
off during a pass.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _disable_current_modes

from gradtrace.autodiff import nodes
from gradtrace.autodiff.names import NameTable
from gradtrace.autodiff.pass_scope import own_work, paused
from gradtrace.autodiff.traversal import pending
from gradtrace.errors import NoGraph, TooLarge, Unsupported
from gradtrace.pytorch import memory_limits
from gradtrace.pytorch.dtensor import is_dtensor
from gradtrace.pytorch.fsdp import STATES, all_gathered, unwatched
from gradtrace.pytorch.plain_tensors import is_wrapper, refuse_wrapper

LOSS_DTYPES = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})
"""Dtypes that a loss may have."""


@contextmanager
def isolated() -> Iterator[None]:
    """Within, no modes of the caller are active and no graph is built; also usable as a decorator.

    A watch that is open does not record what is computed within (``own_work``).

    Out-of-memory errors are raised as ``TooLarge``, with advice.

    >>> with torch.inference_mode(), isolated():
    ...     torch.ones(1).is_inference()
    False
    """
    with ExitStack() as stack:
        stack.enter_context(paused())
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        if torch._C._len_torch_dispatch_stack():
            stack.enter_context(_disable_current_modes())
        if forward_ad._current_level >= 0:
            stack.enter_context(forward_ad._set_fwd_grad_enabled(False))
        stack.enter_context(own_work())
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not memory_limits.ran_out(error):
                raise
            raise TooLarge(
                f"memory ran out{memory_limits.shortfall(error)}; trace fewer samples at a time, "
                "sampled elements: influence(sample=10_000), or whole tensors: "
                "granularity='operator'"
            ) from error


def admit(loss: object, name_table: NameTable, elements: bool = True) -> None:
    """Raise if a loss cannot be traced, before anything is computed.

    Without ``elements`` only gradients are needed, and losses and leaves of wrapper subclasses are
    accepted.
    """
    if isinstance(loss, Tensor):
        _check_not_in_transform(loss)
    nodes.root_of(loss)
    assert isinstance(loss, Tensor)
    if loss.is_nested:
        raise Unsupported(
            "the loss is a nested tensor; make one number of it, by to_padded_tensor(0.0).sum() or "
            "by the sum of what unbind() gives"
        )
    if is_wrapper(loss):
        if elements:
            refuse_wrapper(loss, "the loss")
        return
    if loss.layout is not torch.strided:
        raise Unsupported(f"the loss has layout {loss.layout}; trace loss.to_dense().sum()")
    if loss.is_meta:
        raise Unsupported(
            "the loss is on the meta device, where tensors have shapes and no numbers, so there is "
            "no gradient to follow; materialise the model (model.to_empty(device='cpu') and load "
            "its weights), and run the forward pass again"
        )
    nodes.refuse_complex(loss)
    if loss.dtype not in LOSS_DTYPES:
        raise Unsupported(
            f"the loss is of {loss.dtype}, which PyTorch cannot compute gradients in; convert it "
            "(loss.float()) where it is made"
        )
    _check_gathered(loss, name_table)
    wrapped = {
        key: names[0]
        for key, (leaf, names) in name_table.leaves.items()
        if is_wrapper(leaf) and not is_dtensor(leaf)
    }
    for node in pending(nodes.root_of(loss))[0] if wrapped and elements else ():
        if type(node) is nodes.ACCUMULATE and id(node.variable) in wrapped:
            refuse_wrapper(node.variable, f"leaf {wrapped[id(node.variable)]}")


def _check_gathered(loss: Tensor, name_table: NameTable) -> None:
    """Refuse parameters of a sharded model that is not watched, whose memory may be freed."""
    if STATES not in sys.modules:
        return
    watched = name_table.sharded
    known = () if watched is None else [id(each.gathered) for each in watched.parameters()]
    freed = all_gathered().difference(known)
    for node in pending(nodes.root_of(loss))[0] if freed else ():
        if type(node) is nodes.ACCUMULATE and id(node.variable) in freed:
            raise unwatched(node.variable)


def _check_not_in_transform(loss: Tensor) -> None:
    """Refuse losses inside a transform of ``torch.func``, whose tensors have no autograd graph."""
    functorch = torch._C._functorch
    if functorch.is_functorch_wrapped_tensor(loss) or functorch.maybe_current_level() is not None:
        raise NoGraph(
            "gradtrace was called inside a transform of torch.func (grad, vmap, jvp, ...), where a "
            "loss is a stand-in without a graph of its own; return the loss from the transformed "
            "function, and trace it outside"
        )
