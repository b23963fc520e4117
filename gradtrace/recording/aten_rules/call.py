"""A call of an ATen operation, as rules see it, and the types that rules return.

A complex tensor is represented by its real and imaginary parts in a last dimension of size 2;
``shape_of`` gives the shape of this real representation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from gradtrace.errors import NotLinear
from gradtrace.kernels import backend_of
from gradtrace.linops import Identity, Index, Map
from gradtrace.types import Shape

Formula: TypeAlias = Callable[..., Sequence[Tensor]]
"""From tensors (nodes, ...) and numbers to tensors (nodes, ...)."""

Fill: TypeAlias = Callable[..., object]
"""Called with the results of one node."""

Request: TypeAlias = tuple[Sequence[Tensor], Fill]
"""The tensors of one node, and the function that receives its results."""

BATCH_MAX_BYTES = 1 << 16
"""On a CPU, tensors of at most this many bytes are batched: their call overhead dominates."""

STACK_MAX_BYTES = 1 << 28
"""At most this many bytes of tensors are stacked at a time."""

ALIGNMENT_BYTES = 64
"""Slices of a stack must be aligned to this many bytes, as separately allocated tensors are."""


class BatchedWeights:
    """Pending requests, grouped by formula, numbers, shapes, dtypes and devices."""

    def __init__(self) -> None:
        self._requests: dict[tuple[Formula, tuple[Any, ...], object], list[Request]] = {}

    def request(self, formula: Formula, given: Sequence[Tensor], fill: Fill, *numbers: Any) -> None:
        """Call ``fill(*formula(*given, *numbers))``, now or when ``flush`` is called.

        The formula must be elementwise, so that results do not depend on batching.
        """
        if not all(map(_can_batch, given)):
            fill(*(x[0] for x in formula(*(x.unsqueeze(0) for x in given), *numbers)))
            return
        kinds = tuple([(x.shape, x.dtype, x.device) for x in given])
        self._requests.setdefault((formula, numbers, kinds), []).append((given, fill))

    def flush(self) -> None:
        """Compute all pending requests."""
        requests, self._requests = self._requests, {}
        for (formula, numbers, _), nodes in requests.items():
            for chunk in _chunks(nodes):
                stacked = [torch.stack(tensors) for tensors in zip(*(given for given, _ in chunk))]
                results = zip(*(_aligned(x).unbind() for x in formula(*stacked, *numbers)))
                for (_, fill), result in zip(chunk, results):
                    fill(*result)


def _can_batch(x: Tensor) -> bool:
    """Whether batching a tensor saves time, and it has the same layout in a stack as alone."""
    size = x.nbytes
    return (size <= BATCH_MAX_BYTES or backend_of(x).synchronises) and x.is_contiguous()


def _aligned(x: Tensor) -> Tensor:
    """A stack whose slices are aligned: with a gap after each, if they would not be."""
    each = x[0].numel()
    wide = -(-each * x.itemsize // ALIGNMENT_BYTES) * ALIGNMENT_BYTES // x.itemsize
    if wide == each:
        return x
    spaced = x.new_empty(len(x), wide).as_strided(x.shape, (wide, *x.stride()[1:]))
    return spaced.copy_(x)


def _chunks(nodes: list[Request]) -> Iterator[list[Request]]:
    """Splits requests so that each stack has at most ``STACK_MAX_BYTES``."""
    each = max(1, STACK_MAX_BYTES // max(1, sum(x.nbytes for x in nodes[0][0])))
    for first in range(0, len(nodes), each):
        yield nodes[first : first + each]


class Undecided(Exception):
    """A rule does not cover this call; a dense matrix is used instead."""


class Call:
    """An operation with its arguments and its result.

    ``deps`` are the arguments that depend on the cotangent. ``limit`` bounds the entries of a dense
    matrix. Weights can be requested from ``batched_weights``, if it is not None.
    """

    __slots__ = ("args", "batched_weights", "deps", "func", "kwargs", "limit", "out")

    def __init__(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        deps: list[Tensor],
        out: Any,
        limit: int,
        batched_weights: BatchedWeights | None = None,
    ) -> None:
        self.func = func
        self.args = args
        self.kwargs = kwargs
        self.deps = deps
        self.out = out
        self.limit = limit
        self.batched_weights = batched_weights

    @property
    def dep(self) -> Tensor:
        """The one argument that depends on the cotangent."""
        if len(self.deps) != 1:
            raise NotLinear(f"{self.name} combines several values that depend on the gradient")
        return self.deps[0]

    @property
    def name(self) -> str:
        """``mul.Tensor``."""
        return str(self.func).removeprefix("aten.")

    def get(self, position: int, name: str, default: Any = None) -> Any:
        """An argument by position or by name."""
        if position < len(self.args):
            return self.args[position]
        return self.kwargs.get(name, default)

    def depends(self, x: Any) -> bool:
        """Whether this argument is one that depends on the cotangent."""
        return any(x is dep for dep in self.deps)

    def one_of(self, *factors: object) -> None:
        """Refuse a product of which several factors depend on the cotangent."""
        if sum(self.depends(factor) for factor in factors) > 1:
            raise NotLinear(f"{self.name} multiplies values that depend on the gradient")

    def only(self, allowed: object) -> Tensor:
        """The one dependent argument, which must be ``allowed``."""
        dep = self.dep
        if dep is not allowed:
            raise NotLinear(
                f"{self.name} is not linear in an argument that depends on the gradient"
            )
        return dep

    def function(self, dep: Tensor, moving: bool = False) -> Callable[[Tensor], Any]:
        """The operation as a function of one argument, with the other dependent ones zero.

        With ``moving`` the constant float arguments are zero too, in the dtype of the function's
        argument. The function does not keep the tensors it replaces alive.
        """
        func, kwargs, args = self.func, self.kwargs, self.args
        if args[0] is dep and len(args) == 1:
            return lambda x: func(x, **kwargs)

        template = self._with_placeholders(list(args), dep, moving)
        kwargs_template = {
            key: self._with_placeholders(value, dep, moving) for key, value in kwargs.items()
        }
        return lambda x: func(
            *_filled(template, x), **{k: _filled(v, x) for k, v in kwargs_template.items()}
        )

    def _with_placeholders(self, a: Any, dep: Tensor, moving: bool) -> Any:
        """An argument, with tensors that are to be replaced exchanged for placeholders."""
        if a is dep:
            return _ARGUMENT
        if isinstance(a, Tensor):
            other = self.depends(a) or (moving and a.is_floating_point())
            return _Zeros(tuple(a.shape), a.dtype, a.device, moving) if other else a
        return (
            [self._with_placeholders(b, dep, moving) for b in a]
            if isinstance(a, (list, tuple))
            else a
        )


def _filled(a: Any, x: Tensor) -> Any:
    """An argument with its placeholders replaced by ``x`` and by zeros."""
    if a is _ARGUMENT:
        return x
    if type(a) is _Zeros:
        return torch.zeros(a.shape, dtype=x.dtype if a.moving else a.dtype, device=a.device)
    return [_filled(b, x) for b in a] if type(a) is list else a


class _Zeros(NamedTuple):
    """A placeholder for zeros; ``moving``: of the dtype of the function's argument."""

    shape: Shape
    dtype: torch.dtype
    device: torch.device
    moving: bool


