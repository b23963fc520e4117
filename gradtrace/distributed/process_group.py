"""The ranks of one measurement: what they decide together, and what happens when one fails.

Every rank of a ``torch.distributed`` group does its share by itself. Rank 0 receives the others'
messages and decides for all (``meet``). Messages are handled in a thread, so an error on one rank
reaches the others while they are working.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch

from gradtrace.distributed import tuning
from gradtrace.distributed.rank_exchange import Message, RankExchange
from gradtrace.errors import GradtraceError, RankFailed, caution, reason_of
from gradtrace.io.stdout import stdout_is_stderr


def chosen(group: Any) -> Any:
    """Resolve the argument ``group``: None means the default group, if initialised; False no group.

    Returns None for "this process alone", also for a group of one process.
    """
    if group is False or not torch.distributed.is_available():
        return None
    import torch.distributed as dist

    if not dist.is_initialized():
        if group is None:
            return None
        raise GradtraceError("group was given, but torch.distributed is not initialised")
    if group is None:
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise GradtraceError(
            f"group is a {type(group).__name__}; pass a process group this process is in, None for "
            "all processes, or False for this one alone"
        )
    return group if dist.get_world_size(group) > 1 else None


@contextmanager
def launched() -> Iterator[int]:
    """Initialise ``torch.distributed`` as ``torchrun`` says in the environment; this rank."""
    world = os.environ.get("WORLD_SIZE", "1")
    if world == "1":
        yield 0
        return
    missing = [v for v in ("RANK", "MASTER_ADDR", "MASTER_PORT") if v not in os.environ]
    if missing:
        raise GradtraceError(
            f"WORLD_SIZE is {world}, but {' and '.join(missing)} not set: start with torchrun, or "
            "unset WORLD_SIZE to run in one process"
        )
    if not torch.distributed.is_available():
        raise GradtraceError("this torch was built without torch.distributed: run in one process")
    import torch.distributed as dist

    unknown = _unknown_host(os.environ["MASTER_ADDR"])
    if unknown:
        caution(unknown)
    try:
        with stdout_is_stderr():  # gloo of torch 2.9 prints whom it has connected
            dist.init_process_group("gloo", timeout=timedelta(seconds=tuning.START_SECONDS))
    except (RuntimeError, ValueError) as error:
        raise RankFailed(unknown or "another rank ended, or never started") from error
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()


def _unknown_host(name: str) -> str:
    """What to do about a host whose name does not resolve here; empty where it does."""
    try:
        socket.getaddrinfo(name, None)
    except OSError as error:
        return (
            f"rank 0 cannot be reached: its host {name!r} has no address here ({error.strerror}). "
            "On one machine start with torchrun --standalone --local-addr=127.0.0.1; on several, "
            "pass an address that all can reach as --rdzv-endpoint and as --local-addr"
        )
    return ""


@contextmanager
def joined(group: Any = None) -> Iterator[ProcessGroup]:
    """Connect the ranks of a group for the duration of one measurement; see ``chosen`` for which.

    An exception inside the context on one rank is raised on the others as RankFailed.
    """
    ranks = ProcessGroup(chosen(group))
    try:
        ranks.wait_for_all()
        yield ranks
    except BaseException as error:
        ranks.end(error)
        if isinstance(error, RankFailed):
            ranks.check()  # messages received meanwhile may name the cause
        raise
    else:
        ranks.end(None)


class ProcessGroup:
    """One rank of a group, seen from its process; alone (None), it is rank 0 of a group of one.

    ``halted`` is set when all ranks are to stop: on Ctrl-C, or when one of them failed. Ranks that
    ask for it (``stoppable``) do not end by a first Ctrl-C while they wait for others.
    """

    def __init__(self, group: Any = None) -> None:
        self._exchange = RankExchange(group, "measurement")
        self.rank, self.world = self._exchange.rank, self._exchange.world
        self.halted = self.stoppable = False
        peers = range(1, self.world) if self.rank == 0 else (0,)
        self._said: dict[int, deque[Message]] = {peer: deque() for peer in peers}
        self._failed: dict[int, str] = {}
        self._ended: set[int] = set()
        if self.world > 1:
            self._exchange.notify = self._take

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which decides, prints and writes what is of all."""
        return self.rank == 0

    def wait_for_all(self) -> None:
        """Wait until all ranks are connected."""
        exchange = self._exchange
        with exchange.changed:
            exchange.changed.wait_for(
                lambda: exchange.failed or exchange.all_joined, tuning.JOIN_SECONDS
            )
        if not exchange.all_joined:
            why = exchange.failed or f"within {timedelta(seconds=tuning.JOIN_SECONDS)}"
            raise RankFailed(
                f"not all {self.world} ranks came together ({why}): call this on every rank of the "
                "group, or with group=False to measure in this process alone"
            )

    def meet(self, mine: Message, decide: Callable[[list[Message]], Any]) -> Any:
        """Gather a message of every rank on rank 0, and return ``decide(messages)`` on all ranks.

        Messages are in the order of ranks, and JSON values. A GradtraceError in ``decide`` is
        raised on all ranks.
        """
        if not self.first:
            self._exchange.send({"say": mine})
        self._wait_for(lambda: bool(self._failed) or all(self._said.values()))
        if not self.first:
            return self._answer()
        self.check()
        try:
            verdict = decide([mine, *(said.popleft()["say"] for said in self._said.values())])
        except GradtraceError as error:
            self._exchange.send({"refused": reason_of(error)})
            raise
        self._exchange.send({"verdict": verdict})
        return verdict

    def _answer(self) -> Any:
        if not self._said[0]:
            self.check()
        answer = self._said[0].popleft()
        if "refused" in answer:
            raise GradtraceError(answer["refused"])
        return answer["verdict"]

    def interrupt(self) -> None:
        """Ask all ranks to stop after their current batch, and to go on to the next ``meet``."""
        self.stoppable = False
        self._halt()

    def end(self, error: BaseException | None) -> None:
        """Leave the group; if this rank failed with ``error``, send it to the others."""
        self._ended.update(self._said)  # they leave when they hear of it
        if error is not None and (self.first or not self._failed):
            self._exchange.send({"end": error_text(self.rank, error)})
        else:
            self._exchange.send({"end": None})
        self._exchange.close(tuning.SILENCE_SECONDS if self._exchange.joined else 0)
        self._exchange.notify = None

    def check(self) -> None:
        """Raise RankFailed if other ranks failed."""
        if self._failed:
            raise RankFailed("; ".join(self._failed[rank] for rank in sorted(self._failed)))

    def _wait_for(self, there: Callable[[], bool]) -> None:
        """Wait for a condition; Ctrl-C asks all ranks to stop, or is raised if it did before."""
        while True:
            try:
                with self._exchange.changed:
                    self._exchange.changed.wait_for(there)
                return
            except KeyboardInterrupt:
                if not self.stoppable:
                    raise
                self.interrupt()

    def _halt(self) -> None:
        self.halted = True
        self._exchange.send({"halt": True})

    # In the thread -------------------------------------------------------------------------------

    def _take(self) -> None:
        """Handle the messages that have arrived."""
        for rank, message in self._exchange.received():
            match message:
                case {"halt": _}:
                    if not self.halted:
                        self._halt()  # rank 0 passes it on
                case {"end": text}:
                    self._ended.add(rank)
                    if text is not None:
                        self._fail(rank, text)
                case {"gone": why}:
                    if rank not in self._ended:
                        why = why or "exited unexpectedly: it was killed, or its machine is gone"
                        self._fail(rank, f"rank {rank} {why}")
                case _:
                    self._said[rank].append(message)

    def _fail(self, rank: int, text: str) -> None:
        self._failed[rank] = text
        self._halt()


def error_text(rank: int, error: BaseException) -> str:
    """The text of an error on a rank, for the other ranks."""
    if isinstance(error, RankFailed):
        return reason_of(error)
    if isinstance(error, KeyboardInterrupt):
        return f"rank {rank} was stopped by Ctrl-C"
    kind = "" if isinstance(error, GradtraceError) else f"{type(error).__name__}: "
    return f"rank {rank}: {kind}{reason_of(error)}"
