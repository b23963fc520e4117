"""Processes that measure together: who they are, what they tell one another, and how they end.

Every rank of a ``torch.distributed`` group does its share by itself. Rank 0 hears the others, and
says what all of them conclude. They talk through a gloo group of their own, which is made for the
time of one measurement: it needs no GPU, does not meet the collectives of a training loop, and a
process that is killed is noticed at once, as its connection closes. Listeners are threads, so that
an error on one rank reaches the others in the middle of their work.
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
from gradtrace.influence import Influence

Message = dict[str, Any]

PATIENCE = timedelta(minutes=10)
"""How long ranks may take to come together."""

BEAT = 15.0
"""Seconds from one sign of life to the next; they tell of machines that vanish from the network."""

SILENCE = timedelta(minutes=5)
"""How long a rank may give none."""

TAG = 0x67726164


def merged(tables: Iterable[Influence | None]) -> Influence | None:
    """The table of all pairs of several tables; None if there is none."""
    there = [table for table in tables if table is not None]
    return there[0].merge(*there[1:]) if there else None


def merge(table: Influence | None, group: Any = None) -> Influence | None:
    """The table of all ranks of a group, on every one of them; a rank may have none.

    A collective of the group itself: all ranks must call it, as with ``all_gather``.
    """
    import torch.distributed as dist

    found: list[str | None] = [None] * dist.get_world_size(group)
    mine = None if table is None else json.dumps(table.to_dict())
    dist.all_gather_object(found, mine, group=group)
    return merged(None if text is None else Influence.from_dict(json.loads(text)) for text in found)


def chosen(group: Any) -> Any:
    """The process group that is meant: None is that of this program, if it has one; False is none.

    A group of one process is none.
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
def joined(group: Any = None) -> Iterator[Team]:
    """The ranks of a group for the time of one measurement; ``chosen`` says which group.

    What is raised inside on one rank is raised on the others as RankFailed.
    """
    found = chosen(group)
    if found is None:
        yield Team()
        return
    import torch.distributed as dist

    ranks = dist.get_process_group_ranks(found)
    handle = _connected(ranks)
    team = Team(dist.get_group_rank(found, dist.get_rank()), len(ranks), handle)
    try:
        yield team
    except BaseException as error:
        team.end(error)
        raise
    else:
        team.end(None)
    finally:
        dist.destroy_process_group(handle)


def _connected(ranks: list[int]) -> Any:
    import torch.distributed as dist

    try:
        return dist.new_group(
            ranks, timeout=PATIENCE, backend="gloo", use_local_synchronization=True
        )
    except (RuntimeError, ValueError) as error:
        raise RankFailed(
            f"not all {len(ranks)} ranks came together within {PATIENCE}: call this on every rank "
            "of the group, or with group=False to measure in this process alone"
        ) from error


