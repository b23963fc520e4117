"""The only reader of PyTorch's autograd internals.

An autograd node ``u`` is a function ``h_u(g_u) -> (g_v1, ..., g_vn)``, linear in the cotangent.
Here nodes are listed, described and called; everything above this module, ``hooks`` and ``passes``
speaks of nodes only through these.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple, NoReturn, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from gradtrace.errors import FreedGraph, GradtraceError, NoGraph, TooLarge, Unsupported
from gradtrace.pytorch import internals, memory_limits
from gradtrace.pytorch.side_effects import users_code
from gradtrace.types import Shape

Node: TypeAlias = Any  # torch.autograd.graph.Node; its subclasses are generated, and untyped
Grads: TypeAlias = Sequence[Tensor | None]
Edges: TypeAlias = tuple[tuple[Node | None, int], ...]


internals.check()  # before anything is read of them


def _accumulate_type() -> Any:  # a type; were it said, mypy would take nodes for objects
    with torch.inference_mode(False), torch.enable_grad():  # wherever this is imported
        leaf = torch.ones(1, requires_grad=True, dtype=torch.float32, device="cpu")
        node: Node = leaf.expand(1).grad_fn
    return type(node.next_functions[0][0])


ACCUMULATE = _accumulate_type()
"""The type of the nodes that stand for leaves."""


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


def slot_of(loss: Tensor) -> int:
    """Which output of its node ``loss`` is."""
    return int(loss.output_nr)


def name_of(node: Node) -> str:
    """``AddmmBackward0``, ``torch::autograd::AccumulateGrad`` and the like, without namespaces."""
    return str(node.name()).rsplit("::", 1)[-1]


def sequence_of(node: Node) -> int | None:
    """When the node was made, on its thread; leaves have no such number."""
    return None if type(node) is ACCUMULATE else int(node._sequence_nr())


def annotate(tensor: Tensor, key: object, value: str) -> None:
    """Write on the node that made a tensor, if there is one; it goes when the node goes."""
    node: Node | None = tensor.grad_fn
    if node is not None:
        node.metadata.setdefault(METADATA_KEY, []).append((key, value))


def annotations_of(node: Node) -> Sequence[tuple[object, str]]:
    """What was written on a node."""
    return node.metadata.get(METADATA_KEY, ())  # type: ignore[no-any-return]


METADATA_KEY = "gradtrace"


def edges_of(node: Node) -> Edges:
    """For each argument of the operator, the node that made it and which of its outputs it is."""
    return node.next_functions  # type: ignore[no-any-return]


VIEWS = frozenset({"TBackward0", "TransposeBackward0", "PermuteBackward0", "ViewBackward0"})
"""Nodes that often stand between a parameter and its use."""


def ends(node: Node | None) -> bool:
    """Whether what is handed to this node becomes the gradient of a leaf, or a part of it."""
    if node is None or type(node) is ACCUMULATE:
        return True
    if type(node).__name__ not in VIEWS:
        return False
    return type(node.next_functions[0][0]) is ACCUMULATE


def shapes_of(node: Node) -> tuple[Shape, ...]:
    """The shape of each output of the operator, which is the shape of each cotangent it takes."""
    return tuple(tuple(meta.shape) for meta in node._input_metadata)


def bytes_of(node: Node) -> int:
    """How many bytes the outputs of the operator have; 0 of nested tensors, which do not tell."""
    try:
        return sum(prod(meta.shape) * meta.dtype.itemsize for meta in node._input_metadata)
    except RuntimeError:
        return 0


def outputs_of(node: Node) -> int:
    """How many outputs the operator has."""
    return len(node._input_metadata)


def wanted(node: Node, slot: int) -> Any:
    """What the gradient of an output of a node is to be like: it has shape, dtype and device."""
    return node.variable if type(node) is ACCUMULATE else node._input_metadata[slot]


class Outputs:
    """``wanted`` for all edges of a pass. To ask a node for one of its outputs lists all of them,
    so a node that has many (``unbind`` of a long sequence) is asked once, not for every edge.
    """

    def __init__(self) -> None:
        self.known: dict[Node, Any] = {}

    def wanted(self, node: Node, slot: int) -> Any:
        """What the gradient of an output of a node is to be like."""
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
    """Whether PyTorch made a tensor of a number, as of the 2 in ``y * 2``. It lies in the CPU's
    memory, whatever y does, and does not widen the dtype of a result, by which it is told.
    """
    narrow = _NARROW.get(x.dtype) if x.is_cpu and not x.dim() else None
    return narrow is not None and torch.result_type(narrow, x) is narrow.dtype


_SPARSE = "make it dense (for nn.Embedding: sparse=False)"
LAYOUTS = {
    torch.jagged: "pad before (torch.nested.to_padded_tensor), or work on the parts one by one",
    torch._mkldnn: "leave to_mkldnn() out",  # type: ignore[attr-defined]
    torch.sparse_coo: _SPARSE,
    torch.sparse_csr: _SPARSE,
    torch.sparse_csc: _SPARSE,
    torch.sparse_bsr: _SPARSE,
    torch.sparse_bsc: _SPARSE,
}
"""What to do about gradients that are not dense."""


def refuse_layout(grad: Tensor) -> NoReturn:
    """Say that a gradient which is not dense is not followed."""
    raise Unsupported(
        f"a gradient of layout {grad.layout} cannot be followed element by element; "
        f"{LAYOUTS.get(grad.layout, 'make it dense')}"
    )


def _sums_to(wide: Shape, shape: Shape) -> bool:
    """Whether a value of the second shape, broadcast, has the first."""
    extra = len(wide) - len(shape)
    return extra >= 0 and all(n in (1, m) for n, m in zip(shape, wide[extra:]))


def conform(grad: Tensor, meta: Any) -> Tensor:
    """Bring a formula's result to the shape, dtype and device of the value it is the gradient of.

    The engine of PyTorch does this after each node: it sums over broadcast dimensions, takes the
    real part for a real value, and converts.
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
            grad = grad.sum(tuple(range(extra)))  # what sum_to_size does, with less ado
        elif _sums_to(tuple(grad.shape), shape):
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
"""Operators with several outputs, among those below."""

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
"""Nodes whose formula gives results of the very shape and dtype that is wanted, but at these
argument positions, where broadcasting may have to be undone. To ask a node which shapes it wants
costs as much as a small formula does; of nodes not listed here every argument is asked."""


