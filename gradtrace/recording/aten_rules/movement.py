"""Operations that only move elements: views, permutations, padding with zeros."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradtrace.errors import NotLinear
from gradtrace.linops import Identity, Index, Map, Reduce, Scale, Scan, Slot, gather
from gradtrace.recording.aten_rules.call import Call, Chains, pairwise, real, shape_of
from gradtrace.types import Shape


def reshape(call: Call) -> Chains:
    """The same elements in the same order."""
    dep = call.dep
    return [([Identity(shape_of(dep), real(call.out.shape, dep))], dep)]


class Window(NamedTuple):
    """Where a tensor lies in a contiguous one whose memory it shares: no list of element numbers
    is needed, which a loop that writes into a buffer would make at each step.
    """

    shape: Shape
    stride: Shape
    start: int
    once: bool  # whether no element is there twice

    @classmethod
    def of(cls, inner: Tensor, outer: Tensor) -> Window | None:
        """None if ``outer`` is not contiguous, does not hold all of ``inner``, or is complex."""
        if not (inner.numel() and outer.is_contiguous()) or outer.is_complex():
            return None
        sizes = sorted((step, n) for step, n in zip(inner.stride(), inner.shape) if n > 1)
        start = int(inner.storage_offset() - outer.storage_offset())
        end, once = start, True
        for step, n in sizes:
            once = once and step > end - start
            end += step * (n - 1)
        if start < 0 or end >= outer.numel():
            return None
        return cls(tuple(inner.shape), tuple(inner.stride()), int(start), once)

    def read(self, x: Tensor) -> Tensor:
        """The elements of ``inner``, as a view."""
        x = x.contiguous()
        return x.as_strided(self.shape, self.stride, x.storage_offset() + self.start)

    def cleared(self, x: Tensor) -> Tensor:
        """``x`` with zeros in place of ``inner``."""
        x = x.clone(memory_format=torch.contiguous_format)
        self.read(x).zero_()
        return x

    def placed(self, x: Tensor, shape: Shape) -> Tensor:
        """``x`` in place of ``inner``, and zeros elsewhere in this shape."""
        out = x.new_zeros(shape)
        self.read(out).copy_(x.reshape(self.shape))
        return out


def overwritten(target: Tensor, alias: Tensor) -> tuple[Index | None, Index] | None:
    """The maps from the old value of ``alias`` (None: nothing of it stays) and from what is written
    to ``target``, which lies in it, to its new value; None if ``Window`` cannot tell.
    """
    window = Window.of(target, alias)
    if window is None or not window.once:
        return None
    shape, part = shape_of(alias), shape_of(target)
    old = Index(window.cleared, shape, shape, fills=True, injective=True)
    partial = target.numel() < alias.numel()
    new = Index(lambda x: window.placed(x, shape), part, shape, fills=partial, injective=True)
    return (old if partial else None), new


def strided(call: Call) -> Chains:
    """``as_strided``: a view, or a gather, whose indices are found by writing element numbers into
    a storage of the same size and reading them with the strides of the result.
    """
    dep, out = call.dep, call.out
    window = Window.of(out, dep)
    if window is not None:
        once = True if window.once else None
        return [([Index(window.read, shape_of(dep), shape_of(out), injective=once)], dep)]
    size = dep.untyped_storage().nbytes() // dep.element_size()
    memory = torch.full((size,), -1, device=dep.device)
    place = memory.as_strided(dep.size(), dep.stride(), dep.storage_offset())
    place.copy_(torch.arange(dep.numel(), device=dep.device).reshape(dep.shape))
    source = memory.as_strided(out.size(), out.stride(), out.storage_offset())
    if bool((source < 0).any()):
        raise NotLinear("as_strided reads memory outside the tensor it is given")
    if dep.is_complex():
        source = torch.stack([2 * source, 2 * source + 1], -1)
    return [([gather(source, shape_of(dep))], dep)]


def injective_view(call: Call) -> Any:
    """Views that contain every element at most once: permutations and slices."""
    return _move(call, fills=False, injective=True)


def view(call: Call) -> Any:
    """Operations that take every element of the result from the argument."""
    return _move(call, fills=False)


def move(call: Call) -> Any:
    """Operations whose elements come from the arguments or are zero."""
    return _move(call, fills=True)


def put(call: Call) -> Any:
    """Operations that place each element of the argument once, among zeros."""
    return _move(call, fills=True, injective=True)


def concatenate(call: Call) -> Any:
    """``cat`` and ``stack``: each argument fills a slot of the result along ``dim``."""
    parts, out = list(call.args[0]), call.out
    dim = call.get(1, "dim", 0) % out.dim()
    new = call.func._schema.name == "aten::stack"
    cuts = [(*x.shape[:dim], 1, *x.shape[dim:]) if new else tuple(x.shape) for x in parts]
    again = len({id(x) for x in parts}) < len(parts)
    if out.is_complex() or again or any(len(cut) != out.dim() for cut in cuts):
        return move(call)
    chains: Chains = []
    start = 0
    for part, cut in zip(parts, cuts):
        if call.depends(part):
            shapes = tuple(part.shape), tuple(out.shape)
            chains.append(([Slot(dim, start, cut, *shapes)], part))
        start += cut[dim]
    return chains


def _move(call: Call, fills: bool, injective: bool | None = None) -> Any:
    """An ``Index`` map for each dependent argument, with the operation as its index function.

    ``fills``: the result may have zeros; ``injective``: no element is used twice (None: unknown).
    """
    many = isinstance(call.out, (list, tuple))
    if not many and not fills and len(call.args) == 1 and not call.dep.is_complex():
        shapes = tuple(call.dep.shape), tuple(call.out.shape)
        return [([Index(call.func, *shapes, injective=injective)], call.dep)]
    outs = call.out if many else [call.out]
    result: list[Chains] = []
    for k, out in enumerate(outs):
        chains: Chains = []
        for dep in call.deps:
            f = _numbers(call.function(dep, moving=True))
            if many:
                f = _nth(f, k)
            if dep.is_complex():
                f = pairwise(f)
            filled = fills or len(call.deps) > 1
            moved = Index(f, shape_of(dep), real(out.shape, dep), filled, injective)
            chains.append(([moved], dep))
        result.append(chains)
    return result if many else result[0]


def _nth(f: Callable[[Tensor], Any], k: int) -> Callable[[Tensor], Tensor]:
    return lambda x: f(x)[k]


def _numbers(f: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """``f`` for integer inputs too: where it takes floats only, by way of float64."""

    def moved(x: Tensor) -> Any:
        if x.is_floating_point():
            return f(x)
        try:
            return f(x)
        except (NotImplementedError, RuntimeError):
            return f(x.double()).to(x.dtype)

    return moved


def ids(shape: Sequence[int], device: torch.device) -> Tensor:
    """The elements of a tensor of this shape, numbered from 0 in row-major order."""
    return torch.arange(prod(shape), device=device).reshape(tuple(shape))


def ids64(shape: Sequence[int], device: torch.device) -> Tensor:
    """``ids`` in float64, for operations that refuse integers; exact below 2**53."""
    return ids(shape, device).double()


def total(call: Call) -> Chains:
    """``sum``."""
    return [([_reduce(call.dep, call.get(1, "dim"), call.out)], call.dep)]


def _reduce(dep: Tensor, dims: Any, out: Tensor) -> Map:
    if isinstance(dims, int):
        dims = [dims]
    every = range(dep.dim())
    over = [d % dep.dim() for d in dims] if dims and dep.dim() else every
    return Reduce(list(over), shape_of(dep), shape_of(out))


def mean(call: Call) -> Chains:
    """``sum / n``."""
    dep, out = call.dep, call.out
    n = dep.numel() // out.numel() if out.numel() else 1
    return [([_reduce(dep, call.get(1, "dim"), out), Scale(1 / max(n, 1), shape_of(out))], dep)]


def cumsum(call: Call) -> Chains:
    """``cumsum``."""
    dep = call.dep
    if not dep.dim():
        return [([], dep)]
    return [([Scan(call.args[1] % dep.dim(), shape_of(dep))], dep)]