class Team:
    """A process among the others of its group; by itself it is rank 0 of one."""

    def __init__(self, rank: int = 0, world: int = 1, handle: Any = None) -> None:
        self.rank, self.world = rank, world
        self.halted = False
        self._handle = handle
        self._changed = threading.Condition()
        self._said: dict[int, deque[Any]] = {}
        self._failed: dict[int, str] = {}
        self._interrupted = self._ended = False
        peers = range(1, world) if rank == 0 else (0,)
        self._lines = {peer: Line(handle, peer) for peer in peers}
        self._threads = [
            threading.Thread(target=self._listen, args=(peer,), daemon=True) for peer in peers
        ]
        self._quiet = threading.Event()
        if world > 1:
            self._said = {peer: deque() for peer in peers}
            self._threads.append(threading.Thread(target=self._beat, daemon=True))
        for thread in self._threads:
            thread.start()

    # What ranks do together ----------------------------------------------------------------------

    def meet(self, mine: Message, decide: Callable[[list[Message]], Message]) -> Message:
        """What rank 0 decides on what every rank has to say, in the order of ranks; on all ranks.

        Messages are what JSON can hold.
        """
        if self.rank == 0:
            self._until(lambda: bool(self._failed) or all(self._said.values()))
            self._check()
            verdict = decide([mine, *(said.popleft() for said in self._said.values())])
            for line in self._lines.values():
                line.send({"verdict": verdict})
            return verdict
        self._lines[0].send({"say": mine})
        self._until(lambda: bool(self._failed or self._said[0]))
        if not self._said[0]:
            self._check()
        return self._said[0].popleft()  # type: ignore[no-any-return]

    def interrupt(self) -> None:
        """Ask all ranks to stop after what they are at, and to come to the next meeting."""
        self._interrupted = True
        if self.rank == 0:
            self._halt()
        else:
            self.halted = True
            self._lines[0].send({"interrupt": True})

    def end(self, error: BaseException | None) -> None:
        """Leave the others; if this rank failed, they are told."""
        if self.rank == 0:
            text = None if error is None else told(0, error)
            for line in self._lines.values():
                line.send({"end": text}, last=True)
        elif error is not None and not isinstance(error, RankFailed):
            self._lines[0].send({"error": told(self.rank, error)})
        self._quiet.set()
        for thread in self._threads:
            thread.join(SILENCE.total_seconds())

    def _check(self) -> None:
        if self._failed:
            raise RankFailed("; ".join(self._failed[rank] for rank in sorted(self._failed)))

    def _until(self, there: Callable[[], bool]) -> None:
        """Wait; the first Ctrl-C meanwhile asks the others to stop, the second goes through."""
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
        for line in self._lines.values():
            line.send({"halt": True})

    # Threads -------------------------------------------------------------------------------------

    def _beat(self) -> None:
        while not self._quiet.wait(BEAT):
            for line in self._lines.values():
                line.send({"beat": True})

    def _listen(self, peer: int) -> None:
        line = self._lines[peer]
        try:
            while self._heard(peer, line.receive()):
                pass
        except Exception as error:  # whatever gloo has to say, the line is dead
            silent = "timed out" in str(error).lower()
            fate = (
                f"gave no sign of life for {SILENCE}"
                if silent
                else "ended without a word: it was killed, or its machine is gone"
            )
            line.open = False
            self._fail(peer, f"rank {peer} {fate}")

    def _heard(self, peer: int, message: Message) -> bool:
        """Take notice of a message; False if it is the last."""
        match message:
            case {"say": said} | {"verdict": said}:
                with self._changed:
                    self._said[peer].append(said)
                    self._changed.notify_all()
            case {"halt": _}:
                self.halted = True
            case {"interrupt": _}:
                self._halt()
            case {"error": str(text)}:
                self._lines[peer].send({"end": None}, last=True)
                self._fail(peer, text)
            case {"end": text}:
                self._lines[peer].send({"bye": True}, last=True)
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


def told(rank: int, error: BaseException) -> str:
    """An error in the words of the rank it is on."""
    if isinstance(error, RankFailed):
        return str(error)
    if isinstance(error, KeyboardInterrupt):
        return f"rank {rank} was stopped by Ctrl-C"
    kind = "" if isinstance(error, GradtraceError) else f"{type(error).__name__}: "
    return f"rank {rank}: {kind}{error}"


class Line:
    """A connection to one rank: messages as JSON, each with its length in front."""

    def __init__(self, handle: Any, peer: int) -> None:
        self.handle, self.peer = handle, peer
        self.open = True
        self._lock = threading.Lock()

    def send(self, message: Message, last: bool = False) -> None:
        """Send, unless the last message was sent; whether the other is gone, its listener finds."""
        import torch.distributed as dist

        body = torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8)
        with self._lock, suppress(RuntimeError):
            if not self.open:
                return
            self.open = not last
            for part in (torch.tensor([len(body)]), body):
                work = dist.isend(part, group=self.handle, group_dst=self.peer, tag=TAG)
                assert work is not None
                work.wait(SILENCE)

    def receive(self) -> Message:
        """The next message, once it is there."""
        size = self._take(torch.zeros(1, dtype=torch.int64))
        body = self._take(torch.empty(int(size), dtype=torch.uint8))
        return json.loads(bytes(body.numpy()))  # type: ignore[no-any-return]

    def _take(self, into: torch.Tensor) -> torch.Tensor:
        import torch.distributed as dist

        work = dist.irecv(into, group=self.handle, group_src=self.peer, tag=TAG)
        assert work is not None
        work.wait(SILENCE)
        return into
