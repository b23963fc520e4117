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
from gradtrace.tracing.influence import Influence

Message = dict[str, Any]

PATIENCE = timedelta(minutes=10)
"""How long ranks may take to come together."""

BEAT = 15.0
"""Seconds from one sign of life to the next; they tell of machines that vanish from the network."""

SILENCE = timedelta(minutes=5)
"""How long a rank may give none."""

TAG = 1


def merged(tables: Iterable[Influence | None]) -> Influence | None:
    """The table of all pairs of several tables; None if there is none."""
    there = [table for table in tables if table is not None]
    return there[0].merge(*there[1:]) if there else None


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
def joined(group: Any = None) -> Iterator[ProcessGroup]:
    """The ranks of a group for the time of one measurement; ``chosen`` says which group.

    What is raised inside on one rank is raised on the others as RankFailed.
    """
    found = chosen(group)
    if found is None:
        yield ProcessGroup()
        return
    import torch.distributed as dist

    team = ProcessGroup(dist.get_rank(found), dist.get_world_size(found), _connected(found))
    try:
        yield team
    except BaseException as error:
        team.end(error)
        if isinstance(error, RankFailed):
            team.check()  # it may know more by now
        raise
    else:
        team.end(None)
    finally:
        team.close()


def _connected(group: Any) -> Any:
    """A gloo group of the same ranks, under a name of its own: the n-th time that they meet."""
    import torch.distributed as dist

    rank, world = dist.get_rank(group), dist.get_world_size(group)
    store = group.get_group_store()
    try:
        time = store.add(f"gradtrace/{rank}", 1)
        own = dist.distributed_c10d.PrefixStore(f"gradtrace/{time}", store)
        return dist.ProcessGroupGloo(own, rank, world, timeout=PATIENCE)
    except (RuntimeError, ValueError) as error:
        raise RankFailed(
            f"not all {world} ranks came together within {PATIENCE}: call this on every rank of "
            "the group, or with group=False to measure in this process alone"
        ) from error


class ProcessGroup:
    """A process among the others of its group; by itself it is rank 0 of one."""

    def __init__(self, rank: int = 0, world: int = 1, handle: Any = None) -> None:
        self.rank, self.world = rank, world
        self.halted = False
        self._changed = threading.Condition()
        self._said: dict[int, deque[Any]] = {}
        self._failed: dict[int, str] = {}
        self._interrupted = self._ended = False
        peers = range(1, world) if rank == 0 else (0,)
        self._lines = {peer: Connection(handle, peer) for peer in peers}
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

        Messages are what JSON can hold. What rank 0 refuses to decide, all refuse.
        """
        if self.rank == 0:
            self._until(lambda: bool(self._failed) or all(self._said.values()))
            self.check()
            try:
                verdict = decide([mine, *(said.popleft()["say"] for said in self._said.values())])
            except GradtraceError as error:
                self._tell({"refused": str(error)})
                raise
            self._tell({"verdict": verdict})
            return verdict
        self._lines[0].send({"say": mine})
        self._until(lambda: bool(self._failed or self._said[0]))
        if not self._said[0]:
            self.check()
        match self._said[0].popleft():
            case {"refused": str(text)}:
                raise GradtraceError(text)
            case {"verdict": answer}:
                return answer  # type: ignore[no-any-return]
        raise AssertionError("rank 0 says nothing else")

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
        elif error is not None and not self._failed:
            self._lines[0].send({"error": told(self.rank, error)})
        self._quiet.set()
        for thread in self._threads:
            thread.join(SILENCE.total_seconds())

    def close(self) -> None:
        """Let go of the connections, here and now.

        Were they left to the garbage collector, that of a loader's worker, forked later, might
        find its copies first, and wait for threads that a fork does not take along.
        """
        for line in self._lines.values():
            line.handle = None

    def check(self) -> None:
        """Raise what became of other ranks, if they failed."""
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
        self._tell({"halt": True})

    def _tell(self, message: Message) -> None:
        for line in self._lines.values():
            line.send(message)

    # Threads -------------------------------------------------------------------------------------

    def _beat(self) -> None:
        while not self._quiet.wait(BEAT):
            self._tell({"beat": True})

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
            case {"say": _} | {"verdict": _} | {"refused": _}:
                with self._changed:
                    self._said[peer].append(message)
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


class Connection:
    """A connection to one rank: messages as JSON, each with its length in front."""

    def __init__(self, handle: Any, peer: int) -> None:
        self.handle, self.peer = handle, peer
        self.open = True
        self._lock = threading.Lock()

    def send(self, message: Message, last: bool = False) -> None:
        """Send, unless the last message was sent; whether the other is gone, its listener finds."""
        body = torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8)
        with self._lock, suppress(RuntimeError):
            if not self.open or self.handle is None:
                return
            self.open = not last
            for part in (torch.tensor([len(body)]), body):
                self.handle.send([part], self.peer, TAG).wait(SILENCE)

    def receive(self) -> Message:
        """The next message, once it is there."""
        size = self._take(torch.zeros(1, dtype=torch.int64))
        body = self._take(torch.empty(int(size), dtype=torch.uint8))
        return json.loads(bytes(body.numpy()))  # type: ignore[no-any-return]

    def _take(self, into: torch.Tensor) -> torch.Tensor:
        self.handle.recv([into], self.peer, TAG).wait(SILENCE)
        return into
