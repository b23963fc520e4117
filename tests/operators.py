"""PyTorch's operator database as losses: what the operator tests and the long runs share."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

CPU = torch.device("cpu")


def entries(device: torch.device = CPU) -> list[Any]:
    """Every entry of the database that PyTorch differentiates on the CPU, and on a device, in
    float32.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal import common_utils
        from torch.testing._internal.common_methods_invocations import op_db
        from torch.testing._internal.opinfo import core
    for module in (common_utils, core):  # it looks for a unittest in every frame's source
        module.extract_test_fn = lambda: None
    return [
        op
        for op in op_db
        if op.supports_autograd
        and all(torch.float32 in op.supported_backward_dtypes(d) for d in {"cpu", device.type})
    ]


def label(op: Any) -> str:
    """The entry's name with its variant."""
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else str(op.name)


def _wanted(x: object) -> bool:
    return isinstance(x, Tensor) and x.requires_grad


Problem: TypeAlias = "tuple[Tensor, list[Tensor]]"
"""A scalar loss, and the leaves it is to be derived by."""


def losses(op: Any, dtype: torch.dtype, most: int, device: torch.device = CPU) -> Iterator[Problem]:
    """The loss of each of the first samples."""
    found = 0
    for make in makers(op, dtype, most, device):
        problem = make()
        if problem is not None:
            yield problem
            found += 1
        if found == most:
            return


def makers(
    op: Any, dtype: torch.dtype, most: int, device: torch.device = CPU
) -> Iterator[Callable[[], Problem | None]]:
    """What calls the operator on each of the first samples; more of them than ``most``, since some
    have nothing to derive by. Samples are drawn on the CPU, so that they are the same on every
    device.
    """
    torch.manual_seed(0)
    samples = op.sample_inputs(CPU, dtype, requires_grad=True)
    for sample in islice(samples, 4 * most):
        yield partial(_problem, op, sample, device)


def _problem(op: Any, sample: Any, device: torch.device) -> Problem | None:
    inputs = tree_map(partial(_moved, device), (sample.input, sample.args, sample.kwargs))
    leaves = [x for x in tree_flatten(inputs)[0] if _wanted(x)]
    if not leaves:
        return None
    first, args, kwargs = inputs
    result = op(first, *args, **kwargs)
    if sample.output_process_fn_grad is not None:
        result = sample.output_process_fn_grad(result)
    outs = [o for o in tree_flatten(result)[0] if _wanted(o)]
    return (_scalar(outs), leaves) if outs else None


def _moved(device: torch.device, x: Any) -> Any:
    """A leaf on the device where a gradient is wanted; else the same, there."""
    if isinstance(x, torch.device):
        return device
    if not isinstance(x, Tensor):
        return x
    return x.detach().to(device).requires_grad_() if _wanted(x) else x.to(device)


def _scalar(outs: list[Tensor]) -> Tensor:
    """The outputs, weighed by fixed numbers and added up."""
    generator = torch.Generator().manual_seed(1)
    total = torch.zeros((), dtype=torch.float64, device=outs[0].device)
    for out in outs:
        if out.layout is not torch.strided:
            out = out.to_dense()
        part = torch.view_as_real(out.resolve_conj()) if out.is_complex() else out
        weight = torch.rand(part.shape, generator=generator, dtype=torch.float64) + 0.5
        total = total + (part * weight.to(part.device, part.dtype)).sum().double()
    return total
