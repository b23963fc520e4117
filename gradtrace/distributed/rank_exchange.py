"""Asynchronous messages between rank 0 and the other ranks of a training run.

A Monitor must not hold up training, so there are no collectives here: ranks may have different
numbers of steps, be slow, end early or be killed. Each process has a thread with its own connection
to the store of ``torch.distributed``; messages are written there, and polled for at intervals.
Other ranks send rank 0 their results; rank 0 sends them the steps that are to be traced.
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

POLL_SECONDS = 0.02
"""Seconds between two polls of the store while a message is expected."""

IDLE_POLL_SECONDS = 0.5
"""Seconds between two polls while none is expected."""

POLLING_RANKS = 32
"""With more ranks than this, each polls less often, so that the store's load stays the same."""

STORE_TIMEOUT = timedelta(seconds=10)
"""Timeout of one request to the store."""

VALUE_MAX_BYTES = 1 << 20
"""Messages are split into values of at most this many bytes: the store accepts up to 8 MiB."""

_numbers: Counter[str] = Counter()
"""How many exchanges of a name this process has made: the n-th of each process are connected."""


class RankExchange:
    """One rank's end of the exchange; without a thread if there is only one process.

    ``called`` is part of the key prefix in the store; ``enabled=False`` ignores other processes.
    """

    def __init__(self, called: str = "", enabled: bool | None = None) -> None:
        import torch.distributed as dist

        initialised = dist.is_available() and dist.is_initialized()
        self.rank, self.world = 0, 1
        self.thread: RankThread | None = None
        if initialised and enabled is not False and dist.get_world_size() > 1:
            self.rank, self.world = dist.get_rank(), dist.get_world_size()
            store = (
                dist.distributed_c10d._get_default_store()
            )  # groups give access to theirs since 2.9
            _numbers[called] += 1
            prefix = f"gradtrace/monitor/{called}/{_numbers[called]}"
            self.thread = RankThread(store, prefix, self.rank, self.world)

    @property
    def first(self) -> bool:
        """Whether this process is rank 0, which writes the run's file."""
        return self.rank == 0

    @property
    def lead(self) -> float:
        """Seconds that a message from rank 0 may take to reach all others."""
        return 0.0 if self.thread is None else 3 * self.thread.pause

    def send(self, message: Message) -> None:
        """Send a message: to rank 0, or from rank 0 to all others. Does not block."""
        if self.thread is not None:
            self.thread.send(message)

    def received(self) -> list[tuple[int, Message]]:
        """The messages that have arrived since the last call, each with its sender's rank."""
        return [] if self.thread is None or not self.thread.inbox else self.thread.received()

    def finish(self, seconds: float) -> None:
        """Wait until all messages are sent, for at most ``seconds``."""
        if self.thread is not None:
            self.thread.finish(seconds)

    def close(self, seconds: float = 1.0) -> None:
        """Close the connection; messages that are not sent within ``seconds`` are lost."""
        if self.thread is not None:
            self.thread.close(seconds)


class RankThread:
    """The thread of one process that sends and receives messages, with its queues."""

    def __init__(self, store: Any, prefix: str, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self.pause = POLL_SECONDS * max(1.0, world / POLLING_RANKS)
        self.eager = rank != 0  # whether a message is expected: poll often
        self.inbox: deque[tuple[int, Message]] = deque()
        self.deliver: Callable[[], object] | None = (
            None  # called in the thread after messages arrived
        )
        self.failed = ""
        self._store, self._prefix = store, prefix
        self._outbox: deque[Message] = deque()
        self._sent = 0
        self._queued = 0
        self._read = dict.fromkeys(range(1, world) if rank == 0 else (0,), 0)
        self._changed = threading.Condition()
        self._wake = threading.Event()
        self._over = False
        self._thread = threading.Thread(target=self._run, name="gradtrace", daemon=True)
        self._thread.start()

    def send(self, message: Message) -> None:
        """Queue a message for the thread to send."""
        self._queued += 1
        self._outbox.append(message)
        self._wake.set()

    def received(self) -> list[tuple[int, Message]]:
        """Take the received messages from the inbox."""
        found = []
        with suppress(IndexError):
            while True:
                found.append(self.inbox.popleft())
        return found

    def finish(self, seconds: float) -> None:
        """Wait until all queued messages are sent, for at most ``seconds``."""
        with self._changed:
            self._changed.wait_for(lambda: self._sent >= self._queued or self._over, seconds)

    def close(self, seconds: float) -> None:
        """Send the queued messages, and end the thread."""
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
                self._wake.wait(self.pause if self.eager else max(IDLE_POLL_SECONDS, self.pause))
                self._wake.clear()
            self._send(store)
        except Exception as error:  # a store may raise anything; training goes on
            self.failed = f"{type(error).__name__}: {error}"
        finally:
            with self._changed:
                self._over = True
                self._store = None
                self._changed.notify_all()

    def _send(self, store: Any) -> None:
        while self._outbox:
            body = zlib.compress(json.dumps(self._outbox[0]).encode(), 1)
            pieces = [
                body[at : at + VALUE_MAX_BYTES] for at in range(0, len(body), VALUE_MAX_BYTES)
            ]
            key = f"{self.rank}/{self._sent}"
            for n, piece in enumerate(pieces):
                store.set(f"{key}/{n}", piece)
            store.set(key, str(len(pieces)))
            if self.rank:
                store.add("sent", 1)
            self._outbox.popleft()
            with self._changed:
                self._sent += 1
                self._changed.notify_all()

    def _receive(self, store: Any) -> bool:
        """Poll the store once; whether messages arrived."""
        if self.rank == 0 and store.add("sent", 0) == sum(self._read.values()):
            return False
        found = False
        for other in self._read:
            while store.check([f"{other}/{self._read[other]}"]):
                self.inbox.append(
                    (other, self._take_message(store, f"{other}/{self._read[other]}"))
                )
                self._read[other] += 1
                found = True
        return found

    def _take_message(self, store: Any, key: str) -> Message:
        keys = [f"{key}/{n}" for n in range(int(store.get(key)))]
        body = b"".join(store.get(each) for each in keys)
        if self.rank == 0:  # only rank 0 reads these
            for each in (*keys, key):
                with suppress(RuntimeError, NotImplementedError):
                    store.delete_key(each)
        return json.loads(zlib.decompress(body))  # type: ignore[no-any-return]


def _connected(store: Any, prefix: str) -> Any:
    """The same store with a separate connection: requests on a shared one wait for each other."""
    import torch.distributed as dist

    own = store.clone()
    own.set_timeout(STORE_TIMEOUT)
    return dist.distributed_c10d.PrefixStore(prefix, own)


def wait(until: Callable[[], bool], seconds: float) -> bool:
    """Poll ``until`` for at most ``seconds``; its last value."""
    last = time.monotonic() + seconds
    while not (done := until()) and time.monotonic() < last:
        time.sleep(POLL_SECONDS / 2)
    return done
