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

Asked: TypeAlias = tuple[Sequence[Tensor], Fill]
"""What one node gives, and where the results go."""

SMALL = 1 << 16
"""Bytes of a tensor up to which a call costs more than what it does, on a CPU."""

MOST = 1 << 28
"""Bytes of tensors that are laid side by side at a time."""

ALIGNED = 64
"""Bytes that a tensor begins at a multiple of, as if it had memory of its own."""


class BatchedWeights:
    """What was asked for, by what is alike."""

    def __init__(self) -> None:
        self._asked: dict[tuple[Formula, tuple[Any, ...], object], list[Asked]] = {}

    def request(self, formula: Formula, given: Sequence[Tensor], fill: Fill, *numbers: Any) -> None:
        """Call ``fill`` with what a formula makes of tensors and numbers, at the latest when
        ``flush`` is called. The formula works element by element.
        """
        if not all(map(_fits, given)):
            fill(*(x[0] for x in formula(*(x.unsqueeze(0) for x in given), *numbers)))
            return
        kinds = tuple([(x.shape, x.dtype, x.device) for x in given])
        self._asked.setdefault((formula, numbers, kinds), []).append((given, fill))

    def flush(self) -> None:
        """Work out all that was asked for."""
        asked, self._asked = self._asked, {}
        for (formula, numbers, _), nodes in asked.items():
            for some in _portions(nodes):
                sides = [torch.stack(side) for side in zip(*(given for given, _ in some))]
                results = zip(*(x.unbind() for x in formula(*sides, *numbers)))
                for (_, fill), result in zip(some, results):
                    fill(*result)


def _fits(x: Tensor) -> bool:
    """Whether a tensor lies in memory beside others as it does alone, and a call for it is dear."""
    size = x.nbytes
    return (size <= SMALL or sync.would_sync(x)) and not size % ALIGNED and x.is_contiguous()


def _portions(nodes: list[Asked]) -> Iterator[list[Asked]]:
    """As many at a time as may lie side by side."""
    each = max(1, MOST // max(1, sum(x.nbytes for x in nodes[0][0])))
    for first in range(0, len(nodes), each):
        yield nodes[first : first + each]
