"""A Monitor in one of several processes: who writes, and whether all have the same weights."""

from __future__ import annotations

from contextlib import suppress
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gradtrace.errors import GradtraceError
from gradtrace.pytorch.wrapped_modules import is_tensor_parallel, refuse_flat, sharded_modules

_RUNS = count()


class Ranks:
    """A process among others: its ``rank``, and how many there are."""

    def __init__(self, model: nn.Module, every: int | None, keeps: bool) -> None:
        refuse_flat(model)
        if is_tensor_parallel(model):
            raise GradtraceError("a tensor-parallel model cannot be traced: ranks share each loss")
        self.sharded = bool(sharded_modules(model))
        if self.sharded and (every is None or keeps):
            raise GradtraceError(
                "the ranks of a sharded model are traced together: give every= a number, and "
                "leave folder out"
            )
        several = dist.is_available() and dist.is_initialized()
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if several else (0, 1)
        alone = self.world == 1 or self.sharded
        self._store: Any = None if alone else dist.distributed_c10d._get_default_store()
        self._model, self._run, self.told = model, next(_RUNS), alone

    def tell(self) -> None:
        """Tell the first process a digest of the weights, without waiting for it."""
        self.told = True
        sums = torch.stack([each.detach().double().sum() for each in self._model.parameters()])
        with suppress(RuntimeError):  # the process that keeps the store may be gone
            self._store.set(self._key(self.rank), repr(sums.tolist()))

    def note(self) -> str:
        """What is to be noted: of another process that had other weights, as far as is known."""
        if self._store is None or self.rank:
            return ""
        get, check = self._store.get, self._store.check
        known = {n: get(key) for n in range(self.world) if check([key := self._key(n)])}
        others = [str(n) for n, told in known.items() if told != known.get(0, told)]
        text = "had other weights after a step: is the model wrapped in DistributedDataParallel?"
        return f"process {', '.join(others)} {text}" if others else ""

    def _key(self, rank: int) -> str:
        return f"gradtrace run {self._run} {rank}"