class Facts(NamedTuple):
    """What the walk knows of a type of node."""

    python: bool  # a torch.autograd.Function
    multi_output: bool  # may have several outputs, so it must be asked how many cotangents it takes
    conform_at: tuple[int, ...] | None  # argument positions to conform; None: all


FACTS: dict[type, Facts] = {}


def learn(kind: type) -> Facts:
    """Find out once what a type of node is like."""
    python = issubclass(kind, torch.autograd.function.BackwardCFunction)
    name = kind.__name__
    conform_at = None if python else EXACT.get(name)
    FACTS[kind] = facts = Facts(python, conform_at is None or name in MULTI_OUTPUT, conform_at)
    return facts


REFUSED = {
    "CheckpointFunctionBackward": "reentrant checkpointing runs a second backward pass inside the "
    "first and writes on .grad; use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)",
    "CompiledFunctionBackward": "a compiled model hides its operators; run the forward pass inside "
    "gradtrace.watch(model), which runs compiled modules eagerly",
}


def is_python(node: Node) -> bool:
    """Whether the node is a ``torch.autograd.Function``."""
    return isinstance(node, torch.autograd.function.BackwardCFunction)


def call(node: Node, grads: Grads) -> Grads:
    """``h_u(g_u)``: one gradient for each edge of ``edges_of(node)``, as the formula gives it."""
    if is_python(node) and any(grad is None for grad in grads):
        grads = handed(node, grads)
    return call_ready(node, grads)


def call_ready(node: Node, grads: Grads) -> Grads:
    """``call`` with cotangents as the engine would hand them over."""
    if is_python(node):
        return _apply(node, grads)
    outs = node(*grads)
    return outs if type(outs) is tuple else (outs,)


def _apply(node: Node, grads: Grads) -> Grads:
    """Call the ``backward`` of a ``torch.autograd.Function``.

    It gives a gradient for every argument of ``forward``, tensors or not, where the edges list
    tensors only; those that need a gradient are the same, in order.
    """
    if name_of(node) in REFUSED:
        raise _Refused(REFUSED[name_of(node)])
    with users_code():
        outs = type(node).apply(node, *grads)  # not node.apply, which handed replaces for a moment
    outs = outs if isinstance(outs, tuple) else (outs,)
    needs = node.needs_input_grad
    if len(outs) < len(needs) or any(out is not None for out in outs[len(needs) :]):
        raise _Refused(f"its backward must return {len(needs)} gradients, and returned {len(outs)}")
    wanted = iter([out for out, need in zip(outs, needs) if need])
    return tuple(None if child is None else next(wanted, None) for child, _ in edges_of(node))


class _Refused(Exception):
    """A node that is not to be called; ``explain`` says where it stands."""


class _Stop(Exception):
    """Ends a pass of PyTorch's engine."""


_APPLY_LOCK = threading.RLock()


def handed(node: Node, grads: Grads) -> Grads:
    """The cotangents as PyTorch's engine hands them to a Python function.

    That is after the hooks on them, and with zeros for missing ones, unless the function wants
    None, which only the engine knows.
    """
    given = [(GradientEdge(node, i), grad) for i, grad in enumerate(grads) if grad is not None]
    below = next(GradientEdge(child, slot) for child, slot in edges_of(node) if child is not None)
    handed: list[Tensor | None] = []

    def stop(*args: Tensor | None) -> None:
        handed.extend(args)
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
    return handed


def explain(error: Exception, node: Node, where: str) -> GradtraceError:
    """Turn an exception raised by a node into one that names the operator and what to do."""
    at = f"{name_of(node)}{where}"
    text = str(error)
    if memory_limits.ran_out(error):
        return TooLarge(
            f"{at} ran out of memory{memory_limits.shortfall(error)}; trace fewer samples at a "
            "time, or whole tensors: granularity='operator'"
        )
    if isinstance(error, _Refused):
        return Unsupported(f"{at} cannot be followed: {text}")
    if "second time" in text or "already been freed" in text:
        return FreedGraph(
            f"the graph is freed at {at}: a backward pass released the values it needs. Trace "
            "before loss.backward(), or call loss.backward(retain_graph=True)"
        )
    if "modified by an inplace operation" in text:
        return FreedGraph(
            f"a value that {at} needs was overwritten in place after the forward pass (an "
            "optimizer step, for instance). Trace before it is changed"
        )
    if "nested" in text.lower() or "wrong index for variant" in text:  # asked for its shape
        return Unsupported(
            f"{at} works on nested tensors, whose elements have no common shape and cannot be "
            f"followed; pad before (torch.nested.to_padded_tensor, nn.utils.rnn.pad_sequence), or "
            f"work on the parts one by one ({text})"
        )
    if "sparse" in text.lower():
        return Unsupported(
            f"{at} works on sparse tensors, which cannot be followed element by element; make them "
            f"dense before ({text})"
        )
    return GradtraceError(f"{at} failed: {text}")
