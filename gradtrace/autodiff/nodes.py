"""Reads PyTorch's autograd nodes: lists, describes and calls them.

An autograd node ``u`` is a function ``h_u(g_u) -> (g_v1, ..., g_vn)``, linear in the cotangent.
Only this module, ``hooks`` and ``pass_scope`` use autograd internals; all other code goes through
them.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Sequence
from math import prod
from typing import Any, NamedTuple, NoReturn, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from gradtrace.errors import (
    FreedGraph,
    GradtraceError,
    NoGraph,
    TooLarge,
    Unsupported,
    reason_of,
)
from gradtrace.pytorch import internals, memory_limits
from gradtrace.pytorch.side_effects import function_code
from gradtrace.types import Shape

Node: TypeAlias = Any  # torch.autograd.graph.Node; its subclasses are generated, and untyped
Grads: TypeAlias = Sequence[Tensor | None]
Edges: TypeAlias = tuple[tuple[Node | None, int], ...]


internals.check()  # before any of them is used


def _accumulate_type() -> Any:  # a type, but then mypy would narrow nodes to object
    with torch.inference_mode(False), torch.enable_grad():  # the importer may have disabled grad
        leaf = torch.ones(1, requires_grad=True, dtype=torch.float32, device="cpu")
        node: Node = leaf.expand(1).grad_fn
    return type(node.next_functions[0][0])


ACCUMULATE = _accumulate_type()
"""``AccumulateGrad``, the type of the nodes of leaves."""


def root_of(loss: object) -> Node:
    """The node that made ``loss``, or an error that says why there is none."""
    if not isinstance(loss, Tensor):
        raise NoGraph(
            f"expected the loss tensor, got {type(loss).__name__}; pass the tensor that you would "
            "call .backward() on (for a model output object, its .loss)"
        )
    if loss.grad_fn is None:
        why = "it is a leaf itself" if loss.requires_grad else "it does not require grad"
        raise NoGraph(
            f"this tensor of shape {tuple(loss.shape)} has no grad_fn: {why}. Compute the loss "
            "from parameters that require grad, outside torch.no_grad() and "
            "torch.inference_mode(), and do not detach it"
        )
    return loss.grad_fn


def refuse_complex(loss: Tensor) -> None:
    """Raise an error if the loss is complex."""
    if loss.is_complex():
        raise Unsupported(
            "the loss is complex, so it has no gradient to follow; take its real part or magnitude"
        )


def slot_of(loss: Tensor) -> int:
    """Which output of its node ``loss`` is."""
    return int(loss.output_nr)


def name_of(node: Node) -> str:
    """``AddmmBackward0``, ``torch::autograd::AccumulateGrad`` and the like, without namespaces."""
    return str(node.name()).rsplit("::", 1)[-1]


def sequence_of(node: Node) -> int | None:
    """The sequence number of a node: creation order on its thread. None for leaves."""
    return None if type(node) is ACCUMULATE else int(node._sequence_nr())


def next_sequence() -> int:
    """The sequence number of the next node that this thread makes."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


def maker_of(tensor: Tensor) -> Node | None:
    """The node that made a tensor; None if there is none."""
    return tensor.grad_fn


def leaves_below(outputs: Iterable[Any]) -> list[Tensor]:
    """The leaves that tensors (or gradient edges) are made of, themselves included."""
    found: dict[int, Tensor] = {}
    waiting: list[Node | None] = []
    for output in outputs:
        if isinstance(output, Tensor) and output.is_leaf:
            found[id(output)] = output
        waiting.append(output.grad_fn if isinstance(output, Tensor) else output.node)
    seen: set[Node | None] = {None}
    while waiting:
        node = waiting.pop()
        if node in seen or node is None:
            continue
        seen.add(node)
        if type(node) is ACCUMULATE:
            found[id(node.variable)] = node.variable
        waiting += [child for child, _ in edges_of(node)]
    return list(found.values())


def saved_at(node: Node, index: Sequence[int], shape: Shape) -> list[str]:
    """The tensors that an operator saved, at one element of its argument: ``result = 0``. Those of
    another shape are left out.
    """
    found = []
    for name in dir(node):
        if name.startswith("_saved_"):
            saved = getattr(node, name)
            if isinstance(saved, Tensor) and tuple(saved.shape) == tuple(shape):
                kind = str(saved.dtype).removeprefix("torch.")
                found.append(f"{name[7:]} = {float(saved[tuple(index)]):.6g} ({kind})")
    return found


