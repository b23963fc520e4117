"""Processes that train one model together: what they tell each other, and nobody waits.

A Monitor must not hold up training, so there is no collective here: ranks may have different
numbers of steps, be slow, end early or be killed. Each process has a thread with a connection of
its own to the store of ``torch.distributed``; messages are left there and looked for now and then.
Others than the first process tell it what they found; it tells them which steps are to be traced.
"""

from __future__ import annotations

import json
import threading
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

Message = dict[str, Any]

SOON = 0.02
"""Seconds between two looks at the store where something is expected."""

SELDOM = 0.5
"""Seconds between two looks where nothing is."""

TOGETHER = 32
"""So many processes may look that often; of more each looks less often."""

TIMEOUT = timedelta(seconds=10)
"""How long the store may take to answer."""

PIECE = 1 << 20
"""The most bytes of a value: the store takes no more than 8 MiB."""

_numbers: Counter[str] = Counter()
"""How many there were in this process: the n-th ones of a name, in all processes, go together."""


class RankExchange:
    """A process among those of ``torch.distributed``; alone, if there are no others."""

    def __init__(self, called: str = "", together: bool | None = None) -> None:
        import torch.distributed as dist

        there = dist.is_available() and dist.is_initialized()
        self.rank, self.world = 0, 1
        self.line: RankThread | None = None
        if there and together is not False and dist.get_world_size() > 1:
            self.rank, self.world = dist.get_rank(), dist.get_world_size()
            store = dist.distributed_c10d._get_default_store()  # a group tells its own since 2.9
            _numbers[called] += 1
            prefix = f"gradtrace/monitor/{called}/{_numbers[called]}"
            self.line = RankThread(store, prefix, self.rank, self.world)

    @property
    def first(self) -> bool:
        """Whether this process is the one that writes."""
        return self.rank == 0

    @property
    def lead(self) -> float:
        """Seconds that a message from the first process may take to all others."""
        return 0.0 if self.line is None else 3 * self.line.pause

    def tell(self, message: Message) -> None:
        """Send a message: to the first process, or from it to all others."""
        if self.line is not None:
            self.line.tell(message)

    def heard(self) -> list[tuple[int, Message]]:
        """The messages that have come since the last time, each with its sender's rank."""
        return [] if self.line is None or not self.line.inbox else self.line.heard()

    def finish(self, seconds: float) -> None:
        """Wait until what was told is sent, but no longer than so many seconds."""
        if self.line is not None:
            self.line.finish(seconds)

    def close(self, seconds: float = 1.0) -> None:
        """Let go of the connection; what is not sent within so many seconds is lost."""
        if self.line is not None:
            self.line.close(seconds)


class RankThread:
    """The thread of one process, and what goes through it."""

    def __init__(self, store: Any, prefix: str, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self.pause = SOON * max(1.0, world / TOGETHER)
        self.eager = rank != 0  # whether something is expected
        self.inbox: deque[tuple[int, Message]] = deque()
        self.deliver: Callable[[], object] | None = None  # called when something has come
        self.failed = ""
        self._store, self._prefix = store, prefix
        self._outbox: deque[Message] = deque()
        self._sent = 0
        self._told = 0
        self._read = dict.fromkeys(range(1, world) if rank == 0 else (0,), 0)
        self._changed = threading.Condition()
        self._wake = threading.Event()
        self._over = False
        self._thread = threading.Thread(target=self._run, name="gradtrace", daemon=True)
        self._thread.start()

    def tell(self, message: Message) -> None:
        """Leave a message for the thread."""
        self._told += 1
        self._outbox.append(message)
        self._wake.set()

    def heard(self) -> list[tuple[int, Message]]:
        """What has come."""
        found = []
        with suppress(IndexError):
            while True:
                found.append(self.inbox.popleft())
        return found

    def finish(self, seconds: float) -> None:
        """Wait until all is sent."""
        with self._changed:
            self._changed.wait_for(lambda: self._sent >= self._told or self._over, seconds)

    def close(self, seconds: float) -> None:
        """Send what is left, and end the thread."""
        if threading.current_thread() is not self._thread:
            self.finish(seconds)
            self._over = True
            self._wake.set()
            self._thread.join(seconds)
        self._over = True

    # In the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            store = _connected(self._store, self._prefix)
            while not self._over:
                self._send(store)
                if self._receive(store) and self.deliver is not None:
                    self.deliver()
                self._wake.wait(self.pause if self.eager else max(SELDOM, self.pause))
                self._wake.clear()
            self._send(store)
        except Exception as error:  # whatever a store complains of, training goes on
            self.failed = f"{type(error).__name__}: {error}"
        finally:
            with self._changed:
                self._over = True
                self._store = None
                self._changed.notify_all()

    def _send(self, store: Any) -> None:
        while self._outbox:
            body = zlib.compress(json.dumps(self._outbox[0]).encode(), 1)
            pieces = [body[at : at + PIECE] for at in range(0, len(body), PIECE)]
            key = f"{self.rank}/{self._sent}"
            for n, piece in enumerate(pieces):
                store.set(f"{key}/{n}", piece)
            store.set(key, str(len(pieces)))
            if self.rank:
                store.add("told", 1)
            self._outbox.popleft()
            with self._changed:
                self._sent += 1
                self._changed.notify_all()

    def _receive(self, store: Any) -> bool:
        """Look for messages; whether there were any."""
        if self.rank == 0 and store.add("told", 0) == sum(self._read.values()):
            return False
        found = False
        for other in self._read:
            while store.check([f"{other}/{self._read[other]}"]):
                self.inbox.append((other, self._taken(store, f"{other}/{self._read[other]}")))
                self._read[other] += 1
                found = True
        return found

    def _taken(self, store: Any, key: str) -> Message:
        keys = [f"{key}/{n}" for n in range(int(store.get(key)))]
        body = b"".join(store.get(each) for each in keys)
        if self.rank == 0:  # nobody else reads these
            for each in (*keys, key):
                with suppress(RuntimeError, NotImplementedError):
                    store.delete_key(each)
        return json.loads(zlib.decompress(body))  # type: ignore[no-any-return]


def _connected(store: Any, prefix: str) -> Any:
    """The same store by a connection of its own: one that is in use makes others wait."""
    import torch.distributed as dist

    own = store.clone()
    own.set_timeout(TIMEOUT)
    return dist.distributed_c10d.PrefixStore(prefix, own)


def wait(until: Callable[[], bool], seconds: float) -> bool:
    """Look again and again whether something is so, for so many seconds at most."""
    last = time.monotonic() + seconds
    while not (done := until()) and time.monotonic() < last:
        time.sleep(SOON / 2)
    return done
