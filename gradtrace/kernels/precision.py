"""Matrix products in full float32, whatever precision the user has allowed.

TF32 keeps 10 of 23 mantissa bits: enough for training, not for comparing path masses. It is
switched off temporarily through the interface by which it was switched on, because torch refuses a
mix of its old and its new one; torch 2.8 and older have only the old one. The user's settings are
restored afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from gradtrace.pytorch.global_switches import Change, Switch


def exact(x: Tensor) -> AbstractContextManager[None]:
    """Context without TF32 if products of this tensor could use it, else a null context."""
    if not x.is_cuda or x.dtype is not torch.float32:
        return nullcontext()
    return without_tf32()


def without_tf32() -> AbstractContextManager[None]:
    """Context in which GPU matrix products and convolutions use full float32; safe to enter from
    several threads at once.
    """
    return _SWITCH()


def _without() -> Change:
    new = hasattr(torch.backends.cuda.matmul, "fp32_precision")  # since torch 2.9
    products, convolutions = (
        (_products, _convolutions) if new else (_products_old_api, _convolutions_old_api)
    )
    with products(), convolutions():
        yield


_SWITCH = Switch(_without)


@contextmanager
def _products() -> Iterator[None]:
    matmul = torch.backends.cuda.matmul
    if matmul.fp32_precision != "tf32":
        yield
        return
    before = _old_precision()
    if before is None:
        matmul.fp32_precision = "ieee"
    else:
        matmul.allow_tf32 = False
    try:
        yield
    finally:
        if before is None:
            default = torch.backends.fp32_precision  # type: ignore[attr-defined]
            matmul.fp32_precision = "none" if default == "tf32" else "tf32"  # "none": inherited
        else:
            matmul.allow_tf32 = True
            if before != "high":
                torch.set_float32_matmul_precision(before)


@contextmanager
def _convolutions() -> Iterator[None]:
    conv = torch.backends.cudnn.conv  # type: ignore[attr-defined]
    if conv.fp32_precision != "tf32":
        yield
        return
    old = _old_flag_of_cudnn()
    if old:  # so that it can be read meanwhile, as torch.backends.cudnn.flags does
        torch._C._set_cudnn_allow_tf32(False)
    if conv.fp32_precision == "tf32":  # also where it is inherited
        conv.fp32_precision = "ieee"
    try:
        yield
    finally:
        if old:
            torch._C._set_cudnn_allow_tf32(True)
        conv.fp32_precision = "tf32"


def _old_flag_of_cudnn() -> bool:
    """Whether cuDNN's TF32 is on, and was so set that the old interface can say it."""
    try:
        return bool(torch.backends.cudnn.allow_tf32)
    except RuntimeError:  # set through the new interface
        return False


def _old_precision() -> str | None:
    """The precision set through the old interface, if that allows TF32, else None."""
    try:
        found = torch.get_float32_matmul_precision()
    except RuntimeError:  # old interface says "highest", the new one does not
        return None
    return None if found == "highest" else found


@contextmanager
def _products_old_api() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    if before == "highest":
        yield
        return
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)  # this also sets allow_tf32 again


@contextmanager
def _convolutions_old_api() -> Iterator[None]:
    if not torch.backends.cudnn.allow_tf32:
        yield
        return
    torch._C._set_cudnn_allow_tf32(False)
    try:
        yield
    finally:
        torch._C._set_cudnn_allow_tf32(True)