def signed(value: Any) -> Any:
    """A saved integer; PyTorch returns negative ones as unsigned 64-bit numbers."""
    return value - (1 << 64) if type(value) is int and value >= 1 << 63 else value


def annotate(tensor: Tensor, key: object, value: str) -> None:
    """Add (key, value) to the metadata of the node that made a tensor, if there is one."""
    node = maker_of(tensor)
    if node is not None:
        node.metadata.setdefault(METADATA_KEY, []).append((key, value))


def annotations_of(node: Node) -> Sequence[tuple[object, str]]:
    """The pairs (key, value) that ``annotate`` added to a node."""
    return node.metadata.get(METADATA_KEY, ())  # type: ignore[no-any-return]


METADATA_KEY = "gradtrace"
"""The key of the annotations in a node's metadata."""


def edges_of(node: Node) -> Edges:
    """For each argument of the operator, the node that made it and which of its outputs it is."""
    return node.next_functions  # type: ignore[no-any-return]


VIEWS = frozenset({"TBackward0", "TransposeBackward0", "PermuteBackward0", "ViewBackward0"})
"""Views that are often applied to a parameter before its use."""


def reaches_leaf(node: Node | None) -> bool:
    """Whether the cotangent of this node is the gradient of a leaf (or a summand of it), directly
    or through one view.
    """
    if node is None or type(node) is ACCUMULATE:
        return True
    if type(node).__name__ not in VIEWS:
        return False
    return type(node.next_functions[0][0]) is ACCUMULATE


def shapes_of(node: Node) -> tuple[Shape, ...]:
    """The shape of each output of the operator, which is the shape of each cotangent it takes."""
    try:
        return tuple(tuple(meta.shape) for meta in node._input_metadata)
    except RuntimeError as error:  # nested tensors have none
        raise explain(error, node, "") from error


def bytes_of(node: Node) -> int:
    """The size of the operator's outputs in bytes; 0 for nested tensors, whose size is unknown."""
    try:
        return sum(prod(meta.shape) * meta.dtype.itemsize for meta in node._input_metadata)
    except RuntimeError:
        return 0


def outputs_of(node: Node) -> int:
    """The number of outputs of the operator."""
    return len(node._input_metadata)


def wanted(node: Node, slot: int) -> Any:
    """An object with the shape, dtype and device that the cotangent of an output must have."""
    return node.variable if type(node) is ACCUMULATE else node._input_metadata[slot]


def replaced(node: Node) -> str:
    """What of a leaf is not as it was when operators used it, since its ``.data`` was set to
    another tensor; empty if all is. The node knows what the leaf was, and values saved of a leaf
    are read from what it is now.
    """
    leaf = node.variable
    if leaf.is_nested:
        return ""  # has no shape to compare
    then = node._input_metadata[0]
    if tuple(then.shape) != leaf.shape:
        return f"had shape {tuple(then.shape)} in the forward pass, and has {tuple(leaf.shape)} now"
    if then.dtype is not leaf.dtype:
        return f"was of {then.dtype} in the forward pass, and is of {leaf.dtype} now"
    if then.device != leaf.device:
        return f"was on {then.device} in the forward pass, and is on {leaf.device} now"
    return ""


class Outputs:
    """``wanted`` with a cache, for one pass.

    Reading ``_input_metadata`` builds a list of all outputs, so for a node with many outputs
    (``unbind`` of a long sequence) it is read once, not for every edge.
    """

    def __init__(self) -> None:
        self.known: dict[Node, Any] = {}

    def wanted(self, node: Node, slot: int) -> Any:
        """An object with the shape, dtype and device that the cotangent of an output must have."""
        if type(node) is ACCUMULATE:
            return node.variable
        known = self.known.get(node)
        if known is None:
            known = node._input_metadata
            if len(known) > 1:
                self.known[node] = known
        return known[slot]


