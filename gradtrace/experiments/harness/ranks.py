"""The ranks of a run that was started by ``torchrun``, and their collective operations.

Each rank measures its share of the cells; all write to one folder, and rank 0 concludes.
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
"""Timeout for all ranks to start."""

PATIENCE = timedelta(days=30)
"""How long a rank waits for one that has more to do."""


@dataclass(frozen=True)
class Ranks:
    """One rank; a process without torchrun is rank 0 of one."""

    rank: int = 0
    world: int = 1
    group: Any = None

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which prints and concludes."""
        return self.rank == 0

    def share(self, cells: Sequence[T]) -> Sequence[T]:
        """The cells of this rank: every ``world``-th."""
        return cells[self.rank :: self.world]

    def agree(self, make: Callable[[], T]) -> T:
        """Call ``make`` on rank 0 and broadcast its result, or its error, to all ranks."""
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
        """Wait for all ranks; if any failed, raise an error on all that names them."""
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
    """Initialise the process group by RANK and WORLD_SIZE in the environment, if set."""
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
    """Reports errors of collectives as the end of another rank."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        raise GradtraceError(
            "another rank ended, or never started; rows that are written are kept, and the same "
            "command goes on from there"
        ) from error
