"""Many processes that were started together, by ``torchrun``: who they are, and what they agree on.

Each is a rank with its share of the cells; all write into one folder, and rank 0 concludes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from gradtrace.errors import GradtraceError

T = TypeVar("T")

GATHER = timedelta(minutes=5)
"""How long all ranks may take to start."""

PATIENCE = timedelta(days=30)
"""How long a rank may wait for one that has more to do."""


@dataclass(frozen=True)
class Ranks:
    """A process among others; one that was started by itself is rank 0 of one."""

    rank: int = 0
    world: int = 1
    group: Any = None

    @property
    def first(self) -> bool:
        """Whether this is the one that speaks."""
        return self.rank == 0

    def share(self, cells: Sequence[T]) -> Sequence[T]:
        """The part of this rank."""
        return cells[self.rank :: self.world]

    def agree(self, make: Callable[[], T]) -> T:
        """What rank 0 makes, on all ranks; its error too."""
        if self.world == 1:
            return make()
        made: list[Any] = [None, None]
        if self.first:
            try:
                made[0] = make()
            except GradtraceError as error:
                made[1] = str(error)
        with _together():
            _distributed().broadcast_object_list(made, src=0, group=self.group)
        if made[1] is not None:
            raise GradtraceError(made[1])
        return made[0]  # type: ignore[no-any-return]

    def end(self, error: str | None) -> None:
        """Wait for all; if any rank failed, all fail, and say which."""
        if self.world == 1:
            if error is not None:
                raise GradtraceError(error)
            return
        found: list[str | None] = [None] * self.world
        with _together():
            _distributed().all_gather_object(found, error, group=self.group)
        failed = [f"rank {rank}: {text}" for rank, text in enumerate(found) if text is not None]
        if failed:
            raise GradtraceError("; ".join(failed))


@contextmanager
def joined() -> Iterator[Ranks]:
    """The ranks that this process was started with: RANK and WORLD_SIZE in the environment."""
    world = os.environ.get("WORLD_SIZE", "1")
    if world == "1":
        yield Ranks()
        return
    missing = [v for v in ("RANK", "MASTER_ADDR", "MASTER_PORT") if v not in os.environ]
    if missing:
        raise GradtraceError(
            f"WORLD_SIZE is {world}, but {' and '.join(missing)} not set: start with torchrun, or "
            "unset WORLD_SIZE to run in one process"
        )
    distributed = _distributed()
    with _together():
        distributed.init_process_group("gloo", timeout=GATHER)
    try:
        group = distributed.new_group(timeout=PATIENCE)
        yield Ranks(distributed.get_rank(), distributed.get_world_size(), group)
    finally:
        distributed.destroy_process_group()


def _distributed() -> Any:
    import torch.distributed

    if not torch.distributed.is_available():
        raise GradtraceError("this torch was built without torch.distributed: run in one process")
    return torch.distributed


@contextmanager
def _together() -> Iterator[None]:
    """Whatever goes wrong in here is another rank's end."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        raise GradtraceError(
            "another rank ended, or never started; rows that are written are kept, and the same "
            "command goes on from there"
        ) from error