_NARROW = {
    torch.float64: torch.empty((), dtype=torch.float16, device="cpu"),
    torch.int64: torch.empty((), dtype=torch.int8, device="cpu"),
}


def is_number(x: Tensor) -> bool:
    """Whether PyTorch made this tensor from a Python number, such as the 2 in ``y * 2``.

    Such a tensor is on the CPU, wherever y is, and does not take part in type promotion, by which
    it is recognised.
    """
    narrow = _NARROW.get(x.dtype) if not x.dim() else None
    return narrow is not None and torch.result_type(narrow, x) is narrow.dtype


LAYOUTS = {
    "torch.jagged": "pad before (torch.nested.to_padded_tensor), or work on the parts one by one",
    "torch._mkldnn": "leave to_mkldnn() out",
}
"""Advice for error messages, by layout of a gradient that is neither dense nor sparse."""


def refuse_layout(grad: Tensor) -> NoReturn:
    """Raise ``Unsupported`` for a gradient that is not dense."""
    name = str(grad.layout)
    sparse = " (for nn.Embedding: sparse=False)" if name.startswith("torch.sparse") else ""
    raise Unsupported(
        f"a gradient of layout {name} cannot be followed element by element; "
        f"{LAYOUTS.get(name, f'make it dense{sparse}')}"
    )


def conform(grad: Tensor, meta: Any) -> Tensor:
    """Convert a formula's result to the shape, dtype and device in ``meta``.

    PyTorch's engine does this after each node: it sums over broadcast dimensions, takes the real
    part for a real value, and converts dtype and device.
    """
    if grad.layout is not torch.strided:
        refuse_layout(grad)
    shape = tuple(meta.shape)
    if grad.shape != shape:
        same = grad.numel() == prod(shape)  # only dimensions of size 1 to sum over
        extra = grad.dim() - len(shape)
        if same and grad.is_contiguous():
            grad = grad.view(shape)
        elif shape and extra > 0 and grad.shape[extra:] == shape:
            grad = grad.sum(tuple(range(extra)))  # as sum_to_size, with less overhead
        elif extra >= 0 and all(n in (1, m) for n, m in zip(shape, grad.shape[extra:])):
            grad = grad.sum_to_size(shape)
        else:
            raise GradtraceError(
                f"a backward formula gave a gradient of shape {tuple(grad.shape)} for a value of "
                f"shape {shape}; look at the torch.autograd.Function or hook that returns it"
            )
    dtype = meta.dtype
    if grad.dtype is not dtype:
        if grad.is_complex() and not dtype.is_complex:
            grad = torch.real(grad)
        grad = grad.to(dtype)
    if grad.device != meta.device:
        grad = grad.to(meta.device)
    return grad


MULTI_OUTPUT = frozenset({"NativeLayerNormBackward0", "NativeGroupNormBackward0", "SplitBackward0"})
"""Operators in ``EXACT`` that have several outputs."""

_EXACT = (
    "Alias Bmm Clone Convolution Cos Exp Expand Gelu Log LogSoftmax Mm NativeGroupNorm "
    "NativeLayerNorm Neg Permute Pow Relu ReshapeAlias Rsqrt SafeSoftmax Select Sigmoid Silu Sin "
    "Slice Softmax Split Sqrt T Tanh ToCopy Transpose UnsafeView Unsqueeze View"
)

EXACT: dict[str, tuple[int, ...]] = {
    **{f"{name}Backward0": () for name in _EXACT.split()},
    "AddmmBackward0": (0,),
    "MulBackward1": (),
}
"""Nodes whose results already have the shape and dtype of their arguments, except at these
argument positions, where they may have to be summed over broadcast dimensions. Reading the metadata
of a node costs as much as a small formula. For nodes not listed, every result is conformed."""


class Facts(NamedTuple):
    """What traversal needs to know about a type of node."""

    python: bool  # a torch.autograd.Function
    multi_output: bool  # may have several outputs: read from its metadata how many
    conform_at: tuple[int, ...] | None  # argument positions to conform; None: all


FACTS: dict[type, Facts] = {}
_PYTHON = Facts(python=True, multi_output=True, conform_at=None)


