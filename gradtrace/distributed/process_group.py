"""The ranks of one measurement: messages between them, decisions by rank 0, and failure handling.

Every rank of a ``torch.distributed`` group does its share by itself. Rank 0 receives the others'
messages and decides for all. They communicate through a separate gloo group, which is made for the
duration of one measurement: it needs no GPU, does not interfere with the collectives of a training
loop, and a killed process is detected at once because its connection closes. Messages are received
in threads, so an error on one rank reaches the others while they are working.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch

from gradtrace.errors import GradtraceError, RankFailed
from gradtrace.tracing.influence import Influence

Message = dict[str, Any]

JOIN_TIMEOUT = timedelta(minutes=10)
"""How long to wait for all ranks to join."""

HEARTBEAT_SECONDS = 15.0
"""Seconds between two heartbeats, which detect machines that vanish from the network."""

SILENCE_TIMEOUT = timedelta(minutes=5)
"""A rank that sends nothing for this long counts as failed."""

TAG = 1


def merged(tables: Iterable[Influence | None]) -> Influence | None:
    """The table of all pairs of several tables; None if all of them are None."""
    there = [table for table in tables if table is not None]
    return there[0].merge(*there[1:]) if there else None


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
def joined(group: Any = None) -> Iterator[ProcessGroup]:
    """Connect the ranks of a group for the duration of one measurement; see ``chosen`` for which.

    An exception inside the context on one rank is raised on the others as RankFailed.
    """
    found = chosen(group)
    if found is None:
        yield ProcessGroup()
        return
    import torch.distributed as dist

    ranks = ProcessGroup(dist.get_rank(found), dist.get_world_size(found), _connected(found))
    try:
        yield ranks
    except BaseException as error:
        ranks.end(error)
        if isinstance(error, RankFailed):
            ranks.check()  # messages received meanwhile may name the cause
        raise
    else:
        ranks.end(None)
    finally:
        ranks.close()


def _connected(group: Any) -> Any:
    """A gloo group of the same ranks; its store prefix counts the groups made so far."""
    import torch.distributed as dist

    rank, world = dist.get_rank(group), dist.get_world_size(group)
    store = group.get_group_store()
    try:
        time = store.add(f"gradtrace/{rank}", 1)
        own = dist.distributed_c10d.PrefixStore(f"gradtrace/{time}", store)
        return dist.ProcessGroupGloo(own, rank, world, timeout=JOIN_TIMEOUT)
    except (RuntimeError, ValueError) as error:
        raise RankFailed(
            f"not all {world} ranks came together within {JOIN_TIMEOUT}: call this on every rank "
            "of the group, or with group=False to measure in this process alone"
        ) from error


class ProcessGroup:
    """One rank of a group, seen from its process; alone, it is rank 0 of a group of one.

    ``halted`` is set when all ranks are to stop: on Ctrl-C, or when one of them failed.
    """

    def __init__(self, rank: int = 0, world: int = 1, handle: Any = None) -> None:
        self.rank, self.world = rank, world
        self.halted = False
        self._changed = threading.Condition()
        self._inbox: dict[int, deque[Any]] = {}
        self._failed: dict[int, str] = {}
        self._interrupted = self._ended = False
        peers = range(1, world) if rank == 0 else (0,)
        self._connections = {peer: Connection(handle, peer) for peer in peers}
        self._threads = [
            threading.Thread(target=self._listen, args=(peer,), daemon=True) for peer in peers
        ]
        self._stop_heartbeat = threading.Event()
        if world > 1:
            self._inbox = {peer: deque() for peer in peers}
            self._threads.append(threading.Thread(target=self._beat, daemon=True))
        for thread in self._threads:
            thread.start()

    # Collective operations -----------------------------------------------------------------------

    def meet(self, mine: Message, decide: Callable[[list[Message]], Message]) -> Message:
        """Gather a message of every rank on rank 0, and return ``decide(messages)`` on all ranks.

        Messages are in the order of ranks, and JSON values. A GradtraceError in ``decide`` is
        raised on all ranks.
        """
        if self.rank == 0:
            self._wait_for(lambda: bool(self._failed) or all(self._inbox.values()))
            self.check()
            try:
                verdict = decide([mine, *(said.popleft()["say"] for said in self._inbox.values())])
            except GradtraceError as error:
                self._broadcast({"refused": str(error)})
                raise
            self._broadcast({"verdict": verdict})
            return verdict
        self._connections[0].send({"say": mine})
        self._wait_for(lambda: bool(self._failed or self._inbox[0]))
        if not self._inbox[0]:
            self.check()
        match self._inbox[0].popleft():
            case {"refused": str(text)}:
                raise GradtraceError(text)
            case {"verdict": answer}:
                return answer  # type: ignore[no-any-return]
        raise AssertionError("rank 0 says nothing else")

    def interrupt(self) -> None:
        """Ask all ranks to stop after their current batch, and to go on to the next ``meet``."""
        self._interrupted = True
        if self.rank == 0:
            self._halt()
        else:
            self.halted = True
            self._connections[0].send({"interrupt": True})

    def end(self, error: BaseException | None) -> None:
        """Leave the group; if this rank failed with ``error``, send it to the others."""
        if self.rank == 0:
            text = None if error is None else error_text(0, error)
            for connection in self._connections.values():
                connection.send({"end": text}, last=True)
        elif error is not None and not self._failed:
            self._connections[0].send({"error": error_text(self.rank, error)})
        self._stop_heartbeat.set()
        for thread in self._threads:
            thread.join(SILENCE_TIMEOUT.total_seconds())

    def close(self) -> None:
        """Drop the connections explicitly.

        If they were left to the garbage collector, a loader's worker that is forked later might
        collect its copies first, and wait for threads that do not exist after a fork.
        """
        for connection in self._connections.values():
            connection.handle = None

    def check(self) -> None:
        """Raise RankFailed if other ranks failed."""
        if self._failed:
            raise RankFailed("; ".join(self._failed[rank] for rank in sorted(self._failed)))

    def _wait_for(self, there: Callable[[], bool]) -> None:
        """Wait for a condition; a first Ctrl-C asks all ranks to stop, a second one is raised."""
        while True:
            try:
                with self._changed:
                    self._changed.wait_for(there)
                return
            except KeyboardInterrupt:
                if self._interrupted:
                    raise
                self.interrupt()

    def _halt(self) -> None:
        self.halted = True
        self._broadcast({"halt": True})

    def _broadcast(self, message: Message) -> None:
        for connection in self._connections.values():
            connection.send(message)

    # Threads -------------------------------------------------------------------------------------

    def _beat(self) -> None:
        while not self._stop_heartbeat.wait(HEARTBEAT_SECONDS):
            self._broadcast({"beat": True})

    def _listen(self, peer: int) -> None:
        connection = self._connections[peer]
        try:
            while self._handle(peer, connection.receive()):
                pass
        except Exception as error:  # any error of gloo means that the connection is gone
            silent = "timed out" in str(error).lower()
            fate = (
                f"gave no sign of life for {SILENCE_TIMEOUT}"
                if silent
                else "ended without a word: it was killed, or its machine is gone"
            )
            connection.open = False
            self._fail(peer, f"rank {peer} {fate}")

    def _handle(self, peer: int, message: Message) -> bool:
        """Handle a message; False if it is the last one of this peer."""
        match message:
            case {"say": _} | {"verdict": _} | {"refused": _}:
                with self._changed:
                    self._inbox[peer].append(message)
                    self._changed.notify_all()
            case {"halt": _}:
                self.halted = True
            case {"interrupt": _}:
                self._halt()
            case {"error": str(text)}:
                self._connections[peer].send({"end": None}, last=True)
                self._fail(peer, text)
            case {"end": text}:
                self._connections[peer].send({"bye": True}, last=True)
                if text is not None:
                    self._fail(peer, text)
                return False
            case {"bye": _}:
                return False
        return True

    def _fail(self, peer: int, text: str) -> None:
        with self._changed:
            self._failed[peer] = text
            self._changed.notify_all()
        if self.rank == 0:
            self._halt()
        self.halted = True


def error_text(rank: int, error: BaseException) -> str:
    """The text of an error on a rank, for the other ranks."""
    if isinstance(error, RankFailed):
        return str(error)
    if isinstance(error, KeyboardInterrupt):
        return f"rank {rank} was stopped by Ctrl-C"
    kind = "" if isinstance(error, GradtraceError) else f"{type(error).__name__}: "
    return f"rank {rank}: {kind}{error}"


class Connection:
    """A connection to one rank: messages as JSON, each preceded by its length."""

    def __init__(self, handle: Any, peer: int) -> None:
        self.handle, self.peer = handle, peer
        self.open = True
        self._lock = threading.Lock()

    def send(self, message: Message, last: bool = False) -> None:
        """Send a message, unless the last one was sent.

        Errors are ignored: the thread that receives from this peer detects that it is gone.
        """
        body = torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8)
        with self._lock, suppress(RuntimeError):
            if not self.open or self.handle is None:
                return
            self.open = not last
            for part in (torch.tensor([len(body)]), body):
                self.handle.send([part], self.peer, TAG).wait(SILENCE_TIMEOUT)

    def receive(self) -> Message:
        """Wait for the next message."""
        size = self._take(torch.zeros(1, dtype=torch.int64))
        body = self._take(torch.empty(int(size), dtype=torch.uint8))
        return json.loads(bytes(body.numpy()))  # type: ignore[no-any-return]

    def _take(self, into: torch.Tensor) -> torch.Tensor:
        self.handle.recv([into], self.peer, TAG).wait(SILENCE_TIMEOUT)
        return into
