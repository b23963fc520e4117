"""Converts tensors to plain strided ones with storage, which maps and kernels can read.

Saved tensors and cotangents from PyTorch may be special. A *zero tensor* (made by forward-mode AD:
``torch.func.hessian``, ``jvp``) has no storage and is materialised; a lazy negation (the negative
bit) is resolved. Wrapper subclasses, whose operations run code of the class (quantised weights,
``DTensor``, ``MaskedTensor``, fake tensors), have no elements that could be traced.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from gradtrace.errors import Unsupported
from gradtrace.pytorch.dtensor import is_dtensor

PLAIN = frozenset({Tensor, torch.nn.Parameter})
_OWN = torch._C._disabled_torch_dispatch_impl


def is_wrapper(x: Tensor) -> bool:
    """Whether a tensor is of a wrapper subclass, which defines ``__torch_dispatch__``.

    >>> class Named(Tensor): pass
    >>> is_wrapper(torch.ones(2).as_subclass(Named))
    False
    """
    kind = type(x)
    return kind not in PLAIN and kind.__torch_dispatch__ is not _OWN


def plain(x: Tensor) -> Tensor:
    """The same values as a plain strided ``Tensor``; raises ``Unsupported`` if impossible."""
    if type(x) in PLAIN and x.layout is torch.strided and not (x._is_zerotensor() or x.is_neg()):
        return x
    return _written_out(x)


def _written_out(x: Tensor) -> Tensor:
    if type(x).__name__ == "AsyncCollectiveTensor":  # the result of a collective under way
        return x.trigger_wait()  # type: ignore[attr-defined,no-any-return]
    if is_wrapper(x):
        refuse_wrapper(x)
    with torch._C.DisableTorchFunctionSubclass():  # skip __torch_function__ of user classes
        if x.layout is not torch.strided:
            raise Unsupported(
                f"a tensor of layout {x.layout} cannot be followed element by element; make it "
                "dense before it is used (to_dense())"
            )
        if x._is_zerotensor():
            return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
        return x.detach().as_subclass(Tensor).resolve_neg()


def numbers_of(x: Tensor) -> list[Tensor]:
    """The tensors inside a wrapper (``__tensor_flatten__``, none if it lacks that); else ``x``."""
    if not is_wrapper(x):
        return [x]
    if is_dtensor(x):
        return [x.to_local()]  # type: ignore[attr-defined]
    flatten: Any = getattr(x, "__tensor_flatten__", None)
    return [] if flatten is None else [y for n in flatten()[0] for y in numbers_of(getattr(x, n))]


def refuse_wrapper(x: Tensor, what: str = "a tensor") -> NoReturn:
    """Raise ``Unsupported`` for a tensor of a wrapper subclass; ``what`` names it."""
    raise Unsupported(
        f"{what} is a {type(x).__name__} ({type(x).__module__}): its elements are behind code of "
        "its class, not in memory, and cannot be followed; trace the model with plain tensors "
        "(dequantised, gathered, unwrapped)"
    )