def learn(kind: type) -> Facts:
    """Compute ``Facts`` of a type of node, and store them in ``FACTS``; not those of a
    ``torch.autograd.Function``, which may be made anew in each forward pass, and hold tensors.
    """
    if issubclass(kind, torch.autograd.function.BackwardCFunction):
        return _PYTHON
    name = kind.__name__
    conform_at = EXACT.get(name)
    FACTS[kind] = facts = Facts(False, conform_at is None or name in MULTI_OUTPUT, conform_at)
    return facts


REFUSED = {
    "CheckpointFunctionBackward": "reentrant checkpointing runs a second backward pass inside the "
    "first and writes on .grad; use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)",
    "CompiledFunctionBackward": "a compiled model hides its operators; run the forward pass inside "
    "gradtrace.watch(model), which runs compiled modules eagerly",
}

IDENTITIES = frozenset({"_DDPSinkBackward"})
"""Functions of PyTorch that pass gradients on. ``DistributedDataParallel(static_graph=True)`` asks
the engine in one of them to reduce gradients at the end, which is for the user's own pass."""


def is_python(node: Node) -> bool:
    """Whether the node is a ``torch.autograd.Function``."""
    return isinstance(node, torch.autograd.function.BackwardCFunction)


def call_ready(node: Node, grads: Grads) -> Grads:
    """``h_u(g_u)``: the formula's result, one gradient for each edge of ``edges_of(node)``. The
    cotangents are as the engine passes them (see ``engine_cotangents``).
    """
    if is_python(node):
        return _apply(node, grads)
    outs = node(*grads)
    return outs if type(outs) is tuple else (outs,)


def _apply(node: Node, grads: Grads) -> Grads:
    """Call the ``backward`` of a ``torch.autograd.Function``.

    It returns one gradient for each argument of ``forward``, tensor or not, while the edges list
    tensors only. The arguments that need a gradient are the same in both, in the same order.
    """
    if name_of(node) in REFUSED:
        raise _Refused(REFUSED[name_of(node)])
    if name_of(node) in IDENTITIES:
        outs: Any = (*[None] * (len(node.needs_input_grad) - len(grads)), *grads)
    else:
        below: Iterable[Node] = (child for child, _ in edges_of(node))
        leaves = [child.variable for child in below if type(child) is ACCUMULATE]
        with function_code(node, grads, leaves):
            outs = type(node).apply(node, *grads)  # not node.apply: see engine_cotangents
    outs = outs if isinstance(outs, tuple) else (outs,)
    refuse_no_tensors(outs, "its backward")
    needs = node.needs_input_grad
    if len(outs) < len(needs) or any(out is not None for out in outs[len(needs) :]):
        raise _Refused(f"its backward must return {len(needs)} gradients, and returned {len(outs)}")
    wanted = iter([out for out, need in zip(outs, needs) if need])
    return tuple(None if child is None else next(wanted, None) for child, _ in edges_of(node))


def refuse_no_tensors(found: Iterable[object], who: str) -> None:
    """Raise if code of the user's has returned anything but tensors and None."""
    for each in found:
        if each is not None and not isinstance(each, Tensor):
            raise _Refused(
                f"{who} returned a {type(each).__name__}, where PyTorch takes tensors and None; "
                "return a tensor, or a tuple of them for several arguments"
            )


class _Refused(Exception):
    """A node that cannot be called; ``explain`` adds where it is."""


class _Stop(Exception):
    """Raised to end a pass of PyTorch's engine."""


_APPLY_LOCK = threading.RLock()


def engine_cotangents(node: Node, grads: Grads) -> Grads:
    """The cotangents that PyTorch's engine passes to a ``torch.autograd.Function``.

    They are after the hooks, and missing ones are zeros, unless the function asked for None
    (``set_materialize_grads(False)``), which only the engine knows. So the engine is run with the
    node's ``apply`` replaced by a function that stores its arguments and stops the pass.
    """
    given = [(GradientEdge(node, i), grad) for i, grad in enumerate(grads) if grad is not None]
    below = next(GradientEdge(child, slot) for child, slot in edges_of(node) if child is not None)
    received: list[Tensor | None] = []

    def stop(*args: Tensor | None) -> None:
        received.extend(args)
        raise _Stop

    with _APPLY_LOCK:
        node.apply = stop
        try:
            torch.autograd.grad(
                [edge for edge, _ in given], below, [grad for _, grad in given], retain_graph=True
            )
        except _Stop:
            pass
        finally:
            del node.apply
    return received


