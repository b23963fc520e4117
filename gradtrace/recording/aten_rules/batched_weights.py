"""Weights of maps that no gradient waits for, worked out when all nodes have been seen.

The layers of a model are alike, so the same few operations would run for each of them, and to call
an operation costs more than a small one does. Here they run once, on all of them side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gradtrace.kernels import sync

Formula: TypeAlias = Callable[..., Sequence[Tensor]]
"""From tensors whose first dimension is that of the nodes, and numbers, to such tensors."""

Fill: TypeAlias = Callable[..., object]
"""Takes the results for one node."""

Request: TypeAlias = tuple[Sequence[Tensor], Fill]
"""What one node gives, and where the results go."""

BATCH_MAX_BYTES = 1 << 16
"""Bytes of a tensor up to which a call costs more than what it does, on a CPU."""

STACK_MAX_BYTES = 1 << 28
"""Bytes of tensors that are laid side by side at a time."""

ALIGNMENT_BYTES = 64
"""Bytes that a tensor begins at a multiple of, as if it had memory of its own."""


class BatchedWeights:
    """What was asked for, by what is alike."""

    def __init__(self) -> None:
        self._requests: dict[tuple[Formula, tuple[Any, ...], object], list[Request]] = {}

    def request(self, formula: Formula, given: Sequence[Tensor], fill: Fill, *numbers: Any) -> None:
        """Call ``fill`` with what a formula makes of tensors and numbers, at the latest when
        ``flush`` is called. The formula works element by element.
        """
        if not all(map(_can_batch, given)):
            fill(*(x[0] for x in formula(*(x.unsqueeze(0) for x in given), *numbers)))
            return
        kinds = tuple([(x.shape, x.dtype, x.device) for x in given])
        self._requests.setdefault((formula, numbers, kinds), []).append((given, fill))

    def flush(self) -> None:
        """Work out all that was asked for."""
        requests, self._requests = self._requests, {}
        for (formula, numbers, _), nodes in requests.items():
            for chunk in _chunks(nodes):
                stacked = [torch.stack(tensors) for tensors in zip(*(given for given, _ in chunk))]
                results = zip(*(x.unbind() for x in formula(*stacked, *numbers)))
                for (_, fill), result in zip(chunk, results):
                    fill(*result)


def _can_batch(x: Tensor) -> bool:
    """Whether a tensor lies in memory beside others as it does alone, and a call for it is dear."""
    size = x.nbytes
    return (
        (size <= BATCH_MAX_BYTES or sync.would_sync(x))
        and not size % ALIGNMENT_BYTES
        and x.is_contiguous()
    )


def _chunks(nodes: list[Request]) -> Iterator[list[Request]]:
    """As many at a time as may lie side by side."""
    each = max(1, STACK_MAX_BYTES // max(1, sum(x.nbytes for x in nodes[0][0])))
    for first in range(0, len(nodes), each):
        yield nodes[first : first + each]
