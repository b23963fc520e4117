"""Processes that train one model together, each on its part of a batch."""

from __future__ import annotations

from typing import Any, TypeVar

T = TypeVar("T")


class Shards:
    """A process among those of ``torch.distributed``; alone, if there are no others.

    Results are small and made on the CPU, so they travel by a group of their own (gloo): the
    group of the gradients may be one for GPUs, and has its own order of messages.
    """

    def __init__(self, together: bool | None = None) -> None:
        import torch.distributed as dist

        there = dist.is_available() and dist.is_initialized()
        self.rank, self.world, self._group = 0, 1, None
        if there and together is not False and dist.get_world_size() > 1:
            self.rank, self.world = dist.get_rank(), dist.get_world_size()
            self._group = dist.new_group(backend="gloo")

    @property
    def first(self) -> bool:
        """Whether this process is the one that writes."""
        return self.rank == 0

    def gather(self, mine: T) -> list[T]:
        """What all processes have, in the order of ranks; every one gets it."""
        if self.world == 1:
            return [mine]
        import torch.distributed as dist

        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, mine, group=self._group)
        return found

    def agree(self, mine: T) -> T:
        """What the first process has."""
        if self.world == 1:
            return mine
        import torch.distributed as dist

        box = [mine]
        dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]

    def close(self) -> None:
        """Give the group back."""
        if self._group is not None:
            import torch.distributed as dist

            group, self._group = self._group, None
            if dist.is_initialized():
                dist.destroy_process_group(group)