def explain(error: Exception, node: Node, where: str) -> GradtraceError:
    """Convert an exception raised by a node to one that names the operator and gives advice."""
    at = f"{name_of(node)}{where}"
    text = _ASKS_FOR_A_REPORT.sub("", reason_of(error))
    if memory_limits.ran_out(error):
        return TooLarge(
            f"{at} ran out of memory{memory_limits.shortfall(error)}; trace fewer samples at a time"
        )
    if isinstance(error, _Refused):
        return Unsupported(f"{at} cannot be followed: {text}")
    for words, kind, message in CAUSES:
        if any(word in text.lower() for word in words):
            return kind(message.format(at=at, text=text))
    for pattern, message in HOOKS:
        if found := re.match(pattern, text):
            return Unsupported(f"{at} cannot be followed: {message.format(*found.groups(''))}")
    return GradtraceError(f"{at} failed: {text}{_where_to_look(node)}")


def _where_to_look(node: Node) -> str:
    if name_of(node) == OF_MODULE_HOOKS:
        hooks = "register_full_backward_hook, register_full_backward_pre_hook"
        return f"; look at the hooks of that module ({hooks})"
    return "; look at the backward of that torch.autograd.Function" if is_python(node) else ""


OF_MODULE_HOOKS = "BackwardHookFunctionBackward"
"""The function that runs the backward hooks of a module."""

HOOKS = (
    (
        r"expected Variable, but hook returned '(.*)'",
        "a hook on it (register_hook) returned a {}, where PyTorch takes a tensor or None",
    ),
    (
        r"hook '(.*)' has changed the size of value",
        "the hook {} on it returned a gradient of another shape than it was given",
    ),
    (
        r"hook '(.*)' has changed the type of value \(was (.*) got (.*)\)",
        "the hook {} on it was given a gradient of {} and returned one of {}",
    ),
    (
        r"Output of saved tensor unpack_hook expected to be a Tensor but got result of type (.*)",
        "the function that unpacks what it has saved (saved_tensors_hooks) returned a {}; it must "
        "return the tensor that was packed",
    ),
    (
        r"Backward (pre )?hook returned an invalid number of grad_(in|out)put, got (\d+), but "
        r"expected (\d+)",
        "a full backward {0}hook of its module returned {2} gradients of {1}puts; there are {3}",
    ),
)
"""What PyTorch says of hooks that return something else than it takes, and the words instead."""


_ASKS_FOR_A_REPORT = re.compile(r"\s*[Pp]lease (file an issue|report a bug)[^.]*\.?")
"""What PyTorch adds to errors of its own making; the reader of ours has nothing to report there."""


CAUSES: tuple[tuple[tuple[str, ...], type[GradtraceError], str], ...] = (
    (
        ("final callbacks can only be installed",),
        Unsupported,
        "{at} cannot be followed: its backward queues work for the end of PyTorch's own backward "
        "pass, which a trace does not run; trace the model without the wrapper that adds it",
    ),
    (
        ("second time", "already been freed"),
        FreedGraph,
        "the graph is freed at {at}: a backward pass released the values it needs. Trace before "
        "loss.backward(), or call loss.backward(retain_graph=True)",
    ),
    (
        ("modified by an inplace operation",),
        FreedGraph,
        "a value that {at} needs was overwritten in place after it was used, by an optimizer step "
        "or by an operation such as x += 1. Trace before the step; write such operations out of "
        "place, x = x + 1",
    ),
    (
        ("nested", "wrong index for variant"),  # the latter if asked for its shape
        Unsupported,
        "{at} works on nested tensors, whose elements have no common shape and cannot be followed; "
        "pad before (torch.nested.to_padded_tensor, nn.utils.rnn.pad_sequence), or work on the "
        "parts one by one",
    ),
    (
        ("sparse",),
        Unsupported,
        "{at} works on sparse tensors, which cannot be followed element by element; make them "
        "dense before ({text})",
    ),
)
"""What is in the text of an exception that a node raised, and the error to raise instead."""
