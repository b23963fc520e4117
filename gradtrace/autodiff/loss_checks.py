"""Checks that a loss can be traced, and that its pass was watched; isolates what runs from modes.

A pass runs PyTorch's backward formulas and many small operations of gradtrace. Modes of the caller
(inference mode, autocast, forward-mode AD, modes of dispatch and of functions) would change their
results, so they are off during a pass.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from inspect import getattr_static

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _disable_current_modes

from gradtrace.autodiff import nodes
from gradtrace.autodiff.names import NO_MODULE, OUTSIDE, ModuleCall, NameTable
from gradtrace.autodiff.nodes import ACCUMULATE, Node, edges_of, root_of, sequence_of
from gradtrace.autodiff.pass_scope import own_work
from gradtrace.autodiff.traversal import pending
from gradtrace.errors import NoGraph, TooLarge, Unsupported, listed
from gradtrace.pytorch import memory_limits
from gradtrace.pytorch.dtensor import is_dtensor
from gradtrace.pytorch.fsdp import STATES, all_gathered, freed_leaf
from gradtrace.pytorch.function_modes import paused
from gradtrace.pytorch.plain_tensors import is_wrapper, refuse_wrapper
from gradtrace.pytorch.wrapped_modules import named_modules

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
    with grad_mode_restored(), ExitStack() as stack:
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
                "or sampled elements: influence(sample=10_000)"
            ) from error


@contextmanager
def grad_mode_restored() -> Iterator[None]:
    """Afterwards gradients are on or off as before, also where Ctrl-C has struck inside of
    ``torch.no_grad().__enter__``, which leaves them off.
    """
    before = torch.is_grad_enabled()
    try:
        yield
    finally:
        if torch.is_grad_enabled() != before:
            torch.set_grad_enabled(before)


def admit(loss: object, name_table: NameTable, elements: bool = True) -> None:
    """Raise if a loss cannot be traced, before anything is computed.

    Without ``elements`` only gradients are needed, and losses and leaves of wrapper subclasses are
    accepted.
    """
    if isinstance(loss, Tensor):
        _check_not_in_transform(loss)
    root_of(loss)
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
    _check_unchanged(loss)
    _check_gathered(loss, name_table)
    wrapped = {
        key: names[0]
        for key, (leaf, names) in name_table.leaves.items()
        if is_wrapper(leaf) and not is_dtensor(leaf)
    }
    for node in pending(root_of(loss))[0] if wrapped and elements else ():
        if type(node) is ACCUMULATE and id(node.variable) in wrapped:
            refuse_wrapper(node.variable, f"leaf {wrapped[id(node.variable)]}")


def _check_unchanged(loss: Tensor) -> None:
    """Refuse a loss that was given other data than its operator made."""
    made = nodes.wanted(root_of(loss), nodes.slot_of(loss))
    if (
        tuple(made.shape) != loss.shape
        or made.dtype is not loss.dtype
        or made.device != loss.device
    ):
        raise Unsupported(
            f"the loss is of shape {tuple(loss.shape)} and {loss.dtype} on {loss.device}, and its "
            f"operator made one of shape {tuple(made.shape)} and {made.dtype} on {made.device}: "
            "its .data was set to another tensor, or it was reshaped in place under no_grad; trace "
            "the loss as the forward pass returned it"
        )


def _check_gathered(loss: Tensor, name_table: NameTable) -> None:
    """Refuse parameters of a sharded model that is not watched, whose memory may be freed."""
    if STATES not in sys.modules:
        return
    watched = name_table.sharded
    known = () if watched is None else [id(each.gathered) for each in watched.parameters()]
    freed = all_gathered().difference(known)
    for node in pending(root_of(loss))[0] if freed else ():
        if type(node) is ACCUMULATE and id(node.variable) in freed:
            raise freed_leaf(node.variable)


def _check_not_in_transform(loss: Tensor) -> None:
    """Refuse losses inside a transform of ``torch.func``, whose tensors have no autograd graph."""
    functorch = torch._C._functorch
    if functorch.is_functorch_wrapped_tensor(loss) or functorch.maybe_current_level() is not None:
        raise NoGraph(
            "gradtrace was called inside a transform of torch.func (grad, vmap, jvp, ...), where a "
            "loss is a stand-in without a graph of its own; return the loss from the transformed "
            "function, and trace it outside"
        )


# What a watch did not see -------------------------------------------------------------------------

ADVICE = "run the forward pass inside: with gradtrace.watch(model) as watch: loss = ..."


def unwatched(
    loss: Tensor,
    table: NameTable,
    names: Callable[[], Mapping[int, str]],
    called: Container[str],
) -> str:
    """What of the loss's forward pass ran before the watch was opened or after it was closed.

    Args:
        loss: A loss with a graph.
        table: The module calls of the watch.
        names: Gives the name of each parameter of the model, by id; called if it is needed.
        called: The names of the modules that were called inside the watch.

    Returns:
        The text of a warning; empty if nothing is missing, or modules ran on other threads, whose
        nodes have numbers of their own.
    """
    root = root_of(loss)
    if table.away or type(root) is ACCUMULATE:
        return ""
    late = _place(root, table) is OUTSIDE
    seen, met = False, list[int]()
    for leaf in _not_in_modules(root, table):
        if leaf is not None:
            met.append(id(leaf.variable))
        seen = seen or leaf is None
        if seen and not late:
            return ""
    known = names()
    leaves = dict.fromkeys(known[each] for each in met if each in known)  # in the order of meeting
    if seen:
        leaves = {name: None for name in leaves if name.rpartition(".")[0] not in called}
    if not leaves:
        return ""
    if not table.starts:
        return f"this watch was never open, so the operators of the loss have no modules; {ADVICE}"
    if not seen:
        return (
            "the loss was computed by a forward pass outside the watch (before it was opened, or "
            f"after it was closed), so its operators have no modules; {ADVICE}"
        )
    named = ", ".join(list(leaves)[:3]) + (", ..." if len(leaves) > 3 else "")
    return (
        f"part of the forward pass ran after the watch was closed (what uses {named}), so those "
        f"operators have no modules; {ADVICE}"
    )


def _not_in_modules(root: Node, table: NameTable) -> Iterator[Node | None]:
    """The leaves used by nodes that were made outside the watch, from the root on; None for each
    node that was made in a module call, which is not followed.
    """
    stack, met = [root], {root}
    while stack:
        node = stack.pop()
        place = _place(node, table)
        if place is not OUTSIDE and place is not NO_MODULE:
            yield None
            continue
        for child, _ in edges_of(node):
            if type(child) is ACCUMULATE:
                if place is OUTSIDE:
                    yield child
            elif child is not None and child not in met:
                met.add(child)
                stack.append(child)


def _place(node: Node, table: NameTable) -> ModuleCall:
    number = sequence_of(node)
    return NO_MODULE if number is None else table.place_at(number)


def unseen_modules(
    model: nn.Module, leaves: Iterable[str], aliases: Mapping[str, str], called: Container[str]
) -> tuple[str, ...]:
    """A note on the modules whose parameters take part in a loss, though no call of them was seen.

    Args:
        model: The model that was watched.
        leaves: The first names of the leaves of the loss.
        aliases: The first name of a leaf, by its others.
        called: The names of the modules that were called inside the watch.

    Returns:
        The note; none if all were called. Modules that cannot be called (``nn.ParameterList``)
        stand for the ones that they are in, and classes of PyTorch may use the weights of modules
        inside them, as ``nn.MultiheadAttention`` does.
    """
    if not called:
        return ()  # all was outside the watch, which is told elsewhere
    direct = {name for name in leaves if name.rpartition(".")[0] not in called}
    if not direct:
        return ()
    direct -= {aliases[name] for name in aliases if name.rpartition(".")[0] in called}
    modules = dict(named_modules(model))
    found: dict[str, None] = {}
    for name in sorted(direct):
        owner = name.rpartition(".")[0]
        while owner and _cannot_be_called(modules.get(owner)):
            owner = owner.rpartition(".")[0]
        if owner and owner not in called and not _is_in_class_of_torch(owner, modules):
            found[owner] = None
    if not found:
        return ()
    return (
        f"{listed(found)}: parameters are used, but no call of the module could be seen, so these "
        "operators belong to the module that was running",
    )


def _cannot_be_called(module: nn.Module | None) -> bool:
    return module is None or getattr_static(type(module), "forward", None) is nn.Module.forward


def _is_in_class_of_torch(name: str, modules: Mapping[str, nn.Module]) -> bool:
    """Whether the nearest module around it that is no mere container is of PyTorch's classes."""
    above = modules.get(name.rpartition(".")[0])
    while name and isinstance(above, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
        name = name.rpartition(".")[0]
        above = modules.get(name.rpartition(".")[0])
    return bool(name) and type(above).__module__.startswith("torch.")
