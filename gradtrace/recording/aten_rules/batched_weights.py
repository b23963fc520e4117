"""Computes weights of maps in batches, after all nodes have been recorded.

The gradient does not depend on these weights, so they can wait. The layers of a model are alike,
and for small tensors the overhead of calling an operation dominates. So the same formula runs once
on the stacked tensors of many nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gradtrace.kernels import backend_of

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
