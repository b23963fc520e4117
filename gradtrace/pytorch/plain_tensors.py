"""Tensors whose elements lie in memory, one number each: what maps and kernels can read.

Saved tensors and cotangents come from PyTorch as they are. A *zero tensor* (forward-mode AD makes
them: ``torch.func.hessian``, ``jvp``) has no memory and is written out; negation that was put off
is carried out. A tensor of a subclass with code of its own behind every operation (quantised
weights, ``DTensor``, ``MaskedTensor``, fake tensors) has no elements that could be followed.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from gradtrace.errors import Unsupported

PLAIN = frozenset({Tensor, torch.nn.Parameter})
_OWN = torch._C._disabled_torch_dispatch_impl


def is_wrapper(x: Tensor) -> bool:
    """Whether the operations of a tensor are code of its class, as those of wrappers are.

    >>> class Named(Tensor): pass
    >>> is_wrapper(torch.ones(2).as_subclass(Named))
    False
    """
    kind = type(x)
    return kind not in PLAIN and kind.__torch_dispatch__ is not _OWN


def plain(x: Tensor) -> Tensor:
    """The same numbers, in memory, without a class of the user's; an error where they cannot be."""
    if type(x) in PLAIN and x.layout is torch.strided and not (x._is_zerotensor() or x.is_neg()):
        return x
    return _written_out(x)


def _written_out(x: Tensor) -> Tensor:
    if is_wrapper(x):
        refuse_wrapper(x)
    with torch._C.DisableTorchFunctionSubclass():  # a class of the user's has no say here
        if x.layout is not torch.strided:
            raise Unsupported(
                f"a tensor of layout {x.layout} cannot be followed element by element; make it "
                "dense before it is used (to_dense())"
            )
        if x._is_zerotensor():
            return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
        return x.detach().as_subclass(Tensor).resolve_neg()


def numbers_of(x: Tensor) -> list[Tensor]:
    """The tensors that a wrapper says it is made of, or none if it does not; of others, itself."""
    if not is_wrapper(x):
        return [x]
    flatten: Any = getattr(x, "__tensor_flatten__", None)
    return [] if flatten is None else [y for n in flatten()[0] for y in numbers_of(getattr(x, n))]


def refuse_wrapper(x: Tensor, what: str = "a tensor") -> NoReturn:
    """Say that a tensor of a wrapper subclass is not followed."""
    raise Unsupported(
        f"{what} is a {type(x).__name__} ({type(x).__module__}): its elements are behind code of "
        "its class, not in memory, and cannot be followed; trace the model with plain tensors "
        "(dequantised, gathered, unwrapped)"
    )
