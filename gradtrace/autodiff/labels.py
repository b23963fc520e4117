"""``label``: names for slices of a tensor: heads, time steps, channels, experts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import index
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gradtrace.autodiff.nodes import Node
from gradtrace.errors import GradtraceError

Names: TypeAlias = tuple[str | None, ...]
Cut: TypeAlias = Callable[[Tensor, int, Names], Tensor]

CUTS: list[Cut] = []
"""Functions that ``ablate`` applies to labelled tensors, process-wide, in order of registration."""


class Label(torch.autograd.Function):
    """``out = in`` and ``grad_in = grad_out``; the node stores ``dim`` and ``names``.

    The value is copied: PyTorch forbids in-place writes to a view that a Function returns, and to
    its base, so a model that continues in place (``q += bias``) would fail.
    """

    @staticmethod
    def forward(tensor: Tensor, dim: int, names: Names) -> Tensor:
        """A copy of the tensor."""
        return tensor.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int, Names], output: Tensor) -> None:
        """Store the dimension and the names of its slices."""
        _, ctx.dim, ctx.names = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """``grad_in = grad_out``."""
        return grad, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:
        """``tangent_out = tangent_in``."""
        return tangent.clone()

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int, None, None], tensor: Tensor, dim: int, names: Names
    ) -> tuple[Tensor, int]:
        """Labels the batched tensor; ``dim`` shifts by one if the batch dimension precedes it."""
        at = in_dims[0]
        return _apply_label(tensor, dim + (at <= dim), names), at


def _apply_label(tensor: Tensor, dim: int, names: Names) -> Tensor:
    """``Label.apply``, typed."""
    return Label.apply(tensor, dim, names)  # type: ignore[no-any-return, no-untyped-call]


def label(tensor: Tensor, dim: int, names: str | Iterable[str | None]) -> Tensor:
    """Name the slices of a tensor along ``dim``: ``out = tensor``, and the gradient likewise.

    Slices with the same name are a group. ``gradtrace.ablate(model, "label:head 1")`` cuts the
    slices of that name out.

    Args:
        tensor: Tensor to label.
        dim: Dimension whose slices get names.
        names: One name for each slice, None for a slice without one; or one word, to which numbers
            are appended.

    Returns:
        A copy of the tensor, with or without gradients, to go on with.

    >>> import torch
    >>> q = torch.ones(2, 3, requires_grad=True)
    >>> labelled = label(q, -1, "head")
    >>> labels_of(labelled.grad_fn)
    (1, ('head 0', 'head 1', 'head 2'))
    >>> bool((labelled == q).all())
    True
    >>> labels_of(label(q, 0, ["first", None]).grad_fn)
    (0, ('first', None))
    """
    dim = _checked_dim(tensor, dim)
    found = _checked_names(names, int(tensor.shape[dim]), dim)
    for cut in tuple(CUTS):
        tensor = cut(tensor, dim, found)
    if torch.compiler.is_compiling():
        return tensor.clone()  # compiled code is one node, which cannot contain a label
    return _apply_label(tensor, dim, found)


def labels_of(node: Node) -> tuple[int, Names] | None:
    """The dimension and the slice names, if ``label`` made this node; else ``None``."""
    if getattr(type(node), "_forward_cls", None) is not Label:
        return None
    return node.dim, node.names


def _checked_dim(tensor: Tensor, dim: int) -> int:
    """``dim`` as a nonnegative number; raises ``GradtraceError`` if it is invalid."""
    if not isinstance(tensor, Tensor):
        raise GradtraceError(
            f"label takes a tensor, got {type(tensor).__name__}; label the tensor whose slices "
            "have names"
        )
    shape = tuple(tensor.shape)
    if not shape:
        raise GradtraceError(
            "label got a 0-d tensor, which has no slices; label it before reducing"
        )
    try:
        at = index(dim)
    except TypeError:
        raise GradtraceError(
            f"label takes dim as an integer, got {dim!r}; the arguments are (tensor, dim, names)"
        ) from None
    if not -len(shape) <= at < len(shape):
        raise GradtraceError(
            f"label got dim {at} for a tensor of shape {shape}; use {-len(shape)} to "
            f"{len(shape) - 1}"
        )
    return at % len(shape)


def _checked_names(names: str | Iterable[str | None], size: int, dim: int) -> Names:
    """One name, or None, for each of ``size`` slices."""
    if isinstance(names, str):
        return tuple(f"{names} {n}" for n in range(size))
    found = tuple(names) if isinstance(names, Iterable) else (names,)
    wrong = [name for name in found if name is not None and not isinstance(name, str)]
    if wrong:
        raise GradtraceError(
            f"label takes names that are strings, or None for no name, got {wrong[0]!r}; to have "
            "slices numbered give one word, such as 'head'"
        )
    if len(found) != size:
        raise GradtraceError(
            f"label got {len(found)} names for the {size} slices along dim {dim}; give one for "
            "each, None for those without a name, or one word to be numbered"
        )
    return found