_ARGUMENT = object()

Chain: TypeAlias = "tuple[list[Map], Tensor]"
"""Maps to apply one after the other, and the dependent argument to start from."""

Chains: TypeAlias = "list[Chain]"
Rule: TypeAlias = "Callable[[Call], Any]"
"""Returns the chains whose sum is the result; for several results, one list of chains for each."""


def real(shape: Sequence[int], like: Tensor) -> Shape:
    """The real representation of a shape, for a tensor that is complex if ``like`` is."""
    return (*shape, 2) if like.is_complex() else tuple(shape)


def shape_of(x: Tensor) -> Shape:
    """The shape of a tensor's real representation."""
    return (*x.shape, 2) if x.is_complex() else tuple(x.shape)


def real_dtype(x: Tensor) -> torch.dtype:
    """The dtype of a tensor's real representation."""
    return x.dtype.to_real() if x.is_complex() else x.dtype


def as_real(x: Tensor) -> Tensor:
    """A tensor's real representation."""
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def pairwise(move: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """An index function on complex elements, applied to real and imaginary parts."""
    return lambda x: torch.stack([move(x[..., 0]), move(x[..., 1])], -1)


def broadcast_maps(dep: Tensor, shape: Shape) -> list[Map]:
    """The maps that broadcast an argument to a shape; none if it has that shape."""
    if dep.shape == shape:
        return []
    move = pairwise(lambda x: x.expand(shape)) if dep.is_complex() else lambda x: x.expand(shape)
    return [Index(move, shape_of(dep), real(shape, dep))]


def from_shape(chain: list[Map], shape: Shape) -> list[Map]:
    """The chain with its input reshaped from ``shape``, which has as many elements."""
    return chain if chain[0].in_shape == shape else [Identity(shape, chain[0].in_shape), *chain]


def as_shape(chain: list[Map], shape: Shape) -> list[Map]:
    """The chain with its output reshaped to ``shape``, which has as many elements."""
    return chain if chain[-1].out_shape == shape else [*chain, Identity(chain[-1].out_shape, shape)]
